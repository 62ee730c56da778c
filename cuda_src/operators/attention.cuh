// attention on ordinary cores, in every dtype and for every head_dim; and what its other kernels share with it.
//
// All of it is one kernel. A block sums kSide rows of a result and kSide of their columns, a product of weights, (rows,
// others), with rows of another tensor: of p with v, of ds with k, of ds^T with q, of p^T with dy. It goes through the
// others in tiles, computes the scores of a tile, and the weights of these. The gradient of a bias is sums of weights.
#pragma once
#include "attention.h"
#include "cuda/launch.cuh"
#include "cuda/math.cuh"
#include "cuda/reduce.cuh"

namespace aot {
inline namespace AOT_ISA {

// The inputs of a call; dy, lse and delta of a backward.
template <typename T>
struct AttentionInputs {
  using A = Accumulate<T>;
  const T *q, *k, *v, *dy;
  const A *lse, *delta;
  const void *lengths;
  bool wide_lengths;  // int64
  AttentionSizes z;
  AttentionExtras extra;

  // Whether a call has none of what `extra` has.
  __host__ __device__ bool plain() const { return extra.none(); }

  // The length of an example, and what its results are times: NaN where there is no such length.
  struct Length {
    int64_t value;
    float times;
  };
  __device__ Length length(int64_t b) const {
    if (!lengths) return {z.keys, 1};
    const int64_t i = b % z.lines;
    const int64_t n =
        wide_lengths ? static_cast<const int64_t *>(lengths)[i] : static_cast<const int32_t *>(lengths)[i];
    if (n >= 0 && n <= z.keys) return {n, 1};
    return {0, __int_as_float(0x7fffffff)};
  }
  // Whether there are cu_seqlens or cu_seqlens_k that do not ascend from 0 to queries or keys. A block's threads all
  // call this.
  __device__ bool wrong_offsets() const {
    if (!extra.offsets) return false;
    bool wrong = false;
    for (int64_t i = threadIdx.x; i <= extra.sequences; i += blockDim.x) wrong |= misplaced(i);
    return __syncthreads_or(wrong);
  }
  // A block's threads all call this. NaN too where cu_seqlens or cu_seqlens_k are wrong.
  __device__ Length block_length(int64_t b) const {
    if (wrong_offsets()) return {0, __int_as_float(0x7fffffff)};
    return length(b);
  }
  // Whether offset i of queries or of keys is not between the one before and their number.
  __device__ bool misplaced(int64_t i) const {
    return misplaced(i, z.queries, false) || (extra.crossed() && misplaced(i, z.keys, true));
  }
  __device__ bool misplaced(int64_t i, int64_t most, bool of_keys) const {
    const int64_t at = extra.offset(i, of_keys);
    return at < (i ? extra.offset(i - 1, of_keys) : 0) || at > most;
  }
  // An element of what has q's dtype or, wide, that of its sums.
  __device__ static A number(const void *from, bool wide, int64_t i) {
    return wide ? static_cast<const A *>(from)[i] : widen(static_cast<const T *>(from)[i]);
  }
  __device__ A sink(int64_t h) const { return number(extra.sinks, extra.wide_sinks, h); }
  __device__ static void store(A value, void *to, bool wide, int64_t i) {
    if (wide) static_cast<A *>(to)[i] = value;
    else static_cast<T *>(to)[i] = narrow<T>(value);
  }
  __device__ int64_t row(int64_t b, int64_t h, int64_t query) const { return (b * z.heads + h) * z.queries + query; }

  // q, or dq.
  template <typename X>
  __device__ HeadRows<X> of_queries(X *x, int64_t b, int64_t h, int64_t dim) const {
    return head_rows(x, z, b, h, z.row_heads, z.queries, dim);
  }
  // y, or dy.
  template <typename X>
  __device__ HeadRows<X> of_results(X *x, int64_t b, int64_t h) const {
    return head_rows(x, z, b, h, z.heads, z.queries, z.v_dim);
  }
  // k, v, dk or dv, of which h is a head.
  template <typename X>
  __device__ HeadRows<X> of_keys(X *x, int64_t b, int64_t h, int64_t dim) const {
    return head_rows(x, z, b, h, z.kv_row_heads, z.keys, dim);
  }
};

// ------------------------------------------------------------------------------------------------------------ delta

constexpr int kDeltaBlock = 256;

// One warp for each row.
template <typename T>
__global__ void __launch_bounds__(kDeltaBlock)
    attention_delta_kernel(AttentionInputs<T> x, const T *y, Accumulate<T> *delta) {
  const AttentionSizes &z = x.z;
  const int64_t stride = int64_t{gridDim.x} * (kDeltaBlock / 32);
  for (int64_t i = int64_t{blockIdx.x} * (kDeltaBlock / 32) + warp_index(); i < z.rows(); i += stride) {
    const int64_t head = i / z.queries, query = i % z.queries, b = head / z.heads, h = head % z.heads;
    const T *const dy_row = x.of_results(x.dy, b, h)[query], *const y_row = x.of_results(y, b, h)[query];
    Accumulate<T> sum = 0;
    for (int64_t j = lane_index(); j < z.v_dim; j += 32) sum += widen(dy_row[j]) * widen(y_row[j]);
    sum = sum_lanes<32>(sum);
    if (lane_index() == 0) delta[i] = sum;
  }
}

// A block for each head.
template <typename T>
__global__ void __launch_bounds__(kDeltaBlock) attention_dsinks_kernel(AttentionInputs<T> x, void *dsinks) {
  using A = Accumulate<T>;
  __shared__ A sums[kDeltaBlock / 32];
  const AttentionSizes &z = x.z;
  const int64_t h = blockIdx.x;
  const A sink = x.sink(h);
  A sum = 0;
  for (int64_t i = threadIdx.x; i < z.batch * z.queries; i += kDeltaBlock) {
    const int64_t at = x.row(i / z.queries, h, i % z.queries);
    if (sink != -static_cast<A>(__int_as_float(0x7f800000))) sum -= exponential<T>(sink - x.lse[at]) * x.delta[at];
  }
  sum = sum_lanes<32>(sum);
  if (lane_index() == 0) sums[warp_index()] = sum;
  __syncthreads();
  if (threadIdx.x) return;
  for (int i = 1; i < kDeltaBlock / 32; ++i) sum += sums[i];
  x.store(sum, dsinks, x.extra.wide_sinks, h);
}

// ----------------------------------------------------------------------------------------------------- one kernel

enum class AttentionResult { y, dq, dk, dv, dbias };

constexpr int kAttentionBlock = 256;

template <typename A>
struct AttentionTiles {
  static constexpr int kSide = sizeof(A) == 8 ? 32 : 64, kEach = kSide / 16, kDepth = 32;
  A left[kSide][kDepth + 1], right[kSide][kDepth + 1];  // of a product of rows; the sum's factor is in their place
  A weights[kSide][kSide + 1];
  Range own[kSide];  // of each row: the others of its sequence

  using Factor = A[kSide][kSide + 1];
  __device__ Factor &factor() { return *reinterpret_cast<Factor *>(left); }
  static_assert(sizeof(Factor) <= 2 * sizeof(left));
};

// Thread (ty, tx) of 16 x 16 has rows ty + 16 i and columns tx + 16 j of a tile.
template <typename T, AttentionResult kResult>
class AttentionTile {
 public:
  using A = Accumulate<T>;
  using Tiles = AttentionTiles<A>;
  using Sums = A[Tiles::kEach][Tiles::kEach];
  static constexpr int kSide = Tiles::kSide, kEach = Tiles::kEach;
  static constexpr bool kOfKeys = kResult == AttentionResult::dk || kResult == AttentionResult::dv;
  static constexpr bool kOfScores = kResult != AttentionResult::y && kResult != AttentionResult::dv;  // ds, not p

  __device__ AttentionTile(const AttentionInputs<T> &x, Tiles &tiles) : x_(x), z_(x.z), tiles_(tiles) {
    kept_ = x.extra.dropout ? static_cast<A>(x.extra.dropout.times) : A(1);
#pragma unroll
    for (A &most : most_) most = -static_cast<A>(__int_as_float(0x7f800000));
  }

  __device__ void run(T *to, A *lse) {
    const int64_t heads = kOfKeys ? z_.kv_heads : z_.heads, all = kOfKeys ? z_.keys : z_.queries;
    const int64_t tiles = ceil_div(all, kSide), head = blockIdx.x / tiles, begin = blockIdx.x % tiles * kSide;
    const int64_t b = head / heads, h = head % heads, end = begin + kSide < all ? begin + kSide : all;
    const int64_t dim = kOfScores ? z_.dim : z_.v_dim;
    const auto length = x_.block_length(b);
    length_ = length.value, column_ = int64_t{blockIdx.y} * kSide;
    find_sequences(begin);
    if (kResult == AttentionResult::y && x_.extra.sinks) begin_with(x_.sink(h));
    if constexpr (kOfKeys) {
      const int64_t within = end < length_ ? end : length_;
      const Range seeing = own(z_.seeing(begin, within), within - begin);
      for (int64_t i = 0; i < z_.group() && begin < within; ++i)
        for (int64_t other = seeing.begin / kSide * kSide; other < seeing.end; other += kSide)
          step(b, h * z_.group() + i, h, begin, end, other, dim);
    } else {
      const Range seen = own(z_.seen_by(begin, end, length_), end - begin);
      for (int64_t other = seen.begin / kSide * kSide; other < seen.end; other += kSide)
        step(b, h, h / z_.group(), begin, end, other, dim);
    }
    const HeadRows<T> rows = kOfKeys                         ? x_.of_keys(to, b, h, dim)
                             : kResult == AttentionResult::y ? x_.of_results(to, b, h)
                                                             : x_.of_queries(to, b, h, dim);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int64_t row = begin + ty() + 16 * i;
      if (row >= end) continue;
      A times = length.times;
      if (!kOfScores) times *= kept_;
      if constexpr (kResult == AttentionResult::y) {
        times = total_[i] == 0 ? times * 0 : times / total_[i];
        if (lse && tx() == 0 && blockIdx.y == 0) lse[x_.row(b, h, row)] = most_[i] + log(total_[i]);
      }
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        if (to && column_ + tx() + 16 * j < dim) rows[row][column_ + tx() + 16 * j] = narrow<T>(sum_[i][j] * times);
    }
  }

  // dbias of a tile of a plane: of the members of it, and of all queries or keys where the bias is broadcast along
  // them.
  __device__ void run_bias(void *to) {
    const ScoreSteps &steps = x_.extra.of_bias;
    const int64_t rows = steps.query ? ceil_div(z_.queries, kSide) : 1,
                  columns = steps.key ? ceil_div(z_.keys, kSide) : 1;
    const int64_t plane = blockIdx.x / columns / rows, query = blockIdx.x / columns % rows * kSide;
    const int64_t key = blockIdx.x % columns * kSide, last = steps.query ? query + kSide : z_.queries;
    A times = 1;
    for (int64_t member = 0; member < steps.members; ++member) {
      const int64_t head = steps.sharer(plane, member, z_.heads), b = head / z_.heads, h = head % z_.heads;
      const auto length = x_.block_length(b);
      length_ = length.value, times *= length.times;
      for (int64_t i = query; i < last && i < z_.queries; i += kSide) {
        const int64_t past = i + kSide < z_.queries ? i + kSide : z_.queries;
        __syncthreads();
        find_sequences(i);
        const Range seen = own(z_.seen_by(i, past, length_), past - i);
        const int64_t end = steps.key && key + kSide < seen.end ? key + kSide : seen.end;
        for (int64_t j = steps.key ? key : seen.begin / kSide * kSide; j < end; j += kSide)
          step(b, h, h / z_.group(), i, past, j, 0);
      }
    }
    store_bias(to, plane, query, key, times);
  }

 private:
  __device__ static int ty() { return threadIdx.x / 16; }
  __device__ static int tx() { return threadIdx.x % 16; }

  // The sequences of the rows from `begin` on.
  __device__ void find_sequences(int64_t begin) {
    if (!x_.extra.offsets) return;
    if (threadIdx.x < kSide) tiles_.own[threadIdx.x] = x_.extra.sequence(begin + threadIdx.x, kOfKeys);
    __syncthreads();
  }
  // The part of a range that is in the sequences of these rows, of which there are n.
  __device__ Range own(Range range, int64_t n) const {
    if (!x_.extra.offsets || n <= 0) return range;
    return AttentionExtras::both(range, tiles_.own[0], tiles_.own[n - 1]);
  }

  __device__ void begin_with(A sink) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) most_[i] = sink, total_[i] = sink == lowest() ? 0 : 1;
  }

  __device__ static A lowest() { return -static_cast<A>(__int_as_float(0x7f800000)); }

  // Sums of dt over what the bias is broadcast along, from `query` and `key` on.
  __device__ void store_bias(void *to, int64_t plane, int64_t query, int64_t key, A times) {
    const ScoreSteps &steps = x_.extra.of_bias;
    auto &sums = tiles_.weights;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kEach; ++i)
#pragma unroll
      for (int j = 0; j < kEach; ++j) sums[ty() + 16 * i][tx() + 16 * j] = sum_[i][j] * times;
    __syncthreads();
    if (!steps.query && threadIdx.x < kSide)
      for (int i = 1; i < kSide; ++i) sums[0][threadIdx.x] += sums[i][threadIdx.x];
    __syncthreads();
    if (!steps.key && threadIdx.x < (steps.query ? kSide : 1))
      for (int j = 1; j < kSide; ++j) sums[threadIdx.x][0] += sums[threadIdx.x][j];
    __syncthreads();
    const int64_t rows = steps.query ? z_.queries : 1, columns = steps.key ? z_.keys : 1;
    for (int i = threadIdx.x; i < kSide * kSide; i += kAttentionBlock) {
      const int64_t row = query + i / kSide, column = key + i % kSide;
      if (row < rows && column < columns)
        x_.store(sums[i / kSide][i % kSide], to, x_.extra.wide_bias, (plane * rows + row) * columns + column);
    }
  }

  // Adds the share of a tile of others, from `other` on, to rows [begin, end). h: of q; kv: of k.
  __device__ void step(int64_t b, int64_t h, int64_t kv, int64_t begin, int64_t end, int64_t other, int64_t dim) {
    const HeadRows<const T> q = x_.of_queries(x_.q, b, h, z_.dim), k = x_.of_keys(x_.k, b, kv, z_.dim),
                            v = x_.of_keys(x_.v, b, kv, z_.v_dim);
    const int64_t others = kOfKeys ? z_.queries : length_;
    mask_ = x_.extra.mask ? x_.extra.mask + x_.extra.of_mask.at(b, h) : nullptr;
    bias_ = x_.extra.bias ? x_.extra.of_bias.at(b, h) : 0;
    Sums s = {};
    if (x_.extra.dropout) find_kept(x_.extra.dropout.of(b * z_.heads + h), begin, other);
    multiply(s, kOfKeys ? k : q, begin, end, kOfKeys ? q : k, other, others, z_.dim);
    if constexpr (kResult == AttentionResult::y) {
      weigh(s, begin, other);
      __syncthreads();
      add(v, other, others, dim);
    } else {
      const HeadRows<const T> dy = x_.of_results(x_.dy, b, h);
      Sums dp = {};
      if constexpr (kOfScores) multiply(dp, kOfKeys ? v : dy, begin, end, kOfKeys ? dy : v, other, others, z_.v_dim);
      slopes(s, dp, b, h, begin, end, other);
      if constexpr (kResult == AttentionResult::dbias) return;
      __syncthreads();
      add(kResult == AttentionResult::dq ? k : kOfScores ? q : dy, other, others, dim);
    }
  }

  // Weights are, until these of a tile are written, 1 for what dropout keeps, and else 0: who reads them has passed a
  // barrier of multiply.
  __device__ void find_kept(const KeptKeys &kept, int64_t begin, int64_t other) {
    const int64_t query = kOfKeys ? other : begin, key = kOfKeys ? begin : other;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < kSide * kSide / 8; i += kAttentionBlock) {
      const int row = i / (kSide / 8), eight = i % (kSide / 8);
      const uint32_t bits = kept(static_cast<uint32_t>(query + row), static_cast<uint32_t>(key / 8 + eight));
#pragma unroll
      for (int j = 0; j < 8; ++j)
        (kOfKeys ? tiles_.weights[8 * eight + j][row] : tiles_.weights[row][8 * eight + j]) = bits >> j & 1;
    }
  }
  // Whether element (i, j) of this thread is kept.
  __device__ bool is_kept(int i, int j) const {
    return !x_.extra.dropout || tiles_.weights[ty() + 16 * i][tx() + 16 * j] != 0;
  }

  // sums += products of rows of a and of b
  __device__ void multiply(Sums &sums, HeadRows<const T> a, int64_t a_begin, int64_t a_end, HeadRows<const T> b,
                           int64_t b_begin, int64_t b_end, int64_t dim) {
    for (int64_t d = 0; d < dim; d += Tiles::kDepth) {
      __syncthreads();
      for (int i = threadIdx.x; i < kSide * Tiles::kDepth; i += kAttentionBlock) {
        const int row = i / Tiles::kDepth, column = i % Tiles::kDepth;
        const bool within = d + column < dim;
        tiles_.left[row][column] = within && a_begin + row < a_end ? widen(a[a_begin + row][d + column]) : A(0);
        tiles_.right[row][column] = within && b_begin + row < b_end ? widen(b[b_begin + row][d + column]) : A(0);
      }
      __syncthreads();
#pragma unroll 4
      for (int p = 0; p < Tiles::kDepth; ++p) {
        A left[kEach], right[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i)
          left[i] = tiles_.left[ty() + 16 * i][p], right[i] = tiles_.right[tx() + 16 * i][p];
#pragma unroll
        for (int i = 0; i < kEach; ++i)
#pragma unroll
          for (int j = 0; j < kEach; ++j) sums[i][j] += left[i] * right[j];
      }
    }
    __syncthreads();
  }

  // sum_ += weights times these columns of rows of `from`
  __device__ void add(HeadRows<const T> from, int64_t begin, int64_t end, int64_t dim) {
    auto &factor = tiles_.factor();
    for (int i = threadIdx.x; i < kSide * kSide; i += kAttentionBlock) {
      const int row = i / kSide, column = i % kSide;
      const bool present = begin + row < end && column_ + column < dim;
      factor[row][column] = present ? widen(from[begin + row][column_ + column]) : A(0);
    }
    __syncthreads();
#pragma unroll 4
    for (int p = 0; p < kSide; ++p) {
      A left[kEach], right[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) left[i] = tiles_.weights[ty() + 16 * i][p], right[i] = factor[p][tx() + 16 * i];
#pragma unroll
      for (int i = 0; i < kEach; ++i)
#pragma unroll
        for (int j = 0; j < kEach; ++j) sum_[i][j] += left[i] * right[j];
    }
  }

  // The score of a product; *slope: its derivative.
  __device__ A score(A product, A *slope) const {
    const A scale = static_cast<A>(z_.scale), cap = static_cast<A>(z_.softcap), s = product * scale;
    *slope = scale;
    if (cap == 0) return s;
    const A t = tanh(s / cap);
    *slope = scale - scale * t * t;
    return cap * t;
  }

  // Whether a query sees a key but for its range, and what is added to the score. row: of the tile; other: the query or
  // the key that is not this row.
  __device__ bool meets(int row, int64_t other, int64_t query, int64_t key, A *bias) const {
    const AttentionExtras &extra = x_.extra;
    *bias = 0;
    if (extra.none()) return true;
    if (query >= z_.queries) return false;
    if (extra.offsets && !(other >= tiles_.own[row].begin && other < tiles_.own[row].end)) return false;
    if (mask_ && !mask_[query * extra.of_mask.query + key * extra.of_mask.key]) return false;
    if (!extra.bias) return true;
    *bias = x_.number(extra.bias, extra.wide_bias, bias_ + query * extra.of_bias.query + key * extra.of_bias.key);
    return *bias != lowest();
  }

  // The weights of y: exponentials of scores below the largest of each row so far.
  __device__ void weigh(Sums &s, int64_t begin, int64_t other) {
    const bool plain = x_.extra.none();
    A products[kEach * kEach];
#pragma unroll
    for (int at = 0; at < kEach * kEach; ++at) products[at] = s[at / kEach][at % kEach];
#pragma unroll 1
    for (int at = 0; at < kEach * kEach; ++at) {
      const int64_t row = begin + ty() + 16 * (at / kEach), key = other + tx() + 16 * (at % kEach);
      const Range seen = z_.seen_by(row, row + 1, length_);
      A slope, bias;
      const bool sees = key >= seen.begin && key < seen.end && meets(ty() + 16 * (at / kEach), key, row, key, &bias);
      products[at] = sees ? score(products[at], &slope) + bias : lowest();
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int64_t row = begin + ty() + 16 * i;
      const Range seen = z_.seen_by(row, row + 1, length_);
      A most = lowest();
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        s[i][j] = products[i * kEach + j];
        most = s[i][j] > most || s[i][j] != s[i][j] ? s[i][j] : most;
      }
#pragma unroll
      for (int offset = 8; offset > 0; offset /= 2) {
        const A theirs = __shfl_xor_sync(~0u, most, offset);
        most = theirs > most || theirs != theirs ? theirs : most;
      }
      const A before = most_[i];
      most_[i] = most > before || most != most ? most : before;
      const A shrink = before == most_[i] ? A(1) : exponential<T>(before - most_[i]);
      A total = 0;
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int64_t key = other + tx() + 16 * j;
        const bool sees = key >= seen.begin && key < seen.end && (plain || s[i][j] != lowest());
        const A e = sees ? exponential<T>(s[i][j] - most_[i]) : A(0);
        total += e, sum_[i][j] *= shrink;
        tiles_.weights[ty() + 16 * i][tx() + 16 * j] = is_kept(i, j) ? e : A(0);
      }
      total_[i] = total_[i] * shrink + sum_lanes<16>(total);
    }
  }

  // The weights of a gradient: p, or ds; or adds dt to the sums.
  __device__ void slopes(const Sums &s, const Sums &dp, int64_t b, int64_t h, int64_t begin, int64_t end,
                         int64_t other) {
    A products[kEach * kEach], of_p[kEach * kEach];
#pragma unroll
    for (int at = 0; at < kEach * kEach; ++at)
      products[at] = s[at / kEach][at % kEach], of_p[at] = dp[at / kEach][at % kEach];
#pragma unroll 1
    for (int at = 0; at < kEach * kEach; ++at) {
      const int i = at / kEach, j = at % kEach;
      const int64_t row = begin + ty() + 16 * i, column = other + tx() + 16 * j;
      const int64_t query = kOfKeys ? column : row, key = kOfKeys ? row : column;
      const Range seen = z_.seen_by(query, query + 1, length_);
      A weight = 0;
      A slope, bias;
      if (query < z_.queries && key >= seen.begin && key < seen.end &&
          meets(ty() + 16 * i, column, query, key, &bias)) {
        const int64_t at_row = x_.row(b, h, query);
        weight = exponential<T>(score(products[at], &slope) + bias - x_.lse[at_row]);
        const bool kept = is_kept(i, j);
        if (kOfScores)
          weight *= ((kept ? of_p[at] * kept_ : A(0)) - x_.delta[at_row]) *
                    (kResult == AttentionResult::dbias ? A(1) : slope);
        else if (!kept) weight = 0;
      }
      products[at] = weight;
      if constexpr (kResult != AttentionResult::dbias) tiles_.weights[ty() + 16 * i][tx() + 16 * j] = weight;
    }
    if constexpr (kResult == AttentionResult::dbias) {
#pragma unroll
      for (int at = 0; at < kEach * kEach; ++at) sum_[at / kEach][at % kEach] += products[at];
    }
  }

  const AttentionInputs<T> &x_;
  const AttentionSizes &z_;
  Tiles &tiles_;
  int64_t length_, column_;
  const bool *mask_;  // of a head
  int64_t bias_;      // where that of a head begins
  A kept_;            // what dropout multiplies by what it keeps
  Sums sum_ = {};
  A most_[kEach], total_[kEach] = {};  // of scores of a row so far, and of their exponentials
};

// blockIdx.x: a tile of a head of an example; blockIdx.y: columns.
template <typename T, AttentionResult kResult>
__global__ void __launch_bounds__(kAttentionBlock) attention_kernel(AttentionInputs<T> x, T *to, Accumulate<T> *lse) {
  __shared__ AttentionTiles<Accumulate<T>> tiles;
  AttentionTile<T, kResult>(x, tiles).run(to, lse);
}

// blockIdx.x: a tile of a plane of the bias.
template <typename T>
__global__ void __launch_bounds__(kAttentionBlock) attention_dbias_kernel(AttentionInputs<T> x, void *to) {
  __shared__ AttentionTiles<Accumulate<T>> tiles;
  AttentionTile<T, AttentionResult::dbias>(x, tiles).run_bias(to);
}

// -------------------------------------------------------------------------------------------------- in float32

// attention_float.cu: the kernels of attention_float.cuh. Whether they take a call whose tensors are aligned, or
// those of attention_float_sm90.cu if the GPU has them (one_pass).
bool attention_float_takes(const AttentionInputs<float> &x, bool forward, bool one_pass);
Status attention_float(const char *op, const AttentionInputs<float> &x, float *y, float *lse, void *stream);
Status attention_float_backward(const char *op, const AttentionInputs<float> &x, float *dq, float *dk, float *dv,
                                void *stream);

// -------------------------------------------------------------------------------------------------------- on Hopper

// attention_float_sm90.cu: y up to a head_dim of 128, and the gradients in one pass, which writes delta, and has turns
// in `space` (AttentionBackward::pass_space).
Status attention_float_sm90(const char *op, const AttentionInputs<float> &x, float *y, float *lse, void *stream);
Status attention_float_backward_sm90(const char *op, const AttentionInputs<float> &x, const float *y, float *delta,
                                     float *dq, float *dk, float *dv, float *space, void *stream);

// attention_sm90.cu: the kernels of attention_wgmma.cuh, for __half and __nv_bfloat16. *takes: whether they take a call
// whose tensors are aligned.
template <typename T>
Status attention_sm90_takes(const char *op, const AttentionInputs<T> &x, bool forward, bool *takes);
template <typename T>
Status attention_sm90(const char *op, const AttentionInputs<T> &x, T *y, float *lse, void *stream);
// delta: computed from y beside dq if that is wanted; else x has it.
template <typename T>
Status attention_backward_sm90(const char *op, const AttentionInputs<T> &x, const T *y, float *delta, T *dq, T *dk,
                               T *dv, float *space, void *stream);
// attention_wide_sm90.cu: the same at head sizes above 128.
template <typename T>
Status attention_backward_wide_sm90(const char *op, const AttentionInputs<T> &x, const T *y, float *delta, T *dq, T *dk,
                                    T *dv, void *stream);

}  // namespace AOT_ISA
}  // namespace aot
