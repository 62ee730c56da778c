// Sums over the threads that share a row: lanes of a warp, then warps of a block, then blocks of a cluster. Every
// thread gets the same bits, whatever the order in which threads arrive.
#pragma once
#include <cstdint>

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

// Where block `rank` of the cluster has what this block has at `shared`.
template <typename V>
__device__ inline V *in_block(V *shared, int rank) {
#if __CUDA_ARCH__ >= 900
  uint64_t there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(shared), "r"(rank));
  return reinterpret_cast<V *>(there);
#else
  return shared;
#endif
}

// --------------------------------------------------------------------------------------------------------- exchange

// Lets each warp of a row tell one value to all of them. An exchange takes one barrier: two sets of slots take turns,
// and nobody writes to a set again before all have passed the next barrier, and so have read what was there.
template <Span kSpan, typename V>
class Exchange {
  static_assert(kSpan != Span::warp, "lanes of a warp need no shared memory");

 public:
  __device__ Exchange() : turn_(0) {
    __shared__ V slots[2 * kSlots];
    slots_ = slots, blocks_ = 1, rank_ = 0;
    if constexpr (kSpan == Span::cluster) {
      blocks_ = cluster_size(), rank_ = cluster_rank();
      cluster_barrier();  // the other blocks' shared memory may be written once they have begun
    }
  }

  __device__ int block_warps() const { return blockDim.x / 32; }
  __device__ int warps() const { return blocks_ * block_warps(); }
  __device__ int warp() const { return rank_ * block_warps() + warp_index(); }

  // What all warps of the row told, in their order. `mine` is the same in all lanes.
  __device__ const V *all(const V &mine) {
    V *slots = slots_ + turn_ * kSlots;
    turn_ ^= 1;
    if constexpr (kSpan == Span::cluster) {
      if (lane_index() < blocks_) *in_block(slots + warp(), lane_index()) = mine;
      cluster_barrier();
    } else {
      if (lane_index() == 0) slots[warp()] = mine;
      __syncthreads();
    }
    return slots;
  }

 private:
  static constexpr int kSlots = kMaxBlockWarps * (kSpan == Span::cluster ? kMaxCluster : 1);
  V *slots_;
  int blocks_, rank_, turn_;
};

struct NoExchange {};

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

template <Span kSpan, int kSums, typename A>
__device__ inline Sums<kSums, A> sum_row(Sums<kSums, A> sums, Exchange<kSpan, Sums<kSums, A>> &exchange) {
  const Sums<kSums, A> *all = exchange.all(sum_lanes<32>(sums));
  sums = {};
#pragma unroll 1
  for (int w = lane_index(); w < exchange.warps(); w += 32)
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums.value[i] += all[w].value[i];
  return sum_lanes<32>(sums);
}

}  // namespace AOT_ISA
}  // namespace aot
