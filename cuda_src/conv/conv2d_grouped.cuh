// conv2d with groups of several channels, by mma.sync on NHWC: y, dx and dweight of any kernel, padding and dilation,
// in 16 bits, TF32, and float32 as three products of TF32 (two_tf32.cuh). conv2d_grouped.h divides the work.
//
//   y, dx      rows of a product      16 positions of a tile
//              columns                8 results of a group
//              summed over            elements of the kernel x channels of the group, flattened
//   dweight    rows of a product      16 output channels
//              columns                8 channels, for each of three elements of the kernel
//              summed over            positions
//
// Groups have fewer channels than a product of tensor cores has terms. So the terms of y and dx are the flattened ones
// of one group, in pairs of neighbouring channels, or in 8s where groups have such: they are read from anywhere in the
// window of the source that a tile meets, at the place of a position plus an offset for the pair, or the 8. No zeros of
// other groups are multiplied, whose products with an infinity would be NaN. dweight's rows and columns may be of
// different groups, and those results are dropped: no sum has terms of two groups.
//
// Zeros beside an image are multiplied, as by the implicit GEMM: with an infinite weight they make NaN.
//
// A block keeps the weight of its groups in shared memory, as the lanes' operands, and goes from tile to tile, with the
// next tile's window on its way. Wider groups than kGroupedWide come in chunks of channels, each with its weight. The
// pixels of a position of dx, of several phases of the stride, meet one window of dy.
#pragma once
#include "conv2d.cuh"
#include "conv2d_grouped.h"
#include "cuda/mma.cuh"
#include "cuda/overlap.cuh"
#include "cuda/packet.cuh"
#include "cuda/two_tf32.cuh"

namespace aot {
inline namespace AOT_ISA {

// A pass with what its kernels divide by.
struct GroupedCall {
  Grouped g;
  Divisor by_vectors, by_result_vectors, by_cols;

  explicit GroupedCall(const Grouped &g)
      : g(g), by_vectors(g.channels / g.vector), by_result_vectors(g.result_channels / g.vector), by_cols(g.cols) {}
};

// A tile: an image, and the first of its positions.
struct GroupedTile {
  int image, row, column;

  __device__ GroupedTile(const Grouped &g, unsigned index) {
    const unsigned lines = index / g.tiles_w;
    image = lines / g.tiles_h;
    row = (lines - image * g.tiles_h) * g.rows, column = (index - lines * g.tiles_w) * g.cols;
  }
};

// A block's groups, and its part of their results.
struct GroupedBlock {
  int group, groups, part;  // the first, and how many

  __device__ GroupedBlock(const Grouped &g, int index)
      : group(index / g.parts * g.block_groups),
        groups(min(g.block_groups, g.groups - index / g.parts * g.block_groups)),
        part(index % g.parts) {}
  __device__ int first_channel(const Grouped &g, int chunk) const { return group * g.in + chunk * g.chunk; }
  __device__ int first_result(const Grouped &g) const { return group * g.out + part * g.part; }
};

// A pixel of a window: where it is in the source, from the window's first on, and its row and column. kPlanes: those of
// even columns come first.
template <bool kPlanes = false>
__device__ inline void write_pixels(const GroupedCall &c, int2 *pixels) {
  const Grouped &g = c.g;
  for (int i = threadIdx.x; i < g.window_h * g.window_w; i += blockDim.x) {
    int row = i / g.window_w, col = i - row * g.window_w;
    if constexpr (kPlanes) {
      const int wide = g.window_w / 2, odd = i >= g.window_h * wide, of_plane = i - odd * g.window_h * wide;
      row = of_plane / wide, col = 2 * (of_plane - row * wide) + odd;
    }
    pixels[i] = {(row * g.w.source + col) * g.source_pitch, row << 16 | col};
  }
}

// Copies the window of a tile, `channels` channels from a multiple of a vector on, those before `end`, to shared
// memory, with zeros outside of the image.
template <typename T, bool kPlanes = false>
__device__ inline void load_window(const GroupedCall &c, const GroupedTile &tile, const T *source, const int2 *pixels,
                                   int channel, int end, uint32_t to) {
  const Grouped &g = c.g;
  constexpr int kVector = kVectorSize<T>;
  const int vectors = g.channels / kVector, n = g.window_h * g.window_w * vectors;
  const int left = (end - channel + kVector - 1) / kVector;
  const int h0 = tile.row * g.h.step + g.h.lowest, w0 = tile.column * g.w.step + g.w.lowest;
  const int64_t first = (int64_t{tile.image} * g.h.source + h0) * g.w.source + w0;
  const T *const from = source + first * g.source_pitch + channel;
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    const int pixel = c.by_vectors.divide(i), v = i - pixel * vectors;
    const int2 at = pixels[pixel];
    const bool there = static_cast<unsigned>(h0 + (at.y >> 16)) < static_cast<unsigned>(g.h.source) &&
                       static_cast<unsigned>(w0 + (at.y & 0xffff)) < static_cast<unsigned>(g.w.source) && v < left;
    const int gap = kPlanes && at.y % 2 ? g.plane() - g.windows() / 2 : 0;
    copy_async(to + gap + pixel * g.pixel + v * 16, there ? from + at.x + v * kVector : source, there);
  }
}

// ------------------------------------------------------------------------------------------------- weight as operands

// The bits of an element as products take them: float32 is rounded to TF32, unless three products take it.
__device__ inline uint32_t product_word(float x, bool three) {
  uint32_t bits = __float_as_uint(x);
#if __CUDA_ARCH__ >= 800
  if (!three) asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
#endif
  return bits;
}
template <typename T>
__device__ inline uint32_t product_bits(const T *from, bool three) {
  if constexpr (sizeof(T) == 4) return product_word(*from, three);
  else return *reinterpret_cast<const uint16_t *>(from);
}

// The weight as operands: (groups, parts, chunks, steps of all phases, pieces, eights, lanes), 8 bytes each. A thread
// writes one, of two words. Results and channels of a group are weight.image and weight.channel apart in y, and in dx
// the other way around.
template <typename T>
__global__ void __launch_bounds__(256)
    grouped_weight_kernel(const __grid_constant__ Grouped g, Strides weight, int kernel_w, bool dx, const T *from,
                          uint2 *to, unsigned n) {
  launch_next();
  const unsigned index = blockIdx.x * 256 + threadIdx.x;
  if (index >= n) return wait_for_kernel_before();
  const int lane = index % 32, eight = index / 32 % g.eights, piece = index / 32 / g.eights % g.pieces;
  unsigned rest = index / 32 / g.eights / g.pieces;
  int step = rest % g.steps(), phase = 0;
  rest /= g.steps();
  while (step >= g.first_step[phase + 1]) ++phase;
  step -= g.first_step[phase];
  const GroupedPhase &h = g.h.phase[phase / g.w.phases], &w = g.w.phase[phase % g.w.phases];
  const int chunk = rest % g.chunks, part = rest / g.chunks % g.parts, group = rest / g.chunks / g.parts;
  const int of_part = (piece * g.eights + eight) * 8 + lane / 4, result = part * g.part + of_part;
  uint32_t words[2];
#pragma unroll
  for (int word = 0; word < 2; ++word) {
    constexpr int kWord = kVectorSize<T> / 4, kStep = 8 * kWord;  // elements
    int k = step * kStep + (word * 4 + lane % 4) * kWord, tap = k / g.chunk, of_chunk = k % g.chunk;
    int taps = h.taps * w.taps;
    if (g.columns) {  // three rows of the kernel for each step's terms of one
      const int row = step % 3, of_row = g.chunk % kVectorSize<T> ? lane % 4 * 2 + word : word * 4 + lane % 4;
      k = step / 3 * kStep + of_row * kWord, taps = 3 * w.taps;
      tap = k / g.chunk < w.taps ? (g.h.unit < 0 ? 2 - row : row) * w.taps + k / g.chunk : taps;
      of_chunk = k % g.chunk;
    }
    const int channel = chunk * g.chunk + of_chunk;
    const bool there = of_part < g.part && result < g.out && tap < taps && channel < g.in;
    const int r = h.kernel_first + tap / w.taps * g.h.kernel_step, s = w.kernel_first + tap % w.taps * g.w.kernel_step;
    words[word] = 0;
#pragma unroll
    for (int e = 0; e < kWord; ++e) {
      const int64_t image = dx ? int64_t{group} * g.in + channel + e : int64_t{group} * g.out + result;
      const int64_t at = image * weight.image + (dx ? result : channel + e) * weight.channel +
                         (int64_t{r} * kernel_w + s) * weight.tap;
      if (there) words[word] |= product_bits(from + at, g.three) << 16 * e;
    }
  }
  to[index] = {words[0], words[1]};
  wait_for_kernel_before();
}

// --------------------------------------------------------------------------------------------------------------- y, dx

// Writes two neighbours.
template <typename T>
__device__ inline void store_pair(char *to, float a, float b) {
  *reinterpret_cast<Packet<T, 2> *>(to) = {narrow<T>(a), narrow<T>(b)};
}

__device__ inline uint32_t load_word(uint32_t shared) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(shared));
  return word;
}

// A sum of products.
template <bool kThree>
struct GroupedSum {
  float of[4];

  // An operand of 16 rows, and 8 columns. The last argument is of the elements' type.
  template <typename T>
  __device__ void add(const uint32_t (&a)[1][4], const uint32_t (&b)[1][2], T type) {
    multiply_add(of, a[0], b[0][0], b[0][1], type);
  }
  __device__ float value(int e) const { return of[e]; }
};
// Three products of TF32, of operands in two parts. Tensor cores truncate what they add to: the product of the larger
// parts is added to 0, and ordinary additions gather these. The others are summed apart, and left out where the sum is
// not finite: an infinity has no smaller part.
template <>
struct GroupedSum<true> {
  float of[4], small[4] = {};

  __device__ void add(const uint32_t (&a)[2][4], const uint32_t (&b)[2][2], float type) {
    float products[4] = {};
    multiply_add(products, a[0], b[0][0], b[0][1], type);
    multiply_add(small, a[1], b[0][0], b[0][1], type), multiply_add(small, a[0], b[1][0], b[1][1], type);
#pragma unroll
    for (int e = 0; e < 4; ++e) of[e] += products[e];
  }
  __device__ float value(int e) const { return of[e] + (isfinite(of[e]) ? small[e] : 0); }
};

// Sets the sums of a unit, 16s of positions by 8s of a group's results from `piece` on, to the bias, which may be null.
template <typename T, bool kThree, int kSixteens, int kEights>
__device__ inline void begin_sums(const Grouped &g, const GroupedBlock &block, const T *bias, int group, int piece,
                                  GroupedSum<kThree> (&sums)[kSixteens][kEights]) {
  const int of_part = piece * kEights * 8 + lane_index() % 4 * 2;
  const int left = min(g.part, g.out - block.part * g.part) - of_part;
  const T *from = bias + block.first_result(g) + group * g.out + of_part;
#pragma unroll
  for (int e = 0; e < kEights; ++e)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float value = bias && e * 8 + i % 2 < left ? widen(from[e * 8 + i % 2]) : 0;
#pragma unroll
      for (int m = 0; m < kSixteens; ++m) {
        sums[m][e].of[i] = value;
        if constexpr (kThree) sums[m][e].small[i] = 0;
      }
    }
}

// Writes them to the unit's results in shared memory, from channel `at` of theirs on.
template <typename T, bool kThree, int kSixteens, int kEights>
__device__ inline void keep_sums(const Grouped &g, int at, int piece,
                                 const GroupedSum<kThree> (&sums)[kSixteens][kEights], char *unit) {
  const int lane = lane_index();
#pragma unroll
  for (int e = 0; e < kEights; ++e) {
    const int of_part = (piece * kEights + e) * 8 + lane % 4 * 2;
    if (of_part >= g.part) continue;
#pragma unroll
    for (int m = 0; m < 2 * kSixteens; ++m)
      store_pair<T>(
          unit + (m * 8 + lane / 4) * g.result_pixel + (at + e * 8 + lane % 4 * 2) * static_cast<int>(sizeof(T)),
          sums[m / 2][e].value(m % 2 * 2), sums[m / 2][e].value(m % 2 * 2 + 1));
  }
}

// Words of an operand as products take them: 16 bits as they are, TF32 rounded, or float32 in two parts.
template <typename T, bool kThree, int n>
__device__ inline void to_parts(uint32_t (&parts)[kThree ? 2 : 1][n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if constexpr (kThree) split(__uint_as_float(parts[0][i]), parts[0][i], parts[1][i]);
    else if constexpr (sizeof(T) == 4) parts[0][i] = product_word(__uint_as_float(parts[0][i]), false);
  }
}

// Where terms of a group are in the window, from a position on: words of them, or with kWhole vectors, whose channels
// are neighbours. -1: there are none.
template <typename T, bool kWhole>
__device__ inline void write_offsets(const GroupedCall &c, int *offsets) {
  constexpr int kTerms = kVectorSize<T> / (kWhole ? 1 : 4), kStep = 2 * kVectorSize<T>;
  const Grouped &g = c.g;
  for (int i = threadIdx.x; i < g.steps() * kStep / kTerms; i += blockDim.x) {
    int k = i * kTerms, phase = 0;
    while (k >= g.first_step[phase + 1] * kStep) ++phase;
    k -= g.first_step[phase] * kStep;
    const GroupedPhase &h = g.h.phase[phase / g.w.phases], &w = g.w.phase[phase % g.w.phases];
    const int tap = k / g.chunk, t = w.taps ? tap / w.taps : 0, u = tap - t * w.taps;
    const int row = t * g.h.unit + h.first - g.h.lowest, column = u * g.w.unit + w.first - g.w.lowest;
    offsets[i] = tap < h.taps * w.taps
                     ? (row * g.window_w + column) * g.pixel + (k - tap * g.chunk) * static_cast<int>(sizeof(T))
                     : -1;
  }
}

// A warp has a unit of positions, and groups of the block, one after another. Results go through shared memory, so that
// whole sectors are written: 16 bytes at a time took three times as long on an H200.
template <typename T, int kEights, bool kWhole, bool kThree = false>
__global__ void __launch_bounds__(32 * kGroupedWarps, 3)
    grouped_kernel(const __grid_constant__ GroupedCall c, const T *source, const uint2 *weight, const T *bias,
                   T *result) {
  constexpr int kUnit = kGroupedUnit, kSixteens = kUnit / 16, kBuffers = kEights <= 2 && !kThree ? 2 : 1;
  constexpr int kParts = kThree ? 2 : 1, kVector = kVectorSize<T>, kSize = sizeof(T);
  extern __shared__ __align__(16) char memory[];
  const Grouped &g = c.g;
  const GroupedBlock block(g, blockIdx.y);
  const int lane = lane_index(), windows = g.windows(), stages = g.chunks > 1 ? 2 : 1;
  const int chunk_bytes = g.block_groups * g.chunk_words() * 4;
  char *const weights = memory + 2 * windows, *const staged = weights + stages * chunk_bytes;
  int2 *const spots = reinterpret_cast<int2 *>(staged + g.staged() * kUnit * g.result_pixel);
  int2 *const pixels = spots + g.units * kUnit;
  int *const zeros = reinterpret_cast<int *>(pixels + (g.window_h * g.window_w + 1) / 2 * 2);
  int *const offsets = zeros + 4;
  write_offsets<T, kWhole>(c, offsets);
  write_pixels(c, pixels);
  if (threadIdx.x < 4) zeros[threadIdx.x] = 0;
  // positions: where their pixel is in the result, from the tile's first on, and their row and column in the tile
  for (int i = threadIdx.x; i < g.units * kUnit; i += blockDim.x) {
    const int row = c.by_cols.divide(i), col = i - row * g.cols;
    spots[i] = {(row * g.h.phases * g.w.result + col * g.w.phases) * g.result_pitch, row << 16 | col};
  }

  // Where a lane's positions begin in the window, as ldmatrix or lanes read them.
  const int unit = warp_index() % g.units, share = warp_index() / g.units, shares = blockDim.x / 32 / g.units;
  int places[kWhole ? kSixteens : 2 * kSixteens];
#pragma unroll
  for (int m = 0; m < (kWhole ? kSixteens : 2 * kSixteens); ++m) {
    const int position = unit * kUnit + (kWhole ? m * 16 + lane % 16 : m * 8 + lane / 4);
    const int row = c.by_cols.divide(position), col = position - row * g.cols;
    places[m] = row < g.rows ? (row * g.h.step * g.window_w + col * g.w.step) * g.pixel : 0;
  }

  const unsigned tiles = static_cast<unsigned>(g.tiles());
  __syncthreads();
  wait_for_kernel_before();
  auto load = [&](unsigned tile, int chunk, int stage) {
    const int channel = block.first_channel(g, chunk), end = g.chunks > 1 ? (block.group + 1) * g.in : g.source_pitch;
    load_window(c, GroupedTile(g, tile), source, pixels, channel / kVector * kVector, end,
                shared_address(memory) + stage * windows);
    if (g.chunks == 1 && tile != blockIdx.x) return;
    const int64_t first = (int64_t{block.group} * g.parts + block.part) * g.part_words() + chunk * g.chunk_words();
    const char *from = reinterpret_cast<const char *>(weight) + first * 4;
    const int bytes = block.groups * g.chunk_words() * 4;
    const uint32_t to = shared_address(weights) + (g.chunks > 1 ? stage * chunk_bytes : 0);
    for (int i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16) copy_async(to + i, from + i, true);
  };

  GroupedSum<kThree> sums[kSixteens][kEights];
  load(blockIdx.x, 0, 0);
  commit_copies();
  int chunk = 0, stage = 0;
  for (unsigned index = blockIdx.x; index < tiles; stage ^= 1) {
    const int next_chunk = chunk + 1 < g.chunks ? chunk + 1 : 0;
    const unsigned next = next_chunk ? index : index + gridDim.x;
    if (next < tiles) load(next, next_chunk, stage ^ 1);
    commit_copies();
    wait_copies<1>();
    __syncthreads();
    const GroupedTile tile(g, index);
    const uint32_t window = shared_address(memory) + stage * windows + block.first_channel(g, chunk) % kVector * kSize;
    const char *const operands = weights + (g.chunks > 1 ? stage * chunk_bytes : 0);

    // sums of a group's 8s of results from `piece` on
    auto add = [&](int group, int phase, int piece) {
      const uint32_t of_group = window + group * g.in * kSize;
      const int first_step = g.first_step[phase], steps = g.first_step[phase + 1] - first_step;
      const uint2 *b_at = reinterpret_cast<const uint2 *>(operands + group * g.chunk_words() * 4) +
                          (first_step * g.pieces + piece) * kEights * 32 + lane;
      const int *at = offsets + (kWhole ? first_step * 2 + lane / 16 : first_step * 8 + lane % 4);
      // a step's operands are loaded while the step before is multiplied, if registers hold both
      uint32_t a[kBuffers][kSixteens][kParts][4];
      uint2 b[kBuffers][kEights];
      auto load = [&](int i) {
        if constexpr (kWhole) {
          const int offset = *at;
#pragma unroll
          for (int m = 0; m < kSixteens; ++m)
            load_matrices(a[i][m][0], offset < 0 ? shared_address(zeros) : of_group + places[m] + offset);
        } else {
          const int low = at[0], high = at[4];
#pragma unroll
          for (int m = 0; m < 2 * kSixteens; ++m) {
            a[i][m / 2][0][m % 2] = low < 0 ? 0 : load_word(of_group + places[m] + low);
            a[i][m / 2][0][m % 2 + 2] = high < 0 ? 0 : load_word(of_group + places[m] + high);
          }
        }
#pragma unroll
        for (int e = 0; e < kEights; ++e) b[i][e] = b_at[e * 32];
        at += kWhole ? 2 : 8, b_at += g.pieces * kEights * 32;
      };
      auto multiply = [&](int i) {
#pragma unroll
        for (int m = 0; m < kSixteens; ++m) to_parts<T, kThree, 4>(a[i][m]);
#pragma unroll
        for (int e = 0; e < kEights; ++e) {
          uint32_t words[kParts][2] = {{b[i][e].x, b[i][e].y}};
          if constexpr (kThree) to_parts<T, kThree, 2>(words);
#pragma unroll
          for (int m = 0; m < kSixteens; ++m) sums[m][e].add(a[i][m], words, T());
        }
      };
      if constexpr (kBuffers == 1) {
        for (int step = 0; step < steps; ++step) load(0), multiply(0);
      } else {
        if (steps > 0) load(0);
        for (int step = 0; step < steps; step += 2) {
          if (step + 1 < steps) load(1);
          multiply(0);
          if (step + 1 >= steps) break;
          if (step + 2 < steps) load(0);
          multiply(1);
        }
      }
    };
    char *const mine = staged + (g.chunks > 1 ? warp_index() : unit) * kUnit * g.result_pixel;
    // channels [first, end) of the phase's pixels, from vector `begin` of the unit's results on, `apart` at a time
    auto write = [&](int phase, int first, int end, int begin, int apart) {
      const int phase_h = phase / g.w.phases, phase_w = phase - phase_h * g.w.phases;
      const int rows = min(g.rows, (g.h.result - phase_h + g.h.phases - 1) / g.h.phases - tile.row);
      const int cols = (g.w.result - phase_w + g.w.phases - 1) / g.w.phases - tile.column;
      const int64_t row = int64_t{tile.image} * g.h.result + tile.row * g.h.phases + phase_h;
      T *const to = result + (row * g.w.result + tile.column * g.w.phases + phase_w) * g.result_pitch + first;
      const int vectors = g.result_channels / kVector;
      for (int i = begin; i < kUnit * vectors; i += apart) {
        const int position = c.by_result_vectors.divide(i), v = i - position * vectors;
        const int2 spot = spots[unit * kUnit + position];
        if ((spot.y >> 16) < rows && (spot.y & 0xffff) < cols && first + v * kVector < end)
          *reinterpret_cast<uint4 *>(to + spot.x + v * kVector) =
              *reinterpret_cast<const uint4 *>(mine + position * g.result_pixel + v * 16);
      }
    };

    if (g.chunks == 1) {
      const int first = block.first_result(g), groups = block.groups;
      const int end =
          groups > 1 || g.parts == 1 ? first + groups * g.out : min(first + g.part, (block.group + 1) * g.out);
      for (int phase = 0; phase < g.phases(); ++phase) {
        if (phase) __syncthreads();
        for (int task = share; task < groups * g.pieces; task += shares) {
          const int group = task / g.pieces, piece = task - group * g.pieces;
          begin_sums(g, block, bias, group, piece, sums);
          add(group, phase, piece);
          keep_sums<T>(g, group * g.part + piece * kEights * 8, piece, sums, mine);
        }
        __syncthreads();
        write(phase, first, end, share * 32 + lane, shares * 32);
      }
    } else {  // a warp has one phase and piece
      const int phase = share / g.pieces, piece = share - phase * g.pieces;
      if (chunk == 0) begin_sums(g, block, bias, 0, piece, sums);
      add(0, phase, piece);
      if (!next_chunk) {
        const int first = block.first_result(g) + piece * kEights * 8;
        keep_sums<T>(g, 0, piece, sums, mine);
        __syncwarp();
        write(phase, first, min(block.first_result(g) + g.part, (block.group + 1) * g.out), lane, 32);
      }
    }
    __syncthreads();
    index = next, chunk = next_chunk;
  }
}

// ------------------------------------------------------------------------------------------------------------ dweight

// The rows and columns of a warp's products: 16 results from `result`, 8s of channels from `channel` on, of the block's
// in shared memory, for some groups of the block.
struct GroupedSixteen {
  int result, channel, first_group, last_group;

  __device__ GroupedSixteen(const Grouped &g, const GroupedBlock &block, int index, int result_shift,
                            int channel_shift) {
    if (g.part < 16) {
      result = index * 16;
      first_group = max(result - result_shift, 0) / g.part;
      last_group = min((result + 15 - result_shift) / g.part, block.groups - 1);
    } else {
      const int each = g.sixteens / g.block_groups;
      first_group = last_group = index / each;
      result = (result_shift + first_group * g.part) / 8 * 8 + index % each * 16;
    }
    channel = (channel_shift + first_group * g.chunk) / 8 * 8;
  }
};

// partial[slice][out_channel][element][channel of the group, in fours]: a block sums the tiles of a slice.
template <typename T, int kEights, bool kThree = false>
__global__ void __launch_bounds__(32 * kGroupedDweightWarps, 2)
    grouped_dweight_kernel(const __grid_constant__ GroupedCall c, const T *dy, const T *x, float *partial,
                           int64_t slice, int slice_channels) {
  constexpr int kPairs = (kEights + 1) / 2, kParts = kThree ? 2 : 1, kVector = kVectorSize<T>, kSize = sizeof(T);
  extern __shared__ __align__(16) char memory[];
  const Grouped &g = c.g;
  const int chunk = blockIdx.y % g.chunks;
  const GroupedBlock block(g, blockIdx.y / g.chunks);
  const int lane = lane_index(), windows = g.windows(), positions = g.units * kGroupedUnit;
  const int dy_bytes = positions * g.result_pixel, stage_bytes = windows + g.dweight_tile(positions);
  char *const zeros = memory + 2 * stage_bytes;
  int2 *const pixels = reinterpret_cast<int2 *>(zeros + 16);
  write_pixels(c, pixels);
  const int channel = block.first_channel(g, chunk), output = block.first_result(g);
  const int channel_shift = channel % kVector, result_shift = output % kVector;
  // this warp's products
  const int tap_groups = (g.taps() + kGroupedTaps - 1) / kGroupedTaps;
  const int task = blockIdx.z * g.warps + warp_index(), first_tap = task % tap_groups * kGroupedTaps;
  const int piece = task / tap_groups % g.pieces, sixteen = task / tap_groups / g.pieces;
  const GroupedSixteen of(g, block, sixteen, result_shift, channel_shift);
  const bool idle = sixteen >= g.sixteens || of.first_group >= block.groups;
  const int column = of.channel + piece * kEights * 8;
  int taps[kGroupedTaps];
#pragma unroll
  for (int t = 0; t < kGroupedTaps; ++t) {
    const int tap = min(first_tap + t, g.taps() - 1), r = tap / g.w.phase[0].taps, s = tap - r * g.w.phase[0].taps;
    taps[t] = (r * g.h.unit * g.window_w + s * g.w.unit) * g.pixel;
  }
  if (threadIdx.x < 4) reinterpret_cast<int *>(zeros)[threadIdx.x] = 0;

  const unsigned tiles = static_cast<unsigned>(g.tiles());
  __syncthreads();
  wait_for_kernel_before();
  auto load = [&](unsigned index, char *stage) {
    const GroupedTile tile(g, index);
    load_window(c, tile, x, pixels, channel - channel_shift, g.source_pitch, shared_address(stage));
    const int vectors = g.result_channels / kVector, left = (g.result_pitch - output + result_shift) / kVector;
    const int rows = min(g.rows, g.h.count - tile.row), cols = min(g.cols, g.w.count - tile.column);
    const T *image = dy + int64_t{tile.image} * g.h.result * g.w.result * g.result_pitch + output - result_shift;
    const uint32_t to = shared_address(stage + windows);
    for (int i = threadIdx.x; i < positions * vectors; i += blockDim.x) {
      const int position = c.by_result_vectors.divide(i), v = i - position * vectors;
      const int row = c.by_cols.divide(position), col = position - row * g.cols;
      const bool there = row < rows && col < cols && v < left;
      const int64_t pixel = int64_t{tile.row + row} * g.w.result + tile.column + col;
      copy_async(to + position * g.result_pixel + v * 16, there ? image + pixel * g.result_pitch + v * kVector : dy,
                 there);
    }
    int *const places = reinterpret_cast<int *>(stage + windows + dy_bytes);
    for (int i = threadIdx.x; i < positions; i += blockDim.x) {
      const int row = c.by_cols.divide(i), col = i - row * g.cols;
      places[i] = row < rows && col < cols ? (row * g.h.step * g.window_w + col * g.w.step) * g.pixel : -1;
    }
  };

  GroupedSum<kThree> sums[kGroupedTaps][kEights] = {};
  load(blockIdx.x, memory);
  commit_copies();
  char *stage = memory, *other = memory + stage_bytes;
  for (unsigned index = blockIdx.x; index < tiles; index += gridDim.x) {
    if (index + gridDim.x < tiles) load(index + gridDim.x, other);
    commit_copies();
    wait_copies<1>();
    __syncthreads();
    if (!idle) {
      constexpr int kStep = 2 * kVector;
      const uint32_t zero = shared_address(zeros);
      // ldmatrix: a lane's row is a position, for dy l % 8 + l / 16 * 8, for x l % 16. Of float32, which it does not
      // transpose, a lane reads words of positions l % 4 and l % 4 + 4.
      const int row = kSize == 2 ? lane % 8 + lane / 16 * 8 : lane % 4;
      const uint32_t rows = shared_address(stage + windows) + row * g.result_pixel +
                            (of.result + (kSize == 2 ? lane / 8 % 2 * 8 : lane / 4)) * kSize;
      const uint32_t window = shared_address(stage) + (column + (kSize == 2 ? lane / 16 * 8 : lane / 4)) * kSize;
      const int *places =
          reinterpret_cast<const int *>(stage + windows + dy_bytes) + (kSize == 2 ? lane % 16 : lane % 4);
      for (int step = 0; step < positions; step += kStep) {
        uint32_t a[kParts][4];
        const int place = places[step];
        if constexpr (kSize == 2) {
          load_transposed_matrices(a[0], rows + step * g.result_pixel);
          constexpr int kAhead = kEights <= 2;  // elements of the kernel whose operands are loaded before they are used
          uint32_t b[kAhead + 1][kPairs][4];
          auto load = [&](int t) {
#pragma unroll
            for (int pair = 0; pair < kPairs; ++pair)
              load_transposed_matrices(b[t % (kAhead + 1)][pair],
                                       place < 0 ? zero : window + place + taps[t] + pair * 32);
          };
          if constexpr (kAhead) load(0);
#pragma unroll
          for (int t = 0; t < kGroupedTaps; ++t) {
            if (t + kAhead < kGroupedTaps) load(t + kAhead);
            const auto &now = b[t % (kAhead + 1)];
#pragma unroll
            for (int e = 0; e < kEights; ++e) {
              const uint32_t words[1][2] = {{now[e / 2][e % 2 * 2], now[e / 2][e % 2 * 2 + 1]}};
              sums[t][e].add(a, words, T());
            }
          }
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[0][i] = load_word(rows + (step + i / 2 * 4) * g.result_pixel + i % 2 * 32);
          to_parts<T, kThree, 4>(a);
          const int other = places[step + 4];
#pragma unroll
          for (int t = 0; t < kGroupedTaps; ++t)
#pragma unroll
            for (int e = 0; e < kEights; ++e) {
              const uint32_t at = window + taps[t] + e * 32;
              uint32_t words[kParts][2] = {
                  {load_word(place < 0 ? zero : at + place), load_word(other < 0 ? zero : at + other)}};
              to_parts<T, kThree, 2>(words);
              sums[t][e].add(a, words, T());
            }
        }
      }
    }
    __syncthreads();
    char *const used = stage;
    stage = other, other = used;
  }
  if (idle) return;
  partial += blockIdx.x * slice;
#pragma unroll
  for (int t = 0; t < kGroupedTaps; ++t)
#pragma unroll
    for (int e = 0; e < kEights; ++e)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // from the block's first group on
        const int result = of.result + half * 8 + lane / 4 - result_shift;
        const int at = column + e * 8 + lane % 4 * 2 - channel_shift;
        const int group = result / g.part, result_of = result - group * g.part, at_of = at - group * g.chunk;
        if (first_tap + t >= g.taps() || result < 0 || group < of.first_group || group > of.last_group) continue;
        if (block.part * g.part + result_of >= g.out) continue;
        const int64_t row =
            (int64_t{block.group + group} * g.out + block.part * g.part + result_of) * g.taps() + first_tap + t;
        float *to = partial + row * slice_channels + chunk * g.chunk + at_of;
        const bool both = 0 <= at_of && at_of + 1 < g.chunk && chunk * g.chunk + at_of + 1 < g.in;
        if (both) *reinterpret_cast<float2 *>(to) = {sums[t][e].value(half * 2), sums[t][e].value(half * 2 + 1)};
      }
}

}  // namespace AOT_ISA
}  // namespace aot
