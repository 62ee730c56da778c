// What is added to the scores of attention on Hopper (attention_wgmma.cuh): a mask or a bias. Two warps bring a step's
// tile of it to shared memory ahead of its scores: a mask as bits, of 16 bytes of it in each load, and a bias by
// asynchronous copies. A tile that is the same for all queries has one row.
#pragma once
#include "attention_mma.cuh"
#include "cuda/mbarrier.cuh"
#include "cuda/wgmma.cuh"

namespace aot {
inline namespace AOT_ISA {

// Each has instances of its own. A bias has the dtype of q.
enum class WgmmaAdded { none, mask, bias };

constexpr int kAddedThreads = 64;

// Bytes of a row of a tile, and of a tile.
template <WgmmaAdded kAdded_, int kRows_, int kKeys_>
struct AddedShape {
  static constexpr WgmmaAdded kAdded = kAdded_;
  static constexpr int kRows = kRows_, kKeys = kKeys_;
  static constexpr int kBytes = 2;  // of an element of a bias
  static constexpr int kPitch = kAdded == WgmmaAdded::none   ? 0
                                : kAdded == WgmmaAdded::mask ? kKeys / 8
                                                             : kKeys * kBytes;
  static constexpr int kTile = kRows * kPitch;
  // Stages that fit beside what else a block has, of 225 KiB: barriers are in the rest.
  static constexpr int stages(int others) {
    return kAdded == WgmmaAdded::none ? 0 : std::min(4, ((225 << 10) - others) / kTile);
  }
};

// A mask that has fewer keys has several rows in its first 16 bytes (AddedTiles::bring).
constexpr int kLeastMaskKeys = 16;

// The types that have kernels with a mask, a bias or dropout. Those of __half too, and of a bias in float32, would make
// a wheel larger by 0.6 MB: such calls have mma.sync's kernels.
template <typename T>
constexpr bool kWgmmaAdds = std::is_same_v<T, __nv_bfloat16>;

// Whether the kernels add what a call has besides, if nothing else is in it. Copies have 4 bytes at least. wide_bias
// says nothing where there is no bias.
template <typename T>
bool wgmma_adds(const AttentionInputs<T> &x) {
  const AttentionExtras &extra = x.extra;
  if (!kWgmmaAdds<T> || !extra.mask == !extra.bias || extra.sinks || extra.offsets || x.z.softcap != 0) return false;
  if (extra.mask) return extra.of_mask.key == 1 && x.z.keys >= kLeastMaskKeys;
  if (extra.wide_bias || x.z.scale < kLeastScale) return false;
  const auto at = reinterpret_cast<uintptr_t>(extra.bias);
  return extra.of_bias.key == 1 && (at | static_cast<uintptr_t>(x.z.keys) * 2) % 4 == 0;
}

// Where a mask ends that these kernels take.
template <typename T>
const char *end_of_mask(const AttentionInputs<T> &x) {
  const ScoreSteps &steps = x.extra.of_mask;
  return reinterpret_cast<const char *>(x.extra.mask) + steps.planes * x.z.keys * (steps.query ? x.z.queries : 1);
}

#ifdef CUTE_ARCH_MMA_SM90A_ENABLED

// Arrives when the copies that this thread has started have ended.
__device__ inline void mbarrier_arrive_after_copies(uint64_t *barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// The tiles of one head.
template <typename T, class Of>
struct AddedTiles {
  static constexpr int kKeys = Of::kKeys, kRows = Of::kRows;
  static constexpr bool kMask = Of::kAdded == WgmmaAdded::mask;
  static constexpr bool kHides = !kMask;  // whether hide may find keys that add has not hidden
  static constexpr int kPitch = Of::kPitch;

  const AttentionExtras &extra;
  const char *mask_end = nullptr;  // for bring

  __device__ const ScoreSteps &steps() const { return kMask ? extra.of_mask : extra.of_bias; }
  __device__ bool one_row() const { return steps().query == 0; }
  // Where piece `piece` of 16 bytes of a row of a bias lies: those that a warp reads at once are in different banks.
  __device__ static int piece_at(int row, int piece) { return row * kPitch + (piece ^ row % 8) * 16; }

  // ------------------------------------------------------------------------------------------------------ its loads

  // Brings rows from `query` on, of which there are `rows`, and keys from `key` on, of which there are `keys`. The
  // threads are two warps.
  template <int kLoads = 8>
  __device__ void bring(uint32_t to, uint64_t *full, int64_t head, int query, int rows, int key, int keys) const {
    const int present = one_row() ? 1 : min(rows, kRows);
    if constexpr (kMask) {
      const int64_t step = extra.of_mask.query;
      const char *const all = reinterpret_cast<const char *>(extra.mask), *const from = all + head + query * step + key;
      const bool first = from == all && reinterpret_cast<uintptr_t>(all) % 16,
                 last = from + (present - 1) * step + keys == mask_end && keys < kKeys + 16 &&
                        reinterpret_cast<uintptr_t>(mask_end) % 16;
      if (thread() < 32 ? first : last) bring_row(to, from, thread() < 32 ? 0 : present - 1, keys);
      const uint32_t to_words = to + first * kPitch;
      const char *const words = from + first * step;
      const int rows_of_words = present - first - last;
      if ((reinterpret_cast<uintptr_t>(from) | static_cast<uintptr_t>(step)) % 16 == 0)
        bring_mask<true, kLoads>(to_words, words, rows_of_words, keys);
      else bring_mask<false, kLoads / 2>(to_words, words, rows_of_words, keys);
      mbarrier_arrive(full);
    } else {
      const int64_t step = extra.of_bias.query * Of::kBytes;
      const char *const from =
          static_cast<const char *>(extra.bias) + (head + query * extra.of_bias.query + key) * Of::kBytes;
      const auto all = reinterpret_cast<uintptr_t>(from) | static_cast<uintptr_t>(step | keys * Of::kBytes);
      if (all % 16 == 0) copy<16, kLoads / 2>(to, from, step, present, keys * Of::kBytes);
      else if (all % 8 == 0) copy<8, kLoads / 2>(to, from, step, present, keys * Of::kBytes);
      else copy<4, kLoads / 2>(to, from, step, present, keys * Of::kBytes);
      mbarrier_arrive_after_copies(full);
    }
  }
  __device__ static int thread() { return static_cast<int>(threadIdx.x) % kAddedThreads; }

  // Starts to copy rows of a bias, in pieces of kEach bytes.
  template <int kEach, int kUnroll>
  __device__ void copy(uint32_t to, const char *from, int64_t step, int rows, int bytes) const {
    constexpr int kAlong = std::min(kAddedThreads, kPitch / kEach), kAtOnce = kAddedThreads / kAlong;
    const int first = thread() / kAlong;
#pragma unroll
    for (int j = 0; j < kPitch / kEach; j += kAlong) {
      const int at = (thread() % kAlong + j) * kEach;
      const bool present = at < bytes;
      const char *row = present ? from + at + first * step : static_cast<const char *>(extra.bias);
      const int64_t more = present ? kAtOnce * step : 0;
#pragma unroll kUnroll
      for (int i = first; i < rows; i += kAtOnce, row += more)
        copy_async<kEach>(to + piece_at(i, at / 16) + at % 16, row, present);
    }
  }

  // A thread has 16 keys of a row, and kEach loads on their way. Those of a row that does not begin at a multiple of 16
  // bytes load what is around it, and shift its bits.
  template <bool kAligned, int kEach>
  __device__ void bring_mask(uint32_t to, const char *from, int rows, int keys) const {
    constexpr int kAlong = kKeys / 16, kAtOnce = kAddedThreads / kAlong;
    const int j = thread() % kAlong;
#pragma unroll 1
    for (int first = thread() / kAlong; first - thread() / kAlong < rows; first += kAtOnce * kEach) {
      uint4 words[kEach], behind[kEach];
      int shift[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const char *const at = from + min(first + kAtOnce * i, rows - 1) * extra.of_mask.query + 16 * j;
        shift[i] = kAligned ? 0 : static_cast<int>(reinterpret_cast<uintptr_t>(at) % 16);
        const uint4 *const begin = reinterpret_cast<const uint4 *>(at - shift[i]);
        words[i] = 16 * j - shift[i] < keys ? __ldg(begin) : uint4{};
        if (!kAligned)
          behind[i] = j == kAlong - 1 && shift[i] > 0 && kKeys - shift[i] < keys ? __ldg(begin + 1) : uint4{};
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        uint32_t bits = bits_of(words[i]);
        if constexpr (!kAligned) {
          const uint32_t next = __shfl_down_sync(~0u, bits, 1);
          bits = (bits | (j == kAlong - 1 ? bits_of(behind[i]) : next) << 16) >> shift[i];
        }
        if (first + kAtOnce * i < rows) store_bits(to + (first + kAtOnce * i) * kPitch + 2 * j, bits);
      }
    }
  }
  // Brings the mask's first row, or its last: words of 16 bytes there begin before the mask, or end behind it.
  __device__ void bring_row(uint32_t to, const char *from, int row, int keys) const {
    constexpr int kUnroll = kKeys / 64;
#pragma unroll kUnroll
    for (int first = 0; first < kKeys; first += 32) {
      const int key = first + lane_index();
      const bool seen = key < keys && __ldg(from + row * extra.of_mask.query + key);
      const uint32_t bits = __ballot_sync(~0u, seen);
      if (lane_index() == 0)
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(to + row * kPitch + first / 8), "r"(bits) : "memory");
    }
  }
  __device__ static void store_bits(uint32_t to, uint32_t bits) {
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"(static_cast<uint16_t>(bits)) : "memory");
  }
  // A bit for each byte, whether it is not 0. Bytes of a bool are 0 or 1, which needs no more than four dot products.
  __device__ static uint32_t bits_of(uint4 bytes) {
    if ((bytes.x | bytes.y | bytes.z | bytes.w) & 0xfefefefe)
      bytes = {ones_of(bytes.x), ones_of(bytes.y), ones_of(bytes.z), ones_of(bytes.w)};
    constexpr unsigned kLow = 0x08040201, kHigh = kLow << 4;
    return __dp4a(bytes.y, kHigh, __dp4a(bytes.x, kLow, 0u)) | __dp4a(bytes.w, kHigh, __dp4a(bytes.z, kLow, 0u)) << 8;
  }
  __device__ static uint32_t ones_of(uint32_t bytes) {
    return (((bytes & 0x7f7f7f7f) + 0x7f7f7f7f) | bytes) >> 7 & 0x01010101;
  }

  // ------------------------------------------------------------------------------------------------------- its uses

  using Scores = float[kKeys / 2];

  // Adds a tile to the scores of a warpgroup's 64 rows, of the tile's from `row` on. over: 1 / scale. What a bias of
  // -inf makes NaN is hide's.
  __device__ void add(Scores &s, uint32_t tile, int row, float over) const {
    if constexpr (kMask) hide_masked(s, tile, row, -kInfinity);
    else each(tile, row, [&](float &score, float bias) { score = fmaf(bias, over, score); }, s);
  }
  // Sets what belongs to keys that the mask hides, or whose bias is -inf, to `hidden`, whatever it is.
  __device__ void hide(Scores &s, uint32_t tile, int row, float over, float hidden) const {
    if constexpr (kMask) hide_masked(s, tile, row, hidden);
    else each(tile, row, [&](float &x, float bias) { x = bias * over == -kInfinity ? hidden : x; }, s);
  }

  // add_across and hide_across do so where a warpgroup's rows are the tile's keys from `key` on, and columns its
  // queries.
  using Across = float[kRows / 2];
  __device__ void add_across(Across &s, uint32_t tile, int key, float over) const {
    if constexpr (!kMask) each_across(tile, key, [&](float &score, float bias) { score = fmaf(bias, over, score); }, s);
  }
  __device__ void hide_across(Across &s, uint32_t tile, int key, float over) const {
    if constexpr (kMask) hide_masked_across(s, tile, key);
    else each_across(tile, key, [&](float &x, float bias) { x = bias * over == -kInfinity ? 0 : x; }, s);
  }

 private:
  __device__ static void load_bits(uint32_t (&to)[4], uint32_t at) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at)
                 : "memory");
  }
  __device__ static void load_bits(uint32_t (&to)[2], uint32_t at) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(at) : "memory");
  }
  __device__ void hide_masked(Scores &s, uint32_t tile, int row, float hidden) const {
    constexpr int kWords = kKeys / 32;
    const int lane = lane_index(), of_lane = one_row() ? 0 : row + warp_index() % 4 * 16 + lane / 4;
    uint32_t bits[2][kWords], all = ~0u;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      load_bits(bits[half], tile + (one_row() ? 0 : of_lane + 8 * half) * kPitch);
#pragma unroll
      for (int w = 0; w < kWords; ++w) all &= bits[half][w];
    }
    if (__all_sync(~0u, all == ~0u)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const uint32_t word = bits[half][w] >> lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (!(word >> (8 * n + e) & 1)) s[16 * w + 4 * n + 2 * half + e] = hidden;
      }
  }

  // f(score, its bias) for all of a thread.
  template <class F>
  __device__ void each(uint32_t tile, int row, F f, Scores &s) const {
    const int lane = lane_index(), of_lane = one_row() ? 0 : row + warp_index() % 4 * 16 + lane % 16;
#pragma unroll
    for (int n = 0; n < kKeys / 8; n += 2) {
      uint32_t words[4];
      load_matrices(words, tile + piece_at(of_lane, n + lane / 16));
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          f(s[4 * (n + i / 2) + 2 * (i % 2) + e], widen(reinterpret_cast<const T(&)[2]>(words[i])[e]));
    }
  }

  // A warp has 16 keys: bits of half a word of each query.
  __device__ void hide_masked_across(Across &s, uint32_t tile, int key) const {
    const int lane = lane_index(), of_warp = (key + warp_index() % 4 * 16) / 8;
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        uint16_t bits;
        const int query = one_row() ? 0 : 8 * n + lane % 4 * 2 + e;
        asm volatile("ld.shared.b16 %0, [%1];" : "=h"(bits) : "r"(tile + query * kPitch + of_warp) : "memory");
        const uint32_t of_lane = static_cast<uint32_t>(bits) >> lane / 4;
        if (!(of_lane & 1)) s[4 * n + e] = 0;
        if (!(of_lane >> 8 & 1)) s[4 * n + 2 + e] = 0;
      }
  }
  template <class F>
  __device__ void each_across(uint32_t tile, int key, F f, Across &s) const {
    const int lane = lane_index(), of_warp = key + warp_index() % 4 * 16;
#pragma unroll
    for (int n = 0; n < kRows / 8; n += 2) {
      uint32_t words[4];
      const int query = one_row() ? 0 : 8 * (n + lane / 16) + lane % 8;
      load_transposed_matrices(words, tile + piece_at(query, of_warp / 8 + lane / 8 % 2));
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          f(s[4 * (n + i / 2) + 2 * (i % 2) + e], widen(reinterpret_cast<const T(&)[2]>(words[i])[e]));
    }
  }
};

#endif

}  // namespace AOT_ISA
}  // namespace aot
