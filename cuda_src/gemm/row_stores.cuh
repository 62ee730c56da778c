// Stores of 16-bit rows that begin anywhere, by a warp that has 16 rows of a product's sums as wgmma leaves them. The
// warp puts them in order in shared memory, each as far from a multiple of 16 bytes as it is in memory, and stores them
// from there: the whole vectors of two rows at once, then what is left at the ends of all rows, in words of 2, 4 and 8
// bytes.
#pragma once
#include "cuda/vector.cuh"

namespace aot {
inline namespace AOT_ISA {

template <typename T, int kColumns>
struct RowStores {
  static_assert(kColumns <= 128, "half a warp stores a row's vectors");
  static constexpr int kSums = kColumns / 2;                           // of a thread
  static constexpr int kVector = 8, kLine = (kColumns + kVector) / 2;  // elements; words
  using Words = uint32_t[16][kLine];

  Words &words;    // the warp's, at a multiple of 16 bytes
  int64_t stride;  // of rows

  // rows, columns: those of c from `to` on, of which some may be beyond the tile.
  __device__ void store(const float (&v)[kSums], T *to, int rows, int columns) const {
    columns = min(columns, kColumns);
    put(v, to);
    __syncwarp();
    store_vectors(to, rows, columns);
    store_ends(to, rows, columns);
    __syncwarp();
  }

 private:
  // How many elements are between a row's first and the aligned vector's in which it lies.
  static __device__ int skipped(const T *row) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kVector);
  }

  // A thread's two rows are 8 apart, so that as many elements are skipped in both.
  __device__ void put(const float (&v)[kSums], const T *to) const {
    const int lane = threadIdx.x % 32, skips = skipped(to + lane / 4 * stride);
    auto pair = [&](int j, int i) { return narrow_word(v[4 * j + 2 * i], v[4 * j + 2 * i + 1], T()); };
    uint32_t *at = &words[lane / 4][lane % 4 + skips / 2];
    if ((stride | skipped(to)) % 2 == 0) {
#pragma unroll
      for (int j = 0; j < kSums / 4; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) at[8 * i * kLine + 4 * j] = pair(j, i);
      return;
    }
    // In an odd row a word has the second element of the pair before, which another lane has, and the pair's first.
    const int from = lane / 4 * 4 + (lane + 3) % 4;
    const uint32_t order = skips % 2 ? 0x5432 : 0x7654;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t last = 0;
#pragma unroll
      for (int j = 0; j < kSums / 4; ++j) {
        const uint32_t own = pair(j, i), before = __shfl_sync(~0u, lane % 4 == 3 ? last : own, from);
        at[8 * i * kLine + 4 * j] = __byte_perm(before, own, order);
        last = own;
      }
      const uint32_t before = __shfl_sync(~0u, last, from);
      if (lane % 4 == 0) at[8 * i * kLine + kColumns / 2] = before >> 16;
    }
  }

  __device__ void store_vectors(T *to, int rows, int columns) const {
    const int lane = threadIdx.x % 32, second = lane / 16;
    T *row = to + second * stride;
#pragma unroll
    for (int i = 0; i < 16; i += 2, row += 2 * stride) {
      const int skips = skipped(row), vector = min(lane % 16 + (skips > 0), kLine * 2 / kVector - 1);
      const uint4 v = *reinterpret_cast<const uint4 *>(&words[i + second][4 * vector]);
      if (i + second < rows && kVector * (vector + 1) <= skips + columns)
        *reinterpret_cast<uint4 *>(row - skips + kVector * vector) = v;
    }
  }

  // What is no whole vector: a lane has a row's first elements or its last.
  __device__ void store_ends(T *to, int rows, int columns) const {
    const int lane = threadIdx.x % 32, row = lane % 16, skips = skipped(to + row * stride), end = skips + columns;
    if (row >= rows) return;
    auto *line = reinterpret_cast<uint16_t *>(to + row * stride) - skips;
    const auto *from = reinterpret_cast<const uint16_t *>(words[row]);
    auto copy = [&](int at, auto word) {
      using Word = decltype(word);
      *reinterpret_cast<Word *>(line + at) = *reinterpret_cast<const Word *>(from + at);
    };
    const bool first = lane < 16;
    if (end < kVector) {
      for (int at = skips; first && at < end; ++at) copy(at, uint16_t());
      return;
    }
    const int count = first ? -skips & 7 : end & 7, begin = first ? skips : end - count;
    if (count & 1) copy(first ? begin : begin + (count & 6), uint16_t());
    if (count & 2) copy(first ? begin + (count & 1) : begin + (count & 4), uint32_t());
    if (count & 4) copy(first ? begin + (count & 3) : begin, uint2());
  }
};

}  // namespace AOT_ISA
}  // namespace aot
