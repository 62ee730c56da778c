#include "norm_cpu.h"

AOT_CPU_ENTRY(aot::RmsNorm, aot_rms_norm_cpu, aot::norm_cpu<aot::RmsNorm>)
AOT_CPU_ENTRY(aot::RmsNormBackward, aot_rms_norm_backward_cpu, aot::norm_backward_cpu<aot::RmsNormBackward>)
