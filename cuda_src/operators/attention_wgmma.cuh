// attention in 16 bits on Hopper: products by wgmma, of operands that one warp brings by TMA.
//
// A block has tiles of rows of a result, 64 for each warpgroup of consumers, and goes through tiles of others, which
// pass through kStages. As in attention_mma.cuh, weights stay in registers, where they are the left factor of the next
// product, and nothing is summed by two blocks:
//            rows      others    products of rows              of weights
//   y        queries   keys      s = q k^T                     y  += p v
//   dq       queries   keys      s = q k^T,  dp = dy v^T       dq += ds k
//   dk, dv   keys      queries   s = k q^T,  dp = v dy^T       dv += p dy,  dk += ds q
// Blocks are persistent: the warp that loads is a tile ahead.
#pragma once
#include "attention_wgmma_added.cuh"
#include "cuda/overlap.cuh"
#include "cuda/tma.cuh"
#include "cuda/wgmma.cuh"

namespace aot {
inline namespace AOT_ISA {

// kDim: head_dim, padded with zeros, and kVDim that of v; kOthers: of a step; kTurns: whether warpgroups issue their
// products in turns, so that one has exponentials beside the products of another.
// kExtra: of y, the call may have cu_seqlens, a softcap or sinks. kAdded: and what it adds to scores. kDrops: of y, it
// has dropout.
template <int kDim_, int kGroups_, int kOthers_, int kStages_, bool kTurns_, bool kExtra_ = false, int kVDim_ = kDim_,
          WgmmaAdded kAdded_ = WgmmaAdded::none, bool kDrops_ = false>
struct WgmmaShape {
  static constexpr int kDim = kDim_, kGroups = kGroups_, kOthers = kOthers_, kStages = kStages_, kVDim = kVDim_;
  static constexpr bool kTurns = kTurns_, kExtra = kExtra_, kAdds = kAdded_ != WgmmaAdded::none, kDrops = kDrops_;
  static constexpr WgmmaAdded kAdded = kAdded_;
  static constexpr int kRows = 64 * kGroups, kThreads = 128 * (kGroups + 1);
  static constexpr int kBoxes = (kDim + 63) / 64, kVBoxes = (kVDim + 63) / 64;             // of 128 bytes of a row
  static constexpr int kTile = kRows * kBoxes * 128, kOtherTile = kOthers * kBoxes * 128;  // bytes
  static constexpr int kVTile = kOthers * kVBoxes * 128;
  static constexpr int kNumbers = 2 * 4 * kOthers;  // bytes of lse and delta of a stage

  // Bytes of shared memory; tiles are aligned to 1024. Of y, queries have two tiles where there is room; of dq, lse and
  // delta of two tiles; of dk and dv, of each stage.
  static constexpr int kOnce = 1024 + kTile + kStages * (kOtherTile + kVTile);
  using OfAdded = AddedShape<kAdded, kRows, kOthers>;
  static constexpr int kAddedStages = OfAdded::stages(kOnce), kWithAdded = kOnce + kAddedStages * OfAdded::kTile;
  static constexpr int kQueryTiles = kWithAdded + kTile <= 224 << 10 ? 2 : 1;
  static constexpr int kOfY = kWithAdded + (kQueryTiles - 1) * kTile;
  static constexpr int kOfDqAlone = kOnce + kTile + 2 * 2 * 4 * kRows;
  static constexpr int kDqAddedStages = OfAdded::stages(kOfDqAlone);
  static constexpr int kOfDq = kOfDqAlone + kDqAddedStages * OfAdded::kTile;
  using OfDkvAdded = AddedShape<kAdded, kOthers, kRows>;
  static constexpr int kOfDkvAlone = kOnce + kTile + kStages * kNumbers;
  static constexpr int kDkvAddedStages = OfDkvAdded::stages(kOfDkvAlone);
  static constexpr int kOfDkv = kOfDkvAlone + kDkvAddedStages * OfDkvAdded::kTile;
};

// The fastest of those tried on an H200, of 512 to 16384 queries. Y of 64 has four warpgroups, whose exponentials fill
// what short tiles leave, and YLong three, whose steps of 128 keys cost fewer barriers (docs/lab_notes.md).
template <int kDim>
struct WgmmaShapes;
template <>
struct WgmmaShapes<64> {
  using Y = WgmmaShape<64, 4, 64, 4, true>;
  using YLong = WgmmaShape<64, 3, 128, 2, true>;
  using YExtra = WgmmaShape<64, 4, 64, 8, true, true>;
  using YDropped = WgmmaShape<64, 4, 64, 4, true, false, 64, WgmmaAdded::none, true>;
  using YMask = WgmmaShape<64, 2, 128, 3, true, false, 64, WgmmaAdded::mask>;
  using YBias = WgmmaShape<64, 2, 128, 3, true, false, 64, WgmmaAdded::bias>;
  template <WgmmaAdded kAdded>
  using DqAdded = WgmmaShape<64, 2, 64, 3, false, false, 64, kAdded>;
  template <WgmmaAdded kAdded>
  using DkvAdded = WgmmaShape<64, 2, 64, 3, false, false, 64, kAdded>;
  using Dq = WgmmaShape<64, 2, 128, 3, false>;
  using Dkv = WgmmaShape<64, 2, 96, 3, false>;
};
template <>
struct WgmmaShapes<96> {
  using Y = WgmmaShape<96, 2, 128, 2, true>;
};
template <>
struct WgmmaShapes<128> {
  using Y = WgmmaShape<128, 2, 128, 2, true>;
  using YExtra = WgmmaShape<128, 2, 128, 2, true, true>;
  using YDropped = WgmmaShape<128, 2, 128, 2, true, false, 128, WgmmaAdded::none, true>;
  using YMask = WgmmaShape<128, 2, 128, 2, true, false, 128, WgmmaAdded::mask>;
  using YBias = WgmmaShape<128, 2, 128, 2, true, false, 128, WgmmaAdded::bias>;
  template <WgmmaAdded kAdded>
  using DqAdded = WgmmaShape<128, 2, 64, 2, false, false, 128, kAdded>;
  template <WgmmaAdded kAdded>
  using DkvAdded = WgmmaShape<128, 2, 64, 2, false, false, 128, kAdded>;
  using Dq = WgmmaShape<128, 2, 96, 3, false>;
  using Dkv = WgmmaShape<128, 2, 64, 3, false>;
};
template <>
struct WgmmaShapes<192> {
  using Y = WgmmaShape<192, 2, 128, 2, true, false, 128>;
};
template <>
struct WgmmaShapes<256> {
  using Y = WgmmaShape<256, 2, 64, 2, true>;
};

constexpr int kMostSorted = 2048;  // row tiles, of a call with cu_seqlens

template <typename T>
struct AttentionWgmma {
  CUtensorMap q, k, v, dy;
  AttentionInputs<T> x;
  int left, right, shift;  // as in AttentionSizes, -1 without a bound; query i is beside key i + shift
  int queries, keys, group, heads_of_rows, all_heads, row_tiles;  // heads of rows in an example, and in all
  int rounds, sections, section_rounds, section_heads;            // of y: WgmmaTiles
  bool across_heads, sorted;
  T *y, *dq, *dk, *dv;
  float *lse;
  const T *of_delta;  // y, for the kernel of dq to compute delta from
  float *delta;
  const char *mask_end;
};

enum class WgmmaResult { y, dq, dkv };

// The work of a kernel's blocks. Those of the backward are in attention_wgmma_backward.cuh.
template <typename T, class Shape, WgmmaResult kResult>
struct WgmmaBlock;

#ifdef CUTE_ARCH_MMA_SM90A_ENABLED

// -------------------------------------------------------------------------------------------------------- products

// Descriptors of a tile of `rows` rows: to go along its rows, from `row` on; and across them. The next 16 elements, or
// rows, are so many units of 16 bytes on.
__device__ inline uint64_t along_rows(uint32_t tile, int row) { return wgmma_descriptor(tile + row * 128, 16); }
__device__ inline uint64_t across_rows(uint32_t tile, int rows) { return wgmma_descriptor(tile, rows * 128); }
AOT_BOTH_SIDES constexpr int units_along(int rows, int k) { return (k / 4 * rows * 128 + k % 4 * 32) / 16; }
AOT_BOTH_SIDES constexpr int units_across(int k) { return k * 16 * 128 / 16; }

// s = the products of 64 rows of a, from `row` on, and the rows of b.
template <class Shape, typename T>
__device__ inline void start_rows(float (&s)[Shape::kOthers / 2], uint32_t a, int row, uint32_t b, T) {
  const uint64_t of_a = along_rows(a, row), of_b = along_rows(b, 0);
  fence_registers(s);
  wgmma_begin();
#pragma unroll
  for (int k = 0; k < Shape::kDim / 16; ++k)
    Wgmma<T, Shape::kOthers, false, false>::run(of_a + units_along(Shape::kRows, k),
                                                of_b + units_along(Shape::kOthers, k), s, k > 0);
  wgmma_end();
}

// sums += weights b, or sums = weights b.
template <class Shape, typename T>
__device__ inline void start_weights(float (&sums)[Shape::kVDim / 2], uint32_t (&weights)[Shape::kOthers / 16][4],
                                     uint32_t b, bool add, T) {
  const uint64_t of_b = across_rows(b, Shape::kOthers);
  fence_registers(sums), fence_registers(weights);
  wgmma_begin();
#pragma unroll
  for (int k = 0; k < Shape::kOthers / 16; ++k)
    Wgmma<T, Shape::kVDim, false, true>::run(weights[k], of_b + units_across(k), sums, add || k > 0);
  wgmma_end();
}

template <int n, typename T>
__device__ inline void round_to_factor(uint32_t (&to)[n][4], const float (&from)[8 * n], T zero) {
#pragma unroll
  for (int k = 0; k < n; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) to[k][i] = narrow_word(from[8 * k + 2 * i], from[8 * k + 2 * i + 1], zero);
}

// Stores 64 rows, times a number for each of a thread's two: pairs of lanes exchange words, so that each has 8 bytes.
template <int kDim, typename T>
__device__ inline void store_rows(const float (&sums)[kDim / 2], HeadRows<T> to, int begin, int end, int dim,
                                  const float (&times)[2]) {
  const int lane = lane_index(), at = lane % 2 ? 8 + lane % 4 * 2 - 2 : lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = begin + warp_index() % 4 * 16 + lane / 4 + 8 * half;
    T *const of_row = to[row] + at;
#pragma unroll
    for (int j = 0; j < kDim / 16; ++j) {
      const float *const v = &sums[8 * j + 2 * half];
      const uint32_t w0 = narrow_word(v[0] * times[half], v[1] * times[half], T());
      const uint32_t w1 = narrow_word(v[4] * times[half], v[5] * times[half], T());
      const uint32_t other = __shfl_xor_sync(~0u, lane % 2 ? w0 : w1, 1);
      if (row < end && 16 * j + at < dim)
        *reinterpret_cast<uint2 *>(of_row + 16 * j) = lane % 2 ? uint2{other, w1} : uint2{w0, other};
    }
  }
}

// -------------------------------------------------------------------------------------------------------- barriers

__device__ inline void wait_named(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void arrive_named(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// A ring of stages. `full` counts the threads that fill a stage, and bytes; `empty` the warps, or threads, that have
// read it. A use i is counted from the block's first on.
template <int kStages>
struct Ring {
  uint64_t full[kStages], empty[kStages];

  __device__ void init(int readers, int fillers = 1) {
    for (int i = 0; i < kStages; ++i) mbarrier_init(&full[i], fillers), mbarrier_init(&empty[i], readers);
  }
  template <typename Index>
  __device__ void wait_empty(Index i) {
    mbarrier_wait(&empty[i % kStages], i / kStages % 2 ^ 1);
  }
  template <typename Index>
  __device__ uint64_t *fill(Index i, int bytes) {
    wait_empty(i);
    mbarrier_expect(&full[i % kStages], bytes);
    return &full[i % kStages];
  }
  // By each thread that wrote to the stage.
  template <typename Index>
  __device__ void filled(Index i) {
    mbarrier_arrive(&full[i % kStages]);
  }
  template <typename Index>
  __device__ void wait(Index i) {
    mbarrier_wait(&full[i % kStages], i / kStages % 2);
  }
  // By a warp whose products have read the stage; and by a thread that has loaded from it.
  template <typename Index>
  __device__ void release(Index i) {
    __syncwarp();
    if (lane_index() == 0) mbarrier_arrive(&empty[i % kStages]);
  }
  template <typename Index>
  __device__ void loaded(Index i) {
    mbarrier_arrive(&empty[i % kStages]);
  }
};

// The ring of tiles of what is added to scores; none where nothing is. Each computing thread arrives for itself.
template <int kStages>
struct AddedRing {
  Ring<kStages> added;
};
template <>
struct AddedRing<0> {};

// ----------------------------------------------------------------------------------------------------------- tiles

// f(row tile, head) for the tiles of this block. With `sorted`, the heaviest row tiles of all heads are first, and a
// block has some of each weight; else row tiles of a head are beside each other.
template <typename T, class F>
__device__ inline void each_attention_tile(const AttentionWgmma<T> &c, bool sorted, bool last_first, F f) {
  const int row_tiles = c.row_tiles, heads = c.all_heads, tiles = row_tiles * heads;
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  for (int round = 0; round * blocks < tiles; ++round) {
    const int tile = round * blocks + (round % 2 ? blocks - 1 - block : block);
    if (tile >= tiles) continue;
    const int rank = sorted ? tile / heads : tile % row_tiles;
    f(last_first ? row_tiles - 1 - rank : rank, sorted ? tile % heads : tile / row_tiles);
  }
}

// Loads rows of a head into a tile.
template <int kDim>
__device__ inline void load_tile(const CUtensorMap &map, uint32_t tile, uint64_t *full, int rows, int begin, int h,
                                 int b) {
#pragma unroll
  for (int i = 0; i < (kDim + 63) / 64; ++i) tma_load(map, tile + i * rows * 128, full, i * 64, begin, h, b);
}

// Sets rows of a tile from `first` on to zero, before products of this warpgroup read them.
template <class Shape>
__device__ inline void clear_rows(uint32_t tile, int first, int group) {
  const int pieces = (Shape::kOthers - first) * 8;
  for (int i = threadIdx.x % 128; i < pieces * Shape::kVBoxes; i += 128) {
    const uint32_t at = tile + i / pieces * Shape::kOthers * 128 + first * 128 + i % pieces * 16;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  wait_named(8 + group, 128);
}

// Sets the elements of a thread's row to `hidden` that are before others, and from others on.
template <int kOthers>
__device__ inline void hide_before(float (&s)[kOthers / 2], int half, int first, float hidden) {
#pragma unroll
  for (int n = 0; n < kOthers / 8; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (8 * n + e < first) s[4 * n + 2 * half + e] = hidden;
}
template <int kOthers>
__device__ inline void hide_from(float (&s)[kOthers / 2], int half, int end, float hidden) {
#pragma unroll
  for (int n = 0; n < kOthers / 8; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (8 * n + e >= end) s[4 * n + 2 * half + e] = hidden;
}

// Steps of a tile: those that a warpgroup computes, of which from whole_begin to whole_end all its rows see all keys;
// and all of the tile. `idle`: turns that it passes on after its steps, until all warpgroups have had as many.
struct WgmmaPart {
  int own, whole_begin, whole_end, steps, idle;
};

// A tile of queries, as QueryTile is: the keys that it goes through.
template <class Shape>
struct WgmmaQueries {
  static constexpr int kKeys = Shape::kOthers;
  int b, h, kv, begin, end, length, first, steps, whole_begin, whole_end;
  float times;
  int2 of_first, of_last;  // with kExtra, the sequences of the first row and the last

  WgmmaQueries() = default;
  // wrong: cu_seqlens that are not ascending.
  template <typename T>
  __device__ WgmmaQueries(const AttentionWgmma<T> &c, int tile, int head, bool wrong = false) {
    b = head / c.heads_of_rows, h = head - b * c.heads_of_rows, kv = c.group == 1 ? h : h / c.group;
    begin = tile * Shape::kRows, end = min(c.queries, begin + Shape::kRows);
    const auto found = c.x.length(b);
    length = wrong ? 0 : static_cast<int>(found.value), times = wrong ? __int_as_float(0x7fffffff) : found.times;
    int seen_begin = first_key(c, begin), seen_end = last_key(c, end - 1);
    whole_begin = first_key(c, end - 1), whole_end = last_key(c, begin);
    if constexpr (Shape::kExtra) {
      of_first = find_sequence(c, begin), of_last = find_sequence(c, end - 1);
      seen_begin = max(seen_begin, of_first.x), seen_end = min(seen_end, of_last.y);
    }
    const bool any = seen_end > seen_begin;
    first = any ? seen_begin / kKeys * kKeys : 0, steps = any ? (seen_end - first - 1) / kKeys + 1 : 0;
  }
  template <typename T>
  __device__ static int2 find_sequence(const AttentionWgmma<T> &c, int query) {
    if (!c.x.extra.offsets) return {0, INT32_MAX};
    const Range found = c.x.extra.sequence(query);
    return {static_cast<int>(found.begin), static_cast<int>(found.end)};
  }
  template <typename T>
  __device__ int2 sequence(const AttentionWgmma<T> &c, int query) const {
    return of_first.x == of_last.x && of_first.y == of_last.y ? of_first : find_sequence(c, query);
  }
  // The keys from first_key on, and before last_key, are those that a query sees.
  template <typename T>
  __device__ static int first_key(const AttentionWgmma<T> &c, int query) {
    return c.left < 0 ? 0 : max(0, query + c.shift - c.left);
  }
  template <typename T>
  __device__ int last_key(const AttentionWgmma<T> &c, int query) const {
    return c.right < 0 ? length : min(length, query + c.shift + c.right + 1);
  }

  // The steps up to the last key that a row of a warpgroup sees: at least one of those that there are. sequences: of
  // the tile's rows, with kExtra.
  template <typename T>
  __device__ int steps_of(const AttentionWgmma<T> &c, int group, const int2 *sequences = nullptr) const {
    const int row = min(end, begin + 64 * (group + 1)) - 1;
    int seen = last_key(c, row) - first;
    if constexpr (Shape::kExtra) seen = min(seen, sequences[row - begin].y - first);
    return min(steps, max(1, (seen + kKeys - 1) / kKeys));
  }
  // The steps of a warpgroup. It computes none without rows, and else so many that the others that it has to pass
  // fit into the stages beside its last one.
  template <typename T>
  __device__ WgmmaPart part(const AttentionWgmma<T> &c, int group, const int2 *sequences) const {
    const int low = begin + 64 * group, high = min(end, low + 64) - 1;
    if (low >= end) return {0, 0, 0, steps, 0};
    int from = first_key(c, high), to = last_key(c, low);
    if constexpr (Shape::kExtra) from = max(from, sequences[high - begin].x), to = min(to, sequences[low - begin].y);
    from = max(0, from - first), to = max(0, to - first);
    const int least = steps - (Shape::kStages - 1);
    return {max(steps_of(c, group, sequences), least), (from + kKeys - 1) / kKeys, to / kKeys, steps, 0};
  }
  __device__ int key(int step) const { return first + step * kKeys; }
  // The keys from here on no row sees, and they may not be there.
  __device__ int present() const { return Shape::kExtra ? min(length, of_last.y) : length; }
  __device__ bool whole(int step) const { return key(step) >= whole_begin && key(step) + kKeys <= whole_end; }
  // The query that is row 8 half of this lane.
  __device__ int query(int half) const {
    return begin + static_cast<int>(threadIdx.x) / 32 * 16 + lane_index() / 4 + 8 * half;
  }
  // Sets the elements of s to `hidden` whose keys their queries do not see.
  template <typename T>
  __device__ void hide(const AttentionWgmma<T> &c, int step, float (&s)[kKeys / 2], float hidden) const {
    if (whole(step)) return;
    const int from = key(step) + lane_index() % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      hide_from<kKeys>(s, half, last_key(c, query(half)) - from, hidden);
      if (c.left >= 0) hide_before<kKeys>(s, half, first_key(c, query(half)) - from, hidden);
    }
  }
};

// f(WgmmaQueries) for the tiles of this block; of a causal call those that see most keys are first.
template <class Shape, typename T, class F>
__device__ inline void each_query_tile(const AttentionWgmma<T> &c, F f) {
  each_attention_tile(c, c.right >= 0, c.right >= 0,
                      [&](int tile, int head) { f(WgmmaQueries<Shape>(c, tile, head)); });
}

// --------------------------------------------------------------------------------------------------------------- y

// The row tiles of a call with cu_seqlens, the heaviest first. Each block finds the same order.
struct WgmmaOrder {
  uint16_t steps[kMostSorted], tiles[kMostSorted];

  // By all threads of a block, which then waits for itself.
  template <class Shape, typename T>
  __device__ void find(const AttentionWgmma<T> &c) {
    const int threads = static_cast<int>(blockDim.x);
    for (int i = threadIdx.x; i < c.row_tiles; i += threads) steps[i] = min(WgmmaQueries<Shape>(c, i, 0).steps, 65535);
    __syncthreads();
    for (int i = threadIdx.x; i < c.row_tiles; i += threads) {
      int rank = 0;
      for (int j = 0; j < c.row_tiles; ++j) rank += steps[j] > steps[i] || (steps[j] == steps[i] && j > i);
      tiles[rank] = static_cast<uint16_t>(i);
    }
  }
};

// The tiles of queries of a block. Where the first keys are seen by most queries, and tiles differ in work, they are in
// sections of heads, and the heaviest tiles of a section are first; else row tiles of a head are beside each other.
template <class Shape, typename T>
class WgmmaTiles {
 public:
  __device__ WgmmaTiles(const AttentionWgmma<T> &c, const WgmmaOrder *order, bool wrong)
      : c_(c), order_(order), wrong_(wrong) {}

  // Whether there is one more, which tile() then is.
  __device__ bool next() {
    const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    while (++round_ < c_.rounds) {
      const int section = min(round_ / c_.section_rounds, c_.sections - 1);
      const int before = section * c_.section_heads, round = round_ - section * c_.section_rounds;
      const int heads = section == c_.sections - 1 ? c_.all_heads - before : c_.section_heads;
      const int i = round * blocks + (round % 2 ? blocks - 1 - block : block);
      if (i >= heads * c_.row_tiles) continue;
      if (c_.across_heads) tile_ = of_rank(i / heads), head_ = before + i % heads;
      else tile_ = i % c_.row_tiles, head_ = i / c_.row_tiles;
      return true;
    }
    return false;
  }
  __device__ WgmmaQueries<Shape> tile() const { return {c_, tile_, head_, wrong_}; }
  // A tile of keys at the same place: of a causal call the first keys are the heaviest.
  __device__ int key_tile() const { return c_.across_heads ? c_.row_tiles - 1 - tile_ : tile_; }
  __device__ int head() const { return head_; }

 private:
  __device__ int of_rank(int rank) const {
    if constexpr (Shape::kExtra)
      if (c_.sorted) return order_->tiles[rank];
    return c_.row_tiles - 1 - rank;
  }

  const AttentionWgmma<T> &c_;
  const WgmmaOrder *order_;
  bool wrong_;
  int round_ = -1, tile_ = 0, head_ = 0;
};

// The greater one, or NaN if one is NaN.
__device__ inline float max_or_nan(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}

// A warpgroup's products go on across tiles: the first scores of the next tile are computed beside the last product of
// one, and beside its store. One warp finds the tiles, whose divisions and searches take as long as a step or two, for
// the others to read; the one that loads is a tile ahead.
// The kernel starts while the one before it ends (cuda/overlap.cuh): each thread waits for that one before it reads or
// writes global memory.
template <typename T, class Shape>
struct WgmmaY {
  static constexpr int kDim = Shape::kDim, kVDim = Shape::kVDim, kKeys = Shape::kOthers, kGroups = Shape::kGroups;
  using Tile = WgmmaQueries<Shape>;
  using Added = AddedTiles<T, typename Shape::OfAdded>;
  static constexpr int kPlanned = 4, kNone = -1;  // kNone: steps of what is behind the last tile
  struct Barriers : AddedRing<Shape::kAddedStages> {
    Ring<kPlanned> plan;
    Ring<Shape::kQueryTiles> q[kGroups];
    Ring<Shape::kStages> k, v;
    Tile tiles[kPlanned];
    WgmmaPart parts[kPlanned][kGroups];
    int2 sequences[kPlanned][Shape::kExtra ? Shape::kRows : 1];

    __device__ void init() {
      plan.init(128 * kGroups + 1 + (Shape::kAdds ? kAddedThreads : 0), 32);
      for (auto &group : q) group.init(4);
      k.init(4 * kGroups), v.init(4 * kGroups);
    }
  };
  // A thread keeps of its two rows the largest score and the sum of the weights, 2^(score - most).
  struct Rows {
    float most[2], total[2], shrink[2];
  };
  const AttentionWgmma<T> &c;
  Barriers &barriers;
  uint32_t shared;
  const WgmmaOrder *order = nullptr;
  bool wrong = false;  // cu_seqlens

  __device__ uint32_t q_tile(unsigned n) const { return shared + n % Shape::kQueryTiles * Shape::kTile; }
  __device__ uint32_t k_tile(unsigned i) const {
    return shared + Shape::kQueryTiles * Shape::kTile + i % Shape::kStages * (Shape::kOtherTile + Shape::kVTile);
  }
  __device__ uint32_t v_tile(unsigned i) const { return k_tile(i) + Shape::kOtherTile; }

  // By a warp.
  __device__ void plan() const {
    if (c.x.lengths || Shape::kExtra) wait_for_kernel_before();
    WgmmaTiles<Shape, T> tiles(c, order, wrong);
    const int lane = lane_index();
    bool any = true;
    for (unsigned n = 0; any; ++n) {
      any = tiles.next();
      barriers.plan.wait_empty(n);
      if (any) plan(n % kPlanned, tiles.tile(), lane);
      else if (lane < kGroups) barriers.parts[n % kPlanned][lane].steps = kNone;
      barriers.plan.filled(n);
    }
  }
  __device__ void plan(unsigned slot, const Tile &tile, int lane) const {
    int2 *const sequences = barriers.sequences[slot];
    if constexpr (Shape::kExtra)
      for (int i = lane; i < Shape::kRows; i += 32) sequences[i] = tile.sequence(c, min(tile.begin + i, tile.end - 1));
    __syncwarp();
    if (lane == 0) barriers.tiles[slot] = tile;
    WgmmaPart part = tile.part(c, min(lane, kGroups - 1), sequences);
    const int turns = max(1, part.own);
    part.idle = __reduce_max_sync(~0u, turns) - turns;
    if (lane < kGroups) barriers.parts[slot][lane] = part;
  }
  __device__ WgmmaPart planned(unsigned n, int group) const {
    barriers.plan.wait(n);
    return barriers.parts[n % kPlanned][group];
  }
  __device__ const Tile &tile(unsigned n) const { return barriers.tiles[n % kPlanned]; }

  __device__ void load() const {
    wait_for_kernel_before();
    for (unsigned n = 0, steps = 0; planned(n, 0).steps != kNone; ++n) {
      const Tile tile = this->tile(n);
      barriers.plan.loaded(n);
      for (int i = 0; i < max(1, tile.steps); ++i) {
        if (i < tile.steps) load_keys<kDim>(c.k, k_tile(steps), barriers.k.fill(steps, Shape::kOtherTile), tile, i);
        if (i == 0) load_queries(tile, n);
        if (i < tile.steps)
          load_keys<kVDim>(c.v, v_tile(steps), barriers.v.fill(steps, Shape::kVTile), tile, i), ++steps;
      }
    }
  }
  template <int kColumns>
  __device__ void load_keys(const CUtensorMap &map, uint32_t to, uint64_t *full, const Tile &tile, int step) const {
    load_tile<kColumns>(map, to, full, kKeys, tile.key(step), tile.kv, tile.b);
  }
  __device__ void load_queries(const Tile &tile, unsigned n) const {
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
      load_tile<kDim>(c.q, q_tile(n) + g * 64 * 128, barriers.q[g].fill(n, Shape::kTile / kGroups), Shape::kRows,
                      tile.begin + 64 * g, tile.h, tile.b);
  }

  // By two warps.
  __device__ void bring() const {
    const Added added{c.x.extra, c.mask_end};
    wait_for_kernel_before();
    for (unsigned n = 0, steps = 0; planned(n, 0).steps != kNone; ++n) {
      const Tile &tile = this->tile(n);
      const int64_t head = added.steps().at(tile.b, tile.h);
      for (int i = 0; i < tile.steps; ++i, ++steps) {
        barriers.added.wait_empty(steps);
        added.bring(added_tile(steps), &barriers.added.full[steps % Shape::kAddedStages], head, tile.begin,
                    tile.end - tile.begin, tile.key(i), c.keys - tile.key(i));
      }
      barriers.plan.loaded(n);
    }
  }
  __device__ uint32_t added_tile(unsigned i) const {
    return k_tile(0) + Shape::kStages * (Shape::kOtherTile + Shape::kVTile) +
           i % Shape::kAddedStages * Shape::OfAdded::kTile;
  }

  __device__ void take_turn(int group) const {
    if (Shape::kTurns) wait_named(1 + group, 256);
  }
  __device__ void pass_turn(int group) const {
    if (Shape::kTurns) arrive_named(1 + (group + 1) % kGroups, 256);
  }

  using Sums = float[kVDim / 2];
  using Scores = float[kKeys / 2];
  using Weights = uint32_t[kKeys / 16][4];

  __device__ void compute(int group) const {
    wait_for_kernel_before();  // which may read where this one writes
    const MmaScores scores(c.x.z);
    const float scale = Shape::kExtra && scores.inner != 0 ? 1 : scores.scale;
    Sums sums;
    Scores s;
    Weights p = {};
    Rows rows;
    unsigned steps = 0;  // of this block, before those of the tile
    WgmmaPart part = planned(0, group);
    if (part.steps == kNone) return;
    const std::conditional_t<Shape::kDrops, MmaKept, Nothing> seeded(c.x.extra.dropout);
    if (group == kGroups - 1) pass_turn(group);
    wait_first(part, group, 0, 0);
    start_rows<Shape>(s, q_tile(0), 64 * group, k_tile(0), T());
#pragma unroll 1
    for (unsigned n = 0;; ++n) {
      const int own = part.own;
      const auto keeps = seeded.of(int64_t{tile(n).b} * c.x.z.heads + tile(n).h);
      uint32_t kept[2] = {};
      rows = begin(n);
      find_kept(kept, keeps, n, 0);
      wgmma_wait<0>();
      fence_registers(s);
      if (own <= 1) barriers.q[group].release(n);
      if (own) {
        barriers.k.release(steps);
        cap(s, scores);
        add(s, group, steps);
        hide(n, part, 0, s);
        weigh(s, scale, rows, group, steps);
        round_to_factor(p, s, T());
        drop(p, kept);
      }
#pragma unroll 1
      for (int i = 1; i < own; ++i) {
        const unsigned step = steps + i;
        barriers.k.wait(step);
        take_turn(group);
        start_rows<Shape>(s, q_tile(n), 64 * group, k_tile(step), T());
        barriers.v.wait(step - 1);
        start_weights<Shape>(sums, p, v_tile(step - 1), i > 1, T());
        pass_turn(group);
        find_kept(kept, keeps, n, i);
        wgmma_wait<1>();
        fence_registers(s);
        barriers.k.release(step);
        if (i == own - 1) barriers.q[group].release(n);
        cap(s, scores);
        add(s, group, step);
        hide(n, part, i, s);
        const bool shrinks = weigh(s, scale, rows, group, step);
        wgmma_wait<0>();
        fence_registers(sums), fence_registers(p);
        barriers.v.release(step - 1);
        round_to_factor(p, s, T());
        drop(p, kept);
        if (shrinks) shrink(sums, rows);
      }
      skip(group, own, steps, part.steps, part.idle);
      const unsigned last = steps + max(0, own - 1);
      steps += part.steps;
      const WgmmaPart next = planned(n + 1, group);
      const bool more = next.steps != kNone;
      if (own) wait_last(n, group, own, last);
      if (more) wait_first(next, group, n + 1, steps);
      take_turn(group);
      start_weights<Shape>(sums, p, v_tile(last), own > 1, T());
      // After the last tile these are scores of what lies there, which nothing reads.
      start_rows<Shape>(s, q_tile(n + 1), 64 * group, k_tile(steps), T());
      pass_turn(group);
      wgmma_wait<1>();
      fence_registers(sums);
      if (own) barriers.v.release(last);
      store(n, group, own, sums, rows);
      if (!more) break;
      barriers.plan.loaded(n);
      part = next;
    }
    wgmma_wait<0>();
    fence_registers(s);
  }
  // The keys of a step that dropout keeps, beside products: bits as MmaKept::mask takes them. Four lanes have two each
  // of eight adjacent keys, whose numbers one of them finds: the bits go to their lanes then. The compiler would move
  // all this behind the wait that follows, were it not for a trap, which is never taken.
  template <class Keeps>
  __device__ void find_kept(uint32_t (&kept)[2], const Keeps &keeps, unsigned n, int step) const {
    if constexpr (Shape::kDrops) {
      static_assert(kKeys <= 128);
      const Tile &tile = this->tile(n);
      const int fourth = lane_index() % 4;
      uint32_t found[2] = {};
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j)
        keeps.find(found, j, tile.query(j % 2), tile.key(step) / 8 + j / 2 * 4 + fourth);
      const bool high = fourth >= 2, odd = fourth % 2;
      const uint32_t other = __shfl_xor_sync(~0u, high ? found[0] : found[1], 2);
      const uint32_t first = high ? other : found[0], second = high ? found[1] : other;
      const uint32_t more = __shfl_xor_sync(~0u, __byte_perm(first, second, odd ? 0x5410 : 0x7632), 1);
      kept[0] = __byte_perm(first, more, odd ? 0x3254 : 0x5410);
      kept[1] = __byte_perm(second, more, odd ? 0x3276 : 0x7610);
      if (keeps.opaque_zero(kept[0] ^ kept[1])) __trap();
    }
  }
  __device__ static void drop(Weights &p, const uint32_t (&kept)[2]) {
    if constexpr (Shape::kDrops) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          MmaKept::mask(p[n / 2][n % 2 * 2 + half], kept[n / 2 % 2], n / 4 * 2 + half, n % 2);
    }
  }

  // Sets scores to -infinity whose keys their queries do not see.
  __device__ void hide(unsigned n, const WgmmaPart &part, int step, Scores &s) const {
    const Tile &tile = this->tile(n);
    const int from = tile.key(step) + lane_index() % 4 * 2;
    if (step >= part.whole_end) {
#pragma unroll
      for (int half = 0; half < 2; ++half) hide_from<kKeys>(s, half, seen(n, tile.query(half)).y - from, -kInfinity);
    }
    if (step < part.whole_begin) {
#pragma unroll
      for (int half = 0; half < 2; ++half) hide_before<kKeys>(s, half, seen(n, tile.query(half)).x - from, -kInfinity);
    }
  }
  __device__ int2 seen(unsigned n, int query) const {
    const Tile &tile = this->tile(n);
    int2 keys = {tile.first_key(c, query), tile.last_key(c, query)};
    if constexpr (Shape::kExtra) {
      const int2 own = barriers.sequences[n % kPlanned][query - tile.begin];
      keys = {max(keys.x, own.x), min(keys.y, own.y)};
    }
    return keys;
  }

  __device__ void skip(int group, int own, unsigned steps, int all, int idle) const {
#pragma unroll 1
    for (int i = own; i < all || idle > 0; ++i) {
      if (idle-- > 0) take_turn(group), pass_turn(group);
      if (i >= all) continue;
      barriers.k.wait(steps + i), barriers.k.release(steps + i);
      barriers.v.wait(steps + i), barriers.v.release(steps + i);
      if constexpr (Shape::kAdds) barriers.added.wait(steps + i), barriers.added.loaded(steps + i);
    }
  }
  // Waits for what the first product of a tile reads, and the last one.
  __device__ void wait_first(const WgmmaPart &part, int group, unsigned n, unsigned step) const {
    barriers.q[group].wait(n);
    if (part.steps) barriers.k.wait(step);
  }
  __device__ void wait_last(unsigned n, int group, int own, unsigned step) const {
    barriers.v.wait(step);
    const int last = tile(n).key(own - 1), length = tile(n).present();
    if (last + kKeys > length && length < c.keys) clear_rows<Shape>(v_tile(step), length - last, group);
  }

  // A sink is a score without a value, which the first of a row's lanes counts.
  __device__ Rows begin(unsigned n) const {
    Rows rows = {{-kInfinity, -kInfinity}, {}, {}};
    if constexpr (Shape::kExtra)
      if (c.x.extra.sinks) {
        const float sink = c.x.sink(tile(n).h) * static_cast<float>(kLog2E);
        const float counted = lane_index() % 4 == 0 && sink != -kInfinity ? 1 : 0;
        rows.most[0] = rows.most[1] = sink == kInfinity ? __int_as_float(0x7fffffff) : sink;
        rows.total[0] = rows.total[1] = counted;
      }
    return rows;
  }
  __device__ static void cap(Scores &s, const MmaScores &scores) {
    if constexpr (Shape::kExtra) {
      if (scores.inner == 0) return;
      float slope;
#pragma unroll
      for (int n = 0; n < kKeys / 2; ++n) s[n] = scores(s[n], &slope);
    }
  }

  // Adds a tile to scores; weigh releases it.
  __device__ void add(Scores &s, int group, unsigned step) const {
    if constexpr (Shape::kAdds) {
      barriers.added.wait(step);
      Added{c.x.extra}.add(s, added_tile(step), 64 * group, 1 / static_cast<float>(c.x.z.scale));
    }
  }

  // Scores become weights. `most` follows the largest score where that is more than kSlack above it, and what was
  // summed before is then to be multiplied by shrink, if weigh says so: weights of up to 2^kSlack are as exact. All
  // weights of a row that has a NaN, or infinity, are NaN, and so is lse, for the backward to make them so too.
  __device__ bool weigh(Scores &s, float scale, Rows &rows, int group, unsigned step) const {
    constexpr float kSlack = 8;
    float found[2];
    find_most(s, found);
    if constexpr (Shape::kAdds) {
      if (Added::kHides && __any_sync(~0u, isnan(found[0] + found[1]))) {
        Added{c.x.extra}.hide(s, added_tile(step), 64 * group, 1 / static_cast<float>(c.x.z.scale), -kInfinity);
        find_most(s, found);
      }
      barriers.added.loaded(step);
    }
    found[0] *= scale, found[1] *= scale;
    const bool rises = !(found[0] <= rows.most[0] + kSlack && found[1] <= rows.most[1] + kSlack);
    const bool shrinks = __any_sync(~0u, rises);
    if (shrinks) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float before = rows.most[half];
        if (!(found[half] <= before + kSlack))
          rows.most[half] = found[half] == kInfinity ? __int_as_float(0x7fffffff) : found[half];
        rows.shrink[half] = rows.most[half] == before ? 1 : fast_exp2(before - rows.most[half]);
        rows.total[half] *= rows.shrink[half];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float base = rows.most[half] == -kInfinity ? 0 : rows.most[half];
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float &score = s[4 * n + 2 * half + e];
          sum += score = fast_exp2(fmaf(score, scale, -base));
        }
      rows.total[half] += sum;
    }
    return shrinks;
  }
  __device__ static void find_most(const Scores &s, float (&found)[2]) {
    found[0] = found[1] = -kInfinity;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        found[half] = max_or_nan(found[half], max_or_nan(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]));
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2)
#pragma unroll
      for (float &most : found) most = max_or_nan(most, __shfl_xor_sync(~0u, most, lanes));
  }
  __device__ static void shrink(Sums &sums, const Rows &rows) {
#pragma unroll
    for (int n = 0; n < kVDim / 2; ++n) sums[n] *= rows.shrink[n / 2 % 2];
  }

  __device__ void store(unsigned n, int group, int own, Sums &sums, const Rows &rows) const {
    const Tile &tile = this->tile(n);
    float times[2];
    if (!own) {
#pragma unroll
      for (float &sum : sums) sum = 0;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = sum_lanes<4>(rows.total[half]);
      const float all = Shape::kDrops ? tile.times * static_cast<float>(c.x.extra.dropout.times) : tile.times;
      times[half] = total == 0 ? 0 * all : all / total;
      const int query = tile.query(half);
      if (c.lse && query < tile.end && lane_index() % 4 == 0)
        c.lse[c.x.row(tile.b, tile.h, query)] = (rows.most[half] + log2f(total)) * static_cast<float>(1 / kLog2E);
    }
    const int dim = static_cast<int>(c.x.z.v_dim);
    if (c.y)
      store_rows<kVDim>(sums, c.x.of_results(c.y, tile.b, tile.h), tile.begin + 64 * group, tile.end, dim, times);
  }
};

template <typename T, class Shape>
struct WgmmaBlock<T, Shape, WgmmaResult::y> {
  using type = WgmmaY<T, Shape>;
};

#endif

// --------------------------------------------------------------------------------------------------------- kernels

// Registers of a thread that computes, and of one that loads or prepares numbers: as many as the block starts with.
template <WgmmaResult kResult, int kGroups, bool kExtra = false, bool kAdds = false, int kDim = 0>
struct WgmmaRegisters {
  static constexpr int kOfAdded = kResult != WgmmaResult::dkv ? 72 : kDim > 64 ? 24 : 88;
  static constexpr int kPlain = kResult == WgmmaResult::dkv ? 24 : kResult == WgmmaResult::y && !kExtra ? 40 : 56;
  static constexpr int kSpare = kAdds ? kOfAdded : kPlain;
  static constexpr int kFew = kGroups == 2 ? kSpare : kResult == WgmmaResult::dq ? 56 : 32;
  static constexpr int kMany = kGroups == 2 ? (504 - kFew) / 2 : kGroups == 3 ? (512 - kFew) / 24 * 8 : 112;
  static constexpr int kAtStart = 65536 / 128 / (kGroups + 1) / 8 * 8;
  static_assert(kGroups * kMany + kFew <= (kGroups + 1) * kAtStart);  // else setmaxnreg waits for ever
};

template <typename T, class Shape, WgmmaResult kResult>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    attention_wgmma_kernel(const __grid_constant__ AttentionWgmma<T> c) {
#ifdef CUTE_ARCH_MMA_SM90A_ENABLED
  using Block = typename WgmmaBlock<T, Shape, kResult>::type;
  using Registers = WgmmaRegisters<kResult, Shape::kGroups, Shape::kExtra, Shape::kAdds, Shape::kDim>;
  constexpr int kGroups = Shape::kGroups, kWarps = 4 * kGroups;
  constexpr int kPreparing = kResult == WgmmaResult::y                     ? 0
                             : kResult == WgmmaResult::dq && !Shape::kAdds ? 3
                                                                           : 1;  // warps
  extern __shared__ __align__(1024) uint4 attention_shared[];
  __shared__ typename Block::Barriers barriers;
  Block block{c, barriers, (shared_address(attention_shared) + 1023) & ~1023u};
  if constexpr (kResult == WgmmaResult::y) launch_next();
  if constexpr (Shape::kExtra) {
    __shared__ WgmmaOrder order;
    wait_for_kernel_before();
    block.order = &order, block.wrong = c.x.wrong_offsets();
    if (c.sorted) order.find<Shape>(c);
  }
  if (threadIdx.x == 0) {
    if constexpr (kResult == WgmmaResult::y) {
      barriers.init();
    } else if constexpr (kResult == WgmmaResult::dq) {
      barriers.rows.init(kWarps), barriers.others.init(kWarps), barriers.numbers.init(32 * kWarps, 32 * kPreparing);
    } else {
      barriers.rows.init(kWarps), barriers.others.init(32 * kWarps, 1 + 32 * kPreparing);
    }
    if constexpr (Shape::kAdds) barriers.added.init(32 * kWarps, kAddedThreads);
    mbarrier_init_fence();
  }
  __syncthreads();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);  // the same in a warp, for the compiler
  if (group < kGroups) {
    take_registers<Registers::kMany>();
    block.compute(group);
  } else {
    give_registers<Registers::kFew>();
    const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
    if (warp == 0 && lane_index() == 0) block.load();
    if constexpr (kResult == WgmmaResult::y)
      if (warp == 1) block.plan();
    if constexpr (Shape::kAdds)
      if (warp >= 2) block.bring();
    if constexpr (kPreparing > 0)
      if (warp > 0 && warp <= kPreparing) block.prepare(warp - 1, kPreparing);
  }
#else
  __trap();  // compiled for other architectures, never launched there
#endif
}

// ------------------------------------------------------------------------------------------------------- launchers

constexpr int kMostRows = 1 << 28;  // differences of indices and bounds are then within int

// Whether these kernels take a call that mma_takes: with cu_seqlens, a softcap or sinks the forward alone, and a
// mask, a bias or, in the forward, dropout alone. A warpgroup goes through keys up to where its last query stands: keys
// have no sequences of their own.
template <typename T>
bool wgmma_takes(const AttentionInputs<T> &x, bool forward) {
  const AttentionSizes &z = x.z;
  const bool plain = x.plain() && z.softcap == 0, adds = x.extra.mask || x.extra.bias;
  if (x.extra.dropout && (!forward || !kWgmmaAdds<T> || !plain || std::max(z.dim, z.v_dim) > 128)) return false;
  if (x.extra.crossed() || (adds && !wgmma_adds(x)) || (!forward && !plain && !adds)) return false;
  const int64_t most_dim = plain ? 256 : 128;
  const bool fits = std::max({z.queries, z.keys, z.rows() / 8}) <= kMostRows && std::max(z.dim, z.v_dim) <= most_dim;
  return fits && z.scale > 0 && z.keys > 0 && z.rows() > 0 && TensorMaps::get().tiled;
}

// A tensor of heads, loaded in boxes of `rows` rows of 64 columns. row_heads: as in AttentionSizes.
template <typename T>
bool map_heads(CUtensorMap *map, const AttentionSizes &z, const T *data, int64_t heads, int64_t seq, int64_t dim,
               int rows, int64_t row_heads) {
  const DType dtype = std::is_same_v<T, __half> ? DType::float16 : DType::bfloat16;
  const int64_t row = z.heads_first ? dim : row_heads * dim, head = z.heads_first ? seq * dim : dim;
  return map_tiled<4>(map, dtype, data, {uint64_t(dim), uint64_t(seq), uint64_t(heads), uint64_t(z.batch)},
                      {row, head, row_heads * seq * dim}, {64, uint32_t(rows), 1, 1});
}

// About as many keys as a query sees on average.
inline int64_t mean_keys(const AttentionSizes &z) {
  const int64_t before = z.right < 0 ? z.keys : z.keys - z.queries / 2;
  return z.left < 0 ? before : std::min(before, z.left);
}

// The rounds of tiles that a section has: an even number, so that a block has a heavy tile for each light one. A short
// tile waits for its keys, which L2 keeps where sections are small. A long one has products meanwhile, and of large
// sections the heads fill the rounds better. With cu_seqlens, a few tiles may be far heavier than the others
// (docs/lab_notes.md).
inline int section_rounds(const AttentionSizes &z, bool packed) {
  constexpr int64_t kShortKeys = 512;
  return packed ? 8 : mean_keys(z) <= kShortKeys ? 2 : 4;
}

// Sections as WgmmaTiles goes through them: where tiles of a head differ in work, of so many rounds that a block has
// one of each weight, and the keys of a section's heads stay in the L2 cache.
template <typename T>
void order_tiles(AttentionWgmma<T> *c, int blocks, int rounds) {
  const bool packed = c->x.extra.offsets;
  c->across_heads = packed || (c->right >= 0 && c->left < 0);
  c->sorted = packed && c->row_tiles <= kMostSorted;
  const int of_section = c->across_heads && (c->sorted || !packed) ? rounds * blocks / c->row_tiles : 0;
  c->section_heads = of_section > 0 ? std::min(of_section, c->all_heads) : c->all_heads;
  c->sections = c->all_heads / c->section_heads;
  c->section_rounds = static_cast<int>(ceil_div(int64_t{c->section_heads} * c->row_tiles, blocks));
  const int64_t last = c->all_heads - int64_t{c->sections - 1} * c->section_heads;
  c->rounds = (c->sections - 1) * c->section_rounds + static_cast<int>(ceil_div(last * c->row_tiles, blocks));
}

template <typename T, class Shape, WgmmaResult kResult>
Status launch_attention_wgmma(const char *op, AttentionWgmma<T> c, void *stream) {
  constexpr bool kOfKeys = kResult == WgmmaResult::dkv;
  constexpr int kShared = kResult == WgmmaResult::y    ? Shape::kOfY
                          : kResult == WgmmaResult::dq ? Shape::kOfDq
                                                       : Shape::kOfDkv;
  static_assert(kShared <= 227 << 10);
  const AttentionSizes &z = c.x.z;
  const int of_q = kOfKeys                     ? Shape::kOthers
                   : kResult == WgmmaResult::y ? 64
                                               : Shape::kRows,
            of_k = kOfKeys ? Shape::kRows : Shape::kOthers;
  const bool mapped =
      map_heads(&c.q, z, c.x.q, z.heads, z.queries, z.dim, of_q, z.row_heads) &&
      map_heads(&c.k, z, c.x.k, z.kv_heads, z.keys, z.dim, of_k, z.kv_row_heads) &&
      map_heads(&c.v, z, c.x.v, z.kv_heads, z.keys, z.v_dim, of_k, z.kv_row_heads) &&
      (kResult == WgmmaResult::y || map_heads(&c.dy, z, c.x.dy, z.heads, z.queries, z.v_dim, of_q, z.heads));
  if (!mapped) return fail(kNotImplemented, "%s: the driver refuses a tensor map of these sizes", op);
  DeviceLimits limits;
  AOT_TRY(device_limits(op, &limits));
  const int64_t heads = kOfKeys ? z.kv_heads : z.heads,
                row_tiles = ceil_div(kOfKeys ? z.keys : z.queries, Shape::kRows);
  const int64_t tiles = z.batch * heads * row_tiles;
  if (tiles > INT32_MAX / 2)
    return fail(kNotImplemented, "%s: %lld tiles are too many", op, static_cast<long long>(tiles));
  const auto grid = static_cast<unsigned>(std::min<int64_t>(tiles, limits.multiprocessors));
  const auto bound = [](int64_t n) { return static_cast<int>(std::min<int64_t>(n, kMostRows)); };
  c.left = bound(z.left), c.right = bound(z.right), c.shift = static_cast<int>(z.keys - z.queries);
  c.queries = static_cast<int>(z.queries), c.keys = static_cast<int>(z.keys), c.group = static_cast<int>(z.group());
  c.heads_of_rows = static_cast<int>(heads), c.all_heads = static_cast<int>(z.batch * heads);
  c.row_tiles = static_cast<int>(row_tiles);
  if (Shape::kAdds && c.x.extra.mask) c.mask_end = end_of_mask(c.x);
  if (kResult == WgmmaResult::y) order_tiles(&c, static_cast<int>(grid), section_rounds(z, c.x.extra.offsets));
  LaunchShape shape{grid, Shape::kThreads, kShared};
  shape.overlap = kResult == WgmmaResult::y;
  return launch_kernel(op, attention_wgmma_kernel<T, Shape, kResult>, shape, stream, c);
}

// f(WgmmaShapes<kDim>()) with the head_dim that q, k and v are padded to: 64 or 128.
template <class F>
Status dispatch_wgmma(const AttentionSizes &z, F f) {
  return std::max(z.dim, z.v_dim) <= 64 ? f(WgmmaShapes<64>()) : f(WgmmaShapes<128>());
}

// As many mean_keys as YLong needs: with 16384 tokens of 16 heads YLong is 1.6 % faster at 2048 (causal, 4096 keys) and
// 2.7 % at 8192, and at 1024 Y is 1.3 % (causal) to 10 % faster.
constexpr int64_t kLongKeys = 2048;

// f(shape) with the shape of a plain forward.
template <class F>
Status dispatch_wgmma_y(const AttentionSizes &z, F f) {
  using Of64 = WgmmaShapes<64>;
  const int64_t dim = std::max(z.dim, z.v_dim);
  if (dim <= 64) return mean_keys(z) < kLongKeys ? f(Of64::Y()) : f(Of64::YLong());
  if (dim <= 96) return f(WgmmaShapes<96>::Y());
  if (dim <= 128) return f(WgmmaShapes<128>::Y());
  return dim <= 192 && z.v_dim <= 128 ? f(WgmmaShapes<192>::Y()) : f(WgmmaShapes<256>::Y());
}

}  // namespace AOT_ISA
}  // namespace aot
