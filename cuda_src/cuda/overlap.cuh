// Two kernels in a row of which the second begins while the first one ends: its blocks are launched and wait where it
// says so. Before compute capability 9.0 it begins when the first has ended.
#pragma once
#include "launch.cuh"

namespace aot {
inline namespace AOT_ISA {

// In the first kernel: from here on, if all of its blocks have come here or ended, the second may be launched.
__device__ inline void launch_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// In the second: waits until the first has ended and its results can be read.
__device__ inline void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace AOT_ISA
}  // namespace aot
