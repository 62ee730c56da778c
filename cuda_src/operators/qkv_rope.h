// qkv_rope: the packed product of a qkv projection as q, k and v, with the rotation of q and k that rope.h states.
//          A row of qkv is heads of head_dim: all of q, then k, then v; grouped: for each head of k those of q that
//          share it, k and v. v is copied, and so are q and k without cos and sin.
// gradient dqkv: dq and dk, rotated by the opposite angle, and dv
//          dcos, dsin as rope's, summed over the heads of q and k
#pragma once
#include "head_counts.h"
#include "rope.h"

#ifdef __CUDACC__
#define AOT_BOTH_SIDES __host__ __device__
#else
#define AOT_BOTH_SIDES
#endif

namespace aot {
inline namespace AOT_ISA {

// The heads of a packed row, in order.
struct PackedHeads {
  int64_t heads, kv_heads;
  uint32_t shared;  // by how many heads of q one of k is shared, where they are grouped; 0: they are not

  // tensor: 0, 1, 2 for q, k, v.
  struct Place {
    int tensor;
    int64_t head;
  };

  AOT_BOTH_SIDES int64_t count() const { return heads + 2 * kv_heads; }
  AOT_BOTH_SIDES int64_t of_tensor(int tensor) const { return tensor == 0 ? heads : kv_heads; }
  AOT_BOTH_SIDES Place operator[](int64_t i) const {
    if (!shared) {
      if (i < heads) return {0, i};
      return i < heads + kv_heads ? Place{1, i - heads} : Place{2, i - heads - kv_heads};
    }
    // in 32 bits, which hold kMostHeads: on a GPU a division in 64 bits takes several times as long
    const uint32_t size = shared + 2, group = static_cast<uint32_t>(i) / size,
                   member = static_cast<uint32_t>(i) - group * size;
    if (member < shared) return {0, int64_t{group} * shared + member};
    return {member == shared ? 1 : 2, group};
  }
};

// Where the heads of one row of the sequence lie.
template <typename T>
struct RowHeads {
  T *packed, *separate[3];
  int64_t dim, step;  // from a head to the next: in the packed row, and in q, k and v

  AOT_BOTH_SIDES T *in_packed(int64_t i) const { return packed + i * dim; }
  AOT_BOTH_SIDES T *in_separate(PackedHeads::Place at) const {
    T *const first = at.tensor == 0 ? separate[0] : at.tensor == 1 ? separate[1] : separate[2];
    return first + at.head * step;
  }
};

// The addresses of heads: those of qkv, and those of q, k and v.
template <typename T>
struct HeadAddresses {
  T *packed, *separate[3];
  PackedHeads order;
  int64_t seq, dim;
  bool heads_first;

  // Row s of example b.
  AOT_BOTH_SIDES RowHeads<T> row(int64_t b, int64_t s) const {
    const int64_t line = b * seq + s;
    const auto begin = [=](int64_t heads) { return (heads_first ? b * heads * seq + s : line * heads) * dim; };
    const int64_t of_kv = begin(order.kv_heads);
    return {packed + line * order.count() * dim,
            {separate[0] + begin(order.heads), separate[1] + of_kv, separate[2] + of_kv},
            dim,
            heads_first ? seq * dim : dim};
  }
};

struct QkvRopeAttrs : RopeAttrs, HeadCounts {
  int64_t heads = 0, kv_heads = kHeads;
  bool grouped = false;

  Status init(const Attrs &attrs) {
    AOT_TRY(attrs.get("heads", &heads));
    AOT_TRY(attrs.get("kv_heads", &kv_heads));
    AOT_TRY(RopeAttrs::init(attrs));
    return attrs.get("grouped", &grouped);
  }

  PackedHeads order() const {
    const int64_t of_kv = kv_heads == kHeads ? heads : kv_heads;
    return {heads, of_kv, grouped && of_kv > 0 ? static_cast<uint32_t>(heads / of_kv) : 0};
  }

  // qkv is qkv or dqkv; tables and positions have passed check.
  RopeSizes sizes(const Spec &qkv, const Spec &cos, const Spec &positions) const {
    RopeSizes z = RopeAttrs::sizes(packed_heads("qkv", qkv), cos, positions);
    z.batch = qkv.product(0, qkv.ndim - 2), z.heads = order().count();
    return z;
  }

  // T: const or not, as the tensors are used.
  template <typename T>
  HeadAddresses<T> addresses(const RopeSizes &z, const Tensor &qkv, const Tensor *separate) const {
    return {qkv.as<T>(),  {separate[0].as<T>(), separate[1].as<T>(), separate[2].as<T>()}, order(), z.seq, z.dim,
            z.heads_first};
  }

 protected:
  Heads packed_heads(const char *slot, const Spec &qkv) const {
    if (!qkv.rank_known()) return {slot, qkv, 0, kUnknownDim, kUnknownDim};
    const int64_t row = qkv.shape[qkv.ndim - 1];
    return {slot, qkv, qkv.ndim - 2, qkv.shape[qkv.ndim - 2], row < 0 ? kUnknownDim : row / order().count()};
  }

  Status check_order(const char *op) const {
    const PackedHeads p = order();
    AOT_TRY(check_count(op, "heads", p.heads));
    AOT_TRY(check_count(op, "kv_heads", p.kv_heads));
    if (!grouped || p.heads % p.kv_heads == 0) return kOk;
    return fail(kInvalidArgument, "%s: kv_heads is %lld, expected a divisor of heads, which is %lld, as it is grouped",
                op, static_cast<long long>(p.kv_heads), static_cast<long long>(p.heads));
  }

  Status check_packed(const char *op, const char *slot, const Spec &qkv) const {
    AOT_TRY(check_floating(op, slot, qkv));
    if (!qkv.rank_known()) return kOk;
    if (qkv.ndim == kMaxNdim)
      return fail(kInvalidArgument, "%s: %s has %d dimensions, expected at most %d", op, slot, qkv.ndim, kMaxNdim - 1);
    const int64_t count = order().count();
    if (qkv.ndim >= 2 && (qkv.shape[qkv.ndim - 1] < 0 || qkv.shape[qkv.ndim - 1] % count == 0)) return kOk;
    return fail(kInvalidArgument,
                "%s: %s has shape %s, expected (..., sequence, a multiple of %lld, heads + 2 kv_heads)", op, slot,
                ShapeText(qkv).text, static_cast<long long>(count));
  }

  // q, k and v have tables together or not at all, and without them nothing that speaks of them.
  Status check_optional_tables(const char *op, const Heads &of, const Spec &cos, const Spec &sin,
                               const Spec &positions) const {
    if (cos && sin) return check_tables(op, of, cos, sin, positions);
    if (cos || sin)
      return fail(kInvalidArgument, "%s: %s is None, expected a table, as %s is", op, cos ? "sin" : "cos",
                  cos ? "cos" : "sin");
    if (positions)
      return fail(kInvalidArgument, "%s: positions has shape %s, expected None without cos and sin", op,
                  ShapeText(positions).text);
    if (rotary_dim == kHeadDim) return kOk;
    return fail(kInvalidArgument, "%s: rotary_dim is %lld, expected None without cos and sin", op,
                static_cast<long long>(rotary_dim));
  }

  // q, k or v of qkv.
  Spec separate(const Heads &of, int tensor) const {
    if (!of.x.rank_known()) return of.x;
    Spec s = of.x;
    const int64_t n = order().of_tensor(tensor);
    s.ndim = of.leading + 3;
    s.shape[of.leading] = layout == 1 ? n : of.seq, s.shape[of.leading + 1] = layout == 1 ? of.seq : n;
    s.shape[of.leading + 2] = of.dim;
    return s;
  }

  // dqkv, of dq.
  Spec packed(const Heads &of) const {
    if (!of.x.rank_known()) return of.x;
    Spec s = of.x;
    s.ndim = of.leading + 2, s.shape[of.leading] = of.seq;
    s.shape[of.leading + 1] = of.dim < 0 ? kUnknownDim : bounded_product(of.dim, order().count());
    return s;
  }
};

struct QkvRope : QkvRopeAttrs {
  static constexpr const char *name = "qkv_rope";
  enum { kQkv, kCos, kSin, kPositions };
  static constexpr Slot inputs[] = {{"qkv"}, {"cos", optional}, {"sin", optional}, {"positions", optional, kIntegers}};
  static constexpr Slot outputs[] = {{"q"}, {"k"}, {"v"}};

  Status infer(const Tensor *in, Spec *out) const {
    AOT_TRY(check_order(name));
    AOT_TRY(check_packed(name, "qkv", in[kQkv]));
    const Heads of = packed_heads("qkv", in[kQkv]);
    AOT_TRY(check_optional_tables(name, of, in[kCos], in[kSin], in[kPositions]));
    for (int i = 0; i < 3; ++i) out[i] = separate(of, i);
    return kOk;
  }
};

struct QkvRopeBackward : QkvRopeAttrs {
  static constexpr const char *name = "qkv_rope_backward";
  enum { kDq, kDk, kDv, kQkv, kCos, kSin, kPositions };
  enum { kDqkv, kDcos, kDsin };
  static constexpr Slot inputs[] = {{"dq"},
                                    {"dk"},
                                    {"dv"},
                                    {"qkv", optional},
                                    {"cos", optional},
                                    {"sin", optional},
                                    {"positions", optional, kIntegers}};
  static constexpr Slot outputs[] = {{"dqkv", optional}, {"dcos", optional}, {"dsin", optional}};

  Status infer(const Tensor *in, Spec *out) const {
    AOT_TRY(check_order(name));
    AOT_TRY(check_heads(name, "dq", in[kDq]));
    const Heads of = heads_of("dq", in[kDq]);
    for (int i = 0; i < 3; ++i) AOT_TRY(check_separate(i, in[i], of));
    out[kDqkv] = packed(of);
    AOT_TRY(check_size(name, "dqkv", out[kDqkv]));
    if (in[kQkv]) AOT_TRY(check_like(name, "qkv", in[kQkv], "dqkv", out[kDqkv]));
    AOT_TRY(check_optional_tables(name, of, in[kCos], in[kSin], in[kPositions]));
    out[kDcos] = Spec::vector(in[kDq].dtype, 0);
    if (in[kCos]) out[kDcos] = in[kCos];
    out[kDsin] = out[kDcos];
    return kOk;
  }

  // The gradients of the tables alone need qkv.
  static Status check_qkv(const Tensor *in, const Tensor *out) {
    if (in[kQkv] || !(out[kDcos] || out[kDsin])) return kOk;
    return fail(kInvalidArgument, "%s: qkv is missing, expected it for dcos and dsin", name);
  }

 private:
  Status check_separate(int i, const Spec &d, const Heads &of) const {
    AOT_TRY(check_floating(name, inputs[i].name, d));
    AOT_TRY(check_dtype(name, inputs[i].name, d, of.x.dtype));
    const Spec expected = separate(of, i);
    if (same_shape(d, expected)) return kOk;
    return fail(kInvalidArgument, "%s: %s has shape %s, expected %s, as heads is %lld, and kv_heads %lld", name,
                inputs[i].name, ShapeText(d).text, ShapeText(expected).text, static_cast<long long>(order().heads),
                static_cast<long long>(order().kv_heads));
  }
};

}  // namespace AOT_ISA
}  // namespace aot
