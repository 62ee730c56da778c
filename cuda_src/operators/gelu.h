// gelu     y = x * Phi(x), with Phi the normal distribution function                   approximate = "none"
//          y = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))                   approximate = "tanh"
// gradient dx = dy * y'(x)
// Hendrycks and Gimpel, arXiv:1606.08415; the arguments are torch.nn.functional.gelu's.
#pragma once
#include "aot.h"

namespace aot {
inline namespace AOT_ISA {

struct GeluAttrs {
  static constexpr const char *kApproximate[] = {"none", "tanh"};
  int approximate = 0;

  Status init(const Attrs &attrs) { return attrs.get("approximate", kApproximate, &approximate); }
  bool tanh() const { return approximate == 1; }
};

struct Gelu : GeluAttrs {
  static constexpr const char *name = "gelu";
  static constexpr Slot inputs[] = {{"x"}};
  static constexpr Slot outputs[] = {{"y"}};

  Status infer(const Tensor *in, Spec *out) const {
    const Spec &x = in[0];
    AOT_TRY(check_floating(name, "x", x));
    out[0] = x;
    return kOk;
  }
};

struct GeluBackward : GeluAttrs {
  static constexpr const char *name = "gelu_backward";
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
