// The exponential, the logistic function and the normal distribution on vectors, also in the far tails, where 1 +
// erf(x) and 1 + tanh(x) would have cancelled. Written without branches; NaN stays NaN.
//
// Largest errors measured, in units in the last place, of float or double: e^x 1.1, e^x - 1 1.2, tanh 2.5, the logistic
// function 2.4, x times it 3.1, x Phi(x) 5 to |x| = 5 and 8 in the tail. Where e^x is no normal number it is 0, but in
// the logistic function. Of GELU's tanh approximation the argument is rounded first, as the formula has it: 200.
#pragma once
#include "vector.h"

namespace aot {
inline namespace AOT_ISA {

// Polynomials, lowest coefficient first, of smallest relative error (Remez' algorithm).
// kExp: (e^r - 1 - r) / r^2, |r| <= log(2) / 2; of e^r the error is 3e-9 float, 4e-18 double. For 16 bits fewer digits
//   do: kExp is (e^r - 1) / r, error 3e-6.
// kCentre: (Phi(x) - 1/2) / x, Phi the normal distribution, as a polynomial of x^2, |x| <= 1; error 5e-10, 2e-17.
// kTail: erfc(t / sqrt(2)) / 2 * exp(t^2 / 2), 0 <= t, as a polynomial of v = (t - kTailPole) / (t + kTailPole), up to
//   where exp(-t^2 / 2) underflows; error 7e-9, 5e-17, 4e-6 bfloat16. The map from t to v is that of Shepherd and
//   Laframboise, Math. Comp. 36 (1981), 249-253.
// kRound: added to a number, it leaves the nearest whole one in the last of the kMantissa bits.
// kLog2, kLog2Rest: log(2), the first with so few bits that its product with a whole number of an exponential's is
//   exact; without the rest for 16 bits.
// kUpperHalf: the bits of a number whose square is exact.
// kLowest, kLowestSubnormal: above, e^x is a normal number, or not 0. kUnit: times it, it is a normal number.
template <typename T>
struct Constants;

template <typename T>
constexpr bool kExact = sizeof(T) > 2;  // all digits of Accumulate<T> are kept

constexpr double kLog2E = 1.4426950408889634;

template <>
struct Constants<float> {
  static constexpr int kMantissa = 23;
  static constexpr uint32_t kUpperHalf = 0xfffff000;
  static constexpr float kRound = 0x1.8p23f, kTailPole = 3, kUnit = 0x1p64f;
  static constexpr float kLowest = -87.3365448f, kLowestSubnormal = -103.972084f;
  static constexpr float kLog2 = 0x1.63p-1f, kLog2Rest = -2.12194440e-4f;
  static constexpr float kExp[] = {4.999999343e-1f, 1.666652040e-1f, 4.166839082e-2f, 8.368745145e-3f, 1.381453880e-3f};
  static constexpr float kCentre[] = {3.9894227764e-1f,  -6.6490313704e-2f, 9.9730746046e-3f,
                                      -1.1857760211e-3f, 1.1294281e-4f,     -7.4593285e-6f};
  static constexpr float kTail[] = {1.215139477e-1f, -2.064026179e-1f, 1.232250217e-1f, -4.621331381e-2f,
                                    6.132183065e-3f, 2.904702622e-3f,  -9.84182768e-4f, -3.399113236e-4f,
                                    1.160373775e-4f, 5.415085112e-5f};
};

template <>
struct Constants<double> {
  static constexpr int kMantissa = 52;
  static constexpr uint64_t kUpperHalf = 0xfffffffff8000000;
  static constexpr double kRound = 0x1.8p52, kTailPole = 6, kUnit = 0x1p64;
  static constexpr double kLowest = -708.39641853226408, kLowestSubnormal = -745.13321910194122;
  static constexpr double kLog2 = 6.93147180369123816490e-01, kLog2Rest = 1.90821492927058770002e-10;
  static constexpr double kExp[] = {0.50000000000000106687,     0.166666666666664115,     0.041666666666529728493,
                                    0.0083333333334949811516,   0.0013888888943759925489, 0.00019841269505766659694,
                                    0.000024801492949656775167, 2.7557586809444479336e-6, 2.7630306246327369447e-7,
                                    2.5000017270443730072e-8};
  static constexpr double kCentre[] = {0.39894228040143253559,    -0.066490380066896217315,  0.0099735570098533001413,
                                       -0.0011873282137913169856, 0.00011543467890163851743, -9.4446289371960890497e-6,
                                       6.6591514505227882782e-7,  -4.1158094974933497666e-8, 2.2196339215866074781e-9,
                                       -8.8703795583371994905e-11};
  static constexpr double kTail[] = {
      0.0647793143244468486,     -0.123196733457018894,   0.105831493450470841,   -0.081906039799207412,
      0.0568231526347725404,     -0.0350545398251954099,  0.0189876789776638052,  -0.0088464359361996602,
      0.00341792801399753828,    -0.00101345211350609253, 0.0001803729271728964,  0.0000123739897922424243,
      -0.0000205093596234404503, 5.48632524926866409e-6,  4.76831137214463732e-7, -7.17806413697512403e-7,
      1.13692331080012203e-7,    6.35983380581199406e-8,  -2.4236567013549367e-8, -5.67718447536070317e-9,
      2.75540826804283679e-9,    7.12556623994690423e-10};
};

template <>
struct Constants<float16> : Constants<float> {
  static constexpr float kLog2 = 0.693147181f;
  static constexpr float kExp[] = {9.999667795e-1f, 5.000302369e-1f, 1.678758703e-1f, 4.151336747e-2f};
};

template <>
struct Constants<bfloat16> : Constants<float16> {  // 8 bits are kept
  static constexpr float kTailPole = 3.25f;
  static constexpr float kTail[] = {1.134516888e-1f, -1.964510615e-1f, 1.252400917e-1f, -5.4672073e-2f,
                                    1.24910441e-2f,  1.125170636e-3f,  -1.182617046e-3f};
};

// Coefficients first ... first + n - 1 at x, whose powers x^1, x^2, x^4 ... are given: Estrin's scheme, whose chain of
// dependent operations is the logarithm of Horner's.
template <size_t first, size_t n, typename V, typename A, size_t size>
V estrin(const V *powers, const A (&c)[size]) {
  if constexpr (n == 1) {
    return V{} + c[first];
  } else {
    constexpr size_t level = n > 16 ? 4 : n > 8 ? 3 : n > 4 ? 2 : n > 2 ? 1 : 0, low = size_t{1} << level;
    return estrin<first, low>(powers, c) + powers[level] * estrin<first + low, n - low>(powers, c);
  }
}

template <typename V, typename A, size_t size>
V polynomial(V x, const A (&c)[size]) {
  V powers[5] = {x};
  for (int i = 1; i < 5; ++i) powers[i] = powers[i - 1] * powers[i - 1];
  return estrin<0, size>(powers, c);
}

template <typename T>
Vec<T> abs(Vec<T> x) {
  return (Vec<T>)((VecInt<T>)x & ~(VecInt<T>)-Vec<T>{});
}

// e^x for x <= 0 as scale + scale * rest: x = n log(2) + r, scale = 2^n times `unit`, rest = e^r - 1. `low` is what x
// has been rounded by, where that matters.
template <typename T>
struct Exponential {
  Vec<T> scale, rest;

  template <class... Low>
  explicit Exponential(Accumulate<T> unit, Vec<T> x, Low... low) {
    using C = Constants<T>;
    using Bits = VecUnsigned<T>;
    const Vec<T> shifted = (x + ... + low) * Accumulate<T>(kLog2E) + C::kRound, n = shifted - C::kRound;
    Vec<T> r = x - n * C::kLog2;
    if constexpr (kExact<T>) r = ((r - n * C::kLog2Rest) + ... + low);
    scale = (Vec<T>)(((Bits)shifted << C::kMantissa) + (Bits)(Vec<T>{} + unit));
    rest = kExact<T> ? r + r * r * polynomial(r, C::kExp) : r * polynomial(r, C::kExp);
  }
};

// e^(x + low), x <= 0; 0 where that is no normal number.
template <typename T, class... Low>
AOT_INLINE Vec<T> exp_nonpositive(Vec<T> x, Low... low) {
  const Exponential<T> e(1, x, low...);
  return x < Constants<T>::kLowest ? Vec<T>{} : e.scale + e.scale * e.rest;
}

// The same to the last of the subnormal numbers.
template <typename T>
AOT_INLINE Vec<T> exp_subnormal(Vec<T> x) {
  using C = Constants<T>;
  const Exponential<T> e(C::kUnit, x);
  return x < C::kLowestSubnormal ? Vec<T>{} : (e.scale + e.scale * e.rest) * (1 / C::kUnit);
}

// e^x - 1 for x <= 0: scale * rest has no 1 to cancel.
template <typename T>
Vec<T> expm1_nonpositive(Vec<T> x) {
  const Exponential<T> e(1, x);
  return x < Constants<T>::kLowest ? Vec<T>{} - 1 : e.scale * e.rest + (e.scale - 1);
}

// By way of e^(-2|x|) - 1, which keeps the digits of a small x.
template <typename T>
Vec<T> tanh(Vec<T> x) {
  Vec<T> m = expm1_nonpositive<T>(-2 * abs<T>(x)), y = -m / (m + 2);
  return x < 0 ? -y : y;
}

// The logistic function, 1 / (1 + exp(-x)), by way of the smaller of it and what it lacks of 1, whose exponential does
// not overflow.
template <typename T>
struct Logistic {
  Vec<T> smaller, value;

  explicit Logistic(Vec<T> x) {
    Vec<T> e = exp_subnormal<T>(-abs<T>(x));  // x e may be normal
    smaller = e / (1 + e);
    value = x < 0 ? smaller : 1 - smaller;
  }
  // s (1 - s)
  Vec<T> slope() const { return smaller - smaller * smaller; }
};

// The normal distribution: its density, times sqrt(2 pi), and its distribution function.
template <typename T>
struct Normal {
  Vec<T> density, below;

  explicit Normal(Vec<T> x) {
    using C = Constants<T>;
    Vec<T> t = abs<T>(x), v = (t - C::kTailPole) / (t + C::kTailPole);
    density = square_exponential(x);
    Vec<T> tail = density * polynomial(v, C::kTail);
    below = x < 0 ? tail : 1 - tail;
    if constexpr (kExact<T>) below = t < 1 ? x * polynomial(x * x, C::kCentre) + Accumulate<T>(0.5) : below;
  }

 private:
  // exp(-x^2 / 2), x^2 without rounding: it is the square of x's upper half, and the rest.
  static Vec<T> square_exponential(Vec<T> x) {
    using A = Accumulate<T>;
    if constexpr (!kExact<T>) return exp_nonpositive<T>(x * x * A(-0.5));
    const Vec<T> upper = (Vec<T>)((VecUnsigned<T>)x & Constants<T>::kUpperHalf);
    return exp_nonpositive<T>(upper * upper * A(-0.5), (upper - x) * (upper + x) * A(0.5));
  }
};

}  // namespace AOT_ISA
}  // namespace aot
