// GELU and its gradient.
#pragma once
#include "math.h"

namespace aot {
inline namespace AOT_ISA {

// The larger and the smaller of two, or b if they are equal or one is NaN.
template <typename T>
AOT_INLINE Vec<T> larger(Vec<T> a, Vec<T> b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Accumulate<T>) == sizeof(float)) return (Vec<T>)_mm512_maskz_max_ps(-1, (__m512)a, (__m512)b);
#endif
  return a > b ? a : b;
}
template <typename T>
AOT_INLINE Vec<T> lesser(Vec<T> a, Vec<T> b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Accumulate<T>) == sizeof(float)) return (Vec<T>)_mm512_maskz_min_ps(-1, (__m512)a, (__m512)b);
#endif
  return a < b ? a : b;
}

#if defined(__FP_FAST_FMA)
template <typename T>
constexpr bool kFusedGelu = sizeof(Accumulate<T>) == sizeof(float);
#else
template <typename T>
constexpr bool kFusedGelu = false;
#endif

// |x| * tail of the normal distribution as Normal has it, in units of 1 / kUnit, by fewer operations: the square is
// exact within a fused multiply-add, and no exponent is too low, since t ends at kFar, where that of the density is 0.
// -inf gives NaN.
template <typename T>
struct FusedTail {
  using C = Constants<T>;
  static constexpr int kTails = sizeof C::kTail / sizeof *C::kTail, kExps = sizeof C::kExp / sizeof *C::kExp;
  template <int n>
  struct Coefficients {
    float of[n];
  };

  static Vec<T> product(Vec<T> x) {
    const Vec<T> far = Vec<T>{} + kFar, size = abs<T>(lesser<T>(far, x)), t = lesser<T>(far, size);
    const Vec<T> density = exponential(t), s = t / (t + C::kTailPole);
    return (density - density * s) * (s * in_pairs(s, kTail) + 0.5f) * size;
  }

 private:
  static constexpr float kFar = 16.27f;  // kFar^2 / 2 is 190.95 log(2)

  // exp(-t^2 / 2) * kUnit, of r = t^2 - 2 n log(2).
  AOT_INLINE static Vec<T> exponential(Vec<T> t) {
    constexpr float kRound = C::kRound + 127 + 64;  // the integer's last bits are the exponent's
    const Vec<T> shifted = t * float(-kLog2E / 2) * t + kRound, n = shifted - kRound, whole = n * (2 * C::kLog2High);
    Vec<T> r;
    for (int i = 0; i < kLanes<T>; ++i) r[i] = std::fma(t[i], t[i], whole[i]);
    if constexpr (kExact<T>) r += n * (2 * C::kLog2Low);
    return (in_pairs(r, kExp) * r + 1) * (Vec<T>)((VecUnsigned<T>)shifted << C::kMantissa);
  }

  // c[0] + c[1] x + ..., by pairs: fewer operations than estrin's, in a longer chain.
  template <int n>
  AOT_INLINE static Vec<T> in_pairs(Vec<T> x, const Coefficients<n> &c) {
    const Vec<T> square = x * x;
    Vec<T> y = pair<n - (n - 1) % 2 - 1>(x, c);
    if constexpr (n > 2) y = y * square + pair<n - (n - 1) % 2 - 3>(x, c);
    if constexpr (n > 4) y = y * square + pair<n - (n - 1) % 2 - 5>(x, c);
    if constexpr (n > 6) y = y * square + pair<n - (n - 1) % 2 - 7>(x, c);
    return y;
  }
  template <int i, int n>
  AOT_INLINE static Vec<T> pair(Vec<T> x, const Coefficients<n> &c) {
    if constexpr (i + 1 < n) return x * c.of[i + 1] + c.of[i];
    else return Vec<T>{} + c.of[i];
  }

  // kTail's polynomial of 2 s - 1 as one of s.
  static constexpr Coefficients<kTails> tail() {
    double c[kTails] = {};
    for (int i = kTails - 1; i >= 0; --i) {
      for (int k = kTails - 1; k >= 0; --k) c[k] = (k ? 2 * c[k - 1] : 0) - c[k];
      c[0] += C::kTail[i];
    }
    Coefficients<kTails> found = {};
    for (int i = 0; i < kTails; ++i) found.of[i] = static_cast<float>(c[i]);
    return found;
  }
  // (e^(-r / 2) - 1) / r: kExp's polynomial, whose first coefficient is 1 / 2 where it is exact.
  static constexpr int kPowers = kExps + kExact<T>;
  static constexpr Coefficients<kPowers> exponential_terms() {
    Coefficients<kPowers> found = {};
    float factor = -0.5f;
    for (int i = 0; i < kPowers; ++i, factor *= -0.5f)
      found.of[i] = factor * (kExact<T> ? (i ? C::kExp[i ? i - 1 : 0] : 1) : C::kExp[i < kExps ? i : 0]);
    return found;
  }
  static constexpr Coefficients<kTails> kTail = tail();
  static constexpr Coefficients<kPowers> kExp = exponential_terms();
};

// approximate = "none"
template <typename T>
struct ExactGelu {
  Normal<T> normal;

  explicit ExactGelu(Vec<T> x) : normal(x) {}
  // max(x, -0) - |x| * tail: a zero result has the sign of x, and |x| is finite where the tail is 0.
  Vec<T> value(Vec<T> x) const {
    if constexpr (kFusedGelu<T>) return larger<T>(-Vec<T>{}, x) - FusedTail<T>::product(x) * (1 / Constants<T>::kUnit);
    return (-Vec<T>{} > x ? -Vec<T>{} : x) - abs<T>(clamp_far<T>(x)) * normal.tail * normal.unit.down;
  }
  Vec<T> gradient(Vec<T> dy, Vec<T> x) const {
    const auto at_zero = Accumulate<T>(0.3989422804014327);  // 1 / sqrt(2 pi)
    return dy * ((x < 0 ? normal.tail : 1 - normal.tail) + x * normal.density * at_zero) * normal.unit.down;
  }
};

// approximate = "tanh": (1 + tanh(u)) / 2 = s(2u), the logistic function, whose derivative is 2 u' s (1 - s).
template <typename T>
struct TanhGelu {
  using A = Accumulate<T>;
  static constexpr A c = A(0.044715), two_k = A(1.5957691216057308);  // 2 sqrt(2 / pi)
  Vec<T> square;
  Logistic<T> s;

  explicit TanhGelu(Vec<T> x) : square(finite_square(x)), s(x * (two_k + two_k * c * square)) {}
  Vec<T> value(Vec<T> x) const { return s.times(x); }
  Vec<T> gradient(Vec<T> dy, Vec<T> x) const {
    return dy * (s.value + x * s.slope() * (two_k + 3 * two_k * c * square)) * s.unit.down;
  }

 private:
  // x * x, or a number at which s is 0 or 1: an infinite square times the slope, which is 0 there, would be NaN.
  static Vec<T> finite_square(Vec<T> x) {
    const Vec<T> y = x * x, far = Vec<T>{} + 4096;
    return y > far ? far : y;
  }
};

}  // namespace AOT_ISA
}  // namespace aot
