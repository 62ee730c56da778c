// Matrix products as operators describe them, for either device: one product, or many of one size.
#pragma once
#include "aot.h"

namespace aot {
inline namespace AOT_ISA {

// Element (i, j) of a matrix is data[i * stride + j], or data[j * stride + i] if transposed.
struct Operand {
  void *data = nullptr;
  int64_t stride = 0;
  bool transposed = false;

  Operand transpose() const { return {data, stride, !transposed}; }
};

// c (m, n) = a (m, k) b (k, n) for every index of the batch axes. An axis has, for a, b and c, the elements from one of
// its matrices to the next; 0 if the matrix is broadcast along it. Along an axis where c's is 0, products are summed.
struct MatmulProblem {
  struct Axis {
    int64_t length, a, b, c;
  };

  DType dtype;
  int64_t m, n, k;
  Operand a, b, c;
  int naxes = 0;
  Axis axes[kMaxNdim] = {};  // outermost first
  bool adds = false;         // c += a b, with c of the accumulate dtype; no axis is summed

  DType c_dtype() const { return adds ? accumulate_dtype(dtype) : dtype; }

  // Adds an innermost axis; merges it with the one around it if both are one range of memory.
  void add(Axis axis) {
    if (axis.length == 1) return;
    Axis *outer = naxes ? &axes[naxes - 1] : nullptr;
    if (outer && outer->a == axis.a * axis.length && outer->b == axis.b * axis.length &&
        outer->c == axis.c * axis.length)
      *outer = {outer->length * axis.length, axis.a, axis.b, axis.c};
    else axes[naxes++] = axis;
  }

  // Makes the innermost axis part of m, or of k if it is summed, where strides allow.
  void fold() {
    if (!naxes) return;
    const Axis &axis = axes[naxes - 1];
    if (!axis.b && !a.transposed && axis.a == m * a.stride && axis.c == m * c.stride) {
      m *= axis.length, --naxes;
    } else if (!axis.c && a.transposed && axis.a == k * a.stride && !b.transposed && axis.b == k * b.stride) {
      k *= axis.length, --naxes;
    }
  }

  int64_t count() const {
    int64_t n = 1;
    for (int i = 0; i < naxes; ++i) n *= axes[i].length;
    return n;
  }
  // How many products are summed for each matrix of c.
  int64_t products_per_result() const {
    int64_t n = 1;
    for (int i = 0; i < naxes; ++i) n *= axes[i].c ? 1 : axes[i].length;
    return n;
  }
  bool reduces() const {
    for (int i = 0; i < naxes; ++i)
      if (!axes[i].c) return true;
    return false;
  }
  bool needs_scratch() const { return elements() && reduces(); }
  // The elements of all of c, which is contiguous.
  int64_t elements() const {
    int64_t n = m * this->n;
    for (int i = 0; i < naxes; ++i) n *= axes[i].c ? axes[i].length : 1;
    return n;
  }

  // The problem without the sums over products, whose result goes to scratch: for each matrix of c the
  // products_per_result() terms are elements() apart.
  MatmulProblem unreduced(void *scratch) const {
    MatmulProblem p = *this;
    p.c.data = scratch;
    int64_t step = elements();
    for (int i = naxes - 1; i >= 0; --i)
      if (!axes[i].c) p.axes[i].c = step, step *= axes[i].length;
    return p;
  }

  // Offsets of the index-th product's matrices, in elements.
  void at(int64_t index, int64_t *a, int64_t *b, int64_t *c) const {
    *a = *b = *c = 0;
    for (int i = naxes - 1; i >= 0; --i) {
      const int64_t along = index % axes[i].length;
      index /= axes[i].length;
      *a += along * axes[i].a, *b += along * axes[i].b, *c += along * axes[i].c;
    }
  }
};

// Applied to a product's result by its epilogue.
enum Activation { kActivationNone, kActivationRelu, kActivationGeluTanh, kActivationGelu, kActivationSilu };

// Elements of a workspace, whose dtype is accumulate_dtype(dtype), that n elements of dtype need; rounded up, so that
// what follows is aligned.
inline int64_t workspace_elements(int64_t n, DType dtype) {
  const int64_t size = itemsize(accumulate_dtype(dtype));
  const int64_t words = dtype == DType::unknown ? n : (n * itemsize(dtype) + size - 1) / size;
  return (words + 63) / 64 * 64;
}

// Elements of scratch for cuBLASLt, for a product of so many elements, each a sum of k terms: for split-K. None for a
// small product, and none on the CPU.
constexpr int64_t kLibraryElements = 1 << 23;
inline int64_t library_workspace(int64_t elements, int64_t k) {
  return kIsCuda && bounded_product(elements, k) >= 1 << 24 ? kLibraryElements : 0;
}

}  // namespace AOT_ISA
}  // namespace aot
