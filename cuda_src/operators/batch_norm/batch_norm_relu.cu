#include "batch_norm.cuh"

using namespace aot;

AOT_ENTRY(BatchNormRelu, aot_batch_norm_relu_cuda, batch_norm_cuda<BatchNormRelu>)
AOT_ENTRY(BatchNormReluBackward, aot_batch_norm_relu_backward_cuda, batch_norm_backward_cuda<BatchNormReluBackward>)
