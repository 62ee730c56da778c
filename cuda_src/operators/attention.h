// attention: for query i of a head, with s[j] = scale sum(q[i] k[j]), or softcap tanh(scale sum(q[i] k[j]) / softcap),
//          lse[i] = log(sum(exp(s[j]))),  y[i] = sum(exp(s[j] - lse[i]) v[j]) over the keys j that it sees
//          those of [max(0, at - left), min(length, at + right + 1)), where at = i + keys - queries; causal: right = 0
//          A query that sees none has y = 0 and lse = -inf.
// gradient p[i, j] = exp(s[j] - lse[i]),  delta[i] = sum(dy[i] y[i]),  slope = scale (1 - (s / softcap)^2)
//          ds[i, j] = p[i, j] (sum(dy[i] v[j]) - delta[i]) slope
//          dq[i] = sum(ds[i, j] k[j]) over j,  dk[j] = sum(ds[i, j] q[i]),  dv[j] = sum(p[i, j] dy[i]) over i and the
//          heads of q that share the head of k
// Sums are in float32 (float64 for float64). In 16 bits p and ds are rounded before they are factors.
#pragma once
#include <algorithm>
#include <cmath>

#include "aot.h"

#ifdef __CUDACC__
#define AOT_BOTH_SIDES __host__ __device__
#else
#define AOT_BOTH_SIDES
#endif

namespace aot {
inline namespace AOT_ISA {

// Queries or keys; none if end <= begin.
struct Range {
  int64_t begin, end;
};

// The sizes of a call, as both devices take them. left, right: -1 without a bound.
struct AttentionSizes {
  int64_t batch, heads, kv_heads, queries, keys, dim, v_dim, lines, left, right;
  double scale, softcap;
  bool heads_first;

  AOT_BOTH_SIDES int64_t group() const { return heads / kv_heads; }
  AOT_BOTH_SIDES int64_t rows() const { return batch * heads * queries; }

  // The keys that one of queries [begin, end) sees, of an example with `length` keys.
  AOT_BOTH_SIDES Range seen_by(int64_t begin, int64_t end, int64_t length) const {
    const int64_t first = begin + keys - queries - left, last = end + keys - queries + right;
    return {left < 0 || first < 0 ? 0 : first, right < 0 || last > length ? length : last};
  }
  // The queries that see one of keys [begin, end).
  AOT_BOTH_SIDES Range seeing(int64_t begin, int64_t end) const {
    const int64_t first = begin - (keys - queries) - right, last = end - (keys - queries) + left;
    return {right < 0 || first < 0 ? 0 : first, left < 0 || last > queries ? queries : last};
  }
};

// The rows of one head of one example: row i is at data + i * stride.
template <typename T>
struct HeadRows {
  T *data;
  int64_t stride;

  AOT_BOTH_SIDES T *operator[](int64_t i) const { return data + i * stride; }
};

// The rows of a head of a tensor (batch, seq, heads, dim), or (batch, heads, seq, dim) with heads_first.
template <typename T>
AOT_BOTH_SIDES HeadRows<T> head_rows(T *data, const AttentionSizes &z, int64_t b, int64_t h, int64_t heads, int64_t seq,
                                     int64_t dim) {
  if (z.heads_first) return {data + (b * heads + h) * seq * dim, dim};
  return {data + (b * seq * heads + h) * dim, heads * dim};
}

struct AttentionAttrs {
  bool causal = false;
  Number scale;
  Ints window;
  double softcap = 0;
  int layout = 0;

  Status init(const Attrs &attrs) {
    static constexpr const char *kLayouts[] = {"BSHD", "BHSD"};
    AOT_TRY(attrs.get("causal", &causal));
    AOT_TRY(attrs.get("scale", &scale));
    AOT_TRY(attrs.get("window", &window));
    AOT_TRY(attrs.get("softcap", &softcap));
    return attrs.get("layout", kLayouts, &layout);
  }

  // The inputs have passed check.
  AttentionSizes sizes(const Spec &q, const Spec &k, const Spec &v, const Spec &lengths) const {
    AttentionSizes z{};
    z.heads_first = layout == 1;
    z.batch = q.product(0, q.ndim - 3), z.heads = heads(q), z.kv_heads = heads(k);
    z.queries = seq(q), z.keys = seq(k), z.dim = dim(q), z.v_dim = dim(v);
    z.lines = lengths ? lengths.size() : 1;
    z.left = window.n ? std::min(window.value[0], kMostElements) : -1;
    z.right = window.n ? std::min(window.value[1], kMostElements) : -1;
    if (causal) z.right = 0;
    z.scale = scale.given ? scale.value : 1 / std::sqrt(static_cast<double>(z.dim));
    z.softcap = softcap;
    return z;
  }

 protected:
  int64_t heads(const Spec &x) const { return x.shape[x.ndim - (layout == 1 ? 3 : 2)]; }
  int64_t seq(const Spec &x) const { return x.shape[x.ndim - (layout == 1 ? 2 : 3)]; }
  static int64_t dim(const Spec &x) { return x.shape[x.ndim - 1]; }

  // Checks the inputs and infers y and lse.
  Status check(const char *op, const Spec &q, const Spec &k, const Spec &v, const Spec &lengths, Spec *y,
               Spec *lse) const {
    AOT_TRY(check_attributes(op));
    AOT_TRY(check_heads(op, "q", q, q.dtype));
    AOT_TRY(check_heads(op, "k", k, q.dtype));
    AOT_TRY(check_heads(op, "v", v, q.dtype));
    AOT_TRY(check_keys(op, q, k));
    AOT_TRY(check_values(op, q, k, v));
    if (lengths) AOT_TRY(check_lengths(op, q, lengths));
    *y = q, *lse = Spec::unknown_rank(accumulate_dtype(q.dtype));
    if (!q.rank_known()) return kOk;
    y->shape[y->ndim - 1] = v.rank_known() ? dim(v) : kUnknownDim;
    lse->ndim = q.ndim - 1;
    for (int i = 0; i < q.ndim - 3; ++i) lse->shape[i] = q.shape[i];
    lse->shape[q.ndim - 3] = heads(q), lse->shape[q.ndim - 2] = seq(q);
    return check_size(op, "the result", *y);
  }

 private:
  Status check_attributes(const char *op) const {
    const bool fits = window.n == 2 && window.value[0] >= -1 && window.value[1] >= -1;
    if (window.n && !fits)
      return fail(kInvalidArgument, "%s: window is %s, expected (left, right), each a number of keys, or -1 for all",
                  op, ShapeText(window.value, window.n).text);
    if (scale.given && !std::isfinite(scale.value))
      return fail(kInvalidArgument, "%s: scale is %g, expected a finite number", op, scale.value);
    if (std::isfinite(softcap) && softcap >= 0) return kOk;
    return fail(kInvalidArgument, "%s: softcap is %g, expected a finite number of at least 0", op, softcap);
  }

  Status check_heads(const char *op, const char *slot, const Spec &x, DType dtype) const {
    AOT_TRY(check_floating(op, slot, x));
    AOT_TRY(check_dtype(op, slot, x, dtype));
    if (!x.rank_known() || x.ndim >= 3) return kOk;
    return fail(kInvalidArgument, "%s: %s has shape %s, expected (..., %s, head_dim)", op, slot, ShapeText(x).text,
                layout == 1 ? "heads, sequence" : "sequence, heads");
  }

  // k beside q: leading axes, heads and head_dim.
  Status check_keys(const char *op, const Spec &q, const Spec &k) const {
    if (!q.rank_known()) return kOk;
    if (dim(q) == 0)
      return fail(kInvalidArgument, "%s: q has shape %s, expected a head_dim of at least 1", op, ShapeText(q).text);
    if (!k.rank_known()) return kOk;
    if (!same_leading(q, k) || !same_dim(dim(q), dim(k)))
      return fail(kInvalidArgument,
                  "%s: k has shape %s, expected the leading axes and head_dim of q, which has shape %s", op,
                  ShapeText(k).text, ShapeText(q).text);
    const int64_t of_q = heads(q), of_k = heads(k);
    if (of_q < 0 || of_k < 0 || (of_k ? of_q % of_k == 0 : of_q == 0)) return kOk;
    return fail(kInvalidArgument, "%s: k has shape %s, of %lld heads, expected a divisor of q's %lld heads", op,
                ShapeText(k).text, static_cast<long long>(of_k), static_cast<long long>(of_q));
  }

  Status check_values(const char *op, const Spec &q, const Spec &k, const Spec &v) const {
    if (!v.rank_known()) return kOk;
    bool fits = !q.rank_known() || same_leading(q, v);
    if (fits && k.rank_known()) fits = same_leading(k, v) && same_dim(heads(k), heads(v)) && same_dim(seq(k), seq(v));
    if (fits) return kOk;
    return fail(kInvalidArgument, "%s: v has shape %s, expected that of k but for head_dim, which has shape %s", op,
                ShapeText(v).text, ShapeText(k).text);
  }

  static bool same_leading(const Spec &a, const Spec &b) {
    if (a.ndim != b.ndim) return false;
    for (int i = 0; i < a.ndim - 3; ++i)
      if (!same_dim(a.shape[i], b.shape[i])) return false;
    return true;
  }

  // The last leading axes of q.
  static Status check_lengths(const char *op, const Spec &q, const Spec &lengths) {
    AOT_TRY(check_integer(op, "lengths", lengths));
    if (!lengths.rank_known() || !q.rank_known()) return kOk;
    const int leading = q.ndim - 3, n = lengths.ndim;
    bool same = n <= leading;
    for (int i = 1; i <= n && same; ++i) same = same_dim(lengths.shape[n - i], q.shape[leading - i]);
    if (same) return kOk;
    return fail(kInvalidArgument,
                "%s: lengths has shape %s, expected the leading axes of q, which has shape %s, or the "
                "last of them",
                op, ShapeText(lengths).text, ShapeText(q).text);
  }
};

struct Attention : AttentionAttrs {
  static constexpr const char *name = "attention";
  enum { kQ, kK, kV, kLengths };
  enum { kY, kLse };
  static constexpr Slot inputs[] = {{"q"}, {"k"}, {"v"}, {"lengths", optional, kIntegers}};
  static constexpr Slot outputs[] = {{"y"}, {"lse", optional}};

  Status infer(const Tensor *in, Spec *out) const {
    return check(name, in[kQ], in[kK], in[kV], in[kLengths], &out[kY], &out[kLse]);
  }
};

struct AttentionBackward : AttentionAttrs {
  static constexpr const char *name = "attention_backward";
  enum { kDy, kQ, kK, kV, kLengths, kY, kLse };
  enum { kDq, kDk, kDv, kWork };
  static constexpr Slot inputs[] = {{"dy"},           {"q"}, {"k"}, {"v"}, {"lengths", optional, kIntegers}, {"y"},
                                    {"lse", optional}};
  static constexpr Slot outputs[] = {{"dq", optional}, {"dk", optional}, {"dv", optional}, {"workspace", workspace}};

  Status infer(const Tensor *in, Spec *out) const {
    Spec y, lse;
    AOT_TRY(check(name, in[kQ], in[kK], in[kV], in[kLengths], &y, &lse));
    AOT_TRY(check_like(name, "dy", in[kDy], "y", y));
    AOT_TRY(check_like(name, "y", in[kY], "the result", y));
    if (in[kLse]) AOT_TRY(check_like(name, "lse", in[kLse], "the logarithms of sums", lse));
    out[kDq] = in[kQ], out[kDk] = in[kK], out[kDv] = in[kV];
    out[kWork] = Spec::vector(lse.dtype, kUnknownDim);
    if (lse.known() && in[kQ].known()) out[kWork].shape[0] = 2 * lse.size() + sums(in[kQ]);
    return kOk;
  }

  // The workspace: delta and lse, each with an element for each row, then what a CPU sums dq of 16 bits in. It is there
  // too where the dtype is unknown.
  static int64_t sums(const Spec &q) {
    const bool wide = q.dtype == DType::float32 || q.dtype == DType::float64;
    return kIsCuda || wide ? 0 : q.size();
  }
};

}  // namespace AOT_ISA
}  // namespace aot
