// Products of 16-bit matrices on Hopper whose c is not in whole vectors, or whose sizes are not: as gemm_sm90 (gemm.h),
// but only the lines of a and b begin at multiples of 16 bytes.
#pragma once
#include "gemm.h"

namespace aot {
inline namespace AOT_ISA {

// Every layout, c in the operands' dtype; an epilogue only with K-major operands, as linear's forward has them.
Status gemm_unaligned_sm90(const char *op, const GemmParams &gemm, int multiprocessors, cudaStream_t stream);

}  // namespace AOT_ISA
}  // namespace aot
