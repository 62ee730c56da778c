// Products a^T b of 16-bit matrices on Hopper of which a's lines begin anywhere and b's are aligned, and the sums of
// a's columns: the gradients of a weight and of a bias.
//
// Every eighth line of a begins alike, so each of eight classes of lines has a tensor map, whose base is rounded down
// to the 16 bytes that TMA wants: its elements come `shift` columns later than they should. wgmma would want them in
// place in shared memory. But as its first operand it takes registers, which ldmatrix fills: a lane has elements of
// column lane / 4 of eight, and takes those of `shift` columns on from another lane.
//
//   a, step of 64 terms    for each class 8 lines of 136 elements, of which a tile's 128 begin at `shift`. The lines
//                          are 272 bytes apart, so that ldmatrix has no bank conflicts
//   b                      the same lines of each class, of 256 columns: 4 atoms of 8 lines of 128 bytes, swizzled. A
//                          block of a pair loads half of the classes for both
//   warpgroups 0 and 1     64 columns of a by 256 of b each: a in registers, b MN-major. While the products of a step
//                          run, the next step's operands are brought to registers, and added up for the columns' sums
//   warpgroup 2            a thread loads
//
// A pair's blocks have neighbouring rows of c. Where there are few tiles, blocks take slices of the sums, which another
// kernel adds.
#include "cuda/mma.cuh"
#include "cuda/pair.cuh"
#include "cuda/sum_slices.cuh"
#include "cuda/wgmma.cuh"
#include "gemm_odd_lines.h"
#include "row_stores.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

constexpr int kRows = kOddRowsOfT, kCols = kOddColumnsOfT, kStages = 4;
constexpr int kClassLines = 8, kTerms = kLineClasses * kClassLines;  // of a step
constexpr int kBox = 64, kColBoxes = kCols / kBox, kAtom = kClassLines * kBox * 2;
constexpr int kLine = kRows + 8, kLineBytes = kLine * 2;                        // of a, as loaded
constexpr int kBytesA = kClassLines * kLineBytes, kBytesB = kColBoxes * kAtom;  // of a class
constexpr int kStageBytes = kLineClasses * (kBytesA + kBytesB);
constexpr int kPiece = 64;  // columns that a warp stores at once

struct OddLinesOfT {
  CUtensorMap a[kLineClasses], b[kLineClasses];
  int shift[kLineClasses];
  int rows, columns, steps;  // of c; of the sum, an even number
  int across, items;         // tiles of b's columns; pairs of tiles, and slices of those in slices
  int whole, slices;         // pairs whose sums are taken at once; slices of those behind them
  int64_t c_stride;
  void *c, *column_sums;
  int first_sliced;                // row of c
  float *partials, *partial_sums;  // (slices, rows from that one on, columns) and (slices, rows)
};
static_assert(sizeof(OddLinesOfT) <= 4096, "what a kernel takes");

struct Shared {
  uint8_t b[kStages][kLineClasses * kBytesB];  // swizzled in units of 1024 bytes
  uint8_t a[kStages][kLineClasses * kBytesA];
  RowStores<__half, kPiece>::Words words[4 * kPairGroups];  // of each warp
  uint64_t full[kStages], empty[kStages];
};
constexpr int kShared = sizeof(Shared);
static_assert(kShared <= 232448, "what a block may request");

#ifdef CUTE_ARCH_MMA_SM90A_ENABLED

// Does what __shfl_sync does, with which the compiler makes the products of a loop around it wait for one another.
__device__ inline uint32_t of_lane(uint32_t x, int lane) {
  uint32_t y;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, 0xffffffff;" : "=r"(y) : "r"(x), "r"(lane));
  return y;
}

template <typename T>
struct OddLinesOfTBlock {
  using Stores = RowStores<T, kPiece>;
  using Sums = float[kCols / 2];
  using Operand = uint32_t[kTerms / 16][4];  // a's of a step, as wgmma takes them
  struct ColumnSums {
    float value[2] = {};  // of columns lane / 4 and lane / 4 + 8 of a warp's 16
  };

  const OddLinesOfT &p;
  Shared &shared;
  int rank;  // of the block in its pair

  struct Item {
    int row, column;         // of c
    int slice, first, last;  // -1, if it is all of the sum; its steps, an even number
  };
  template <class F>
  __device__ void each_item(F f) const {
    for (int i = blockIdx.x / kPair; i < p.items; i += gridDim.x / kPair) {
      const int behind = i - p.whole, tile = behind < 0 ? i : p.whole + behind / p.slices, count = p.steps / 2;
      Item at = {(tile / p.across * kPair + rank) * kRows, tile % p.across * kCols, -1, 0, p.steps};
      if (behind >= 0)
        at.slice = behind % p.slices, at.first = count * at.slice / p.slices * 2,
        at.last = count * (at.slice + 1) / p.slices * 2;
      f(at);
    }
  }

  // ------------------------------------------------------------------------------------------------ the loading thread

  __device__ void load_items() const {
    constexpr int kOwn = kLineClasses / kPair;  // classes of b that the block loads, for both
    RingPlace<kStages> place;
    each_item([&](const Item &at) {
#pragma unroll 1
      for (int step = at.first; step < at.last; ++step, place.next()) {
        uint64_t *full = &shared.full[place.stage];
        const uint32_t a = shared_address(shared.a[place.stage]);
        const uint32_t b = shared_address(shared.b[place.stage]) + rank * kOwn * kBytesB;
        mbarrier_wait(&shared.empty[place.stage], place.round % 2 ^ 1);
        mbarrier_expect(full, kStageBytes);
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
          tma_load_for_pair(p.b[rank * kOwn + i], b + i * kBytesB, full, 0, step * kClassLines, at.column / kBox);
#pragma unroll
        for (int i = 0; i < kLineClasses; ++i) tma_load(p.a[i], a + i * kBytesA, full, at.row, step * kClassLines);
      }
    });
  }

  // ------------------------------------------------------------------------------------------ warpgroups that multiply

  __device__ void compute_items(int group) const {
    RingPlace<kStages> place;
    const int lane = threadIdx.x % 32, first = group * 64 + threadIdx.x / 32 % 4 * 16;  // the warp's row of the tile
    each_item([&](const Item &at) {
      Sums sum;
      const bool adds = p.column_sums && at.column == 0;
      ColumnSums column_sums;
      if (adds) mainloop<true>(first, at.last - at.first, place, sum, column_sums);
      else mainloop<false>(first, at.last - at.first, place, sum, column_sums);
      const int row = at.row + first;
      if (adds) store_column_sums(column_sums, at.slice, row + lane / 4);
      if (at.slice >= 0) return store_slice(at, row + lane / 4, sum);
      const Stores stores{shared.words[threadIdx.x / 32], p.c_stride};
      T *to = static_cast<T *>(p.c) + row * p.c_stride + at.column;
#pragma unroll
      for (int j = 0; j < kCols / kPiece; ++j) {
        float v[kPiece / 2];
#pragma unroll
        for (int e = 0; e < kPiece / 2; ++e) v[e] = sum[j * kPiece / 2 + e];
        if (at.column + j * kPiece < p.columns)
          stores.store(v, to + j * kPiece, p.rows - row, p.columns - at.column - j * kPiece);
      }
    });
  }

  __device__ void store_slice(const Item &at, int row, const Sums &sum) const {
    const int64_t rows = p.rows - p.first_sliced;
#pragma unroll
    for (int half = 0; half < 2; ++half, row += 8) {
      if (row >= p.rows) return;
      float *to = p.partials + (at.slice * rows + row - p.first_sliced) * p.columns + at.column;
#pragma unroll
      for (int j = 0; j < kCols / 8; ++j) {
        const int column = 8 * j + threadIdx.x % 4 * 2;
        if (at.column + column < p.columns)
          *reinterpret_cast<float2 *>(to + column) = make_float2(sum[4 * j + 2 * half], sum[4 * j + 2 * half + 1]);
      }
    }
  }

  // Two steps at once, so that the operands of each have registers of their own.
  template <bool kAdds>
  __device__ void mainloop(int first, int steps, RingPlace<kStages> &place, Sums &sum, ColumnSums &column_sums) const {
    Operand operands[2];
    int before = 0;
#pragma unroll 1
    for (int step = 0; step < steps; step += 2)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        bring<kAdds>(first, place, operands[i], column_sums);
        multiply(place.stage, operands[i], sum, step + i > 0);
        wgmma_wait<1>();
        if (step + i > 0) release(before);
        before = place.stage;
        place.next();
      }
    wgmma_wait<0>();
    fence_registers(sum);
    release(before);
  }

  __device__ void release(int stage) const {
    const int other = threadIdx.x % 32;
    if (other < kPair) arrive_in_block(&shared.empty[stage], other);
  }

  __device__ void multiply(int stage, Operand &operand, Sums &sum, bool add) const {
    const uint64_t b = wgmma_descriptor(shared_address(shared.b[stage]), kAtom, kBytesB);
    fence_registers(sum), fence_registers(operand);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < kTerms / 16; ++k)  // 16 terms are two classes' lines
      Wgmma<T, kCols, false, true>::run(operand[k], b + k * (2 * kBytesB / 16), sum, add || k > 0);
    wgmma_end();
    fence_registers(sum);
  }

  // A step's operand for the 16 columns of a from the warp's `first` on.
  template <bool kAdds>
  __device__ void bring(int first, const RingPlace<kStages> &place, Operand &to, ColumnSums &column_sums) const {
    const int lane = threadIdx.x % 32;
    mbarrier_wait(&shared.full[place.stage], place.round % 2);
    const uint32_t a = shared_address(shared.a[place.stage]) + lane % 8 * kLineBytes + first * 2;
    // ldmatrix: the first 16 of a warp's 24 columns in lines of two classes; the last 8 in lines of four.
    const uint32_t front = a + lane / 16 * kBytesA + lane / 8 % 2 * 16, back = a + lane / 8 * kBytesA + 32;
    ColumnSums of_step;
#pragma unroll
    for (int k = 0; k < kTerms / 16; k += 2) {
      uint32_t low[2][4], high[4];
      load_transposed_matrices(low[0], front + k * 2 * kBytesA);
      load_transposed_matrices(low[1], front + (k + 1) * 2 * kBytesA);
      load_transposed_matrices(high, back + k * 2 * kBytesA);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int shift = p.shift[2 * k + i], from = lane + 4 * shift;
        const bool own = lane >= 4 * shift;  // whether the lane that takes this one's elements wants the same 8 columns
        uint32_t *parts = &low[i / 2][i % 2 * 2], *at = &to[k + i / 2][i % 2 * 2];
        at[0] = of_lane(own ? parts[0] : parts[1], from);
        at[1] = of_lane(own ? parts[1] : high[i], from);
        if constexpr (kAdds)
#pragma unroll
          for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int e = 0; e < 2; ++e) of_step.value[half] += widen(reinterpret_cast<const T(&)[2]>(at[half])[e]);
      }
    }
    if constexpr (kAdds)
#pragma unroll
      for (int half = 0; half < 2; ++half) column_sums.value[half] += of_step.value[half];
  }

  // The four lanes of a column have different terms.
  __device__ void store_column_sums(const ColumnSums &sums, int slice, int row) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float all = sums.value[half];
      all += __shfl_xor_sync(~0u, all, 1);
      all += __shfl_xor_sync(~0u, all, 2);
      const int at = row + 8 * half;
      if (threadIdx.x % 4 || at >= p.rows) continue;
      if (slice < 0) static_cast<T *>(p.column_sums)[at] = narrow<T>(all);
      else p.partial_sums[slice * (p.rows - p.first_sliced) + at - p.first_sliced] = all;
    }
  }
};

#endif

template <typename T>
__global__ void __launch_bounds__(kPairThreads, 1) gemm_odd_lines_of_t_kernel(const __grid_constant__ OddLinesOfT p) {
#ifdef CUTE_ARCH_MMA_SM90A_ENABLED
  extern __shared__ __align__(1024) uint8_t dynamic[];
  Shared &shared = *reinterpret_cast<Shared *>(dynamic);
  run_pair<OddLinesOfTBlock<T>>(p, shared, 4 * kPairGroups * kPair);  // each warp arrives
#else
  __trap();  // compiled for other architectures, never launched there
#endif
}

}  // namespace

Status gemm_odd_lines_of_t_sm90(const char *op, const GemmParams &g, void *column_sums, int multiprocessors,
                                cudaStream_t stream, bool *done) {
  *done = false;
  if (!TensorMaps::get().tiled) return kOk;
  OddLinesOfT p = {};
  p.rows = static_cast<int>(g.m), p.columns = static_cast<int>(g.n);
  p.steps = static_cast<int>(ceil_div(g.k, 2 * kTerms)) * 2;
  p.c = g.c.data, p.c_stride = g.c.stride, p.column_sums = column_sums;
  for (int i = 0; i < kLineClasses; ++i) {
    p.shift[i] = first_of_class(g.a, i);
    const auto lines = static_cast<uint64_t>(ceil_div(g.k - i, kLineClasses));
    const uint16_t *a = static_cast<const uint16_t *>(g.a.data) + i * g.a.stride - p.shift[i],
                   *b = static_cast<const uint16_t *>(g.b.data) + i * g.b.stride;
    if (!map_tiled<2>(&p.a[i], g.dtype, a, {uint64_t(g.m + p.shift[i]), lines}, {kLineClasses * g.a.stride},
                      {kLine, kClassLines}, CU_TENSOR_MAP_SWIZZLE_NONE) ||
        !map_tiled<3>(&p.b[i], g.dtype, b, {kBox, lines, uint64_t(ceil_div(g.n, kBox))},
                      {kLineClasses * g.b.stride, kBox}, {kBox, kClassLines, kColBoxes}))
      return kOk;
  }
  const OddLinesPlan plan = odd_lines_plan(g, multiprocessors);
  p.across = static_cast<int>(plan.across), p.whole = static_cast<int>(plan.whole), p.slices = plan.slices;
  p.items = static_cast<int>(plan.whole + (plan.pairs - plan.whole) * plan.slices);
  const int64_t first = std::min(g.m, plan.whole / plan.across * kPair * kRows), rows = g.m - first;
  p.first_sliced = static_cast<int>(first);
  if (rows) p.partials = static_cast<float *>(g.workspace), p.partial_sums = p.partials + plan.slices * rows * g.n;
  *done = true;
  auto run = [&](auto type) {
    using T = decltype(type);
    const unsigned blocks = std::min(p.items, multiprocessors / kPair) * kPair;
    AOT_TRY(launch_kernel(op, gemm_odd_lines_of_t_kernel<T>, {blocks, kPairThreads, kShared, kPair}, stream, p));
    if (!rows) return kOk;
    T *c = static_cast<T *>(p.c) + first * g.c.stride, *sums = static_cast<T *>(column_sums);
    AOT_TRY(sum_slices<float>(op, p.partials, p.slices, c, rows * g.n, stream));
    return sums ? sum_slices<float>(op, p.partial_sums, p.slices, sums + first, rows, stream) : kOk;
  };
  return g.dtype == DType::bfloat16 ? run(__nv_bfloat16()) : run(__half());
}

}  // namespace AOT_ISA
}  // namespace aot
