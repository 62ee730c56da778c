// attention in float32 on Hopper by wgmma of TF32: y up to a head_dim of 128, and the gradients of 65 to 128.
//
// A left factor is in registers, where it is parted (two_tf32.cuh): q, k or v for the whole block, weights, and columns
// of k. A right factor is in shared memory as two tiles of parts, along whose rows the sum goes, which is all that
// wgmma does in TF32: for scores these are rows, for a product with weights columns. A thread parts what it has loaded
// itself, beside products: columns of this step's tile, then rows of the next one's.
//
// A sum of tensor cores has 32 terms of the large product, after those of the two small ones, of which truncation takes
// little.
//
// y: two warpgroups have 64 queries each.
//
// Gradients: one pass of five products, as in attention_float_sm90.cu, whose blocks this one's follow. Two warpgroups
// have the same 64 keys. The first computes s and dv, and sends p through shared memory to the second, which computes
// dp, ds and dk. Each then has half of the columns of dq's transpose, the product of those of k and ds.
#pragma once
#include "attention_float.cuh"
#include "attention_mma_backward.cuh"
#include "cuda/wgmma.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

// ------------------------------------------------------------------------------------------------------------ products

#ifdef CUTE_ARCH_MMA_SM90A_ENABLED

__device__ inline void store_piece(uint32_t at, const uint32_t (&x)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}
__device__ inline void show_parts() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A thread's piece of a tile of q or dy: columns 4 db + e of rows row + 2 j, which are positions 4 qb + j of a column.
// A lane has weights 2 t and 2 t + 1 of eight where those of a left factor are t and t + 4: so are rows and positions.
// The pieces of eight lanes are in different banks, in all three tiles.
template <class Shape>
struct FloatParting {
  static constexpr int kDim = Shape::kDim, kPart = Shape::kPart, kAcross = kDim / 32;
  static_assert(Shape::kOthers * kDim / 16 == Shape::kThreads);
  int db, qb;
  uint32_t from, rows, columns;

  __device__ explicit FloatParting(uint32_t shared) {
    int i;  // not known to be the same in each step, or registers would hold what is below
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(i));
    const int rest = i / 32;
    db = ((i ^ (i >> 2 & 6)) & 7) + rest % kAcross * 8, qb = (i >> 1 & 3) + rest / kAcross * 4;
    const int row = qb / 2 * 8 + qb % 2;
    from = shared + Shape::kStage + row * Shape::kRowBytes + db * 16;
    rows = shared + Shape::part(false, false) + db / 8 * (Shape::kOthers * 128) + row * 128 + ((db % 8 ^ qb % 2) << 4);
    columns = shared + Shape::part(false, true) + qb / 8 * (kDim * 128) + 4 * db * 128 + ((qb % 8 ^ db % 2 * 4) << 4);
  }

  __device__ void part_rows(bool of_dy) const {
    float x[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) load_piece(x[j], from + of_dy * kPart + 2 * j * Shape::kRowBytes);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t big[4], small[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) split(x[j][e], big[e], small[e]);
      const uint32_t at = (rows ^ j << 5) + 2 * j * 128 + of_dy * Shape::kApart;
      store_piece(at, big);
      store_piece(at + kPart, small);
    }
  }
  __device__ void part_columns(bool of_dy) const {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      float x[4][2];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                     : "=f"(x[j][0]), "=f"(x[j][1])
                     : "r"(from + of_dy * kPart + 2 * j * Shape::kRowBytes + pair * 8)
                     : "memory");
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        uint32_t big[4], small[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) split(x[j][e], big[j], small[j]);
        const int column = 2 * pair + e;
        const uint32_t at = (columns ^ column << 4) + column * 128 + of_dy * Shape::kApart;
        store_piece(at, big);
        store_piece(at + kPart, small);
      }
    }
  }
};

// A left factor of 32 columns.
struct FloatFactor {
  uint32_t big[4][4], small[4][4];
};

// Products of 32 terms. b: its larger parts, in rows of 128 bytes, and where the smaller ones are behind them.
template <int kN>
struct FloatProduct {
  float sums[kN / 2] = {};

  __device__ void start(FloatFactor &a, uint32_t b, int to_small) {
    auto &big = a.big, &small = a.small;
    const uint64_t of_big = wgmma_descriptor(b, 16), of_small = wgmma_descriptor(b + to_small, 16);
    using Product = Wgmma<float, kN, false, false>;
    fence_registers(sums), fence_registers(big), fence_registers(small);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k) Product::run(small[k], of_big + 2 * k, sums, k > 0);
#pragma unroll
    for (int k = 0; k < 4; ++k) Product::run(big[k], of_small + 2 * k, sums, true);
#pragma unroll
    for (int k = 0; k < 4; ++k) Product::run(big[k], of_big + 2 * k, sums, true);
    wgmma_end();
  }
  __device__ void wait(FloatFactor &a) {
    wgmma_wait<0>();
    fence_registers(sums), fence_registers(a.big), fence_registers(a.small);
  }
};

#endif

// -------------------------------------------------------------------------------------------------------- gradients

template <int kDim_, int kQueries_>
struct FloatWgmmaShape : FloatShape<kDim_, 1, 4, kQueries_, 1> {
  using Base = FloatShape<kDim_, 1, 4, kQueries_, 1>;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps, kQueries = kQueries_, kKeys = Base::kRows;
  static constexpr int kPart = kQueries * Base::kRowBytes, kApart = 4 * kPart, kOfDs = kQueries * kKeys * 4;
  static constexpr int kCols = kDim_ / 2;  // of dk or dv that are summed at a time
  // Where what follows k is: rows of q and dy, their parts, p, the parts of ds, lse and delta of two steps, and ranges.
  static constexpr int kStage = Base::kTile, kParts = kStage + 2 * kPart, kWeights = kParts + 8 * kPart;
  static constexpr int kDs = kWeights + kOfDs, kNumbers = kDs + 2 * kOfDs, kOwn = kNumbers + 4 * kQueries * 4;
  static constexpr int kShared = kOwn + kKeys * 8 + 1024;  // tiles are aligned to 1024

  // The larger parts of rows or columns of q or dy; the smaller ones are behind them.
  AOT_BOTH_SIDES static constexpr int part(bool of_dy, bool columns) {
    return kParts + of_dy * kApart + columns * 2 * kPart;
  }
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks) attention_float_wgmma_kernel(MmaPass<float> pass) {
#ifdef CUTE_ARCH_MMA_SM90A_ENABLED
  constexpr int kDim = Shape::kDim, kQueries = Shape::kQueries, kEach = kQueries / 4, kKeys = Shape::kKeys;
  using Order = Spread<kQueries>;
  using Tile = KeyTile<float, Shape, InOrder>;
  extern __shared__ __align__(1024) uint4 attention_shared[];
  char *const shared = reinterpret_cast<char *>(attention_shared) + (-shared_address(attention_shared) & 1023);
  const AttentionInputs<float> &x = pass.x;
  const AttentionSizes &z = x.z;
  const uint32_t k_tile = shared_address(shared);
  const Tile tile(pass, reinterpret_cast<int2 *>(shared + Shape::kOwn), true);
  const int dim = static_cast<int>(z.dim), v_dim = static_cast<int>(z.v_dim), queries = static_cast<int>(z.queries);
  const int of_head = tile.met.end - tile.met.begin, query_tiles = (queries - 1) / kQueries + 1;
  const int lane = lane_index(), g = lane / 4, t = lane % 4;
  const int warp = warp_index(), warp_row = warp % 4 * 16;
  const bool second = __shfl_sync(~0u, warp, 0) >= 4;  // of the warpgroups; known to be the same in all lanes

  const auto fetch = [&](const MmaStep &step) {
    const FloatParting<Shape> parting(k_tile);
    const int query = (tile.met.end - 1 - step.tile) * kQueries, first = query + parting.qb, at = parting.db * 4;
    const int64_t h = tile.kv * z.group() + step.head;
    const HeadRows<const float> q = x.of_queries(x.q, tile.b, h, dim), dy = x.of_results(x.dy, tile.b, h);
    const float *of_q = q[first] + at, *of_dy = dy[first] + at;
    const int left = queries - first, q_left = at < dim ? left : 0, dy_left = at < v_dim ? left : 0;
#pragma unroll
    for (int j = 0; j < 4; ++j, of_q += kEach * q.stride, of_dy += kEach * dy.stride) {
      const uint32_t to = parting.from + 2 * j * Shape::kRowBytes;
      copy_async(to, j * kEach < q_left ? of_q : q.data, j * kEach < q_left);
      copy_async(to + Shape::kPart, j * kEach < dy_left ? of_dy : dy.data, j * kEach < dy_left);
    }
    if (threadIdx.x < 2 * kQueries) {
      const int of_delta = threadIdx.x / kQueries, i = query + Order::at(threadIdx.x % kQueries);
      copy_async<4>(k_tile + Shape::kNumbers + step.parity * (8 * kQueries) + threadIdx.x * 4,
                    (of_delta ? x.delta : x.lse) + x.row(tile.b, h, i < queries ? i : 0), i < queries);
    }
    commit_copies();
  };
  copy_float_rows<Shape, Shape::kRows, InOrder>(k_tile, x.of_keys(x.k, tile.b, tile.kv, dim), tile.begin, tile.last,
                                                dim);
  if (of_head) fetch({});
  float of_keys[kDim / 8][4];  // the left factor of s or dp
  {
    const int columns = second ? v_dim : dim;
    const HeadRows<const float> from = x.of_keys(second ? x.v : x.k, tile.b, tile.kv, columns);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = tile.begin + warp_row + 8 * half + g;
      const float *const row = from[key < tile.last ? key : 0] + t;
#pragma unroll
      for (int k = 0; k < kDim / 8; ++k)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          of_keys[k][half + 2 * e] = key < tile.last && 8 * k + 4 * e < columns ? row[8 * k + 4 * e] : 0;
    }
  }

  const float q_scale = static_cast<float>(z.scale) * tile.times;
  float sums[kDim / 2] = {};  // of the second warpgroup dk, else dv
  int *turn_before = nullptr;
  const auto pass_on = [&] {
    if (turn_before && threadIdx.x == Shape::kThreads - 32)
      asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turn_before), "r"(tile.number + 1) : "memory");
    turn_before = nullptr;
  };
  MmaStep step;
  wait_copies<0>();
  if (of_head) {
    const FloatParting<Shape> parting(k_tile);
    parting.part_rows(false), parting.part_rows(true);
  }
#pragma unroll 1
  while (of_head && step.head < z.group()) {
    const int query_tile = tile.met.end - 1 - step.tile;
    const int64_t h = tile.kv * z.group() + step.head;
    show_parts();
    __syncthreads();
    pass_on();
    const FloatParting<Shape> parting(k_tile);
    const MmaStep next = step.next(of_head);
    const bool more = next.head < z.group();

    fence_registers(of_keys);     // or its parts would be in registers beside it
    MmaSums<1, kQueries> s = {};  // of the second warpgroup dp, and ds
#pragma unroll
    for (int c = 0; c < kDim / 32; ++c) {
      FloatFactor left;
      FloatProduct<kQueries> product;
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int j = 0; j < 4; ++j) split(of_keys[4 * c + k][j], left.big[k][j], left.small[k][j]);
      product.start(left, k_tile + Shape::part(second, false) + c * (kQueries * 128), Shape::kPart);
      if (c < 2) parting.part_columns(c > 0);
      product.wait(left);
#pragma unroll
      for (int i = 0; i < kQueries / 2; ++i) s[0][i / 4][i % 4] += product.sums[i];
    }
    show_parts();
    if (more) fetch(next);

    typename Tile::Bits bits;
    const bool partial = tile.find_partial(bits, query_tile);
    static_cast<void>(partial);
    const float *const lse =
        reinterpret_cast<const float *>(shared + Shape::kNumbers) + step.parity * 2 * kQueries + t * 2;
    const float *const delta = lse + kQueries;
    const FloatScores scores(x, tile.b, h);
    float *const weights = reinterpret_cast<float *>(shared + Shape::kWeights) + warp % 4 * (kQueries * 16) + lane;
    if (!second)
      weigh_pass<kQueries>(s, weights, scores, lse, bits, query_tile * kQueries + t * kEach, queries,
                           tile.begin + warp_row + g, tile.last);
    __syncthreads();
    if (second) weigh_products<kQueries>(s, weights, delta);

    constexpr int kCols = Shape::kCols;
    FloatFactor left[kQueries / 32];
#pragma unroll
    for (int k = 0; k < kQueries / 8; ++k)
#pragma unroll
      for (int j = 0; j < 4; ++j)  // j: 2 half + e
        split(s[0][k][j], left[k / 4].big[k % 4][j / 2 + j % 2 * 2], left[k / 4].small[k % 4][j / 2 + j % 2 * 2]);
    const uint32_t of_columns = k_tile + Shape::part(!second, true);
    if (second) {  // ds in rows of queries
      const uint32_t to = k_tile + Shape::kDs + warp % 4 / 2 * (kQueries * 128) + g % 4 * 4;
#pragma unroll
      for (int n = 0; n < kQueries / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const uint32_t at =
                to + (8 * n + 2 * t + e) * 128 + (((warp % 2 * 4 + half * 2 + g / 4) ^ (2 * t + e)) << 4);
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(left[n / 4].big[n % 4][half + 2 * e]) : "memory");
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + Shape::kOfDs), "r"(left[n / 4].small[n % 4][half + 2 * e])
                         : "memory");
          }
      show_parts();
    }
    const auto add_columns = [&](int c, const auto &beside) {
#pragma unroll
      for (int i = 0; i < kQueries / 32; ++i) {
        FloatProduct<kCols> product;
        product.start(left[i], of_columns + i * (kDim * 128) + c * 128, Shape::kPart);
        if (i == 0) beside();
        product.wait(left[i]);
#pragma unroll
        for (int j = 0; j < kCols / 2; ++j) sums[c / 2 + j] += product.sums[j];
      }
    };
    // While the second warpgroup stores ds the first begins its products.
    if (!second)
#pragma unroll
      for (int c = 0; c < kDim / 2; c += kCols) add_columns(c, [] {});
    __syncthreads();
    const int64_t tile_of_dq = (tile.b * z.heads + h) * query_tiles + query_tile;
    int *const turn = pass.turns + tile_of_dq;
    const bool first = !tile.of_before.has(query_tile), final = !tile.of_next.has(query_tile);
    int found = 0;
    if (second)
#pragma unroll
      for (int c = 0; c < kDim / 2; c += kCols) add_columns(c, [] {});
#pragma unroll
    for (int c = kDim / 2; c < kDim; c += kCols)
      add_columns(c, [&] {
        if (c > kDim / 2) return;
        wait_copies<0>();
        parting.part_rows(false);
        if (!pass.dq) parting.part_rows(true);
      });
    if (pass.dq && !first && lane == 0)
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(turn) : "memory");
    step = next;
    if (!pass.dq) continue;

    float part[kQueries / 2] = {};  // 64 columns of k by 32 queries
    const int column = warp / 4 * 64 + warp_row + g;
#pragma unroll
    for (int c = 0; c < kKeys / 32; ++c) {
      FloatFactor left;
      FloatProduct<kQueries> product;
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float of_k;
            const int at = column + 8 * half;
            asm volatile("ld.shared.f32 %0, [%1];"
                         : "=f"(of_k)
                         : "r"(float_piece<kDim>(k_tile, 32 * c + 8 * k + 4 * e + t, at / 4) + at % 4 * 4)
                         : "memory");
            split(of_k, left.big[k][half + 2 * e], left.small[k][half + 2 * e]);
          }
      product.start(left, k_tile + Shape::kDs + c * (kQueries * 128), Shape::kOfDs);
      if (c == 0) parting.part_rows(true);
      product.wait(left);
#pragma unroll
      for (int i = 0; i < kQueries / 2; ++i) part[i] += product.sums[i];
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
    const int query = query_tile * kQueries + t * kEach;
    float *const at = to_dq[query] + column;
    // Calls f(a sum, where it goes) for each that exists.
    const auto for_sums = [&](const auto &f) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int left = column + 8 * half < dim ? queries - query : 0;
        float *to = at + 8 * half;
#pragma unroll
        for (int i = 0; i < kEach; ++i, to += to_dq.stride)
          if (i < left) f(part[i / 2 * 4 + 2 * half + i % 2], to);
      }
    };
    if (!final && !first)
      for_sums([](float sum, float *to) {
        asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(sum) : "memory");
      });
    else if (!final) for_sums([](float sum, float *to) { __stcg(to, sum); });
    else if (first) for_sums([&](float sum, float *to) { __stcg(to, sum * q_scale); });
    else for_sums([&](float sum, float *to) { __stcg(to, (sum + __ldcg(to)) * q_scale); });
  }
  __syncthreads();
  pass_on();
  float *const to = second ? pass.dk : pass.dv;
  if (!to) return;
  const int columns = second ? dim : v_dim;
  const float times = second ? q_scale : tile.times;
  const HeadRows<float> rows = x.of_keys(to, tile.b, tile.kv, columns);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = tile.begin + warp_row + 8 * half + g;
    if (key >= tile.end) continue;
    float *const row = rows[key] + 2 * t;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
      if (8 * n + 2 * t < columns)
        *reinterpret_cast<float2 *>(row + 8 * n) =
            make_float2(sums[4 * n + 2 * half] * times, sums[4 * n + 2 * half + 1] * times);
  }
#endif
}

// ---------------------------------------------------------------------------------------------------------------- y

// A step's keys have tiles of rows of k, and of columns of v.
template <int kDim_, int kKeys_>
struct FloatWgmmaY : FloatShape<kDim_, 1, 8, kKeys_, 1> {
  using Base = FloatShape<kDim_, 1, 8, kKeys_, 1>;
  static constexpr int kPart = kKeys_ * Base::kRowBytes, kApart = 0, kStage = 0, kParts = 2 * kPart;
  static constexpr int kOwn = kParts + 4 * kPart, kShared = kOwn + Base::kRows * 8 + 1024;

  AOT_BOTH_SIDES static constexpr int part(bool, bool columns) { return kParts + columns * 2 * kPart; }
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    attention_float_wgmma_y_kernel(AttentionInputs<float> x, float *y, float *lse) {
#ifdef CUTE_ARCH_MMA_SM90A_ENABLED
  constexpr int kDim = Shape::kDim, kKeys = Shape::kOthers, kEach = kKeys / 4, kCols = 64;
  using Tile = QueryTile<float, Shape>;
  extern __shared__ __align__(1024) uint4 attention_shared[];
  char *const shared = reinterpret_cast<char *>(attention_shared) + (-shared_address(attention_shared) & 1023);
  const uint32_t tiles = shared_address(shared);
  const Tile tile(x, reinterpret_cast<int2 *>(shared + Shape::kOwn));
  const int dim = static_cast<int>(x.z.dim), v_dim = static_cast<int>(x.z.v_dim);
  const int t = lane_index() % 4, row = tile.begin + Tile::local(0, 0);

  const auto fetch = [&](int step) {
    const FloatParting<Shape> parting(tiles);
    const int first = tile.key(step) + parting.qb, at = parting.db * 4, left = tile.length - first;
    const float *of_k = tile.k[first] + at, *of_v = tile.v[first] + at;
    const int k_left = at < dim ? left : 0, v_left = at < v_dim ? left : 0;
#pragma unroll
    for (int j = 0; j < 4; ++j, of_k += kEach * tile.k.stride, of_v += kEach * tile.v.stride) {
      const uint32_t to = parting.from + 2 * j * Shape::kRowBytes;
      copy_async(to, j * kEach < k_left ? of_k : tile.k.data, j * kEach < k_left);
      copy_async(to + Shape::kPart, j * kEach < v_left ? of_v : tile.v.data, j * kEach < v_left);
    }
    commit_copies();
  };
  if (tile.steps) fetch(0);
  float of_queries[kDim / 8][4];
  {
    const HeadRows<const float> from = x.of_queries(x.q, tile.b, tile.h, x.z.dim);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool present = row + 8 * half < tile.end;
      const float *const at = from[present ? row + 8 * half : 0] + t;
#pragma unroll
      for (int k = 0; k < kDim / 8; ++k)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          of_queries[k][half + 2 * e] = present && 8 * k + 4 * e < dim ? at[8 * k + 4 * e] : 0;
    }
  }

  const FloatScores scores(x, tile.b, tile.h);
  const float scale = scores.plain ? scores.scale : 1;
  MmaSums<1, kDim> sums = {};
  float most[1][2] = {{-kInfinity, -kInfinity}}, total[1][2] = {};
  if (x.extra.sinks) {
    const float sink = x.sink(tile.h) * static_cast<float>(kLog2E);
#pragma unroll
    for (int half = 0; half < 2; ++half) most[0][half] = sink, total[0][half] = t == 0 && sink != -kInfinity ? 1 : 0;
  }
  wait_copies<0>();
  if (tile.steps) FloatParting<Shape>(tiles).part_rows(false);
#pragma unroll 1
  for (int step = 0; step < tile.steps; ++step) {
    show_parts();
    __syncthreads();
    const FloatParting<Shape> parting(tiles);
    fence_registers(of_queries);
    MmaSums<1, kKeys> s = {};
#pragma unroll
    for (int c = 0; c < kDim / 32; ++c) {
      FloatFactor left;
      FloatProduct<kKeys> product;
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int j = 0; j < 4; ++j) split(of_queries[4 * c + k][j], left.big[k][j], left.small[k][j]);
      product.start(left, tiles + Shape::part(false, false) + c * (kKeys * 128), Shape::kPart);
      if (c == 0) parting.part_columns(true);
      product.wait(left);
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) s[0][i / 4][i % 4] += product.sums[i];
    }
    show_parts();
    if (step + 1 < tile.steps) fetch(step + 1);

    typename Tile::Bits bits;
    const bool partial = tile.find_partial(bits, step);
    if (!scores.plain)
      add_to_scores<1, kKeys>(s, nullptr, [&](int, int n, int half, int e, float &score) {
        return scores.complete(score, row + 8 * half, tile.end, tile_key<kKeys>(tile.key(step), n, e), tile.length);
      });
    if (partial)  // whatever the score of a hidden key is
      for_scores<1, kKeys>([&](int i, int n, int half, int e, uint32_t bit) {
        if (!(bits[i] & bit)) s[i][n][2 * half + e] = -kInfinity;
      });
    weigh_scores<1, kKeys, kDim>(s, sums, most, total, scale);
    if (x.extra.dropout) {
      typename Tile::Bits kept;
      tile.find_kept(kept, step);
      for_scores<1, kKeys>([&](int i, int n, int half, int e, uint32_t bit) {
        if (!(kept[i] & bit)) s[i][n][2 * half + e] = 0;
      });
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kKeys / 32; ++i) {
      FloatFactor left;
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int j = 0; j < 4; ++j)  // j: 2 half + e
          split(s[0][4 * i + k][j], left.big[k][j / 2 + j % 2 * 2], left.small[k][j / 2 + j % 2 * 2]);
#pragma unroll
      for (int c = 0; c < kDim; c += kCols) {
        FloatProduct<kCols> product;
        product.start(left, tiles + Shape::part(true, true) + i * (kDim * 128) + c * 128, Shape::kPart);
        if (i == 0 && c == 0) {
          wait_copies<0>();
          parting.part_rows(false);
        }
        product.wait(left);
#pragma unroll
        for (int j = 0; j < kCols / 2; ++j) sums[0][c / 8 + j / 4][j % 4] += product.sums[j];
      }
    }
  }

  const float of_dropout = x.extra.dropout ? tile.times * static_cast<float>(x.extra.dropout.times) : tile.times;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = row + 8 * half;
    const float sum = sum_lanes<4>(total[0][half]);
    if (query >= tile.end) continue;
    if (lse && t == 0) lse[tile.row(query)] = (most[0][half] + log2f(sum)) * static_cast<float>(1 / kLog2E);
    if (!y) continue;
    const float times = sum == 0 ? 0 * of_dropout : of_dropout / sum;
    float *const to = x.of_results(y, tile.b, tile.h)[query] + 2 * t;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
      if (8 * n + 2 * t < v_dim)
        *reinterpret_cast<float2 *>(to + 8 * n) =
            make_float2(sums[0][n][2 * half] * times, sums[0][n][2 * half + 1] * times);
  }
#endif
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot
