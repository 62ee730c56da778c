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
// Elements from a row of scores to the next: an odd number of cache lines in 16 bits, and rows of float are not all in
// a few sets of a cache.
constexpr int64_t kPitch = kBlockKeys + 32;

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

// Element (i, p) is data[p * stride + i], of rows of scores by their columns. It is read where it lies: few columns
// share a packed panel.
template <typename A>
struct Columns {
  const A *data;
  int64_t stride;

  Columns at(int64_t i, int64_t p) const { return {data + p * stride + i, stride}; }
  static constexpr bool reads(int i) { return i % 3 != 0; }
  const A &operator()(int i) const { return data[i]; }
  void next() { data += stride; }
};
template <int, typename A>
Columns<A> rows_of(Columns<A> a) {
  return a;
}

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
      return gemm<T, A, decltype(epilogue)>(rows, n, z.dim, {q[query], q.stride}, {k[key], k.stride, true}, s, kPitch,
                                            false, epilogue);
    };
    return scale_scores(product);
  }
  // This one reads the packed keys.
  Status scores(HeadRows<const T> q, PackedMatrix<A> k, int64_t query, int64_t rows, int64_t n, A *s) const {
    const auto product = [&](auto epilogue) {
      using Product = CpuGemm<T, A, decltype(epilogue), InPlace<T>, PackedMatrix<A>>;
      return gemm_batch(
          1, [&](int64_t) { return Product{rows, n, z.dim, {q[query], q.stride}, k, s, kPitch, false, epilogue}; });
    };
    return scale_scores(product);
  }
  // product(epilogue), with the epilogue that scores have.
  template <class F>
  Status scale_scores(F product) const {
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
      return CpuGemm<T, A, NoEpilogue, InPlace<A>>{rows, dim, n, {x, kPitch}, {of_keys, stride}, sums, ld, true};
    });
  else return gemm<T, A>(rows, dim, n, {x, kPitch}, {of_keys, stride}, sums, ld, true);
}

// A block of keys as products take it, packed once for all queries. Only operands of the dtype of sums are packed.
// Calls of few queries, which would not share it, do not use it.
template <typename T, typename A = Accumulate<T>>
struct PackedKeys {
  static constexpr bool kMay = std::is_same_v<T, A>;
  using Packed = PackedMatrix<A>;

  static bool pays(const AttentionSizes &z) { return kMay && z.queries > kFewRows; }
  // Elements of a block of rows of `dim` numbers, in either form.
  static int64_t size(int64_t dim) {
    const int64_t across = Packed::size(dim, kBlockKeys), along = Packed::size(kBlockKeys, dim);
    return across > along ? across : along;
  }
  // The transpose of n rows of a head's tensor from `key` on: of products whose sums are over `dim`.
  static Packed transposed(HeadRows<const T> rows, int64_t key, int64_t n, int64_t dim, A *to) {
    if constexpr (kMay) pack<WidenedTerms<T>, Packed::kCols>(Matrix<T>{rows[key], rows.stride}, n, dim, to);
    return {to, dim};
  }
  // The rows themselves: of products whose sums are over keys.
  static Packed straight(HeadRows<const T> rows, int64_t key, int64_t n, int64_t dim, A *to) {
    if constexpr (kMay) pack<WidenedTerms<T>, Packed::kCols>(Matrix<T>{rows[key], rows.stride, true}, dim, n, to);
    return {to, n};
  }
};

// add_product with rows that are packed.
template <typename T, typename A = Accumulate<T>>
Status add_packed(int64_t rows, int64_t dim, int64_t n, const A *x, PackedMatrix<A> of_keys, A *sums, int64_t ld) {
  using Product = CpuGemm<A, A, NoEpilogue, InPlace<A>, PackedMatrix<A>>;
  return gemm_batch(1, [=](int64_t) { return Product{rows, dim, n, {x, kPitch}, of_keys, sums, ld, true}; });
}

// Zeros outside of a range of n elements.
template <typename T>
void clear_outside(T *x, Range range, int64_t n) {
  if (range.end <= range.begin) range = {n, n};
  std::memset(x, 0, range.begin * sizeof(T));
  std::memset(x + range.end, 0, (n - range.end) * sizeof(T));
}

// ---------------------------------------------------------------------------------------------------- probabilities

// (2^r - 1) / r for |r| <= 1/2, lowest coefficient first: the error of 2^r is 2e-8, and 3e-6 for 16 bits.
template <typename T>
constexpr float kPower[] = {6.931471825e-01f, 2.402264774e-01f, 5.550332367e-02f,
                            9.618437849e-03f, 1.339888782e-03f, 1.535335177e-04f};
template <>
constexpr float kPower<bfloat16>[] = {6.931241751e-01f, 2.402409911e-01f, 5.590650439e-02f, 9.582845494e-03f};
template <>
constexpr float kPower<float16>[] = {6.931241751e-01f, 2.402409911e-01f, 5.590650439e-02f, 9.582845494e-03f};

// e^x for x <= 0 that are differences of scores and of sums of exponentials: with less than exp_nonpositive's accuracy
// where it is small beside 1, and 0 below 2^-126.
template <typename T>
AOT_INLINE Vec<T> probability(Vec<T> x) {
  if constexpr (sizeof(Accumulate<T>) == sizeof(double)) {
    return exp_nonpositive<T>(Unit<T>(VecInt<T>{}), x);
  } else {
    constexpr float kLowest = -88.03f, kRound = 0x1.8p23f + 127;  // the integer's last bits are the exponent's
    const Vec<T> lowest = Vec<T>{} + kLowest;
    x = lowest > x ? lowest : x;
    const Vec<T> shifted = x * float(kLog2E) + kRound, r = x * float(kLog2E) - (shifted - kRound);
    constexpr int terms = sizeof kPower<T> / sizeof(float);
    Vec<T> q = Vec<T>{} + kPower<T>[terms - 1];
    for (int i = terms - 2; i >= 0; --i) q = q * r + kPower<T>[i];
    return (q * r + 1) * (Vec<T>)((VecUnsigned<T>)shifted << 23);
  }
}

// Whether the processor has an instruction that rounds to T, which takes subnormal numbers for zeros, as the products
// do. AOTOPS_CPU_ISA=avx512 turns it off.
template <typename T>
bool converts_to() {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, bfloat16>) {
    static const bool does = [] {
      const char *asked = std::getenv("AOTOPS_CPU_ISA");
      return __builtin_cpu_supports("avx512bf16") && !(asked && !std::strcmp(asked, "avx512"));
    }();
    return does;
  }
#endif
  return false;
}

// store, by that instruction if `converts`.
template <bool converts, typename T, class P>
AOT_INLINE void store_rounded(T *p, Vec<T> v, P part) {
#if defined(__AVX512F__)
  if constexpr (converts && std::is_same_v<T, bfloat16>) {
    Stored<T> raw;
    asm("vcvtneps2bf16 %1, %0" : "=v"(raw) : "v"(v));
    if constexpr (std::is_same_v<P, Part>) store_raw(p, raw, part.n * sizeof(T));
    else std::memcpy(p, &raw, sizeof raw);
    return;
  }
#endif
  store(p, v, part);
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
    const double sum =
        converts_to<T>() ? exponentials<true>(s, p, n, times, base) : exponentials<false>(s, p, n, times, base);
    total = total * shrink + static_cast<A>(sum);
    return shrink;
  }

 private:
  template <bool converts>
  static double exponentials(const A *s, T *p, int64_t n, A times, A base) {
    Vec<T> sums[4] = {};
    sweep_sums<T>(n, [&](int64_t j, auto part, int k) {
      const Vec<T> e = keep<T>(probability<T>(load(s + j, part) * times - base), part);
      sums[k] += e;
      store_rounded<converts>(p + j, e, part);
    });
    return sum_of_4<T>(sums);
  }
  static A most_of_none() { return -static_cast<A>(__builtin_inf()); }
};

// Queries [begin, end) of a head, in blocks of `size`: a block of keys is packed once for all of them.
template <typename T, typename A = Accumulate<T>>
class QueryBlocks {
 public:
  static constexpr int64_t kMost = 1024;

  QueryBlocks(const Heads<T> &x, int64_t b, int64_t h, int64_t begin, int64_t end, int64_t size)
      : x_(x),
        b_(b),
        h_(h),
        begin_(begin),
        end_(end),
        size_(size),
        packs_(Keys::pays(x.z)),
        packed_k_(packs_ ? Keys::size(x.z.dim) : 0),
        packed_v_(packs_ ? Keys::size(x.z.v_dim) : 0),
        kept_(size * kPitch * (sizeof(A) + kNarrow * sizeof(T)) +
              ((end - begin) * x.z.v_dim + packed_k_ + packed_v_) * sizeof(A)) {
    if (!kept_) return;
    s_ = kept_.take<A>(size * kPitch), sums_ = kept_.take<A>((end - begin) * x.z.v_dim);
    p_ = kNarrow ? kept_.take<T>(size * kPitch) : reinterpret_cast<T *>(s_);
    to_k_ = kept_.take<A>(packed_k_), to_v_ = kept_.take<A>(packed_v_);
  }

  // y may be null.
  Status run(T *y, A *lse) {
    if (!kept_) return out_of_memory(Attention::name);
    const AttentionSizes &z = x_.z;
    const int64_t length = x_.length(b_);
    for (int64_t i = 0; i < end_ - begin_ && x_.extra.sinks; ++i) state_[i].begin(x_.sink(h_));
    std::memset(sums_, 0, (end_ - begin_) * z.v_dim * sizeof(A));
    const Range all = x_.seen_by(begin_, end_, length);
    const Prepared<T> prepared(size_);
    for (int64_t key = all.begin / kBlockKeys * kBlockKeys; key < all.end; key += kBlockKeys) {
      const int64_t n = smaller(kBlockKeys, all.end - key);
      if (packs_) {
        k_ = Keys::transposed(x_.of_keys(x_.k, b_, h_ / z.group(), z.dim), key, n, z.dim, to_k_);
        if (y) v_ = Keys::straight(x_.of_keys(x_.v, b_, h_ / z.group(), z.v_dim), key, n, z.v_dim, to_v_);
      }
      for (int64_t query = begin_; query < end_; query += size_) {
        const int64_t end = smaller(query + size_, end_);
        const Range seen = x_.seen_by(query, end, length);
        const int64_t some = smaller(n, seen.end - key);
        if (seen.begin < key + n && some > 0) AOT_TRY(add(query, end, key, some, length, y));
      }
    }
    store_results(y, lse);
    return kOk;
  }

 private:
  using Keys = PackedKeys<T>;
  static constexpr bool kNarrow = sizeof(T) < sizeof(A);

  // The function adds what n keys, from `key` on, give to queries [query, end).
  Status add(int64_t query, int64_t end, int64_t key, int64_t n, int64_t length, bool sums) {
    const AttentionSizes &z = x_.z;
    const int64_t rows = end - query;
    A *const to = sums_ + (query - begin_) * z.v_dim;
    const HeadRows<const T> q = x_.of_queries(x_.q, b_, h_, z.dim);
    if (packs_) AOT_TRY(packed_scores(q, query, rows, n));
    else AOT_TRY(x_.scores(q, x_.of_keys(x_.k, b_, h_ / z.group(), z.dim), query, key, rows, n, s_));
    for (int64_t i = 0; i < rows; ++i) {
      const Range seen = x_.seen(query + i, key, n, length);
      if (seen.begin < seen.end) add_row(query + i, i * kPitch + seen.begin, key + seen.begin, seen.end - seen.begin);
      clear_outside(p_ + i * kPitch, seen, n);
    }
    if (!sums) return kOk;
    if constexpr (!kNarrow)
      if (packs_) return add_packed<T>(rows, z.v_dim, n, p_, v_, to, z.v_dim);
    const HeadRows<const T> v = x_.of_keys(x_.v, b_, h_ / z.group(), z.v_dim);
    return add_product<T>(rows, z.v_dim, n, p_, v[key], v.stride, to, z.v_dim);
  }
  Status packed_scores(HeadRows<const T> q, int64_t query, int64_t rows, int64_t n) {
    if constexpr (!kNarrow) return x_.scores(q, k_, query, rows, n, s_);
    return kOk;
  }

  // A query's n scores from element `at` on, of keys from `key` on, become probabilities.
  void add_row(int64_t query, int64_t at, int64_t key, int64_t n) {
    A addends[kBlockKeys];  // and what is kept
    A *const sum = sums_ + (query - begin_) * x_.z.v_dim;
    if (x_.adds()) {
      x_.addends(b_, h_, query, key, n, addends);
      x_.add(s_ + at, addends, n, s_ + at);
    }
    const A shrink = state_[query - begin_].add(s_ + at, p_ + at, n, x_.adds(), x_.times());
    if (shrink != 1)
      sweep<T>(x_.z.v_dim, [=](int64_t j, auto part) { store(sum + j, load(sum + j, part) * shrink, part); });
    if (!x_.extra.dropout) return;
    x_.kept(b_, h_, query, key, n, addends);
    x_.drop(addends, n, p_ + at);
  }

  void store_results(T *y, A *lse) const {
    const AttentionSizes &z = x_.z;
    const HeadRows<T> to = x_.of_results(y, b_, h_);
    for (int64_t i = begin_; i < end_; ++i) {
      const RunningSoftmax<T> &row = state_[i - begin_];
      const A *const sum = sums_ + (i - begin_) * z.v_dim, times = row.total == 0 ? 0 : x_.times_kept() / row.total;
      if (lse) lse[(b_ * z.heads + h_) * z.queries + i] = row.most + std::log(row.total);
      if (y)
        sweep<T>(z.v_dim, [=, at = to[i]](int64_t j, auto part) { store(at + j, load(sum + j, part) * times, part); });
    }
  }

  const Heads<T> &x_;
  const int64_t b_, h_, begin_, end_, size_;
  const bool packs_;
  const int64_t packed_k_, packed_v_;
  Kept kept_;
  A *s_ = nullptr, *sums_ = nullptr, *to_k_ = nullptr, *to_v_ = nullptr;
  T *p_ = nullptr;
  PackedMatrix<A> k_ = {}, v_ = {};
  RunningSoftmax<T> state_[kMost];
};

// The order of a query's sums depends on its keys alone, so that tasks may be as many as threads need.
template <typename T, typename A = Accumulate<T>>
Status attend_all(const Heads<T> &x, T *y, A *lse) {
  const AttentionSizes &z = x.z;
  const int64_t heads = z.batch * z.heads;
  int64_t size = kBlockQueries, chunk = kBlockQueries;
  const bool packs = PackedKeys<T>::pays(z);
  if (packs) {
    constexpr int64_t kSums = 1 << 16;  // elements, which stay in a second-level cache
    const int64_t tasks = ceil_div(4 * threads(), heads), most = smaller(QueryBlocks<T>::kMost, kSums / z.v_dim);
    chunk = ceil_div(smaller(ceil_div(z.queries, tasks), most), size) * size;
  } else {
    // Large blocks compute more that is not seen, and are fewer, for any number of threads.
    const int64_t large = ceil_div(z.queries, kMostQueries);
    const bool all_seen =
        z.seen_by(0, 1, z.keys).end == z.keys && z.seen_by(z.queries - 1, z.queries, z.keys).begin == 0;
    if (all_seen && heads * large >= 64) size = chunk = kMostQueries;
  }
  const int64_t chunks = ceil_div(z.queries, chunk);
  return try_parallel(heads * chunks, [&](int64_t index) {
    // Long rows first: of all heads, or of a head where there are many of its tasks.
    const int64_t head = packs ? index % heads : index / chunks, at = packs ? index / heads : index % chunks;
    const int64_t begin = (chunks - 1 - at) * chunk;
    QueryBlocks<T> blocks(x, head / z.heads, head % z.heads, begin, smaller(begin + chunk, z.queries), size);
    return blocks.run(y, lse);
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
        packs_(Keys::pays(x.z)),
        packed_k_(packs_ ? Keys::size(x.z.dim) : 0),
        packed_v_(packs_ ? Keys::size(x.z.v_dim) : 0),
        kept_((kBlockKeys * (x.z.dim + x.z.v_dim) + 2 * kScores + 2 * packed_k_ + packed_v_) * sizeof(A) +
              kNarrow * 2 * kScores * sizeof(T)) {
    if (!kept_) return;
    s_ = kept_.take<A>(kScores), dp_ = kept_.take<A>(kScores);
    dk_ = kept_.take<A>(kBlockKeys * x.z.dim), dv_ = kept_.take<A>(kBlockKeys * x.z.v_dim);
    p_ = kNarrow ? kept_.take<T>(kScores) : reinterpret_cast<T *>(s_);
    ds_ = kNarrow ? kept_.take<T>(kScores) : reinterpret_cast<T *>(dp_);
    to_k_ = kept_.take<A>(packed_k_), to_rows_ = kept_.take<A>(packed_k_), to_v_ = kept_.take<A>(packed_v_);
  }

  bool allocated() const { return static_cast<bool>(kept_); }

  // dk and dv of the block of keys from `key` on, of the head h of k; with dq: adds what these keys give to the sums.
  Status keys(int64_t b, int64_t h, int64_t key, bool dq) {
    const AttentionSizes &z = x_.z;
    const int64_t end = smaller(key + kBlockKeys, z.keys), length = x_.length(b), within = smaller(end, length);
    std::memset(dk_, 0, (end - key) * z.dim * sizeof(A));
    std::memset(dv_, 0, (end - key) * z.v_dim * sizeof(A));
    const Range queries = key < within ? x_.seeing(key, within) : Range{0, 0};
    if (key < within) pack_keys(b, h, key, within, dq);
    for (int64_t i = 0; i < z.group() && key < within; ++i)
      for (int64_t query = queries.begin / kBlockQueries * kBlockQueries; query < queries.end; query += kBlockQueries)
        AOT_TRY(add(b, h * z.group() + i, query, key, within, g_.dk, g_.dv, dq));
    if (g_.dk) store_rows(x_.of_keys(g_.dk, b, h, z.dim), key, end, dk_, z.dim);
    for (int64_t i = 0; i < (end - key) * z.v_dim && x_.extra.dropout; ++i) dv_[i] *= x_.times_kept();
    if (g_.dv) store_rows(x_.of_keys(g_.dv, b, h, z.v_dim), key, end, dv_, z.v_dim);
    return kOk;
  }

  // dq of the block of queries from `query` on.
  Status queries(int64_t b, int64_t h, int64_t query) {
    const AttentionSizes &z = x_.z;
    const int64_t length = x_.length(b), end = smaller(query + kBlockQueries, z.queries);
    clear(b, h, query, end);
    const Range keys = x_.seen_by(query, end, length);
    for (int64_t key = keys.begin / kBlockKeys * kBlockKeys; key < keys.end; key += kBlockKeys) {
      const int64_t last = smaller(key + kBlockKeys, length);
      pack_keys(b, h / z.group(), key, last, true);
      AOT_TRY(add(b, h, query, key, last, false, false, true));
    }
    finish(b, h, query, end);
    return kOk;
  }

  // dbias of a plane: of a block of queries and a block of keys, or of all where the bias is broadcast along them.
  Status bias(int64_t plane, int64_t query, int64_t key) {
    const AttentionSizes &z = x_.z;
    const ScoreSteps &steps = x_.extra.of_bias;
    const Buffer<A> sums(kScores);
    if (!sums) return out_of_memory(AttentionBackward::name);
    std::memset(sums, 0, kScores * sizeof(A));
    for (int64_t member = 0; member < steps.members; ++member) {
      const int64_t head = steps.sharer(plane, member, z.heads), b = head / z.heads, length = x_.length(b);
      const int64_t last = steps.query ? smaller(query + kBlockQueries, z.queries) : z.queries;
      for (int64_t i = query; i < last; i += kBlockQueries) {
        const Range seen = x_.seen_by(i, smaller(i + kBlockQueries, z.queries), length);
        const int64_t end = steps.key ? smaller(key + kBlockKeys, seen.end) : seen.end;
        for (int64_t j = steps.key ? key : seen.begin / kBlockKeys * kBlockKeys; j < end; j += kBlockKeys) {
          const int64_t within = smaller(j + kBlockKeys, end);
          pack_keys(b, head % z.heads / z.group(), j, within, false);
          AOT_TRY(add(b, head % z.heads, i, j, within, false, false, false, sums));
        }
      }
    }
    const int64_t rows = steps.query ? smaller(kBlockQueries, z.queries - query) : 1;
    const int64_t columns = steps.key ? smaller(kBlockKeys, z.keys - key) : 1;
    const int64_t to = plane * (steps.query ? z.queries : 1) * (steps.key ? z.keys : 1) + query * steps.query + key;
    for (int64_t i = 0; i < rows; ++i)
      narrow_numbers<T>(sums + i * kPitch, columns, g_.dbias, x_.extra.wide_bias, to + i * steps.query);
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
  using Keys = PackedKeys<T>;
  static constexpr int64_t kScores = kBlockQueries * kPitch;
  static constexpr bool kNarrow = sizeof(T) < sizeof(A);

  static void convert(const A *from, T *to, int64_t n) {
    sweep<T>(n, [=](int64_t j, auto part) { store(to + j, load(from + j, part), part); });
  }
  static void store_rows(HeadRows<T> to, int64_t begin, int64_t end, const A *from, int64_t dim) {
    for (int64_t i = begin; i < end; ++i) convert(from + (i - begin) * dim, to[i], dim);
  }

  // Packs what `add` needs of keys [key, end) of the head h of k.
  void pack_keys(int64_t b, int64_t h, int64_t key, int64_t end, bool dq) {
    if (!packs_) return;
    const AttentionSizes &z = x_.z;
    const HeadRows<const T> k = x_.of_keys(x_.k, b, h, z.dim), v = x_.of_keys(x_.v, b, h, z.v_dim);
    k_ = Keys::transposed(k, key, end - key, z.dim, to_k_), v_ = Keys::transposed(v, key, end - key, z.v_dim, to_v_);
    if (dq) rows_ = Keys::straight(k, key, end - key, z.dim, to_rows_);
  }

  // s and dp of a block, but for times().
  Status products(HeadRows<const T> q, HeadRows<const T> k, HeadRows<const T> v, HeadRows<const T> dy, int64_t query,
                  int64_t key, int64_t rows, int64_t n) const {
    const int64_t dim = x_.z.v_dim;
    if constexpr (!kNarrow)
      if (packs_) {
        AOT_TRY(x_.scores(q, k_, query, rows, n, s_));
        using Product = CpuGemm<T, A, NoEpilogue, InPlace<A>, PackedMatrix<A>>;
        return gemm_batch(1, [&](int64_t) { return Product{rows, n, dim, {dy[query], dy.stride}, v_, dp_, kPitch}; });
      }
    AOT_TRY(x_.scores(q, k, query, key, rows, n, s_));
    return gemm<T, A>(rows, n, dim, {dy[query], dy.stride}, {v[key], v.stride, true}, dp_, kPitch);
  }

  // Adds to sums (n, dim) the product of numbers of all scores, x, by their columns, with rows of queries.
  Status add_columns(int64_t n, int64_t dim, int64_t rows, const T *x, const T *of_queries, int64_t stride,
                     A *sums) const {
    if constexpr (!kNarrow) {
      using Product = CpuGemm<T, A, NoEpilogue, Columns<A>>;
      if (packs_)
        return gemm_batch(
            1, [=](int64_t) { return Product{n, dim, rows, {x, kPitch}, {of_queries, stride}, sums, dim, true}; });
    }
    return gemm<T, A>(n, dim, rows, {x, kPitch, true}, {of_queries, stride}, sums, dim, true);
  }

  // bias: null, or where dt is added, a matrix or what that is broadcast from.
  Status add(int64_t b, int64_t h, int64_t query, int64_t key, int64_t end, bool dk, bool dv, bool dq,
             A *bias = nullptr) const {
    const AttentionSizes &z = x_.z;
    const int64_t n = end - key, rows = smaller(kBlockQueries, z.queries - query), length = x_.length(b);
    const HeadRows<const T> q = x_.of_queries(x_.q, b, h, z.dim), k = x_.of_keys(x_.k, b, h / z.group(), z.dim),
                            v = x_.of_keys(x_.v, b, h / z.group(), z.v_dim), dy = x_.of_results(g_.dy, b, h);
    A factors[kBlockKeys];  // of what dropout keeps
    AOT_TRY(products(q, k, v, dy, query, key, rows, n));
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = (b * z.heads + h) * z.queries + query + i, at = i * kPitch;
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
    if (dv) AOT_TRY(add_columns(n, z.v_dim, rows, p_, dy[query], dy.stride, dv_));
    if (dk) AOT_TRY(add_columns(n, z.dim, rows, ds_, q[query], q.stride, dk_));
    if (!dq) return kOk;
    const HeadRows<A> to = x_.of_queries(g_.sums, b, h, z.dim);
    if constexpr (!kNarrow)
      if (packs_) return add_packed<T>(rows, z.dim, n, ds_, rows_, to[query], to.stride);
    return add_product<T>(rows, z.dim, n, ds_, k[key], k.stride, to[query], to.stride);
  }

  // p and ds of n scores.
  void slopes(int64_t at, int64_t n, A lse, A delta) const {
    const A *const s = s_ + at, *const dp = dp_ + at, scale = static_cast<A>(x_.z.scale), times = x_.times();
    T *const to_p = p_ + at, *const to_ds = ds_ + at;
    if (x_.z.softcap) {
      const A inverse = static_cast<A>(1 / x_.z.softcap);
      return sweep<T>(n, [=](int64_t j, auto part) {
        const Vec<T> score = load(s + j, part), tangent = score * inverse, of_p = load(dp + j, part) - delta;
        const Vec<T> p = probability<T>(score - lse);
        store(to_p + j, p, part);
        store(to_ds + j, p * of_p * (scale - scale * tangent * tangent), part);
      });
    }
    const auto all = [=](auto converts) {
      sweep<T>(n, [=](int64_t j, auto part) {
        const Vec<T> p = probability<T>(load(s + j, part) * times - lse), of_p = load(dp + j, part) - delta;
        store_rounded<converts()>(to_p + j, p, part);
        store_rounded<converts()>(to_ds + j, p * (of_p * scale), part);
      });
    };
    converts_to<T>() ? all(std::true_type()) : all(std::false_type());
  }

  // p and ds of a row's scores, with what is added to them; and dt, added to its sums.
  void slopes_of_sums(int64_t b, int64_t h, int64_t query, int64_t key, int64_t at, Range seen, A lse, A delta,
                      A *bias) const {
    const int64_t n = seen.end - seen.begin, step = x_.extra.of_bias.key;
    if (n <= 0) return;
    const A *const s = s_ + at + seen.begin, *const dp = dp_ + at + seen.begin, scale = static_cast<A>(x_.z.scale);
    const A inverse = x_.z.softcap ? static_cast<A>(1 / x_.z.softcap) : 0;
    const A base = lse == -static_cast<A>(__builtin_inf()) ? 0 : lse;  // of a row that sees none
    A sums[kBlockKeys], dt[kBlockKeys];
    x_.addends(b, h, query, key + seen.begin, n, sums);
    x_.add(s, sums, n, sums);
    sweep<T>(n, [&](int64_t j, auto part) {
      const Vec<T> score = load(s + j, part), tangent = score * inverse;
      const Vec<T> p = probability<T>(load(sums + j, part) - base);
      const Vec<T> slope = p * (load(dp + j, part) - delta);
      store(p_ + at + seen.begin + j, p, part);
      store(dt + j, slope, part);
      store(ds_ + at + seen.begin + j, slope * (scale - scale * tangent * tangent), part);
    });
    for (int64_t j = 0; j < n && bias; ++j) bias[(seen.begin + j) * step] += dt[j];
  }

  const Heads<T> &x_;
  const Gradients<T> &g_;
  const bool packs_;
  const int64_t packed_k_, packed_v_;
  Kept kept_;
  Prepared<T> prepared_{kBlockQueries};
  A *s_ = nullptr, *dp_ = nullptr, *dk_ = nullptr, *dv_ = nullptr, *to_k_ = nullptr, *to_rows_ = nullptr;
  A *to_v_ = nullptr;
  T *p_ = nullptr, *ds_ = nullptr;
  PackedMatrix<A> k_ = {}, rows_ = {}, v_ = {};  // rows_: of k
};

// A task for each block of the bias: no sum is made by two.
template <typename T>
Status bias_gradient(const Heads<T> &x, const Gradients<T> &g) {
  const ScoreSteps &steps = x.extra.of_bias;
  const int64_t rows = steps.query ? ceil_div(x.z.queries, kBlockQueries) : 1;
  const int64_t columns = steps.key ? ceil_div(x.z.keys, kBlockKeys) : 1;
  return try_parallel(steps.planes * rows * columns, [&](int64_t index) {
    GradientBlock<T> block(x, g);
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
      GradientBlock<T> block(x, g);
      return block.allocated() ? f(block, index) : out_of_memory(AttentionBackward::name);
    });
  };
  if (heads >= threads())
    return run(heads, [&](GradientBlock<T> &block, int64_t head) -> Status {
      const int64_t b = head / z.kv_heads, h = head % z.kv_heads, first = h * z.group(), end = first + z.group();
      for (int64_t i = first; i < end && g.dq; ++i) block.clear(b, i, 0, z.queries);
      for (int64_t key = 0; key < z.keys; key += kBlockKeys) AOT_TRY(block.keys(b, h, key, g.dq));
      for (int64_t i = first; i < end && g.dq; ++i) block.finish(b, i, 0, z.queries);
      return kOk;
    });
  if (g.dk || g.dv)
    AOT_TRY(run(heads * blocks, [&](GradientBlock<T> &block, int64_t index) {
      const int64_t head = index / blocks;
      return block.keys(head / z.kv_heads, head % z.kv_heads, index % blocks * kBlockKeys, false);
    }));
  if (!g.dq) return kOk;
  const int64_t parts = ceil_div(z.queries, kBlockQueries);
  return run(z.batch * z.heads * parts, [&](GradientBlock<T> &block, int64_t index) {
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
