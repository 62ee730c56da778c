#include "norm_cpu.h"

AOT_CPU_ENTRY(aot::LayerNorm, aot_layer_norm_cpu, aot::norm_cpu<aot::LayerNorm>)
AOT_CPU_ENTRY(aot::LayerNormBackward, aot_layer_norm_backward_cpu, aot::norm_backward_cpu<aot::LayerNormBackward>)
