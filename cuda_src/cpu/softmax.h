// The exponentials of a row, for softmax and cross_entropy, in two passes: the maximum, then exp(x - max) and its sum.
// NaN or +inf in the row makes the sum NaN, as in the formula.
#pragma once
#include "math.h"
#include "parallel.h"

namespace aot {
inline namespace AOT_ISA {

template <typename A>
struct Exponentials {
  A max;
  double sum;          // of exp(x - max)
  double shifted_sum;  // of x - max
  A scale;             // of what f gets, to probabilities
};

// The largest of all lanes, none of which is NaN.
template <typename A, int lanes>
A largest_lane(typename VectorOf<A, lanes>::type v) {
  if constexpr (lanes == 2) {
    return v[0] > v[1] ? v[0] : v[1];
  } else {
    typename VectorOf<A, lanes / 2>::type half[2];
    std::memcpy(half, &v, sizeof v);
    return largest_lane<A, lanes / 2>(half[0] > half[1] ? half[0] : half[1]);
  }
}

template <typename T>
Accumulate<T> largest(const T *x, int64_t n) {
  using A = Accumulate<T>;
  const Vec<T> lowest = Vec<T>{} - static_cast<A>(__builtin_inf());
  Vec<T> top[4] = {lowest, lowest, lowest, lowest};
  int64_t j = 0;
  auto take = [&](Vec<T> v, int k) { top[k] = v > top[k] ? v : top[k]; };
  for (; j + 4 * kLanes<T> <= n; j += 4 * kLanes<T>)
    for (int k = 0; k < 4; ++k) take(load(x + j + k * kLanes<T>), k);
  for (; j + kLanes<T> <= n; j += kLanes<T>) take(load(x + j), 0);
  if (j < n) take(load(x + j, Part{n - j}) + (keep<T>(lowest, Part{n - j}) == 0 ? lowest : Vec<T>{}), 1);
  for (int k = 1; k < 4; ++k) take(top[k], 0);
  return largest_lane<A, kLanes<T>>(top[0]);
}

// Calls f(j, e, part) with the exponentials e = exp(x - max), in units of 1 / kUnit so that probabilities that are
// subnormal are rounded once, and prefetches n elements of `next`. shifted_sum is 0 if
// kShiftedSum is false.
template <bool kShiftedSum, typename T, class F>
AOT_INLINE Exponentials<Accumulate<T>> exponentials(const T *x, const T *next, int64_t n, F f) {
  Exponentials<Accumulate<T>> s{largest(x, n), 0, 0, 0};
  for_blocks(n, [&](int64_t begin, int64_t size) {
    Vec<T> sums[4] = {}, shifted_sums[4] = {};
    sweep_sums<T>(size, [&](int64_t i, auto part, int k) {
      const int64_t j = begin + i;
      __builtin_prefetch(next + j);
      Vec<T> d = load(x + j, part) - s.max, e = keep<T>(exp_in_units<T>(d), part);
      sums[k] += e;
      if (kShiftedSum) shifted_sums[k] += keep<T>(d, part);
      f(j, e, part);
    });
    s.sum += sum_of_4<T>(sums), s.shifted_sum += sum_of_4<T>(shifted_sums);
  });
  s.scale = static_cast<Accumulate<T>>(1 / s.sum);
  s.sum /= Constants<T>::kUnit;
  return s;
}

// A buffer for the exponentials of a row, from the thread's scratch memory, since 128 KiB may exceed its stack. Null
// for rows longer than kRowBuffer, whose exponentials would not stay in the cache: they are computed twice.
constexpr int64_t kRowBuffer = 16384;
template <typename T>
Accumulate<T> *row_buffer(int64_t n) {
  return n <= kRowBuffer ? static_cast<Accumulate<T> *>(thread_scratch((n + kLanes<T>)*sizeof(Accumulate<T>)))
                         : nullptr;
}

}  // namespace AOT_ISA
}  // namespace aot
