// dz = dy * activation'(pre_activation), and the sum of the rows of dz, which is the gradient of a bias: at the speed
// of memory, deterministic. The rows are split into parts; a first kernel sums each part, a second one adds their sums.
#pragma once
#include "activation.cuh"
#include "cuda/overlap.cuh"
#include "cuda/vector.cuh"

namespace aot {
inline namespace AOT_ISA {

// The loads of a thread of the first kernel. Bytes in flight decide its speed: a thread loads kLoads vectors of each
// input before it uses the first one, and kBlocks blocks run on a multiprocessor.
template <bool kSlope, int kWarps_, int kLoads_, int kBlocks_>
struct ColumnSumShape {
  static constexpr bool kHasSlope = kSlope;  // whether dz is computed; otherwise it is dy
  static constexpr int kWarps = kWarps_, kLoads = kLoads_, kBlocks = kBlocks_;
};
using SumShape = ColumnSumShape<false, 8, 8, 3>;
using SlopeShape = ColumnSumShape<true, 8, 2, 3>;

// R, the terms that a thread adds one by one before it starts a new sum. In the worst case that sum is off by R 2^-24
// times the sum of their magnitudes: 2^-16 for R = 256, where the rounding of the result is 2^-11 in float16 and 2^-8
// in bfloat16. float32 has no such margin.
template <typename T>
constexpr int kTermsOfSum = sizeof(T) == 2 ? 256 : 32;

// A thread's columns: a vector, or one where vectors are misaligned.
template <typename T, bool kVectors>
struct Columns {
  static constexpr int kSize = kVectors ? kVectorSize<T> : 1;
  using A = Accumulate<T>;
  std::conditional_t<kVectors, Vector<T>, T> value;

  __device__ void read(const T *x, bool present) {
    if constexpr (kVectors) value = load_present(x, present);
    else value = present ? *x : T(0);
  }
  __device__ void widened(A (&x)[kSize]) const {
    if constexpr (kVectors) {
      const Widened<T> wide = widen(value);
#pragma unroll
      for (int j = 0; j < kSize; ++j) x[j] = wide[j];
    } else {
      x[0] = widen(value);
    }
  }
  __device__ static void write(T *y, const A (&x)[kSize]) {
    if constexpr (kVectors) {
      Widened<T> wide;
#pragma unroll
      for (int j = 0; j < kSize; ++j) wide[j] = x[j];
      store(y, narrow(wide));
    } else {
      *y = narrow<T>(x[0]);
    }
  }
};

// One choice for all of d, so that no branch is taken for each element.
template <typename T, typename A, int kSize>
__device__ __forceinline__ void activation_gradients(A (&d)[kSize], const A (&z)[kSize], Activation activation) {
  auto all = [&](auto which) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) d[j] = activation_gradient<T>(d[j], z[j], decltype(which)::value);
  };
  switch (activation) {
    case kActivationRelu:
      return all(std::integral_constant<Activation, kActivationRelu>());
    case kActivationGelu:
      return all(std::integral_constant<Activation, kActivationGelu>());
    case kActivationGeluTanh:
      return all(std::integral_constant<Activation, kActivationGeluTanh>());
    default:
      return all(std::integral_constant<Activation, kActivationSilu>());
  }
}

// float64 needs twice the registers.
template <typename T, class Shape>
constexpr int kColumnSumBlocks = sizeof(T) == 8 ? (Shape::kBlocks + 1) / 2 : Shape::kBlocks;

// In which the threads of a warp read 32 adjacent columns without conflicts.
template <int kSize>
constexpr int kSumStride = 32 + 32 / kSize;

// Adds the sums of a block's warps, of kSize columns a thread, and stores them in the row of its part of the rows.
template <typename A, int kWarps, int kSize, int kStride>
__device__ void store_partials(const A (&shared)[kWarps][kSize][kStride], A *partials, int64_t n) {
  __syncthreads();
  const int64_t left = n - int64_t{blockIdx.x} * 32 * kSize;
#pragma unroll
  for (int k = 0; k < (kSize + kWarps - 1) / kWarps; ++k) {
    const int at = (k * kWarps + threadIdx.y) * 32 + threadIdx.x;  // a column of the block
    if (at >= 32 * kSize || at >= left) break;
    A all = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) all += shared[i][at % kSize][at / kSize];
    partials[blockIdx.y * n + (n - left) + at] = all;
  }
}

// partials: (parts, n), or null; dz is not written without a slope. z_line, dz_line: the strides of pre_activation and
// dz, which are n where there are vectors. A block has a warp's vectors of columns, and the rows of a part.
template <typename T, bool kVectors, class Shape>
__global__ void __launch_bounds__(32 * Shape::kWarps, kColumnSumBlocks<T, Shape>)
    column_sums_kernel(const T *dy, const T *pre_activation, T *dz, Accumulate<T> *partials, int64_t rows, int64_t n,
                       Activation activation, int64_t z_line, int64_t dz_line) {
  using A = Accumulate<T>;
  using Of = Columns<T, kVectors>;
  constexpr int kSize = Of::kSize, kWarps = Shape::kWarps, kLoads = Shape::kLoads, kTerms = kTermsOfSum<T>;
  static_assert(kTerms % kLoads == 0, "a sum is of whole steps");
  launch_next();
  const int64_t col = (int64_t{blockIdx.x} * 32 + threadIdx.x) * kSize;
  const int64_t first = rows * blockIdx.y / gridDim.y, last = col < n ? rows * (blockIdx.y + 1) / gridDim.y : 0;
  __shared__ A shared[kWarps][kSize][kSumStride<kSize>];
  auto total = [&](int j) -> A & { return shared[threadIdx.y][j][threadIdx.x]; };
#pragma unroll
  for (int j = 0; j < kSize; ++j) total(j) = 0;

  // A thread's row, and the distance to its next one, in dy, pre_activation and dz.
  constexpr bool kLonger = !kVectors;
  const int64_t step = kWarps * n, z_step = kLonger ? kWarps * z_line : step,
                dz_step = kLonger ? kWarps * dz_line : step;
  const int64_t begin = first + threadIdx.y;
  int64_t at = begin * n + col, at_z = begin * z_line + col, at_dz = begin * dz_line + col;
  for (int64_t row = begin; row < last; row += kTerms * kWarps) {
    A sum[kSize] = {};
#pragma unroll 1
    for (int left = static_cast<int>(last - row < kTerms * kWarps ? last - row : kTerms * kWarps); left > 0;
         left -= kLoads * kWarps, at += kLoads * step) {
      if (!kLonger) at_z = at_dz = at;
      Of of_dy[kLoads], of_z[kLoads];
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        of_dy[k].read(dy + (at + k * step), k * kWarps < left);
        if constexpr (Shape::kHasSlope) of_z[k].read(pre_activation + (at_z + k * z_step), k * kWarps < left);
      }
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        A d[kSize];
        of_dy[k].widened(d);
        if constexpr (Shape::kHasSlope) {
          A z[kSize];
          of_z[k].widened(z);
          activation_gradients<T>(d, z, activation);
          if (k * kWarps < left) Of::write(dz + (at_dz + k * dz_step), d);
        }
#pragma unroll
        for (int j = 0; j < kSize; ++j) sum[j] += d[j];
      }
      at_z += kLoads * z_step, at_dz += kLoads * dz_step;
    }
#pragma unroll
    for (int j = 0; j < kSize; ++j) total(j) += sum[j];
  }
  if (partials) store_partials(shared, partials, n);
}

// The second kernel: sum = the sum of the parts, in an order that depends on nothing but their number. A block has
// 32 columns; each warp adds some of the parts.
constexpr int kPartWarps = 16;

template <typename T>
__global__ void __launch_bounds__(32 * kPartWarps)
    sum_parts_kernel(const Accumulate<T> *partials, int parts, T *sum, int64_t n) {
  __shared__ double shared[kPartWarps][33];
  const int64_t col = int64_t{blockIdx.x} * 32 + threadIdx.x;
  wait_for_kernel_before();
  double of_warp = 0;
#pragma unroll 8  // loads in flight
  for (int part = threadIdx.y; part < parts; part += kPartWarps)
    if (col < n) of_warp += partials[part * n + col];
  shared[threadIdx.y][threadIdx.x] = of_warp;
  __syncthreads();
  if (threadIdx.y || col >= n) return;
  double all = 0;
#pragma unroll
  for (int i = 0; i < kPartWarps; ++i) all += shared[i][threadIdx.x];
  sum[col] = narrow<T>(static_cast<Accumulate<T>>(all));
}

}  // namespace AOT_ISA
}  // namespace aot
