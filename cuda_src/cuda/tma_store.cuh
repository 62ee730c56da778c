// Stores of boxes of shared memory to tensors by TMA, which run while the block computes: compute capability 9.0.
// Elements of a box that lie outside of the tensor are not written. tma.cuh describes boxes and tensor maps.
#pragma once
#include "tma.cuh"

namespace aot {
inline namespace AOT_ISA {

#if __CUDA_ARCH__ >= 900
// Makes a thread's own writes to shared memory visible to TMA, after a barrier.
__device__ inline void show_to_tma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Stores a box to a tensor from these indices on, the last axis first.
__device__ inline void tma_store(const CUtensorMap &map, uint32_t from, int c, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map), "r"(from),
               "r"(c), "r"(row)
               : "memory");
}
// Stores a box of pixels (n, h, w, channels), which go on in the next row and image: the map is of im2col mode.
__device__ inline void tma_store_pixels(const CUtensorMap &map, uint32_t from, int c, int w, int h, int n) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.im2col_no_offs.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
      "r"(from), "r"(c), "r"(w), "r"(h), "r"(n)
      : "memory");
}
// Ends a group of a thread's stores, which may be none.
__device__ inline void end_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all but the latest kPending groups have read their boxes.
template <int kPending>
__device__ inline void wait_for_reads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
__device__ inline void wait_for_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
#endif

}  // namespace AOT_ISA
}  // namespace aot
