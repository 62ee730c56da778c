// sum_squares, along the last axis
//          y = sum(x * x)
// gradient dx = 2 * x * dy
#pragma once
#include "aot.h"

namespace aot {
inline namespace AOT_ISA {

inline int64_t row_size(const Spec &x) { return x.ndim > 0 ? x.shape[x.ndim - 1] : 1; }

// The spec of one number for each row of x.
inline Spec without_last_axis(const Spec &x) {
  Spec y = x;
  if (x.rank_known() && x.ndim > 0) --y.ndim;
  return y;
}

struct SumSquares {
  static constexpr const char *name = "sum_squares";
  static constexpr Slot inputs[] = {{"x"}};
  static constexpr Slot outputs[] = {{"y"}};

  Status init(const Attrs &) { return kOk; }
  Status infer(const Tensor *in, Spec *out) const {
    AOT_TRY(check_floating(name, "x", in[0]));
    out[0] = without_last_axis(in[0]);
    return kOk;
  }
};

struct SumSquaresBackward {
  static constexpr const char *name = "sum_squares_backward";
  static constexpr Slot inputs[] = {{"dy"}, {"x"}};
  static constexpr Slot outputs[] = {{"dx"}};

  Status init(const Attrs &) { return kOk; }
  Status infer(const Tensor *in, Spec *out) const {
    const Spec &dy = in[0], &x = in[1];
    AOT_TRY(check_floating(name, "x", x));
    AOT_TRY(check_like(name, "dy", dy, "x without its last axis", without_last_axis(x)));
    out[0] = x;
    return kOk;
  }
};

}  // namespace AOT_ISA
}  // namespace aot
