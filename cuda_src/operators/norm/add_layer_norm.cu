#include "norm_backward.cuh"
#include "norm_forward.cuh"

AOT_ENTRY(aot::AddLayerNorm, aot_add_layer_norm_cuda, aot::norm_cuda<aot::AddLayerNorm>)
AOT_ENTRY(aot::AddLayerNormBackward, aot_add_layer_norm_backward_cuda,
          aot::norm_backward_cuda<aot::AddLayerNormBackward>)
