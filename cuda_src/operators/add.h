// add      y = a + b, equal shapes
// gradient da = db = dy: nothing to compute, a frontend hands dy on
#pragma once
#include "aot.h"

namespace aot {
inline namespace AOT_ISA {

struct Add {
  static constexpr const char *name = "add";
  static constexpr Slot inputs[] = {{"a"}, {"b"}};
  static constexpr Slot outputs[] = {{"y"}};

  Status init(const Attrs &) { return kOk; }

  Status infer(const Tensor *in, Spec *out) const {
    AOT_TRY(check_floating(name, "a", in[0]));
    AOT_TRY(check_like(name, "b", in[1], "a", in[0]));
    out[0] = in[0];
    return kOk;
  }
};

}  // namespace AOT_ISA
}  // namespace aot
