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
      weigh(r, to.most + at, to.total + at);
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
    const auto product = [&](auto epilogue) {
      return gemm<T, A, decltype(epilogue)>(z_.rows(), n, z_.dim, {q_, z_.dim}, keys, s_ + j, n_, false, epilogue);
    };
    const A scale = static_cast<A>(z_.scale), cap = static_cast<A>(z_.softcap);
    if (!z_.softcap) return product([=](Vec<T> s, int64_t, int64_t, auto) { return s * scale; });
    const A inner = static_cast<A>(z_.scale / z_.softcap);
    return product([=](Vec<T> s, int64_t, int64_t, auto) { return tanh<A>(s * inner) * cap; });
  }

  // The exponentials of row r, 0 where a key is not seen; its largest score and their sum.
  void weigh(int64_t r, A *most, A *total) const {
    const KeyRange all = z_.seen(r / z_.group(), length_);
    const auto within = [this](int64_t key) { return std::min(std::max<int64_t>(key - keys_.begin, 0), n_); };
    const int64_t begin = within(all.begin), end = std::max(within(all.end), begin);
    const A *const s = s_ + r * n_;
    T *const p = p_ + r * n_;
    const A top = largest(s + begin, end - begin);
    const Unit<T> unit(VecInt<T>{});
    Vec<T> sums[4] = {};
    sweep_sums<T>(end - begin, [&](int64_t j, auto part, int k) {
      const Vec<T> e = keep<T>(exp_nonpositive<T>(unit, load(s + begin + j, part) - top), part);
      sums[k] += e;
      store(p + begin + j, e, part);
    });
    std::memset(p, 0, begin * sizeof(T));
    std::memset(p + end, 0, (n_ - end) * sizeof(T));
    *most = top, *total = static_cast<A>(sum_of_4<T>(sums));
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
    AOT_TRY(try_parallel(z.batch * z.kv_heads * z.chunks, [&](int64_t i) {
      const int64_t head = i / z.chunks;
      return ChunkOfKeys<T>(x, head / z.kv_heads, head % z.kv_heads, i % z.chunks).run(partial);
    }));
    return try_parallel(z.all_rows(), [&](int64_t row) { return combine(x, partial, row, out[op.kY].as<T>()); });
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::PagedAttention, aot_paged_attention_cpu, aot::paged_attention_cpu)
