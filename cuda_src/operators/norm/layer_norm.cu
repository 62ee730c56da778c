#include "layer_norm.h"

#include "norm.cuh"

AOT_ENTRY(aot::LayerNorm, aot_layer_norm_cuda, aot::norm_cuda<aot::LayerNorm>)
AOT_ENTRY(aot::LayerNormBackward, aot_layer_norm_backward_cuda, aot::norm_backward_cuda<aot::LayerNormBackward>)
