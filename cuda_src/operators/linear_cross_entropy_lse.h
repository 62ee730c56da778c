// linear_cross_entropy_lse of what linear_cross_entropy takes (linear_cross_entropy.h):
//          y = linear_cross_entropy(x, weight, target, bias, class_weight)
//          lse = cross_entropy_lse's of the logits, which are rounded to x's dtype
//          slopes: linear_cross_entropy's, of y alone
// gradient without dlse as linear_cross_entropy's; with it from x again, because each row has a dlse of its own
#pragma once
#include "linear_cross_entropy.h"

namespace aot {
inline namespace AOT_ISA {

struct LinearCrossEntropyLse : LinearCrossEntropyAttrs {
  static constexpr const char *name = "linear_cross_entropy_lse";
  static constexpr Slot inputs[] = {
      {"x"}, {"weight"}, {"target", required, kIntegers}, {"bias", optional}, {"class_weight", optional}};
  static constexpr Slot outputs[] = {{"y"},
                                     {"lse"},
                                     {"x_slope", optional},
                                     {"weight_slope", optional},
                                     {"bias_slope", optional},
                                     {"workspace", workspace}};
  enum Output { kY, kLse, kSlopes };

  Status infer(const Tensor *in, Spec *out) const {
    Spec logits;
    AOT_TRY(infer_forward(name, in, out + kY, out + kSlopes, &logits));
    out[kLse] = rows_of(logits, accumulate_dtype(logits.dtype));
    return kOk;
  }
};

struct LinearCrossEntropyLseBackward : LinearCrossEntropyAttrs {
  static constexpr const char *name = "linear_cross_entropy_lse_backward";
  static constexpr Slot inputs[] = {{"dy"},
                                    {"dlse", optional},
                                    {"x"},
                                    {"weight"},
                                    {"target", required, kIntegers},
                                    {"bias", optional},
                                    {"class_weight", optional},
                                    {"x_slope", optional},
                                    {"weight_slope", optional},
                                    {"bias_slope", optional}};
  static constexpr Slot outputs[] = {
      {"dx", optional}, {"dweight", optional}, {"dbias", optional}, {"workspace", workspace}};
  enum { kDy, kDlse, kGiven };

  Status infer(const Tensor *in, Spec *out) const { return infer_backward(name, in[kDy], in[kDlse], in + kGiven, out); }
};

inline Status linear_cross_entropy_lse(const LinearCrossEntropyLse &op, const Tensor *in, const Tensor *out,
                                       void *stream) {
  const LseTensors rows = {out[op.kLse], Tensor()};
  return linear_cross_entropy_forward(op.name, op, in, out[op.kY], out + op.kSlopes, rows, stream);
}

inline Status linear_cross_entropy_lse_backward(const LinearCrossEntropyLseBackward &op, const Tensor *in,
                                                const Tensor *out, void *stream) {
  const LseTensors rows = {Tensor(), in[op.kDlse]};
  return linear_cross_entropy_gradients(op.name, op, in[op.kDy], in + op.kGiven, out, rows, stream);
}

}  // namespace AOT_ISA
}  // namespace aot
