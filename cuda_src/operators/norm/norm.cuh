// The norms on CUDA: kernels and launchers, which each operator instantiates (norm.h). The kernel by row length:
//
//            row length       kernel                                                             blocks
//   forward  up to 2 KiB      norm_kernel, 1 to 4 rows for each warp                             one-shot
//            up to 32 KiB     norm_kernel, a row for each block (up to 64 KiB with kMost = 8)    one-shot
//            up to 512 KiB    norm_long_kernel, a row for each cluster                           persistent
//   backward up to 512 bytes  norm_backward_kernel, 1 to 4 rows for each warp                    persistent
//            up to 32 KiB     norm_backward_kernel, one or more rows for each block              persistent
//            up to 512 KiB    norm_backward_kernel, a row for each cluster                       persistent
//   both     others           norm_any_kernel, norm_backward_any_kernel, norm_partials_any_kernel
//
// Exception: the backward with a mean and 16-bit rows, which together take many registers, has a row for each warp from
// 1 KiB to 1.5 KiB.
//
// Others are longer rows, rows that are not aligned to 16 bytes, rows for whose pipelines the device has too little
// shared memory, and rows that need clusters before compute capability 9.0. norm_rows() and norm_backward_rows()
// choose. After each backward, sum_partials_kernel adds up dweight and dbias.
#pragma once
#include "cuda/overlap.cuh"
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

template <class Shape, typename A>
__device__ inline A sum_share(const Vector<typename Shape::T> (&v)[Shape::kVectors]) {
  A sum = 0;
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
__device__ inline A sum_share_squares(Vector<typename Shape::T> (&v)[Shape::kVectors], const RowPart<Shape> &part,
                                      A mean) {
  A squares = 0;
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

// What each warp of a row publishes of its share.
template <bool kCentred, typename A>
using Share = std::conditional_t<kCentred, Moments<A>, Sums<1, A>>;

// The moments of this warp's share of a row in registers, in two passes: the mean of the share, then the squares about
// that mean. The shares' moments combine without cancellation (Chan, Golub and LeVeque 1983), so that a row of several
// warps needs a single exchange.
template <bool kCentred, class Shape, typename A>
__device__ inline Share<kCentred, A> share_moments(Vector<typename Shape::T> (&v)[Shape::kVectors],
                                                   const RowPart<Shape> &part, A one_over_share) {
  if constexpr (kCentred) {
    A mean = sum_share<Shape, A>(v) * one_over_share;
    return {mean, sum_share_squares(v, part, mean)};
  } else {
    return {{sum_share_squares(v, part, A(0))}};
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
  A sum = 0, squares = 0;
#pragma unroll 1
  for (int w = lane_index(); w < warps; w += 32) sum += part.share(w) * all[w].mean;
  A mean = sum_lanes<32>(sum) * one_over_cols;
#pragma unroll 1
  for (int w = lane_index(); w < warps; w += 32)
    squares += all[w].squares + part.share(w) * (all[w].mean - mean) * (all[w].mean - mean);
  return {mean, sum_lanes<32>(squares)};
}
template <class Shape, typename A>
__device__ inline Moments<A> combine_shares(const Sums<1, A> *all, int warps, const RowPart<Shape> &, A) {
  return {A(0), combine_sums(all, warps).value[0]};
}

// --------------------------------------------------------------------------------------------------------- forward

template <class N>
struct NormForward {
  const typename N::X *x;
  const typename N::R *residual;
  NormParameters<N> parameters;
  typename N::T *y;  // null if only the statistics are wanted
  typename N::R *h;
  typename N::A *stats;
  int64_t rows, cols;
  typename N::A eps;
};

// Weight and bias are loaded before the row arrives if a thread has at most kEarlyVectors vectors. Otherwise they are
// loaded after it, for kParameterVectors vectors at once: registers limit both. Where they may be float, which takes
// twice as many, half as many are loaded at once.
constexpr int kEarlyVectors = 2;
template <int kVectors, bool kCentred, bool kMayBeWide>
constexpr int kParameterVectors = std::max(1, (!kCentred       ? 4
                                               : kVectors <= 4 ? 2
                                                               : 1) /
                                                  (kMayBeWide ? 2 : 1));

// The sum, rounded to residual's dtype.
template <typename V, typename R>
__device__ inline Vector<R> add_vectors(const V &a, const Vector<R> &b) {
  auto x = widen(a);
  auto y = widen(b);
#pragma unroll
  for (int k = 0; k < kVectorSize<R>; ++k) y[k] += x[k];
  return narrow(y);
}

template <class N, typename R = typename N::R, typename A = typename N::A>
__device__ inline VectorBeside<typename N::T, R> scaled(const Vector<R> &v, A mean, A rstd, const Widened<R> &weight,
                                                        const Widened<R> &bias) {
  auto y = widen(v);
#pragma unroll
  for (int k = 0; k < kVectorSize<R>; ++k)
    if constexpr (N::kCentred) y[k] = (y[k] - mean) * rstd * weight[k] + bias[k];
    else y[k] = y[k] * rstd * weight[k];
  return narrow_to<typename N::T>(y);
}

template <class N, typename A = typename N::A>
__device__ inline void write_stats(const NormForward<N> &a, int64_t row, A mean, A rstd) {
  if constexpr (N::kCentred) a.stats[2 * row] = mean, a.stats[2 * row + 1] = rstd;
  else a.stats[row] = rstd;
}

// One-shot blocks, each with one row or several short ones, which are loaded directly into registers. Many small blocks
// keep the memory busy, because some load while others compute.
template <class Shape, class Threads, class N>
__global__ void __launch_bounds__(Threads::kBlock, Threads::kResident / Threads::kBlock) norm_kernel(NormForward<N> a) {
  using R = typename N::R;
  using A = typename N::A;
  using Parameter = ParameterVector<N>;
  constexpr int kVectors = Shape::kVectors;
  constexpr bool kEarly = kVectors <= kEarlyVectors;
  constexpr int kTogether = kEarly ? kVectors : kParameterVectors<kVectors, N::kCentred, Parameter::kMayBeWide>;
  RowPart<Shape> part(a.cols, Shape::kSpan == Span::warp ? 1 : blockDim.x / 32);
  int64_t row = part.first_row();
  bool present = row < a.rows;
  NormParameters<N> &p = a.parameters;
  bool has_weight = p.weight != nullptr, has_bias = p.bias != nullptr;
  int64_t at = row * a.cols + part.column();

  Vector<R> v[kVectors];
  VectorBeside<typename N::X, R> x[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    x[i] = load_beside<R>(a.x + at + part.offset(i), present && part.holds(i));
    if constexpr (N::kAdd) v[i] = load_present(a.residual + at + part.offset(i), present && part.holds(i));
    else v[i] = x[i];
  }
  RowExchange<Shape, Share<N::kCentred, A>> exchange;
  A one_over_cols = A(1) / static_cast<A>(a.cols), one_over_share = one_over_cols;
  if constexpr (Shape::kSpan != Span::warp) one_over_share = A(1) / static_cast<A>(max(1, part.share(exchange.warp())));
  Parameter weight[kVectors], bias[kVectors];
  auto load_parameters = [&](bool wide, int first, int count) {
#pragma unroll
    for (int i = first; i < first + count && i < kVectors; ++i) {
      weight[i] = Parameter::load(p.address(p.weight, part.offset(i)), wide, has_weight && part.holds(i), 1);
      if constexpr (N::kCentred)
        bias[i] = Parameter::load(p.address(p.bias, part.offset(i)), wide, has_bias && part.holds(i), 0);
    }
  };
  auto find_parameters = [&] { p.advance(p.line(row) * a.cols + part.column()); };
  if constexpr (kEarly) {
    find_parameters();
    load_parameters(p.wide, 0, kVectors);
  }
  if constexpr (N::kAdd) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      v[i] = add_vectors(x[i], v[i]);
      if (present && part.holds(i)) store(a.h + at + part.offset(i), v[i]);
    }
  }

  auto share = share_moments<N::kCentred>(v, part, one_over_share);
  Moments<A> moments;
  if constexpr (Shape::kSpan == Span::warp) moments = only_share(share);
  else moments = combine_shares(exchange.all(share), exchange.warps(), part, one_over_cols);
  A mean = moments.mean, rstd = reciprocal_deviation<N::kCentred>(moments.squares * one_over_cols + a.eps);
  if (!present) return;
  if (a.stats && part.leads()) write_stats(a, row, mean, rstd);
  if (!a.y) return;
  if constexpr (!kEarly) find_parameters();
  auto write = [&](auto is_wide) {
    constexpr bool kWide = decltype(is_wide)::value;
#pragma unroll
    for (int first = 0; first < kVectors; first += kTogether) {
      if constexpr (!kEarly) load_parameters(kWide, first, kTogether);
#pragma unroll
      for (int i = first; i < first + kTogether && i < kVectors; ++i) {
        keep_packed(v[i]);
        if (!part.holds(i)) continue;
        auto scale = weight[i].widened(kWide);
        if constexpr (!N::kPlain)
#pragma unroll
          for (int k = 0; k < Shape::kSize; ++k) scale[k] += p.offset;
        Widened<R> shift;
        if constexpr (N::kCentred) shift = bias[i].widened(kWide);
        store(a.y + at + part.offset(i), scaled<N>(v[i], mean, rstd, scale, shift));
      }
    }
  };
  if constexpr (Parameter::kMayBeWide)
    if (p.wide) return write(std::true_type());
  write(std::false_type());
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
    for (int i = 0; i < Shape::kVectors; ++i)
      vector[i] = ParameterVector<N>::load(p.address(from, part.offset(i)), p.wide, given && part.holds(i), fallback);
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

// Persistent clusters: weight and bias, each as long as a row, stay in shared memory. The moments of the next row are
// published before this row is written, so that the exchange between the blocks overlaps with the stores. With kAdd the
// pipeline has rows of x and residual, which leave no room for weight and bias.
constexpr int kLongStages = 3;
template <class Shape, class N>
using LongPipeline = std::conditional_t<
    N::kAdd, SmemPipeline<Shape, kLongStages, 0, typename N::X, typename N::R>,
    SmemPipeline<Shape, kLongStages, (N::kCentred ? 2 : 1) * NormParameters<N>::kKeptBytes, typename N::X>>;

template <class Shape, class Threads, class N>
__global__ void __launch_bounds__(Threads::kBlock, Threads::kResident / Threads::kBlock)
    norm_long_kernel(NormForward<N> a) {
  using R = typename N::R;
  using A = typename N::A;
  constexpr int kVectors = Shape::kVectors;
  RowPart<Shape> part(a.cols, blockDim.x / 32);
  NormParameters<N> &p = a.parameters;
  bool has_weight = p.weight != nullptr, has_bias = p.bias != nullptr, has_y = a.y != nullptr;
  a.x += part.column(), a.y += part.column(), p.advance(part.column());
  if constexpr (N::kAdd) a.residual += part.column(), a.h += part.column();

  constexpr Index<0> kX;
  constexpr Index<1> kResidual;
  constexpr int kWeight = 0, kBias = ParameterVector<N>::kPlanes;  // their first planes
  LongPipeline<Shape, N> pipeline;
  auto load_row = [&](int stage, int64_t row) {
    pipeline.load(kX, stage, a.x + row * a.cols, part, row < a.rows);
    if constexpr (N::kAdd) pipeline.load(kResidual, stage, a.residual + row * a.cols, part, row < a.rows);
    commit_copies();
  };
  KeptParameter<N, Shape> weight, bias;
  if constexpr (!N::kAdd) weight.load(p, p.weight, has_weight, 1, part);
  if constexpr (!N::kAdd && N::kCentred) bias.load(p, p.bias, has_bias, 0, part);
#pragma unroll
  for (int s = 0; s < kLongStages; ++s) load_row(s, part.base() + s * part.step());
  if constexpr (!N::kAdd) weight.keep(pipeline, kWeight, p.wide, p.offset);
  if constexpr (!N::kAdd && N::kCentred) bias.keep(pipeline, kBias, p.wide, A(0));
  auto row_vector = [&](int stage, int i) {
    if constexpr (N::kAdd) return add_vectors(pipeline.read(kX, stage, i), pipeline.read(kResidual, stage, i));
    else return pipeline.read(kX, stage, i);
  };
  auto parameter = [&](int plane, const void *from, bool given, float fallback, A offset, int i) {
    if constexpr (!N::kAdd) return kept_parameter<N>(pipeline, plane, i);
    auto v = ParameterVector<N>::load(p.address(from, part.offset(i)), p.wide, given && part.holds(i), fallback);
    return v.kept(p.wide, offset).widened_kept();
  };

  Exchange<Span::cluster, Share<N::kCentred, A>, 4> exchange;
  A one_over_cols = A(1) / static_cast<A>(a.cols);
  A one_over_share = A(1) / static_cast<A>(max(1, part.share(exchange.warp())));
  auto publish = [&](int stage, int64_t row) {
    Vector<R> v[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      v[i] = row_vector(stage, i);
      if constexpr (N::kAdd)
        if (part.holds(i)) store(a.h + row * a.cols + part.offset(i), v[i]);
    }
    exchange.publish(share_moments<N::kCentred>(v, part, one_over_share));
  };

  wait_copies<kLongStages - 1>();
  if (part.base() < a.rows) publish(0, part.base());
  int stage = 0;
  for (int64_t row = part.base(); row < a.rows; row += part.step()) {
    int next = stage + 1 == kLongStages ? 0 : stage + 1;
    wait_copies<kLongStages - 2>();
    if (row + part.step() < a.rows) publish(next, row + part.step());
    Moments<A> moments = combine_shares(exchange.collect(), exchange.warps(), part, one_over_cols);
    A mean = moments.mean, rstd = reciprocal_deviation<N::kCentred>(moments.squares * one_over_cols + a.eps);
    if (a.stats && part.leads()) write_stats(a, row, mean, rstd);
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      if (has_y && part.holds(i))
        store(a.y + row * a.cols + part.offset(i),
              scaled<N>(row_vector(stage, i), mean, rstd, parameter(kWeight, p.weight, has_weight, 1, p.offset, i),
                        N::kCentred ? parameter(kBias, p.bias, has_bias, 0, A(0), i) : Widened<R>{}));
    load_row(stage, row + kLongStages * part.step());
    stage = next;
  }
  wait_copies<0>();
}

// -------------------------------------------------------------------------------------------------------- backward

template <class N>
struct NormBackwardTensors {
  const typename N::T *dy;
  const typename N::R *dh, *x;
  NormParameters<N> parameters;
  const typename N::A *stats;
  typename N::X *dx;         // may be null
  typename N::R *dresidual;  // if kMixed; may be null
  typename N::A *partials;   // (sums, kSums, cols), of which sum s is of line s % lines; may be null
  int64_t rows, cols;
};

constexpr int kStages = 2;

template <class Shape, class N, int kKept = NormParameters<N>::kKeptBytes>
using BackwardPipeline =
    std::conditional_t<N::kAdd, SmemPipeline<Shape, kStages, kKept, typename N::R, typename N::T, typename N::R>,
                       SmemPipeline<Shape, kStages, kKept, typename N::R, typename N::T>>;

template <int kSize, typename A>
__device__ inline void store_sums(A *to, const A (&sums)[kSize]) {
#pragma unroll
  for (int k = 0; k < kSize; k += kVectorSize<A>)
    *reinterpret_cast<uint4 *>(to + k) = reinterpret_cast<const uint4 &>(sums[k]);
}

// Adds up the sums of a block's rows of each line, always in the same order, and writes them to the block's lines of
// partial sums. The rows of a thread are all of one line.
template <class Shape, int kSums, typename A>
__device__ inline void write_partials(A (&sums)[kSums][Shape::kVectors][Shape::kSize], const RowPart<Shape> &part,
                                      int row_warps, A *partials, int64_t cols, int64_t lines) {
  int teams = blockDim.x / (32 * row_warps), rows = teams * Shape::kRowsPerWarp;
  int64_t group = Shape::kSpan == Span::cluster ? blockIdx.x / cluster_size() : blockIdx.x;
  lines = lines_of_block(rows, lines);
  partials += kSums * group * lines * cols;
  bool whole_warp = lines == 1;  // its rows are of one line
  if (whole_warp)
#pragma unroll
    for (int other = Shape::kLanes; other < 32; other *= 2)
#pragma unroll
      for (int s = 0; s < kSums; ++s)
#pragma unroll
        for (int i = 0; i < Shape::kVectors; ++i)
#pragma unroll
          for (int k = 0; k < Shape::kSize; ++k) sums[s][i][k] += __shfl_xor_sync(~0u, sums[s][i][k], other);
  int slots = whole_warp ? teams : rows, slot = whole_warp ? part.team() : part.own();
  auto store_all = [&](A *to) {
    to += slot * kSums * cols;
#pragma unroll
    for (int s = 0; s < kSums; ++s)
#pragma unroll
      for (int i = 0; i < Shape::kVectors; ++i)
        if ((part.row_of_warp() == 0 || !whole_warp) && part.holds(i))
          store_sums(to + s * cols + part.column() + part.offset(i), sums[s][i]);
  };
  if (slots == lines) return store_all(partials);
  extern __shared__ uint4 memory[];  // the pipeline's, which has no copy in flight any more
  A *shared = reinterpret_cast<A *>(memory);
  __syncthreads();
  store_all(shared);
  __syncthreads();
  int numbers = static_cast<int>(lines * kSums * cols), all = static_cast<int>(slots * kSums * cols);
  for (int c = threadIdx.x; c < numbers; c += blockDim.x) {
    A sum = 0;
    for (int at = c; at < all; at += numbers) sum += shared[at];
    partials[c] = sum;
  }
}

template <class Shape, class Threads, class N>
__global__ void __launch_bounds__(Threads::kBlock, Threads::kResident / Threads::kBlock)
    norm_backward_kernel(NormBackwardTensors<N> a, int row_warps) {
  using T = typename N::T;
  using R = typename N::R;
  using A = typename N::A;
  constexpr int kStats = N::kStats, kSums = N::kSums;
  RowPart<Shape> part(a.cols, row_warps);
  NormParameters<N> &p = a.parameters;
  bool has_weight = p.weight != nullptr, has_dx = a.dx != nullptr, has_dresidual = a.dresidual != nullptr;
  a.x += part.column(), a.dy += part.column(), a.dx += part.column();
  if constexpr (N::kAdd) a.dh += part.column(), a.dresidual += part.column();
  BackwardPipeline<Shape, N> pipeline;
  constexpr Index<0> kX;
  constexpr Index<1> kDy;
  constexpr Index<2> kDh;
  auto load_row = [&](int stage, int64_t row) {
    pipeline.load(kX, stage, a.x + row * a.cols, part, row < a.rows);
    pipeline.load(kDy, stage, a.dy + row * a.cols, part, row < a.rows);
    if constexpr (N::kAdd) pipeline.load(kDh, stage, a.dh + row * a.cols, part, row < a.rows);
    commit_copies();
  };
  KeptParameter<N, Shape> weight;
  p.advance(p.line(part.first_row()) * a.cols + part.column());
  weight.load(p, p.weight, has_weight, 1, part);
#pragma unroll
  for (int s = 0; s < kStages; ++s) load_row(s, part.first_row() + s * part.step());
  weight.keep(pipeline, 0, p.wide, p.offset);
  auto stat = [&](int64_t row, int which) { return row < a.rows ? a.stats[kStats * row + which] : A(0); };
  A next_mean = N::kCentred ? stat(part.first_row(), 0) : A(0), next_rstd = stat(part.first_row(), kStats - 1);
  RowExchange<Shape, Sums<kSums, A>> exchange(row_warps);

  A columns[kSums][Shape::kVectors][Shape::kSize] = {};  // each column's sums of dy * xhat and of dy
  A one_over_cols = A(1) / static_cast<A>(a.cols);
  int stage = 0;
  for (int64_t base = part.base(); base < a.rows; base += part.step()) {
    int64_t row = base + part.own();
    A mean = next_mean, rstd = next_rstd;
    if constexpr (N::kCentred) next_mean = stat(row + part.step(), 0);
    next_rstd = stat(row + part.step(), kStats - 1);
    // f(k, x - mean, dy, g) for each element k of this thread's vector i of the row
    auto each = [&](int i, auto f) {
      auto x = widen(pipeline.read(kX, stage, i));
      auto d = widen(pipeline.read(kDy, stage, i));
      auto w = kept_parameter<N>(pipeline, 0, i);
#pragma unroll
      for (int k = 0; k < Shape::kSize; ++k) f(k, N::kCentred ? x[k] - mean : x[k], d[k], d[k] * w[k]);
    };

    wait_copies<kStages - 1>();
    Sums<kSums, A> sums = {};  // the row's, of g * xhat and of g
#pragma unroll
    for (int i = 0; i < Shape::kVectors; ++i)
      if (part.holds(i))
        each(i, [&](int k, A x, A d, A g) {
          A xhat = x * rstd;
          sums.value[0] += g * xhat, columns[0][i][k] += d * xhat;
          if constexpr (N::kCentred) sums.value[1] += g, columns[1][i][k] += d;
        });
    if constexpr (Shape::kSpan == Span::warp) sums = sum_lanes<Shape::kLanes>(sums);
    else sums = sum_row(sums, exchange);

    // dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) = rstd * g + c1 * (x - mean) + c0
    A c1 = -rstd * rstd * one_over_cols * sums.value[0], c0 = 0;
    if constexpr (N::kCentred) c0 = -rstd * one_over_cols * sums.value[1];
    if ((has_dx || (N::kAdd && N::kMixed && has_dresidual)) && row < a.rows)
#pragma unroll
      for (int i = 0; i < Shape::kVectors; ++i)
        if (part.holds(i)) {
          Widened<R> dx;
          each(i, [&](int k, A x, A, A g) { dx[k] = g * rstd + (x * c1 + c0); });
          if constexpr (N::kAdd) {
            auto dh = widen(pipeline.read(kDh, stage, i));
#pragma unroll
            for (int k = 0; k < Shape::kSize; ++k) dx[k] += dh[k];
          }
          int64_t at = row * a.cols + part.offset(i);
          if constexpr (N::kAdd && N::kMixed) {
            if (has_dresidual) store(a.dresidual + at, narrow(dx));
            if (has_dx) store(a.dx + at, narrow_to<T>(dx));
          } else {
            store(a.dx + at, narrow(dx));
          }
        }
    load_row(stage, row + kStages * part.step());
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  launch_next();
  wait_copies<0>();
  if (a.partials) write_partials<Shape>(columns, part, row_warps, a.partials, a.cols, N::kPlain ? 1 : p.lines);
}

// dweight and dbias, (lines, cols), each of T, or of float if `wide`; may be null.
template <typename T>
struct SummedPartials {
  void *dweight, *dbias;
  bool wide;
};

// Adds up the partial sums, (sums, kSums, cols), in a fixed order: dweight if blockIdx.y is 0, dbias if it is 1. Sum s
// is of line s % lines. Without any, results are 0. This kernel overlaps the end of the one before (overlap.cuh).
constexpr int kSumCols = 16, kSumRows = 32;

template <typename T, typename A>
__global__ void __launch_bounds__(kSumCols *kSumRows)
    sum_partials_kernel(const A *partials, SummedPartials<T> to, int64_t rows, int64_t lines, int64_t cols) {
  __shared__ A sums[kSumRows][kSumCols];
  void *out = blockIdx.y == 0 ? to.dweight : to.dbias;
  wait_for_kernel_before();
  if (!out) return;
  // `rows` of lines * gridDim.y * cols numbers
  for (int64_t first = int64_t{blockIdx.x} * kSumCols; first < lines * cols; first += int64_t{gridDim.x} * kSumCols) {
    int64_t at = first + threadIdx.x, line = lines == 1 ? 0 : at / cols;
    const A *column = partials + line * (gridDim.y - 1) * cols + blockIdx.y * cols + at;
    A sum = 0;
    if (at < lines * cols)
#pragma unroll 8
      for (int64_t row = threadIdx.y; row < rows; row += kSumRows) sum += column[row * gridDim.y * lines * cols];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && at < lines * cols) {
      for (int r = 1; r < kSumRows; ++r) sum += sums[r][threadIdx.x];
      if (sizeof(T) == 2 && to.wide) static_cast<A *>(out)[at] = sum;
      else static_cast<T *>(out)[at] = narrow<T>(sum);
    }
    __syncthreads();
  }
}

// ------------------------------------------------------------------------------------ kernels for any size and address

// A block for each row, element by element. The row is read again for each pass.
constexpr int kAnyThreads = 1024;

template <class N>
__global__ void __launch_bounds__(kAnyThreads) norm_any_kernel(NormForward<N> a) {
  using R = typename N::R;
  using A = typename N::A;
  Exchange<Span::block, Sums<1, A>> exchange;
  A cols = static_cast<A>(a.cols);
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    int64_t at = row * a.cols, line = row % a.parameters.lines * a.cols;
    const R *from;  // a thread reads only the elements of h that it has written
    if constexpr (N::kAdd) from = a.h + at;
    else from = a.x + at;
    Sums<1, A> sum = {}, squares = {};
    for (int64_t c = threadIdx.x; c < a.cols; c += blockDim.x) {
      A x = widen(a.x[at + c]);
      if constexpr (N::kAdd) {
        R h = narrow<R>(x + widen(a.residual[at + c]));
        a.h[at + c] = h, x = widen(h);
      }
      sum.value[0] += x;
    }
    A mean = 0;
    if constexpr (N::kCentred) mean = sum_row(sum, exchange).value[0] / cols;
    for (int64_t c = threadIdx.x; c < a.cols; c += blockDim.x)
      squares.value[0] += (widen(from[c]) - mean) * (widen(from[c]) - mean);
    A rstd = reciprocal_deviation<N::kCentred>(sum_row(squares, exchange).value[0] / cols + a.eps);
    if (a.stats && threadIdx.x == 0) write_stats(a, row, mean, rstd);
    for (int64_t c = threadIdx.x; a.y && c < a.cols; c += blockDim.x) {
      A xhat = (widen(from[c]) - mean) * rstd;
      a.y[at + c] = narrow<typename N::T>(xhat * a.parameters.weight_at(line + c) + a.parameters.bias_at(line + c));
    }
  }
}

template <class N>
__global__ void __launch_bounds__(kAnyThreads) norm_backward_any_kernel(NormBackwardTensors<N> a) {
  using A = typename N::A;
  constexpr int kStats = N::kStats;
  Exchange<Span::block, Sums<2, A>> exchange;
  A cols = static_cast<A>(a.cols);
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    int64_t at = row * a.cols, line = row % a.parameters.lines * a.cols;
    A mean = N::kCentred ? a.stats[kStats * row] : A(0), rstd = a.stats[kStats * row + kStats - 1];
    auto xhat = [&](int64_t c) { return (widen(a.x[at + c]) - mean) * rstd; };
    auto g = [&](int64_t c) { return widen(a.dy[at + c]) * a.parameters.weight_at(line + c); };
    Sums<2, A> sums = {};
    for (int64_t c = threadIdx.x; c < a.cols; c += blockDim.x) sums.value[0] += g(c), sums.value[1] += g(c) * xhat(c);
    sums = sum_row(sums, exchange);
    A c0 = N::kCentred ? sums.value[0] / cols : A(0), c1 = sums.value[1] / cols;
    for (int64_t c = threadIdx.x; c < a.cols; c += blockDim.x) {
      A dx = rstd * (g(c) - c0 - xhat(c) * c1);
      if constexpr (N::kAdd) dx += widen(a.dh[at + c]);
      if constexpr (N::kAdd && N::kMixed)
        if (a.dresidual) a.dresidual[at + c] = narrow<typename N::R>(dx);
      if (a.dx) a.dx[at + c] = narrow<typename N::X>(dx);
    }
  }
}

// A thread for each column. Each line of partial sums has a part of the rows: a multiple of `lines` of them, so that
// these rows have one line of the weight.
template <class N>
__global__ void __launch_bounds__(kAnyThreads) norm_partials_any_kernel(NormBackwardTensors<N> a, int64_t all_sums) {
  using A = typename N::A;
  constexpr int kStats = N::kStats, kSums = N::kSums;
  for (int64_t sum = blockIdx.y; sum < all_sums; sum += gridDim.y)
    for (int64_t c = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; c < a.cols; c += int64_t{gridDim.x} * blockDim.x) {
      A dweight = 0, dbias = 0;
      for (int64_t row = sum; row < a.rows; row += all_sums) {
        A d = widen(a.dy[row * a.cols + c]), mean = N::kCentred ? a.stats[kStats * row] : A(0);
        dweight += d * ((widen(a.x[row * a.cols + c]) - mean) * a.stats[kStats * row + kStats - 1]);
        dbias += d;
      }
      A *to = a.partials + kSums * sum * a.cols + c;
      to[0] = dweight;
      if constexpr (N::kCentred) to[a.cols] = dbias;
    }
}

// ----------------------------------------------------------------------------------------------- launchers, shared

inline unsigned any_block(int64_t cols) {
  return static_cast<unsigned>(std::min<int64_t>(kAnyThreads, ceil_div(std::max<int64_t>(cols, 1), 32) * 32));
}

template <class N, class Op>
NormParameters<N> norm_parameters(const Op &op, const Tensor &weight, const Tensor &bias) {
  const bool wide = NormParameters<N>::kMayBeWide && weight.dtype == DType::float32;
  return {weight.data, bias.data, static_cast<typename N::A>(op.weight_offset()),
          std::max<int64_t>(1, op.weight_rows(weight)), wide};
}

// Calls f(NormTypes) for y of dtype t and rows of dtype r.
template <class Op, class F>
Status dispatch_norm(const Op &op, DType t, DType r, const Tensor &weight, F f) {
  constexpr bool kCentred = Op::kCentred, kAdd = Op::kAdd;
  return dispatch(t, [&](auto type) -> Status {
    using T = typename decltype(type)::type;
    if constexpr (kAdd && sizeof(T) == 2)
      if (r == DType::float32) return f(Type<NormTypes<kCentred, kAdd, T, float, false>>());
    if constexpr (sizeof(T) == 2)
      if (weight.dtype != DType::float32 && op.weight_rows(weight) == 1 && op.weight_offset() == 0)
        return f(Type<NormTypes<kCentred, kAdd, T, T, true>>());
    return f(Type<NormTypes<kCentred, kAdd, T, T, false>>());
  });
}

// ------------------------------------------------------------------------------------------------ launchers, forward

template <class Shape, class N>
Status norm_short(const char *op, const NormForward<N> &a, const RowPlan &plan, void *stream) {
  constexpr bool kWithinWarp = Shape::kSpan == Span::warp;
  using Threads = std::conditional_t<kWithinWarp, Threads<256, 1024>, Threads<512, 1024>>;
  int teams = kWithinWarp ? Threads::kBlock / 32 : 1;
  unsigned blocks = grid_size(ceil_div(a.rows, int64_t{teams} * Shape::kRowsPerWarp));
  return launch_clusters(op, norm_kernel<Shape, Threads, N>, blocks, 32u * teams * plan.warps, 1, 0, stream, a);
}

template <class N>
Status norm_any(const char *op, const NormForward<N> &a, void *stream) {
  norm_any_kernel<<<grid_size(a.rows), any_block(a.cols), 0, static_cast<cudaStream_t>(stream)>>>(a);
  return check_launch(op);
}

template <class Shape, class N>
Status norm_long(const char *op, const NormForward<N> &a, const RowPlan &plan, const DeviceLimits &device,
                 void *stream) {
  using Threads = Threads<512, 512>;
  constexpr auto kernel = norm_long_kernel<Shape, Threads, N>;
  RowGrid grid;
  AOT_TRY((row_grid<kernel, Shape, Threads>(op, plan, device, a.rows, 1, a.rows, LongPipeline<Shape, N>::kBytesPerWarp,
                                            &grid)));
  if (grid.blocks == 0) return norm_any(op, a, stream);
  return launch_clusters(op, kernel, grid.blocks, grid.threads, plan.cluster, grid.shared, stream, a);
}

// The plans are those measured fastest on an H200 (docs/lab_notes.md). Eight vectors for each thread need too many
// registers if kCrowded.
template <class N>
Status norm_rows(const char *op, const NormForward<N> &a, const DeviceLimits &device, void *stream) {
  using R = typename N::R;
  constexpr bool kCrowded = N::kAdd || (N::kCentred && sizeof(R) == 2);
  constexpr int kVectors = 4, kMost = kCrowded ? 4 : 8;
  using LongShape = RowShape<R, 32, kMost, Span::cluster>;
  const NormParameters<N> &p = a.parameters;
  constexpr int kBytes = LongPipeline<LongShape, N>::kBytesPerVector;
  int64_t vectors = a.cols / kVectorSize<R>;
  RowPlan plan;
  if (a.cols > 0 && a.cols % kVectorSize<R> == 0 && p.can_divide(a.rows, p.lines) &&
      aligned(a.x, a.residual, static_cast<const char *>(p.weight), static_cast<const char *>(p.bias), a.y, a.h)) {
    plan = plan_within_warp(vectors, kVectors);
    if (plan.lanes == 0) plan = first_that_holds(vectors, {{32, kVectors, 16}, {32, kMost, 16}}, 0, device);
    if (plan.lanes == 0 && p.lines == 1)
      plan = first_that_holds(vectors,
                              {{32, kMost, 8, 2},
                               {32, kMost, 8, 4},
                               {32, kMost, 8, 8},
                               {32, kMost, 16, 8},
                               {32, kMost, 8, 16},
                               {32, kMost, 16, 16}},
                              kBytes, device);
  }
  if (plan.lanes == 0) return norm_any(op, a, stream);
  if (plan.cluster > 1) return norm_long<LongShape>(op, a, plan, device, stream);
  auto run = [&](auto shape) { return norm_short<decltype(shape)>(op, a, plan, stream); };
  if (plan.warps == 1) return dispatch_within_warp<R, kVectors>(plan, run);
  if (plan.vectors == kVectors) return run(RowShape<R, 32, kVectors, Span::block>());
  return run(RowShape<R, 32, kMost, Span::block>());
}

// The statistics of x's rows, whose kernels rms_norm.cu and layer_norm.cu instantiate.
template <bool kCentred>
Status norm_stats(const char *op, const Tensor &x, void *stats, int64_t rows, int64_t cols, double eps, void *stream);

template <bool kCentred>
Status launch_stats(const char *op, const Tensor &x, void *stats, int64_t rows, int64_t cols, double eps,
                    void *stream) {
  DeviceLimits device;
  AOT_TRY(device_limits(op, &device));
  return dispatch(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using N = NormTypes<kCentred, false, T, T, sizeof(T) == 2>;
    using A = typename N::A;
    NormForward<N> a{x.as<const T>(),    {}, {{}, {}, A(0), 1, false}, {}, {}, static_cast<A *>(stats), rows, cols,
                     static_cast<A>(eps)};
    return norm_rows(op, a, device, stream);
  });
}

template <class Op>
Status norm_cuda(const Op &op, const Tensor *in, const Tensor *out, void *stream) {
  DeviceLimits device;
  AOT_TRY(device_limits(Op::name, &device));
  const Tensor &x = in[Op::kX], &residual = slot<Op::kResidual>(in);
  return dispatch_norm(op, x.dtype, residual.dtype, in[Op::kWeight], [&](auto types) {
    using N = typename decltype(types)::type;
    NormForward<N> a{x.as<const typename N::X>(),
                     residual.as<const typename N::R>(),
                     norm_parameters<N>(op, in[Op::kWeight], slot<Op::kBias>(in)),
                     out[Op::kY].template as<typename N::T>(),
                     slot<Op::kH>(out).template as<typename N::R>(),
                     out[Op::kStatsOut].template as<typename N::A>(),
                     op.rows(x),
                     op.cols(),
                     static_cast<typename N::A>(op.eps(x.dtype))};
    return norm_rows(Op::name, a, device, stream);
  });
}

// ----------------------------------------------------------------------------------------------- launchers, backward

template <class N>
Status norm_backward_any(const char *op, const NormBackwardTensors<N> &a, int64_t sums, void *stream) {
  auto s = static_cast<cudaStream_t>(stream);
  unsigned block = any_block(a.cols);
  if (a.dx || a.dresidual) {
    norm_backward_any_kernel<<<grid_size(a.rows), block, 0, s>>>(a);
    AOT_TRY(check_launch(op));
  }
  if (!a.partials) return kOk;
  constexpr int64_t kMostInY = 65535;
  dim3 grid(grid_size(ceil_div(a.cols, block)), static_cast<unsigned>(std::min(sums, kMostInY)));
  norm_partials_any_kernel<<<grid, block, 0, s>>>(a, sums);
  return check_launch(op);
}

// dx and the partial sums. *sums: on entry the most lines of partial sums, on return those written.
template <class Shape, class Threads, class N>
Status norm_backward_shape(const char *op, const NormBackwardTensors<N> &a, const RowPlan &plan,
                           const DeviceLimits &device, int64_t *sums, void *stream) {
  constexpr auto kernel = norm_backward_kernel<Shape, Threads, N>;
  const NormParameters<N> &p = a.parameters;
  RowGrid grid;
  AOT_TRY((row_grid<kernel, Shape, Threads>(op, plan, device, a.rows, p.lines, *sums,
                                            BackwardPipeline<Shape, N>::kBytesPerWarp, &grid)));
  if (grid.blocks == 0) return norm_backward_any(op, a, *sums, stream);
  *sums = grid.sums;
  return launch_clusters(op, kernel, grid.blocks, grid.threads, plan.cluster, grid.shared, stream, a, plan.warps);
}

// The plans are those measured fastest on an H200 (docs/lab_notes.md). About 64 KB in flight for each multiprocessor
// are best: less does not hide the latency of the memory, more makes it slower. Spilled registers cost more than all
// else.
template <class N>
Status norm_backward_rows(const char *op, const NormBackwardTensors<N> &a, const DeviceLimits &device, int64_t *sums,
                          void *stream) {
  using R = typename N::R;
  using LongShape = RowShape<R, 32, 4, Span::cluster>;
  constexpr bool kCrowded = N::kCentred && sizeof(R) == 2;
  constexpr int kOneVectorWarps = kCrowded ? 2 : 8;
  const NormParameters<N> &p = a.parameters;
  constexpr int kBytes = BackwardPipeline<LongShape, N>::kBytesPerVector;
  int64_t vectors = a.cols / kVectorSize<R>;
  RowPlan plan;
  if (a.cols % kVectorSize<R> == 0 && p.can_divide(a.rows, p.lines) &&
      aligned(a.dy, a.dh, a.x, static_cast<const char *>(p.weight), a.dx, a.dresidual, a.partials)) {
    plan = plan_within_warp(vectors, 1);
    if (plan.lanes == 0)
      plan = kCrowded && vectors > 64 && vectors <= 96
                 ? RowPlan{32, 3}  // no idle lanes
                 : first_that_holds(vectors, {{32, 1, kOneVectorWarps}, {32, 2, 16}, {32, 4, 16}}, kBytes, device);
    if (plan.lanes == 0 && sizeof(R) == 2)
      plan =
          first_that_holds(vectors, {{32, 4, 16, 2}, {32, 4, 16, 4}, {32, 4, 16, 8}, {32, 4, 16, 16}}, kBytes, device);
    if (plan.lanes == 0)
      plan = first_that_holds(
          vectors, {{32, 4, 8, 2}, {32, 4, 8, 4}, {32, 4, 8, 8}, {32, 4, 16, 8}, {32, 4, 8, 16}, {32, 4, 16, 16}},
          kBytes, device);
  }
  if (plan.lanes == 0) return norm_backward_any(op, a, *sums, stream);
  auto run = [&](auto shape, auto threads) {
    return norm_backward_shape<decltype(shape), decltype(threads)>(op, a, plan, device, sums, stream);
  };
  if (plan.cluster > 1) return run(LongShape(), Threads<512, 512>());
  if constexpr (kCrowded)
    if (plan.vectors == 3) return run(RowShape<R, 32, 3, Span::warp>(), Threads<256, 512>());
  if (plan.warps == 1)
    return dispatch_within_warp<R, 1>(plan, [&](auto shape) { return run(shape, Threads<256, 1024>()); });
  if (plan.vectors == 1) return run(RowShape<R, 32, 1, Span::block>(), Threads<512, 1024>());
  if (plan.vectors == 2) return run(RowShape<R, 32, 2, Span::block>(), Threads<512, 512>());
  return run(RowShape<R, 32, 4, Span::block>(), Threads<512, 512>());
}

// dweight and dbias of `sums` lines of partial sums.
template <class N>
Status sum_partials(const char *op, const NormBackwardTensors<N> &a, const Tensor &dweight, const Tensor &dbias,
                    int64_t sums, void *stream) {
  using T = typename N::T;
  const bool wide = (dweight ? dweight : dbias).dtype == DType::float32;
  const int64_t lines = a.parameters.lines;
  LaunchShape shape;
  shape.grid = {grid_size(ceil_div(lines * a.cols, kSumCols)), N::kSums}, shape.block = {kSumCols, kSumRows};
  shape.overlap = sums > 0;  // else no kernel of this call is before it
  return launch_kernel(op, sum_partials_kernel<T, typename N::A>, shape, stream, a.partials,
                       SummedPartials<T>{dweight.data, dbias.data, wide}, sums / lines, lines, a.cols);
}

template <class Op>
Status norm_backward_cuda(const Op &op, const Tensor *in, const Tensor *out, void *stream) {
  DeviceLimits device;
  AOT_TRY(device_limits(Op::name, &device));
  const Tensor &x = in[Op::kX], &dy = in[Op::kDy], &weight = in[Op::kWeight], &work = out[Op::kWork];
  const Tensor &dweight = out[Op::kDweight], &dbias = slot<Op::kDbias>(out), &dresidual = slot<Op::kDresidual>(out);
  return dispatch_norm(op, dy.dtype, x.dtype, weight, [&](auto types) {
    using N = typename decltype(types)::type;
    using R = typename N::R;
    using A = typename N::A;
    const bool wants_sums = dweight || dbias;
    int64_t rows = op.rows(x), cols = op.cols(), lines = std::max<int64_t>(1, op.weight_rows(weight));
    int64_t sums = lines * partial_rows(op.rows_per_line(x, weight), lines * cols);
    A *stats = in[Op::kStatsIn].template as<A>();
    if ((wants_sums || !stats) && !work) return fail(kConventionMisused, "%s: workspace is missing", Op::name);
    if (!stats && rows > 0 && cols > 0) {  // in the workspace, after the partial sums
      stats = work.as<A>() + Op::kSums * sums * cols;
      AOT_TRY(norm_stats<N::kCentred>(Op::name, x, stats, rows, cols, op.eps(x.dtype), stream));
    }
    // Of one dtype, dx and dresidual are the same.
    const Tensor &dx = out[Op::kDx] || N::kMixed ? out[Op::kDx] : dresidual;
    NormBackwardTensors<N> a{dy.as<const typename N::T>(),
                             slot<Op::kDh>(in).template as<const R>(),
                             x.as<const R>(),
                             norm_parameters<N>(op, weight, {}),
                             stats,
                             dx.as<typename N::X>(),
                             N::kMixed ? dresidual.as<R>() : nullptr,
                             wants_sums ? work.as<A>() : nullptr,
                             rows,
                             cols};
    if (x.size() == 0) sums = 0;
    else AOT_TRY(norm_backward_rows(Op::name, a, device, &sums, stream));
    if (wants_sums) AOT_TRY(sum_partials(Op::name, a, dweight, dbias, sums, stream));
    if (N::kMixed || !dresidual || dx.data == dresidual.data) return kOk;
    return check_cuda(Op::name, cudaMemcpyAsync(dresidual.data, dx.data, x.size() * sizeof(R), cudaMemcpyDeviceToDevice,
                                                static_cast<cudaStream_t>(stream)));
  });
}

}  // namespace AOT_ISA
}  // namespace aot
