// Makes a CUDA device current for the length of a call. In a build without CUDA there is nothing to do.
#pragma once
#include "aot.h"

namespace aot {

class DeviceGuard {
 public:
  Status enter(int device) noexcept;
  ~DeviceGuard();

 private:
  int previous_ = -1;
};

// The calling thread's CUDA device; -1 without CUDA.
int current_device() noexcept;

}  // namespace aot
