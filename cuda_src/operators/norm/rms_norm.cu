#include "rms_norm.h"

#include "norm.cuh"

AOT_ENTRY(aot::RmsNorm, aot_rms_norm_cuda, aot::norm_cuda<aot::RmsNorm>)
AOT_ENTRY(aot::RmsNormBackward, aot_rms_norm_backward_cuda, aot::norm_backward_cuda<aot::RmsNormBackward>)
