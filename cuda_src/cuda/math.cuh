// The exponential and the logistic function, as accurate as results of type T require.
//
// At 4.26 TB/s an H200 has about 30 issue slots for each 16-bit element that is read and written, and 60 for each
// 32-bit element. So results of 16 bits use the hardware's approximate exponential and reciprocal, one instruction
// each; wider results use CUDA's math library.
#pragma once
#include "vector.cuh"

namespace aot {
inline namespace AOT_ISA {

constexpr double kLog2E = 1.4426950408889634;

__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// e^x
template <typename T, typename A>
__device__ __forceinline__ A exponential(A x) {
  if constexpr (sizeof(T) == 2) return fast_exp2(x * static_cast<float>(kLog2E));
  else if constexpr (sizeof(T) == 4) return expf(x);
  else return exp(x);
}

// 1 / (1 + e^a) for a >= 0, which is sigmoid(-a): relatively accurate where it is small.
template <typename T, typename A>
__device__ __forceinline__ A sigmoid_tail(A a) {
  if constexpr (sizeof(T) == 2) {
    return fast_reciprocal(1 + fast_exp2(a * static_cast<float>(kLog2E)));
  } else if constexpr (sizeof(T) == 4) {
    // The hardware's reciprocal of 1 <= d <= 2 and a Newton step: a division would be a branch and a call.
    float e = expf(-a), d = 1 + e, r = fast_reciprocal(d);
    return e * fmaf(r, fmaf(-d, r, 1.0f), r);
  } else {
    return 1 / (1 + exp(a));
  }
}

// 1 / (1 + e^-x)
template <typename T, typename A>
__device__ __forceinline__ A sigmoid(A x) {
  if constexpr (sizeof(T) == 2) {
    return fast_reciprocal(1 + fast_exp2(x * static_cast<float>(-kLog2E)));
  } else {
    A tail = sigmoid_tail<T>(abs(x));
    return x < 0 ? tail : 1 - tail;
  }
}

// The logistic function s and its derivative s (1 - s), from the smaller of s and 1 - s, which avoids cancellation.
template <typename A>
struct Logistic {
  A value, slope;
};
template <typename T, typename A>
__device__ __forceinline__ Logistic<A> logistic(A x) {
  if constexpr (sizeof(T) == 2) {
    A s = sigmoid<T>(x);
    return {s, s - s * s};
  } else {
    A tail = sigmoid_tail<T>(abs(x));
    return {x < 0 ? tail : 1 - tail, tail - tail * tail};
  }
}

}  // namespace AOT_ISA
}  // namespace aot
