// dweight of conv2d in NCHW and TF32 on sm_90 without copies of x and dy, of kernels of 3 x 3 with strides of 1 and 2,
// a padding of 1, and results of 28 or 56 columns.
//
// wgmma takes TF32 along the sum alone. dy's rows of pixels lie so. x, of which a kernel column meets shifted or every
// other pixels, is the other factor, from registers: a thread loads the pixels that it wants from a box of x's rows.
#pragma once
#include "conv2d_wgmma.cuh"

namespace aot {
inline namespace AOT_ISA {

// A block has a row of the kernel, 64 channels for each of two warpgroups, and kOutputs output channels. A step of the
// sum is kRows rows of kColumns pixels of dy. A box of x has kWindow columns from -kBefore on. Channels are as many
// words apart as makes loads of eight of them, by four neighbours or every other of eight, meet all banks.
template <int kStride_, int kColumns_, int kStages_>
struct PlanesDweightTile {
  static constexpr int kStride = kStride_, kColumns = kColumns_, kStages = kStages_;
  static constexpr int kOutputs = Conv2dParams::kPlanesSide, kGroups = 2, kChannels = kGroups * 64, kTaps = 3;
  static constexpr int kRows = Conv2dParams::kPlanesPixels / kColumns, kQuads = kColumns / 4, kBefore = 4;
  static constexpr int kWindow = kStride == 1 ? (kColumns == 28 ? 36 : 68) : (kColumns == 28 ? 60 : 120);
  // From a channel, and from a row, to the next. Rows apart are boxes of their own.
  static constexpr bool kRowsApart = kStride == 1;
  static constexpr int kPitch = kRowsApart ? kWindow : kRows * kWindow,
                       kRowPitch = kRowsApart ? kChannels * kWindow : kWindow;
  static constexpr int kEights = kRows * kColumns / 8, kBoxes = (kEights + 3) / 4;
  static constexpr int kPixelBytes = kChannels * kRows * kWindow * 4, kOutBytes = kOutputs * kBoxRow;
  static constexpr int kStageBytes = kPixelBytes + kBoxes * kOutBytes;
  static constexpr int kThreads = kGroups * 128 + 128, kShared = kStages * kStageBytes + 1024;
  static_assert(kPixelBytes % 1024 == 0 && kColumns % 4 == 0 && kRows * kColumns == Conv2dParams::kPlanesPixels);
  static_assert(kRowsApart ? kPitch % 8 == 4 : kPitch % 16 == 8, "banks");
};

struct Conv2dPlanesDweight {
  CUtensorMap x;   // (images, channels, rows, columns); of rows two apart their parity, and row / 2
  CUtensorMap dy;  // (images, outputs, pixels)
  int steps, image_steps;
  int channels, outputs, channel_tiles, output_tiles;
  int64_t slice;
  float *to;  // (slices, outputs, kernel, channels)
};

#ifdef CUTE_ARCH_MMA_SM90A_ENABLED
__device__ inline void tma_load(const CUtensorMap &map, uint32_t to, uint64_t *barrier, int c, int row, int k, int j,
                                int i) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(shared_address(barrier)), "r"(c), "r"(row), "r"(k), "r"(j), "r"(i)
      : "memory");
}

template <class Tile>
struct PlanesDweightBlock {
  const Conv2dPlanesDweight &p;
  uint32_t boxes;
  uint64_t *full, *empty;

  using Sums = float[Tile::kTaps][Tile::kOutputs / 2];
  using Factors = uint32_t[Tile::kTaps][4];

  __device__ int kernel_row() const { return blockIdx.x % 3; }
  __device__ int channel() const { return blockIdx.x / 3 % p.channel_tiles * Tile::kChannels; }
  __device__ int output() const { return blockIdx.x / 3 / p.channel_tiles * Tile::kOutputs; }
  __device__ int first_step(int slice) const {
    return static_cast<int>(int64_t{p.steps} * slice / static_cast<int>(gridDim.y));
  }
  __device__ uint32_t x_box(int stage) const { return boxes + stage * Tile::kStageBytes; }
  __device__ uint32_t dy_box(int stage) const { return x_box(stage) + Tile::kPixelBytes; }

  __device__ void load() const {
    const int first = first_step(blockIdx.y), last = first_step(blockIdx.y + 1);
    for (int step = first; step < last; ++step) {
      const int iteration = step - first, stage = iteration % Tile::kStages;
      const int image = step / p.image_steps, row = step % p.image_steps * Tile::kRows;
      const int at = Tile::kStride * row + kernel_row() - 1;
      mbarrier_wait(&empty[stage], iteration / Tile::kStages % 2 ^ 1);
      mbarrier_expect(&full[stage], Tile::kStageBytes);
      if constexpr (Tile::kRowsApart) {
#pragma unroll
        for (int i = 0; i < Tile::kRows; ++i)
          tma_load(p.x, x_box(stage) + i * Tile::kRowPitch * 4, &full[stage], -Tile::kBefore, at + i, channel(), image);
      } else {
        tma_load(p.x, x_box(stage), &full[stage], -Tile::kBefore, at >> 1, at & 1, channel(), image);
      }
#pragma unroll
      for (int b = 0; b < Tile::kBoxes; ++b)
        tma_load(p.dy, dy_box(stage) + b * Tile::kOutBytes, &full[stage], row * Tile::kColumns + b * 32, output(),
                 image);
    }
  }

  // Eight pixels of dy: those of x that they meet in the kernel's column 0, or in columns 1 and 2.
  static __device__ void load_factors(uint32_t from, int eight, bool of_first, Factors &to) {
#pragma unroll
    for (int quad = 0; quad < 2; ++quad)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int q = eight * 2 + quad, row = q / Tile::kQuads;
        const int column = q % Tile::kQuads * 4 * Tile::kStride + Tile::kBefore;
        const uint32_t at = from + (half * 8 * Tile::kPitch + row * Tile::kRowPitch + column) * 4;
        const int i = quad * 2 + half;
        if (of_first) {
          asm volatile("ld.shared.b32 %0, [%1];" : "=r"(to[0][i]) : "r"(at - 4) : "memory");
        } else if constexpr (Tile::kStride == 2) {
          asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(to[1][i]), "=r"(to[2][i]) : "r"(at) : "memory");
        } else {
          asm volatile("ld.shared.b32 %0, [%1];" : "=r"(to[1][i]) : "r"(at) : "memory");
          asm volatile("ld.shared.b32 %0, [%1];" : "=r"(to[2][i]) : "r"(at + 4) : "memory");
        }
      }
  }

  __device__ void compute(int group) const {
    using Mma = Wgmma<float, Tile::kOutputs, false, false>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int steps = first_step(blockIdx.y + 1) - first_step(blockIdx.y);
    const uint32_t of_thread = ((group * 64 + warp * 16 + lane / 4) * Tile::kPitch + lane % 4 * Tile::kStride) * 4;
    Sums sum = {};
    for (int step = 0; step < steps; ++step) {
      const int stage = step % Tile::kStages;
      mbarrier_wait(&full[stage], step / Tile::kStages % 2);
      const uint32_t x = x_box(stage) + of_thread, dy = dy_box(stage);
      Factors factors;
      auto multiply = [&](int eight, int first, int last) {
        fence_registers(sum), fence_registers(factors);
        wgmma_begin();
#pragma unroll
        for (int k = first; k < last; ++k)
          Mma::run(factors[k], box_descriptor(dy + eight / 4 * Tile::kOutBytes + eight % 4 * 32), sum[k], true);
        wgmma_end();
        fence_registers(sum), fence_registers(factors);
      };
      // Factors of column 0 are loaded while products of columns 1 and 2 are computed, and the other way round: both at
      // once would need more registers than wgmma's sums leave.
#pragma unroll
      for (int eight = 0; eight < Tile::kEights; ++eight) {
        if (eight > 0) wgmma_wait<1>();
        fence_registers(factors);
        load_factors(x, eight, true, factors);
        multiply(eight, 0, 1);
        if (eight > 0) wgmma_wait<1>();
        fence_registers(factors);
        load_factors(x, eight, false, factors);
        multiply(eight, 1, 3);
      }
      wgmma_wait<0>();
      fence_registers(sum);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&empty[stage]);
    }
    wait_for_kernel_before();
    store(group, sum);
  }

  __device__ void store(int group, const Sums &sum) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int first = channel() + group * 64 + warp * 16 + lane / 4, outputs = output() + lane % 4 * 2;
#pragma unroll
    for (int k = 0; k < Tile::kTaps; ++k)
#pragma unroll
      for (int j = 0; j < Tile::kOutputs / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int to = outputs + j * 8 + e;
          if (to >= p.outputs) continue;
          float *const at = p.to + blockIdx.y * p.slice + (int64_t{to} * 9 + kernel_row() * 3 + k) * p.channels + first;
          if (first < p.channels) at[0] = sum[k][j * 4 + e];
          if (first + 8 < p.channels) at[8] = sum[k][j * 4 + 2 + e];
        }
  }
};
#endif

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    conv2d_planes_dweight_kernel(const __grid_constant__ Conv2dPlanesDweight p) {
#ifdef CUTE_ARCH_MMA_SM90A_ENABLED
  extern __shared__ uint8_t dynamic[];
  __shared__ uint64_t full[Tile::kStages], empty[Tile::kStages];
  const PlanesDweightBlock<Tile> block = {p, (shared_address(dynamic) + 1023) & ~1023u, full, empty};
  init_stages(full, empty, Tile::kGroups * 4);
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (group < Tile::kGroups) {
    take_registers<240>();
    block.compute(group);
  } else {
    give_registers<24>();
    if (threadIdx.x == Tile::kGroups * 128) {
      launch_next();
      block.load();
    }
  }
#else
  __trap();
#endif
}

// c->a and c->b are dy and x. The launcher sets c->slices, to at most as many.
template <class Tile>
Status run_planes_dweight(LaunchSequence &launch, Conv2dGemm *c) {
  Conv2dPlanesDweight p = {};
  p.image_steps = c->out_h / Tile::kRows, p.steps = c->batch * p.image_steps;
  p.channels = c->channels, p.outputs = c->out_channels, p.to = static_cast<float *>(c->to);
  p.slice = int64_t{c->kernel()} * c->channels * c->out_channels;
  p.channel_tiles = static_cast<int>(ceil_div(c->channels, Tile::kChannels));
  p.output_tiles = static_cast<int>(ceil_div(c->out_channels, Tile::kOutputs));
  const int tiles = Tile::kTaps * p.channel_tiles * p.output_tiles;
  c->slices = std::max(std::min({c->slices, kMultiprocessors / tiles, p.steps}), 1);
  const int64_t plane = int64_t{c->height} * c->width, outs = int64_t{c->out_h} * c->out_w;
  const auto images = static_cast<uint64_t>(c->batch);
  bool mapped = map_tiled<3>(&p.dy, DType::float32, c->a, {uint64_t(outs), uint64_t(c->out_channels), images},
                             {outs, outs * c->out_channels}, {32, Tile::kOutputs, 1});
  if constexpr (Tile::kRowsApart)
    mapped = mapped && map_tiled<4>(&p.x, DType::float32, c->b,
                                    {uint64_t(c->width), uint64_t(c->height), uint64_t(c->channels), images},
                                    {c->width, plane, plane * c->channels}, {Tile::kWindow, 1, Tile::kChannels, 1},
                                    CU_TENSOR_MAP_SWIZZLE_NONE);
  else
    mapped = mapped && map_tiled<5>(&p.x, DType::float32, c->b,
                                    {uint64_t(c->width), uint64_t(c->height / 2), 2, uint64_t(c->channels), images},
                                    {2 * c->width, c->width, plane, plane * c->channels},
                                    {Tile::kWindow, Tile::kRows, 1, Tile::kChannels, 1}, CU_TENSOR_MAP_SWIZZLE_NONE);
  if (!mapped) return fail(kDeviceError, "%s: the driver refuses a tensor map", launch.op());
  return launch(conv2d_planes_dweight_kernel<Tile>, dim3(tiles, c->slices), Tile::kThreads, Tile::kShared, 1, p);
}

}  // namespace AOT_ISA
}  // namespace aot
