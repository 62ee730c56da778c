// The activations of an epilogue, chosen at run time, and their gradients.
#pragma once
#include "cuda/gelu.cuh"
#include "cuda/math.cuh"
#include "matrix.h"

namespace aot {
inline namespace AOT_ISA {

// T: the type that is stored, whose precision suffices; A: the type of the computation. CUTLASS's epilogues state
// __half for bfloat16 too, so that their GELU is right down to -7, below which it is smaller than 1e-11.
template <typename T, typename A>
__device__ __forceinline__ A activate(A x, Activation activation) {
  switch (activation) {
    case kActivationRelu:
      return x < 0 ? A(0) : x;  // NaN stays NaN
    case kActivationGelu:
      return gelu<T, false>(x);
    case kActivationGeluTanh:
      return gelu<T, true>(x);
    case kActivationSilu:
      return x * sigmoid<T>(x);
    default:
      return x;
  }
}

// dy * activation'(x). relu'(NaN) is 1; where relu' is 0, the result is 0 even if dy is not finite.
template <typename T, typename A>
__device__ __forceinline__ A activation_gradient(A dy, A x, Activation activation) {
  switch (activation) {
    case kActivationRelu:
      return x <= 0 ? A(0) : dy;
    case kActivationGelu:
      return dy * gelu_slope<T, false>(x);
    case kActivationGeluTanh:
      return dy * gelu_slope<T, true>(x);
    case kActivationSilu: {
      Logistic<A> s = logistic<T>(x);
      return dy * (s.value + x * s.slope);
    }
    default:
      return dy;
  }
}

}  // namespace AOT_ISA
}  // namespace aot
