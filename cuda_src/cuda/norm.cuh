// The norms on CUDA, forward and backward: kernels and launchers, which an operator instantiates (../norm.h).
#pragma once
#include "../norm.h"
#include "row.cuh"

namespace aot {
inline namespace AOT_ISA {

// --------------------------------------------------------------------------------------------------------- moments

__device__ inline float reciprocal_root(float x) { return rsqrtf(x); }
__device__ inline double reciprocal_root(double x) { return rsqrt(x); }

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

template <class Shape, bool kCentred, typename A>
using NormExchange = RowExchange<Shape, std::conditional_t<kCentred, Moments<A>, Sums<1, A>>>;

// Of a row that is in registers, in two passes over each warp's share: its mean, then the squares around that. The
// shares' moments combine without loss (Chan, Golub and LeVeque 1983), so that a row of several warps needs one
// exchange only.
template <bool kCentred, class Shape, class Exchange, typename A>
__device__ inline Moments<A> row_moments(Vector<typename Shape::T> (&v)[Shape::kVectors], const RowPart<Shape> &part,
                                         A one_over_share, A one_over_cols, Exchange &exchange) {
  A mean = 0;
  if constexpr (kCentred) mean = sum_share<Shape, A>(v) * one_over_share;
  A squares = sum_share_squares(v, part, mean);
  if constexpr (Shape::kSpan == Span::warp) return {mean, squares};
  else if constexpr (!kCentred) return {A(0), sum_warps(Sums<1, A>{{squares}}, exchange).value[0]};
  else {
    const Moments<A> *all = exchange.all({mean, squares});
    A sum = squares = 0;
#pragma unroll 1
    for (int w = lane_index(); w < exchange.warps(); w += 32) sum += part.share(w) * all[w].mean;
    mean = sum_lanes<32>(sum) * one_over_cols;
#pragma unroll 1
    for (int w = lane_index(); w < exchange.warps(); w += 32)
      squares += all[w].squares + part.share(w) * (all[w].mean - mean) * (all[w].mean - mean);
    return {mean, sum_lanes<32>(squares)};
  }
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

// Vectors of a row, and of one that is longer than a block, that a thread takes; warps of a block that is not to be in
// a cluster; threads of a block that has whole rows in its warps, and how many a multiprocessor is to hold of them.
constexpr int kForwardVectors = 4, kForwardLongVectors = 4, kForwardWarps = 16, kForwardWarpBlock = 256;
constexpr int kForwardResident = 1024;

// Rows that a warp, a block or a cluster takes one after another. With one, it is loaded into registers: many blocks
// that come and go keep the memory busy. With several, or all (0), the next travels while one is worked on.
constexpr int kWarpTurns = 1, kBlockTurns = 1, kClusterTurns = 0;
template <Span kSpan>
constexpr int kForwardTurns = kSpan == Span::warp    ? kWarpTurns
                              : kSpan == Span::block ? kBlockTurns
                                                     : kClusterTurns;

// The parameters are read before the row has come, if a thread has as few vectors as kEarlyVectors; else after, for
// kGroup of them at once.
constexpr int kEarlyVectors = 2;
template <Span kSpan, bool kCentred>
constexpr int kGroup = (kCentred ? 2 : 4) / (kSpan == Span::cluster ? 2 : 1);

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

template <class Shape, bool kCentred, bool kAdd, typename T, typename A>
__global__ void __launch_bounds__(Shape::kSpan == Span::warp ? kForwardWarpBlock : 32 * kMaxBlockWarps,
                                  Shape::kSpan == Span::warp ? kForwardResident / kForwardWarpBlock : 1)
    norm_kernel(NormForward<T, A> a) {
  constexpr int kVectors = Shape::kVectors, kTurns = kForwardTurns<Shape::kSpan>,
                kTogether = kGroup<Shape::kSpan, kCentred>;
  constexpr bool kAhead = kTurns != 1, kEarly = kVectors <= kEarlyVectors;
  using In = Inbox<Shape, kAdd ? 2 : 1, 1>;
  RowPart<Shape> part(a.cols, a.rows, kTurns);
  bool has_weight = a.weight != nullptr, has_bias = a.bias != nullptr, has_y = a.y != nullptr;
  a.x += part.column(), a.weight += part.column(), a.y += part.column();
  if constexpr (kCentred) a.bias += part.column();
  if constexpr (kAdd) a.residual += part.column(), a.h += part.column();

  In inbox;
  auto fetch = [&](int64_t row) {
    inbox.fetch(0, 0, a.x + row * a.cols, part, row < a.rows);
    if constexpr (kAdd) inbox.fetch(0, 1, a.residual + row * a.cols, part, row < a.rows);
    commit_copies();
  };
  if constexpr (kAhead) fetch(part.first());
  NormExchange<Shape, kCentred, A> exchange;
  A one_over_cols = A(1) / static_cast<A>(a.cols), one_over_share = one_over_cols;
  if constexpr (Shape::kSpan != Span::warp) one_over_share = A(1) / static_cast<A>(max(1, part.share(exchange.warp())));
  auto weight = [&](int i) { return load_or(a.weight + part.offset(i), has_weight && part.holds(i), 1); };
  auto bias = [&](int i) { return load_or(a.bias + part.offset(i), has_bias && part.holds(i), 0); };
  Vector<T> early_weight[kVectors], early_bias[kVectors];
  if constexpr (kEarly) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      early_weight[i] = weight(i);
      if constexpr (kCentred) early_bias[i] = bias(i);
    }
  }

  auto work = [&](int64_t turn) {
    int64_t row = turn + part.group();
    Vector<T> v[kVectors], r[kVectors];
    if constexpr (kAhead) {
      wait_copies<0>();
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        v[i] = inbox.take(0, 0, i);
        if constexpr (kAdd) r[i] = inbox.take(0, 1, i);
      }
      fetch(turn + part.step() < part.end() ? row + part.step() : a.rows);
    } else {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        bool present = row < a.rows && part.holds(i);
        v[i] = load_present(a.x + row * a.cols + part.offset(i), present);
        if constexpr (kAdd) r[i] = load_present(a.residual + row * a.cols + part.offset(i), present);
      }
    }
    if constexpr (kAdd) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        v[i] = add_vectors(v[i], r[i]);
        if (row < a.rows && part.holds(i)) store(a.h + row * a.cols + part.offset(i), v[i]);
      }
    }

    Moments<A> moments = row_moments<kCentred>(v, part, one_over_share, one_over_cols, exchange);
    A mean = moments.mean, rstd = reciprocal_root(moments.squares * one_over_cols + a.eps);
    if (row >= a.rows) return;
    if (a.stats && part.leads()) {
      if constexpr (kCentred) a.stats[2 * row] = mean, a.stats[2 * row + 1] = rstd;
      else a.stats[row] = rstd;
    }
    if (!has_y) return;
    T *to = a.y + row * a.cols;
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
        if (part.holds(i)) store(to + part.offset(i), scaled<kCentred>(v[i], mean, rstd, w[i - first], b[i - first]));
      }
    }
  };
  if constexpr (kTurns == 1) {
    if (part.base() < a.rows) work(part.base());
  } else {
    for (int64_t turn = part.base(); turn < part.end(); turn += part.step()) work(turn);
  }
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

// A thread keeps kSums sums for each of its columns, of which it has twice as many where a value has 16 bits: 128
// registers, and so 512 threads on a multiprocessor, or some 80 and 768.
constexpr int kBackwardVectors = 2, kBackwardLongVectors = 4;
constexpr int kBackwardThreads = 512, kBackwardWarpBlock = 256, kStages = 2;
template <typename T, int kVectors>
constexpr int kBackwardResident = kVectors <= 2    ? 1024
                                  : sizeof(T) == 4 ? 768
                                                   : 512;

template <int kSize, typename A>
__device__ inline void store_sums(A *to, const A (&sums)[kSize]) {
#pragma unroll
  for (int k = 0; k < kSize; k += kVectorSize<A>) store(to + k, reinterpret_cast<const Vector<A> &>(sums[k]));
}

// Adds what the rows of one block have summed, always in the same order, and writes it to the block's row of partials.
template <class Shape, int kSums, typename A>
__device__ inline void write_partials(A (&sums)[kSums][Shape::kVectors][Shape::kSize], const RowPart<Shape> &part,
                                      A *partials, int64_t cols) {
  if constexpr (Shape::kSpan != Span::warp) {
    A *to = partials + kSums * part.base() * cols + part.column();
#pragma unroll
    for (int i = 0; i < Shape::kVectors; ++i) {
      if (!part.holds(i)) continue;
#pragma unroll
      for (int s = 0; s < kSums; ++s) store_sums(to + s * cols + part.offset(i), sums[s][i]);
    }
  } else {
    extern __shared__ uint4 memory[];  // the inbox, now that no row is on its way
    constexpr int kShareCols = Shape::kShare * Shape::kSize;
    A *shares = reinterpret_cast<A *>(memory), *mine = shares + warp_index() * kSums * kShareCols;
    __syncthreads();
#pragma unroll
    for (int s = 0; s < kSums; ++s)
#pragma unroll
      for (int i = 0; i < Shape::kVectors; ++i)
#pragma unroll
        for (int k = 0; k < Shape::kSize; ++k) {
#pragma unroll
          for (int other = Shape::kLanes; other < 32; other *= 2)
            sums[s][i][k] += __shfl_xor_sync(~0u, sums[s][i][k], other);
          if (part.group() == 0) mine[s * kShareCols + part.column() + part.offset(i) + k] = sums[s][i][k];
        }
    __syncthreads();
    for (int c = threadIdx.x; c < kSums * cols; c += blockDim.x) {
      int at = c < cols ? c : static_cast<int>(c - cols) + kShareCols;
      A sum = 0;
      for (int w = 0; w < blockDim.x / 32; ++w) sum += shares[w * kSums * kShareCols + at];
      partials[int64_t{kSums} * blockIdx.x * cols + c] = sum;
    }
  }
}

template <class Shape, bool kCentred, bool kAdd, typename T, typename A>
__global__ void __launch_bounds__(Shape::kSpan == Span::warp ? kBackwardWarpBlock : kBackwardThreads,
                                  kBackwardResident<T, Shape::kVectors> /
                                      (Shape::kSpan == Span::warp ? kBackwardWarpBlock : kBackwardThreads))
    norm_backward_kernel(NormBackwardTensors<T, A> a) {
  constexpr int kStats = kCentred ? 2 : 1, kSums = kCentred ? 2 : 1;
  RowPart<Shape> part(a.cols, a.rows);
  bool has_weight = a.weight != nullptr, has_dx = a.dx != nullptr;
  a.x += part.column(), a.dy += part.column(), a.weight += part.column(), a.dx += part.column();
  if constexpr (kAdd) a.dh += part.column();
  Inbox<Shape, kAdd ? 3 : 2, kStages> inbox;
  auto fetch = [&](int stage, int64_t row) {
    inbox.fetch(stage, 0, a.x + row * a.cols, part, row < a.rows);
    inbox.fetch(stage, 1, a.dy + row * a.cols, part, row < a.rows);
    if constexpr (kAdd) inbox.fetch(stage, 2, a.dh + row * a.cols, part, row < a.rows);
    commit_copies();
  };
#pragma unroll
  for (int s = 0; s < kStages; ++s) fetch(s, part.first() + s * part.step());
  auto stat = [&](int64_t row, int which) { return row < a.rows ? a.stats[kStats * row + which] : A(0); };
  A next_mean = kCentred ? stat(part.first(), 0) : A(0), next_rstd = stat(part.first(), kStats - 1);
  RowExchange<Shape, Sums<kSums, A>> exchange;

  A columns[kSums][Shape::kVectors][Shape::kSize] = {};  // sums of dy * xhat, of dy
  A one_over_cols = A(1) / static_cast<A>(a.cols);
  int stage = 0;
  for (int64_t turn = part.base(); turn < a.rows; turn += part.step()) {
    int64_t row = turn + part.group();
    A mean = next_mean, rstd = next_rstd;
    if constexpr (kCentred) next_mean = stat(row + part.step(), 0);
    next_rstd = stat(row + part.step(), kStats - 1);
    // this thread's vector i of the row, element by element: f(k, x - mean, dy, g)
    auto each = [&](int i, auto f) {
      auto x = widen(inbox.take(stage, 0, i)), d = widen(inbox.take(stage, 1, i));
      auto w = widen(load_or(a.weight + part.offset(i), has_weight, 1));
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
  if (a.partials) write_partials<Shape>(columns, part, a.partials, a.cols);
}

// Adds the rows of partials, (rows, kSums, cols), in a fixed order: blockIdx.y 0 gives dweight and 1 dbias. No rows:
// zeros.
constexpr int kSumCols = 16, kSumRows = 32;
constexpr bool kSumsOverlap = false;  // whether it is launched while the kernel before it ends

template <typename T, typename A>
__global__ void __launch_bounds__(kSumCols *kSumRows)
    sum_partials_kernel(const A *partials, T *dweight, T *dbias, int64_t rows, int64_t cols) {
  __shared__ A sums[kSumRows][kSumCols];
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");  // for the partials
#endif
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
    A rstd = reciprocal_root(sum_row(squares, exchange).value[0] / cols + a.eps);
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
Status norm_shape(const char *op, const NormForward<T, A> &a, const RowPlan &plan, const DeviceLimits &device,
                  void *stream) {
  constexpr auto kernel = norm_kernel<Shape, kCentred, kAdd, T, A>;
  constexpr int kTurns = kForwardTurns<Shape::kSpan>;
  constexpr bool within_warp = Shape::kSpan == Span::warp;
  using In = Inbox<Shape, kAdd ? 2 : 1, 1>;
  RowGrid grid;
  if constexpr (kTurns == 0) {
    AOT_TRY(
        (row_grid<kernel, Shape, In>(op, plan, device, kForwardResident, kForwardWarpBlock, a.rows, a.rows, &grid)));
  } else {
    int warps = within_warp ? kForwardWarpBlock / 32 : plan.warps;
    int64_t rows = int64_t{kTurns} * (within_warp ? warps * Shape::kRowsPerWarp : 1);
    grid = {grid_size(ceil_div(a.rows, rows) * plan.cluster), 32u * warps, kTurns > 1 ? warps * In::kBytesPerWarp : 0};
  }
  return launch_clusters(op, kernel, grid.blocks, grid.threads, plan.cluster, grid.shared, stream, a);
}

template <bool kCentred, bool kAdd, typename T, typename A>
Status norm_rows(const char *op, const NormForward<T, A> &a, const DeviceLimits &device, void *stream) {
  constexpr RowLimits most = {kForwardVectors, kForwardLongVectors, kForwardWarps, kMaxBlockWarps, 16 * (kAdd ? 2 : 1)};
  RowPlan plan;
  if (a.cols > 0 && a.cols % kVectorSize<T> == 0 && aligned(a.x, a.residual, a.weight, a.bias, a.y, a.h))
    plan = plan_rows(a.cols / kVectorSize<T>, most, device);
  if (plan.lanes == 0) {
    auto s = static_cast<cudaStream_t>(stream);
    norm_any_kernel<kCentred, kAdd><<<grid_size(a.rows), any_block(a.cols), 0, s>>>(a);
    return check_launch(op);
  }
  return dispatch_rows<T, kForwardVectors, kForwardLongVectors>(
      plan, [&](auto shape) { return norm_shape<decltype(shape), kCentred, kAdd>(op, a, plan, device, stream); });
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
template <bool kCentred, bool kAdd, typename T, typename A>
Status norm_backward_rows(const char *op, const NormBackwardTensors<T, A> &a, const DeviceLimits &device,
                          int64_t *partial_rows, void *stream) {
  constexpr int kRows = kAdd ? 3 : 2, kWarps = kBackwardThreads / 32;
  constexpr RowLimits most = {kBackwardVectors, kBackwardLongVectors, kWarps, kWarps, kRows * kStages * 16};
  RowPlan plan;
  if (a.cols % kVectorSize<T> == 0 && aligned(a.dy, a.dh, a.x, a.weight, a.dx, a.partials))
    plan = plan_rows(a.cols / kVectorSize<T>, most, device);
  if (plan.lanes == 0) return norm_backward_any<kCentred, kAdd>(op, a, *partial_rows, stream);
  return dispatch_rows<T, kBackwardVectors, kBackwardLongVectors>(plan, [&](auto shape) {
    using Shape = decltype(shape);
    constexpr auto kernel = norm_backward_kernel<Shape, kCentred, kAdd, T, A>;
    RowGrid grid;
    AOT_TRY((row_grid<kernel, Shape, Inbox<Shape, kRows, kStages>>(
        op, plan, device, kBackwardResident<T, Shape::kVectors>, kBackwardWarpBlock, a.rows, *partial_rows, &grid)));
    *partial_rows = grid.blocks / plan.cluster;
    return launch_clusters(op, kernel, grid.blocks, grid.threads, plan.cluster, grid.shared, stream, a);
  });
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
    cudaLaunchAttribute overlap = {};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {
        grid, block, 0, static_cast<cudaStream_t>(stream), &overlap, kSumsOverlap && device.clusters ? 1u : 0u};
    const A *from = a.partials;
    return check_cuda(Op::name, cudaLaunchKernelEx(&config, sum_partials_kernel<T, A>, from, dweight.as<T>(),
                                                   dbias.as<T>(), partials, cols));
  });
}

}  // namespace AOT_ISA
}  // namespace aot
