// The mainloop of products of 16-bit matrices on tensor cores, for compute capability 8.0 and later: mma.sync, fed by
// cp.async and ldmatrix. A block keeps a tile of the result in registers, in float32, and loads the next kStages - 1
// steps' operands to shared memory while it multiplies one step's.
#pragma once
#include <type_traits>

#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "tile.cuh"

namespace aot {
inline namespace AOT_ISA {

// ------------------------------------------------------------------------------------------------------------ shapes

// A tile of kM x kN results, whose columns are kGroupsN parts. kWarpsM x kWarpsN warps; a warp has the same columns of
// every part. kStages steps of kDepth terms in shared memory; kBlocks: blocks for which a multiprocessor must have
// room.
template <int kM_, int kN_, int kGroupsN_, int kWarpsM, int kWarpsN, int kStages_, int kBlocks_>
struct MmaTile {
  static constexpr int kM = kM_, kN = kN_, kDepth = 64, kGroupsN = kGroupsN_, kStages = kStages_, kBlocks = kBlocks_;
  static constexpr int kPartN = kN / kGroupsN, kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kWarpM = kM / kWarpsM, kWarpN = kPartN / kWarpsN;       // of a warp, kWarpN in each part
  static constexpr int kRows = kWarpM / 16, kColumns = kWarpN / 8 * kGroupsN;  // results of mma
  static constexpr int kShared = kStages * (kM + kN) * kDepth * 2;
  static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0 && kM % 64 == 0 && kN % 64 == 0, "whole fragments and rows");

  __device__ static int warp_row() { return warp_index() / kWarpsN * kWarpM; }
  __device__ static int warp_column() { return warp_index() % kWarpsN * kWarpN; }
  // Row and first column of pair `half` of result (i, j), within part j / (kWarpN / 8) of the columns.
  __device__ static int row(int i, int half) { return warp_row() + i * 16 + half * 8 + lane_index() / 4; }
  __device__ static int column(int j) { return warp_column() + j % (kWarpN / 8) * 8 + lane_index() % 4 * 2; }
};

// value[i][j]: two columns of row(i, 0), then the same columns of row(i, 1).
template <class Shape>
struct MmaSums {
  float value[Shape::kRows][Shape::kColumns][4];
};

// ------------------------------------------------------------------------------------------------------ instructions

// Loads four 8 x 8 matrices, transposed or not. Each lane gives the address of one row.
template <bool kTransposed>
__device__ inline void ldmatrix(uint32_t (&m)[4], uint32_t row) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(row)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(row)
                 : "memory");
#endif
}

template <typename T>
__device__ inline void mma_sync(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, __half>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// ---------------------------------------------------------------------------------------------------------- operands

// Offset of a packet of 16 bytes in a stage whose lines have kPackets packets. The swizzle (XOR) places the packets of
// eight neighbouring lines in different banks, so that ldmatrix has no bank conflicts.
template <int kPackets>
__device__ inline uint32_t packet_offset(int line, int packet) {
  return (line * kPackets + (packet ^ line % 8)) * 16;
}

// Loads an operand with kWidth rows (or columns) of the result, step by step, to a stage of shared memory. kKMajor: the
// summed axis is contiguous in memory, and a stage has a line for each row; otherwise a line for each term.
template <typename T, class Shape, int kWidth_, bool kKMajor_>
struct MmaLoader {
  static constexpr int kWidth = kWidth_;
  static constexpr bool kKMajor = kKMajor_;
  static constexpr int kPackets = (kKMajor ? Shape::kDepth : kWidth) / 8;  // of a line
  static constexpr int kLoads = kWidth * Shape::kDepth / 8 / Shape::kThreads;
  static constexpr int kBytes = kWidth * Shape::kDepth * 2;
  static_assert(kWidth * Shape::kDepth / 8 % Shape::kThreads == 0, "every thread has as many");
  const T *from[kLoads];
  int64_t advance, left;

  // f(i, line, packet) for each of this thread's packets.
  template <class F>
  __device__ static void each(F f) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      int packet = threadIdx.x + i * Shape::kThreads;
      f(i, packet / kPackets, packet % kPackets);
    }
  }
  // As TileLoader::begin (tile.cuh).
  template <class Address>
  __device__ void begin(int64_t depth, int64_t advance_, Address address) {
    left = depth, advance = advance_;
    each([&](int i, int line, int packet) {
      from[i] = kKMajor ? address(line, packet * 8) : address(packet * 8, line);
    });
  }
  __device__ void fetch(uint32_t stage) {
    const bool whole = left >= Shape::kDepth;
    each([&](int i, int line, int packet) {
      bool present = whole || (kKMajor ? packet * 8 : line) < left;
      copy_async(stage + packet_offset<kPackets>(line, packet), from[i], present);
      from[i] += advance;
    });
    left -= Shape::kDepth;
  }
  // The four matrices of 16 rows from `at` by 16 terms from `term`, rows first if kRowsFirst, else terms first.
  template <bool kRowsFirst>
  __device__ static void load(uint32_t (&m)[4], uint32_t stage, int at, int term) {
    const int group = lane_index() / 8, inner = lane_index() % 8;
    at += (kRowsFirst ? group % 2 : group / 2) * 8, term += (kRowsFirst ? group / 2 : group % 2) * 8;
    ldmatrix<!kKMajor>(m, stage + (kKMajor ? packet_offset<kPackets>(at + inner, term / 8)
                                           : packet_offset<kPackets>(term + inner, at / 8)));
  }
};

// ------------------------------------------------------------------------------------------------------------ product

// As simt_mainloop (tile.cuh). memory: Shape::kShared bytes.
template <class Left, class Right, typename T, class Shape, class Begin>
__device__ inline void mma_mainloop(T *memory, MmaSums<Shape> &sum, int64_t first, int64_t second, Begin begin) {
  Left left;
  Right right;
  const int64_t steps = first + second;
  if (steps == 0) return;
  const uint32_t base = shared_address(memory);
  auto stage_of = [&](int64_t step) {
    return static_cast<uint32_t>(step % Shape::kStages) * (Left::kBytes + Right::kBytes);
  };
  auto fetch = [&](int64_t step) {
    if (step < steps) {
      if (step == first) begin(1, left, right);
      left.fetch(base + stage_of(step)), right.fetch(base + stage_of(step) + Left::kBytes);
    }
    commit_copies();
  };
  begin(0, left, right);
  for (int step = 0; step < Shape::kStages - 1; ++step) fetch(step);
  constexpr int kInPart = Shape::kWarpN / 8;
#pragma unroll 1
  for (int64_t step = 0; step < steps; ++step) {
    wait_copies<Shape::kStages - 2>();
    __syncthreads();
    fetch(step + Shape::kStages - 1);
    const uint32_t left_stage = base + stage_of(step), right_stage = left_stage + Left::kBytes;
#pragma unroll
    for (int k = 0; k < Shape::kDepth; k += 16) {
      uint32_t a[Shape::kRows][4];
#pragma unroll
      for (int i = 0; i < Shape::kRows; ++i) Left::template load<true>(a[i], left_stage, Shape::warp_row() + i * 16, k);
#pragma unroll
      for (int j = 0; j < Shape::kColumns; j += 2) {
        uint32_t b[4];
        Right::template load<false>(b, right_stage,
                                    j / kInPart * Shape::kPartN + Shape::warp_column() + j % kInPart * 8, k);
#pragma unroll
        for (int i = 0; i < Shape::kRows; ++i) {
          mma_sync<T>(sum.value[i][j], a[i], b[0], b[1]);
          mma_sync<T>(sum.value[i][j + 1], a[i], b[2], b[3]);
        }
      }
    }
  }
  wait_copies<0>();
}

}  // namespace AOT_ISA
}  // namespace aot
