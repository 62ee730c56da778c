// Kernels whose inputs or outputs are integers, bools or bytes, each with one fault that aotops.testing.check must
// find.
//
// MindSpore's convention without its headers, so that it compiles in a second.
#include <cstdint>

namespace {

int64_t size_of(int ndim, const int64_t *shape) {
  int64_t n = 1;
  for (int i = 0; i < ndim; ++i) n *= shape[i];
  return n;
}

}  // namespace

#define PARAMETERS int, void **params, int *ndims, int64_t **shapes, const char **, void *, void *

// place[r]: where the largest element of the row r is. y[r], if it is given: that element.
static void largest(const float *x, float *y, int64_t *place, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r, x += columns) {
    int64_t best = 0;
    for (int64_t i = 1; i < columns; ++i)
      if (x[i] > x[best] || x[i] != x[i]) best = i;
    place[r] = best;
    if (y) y[r] = x[best];
  }
}

extern "C" int last_place_unwritten(PARAMETERS) {
  const int64_t rows = shapes[0][0];
  largest((float *)params[0], nullptr, (int64_t *)params[1], rows > 1 ? rows - 1 : rows, shapes[0][1]);
  return 0;
}

extern "C" int place_wrong_in_third_rows(PARAMETERS) {
  largest((float *)params[0], nullptr, (int64_t *)params[1], shapes[0][0], shapes[0][1]);
  for (int64_t r = 2; r < shapes[0][0]; r += 3) static_cast<int64_t *>(params[1])[r] ^= 1;
  return 0;
}

extern "C" int place_wrong_if_misaligned(PARAMETERS) {
  largest((float *)params[0], nullptr, (int64_t *)params[1], shapes[0][0], shapes[0][1]);
  if (shapes[0][0] && reinterpret_cast<uintptr_t>(params[1]) % 16 == 8) static_cast<int64_t *>(params[1])[0] += 1;
  return 0;
}

extern "C" int largest_and_place(PARAMETERS) {
  largest((float *)params[0], (float *)params[1], (int64_t *)params[2], shapes[0][0], shapes[0][1]);
  return 0;
}

// The gradient, of (dy, place, x). A NaN is lost.
extern "C" int largest_backward(PARAMETERS) {
  auto *dy = (float *)params[0], *dx = (float *)params[3];
  const int64_t rows = shapes[2][0], columns = shapes[2][1];
  for (int64_t i = 0; i < rows * columns; ++i) dx[i] = 0;
  for (int64_t r = 0; r < rows; ++r)
    if (dy[r] == dy[r]) dx[r * columns + ((int64_t *)params[1])[r]] = dy[r];
  return 0;
}

// counts[b]: how many elements of x, bytes, are b modulo 4.
extern "C" int counts_shared(PARAMETERS) {
  static volatile int32_t counts[4];
  for (int b = 0; b < 4; ++b) counts[b] = 0;
  for (int64_t i = 0, n = size_of(ndims[0], shapes[0]); i < n; ++i)
    counts[static_cast<uint8_t *>(params[0])[i] % 4] = counts[static_cast<uint8_t *>(params[0])[i] % 4] + 1;
  for (int b = 0; b < 4; ++b) static_cast<int32_t *>(params[1])[b] = counts[b];
  return 0;
}

// y[i] = table[index[i]]
template <class Count>
static void take(void **params, int64_t n) {
  const auto *table = static_cast<const float *>(params[0]);
  const auto *index = static_cast<const int32_t *>(params[1]);
  for (Count i = 0; i < static_cast<Count>(n); ++i) static_cast<float *>(params[2])[i] = table[index[i]];
}

extern "C" int take_in_ints(PARAMETERS) { return take<int>(params, size_of(ndims[1], shapes[1])), 0; }

// The first index is marked while it is in use.
extern "C" int take_restores(PARAMETERS) {
  const int64_t n = size_of(ndims[1], shapes[1]);
  take<int64_t>(params, n);
  if (!n) return 0;
  auto *first = static_cast<volatile int32_t *>(params[1]);
  const int32_t before = *first;
  *first = -1;
  *first = before;
  return 0;
}

// positive[i] = x[i] > 0, and a byte more.
extern "C" int bools_past_the_end(PARAMETERS) {
  const int64_t n = size_of(ndims[0], shapes[0]);
  auto *y = static_cast<volatile uint8_t *>(params[1]);
  for (int64_t i = 0; i < n; ++i) y[i] = static_cast<float *>(params[0])[i] > 0;
  if (n > 2) y[n] = 0;
  return 0;
}

// The complex conjugate, whose imaginary part is 0.1 % too large.
extern "C" int conjugate(PARAMETERS) {
  auto *x = static_cast<float *>(params[0]), *y = static_cast<float *>(params[1]);
  for (int64_t i = 0, n = size_of(ndims[0], shapes[0]); i < n; ++i)
    y[2 * i] = x[2 * i], y[2 * i + 1] = -1.001f * x[2 * i + 1];
  return 0;
}
