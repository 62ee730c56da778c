#include "batch_norm_cpu.h"

AOT_CPU_ENTRY(aot::BatchNormRelu, aot_batch_norm_relu_cpu, aot::batch_norm_cpu<aot::BatchNormRelu>)
AOT_CPU_ENTRY(aot::BatchNormReluBackward, aot_batch_norm_relu_backward_cpu,
              aot::batch_norm_backward_cpu<aot::BatchNormReluBackward>)
