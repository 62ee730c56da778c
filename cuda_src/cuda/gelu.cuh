// GELU and its derivative, the slope.
#pragma once
#include "math.cuh"

namespace aot {
inline namespace AOT_ISA {

constexpr double kDensityAtZero = 0.3989422804014327;  // 1 / sqrt(2 pi)
constexpr double kTanhScale = 0.7978845608028654, kTanhCubic = 0.044715;

// The normal distribution function Phi(x), and e^(-x^2 / 2), which is its density but for a factor.
template <typename A>
struct Normal {
  A distribution, exponential;
};

// bfloat16 has numbers as small as float32's: of 13 standard deviations. The hardware's exponential flushes subnormal
// results, whose products with x may be normal. They are kept times 2^kShift, which costs a multiplication.
constexpr float kShift = 64, kUnshift = 0x1p-64f;
template <typename T>
constexpr bool kFarTails = std::is_same_v<T, __nv_bfloat16>;

// Phi(-a) = exp(-a^2 / 2) * t * P(t) with t = 1 / (1 + p a), after Hastings (Abramowitz and Stegun 7.1.26). P minimizes
// the relative error for 0 <= a <= 13.7, which is 5e-6, and for a <= 3 the absolute error, which is 1e-6: near
// x = -0.75 the slope is a small difference. For bfloat16 the exponential is times 2^kShift.
template <typename T>
__device__ __forceinline__ Normal<float> fast_normal(float x) {
  constexpr float kSquare = static_cast<float>(-kLog2E / 2);
  float t = fast_reciprocal(fmaf(fabsf(x), 0.306f, 1.0f));
  float e = kFarTails<T> ? fast_exp2(fmaf(x * x, kSquare, kShift)) : fast_exp2(x * x * kSquare);
  float p = fmaf(t, -0.076268576f, 0.19705218f);
  p = fmaf(t, p, 0.0005876893f);
  p = fmaf(t, p, 0.13872351f);
  p = fmaf(t, p, 0.11753883f);
  p = fmaf(t, p, 0.12236543f);
  float tail = p * t * e;
  if constexpr (kFarTails<T>) tail *= kUnshift;
  return {x < 0 ? tail : 1 - tail, e};
}

// As on the CPU, where the constants are explained: Phi(-a) = exp(-a^2 / 2) (1 - s) (1/2 + s P(2s - 1)), with
// s = a / (a + pole). Nothing cancels, as 1 + erf does, and the slope needs no second exponential. The reciprocal of
// float is the hardware's with a Newton step.
__device__ __forceinline__ float precise_reciprocal(float x) {
  float r = fast_reciprocal(x);
  return fmaf(r, fmaf(-x, r, 1.0f), r);
}
__device__ __forceinline__ double precise_reciprocal(double x) { return 1 / x; }

template <typename A, int kCount>
__device__ __forceinline__ Normal<A> precise_normal(A x, A pole, const A (&coefficients)[kCount]) {
  const A a = min(abs(x), A(40));  // where it is 0 in float64, too, and its square finite
  const A r = precise_reciprocal(a + pole), s = a * r, w = 2 * s - 1;
  A p = coefficients[kCount - 1];
#pragma unroll
  for (int i = kCount - 2; i >= 0; --i) p = fma(p, w, coefficients[i]);
  const A half = A(-0.5) * a, square = half * a, low = fma(half, a, -square);  // the square's rounding error
  A e = exponential<A>(square);
  e = fma(e, low, e);
  const A tail = pole * r * fma(s, p, A(0.5)) * e;
  return {x < 0 ? tail : 1 - tail, e};
}
__device__ __forceinline__ Normal<float> normal(float x) {
  constexpr float kTail[] = {-0.4998083076f,  0.1577631847f,   -0.01203119764f,   -0.01177906791f,
                             0.002426092915f, 0.001477197255f, -0.0002768289486f, -0.0002203284059f};
  return precise_normal(x, 2.9f, kTail);
}
__device__ __forceinline__ Normal<double> normal(double x) {
  constexpr double kTail[] = {
      -0.703398265284616797,   0.444222948708325571,      -0.247164970095251346,     0.118024480374447127,
      -0.0463348703667751105,  0.0136830059629714541,     -0.00226384717316277734,   -0.000274861066306620564,
      0.000288463981165877853, -0.0000543775651869887473, -0.0000170116307416335954, 9.69541055244282259e-6,
      3.23239811680851413e-7,  -1.2751423504490403e-6,    1.03902036071555607e-7,    1.67134778850614927e-7,
      -2.37129699124017144e-8, -2.24272311093604242e-8,   2.75549004620668742e-9,    2.31244604652179217e-9};
  return precise_normal(x, 5.2, kTail);
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
    // in this order, because the exponential may be subnormal
    const A scaled = x * A(kDensityAtZero);
    if constexpr (kFarTails<T>) {
      const Normal<A> phi = fast_normal<T>(x);
      return fmaf(scaled * phi.exponential, kUnshift, phi.distribution);
    } else {
      Normal<A> phi;
      if constexpr (kFast) phi = fast_normal<T>(x);
      else phi = normal(x);
      return phi.distribution + scaled * phi.exponential;
    }
  }
}

}  // namespace AOT_ISA
}  // namespace aot
