// The C++ functions of torch that the library calls by their mangled names: all that it uses of LibTorch beside the C
// ABI for AOTInductor and the stable one. Where one is missing, or does not work as expected, there is a slower way.
#pragma once
#include "dynamic.h"

namespace aot {

inline void *libtorch_cpu() { return loaded("libtorch_cpu.so"); }

// THPVariable_Wrap: a Python object of an at::Tensor, as torch's own bindings make it.
inline bool find_wrap(void *(**wrap)(const void *tensor)) {
  return find(loaded("libtorch_python.so"), "_Z16THPVariable_WrapRKN2at10TensorBaseE", wrap);
}

constexpr char kFunctionModeEnabled[] = "_ZN2at4impl27torch_function_mode_enabledEv";
constexpr char kHasCallbacks[] = "_ZN2at12hasCallbacksEv";
constexpr char kLocalDispatchKeys[] = "_ZN3c104impl26raw_local_dispatch_key_setE";  // a variable of libc10.so
constexpr char kCachedCast[] = "_ZN2at8autocast11cached_castEN3c1010ScalarTypeERKNS_6TensorENS1_10DeviceTypeE";

}  // namespace aot
