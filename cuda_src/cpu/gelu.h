// GELU and its derivative, the slope.
#pragma once
#include "math.h"

namespace aot {
inline namespace AOT_ISA {

// approximate = "none"
template <typename T>
struct ExactGelu {
  Normal<T> normal;

  explicit ExactGelu(Vec<T> x) : normal(x) {}
  // max(x, -0) - |x| * tail: a zero result has the sign of x, and |x| is finite where the tail is 0.
  Vec<T> value(Vec<T> x) const { return (-Vec<T>{} > x ? -Vec<T>{} : x) - abs<T>(clamp_far<T>(x)) * normal.tail; }
  Vec<T> slope(Vec<T> x) const {
    return (x < 0 ? normal.tail : 1 - normal.tail) +
           x * normal.density * Accumulate<T>(0.3989422804014327);  // 1 / sqrt(2 pi)
  }
};

// approximate = "tanh": (1 + tanh(u)) / 2 = s(2u), the logistic function, whose derivative is 2 u' s (1 - s).
template <typename T>
struct TanhGelu {
  using A = Accumulate<T>;
  static constexpr A c = A(0.044715), two_k = A(1.5957691216057308);  // 2 sqrt(2 / pi)
  Logistic<T> s;

  explicit TanhGelu(Vec<T> x) : s(x * (two_k + two_k * c * (x * x))) {}
  Vec<T> value(Vec<T> x) const { return x * s.value; }
  Vec<T> slope(Vec<T> x) const { return s.value + x * s.slope() * (two_k + 3 * two_k * c * (x * x)); }
};

}  // namespace AOT_ISA
}  // namespace aot
