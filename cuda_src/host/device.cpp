#include "device.h"

#ifdef AOT_HAVE_CUDA
#include "cuda/error.cuh"

// The version of the CUDA runtime in this library: 12090 is 12.9. aotops/fatbin.py reads it.
AOT_API int aot_cuda_runtime() {
  int version = 0;
  return cudaRuntimeGetVersion(&version) == cudaSuccess ? version : 0;
}

aot::Status aot::DeviceGuard::enter(int device) noexcept {
  int current = -1;
  AOT_TRY(check_cuda("cudaGetDevice", cudaGetDevice(&current)));
  if (current == device) return kOk;
  AOT_TRY(check_cuda("cudaSetDevice", cudaSetDevice(device)));
  previous_ = current;
  return kOk;
}

aot::DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

int aot::current_device() noexcept {
  int current = -1;
  return cudaGetDevice(&current) == cudaSuccess ? current : -1;
}

#else

int aot::current_device() noexcept { return -1; }
aot::Status aot::DeviceGuard::enter(int) noexcept { return kOk; }
aot::DeviceGuard::~DeviceGuard() {}

#endif
