// Calls an operator of an author's library through LibTorch's dispatcher: `authors SCHEMAS LIBRARY`, the text that
// `aotops schemas scale` printed, and the shared library that `aotops build` made of the template of `aotops new scale`.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/full.h>
#include <aotops.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>

int main(int argc, char **argv) {
  if (argc != 3) return std::fprintf(stderr, "usage: authors SCHEMAS LIBRARY\n"), 2;
  std::ifstream file(argv[1]);
  const std::string schemas{std::istreambuf_iterator<char>(file), {}};
  if (aot_torch_register_library("scale", argv[2], schemas.c_str()))
    return std::fprintf(stderr, "%s\n", aot_last_error()), 1;
  const auto scale = c10::Dispatcher::singleton()
                         .findSchemaOrThrow("scale::scale", "")
                         .typed<at::Tensor(const at::Tensor &x, double factor)>();
  std::printf("%.2f\n", scale.call(at::full({3}, 1.5), 2.5)[2].item<double>());
}
