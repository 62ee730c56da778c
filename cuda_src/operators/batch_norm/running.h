// The running statistics of a batch norm's module, in one call. In torch's operators it takes four or five.
//   running_mean = (1 - share) * running_mean + share * mean
//   running_var  = (1 - share) * running_var + share * var * terms / (terms - 1)
//   batches      = batches + 1
// Arithmetic is in the dtype of mean and var, and results are rounded once.
#pragma once
#include "aot.h"

namespace aot {

struct RunningStatistics {
  const void *mean, *var;  // float; on the CPU double too
  void *running_mean, *running_var;
  int64_t *batches;         // null: they are not counted
  int64_t channels, terms;  // terms: elements of a channel, at least 2
  double share;
  DType dtype;  // of the running statistics; on the CPU that of mean and var
  void *stream;

  double unbiased() const { return static_cast<double>(terms) / static_cast<double>(terms - 1); }
};

}  // namespace aot

extern "C" __attribute__((visibility("hidden"), weak)) int aot_running_statistics_cuda(
    const aot::RunningStatistics *call);
