// cross_entropy_lse of what cross_entropy takes (cross_entropy.h):
//          y = cross_entropy(x, target, weight)
//          lse = log(sum(exp(s))) of each row, ignored or not, in float32 (float64 for float64)
//          predictions = the first class of the greatest x of each row, or of a NaN in it, in target's dtype
// gradient dx = dy * slope + dlse * p ds/dx, from x: there is no slope
#pragma once
#include "cross_entropy.h"

namespace aot {
inline namespace AOT_ISA {

struct CrossEntropyLse : CrossEntropyAttrs {
  static constexpr const char *name = "cross_entropy_lse";
  static constexpr Slot inputs[] = {{"x"}, {"target", required, kIntegers}, {"weight", optional}};
  // workspace: CrossEntropy's
  static constexpr Slot outputs[] = {{"y"}, {"lse"}, {"predictions", required, kIntegers}, {"workspace", workspace}};
  enum Input { kX, kTarget, kWeight };
  enum Output { kY, kLse, kPredictions, kWork };

  Status infer(const Tensor *in, Spec *out) const {
    const Spec &x = in[kX];
    AOT_TRY(check(name, x, in[kTarget], in[kWeight]));
    out[kY] = loss(x), out[kWork] = scratch(x);
    out[kLse] = rows_of(x, accumulate_dtype(x.dtype)), out[kPredictions] = in[kTarget];
    return kOk;
  }
};

struct CrossEntropyLseBackward : CrossEntropyAttrs {
  static constexpr const char *name = "cross_entropy_lse_backward";
  static constexpr Slot inputs[] = {
      {"dy"}, {"dlse", optional}, {"x"}, {"target", required, kIntegers}, {"weight", optional}};
  static constexpr Slot outputs[] = {{"dx"}, {"workspace", workspace}};  // workspace: CrossEntropyBackward's
  enum Input { kDy, kDlse, kX, kTarget, kWeight };
  enum Output { kDx, kWork };

  Status infer(const Tensor *in, Spec *out) const {
    const Spec &x = in[kX];
    AOT_TRY(check(name, x, in[kTarget], in[kWeight]));
    AOT_TRY(check_like(name, "dy", in[kDy], "the loss", loss(x)));
    if (in[kDlse]) AOT_TRY(check_like(name, "dlse", in[kDlse], "lse", rows_of(x, accumulate_dtype(x.dtype))));
    out[kDx] = x;
    out[kWork] = Spec::vector(accumulate_dtype(x.dtype), kIsCuda ? 1 : 0);
    return kOk;
  }
};

}  // namespace AOT_ISA
}  // namespace aot
