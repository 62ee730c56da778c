#include "gemm_sm90.cuh"
#include "gemm_tf32.h"

namespace aot {
inline namespace AOT_ISA {

Status gemm_tf32_sm90(const char *op, const GemmParams &g, int multiprocessors, cudaStream_t stream, bool *done) {
  return Sm90Kernel<float, cute::Shape<cute::_128, cute::_128, cute::_32>, cute::Shape<cute::_2, cute::_1, cute::_1>,
                    cute::Shape<cute::_64, cute::_32>, true, false, false, true, FloatActivation>::run(op, g,
                                                                                                       multiprocessors,
                                                                                                       stream, done);
}

}  // namespace AOT_ISA
}  // namespace aot
