// attention in 16 bits on tensor cores, by mma.sync, from compute capability 8.0 on.
//
// A block has rows of a result, 16 kM for each warp, with their operands in shared memory; it goes through tiles of
// others, which pass through two stages. Scores of rows and others are products of rows. The weights that follow from
// them stay in registers, where they are the left factor of the next product: of y, p v; of dq, ds k; and, where rows
// are keys, of dv, p^T dy, and of dk, ds^T q. So nothing is summed by two blocks, and the order of sums is fixed; dq
// computes the scores once more for it. Exponentials are powers of 2.
//
// kExtra: the call may have what AttentionExtras has. Such kernels are instances of their own, of fewer rows, since
// what is added to a score takes registers.
#pragma once
#include "attention.cuh"
#include "cuda/mma.cuh"

namespace aot {
inline namespace AOT_ISA {

// kDim: head_dim, padded with zeros; a block has 16 kM kWarps rows; kBlocks: blocks for which a multiprocessor must
// have registers; kUnroll: steps of a product of rows that are unrolled.
template <int kDim_, int kM_, int kWarps_, int kOthers_, int kBlocks_, int kUnroll_>
struct MmaShape {
  static constexpr int kDim = kDim_, kM = kM_, kWarps = kWarps_, kOthers = kOthers_;
  static constexpr int kBlocks = kBlocks_, kUnroll = kUnroll_;
  static constexpr int kWarpRows = 16 * kM, kRows = kWarpRows * kWarps, kThreads = 32 * kWarps;
  static constexpr int kRowBytes = 2 * kDim, kTile = kRows * kRowBytes, kOtherTile = kOthers * kRowBytes;  // bytes
  static constexpr int kNumbers = 4 * 4 * kOthers;  // bytes of lse and delta of both stages

  // Bytes of shared memory with so many tiles of rows, and two stages of two tiles of others; and with the ranges of
  // rows that kernels with kExtra have.
  AOT_BOTH_SIDES static constexpr int shared(int tiles, bool numbers, bool extra = false) {
    return tiles * kTile + 4 * kOtherTile + (numbers ? kNumbers : 0) + (extra ? kRows * 8 : 0);
  }
};

constexpr int kMmaShared = 99 << 10;  // bytes that a block may have on every GPU from compute capability 8.0 on

template <int kDim>
struct MmaShapes;
template <>
struct MmaShapes<64> {
  using Y = MmaShape<64, 2, 4, 64, 2, 4>;
  using Dq = MmaShape<64, 2, 4, 32, 2, 2>;
  using Dkv = MmaShape<64, 2, 4, 32, 2, 2>;
};
template <>
struct MmaShapes<96> {
  using Y = MmaShape<96, 2, 4, 32, 2, 2>;
  using Dq = MmaShape<96, 2, 4, 32, 2, 2>;
  using Dkv = MmaShape<96, 1, 8, 32, 1, 2>;
};
template <>
struct MmaShapes<128> {
  using Y = MmaShape<128, 2, 4, 64, 2, 1>;
  using Dq = MmaShape<128, 2, 4, 32, 2, 1>;
  using Dkv = MmaShape<128, 1, 8, 32, 1, 2>;
};
template <>
struct MmaShapes<256> {
  using Y = MmaShape<256, 1, 4, 32, 2, 2>;
  using Dq = MmaShape<256, 1, 4, 16, 2, 2>;
  using Dkv = MmaShape<256, 1, 4, 16, 2, 2>;
};

template <int kDim>
struct MmaExtraShapes;
template <>
struct MmaExtraShapes<64> {
  using Y = MmaShape<64, 1, 4, 64, 3, 2>;
  using Dq = MmaShape<64, 1, 4, 32, 3, 2>;
  using Dkv = MmaShape<64, 1, 4, 32, 3, 2>;
  using Dbias = MmaShape<64, 1, 4, 64, 2, 2>;
};
template <>
struct MmaExtraShapes<128> {
  using Y = MmaShape<128, 1, 4, 64, 2, 1>;
  using Dq = MmaShape<128, 1, 4, 32, 2, 1>;
  using Dkv = MmaShape<128, 1, 4, 16, 2, 2>;
  using Dbias = MmaShape<128, 1, 4, 64, 2, 1>;
};

// -------------------------------------------------------------------------------------------------- shared memory

// Rows of a tile have pieces of 16 bytes. Those at one place of 8 adjacent rows are in different banks. A tile begins
// at a multiple of 1024.
template <int kDim>
__device__ inline uint32_t piece_address(uint32_t tile, int row, int piece) {
  const int mixed = kDim % 64 == 0 ? piece ^ row % 8 : piece ^ row / 2 % 4;
  return tile + (row * kDim + mixed * 8) * 2;
}

// Starts to copy rows [begin, begin + kCount) of a head, of `dim` elements; zeros from row `end` on.
template <class Shape, int kCount, typename T>
__device__ inline void copy_rows(uint32_t tile, HeadRows<const T> from, int64_t begin, int64_t end, int dim) {
  constexpr int kDim = Shape::kDim, kPieces = kDim / 8, kAlong = kPieces % 8 == 0 ? kPieces : 4;
  constexpr int kStep = Shape::kThreads / kAlong;  // rows at once
  const int row = threadIdx.x / kAlong, along = threadIdx.x % kAlong;
  const int left = end - begin < kCount ? static_cast<int>(end - begin) : kCount;
  const T *at = from[begin + row] + along * 8;
#pragma unroll
  for (int i = 0; i < kCount; i += kStep, at += kStep * from.stride) {
    if (kCount % kStep && i + row >= kCount) continue;
#pragma unroll
    for (int j = 0; j < kPieces; j += kAlong) {
      const bool present = i + row < left && (along + j) * 8 < dim;
      copy_async(piece_address<kDim>(tile, i + row, along + j), present ? at + j * 8 : from.data, present);
    }
  }
}

// The addresses of a lane for ldmatrix, from the first row of a tile: piece 2 k + `piece` of a row of 16.
template <int kDim>
class LaneRows {
 public:
  __device__ LaneRows(uint32_t tile, int row, int piece)
      : even_(piece_address<kDim>(tile, row, piece)), odd_(piece_address<kDim>(tile, row, 2 + piece)) {}

  __device__ uint32_t operator()(int k) const {
    return kDim % 64 == 0 ? even_ ^ 32 * k : (k % 2 ? odd_ : even_) + k / 2 * 64;
  }

 private:
  uint32_t even_, odd_;
};

// ------------------------------------------------------------------------------------------------------- products

// A part of a result that a warp has: (16 kM, kN).
template <int kM, int kN>
using MmaSums = float[kM][kN / 8][4];
// Such a part rounded, as a left factor.
template <int kM, int kN>
using MmaFactor = uint32_t[kM][kN / 16][4];

// sums += the products of this warp's rows of a, from `row` on, a multiple of 16, and rows of b.
template <int kDim, int kM, int kN, int kUnroll, typename T>
__device__ inline void multiply_rows(MmaSums<kM, kN> &sums, uint32_t a, int row, uint32_t b, T zero) {
  const int lane = lane_index(), eighth = lane % 8, low = lane / 8 % 2, high = lane / 16;
  const LaneRows<kDim> of_a(a + row * kDim * 2, 8 * low + eighth, high), of_b(b, 8 * high + eighth, low);
#pragma unroll kUnroll
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t left[kM][4];
#pragma unroll
    for (int i = 0; i < kM; ++i) load_matrices(left[i], of_a(k) + i * 16 * kDim * 2);
#pragma unroll
    for (int n = 0; n < kN / 16; ++n) {
      uint32_t right[4];
      load_matrices(right, of_b(k) + n * 16 * kDim * 2);
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        multiply_add(sums[i][2 * n], left[i], right[0], right[1], zero);
        multiply_add(sums[i][2 * n + 1], left[i], right[2], right[3], zero);
      }
    }
  }
}

// sums += weights b, for as many rows of b as there are columns of weights.
template <int kDim, int kM, int kN, typename T>
__device__ inline void multiply_weights(MmaSums<kM, kDim> &sums, const MmaFactor<kM, kN> &weights, uint32_t b, T zero) {
  const int lane = lane_index(), eighth = lane % 8, low = lane / 8 % 2, high = lane / 16;
  const LaneRows<kDim> of_b(b, 8 * low + eighth, high);
#pragma unroll
  for (int k = 0; k < kN / 16; ++k)
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      uint32_t right[4];
      load_transposed_matrices(right, of_b(d) + k * 16 * kDim * 2);
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        multiply_add(sums[i][2 * d], weights[i][k], right[0], right[1], zero);
        multiply_add(sums[i][2 * d + 1], weights[i][k], right[2], right[3], zero);
      }
    }
}

template <int kM, int kN, typename T>
__device__ inline void round_weights(MmaFactor<kM, kN> &to, const MmaSums<kM, kN> &from, T zero) {
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int n = 0; n < kN / 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        to[i][n / 2][n % 2 * 2 + half] = narrow_word(from[i][n][2 * half], from[i][n][2 * half + 1], zero);
}

// Stores columns below dim of the rows that exist, times a number.
template <int kM, int kDim, typename T, class Times>
__device__ inline void store_sums(const MmaSums<kM, kDim> &sums, HeadRows<T> to, int64_t begin, int64_t end, int dim,
                                  Times times) {
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = begin + 16 * i + 8 * half + lane_index() / 4;
      const float factor = times(i, half);
      if (row >= end) continue;
      T *const at = to[row] + lane_index() % 4 * 2;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
        if (8 * n < dim)
          *reinterpret_cast<uint32_t *>(at + 8 * n) =
              narrow_word(sums[i][n][2 * half] * factor, sums[i][n][2 * half + 1] * factor, T());
    }
}

// --------------------------------------------------------------------------------------------------------- scores

// A range of a row's others as numbers from `from` on, of which there are n.
__device__ inline int2 within(Range range, int64_t from, int n) {
  const int64_t begin = range.begin - from, end = range.end - from;
  return {static_cast<int>(begin < 0 ? 0 : begin < n ? begin : n), static_cast<int>(end < 0 ? 0 : end < n ? end : n)};
}

// Scores in units of log(2).
struct MmaScores {
  float scale, cap, inner;  // inner: of the tangent's argument, 0 without a cap

  __device__ explicit MmaScores(const AttentionSizes &z)
      : scale(static_cast<float>(z.scale * kLog2E)),
        cap(static_cast<float>(z.softcap * kLog2E)),
        inner(z.softcap == 0 ? 0.0f : static_cast<float>(z.scale / z.softcap)) {}

  __device__ static float tangent(float x) {
    return 1 - 2 * fast_reciprocal(1 + fast_exp2(x * static_cast<float>(2 * kLog2E)));
  }
  // *slope: the derivative over scale.
  __device__ float operator()(float product, float *slope) const {
    *slope = 1;
    if (inner == 0) return product * scale;
    const float t = tangent(product * inner);
    return *slope = 1 - t * t, cap * t;
  }
};

constexpr float kInfinity = __builtin_huge_valf();

// What is added to the scores of a head, in units of log(2): -inf for a key that the mask hides.
template <typename T>
class MmaAddends {
 public:
  __device__ MmaAddends(const AttentionInputs<T> &x, int64_t b, int64_t h)
      : x_(x),
        mask_(x.extra.mask ? x.extra.mask + x.extra.of_mask.at(b, h) : nullptr),
        bias_(x.extra.bias ? x.extra.of_bias.at(b, h) : 0) {}

  __device__ float operator()(int64_t query, int64_t key) const {
    const AttentionExtras &extra = x_.extra;
    if (mask_ && !mask_[query * extra.of_mask.query + key * extra.of_mask.key]) return -kInfinity;
    if (!extra.bias) return 0;
    const int64_t at = bias_ + query * extra.of_bias.query + key * extra.of_bias.key;
    return x_.number(extra.bias, extra.wide_bias, at) * static_cast<float>(kLog2E);
  }

 private:
  const AttentionInputs<T> &x_;
  const bool *mask_;
  int64_t bias_;
};

// Writes the range of others of each row from `begin` on: that of its sequence, as numbers of 32 bits.
template <class Shape, typename T>
__device__ inline void find_sequences(int2 *to, const AttentionInputs<T> &x, int64_t begin, bool of_keys = false) {
  for (int i = threadIdx.x; i < Shape::kRows; i += Shape::kThreads) {
    const Range own = x.extra.offsets ? x.extra.sequence(begin + i, of_keys) : Range{0, INT32_MAX};
    to[i] = {static_cast<int>(own.begin), static_cast<int>(own.end)};
  }
}
// The part of a range of others from `from` on, of which there are n, that is in a sequence.
__device__ inline int2 within_sequence(int2 range, int2 own, int64_t from) {
  const int64_t begin = own.x - from, end = own.y - from;
  return {begin > range.x ? static_cast<int>(begin) : range.x, end < range.y ? static_cast<int>(end) : range.y};
}

// -------------------------------------------------------------------------------------------------------- queries

// A tile of queries of a head of an example, and the tiles of keys that it goes through. Of a head's tiles the last
// ones, which see most if the call is causal, are first.
template <typename T, class Shape, bool kExtra = false>
struct QueryTile {
  static constexpr int kKeys = Shape::kOthers;
  const AttentionInputs<T> &x;
  int64_t b, h;
  int begin, end, length, first, steps, whole_begin, whole_end;  // keys from whole_begin to whole_end: all see those
  float times;
  HeadRows<const T> k, v;

  __device__ explicit QueryTile(const AttentionInputs<T> &inputs) : x(inputs) {
    const AttentionSizes &z = x.z;
    const int queries = static_cast<int>(z.queries), tiles = (queries - 1) / Shape::kRows + 1;
    const int head = static_cast<int>(blockIdx.x) / tiles;
    b = head / z.heads, h = head % z.heads;
    begin = (tiles - 1 - static_cast<int>(blockIdx.x) % tiles) * Shape::kRows;
    end = queries - begin < Shape::kRows ? queries : begin + Shape::kRows;
    const auto found = kExtra ? x.block_length(b) : x.length(b);
    length = static_cast<int>(found.value), times = found.times;
    const Range seen = seen_by(begin, end);
    const bool any = seen.end > seen.begin;
    first = any ? static_cast<int>(seen.begin) / kKeys * kKeys : 0;
    steps = any ? (static_cast<int>(seen.end) - first - 1) / kKeys + 1 : 0;
    whole_begin = clamped(seen_by(end - 1, end).begin), whole_end = clamped(seen_by(begin, begin + 1).end);
    k = x.of_keys(x.k, b, h / z.group(), z.dim), v = x.of_keys(x.v, b, h / z.group(), z.v_dim);
  }

  __device__ Range seen_by(int64_t first, int64_t last) const {
    const Range seen = x.z.seen_by(first, last, length);
    if constexpr (kExtra) return x.extra.own(seen, first, last);
    return seen;
  }
  // What is between 0 and length is as it is.
  __device__ int clamped(int64_t key) const { return key < 0 ? 0 : key > length ? length : static_cast<int>(key); }

  __device__ int key(int step) const { return first + step * kKeys; }
  __device__ bool whole(int step) const { return key(step) >= whole_begin && key(step) + kKeys <= whole_end; }
  // The keys of a step that a query sees, of kKeys.
  __device__ int2 seen(int query, int step) const {
    return within(x.z.seen_by(query, query + 1, length), key(step), kKeys);
  }
  // The row 16 i + 8 half of this lane, and the number of the query that it is.
  __device__ static int local(int i, int half) {
    return warp_index() * Shape::kWarpRows + 16 * i + 8 * half + lane_index() / 4;
  }
  __device__ int query(int i, int half) const {
    return begin + warp_index() * Shape::kWarpRows + 16 * i + 8 * half + lane_index() / 4;
  }
  __device__ int64_t row(int query) const { return x.row(b, h, query); }

  __device__ void copy(uint32_t tile, const T *from, int64_t dim) const {
    copy_rows<Shape, Shape::kRows>(tile, x.of_queries(from, b, h, dim), begin, end, static_cast<int>(dim));
  }
  // k and v of a step.
  __device__ void fetch(uint32_t stage, int step) const {
    copy_rows<Shape, kKeys>(stage, k, key(step), length, static_cast<int>(x.z.dim));
    copy_rows<Shape, kKeys>(stage + Shape::kOtherTile, v, key(step), length, static_cast<int>(x.z.v_dim));
  }
};

// ---------------------------------------------------------------------------------------------------------------- y

template <typename T, class Shape, bool kExtra>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    attention_y_kernel(AttentionInputs<T> x, T *y, float *lse) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  constexpr int kDim = Shape::kDim, kM = Shape::kM, kKeys = Shape::kOthers;
  extern __shared__ __align__(1024) uint4 attention_shared[];
  const uint32_t q_tile = shared_address(attention_shared), stages = q_tile + Shape::kTile;
  const auto stage = [=](int step) { return stages + step % 2 * (2 * Shape::kOtherTile); };
  const QueryTile<T, Shape, kExtra> tile(x);
  tile.copy(q_tile, x.q, x.z.dim);
  if (tile.steps) tile.fetch(stage(0), 0);
  commit_copies();
  int2 *const own = reinterpret_cast<int2 *>(reinterpret_cast<char *>(attention_shared) + Shape::shared(1, false));
  if constexpr (kExtra) find_sequences<Shape>(own, x, tile.begin);

  const MmaScores scores(x.z);
  const bool fused =
      !kExtra && scores.inner == 0 && scores.scale > 0;  // the largest product is then the largest score's
  const float scale = fused ? scores.scale : 1;
  const int warp_row = warp_index() * Shape::kWarpRows;
  MmaSums<kM, kDim> sums = {};
  float slope, most[kM][2], total[kM][2] = {};
#pragma unroll
  for (auto &pair : most) pair[0] = pair[1] = -kInfinity;
  if (kExtra && x.extra.sinks) {
    const float sink = x.sink(tile.h) * static_cast<float>(kLog2E);
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        most[i][half] = sink, total[i][half] = lane_index() % 4 == 0 && sink != -kInfinity ? 1 : 0;
  }
#pragma unroll 1
  for (int step = 0; step < tile.steps; ++step) {
    wait_copies<0>();
    __syncthreads();
    if (step + 1 < tile.steps) tile.fetch(stage(step + 1), step + 1);
    commit_copies();
    MmaSums<kM, kKeys> s = {};
    multiply_rows<kDim, kM, kKeys, Shape::kUnroll>(s, q_tile, warp_row, stage(step), T());
    if (!fused) {
#pragma unroll
      for (auto &row : s)
#pragma unroll
        for (auto &four : row)
#pragma unroll
          for (float &score : four) score = scores(score, &slope);
    }
    if (kExtra || !tile.whole(step)) {
      const MmaAddends<T> addends(x, tile.b, tile.h);
#pragma unroll
      for (int i = 0; i < kM; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int2 range = tile.seen(tile.query(i, half), step);
          if (kExtra) range = within_sequence(range, own[tile.local(i, half)], tile.key(step));
#pragma unroll
          for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int column = 8 * n + lane_index() % 4 * 2 + e;
              float &score = s[i][n][2 * half + e];
              if (column < range.x || column >= range.y) {
                score = -kInfinity;
              } else if (kExtra && tile.query(i, half) < tile.end) {
                const float more = addends(tile.query(i, half), tile.key(step) + column);
                score = more == -kInfinity ? more : score + more;  // whatever the score of a hidden key is
              }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float block = -kInfinity, sum = 0;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) block = fmaxf(block, fmaxf(s[i][n][2 * half], s[i][n][2 * half + 1]));
        block = fmaxf(block, __shfl_xor_sync(~0u, block, 1));
        block = fmaxf(block, __shfl_xor_sync(~0u, block, 2));
        const float before = most[i][half], now = fmaxf(before, scale * block), base = now == -kInfinity ? 0 : now;
        const float shrink = fast_exp2(before - base);
        most[i][half] = now;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) sum += s[i][n][2 * half + e] = fast_exp2(s[i][n][2 * half + e] * scale - base);
        total[i][half] = total[i][half] * shrink + sum;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) sums[i][n][2 * half] *= shrink, sums[i][n][2 * half + 1] *= shrink;
      }
    MmaFactor<kM, kKeys> p;
    round_weights<kM, kKeys>(p, s, T());
    multiply_weights<kDim, kM, kKeys>(sums, p, stage(step) + Shape::kOtherTile, T());
  }

#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      total[i][half] = sum_lanes<4>(total[i][half]);
      const int query = tile.query(i, half);
      if (lse && query < tile.end && lane_index() % 4 == 0)
        lse[tile.row(query)] = (most[i][half] + log2f(total[i][half])) * static_cast<float>(1 / kLog2E);
    }
  if (y)
    store_sums<kM, kDim>(
        sums, x.of_queries(y, tile.b, tile.h, x.z.v_dim), tile.begin + warp_row, tile.end, static_cast<int>(x.z.v_dim),
        [&](int i, int half) { return total[i][half] == 0 ? 0 * tile.times : tile.times / total[i][half]; });
#endif
}

// --------------------------------------------------------------------------------------------------------------- dq

template <typename T, class Shape, bool kExtra>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks) attention_dq_kernel(AttentionInputs<T> x, T *dq) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  constexpr int kDim = Shape::kDim, kM = Shape::kM, kKeys = Shape::kOthers;
  extern __shared__ __align__(1024) uint4 attention_shared[];
  const uint32_t q_tile = shared_address(attention_shared), dy_tile = q_tile + Shape::kTile;
  const uint32_t stages = dy_tile + Shape::kTile;
  const auto stage = [=](int step) { return stages + step % 2 * (2 * Shape::kOtherTile); };
  const QueryTile<T, Shape, kExtra> tile(x);
  tile.copy(q_tile, x.q, x.z.dim), tile.copy(dy_tile, x.dy, x.z.v_dim);
  if (tile.steps) tile.fetch(stage(0), 0);
  commit_copies();
  int2 *const own = reinterpret_cast<int2 *>(reinterpret_cast<char *>(attention_shared) + Shape::shared(2, false));
  if constexpr (kExtra) find_sequences<Shape>(own, x, tile.begin);
  const MmaAddends<T> addends(x, tile.b, tile.h);

  const MmaScores scores(x.z);
  const int warp_row = warp_index() * Shape::kWarpRows;
  MmaSums<kM, kDim> sums = {};
  float lse[kM][2], delta[kM][2];
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = tile.query(i, half);
      const bool present = query < tile.end;
      lse[i][half] = present ? x.lse[tile.row(query)] * static_cast<float>(kLog2E) : kInfinity;
      delta[i][half] = present ? x.delta[tile.row(query)] : 0;
      if (kExtra && lse[i][half] == -kInfinity) lse[i][half] = kInfinity;
    }
#pragma unroll 1
  for (int step = 0; step < tile.steps; ++step) {
    wait_copies<0>();
    __syncthreads();
    if (step + 1 < tile.steps) tile.fetch(stage(step + 1), step + 1);
    commit_copies();
    MmaSums<kM, kKeys> s = {}, dp = {};
    multiply_rows<kDim, kM, kKeys, Shape::kUnroll>(s, q_tile, warp_row, stage(step), T());
    multiply_rows<kDim, kM, kKeys, Shape::kUnroll>(dp, dy_tile, warp_row, stage(step) + Shape::kOtherTile, T());
    const bool whole = tile.whole(step);
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int2 range = {0, kKeys};
        if (kExtra || !whole) range = tile.seen(tile.query(i, half), step);
        if (kExtra) range = within_sequence(range, own[tile.local(i, half)], tile.key(step));
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int column = 8 * n + lane_index() % 4 * 2 + e;
            float slope, &score = s[i][n][2 * half + e];
            if constexpr (kExtra) {
              const bool present = column >= range.x && column < range.y && tile.query(i, half) < tile.end;
              const float more = present ? addends(tile.query(i, half), tile.key(step) + column) : -kInfinity;
              const float p = fast_exp2(scores(score, &slope) + more - lse[i][half]);
              score = more == -kInfinity ? 0 : p * (dp[i][n][2 * half + e] - delta[i][half]) * slope;
            } else {
              const float p = fast_exp2(scores(score, &slope) - lse[i][half]);
              score = column < range.x || column >= range.y ? 0 : p * (dp[i][n][2 * half + e] - delta[i][half]) * slope;
            }
          }
      }
    MmaFactor<kM, kKeys> ds;
    round_weights<kM, kKeys>(ds, s, T());
    multiply_weights<kDim, kM, kKeys>(sums, ds, stage(step), T());
  }
  const float times = static_cast<float>(x.z.scale) * tile.times;
  store_sums<kM, kDim>(sums, x.of_queries(dq, tile.b, tile.h, x.z.dim), tile.begin + warp_row, tile.end,
                       static_cast<int>(x.z.dim), [=](int, int) { return times; });
#endif
}

// ------------------------------------------------------------------------------------------------------- dk and dv

// Where a block of keys is among the heads that share its own, and the tiles of their queries.
struct MmaStep {
  int head = 0, tile = 0, parity = 0;

  __device__ MmaStep next(int tiles) const {
    return tile + 1 == tiles ? MmaStep{head + 1, 0, 1 - parity} : MmaStep{head, tile + 1, 1 - parity};
  }
};

// dk, dv: null if not wanted. One of them alone needs half as many registers: kDk and kDv.
template <typename T, class Shape, bool kDk, bool kDv, bool kExtra>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    attention_dkv_kernel(AttentionInputs<T> x, T *dk, T *dv) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  constexpr int kDim = Shape::kDim, kM = Shape::kM, kQueries = Shape::kOthers;
  extern __shared__ __align__(1024) uint4 attention_shared[];
  const AttentionSizes &z = x.z;
  const int64_t tiles = ceil_div(z.keys, Shape::kRows), head = blockIdx.x / tiles, b = head / z.kv_heads;
  const int64_t kv = head % z.kv_heads, begin = blockIdx.x % tiles * Shape::kRows;
  const int64_t end = begin + Shape::kRows < z.keys ? begin + Shape::kRows : z.keys;
  const auto length = kExtra ? x.block_length(b) : x.length(b);
  const int64_t last = end < length.value ? end : length.value;
  const int dim = static_cast<int>(z.dim), v_dim = static_cast<int>(z.v_dim);

  Range seeing = z.seeing(begin, last);
  if constexpr (kExtra) seeing = begin < last ? x.extra.own(seeing, begin, last, true) : Range{0, 0};
  const int64_t first = seeing.begin / kQueries * kQueries;
  const bool any = begin < last && first < seeing.end;
  const int of_head = any ? static_cast<int>(ceil_div(seeing.end - first, kQueries)) : 0;
  const uint32_t k_tile = shared_address(attention_shared), v_tile = k_tile + Shape::kTile;
  const uint32_t stages = v_tile + Shape::kTile;
  const auto stage = [=](int parity) { return stages + parity * (2 * Shape::kOtherTile); };
  float (*const numbers)[2][kQueries] =
      reinterpret_cast<float (*)[2][kQueries]>(reinterpret_cast<char *>(attention_shared) + Shape::shared(2, false));
  const auto fetch = [&](MmaStep next) {
    const int64_t h = kv * z.group() + next.head, query = first + int64_t{next.tile} * kQueries;
    copy_rows<Shape, kQueries>(stage(next.parity), x.of_queries(x.q, b, h, z.dim), query, z.queries, dim);
    copy_rows<Shape, kQueries>(stage(next.parity) + Shape::kOtherTile, x.of_queries(x.dy, b, h, z.v_dim), query,
                               z.queries, v_dim);
    if (threadIdx.x < kQueries) {
      const int64_t i = query + threadIdx.x, at = x.row(b, h, i);
      numbers[next.parity][0][threadIdx.x] = i < z.queries ? x.lse[at] * static_cast<float>(kLog2E) : kInfinity;
      numbers[next.parity][1][threadIdx.x] = i < z.queries ? x.delta[at] : 0;
      if (kExtra && numbers[next.parity][0][threadIdx.x] == -kInfinity)
        numbers[next.parity][0][threadIdx.x] = kInfinity;
    }
  };
  int2 *const own = reinterpret_cast<int2 *>(reinterpret_cast<char *>(attention_shared) + Shape::shared(2, true));
  if constexpr (kExtra) find_sequences<Shape>(own, x, begin, true);
  copy_rows<Shape, Shape::kRows>(k_tile, x.of_keys(x.k, b, kv, z.dim), begin, last, dim);
  copy_rows<Shape, Shape::kRows>(v_tile, x.of_keys(x.v, b, kv, z.v_dim), begin, last, v_dim);
  MmaStep step;
  if (of_head) fetch(step);
  commit_copies();

  const MmaScores scores(z);
  const int warp_row = warp_index() * Shape::kWarpRows;
  MmaSums<kM, kDim> dk_sums = {}, dv_sums = {};
#pragma unroll 1
  for (; of_head && step.head < z.group(); step = step.next(of_head)) {
    wait_copies<0>();
    __syncthreads();
    if (const MmaStep next = step.next(of_head); next.head < z.group()) fetch(next);
    commit_copies();
    const uint32_t q_tile = stage(step.parity), dy_tile = q_tile + Shape::kOtherTile;
    const float *const lse = numbers[step.parity][0], *const delta = numbers[step.parity][1];
    const int64_t query = first + int64_t{step.tile} * kQueries;
    const Range by_last = z.seeing(end - 1, end), by_first = z.seeing(begin, begin + 1);
    const MmaAddends<T> addends(x, b, kv * z.group() + step.head);
    const bool whole = last == begin + Shape::kRows && query >= by_last.begin && query + kQueries <= by_first.end;
    MmaSums<kM, kQueries> s = {}, dp = {};
    multiply_rows<kDim, kM, kQueries, Shape::kUnroll>(s, k_tile, warp_row, q_tile, T());
    if constexpr (kDk) multiply_rows<kDim, kM, kQueries, Shape::kUnroll>(dp, v_tile, warp_row, dy_tile, T());
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int2 range = {0, kQueries};
        const int64_t key = begin + warp_row + 16 * i + 8 * half + lane_index() / 4;
        if (kExtra || !whole) {
          range = within(z.seeing(key, key + 1), query, kQueries);
          if (kExtra) range = within_sequence(range, own[key - begin], query);
          if (key >= last) range = {kQueries, kQueries};
        }
#pragma unroll
        for (int n = 0; n < kQueries / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int column = 8 * n + lane_index() % 4 * 2 + e;
            float slope, &score = s[i][n][2 * half + e], &of_p = dp[i][n][2 * half + e];
            if constexpr (kExtra) {
              const bool present = column >= range.x && column < range.y;
              const float more = present ? addends(query + column, key) : -kInfinity;
              const float p = fast_exp2(scores(score, &slope) + more - lse[column]);
              score = more == -kInfinity ? 0 : p;
            } else {
              const float p = fast_exp2(scores(score, &slope) - lse[column]);
              score = column < range.x || column >= range.y ? 0 : p;
            }
            if constexpr (kDk) of_p = score == 0 ? 0 : score * (of_p - delta[column]) * slope;
          }
      }
    MmaFactor<kM, kQueries> weights;
    if constexpr (kDv) {
      round_weights<kM, kQueries>(weights, s, T());
      multiply_weights<kDim, kM, kQueries>(dv_sums, weights, dy_tile, T());
    }
    if constexpr (kDk) {
      round_weights<kM, kQueries>(weights, dp, T());
      multiply_weights<kDim, kM, kQueries>(dk_sums, weights, q_tile, T());
    }
  }
  const int64_t row = begin + warp_row;
  const float times = length.times, scale = static_cast<float>(z.scale) * times;
  if (kDk && dk)
    store_sums<kM, kDim>(dk_sums, x.of_keys(dk, b, kv, z.dim), row, end, dim, [=](int, int) { return scale; });
  if (kDv && dv)
    store_sums<kM, kDim>(dv_sums, x.of_keys(dv, b, kv, z.v_dim), row, end, v_dim, [=](int, int) { return times; });
#endif
}

// ------------------------------------------------------------------------------------------------------------ dbias

// A tile of a plane of a bias: what its members add to dbias, queries and keys along which it is broadcast included.
template <typename T, class Shape>
class BiasTile {
 public:
  static constexpr int kDim = Shape::kDim, kRows = Shape::kRows, kKeys = Shape::kOthers;
  using Sums = MmaSums<1, kKeys>;
  static constexpr int kTiles = 2 * Shape::kTile + 2 * Shape::kOtherTile, kShared = kTiles + kRows * 8;
  static_assert(Shape::kM == 1 && kRows * (kKeys + 1) * 4 <= kTiles);

  __device__ BiasTile(const AttentionInputs<T> &x, uint4 *shared)
      : x_(x),
        z_(x.z),
        steps_(x.extra.of_bias),
        shared_(reinterpret_cast<char *>(shared)),
        own_(reinterpret_cast<int2 *>(shared_ + kTiles)) {
    const int64_t rows = steps_.query ? ceil_div(z_.queries, kRows) : 1,
                  columns = steps_.key ? ceil_div(z_.keys, kKeys) : 1;
    plane_ = blockIdx.x / columns / rows;
    query_ = blockIdx.x / columns % rows * kRows, key_ = blockIdx.x % columns * kKeys;
  }

  __device__ void run(void *to) {
    for (int64_t member = 0; member < steps_.members; ++member) {
      const int64_t head = steps_.sharer(plane_, member, z_.heads);
      b_ = head / z_.heads, h_ = head % z_.heads;
      const auto length = x_.block_length(b_);
      length_ = length.value, times_ *= length.times;
      const int64_t last = steps_.query && query_ + kRows < z_.queries ? query_ + kRows : z_.queries;
      for (int64_t query = query_; query < last; query += kRows) add_queries(query);
    }
    store(static_cast<float *>(static_cast<void *>(shared_)), to);
  }

 private:
  __device__ static int local(int half) { return warp_index() * 16 + 8 * half + lane_index() / 4; }
  __device__ static int column(int n, int e) { return 8 * n + lane_index() % 4 * 2 + e; }

  __device__ void add_queries(int64_t query) {
    const int64_t past = query + kRows < z_.queries ? query + kRows : z_.queries;
    const Range seen = x_.extra.own(z_.seen_by(query, past, length_), query, past);
    const int64_t end = steps_.key && key_ + kKeys < seen.end ? key_ + kKeys : seen.end;
    __syncthreads();
    find_sequences<Shape>(own_, x_, query);
    for (int64_t key = steps_.key ? key_ : seen.begin / kKeys * kKeys; key < end; key += kKeys) add(query, past, key);
  }

  __device__ void add(int64_t query, int64_t past, int64_t key) {
    const uint32_t q = shared_address(shared_), dy = q + Shape::kTile, k = dy + Shape::kTile, v = k + Shape::kOtherTile;
    const int dim = static_cast<int>(z_.dim), v_dim = static_cast<int>(z_.v_dim);
    const int64_t kv = h_ / z_.group();
    __syncthreads();
    copy_rows<Shape, kRows>(q, x_.of_queries(x_.q, b_, h_, dim), query, past, dim);
    copy_rows<Shape, kRows>(dy, x_.of_queries(x_.dy, b_, h_, v_dim), query, past, v_dim);
    copy_rows<Shape, kKeys>(k, x_.of_keys(x_.k, b_, kv, dim), key, length_, dim);
    copy_rows<Shape, kKeys>(v, x_.of_keys(x_.v, b_, kv, v_dim), key, length_, v_dim);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    Sums s = {}, dp = {};
    multiply_rows<kDim, 1, kKeys, Shape::kUnroll>(s, q, warp_index() * 16, k, T());
    multiply_rows<kDim, 1, kKeys, Shape::kUnroll>(dp, dy, warp_index() * 16, v, T());
    const MmaAddends<T> addends(x_, b_, h_);
    const MmaScores scores(z_);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t i = query + local(half);
      if (i >= past) continue;
      const int64_t at = x_.row(b_, h_, i);
      const float lse = x_.lse[at] * static_cast<float>(kLog2E), delta = x_.delta[at];
      const int2 all = within(z_.seen_by(i, i + 1, length_), key, kKeys),
                 range = within_sequence(all, own_[local(half)], key);
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (column(n, e) < range.x || column(n, e) >= range.y) continue;
          const float more = addends(i, key + column(n, e));
          float slope;
          const float p = fast_exp2(scores(s[0][n][2 * half + e], &slope) + more - lse);
          if (more != -kInfinity) sums_[0][n][2 * half + e] += p * (dp[0][n][2 * half + e] - delta);
        }
    }
  }

  // sums: (kRows, kKeys + 1).
  __device__ void store(float *sums, void *to) const {
    constexpr int kLine = kKeys + 1;
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) sums[local(half) * kLine + column(n, e)] = sums_[0][n][2 * half + e] * times_;
    __syncthreads();
    if (!steps_.query && threadIdx.x < kKeys)
      for (int i = 1; i < kRows; ++i) sums[threadIdx.x] += sums[i * kLine + threadIdx.x];
    __syncthreads();
    if (!steps_.key && threadIdx.x < (steps_.query ? kRows : 1))
      for (int j = 1; j < kKeys; ++j) sums[threadIdx.x * kLine] += sums[threadIdx.x * kLine + j];
    __syncthreads();
    const int64_t rows = steps_.query ? z_.queries : 1, columns = steps_.key ? z_.keys : 1;
    for (int i = threadIdx.x; i < kRows * kKeys; i += Shape::kThreads) {
      const int64_t row = query_ + i / kKeys, column = key_ + i % kKeys;
      if (row < rows && column < columns)
        x_.store(sums[i / kKeys * kLine + i % kKeys], to, x_.extra.wide_bias, (plane_ * rows + row) * columns + column);
    }
  }

  const AttentionInputs<T> &x_;
  const AttentionSizes &z_;
  const ScoreSteps &steps_;
  char *shared_;
  int2 *own_;
  int64_t plane_, query_, key_, b_, h_, length_;
  float times_ = 1;
  Sums sums_ = {};
};

// blockIdx.x: a tile of a plane of the bias.
template <typename T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    attention_mma_dbias_kernel(AttentionInputs<T> x, void *dbias) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  extern __shared__ __align__(1024) uint4 attention_shared[];
  BiasTile<T, Shape>(x, attention_shared).run(dbias);
#endif
}

// ------------------------------------------------------------------------------------------------------- launchers

// Whether these kernels take a call whose tensors are aligned.
inline bool mma_takes(const AttentionSizes &z) {
  const bool fits = z.dim <= 256 && z.v_dim <= 256 && std::max(z.queries, z.keys) <= 1 << 30;
  return fits && z.dim % 8 == 0 && z.v_dim % 8 == 0 && z.v_dim > 0;
}

// f(MmaShapes<kDim>()) with the head_dim that q, k and v are padded to.
template <class F>
Status dispatch_mma(const AttentionSizes &z, F f) {
  const int64_t dim = std::max(z.dim, z.v_dim);
  return dim <= 64    ? f(MmaShapes<64>())
         : dim <= 96  ? f(MmaShapes<96>())
         : dim <= 128 ? f(MmaShapes<128>())
                      : f(MmaShapes<256>());
}
// Kernels with kExtra: whether they take a call that the others take, and their shapes.
inline bool mma_takes_extra(const AttentionSizes &z) { return z.dim <= 128 && z.v_dim <= 128; }
template <class F>
Status dispatch_mma_extra(const AttentionSizes &z, F f) {
  return std::max(z.dim, z.v_dim) <= 64 ? f(MmaExtraShapes<64>()) : f(MmaExtraShapes<128>());
}

// A block for each tile of rows of each head.
template <class Shape, typename... Parameters, typename... Arguments>
Status launch_mma(const char *op, void (*kernel)(Parameters...), int64_t heads, int64_t rows, int shared, void *stream,
                  const Arguments &...arguments) {
  const int64_t blocks = heads * ceil_div(rows, Shape::kRows);
  if (!blocks) return kOk;
  if (blocks > INT32_MAX)
    return fail(kNotImplemented, "%s: %lld tiles are more than a grid has", op, static_cast<long long>(blocks));
  return launch_kernel(op, kernel, {static_cast<unsigned>(blocks), Shape::kThreads, shared}, stream, arguments...);
}

template <bool kExtra, class Shapes, typename T>
Status run_mma_forward_of(Shapes, const char *op, const AttentionInputs<T> &x, T *y, float *lse, void *stream) {
  using Shape = typename Shapes::Y;
  constexpr int kShared = Shape::shared(1, false, kExtra);
  static_assert(kShared <= kMmaShared);
  return launch_mma<Shape>(op, attention_y_kernel<T, Shape, kExtra>, x.z.batch * x.z.heads, x.z.queries, kShared,
                           stream, x, y, lse);
}

template <bool kExtra, class Shapes, typename T>
Status run_mma_backward_of(Shapes, const char *op, const AttentionInputs<T> &x, T *dq, T *dk, T *dv, void *stream) {
  const AttentionSizes &z = x.z;
  using Dq = typename Shapes::Dq;
  using Dkv = typename Shapes::Dkv;
  constexpr int kOfDq = Dq::shared(2, false, kExtra), kOfDkv = Dkv::shared(2, true, kExtra);
  static_assert(kOfDq <= kMmaShared && kOfDkv <= kMmaShared);
  if (dq)
    AOT_TRY(launch_mma<Dq>(op, attention_dq_kernel<T, Dq, kExtra>, z.batch * z.heads, z.queries, kOfDq, stream, x, dq));
  const auto run = [&](auto kernel) {
    return launch_mma<Dkv>(op, kernel, z.batch * z.kv_heads, z.keys, kOfDkv, stream, x, dk, dv);
  };
  if constexpr (Dkv::kDim <= 128) {
    return dk || dv ? run(attention_dkv_kernel<T, Dkv, true, true, kExtra>) : kOk;
  } else {
    if (dk) AOT_TRY(run(attention_dkv_kernel<T, Dkv, true, false, kExtra>));
    return dv ? run(attention_dkv_kernel<T, Dkv, false, true, kExtra>) : kOk;
  }
}

// How many tiles of so many queries and keys the planes of a bias have.
template <typename T>
Status count_bias_tiles(const char *op, const AttentionInputs<T> &x, int rows, int columns, int64_t *blocks) {
  const ScoreSteps &steps = x.extra.of_bias;
  *blocks =
      steps.planes * (steps.query ? ceil_div(x.z.queries, rows) : 1) * (steps.key ? ceil_div(x.z.keys, columns) : 1);
  if (*blocks <= INT32_MAX) return kOk;
  return fail(kNotImplemented, "%s: %lld tiles of the bias are more than a grid has", op,
              static_cast<long long>(*blocks));
}

template <typename T>
Status run_mma_bias(const char *op, const AttentionInputs<T> &x, void *dbias, void *stream) {
  return dispatch_mma_extra(x.z, [&](auto shapes) -> Status {
    using Shape = typename decltype(shapes)::Dbias;
    constexpr int kShared = BiasTile<T, Shape>::kShared;
    static_assert(kShared <= kMmaShared);
    int64_t blocks;
    AOT_TRY(count_bias_tiles(op, x, Shape::kRows, Shape::kOthers, &blocks));
    if (!blocks) return kOk;
    return launch_kernel(op, attention_mma_dbias_kernel<T, Shape>,
                         {static_cast<unsigned>(blocks), Shape::kThreads, kShared}, stream, x, dbias);
  });
}

// Calls with what is in `extra` have shapes of their own.
template <typename T>
Status run_mma_forward(const char *op, const AttentionInputs<T> &x, T *y, float *lse, void *stream) {
  if (!x.plain())
    return dispatch_mma_extra(x.z,
                              [&](auto shapes) { return run_mma_forward_of<true>(shapes, op, x, y, lse, stream); });
  return dispatch_mma(x.z, [&](auto shapes) { return run_mma_forward_of<false>(shapes, op, x, y, lse, stream); });
}

template <typename T>
Status run_mma_backward(const char *op, const AttentionInputs<T> &x, T *dq, T *dk, T *dv, void *stream) {
  if (!x.plain())
    return dispatch_mma_extra(
        x.z, [&](auto shapes) { return run_mma_backward_of<true>(shapes, op, x, dq, dk, dv, stream); });
  return dispatch_mma(x.z, [&](auto shapes) { return run_mma_backward_of<false>(shapes, op, x, dq, dk, dv, stream); });
}

}  // namespace AOT_ISA
}  // namespace aot
