// The choice between cuBLASLt and the library's own kernels, for products that both support: by $AOTOPS_GEMM, else by
// a table of measurements.
#pragma once
#include <cstdlib>
#include <cstring>

#include "gemm.h"

namespace aot {
inline namespace AOT_ISA {

// Whether there is a cuBLASLt that may be used: not if $AOTOPS_GEMM is "own".
bool has_cublaslt();

// The values of $AOTOPS_GEMM (docs/building.md).
enum class GemmMode { automatic, cublaslt, own, tune, unknown };

inline GemmMode gemm_mode() {
  static const GemmMode mode = [] {
    const char *names[] = {"auto", "cublaslt", "own", "tune"}, *text = std::getenv("AOTOPS_GEMM");
    if (!text || !*text) return GemmMode::automatic;
    for (int i = 0; i < 4; ++i)
      if (!std::strcmp(text, names[i])) return static_cast<GemmMode>(i);
    return GemmMode::unknown;
  }();
  return mode;
}

inline Status check_gemm_mode(const char *op) {
  if (gemm_mode() != GemmMode::unknown) return kOk;
  return fail(kDeviceError, "%s: AOTOPS_GEMM is '%s', expected 'auto', 'cublaslt', 'own' or 'tune'", op,
              std::getenv("AOTOPS_GEMM"));
}

// A 16-bit product of which the kernel that is not the default was faster. activation: whether it has one.
struct MeasuredProduct {
  int major;  // of the compute capability
  bool a_transposed, b_transposed, activation;
  int64_t m, n, k;

  // Whether another product is of the same kind and about the same size.
  bool covers(int device, const GemmParams &g) const {
    auto near = [](int64_t x, int64_t y) { return 2 * x <= 3 * y && 2 * y <= 3 * x; };
    return major == device && a_transposed == g.a.transposed && b_transposed == g.b.transposed &&
           activation == (g.activation != kActivationNone) && near(m, g.m) && near(n, g.n) && near(k, g.k);
  }
};

// Measured by benchmarks/products.py, which writes these rows. There is none: with the library's own kernel for all
// products of a model, its steps were slower on an H200, although single products were faster at a given clock.
constexpr MeasuredProduct kMeasured[] = {
    {0, false, false, false, 0, 0, 0},
};

// Whether cuBLASLt runs a product before the library's own kernels do. It does by default, except with an activation in
// 16 bits, which its epilogue does not have, so that it takes a second kernel. The choice does not depend on whether
// pre_activation is wanted, and so the bits of c do not either.
inline bool prefers_cublaslt(int major, const GemmParams &g) {
  const bool half = itemsize(g.dtype) == 2, by_default = !half || g.activation == kActivationNone;
  if (gemm_mode() == GemmMode::own) return false;
  if (gemm_mode() == GemmMode::cublaslt) return true;
  if (half && g.count == 1)
    for (const MeasuredProduct &row : kMeasured)
      if (row.covers(major, g)) return !by_default;
  return by_default;
}

}  // namespace AOT_ISA
}  // namespace aot
