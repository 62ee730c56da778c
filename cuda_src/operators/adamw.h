// adamw    one step of AdamW (Loshchilov and Hutter, arXiv:1711.05101), in torch's order of operations:
//   g = grad / grad_scale, negated if maximize
//   param = param - lr * weight_decay * param
//   exp_avg = beta1 * exp_avg + (1 - beta1) * g,   exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
//   param = param - lr / (1 - beta1^t) * exp_avg / (sqrt(exp_avg_sq / (1 - beta2^t)) + eps),   t = step + 1
// With amsgrad the largest exp_avg_sq so far takes its place in the last line. If found_inf is not 0, nothing is
// written but next_step = step. Arithmetic is in float32, float64 for float64; the state is used before it is rounded.
#pragma once
#include <cmath>

#include "aot.h"

namespace aot {

// A step on many tensors of the same dtypes: what aot_adamw_tensors_cpu and aot_adamw_tensors_cuda take. The lists have
// an address for each tensor. aotops/adamw.py mirrors it.
struct AdamwTensors {
  int64_t count;
  const int64_t *sizes;  // in elements
  void *const *param, *const *grad, *const *exp_avg, *const *exp_avg_sq;
  float *const *step;                   // numbers, to which 1 is added; on the device
  void *const *max_exp_avg_sq;          // null without amsgrad
  float *const *master;                 // null without parameters in float32
  const float *lr_number;               // on the device, or null: `lr`
  const float *grad_scale, *found_inf;  // on the device, or null
  double lr, beta1, beta2, eps, weight_decay;
  const char *dtype, *state_dtype;
  int unscale;  // whether grad becomes grad / grad_scale
  int maximize, device;
  void *stream;
};

inline namespace AOT_ISA {

struct Adamw {
  static constexpr const char *name = "adamw";
  static constexpr const char *kNumber = "float32";
  static constexpr Slot inputs[] = {{"param"},
                                    {"grad"},
                                    {"exp_avg"},
                                    {"exp_avg_sq"},
                                    {"step", required, kNumber},
                                    {"lr", required, kNumber},
                                    {"grad_scale", optional, kNumber},
                                    {"found_inf", optional, kNumber}};
  static constexpr Slot outputs[] = {{"next_step", required, kNumber}};
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.01;
  bool maximize = false;

  Status init(const Attrs &attrs) {
    AOT_TRY(attrs.get("beta1", &beta1));
    AOT_TRY(attrs.get("beta2", &beta2));
    AOT_TRY(attrs.get("eps", &eps));
    AOT_TRY(attrs.get("weight_decay", &weight_decay));
    AOT_TRY(attrs.get("maximize", &maximize));
    AOT_TRY(check_beta("beta1", beta1));
    AOT_TRY(check_beta("beta2", beta2));
    AOT_TRY(check_not_negative("eps", eps));
    return check_not_negative("weight_decay", weight_decay);
  }

  Status infer(const Tensor *in, Spec *out) const {
    const Spec &param = in[0], &exp_avg = in[2], &exp_avg_sq = in[3];
    AOT_TRY(check_floating(name, "param", param));
    AOT_TRY(check_like(name, "grad", in[1], "param", param));
    AOT_TRY(check_floating(name, "exp_avg", exp_avg));
    if (!is_state_dtype(param.dtype, exp_avg.dtype))
      return fail(kUnsupportedDtype, "%s: exp_avg has dtype %s, expected %s", name, dtype_name(exp_avg.dtype),
                  param.dtype == DType::float64 ? "float64" : "float32, bfloat16 or that of param");
    AOT_TRY(check_shape(name, "exp_avg", exp_avg, "param", param));
    AOT_TRY(check_like(name, "exp_avg_sq", exp_avg_sq, "exp_avg", exp_avg));
    for (int i = 4; i < 8; ++i)
      if (in[i]) AOT_TRY(check_number(inputs[i].name, in[i]));
    out[0] = in[4];
    return kOk;
  }

  static bool is_state_dtype(DType param, DType state) {
    if (same_dtype(param, state)) return true;
    return param != DType::float64 && (state == DType::float32 || state == DType::bfloat16);
  }

 private:
  Status check_beta(const char *slot, double beta) const {
    if (beta >= 0 && beta < 1) return kOk;
    return fail(kInvalidArgument, "%s: %s is %g, expected a number in [0, 1)", name, slot, beta);
  }
  Status check_not_negative(const char *slot, double value) const {
    if (value >= 0) return kOk;
    return fail(kInvalidArgument, "%s: %s is %g, expected a number of at least 0", name, slot, value);
  }
  Status check_number(const char *slot, const Spec &s) const {
    AOT_TRY(check_dtype(name, slot, s, DType::float32));
    if (!s.rank_known() || s.ndim == 0) return kOk;
    return fail(kInvalidArgument, "%s: %s has shape %s, expected ()", name, slot, ShapeText(s).text);
  }
};

// Checks what Python code of this package passes.
inline Status check(const AdamwTensors &call) {
  const DType dtype = parse_dtype(call.dtype), state = parse_dtype(call.state_dtype);
  if (!is_floating(dtype) || !is_floating(state) || !Adamw::is_state_dtype(dtype, state))
    return fail(kUnsupportedDtype, "adamw: the parameters have dtype %s and the state %s, which is not supported",
                call.dtype, call.state_dtype);
  if (call.master && itemsize(dtype) != 2)
    return fail(kUnsupportedDtype, "adamw: the parameters have dtype %s, expected float16 or bfloat16 beside others",
                call.dtype);
  return kOk;
}

}  // namespace AOT_ISA
}  // namespace aot
