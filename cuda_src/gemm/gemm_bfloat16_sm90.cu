#include "gemm_sm90.cuh"

namespace aot {
inline namespace AOT_ISA {

Status gemm_bfloat16_sm90(const char *op, const GemmParams &gemm, int rows, int multiprocessors, cudaStream_t stream,
                          bool *done) {
  return gemm_sm90<cutlass::bfloat16_t>(op, gemm, rows, multiprocessors, stream, done);
}

}  // namespace AOT_ISA
}  // namespace aot
