#include "sum_squares.h"

#include "cpu/entry.h"
#include "cpu/rows.h"

namespace aot {
inline namespace AOT_ISA {

// --------------------------------------------------------------------------------------------------------- loops

template <typename T>
void sum_squares_loop(const T *x, T *y, int64_t rows, int64_t cols) {
  each_row(rows, cols, [=](int64_t i) {
    const double squares = sum_row<T>(cols, [=](int64_t j, auto part) {
      const Vec<T> v = load(x + i * cols + j, part);
      return v * v;
    });
    store_one(y + i, squares);
  });
}

template <typename T>
void sum_squares_backward_loop(const T *dy, const T *x, T *dx, int64_t rows, int64_t cols) {
  each_row(rows, cols, [=](int64_t i) {
    const Accumulate<T> twice = 2 * load_one(dy + i);
    sweep<T>(cols, [=](int64_t j, auto part) { store(dx + i * cols + j, load(x + i * cols + j, part) * twice, part); });
  });
}

// ----------------------------------------------------------------------------------------------------- launchers

inline Status sum_squares_cpu(const SumSquares &, const Tensor *in, const Tensor *out, void *) {
  const Tensor &x = in[0], &y = out[0];
  return dispatch_floating(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    sum_squares_loop(x.as<const T>(), y.as<T>(), y.size(), row_size(x));
    return kOk;
  });
}

inline Status sum_squares_backward_cpu(const SumSquaresBackward &, const Tensor *in, const Tensor *out, void *) {
  const Tensor &dy = in[0], &x = in[1], &dx = out[0];
  return dispatch_floating(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    sum_squares_backward_loop(dy.as<const T>(), x.as<const T>(), dx.as<T>(), dy.size(), row_size(x));
    return kOk;
  });
}

}  // namespace AOT_ISA
}  // namespace aot

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::SumSquares, aot_sum_squares_cpu, aot::sum_squares_cpu)
AOT_CPU_ENTRY(aot::SumSquaresBackward, aot_sum_squares_backward_cpu, aot::sum_squares_backward_cpu)
