// Loads libaotops.so, its argument, as a module of tvm-ffi: LayerNorm of two rows of four numbers, and its gradient.
//
//     g++ -std=c++17 tvm_ffi.cpp $(tvm-ffi-config --cxxflags --ldflags --libs) -o tvm_ffi
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/module.h>

#include <cstdio>

namespace ffi = tvm::ffi;

static void print(const ffi::Tensor &t) {
  const float *data = static_cast<const float *>(t.data_ptr());
  for (int row = 0; row < 2; ++row, data += 4)
    std::printf("%7.4f %7.4f %7.4f %7.4f\n", data[0], data[1], data[2], data[3]);
}

int main(int, char **argv) {
  float numbers[] = {1, 2, 3, 4, 10, 10, 10, 14}, ones[] = {1, 0, 0, 0, 1, 0, 0, 0};
  int64_t shape[] = {2, 4};
  DLTensor x = {numbers, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, nullptr, 0}, dy = x;
  dy.data = ones;

  ffi::Module aotops = ffi::Module::LoadFromFile(argv[1]);
  ffi::Function layer_norm = aotops->GetFunction("layer_norm").value();
  ffi::Function backward = aotops->GetFunction("layer_norm_backward").value();
  print(layer_norm(&x, nullptr, nullptr, ffi::Shape({4})).cast<ffi::Tensor>());
  // dx, dweight and dbias
  print(backward(&dy, &x, nullptr, nullptr, ffi::Shape({4})).cast<ffi::Array<ffi::Tensor>>()[0]);
  try {
    layer_norm(&x, nullptr, nullptr, ffi::Shape({5}));
  } catch (const ffi::Error &error) {
    std::printf("%s: %s\n", error.kind().c_str(), error.message().c_str());
  }
}
