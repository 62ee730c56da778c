// conv2d on sm_90: an implicit GEMM by wgmma, whose operands are loaded by TMA.
//
// Operands are loaded in boxes of 64 rows of 128 bytes (64 elements of 16 bits, or 32 of float32), swizzled as TMA
// writes and wgmma reads them. TMA's im2col mode loads 64 pixels as one kernel element meets them, across rows and
// images, with stride and padding; elements outside of a tensor are loaded as zeros, and float32 is rounded to TF32.
//            rows of the result, from a         columns, from b                       summed over
//   y        pixels: x (pixels, channels)       outputs: weight (outputs, channels)   kernel elements, channels
//   dx       pixels: dy (pixels, outputs)       channels: weight (outputs, channels)  kernel elements, outputs
//   dweight  outputs: dy (pixels, outputs)      kernel elements x channels:           pixels
//                                               x (pixels, channels)
// where outputs are the output channels. wgmma reads 16-bit operands in either major order, so these are never
// transposed. TF32 must be K-major: dx then takes the weight as (channels, outputs), and dweight takes dy and x in HWCN
// (conv2d_hwcn.cuh): a step is of 32 images of a pixel. float32 in three parts (conv2d_parts.cuh) has 16-bit operands:
// a step's boxes are loaded of all parts, and six products of them added.
//
// Groups have multiples of 64 channels and of outputs each; dx of TF32 takes their weight with the outputs of a group
// contiguous. The columns of a tile (dweight: the rows) are of one group,
// whose channels (dx: outputs) alone are loaded for it.
//
// Narrow groups, of as many outputs as channels, share a box: a row of 128 bytes has the channels of several. For y and
// dx each group has products of its own, of 32 bytes of the sum's axis and as many columns as it has outputs: a product
// of whole boxes, with zeros for weight between groups, would make NaN of another group's infinities. dweight's are of
// whole boxes, of which the squares on the diagonal are written.
#pragma once
#include "conv2d_gemm.h"
#include "cuda/overlap.cuh"
#include "cuda/tma_store.cuh"
#include "cuda/wgmma.cuh"

namespace aot {
inline namespace AOT_ISA {

// An H200's, whatever the device: the split of sums, and so the results, must not depend on the device.
constexpr int kMultiprocessors = 132;

constexpr int kBox = 64, kBoxRow = 128, kBoxBytes = kBox * kBoxRow;
template <typename T>
constexpr int kBoxDepth = kBoxRow / static_cast<int>(sizeof(T));  // elements of a box's row

// A block computes kRowBoxes x kColBoxes boxes of the result with kRowGroups x kColGroups consumer warpgroups and one
// producer warp, in a pipeline of kStages; a multiprocessor has room for kBlocks blocks. Clusters that share their
// loads by multicast were slower. wgmma reads both operands for each 64 rows of its first one, and is faster with the
// longer side of a tile as its second one: `kSwapped` tiles have their channels first. A warpgroup then has room for
// kOutBoxes boxes of its result, from which TMA stores them while the next tile is computed. kParts: of float32, three.
template <int kRowBoxes_, int kColBoxes_, int kRowGroups_, int kColGroups_, int kStages_, int kBlocks_,
          int kOutBoxes_ = 0, bool kSwapped_ = false, int kParts_ = 1>
struct WgmmaTile {
  static constexpr int kRowBoxes = kRowBoxes_, kColBoxes = kColBoxes_, kRowGroups = kRowGroups_;
  static constexpr int kColGroups = kColGroups_, kStages = kStages_, kBlocks = kBlocks_;
  static constexpr int kGroups = kRowGroups * kColGroups, kOutBoxes = kOutBoxes_;
  static constexpr bool kSwapped = kSwapped_;
  static constexpr int kParts = kParts_;
  static constexpr bool kByGroup = false, kNarrow = false, kDiagonal = false;
  static constexpr int kColBox = kBox;  // columns of a box
  static constexpr int kThreads = kGroups * 128 + 32;
  static constexpr int kPartBytes = (kRowBoxes + kColBoxes) * kBoxBytes, kStageBytes = kParts * kPartBytes;
  static constexpr int kLoadBytes = kStageBytes;
  static constexpr int kOut = kStages * kStageBytes;
  static constexpr int kBoxesBytes = kOut + kGroups * kOutBoxes * kBoxBytes;
  static constexpr int kShared = kBoxesBytes + 1024;  // boxes are aligned to 1024
  // Split-K within a cluster, which adds up its partial sums through distributed shared memory: for blocks that have a
  // multiprocessor to themselves, and whose boxes have room for the partial sums.
  static constexpr bool kClusterSplitK =
      !kSwapped && kBlocks == 1 && kBoxesBytes >= kRowBoxes * kColBoxes * kBox * kBox * static_cast<int>(sizeof(float));
};

// A tile of a call with groups: a kernel without them has no division by a group's boxes.
template <class Tile>
struct TileOfGroup : Tile {
  static constexpr bool kByGroup = true;
};
// dweight's, of narrow groups.
template <class Tile>
struct TileOfDiagonal : TileOfGroup<Tile> {
  static constexpr bool kDiagonal = true;
};
// y's and dx's, of narrow groups, whose channels are `kGroupBytes` together, of elements of kSize bytes.
template <class Tile, int kGroupBytes_, int kSize>
struct TileOfNarrow : Tile {
  static_assert(Tile::kColBoxes == 1 && !Tile::kSwapped && Tile::kParts == 1);
  static constexpr bool kNarrow = true;
  static constexpr int kGroupBytes = kGroupBytes_, kGroupColumns = kGroupBytes / kSize, kColBox = kBoxRow / kSize;
  static constexpr int kLoadBytes = Tile::kRowBoxes * kBoxBytes + kColBox * kGroupBytes;
};

struct Conv2dWgmma {
  CUtensorMap a, b;
  CUtensorMap result;  // y, dx: if `by_boxes`
  int rows;            // of the result
  int columns;         // y, dx: of the result; dweight: of one kernel element, which is channels
  int steps;           // of the mainloop: boxes along the sum
  int depth;           // y, dx: boxes along the channels of a kernel element's sum; dweight: boxes along channels
  union {
    int a_part;          // of three parts: channels from one to the next
    int group_channels;  // of groups: channels from one to the next, of x or in dx of dy
  };
  union {
    int b_part;
    int group_boxes;  // of groups: boxes of one along the columns, dweight: along the rows
  };
  int kernel, kernel_w;
  // dx: weight's kernel element for dy's first one, and from one of dy's rows and columns on. dweight in TF32: `tap`
  // boxes along the images.
  int tap, tap_h, tap_w;
  int map_h, map_w;  // pixels of the im2col operand
  int stride_h, stride_w, first_h, first_w, dilation_h, dilation_w;
  int row_tiles, col_tiles;
  int clear_h, clear_w;             // dx: the strides, if no other phase of them meets a kernel element; else 0
  int64_t clear_row, clear_column;  // and the elements from one of dx's rows and columns to the next
  int height, width;                // of dx
  int slices;          // split-K: dweight's partial sums go to memory; for y and dx the slices are a cluster
  bool by_boxes;       // whether TMA stores the result: a matrix of pixels and channels
  bool apart;          // dx: whether a phase's pixels are not such a matrix, so that `result` is of im2col mode
  bool pairs;          // neighbouring columns are contiguous and in whole vectors
  bool independent;    // reads nothing that the kernel launched before it writes
  Strides to_strides;  // y, dx
  const void *bias;
  void *to;
};

// The phases of a strided dx, of which those with the longest sums start first. Their tiles are counted on.
struct Conv2dPhases {
  static constexpr int kMost = 4;
  Conv2dWgmma phase[kMost];
  int first_tile[kMost];
  int count;
};

// ------------------------------------------------------------------------------------------------------- instructions

#ifdef CUTE_ARCH_MMA_SM90A_ENABLED

// Loads a box of images in im2col mode.
struct PixelAt {
  int w, h, n;
};
__device__ inline void tma_load(const CUtensorMap &map, uint32_t to, uint64_t *barrier, int c, PixelAt at, int offset_w,
                                int offset_h) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(to),
      "l"(&map), "r"(shared_address(barrier)), "r"(c), "r"(at.w), "r"(at.h), "r"(at.n),
      "h"(static_cast<uint16_t>(offset_w)), "h"(static_cast<uint16_t>(offset_h))
      : "memory");
}

__device__ inline uint64_t box_descriptor(uint32_t address) { return wgmma_descriptor(address, kBoxBytes); }

#endif

// ------------------------------------------------------------------------------------------------------------- kernel

template <typename T, Conv2dGemm::Pass kPass, class Tile>
struct WgmmaBlock {
  // float32: TF32, or three parts of bfloat16
  static constexpr bool kThree = Tile::kParts == 3;
  using Factor = std::conditional_t<kThree, __nv_bfloat16, T>;
  static constexpr bool kDweight = kPass == Conv2dGemm::dweight, kTf32 = sizeof(Factor) == 4;
  static constexpr bool kTransposedB = kPass == Conv2dGemm::dx && !kTf32;                  // b is MN-major
  static constexpr int kDepth = kBoxDepth<Factor>;                                         // elements of a step
  static constexpr int kRowsOfGroup = Tile::kRowBoxes / Tile::kRowGroups;                  // in boxes
  static constexpr int kColsOfGroup = Tile::kColBoxes / Tile::kColGroups * Tile::kColBox;  // in elements
  // 64 rows of wgmma's first operand, and elements of its second one
  static constexpr int kFirst = Tile::kSwapped ? kColsOfGroup / kBox : kRowsOfGroup;
  static constexpr int kSecond = Tile::kSwapped ? kRowsOfGroup * kBox : kColsOfGroup;

#ifdef CUTE_ARCH_MMA_SM90A_ENABLED
  using Sums = float[kFirst][kSecond / 2];

  const Conv2dWgmma &p;
  int first;  // the block's first tile
  uint32_t boxes;
  uint64_t *full, *empty;

  // A tile of the result, and the steps of its sum that are this block's. Consecutive tiles have the same rows.
  struct WorkTile {
    int row_box, col_box, first_step, last_step;
  };
  __device__ WorkTile work_tile(int tile) const {
    const int slices = p.slices > 0 ? p.slices : 1, slice = blockIdx.z;
    return {tile / p.col_tiles * Tile::kRowBoxes, tile % p.col_tiles * Tile::kColBoxes,
            static_cast<int>(int64_t{p.steps} * slice / slices),
            static_cast<int>(int64_t{p.steps} * (slice + 1) / slices)};
  }
  template <class F>
  __device__ void each_tile(F f) const {
    for (int tile = first; tile < p.row_tiles * p.col_tiles; tile += gridDim.x) f(work_tile(tile));
  }

  __device__ uint32_t a_box(int stage, int i, int part = 0) const {
    return boxes + stage * Tile::kStageBytes + part * Tile::kPartBytes + i * kBoxBytes;
  }
  __device__ uint32_t b_box(int stage, int j, int part = 0) const {
    return a_box(stage, Tile::kRowBoxes, part) + j * kBoxBytes;  // some 200 instructions fewer than in one call
  }

  __device__ PixelAt pixel(int i) const {
    const int w = i % p.map_w, h = i / p.map_w % p.map_h;
    return {w * p.stride_w + p.first_w, h * p.stride_h + p.first_h, i / p.map_w / p.map_h};
  }

  // ---------------------------------------------------------------------------------------------------- producer warp

  // iteration: of the pipeline, which goes on from phase to phase.
  __device__ void load_tiles(int &iteration) const {
    each_tile([&](const WorkTile &at) {
      auto next = [&] {
        const int stage = iteration % Tile::kStages;
        mbarrier_wait(&empty[stage], iteration++ / Tile::kStages % 2 ^ 1);
        mbarrier_expect(&full[stage], Tile::kLoadBytes);
        return stage;
      };
      if constexpr (kDweight) load_by_pixel(at, next);
      else if constexpr (Tile::kNarrow) load_narrow(at, next);
      else load_by_tap(at, next);
    });
  }

  template <class Next>
  __device__ void load_by_tap(const WorkTile &at, Next next) const {
    PixelAt rows[Tile::kRowBoxes];
    for (int i = 0; i < Tile::kRowBoxes; ++i) rows[i] = pixel((at.row_box + i) * kBox);
    int k = at.first_step / p.depth, d = at.first_step % p.depth;
    const int group = Tile::kByGroup ? at.col_box / p.group_boxes : 0;
    const int of_group = Tile::kByGroup ? group * p.group_channels : 0;       // its first term
    const int first_col = Tile::kByGroup ? group * p.group_boxes * kBox : 0;  // and column
    for (int step = at.first_step; step < at.last_step; ++step) {
      const int stage = next(), k_w = k % p.kernel_w, k_h = k / p.kernel_w;
      const int tap = kPass == Conv2dGemm::y ? k : p.tap + k_h * p.tap_h + k_w * p.tap_w;
#pragma unroll
      for (int part = 0; part < Tile::kParts; ++part) {
        const int a = part * p.a_part, b = part * p.b_part;
#pragma unroll
        for (int i = 0; i < Tile::kRowBoxes; ++i)
          tma_load(p.a, a_box(stage, i, part), &full[stage], of_group + a + d * kDepth, rows[i], k_w * p.dilation_w,
                   k_h * p.dilation_h);
#pragma unroll
        for (int j = 0; j < Tile::kColBoxes; ++j) {
          const int col = (at.col_box + j) * kBox;
          if (kTransposedB)
            tma_load(p.b, b_box(stage, j, part), &full[stage], b + col - first_col, tap, of_group + d * kDepth);
          else if constexpr (kTf32 && Tile::kByGroup && kPass == Conv2dGemm::dx)
            tma_load(p.b, b_box(stage, j), &full[stage], d * kDepth, col - first_col, tap, group);
          else tma_load(p.b, b_box(stage, j, part), &full[stage], b + d * kDepth, tap, col);
        }
      }
      if (++d == p.depth) d = 0, ++k;
    }
  }

  template <class Next>
  __device__ void load_narrow(const WorkTile &at, Next next) const {
    PixelAt rows[Tile::kRowBoxes];
    for (int i = 0; i < Tile::kRowBoxes; ++i) rows[i] = pixel((at.row_box + i) * kBox);
    for (int k = at.first_step; k < at.last_step; ++k) {
      const int stage = next(), k_w = k % p.kernel_w, k_h = k / p.kernel_w;
      const int tap = kPass == Conv2dGemm::y ? k : p.tap + k_h * p.tap_h + k_w * p.tap_w;
#pragma unroll
      for (int i = 0; i < Tile::kRowBoxes; ++i)
        tma_load(p.a, a_box(stage, i), &full[stage], at.col_box * kDepth, rows[i], k_w * p.dilation_w,
                 k_h * p.dilation_h);
      tma_load(p.b, b_box(stage, 0), &full[stage], 0, 0, tap, at.col_box * (kBoxRow / Tile::kGroupBytes));
    }
  }

  template <class Next>
  __device__ void load_by_pixel(const WorkTile &at, Next next) const {
    struct {
      int c, w, h;
    } cols[Tile::kColBoxes];
    for (int j = 0; j < Tile::kColBoxes; ++j) {
      const int box = at.col_box + j, k = box / p.depth;
      const bool there = k < p.kernel;
      cols[j] = {(there ? box % p.depth : p.depth * Tile::kParts) * kBox, there ? k % p.kernel_w * p.dilation_w : 0,
                 there ? k / p.kernel_w * p.dilation_h : 0};
    }
    const int of_group = Tile::kByGroup ? at.row_box / p.group_boxes * p.group_channels : 0;
    for (int step = at.first_step; step < at.last_step; ++step) {
      const int stage = next();
      const int first = kTf32 ? step / p.tap : step * kBox, image = kTf32 ? step % p.tap * kDepth : 0;
      const PixelAt pixels = pixel(first);
#pragma unroll
      for (int part = 0; part < Tile::kParts; ++part) {
        const int a = part * p.a_part, b = part * p.b_part;
#pragma unroll
        for (int i = 0; i < Tile::kRowBoxes; ++i) {
          const int row = a + (at.row_box + i) * kBox;
          if constexpr (kTf32) tma_load(p.a, a_box(stage, i), &full[stage], image, row, first);
          else tma_load(p.a, a_box(stage, i, part), &full[stage], row, first);
        }
#pragma unroll
        for (int j = 0; j < Tile::kColBoxes; ++j) {
          if constexpr (kTf32)
            tma_load(p.b, b_box(stage, j), &full[stage], image, of_group + cols[j].c, pixels.w + cols[j].w,
                     pixels.h + cols[j].h);
          else
            tma_load(p.b, b_box(stage, j, part), &full[stage], of_group + b + cols[j].c, pixels, cols[j].w, cols[j].h);
        }
      }
    }
  }

  // ----------------------------------------------------------------------------------------------- consumer warpgroups

  __device__ void compute_tiles(int row_group, int col_group, int &iteration) const {
    each_tile([&](const WorkTile &at) {
      if constexpr (kPass == Conv2dGemm::dx)
        if (p.clear_h) clear_around(at, row_group, col_group);
      Sums sum = {};
      mainloop(at.last_step - at.first_step, row_group, col_group, iteration, sum);
      wait_for_kernel_before();
      store(at, row_group, col_group, sum);
    });
  }

  __device__ void mainloop(int steps, int row_group, int col_group, int &iteration, Sums &sum) const {
    // the next 16 terms (8 of TF32) are 16 rows on in an MN-major box, 32 bytes on in a K-major one
    constexpr bool kAcrossA = kDweight && !kTf32, kAcrossB = kAcrossA || kTransposedB;
    constexpr int kStepA = kAcrossA ? 16 * kBoxRow : 32, kStepB = kAcrossB ? 16 * kBoxRow : 32;
    constexpr int kStepFirst = Tile::kSwapped ? kStepB : kStepA, kStepSecond = Tile::kSwapped ? kStepA : kStepB;
    using Mma = std::conditional_t<Tile::kSwapped, Wgmma<Factor, kSecond, kAcrossB, kAcrossA>,
                                   Wgmma<Factor, kSecond, kAcrossA, kAcrossB>>;
    auto release = [&](int iteration) {
      if (threadIdx.x % 128 == 0) mbarrier_arrive(&empty[iteration % Tile::kStages]);
    };
    if constexpr (kThree) {
      // Tensor cores truncate what they add to: 64 products of the largest parts are added to 0, and ordinary additions
      // gather such sums, while tensor cores compute the other products. These are at most 2^-8 of the former, and may
      // be one long sum, which is left out where the other is not finite: an infinity has no smaller parts.
      static_assert(kFirst == 1 && !Tile::kSwapped);
      float largest[1][kSecond / 2], others[1][kSecond / 2] = {};
      for (int step = 0; step < steps; ++step, ++iteration) {
        const int stage = iteration % Tile::kStages;
        mbarrier_wait(&full[stage], iteration / Tile::kStages % 2);
        auto multiply = [&](int k, int a, int b, float (&to)[kSecond / 2], bool add) {
          Mma::run(box_descriptor(a_box(stage, row_group * kRowsOfGroup, a) + k * kStepA),
                   box_descriptor(b_box(stage, col_group * (kColsOfGroup / kBox), b) + k * kStepB), to, add);
        };
        fence_registers(largest), fence_registers(others);
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < 4; ++k) multiply(k, 0, 0, largest[0], k > 0);
        wgmma_end();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          multiply(k, 1, 1, others[0], step + k > 0);
          multiply(k, 2, 0, others[0], true);
          multiply(k, 0, 2, others[0], true);
          multiply(k, 1, 0, others[0], true);
          multiply(k, 0, 1, others[0], true);
        }
        wgmma_end();
        fence_registers(others);
        wgmma_wait<1>();
        fence_registers(largest);
        if (step > 0) release(iteration - 1);
#pragma unroll
        for (int i = 0; i < kSecond / 2; ++i) sum[0][i] += largest[0][i];
      }
      wgmma_wait<0>();
      fence_registers(others);
      if (steps > 0) release(iteration - 1);
#pragma unroll
      for (int i = 0; i < kSecond / 2; ++i) sum[0][i] += isfinite(sum[0][i]) ? others[0][i] : 0;
    } else {
      for (int step = 0; step < steps; ++step, ++iteration) {
        const int stage = iteration % Tile::kStages;
        mbarrier_wait(&full[stage], iteration / Tile::kStages % 2);
        const uint32_t a = a_box(stage, row_group * kRowsOfGroup), b = b_box(stage, col_group * (kColsOfGroup / kBox));
        const uint32_t first = Tile::kSwapped ? b : a, second = Tile::kSwapped ? a : b;
        fence_registers(sum);
        wgmma_begin();
        if constexpr (Tile::kNarrow) {
          multiply_groups(a, b, step > 0, sum);
        } else {
#pragma unroll
          for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int i = 0; i < kFirst; ++i)
              Mma::run(box_descriptor(first + i * kBoxBytes + k * kStepFirst), box_descriptor(second + k * kStepSecond),
                       sum[i], step + k > 0);
        }
        wgmma_end();
        fence_registers(sum);
        wgmma_wait<1>();
        if (step > 0) release(iteration - 1);
      }
      wgmma_wait<0>();
      fence_registers(sum);
      if (steps > 0) release(iteration - 1);
    }
  }

  // A step of narrow groups. Of b a group has as many rows as columns of the result, of kGroupBytes each, swizzled so.
  __device__ void multiply_groups(uint32_t a, uint32_t b, bool add, Sums &sum) const {
    constexpr int kBytes = Tile::kGroupBytes, kCols = Tile::kGroupColumns, kSteps = kBytes / 32;
    constexpr int kStep = kTransposedB ? 16 * kBytes : 32;
    constexpr uint64_t kSwizzle = kBytes == 32 ? 3 : kBytes == 64 ? 2 : 1;
    using Mma = Wgmma<Factor, kCols, false, kTransposedB>;
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int i = 0; i < kFirst; ++i) {
        const uint32_t of_group = b + k / kSteps * kCols * kBytes + k % kSteps * kStep;
        Mma::run(box_descriptor(a + i * kBoxBytes + k * 32),
                 wgmma_descriptor(of_group, 8 * kBytes, 8 * kBytes, kSwizzle),
                 reinterpret_cast<float (&)[kCols / 2]>(sum[i][k / kSteps * kCols / 2]), add || k % kSteps > 0);
      }
  }

  // Zeros in the pixels of dx between those of this tile.
  __device__ void clear_around(const WorkTile &at, int row_group, int col_group) const {
    constexpr int kVector = kVectorSize<T>, kVectors = kColsOfGroup / kVector;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    wait_for_kernel_before();
    for (int v = lane; v < kRowsOfGroup * 16 * kVectors; v += 32) {
      const int box = at.row_box + row_group * kRowsOfGroup + v / kVectors / 16;
      const int row = box * kBox + warp * 16 + v / kVectors % 16;
      const int col = at.col_box * Tile::kColBox + col_group * kColsOfGroup + v % kVectors * kVector;
      if (row >= p.rows || col >= p.columns) continue;
      const int h = row / p.map_w % p.map_h * p.clear_h, w = row % p.map_w * p.clear_w;
      T *to = static_cast<T *>(p.to) + row_at(row) + col;
      for (int i = 0; i < p.clear_h && h + i < p.height; ++i)
        for (int j = i ? 0 : 1; j < p.clear_w && w + j < p.width; ++j)
          *reinterpret_cast<uint4 *>(to + i * p.clear_row + j * p.clear_column) = {};
    }
  }

  // --------------------------------------------------------------------------------------------------------- epilogue

  __device__ void store(const WorkTile &at, int row_group, int col_group, Sums &sum) const {
    if constexpr (Tile::kSwapped) {
      store_boxes(at, row_group, col_group, sum);
    } else if (!kDweight && Tile::kClusterSplitK && p.slices > 1) {
      publish_partials(sum);
      store_rows<true>(at, row_group, col_group, sum);
      cluster_barrier();  // all blocks have read these partial sums
    } else if constexpr (Tile::kDiagonal) {
      store_diagonal(at, row_group, col_group, sum);
    } else {
      store_rows<false>(at, row_group, col_group, sum);
    }
  }

  // The warpgroup puts its sums in order in shared memory, box by box, and a thread has TMA store the boxes.
  __device__ void store_boxes(const WorkTile &at, int row_group, int col_group, const Sums &sum) const {
    constexpr int kColBoxes = kColsOfGroup / kBox, kRing = Tile::kOutBoxes;
    const int group = threadIdx.x / 128;
    const bool stores = threadIdx.x % 128 == 0;
    const uint32_t ring = boxes + Tile::kOut + group * kRing * kBoxBytes;
    auto synchronize = [&] { asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory"); };
#pragma unroll
    for (int box = 0; box < kRowsOfGroup * kColBoxes; ++box) {
      const int i = box / kColBoxes, j = box % kColBoxes, col = (at.col_box + col_group * kColBoxes + j) * kBox;
      const uint32_t to = ring + box % kRing * kBoxBytes;
      if (stores) wait_for_reads<kRing - 1>();
      synchronize();
      put(&sum[j][i * kBox / 2], to, col);
      show_to_tma();
      synchronize();
      if (stores) store_box(to, col, (at.row_box + row_group * kRowsOfGroup + i) * kBox);
    }
  }

  // Sums of channels' pairs of pixels, with channel `col` first: a thread's are of two channels. A pixel's vectors of
  // 16 bytes are swizzled as TMA expects them.
  __device__ void put(const float *sums, uint32_t box, int col) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, row = lane % 8, channel = warp * 16 + lane / 4;
    const float bias[] = {bias_of(col + channel), bias_of(col + channel + 8)};
    // A lane's vector of eight channels: of one of four matrices of 8 x 8, which are 16 pixels' of 16 channels.
    const uint32_t vector = box + (lane / 16 * 8 + row) * kBoxRow + ((warp * 2 + lane / 8 % 2) ^ row) * 16;
#pragma unroll
    for (int pixel = 0; pixel < kBox; pixel += 16) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float *v = &sums[(pixel / 8 + i / 2) * 4 + i % 2 * 2];
        words[i] = narrow_word(v[0] + bias[i % 2], v[1] + bias[i % 2], T());
      }
      asm volatile(
          "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(vector + pixel * kBoxRow),
          "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
          : "memory");
    }
  }
  __device__ float bias_of(int channel) const {
    if (kPass != Conv2dGemm::y || !p.bias || channel >= p.columns) return 0;
    return widen(static_cast<const T *>(p.bias)[channel]);
  }
  __device__ void store_box(uint32_t box, int col, int row) const {
    if (row < p.rows && col < p.columns) {
      if (kPass == Conv2dGemm::dx && p.apart)
        tma_store_pixels(p.result, box, col, row % p.map_w, row / p.map_w % p.map_h, row / p.map_w / p.map_h);
      else tma_store(p.result, box, col, row);
    }
    end_stores();
  }
  // A thread's accumulators are pairs of neighbouring columns, in rows 8 apart. The pairs of a row that are 8 columns
  // apart are stored together.
  template <bool kCluster>
  __device__ void store_rows(const WorkTile &at, int row_group, int col_group, const Sums &sum) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int i = 0; i < kRowsOfGroup; ++i) {
      const int row = (at.row_box + row_group * kRowsOfGroup + i) * kBox + warp * 16 + lane / 4;
      const int64_t rows[] = {row_at(row), row_at(row + 8)};
#pragma unroll
      for (int j = 0; j < kColsOfGroup / 8; j += 2) {
        if (kCluster && j / 2 % p.slices != blockIdx.z) continue;
        const Columns columns = columns_of(at.col_box + col_group * (kColsOfGroup / Tile::kColBox) + j * 8 / kBox);
        const int quad = i * kColsOfGroup / 8 + j, col = j * 8 % kBox;
        float4 pairs[2];
        if constexpr (kCluster) {
          collect_partials(quad, pairs);
        } else {
          const float *v = &sum[i][j * 4];
          pairs[0] = {v[0], v[1], v[2], v[3]}, pairs[1] = {v[4], v[5], v[6], v[7]};
        }
        write(rows[0], columns, col, {pairs[0].x, pairs[0].y}, {pairs[1].x, pairs[1].y});
        write(rows[1], columns, col, {pairs[0].z, pairs[0].w}, {pairs[1].z, pairs[1].w});
      }
    }
  }

  // dweight of narrow groups, p.columns channels each: partial sums of the columns that are of a row's own group.
  __device__ void store_diagonal(const WorkTile &at, int row_group, int col_group, const Sums &sum) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int i = 0; i < kRowsOfGroup; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int of_box = warp * 16 + lane / 4 + half * 8, first = of_box / p.columns * p.columns;
        const int64_t row = row_at((at.row_box + row_group * kRowsOfGroup + i) * kBox + of_box);
        if (row < 0) continue;
#pragma unroll
        for (int j = 0; j < kColsOfGroup / 8; ++j) {
          const int k = at.col_box + col_group * (kColsOfGroup / kBox) + j * 8 / kBox;
          const int col = j * 8 % kBox + lane % 4 * 2 - first;
          if (k < p.kernel && 0 <= col && col < p.columns)
            *reinterpret_cast<float2 *>(static_cast<float *>(p.to) + row + int64_t{k} * p.columns + col) = {
                sum[i][j * 4 + half * 2], sum[i][j * 4 + half * 2 + 1]};
        }
      }
  }

  // Split-K in a cluster: each block publishes the partial sums of its slice in shared memory, over its stages, four of
  // a thread's accumulators at a time. Each block then adds all slices, in their order, for some of the columns.
  __device__ uint32_t quad_address(int quad) const { return boxes + (quad * Tile::kGroups * 128 + threadIdx.x) * 16; }

  __device__ void publish_partials(const Sums &sum) const {
    asm volatile("bar.sync 1, %0;" ::"n"(Tile::kGroups * 128) : "memory");  // all warpgroups have read the stages
#pragma unroll
    for (int i = 0; i < kRowsOfGroup; ++i)
#pragma unroll
      for (int j = 0; j < kColsOfGroup / 8; ++j)
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(quad_address(i * kColsOfGroup / 8 + j)),
                     "f"(sum[i][j * 4]), "f"(sum[i][j * 4 + 1]), "f"(sum[i][j * 4 + 2]), "f"(sum[i][j * 4 + 3])
                     : "memory");
    cluster_barrier();
  }
  // Two quads, of all slices. Loads from other blocks take hundreds of clocks: some are in flight at once.
  __device__ void collect_partials(int quad, float4 (&sums)[2]) const {
    constexpr int kAtOnce = 4;
    sums[0] = sums[1] = {};
    for (int first = 0; first < p.slices; first += kAtOnce) {
      float4 v[kAtOnce][2] = {};
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (first + k < p.slices)
            asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(v[k][i].x), "=f"(v[k][i].y), "=f"(v[k][i].z), "=f"(v[k][i].w)
                         : "r"(address_in_block(quad_address(quad + i), first + k))
                         : "memory");
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          sums[i].x += v[k][i].x, sums[i].y += v[k][i].y, sums[i].z += v[k][i].z, sums[i].w += v[k][i].w;
    }
  }

  // Offset of a row of the result; negative if out of range.
  __device__ int64_t row_at(int row) const {
    if (row >= p.rows) return -1;
    if constexpr (kDweight) {
      const int64_t slice = p.slices ? blockIdx.z : 0;
      return (slice * p.rows + row) * p.kernel * p.columns;
    }
    return p.to_strides.at(row / p.map_w / p.map_h, 0, row / p.map_w % p.map_h, row % p.map_w);
  }
  struct Columns {  // of a box
    int first;
    int64_t at;  // offset of the first column
    int count;   // up to the last column of the result
  };
  __device__ Columns columns_of(int box) const {
    if constexpr (kDweight) {
      const int k = box / p.depth, first = box % p.depth * kBox;
      return {first, int64_t{k} * p.columns + first, k < p.kernel ? p.columns - first : 0};
    }
    const int first = box * Tile::kColBox;
    return {first, first * p.to_strides.channel, p.columns - first};
  }

  // Writes two pairs of a row; the four lanes of the row have the 16 columns from column `col` of the box on.
  __device__ void write(int64_t row, const Columns &columns, int col, float2 v0, float2 v1) const {
    const int pair = threadIdx.x % 4 * 2;
    const int64_t at = row + columns.at;
    if (kPass == Conv2dGemm::y && p.bias) {
      const T *bias = static_cast<const T *>(p.bias) + columns.first + col + pair;
      if (col + pair < columns.count) v0.x += widen(bias[0]), v0.y += widen(bias[1]);
      if (col + pair + 8 < columns.count) v1.x += widen(bias[8]), v1.y += widen(bias[9]);
    }
    if (kDweight && p.slices) {
      write_pair<float>(row, at, columns, col + pair, v0), write_pair<float>(row, at, columns, col + pair + 8, v1);
    } else if (sizeof(T) == 4 || !p.pairs) {
      write_pair<T>(row, at, columns, col + pair, v0), write_pair<T>(row, at, columns, col + pair + 8, v1);
    } else if constexpr (sizeof(T) == 2) {
      // Pairs of lanes exchange a pair each. Each lane then has four contiguous elements, the four lanes a sector.
      const uint32_t w0 = narrow_word(v0.x, v0.y, T()), w1 = narrow_word(v1.x, v1.y, T());
      const bool odd = threadIdx.x & 1;
      const uint32_t other = __shfl_xor_sync(~0u, odd ? w0 : w1, 1);
      const int four = col + (odd ? 8 + pair - 2 : pair);
      if (row >= 0 && four < columns.count)
        *reinterpret_cast<uint2 *>(static_cast<T *>(p.to) + at + four) = odd ? uint2{other, w1} : uint2{w0, other};
    }
  }
  template <typename To>
  __device__ void write_pair(int64_t row, int64_t at, const Columns &columns, int col, float2 v) const {
    To *to = static_cast<To *>(p.to) + at;
    if (row < 0 || col >= columns.count) return;
    if (std::is_same_v<To, float> && p.pairs) {
      *reinterpret_cast<float2 *>(to + col) = v;
    } else {
      to[col * p.to_strides.channel] = narrow<To>(v.x);
      if (col + 1 < columns.count) to[(col + 1) * p.to_strides.channel] = narrow<To>(v.y);
    }
  }
#endif
};

#ifdef CUTE_ARCH_MMA_SM90A_ENABLED
// The barriers of stages that one thread fills, and so many arrivals empty.
template <int kStages>
__device__ inline void init_stages(uint64_t (&full)[kStages], uint64_t (&empty)[kStages], int arrivals) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) mbarrier_init(&full[i], 1), mbarrier_init(&empty[i], arrivals);
    mbarrier_init_fence();
  }
  __syncthreads();
}

// each(f) calls f(p, first) for each phase p, of which `first` is this block's first tile.
template <typename T, Conv2dGemm::Pass kPass, class Tile, class Each>
__device__ inline void compute_block(bool independent, Each each) {
  using Block = WgmmaBlock<T, kPass, Tile>;
  extern __shared__ uint8_t dynamic[];
  __shared__ uint64_t full[Tile::kStages], empty[Tile::kStages];
  const uint32_t boxes = (shared_address(dynamic) + 1023) & ~1023u;
  init_stages(full, empty, Tile::kGroups);
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);  // the same in a warp, for the compiler
  int iteration = 0;
  if (group < Tile::kGroups) {
    each([&](const Conv2dWgmma &p, int first) {
      Block{p, first, boxes, full, empty}.compute_tiles(group % Tile::kRowGroups, group / Tile::kRowGroups, iteration);
    });
    if constexpr (Tile::kSwapped) wait_for_stores();  // of this thread, of which most have none
  } else {
    if (threadIdx.x != Tile::kGroups * 128) return;
    if (!independent) wait_for_kernel_before();
    // The next kernel may be `independent` of this one and read what earlier kernels wrote, without waiting: it may
    // start only when those have ended.
    launch_next();
    each([&](const Conv2dWgmma &p, int first) { Block{p, first, boxes, full, empty}.load_tiles(iteration); });
  }
}
#endif

template <typename T, Conv2dGemm::Pass kPass, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    conv2d_wgmma_kernel(const __grid_constant__ Conv2dWgmma p) {
#ifdef CUTE_ARCH_MMA_SM90A_ENABLED
  compute_block<T, kPass, Tile>(p.independent, [&](auto f) { f(p, static_cast<int>(blockIdx.x)); });
#else
  __trap();  // compiled for other architectures, never launched there
#endif
}

// Block i computes tiles i, i + gridDim.x and so on, of all phases.
template <typename T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    conv2d_wgmma_phases_kernel(const __grid_constant__ Conv2dPhases p) {
#ifdef CUTE_ARCH_MMA_SM90A_ENABLED
  const int blocks = gridDim.x, block = blockIdx.x;
  compute_block<T, Conv2dGemm::dx, Tile>(p.phase[0].independent, [&](auto f) {
    for (int i = 0; i < p.count; ++i) {
      const int skipped = p.first_tile[i] % blocks;
      f(p.phase[i], block < skipped ? block - skipped + blocks : block - skipped);
    }
  });
#else
  __trap();
#endif
}

// ------------------------------------------------------------------------------------------------------------ launcher

// Images (n, h, w, c): p.map_h x p.map_w pixels each, from (p.first_h, p.first_w) on, p.stride_h and p.stride_w apart.
inline bool map_im2col(CUtensorMap *map, DType dtype, const void *data, int n, int h, int w, int c,
                       const Conv2dWgmma &p) {
  const uint64_t size[] = {uint64_t(c), uint64_t(w), uint64_t(h), uint64_t(n)}, bytes = itemsize(dtype);
  const uint64_t stride[] = {size[0] * bytes, size[0] * size[1] * bytes, size[0] * size[1] * size[2] * bytes};
  const int lower[] = {p.first_w, p.first_h};
  const int upper[] = {(p.map_w - 1) * p.stride_w + 1 + p.first_w - w, (p.map_h - 1) * p.stride_h + 1 + p.first_h - h};
  const uint32_t steps[] = {1, uint32_t(p.stride_w), uint32_t(p.stride_h), 1};
  return TensorMaps::get().im2col(map, map_type(dtype), 4, const_cast<void *>(data), size, stride, lower, upper,
                                  static_cast<uint32_t>(kBoxRow / bytes), kBox, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Pixels of a result in im2col mode: (w, h, n) of them, `step` elements apart.
inline bool map_pixels(CUtensorMap *map, DType dtype, const void *data, const uint64_t (&size)[4],
                       const int64_t (&step)[3]) {
  const uint64_t bytes = itemsize(dtype), stride[] = {step[0] * bytes, step[1] * bytes, step[2] * bytes};
  const int corner[] = {0, 0};
  const uint32_t steps[] = {1, 1, 1, 1};
  return TensorMaps::get().im2col(map, map_type(dtype), 4, const_cast<void *>(data), size, stride, corner, corner,
                                  static_cast<uint32_t>(kBoxRow / bytes), kBox, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Along an axis, for the pixels of dx with one stride phase: which elements of dy meet them, from `first` on, and which
// kernel elements, from `last` down.
struct DxTaps {
  int count = 0, first = 0, last = 0;

  DxTaps(int phase, int padding, int stride, int dilation, int kernel) {
    const int least = (phase + padding) % stride;
    if (least >= kernel) return;
    count = (kernel - 1 - least) / stride + 1, last = least + (count - 1) * stride;
    first = (phase + padding) / stride - (count - 1) * dilation;
  }
};

// The kernel's parameters, without tensor maps and tile counts. A strided dx is one GEMM per stride phase: for the
// pixels (i * stride_h + phase_h, j * stride_w + phase_w).
inline Conv2dWgmma wgmma_params(const Conv2dGemm &c, int phase_h = 0, int phase_w = 0) {
  const bool dx = c.pass == Conv2dGemm::dx, dweight = c.pass == Conv2dGemm::dweight;
  const int box_depth = static_cast<int>(kBoxRow / itemsize(c.factors()));
  const int together = c.narrow && dweight ? kBox / c.narrow : 1;  // groups of a box
  const int channels = c.channels / c.groups * together, out_channels = c.out_channels / c.groups * together;
  auto boxes = [](int64_t n, int size) { return static_cast<int>(ceil_div(n, size)); };
  Conv2dWgmma p = {};
  p.kernel = c.kernel(), p.kernel_w = c.kernel_w, p.dilation_h = c.dilation_h, p.dilation_w = c.dilation_w;
  p.stride_h = dx ? 1 : c.stride_h, p.stride_w = dx ? 1 : c.stride_w;
  p.first_h = -c.padding_h, p.first_w = -c.padding_w, p.map_h = c.out_h, p.map_w = c.out_w;
  p.to_strides = c.to_strides;
  if (dx) {
    const DxTaps h(phase_h, c.padding_h, c.stride_h, c.dilation_h, c.kernel_h);
    const DxTaps w(phase_w, c.padding_w, c.stride_w, c.dilation_w, c.kernel_w);
    p.kernel = h.count * w.count, p.kernel_w = w.count, p.first_h = h.first, p.first_w = w.first;
    p.tap = h.last * c.kernel_w + w.last, p.tap_h = -c.stride_h * c.kernel_w, p.tap_w = -c.stride_w;
    p.map_h = boxes(c.height - phase_h, c.stride_h), p.map_w = boxes(c.width - phase_w, c.stride_w);
    p.clear_row = p.to_strides.row, p.clear_column = p.to_strides.column, p.height = c.height, p.width = c.width;
    p.to_strides.row *= c.stride_h, p.to_strides.column *= c.stride_w;
  }
  p.rows = dweight ? c.out_channels : c.batch * p.map_h * p.map_w;
  p.columns = dweight ? channels / together : c.to_channels;
  p.depth = dweight ? boxes(channels, kBox) : boxes(dx ? out_channels : channels, box_depth);
  p.steps = dweight ? boxes(c.pixels(), box_depth) : p.kernel * p.depth;
  p.a_part = c.pass == Conv2dGemm::y ? c.channels : c.out_channels, p.b_part = c.channels;
  if (c.groups > 1)
    p.group_channels = dx ? out_channels : channels, p.group_boxes = (dx ? channels : out_channels) / kBox;
  p.slices = c.slices, p.pairs = c.whole_vectors, p.independent = c.independent, p.bias = c.bias;
  if (c.hwcn) p.tap = boxes(c.batch, box_depth), p.steps = c.out_h * c.out_w * p.tap;
  p.to = static_cast<char *>(c.to) +
         (phase_h * c.to_strides.row + phase_w * c.to_strides.column) * static_cast<int64_t>(itemsize(c.dtype));
  return p;
}

// Boxes along the columns of the result.
inline int64_t col_boxes(Conv2dGemm::Pass pass, const Conv2dWgmma &p, int box = kBox) {
  return pass == Conv2dGemm::dweight ? int64_t{p.kernel} * p.depth : ceil_div(p.columns, box);
}

// Sets `by_boxes`, and encodes the result's tensor map, where TMA can store it: vectors of 16 bytes, of 16-bit
// elements.
inline void map_result(const Conv2dGemm &c, Conv2dWgmma *p) {
  const Strides &to = p->to_strides;
  if (c.pass == Conv2dGemm::dweight || itemsize(c.dtype) != 2 || !c.whole_vectors || to.channel != 1) return;
  const uint64_t channels = c.to_channels;
  p->apart = p->map_h * to.row != to.image || p->map_w * to.column != to.row;
  p->by_boxes =
      p->apart ? map_pixels(&p->result, c.dtype, p->to,
                            {channels, uint64_t(p->map_w), uint64_t(p->map_h), uint64_t(c.batch)},
                            {to.column, to.row, to.image})
               : map_tiled<2>(&p->result, c.dtype, p->to, {channels, uint64_t(p->rows)}, {to.column}, {kBox, kBox});
}

// Encodes the tensor maps; false if the driver refuses.
inline bool map_operands(const Conv2dGemm &c, Conv2dWgmma *p) {
  const DType dtype = c.factors();
  const auto box_depth = static_cast<uint32_t>(kBoxRow / itemsize(dtype));
  const int channels = c.channels * c.parts(), out_channels = c.out_channels * c.parts();  // of a pixel
  if (c.hwcn) {
    const uint64_t images = c.batch, out_pixels = uint64_t(c.out_h) * c.out_w;
    const int64_t pitch = Conv2dParams::hwcn_pitch(c.batch), pixel = pitch * channels;
    return map_tiled<3>(&p->a, dtype, c.a, {images, uint64_t(out_channels), out_pixels}, {pitch, pitch * out_channels},
                        {box_depth, kBox, 1}) &&
           map_tiled<4>(&p->b, dtype, c.b, {images, uint64_t(channels), uint64_t(c.width), uint64_t(c.height)},
                        {pitch, pixel, pixel * c.width}, {box_depth, kBox, 1, 1});
  }
  if (c.pass == Conv2dGemm::dweight)
    return map_tiled<2>(&p->a, dtype, c.a, {uint64_t(out_channels), uint64_t(c.pixels())}, {out_channels},
                        {box_depth, kBox}) &&
           map_im2col(&p->b, dtype, c.b, c.batch, c.height, c.width, channels, *p);
  map_result(c, p);
  const bool dx = c.pass == Conv2dGemm::dx;
  if (!(dx ? map_im2col(&p->a, dtype, c.a, c.batch, c.out_h, c.out_w, out_channels, *p)
           : map_im2col(&p->a, dtype, c.a, c.batch, c.height, c.width, channels, *p)))
    return false;
  if (c.narrow) {
    const auto n = static_cast<uint32_t>(c.narrow), bytes = static_cast<uint32_t>(n * itemsize(dtype));
    const CUtensorMapSwizzle swizzle = bytes == 32   ? CU_TENSOR_MAP_SWIZZLE_32B
                                       : bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                     : CU_TENSOR_MAP_SWIZZLE_128B;
    return map_tiled<4>(&p->b, dtype, c.b, {n, n, uint64_t(c.kernel()), uint64_t(c.groups)},
                        {c.b_row, c.b_tap, int64_t{n} * n * c.kernel()}, {n, n, 1, kBoxRow / bytes}, swizzle);
  }
  const bool transposed = dx && dtype == DType::float32;
  if (transposed && c.groups > 1) {
    const uint64_t n = out_channels / c.groups, of_group = channels / c.groups;
    return map_tiled<4>(&p->b, dtype, c.b, {n, of_group, uint64_t(c.kernel()), uint64_t(c.groups)},
                        {c.b_row, c.b_tap, int64_t(n * of_group * c.kernel())}, {box_depth, kBox, 1, 1});
  }
  return map_tiled<3>(&p->b, dtype, c.b,
                      {uint64_t(transposed ? out_channels : channels / c.groups), uint64_t(c.kernel()),
                       uint64_t(transposed ? c.to_channels : c.out_channels)},
                      {c.b_tap, c.b_row}, {box_depth, 1, kBox});
}

template <typename T, Conv2dGemm::Pass kPass, class Tile>
Status launch_wgmma(LaunchSequence &launch, Conv2dWgmma p) {
  constexpr bool kDweight = kPass == Conv2dGemm::dweight;
  p.row_tiles = static_cast<int>(ceil_div(ceil_div(p.rows, kBox), Tile::kRowBoxes));
  p.col_tiles = static_cast<int>(ceil_div(col_boxes(kPass, p, Tile::kColBox), Tile::kColBoxes));
  const int slices = std::max(p.slices, 1), tiles = p.row_tiles * p.col_tiles;
  // Persistent blocks, except where the partial sums take the place of the next tile's stages, and for dweight.
  const bool persistent = slices == 1 && !kDweight;
  const dim3 grid(persistent ? std::min(tiles, kMultiprocessors * Tile::kBlocks) : tiles, 1, slices);
  return launch(conv2d_wgmma_kernel<T, kPass, Tile>, grid, Tile::kThreads, Tile::kShared, kDweight ? 1 : slices, p);
}

template <typename T, class Tile>
Status launch_phases(LaunchSequence &launch, Conv2dPhases p) {
  int tiles = 0;
  for (int i = 0; i < p.count; ++i) {
    Conv2dWgmma &phase = p.phase[i];
    phase.row_tiles = static_cast<int>(ceil_div(ceil_div(phase.rows, kBox), Tile::kRowBoxes));
    phase.col_tiles = static_cast<int>(ceil_div(ceil_div(phase.columns, Tile::kColBox), Tile::kColBoxes));
    p.first_tile[i] = tiles, tiles += phase.row_tiles * phase.col_tiles;
  }
  // Blocks that go on to other tiles do not start in the order in which multiprocessors are free.
  const int blocks = Tile::kOutBoxes > 0 ? std::min(tiles, kMultiprocessors * Tile::kBlocks) : tiles;
  return launch(conv2d_wgmma_phases_kernel<T, Tile>, blocks, Tile::kThreads, Tile::kShared, 1, p);
}

}  // namespace AOT_ISA
}  // namespace aot
