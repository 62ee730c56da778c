// Programmatic dependent launch: the second of two kernels starts while the first one drains, and waits where it needs
// the first one's results. Before compute capability 9.0 it starts when the first has ended.
#pragma once
#include "launch.cuh"

namespace aot {
inline namespace AOT_ISA {

// In the first kernel: the second may start once all blocks have called this or have ended. Where the second one reads,
// before it waits, what older kernels of the operator wrote, the first one waits before it calls this. Products of
// gemm_unaligned_sm90.cu never precede such a kernel: a warpgroup of CUTLASS's without a tile calls this at once.
__device__ inline void launch_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// In the second kernel: waits until the first has ended and its results are visible.
__device__ inline void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Whether a kernel of this many blocks shall overlap. On an H200 a kernel that may overlap starts at most 0.82 blocks a
// nanosecond, launched so or not, for which many small blocks would wait (docs/lab_notes.md).
inline bool overlaps(int64_t blocks) { return blocks <= 1024; }

}  // namespace AOT_ISA
}  // namespace aot
