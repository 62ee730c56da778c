#include "norm_cpu.h"

AOT_CPU_ENTRY(aot::AddRmsNorm, aot_add_rms_norm_cpu, aot::norm_cpu<aot::AddRmsNorm>)
AOT_CPU_ENTRY(aot::AddRmsNormBackward, aot_add_rms_norm_backward_cpu, aot::norm_backward_cpu<aot::AddRmsNormBackward>)
