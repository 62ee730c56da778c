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
    const Heads of = heads_of("", x);
    RopeSizes z = sizes(of, cos, positions);
    z.batch = x.product(0, of.leading), z.heads = x.shape[x.ndim - (layout == 1 ? 3 : 2)];
    return z;
  }

 protected:
  // A tensor whose heads are rotated, named by its slot: the number of its leading axes, its sequence and head_dim.
  struct Heads {
    const char *slot;
    const Spec &x;
    int leading;
    int64_t seq, dim;
  };

  // All sizes but batch and heads.
  RopeSizes sizes(const Heads &of, const Spec &cos, const Spec &positions) const {
    RopeSizes z{};
    z.heads_first = layout == 1;
    z.seq = of.seq, z.dim = of.dim, z.lines = 1;
    if (!cos) return z;
    z.half = rotated(of) / 2;
    z.width = cos.shape[cos.ndim - 1], z.rows = cos.product(0, cos.ndim - 1);
    z.lines = positions ? positions.product(0, positions.ndim - 1) : cos.product(0, cos.ndim - 2);
    return z;
  }

  Heads heads_of(const char *slot, const Spec &x) const {
    if (!x.rank_known()) return {slot, x, 0, kUnknownDim, kUnknownDim};
    return {slot, x, x.ndim - 3, x.shape[x.ndim - (layout == 1 ? 2 : 3)], x.shape[x.ndim - 1]};
  }

  Status check_heads(const char *op, const char *slot, const Spec &x) const {
    AOT_TRY(check_floating(op, slot, x));
    if (!x.rank_known() || x.ndim >= 3) return kOk;
    return fail(kInvalidArgument, "%s: %s has shape %s, expected (..., %s, head_dim)", op, slot, ShapeText(x).text,
                layout == 1 ? "heads, sequence" : "sequence, heads");
  }

  Status check_tables(const char *op, const Heads &of, const Spec &cos, const Spec &sin, const Spec &positions) const {
    AOT_TRY(check_rotary_dim(op, of));
    AOT_TRY(check_table(op, "cos", cos, of, positions));
    AOT_TRY(check_wider(op, "sin", sin, of.x.dtype));
    AOT_TRY(check_dtype(op, "sin", sin, cos.dtype));
    AOT_TRY(check_shape(op, "sin", sin, "cos", cos));
    return check_positions(op, of, positions);
  }

 private:
  int64_t rotated(const Heads &of) const { return rotary_dim == kHeadDim ? of.dim : rotary_dim; }

  Status check_rotary_dim(const char *op, const Heads &of) const {
    const int64_t dim = of.dim, asked = rotary_dim;
    if (asked == kHeadDim) {
      if (dim < 0 || dim % 2 == 0) return kOk;
      return fail(kInvalidArgument, "%s: %s has shape %s, expected an even head_dim, or a rotary_dim", op, of.slot,
                  ShapeText(of.x).text);
    }
    if (asked >= 0 && asked % 2 == 0 && (dim < 0 || asked <= dim)) return kOk;
    if (dim < 0)
      return fail(kInvalidArgument, "%s: rotary_dim is %lld, expected an even number", op,
                  static_cast<long long>(asked));
    return fail(kInvalidArgument, "%s: rotary_dim is %lld, expected an even number from 0 to %lld, the head_dim of %s",
                op, static_cast<long long>(asked), static_cast<long long>(dim), of.slot);
  }

  Status check_table(const char *op, const char *table, const Spec &cos, const Heads &of, const Spec &positions) const {
    AOT_TRY(check_wider(op, table, cos, of.x.dtype));
    if (!cos.rank_known() || !of.x.rank_known()) return kOk;
    if (cos.ndim < 2 || (positions && cos.ndim > 2))
      return fail(kInvalidArgument, "%s: %s has shape %s, expected (positions, rotary_dim / 2)", op, table,
                  ShapeText(cos).text);
    const int64_t all = rotated(of), width = cos.shape[cos.ndim - 1], rows = cos.shape[cos.ndim - 2];
    if (all >= 0 && !same_dim(width, all / 2) && (interleaved || !same_dim(width, all))) {
      char wider[64] = "";
      if (!interleaved) std::snprintf(wider, sizeof wider, " or %lld", static_cast<long long>(all));
      return fail(kInvalidArgument, "%s: %s has shape %s, expected rows of %lld%s, for %lld elements that are rotated",
                  op, table, ShapeText(cos).text, static_cast<long long>(all / 2), wider, static_cast<long long>(all));
    }
    if (positions) return kOk;
    const bool fits = cos.ndim > 2 ? same_dim(rows, of.seq) : rows < 0 || of.seq < 0 || rows >= of.seq;
    if (!fits)
      return fail(kInvalidArgument, "%s: %s has shape %s, expected %s%lld rows, for the sequence of %s, of shape %s",
                  op, table, ShapeText(cos).text, cos.ndim > 2 ? "" : "at least ", static_cast<long long>(of.seq),
                  of.slot, ShapeText(of.x).text);
    return check_lines(op, table, cos, cos.ndim - 2, of);
  }

  Status check_positions(const char *op, const Heads &of, const Spec &positions) const {
    if (!positions) return kOk;
    AOT_TRY(check_integer(op, "positions", positions));
    if (!positions.rank_known() || !of.x.rank_known()) return kOk;
    if (positions.ndim < 1 || !same_dim(positions.shape[positions.ndim - 1], of.seq))
      return fail(kInvalidArgument,
                  "%s: positions has shape %s, expected (..., %lld), for the sequence of %s, of shape %s", op,
                  ShapeText(positions).text, static_cast<long long>(of.seq), of.slot, ShapeText(of.x).text);
    return check_lines(op, "positions", positions, positions.ndim - 1, of);
  }

  // The first `axes` axes of a tensor are the last leading ones of x, or all 1.
  static Status check_lines(const char *op, const char *name, const Spec &s, int axes, const Heads &of) {
    bool ones = true, same = axes <= of.leading;
    for (int i = 1; i <= axes && axes <= of.leading; ++i) {
      const int64_t n = s.shape[axes - i];
      ones &= same_dim(n, 1), same &= same_dim(n, of.x.shape[of.leading - i]);
    }
    if (axes <= of.leading && (ones || same)) return kOk;
    return fail(kInvalidArgument, "%s: %s has shape %s, expected leading axes of %s, which has shape %s, or 1", op,
                name, ShapeText(s).text, of.slot, ShapeText(of.x).text);
  }
};

struct Rope : RopeAttrs {
  static constexpr const char *name = "rope";
  enum { kX, kCos, kSin, kPositions };
  static constexpr Slot inputs[] = {{"x"}, {"cos"}, {"sin"}, {"positions", optional, kIntegers}};
  static constexpr Slot outputs[] = {{"y"}};

  Status infer(const Tensor *in, Spec *out) const {
    AOT_TRY(check_heads(name, "x", in[kX]));
    AOT_TRY(check_tables(name, heads_of("x", in[kX]), in[kCos], in[kSin], in[kPositions]));
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
    AOT_TRY(check_heads(name, "dy", in[kDy]));
    AOT_TRY(check_tables(name, heads_of("dy", in[kDy]), in[kCos], in[kSin], in[kPositions]));
    if (in[kX]) AOT_TRY(check_like(name, "x", in[kX], "dy", in[kDy]));
    out[kDx] = in[kDy], out[kDcos] = in[kCos], out[kDsin] = in[kSin];
    return kOk;
  }

  // The gradients of the tables alone need x.
  static Status check_x(const Tensor *in, const Tensor *out) {
    if (in[kX] || !(out[kDcos] || out[kDsin])) return kOk;
    return fail(kInvalidArgument, "%s: x is missing, expected it for dcos and dsin", name);
  }
};

}  // namespace AOT_ISA
}  // namespace aot
