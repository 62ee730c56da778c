// layer_norm over the trailing axes of x that normalized_shape names; a row is what those axes span, N elements of it
//          xhat = (x - mean) * rstd,   rstd = 1 / sqrt(var + eps),   var = mean((x - mean)^2)
//          y = xhat * weight + bias,   stats = (mean, rstd) of each row
// gradient g = dy * weight
//          dx = rstd * (g - mean(g) - xhat * mean(g * xhat))
//          dweight = sum over rows of dy * xhat,   dbias = sum over rows of dy
// Ba, Kiros and Hinton, arXiv:1607.06450; the arguments are torch.nn.functional.layer_norm's.
#pragma once
#include "aot.h"

namespace aot {
inline namespace AOT_ISA {

// Rows of partial sums that layer_norm_backward keeps for dweight and dbias: what fits in about 2M elements, so that
// their traffic stays small beside x's, and no more than there are rows. aotops/ops/layer_norm.py has the same rule.
inline int64_t partial_rows(int64_t rows, int64_t cols) {
  int64_t fit = (int64_t{1} << 21) / (cols > 0 ? cols : 1);
  fit = fit < 16 ? 16 : fit > 1056 ? 1056 : fit;
  return rows >= 0 && rows < fit ? rows : fit;
}

struct LayerNormAttrs {
  Ints normalized_shape;
  double eps = 1e-5;

  Status init(const Attrs &attrs) {
    AOT_TRY(attrs.get("normalized_shape", &normalized_shape));
    return attrs.get("eps", &eps);
  }

  // x as a matrix: rows by cols.
  int64_t rows(const Spec &x) const { return x.product(0, x.ndim - normalized_shape.n); }
  int64_t cols() const {
    int64_t n = 1;
    for (int i = 0; i < normalized_shape.n; ++i) n *= normalized_shape.value[i];
    return n;
  }

 protected:
  Status check_x(const char *op, const Spec &x) const {
    AOT_TRY(check_floating(op, "x", x));
    const Ints &n = normalized_shape;
    if (n.n == 0) return fail(kInvalidArgument, "%s: normalized_shape is empty, expected at least one axis", op);
    bool fits = !x.rank_known() || x.ndim >= n.n;
    for (int i = 0; fits && x.rank_known() && i < n.n; ++i) {
      const int64_t dim = x.shape[x.ndim - n.n + i];
      fits = dim < 0 || dim == n.value[i];  // an attribute is known: a negative one fits nothing
    }
    if (fits) return kOk;
    return fail(kInvalidArgument, "%s: x has shape %s, expected its trailing axes to be normalized_shape %s", op,
                ShapeText(x).text, ShapeText(n.value, n.n).text);
  }
  Status check_affine(const char *op, const char *slot, const Spec &p, const Spec &x) const {
    return p ? check_like(op, slot, p, "normalized_shape", affine(x.dtype)) : kOk;
  }
  Spec affine(DType dtype) const {
    Spec s;
    s.dtype = dtype, s.ndim = normalized_shape.n;
    for (int i = 0; i < s.ndim; ++i) s.shape[i] = normalized_shape.value[i];
    return s;
  }
  // (..., 2): mean and rstd of each row
  Spec stats(const Spec &x) const {
    Spec s = x;
    s.dtype = accumulate_dtype(x.dtype);
    if (!x.rank_known()) return s;
    s.ndim = x.ndim - normalized_shape.n + 1;
    if (s.ndim <= kMaxNdim) s.shape[s.ndim - 1] = 2;
    return s;
  }
};

struct LayerNorm : LayerNormAttrs {
  static constexpr const char *name = "layer_norm";
  static constexpr Slot inputs[] = {{"x"}, {"weight", optional}, {"bias", optional}};
  static constexpr Slot outputs[] = {{"y"}, {"stats", optional}};

  Status infer(const Tensor *in, Spec *out) const {
    const Spec &x = in[0];
    AOT_TRY(check_x(name, x));
    AOT_TRY(check_affine(name, "weight", in[1], x));
    AOT_TRY(check_affine(name, "bias", in[2], x));
    out[0] = x;
    out[1] = stats(x);
    return kOk;
  }
};

// Absent stats are computed again from x.
struct LayerNormBackward : LayerNormAttrs {
  static constexpr const char *name = "layer_norm_backward";
  static constexpr Slot inputs[] = {{"dy"}, {"x"}, {"weight", optional}, {"stats", optional}};
  // workspace: (partial_rows, 2, N) sums of dy * xhat and of dy, then the stats that are absent
  static constexpr Slot outputs[] = {
      {"dx", optional}, {"dweight", optional}, {"dbias", optional}, {"workspace", workspace}};

  Status infer(const Tensor *in, Spec *out) const {
    const Spec &x = in[1];
    AOT_TRY(check_x(name, x));
    AOT_TRY(check_like(name, "dy", in[0], "x", x));
    AOT_TRY(check_affine(name, "weight", in[2], x));
    if (in[3]) AOT_TRY(check_like(name, "stats", in[3], "each row's mean and rstd", stats(x)));
    out[0] = x;
    out[1] = out[2] = affine(x.dtype);
    out[3] = workspace_spec(x, !in[3]);
    return kOk;
  }

 private:
  Spec workspace_spec(const Spec &x, bool with_stats) const {
    Spec s;
    s.dtype = accumulate_dtype(x.dtype), s.ndim = 1, s.shape[0] = kUnknownDim;
    bool known = x.rank_known();
    for (int i = 0; known && i < x.ndim; ++i) known = x.shape[i] >= 0;
    if (known) s.shape[0] = 2 * partial_rows(rows(x), cols()) * cols() + (with_stats ? 2 * rows(x) : 0);
    return s;
  }
};

}  // namespace AOT_ISA
}  // namespace aot
