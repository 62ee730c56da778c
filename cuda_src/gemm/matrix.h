// What the operators that multiply matrices have in common: a product, or many of one size, as the kernels of either
// device take it.
#pragma once
#include "aot.h"

namespace aot {
inline namespace AOT_ISA {

// Element (i, j) of a matrix is data[i * stride + j], or, transposed, data[j * stride + i].
struct Operand {
  void *data = nullptr;
  int64_t stride = 0;
  bool transposed = false;

  Operand flipped() const { return {data, stride, !transposed}; }
};

// c (m, n) = a (m, k) b (k, n), for every index of the axes; `a`, `b` and `c` of an axis are how many elements on the
// next one's matrices lie: 0 in a matrix that is broadcast. Where c is 0, the products along the axis are summed.
struct Product {
  struct Axis {
    int64_t length, a, b, c;
  };

  DType dtype;
  int64_t m, n, k;
  Operand a, b, c;
  int naxes = 0;
  Axis axes[kMaxNdim] = {};  // outermost first

  // An axis inside the others.
  void add(Axis axis) {
    if (axis.length == 1) return;
    Axis *outer = naxes ? &axes[naxes - 1] : nullptr;
    if (outer && outer->a == axis.a * axis.length && outer->b == axis.b * axis.length &&
        outer->c == axis.c * axis.length)
      *outer = {outer->length * axis.length, axis.a, axis.b, axis.c};
    else axes[naxes++] = axis;
  }

  // Takes the innermost axis for more rows, or more terms of the sums, where it lies so.
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
  // How many products each element of c is the sum of.
  int64_t summed() const {
    int64_t n = 1;
    for (int i = 0; i < naxes; ++i) n *= axes[i].c ? 1 : axes[i].length;
    return n;
  }
  bool sums() const {
    for (int i = 0; i < naxes; ++i)
      if (!axes[i].c) return true;
    return false;
  }
  bool sums_anything() const { return elements() && sums(); }
  // The elements of all of c, which has no gaps.
  int64_t elements() const {
    int64_t n = m * this->n;
    for (int i = 0; i < naxes; ++i) n *= axes[i].c ? axes[i].length : 1;
    return n;
  }

  // The same with each product by itself, to scratch: what is to be summed lies elements() apart.
  Product apart(void *scratch) const {
    Product p = *this;
    p.c.data = scratch;
    int64_t step = elements();
    for (int i = naxes - 1; i >= 0; --i)
      if (!axes[i].c) p.axes[i].c = step, step *= axes[i].length;
    return p;
  }

  // Where the index-th product's matrices are, in elements.
  void at(int64_t index, int64_t *a, int64_t *b, int64_t *c) const {
    *a = *b = *c = 0;
    for (int i = naxes - 1; i >= 0; --i) {
      const int64_t here = index % axes[i].length;
      index /= axes[i].length;
      *a += here * axes[i].a, *b += here * axes[i].b, *c += here * axes[i].c;
    }
  }
};

// What may follow a product, elementwise.
enum Activation { kActivationNone, kActivationRelu, kActivationGeluTanh, kActivationGelu, kActivationSilu };

// Elements of a workspace, which are of accumulate_dtype(dtype), that n of dtype take there; whatever follows begins at
// a multiple of 64.
inline int64_t workspace_elements(int64_t n, DType dtype) {
  const int64_t size = itemsize(accumulate_dtype(dtype)), words = (n * itemsize(dtype) + size - 1) / size;
  return (words + 63) / 64 * 64;
}

// Elements of scratch for cuBLASLt, for a product of so many elements, each a sum of k terms: it may cut k into pieces.
// None for a small product, and none on the CPU.
inline int64_t library_workspace(int64_t elements, int64_t k) {
  return kIsCuda && bounded_product(elements, k) >= 1 << 24 ? 1 << 23 : 0;
}

}  // namespace AOT_ISA
}  // namespace aot
