// Clusters of two blocks, each of which loads half of what both read: TMA writes it to both. Compute capability 9.0.
#pragma once
#include "reduce.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

namespace aot {
inline namespace AOT_ISA {

constexpr int kPair = 2;

#if __CUDA_ARCH__ >= 900
// Load as tma_load does, to the same address in both blocks, whose barriers each count the bytes.
__device__ inline void tma_load_for_pair(const CUtensorMap &map, uint32_t to, uint64_t *barrier, int c, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(&map), "r"(shared_address(barrier)), "r"(c), "r"(row), "h"(uint16_t(3))
      : "memory");
}
__device__ inline void tma_load_for_pair(const CUtensorMap &map, uint32_t to, uint64_t *barrier, int c, int k,
                                         int row) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(&map), "r"(shared_address(barrier)), "r"(c), "r"(k), "r"(row), "h"(uint16_t(3))
      : "memory");
}

// Without the scope of the cluster, with which the compiler makes a barrier of the GPU's memory of it, once a step of a
// product: what arrives has read, and written nothing.
__device__ inline void arrive_in_block(uint64_t *barrier, int rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in_block(shared_address(barrier), rank))
               : "memory");
}
#endif

// The stage of a step, and how often it was used before.
template <int kStages>
struct RingPlace {
  int stage = 0, round = 0;
  __device__ void next() {
    if (++stage == kStages) stage = 0, ++round;
  }
};

// Warpgroups of a block that multiply; one more loads.
constexpr int kPairGroups = 2, kPairThreads = (kPairGroups + 1) * 128;
constexpr int kRegistersOfProducts = 232, kRegistersOfLoads = 40;  // 504 of three threads

#ifdef CUTE_ARCH_MMA_SM90A_ENABLED
// The frame of a product whose blocks are pairs: a thread fills the stages of `shared`, and the warpgroups empty each
// by so many arrivals, of both blocks.
template <class Block, class Parameters, class Shared>
__device__ void run_pair(const Parameters &p, Shared &shared, int arrivals) {
  if (threadIdx.x == 0) {
    constexpr int kStages = std::extent_v<decltype(Shared::full)>;
    for (int i = 0; i < kStages; ++i) mbarrier_init(&shared.full[i], 1), mbarrier_init(&shared.empty[i], arrivals);
    mbarrier_init_fence();
  }
  __syncthreads();
  cluster_barrier();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);  // the same in a warp, for the compiler
  const Block block{p, shared, static_cast<int>(blockIdx.x) % kPair};
  if (group < kPairGroups) {
    take_registers<kRegistersOfProducts>();
    block.compute_items(group);
  } else {
    give_registers<kRegistersOfLoads>();
    if (threadIdx.x == kPairGroups * 128) block.load_items();
    __syncwarp();
  }
  cluster_barrier();  // the other block arrives at this one's barriers
}
#endif

}  // namespace AOT_ISA
}  // namespace aot
