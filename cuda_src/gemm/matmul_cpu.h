// Runs a MatmulProblem (matrix.h) on the CPU.
#pragma once
#include "gemv_cpu.h"
#include "matrix.h"

namespace aot {
inline namespace AOT_ISA {

// The operand's matrix that begins at element `at`.
template <typename T>
Matrix<T> matrix(const Operand &x, int64_t at = 0) {
  return {static_cast<const T *>(x.data) + at, x.stride, x.transposed};
}

template <typename T, typename C>
Status gemm_all(const MatmulProblem &p) {
  const auto product = [&](int64_t index) {
    int64_t a, b, c;
    p.at(index, &a, &b, &c);
    C *to = static_cast<C *>(p.c.data) + c;
    return CpuGemm<T, C>{p.m, p.n, p.k, matrix<T>(p.a, a), matrix<T>(p.b, b), to, p.c.stride, p.adds};
  };
  if constexpr (std::is_same_v<T, C>) return multiply(p.count(), product);
  else return gemm_batch(p.count(), product);
}

// sum[i] = partials[i] + partials[n + i] + ... for `slices` partial sums of n elements.
template <typename T>
void sum_slices(const Accumulate<T> *partials, int64_t slices, T *sum, int64_t n) {
  map(sum, n, [=](int64_t i, auto part) {
    Vec<T> total{};
    for (int64_t slice = 0; slice < slices; ++slice) total += load(partials + slice * n + i, part);
    return total;
  });
}

// scratch: for the unreduced products; needed if p.reduces().
inline Status run_matmul(const char *op, const MatmulProblem &p, const Tensor &scratch) {
  return dispatch_floating(p.dtype, [&](auto zero) -> Status {
    using T = decltype(zero);
    if (!p.elements()) return kOk;
    if (p.adds) return gemm_all<T, Accumulate<T>>(p);
    if (!p.reduces()) return gemm_all<T, T>(p);
    if (!scratch) return fail(kConventionMisused, "%s: workspace is missing", op);
    AOT_TRY((gemm_all<T, Accumulate<T>>(p.unreduced(scratch.data))));
    return sum_slices(scratch.as<Accumulate<T>>(), p.products_per_result(), static_cast<T *>(p.c.data), p.elements()),
           kOk;
  });
}

}  // namespace AOT_ISA
}  // namespace aot
