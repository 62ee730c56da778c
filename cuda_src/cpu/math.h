// exp2, the logistic function and the normal distribution on vectors, for results of type T: within a few units in the
// last place, also in the far tails, where 1 + erf(x) and 1 + tanh(x) would have cancelled. Written without branches;
// NaN stays NaN.
#pragma once
#include "vector.h"

namespace aot {
inline namespace AOT_ISA {

// Polynomials, lowest coefficient first, of smallest relative error (Remez' algorithm).
// kExp2: 2^f, |f| <= 1/2; error 3e-9 float, 2e-17 double, 4e-6 bfloat16.
// kTail: erfc(t / sqrt(2)) / 2 * exp(t^2 / 2), 0 <= t, as a polynomial of v = (t - kTailPole) / (t + kTailPole), up to
//   where exp(-t^2 / 2) underflows; error 7e-9, 5e-17, 4e-6. The map from t to v is that of Shepherd and Laframboise,
//   Math. Comp. 36 (1981), 249-253.
// kRound: added to a number, it leaves the nearest whole one in the last of the kMantissa bits.
// kLowest: below, 2^z is taken for 0; above, it is a normal number.
template <typename T>
struct Constants;

constexpr double kLog2E = 1.4426950408889634;

template <>
struct Constants<float> {
  static constexpr int kMantissa = 23;
  static constexpr float kRound = 0x1.8p23f, kLowest = -126, kTailPole = 3;
  static constexpr float kExp2[] = {
      1, 6.931472152e-1f, 2.40226528e-1f, 5.550310129e-2f, 9.617691128e-3f, 1.340679749e-3f, 1.559508666e-4f};
  static constexpr float kTail[] = {1.215139477e-1f, -2.064026179e-1f, 1.232250217e-1f, -4.621331381e-2f,
                                    6.132183065e-3f, 2.904702622e-3f,  -9.84182768e-4f, -3.399113236e-4f,
                                    1.160373775e-4f, 5.415085112e-5f};
};

template <>
struct Constants<double> {
  static constexpr int kMantissa = 52;
  static constexpr double kRound = 0x1.8p52, kLowest = -1022, kTailPole = 6;
  static constexpr double kExp2[] = {1,
                                     0.693147180559945701,
                                     0.240226506959100983,
                                     0.0555041086647901386,
                                     0.00961812910760682975,
                                     0.00133335581534836154,
                                     0.000154035304418623057,
                                     0.0000152527273580469254,
                                     1.32154424984298621e-6,
                                     1.01806533540901919e-7,
                                     7.0726057906928258e-9,
                                     4.07799970063623011e-10};
  static constexpr double kTail[] = {
      0.0647793143244468486,     -0.123196733457018894,   0.105831493450470841,   -0.081906039799207412,
      0.0568231526347725404,     -0.0350545398251954099,  0.0189876789776638052,  -0.0088464359361996602,
      0.00341792801399753828,    -0.00101345211350609253, 0.0001803729271728964,  0.0000123739897922424243,
      -0.0000205093596234404503, 5.48632524926866409e-6,  4.76831137214463732e-7, -7.17806413697512403e-7,
      1.13692331080012203e-7,    6.35983380581199406e-8,  -2.4236567013549367e-8, -5.67718447536070317e-9,
      2.75540826804283679e-9,    7.12556623994690423e-10};
};

template <>
struct Constants<float16> : Constants<float> {};

template <>
struct Constants<bfloat16> : Constants<float> {  // 8 bits are kept: fewer terms do
  static constexpr float kTailPole = 3.25f;
  static constexpr float kExp2[] = {1, 6.9311346e-1f, 2.40207027e-1f, 5.597790187e-2f, 9.783280145e-3f};
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

// 2^z for z <= 0: 2^n * 2^f, n whole, |f| <= 1/2.
template <typename T>
Vec<T> exp2_nonpositive(Vec<T> z) {
  using C = Constants<T>;
  Vec<T> shifted = z + C::kRound, f = z - (shifted - C::kRound);
  Vec<T> scale = (Vec<T>)(((VecInt<T>)shifted << C::kMantissa) + (VecInt<T>)(Vec<T>{} + 1));
  Vec<T> y = polynomial(f, C::kExp2) * scale;
  return z < C::kLowest ? Vec<T>{} : y;
}

// e^x - 1 for x <= 0: 2^n * (2^f - 1) + (2^n - 1), whose first term has no 1 to cancel.
template <typename T>
Vec<T> expm1_nonpositive(Vec<T> x) {
  using C = Constants<T>;
  using A = Accumulate<T>;
  Vec<T> z = x * A(kLog2E), shifted = z + C::kRound, f = z - (shifted - C::kRound);
  Vec<T> scale = (Vec<T>)(((VecInt<T>)shifted << C::kMantissa) + (VecInt<T>)(Vec<T>{} + 1));
  constexpr size_t terms = sizeof C::kExp2 / sizeof *C::kExp2;
  Vec<T> powers[5] = {f};
  for (int i = 1; i < 5; ++i) powers[i] = powers[i - 1] * powers[i - 1];
  Vec<T> y = f * estrin<1, terms - 1>(powers, C::kExp2) * scale + (scale - 1);
  return z < C::kLowest ? Vec<T>{} - 1 : y;
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

  // log2_e_x: x / log(2)
  explicit Logistic(Vec<T> log2_e_x) {
    Vec<T> e = exp2_nonpositive<T>(-abs<T>(log2_e_x));
    smaller = e / (1 + e);
    value = log2_e_x < 0 ? smaller : 1 - smaller;
  }
};

// The normal distribution: its density, times sqrt(2 pi), and its distribution function.
template <typename T>
struct Normal {
  Vec<T> density, below;

  explicit Normal(Vec<T> x) {
    using C = Constants<T>;
    using A = Accumulate<T>;
    Vec<T> t = abs<T>(x), v = 1 - 2 * C::kTailPole / (t + C::kTailPole);
    density = exp2_nonpositive<T>(x * x * A(-0.7213475204444817));  // -log2(e) / 2
    Vec<T> tail = density * polynomial(v, C::kTail);
    below = x < 0 ? tail : 1 - tail;
  }
};

}  // namespace AOT_ISA
}  // namespace aot
