#include "qkv_attention.h"
#include "cpu/entry.h"

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::QkvAttention, aot_qkv_attention_cpu, aot::qkv_attention)
AOT_CPU_ENTRY(aot::QkvAttentionBackward, aot_qkv_attention_backward_cpu, aot::qkv_attention_backward)
