#include "paged_attention.h"

#include "cpu/entry.h"
#include "cpu/math.h"
#include "cpu/rows.h"
#include "cpu/softmax.h"
#include "gemm/gemm_cpu.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// ------------------------------------------------------------------------------------------------------- the cache

int64_t integer(const Tensor &x, int64_t i) {
  return x.dtype == DType::int32 ? x.as<const int32_t>()[i] : x.as<const int64_t>()[i];
}

template <typename T>
struct Cache {
  const T *q, *k, *v;
  Tensor lengths, table;
  PagedSizes z;

  int64_t length(int64_t b) const { return integer(lengths, b); }
  int64_t block(int64_t b, int64_t key) const {
    return z.table ? integer(table, b * z.max_blocks + key / z.block_size) : b;
  }
  int64_t row(int64_t b, int64_t key) const { return block(b, key) * z.block_size + key % z.block_size; }

  Status check(const char *op) const {
    for (int64_t b = 0; b < z.batch; ++b) {
      if (length(b) < 0 || length(b) > z.max_keys())
        return fail(kInvalidArgument, "%s: lengths[%lld] is %lld, expected 0 to %lld, the number of keys", op,
                    static_cast<long long>(b), static_cast<long long>(length(b)), static_cast<long long>(z.max_keys()));
      if (z.table) AOT_TRY(check_blocks(op, b));
    }
    return kOk;
  }

 private:
  // Only those with keys that a query sees are read.
  Status check_blocks(const char *op, int64_t b) const {
    const int64_t begin = z.seen(0, length(b)).begin, end = length(b);
    for (int64_t key = begin; key < end; key = (key / z.block_size + 1) * z.block_size)
      if (const int64_t found = block(b, key); found < 0 || found >= z.blocks)
        return fail(kInvalidArgument, "%s: block_table[%lld, %lld] is %lld, expected 0 to %lld, a block of the cache",
                    op, static_cast<long long>(b), static_cast<long long>(key / z.block_size),
                    static_cast<long long>(found), static_cast<long long>(z.blocks - 1));
    return kOk;
  }
};

// --------------------------------------------------------------------------------------------------------- chunks

// The results of all chunks: row r of chunk c is c * all_rows() + r.
template <typename A>
struct Partial {
  A *sums, *most, *total;

  Partial(A *work, const PagedSizes &z)
      : sums(work), most(work + z.chunks * z.all_rows() * z.v_dim), total(most + z.chunks * z.all_rows()) {}
};

// The exponentials of a row's n scores, of keys from `key` on, become p: 0 where a key is not seen. Updates its largest
// score and their sum; the result is the factor of what has been summed before. The scores are not yet scaled.
template <typename T, typename P, typename A = Accumulate<T>>
A weigh(const PagedSizes &z, KeyRange seen, int64_t key, int64_t n, A *s, P *p, A *most, A *total) {
  const auto within = [=](int64_t k) { return std::min(std::max<int64_t>(k - key, 0), n); };
  const int64_t begin = within(seen.begin), end = std::max(within(seen.end), begin);
  std::memset(p, 0, begin * sizeof(P));
  std::memset(p + end, 0, (n - end) * sizeof(P));
  if (begin == end) return 1;
  s += begin, p += begin, n = end - begin;
  const A scale = static_cast<A>(z.softcap ? z.scale / z.softcap : z.scale), cap = static_cast<A>(z.softcap);
  const bool keeps_order = scale > 0 && !cap;  // the largest one stays the largest
  if (!keeps_order)
    sweep<A>(n, [=](int64_t j, auto part) {
      const Vec<T> scaled = load(s + j, part) * scale;
      store(s + j, cap ? tanh<A>(scaled) * cap : scaled, part);
    });
  const A times = keeps_order ? scale : 1;
  const A block = largest(s, n) * times, before = *most, top = block > before ? block : before;
  const A shrink = before == top ? 1 : std::exp(before - top);
  const Unit<T> unit(VecInt<T>{});
  Vec<T> sums[4] = {};
  sweep_sums<T>(n, [&](int64_t j, auto part, int k) {
    const Vec<T> e = keep<T>(exp_nonpositive<T>(unit, load(s + j, part) * times - top), part);
    sums[k] += e;
    store(p + j, e, part);
  });
  *most = top, *total = *total * shrink + static_cast<A>(sum_of_4<T>(sums));
  return shrink;
}

// Adjacent heads of k, of few rows each, for a chunk of keys. Few multiplications share what is read of the cache, so
// that memory decides: its elements are read in their order, and ahead of their use. Probabilities are not rounded.
template <typename T, typename A = Accumulate<T>>
class FewRows {
 public:
  // Whether there are few enough. Adjacent rows, of a cache of one head, are read well by products of matrices.
  static bool are(const PagedSizes &z) { return z.rows() <= (z.kv_heads > 1 ? 8 : 4); }

  FewRows(const Cache<T> &x, int64_t b, int64_t c, int64_t first, int64_t end)
      : x_(x),
        z_(x.z),
        b_(b),
        first_(first),
        heads_(end - first),
        at_(c * z_.all_rows()),
        length_(x.length(b)),
        keys_(z_.seen_of_chunk(c, length_)),
        ahead_(ceil_div(kAhead, heads_ * z_.dim * sizeof(T) * kStep) * kStep),
        q_(heads_ * z_.rows() * z_.dim),
        s_(heads_ * z_.rows() * kBlock),
        sums_(heads_ * z_.rows() * z_.v_dim) {}

  Status run(const Partial<A> &to) {
    if (keys_.end <= keys_.begin) return kOk;
    if (!q_ || !s_ || !sums_) return out_of_memory(PagedAttention::name);
    each_row([&](int64_t i, int64_t row) {
      to.most[at_ + row] = -static_cast<A>(__builtin_inf()), to.total[at_ + row] = 0;
      std::memset(sums(to, row), 0, z_.v_dim * sizeof(A));
      sweep<T>(z_.dim, [=, from = x_.q + row * z_.dim, q = q_ + i * z_.dim](int64_t j, auto part) {
        store(q + j, load(from + j, part), part);
      });
    });
    for (int64_t key = keys_.begin; key < keys_.end; key += kBlock) {
      find_rows(key);
      std::memset(sums_, 0, heads_ * z_.rows() * z_.v_dim * sizeof(A));
      for (int64_t j = 0; j < n_; j += kStep) scores(j);
      each_row([&](int64_t i, int64_t row) { weigh_row(key, i, row, to); });
      for (int64_t j = 0; j < n_; j += kStep) add_values(j, std::min(j + kStep, n_));
      // sums of blocks, so that rounding errors grow more slowly
      each_row([&](int64_t i, int64_t row) {
        sweep<A>(z_.v_dim, [=, sum = sums(to, row), more = sums_ + i * z_.v_dim](int64_t j, auto part) {
          store(sum + j, load(sum + j, part) + load(more + j, part), part);
        });
      });
    }
    return kOk;
  }

 private:
  static constexpr int64_t kBlock = 512, kStep = 16;  // keys
  static constexpr int64_t kAhead = 8192;             // bytes, at least
  static constexpr int kRows = kLanes<T> > 4 ? 4 : 2;

  A *sums(const Partial<A> &of, int64_t row) const { return of.sums + (at_ + row) * z_.v_dim; }

  // f(i, row) for each row i of these heads, whose row of q and of y is `row`.
  template <class F>
  void each_row(F f) const {
    for (int64_t h = 0; h < heads_; ++h)
      for (int64_t r = 0; r < z_.rows(); ++r) f(h * z_.rows() + r, z_.row_of(b_, first_ + h, r));
  }
  // f(count, r) for the rows of a head, `most` at a time, and then fewer.
  template <int most, class F>
  void each_part(F f, int64_t r = 0) const {
    for (; r + most <= z_.rows(); r += most) f(std::integral_constant<int, most>(), r);
    if constexpr (most > 1) each_part<most / 2>(f, r);
  }

  // The rows of the cache that have a block of keys.
  void find_rows(int64_t key) {
    n_ = std::min(keys_.end - key, kBlock);
    for (int64_t j = 0; j < n_;) {
      const int64_t row = x_.row(b_, key + j), end = std::min(n_, j + z_.block_size - (key + j) % z_.block_size);
      for (int64_t i = 0; j < end; ++i, ++j) rows_[j] = row + i;
    }
  }
  // These heads' part of key j, from the first one's `dim` elements on.
  const T *at(const T *cache, int64_t dim, int64_t j) const { return cache + (rows_[j] * z_.kv_heads + first_) * dim; }

  // Head h of later keys than key j, or, after the last one, of the first values; or of later values. Inlined: the
  // compiler takes a function that only prefetches for one without an effect. To the second-level cache: rows that are
  // a power of two apart share few sets of the first.
  AOT_INLINE void prefetch(const T *cache, int64_t dim, int64_t j, int64_t h) const {
    j += ahead_;
    if (j >= n_ && cache == x_.k) cache = x_.v, dim = z_.v_dim, j -= n_;
    for (const int64_t end = std::min(j + kStep, n_); j < end; ++j) {
      const char *const line = reinterpret_cast<const char *>(at(cache, dim, j) + h * dim);
      for (int64_t byte = 0; byte < dim * int64_t{sizeof(T)}; byte += 64) __builtin_prefetch(line + byte, 0, 2);
    }
  }

  // Scores of kStep keys from j on. Those after the last key are of the last one.
  void scores(int64_t j) const {
    for (int64_t h = 0; h < heads_; ++h) {
      prefetch(x_.k, z_.dim, j, h);
      each_part<kRows>([&](auto count, int64_t r) {
        using Dots = DotProducts<WidenedTerms<T>, T, count(), A>;
        const int64_t row = h * z_.rows() + r;
        Dots dots;
        for (int i = 0; i < count(); ++i) dots.rows[i] = q_ + (row + i) * z_.dim;
        for (int64_t key = j; key < j + kStep; key += Dots::kCols) {
          for (int i = 0; i < Dots::kCols; ++i)
            dots.columns[i] = at(x_.k, z_.dim, std::min(key + i, n_ - 1)) + h * z_.dim;
          const Vec<T> found = dots.sums(z_.dim);
          for (int i = 0; i < count(); ++i)
            std::memcpy(s_ + (row + i) * kBlock + key, reinterpret_cast<const A *>(&found) + i * Dots::kCols,
                        Dots::kCols * sizeof(A));
        }
      });
    }
  }

  void weigh_row(int64_t key, int64_t i, int64_t row, const Partial<A> &to) const {
    const KeyRange seen = z_.seen(row / z_.heads % z_.queries, length_);
    A *const s = s_ + i * kBlock, *const sum = sums(to, row);
    const A shrink = weigh<T>(z_, seen, key, n_, s, s, to.most + at_ + row, to.total + at_ + row);
    if (shrink != 1)
      sweep<A>(z_.v_dim, [=](int64_t j, auto part) { store(sum + j, load(sum + j, part) * shrink, part); });
  }

  // Adds the values of keys [j, end), times their exponentials.
  void add_values(int64_t j, int64_t end) const {
    for (int64_t h = 0; h < heads_; ++h) {
      prefetch(x_.v, z_.v_dim, j, h);
      each_part<kRows>([&](auto count, int64_t r) {
        constexpr int kVectors = count() == 1 || kVectorBytes == 64 ? 4 : 2;  // as many as registers hold sums of
        int64_t column = 0;
        for (; column + kVectors * kLanes<T> <= z_.v_dim; column += kVectors * kLanes<T>)
          add_values<count(), kVectors>(j, end, h, r, column, Full());
        for (; column + kLanes<T> <= z_.v_dim; column += kLanes<T>)
          add_values<count(), 1>(j, end, h, r, column, Full());
        if (column < z_.v_dim) add_values<count(), 1>(j, end, h, r, column, Part{z_.v_dim - column});
      });
    }
  }
  template <int rows, int vectors, class P>
  [[gnu::noinline]] void add_values(int64_t j, int64_t end, int64_t h, int64_t r, int64_t column, P part) const {
    const int64_t row = h * z_.rows() + r, offset = h * z_.v_dim + column;
    const A *const p = s_ + row * kBlock;
    A *const to = sums_ + row * z_.v_dim + column;
    Vec<T> sum[rows][vectors];
    const auto each = [](auto f) {
#pragma GCC unroll 4
      for (int i = 0; i < rows; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) f(i, v, v * kLanes<T>);
    };
    each([&](int i, int v, int lane) { sum[i][v] = load(to + i * z_.v_dim + lane, part); });
    for (; j < end; ++j) {
      const T *const from = at(x_.v, z_.v_dim, j) + offset;
      Vec<T> value[vectors];
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) value[v] = load(from + v * kLanes<T>, part);
      each([&](int i, int v, int) { sum[i][v] += p[i * kBlock + j] * value[v]; });
    }
    each([&](int i, int v, int lane) { store(to + i * z_.v_dim + lane, sum[i][v], part); });
  }

  const Cache<T> &x_;
  const PagedSizes &z_;
  const int64_t b_, first_, heads_, at_, length_;
  const KeyRange keys_;
  const int64_t ahead_;  // keys
  const Buffer<A> q_, s_, sums_;
  int64_t rows_[kBlock], n_ = 0;
};

// A chunk of keys, for all queries of a head of k.
template <typename T, typename A = Accumulate<T>>
class ChunkOfKeys {
 public:
  ChunkOfKeys(const Cache<T> &x, int64_t b, int64_t h, int64_t c)
      : x_(x),
        z_(x.z),
        b_(b),
        h_(h),
        c_(c),
        length_(x.length(b)),
        keys_(z_.seen_of_chunk(c, length_)),
        n_(keys_.end - keys_.begin),
        q_(z_.rows() * z_.dim),
        s_(n_ > 0 ? z_.rows() * n_ : 0),
        narrow_(sizeof(T) < sizeof(A) && n_ > 0 ? z_.rows() * n_ : 0),
        sums_(z_.rows() * z_.v_dim),
        p_(sizeof(T) < sizeof(A) ? narrow_ : reinterpret_cast<T *>(static_cast<A *>(s_))) {}

  Status run(const Partial<A> &to) const {
    if (n_ <= 0) return kOk;
    if (!q_ || !s_ || !narrow_ || !sums_) return out_of_memory(PagedAttention::name);
    for (int64_t r = 0; r < z_.rows(); ++r)
      std::memcpy(q_ + r * z_.dim, x_.q + z_.row_of(b_, h_, r) * z_.dim, z_.dim * sizeof(T));
    AOT_TRY(each_run([this](int64_t j, int64_t row, int64_t n) { return scores(j, row, n); }));
    std::memset(sums_, 0, z_.rows() * z_.v_dim * sizeof(A));
    for (int64_t r = 0; r < z_.rows(); ++r) {
      const int64_t at = c_ * z_.all_rows() + z_.row_of(b_, h_, r);
      const KeyRange seen = z_.seen(r / z_.group(), length_);
      to.most[at] = -static_cast<A>(__builtin_inf()), to.total[at] = 0;
      weigh<T>(z_, seen, keys_.begin, n_, s_ + r * n_, p_ + r * n_, to.most + at, to.total + at);
    }
    AOT_TRY(each_run([this](int64_t j, int64_t row, int64_t n) {
      const Matrix<T> values{x_.v + (row * z_.kv_heads + h_) * z_.v_dim, z_.kv_heads * z_.v_dim};
      return gemm<T, A>(z_.rows(), z_.v_dim, n, {p_ + j, n_}, values, sums_, z_.v_dim, true);
    }));
    for (int64_t r = 0; r < z_.rows(); ++r)
      std::memcpy(to.sums + (c_ * z_.all_rows() + z_.row_of(b_, h_, r)) * z_.v_dim, sums_ + r * z_.v_dim,
                  z_.v_dim * sizeof(A));
    return kOk;
  }

 private:
  // f(j, row, n) for each run of n rows of the cache, from `row` on, that are keys of this chunk from its key j on.
  template <class F>
  Status each_run(F f) const {
    constexpr int64_t kMost = 256;  // keys whose rows stay in a cache of the processor
    for (int64_t key = keys_.begin; key < keys_.end;) {
      const int64_t of_block = z_.block_size - key % z_.block_size;
      const int64_t n = std::min({of_block, keys_.end - key, kMost});
      AOT_TRY(f(key - keys_.begin, x_.row(b_, key), n));
      key += n;
    }
    return kOk;
  }

  Status scores(int64_t j, int64_t row, int64_t n) const {
    const Matrix<T> keys{x_.k + (row * z_.kv_heads + h_) * z_.dim, z_.kv_heads * z_.dim, true};
    return gemm<T, A>(z_.rows(), n, z_.dim, {q_, z_.dim}, keys, s_ + j, n_);
  }

  const Cache<T> &x_;
  const PagedSizes &z_;
  const int64_t b_, h_, c_, length_;
  const KeyRange keys_;
  const int64_t n_;
  const Buffer<T> q_;
  const Buffer<A> s_;
  const Buffer<T> narrow_;
  const Buffer<A> sums_;
  T *const p_;
};

// ------------------------------------------------------------------------------------------------------ the result

// A row of y from those of the chunks of its example.
template <typename T, typename A = Accumulate<T>>
Status combine(const Cache<T> &x, const Partial<A> &from, int64_t row, T *y) {
  const PagedSizes &z = x.z;
  const int64_t chunks = z.seen_chunks(x.length(row / z.heads / z.queries));
  const Buffer<A> sums(z.v_dim);
  if (!sums) return out_of_memory(PagedAttention::name);
  A *const sum = sums, most = -static_cast<A>(__builtin_inf()), total = 0;
  std::memset(sum, 0, z.v_dim * sizeof(A));
  const auto at = [&](int64_t c) { return c * z.all_rows() + row; };
  for (int64_t c = 0; c < chunks; ++c) most = std::max(most, from.most[at(c)]);
  for (int64_t c = 0; c < chunks; ++c) {
    if (from.total[at(c)] == 0) continue;
    const A times = std::exp(from.most[at(c)] - most), *const part_sum = from.sums + at(c) * z.v_dim;
    total += times * from.total[at(c)];
    sweep<T>(z.v_dim, [=](int64_t j, auto part) {
      store(sum + j, load(sum + j, part) + load(part_sum + j, part) * times, part);
    });
  }
  const A times = total == 0 ? 0 : 1 / total;
  sweep<T>(z.v_dim, [=](int64_t j, auto part) { store(y + row * z.v_dim + j, load(sum + j, part) * times, part); });
  return kOk;
}

// How many heads of k a task has: by this number the last thread ends first, and it is the largest of these, because a
// task of all heads reads the cache in its order. A row's sums are the same in any task.
int64_t heads_of_task(int64_t kv_heads, int64_t parts) {
  int64_t best = kv_heads, least = INT64_MAX;
  for (int64_t heads = kv_heads; heads > 0; --heads) {
    const int64_t time = ceil_div(parts * ceil_div(kv_heads, heads), threads()) * heads;
    if (time < least) least = time, best = heads;
  }
  return best;
}

template <typename T, typename A = Accumulate<T>>
Status attend_few(const Cache<T> &x, const Partial<A> &to) {
  const PagedSizes &z = x.z;
  const int64_t parts = z.batch * z.chunks, heads = threads() > 1 ? heads_of_task(z.kv_heads, parts) : z.kv_heads;
  const int64_t tasks = ceil_div(z.kv_heads, heads);
  return try_parallel(parts * tasks, [&](int64_t i) {
    const int64_t part = i / tasks, first = i % tasks * heads;
    return FewRows<T>(x, part / z.chunks, part % z.chunks, first, std::min(first + heads, z.kv_heads)).run(to);
  });
}

template <typename T, typename A = Accumulate<T>>
Status attend_many(const Cache<T> &x, const Partial<A> &to) {
  const PagedSizes &z = x.z;
  return try_parallel(z.batch * z.kv_heads * z.chunks, [&](int64_t i) {
    const int64_t head = i / z.chunks;
    return ChunkOfKeys<T>(x, head / z.kv_heads, head % z.kv_heads, i % z.chunks).run(to);
  });
}

Status paged_attention_cpu(const PagedAttention &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &q = in[op.kQ], &k = in[op.kK], &v = in[op.kV], &lengths = in[op.kLengths], &table = in[op.kTable];
  if (!out[op.kWork]) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  return dispatch_floating(q.dtype, [&](auto zero) -> Status {
    using T = decltype(zero);
    using A = Accumulate<T>;
    const Cache<T> x{q.as<T>(), k.as<T>(), v.as<T>(), lengths, table, op.sizes(q, k, v, table)};
    AOT_TRY(x.check(op.name));
    const PagedSizes &z = x.z;
    const Partial<A> partial(out[op.kWork].as<A>(), z);
    AOT_TRY(FewRows<T>::are(z) ? attend_few(x, partial) : attend_many(x, partial));
    const int64_t piece = rows_per_task(z.all_rows(), z.chunks * z.v_dim);
    return try_parallel(ceil_div(z.all_rows(), piece), [&](int64_t i) -> Status {
      for (int64_t row = i * piece, end = std::min(row + piece, z.all_rows()); row < end; ++row)
        AOT_TRY(combine(x, partial, row, out[op.kY].as<T>()));
      return kOk;
    });
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::PagedAttention, aot_paged_attention_cpu, aot::paged_attention_cpu)
