#include "qkv_attention.h"

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(QkvAttention, aot_qkv_attention_cuda, qkv_attention)
AOT_ENTRY(QkvAttentionBackward, aot_qkv_attention_backward_cuda, qkv_attention_backward)
