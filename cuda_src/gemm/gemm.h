// A matrix product on the device, as its kernels take it: many of one size, at equal distances.
#pragma once
#include <cuda_runtime_api.h>

#include "matrix.h"

namespace aot {
inline namespace AOT_ISA {

struct Gemm {
  DType dtype;    // of a and b
  DType c_dtype;  // the same, or what that is summed in
  int64_t m, n, k;
  Operand a, b, c;
  int64_t count = 1, a_step = 0, b_step = 0, c_step = 0;
  bool allow_tf32 = false;
  bool accumulate = false;  // c += a b, which is cuBLASLt's alone

  // c = activation(a b + bias), of one product, and c without gaps. What goes into the activation is stored in
  // `before`, laid out as c, where it is wanted.
  const void *bias = nullptr;
  Activation activation = kActivationNone;
  void *before = nullptr;

  void *workspace = nullptr;
  int64_t workspace_bytes = 0;
};

// Each runs the product, or leaves it: *done tells. `op` is who is named in an error.
Status gemm_cublaslt(const char *op, const Gemm &gemm, cudaStream_t stream, bool *done);

// CUTLASS's, for a product that they take (gemm.cu asks). vectors: whether every line is whole vectors of 16 bytes.
Status gemm_bfloat16_sm80(const char *op, const Gemm &gemm, bool vectors, cudaStream_t stream, bool *done);
Status gemm_float16_sm80(const char *op, const Gemm &gemm, bool vectors, cudaStream_t stream, bool *done);
// rows: of a tile, 64 or 128
Status gemm_bfloat16_sm90(const char *op, const Gemm &gemm, int rows, int multiprocessors, cudaStream_t stream,
                          bool *done);
Status gemm_float16_sm90(const char *op, const Gemm &gemm, int rows, int multiprocessors, cudaStream_t stream,
                         bool *done);

// Runs it, by the best of what is there (gemm.cu).
Status gemm(const char *op, const Gemm &gemm, cudaStream_t stream);

// Every product, summed where they are to be: for that, `scratch` is needed from its element `first` on. Behind the
// first `sums` elements it is cuBLASLt's.
Status multiply(const char *op, const Product &product, bool allow_tf32, const Tensor &scratch, int64_t first,
                int64_t sums, cudaStream_t stream);

}  // namespace AOT_ISA
}  // namespace aot
