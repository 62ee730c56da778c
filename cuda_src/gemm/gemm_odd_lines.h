// Products with a 16-bit matrix on Hopper whose lines begin anywhere, such as the gradient of logits of 50257 classes,
// and another one whose lines are aligned: without a copy of the first one to aligned lines.
#pragma once
#include <algorithm>

#include "cuda/launch.cuh"
#include "gemm.h"
#include "gemm_unaligned.h"

namespace aot {
inline namespace AOT_ISA {

// Lines of a class begin at as many elements from a multiple of 16 bytes: every eighth line at least.
constexpr int kLineClasses = 8;

inline int line_classes(int64_t stride) { return stride % 2 ? 8 : stride % 4 ? 4 : stride % 8 ? 2 : 1; }

inline int first_of_class(const Operand &a, int of_class) {
  return static_cast<int>((reinterpret_cast<uintptr_t>(a.data) / 2 + of_class * a.stride) % 8);
}

// Tiles of c: of a b, of lines of one class and either number of columns; of a^T b.
constexpr int kOddRows = 256, kOddColumns = 192, kOddFewColumns = 128, kOddRowsOfT = 128, kOddColumnsOfT = 256;

// The products of a linear's backward, dx = dy weight and dweight = dy^T x, either of them null.

// Whether dweight of copies is faster with sizes of whole vectors, by cuBLASLt, with a copy of the results behind it:
// where tiles are few, it splits the sums.
Status padding_pays(const char *op, const GemmParams &dweight, bool *pays);

// Whether both are faster from dy as it is than from a copy of it, and dweight then by padding, if `pads`.
// sums: of dy's columns, too.
Status odd_lines_pay(const char *op, const GemmParams *dx, const GemmParams *dweight, bool sums, bool pads, bool *pays);

// Runs them, from dy as it is, and the sums of its columns, if dbias is not null. *done: whether the driver has encoded
// the tensor maps.
Status gemm_odd_lines(const char *op, const GemmParams *dx, const GemmParams *dweight, void *dbias, cudaStream_t stream,
                      bool *done);

// Runs a b. *done: whether the driver has encoded the tensor maps.
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

// A pair of blocks takes a pair of tiles at a time. Where these are few, or few in their last round, it takes slices of
// their sums, which lie in the workspace, and which another kernel adds.
struct OddLinesPlan {
  int64_t pairs, across;  // of tiles, all and of a row of them
  int64_t whole;          // pairs of the first rows, whose sums are taken at once: of a^T b some, of a b all or none
  int slices;             // of the sums of the pairs behind these
  int columns;            // of a tile
};

// Estimates in microseconds, as an H200 takes them, decide between these products and usual ones with a copy
// (docs/lab_notes.md, products of odd sizes). A block's tile takes as long as its terms, and a little for its ends.
// Slices of the sums are written and read again. column_sums: with a^T b.
inline double odd_lines_time(const GemmParams &g, int multiprocessors, const OddLinesPlan &plan, bool column_sums) {
  constexpr double kTerm = 0.0166, kTermOfT = 0.0128, kWithSums = 1.08, kEnds = 6, kEndsOfT = 1, kPartial = 2e-6;
  const bool t = g.a.transposed;
  const double term = t ? kTermOfT * (column_sums ? kWithSums : 1) : kTerm * plan.columns / kOddColumns;
  const double ends = t ? kEndsOfT : kEnds;
  auto time = [&](int64_t items, int64_t terms) {
    return ceil_div(items, multiprocessors / 2) * (terms * term + ends);
  };
  const int64_t behind = plan.pairs - plan.whole;
  const double whole = time(plan.whole, g.k);
  if (!behind) return whole;
  const double elements = plan.slices * double(g.m) * g.n * behind / plan.pairs;
  return whole + time(behind * plan.slices, g.k / plan.slices) + 4 + kPartial * elements;
}

// The plan that takes the least time, of those that the workspace has room for.
inline OddLinesPlan odd_lines_plan(const GemmParams &g, int multiprocessors) {
  constexpr int64_t kMost = 8, kFewestTerms = 512, kRowsOfPair = 2 * kOddRowsOfT;
  const bool t = g.a.transposed;
  int64_t rows = t ? ceil_div(g.m, kRowsOfPair) : 0;
  const int classes = line_classes(g.a.stride);
  for (int i = 0; i < classes && !t; ++i) rows += ceil_div(ceil_div(g.m - i, classes), kOddRows);
  const int64_t most = g.n % 8 || g.c.stride != g.n ? 1 : std::min(kMost, g.k / kFewestTerms);
  OddLinesPlan best = {};
  double least = 0;
  auto consider = [&](const OddLinesPlan &plan) {
    const double time = odd_lines_time(g, multiprocessors, plan, false);
    if (!best.pairs || time < least) least = time, best = plan;
  };
  auto consider_tiles = [&](int columns) {
    const int64_t across = ceil_div(g.n, t ? columns : 2 * columns), pairs = rows * across;
    const int64_t last = t ? pairs / (multiprocessors / 2) * (multiprocessors / 2) / across * across : 0;
    consider({pairs, across, pairs, 1, columns});
    for (int64_t whole : {int64_t{0}, last}) {
      const int64_t sliced = g.m - whole / across * kRowsOfPair;  // rows
      if (sliced <= 0) continue;
      const int64_t room = g.workspace_bytes / (sliced * (g.n + 1) * int64_t{sizeof(float)});
      for (int i = 2; i <= std::min(most, room); ++i) consider({pairs, across, whole, i, columns});
    }
  };
  consider_tiles(t ? kOddColumnsOfT : kOddColumns);
  if (!t) consider_tiles(kOddFewColumns);
  return best;
}

// Products of copies are run by gemm_unaligned_sm90.cu, or, where tiles are few, by cuBLASLt, at half the rate that it
// has with sizes of whole vectors.
inline double usual_time(const GemmParams &g, int multiprocessors) {
  constexpr double kTerm = 0.0058, kTermOfLow = 0.0037, kEnds = 1, kLaunch = 3, kFlops = 335e6;  // in a microsecond
  if (4 * ceil_div(g.m, 128) * ceil_div(g.n, 128) <= multiprocessors) return 2.0 * g.m * g.n * g.k / kFlops;
  if (low_tiles(g, multiprocessors)) return g.k * kTermOfLow;  // in one round
  const int64_t rounds = unaligned_rounds(g, multiprocessors, clusters_in_rows(g, multiprocessors));
  return rounds * (g.k * kTerm + kEnds) + kLaunch;
}
inline double copy_time(int64_t lines, int64_t line) { return 3 + 1.05e-6 * lines * line; }  // once read, once written

// By cuBLASLt with sizes of whole vectors, and the results copied.
inline double padded_time(const GemmParams &g) {
  constexpr double kFlops = 700e6, kLaunch = 3;
  return 2.0 * g.m * g.n * g.k / kFlops + kLaunch + copy_time(g.m, g.n);
}

}  // namespace AOT_ISA
}  // namespace aot
