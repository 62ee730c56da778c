// The backward of attention in 16 bits on Hopper (attention_wgmma.cuh): dq, dk with dv, and all in one pass.
#pragma once
#include "attention_wgmma.cuh"
#include "cuda/overlap.cuh"

namespace aot {
inline namespace AOT_ISA {

#ifdef CUTE_ARCH_MMA_SM90A_ENABLED

// --------------------------------------------------------------------------------------------------------------- dq

template <typename T, class Shape>
struct WgmmaDq {
  static constexpr int kDim = Shape::kDim, kKeys = Shape::kOthers, kGroups = Shape::kGroups;
  struct Barriers {
    Ring<1> rows;
    Ring<Shape::kStages> others;
    Ring<2> numbers;
  };
  const AttentionWgmma<T> &c;
  Barriers &barriers;
  uint32_t q_tile;

  __device__ uint32_t dy_tile() const { return q_tile + Shape::kTile; }
  __device__ uint32_t k_tile(int i) const {
    return q_tile + 2 * Shape::kTile + i % Shape::kStages * 2 * Shape::kOtherTile;
  }
  __device__ uint32_t v_tile(int i) const { return k_tile(i) + Shape::kOtherTile; }
  // lse, in units of log(2), and delta of a tile's queries.
  __device__ float2 *numbers(int i) const {
    const uint32_t at = q_tile + 2 * Shape::kTile + Shape::kStages * 2 * Shape::kOtherTile + i % 2 * Shape::kRows * 8;
    return static_cast<float2 *>(__cvta_shared_to_generic(at));
  }

  __device__ void load() const {
    int tiles = 0, steps = 0;
    each_query_tile<Shape>(c, [&](const WgmmaQueries<Shape> &tile) {
      uint64_t *const rows = barriers.rows.fill(tiles++, 2 * Shape::kTile);
      load_tile<kDim>(c.q, q_tile, rows, Shape::kRows, tile.begin, tile.h, tile.b);
      load_tile<kDim>(c.dy, dy_tile(), rows, Shape::kRows, tile.begin, tile.h, tile.b);
      for (int i = 0; i < tile.steps; ++i, ++steps) {
        uint64_t *const full = barriers.others.fill(steps, 2 * Shape::kOtherTile);
        load_tile<kDim>(c.k, k_tile(steps), full, kKeys, tile.key(i), tile.kv, tile.b);
        load_tile<kDim>(c.v, v_tile(steps), full, kKeys, tile.key(i), tile.kv, tile.b);
      }
    });
  }

  // Computes numbers of the next tile beside products of this one: 8 rows of a warp at once.
  __device__ void prepare(int warp, int warps) const {
    int tiles = 0;
    each_query_tile<Shape>(c, [&](const WgmmaQueries<Shape> &tile) {
      barriers.numbers.wait_empty(tiles);
#pragma unroll 1
      for (int i = warp; i < Shape::kRows / 8; i += warps) {
        const int row = 8 * i + lane_index() / 4, query = tile.begin + row;
        const bool present = query < tile.end, first = lane_index() % 4 == 0;
        const int64_t at = c.x.row(tile.b, tile.h, query);
        const float lse = present && first ? c.x.lse[at] * static_cast<float>(kLog2E) : kInfinity;
        const float delta = sum_lanes<4>(present ? partial_delta(tile, query) : 0);
        if (first) numbers(tiles)[row] = {lse, delta};
        if (first && present) c.delta[at] = delta;
      }
      barriers.numbers.filled(tiles++);
    });
  }
  // The share of a lane, one of four, in sum(dy y) of a query.
  __device__ float partial_delta(const WgmmaQueries<Shape> &tile, int query) const {
    const int dim = static_cast<int>(c.x.z.v_dim), from = lane_index() % 4 * 8;
    const T *const dy = c.x.of_results(c.x.dy, tile.b, tile.h)[query] + from;
    const T *const y = c.x.of_results(c.of_delta, tile.b, tile.h)[query] + from;
    uint4 a[2], b[2];
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kDim; i += 64) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const bool there = i + 32 * j + from < dim;
        a[j] = there ? *reinterpret_cast<const uint4 *>(dy + i + 32 * j) : uint4{};
        b[j] = there ? *reinterpret_cast<const uint4 *>(y + i + 32 * j) : uint4{};
      }
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int e = 0; e < 8; ++e)
          sum += widen(reinterpret_cast<const T *>(&a[j])[e]) * widen(reinterpret_cast<const T *>(&b[j])[e]);
    }
    return sum;
  }

  __device__ void compute(int group) const {
    const float scale = static_cast<float>(c.x.z.scale * kLog2E);
    int tiles = 0, steps = 0;
    each_query_tile<Shape>(c, [&](const WgmmaQueries<Shape> &tile) {
      float sums[kDim / 2];
#pragma unroll
      for (int n = 0; n < kDim / 2; ++n) sums[n] = 0;
      barriers.numbers.wait(tiles);
      const float2 *const of_row = numbers(tiles) + tile.query(0) - tile.begin;
      const float2 rows[] = {of_row[0], of_row[8]};
      barriers.numbers.loaded(tiles);
      uint32_t ds[kKeys / 16][4];
      const int own = tile.steps_of(c, group);
      barriers.rows.wait(tiles);
#pragma unroll 1
      for (int i = 0; i < own; ++i, ++steps) {
        float s[kKeys / 2], dp[kKeys / 2];
        barriers.others.wait(steps);
        if (tile.key(i) + kKeys > tile.length && tile.length < c.keys)
          clear_rows<Shape>(k_tile(steps), tile.length - tile.key(i), group);
        start_rows<Shape>(s, q_tile, 64 * group, k_tile(steps), T());
        start_rows<Shape>(dp, dy_tile(), 64 * group, v_tile(steps), T());
        wgmma_wait<1>();
        fence_registers(s), fence_registers(sums), fence_registers(ds);
        if (i) barriers.others.release(steps - 1);
#pragma unroll
        for (int n = 0; n < kKeys / 2; ++n) s[n] = fast_exp2(fmaf(s[n], scale, -rows[n / 2 % 2].x));
        tile.hide(c, i, s, 0);
        wgmma_wait<0>();
        fence_registers(dp);
#pragma unroll
        for (int n = 0; n < kKeys / 2; ++n) s[n] = s[n] == 0 ? 0 : s[n] * (dp[n] - rows[n / 2 % 2].y);
        round_to_factor(ds, s, T());
        start_weights<Shape>(sums, ds, k_tile(steps), true, T());
      }
      wgmma_wait<0>();
      fence_registers(sums);
      barriers.rows.release(tiles++);
      if (own) barriers.others.release(steps - 1);
      for (int i = own; i < tile.steps; ++i, ++steps) barriers.others.wait(steps), barriers.others.release(steps);
      const float times = static_cast<float>(c.x.z.scale) * tile.times, both[] = {times, times};
      const int dim = static_cast<int>(c.x.z.dim);
      store_rows<kDim>(sums, c.x.of_queries(c.dq, tile.b, tile.h, dim), tile.begin + 64 * group, tile.end, dim, both);
    });
  }
};

// ------------------------------------------------------------------------------------------------------- dk and dv

// A tile of keys, and the queries that it goes through in each head that shares its own.
template <class Shape>
struct WgmmaKeys {
  static constexpr int kQueries = Shape::kOthers;
  int b, kv, begin, end, length, last, first, of_head, steps, whole_begin, whole_end;  // last: of keys that there are
  float times;

  WgmmaKeys() = default;
  template <typename T>
  __device__ WgmmaKeys(const AttentionWgmma<T> &c, int tile, int head) {
    b = head / c.heads_of_rows, kv = head - b * c.heads_of_rows;
    begin = tile * Shape::kRows, end = min(c.keys, begin + Shape::kRows);
    const auto found = c.x.length(b);
    length = static_cast<int>(found.value), last = min(end, length), times = found.times;
    first = first_query(c, begin) / kQueries * kQueries;
    const int seeing_end = last_query(c, last - 1);
    const bool any = begin < last && first < seeing_end;
    of_head = any ? (seeing_end - first - 1) / kQueries + 1 : 0, steps = of_head * c.group;
    whole_begin = last == begin + Shape::kRows ? first_query(c, end - 1) : INT32_MAX;
    whole_end = last_query(c, begin);
  }
  // The queries from first_query on, and before last_query, are those that see a key.
  template <typename T>
  __device__ static int first_query(const AttentionWgmma<T> &c, int key) {
    return c.right < 0 ? 0 : max(0, key - c.shift - c.right);
  }
  template <typename T>
  __device__ static int last_query(const AttentionWgmma<T> &c, int key) {
    return c.left < 0 ? c.queries : min(c.queries, key - c.shift + c.left + 1);
  }

  // The step after one of these, of a head of the group.
  struct At {
    int of_group, tile;
  };
  __device__ void go_on(At &at) const {
    if (++at.tile == of_head) at = {at.of_group + 1, 0};
  }
  __device__ int query(At at) const { return first + at.tile * kQueries; }
  __device__ bool whole(At at) const { return query(at) >= whole_begin && query(at) + kQueries <= whole_end; }
  template <typename T>
  __device__ void hide(const AttentionWgmma<T> &c, At step, float (&s)[kQueries / 2], float hidden) const {
    if (!whole(step)) hide(c, query(step), s, hidden);
  }
  template <int n, typename T>
  __device__ void hide(const AttentionWgmma<T> &c, int query, float (&s)[n], float hidden) const {
    const int from = query + lane_index() % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = begin + static_cast<int>(threadIdx.x) / 32 * 16 + lane_index() / 4 + 8 * half;
      hide_before<2 * n>(s, half, key >= last ? 2 * n : first_query(c, key) - from, hidden);
      if (c.left >= 0) hide_from<2 * n>(s, half, last_query(c, key) - from, hidden);
    }
  }
};

template <typename T, class Shape>
struct WgmmaDkv {
  static constexpr int kDim = Shape::kDim, kQueries = Shape::kOthers, kGroups = Shape::kGroups;
  struct Barriers {
    Ring<1> rows;
    Ring<Shape::kStages> others;
  };
  const AttentionWgmma<T> &c;
  Barriers &barriers;
  uint32_t k_tile;

  __device__ uint32_t v_tile() const { return k_tile + Shape::kTile; }
  __device__ uint32_t q_tile(int i) const {
    return k_tile + 2 * Shape::kTile + i % Shape::kStages * 2 * Shape::kOtherTile;
  }
  __device__ uint32_t dy_tile(int i) const { return q_tile(i) + Shape::kOtherTile; }
  // lse, in units of log(2), and delta of a step's queries.
  __device__ float2 *numbers(int i) const {
    const uint32_t at =
        k_tile + 2 * Shape::kTile + Shape::kStages * 2 * Shape::kOtherTile + i % Shape::kStages * Shape::kNumbers;
    return static_cast<float2 *>(__cvta_shared_to_generic(at));
  }

  template <class F>
  __device__ void each_tile(F f) const {
    each_attention_tile(c, c.right >= 0, false, [&](int tile, int head) { f(WgmmaKeys<Shape>(c, tile, head)); });
  }

  __device__ void load() const {
    int tiles = 0, steps = 0;
    each_tile([&](const WgmmaKeys<Shape> &tile) {
      uint64_t *const rows = barriers.rows.fill(tiles++, 2 * Shape::kTile);
      load_tile<kDim>(c.k, k_tile, rows, Shape::kRows, tile.begin, tile.kv, tile.b);
      load_tile<kDim>(c.v, v_tile(), rows, Shape::kRows, tile.begin, tile.kv, tile.b);
      typename WgmmaKeys<Shape>::At at = {};
      for (int i = 0; i < tile.steps; ++i, ++steps, tile.go_on(at)) {
        const int h = tile.kv * c.group + at.of_group, query = tile.query(at);
        uint64_t *const full = barriers.others.fill(steps, 2 * Shape::kOtherTile);
        load_tile<kDim>(c.q, q_tile(steps), full, kQueries, query, h, tile.b);
        load_tile<kDim>(c.dy, dy_tile(steps), full, kQueries, query, h, tile.b);
      }
    });
  }

  // By one warp. Numbers are on their way to registers while their stage is not yet empty.
  __device__ void prepare(int, int) const {
    constexpr int kEach = kQueries / 32;
    const int lane = lane_index();
    int steps = 0;
    each_tile([&](const WgmmaKeys<Shape> &tile) {
      typename WgmmaKeys<Shape>::At at = {};
      for (int i = 0; i < tile.steps; ++i, ++steps, tile.go_on(at)) {
        const int query = tile.query(at) + lane;
        const int row = ((tile.b * c.heads_of_rows + tile.kv) * c.group + at.of_group) * c.queries + query;
        float lse[kEach], delta[kEach];
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          const bool present = query + 32 * j < c.queries;
          lse[j] = present ? c.x.lse[row + 32 * j] : kInfinity;
          delta[j] = present ? c.x.delta[row + 32 * j] : 0;
        }
        barriers.others.wait_empty(steps);
        float *const to = reinterpret_cast<float *>(numbers(steps)) + lane;
#pragma unroll
        for (int j = 0; j < kEach; ++j)
          to[32 * j] = lse[j] * static_cast<float>(kLog2E), to[kQueries + 32 * j] = delta[j];
        barriers.others.filled(steps);
      }
    });
  }

  __device__ void compute(int group) const {
    const float scale = static_cast<float>(c.x.z.scale * kLog2E);
    int tiles = 0, steps = 0;
    each_tile([&](const WgmmaKeys<Shape> &tile) {
      float dk[kDim / 2], dv[kDim / 2];
#pragma unroll
      for (int n = 0; n < kDim / 2; ++n) dk[n] = dv[n] = 0;
      uint32_t p[kQueries / 16][4], ds[kQueries / 16][4];
      typename WgmmaKeys<Shape>::At at = {};
      const int first = WgmmaKeys<Shape>::first_query(c, tile.begin + 64 * group);  // that sees a row of this group
      int reading = -1;  // the step whose operands are still read
      barriers.rows.wait(tiles);
#pragma unroll 1
      for (int i = 0; i < tile.steps; ++i, ++steps, tile.go_on(at)) {
        if (tile.query(at) + kQueries <= first) {
          wgmma_wait<0>();
          if (reading >= 0) barriers.others.loaded(reading);
          reading = -1;
          barriers.others.wait(steps), barriers.others.loaded(steps);
          continue;
        }
        float s[kQueries / 2], dp[kQueries / 2];
        barriers.others.wait(steps);
        start_rows<Shape>(s, k_tile, 64 * group, q_tile(steps), T());
        start_rows<Shape>(dp, v_tile(), 64 * group, dy_tile(steps), T());
        const float2 *const lse = numbers(steps) + lane_index() % 4, *const delta = lse + kQueries / 2;
        wgmma_wait<1>();
        fence_registers(s), fence_registers(dk), fence_registers(ds);
        if (reading >= 0) barriers.others.loaded(reading);
        reading = steps;
#pragma unroll
        for (int n = 0; n < kQueries / 8; ++n) {
          const float2 base = lse[4 * n];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float *const pair = &s[4 * n + 2 * half];
            pair[0] = fast_exp2(fmaf(pair[0], scale, -base.x)), pair[1] = fast_exp2(fmaf(pair[1], scale, -base.y));
          }
        }
        tile.hide(c, at, s, 0);
        round_to_factor(p, s, T());
        start_weights<Shape>(dv, p, dy_tile(steps), true, T());
        wgmma_wait<1>();
        fence_registers(dp);
#pragma unroll
        for (int n = 0; n < kQueries / 8; ++n) {
          const float2 less = delta[4 * n];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float *const pair = &s[4 * n + 2 * half], *const of_p = &dp[4 * n + 2 * half];
            pair[0] = pair[0] == 0 ? 0 : pair[0] * (of_p[0] - less.x);
            pair[1] = pair[1] == 0 ? 0 : pair[1] * (of_p[1] - less.y);
          }
        }
        round_to_factor(ds, s, T());
        start_weights<Shape>(dk, ds, q_tile(steps), true, T());
        wgmma_wait<1>();
        fence_registers(dv), fence_registers(p);  // whose registers are free from here on
      }
      wgmma_wait<0>();
      fence_registers(dk), fence_registers(dv);
      barriers.rows.release(tiles++);
      if (reading >= 0) barriers.others.loaded(reading);
      const float of_dk[] = {static_cast<float>(c.x.z.scale) * tile.times,
                             static_cast<float>(c.x.z.scale) * tile.times};
      const float of_dv[] = {tile.times, tile.times};
      const int row = tile.begin + 64 * group, dim = static_cast<int>(c.x.z.dim), v_dim = static_cast<int>(c.x.z.v_dim);
      if (c.dk) store_rows<kDim>(dk, c.x.of_keys(c.dk, tile.b, tile.kv, dim), row, tile.end, dim, of_dk);
      if (c.dv) store_rows<kDim>(dv, c.x.of_keys(c.dv, tile.b, tile.kv, v_dim), row, tile.end, v_dim, of_dv);
    });
  }
};

template <typename T, class Shape>
struct WgmmaBlock<T, Shape, WgmmaResult::dq> {
  using type = WgmmaDq<T, Shape>;
};
template <typename T, class Shape>
struct WgmmaBlock<T, Shape, WgmmaResult::dkv> {
  using type = WgmmaDkv<T, Shape>;
};

// -------------------------------------------------------------------------------------------------- all in one pass

#endif

// The backward in one pass: s and dp once for dk, dv and dq. A block has a tile of keys, whose dk and dv stay in
// registers, and goes through the queries that see them, the last first. ds goes to shared memory too, where both
// warpgroups read it for their half of what the keys add to dq. That is added in float32, in memory, in the order of
// tiles of keys: `turns` counts for each tile of queries how many have added. The first one stores, and the last one
// rounds. Blocks take tiles by a counter, and wait for tiles taken before their own alone, so they cannot block each
// other; of a causal call the heaviest are first. As many heads as the L2 cache holds are in work at once.
template <int kDim_, int kQueries_, int kStages_, int kRowStages_>
struct OnePassShape : WgmmaShape<kDim_, 2, kQueries_, kStages_, false> {
  using Base = WgmmaShape<kDim_, 2, kQueries_, kStages_, false>;
  static constexpr int kRowStages = kRowStages_, kWeights = Base::kRows * kQueries_ * 2;  // bytes of ds
  static constexpr int kOfAll =
      1024 + kRowStages * 2 * Base::kTile + kStages_ * 2 * Base::kOtherTile + 2 * kWeights + kStages_ * Base::kNumbers;
  static_assert(kDim_ * kQueries_ == 8192);  // a warpgroup's share of dq is 64 x 64
  static constexpr int kParts = kQueries_ / 64;
  using Part = WgmmaShape<kDim_, 2, 64, kStages_, false>;
};

// Memory of a pass: lse, in units of log(2), and delta of each tile of queries; sums of dq; turns; the counter.
struct OnePassSpace {
  float *numbers, *sums;
  int *turns, *next;
  int query_tiles, tiles, heads_at_once;  // tiles: of keys, of all heads
};

#ifdef CUTE_ARCH_MMA_SM90A_ENABLED

__device__ inline int load_acquire(const int *from) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ inline void store_release(int *to, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ inline void add_to_memory(float *to, float4 x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z),
               "f"(x.w)
               : "memory");
}
// Loads `bytes` into shared memory; both addresses are aligned to 16.
__device__ inline void bulk_load(uint32_t to, const void *from, int bytes, uint64_t *barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// The tiles of keys that the queries of a tile, from `query` on, see. None if last < first.
struct KeyTiles {
  int first, last;
};
template <class Shape, typename T>
__device__ inline KeyTiles key_tiles(const AttentionWgmma<T> &c, int query, int length) {
  const int first = c.left < 0 ? 0 : max(0, query + c.shift - c.left);
  const int end = c.right < 0 ? length : min(length, query + Shape::kOthers + c.shift + c.right);
  if (end <= first) return {0, -1};
  return {first / Shape::kRows, (end - 1) / Shape::kRows};
}

template <typename T, class Shape>
struct WgmmaOnePass {
  static constexpr int kDim = Shape::kDim, kQueries = Shape::kOthers, kTurns = 4;
  static constexpr int kPart = 64 * 128;  // bytes of 64 queries in a box; there is one box where there are parts
  using Part = typename Shape::Part;
  enum { kIsFirst = 1, kIsLast = 2 };
  // The place where a step adds to dq, and whether it is the first or the last to add.
  struct Place {
    int which, query_tile, query, h;
  };
  struct Barriers {
    Ring<2> tiles;
    Ring<Shape::kRowStages> rows;
    Ring<Shape::kStages> others;
    Ring<kTurns> turns, added;
    uint64_t weights[2];
    WgmmaKeys<Shape> tile[2];
    int step[Shape::kStages];  // its first query, or ~ that where all of its queries see all keys
    Place place[kTurns];
  };
  using Keys = WgmmaKeys<Shape>;
  using At = typename Keys::At;

  const AttentionWgmma<T> &c;
  const OnePassSpace &space;
  Barriers &barriers;
  uint32_t shared;

  __device__ void init() const {
    barriers.tiles.init(8 + 2), barriers.rows.init(8), barriers.others.init(8);
    barriers.turns.init(8), barriers.added.init(1, 8);
    mbarrier_init(&barriers.weights[0], 256), mbarrier_init(&barriers.weights[1], 256);
  }

  __device__ uint32_t k_tile(int i) const { return shared + i % Shape::kRowStages * 2 * Shape::kTile; }
  __device__ uint32_t v_tile(int i) const { return k_tile(i) + Shape::kTile; }
  __device__ uint32_t q_tile(int i) const {
    return shared + Shape::kRowStages * 2 * Shape::kTile + i % Shape::kStages * 2 * Shape::kOtherTile;
  }
  __device__ uint32_t dy_tile(int i) const { return q_tile(i) + Shape::kOtherTile; }
  __device__ uint32_t weights_tile(int i) const {
    return shared + Shape::kRowStages * 2 * Shape::kTile + Shape::kStages * 2 * Shape::kOtherTile +
           i % 2 * Shape::kWeights;
  }
  __device__ uint32_t numbers_at(int i) const {
    return shared + Shape::kRowStages * 2 * Shape::kTile + Shape::kStages * 2 * Shape::kOtherTile +
           2 * Shape::kWeights + i % Shape::kStages * Shape::kNumbers;
  }
  __device__ const float2 *numbers(int i) const {
    return static_cast<const float2 *>(__cvta_shared_to_generic(numbers_at(i)));
  }

  __device__ Keys tile_of(int id) const {
    const int chunk = id / (space.heads_at_once * c.row_tiles), rest = id - chunk * space.heads_at_once * c.row_tiles;
    const int heads = min(space.heads_at_once, c.all_heads - chunk * space.heads_at_once), rank = rest / heads;
    return Keys(c, rank, chunk * space.heads_at_once + rest - rank * heads);
  }
  // f(a tile of keys, its number among those of the block), by whole warps or by single threads.
  template <bool kByWarp, class F>
  __device__ void each_tile(F f) const {
    for (int tiles = 0;; ++tiles) {
      barriers.tiles.wait(tiles);
      const Keys &tile = barriers.tile[tiles % 2];
      if (tile.b < 0) return;
      f(tile, tiles);
      if (kByWarp) barriers.tiles.release(tiles);
      else barriers.tiles.loaded(tiles);
    }
  }
  // Queries are gone through backwards.
  __device__ static At start(const Keys &tile) { return {0, tile.of_head - 1}; }
  __device__ static void go_on(const Keys &tile, At &at) {
    if (--at.tile < 0) at = {at.of_group + 1, tile.of_head - 1};
  }
  __device__ int query_tile(const Keys &tile, At at) const {
    return (tile.b * c.heads_of_rows * c.group + tile.kv * c.group + at.of_group) * space.query_tiles +
           tile.query(at) / kQueries;
  }

  __device__ void load() const {
    int steps = 0;
    for (int tiles = 0;; ++tiles) {
      barriers.tiles.wait_empty(tiles);
      const int id = atomicAdd(space.next, 1);
      Keys &tile = barriers.tile[tiles % 2];
      if (id < space.tiles) tile = tile_of(id);
      else tile.b = -1;
      barriers.tiles.filled(tiles);
      if (id >= space.tiles) return;
      uint64_t *const rows = barriers.rows.fill(tiles, 2 * Shape::kTile);
      load_tile<kDim>(c.k, k_tile(tiles), rows, Shape::kRows, tile.begin, tile.kv, tile.b);
      load_tile<kDim>(c.v, v_tile(tiles), rows, Shape::kRows, tile.begin, tile.kv, tile.b);
      At at = start(tile);
      for (int i = 0; i < tile.steps; ++i, ++steps, go_on(tile, at)) {
        const int h = tile.kv * c.group + at.of_group, query = tile.query(at);
        barriers.others.wait_empty(steps);
        barriers.step[steps % Shape::kStages] = tile.whole(at) ? ~query : query;
        uint64_t *const full = barriers.others.fill(steps, 2 * Shape::kOtherTile + Shape::kNumbers);
        load_tile<kDim>(c.q, q_tile(steps), full, kQueries, query, h, tile.b);
        bulk_load(numbers_at(steps), space.numbers + int64_t{query_tile(tile, at)} * 2 * kQueries, Shape::kNumbers,
                  full);
        load_tile<kDim>(c.dy, dy_tile(steps), full, kQueries, query, h, tile.b);
      }
    }
  }

  // By one thread: waits for this block's turn to add to dq of each step.
  __device__ void await_turns() const {
    int steps = 0;
    each_tile<false>([&](const Keys &tile, int) {
      At at = start(tile);
      const int own = tile.begin / Shape::kRows;
      for (int i = 0; i < tile.steps; ++i, ++steps, go_on(tile, at)) {
        const KeyTiles all = key_tiles<Shape>(c, tile.query(at), tile.length);
        const int *const turn = &space.turns[query_tile(tile, at)];
        barriers.turns.wait_empty(steps);
        while (load_acquire(turn) != own - all.first) {
        }
        barriers.place[steps % kTurns] = {(own == all.first ? kIsFirst : 0) | (own == all.last ? kIsLast : 0),
                                          query_tile(tile, at), tile.query(at), tile.kv * c.group + at.of_group};
        barriers.turns.filled(steps);
      }
    });
  }

  // By one thread: passes the turn on.
  __device__ void pass_turns() const {
    int steps = 0;
    each_tile<false>([&](const Keys &tile, int) {
      At at = start(tile);
      const int own = tile.begin / Shape::kRows;
      for (int i = 0; i < tile.steps; ++i, ++steps, go_on(tile, at)) {
        const KeyTiles all = key_tiles<Shape>(c, tile.query(at), tile.length);
        barriers.added.wait(steps);
        if (own != all.last) store_release(&space.turns[query_tile(tile, at)], own - all.first + 1);
        barriers.added.loaded(steps);
      }
    });
  }

  // Scores of a part of a step become probabilities.
  __device__ void weigh(const Keys &tile, float (&s)[32], int i, int part, float scale) const {
    const float2 *const lse = numbers(i) + part * 32 + lane_index() % 4;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 base = lse[4 * n];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float *const pair = &s[4 * n + 2 * half];
        pair[0] = fast_exp2(fmaf(pair[0], scale, -base.x)), pair[1] = fast_exp2(fmaf(pair[1], scale, -base.y));
      }
    }
    const int query = barriers.step[i % Shape::kStages];
    if (query >= 0) tile.hide(c, query + 64 * part, s, 0);
  }
  // And these become ds.
  __device__ void slope(float (&s)[32], const float (&dp)[32], int i, int part) const {
    const float2 *const delta = numbers(i) + kQueries / 2 + part * 32 + lane_index() % 4;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 less = delta[4 * n];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float *const pair = &s[4 * n + 2 * half];
        const float *const of_p = &dp[4 * n + 2 * half];
        pair[0] = pair[0] == 0 ? 0 : pair[0] * (of_p[0] - less.x);
        pair[1] = pair[1] == 0 ? 0 : pair[1] * (of_p[1] - less.y);
      }
    }
  }

  // ds, keys by queries, in boxes of 64 queries.
  __device__ void store_weights(const uint32_t (&ds)[4][4], int group, int i, int part) const {
    const int lane = lane_index(), row = 64 * group + warp_index() % 4 * 16 + lane % 16;
    const uint32_t to = weights_tile(i) + part * Shape::kRows * 128 + row * 128;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t at = to + ((2 * k + lane / 16) ^ lane % 8) * 16;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(ds[k][0]),
                   "r"(ds[k][1]), "r"(ds[k][2]), "r"(ds[k][3])
                   : "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (part == Shape::kParts - 1) mbarrier_arrive(&barriers.weights[i % 2]);
  }

  // This warpgroup's 64 x 64 of ds^T k: half of the columns, or of the queries.
  __device__ void start_queries(float (&dq)[32], int group, int i, int tiles) const {
    const uint32_t part = group * Shape::kRows * 128;
    const uint64_t of_a = across_rows(weights_tile(i) + (kQueries == 128 ? part : 0), Shape::kRows);
    const uint64_t of_b = across_rows(k_tile(tiles) + (kQueries == 128 ? 0 : part), Shape::kRows);
    mbarrier_wait(&barriers.weights[i % 2], i / 2 % 2);
    fence_registers(dq);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < Shape::kRows / 16; ++k)
      Wgmma<T, 64, true, true>::run(of_a + units_across(k), of_b + units_across(k), dq, k > 0);
    wgmma_end();
  }

  __device__ void add(float (&dq)[32], const Keys &tile, int group, int i) const {
    barriers.turns.wait(i);
    const Place &place = barriers.place[i % kTurns];
    float *const sums = space.sums + int64_t{place.query_tile} * (kQueries * kDim) + group * 4096 +
                        static_cast<int>(threadIdx.x) % 128 * 4;
    if (place.which == 0) {
#pragma unroll
      for (int n = 0; n < 8; ++n)
        add_to_memory(sums + 512 * n, {dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]});
    } else if (place.which == kIsFirst) {
#pragma unroll
      for (int n = 0; n < 8; ++n)
        *reinterpret_cast<float4 *>(sums + 512 * n) = {dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]};
    } else {
      if (!(place.which & kIsFirst)) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const float4 before = __ldcg(reinterpret_cast<const float4 *>(sums + 512 * n));
          dq[4 * n] += before.x, dq[4 * n + 1] += before.y, dq[4 * n + 2] += before.z, dq[4 * n + 3] += before.w;
        }
      }
      const float times = static_cast<float>(c.x.z.scale) * tile.times, both[] = {times, times};
      const int dim = static_cast<int>(c.x.z.dim), column = kQueries == 128 ? 0 : 64 * group;
      HeadRows<T> to = c.x.of_queries(c.dq, tile.b, place.h, dim);
      to.data += column;
      store_rows<64>(dq, to, place.query + (kQueries == 128 ? 64 * group : 0), c.queries, dim - column, both);
    }
    __syncwarp();
    if (lane_index() == 0) {
      mbarrier_arrive(&barriers.turns.empty[i % kTurns]);
      barriers.added.wait_empty(i);
      barriers.added.filled(i);
    }
  }

  // Sets rows of a tile of keys to zero that are not there: ds is zero, but they may hold no numbers.
  __device__ void clear_keys(uint32_t tile, int first) const {
    const int pieces = (Shape::kRows - first) * 8;
    for (int i = threadIdx.x; i < pieces * Shape::kBoxes; i += 256) {
      const uint32_t at = tile + i / pieces * Shape::kRows * 128 + first * 128 + i % pieces * 16;
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    wait_named(8, 256);
  }

  __device__ void compute(int group) const {
    const float scale = static_cast<float>(c.x.z.scale * kLog2E);
    int steps = 0;
    each_tile<true>([&](const Keys &tile, int tiles) {
      float dk[kDim / 2], dv[kDim / 2];
#pragma unroll
      for (int n = 0; n < kDim / 2; ++n) dk[n] = dv[n] = 0;
      barriers.rows.wait(tiles);
      if (tile.steps) {
        if (tile.last < tile.begin + Shape::kRows) clear_keys(k_tile(tiles), tile.last - tile.begin);
        float dq[32];
        uint32_t ds[4][4];
        const int begin = steps, end = steps + tile.steps;
#pragma unroll 1
        for (; steps < end; ++steps) {
          barriers.others.wait(steps);
#pragma unroll
          for (int part = 0; part < Shape::kParts; ++part) {
            float s[32], dp[32];
            uint32_t p[4][4];
            const uint32_t q = q_tile(steps) + part * kPart, dy = dy_tile(steps) + part * kPart;
            start_rows<Part>(s, k_tile(tiles), 64 * group, q, T());
            wgmma_wait<0>();
            fence_registers(s), fence_registers(dk), fence_registers(ds);
            if (part == 0) {
              fence_registers(dq);
              if (steps > begin) {
                barriers.others.release(steps - 1);
                add(dq, tile, group, steps - 1);
              }
            }
            start_rows<Part>(dp, v_tile(tiles), 64 * group, dy, T());
            weigh(tile, s, steps, part, scale);
            round_to_factor(p, s, T());
            start_weights<Part>(dv, p, dy, true, T());
            wgmma_wait<1>();
            fence_registers(dp);
            slope(s, dp, steps, part);
            round_to_factor(ds, s, T());
            store_weights(ds, group, steps, part);
            start_weights<Part>(dk, ds, q, true, T());
            wgmma_wait<1>();
            fence_registers(dv), fence_registers(p);
          }
          start_queries(dq, group, steps, tiles);
        }
        wgmma_wait<0>();
        fence_registers(dk), fence_registers(dq), fence_registers(ds);
        barriers.others.release(steps - 1);
        barriers.rows.release(tiles);
        add(dq, tile, group, steps - 1);
      } else {
        barriers.rows.release(tiles);
      }
      const float of_dk = static_cast<float>(c.x.z.scale) * tile.times, both_dk[] = {of_dk, of_dk};
      const float both_dv[] = {tile.times, tile.times};
      const int row = tile.begin + 64 * group, dim = static_cast<int>(c.x.z.dim), v_dim = static_cast<int>(c.x.z.v_dim);
      store_rows<kDim>(dk, c.x.of_keys(c.dk, tile.b, tile.kv, dim), row, tile.end, dim, both_dk);
      store_rows<kDim>(dv, c.x.of_keys(c.dv, tile.b, tile.kv, v_dim), row, tile.end, v_dim, both_dv);
    });
  }
};

#endif

template <typename T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    attention_one_pass_kernel(const __grid_constant__ AttentionWgmma<T> c, const __grid_constant__ OnePassSpace space) {
#ifdef CUTE_ARCH_MMA_SM90A_ENABLED
  using Block = WgmmaOnePass<T, Shape>;
  extern __shared__ __align__(1024) uint4 attention_shared[];
  __shared__ typename Block::Barriers barriers;
  const Block block{c, space, barriers, (shared_address(attention_shared) + 1023) & ~1023u};
  if (threadIdx.x == 0) block.init(), mbarrier_init_fence();
  wait_for_kernel_before();
  __syncthreads();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);  // the same in a warp, for the compiler
  if (group < 2) {
    take_registers<240>();
    block.compute(group);
  } else {
    give_registers<24>();
    const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
    if (lane_index() == 0) {
      if (warp == 0) block.load();
      if (warp == 1) block.await_turns();
      if (warp == 2) block.pass_turns();
    }
  }
#else
  __trap();  // compiled for other architectures, never launched there
#endif
}

constexpr int kNumbersBlock = 256;

// Prepares a pass: its numbers, turns and counter, and dq of the queries that no tile of keys sees. kDim / 8 threads
// for each row of the tiles of queries.
template <typename T, class Shape>
__global__ void __launch_bounds__(kNumbersBlock)
    attention_numbers_kernel(const __grid_constant__ AttentionWgmma<T> c, const OnePassSpace space) {
#ifdef CUTE_ARCH_MMA_SM90A_ENABLED
  constexpr int kLanes = Shape::kDim / 8, kQueries = Shape::kOthers;
  const int64_t i = int64_t{blockIdx.x} * (kNumbersBlock / kLanes) + threadIdx.x / kLanes;
  const int64_t tile = i / kQueries, head = tile / space.query_tiles, heads = c.x.z.heads;
  const int at = static_cast<int>(i % kQueries), query = static_cast<int>(tile % space.query_tiles) * kQueries + at;
  const int64_t b = head / heads, h = head % heads;
  const int column = static_cast<int>(threadIdx.x) % kLanes * 8, dim = static_cast<int>(c.x.z.dim),
            v_dim = static_cast<int>(c.x.z.v_dim);
  launch_next();
  const bool there = b < c.x.z.batch && query < c.queries;
  float lse = kInfinity, delta = 0;
  if (there && column < v_dim) {
    const uint4 dy = *reinterpret_cast<const uint4 *>(c.x.of_results(c.x.dy, b, h)[query] + column);
    const uint4 y = *reinterpret_cast<const uint4 *>(c.x.of_results(c.of_delta, b, h)[query] + column);
#pragma unroll
    for (int e = 0; e < 8; ++e)
      delta += widen(reinterpret_cast<const T *>(&dy)[e]) * widen(reinterpret_cast<const T *>(&y)[e]);
  }
  if (there && column == 0) lse = c.x.lse[c.x.row(b, h, query)] * static_cast<float>(kLog2E);
  delta = sum_lanes<kLanes>(delta);
  if (i == 0 && column == 0) *space.next = 0;
  if (b >= c.x.z.batch) return;
  if (column == 0) {
    float *const to = space.numbers + tile * 2 * kQueries + at;
    to[0] = lse, to[kQueries] = delta;
    if (at == 0) space.turns[tile] = 0;
  }
  const auto length = c.x.length(b);
  const KeyTiles seen = key_tiles<Shape>(c, query - at, static_cast<int>(length.value));
  if (there && seen.last < seen.first && column < dim) {
    const uint32_t word = narrow_word(0 * length.times, 0 * length.times, T());
    *reinterpret_cast<uint4 *>(c.x.of_queries(c.dq, b, h, dim)[query] + column) = {word, word, word, word};
  }
#else
  __trap();  // compiled for other architectures, never launched there
#endif
}

// ------------------------------------------------------------------------------------------------------- launchers

// Lays out `space`, which AttentionBackward::pass_space counts.
template <class Shape>
OnePassSpace one_pass_space(const AttentionSizes &z, float *space) {
  const int64_t query_tiles = ceil_div(z.queries, Shape::kOthers), all = z.batch * z.heads * query_tiles;
  OnePassSpace to{};
  to.numbers = reinterpret_cast<float *>((reinterpret_cast<uintptr_t>(space) + 127) & ~uintptr_t{127});
  to.sums = to.numbers + all * 2 * Shape::kOthers;
  to.turns = reinterpret_cast<int *>(to.sums + all * Shape::kOthers * Shape::kDim), to.next = to.turns + all;
  to.query_tiles = static_cast<int>(query_tiles);
  return to;
}

// Bytes of the heads in work at once: less than the 50 MB of L2. With 16 MB a head_dim of 128 has 0.75 to 0.95 of the
// rate.
constexpr int64_t kCached = 32 << 20;

template <typename T, class Shape>
Status launch_one_pass(const char *op, AttentionWgmma<T> c, float *memory, void *stream) {
  static_assert(Shape::kOfAll + 1024 <= 227 << 10);
  const AttentionSizes &z = c.x.z;
  const bool mapped = map_heads(&c.q, z, c.x.q, z.heads, z.queries, z.dim, Shape::kOthers, z.row_heads) &&
                      map_heads(&c.k, z, c.x.k, z.kv_heads, z.keys, z.dim, Shape::kRows, z.kv_row_heads) &&
                      map_heads(&c.v, z, c.x.v, z.kv_heads, z.keys, z.v_dim, Shape::kRows, z.kv_row_heads) &&
                      map_heads(&c.dy, z, c.x.dy, z.heads, z.queries, z.v_dim, Shape::kOthers, z.heads);
  if (!mapped) return fail(kNotImplemented, "%s: the driver refuses a tensor map of these sizes", op);
  DeviceLimits limits;
  AOT_TRY(device_limits(op, &limits));
  OnePassSpace space = one_pass_space<Shape>(z, memory);
  const int64_t heads = z.batch * z.kv_heads, row_tiles = ceil_div(z.keys, Shape::kRows), tiles = heads * row_tiles;
  const int64_t rows = z.batch * z.heads * space.query_tiles * Shape::kOthers;
  if (std::max(tiles, rows / Shape::kOthers) > INT32_MAX / 2)
    return fail(kNotImplemented, "%s: %lld tiles are too many", op, static_cast<long long>(tiles));
  const auto bound = [](int64_t n) { return static_cast<int>(std::min<int64_t>(n, kMostRows)); };
  c.left = bound(z.left), c.right = bound(z.right), c.shift = static_cast<int>(z.keys - z.queries);
  c.queries = static_cast<int>(z.queries), c.keys = static_cast<int>(z.keys), c.group = static_cast<int>(z.group());
  c.heads_of_rows = static_cast<int>(z.kv_heads), c.all_heads = static_cast<int>(heads);
  c.row_tiles = static_cast<int>(row_tiles), space.tiles = static_cast<int>(tiles);
  const int64_t of_head = (z.queries * z.group() * 8 + z.keys * 4) * Shape::kDim;  // bytes of q, dy, sums; k, v
  space.heads_at_once = static_cast<int>(std::clamp<int64_t>(kCached / of_head, 1, heads));
  const int64_t row_blocks = ceil_div(rows, kNumbersBlock / (Shape::kDim / 8));
  AOT_TRY(
      launch_kernel(op, attention_numbers_kernel<T, Shape>, {grid_size(row_blocks), kNumbersBlock}, stream, c, space));
  LaunchShape shape{static_cast<unsigned>(std::min<int64_t>(tiles, limits.multiprocessors)), Shape::kThreads,
                    Shape::kOfAll};
  shape.overlap = true;
  return launch_kernel(op, attention_one_pass_kernel<T, Shape>, shape, stream, c, space);
}

}  // namespace AOT_ISA
}  // namespace aot
