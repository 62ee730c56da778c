// y and dx of conv2d on sm_90 by kernels of three rows without a stride, of 16-bit dtypes: an implicit GEMM by wgmma
// that loads pixels once for the three rows of a kernel.
//
// A tile is of 64 channels, wgmma's first operand, and of `rows` x `images` x `columns` pixels, in this order. A
// multiple of eight columns is a whole number of wgmma's groups of eight rows, which are 1024 bytes apart: the pixels
// that the next row of the kernel meets start as many groups later, in the same box, which has two rows of pixels more
// than the tile. im2col (conv2d_wgmma.cuh) loads pixels anew for each element of the kernel, and shared memory, which
// wgmma reads at 128 bytes a clock while TMA writes to it, is what limits small tiles.
#pragma once
#include "conv2d_wgmma.cuh"

#include <cute/arch/mma_sm90_gmma_ext.hpp>

#include <climits>

namespace aot {
inline namespace AOT_ISA {

// kPixels: of a tile. kBoxPixels: of a stage's box, at most. kStep, kTime: nanoseconds on an H200 of 192 terms, and of
// the rest of a tile (docs/lab_notes.md).
template <int kPixels_, int kBoxPixels_, int kStages_, int kStep_, int kTime_>
struct RowsTile {
  static constexpr int kPixels = kPixels_, kBoxPixels = kBoxPixels_, kStages = kStages_;
  static constexpr int kStep = kStep_, kTime = kTime_;
  static constexpr int kChannels = 64, kRow = 128, kTaps = 3;  // a row of bytes has 64 channels
  static constexpr int kThreads = 128 + 32;                    // a warpgroup that multiplies, and a warp that loads
  static constexpr int kTapBytes = kChannels * kRow, kWeightBytes = kTaps * kTapBytes;
  static constexpr int kStageBytes = kWeightBytes + kBoxPixels * kRow;
  static constexpr int kOut = kStages * kStageBytes;
  static constexpr int kShared = kOut + kPixels * kRow + 1024;  // boxes are aligned to 1024
};

struct Conv2dRows {
  CUtensorMap pixels, weight;  // (rows, images, columns, channels); (kernel rows, outputs, kernel columns, channels)
  CUtensorMap result;          // as `pixels`
  int depth;                   // boxes along the channels of the sum
  int kernel_w;
  int rows, images, columns;  // of a tile
  int channel_tiles, column_tiles, image_tiles, tiles;
  int first_h, first_w, step_w;  // of the pixels that the kernel's first row and column meet
  int from_tap, to_tap;          // bytes from a box to the first tap's pixels, and from there to the next's
  int bytes;                     // of a stage
  int result_channels;
  bool independent;  // reads nothing that the kernel launched before it writes
  const void *bias;
};

#ifdef CUTE_ARCH_MMA_SM90A_ENABLED

// More numbers of columns, of operands of 16 bits.
#define AOT_WGMMA_COLUMNS(n)                                                                                       \
  template <typename T, bool kAcrossA, bool kAcrossB>                                                              \
  struct Wgmma<T, n, kAcrossA, kAcrossB> {                                                                         \
    using Major = cute::SM90::GMMA::Major;                                                                         \
    static constexpr auto major_a = kAcrossA ? Major::MN : Major::K, major_b = kAcrossB ? Major::MN : Major::K;    \
    static __device__ void run(uint64_t a, uint64_t b, float (&sum)[n / 2], bool add) {                            \
      run(a, b, sum, add, std::make_index_sequence<n / 2>());                                                      \
    }                                                                                                              \
                                                                                                                   \
   private:                                                                                                        \
    template <size_t... i>                                                                                         \
    static __device__ void run(uint64_t a, uint64_t b, float (&sum)[n / 2], bool add, std::index_sequence<i...>) { \
      using namespace cute::SM90::GMMA;                                                                            \
      const ScaleOut scale = add ? ScaleOut::One : ScaleOut::Zero;                                                 \
      if constexpr (std::is_same_v<T, __half>)                                                                     \
        MMA_64x##n##x16_F32F16F16_SS<major_a, major_b>::fma(a, b, sum[i]..., scale);                               \
      else MMA_64x##n##x16_F32BF16BF16_SS<major_a, major_b>::fma(a, b, sum[i]..., scale);                          \
    }                                                                                                              \
  };
AOT_WGMMA_COLUMNS(56)
AOT_WGMMA_COLUMNS(112)
AOT_WGMMA_COLUMNS(224)
#undef AOT_WGMMA_COLUMNS

// The descriptor of an operand that starts `bytes` later. A sum of 32 bits takes one instruction, a descriptor five,
// for which small products would wait.
__device__ inline uint64_t wgmma_later(uint64_t descriptor, int bytes) {
  return descriptor >> 32 << 32 | (static_cast<uint32_t>(descriptor) + static_cast<uint32_t>(bytes / 16));
}

// Starts to load a tensor map itself, for which a kernel's first load waits.
__device__ inline void prefetch_map(const CUtensorMap &map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Stores a box of (rows, images, columns, channels).
__device__ inline void tma_store(const CUtensorMap &map, uint32_t from, int channel, int column, int image, int row) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(from), "r"(channel), "r"(column), "r"(image), "r"(row)
               : "memory");
}

template <typename T, bool kDx, class Tile>
struct RowsBlock {
  const Conv2dRows &p;
  uint32_t boxes;
  uint64_t *full, *empty;

  using Sums = float[1][Tile::kPixels / 2];

  struct WorkTile {
    int channel, column, image, row;
  };
  template <class F>
  __device__ void each_tile(F f) const {
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
      const int channel = tile % p.channel_tiles, rest = tile / p.channel_tiles, more = rest / p.column_tiles;
      f(WorkTile{channel * Tile::kChannels, rest % p.column_tiles * p.columns, more % p.image_tiles * p.images,
                 more / p.image_tiles * p.rows});
    }
  }
  __device__ uint32_t weight_box(int stage) const { return boxes + stage * Tile::kStageBytes; }
  __device__ uint32_t pixel_box(int stage) const { return weight_box(stage) + Tile::kWeightBytes; }

  __device__ void load_tiles() const {
    int iteration = 0;
    each_tile([&](const WorkTile &at) {
      int d = 0, k = 0;
      for (int step = 0; step < p.depth * p.kernel_w; ++step) {
        const int stage = iteration % Tile::kStages;
        mbarrier_wait(&empty[stage], iteration++ / Tile::kStages % 2 ^ 1);
        mbarrier_expect(&full[stage], p.bytes);
        tma_load(p.pixels, pixel_box(stage), &full[stage], d, at.column + p.first_w + k * p.step_w, at.image,
                 at.row + p.first_h);
        if (kDx) tma_load(p.weight, weight_box(stage), &full[stage], at.channel, k, d, 0);
        else tma_load(p.weight, weight_box(stage), &full[stage], d, k, at.channel, 0);
        if (++k == p.kernel_w) k = 0, d += Tile::kChannels;
      }
    });
  }

  __device__ void compute_tiles() const {
    int iteration = 0;
    each_tile([&](const WorkTile &at) {
      Sums sum = {};
      mainloop(iteration, sum);
      store(at, sum);
    });
    if (threadIdx.x == 0) wait_for_stores();
  }

  __device__ void mainloop(int &iteration, Sums &sum) const {
    using Mma = Wgmma<T, Tile::kPixels, kDx, false>;
    constexpr int kStepA = kDx ? 16 * Tile::kRow : 32, kStepB = 32;
    const int steps = p.depth * p.kernel_w;
    auto release = [&](int iteration) {
      if (threadIdx.x == 0) mbarrier_arrive(&empty[iteration % Tile::kStages]);
    };
    for (int step = 0; step < steps; ++step, ++iteration) {
      const int stage = iteration % Tile::kStages;
      mbarrier_wait(&full[stage], iteration / Tile::kStages % 2);
      const uint64_t a = wgmma_descriptor(weight_box(stage), Tile::kTapBytes);
      const uint64_t b = wgmma_descriptor(pixel_box(stage) + p.from_tap, Tile::kTapBytes);
      fence_registers(sum);
      wgmma_begin();
#pragma unroll
      for (int tap = 0; tap < Tile::kTaps; ++tap)
#pragma unroll
        for (int k = 0; k < 4; ++k)
          Mma::run(wgmma_later(a, tap * Tile::kTapBytes + k * kStepA), wgmma_later(b, tap * p.to_tap + k * kStepB),
                   sum[0], step + tap + k > 0);
      wgmma_end();
      fence_registers(sum);
      wgmma_wait<1>();
      if (step > 0) release(iteration - 1);
    }
    wgmma_wait<0>();
    fence_registers(sum);
    release(iteration - 1);
  }

  // The warpgroup puts its sums in order in shared memory, from which TMA stores them. Columns, images and rows beyond
  // the result's are not written.
  __device__ void store(const WorkTile &at, const Sums &sum) const {
    auto synchronize = [&] { asm volatile("bar.sync 2, 128;" ::: "memory"); };
    const uint32_t to = boxes + Tile::kOut;
    if (threadIdx.x == 0) wait_for_reads<0>();
    wait_for_kernel_before();
    synchronize();
    put(sum[0], to, at.channel);
    show_to_tma();
    synchronize();
    if (threadIdx.x != 0) return;
    tma_store(p.result, to, at.channel, at.column, at.image, at.row);
    end_stores();
  }

  // Sums of channels' pairs of pixels, with channel `col` first: a thread's are of two channels. A pixel's vectors of
  // 16 bytes are swizzled as TMA expects them.
  __device__ void put(const float *sums, uint32_t box, int col) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane % 8, channel = warp * 16 + lane / 4;
    const float bias[] = {bias_of(col + channel), bias_of(col + channel + 8)};
    // A lane's vector of eight channels: of one of four matrices of 8 x 8, which are 16 pixels' of 16 channels.
    const uint32_t vector = box + (lane / 16 * 8 + row) * Tile::kRow + ((warp * 2 + lane / 8 % 2) ^ row) * 16;
    auto words_of = [&](int group, int half) {
      const float *v = &sums[group * 4 + half * 2];
      return narrow_word(v[0] + bias[half], v[1] + bias[half], T());
    };
    constexpr int kGroups = Tile::kPixels / 8, kGroupBytes = 8 * Tile::kRow;
#pragma unroll
    for (int i = 0; i < kGroups; i += 2)
      if (i + 1 == kGroups)
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(vector + i * kGroupBytes),
                     "r"(words_of(i, 0)), "r"(words_of(i, 1))
                     : "memory");
      else
        asm volatile(
            "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(vector + i * kGroupBytes),
            "r"(words_of(i, 0)), "r"(words_of(i, 1)), "r"(words_of(i + 1, 0)), "r"(words_of(i + 1, 1))
            : "memory");
  }
  __device__ float bias_of(int channel) const {
    if (kDx || !p.bias || channel >= p.result_channels) return 0;
    return widen(static_cast<const T *>(p.bias)[channel]);
  }
};
#endif

template <typename T, bool kDx, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) conv2d_rows_kernel(const __grid_constant__ Conv2dRows p) {
#ifdef CUTE_ARCH_MMA_SM90A_ENABLED
  extern __shared__ uint8_t dynamic[];
  __shared__ uint64_t full[Tile::kStages], empty[Tile::kStages];
  const RowsBlock<T, kDx, Tile> block = {p, (shared_address(dynamic) + 1023) & ~1023u, full, empty};
  if (threadIdx.x == 0) {
    for (int i = 0; i < Tile::kStages; ++i) mbarrier_init(&full[i], 1), mbarrier_init(&empty[i], 1);
    mbarrier_init_fence();
  } else if (threadIdx.x == 128) {
    prefetch_map(p.pixels), prefetch_map(p.weight);
  }
  __syncthreads();
  if (__shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0) == 0) {
    block.compute_tiles();
  } else if (threadIdx.x == 128) {
    if (!p.independent) wait_for_kernel_before();
    launch_next();  // when the kernels before this one have ended: the next may be `independent`
    block.load_tiles();
  }
#else
  __trap();  // compiled for other architectures, never launched there
#endif
}

using RowsOf56 = RowsTile<56, 72, 6, 290, 200>;
using RowsOf112 = RowsTile<112, 144, 4, 430, 700>;
using RowsOf224 = RowsTile<224, 288, 3, 800, 1050>;
using RowsOf256 = RowsTile<256, 320, 3, 850, 2300>;  // sizes that are multiples of eight

// A tile's pixels, rows x images x columns, and an estimate of a kernel's time in nanoseconds, as estimate() of
// conv2d_sm90.cu gives it. `tile`: its number.
struct RowsChoice {
  int tile, rows, images, columns;
  int64_t time;
};

// f(Type<Tile>(), its number) for each tile.
template <class F>
void each_rows_tile(F f) {
  f(Type<RowsOf56>(), 0), f(Type<RowsOf112>(), 1), f(Type<RowsOf224>(), 2), f(Type<RowsOf256>(), 3);
}

// Whether the kernels take y or dx: of NHWC, by TMA.
inline bool takes_rows(const Conv2dGemm &c) {
  return c.pass != Conv2dGemm::dweight && itemsize(c.dtype) == 2 && c.kernel_h == 3 && c.stride_h == 1 &&
         c.stride_w == 1 && c.whole_vectors && c.to_strides.channel == 1;
}

// The fastest tile. Of equal ones, the one of the smallest box, and of these, of the most columns.
inline RowsChoice choose_rows(const Conv2dGemm &c) {
  const bool dx = c.pass == Conv2dGemm::dx;
  const int height = dx ? c.height : c.out_h, width = dx ? c.width : c.out_w;
  auto tiles_of = [](int64_t size, int tile) { return (size + tile - 1) / tile; };
  const int64_t channel_tiles = tiles_of(c.to_channels, 64);
  const int64_t steps = tiles_of(dx ? c.out_channels : c.channels, 64) * c.kernel_w;
  RowsChoice best = {};
  best.time = INT64_MAX / 64;  // none
  each_rows_tile([&](auto type, int number) {
    using Tile = typename decltype(type)::type;
    constexpr int kDivisors[] = {1, 2, 4, 7, 8, 14, 16, 28}, kGroups = Tile::kPixels / 8;
    for (int across : kDivisors) {
      if (8 * across >= width + 8) break;
      for (int rows : kDivisors) {
        const int columns = 8 * across, images = kGroups / across / rows;
        const int box = (rows + 2 * c.dilation_h) * images * columns;
        if (images * rows * across != kGroups || box > Tile::kBoxPixels) continue;
        const int64_t tiles =
            tiles_of(width, columns) * tiles_of(height, rows) * tiles_of(c.batch, images) * channel_tiles;
        const int64_t time = ceil_div(tiles, kMultiprocessors) * (steps * Tile::kStep + Tile::kTime) + box / 8;
        if (tiles <= INT_MAX && time <= best.time) best = {number, rows, images, columns, time};
      }
    }
  });
  return best;
}

// Encodes the tensor maps; false if the driver refuses.
inline bool rows_params(const Conv2dGemm &c, const RowsChoice &tile, Conv2dRows *to) {
  Conv2dRows &p = *to = {};
  const bool dx = c.pass == Conv2dGemm::dx;
  const int height = dx ? c.out_h : c.height, width = dx ? c.out_w : c.width;  // of `pixels`
  const int result_h = dx ? c.height : c.out_h, result_w = dx ? c.width : c.out_w;
  const int64_t channels = dx ? c.out_channels : c.channels;
  constexpr uint32_t kChannels = 64, kTaps = 3;
  const int box_rows = tile.rows + 2 * c.dilation_h;
  p.rows = tile.rows, p.images = tile.images, p.columns = tile.columns;
  p.depth = static_cast<int>(ceil_div(channels, kChannels)), p.kernel_w = c.kernel_w;
  p.channel_tiles = static_cast<int>(ceil_div(c.to_channels, kChannels));
  p.column_tiles = static_cast<int>(ceil_div(result_w, tile.columns));
  p.image_tiles = static_cast<int>(ceil_div(c.batch, tile.images));
  p.tiles = static_cast<int>(p.channel_tiles * p.column_tiles * p.image_tiles * ceil_div(result_h, tile.rows));
  // dx: element k of the kernel meets dy's row h + padding - k * dilation
  p.first_h = dx ? c.padding_h - 2 * c.dilation_h : -c.padding_h;
  p.first_w = dx ? c.padding_w : -c.padding_w, p.step_w = dx ? -c.dilation_w : c.dilation_w;
  const int next = c.dilation_h * tile.images * tile.columns * 128;
  p.from_tap = dx ? 2 * next : 0, p.to_tap = dx ? -next : next;
  p.bytes = static_cast<int>(kTaps * kChannels * 128) + box_rows * tile.images * tile.columns * 128;
  p.result_channels = c.to_channels, p.independent = c.independent, p.bias = c.bias;
  const uint32_t columns = tile.columns, images = tile.images, rows = tile.rows;
  return map_tiled<4>(&p.pixels, c.dtype, c.a,
                      {uint64_t(channels), uint64_t(width), uint64_t(c.batch), uint64_t(height)},
                      {channels, channels * width * height, channels * width},
                      {kChannels, columns, images, uint32_t(box_rows)}) &&
         map_tiled<4>(&p.weight, c.dtype, c.b,
                      {uint64_t(c.channels), uint64_t(c.kernel_w), uint64_t(c.out_channels), kTaps},
                      {c.b_tap, c.b_row, c.b_tap * c.kernel_w}, {kChannels, 1, kChannels, kTaps}) &&
         map_tiled<4>(&p.result, c.dtype, c.to,
                      {uint64_t(c.to_channels), uint64_t(result_w), uint64_t(c.batch), uint64_t(result_h)},
                      {c.to_strides.column, c.to_strides.image, c.to_strides.row}, {kChannels, columns, images, rows});
}

template <typename T>
Status run_rows(LaunchSequence &launch, const Conv2dGemm &c, const RowsChoice &choice) {
  Status status = kOk;
  each_rows_tile([&](auto type, int number) {
    using Tile = typename decltype(type)::type;
    if (number != choice.tile) return;
    Conv2dRows p;
    if (!rows_params(c, choice, &p)) {
      status = fail(kDeviceError, "%s: the driver refuses a tensor map", launch.op());
      return;
    }
    auto *kernel = c.pass == Conv2dGemm::dx ? conv2d_rows_kernel<T, true, Tile> : conv2d_rows_kernel<T, false, Tile>;
    launch.overlap();  // it waits for the kernel before, whoever launched that
    status = launch(kernel, std::min(p.tiles, kMultiprocessors), Tile::kThreads, Tile::kShared, 1, p);
  });
  return status;
}

}  // namespace AOT_ISA
}  // namespace aot
