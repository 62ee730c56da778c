#include "batch_norm_cpu.h"

AOT_CPU_ENTRY(aot::BatchNorm, aot_batch_norm_cpu, aot::batch_norm_cpu<aot::BatchNorm>)
AOT_CPU_ENTRY(aot::BatchNormBackward, aot_batch_norm_backward_cpu, aot::batch_norm_backward_cpu<aot::BatchNormBackward>)
