// cross_entropy of x, rows of C logits, with a class index t for each row; p = softmax(x)
//          y = -(1 - a) log(p[t]) - a mean(log(p)), with a = label_smoothing; 0 if t is ignore_index
//          reduction = "none": the rows' losses; "sum"; "mean": the sum divided by the count of rows not ignored
//          slope: the derivative of each row's loss, p - (1 - a) onehot(t) - a / C; 0 if t is ignore_index
// gradient dx = dy * slope, divided by the count for "mean". slope itself is not, which preserves fp16 loss scaling.
// An out-of-range class index is an error on the CPU. CUDA cannot report it without a synchronization: there the loss
// and the gradient of the row are NaN.
// The arguments are torch.nn.functional.cross_entropy's.
#pragma once
#include "aot.h"

namespace aot {
inline namespace AOT_ISA {

struct CrossEntropyAttrs {
  static constexpr const char *kReductions[] = {"none", "mean", "sum"};
  int64_t ignore_index = -100;
  int reduction = 1;
  double label_smoothing = 0;

  Status init(const Attrs &attrs) {
    AOT_TRY(attrs.get("ignore_index", &ignore_index));
    AOT_TRY(attrs.get("reduction", kReductions, &reduction));
    AOT_TRY(attrs.get("label_smoothing", &label_smoothing));
    if (0 <= label_smoothing && label_smoothing <= 1) return kOk;
    return fail(kInvalidArgument, "%s: label_smoothing is %g, expected 0 to 1", attrs.op(), label_smoothing);
  }
  bool reduces() const { return reduction != 0; }
  bool mean() const { return reduction == 1; }

  int64_t rows(const Spec &x) const { return x.product(0, x.ndim - 1); }
  int64_t cols(const Spec &x) const { return x.shape[x.ndim - 1]; }

  // Partial counts of the rows not ignored, which the backward keeps in its workspace. The CPU needs none.
  static constexpr int kParts = kIsCuda ? 64 : 0;

 protected:
  Status check(const char *op, const Spec &x, const Spec &target) const {
    AOT_TRY(check_floating(op, "x", x));
    AOT_TRY(check_integer(op, "target", target));
    if (x.rank_known() && x.ndim != 1 && x.ndim != 2)
      return fail(kInvalidArgument, "%s: x has shape %s, expected (N, C) or (C,)", op, ShapeText(x).text);
    return check_shape(op, "target", target, "x without its last axis", rows_of(x, target.dtype));
  }
  Spec rows_of(const Spec &x, DType dtype) const {
    Spec s = x;
    s.dtype = dtype;
    if (x.rank_known()) --s.ndim;
    return s;
  }
  Spec loss(const Spec &x) const {
    Spec s = rows_of(x, x.dtype);
    if (reduces()) s.ndim = 0;
    return s;
  }
};

struct CrossEntropy : CrossEntropyAttrs {
  static constexpr const char *name = "cross_entropy";
  static constexpr Slot inputs[] = {{"x"}, {"target", required, kIntegers}};
  // workspace: the rows' losses if there is a reduction; at least one element
  static constexpr Slot outputs[] = {{"y"}, {"slope", optional}, {"workspace", workspace}};
  enum Input { kX, kTarget };
  enum Output { kY, kSlope, kWork };

  Status infer(const Tensor *in, Spec *out) const {
    const Spec &x = in[kX];
    AOT_TRY(check(name, x, in[kTarget]));
    out[kY] = loss(x);
    out[kSlope] = x;
    bool known = x.rank_known() && (x.ndim < 2 || x.shape[0] >= 0);
    out[kWork] = Spec::vector(accumulate_dtype(x.dtype), !reduces() ? 1 : known ? 1 + rows(x) : kUnknownDim);
    return kOk;
  }
};

// An absent slope is recomputed from x.
struct CrossEntropyBackward : CrossEntropyAttrs {
  static constexpr const char *name = "cross_entropy_backward";
  static constexpr Slot inputs[] = {{"dy"}, {"x"}, {"target", required, kIntegers}, {"slope", optional}};
  static constexpr Slot outputs[] = {{"dx"}, {"workspace", workspace}};  // workspace: kParts counts
  enum Input { kDy, kX, kTarget, kSlope };
  enum Output { kDx, kWork };

  Status infer(const Tensor *in, Spec *out) const {
    const Spec &x = in[kX];
    AOT_TRY(check(name, x, in[kTarget]));
    AOT_TRY(check_like(name, "dy", in[kDy], "the loss", loss(x)));
    if (in[kSlope]) AOT_TRY(check_like(name, "slope", in[kSlope], "x", x));
    out[kDx] = x;
    out[kWork] = Spec::vector(accumulate_dtype(x.dtype), kParts);
    return kOk;
  }
};

}  // namespace AOT_ISA
}  // namespace aot
