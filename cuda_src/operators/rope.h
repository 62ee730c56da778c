// rope: rotary position embedding. With c = cos[p, j] and s = sin[p, j], where p is the position of a row of x,
//          y[a] = x[a] c - x[b] s,  y[b] = x[b] c + x[a] s  for each pair j < rotary_dim / 2
//          a, b = j, j + rotary_dim / 2; interleaved: 2 j, 2 j + 1. Elements from rotary_dim on are copied.
// gradient dx[a] = dy[a] c + dy[b] s,  dx[b] = dy[b] c - dy[a] s: the rotation by the opposite angle
//          dcos[p, j] = sum(dy[a] x[a] + dy[b] x[b]),  dsin[p, j] = sum(dy[b] x[a] - dy[a] x[b]) over rows of position
//          p
// cos and sin have x's dtype, or float32 where x has 16 bits. All is computed in float32 (float64 for float64).
#pragma once
#include "aot.h"

namespace aot {
inline namespace AOT_ISA {

// x as (batch, seq, heads, dim), or (batch, heads, seq, dim) with heads_first. The tables are (lines * seq, width), of
// which example b reads line b % lines, or, with positions, (rows, width), indexed by positions (lines, seq).
struct RopeSizes {
  int64_t batch, seq, heads, dim, half, width, rows, lines;
  bool heads_first;

  int64_t x_rows() const { return batch * seq * heads; }
};

struct RopeAttrs {
  static constexpr int64_t kHeadDim = INT64_MIN;  // rotary_dim is head_dim
  bool interleaved = false;
  int layout = 0;
  int64_t rotary_dim = kHeadDim;

  Status init(const Attrs &attrs) {
    static constexpr const char *kLayouts[] = {"BSHD", "BHSD"};
    AOT_TRY(attrs.get("interleaved", &interleaved));
    AOT_TRY(attrs.get("layout", kLayouts, &layout));
    return attrs.get("rotary_dim", &rotary_dim);
  }

  // x is x or dy; tables and positions have passed check.
  RopeSizes sizes(const Spec &x, const Spec &cos, const Spec &positions) const {
    RopeSizes z;
    z.heads_first = layout == 1;
    z.batch = x.product(0, x.ndim - 3), z.dim = x.shape[x.ndim - 1];
    z.seq = x.shape[seq_axis(x)], z.heads = x.shape[x.ndim - (z.heads_first ? 3 : 2)];
    z.half = rotated(x) / 2;
    z.width = cos.shape[cos.ndim - 1], z.rows = cos.product(0, cos.ndim - 1);
    z.lines = positions ? positions.product(0, positions.ndim - 1) : cos.product(0, cos.ndim - 2);
    return z;
  }

 protected:
  Status check(const char *op, const char *slot, const Spec &x, const Spec &cos, const Spec &sin,
               const Spec &positions) const {
    AOT_TRY(check_floating(op, slot, x));
    if (x.rank_known() && x.ndim < 3)
      return fail(kInvalidArgument, "%s: %s has shape %s, expected (..., %s, head_dim)", op, slot, ShapeText(x).text,
                  layout == 1 ? "heads, sequence" : "sequence, heads");
    AOT_TRY(check_rotary_dim(op, slot, x));
    AOT_TRY(check_table(op, "cos", cos, slot, x, positions));
    AOT_TRY(check_wider(op, "sin", sin, x.dtype));
    AOT_TRY(check_dtype(op, "sin", sin, cos.dtype));
    AOT_TRY(check_shape(op, "sin", sin, "cos", cos));
    return check_positions(op, slot, x, positions);
  }

 private:
  int seq_axis(const Spec &x) const { return x.ndim - (layout == 1 ? 2 : 3); }
  int64_t rotated(const Spec &x) const { return rotary_dim == kHeadDim ? x.shape[x.ndim - 1] : rotary_dim; }

  Status check_rotary_dim(const char *op, const char *slot, const Spec &x) const {
    const int64_t dim = x.rank_known() ? x.shape[x.ndim - 1] : kUnknownDim, asked = rotary_dim;
    if (asked == kHeadDim) {
      if (dim < 0 || dim % 2 == 0) return kOk;
      return fail(kInvalidArgument, "%s: %s has shape %s, expected an even head_dim, or a rotary_dim", op, slot,
                  ShapeText(x).text);
    }
    if (asked >= 0 && asked % 2 == 0 && (dim < 0 || asked <= dim)) return kOk;
    if (dim < 0)
      return fail(kInvalidArgument, "%s: rotary_dim is %lld, expected an even number", op,
                  static_cast<long long>(asked));
    return fail(kInvalidArgument, "%s: rotary_dim is %lld, expected an even number from 0 to %lld, the head_dim of %s",
                op, static_cast<long long>(asked), static_cast<long long>(dim), slot);
  }

  Status check_table(const char *op, const char *table, const Spec &cos, const char *slot, const Spec &x,
                     const Spec &positions) const {
    AOT_TRY(check_wider(op, table, cos, x.dtype));
    if (!cos.rank_known() || !x.rank_known()) return kOk;
    if (cos.ndim < 2 || (positions && cos.ndim > 2))
      return fail(kInvalidArgument, "%s: %s has shape %s, expected (positions, rotary_dim / 2)", op, table,
                  ShapeText(cos).text);
    const int64_t all = rotated(x), width = cos.shape[cos.ndim - 1], rows = cos.shape[cos.ndim - 2];
    if (all >= 0 && !same_dim(width, all / 2) && (interleaved || !same_dim(width, all))) {
      char wider[64] = "";
      if (!interleaved) std::snprintf(wider, sizeof wider, " or %lld", static_cast<long long>(all));
      return fail(kInvalidArgument, "%s: %s has shape %s, expected rows of %lld%s, for %lld elements that are rotated",
                  op, table, ShapeText(cos).text, static_cast<long long>(all / 2), wider, static_cast<long long>(all));
    }
    if (positions) return kOk;
    const int64_t seq = x.shape[seq_axis(x)];
    const bool fits = cos.ndim > 2 ? same_dim(rows, seq) : rows < 0 || seq < 0 || rows >= seq;
    if (!fits)
      return fail(kInvalidArgument, "%s: %s has shape %s, expected %s%lld rows, for the sequence of %s, of shape %s",
                  op, table, ShapeText(cos).text, cos.ndim > 2 ? "" : "at least ", static_cast<long long>(seq), slot,
                  ShapeText(x).text);
    return check_lines(op, table, cos, cos.ndim - 2, slot, x);
  }

  Status check_positions(const char *op, const char *slot, const Spec &x, const Spec &positions) const {
    if (!positions) return kOk;
    AOT_TRY(check_integer(op, "positions", positions));
    if (!positions.rank_known() || !x.rank_known()) return kOk;
    const int64_t seq = x.shape[seq_axis(x)];
    if (positions.ndim < 1 || !same_dim(positions.shape[positions.ndim - 1], seq))
      return fail(kInvalidArgument,
                  "%s: positions has shape %s, expected (..., %lld), for the sequence of %s, of shape %s", op,
                  ShapeText(positions).text, static_cast<long long>(seq), slot, ShapeText(x).text);
    return check_lines(op, "positions", positions, positions.ndim - 1, slot, x);
  }

  // The first `axes` axes of a tensor are the last of x's leading ones, or all 1.
  static Status check_lines(const char *op, const char *name, const Spec &s, int axes, const char *slot,
                            const Spec &x) {
    const int leading = x.ndim - 3;
    bool ones = true, same = axes <= leading;
    for (int i = 1; i <= axes && axes <= leading; ++i) {
      const int64_t n = s.shape[axes - i];
      ones &= same_dim(n, 1), same &= same_dim(n, x.shape[leading - i]);
    }
    if (axes <= leading && (ones || same)) return kOk;
    return fail(kInvalidArgument, "%s: %s has shape %s, expected leading axes of %s, which has shape %s, or 1", op,
                name, ShapeText(s).text, slot, ShapeText(x).text);
  }

  static Status check_wider(const char *op, const char *slot, const Spec &s, DType model) {
    if (model == DType::unknown) return check_floating(op, slot, s);
    const bool narrow = model == DType::float16 || model == DType::bfloat16;
    if (same_dtype(s.dtype, model) || (narrow && s.dtype == DType::float32)) return kOk;
    return fail(kUnsupportedDtype, "%s: %s has dtype %s, expected %s%s", op, slot, dtype_name(s.dtype),
                dtype_name(model), narrow ? " or float32" : "");
  }
};

struct Rope : RopeAttrs {
  static constexpr const char *name = "rope";
  enum { kX, kCos, kSin, kPositions };
  static constexpr Slot inputs[] = {{"x"}, {"cos"}, {"sin"}, {"positions", optional, kIntegers}};
  static constexpr Slot outputs[] = {{"y"}};

  Status infer(const Tensor *in, Spec *out) const {
    AOT_TRY(check(name, "x", in[kX], in[kCos], in[kSin], in[kPositions]));
    out[0] = in[kX];
    return kOk;
  }
};

struct RopeBackward : RopeAttrs {
  static constexpr const char *name = "rope_backward";
  enum { kDy, kX, kCos, kSin, kPositions };
  enum { kDx, kDcos, kDsin };
  static constexpr Slot inputs[] = {{"dy"}, {"x", optional}, {"cos"}, {"sin"}, {"positions", optional, kIntegers}};
  static constexpr Slot outputs[] = {{"dx", optional}, {"dcos", optional}, {"dsin", optional}};

  Status infer(const Tensor *in, Spec *out) const {
    AOT_TRY(check(name, "dy", in[kDy], in[kCos], in[kSin], in[kPositions]));
    if (in[kX]) AOT_TRY(check_like(name, "x", in[kX], "dy", in[kDy]));
    out[kDx] = in[kDy], out[kDcos] = in[kCos], out[kDsin] = in[kSin];
    return kOk;
  }

  // x is needed for the gradients of the tables alone.
  static Status check_x(const Tensor *in, const Tensor *out) {
    if (in[kX] || !(out[kDcos] || out[kDsin])) return kOk;
    return fail(kInvalidArgument, "%s: x is missing, expected it for dcos and dsin", name);
  }
};

}  // namespace AOT_ISA
}  // namespace aot
