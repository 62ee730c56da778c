// Tensors as DLPack describes them (version 1; https://github.com/dmlc/dlpack).
#pragma once
#include <cstring>

#include "aot.h"
#include "entry_arguments.h"

namespace aot {

struct DLTensor {
  void *data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};

// DLDeviceType
constexpr int kDLCpu = 1, kDLCuda = 2, kDLCudaHost = 3;

// The code and bits of a dtype.
struct DLDtype {
  const char *name;
  uint8_t code, bits;
};
constexpr DLDtype kDLDtypes[] = {
    {kFloat32, 2, 32},        {kBFloat16, 4, 16},    {kFloat16, 2, 16}, {kFloat64, 2, 64},    {"int64", 0, 64},
    {"int32", 0, 32},         {"bool", 6, 8},        {"int8", 0, 8},    {"uint8", 1, 8},      {"int16", 0, 16},
    {"uint16", 1, 16},        {"uint32", 1, 32},     {"uint64", 1, 64}, {"complex64", 5, 64}, {"complex128", 5, 128},
    {"float8_e4m3fn", 10, 8}, {"float8_e5m2", 12, 8}};

inline const char *dlpack_dtype(const DLTensor &t) {
  for (const DLDtype &known : kDLDtypes)
    if (t.code == known.code && t.bits == known.bits) return known.name;
  return kUnnamedDtype;
}

// False: DLPack has no such dtype, or it is one of those that have no name here.
inline bool set_dtype(const char *name, DLTensor *t) {
  for (const DLDtype &known : kDLDtypes)
    if (name == known.name || !std::strcmp(name, known.name))
      return t->code = known.code, t->bits = known.bits, t->lanes = 1, true;
  return false;
}

struct Layout {
  int64_t size = 1;
  bool contiguous = true;
  bool one_number = true;  // all strides are 0

  explicit Layout(const DLTensor &t) {
    for (int k = t.ndim - 1; k >= 0; --k) {
      const int64_t stride = t.strides ? t.strides[k] : size;
      if (t.shape[k] != 1) contiguous = contiguous && stride == size, one_number = one_number && stride == 0;
      size *= t.shape[k];
    }
    contiguous = contiguous || size == 0;
  }
  // Whether the tensor is passed without axes, to a slot that accepts that.
  bool as_scalar(bool accepted) const { return !contiguous && one_number && accepted; }
};

}  // namespace aot
