// paged_attention: attention of the last few queries of each example to a cache of keys and values. For query i of a
//          head of example b, with at = length - queries + i and s[j] = scale sum(q[i] k[j]), or
//          softcap tanh(scale sum(q[i] k[j]) / softcap):
//          y[i] = sum(exp(s[j]) v[j]) / sum(exp(s[j])) over the keys j of [max(0, at - window), at]
//          A query that sees none has y = 0. With a block_table, key j of example b is row j % block_size of block
//          block_table[b, j / block_size] of the cache.
// The keys that the queries of an example see are split evenly into chunks, whose results are combined in their order.
// The sizes of the tensors determine how many chunks there are at most, and the length of an example its own; the
// kernels of paged_attention_tma.cuh split the keys of all examples instead. Sums are in float32 (float64 for float64).
// In 16 bits exp(s[j]) is rounded before it is a factor, but for few rows on the CPU.
#pragma once
#include <algorithm>
#include <cmath>

#include "aot.h"

#ifdef __CUDACC__
#define AOT_PAGED_BOTH __host__ __device__
#else
#define AOT_PAGED_BOTH
#endif

namespace aot {
inline namespace AOT_ISA {

// Keys; none if end <= begin.
struct KeyRange {
  int64_t begin, end;
};

// The sizes of a call, as both devices take them. Without a table an example is one block. window: no less than the
// keys where there is none.
struct PagedSizes {
  // A chunk has as many keys as pay for a partial result, in multiples of what a step of the kernels takes.
  static constexpr int64_t kFewestKeys = kIsCuda ? 256 : 512, kChunkStep = 64;

  int64_t batch, queries, heads, kv_heads, heads_per_kv, dim, v_dim, blocks, block_size, max_blocks, window, chunks;
  double scale, softcap;
  bool table;

  AOT_PAGED_BOTH int64_t group() const { return heads_per_kv; }
  AOT_PAGED_BOTH int64_t max_keys() const { return max_blocks * block_size; }
  // Rows of a head of k: the queries of the heads that share it. Those of y, and of all partial results.
  AOT_PAGED_BOTH int64_t rows() const { return queries * group(); }
  AOT_PAGED_BOTH int64_t all_rows() const { return batch * queries * heads; }
  // The row of y of row r of head h of k.
  AOT_PAGED_BOTH int64_t row_of(int64_t b, int64_t h, int64_t r) const {
    return (b * queries + r / group()) * heads + h * group() + r % group();
  }

  // Whether tensor cores' kernel takes the head_dims, and one product has all rows of a head.
  AOT_PAGED_BOTH bool has_pieces() const { return dim <= 256 && v_dim <= 256 && dim % 8 == 0 && v_dim % 8 == 0; }
  AOT_PAGED_BOTH bool has_few_rows() const { return rows() <= 16; }
  // Whether the kernels for compute capability 9.0 take the head_dims and rows, in 16 bits.
  bool has_columns() const { return dim == v_dim && (dim == 64 || dim == 128) && rows() > 0 && rows() <= 8; }

  // The keys that a query sees, of an example with `length` keys.
  AOT_PAGED_BOTH KeyRange seen(int64_t query, int64_t length) const {
    const int64_t at = length - queries + query, first = at - window;
    return {first < 0 ? 0 : first, at + 1};
  }
  // The keys of chunk c that any query sees.
  AOT_PAGED_BOTH KeyRange seen_of_chunk(int64_t c, int64_t length) const {
    const int64_t first = seen(0, length).begin, size = chunk_size(first, length);
    const int64_t begin = first / kChunkStep * kChunkStep + c * size, end = begin + size;
    return {first > begin ? first : begin, length < end ? length : end};
  }
  // The number of chunks, the first ones, that have keys.
  AOT_PAGED_BOTH int64_t seen_chunks(int64_t length) const {
    const int64_t first = seen(0, length).begin, size = chunk_size(first, length);
    return (length - first / kChunkStep * kChunkStep + size - 1) / size;
  }

 private:
  AOT_PAGED_BOTH int64_t chunk_size(int64_t first, int64_t length) const {
    const int64_t keys = length - first / kChunkStep * kChunkStep, even = (keys + chunks - 1) / chunks;
    return ((even > kFewestKeys ? even : kFewestKeys) + kChunkStep - 1) / kChunkStep * kChunkStep;
  }
};

// Blocks of threads of the tensor cores' kernel on a multiprocessor.
constexpr int kPagedResident = 3;

// The chunks of an example, of `heads` heads of k and of so many keys, on a GPU. The blocks of all are to be whole
// waves of those that an H200 holds, on any device: another one is not to have other results. A block's start and end
// cost what kOverhead keys do: by the time of 2,048 and of 1,088 blocks for the same keys, 5 us of each block's place.
inline int64_t chunks_in_waves(int64_t heads, int64_t keys) {
  constexpr int64_t kResident = 132 * kPagedResident, kFewestWaves = 1, kMostWaves = 8, kOverhead = 192;
  int64_t best = 1, least = INT64_MAX;
  for (int64_t waves = kFewestWaves; waves <= kMostWaves; ++waves) {
    const int64_t chunks = std::max<int64_t>(waves * kResident / heads, 1);
    const int64_t needed = (bounded_product(heads, chunks) + kResident - 1) / kResident;
    const int64_t cost = bounded_product(needed, (keys + chunks - 1) / chunks + kOverhead);
    if (cost < least) least = cost, best = chunks;
  }
  return best;
}

// Whether one chunk of an example is faster than several and the kernel that combines them, in 16 bits: so many blocks
// read at the full rate of memory. A block takes up to 12 us, so that one long example among short ones costs no more
// than that kernel and the blocks' starts.
inline bool one_chunk_pays(const PagedSizes &z, int64_t heads, int64_t keys) {
  constexpr int64_t kFewest = 96, kMost = 132 * kPagedResident, kMostBytes = 512 << 10;
  return z.has_pieces() && z.has_few_rows() && heads >= kFewest && heads <= kMost &&
         bounded_product(keys, z.dim + z.v_dim) <= kMostBytes / 2;
}

inline int64_t seen_keys(const PagedSizes &z) { return std::min(z.max_keys(), z.window + z.queries); }

// The kernels for compute capability 9.0: whether a block has all keys of an example's head, and nothing is combined.
// Where it need not, a block takes up to 12 us, or an eighth of what all take. Else each of so many blocks of a head
// has an equal piece of the keys of all examples, and at most two partial results.
constexpr int64_t kPagedPieces = 264;  // blocks: two on each multiprocessor of an H200
constexpr int64_t kPagedWaves = 4;     // of blocks, for so many examples of one length
inline bool whole_pays(const PagedSizes &z) {
  constexpr int64_t kFewest = 96, kMany = 8 * kPagedPieces, kMostBytes = 512 << 10;
  const int64_t heads = bounded_product(z.batch, z.kv_heads), keys = seen_keys(z);
  return keys <= z.kFewestKeys || heads >= kMany || (heads >= kFewest && keys * z.dim * 4 <= kMostBytes);
}
inline int64_t pieces_of_heads(const PagedSizes &z) {
  int64_t waves = 1;  // so many that no more than a tenth of the places is empty
  while (waves < 8 && kPagedPieces * waves % z.kv_heads * 10 > kPagedPieces * waves) ++waves;
  const int64_t most = bounded_product(z.batch, (seen_keys(z) + z.kFewestKeys - 1) / z.kFewestKeys);
  return std::max<int64_t>(std::min(kPagedPieces * waves / z.kv_heads, most), 1);
}
inline int64_t piece_results(const PagedSizes &z) { return 2 * pieces_of_heads(z) * z.kv_heads * z.rows(); }

// Blocks of threads have at most 64 rows of a head.
inline void choose_chunks(PagedSizes &z, DType dtype) {
  constexpr int64_t kTasks = 64;  // on a CPU
  const int64_t tiles = bounded_product(bounded_product(z.batch, z.kv_heads), (z.rows() + 63) / 64);
  const int64_t heads = std::max<int64_t>(tiles, 1);
  const int64_t keys = std::max<int64_t>(seen_keys(z), 1), most = (keys + z.kFewestKeys - 1) / z.kFewestKeys;
  z.chunks = std::min(kIsCuda ? chunks_in_waves(heads, keys) : (kTasks + heads - 1) / heads, most);
  if (kIsCuda && is_16_bits(dtype) && one_chunk_pays(z, heads, keys)) z.chunks = 1;
}

struct PagedAttention {
  static constexpr const char *name = "paged_attention";
  enum { kQ, kK, kV, kLengths, kTable };
  enum { kY, kWork };
  static constexpr Slot inputs[] = {
      {"q"}, {"k_cache"}, {"v_cache"}, {"lengths", required, kIntegers}, {"block_table", optional, kIntegers}};
  static constexpr Slot outputs[] = {{"y"}, {"workspace", workspace}};
  Number scale;
  int64_t window = kMostElements;  // keys before a query's own
  double softcap = 0;

  Status init(const Attrs &attrs) {
    AOT_TRY(attrs.get("scale", &scale));
    AOT_TRY(attrs.get("window", &window));
    return attrs.get("softcap", &softcap);
  }

  Status infer(const Tensor *in, Spec *out) const {
    const Spec &q = in[kQ], &k = in[kK], &v = in[kV];
    AOT_TRY(check_attributes());
    AOT_TRY(check_heads("q", q, q.dtype, "(batch, queries, heads, head_dim)"));
    const char *const form = in[kTable] ? "(blocks, block_size, kv_heads, head_dim), with a block_table"
                                        : "(batch, keys, kv_heads, head_dim), without a block_table";
    AOT_TRY(check_heads("k_cache", k, q.dtype, form));
    AOT_TRY(check_heads("v_cache", v, q.dtype, form));
    AOT_TRY(check_keys(q, k, static_cast<bool>(in[kTable])));
    AOT_TRY(check_values(k, v));
    AOT_TRY(check_integers("lengths", in[kLengths], 1, q, "(batch,)"));
    if (in[kTable]) AOT_TRY(check_integers("block_table", in[kTable], 2, q, "(batch, blocks of an example)"));
    out[kY] = q;
    if (q.rank_known()) out[kY].shape[3] = v.rank_known() ? v.shape[3] : kUnknownDim;
    AOT_TRY(check_size(name, "the result", out[kY]));
    out[kWork] = Spec::vector(accumulate_dtype(q.dtype), kUnknownDim);
    if (q.known() && k.known() && v.known() && (!in[kTable] || in[kTable].known()))
      out[kWork].shape[0] = partial_results(sizes(q, k, v, in[kTable]), q.dtype);
    return kOk;
  }

  // The inputs have passed infer.
  PagedSizes sizes(const Spec &q, const Spec &k, const Spec &v, const Spec &table) const {
    PagedSizes z{};
    z.table = static_cast<bool>(table);
    z.batch = q.shape[0], z.queries = q.shape[1], z.heads = q.shape[2], z.kv_heads = k.shape[2];
    z.heads_per_kv = z.kv_heads ? z.heads / z.kv_heads : 0;
    z.dim = q.shape[3], z.v_dim = v.shape[3];
    z.blocks = k.shape[0], z.block_size = k.shape[1], z.max_blocks = table ? table.shape[1] : 1;
    z.window = std::min(window, kMostElements);
    z.scale = scale.given ? scale.value : 1 / std::sqrt(static_cast<double>(z.dim));
    z.softcap = softcap;
    choose_chunks(z, q.dtype);
    return z;
  }

 private:
  // Elements: for each row of each chunk, the largest score, the sum of exponentials, and their sum of values.
  static int64_t partial_results(const PagedSizes &z, DType dtype) {
    int64_t rows = bounded_product(z.chunks, z.all_rows());
    const bool narrow = is_16_bits(dtype) || dtype == DType::unknown;  // MindSpore infers shapes without the dtype
    if (kIsCuda && narrow && z.has_columns() && !whole_pays(z)) rows = std::max(rows, piece_results(z));
    return bounded_product(rows, z.v_dim + 2);
  }

  Status check_attributes() const {
    if (window < 0)
      return fail(kInvalidArgument, "%s: window is %lld, expected a number of keys, or None for all", name,
                  static_cast<long long>(window));
    if (scale.given && !std::isfinite(scale.value))
      return fail(kInvalidArgument, "%s: scale is %g, expected a finite number", name, scale.value);
    if (std::isfinite(softcap) && softcap >= 0) return kOk;
    return fail(kInvalidArgument, "%s: softcap is %g, expected a finite number of at least 0", name, softcap);
  }

  static Status check_heads(const char *slot, const Spec &x, DType dtype, const char *form) {
    AOT_TRY(check_floating(name, slot, x));
    AOT_TRY(check_dtype(name, slot, x, dtype));
    if (!x.rank_known() || (x.ndim == 4 && x.shape[3] != 0)) return kOk;
    if (x.ndim == 4)
      return fail(kInvalidArgument, "%s: %s has shape %s, expected a head_dim of at least 1", name, slot,
                  ShapeText(x).text);
    return fail(kInvalidArgument, "%s: %s has shape %s, expected %s", name, slot, ShapeText(x).text, form);
  }

  static Status check_keys(const Spec &q, const Spec &k, bool table) {
    if (!q.rank_known() || !k.rank_known()) return kOk;
    if (!table && !same_dim(q.shape[0], k.shape[0]))
      return fail(kInvalidArgument, "%s: k_cache has shape %s, expected the batch of q, which has shape %s", name,
                  ShapeText(k).text, ShapeText(q).text);
    if (!same_dim(q.shape[3], k.shape[3]))
      return fail(kInvalidArgument, "%s: k_cache has shape %s, expected the head_dim of q, which has shape %s", name,
                  ShapeText(k).text, ShapeText(q).text);
    const int64_t of_q = q.shape[2], of_k = k.shape[2];
    if (of_q < 0 || of_k < 0 || (of_k ? of_q % of_k == 0 : of_q == 0)) return kOk;
    return fail(kInvalidArgument, "%s: k_cache has shape %s, of %lld heads, expected a divisor of q's %lld heads", name,
                ShapeText(k).text, static_cast<long long>(of_k), static_cast<long long>(of_q));
  }

  static Status check_values(const Spec &k, const Spec &v) {
    if (!k.rank_known() || !v.rank_known()) return kOk;
    bool same = true;
    for (int i = 0; i < 3; ++i) same = same && same_dim(k.shape[i], v.shape[i]);
    if (same) return kOk;
    return fail(kInvalidArgument, "%s: v_cache has shape %s, expected that of k_cache but for head_dim, which is %s",
                name, ShapeText(v).text, ShapeText(k).text);
  }

  static Status check_integers(const char *slot, const Spec &x, int ndim, const Spec &q, const char *form) {
    AOT_TRY(check_integer(name, slot, x));
    if (!x.rank_known()) return kOk;
    if (x.ndim == ndim && (!q.rank_known() || same_dim(x.shape[0], q.shape[0]))) return kOk;
    return fail(kInvalidArgument, "%s: %s has shape %s, expected %s, with the batch of q, which has shape %s", name,
                slot, ShapeText(x).text, form, ShapeText(q).text);
  }
};

}  // namespace AOT_ISA
}  // namespace aot
