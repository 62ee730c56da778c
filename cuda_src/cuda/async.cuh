// Asynchronous copies from global to shared memory (cp.async), which compute capability 8.0 introduced.
#pragma once
#include <cstdint>
#include <type_traits>

namespace aot {
inline namespace AOT_ISA {

__device__ inline uint32_t shared_address(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Copies kBytes, 4, 8 or 16, or writes zeros if they are not `present`. Older devices copy synchronously.
template <int kBytes = 16>
__device__ inline void copy_async(uint32_t shared, const void *global, bool present) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(present ? 16 : 0)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(kBytes),
                 "r"(present ? kBytes : 0)
                 : "memory");
#else
  using Bytes = std::conditional_t<kBytes == 16, uint4, std::conditional_t<kBytes == 8, uint2, uint32_t> >;
  *static_cast<Bytes *>(__cvta_shared_to_generic(shared)) = present ? *static_cast<const Bytes *>(global) : Bytes{};
#endif
}
__device__ inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most kPending of this thread's committed groups are in flight.
template <int kPending>
__device__ inline void wait_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace AOT_ISA
}  // namespace aot
