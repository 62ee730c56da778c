// The backward of the norms where rows are few and short: a single block makes everything (norm_backward_few.cu).
#pragma once
#include "norm.h"

namespace aot {
inline namespace AOT_ISA {

constexpr int kFewNormRows = 32, kFewNormCols = 256;

// All tensors but the statistics have one dtype, and weight is a line. Null: absent, and statistics are recomputed.
struct FewNormRows {
  const void *dy, *dh, *x, *weight;
  const float *stats;
  void *dx, *dresidual, *dweight, *dbias;  // dresidual: a second copy of dx
  int rows, cols;
  float offset, eps, one_over_cols;  // offset: is added to the weight
  bool centred;
};

// *done: whether the kernel takes such a call: not float64, and not where vectors of 16 bytes do not fit.
Status norm_backward_few(const char *op, DType dtype, const FewNormRows &a, void *stream, bool *done);

}  // namespace AOT_ISA
}  // namespace aot
