#include "gemm_sm80.cuh"

namespace aot {
inline namespace AOT_ISA {

Status gemm_bfloat16_sm80(const char *op, const GemmParams &gemm, bool vectors, cudaStream_t stream, bool *done) {
  return gemm_sm80<cutlass::bfloat16_t>(op, gemm, vectors, stream, done);
}

}  // namespace AOT_ISA
}  // namespace aot
