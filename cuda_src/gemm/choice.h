// The choice between cuBLASLt and the library's own kernels, for products that both support.
#pragma once
#include <cstdlib>
#include <cstring>

#include "gemm.h"

namespace aot {
inline namespace AOT_ISA {

// Whether there is a cuBLASLt that may be used: not if $AOTOPS_GEMM is "own".
bool has_cublaslt();

// The values of $AOTOPS_GEMM (docs/building.md).
enum class GemmMode { automatic, cublaslt, own, unknown };

inline GemmMode gemm_mode() {
  static const GemmMode mode = [] {
    const char *names[] = {"auto", "cublaslt", "own"}, *text = std::getenv("AOTOPS_GEMM");
    if (!text || !*text) return GemmMode::automatic;
    for (int i = 0; i < 3; ++i)
      if (!std::strcmp(text, names[i])) return static_cast<GemmMode>(i);
    return GemmMode::unknown;
  }();
  return mode;
}

inline Status check_gemm_mode(const char *op) {
  if (gemm_mode() != GemmMode::unknown) return kOk;
  return fail(kDeviceError, "%s: AOTOPS_GEMM is '%s', expected 'auto', 'cublaslt' or 'own'", op,
              std::getenv("AOTOPS_GEMM"));
}

// Whether cuBLASLt runs a product before the library's own kernels do. It does by default, except with an activation in
// 16 bits, which its epilogue does not have, so that it takes a second kernel. On an H200 the steps of a model were
// slower with the library's own kernel for all products, although single products were faster at a given clock
// (docs/lab_notes.md). The choice does not depend on whether pre_activation is wanted, and so the bits of c do not
// either.
inline bool prefers_cublaslt(const GemmParams &g) {
  if (gemm_mode() == GemmMode::own) return false;
  return gemm_mode() == GemmMode::cublaslt || itemsize(g.dtype) > 2 || g.activation == kActivationNone;
}

}  // namespace AOT_ISA
}  // namespace aot
