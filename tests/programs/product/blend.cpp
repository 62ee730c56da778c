#include "blend.h"

#include "cpu/entry.h"
#include "cpu/rows.h"

namespace aot {
inline namespace AOT_ISA {

// A matrix, or its transpose.
template <typename T>
struct Matrix {
  T *data;
  int64_t row, column;  // strides

  double operator()(int64_t i, int64_t j) const { return load_one(data + i * row + j * column); }
};

// c = factor * a b + bias, where a is (m, k) and b (k, n)
template <typename T>
void product(int64_t m, int64_t n, int64_t k, Matrix<T> a, Matrix<T> b, double factor, const T *bias, T *c) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t l = 0; l < k; ++l) sum += a(i, l) * b(l, j);
      store_one(c + i * n + j, factor * sum + (bias ? load_one(bias + j) : 0.0));
    }
}

inline Status blend_cpu(const Blend &op, const Tensor *in, const Tensor *out, void *) {
  return dispatch_floating(in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t rows = in[0].product(0, in[0].ndim - 1), n = in[1].shape[0], k = in[1].shape[1];
    product<T>(rows, n, k, {in[0].as<T>(), k, 1}, {in[1].as<T>(), 1, k}, op.factor, in[2] ? in[2].as<T>() : nullptr,
               out[0].as<T>());
    return kOk;
  });
}

inline Status blend_backward_cpu(const BlendBackward &op, const Tensor *in, const Tensor *out, void *) {
  return dispatch_floating(in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t rows = in[1].product(0, in[1].ndim - 1), n = in[2].shape[0], k = in[2].shape[1];
    const Matrix<T> dy{in[0].as<T>(), n, 1}, columns{in[0].as<T>(), 1, n};
    if (out[0]) product<T>(rows, k, n, dy, {in[2].as<T>(), k, 1}, op.factor, nullptr, out[0].as<T>());
    if (out[1]) product<T>(n, k, rows, columns, {in[1].as<T>(), k, 1}, op.factor, nullptr, out[1].as<T>());
    for (int64_t j = 0; out[2] && j < n; ++j) {
      double sum = 0;
      for (int64_t i = 0; i < rows; ++i) sum += dy(i, j);
      store_one(out[2].as<T>() + j, sum);
    }
    return kOk;
  });
}

}  // namespace AOT_ISA
}  // namespace aot

AOT_CPU_ENTRY(aot::Blend, aot_blend_cpu, aot::blend_cpu)
AOT_CPU_ENTRY(aot::BlendBackward, aot_blend_backward_cpu, aot::blend_backward_cpu)
