// The rows of a matrix, each by one thread: what is enough for most functions of a row.
#pragma once
#include "parallel.h"

namespace aot {
inline namespace AOT_ISA {

// f(i) for each of `rows` rows of n elements, in threads where the matrix is large.
template <class F>
void each_row(int64_t rows, int64_t n, F f) {
  parallel_pieces(rows, rows_per_task(rows, n), [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i);
  });
}

// The sum of term(j, part) over a row of n elements: in Accumulate<T> over blocks, which are added up in double. What
// term gives for lanes outside `part` does not count.
template <typename T, class F>
double sum_row(int64_t n, F term) {
  double total = 0;
  for_blocks(n, [&](int64_t begin, int64_t size) {
    Vec<T> sums[4] = {};
    sweep_sums<T>(size, [&](int64_t j, auto part, int k) { sums[k] += keep<T>(term(begin + j, part), part); });
    total += sum_of_4<T>(sums);
  });
  return total;
}

// One element, such as a row's result.
template <typename T>
Accumulate<T> load_one(const T *p) {
  return load(p, Part{1})[0];
}
template <typename T>
void store_one(T *p, double value) {
  store(p, Vec<T>{static_cast<Accumulate<T>>(value)}, Part{1});
}

}  // namespace AOT_ISA
}  // namespace aot
