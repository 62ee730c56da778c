// Softmax of rows: exponentials and their sum (online softmax). Each warp uses the maximum of its own elements, and its
// sum is then rescaled to the row's maximum. So the warps of a row exchange values only once.
//
// Infinities and NaNs give what the formula gives: NaN and +inf make the sum NaN. In a row of -inf alone the sum is 0,
// and the quotient NaN.
#pragma once
#include "math.cuh"
#include "register_row.cuh"

namespace aot {
inline namespace AOT_ISA {

constexpr float kMinusInfinity = -__builtin_huge_valf();

template <typename A>
struct Exponentials {
  A max;
  A sum;          // of exp(x - max)
  A shifted_sum;  // of x - max, if kShiftedSum (label smoothing)
  A count;        // of elements, if kShiftedSum

  __device__ static Exponentials none() { return {kMinusInfinity, 0, 0, 0}; }
  // The number that is subtracted from x: max, but not -inf, since -inf - -inf is NaN.
  __device__ A base() const { return max == A(kMinusInfinity) ? A(0) : max; }
};

// The function exp(x - max). For bfloat16 it is a fused multiply-add and the hardware's exponential. The factor log2(e)
// is rounded to 16 bits, a relative error of 5e-6, so that products with bfloat16's 8 bits are exact, and exp(0) is 1.
template <typename T, typename A>
class ShiftedExp {
 public:
  __device__ explicit ShiftedExp(A max) : max_(max) {
    // From kLarge on, different bfloat16 numbers are so far apart that the exponential is 0 with any factor; 1 avoids
    // an overflow of the product.
    constexpr float kLarge = 1 << 24;
    if constexpr (kFused) multiplier_ = fabsf(max) < kLarge ? 47274.f / 32768 : 1, scaled_max_ = max * multiplier_;
  }
  __device__ A operator()(A x) const {
    if constexpr (kFused) return fast_exp2(fmaf(x, multiplier_, -scaled_max_));
    else return exponential<T>(x - max_);
  }
  // The factor that rescales a sum of exp(x - old_max) to this maximum, which is not smaller.
  __device__ A rescale(A old_max) const { return old_max == max_ ? A(1) : (*this)(old_max); }

 private:
  static constexpr bool kFused = std::is_same_v<T, __nv_bfloat16>;
  A max_, multiplier_, scaled_max_;
};

__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }

template <int kLanes, typename A>
__device__ inline A max_lanes(A value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) value = max(value, __shfl_xor_sync(~0u, value, offset));
  return value;
}

// Rescales s to a maximum that is not smaller.
template <typename T, bool kShiftedSum, typename A>
__device__ inline void rescale(Exponentials<A> &s, A new_max) {
  s.sum *= ShiftedExp<T, A>(new_max).rescale(s.max);
  if (kShiftedSum && s.count != 0 && s.max != new_max) s.shifted_sum += s.count * (s.max - new_max);
  s.max = new_max;
}

template <typename T, bool kShiftedSum, typename A>
__device__ inline Exponentials<A> combine(Exponentials<A> a, Exponentials<A> b) {
  A new_max = max(a.max, b.max);
  rescale<T, kShiftedSum>(a, new_max), rescale<T, kShiftedSum>(b, new_max);
  return {new_max, a.sum + b.sum, a.shifted_sum + b.shifted_sum, a.count + b.count};
}

template <typename T, bool kShiftedSum, typename A>
__device__ inline Exponentials<A> combine_lanes(Exponentials<A> s) {
  rescale<T, kShiftedSum>(s, max_lanes<32>(s.max));
  s.sum = sum_lanes<32>(s.sum);
  if constexpr (kShiftedSum) s.shifted_sum = sum_lanes<32>(s.shifted_sum), s.count = sum_lanes<32>(s.count);
  return s;
}

// Combines what each warp of a row has published, in their order.
template <typename T, bool kShiftedSum, typename A>
__device__ inline Exponentials<A> combine_warps(const Exponentials<A> *all, int warps) {
  Exponentials<A> s = Exponentials<A>::none();
#pragma unroll 1
  for (int w = lane_index(); w < warps; w += 32) s.max = max(s.max, all[w].max);
  s.max = max_lanes<32>(s.max);
#pragma unroll 1
  for (int w = lane_index(); w < warps; w += 32) s = combine<T, kShiftedSum>(s, all[w]);
  s.sum = sum_lanes<32>(s.sum);
  if constexpr (kShiftedSum) s.shifted_sum = sum_lanes<32>(s.shifted_sum), s.count = sum_lanes<32>(s.count);
  return s;
}

// ------------------------------------------------------------------------------------------------------ probability

// exp(x - max) / sum * factor. The quotient is a product with the reciprocal, followed by a Newton correction for
// results of more than 16 bits: as accurate as a division, which would be a branch and a call.
template <typename T, typename A>
class Probability {
 public:
  __device__ explicit Probability(const Exponentials<A> &row, A scale = 1, A factor = 1)
      : exponential_(row.max), sum_(row.sum), scale_(scale), factor_(factor) {
    if constexpr (sizeof(T) == 8) reciprocal_ = 1 / row.sum;
    else reciprocal_ = fast_reciprocal(row.sum);
    if constexpr (sizeof(T) == 2) reciprocal_ *= factor;
  }
  __device__ A of(A x) const { return divide(exponential_(x)); }
  // From the value that row_exponentials() has left in the place of x.
  __device__ A of_exponential(A value) const {
    if constexpr (sizeof(T) == 2) return of(value);
    else return divide(value * scale_);
  }
  // From exp(x - max).
  __device__ A divide(A e) const {
    A q = e * reciprocal_;
    if constexpr (sizeof(T) == 2) return q;
    else return fma(fma(-q, sum_, e), reciprocal_, q) * factor_;
  }

 private:
  ShiftedExp<T, A> exponential_;
  A sum_, scale_, factor_, reciprocal_;
};

// ----------------------------------------------------------------------------------------------------- the maximum

__device__ inline uint32_t max_word(uint32_t a, uint32_t b, __half) {
  __half2 m = __hmax2(reinterpret_cast<const __half2 &>(a), reinterpret_cast<const __half2 &>(b));
  return reinterpret_cast<const uint32_t &>(m);
}
__device__ inline uint32_t max_word(uint32_t a, uint32_t b, __nv_bfloat16) {
  __nv_bfloat162 m = __hmax2(reinterpret_cast<const __nv_bfloat162 &>(a), reinterpret_cast<const __nv_bfloat162 &>(b));
  return reinterpret_cast<const uint32_t &>(m);
}

// The largest element that is not NaN; -inf if there is none.
template <int kVectors, typename T, typename A = Accumulate<T>>
__device__ inline A max_element(const Vector<T> (&v)[kVectors]) {
  A largest = kMinusInfinity;
  if constexpr (sizeof(T) == 2) {
    uint32_t pair = v[0].word[0];
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) pair = max_word(pair, v[i].word[j], T());
    float two[2];
    widen_word(pair, two, T());
    largest = max(max(largest, two[0]), two[1]);
  } else {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      auto x = widen(v[i]);
#pragma unroll
      for (int k = 0; k < kVectorSize<T>; ++k) largest = max(largest, x[k]);
    }
  }
  return largest;
}

// --------------------------------------------------------------------------------------------- a row in registers

template <typename A>
struct RowExponentials {
  Exponentials<A> row;
  A scale;  // for Probability
};

// The sums of the row in v. Replaces v by the values that Probability::of_exponential() takes: relative to the warp's
// maximum, or unchanged if they have 16 bits, because rounded exponentials would lose accuracy.
// `part`: a RegisterRow or an UnalignedRow, whose end() stays x.
template <bool kShiftedSum, class Row, class Exchange, typename T, int kVectors, typename A = Accumulate<T>>
__device__ inline RowExponentials<A> row_exponentials(Vector<T> (&v)[kVectors], const Row &part, Exchange &exchange) {
  using Shape = typename Row::Shape;
  Exponentials<A> mine = Exponentials<A>::none();
  A largest = max_element(v);  // past the row's end v is -inf
  if constexpr (Row::kEnds) largest = max(largest, part.end());
  mine.max = max_lanes<Shape::kLanes>(largest);
  A base = mine.base();
  ShiftedExp<T, A> exponential(base);
#pragma unroll
  for (int i = 0; i < Shape::kVectors; ++i) {
    auto x = widen(v[i]);
    A sum = 0, shifted_sum = 0;  // one for each vector: shorter dependency chains
#pragma unroll
    for (int k = 0; k < Shape::kSize; ++k) {
      A e = exponential(x[k]);
      sum += e;
      if constexpr (kShiftedSum) shifted_sum += x[k] - base;
      if constexpr (sizeof(T) > 2) x[k] = e;
    }
    mine.sum += sum;
    if (kShiftedSum && part.holds(i)) mine.shifted_sum += shifted_sum;
    if constexpr (sizeof(T) == 2) keep_packed(v[i], part.opaque_zero());
    else v[i] = narrow<T>(x);
  }
  if constexpr (Row::kEnds) {
    mine.sum += exponential(part.end());
    if (kShiftedSum && part.has_end()) mine.shifted_sum += part.end() - base;
  }
  mine.sum = sum_lanes<Shape::kLanes>(mine.sum);
  if constexpr (kShiftedSum) mine.shifted_sum = sum_lanes<Shape::kLanes>(mine.shifted_sum);
  if constexpr (Shape::kSpan == Span::warp) return {mine, 1};
  else {
    if constexpr (kShiftedSum) mine.count = part.share(exchange.warp());
    Exponentials<A> row = combine_warps<T, kShiftedSum>(exchange.all(mine), exchange.warps());
    return {row, ShiftedExp<T, A>(row.max).rescale(mine.max)};
  }
}

// ------------------------------------------------------------------------------------------------- a streamed row

// Adds vectors, of which the first `present` are elements of the row and the others are -inf.
template <bool kShiftedSum, int kVectors, typename T, typename A>
__device__ inline void add(Exponentials<A> &mine, const Vector<T> (&v)[kVectors], int present) {
  A new_max = max_element(v);
  if (new_max > mine.max) rescale<T, kShiftedSum>(mine, new_max);
  A base = mine.base();
  ShiftedExp<T, A> exponential(base);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    auto x = widen(v[j]);
    A sum = 0, shifted_sum = 0;
#pragma unroll
    for (int k = 0; k < kVectorSize<T>; ++k) {
      sum += exponential(x[k]);
      if constexpr (kShiftedSum) shifted_sum += x[k] - base;
    }
    mine.sum += sum;
    if (kShiftedSum && j < present) mine.shifted_sum += shifted_sum, mine.count += kVectorSize<T>;
  }
}

// Adds one element to a thread's sums.
template <typename T, typename A>
__device__ inline void add(Exponentials<A> &s, A x) {
  if (x > s.max) {
    s.sum *= ShiftedExp<T, A>(x).rescale(s.max);
    if (s.max != A(kMinusInfinity)) s.shifted_sum += s.count * (s.max - x);
    s.max = x;
  }
  s.sum += ShiftedExp<T, A>(s.base())(x);
  s.shifted_sum += x - s.base();
  s.count += 1;
}

// The sums of a long row, which a block reads once: the next vectors are in flight while these are added.
template <bool kShiftedSum, typename T, class Exchange, typename A = Accumulate<T>>
__device__ inline Exponentials<A> streamed_exponentials(const T *row, int64_t cols, Exchange &exchange) {
  constexpr int kGroup = 4;
  Exponentials<A> mine = Exponentials<A>::none();
  int64_t head = min(misaligned_elements(row, sizeof(T)), cols);
  const T *from = row + head;
  int step = blockDim.x, vectors = static_cast<int>((cols - head) / kVectorSize<T>);
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
    add<kShiftedSum>(mine, v, (vectors - i + step - 1) / step);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) v[j] = next[j];
  }
  if (threadIdx.x < head) add<T>(mine, widen(row[threadIdx.x]));
  int64_t c = head + int64_t{vectors} * kVectorSize<T> + threadIdx.x;
  if (c < cols) add<T>(mine, widen(row[c]));
  return combine_warps<T, kShiftedSum>(exchange.all(combine_lanes<T, kShiftedSum>(mine)), exchange.warps());
}

// ------------------------------------------------------------------------------------------- a row of any size

// The sums of the row `from`, returned to every thread of the block.
template <typename T, typename A>
__device__ inline Exponentials<A> any_row_exponentials(const T *from, int64_t cols,
                                                       Exchange<Span::block, Exponentials<A>> &exchange) {
  Exponentials<A> s = Exponentials<A>::none();
  for_each_in_row(from, cols, [&](int64_t, A x) { add<T>(s, x); });
  return combine_warps<T, true>(exchange.all(combine_lanes<T, true>(s)), exchange.warps());
}

}  // namespace AOT_ISA
}  // namespace aot
