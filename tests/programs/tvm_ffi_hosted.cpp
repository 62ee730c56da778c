// Functions of tvm-ffi, of its C++ interface.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

namespace ffi = tvm::ffi;

template <class T>
void multiply(const ffi::TensorView &x, const ffi::TensorView &y, const ffi::TensorView &z) {
  for (int64_t i = 0; i < x.numel(); ++i)
    static_cast<T *>(z.data_ptr())[i] = static_cast<T *>(x.data_ptr())[i] * static_cast<T *>(y.data_ptr())[i];
}

void mul(ffi::TensorView x, ffi::TensorView y, ffi::TensorView z) {
  for (const auto &t : {y, z}) {
    if (t.dtype() != x.dtype()) TVM_FFI_THROW(TypeError) << "expected tensors of one dtype";
    if (t.numel() != x.numel()) TVM_FFI_THROW(ValueError) << "expected tensors of one size";
    for (int k = 0, n = 1; k < t.ndim(); n *= t.size(t.ndim() - ++k))
      if (t.stride(t.ndim() - 1 - k) != n) TVM_FFI_THROW(ValueError) << "expected strides";
  }
  if (x.dtype().bits == 64) multiply<double>(x, y, z);
  else multiply<float>(x, y, z);
}

// The sum of all values in each element of y.
void attributes(ffi::TensorView x, bool flag, int64_t count, double scale, ffi::String text, ffi::Array<int64_t> axes,
                ffi::Shape shape, ffi::Array<double> weights, ffi::Array<ffi::Array<int64_t>> pairs,
                ffi::TensorView y) {
  double sum = flag + count + scale + text.size() + 100 * axes.size() + 1000 * shape.size();
  for (int64_t axis : axes) sum += axis;
  for (double weight : weights) sum += weight;
  for (const auto &pair : pairs)
    for (int64_t one : pair) sum += one;
  if (text != "a;b%c=d,e|f: g") TVM_FFI_THROW(ValueError) << "text is " << text;
  for (int64_t i = 0; i < y.numel(); ++i) static_cast<float *>(y.data_ptr())[i] = static_cast<float>(sum);
}

ffi::Tensor allocates(ffi::TensorView x, ffi::TensorView y) {
  struct Allocator {
    void AllocData(DLTensor *t) { t->data = new char[64]; }
    void FreeData(DLTensor *t) { delete[] static_cast<char *>(t->data); }
  };
  return ffi::Tensor::FromNDAlloc(Allocator(), ffi::Shape({1}), x.dtype(), x.device());
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(mul, mul);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attributes, attributes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(allocates, allocates);
