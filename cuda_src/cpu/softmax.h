// The exponentials of a row, for softmax and the cross entropy: the largest number, then exp(x - top) and its sum. A
// NaN or an infinity makes the sum NaN, as in the formula.
#pragma once
#include "blas.h"
#include "math.h"
#include "parallel.h"

namespace aot {
inline namespace AOT_ISA {

template <typename A>
struct Exponentials {
  A top;
  double sum;   // of exp(x - top)
  double rest;  // the sum of x - top
};

template <typename T>
Accumulate<T> largest(const T *x, int64_t n) {
  using A = Accumulate<T>;
  const Vec<T> lowest = Vec<T>{} - static_cast<A>(__builtin_inf());
  Vec<T> top[4] = {lowest, lowest, lowest, lowest};
  int64_t j = 0;
  auto take = [&](int64_t j, int k) {
    Vec<T> v = load(x + j);
    top[k] = v > top[k] ? v : top[k];
  };
  for (; j + 4 * kLanes<T> <= n; j += 4 * kLanes<T>)
    for (int k = 0; k < 4; ++k) take(j + k * kLanes<T>, k);
  for (; j + kLanes<T> <= n; j += kLanes<T>) take(j, 0);
  A most = lowest[0];
  for (const Vec<T> &v : top)
    for (int i = 0; i < kLanes<T>; ++i) most = v[i] > most ? v[i] : most;
  if (j < n) {
    Vec<T> v = load(x + j, Part{n - j});
    for (int i = 0; i < n - j; ++i) most = v[i] > most ? v[i] : most;
  }
  return most;
}

// f(j, e, part) gets the exponentials, relative to top. Sums over a block are added up in double: in a long row float
// would lose them. `next` is fetched meanwhile, as far as n elements.
template <bool with_rest, typename T, class F>
AOT_INLINE Exponentials<Accumulate<T>> exponentials(const T *x, const T *next, int64_t n, F f) {
  constexpr int64_t block = 4096;
  Exponentials<Accumulate<T>> s{largest(x, n), 0, 0};
  for (int64_t begin = 0; begin < n; begin += block) {
    Vec<T> sums[4] = {}, rests[4] = {};
    sweep_sums<T>(n - begin < block ? n - begin : block, [&](int64_t i, auto part, int k) {
      const int64_t j = begin + i;
      __builtin_prefetch(next + j);
      Vec<T> d = load(x + j, part) - s.top, e = keep<T>(exp_nonpositive<T>(d), part);
      sums[k] += e;
      if (with_rest) rests[k] += keep<T>(d, part);
      f(j, e, part);
    });
    s.sum += sum<Accumulate<T>>((sums[0] + sums[1]) + (sums[2] + sums[3]));
    s.rest += sum<Accumulate<T>>((rests[0] + rests[1]) + (rests[2] + rests[3]));
  }
  return s;
}

// Exponentials of a row this long wait in a buffer, which stays in a cache; those of a longer one are taken again.
// The buffer is the thread's own memory: 128 KiB of doubles are more than a stack may have. Null for a longer row.
constexpr int64_t kRowBuffer = 16384;
template <typename T>
Accumulate<T> *row_buffer(int64_t n) {
  return n <= kRowBuffer ? static_cast<Accumulate<T> *>(thread_scratch((n + kLanes<T>)*sizeof(Accumulate<T>)))
                         : nullptr;
}

// Rows that are worth a thread's while.
inline int64_t rows_piece(int64_t n) { return n < kGrain ? kGrain / (n > 0 ? n : 1) : 1; }

}  // namespace AOT_ISA
}  // namespace aot
