// qkv_attention: attention (attention.h) of the parts of a packed projection. A row of qkv is heads of head_dim: all of
//          q, then k, then v. The kernels of attention read them where they are, and write the parts of dqkv in place:
//          their rows are row_heads apart. A row of y has its heads beside each other.
// gradient dqkv: dq, dk and dv
#pragma once
#include "attention.h"
#include "head_counts.h"

namespace aot {
inline namespace AOT_ISA {

// Attention as its kernels are called for the parts of qkv, with that name in errors.
struct PartsAttention : Attention {
  static constexpr const char *name = "qkv_attention";
};
struct PartsAttentionBackward : AttentionBackward {
  static constexpr const char *name = "qkv_attention_backward";
};

// In attention.cpp and attention.cu, for attention and these.
template <class Op>
Status attention_launcher(const Op &op, const Tensor *in, const Tensor *out, void *stream);
template <class Op>
Status attention_backward_launcher(const Op &op, const Tensor *in, const Tensor *out, void *stream);

struct QkvAttentionAttrs : AttentionAttrs, HeadCounts {
  int64_t heads = 0, kv_heads = kHeads;

  Status init(const Attrs &attrs) {
    AOT_TRY(attrs.get("heads", &heads));
    AOT_TRY(attrs.get("kv_heads", &kv_heads));
    AOT_TRY(attrs.get("causal", &causal));
    AOT_TRY(attrs.get("scale", &scale));
    AOT_TRY(attrs.get("window", &window));
    return attrs.get("softcap", &softcap);
  }

  int64_t of_keys() const { return kv_heads == kHeads ? heads : kv_heads; }
  int64_t of_row() const { return heads + 2 * of_keys(); }

  // q, k or v, of so many heads.
  Spec part(const Spec &qkv, int64_t n) const {
    if (!qkv.rank_known()) return qkv;
    Spec s = qkv;
    const int64_t row = qkv.shape[qkv.ndim - 1];
    s.shape[s.ndim - 1] = n, s.shape[s.ndim++] = row < 0 ? kUnknownDim : row / of_row();
    return s;
  }

  // parts: q, k and v, or their gradients.
  void find_parts(const Tensor &qkv, Tensor *parts) const {
    int64_t before = 0;
    for (int i = 0; i < 3; ++i) {
      const int64_t n = i ? of_keys() : heads;
      static_cast<Spec &>(parts[i]) = part(qkv, n);
      const int64_t dim = parts[i].shape[parts[i].ndim - 1];
      parts[i].data = qkv.data ? static_cast<char *>(qkv.data) + before * dim * itemsize(qkv.dtype) : nullptr;
      before += n;
    }
  }

  template <class Op>
  Op of_parts() const {
    Op op;
    static_cast<AttentionAttrs &>(op) = *this, op.row_heads = of_row();
    return op;
  }

 protected:
  // Checks the inputs, and infers y and lse.
  Status check(const char *op, const Spec &qkv, const Spec &lengths, Spec *y, Spec *lse) const {
    AOT_TRY(check_count(op, "heads", heads));
    AOT_TRY(check_count(op, "kv_heads", of_keys()));
    if (heads % of_keys() != 0)
      return fail(kInvalidArgument, "%s: kv_heads is %lld, expected a divisor of heads, which is %lld", op,
                  static_cast<long long>(of_keys()), static_cast<long long>(heads));
    AOT_TRY(check_packed(op, qkv));
    if (lengths) AOT_TRY(check_lengths(op, "qkv", qkv, qkv.ndim - 2, lengths));
    const Spec k = part(qkv, of_keys());
    AOT_TRY(AttentionAttrs::check(op, part(qkv, heads), k, k, {}, y, lse));
    if (!qkv.rank_known()) return kOk;
    *y = qkv;
    const int64_t dim = k.shape[k.ndim - 1];
    y->shape[y->ndim - 1] = dim < 0 ? kUnknownDim : heads * dim;
    return kOk;
  }

 private:
  Status check_packed(const char *op, const Spec &qkv) const {
    AOT_TRY(check_floating(op, "qkv", qkv));
    if (!qkv.rank_known()) return kOk;
    if (qkv.ndim == kMaxNdim)
      return fail(kInvalidArgument, "%s: qkv has %d dimensions, expected at most %d", op, qkv.ndim, kMaxNdim - 1);
    const int64_t row = qkv.ndim >= 2 ? qkv.shape[qkv.ndim - 1] : 0;
    if (row < 0 || (row > 0 && row % of_row() == 0)) return kOk;
    return fail(kInvalidArgument,
                "%s: qkv has shape %s, expected (..., sequence, a multiple of %lld, heads + 2 kv_heads)", op,
                ShapeText(qkv).text, static_cast<long long>(of_row()));
  }
};

struct QkvAttention : QkvAttentionAttrs {
  static constexpr const char *name = "qkv_attention";
  enum { kQkv, kLengths };
  enum { kY, kLse };
  static constexpr Slot inputs[] = {{"qkv"}, {"lengths", optional, kIntegers}};
  static constexpr Slot outputs[] = {{"y"}, {"lse", optional}};

  Status infer(const Tensor *in, Spec *out) const { return check(name, in[kQkv], in[kLengths], &out[kY], &out[kLse]); }
};

struct QkvAttentionBackward : QkvAttentionAttrs {
  static constexpr const char *name = "qkv_attention_backward";
  enum { kDy, kQkv, kLengths, kY, kLse };
  enum { kDqkv, kWork };
  static constexpr Slot inputs[] = {{"dy"}, {"qkv"}, {"lengths", optional, kIntegers}, {"y"}, {"lse", optional}};
  static constexpr Slot outputs[] = {{"dqkv"}, {"workspace", workspace}};

  Status infer(const Tensor *in, Spec *out) const {
    Spec y, lse;
    AOT_TRY(check(name, in[kQkv], in[kLengths], &y, &lse));
    AOT_TRY(check_like(name, "dy", in[kDy], "y", y));
    AOT_TRY(check_like(name, "y", in[kY], "the result", y));
    if (in[kLse]) AOT_TRY(check_like(name, "lse", in[kLse], "the logarithms of sums", lse));
    out[kDqkv] = in[kQkv], out[kWork] = Spec::vector(lse.dtype, kUnknownDim);
    if (!lse.known() || !in[kQkv].known()) return kOk;
    const int64_t sums = AttentionBackward::sums(in[kQkv]);  // of dq, where a row of dqkv would have it
    const AttentionBackward of = of_parts<AttentionBackward>();
    out[kWork].shape[0] = 2 * lse.size() + sums + of.pass_space(part(in[kQkv], heads), part(in[kQkv], of_keys()));
    return kOk;
  }
};

// The launchers of both, on any device.
inline Status qkv_attention(const QkvAttention &op, const Tensor *in, const Tensor *out, void *stream) {
  using As = PartsAttention;
  Tensor given[sizeof As::inputs / sizeof As::inputs[0]];
  op.find_parts(in[op.kQkv], given + As::kQ), given[As::kLengths] = in[op.kLengths];
  return attention_launcher(op.of_parts<As>(), given, out, stream);
}

inline Status qkv_attention_backward(const QkvAttentionBackward &op, const Tensor *in, const Tensor *out,
                                     void *stream) {
  using As = PartsAttentionBackward;
  Tensor given[sizeof As::inputs / sizeof As::inputs[0]], made[sizeof As::outputs / sizeof As::outputs[0]];
  op.find_parts(in[op.kQkv], given + As::kQ), op.find_parts(out[op.kDqkv], made + As::kDq);
  given[As::kDy] = in[op.kDy], given[As::kLengths] = in[op.kLengths], given[As::kY] = in[op.kY];
  given[As::kLse] = in[op.kLse], made[As::kWork] = out[op.kWork];
  return attention_backward_launcher(op.of_parts<As>(), given, made, stream);
}

}  // namespace AOT_ISA
}  // namespace aot
