// The norms on CUDA: a map of the kernels, and what forward and backward share. norm_forward.cuh and norm_backward.cuh
// have the kernels and their launchers, which each operator instantiates (norm.h). The kernel by row length:
//
//            row length         kernel                                                           blocks
//   forward  up to 2 KiB        norm_kernel, 1 to 4 rows for each warp                           one-shot
//            up to 32 KiB       norm_kernel, a row for each block (up to 64 KiB with kMost = 8)  one-shot
//            2 to 8 times it    norm_kernel, a row for each cluster, if kSplit                   one-shot
//            up to 512 KiB      norm_long_kernel, a row for each cluster                         persistent
//   backward up to 256 of 32    norm_backward_few_kernel, all rows by one block                  one-shot
//            up to 512 bytes    norm_backward_kernel, 1 to 4 rows for each warp                  persistent
//            up to 32 KiB       norm_backward_kernel, one or more rows for each block            persistent
//            up to 512 KiB      norm_backward_kernel, a row for each cluster                     persistent
//   forward  odd, up to 128     norm_staged_kernel, several rows for each block                  one-shot
//            odd, up to 32 KiB  norm_shifted_kernel, 1 or 2 rows for a warp, or 1 for several    persistent
//   backward odd, up to 128     norm_backward_staged_kernel, several rows for each block         persistent
//            odd, up to 32 KiB  norm_backward_kernel, 1 or 2 rows for a warp, or 1 for several   persistent
//   both     others             norm_any_kernel, norm_backward_any_kernel,                       persistent
//                               norm_partials_any_kernel                                         one-shot
//
// Exception: the backward with a mean and 16-bit rows, which together take many registers, has a row for each warp from
// 1 KiB to 1.5 KiB.
//
// Odd are rows that are no whole vectors of 16 bytes, where the weight has one line: up to 128 elements (256 in a
// forward of float32), if all is of one dtype, and longer ones, if the matrices are aligned and of one dtype. Others
// are those where it is not so, rows that exceed the lengths above, rows for whose pipelines the device has too little
// shared memory, and rows that need clusters before compute capability 9.0. norm_rows() and norm_backward_rows()
// choose. After each backward but those of a single block that has all rows, sum_partials_kernel adds up dweight and
// dbias.
#pragma once
#include "cuda/staged_rows.cuh"
#include "norm.h"
#include "persistent_rows.cuh"

namespace aot {
inline namespace AOT_ISA {

// --------------------------------------------------------------------------------------------------------- moments

__device__ inline float reciprocal_root(float x) { return rsqrtf(x); }
__device__ inline double reciprocal_root(double x) { return rsqrt(x); }

// 1 / sqrt(x). An overflowed variance gives NaN: with 0, y would silently be the bias alone. An overflowed mean square
// gives 0, as in the formula and in torch.
template <bool kCentred, typename A>
__device__ inline A reciprocal_deviation(A x) {
  return kCentred ? fma(x, A(0), reciprocal_root(x)) : reciprocal_root(x);
}

// squares: the sum of squares of x - mean, or of x if there is no mean
template <typename A>
struct Moments {
  A mean, squares;
};

// Keeps the compiler from holding the widened values of a vector of 16-bit elements: it widens them again, and
// meanwhile they take half as many registers.
template <typename T>
__device__ inline void keep_packed(Vector<T> &v) {
  if constexpr (sizeof(T) == 2) asm volatile("" : "+r"(v.word[0]), "+r"(v.word[1]), "+r"(v.word[2]), "+r"(v.word[3]));
}

// end: a thread's element of the row's ends, or 0.
template <class Shape, typename A>
__device__ inline A sum_share(const Vector<typename Shape::T> (&v)[Shape::kVectors], A end) {
  A sum = end;
#pragma unroll
  for (int i = 0; i < Shape::kVectors; ++i) {
    auto x = widen(v[i]);
    A vector_sum = 0;  // one for each vector: shorter dependency chains
#pragma unroll
    for (int k = 0; k < Shape::kSize; ++k) vector_sum += x[k];
    sum += vector_sum;  // past the row's end v is 0
  }
  return sum_lanes<Shape::kLanes>(sum);
}

template <class Shape, typename A>
__device__ inline A sum_share_squares(Vector<typename Shape::T> (&v)[Shape::kVectors], A end,
                                      const RowPart<Shape> &part, A mean) {
  A squares = part.has_end() ? (end - mean) * (end - mean) : A(0);
#pragma unroll
  for (int i = 0; i < Shape::kVectors; ++i) {
    keep_packed(v[i]);
    auto x = widen(v[i]);
    A vector_squares = 0;
#pragma unroll
    for (int k = 0; k < Shape::kSize; ++k) vector_squares += (x[k] - mean) * (x[k] - mean);
    squares += part.holds(i) ? vector_squares : A(0);
  }
  return sum_lanes<Shape::kLanes>(squares);
}

// The statistics of its share that each warp of a row publishes.
template <bool kCentred, typename A>
using Share = std::conditional_t<kCentred, Moments<A>, Sums<1, A>>;

// The moments of this warp's share of a row in registers, in two passes: the mean of the share, then the squares about
// that mean. The shares' moments combine without cancellation (Chan, Golub and LeVeque 1983), so that a row of several
// warps needs a single exchange.
template <bool kCentred, class Shape, typename A>
__device__ inline Share<kCentred, A> share_moments(Vector<typename Shape::T> (&v)[Shape::kVectors],
                                                   const RowPart<Shape> &part, A one_over_share, A end = 0) {
  if constexpr (kCentred) {
    A mean = sum_share<Shape, A>(v, end) * one_over_share;
    return {mean, sum_share_squares(v, end, part, mean)};
  } else {
    return {{sum_share_squares(v, end, part, A(0))}};
  }
}

// The moments of a row within a warp, which is a single share.
template <typename A>
__device__ inline Moments<A> only_share(const Moments<A> &share) {
  return share;
}
template <typename A>
__device__ inline Moments<A> only_share(const Sums<1, A> &share) {
  return {A(0), share.value[0]};
}

template <class Shape, typename A>
__device__ inline Moments<A> combine_shares(const Moments<A> *all, int warps, const RowPart<Shape> &part,
                                            A one_over_cols) {
  A squares = 0;
  if constexpr (Shape::kWhole && Shape::kSpan == Span::block) {  // at most 32 warps
    const int w = lane_index();
    const Moments<A> mine = w < warps ? all[w] : Moments<A>{};
    const A mean = sum_lanes<32>(mine.mean) * (part.share(w) * one_over_cols), distance = mine.mean - mean;
    squares = w < warps ? mine.squares + part.share(w) * distance * distance : A(0);
    return {mean, sum_lanes<32>(squares)};
  } else {
    A sum = 0;
#pragma unroll 1
    for (int w = lane_index(); w < warps; w += 32) sum += part.share(w) * all[w].mean;
    A mean = sum_lanes<32>(sum) * one_over_cols;
#pragma unroll 1
    for (int w = lane_index(); w < warps; w += 32)
      squares += all[w].squares + part.share(w) * (all[w].mean - mean) * (all[w].mean - mean);
    return {mean, sum_lanes<32>(squares)};
  }
}
template <class Shape, typename A>
__device__ inline Moments<A> combine_shares(const Sums<1, A> *all, int warps, const RowPart<Shape> &, A) {
  return {A(0), combine_sums(all, warps).value[0]};
}

// A thread's part of a parameter, or copies of `fallback`, from its load to the planes of its pipeline, from `plane`
// on. It is loaded before the first rows, behind which it would wait.
template <class N, class Shape>
struct KeptParameter {
  using A = typename N::A;
  ParameterVector<N> vector[Shape::kVectors];

  __device__ void load(const NormParameters<N> &p, const void *from, bool given, float fallback,
                       const RowPart<Shape> &part) {
#pragma unroll
    for (int i = 0; i < Shape::kVectors; ++i) {
      const void *at = p.address(from, part.offset(i));
      const bool present = given && part.holds(i);
      if constexpr (kShifted<Shape>) vector[i] = ParameterVector<N>::load_elements(at, p.wide, present, fallback);
      else vector[i] = ParameterVector<N>::load(at, p.wide, present, fallback);
    }
  }
  template <class Pipeline>
  __device__ void keep(const Pipeline &pipeline, int plane, bool wide, A offset) const {
#pragma unroll
    for (int i = 0; i < Shape::kVectors; ++i) {
      auto v = vector[i].kept(wide, offset);
#pragma unroll
      for (int j = 0; j < ParameterVector<N>::kPlanes; ++j) pipeline.parameter(plane + j, i) = v.plane[j];
    }
  }
};
template <class N, class Pipeline>
__device__ inline Widened<typename N::R> kept_parameter(const Pipeline &pipeline, int plane, int i) {
  ParameterVector<N> v;
#pragma unroll
  for (int j = 0; j < ParameterVector<N>::kPlanes; ++j) v.plane[j] = pipeline.parameter(plane + j, i);
  return v.widened_kept();
}

// Rows that a persistent kernel has in shared memory where the next row is read before this one is finished: both, and
// one in flight.
constexpr int kLongStages = 3;

// Rows that are no whole vectors, of matrices that are aligned and of one dtype, and one line of the weight.
template <class N>
constexpr bool kMayShift = !N::kRare && !N::kMixed && !std::is_same_v<typename N::T, double>;

template <class N, int kLanes, int kVectors, Span kSpan>
using ShiftedShape = Shifted<RowShape<typename N::R, kLanes, kVectors, kSpan>>;

// bytes: of shared memory for each vector.
template <class N, typename... Pointers>
RowPlan shifted_plan(int64_t cols, int64_t lines, int bytes, const DeviceLimits &device, const Pointers *...pointers) {
  constexpr int kSize = kVectorSize<typename N::R>, kTwoVectorWarps = sizeof(typename N::R) == 2 ? 8 : 16;
  if (lines != 1 || cols < 2 * kSize || !aligned(pointers...)) return {};
  return first_that_holds(cols / kSize, {{16, 2}, {16, 3}, {32, 2}, {32, 3}, {32, 2, kTwoVectorWarps}, {32, 4, 16}},
                          bytes, device);
}

// Calls f(shape) with the plan's.
template <class N, class F>
Status dispatch_shifted(const RowPlan &plan, F f) {
  if (plan.warps == 1)
    return dispatch_shape<ShiftedShape<N, 16, 2, Span::warp>, ShiftedShape<N, 16, 3, Span::warp>,
                          ShiftedShape<N, 32, 2, Span::warp>, ShiftedShape<N, 32, 3, Span::warp>>(plan, f);
  return dispatch_shape<ShiftedShape<N, 32, 2, Span::block>, ShiftedShape<N, 32, 4, Span::block>>(plan, f);
}

// For rows of any size and address: a team of warps for each row. A thread holds the first kAnyHeld of its elements in
// registers; those of longer rows are read again for each pass.
constexpr int kAnyThreads = 512;  // the most of a block
constexpr int kAnyHeld = 8;

class AnyRows {
 public:
  __device__ AnyRows(int row_warps, int64_t cols)
      : cols_(cols),
        threads_(32 * row_warps),
        held_(static_cast<int>(min(cols, int64_t{threads_} * kAnyHeld))),
        team_(threadIdx.x / threads_),
        lane_(threadIdx.x - team_ * threads_) {}

  // A team's rows are first(), first() + step(), ...
  __device__ int64_t first() const { return int64_t{blockIdx.x} * teams() + team_; }
  __device__ int64_t step() const { return int64_t{gridDim.x} * teams(); }
  __device__ int team() const { return team_; }
  __device__ int teams() const { return blockDim.x / threads_; }
  __device__ bool leads() const { return lane_ == 0; }

  // Over the threads of a row.
  template <int kSums, typename A>
  __device__ Sums<kSums, A> sum(Sums<kSums, A> sums, Exchange<Span::block, Sums<kSums, A>> &exchange) const {
    return threads_ == 32 ? sum_lanes<32>(sums) : sum_row(sums, exchange);
  }

  // Calls f(k, c) for the columns c that this thread holds.
  template <class F>
  __device__ void each_held(F f) const {
    constexpr int kTogether = 2;
#pragma unroll
    for (int first = 0; first < kAnyHeld; first += kTogether) {
      if (first * threads_ >= held_) break;
#pragma unroll
      for (int k = first; k < first + kTogether; ++k) {
        const int c = lane_ + k * threads_;
        if (c < held_) f(k, c);
      }
    }
  }
  // Calls f(c) for its other columns.
  template <class F>
  __device__ void each_other(F f) const {
#pragma unroll 2
    for (int64_t c = lane_ + kAnyHeld * threads_; c < cols_; c += threads_) f(c);
  }

  template <typename T>
  __device__ void load(const T *row, T (&v)[kAnyHeld]) const {
    each_held([&](int k, int c) { v[k] = row[c]; });
  }
  template <typename T, typename A>
  __device__ void widen(const T (&v)[kAnyHeld], A (&x)[kAnyHeld]) const {
    each_held([&](int k, int) { x[k] = aot::widen(v[k]); });
  }
  template <typename T, typename A>
  __device__ void store(T *row, const A (&x)[kAnyHeld]) const {
    each_held([&](int k, int c) { row[c] = narrow<T>(x[k]); });
  }

 private:
  int64_t cols_;
  int threads_, held_, team_, lane_;
};

// Warps of a row: a power of two, as many as hold it if a block has so many. Threads of a block: at least `block`.
struct AnyRowsPlan {
  int row_warps = 1, threads;

  AnyRowsPlan(int64_t cols, int block) {
    while (row_warps < kAnyThreads / 32 && int64_t{32} * kAnyHeld * row_warps < cols) row_warps *= 2;
    threads = std::max(32 * row_warps, block);
  }
  int64_t teams() const { return threads / (32 * row_warps); }
  // As many as the device holds at once, with 128 registers for each thread, or as there are rows for.
  int64_t blocks(int64_t rows, const DeviceLimits &device) const {
    return std::min(ceil_div(rows, teams()), int64_t{kAnyThreads / threads} * device.multiprocessors);
  }
};

// Short rows that are no whole vectors, of one dtype and one line of the weight: several for each block, in shared
// memory (staged_rows.cuh). Other dtypes would need kernels of their own.
template <class N>
constexpr bool kMayStage = !N::kRare && (N::kPlain || std::is_same_v<typename N::T, float>);

// ----------------------------------------------------------------------------------------------- launchers, shared

template <class N, class Op>
NormParameters<N> norm_parameters(const Op &op, const Tensor &weight, const Tensor &bias) {
  const bool wide = NormParameters<N>::kMayBeWide && weight.dtype == DType::float32;
  return {weight.data, bias.data, static_cast<typename N::A>(op.weight_offset(weight)),
          std::max<int64_t>(1, op.weight_rows(weight)), wide};
}

// Calls f(NormTypes) for y of dtype t and rows of dtype r. `bias`: or dbias.
template <class Op, class F>
Status dispatch_norm(const Op &op, DType t, DType r, const Tensor &weight, const Tensor &bias, F f) {
  constexpr bool kCentred = Op::kCentred, kAdd = Op::kAdd;
  return dispatch(t, [&](auto type) -> Status {
    using T = typename decltype(type)::type;
    if constexpr (!kCentred)
      if (bias) {
        if constexpr (kAdd && sizeof(T) == 2)
          if (r == DType::float32) return f(Type<NormTypes<kCentred, kAdd, T, float, false, true>>());
        return f(Type<NormTypes<kCentred, kAdd, T, T, false, true>>());
      }
    if constexpr (kAdd && sizeof(T) == 2)
      if (r == DType::float32) return f(Type<NormTypes<kCentred, kAdd, T, float, false>>());
    if constexpr (sizeof(T) == 2)
      if (weight.dtype != DType::float32 && op.weight_rows(weight) == 1 && op.weight_offset(weight) == 0)
        return f(Type<NormTypes<kCentred, kAdd, T, T, true>>());
    return f(Type<NormTypes<kCentred, kAdd, T, T, false>>());
  });
}

// The statistics of x's rows. layer_norm.cu and rms_norm.cu, which have its kernels, instantiate it.
template <bool kCentred>
Status norm_stats(const char *op, const Tensor &x, void *stats, int64_t rows, int64_t cols, double eps, void *stream);
extern template Status norm_stats<true>(const char *, const Tensor &, void *, int64_t, int64_t, double, void *);
extern template Status norm_stats<false>(const char *, const Tensor &, void *, int64_t, int64_t, double, void *);

}  // namespace AOT_ISA
}  // namespace aot
