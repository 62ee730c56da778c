// Products by a warpgroup of 128 threads (wgmma), of operands in shared memory as tma.cuh loads them: sm_90a alone.
//
// An operand's boxes have rows of 128 bytes. K-major, the sum goes along a row; MN-major, from row to row: 16-bit
// operands only. A thread's sums of 64 rows: those of element 4 j + 2 half + e are of row 16 warp + lane / 4 + 8 half
// and column 8 j + 2 (lane % 4) + e.
#pragma once
#include <cute/arch/mma_sm90_gmma.hpp>

#include <type_traits>
#include <utility>

#include "vector.cuh"

namespace aot {
inline namespace AOT_ISA {

#ifdef CUTE_ARCH_MMA_SM90A_ENABLED

// A matrix descriptor: adjacent boxes `apart` bytes apart, and groups of 8 rows. swizzle: 1, of 128 bytes; 2, of 64; 3,
// of 32, which are as many as a row has.
__device__ inline uint64_t wgmma_descriptor(uint32_t address, uint32_t apart, uint32_t groups_apart = 1024,
                                            uint64_t swizzle = 1) {
  return uint64_t{(address & 0x3ffff) >> 4} | uint64_t{apart >> 4} << 16 | uint64_t{groups_apart >> 4} << 32 |
         swizzle << 62;
}

// sum = a b, or sum += a b if `add`, for 32 bytes of the sum's axis.
template <typename T, int kCols, bool kAcrossA, bool kAcrossB>
struct Wgmma {
  using Major = cute::SM90::GMMA::Major;
  static constexpr auto major_a = kAcrossA ? Major::MN : Major::K, major_b = kAcrossB ? Major::MN : Major::K;
  static constexpr auto kSums = std::make_index_sequence<kCols / 2>();

  static __device__ void run(uint64_t a, uint64_t b, float (&sum)[kCols / 2], bool add) {
    both_shared(a, b, sum, scale(add), kSums);
  }
  // a: in registers, as the sums of a product lie there, rounded.
  static __device__ void run(const uint32_t (&a)[4], uint64_t b, float (&sum)[kCols / 2], bool add) {
    a_in_registers(a, b, sum, scale(add), kSums);
  }

 private:
  static __device__ cute::SM90::GMMA::ScaleOut scale(bool add) {
    return add ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero;
  }

#define AOT_WGMMA(n)                                                                                      \
  if constexpr (kCols == n) {                                                                             \
    if constexpr (std::is_same_v<T, float>)                                                               \
      cute::SM90::GMMA::MMA_64x##n##x8_F32TF32TF32_SS_TN<>::fma(a, b, sum[i]..., scale);                  \
    else if constexpr (std::is_same_v<T, __half>)                                                         \
      cute::SM90::GMMA::MMA_64x##n##x16_F32F16F16_SS<major_a, major_b>::fma(a, b, sum[i]..., scale);      \
    else cute::SM90::GMMA::MMA_64x##n##x16_F32BF16BF16_SS<major_a, major_b>::fma(a, b, sum[i]..., scale); \
  }
  template <size_t... i>
  static __device__ void both_shared(uint64_t a, uint64_t b, float (&sum)[kCols / 2], cute::SM90::GMMA::ScaleOut scale,
                                     std::index_sequence<i...>) {
    static_assert(kCols == 16 || kCols == 32 || kCols == 96 || (kCols % 64 == 0 && kCols <= 256));
    AOT_WGMMA(16)
    AOT_WGMMA(32)
    AOT_WGMMA(64)
    AOT_WGMMA(96)
    AOT_WGMMA(128)
    AOT_WGMMA(192)
    AOT_WGMMA(256)
  }
#undef AOT_WGMMA

#define AOT_WGMMA(n)                                                                                                \
  if constexpr (kCols == n) {                                                                                       \
    if constexpr (std::is_same_v<T, float>)                                                                         \
      cute::SM90::GMMA::MMA_64x##n##x8_F32TF32TF32_RS_TN<>::fma(a[0], a[1], a[2], a[3], b, sum[i]..., scale);       \
    else if constexpr (std::is_same_v<T, __half>)                                                                   \
      cute::SM90::GMMA::MMA_64x##n##x16_F32F16F16_RS<major_a, major_b>::fma(a[0], a[1], a[2], a[3], b, sum[i]...,   \
                                                                            scale);                                 \
    else                                                                                                            \
      cute::SM90::GMMA::MMA_64x##n##x16_F32BF16BF16_RS<major_a, major_b>::fma(a[0], a[1], a[2], a[3], b, sum[i]..., \
                                                                              scale);                               \
  }
  template <size_t... i>
  static __device__ void a_in_registers(const uint32_t (&a)[4], uint64_t b, float (&sum)[kCols / 2],
                                        cute::SM90::GMMA::ScaleOut scale, std::index_sequence<i...>) {
    static_assert(kCols == 32 || kCols == 96 || (kCols % 64 == 0 && kCols <= 256));
    AOT_WGMMA(32)
    AOT_WGMMA(64)
    AOT_WGMMA(96)
    AOT_WGMMA(128)
    AOT_WGMMA(192)
    AOT_WGMMA(256)
  }
#undef AOT_WGMMA
};

// Orders what wgmma reads and writes after uses of these registers and of shared memory.
__device__ inline void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Ends a group of products.
__device__ inline void wgmma_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending groups are in flight.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of registers across this point, while wgmma reads or writes them asynchronously.
template <int n>
__device__ inline void fence_registers(float (&sum)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}
template <int n, int m>
__device__ inline void fence_registers(float (&sum)[n][m]) {
#pragma unroll
  for (auto &row : sum) fence_registers(row);
}
template <int n>
__device__ inline void fence_registers(uint32_t (&factor)[n][4]) {
#pragma unroll
  for (auto &four : factor)
#pragma unroll
    for (uint32_t &v : four) asm volatile("" : "+r"(v)::"memory");
}

// The registers of a thread from here on, for all threads of a warpgroup.
template <int n>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n));
}
template <int n>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n));
}

#endif

}  // namespace AOT_ISA
}  // namespace aot
