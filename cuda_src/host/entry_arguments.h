// The arrays that describe tensors to an entry.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace aot {

template <int most>
struct EntryArguments {
  void *params[most];
  int ndims[most];
  int64_t *shapes[most];
  const char *dtypes[most];
  int n = 0;

  // The next tensor, which is not counted yet.
  void set(void *data, int64_t ndim, int64_t *shape, const char *dtype) {
    params[n] = data, ndims[n] = static_cast<int>(ndim), shapes[n] = shape, dtypes[n] = dtype;
  }
  void push(void *data, int64_t ndim, int64_t *shape, const char *dtype) { set(data, ndim, shape, dtype), ++n; }
};

// The name of a dtype that no operator accepts and that has no name here: for the error text.
constexpr const char *kUnnamedDtype = "of another kind";

// Bytes of an element: a dtype's name ends with its bits.
inline int64_t element_bytes(const char *dtype) {
  const char *digits = dtype + std::strcspn(dtype, "0123456789");
  return *digits ? std::atoi(digits) / 8 : 1;
}

}  // namespace aot
