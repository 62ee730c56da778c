#include "qkv_attention.h"

#include "cpu/entry.h"
#include "cpu/math.h"
#include "cpu/rows.h"
#include "cpu/softmax.h"
#include "gemm/gemm_cpu.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// A block of scores and what is computed from it fit a second-level cache.
constexpr int64_t kBlockQueries = 128, kBlockKeys = 256;
// A forward's blocks may have more queries, which share what is packed of the keys.
constexpr int64_t kMostQueries = 256;

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Memory that each thread keeps for the next block and the next call, aligned to cache lines: the system would take
// fresh pages of this size back after each, and clear them again. take() gives arrays one after another.
class Kept {
 public:
  // Room for arrays of `bytes` in all.
  explicit Kept(int64_t bytes) : next_(memory(bytes + kArrays * kLine)) {}
  explicit operator bool() const { return next_; }

  template <typename X>
  X *take(int64_t n) {
    char *const here = next_;
    next_ += ceil_div(n * sizeof(X), kLine) * kLine;
    return reinterpret_cast<X *>(here);
  }

 private:
  static constexpr int64_t kLine = 64, kArrays = 8;
  struct Memory {
    char *data = nullptr;
    int64_t bytes = 0;
    ~Memory() { std::free(data); }
  };

  static char *memory(int64_t bytes) {
    static thread_local Memory kept;
    if (bytes > kept.bytes) {
      std::free(kept.data);
      kept.data = static_cast<char *>(std::aligned_alloc(kLine, ceil_div(bytes, kLine) * kLine));
      kept.bytes = kept.data ? bytes : 0;
    }
    return kept.data;
  }

  char *next_;
};

// ---------------------------------------------------------------------------------------------------------- scores

// n elements from `at` on of what has q's dtype or, wide, that of its sums.
template <typename T, typename A = Accumulate<T>>
void widen_numbers(const void *from, bool wide, int64_t at, int64_t n, A *to) {
  if (wide) std::memcpy(to, static_cast<const A *>(from) + at, n * sizeof(A));
  else
    sweep<T>(n, [=, x = static_cast<const T *>(from) + at](int64_t j, auto part) {
      store(to + j, load(x + j, part), part);
    });
}
template <typename T, typename A = Accumulate<T>>
void narrow_numbers(const A *from, int64_t n, void *to, bool wide, int64_t at) {
  if (wide) std::memcpy(static_cast<A *>(to) + at, from, n * sizeof(A));
  else
    sweep<T>(n, [=, y = static_cast<T *>(to) + at](int64_t j, auto part) { store(y + j, load(from + j, part), part); });
}

template <typename T>
struct Heads {
  using A = Accumulate<T>;
  const T *q, *k, *v;
  Tensor lengths;
  AttentionSizes z;
  AttentionExtras extra;

  // The keys of example b.
  int64_t length(int64_t b) const {
    if (!lengths) return z.keys;
    const int64_t i = b % z.lines;
    return lengths.dtype == DType::int32 ? lengths.as<const int32_t>()[i] : lengths.as<const int64_t>()[i];
  }
  Status check_lengths(const char *op) const {
    for (int64_t i = 0; lengths && i < z.lines; ++i)
      if (length(i) < 0 || length(i) > z.keys)
        return fail(kInvalidArgument, "%s: lengths[%lld] is %lld, expected 0 to %lld, the number of keys", op,
                    static_cast<long long>(i), static_cast<long long>(length(i)), static_cast<long long>(z.keys));
    if (extra.offsets) AOT_TRY(check_offsets(op, "cu_seqlens", "queries", z.queries, false));
    return extra.crossed() ? check_offsets(op, "cu_seqlens_k", "keys", z.keys, true) : kOk;
  }
  Status check_offsets(const char *op, const char *slot, const char *rows, int64_t most, bool of_keys) const {
    for (int64_t i = 0, before = 0; i <= extra.sequences; before = extra.offset(i++, of_keys))
      if (const int64_t at = extra.offset(i, of_keys); at < before || at > most)
        return fail(kInvalidArgument,
                    "%s: %s[%lld] is %lld, expected ascending numbers from 0 to %lld, the number of %s", op, slot,
                    static_cast<long long>(i), static_cast<long long>(at), static_cast<long long>(most), rows);
    return kOk;
  }

  // q, or dq.
  template <typename X>
  HeadRows<X> of_queries(X *x, int64_t b, int64_t h, int64_t dim) const {
    return head_rows(x, z, b, h, z.row_heads, z.queries, dim);
  }
  // y, or dy.
  template <typename X>
  HeadRows<X> of_results(X *x, int64_t b, int64_t h) const {
    return head_rows(x, z, b, h, z.heads, z.queries, z.v_dim);
  }
  // k, v, dk or dv, of which h is a head.
  template <typename X>
  HeadRows<X> of_keys(X *x, int64_t b, int64_t h, int64_t dim) const {
    return head_rows(x, z, b, h, z.kv_row_heads, z.keys, dim);
  }

  // Scores are to be multiplied by it: the scale, if a largest score stays the largest and nothing comes between.
  A times() const { return z.scale > 0 && !z.softcap && !adds() ? static_cast<A>(z.scale) : 1; }

  // Rows of q's tensor by rows of k's: scores of `rows` queries from `query` on and n keys from `key` on, but for
  // times().
  Status scores(HeadRows<const T> q, HeadRows<const T> k, int64_t query, int64_t key, int64_t rows, int64_t n,
                A *s) const {
    const auto product = [&](auto epilogue) {
      return gemm<T, A, decltype(epilogue)>(rows, n, z.dim, {q[query], q.stride}, {k[key], k.stride, true}, s,
                                            kBlockKeys, false, epilogue);
    };
    const A scale = static_cast<A>(z.scale), cap = static_cast<A>(z.softcap);
    if (times() != 1) return product(NoEpilogue());
    if (!z.softcap) return product([=](Vec<T> s, int64_t, int64_t, auto) { return s * scale; });
    const A inner = static_cast<A>(z.scale / z.softcap);
    return product([=](Vec<T> s, int64_t, int64_t, auto) { return tanh<A>(s * inner) * cap; });
  }

  // The keys of which one of queries [begin, end) sees some, and the queries that see some of keys [begin, end).
  Range seen_by(int64_t begin, int64_t end, int64_t length) const {
    return extra.own(z.seen_by(begin, end, length), begin, end);
  }
  Range seeing(int64_t begin, int64_t end) const { return extra.own(z.seeing(begin, end), begin, end, true); }

  // The keys that a query sees but for a mask, of the n from `key` on: numbers from 0 to n.
  Range seen(int64_t query, int64_t key, int64_t n, int64_t length) const {
    const Range all = seen_by(query, query + 1, length);
    const auto within = [=](int64_t j) { return j < key ? 0 : smaller(j - key, n); };
    return {within(all.begin), within(all.end)};
  }

  A sink(int64_t h) const {
    A sink;
    return widen_numbers<T>(extra.sinks, extra.wide_sinks, h, 1, &sink), sink;
  }

  bool adds() const { return extra.mask || extra.bias; }
  // What is added to the scores of a query and n keys from `key` on: the bias, and -inf where the mask hides a key.
  void addends(int64_t b, int64_t h, int64_t query, int64_t key, int64_t n, A *to) const {
    const ScoreSteps &of_bias = extra.of_bias, &of_mask = extra.of_mask;
    std::fill(to, to + n, A(0));
    if (extra.bias) {
      const int64_t at = of_bias.at(b, h) + query * of_bias.query + key * of_bias.key;
      widen_numbers<T>(extra.bias, extra.wide_bias, at, of_bias.key ? n : 1, to);
      if (!of_bias.key) std::fill(to + 1, to + n, *to);
    }
    if (!extra.mask) return;
    const bool *const mask = extra.mask + of_mask.at(b, h) + query * of_mask.query + key * of_mask.key;
    for (int64_t j = 0; j < n; ++j) to[j] = mask[j * of_mask.key] ? to[j] : -static_cast<A>(__builtin_inf());
  }
  // The factor of probabilities that are kept.
  A times_kept() const { return extra.dropout ? static_cast<A>(extra.dropout.times) : 1; }
  // 1 for each of n keys from `key` on that a query keeps under dropout, else 0.
  void kept(int64_t b, int64_t h, int64_t query, int64_t key, int64_t n, A *to) const {
    constexpr int64_t kEights = 16;
    const KeptKeys of_head = extra.dropout.of(b * z.heads + h);
    for (int64_t eight = key / 8; 8 * eight < key + n; eight += kEights) {
      uint32_t words[4][kEights];
      philox(of_head, static_cast<uint32_t>(query), static_cast<uint32_t>(eight), words);
      const int64_t from = std::max(key - 8 * eight, int64_t{0}), end = smaller(key + n - 8 * eight, 8 * kEights);
      for (int64_t j = from; j < end; ++j)
        to[8 * eight + j - key] = (words[j / 2 % 4][j / 8] >> j % 2 * 16 & 0xffff) >= of_head.least;
    }
  }
  // The words of kEights adjacent eights of keys.
  template <size_t kEights>
  static void philox(const KeptKeys &x, uint32_t query, uint32_t eight, uint32_t (&words)[4][kEights]) {
    for (uint32_t i = 0; i < kEights; ++i)
      words[0][i] = eight + i, words[1][i] = query, words[2][i] = x.head, words[3][i] = 0;
    for (uint32_t n = 0; n < Philox::kRounds; ++n)
      for (uint32_t i = 0; i < kEights; ++i) {
        Philox state = {words[0][i], words[1][i], words[2][i], words[3][i]};
        state.round(x.low + n * Philox::kLowStep, x.high + n * Philox::kHighStep);
        words[0][i] = state.a, words[1][i] = state.b, words[2][i] = state.c, words[3][i] = state.d;
      }
  }
  // Zeros where factors are 0.
  template <typename X>
  static void drop(const A *factors, int64_t n, X *to) {
    for (int64_t j = 0; j < n; ++j)
      if (factors[j] == 0) to[j] = X{};
  }

  // Scores with their addends. A hidden key's is -inf, whatever it was.
  static void add(const A *scores, const A *addends, int64_t n, A *to) {
    for (int64_t j = 0; j < n; ++j) {
      const A more = addends[j];
      to[j] = more == -static_cast<A>(__builtin_inf()) ? more : scores[j] + more;
    }
  }
};

// Adds to sums (rows, dim) the product of numbers of all scores, x, with rows of a head's tensor. x is not packed
// unless it is in 16 bits: few columns would share that.
template <typename T, typename A = Accumulate<T>>
Status add_product(int64_t rows, int64_t dim, int64_t n, const T *x, const T *of_keys, int64_t stride, A *sums,
                   int64_t ld) {
  if constexpr (std::is_same_v<T, A>)
    return gemm_batch(1, [=](int64_t) {
      return CpuGemm<T, A, NoEpilogue, InPlace<A>>{rows, dim, n, {x, kBlockKeys}, {of_keys, stride}, sums, ld, true};
    });
  else return gemm<T, A>(rows, dim, n, {x, kBlockKeys}, {of_keys, stride}, sums, ld, true);
}

// Zeros outside of a range of n elements.
template <typename T>
void clear_outside(T *x, Range range, int64_t n) {
  if (range.end <= range.begin) range = {n, n};
  std::memset(x, 0, range.begin * sizeof(T));
  std::memset(x + range.end, 0, (n - range.end) * sizeof(T));
}

// ---------------------------------------------------------------------------------------------------------- forward

// The softmax of rows whose scores come in blocks: each row's largest score so far, and the sum of exponentials of
// what the scores are below it.
template <typename T, typename A = Accumulate<T>>
struct RunningSoftmax {
  A most = -static_cast<A>(__builtin_inf()), total = 0;

  // Begins with a logit that has no value.
  void begin(A sink) { most = sink, total = sink == most_of_none() ? 0 : 1; }

  // Exponentials of n scores, p; what has been summed before is to be multiplied by the result. hidden: scores of -inf
  // are of keys that are not seen. times: of the scores.
  A add(const A *s, T *p, int64_t n, bool hidden, A times) {
    const A block = largest(s, n) * times, before = most;
    most = block > most ? block : most;
    const A shrink = before == most ? 1 : std::exp(before - most), base = hidden && most == most_of_none() ? 0 : most;
    const Unit<T> unit(VecInt<T>{});
    Vec<T> sums[4] = {};
    sweep_sums<T>(n, [&](int64_t j, auto part, int k) {
      const Vec<T> e = keep<T>(exp_nonpositive<T>(unit, load(s + j, part) * times - base), part);
      sums[k] += e;
      store(p + j, e, part);
    });
    total = total * shrink + static_cast<A>(sum_of_4<T>(sums));
    return shrink;
  }

 private:
  static A most_of_none() { return -static_cast<A>(__builtin_inf()); }
};

// Queries [begin, end) of a head. y may be null.
template <typename T, typename A = Accumulate<T>>
Status attend(const Heads<T> &x, int64_t b, int64_t h, int64_t begin, int64_t end, T *y, A *lse) {
  const AttentionSizes &z = x.z;
  const int64_t rows = end - begin, length = x.length(b), dim = z.v_dim;
  const HeadRows<const T> q = x.of_queries(x.q, b, h, z.dim), k = x.of_keys(x.k, b, h / z.group(), z.dim),
                          v = x.of_keys(x.v, b, h / z.group(), dim);
  constexpr bool kNarrow = sizeof(T) < sizeof(A);
  Kept kept(rows * (kBlockKeys * (sizeof(A) + kNarrow * sizeof(T)) + dim * sizeof(A)));
  if (!kept) return out_of_memory(Attention::name);
  A *const s = kept.take<A>(rows * kBlockKeys), *const sums = kept.take<A>(rows * dim), times = x.times();
  T *const p = kNarrow ? kept.take<T>(rows * kBlockKeys) : reinterpret_cast<T *>(s);
  RunningSoftmax<T> state[kMostQueries];
  A addends[kBlockKeys];  // and what is kept
  for (int64_t i = 0; i < rows && x.extra.sinks; ++i) state[i].begin(x.sink(h));
  std::memset(sums, 0, rows * dim * sizeof(A));
  const Range all = x.seen_by(begin, end, length);
  const Prepared<T> prepared(rows);
  for (int64_t key = all.begin / kBlockKeys * kBlockKeys; key < all.end; key += kBlockKeys) {
    const int64_t n = smaller(kBlockKeys, all.end - key);
    AOT_TRY(x.scores(q, k, begin, key, rows, n, s));
    for (int64_t i = 0; i < rows; ++i) {
      const Range seen = x.seen(begin + i, key, n, length);
      const int64_t at = i * kBlockKeys + seen.begin;
      A *const sum = sums + i * dim;
      if (seen.begin < seen.end) {
        const int64_t some = seen.end - seen.begin;
        if (x.adds()) {
          x.addends(b, h, begin + i, key + seen.begin, some, addends);
          x.add(s + at, addends, some, s + at);
        }
        const A shrink = state[i].add(s + at, p + at, some, x.adds(), times);
        if (shrink != 1)
          sweep<T>(dim, [=](int64_t j, auto part) { store(sum + j, load(sum + j, part) * shrink, part); });
        if (x.extra.dropout) {
          x.kept(b, h, begin + i, key + seen.begin, some, addends);
          x.drop(addends, some, p + at);
        }
      }
      clear_outside(p + i * kBlockKeys, seen, n);
    }
    if (y) AOT_TRY(add_product<T>(rows, dim, n, p, v[key], v.stride, sums, dim));
  }
  const HeadRows<T> to = x.of_results(y, b, h);
  for (int64_t i = 0; i < rows; ++i) {
    const RunningSoftmax<T> &row = state[i];
    const A *const sum = sums + i * dim, times = row.total == 0 ? 0 : x.times_kept() / row.total;
    if (lse) lse[(b * z.heads + h) * z.queries + begin + i] = row.most + std::log(row.total);
    if (y)
      sweep<T>(dim,
               [=, at = to[begin + i]](int64_t j, auto part) { store(at + j, load(sum + j, part) * times, part); });
  }
  return kOk;
}

template <typename T, typename A = Accumulate<T>>
Status attend_all(const Heads<T> &x, T *y, A *lse) {
  const AttentionSizes &z = x.z;
  // Large blocks compute more that is not seen, and are fewer, for any number of threads.
  const int64_t heads = z.batch * z.heads, large = ceil_div(z.queries, kMostQueries);
  const bool all_seen = z.seen_by(0, 1, z.keys).end == z.keys && z.seen_by(z.queries - 1, z.queries, z.keys).begin == 0;
  const int64_t size = all_seen && heads * large >= 64 ? kMostQueries : kBlockQueries;
  const int64_t blocks = ceil_div(z.queries, size);
  return try_parallel(heads * blocks, [&](int64_t index) {
    const int64_t head = index / blocks, begin = (blocks - 1 - index % blocks) * size;  // long rows first
    return attend(x, head / z.heads, head % z.heads, begin, smaller(begin + size, z.queries), y, lse);
  });
}

// --------------------------------------------------------------------------------------------------------- backward

// delta of each row of a head.
template <typename T, typename A = Accumulate<T>>
void sum_products(const Heads<T> &x, const T *dy, const T *y, A *delta) {
  const AttentionSizes &z = x.z;
  each_row(z.rows(), z.v_dim, [=](int64_t i) {
    const int64_t head = i / z.queries, b = head / z.heads, h = head % z.heads, row = i % z.queries;
    const T *const a = x.of_results(dy, b, h)[row], *const c = x.of_results(y, b, h)[row];
    delta[i] = static_cast<A>(
        sum_row<T>(z.v_dim, [=](int64_t j, auto part) { return load(a + j, part) * load(c + j, part); }));
  });
}

// The inputs of the gradients, and their addresses: null if not wanted. sums: dq, with q's layout; it is dq
// itself but in 16 bits. dbias and dsinks have the dtypes of bias and sinks.
template <typename T, typename A = Accumulate<T>>
struct Gradients {
  const T *dy;
  const A *lse, *delta;
  T *dq, *dk, *dv;
  A *sums;
  void *dbias, *dsinks;
};

// The gradients of a block of queries and a block of keys.
template <typename T, typename A = Accumulate<T>>
class GradientBlock {
 public:
  GradientBlock(const Heads<T> &x, const Gradients<T> &g)
      : x_(x),
        g_(g),
        kept_((kBlockKeys * (x.z.dim + x.z.v_dim) + 2 * kScores) * sizeof(A) + kNarrow * 2 * kScores * sizeof(T)) {
    if (!kept_) return;
    s_ = kept_.take<A>(kScores), dp_ = kept_.take<A>(kScores);
    dk_ = kept_.take<A>(kBlockKeys * x.z.dim), dv_ = kept_.take<A>(kBlockKeys * x.z.v_dim);
    p_ = kNarrow ? kept_.take<T>(kScores) : reinterpret_cast<T *>(s_);
    ds_ = kNarrow ? kept_.take<T>(kScores) : reinterpret_cast<T *>(dp_);
  }

  bool allocated() const { return static_cast<bool>(kept_); }

  // dk and dv of the block of keys from `key` on, of the head h of k; with dq: adds what these keys give to the sums.
  Status keys(int64_t b, int64_t h, int64_t key, bool dq) const {
    const AttentionSizes &z = x_.z;
    const int64_t end = smaller(key + kBlockKeys, z.keys), length = x_.length(b), within = smaller(end, length);
    std::memset(dk_, 0, kBlockKeys * z.dim * sizeof(A));
    std::memset(dv_, 0, kBlockKeys * z.v_dim * sizeof(A));
    const Range queries = key < within ? x_.seeing(key, within) : Range{0, 0};
    for (int64_t i = 0; i < z.group() && key < within; ++i)
      for (int64_t query = queries.begin / kBlockQueries * kBlockQueries; query < queries.end; query += kBlockQueries)
        AOT_TRY(add(b, h * z.group() + i, query, key, within, g_.dk, g_.dv, dq));
    if (g_.dk) store_rows(x_.of_keys(g_.dk, b, h, z.dim), key, end, dk_, z.dim);
    for (int64_t i = 0; i < (end - key) * z.v_dim && x_.extra.dropout; ++i) dv_[i] *= x_.times_kept();
    if (g_.dv) store_rows(x_.of_keys(g_.dv, b, h, z.v_dim), key, end, dv_, z.v_dim);
    return kOk;
  }

  // dq of the block of queries from `query` on.
  Status queries(int64_t b, int64_t h, int64_t query) const {
    const AttentionSizes &z = x_.z;
    const int64_t length = x_.length(b), end = smaller(query + kBlockQueries, z.queries);
    clear(b, h, query, end);
    const Range keys = x_.seen_by(query, end, length);
    for (int64_t key = keys.begin / kBlockKeys * kBlockKeys; key < keys.end; key += kBlockKeys)
      AOT_TRY(add(b, h, query, key, smaller(key + kBlockKeys, length), false, false, true));
    finish(b, h, query, end);
    return kOk;
  }

  // dbias of a plane: of a block of queries and a block of keys, or of all where the bias is broadcast along them.
  Status bias(int64_t plane, int64_t query, int64_t key) const {
    const AttentionSizes &z = x_.z;
    const ScoreSteps &steps = x_.extra.of_bias;
    const Buffer<A> sums(kBlockQueries * kBlockKeys);
    if (!sums) return out_of_memory(AttentionBackward::name);
    std::memset(sums, 0, kBlockQueries * kBlockKeys * sizeof(A));
    for (int64_t member = 0; member < steps.members; ++member) {
      const int64_t head = steps.sharer(plane, member, z.heads), b = head / z.heads, length = x_.length(b);
      const int64_t last = steps.query ? smaller(query + kBlockQueries, z.queries) : z.queries;
      for (int64_t i = query; i < last; i += kBlockQueries) {
        const Range seen = x_.seen_by(i, smaller(i + kBlockQueries, z.queries), length);
        const int64_t end = steps.key ? smaller(key + kBlockKeys, seen.end) : seen.end;
        for (int64_t j = steps.key ? key : seen.begin / kBlockKeys * kBlockKeys; j < end; j += kBlockKeys)
          AOT_TRY(add(b, head % z.heads, i, j, smaller(j + kBlockKeys, end), false, false, false, sums));
      }
    }
    const int64_t rows = steps.query ? smaller(kBlockQueries, z.queries - query) : 1;
    const int64_t columns = steps.key ? smaller(kBlockKeys, z.keys - key) : 1;
    const int64_t to = plane * (steps.query ? z.queries : 1) * (steps.key ? z.keys : 1) + query * steps.query + key;
    for (int64_t i = 0; i < rows; ++i)
      narrow_numbers<T>(sums + i * kBlockKeys, columns, g_.dbias, x_.extra.wide_bias, to + i * steps.query);
    return kOk;
  }

  // Before and after the sums of dq of queries [begin, end).
  void clear(int64_t b, int64_t h, int64_t begin, int64_t end) const {
    const HeadRows<A> sums = x_.of_queries(g_.sums, b, h, x_.z.dim);
    for (int64_t i = begin; i < end; ++i) std::memset(sums[i], 0, x_.z.dim * sizeof(A));
  }
  void finish(int64_t b, int64_t h, int64_t begin, int64_t end) const {
    if constexpr (sizeof(T) < sizeof(A)) {
      const HeadRows<A> sums = x_.of_queries(g_.sums, b, h, x_.z.dim);
      const HeadRows<T> dq = x_.of_queries(g_.dq, b, h, x_.z.dim);
      for (int64_t i = begin; i < end; ++i) convert(sums[i], dq[i], x_.z.dim);
    }
  }

 private:
  static constexpr int64_t kScores = kBlockQueries * kBlockKeys;
  static constexpr bool kNarrow = sizeof(T) < sizeof(A);

  static void convert(const A *from, T *to, int64_t n) {
    sweep<T>(n, [=](int64_t j, auto part) { store(to + j, load(from + j, part), part); });
  }
  static void store_rows(HeadRows<T> to, int64_t begin, int64_t end, const A *from, int64_t dim) {
    for (int64_t i = begin; i < end; ++i) convert(from + (i - begin) * dim, to[i], dim);
  }

  // bias: null, or where dt is added, a matrix or what that is broadcast from.
  Status add(int64_t b, int64_t h, int64_t query, int64_t key, int64_t end, bool dk, bool dv, bool dq,
             A *bias = nullptr) const {
    const AttentionSizes &z = x_.z;
    const int64_t n = end - key, rows = smaller(kBlockQueries, z.queries - query), length = x_.length(b);
    const HeadRows<const T> q = x_.of_queries(x_.q, b, h, z.dim), k = x_.of_keys(x_.k, b, h / z.group(), z.dim),
                            v = x_.of_keys(x_.v, b, h / z.group(), z.v_dim), dy = x_.of_results(g_.dy, b, h);
    A factors[kBlockKeys];  // of what dropout keeps
    AOT_TRY(x_.scores(q, k, query, key, rows, n, s_));
    AOT_TRY((gemm<T, A>(rows, n, z.v_dim, {dy[query], dy.stride}, {v[key], v.stride, true}, dp_, kBlockKeys)));
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = (b * z.heads + h) * z.queries + query + i, at = i * kBlockKeys;
      const Range seen = x_.seen(query + i, key, n, length);
      const int64_t some = seen.end - seen.begin;
      const bool drops = x_.extra.dropout && some > 0;
      if (drops) {
        x_.kept(b, h, query + i, key + seen.begin, some, factors);
        for (int64_t j = 0; j < some; ++j) dp_[at + seen.begin + j] *= x_.times_kept();
        x_.drop(factors, some, dp_ + at + seen.begin);
      }
      if (bias || x_.adds())
        slopes_of_sums(b, h, query + i, key, at, seen, g_.lse[row], g_.delta[row],
                       bias ? bias + (x_.extra.of_bias.query ? at : 0) : nullptr);
      else slopes(at + seen.begin, some, g_.lse[row], g_.delta[row]);
      if (drops) x_.drop(factors, some, p_ + at + seen.begin);
      clear_outside(p_ + at, seen, n), clear_outside(ds_ + at, seen, n);
    }
    if (dv) AOT_TRY((gemm<T, A>(n, z.v_dim, rows, {p_, kBlockKeys, true}, {dy[query], dy.stride}, dv_, z.v_dim, true)));
    if (dk) AOT_TRY((gemm<T, A>(n, z.dim, rows, {ds_, kBlockKeys, true}, {q[query], q.stride}, dk_, z.dim, true)));
    if (!dq) return kOk;
    const HeadRows<A> to = x_.of_queries(g_.sums, b, h, z.dim);
    return add_product<T>(rows, z.dim, n, ds_, k[key], k.stride, to[query], to.stride);
  }

  // p and ds of n scores.
  void slopes(int64_t at, int64_t n, A lse, A delta) const {
    const A *const s = s_ + at, *const dp = dp_ + at, scale = static_cast<A>(x_.z.scale), times = x_.times();
    const A inverse = x_.z.softcap ? static_cast<A>(1 / x_.z.softcap) : 0;
    const Unit<T> unit(VecInt<T>{});
    sweep<T>(n, [&](int64_t j, auto part) {
      const Vec<T> score = load(s + j, part) * times, tangent = score * inverse, of_p = load(dp + j, part) - delta;
      const Vec<T> p = exp_nonpositive<T>(unit, score - lse);
      store(p_ + at + j, p, part);
      store(ds_ + at + j, p * of_p * (scale - scale * tangent * tangent), part);
    });
  }

  // p and ds of a row's scores, with what is added to them; and dt, added to its sums.
  void slopes_of_sums(int64_t b, int64_t h, int64_t query, int64_t key, int64_t at, Range seen, A lse, A delta,
                      A *bias) const {
    const int64_t n = seen.end - seen.begin, step = x_.extra.of_bias.key;
    if (n <= 0) return;
    const A *const s = s_ + at + seen.begin, *const dp = dp_ + at + seen.begin, scale = static_cast<A>(x_.z.scale);
    const A inverse = x_.z.softcap ? static_cast<A>(1 / x_.z.softcap) : 0;
    const A base = lse == -static_cast<A>(__builtin_inf()) ? 0 : lse;  // of a row that sees none
    const Unit<T> unit(VecInt<T>{});
    A sums[kBlockKeys], dt[kBlockKeys];
    x_.addends(b, h, query, key + seen.begin, n, sums);
    x_.add(s, sums, n, sums);
    sweep<T>(n, [&](int64_t j, auto part) {
      const Vec<T> score = load(s + j, part), tangent = score * inverse;
      const Vec<T> p = exp_nonpositive<T>(unit, load(sums + j, part) - base);
      const Vec<T> slope = p * (load(dp + j, part) - delta);
      store(p_ + at + seen.begin + j, p, part);
      store(dt + j, slope, part);
      store(ds_ + at + seen.begin + j, slope * (scale - scale * tangent * tangent), part);
    });
    for (int64_t j = 0; j < n && bias; ++j) bias[(seen.begin + j) * step] += dt[j];
  }

  const Heads<T> &x_;
  const Gradients<T> &g_;
  Kept kept_;
  Prepared<T> prepared_{kBlockQueries};
  A *s_ = nullptr, *dp_ = nullptr, *dk_ = nullptr, *dv_ = nullptr;
  T *p_ = nullptr, *ds_ = nullptr;
};

// A task for each block of the bias: no sum is made by two.
template <typename T>
Status bias_gradient(const Heads<T> &x, const Gradients<T> &g) {
  const ScoreSteps &steps = x.extra.of_bias;
  const int64_t rows = steps.query ? ceil_div(x.z.queries, kBlockQueries) : 1;
  const int64_t columns = steps.key ? ceil_div(x.z.keys, kBlockKeys) : 1;
  return try_parallel(steps.planes * rows * columns, [&](int64_t index) {
    const GradientBlock<T> block(x, g);
    if (!block.allocated()) return out_of_memory(AttentionBackward::name);
    const int64_t plane = index / columns / rows;
    return block.bias(plane, index / columns % rows * kBlockQueries, index % columns * kBlockKeys);
  });
}

template <typename T, typename A = Accumulate<T>>
void sink_gradients(const Heads<T> &x, const Gradients<T> &g) {
  const AttentionSizes &z = x.z;
  for (int64_t h = 0; h < z.heads; ++h) {
    const A sink = x.sink(h);
    double sum = 0;
    for (int64_t b = 0; b < z.batch; ++b)
      for (int64_t i = (b * z.heads + h) * z.queries, end = i + z.queries; i < end; ++i)
        if (sink > -static_cast<A>(__builtin_inf()) || sink != sink) sum -= std::exp(sink - g.lse[i]) * g.delta[i];
    const A rounded = static_cast<A>(sum);
    narrow_numbers<T>(&rounded, 1, g.dsinks, x.extra.wide_sinks, h);
  }
}

// The scores are computed once where each thread has a head of k with all its queries, else once more for dq: for
// fewer heads than threads. The order of sums is the same.
template <typename T>
Status gradients(const Heads<T> &x, const Gradients<T> &g) {
  const AttentionSizes &z = x.z;
  const int64_t heads = z.batch * z.kv_heads, blocks = ceil_div(z.keys, kBlockKeys);
  if (g.dbias && x.extra.bias) AOT_TRY(bias_gradient(x, g));
  if (g.dsinks && x.extra.sinks) sink_gradients(x, g);
  if (!g.dq && !g.dk && !g.dv) return kOk;
  const auto run = [&](int64_t count, auto f) {
    return try_parallel(count, [&](int64_t index) {
      const GradientBlock<T> block(x, g);
      return block.allocated() ? f(block, index) : out_of_memory(AttentionBackward::name);
    });
  };
  if (heads >= threads())
    return run(heads, [&](const GradientBlock<T> &block, int64_t head) -> Status {
      const int64_t b = head / z.kv_heads, h = head % z.kv_heads, first = h * z.group(), end = first + z.group();
      for (int64_t i = first; i < end && g.dq; ++i) block.clear(b, i, 0, z.queries);
      for (int64_t key = 0; key < z.keys; key += kBlockKeys) AOT_TRY(block.keys(b, h, key, g.dq));
      for (int64_t i = first; i < end && g.dq; ++i) block.finish(b, i, 0, z.queries);
      return kOk;
    });
  if (g.dk || g.dv)
    AOT_TRY(run(heads * blocks, [&](const GradientBlock<T> &block, int64_t index) {
      const int64_t head = index / blocks;
      return block.keys(head / z.kv_heads, head % z.kv_heads, index % blocks * kBlockKeys, false);
    }));
  if (!g.dq) return kOk;
  const int64_t parts = ceil_div(z.queries, kBlockQueries);
  return run(z.batch * z.heads * parts, [&](const GradientBlock<T> &block, int64_t index) {
    const int64_t head = index / parts, part = parts - 1 - index % parts;
    return block.queries(head / z.heads, head % z.heads, part * kBlockQueries);
  });
}

}  // namespace

// ----------------------------------------------------------------------------------------------------- launchers

template <class Op>
Status attention_launcher(const Op &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &q = in[op.kQ], &k = in[op.kK], &v = in[op.kV], &lengths = in[op.kLengths];
  return dispatch_floating(q.dtype, [&](auto zero) -> Status {
    using T = decltype(zero);
    Heads<T> x{q.as<T>(), k.as<T>(), v.as<T>(), lengths, op.sizes(q, k, v, lengths), {}};
    AOT_TRY(op.extras(op.name, x.z, q, in[op.kMask], in[op.kBias], in[op.kSinks], in[op.kOffsets], in[op.kKeyOffsets],
                      in[op.kSeed], &x.extra));
    AOT_TRY(x.check_lengths(op.name));
    return attend_all(x, out[op.kY].template as<T>(), out[op.kLse].template as<Accumulate<T>>());
  });
}

template <class Op>
Status attention_backward_launcher(const Op &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &q = in[op.kQ], &k = in[op.kK], &v = in[op.kV], &lengths = in[op.kLengths], &work = out[op.kWork];
  if (!work) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  return dispatch_floating(q.dtype, [&](auto zero) -> Status {
    using T = decltype(zero);
    using A = Accumulate<T>;
    Heads<T> x{q.as<T>(), k.as<T>(), v.as<T>(), lengths, op.sizes(q, k, v, lengths), {}};
    AOT_TRY(op.extras(op.name, x.z, q, in[op.kMask], in[op.kBias], in[op.kSinks], in[op.kOffsets], in[op.kKeyOffsets],
                      in[op.kSeed], &x.extra));
    AOT_TRY(x.check_lengths(op.name));
    A *const delta = work.as<A>(), *const recomputed = delta + x.z.rows();
    const T *const dy = in[op.kDy].template as<T>();
    T *const dq = out[op.kDq].template as<T>();
    A *const lse = in[op.kLse] ? in[op.kLse].template as<A>() : recomputed;
    if (!in[op.kLse]) AOT_TRY(attend_all<T>(x, nullptr, recomputed));
    sum_products(x, dy, in[op.kY].template as<const T>(), delta);
    A *const sums = sizeof(T) < sizeof(A) ? recomputed + x.z.rows() : reinterpret_cast<A *>(dq);
    return gradients(x, Gradients<T>{dy, lse, delta, dq, out[op.kDk].template as<T>(), out[op.kDv].template as<T>(),
                                     sums, out[op.kDbias].data, out[op.kDsinks].data});
  });
}

template Status attention_launcher(const PartsAttention &, const Tensor *, const Tensor *, void *);
template Status attention_backward_launcher(const PartsAttentionBackward &, const Tensor *, const Tensor *, void *);

}  // namespace AOT_ISA
}  // namespace aot

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::Attention, aot_attention_cpu, aot::attention_launcher)
AOT_CPU_ENTRY(aot::AttentionBackward, aot_attention_backward_cpu, aot::attention_backward_launcher)
