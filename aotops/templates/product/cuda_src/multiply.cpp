#include "multiply.h"

#include "cpu/entry.h"
#include "cpu/rows.h"

namespace aot {
inline namespace AOT_ISA {

// --------------------------------------------------------------------------------------------------------- loops

// y (m, n) = a @ b, where a(i, p) is at a[i * a_row + p * a_column], and b is (k, n).
template <typename T>
void multiply_loop(const T *a, int64_t a_row, int64_t a_column, const T *b, T *y, int64_t m, int64_t n, int64_t k) {
  each_row(m, n * k, [=](int64_t i) {
    sweep<T>(n, [=](int64_t j, auto part) {
      Vec<T> sum{};
      for (int64_t p = 0; p < k; ++p) sum += load_one(a + i * a_row + p * a_column) * load(b + p * n + j, part);
      store(y + i * n + j, sum, part);
    });
  });
}

// y (m, n) = a @ b', where a is (m, k) and b is (n, k).
template <typename T>
void multiply_transposed_loop(const T *a, const T *b, T *y, int64_t m, int64_t n, int64_t k) {
  each_row(m, n * k, [=](int64_t i) {
    for (int64_t j = 0; j < n; ++j)
      store_one(y + i * n + j, sum_row<T>(k, [=](int64_t p, auto part) {
                  return load(a + i * k + p, part) * load(b + j * k + p, part);
                }));
  });
}

// ----------------------------------------------------------------------------------------------------- launchers

inline Status multiply_cpu(const Multiply &, const Tensor *in, const Tensor *out, void *) {
  const Tensor &a = in[0], &b = in[1], &y = out[0];
  const int64_t m = y.shape[0], n = y.shape[1], k = a.shape[1];
  return dispatch_floating(a.dtype, [&](auto zero) {
    using T = decltype(zero);
    multiply_loop(a.as<const T>(), k, 1, b.as<const T>(), y.as<T>(), m, n, k);
    return kOk;
  });
}

inline Status multiply_backward_cpu(const MultiplyBackward &, const Tensor *in, const Tensor *out, void *) {
  const Tensor &dy = in[0], &a = in[1], &b = in[2], &da = out[0], &db = out[1];
  const int64_t m = dy.shape[0], n = dy.shape[1], k = a.shape[1];
  return dispatch_floating(a.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (da) multiply_transposed_loop(dy.as<const T>(), b.as<const T>(), da.as<T>(), m, k, n);
    if (db) multiply_loop(a.as<const T>(), 1, k, dy.as<const T>(), db.as<T>(), k, n, m);
    return kOk;
  });
}

}  // namespace AOT_ISA
}  // namespace aot

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::Multiply, aot_multiply_cpu, aot::multiply_cpu)
AOT_CPU_ENTRY(aot::MultiplyBackward, aot_multiply_backward_cpu, aot::multiply_backward_cpu)
