// Loads that the second-level cache keeps for longer than what is written meanwhile. With them kernels that write about
// as much as they read took 1 to 4 % less on an H200, down to the time of a copy, and a kernel that read their result
// from the cache took from 1.4 % less to 1.1 % more (docs/lab_notes.md). Before compute capability 8.0 there is no such
// load.
#pragma once
#include "async.cuh"
#include "vector.cuh"

namespace aot {
inline namespace AOT_ISA {

// As load_present.
template <typename T>
__device__ inline Vector<T> load_kept(const T *p, bool present) {
#if __CUDA_ARCH__ >= 800
  Vector<T> v = {};
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_last.b64 policy, 1.0;\n"
      "setp.ne.b32 p, %5, 0;\n@p ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], policy;\n}"
      : "+r"(v.word[0]), "+r"(v.word[1]), "+r"(v.word[2]), "+r"(v.word[3])
      : "l"(p), "r"(static_cast<int>(present))
      : "memory");
  return v;
#else
  return load_present(p, present);
#endif
}

// As load_once.
template <typename T>
__device__ inline Vector<T> load_kept(const T *p) {
#if __CUDA_ARCH__ >= 800
  Vector<T> v;
  asm volatile(
      "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_last.b64 policy, 1.0;\n"
      "ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], policy;\n}"
      : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
      : "l"(p)
      : "memory");
  return v;
#else
  return load_once(p);
#endif
}

// As copy_async, of 16 bytes, to an address that hide_uniform() gave. For compute capability 9.0, where it was
// measured.
__device__ inline void copy_kept(uint32_t shared, const void *global, bool present) {
#if __CUDA_ARCH__ == 900
  asm volatile(
      "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_last.b64 policy, 1.0;\n"
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, policy;\n}" ::"r"(shared),
      "l"(global), "r"(present ? 16 : 0)
      : "memory");
#else
  copy_async(shared, global, present);
#endif
}

// The address of shared memory `p`, in a form that ptxas does not split into a sum with a uniform register: that of
// CUDA 12.9 encodes a copy to such a sum with a cache policy as an illegal instruction.
__device__ inline char *hide_uniform(char *p) {
#if __CUDA_ARCH__ == 900
  return static_cast<char *>(__cvta_shared_to_generic(__shfl_sync(~0u, shared_address(p), threadIdx.x % 32)));
#else
  return p;
#endif
}

}  // namespace AOT_ISA
}  // namespace aot
