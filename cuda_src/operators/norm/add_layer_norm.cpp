#include "norm_cpu.h"

AOT_CPU_ENTRY(aot::AddLayerNorm, aot_add_layer_norm_cpu, aot::norm_cpu<aot::AddLayerNorm>)
AOT_CPU_ENTRY(aot::AddLayerNormBackward, aot_add_layer_norm_backward_cpu,
              aot::norm_backward_cpu<aot::AddLayerNormBackward>)
