// Matrix products with one row or one column on the CPU. There is little work for each element of the matrix, which is
// read once, where it lies, in the order in which memory has it.
//
//   multiply(count, product);      as gemm_batch (gemm_cpu.h), for C of the inputs' type
//
// A product with one column is the one row of its transpose, x times b. If b's columns are contiguous, the sums are dot
// products. If its rows are, each is multiplied by an element of x and added to sums that stay in the first-level
// cache. The order in which the terms of a sum are added depends on m, n and k only, so the result is the same on any
// number of threads.
#pragma once
#include "cpu/lanes.h"
#include "gemm_cpu.h"

namespace aot {
inline namespace AOT_ISA {

// ------------------------------------------------------------------------------------------------------------- sums

// sums[j] = the sum over p < k of x[p] * b[j * stride + p]. sums has room for whole vectors. far: b comes from memory.
template <class Terms, bool far, typename T>
[[gnu::noinline]] void dot_products(const T *x, const T *b, int64_t stride, int64_t k, int64_t n, Accumulate<T> *sums) {
  constexpr int lanes = kLanes<T>, kColumns = lanes < 4 ? lanes : 4, kChains = 2;
  constexpr int64_t kStep = Terms::kTerms * lanes, kMost = kPartialTerms * kChains * kStep;
  for (int64_t j = 0; j < n; j += lanes) {
    Vec<T> found[lanes] = {};
    for (int l = 0; l < lanes && j + l < n; l += kColumns) {
      const T *columns[kColumns];
      for (int c = 0; c < kColumns; ++c) columns[c] = b + (j + l + c < n ? j + l + c : j + l) * stride;
      for (int64_t begin = 0; begin < k; begin += kMost) {
        const int64_t end = k - begin < kMost ? k : begin + kMost;
        Vec<T> sum[kChains][kColumns] = {};
        const auto step = [&](int64_t p, auto part, int chain) AOT_INLINED {
          const Vec<T> left = Terms::along(x + p, part);
#pragma GCC unroll 4
          for (int c = 0; c < kColumns; ++c) {
            // the next columns: hardware prefetchers do not know where a column begins
            if (far) __builtin_prefetch(columns[c] + p + kColumns * stride, 0, 2);
            sum[chain][c] = Terms::add(sum[chain][c], left, Terms::along(columns[c] + p, part));
          }
        };
        int64_t p = begin;
        for (; p + kChains * kStep <= end; p += kChains * kStep)
#pragma GCC unroll 2
          for (int chain = 0; chain < kChains; ++chain) step(p + chain * kStep, Full(), chain);
        for (; p + kStep <= end; p += kStep) step(p, Full(), 0);
        if (p < end) step(p, Part{end - p}, 1);
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) found[l + c] += sum[0][c] + sum[1][c];
      }
    }
    store(sums + j, aot::sums<T>(found));
  }
}

// sums[j] (+)= the sum over p < terms of x[p * step] * b[p * stride + j].
template <int terms, typename T>
AOT_INLINE void add_terms(const T *x, int64_t step, const T *b, int64_t stride, int64_t n, bool add,
                          Accumulate<T> *sums) {
  Accumulate<T> factors[terms];
  for (int p = 0; p < terms; ++p) factors[p] = load(x + p * step, Part{1})[0];
  sweep_short<T>(n, [&](int64_t j, auto part) AOT_INLINED {
    Vec<T> found{};
#pragma GCC unroll 8
    for (int p = 0; p < terms; ++p) found += factors[p] * load(b + p * stride + j, part);
    store(sums + j, add ? load(sums + j) + found : found);
  });
}

// sums[j] = the sum over p < k of x[p * step] * b[p * stride + j]. sums has room for whole vectors.
template <typename T>
[[gnu::noinline]] void add_rows(const T *x, int64_t step, const T *b, int64_t stride, int64_t k, int64_t n,
                                Accumulate<T> *sums) {
  constexpr int64_t kTogether = 8;
  int64_t p = 0;
  for (; p + kTogether <= k; p += kTogether)
    add_terms<kTogether>(x + p * step, step, b + p * stride, stride, n, p > 0, sums);
  for (; p < k; ++p) add_terms<1>(x + p * step, step, b + p * stride, stride, n, p > 0, sums);
}

// ---------------------------------------------------------------------------------------------------------- product

// x (1, k) times b (k, n): a product or its transpose.
template <typename T, class Epilogue>
struct VectorProduct {
  using A = Accumulate<T>;
  static constexpr int64_t kMost = 4096;  // columns of a task

  const CpuGemm<T, T, Epilogue> product;
  const bool one_column;
  const int64_t n, k;
  const Matrix<T> x, b;

  explicit VectorProduct(const CpuGemm<T, T, Epilogue> &p)
      : product(p),
        one_column(p.n == 1 && p.m != 1 && p.ldc == 1),
        n(one_column ? p.m : p.n),
        k(p.k),
        x(one_column ? transpose(p.b) : p.a),
        b(one_column ? transpose(p.a) : contiguous(p)) {}

  bool possible() const {
    return (product.m == 1 || one_column) && n > 0 && k > 0 && !product.add && (!b.transposed || step() == 1);
  }

  // The columns of a task of one of `products` products.
  int64_t columns(int64_t products) const {
    constexpr int64_t kUnit = 64;  // some cache lines of a row
    const int64_t tasks = threads() > 1 ? ceil_div(2 * threads(), products) : 1;
    const int64_t enough = ceil_div(n, tasks), worth = kGrain / k, wanted = enough < worth ? worth : enough;
    return wanted < kMost ? ceil_div(wanted, kUnit) * kUnit : kMost;
  }

  // Columns [begin, end).
  void compute(int64_t begin, int64_t end) const {
    const int64_t cols = end - begin;
    alignas(64) A sums[kMost];
    const T *const from = b.at(0, begin).data;
    b.transposed ? find_dots(from, cols, sums) : find_sums(from, cols, sums);
    const GemmTile<T, T, Epilogue> tile{product.m,   product.n, k, product.a, product.b,       product.c,
                                        product.ldc, false,     0, 0,         product.epilogue};
    const bool as_column = one_column && !std::is_same_v<Epilogue, NoEpilogue>;
    as_column ? tile.store_sums(begin, 0, cols, 1, sums, 1) : tile.store_sums(0, begin, 1, cols, sums, 0);
  }

 private:
  static Matrix<T> transpose(Matrix<T> x) { return {x.data, x.stride, !x.transposed}; }
  // B; a contiguous column as such.
  static Matrix<T> contiguous(const CpuGemm<T, T, Epilogue> &p) {
    return {p.b.data, p.b.stride, p.b.transposed || (p.n == 1 && p.b.stride == 1)};
  }
  // From an element of x to the next.
  int64_t step() const { return x.transposed ? x.stride : 1; }

  void find_dots(const T *from, int64_t cols, A *sums) const {
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<T, bfloat16>)
      if (BFloat16Pairs::available()) return find_dots_by<BFloat16Pairs>(from, cols, sums);
#endif
    find_dots_by<WidenedTerms<T>>(from, cols, sums);
  }
  template <class Terms>
  void find_dots_by(const T *from, int64_t cols, A *sums) const {
    if (worth_streaming(n * k * sizeof(T))) dot_products<Terms, true>(x.data, from, b.stride, k, cols, sums);
    else dot_products<Terms, false>(x.data, from, b.stride, k, cols, sums);
  }

  // By partial sums, so that rounding errors grow more slowly.
  void find_sums(const T *from, int64_t cols, A *sums) const {
    for (int64_t p = 0; p < k; p += kPartialTerms) {
      A partial[kMost];
      A *const to = p ? partial : sums;
      const int64_t terms = k - p < kPartialTerms ? k - p : kPartialTerms;
      add_rows(x.data + p * step(), step(), from + p * b.stride, b.stride, terms, cols, to);
      if (p) sweep_short<A>(cols, [&](int64_t j, auto) { store(sums + j, load(sums + j) + load(to + j)); });
    }
  }
};

template <class F>
Status multiply(int64_t count, F product) {
  if (count == 0) return kOk;
  const auto first = VectorProduct(product(0));
  if (!first.possible()) return gemm_batch(count, product);
  const int64_t n = first.n, columns = first.columns(count), pieces = ceil_div(n, columns);
  parallel(count * pieces, [&](int64_t index) {
    const int64_t begin = index % pieces * columns;
    VectorProduct(product(index / pieces)).compute(begin, n - begin < columns ? n : begin + columns);
  });
  return kOk;
}

}  // namespace AOT_ISA
}  // namespace aot
