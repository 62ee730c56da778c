// attention's gradients in 16 bits by mma.sync, in one pass: dq, dk and dv of head_dims up to 128.
//
// A block has rows of keys, 16 kM for each warp, and goes through tiles of queries, as the kernel of dk and dv in
// attention_mma.cuh. ds goes through shared memory besides, and each warp has a part of dq of the tile, the product of
// ds and the block's keys. The blocks that see a tile add their parts in float32, in a workspace, one after another,
// the one with the highest keys first: so the bits are the same again. Blocks are started from the highest keys on, and
// wait only for blocks that were started before them. If the call is causal they do not wait at all as long as they are
// equally fast: each begins at the tile of its own rows, where the ones with higher keys have not been.
#pragma once
#include "attention_mma.cuh"

namespace aot {
inline namespace AOT_ISA {

// kDown: of DqPart.
template <class Shape_, int kDown_>
struct MmaPassShape {
  using Shape = Shape_;
  static constexpr int kDown = kDown_;
};

// The inputs and results of a pass. dq, dk, dv: null if not wanted.
template <typename T>
struct MmaPass {
  AttentionInputs<T> x;
  T *dq, *dk, *dv;
  float *sums;  // of dq: for each warp's part of a tile as its lanes have it
  int *turns;   // of each part: 1 + the block of keys that was the last to add to it
  float *lse;   // of each query, in units of log(2), or null
  int heads_at_once;
};

// --------------------------------------------------------------------------------------------------------- clearing

// delta, turns of 0, and dq of queries that see no tile of keys: all is written if `all_seen` is not known.
template <typename T>
__global__ void __launch_bounds__(kDeltaBlock)
    attention_pass_begin_kernel(MmaPass<T> pass, const T *y, float *delta, int64_t turns, bool all_seen) {
  constexpr int kAtOnce = 16 / sizeof(T);
  const AttentionInputs<T> &x = pass.x;
  const AttentionSizes &z = x.z;
  const int64_t threads = int64_t{gridDim.x} * kDeltaBlock, thread = int64_t{blockIdx.x} * kDeltaBlock + threadIdx.x;
  for (int64_t i = thread; i < turns; i += threads) pass.turns[i] = 0;
  // 8 lanes for a row
  for (int64_t i = thread / 8; i < ceil_div(z.rows(), 4) * 4; i += threads / 8) {
    const bool present = i < z.rows();
    const int64_t head = (present ? i : 0) / z.queries, query = (present ? i : 0) % z.queries;
    const int64_t b = head / z.heads, h = head % z.heads;
    const T *const dy_row = x.of_results(x.dy, b, h)[query], *const y_row = x.of_results(y, b, h)[query];
    float sum = 0;
    for (int64_t j = lane_index() % 8 * kAtOnce; j < z.v_dim; j += 8 * kAtOnce) {
      const uint4 one = *reinterpret_cast<const uint4 *>(dy_row + j),
                  other = *reinterpret_cast<const uint4 *>(y_row + j);
      const T(&a)[kAtOnce] = reinterpret_cast<const T(&)[kAtOnce]>(one);
      const T(&c)[kAtOnce] = reinterpret_cast<const T(&)[kAtOnce]>(other);
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) sum += widen(a[e]) * widen(c[e]);
    }
    sum = sum_lanes<8>(sum);
    if (present && lane_index() % 8 == 0) {
      delta[i] = sum;
      if (pass.lse) pass.lse[i] = x.lse[i] == -kInfinity ? kInfinity : x.lse[i] * static_cast<float>(kLog2E);
    }
  }
  if (all_seen || !pass.dq) return;
  bool wrong = false;
  for (int64_t i = threadIdx.x; x.extra.offsets && i <= x.extra.sequences; i += kDeltaBlock) wrong |= x.misplaced(i);
  wrong = __syncthreads_or(wrong);
  for (int64_t i = thread / 8; i < z.rows(); i += threads / 8) {
    const int64_t head = i / z.queries, b = head / z.heads, h = head % z.heads;
    T *const row = x.of_queries(pass.dq, b, h, z.dim)[i % z.queries];
    const uint32_t word = wrong || x.length(b).times != 1 ? 0x7fff7fffu : 0;  // NaN
    for (int64_t j = lane_index() % 8 * kAtOnce; j < z.dim; j += 8 * kAtOnce)
      *reinterpret_cast<uint4 *>(row + j) = {word, word, word, word};
  }
}

// ------------------------------------------------------------------------------------------------------------- keys

// Tiles of queries [begin, end) that a block of keys meets.
struct MetTiles {
  int begin, end;
  __device__ bool has(int tile) const { return tile >= begin && tile < end; }
};

// A block's keys, and the queries that see them. Order: of its rows.
template <typename T, class Shape, class Order>
struct KeyTile {
  static constexpr int kQueries = Shape::kOthers, kM = Shape::kM, kRows = Shape::kRows;
  using Bits = uint32_t[kM];

  const AttentionInputs<T> &x;
  int64_t b, kv;
  int number, begin, end, last, whole_begin, whole_end;  // queries from whole_begin to whole_end see all keys
  MetTiles met, of_next, of_before;
  const int2 *own;  // of a packed call: the sequence of each row, in shared memory
  float times;

  // ascending: whether the blocks with the lowest keys are started first.
  __device__ KeyTile(const MmaPass<T> &pass, int2 *sequences, bool ascending = false) : x(pass.x), own(sequences) {
    const AttentionSizes &z = x.z;
    const int keys = static_cast<int>(z.keys), tiles = (keys - 1) / kRows + 1, block = static_cast<int>(blockIdx.x);
    const int first_head = block / (pass.heads_at_once * tiles) * pass.heads_at_once, rest = block - first_head * tiles;
    const int at_once = static_cast<int>(min(pass.heads_at_once, z.batch * z.kv_heads - first_head));
    const int head = first_head + rest % at_once;
    b = head / z.kv_heads, kv = head % z.kv_heads;
    number = ascending ? rest / at_once : tiles - 1 - rest / at_once, begin = number * kRows;
    end = keys - begin < kRows ? keys : begin + kRows;
    auto length = x.length(b);
    Range by_all = {z.seeing(end - 1, end).begin, z.seeing(begin, begin + 1).end};
    Range spans[3] = {};  // of the sequences of the block before, this one and the next
    if (x.extra.offsets) {
      int counts[6];
      const int64_t before = number ? begin - kRows : 0, after = end - 1 + kRows < keys ? end - 1 + kRows : keys - 1;
      const int64_t next = end < keys ? end : keys - 1;
      const int64_t rows[6] = {before, begin - 1, begin, end - 1, next, after};
      if (count_offsets(x, true, rows, counts)) length = {0, __int_as_float(0x7fffffff)};
      find_sequences<Shape>(sequences, x.extra, begin, true, counts[2], counts[3]);
      const auto seeing = [&](int i) { return x.extra.sequence_of(rows[i], counts[i], true); };
#pragma unroll
      for (int i = 0; i < 3; ++i) spans[i] = {seeing(2 * i).begin, seeing(2 * i + 1).end};
      by_all = {max(by_all.begin, seeing(3).begin), min(by_all.end, seeing(2).end)};
    }
    times = length.times, last = end < length.value ? end : static_cast<int>(length.value);
    if (last < begin + kRows) by_all.end = 0;  // rows that are no keys see none: there is no bias for them
    whole_begin = static_cast<int>(max(by_all.begin, int64_t{0})),
    whole_end = static_cast<int>(max(by_all.end, int64_t{0}));
    met = tiles_of(begin, length.value, spans[1]);
    of_next = number + 1 < tiles ? tiles_of(begin + kRows, length.value, spans[2]) : MetTiles{};
    of_before = number ? tiles_of(begin - kRows, length.value, spans[0]) : MetTiles{};
  }

  // Tiles of queries that a block of keys from `from` on meets. Of two blocks neither end is lower in the higher one,
  // so those that meet a tile are adjacent. A block that no query sees may be one of them, where its ends are in a
  // tile.
  __device__ MetTiles tiles_of(int64_t from, int64_t length, Range span) const {
    const int64_t to = min(from + kRows, min(x.z.keys, length));
    if (from >= to) return {};
    Range seeing = x.z.seeing(from, to);
    if (x.extra.offsets) seeing = {max(seeing.begin, span.begin), min(seeing.end, span.end)};
    const int first = static_cast<int>(seeing.begin / kQueries),
              past = static_cast<int>(ceil_div(max(seeing.end, 0), kQueries));
    return {first, first < past ? past : first};
  }

  __device__ static constexpr uint32_t all_bits() {
    static_assert(kQueries <= 64);
    return ((1u << kQueries / 4) - 1) * 0x10001u;
  }
  __device__ static int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
  __device__ static int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

  __device__ static int local(int i, int half) {
    constexpr int kGroups = kRows / Shape::kWarpRows;  // fewer than warps if pairs have the same rows
    const int group = kGroups < Shape::kThreads / 32 ? warp_index() % kGroups : warp_index();
    return group * Shape::kWarpRows + 16 * i + 8 * half + lane_index() / 4;
  }
  // Whether there are queries of a tile and keys that do not meet; the bits of those that do.
  __device__ bool find_partial(Bits &bits, int tile) const {
    const int query = tile * kQueries;
    if (query >= whole_begin && query + kQueries <= whole_end) {
#pragma unroll
      for (uint32_t &word : bits) word = all_bits();
      return false;
    }
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      bits[i] = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = Order::at(local(i, half)), key = begin + row;
        int2 range = within(x.z.seeing(key, key + 1), query, kQueries);
        if (x.extra.offsets) range = within_sequence(range, own[row], query);
        if (key < last) bits[i] |= lane_bits<kQueries>(range) << 16 * half;
      }
    }
    return true;
  }
  // The bits of the queries of a tile of a head of q that keep a key under dropout. Eight adjacent keys, whose bits
  // come at once, are those of four lanes: each finds them for two of the queries.
  __device__ void find_kept(Bits &bits, int64_t h, int tile) const {
    static_assert(kM == 1 && kQueries == 32 && std::is_same_v<Order, Adjacent<1>>);
    const KeptKeys kept = x.extra.dropout.of(b * x.z.heads + h);
    const int among = lane_index() / 4 % 4, first = tile * kQueries + lane_index() % 4 * 8;
    const uint32_t eight = (begin + Order::at(local(0, 0))) / 8;
    const uint32_t two = kept(first + 2 * among, eight) | kept(first + 2 * among + 1, eight) << 8;
    const uint32_t others = __shfl_xor_sync(~0u, two, 4), four = among % 2 ? others | two << 16 : two | others << 16;
    const uint32_t more = __shfl_xor_sync(~0u, four, 8), words[2] = {among < 2 ? four : more, among < 2 ? more : four};
    bits[0] = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint32_t own = words[j / 4] >> (8 * (j % 4) + 2 * among);
      bits[0] |= (own & 1) << j | (own >> 1 & 1) << (16 + j);
    }
  }
  __device__ static bool any(const Bits &bits, bool *partial) {
    uint32_t any = 0, all = all_bits();
#pragma unroll
    for (const uint32_t word : bits) any |= word, all &= word;
    *partial = __any_sync(~0u, all != all_bits());
    return __any_sync(~0u, any);
  }
};

// What is added to the scores of a block of keys, and which the mask hides, as AddedRows has it of a tile of queries. A
// lane has 2 kM adjacent keys, of the queries that its columns are.
template <typename T, class Shape>
class AddedColumns {
 public:
  using Tile = KeyTile<T, Shape, Adjacent<Shape::kM>>;
  static constexpr int kM = Shape::kM, kQueries = Shape::kOthers, kEach = kQueries / 4, kKeys = 2 * kM;
  using Sums = MmaSums<kM, kQueries>;
  static_assert(kEach == 8);  // a bit of a byte for each

  __device__ AddedColumns(const Tile &tile, bool fused) : tile_(tile), extra_(tile.x.extra) {
    mask_at_ = extra_.mask ? extra_.of_mask.at(tile.b, 0) : 0,
    bias_at_ = extra_.bias ? extra_.of_bias.at(tile.b, 0) : 0;
    const int bytes = extra_.wide_bias ? 4 : 2;
    fast_mask_ = extra_.mask && aligned(extra_.mask, mask_at_, extra_.of_mask, 1);
    fast_bias_ = fused && extra_.bias && aligned(extra_.bias, bias_at_, extra_.of_bias, bytes);
    over_ = static_cast<float>(1 / tile.x.z.scale);
    first_ = tile.begin + warp_index() * Shape::kWarpRows + lane_index() / 4 * kKeys;
  }

  // Begins to load what a tile of queries of a head of q needs.
  __device__ void load(int64_t h, int query_tile) {
    if (first_ >= tile_.end) return;
    if (fast_mask_) {
      const bool *const from = extra_.mask + mask_at_ + h * extra_.of_mask.head + first_;
#pragma unroll
      for (int j = 0; j < kEach; ++j) masks_[j] = *at<MaskWord>(from + query(query_tile, j) * extra_.of_mask.query);
    }
    if (!fast_bias_) return;
    const int64_t from = bias_at_ + h * extra_.of_bias.head + first_;
    if (extra_.wide_bias) {
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        load_words(bias_[j], *at<WideWord>(static_cast<const float *>(extra_.bias) + from +
                                           query(query_tile, j) * extra_.of_bias.query));
    } else {
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        load_words(bias_[j],
                   *at<Word>(static_cast<const T *>(extra_.bias) + from + query(query_tile, j) * extra_.of_bias.query));
    }
  }

  // Clears the bits of what is hidden, and begins the sums.
  __device__ void begin(Sums &s, uint32_t (&bits)[kM], int64_t h, int query_tile) const {
    if (fast_mask_) {
      uint32_t all = 0;  // byte k: of key k
#pragma unroll
      for (int j = 0; j < kEach; ++j) all |= __vsetne4(masks_[j], 0) << j;
#pragma unroll
      for (int i = 0; i < kM; ++i) bits[i] &= (all >> 16 * i & 0xff) | (all >> 16 * i & 0xff00) << 8;
    } else if (extra_.mask) {
      for_scores<kM, kQueries>([&](int i, int n, int half, int e, uint32_t bit) {
        const ScoreSteps &steps = extra_.of_mask;
        if (bits[i] & bit && !extra_.mask[mask_at_ + place(steps, h, query_tile, 2 * n + e, 2 * i + half)])
          bits[i] &= ~bit;
      });
    }
    if (!fast_bias_) return clear_sums(s);
    for_scores<kM, kQueries>([&](int i, int n, int half, int e, uint32_t) {
      const uint32_t (&words)[kKeys] = bias_[2 * n + e];
      const float more = extra_.wide_bias ? __uint_as_float(words[2 * i + half])
                                          : widen(reinterpret_cast<const T(&)[2]>(words[i])[half]);
      s[i][n][2 * half + e] = more * over_;
    });
    float least = 0;
    for_scores<kM, kQueries>(
        [&](int i, int n, int half, int e, uint32_t) { least = fminf(least, s[i][n][2 * half + e]); });
    if (!__any_sync(~0u, least == -kInfinity)) return;
    for_scores<kM, kQueries>([&](int i, int n, int half, int e, uint32_t bit) {
      if (s[i][n][2 * half + e] == -kInfinity) bits[i] &= ~bit;
    });
  }

  __device__ bool adds_later() const { return extra_.bias && !fast_bias_; }
  // Adds a bias that begin has not to scores.
  __device__ void add(Sums &s, uint32_t (&bits)[kM], int64_t h, int query_tile) const {
    for_scores<kM, kQueries>([&](int i, int n, int half, int e, uint32_t bit) {
      if (!(bits[i] & bit)) return;
      const int64_t at = bias_at_ + place(extra_.of_bias, h, query_tile, 2 * n + e, 2 * i + half);
      const float more = tile_.x.number(extra_.bias, extra_.wide_bias, at) * static_cast<float>(kLog2E);
      s[i][n][2 * half + e] += more;
      if (more == -kInfinity) bits[i] &= ~bit;
    });
  }

 private:
  using MaskWord = std::conditional_t<kM == 1, uint16_t, uint32_t>;
  using Word = std::conditional_t<kM == 1, uint32_t, uint2>;
  using WideWord = std::conditional_t<kM == 1, uint2, uint4>;
  static_assert(kM <= 2);

  template <typename W>
  __device__ static const W *at(const void *p) {
    return static_cast<const W *>(p);
  }
  __device__ static void load_words(uint32_t (&to)[kKeys], uint32_t x) { to[0] = x; }
  __device__ static void load_words(uint32_t (&to)[kKeys], uint2 x) { to[0] = x.x, to[1] = x.y; }
  __device__ static void load_words(uint32_t (&to)[kKeys], uint4 x) {
    to[0] = x.x, to[1] = x.y;
    if constexpr (kM == 2) to[2] = x.z, to[3] = x.w;
  }
  // Whether keys are adjacent, and those of a lane in one word.
  __device__ bool aligned(const void *p, int64_t begin, const ScoreSteps &steps, int bytes) const {
    const uintptr_t all = reinterpret_cast<uintptr_t>(p) |
                          static_cast<uintptr_t>((begin | steps.query | steps.head | tile_.x.z.keys) * bytes);
    return steps.key == 1 && all % (kKeys * bytes) == 0;
  }
  // The query of column j of this lane, or one that exists.
  __device__ int64_t query(int query_tile, int j) const {
    const int64_t query = query_tile * kQueries + lane_index() % 4 * kEach + j;
    return query < tile_.x.z.queries ? query : tile_.x.z.queries - 1;
  }
  __device__ int64_t place(const ScoreSteps &steps, int64_t h, int query_tile, int j, int key) const {
    return h * steps.head + query(query_tile, j) * steps.query + (first_ + key) * steps.key;
  }

  const Tile &tile_;
  const AttentionExtras &extra_;
  int64_t mask_at_, bias_at_;  // where those of the example begin
  float over_;
  int first_;
  bool fast_mask_, fast_bias_;
  uint32_t masks_[kEach] = {}, bias_[kEach][kKeys] = {};
};

// ---------------------------------------------------------------------------------------------------------- dq

// A warp's part of dq of a tile of queries. kDown: warps that share the columns of such a part, each of some queries.
template <class Shape, int kDown>
struct DqPart {
  static constexpr int kWarpsAcross = Shape::kWarps / kDown, kAcross = Shape::kDim / kWarpsAcross;  // columns of a warp
  static constexpr int kM = Shape::kOthers / 16 / kDown, kWords = kM * kAcross / 2;                 // numbers of a lane
  static_assert(kAcross % 16 == 0 && kM > 0 && kWords % 4 == 0);
  __device__ static int row() { return warp_index() / kWarpsAcross * 16 * kM; }
  __device__ static int column() { return warp_index() % kWarpsAcross * kAcross; }
  using Sums = MmaSums<kM, kAcross>;

  // sums = ds^T keys; ds: (keys, queries).
  template <typename T>
  __device__ static void multiply(Sums &sums, uint32_t ds, uint32_t keys, T zero) {
    constexpr int kQueries = Shape::kOthers, kDim = Shape::kDim;
    const int lane = lane_index(), eighth = lane % 8, low = lane / 8 % 2, high = lane / 16;
    const LaneRows<kQueries> of_a(ds, 8 * high + eighth, low);
    const LaneRows<kDim> of_b(keys, 8 * low + eighth, high);
#pragma unroll 4
    for (int k = 0; k < Shape::kRows / 16; ++k) {
      uint32_t left[kM][4];
#pragma unroll
      for (int i = 0; i < kM; ++i) load_transposed_matrices(left[i], of_a(row() / 16 + i) + k * 16 * kQueries * 2);
#pragma unroll
      for (int n = 0; n < kAcross / 16; ++n) {
        uint32_t right[4];
        load_transposed_matrices(right, of_b(column() / 16 + n) + k * 16 * kDim * 2);
#pragma unroll
        for (int i = 0; i < kM; ++i) {
          multiply_add(sums[i][2 * n], left[i], right[0], right[1], zero);
          multiply_add(sums[i][2 * n + 1], left[i], right[2], right[3], zero);
        }
      }
    }
  }
};

__device__ inline void add_in_memory(float *to, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]),
               "f"(x[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) atomicAdd(to + i, x[i]);
#endif
}

// ------------------------------------------------------------------------------------------------------- the pass

// Turns of a warp's parts of dq. A step passes on the turn of the one before, whose additions are then likely done.
class Turns {
 public:
  // Reads a turn, in time for wait.
  __device__ void look(const int *turn) {
    if (lane_index() == 0) found_ = load(turn);
  }
  __device__ void wait(const int *turn, int expected) {
    if (expected && lane_index() == 0)
      for (; found_ != expected; found_ = load(turn)) __nanosleep(20);
    __syncwarp();
  }
  __device__ void done(int *turn) { before_ = turn; }
  __device__ void pass_on(int number) {
    __syncwarp();
    if (before_ && lane_index() == 0)
      asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(before_), "r"(number + 1) : "memory");
    before_ = nullptr;
  }

 private:
  __device__ static int load(const int *turn) {
    int found;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(turn) : "memory");
    return found;
  }
  int *before_ = nullptr;
  int found_ = 0;
};

template <class Shape>
constexpr int kPassShared = Shape::shared(2, true, true) + Shape::kRows * Shape::kOthers * 2;

template <typename T, class Shape, int kDown>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks) attention_pass_kernel(MmaPass<T> pass) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  if constexpr (!runs_here(kPassShared<Shape>)) return;
  constexpr int kDim = Shape::kDim, kM = Shape::kM, kQueries = Shape::kOthers;
  using Part = DqPart<Shape, kDown>;
  extern __shared__ __align__(1024) uint4 attention_shared[];
  char *const shared = reinterpret_cast<char *>(attention_shared);
  const AttentionInputs<T> &x = pass.x;
  const AttentionSizes &z = x.z;
  const uint32_t k_tile = shared_address(attention_shared), v_tile = k_tile + Shape::kTile;
  const uint32_t stages = v_tile + Shape::kTile, ds_tile = stages + 4 * Shape::kOtherTile;
  const auto stage = [=](int parity) { return stages + parity * (2 * Shape::kOtherTile); };
  constexpr int kDsBytes = Shape::kRows * kQueries * 2;
  float (*const numbers)[2][kQueries] =
      reinterpret_cast<float (*)[2][kQueries]>(shared + Shape::shared(2, false) + kDsBytes);
  using Order = Adjacent<kM>;
  using Tile = KeyTile<T, Shape, Order>;
  const Tile tile(pass, reinterpret_cast<int2 *>(shared + Shape::shared(2, true) + kDsBytes));
  const int dim = static_cast<int>(z.dim), v_dim = static_cast<int>(z.v_dim), begin = tile.begin;
  const int of_head = tile.met.end - tile.met.begin;
  const int query_tiles = (static_cast<int>(z.queries) - 1) / kQueries + 1;

  const auto fetch = [&](MmaStep next) {
    const int64_t h = tile.kv * z.group() + next.head;
    const int query = (tile.met.begin + next.tile) * kQueries;
    copy_rows<Shape, kQueries, Spread<kQueries>>(stage(next.parity), x.of_queries(x.q, tile.b, h, z.dim), query,
                                                 z.queries, dim);
    copy_rows<Shape, kQueries, Spread<kQueries>>(stage(next.parity) + Shape::kOtherTile, x.of_results(x.dy, tile.b, h),
                                                 query, z.queries, v_dim);
    if (threadIdx.x < kQueries) {
      const int64_t i = query + Spread<kQueries>::at(threadIdx.x), at = x.row(tile.b, h, i);
      const float lse = i < z.queries ? x.lse[at] * static_cast<float>(kLog2E) : kInfinity;
      numbers[next.parity][0][threadIdx.x] = lse == -kInfinity ? kInfinity : lse;
      numbers[next.parity][1][threadIdx.x] = i < z.queries ? x.delta[at] : 0;
    }
  };
  copy_rows<Shape, Shape::kRows, Order>(k_tile, x.of_keys(x.k, tile.b, tile.kv, z.dim), begin, tile.last, dim);
  copy_rows<Shape, Shape::kRows, Order>(v_tile, x.of_keys(x.v, tile.b, tile.kv, z.v_dim), begin, tile.last, v_dim);
  MmaStep step;
  if (of_head) fetch(step);
  commit_copies();

  const MmaScores scores(z);
  const bool scaled = scores.scaled();
  const float q_scale = static_cast<float>(z.scale) * tile.times;
  const int warp_row = warp_index() * Shape::kWarpRows;
  MmaSums<kM, kDim> dk_sums = {}, dv_sums = {};
  AddedColumns<T, Shape> added(tile, scaled);
  const bool fused = scaled && !added.adds_later();
  const float scale = fused ? scores.scale : 1;
  const bool drops(x.extra.dropout);
  const float kept_times = drops ? static_cast<float>(x.extra.dropout.times) : 1;
  const auto prepare = [&](MmaStep next) { added.load(tile.kv * z.group() + next.head, tile.met.begin + next.tile); };
  if (of_head) prepare(step);
  Turns turns;
#pragma unroll 1
  for (; of_head && step.head < z.group(); step = step.next(of_head)) {
    const MmaStep next = next_step(step, of_head, z.group(), fetch);
    const uint32_t q_tile = stage(step.parity), dy_tile = q_tile + Shape::kOtherTile;
    const float *const lse = numbers[step.parity][0], *const delta = numbers[step.parity][1];
    const int query_tile = tile.met.begin + step.tile;
    typename Tile::Bits bits, kept;
    bool partial = tile.find_partial(bits, query_tile);
    MmaFactor<kM, kQueries> weights = {};
    MmaSums<kM, kQueries> s, dp = {};
    const int64_t h = tile.kv * z.group() + step.head;
    added.begin(s, bits, h, query_tile);
    if (tile.any(bits, &partial)) {
      if (drops) tile.find_kept(kept, h, query_tile);
      multiply_rows<kDim, kM, kQueries, Shape::kUnroll>(s, k_tile, warp_row, q_tile, T());
      multiply_rows<kDim, kM, kQueries, Shape::kUnroll>(dp, v_tile, warp_row, dy_tile, T());
      if (drops) {
        for_scores<kM, kQueries>([&](int i, int n, int half, int e, uint32_t bit) {
          float &of_p = dp[i][n][2 * half + e];
          of_p = kept[i] & bit ? of_p * kept_times : 0;
        });
      }
      const auto column = [](int n, int e) { return 8 * n + lane_index() % 4 * 2 + e; };
      if (!fused)
        for_scores<kM, kQueries>([&](int i, int n, int half, int e, uint32_t) {
          float slope, &score = s[i][n][2 * half + e], &of_p = dp[i][n][2 * half + e];
          score = scores(score, &slope);
          of_p = of_p * slope + delta[column(n, e)] * (1 - slope);
        });
      if (added.adds_later()) added.add(s, bits, h, query_tile), partial = true;
      for_scores<kM, kQueries>([&](int i, int n, int half, int e, uint32_t) {
        float &score = s[i][n][2 * half + e], &of_p = dp[i][n][2 * half + e];
        score = fast_exp2(score * scale - lse[column(n, e)]);
        of_p = score * (of_p - delta[column(n, e)]);
      });
      if (partial)
        for_scores<kM, kQueries>([&](int i, int n, int half, int e, uint32_t bit) {
          if (!(bits[i] & bit)) s[i][n][2 * half + e] = dp[i][n][2 * half + e] = 0;
        });
      if (drops)
        for_scores<kM, kQueries>([&](int i, int n, int half, int e, uint32_t bit) {
          if (!(kept[i] & bit)) s[i][n][2 * half + e] = 0;
        });
      round_weights<kM, kQueries>(weights, s, T());
      multiply_weights<kDim, kM, kQueries>(dv_sums, weights, dy_tile, T());
      round_weights<kM, kQueries>(weights, dp, T());
    }
    if (pass.dq) {
#pragma unroll
      for (int i = 0; i < kM; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int n = 0; n < kQueries / 8; ++n) {
            const uint32_t at = piece_address<kQueries>(ds_tile, tile.local(i, half), n) + lane_index() % 4 * 4;
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(weights[i][n / 2][n % 2 * 2 + half]) : "memory");
          }
    }
    const int64_t part = ((tile.b * z.heads + h) * query_tiles + query_tile) * Shape::kWarps + warp_index();
    int *const turn = pass.turns + part;
    const bool first = !tile.of_next.has(query_tile), final = !tile.of_before.has(query_tile);
    if (pass.dq) {
      turns.pass_on(tile.number);
      if (!first) turns.look(turn);
    }
    multiply_weights<kDim, kM, kQueries>(dk_sums, weights, q_tile, T());
    if (next.head < z.group()) prepare(next);
    if (!pass.dq) continue;
    __syncthreads();
    typename Part::Sums sums = {};
    Part::multiply(sums, ds_tile, k_tile, T());
    float *const at = pass.sums + part * (32 * Part::kWords) + lane_index() * 4;
    turns.wait(turn, first ? 0 : tile.number + 2);
    if (!final) {
#pragma unroll
      for (int i = 0; i < Part::kWords / 4; ++i) {
        const float (&four)[4] = sums[i / (Part::kAcross / 8)][i % (Part::kAcross / 8)];
        if (first) __stcg(reinterpret_cast<float4 *>(at + i * 128), make_float4(four[0], four[1], four[2], four[3]));
        else add_in_memory(at + i * 128, four);
      }
      turns.done(turn);
      continue;
    }
    if (!first) {
#pragma unroll
      for (int i = 0; i < Part::kWords / 4; ++i) {
        const float4 more = __ldcg(reinterpret_cast<const float4 *>(at + i * 128));
        float (&four)[4] = sums[i / (Part::kAcross / 8)][i % (Part::kAcross / 8)];
        four[0] += more.x, four[1] += more.y, four[2] += more.z, four[3] += more.w;
      }
    }
    const HeadRows<T> to = x.of_queries(pass.dq, tile.b, h, z.dim);
#pragma unroll
    for (int i = 0; i < Part::kM; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query =
            query_tile * kQueries + Spread<kQueries>::at(Part::row() + 16 * i + 8 * half + lane_index() / 4);
        if (query >= z.queries) continue;
        T *const row = to[query] + Part::column() + lane_index() % 4 * 2;
#pragma unroll
        for (int n = 0; n < Part::kAcross / 8; ++n)
          if (Part::column() + 8 * n < dim)
            *reinterpret_cast<uint32_t *>(row + 8 * n) =
                narrow_word(sums[i][n][2 * half] * q_scale, sums[i][n][2 * half + 1] * q_scale, T());
      }
  }
  if (pass.dq) turns.pass_on(tile.number);
  const int row = begin + warp_row;
  const float times = tile.times * kept_times;
  if (pass.dk)
    store_sums<kM, kDim, Order>(dk_sums, x.of_keys(pass.dk, tile.b, tile.kv, z.dim), row, tile.end, dim,
                                [=](int, int) { return q_scale; });
  if (pass.dv)
    store_sums<kM, kDim, Order>(dv_sums, x.of_keys(pass.dv, tile.b, tile.kv, z.v_dim), row, tile.end, v_dim,
                                [=](int, int) { return times; });
#endif
}

// ------------------------------------------------------------------------------------------------------- launchers

// Whether every query is in a tile that a block of keys meets.
inline bool every_query_meets(const AttentionSizes &z, bool lengths, bool packed) {
  return !lengths && !packed && z.left < 0 && (z.right < 0 || z.keys >= z.queries) && z.keys > 0;
}

// Heads whose blocks of the same number are started one after another. Blocks of one head that do not begin at tiles of
// their own wait for one another, each for the one before: so it is well if few of them are there at once.
inline int heads_at_once(const AttentionSizes &z) { return z.right >= 0 ? 4 : 16; }

template <class Shape, int kDown, typename T>
Status run_mma_pass_of(const char *op, const AttentionInputs<T> &x, const T *y, float *delta, T *dq, T *dk, T *dv,
                       float *space, void *stream) {
  using Part = DqPart<Shape, kDown>;
  const AttentionSizes &z = x.z;
  const int64_t parts = z.batch * z.heads * ceil_div(z.queries, Shape::kOthers) * Shape::kWarps;
  float *const sums = reinterpret_cast<float *>((reinterpret_cast<uintptr_t>(space) + 15) / 16 * 16);
  const MmaPass<T> pass = {
      x, dq, dk, dv, sums, reinterpret_cast<int *>(sums + parts * 32 * Part::kWords), nullptr, heads_at_once(z)};
  if (z.rows())
    AOT_TRY(launch_kernel(op, attention_pass_begin_kernel<T>,
                          {grid_size(ceil_div(z.rows(), kDeltaBlock / 8)), kDeltaBlock}, stream, pass, y, delta, parts,
                          every_query_meets(z, x.lengths != nullptr, x.extra.offsets != nullptr)));
  return launch_mma<Shape>(op, attention_pass_kernel<T, Shape, kDown>, z.batch * z.kv_heads, z.keys, kPassShared<Shape>,
                           stream, pass);
}

// f(a MmaPassShape) of a call whose head_dims are up to 128.
template <typename T, class F>
auto dispatch_pass(const AttentionInputs<T> &x, F f) {
  if (std::max(x.z.dim, x.z.v_dim) <= 64) return f(MmaPassShape<MmaShape<64, 1, 4, 32, 3, 2>, 1>());
  return f(MmaPassShape<MmaShape<128, 1, 8, 32, 1, 2>, 2>());
}

// Whether a call has what the kernels of this file are for.
template <typename T>
bool adds_to_scores(const AttentionInputs<T> &x) {
  return x.extra.mask || x.extra.bias || x.extra.dropout;
}

// Whether one pass takes a call that the kernels of attention_mma.cuh take: all of head_dims up to 128, but with a
// mask, a bias or dropout those above 64 only where a block may have more shared memory than 99 KiB.
template <typename T>
bool mma_pass_takes(const AttentionInputs<T> &x, int shared_memory) {
  if (std::max(x.z.dim, x.z.v_dim) > 128) return false;
  if (!adds_to_scores(x)) return true;
  return dispatch_pass(x, [&](auto of) { return kPassShared<typename decltype(of)::Shape> <= shared_memory; });
}

template <typename T>
Status run_mma_pass(const char *op, const AttentionInputs<T> &x, const T *y, float *delta, T *dq, T *dk, T *dv,
                    float *space, void *stream) {
  return dispatch_pass(x, [&](auto of) {
    using Of = decltype(of);
    return run_mma_pass_of<typename Of::Shape, Of::kDown>(op, x, y, delta, dq, dk, dv, space, stream);
  });
}

}  // namespace AOT_ISA
}  // namespace aot
