// The struct of operators/adamw.h that aotops/adamw.py mirrors.
#include "operators/adamw.h"

#include "cpython.h"

AOT_API const char *aot_adamw_structs() {
  using aot::AdamwTensors;
  static const std::string text =
      "version 1" + AOT_DESCRIBE(AdamwTensors, count, sizes, param, grad, exp_avg, exp_avg_sq, step, max_exp_avg_sq,
                                 master, lr_number, grad_scale, found_inf, lr, beta1, beta2, eps, weight_decay, dtype,
                                 state_dtype, unscale, maximize, device, stream);
  return text.c_str();
}
