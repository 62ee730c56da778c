// The part of XLA's FFI that a handler meets: a mirror of its C ABI, so that no header of XLA is compiled against.
// Mirrors xla/ffi/api/c_api.h of API version 0.3 (jaxlib 0.10), https://github.com/openxla/xla; every member below is
// laid out the same since version 0.1 (jaxlib 0.4.36). tests/core/test_xla_layout.py compares the two.
#pragma once
#include <cstddef>
#include <cstdint>

namespace aot::xla {

struct Error;             // opaque
struct ExecutionContext;  // opaque

// Every struct that crosses begins so.
struct Head {
  size_t size;
  void *extension;
};

enum class ErrorCode : int { invalid_argument = 3, unimplemented = 12, internal = 13 };
// The names of dtypes, by XLA's number; null: no entry accepts it.
constexpr const char *kDataTypes[] = {nullptr,      "bool",        "int8",         "int16",     "int32",    "int64",
                                      "uint8",      "uint16",      "uint32",       "uint64",    "float16",  "float32",
                                      "float64",    nullptr,       nullptr,        "complex64", "bfloat16", nullptr,
                                      "complex128", "float8_e5m2", "float8_e4m3fn"};
enum class AttrType : int { string = 4 };
enum class Stage : int { instantiate, prepare, initialize, execute };
enum class ExtensionType : int { metadata = 1 };
enum Traits : uint32_t { kNoTraits = 0, kCommandBufferCompatible = 1 };

struct ApiVersion : Head {
  int major, minor;
};

struct ErrorCreateArgs : Head {
  const char *message;
  ErrorCode code;
};

struct ErrorDestroyArgs : Head {
  Error *error;
};

struct StreamGetArgs : Head {
  ExecutionContext *context;
  void *stream;
};

struct AllocateArgs : Head {
  ExecutionContext *context;
  size_t bytes, alignment;
  void *data;
};

struct FreeArgs : Head {
  ExecutionContext *context;
  size_t bytes;
  void *data;
};

// Its beginning: XLA's goes on.
struct Api : Head {
  ApiVersion version;
  void *internal;
  Error *(*error_create)(ErrorCreateArgs *args);
  void *error_get_message;
  void (*error_destroy)(ErrorDestroyArgs *args);
  void *handler_register;
  Error *(*stream_get)(StreamGetArgs *args);
  void *type_register, *context_get, *state_set, *state_get;
  Error *(*allocate)(AllocateArgs *args);
  Error *(*free)(FreeArgs *args);
};

struct Buffer : Head {
  int dtype;
  void *data;
  int64_t rank;
  int64_t *dims;
};

struct ByteSpan {
  const char *data;
  size_t size;
};

struct Buffers : Head {  // XLA_FFI_Args and XLA_FFI_Rets
  int64_t n;
  int *types;
  Buffer **buffers;
};

struct Attrs : Head {
  int64_t n;
  AttrType *types;
  ByteSpan **names;
  void **values;
};

// Its beginning: XLA's goes on.
struct Metadata {
  size_t size;
  ApiVersion version;
  uint32_t traits;
};

struct Extension {
  size_t size;
  ExtensionType type;
  Extension *next;
};

struct MetadataExtension : Extension {
  Metadata *metadata;
};

// Its beginning: XLA's goes on.
struct CallFrame {
  size_t size;
  Extension *extension;
  const Api *api;
  ExecutionContext *context;
  Stage stage;
  Buffers args, rets;
  Attrs attrs;
};

}  // namespace aot::xla
