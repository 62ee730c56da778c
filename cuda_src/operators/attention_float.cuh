// attention in float32 on tensor cores, by mma.sync of TF32, from compute capability 8.0 on.
//
// A product is three: of the larger parts of numbers (two_tf32.cuh), and of each with the smaller one of the other
// factor, whose sums are apart. The tensor cores truncate the sums that they add to: they add few terms to sums that
// begin at 0, which ordinary additions gather.
//
// Rows of shared memory have pieces of four numbers. Lane l of a warp is g = l / 4 and t = l % 4 here. Of a product of
// rows, lane (g, t) loads piece t of each four of row g, which are two terms of two steps of 8, in an order that both
// factors share. Of a product with weights it loads piece g of each eight of rows 2 t and 2 t + 1, where its weights
// are, which is a column of four products: a lane has four adjacent columns of the result.
#pragma once
#include "attention_mma.cuh"
#include "cuda/two_tf32.cuh"

namespace aot {
inline namespace AOT_ISA {

// As MmaShape, with one stage of keys and one of values: each is loaded while the other is multiplied. kDepth: terms of
// a product of rows that tensor cores add.
template <int kDim_, int kM_, int kWarps_, int kOthers_, int kBlocks_>
struct FloatShape {
  static constexpr int kDim = kDim_, kM = kM_, kWarps = kWarps_, kOthers = kOthers_, kBlocks = kBlocks_, kDepth = 64;
  static constexpr int kWarpRows = 16 * kM, kRows = kWarpRows * kWarps, kThreads = 32 * kWarps, kUnroll = 1;
  static constexpr int kRowBytes = 4 * kDim, kTile = kRows * kRowBytes, kOtherTile = kOthers * kRowBytes;

  // Where the ranges of rows are in shared memory, behind so many tiles of rows; and all of it, with lse and delta.
  AOT_BOTH_SIDES static constexpr int own(int tiles) { return tiles * kTile + 2 * kOtherTile; }
  AOT_BOTH_SIDES static constexpr int shared(int tiles) { return own(tiles) + kRows * 8 + 8 * kOthers; }
};

// ------------------------------------------------------------------------------------------------- shared memory

// The number of a piece of four is combined with this: both loads are then from different banks.
__device__ inline int float_mix(int row) { return ((row >> 2 ^ row) & 1) << 2 | (row & 2); }

template <int kDim>
__device__ inline uint32_t float_piece(uint32_t tile, int row, int piece) {
  return tile + (row * kDim + (piece ^ float_mix(row)) * 4) * 4;
}

// Starts to copy rows [begin, begin + kCount) of a head, of `dim` numbers; zeros from row `end` on.
template <class Shape, int kCount, class Order>
__device__ inline void copy_float_rows(uint32_t tile, HeadRows<const float> from, int begin, int end, int dim) {
  constexpr int kDim = Shape::kDim, kPieces = kDim / 4, kAlong = 16, kStep = Shape::kThreads / kAlong;
  static_assert(kPieces % kAlong == 0 && kCount % kStep == 0 && (kStep & (kStep - 1)) == 0);
  const int row = threadIdx.x / kAlong, along = threadIdx.x % kAlong, left = end - begin, first = Order::at(row);
  const float *const at = from[begin + first] + along * 4;
#pragma unroll
  for (int i = 0; i < kCount; i += kStep) {
    const int more = Order::at(i);
#pragma unroll
    for (int j = 0; j < kPieces; j += kAlong) {
      const bool present = first + more < left && (along + j) * 4 < dim;
      copy_async(float_piece<kDim>(tile, i + row, along + j), present ? at + more * from.stride + j * 4 : from.data,
                 present);
    }
  }
}

__device__ inline void load_piece(float (&x)[4], uint32_t at) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "r"(at)
               : "memory");
}

// ------------------------------------------------------------------------------------------------------- products

// sum (16, 8) += a (16, 8) b (8, 8)
__device__ inline void multiply_add_tf32(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// The parts of factors of kCount products of a step.
template <int kM>
struct FloatLeft {
  uint32_t big[kM][4], small[kM][4];
};
template <int kCount>
struct FloatRight {
  uint32_t big[kCount][2], small[kCount][2];
};

// Products that depend on each other are apart.
template <int kM, int kCount>
__device__ inline void multiply_parts(float (&big)[kM][kCount][4], float (&small)[kM][kCount][4],
                                      const FloatLeft<kM> &a, const FloatRight<kCount> &b) {
#pragma unroll
  for (int part = 0; part < 3; ++part)
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int n = 0; n < kCount; ++n)
        multiply_add_tf32(part == 1 ? big[i][n] : small[i][n], part == 0 ? a.small[i] : a.big[i],
                          part == 2 ? b.small[n] : b.big[n]);
}

// sums += the products of this warp's rows of a, from `row` on, and rows of b.
template <class Shape, int kM, int kN>
__device__ inline void multiply_float_rows(MmaSums<kM, kN> &sums, uint32_t a, int row, uint32_t b) {
  constexpr int kDim = Shape::kDim, kDepth = Shape::kDepth, kCount = 2;
  const int g = lane_index() / 4, t = lane_index() % 4;
  const uint32_t of_a = float_piece<kDim>(a, row + g, t), of_b = float_piece<kDim>(b, g, t);
#pragma unroll 1
  for (int d = 0; d < kDim; d += kDepth) {
    float big[kN / 8][kM][4] = {}, small[kN / 8][kM][4] = {};
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      FloatLeft<kM> left[2];
#pragma unroll
      for (int i = 0; i < kM; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float x[4];
          load_piece(x, (of_a ^ k * 64) + d * 4 + (16 * i + 8 * half) * (kDim * 4));
#pragma unroll
          for (int j = 0; j < 4; ++j)
            split(x[j], left[j / 2].big[i][j % 2 * 2 + half], left[j / 2].small[i][j % 2 * 2 + half]);
        }
#pragma unroll
      for (int n = 0; n < kN / 8; n += kCount) {
        FloatRight<kCount> right[2];
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
          float x[4];
          load_piece(x, (of_b ^ k * 64) + d * 4 + (n + c) * 8 * (kDim * 4));
#pragma unroll
          for (int j = 0; j < 4; ++j) split(x[j], right[j / 2].big[c][j % 2], right[j / 2].small[c][j % 2]);
        }
#pragma unroll
        for (int step = 0; step < 2; ++step)
#pragma unroll
          for (int part = 0; part < 3; ++part)
#pragma unroll
            for (int c = 0; c < kCount; ++c)
#pragma unroll
              for (int i = 0; i < kM; ++i)
                multiply_add_tf32(part == 1 ? big[n + c][i] : small[n + c][i],
                                  part == 0 ? left[step].small[i] : left[step].big[i],
                                  part == 2 ? right[step].small[c] : right[step].big[c]);
      }
    }
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int n = 0; n < kN / 8; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][n][j] += big[n][i][j] + small[n][i][j];
  }
}

// sums += weights b, for as many rows of b as there are columns of weights. sums[i][4 c + j][2 half + e] is column
// 32 c + 8 t + 4 e + j.
template <class Shape, int kM, int kN>
__device__ inline void multiply_float_weights(MmaSums<kM, Shape::kDim> &sums, const MmaSums<kM, kN> &weights,
                                              uint32_t b) {
  constexpr int kDim = Shape::kDim;
  const int g = lane_index() / 4, t = lane_index() % 4;
  const uint32_t of_b[2] = {float_piece<kDim>(b, 2 * t, g), float_piece<kDim>(b, 2 * t + 1, g)};
  FloatLeft<kM> left[kN / 8];
#pragma unroll
  for (int k = 0; k < kN / 8; ++k)
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)  // j: 2 half + e
        split(weights[i][k][j], left[k].big[i][j % 2 * 2 + j / 2], left[k].small[i][j % 2 * 2 + j / 2]);
#pragma unroll
  for (int c = 0; c < kDim / 32; ++c) {
    float big[kM][4][4] = {}, small[kM][4][4] = {};
#pragma unroll
    for (int k = 0; k < kN / 8; ++k) {
      FloatRight<4> right;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float x[4];
        load_piece(x, of_b[e] + c * 128 + k * 8 * (kDim * 4));
#pragma unroll
        for (int j = 0; j < 4; ++j) split(x[j], right.big[j][e], right.small[j][e]);
      }
      multiply_parts<kM, 4>(big, small, left[k], right);
    }
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][4 * c + n][j] += big[i][n][j] + small[i][n][j];
  }
}

// --------------------------------------------------------------------------------------------------------- scores

// The scores of a head, in units of log(2).
struct FloatScores {
  float scale, softcap;
  bool plain;  // whether a score is a product times scale, which is positive
  MmaAddends<float> addends;

  __device__ FloatScores(const AttentionInputs<float> &x, int64_t b, int64_t h)
      : scale(static_cast<float>(x.z.scale * kLog2E)),
        softcap(static_cast<float>(x.z.softcap)),
        plain(!x.extra.mask && !x.extra.bias && softcap == 0 && scale > 0),
        addends(x, b, h) {}

  // Makes a product the score of a query and a key, if they are before these ends; its derivative over scale.
  __device__ float complete(float &score, int query, int queries, int key, int keys) const {
    float slope = 1;
    score *= scale;
    if (softcap != 0) {
      const float t = tanhf(score / (softcap * static_cast<float>(kLog2E)));
      score = softcap * static_cast<float>(kLog2E) * t, slope = 1 - t * t;
    }
    if (query >= queries || key >= keys) return slope;
    const float more = addends(query, key);
    score = more == -kInfinity ? more : score + more;
    return slope;
  }
};

// Where all scores of a row are huge their differences from lse are what rounding leaves. A NaN stays one.
__device__ inline float probability(float below) { return fast_exp2(below > 0 ? 0 : below); }

// The key that column 8 n + 2 t + e of a tile is.
template <int kKeys>
__device__ inline int tile_key(int begin, int n, int e) {
  return begin + lane_index() % 4 * (kKeys / 4) + 2 * n + e;
}

// Calls f(i, n, half, e, score) for each score; what it returns is a factor of that element of dp, if there is one. The
// loop is not unrolled: few calls need it, and it would be half of a kernel's code.
template <int kM, int kN, class F>
__device__ inline void add_to_scores(MmaSums<kM, kN> &s, MmaSums<kM, kN> *dp, F f) {
  float scores[kM * kN / 2], factors[kM * kN / 2];
#pragma unroll
  for (int at = 0; at < kM * kN / 2; ++at) scores[at] = s[at / (kN / 2)][at / 4 % (kN / 8)][at % 4];
#pragma unroll 1
  for (int at = 0; at < kM * kN / 2; ++at)
    factors[at] = f(at / (kN / 2), at / 4 % (kN / 8), at / 2 % 2, at % 2, scores[at]);
#pragma unroll
  for (int at = 0; at < kM * kN / 2; ++at) {
    s[at / (kN / 2)][at / 4 % (kN / 8)][at % 4] = scores[at];
    if (dp) (*dp)[at / (kN / 2)][at / 4 % (kN / 8)][at % 4] *= factors[at];
  }
}

// Stores columns below dim of the rows that exist, times a number.
template <class Shape, int kM, class Times>
__device__ inline void store_float_sums(const MmaSums<kM, Shape::kDim> &sums, HeadRows<float> to, int64_t begin,
                                        int64_t end, int dim, Times times) {
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = begin + 16 * i + 8 * half + lane_index() / 4;
      const float factor = times(i, half);
      if (row >= end) continue;
      float *const at = to[row] + lane_index() % 4 * 8;
#pragma unroll
      for (int c = 0; c < Shape::kDim / 16; ++c) {
        const int column = c / 2 * 32 + c % 2 * 4, n = c / 2 * 4, e = 2 * half + c % 2;
        if (column + lane_index() % 4 * 8 < dim)
          *reinterpret_cast<float4 *>(at + column) =
              make_float4(sums[i][n][e] * factor, sums[i][n + 1][e] * factor, sums[i][n + 2][e] * factor,
                          sums[i][n + 3][e] * factor);
      }
    }
}

// A warp's tile of 16 keys by queries, in a pass over keys. Scores of products become probabilities. What another warp
// multiplies by dp - delta goes to `weights`: probabilities times the derivatives of scores. lse: of queries 2 t and
// on. query, key: of this lane's first score, which are before these ends.
template <int kQueries>
__device__ inline void weigh_pass(MmaSums<1, kQueries> &s, float *weights, const FloatScores &scores, const float *lse,
                                  const uint32_t (&bits)[1], int query, int queries, int key, int keys) {
  if (!scores.plain)
    add_to_scores<1, kQueries>(s, nullptr, [&](int, int n, int half, int e, float &score) {
      weights[(4 * n + 2 * half + e) * 32] = scores.complete(score, query + 2 * n + e, queries, key + 8 * half, keys);
      return 0.f;
    });
  const float scale = scores.plain ? scores.scale : 1;
#pragma unroll
  for (int n = 0; n < kQueries / 8; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float of_row = lse[8 * n + e] * static_cast<float>(kLog2E);
      const float below = of_row == -kInfinity ? kInfinity : of_row;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float &score = s[0][n][2 * half + e];
        const bool present = bits[0] & 1u << (16 * half + 2 * n + e);
        score = score == -kInfinity || !present ? 0 : probability(score * scale - below);
      }
    }
  for_scores<1, kQueries>([&](int i, int n, int half, int e, uint32_t) {
    const float p = s[i][n][2 * half + e];
    float &weight = weights[(4 * n + 2 * half + e) * 32];
    weight = scores.plain || p == 0 ? p : p * weight;  // the slope may be NaN
  });
}

// In that other warp ds, without scale, from its products dp.
template <int kQueries>
__device__ inline void weigh_products(MmaSums<1, kQueries> &dp, const float *weights, const float *delta) {
  for_scores<1, kQueries>([&](int i, int n, int half, int e, uint32_t) {
    const float weight = weights[(4 * n + 2 * half + e) * 32];
    dp[i][n][2 * half + e] = weight == 0 ? 0 : weight * (dp[i][n][2 * half + e] - delta[8 * n + e]);
  });
}

// ---------------------------------------------------------------------------------------------------------------- y

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    attention_float_y_kernel(AttentionInputs<float> x, float *y, float *lse) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  if constexpr (!runs_here(0, Shape::kDim <= 128)) return;  // on 9.0 attention_float_sm90.cu has those
  constexpr int kDim = Shape::kDim, kM = Shape::kM, kKeys = Shape::kOthers;
  extern __shared__ __align__(1024) uint4 attention_shared[];
  const uint32_t q_tile = shared_address(attention_shared), k_tile = q_tile + Shape::kTile;
  const uint32_t v_tile = k_tile + Shape::kOtherTile;
  using Tile = QueryTile<float, Shape>;
  const Tile tile(x, reinterpret_cast<int2 *>(reinterpret_cast<char *>(attention_shared) + Shape::own(1)));
  const int dim = static_cast<int>(x.z.dim), v_dim = static_cast<int>(x.z.v_dim);
  const auto fetch_keys = [&](int step) {
    if (step < tile.steps)
      copy_float_rows<Shape, kKeys, Spread<kKeys>>(k_tile, tile.k, tile.key(step), tile.length, dim);
    commit_copies();
  };
  copy_float_rows<Shape, Shape::kRows, InOrder>(q_tile, x.of_queries(x.q, tile.b, tile.h, dim), tile.begin, tile.end,
                                                dim);
  fetch_keys(0);

  const FloatScores scores(x, tile.b, tile.h);
  const float scale = scores.plain ? scores.scale : 1;

  const int warp_row = warp_index() * Shape::kWarpRows;
  MmaSums<kM, kDim> sums = {};
  float most[kM][2], total[kM][2] = {};
#pragma unroll
  for (auto &pair : most) pair[0] = pair[1] = -kInfinity;
  if (x.extra.sinks) {
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
    copy_float_rows<Shape, kKeys, Spread<kKeys>>(v_tile, tile.v, tile.key(step), tile.length, v_dim);
    commit_copies();
    MmaSums<kM, kKeys> s = {};
    typename Tile::Bits bits;
    bool partial = tile.find_partial(bits, step);
    const bool sees = !partial || tile.any(bits, &partial);
    if (sees) multiply_float_rows<Shape, kM, kKeys>(s, q_tile, warp_row, k_tile);
    wait_copies<0>();
    __syncthreads();
    fetch_keys(step + 1);
    if (!sees) continue;
    if (!scores.plain)
      add_to_scores<kM, kKeys>(s, nullptr, [&](int i, int n, int half, int e, float &score) {
        return scores.complete(score, tile.query(i, half), tile.end, tile_key<kKeys>(tile.key(step), n, e),
                               tile.length);
      });
    if (partial)  // whatever the score of a hidden key is
      for_scores<kM, kKeys>([&](int i, int n, int half, int e, uint32_t bit) {
        if (!(bits[i] & bit)) s[i][n][2 * half + e] = -kInfinity;
      });
    weigh_scores<kM, kKeys, kDim>(s, sums, most, total, scale);
    if constexpr (kKeys % 32 == 0) {
      if (x.extra.dropout) {
        typename Tile::Bits kept;
        tile.find_kept(kept, step);
        for_scores<kM, kKeys>([&](int i, int n, int half, int e, uint32_t bit) {
          if (!(kept[i] & bit)) s[i][n][2 * half + e] = 0;
        });
      }
    }
    multiply_float_weights<Shape, kM, kKeys>(sums, s, v_tile);
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
  const float times = x.extra.dropout ? tile.times * static_cast<float>(x.extra.dropout.times) : tile.times;
  if (y)
    store_float_sums<Shape, kM>(
        sums, x.of_results(y, tile.b, tile.h), tile.begin + warp_row, tile.end, v_dim,
        [&](int i, int half) { return total[i][half] == 0 ? 0 * times : times / total[i][half]; });
#endif
}

// --------------------------------------------------------------------------------------------------------------- dq

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    attention_float_dq_kernel(AttentionInputs<float> x, float *dq) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  if constexpr (!runs_here(0, true)) return;  // on 9.0 attention_float_sm90.cu has all gradients
  constexpr int kDim = Shape::kDim, kM = Shape::kM, kKeys = Shape::kOthers;
  extern __shared__ __align__(1024) uint4 attention_shared[];
  const uint32_t q_tile = shared_address(attention_shared), dy_tile = q_tile + Shape::kTile;
  const uint32_t k_tile = dy_tile + Shape::kTile, v_tile = k_tile + Shape::kOtherTile;
  using Tile = QueryTile<float, Shape>;
  const Tile tile(x, reinterpret_cast<int2 *>(reinterpret_cast<char *>(attention_shared) + Shape::own(2)));
  const int dim = static_cast<int>(x.z.dim), v_dim = static_cast<int>(x.z.v_dim);
  copy_float_rows<Shape, Shape::kRows, InOrder>(q_tile, x.of_queries(x.q, tile.b, tile.h, dim), tile.begin, tile.end,
                                                dim);
  copy_float_rows<Shape, Shape::kRows, InOrder>(dy_tile, x.of_results(x.dy, tile.b, tile.h), tile.begin, tile.end,
                                                v_dim);
  const FloatScores scores(x, tile.b, tile.h);
  const float scale = scores.plain ? scores.scale : 1;
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
      if (lse[i][half] == -kInfinity) lse[i][half] = kInfinity;
    }
#pragma unroll 1
  for (int step = 0; step < tile.steps; ++step) {
    __syncthreads();
    copy_float_rows<Shape, kKeys, Spread<kKeys>>(k_tile, tile.k, tile.key(step), tile.length, dim);
    copy_float_rows<Shape, kKeys, Spread<kKeys>>(v_tile, tile.v, tile.key(step), tile.length, v_dim);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    typename Tile::Bits bits;
    bool partial = tile.find_partial(bits, step);
    if (partial && !tile.any(bits, &partial)) continue;
    MmaSums<kM, kKeys> s = {}, dp = {};
    multiply_float_rows<Shape, kM, kKeys>(s, q_tile, warp_row, k_tile);
    multiply_float_rows<Shape, kM, kKeys>(dp, dy_tile, warp_row, v_tile);
    for_scores<kM, kKeys>([&](int i, int n, int half, int e, uint32_t) { dp[i][n][2 * half + e] -= delta[i][half]; });
    if (!scores.plain)
      add_to_scores<kM, kKeys>(s, &dp, [&](int i, int n, int half, int e, float &score) {
        return scores.complete(score, tile.query(i, half), tile.end, tile_key<kKeys>(tile.key(step), n, e),
                               tile.length);
      });
    for_scores<kM, kKeys>([&](int i, int n, int half, int e, uint32_t bit) {
      float &score = s[i][n][2 * half + e];
      const float p = score == -kInfinity || !(bits[i] & bit) ? 0 : probability(score * scale - lse[i][half]);
      score = p == 0 ? 0 : p * dp[i][n][2 * half + e];
    });
    multiply_float_weights<Shape, kM, kKeys>(sums, s, k_tile);
  }
  const float times = static_cast<float>(x.z.scale) * tile.times;
  store_float_sums<Shape, kM>(sums, x.of_queries(dq, tile.b, tile.h, x.z.dim), tile.begin + warp_row, tile.end, dim,
                              [=](int, int) { return times; });
#endif
}

// ------------------------------------------------------------------------------------------------------- dk and dv

// dk, dv: null if not wanted.
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    attention_float_dkv_kernel(AttentionInputs<float> x, float *dk, float *dv) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  if constexpr (!runs_here(0, true)) return;  // on 9.0 attention_float_sm90.cu has all gradients
  constexpr int kDim = Shape::kDim, kM = Shape::kM, kQueries = Shape::kOthers;
  extern __shared__ __align__(1024) uint4 attention_shared[];
  const AttentionSizes &z = x.z;
  const int64_t tiles = ceil_div(z.keys, Shape::kRows), head = blockIdx.x / tiles, b = head / z.kv_heads;
  const int64_t kv = head % z.kv_heads, begin = blockIdx.x % tiles * Shape::kRows;
  const int64_t end = begin + Shape::kRows < z.keys ? begin + Shape::kRows : z.keys;
  const auto length = x.block_length(b);
  const int64_t last = end < length.value ? end : length.value;
  const int dim = static_cast<int>(z.dim), v_dim = static_cast<int>(z.v_dim), queries = static_cast<int>(z.queries);

  Range seeing = z.seeing(begin, last);
  seeing = begin < last ? x.extra.own(seeing, begin, last, true) : Range{0, 0};
  const int first = static_cast<int>(seeing.begin / kQueries * kQueries), past = static_cast<int>(seeing.end);
  const uint32_t k_tile = shared_address(attention_shared), v_tile = k_tile + Shape::kTile;
  const uint32_t q_tile = v_tile + Shape::kTile, dy_tile = q_tile + Shape::kOtherTile;
  int2 *const own = reinterpret_cast<int2 *>(reinterpret_cast<char *>(attention_shared) + Shape::own(2));
  float *const lse = reinterpret_cast<float *>(own + Shape::kRows), *const delta = lse + kQueries;
  if (x.extra.offsets) find_sequences<Shape>(own, x.extra, begin, true, 0, x.extra.sequences + 1);
  const int rows_end = static_cast<int>(last > begin ? last : begin);
  copy_float_rows<Shape, Shape::kRows, InOrder>(k_tile, x.of_keys(x.k, b, kv, dim), static_cast<int>(begin), rows_end,
                                                dim);
  copy_float_rows<Shape, Shape::kRows, InOrder>(v_tile, x.of_keys(x.v, b, kv, v_dim), static_cast<int>(begin), rows_end,
                                                v_dim);
  const Range by_last = z.seeing(end - 1, end), by_first = z.seeing(begin, begin + 1);
  const int warp_row = warp_index() * Shape::kWarpRows;
  MmaSums<kM, kDim> dk_sums = {}, dv_sums = {};
#pragma unroll 1
  for (int64_t h = kv * z.group(); h < (kv + 1) * z.group(); ++h)
#pragma unroll 1
    for (int query = first; query < past; query += kQueries) {
      __syncthreads();
      copy_float_rows<Shape, kQueries, InOrder>(q_tile, x.of_queries(x.q, b, h, dim), query, queries, dim);
      copy_float_rows<Shape, kQueries, InOrder>(dy_tile, x.of_results(x.dy, b, h), query, queries, v_dim);
      commit_copies();
      if (threadIdx.x < kQueries) {
        const int64_t i = query + threadIdx.x, at = x.row(b, h, i);
        const float of_row = i < queries ? x.lse[at] * static_cast<float>(kLog2E) : kInfinity;
        lse[threadIdx.x] = of_row == -kInfinity ? kInfinity : of_row;
        delta[threadIdx.x] = i < queries ? x.delta[at] : 0;
      }
      wait_copies<0>();
      __syncthreads();
      const FloatScores scores(x, b, h);
      const float scale = scores.plain ? scores.scale : 1;
      const bool whole = !x.extra.offsets && last == begin + Shape::kRows && query >= by_last.begin &&
                         query + kQueries <= by_first.end;
      MmaSums<kM, kQueries> s = {}, dp = {};
      multiply_float_rows<Shape, kM, kQueries>(s, k_tile, warp_row, q_tile);
      multiply_float_rows<Shape, kM, kQueries>(dp, v_tile, warp_row, dy_tile);
      for_scores<kM, kQueries>([&](int i, int n, int half, int e, uint32_t) {
        dp[i][n][2 * half + e] -= delta[8 * n + lane_index() % 4 * 2 + e];
      });
      if (!scores.plain)
        add_to_scores<kM, kQueries>(s, &dp, [&](int i, int n, int half, int e, float &score) {
          const int column = 8 * n + lane_index() % 4 * 2 + e;
          return scores.complete(score, query + column, queries,
                                 static_cast<int>(begin) + warp_row + 16 * i + 8 * half + lane_index() / 4,
                                 static_cast<int>(last));
        });
#pragma unroll
      for (int i = 0; i < kM; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int2 range = {0, kQueries};
          const int64_t key = begin + warp_row + 16 * i + 8 * half + lane_index() / 4;
          if (!whole) {
            range = within(z.seeing(key, key + 1), query, kQueries);
            if (x.extra.offsets) range = within_sequence(range, own[key - begin], query);
            if (key >= last) range = {kQueries, kQueries};
          }
#pragma unroll
          for (int n = 0; n < kQueries / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int column = 8 * n + lane_index() % 4 * 2 + e;
              const bool present = column >= range.x && column < range.y;
              float &score = s[i][n][2 * half + e], &of_p = dp[i][n][2 * half + e];
              const float p = score == -kInfinity || !present ? 0 : probability(score * scale - lse[column]);
              score = p, of_p = p == 0 ? 0 : p * of_p;
            }
        }
      multiply_float_weights<Shape, kM, kQueries>(dv_sums, s, dy_tile);
      multiply_float_weights<Shape, kM, kQueries>(dk_sums, dp, q_tile);
    }
  const int64_t row = begin + warp_row;
  const float times = length.times, scale = static_cast<float>(z.scale) * times;
  if (dk)
    store_float_sums<Shape, kM>(dk_sums, x.of_keys(dk, b, kv, z.dim), row, end, dim, [=](int, int) { return scale; });
  if (dv)
    store_float_sums<Shape, kM>(dv_sums, x.of_keys(dv, b, kv, z.v_dim), row, end, v_dim,
                                [=](int, int) { return times; });
#endif
}

}  // namespace AOT_ISA
}  // namespace aot
