// The norms on CUDA, forward and backward: kernels and launchers, which an operator instantiates (../norm.h).
#pragma once
#include "norm.h"
#include "row_loop.cuh"

namespace aot {
inline namespace AOT_ISA {

// --------------------------------------------------------------------------------------------------------- moments

__device__ inline float reciprocal_root(float x) { return rsqrtf(x); }
__device__ inline double reciprocal_root(double x) { return rsqrt(x); }

// 1 / sqrt(x); of a variance that has overflowed NaN: 0 would make the row's result one of the bias alone. A mean
// square has 0, as the formula does and torch.
template <bool kCentred, typename A>
__device__ inline A reciprocal_deviation(A x) {
  return kCentred ? fma(x, A(0), reciprocal_root(x)) : reciprocal_root(x);
}

// squares: the sum of the squares of the differences from the mean, or, without one, of the numbers themselves
template <typename A>
struct Moments {
  A mean, squares;
};

// Keeps the compiler from holding on to what a vector has been widened to: a row of 16 bits waits in half the
// registers.
template <typename T>
__device__ inline void stay_packed(Vector<T> &v) {
  if constexpr (sizeof(T) == 2) asm volatile("" : "+r"(v.word[0]), "+r"(v.word[1]), "+r"(v.word[2]), "+r"(v.word[3]));
}

template <class Shape, typename A>
__device__ inline A sum_share(const Vector<typename Shape::T> (&v)[Shape::kVectors]) {
  A sum = 0;
#pragma unroll
  for (int i = 0; i < Shape::kVectors; ++i) {
    auto x = widen(v[i]);
    A vector_sum = 0;  // one for each vector: shorter chains of additions
#pragma unroll
    for (int k = 0; k < Shape::kSize; ++k) vector_sum += x[k];
    sum += vector_sum;  // past the row there are zeros
  }
  return sum_lanes<Shape::kLanes>(sum);
}

template <class Shape, typename A>
__device__ inline A sum_share_squares(Vector<typename Shape::T> (&v)[Shape::kVectors], const RowPart<Shape> &part,
                                      A mean) {
  A squares = 0;
#pragma unroll
  for (int i = 0; i < Shape::kVectors; ++i) {
    stay_packed(v[i]);
    auto x = widen(v[i]);
    A vector_squares = 0;
#pragma unroll
    for (int k = 0; k < Shape::kSize; ++k) vector_squares += (x[k] - mean) * (x[k] - mean);
    squares += part.holds(i) ? vector_squares : A(0);
  }
  return sum_lanes<Shape::kLanes>(squares);
}

// What the warps of a row tell each other.
template <bool kCentred, typename A>
using Share = std::conditional_t<kCentred, Moments<A>, Sums<1, A>>;

// Of a row that is in registers, in two passes over each warp's share: its mean, then the squares around that. The
// shares' moments combine without loss (Chan, Golub and LeVeque 1983), so that a row of several warps needs one
// exchange only.
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

// A row within a warp is one share.
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
  T *y, *h;  // y may be null: then only the statistics are wanted
  A *stats;
  int64_t rows, cols;
  A eps;
};

// The parameters are read before the row has come, if a thread has as few vectors as kEarlyVectors; else after, for
// kGroup of them at once.
constexpr int kEarlyVectors = 2;
template <int kVectors, bool kCentred>
constexpr int kGroup = !kCentred       ? 4
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

// A row, or a few short ones, straight into registers, by blocks that come and go: many of them keep the memory busy,
// as one waits and another sums.
template <class Shape, class Threads, bool kCentred, bool kAdd, typename T, typename A>
__global__ void __launch_bounds__(Threads::kBlock, Threads::kResident / Threads::kBlock)
    norm_kernel(NormForward<T, A> a) {
  constexpr int kVectors = Shape::kVectors, kTogether = kGroup<kVectors, kCentred>;
  constexpr bool kEarly = kVectors <= kEarlyVectors;
  RowPart<Shape> part(a.cols, Shape::kSpan == Span::warp ? 1 : blockDim.x / 32);
  int64_t row = part.first();
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
      stay_packed(v[i]);
      if (part.holds(i))
        store(a.y + at + part.offset(i), scaled<kCentred>(v[i], mean, rstd, w[i - first], b[i - first]));
    }
  }
}

// Rows of clusters that stay, for they keep weight and bias in shared memory, which are as many bytes as a row. The
// next row's moments are told before this one is written: what the blocks tell each other travels meanwhile. With an
// addition the room goes to two rows.
constexpr int kLongStages = 3;
template <class Shape, bool kCentred, bool kAdd>
using LongInbox = Inbox<Shape, kAdd ? 2 : 1, kLongStages,
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

  LongInbox<Shape, kCentred, kAdd> inbox;
  auto fetch = [&](int stage, int64_t row) {
    inbox.fetch(stage, 0, a.x + row * a.cols, part, row < a.rows);
    if constexpr (kAdd) inbox.fetch(stage, 1, a.residual + row * a.cols, part, row < a.rows);
    commit_copies();
  };
  if constexpr (!kAdd) {
    inbox.fetch_kept(0, a.weight, part, has_weight);
    if constexpr (kCentred) inbox.fetch_kept(1, a.bias, part, has_bias);
  }
#pragma unroll
  for (int s = 0; s < kLongStages; ++s) fetch(s, part.base() + s * part.step());
  auto taken = [&](int stage, int i) {
    if constexpr (kAdd) return add_vectors(inbox.take(stage, 0, i), inbox.take(stage, 1, i));
    else return inbox.take(stage, 0, i);
  };
  auto weight = [&](int i) {
    if constexpr (kAdd) return load_or(a.weight + part.offset(i), has_weight && part.holds(i), 1);
    else return inbox.kept(0, i, has_weight, 1);
  };
  auto bias = [&](int i) {
    if constexpr (kAdd) return load_or(a.bias + part.offset(i), has_bias && part.holds(i), 0);
    else return inbox.kept(1, i, has_bias, 0);
  };

  Exchange<Span::cluster, Share<kCentred, A>, 4> exchange;
  A one_over_cols = A(1) / static_cast<A>(a.cols);
  A one_over_share = A(1) / static_cast<A>(max(1, part.share(exchange.warp())));
  auto tell = [&](int stage, int64_t row) {
    Vector<T> v[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      v[i] = taken(stage, i);
      if constexpr (kAdd)
        if (part.holds(i)) store(a.h + row * a.cols + part.offset(i), v[i]);
    }
    exchange.publish(share_moments<kCentred>(v, part, one_over_share));
  };

  wait_copies<kLongStages - 1>();
  if (part.base() < a.rows) tell(0, part.base());
  int stage = 0;
  for (int64_t row = part.base(); row < a.rows; row += part.step()) {
    int next = stage + 1 == kLongStages ? 0 : stage + 1;
    wait_copies<kLongStages - 2>();
    if (row + part.step() < a.rows) tell(next, row + part.step());
    Moments<A> moments = combine_shares(exchange.collect(), exchange.warps(), part, one_over_cols);
    A mean = moments.mean, rstd = reciprocal_deviation<kCentred>(moments.squares * one_over_cols + a.eps);
    if (a.stats && part.leads()) write_stats<kCentred>(a, row, mean, rstd);
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      if (has_y && part.holds(i))
        store(a.y + row * a.cols + part.offset(i),
              scaled<kCentred>(taken(stage, i), mean, rstd, weight(i), kCentred ? bias(i) : Vector<T>{}));
    fetch(stage, row + kLongStages * part.step());
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

// A thread keeps kSums sums for each of its columns, of which it has twice as many where a value has 16 bits.
constexpr int kStages = 2;

template <class Shape, bool kAdd>
using BackwardInbox = Inbox<Shape, kAdd ? 3 : 2, kStages, 1>;

template <int kSize, typename A>
__device__ inline void store_sums(A *to, const A (&sums)[kSize]) {
#pragma unroll
  for (int k = 0; k < kSize; k += kVectorSize<A>)
    *reinterpret_cast<uint4 *>(to + k) = reinterpret_cast<const uint4 &>(sums[k]);
}

// Adds what the rows of one block have summed, always in the same order, and writes it to the block's row of partials.
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
        if (part.group() == 0 && part.holds(i)) store_sums(to + s * cols + part.column() + part.offset(i), sums[s][i]);
  };
  if (teams == 1) return store_all(partials);
  extern __shared__ uint4 memory[];  // the inbox, now that no row is on its way
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
  BackwardInbox<Shape, kAdd> inbox;
  auto fetch = [&](int stage, int64_t row) {
    inbox.fetch(stage, 0, a.x + row * a.cols, part, row < a.rows);
    inbox.fetch(stage, 1, a.dy + row * a.cols, part, row < a.rows);
    if constexpr (kAdd) inbox.fetch(stage, 2, a.dh + row * a.cols, part, row < a.rows);
    commit_copies();
  };
  inbox.fetch_kept(0, a.weight, part, has_weight);
#pragma unroll
  for (int s = 0; s < kStages; ++s) fetch(s, part.first() + s * part.step());
  auto stat = [&](int64_t row, int which) { return row < a.rows ? a.stats[kStats * row + which] : A(0); };
  A next_mean = kCentred ? stat(part.first(), 0) : A(0), next_rstd = stat(part.first(), kStats - 1);
  RowExchange<Shape, Sums<kSums, A>> exchange(row_warps);

  A columns[kSums][Shape::kVectors][Shape::kSize] = {};  // sums of dy * xhat, of dy
  A one_over_cols = A(1) / static_cast<A>(a.cols);
  int stage = 0;
  for (int64_t turn = part.base(); turn < a.rows; turn += part.step()) {
    int64_t row = turn + part.own();
    A mean = next_mean, rstd = next_rstd;
    if constexpr (kCentred) next_mean = stat(row + part.step(), 0);
    next_rstd = stat(row + part.step(), kStats - 1);
    // this thread's vector i of the row, element by element: f(k, x - mean, dy, g)
    auto each = [&](int i, auto f) {
      auto x = widen(inbox.take(stage, 0, i)), d = widen(inbox.take(stage, 1, i));
      auto w = widen(inbox.kept(0, i, has_weight, 1));
#pragma unroll
      for (int k = 0; k < Shape::kSize; ++k) f(k, kCentred ? x[k] - mean : x[k], d[k], d[k] * w[k]);
    };

    wait_copies<kStages - 1>();
    Sums<kSums, A> sums = {};  // of g * xhat, of g
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
            auto dh = widen(inbox.take(stage, 2, i));
#pragma unroll
            for (int k = 0; k < Shape::kSize; ++k) dx[k] += dh[k];
          }
          store(a.dx + row * a.cols + part.offset(i), narrow(dx));
        }
    fetch(stage, row + kStages * part.step());
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  wait_copies<0>();
  if (a.partials) write_partials<Shape>(columns, part, row_warps, a.partials, a.cols);
}

// Adds the rows of partials, (rows, kSums, cols), in a fixed order: blockIdx.y 0 gives dweight and 1 dbias. No rows:
// zeros.
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

// A block to a row, element by element, reading the row again for each pass.
constexpr int kAnyThreads = 1024;

template <bool kCentred, bool kAdd, typename T, typename A>
__global__ void __launch_bounds__(kAnyThreads) norm_any_kernel(NormForward<T, A> a) {
  Exchange<Span::block, Sums<1, A>> exchange;
  A cols = static_cast<A>(a.cols);
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    int64_t at = row * a.cols;
    const T *from = kAdd ? a.h + at : a.x + at;  // each thread reads of h what it has written itself
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

// A thread to a column, each row of blocks summing its part of the rows.
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
      (row_grid<kernel, Shape, LongInbox<Shape, kCentred, kAdd>, Threads>(op, plan, device, a.rows, a.rows, &grid)));
  if (grid.blocks == 0) return norm_any<kCentred, kAdd>(op, a, stream);
  return launch_clusters(op, kernel, grid.blocks, grid.threads, plan.cluster, grid.shared, stream, a);
}

// Measured on an H200 (docs/lab_notes.md). A block holds a row of eight vectors a thread, but where registers do not.
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

template <class Op>
Status norm_cuda(const Op &op, const Tensor *in, const Tensor *out, void *stream) {
  DeviceLimits device;
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

// dx, and the partials, of which *partial_rows are there: it comes back as the number of rows written.
template <class Shape, class Threads, bool kCentred, bool kAdd, typename T, typename A>
Status norm_backward_shape(const char *op, const NormBackwardTensors<T, A> &a, const RowPlan &plan,
                           const DeviceLimits &device, int64_t *partial_rows, void *stream) {
  constexpr auto kernel = norm_backward_kernel<Shape, Threads, kCentred, kAdd, T, A>;
  RowGrid grid;
  AOT_TRY(
      (row_grid<kernel, Shape, BackwardInbox<Shape, kAdd>, Threads>(op, plan, device, a.rows, *partial_rows, &grid)));
  if (grid.blocks == 0) return norm_backward_any<kCentred, kAdd>(op, a, *partial_rows, stream);
  *partial_rows = grid.blocks / plan.cluster;
  return launch_clusters(op, kernel, grid.blocks, grid.threads, plan.cluster, grid.shared, stream, a, plan.warps);
}

// Measured on an H200 (docs/lab_notes.md). The best is what has 64 KB on their way to a multiprocessor: less does not
// fill the memory's time, more makes it slower. Spilling a register costs more than anything else here.
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
  AOT_TRY(device_limits(Op::name, &device));
  const Tensor &x = in[Op::kX], &dweight = out[Op::kDweight], &dbias = slot<Op::kDbias>(out), &work = out[Op::kWork];
  return dispatch(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    constexpr bool kCentred = Op::kCentred;
    bool sums = dweight || dbias;
    int64_t rows = op.rows(x), cols = op.cols(), partials = partial_rows(rows, cols);
    A *stats = in[Op::kStatsIn].template as<A>();
    if ((sums || !stats) && !work) return fail(kConventionMisused, "%s: workspace is missing", Op::name);
    if (!stats && rows > 0 && cols > 0) {  // in the workspace, behind the partials
      stats = work.as<A>() + Op::kSums * partials * cols;
      NormForward<T, A> again{x.as<const T>(), {}, {}, {}, {}, {}, stats, rows, cols, static_cast<A>(op.eps(x.dtype))};
      AOT_TRY((norm_rows<kCentred, false>(Op::name, again, device, stream)));
    }
    NormBackwardTensors<T, A> a{in[Op::kDy].template as<const T>(),
                                slot<Op::kDh>(in).template as<const T>(),
                                x.as<const T>(),
                                in[Op::kWeight].template as<const T>(),
                                stats,
                                out[Op::kDx].template as<T>(),
                                sums ? work.as<A>() : nullptr,
                                rows,
                                cols};
    if (x.size() > 0) AOT_TRY((norm_backward_rows<kCentred, Op::kAdd>(Op::name, a, device, &partials, stream)));
    if (!sums) return kOk;
    dim3 grid(grid_size(ceil_div(cols, kSumCols)), Op::kSums), block(kSumCols, kSumRows);
    sum_partials_kernel<<<grid, block, 0, static_cast<cudaStream_t>(stream)>>>(a.partials, dweight.as<T>(),
                                                                               dbias.as<T>(), partials, cols);
    return check_launch(Op::name);
  });
}

}  // namespace AOT_ISA
}  // namespace aot
