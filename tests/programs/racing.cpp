// Kernels of MindSpore's convention for the CPU: y = 2x + 1, float32. Each is right when it is called alone.
#include <algorithm>
#include <cstdint>

namespace {

constexpr int64_t kScratch = 1 << 15;

int64_t size_of(int ndim, const int64_t *shape) {
  int64_t n = 1;
  for (int i = 0; i < ndim; ++i) n *= shape[i];
  return n;
}

void scale(const float *x, float *y, int64_t n, float *scratch) {
  for (int64_t from = 0; from < n; from += kScratch) {
    const int64_t size = std::min(kScratch, n - from);
    for (int64_t i = 0; i < size; ++i) scratch[i] = 2 * x[from + i];
    for (int64_t i = 0; i < size; ++i) y[from + i] = scratch[i] + 1;
  }
}

float shared[kScratch];

}  // namespace

extern "C" int own_scratch(int, void **params, int *ndims, int64_t **shapes, const char **, void *, void *) {
  static thread_local float scratch[kScratch];
  scale(static_cast<float *>(params[0]), static_cast<float *>(params[1]), size_of(ndims[0], shapes[0]), scratch);
  return 0;
}

// The calls of two threads write to one scratch.
extern "C" int shared_scratch(int, void **params, int *ndims, int64_t **shapes, const char **, void *, void *) {
  scale(static_cast<float *>(params[0]), static_cast<float *>(params[1]), size_of(ndims[0], shapes[0]), shared);
  return 0;
}

extern "C" int writes_its_input(int, void **params, int *ndims, int64_t **shapes, const char **, void *, void *) {
  auto *x = static_cast<float *>(params[0]), *y = static_cast<float *>(params[1]);
  const int64_t n = size_of(ndims[0], shapes[0]);
  for (int64_t i = 0; i < n; ++i) y[i] = 2 * x[i] + 1;
  for (int64_t i = 0; i < n; ++i) x[i] = 0;
  return 0;
}

// The element after the last, if there is one in the last 16 bytes.
extern "C" int writes_past_the_end(int, void **params, int *ndims, int64_t **shapes, const char **, void *, void *) {
  auto *x = static_cast<float *>(params[0]), *y = static_cast<float *>(params[1]);
  const int64_t n = size_of(ndims[0], shapes[0]);
  for (int64_t i = 0; i < n + (n % 4 != 0); ++i) y[i] = i < n ? 2 * x[i] + 1 : 0;
  return 0;
}
