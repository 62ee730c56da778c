// GELU and its gradient.
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
  Vec<T> value(Vec<T> x) const {
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
