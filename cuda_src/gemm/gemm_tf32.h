// CUTLASS's kernel for Hopper for float32 in TF32, a file of its own, which compiles in minutes.
#pragma once
#include "gemm.h"

namespace aot {
inline namespace AOT_ISA {

// For vectors, a not transposed and b so; no relu and no pre_activation.
Status gemm_tf32_sm90(const char *op, const GemmParams &gemm, int multiprocessors, cudaStream_t stream, bool *done);

}  // namespace AOT_ISA
}  // namespace aot
