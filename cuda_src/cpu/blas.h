// OpenBLAS, if the process can load it, and scratch memory for each thread.
#pragma once
#include <cstddef>

namespace aot {

// CBLAS's products, single-threaded.
struct Blas {
  using Gemm32 = void(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float *a,
                      int lda, const float *b, int ldb, float beta, float *c, int ldc);
  using Gemm64 = void(int order, int transpose_a, int transpose_b, int m, int n, int k, double alpha, const double *a,
                      int lda, const double *b, int ldb, double beta, double *c, int ldc);
  Gemm32 *sgemm = nullptr;
  Gemm64 *dgemm = nullptr;
};

// OpenBLAS, looked for once, by name, at the first product. $AOTOPS_OPENBLAS: its file, or "none". Null if there is
// none, or if own_is_good, the caller has a good kernel of its own, and $AOTOPS_OPENBLAS is not set.
const Blas *blas(bool own_is_good) noexcept;

// Memory of at least so many bytes, aligned to a cache line, that belongs to the calling thread until its next call or
// its end. Null if out of memory.
void *thread_scratch(size_t bytes) noexcept;

}  // namespace aot
