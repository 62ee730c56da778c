// The backward of attention in 16 bits on Hopper (attention_wgmma.cuh) at head sizes above 128: dq, then dk with dv.
//
// A head of 256 has one result of 64 rows in the registers of a warpgroup. dq is as at 128: each warpgroup has 64
// queries. Of 64 keys, one warpgroup has dv and one dk: the first computes s, and sends p through shared memory to the
// second, which computes dp. A thread finds there what the same thread of the first has in its registers. So each
// product is computed by one warpgroup from operands of 64 rows, and of the weights nothing else leaves registers.
#include "attention_wgmma_backward.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

constexpr int kWideThreads = 384, kWideStep = 64;  // step: rows of what tiles go through

// kDim: head_dim of q and k, and kVDim that of v, padded with zeros.
template <int kDim_, int kVDim_>
struct WideShape {
  static constexpr int kDim = kDim_, kVDim = kVDim_;
  static constexpr int kTile = kWideStep * kDim * 2, kVTile = kWideStep * kVDim * 2;  // bytes of a step
};

#ifdef CUTE_ARCH_MMA_SM90A_ENABLED

// The tiles of a block, of which the thread that loads leaves each for the others: a copy of their own would take
// registers that they do not have.
template <class Tile>
struct WideTiles {
  Ring<2> tiles;
  Tile tile[2];

  // f(tile), by the thread that loads; and by each one that reads.
  template <class Shape, typename T, class F>
  __device__ void find(const AttentionWgmma<T> &c, F f) {
    WgmmaTiles<Shape, T> places(c, nullptr, false);
    bool any = true;
    for (int n = 0; any; ++n) {
      any = places.next();
      tiles.wait_empty(n);
      Tile &to = tile[n % 2];
      if (!any) to.b = -1;
      else if constexpr (std::is_same_v<Tile, WgmmaQueries<Shape>>) to = places.tile();
      else to = Tile(c, places.key_tile(), places.head());
      tiles.filled(n);
      if (any) f(to);
    }
  }
  template <class F>
  __device__ void each(F f) {
    for (int n = 0;; ++n) {
      tiles.wait(n);
      const Tile &of = tile[n % 2];
      if (of.b < 0) return;
      f(of);
      tiles.loaded(n);
    }
  }
};

// The tile of k or v. Each warp holds the first 64 columns of its rows in registers: products are limited by what they
// read of shared memory, and of these no step reads anything there.
template <typename T, class Shape>
struct HeldRows {
  static constexpr int kHeld = 4;
  uint32_t tile, held[kHeld][4];

  __device__ explicit HeldRows(uint32_t of) : tile(of) {
    const int lane = lane_index(), row = warp_index() % 4 * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) load_matrices(held[k], tile + row * 128 + ((2 * k + lane / 16) ^ lane % 8) * 16);
  }
  // s = the products of these rows and those of b.
  __device__ void start(float (&s)[kWideStep / 2], uint32_t b) {
    const uint64_t of_a = along_rows(tile, 0), of_b = along_rows(b, 0);
    fence_registers(s), fence_registers(held);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < Shape::kDim / 16; ++k) {
      const uint64_t at = of_b + units_along(kWideStep, k);
      if (k < kHeld) Wgmma<T, kWideStep, false, false>::run(held[k % kHeld], at, s, k > 0);
      else Wgmma<T, kWideStep, false, false>::run(of_a + units_along(Shape::kRows, k), at, s, k > 0);
    }
    wgmma_end();
  }
};

#endif

// dq of 128 queries. Keys have two stages and values one, of which products are done before those of ds.
template <typename T, class Wide>
struct WideDq {
  static constexpr int kDim = Wide::kDim, kVDim = Wide::kVDim;
  using Shape = WgmmaShape<kDim, 2, kWideStep, 2, false>;
  using OfValues = WgmmaShape<kVDim, 2, kWideStep, 2, false>;
  static constexpr int kPreparing = 3;  // warps
  static constexpr int kAtKeys = Shape::kTile + OfValues::kTile, kAtValues = kAtKeys + 2 * Wide::kTile,
                       kAtNumbers = kAtValues + Wide::kVTile;
  static constexpr int kShared = kAtNumbers + 2 * Shape::kRows * 8;

#ifdef CUTE_ARCH_MMA_SM90A_ENABLED
  using Tile = WgmmaQueries<Shape>;
  struct Barriers : WideTiles<Tile> {
    Ring<1> rows, v;
    Ring<2> k, numbers;

    __device__ void init() {
      this->tiles.init(256 + 32 * kPreparing), rows.init(8), v.init(8), k.init(8), numbers.init(256, 32 * kPreparing);
    }
  };
  const AttentionWgmma<T> &c;
  Barriers &barriers;
  uint32_t q_tile;

  __device__ uint32_t dy_tile() const { return q_tile + Shape::kTile; }
  __device__ uint32_t k_tile(int i) const { return q_tile + kAtKeys + i % 2 * Wide::kTile; }
  __device__ uint32_t v_tile() const { return q_tile + kAtValues; }
  // lse, in units of log(2), and delta of a tile's queries.
  __device__ float2 *numbers(int i) const {
    return static_cast<float2 *>(__cvta_shared_to_generic(q_tile + kAtNumbers + i % 2 * Shape::kRows * 8));
  }
  __device__ void load() const {
    int tiles = 0, steps = 0;
    barriers.template find<Shape>(c, [&](const Tile &tile) {
      uint64_t *const rows = barriers.rows.fill(tiles++, kAtKeys);
      for (int g = 0; g < 2; ++g) {
        const int at = g * 64 * 128, begin = tile.begin + 64 * g;
        load_tile<kDim>(c.q, q_tile + at, rows, Shape::kRows, begin, tile.h, tile.b);
        load_tile<kVDim>(c.dy, dy_tile() + at, rows, Shape::kRows, begin, tile.h, tile.b);
      }
      for (int i = 0; i < tile.steps; ++i, ++steps) {
        uint64_t *const k = barriers.k.fill(steps, Wide::kTile);
        load_tile<kDim>(c.k, k_tile(steps), k, kWideStep, tile.key(i), tile.kv, tile.b);
        uint64_t *const v = barriers.v.fill(steps, Wide::kVTile);
        load_tile<kVDim>(c.v, v_tile(), v, kWideStep, tile.key(i), tile.kv, tile.b);
      }
    });
  }

  // As WgmmaDq has it.
  __device__ void prepare(int warp) const {
    int tiles = 0;
    barriers.each([&](const Tile &tile) {
      barriers.numbers.wait_empty(tiles);
#pragma unroll 1
      for (int i = warp; i < Shape::kRows / 8; i += kPreparing) {
        const int row = 8 * i + lane_index() / 4, query = tile.begin + row;
        const bool present = query < tile.end, first = lane_index() % 4 == 0;
        const int64_t at = c.x.row(tile.b, tile.h, query);
        const float lse = present && first ? base_of<Shape>(c.x.lse[at]) : kInfinity;
        const float delta = sum_lanes<4>(present ? partial_delta<kVDim>(c, tile.b, tile.h, query) : 0);
        if (first) numbers(tiles)[row] = {lse, delta};
        if (first && present) c.delta[at] = delta;
      }
      barriers.numbers.filled(tiles++);
    });
  }

  __device__ void compute(int group) const {
    const float scale = static_cast<float>(c.x.z.scale * kLog2E);
    int tiles = 0, steps = 0;
    barriers.each([&](const Tile &tile) {
      float sums[kDim / 2];
#pragma unroll
      for (int n = 0; n < kDim / 2; ++n) sums[n] = 0;
      barriers.numbers.wait(tiles);
      const float2 *const of_row = numbers(tiles) + tile.query(0) - tile.begin;
      const float2 rows[] = {of_row[0], of_row[8]};
      barriers.numbers.loaded(tiles);
      uint32_t ds[kWideStep / 16][4];
      const int own = tile.steps_of(c, group);
      barriers.rows.wait(tiles);
#pragma unroll 1
      for (int i = 0; i < own; ++i, ++steps) {
        float s[kWideStep / 2], dp[kWideStep / 2];
        barriers.k.wait(steps);
        if (tile.key(i) + kWideStep > tile.length && tile.length < c.keys)
          clear_rows<Shape>(k_tile(steps), tile.length - tile.key(i), group);
        start_rows<Shape>(s, q_tile, 64 * group, k_tile(steps), T());
        wgmma_wait<1>();
        fence_registers(sums), fence_registers(ds);  // whose registers dp may have
        if (i) barriers.k.release(steps - 1);
        barriers.v.wait(steps);
        start_rows<OfValues>(dp, dy_tile(), 64 * group, v_tile(), T());
        wgmma_wait<1>();
        fence_registers(s);
#pragma unroll
        for (int n = 0; n < kWideStep / 2; ++n) s[n] = fast_exp2(fmaf(s[n], scale, -rows[n / 2 % 2].x));
        tile.hide(c, i, s, 0);
        wgmma_wait<0>();
        fence_registers(dp);
        barriers.v.release(steps);
        if (i == own - 1) barriers.rows.release(tiles);
#pragma unroll
        for (int n = 0; n < kWideStep / 2; ++n) s[n] = s[n] == 0 ? 0 : s[n] * (dp[n] - rows[n / 2 % 2].y);
        round_to_factor(ds, s, T());
        start_weights<Shape>(sums, ds, k_tile(steps), true, T());
      }
      wgmma_wait<0>();
      fence_registers(sums);
      if (own) barriers.k.release(steps - 1);
      else barriers.rows.release(tiles);
      for (int i = own; i < tile.steps; ++i, ++steps) {
        barriers.k.wait(steps), barriers.k.release(steps);
        barriers.v.wait(steps), barriers.v.release(steps);
      }
      ++tiles;
      const float times = static_cast<float>(c.x.z.scale) * tile.times, both[] = {times, times};
      const int dim = static_cast<int>(c.x.z.dim);
      store_rows<kDim>(sums, c.x.of_queries(c.dq, tile.b, tile.h, dim), tile.begin + 64 * group, tile.end, dim, both);
    });
  }
#endif
};

// dk and dv of 64 keys.
template <typename T, class Wide>
struct WideDkv {
  static constexpr int kDim = Wide::kDim, kVDim = Wide::kVDim;
  using Shape = WgmmaShape<kDim, 1, kWideStep, 2, false>;
  using OfValues = WgmmaShape<kVDim, 1, kWideStep, 2, false>;
  static constexpr int kPreparing = 1;  // warps
  static constexpr int kStep = Wide::kTile + Wide::kVTile, kAtWeights = 3 * kStep, kWeights = kWideStep * kWideStep * 4;
  static constexpr int kAtNumbers = kAtWeights + 2 * kWeights, kNumbers = 4 * kWideStep;
  static constexpr int kShared = kAtNumbers + 4 * kNumbers;

#ifdef CUTE_ARCH_MMA_SM90A_ENABLED
  using Tile = WgmmaKeys<Shape>;
  using At = typename Tile::At;
  // lse comes with q, and delta with dy.
  struct Barriers : WideTiles<Tile> {
    Ring<1> k, v;
    Ring<2> q, dy, weights;

    __device__ void init() {
      this->tiles.init(256 + 32 * kPreparing), k.init(128), v.init(128), q.init(256, 33), dy.init(256, 33),
          weights.init(128, 128);
    }
  };
  const AttentionWgmma<T> &c;
  Barriers &barriers;
  uint32_t k_tile;

  __device__ uint32_t v_tile() const { return k_tile + Wide::kTile; }
  __device__ uint32_t q_tile(int i) const { return k_tile + kStep + i % 2 * kStep; }
  __device__ uint32_t dy_tile(int i) const { return q_tile(i) + Wide::kTile; }
  __device__ uint32_t weights(int i) const {
    return k_tile + kAtWeights + i % 2 * kWeights + static_cast<int>(threadIdx.x) % 128 * 16;
  }
  __device__ float *lse(int i) const {
    return static_cast<float *>(__cvta_shared_to_generic(k_tile + kAtNumbers + i % 2 * 2 * kNumbers));
  }
  __device__ float *delta(int i) const { return lse(i) + kWideStep; }
  __device__ void load() const {
    int tiles = 0, steps = 0;
    barriers.template find<Shape>(c, [&](const Tile &tile) {
      load_tile<kDim>(c.k, k_tile, barriers.k.fill(tiles, Wide::kTile), kWideStep, tile.begin, tile.kv, tile.b);
      At at = {};
      for (int i = 0; i < tile.steps; ++i, ++steps, tile.go_on(at)) {
        const int h = tile.kv * c.group + at.of_group, query = tile.query(at);
        load_tile<kDim>(c.q, q_tile(steps), barriers.q.fill(steps, Wide::kTile), kWideStep, query, h, tile.b);
        if (i == 0) load_values(tile, tiles);
        load_tile<kVDim>(c.dy, dy_tile(steps), barriers.dy.fill(steps, Wide::kVTile), kWideStep, query, h, tile.b);
      }
      if (!tile.steps) load_values(tile, tiles);
      ++tiles;
    });
  }
  __device__ void load_values(const Tile &tile, int tiles) const {
    load_tile<kVDim>(c.v, v_tile(), barriers.v.fill(tiles, Wide::kVTile), kWideStep, tile.begin, tile.kv, tile.b);
  }

  // Numbers are on their way to registers while their stage is not yet empty.
  __device__ void prepare(int) const {
    const int lane = lane_index();
    int steps = 0;
    barriers.each([&](const Tile &tile) {
      At at = {};
      for (int i = 0; i < tile.steps; ++i, ++steps, tile.go_on(at)) {
        const int query = tile.query(at) + lane;
        const int row = ((tile.b * c.heads_of_rows + tile.kv) * c.group + at.of_group) * c.queries + query;
        float of_row[2], less[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const bool present = query + 32 * j < c.queries;
          of_row[j] = present ? c.x.lse[row + 32 * j] : kInfinity;
          less[j] = present ? c.x.delta[row + 32 * j] : 0;
        }
        barriers.q.wait_empty(steps);
#pragma unroll
        for (int j = 0; j < 2; ++j) lse(steps)[lane + 32 * j] = base_of<Shape>(of_row[j]);
        barriers.q.filled(steps);
        barriers.dy.wait_empty(steps);
#pragma unroll
        for (int j = 0; j < 2; ++j) delta(steps)[lane + 32 * j] = less[j];
        barriers.dy.filled(steps);
      }
    });
  }

  __device__ void compute(int group) const {
    if (group == 0) compute_dv();
    else compute_dk();
  }
  __device__ void compute_dv() const {
    const float scale = static_cast<float>(c.x.z.scale * kLog2E);
    int tiles = 0, steps = 0;
    barriers.each([&](const Tile &tile) {
      float dv[kVDim / 2];
#pragma unroll
      for (int n = 0; n < kVDim / 2; ++n) dv[n] = 0;
      uint32_t p[kWideStep / 16][4];
      At at = {};
      barriers.k.wait(tiles);
      HeldRows<T, Shape> k(k_tile);
#pragma unroll 1
      for (int i = 0; i < tile.steps; ++i, ++steps, tile.go_on(at)) {
        float s[kWideStep / 2];
        barriers.q.wait(steps);
        k.start(s, q_tile(steps));
        wgmma_wait<1>();
        fence_registers(dv), fence_registers(p);
        if (i) barriers.dy.loaded(steps - 1);
        wgmma_wait<0>();
        fence_registers(s);
        if (i == tile.steps - 1) barriers.k.loaded(tiles);
        const float2 *const of_step = reinterpret_cast<const float2 *>(lse(steps)) + lane_index() % 4;
#pragma unroll
        for (int n = 0; n < kWideStep / 8; ++n) {
          const float2 base = of_step[4 * n];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float *const pair = &s[4 * n + 2 * half];
            pair[0] = fast_exp2(fmaf(pair[0], scale, -base.x)), pair[1] = fast_exp2(fmaf(pair[1], scale, -base.y));
          }
        }
        tile.hide(c, at, s, 0);
        barriers.q.loaded(steps);
        barriers.weights.wait_empty(steps);
#pragma unroll
        for (int n = 0; n < kWideStep / 8; ++n)
          asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(weights(steps) + 2048 * n), "f"(s[4 * n]),
                       "f"(s[4 * n + 1]), "f"(s[4 * n + 2]), "f"(s[4 * n + 3])
                       : "memory");
        barriers.weights.filled(steps);
        round_to_factor(p, s, T());
        barriers.dy.wait(steps);
        start_weights<OfValues>(dv, p, dy_tile(steps), true, T());
      }
      wgmma_wait<0>();
      fence_registers(dv);
      if (tile.steps) barriers.dy.loaded(steps - 1);
      else barriers.k.loaded(tiles);
      ++tiles;
      const float both[] = {tile.times, tile.times};
      const int v_dim = static_cast<int>(c.x.z.v_dim);
      if (c.dv) store_rows<kVDim>(dv, c.x.of_keys(c.dv, tile.b, tile.kv, v_dim), tile.begin, tile.end, v_dim, both);
    });
  }
  __device__ void compute_dk() const {
    int tiles = 0, steps = 0;
    barriers.each([&](const Tile &tile) {
      float dk[kDim / 2];
#pragma unroll
      for (int n = 0; n < kDim / 2; ++n) dk[n] = 0;
      uint32_t ds[kWideStep / 16][4];
      barriers.v.wait(tiles);
      HeldRows<T, OfValues> v(v_tile());
#pragma unroll 1
      for (int i = 0; i < tile.steps; ++i, ++steps) {
        float dp[kWideStep / 2];
        barriers.dy.wait(steps);
        v.start(dp, dy_tile(steps));
        wgmma_wait<1>();
        fence_registers(dk), fence_registers(ds);
        if (i) barriers.q.loaded(steps - 1);
        wgmma_wait<0>();
        fence_registers(dp);
        if (i == tile.steps - 1) barriers.v.loaded(tiles);
        const float2 *const of_step = reinterpret_cast<const float2 *>(delta(steps)) + lane_index() % 4;
        barriers.weights.wait(steps);
#pragma unroll
        for (int n = 0; n < kWideStep / 8; ++n) {
          const float2 less = of_step[4 * n];
          float4 p;
          asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                       : "=f"(p.x), "=f"(p.y), "=f"(p.z), "=f"(p.w)
                       : "r"(weights(steps) + 2048 * n)
                       : "memory");
          float *const four = &dp[4 * n];
          four[0] = p.x == 0 ? 0 : p.x * (four[0] - less.x), four[1] = p.y == 0 ? 0 : p.y * (four[1] - less.y);
          four[2] = p.z == 0 ? 0 : p.z * (four[2] - less.x), four[3] = p.w == 0 ? 0 : p.w * (four[3] - less.y);
        }
        barriers.weights.loaded(steps), barriers.dy.loaded(steps);
        round_to_factor(ds, dp, T());
        barriers.q.wait(steps);
        start_weights<Shape>(dk, ds, q_tile(steps), true, T());
      }
      wgmma_wait<0>();
      fence_registers(dk);
      if (tile.steps) barriers.q.loaded(steps - 1);
      else barriers.v.loaded(tiles);
      ++tiles;
      const float times = static_cast<float>(c.x.z.scale) * tile.times, both[] = {times, times};
      const int dim = static_cast<int>(c.x.z.dim);
      if (c.dk) store_rows<kDim>(dk, c.x.of_keys(c.dk, tile.b, tile.kv, dim), tile.begin, tile.end, dim, both);
    });
  }
#endif
};

template <typename T, class Block>
__global__ void __launch_bounds__(kWideThreads, 1) attention_wide_kernel(const __grid_constant__ AttentionWgmma<T> c) {
#ifdef CUTE_ARCH_MMA_SM90A_ENABLED
  constexpr int kRegisters = 232;  // of a thread that computes
  extern __shared__ __align__(1024) uint4 attention_shared[];
  __shared__ typename Block::Barriers barriers;
  static_assert(sizeof(barriers) <= 1024);
  const Block block{c, barriers, shared_address(attention_shared)};
  if (shared_address(attention_shared) % 1024) __trap();
  if (threadIdx.x == 0) barriers.init(), mbarrier_init_fence();
  __syncthreads();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);  // the same in a warp, for the compiler
  if (group < 2) {
    take_registers<kRegisters>();
    block.compute(group);
  } else {
    give_registers<504 - 2 * kRegisters>();
    const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
    if (warp == 0 && lane_index() == 0) block.load();
    if (warp > 0 && warp <= Block::kPreparing) block.prepare(warp - 1);
  }
#else
  __trap();  // compiled for other architectures, never launched there
#endif
}

// c has what both kernels have in common.
template <class Block, typename T>
Status run(const char *op, AttentionWgmma<T> c, int64_t heads, int64_t rows, int multiprocessors, void *stream) {
  static_assert(Block::kShared + 1024 <= 227 << 10);  // barriers have less than 1024
  const int64_t row_tiles = ceil_div(rows, Block::Shape::kRows), tiles = c.x.z.batch * heads * row_tiles;
  if (tiles > INT32_MAX / 2)
    return fail(kNotImplemented, "%s: %lld tiles are too many", op, static_cast<long long>(tiles));
  const int grid = static_cast<int>(std::min<int64_t>(tiles, multiprocessors));
  c.heads_of_rows = static_cast<int>(heads), c.all_heads = static_cast<int>(c.x.z.batch * heads);
  c.row_tiles = static_cast<int>(row_tiles);
  // The L2 cache holds what the heads of two rounds read.
  order_tiles(&c, grid, 2 * static_cast<int>(ceil_div(row_tiles, 2 * grid)));
  return launch_kernel(op, attention_wide_kernel<T, Block>, {static_cast<unsigned>(grid), kWideThreads, Block::kShared},
                       stream, c);
}

}  // namespace

template <typename T>
Status attention_backward_wide_sm90(const char *op, const AttentionInputs<T> &x, const T *y, float *delta, T *dq, T *dk,
                                    T *dv, void *stream) {
  const AttentionSizes &z = x.z;
  AttentionWgmma<T> c = {};
  c.x = x, c.dq = dq, c.dk = dk, c.dv = dv, c.of_delta = y, c.delta = delta;
  const bool mapped = map_heads(&c.q, z, x.q, z.heads, z.queries, z.dim, kWideStep, z.row_heads) &&
                      map_heads(&c.k, z, x.k, z.kv_heads, z.keys, z.dim, kWideStep, z.kv_row_heads) &&
                      map_heads(&c.v, z, x.v, z.kv_heads, z.keys, z.v_dim, kWideStep, z.kv_row_heads) &&
                      map_heads(&c.dy, z, x.dy, z.heads, z.queries, z.v_dim, kWideStep, z.heads);
  if (!mapped) return fail(kNotImplemented, "%s: the driver refuses a tensor map of these sizes", op);
  DeviceLimits limits;
  AOT_TRY(device_limits(op, &limits));
  const auto bound = [](int64_t n) { return static_cast<int>(std::min<int64_t>(n, kMostRows)); };
  c.left = bound(z.left), c.right = bound(z.right), c.shift = static_cast<int>(z.keys - z.queries);
  c.queries = static_cast<int>(z.queries), c.keys = static_cast<int>(z.keys), c.group = static_cast<int>(z.group());
  const auto run_both = [&](auto wide) -> Status {
    using Wide = decltype(wide);
    if (dq) AOT_TRY((run<WideDq<T, Wide>>(op, c, z.heads, z.queries, limits.multiprocessors, stream)));
    return dk || dv ? run<WideDkv<T, Wide>>(op, c, z.kv_heads, z.keys, limits.multiprocessors, stream) : kOk;
  };
  if (z.dim <= 192 && z.v_dim <= 128) return run_both(WideShape<192, 128>());
  return run_both(WideShape<256, 256>());
}

#define AOT_ATTENTION(T)                                                                                               \
  template Status attention_backward_wide_sm90(const char *, const AttentionInputs<T> &, const T *, float *, T *, T *, \
                                               T *, void *);
AOT_ATTENTION(__half)
AOT_ATTENTION(__nv_bfloat16)
#undef AOT_ATTENTION

}  // namespace AOT_ISA
}  // namespace aot
