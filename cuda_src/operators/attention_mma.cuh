// attention in 16 bits on tensor cores, by mma.sync, from compute capability 8.0 on.
//
// A block has rows of a result, 16 kM for each warp, with their operands in shared memory; it goes through tiles of
// others, which pass through two stages. Scores of rows and others are products of rows. The weights that follow from
// them stay in registers, where they are the left factor of the next product: of y, p v; of dq, ds k; and, where rows
// are keys, of dv, p^T dy, and of dk, ds^T q. So nothing is summed by two blocks, and the order of sums is fixed; dq
// computes the scores once more for it. Exponentials are powers of 2.
#pragma once
#include "attention.cuh"
#include "cuda/mma.cuh"

namespace aot {
inline namespace AOT_ISA {

// kDim: head_dim, padded with zeros; a block has 16 kM kWarps rows; kBlocks: blocks for which a multiprocessor must
// kDim: head_dim, padded with zeros; a block has 16 kM kWarps rows; kBlocks: blocks for which a multiprocessor must
// have registers; kUnroll: steps of a product of rows that are unrolled.
template <int kDim_, int kM_, int kWarps_, int kOthers_, int kBlocks_, int kUnroll_>
struct MmaShape {
  static constexpr int kDim = kDim_, kM = kM_, kWarps = kWarps_, kOthers = kOthers_;
  static constexpr int kBlocks = kBlocks_, kUnroll = kUnroll_;
  static constexpr int kWarpRows = 16 * kM, kRows = kWarpRows * kWarps, kThreads = 32 * kWarps;
  static constexpr int kRowBytes = 2 * kDim, kTile = kRows * kRowBytes, kOtherTile = kOthers * kRowBytes;  // bytes
  static constexpr int kNumbers = 4 * 4 * kOthers;  // bytes of lse and delta of both stages

  // Bytes of shared memory with so many tiles of rows, and two stages of two tiles of others.
  AOT_BOTH_SIDES static constexpr int shared(int tiles, bool numbers) {
    return tiles * kTile + 4 * kOtherTile + (numbers ? kNumbers : 0);
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

// -------------------------------------------------------------------------------------------------------- queries

// A tile of queries of a head of an example, and the tiles of keys that it goes through. Of a head's tiles the last
// ones, which see most if the call is causal, are first.
template <typename T, class Shape>
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
    const auto found = x.length(b);
    length = static_cast<int>(found.value), times = found.times;
    const Range seen = z.seen_by(begin, end, length);
    const bool any = seen.end > seen.begin;
    first = any ? static_cast<int>(seen.begin) / kKeys * kKeys : 0;
    steps = any ? (static_cast<int>(seen.end) - first - 1) / kKeys + 1 : 0;
    whole_begin = clamped(z.seen_by(end - 1, end, length).begin),
    whole_end = clamped(z.seen_by(begin, begin + 1, length).end);
    k = x.of_keys(x.k, b, h / z.group(), z.dim), v = x.of_keys(x.v, b, h / z.group(), z.v_dim);
  }

  // What is between 0 and length is as it is.
  __device__ int clamped(int64_t key) const { return key < 0 ? 0 : key > length ? length : static_cast<int>(key); }

  __device__ int key(int step) const { return first + step * kKeys; }
  __device__ bool whole(int step) const { return key(step) >= whole_begin && key(step) + kKeys <= whole_end; }
  // The keys of a step that a query sees, of kKeys.
  __device__ int2 seen(int query, int step) const {
    return within(x.z.seen_by(query, query + 1, length), key(step), kKeys);
  }
  // The number of the query that is row 16 i + 8 half of this lane.
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

template <typename T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    attention_y_kernel(AttentionInputs<T> x, T *y, float *lse) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  constexpr int kDim = Shape::kDim, kM = Shape::kM, kKeys = Shape::kOthers;
  extern __shared__ __align__(1024) uint4 attention_shared[];
  const uint32_t q_tile = shared_address(attention_shared), stages = q_tile + Shape::kTile;
  const auto stage = [=](int step) { return stages + step % 2 * (2 * Shape::kOtherTile); };
  const QueryTile<T, Shape> tile(x);
  tile.copy(q_tile, x.q, x.z.dim);
  if (tile.steps) tile.fetch(stage(0), 0);
  commit_copies();

  const MmaScores scores(x.z);
  const bool fused = scores.inner == 0 && scores.scale > 0;  // the largest product is then the largest score's
  const float scale = fused ? scores.scale : 1;
  const int warp_row = warp_index() * Shape::kWarpRows;
  MmaSums<kM, kDim> sums = {};
  float slope, most[kM][2], total[kM][2] = {};
#pragma unroll
  for (auto &pair : most) pair[0] = pair[1] = -kInfinity;
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
    if (!tile.whole(step)) {
#pragma unroll
      for (int i = 0; i < kM; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int2 range = tile.seen(tile.query(i, half), step);
#pragma unroll
          for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int column = 8 * n + lane_index() % 4 * 2 + e;
              if (column < range.x || column >= range.y) s[i][n][2 * half + e] = -kInfinity;
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

template <typename T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks) attention_dq_kernel(AttentionInputs<T> x, T *dq) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  constexpr int kDim = Shape::kDim, kM = Shape::kM, kKeys = Shape::kOthers;
  extern __shared__ __align__(1024) uint4 attention_shared[];
  const uint32_t q_tile = shared_address(attention_shared), dy_tile = q_tile + Shape::kTile;
  const uint32_t stages = dy_tile + Shape::kTile;
  const auto stage = [=](int step) { return stages + step % 2 * (2 * Shape::kOtherTile); };
  const QueryTile<T, Shape> tile(x);
  tile.copy(q_tile, x.q, x.z.dim), tile.copy(dy_tile, x.dy, x.z.v_dim);
  if (tile.steps) tile.fetch(stage(0), 0);
  commit_copies();

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
        if (!whole) range = tile.seen(tile.query(i, half), step);
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int column = 8 * n + lane_index() % 4 * 2 + e;
            float slope, &score = s[i][n][2 * half + e];
            const float p = fast_exp2(scores(score, &slope) - lse[i][half]);
            score = column < range.x || column >= range.y ? 0 : p * (dp[i][n][2 * half + e] - delta[i][half]) * slope;
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
template <typename T, class Shape, bool kDk, bool kDv>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    attention_dkv_kernel(AttentionInputs<T> x, T *dk, T *dv) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  constexpr int kDim = Shape::kDim, kM = Shape::kM, kQueries = Shape::kOthers;
  extern __shared__ __align__(1024) uint4 attention_shared[];
  const AttentionSizes &z = x.z;
  const int64_t tiles = ceil_div(z.keys, Shape::kRows), head = blockIdx.x / tiles, b = head / z.kv_heads;
  const int64_t kv = head % z.kv_heads, begin = blockIdx.x % tiles * Shape::kRows;
  const int64_t end = begin + Shape::kRows < z.keys ? begin + Shape::kRows : z.keys;
  const auto length = x.length(b);
  const int64_t last = end < length.value ? end : length.value;
  const int dim = static_cast<int>(z.dim), v_dim = static_cast<int>(z.v_dim);

  const Range seeing = z.seeing(begin, last);
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
    }
  };
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
    const bool whole = last == begin + Shape::kRows && query >= by_last.begin && query + kQueries <= by_first.end;
    MmaSums<kM, kQueries> s = {}, dp = {};
    multiply_rows<kDim, kM, kQueries, Shape::kUnroll>(s, k_tile, warp_row, q_tile, T());
    if constexpr (kDk) multiply_rows<kDim, kM, kQueries, Shape::kUnroll>(dp, v_tile, warp_row, dy_tile, T());
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int2 range = {0, kQueries};
        if (!whole) {
          const int64_t key = begin + warp_row + 16 * i + 8 * half + lane_index() / 4;
          range = within(z.seeing(key, key + 1), query, kQueries);
          if (key >= last) range = {kQueries, kQueries};
        }
#pragma unroll
        for (int n = 0; n < kQueries / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int column = 8 * n + lane_index() % 4 * 2 + e;
            float slope, &score = s[i][n][2 * half + e], &of_p = dp[i][n][2 * half + e];
            const float p = fast_exp2(scores(score, &slope) - lse[column]);
            score = column < range.x || column >= range.y ? 0 : p;
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

template <typename T>
Status run_mma_forward(const char *op, const AttentionInputs<T> &x, T *y, float *lse, void *stream) {
  return dispatch_mma(x.z, [&](auto shapes) {
    using Shape = typename decltype(shapes)::Y;
    constexpr int kShared = Shape::shared(1, false);
    static_assert(kShared <= kMmaShared);
    return launch_mma<Shape>(op, attention_y_kernel<T, Shape>, x.z.batch * x.z.heads, x.z.queries, kShared, stream, x,
                             y, lse);
  });
}

template <typename T>
Status run_mma_backward(const char *op, const AttentionInputs<T> &x, T *dq, T *dk, T *dv, void *stream) {
  const AttentionSizes &z = x.z;
  return dispatch_mma(z, [&](auto shapes) -> Status {
    using Shapes = decltype(shapes);
    using Dq = typename Shapes::Dq;
    using Dkv = typename Shapes::Dkv;
    constexpr int kOfDq = Dq::shared(2, false), kOfDkv = Dkv::shared(2, true);
    static_assert(kOfDq <= kMmaShared && kOfDkv <= kMmaShared);
    if (dq) AOT_TRY(launch_mma<Dq>(op, attention_dq_kernel<T, Dq>, z.batch * z.heads, z.queries, kOfDq, stream, x, dq));
    const auto run = [&](auto kernel) {
      return launch_mma<Dkv>(op, kernel, z.batch * z.kv_heads, z.keys, kOfDkv, stream, x, dk, dv);
    };
    if constexpr (Dkv::kDim <= 128) {
      return dk || dv ? run(attention_dkv_kernel<T, Dkv, true, true>) : kOk;
    } else {
      if (dk) AOT_TRY(run(attention_dkv_kernel<T, Dkv, true, false>));
      return dv ? run(attention_dkv_kernel<T, Dkv, false, true>) : kOk;
    }
  });
}

}  // namespace AOT_ISA
}  // namespace aot
