// attention's gradients in one pass for calls without a mask or a bias: warps of keys and of queries.
//
// A block has kRows keys, 32 for each of its rows of warps, of which there are kAcross, each with kMine queries of a
// tile. p and ds stay in registers where a warp has them as left factors of dv and dk, and go through shared memory to
// the other warp of its keys, as it wants them: so a warp loads half as many right factors, of half of the columns.
#pragma once
#include "attention_mma_backward.cuh"

namespace aot {
inline namespace AOT_ISA {

template <int kDim_, int kDownWarps_, int kAcross_, int kOthers_, int kBlocks_>
struct PairShape {
  static constexpr int kDim = kDim_, kM = 2, kDownWarps = kDownWarps_, kAcross = kAcross_, kOthers = kOthers_;
  static constexpr int kBlocks = kBlocks_, kWarps = kDownWarps * kAcross, kThreads = 32 * kWarps;
  static constexpr int kWarpRows = 32, kRows = kWarpRows * kDownWarps, kMine = kOthers / kAcross;
  static constexpr int kColumns = kDim / kAcross;  // of dk and dv, of a warp
  static constexpr int kTile = kRows * kDim * 2, kOtherTile = kOthers * kDim * 2, kWeights = kRows * kOthers * 2;
  static constexpr int kNumbers = 2 * 2 * 4 * kOthers, kOfP = kAcross > 1 ? kWeights : 0;
  static constexpr int kStages = 2 * kTile, kP = kStages + 4 * kOtherTile, kDs = kP + kOfP, kLse = kDs + kWeights;
  static constexpr int kOwn = kLse + kNumbers, kShared = kOwn + kRows * 8;
  // A warp's part of dq.
  static constexpr int kDqRows = kOthers == 32 ? 16 : 32, kDqDown = kOthers / kDqRows, kDqWarps = kWarps / kDqDown;
  static constexpr int kDqM = kDqRows / 16, kDqColumns = kDim / kDqWarps, kDqWords = kDqM * kDqColumns / 2;
  static_assert(kDqColumns % 16 == 0);
};

template <int kMine>
struct Chunked {
  __device__ static constexpr int at(int r) { return r / kMine * kMine + Spread<kMine>::at(r % kMine); }
};

__device__ inline void store_four(uint32_t at, const uint32_t (&x)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}
__device__ inline void load_four(uint32_t (&x)[4], uint32_t at) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(at)
               : "memory");
}

// The bits of a lane's elements that dropout keeps. A lane has four adjacent keys, and half of the numbers of eight
// keys are those of another lane: each finds them for half of the queries, of which there are kMine / 4.
template <int kMine>
class MmaKeptPairs {
 public:
  static constexpr int kCalls = kMine / 8, kWords = kMine / 32;

  // key: of the warp, a multiple of 32.
  __device__ MmaKeptPairs(const MmaKept &keeps, int query, int key) : odd_(lane_index() / 4 % 2) {
    const uint32_t first = query + lane_index() % 4 * (kMine / 4) + odd_ * kCalls, eight = key / 8 + lane_index() / 8;
#pragma unroll
    for (int j = 0; j < kCalls; ++j) keeps.find(found_, j, first + j, eight);
  }
  // This ends the search: is_kept is known then.
  __device__ void exchange() {
    const uint32_t own = odd_ ? found_[1] : found_[0], out = odd_ ? found_[0] : found_[1];
    const uint32_t others = __shfl_xor_sync(~0u, out, 4);
    const uint32_t first = odd_ ? others : own, second = odd_ ? own : others;
    if constexpr (kWords == 2) bits_[0] = first, bits_[1] = second;
    else bits_[0] = first | second << kCalls;
  }
  // This is of key j of the lane, and its query i.
  __device__ bool is_kept(int j, int i) const { return bits_[i / 8] >> (8 * j + i % 8) & 1; }

 private:
  int odd_;
  uint32_t found_[2] = {}, bits_[kWords];
};

// kDrops: the call has dropout, and drops_fast.
template <typename T, class Shape, bool kDrops>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks) attention_pairs_kernel(MmaPass<T> pass) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  if constexpr (!runs_here(Shape::kShared, Shape::kShared <= kMmaShared)) return;
  constexpr int kDim = Shape::kDim, kM = 2, kQueries = Shape::kOthers, kMine = Shape::kMine, kAcross = Shape::kAcross;
  constexpr int kK = kMine / 16, kAll = kQueries / 16, kColumns = Shape::kColumns;
  extern __shared__ __align__(1024) uint4 attention_shared[];
  const AttentionInputs<T> &x = pass.x;
  const AttentionSizes &z = x.z;
  const uint32_t k_tile = shared_address(attention_shared), v_tile = k_tile + Shape::kTile;
  const uint32_t p_tile = k_tile + Shape::kP, ds_tile = k_tile + Shape::kDs, numbers = k_tile + Shape::kLse;
  const auto stage = [=](int parity) { return k_tile + Shape::kStages + parity * (2 * Shape::kOtherTile); };
  using Keys = std::conditional_t<kDrops, Adjacent<kM>, InOrder>;
  const KeyTile<T, Shape, Keys> tile(
      pass, reinterpret_cast<int2 *>(reinterpret_cast<char *>(attention_shared) + Shape::kOwn));
  const int dim = static_cast<int>(z.dim), v_dim = static_cast<int>(z.v_dim), queries = static_cast<int>(z.queries);
  const int of_head = tile.met.end - tile.met.begin, query_tiles = (queries - 1) / kQueries + 1;
  const int lane = lane_index(), eighth = lane % 8, low = lane / 8 % 2, high = lane / 16;
  const int down = warp_index() / kAcross, across = warp_index() % kAcross;

  const auto fetch = [&](MmaStep next) {
    const int64_t h = tile.kv * z.group() + next.head;
    const int query = (tile.met.begin + next.tile) * kQueries;
    using Order = Chunked<kMine>;
    copy_tile<Shape, kQueries, Order>(stage(next.parity), x.of_queries(x.q, tile.b, h, z.dim), query, queries, dim);
    copy_tile<Shape, kQueries, Order>(stage(next.parity) + Shape::kOtherTile, x.of_results(x.dy, tile.b, h), query,
                                      queries, v_dim);
    if (threadIdx.x < 2 * kQueries) {
      const int of_delta = threadIdx.x / kQueries, i = query + Order::at(threadIdx.x % kQueries);
      const float *const from = of_delta ? x.delta : pass.lse;
      copy_async<4>(numbers + next.parity * (8 * kQueries) + threadIdx.x * 4,
                    from + x.row(tile.b, h, i < queries ? i : 0), i < queries);
    }
  };
  copy_rows<Shape, Shape::kRows, Keys>(k_tile, x.of_keys(x.k, tile.b, tile.kv, z.dim), tile.begin, tile.last, dim);
  copy_rows<Shape, Shape::kRows, Keys>(v_tile, x.of_keys(x.v, tile.b, tile.kv, z.v_dim), tile.begin, tile.last, v_dim);
  MmaStep step;
  if (of_head) fetch(step);
  commit_copies();

  const MmaScores scores(z);
  const bool fused = scores.inner == 0;
  const float scale = fused ? scores.scale : 1;
  const float kept_times = kDrops ? static_cast<float>(x.extra.dropout.times) : 1;
  const float over_times = kDrops ? fast_reciprocal(kept_times) : 1;
  const float q_scale = static_cast<float>(z.scale) * tile.times * kept_times;
  MmaSums<kM, kColumns> dk_sums = {}, dv_sums = {};
  using Kept = std::conditional_t<kDrops, MmaKeptPairs<kMine>, Nothing>;
  const std::conditional_t<kDrops, MmaKept, Nothing> keeps(x.extra.dropout);
  int *turn_before = nullptr;
  // dv or dk: weights of this warp's queries, and of those of the other
  const auto add_product = [&](MmaSums<kM, kColumns> &sums, const MmaFactor<kM, kMine> &weights, uint32_t weights_tile,
                               uint32_t b) {
    const LaneRows<kDim> of_b(b, 8 * low + eighth, 2 * (across * kColumns / 16) + high);
    const auto rows = [&](int chunk) {
      return [=](uint32_t (&to)[4], int k, int n) {
        load_transposed_matrices(to, of_b(n) + (chunk * kMine + k * 16) * kDim * 2);
      };
    };
    multiply_ahead<kM, kColumns, kK>(
        sums,
        [&](uint32_t (&to)[4], int k, int i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) to[j] = weights[i][k][j];
        },
        rows(across), T());
    if constexpr (kAcross > 1)
      multiply_ahead<kM, kColumns, kK>(
          sums,
          [&](uint32_t (&to)[4], int k, int i) {
            const uint32_t at = weights_tile + ((2 * down + i) * kAll + (1 - across) * kK + k) * 512;
            if (weights_tile == p_tile) load_four(to, at + lane * 16);
            else load_matrices(to, at + lane * 16);
          },
          rows(1 - across), T());
  };
#pragma unroll 1
  for (; of_head && step.head < z.group(); step = step.next(of_head)) {
    next_step(step, of_head, z.group(), fetch);
    const uint32_t q_tile = stage(step.parity), dy_tile = q_tile + Shape::kOtherTile;
    const int query_tile = tile.met.begin + step.tile, first_query = query_tile * kQueries + across * kMine;
    const int64_t h = tile.kv * z.group() + step.head;
    uint32_t bits[kM] = {};
    const bool partial = first_query < tile.whole_begin || first_query + kMine > tile.whole_end;
    if (partial) {
#pragma unroll
      for (int i = 0; i < kM; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = down * 32 + Keys::at(16 * i + 8 * half + lane / 4), key = tile.begin + row;
          int2 range = within(z.seeing(key, key + 1), first_query, kMine);
          if (x.extra.offsets) range = within_sequence(range, tile.own[row], first_query);
          if (key < tile.last) bits[i] |= lane_bits<kMine>(range) << 16 * half;
        }
    }
    MmaFactor<kM, kMine> p = {}, ds = {};
    if (!partial || __any_sync(~0u, bits[0] | bits[1])) {
      MmaSums<kM, kMine> s = {}, dp = {};
      const auto product = [&](MmaSums<kM, kMine> &sums, uint32_t keys, uint32_t others) {
        const LaneRows<kDim> of_a(keys + down * 32 * kDim * 2, 8 * low + eighth, high),
            of_b(others + across * kMine * kDim * 2, 8 * high + eighth, low);
        multiply_ahead<kM, kMine, kDim / 16>(
            sums, [&](uint32_t (&to)[4], int k, int i) { load_matrices(to, of_a(k) + i * 16 * kDim * 2); },
            [&](uint32_t (&to)[4], int k, int n) { load_matrices(to, of_b(k) + n * 16 * kDim * 2); }, T());
      };
      const float *const lse =
          reinterpret_cast<const float *>(reinterpret_cast<const char *>(attention_shared) + Shape::kLse) +
          step.parity * (2 * kQueries) + across * kMine + lane % 4 * 2;
      const float *const delta = lse + kQueries;
      Kept kept(keeps.of(tile.b * z.heads + h), first_query, tile.begin + down * 32);
      product(s, k_tile, q_tile);
      if (kDrops || fused) {
        for_scores<kM, kMine>([&](int i, int n, int half, int e, uint32_t) {
          float &score = s[i][n][2 * half + e];
          score = fast_exp2(score * scale - lse[8 * n + e]);
        });
        product(dp, v_tile, dy_tile);
      } else {
        product(dp, v_tile, dy_tile);
        for_scores<kM, kMine>([&](int i, int n, int half, int e, uint32_t) {
          float slope, &score = s[i][n][2 * half + e], &of_p = dp[i][n][2 * half + e];
          score = fast_exp2(scores(score, &slope) - lse[8 * n + e]);
          of_p = of_p * slope + delta[8 * n + e] * (1 - slope);
        });
      }
      if (partial)
        for_scores<kM, kMine>([&](int i, int n, int half, int e, uint32_t bit) {
          if (!(bits[i] & bit)) s[i][n][2 * half + e] = 0, dp[i][n][2 * half + e] = 0;
        });
      if constexpr (kDrops) {
        kept.exchange();
        for_scores<kM, kMine>([&](int i, int n, int half, int e, uint32_t) {
          float &weight = s[i][n][2 * half + e], &of_p = dp[i][n][2 * half + e];
          const float p_delta = weight * (delta[8 * n + e] * over_times);
          if (!kept.is_kept(2 * i + half, 2 * n + e)) weight = 0;
          of_p = weight * of_p - p_delta;
        });
      }
      round_weights<kM, kMine>(p, s, T());
      if constexpr (!kDrops)
        for_scores<kM, kMine>([&](int i, int n, int half, int e, uint32_t) {
          float &of_p = dp[i][n][2 * half + e];
          of_p = s[i][n][2 * half + e] * (of_p - delta[8 * n + e]);
        });
      round_weights<kM, kMine>(ds, dp, T());
    }
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int k = 0; k < kK; ++k) {
        const uint32_t at = ((2 * down + i) * kAll + across * kK + k) * 512;
        if constexpr (kAcross > 1) store_four(p_tile + at + lane * 16, p[i][k]);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          asm volatile("st.shared.u32 [%0], %1;" ::"r"(ds_tile + at + j * 128 + lane * 4), "r"(ds[i][k][j]) : "memory");
      }
    __syncthreads();
    const int64_t tile_of_dq = (tile.b * z.heads + h) * query_tiles + query_tile;
    int *const turn = pass.turns + tile_of_dq;
    const bool first = !tile.of_next.has(query_tile), final = !tile.of_before.has(query_tile);
    int found = 0;
    if (pass.dq) {
      if (turn_before && threadIdx.x == Shape::kThreads - 32)
        asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turn_before), "r"(tile.number + 1) : "memory");
      turn_before = final ? nullptr : turn;
      if (!first && lane == 0) asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(turn) : "memory");
    }
    add_product(dv_sums, p, p_tile, dy_tile);
    add_product(dk_sums, ds, ds_tile, q_tile);
    if (!pass.dq) continue;
    constexpr int kDqM = Shape::kDqM, kDqColumns = Shape::kDqColumns;
    const int dq_row = warp_index() / Shape::kDqWarps * Shape::kDqRows;
    const int dq_column = warp_index() % Shape::kDqWarps * kDqColumns;
    MmaSums<kDqM, kDqColumns> sums = {};
    {
      const uint32_t of_a = ds_tile + dq_row / 16 * 512 + (low * 2 + high) * 128 + eighth * 16;
      const LaneRows<kDim> of_b(k_tile, 8 * low + eighth, dq_column / 8 + high);
      multiply_ahead<kDqM, kDqColumns, Shape::kRows / 16>(
          sums, [&](uint32_t (&to)[4], int k, int i) { load_transposed_matrices(to, of_a + (k * kAll + i) * 512); },
          [&](uint32_t (&to)[4], int k, int n) { load_transposed_matrices(to, of_b(n) + k * 16 * kDim * 2); }, T());
    }
    if (!first) {
      if (lane == 0)
        while (found != tile.number + 2) {
          __nanosleep(20);
          asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(turn) : "memory");
        }
      __syncwarp();
    }
    float *const at = pass.sums + (tile_of_dq * Shape::kWarps + warp_index()) * (32 * Shape::kDqWords) + lane * 4;
    constexpr int kFours = Shape::kDqWords / 4, kAlong = kDqColumns / 8;
    if (!final) {
      if (first) {
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
          const float (&four)[4] = sums[i / kAlong][i % kAlong];
          __stcg(reinterpret_cast<float4 *>(at + i * 128), make_float4(four[0], four[1], four[2], four[3]));
        }
      } else {
#pragma unroll
        for (int i = 0; i < kFours; ++i) add_in_memory(at + i * 128, sums[i / kAlong][i % kAlong]);
      }
      continue;
    }
    if (!first) {
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
        const float4 more = __ldcg(reinterpret_cast<const float4 *>(at + i * 128));
        float (&four)[4] = sums[i / kAlong][i % kAlong];
        four[0] += more.x, four[1] += more.y, four[2] += more.z, four[3] += more.w;
      }
    }
    const HeadRows<T> to = x.of_queries(pass.dq, tile.b, h, z.dim);
#pragma unroll
    for (int i = 0; i < kDqM; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query = query_tile * kQueries + Chunked<kMine>::at(dq_row + 16 * i + 8 * half + lane / 4);
        if (query >= queries) continue;
        T *const row = to[query] + dq_column + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < kAlong; ++n)
          if (dq_column + 8 * n < dim)
            *reinterpret_cast<uint32_t *>(row + 8 * n) =
                narrow_word(sums[i][n][2 * half] * q_scale, sums[i][n][2 * half + 1] * q_scale, T());
      }
  }
  __syncthreads();
  if (pass.dq && turn_before && threadIdx.x == Shape::kThreads - 32)
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turn_before), "r"(tile.number + 1) : "memory");
  const int row = tile.begin + down * 32, column = across * kColumns;
  const float times = kDrops ? tile.times * static_cast<float>(x.extra.dropout.times) : tile.times;
  const auto shifted = [=](HeadRows<T> to) { return HeadRows<T>{to.data + column, to.stride}; };
  if (pass.dk)
    store_sums<kM, kColumns, Keys>(dk_sums, shifted(x.of_keys(pass.dk, tile.b, tile.kv, z.dim)), row, tile.end,
                                   dim - column, [=](int, int) { return q_scale; });
  if (pass.dv)
    store_sums<kM, kColumns, Keys>(dv_sums, shifted(x.of_keys(pass.dv, tile.b, tile.kv, z.v_dim)), row, tile.end,
                                   v_dim - column, [=](int, int) { return times; });
#endif
}

// ------------------------------------------------------------------------------------------------------- launchers

// Large: where a block may have so much shared memory; Small: where it has no more than 99 KiB.
template <int kDim>
struct PairShapes;
template <>
struct PairShapes<64> {
  using Large = PairShape<64, 4, 2, 128, 1>;
  using Small = PairShape<64, 4, 2, 64, 1>;
};
template <>
struct PairShapes<128> {
  using Large = PairShape<128, 4, 2, 64, 1>;
  using Small = PairShape<128, 2, 2, 32, 2>;
};

template <class Shape, bool kDrops, typename T>
Status run_mma_pairs_of(const char *op, const AttentionInputs<T> &x, const T *y, float *delta, T *dq, T *dk, T *dv,
                        float *space, void *stream) {
  const AttentionSizes &z = x.z;
  const int64_t tiles = z.batch * z.heads * ceil_div(z.queries, Shape::kOthers);
  const int64_t padded = z.batch * z.heads * ceil_div(z.queries, 128) * 128;
  float *const sums = reinterpret_cast<float *>((reinterpret_cast<uintptr_t>(space) + 15) / 16 * 16);
  float *const lse = sums + padded * Shape::kDim;
  const MmaPass<T> pass = {x, dq, dk, dv, sums, reinterpret_cast<int *>(lse + padded), lse, heads_at_once(z)};
  if (z.rows())
    AOT_TRY(launch_kernel(op, attention_pass_begin_kernel<T>,
                          {grid_size(ceil_div(z.rows(), kDeltaBlock / 8)), kDeltaBlock}, stream, pass, y, delta, tiles,
                          every_query_meets(z, x.lengths != nullptr, x.extra.offsets != nullptr)));
  return launch_mma<Shape>(op, attention_pairs_kernel<T, Shape, kDrops>, z.batch * z.kv_heads, z.keys,
                           x.extra.offsets ? Shape::kShared : Shape::kOwn, stream, pass);
}

// f(PairShapes<kDim>()) of a call whose head_dims are up to 128.
template <class F>
auto dispatch_pairs(const AttentionSizes &z, F f) {
  return std::max(z.dim, z.v_dim) <= 64 ? f(PairShapes<64>()) : f(PairShapes<128>());
}

// Whether these kernels take a call that mma_pass_takes.
template <typename T>
bool mma_pairs_takes(const AttentionInputs<T> &x, int shared_memory) {
  if (x.extra.mask || x.extra.bias) return false;
  const int large = dispatch_pairs(x.z, [](auto shapes) { return decltype(shapes)::Large::kShared; });
  return !x.extra.dropout || (drops_fast(x.z) && large <= shared_memory);
}

template <typename T>
Status run_mma_pairs(const char *op, const AttentionInputs<T> &x, const T *y, float *delta, T *dq, T *dk, T *dv,
                     float *space, int shared_memory, void *stream) {
  return dispatch_pairs(x.z, [&](auto shapes) {
    using Shapes = decltype(shapes);
    static_assert(Shapes::Small::kShared <= kMmaShared);
    const auto of = x.extra.dropout                           ? run_mma_pairs_of<typename Shapes::Large, true, T>
                    : Shapes::Large::kShared <= shared_memory ? run_mma_pairs_of<typename Shapes::Large, false, T>
                                                              : run_mma_pairs_of<typename Shapes::Small, false, T>;
    return of(op, x, y, delta, dq, dk, dv, space, stream);
  });
}

}  // namespace AOT_ISA
}  // namespace aot
