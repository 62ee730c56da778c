// blend    y = factor * x weight^T + bias, for the rows of x
#pragma once
#include "aot.h"

namespace aot {
inline namespace AOT_ISA {

struct BlendAttrs {
  double factor = 1;

  Status init(const Attrs &attrs) { return attrs.get("factor", &factor); }

  // Checks x and weight, and infers y.
  static Status check(const char *op, const Spec &x, const Spec &weight, Spec *y) {
    AOT_TRY(check_floating(op, "x", x));
    AOT_TRY(check_dtype(op, "weight", weight, x.dtype));
    if (x.rank_known() && x.ndim < 1)
      return fail(kInvalidArgument, "%s: x has shape (), expected at least one axis", op);
    const int64_t in = x.rank_known() ? x.shape[x.ndim - 1] : kUnknownDim;
    if (weight.rank_known() && (weight.ndim != 2 || !same_dim(weight.shape[1], in)))
      return fail(kInvalidArgument, "%s: weight has shape %s, expected (out, %lld)", op, ShapeText(weight).text,
                  static_cast<long long>(in));
    *y = x;
    if (x.rank_known()) y->shape[y->ndim - 1] = bias(x, weight).shape[0];
    return kOk;
  }
  static Spec bias(const Spec &x, const Spec &weight) {
    return Spec::vector(x.dtype, weight.rank_known() ? weight.shape[0] : kUnknownDim);
  }
};

struct Blend : BlendAttrs {
  static constexpr const char *name = "blend";
  static constexpr Slot inputs[] = {{"x"}, {"weight"}, {"bias", optional}};
  static constexpr Slot outputs[] = {{"y"}};

  Status infer(const Tensor *in, Spec *out) const {
    AOT_TRY(check(name, in[0], in[1], &out[0]));
    return in[2] ? check_like(name, "bias", in[2], "weight's first axis", bias(in[0], in[1])) : kOk;
  }
};

struct BlendBackward : BlendAttrs {
  static constexpr const char *name = "blend_backward";
  static constexpr Slot inputs[] = {{"dy"}, {"x"}, {"weight"}};
  static constexpr Slot outputs[] = {{"dx", optional}, {"dweight", optional}, {"dbias", optional}};

  Status infer(const Tensor *in, Spec *out) const {
    Spec y;
    AOT_TRY(check(name, in[1], in[2], &y));
    AOT_TRY(check_like(name, "dy", in[0], "y", y));
    out[0] = in[1], out[1] = in[2], out[2] = bias(in[1], in[2]);
    return kOk;
  }
};

}  // namespace AOT_ISA
}  // namespace aot
