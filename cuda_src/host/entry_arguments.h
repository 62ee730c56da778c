// The arrays that describe tensors to an entry.
#pragma once
#include <cstdint>

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

// Bytes of an element, by the number of bits in a dtype's name. Without strtol, which took a quarter of a small call.
inline int64_t element_bytes(const char *dtype) {
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  while (*dtype && !is_digit(*dtype)) ++dtype;
  int64_t bits = 0;
  for (; is_digit(*dtype); ++dtype) bits = 10 * bits + (*dtype - '0');
  return bits ? bits / 8 : 1;
}

}  // namespace aot
