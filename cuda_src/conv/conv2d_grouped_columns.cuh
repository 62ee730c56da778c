// conv2d_grouped.cuh's passes for kernels of three rows, undilated and of stride 1 along them. What is read of shared
// memory is used for all three elements of a column of the kernel:
//
//   y, dx      A unit has 4 rows of 8 positions. Six rows of 8 pixels of the source, of the same terms of a row of
//              the kernel, are the operands of its 4 rows for three rows of the kernel: 3 ldmatrix in place of 6.
//              In 16 bits and TF32.
//   dweight    A warp has the elements of a column of the kernel, and goes down strips of 8 columns, two rows at
//              once, which are the 16 positions of a product: of the four rows of x that they meet, two are new.
//              In 16 bits.
//
// From compute capability 9.0 on TMA loads windows, with zeros outside of images: one thread starts it, and pixels have
// the same places, as they have no swizzle. A pixel's padding then has what follows in memory, which no result that is
// kept is of.
#pragma once
#include "conv2d_grouped.cuh"
#include "cuda/tma.cuh"

namespace aot {
inline namespace AOT_ISA {

// source: (image, row, column, group, channel) with chunks, else of one group. other: dweight's dy, (image, row,
// column, 1, channel). In conv2d_grouped_planes.cuh they have columns of one parity each, of the groups of a block if
// these divide all.
struct GroupedColumns {
  GroupedCall c;
  CUtensorMap source, other;
};

#if __CUDA_ARCH__ >= 900
constexpr bool kGroupedTma = true;

// A box from these indices on.
__device__ inline void tma_load(const CUtensorMap &map, uint32_t to, uint64_t *barrier, int channel, int group,
                                int column, int row, int image) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(shared_address(barrier)), "r"(channel), "r"(group), "r"(column), "r"(row), "r"(image)
      : "memory");
}
// Contiguous bytes.
__device__ inline void bulk_load(uint32_t to, const void *from, int bytes, uint64_t *barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
#else
constexpr bool kGroupedTma = false;
#endif

__device__ inline void load_words(uint32_t (&to)[2], uint32_t shared) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(shared));
}

// The two stages of windows, which TMA fills or all threads by cp.async.
struct GroupedStages {
  uint64_t *full;
  int loaded = 0;  // stages that were waited for

  __device__ explicit GroupedStages(uint64_t *full) : full(full) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x > 0) return;
    mbarrier_init(&full[0], 1), mbarrier_init(&full[1], 1);
    mbarrier_init_fence();
#endif
  }
  // The stage that was loaded first of those in flight, of which one other may be.
  __device__ void wait() {
#if __CUDA_ARCH__ >= 900
    mbarrier_wait(&full[loaded % 2], loaded / 2 % 2);
#else
    wait_copies<1>();
    __syncthreads();
#endif
    ++loaded;
  }
};

// Writes channels [first, end) of a unit's pixels, from vector `begin` of its results in shared memory on, `apart` at a
// time. spots: of the unit's positions, where their pixel is in the result, from the tile's first on, and their row and
// column in the tile.
template <typename T>
__device__ inline void write_unit(const GroupedCall &c, const GroupedTile &tile, const int2 *spots, const char *unit,
                                  T *result, int first, int end, int begin, int apart) {
  constexpr int kAtOnce = 4, kVector = kVectorSize<T>;  // vectors that are read before they are written
  const Grouped &g = c.g;
  const int rows = min(g.rows, g.h.result - tile.row), cols = min(g.cols, g.w.result - tile.column);
  const int64_t row = int64_t{tile.image} * g.h.result + tile.row;
  T *const to = result + (row * g.w.result + tile.column) * g.result_pitch + first;
  const int vectors = g.result_channels / kVector, n = kGroupedUnit * vectors;
  for (int i = begin; i < n; i += kAtOnce * apart) {
    uint4 value[kAtOnce];
    int at[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int k = min(i + j * apart, n - 1);
      const int position = c.by_result_vectors.divide(k), v = k - position * vectors;
      const int2 spot = spots[position];
      const bool there =
          i + j * apart < n && (spot.y >> 16) < rows && (spot.y & 0xffff) < cols && first + v * kVector < end;
      at[j] = there ? spot.x + v * kVector : -1;
      value[j] = *reinterpret_cast<const uint4 *>(unit + position * g.result_pixel + v * 16);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (at[j] >= 0) *reinterpret_cast<uint4 *>(to + at[j]) = value[j];
  }
}

// kWhole: each lane reads neighbouring channels of a vector by ldmatrix, or else of half of one.
template <typename T, int kEights, bool kWhole>
__global__ void __launch_bounds__(256, 3)
    grouped_columns_kernel(const __grid_constant__ GroupedColumns call, const T *source, const uint2 *weight,
                           const T *bias, T *result) {
  constexpr int kUnit = kGroupedUnit, kRows = 3, kBuffers = kEights <= 2 ? 2 : 1, kPerRound = kWhole ? 2 : 4;
  constexpr int kVector = kVectorSize<T>, kSize = sizeof(T), kTerms = 2 * kVector / kPerRound;
  extern __shared__ __align__(128) char boxes[];
  __shared__ uint64_t full[2];
  const GroupedCall &c = call.c;
  const Grouped &g = c.g;
  const GroupedBlock block(g, blockIdx.y);
  const int lane = lane_index(), windows = g.boxed(g.windows()), stages = g.chunks > 1 ? 2 : 1;
  const int chunk_bytes = g.block_groups * g.chunk_words() * 4, rounds = g.steps() / kRows;
  char *const weights = boxes + 2 * windows, *const staged = weights + stages * chunk_bytes;
  int2 *const spots = reinterpret_cast<int2 *>(staged + g.staged() * kUnit * g.result_pixel);
  int *const zeros = reinterpret_cast<int *>(spots + g.units * kUnit);
  int *const offsets = zeros + 4;
  int2 *const pixels = reinterpret_cast<int2 *>(offsets + (rounds * kPerRound + 1) / 2 * 2);
  GroupedStages pipeline(full);
  // where terms of a row of the kernel are, from a position on; -1: there are none
  for (int i = threadIdx.x; i < rounds * kPerRound; i += blockDim.x) {
    const GroupedPhase &w = g.w.phase[0];
    const int tap = i * kTerms / g.chunk, column = tap * g.w.unit + w.first - g.w.lowest;
    offsets[i] = tap < w.taps ? column * g.pixel + (i * kTerms - tap * g.chunk) * kSize : -1;
  }
  if (!kGroupedTma) write_pixels(c, pixels);
  if (threadIdx.x < 4) zeros[threadIdx.x] = 0;
  auto row_of = [&](int position) { return position / kUnit / g.columns * 4 + position % kUnit / 8; };
  auto column_of = [&](int position) { return position / kUnit % g.columns * 8 + position % 8; };
  for (int i = threadIdx.x; i < g.units * kUnit; i += blockDim.x) {
    const int row = row_of(i), col = column_of(i);
    spots[i] = {(row * g.w.result + col) * g.result_pitch, row << 16 | col};
  }

  const int unit = warp_index() % g.units, share = warp_index() / g.units, shares = blockDim.x / 32 / g.units;
  const int line = g.window_w * g.pixel;  // bytes
  // of ldmatrix, a lane's row is a pixel of the first or the second row, and the first or the second 8 terms
  const int first = unit * kUnit + (kWhole ? lane % 16 : lane / 4);
  const int place = row_of(first) * line + column_of(first) * g.w.step * g.pixel;

  const unsigned tiles = static_cast<unsigned>(g.tiles());
  __syncthreads();
  wait_for_kernel_before();
  auto load = [&](unsigned index, int chunk, int stage) {
    const GroupedTile tile(g, index);
    const int channel = block.first_channel(g, chunk) / kVector * kVector;
    const bool weight_too = g.chunks > 1 || index == blockIdx.x;
    const int64_t at = (int64_t{block.group} * g.parts + block.part) * g.part_words() + chunk * g.chunk_words();
    const char *from = reinterpret_cast<const char *>(weight) + at * 4;
    const int bytes = weight_too ? block.groups * g.chunk_words() * 4 : 0;
    const uint32_t window = shared_address(boxes) + stage * windows;
    const uint32_t to = shared_address(weights) + (g.chunks > 1 ? stage * chunk_bytes : 0);
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x > 0) return;
    mbarrier_expect(&full[stage], g.windows() + bytes);
    tma_load(call.source, window, &full[stage], g.chunks > 1 ? chunk * g.chunk : channel,
             g.chunks > 1 ? block.group : 0, tile.column * g.w.step + g.w.lowest, tile.row + g.h.lowest, tile.image);
    if (bytes) bulk_load(to, from, bytes, &full[stage]);
#else
    load_window(c, tile, source, pixels, channel, g.chunks > 1 ? (block.group + 1) * g.in : g.source_pitch, window);
    for (int i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16) copy_async(to + i, from + i, true);
#endif
  };

  GroupedSum<false> sums[2][kEights];
  load(blockIdx.x, 0, 0);
  if (!kGroupedTma) commit_copies();
  int chunk = 0, stage = 0;
  for (unsigned index = blockIdx.x; index < tiles; stage ^= 1) {
    const int next_chunk = chunk + 1 < g.chunks ? chunk + 1 : 0;
    const unsigned next = next_chunk ? index : index + gridDim.x;
    if (next < tiles) load(next, next_chunk, stage ^ 1);
    if (!kGroupedTma) commit_copies();
    pipeline.wait();
    const GroupedTile tile(g, index);
    const uint32_t window = shared_address(boxes) + stage * windows + block.first_channel(g, chunk) % kVector * kSize;
    const char *const operands = weights + (g.chunks > 1 ? stage * chunk_bytes : 0);

    // sums of a group's 8s of results from `piece` on
    auto add = [&](int group, int piece) {
      const uint32_t from = window + group * g.in * kSize + place;
      const uint2 *b_at =
          reinterpret_cast<const uint2 *>(operands + group * g.chunk_words() * 4) + piece * kEights * 32 + lane;
      const int b_step = g.pieces * kEights * 32;
      const int *at = offsets + (kWhole ? lane / 16 : lane % 4);
      uint32_t a[kBuffers][6][2];  // of each row of 8 pixels: the first and the second 8 terms
      auto load_rows = [&](int i) {
        const int offset = *at;
        const uint32_t row = offset < 0 ? shared_address(zeros) : from + offset;
        const uint32_t apart = offset < 0 ? 0 : line;
        at += kPerRound;
        if constexpr (kWhole) {
#pragma unroll
          for (int two = 0; two < 3; ++two) {
            uint32_t words[4];
            load_matrices(words, row + 2 * two * apart);
            a[i][2 * two][0] = words[0], a[i][2 * two + 1][0] = words[1];
            a[i][2 * two][1] = words[2], a[i][2 * two + 1][1] = words[3];
          }
        } else {
#pragma unroll
          for (int r = 0; r < 6; ++r) load_words(a[i][r], row + r * apart);
        }
        if constexpr (sizeof(T) == 4 && !kGroupedTma)  // TMA rounds what it loads
#pragma unroll
          for (auto &row : a[i])
#pragma unroll
            for (uint32_t &word : row) word = product_word(__uint_as_float(word), false);
      };
      auto multiply = [&](int i) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          uint2 b[kEights];
#pragma unroll
          for (int e = 0; e < kEights; ++e) b[e] = b_at[e * 32];
          b_at += b_step;
#pragma unroll
          for (int e = 0; e < kEights; ++e)
#pragma unroll
            for (int m = 0; m < 2; ++m) {
              const auto &low = a[i][2 * m + r], &high = a[i][2 * m + r + 1];
              const uint32_t rows[4] = {low[0], high[0], low[1], high[1]};
              multiply_add(sums[m][e].of, rows, b[e].x, b[e].y, T());
            }
        }
      };
      if constexpr (kBuffers == 1) {
        for (int round = 0; round < rounds; ++round) load_rows(0), multiply(0);
      } else {
        load_rows(0);
        for (int round = 0; round < rounds; round += 2) {
          if (round + 1 < rounds) load_rows(1);
          multiply(0);
          if (round + 1 >= rounds) break;
          if (round + 2 < rounds) load_rows(0);
          multiply(1);
        }
      }
    };
    char *const mine = staged + (g.chunks > 1 ? warp_index() : unit) * kUnit * g.result_pixel;
    auto write = [&](int first, int end, int begin, int apart) {
      write_unit(c, tile, spots + unit * kUnit, mine, result, first, end, begin, apart);
    };

    const int first_result = block.first_result(g), of_group = (block.group + 1) * g.out;
    if (g.chunks == 1) {
      const int groups = block.groups;
      const int end = groups > 1 || g.parts == 1 ? first_result + groups * g.out : min(first_result + g.part, of_group);
      for (int task = share; task < groups * g.pieces; task += shares) {
        const int group = task / g.pieces, piece = task - group * g.pieces;
        begin_sums(g, block, bias, group, piece, sums);
        add(group, piece);
        keep_sums<T>(g, group * g.part + piece * kEights * 8, piece, sums, mine);
      }
      __syncthreads();
      write(first_result, end, share * 32 + lane, shares * 32);
    } else {  // a warp has a piece
      const int piece = share;
      if (chunk == 0) begin_sums(g, block, bias, 0, piece, sums);
      add(0, piece);
      if (!next_chunk) {
        keep_sums<T>(g, 0, piece, sums, mine);
        __syncwarp();
        write(first_result + piece * kEights * 8, min(first_result + g.part, of_group), lane, 32);
      }
    }
    __syncthreads();
    index = next, chunk = next_chunk;
  }
}

// ------------------------------------------------------------------------------------------------------------ dweight

// As grouped_dweight_kernel, for kSixteens times 16 results of a group and the elements of one column of the kernel.
template <typename T, int kEights, int kSixteens>
__global__ void __launch_bounds__(32 * (kSixteens > 1 ? kGroupedTwoWarps : kGroupedDweightWarps), 2)
    grouped_dweight_columns_kernel(const __grid_constant__ GroupedColumns call, const T *dy, const T *x, float *partial,
                                   int64_t slice, int slice_channels) {
  constexpr int kPairs = (kEights + 1) / 2, kRows = 3;
  extern __shared__ __align__(128) char boxes[];
  __shared__ uint64_t full[2];
  const GroupedCall &c = call.c;
  const Grouped &g = c.g;
  const int chunk = blockIdx.y % g.chunks;
  const GroupedBlock block(g, blockIdx.y / g.chunks);
  const int lane = lane_index(), windows = g.boxed(g.windows()), stage_bytes = windows + g.dweight_box();
  char *const zeros = boxes + 2 * stage_bytes;
  int2 *const pixels = reinterpret_cast<int2 *>(zeros + 16);
  GroupedStages pipeline(full);
  if (!kGroupedTma) write_pixels(c, pixels);
  const int channel = block.first_channel(g, chunk), output = block.first_result(g);
  const int channel_shift = channel % 8, result_shift = output % 8;
  // this warp's products
  const int columns = g.w.phase[0].taps, task = blockIdx.z * g.warps + warp_index(), column_tap = task % columns;
  const int piece = task / columns % g.pieces, sixteen = task / columns / g.pieces;
  GroupedSixteen of(g, block, sixteen, result_shift, channel_shift);
  if (kSixteens > 1) of.result += sixteen % (g.sixteens / g.block_groups) * 16 * (kSixteens - 1);
  const bool idle = sixteen >= g.sixteens || of.first_group >= block.groups;
  const int column = of.channel + piece * kEights * 8;
  if (threadIdx.x < 4) reinterpret_cast<int *>(zeros)[threadIdx.x] = 0;

  const unsigned tiles = static_cast<unsigned>(g.tiles());
  __syncthreads();
  wait_for_kernel_before();
  auto load = [&](unsigned index, int stage) {
    const GroupedTile tile(g, index);
    const uint32_t window = shared_address(boxes) + stage * stage_bytes, to = window + windows;
    const int pixels_of_dy = g.rows * g.cols;
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x > 0) return;
    mbarrier_expect(&full[stage], g.windows() + pixels_of_dy * g.result_pixel);
    tma_load(call.source, window, &full[stage], channel / 8 * 8, 0, tile.column * g.w.step + g.w.lowest,
             tile.row + g.h.lowest, tile.image);
    tma_load(call.other, to, &full[stage], output / 8 * 8, 0, tile.column, tile.row, tile.image);
#else
    load_window(c, tile, x, pixels, channel / 8 * 8, g.source_pitch, window);
    const int vectors = g.result_channels / 8, left = (g.result_pitch - output / 8 * 8) / 8;
    const int rows = min(g.rows, g.h.count - tile.row), cols = min(g.cols, g.w.count - tile.column);
    const T *image = dy + int64_t{tile.image} * g.h.result * g.w.result * g.result_pitch + output / 8 * 8;
    for (int i = threadIdx.x; i < pixels_of_dy * vectors; i += blockDim.x) {
      const int position = c.by_result_vectors.divide(i), v = i - position * vectors;
      const int row = c.by_cols.divide(position), col = position - row * g.cols;
      const bool there = row < rows && col < cols && v < left;
      const int64_t pixel = int64_t{tile.row + row} * g.w.result + tile.column + col;
      copy_async(to + position * g.result_pixel + v * 16, there ? image + pixel * g.result_pitch + v * 8 : dy, there);
    }
#endif
  };

  float sums[kSixteens][kRows][kEights][4] = {};
  load(blockIdx.x, 0);
  if (!kGroupedTma) commit_copies();
  int stage = 0;
  for (unsigned index = blockIdx.x; index < tiles; index += gridDim.x, stage ^= 1) {
    if (index + gridDim.x < tiles) load(index + gridDim.x, stage ^ 1);
    if (!kGroupedTma) commit_copies();
    pipeline.wait();
    if (!idle) {
      const GroupedTile tile(g, index);
      const int rows = min(g.rows, g.h.count - tile.row), cols = min(g.cols, g.w.count - tile.column);
      const uint32_t window = shared_address(boxes) + stage * stage_bytes, zero = shared_address(zeros);
      const int line = g.window_w * g.pixel, result_line = g.cols * g.result_pixel;
      // ldmatrix: a lane's row is a position; of x its column is l % 8 and its row l / 8 % 2, of dy l / 16
      const uint32_t x_at = window + (column + lane / 16 * 8) * 2 + lane / 8 % 2 * line;
      const uint32_t dy_at = window + windows + (of.result + lane / 8 % 2 * 8) * 2 + lane / 16 * result_line;
      const int tap_column = column_tap * g.w.unit;
      for (int strip = 0; strip < cols; strip += 8) {
        const int col = strip + lane % 8;
        const bool there = col < cols;
        uint32_t from = there ? x_at + (col * g.w.step + tap_column) * g.pixel : zero;
        uint32_t dy_from = there ? dy_at + col * g.result_pixel : zero;
        const uint32_t down = there ? 2 * line : 0, dy_down = there ? 2 * result_line : 0;
        uint32_t b[2][kPairs][4];  // two rows of x each: of each 8 of channels the first and the second
        auto load_rows = [&](int i) {
#pragma unroll
          for (int pair = 0; pair < kPairs; ++pair)
            load_transposed_matrices(b[i][pair], there ? from + pair * 32 : zero);
          from += down;
        };
        auto multiply = [&](int i, int row) {
          const bool one = row + 1 >= rows;  // the second row is not there
          uint32_t a[kSixteens][4];
#pragma unroll
          for (int m = 0; m < kSixteens; ++m)
            load_transposed_matrices(a[m], there && !(one && lane >= 16) ? dy_from + m * 32 : zero);
          dy_from += dy_down;
          load_rows(i ^ 1);
          auto operand = [&](int q, int e) { return b[i ^ (q / 2)][e / 2][q % 2 + e % 2 * 2]; };
#pragma unroll
          for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int e = 0; e < kEights; ++e) {
              const uint32_t low = operand(r, e), high = one ? 0 : operand(r + 1, e);
#pragma unroll
              for (int m = 0; m < kSixteens; ++m) multiply_add(sums[m][r][e], a[m], low, high, T());
            }
        };
        load_rows(0);
        for (int row = 0; row < rows; row += 4) {
          multiply(0, row);
          if (row + 2 >= rows) break;
          multiply(1, row + 2);
        }
      }
    }
    __syncthreads();
  }
  if (idle) return;
  partial += blockIdx.x * slice;
#pragma unroll
  for (int m = 0; m < kSixteens; ++m)
#pragma unroll
    for (int t = 0; t < kRows; ++t)
#pragma unroll
      for (int e = 0; e < kEights; ++e)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // from the block's first group on
          const int result = of.result + m * 16 + half * 8 + lane / 4 - result_shift;
          const int at = column + e * 8 + lane % 4 * 2 - channel_shift;
          const int group = result / g.part, result_of = result - group * g.part, at_of = at - group * g.chunk;
          if (result < 0 || group < of.first_group || group > of.last_group) continue;
          if (block.part * g.part + result_of >= g.out) continue;
          const int64_t row = (int64_t{block.group + group} * g.out + block.part * g.part + result_of) * g.taps() +
                              t * columns + column_tap;
          float *to = partial + row * slice_channels + chunk * g.chunk + at_of;
          const bool both = 0 <= at_of && at_of + 1 < g.chunk && chunk * g.chunk + at_of + 1 < g.in;
          if (both) *reinterpret_cast<float2 *>(to) = {sums[m][t][e][half * 2], sums[m][t][e][half * 2 + 1]};
        }
}

}  // namespace AOT_ISA
}  // namespace aot
