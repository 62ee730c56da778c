// What a matrix product on the CPU asks of the process: OpenBLAS, where there is one, and memory for its panels.
#pragma once
#include <cstddef>

namespace aot {

// CBLAS's functions of a product, for row-major matrices, on the calling thread alone.
struct Blas {
  using Gemm32 = void(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float *a,
                      int lda, const float *b, int ldb, float beta, float *c, int ldc);
  using Gemm64 = void(int order, int transpose_a, int transpose_b, int m, int n, int k, double alpha, const double *a,
                      int lda, const double *b, int ldb, double beta, double *c, int ldc);
  Gemm32 *sgemm = nullptr;
  Gemm64 *dgemm = nullptr;
};

// OpenBLAS, looked for once, by name, at the first product; null where there is none, and for a caller who has a good
// kernel of its own, unless $AOTOPS_OPENBLAS asks for it: the file, or "none".
const Blas *blas(bool own_is_good) noexcept;

// At least so many bytes, aligned to a cache line, which stay the calling thread's until it asks again or ends. Null
// when out of memory.
void *thread_scratch(size_t bytes) noexcept;

}  // namespace aot
