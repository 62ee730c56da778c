#include "device.h"

#ifdef AOT_HAVE_CUDA
#include <cuda_runtime_api.h>

static aot::Status check(cudaError_t error, const char *what) {
  if (error == cudaSuccess) return aot::kOk;
  return aot::fail(aot::kDeviceError, "%s: %s", what, cudaGetErrorString(error));
}

aot::Status aot::DeviceGuard::enter(int device) noexcept {
  int current = -1;
  AOT_TRY(check(cudaGetDevice(&current), "cudaGetDevice"));
  if (current == device) return kOk;
  AOT_TRY(check(cudaSetDevice(device), "cudaSetDevice"));
  previous_ = current;
  return kOk;
}

aot::DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

#else

aot::Status aot::DeviceGuard::enter(int) noexcept { return kOk; }
aot::DeviceGuard::~DeviceGuard() {}

#endif
