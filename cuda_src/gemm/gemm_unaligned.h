// Products of 16-bit matrices on Hopper whose c is not in whole vectors, or whose sizes are not: as gemm_sm90 (gemm.h),
// but only the lines of a and b begin at multiples of 16 bytes.
#pragma once
#include "cuda/launch.cuh"
#include "gemm.h"

namespace aot {
inline namespace AOT_ISA {

// Rounds of tiles. A cluster has two neighbours, in a column or, of a^T b alone, in a row, of which the second may be
// beyond c. So 4097 x 4096 results are 1056 tiles in rows, eight rounds of an H200, and 1088 in columns.
constexpr int kUnalignedTile = 128;
inline int64_t unaligned_rounds(const GemmParams &g, int multiprocessors, bool in_rows) {
  const int64_t rows = ceil_div(g.m, kUnalignedTile), across = ceil_div(g.n, kUnalignedTile);
  return ceil_div((in_rows ? rows * (across + across % 2) : (rows + rows % 2) * across) * g.count, multiprocessors);
}
inline bool clusters_in_rows(const GemmParams &g, int multiprocessors) {
  return g.a.transposed && !g.b.transposed &&
         unaligned_rounds(g, multiprocessors, true) < unaligned_rounds(g, multiprocessors, false);
}

// Whether a^T b has tiles of 64 x 128: those of 128 x 128 would leave half of the device idle, and its sums are long.
constexpr int kLowTile = 64;
inline bool low_tiles(const GemmParams &g, int multiprocessors) {
  return g.a.transposed && !g.b.transposed &&
         2 * ceil_div(g.m, kUnalignedTile) * ceil_div(g.n, kUnalignedTile) * g.count <= multiprocessors;
}

// Every layout, c in the operands' dtype; an epilogue only with K-major operands, as linear's forward has them.
Status gemm_unaligned_sm90(const char *op, const GemmParams &gemm, int multiprocessors, cudaStream_t stream);

}  // namespace AOT_ISA
}  // namespace aot
