// The functions of LibTorch's stable C ABI, found in the loaded library: no header of torch is compiled against, and
// one binary serves every version that has them.
#pragma once
#include <iterator>
#include <string>

#include "aot.h"
#include "entry_arguments.h"
#include "torch_symbols.h"

namespace aot {

using TensorHandle = void *;
using Value = uint64_t;  // StableIValue: a handle, an integer, the bits of a double
using Kernel = void(Value *stack, uint64_t n_arguments, uint64_t n_results);

// The version of the ABI that this file is written for: LibTorch 2.10.
constexpr uint64_t kAbiVersion = uint64_t{2} << 56 | uint64_t{10} << 48;

#define STABLE_FUNCTIONS(F)                                                                                           \
  F(aoti_torch_library_init_fragment, const char *name, const char *file, uint32_t line, void **library)              \
  F(aoti_torch_library_init_impl, const char *name, const char *key, const char *file, uint32_t line, void **library) \
  F(aoti_torch_library_def, void *library, const char *schema)                                                        \
  F(torch_library_impl, void *library, const char *name, Kernel *kernel, uint64_t version)                            \
  F(aoti_torch_get_dim, TensorHandle, int64_t *)                                                                      \
  F(aoti_torch_get_sizes, TensorHandle, int64_t **)                                                                   \
  F(aoti_torch_get_strides, TensorHandle, int64_t **)                                                                 \
  F(aoti_torch_get_dtype, TensorHandle, int32_t *)                                                                    \
  F(aoti_torch_get_device_type, TensorHandle, int32_t *)                                                              \
  F(aoti_torch_get_device_index, TensorHandle, int32_t *)                                                             \
  F(aoti_torch_get_data_ptr, TensorHandle, void **)                                                                   \
  F(aoti_torch_copy_, TensorHandle to, TensorHandle from, int32_t non_blocking)                                       \
  F(aoti_torch_empty_strided, int64_t ndim, const int64_t *sizes, const int64_t *strides, int32_t dtype,              \
    int32_t device_type, int32_t device_index, TensorHandle *)                                                        \
  F(aoti_torch_new_uninitialized_tensor, TensorHandle *)                                                              \
  F(aoti_torch_delete_tensor_object, TensorHandle)                                                                    \
  F(torch_list_size, void *list, size_t *)                                                                            \
  F(torch_list_get_item, void *list, size_t, Value *)                                                                 \
  F(torch_delete_list, void *list)                                                                                    \
  F(torch_string_length, void *string, size_t *)                                                                      \
  F(torch_string_c_str, void *string, const char **)                                                                  \
  F(torch_delete_string, void *string)

// 0 is success.
#define DECLARE_FUNCTION(name, ...) int32_t (*name)(__VA_ARGS__);
struct StableTorch {
  STABLE_FUNCTIONS(DECLARE_FUNCTION)
  int32_t (*torch_library_def_with_tags)(void *library, const char *schema, const int32_t *tags, int32_t n);  // 2.12
  int32_t (*torch_tag_needs_exact_strides)();                                                                 // 2.12
  int32_t (*torch_delete_stable_ivalue)(Value *);                                                             // 2.13
  const char *(*torch_exception_get_what_without_backtrace)();                                                // 2.13

  int32_t cpu, cuda;
  const char *dtype_names[128];  // by torch's number
  int32_t dtypes[kDTypes];
};
inline StableTorch stable;

inline bool find_constant(void *library, const std::string &name, int32_t *value) {
  int32_t (*read)();
  return find(library, name.c_str(), &read) && (*value = read(), true);
}

inline void find_dtypes(void *library) {
  for (const char *name :
       {"bool",      "uint8",      "int8",        "int16",         "int32",           "int64",          "uint16",
        "uint32",    "uint64",     "float16",     "bfloat16",      "float32",         "float64",        "complex32",
        "complex64", "complex128", "float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz"}) {
    int32_t number;
    if (!find_constant(library, std::string("aoti_torch_dtype_") + name, &number)) continue;
    if (number >= 0 && number < static_cast<int32_t>(std::size(stable.dtype_names))) stable.dtype_names[number] = name;
    if (const DType d = parse_dtype(name); d != DType::other) stable.dtypes[static_cast<int>(d)] = number;
  }
}

// Python loads torch for itself alone, so that the default search does not see it. Its SONAME finds what is loaded.
inline Status find_torch() {
  void *library = libtorch_cpu();
  if (!library)
    return fail(kNotImplemented,
                "torch: libtorch_cpu.so is not loaded: link the program with LibTorch, or load it first");
#define FIND_FUNCTION(name, ...)           \
  if (!find(library, #name, &stable.name)) \
    return fail(kNotImplemented, "torch: libtorch_cpu.so exports no %s, expected LibTorch 2.10 or newer", #name);
  STABLE_FUNCTIONS(FIND_FUNCTION)
  find(library, "torch_library_def_with_tags", &stable.torch_library_def_with_tags);
  find(library, "torch_tag_needs_exact_strides", &stable.torch_tag_needs_exact_strides);
  find(library, "torch_delete_stable_ivalue", &stable.torch_delete_stable_ivalue);
  find(library, "torch_exception_get_what_without_backtrace", &stable.torch_exception_get_what_without_backtrace);
  if (!find_constant(library, "aoti_torch_device_type_cpu", &stable.cpu) ||
      !find_constant(library, "aoti_torch_device_type_cuda", &stable.cuda))
    return fail(kNotImplemented, "torch: libtorch_cpu.so does not tell the numbers of its devices");
  return find_dtypes(library), kOk;
}

inline const char *dtype_text(int32_t dtype) {
  const bool known = dtype >= 0 && dtype < static_cast<int32_t>(std::size(stable.dtype_names));
  const char *name = known ? stable.dtype_names[dtype] : nullptr;
  return name ? name : kUnnamedDtype;
}

// torch's number of a dtype that infer gives.
inline int32_t dtype_number(const char *name) { return stable.dtypes[static_cast<int>(parse_dtype(name))]; }

// Why torch's last function failed. Before 2.13 only its log says so.
inline const char *torch_error() {
  return stable.torch_exception_get_what_without_backtrace ? stable.torch_exception_get_what_without_backtrace()
                                                           : "torch has logged the reason";
}

inline Status current_stream(const char *op, int32_t device, void **stream) {
  using Get = int32_t(int32_t, void **);
  static Get *const get = [] {
    Get *found;
    return find(loaded("libtorch_cuda.so"), "aoti_torch_get_current_cuda_stream", &found), found;
  }();
  if (!get) return fail(kNotImplemented, "%s: this LibTorch does not tell its current CUDA stream", op);
  return get(device, stream) ? fail(kDeviceError, "%s: the current CUDA stream: %s", op, torch_error()) : kOk;
}

}  // namespace aot
