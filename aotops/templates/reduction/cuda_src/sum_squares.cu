#include "sum_squares.h"

#include "cuda/rows.cuh"

namespace aot {
inline namespace AOT_ISA {

// --------------------------------------------------------------------------------------------------------- kernels

template <typename T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kAnyRowThreads) sum_squares_kernel(const T *x, T *y, int64_t rows, int64_t cols) {
  RowSums<1, A> sums;
  each_row(rows, [&](int64_t i) {
    const A squares = sums.of(x + i * cols, cols, [](int64_t, A v, A(&sum)[1]) { sum[0] += v * v; }).value[0];
    if (threadIdx.x == 0) y[i] = narrow<T>(squares);
  });
}

template <typename T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kAnyRowThreads)
    sum_squares_backward_kernel(const T *dy, const T *x, T *dx, int64_t rows, int64_t cols) {
  each_row(rows, [&](int64_t i) {
    const A twice = 2 * widen(dy[i]);
    map_row(x + i * cols, dx + i * cols, cols, [=](int64_t, A v) { return v * twice; });
  });
}

// ------------------------------------------------------------------------------------------------------- launchers

inline Status sum_squares_cuda(const SumSquares &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &x = in[0], &y = out[0];
  return dispatch(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return launch_rows(op.name, sum_squares_kernel<T>, y.size(), row_size(x), stream, x.as<const T>(), y.as<T>(),
                       y.size(), row_size(x));
  });
}

inline Status sum_squares_backward_cuda(const SumSquaresBackward &op, const Tensor *in, const Tensor *out,
                                        void *stream) {
  const Tensor &dy = in[0], &x = in[1], &dx = out[0];
  return dispatch(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return launch_rows(op.name, sum_squares_backward_kernel<T>, dy.size(), row_size(x), stream, dy.as<const T>(),
                       x.as<const T>(), dx.as<T>(), dy.size(), row_size(x));
  });
}

}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(SumSquares, aot_sum_squares_cuda, sum_squares_cuda)
AOT_ENTRY(SumSquaresBackward, aot_sum_squares_backward_cuda, sum_squares_backward_cuda)
