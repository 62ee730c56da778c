// Products of matrices by a warp: mma.sync of (16, 16) and (16, 8) in 16 bits, of (16, 8) and (8, 8) in TF32, and
// ldmatrix, which brings operands from shared memory to the registers where it wants them. From compute capability 8.0
// on.
//
// Lane l of a product's result, (16, 8), has columns 2 (l % 4) and the next of rows l / 4 and l / 4 + 8, in this order.
#pragma once
#include "async.cuh"
#include "vector.cuh"

namespace aot {
inline namespace AOT_ISA {

// Four matrices of 8 x 8: lane l gives the address of a row, l % 8 of matrix l / 8.
__device__ inline void load_matrices(uint32_t (&to)[4], uint32_t row) {
#if __CUDA_ARCH__ >= 750
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
#endif
}
__device__ inline void load_transposed_matrices(uint32_t (&to)[4], uint32_t row) {
#if __CUDA_ARCH__ >= 750
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
#endif
}

#define AOT_MMA(size, dtype)                                                 \
  asm("mma.sync.aligned." size ".row.col.f32." dtype "." dtype               \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])               \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

// sum += a b. The last argument is of the elements' type.
__device__ inline void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __half) {
#if __CUDA_ARCH__ >= 800
  AOT_MMA("m16n8k16", "f16");
#endif
}
__device__ inline void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __nv_bfloat16) {
#if __CUDA_ARCH__ >= 800
  AOT_MMA("m16n8k16", "bf16");
#endif
}

// A word is an element, of which TF32's bits are taken.
__device__ inline void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float) {
#if __CUDA_ARCH__ >= 800
  AOT_MMA("m16n8k8", "tf32");
#endif
}

#undef AOT_MMA

}  // namespace AOT_ISA
}  // namespace aot
