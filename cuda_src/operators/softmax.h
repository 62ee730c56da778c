// softmax along one axis of x, of n elements
//          y = exp(x - max(x)) / sum(exp(x - max(x)))
// gradient dx = y * (dy - sum(dy * y))
// The arguments are torch.nn.functional.softmax's.
#pragma once
#include "aot.h"

namespace aot {
inline namespace AOT_ISA {

struct SoftmaxAttrs {
  int64_t dim = -1;

  Status init(const Attrs &attrs) { return attrs.get("dim", &dim); }

  // x as (outer, n, inner), with n the axis.
  struct Axes {
    int64_t outer, n, inner;
  };
  Axes axes(const Spec &x) const {
    if (x.ndim == 0) return {1, 1, 1};
    int axis = static_cast<int>(dim < 0 ? dim + x.ndim : dim);
    return {x.product(0, axis), x.shape[axis], x.product(axis + 1, x.ndim)};
  }

 protected:
  Status check_x(const char *op, const char *slot, const Spec &x) const {
    AOT_TRY(check_floating(op, slot, x));
    int64_t ndim = x.ndim > 0 ? x.ndim : 1;
    if (!x.rank_known() || (-ndim <= dim && dim < ndim)) return kOk;
    return fail(kInvalidArgument, "%s: dim is %lld, expected an axis of %s, which has shape %s", op,
                static_cast<long long>(dim), slot, ShapeText(x).text);
  }
};

struct Softmax : SoftmaxAttrs {
  static constexpr const char *name = "softmax";
  static constexpr Slot inputs[] = {{"x"}};
  static constexpr Slot outputs[] = {{"y"}};

  Status infer(const Tensor *in, Spec *out) const {
    const Spec &x = in[0];
    AOT_TRY(check_x(name, "x", x));
    out[0] = x;
    return kOk;
  }
};

struct SoftmaxBackward : SoftmaxAttrs {
  static constexpr const char *name = "softmax_backward";
  static constexpr Slot inputs[] = {{"dy"}, {"y"}};
  static constexpr Slot outputs[] = {{"dx"}};

  Status infer(const Tensor *in, Spec *out) const {
    const Spec &dy = in[0], &y = in[1];
    AOT_TRY(check_x(name, "y", y));
    AOT_TRY(check_like(name, "dy", dy, "y", y));
    out[0] = y;
    return kOk;
  }
};

}  // namespace AOT_ISA
}  // namespace aot
