// The norms, over the trailing axes of x, whose lengths are normalized_shape. A row is what these axes span, N
// elements.
//   layer_norm  xhat = (x - mean) * rstd,   rstd = 1 / sqrt(mean((x - mean)^2) + eps),   stats = (mean, rstd)
//   rms_norm    xhat = x * rstd,            rstd = 1 / sqrt(mean(x^2) + eps),            stats = (rstd)
//               y = xhat * weight + bias
//   gradient    g = dy * weight
//               dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), without mean(g) for rms_norm
//               dweight = sum over rows of dy * xhat,   dbias = sum over rows of dy
//   add_...     the norm of h = x + residual, rounded to the dtype; outputs y and h
//               dx = dresidual = the norm's dx at h, + dh
// Ba, Kiros and Hinton, arXiv:1607.06450; Zhang and Sennrich, arXiv:1910.07467.
#pragma once
#include "aot.h"

namespace aot {
inline namespace AOT_ISA {

// Rows of partial sums that a backward keeps for dweight and dbias: at most as many as x has, and about 2M elements, so
// that their memory traffic is small compared to x's.
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
  static constexpr int kSums = kCentred ? 2 : 1;   // sums over the rows: dweight(, dbias)
  Ints normalized_shape;

  Status init(const Attrs &attrs) {
    AOT_TRY(attrs.get("normalized_shape", &normalized_shape));
    return attrs.get("eps", &eps_);
  }

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
  Status check_affine(const char *op, const char *slot, const Spec &p, const Spec &x) const {
    return p ? check_like(op, slot, p, "normalized_shape", affine(x.dtype)) : kOk;
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
  Number eps_ = {false, 1e-5};  // layer_norm's default
};

// The tensor in slot `at`. A slot that the operator does not have, -1, is absent.
template <int at>
const Tensor &slot(const Tensor *tensors) {
  static const Tensor absent = {};
  if constexpr (at < 0) return absent;
  else return tensors[at];
}

// A norm derives from this and adds its name and slots: x, residual, weight, bias; y, h, stats.
template <class Op, bool kCentred, bool kAdd>
struct Norm : NormAttrs<kCentred, kAdd> {
  static constexpr int kX = 0, kResidual = kAdd ? 1 : -1, kWeight = 1 + kAdd, kBias = kCentred ? 2 + kAdd : -1;
  static constexpr int kY = 0, kH = kAdd ? 1 : -1, kStatsOut = 1 + kAdd;

  Status infer(const Tensor *in, Spec *out) const {
    const Spec &x = in[kX];
    AOT_TRY(this->check_rows(Op::name, "x", x));
    if constexpr (kAdd) AOT_TRY(check_like(Op::name, "residual", in[kResidual], "x", x));
    AOT_TRY(this->check_affine(Op::name, "weight", in[kWeight], x));
    AOT_TRY(this->check_affine(Op::name, "bias", slot<kBias>(in), x));
    out[kY] = x;
    if constexpr (kAdd) out[kH] = x;
    out[kStatsOut] = this->stats(x);
    return kOk;
  }
};

// The same for a backward: dy, dh, x (h of an add_ norm), weight, stats; dx, dweight, dbias, workspace. Absent stats
// are recomputed. The workspace has (partial_rows, kSums, N) partial sums, then, on CUDA, the recomputed stats.
template <class Op, bool kCentred, bool kAdd>
struct NormBackward : NormAttrs<kCentred, kAdd> {
  static constexpr int kDy = 0, kDh = kAdd ? 1 : -1, kX = 1 + kAdd, kWeight = 2 + kAdd, kStatsIn = 3 + kAdd;
  static constexpr int kDx = 0, kDweight = 1, kDbias = kCentred ? 2 : -1, kWork = kCentred ? 3 : 2;

  Status infer(const Tensor *in, Spec *out) const {
    const Spec &x = in[kX];
    const char *x_name = Op::inputs[kX].name;
    AOT_TRY(this->check_rows(Op::name, x_name, x));
    AOT_TRY(check_like(Op::name, "dy", in[kDy], x_name, x));
    if constexpr (kAdd) AOT_TRY(check_like(Op::name, "dh", in[kDh], x_name, x));
    AOT_TRY(this->check_affine(Op::name, "weight", in[kWeight], x));
    AOT_TRY(this->check_stats(Op::name, Op::inputs[kStatsIn].name, in[kStatsIn], x));
    out[kDx] = x;
    for (int i = kDweight; i < kWork; ++i) out[i] = this->affine(x.dtype);
    out[kWork] = workspace_spec(x, !in[kStatsIn]);
    return kOk;
  }

 private:
  Spec workspace_spec(const Spec &x, bool with_stats) const {
    int64_t n = kUnknownDim;
    if (x.known()) {
      const int64_t rows = this->rows(x), cols = this->cols();
      n = this->kSums * partial_rows(rows, cols) * cols + (kIsCuda && with_stats ? this->kStats * rows : 0);
    }
    return Spec::vector(accumulate_dtype(x.dtype), n);
  }
};

}  // namespace AOT_ISA
}  // namespace aot
