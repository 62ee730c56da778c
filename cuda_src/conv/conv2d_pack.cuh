// Tensors as the tensor core kernels of conv2d want them, NHWC with channels in whole vectors, and back. What packs
// reads nothing that a kernel of this call wrote.
#pragma once
#include "conv2d.cuh"
#include "cuda/overlap.cuh"

namespace aot {
inline namespace AOT_ISA {

constexpr int kPackBlock = 256;

// to[b][j][i] = from[b][i][j] for i < rows, j < cols; zero for i < to_rows beyond, and in a batch that `from` has not.
template <typename T>
struct Transposition {
  const T *from;
  T *to;
  int64_t batches, rows, cols, stride, to_rows, to_stride;  // strides: from one row to the next
  int64_t to_batches;

  unsigned across = 0, down = 0;              // tiles
  bool from_fours = false, to_fours = false;  // whether rows begin at multiples of four elements
};

template <typename T>
struct alignas(4 * sizeof(T)) Four {
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

// to (to_rows, to_cols) = from (rows, cols), whose rows are `stride` apart, where it is, zero where it is not.
template <typename T>
struct Fit {
  const T *from;
  T *to;
  int64_t rows, cols, stride, to_rows, to_cols;
};

template <typename T>
__global__ void __launch_bounds__(kPackBlock) fit_kernel(Fit<T> f) {
  launch_next();
  const unsigned i = blockIdx.x * kPackBlock + threadIdx.x, cols = static_cast<unsigned>(f.to_cols);
  const unsigned row = i / cols, col = i % cols;
  if (row < f.to_rows) f.to[i] = row < f.rows && col < f.cols ? f.from[row * f.stride + col] : narrow<T>(0);
  wait_for_kernel_before();
}

template <typename T>
Status fit(const Fit<T> &f, Launches &launch) {
  return launch(fit_kernel<T>, grid_size(ceil_div(f.to_rows * f.to_cols, kPackBlock)), kPackBlock, 0, 1, f);
}

template <typename T>
Status transpose(Transposition<T> t, Launches &launch) {
  t.from_fours = t.stride % 4 == 0 && aligned(t.from), t.to_fours = t.to_stride % 4 == 0 && aligned(t.to);
  auto with_tile = [&](auto *kernel, int rows, int cols) {
    t.across = static_cast<unsigned>(ceil_div(t.cols, cols)), t.down = static_cast<unsigned>(ceil_div(t.to_rows, rows));
    return launch(kernel, grid_size(t.to_batches * t.across * t.down), kPackBlock, 0, 1, t);
  };
  return t.cols > 16 ? with_tile(transpose_kernel<T, 32, 64>, 32, 64)
                     : with_tile(transpose_kernel<T, 128, 16>, 128, 16);
}

// `plane` numbers in each of `channels` channels of each of `images`: of x and y the pixels, of a weight the kernel.
struct Planes {
  int64_t images, channels, plane;
};

// to: (to_images, plane, to_channels).
template <typename T>
Status pack(bool nhwc, const T *from, Planes p, T *to, int64_t to_images, int64_t to_channels, Launches &launch) {
  if (nhwc)
    return fit<T>({from, to, p.images * p.plane, p.channels, p.channels, to_images * p.plane, to_channels}, launch);
  return transpose<T>({from, to, p.images, p.channels, p.plane, p.plane, to_channels, to_channels, to_images}, launch);
}

// from: (p.images, p.plane, from_channels), of which p.channels are wanted.
template <typename T>
Status unpack(bool nhwc, const T *from, int64_t from_channels, Planes p, T *to, Launches &launch) {
  launch.restart();  // it reads what the kernel before it wrote, and the one after it may write where it reads
  AOT_TRY(
      nhwc
          ? fit<T>({from, to, p.images * p.plane, p.channels, from_channels, p.images * p.plane, p.channels}, launch)
          : transpose<T>({from, to, p.images, p.plane, p.channels, from_channels, p.plane, p.plane, p.images}, launch));
  return launch.restart(), kOk;
}

}  // namespace AOT_ISA
}  // namespace aot
