#include "multiply.h"

#include "cuda/launch.cuh"

namespace aot {
inline namespace AOT_ISA {

// --------------------------------------------------------------------------------------------------------- kernels

constexpr int kTile = 16;

// A matrix whose element (i, j) is at data[i * row + j * column]: so its transpose is another view of it.
template <typename T>
struct View {
  const T *data;
  int64_t row, column;

  __device__ Accumulate<T> at(int64_t i, int64_t j, int64_t rows, int64_t columns) const {
    return i < rows && j < columns ? widen(data[i * row + j * column]) : Accumulate<T>(0);
  }
};

// y (m, n) = a @ b. A block computes tiles of y, from tiles of a and b in shared memory.
template <typename T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kTile *kTile)
    multiply_kernel(View<T> a, View<T> b, T *y, int64_t m, int64_t n, int64_t k) {
  __shared__ A a_tile[kTile][kTile + 1], b_tile[kTile][kTile + 1];  // + 1: no bank conflicts
  const int64_t across = ceil_div(n, kTile), tiles = across * ceil_div(m, kTile);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t i = tile / across * kTile + threadIdx.y, j = tile % across * kTile + threadIdx.x;
    A sum = 0;
    for (int64_t p = 0; p < k; p += kTile) {
      a_tile[threadIdx.y][threadIdx.x] = a.at(i, p + threadIdx.x, m, k);
      b_tile[threadIdx.y][threadIdx.x] = b.at(p + threadIdx.y, j, k, n);
      __syncthreads();
      for (int q = 0; q < kTile; ++q) sum += a_tile[threadIdx.y][q] * b_tile[q][threadIdx.x];
      __syncthreads();
    }
    if (i < m && j < n) y[i * n + j] = narrow<T>(sum);
  }
}

// ------------------------------------------------------------------------------------------------------- launchers

template <typename T>
Status launch_multiply(const char *op, View<T> a, View<T> b, T *y, int64_t m, int64_t n, int64_t k, void *stream) {
  const unsigned blocks = grid_size(ceil_div(m, kTile) * ceil_div(n, kTile));
  if (blocks == 0) return kOk;
  return launch_kernel(op, multiply_kernel<T>, {blocks, dim3(kTile, kTile)}, stream, a, b, y, m, n, k);
}

inline Status multiply_cuda(const Multiply &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &a = in[0], &b = in[1], &y = out[0];
  const int64_t m = y.shape[0], n = y.shape[1], k = a.shape[1];
  return dispatch(a.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return launch_multiply<T>(op.name, {a.as<const T>(), k, 1}, {b.as<const T>(), n, 1}, y.as<T>(), m, n, k, stream);
  });
}

inline Status multiply_backward_cuda(const MultiplyBackward &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &dy = in[0], &a = in[1], &b = in[2], &da = out[0], &db = out[1];
  const int64_t m = dy.shape[0], n = dy.shape[1], k = a.shape[1];
  return dispatch(a.dtype, [&](auto type) -> Status {
    using T = typename decltype(type)::type;
    const View<T> grad = {dy.as<const T>(), n, 1};
    if (da) AOT_TRY(launch_multiply<T>(op.name, grad, {b.as<const T>(), 1, n}, da.as<T>(), m, k, n, stream));
    if (db) AOT_TRY(launch_multiply<T>(op.name, {a.as<const T>(), 1, k}, grad, db.as<T>(), k, n, m, stream));
    return kOk;
  });
}

}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(Multiply, aot_multiply_cuda, multiply_cuda)
AOT_ENTRY(MultiplyBackward, aot_multiply_backward_cuda, multiply_backward_cuda)
