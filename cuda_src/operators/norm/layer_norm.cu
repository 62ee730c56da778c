#include "layer_norm.h"

#include "norm_backward.cuh"
#include "norm_forward.cuh"

namespace aot {
inline namespace AOT_ISA {

template <>
Status norm_stats<true>(const char *op, const Tensor &x, void *stats, int64_t rows, int64_t cols, double eps,
                        void *stream) {
  return launch_stats<true>(op, x, stats, rows, cols, eps, stream);
}

}  // namespace AOT_ISA
}  // namespace aot

AOT_ENTRY(aot::LayerNorm, aot_layer_norm_cuda, aot::norm_cuda<aot::LayerNorm>)
AOT_ENTRY(aot::LayerNormBackward, aot_layer_norm_backward_cuda, aot::norm_backward_cuda<aot::LayerNormBackward>)
