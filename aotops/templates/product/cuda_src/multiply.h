// multiply y = a @ b, where a is (m, k) and b is (k, n)
// gradient da = dy @ b', db = a' @ dy
#pragma once
#include "aot.h"

namespace aot {
inline namespace AOT_ISA {

inline Status check_matrix(const char *op, const char *slot, const Spec &s) {
  AOT_TRY(check_floating(op, slot, s));
  if (!s.rank_known() || s.ndim == 2) return kOk;
  return fail(kInvalidArgument, "%s: %s has shape %s, expected two dimensions", op, slot, ShapeText(s).text);
}

// Checks a and b, and sets y to the spec of their product.
inline Status infer_multiply(const char *op, const Spec &a, const Spec &b, Spec *y) {
  AOT_TRY(check_matrix(op, "a", a));
  AOT_TRY(check_matrix(op, "b", b));
  AOT_TRY(check_dtype(op, "b", b, a.dtype));
  *y = Spec::unknown_rank(a.dtype);
  if (!a.rank_known() || !b.rank_known()) return kOk;
  if (!same_dim(a.shape[1], b.shape[0]))
    return fail(kInvalidArgument, "%s: b has shape %s, expected (%lld, n) for a of shape %s", op, ShapeText(b).text,
                static_cast<long long>(a.shape[1]), ShapeText(a).text);
  y->ndim = 2, y->shape[0] = a.shape[0], y->shape[1] = b.shape[1];
  return check_size(op, "y", *y);
}

struct Multiply {
  static constexpr const char *name = "multiply";
  static constexpr Slot inputs[] = {{"a"}, {"b"}};
  static constexpr Slot outputs[] = {{"y"}};

  Status init(const Attrs &) { return kOk; }
  Status infer(const Tensor *in, Spec *out) const { return infer_multiply(name, in[0], in[1], &out[0]); }
};

struct MultiplyBackward {
  static constexpr const char *name = "multiply_backward";
  static constexpr Slot inputs[] = {{"dy"}, {"a"}, {"b"}};
  static constexpr Slot outputs[] = {{"da", optional}, {"db", optional}};

  Status init(const Attrs &) { return kOk; }
  Status infer(const Tensor *in, Spec *out) const {
    Spec y;
    AOT_TRY(infer_multiply(name, in[1], in[2], &y));
    AOT_TRY(check_like(name, "dy", in[0], "a @ b", y));
    out[0] = in[1], out[1] = in[2];
    return kOk;
  }
};

}  // namespace AOT_ISA
}  // namespace aot
