// Calls an operator of libaotops.so through LibTorch's dispatcher, as torch.ops.aotops.add_rms_norm does in Python.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <aotops.h>

#include <cstdio>

int main() {
  if (aot_torch_register()) return std::fprintf(stderr, "%s\n", aot_last_error()), 1;
  using AddRmsNorm = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
      const at::Tensor &x, const at::Tensor &residual, const std::optional<at::Tensor> &weight,
      const std::optional<at::Tensor> &bias, c10::SymIntArrayRef normalized_shape, std::optional<double> eps,
      double weight_offset);
  const auto add_rms_norm =
      c10::Dispatcher::singleton().findSchemaOrThrow("aotops::add_rms_norm", "").typed<AddRmsNorm>();

  const at::Tensor x = at::ones({2, 3}), weight = at::full({3}, 2.0);
  const auto [y, h, rstd] = add_rms_norm.call(x, x, weight, {}, {3}, 1e-6, 0.0);
  std::printf("h %.4f, y %.4f\n", h[0][0].item<double>(), y[0][0].item<double>());
  try {
    add_rms_norm.call(x, x.to(at::kInt), {}, {}, {3}, {}, 0.0);
  } catch (const std::exception &e) {
    std::printf("%s\n", e.what());
  }
}
