// Loads that the second-level cache keeps for longer than what is written meanwhile. With them kernels that write about
// as much as they read took 1 to 4 % less on an H200, down to the time of a copy, and a kernel that read their result
// from the cache took from 1.4 % less to 1.1 % more (docs/lab_notes.md). Before compute capability 8.0 there is no such
// load.
#pragma once
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

}  // namespace AOT_ISA
}  // namespace aot
