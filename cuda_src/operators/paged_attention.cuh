// paged_attention's chunks of keys on ordinary cores, in every dtype and for every head_dim; the kernel that combines
// the results of chunks; and what the kernel of paged_attention_mma.cuh shares with these.
#pragma once
#include "cuda/async.cuh"
#include "cuda/math.cuh"
#include "cuda/overlap.cuh"
#include "cuda/reduce.cuh"
#include "paged_attention.h"

namespace aot {
inline namespace AOT_ISA {

// -------------------------------------------------------------------------------------------------------- the cache

// int32 or int64.
struct Integers {
  const void *data;
  bool wide;

  explicit Integers(const Tensor &x) : data(x.data), wide(x.dtype == DType::int64) {}
  __device__ int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t *>(data)[i] : static_cast<const int32_t *>(data)[i];
  }
};

// The length of an example; -1 where there is no such length.
__device__ inline int64_t length_of(const Integers &lengths, const PagedSizes &z, int64_t b) {
  const int64_t n = lengths[b];
  return n >= 0 && n <= z.max_keys() ? n : -1;
}

// A call: its inputs, and the results of chunks, of which row r of chunk c is c * all_rows() + r.
template <typename T>
struct PagedInputs {
  using A = Accumulate<T>;
  const T *q, *k, *v;
  Integers lengths, table;
  PagedSizes z;
  A *sums, *most, *total;
  T *y;        // where a kernel whose chunk is all of an example stores; else null
  bool ahead;  // whether warps wait with two steps of copies in flight, and not with one

  __device__ int64_t length(int64_t b) const { return length_of(lengths, z, b); }
  // The row of the cache that a key is; -1 if its block is none of the cache.
  __device__ int64_t row(int64_t b, int64_t key) const {
    const int64_t block = z.table ? table[b * z.max_blocks + key / z.block_size] : b;
    return block >= 0 && block < z.blocks ? block * z.block_size + key % z.block_size : -1;
  }
};

template <typename A>
__device__ inline A not_a_number() {
  return static_cast<A>(__int_as_float(0x7fffffff));
}
template <typename A>
__device__ inline A minus_infinity() {
  return -static_cast<A>(__int_as_float(0x7f800000));
}

// The chunk of a block, whose blockIdx.x counts tiles of rows first, then heads of k, chunks and examples.
struct PagedTile {
  int64_t b, c, h, row;  // row: the first of the head's

  __device__ PagedTile(const PagedSizes &z, int rows) {
    const unsigned tiles = static_cast<unsigned>((z.rows() + rows - 1) / rows);
    const unsigned heads = static_cast<unsigned>(z.kv_heads), chunks = static_cast<unsigned>(z.chunks);
    unsigned i = blockIdx.x;
    row = int64_t{i % tiles} * rows, i /= tiles;
    h = i % heads, i /= heads;
    c = i % chunks, b = i / chunks;
  }
};

// Whether rows of the cache and keys are 32-bit integers, with head_dims of up to 256.
inline bool paged_indices_fit(const PagedSizes &z) {
  return z.max_keys() <= 1 << 30 && bounded_product(z.blocks, z.block_size) <= INT32_MAX && z.batch <= INT32_MAX &&
         z.kv_heads <= INT32_MAX / 256;
}

// The keys of a warp's part of each step and their rows of the cache, of which a lane looks up one.
template <typename T, int kKeys, int kStep>
class PagedLookUp {
 public:
  __device__ PagedLookUp(const PagedInputs<T> &x, const PagedTile &tile, KeyRange seen)
      : x_(x),
        begin_(static_cast<int>(seen.begin)),
        end_(static_cast<int>(seen.end)),
        key_(begin_ / kKeys * kKeys + warp_index() * kKeys + lane_index()),
        blocks_(tile.b * x.z.max_blocks),
        example_(static_cast<int>(tile.b)) {
    look_up();
  }

  // The row of this step, -1 where there is none. Starts to read the block of the next one.
  __device__ int next() {
    const int found = row();
    key_ += kStep;
    look_up();
    return found;
  }

  // Whether a block of this warp's was none of the cache.
  __device__ bool missed() const { return __any_sync(~0u, missed_); }

 private:
  __device__ bool within() const { return key_ >= begin_ && key_ < end_ && lane_index() < kKeys; }

  __device__ void look_up() {
    block_ = example_, at_ = key_;
    if (!x_.z.table || !within()) return;
    const int size = static_cast<int>(x_.z.block_size), of = key_ / size;
    block_ = x_.table[blocks_ + of], at_ -= of * size;
  }
  __device__ int row() {
    if (!within()) return -1;
    if (block_ < 0 || block_ >= x_.z.blocks) return missed_ = true, -1;
    return static_cast<int>(block_) * static_cast<int>(x_.z.block_size) + at_;
  }

  const PagedInputs<T> &x_;
  int begin_, end_, key_;
  int at_;         // this key's in its block
  int64_t block_;  // as it was read: a comparison would wait for it
  int64_t blocks_;
  int example_;
  bool missed_ = false;
};

// The results of a tile of rows whose example has no keys that any of them sees.
template <typename T>
__device__ inline void store_nothing(const PagedInputs<T> &x, const PagedTile &tile, int rows, bool is_valid) {
  const T value = narrow<T>(is_valid ? Accumulate<T>(0) : not_a_number<Accumulate<T>>());
#pragma unroll 1
  for (int64_t row = tile.row; row < tile.row + rows && row < x.z.rows(); ++row)
    for (int64_t i = threadIdx.x; i < x.z.v_dim; i += blockDim.x)
      x.y[x.z.row_of(tile.b, tile.h, row) * x.z.v_dim + i] = value;
}

// ------------------------------------------------------------------------------------------------- ordinary cores

constexpr int kPagedBlock = 256, kPagedRows = 8, kPagedKeys = 32, kPagedDepth = 32;

// A warp has a row's scores, a lane one of a step of 32 keys. Then a thread has a column of all rows' sums. Nothing is
// copied ahead, and ten barriers are in a step for a head_dim of 128: the latency of memory is what a step takes, not
// its rate (in float32, an H200 reads at a seventh of that).
template <typename T>
__global__ void __launch_bounds__(kPagedBlock) paged_attention_kernel(PagedInputs<T> x) {
  using A = Accumulate<T>;
  __shared__ A queries[kPagedRows][kPagedDepth], keys[kPagedKeys][kPagedDepth + 1], weights[kPagedRows][kPagedKeys];
  __shared__ A shrinks[kPagedRows];
  __shared__ int64_t rows[kPagedKeys];
  launch_next();
  const PagedSizes &z = x.z;
  const PagedTile tile(z, kPagedRows);
  const int64_t length = x.length(tile.b);
  const KeyRange seen = z.seen_of_chunk(tile.c, length);
  if (length < 0 || seen.begin >= seen.end) return;
  const int64_t row = tile.row + warp_index(), column = int64_t{blockIdx.y} * kPagedBlock + threadIdx.x;
  const KeyRange own = z.seen(row / z.group(), length);
  const A scale = static_cast<A>(z.scale), cap = static_cast<A>(z.softcap);
  A sums[kPagedRows] = {}, most = minus_infinity<A>(), total = 0;
  for (int64_t first = seen.begin; first < seen.end; first += kPagedKeys) {
    __syncthreads();
    if (threadIdx.x < kPagedKeys) {
      const int64_t key = first + threadIdx.x;
      rows[threadIdx.x] = key < seen.end ? x.row(tile.b, key) : 0;
    }
    A score = 0;
    for (int64_t d = 0; d < z.dim; d += kPagedDepth) {
      __syncthreads();
      const int64_t at = d + lane_index();
      queries[warp_index()][lane_index()] =
          at < z.dim && row < z.rows() ? widen(x.q[z.row_of(tile.b, tile.h, row) * z.dim + at]) : A(0);
      for (int j = warp_index(); j < kPagedKeys; j += kPagedBlock / 32) {
        const bool present = at < z.dim && first + j < seen.end && rows[j] >= 0;
        keys[j][lane_index()] = present ? widen(x.k[(rows[j] * z.kv_heads + tile.h) * z.dim + at]) : A(0);
      }
      __syncthreads();
#pragma unroll 8
      for (int i = 0; i < kPagedDepth; ++i) score += queries[warp_index()][i] * keys[lane_index()][i];
    }
    const int64_t key = first + lane_index();
    const bool visible = key >= own.begin && key < own.end && key < seen.end;
    score *= scale;
    if (cap != 0) score = cap * tanh(score / cap);
    if (rows[lane_index()] < 0) score = not_a_number<A>();
    A top = visible ? score : minus_infinity<A>();
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const A theirs = __shfl_xor_sync(~0u, top, offset);
      top = theirs > top || theirs != theirs ? theirs : top;
    }
    const A before = most;
    most = top > most || top != top ? top : most;
    const A shrink = before == most ? A(1) : exponential<T>(before - most);
    const A weight = visible ? exponential<T>(score - most) : A(0);
    total = total * shrink + sum_lanes<32>(weight);
    weights[warp_index()][lane_index()] = weight;
    if (lane_index() == 0) shrinks[warp_index()] = shrink;
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kPagedRows; ++r) sums[r] *= shrinks[r];
    const int count = seen.end - first < kPagedKeys ? static_cast<int>(seen.end - first) : kPagedKeys;
    for (int j = 0; j < count && column < z.v_dim; ++j) {
      const A value = rows[j] < 0 ? A(0) : widen(x.v[(rows[j] * z.kv_heads + tile.h) * z.v_dim + column]);
#pragma unroll
      for (int r = 0; r < kPagedRows; ++r) sums[r] += weights[r][j] * value;
    }
  }
  if (lane_index() == 0 && row < z.rows() && blockIdx.y == 0) {
    const int64_t at = tile.c * z.all_rows() + z.row_of(tile.b, tile.h, row);
    x.most[at] = most, x.total[at] = total;
  }
  for (int r = 0; r < kPagedRows && column < z.v_dim && tile.row + r < z.rows(); ++r)
    x.sums[(tile.c * z.all_rows() + z.row_of(tile.b, tile.h, tile.row + r)) * z.v_dim + column] = sums[r];
}

// ------------------------------------------------------------------------------------------------------ the result

constexpr int kCombineWarps = 16, kCombineEach = 4, kCombineColumns = 32 * kCombineEach, kCombineAtOnce = 4;

// The warps of a block that combines chunks: each of them has as many as it reads at once.
inline int combine_warps(int64_t chunks) {
  return static_cast<int>(std::min<int64_t>(ceil_div(chunks, kCombineAtOnce), kCombineWarps));
}

// The results of chunks, and y, of the dtype, which A accumulates.
template <typename A>
struct PagedResults {
  Integers lengths;
  PagedSizes z;
  const A *sums, *most, *total;
  void *y;
  DType dtype;

  __device__ void store(int64_t at, A value) const {
    if constexpr (sizeof(A) == 8) static_cast<A *>(y)[at] = value;
    else if (dtype == DType::float32) static_cast<float *>(y)[at] = value;
    else if (dtype == DType::float16) static_cast<__half *>(y)[at] = narrow<__half>(value);
    else static_cast<__nv_bfloat16 *>(y)[at] = narrow<__nv_bfloat16>(value);
  }
};

// blockIdx.x: a row of y; blockIdx.y: columns. A warp sums every so many chunks, and then the sums of warps are summed.
template <typename A>
__global__ void __launch_bounds__(32 * kCombineWarps) paged_attention_combine_kernel(PagedResults<A> x) {
  __shared__ A sums[kCombineWarps][kCombineColumns], totals[kCombineWarps];
  const PagedSizes &z = x.z;
  const int64_t row = blockIdx.x, length = length_of(x.lengths, z, row / z.heads / z.queries);
  const int64_t first = int64_t{blockIdx.y} * kCombineColumns + lane_index();
  const int64_t chunks = length < 0 ? 0 : z.seen_chunks(length);
  const int warps = static_cast<int>(blockDim.x) / 32;
  wait_for_kernel_before();
  A most = minus_infinity<A>();
  for (int64_t c = lane_index(); c < chunks; c += 32) {
    const A theirs = x.most[c * z.all_rows() + row];
    most = theirs > most || theirs != theirs ? theirs : most;
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const A theirs = __shfl_xor_sync(~0u, most, offset);
    most = theirs > most || theirs != theirs ? theirs : most;
  }
  A sum[kCombineEach] = {}, total = 0;
#pragma unroll kCombineAtOnce
  for (int64_t c = warp_index(); c < chunks; c += warps) {
    const int64_t at = c * z.all_rows() + row;
    const A part = x.total[at], times = part == 0 ? A(0) : exponential<A>(x.most[at] - most);
    total += part * times;
#pragma unroll
    for (int i = 0; i < kCombineEach; ++i)
      if (first + 32 * i < z.v_dim) sum[i] += x.sums[at * z.v_dim + first + 32 * i] * times;
  }
#pragma unroll
  for (int i = 0; i < kCombineEach; ++i) sums[warp_index()][lane_index() + 32 * i] = sum[i];
  if (lane_index() == 0) totals[warp_index()] = total;
  __syncthreads();
  for (int i = threadIdx.x; i < kCombineColumns; i += blockDim.x) {
    const int64_t column = int64_t{blockIdx.y} * kCombineColumns + i;
    if (column >= z.v_dim) return;
    A result = 0, all = 0;
    for (int w = 0; w < warps; ++w) result += sums[w][i], all += totals[w];
    if (length < 0) result = all = not_a_number<A>();
    x.store(row * z.v_dim + column, all == 0 ? A(0) : result / all);
  }
}

}  // namespace AOT_ISA
}  // namespace aot
