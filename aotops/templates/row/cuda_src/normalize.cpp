#include "normalize.h"

#include <cmath>

#include "cpu/entry.h"
#include "cpu/rows.h"

namespace aot {
inline namespace AOT_ISA {

// --------------------------------------------------------------------------------------------------------- loops

template <typename T>
void normalize_loop(const T *x, T *y, int64_t rows, int64_t cols, double eps) {
  each_row(rows, cols, [=](int64_t i) {
    const T *from = x + i * cols;
    const double squares = sum_row<T>(cols, [=](int64_t j, auto part) {
      const Vec<T> v = load(from + j, part);
      return v * v;
    });
    const auto r = static_cast<Accumulate<T>>(1 / std::sqrt(squares + eps));
    sweep<T>(cols, [=](int64_t j, auto part) { store(y + i * cols + j, load(from + j, part) * r, part); });
  });
}

template <typename T>
void normalize_backward_loop(const T *dy, const T *x, T *dx, int64_t rows, int64_t cols, double eps) {
  each_row(rows, cols, [=](int64_t i) {
    const T *from = x + i * cols, *grad = dy + i * cols;
    const double squares = sum_row<T>(cols, [=](int64_t j, auto part) {
      const Vec<T> v = load(from + j, part);
      return v * v;
    });
    const double dot =
        sum_row<T>(cols, [=](int64_t j, auto part) { return load(grad + j, part) * load(from + j, part); });
    const double r = 1 / std::sqrt(squares + eps);
    const auto a = static_cast<Accumulate<T>>(r), b = static_cast<Accumulate<T>>(dot * r * r * r);
    sweep<T>(cols, [=](int64_t j, auto part) {
      store(dx + i * cols + j, load(grad + j, part) * a - load(from + j, part) * b, part);
    });
  });
}

// ----------------------------------------------------------------------------------------------------- launchers

inline Status normalize_cpu(const Normalize &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &x = in[0], &y = out[0];
  return dispatch_floating(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    normalize_loop(x.as<const T>(), y.as<T>(), op.rows(x), op.cols(x), op.eps);
    return kOk;
  });
}

inline Status normalize_backward_cpu(const NormalizeBackward &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &dy = in[0], &x = in[1], &dx = out[0];
  return dispatch_floating(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    normalize_backward_loop(dy.as<const T>(), x.as<const T>(), dx.as<T>(), op.rows(x), op.cols(x), op.eps);
    return kOk;
  });
}

}  // namespace AOT_ISA
}  // namespace aot

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::Normalize, aot_normalize_cpu, aot::normalize_cpu)
AOT_CPU_ENTRY(aot::NormalizeBackward, aot_normalize_backward_cpu, aot::normalize_backward_cpu)
