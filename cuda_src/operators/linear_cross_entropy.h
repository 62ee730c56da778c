// linear_cross_entropy: cross_entropy of the logits x weight^T + bias, for the rows of x. Those of some rows at a time
// are in the workspace, where their slope is written over them.
//          x_slope, weight_slope, bias_slope: the derivatives of y, made in the forward from the same logits, so that
//          no product is computed twice. weight's and bias's are summed over all rows in the accumulate dtype, and kept
//          in it, but weight's of bfloat16 in bfloat16: it is as large as weight, and has float32's range. As
//          cross_entropy's slope they are divided by the count for "mean", but not in float16, and have no elements for
//          "none".
// gradient dx = dy * x_slope, and likewise; from x again without slopes. An element of 0, as those of ignored rows are,
//          stays 0 whatever dy is.
// dweight may be written over weight_slope where that has its dtype and shape. Where dy is 1, and nothing is left to
// divide, it is then neither read nor written.
#pragma once
#include <algorithm>

#include "cross_entropy.h"
#include "linear.h"

namespace aot {
inline namespace AOT_ISA {

// How the rows are taken.
struct LogitChunks {
  int64_t rows, in, out;
  // Elements from a row of logits to the next. On CUDA whole vectors, however many classes there are: products of 50257
  // columns run at half the rate of those of 50264. weight, and bias, are then copied with zeros behind them.
  int64_t line;
  int64_t chunk;  // the most rows at a time
  bool sized;     // whether the dtype is known. MindSpore infers shapes without it: then for the largest workspace

  // The rows of weight's slope and the elements of bias's. aotops/ops/_linear_cross_entropy.py has the same rule, in
  // which the classes may be symbolic.
  static int64_t padded(int64_t out) { return out < 0 ? kUnknownDim : (out + 7) / 8 * 8; }

  LogitChunks(const Spec &x, const Spec &weight)
      : rows(x.product(0, x.ndim - 1)),
        in(weight.shape[1]),
        out(weight.shape[0]),
        line(kIsCuda ? line_of(out) : out),
        sized(x.dtype != DType::unknown) {
    // On CUDA a chunk's products must fill the device, and each adds to all of weight's sums in memory: many rows, but
    // logits of at most kBytes, or of weight's own size. On the CPU logits should stay in the caches.
    constexpr int64_t kBytes = kIsCuda ? 576 << 20 : 4 << 20, kStep = kIsCuda ? 128 : 1;
    const int64_t bytes = std::max<int64_t>(line * itemsize(x.dtype), 1);
    int64_t most = std::max<int64_t>(kBytes / bytes, kIsCuda ? std::max<int64_t>(in, 128) : 512) / kStep * kStep;
    // All rows at once need no sums beside weight's slope: they are, where the other logits take no more memory.
    const int64_t sums = sized ? in * wide_bytes(x.dtype) / itemsize(x.dtype) : 0;  // as rows of logits
    if (kIsCuda && rows <= most + sums) most = std::max(most, rows);
    const int64_t chunks = std::max<int64_t>((rows + most - 1) / most, 1);
    chunk = std::min(((rows + chunks - 1) / chunks + kStep - 1) / kStep * kStep, rows);
  }
  // Bytes of an element of the sums that weight's slope is rounded from: 0 where it is the sums.
  static int64_t wide_bytes(DType dtype) {
    return dtype == slope_dtype(dtype) && dtype != accumulate_dtype(dtype) ? itemsize(accumulate_dtype(dtype)) : 0;
  }
  // The dtype of weight's slope.
  static DType slope_dtype(DType dtype) { return dtype == DType::bfloat16 ? dtype : accumulate_dtype(dtype); }

  // Whether the gradient of weight in a backward is one product, which rounds its own sums.
  bool rounds_at_once() const { return sized && kIsCuda && count() == 1 && !pads(); }
  // Whether a forward has sums beside weight's slope. On CUDA one product rounds its own.
  bool sums_apart(DType dtype) const { return !sized || (wide_bytes(dtype) && !(kIsCuda && count() == 1)); }
  bool pads() const { return line != out; }
  // Whether a sum of a row's columns has more elements than bias's slope.
  bool exceeds_slope() const { return line > padded(out); }
  int64_t count() const { return chunk ? (rows + chunk - 1) / chunk : 1; }

 private:
  // Where many classes are padded anyway, 50257 of them in bfloat16 take an H200 0.96 of the time in lines of whole 32
  // elements; float32 takes as long. The first threads of a row, 32 or more of so many classes, clear an element behind
  // it each (cross_entropy_rows.cuh).
  static int64_t line_of(int64_t out) {
    const int64_t unit = out % 8 == 0 || out < 4096 ? 8 : 32;
    return (out + unit - 1) / unit * unit;
  }
};

struct ChunkWorkspace;

struct LinearCrossEntropyAttrs : CrossEntropyAttrs {
  // Forward and backward take these, in order, of which the slopes are the backward's; the slopes are a forward's
  // results in that order, and the gradients a backward's, each with a workspace behind them.
  enum Input { kX, kWeight, kTarget, kBias, kClassWeight, kXSlope, kWeightSlope, kBiasSlope };
  enum Result { kOfX, kOfWeight, kOfBias, kWork };
  bool allow_tf32 = false;

  Status init(const Attrs &attrs) {
    AOT_TRY(CrossEntropyAttrs::init(attrs));
    return attrs.get("allow_tf32", &allow_tf32);
  }

  ChunkWorkspace forward_parts(const Tensor *in) const;
  ChunkWorkspace backward_parts(const Tensor *in) const;

  // Whether gradients are products of slopes. Those that are absent are then not wanted.
  bool has_slopes(const Tensor *in) const {
    return keeps(in[kXSlope]) || keeps(in[kWeightSlope]) || keeps(in[kBiasSlope]);
  }

 protected:
  // y; slopes: and the workspace; logits.
  Status infer_forward(const char *op, const Tensor *in, Spec *y, Spec *slopes, Spec *logits) const;
  // out: the gradients and the workspace. dlse may be absent.
  Status infer_backward(const char *op, const Tensor &dy, const Tensor &dlse, const Tensor *in, Spec *out) const;

  // Checks the inputs and infers the logits.
  Status check(const char *op, const Spec &x, const Spec &weight, const Spec &target, const Spec &bias,
               const Spec &class_weight, Spec *logits) const {
    AOT_TRY(LinearAttrs().check(op, x, weight, bias, logits));
    if (weight.rank_known() && weight.shape[0] == 0)
      return fail(kInvalidArgument, "%s: weight has shape %s, expected one class at least", op, ShapeText(weight).text);
    AOT_TRY(check_target(op, *logits, target));
    return class_weight ? check_weight(op, "class_weight", *logits, class_weight) : kOk;
  }
  // The slopes, by the order of their slots.
  void slopes(const Spec &x, const Spec &weight, const Spec &bias, Spec *slope) const {
    const DType sum = accumulate_dtype(x.dtype);
    const int64_t out = LogitChunks::padded(weight.rank_known() ? weight.shape[0] : kUnknownDim);
    slope[0] = this->slope(x);
    slope[1] = this->slope(weight), slope[1].dtype = LogitChunks::slope_dtype(x.dtype);
    if (weight.rank_known()) slope[1].shape[0] = out;
    slope[2] = Spec::vector(sum, reduces() && bias ? out : 0);
  }
};

// The parts of a workspace, as elements of the accumulate dtype from its beginning.
struct ChunkWorkspace {
  int64_t count = 0, losses, logits, weight, bias, partials, weight_sums, bias_sums, library, size;

  // sums, of_bias: whether it has those of the gradients of weight and bias
  ChunkWorkspace(const LogitChunks &c, DType dtype, bool reduces, bool has_bias, bool sums, bool of_bias) {
    int64_t at = 64;
    auto take = [&](int64_t elements, DType of) {
      const int64_t begin = at;
      return at += workspace_elements(elements, of), begin;
    };
    const DType wide = accumulate_dtype(dtype);
    const bool copies = c.pads();
    losses = take(reduces ? c.rows : 0, wide);
    logits = take(c.chunk * c.line, dtype);
    weight = take(copies ? c.line * c.in : 0, dtype);
    bias = take(copies && has_bias ? c.line : 0, dtype);
    partials = take(kIsCuda && has_bias ? c.count() * LinearBackward::parts(c.line) * c.line : 0, wide);
    weight_sums = take(sums ? LogitChunks::padded(c.out) * c.in : 0, wide);
    bias_sums = take(of_bias ? c.line : 0, wide);
    library = take(library_workspace(c.chunk * c.line, c.in), wide);
    size = at;
  }
};

inline ChunkWorkspace LinearCrossEntropyAttrs::forward_parts(const Tensor *in) const {
  const LogitChunks c(in[kX], in[kWeight]);
  const bool has_bias = static_cast<bool>(in[kBias]);
  return {c,
          in[kX].dtype,
          reduces(),
          has_bias,
          reduces() && c.sums_apart(in[kX].dtype),
          has_bias && reduces() && c.exceeds_slope()};
}

// The sums of a bias too where there is none: its gradient may be wanted nevertheless.
inline ChunkWorkspace LinearCrossEntropyAttrs::backward_parts(const Tensor *in) const {
  const LogitChunks c(in[kX], in[kWeight]);
  return {c, in[kX].dtype, false, true, !c.rounds_at_once(), true};
}

inline Status LinearCrossEntropyAttrs::infer_forward(const char *op, const Tensor *in, Spec *y, Spec *slopes,
                                                     Spec *logits) const {
  const Spec &x = in[kX], &weight = in[kWeight];
  AOT_TRY(check(op, x, weight, in[kTarget], in[kBias], in[kClassWeight], logits));
  *y = loss(*logits);
  this->slopes(x, weight, in[kBias], slopes);
  const bool known = x.known() && weight.known();
  slopes[kWork] = Spec::vector(accumulate_dtype(x.dtype), known ? forward_parts(in).size : kUnknownDim);
  return kOk;
}

inline Status LinearCrossEntropyAttrs::infer_backward(const char *op, const Tensor &dy, const Tensor &dlse,
                                                      const Tensor *in, Spec *out) const {
  static constexpr const char *kSlopes[] = {"x_slope", "weight_slope", "bias_slope"};
  const Spec &x = in[kX], &weight = in[kWeight];
  Spec logits, slope[3];
  AOT_TRY(check(op, x, weight, in[kTarget], in[kBias], in[kClassWeight], &logits));
  AOT_TRY(check_like(op, "dy", dy, "the loss", loss(logits)));
  if (dlse) AOT_TRY(check_like(op, "dlse", dlse, "lse", rows_of(logits, accumulate_dtype(x.dtype))));
  slopes(x, weight, in[kBias], slope);
  for (int i = 0; i < 3; ++i)
    if (in[kXSlope + i]) AOT_TRY(check_like(op, kSlopes[i], in[kXSlope + i], "the forward's result", slope[i]));
  out[kOfX] = x, out[kOfWeight] = weight, out[kOfBias] = LinearAttrs::bias_spec(x, weight);
  const bool known = x.known() && weight.known(), counts = has_slopes(in) && !dlse;  // alone
  const int64_t size = counts ? 1 : known ? backward_parts(in).size : kUnknownDim;
  out[kWork] = Spec::vector(accumulate_dtype(x.dtype), size);
  return kOk;
}

struct LinearCrossEntropy : LinearCrossEntropyAttrs {
  static constexpr const char *name = "linear_cross_entropy";
  static constexpr Slot inputs[] = {
      {"x"}, {"weight"}, {"target", required, kIntegers}, {"bias", optional}, {"class_weight", optional}};
  static constexpr Slot outputs[] = {
      {"y"}, {"x_slope", optional}, {"weight_slope", optional}, {"bias_slope", optional}, {"workspace", workspace}};

  Status infer(const Tensor *in, Spec *out) const {
    Spec logits;
    return infer_forward(name, in, out, out + 1, &logits);
  }
};

struct LinearCrossEntropyBackward : LinearCrossEntropyAttrs {
  static constexpr const char *name = "linear_cross_entropy_backward";
  static constexpr Slot inputs[] = {{"dy"},
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

  Status infer(const Tensor *in, Spec *out) const { return infer_backward(name, in[0], Tensor(), in + 1, out); }
};

// ---------------------------------------------------------------------------------------------------------- entries

// linear_cross_entropy_lse has these beside. Each may be absent.
struct LseTensors {
  Tensor lse, dlse;

  // The tensors of the rows from `first` on.
  LseTensors from(int64_t first) const {
    LseTensors rest = *this;
    for (Tensor *t : {&rest.lse, &rest.dlse})
      if (t->data) t->data = t->as<char>() + first * itemsize(t->dtype);
    return rest;
  }
};

// The two operators' kernels. in: by Input, results: by Result.
Status linear_cross_entropy_forward(const char *name, const LinearCrossEntropyAttrs &op, const Tensor *in,
                                    const Tensor &y, const Tensor *results, const LseTensors &rows, void *stream);
Status linear_cross_entropy_gradients(const char *name, const LinearCrossEntropyAttrs &op, const Tensor &dy,
                                      const Tensor *in, const Tensor *results, const LseTensors &rows, void *stream);

// Whether the gradients that are wanted are those that have slopes.
inline Status check_wanted(const char *name, const LinearCrossEntropyAttrs &op, const Tensor *in,
                           const Tensor *results) {
  static constexpr const char *kNames[][2] = {{"dx", "x_slope"}, {"dweight", "weight_slope"}, {"dbias", "bias_slope"}};
  for (int i = 0; i < 3; ++i)
    if (results[i] && !op.keeps(in[op.kXSlope + i]))
      return fail(kConventionMisused, "%s: %s is wanted, and %s is missing", name, kNames[i][0], kNames[i][1]);
  return kOk;
}

}  // namespace AOT_ISA
}  // namespace aot
