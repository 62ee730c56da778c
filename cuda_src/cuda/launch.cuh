// What every launcher does on the host: pick the type, know the device, check the launch.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "../aot.h"
#include "vector.cuh"

namespace aot {
inline namespace AOT_ISA {

inline Status check_cuda(const char *op, cudaError_t error) {
  if (error == cudaSuccess) return kOk;
  cudaGetLastError();  // it is told here; the next call begins clean
  return fail(kDeviceError, "%s: %s", op, cudaGetErrorString(error));
}

inline Status check_launch(const char *op) { return check_cuda(op, cudaGetLastError()); }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A grid's x dimension holds 2^31 - 1 blocks; kernels whose blocks loop take fewer than they are offered.
inline unsigned grid_size(int64_t blocks) { return static_cast<unsigned>(std::min<int64_t>(blocks, 0x7fffffff)); }

// ----------------------------------------------------------------------------------------------------------- dtype

template <typename T>
struct Type {
  using type = T;
};

// Calls f(Type<T>()) with the T of a floating dtype; infer has let no other pass.
template <class F>
Status dispatch(DType dtype, F f) {
  switch (dtype) {
    case DType::float16:
      return f(Type<__half>());
    case DType::bfloat16:
      return f(Type<__nv_bfloat16>());
    case DType::float32:
      return f(Type<float>());
    default:
      return f(Type<double>());
  }
}

// ---------------------------------------------------------------------------------------------------------- device

struct DeviceLimits {
  int multiprocessors;
  int shared_memory;  // bytes a block may ask for
  bool clusters;      // blocks that read each other's shared memory: compute capability 9.0
};

// The current device's limits. They are asked for once per device: a query costs as much as a launch.
inline Status device_limits(const char *op, DeviceLimits *limits) {
  constexpr int kCached = 64;
  static DeviceLimits cache[kCached];
  static std::atomic<bool> known[kCached];
  int device = 0, major = 0;
  AOT_TRY(check_cuda(op, cudaGetDevice(&device)));
  if (device < kCached && known[device].load(std::memory_order_acquire)) return *limits = cache[device], kOk;
  auto ask = [&](cudaDeviceAttr what, int *value) {
    return check_cuda(op, cudaDeviceGetAttribute(value, what, device));
  };
  AOT_TRY(ask(cudaDevAttrMultiProcessorCount, &limits->multiprocessors));
  AOT_TRY(ask(cudaDevAttrMaxSharedMemoryPerBlockOptin, &limits->shared_memory));
  AOT_TRY(ask(cudaDevAttrComputeCapabilityMajor, &major));
  limits->clusters = major >= 9;
  if (device >= kCached) return kOk;
  static std::mutex writing;
  std::lock_guard<std::mutex> hold(writing);
  if (!known[device]) cache[device] = *limits;
  known[device].store(true, std::memory_order_release);
  return kOk;
}

// Launches blocks in clusters, with as much dynamic shared memory as asked for.
template <typename... Parameters, typename... Arguments>
Status launch_clusters(const char *op, void (*kernel)(Parameters...), unsigned grid, unsigned block, int cluster,
                       int shared, void *stream, Arguments... arguments) {
  constexpr int kWithoutAsking = 48 << 10;
  if (shared > kWithoutAsking)
    AOT_TRY(check_cuda(op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared)));
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute, config.numAttrs = cluster > 1 ? 1 : 0;
  return check_cuda(op, cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

}  // namespace AOT_ISA
}  // namespace aot
