// matmul: y = a b for each pair of matrices along the leading axes, which broadcast; either may be stored transposed.
// The gradients are products too, da = dy b^T and db = a^T dy, summed over the axes that a or b was broadcast along.
#pragma once
#include "gemm/transposed.h"

namespace aot {
inline namespace AOT_ISA {

struct MatmulAttrs {
  bool transpose_a = false, transpose_b = false, allow_tf32 = false;

  Status init(const Attrs &attrs) {
    AOT_TRY(attrs.get("transpose_a", &transpose_a));
    AOT_TRY(attrs.get("transpose_b", &transpose_b));
    return attrs.get("allow_tf32", &allow_tf32);
  }

  // Checks a and b and infers y, whose rank is unknown if one of theirs is.
  Status check(const char *op, const Spec &a, const Spec &b, Spec *y) const {
    AOT_TRY(check_floating(op, "a", a));
    AOT_TRY(check_floating(op, "b", b));
    AOT_TRY(check_dtype(op, "b", b, a.dtype));
    AOT_TRY(check_axes(op, "a", a));
    AOT_TRY(check_axes(op, "b", b));
    *y = Spec::unknown_rank(a.dtype);
    if (!a.rank_known() || !b.rank_known()) return kOk;
    if (!same_dim(k(a), b.shape[b.ndim - (transpose_b ? 1 : 2)])) {
      char expected[64];
      std::snprintf(expected, sizeof expected, transpose_b ? "(..., n, %lld)" : "(..., %lld, n)",
                    static_cast<long long>(k(a)));
      return fail(kInvalidArgument, "%s: b has shape %s, expected %s, to multiply %s, the shape of a", op,
                  ShapeText(b).text, expected, ShapeText(a).text);
    }
    y->ndim = a.ndim > b.ndim ? a.ndim : b.ndim;
    for (int i = 1; i <= y->ndim - 2; ++i) {
      const int64_t da = leading(a, i), db = leading(b, i);
      if (!same_dim(da, db) && da != 1 && db != 1)
        return fail(kInvalidArgument,
                    "%s: b has shape %s, whose leading axes do not broadcast with those of %s, the shape of a", op,
                    ShapeText(b).text, ShapeText(a).text);
      // known if one of the two is, and broadcast cannot change it
      y->shape[y->ndim - 2 - i] = da == 1 || (da < 0 && db > 1) ? db : db == 1 || da >= 0 || db < 0 ? da : -1;
    }
    y->shape[y->ndim - 2] = m(a), y->shape[y->ndim - 1] = n(b);
    return check_size(op, "the product", *y);
  }

  int64_t m(const Spec &a) const { return a.shape[a.ndim - (transpose_a ? 1 : 2)]; }
  int64_t k(const Spec &a) const { return a.shape[a.ndim - (transpose_a ? 2 : 1)]; }
  int64_t n(const Spec &b) const { return b.shape[b.ndim - (transpose_b ? 2 : 1)]; }

  MatmulProblem y_problem(const Tensor &a, const Tensor &b, const Tensor &y) const {
    MatmulProblem p = {a.dtype, m(a), n(b), k(a), matrix(a, transpose_a), matrix(b, transpose_b), matrix(y, false)};
    for_axes(a, b, y, [&](int64_t length, int64_t a, int64_t b, int64_t y) { p.add({length, a, b, y}); });
    return p.fold(), p;
  }
  MatmulProblem da_problem(const Tensor &dy, const Tensor &a, const Tensor &b, const Tensor &da) const {
    const Operand left = matrix(dy, false), right = matrix(b, transpose_b).transpose(), out = matrix(da, false);
    MatmulProblem p = {dy.dtype, m(a), k(a), n(b), left, right, out};
    if (transpose_a) p = {dy.dtype, k(a), m(a), n(b), right.transpose(), left.transpose(), out};
    for_axes(a, b, dy, [&](int64_t length, int64_t a, int64_t b, int64_t dy) {
      p.add(transpose_a ? MatmulProblem::Axis{length, b, dy, a} : MatmulProblem::Axis{length, dy, b, a});
    });
    return p.fold(), p;
  }
  MatmulProblem db_problem(const Tensor &dy, const Tensor &a, const Tensor &b, const Tensor &db) const {
    const Operand left = matrix(a, transpose_a).transpose(), right = matrix(dy, false), out = matrix(db, false);
    MatmulProblem p = {dy.dtype, k(a), n(b), m(a), left, right, out};
    if (transpose_b) p = {dy.dtype, n(b), k(a), m(a), right.transpose(), left.transpose(), out};
    for_axes(a, b, dy, [&](int64_t length, int64_t a, int64_t b, int64_t dy) {
      p.add(transpose_b ? MatmulProblem::Axis{length, dy, a, b} : MatmulProblem::Axis{length, a, dy, b});
    });
    return p.fold(), p;
  }

 protected:
  static Status check_axes(const char *op, const char *slot, const Spec &x) {
    if (!x.rank_known() || x.ndim >= 2) return kOk;
    return fail(kInvalidArgument, "%s: %s has shape %s, expected at least two axes", op, slot, ShapeText(x).text);
  }
  // The i-th leading axis, counted from the last one; 1 if there is none.
  static int64_t leading(const Spec &x, int i) { return i <= x.ndim - 2 ? x.shape[x.ndim - 2 - i] : 1; }

  static Operand matrix(const Tensor &x, bool transposed) { return {x.data, x.shape[x.ndim - 1], transposed}; }

  // f(length, and the elements from one matrix to the next in a, b and y) for the leading axes of y, outermost first.
  template <class F>
  static void for_axes(const Spec &a, const Spec &b, const Spec &y, F f) {
    for (int i = y.ndim - 2; i >= 1; --i) f(leading(y, i), step(a, i), step(b, i), step(y, i));
  }
  static int64_t step(const Spec &x, int i) { return leading(x, i) == 1 ? 0 : x.product(x.ndim - 1 - i, x.ndim); }
};

struct Matmul : MatmulAttrs {
  static constexpr const char *name = "matmul";
  static constexpr Slot inputs[] = {{"a"}, {"b"}};
  static constexpr Slot outputs[] = {{"y"}, {"workspace", workspace}};

  Status infer(const Tensor *in, Spec *out) const {
    AOT_TRY(check(name, in[0], in[1], &out[0]));
    out[1] = Spec::vector(accumulate_dtype(in[0].dtype), kUnknownDim);
    if (!in[0].known() || !in[1].known()) return kOk;
    out[1].shape[0] = library_workspace(out[0].size(), k(in[0]));
    if (transpose_a && !transpose_b && out[0].ndim == 2)  // as both inputs then
      out[1].shape[0] += transposed_elements(m(in[0]), n(in[1]), k(in[0]), in[0].dtype, allow_tf32);
    return kOk;
  }
};

struct MatmulBackward : MatmulAttrs {
  static constexpr const char *name = "matmul_backward";
  static constexpr Slot inputs[] = {{"dy"}, {"a"}, {"b"}};
  static constexpr Slot outputs[] = {{"da", optional}, {"db", optional}, {"workspace", workspace}};

  Status infer(const Tensor *in, Spec *out) const {
    const Spec &a = in[1], &b = in[2];
    Spec y;
    AOT_TRY(check(name, a, b, &y));
    AOT_TRY(check_like(name, "dy", in[0], "y", y));
    out[0] = a, out[1] = b;
    out[2] = Spec::vector(accumulate_dtype(a.dtype), kUnknownDim);
    if (a.known() && b.known())
      out[2].shape[0] =
          scratch_da(a, b, y) + scratch_db(a, b, y) + library_workspace(y.size(), k(a)) + db_copies(a, b, y);
    return kOk;
  }

  // Elements of scratch for the unreduced products of da and db; 0 if nothing was broadcast, or if MatmulProblem::fold
  // makes the sum part of one product.
  static int64_t scratch_da(const Spec &a, const Spec &, const Spec &y) {
    return batch(a) == batch(y) ? 0 : bounded_product(batch(y), matrix_size(a));
  }
  int64_t scratch_db(const Spec &a, const Spec &b, const Spec &y) const {
    const bool folds = !transpose_a && batch(a) == batch(y) && batch(b) == 1;
    return batch(b) == batch(y) || folds ? 0 : bounded_product(batch(y), matrix_size(b));
  }

  // An error if da or db needs scratch that is missing; called before either is written.
  Status check_scratch(const Tensor *in, const Tensor *out) const {
    const Tensor &dy = in[0], &a = in[1], &b = in[2], &da = out[0], &db = out[1], &scratch = out[2];
    const bool needed =
        (da && da_problem(dy, a, b, da).needs_scratch()) || (db && db_problem(dy, a, b, db).needs_scratch());
    return needed && !scratch ? fail(kConventionMisused, "%s: workspace is missing", name) : kOk;
  }

 private:
  // Elements for the copies of a and dy, where db is one product of both as they lie.
  int64_t db_copies(const Spec &a, const Spec &b, const Spec &y) const {
    if (transpose_a || batch(b) != 1 || batch(a) != batch(y)) return 0;
    return transposed_elements(k(a), n(b), a.size() / std::max<int64_t>(k(a), 1), a.dtype, allow_tf32);
  }
  static int64_t batch(const Spec &x) { return x.product(0, x.ndim - 2); }
  static int64_t matrix_size(const Spec &x) { return x.product(x.ndim - 2, x.ndim); }
};

}  // namespace AOT_ISA
}  // namespace aot
