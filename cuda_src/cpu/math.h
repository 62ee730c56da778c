// The exponential, the logistic function and the normal distribution on vectors. They are accurate in the far tails
// too, where 1 + erf(x) and 1 + tanh(x) would cancel. There are no branches; NaN gives NaN.
//
// Largest measured errors, in units in the last place of float or double: e^x 1.1; e^x - 1 1.2; tanh 2.5; the logistic
// function 2.4, times x 3.1; x Phi(x) 3 for |x| <= 1, 9 for |x| <= 5, 20 beyond; GELU's tanh approximation 200, since
// the formula rounds its argument.
//
// A value of e^x that is subnormal, or would be 0, may have a normal product with x or with a gradient. Such values
// are therefore kept times 2^64 until the last product (Unit): right where the factors are 2^64 together, or less.
#pragma once
#include <cmath>

#include "vector.h"

namespace aot {
inline namespace AOT_ISA {

// Minimax polynomials (Remez' algorithm, relative error), lowest coefficient first, and other constants.
// kExp: (e^r - 1 - r) / r^2 for |r| <= log(2) / 2; the error of e^r is 3e-9 for float, 4e-18 for double. For 16 bits it
//   is (e^r - 1) / r with an error of 3e-6.
// kTail: P in erfc(t / sqrt(2)) / 2 * exp(t^2 / 2) = (1 - s) (1/2 + s P(2s - 1)), s = t / (t + kTailPole), for t >= 0
//   up to where exp(-t^2 / 2) underflows. The error is 2e-8 for float, 3e-17 for double, 7e-6 for bfloat16. The form is
//   exactly 1/2 at t = 0, where an error would appear unreduced in GELU, and the factor 1 - s avoids cancellation where
//   the result is small. The map from t to s is from Shepherd and Laframboise, Math. Comp. 36 (1981), 249-253.
// kRound: adding it to a number leaves the nearest integer in the last of the kMantissa bits.
// kLog2High, kLog2Low: log(2) as a sum. The high part has so few bits that its product with an exponent is exact. For
//   16 bits it is all of log(2).
// kUpperHalf: mask of the leading bits; a number of only these has an exact square.
// kUnit: scales the subnormal e^x to normal numbers. kLowest, kLowestInUnits: above them e^x, or its product with
// kUnit,
//   is normal. kTiny, kTinyDensity: below them e^x, or e^(-x^2 / 2), is kept times kUnit; a little above kLowest.
template <typename T>
struct Constants;

template <typename T>
constexpr bool kExact = sizeof(T) > 2;  // all digits of Accumulate<T> are kept

constexpr double kLog2E = 1.4426950408889634;

template <>
struct Constants<float> {
  static constexpr int kMantissa = 23;
  static constexpr uint32_t kUpperHalf = 0xfffff000;
  static constexpr float kRound = 0x1.8p23f, kTailPole = 2.9f, kUnit = 0x1p64f;
  static constexpr float kLowest = -87.3365448f, kLowestInUnits = -131.697963f, kTiny = -87, kTinyDensity = -13.19f;
  static constexpr float kLog2High = 0x1.63p-1f, kLog2Low = -2.12194440e-4f;
  static constexpr float kExp[] = {4.999999343e-1f, 1.666652040e-1f, 4.166839082e-2f, 8.368745145e-3f, 1.381453880e-3f};
  static constexpr float kTail[] = {-0.4998083076f,  0.1577631847f,   -0.01203119764f,   -0.01177906791f,
                                    0.002426092915f, 0.001477197255f, -0.0002768289486f, -0.0002203284059f};
};

template <>
struct Constants<double> {
  static constexpr int kMantissa = 52;
  static constexpr uint64_t kUpperHalf = 0xfffffffff8000000;
  static constexpr double kRound = 0x1.8p52, kTailPole = 5.2, kUnit = 0x1p64;
  static constexpr double kLowest = -708.39641853226408, kLowestInUnits = -752.75783808810075;
  static constexpr double kTiny = -708, kTinyDensity = -37.62;
  static constexpr double kLog2High = 6.93147180369123816490e-01, kLog2Low = 1.90821492927058770002e-10;
  static constexpr double kExp[] = {0.50000000000000106687,     0.166666666666664115,     0.041666666666529728493,
                                    0.0083333333334949811516,   0.0013888888943759925489, 0.00019841269505766659694,
                                    0.000024801492949656775167, 2.7557586809444479336e-6, 2.7630306246327369447e-7,
                                    2.5000017270443730072e-8};
  static constexpr double kTail[] = {
      -0.703398265284616797,   0.444222948708325571,      -0.247164970095251346,     0.118024480374447127,
      -0.0463348703667751105,  0.0136830059629714541,     -0.00226384717316277734,   -0.000274861066306620564,
      0.000288463981165877853, -0.0000543775651869887473, -0.0000170116307416335954, 9.69541055244282259e-6,
      3.23239811680851413e-7,  -1.2751423504490403e-6,    1.03902036071555607e-7,    1.67134778850614927e-7,
      -2.37129699124017144e-8, -2.24272311093604242e-8,   2.75549004620668742e-9,    2.31244604652179217e-9};
};

template <>
struct Constants<float16> : Constants<float> {
  static constexpr float kLog2High = 0.693147181f;
  static constexpr float kExp[] = {9.999667795e-1f, 5.000302369e-1f, 1.678758703e-1f, 4.151336747e-2f};
};

template <>
struct Constants<bfloat16> : Constants<float16> {  // 8 bits are kept
  static constexpr float kTailPole = 3.2f;
  static constexpr float kTail[] = {-0.54007161f, 0.20642136f, -0.040203907f, -0.0058235771f, 0.0044540697f};
};

// The polynomial of the coefficients first ... first + n - 1, from the powers x^1, x^2, x^4 ...: Estrin's scheme, with
// a chain of log2(n) dependent operations where Horner's has n.
template <size_t first, size_t n, typename V, typename A, size_t size>
AOT_INLINE V estrin(const V *powers, const A (&c)[size]) {
  if constexpr (n == 1) {
    return V{} + c[first];
  } else {
    constexpr size_t level = n > 16 ? 4 : n > 8 ? 3 : n > 4 ? 2 : n > 2 ? 1 : 0, low = size_t{1} << level;
    return estrin<first, low>(powers, c) + powers[level] * estrin<first + low, n - low>(powers, c);
  }
}

template <typename V, typename A, size_t size>
AOT_INLINE V polynomial(V x, const A (&c)[size]) {
  V powers[5] = {x};
  for (int i = 1; i < 5; ++i) powers[i] = powers[i - 1] * powers[i - 1];
  return estrin<0, size>(powers, c);
}

template <typename T>
Vec<T> abs(Vec<T> x) {
  return (Vec<T>)((VecInt<T>)x & ~(VecInt<T>)-Vec<T>{});
}

// The factor that a lane is kept times: kUnit where it is tiny, else 1. `down` undoes `up`.
template <typename T>
struct Unit {
  Vec<T> up, down, lowest;

  explicit Unit(VecInt<T> tiny)
      : up(tiny ? Vec<T>{} + C::kUnit : Vec<T>{} + 1),
        down(tiny ? Vec<T>{} + 1 / C::kUnit : Vec<T>{} + 1),
        lowest(tiny ? Vec<T>{} + C::kLowestInUnits : Vec<T>{} + C::kLowest) {}

 private:
  using C = Constants<T>;
};

// e^x for x <= 0 as scale + scale * expm1, with x = n log(2) + r, scale = 2^n * unit and expm1 = e^r - 1. `low`, if
// given, is the rounding error of x.
template <typename T>
struct Exponential {
  Vec<T> scale, expm1;

  template <class... Low>
  explicit Exponential(Vec<T> unit, Vec<T> x, Low... low) {
    using C = Constants<T>;
    using Bits = VecUnsigned<T>;
    const Vec<T> shifted = x * Accumulate<T>(kLog2E) + C::kRound, n = shifted - C::kRound;
    Vec<T> r = x - n * C::kLog2High;
    if constexpr (kExact<T>) r += ((-n * C::kLog2Low) + ... + low);
    scale = (Vec<T>)(((Bits)shifted << C::kMantissa) + (Bits)unit);
    expm1 = kExact<T> ? r + r * r * polynomial(r, C::kExp) : r * polynomial(r, C::kExp);
  }
};

// e^(x + low) * unit for x <= 0; 0 if that is subnormal.
template <typename T, class... Low>
AOT_INLINE Vec<T> exp_nonpositive(const Unit<T> &unit, Vec<T> x, Low... low) {
  const Exponential<T> e(unit.up, x, low...);
  return x < unit.lowest ? Vec<T>{} : e.scale + e.scale * e.expm1;
}

// e^x * kUnit for x <= 0.
template <typename T>
AOT_INLINE Vec<T> exp_in_units(Vec<T> x) {
  return exp_nonpositive<T>(Unit<T>(VecInt<T>{} == 0), x);
}

// e^x - 1 for x <= 0, without cancellation near 0, where scale is 1.
template <typename T>
Vec<T> expm1_nonpositive(Vec<T> x) {
  const Exponential<T> e(Vec<T>{} + 1, x);
  return x < Constants<T>::kLowest ? Vec<T>{} - 1 : e.scale * e.expm1 + (e.scale - 1);
}

// From e^(-2|x|) - 1, which is accurate for small x.
template <typename T>
Vec<T> tanh(Vec<T> x) {
  Vec<T> m = expm1_nonpositive<T>(-2 * abs<T>(x)), y = -m / (m + 2);
  return x < 0 ? -y : y;
}

// The logistic function s = 1 / (1 + exp(-x)), from the smaller of s and 1 - s: its exponential does not overflow.
// Both members are times unit.up; x is negative wherever that is not 1.
template <typename T>
struct Logistic {
  Unit<T> unit;
  Vec<T> smaller, value;

  AOT_INLINE explicit Logistic(Vec<T> x) : unit(x < Constants<T>::kTiny) {
    const Vec<T> e = exp_nonpositive<T>(unit, -abs<T>(x));
    smaller = e / (1 + e * unit.down);
    value = x < 0 ? smaller : 1 - smaller;
  }
  // The derivative s (1 - s), times unit.up.
  Vec<T> slope() const { return smaller - smaller * (smaller * unit.down); }
  // s times these, from left to right
  template <class... Factors>
  Vec<T> times(Factors... factors) const {
    return (value * ... * factors) * unit.down;
  }
  // factor * d(x s)/dx
  Vec<T> silu_gradient(Vec<T> factor, Vec<T> x) const { return factor * (value + x * slope()) * unit.down; }
};

// x clamped to a finite number at which the normal density is 0. NaN stays.
template <typename T>
AOT_INLINE Vec<T> clamp_far(Vec<T> x) {
  const Vec<T> far = Vec<T>{} + Accumulate<T>(64);
  return x > far ? far : x;
}

// The normal distribution: its density at x, times sqrt(2 pi), and its distribution function at -|x|. Both are times
// unit.up; x is negative wherever that is not 1.
template <typename T>
struct Normal {
  Unit<T> unit;
  Vec<T> density, tail;

  AOT_INLINE explicit Normal(Vec<T> x) : unit(x < Constants<T>::kTinyDensity) {
    using C = Constants<T>;
    const Vec<T> t = clamp_far<T>(abs<T>(x)), s = t / (t + C::kTailPole);
    density = square_exponential(unit, t);
    tail = (density - density * s) * (s * polynomial(2 * s - 1, C::kTail) + Accumulate<T>(0.5));
  }

 private:
  // exp(-x^2 / 2), with a correction for the rounding error of the square. Without a fused multiply-add, the square of
  // the leading bits, which is exact, takes the place of the rounded one.
  AOT_INLINE static Vec<T> square_exponential(const Unit<T> &unit, Vec<T> x) {
    using A = Accumulate<T>;
    const Vec<T> half = x * A(-0.5), square = half * x;
    if constexpr (!kExact<T>) return exp_nonpositive<T>(unit, square);
#ifdef __FP_FAST_FMA
    Vec<T> low;
    for (int i = 0; i < kLanes<T>; ++i) low[i] = std::fma(half[i], x[i], -square[i]);
    return exp_nonpositive<T>(unit, square, low);
#else
    const Vec<T> upper = (Vec<T>)((VecUnsigned<T>)x & Constants<T>::kUpperHalf);
    return exp_nonpositive<T>(unit, upper * upper * A(-0.5), (upper - x) * (upper + x) * A(0.5));
#endif
  }
};

}  // namespace AOT_ISA
}  // namespace aot
