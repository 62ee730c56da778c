// The backward of attention in 16 bits on Hopper (attention_wgmma.cuh): dq, and dk with dv.
#pragma once
#include "attention_wgmma.cuh"

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
    const T *const dy = c.x.of_queries(c.x.dy, tile.b, tile.h, dim)[query] + from;
    const T *const y = c.x.of_queries(c.of_delta, tile.b, tile.h, dim)[query] + from;
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
  int b, kv, begin, end, last, first, of_head, steps, whole_begin, whole_end;  // last: of the keys that there are
  float times;

  template <typename T>
  __device__ WgmmaKeys(const AttentionWgmma<T> &c, int tile, int head) {
    b = head / c.heads_of_rows, kv = head - b * c.heads_of_rows;
    begin = tile * Shape::kRows, end = min(c.keys, begin + Shape::kRows);
    const auto found = c.x.length(b);
    last = min(end, static_cast<int>(found.value)), times = found.times;
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
    if (whole(step)) return;
    const int from = query(step) + lane_index() % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = begin + static_cast<int>(threadIdx.x) / 32 * 16 + lane_index() / 4 + 8 * half;
      hide_before<kQueries>(s, half, key >= last ? kQueries : first_query(c, key) - from, hidden);
      if (c.left >= 0) hide_from<kQueries>(s, half, last_query(c, key) - from, hidden);
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

#endif

}  // namespace AOT_ISA
}  // namespace aot
