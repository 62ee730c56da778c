// The activations that may follow a matrix product, chosen at run time, and their slopes.
#pragma once
#include "../matrix.h"
#include "gelu.cuh"
#include "math.cuh"

namespace aot {
inline namespace AOT_ISA {

// T is what is written, A what is computed in.
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

template <typename T, typename A>
__device__ __forceinline__ A activation_slope(A x, Activation activation) {
  switch (activation) {
    case kActivationRelu:
      return x > 0 ? A(1) : A(0);
    case kActivationGelu:
      return gelu_slope<T, false>(x);
    case kActivationGeluTanh:
      return gelu_slope<T, true>(x);
    case kActivationSilu: {
      A s = sigmoid<T>(x);
      return s + x * (s - s * s);
    }
    default:
      return A(1);
  }
}

}  // namespace AOT_ISA
}  // namespace aot
