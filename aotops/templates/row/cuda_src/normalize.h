// normalize, along the last axis
//          y = x * r, where r = 1 / sqrt(sum(x * x) + eps)
// gradient dx = (dy - x * sum(dy * x) * r * r) * r
#pragma once
#include "aot.h"

namespace aot {
inline namespace AOT_ISA {

struct NormalizeAttrs {
  double eps = 1e-6;

  Status init(const Attrs &attrs) { return attrs.get("eps", &eps); }

  static int64_t cols(const Spec &x) { return x.ndim > 0 ? x.shape[x.ndim - 1] : 1; }
  static int64_t rows(const Spec &x) { return x.product(0, x.ndim - 1); }
};

struct Normalize : NormalizeAttrs {
  static constexpr const char *name = "normalize";
  static constexpr Slot inputs[] = {{"x"}};
  static constexpr Slot outputs[] = {{"y"}};

  Status infer(const Tensor *in, Spec *out) const {
    AOT_TRY(check_floating(name, "x", in[0]));
    out[0] = in[0];
    return kOk;
  }
};

struct NormalizeBackward : NormalizeAttrs {
  static constexpr const char *name = "normalize_backward";
  static constexpr Slot inputs[] = {{"dy"}, {"x"}};
  static constexpr Slot outputs[] = {{"dx"}};

  Status infer(const Tensor *in, Spec *out) const {
    const Spec &dy = in[0], &x = in[1];
    AOT_TRY(check_floating(name, "x", x));
    AOT_TRY(check_like(name, "dy", dy, "x", x));
    out[0] = x;
    return kOk;
  }
};

}  // namespace AOT_ISA
}  // namespace aot
