// dx of conv2d in NCHW and TF32 with a stride of two columns, on sm_90: both phases of the columns by one block, so
// that it has all elements of a row of dx, which it writes in vectors.
//
// A tile is of channels, wgmma's first operand, and of the pixels that dx has for one element of dy in each direction.
// A kernel of an odd width has an element more for one phase of the columns than for the other, and these meet the same
// elements of dy but one: `both` steps of the sum multiply a box of dy by two boxes of the weight, and the others by
// one.
#pragma once
#include "conv2d_wgmma.cuh"

namespace aot {
inline namespace AOT_ISA {

// A block has a warpgroup for each 64 channels, and a warp that loads.
template <int kChannelBoxes_, int kPixelBoxes_, int kStages_, int kBlocks_>
struct PlanesTile {
  static constexpr int kChannelBoxes = kChannelBoxes_, kPixelBoxes = kPixelBoxes_, kStages = kStages_;
  static constexpr int kBlocks = kBlocks_, kPixels = kPixelBoxes * kBox;
  // Sums of 192 pixels need more registers than a thread starts with; a whole warpgroup gives some of its own.
  static constexpr bool kMoreRegisters = kPixelBoxes == 3;
  static constexpr int kThreads = kChannelBoxes * 128 + (kMoreRegisters ? 128 : 32);
  static constexpr int kPixelBytes = kPixelBoxes * kBoxBytes, kWeightBytes = kChannelBoxes * kBoxBytes;
  static constexpr int kStageBytes = kPixelBytes + 2 * kWeightBytes;
  static constexpr int kShared = kStages * kStageBytes + 1024;  // boxes are aligned to 1024
};

// A phase of the rows of dx.
struct PlanesPhase {
  CUtensorMap pixels_map;  // dy in im2col mode
  int rows;                // kernel rows
  int last_row;            // of the weight: of the first one of these
  int row;                 // the first one of dx
  int map_h, first_h;      // rows of dx, and the first one of dy that they meet
  int pixels;              // images x rows of dx x half of its columns
  int first_tile, tiles;
};

struct Conv2dPlanesDx {
  static constexpr int kMost = 2;
  PlanesPhase phase[kMost];
  CUtensorMap weight;
  int phases;
  int depth;  // boxes along the sum of a kernel element
  int kernel_w, stride_h;
  int both, offset;           // kernel columns of the phase of columns that has fewer, and the first one's place
  int extra;                  // the other phase's further kernel column's place; -1: none
  int last_long, last_short;  // of the weight: of the place 0
  bool long_first;            // whether the phase that has more is that of columns 0, 2, ...
  int map_w, first_w;
  int channels, channel_tiles;
  Strides to_strides;
  float *to;
};

#ifdef CUTE_ARCH_MMA_SM90A_ENABLED
template <class Tile>
struct PlanesBlock {
  static constexpr int kDepth = kBoxDepth<float>;
  const Conv2dPlanesDx &p;
  uint32_t boxes;
  uint64_t *full, *empty;

  using Sums = float[Tile::kPixels / 2];

  template <class F>
  __device__ void each_tile(F f) const {
    for (int i = 0; i < p.phases; ++i) {
      const int blocks = gridDim.x, skipped = p.phase[i].first_tile % blocks, block = blockIdx.x;
      for (int tile = block < skipped ? block - skipped + blocks : block - skipped; tile < p.phase[i].tiles;
           tile += blocks)
        f(i, tile % p.channel_tiles * Tile::kChannelBoxes * kBox, tile / p.channel_tiles * Tile::kPixels);
    }
  }
  __device__ uint32_t pixel_box(int stage) const { return boxes + stage * Tile::kStageBytes; }
  __device__ uint32_t weight_box(int stage, bool of_short) const {
    return pixel_box(stage) + Tile::kPixelBytes + (of_short ? Tile::kWeightBytes : 0);
  }

  __device__ void load_tiles() const {
    int iteration = 0;
    each_tile([&](int i, int channel, int first) {
      const PlanesPhase &phase = p.phase[i];
      struct {
        int w, h, n;
      } at[Tile::kPixelBoxes];
#pragma unroll
      for (int b = 0; b < Tile::kPixelBoxes; ++b) {
        const int pixel = first + b * kBox, h = pixel / p.map_w;
        at[b] = {pixel % p.map_w + p.first_w, h % phase.map_h + phase.first_h, h / phase.map_h};
      }
      auto step = [&](int row, int place, int d, bool both) {
        const int stage = iteration % Tile::kStages;
        mbarrier_wait(&empty[stage], iteration++ / Tile::kStages % 2 ^ 1);
        mbarrier_expect(&full[stage], Tile::kPixelBytes + (both ? 2 : 1) * Tile::kWeightBytes);
#pragma unroll
        for (int b = 0; b < Tile::kPixelBoxes; ++b)
          tma_load(p.phase[i].pixels_map, pixel_box(stage) + b * kBoxBytes, &full[stage], d * kDepth,
                   PixelAt{at[b].w, at[b].h, at[b].n}, place, row);
        const int from = (phase.last_row - row * p.stride_h) * p.kernel_w;
        auto weights = [&](int tap, bool of_short) {
#pragma unroll
          for (int c = 0; c < Tile::kChannelBoxes; ++c) {
            const uint32_t to = weight_box(stage, of_short) + c * kBoxBytes;
            tma_load(p.weight, to, &full[stage], d * kDepth, tap, channel + c * kBox);
          }
        };
        weights(from + p.last_long - 2 * place, false);
        if (both) weights(from + p.last_short - 2 * place, true);
      };
      for (int row = 0; row < phase.rows; ++row)
        for (int k = 0; k < p.both; ++k)
          for (int d = 0; d < p.depth; ++d) step(row, p.offset + k, d, true);
      if (p.extra < 0) return;
      for (int row = 0; row < phase.rows; ++row)
        for (int d = 0; d < p.depth; ++d) step(row, p.extra, d, false);
    });
  }

  __device__ void compute_tiles(int group) const {
    int iteration = 0;
    each_tile([&](int i, int channel, int first) {
      Sums of_long = {}, of_short = {};
      const int rows = p.phase[i].rows * p.depth;
      mainloop<true>(rows * p.both, group, iteration, of_long, of_short);
      mainloop<false>(p.extra < 0 ? 0 : rows, group, iteration, of_long, of_short);
      wait_for_kernel_before();
      if (p.long_first) store(i, channel + group * kBox, first, of_long, of_short);
      else store(i, channel + group * kBox, first, of_short, of_long);
    });
  }

  template <bool kBoth>
  __device__ void mainloop(int steps, int group, int &iteration, Sums &of_long, Sums &of_short) const {
    constexpr int kStep = 32;  // bytes of eight terms
    using Mma = Wgmma<float, Tile::kPixels, false, false>;
    auto release = [&](int iteration) {
      if (threadIdx.x % 128 == 0) mbarrier_arrive(&empty[iteration % Tile::kStages]);
    };
    for (int step = 0; step < steps; ++step, ++iteration) {
      const int stage = iteration % Tile::kStages;
      mbarrier_wait(&full[stage], iteration / Tile::kStages % 2);
      const uint32_t a = weight_box(stage, false) + group * kBoxBytes, b = pixel_box(stage);
      fence_registers(of_long);
      if (kBoth) fence_registers(of_short);
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint64_t by = box_descriptor(b + k * kStep);
        Mma::run(box_descriptor(a + k * kStep), by, of_long, true);
        if (kBoth) Mma::run(box_descriptor(a + Tile::kWeightBytes + k * kStep), by, of_short, true);
      }
      wgmma_end();
      fence_registers(of_long);
      if (kBoth) fence_registers(of_short);
      wgmma_wait<1>();
      if (step > 0) release(iteration - 1);
    }
    wgmma_wait<0>();
    fence_registers(of_long);
    fence_registers(of_short);
    if (steps > 0) release(iteration - 1);
  }

  // A thread has pairs of neighbouring pixels, eight apart, of two channels. dx has fewer than 2^31 bytes.
  __device__ void store(int i, int channel, int first, const Sums &even, const Sums &odd) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const PlanesPhase &phase = p.phase[i];
    channel += warp * 16 + lane / 4;
    const bool there[] = {channel < p.channels, channel + 8 < p.channels};
    int pixel = first + lane % 4 * 2, w = pixel % p.map_w, h = pixel / p.map_w % phase.map_h;
    const int next_row = p.stride_h * static_cast<int>(p.to_strides.row) - 2 * p.map_w;
    const int next_image = static_cast<int>(p.to_strides.image) - phase.map_h * (next_row + 2 * p.map_w);
    const int apart = 8 * static_cast<int>(p.to_strides.channel);
    const int64_t from = p.to_strides.at(pixel / p.map_w / phase.map_h, channel, h * p.stride_h + phase.row, 2 * w);
    int at = static_cast<int>(from);
#pragma unroll
    for (int j = 0; j < Tile::kPixels / 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float *e = &even[j * 4 + 2 * half], *o = &odd[j * 4 + 2 * half];
        if (pixel < phase.pixels && there[half])
          *reinterpret_cast<float4 *>(p.to + at + half * apart) = {e[0], o[0], e[1], o[1]};
      }
      pixel += 8, w += 8;
      const bool wraps = w >= p.map_w;
      w -= wraps ? p.map_w : 0, h += wraps ? 1 : 0;
      const bool last = h == phase.map_h;
      h = last ? 0 : h, at += 16 + (wraps ? next_row : 0) + (last ? next_image : 0);
    }
  }
};
#endif

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    conv2d_planes_dx_kernel(const __grid_constant__ Conv2dPlanesDx p) {
#ifdef CUTE_ARCH_MMA_SM90A_ENABLED
  extern __shared__ uint8_t dynamic[];
  __shared__ uint64_t full[Tile::kStages], empty[Tile::kStages];
  const PlanesBlock<Tile> block = {p, (shared_address(dynamic) + 1023) & ~1023u, full, empty};
  init_stages(full, empty, Tile::kChannelBoxes);
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (group < Tile::kChannelBoxes) {
    if (Tile::kMoreRegisters) take_registers<232>();
    block.compute_tiles(group);
  } else {
    if (Tile::kMoreRegisters) give_registers<40>();
    if (threadIdx.x == Tile::kChannelBoxes * 128) {
      wait_for_kernel_before();
      launch_next();  // when the kernels before this one have ended: the next may be `independent`
      block.load_tiles();
    }
  }
#else
  __trap();  // compiled for other architectures, never launched there
#endif
}

// Whether the kernel takes dx. *p: its parameters, without tensor maps and tiles.
inline bool planes_params(const Conv2dGemm &c, Conv2dPlanesDx *p) {
  if (c.pass != Conv2dGemm::dx || c.dtype != DType::float32 || c.three || c.stride_w != 2 ||
      c.stride_h > Conv2dPlanesDx::kMost || c.dilation_h != 1 || c.dilation_w != 1 || c.to_strides.column != 1 ||
      c.width % 4 != 0 || c.width < 16)
    return false;
  *p = {};
  const DxTaps first(0, c.padding_w, 2, 1, c.kernel_w), second(1, c.padding_w, 2, 1, c.kernel_w);
  p->long_first = first.count > second.count;
  const DxTaps &more = p->long_first ? first : second, &fewer = p->long_first ? second : first;
  p->both = fewer.count, p->offset = fewer.count ? fewer.first - more.first : 0;
  if (p->offset < 0 || p->offset + fewer.count > more.count || more.count - fewer.count > 1) return false;
  p->extra = more.count == fewer.count ? -1 : p->offset || !fewer.count ? 0 : fewer.count;
  // a kernel element is 2 columns before that of the place before
  p->last_long = more.last, p->last_short = fewer.last + 2 * p->offset;
  p->first_w = more.first, p->map_w = c.width / 2;
  p->kernel_w = c.kernel_w, p->stride_h = c.stride_h, p->channels = c.to_channels;
  p->to_strides = c.to_strides, p->to = static_cast<float *>(c.to);
  p->depth = static_cast<int>(ceil_div(c.out_channels, kBoxDepth<float>));
  for (int i = 0; i < std::min(c.stride_h, c.height); ++i) {
    const DxTaps taps(i, c.padding_h, c.stride_h, 1, c.kernel_h);
    PlanesPhase &phase = p->phase[p->phases++];
    phase.row = i, phase.rows = taps.count, phase.first_h = taps.first, phase.last_row = taps.last;
    phase.map_h = static_cast<int>(ceil_div(c.height - i, c.stride_h));
    phase.pixels = c.batch * phase.map_h * p->map_w;
  }
  if (p->phases == 2 && p->phase[1].rows > p->phase[0].rows) std::swap(p->phase[0], p->phase[1]);
  return true;
}

template <class Tile>
int count_tiles(const PlanesPhase &phase, int channels) {
  return static_cast<int>(ceil_div(phase.pixels, Tile::kPixels) * ceil_div(channels, Tile::kChannelBoxes * kBox));
}

template <class Tile>
Status run_planes_dx(LaunchSequence &launch, const Conv2dGemm &c, Conv2dPlanesDx p) {
  int tiles = 0;
  const auto outputs = static_cast<uint64_t>(c.out_channels);
  bool mapped = map_tiled<3>(&p.weight, c.dtype, c.b, {outputs, uint64_t(c.kernel()), uint64_t(c.to_channels)},
                             {c.b_tap, c.b_row}, {kBoxDepth<float>, 1, kBox});
  p.channel_tiles = static_cast<int>(ceil_div(p.channels, Tile::kChannelBoxes * kBox));
  for (int i = 0; i < p.phases; ++i) {
    PlanesPhase &phase = p.phase[i];
    phase.first_tile = tiles, phase.tiles = count_tiles<Tile>(phase, p.channels), tiles += phase.tiles;
    Conv2dWgmma of = {};
    of.map_h = phase.map_h, of.map_w = p.map_w, of.first_h = phase.first_h, of.first_w = p.first_w;
    of.stride_h = of.stride_w = 1;
    mapped = mapped && map_im2col(&phase.pixels_map, c.dtype, c.a, c.batch, c.out_h, c.out_w, c.out_channels, of);
  }
  if (!mapped) return fail(kDeviceError, "%s: the driver refuses a tensor map", launch.op());
  const int blocks = std::min(tiles, kMultiprocessors * Tile::kBlocks);
  return launch(conv2d_planes_dx_kernel<Tile>, blocks, Tile::kThreads, Tile::kShared, 1, p);
}

}  // namespace AOT_ISA
}  // namespace aot
