// The norms, over the trailing axes of x, whose lengths are normalized_shape. A row is what these axes span, N
// elements.
//   layer_norm  xhat = (x - mean) * rstd,   rstd = 1 / sqrt(mean((x - mean)^2) + eps),   stats = (mean, rstd)
//   rms_norm    xhat = x * rstd,            rstd = 1 / sqrt(mean(x^2) + eps),            stats = (rstd)
//               y = xhat * w + bias,        w = weight + weight_offset, or 1 without a weight
//   gradient    g = dy * w
//               dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), without mean(g) for rms_norm
//               dweight = sum over rows of dy * xhat,   dbias = sum over rows of dy
//   add_...     the norm of h = x + residual, rounded to the residual's dtype; outputs y and h
//               dx = dresidual = the norm's dx at h, + dh
// Ba, Kiros and Hinton, arXiv:1607.06450; Zhang and Sennrich, arXiv:1910.07467.
//
// Dtypes: where x has 16 bits, weight and bias may be float32, and so may residual, and then h, dh and dresidual. y, dy
// and dx have x's dtype, dweight and dbias the weight's. All are computed in float32.
//
// Lines: weight and bias may have more of the trailing axes of x than the normalized ones, as (H, D) where x is
// (B, T, H, D). They are then a matrix (P, N), and row r takes line r % P; dweight and dbias are sums over the rows of
// each line.
#pragma once
#include "aot.h"

namespace aot {
inline namespace AOT_ISA {

// Rows of partial sums that a backward keeps for dweight and dbias: at most as many as x has, and about 2M elements, so
// that their memory traffic is small compared to x's. With P lines these are of x as a matrix (rows / P, P * N).
inline int64_t partial_rows(int64_t rows, int64_t cols) {
  constexpr int64_t kMost = kIsCuda ? 528 : 32;  // CUDA: 4 blocks on each of 132 multiprocessors; CPU: a few threads
  int64_t fit = (int64_t{9} << 18) / (cols > 0 ? cols : 1);
  fit = fit < 16 ? 16 : fit > kMost ? kMost : fit;
  return rows >= 0 && rows < fit ? rows : fit;
}

// kCentred: the mean is subtracted (layer_norm, not rms_norm). kAdd: the input is x + residual.
template <bool kCentred_, bool kAdd_>
struct NormAttrs {
  static constexpr bool kCentred = kCentred_, kAdd = kAdd_;
  static constexpr int kStats = kCentred ? 2 : 1;  // numbers of a row's statistics: (mean,) rstd
  Ints normalized_shape;

  Status init(const Attrs &attrs) {
    AOT_TRY(attrs.get("normalized_shape", &normalized_shape));
    AOT_TRY(attrs.get("eps", &eps_));
    return attrs.get("weight_offset", &weight_offset_);
  }

  double weight_offset(const Spec &weight) const { return weight ? weight_offset_ : 0; }

  // The default of rms_norm is the machine epsilon of the dtype that it computes in, as in torch.
  double eps(DType dtype) const {
    if (kCentred || eps_.given) return eps_.value;
    return accumulate_dtype(dtype) == DType::float64 ? 0x1p-52 : 0x1p-23;
  }

  // x as a matrix (rows, cols).
  int64_t rows(const Spec &x) const { return x.product(0, x.ndim - normalized_shape.n); }
  int64_t cols() const {
    int64_t n = 1;
    for (int i = 0; i < normalized_shape.n; ++i) n *= normalized_shape.value[i];
    return n;
  }
  // P, the lines of weight and bias; 1 without a weight.
  int64_t weight_rows(const Spec &weight) const {
    return weight ? weight.product(0, weight.ndim - normalized_shape.n) : 1;
  }
  // The rows of each line.
  int64_t rows_per_line(const Spec &x, const Spec &weight) const {
    const int64_t lines = weight_rows(weight);
    return lines > 0 ? rows(x) / lines : 0;
  }

 protected:
  Status check_rows(const char *op, const char *slot, const Spec &x) const {
    AOT_TRY(check_floating(op, slot, x));
    const Ints &n = normalized_shape;
    if (n.n == 0) return fail(kInvalidArgument, "%s: normalized_shape is empty, expected at least one axis", op);
    bool fits = !x.rank_known() || x.ndim >= n.n;
    for (int i = 0; fits && x.rank_known() && i < n.n; ++i) {
      const int64_t dim = x.shape[x.ndim - n.n + i];
      fits = dim < 0 || dim == n.value[i];  // normalized_shape is known: a negative value fits nothing
    }
    if (fits) return kOk;
    return fail(kInvalidArgument, "%s: %s has shape %s, expected its trailing axes to be normalized_shape %s", op, slot,
                ShapeText(x).text, ShapeText(n.value, n.n).text);
  }
  // weight and bias. `x`: shape and dtype.
  Status check_affine(const char *op, const Spec &weight, const Spec &bias, const Spec &x) const {
    if (weight) {
      AOT_TRY(check_wider(op, "weight", weight, x.dtype));
      AOT_TRY(check_lines(op, weight, x));
      return bias ? check_like(op, "bias", bias, "weight", weight) : kOk;
    }
    if (!bias) return kOk;
    // The backward is not given the bias: its gradient has the dtype and the lines of the weight.
    if (is_wider(bias.dtype, x.dtype))
      return fail(kUnsupportedDtype, "%s: bias has dtype %s, expected %s where there is no weight", op,
                  dtype_name(bias.dtype), dtype_name(x.dtype));
    return check_like(op, "bias", bias, "normalized_shape", affine(x.dtype));
  }
  // The dtype is `model`, or one of 16 bits where that is float32.
  static Status check_narrower(const char *op, const char *slot, const Spec &s, DType model) {
    if (model == DType::unknown) return check_floating(op, slot, s);
    if (same_dtype(s.dtype, model) || is_wider(model, s.dtype)) return kOk;
    return fail(kUnsupportedDtype, "%s: %s has dtype %s, expected %s%s", op, slot, dtype_name(s.dtype),
                model == DType::float32 ? "float16, bfloat16 or " : "", dtype_name(model));
  }
  Status check_stats(const char *op, const char *slot, const Spec &s, const Spec &x) const {
    return s ? check_like(op, slot, s, kCentred ? "each row's mean and rstd" : "each row's rstd", stats(x)) : kOk;
  }
  Spec affine(DType dtype) const {
    Spec s;
    s.dtype = dtype, s.ndim = normalized_shape.n;
    for (int i = 0; i < s.ndim; ++i) s.shape[i] = normalized_shape.value[i];
    return s;
  }
  // The spec of the gradients of weight and bias.
  Spec affine(const Spec &weight, DType dtype) const { return weight ? weight : affine(dtype); }
  // (..., kStats)
  Spec stats(const Spec &x) const {
    Spec s = x;
    s.dtype = accumulate_dtype(x.dtype);
    if (!x.rank_known()) return s;
    s.ndim = x.ndim - normalized_shape.n + 1;
    if (s.ndim <= kMaxNdim) s.shape[s.ndim - 1] = kStats;
    return s;
  }

 private:
  // Whether the shape is normalized_shape, or has more of x's trailing axes.
  Status check_lines(const char *op, const Spec &weight, const Spec &x) const {
    if (!weight.rank_known()) return kOk;
    const int more = weight.ndim - normalized_shape.n;
    bool fits = more >= 0 && (!x.rank_known() || weight.ndim <= x.ndim);
    for (int i = 0; fits && i < weight.ndim; ++i) {
      const int64_t expected = i >= more        ? normalized_shape.value[i - more]
                               : x.rank_known() ? x.shape[x.ndim - weight.ndim + i]
                                                : kUnknownDim;
      fits = same_dim(weight.shape[i], expected);
    }
    if (fits) return kOk;
    const Spec n = affine(x.dtype);
    if (!x.rank_known() || x.ndim == n.ndim) return check_shape(op, "weight", weight, "normalized_shape", n);
    return fail(
        kInvalidArgument,
        "%s: weight has shape %s, expected %s, the shape of normalized_shape, or more of the trailing axes of %s", op,
        ShapeText(weight).text, ShapeText(n).text, ShapeText(x).text);
  }
  Number eps_ = {false, 1e-5};  // layer_norm's default
  double weight_offset_ = 0;
};

// The tensor in slot `at`. A slot that the operator does not have, -1, is absent.
template <int at>
const Tensor &slot(const Tensor *tensors) {
  static const Tensor absent = {};
  if constexpr (at < 0) return absent;
  else return tensors[at];
}

// A norm derives from this and adds its name and slots: x, residual, weight, bias; y, h, stats. h is like residual.
template <class Op, bool kCentred, bool kAdd>
struct Norm : NormAttrs<kCentred, kAdd> {
  static constexpr int kX = 0, kResidual = kAdd ? 1 : -1, kWeight = 1 + kAdd, kBias = 2 + kAdd;
  static constexpr int kY = 0, kH = kAdd ? 1 : -1, kStatsOut = 1 + kAdd;

  Status infer(const Tensor *in, Spec *out) const {
    const Spec &x = in[kX], &residual = slot<kResidual>(in);
    AOT_TRY(this->check_rows(Op::name, "x", x));
    if constexpr (kAdd) {
      AOT_TRY(check_wider(Op::name, "residual", residual, x.dtype));
      AOT_TRY(check_shape(Op::name, "residual", residual, "x", x));
    }
    AOT_TRY(this->check_affine(Op::name, in[kWeight], in[kBias], x));
    out[kY] = x;
    if constexpr (kAdd) out[kH] = residual;
    out[kStatsOut] = this->stats(x);
    return kOk;
  }
};

// The slots of a backward: dy, dh, x (h of an add_ norm), weight, stats; dx, dresidual, dweight, dbias, workspace.
// Absent stats are recomputed, and an absent dh is zeros. dresidual may be absent beside a dx of its dtype, which then
// stands for both. The workspace has (partial_rows, 2, P * N) partial sums, then, on CUDA, the recomputed stats.
template <class Op, bool kCentred, bool kAdd>
struct NormBackward : NormAttrs<kCentred, kAdd> {
  static constexpr int kDy = 0, kDh = kAdd ? 1 : -1, kX = 1 + kAdd, kWeight = 2 + kAdd, kStatsIn = 3 + kAdd;
  static constexpr int kDx = 0, kDresidual = kAdd ? 1 : -1, kDweight = 1 + kAdd, kDbias = 2 + kAdd, kWork = 3 + kAdd;

  Status infer(const Tensor *in, Spec *out) const {
    Spec x = in[kX];  // h of an add_ norm
    const Spec &dy = in[kDy], &weight = in[kWeight];
    const char *x_name = Op::inputs[kX].name;
    AOT_TRY(this->check_rows(Op::name, x_name, x));
    if constexpr (kAdd) {
      if (in[kDh]) AOT_TRY(check_like(Op::name, "dh", in[kDh], x_name, x));
      AOT_TRY(this->check_narrower(Op::name, "dy", dy, x.dtype));
      AOT_TRY(check_shape(Op::name, "dy", dy, x_name, x));
      out[kDresidual] = in[kX];
      x.dtype = dy.dtype;
    } else {
      AOT_TRY(check_like(Op::name, "dy", dy, x_name, x));
    }
    AOT_TRY(this->check_affine(Op::name, weight, Spec(), x));
    AOT_TRY(this->check_stats(Op::name, Op::inputs[kStatsIn].name, in[kStatsIn], x));
    out[kDx] = kAdd ? dy : in[kX];
    for (int i = kDweight; i < kWork; ++i) out[i] = this->affine(weight, x.dtype);
    out[kWork] = workspace_spec(x, weight, !in[kStatsIn]);
    return kOk;
  }

 private:
  Spec workspace_spec(const Spec &x, const Spec &weight, bool with_stats) const {
    int64_t n = kUnknownDim;
    if (x.known() && weight.known()) {
      const int64_t cols = this->weight_rows(weight) * this->cols(), rows = this->rows_per_line(x, weight);
      n = 2 * partial_rows(rows, cols) * cols + (kIsCuda && with_stats ? this->kStats * this->rows(x) : 0);
    }
    return Spec::vector(accumulate_dtype(x.dtype), n);
  }
};

// ------------------------------------------------------------------------------------------------------ operators

// The arguments are torch.nn.functional.layer_norm's.
struct LayerNorm : Norm<LayerNorm, true, false> {
  static constexpr const char *name = "layer_norm";
  static constexpr Slot inputs[] = {{"x"}, {"weight", optional}, {"bias", optional}};
  static constexpr Slot outputs[] = {{"y"}, {"stats", optional}};
};

struct LayerNormBackward : NormBackward<LayerNormBackward, true, false> {
  static constexpr const char *name = "layer_norm_backward";
  static constexpr Slot inputs[] = {{"dy"}, {"x"}, {"weight", optional}, {"stats", optional}};
  static constexpr Slot outputs[] = {
      {"dx", optional}, {"dweight", optional}, {"dbias", optional}, {"workspace", workspace}};
};

// The arguments are torch.nn.functional.rms_norm's, and a bias.
struct RmsNorm : Norm<RmsNorm, false, false> {
  static constexpr const char *name = "rms_norm";
  static constexpr Slot inputs[] = {{"x"}, {"weight", optional}, {"bias", optional}};
  static constexpr Slot outputs[] = {{"y"}, {"rstd", optional}};
};

struct RmsNormBackward : NormBackward<RmsNormBackward, false, false> {
  static constexpr const char *name = "rms_norm_backward";
  static constexpr Slot inputs[] = {{"dy"}, {"x"}, {"weight", optional}, {"rstd", optional}};
  static constexpr Slot outputs[] = {
      {"dx", optional}, {"dweight", optional}, {"dbias", optional}, {"workspace", workspace}};
};

struct AddLayerNorm : Norm<AddLayerNorm, true, true> {
  static constexpr const char *name = "add_layer_norm";
  static constexpr Slot inputs[] = {{"x"}, {"residual"}, {"weight", optional}, {"bias", optional}};
  static constexpr Slot outputs[] = {{"y"}, {"h"}, {"stats", optional}};
};

struct AddLayerNormBackward : NormBackward<AddLayerNormBackward, true, true> {
  static constexpr const char *name = "add_layer_norm_backward";
  static constexpr Slot inputs[] = {{"dy"}, {"dh", optional}, {"h"}, {"weight", optional}, {"stats", optional}};
  static constexpr Slot outputs[] = {
      {"dx", optional}, {"dresidual", optional}, {"dweight", optional}, {"dbias", optional}, {"workspace", workspace}};
};

struct AddRmsNorm : Norm<AddRmsNorm, false, true> {
  static constexpr const char *name = "add_rms_norm";
  static constexpr Slot inputs[] = {{"x"}, {"residual"}, {"weight", optional}, {"bias", optional}};
  static constexpr Slot outputs[] = {{"y"}, {"h"}, {"rstd", optional}};
};

struct AddRmsNormBackward : NormBackward<AddRmsNormBackward, false, true> {
  static constexpr const char *name = "add_rms_norm_backward";
  static constexpr Slot inputs[] = {{"dy"}, {"dh", optional}, {"h"}, {"weight", optional}, {"rstd", optional}};
  static constexpr Slot outputs[] = {
      {"dx", optional}, {"dresidual", optional}, {"dweight", optional}, {"dbias", optional}, {"workspace", workspace}};
};

}  // namespace AOT_ISA
}  // namespace aot
