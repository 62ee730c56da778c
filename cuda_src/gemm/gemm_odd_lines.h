// Products with a 16-bit matrix on Hopper whose lines begin anywhere, such as the gradient of logits of 50257 classes,
// and another one whose lines are aligned: without a copy of the first one to aligned lines.
#pragma once
#include <algorithm>

#include "cuda/launch.cuh"
#include "gemm.h"

namespace aot {
inline namespace AOT_ISA {

// Lines of a class begin at as many elements from a multiple of 16 bytes: every eighth line at least.
constexpr int kLineClasses = 8;

inline int line_classes(int64_t stride) { return stride % 2 ? 8 : stride % 4 ? 4 : stride % 8 ? 2 : 1; }

inline int first_of_class(const Operand &a, int of_class) {
  return static_cast<int>((reinterpret_cast<uintptr_t>(a.data) / 2 + of_class * a.stride) % 8);
}

// Tiles of c: of a b, of lines of one class; of a^T b.
constexpr int kOddRows = 256, kOddColumns = 192, kOddRowsOfT = 128, kOddColumnsOfT = 256;

// The products of a linear's backward, dx = dy weight and dweight = dy^T x, either of them null, and the sums of dy's
// columns, or null. *done: whether they have been run: where that is estimated to be faster than a copy of dy and usual
// products.
Status gemm_odd_lines(const char *op, const GemmParams *dx, const GemmParams *dweight, void *dbias, cudaStream_t stream,
                      bool *done);

// Runs a b, whose sums it takes in odd_lines_slices(). *done: whether the driver has encoded the tensor maps.
Status gemm_odd_lines_sm90(const char *op, const GemmParams &gemm, int multiprocessors, cudaStream_t stream,
                           bool *done);
// Runs a^T b, and sums a's columns in the operands' dtype, if column_sums is not null.
Status gemm_odd_lines_of_t_sm90(const char *op, const GemmParams &gemm, void *column_sums, int multiprocessors,
                                cudaStream_t stream, bool *done);

// Whether one of the kernels can run a product, whatever the device.
inline bool odd_lines_supported(const GemmParams &g) {
  constexpr int64_t kMost = 1 << 30, kFewest = 64, kBox = 64;
  const bool half = g.dtype == DType::bfloat16 || g.dtype == DType::float16, plain = g.c_dtype == g.dtype && !g.adds;
  const bool epilogue = g.bias || g.activation || g.pre_activation;
  if (!half || !plain || epilogue || g.count != 1 || g.b.transposed) return false;
  if (g.b.stride % 8 || !aligned(g.b.data)) return false;
  if (std::max({g.m, g.n, g.k}) > kMost || std::min({g.m, g.n, g.k}) < kFewest) return false;
  return !g.a.transposed || ceil_div(g.n, kBox) * kBox <= g.b.stride;  // b's lines are loaded in whole boxes
}

// Estimates in microseconds, as an H200 takes them, decide between these products and usual ones with a copy
// (docs/lab_notes.md, products of odd sizes). A block's tile takes as long as its terms, and a little for its ends.
// Slices of a b's sums are written to the workspace and read again. Sums of a's columns: with a^T b.
inline double odd_lines_time(const GemmParams &g, int multiprocessors, int slices, bool column_sums) {
  constexpr double kTerm = 0.0175, kTermOfT = 0.0136, kWithSums = 1.08, kEnds = 6, kEndsOfT = 1, kPartial = 2.5e-6;
  const bool t = g.a.transposed;
  int64_t rows = 0;
  if (t) rows = ceil_div(g.m, 2 * kOddRowsOfT);
  const int classes = line_classes(g.a.stride);
  for (int i = 0; i < classes && !t; ++i) rows += ceil_div(ceil_div(g.m - i, classes), kOddRows);
  const int64_t pairs = rows * ceil_div(g.n, t ? kOddColumnsOfT : 2 * kOddColumns) * slices;
  const double partials = slices > 1 ? 4 + kPartial * slices * g.m * g.n : 0;
  const double term = (t ? kTermOfT : kTerm) * (column_sums ? kWithSums : 1);
  return ceil_div(pairs, multiprocessors / 2) * (g.k / slices * term + (t ? kEndsOfT : kEnds)) + partials;
}
// The slices of the sums of a b that take the least time, of those that the workspace has room for.
inline int odd_lines_slices(const GemmParams &g, int multiprocessors) {
  constexpr int64_t kMost = 8, kFewestTerms = 512;
  int64_t most = g.a.transposed || g.n % 8 || g.c.stride != g.n ? 1 : std::min(kMost, g.k / kFewestTerms);
  most = std::min<int64_t>(most, g.workspace_bytes / (g.m * g.n * int64_t{sizeof(float)}));
  int best = 1;
  for (int i = 2; i <= most; ++i)
    if (odd_lines_time(g, multiprocessors, i, false) < odd_lines_time(g, multiprocessors, best, false)) best = i;
  return best;
}
inline double aligned_time(const GemmParams &g) { return 6 + 2e-6 * g.m * g.n * g.k / 670; }  // 670 TFLOP/s
inline double copy_time(int64_t lines, int64_t line) { return 3 + 1.05e-6 * lines * line; }   // once read, once written

}  // namespace AOT_ISA
}  // namespace aot
