// The part of tvm-ffi's stable C ABI that is used here: a mirror, so that no header of tvm-ffi is compiled against.
// Mirrors tvm/ffi/c_api.h and extra/c_env_api.h of 0.1, https://github.com/apache/tvm-ffi. tests/core/test_tvm_ffi.py
// compares the two. The functions are those of the loaded libtvm_ffi.so, looked up at the first use.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "dlpack.h"
#include "dynamic.h"

namespace aot::tvm_ffi {

// The types of an Any; objects begin at kObject.
enum Type : int32_t {
  kNone = 0,
  kInt = 1,
  kBool = 2,
  kFloat = 3,
  kDLTensor = 7,
  kRawString = 8,
  kSmallString = 11,
  kObject = 64,
  kString = 65,
  kFunction = 68,
  kShape = 69,
  kTensor = 70,
  kArray = 71,
  kList = 75
};

struct Any {
  int32_t type;
  uint32_t small_length;  // of a small string; else 0
  union {
    int64_t integer;
    double number;
    void *pointer;
    const char *string;
    char small[8];
  };

  static Any none() { return {kNone, 0, {0}}; }
  static Any object(Type type, void *object) {
    Any any = none();
    return any.type = type, any.pointer = object, any;
  }
};

// Every object begins so; its cell follows: a Tensor's is a DLTensor.
struct Object {
  uint64_t references;
  int32_t type;
  uint32_t padding;
  void (*deleter)(void *self, int flags);
};

struct Bytes {  // the cell of a string
  const char *data;
  size_t size;
};
struct ShapeCell {
  const int64_t *data;
  size_t size;
};
struct SequenceCell {  // of an Array and a List
  void *data;          // of Anys
  int64_t size, capacity;
  void (*data_deleter)(void *data);
};
using SafeCall = int(void *self, const Any *args, int32_t n_args, Any *result);
struct FunctionCell {
  SafeCall *safe_call;
  void *cpp_call;
};
struct ErrorCell {  // its beginning
  Bytes kind, message, backtrace;
};

template <class Cell>
Cell *cell(void *object) {
  return reinterpret_cast<Cell *>(static_cast<char *>(object) + sizeof(Object));
}

// DLManagedTensor of DLPack
struct ManagedTensor {
  DLTensor tensor;
  void *context;
  void (*deleter)(ManagedTensor *self);
};

inline bool is_tensor(const Any &any) { return any.type == kDLTensor || any.type == kTensor; }
inline const DLTensor &tensor(const Any &any) {
  return any.type == kTensor ? *cell<DLTensor>(any.pointer) : *static_cast<DLTensor *>(any.pointer);
}

inline const char *type_text(const Any &any) {
  switch (any.type) {
    case kNone:
      return "None";
    case kInt:
      return "an int";
    case kBool:
      return "a bool";
    case kFloat:
      return "a float";
    case kRawString:
    case kSmallString:
    case kString:
      return "a str";
    case kShape:
    case kArray:
    case kList:
      return "a list";
    case kDLTensor:
    case kTensor:
      return "a tensor";
    default:
      return "an object of another type";
  }
}

struct Api {
  void (*set_error)(const char *kind, const char *message);
  void (*move_error)(void **error);
  int (*set_stream)(int32_t device_type, int32_t device_id, void *stream, void **before);
  void *(*get_stream)(int32_t device_type, int32_t device_id);
  int (*allocate)(DLTensor *prototype, void **tensor);
  void *(*get_allocator)();
  int (*tensor_of)(ManagedTensor *from, int32_t alignment, int32_t contiguous, void **tensor);
  int (*release)(void *object);
  int (*find_function)(const Bytes *name, void **function);
  int (*call)(void *function, Any *args, int32_t n_args, Any *result);

  // An Array of these; not 0: an error is set.
  int make_array(Any *items, int32_t n, Any *result) const {
    constexpr char kName[] = "ffi.Array";
    const Bytes name = {kName, sizeof kName - 1};
    void *function = nullptr;
    if (int failed = find_function(&name, &function)) return failed;
    if (!function) return set_error("RuntimeError", "tvm-ffi has no function ffi.Array"), -1;
    const int failed = call(function, items, n, result);
    release(function);
    return failed;
  }

  // False: no libtvm_ffi.so is loaded, or it lacks a function.
  bool find() {
    void *library = loaded("libtvm_ffi.so");
    return find_in(library ? library : dlopen(nullptr, RTLD_NOW));  // a program may contain it
  }

 private:
  bool find_in(void *library) {
    bool found = aot::find(library, "TVMFFIErrorSetRaisedFromCStr", &set_error);
    found &= aot::find(library, "TVMFFIErrorMoveFromRaised", &move_error);
    found &= aot::find(library, "TVMFFIEnvSetStream", &set_stream);
    found &= aot::find(library, "TVMFFIEnvGetStream", &get_stream);
    found &= aot::find(library, "TVMFFIEnvTensorAlloc", &allocate);
    found &= aot::find(library, "TVMFFIEnvGetDLPackManagedTensorAllocator", &get_allocator);
    found &= aot::find(library, "TVMFFITensorFromDLPack", &tensor_of);
    found &= aot::find(library, "TVMFFIObjectDecRef", &release);
    found &= aot::find(library, "TVMFFIFunctionGetGlobal", &find_function);
    found &= aot::find(library, "TVMFFIFunctionCall", &call);
    return found;
  }
};

// The functions of the loaded libtvm_ffi.so; null, and looked for again: there is none.
inline const Api *api() {
  static Api found;
  static std::atomic<bool> complete{false};
  if (complete.load(std::memory_order_acquire)) return &found;
  Api mine;
  if (!mine.find()) return nullptr;
  static const bool stored = [&] { return found = mine, true; }();
  complete.store(stored, std::memory_order_release);
  return &found;
}

}  // namespace aot::tvm_ffi
