// A Product (../matrix.h) on the CPU.
#pragma once
#include "gemm_cpu.h"
#include "matrix.h"

namespace aot {
inline namespace AOT_ISA {

template <typename T, typename C>
Status multiply_each(const Product &p) {
  return gemm_batch(p.count(), [&](int64_t index) {
    int64_t a, b, c;
    p.at(index, &a, &b, &c);
    auto matrix = [](const Operand &x, int64_t at) {
      return Matrix<T>{static_cast<const T *>(x.data) + at, x.stride, x.transposed};
    };
    return Gemm<T, C>{p.m, p.n, p.k, matrix(p.a, a), matrix(p.b, b), static_cast<C *>(p.c.data) + c, p.c.stride};
  });
}

// y[i] = the sum of `count` numbers, x[i], x[i + n] ..., in this order.
template <typename T>
void sum_apart(const Accumulate<T> *x, int64_t count, T *y, int64_t n) {
  map(y, n, [=](int64_t i, auto part) {
    Vec<T> sum{};
    for (int64_t s = 0; s < count; ++s) sum += load(x + s * n + i, part);
    return sum;
  });
}

// `scratch` is needed where products are summed that cannot be summed at once.
inline Status multiply(const char *op, const Product &p, const Tensor &scratch) {
  return dispatch_floating(p.dtype, [&](auto zero) -> Status {
    using T = decltype(zero);
    if (!p.elements()) return kOk;
    if (!p.sums()) return multiply_each<T, T>(p);
    if (!scratch) return fail(kConventionMisused, "%s: workspace is missing", op);
    AOT_TRY((multiply_each<T, Accumulate<T>>(p.apart(scratch.data))));
    return sum_apart(scratch.as<Accumulate<T>>(), p.summed(), static_cast<T *>(p.c.data), p.elements()), kOk;
  });
}

}  // namespace AOT_ISA
}  // namespace aot
