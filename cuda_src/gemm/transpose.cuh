// Transposed copies of float32 matrices whose lines are whole vectors.
#pragma once
#include "cuda/launch.cuh"
#include "cuda/vector.cuh"

namespace aot {
inline namespace AOT_ISA {

constexpr int kTransposeBlock = 256, kTransposeRows = 128, kTransposeColumns = 64;

// to[j][i] = from[i][j], for lines `from_line` and `to_line` apart.
static __global__ void __launch_bounds__(kTransposeBlock)
    transpose_lines_kernel(const float *from, int64_t from_line, float *to, int64_t to_line, int rows, int columns) {
  constexpr int kRows = kTransposeRows, kColumns = kTransposeColumns, kEach = kRows * kColumns / 4 / kTransposeBlock;
  __shared__ float tile[kRows][kColumns + 1];
  const int across = (columns + kColumns - 1) / kColumns, block = static_cast<int>(blockIdx.x);
  const int i0 = block / across * kRows, j0 = block % across * kColumns;
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const int n = threadIdx.x + k * kTransposeBlock, i = n / (kColumns / 4), j = n % (kColumns / 4) * 4;
    float4 v = {};
    if (i0 + i < rows && j0 + j < columns) v = *reinterpret_cast<const float4 *>(from + (i0 + i) * from_line + j0 + j);
    tile[i][j] = v.x, tile[i][j + 1] = v.y, tile[i][j + 2] = v.z, tile[i][j + 3] = v.w;
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const int n = threadIdx.x + k * kTransposeBlock, i = n % (kRows / 4) * 4, j = n / (kRows / 4);
    if (i0 + i < rows && j0 + j < columns)
      *reinterpret_cast<float4 *>(to + (j0 + j) * to_line + i0 + i) = {tile[i][j], tile[i + 1][j], tile[i + 2][j],
                                                                       tile[i + 3][j]};
  }
}

// rows, columns: multiples of four.
inline Status transpose_lines(const char *op, const float *from, int64_t from_line, float *to, int64_t to_line,
                              int64_t rows, int64_t columns, cudaStream_t stream) {
  const int64_t tiles = ceil_div(rows, kTransposeRows) * ceil_div(columns, kTransposeColumns);
  return launch_kernel(op, transpose_lines_kernel, {static_cast<unsigned>(tiles), kTransposeBlock}, stream, from,
                       from_line, to, to_line, static_cast<int>(rows), static_cast<int>(columns));
}

}  // namespace AOT_ISA
}  // namespace aot
