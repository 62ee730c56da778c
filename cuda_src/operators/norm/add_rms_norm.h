// add_rms_norm: y = rms_norm(h), h = x + residual (norm.h).
#pragma once
#include "norm.h"

namespace aot {
inline namespace AOT_ISA {

struct AddRmsNorm : Norm<AddRmsNorm, false, true> {
  static constexpr const char *name = "add_rms_norm";
  static constexpr Slot inputs[] = {{"x"}, {"residual"}, {"weight", optional}};
  static constexpr Slot outputs[] = {{"y"}, {"h"}, {"rstd", optional}};
};

struct AddRmsNormBackward : NormBackward<AddRmsNormBackward, false, true> {
  static constexpr const char *name = "add_rms_norm_backward";
  static constexpr Slot inputs[] = {{"dy"}, {"dh"}, {"h"}, {"weight", optional}, {"rstd", optional}};
  static constexpr Slot outputs[] = {
      {"dx", optional}, {"dresidual", optional}, {"dweight", optional}, {"workspace", workspace}};
};

}  // namespace AOT_ISA
}  // namespace aot
