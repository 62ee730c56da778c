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

// bfloat16 has numbers as small as float32's: of 13 standard deviations. The hardware's exponential flushes subnormal
// results, whose products with x may be normal. They are kept times 2^kShift, which costs a multiplication.
constexpr float kShift = 64, kUnshift = 0x1p-64f;
template <typename T>
constexpr bool kFarTails = std::is_same_v<T, __nv_bfloat16>;

// Phi(-a) = exp(-a^2 / 2) * t * P(t) with t = 1 / (1 + p a), after Hastings (Abramowitz and Stegun 7.1.26). P minimizes
// the relative error. For 0 <= a <= 7 it is 1.0e-5: a 40th of float16's rounding error. For bfloat16 it is 3.5e-5 up to
// 13.5.
template <typename T>
__device__ __forceinline__ Normal<float> fast_normal(float x) {
  constexpr float kSquare = static_cast<float>(-kLog2E / 2);
  if constexpr (kFarTails<T>) {  // the density is times 2^kShift
    float t = fast_reciprocal(fmaf(fabsf(x), 0.38f, 1.0f));
    float e = fast_exp2(fmaf(x * x, kSquare, kShift));
    float p = fmaf(t, -0.089928485f, 0.18887687f);
    p = fmaf(t, p, 0.091979377f);
    p = fmaf(t, p, 0.1578296f);
    p = fmaf(t, p, 0.15122512f);
    float tail = p * t * e * kUnshift;
    return {x < 0 ? tail : 1 - tail, e * static_cast<float>(kDensityAtZero)};
  } else {
    float t = fast_reciprocal(fmaf(fabsf(x), 0.36183059f, 1.0f));
    float e = fast_exp2(x * x * kSquare);
    float p = fmaf(t, -0.09590505f, 0.24156349f);
    p = fmaf(t, p, 0.04949725f);
    p = fmaf(t, p, 0.16209002f);
    p = fmaf(t, p, 0.14274922f);
    float tail = p * t * e;
    return {x < 0 ? tail : 1 - tail, e * static_cast<float>(kDensityAtZero)};
  }
}
__device__ __forceinline__ Normal<float> normal(float x) {
  return {0.5f * (1 + erff(x * static_cast<float>(kSqrtHalf))),
          static_cast<float>(kDensityAtZero) * expf(-0.5f * x * x)};
}
__device__ __forceinline__ Normal<double> normal(double x) {
  return {0.5 * (1 + erf(x * kSqrtHalf)), kDensityAtZero * exp(-0.5 * x * x)};
}

// x Phi(x) = max(x, 0) - a Phi(-a), with a = |x|. log2 Phi(-a) is nearly a parabola, which a polynomial approximates
// for 0 <= a <= 7, in bfloat16 for 0 <= a <= 13.6; the relative error of the tail is 1.4e-5, or 5.8e-5. Beyond that the
// polynomial keeps falling, and a is clamped to 16. One exponential is the only slow instruction, which an epilogue can
// afford.
template <typename T>
__device__ __forceinline__ float fast_gelu(float x) {
  const float a = fminf(fabsf(x), 16.0f);
  const float positive = x - fminf(x, 0.0f);  // NaN for -inf, as in the formula, and for NaN
  if constexpr (kFarTails<T>) {
    float p = fmaf(a, -1.7544503e-9f, 1.3073988e-7f);
    p = fmaf(a, p, -4.2764068e-6f);
    p = fmaf(a, p, 8.1234066e-5f);
    p = fmaf(a, p, -1.0029341e-3f);
    p = fmaf(a, p, 8.5882712e-3f);
    p = fmaf(a, p, -5.3763773e-2f);
    p = fmaf(a, p, -4.5902845e-1f);
    p = fmaf(a, p, -1.1508689f);
    p = fmaf(a, p, kShift - 1.0000384f);
    return fmaf(a * fast_exp2(p), -kUnshift, positive);
  } else {
    float p = fmaf(a, -1.5882043e-6f, 5.6153116e-5f);
    p = fmaf(a, p, -8.8321365e-4f);
    p = fmaf(a, p, 8.3032139e-3f);
    p = fmaf(a, p, -5.3501315e-2f);
    p = fmaf(a, p, -4.5896432e-1f);
    p = fmaf(a, p, -1.1510357f);
    p = fmaf(a, p, -1.0000139f);
    return fmaf(-a, fast_exp2(p), positive);
  }
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
    if constexpr (kFast) return fast_gelu<T>(x);
    else return x * normal(x).distribution;
  }
}

template <typename T, bool kTanh, typename A>
__device__ __forceinline__ A gelu_slope(A x) {
  constexpr bool kFast = sizeof(T) == 2;
  if constexpr (kTanh) {
    // where x * x would be infinite, its product with the slope of s, which is 0 from 64 on, would be NaN
    A square = x * x;
    square = square > 4096 ? A(4096) : square;
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
    if constexpr (kFarTails<T>) {
      const Normal<A> phi = fast_normal<T>(x);
      return fmaf(x * phi.density, kUnshift, phi.distribution);
    } else {
      Normal<A> phi;
      if constexpr (kFast) phi = fast_normal<T>(x);
      else phi = normal(x);
      return phi.distribution + x * phi.density;
    }
  }
}

}  // namespace AOT_ISA
}  // namespace aot
