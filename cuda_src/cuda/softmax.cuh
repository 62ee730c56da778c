// The exponentials of a row and their sum. Each warp takes them relative to the largest number that it sees itself, so
// that it waits for the others once only: then the sums are brought to the largest number of the row.
//
// Rows of infinities and NaNs come out as the formula has them: a NaN makes the sum NaN, +inf does, as inf - inf, and
// of a row that has nothing but -inf the sum is 0, which the quotient makes NaN.
#pragma once
#include "math.cuh"
#include "row_tile.cuh"

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
  // What the exponentials are relative to: not -inf.
  __device__ A base() const { return top == A(kMinusInfinity) ? A(0) : top; }
};

// exp(x - top) of numbers x. For bfloat16 it is one multiplication and addition and the hardware's exponential: the
// products of its 8 bits with a log2(e) of 16 bits, which is 5e-6 off, are exact, and exp(0) is 1.
template <typename T, typename A>
class RelativeTo {
 public:
  __device__ explicit RelativeTo(A top) : top_(top) {
    // Numbers of 8 bits that differ do so by more than an exponential has room for, whatever its base; and no overflow.
    constexpr float kFar = 1 << 24;
    if constexpr (kFused) multiplier_ = fabsf(top) < kFar ? 47274.f / 32768 : 1, center_ = top * multiplier_;
  }
  __device__ A operator()(A x) const {
    if constexpr (kFused) return fast_exp2(fmaf(x, multiplier_, -center_));
    else return exponential<T>(x - top_);
  }
  // What a sum of exponentials relative to `from`, no larger, is to be multiplied with.
  __device__ A rebase(A from) const { return from == top_ ? A(1) : (*this)(from); }

 private:
  static constexpr bool kFused = std::is_same_v<T, __nv_bfloat16>;
  A top_, multiplier_, center_;
};

__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }

template <int kLanes, typename A>
__device__ inline A max_lanes(A value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) value = max(value, __shfl_xor_sync(~0u, value, offset));
  return value;
}

template <typename T, bool kRest, typename A>
__device__ inline void rebase(Exponentials<A> &s, A top) {
  s.sum *= RelativeTo<T, A>(top).rebase(s.top);
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
  Exponentials<A> s = Exponentials<A>::none();
#pragma unroll 1
  for (int w = lane_index(); w < warps; w += 32) s.top = max(s.top, all[w].top);
  s.top = max_lanes<32>(s.top);
#pragma unroll 1
  for (int w = lane_index(); w < warps; w += 32) s = combine<T, kRest>(s, all[w]);
  s.sum = sum_lanes<32>(s.sum);
  if constexpr (kRest) s.rest = sum_lanes<32>(s.rest), s.count = sum_lanes<32>(s.count);
  return s;
}

// ------------------------------------------------------------------------------------------------------ probability

// exp(x - top) / sum, times a factor. But for 16 bits, to the product with the reciprocal its residual is added: as
// good as a division, which would be a branch and a call.
template <typename T, typename A>
class Probability {
 public:
  __device__ explicit Probability(const Exponentials<A> &row, A scale = 1, A factor = 1)
      : exponential_(row.top), sum_(row.sum), scale_(scale), factor_(factor) {
    if constexpr (sizeof(T) == 8) reciprocal_ = 1 / row.sum;
    else reciprocal_ = fast_reciprocal(row.sum);
    if constexpr (sizeof(T) == 2) reciprocal_ *= factor;
  }
  // Of a number.
  __device__ A of(A x) const { return divide(exponential_(x)); }
  // Of what row_exponentials() has left of a number.
  __device__ A of_left(A left) const {
    if constexpr (sizeof(T) == 2) return of(left);
    else return divide(left * scale_);
  }

 private:
  __device__ A divide(A e) const {
    A q = e * reciprocal_;
    if constexpr (sizeof(T) == 2) return q;
    else return fma(fma(-q, sum_, e), reciprocal_, q) * factor_;
  }
  RelativeTo<T, A> exponential_;
  A sum_, scale_, factor_, reciprocal_;
};

// ------------------------------------------------------------------------------------------------------ some vectors

__device__ inline uint32_t max_word(uint32_t a, uint32_t b, __half) {
  __half2 m = __hmax2(reinterpret_cast<const __half2 &>(a), reinterpret_cast<const __half2 &>(b));
  return reinterpret_cast<const uint32_t &>(m);
}
__device__ inline uint32_t max_word(uint32_t a, uint32_t b, __nv_bfloat16) {
  __nv_bfloat162 m = __hmax2(reinterpret_cast<const __nv_bfloat162 &>(a), reinterpret_cast<const __nv_bfloat162 &>(b));
  return reinterpret_cast<const uint32_t &>(m);
}

// The largest number, where there is one that is not NaN; -inf else.
template <int kVectors, typename T, typename A = Accumulate<T>>
__device__ inline A largest(const Vector<T> (&v)[kVectors]) {
  A top = kMinusInfinity;
  if constexpr (sizeof(T) == 2) {
    uint32_t pair = v[0].word[0];
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) pair = max_word(pair, v[i].word[j], T());
    float two[2];
    widen_word(pair, two, T());
    top = max(max(top, two[0]), two[1]);
  } else {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      auto x = widen(v[i]);
#pragma unroll
      for (int k = 0; k < kVectorSize<T>; ++k) top = max(top, x[k]);
    }
  }
  return top;
}

// --------------------------------------------------------------------------------------------- a row in registers

template <typename A>
struct RowExponentials {
  Exponentials<A> row;
  A scale;  // for Probability
};

// Leaves in v what Probability::of_left() is of: numbers of 16 bits, or exponentials.
template <bool kRest, class Shape, class Exchange, typename T, typename A = Accumulate<T>>
__device__ inline RowExponentials<A> row_exponentials(Vector<T> (&v)[Shape::kVectors], const RowTile<Shape> &tile,
                                                      Exchange &exchange) {
  Exponentials<A> mine = Exponentials<A>::none();
  mine.top = max_lanes<Shape::kLanes>(largest(v));  // past the row there is -inf
  A base = mine.base();
  RelativeTo<T, A> exponential(base);
#pragma unroll
  for (int i = 0; i < Shape::kVectors; ++i) {
    auto x = widen(v[i]);
    A sum = 0, rest = 0;  // one for each vector: shorter chains of additions
#pragma unroll
    for (int k = 0; k < Shape::kSize; ++k) {
      A e = exponential(x[k]);
      sum += e;
      if constexpr (kRest) rest += x[k] - base;
      if constexpr (sizeof(T) > 2) x[k] = e;
    }
    mine.sum += sum;
    if (kRest && tile.holds(i)) mine.rest += rest;
    if constexpr (sizeof(T) == 2) forget(v[i], tile.zero());
    else v[i] = narrow<T>(x);
  }
  mine.sum = sum_lanes<Shape::kLanes>(mine.sum);
  if constexpr (kRest) mine.rest = sum_lanes<Shape::kLanes>(mine.rest);
  if constexpr (Shape::kSpan == Span::warp) return {mine, 1};
  else {
    if constexpr (kRest) mine.count = tile.share(exchange.warp());
    Exponentials<A> row = combine_warps<T, kRest>(exchange.all(mine), exchange.warps());
    return {row, RelativeTo<T, A>(row.top).rebase(mine.top)};
  }
}

// ------------------------------------------------------------------------------------------------------ a row in
// passing

// Adds vectors, `present` of which are of the row and the rest -inf.
template <bool kRest, int kVectors, typename T, typename A>
__device__ inline void add(Exponentials<A> &mine, const Vector<T> (&v)[kVectors], int present) {
  A top = largest(v);
  if (top > mine.top) rebase<T, kRest>(mine, top);
  A base = mine.base();
  RelativeTo<T, A> exponential(base);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    auto x = widen(v[j]);
    A sum = 0, rest = 0;
#pragma unroll
    for (int k = 0; k < kVectorSize<T>; ++k) {
      sum += exponential(x[k]);
      if constexpr (kRest) rest += x[k] - base;
    }
    mine.sum += sum;
    if (kRest && j < present) mine.rest += rest, mine.count += kVectorSize<T>;
  }
}

// A long row, by a block that reads it once: the next vectors are on their way while these are added.
template <bool kRest, typename T, class Exchange, typename A = Accumulate<T>>
__device__ inline Exponentials<A> streamed_exponentials(const T *from, int vectors, Exchange &exchange) {
  constexpr int kGroup = 4;
  Exponentials<A> mine = Exponentials<A>::none();
  int step = blockDim.x;
  Vector<T> v[kGroup], next[kGroup];
  auto fetch = [&](Vector<T>(&w)[kGroup], int i) {
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      w[j] = filled<T>(kMinusInfinity);
      if (i + j * step < vectors) w[j] = load_once(from + (i + j * step) * kVectorSize<T>);
    }
  };
  int i = threadIdx.x;
  fetch(v, i);
  for (; i < vectors; i += kGroup * step) {
    fetch(next, i + kGroup * step);
    add<kRest>(mine, v, (vectors - i + step - 1) / step);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) v[j] = next[j];
  }
  return combine_warps<T, kRest>(exchange.all(combine_lanes<T, kRest>(mine)), exchange.warps());
}

// ---------------------------------------------------------------------------------------- a row of any size, in passes

// Adds one element to a thread's own.
template <typename T, typename A>
__device__ inline void add(Exponentials<A> &s, A x) {
  if (x > s.top) {
    s.sum *= RelativeTo<T, A>(x).rebase(s.top);
    if (s.top != A(kMinusInfinity)) s.rest += s.count * (s.top - x);
    s.top = x;
  }
  s.sum += RelativeTo<T, A>(s.base())(x);
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
