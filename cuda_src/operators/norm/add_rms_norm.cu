#include "norm_backward.cuh"
#include "norm_forward.cuh"

AOT_ENTRY(aot::AddRmsNorm, aot_add_rms_norm_cuda, aot::norm_cuda<aot::AddRmsNorm>)
AOT_ENTRY(aot::AddRmsNormBackward, aot_add_rms_norm_backward_cuda, aot::norm_backward_cuda<aot::AddRmsNormBackward>)
