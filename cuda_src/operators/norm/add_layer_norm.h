// add_layer_norm: y = layer_norm(h), h = x + residual (norm.h).
#pragma once
#include "norm.h"

namespace aot {
inline namespace AOT_ISA {

struct AddLayerNorm : Norm<AddLayerNorm, true, true> {
  static constexpr const char *name = "add_layer_norm";
  static constexpr Slot inputs[] = {{"x"}, {"residual"}, {"weight", optional}, {"bias", optional}};
  static constexpr Slot outputs[] = {{"y"}, {"h"}, {"stats", optional}};
};

struct AddLayerNormBackward : NormBackward<AddLayerNormBackward, true, true> {
  static constexpr const char *name = "add_layer_norm_backward";
  static constexpr Slot inputs[] = {{"dy"}, {"dh"}, {"h"}, {"weight", optional}, {"stats", optional}};
  static constexpr Slot outputs[] = {
      {"dx", optional}, {"dresidual", optional}, {"dweight", optional}, {"dbias", optional}, {"workspace", workspace}};
};

}  // namespace AOT_ISA
}  // namespace aot
