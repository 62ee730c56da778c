// dx of a convolution of few channels: an implicit GEMM by mma.sync, whose operand from dy is read from shared memory.
// For 16 bits, TF32 and float32; any kernel, stride, padding and dilation, but no dilation with a stride; no groups.
//
//   rows of a product   16 positions of a row
//   columns             pixels of a position x channels, in 8s
//   summed over         elements of dy that a position meets x output channels, 64 bytes of them in a step
//
// A position is a place in dx's grid of stride x stride pixels, of one pixel for each phase of the stride, or of two
// neighbours if the stride is 1 and two pixels' channels fit in 8 columns. All of its pixels meet the same window of
// dy, and so they share the operand from dy, and no column is left to other padding than of 3 channels to 4 and of 5, 6
// and 7 to 8. An element of the kernel that a pixel lacks at an element of dy is a zero. The grid's origin is shifted
// so that this window is smallest: 11 x 11 with stride 4 has one of 3 x 3.
//
// A block has a tile of rows x 16 positions. It writes the window of dy that the tile meets to shared memory, whatever
// dy's layout, for 64 bytes of output channels after another, with zeros outside of the image. A pixel of it has 80
// bytes there, and pixels that neighbouring positions meet at one step are neighbours, so that ldmatrix has no bank
// conflicts. A first kernel writes the weight as the lanes' operands to the workspace, from where they come through L1.
// Lanes have results that are neighbours in dx, where its sizes allow.
//
// A zero of the weight times an infinity of dy would be NaN in a pixel that does not meet this element. If a tile's
// results are not all finite, the block computes them again, a pixel of the columns at a time, without such products.
//
// With kThree a product of float32 is three of TF32 (two_tf32.cuh).
//
// Predicted for a stem, 3 channels of 224 x 224 to 64, 7 x 7, stride 2, bfloat16, batch 128, on an H200, in
// microseconds (the machine's figures are those of conv2d_few_channels.cuh):
//
//   bytes           60         dy read, 206 MB, 1.4 times from L2; dx written, 39 MB
//   products        93 to 115  12.8 million, of 16 elements of dy for 12.25 of the kernel on average, 4 channels for 3
//   shared memory   145        2 wavefronts of a product for dy, 0.5 for the weight; NCHW: 90 more to stage dy
//   all             200, NCHW 260
#pragma once
#include "conv2d_few_channels.cuh"
#include "cuda/two_tf32.cuh"

namespace aot {
inline namespace AOT_ISA {

// A call as the kernels take it.
struct FewDxCall {
  using Axis = Conv2dParams::DxAxis;
  int height, width, channels, out_channels, out_h, out_w, kernel_h, kernel_w;
  int stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;
  Axis h, w;
  int tiles_h, tiles_w, positions_h;
  int per_tile, chunks;
  int window_h, window_w, part, pitch, window;
  unsigned window_w_reciprocal;  // ceil(2^32 / window_w)
  bool vectors, pairs;           // whether vectors of dy may be loaded, and pairs of columns stored
  bool three;                    // whether operands are not rounded
  Strides x, weight, y;

  FewDxCall(const Conv2dCall &c, const Conv2dParams::FewDx &f)
      : height(static_cast<int>(c.s.height)),
        width(static_cast<int>(c.s.width)),
        channels(static_cast<int>(c.s.channels)),
        out_channels(static_cast<int>(c.s.out_channels)),
        out_h(static_cast<int>(c.s.out_h)),
        out_w(static_cast<int>(c.s.out_w)),
        kernel_h(static_cast<int>(c.s.kernel_h)),
        kernel_w(static_cast<int>(c.s.kernel_w)),
        stride_h(static_cast<int>(c.stride_h)),
        stride_w(static_cast<int>(c.stride_w)),
        padding_h(static_cast<int>(c.padding_h)),
        padding_w(static_cast<int>(c.padding_w)),
        dilation_h(c.s.kernel_h > 1 ? static_cast<int>(c.dilation_h) : 1),
        dilation_w(c.s.kernel_w > 1 ? static_cast<int>(c.dilation_w) : 1),
        h(f.h),
        w(f.w),
        tiles_h(static_cast<int>(ceil_div(f.h.positions(c.s.height), f.rows))),
        tiles_w(static_cast<int>(ceil_div(f.w.positions(c.s.width), kFewColumns))),
        positions_h(f.h.positions(c.s.height)),
        per_tile(f.per_tile),
        chunks(f.chunks),
        window_h(f.height),
        window_w(f.width),
        part(f.part),
        pitch(f.pitch),
        window(f.window),
        window_w_reciprocal(static_cast<unsigned>(((uint64_t{1} << 32) + f.width - 1) / f.width)),
        three(f.three),
        x(c.x),
        weight(c.weight),
        y(c.y) {}

  int steps() const { return h.count * w.count; }
};

constexpr int kDxThreads = Conv2dParams::kDxWarps * 32;

// ------------------------------------------------------------------------------------------------------------- orders

// Column `column` of 8s of columns: a pixel of the position and a channel, or `there` is false. Pixels of a tile are
// numbered row by row; in NHWC the channels of a pixel are neighbours, in NCHW the pixels of a channel.
struct DxColumn {
  int row, column, pixel, channel;  // pixel: of those of the 8 columns
  bool there;

  template <class Call>
  __host__ __device__ DxColumn(const Call &f, bool nhwc, int tile, int n)
      : pixel(nhwc ? n / f.channels : n % f.per_tile), channel(nhwc ? n % f.channels : n / f.per_tile) {
    const int index = tile * f.per_tile + pixel;
    row = index / f.w.pixels, column = index % f.w.pixels;
    there = pixel < f.per_tile && channel < f.channels && row < f.h.pixels;
  }
};

// The element of the kernel, along an axis, by which a pixel of a position meets the i-th element of dy of its window;
// there may be none of this number. A dilation is only with one pixel, and then divides it.
__host__ __device__ inline int dx_element(const Conv2dParams::DxAxis &axis, int pixel, int i, int stride, int padding,
                                          int dilation) {
  return (pixel - axis.shift + padding - stride * (axis.first + i * axis.step)) / dilation;
}
// An element of both axes has this number in the kernel, or -1.
template <class Call>
__host__ __device__ inline int dx_element(const Call &f, const DxColumn &column, int step) {
  const int i = step / f.w.count, j = step % f.w.count;
  const int r = dx_element(f.h, column.row, i, f.stride_h, f.padding_h, f.dilation_h);
  const int s = dx_element(f.w, column.column, j, f.stride_w, f.padding_w, f.dilation_w);
  return column.there && 0 <= r && r < f.kernel_h && 0 <= s && s < f.kernel_w ? r * f.kernel_w + s : -1;
}

// Offset of a pixel of the window. Columns that neighbouring positions, 1 or 2 apart, meet at one step are neighbours.
template <class Call>
__host__ __device__ inline int dy_window_offset(const Call &f, int row, int column) {
  const int log2_apart = f.w.apart - 1;
  return (row * f.pitch + (column & log2_apart) * f.part + (column >> log2_apart)) * Conv2dParams::kDxPixel;
}

// The first of the output channels, of a step's, in word `word` of 4 of a lane's operand: two halves of two words.
template <typename T>
__host__ __device__ constexpr int dx_output(int word, int lane) {
  return (word * 16 + lane % 4 * 4) / static_cast<int>(sizeof(T));
}

// ------------------------------------------------------------------------------------------------------------- weight

// The bits of an element, without rounding.
__device__ inline uint32_t stored_bits(const float *p) { return __float_as_uint(__ldg(p)); }
template <typename T>
__device__ inline uint32_t stored_bits(const T *p) {
  return element_bits(p);
}

// The weight as operands: (groups, chunks, steps, tiles, lanes), 16 bytes each. A thread writes one.
template <typename T, bool kNhwc>
__global__ void __launch_bounds__(kDxThreads)
    few_dx_weight_kernel(const __grid_constant__ FewDxCall f, const T *weight, uint4 *to, int tiles, unsigned n) {
  constexpr int kElements = 4 / sizeof(T), kOutputs = Conv2dParams::kDxChunk / sizeof(T);
  launch_next();
  const unsigned index = blockIdx.x * kDxThreads + threadIdx.x, steps = f.h.count * f.w.count;
  if (index >= n) return;
  const int lane = index % 32, tile = index / 32 % tiles;
  const unsigned line = index / 32 / tiles, chunks = line / steps;
  const DxColumn column(f, kNhwc, static_cast<int>(chunks / f.chunks) * tiles + tile, lane / 4);
  const int element = dx_element(f, column, static_cast<int>(line % steps));
  const T *from = weight + column.channel * f.weight.channel + element * f.weight.tap;
  uint32_t words[4];
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const int output = static_cast<int>(chunks % f.chunks) * kOutputs + dx_output<T>(word, lane);
    uint32_t bits[kElements];
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const bool there = element >= 0 && output + e < f.out_channels;
      const T *at = from + (output + e) * f.weight.image;
      bits[e] = !there ? 0 : f.three ? stored_bits(at) : element_bits(at);
    }
    words[word] = kElements == 2 ? bits[0] | bits[kElements - 1] << 16 : bits[0];
  }
  to[index] = {words[0], words[1], words[2], words[3]};
}

// ------------------------------------------------------------------------------------------------------------- staging

// A tile: an image, and the first of its positions.
struct DxTile {
  int image, row, column;

  __device__ DxTile(const FewDxCall &f, int rows, int index)
      : image(index / (f.tiles_h * f.tiles_w)),
        row(index / f.tiles_w % f.tiles_h * rows),
        column(index % f.tiles_w * kFewColumns) {}
};

// Writes the tile's window of dy to shared memory, for the output channels of a chunk.
template <typename T, bool kNhwc>
__device__ inline void stage_dy_window(const FewDxCall &f, const DxTile &tile, int chunk, const T *dy, char *window) {
  constexpr int kOutputs = Conv2dParams::kDxChunk / sizeof(T), kVector = 16 / sizeof(T), kElements = 4 / sizeof(T);
  const int h0 = tile.row + f.h.first, w0 = tile.column * f.w.apart + f.w.first, pixels = f.window_h * f.window_w;
  const int row = static_cast<int>(f.y.row), column = static_cast<int>(f.y.column);
  const int channel = static_cast<int>(f.y.channel);
  dy += tile.image * f.y.image;
  // f(the pixel's offset in the window, its place in dy, whether it is there)
  auto with_pixel = [&](int pixel, auto use) {
    const int i = static_cast<int>(__umulhi(pixel, f.window_w_reciprocal)), j = pixel - i * f.window_w;
    const bool there = static_cast<unsigned>(h0 + i) < static_cast<unsigned>(f.out_h) &&
                       static_cast<unsigned>(w0 + j) < static_cast<unsigned>(f.out_w);
    use(dy_window_offset(f, i, j), (h0 + i) * row + (w0 + j) * column, there);
  };
  if (kNhwc && f.vectors) {
    const uint32_t window_at = shared_address(window);
    const int output = threadIdx.x % 4 * kVector, first = chunk * kOutputs + output;
#pragma unroll 4
    for (int pixel = threadIdx.x / 4; pixel < pixels; pixel += kDxThreads / 4)
      with_pixel(pixel, [&](int offset, int from, bool there) {
        there = there && first < f.out_channels;
        copy_async(window_at + offset + threadIdx.x % 4 * 16, dy + (there ? from + first : 0), there);
      });
    commit_copies();
    return;
  }
  // A thread has kWords words of each of its pixels. A warp reads 16 pixels of a channel, and writes with two-way bank
  // conflicts: with 8 pixels there are none, and the loads take longer.
  constexpr int kAtOnce = 4, kLines = 16, kWords = 2, kNextWord = Conv2dParams::kDxChunk / 4 / kWords;
  const int word = lane_index() / kLines + warp_index() * (32 / kLines), output = chunk * kOutputs + word * kElements;
  for (int first = lane_index() % kLines; first < pixels; first += kAtOnce * kLines) {
    uint32_t v[kAtOnce][kWords][kElements];
    int at[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      with_pixel(first + k * kLines, [&](int offset, int from, bool there) {
        there = there && first + k * kLines < pixels;
        at[k] = offset;
#pragma unroll
        for (int m = 0; m < kWords; ++m)
#pragma unroll
          for (int e = 0; e < kElements; ++e) {
            const int o = output + m * kNextWord * kElements + e;
            v[k][m][e] = there && o < f.out_channels ? stored_bits(dy + from + o * channel) : 0;
          }
      });
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (first + k * kLines < pixels)
#pragma unroll
        for (int m = 0; m < kWords; ++m)
          reinterpret_cast<uint32_t *>(window + at[k])[word + m * kNextWord] =
              kElements == 2 ? v[k][m][0] | v[k][m][kElements - 1] << 16 : v[k][m][0];
  }
}

// ----------------------------------------------------------------------------------------------------------------- dx

// 16 positions x 32 bytes of output channels, at a lane's part of them.
template <typename T, bool kThree>
__device__ inline uint4 load_positions(uint32_t at) {
  const uint4 a = load_dy<false>(at);
  if constexpr (sizeof(T) == 2 || kThree) return a;
  return {product_bits(__uint_as_float(a.x)), product_bits(__uint_as_float(a.y)), product_bits(__uint_as_float(a.z)),
          product_bits(__uint_as_float(a.w))};
}

// A warp's sums, and with kThree those of products with smaller parts.
template <int kTiles, bool kThree>
struct DxSums {
  static constexpr int kRows = Conv2dParams::kDxRows<kTiles>;
  float of[kRows][kTiles][4], small[kThree ? kRows : 1][kTiles][4];

  // Adds the product of a row of positions and of a tile of columns. An operand is its larger part, then its smaller.
  template <typename T>
  __device__ void add(int row, int tile, const uint4 (&a)[2], const uint2 (&b)[2], T type) {
    if constexpr (kThree) {
      float products[4] = {};
      multiply_add(products, a[0], b[0], type);
      multiply_add(small[row][tile], a[1], b[0], type), multiply_add(small[row][tile], a[0], b[1], type);
#pragma unroll
      for (int e = 0; e < 4; ++e) of[row][tile][e] += products[e];
    } else {
      multiply_add(of[row][tile], a[0], b[0], type);
    }
  }
  __device__ void end() {
    if constexpr (kThree) {
#pragma unroll
      for (int k = 0; k < kRows; ++k)
#pragma unroll
        for (int q = 0; q < kTiles; ++q)
#pragma unroll
          for (int e = 0; e < 4; ++e) of[k][q][e] += isfinite(of[k][q][e]) ? small[k][q][e] : 0;
    }
  }
};

// Bits of the tiles of columns whose pixel `pixel` meets dy at a step.
template <int kTiles, bool kNhwc>
__device__ inline unsigned tiles_there(const FewDxCall &f, int group, int pixel, int step) {
  unsigned there = 0;
  for (int q = 0; q < kTiles; ++q) {
    const DxColumn column(f, kNhwc, group * kTiles + q, kNhwc ? pixel * f.channels : pixel);
    there |= (dx_element(f, column, step) >= 0) << q;
  }
  return there;
}

// Adds the products of a chunk. pixel: the only pixel of each 8 columns whose products are wanted, or -1: all.
template <typename T, int kTiles, bool kNhwc, bool kOnePixel, bool kThree>
__device__ inline void add_chunk(const FewDxCall &f, uint32_t window_at, const uint4 *weights, int pixel,
                                 DxSums<kTiles, kThree> &sum) {
  constexpr int kRows = Conv2dParams::kDxRows<kTiles>, kPixel = Conv2dParams::kDxPixel, kParts = kThree ? 2 : 1;
  // ldmatrix: lanes address 16 positions, and again their last 16 bytes
  const int lane = lane_index(), row_bytes = f.pitch * kPixel;
  const uint32_t lane_at = window_at + warp_index() * kRows * row_bytes + lane % 16 * kPixel + lane / 16 * 16;
  weights += lane;
  for (int i = 0; i < f.h.count; ++i) {
    const uint32_t line_at = lane_at + i * f.h.step * row_bytes;
#pragma unroll 1
    for (int j = 0; j < f.w.count; ++j, weights += kTiles * 32) {
      const unsigned there =
          kOnePixel ? tiles_there<kTiles, kNhwc>(f, blockIdx.y, pixel, i * f.w.count + j) : (1u << kTiles) - 1;
      uint4 w[kTiles][2];
#pragma unroll
      for (int q = 0; q < kTiles; ++q) {
        const uint4 both = weights[q * 32];
        if constexpr (kThree) split(both, w[q][0], w[q][1]);
        else w[q][0] = both;
      }
      uint32_t at = line_at + dy_window_offset(f, 0, j * f.w.step);
#pragma unroll
      for (int k = 0; k < kRows; ++k, at += row_bytes) {
        const uint4 loaded[] = {load_positions<T, kThree>(at), load_positions<T, kThree>(at + 32)};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint4 a[2] = {loaded[half]};
          if constexpr (kThree) split(loaded[half], a[0], a[1]);
#pragma unroll
          for (int q = 0; q < kTiles; ++q) {
            uint2 b[2];
#pragma unroll
            for (int i = 0; i < kParts; ++i) b[i] = half ? uint2{w[q][i].z, w[q][i].w} : uint2{w[q][i].x, w[q][i].y};
            if (!kOnePixel || there >> q & 1) sum.add(k, q, a, b, T());
          }
        }
      }
    }
  }
}

template <typename T>
__device__ inline void store_pair(T *to, float a, float b) {
  if constexpr (sizeof(T) == 2) *reinterpret_cast<uint32_t *>(to) = narrow_word(a, b, T());
  else *reinterpret_cast<float2 *>(to) = {a, b};
}

// Stores a warp's sums, of one pixel of each 8 columns or of all.
template <typename T, int kTiles, bool kNhwc>
__device__ inline void store_dx(const FewDxCall &f, const DxTile &tile, int pixel,
                                const float (&sum)[Conv2dParams::kDxRows<kTiles>][kTiles][4], T *dx) {
  constexpr int kRows = Conv2dParams::kDxRows<kTiles>;
  const int first_row = tile.row + warp_index() * kRows, g = lane_index() / 4, t = lane_index() % 4;
  const int row_step = static_cast<int>(f.x.row), column_step = static_cast<int>(f.x.column);
  const int channel_step = static_cast<int>(f.x.channel);
  dx += tile.image * f.x.image;
#pragma unroll
  for (int q = 0; q < kTiles; ++q) {
    const DxColumn of[] = {{f, kNhwc, static_cast<int>(blockIdx.y) * kTiles + q, 2 * t},
                           {f, kNhwc, static_cast<int>(blockIdx.y) * kTiles + q, 2 * t + 1}};
#pragma unroll
    for (int k = 0; k < kRows; ++k)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int u = tile.column + g + half * 8;
        T *to[2];
        bool there[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int h = (first_row + k) * f.h.pixels + of[e].row - f.h.shift;
          const int w = u * f.w.pixels + of[e].column - f.w.shift;
          there[e] = of[e].there && (pixel < 0 || of[e].pixel == pixel) &&
                     static_cast<unsigned>(h) < static_cast<unsigned>(f.height) &&
                     static_cast<unsigned>(w) < static_cast<unsigned>(f.width);
          to[e] = dx + (h * row_step + w * column_step + of[e].channel * channel_step);
        }
        const float a = sum[k][q][half * 2], b = sum[k][q][half * 2 + 1];
        if (f.pairs && there[0] && there[1]) {
          store_pair(to[0], a, b);
        } else {
          if (there[0]) *to[0] = narrow<T>(a);
          if (there[1]) *to[1] = narrow<T>(b);
        }
      }
  }
}

// weights: of few_dx_weight_kernel.
template <typename T, int kTiles, bool kNhwc, bool kThree = false>
__global__ void __launch_bounds__(kDxThreads, kTiles == 8 || kThree ? 3 : Conv2dParams::kDxBlocks)
    few_dx_kernel(const __grid_constant__ FewDxCall f, const T *dy, const uint4 *weights, T *dx) {
#if __CUDA_ARCH__ >= 800
  constexpr int kRows = Conv2dParams::kDxRows<kTiles>;
  extern __shared__ __align__(16) char window[];
  const DxTile tile(f, kRows * Conv2dParams::kDxWarps, blockIdx.x);
  const uint32_t window_at = shared_address(window);
  const int chunk_words = f.h.count * f.w.count * kTiles * 32;
  const bool has_rows = tile.row + warp_index() * kRows < f.positions_h;
  weights += int64_t{blockIdx.y} * f.chunks * chunk_words;

  DxSums<kTiles, kThree> sum = {};
  for (int chunk = 0; chunk < f.chunks; ++chunk) {
    if (chunk) __syncthreads();  // the window is free
    stage_dy_window<T, kNhwc>(f, tile, chunk, dy, window);
    wait_copies<0>();
    __syncthreads();
    if (chunk == 0) wait_for_kernel_before();
    if (has_rows) add_chunk<T, kTiles, kNhwc, false>(f, window_at, weights + chunk * chunk_words, -1, sum);
  }
  sum.end();
  // a sum of zeros unless an element is not finite
  float zero = 0;
#pragma unroll
  for (int k = 0; k < kRows; ++k)
#pragma unroll
    for (int q = 0; q < kTiles; ++q)
#pragma unroll
      for (int e = 0; e < 4; ++e) zero += sum.of[k][q][e] * 0.f;
  if (!__syncthreads_or(zero != 0)) return store_dx<T, kTiles, kNhwc>(f, tile, -1, sum.of, dx);

#pragma unroll 1
  for (int pixel = 0; pixel < f.per_tile; ++pixel) {
    sum = {};
#pragma unroll 1
    for (int chunk = 0; chunk < f.chunks; ++chunk) {
      __syncthreads();
      stage_dy_window<T, kNhwc>(f, tile, chunk, dy, window);
      wait_copies<0>();
      __syncthreads();
      if (has_rows) add_chunk<T, kTiles, kNhwc, true>(f, window_at, weights + chunk * chunk_words, pixel, sum);
    }
    sum.end();
    store_dx<T, kTiles, kNhwc>(f, tile, pixel, sum.of, dx);
  }
#endif
}

}  // namespace AOT_ISA
}  // namespace aot
