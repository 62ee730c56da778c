// GELU and its derivative, the slope.
#pragma once
#include "math.cuh"

namespace aot {
inline namespace AOT_ISA {

constexpr double kSqrtHalf = 0.7071067811865476;
constexpr double kDensityAtZero = 0.3989422804014327;  // 1 / sqrt(2 pi)
constexpr double kTanhScale = 0.7978845608028654, kTanhCubic = 0.044715;

// The normal distribution function Phi, and its density.
template <typename A>
struct Normal {
  A distribution, density;
};

// Phi(-a) = exp(-a^2 / 2) * t * P(t) with t = 1 / (1 + p a), after Hastings (Abramowitz and Stegun 7.1.26). P minimizes
// the relative error for 0 <= a <= 7, which is 1.0e-5: a 40th of float16's rounding error.
__device__ __forceinline__ Normal<float> fast_normal(float x) {
  float t = fast_reciprocal(fmaf(fabsf(x), 0.36183059f, 1.0f));
  float e = fast_exp2(x * x * static_cast<float>(-kLog2E / 2));
  float p = fmaf(t, -0.09590505f, 0.24156349f);
  p = fmaf(t, p, 0.04949725f);
  p = fmaf(t, p, 0.16209002f);
  p = fmaf(t, p, 0.14274922f);
  float tail = p * t * e;
  return {x < 0 ? tail : 1 - tail, e * static_cast<float>(kDensityAtZero)};
}
__device__ __forceinline__ Normal<float> normal(float x) {
  return {0.5f * (1 + erff(x * static_cast<float>(kSqrtHalf))),
          static_cast<float>(kDensityAtZero) * expf(-0.5f * x * x)};
}
__device__ __forceinline__ Normal<double> normal(double x) {
  return {0.5 * (1 + erf(x * kSqrtHalf)), kDensityAtZero * exp(-0.5 * x * x)};
}

// x Phi(x) = max(x, 0) - a Phi(-a), with a = |x|. log2 Phi(-a) is nearly a parabola, which the polynomial approximates
// for 0 <= a <= 7; the relative error of the tail is 1.4e-5. Beyond 7 the polynomial keeps falling, and a is clamped to
// 16. One exponential is the only slow instruction, which an epilogue can afford.
__device__ __forceinline__ float fast_gelu(float x) {
  float a = fminf(fabsf(x), 16.0f), p = fmaf(a, -1.5882043e-6f, 5.6153116e-5f);
  p = fmaf(a, p, -8.8321365e-4f);
  p = fmaf(a, p, 8.3032139e-3f);
  p = fmaf(a, p, -5.3501315e-2f);
  p = fmaf(a, p, -4.5896432e-1f);
  p = fmaf(a, p, -1.1510357f);
  p = fmaf(a, p, -1.0000139f);
  float positive = x - fminf(x, 0.0f);  // NaN for -inf, as in the formula, and for NaN
  return fmaf(-a, fast_exp2(p), positive);
}

// T is the type of the tensors, A the type of the computation. (1 + tanh(u)) / 2 is the logistic function of 2u, which
// does not cancel where tanh(u) is near -1. Where it is near 1, its complement to 1, times x, is subtracted from x.
template <typename T, bool kTanh, typename A>
__device__ __forceinline__ A gelu(A x) {
  constexpr bool kFast = sizeof(T) == 2;
  if constexpr (kTanh) {
    A u2 = x * (A(2 * kTanhScale) + A(2 * kTanhScale * kTanhCubic) * (x * x));
    if constexpr (kFast) {
      return x * sigmoid<T>(u2);
    } else {
      A tail = sigmoid_tail<T>(abs(u2));
      return x < 0 ? x * tail : tail == 0 ? x : x - x * tail;
    }
  } else {
    if constexpr (kFast) return fast_gelu(x);
    else return x * normal(x).distribution;
  }
}

template <typename T, bool kTanh, typename A>
__device__ __forceinline__ A gelu_slope(A x) {
  constexpr bool kFast = sizeof(T) == 2;
  if constexpr (kTanh) {
    A square = x * x;
    A u2 = x * (A(2 * kTanhScale) + A(2 * kTanhScale * kTanhCubic) * square);
    A du2 = A(2 * kTanhScale) + A(6 * kTanhScale * kTanhCubic) * square;
    if constexpr (kFast) {
      A s = sigmoid<T>(u2);
      return s + x * (s - s * s) * du2;
    } else {
      A tail = sigmoid_tail<T>(abs(u2));
      return (x < 0 ? tail : 1 - tail) + x * (tail - tail * tail) * du2;
    }
  } else {
    Normal<A> phi;
    if constexpr (kFast) phi = fast_normal(x);
    else phi = normal(x);
    return phi.distribution + x * phi.density;
  }
}

}  // namespace AOT_ISA
}  // namespace aot
