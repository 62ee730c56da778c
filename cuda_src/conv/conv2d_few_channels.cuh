// conv2d of few channels, such as a network's first layer: an implicit GEMM by mma.sync, whose operand from x is built
// in shared memory. Forward and dweight, for 16 bits and TF32; the forward for float32 too, as three products of TF32
// (two_tf32.cuh). Any kernel, stride, padding and dilation; no groups. dx: conv2d_few_dx.cuh.
//
//            rows of a product   columns                                   summed over
//   y        16 output channels  8 pixels                                  units of the window, 4 in a step
//   dweight  16 output channels  8 kernel elements of a channel, in quads  pixels, 16 in a step (8 of TF32)
//
// A block has a tile of rows x 16 pixels of the result. It writes the window of x that the tile meets to shared memory,
// whatever x's layout, with channels padded to quads of four and zeros outside of the image. An element of x is read
// from there as often as kernel elements meet it. A unit is 8 bytes of a quad: four elements of 16 bits, or two of
// float32, rounded to TF32. The terms of a product have any order that both operands share, and so a lane's terms are
// those of one unit: one load of 8 bytes. The output channels in the rows (NHWC) and the pixels in the columns (NCHW)
// have such an order that a lane's results are neighbours in y, and are stored as vectors.
//
//   y        4 warps with 64 pixels x 64 output channels each. The weight is written to shared memory once for each
//            block, as the operands of the lanes; blocks are persistent, and three share a multiprocessor.
//   dweight  4 warps, each with 64 output channels x 2 groups of 8 quads; if there are fewer groups, warps share the
//            rows of pixels. Blocks sum over their tiles in a fixed order; sum_dweight (conv2d.cu) adds the slices.
//
// Predicted for a stem, 3 channels of 224 x 224 to 64, 7 x 7, stride 2, bfloat16, NHWC, in microseconds, on an H200:
// 132 multiprocessors at 1.7 GHz, 4.2 TB/s, in each quarter of a multiprocessor a product of 16 x 8 x 16 in 6.5 to 8
// cycles:
//
//                            batch 32  batch 128
//   y        bytes           15        58         at 128: read 39 MB, written 206 MB
//            products        19 to 23  75 to 93   13 steps, of 52 units for 49 elements; 10.4 million at 128
//            shared memory   12        46         33 wavefronts for 32 products
//            all             35        120        staging and stores hide behind other blocks' products
//   dweight  bytes           15        58
//            products        17 to 22  69 to 86   7 groups of 8 elements x 3 channels, on warps for 8
//            shared memory   12        46         32 wavefronts for 24 products
//            all             40        130        and 20 MB of partial sums, which stay in L2
#pragma once
#include "conv2d.cuh"
#include "cuda/async.cuh"
#include "cuda/overlap.cuh"
#include "cuda/two_tf32.cuh"

namespace aot {
inline namespace AOT_ISA {

// A call as the kernels take it.
struct FewChannels {
  int height, width, channels, out_channels, out_h, out_w, kernel, kernel_w;
  int stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;
  int rows, tiles, tiles_h, tiles_w;             // rows: of pixels in a tile
  int quads, window_h, window_w, pitch, window;  // window: bytes; pitch: pixels from one row to the next
  unsigned window_w_reciprocal;                  // ceil(2^32 / window_w)
  bool vectors;                                  // y and dy: whether vectors may be loaded and stored
  Strides x, weight, y;

  FewChannels(const Conv2dCall &c, const Conv2dParams::FewTiles &f)
      : height(static_cast<int>(c.s.height)),
        width(static_cast<int>(c.s.width)),
        channels(static_cast<int>(c.s.channels)),
        out_channels(static_cast<int>(c.s.out_channels)),
        out_h(static_cast<int>(c.s.out_h)),
        out_w(static_cast<int>(c.s.out_w)),
        kernel(static_cast<int>(c.s.kernel())),
        kernel_w(static_cast<int>(c.s.kernel_w)),
        stride_h(static_cast<int>(c.stride_h)),
        stride_w(static_cast<int>(c.stride_w)),
        padding_h(static_cast<int>(c.padding_h)),
        padding_w(static_cast<int>(c.padding_w)),
        dilation_h(c.s.kernel_h > 1 ? static_cast<int>(c.dilation_h) : 1),
        dilation_w(c.s.kernel_w > 1 ? static_cast<int>(c.dilation_w) : 1),
        rows(f.rows),
        tiles(static_cast<int>(c.s.batch) * f.tiles_h(c.s) * f.tiles_w(c.s)),
        tiles_h(f.tiles_h(c.s)),
        tiles_w(f.tiles_w(c.s)),
        quads(f.quads),
        window_h(f.height),
        window_w(f.width),
        pitch(f.pitch),
        window(f.window),
        window_w_reciprocal(static_cast<unsigned>(((uint64_t{1} << 32) + f.width - 1) / f.width)),
        x(c.x),
        weight(c.weight),
        y(c.y) {}
};

constexpr int kFewColumns = Conv2dParams::kFewColumns, kFewOutputs = Conv2dParams::kFewOutputs;
constexpr int kFewThreads = 128;

// ------------------------------------------------------------------------------------------------------------- orders

// The output channel, of a block's 64, of row `row` of the forward's tile `tile` of 16. In NHWC a lane, which has rows
// g and g + 8 of each tile, has runs of 16 bytes.
template <typename T, bool kNhwc>
__host__ __device__ constexpr int output_of_row(int tile, int row) {
  constexpr int kRun = 16 / sizeof(T), kTiles = kRun / 2;
  return kNhwc ? tile / kTiles * 8 * kRun + row % 8 * kRun + tile % kTiles * 2 + row / 8 : tile * 16 + row;
}
// The pixel, of a row's 16, of column `column` of the row's group `group` of 8. In NCHW a lane, which has columns 2 t
// and 2 t + 1 of both groups, has four neighbours. Eight, of more groups, would have lanes read x 8 pixels apart: from
// the same banks for a stride of 2.
template <bool kNhwc>
__host__ __device__ constexpr int pixel_of_column(int group, int column) {
  return kNhwc ? group * 8 + column : column / 2 * 4 + group * 2 + column % 2;
}

// Offset of a kernel element's quad in the window.
template <class Call>
__host__ __device__ inline int quad_offset(const Call &f, int element, int quad, int quad_bytes) {
  const int h = element / f.kernel_w * f.dilation_h, w = element % f.kernel_w * f.dilation_w;
  return ((h * f.pitch + w) * f.quads + quad) * quad_bytes;
}

// dy's tile in shared memory. Rows are 16 bytes more than a multiple of the banks, or their 16-byte parts are
// exchanged, so that the loads below have no bank conflicts.
template <typename T, bool kNhwc>
__host__ __device__ constexpr int dy_offset(int pixels, int pixel, int output) {
  constexpr int kSize = sizeof(T), kPart = 16 / kSize;
  if (!kNhwc) return output * (pixels * kSize + 16) + pixel * kSize;
  if (kSize == 4) return pixel * (kFewOutputs * 4 + 32) + output * 4;
  return pixel * kFewOutputs * 2 + ((output / kPart) ^ (pixel % 8)) * 16 + output % kPart * 2;
}

// -------------------------------------------------------------------------------------------------------- instructions

template <typename T>
using Quad = std::conditional_t<sizeof(T) == 2, uint2, uint4>;

// The bits of an element as products take them: float32 is rounded to TF32.
__device__ inline uint32_t product_bits(float x) {
  uint32_t bits = 0;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
#endif
  return bits;
}
template <bool kThree = false, typename T>
__device__ inline uint32_t element_bits(const T *p) {
  if constexpr (sizeof(T) == 2) return __ldg(reinterpret_cast<const unsigned short *>(p));
  else if constexpr (kThree) return __float_as_uint(__ldg(p));
  else return product_bits(__ldg(p));
}
__device__ inline uint2 packed_bits(const uint32_t (&v)[4], uint2) { return {v[0] | v[1] << 16, v[2] | v[3] << 16}; }
__device__ inline uint4 packed_bits(const uint32_t (&v)[4], uint4) { return {v[0], v[1], v[2], v[3]}; }

__device__ inline uint2 load_8(uint32_t shared) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(shared) : "memory");
  return v;
}
__device__ inline uint4 load_16(uint32_t shared) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared)
               : "memory");
  return v;
}
__device__ inline float load_float(uint32_t shared) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(shared) : "memory");
  return v;
}

// The two parts of numbers, given by their bits. `big` may be x.
__device__ inline void split(uint32_t x, uint32_t &big, uint32_t &small) { split(__uint_as_float(x), big, small); }
__device__ inline void split(const uint2 &x, uint2 &big, uint2 &small) {
  split(x.x, big.x, small.x), split(x.y, big.y, small.y);
}
__device__ inline void split(const uint4 &x, uint4 &big, uint4 &small) {
  split(x.x, big.x, small.x), split(x.y, big.y, small.y), split(x.z, big.z, small.z), split(x.w, big.w, small.w);
}

// sum (16, 8) += a (16, depth) b (depth, 8), where depth is 16, or 8 of TF32.
#if __CUDA_ARCH__ >= 800
#define AOT_MMA(instruction)                                                                             \
  asm("mma.sync.aligned." instruction " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                           \
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y))
#else
#define AOT_MMA(instruction)
#endif
__device__ inline void multiply_add(float (&sum)[4], const uint4 &a, const uint2 &b, __half) {
  AOT_MMA("m16n8k16.row.col.f32.f16.f16.f32");
}
__device__ inline void multiply_add(float (&sum)[4], const uint4 &a, const uint2 &b, __nv_bfloat16) {
  AOT_MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
}
__device__ inline void multiply_add(float (&sum)[4], const uint4 &a, const uint2 &b, float) {
  AOT_MMA("m16n8k8.row.col.f32.tf32.tf32.f32");
}
#undef AOT_MMA

// ------------------------------------------------------------------------------------------------------------- staging

// A tile: an image, and the first of its pixels.
struct FewTile {
  int image, row, column;

  __device__ FewTile(const FewChannels &f, int index)
      : image(index / (f.tiles_h * f.tiles_w)),
        row(index / f.tiles_w % f.tiles_h * f.rows),
        column(index % f.tiles_w * kFewColumns) {}
};

// Writes the tile's window of x to shared memory.
template <bool kThree = false, typename T>
__device__ inline void stage_window(const FewChannels &f, const FewTile &tile, const T *x, char *window) {
  using Bits = Quad<T>;
  constexpr int kAtOnce = 6;  // pixels whose loads are in flight
  const int h0 = tile.row * f.stride_h - f.padding_h, w0 = tile.column * f.stride_w - f.padding_w;
  const int row = static_cast<int>(f.x.row), column = static_cast<int>(f.x.column);
  const int channel = static_cast<int>(f.x.channel), pixels = f.window_h * f.window_w, threads = blockDim.x;
  x += tile.image * f.x.image;
  for (int quad = 0; quad < f.quads; ++quad, x += 4 * channel) {
    const int channels = f.channels - 4 * quad;
    for (int first = threadIdx.x; first < pixels; first += kAtOnce * threads) {
      uint32_t v[kAtOnce][4];
      int at[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int pixel = first + k * threads;
        const int i = static_cast<int>(__umulhi(pixel, f.window_w_reciprocal)), j = pixel - i * f.window_w;
        const bool there = pixel < pixels && static_cast<unsigned>(h0 + i) < static_cast<unsigned>(f.height) &&
                           static_cast<unsigned>(w0 + j) < static_cast<unsigned>(f.width);
        const T *from = x + ((h0 + i) * row + (w0 + j) * column);
        at[k] = (i * f.pitch + j) * f.quads + quad;
#pragma unroll
        for (int c = 0; c < 4; ++c) v[k][c] = there && c < channels ? element_bits<kThree>(from + c * channel) : 0;
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (first + k * threads < pixels) reinterpret_cast<Bits *>(window)[at[k]] = packed_bits(v[k], Bits());
    }
  }
}

// ------------------------------------------------------------------------------------------------------------- forward

// Writes the weight of 64 output channels to shared memory: for each step, each 16 output channels and each lane the
// operand that the lane multiplies, the words of two units.
template <typename T, bool kNhwc, bool kThree>
__device__ inline void stage_weight(const FewChannels &f, const T *weight, int outputs, int steps, uint32_t *to) {
  constexpr int kUnit = 8 / sizeof(T), kAtOnce = 8;  // elements of a unit; units whose loads are in flight
  const int units = f.quads * (4 / kUnit), slots = steps * 4 * kFewOutputs, threads = blockDim.x;
  for (int first = threadIdx.x; first < slots; first += kAtOnce * threads) {
    uint32_t v[kAtOnce][kUnit];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int slot = first + k * threads, half = slot % 2, lane = slot / 2 % 32, tile = slot / 64 % 4;
      const int unit = slot / 256 * 4 + lane % 4, element = unit / units, channel = unit % units * kUnit;
      const int output = outputs + output_of_row<T, kNhwc>(tile, half * 8 + lane / 4);
      const bool there = slot < slots && element < f.kernel && output < f.out_channels;
      const T *from = weight + output * f.weight.image + element * f.weight.tap + channel * f.weight.channel;
#pragma unroll
      for (int c = 0; c < kUnit; ++c)
        v[k][c] = there && channel + c < f.channels ? element_bits<kThree>(from + c * f.weight.channel) : 0;
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int slot = first + k * threads;
      if (slot >= slots) continue;
      uint2 unit;
      if constexpr (kUnit == 4) unit = packed_bits(v[k], uint2());
      else unit = {v[k][0], v[k][1]};
      uint32_t *words = to + slot / 2 * 4 + slot % 2;
      words[0] = unit.x, words[2] = unit.y;
    }
  }
}

// Adds the bias and stores a warp's sums.
template <typename T, int kRows>
__device__ inline void store_nhwc(const FewChannels &f, const FewTile &tile, int outputs, const T *bias,
                                  const float (&sum)[kRows][4][2][4], T *y) {
  constexpr int kRun = 16 / sizeof(T), kRuns = kFewOutputs / 8 / kRun;
  const int t = lane_index() % 4, first_row = tile.row + warp_index() * kRows;
  const auto row_step = static_cast<int>(f.y.row), column_step = static_cast<int>(f.y.column);
  y += tile.image * f.y.image;
#pragma unroll
  for (int run = 0; run < kRuns; ++run) {
    const int tiles = run * kRun / 2, output = outputs + output_of_row<T, true>(tiles, lane_index() / 4);
    float add[kRun];
#pragma unroll
    for (int k = 0; k < kRun; ++k) add[k] = bias && output + k < f.out_channels ? widen(bias[output + k]) : 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int pixel = 0; pixel < 4; ++pixel) {
        const int row = first_row + i, column = tile.column + pixel_of_column<true>(pixel / 2, 2 * t + pixel % 2);
        if (row >= f.out_h || column >= f.out_w || output >= f.out_channels) continue;
        Widened<T> v;
#pragma unroll
        for (int k = 0; k < kRun; ++k) v[k] = sum[i][tiles + k / 2][pixel / 2][k % 2 * 2 + pixel % 2] + add[k];
        T *to = y + (row * row_step + column * column_step + output);
        if (f.vectors) {
          store(to, narrow(v));
        } else {
#pragma unroll
          for (int k = 0; k < kRun; ++k)
            if (output + k < f.out_channels) to[k] = narrow<T>(v[k]);
        }
      }
  }
}

template <typename T, int kRows>
__device__ inline void store_nchw(const FewChannels &f, const FewTile &tile, int outputs, const T *bias,
                                  const float (&sum)[kRows][4][2][4], T *y) {
  const int first_row = tile.row + warp_index() * kRows;
  const int column = tile.column + pixel_of_column<false>(0, lane_index() % 4 * 2);
  const auto row_step = static_cast<int>(f.y.row), channel_step = static_cast<int>(f.y.channel);
  y += tile.image * f.y.image;
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int output = outputs + output_of_row<T, false>(j, half * 8 + lane_index() / 4);
      if (output >= f.out_channels) continue;
      const float add = bias ? widen(bias[output]) : 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (first_row + i >= f.out_h) continue;
        float v[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) v[k] = sum[i][j][k / 2][half * 2 + k % 2] + add;
        T *to = y + (output * channel_step + (first_row + i) * row_step + column);
        if (f.vectors) {
          if (column >= f.out_w) continue;
          if constexpr (sizeof(T) == 2)
            *reinterpret_cast<uint2 *>(to) = {narrow_word(v[0], v[1], T()), narrow_word(v[2], v[3], T())};
          else *reinterpret_cast<float4 *>(to) = {v[0], v[1], v[2], v[3]};
        } else {
#pragma unroll
          for (int k = 0; k < 4; ++k)
            if (column + k < f.out_w) to[k] = narrow<T>(v[k]);
        }
      }
    }
}

// A product of float32: three of TF32. Tensor cores truncate what they add to: the product of the larger parts is added
// to 0, and ordinary additions gather these. The others are summed apart, and left out where the sum is not finite: an
// infinity has no smaller part.
template <int kRows>
struct ThreeSums {
  float of[kRows][4][2][4], small[kRows][4][2][4];

  __device__ void add(int i, int j, int h, const uint4 (&a)[2], const uint2 (&b)[2]) {
    float products[4] = {};
    multiply_add(products, a[0], b[0], float());
    multiply_add(small[i][j][h], a[1], b[0], float()), multiply_add(small[i][j][h], a[0], b[1], float());
#pragma unroll
    for (int e = 0; e < 4; ++e) of[i][j][h][e] += products[e];
  }
  __device__ void end() {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int e = 0; e < 4; ++e) of[i][j][h][e] += isfinite(of[i][j][h][e]) ? small[i][j][h][e] : 0;
  }
};

template <typename T, bool kNhwc, bool kThree>
__global__ void __launch_bounds__(kFewThreads, Conv2dParams::kFewBlocks)
    conv2d_few_kernel(const __grid_constant__ FewChannels f, const T *x, const T *weight, const T *bias, T *y,
                      int steps) {
#if __CUDA_ARCH__ >= 800
  // the weight, two words for each unit, the window, and zeros
  extern __shared__ __align__(16) char dynamic[];
  const int lane = lane_index(), t = lane % 4, g = lane / 4, outputs = blockIdx.y * kFewOutputs;
  constexpr int kRows = kThree ? Conv2dParams::kFewRows / 2 : Conv2dParams::kFewRows;
  const int first_row = warp_index() * kRows, pixel_bytes = f.quads * static_cast<int>(sizeof(Quad<T>));
  auto *weights = reinterpret_cast<uint32_t *>(dynamic);
  auto *units = reinterpret_cast<uint2 *>(weights + steps * 4 * kFewOutputs * 2);
  char *window = reinterpret_cast<char *>(units + steps * 4);
  const uint32_t window_at = shared_address(window), zeros_at = window_at + f.window;

  // A unit is read at an address (1, offset): address x 1 + offset. Units past the last one have zeros, not an element
  // of x times a zero, which is NaN for an infinity: (0, address).
  for (int i = threadIdx.x; i < steps * 4; i += blockDim.x) {
    const int of_pixel = pixel_bytes / 8, element = i / of_pixel;
    const bool there = element < f.kernel;
    units[i] = there ? uint2{1, static_cast<uint32_t>(quad_offset(f, element, 0, sizeof(Quad<T>)) + i % of_pixel * 8)}
                     : uint2{0, zeros_at};
  }
  if (threadIdx.x < 2) reinterpret_cast<uint2 *>(window + f.window)[threadIdx.x] = {};
  stage_weight<T, kNhwc, kThree>(f, weight, outputs, steps, weights);

  const uint32_t weights_at = shared_address(weights) + lane * 16, units_at = shared_address(units) + t * 8;
  const uint32_t row_bytes = f.stride_h * f.pitch * pixel_bytes;
  uint32_t pixel_at[2];  // of the warp's first row, in groups of 8
#pragma unroll
  for (int h = 0; h < 2; ++h)
    pixel_at[h] = window_at + first_row * row_bytes + pixel_of_column<kNhwc>(h, g) * f.stride_w * pixel_bytes;

  for (int index = blockIdx.x; index < f.tiles; index += gridDim.x) {
    const FewTile tile(f, index);
    stage_window<kThree>(f, tile, x, window);
    __syncthreads();
    // Sums are of rows of pixels, 16 output channels, and groups of 8 pixels.
    std::conditional_t<kThree, ThreeSums<kRows>, float[kRows][4][2][4]> sum = {};
    if (tile.row + first_row < f.out_h)
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        const uint2 unit = load_8(units_at + step * 32);
        uint4 w[4][kThree ? 2 : 1];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          w[j][0] = load_16(weights_at + (step * 4 + j) * 512);
          if constexpr (kThree) split(w[j][0], w[j][0], w[j][1]);
        }
        uint32_t at[2] = {pixel_at[0] * unit.x + unit.y, pixel_at[1] * unit.x + unit.y};
        const uint32_t next_row = row_bytes * unit.x;
#pragma unroll
        for (int i = 0; i < kRows; ++i, at[0] += next_row, at[1] += next_row) {
          uint2 pixels[2][kThree ? 2 : 1];
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            pixels[h][0] = load_8(at[h]);
            if constexpr (kThree) split(pixels[h][0], pixels[h][0], pixels[h][1]);
          }
#pragma unroll
          for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              if constexpr (kThree) sum.add(i, j, h, w[j], pixels[h]);
              else multiply_add(sum[i][j][h], w[j][0], pixels[h][0], T());
            }
        }
      }
    __syncthreads();  // the window is free
    auto store = [&](const auto &sums) {
      if constexpr (kNhwc) store_nhwc(f, tile, outputs, bias, sums, y);
      else store_nchw(f, tile, outputs, bias, sums, y);
    };
    if constexpr (kThree) sum.end(), store(sum.of);
    else store(sum);
  }
#endif
}

// ------------------------------------------------------------------------------------------------------------- dweight

// Writes the tile of dy to shared memory: 64 output channels, zeros outside of the image.
template <typename T, bool kNhwc>
__device__ inline void stage_dy(const FewChannels &f, const FewTile &tile, const T *dy, int outputs, char *to) {
  constexpr int kVector = 16 / sizeof(T);
  const int pixels = f.rows * kFewColumns;
  dy += tile.image * f.y.image;
  const auto row_step = static_cast<int>(f.y.row), column_step = static_cast<int>(f.y.column);
  const auto channel_step = static_cast<int>(f.y.channel);
  auto each = [&](auto width, auto copy) {
    constexpr int kWidth = width.value, kAcross = (kNhwc ? kFewOutputs : kFewColumns) / kWidth;
    for (int i = threadIdx.x; i < pixels * kFewOutputs / kWidth; i += blockDim.x) {
      const int part = i % kAcross * kWidth, line = i / kAcross;
      const int pixel = kNhwc ? line : line % f.rows * kFewColumns + part, output = kNhwc ? part : line / f.rows;
      const int row = tile.row + pixel / kFewColumns, column = tile.column + pixel % kFewColumns;
      const bool there = row < f.out_h && column < f.out_w && outputs + output < f.out_channels;
      const int from = row * row_step + column * column_step + (outputs + output) * channel_step;
      copy(dy + (there ? from : 0), dy_offset<T, kNhwc>(pixels, pixel, output), there);
    }
  };
  if (f.vectors) {
    const uint32_t at = shared_address(to);
    each(std::integral_constant<int, kVector>(),
         [&](const T *from, int offset, bool there) { copy_async(at + offset, from, there); });
    commit_copies();
  } else {
    each(std::integral_constant<int, 1>(), [&](const T *from, int offset, bool there) {
      *reinterpret_cast<T *>(to + offset) = there ? *from : narrow<T>(0);
    });
  }
}

// Rows of a product from dy's tile, at a lane's part of them: 16 output channels for the pixels of a step. 16 bits: 8 x
// 8 matrices, the first and last 8 output channels, then the same of the last 8 pixels.
template <bool kNhwc>
__device__ inline uint4 load_dy(uint32_t at) {
  uint4 a = {};
#if __CUDA_ARCH__ >= 800
  if constexpr (kNhwc)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a.x), "=r"(a.y), "=r"(a.z), "=r"(a.w)
                 : "r"(at)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a.x), "=r"(a.y), "=r"(a.z), "=r"(a.w)
                 : "r"(at)
                 : "memory");
#endif
  return a;
}
// float32: at + pixels, 4 pixels on; at + outputs, 8 output channels on.
__device__ inline uint4 load_dy(uint32_t at, uint32_t pixels, uint32_t outputs) {
  return {product_bits(load_float(at)), product_bits(load_float(at + outputs)), product_bits(load_float(at + pixels)),
          product_bits(load_float(at + pixels + outputs))};
}

// Keeps a value in its register: the compiler would compute it again where it is used.
__device__ inline void keep(uint32_t &value) { asm volatile("" : "+r"(value)); }

// kChannels: of a quad that are multiplied, 3 or 4. to: (gridDim.x, out_channels, kernel, quads, 4).
template <typename T, bool kNhwc, int kChannels>
__global__ void __launch_bounds__(kFewThreads, kChannels == 3 ? Conv2dParams::kFewBlocks : 2)
    conv2d_few_dweight_kernel(const __grid_constant__ FewChannels f, const T *dy, const T *x, float *to) {
#if __CUDA_ARCH__ >= 800
  constexpr int kGroups = 2, kSteps = sizeof(T) / 2;  // groups of a warp; steps of a row of pixels
  extern __shared__ __align__(16) char dynamic[];     // the window, zeros, and dy's tile
  const int lane = lane_index(), t = lane % 4, g = lane / 4, outputs = blockIdx.y * kFewOutputs;
  const int quad_bytes = sizeof(Quad<T>), pixel_bytes = f.quads * quad_bytes;
  const int all_quads = f.kernel * f.quads, first_quad = blockIdx.z * Conv2dParams::kFewQuads;
  const int groups = (min(all_quads - first_quad, Conv2dParams::kFewQuads) + 7) / 8;
  // warps along the groups; the others share the rows of pixels
  const int warps = blockDim.x / 32, across = groups <= 2 ? 1 : groups <= 4 ? 2 : 4, shares = warps / across;
  const int first_group = warp_index() % across, share = warp_index() / across;
  char *window = dynamic, *dy_tile = dynamic + f.window + 16;
  const uint32_t window_at = shared_address(window), zeros_at = window_at + f.window, dy_at = shared_address(dy_tile);
  if (threadIdx.x < 2) reinterpret_cast<uint2 *>(window + f.window)[threadIdx.x] = {};

  uint32_t quad_at[kGroups];
  bool has_group[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const int group = first_group + i * across, quad = first_quad + group * 8 + g;
    has_group[i] = group < groups;
    quad_at[i] = window_at;
    if (quad < all_quads) quad_at[i] += quad_offset(f, quad / f.quads, quad % f.quads, quad_bytes);
  }

  // the lane's part of dy's tile: of 16 bits, of the rows of a matrix
  const int pixels = f.rows * kFewColumns;
  uint32_t dy_lane[4], row_bytes = f.stride_h * f.pitch * pixel_bytes;
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    const int halves = lane / 8 % 2 * 8, last = lane / 16 * 8, row = lane % 8;
    const int pixel = kSteps == 2 ? t : last + (kNhwc ? row : 0);
    const int output = kSteps == 2 ? g : halves + (kNhwc ? 0 : row);
    dy_lane[m] = dy_at + dy_offset<T, kNhwc>(pixels, pixel, m * 16 + output);
    keep(dy_lane[m]);
  }
  const uint32_t dy_row_bytes = dy_offset<T, kNhwc>(pixels, kFewColumns, 0);
  uint32_t dy_pixels = dy_offset<T, kNhwc>(pixels, 4, 0), dy_outputs = dy_offset<T, kNhwc>(pixels, 0, 8);
  keep(row_bytes), keep(dy_outputs);

  float sum[kGroups][kChannels][4][4] = {};
  for (int index = blockIdx.x; index < f.tiles; index += gridDim.x) {
    const FewTile tile(f, index);
    stage_dy<T, kNhwc>(f, tile, dy, outputs, dy_tile);
    stage_window(f, tile, x, window);
    wait_copies<0>();
    __syncthreads();
    // The columns of the lane's pixels in the window: an address x 1 + offset. Those right of the result have zeros,
    // not an element of x times dy's zero, which is NaN for an infinity: an address x 0 + that of the zeros.
    uint32_t times[4], plus[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int column = kSteps == 1 ? 2 * t + k / 2 * 8 + k % 2 : t + 4 * k;
      times[k] = tile.column + column < f.out_w;
      plus[k] = times[k] ? column * f.stride_w * pixel_bytes : zeros_at;
      keep(times[k]), keep(plus[k]);
    }
    const int rows = min(f.rows, f.out_h - tile.row);
    uint32_t x_row = share * row_bytes, dy_row = share * dy_row_bytes;
#pragma unroll 1
    for (int row = share; row < rows; row += shares, x_row += shares * row_bytes, dy_row += shares * dy_row_bytes) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint4 a[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          if constexpr (kSteps == 1) a[m] = load_dy<kNhwc>(dy_lane[m] + dy_row);
          else a[m] = load_dy(dy_lane[0] + dy_row + 2 * step * dy_pixels + 2 * m * dy_outputs, dy_pixels, dy_outputs);
        }
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
          if (!has_group[i]) continue;
          const uint32_t at = quad_at[i] + x_row;
          uint2 b[4];  // of each channel
          if constexpr (kSteps == 1) {
            uint2 p[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) p[k] = load_8(at * times[k] + plus[k]);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
              const uint2 even = p[2 * k], odd = p[2 * k + 1];
              auto word = [&](int c) -> uint32_t & { return k ? b[c].y : b[c].x; };
              word(0) = __byte_perm(even.x, odd.x, 0x5410), word(1) = __byte_perm(even.x, odd.x, 0x7632);
              word(2) = __byte_perm(even.y, odd.y, 0x5410), word(3) = __byte_perm(even.y, odd.y, 0x7632);
            }
          } else {
            const uint4 p = load_16(at * times[2 * step] + plus[2 * step]);
            const uint4 q = load_16(at * times[2 * step + 1] + plus[2 * step + 1]);
            b[0] = {p.x, q.x}, b[1] = {p.y, q.y}, b[2] = {p.z, q.z}, b[3] = {p.w, q.w};
          }
#pragma unroll
          for (int c = 0; c < kChannels; ++c)
#pragma unroll
            for (int m = 0; m < 4; ++m) multiply_add(sum[i][c][m], a[m], b[c], T());
        }
      }
    }
    __syncthreads();  // the window and dy's tile are free
  }
  launch_next();

  // Adds the sums of the warps that share the groups, in their order, in the place of the window and dy's tile.
  float4 *exchanged = reinterpret_cast<float4 *>(dynamic) + first_group * kGroups * kChannels * 4 * 32 + lane;
  for (int from = 1; from < shares; ++from) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i)
#pragma unroll
      for (int c = 0; c < kChannels; ++c)
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const float *v = sum[i][c][m];
          if (share == from) exchanged[((i * kChannels + c) * 4 + m) * 32] = {v[0], v[1], v[2], v[3]};
        }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kGroups; ++i)
#pragma unroll
      for (int c = 0; c < kChannels; ++c)
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          float *v = sum[i][c][m];
          if (share != 0) continue;
          const float4 other = exchanged[((i * kChannels + c) * 4 + m) * 32];
          v[0] += other.x, v[1] += other.y, v[2] += other.z, v[3] += other.w;
        }
    __syncthreads();
  }
  if (share != 0) return;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const int quad = first_quad + (first_group + i * across) * 8 + 2 * t;
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int k = 0; k < 4; ++k) {  // rows 8 apart, neighbouring columns
        const int output = outputs + m * 16 + k / 2 * 8 + g;
        if (quad + k % 2 >= all_quads || output >= f.out_channels) continue;
        float v[4] = {};
#pragma unroll
        for (int c = 0; c < kChannels; ++c) v[c] = sum[i][c][m][k];
        const int64_t at = (int64_t{blockIdx.x} * f.out_channels + output) * all_quads + quad + k % 2;
        reinterpret_cast<float4 *>(to)[at] = {v[0], v[1], v[2], v[3]};
      }
  }
#endif
}

}  // namespace AOT_ISA
}  // namespace aot
