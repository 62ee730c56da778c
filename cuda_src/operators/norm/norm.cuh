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
// Others are longer rows, rows that are not aligned to 16 bytes, rows for whose pipelines the device has too little
// shared memory, and rows that need clusters before compute capability 9.0. norm_rows() and norm_backward_rows()
// choose. After each backward, sum_partials_kernel adds up dweight and dbias.
#pragma once
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

template <typename T, typename A>
struct NormForward {
  const T *x, *residual, *weight, *bias;
  T *y, *h;  // y is null if only the statistics are wanted
  A *stats;
  int64_t rows, cols;
  A eps;
};

// Weight and bias are loaded before the row arrives if a thread has at most kEarlyVectors vectors. Otherwise they are
// loaded after it, for kParameterVectors vectors at once: registers limit both.
constexpr int kEarlyVectors = 2;
template <int kVectors, bool kCentred>
constexpr int kParameterVectors = !kCentred       ? 4
                                  : kVectors <= 4 ? 2
                                                  : 1;

template <typename T>
__device__ inline Vector<T> add_vectors(const Vector<T> &a, const Vector<T> &b) {
  auto x = widen(a), y = widen(b);
#pragma unroll
  for (int k = 0; k < kVectorSize<T>; ++k) x[k] += y[k];
  return narrow(x);
}

template <bool kCentred, typename T, typename A>
__device__ inline Vector<T> scaled(const Vector<T> &v, A mean, A rstd, const Vector<T> &weight, const Vector<T> &bias) {
  auto y = widen(v), w = widen(weight);
  if constexpr (kCentred) {
    auto b = widen(bias);
#pragma unroll
    for (int k = 0; k < kVectorSize<T>; ++k) y[k] = (y[k] - mean) * rstd * w[k] + b[k];
  } else {
#pragma unroll
    for (int k = 0; k < kVectorSize<T>; ++k) y[k] = y[k] * rstd * w[k];
  }
  return narrow(y);
}

template <bool kCentred, typename T, typename A>
__device__ inline void write_stats(const NormForward<T, A> &a, int64_t row, A mean, A rstd) {
  if constexpr (kCentred) a.stats[2 * row] = mean, a.stats[2 * row + 1] = rstd;
  else a.stats[row] = rstd;
}

// One-shot blocks, each with one row or several short ones, which are loaded directly into registers. Many small blocks
// keep the memory busy, because some load while others compute.
template <class Shape, class Threads, bool kCentred, bool kAdd, typename T, typename A>
__global__ void __launch_bounds__(Threads::kBlock, Threads::kResident / Threads::kBlock)
    norm_kernel(NormForward<T, A> a) {
  constexpr int kVectors = Shape::kVectors, kTogether = kParameterVectors<kVectors, kCentred>;
  constexpr bool kEarly = kVectors <= kEarlyVectors;
  RowPart<Shape> part(a.cols, Shape::kSpan == Span::warp ? 1 : blockDim.x / 32);
  int64_t row = part.first_row();
  bool present = row < a.rows;
  bool has_weight = a.weight != nullptr, has_bias = a.bias != nullptr;
  int64_t at = row * a.cols + part.column();
  a.weight += part.column();
  if constexpr (kCentred) a.bias += part.column();

  Vector<T> v[kVectors], r[kVectors], early_weight[kVectors], early_bias[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    v[i] = load_present(a.x + at + part.offset(i), present && part.holds(i));
    if constexpr (kAdd) r[i] = load_present(a.residual + at + part.offset(i), present && part.holds(i));
  }
  RowExchange<Shape, Share<kCentred, A>> exchange;
  A one_over_cols = A(1) / static_cast<A>(a.cols), one_over_share = one_over_cols;
  if constexpr (Shape::kSpan != Span::warp) one_over_share = A(1) / static_cast<A>(max(1, part.share(exchange.warp())));
  auto weight = [&](int i) { return load_or(a.weight + part.offset(i), has_weight && part.holds(i), 1); };
  auto bias = [&](int i) { return load_or(a.bias + part.offset(i), has_bias && part.holds(i), 0); };
  if constexpr (kEarly) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      early_weight[i] = weight(i);
      if constexpr (kCentred) early_bias[i] = bias(i);
    }
  }
  if constexpr (kAdd) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      v[i] = add_vectors(v[i], r[i]);
      if (present && part.holds(i)) store(a.h + at + part.offset(i), v[i]);
    }
  }

  auto share = share_moments<kCentred>(v, part, one_over_share);
  Moments<A> moments;
  if constexpr (Shape::kSpan == Span::warp) moments = only_share(share);
  else moments = combine_shares(exchange.all(share), exchange.warps(), part, one_over_cols);
  A mean = moments.mean, rstd = reciprocal_deviation<kCentred>(moments.squares * one_over_cols + a.eps);
  if (!present) return;
  if (a.stats && part.leads()) write_stats<kCentred>(a, row, mean, rstd);
  if (!a.y) return;
#pragma unroll
  for (int first = 0; first < kVectors; first += kTogether) {
    Vector<T> w[kTogether], b[kTogether];
#pragma unroll
    for (int i = first; i < first + kTogether && i < kVectors; ++i) {
      w[i - first] = kEarly ? early_weight[i] : weight(i);
      if constexpr (kCentred) b[i - first] = kEarly ? early_bias[i] : bias(i);
    }
#pragma unroll
    for (int i = first; i < first + kTogether && i < kVectors; ++i) {
      keep_packed(v[i]);
      if (part.holds(i))
        store(a.y + at + part.offset(i), scaled<kCentred>(v[i], mean, rstd, w[i - first], b[i - first]));
    }
  }
}

// Persistent clusters: weight and bias, each as long as a row, stay in shared memory. The moments of the next row are
// published before this row is written, so that the exchange between the blocks overlaps with the stores. With kAdd the
// pipeline has rows of x and residual, which leave no room for weight and bias.
constexpr int kLongStages = 3;
template <class Shape, bool kCentred, bool kAdd>
using LongPipeline = SmemPipeline<Shape, kAdd ? 2 : 1, kLongStages,
                                  kAdd       ? 0
                                  : kCentred ? 2
                                             : 1>;

template <class Shape, class Threads, bool kCentred, bool kAdd, typename T, typename A>
__global__ void __launch_bounds__(Threads::kBlock, Threads::kResident / Threads::kBlock)
    norm_long_kernel(NormForward<T, A> a) {
  constexpr int kVectors = Shape::kVectors;
  RowPart<Shape> part(a.cols, blockDim.x / 32);
  bool has_weight = a.weight != nullptr, has_bias = a.bias != nullptr, has_y = a.y != nullptr;
  a.x += part.column(), a.weight += part.column(), a.y += part.column();
  if constexpr (kCentred) a.bias += part.column();
  if constexpr (kAdd) a.residual += part.column(), a.h += part.column();

  LongPipeline<Shape, kCentred, kAdd> pipeline;
  enum { kX, kResidual };   // its tensors
  enum { kWeight, kBias };  // its parameters
  auto load_row = [&](int stage, int64_t row) {
    pipeline.load(stage, kX, a.x + row * a.cols, part, row < a.rows);
    if constexpr (kAdd) pipeline.load(stage, kResidual, a.residual + row * a.cols, part, row < a.rows);
    commit_copies();
  };
  if constexpr (!kAdd) {
    pipeline.load_parameter(kWeight, a.weight, part, has_weight);
    if constexpr (kCentred) pipeline.load_parameter(kBias, a.bias, part, has_bias);
  }
#pragma unroll
  for (int s = 0; s < kLongStages; ++s) load_row(s, part.base() + s * part.step());
  auto row_vector = [&](int stage, int i) {
    if constexpr (kAdd) return add_vectors(pipeline.read(stage, kX, i), pipeline.read(stage, kResidual, i));
    else return pipeline.read(stage, kX, i);
  };
  auto weight = [&](int i) {
    if constexpr (kAdd) return load_or(a.weight + part.offset(i), has_weight && part.holds(i), 1);
    else return pipeline.parameter(kWeight, i, has_weight, 1);
  };
  auto bias = [&](int i) {
    if constexpr (kAdd) return load_or(a.bias + part.offset(i), has_bias && part.holds(i), 0);
    else return pipeline.parameter(kBias, i, has_bias, 0);
  };

  Exchange<Span::cluster, Share<kCentred, A>, 4> exchange;
  A one_over_cols = A(1) / static_cast<A>(a.cols);
  A one_over_share = A(1) / static_cast<A>(max(1, part.share(exchange.warp())));
  auto publish = [&](int stage, int64_t row) {
    Vector<T> v[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      v[i] = row_vector(stage, i);
      if constexpr (kAdd)
        if (part.holds(i)) store(a.h + row * a.cols + part.offset(i), v[i]);
    }
    exchange.publish(share_moments<kCentred>(v, part, one_over_share));
  };

  wait_copies<kLongStages - 1>();
  if (part.base() < a.rows) publish(0, part.base());
  int stage = 0;
  for (int64_t row = part.base(); row < a.rows; row += part.step()) {
    int next = stage + 1 == kLongStages ? 0 : stage + 1;
    wait_copies<kLongStages - 2>();
    if (row + part.step() < a.rows) publish(next, row + part.step());
    Moments<A> moments = combine_shares(exchange.collect(), exchange.warps(), part, one_over_cols);
    A mean = moments.mean, rstd = reciprocal_deviation<kCentred>(moments.squares * one_over_cols + a.eps);
    if (a.stats && part.leads()) write_stats<kCentred>(a, row, mean, rstd);
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      if (has_y && part.holds(i))
        store(a.y + row * a.cols + part.offset(i),
              scaled<kCentred>(row_vector(stage, i), mean, rstd, weight(i), kCentred ? bias(i) : Vector<T>{}));
    load_row(stage, row + kLongStages * part.step());
    stage = next;
  }
  wait_copies<0>();
}

// -------------------------------------------------------------------------------------------------------- backward

template <typename T, typename A>
struct NormBackwardTensors {
  const T *dy, *dh, *x, *weight;
  const A *stats;
  T *dx;        // may be null
  A *partials;  // (grid, kSums, cols); may be null
  int64_t rows, cols;
};

constexpr int kStages = 2;

template <class Shape, bool kAdd>
using BackwardPipeline = SmemPipeline<Shape, kAdd ? 3 : 2, kStages, 1>;

template <int kSize, typename A>
__device__ inline void store_sums(A *to, const A (&sums)[kSize]) {
#pragma unroll
  for (int k = 0; k < kSize; k += kVectorSize<A>)
    *reinterpret_cast<uint4 *>(to + k) = reinterpret_cast<const uint4 &>(sums[k]);
}

// Adds up the sums of a block's rows, always in the same order, and writes them to the block's row of partial sums.
template <class Shape, int kSums, typename A>
__device__ inline void write_partials(A (&sums)[kSums][Shape::kVectors][Shape::kSize], const RowPart<Shape> &part,
                                      int row_warps, A *partials, int64_t cols) {
  int teams = blockDim.x / (32 * row_warps);
  int64_t group = Shape::kSpan == Span::cluster ? blockIdx.x / cluster_size() : blockIdx.x;
  partials += kSums * group * cols;
#pragma unroll
  for (int other = Shape::kLanes; other < 32; other *= 2)
#pragma unroll
    for (int s = 0; s < kSums; ++s)
#pragma unroll
      for (int i = 0; i < Shape::kVectors; ++i)
#pragma unroll
        for (int k = 0; k < Shape::kSize; ++k) sums[s][i][k] += __shfl_xor_sync(~0u, sums[s][i][k], other);
  auto store_all = [&](A *to) {
#pragma unroll
    for (int s = 0; s < kSums; ++s)
#pragma unroll
      for (int i = 0; i < Shape::kVectors; ++i)
        if (part.row_of_warp() == 0 && part.holds(i))
          store_sums(to + s * cols + part.column() + part.offset(i), sums[s][i]);
  };
  if (teams == 1) return store_all(partials);
  extern __shared__ uint4 memory[];  // the pipeline's, which has no copy in flight any more
  A *shared = reinterpret_cast<A *>(memory);
  __syncthreads();
  store_all(shared + part.team() * kSums * cols);
  __syncthreads();
  for (int c = threadIdx.x; c < kSums * cols; c += blockDim.x) {
    A sum = 0;
    for (int team = 0; team < teams; ++team) sum += shared[team * kSums * cols + c];
    partials[c] = sum;
  }
}

template <class Shape, class Threads, bool kCentred, bool kAdd, typename T, typename A>
__global__ void __launch_bounds__(Threads::kBlock, Threads::kResident / Threads::kBlock)
    norm_backward_kernel(NormBackwardTensors<T, A> a, int row_warps) {
  constexpr int kStats = kCentred ? 2 : 1, kSums = kCentred ? 2 : 1;
  RowPart<Shape> part(a.cols, row_warps);
  bool has_weight = a.weight != nullptr, has_dx = a.dx != nullptr;
  a.x += part.column(), a.dy += part.column(), a.weight += part.column(), a.dx += part.column();
  if constexpr (kAdd) a.dh += part.column();
  BackwardPipeline<Shape, kAdd> pipeline;
  enum { kX, kDy, kDh };  // its tensors
  enum { kWeight };       // its parameter
  auto load_row = [&](int stage, int64_t row) {
    pipeline.load(stage, kX, a.x + row * a.cols, part, row < a.rows);
    pipeline.load(stage, kDy, a.dy + row * a.cols, part, row < a.rows);
    if constexpr (kAdd) pipeline.load(stage, kDh, a.dh + row * a.cols, part, row < a.rows);
    commit_copies();
  };
  pipeline.load_parameter(kWeight, a.weight, part, has_weight);
#pragma unroll
  for (int s = 0; s < kStages; ++s) load_row(s, part.first_row() + s * part.step());
  auto stat = [&](int64_t row, int which) { return row < a.rows ? a.stats[kStats * row + which] : A(0); };
  A next_mean = kCentred ? stat(part.first_row(), 0) : A(0), next_rstd = stat(part.first_row(), kStats - 1);
  RowExchange<Shape, Sums<kSums, A>> exchange(row_warps);

  A columns[kSums][Shape::kVectors][Shape::kSize] = {};  // each column's sums of dy * xhat and of dy
  A one_over_cols = A(1) / static_cast<A>(a.cols);
  int stage = 0;
  for (int64_t base = part.base(); base < a.rows; base += part.step()) {
    int64_t row = base + part.own();
    A mean = next_mean, rstd = next_rstd;
    if constexpr (kCentred) next_mean = stat(row + part.step(), 0);
    next_rstd = stat(row + part.step(), kStats - 1);
    // f(k, x - mean, dy, g) for each element k of this thread's vector i of the row
    auto each = [&](int i, auto f) {
      auto x = widen(pipeline.read(stage, kX, i)), d = widen(pipeline.read(stage, kDy, i));
      auto w = widen(pipeline.parameter(kWeight, i, has_weight, 1));
#pragma unroll
      for (int k = 0; k < Shape::kSize; ++k) f(k, kCentred ? x[k] - mean : x[k], d[k], d[k] * w[k]);
    };

    wait_copies<kStages - 1>();
    Sums<kSums, A> sums = {};  // the row's, of g * xhat and of g
#pragma unroll
    for (int i = 0; i < Shape::kVectors; ++i)
      if (part.holds(i))
        each(i, [&](int k, A x, A d, A g) {
          A xhat = x * rstd;
          sums.value[0] += g * xhat, columns[0][i][k] += d * xhat;
          if constexpr (kCentred) sums.value[1] += g, columns[1][i][k] += d;
        });
    if constexpr (Shape::kSpan == Span::warp) sums = sum_lanes<Shape::kLanes>(sums);
    else sums = sum_row(sums, exchange);

    // dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) = rstd * g + c1 * (x - mean) + c0
    A c1 = -rstd * rstd * one_over_cols * sums.value[0], c0 = 0;
    if constexpr (kCentred) c0 = -rstd * one_over_cols * sums.value[1];
    if (has_dx && row < a.rows)
#pragma unroll
      for (int i = 0; i < Shape::kVectors; ++i)
        if (part.holds(i)) {
          Widened<T> dx;
          each(i, [&](int k, A x, A, A g) { dx[k] = g * rstd + (x * c1 + c0); });
          if constexpr (kAdd) {
            auto dh = widen(pipeline.read(stage, kDh, i));
#pragma unroll
            for (int k = 0; k < Shape::kSize; ++k) dx[k] += dh[k];
          }
          store(a.dx + row * a.cols + part.offset(i), narrow(dx));
        }
    load_row(stage, row + kStages * part.step());
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  wait_copies<0>();
  if (a.partials) write_partials<Shape>(columns, part, row_warps, a.partials, a.cols);
}

// Adds up the partial sums, (rows, kSums, cols), in a fixed order: dweight if blockIdx.y is 0, dbias if it is 1.
// Without rows they are 0.
constexpr int kSumCols = 16, kSumRows = 32;

template <typename T, typename A>
__global__ void __launch_bounds__(kSumCols *kSumRows)
    sum_partials_kernel(const A *partials, T *dweight, T *dbias, int64_t rows, int64_t cols) {
  __shared__ A sums[kSumRows][kSumCols];
  T *out = blockIdx.y == 0 ? dweight : dbias;
  if (!out) return;
  for (int64_t first = int64_t{blockIdx.x} * kSumCols; first < cols; first += int64_t{gridDim.x} * kSumCols) {
    int64_t col = first + threadIdx.x;
    A sum = 0;
    if (col < cols)
#pragma unroll 8
      for (int64_t row = threadIdx.y; row < rows; row += kSumRows)
        sum += partials[(gridDim.y * row + blockIdx.y) * cols + col];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && col < cols) {
      for (int r = 1; r < kSumRows; ++r) sum += sums[r][threadIdx.x];
      out[col] = narrow<T>(sum);
    }
    __syncthreads();
  }
}

// ------------------------------------------------------------------------------------ kernels for any size and address

// A block for each row, element by element. The row is read again for each pass.
constexpr int kAnyThreads = 1024;

template <bool kCentred, bool kAdd, typename T, typename A>
__global__ void __launch_bounds__(kAnyThreads) norm_any_kernel(NormForward<T, A> a) {
  Exchange<Span::block, Sums<1, A>> exchange;
  A cols = static_cast<A>(a.cols);
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    int64_t at = row * a.cols;
    const T *from = kAdd ? a.h + at : a.x + at;  // a thread reads only the elements of h that it has written
    Sums<1, A> sum = {}, squares = {};
    for (int64_t c = threadIdx.x; c < a.cols; c += blockDim.x) {
      A x = widen(a.x[at + c]);
      if constexpr (kAdd) {
        T h = narrow<T>(x + widen(a.residual[at + c]));
        a.h[at + c] = h, x = widen(h);
      }
      sum.value[0] += x;
    }
    A mean = 0;
    if constexpr (kCentred) mean = sum_row(sum, exchange).value[0] / cols;
    for (int64_t c = threadIdx.x; c < a.cols; c += blockDim.x)
      squares.value[0] += (widen(from[c]) - mean) * (widen(from[c]) - mean);
    A rstd = reciprocal_deviation<kCentred>(sum_row(squares, exchange).value[0] / cols + a.eps);
    if (a.stats && threadIdx.x == 0) {
      if constexpr (kCentred) a.stats[2 * row] = mean, a.stats[2 * row + 1] = rstd;
      else a.stats[row] = rstd;
    }
    for (int64_t c = threadIdx.x; a.y && c < a.cols; c += blockDim.x) {
      A xhat = (widen(from[c]) - mean) * rstd;
      a.y[at + c] = narrow<T>(xhat * (a.weight ? widen(a.weight[c]) : A(1)) + (a.bias ? widen(a.bias[c]) : A(0)));
    }
  }
}

template <bool kCentred, bool kAdd, typename T, typename A>
__global__ void __launch_bounds__(kAnyThreads) norm_backward_any_kernel(NormBackwardTensors<T, A> a) {
  constexpr int kStats = kCentred ? 2 : 1;
  Exchange<Span::block, Sums<2, A>> exchange;
  A cols = static_cast<A>(a.cols);
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    int64_t at = row * a.cols;
    A mean = kCentred ? a.stats[kStats * row] : A(0), rstd = a.stats[kStats * row + kStats - 1];
    auto xhat = [&](int64_t c) { return (widen(a.x[at + c]) - mean) * rstd; };
    auto g = [&](int64_t c) { return widen(a.dy[at + c]) * (a.weight ? widen(a.weight[c]) : A(1)); };
    Sums<2, A> sums = {};
    for (int64_t c = threadIdx.x; c < a.cols; c += blockDim.x) sums.value[0] += g(c), sums.value[1] += g(c) * xhat(c);
    sums = sum_row(sums, exchange);
    A c0 = kCentred ? sums.value[0] / cols : A(0), c1 = sums.value[1] / cols;
    for (int64_t c = threadIdx.x; c < a.cols; c += blockDim.x) {
      A dx = rstd * (g(c) - c0 - xhat(c) * c1);
      if constexpr (kAdd) dx += widen(a.dh[at + c]);
      a.dx[at + c] = narrow<T>(dx);
    }
  }
}

// A thread for each column. Each blockIdx.y has a part of the rows.
template <bool kCentred, typename T, typename A>
__global__ void __launch_bounds__(kAnyThreads) norm_partials_any_kernel(NormBackwardTensors<T, A> a) {
  constexpr int kStats = kCentred ? 2 : 1, kSums = kCentred ? 2 : 1;
  for (int64_t c = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; c < a.cols; c += int64_t{gridDim.x} * blockDim.x) {
    A dweight = 0, dbias = 0;
    for (int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) {
      A d = widen(a.dy[row * a.cols + c]), mean = kCentred ? a.stats[kStats * row] : A(0);
      dweight += d * ((widen(a.x[row * a.cols + c]) - mean) * a.stats[kStats * row + kStats - 1]);
      dbias += d;
    }
    A *to = a.partials + int64_t{kSums} * blockIdx.y * a.cols + c;
    to[0] = dweight;
    if constexpr (kCentred) to[a.cols] = dbias;
  }
}

// ------------------------------------------------------------------------------------------------ launchers, forward

inline unsigned any_block(int64_t cols) {
  return static_cast<unsigned>(std::min<int64_t>(kAnyThreads, ceil_div(std::max<int64_t>(cols, 1), 32) * 32));
}

template <class Shape, bool kCentred, bool kAdd, typename T, typename A>
Status norm_short(const char *op, const NormForward<T, A> &a, const RowPlan &plan, void *stream) {
  constexpr bool kWithinWarp = Shape::kSpan == Span::warp;
  using Threads = std::conditional_t<kWithinWarp, Threads<256, 1024>, Threads<512, 1024>>;
  int teams = kWithinWarp ? Threads::kBlock / 32 : 1;
  unsigned blocks = grid_size(ceil_div(a.rows, int64_t{teams} * Shape::kRowsPerWarp));
  return launch_clusters(op, norm_kernel<Shape, Threads, kCentred, kAdd, T, A>, blocks, 32u * teams * plan.warps, 1, 0,
                         stream, a);
}

template <bool kCentred, bool kAdd, typename T, typename A>
Status norm_any(const char *op, const NormForward<T, A> &a, void *stream) {
  auto s = static_cast<cudaStream_t>(stream);
  norm_any_kernel<kCentred, kAdd><<<grid_size(a.rows), any_block(a.cols), 0, s>>>(a);
  return check_launch(op);
}

template <class Shape, bool kCentred, bool kAdd, typename T, typename A>
Status norm_long(const char *op, const NormForward<T, A> &a, const RowPlan &plan, const DeviceLimits &device,
                 void *stream) {
  using Threads = Threads<512, 512>;
  constexpr auto kernel = norm_long_kernel<Shape, Threads, kCentred, kAdd, T, A>;
  RowGrid grid;
  AOT_TRY(
      (row_grid<kernel, Shape, LongPipeline<Shape, kCentred, kAdd>, Threads>(op, plan, device, a.rows, a.rows, &grid)));
  if (grid.blocks == 0) return norm_any<kCentred, kAdd>(op, a, stream);
  return launch_clusters(op, kernel, grid.blocks, grid.threads, plan.cluster, grid.shared, stream, a);
}

// The plans are those measured fastest on an H200 (docs/lab_notes.md). Eight vectors for each thread need too many
// registers if kCrowded.
template <bool kCentred, bool kAdd, typename T, typename A>
Status norm_rows(const char *op, const NormForward<T, A> &a, const DeviceLimits &device, void *stream) {
  constexpr bool kCrowded = kAdd || (kCentred && sizeof(T) == 2);
  constexpr int kVectors = 4, kMost = kCrowded ? 4 : 8,
                kBytes = 16 * kLongStages * (kAdd ? 2 : 1) + (kAdd ? 0 : 16 + 16 * kCentred);
  int64_t vectors = a.cols / kVectorSize<T>;
  RowPlan plan;
  if (a.cols > 0 && a.cols % kVectorSize<T> == 0 && aligned(a.x, a.residual, a.weight, a.bias, a.y, a.h)) {
    plan = plan_within_warp(vectors, kVectors);
    if (plan.lanes == 0) plan = first_that_holds(vectors, {{32, kVectors, 16}, {32, kMost, 16}}, 0, device);
    if (plan.lanes == 0)
      plan = first_that_holds(vectors,
                              {{32, kMost, 8, 2},
                               {32, kMost, 8, 4},
                               {32, kMost, 8, 8},
                               {32, kMost, 16, 8},
                               {32, kMost, 8, 16},
                               {32, kMost, 16, 16}},
                              kBytes, device);
  }
  if (plan.lanes == 0) return norm_any<kCentred, kAdd>(op, a, stream);
  if (plan.cluster > 1)
    return norm_long<RowShape<T, 32, kMost, Span::cluster>, kCentred, kAdd>(op, a, plan, device, stream);
  auto run = [&](auto shape) { return norm_short<decltype(shape), kCentred, kAdd>(op, a, plan, stream); };
  if (plan.warps == 1) return dispatch_within_warp<T, kVectors>(plan, run);
  if (plan.vectors == kVectors) return run(RowShape<T, 32, kVectors, Span::block>());
  return run(RowShape<T, 32, kMost, Span::block>());
}

// Whether all tensors have one dtype, the weight one line, and nothing is added to it.
template <class Op>
Status check_one_dtype(const Op &op, DType x, const Spec &weight, const Spec &residual) {
  const bool one = (!weight || weight.dtype == x) && (!residual || residual.dtype == x);
  if (one && op.weight_rows(weight) == 1 && op.weight_offset() == 0) return kOk;
  return fail(kNotImplemented,
              "%s: on CUDA, expected tensors of one dtype, a weight of shape normalized_shape and weight_offset 0",
              Op::name);
}

template <class Op>
Status norm_cuda(const Op &op, const Tensor *in, const Tensor *out, void *stream) {
  DeviceLimits device;
  AOT_TRY(check_one_dtype(op, in[Op::kX].dtype, in[Op::kWeight], slot<Op::kResidual>(in)));
  AOT_TRY(device_limits(Op::name, &device));
  const Tensor &x = in[Op::kX];
  return dispatch(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    NormForward<T, A> a{x.as<const T>(),
                        slot<Op::kResidual>(in).template as<const T>(),
                        in[Op::kWeight].template as<const T>(),
                        slot<Op::kBias>(in).template as<const T>(),
                        out[Op::kY].template as<T>(),
                        slot<Op::kH>(out).template as<T>(),
                        out[Op::kStatsOut].template as<A>(),
                        op.rows(x),
                        op.cols(),
                        static_cast<A>(op.eps(x.dtype))};
    return norm_rows<Op::kCentred, Op::kAdd>(Op::name, a, device, stream);
  });
}

// ----------------------------------------------------------------------------------------------- launchers, backward

template <bool kCentred, bool kAdd, typename T, typename A>
Status norm_backward_any(const char *op, const NormBackwardTensors<T, A> &a, int64_t partial_rows, void *stream) {
  auto s = static_cast<cudaStream_t>(stream);
  unsigned block = any_block(a.cols);
  if (a.dx) {
    norm_backward_any_kernel<kCentred, kAdd><<<grid_size(a.rows), block, 0, s>>>(a);
    AOT_TRY(check_launch(op));
  }
  if (!a.partials) return kOk;
  dim3 grid(grid_size(ceil_div(a.cols, block)), static_cast<unsigned>(partial_rows));
  norm_partials_any_kernel<kCentred><<<grid, block, 0, s>>>(a);
  return check_launch(op);
}

// dx and the partial sums. *partial_rows: on entry the most rows of partial sums, on return those written.
template <class Shape, class Threads, bool kCentred, bool kAdd, typename T, typename A>
Status norm_backward_shape(const char *op, const NormBackwardTensors<T, A> &a, const RowPlan &plan,
                           const DeviceLimits &device, int64_t *partial_rows, void *stream) {
  constexpr auto kernel = norm_backward_kernel<Shape, Threads, kCentred, kAdd, T, A>;
  RowGrid grid;
  AOT_TRY((
      row_grid<kernel, Shape, BackwardPipeline<Shape, kAdd>, Threads>(op, plan, device, a.rows, *partial_rows, &grid)));
  if (grid.blocks == 0) return norm_backward_any<kCentred, kAdd>(op, a, *partial_rows, stream);
  *partial_rows = grid.blocks / plan.cluster;
  return launch_clusters(op, kernel, grid.blocks, grid.threads, plan.cluster, grid.shared, stream, a, plan.warps);
}

// The plans are those measured fastest on an H200 (docs/lab_notes.md). About 64 KB in flight for each multiprocessor
// are best: less does not hide the latency of the memory, more makes it slower. Spilled registers cost more than all
// else.
template <bool kCentred, bool kAdd, typename T, typename A>
Status norm_backward_rows(const char *op, const NormBackwardTensors<T, A> &a, const DeviceLimits &device,
                          int64_t *partial_rows, void *stream) {
  constexpr bool kCrowded = kCentred && sizeof(T) == 2;
  constexpr int kBytes = 16 * ((kAdd ? 3 : 2) * kStages + 1), kOneVectorWarps = kCrowded ? 2 : 8;
  int64_t vectors = a.cols / kVectorSize<T>;
  RowPlan plan;
  if (a.cols % kVectorSize<T> == 0 && aligned(a.dy, a.dh, a.x, a.weight, a.dx, a.partials)) {
    plan = plan_within_warp(vectors, 1);
    if (plan.lanes == 0)
      plan = first_that_holds(vectors, {{32, 1, kOneVectorWarps}, {32, 2, 16}, {32, 4, 16}}, kBytes, device);
    if (plan.lanes == 0 && sizeof(T) == 2)
      plan =
          first_that_holds(vectors, {{32, 4, 16, 2}, {32, 4, 16, 4}, {32, 4, 16, 8}, {32, 4, 16, 16}}, kBytes, device);
    if (plan.lanes == 0)
      plan = first_that_holds(
          vectors, {{32, 4, 8, 2}, {32, 4, 8, 4}, {32, 4, 8, 8}, {32, 4, 16, 8}, {32, 4, 8, 16}, {32, 4, 16, 16}},
          kBytes, device);
  }
  if (plan.lanes == 0) return norm_backward_any<kCentred, kAdd>(op, a, *partial_rows, stream);
  auto run = [&](auto shape, auto threads) {
    return norm_backward_shape<decltype(shape), decltype(threads), kCentred, kAdd>(op, a, plan, device, partial_rows,
                                                                                   stream);
  };
  if (plan.cluster > 1) return run(RowShape<T, 32, 4, Span::cluster>(), Threads<512, 512>());
  if (plan.warps == 1)
    return dispatch_within_warp<T, 1>(plan, [&](auto shape) { return run(shape, Threads<256, 1024>()); });
  if (plan.vectors == 1) return run(RowShape<T, 32, 1, Span::block>(), Threads<512, 1024>());
  if (plan.vectors == 2) return run(RowShape<T, 32, 2, Span::block>(), Threads<512, 512>());
  return run(RowShape<T, 32, 4, Span::block>(), Threads<512, 512>());
}

template <class Op>
Status norm_backward_cuda(const Op &op, const Tensor *in, const Tensor *out, void *stream) {
  DeviceLimits device;
  AOT_TRY(check_one_dtype(op, in[Op::kDy].dtype, in[Op::kWeight], in[Op::kX]));
  AOT_TRY(device_limits(Op::name, &device));
  const Tensor &x = in[Op::kX], &dweight = out[Op::kDweight], &dbias = slot<Op::kDbias>(out), &work = out[Op::kWork];
  const Tensor &dresidual = slot<Op::kDresidual>(out), &dx = out[Op::kDx] ? out[Op::kDx] : dresidual;
  return dispatch(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    constexpr bool kCentred = Op::kCentred;
    bool sums = dweight || dbias;
    int64_t rows = op.rows(x), cols = op.cols(), partials = partial_rows(rows, cols);
    A *stats = in[Op::kStatsIn].template as<A>();
    if ((sums || !stats) && !work) return fail(kConventionMisused, "%s: workspace is missing", Op::name);
    if (!stats && rows > 0 && cols > 0) {  // in the workspace, after the partial sums
      stats = work.as<A>() + Op::kSums * partials * cols;
      NormForward<T, A> recompute{
          x.as<const T>(), {}, {}, {}, {}, {}, stats, rows, cols, static_cast<A>(op.eps(x.dtype))};
      AOT_TRY((norm_rows<kCentred, false>(Op::name, recompute, device, stream)));
    }
    NormBackwardTensors<T, A> a{in[Op::kDy].template as<const T>(),
                                slot<Op::kDh>(in).template as<const T>(),
                                x.as<const T>(),
                                in[Op::kWeight].template as<const T>(),
                                stats,
                                dx.template as<T>(),
                                sums ? work.as<A>() : nullptr,
                                rows,
                                cols};
    if (x.size() > 0) AOT_TRY((norm_backward_rows<kCentred, Op::kAdd>(Op::name, a, device, &partials, stream)));
    if (dresidual && dx.data != dresidual.data)
      AOT_TRY(check_cuda(Op::name, cudaMemcpyAsync(dresidual.data, dx.data, x.size() * sizeof(T),
                                                   cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream))));
    if (!sums) return kOk;
    dim3 grid(grid_size(ceil_div(cols, kSumCols)), Op::kSums), block(kSumCols, kSumRows);
    sum_partials_kernel<<<grid, block, 0, static_cast<cudaStream_t>(stream)>>>(a.partials, dweight.as<T>(),
                                                                               dbias.as<T>(), partials, cols);
    return check_launch(Op::name);
  });
}

}  // namespace AOT_ISA
}  // namespace aot
