// Sums and maxima of short rows: of as many rows at once as a vector has lanes, row r in lane r. Adding up the lanes of
// one vector takes as many steps as adding up those of all, and each step waits for the one before.
#pragma once
#include <utility>

#include "parallel.h"

namespace aot {
inline namespace AOT_ISA {

// a and b have blocks of `block` lanes; each block becomes one of half as many, f of its lower and its upper half.
template <size_t block, typename V, class F, size_t... i>
AOT_INLINE V fold(V a, V b, F f, std::index_sequence<i...>) {
  constexpr size_t half = block / 2;
  const V low = __builtin_shufflevector(a, b, (i / half * block + i % half)...);
  const V high = __builtin_shufflevector(a, b, (i / half * block + i % half + half)...);
  return f(low, high);
}
template <typename T, size_t n, class F>
AOT_INLINE Vec<T> fold_each(const Vec<T> *v, F f) {
  if constexpr (n == 1) {
    return v[0];
  } else {
    constexpr size_t lanes = kLanes<T>;
    const Vec<T> a = fold_each<T, n / 2>(v, f), b = fold_each<T, n / 2>(v + n / 2, f);
    return fold<2 * lanes / n>(a, b, f, std::make_index_sequence<lanes>());
  }
}

// Lane i: the sum of all lanes of v[i], in the order of sum(); the largest, none of which is NaN.
template <typename T>
AOT_INLINE Vec<T> sums(const Vec<T> *v) {
  return fold_each<T, kLanes<T>>(v, [](Vec<T> a, Vec<T> b) AOT_INLINED { return a + b; });
}
template <typename T>
AOT_INLINE Vec<T> maxima(const Vec<T> *v) {
  return fold_each<T, kLanes<T>>(v, [](Vec<T> a, Vec<T> b) AOT_INLINED { return a > b ? a : b; });
}

// f(r, k) for the first of k adjacent rows of at most kLanes<T>, a constant: 4 at a time, whose chains of additions are
// independent, then 1.
template <typename T, class F>
AOT_INLINE void each_4_rows(int64_t rows, F f) {
  constexpr int k = kLanes<T> < 4 ? kLanes<T> : 4;
  int64_t r = 0;
  for (; r + k <= rows; r += k) f(r, std::integral_constant<int, k>());
  for (; r < rows; ++r) f(r, std::integral_constant<int, 1>());
}

// A sweep that is not unrolled, for few vectors.
template <typename T, class F>
AOT_INLINE void sweep_short(int64_t n, F f) {
  int64_t j = 0;
  for (; j + kLanes<T> <= n; j += kLanes<T>) f(j, Full());
  if (j < n) f(j, Part{n - j});
}

}  // namespace AOT_ISA
}  // namespace aot
