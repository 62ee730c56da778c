// `extra`, the object through which an entry reads its attributes: MindSpore's AotExtra, with the memory layout of its
// build (Itanium C++ ABI, std::string of the old ABI). Only extra.cpp is compiled for that ABI. All other files use the
// functions below, whose signatures do not depend on it.
#pragma once
#include <cstddef>
#include <cstdint>

// Base of the data that an Init stores for the calls. MindSpore deletes it through this virtual destructor.
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

// Each returns 1 and writes *value if the attribute is given; 0 if it is not, or extra is null; -1 if it has another
// type or does not fit, such as an integer of more than 64 bits or a string with a NUL. A number may be given as a
// decimal string, with "." in every locale, to keep double precision: the convention's own floats are float32.
int extra_get_bool(void *extra, const char *name, bool *value) noexcept;
int extra_get_int(void *extra, const char *name, int64_t *value) noexcept;
int extra_get_float(void *extra, const char *name, double *value) noexcept;
int extra_get_string(void *extra, const char *name, char *value, size_t capacity) noexcept;
int extra_get_ints(void *extra, const char *name, int64_t *value, int capacity, int *n) noexcept;

// Calls take(context, text) with a string attribute of any length. Same result.
int extra_take_string(void *extra, const char *name, void (*take)(void *context, const char *text),
                      void *context) noexcept;

// The number in a text of the format of Python's repr(float), in the C locale. NaN for another text.
double decimal(const char *text) noexcept;

// Creates an AotExtra for hosts other than MindSpore, from attributes as text: lines `name=value`, with lists as `2,3`.
// Null if out of memory.
void *extra_new(const char *attrs) noexcept;
void extra_delete(void *extra) noexcept;

}  // namespace aot
