// GEMM on CUDA: the parameters that every kernel takes, and the choice between the kernels.
#pragma once
#include <cuda_runtime_api.h>

#include "matrix.h"

namespace aot {
inline namespace AOT_ISA {

// c = a b for `count` matrices at equal distances.
struct GemmParams {
  DType dtype;    // of a and b
  DType c_dtype;  // dtype, or its accumulate dtype
  int64_t m, n, k;
  Operand a, b, c;
  int64_t count = 1, a_step = 0, b_step = 0, c_step = 0;  // steps: elements from one matrix to the next
  bool allow_tf32 = false;
  bool adds = false;  // c += a b; c_dtype is the accumulate dtype, and there is no epilogue

  // Epilogue: c = activation(a b + bias), for count = 1 and contiguous c. If pre_activation is not null, a b + bias is
  // stored there as well, with c's strides.
  const void *bias = nullptr;
  Activation activation = kActivationNone;
  void *pre_activation = nullptr;

  void *workspace = nullptr;
  int64_t workspace_bytes = 0;
};

// Runs the GEMM by the best kernel that supports it. `op` is named in errors.
Status gemm(const char *op, const GemmParams &gemm, cudaStream_t stream);

// The kernels. *done: whether the kernel supports the GEMM, and has run it.

Status gemm_cublaslt(const char *op, const GemmParams &gemm, cudaStream_t stream, bool *done);
// Whether cuBLASLt runs a product before the library's own kernels do.
bool prefers_cublaslt(const GemmParams &gemm);
// An error if $AOTOPS_CUBLASLT names a library that cannot be used, or $AOTOPS_GEMM is unknown.
Status check_cublaslt(const char *op);

// CUTLASS's, for T = __half or __nv_bfloat16. vectors: whether every line of a matrix is whole, aligned vectors of 16
// bytes; rows: of a tile, 64 or 128.
template <typename T>
Status gemm_sm80(const char *op, const GemmParams &gemm, bool vectors, cudaStream_t stream, bool *done);
template <typename T>
Status gemm_sm90(const char *op, const GemmParams &gemm, int rows, int multiprocessors, cudaStream_t stream,
                 bool *done);
// CUTLASS's for GemmParams::adds, of float16 and bfloat16, with vectors, a transposed and b not.
Status gemm_accumulate_sm80(const char *op, const GemmParams &gemm, cudaStream_t stream, bool *done);
Status gemm_accumulate_sm90(const char *op, const GemmParams &gemm, int rows, int multiprocessors, cudaStream_t stream,
                            bool *done);

// Runs all products of the problem, and sums them as it says. scratch, in elements of the accumulate dtype: from
// `first` on for unreduced products; from `reserved` on cuBLASLt's.
Status run_matmul(const char *op, const MatmulProblem &problem, bool allow_tf32, const Tensor &scratch, int64_t first,
                  int64_t reserved, cudaStream_t stream);

}  // namespace AOT_ISA
}  // namespace aot
