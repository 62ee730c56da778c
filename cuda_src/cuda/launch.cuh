// What every launcher does on the host: pick the type, know the device, check the launch.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "aot.h"
#include "reduce.cuh"
#include "vector.cuh"

namespace aot {
inline namespace AOT_ISA {

inline Status check_cuda(const char *op, cudaError_t error) {
  if (error == cudaSuccess) return kOk;
  cudaGetLastError();  // it is told here; the next call begins clean
  return fail(kDeviceError, "%s: %s", op, cudaGetErrorString(error));
}

inline Status check_launch(const char *op) { return check_cuda(op, cudaGetLastError()); }

__host__ __device__ inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

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
  int major;          // of the compute capability
  bool clusters;      // blocks that read each other's shared memory: compute capability 9.0
};

// The current device's limits. They are asked for once per device: a query costs as much as a launch.
inline Status device_limits(const char *op, DeviceLimits *limits) {
  constexpr int kCached = 64;
  static DeviceLimits cache[kCached];
  static std::atomic<bool> known[kCached];
  int device = 0;
  AOT_TRY(check_cuda(op, cudaGetDevice(&device)));
  if (device < kCached && known[device].load(std::memory_order_acquire)) return *limits = cache[device], kOk;
  auto ask = [&](cudaDeviceAttr what, int *value) {
    return check_cuda(op, cudaDeviceGetAttribute(value, what, device));
  };
  AOT_TRY(ask(cudaDevAttrMultiProcessorCount, &limits->multiprocessors));
  AOT_TRY(ask(cudaDevAttrMaxSharedMemoryPerBlockOptin, &limits->shared_memory));
  AOT_TRY(ask(cudaDevAttrComputeCapabilityMajor, &limits->major));
  limits->clusters = limits->major >= 9;
  if (device >= kCached) return kOk;
  static std::mutex writing;
  std::lock_guard<std::mutex> hold(writing);
  if (!known[device]) cache[device] = *limits;
  known[device].store(true, std::memory_order_release);
  return kOk;
}

// Makes the device's context this thread's, which the driver's own functions want: a new thread has a device, but no
// context before the runtime needs one.
inline Status bind_device(const char *op) {
  int device = 0;
  AOT_TRY(check_cuda(op, cudaGetDevice(&device)));
  return check_cuda(op, cudaSetDevice(device));
}

// A launch of blocks in clusters, with dynamic shared memory.
struct ClusterLaunch {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute = {};

  ClusterLaunch(unsigned grid, unsigned block, int cluster, int shared, void *stream) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &attribute, config.numAttrs = cluster > 1 ? 1 : 0;
  }
  ClusterLaunch(const ClusterLaunch &) = delete;
};

// Lets a kernel ask for so much shared memory, and for a cluster larger than those that every device grants.
template <class Kernel>
Status allow(const char *op, Kernel *kernel, int cluster, int shared) {
  constexpr int kWithoutAsking = 30 << 10;  // of 48 KB, which are for what a kernel declares too: exchanges, 17 KB
  if (cluster > kMaxCluster)
    AOT_TRY(check_cuda(op, cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)));
  if (shared <= kWithoutAsking) return kOk;
  return check_cuda(op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
}

template <typename... Parameters, typename... Arguments>
Status launch_clusters(const char *op, void (*kernel)(Parameters...), unsigned grid, unsigned block, int cluster,
                       int shared, void *stream, Arguments... arguments) {
  AOT_TRY(allow(op, kernel, cluster, shared));
  ClusterLaunch launch(grid, block, cluster, shared, stream);
  return check_cuda(op, cudaLaunchKernelEx(&launch.config, kernel, static_cast<Parameters>(arguments)...));
}

// How many clusters of a kernel the device holds at once; 0 of those that it does not grant. A cluster lives within a
// group of multiprocessors, whose size need not be a multiple of the cluster's: of 132 multiprocessors, 33 clusters of
// 4 blocks may find room for 32.
template <auto kernel>
Status clusters_at_once(const char *op, unsigned block, int cluster, int shared, int64_t *result) {
  static std::atomic<uint64_t> known;  // of the latest question to this kernel, and its answer
  int device = 0, clusters = 0;
  AOT_TRY(check_cuda(op, cudaGetDevice(&device)));
  uint64_t question = (uint64_t(device) << 24 | uint64_t(cluster) << 16 | block) << 20, answer = known;
  if (answer >> 20 << 20 == question) return *result = answer & 0xfffff, kOk;
  AOT_TRY(allow(op, kernel, cluster, shared));
  ClusterLaunch launch(cluster, block, cluster, shared, nullptr);
  cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config);
  if (error == cudaErrorInvalidClusterSize) error = cudaGetLastError(), error = cudaSuccess, clusters = 0;
  AOT_TRY(check_cuda(op, error));
  *result = clusters;
  known = question | static_cast<uint64_t>(*result);
  return kOk;
}

}  // namespace AOT_ISA
}  // namespace aot
