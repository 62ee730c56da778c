#include "rms_norm.h"

#include "norm_backward.cuh"
#include "norm_forward.cuh"

namespace aot {
inline namespace AOT_ISA {

template <>
Status norm_stats<false>(const char *op, const Tensor &x, void *stats, int64_t rows, int64_t cols, double eps,
                         void *stream) {
  return launch_stats<false>(op, x, stats, rows, cols, eps, stream);
}

}  // namespace AOT_ISA
}  // namespace aot

AOT_ENTRY(aot::RmsNorm, aot_rms_norm_cuda, aot::norm_cuda<aot::RmsNorm>)
AOT_ENTRY(aot::RmsNormBackward, aot_rms_norm_backward_cuda, aot::norm_backward_cuda<aot::RmsNormBackward>)
