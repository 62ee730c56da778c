// Classifies images of digits with an AOTInductor package, without Python: `digits FOLDER`, whose files
// digits_package.py has written. The model's LayerNorm and GELU are operators of libaotops.so.
#include <ATen/ops/argmax.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mean.h>
#include <aotops.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

std::vector<char> read(const std::string &path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

int main(int argc, char **argv) {
  if (argc != 2) return std::fprintf(stderr, "usage: digits FOLDER\n"), 2;
  const std::string folder = argv[1];
  // Before the package is loaded, which looks its operators up.
  if (aot_torch_register()) return std::fprintf(stderr, "%s\n", aot_last_error()), 1;
  torch::inductor::AOTIModelPackageLoader model(folder + "/digits.pt2");

  std::vector<char> images = read(folder + "/images.float32"), classes = read(folder + "/classes.int64");
  const int64_t n = classes.size() / sizeof(int64_t), features = images.size() / sizeof(float) / n;
  const at::Tensor x = at::from_blob(images.data(), {n, features}, at::kFloat),
                   expected = at::from_blob(classes.data(), {n}, at::kLong);
  const at::Tensor logits = model.run({x})[0];
  std::printf("test accuracy %.4f\n", logits.argmax(1).eq(expected).to(at::kDouble).mean().item<double>());
}
