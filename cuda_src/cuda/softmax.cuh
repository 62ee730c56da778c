// The exponentials of a row and their sum. Each warp takes them relative to the largest number that it sees itself, so
// that it waits for the others once only: then the sums are brought to the largest number of the row.
//
// Rows of infinities and NaNs come out as the formula has them: a NaN makes the sum NaN, +inf does, as inf - inf, and
// of a row that has nothing but -inf the sum is 0, which the quotient makes NaN.
#pragma once
#include "math.cuh"
#include "rows.cuh"

namespace aot {
inline namespace AOT_ISA {

constexpr float kMinusInfinity = -__builtin_huge_valf();

template <typename A>
struct Exponentials {
  A top;    // the largest number
  A sum;    // of exp(x - top)
  A rest;   // the sum of x - top, where it is asked for
  A count;  // of elements; for add() and combine()

  __device__ static Exponentials none() { return {kMinusInfinity, 0, 0, 0}; }
  // What to subtract: not -inf from -inf.
  __device__ A base() const { return top == A(kMinusInfinity) ? A(0) : top; }
};

// What brings a sum relative to `from` to one relative to `to`, which is no less.
template <typename T, typename A>
__device__ inline A rebase(A from, A to) {
  return from == to ? A(1) : exponential<T>(from - to);
}

template <int kLanes, typename A>
__device__ inline A max_lanes(A value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) value = max(value, __shfl_xor_sync(~0u, value, offset));
  return value;
}

template <typename T, bool kRest, typename A>
__device__ inline void rebase(Exponentials<A> &s, A top) {
  s.sum *= rebase<T>(s.top, top);
  if (kRest && s.count != 0 && s.top != top) s.rest += s.count * (s.top - top);
  s.top = top;
}

template <typename T, bool kRest, typename A>
__device__ inline Exponentials<A> combine(Exponentials<A> a, Exponentials<A> b) {
  A top = max(a.top, b.top);
  rebase<T, kRest>(a, top), rebase<T, kRest>(b, top);
  return {top, a.sum + b.sum, a.rest + b.rest, a.count + b.count};
}

template <typename T, bool kRest, typename A>
__device__ inline Exponentials<A> combine_lanes(Exponentials<A> s) {
  rebase<T, kRest>(s, max_lanes<32>(s.top));
  s.sum = sum_lanes<32>(s.sum);
  if constexpr (kRest) s.rest = sum_lanes<32>(s.rest), s.count = sum_lanes<32>(s.count);
  return s;
}

// Of what each warp of a row told, in their order.
template <typename T, bool kRest, typename A>
__device__ inline Exponentials<A> combine_warps(const Exponentials<A> *all, int warps) {
  Exponentials<A> s = lane_index() < warps ? all[lane_index()] : Exponentials<A>::none();
#pragma unroll 1
  for (int w = lane_index() + 32; w < warps; w += 32) s = combine<T, kRest>(s, all[w]);
  return combine_lanes<T, kRest>(s);
}

// --------------------------------------------------------------------------------------------- a row in registers

// e[i][k] = exp(x - mine) * scale gives exp(x - top) for every thread's elements x.
template <typename A>
struct RowExponentials {
  Exponentials<A> row;
  A scale;
};

template <bool kRest, class Shape, class Exchange, typename T, typename A>
__device__ inline RowExponentials<A> row_exponentials(const Vector<T> (&v)[Shape::kVectors], const Tile<Shape> &tile,
                                                      A (&e)[Shape::kVectors][Shape::kSize], Exchange &exchange) {
  Exponentials<A> mine = Exponentials<A>::none();
#pragma unroll
  for (int i = 0; i < Shape::kVectors; ++i) {
    auto x = widen(v[i]);  // past the row there is -inf
#pragma unroll
    for (int k = 0; k < Shape::kSize; ++k) mine.top = max(mine.top, x[k]);
  }
  mine.top = max_lanes<Shape::kLanes>(mine.top);
  A base = mine.base();
#pragma unroll
  for (int i = 0; i < Shape::kVectors; ++i) {
    auto x = widen(v[i]);
    A sum = 0, rest = 0;  // one for each vector: shorter chains of additions
#pragma unroll
    for (int k = 0; k < Shape::kSize; ++k) {
      e[i][k] = exponential<T>(x[k] - base);
      sum += e[i][k];
      if constexpr (kRest) rest += x[k] - base;
    }
    mine.sum += sum;
    if (kRest && tile.holds(i)) mine.rest += rest;
  }
  mine.sum = sum_lanes<Shape::kLanes>(mine.sum);
  if constexpr (kRest) mine.rest = sum_lanes<Shape::kLanes>(mine.rest);
  if constexpr (Shape::kSpan == Span::warp) return {mine, 1};
  else {
    if constexpr (kRest) mine.count = tile.share(exchange.warp());
    Exponentials<A> row = combine_warps<T, kRest>(exchange.all(mine), exchange.warps());
    return {row, rebase<T>(mine.top, row.top)};
  }
}

// exp(x - top) / sum, of numbers e that `scale` makes exp(x - top) of. To a product with the reciprocal its residual is
// added, but for 16 bits: as good as a division, which would be a branch and a call.
template <typename T, typename A>
struct Quotient {
  A scale, sum, reciprocal;

  __device__ Quotient(A scale, A sum) : scale(scale), sum(sum) {
    if constexpr (sizeof(T) == 8) reciprocal = 1 / sum;
    else reciprocal = fast_reciprocal(sum);
    if (sizeof(T) == 2) this->scale *= reciprocal;
  }
  __device__ A operator()(A e) const {
    if constexpr (sizeof(T) == 2) {
      return e * scale;
    } else {
      A q = e * scale * reciprocal;
      return fma(fma(-q, sum, e * scale), reciprocal, q);
    }
  }
};

// ---------------------------------------------------------------------------------------- a row of any size, in passes

// Adds one element to a thread's own.
template <typename T, typename A>
__device__ inline void add(Exponentials<A> &s, A x) {
  if (x > s.top) {
    s.sum *= exponential<T>(s.top - x);
    if (s.top != A(kMinusInfinity)) s.rest += s.count * (s.top - x);
    s.top = x;
  }
  s.sum += exponential<T>(x - s.base());
  s.rest += x - s.base();
  s.count += 1;
}

// Of the row `from`, to every thread of the block.
template <typename T, typename A>
__device__ inline Exponentials<A> any_row_exponentials(const T *from, int64_t cols,
                                                       Exchange<Span::block, Exponentials<A>> &exchange) {
  Exponentials<A> s = Exponentials<A>::none();
  each_of_row(from, cols, [&](int64_t, A x) { add<T>(s, x); });
  return combine_warps<T, true>(exchange.all(combine_lanes<T, true>(s)), exchange.warps());
}

}  // namespace AOT_ISA
}  // namespace aot
