// CUTLASS's kernels for Ampere and later, in a library that also has code for earlier GPUs.
#pragma once
#include <cutlass/cutlass.h>

namespace aot {
inline namespace AOT_ISA {

// The kernel of that type. Before Ampere it is empty: the library does not run it there, and CUTLASS would compile
// instructions that such GPUs lack to loops of messages, which take more space than the kernel itself.
template <class Kernel>
struct FromSm80 : Kernel {
  using Params = typename Kernel::Params;
  using SharedStorage = typename Kernel::SharedStorage;

  CUTLASS_DEVICE void operator()(const Params &params, SharedStorage &shared) { run(params, shared); }
  CUTLASS_DEVICE static void invoke(const Params &params, SharedStorage &shared) { run(params, shared); }

 private:
  CUTLASS_DEVICE static void run(const Params &params, SharedStorage &shared) {
#if __CUDA_ARCH__ >= 800
    Kernel kernel;
    kernel(params, shared);
#endif
  }
};

}  // namespace AOT_ISA
}  // namespace aot
