#include "norm_backward.cuh"
#include "norm_forward.cuh"

template aot::Status aot::norm_stats<false>(const char *, const Tensor &, void *, int64_t, int64_t, double, void *);

AOT_ENTRY(aot::RmsNorm, aot_rms_norm_cuda, aot::norm_cuda<aot::RmsNorm>)
AOT_ENTRY(aot::RmsNormBackward, aot_rms_norm_backward_cuda, aot::norm_backward_cuda<aot::RmsNormBackward>)
