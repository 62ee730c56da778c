// attention: for query i of a head, with s[j] = scale sum(q[i] k[j]), or softcap tanh(scale sum(q[i] k[j]) / softcap),
//          and with the bias t[j] = s[j] + bias[i, j],
//          lse[i] = log(sum(exp(t[j])) + exp(sink)),  y[i] = sum(exp(t[j] - lse[i]) v[j]) over the keys j that it sees
//          those of [max(0, at - left), min(length, at + right + 1)), where at = i + keys - queries; causal: right = 0;
//          of these, those of its own sequence, that mask lets it see, and whose bias is not -inf. With sequences of
//          queries and others of keys, at = i + where its keys end - where its queries end.
//          A query that sees none has y = 0 and lse = -inf, or the sink.
//          With dropout y[i] = sum(r[i, j] exp(t[j] - lse[i]) v[j]), where r is 1 / (1 - dropout) of what is kept, else
//          0.
// gradient p[i, j] = exp(t[j] - lse[i]),  delta[i] = sum(dy[i] y[i]),  slope = scale (1 - (s / softcap)^2)
//          dt[i, j] = p[i, j] (r[i, j] sum(dy[i] v[j]) - delta[i]),  ds[i, j] = dt[i, j] slope
//          dbias: the sums of dt that share an element of the bias,  dsink = -sum(exp(sink - lse[i]) delta[i])
//          dq[i] = sum(ds[i, j] k[j]) over j,  dk[j] = sum(ds[i, j] q[i]),  dv[j] = sum(r[i, j] p[i, j] dy[i]) over i
//          and the heads of q that share the head of k
// Sums are in float32 (float64 for float64). In 16 bits p and ds are rounded before they are factors.
#pragma once
#include <algorithm>
#include <cmath>
#include <utility>

#include "aot.h"
#include "attention_dropout.h"

namespace aot {
inline namespace AOT_ISA {

// Queries or keys; none if end <= begin.
struct Range {
  int64_t begin, end;
};

// The sizes of a call, as both devices take them. left, right: -1 without a bound.
struct AttentionSizes {
  int64_t batch, heads, kv_heads, queries, keys, dim, v_dim, lines, left, right;
  int64_t row_heads, kv_row_heads;  // the heads of a row that q is a part of, and of those that k and v are parts of
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

// How a tensor that is broadcast to (batch, heads, queries, keys) lies in memory: the steps between its elements along
// each axis, 0 where it is broadcast. It has planes, each a matrix of scores or a broadcast one. The scores of
// `members` heads, of which there are batch * heads, share a plane.
struct ScoreSteps {
  static constexpr int kMostRuns = 4;
  int runs;  // of q's leading axes, from the last: adjacent ones are joined
  int64_t sizes[kMostRuns], steps[kMostRuns];
  int64_t head, query, key, planes, members;

  AOT_BOTH_SIDES int64_t at(int64_t b, int64_t h) const {
    int64_t at = h * head;
#ifdef __CUDA_ARCH__
#pragma unroll 1  // a division of 64 bits is a hundred instructions
#endif
    for (int i = 0; i < runs; ++i) at += b % sizes[i] * steps[i], b /= sizes[i];
    return at;
  }
  // One of the heads whose scores share a plane: example * heads + head.
  AOT_BOTH_SIDES int64_t sharer(int64_t plane, int64_t member, int64_t heads) const {
    int64_t found = digit(head, heads, &plane, &member), times = heads;
#ifdef __CUDA_ARCH__
#pragma unroll 1
#endif
    for (int i = 0; i < runs; times *= sizes[i++]) found += digit(steps[i], sizes[i], &plane, &member) * times;
    return found;
  }

 private:
  AOT_BOTH_SIDES static int64_t digit(int64_t step, int64_t size, int64_t *plane, int64_t *member) {
    int64_t *const number = step ? plane : member, found = *number % size;
    return *number /= size, found;
  }
};

// A call may have these besides, as both devices take them; null where it has not. wide: of 64 bits, or of the dtype of
// sums instead of q's.
struct AttentionExtras {
  const bool *mask;
  const void *bias, *sinks, *offsets, *key_offsets;  // cu_seqlens; cu_seqlens_k, or cu_seqlens again
  int64_t sequences, left, right;  // left, right: of a call with cu_seqlens_k, whose sizes then have none
  bool wide_bias, wide_sinks, wide_offsets;
  ScoreSteps of_mask, of_bias;
  AttentionDropout dropout;

  // Whether there is nothing but dropout.
  AOT_BOTH_SIDES bool none() const { return !mask && !bias && !sinks && !offsets; }
  // Whether keys have sequences of their own.
  AOT_BOTH_SIDES bool crossed() const { return key_offsets != offsets; }
  // Where sequence i of queries begins, or of keys.
  AOT_BOTH_SIDES int64_t offset(int64_t i, bool of_keys = false) const {
    const void *const from = of_keys ? key_offsets : offsets;
    return wide_offsets ? static_cast<const int64_t *>(from)[i] : static_cast<const int32_t *>(from)[i];
  }
  // The keys of the sequence that query i is in, or with of_key the queries of that which key i is in; none if it is in
  // none. Of them those that left and right leave. Neither end falls from a row to the next. Low and high: between
  // which numbers that of the offsets that are at most i is.
  AOT_BOTH_SIDES Range sequence(int64_t i, bool of_key, int64_t low, int64_t high) const {
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (offset(middle, of_key) <= i) low = middle + 1;
      else high = middle;
    }
    return sequence_of(i, low, of_key);
  }
  AOT_BOTH_SIDES Range sequence(int64_t i, bool of_key = false) const { return sequence(i, of_key, 0, sequences + 1); }
  // This is the same of a row, if n offsets are at most its number.
  AOT_BOTH_SIDES Range sequence_of(int64_t i, int64_t n, bool of_key) const {
    if (n == 0) return {0, 0};
    const int64_t last = n <= sequences ? n : sequences, before = of_key ? right : left, after = of_key ? left : right;
    const Range all = {offset(n - 1, !of_key), offset(last, !of_key)};
    if (before < 0 && after < 0) return all;
    const int64_t at = i + all.end - offset(last, of_key);  // what row i stands beside
    const auto within = [=](int64_t i) { return i < all.begin ? all.begin : i < all.end ? i : all.end; };
    return {before < 0 ? all.begin : within(at - before), after < 0 ? all.end : within(at + after + 1)};
  }
  // Rows or keys of a range that lie in a sequence of rows [begin, end), which are keys with of_keys.
  AOT_BOTH_SIDES Range own(Range range, int64_t begin, int64_t end, bool of_keys = false) const {
    if (!offsets) return range;
    return both(range, sequence(begin, of_keys), sequence(end - 1, of_keys));
  }
  // The part of a range that is in the sequences of rows: those of the first row and of the last.
  AOT_BOTH_SIDES static Range both(Range range, Range first, Range last) {
    return {range.begin > first.begin ? range.begin : first.begin, range.end < last.end ? range.end : last.end};
  }
};

// The rows of one head of one example: row i is at data + i * stride.
template <typename T>
struct HeadRows {
  T *data;
  int64_t stride;

  AOT_BOTH_SIDES T *operator[](int64_t i) const { return data + i * stride; }
};

// The rows of a head of a tensor (batch, seq, heads, dim), or (batch, heads, seq, dim) with heads_first. heads: all of
// a row.
template <typename T>
AOT_BOTH_SIDES HeadRows<T> head_rows(T *data, const AttentionSizes &z, int64_t b, int64_t h, int64_t heads, int64_t seq,
                                     int64_t dim) {
  if (z.heads_first) return {data + (b * heads + h) * seq * dim, dim};
  return {data + (b * seq * heads + h) * dim, heads * dim};
}

// Tiles of 128 keys of a call's backward in 16 bits on Hopper, at a head_dim of 128: how many two blocks may have, of a
// call of how many.
constexpr int64_t kMostShared = 160, kLeastToShare = 64;

struct AttentionAttrs {
  bool causal = false;
  Number scale;
  Ints window;
  double softcap = 0, dropout = 0;
  int layout = 0;
  int64_t row_heads = 0;  // of the rows that q, k and v are all parts of, if not 0; no attribute

  Status init(const Attrs &attrs) {
    static constexpr const char *kLayouts[] = {"BSHD", "BHSD"};
    AOT_TRY(attrs.get("causal", &causal));
    AOT_TRY(attrs.get("scale", &scale));
    AOT_TRY(attrs.get("window", &window));
    AOT_TRY(attrs.get("softcap", &softcap));
    AOT_TRY(attrs.get("layout", kLayouts, &layout));
    return attrs.get("dropout", &dropout);
  }

  // The inputs have passed check.
  AttentionSizes sizes(const Spec &q, const Spec &k, const Spec &v, const Spec &lengths) const {
    AttentionSizes z{};
    z.heads_first = layout == 1;
    z.batch = q.product(0, q.ndim - 3), z.heads = heads(q), z.kv_heads = heads(k);
    z.row_heads = row_heads ? row_heads : z.heads, z.kv_row_heads = row_heads ? row_heads : z.kv_heads;
    z.queries = seq(q), z.keys = seq(k), z.dim = dim(q), z.v_dim = dim(v);
    z.lines = lengths ? lengths.size() : 1;
    z.left = window.n ? std::min(window.value[0], kMostElements) : -1;
    z.right = window.n ? std::min(window.value[1], kMostElements) : -1;
    if (causal) z.right = 0;
    z.scale = scale.given ? scale.value : 1 / std::sqrt(static_cast<double>(z.dim));
    z.softcap = softcap;
    return z;
  }

  // The inputs have passed check_extras. Moves what z has of a window to x if its keys have sequences of their own.
  Status extras(const char *op, AttentionSizes &z, const Spec &q, const Tensor &mask, const Tensor &bias,
                const Tensor &sinks, const Tensor &offsets, const Tensor &key_offsets, const Tensor &seed,
                AttentionExtras *x) const {
    *x = {};
    if (dropout > 0)
      x->dropout = {seed.data, seed.dtype == DType::int64, static_cast<uint32_t>(dropout * (1 << 16)),
                    1 / (1 - dropout)};
    x->mask = mask.as<const bool>(), x->bias = bias.data, x->sinks = sinks.data, x->offsets = offsets.data;
    x->wide_bias = bias.dtype != q.dtype, x->wide_sinks = sinks.dtype != q.dtype;
    x->wide_offsets = offsets.dtype == DType::int64, x->sequences = offsets ? offsets.size() - 1 : 0;
    x->key_offsets = key_offsets ? key_offsets.data : offsets.data, x->left = x->right = -1;
    if (key_offsets) std::swap(x->left, z.left), std::swap(x->right, z.right);
    if (mask) AOT_TRY(score_steps(op, "mask", z, q, mask, &x->of_mask));
    if (bias) AOT_TRY(score_steps(op, "bias", z, q, bias, &x->of_bias));
    return kOk;
  }

 protected:
  int64_t heads(const Spec &x) const { return x.shape[x.ndim - (layout == 1 ? 3 : 2)]; }
  int64_t seq(const Spec &x) const { return x.shape[x.ndim - (layout == 1 ? 2 : 3)]; }
  static int64_t dim(const Spec &x) { return x.shape[x.ndim - 1]; }

  // Checks the inputs of queries, keys and values, and infers y and lse.
  Status check(const char *op, const Spec &q, const Spec &k, const Spec &v, const Spec &lengths, Spec *y,
               Spec *lse) const {
    AOT_TRY(check_attributes(op));
    AOT_TRY(check_heads(op, "q", q, q.dtype));
    AOT_TRY(check_heads(op, "k", k, q.dtype));
    AOT_TRY(check_heads(op, "v", v, q.dtype));
    AOT_TRY(check_keys(op, q, k));
    AOT_TRY(check_values(op, q, k, v));
    if (lengths) AOT_TRY(check_lengths(op, "q", q, q.ndim - 3, lengths));
    *y = q, *lse = Spec::unknown_rank(accumulate_dtype(q.dtype));
    if (!q.rank_known()) return kOk;
    y->shape[y->ndim - 1] = v.rank_known() ? dim(v) : kUnknownDim;
    lse->ndim = q.ndim - 1;
    for (int i = 0; i < q.ndim - 3; ++i) lse->shape[i] = q.shape[i];
    lse->shape[q.ndim - 3] = heads(q), lse->shape[q.ndim - 2] = seq(q);
    return check_size(op, "the result", *y);
  }

  // Checks the others, of inputs that have passed check.
  Status check_extras(const char *op, const Spec &q, const Spec &k, const Spec &mask, const Spec &bias,
                      const Spec &sinks, const Spec &offsets, const Spec &key_offsets, const Spec &seed) const {
    if (mask) AOT_TRY(check_dtype(op, "mask", mask, DType::boolean));
    if (mask) AOT_TRY(check_broadcast(op, "mask", q, k, mask));
    if (bias) AOT_TRY(check_added(op, "bias", q, bias));
    if (bias) AOT_TRY(check_broadcast(op, "bias", q, k, bias));
    if (sinks) AOT_TRY(check_added(op, "sinks", q, sinks));
    if (sinks) AOT_TRY(check_sinks(op, q, sinks));
    AOT_TRY(check_seed(op, seed));
    if (key_offsets) return check_key_offsets(op, offsets, key_offsets);
    return offsets ? check_offsets(op, q, k, offsets) : kOk;
  }

  // Lengths have the last of the leading axes of x.
  static Status check_lengths(const char *op, const char *slot, const Spec &x, int leading, const Spec &lengths) {
    AOT_TRY(check_integer(op, "lengths", lengths));
    if (!lengths.rank_known() || !x.rank_known()) return kOk;
    const int n = lengths.ndim;
    bool same = n <= leading;
    for (int i = 1; i <= n && same; ++i) same = same_dim(lengths.shape[n - i], x.shape[leading - i]);
    if (same) return kOk;
    return fail(kInvalidArgument,
                "%s: lengths has shape %s, expected the leading axes of %s, which has shape %s, or the last of them",
                op, ShapeText(lengths).text, slot, ShapeText(x).text);
  }

 private:
  Status check_attributes(const char *op) const {
    const bool fits = window.n == 2 && window.value[0] >= -1 && window.value[1] >= -1;
    if (window.n && !fits)
      return fail(kInvalidArgument, "%s: window is %s, expected (left, right), each a number of keys, or -1 for all",
                  op, ShapeText(window.value, window.n).text);
    if (scale.given && !std::isfinite(scale.value))
      return fail(kInvalidArgument, "%s: scale is %g, expected a finite number", op, scale.value);
    if (!std::isfinite(softcap) || softcap < 0)
      return fail(kInvalidArgument, "%s: softcap is %g, expected a finite number of at least 0", op, softcap);
    if (dropout >= 0 && dropout < 1) return kOk;
    return fail(kInvalidArgument, "%s: dropout is %g, expected a number from 0 on and below 1", op, dropout);
  }

  Status check_seed(const char *op, const Spec &seed) const {
    if (!seed && dropout == 0) return kOk;
    if (!seed) return fail(kInvalidArgument, "%s: seed is absent, expected it with dropout", op);
    AOT_TRY(check_integer(op, "seed", seed));
    if (!seed.rank_known() || (seed.ndim == 1 && same_dim(seed.shape[0], 2))) return kOk;
    return fail(kInvalidArgument, "%s: seed has shape %s, expected (2,)", op, ShapeText(seed).text);
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

  // What is added to scores: of q's dtype, or of that of its sums.
  static Status check_added(const char *op, const char *slot, const Spec &q, const Spec &x) {
    AOT_TRY(check_floating(op, slot, x));
    const DType wide = accumulate_dtype(q.dtype);
    if (same_dtype(x.dtype, q.dtype) || x.dtype == wide) return kOk;
    return fail(kUnsupportedDtype, "%s: %s has dtype %s, expected %s%s%s", op, slot, dtype_name(x.dtype),
                dtype_name(q.dtype), wide == q.dtype ? "" : " or ", wide == q.dtype ? "" : dtype_name(wide));
  }

  // x broadcasts to the scores, (..., heads, queries, keys).
  Status check_broadcast(const char *op, const char *slot, const Spec &q, const Spec &k, const Spec &x) const {
    if (!q.rank_known() || !x.rank_known()) return kOk;
    Spec scores = q;
    scores.shape[q.ndim - 3] = heads(q), scores.shape[q.ndim - 2] = seq(q);
    scores.shape[q.ndim - 1] = k.rank_known() ? seq(k) : kUnknownDim;
    bool fits = x.ndim <= q.ndim;
    for (int i = 1; i <= x.ndim && fits; ++i) {
      const int64_t n = x.shape[x.ndim - i];
      fits = n == 1 || same_dim(n, scores.shape[q.ndim - i]);
    }
    if (fits) return kOk;
    return fail(kInvalidArgument,
                "%s: %s has shape %s, expected one that broadcasts to (..., heads, queries, keys), %s", op, slot,
                ShapeText(x).text, ShapeText(scores).text);
  }

  Status check_sinks(const char *op, const Spec &q, const Spec &sinks) const {
    if (!q.rank_known() || !sinks.rank_known()) return kOk;
    if (sinks.ndim == 1 && same_dim(sinks.shape[0], heads(q))) return kOk;
    return fail(kInvalidArgument, "%s: sinks has shape %s, expected (%lld,), one for each head of q", op,
                ShapeText(sinks).text, static_cast<long long>(heads(q)));
  }

  static Status check_numbers(const char *op, const char *slot, const Spec &offsets) {
    AOT_TRY(check_integer(op, slot, offsets));
    if (!offsets.rank_known() || (offsets.ndim == 1 && offsets.shape[0] != 0)) return kOk;
    return fail(kInvalidArgument, "%s: %s has shape %s, expected (sequences + 1,)", op, slot, ShapeText(offsets).text);
  }

  Status check_offsets(const char *op, const Spec &q, const Spec &k, const Spec &offsets) const {
    AOT_TRY(check_numbers(op, "cu_seqlens", offsets));
    if (!q.rank_known() || !k.rank_known() || same_dim(seq(q), seq(k))) return kOk;
    return fail(kInvalidArgument,
                "%s: k has shape %s, expected as many keys as q has queries, %lld, with cu_seqlens and without "
                "cu_seqlens_k",
                op, ShapeText(k).text, static_cast<long long>(seq(q)));
  }

  static Status check_key_offsets(const char *op, const Spec &offsets, const Spec &key_offsets) {
    if (!offsets) return fail(kInvalidArgument, "%s: cu_seqlens is absent, expected it with cu_seqlens_k", op);
    AOT_TRY(check_numbers(op, "cu_seqlens", offsets));
    AOT_TRY(check_numbers(op, "cu_seqlens_k", key_offsets));
    AOT_TRY(check_dtype(op, "cu_seqlens_k", key_offsets, offsets.dtype));
    if (!offsets.rank_known() || !key_offsets.rank_known() || same_dim(offsets.shape[0], key_offsets.shape[0]))
      return kOk;
    return fail(kInvalidArgument, "%s: cu_seqlens_k has shape %s, expected that of cu_seqlens, %s", op,
                ShapeText(key_offsets).text, ShapeText(offsets).text);
  }

  // x has passed check_broadcast.
  static Status score_steps(const char *op, const char *slot, const AttentionSizes &z, const Spec &q, const Spec &x,
                            ScoreSteps *to) {
    const auto dim_of = [&](int i) { return i < x.ndim ? x.shape[x.ndim - 1 - i] : 1; };  // from the last one
    int64_t step = 1;
    const auto step_of = [&](int64_t n) { return n == 1 ? 0 : std::exchange(step, step * n); };
    to->key = step_of(dim_of(0)), to->query = step_of(dim_of(1));
    const int64_t plane = step;
    to->head = step_of(dim_of(2));
    for (int i = 3; i < q.ndim; ++i) {
      const int64_t n = q.shape[q.ndim - 1 - i], of_axis = step_of(dim_of(i));
      if (n == 1) continue;
      const int last = to->runs - 1;
      if (last >= 0 && !to->steps[last] == !of_axis) {
        to->sizes[last] *= n;
        continue;
      }
      if (to->runs == ScoreSteps::kMostRuns)
        return fail(kNotImplemented,
                    "%s: %s has shape %s, which is broadcast along too many leading axes that are not adjacent", op,
                    slot, ShapeText(x).text);
      to->sizes[to->runs] = n, to->steps[to->runs++] = of_axis;
    }
    to->planes = plane ? step / plane : 0, to->members = to->planes ? z.batch * z.heads / to->planes : 0;
    return kOk;
  }
};

struct Attention : AttentionAttrs {
  static constexpr const char *name = "attention";
  enum { kQ, kK, kV, kLengths, kMask, kBias, kSinks, kOffsets, kKeyOffsets, kSeed };
  enum { kY, kLse };
  static constexpr Slot inputs[] = {{"q"},
                                    {"k"},
                                    {"v"},
                                    {"lengths", optional, kIntegers},
                                    {"mask", optional, "bool"},
                                    {"bias", optional},
                                    {"sinks", optional},
                                    {"cu_seqlens", optional, kIntegers},
                                    {"cu_seqlens_k", optional, kIntegers},
                                    {"seed", optional, kIntegers}};
  static constexpr Slot outputs[] = {{"y"}, {"lse", optional}};

  Status infer(const Tensor *in, Spec *out) const {
    AOT_TRY(check(name, in[kQ], in[kK], in[kV], in[kLengths], &out[kY], &out[kLse]));
    return check_extras(name, in[kQ], in[kK], in[kMask], in[kBias], in[kSinks], in[kOffsets], in[kKeyOffsets],
                        in[kSeed]);
  }
};

struct AttentionBackward : AttentionAttrs {
  static constexpr const char *name = "attention_backward";
  enum { kDy, kQ, kK, kV, kLengths, kMask, kBias, kSinks, kOffsets, kKeyOffsets, kSeed, kY, kLse };
  enum { kDq, kDk, kDv, kDbias, kDsinks, kWork };
  static constexpr Slot inputs[] = {{"dy"},
                                    {"q"},
                                    {"k"},
                                    {"v"},
                                    {"lengths", optional, kIntegers},
                                    {"mask", optional, "bool"},
                                    {"bias", optional},
                                    {"sinks", optional},
                                    {"cu_seqlens", optional, kIntegers},
                                    {"cu_seqlens_k", optional, kIntegers},
                                    {"seed", optional, kIntegers},
                                    {"y"},
                                    {"lse", optional}};
  static constexpr Slot outputs[] = {{"dq", optional},    {"dk", optional},     {"dv", optional},
                                     {"dbias", optional}, {"dsinks", optional}, {"workspace", workspace}};

  Status infer(const Tensor *in, Spec *out) const {
    Spec y, lse;
    AOT_TRY(check(name, in[kQ], in[kK], in[kV], in[kLengths], &y, &lse));
    AOT_TRY(
        check_extras(name, in[kQ], in[kK], in[kMask], in[kBias], in[kSinks], in[kOffsets], in[kKeyOffsets], in[kSeed]));
    AOT_TRY(check_like(name, "dy", in[kDy], "y", y));
    AOT_TRY(check_like(name, "y", in[kY], "the result", y));
    if (in[kLse]) AOT_TRY(check_like(name, "lse", in[kLse], "the logarithms of sums", lse));
    out[kDq] = in[kQ], out[kDk] = in[kK], out[kDv] = in[kV];
    out[kDbias] = out[kDsinks] = Spec::vector(in[kQ].dtype, 0);
    if (in[kBias]) out[kDbias] = in[kBias];
    if (in[kSinks]) out[kDsinks] = in[kSinks];
    out[kWork] = Spec::vector(lse.dtype, kUnknownDim);
    if (lse.known() && in[kQ].known() && in[kV].known())
      out[kWork].shape[0] = 2 * lse.size() + sums(in[kQ]) + pass_space(in[kQ], in[kV]);
    return kOk;
  }

  // The workspace: delta and lse, each with an element for each row, then what a CPU sums dq of 16 bits in. It is there
  // too where the dtype is unknown.
  static int64_t sums(const Spec &q) {
    const bool wide = q.dtype == DType::float32 || q.dtype == DType::float64;
    return kIsCuda || wide ? 0 : q.size();
  }

  // The floats that a GPU needs for one pass over 16 bits (attention_wgmma_backward.cuh, attention_mma_backward.cuh):
  // for each query, in whole tiles of 128, a row of dq, two numbers and less than one turn; a counter; and alignment.
  // In float32 (attention_float_sm90.cu) a turn for each tile of at least 32 queries. In 16 bits, at a head_dim of
  // 128 and where all queries see all keys, also sums of dk and dv of the tiles of keys that two blocks may have, 16
  // numbers for each, and alignment: what is left of all tiles after whole rounds of blocks is less than half of them.
  int64_t pass_space(const Spec &q, const Spec &v) const {
    const int64_t columns = std::max(dim(q), dim(v)), of_heads = q.product(0, q.ndim - 3) * heads(q);
    if (!kIsCuda || q.dtype == DType::float64 || columns > 256) return 0;
    const bool half = q.dtype == DType::float16 || q.dtype == DType::bfloat16, wide = columns > 128;
    if (q.dtype == DType::float32 || (wide && !half)) return of_heads * ((seq(q) + 31) / 32);
    if (wide) return 0;
    const int64_t alone = of_heads * ((seq(q) + 127) / 128 * 128) * ((columns <= 64 ? 64 : 128) + 3) + 64;
    const int64_t tiles = q.product(0, q.ndim - 3) * heads(v) * ((seq(v) + 127) / 128);
    const bool full = !causal && (!window.n || (window.value[0] < 0 && window.value[1] < 0));
    const bool shares = full && columns > 64 && tiles >= kLeastToShare;
    return alone + (shares ? std::min(kMostShared, tiles / 2) * 2 * 128 * 128 + 16 * kMostShared + 32 : 0);
  }
};

}  // namespace AOT_ISA
}  // namespace aot
