// add      y = a + alpha * b, equal shapes; without b: y = a + alpha * b_number
// gradient da = dy, db = alpha * dy: nothing to compute, a frontend hands dy on, and multiplies it unless alpha is 1
#pragma once
#include <cfloat>

#include "aot.h"

namespace aot {
inline namespace AOT_ISA {

struct Add {
  static constexpr const char *name = "add";
  static constexpr Slot inputs[] = {{"a"}, {"b", optional}};
  static constexpr Slot outputs[] = {{"y"}};
  double alpha = 1;
  Number b_number;  // in place of the tensor b

  Status init(const Attrs &attrs) {
    AOT_TRY(attrs.get("alpha", &alpha));
    return attrs.get("b_number", &b_number);
  }

  Status infer(const Tensor *in, Spec *out) const {
    AOT_TRY(check_floating(name, "a", in[0]));
    if (!in[1] && !b_number.given) return fail(kUnsupportedDtype, "%s: b is None, expected a tensor or a number", name);
    if (in[1] && b_number.given)
      return fail(kInvalidArgument, "%s: b_number is %g, expected None beside b", name, b_number.value);
    if (in[1]) {
      AOT_TRY(check_like(name, "b", in[1], "a", in[0]));
      AOT_TRY(check_alpha(in[0].dtype));
    }
    out[0] = in[0];
    return kOk;
  }

  // The number that is added if b is absent.
  double addend() const { return alpha * b_number.value; }

 private:
  // A finite alpha that is an infinity in float32 would make a NaN of a zero in b.
  Status check_alpha(DType dtype) const {
    const double magnitude = alpha < 0 ? -alpha : alpha;
    if (dtype == DType::float64 || !(magnitude > FLT_MAX && magnitude <= DBL_MAX)) return kOk;
    return fail(kInvalidArgument, "%s: alpha is %g, expected a number in the range of float32 for %s", name, alpha,
                dtype_name(dtype));
  }
};

}  // namespace AOT_ISA
}  // namespace aot
