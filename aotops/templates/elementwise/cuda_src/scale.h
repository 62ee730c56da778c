// scale    y = x * factor
// gradient dx = dy * factor
#pragma once
#include "aot.h"

namespace aot {
inline namespace AOT_ISA {

struct ScaleAttrs {
  double factor = 1;

  Status init(const Attrs &attrs) { return attrs.get("factor", &factor); }
};

struct Scale : ScaleAttrs {
  static constexpr const char *name = "scale";
  static constexpr Slot inputs[] = {{"x"}};
  static constexpr Slot outputs[] = {{"y"}};

  Status infer(const Tensor *in, Spec *out) const {
    AOT_TRY(check_floating(name, "x", in[0]));
    out[0] = in[0];
    return kOk;
  }
};

struct ScaleBackward : ScaleAttrs {
  static constexpr const char *name = "scale_backward";
  static constexpr Slot inputs[] = {{"dy"}};
  static constexpr Slot outputs[] = {{"dx"}};

  Status infer(const Tensor *in, Spec *out) const {
    AOT_TRY(check_floating(name, "dy", in[0]));
    out[0] = in[0];
    return kOk;
  }
};

}  // namespace AOT_ISA
}  // namespace aot
