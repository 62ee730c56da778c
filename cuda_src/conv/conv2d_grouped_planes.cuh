// conv2d_grouped.cuh's passes y and dx for kernels of three rows, undilated along them, beside those of
// conv2d_grouped_columns.cuh, and with its units of positions and its weight:
//
//   stride 2        y in 16 bits, TF32 and float32. A window in shared memory is two planes, of its even and of its odd
//                   columns: of an element of the kernel 8 positions in a row meet 8 neighbours of a plane, which
//                   ldmatrix reads without conflicts. Pixels 2 apart would share banks.
//   stride 1        y and dx in float32 as three products of TF32.
//
// Rows of the source are read for each row of the kernel, of which with stride 2 only one of two is another's.
#pragma once
#include "conv2d_grouped_columns.cuh"

namespace aot {
inline namespace AOT_ISA {

// call.source and call.other: maps of the planes. A block loads the window of the tile after next as soon as its warps
// have read a tile's, before they write that one's results.
template <typename T, int kEights, bool kWhole, int kStep, bool kThree>
__global__ void __launch_bounds__(256, kEights == 1 && !kThree ? 3 : 2)
    grouped_planes_kernel(const __grid_constant__ GroupedColumns call, const T *source, const uint2 *weight,
                          const T *bias, T *result) {
  constexpr int kUnit = kGroupedUnit, kRows = 3, kPerRound = kWhole ? 2 : 4, kParts = kThree ? 2 : 1;
  constexpr int kHalves = kThree && kEights == 3 ? 2 : 1, kSixteens = 2 / kHalves;
  constexpr int kVector = kVectorSize<T>, kSize = sizeof(T), kTerms = 2 * kVector / kPerRound;
  constexpr bool kPlanes = kStep == 2;
  extern __shared__ __align__(128) char boxes[];
  __shared__ uint64_t full[2];
  const GroupedCall &c = call.c;
  const Grouped &g = c.g;
  const GroupedBlock block(g, blockIdx.y);
  const int lane = lane_index(), windows = g.boxes(), stages = g.chunks > 1 ? 2 : 1;
  const int chunk_bytes = g.block_groups * g.chunk_words() * 4, rounds = g.steps() / kRows;
  char *const weights = boxes + 2 * windows, *const staged = weights + stages * chunk_bytes;
  int2 *const spots = reinterpret_cast<int2 *>(staged + g.staged() * kUnit * g.result_pixel);
  int *const zeros = reinterpret_cast<int *>(spots + g.units * kUnit);
  int *const offsets = zeros + 4;
  int2 *const pixels = reinterpret_cast<int2 *>(offsets + (rounds * kPerRound + 1) / 2 * 2);
  GroupedStages pipeline(full);
  // where terms of a row of the kernel are, from a position on; -1: there are none
  for (int i = threadIdx.x; i < rounds * kPerRound; i += blockDim.x) {
    const GroupedPhase &w = g.w.phase[0];
    const int tap = i * kTerms / g.chunk, column = tap * g.w.unit + w.first - g.w.lowest;
    const int plane = kPlanes && column % 2 ? g.plane() : 0;
    offsets[i] = tap < w.taps ? plane + column / kStep * g.pixel + (i * kTerms - tap * g.chunk) * kSize : -1;
  }
  if (!kGroupedTma) write_pixels<kPlanes>(c, pixels);
  if (threadIdx.x < 4) zeros[threadIdx.x] = 0;
  auto row_of = [&](int position) { return position / kUnit / g.columns * 4 + position % kUnit / 8; };
  auto column_of = [&](int position) { return position / kUnit % g.columns * 8 + position % 8; };
  for (int i = threadIdx.x; i < g.units * kUnit; i += blockDim.x) {
    const int row = row_of(i), col = column_of(i);
    spots[i] = {(row * g.w.result + col) * g.result_pitch, row << 16 | col};
  }

  const int unit = warp_index() % g.units, share = warp_index() / g.units, shares = blockDim.x / 32 / g.units;
  const int line = g.window_w / kStep * g.pixel;  // bytes
  // of ldmatrix, a lane's row is a pixel of the first or the second row, and the first or the second 8 terms
  const int first = unit * kUnit + (kWhole ? lane % 16 : lane / 4);
  const int place = row_of(first) * kStep * line + column_of(first) * (kPlanes ? 1 : g.w.step) * g.pixel;
  const int tasks = g.chunks > 1 ? 1 : block.groups * g.pieces * kHalves, most_tasks = (tasks + shares - 1) / shares;
  const bool by_blocks = g.by_blocks();
  const int map_group = by_blocks ? blockIdx.y / g.parts : g.chunks > 1 ? block.group : 0;

  const unsigned tiles = static_cast<unsigned>(g.tiles());
  __syncthreads();
  wait_for_kernel_before();
  auto load = [&](unsigned index, int chunk, int stage) {
    const GroupedTile tile(g, index);
    const int channel = block.first_channel(g, chunk) / kVector * kVector;
    const bool weight_too = g.chunks > 1 || index == blockIdx.x;
    const int64_t at = (int64_t{block.group} * g.parts + block.part) * g.part_words() + chunk * g.chunk_words();
    const char *from = reinterpret_cast<const char *>(weight) + at * 4;
    const int bytes = weight_too ? block.groups * g.chunk_words() * 4 : 0;
    const uint32_t window = shared_address(boxes) + stage * windows;
    const uint32_t to = shared_address(weights) + (g.chunks > 1 ? stage * chunk_bytes : 0);
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x > 0) return;
    mbarrier_expect(&full[stage], g.windows() + bytes);
    const int map_channel = by_blocks ? 0 : g.chunks > 1 ? chunk * g.chunk : channel;
    const int row = tile.row * kStep + g.h.lowest;
    if constexpr (kPlanes) {
      tma_load(call.source, window, &full[stage], map_channel, map_group, tile.column + (g.w.lowest >> 1), row,
               tile.image);
      tma_load(call.other, window + g.plane(), &full[stage], map_channel, map_group,
               tile.column + ((g.w.lowest + 1) >> 1), row, tile.image);
    } else {
      tma_load(call.source, window, &full[stage], map_channel, map_group, tile.column * g.w.step + g.w.lowest, row,
               tile.image);
    }
    if (bytes) bulk_load(to, from, bytes, &full[stage]);
#else
    load_window<T, kPlanes>(c, tile, source, pixels, channel, g.chunks > 1 ? (block.group + 1) * g.in : g.source_pitch,
                            window);
    for (int i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16) copy_async(to + i, from + i, true);
#endif
  };

  GroupedSum<kThree> sums[kSixteens][kEights];
  unsigned ahead = blockIdx.x;
  int ahead_chunk = 0;
  auto load_ahead = [&](int stage) {
    if (ahead < tiles) load(ahead, ahead_chunk, stage);
    if (!kGroupedTma) commit_copies();
    if (++ahead_chunk == g.chunks) ahead_chunk = 0, ahead += gridDim.x;
  };
  load_ahead(0), load_ahead(1);
  int chunk = 0, stage = 0;
  for (unsigned index = blockIdx.x; index < tiles; stage ^= 1) {
    pipeline.wait();
    const GroupedTile tile(g, index);
    const uint32_t window = shared_address(boxes) + stage * windows + block.first_channel(g, chunk) % kVector * kSize;
    const char *const operands = weights + (g.chunks > 1 ? stage * chunk_bytes : 0);

    // sums of a group's 8s of results from `piece` on, for a half of the unit
    auto add = [&](int group, int piece, int half) {
      const uint32_t from = window + group * g.in * kSize + place + half * 2 * kStep * line;
      const uint2 *b_at =
          reinterpret_cast<const uint2 *>(operands + group * g.chunk_words() * 4) + piece * kEights * 32 + lane;
      const int b_step = g.pieces * kEights * 32;
      const int *at = offsets + (kWhole ? lane / 16 : lane % 4);
      uint32_t a[2][kSixteens][kParts][4];  // a step's operands are loaded while the step before is multiplied
      uint32_t row = 0;
      int apart = 0;
      auto next_round = [&] {
        const int offset = *at;
        row = offset < 0 ? shared_address(zeros) : from + offset, apart = offset < 0 ? 0 : line;
        at += kPerRound;
      };
      auto load_rows = [&](int i, int r) {
#pragma unroll
        for (int m = 0; m < kSixteens; ++m) {
          const uint32_t of_m = row + (r + 2 * kStep * m) * apart;
          if constexpr (kWhole) {
            load_matrices(a[i][m][0], of_m);
          } else {
            uint32_t words[2];
            load_words(words, of_m), a[i][m][0][0] = words[0], a[i][m][0][2] = words[1];
            load_words(words, of_m + kStep * apart), a[i][m][0][1] = words[0], a[i][m][0][3] = words[1];
          }
        }
      };
      auto multiply = [&](int i) {
        if constexpr (kThree || !kGroupedTma)  // TMA rounds what it loads
#pragma unroll
          for (int m = 0; m < kSixteens; ++m) to_parts<T, kThree, 4>(a[i][m]);
#pragma unroll
        for (int e = 0; e < kEights; ++e) {
          const uint2 b = b_at[e * 32];
          uint32_t words[kParts][2] = {{b.x, b.y}};
          if constexpr (kThree) to_parts<T, kThree, 2>(words);
#pragma unroll
          for (int m = 0; m < kSixteens; ++m) sums[m][e].add(a[i][m], words, T());
        }
        b_at += b_step;
      };
      next_round(), load_rows(0, 0);
      for (int round = 0; round < rounds; round += 2) {
        load_rows(1, 1), multiply(0);
        load_rows(0, 2), multiply(1);
        const bool more = round + 1 < rounds;
        if (more) next_round(), load_rows(1, 0);
        multiply(0);
        if (!more) break;
        load_rows(0, 1), multiply(1);
        load_rows(1, 2), multiply(0);
        if (round + 2 < rounds) next_round(), load_rows(0, 0);
        multiply(1);
      }
    };
    char *const mine = staged + (g.chunks > 1 ? warp_index() : unit) * kUnit * g.result_pixel;
    auto write = [&](int first, int end, int begin, int apart) {
      write_unit(c, tile, spots + unit * kUnit, mine, result, first, end, begin, apart);
    };

    const int first_result = block.first_result(g), of_group = (block.group + 1) * g.out;
    if (g.chunks == 1) {
      const int groups = block.groups;
      const int end = groups > 1 || g.parts == 1 ? first_result + groups * g.out : min(first_result + g.part, of_group);
      for (int i = 0, task = share; i < most_tasks; ++i, task += shares) {
        const int of_groups = task / kHalves, half = task % kHalves;
        const int group = of_groups / g.pieces, piece = of_groups - group * g.pieces;
        if (task < tasks) begin_sums(g, block, bias, group, piece, sums), add(group, piece, half);
        if (i == 0) __syncthreads();  // the results before are written
        if (task < tasks)
          keep_sums<T>(g, group * g.part + piece * kEights * 8, piece, sums, mine + half * 16 * g.result_pixel);
      }
      __syncthreads();
      load_ahead(stage);
      write(first_result, end, share * 32 + lane, shares * 32);
    } else {  // a warp has a piece
      if (chunk == 0) begin_sums(g, block, bias, 0, share, sums);
      add(0, share, 0);
      __syncthreads();
      load_ahead(stage);
      if (chunk + 1 == g.chunks) {
        keep_sums<T>(g, 0, share, sums, mine);
        __syncwarp();
        write(first_result + share * kEights * 8, min(first_result + g.part, of_group), lane, 32);
      }
    }
    if (++chunk == g.chunks) chunk = 0, index += gridDim.x;
  }
}

}  // namespace AOT_ISA
}  // namespace aot
