// Errors of the CUDA runtime as a status and a text.
#pragma once
#include <cuda_runtime_api.h>

#include "error_text.h"

namespace aot {

// Not inlined: the launchers have many checks. Static: a file that is for one GPU has its own list of architectures.
[[gnu::noinline, gnu::cold]] static Status report_cuda(const char *op, cudaError_t error) {
  static_assert(CudaFailure::kInsufficientDriver == int(cudaErrorInsufficientDriver));
  static_assert(CudaFailure::kNoKernelImage == int(cudaErrorNoKernelImageForDevice));
  static_assert(CudaFailure::kUnsupportedPtx == int(cudaErrorUnsupportedPtxVersion));
#ifdef __CUDA_ARCH_LIST__
  static const int compiled[] = {__CUDA_ARCH_LIST__, 0}, *const architectures = compiled;
#else
  static const int *const architectures = nullptr;
#endif
  cudaGetLastError();  // clears it: it is reported here, and must not fail the next call
  CudaFailure failure = {int(error), cudaGetErrorString(error), 0, CUDART_VERSION, "this GPU", 0, architectures};
  cudaDriverGetVersion(&failure.driver);
  cudaDeviceProp gpu;
  int device = 0;
  const bool no_code = error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion;
  if (no_code && cudaGetDevice(&device) == cudaSuccess && cudaGetDeviceProperties(&gpu, device) == cudaSuccess)
    failure.gpu = gpu.name, failure.capability = 10 * gpu.major + gpu.minor;
  return fail_cuda(op, failure);
}

static inline Status check_cuda(const char *op, cudaError_t error) {
  return error == cudaSuccess ? kOk : report_cuda(op, error);
}

}  // namespace aot
