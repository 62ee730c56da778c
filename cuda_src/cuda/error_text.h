// The errors of CUDA that a user can fix, as text. Without CUDA's headers, so that it is tested where there is no GPU.
#pragma once
#include <cstdio>
#include <cstring>

#include "aot.h"

namespace aot {

// The facts of a failed call of the CUDA runtime. Versions are CUDA's: 13000 is 13.0.
struct CudaFailure {
  enum Code { kInsufficientDriver = 35, kNoDevice = 100, kNoKernelImage = 209, kUnsupportedPtx = 222 };
  int code;
  const char *text;     // cudaGetErrorString's
  int driver, runtime;  // the newest version that the driver supports, 0 without a driver; the library's
  const char *gpu;
  int capability;       // of the GPU: 90 is 9.0
  const int *compiled;  // the architectures that the library was compiled for, 900 is 9.0, up to a 0; null: not known
};

// The release of the loaded driver, such as 550.54.15; empty if there is none.
inline const char *driver_release(char (&line)[256], const char *file = "/proc/driver/nvidia/version") {
  const char *found = "";
  std::FILE *text = std::fopen(file, "r");
  if (!text) return found;
  if (std::fgets(line, sizeof line, text))
    for (char *rest, *word = strtok_r(line, " \t\n", &rest); word; word = strtok_r(nullptr, " \t\n", &rest))
      if (*word >= '1' && *word <= '9' && std::strchr(word, '.')) {
        found = word;
        break;
      }
  std::fclose(text);
  return found;
}

// The first release of the driver for a version of CUDA. A driver serves all minor versions of its major one.
inline int oldest_driver(int cuda) { return cuda >= 13000 ? 580 : 525; }

inline Status fail_old_driver(const char *op, const CudaFailure &failure) {
  char line[256];
  const char *release = driver_release(line);
  const int major = failure.runtime / 1000, oldest = oldest_driver(failure.runtime);
  if (!failure.driver)
    return fail(kDeviceError,
                "%s: no NVIDIA driver was found (libcuda.so.1), expected release %d or later: install it; in a "
                "container, start it with the GPUs (docker run --gpus all)",
                op, oldest);
  return fail(kDeviceError,
              "%s: the NVIDIA driver%s%s supports CUDA up to %d.%d, expected CUDA %d: update the driver to release %d "
              "or later (nvidia-smi shows it), or use a library compiled with CUDA %d",
              op, *release ? " " : "", release, failure.driver / 1000, failure.driver % 1000 / 10, major, oldest,
              failure.driver / 1000);
}

inline Status fail_no_code(const char *op, const CudaFailure &failure) {
  char compiled[128] = "other GPUs";
  for (int i = 0, used = 0; failure.compiled && failure.compiled[i] && used < 100; ++i)
    used += std::snprintf(compiled + used, sizeof compiled - used, "%s%d.%d", i ? ", " : "", failure.compiled[i] / 100,
                          failure.compiled[i] % 100 / 10);
  return fail(kDeviceError,
              "%s: the library has no code for %s, compute capability %d.%d (it was compiled for %s): compile it with "
              "ARCHS=%d",
              op, failure.gpu, failure.capability / 10, failure.capability % 10, compiled, failure.capability);
}

inline Status fail_cuda(const char *op, const CudaFailure &failure) {
  switch (failure.code) {
    case CudaFailure::kInsufficientDriver:
      return fail_old_driver(op, failure);
    case CudaFailure::kNoKernelImage:
    case CudaFailure::kUnsupportedPtx:
      return fail_no_code(op, failure);
    default:
      return fail(kDeviceError, "%s: %s", op, failure.text);
  }
}

}  // namespace aot
