// Shared by launchers on the host: dispatch of the dtype, limits of the device, launches and their errors.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "aot.h"
#include "error.cuh"
#include "reduce.cuh"
#include "vector.cuh"

namespace aot {
inline namespace AOT_ISA {

inline Status check_launch(const char *op) { return check_cuda(op, cudaGetLastError()); }

__host__ __device__ inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Clamps to the largest x dimension of a grid. Only kernels whose blocks loop may be given more blocks than that.
inline unsigned grid_size(int64_t blocks) { return static_cast<unsigned>(std::min<int64_t>(blocks, 0x7fffffff)); }

constexpr int kAnyRowThreads = 512;

// Threads of a block for a row of any size: whole warps, no more than the row has use for.
inline unsigned any_row_block(int64_t cols, int most = kAnyRowThreads) {
  return static_cast<unsigned>(std::min<int64_t>(most, ceil_div(std::max<int64_t>(cols, 1), 32) * 32));
}

// ----------------------------------------------------------------------------------------------------------- dtype

template <typename T>
struct Type {
  using type = T;
};

// Calls f(Type<T>()) for the type T of a floating dtype. Shape inference has refused all others.
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
  int shared_memory;  // bytes that a block may request
  int major;          // of the compute capability
  bool clusters;      // and overlapping kernels (overlap.cuh): compute capability 9.0
};

// The current device's limits, cached for each device: a query costs as much as a launch.
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

// Makes the device's context current in this thread, as functions of the driver API require: a new thread has a current
// device, but no context before the runtime needs one.
inline Status bind_device(const char *op) {
  int device = 0;
  AOT_TRY(check_cuda(op, cudaGetDevice(&device)));
  return check_cuda(op, cudaSetDevice(device));
}

// ---------------------------------------------------------------------------------------------------------- launch

struct LaunchShape {
  dim3 grid, block;
  int shared = 0;        // bytes of dynamic shared memory
  dim3 cluster = 1;      // in blocks
  bool overlap = false;  // whether it may start while the kernel before it ends (overlap.cuh)
};

// A launch as the runtime takes it.
struct LaunchConfig {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};

  LaunchConfig(const LaunchShape &shape, void *stream) {
    config.gridDim = shape.grid, config.blockDim = shape.block, config.dynamicSmemBytes = shape.shared;
    config.stream = static_cast<cudaStream_t>(stream), config.attrs = attributes;
    if (shape.overlap) {
      cudaLaunchAttribute &attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    const dim3 cluster = shape.cluster;
    if (cluster.x * cluster.y * cluster.z > 1) {
      cudaLaunchAttribute &attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim = {cluster.x, cluster.y, cluster.z};
    }
  }
  LaunchConfig(const LaunchConfig &) = delete;  // config points to attributes
};

// Where the dynamic shared memory of a kernel is kept that launches on a device may have. Null: there are more kernels.
inline std::atomic<int> *allowed_memory(const void *kernel, int device) {
  struct Entry {
    std::atomic<uint64_t> kernel;
    std::atomic<int> bytes;
  };
  constexpr uint64_t kEntries = 1 << 10;
  static Entry entries[kEntries];
  const uint64_t key = reinterpret_cast<uintptr_t>(kernel) ^ uint64_t(device) << 48;
  uint64_t at = key * 0x9e3779b97f4a7c15 >> 54;
  for (uint64_t i = 0; i < kEntries; ++i, at = (at + 1) % kEntries) {
    uint64_t found = 0;
    if (entries[at].kernel.compare_exchange_strong(found, key) || found == key) return &entries[at].bytes;
  }
  return nullptr;
}

// Allows a kernel its dynamic shared memory, and clusters of more than kMaxCluster blocks. What is allowed only rises:
// another thread may be about to launch the kernel with as much.
template <class Kernel>
Status allow(const char *op, Kernel *kernel, int cluster, int shared) {
  // Every kernel may have 48 KB, of which 17 KB or less are static shared memory: exchanges.
  constexpr int kAlwaysAllowed = 30 << 10;
  if (cluster > kMaxCluster)
    AOT_TRY(check_cuda(op, cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)));
  if (shared <= kAlwaysAllowed) return kOk;
  int device = 0;
  AOT_TRY(check_cuda(op, cudaGetDevice(&device)));
  std::atomic<int> *const allowed = allowed_memory(reinterpret_cast<const void *>(kernel), device);
  if (allowed && allowed->load(std::memory_order_acquire) >= shared) return kOk;
  static std::mutex raising;
  std::lock_guard<std::mutex> hold(raising);
  if (allowed && *allowed >= shared) return kOk;
  AOT_TRY(check_cuda(op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared)));
  if (allowed) allowed->store(shared, std::memory_order_release);
  return kOk;
}

// Launches a kernel. Before compute capability 9.0, kernels do not overlap.
template <typename... Parameters, typename... Arguments>
Status launch_kernel(const char *op, void (*kernel)(Parameters...), LaunchShape shape, void *stream,
                     const Arguments &...arguments) {
  AOT_TRY(allow(op, kernel, static_cast<int>(shape.cluster.x * shape.cluster.y * shape.cluster.z), shape.shared));
  if (shape.overlap) {
    DeviceLimits limits;
    AOT_TRY(device_limits(op, &limits));
    shape.overlap = limits.clusters;
  }
  const LaunchConfig launch(shape, stream);
  return check_cuda(op, cudaLaunchKernelEx(&launch.config, kernel, static_cast<Parameters>(arguments)...));
}

// How many clusters of a kernel the device holds at once; 0 if it does not support clusters of that size. A cluster
// runs within a group of multiprocessors (GPC), whose size need not be a multiple of the cluster's: 132 multiprocessors
// may hold 32 clusters of 4 blocks, not 33.
template <auto kernel>
Status clusters_at_once(const char *op, unsigned block, int cluster, int shared, int64_t *result) {
  static std::atomic<uint64_t> cached;  // the latest query of this kernel, and its result in the low 20 bits
  int device = 0, clusters = 0;
  AOT_TRY(check_cuda(op, cudaGetDevice(&device)));
  uint64_t query = (uint64_t(device) << 24 | uint64_t(cluster) << 16 | block) << 20, latest = cached;
  if (latest >> 20 << 20 == query) return *result = latest & 0xfffff, kOk;
  AOT_TRY(allow(op, kernel, cluster, shared));
  const auto size = static_cast<unsigned>(cluster);
  const LaunchConfig launch({size, block, shared, size}, nullptr);
  cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config);
  if (error == cudaErrorInvalidClusterSize) error = cudaGetLastError(), error = cudaSuccess, clusters = 0;
  AOT_TRY(check_cuda(op, error));
  *result = clusters;
  cached = query | static_cast<uint64_t>(*result);
  return kOk;
}

}  // namespace AOT_ISA
}  // namespace aot
