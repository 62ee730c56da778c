// add2     c = a + b
// Its gradient has no kernel: da and db are dc.
#pragma once
#include "aot.h"

namespace aot {
inline namespace AOT_ISA {

struct Add2 {
  static constexpr const char *name = "add2";
  static constexpr Slot inputs[] = {{"a"}, {"b"}};
  static constexpr Slot outputs[] = {{"c"}};

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
