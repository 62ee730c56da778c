// The exponential and the logistic function, as exact as a result of type T can show.
//
// At 4.26 TB/s an H200 has some 30 issue slots for an element of 16 bits read and written, and 60 for one of 32. So
// what is rounded to 16 bits comes from the hardware's own exponential and reciprocal, one instruction each, and the
// rest from the mathematical library.
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

// 1 / (1 + e^a) for a >= 0: sigmoid(-a), to its last digits where it is small.
template <typename T, typename A>
__device__ __forceinline__ A sigmoid_tail(A a) {
  if constexpr (sizeof(T) == 2) {
    return fast_reciprocal(1 + fast_exp2(a * static_cast<float>(kLog2E)));
  } else if constexpr (sizeof(T) == 4) {
    // The hardware's reciprocal of 1 <= d <= 2 and a step of Newton's: a division would be a branch and a call.
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

// The logistic function and its slope, s (1 - s), which is that of the smaller of s and 1 - s: so it keeps its digits.
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
