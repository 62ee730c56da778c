// Copies of operands in the workspace, with lines that are aligned to 16 bytes. Sizes and dtypes alone decide which
// products have them, because shape inference states the workspace.
//
// A product of operands whose lines are not aligned runs at half its rate and less. At 4 TB/s and 700 TFLOP/s (380 in
// TF32), the copy of an operand a (m, k) takes 350 / n of the product's time, that of b (k, n) 350 / m, and that of c
// (m, n) 350 / k. Copies are made where they take no more than two fifths of it.
#pragma once
#include <algorithm>

#include "matrix.h"

namespace aot {
inline namespace AOT_ISA {

struct Padding {
  bool a = false, b = false, c = false;  // which are copied; c: from the workspace
  int64_t m = 0, n = 0, k = 0;           // of the product of the copies, which end in zeros
  int64_t vector = 1;                    // elements

  explicit operator bool() const { return a || b || c; }
  int64_t stride(const Operand &x, int64_t rows, int64_t cols) const { return round_up(x.transposed ? rows : cols); }
  int64_t a_elements(const Operand &x) const { return a ? (x.transposed ? k : m) * stride(x, m, k) : 0; }
  int64_t b_elements(const Operand &x) const { return b ? (x.transposed ? n : k) * stride(x, k, n) : 0; }
  int64_t c_elements() const { return c ? m * round_up(n) : 0; }
  int64_t bias_elements() const { return c ? n : 0; }
  int64_t round_up(int64_t n) const { return (n + vector - 1) / vector * vector; }
};

// Elements of the workspace, whose dtype is float32, for the copies; and some to align them.
inline int64_t padding_words(const Padding &p, DType dtype, const Operand &a, const Operand &b) {
  if (!p) return 0;
  const auto words = [&](int64_t n) { return workspace_elements(n, dtype); };
  return words(p.a_elements(a)) + words(p.b_elements(b)) + words(p.c_elements()) + words(p.bias_elements()) + 64;
}

// 16 bits: our own kernel for Hopper takes every operand but one whose lines are terms of the sum beside one whose
// lines are not (gemm_unaligned_sm90.cu). TF32: all sizes that lines have along them are padded, for cuBLASLt.
inline Padding padding(DType dtype, bool allow_tf32, int64_t m, int64_t n, int64_t k, const Operand &a,
                       const Operand &b) {
  constexpr int64_t kWorthwhile = int64_t{1} << 31, kProductsForCopy = 900;
  const bool half = dtype == DType::float16 || dtype == DType::bfloat16, tf32 = dtype == DType::float32 && allow_tf32;
  const int64_t products = bounded_product(bounded_product(m, n), k);
  if (!(half || tf32) || products < kWorthwhile) return {};
  Padding p;
  p.m = m, p.n = n, p.k = k, p.vector = 16 / itemsize(dtype);
  if (half) {
    p.a = a.transposed && b.transposed && a.stride % p.vector;
    p.b = !a.transposed && !b.transposed && b.stride % p.vector;
  } else {
    p.n = p.round_up(n);
    if (a.transposed) p.m = p.round_up(m);
    if (!a.transposed || b.transposed) p.k = p.round_up(k);
    p.a = p.m != m || p.k != k, p.b = p.k != k || p.n != n, p.c = p.m != m || p.n != n;
  }
  const int64_t copied = (p.a ? m * k : 0) + (p.b ? k * n : 0) + (p.c ? m * n : 0);
  return products / kProductsForCopy >= copied ? p : Padding();
}

// Elements of the workspace for one product, whose dtype may be unknown.
inline int64_t padding_workspace(DType dtype, bool allow_tf32, int64_t m, int64_t n, int64_t k, const Operand &a,
                                 const Operand &b) {
  if (dtype == DType::unknown)
    return std::max(padding_workspace(DType::float16, allow_tf32, m, n, k, a, b),
                    padding_workspace(DType::float32, allow_tf32, m, n, k, a, b));
  return padding_words(padding(dtype, allow_tf32, m, n, k, a, b), dtype, a, b);
}

}  // namespace AOT_ISA
}  // namespace aot
