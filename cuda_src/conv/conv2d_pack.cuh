// Packing: copies tensors to NHWC with padded channels, as the implicit GEMM kernels take them, and results back. A
// packing kernel reads nothing that another kernel of the call wrote.
#pragma once
#include "conv2d_gemm.h"
#include "cuda/overlap.cuh"

namespace aot {
inline namespace AOT_ISA {

constexpr int kPackBlock = 256;

// to[b][j][i] = from[b][i][j] for b < batches, i < rows, j < cols. `to` is padded with zeros to to_batches and to_rows.
template <typename T>
struct Transposition {
  const T *from;
  T *to;
  int64_t batches, rows, cols, stride, to_rows, to_stride;  // strides: between rows
  int64_t to_batches;

  unsigned across = 0, down = 0;              // tiles
  bool from_fours = false, to_fours = false;  // whether all rows are aligned to four elements
};

template <typename T>
struct alignas(sizeof(T) < 4 ? 4 * sizeof(T) : 16) Four {
  T v[4];
};

template <typename T, int kRows, int kCols>
__global__ void __launch_bounds__(kPackBlock) transpose_kernel(Transposition<T> t) {
  __shared__ T tile[kRows][kCols + 4 / sizeof(T)];
  launch_next();
  const unsigned across = t.across, down = t.down, block = blockIdx.x;
  const int64_t batch = block / (across * down);
  const int64_t i0 = block / across % down * kRows, j0 = block % across * kCols;
  const T *from = t.from + batch * t.rows * t.stride;
#pragma unroll
  for (int k = 0; k < kRows * kCols / kPackBlock / 4; ++k) {
    const int index = threadIdx.x + k * kPackBlock, i = index / (kCols / 4), j = index % (kCols / 4) * 4;
    const int64_t left = batch < t.batches && i0 + i < t.rows ? t.cols - j0 - j : 0;
    const T *p = from + (i0 + i) * t.stride + j0 + j;
    Four<T> four;
    if (t.from_fours && left >= 4) {
      four = *reinterpret_cast<const Four<T> *>(p);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) four.v[e] = e < left ? p[e] : narrow<T>(0);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) tile[i][j + e] = four.v[e];
  }
  __syncthreads();
  T *to = t.to + batch * t.cols * t.to_stride;
#pragma unroll
  for (int k = 0; k < kRows * kCols / kPackBlock / 4; ++k) {
    const int index = threadIdx.x + k * kPackBlock, i = index % (kRows / 4) * 4, j = index / (kRows / 4);
    const int64_t left = j0 + j < t.cols ? t.to_rows - i0 - i : 0;
    T *p = to + (j0 + j) * t.to_stride + i0 + i;
    if (t.to_fours && left >= 4) {
      *reinterpret_cast<Four<T> *>(p) = {tile[i][j], tile[i + 1][j], tile[i + 2][j], tile[i + 3][j]};
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (e < left) p[e] = tile[i + e][j];
    }
  }
  wait_for_kernel_before();
}

// to (to_rows, to_cols) = from (rows, cols), whose rows are `stride` apart, cropped or padded with zeros.
template <typename T>
struct PaddedCopy {
  const T *from;
  T *to;
  int64_t rows, cols, stride, to_rows, to_cols;
};

template <typename T>
__global__ void __launch_bounds__(kPackBlock) copy_padded_kernel(PaddedCopy<T> f) {
  launch_next();
  const unsigned i = blockIdx.x * kPackBlock + threadIdx.x, cols = static_cast<unsigned>(f.to_cols);
  const unsigned row = i / cols, col = i % cols;
  if (row < f.to_rows) f.to[i] = row < f.rows && col < f.cols ? f.from[row * f.stride + col] : narrow<T>(0);
  wait_for_kernel_before();
}

template <typename T>
Status copy_padded(const PaddedCopy<T> &f, LaunchSequence &launch) {
  return launch(copy_padded_kernel<T>, grid_size(ceil_div(f.to_rows * f.to_cols, kPackBlock)), kPackBlock, 0, 1, f);
}

template <typename T>
Status transpose(Transposition<T> t, LaunchSequence &launch) {
  t.from_fours = t.stride % 4 == 0 && aligned(t.from), t.to_fours = t.to_stride % 4 == 0 && aligned(t.to);
  auto with_tile = [&](auto *kernel, int rows, int cols) {
    t.across = static_cast<unsigned>(ceil_div(t.cols, cols)), t.down = static_cast<unsigned>(ceil_div(t.to_rows, rows));
    return launch(kernel, grid_size(t.to_batches * t.across * t.down), kPackBlock, 0, 1, t);
  };
  return t.cols > 16 ? with_tile(transpose_kernel<T, 32, 64>, 32, 64)
                     : with_tile(transpose_kernel<T, 128, 16>, 128, 16);
}

// From either layout to (to_images, plane, to_channels), padded with zeros.
template <typename T>
Status pack(bool nhwc, const T *from, Planes p, T *to, int64_t to_images, int64_t to_channels, LaunchSequence &launch) {
  if (nhwc)
    return copy_padded<T>({from, to, p.images * p.plane, p.channels, p.channels, to_images * p.plane, to_channels},
                          launch);
  return transpose<T>({from, to, p.images, p.channels, p.plane, p.plane, to_channels, to_channels, to_images}, launch);
}

// From (p.images, p.plane, from_channels) to either layout, without padding.
template <typename T>
Status unpack(bool nhwc, const T *from, int64_t from_channels, Planes p, T *to, LaunchSequence &launch) {
  // reads what the kernel before it wrote, and the kernel after it may overwrite that
  launch.wait_for_all();
  AOT_TRY(nhwc ? copy_padded<T>(
                     {from, to, p.images * p.plane, p.channels, from_channels, p.images * p.plane, p.channels}, launch)
               : transpose<T>({from, to, p.images, p.plane, p.channels, from_channels, p.plane, p.plane, p.images},
                              launch));
  return launch.wait_for_all(), kOk;
}

}  // namespace AOT_ISA
}  // namespace aot
