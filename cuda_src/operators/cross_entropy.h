// cross_entropy of x, rows of C logits, with a class index t for each row; s = x, or softcap * tanh(x / softcap);
//          p = softmax(s); lse = log(sum(exp(s))); w = the weights of the classes, or 1; a = label_smoothing
//          y = -(1 - a) w[t] log(p[t]) - a / C sum(w log(p)) + z_loss lse^2; 0 if t is ignore_index
//          reduction = "none": the rows' losses; "sum"; "mean": the sum divided by the sum of w[t] of the rows that are
//          not ignored, which without weights is their count
//          dtype: y's, x's by default; float32 for an x of 16 bits
//          slope: the derivative of y,
//          (((1 - a) w[t] + a / C sum(w) + 2 z_loss lse) p - (1 - a) w[t] onehot(t) - a / C w) ds/dx,
//          for "mean" divided as y is, but not in float16; 0 if t is ignore_index. For "none" it has no columns: the
//          backward computes dx from x, because each row has a dy of its own, and dx is rounded once then
// gradient dx = dy * slope, for "mean" in float16 divided. There dy may be the scale of the loss, without which the
//          quotient would underflow. The weights are constants.
// slope may be written over x, and dx over slope: the same address, of the whole tensor. Where dy is 1, and nothing is
// left to divide, dx over slope is then neither read nor written.
// An out-of-range class index is an error on the CPU. CUDA cannot report it without a synchronization: there the loss
// and the gradient of the row are NaN; the other rows' gradients are those without its weight.
// The arguments are torch.nn.functional.cross_entropy's, dtype, z_loss and softcap.
#pragma once
#include "aot.h"

namespace aot {
inline namespace AOT_ISA {

struct CrossEntropyAttrs {
  static constexpr const char *kReductions[] = {"none", "mean", "sum"};
  static constexpr const char *kDTypes[] = {"float16", "bfloat16", "float32", "float64"};  // in the order of DType
  int64_t ignore_index = -100;
  int reduction = 1;
  double label_smoothing = 0;
  int dtype = -1;  // among kDTypes; -1: x's
  double z_loss = 0, softcap = 0;

  Status init(const Attrs &attrs) {
    AOT_TRY(attrs.get("ignore_index", &ignore_index));
    AOT_TRY(attrs.get("reduction", kReductions, &reduction));
    AOT_TRY(attrs.get("label_smoothing", &label_smoothing));
    AOT_TRY(attrs.get("dtype", kDTypes, &dtype));
    AOT_TRY(attrs.get("z_loss", &z_loss));
    AOT_TRY(attrs.get("softcap", &softcap));
    if (!(0 <= label_smoothing && label_smoothing <= 1))
      return fail(kInvalidArgument, "%s: label_smoothing is %g, expected 0 to 1", attrs.op(), label_smoothing);
    AOT_TRY(check_finite(attrs.op(), "z_loss", z_loss));
    return check_finite(attrs.op(), "softcap", softcap);
  }
  bool reduces() const { return reduction != 0; }
  bool mean() const { return reduction == 1; }

  int64_t rows(const Spec &x) const { return x.product(0, x.ndim - 1); }
  int64_t cols(const Spec &x) const { return x.shape[x.ndim - 1]; }

  // Whether slope is divided by the count. In float16 the backward divides.
  bool divides_slope(const Spec &x) const { return mean() && x.dtype != DType::float16; }

  static constexpr int kLosses = 4;  // where the rows' losses begin in a forward's workspace

  // Whether there is a slope: "none" has none.
  bool keeps(const Tensor &slope) const { return slope && reduces(); }

 protected:
  Spec slope(const Spec &x) const {
    Spec s = x;
    if (x.rank_known() && !reduces()) s.shape[x.ndim - 1] = 0;
    return s;
  }
  Status check(const char *op, const Spec &x, const Spec &target, const Spec &weight) const {
    AOT_TRY(check_floating(op, "x", x));
    if (x.rank_known() && x.ndim != 1 && x.ndim != 2)
      return fail(kInvalidArgument, "%s: x has shape %s, expected (N, C) or (C,)", op, ShapeText(x).text);
    AOT_TRY(check_target(op, x, target));
    return weight ? check_weight(op, "weight", x, weight) : kOk;
  }
  Status check_target(const char *op, const Spec &x, const Spec &target) const {
    AOT_TRY(check_integer(op, "target", target));
    AOT_TRY(check_result(op, x));
    return check_shape(op, "target", target, "x without its last axis", rows_of(x, target.dtype));
  }
  // x: the logits.
  static Status check_weight(const char *op, const char *slot, const Spec &x, const Spec &weight) {
    const bool narrow = itemsize(x.dtype) == 2;
    if (x.dtype == DType::unknown) AOT_TRY(check_floating(op, slot, weight));
    else if (!same_dtype(weight.dtype, x.dtype) && !(narrow && weight.dtype == DType::float32))
      return fail(kUnsupportedDtype, "%s: %s has dtype %s, expected %s%s", op, slot, dtype_name(weight.dtype),
                  dtype_name(x.dtype), narrow ? " or float32" : "");
    if (!x.rank_known() || !weight.rank_known()) return kOk;
    const int64_t classes = x.shape[x.ndim - 1];
    if (weight.ndim == 1 && same_dim(weight.shape[0], classes)) return kOk;
    return fail(kInvalidArgument, "%s: %s has shape %s, expected %s, a number for each class", op, slot,
                ShapeText(weight).text, ShapeText(&classes, 1).text);
  }
  Spec rows_of(const Spec &x, DType dtype) const {
    Spec s = x;
    s.dtype = dtype;
    if (x.rank_known()) --s.ndim;
    return s;
  }
  Spec loss(const Spec &x) const {
    Spec s = rows_of(x, dtype < 0 ? x.dtype : result());
    if (reduces()) s.ndim = 0;
    return s;
  }
  // A forward's workspace.
  Spec scratch(const Spec &x) const {
    const bool known = x.rank_known() && (x.ndim < 2 || x.shape[0] >= 0);
    return Spec::vector(accumulate_dtype(x.dtype), !reduces() ? 1 : known ? kLosses + rows(x) : kUnknownDim);
  }

 private:
  static Status check_finite(const char *op, const char *attr, double value) {
    if (value >= 0 && value < __builtin_inf()) return kOk;
    return fail(kInvalidArgument, "%s: %s is %g, expected a finite number, 0 or more", op, attr, value);
  }
  DType result() const { return static_cast<DType>(static_cast<int>(DType::float16) + dtype); }
  Status check_result(const char *op, const Spec &x) const {
    if (dtype < 0 || same_dtype(x.dtype, result())) return kOk;
    if (result() == DType::float32 && x.dtype != DType::float64) return kOk;
    return fail(kUnsupportedDtype, "%s: dtype is %s, expected None%s %s%s", op, kDTypes[dtype],
                itemsize(x.dtype) == 2 ? "," : " or", dtype_name(x.dtype), itemsize(x.dtype) == 2 ? " or float32" : "");
  }
};

struct CrossEntropy : CrossEntropyAttrs {
  static constexpr const char *name = "cross_entropy";
  static constexpr Slot inputs[] = {{"x"}, {"target", required, kIntegers}, {"weight", optional}};
  // workspace: what the mean is divided by; from element 4, for alignment, the rows' losses if they are reduced
  static constexpr Slot outputs[] = {{"y"}, {"slope", optional}, {"workspace", workspace}};
  enum Input { kX, kTarget, kWeight };
  enum Output { kY, kSlope, kWork };

  Status infer(const Tensor *in, Spec *out) const {
    const Spec &x = in[kX];
    AOT_TRY(check(name, x, in[kTarget], in[kWeight]));
    out[kY] = loss(x), out[kSlope] = slope(x), out[kWork] = scratch(x);
    return kOk;
  }
};

// An absent slope, or one without columns, is recomputed from x.
struct CrossEntropyBackward : CrossEntropyAttrs {
  static constexpr const char *name = "cross_entropy_backward";
  static constexpr Slot inputs[] = {
      {"dy"}, {"x"}, {"target", required, kIntegers}, {"weight", optional}, {"slope", optional}};
  // workspace: what the mean is divided by, on CUDA
  static constexpr Slot outputs[] = {{"dx"}, {"workspace", workspace}};
  enum Input { kDy, kX, kTarget, kWeight, kSlope };
  enum Output { kDx, kWork };

  Status infer(const Tensor *in, Spec *out) const {
    const Spec &x = in[kX];
    AOT_TRY(check(name, x, in[kTarget], in[kWeight]));
    AOT_TRY(check_like(name, "dy", in[kDy], "the loss", loss(x)));
    if (in[kSlope]) AOT_TRY(check_like(name, "slope", in[kSlope], reduces() ? "x" : "x without columns", slope(x)));
    out[kDx] = x;
    out[kWork] = Spec::vector(accumulate_dtype(x.dtype), kIsCuda ? 1 : 0);
    return kOk;
  }
};

}  // namespace AOT_ISA
}  // namespace aot
