// As much of CUDA's runtime as the soak's kernels use, on the host: a launch runs the threads of its grid one after the
// other, and returns when they have ended. There are no graphs.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define __device__
#define __global__
#define __launch_bounds__(...)

struct dim3 {
  unsigned x;
  dim3(unsigned x = 1) : x(x) {}
};
inline thread_local dim3 blockIdx, threadIdx, blockDim, gridDim;

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint4 __ldcg(const uint4 *p) { return *p; }
inline void __stcg(uint4 *p, uint4 v) { *p = v; }
inline long long clock64() {
  static thread_local long long now = 0;
  return now += 1000;
}
inline unsigned long long atomicAdd(unsigned long long *to, unsigned long long value) {
  return *to += value, *to - value;
}

enum cudaError_t { cudaSuccess = 0, cudaErrorNotSupported = 801 };
using cudaStream_t = struct Stream *;
using cudaGraph_t = struct Graph *;
using cudaGraphExec_t = struct GraphExec *;
struct cudaDeviceProp {
  char name[256];
};
enum { cudaMemcpyDefault, cudaStreamNonBlocking, cudaStreamCaptureModeRelaxed };
enum { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  int id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream;
  cudaLaunchAttribute *attrs;
  int numAttrs;
};

inline const char *cudaGetErrorString(cudaError_t error) { return error ? "not supported" : "no error"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int) { return std::strcpy(p->name, "host"), cudaSuccess; }
inline cudaError_t cudaMalloc(void **p, size_t size) {
  return *p = std::aligned_alloc(256, (size + 255) / 256 * 256), cudaSuccess;
}
inline cudaError_t cudaFree(void *p) { return std::free(p), cudaSuccess; }
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, int) { return *stream = nullptr, cudaSuccess; }
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, int, cudaStream_t) {
  return std::memcpy(to, from, size), cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t) {
  return std::memset(to, value, size), cudaSuccess;
}
inline cudaError_t cudaStreamBeginCapture(cudaStream_t, int) { return cudaErrorNotSupported; }
inline cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *) { return cudaErrorNotSupported; }
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t *, cudaGraph_t, int) { return cudaErrorNotSupported; }
inline cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return cudaErrorNotSupported; }
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }

template <typename... Parameters>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Parameters...),
                               Parameters... arguments) {
  gridDim = config->gridDim, blockDim = config->blockDim;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) kernel(arguments...);
  return cudaSuccess;
}
