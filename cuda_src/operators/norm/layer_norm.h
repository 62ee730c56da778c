// layer_norm (norm.h). The arguments are torch.nn.functional.layer_norm's.
#pragma once
#include "norm.h"

namespace aot {
inline namespace AOT_ISA {

struct LayerNorm : Norm<LayerNorm, true, false> {
  static constexpr const char *name = "layer_norm";
  static constexpr Slot inputs[] = {{"x"}, {"weight", optional}, {"bias", optional}};
  static constexpr Slot outputs[] = {{"y"}, {"stats", optional}};
};

struct LayerNormBackward : NormBackward<LayerNormBackward, true, false> {
  static constexpr const char *name = "layer_norm_backward";
  static constexpr Slot inputs[] = {{"dy"}, {"x"}, {"weight", optional}, {"stats", optional}};
  static constexpr Slot outputs[] = {
      {"dx", optional}, {"dweight", optional}, {"dbias", optional}, {"workspace", workspace}};
};

}  // namespace AOT_ISA
}  // namespace aot
