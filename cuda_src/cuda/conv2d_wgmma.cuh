// conv2d on sm_90: an implicit matrix product by wgmma, whose operands TMA brings.
//
// Everything lies in boxes of 64 x 64 elements of 16 bits, 64 rows of 128 bytes, swizzled as both units know it. TMA's
// im2col mode walks through 64 pixels of an image as a kernel's element meets them, strides, padding and the step from
// one image to the next included; what lies outside of a tensor comes as zeros.
//            rows of the result, from a           columns, from b                  summed over
//   y        pixels: x (pixels, channels)         outputs: weight (outputs, chan.)  kernel elements, channels
//   dx       pixels: dy (pixels, outputs)         channels: weight (outputs, chan.) kernel elements, outputs
//   dweight  outputs: dy (pixels, outputs)        kernel elements x channels:       pixels
//                                                 x (pixels, channels)
// wgmma reads a box along its rows or across, so nothing is ever transposed.
#pragma once
#include <cuda.h>
#include <cute/arch/mma_sm90_gmma.hpp>

#include <utility>

#include "conv2d_product.h"
#include "launch.cuh"

namespace aot {
inline namespace AOT_ISA {

constexpr int kBox = 64, kBoxBytes = kBox * kBox * 2;

// What a block computes: kRowBoxes x kColBoxes boxes of the result, by kRowGroups x kColGroups warpgroups, from kStages
// of them on their way; so many blocks on a multiprocessor. Clusters whose blocks share what they bring were slower.
template <int kRowBoxes_, int kColBoxes_, int kRowGroups_, int kColGroups_, int kStages_, int kBlocks_>
struct WgmmaTile {
  static constexpr int kRowBoxes = kRowBoxes_, kColBoxes = kColBoxes_, kRowGroups = kRowGroups_;
  static constexpr int kColGroups = kColGroups_, kStages = kStages_, kBlocks = kBlocks_;
  static constexpr int kGroups = kRowGroups * kColGroups, kThreads = kGroups * 128 + 32;  // one warp brings
  static constexpr int kStageBytes = (kRowBoxes + kColBoxes) * kBoxBytes;
  static constexpr int kShared = kStages * kStageBytes + 1024;  // a box begins at a multiple of 1024
};

struct Conv2dWgmma {
  CUtensorMap a, b;
  int rows, cols;  // of the result
  int steps;       // boxes along the sum
  int depth;       // y, dx: boxes of channels or outputs in a kernel element's sum; dweight: boxes of channels
  int channels;
  int kernel, kernel_w;
  int map_h, map_w;  // pixels of the im2col operand
  int stride_h, stride_w, first_h, first_w, dilation_h, dilation_w;
  int slices;
  const void *bias;
  void *to;
};

// ------------------------------------------------------------------------------------------------------- instructions

#ifdef CUTE_ARCH_MMA_SM90A_ENABLED

__device__ inline uint32_t shared32(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ inline void barrier_init(uint64_t *barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared32(barrier)), "r"(count) : "memory");
}
__device__ inline void barrier_expect(uint64_t *barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared32(barrier)), "r"(bytes)
               : "memory");
}
__device__ inline void barrier_arrive(uint64_t *barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared32(barrier)) : "memory");
}
__device__ inline void barrier_wait(uint64_t *barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra again;\n}" ::"r"(shared32(barrier)),
      "r"(parity)
      : "memory");
}

// A box of a tensor map: of a matrix, of a weight, and of images, in im2col mode.
__device__ inline void bring(const CUtensorMap &map, uint32_t to, uint64_t *barrier, int c, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          to),
      "l"(&map), "r"(shared32(barrier)), "r"(c), "r"(row)
      : "memory");
}
__device__ inline void bring(const CUtensorMap &map, uint32_t to, uint64_t *barrier, int c, int k, int row) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(to),
      "l"(&map), "r"(shared32(barrier)), "r"(c), "r"(k), "r"(row)
      : "memory");
}
struct PixelAt {
  int w, h, n;
};
__device__ inline void bring(const CUtensorMap &map, uint32_t to, uint64_t *barrier, int c, PixelAt at, int offset_w,
                             int offset_h) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(to),
      "l"(&map), "r"(shared32(barrier)), "r"(c), "r"(at.w), "r"(at.h), "r"(at.n), "h"(static_cast<uint16_t>(offset_w)),
      "h"(static_cast<uint16_t>(offset_h))
      : "memory");
}

// Boxes as wgmma sees them: 128-byte swizzle, groups of 8 rows 1024 bytes apart, boxes side by side kBoxBytes apart.
__device__ inline uint64_t box_descriptor(uint32_t address) {
  return uint64_t{(address & 0x3ffff) >> 4} | uint64_t{kBoxBytes >> 4} << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}

template <typename T, int kCols, bool kAcrossA, bool kAcrossB>
struct Wgmma {
  static constexpr auto major_a = kAcrossA ? cute::SM90::GMMA::Major::MN : cute::SM90::GMMA::Major::K;
  static constexpr auto major_b = kAcrossB ? cute::SM90::GMMA::Major::MN : cute::SM90::GMMA::Major::K;
#define AOT_WGMMA(n)                                                                                      \
  if constexpr (kCols == n) {                                                                             \
    if constexpr (std::is_same_v<T, __half>)                                                              \
      cute::SM90::GMMA::MMA_64x##n##x16_F32F16F16_SS<major_a, major_b>::fma(a, b, sum[i]..., scale);      \
    else cute::SM90::GMMA::MMA_64x##n##x16_F32BF16BF16_SS<major_a, major_b>::fma(a, b, sum[i]..., scale); \
  }
  template <size_t... i>
  static __device__ void run(uint64_t a, uint64_t b, float (&sum)[kCols / 2], bool add, std::index_sequence<i...>) {
    const auto scale = add ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero;
    AOT_WGMMA(64)
    AOT_WGMMA(128)
    AOT_WGMMA(192)
    AOT_WGMMA(256)
  }
#undef AOT_WGMMA
};

template <int kRows, int kSums>
__device__ inline void hold(float (&sum)[kRows][kSums]) {
#pragma unroll
  for (auto &row : sum)
#pragma unroll
    for (float &v : row) asm volatile("" : "+f"(v)::"memory");
}

#endif

// ------------------------------------------------------------------------------------------------------------- kernel

template <typename T, Conv2dProduct::Pass kPass, class Tile>
struct WgmmaBlock {
  static constexpr bool kDweight = kPass == Conv2dProduct::dweight;
  static constexpr int kRowsOfGroup = Tile::kRowBoxes / Tile::kRowGroups;         // in boxes
  static constexpr int kColsOfGroup = Tile::kColBoxes / Tile::kColGroups * kBox;  // in elements

#ifdef CUTE_ARCH_MMA_SM90A_ENABLED
  const Conv2dWgmma &p;
  uint32_t boxes;
  uint64_t *full, *empty;
  int row_box, col_box, begin, end;

  __device__ uint32_t a_box(int stage, int i) const { return boxes + stage * Tile::kStageBytes + i * kBoxBytes; }
  __device__ uint32_t b_box(int stage, int j) const { return a_box(stage, Tile::kRowBoxes + j); }

  __device__ PixelAt pixel(int i) const {
    const int w = i % p.map_w, h = i / p.map_w % p.map_h;
    return {w * p.stride_w + p.first_w, h * p.stride_h + p.first_h, i / p.map_w / p.map_h};
  }

  __device__ void bring_all() const {
    PixelAt rows[Tile::kRowBoxes];
    struct {
      int c, w, h;
    } cols[Tile::kColBoxes];
    if constexpr (kDweight) {
      for (int j = 0; j < Tile::kColBoxes; ++j) {
        const int box = col_box + j, k = box / p.depth;
        const bool there = k < p.kernel;
        cols[j] = {(there ? box % p.depth : p.depth) * kBox, there ? k % p.kernel_w * p.dilation_w : 0,
                   there ? k / p.kernel_w * p.dilation_h : 0};
      }
    } else {
      for (int i = 0; i < Tile::kRowBoxes; ++i) rows[i] = pixel((row_box + i) * kBox);
    }
    int k = begin / p.depth, d = begin % p.depth;
    for (int step = begin; step < end; ++step) {
      const int turn = step - begin, stage = turn % Tile::kStages;
      barrier_wait(&empty[stage], turn / Tile::kStages % 2 ^ 1);
      barrier_expect(&full[stage], Tile::kStageBytes);
      if constexpr (kDweight) {
        const PixelAt at = pixel(step * kBox);
#pragma unroll
        for (int i = 0; i < Tile::kRowBoxes; ++i)
          bring(p.a, a_box(stage, i), &full[stage], (row_box + i) * kBox, step * kBox);
#pragma unroll
        for (int j = 0; j < Tile::kColBoxes; ++j)
          bring(p.b, b_box(stage, j), &full[stage], cols[j].c, at, cols[j].w, cols[j].h);
      } else {
        const int w = k % p.kernel_w * p.dilation_w, h = k / p.kernel_w * p.dilation_h;
#pragma unroll
        for (int i = 0; i < Tile::kRowBoxes; ++i) bring(p.a, a_box(stage, i), &full[stage], d * kBox, rows[i], w, h);
#pragma unroll
        for (int j = 0; j < Tile::kColBoxes; ++j) {
          const int col = (col_box + j) * kBox;
          if (kPass == Conv2dProduct::y) bring(p.b, b_box(stage, j), &full[stage], d * kBox, k, col);
          else bring(p.b, b_box(stage, j), &full[stage], col, p.kernel - 1 - k, d * kBox);
        }
        if (++d == p.depth) d = 0, ++k;
      }
    }
  }

  using Sums = float[kRowsOfGroup][kColsOfGroup / 2];

  __device__ void multiply(int row_group, int col_group, Sums &sum) const {
    // across a box's rows the next 16 of the sum are 16 rows on, along them 32 bytes
    constexpr int kStepA = kDweight ? 2048 : 32, kStepB = kPass == Conv2dProduct::y ? 32 : 2048;
    using Multiply = Wgmma<T, kColsOfGroup, kDweight, kPass != Conv2dProduct::y>;
    auto release = [&](int turn) {
      if (threadIdx.x % 128 == 0) barrier_arrive(&empty[turn % Tile::kStages]);
    };
    for (int turn = 0; turn < end - begin; ++turn) {
      const int stage = turn % Tile::kStages;
      barrier_wait(&full[stage], turn / Tile::kStages % 2);
      const uint32_t b = b_box(stage, col_group * (kColsOfGroup / kBox));
      hold(sum);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int i = 0; i < kRowsOfGroup; ++i)
          Multiply::run(box_descriptor(a_box(stage, row_group * kRowsOfGroup + i) + k * kStepA),
                        box_descriptor(b + k * kStepB), sum[i], turn + k > 0,
                        std::make_index_sequence<kColsOfGroup / 2>());
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      hold(sum);
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (turn > 0) release(turn - 1);
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    hold(sum);
    if (end > begin) release(end - begin - 1);
  }

  // A thread has pairs of neighbours, in rows 8 apart; the pairs of a row that are 8 columns apart are stored together.
  __device__ void store(int row_group, int col_group, Sums &sum) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, pair = lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kRowsOfGroup; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = (row_box + row_group * kRowsOfGroup + i) * kBox + warp * 16 + half * 8 + lane / 4;
#pragma unroll
        for (int j = 0; j < kColsOfGroup / 8; j += 2) {
          const float *v = &sum[i][j * 4 + half * 2];
          const int col = col_box * kBox + col_group * kColsOfGroup + j * 8;
          if (p.slices) {
            store_sums(row, col + pair, {v[0], v[1]});
            store_sums(row, col + 8 + pair, {v[4], v[5]});
          } else {
            store_pairs(row, col, lane, {v[0], v[1]}, {v[4], v[5]});
          }
        }
      }
  }

  // Where an element of the result is; below 0 where it is none.
  __device__ int64_t place(int row, int col) const {
    if (row >= p.rows) return -1;
    if constexpr (kDweight) {
      const int box = col / kBox, k = box / p.depth, c = box % p.depth * kBox + col % kBox;
      return k < p.kernel && c < p.channels ? int64_t{row} * p.cols + k * p.channels + c : -1;
    }
    return col < p.cols ? int64_t{row} * p.cols + col : -1;
  }

  __device__ void store_sums(int row, int col, float2 v) const {
    const int64_t at = place(row, col);
    if (at >= 0)
      *reinterpret_cast<float2 *>(static_cast<float *>(p.to) + int64_t{blockIdx.z} * p.rows * p.cols + at) = v;
  }

  // Two lanes exchange a pair each: each has four neighbours then, and the four lanes of a row a whole sector.
  __device__ void store_pairs(int row, int col, int lane, float2 v0, float2 v1) const {
    const T *bias = static_cast<const T *>(p.bias);
    const int pair = lane % 4 * 2;
    if (bias) {
      auto add = [&](int at, float2 &v) {
        if (at < p.cols) v.x += widen(bias[at]), v.y += widen(bias[at + 1]);
      };
      add(col + pair, v0), add(col + 8 + pair, v1);
    }
    const uint32_t w0 = narrow_word(v0.x, v0.y, T()), w1 = narrow_word(v1.x, v1.y, T());
    const bool odd = lane & 1;
    const uint32_t other = __shfl_xor_sync(~0u, odd ? w0 : w1, 1);
    const int64_t at = place(row, col + (odd ? 8 + pair - 2 : pair));
    if (at >= 0) *reinterpret_cast<uint2 *>(static_cast<T *>(p.to) + at) = odd ? uint2{other, w1} : uint2{w0, other};
  }
#endif
};

template <typename T, Conv2dProduct::Pass kPass, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    conv2d_wgmma_kernel(const __grid_constant__ Conv2dWgmma p) {
#ifdef CUTE_ARCH_MMA_SM90A_ENABLED
  extern __shared__ uint8_t dynamic[];
  __shared__ uint64_t full[Tile::kStages], empty[Tile::kStages];
  using Block = WgmmaBlock<T, kPass, Tile>;
  const int slices = p.slices > 0 ? p.slices : 1, slice = blockIdx.z;
  const Block block{p,
                    (shared32(dynamic) + 1023) & ~1023u,
                    full,
                    empty,
                    static_cast<int>(blockIdx.x) * Tile::kRowBoxes,
                    static_cast<int>(blockIdx.y) * Tile::kColBoxes,
                    static_cast<int>(int64_t{p.steps} * slice / slices),
                    static_cast<int>(int64_t{p.steps} * (slice + 1) / slices)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < Tile::kStages; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], Tile::kGroups);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int group = threadIdx.x / 128;
  if (group == Tile::kGroups) {
    if (threadIdx.x % 32 == 0) block.bring_all();
  } else {
    typename Block::Sums sum = {};
    const int row_group = group % Tile::kRowGroups, col_group = group / Tile::kRowGroups;
    block.multiply(row_group, col_group, sum);
    block.store(row_group, col_group, sum);
  }
#else
  __trap();  // never launched
#endif
}

// ------------------------------------------------------------------------------------------------------------ launcher

// The driver's functions that encode tensor maps; null where there are none.
struct TensorMaps {
  decltype(&cuTensorMapEncodeTiled) tiled = nullptr;
  decltype(&cuTensorMapEncodeIm2col) im2col = nullptr;

  TensorMaps() {
    find("cuTensorMapEncodeTiled", &tiled);
    find("cuTensorMapEncodeIm2col", &im2col);
  }
  static const TensorMaps &get() {
    static const TensorMaps maps;
    return maps;
  }

 private:
  template <class F>
  static void find(const char *name, F *function) {
    void *found = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result) == cudaSuccess &&
        result == cudaDriverEntryPointSuccess)
      *function = reinterpret_cast<F>(found);
  }
};

// (size[n - 1], ..., size[0]) of 16-bit numbers, of which boxes have `box` each.
inline bool map_tiled(CUtensorMap *map, DType dtype, const void *data, int n, const uint64_t *size,
                      const uint32_t *box) {
  uint64_t stride[4];
  uint32_t ones[4] = {1, 1, 1, 1};
  for (int i = 0; i + 1 < n; ++i) stride[i] = size[i] * (i ? stride[i - 1] : 2);
  const auto type = dtype == DType::float16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return TensorMaps::get().tiled(map, type, n, const_cast<void *>(data), size, stride, box, ones,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Images (n, h, w, c), of which out_h x out_w pixels are met from (first_h, first_w) on, `stride` apart.
inline bool map_im2col(CUtensorMap *map, DType dtype, const void *data, uint64_t n, int h, int w, int c, int out_h,
                       int out_w, const Conv2dWgmma &p) {
  const uint64_t size[] = {uint64_t(c), uint64_t(w), uint64_t(h), n};
  const uint64_t stride[] = {size[0] * 2, size[0] * size[1] * 2, size[0] * size[1] * size[2] * 2};
  const int lower[] = {p.first_w, p.first_h};
  const int upper[] = {(out_w - 1) * p.stride_w + 1 + p.first_w - w, (out_h - 1) * p.stride_h + 1 + p.first_h - h};
  const uint32_t steps[] = {1, uint32_t(p.stride_w), uint32_t(p.stride_h), 1};
  const auto type = dtype == DType::float16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return TensorMaps::get().im2col(map, type, 4, const_cast<void *>(data), size, stride, lower, upper, kBox, kBox, steps,
                                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                  CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// The arguments of a kernel; false where TMA does not take the call.
inline bool wgmma_arguments(const Conv2dProduct &c, Conv2dWgmma *p) {
  const bool dx = c.pass == Conv2dProduct::dx, dweight = c.pass == Conv2dProduct::dweight;
  if (!TensorMaps::get().tiled || !TensorMaps::get().im2col) return false;
  if (dx && (c.stride_h != 1 || c.stride_w != 1)) return false;
  *p = {};
  p->channels = c.channels, p->kernel = c.kernel(), p->kernel_w = c.kernel_w;
  p->stride_h = c.stride_h, p->stride_w = c.stride_w;
  p->dilation_h = c.dilation_h, p->dilation_w = c.dilation_w;
  p->first_h = dx ? c.padding_h - c.dilation_h * (c.kernel_h - 1) : -c.padding_h;
  p->first_w = dx ? c.padding_w - c.dilation_w * (c.kernel_w - 1) : -c.padding_w;
  p->map_h = dx ? c.height : c.out_h, p->map_w = dx ? c.width : c.out_w;
  p->rows = dweight ? c.outputs : c.batch * p->map_h * p->map_w;
  p->cols = dx ? c.channels : dweight ? c.kernel() * c.channels : c.outputs;
  p->depth = static_cast<int>(ceil_div(dx ? c.outputs : c.channels, kBox));
  p->steps = dweight ? static_cast<int>(ceil_div(c.pixels(), kBox)) : c.kernel() * p->depth;
  p->slices = c.slices, p->bias = c.bias, p->to = c.to;
  const uint64_t dy[] = {uint64_t(c.outputs), uint64_t(c.pixels())};
  const uint64_t weight[] = {uint64_t(c.channels), uint64_t(c.kernel()), uint64_t(c.outputs)};
  const uint32_t box2[] = {kBox, kBox}, box3[] = {kBox, 1, kBox};
  if (dweight)
    return map_tiled(&p->a, c.dtype, c.a, 2, dy, box2) &&
           map_im2col(&p->b, c.dtype, c.b, c.batch, c.height, c.width, c.channels, p->map_h, p->map_w, *p);
  const bool mapped =
      dx ? map_im2col(&p->a, c.dtype, c.a, c.batch, c.out_h, c.out_w, c.outputs, p->map_h, p->map_w, *p)
         : map_im2col(&p->a, c.dtype, c.a, c.batch, c.height, c.width, c.channels, p->map_h, p->map_w, *p);
  return mapped && map_tiled(&p->b, c.dtype, c.b, 3, weight, box3);
}

template <typename T, Conv2dProduct::Pass kPass, class Tile>
Status launch_wgmma(const char *op, const Conv2dWgmma &p, void *stream) {
  auto *kernel = conv2d_wgmma_kernel<T, kPass, Tile>;
  const int cols = kPass == Conv2dProduct::dweight ? p.kernel * p.depth * kBox : p.cols;
  const dim3 grid(static_cast<unsigned>(ceil_div(p.rows, Tile::kRowBoxes * kBox)),
                  static_cast<unsigned>(ceil_div(cols, Tile::kColBoxes * kBox)), std::max(p.slices, 1));
  AOT_TRY(allow(op, kernel, 1, Tile::kShared));
  kernel<<<grid, Tile::kThreads, Tile::kShared, static_cast<cudaStream_t>(stream)>>>(p);
  return check_launch(op);
}

}  // namespace AOT_ISA
}  // namespace aot
