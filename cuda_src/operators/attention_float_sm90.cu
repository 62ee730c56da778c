// attention's gradients in float32 on Hopper, in one pass: five products, where two kernels (attention_float.cuh) have
// seven. Of head_dims of 65 to 128 they are wgmma's (attention_float_wgmma.cuh), of others by mma.sync of TF32, here.
//
// A block has 64 keys, and goes through tiles of queries, the last one first. Two warps have the same 16 keys: the
// first computes s and dv, and sends p through shared memory to the second, which computes dp, ds and dk. So a warp has
// one result in its registers, which have room for a head_dim of 256. All warps share dq, the product of ds and the
// block's keys. Blocks add their parts to dq itself, the one with the lowest keys first, as in
// attention_mma_backward.cuh: so a causal call starts the blocks that take longest first.
//
// There are no registers for sums of larger and of smaller parts, as in attention_float.cuh: a sum is of all three
// products. So tensor cores add half as many terms: 32 of a score and 16 of a result.
#include "attention_float.cuh"
#include "attention_float_wgmma.cuh"
#include "attention_mma_backward.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

template <int kDim_, int kOthers_, int kBlocks_>
struct FloatPassShape : FloatShape<kDim_, 1, 4, kOthers_, kBlocks_> {
  using Base = FloatShape<kDim_, 1, 4, kOthers_, kBlocks_>;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kStage = 2 * Base::kTile, kDs = kStage + 2 * Base::kOtherTile;
  static constexpr int kNumbers = kDs + Base::kRows * kOthers_ * 4, kOwn = kNumbers + 8 * kOthers_;
  static constexpr int kShared = kOwn + Base::kRows * 8;
  // Warps that share columns of dq, each of 16 queries, and how many columns they have.
  static constexpr int kDown = kOthers_ / 16, kColumns = kDim_ / (8 / kDown);
  static_assert(kColumns % 32 == 0);
};

// ------------------------------------------------------------------------------------------------------- products

// sum (16, 8) += a (16, 8) b (8, 8), in the order that the loops have
__device__ inline void multiply_add_in_order(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Products that depend on each other are apart.
template <int kCount>
__device__ inline void add_parts(float (&sums)[kCount][4], const FloatLeft<1> &a, const FloatRight<kCount> &b) {
#pragma unroll
  for (int part = 0; part < 3; ++part)
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      multiply_add_in_order(sums[n], part == 0 ? a.small[0] : a.big[0], part == 1 ? b.small[n] : b.big[n]);
}

// sums[at + n] += more[n]
template <int kN, int kCount>
__device__ inline void gather(float (&sums)[kN][4], int at, const float (&more)[kCount][4]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n)
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[at + n][j] += more[n][j];
}

// As multiply_float_rows.
template <class Shape, int kN>
__device__ inline void add_float_rows(MmaSums<1, kN> &sums, uint32_t a, int row, uint32_t b) {
  constexpr int kDim = Shape::kDim, kDepth = 32, kCount = kN / 8 < 4 ? kN / 8 : 4;
  const int g = lane_index() / 4, t = lane_index() % 4;
  const uint32_t of_a[2] = {float_piece<kDim>(a, row + g, t), float_piece<kDim>(a, row + g, 4 + t)};
  const uint32_t of_b[2] = {float_piece<kDim>(b, g, t), float_piece<kDim>(b, g, 4 + t)};
#pragma unroll 1
  for (int d = 0; d < kDim; d += 2 * kDepth) {
#pragma unroll
    for (int chain = 0; chain < 2; ++chain) {
      float more[kN / 8 / kCount][kCount][4] = {};
#pragma unroll
      for (int k = chain * (kDepth / 16); k < (chain + 1) * (kDepth / 16); ++k) {
        float x[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half)
          load_piece(x[half], of_a[k % 2] + d * 4 + k / 2 * 128 + 8 * half * (kDim * 4));
#pragma unroll
        for (int n = 0; n < kN / 8; n += kCount) {
          float y[kCount][4];
#pragma unroll
          for (int c = 0; c < kCount; ++c)
            load_piece(y[c], of_b[k % 2] + d * 4 + k / 2 * 128 + (n + c) * 8 * (kDim * 4));
#pragma unroll
          for (int step = 0; step < 2; ++step) {
            FloatLeft<1> left;
            FloatRight<kCount> right;
#pragma unroll
            for (int j = 0; j < 4; ++j) split(x[j % 2][2 * step + j / 2], left.big[0][j], left.small[0][j]);
#pragma unroll
            for (int c = 0; c < kCount; ++c)
#pragma unroll
              for (int j = 0; j < 2; ++j) split(y[c][2 * step + j], right.big[c][j], right.small[c][j]);
            add_parts(more[n / kCount], left, right);
          }
        }
      }
#pragma unroll
      for (int n = 0; n < kN / 8; n += kCount) gather(sums[0], n, more[n / kCount]);
    }
  }
}

// sums[at + j][2 half + e] += the products of two steps of 8 of a left factor, and 32 columns of the rows of b that
// of_b has, and of 8 behind them. Column 8 t + 4 e + j.
template <int kN>
__device__ inline void add_float_columns(float (&sums)[kN][4], int at, const FloatLeft<1> (&left)[2],
                                         const uint32_t (&of_b)[2], int more_of_b, int eight_rows) {
  float more[4][4] = {};
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    FloatRight<4> right;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float x[4];
      load_piece(x, of_b[e] + more_of_b + k * eight_rows);
#pragma unroll
      for (int j = 0; j < 4; ++j) split(x[j], right.big[j][e], right.small[j][e]);
    }
    add_parts(more, left[k], right);
  }
  gather(sums, at, more);
}

// As multiply_float_weights.
template <class Shape, int kN>
__device__ inline void add_float_weights(MmaSums<1, Shape::kDim> &sums, const MmaSums<1, kN> &weights, uint32_t b) {
  constexpr int kDim = Shape::kDim, kEight = 8 * kDim * 4;
  const int g = lane_index() / 4, t = lane_index() % 4;
  const uint32_t of_b[2] = {float_piece<kDim>(b, 2 * t, g), float_piece<kDim>(b, 2 * t + 1, g)};
#pragma unroll
  for (int k = 0; k < kN / 8; k += 2) {
    FloatLeft<1> left[2];
#pragma unroll
    for (int step = 0; step < 2; ++step)
#pragma unroll
      for (int j = 0; j < 4; ++j)  // j: 2 half + e
        split(weights[0][k + step][j], left[step].big[0][j % 2 * 2 + j / 2], left[step].small[0][j % 2 * 2 + j / 2]);
#pragma unroll
    for (int c = 0; c < kDim / 32; ++c) add_float_columns(sums[0], 4 * c, left, of_b, c * 128 + k * kEight, kEight);
  }
}

// ---------------------------------------------------------------------------------------------------------- kernel

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks) attention_float_pass_kernel(MmaPass<float> pass) {
  constexpr int kDim = Shape::kDim, kQueries = Shape::kOthers, kEach = kQueries / 4;
  using Order = Spread<kQueries>;
  extern __shared__ __align__(1024) uint4 attention_shared[];
  char *const shared = reinterpret_cast<char *>(attention_shared);
  const AttentionInputs<float> &x = pass.x;
  const AttentionSizes &z = x.z;
  const uint32_t k_tile = shared_address(attention_shared), v_tile = k_tile + Shape::kTile;
  const uint32_t ds_tile = k_tile + Shape::kDs, numbers = k_tile + Shape::kNumbers;
  const uint32_t q_tile = k_tile + Shape::kStage, dy_tile = q_tile + Shape::kOtherTile;
  const KeyTile<float, Shape, InOrder> tile(pass, reinterpret_cast<int2 *>(shared + Shape::kOwn), true);
  const int dim = static_cast<int>(z.dim), v_dim = static_cast<int>(z.v_dim), queries = static_cast<int>(z.queries);
  const int of_head = tile.met.end - tile.met.begin, query_tiles = (queries - 1) / kQueries + 1;
  const int lane = lane_index(), g = lane / 4, t = lane % 4, warp = warp_index();

  const auto fetch = [&](int64_t h, int query) {
    copy_float_rows<Shape, kQueries, Order>(q_tile, x.of_queries(x.q, tile.b, h, dim), query, queries, dim);
    copy_float_rows<Shape, kQueries, Order>(dy_tile, x.of_results(x.dy, tile.b, h), query, queries, v_dim);
    if (threadIdx.x < 2 * kQueries) {
      const int of_delta = threadIdx.x / kQueries, i = query + Order::at(threadIdx.x % kQueries);
      copy_async<4>(numbers + threadIdx.x * 4, (of_delta ? x.delta : x.lse) + x.row(tile.b, h, i < queries ? i : 0),
                    i < queries);
    }
    commit_copies();
  };
  copy_float_rows<Shape, Shape::kRows, InOrder>(k_tile, x.of_keys(x.k, tile.b, tile.kv, dim), tile.begin, tile.last,
                                                dim);
  copy_float_rows<Shape, Shape::kRows, InOrder>(v_tile, x.of_keys(x.v, tile.b, tile.kv, v_dim), tile.begin, tile.last,
                                                v_dim);

  const float q_scale = static_cast<float>(z.scale) * tile.times;
  const int group = warp % 4, warp_row = group * 16;
  const bool second = warp >= 4;  // of its pair
  MmaSums<1, kDim> sums = {};     // of the second warp dk, else dv
  int *turn_before = nullptr;
  const auto pass_on = [&] {
    if (turn_before && threadIdx.x == Shape::kThreads - 32)
      asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turn_before), "r"(tile.number + 1) : "memory");
    turn_before = nullptr;
  };
#pragma unroll 1
  for (MmaStep step; of_head && step.head < z.group(); step = step.next(of_head)) {
    const int query_tile = tile.met.end - 1 - step.tile;
    const int64_t h = tile.kv * z.group() + step.head;
    __syncthreads();
    fetch(h, query_tile * kQueries);
    wait_copies<0>();
    __syncthreads();
    typename KeyTile<float, Shape, InOrder>::Bits bits;
    bool partial = tile.find_partial(bits, query_tile);
    const bool met = !partial || tile.any(bits, &partial);
    MmaSums<1, kQueries> s = {};  // of the second warp dp, and ds
    const float *const lse = reinterpret_cast<const float *>(shared + Shape::kNumbers) + t * 2;
    const float *const delta = lse + kQueries;
    const FloatScores scores(x, tile.b, h);
    float *const weights = reinterpret_cast<float *>(shared + Shape::kDs) + group * (kQueries * 16) + lane;
    if (met) add_float_rows<Shape, kQueries>(s, second ? v_tile : k_tile, warp_row, second ? dy_tile : q_tile);
    pass_on();  // what the step before has added is likely there
    if (met && !second)
      weigh_pass<kQueries>(s, weights, scores, lse, bits, query_tile * kQueries + t * kEach, queries,
                           tile.begin + warp_row + g, tile.last);
    __syncthreads();
    if (met && second) {
      weigh_products<kQueries>(s, weights, delta);
      __syncwarp();  // ds takes the place of weights
    }
    // Left factors of dq as its warps' lanes have them: pieces of four, of 16 queries and 8 keys.
    const uint32_t to = ds_tile + group * (kQueries * 64) + ((((2 * t * 4 + g / 2) ^ 2 * t) * 4 + g % 2 * 2) * 4);
    if (second)
#pragma unroll
      for (int n = 0; n < kQueries / 8; n += 2)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"((to ^ e * 64) + (n + half) * 512),
                         "f"(s[0][n][2 * half + e]), "f"(s[0][n + 1][2 * half + e])
                         : "memory");
    __syncthreads();
    const int64_t tile_of_dq = (tile.b * z.heads + h) * query_tiles + query_tile;
    int *const turn = pass.turns + tile_of_dq;
    const bool first = !tile.of_before.has(query_tile), final = !tile.of_next.has(query_tile);
    int found = 0;
    if (pass.dq && !first && lane == 0)
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(turn) : "memory");
    if (met) add_float_weights<Shape, kQueries>(sums, s, second ? q_tile : dy_tile);
    if (!pass.dq) continue;
    constexpr int kParts = Shape::kColumns / 32;
    float part[4 * kParts][4] = {};
    const int down = warp % Shape::kDown, column = warp / Shape::kDown * Shape::kColumns;
    {
      const uint32_t of_a = ds_tile + down * 1024 + ((lane ^ lane / 8 * 2) * 16);
      const uint32_t of_b[2] = {float_piece<kDim>(k_tile, 2 * t, g) + column * 4,
                                float_piece<kDim>(k_tile, 2 * t + 1, g) + column * 4};
#pragma unroll 2
      for (int k = 0; k < Shape::kRows / 16; ++k) {
        FloatLeft<1> left[2];
#pragma unroll
        for (int eight = 0; eight < 2; ++eight) {
          float a[4];
          load_piece(a, of_a + k * (kQueries * 64) + eight * 512);
#pragma unroll
          for (int j = 0; j < 4; ++j) split(a[j], left[eight].big[0][j], left[eight].small[0][j]);
        }
#pragma unroll
        for (int c = 0; c < kParts; ++c)
          add_float_columns(part, 4 * c, left, of_b, k * (16 * kDim * 4) + c * 128, 8 * kDim * 4);
      }
    }
    if (!first) {
      if (lane == 0)
        while (found != tile.number) {
          __nanosleep(20);
          asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(turn) : "memory");
        }
      __syncwarp();
    }
    if (!final) turn_before = turn;
    const HeadRows<float> to_dq = x.of_queries(pass.dq, tile.b, h, z.dim);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = query_tile * kQueries + Order::at(down * 16 + 8 * half + g);
      if (query >= queries) continue;
      float *const row = to_dq[query] + column + t * 8;
#pragma unroll
      for (int c = 0; c < 2 * kParts; ++c) {
        const int e = c % 2, more = c / 2 * 32 + 4 * e;
        if (column + t * 8 + more >= dim) continue;
        float four[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) four[j] = part[c / 2 * 4 + j][2 * half + e];
        float4 *const at = reinterpret_cast<float4 *>(row + more);
        if (!final && !first) {
          add_in_memory(row + more, four);
          continue;
        }
        if (!first) {
          const float4 more = __ldcg(at);
          four[0] += more.x, four[1] += more.y, four[2] += more.z, four[3] += more.w;
        }
        const float times = final ? q_scale : 1;
        __stcg(at, make_float4(four[0] * times, four[1] * times, four[2] * times, four[3] * times));
      }
    }
  }
  __syncthreads();
  pass_on();
  float *const to = second ? pass.dk : pass.dv;
  const int columns = second ? dim : v_dim;
  const float times = second ? q_scale : tile.times;
  if (to)
    store_float_sums<Shape, 1>(sums, x.of_keys(to, tile.b, tile.kv, columns), tile.begin + warp_row, tile.end, columns,
                               [=](int, int) { return times; });
}

template <class Shape>
Status run_pass(const char *op, const MmaPass<float> &pass, const float *y, float *delta, bool all_seen, void *stream) {
  const AttentionSizes &z = pass.x.z;
  if (z.rows())
    AOT_TRY(launch_kernel(op, attention_pass_begin_kernel<float>,
                          {grid_size(ceil_div(z.rows(), kDeltaBlock / 8)), kDeltaBlock}, stream, pass, y, delta,
                          z.batch * z.heads * ceil_div(z.queries, Shape::kOthers), all_seen));
  void (*kernel)(MmaPass<float>);
  if constexpr (Shape::kDim == 128) kernel = attention_float_wgmma_kernel<Shape>;
  else kernel = attention_float_pass_kernel<Shape>;
  return launch_mma<Shape>(op, kernel, z.batch * z.kv_heads, z.keys, Shape::kShared, stream, pass);
}

template <class Shape>
Status run_y(const char *op, const AttentionInputs<float> &x, float *y, float *lse, void *stream) {
  return launch_mma<Shape>(op, attention_float_wgmma_y_kernel<Shape>, x.z.batch * x.z.heads, x.z.queries,
                           Shape::kShared, stream, x, y, lse);
}

}  // namespace

Status attention_float_sm90(const char *op, const AttentionInputs<float> &x, float *y, float *lse, void *stream) {
  const auto run = std::max(x.z.dim, x.z.v_dim) <= 64 ? run_y<FloatWgmmaY<64, 64>> : run_y<FloatWgmmaY<128, 32>>;
  return run(op, x, y, lse, stream);
}

Status attention_float_backward_sm90(const char *op, const AttentionInputs<float> &x, const float *y, float *delta,
                                     float *dq, float *dk, float *dv, float *space, void *stream) {
  const AttentionSizes &z = x.z;
  const int heads = static_cast<int>(std::min<int64_t>(z.batch * z.kv_heads, 1 << 30));
  const MmaPass<float> pass = {x, dq, dk, dv, nullptr, reinterpret_cast<int *>(space), nullptr, heads};
  const int64_t dim = std::max(z.dim, z.v_dim);
  const auto run = dim <= 64    ? run_pass<FloatPassShape<64, 64, 2>>
                   : dim <= 128 ? run_pass<FloatWgmmaShape<128, 32>>
                                : run_pass<FloatPassShape<256, 32, 1>>;
  return run(op, pass, y, delta, every_query_meets(z, x.lengths != nullptr, x.extra.offsets != nullptr), stream);
}

}  // namespace AOT_ISA
}  // namespace aot
