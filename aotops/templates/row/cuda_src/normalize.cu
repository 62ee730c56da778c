#include "normalize.h"

#include "cuda/rows.cuh"

namespace aot {
inline namespace AOT_ISA {

// --------------------------------------------------------------------------------------------------------- kernels

template <typename T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kAnyRowThreads)
    normalize_kernel(const T *x, T *y, int64_t rows, int64_t cols, A eps) {
  RowSums<1, A> sums;
  each_row(rows, [&](int64_t i) {
    const T *from = x + i * cols;
    const A squares = sums.of(from, cols, [](int64_t, A v, A(&sum)[1]) { sum[0] += v * v; }).value[0];
    const A r = rsqrt(squares + eps);
    map_row(from, y + i * cols, cols, [=](int64_t, A v) { return v * r; });
  });
}

template <typename T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kAnyRowThreads)
    normalize_backward_kernel(const T *dy, const T *x, T *dx, int64_t rows, int64_t cols, A eps) {
  RowSums<2, A> sums;
  each_row(rows, [&](int64_t i) {
    const T *from = x + i * cols, *grad = dy + i * cols;
    const auto [squares, dot] = sums.of(from, cols,
                                        [=](int64_t j, A v, A(&sum)[2]) {
                                          sum[0] += v * v;
                                          sum[1] += v * widen(grad[j]);
                                        })
                                    .value;
    const A r = rsqrt(squares + eps), b = dot * r * r * r;
    map_row(from, dx + i * cols, cols, [=](int64_t j, A v) { return widen(grad[j]) * r - v * b; });
  });
}

// ------------------------------------------------------------------------------------------------------- launchers

inline Status normalize_cuda(const Normalize &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &x = in[0], &y = out[0];
  return dispatch(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return launch_rows(op.name, normalize_kernel<T>, op.rows(x), op.cols(x), stream, x.as<const T>(), y.as<T>(),
                       op.rows(x), op.cols(x), op.eps);
  });
}

inline Status normalize_backward_cuda(const NormalizeBackward &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &dy = in[0], &x = in[1], &dx = out[0];
  return dispatch(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return launch_rows(op.name, normalize_backward_kernel<T>, op.rows(x), op.cols(x), stream, dy.as<const T>(),
                       x.as<const T>(), dx.as<T>(), op.rows(x), op.cols(x), op.eps);
  });
}

}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(Normalize, aot_normalize_cuda, normalize_cuda)
AOT_ENTRY(NormalizeBackward, aot_normalize_backward_cuda, normalize_backward_cuda)
