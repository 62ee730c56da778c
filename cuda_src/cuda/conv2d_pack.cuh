// Tensors as the tensor core kernels of conv2d want them, NHWC with channels in whole vectors, and back.
#pragma once
#include "conv2d.cuh"

namespace aot {
inline namespace AOT_ISA {

constexpr int kPackBlock = 256, kPackRows = 32, kPackCols = 64;  // of a tile

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

template <typename T>
__global__ void __launch_bounds__(kPackBlock) transpose_kernel(Transposition<T> t) {
  __shared__ T tile[kPackRows][kPackCols + 4 / sizeof(T)];
  const unsigned across = t.across, down = t.down, block = blockIdx.x;
  const int64_t batch = block / (across * down);
  const int64_t i0 = block / across % down * kPackRows, j0 = block % across * kPackCols;
  const T *from = t.from + batch * t.rows * t.stride;
#pragma unroll
  for (int k = 0; k < kPackRows * kPackCols / kPackBlock / 4; ++k) {
    const int index = threadIdx.x + k * kPackBlock, i = index / (kPackCols / 4), j = index % (kPackCols / 4) * 4;
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
  for (int k = 0; k < kPackRows * kPackCols / kPackBlock / 4; ++k) {
    const int index = threadIdx.x + k * kPackBlock, i = index % (kPackRows / 4) * 4, j = index / (kPackRows / 4);
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
}

// The same where rows are short, as a kernel's are: a thread has one element. There are less than 2^31 of them.
template <typename T>
__global__ void __launch_bounds__(kPackBlock) gather_kernel(Transposition<T> t) {
  const unsigned at = blockIdx.x * kPackBlock + threadIdx.x, rows = static_cast<unsigned>(t.to_rows);
  const unsigned cols = static_cast<unsigned>(t.cols), i = at % rows, j = at / rows % cols, batch = at / rows / cols;
  if (batch >= t.to_batches) return;
  const bool there = batch < t.batches && i < t.rows;
  t.to[(batch * t.cols + j) * t.to_stride + i] = there ? t.from[(batch * t.rows + i) * t.stride + j] : narrow<T>(0);
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
  const unsigned i = blockIdx.x * kPackBlock + threadIdx.x, cols = static_cast<unsigned>(f.to_cols);
  const unsigned row = i / cols, col = i % cols;
  if (row >= f.to_rows) return;
  f.to[i] = row < f.rows && col < f.cols ? f.from[row * f.stride + col] : narrow<T>(0);
}

template <typename T>
void fit(const Fit<T> &f, cudaStream_t stream) {
  fit_kernel<<<grid_size(ceil_div(f.to_rows * f.to_cols, kPackBlock)), kPackBlock, 0, stream>>>(f);
}

template <typename T>
void transpose(Transposition<T> t, cudaStream_t stream) {
  t.across = static_cast<unsigned>(ceil_div(t.cols, kPackCols));
  t.down = static_cast<unsigned>(ceil_div(t.to_rows, kPackRows));
  const int64_t n = t.to_batches * t.cols * t.to_rows;
  t.from_fours = t.stride % 4 == 0 && aligned(t.from), t.to_fours = t.to_stride % 4 == 0 && aligned(t.to);
  if (t.cols >= kPackRows) {
    transpose_kernel<<<grid_size(t.to_batches * t.across * t.down), kPackBlock, 0, stream>>>(t);
  } else {
    gather_kernel<<<grid_size(ceil_div(n, kPackBlock)), kPackBlock, 0, stream>>>(t);
  }
}

// `plane` numbers in each of `channels` channels of each of `images`: of x and y the pixels, of a weight the kernel.
struct Planes {
  int64_t images, channels, plane;
};

// to: (to_images, plane, to_channels).
template <typename T>
void pack(bool nhwc, const T *from, Planes p, T *to, int64_t to_images, int64_t to_channels, cudaStream_t stream) {
  if (nhwc)
    return fit<T>({from, to, p.images * p.plane, p.channels, p.channels, to_images * p.plane, to_channels}, stream);
  transpose<T>({from, to, p.images, p.channels, p.plane, p.plane, to_channels, to_channels, to_images}, stream);
}

// from: (p.images, p.plane, from_channels), of which p.channels are wanted.
template <typename T>
void unpack(bool nhwc, const T *from, int64_t from_channels, Planes p, T *to, cudaStream_t stream) {
  if (!nhwc)
    return transpose<T>({from, to, p.images, p.plane, p.channels, from_channels, p.plane, p.plane, p.images}, stream);
  fit<T>({from, to, p.images * p.plane, p.channels, from_channels, p.images * p.plane, p.channels}, stream);
}

}  // namespace AOT_ISA
}  // namespace aot
