#include "norm_backward.cuh"
#include "norm_forward.cuh"

template aot::Status aot::norm_stats<true>(const char *, const Tensor &, void *, int64_t, int64_t, double, void *);

AOT_ENTRY(aot::LayerNorm, aot_layer_norm_cuda, aot::norm_cuda<aot::LayerNorm>)
AOT_ENTRY(aot::LayerNormBackward, aot_layer_norm_backward_cuda, aot::norm_backward_cuda<aot::LayerNormBackward>)
