// rms_norm (norm.h). The arguments are torch.nn.functional.rms_norm's.
#pragma once
#include "norm.h"

namespace aot {
inline namespace AOT_ISA {

struct RmsNorm : Norm<RmsNorm, false, false> {
  static constexpr const char *name = "rms_norm";
  static constexpr Slot inputs[] = {{"x"}, {"weight", optional}};
  static constexpr Slot outputs[] = {{"y"}, {"rstd", optional}};
};

struct RmsNormBackward : NormBackward<RmsNormBackward, false, false> {
  static constexpr const char *name = "rms_norm_backward";
  static constexpr Slot inputs[] = {{"dy"}, {"x"}, {"weight", optional}, {"rstd", optional}};
  static constexpr Slot outputs[] = {{"dx", optional}, {"dweight", optional}, {"workspace", workspace}};
};

}  // namespace AOT_ISA
}  // namespace aot
