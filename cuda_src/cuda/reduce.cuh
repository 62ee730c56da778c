// Sums over the threads that share a row: lanes of a warp, then warps of a block, then blocks of a cluster. Every
// thread gets the same bits, whatever the order in which threads arrive.
#pragma once
#include <cstdint>

#include "async.cuh"

namespace aot {
inline namespace AOT_ISA {

// What a row is spread over: some or all lanes of a warp, the warps of a block, the blocks of a cluster.
enum class Span { warp, block, cluster };

constexpr int kMaxCluster = 8;  // what every device with clusters grants
constexpr int kMaxBlockWarps = 32;

__device__ inline int lane_index() { return threadIdx.x % 32; }
__device__ inline int warp_index() { return threadIdx.x / 32; }

// ----------------------------------------------------------------------------------------------------------- lanes

// Over kLanes neighbouring lanes, a power of two. A butterfly: each step adds the same two numbers on both sides.
template <int kLanes, typename A>
__device__ inline A sum_lanes(A value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}

// ---------------------------------------------------------------------------------------------------------- cluster

// Clusters are of compute capability 9.0; a launcher never asks an older device for them.
__device__ inline int cluster_rank() {
  unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return static_cast<int>(rank);
}
__device__ inline int cluster_size() {
  unsigned size = 1;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
#endif
  return static_cast<int>(size);
}
__device__ inline void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// ----------------------------------------------------------------------------------------------------------- mailbox

// Words sent to a block of the cluster, each counted by a barrier of that block: whoever waits there waits for them and
// for nothing else. A barrier of the whole cluster would also wait for each thread's stores to global memory.
#if __CUDA_ARCH__ >= 900
// Where block `rank` has what this block has at the address.
__device__ inline uint32_t in_block(uint32_t address, int rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ inline void mail_init(uint64_t *barrier) {
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(shared_address(barrier))
      : "memory");
}
// One thread of the block says how many bytes are to come.
__device__ inline void mail_expect(uint64_t *barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
template <typename V>
__device__ inline void mail_send(const V *slot, const V &value, const uint64_t *barrier, int rank) {
  static_assert(sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16, "a row of the instruction for each");
  const uint32_t *word = reinterpret_cast<const uint32_t *>(&value);
  uint32_t to = in_block(shared_address(slot), rank), there = in_block(shared_address(barrier), rank);
  if constexpr (sizeof(V) == 4)
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %2, [%1];" ::"r"(to), "r"(there),
                 "r"(word[0])
                 : "memory");
  else if constexpr (sizeof(V) == 8)
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%2, %3}, [%1];" ::"r"(to),
                 "r"(there), "r"(word[0]), "r"(word[1])
                 : "memory");
  else
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(to),
                 "r"(there), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                 : "memory");
}
__device__ inline void mail_wait(uint64_t *barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "again:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}" ::"r"(
          shared_address(barrier)),
      "r"(parity)
      : "memory");
}
#else
__device__ inline void mail_init(uint64_t *) {}
__device__ inline void mail_expect(uint64_t *, int) {}
template <typename V>
__device__ inline void mail_send(const V *, const V &, const uint64_t *, int) {}
__device__ inline void mail_wait(uint64_t *, uint32_t) {}
#endif

// --------------------------------------------------------------------------------------------------------- exchange

// Lets each warp of a row tell one value to all of them. Sets of slots take turns. With two, a value is told and heard
// before the next is: nobody writes to a set again before all have told the value after it, and so have read what was
// there. With four, the next value may be told before this one is heard.
//
// A block has one row, or, if it is told of how many warps, as many rows at once as it has such teams of warps.
template <Span kSpan, typename V, int kSets = 2>
class Exchange {
  static_assert(kSpan != Span::warp, "lanes of a warp need no shared memory");
  static_assert(kSets == 2 || kSpan == Span::cluster, "a block's barrier comes with the telling");

 public:
  __device__ Exchange() : Exchange(blockDim.x / 32) {}
  __device__ explicit Exchange(int row_warps) : row_warps_(row_warps), team_(warp_index() / row_warps) {
    __shared__ alignas(16) V slots[kSets * kSlots];
    slots_ = slots + team_ * row_warps;
    if constexpr (kSpan == Span::cluster) {
      __shared__ uint64_t barriers[kSets];
      barriers_ = barriers, blocks_ = cluster_size(), rank_ = cluster_rank();
      if (threadIdx.x == 0)
#pragma unroll
        for (uint64_t &barrier : barriers) mail_init(&barrier);
      cluster_barrier();  // the other blocks' shared memory may be written once they have begun
    }
  }

  __device__ int warps() const { return blocks_ * row_warps_; }
  __device__ int warp() const { return rank_ * row_warps_ + warp_index() - team_ * row_warps_; }

  // `mine` is the same in all lanes.
  __device__ void tell(const V &mine) {
    V *slots = set(told_);
    if constexpr (kSpan == Span::cluster) {
      uint64_t *barrier = &barriers_[told_ % kSets];
      if (threadIdx.x == 0) mail_expect(barrier, warps() * static_cast<int>(sizeof(V)));
      if (lane_index() < blocks_) mail_send(slots + warp(), mine, barrier, lane_index());
    } else {
      if (lane_index() == 0) slots[warp()] = mine;
    }
    ++told_;
  }
  // What all warps of the row told, in their order.
  __device__ const V *hear() {
    const V *slots = set(heard_);
    if constexpr (kSpan == Span::cluster)
      mail_wait(&barriers_[heard_ % kSets], heard_ / kSets % 2);  // a set's barrier has a phase each time it is used
    else if (row_warps_ == blockDim.x / 32) __syncthreads();
    else asm volatile("bar.sync %0, %1;" ::"r"(1 + team_), "r"(32 * row_warps_) : "memory");
    ++heard_;
    return slots;
  }
  __device__ const V *all(const V &mine) {
    tell(mine);
    return hear();
  }

 private:
  // or half as many warps in twice the blocks
  static constexpr int kSlots = kMaxBlockWarps * (kSpan == Span::cluster ? kMaxCluster : 1);
  __device__ V *set(uint32_t turn) { return slots_ + turn % kSets * kSlots; }

  V *slots_;
  uint64_t *barriers_ = nullptr;
  int row_warps_, team_, blocks_ = 1, rank_ = 0;
  uint32_t told_ = 0, heard_ = 0;
};

struct NoExchange {
  __device__ explicit NoExchange(int = 0) {}
};

// Several sums, each over all threads of the row, in one exchange.
template <int kSums, typename A>
struct Sums {
  A value[kSums];
};

template <int kLanes, int kSums, typename A>
__device__ inline Sums<kSums, A> sum_lanes(Sums<kSums, A> sums) {
#pragma unroll
  for (A &sum : sums.value) sum = sum_lanes<kLanes>(sum);
  return sums;
}

// Of what each warp told.
template <int kSums, typename A>
__device__ inline Sums<kSums, A> combine_sums(const Sums<kSums, A> *all, int warps) {
  Sums<kSums, A> sums = {};
#pragma unroll 1
  for (int w = lane_index(); w < warps; w += 32)
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums.value[i] += all[w].value[i];
  return sum_lanes<32>(sums);
}

template <Span kSpan, int kSums, typename A>
__device__ inline Sums<kSums, A> sum_row(Sums<kSums, A> sums, Exchange<kSpan, Sums<kSums, A>> &exchange) {
  return combine_sums(exchange.all(sum_lanes<32>(sums)), exchange.warps());
}

}  // namespace AOT_ISA
}  // namespace aot
