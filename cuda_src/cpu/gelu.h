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

// The functions below as polynomials of t = |x|, one for each of 32 intervals, whose coefficients are in two registers
// each: no division and no exponential. Clang does not compute the coefficients at compile time.
#if defined(__AVX512F__) && !defined(__clang__)
template <typename T>
constexpr bool kPiecewiseGelu = sizeof(Accumulate<T>) == sizeof(float);

// The interval of t is number(t), rounded. Intervals become shorter as t grows, since the logarithm of the normal
// distribution is about -t^2 / 2.
struct Intervals {
  double square, slope;

  // number(far) is `last`.
  constexpr Intervals(double slope, double far, double last)
      : square((last - slope * far) / (far * far)), slope(slope) {}
  constexpr double begin(int i) const {
    const double number = i - 0.5;
    return i ? (__builtin_sqrt(slope * slope + 4 * square * number) - slope) / (2 * square) : 0;
  }
  constexpr double exact_number(double t) const { return (square * t + slope) * t; }
  // In the last bits, which are all that a permutation reads.
  AOT_INLINE Vec<float> number(Vec<float> t) const {
    return (static_cast<float>(square) * t + static_cast<float>(slope)) * t + Constants<float>::kRound;
  }
};

// Polynomials of t - center that have f's values at Chebyshev's points of each interval; 0 from `count` intervals on.
// The centers lie near the ends, where f is small: the terms then have one sign where f is steep.
template <int degree>
struct Pieces {
  Intervals intervals;
  alignas(kVectorBytes) float center[32] = {}, of[degree + 1][32] = {};

  template <class F>
  constexpr Pieces(Intervals intervals, int count, F f) : intervals(intervals) {
    constexpr double kPi = 3.14159265358979323846;
    for (int i = 0; i < count; ++i) {
      const double begin = intervals.begin(i), size = intervals.begin(i + 1) - begin;
      center[i] = i ? static_cast<float>(begin + 0.75 * size) : 0;
      double x[degree + 1] = {}, y[degree + 1] = {}, c[degree + 1] = {};
      for (int j = 0; j <= degree; ++j) {
        const double t = begin + size / 2 * (1 + __builtin_cos((2 * j + 1) * kPi / (2 * degree + 2)));
        x[j] = t - center[i];
        y[j] = f(t, i);
      }
      for (int k = 1; k <= degree; ++k)  // Newton's divided differences
        for (int j = degree; j >= k; --j) y[j] = (y[j] - y[j - 1]) / (x[j] - x[j - k]);
      for (int j = degree; j >= 0; --j) {
        for (int k = degree; k > 0; --k) c[k] = c[k - 1] - c[k] * x[j];
        c[0] = y[j] - c[0] * x[j];
      }
      for (int k = 0; k <= degree; ++k) of[k][i] = static_cast<float>(c[k]);
    }
  }

  AOT_INLINE Vec<float> at(Vec<float> t, Vec<float> number) const {
    const Vec<float> x = t - pick(center, number);
    Vec<float> y = pick(of[degree], number);
#pragma GCC unroll 8
    for (int k = degree - 1; k >= 0; --k) y = y * x + pick(of[k], number);
    return y;
  }

 private:
  AOT_INLINE static Vec<float> pick(const float (&of)[32], Vec<float> number) {
    return (Vec<float>)_mm512_permutex2var_ps(_mm512_load_ps(of), (__m512i)number, _mm512_load_ps(of + 16));
  }
};

constexpr double normal_tail(double t) { return __builtin_erfc(t / 1.41421356237309504880) / 2; }
constexpr double gelu_slope(double t) {
  return t * __builtin_exp(-t * t / 2) / 2.50662827463100050242 - normal_tail(t);  // sqrt(2 pi)
}

// Largest errors, in units in the last place of float: of a value 3.3 for |x| <= 1, 4.3 for |x| <= 5, 7.4 beyond, of a
// gradient 5.3 of its larger term. For 16 bits a value's polynomials are right to 6e-5.
struct PiecewiseGelu {
  // max(x, -0) - t * tail, of the tail's square root: a result is subnormal where no factor is. At kFar it rounds to 0.
  template <typename T>
  AOT_INLINE static Vec<float> value(Vec<float> x) {
    constexpr int kDegree = kExact<T> ? 7 : 5;
    static_assert(kRootOfTail<kDegree>.intervals.exact_number(kFar) < 31.499, "in the last interval, however rounded");
    const Vec<float> t = smaller_size(x, kFar);
    const Vec<float> root = kRootOfTail<kDegree>.at(t, kRootOfTail<kDegree>.intervals.number(t));
    return replaced<0x17131122>(x, x) - t * root * root;  // -inf by NaN, other negative numbers by -0
  }

  // dy * (x < 0 ? -slope : 1 + slope), where slope = t * density - tail is the square of a root from interval kSquares
  // on, and 0 in the last one. No factor is subnormal.
  AOT_INLINE static Vec<float> gradient(Vec<float> dy, Vec<float> x) {
    constexpr Intervals intervals = kSlope.intervals;
    constexpr auto kLast = static_cast<float>(intervals.begin(31) / 2 + intervals.begin(32) / 2);
    const Vec<float> t = replaced<0x00330022>(smaller_size(x, kLast), x);  // NaN and infinities by NaN
    const Vec<float> number = intervals.number(t), first = Vec<float>{} + (Constants<float>::kRound + kSquares);
    const auto root = (__m512)kSlope.at(t, number);
    const __mmask16 is_root = _mm512_cmp_ps_mask((__m512)number, (__m512)first, _CMP_GE_OQ);
    const __mmask16 negative = _mm512_movepi32_mask((__m512i)x);
    const auto positives = (__m512)((Vec<float>)_mm512_mask_mul_ps(root, is_root, root, root) + 1);
    const __m512 factor = _mm512_mask_xor_ps(positives, negative, root, (__m512)-Vec<float>{}),
                 dx = (__m512)dy * factor;
    return (Vec<float>)_mm512_mask_mul_ps(dx, is_root & negative, dx, root);
  }

 private:
  static constexpr float kFar = 14.399f;  // the last interval ends at 14.4
  static constexpr int kSquares = 2;

  // min(|x|, far), which is far for NaN.
  AOT_INLINE static Vec<float> smaller_size(Vec<float> x, float far) {
    constexpr int kSizesWithoutSign = 0b1010;
    return (Vec<float>)_mm512_range_ps((__m512)x, _mm512_set1_ps(far), kSizesWithoutSign);
  }
  // v with lanes replaced as x has it: four bits of `by`, from the last on, are of x = NaN, signaling NaN, 0, 1, -inf,
  // inf, other negative numbers, other positive ones, and are 0 for v's lane, 1 for x, 2 and 3 for NaN, 7 for -0.
  template <uint32_t by>
  AOT_INLINE static Vec<float> replaced(Vec<float> v, Vec<float> x) {
    return (Vec<float>)_mm512_fixupimm_ps((__m512)v, (__m512)x, _mm512_set1_epi32(by), 0);
  }

  // Fewer terms are more accurate in the far tail where intervals are shorter there.
  template <int degree>
  static constexpr Pieces<degree> kRootOfTail{Intervals(degree == 7 ? 0.6 : 0.3, 14.4, 31.5), 32,
                                              [](double t, int) { return __builtin_sqrt(normal_tail(t)); }};
  static constexpr Pieces<8> kSlope{Intervals(0.6, 16.2, 30.5), 31, [](double t, int i) {
                                      return i < kSquares ? gelu_slope(t) : __builtin_sqrt(gelu_slope(t));
                                    }};
};
#else
template <typename T>
constexpr bool kPiecewiseGelu = false;
struct PiecewiseGelu {
  template <typename T>
  static Vec<float> value(Vec<float>);
  static Vec<float> gradient(Vec<float>, Vec<float>);
};
#endif

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
  AOT_INLINE Vec<T> value(Vec<T> x) const {
    if constexpr (kPiecewiseGelu<T>) return PiecewiseGelu::value<T>(x);
    else if constexpr (kFusedGelu<T>)
      return larger<T>(-Vec<T>{}, x) - FusedTail<T>::product(x) * (1 / Constants<T>::kUnit);
    return (-Vec<T>{} > x ? -Vec<T>{} : x) - abs<T>(clamp_far<T>(x)) * normal.tail * normal.unit.down;
  }
  AOT_INLINE Vec<T> gradient(Vec<T> dy, Vec<T> x) const {
    if constexpr (kPiecewiseGelu<T>) return PiecewiseGelu::gradient(dy, x);
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
