#include "linear_cross_entropy_lse.h"

#include "cpu/entry.h"

AOT_CPU_ENTRY(aot::LinearCrossEntropyLse, aot_linear_cross_entropy_lse_cpu, aot::linear_cross_entropy_lse)
AOT_CPU_ENTRY(aot::LinearCrossEntropyLseBackward, aot_linear_cross_entropy_lse_backward_cpu,
              aot::linear_cross_entropy_lse_backward)
