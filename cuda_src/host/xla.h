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
enum class DataType : int {
  pred = 1,
  s8 = 2,
  s16 = 3,
  s32 = 4,
  s64 = 5,
  u8 = 6,
  u16 = 7,
  u32 = 8,
  u64 = 9,
  f16 = 10,
  f32 = 11,
  f64 = 12,
  c64 = 15,
  bf16 = 16,
  c128 = 18
};
constexpr struct {
  DataType type;
  const char *name;
} kTypes[] = {{DataType::pred, "bool"},     {DataType::s8, "int8"},       {DataType::s16, "int16"},
              {DataType::s32, "int32"},     {DataType::s64, "int64"},     {DataType::u8, "uint8"},
              {DataType::u16, "uint16"},    {DataType::u32, "uint32"},    {DataType::u64, "uint64"},
              {DataType::f16, "float16"},   {DataType::f32, "float32"},   {DataType::f64, "float64"},
              {DataType::c64, "complex64"}, {DataType::bf16, "bfloat16"}, {DataType::c128, "complex128"}};
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
  DataType dtype;
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
