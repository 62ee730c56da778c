// Reductions over the threads that share a row: lanes of a warp, then warps of a block, then blocks of a cluster. Every
// thread gets the same bits, whatever the order in which threads arrive.
#pragma once
#include <cstdint>

#include "mbarrier.cuh"

namespace aot {
inline namespace AOT_ISA {

// The threads that a row is spread over: some or all lanes of a warp, the warps of a block, the blocks of a cluster.
enum class Span { warp, block, cluster };

constexpr int kMaxCluster = 8;  // blocks; the portable limit, which every device with clusters grants
constexpr int kMaxBlockWarps = 32;

__device__ inline int lane_index() { return threadIdx.x % 32; }
__device__ inline int warp_index() { return threadIdx.x / 32; }

// ----------------------------------------------------------------------------------------------------------- lanes

// Over kLanes neighbouring lanes, a power of two. The butterfly gives every lane the same bits: addition is
// commutative.
template <int kLanes, typename A>
__device__ inline A sum_lanes(A value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}

// ---------------------------------------------------------------------------------------------------------- cluster

// Clusters need compute capability 9.0; on older devices launchers use none. A kernel with them is compiled to a trap
// there, which takes no space.
__device__ inline int cluster_rank() {
  unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#else
  __trap();
#endif
  return static_cast<int>(rank);
}
__device__ inline int cluster_size() {
  unsigned size = 1;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
#else
  __trap();
#endif
  return static_cast<int>(size);
}
__device__ inline void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __trap();
#endif
}
// The two halves of a barrier that publishes nothing but what mbarrier_init_fence() does: with a release, a thread
// waits for a fence of global memory behind the loads that it has in flight.
__device__ inline void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#else
  __trap();
#endif
}
__device__ inline void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// --------------------------------------------------------------------------------------------------------- exchange

// All-gather of one value per warp of a row: publish() writes this warp's value, collect() waits for all of them. In a
// cluster a value goes to each block by st.async, and only its arrival is awaited: a barrier of the cluster would also
// wait for each thread's stores to global memory.
//
// Values alternate between kSets sets of slots. With two sets, a value must be collected before the next is published:
// all warps have then read a set before any warp publishes to it again. With four, the next value may be published
// before this one is collected.
//
// A block has one row, or, given the warps of a row, as many rows at once as it has teams of that many warps.
template <Span kSpan, typename V, int kSets = 2>
class Exchange {
  static_assert(kSpan != Span::warp, "lanes of a warp need no shared memory");
  static_assert(kSets == 2 || kSpan == Span::cluster,
                "within a block, collect() is a barrier, and so two sets suffice");

 public:
  __device__ Exchange() : Exchange(blockDim.x / 32) {}
  __device__ explicit Exchange(int row_warps) : Exchange(row_warps, warp_index() / row_warps) {}
  __device__ Exchange(int row_warps, int team) : row_warps_(row_warps), team_(team) {
    __shared__ alignas(16) V slots[kSets * kSlots];
    slots_ = slots + team_ * row_warps;
    if constexpr (kSpan == Span::cluster) {
      __shared__ uint64_t barriers[kSets];
      barriers_ = barriers, blocks_ = cluster_size(), rank_ = cluster_rank();
      if (threadIdx.x == 0)
#pragma unroll
        for (uint64_t &barrier : barriers) mbarrier_init(&barrier, 1), mbarrier_init_fence();
      cluster_arrive_relaxed();
    }
  }

  __device__ int warps() const { return blocks_ * row_warps_; }
  __device__ int warp() const { return rank_ * row_warps_ + warp_index() - team_ * row_warps_; }

  // `mine` must be the same in all lanes.
  __device__ void publish(const V &mine) {
    V *slots = set(published_);
    if constexpr (kSpan == Span::cluster) {
      if (published_ == 0) cluster_wait();  // a block's shared memory may be written once it has started
      uint64_t *barrier = &barriers_[published_ % kSets];
      if (threadIdx.x == 0) mbarrier_expect(barrier, warps() * static_cast<int>(sizeof(V)));
      if (lane_index() < blocks_) store_async(slots + warp(), mine, barrier, lane_index());
    } else {
      if (lane_index() == 0) slots[warp()] = mine;
    }
    ++published_;
  }
  // The values of all warps of the row, in the order of warp().
  __device__ const V *collect() {
    const V *slots = set(collected_);
    if constexpr (kSpan == Span::cluster)
      mbarrier_wait_cluster(&barriers_[collected_ % kSets], collected_ / kSets % 2);  // one phase for each use of a set
    else if (row_warps_ == blockDim.x / 32) __syncthreads();
    else if (row_warps_ == 1) __syncwarp();  // of such teams a block may have 16, and there are named barriers 1 to 15
    else asm volatile("bar.sync %0, %1;" ::"r"(1 + team_), "r"(32 * row_warps_) : "memory");
    ++collected_;
    return slots;
  }
  __device__ const V *all(const V &mine) {
    publish(mine);
    return collect();
  }

 private:
  // also enough for clusters of twice as many blocks, whose blocks have half as many warps
  static constexpr int kSlots = kMaxBlockWarps * (kSpan == Span::cluster ? kMaxCluster : 1);
  __device__ V *set(uint32_t index) { return slots_ + index % kSets * kSlots; }

  V *slots_;
  uint64_t *barriers_ = nullptr;
  int row_warps_, team_, blocks_ = 1, rank_ = 0;
  uint32_t published_ = 0, collected_ = 0;
};

struct NoExchange {
  __device__ explicit NoExchange(int = 0, int = 0) {}
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

// Adds the sums that each warp published.
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
