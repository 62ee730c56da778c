// Exports an operator as a function of tvm-ffi: AOT_TVM_FFI(scale) defines __tvm_ffi_scale, which calls the entries
// aot_scale_cpu and aot_scale_cuda of this library. `aotops build` and CMake's aotops_add_library write a file of these
// for the entries of their sources; host/tvm_ffi.cpp is what they call.
//
// AOT_TVM_FFI_CUDA: the library is linked with CUDA's runtime, which makes the tensors' device current for a call.
#pragma once
#include <cstdint>

namespace aot::tvm_ffi {

struct Any;
struct Operator;

struct Exported {
  const char *name;
  int (*get_device)(int *device);  // null: the library has no CUDA
  int (*set_device)(int device);
  Operator *made;  // at the first call
};

int call(Exported &exported, const Any *args, int32_t n_args, Any *result) noexcept;

}  // namespace aot::tvm_ffi

#ifdef AOT_TVM_FFI_CUDA
#ifndef __CUDACC__
extern "C" int cudaGetDevice(int *device);
extern "C" int cudaSetDevice(int device);
#endif
#define AOT_TVM_FFI_DEVICE cudaGetDevice, cudaSetDevice
#else
#define AOT_TVM_FFI_DEVICE nullptr, nullptr
#endif

#define AOT_TVM_FFI(op)                                                                                               \
  extern "C" __attribute__((visibility("default"))) int __tvm_ffi_##op(void *, const ::aot::tvm_ffi::Any *args,       \
                                                                       int32_t n_args, ::aot::tvm_ffi::Any *result) { \
    static ::aot::tvm_ffi::Exported exported = {#op, AOT_TVM_FFI_DEVICE, nullptr};                                    \
    return ::aot::tvm_ffi::call(exported, args, n_args, result);                                                      \
  }
