// `extra`, the object through which an entry reads its attributes: MindSpore's AotExtra, as laid out by its build
// (Itanium C++ ABI, old-ABI std::string). extra.cpp is the one file that deals with those strings; everything else
// uses the functions below, under any compiler flags.
#pragma once
#include <cstddef>
#include <cstdint>

// What an Init leaves for its calls. MindSpore deletes it through this virtual destructor.
class AotKernelData {
 public:
  virtual ~AotKernelData() = default;
};

namespace aot {

struct ExtraView {
  void *vtable;
  void *workspace[3];  // std::vector<size_t>, in bytes
  AotKernelData *kernel_data;
};

inline ExtraView *extra_view(void *extra) { return static_cast<ExtraView *>(extra); }

// Each returns 1 and writes *value where the attribute is given, 0 where it is not (or extra is null), -1 where it is
// given but is of another kind or does not fit, as an integer of more than 64 bits and a string with a NUL do not. A
// number may be given as a decimal string, which keeps double precision: the convention's own floats are float32. Its
// point is a ".", in every locale.
int extra_get_bool(void *extra, const char *name, bool *value) noexcept;
int extra_get_int(void *extra, const char *name, int64_t *value) noexcept;
int extra_get_float(void *extra, const char *name, double *value) noexcept;
int extra_get_string(void *extra, const char *name, char *value, size_t capacity) noexcept;
int extra_get_ints(void *extra, const char *name, int64_t *value, int capacity, int *n) noexcept;

// Our own host: an AotExtra over attributes written as text, one a line, `name=value`; a list as `2,3`. Null when out
// of memory.
void *extra_new(const char *attrs) noexcept;
void extra_delete(void *extra) noexcept;

}  // namespace aot
