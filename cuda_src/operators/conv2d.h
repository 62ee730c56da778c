// conv2d of images x, C channels of (H, W) numbers each, with a weight of O output channels. c runs over the C / groups
// channels of o's group, (r, s) over the kernel, and x is zero outside of the image.
//          y[o, p, q] = bias[o] + sum over c, r, s of x[c, h(p, r), w(q, s)] * weight[o, c, r, s]
//                       h(p, r) = p * stride + r * dilation - padding, and w(q, s) likewise
// gradient dx[c, h, w] = sum of dy[o, p, q] * weight[o, c, r, s] over the (o, p, q, r, s) with h(p, r) = h, w(q, s) = w
//          dweight[o, c, r, s] = sum over images, p, q of dy[o, p, q] * x[c, h(p, r), w(q, s)]
//          dbias[o] = sum over images, p, q of dy[o, p, q]
// layout "NCHW": x (..., C, H, W), weight (O, C / groups, kh, kw), y (..., O, P, Q)
//        "NHWC": x (..., H, W, C), weight (O, kh, kw, C / groups), y (..., P, Q, O): the weight's axes in the order of
//                x's, so that the terms of a sum are contiguous, and torch's channels_last tensors, which are this
//                memory under the other layout's names, need no copy.
// The arguments are torch.nn.functional.conv2d's. allow_tf32: on CUDA, whether float32 is multiplied as TF32.
#pragma once
#include "conv/conv2d_shape.h"

namespace aot {
inline namespace AOT_ISA {

struct Conv2dAttrs : Conv2dParams {
  Status init(const Attrs &attrs) {
    AOT_TRY(get_pair(attrs, "stride", &stride, 1));
    AOT_TRY(get_pair(attrs, "padding", &padding, 0));
    AOT_TRY(get_pair(attrs, "dilation", &dilation, 1));
    AOT_TRY(attrs.get("groups", &groups));
    if (groups < 1)
      return fail(kInvalidArgument, "%s: groups is %lld, expected at least 1", attrs.op(),
                  static_cast<long long>(groups));
    AOT_TRY(attrs.get("layout", kLayouts, &layout));
    return attrs.get("allow_tf32", &allow_tf32);
  }

  Conv2dShape shape(const Spec &x, const Spec &weight, const Spec &y) const {
    const Image in = image(x), kernel = image(weight), out = image(y);
    const int64_t batch = x.product(0, x.ndim - 3), outs = weight.shape[0];
    return {batch, in.channels, in.height, in.width, outs, kernel.height, kernel.width, out.height, out.width};
  }
  // The size of x along an axis, with the zeros around it.
  int64_t padded_size(int64_t in, int axis) const { return in + 2 * padding.value[axis]; }

 protected:
  struct Image {
    int64_t channels, height, width;
  };
  // The last three axes of x, y or weight; unknown if those are.
  Image image(const Spec &s) const {
    if (!s.rank_known() || s.ndim < 3) return {kUnknownDim, kUnknownDim, kUnknownDim};
    const int64_t *last = s.shape + s.ndim - 3;
    return nhwc() ? Image{last[2], last[0], last[1]} : Image{last[0], last[1], last[2]};
  }

  // Checks x and weight, and infers y.
  Status check(const char *op, const Spec &x, const Spec &weight, Spec *y) const {
    AOT_TRY(check_floating(op, "x", x));
    if (x.rank_known() && x.ndim < 3)
      return fail(kInvalidArgument, "%s: x has shape %s, expected %s", op, ShapeText(x).text,
                  nhwc() ? "(..., H, W, C)" : "(..., C, H, W)");
    AOT_TRY(check_floating(op, "weight", weight));
    AOT_TRY(check_dtype(op, "weight", weight, x.dtype));
    if (weight.rank_known() && weight.ndim != 4)
      return fail(kInvalidArgument, "%s: weight has shape %s, expected %s", op, ShapeText(weight).text,
                  nhwc() ? "(O, kh, kw, C / groups)" : "(O, C / groups, kh, kw)");
    const Image in = image(x), kernel = image(weight);
    const int64_t out_channels = weight.rank_known() ? weight.shape[0] : kUnknownDim;
    const bool channels_known = in.channels >= 0 && kernel.channels >= 0;
    if ((channels_known && in.channels != bounded_product(kernel.channels, groups)) ||
        (out_channels >= 0 && out_channels % groups != 0))
      return fail(kInvalidArgument, "%s: weight has shape %s and x %s, which do not fit in layout %s with groups %lld",
                  op, ShapeText(weight).text, ShapeText(x).text, kLayouts[layout], static_cast<long long>(groups));
    const Image out{out_channels, out_size(in.height, kernel.height, 0), out_size(in.width, kernel.width, 1)};
    if (kernel.height == 0 || kernel.width == 0 || out.height == 0 || out.width == 0)
      return fail(kInvalidArgument,
                  "%s: weight has shape %s and x %s, expected a kernel that fits with padding %s and dilation %s", op,
                  ShapeText(weight).text, ShapeText(x).text, ShapeText(padding.value, 2).text,
                  ShapeText(dilation.value, 2).text);
    // so that indices in an image with the zeros around it do not overflow
    const int64_t most_channels = std::max<int64_t>({in.channels, out_channels, 1});
    const int64_t pixels = bounded_product(padded_size(in.height, 0), padded_size(in.width, 1));
    if (in.height >= 0 && in.width >= 0 && bounded_product(pixels, most_channels) > kMostElements)
      return fail(kInvalidArgument, "%s: x has shape %s, expected at most 2**50 elements with padding %s", op,
                  ShapeText(x).text, ShapeText(padding.value, 2).text);
    *y = x;
    if (!x.rank_known()) return kOk;
    int64_t *last = y->shape + y->ndim - 3;
    if (nhwc()) last[0] = out.height, last[1] = out.width, last[2] = out.channels;
    else last[0] = out.channels, last[1] = out.height, last[2] = out.width;
    return check_size(op, "the result", *y);
  }

  // The size of y along an axis; 0 if the kernel does not fit.
  int64_t out_size(int64_t in, int64_t kernel, int axis) const {
    if (in < 0 || kernel < 1) return kernel ? kUnknownDim : 0;
    const int64_t room = padded_size(in, axis) - bounded_product(dilation.value[axis], kernel - 1) - 1;
    return room < 0 ? 0 : room / stride.value[axis] + 1;
  }

  // (O,), as bias and dbias
  static Spec bias_spec(const Spec &weight) {
    return Spec::vector(weight.dtype, weight.rank_known() ? weight.shape[0] : kUnknownDim);
  }

 private:
  static Status get_pair(const Attrs &attrs, const char *name, Ints *pair, int64_t least) {
    AOT_TRY(attrs.get(name, pair));
    const ShapeText shown(pair->value, pair->n);
    if (pair->n != 2 || pair->value[0] < least || pair->value[1] < least)
      return fail(kInvalidArgument, "%s: %s is %s, expected two integers of at least %lld", attrs.op(), name,
                  shown.text, static_cast<long long>(least));
    if (pair->value[0] <= kMostElements && pair->value[1] <= kMostElements) return kOk;
    return fail(kInvalidArgument, "%s: %s is %s, expected two integers of at most 2**50", attrs.op(), name, shown.text);
  }
};

struct Conv2d : Conv2dAttrs {
  static constexpr const char *name = "conv2d";
  static constexpr Slot inputs[] = {{"x"}, {"weight"}, {"bias", optional}};
  static constexpr Slot outputs[] = {{"y"}, {"workspace", workspace}};  // workspace: packed tensors, or patches

  Status infer(const Tensor *in, Spec *out) const {
    const Spec &x = in[0], &weight = in[1], &bias = in[2];
    AOT_TRY(check(name, x, weight, &out[0]));
    if (bias) AOT_TRY(check_like(name, "bias", bias, "the output channels", bias_spec(weight)));
    out[1] = Spec::vector(accumulate_dtype(x.dtype), kUnknownDim);
    if (!kIsCuda) out[1].shape[0] = 0;
    else if (x.known() && weight.known()) out[1].shape[0] = forward_workspace(shape(x, weight, out[0]), x.dtype);
    return kOk;
  }
};

struct Conv2dBackward : Conv2dAttrs {
  static constexpr const char *name = "conv2d_backward";
  static constexpr Slot inputs[] = {{"dy"}, {"x"}, {"weight"}};
  // workspace: packed weight, dy, and x or dx, or patches of these; partial sums of dweight; partial sums of dbias
  static constexpr Slot outputs[] = {
      {"dx", optional}, {"dweight", optional}, {"dbias", optional}, {"workspace", workspace}};

  Status infer(const Tensor *in, Spec *out) const {
    const Spec &dy = in[0], &x = in[1], &weight = in[2];
    Spec y;
    AOT_TRY(check(name, x, weight, &y));
    AOT_TRY(check_like(name, "dy", dy, "the result", y));
    out[0] = x;
    out[1] = weight;
    out[2] = bias_spec(weight);
    out[2].dtype = x.dtype;
    out[3] = Spec::vector(accumulate_dtype(x.dtype), kUnknownDim);
    if (!kIsCuda) out[3].shape[0] = 0;
    else if (x.known() && weight.known()) out[3].shape[0] = backward_workspace(shape(x, weight, y), x.dtype);
    return kOk;
  }
};

}  // namespace AOT_ISA
}  // namespace aot
