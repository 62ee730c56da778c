// Exports the CPU entry of an operator.
//
// The Makefile compiles each <op>.cpp once per instruction set, AOT_ISA: baseline, and on x86-64 also avx2 (x86-64-v3)
// and avx512 (x86-64-v4), or fewer of them (ISAS). The baseline build exports the entry. The entry dispatches to the
// best build that the library contains and the processor supports. Only the baseline build instantiates templates that
// the linker may merge, such as std::vector's.
#pragma once
#include <cstdlib>

#include "aot.h"

#define AOT_PASTE_(a, b) a##b
#define AOT_PASTE(a, b) AOT_PASTE_(a, b)

#define AOT_ARGUMENTS \
  int nparam, void **params, int *ndims, int64_t **shapes, const char **dtypes, void *stream, void *extra
#define AOT_HIDDEN extern "C" __attribute__((visibility("hidden")))

#define AOT_IS_baseline 1
#if !AOT_PASTE(AOT_IS_, AOT_ISA)

#define AOT_CPU_ENTRY(Op, symbol, launcher)                                                \
  AOT_HIDDEN int AOT_PASTE(symbol##_, AOT_ISA)(AOT_ARGUMENTS) {                            \
    return ::aot::run<Op>(launcher, nparam, params, ndims, shapes, dtypes, stream, extra); \
  }

#elif !defined(__x86_64__)

#define AOT_CPU_ENTRY(Op, symbol, launcher) AOT_ENTRY(Op, symbol, launcher)

#else

namespace aot {
inline namespace AOT_ISA {

enum CpuIsa { kBaseline, kAvx2, kAvx512 };

// The best instruction set that the processor supports, or a lower one that AOTOPS_CPU_ISA names. aotops/library.py
// refuses other names.
inline CpuIsa find_cpu_isa() {
  __builtin_cpu_init();
  CpuIsa best = __builtin_cpu_supports("x86-64-v4") ? kAvx512 : __builtin_cpu_supports("x86-64-v3") ? kAvx2 : kBaseline;
  const char *names[] = {"baseline", "avx2", "avx512"}, *wanted = std::getenv("AOTOPS_CPU_ISA");
  for (int isa = kBaseline; wanted && isa < best; ++isa)
    if (!std::strcmp(wanted, names[isa])) return static_cast<CpuIsa>(isa);
  return best;
}

inline CpuIsa cpu_isa() {
  static const CpuIsa isa = find_cpu_isa();
  return isa;
}

}  // namespace AOT_ISA
}  // namespace aot

// Weak: null if the library was built without that instruction set.
#define AOT_CPU_ENTRY(Op, symbol, launcher)                                                \
  AOT_HIDDEN __attribute__((weak)) int symbol##_avx2(AOT_ARGUMENTS);                       \
  AOT_HIDDEN __attribute__((weak)) int symbol##_avx512(AOT_ARGUMENTS);                     \
  AOT_API int symbol(AOT_ARGUMENTS) {                                                      \
    const ::aot::CpuIsa isa = ::aot::cpu_isa();                                            \
    if (isa >= ::aot::kAvx512 && symbol##_avx512)                                          \
      return symbol##_avx512(nparam, params, ndims, shapes, dtypes, stream, extra);        \
    if (isa >= ::aot::kAvx2 && symbol##_avx2)                                              \
      return symbol##_avx2(nparam, params, ndims, shapes, dtypes, stream, extra);          \
    return ::aot::run<Op>(launcher, nparam, params, ndims, shapes, dtypes, stream, extra); \
  }                                                                                        \
  AOT_COMPANIONS(Op, symbol)

#endif
