// The mainloop of matrix products on the ordinary cores (SIMT), summed in the accumulate type. A block keeps a tile of
// the result in registers and steps along the summed axis; operands pass through two stages of shared memory, of which
// one is loaded while the other is multiplied.
#pragma once
#include "cuda/async.cuh"
#include "cuda/launch.cuh"
#include "cuda/packet.cuh"
#include "cuda/reduce.cuh"

namespace aot {
inline namespace AOT_ISA {

// ------------------------------------------------------------------------------------------------------------ shapes

// A tile of kM x kN results, kDepth terms a step. A thread computes 4 rows in each of kGroupsM parts of the tile, and 4
// columns in each of kGroupsN parts. A warp is 4 x 8 threads, in which pairs of lanes share columns: that halves the
// time to load a fragment. kUnroll: terms unrolled; kBlocks: blocks for which a multiprocessor must have registers.
template <int kM_, int kN_, int kDepth_, int kGroupsM_, int kGroupsN_, int kBlocks_, int kUnroll_>
struct SimtTile {
  static constexpr int kM = kM_, kN = kN_, kDepth = kDepth_, kGroupsM = kGroupsM_, kGroupsN = kGroupsN_;
  static constexpr int kBlocks = kBlocks_, kUnroll = kUnroll_;
  static constexpr int kPartM = kM / kGroupsM, kPartN = kN / kGroupsN, kRows = 4 * kGroupsM, kColumns = 4 * kGroupsN;
  static constexpr int kThreads = kPartM / 4 * (kPartN / 4);
  static constexpr int kStrideM = kM + 4, kStrideN = kN + 4;  // in shared memory, padded against bank conflicts
  static_assert(kPartM % 16 == 0 && kPartN % 32 == 0, "whole warps");
};

// This thread's first row and column in the tile.
template <class Shape>
__device__ inline int first_row() {
  int row = lane_index() / 16 * 2 + lane_index() % 2;
  return (warp_index() / (Shape::kPartN / 32) * 4 + row) * 4;
}
template <class Shape>
__device__ inline int first_column() {
  int column = lane_index() / 2 % 8;
  return (warp_index() % (Shape::kPartN / 32) * 8 + column) * 4;
}

template <class Shape, typename A>
struct TileSums {
  A value[Shape::kRows][Shape::kColumns];
};

// ----------------------------------------------------------------------------------------------------------- operands

// Loads an operand with kWidth rows (or columns) of the result, step by step, to a stage of shared memory, (kDepth,
// kWidth). kKMajor: the summed axis is contiguous in memory, and elements are copied one by one; otherwise the other
// axis is, and packets of kSize_ are copied.
template <typename T, class Shape, int kWidth, bool kKMajor_, int kSize_>
struct TileLoader {
  using A = Accumulate<T>;
  static constexpr bool kKMajor = kKMajor_;
  static constexpr int kSize = kKMajor ? 1 : kSize_, kStride = kWidth + 4;
  // Neighbouring threads load kAlong contiguous packets: a sector of a row, or a whole line.
  static constexpr int kAlong = kKMajor ? 8 : kWidth / kSize, kPackets = kWidth * (kKMajor ? 8 : Shape::kDepth / kSize);
  static constexpr int kLoads = (kPackets + Shape::kThreads - 1) / Shape::kThreads,
                       kTerms = kKMajor ? Shape::kDepth : 1;
  static_assert(!kKMajor || Shape::kDepth % 8 == 0, "whole sectors");
  const T *from[kLoads];
  int64_t advance, left;

  // f(i, at, depth) for each of this thread's packets.
  template <class F>
  __device__ static void each(F f) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      int packet = threadIdx.x + i * Shape::kThreads, side = packet % kAlong, line = packet / kAlong;
      if (kPackets % Shape::kThreads && packet >= kPackets) continue;
      f(i, kKMajor ? line : side * kSize, kKMajor ? side : line);
    }
  }
  // Starts at address(at, depth) for each packet; `depth` terms follow, in steps `advance_` elements apart. Rows and
  // columns outside of the result may be given any valid address: their sums are not stored.
  template <class Address>
  __device__ void begin(int64_t depth, int64_t advance_, Address address) {
    left = depth, advance = advance_;
    each([&](int i, int at, int depth) { from[i] = address(at, depth); });
  }
  __device__ void fetch(A *tile) {
    if (left >= Shape::kDepth) copy(tile, [](int) { return true; });
    else copy(tile, [&](int depth) { return depth < left; });
    left -= Shape::kDepth;
  }

 private:
  template <class Present>
  __device__ void copy(A *tile, Present present) {
    each([&](int i, int at, int depth) {
#pragma unroll
      for (int k = 0; k < kTerms; k += 8) {
        A *to = tile + (depth + k) * kStride + at;
        if constexpr (std::is_same_v<T, A>)
          copy_async<kSize * sizeof(T)>(shared_address(to), from[i] + k, present(depth + k));
        else
          for (int l = 0; l < kSize; ++l) to[l] = present(depth + k) ? widen(from[i][k + l]) : A(0);
      }
      from[i] += advance;
    });
  }
};

// ------------------------------------------------------------------------------------------------------------ product

template <class Shape, typename A>
struct TileStages {
  struct alignas(16) Stage {
    A left[Shape::kDepth * Shape::kStrideM], right[Shape::kDepth * Shape::kStrideN];
  } buffer[2];
};

template <int kGroups, int kPart, typename A>
__device__ inline void load_fragment(A (&fragment)[4 * kGroups], const A *line) {
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    Packet<A, 4> part = *reinterpret_cast<const Packet<A, 4> *>(line + g * kPart);
#pragma unroll
    for (int i = 0; i < 4; ++i) fragment[4 * g + i] = part.value[i];
  }
}

// sum += left right, over `steps` steps. begin(left, right) starts the loaders.
template <class Left, class Right, class Shape, typename A, class Begin>
__device__ inline void simt_mainloop(TileStages<Shape, A> &stages, TileSums<Shape, A> &sum, int64_t steps,
                                     Begin begin) {
  Left left;
  Right right;
  auto fetch = [&](int64_t step) {
    auto &stage = stages.buffer[step & 1];
    left.fetch(stage.left), right.fetch(stage.right);
    commit_copies();
  };
  if (steps == 0) return;
  begin(left, right);
  fetch(0);
#pragma unroll 1
  for (int64_t step = 0; step < steps; ++step) {
    wait_copies<0>();
    __syncthreads();
    if (step + 1 < steps) fetch(step + 1);
    const auto &stage = stages.buffer[step & 1];
    const A *left_line = stage.left + first_row<Shape>(), *right_line = stage.right + first_column<Shape>();
    A a[2][Shape::kRows], b[2][Shape::kColumns];
    auto load = [&](int k) {
      load_fragment<Shape::kGroupsM, Shape::kPartM>(a[k % 2], left_line + k * Shape::kStrideM);
      load_fragment<Shape::kGroupsN, Shape::kPartN>(b[k % 2], right_line + k * Shape::kStrideN);
    };
    load(0);
#pragma unroll(Shape::kUnroll)
    for (int k = 0; k < Shape::kDepth; ++k) {
      if (k + 1 < Shape::kDepth) load(k + 1);
      // Down one column and up the next, so that consecutive multiply-adds share an operand: the operand cache saves a
      // register read, of which a cycle has two.
#pragma unroll
      for (int j = 0; j < Shape::kColumns; ++j)
#pragma unroll
        for (int l = 0; l < Shape::kRows; ++l) {
          const int i = j % 2 ? Shape::kRows - 1 - l : l;
          sum.value[i][j] += a[k % 2][i] * b[k % 2][j];
        }
    }
  }
}

}  // namespace AOT_ISA
}  // namespace aot
