// Batch normalization with the statistics of x itself, over all axes but one, of C channels; M elements of each.
//   batch_norm       y = f(z),  z = xhat * weight + bias,  xhat = (x - mean) * rstd,  rstd = 1 / sqrt(var + eps)
//                    mean = the mean of x,  var = the mean of (x - mean)^2;  f is an activation, or nothing
//   batch_norm_relu  y = relu(z + residual)
//   gradient         g = dy f'(z), of which z is computed again; in batch_norm_relu g = dy where y > 0 or NaN, else 0
//                    dresidual = g
//                    dbias = sum(g),  dweight = sum(g * xhat)
//                    dx = weight * rstd * (g - dbias / M - xhat * dweight / M) + dmean / M + dvar * 2 (x - mean) / M
// Ioffe and Szegedy, arXiv:1502.03167.
//
// Dtypes: where x has 16 bits, weight and bias may be float32. residual, y and the gradients of x and residual have x's
// dtype, dweight and dbias the weight's. mean and var are float32 (float64 for float64), in which all is computed.
#pragma once
#include "aot.h"

namespace aot {
inline namespace AOT_ISA {

// x as (outer, channels, inner).
struct ChannelShape {
  int64_t outer, channels, inner;
  // M; 1 where there are no elements, whose sums are 0.
  int64_t terms() const { return outer && inner ? outer * inner : 1; }
};

// Sums of a channel are taken in slices: on a CPU of kSliceRows rows where channels are the last axis, else of one
// index of the axes before. On a GPU this is the most that there may be, for about 8 blocks on each of 132
// multiprocessors.
constexpr int64_t kSliceRows = 128, kMostBlocks = 1056;
inline int64_t channel_slices(const ChannelShape &s) {
  if (kIsCuda) return s.channels <= 256 ? kMostBlocks : (kMostBlocks * 256 + s.channels - 1) / s.channels;
  return s.inner == 1 ? (s.outer + kSliceRows - 1) / kSliceRows : s.outer;
}

// hardswish is z min(max(z + 3, 0), 6) / 6 (Howard et al., arXiv:1905.02244). relu' is 0 at 0; hardswish' is 0 at -3
// and 1 at 3.
enum NormActivation { kNormPlain, kNormRelu, kNormSilu, kNormHardswish };

struct BatchNormAttrs {
  double eps = 1e-5;
  int64_t axis = 1;

  Status init(const Attrs &attrs) {
    AOT_TRY(attrs.get("eps", &eps));
    return attrs.get("axis", &axis);
  }

  int position(const Spec &x) const { return static_cast<int>(axis < 0 ? axis + x.ndim : axis); }
  ChannelShape shape(const Spec &x) const {
    const int at = position(x);
    return {x.product(0, at), x.shape[at], x.product(at + 1, x.ndim)};
  }
  // eps of a backward. Sums of no elements are 0, and with an eps of 0 they would be multiplied by infinity.
  double gradient_eps(const ChannelShape &s) const { return s.outer && s.inner ? eps : 1; }

 protected:
  Status check_axis(const char *op, const Spec &x) const {
    AOT_TRY(check_floating(op, "x", x));
    if (!x.rank_known() || (axis >= -x.ndim && axis < x.ndim)) return kOk;
    return fail(kInvalidArgument, "%s: axis is %lld, expected an axis of x, which has shape %s", op,
                static_cast<long long>(axis), ShapeText(x).text);
  }
  // One number for each channel.
  Spec of_channels(const Spec &x, DType dtype) const {
    return Spec::vector(dtype, x.rank_known() ? x.shape[position(x)] : kUnknownDim);
  }
  Status check_affine(const char *op, const Spec &weight, const Spec &bias, const Spec &x) const {
    const Spec channels = of_channels(x, x.dtype);
    if (weight) {
      AOT_TRY(check_wider(op, "weight", weight, x.dtype));
      AOT_TRY(check_shape(op, "weight", weight, "the channels of x", channels));
      return bias ? check_like(op, "bias", bias, "weight", weight) : kOk;
    }
    // The gradient of the bias has the dtype of the weight, or x's.
    return bias ? check_like(op, "bias", bias, "the channels of x", channels) : kOk;
  }
  Status check_statistics(const char *op, const char *slot, const Spec &s, const Spec &x) const {
    return s ? check_like(op, slot, s, "the channels of x", of_channels(x, accumulate_dtype(x.dtype))) : kOk;
  }
  // Two sums of each slice, and five numbers: factors, and z's of an activation.
  Spec workspace_of(const Spec &x) const {
    int64_t n = kUnknownDim;
    if (x.known() && x.rank_known()) {
      const ChannelShape s = shape(x);
      n = bounded_product(2 * channel_slices(s) + 5, s.channels);
    }
    return Spec::vector(accumulate_dtype(x.dtype), n);
  }
};

// ------------------------------------------------------------------------------------------------------ operators

struct ActivatedAttrs : BatchNormAttrs {
  static constexpr const char *kActivations[] = {nullptr, "relu", "silu", "hardswish"};  // as NormActivation
  int which = 0;

  Status init(const Attrs &attrs) {
    AOT_TRY(BatchNormAttrs::init(attrs));
    return attrs.get("activation", kActivations, &which);
  }
  NormActivation activation() const { return static_cast<NormActivation>(which); }
};

struct ReluAttrs : BatchNormAttrs {
  static constexpr NormActivation activation() { return kNormRelu; }
};

// kRelu: a ReLU follows, of the sum with a residual if there is one.
template <class Op, bool kRelu_>
struct BatchNormForward : std::conditional_t<kRelu_, ReluAttrs, ActivatedAttrs> {
  static constexpr bool kRelu = kRelu_;
  enum Input { kX, kWeight, kBias, kResidual };
  enum Output { kY, kMean, kVar, kWork };

  Status infer(const Tensor *in, Spec *out) const {
    const Spec &x = in[kX];
    AOT_TRY(this->check_axis(Op::name, x));
    AOT_TRY(this->check_affine(Op::name, in[kWeight], in[kBias], x));
    if (kRelu && in[kResidual]) AOT_TRY(check_like(Op::name, "residual", in[kResidual], "x", x));
    out[kY] = x, out[kWork] = this->workspace_of(x);
    out[kMean] = out[kVar] = this->of_channels(x, accumulate_dtype(x.dtype));
    return kOk;
  }
};

struct BatchNorm : BatchNormForward<BatchNorm, false> {
  static constexpr const char *name = "batch_norm";
  static constexpr Slot inputs[] = {{"x"}, {"weight", optional}, {"bias", optional}};
  static constexpr Slot outputs[] = {{"y"}, {"mean"}, {"var"}, {"workspace", workspace}};
};

struct BatchNormRelu : BatchNormForward<BatchNormRelu, true> {
  static constexpr const char *name = "batch_norm_relu";
  static constexpr Slot inputs[] = {{"x"}, {"weight", optional}, {"bias", optional}, {"residual", optional}};
  static constexpr Slot outputs[] = {{"y"}, {"mean"}, {"var"}, {"workspace", workspace}};
};

// The slots of the backwards. An absent dmean or dvar is zeros.
template <class Op, bool kRelu_>
struct BatchNormGradient : std::conditional_t<kRelu_, ReluAttrs, ActivatedAttrs> {
  static constexpr bool kRelu = kRelu_;
  enum Input { kDy, kDmean, kDvar, kX, kWeight, kBias, kMean = kRelu ? 5 : 6, kVar, kY };  // a bias, or y
  enum Output { kDx, kDweight, kDbias, kDresidual, kWork = kRelu ? 4 : 3 };

  Status infer(const Tensor *in, Spec *out) const {
    const Spec &x = in[kX], &weight = in[kWeight];
    AOT_TRY(this->check_axis(Op::name, x));
    AOT_TRY(this->check_affine(Op::name, weight, kRelu ? Spec() : static_cast<const Spec &>(in[kBias]), x));
    AOT_TRY(check_like(Op::name, "dy", in[kDy], "x", x));
    if (kRelu) AOT_TRY(check_like(Op::name, "y", in[kY], "x", x));
    AOT_TRY(this->check_statistics(Op::name, "dmean", in[kDmean], x));
    AOT_TRY(this->check_statistics(Op::name, "dvar", in[kDvar], x));
    AOT_TRY(this->check_statistics(Op::name, "mean", in[kMean], x));
    AOT_TRY(this->check_statistics(Op::name, "var", in[kVar], x));
    out[kDx] = x;
    out[kDweight] = out[kDbias] = weight ? static_cast<const Spec &>(weight) : this->of_channels(x, x.dtype);
    if (kRelu) out[kDresidual] = x;
    out[kWork] = this->workspace_of(x);
    return kOk;
  }
};

struct BatchNormBackward : BatchNormGradient<BatchNormBackward, false> {
  static constexpr const char *name = "batch_norm_backward";
  static constexpr Slot inputs[] = {
      {"dy"}, {"dmean", optional}, {"dvar", optional}, {"x"}, {"weight", optional}, {"bias", optional}, {"mean"},
      {"var"}};
  static constexpr Slot outputs[] = {
      {"dx", optional}, {"dweight", optional}, {"dbias", optional}, {"workspace", workspace}};
};

struct BatchNormReluBackward : BatchNormGradient<BatchNormReluBackward, true> {
  static constexpr const char *name = "batch_norm_relu_backward";
  static constexpr Slot inputs[] = {
      {"dy"}, {"dmean", optional}, {"dvar", optional}, {"x"}, {"weight", optional}, {"mean"}, {"var"}, {"y"}};
  static constexpr Slot outputs[] = {
      {"dx", optional}, {"dweight", optional}, {"dbias", optional}, {"dresidual", optional}, {"workspace", workspace}};
};

}  // namespace AOT_ISA
}  // namespace aot
