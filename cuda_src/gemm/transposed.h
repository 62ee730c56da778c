// The copies of the factors of a product a^T b in TF32, whose tensor cores read factors along the terms alone.
// cuBLASLt's kernels for such products transpose what they load, and have half to three quarters of the rate of those
// for a b^T.
#pragma once
#include <algorithm>

#include "matrix.h"

namespace aot {
inline namespace AOT_ISA {

// cuBLASLt's scratch, which is in front of the copies.
constexpr int64_t kLibraryBytes = kLibraryElements * int64_t{sizeof(float)};

// How many of k terms are copied at a time, of both factors of m x n sums; 0: nothing is copied. An element's copy
// takes as long as 250 of its terms, and the product gains 0.3 of its time: at 4 TB/s and 250 TFLOP/s copies pay from
// some 1200 rows and columns on; with 1536 an H200 took 174 us instead of 208. The copies of a part have 128 MiB, and 8
// more at most for its whole units. Sizes alone decide, because shape inference states the workspace.
inline int64_t transposed_terms(int64_t m, int64_t n, int64_t k) {
  constexpr int64_t kMost = 1 << 25, kLeast = 1536, kLeastTerms = 1024, kUnit = 64;
  if (!kIsCuda || std::min(m, n) < kLeast || k < kLeastTerms || m % 4 || n % 4 || k % 4) return 0;
  const int64_t elements = bounded_product(m + n, k), parts = elements / kMost + (elements % kMost ? 1 : 0);
  const int64_t terms = (k + parts - 1) / parts;
  return terms < kLeastTerms ? 0 : (terms + kUnit - 1) / kUnit * kUnit;
}

// The elements of a workspace for that. MindSpore infers shapes without the dtype.
inline int64_t transposed_elements(int64_t m, int64_t n, int64_t k, DType dtype, bool allow_tf32) {
  const bool narrow = dtype == DType::float32 || dtype == DType::unknown;
  return narrow && allow_tf32 ? transposed_terms(m, n, k) * (m + n) : 0;
}

}  // namespace AOT_ISA
}  // namespace aot
