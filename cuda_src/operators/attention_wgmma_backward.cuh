// The backward of attention in 16 bits on Hopper (attention_wgmma.cuh): dq, dk with dv, and all in one pass.
#pragma once
#include "attention_wgmma.cuh"
#include "cuda/overlap.cuh"

namespace aot {
inline namespace AOT_ISA {

#ifdef CUTE_ARCH_MMA_SM90A_ENABLED

// What is taken from scores in units of log(2). With what is added, a row that sees nothing takes infinity: weights of
// keys whose bias is -inf are then 0.
template <class Shape>
__device__ inline float base_of(float lse) {
  if (Shape::kAdds && lse == -kInfinity) return kInfinity;
  return lse * static_cast<float>(kLog2E);
}
// Whether one of a warp's is NaN.
template <int n>
__device__ inline bool any_nan(const float (&s)[n]) {
  float most = 0;
#pragma unroll
  for (int i = 0; i < n; ++i) most = max_or_nan(most, s[i]);
  return __any_sync(~0u, isnan(most));
}

// The share of a lane, one of four, in sum(dy y) of a query.
template <int kDim, typename T>
__device__ inline float partial_delta(const AttentionWgmma<T> &c, int b, int h, int query) {
  const int dim = static_cast<int>(c.x.z.v_dim), from = lane_index() % 4 * 8;
  const T *const dy = c.x.of_results(c.x.dy, b, h)[query] + from;
  const T *const y = c.x.of_results(c.of_delta, b, h)[query] + from;
  uint4 of_dy[2], of_y[2];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kDim; i += 64) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const bool there = i + 32 * j + from < dim;
      of_dy[j] = there ? *reinterpret_cast<const uint4 *>(dy + i + 32 * j) : uint4{};
      of_y[j] = there ? *reinterpret_cast<const uint4 *>(y + i + 32 * j) : uint4{};
    }
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int e = 0; e < 8; ++e)
        sum += widen(reinterpret_cast<const T *>(&of_dy[j])[e]) * widen(reinterpret_cast<const T *>(&of_y[j])[e]);
  }
  return sum;
}

// --------------------------------------------------------------------------------------------------------------- dq

template <typename T, class Shape>
struct WgmmaDq {
  static constexpr int kDim = Shape::kDim, kKeys = Shape::kOthers, kGroups = Shape::kGroups;
  using Added = AddedTiles<T, typename Shape::OfAdded>;
  struct Barriers : AddedRing<Shape::kDqAddedStages> {
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

  __device__ uint32_t added_tile(int i) const {
    return q_tile + Shape::kOfDqAlone - 1024 + i % Shape::kDqAddedStages * Shape::OfAdded::kTile;
  }
  // By two warps.
  __device__ void bring() const {
    const Added added{c.x.extra, c.mask_end};
    int steps = 0;
    each_query_tile<Shape>(c, [&](const WgmmaQueries<Shape> &tile) {
      const int64_t head = added.steps().at(tile.b, tile.h);
      for (int i = 0; i < tile.steps; ++i, ++steps) {
        barriers.added.wait_empty(steps);
        added.bring(added_tile(steps), &barriers.added.full[steps % Shape::kDqAddedStages], head, tile.begin,
                    tile.end - tile.begin, tile.key(i), c.keys - tile.key(i));
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
        const float lse = present && first ? base_of<Shape>(c.x.lse[at]) : kInfinity;
        const float delta = sum_lanes<4>(present ? partial_delta<kDim>(c, tile.b, tile.h, query) : 0);
        if (first) numbers(tiles)[row] = {lse, delta};
        if (first && present) c.delta[at] = delta;
      }
      barriers.numbers.filled(tiles++);
    });
  }

  __device__ void compute(int group) const {
    const float scale = static_cast<float>(c.x.z.scale * kLog2E), over = 1 / static_cast<float>(c.x.z.scale);
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
        if constexpr (Shape::kAdds) {
          barriers.added.wait(steps);
          if (!Added::kMask) Added{c.x.extra}.add(s, added_tile(steps), 64 * group, over);
        }
#pragma unroll
        for (int n = 0; n < kKeys / 2; ++n) s[n] = fast_exp2(fmaf(s[n], scale, -rows[n / 2 % 2].x));
        tile.hide(c, i, s, 0);
        if constexpr (Shape::kAdds) {
          if (Added::kMask || any_nan(s)) Added{c.x.extra}.hide(s, added_tile(steps), 64 * group, over, 0);
          barriers.added.loaded(steps);
        }
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
      for (int i = own; i < tile.steps; ++i, ++steps) {
        barriers.others.wait(steps), barriers.others.release(steps);
        if constexpr (Shape::kAdds) barriers.added.wait(steps), barriers.added.loaded(steps);
      }
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
  // Weights of queries from the last one on, to which stale memory may have been added.
  template <typename T>
  __device__ static void hide_absent(const AttentionWgmma<T> &c, int query, float (&s)[kQueries / 2]) {
    const int present = c.queries - query - lane_index() % 4 * 2;
    hide_from<kQueries>(s, 0, present, 0), hide_from<kQueries>(s, 1, present, 0);
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
  using Added = AddedTiles<T, typename Shape::OfDkvAdded>;
  struct Barriers : AddedRing<Shape::kDkvAddedStages> {
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

  __device__ uint32_t added_tile(int i) const {
    return k_tile + Shape::kOfDkvAlone - 1024 + i % Shape::kDkvAddedStages * Shape::OfDkvAdded::kTile;
  }
  // By two warps.
  __device__ void bring() const {
    const Added added{c.x.extra, c.mask_end};
    int steps = 0;
    each_tile([&](const WgmmaKeys<Shape> &tile) {
      typename WgmmaKeys<Shape>::At at = {};
      int64_t head = 0;
      for (int i = 0; i < tile.steps; ++i, ++steps, tile.go_on(at)) {
        if (at.tile == 0) head = added.steps().at(tile.b, tile.kv * c.group + at.of_group);
        const int query = tile.query(at);
        barriers.added.wait_empty(steps);
        added.template bring<kDim == 64 ? 8 : 2>(added_tile(steps),
                                                 &barriers.added.full[steps % Shape::kDkvAddedStages], head, query,
                                                 c.queries - query, tile.begin, c.keys - tile.begin);
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
        for (int j = 0; j < kEach; ++j) to[32 * j] = base_of<Shape>(lse[j]), to[kQueries + 32 * j] = delta[j];
        barriers.others.filled(steps);
      }
    });
  }

  __device__ void compute(int group) const {
    const float scale = static_cast<float>(c.x.z.scale * kLog2E), over = 1 / static_cast<float>(c.x.z.scale);
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
          if constexpr (Shape::kAdds) barriers.added.wait(steps), barriers.added.loaded(steps);
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
        if constexpr (Shape::kAdds) {
          barriers.added.wait(steps);
          Added{c.x.extra}.add_across(s, added_tile(steps), 64 * group, over);
        }
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
        if constexpr (Shape::kAdds) {
          if (Added::kMask || any_nan(s)) Added{c.x.extra}.hide_across(s, added_tile(steps), 64 * group, over);
          if (tile.query(at) + kQueries > c.queries) tile.hide_absent(c, tile.query(at), s);
          barriers.added.loaded(steps);
        }
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
// registers, and goes through the queries that see them. ds goes to shared memory too, where both warpgroups read it
// for their half of what the keys add to dq. That goes through shared memory, and one thread adds it in float32 to
// memory, in the order of tiles of keys: `turns` counts for each tile of queries how many have added. The first one
// stores, and the last one rounds. Blocks take tiles by a counter, and wait for tiles taken before their own alone, so
// they cannot block each other. launch_one_pass has their order. kSums: steps whose part of dq may be on its way to
// memory; kHeld: whether fragments of k and v stay in registers; kShares: whether two blocks may have a tile of keys.
template <int kDim_, int kQueries_, int kStages_, int kRowStages_, int kSums_, bool kHeld_>
struct OnePassShape : WgmmaShape<kDim_, 2, kQueries_, kStages_, false> {
  using Base = WgmmaShape<kDim_, 2, kQueries_, kStages_, false>;
  static constexpr int kRowStages = kRowStages_, kSums = kSums_, kWeights = Base::kRows * kQueries_ * 2,
                       kSumsTile = 4 * kQueries_ * kDim_;
  static constexpr bool kHeld = kHeld_, kShares = kDim_ == 128;
  // Bytes of shared memory: k and v; stages of q and dy; ds twice; sums of dq; stages of lse and delta.
  static constexpr int kAtStages = kRowStages * 2 * Base::kTile,
                       kAtWeights = kAtStages + kStages_ * 2 * Base::kOtherTile;
  static constexpr int kAtSums = kAtWeights + 2 * kWeights, kAtNumbers = kAtSums + kSums * kSumsTile;
  static constexpr int kOfAll = kAtNumbers + kStages_ * Base::kNumbers;
  // Registers of a computing thread. The others have what 504 leave: 24 make the loader spill 4 bytes for each tile,
  // and with 232 products of a head_dim of 128 would wait for each other.
  static constexpr int kRegisters = kHeld ? 232 : 240;
  static_assert(kDim_ * kQueries_ == 8192);  // a warpgroup's share of dq is 64 x 64
  static constexpr int kParts = kQueries_ / 64;
  using Part = WgmmaShape<kDim_, 2, 64, kStages_, false>;
};

// Memory of a pass: lse, in units of log(2), and delta of each tile of queries; sums of dq; turns; the counter.
struct OnePassSpace {
  float *numbers, *sums;
  int *turns, *next;
  float scale;             // in units of log(2)
  bool rises;              // whether the light tiles of keys are first, but for those of `last_heads`
  int query_tiles, tiles;  // tiles: of keys, of all heads, and what is taken of those that two blocks have
  int heads_at_once, last_heads;
  // With kShares, the tiles from `whole` on, as many as `shared`, have two blocks: first those with the queries behind
  // the first `cut` tiles of them, then those with these. The warp that ends later adds what the other has left in
  // `parts`; each has two counts in `arrivals`.
  int whole, shared, cut;
  float *parts;
  int *arrivals;
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
// Orders accesses of threads and those of copies in bulk.
__device__ inline void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ inline void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Stores `bytes` of shared memory, or adds them in float32; both addresses are aligned to 16.
__device__ inline void bulk_store(float *to, uint32_t from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}
__device__ inline void bulk_add(float *to, uint32_t from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
__device__ inline void bulk_end() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until this thread's stores are read from shared memory; and until they are in memory.
__device__ inline void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ inline void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
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
  static constexpr int kDim = Shape::kDim, kQueries = Shape::kOthers, kTurns = 4, kParts = Shape::kParts;
  static constexpr int kPart = 64 * 128;  // bytes of 64 queries in a box; there is one box where there are parts
  using Part = typename Shape::Part;
  // A tile of keys. Where the light ones are first (rises), queries rise, and the last keys add to dq first; else
  // queries fall, and the first keys add first. All tiles of a head then begin at the same queries, and heads of a
  // group are in turn at each: one after another, light tiles would wait at each head for the heaviest.
  struct Keys : WgmmaKeys<Shape> {
    bool rises;
    int top, part;  // kShares: the first tile of queries; the number among tiles that two blocks have, if >= 0

    Keys() = default;
    __device__ Keys(const WgmmaKeys<Shape> &of, bool rises) : WgmmaKeys<Shape>(of), rises(rises) {}
    // How many tiles of keys add to dq of the queries of a step before this one, and whether none do after it.
    __device__ int turn(KeyTiles all) const {
      const int own = this->begin / Shape::kRows;
      return rises ? all.last - own : own - all.first;
    }
    __device__ bool is_last(KeyTiles all) const { return turn(all) == all.last - all.first; }
  };
  // Where a step's part of dq goes to that is the last of these queries.
  struct Place {
    int is_first, query, h;
  };
  // The loader's knowledge of a step. query: its first one, or ~ that where all of its queries see all keys; last: its
  // number among those of the block that are the last to add, or -1; ends: whether it is the last of its tile.
  struct Note {
    int query, last, ends;
  };
  struct Barriers {
    Ring<2> tiles;
    Ring<Shape::kRowStages> rows;
    Ring<Shape::kStages> others;
    Ring<kTurns> turns;  // of steps that are the last
    Ring<Shape::kSums> sums;
    Ring<kTurns> ready, added;  // the turns of steps, and what is added
    Keys tile[2];
    Note notes[Shape::kStages];
    Place place[kTurns];
  };
  using At = typename Keys::At;

  const AttentionWgmma<T> &c;
  const OnePassSpace &space;
  Barriers &barriers;
  uint32_t shared;

  // Each computing thread arrives for itself: compute-sanitizer's racecheck sees the accesses of a thread ordered by
  // its own arrival alone, and an arrival of one lane for its warp is no faster.
  __device__ void init() const {
    barriers.tiles.init(256 + 3), barriers.rows.init(256), barriers.others.init(256);
    barriers.turns.init(256), barriers.sums.init(256 + 1, 256);
    barriers.ready.init(1), barriers.added.init(1);
  }

  __device__ uint32_t k_tile(int i) const { return shared + i % Shape::kRowStages * 2 * Shape::kTile; }
  __device__ uint32_t v_tile(int i) const { return k_tile(i) + Shape::kTile; }
  __device__ uint32_t q_tile(int i) const {
    return shared + Shape::kAtStages + i % Shape::kStages * 2 * Shape::kOtherTile;
  }
  __device__ uint32_t dy_tile(int i) const { return q_tile(i) + Shape::kOtherTile; }
  __device__ uint32_t weights_tile(int i) const { return shared + Shape::kAtWeights + i % 2 * Shape::kWeights; }
  __device__ uint32_t sums_tile(int i) const { return shared + Shape::kAtSums + i % Shape::kSums * Shape::kSumsTile; }
  __device__ uint32_t numbers_at(int i) const {
    return shared + Shape::kAtNumbers + i % Shape::kStages * Shape::kNumbers;
  }
  __device__ const float2 *numbers(int i) const {
    return static_cast<const float2 *>(__cvta_shared_to_generic(numbers_at(i)));
  }

  __device__ Keys tile_of(int id) const {
    if constexpr (!Shape::kShares) return whole_tile(id);
    const bool is_second = id >= space.whole + space.shared;
    if (is_second) id -= space.shared;
    Keys tile = whole_tile(id);
    tile.part = id - space.whole;
    int end = tile.of_head, begin = 0;
    if (tile.part >= 0) (is_second ? end : begin) = min(space.cut, end);
    tile.top = end - 1, tile.steps = (end - begin) * c.group;
    return tile;
  }
  __device__ Keys whole_tile(int id) const {
    const int others = c.all_heads - space.last_heads;
    const bool is_last = id >= others * c.row_tiles, rises = space.rises && !is_last;
    const int before = is_last ? others : id / (space.heads_at_once * c.row_tiles) * space.heads_at_once;
    const int heads = is_last ? space.last_heads : min(space.heads_at_once, others - before);
    const int rest = id - before * c.row_tiles, rank = rest / heads, head = before + rest - rank * heads;
    return {WgmmaKeys<Shape>(c, rises ? c.row_tiles - 1 - rank : rank, head), rises};
  }
  // f(a tile of keys, its number among those of the block), by each thread that reads tiles.
  template <class F>
  __device__ void each_tile(F f) const {
    for (int tiles = 0;; ++tiles) {
      barriers.tiles.wait(tiles);
      const Keys &tile = barriers.tile[tiles % 2];
      if (tile.b < 0) return;
      f(tile, tiles);
      barriers.tiles.loaded(tiles);
    }
  }
  __device__ static At start(const Keys &tile) {
    return {0, tile.rises ? 0 : Shape::kShares ? tile.top : tile.of_head - 1};
  }
  __device__ void go_on(const Keys &tile, At &at) const {
    if (tile.rises) tile.go_on(at);
    else if (++at.of_group == c.group) at = {0, at.tile - 1};
  }
  __device__ int query_tile(const Keys &tile, At at) const {
    return (tile.b * c.heads_of_rows * c.group + tile.kv * c.group + at.of_group) * space.query_tiles +
           tile.query(at) / kQueries;
  }

  __device__ void load() const {
    int steps = 0, lasts = 0;
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
        const bool is_last = tile.is_last(key_tiles<Shape>(c, query, tile.length));
        barriers.notes[steps % Shape::kStages] = {tile.whole(at) ? ~query : query, is_last ? lasts++ : -1,
                                                  i == tile.steps - 1};
        uint64_t *const full = barriers.others.fill(steps, 2 * Shape::kOtherTile + Shape::kNumbers);
        load_tile<kDim>(c.q, q_tile(steps), full, kQueries, query, h, tile.b);
        bulk_load(numbers_at(steps), space.numbers + int64_t{query_tile(tile, at)} * 2 * kQueries, Shape::kNumbers,
                  full);
        load_tile<kDim>(c.dy, dy_tile(steps), full, kQueries, query, h, tile.b);
      }
    }
  }

  // By one thread: adds to dq of each step when it is this block's turn. Two more threads await turns ahead of it and
  // pass them on behind it. Warpgroups themselves have the last turn of a tile of queries, and are brought the sums.
  __device__ void take_turns() const {
    int steps = 0, lasts = 0;
    each_tile([&](const Keys &tile, int) {
      At at = start(tile);
      for (int i = 0; i < tile.steps; ++i, ++steps, go_on(tile, at)) {
        const KeyTiles all = key_tiles<Shape>(c, tile.query(at), tile.length);
        const int to = query_tile(tile, at), turn = tile.turn(all);
        if (tile.is_last(all)) barriers.turns.wait_empty(lasts), barriers.sums.wait_empty(steps);
        barriers.ready.wait(steps), fence_async(), barriers.ready.loaded(steps);
        if (tile.is_last(all)) {
          barriers.place[lasts % kTurns] = {turn == 0, tile.query(at), tile.kv * c.group + at.of_group};
          bring_sums(to, turn == 0, steps, lasts++);
          barriers.sums.wait(steps), barriers.sums.loaded(steps);
        } else {
          barriers.sums.wait(steps);
          add_sums(to, turn == 0, steps);
        }
        barriers.added.wait_empty(steps), barriers.added.filled(steps);
      }
    });
  }
  __device__ void await_turns() const {
    int steps = 0;
    each_tile([&](const Keys &tile, int) {
      At at = start(tile);
      for (int i = 0; i < tile.steps; ++i, ++steps, go_on(tile, at)) {
        const KeyTiles all = key_tiles<Shape>(c, tile.query(at), tile.length);
        barriers.ready.wait_empty(steps);
        await_turn(query_tile(tile, at), tile.turn(all));
        barriers.ready.filled(steps);
      }
    });
  }
  __device__ void pass_turns() const {
    int steps = 0;
    each_tile([&](const Keys &tile, int) {
      At at = start(tile);
      for (int i = 0; i < tile.steps; ++i, ++steps, go_on(tile, at)) {
        const KeyTiles all = key_tiles<Shape>(c, tile.query(at), tile.length);
        barriers.added.wait(steps);
        if (!tile.is_last(all)) store_release(&space.turns[query_tile(tile, at)], tile.turn(all) + 1);
        barriers.added.loaded(steps);
      }
    });
  }
  __device__ void await_turn(int query_tile, int turn) const {
    while (load_acquire(&space.turns[query_tile]) != turn) {
    }
    fence_async();
  }
  __device__ void add_sums(int query_tile, bool is_first, int i) const {
    for (int half = 0; half < 2; ++half) {
      float *const to = sums(query_tile) + half * 4096;
      const uint32_t from = sums_tile(i) + half * 16384;
      if (is_first) bulk_store(to, from, 16384);
      else bulk_add(to, from, 16384);
    }
    bulk_end();
    bulk_wait_read();
    barriers.sums.loaded(i);
    bulk_wait();
    fence_async();
  }
  __device__ void bring_sums(int query_tile, bool is_first, int i, int last) const {
    if (is_first) return barriers.turns.filled(last);
    uint64_t *const full = barriers.turns.fill(last, Shape::kSumsTile);
    for (int half = 0; half < 2; ++half)
      bulk_load(sums_tile(i) + half * 16384, sums(query_tile) + half * 4096, 16384, full);
  }
  __device__ float *sums(int query_tile) const { return space.sums + int64_t{query_tile} * (kQueries * kDim); }

  // Whether no key of this warpgroup is seen by a query of a part of a step; the same in a warp, for the compiler.
  __device__ bool hides(const Keys &tile, int group, int query, int part) const {
    const int key = tile.begin + 64 * group;
    const bool hidden =
        query >= 0 && (key >= tile.last || query + 64 * part + 64 <= WgmmaKeys<Shape>::first_query(c, key));
    return __shfl_sync(~0u, hidden, 0);
  }
  // Read before it is needed: each number takes a load and a shuffle.
  __device__ Note note(int i) const {
    Note found = {};
    if (lane_index() == 0) found = barriers.notes[i % Shape::kStages];
    return {__shfl_sync(~0u, found.query, 0), __shfl_sync(~0u, found.last, 0), __shfl_sync(~0u, found.ends, 0)};
  }
  __device__ static void clear(uint32_t (&ds)[4][4]) {
#pragma unroll
    for (auto &four : ds) four[0] = four[1] = four[2] = four[3] = 0;
  }

  // Scores of a part of a step become probabilities.
  __device__ void weigh(const Keys &tile, float (&s)[32], int i, int query, int part) const {
    const float scale = space.scale;
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
        pair[0] *= of_p[0] - less.x, pair[1] *= of_p[1] - less.y;
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
    if (part < kParts - 1) return;
    fence_async_shared();
    arrive_named(1 + i % 2 * 2 + group, 256);  // for the other warpgroup
  }

  // This warpgroup's 64 x 64 of ds^T k: half of the columns, or of the queries.
  __device__ void start_queries(float (&dq)[32], int group, int i, uint32_t k) const {
    const uint32_t part = group * Shape::kRows * 128;
    const uint64_t of_a = across_rows(weights_tile(i) + (kParts == 2 ? part : 0), Shape::kRows);
    const uint64_t of_b = across_rows(k + (kParts == 2 ? 0 : part), Shape::kRows);
    wait_named(1 + i % 2 * 2 + (group ^ 1), 256);
    fence_registers(dq);
    wgmma_begin();
#pragma unroll
    for (int n = 0; n < Shape::kRows / 16; ++n)
      Wgmma<T, 64, true, true>::run(of_a + units_across(n), of_b + units_across(n), dq, n > 0);
    wgmma_end();
  }

  // Sends this warpgroup's part of dq on its way to memory, or has the last turn.
  __device__ void add(float (&dq)[32], const Keys &tile, int group, int i, int last) const {
    const uint32_t to = sums_tile(i) + group * 16384 + static_cast<int>(threadIdx.x) % 128 * 16;
    barriers.sums.wait_empty(i);
    if (last < 0) {
#pragma unroll
      for (int n = 0; n < 8; ++n)
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + 2048 * n), "f"(dq[4 * n]),
                     "f"(dq[4 * n + 1]), "f"(dq[4 * n + 2]), "f"(dq[4 * n + 3])
                     : "memory");
      fence_async_shared();
    }
    barriers.sums.filled(i);
    if (last >= 0) finish(dq, tile, group, to, last);
    barriers.sums.loaded(i);
  }
  __device__ void finish(float (&dq)[32], const Keys &tile, int group, uint32_t sums, int i) const {
    barriers.turns.wait(i);
    const Place place = barriers.place[i % kTurns];
    if (!place.is_first) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        float4 sum;
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(sum.x), "=f"(sum.y), "=f"(sum.z), "=f"(sum.w)
                     : "r"(sums + 2048 * n)
                     : "memory");
        dq[4 * n] += sum.x, dq[4 * n + 1] += sum.y, dq[4 * n + 2] += sum.z, dq[4 * n + 3] += sum.w;
      }
    }
    const float times = static_cast<float>(c.x.z.scale) * tile.times, both[] = {times, times};
    const int dim = static_cast<int>(c.x.z.dim), column = kParts == 2 ? 0 : 64 * group;
    HeadRows<T> to = c.x.of_queries(c.dq, tile.b, place.h, dim);
    to.data += column;
    store_rows<64>(dq, to, place.query + (kParts == 2 ? 64 * group : 0), c.queries, dim - column, both);
    barriers.turns.loaded(i);
  }

  // The left factors of products of this warpgroup's rows.
  struct Factor {
    uint32_t tile, held[Shape::kHeld ? kDim / 16 : 1][4];
  };
  __device__ static void hold(Factor &a, int group) {
    if constexpr (Shape::kHeld) {
      const int lane = lane_index(), row = 64 * group + warp_index() % 4 * 16 + lane % 16;
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) {
        const uint32_t at = a.tile + k / 4 * Shape::kRows * 128 + row * 128 + ((k % 4 * 2 + lane / 16) ^ lane % 8) * 16;
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a.held[k][0]), "=r"(a.held[k][1]), "=r"(a.held[k][2]), "=r"(a.held[k][3])
                     : "r"(at)
                     : "memory");
      }
    }
  }
  __device__ static void start_products(float (&s)[32], Factor &a, int group, uint32_t b) {
    if constexpr (Shape::kHeld) {
      const uint64_t of_b = along_rows(b, 0);
      fence_registers(s), fence_registers(a.held);
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k)
        Wgmma<T, 64, false, false>::run(a.held[k], of_b + units_along(64, k), s, k > 0);
      wgmma_end();
    } else {
      start_rows<Part>(s, a.tile, 64 * group, b, T());
    }
  }

  // Sets rows of k and v to zero that are not there: p and ds are zero, but they may hold no numbers.
  __device__ void clear_keys(uint32_t k, int first) const {
    const int pieces = (Shape::kRows - first) * 8;
    for (int i = threadIdx.x; i < pieces * 2 * Shape::kBoxes; i += 256) {
      const uint32_t at = k + i / pieces * Shape::kRows * 128 + first * 128 + i % pieces * 16;
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
    }
    fence_async_shared();
    wait_named(8, 256);
  }

  // A tile has two blocks: adds what the other has summed of this warp's rows, or leaves this block's sums to the
  // other, and is false then. Two terms have the same sum in either order.
  __device__ bool gather(float (&dk)[kDim / 2], float (&dv)[kDim / 2], int part) const {
    int *const arrivals = space.arrivals + (part * 8 + warp_index()) * 2;
    float4 *const parts = reinterpret_cast<float4 *>(space.parts) + part * (kDim / 4 * 256) + threadIdx.x;
    int before = 0;
    if (lane_index() == 0) before = atomicAdd(arrivals, 1);
    if (__shfl_sync(~0u, before, 0) == 0) {
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        __stcg(parts + n * 256, float4{dk[4 * n], dk[4 * n + 1], dk[4 * n + 2], dk[4 * n + 3]});
        __stcg(parts + (n + kDim / 8) * 256, float4{dv[4 * n], dv[4 * n + 1], dv[4 * n + 2], dv[4 * n + 3]});
      }
      __threadfence();
      __syncwarp();
      if (lane_index() == 0) store_release(arrivals + 1, 1);
      return false;
    }
    while (load_acquire(arrivals + 1) == 0) {
    }
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const float4 k = __ldcg(parts + n * 256), v = __ldcg(parts + (n + kDim / 8) * 256);
      dk[4 * n] += k.x, dk[4 * n + 1] += k.y, dk[4 * n + 2] += k.z, dk[4 * n + 3] += k.w;
      dv[4 * n] += v.x, dv[4 * n + 1] += v.y, dv[4 * n + 2] += v.z, dv[4 * n + 3] += v.w;
    }
    return true;
  }

  __device__ void compute(int group) const {
    int steps = 0;
    each_tile([&](const Keys &tile, int tiles) {
      float dk[kDim / 2], dv[kDim / 2];
#pragma unroll
      for (int n = 0; n < kDim / 2; ++n) dk[n] = dv[n] = 0;
      barriers.rows.wait(tiles);
      if (tile.steps) {
        if (tile.last < tile.begin + Shape::kRows) clear_keys(k_tile(tiles), tile.last - tile.begin);
        Factor k, v;
        k.tile = k_tile(tiles), v.tile = v_tile(tiles);
        hold(k, group), hold(v, group);
        float s[32], dq[32];
        uint32_t ds[4][4];
        barriers.others.wait(steps);
        start_products(s, k, group, q_tile(steps));
        Note now = note(steps);
        wgmma_wait<0>();
        fence_registers(s);
#pragma unroll 1
        for (bool ends = false; !ends; ++steps) {
          const uint32_t q = q_tile(steps), dy = dy_tile(steps);
          float other[32];  // scores of the second part
          uint32_t p[4][4];
          // With one part a step that is hidden is computed: a branch around products has the compiler serialize them.
          if (kParts == 2 && hides(tile, group, now.query, 0)) {
            clear(ds);
            store_weights(ds, group, steps, 0);
          } else {
            float dp[32];
            start_products(dp, v, group, dy);
            weigh(tile, s, steps, now.query, 0);
            round_to_factor(p, s, T());
            start_weights<Part>(dv, p, dy, true, T());
            wgmma_wait<1>();
            fence_registers(dp);
            slope(s, dp, steps, 0);
            round_to_factor(ds, s, T());
            store_weights(ds, group, steps, 0);
            if constexpr (kParts == 2) {
              start_weights<Part>(dk, ds, q, true, T());
              wgmma_wait<1>();
              fence_registers(dv), fence_registers(p);
            }
          }
          if constexpr (kParts == 2) {
            if (hides(tile, group, now.query, 1)) {
              wgmma_wait<0>();
              fence_registers(dk), fence_registers(ds);
              clear(ds);
              store_weights(ds, group, steps, 1);
            } else {
              float dp[32];
              start_products(other, k, group, q + kPart);
              start_products(dp, v, group, dy + kPart);
              wgmma_wait<1>();
              fence_registers(other), fence_registers(dk), fence_registers(ds);
              weigh(tile, other, steps, now.query, 1);
              round_to_factor(p, other, T());
              start_weights<Part>(dv, p, dy + kPart, true, T());
              wgmma_wait<1>();
              fence_registers(dp), fence_registers(dk), fence_registers(ds);
              slope(other, dp, steps, 1);
              round_to_factor(ds, other, T());
              store_weights(ds, group, steps, 1);
              start_weights<Part>(dk, ds, q + kPart, true, T());
              wgmma_wait<1>();
              fence_registers(dv), fence_registers(p);
            }
          }
          start_queries(dq, group, steps, k.tile);
          // dq is added beside dk's product and the next scores'.
          if constexpr (kParts == 1) {
            start_weights<Part>(dk, ds, q, true, T());
            wgmma_wait<2>();
            fence_registers(dv), fence_registers(p);
          }
          ends = now.ends;
          const int next = ends ? steps : steps + 1, last = now.last;
          barriers.others.wait(next);
          start_products(s, k, group, q_tile(next));
          now = note(next);
          if constexpr (kParts == 2) wgmma_wait<1>(), fence_registers(dk), fence_registers(ds);
          else wgmma_wait<2>();
          fence_registers(dq);
          add(dq, tile, group, steps, last);
          if constexpr (kParts == 1) wgmma_wait<1>(), fence_registers(dk), fence_registers(ds);
          if (!ends) barriers.others.loaded(steps);
          wgmma_wait<0>();
          fence_registers(s);
        }
        barriers.others.loaded(steps - 1);
      }
      barriers.rows.loaded(tiles);
      if constexpr (Shape::kShares)
        if (tile.part >= 0 && !gather(dk, dv, tile.part)) return;
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
  static_assert(sizeof(barriers) <= 1024);
  const Block block{c, space, barriers, shared_address(attention_shared)};
  if (block.shared % 1024) __trap();
  if (threadIdx.x == 0) block.init(), mbarrier_init_fence();
  wait_for_kernel_before();
  __syncthreads();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);  // the same in a warp, for the compiler
  if (group < 2) {
    take_registers<Shape::kRegisters>();
    block.compute(group);
  } else {
    give_registers<504 - 2 * Shape::kRegisters>();
    const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
    if (lane_index() == 0) {
      if (warp == 0) block.load();
      else if (warp == 1) block.take_turns();
      else if (warp == 2) block.await_turns();
      else block.pass_turns();
    }
  }
#else
  __trap();  // compiled for other architectures, never launched there
#endif
}

constexpr int kNumbersBlock = 256, kNumbersEach = 4;  // threads; rows of each

// Prepares a pass: its numbers, turns and counter, and dq of the queries that no tile of keys sees. A block has a tile
// of queries, with kDim / 8 threads for each row. The first tiles, where the pass begins, are the last, so that L2
// holds their dy.
template <typename T, class Shape>
__global__ void __launch_bounds__(kNumbersBlock)
    attention_numbers_kernel(const __grid_constant__ AttentionWgmma<T> c, const OnePassSpace space) {
#ifdef CUTE_ARCH_MMA_SM90A_ENABLED
  constexpr int kLanes = Shape::kDim / 8, kQueries = Shape::kOthers, kRows = kNumbersBlock / kLanes;
  static_assert(kQueries == kRows * kNumbersEach);
  const int column = static_cast<int>(threadIdx.x) % kLanes * 8, first = static_cast<int>(threadIdx.x) / kLanes;
  const int dim = static_cast<int>(c.x.z.dim), v_dim = static_cast<int>(c.x.z.v_dim);
  const int heads = static_cast<int>(c.x.z.heads), tile = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  const int head = tile / space.query_tiles, begin = (tile - head * space.query_tiles) * kQueries;
  const int b = head / heads, h = head - b * heads;
  launch_next();
  const auto of_dy = c.x.of_results(c.x.dy, b, h), of_y = c.x.of_results(c.of_delta, b, h);
  uint4 dy[kNumbersEach], y[kNumbersEach];
  float lse[kNumbersEach];
#pragma unroll
  for (int j = 0; j < kNumbersEach; ++j) {
    const int query = begin + first + j * kRows;
    dy[j] = y[j] = {}, lse[j] = kInfinity;
    if (query < c.queries && column < v_dim) {
      dy[j] = *reinterpret_cast<const uint4 *>(of_dy[query] + column);
      y[j] = *reinterpret_cast<const uint4 *>(of_y[query] + column);
    }
    if (query < c.queries && column == 0) lse[j] = c.x.lse[c.x.row(b, h, query)] * static_cast<float>(kLog2E);
  }
  float *const to = space.numbers + int64_t{tile} * 2 * kQueries + first;
#pragma unroll
  for (int j = 0; j < kNumbersEach; ++j) {
    float delta = 0;
#pragma unroll
    for (int e = 0; e < 8; ++e)
      delta += widen(reinterpret_cast<const T *>(&dy[j])[e]) * widen(reinterpret_cast<const T *>(&y[j])[e]);
    delta = sum_lanes<kLanes>(delta);
    if (column == 0) to[j * kRows] = lse[j], to[j * kRows + kQueries] = delta;
  }
  if (threadIdx.x == 0) space.turns[tile] = 0;
  if (threadIdx.x == 0 && blockIdx.x == 0) *space.next = 0;
  if (Shape::kShares && threadIdx.x < 16 && blockIdx.x < space.shared)
    space.arrivals[blockIdx.x * 16 + threadIdx.x] = 0;
  const auto length = c.x.length(b);
  const KeyTiles seen = key_tiles<Shape>(c, begin, static_cast<int>(length.value));
  if (seen.last >= seen.first || column >= dim) return;
  const uint32_t word = narrow_word(0 * length.times, 0 * length.times, T());
  const auto of_dq = c.x.of_queries(c.dq, b, h, dim);
  for (int query = begin + first; query < min(begin + kQueries, c.queries); query += kRows)
    *reinterpret_cast<uint4 *>(of_dq[query] + column) = {word, word, word, word};
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
  to.arrivals = to.next + 1;
  to.parts = to.sums + (all * Shape::kOthers * Shape::kDim + all + 1 + 16 * kMostShared + 31) / 32 * 32;
  to.query_tiles = static_cast<int>(query_tiles);
  return to;
}

// Bytes of the heads in work at once: less than the 50 MB of L2. With 16 MB a head_dim of 128 has 0.75 to 0.95 of the
// rate.
constexpr int64_t kCached = 32 << 20;
// Full rows: the most tiles of one head in work at once, which move together, at the pace of the slowest. With 16 L2
// has less of what they share.
constexpr int kTogether = 32;

// The order of tiles of keys. Of a causal call the light ones are first, the last keys: each begins at queries of its
// own, so that no turn is awaited at the start. The last heads have the heavy ones first, so that blocks end together:
// one tile for each block, or two where there are few. As many heads as L2 holds are in work at once. Where those of
// groups have fewer tiles than there are blocks, heavy ones are first in sections of two tiles for each block: all
// tiles of a head then go through the same queries, of which L2 holds those of more heads.
inline void order_tiles(OnePassSpace &space, const AttentionSizes &z, int64_t of_head, int64_t row_tiles,
                        int64_t blocks) {
  const int64_t heads = z.batch * z.kv_heads, tiles = heads * row_tiles;
  const bool causal = z.right >= 0;
  int64_t at_once = std::max<int64_t>(kCached / of_head, 1);
  const bool falls = z.group() > 1 && at_once * row_tiles < blocks;
  if (!causal) at_once = std::max(at_once, ceil_div(blocks, kTogether));
  else if (falls) at_once = ceil_div(heads, std::max<int64_t>((tiles + blocks) / (2 * blocks), 1));
  space.rises = causal && !falls;
  space.heads_at_once = static_cast<int>(std::min(at_once, heads));
  const int64_t last = (tiles < 8 * blocks ? 2 : 1) * blocks;
  if (space.rises)
    space.last_heads = static_cast<int>(std::clamp<int64_t>((last + row_tiles / 2) / row_tiles, 1, heads));
}

// Where tiles have the same work, and the last round of blocks has fewer than there are: those of the last round leave
// some of their queries to the blocks that would have none, so that all end together. A block with one of them has a
// cost of about two steps. Others have n of these parts each.
inline void share_tiles(OnePassSpace &space, const AttentionSizes &z, int64_t blocks) {
  constexpr int64_t kCost = 2;
  const int64_t last = space.tiles % blocks, steps = space.query_tiles * z.group();
  space.whole = space.tiles;
  if (z.left >= 0 || z.right >= 0 || space.tiles < std::max(blocks, kLeastToShare) || last == 0 || last > kMostShared)
    return;
  const int64_t n = ceil_div(last, blocks - last), others = (steps + kCost - n * kCost) / (n + 1);
  space.cut = static_cast<int>((2 * others + z.group()) / (2 * z.group()));
  if (others < z.group() || z.batch * z.heads * space.query_tiles < last) return;
  space.whole = space.tiles - static_cast<int>(last);
  space.shared = static_cast<int>(last), space.tiles += space.shared;
}

template <typename T, class Shape>
Status launch_one_pass(const char *op, AttentionWgmma<T> c, float *memory, void *stream) {
  static_assert(Shape::kOfAll + 1024 <= 227 << 10);  // barriers have less than 1024
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
  const int64_t query_tiles = z.batch * z.heads * space.query_tiles;
  if (std::max(tiles, query_tiles) > INT32_MAX / 2)
    return fail(kNotImplemented, "%s: %lld tiles are too many", op, static_cast<long long>(tiles));
  const auto bound = [](int64_t n) { return static_cast<int>(std::min<int64_t>(n, kMostRows)); };
  c.left = bound(z.left), c.right = bound(z.right), c.shift = static_cast<int>(z.keys - z.queries);
  c.queries = static_cast<int>(z.queries), c.keys = static_cast<int>(z.keys), c.group = static_cast<int>(z.group());
  c.heads_of_rows = static_cast<int>(z.kv_heads), c.all_heads = static_cast<int>(heads);
  c.row_tiles = static_cast<int>(row_tiles), space.tiles = static_cast<int>(tiles);
  const int64_t of_head = (z.queries * z.group() * 8 + z.keys * 4) * Shape::kDim;  // bytes of q, dy, sums; k, v
  space.scale = static_cast<float>(z.scale * kLog2E);
  const int64_t blocks = std::min<int64_t>(tiles, limits.multiprocessors);
  order_tiles(space, z, of_head, row_tiles, blocks);
  if (Shape::kShares) share_tiles(space, z, blocks);
  AOT_TRY(launch_kernel(op, attention_numbers_kernel<T, Shape>, {static_cast<unsigned>(query_tiles), kNumbersBlock},
                        stream, c, space));
  LaunchShape shape{static_cast<unsigned>(blocks), Shape::kThreads, Shape::kOfAll};
  shape.overlap = true;
  return launch_kernel(op, attention_one_pass_kernel<T, Shape>, shape, stream, c, space);
}

}  // namespace AOT_ISA
}  // namespace aot
