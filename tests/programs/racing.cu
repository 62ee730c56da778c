// Kernels of MindSpore's convention that start before the kernel before them has ended (programmatic dependent launch),
// each right or with one race, which the soak must find. float32, for compute capability 9.0 and later.
//
//   waits            y = 2x + 1, then x = 0: each kernel waits before it touches memory
//   does_not_wait    y = 2x + 1 without waiting for what writes x
//   triggers_early   y = 2x + 1 by a kernel that lets the next start before it has loaded x; the next does not wait,
//                    and writes x = 0
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace {

constexpr int kThreads = 256;

__device__ void launch_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ int64_t first() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ int64_t step() { return int64_t{gridDim.x} * blockDim.x; }

template <bool kWaits, bool kTriggers>
__global__ void scale(const float *x, float *y, int64_t n) {
  if (kTriggers) launch_next();
  if (kWaits) wait_for_kernel_before();
  for (int64_t i = first(); i < n; i += step()) y[i] = 2 * x[i] + 1;
}

template <bool kWaits>
__global__ void clear(float *x, int64_t n) {
  if (kWaits) wait_for_kernel_before();
  for (int64_t i = first(); i < n; i += step()) x[i] = 0;
}

template <typename... Parameters>
int launch(void (*kernel)(Parameters...), int64_t n, int64_t most, void *stream, Parameters... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  const int64_t blocks = std::clamp<int64_t>((n + kThreads - 1) / kThreads, 1, most);
  config.gridDim = dim3(static_cast<unsigned>(blocks)), config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream), config.attrs = &attribute, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

int64_t size_of(int ndim, const int64_t *shape) {
  int64_t n = 1;
  for (int i = 0; i < ndim; ++i) n *= shape[i];
  return n;
}

// Few blocks, each with many elements: the first kernel still loads when the second could start.
constexpr int64_t kFew = 16, kMany = 64;

template <bool kWaits>
int scale_and_clear(void **params, const int *ndims, int64_t **shapes, void *stream) {
  const int64_t n = size_of(ndims[0], shapes[0]);
  auto *x = static_cast<float *>(params[0]), *y = static_cast<float *>(params[1]);
  if (int status = launch<const float *, float *, int64_t>(scale<true, true>, n, kFew, stream, x, y, n)) return status;
  return launch<float *, int64_t>(clear<kWaits>, n, kMany, stream, x, n);
}

}  // namespace

extern "C" int waits(int, void **params, int *ndims, int64_t **shapes, const char **, void *stream, void *) {
  return scale_and_clear<true>(params, ndims, shapes, stream);
}

extern "C" int triggers_early(int, void **params, int *ndims, int64_t **shapes, const char **, void *stream, void *) {
  return scale_and_clear<false>(params, ndims, shapes, stream);
}

extern "C" int does_not_wait(int, void **params, int *ndims, int64_t **shapes, const char **, void *stream, void *) {
  const int64_t n = size_of(ndims[0], shapes[0]);
  const auto *x = static_cast<const float *>(params[0]);
  return launch<const float *, float *, int64_t>(scale<false, false>, n, kMany, stream, x,
                                                 static_cast<float *>(params[1]), n);
}
