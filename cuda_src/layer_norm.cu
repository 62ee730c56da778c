#include "layer_norm.h"

#include "cuda/row.cuh"

namespace aot {
inline namespace AOT_ISA {

// --------------------------------------------------------------------------------------------------------- moments

template <typename A>
struct Moments {
  A mean, squares;  // squares: the sum of the squares of the differences from the mean
};

__device__ inline float reciprocal_root(float x) { return rsqrtf(x); }
__device__ inline double reciprocal_root(double x) { return rsqrt(x); }

// Of a row that is in registers, in two passes over each warp's share: its mean, then the squares around that. The
// shares' moments combine without loss (Chan, Golub and LeVeque 1983), so that a row of several warps needs one
// exchange only.
template <class Shape, class Exchange, typename A>
__device__ inline Moments<A> row_moments(const Vector<typename Shape::T> (&v)[Shape::kVectors],
                                         const RowPart<Shape> &part, A one_over_share, A one_over_cols,
                                         Exchange &exchange) {
  A sum = 0, squares = 0;
#pragma unroll
  for (int i = 0; i < Shape::kVectors; ++i) {
    auto x = widen(v[i]);
    A vector_sum = 0;  // one for each vector: shorter chains of additions
#pragma unroll
    for (int k = 0; k < Shape::kSize; ++k) vector_sum += x[k];
    sum += vector_sum;  // past the row there are zeros
  }
  A mean = sum_lanes<Shape::kLanes>(sum) * one_over_share;
#pragma unroll
  for (int i = 0; i < Shape::kVectors; ++i) {
    auto x = widen(v[i]);
    A vector_squares = 0;
#pragma unroll
    for (int k = 0; k < Shape::kSize; ++k) vector_squares += (x[k] - mean) * (x[k] - mean);
    squares += part.holds(i) ? vector_squares : A(0);
  }
  squares = sum_lanes<Shape::kLanes>(squares);
  if constexpr (Shape::kSpan == Span::warp) return {mean, squares};
  else {
    const Moments<A> *all = exchange.all({mean, squares});
    sum = squares = 0;
#pragma unroll 1
    for (int w = lane_index(); w < exchange.warps(); w += 32) sum += part.share(w) * all[w].mean;
    mean = sum_lanes<32>(sum) * one_over_cols;
#pragma unroll 1
    for (int w = lane_index(); w < exchange.warps(); w += 32)
      squares += all[w].squares + part.share(w) * (all[w].mean - mean) * (all[w].mean - mean);
    return {mean, sum_lanes<32>(squares)};
  }
}

// --------------------------------------------------------------------------------------------------------- kernels

// At 64 registers a thread a multiprocessor holds 1024 threads, and 64 bytes are on their way to each of them.
constexpr int kForwardThreads = 1024, kForwardWarpBlock = 256;

template <class Shape, typename T, typename A>
__global__ void __launch_bounds__(Shape::kSpan == Span::warp ? kForwardWarpBlock : kForwardThreads,
                                  Shape::kSpan == Span::warp ? kForwardThreads / kForwardWarpBlock : 1)
    layer_norm_kernel(const T *x, const T *weight, const T *bias, T *y, A *stats, int64_t rows, int64_t cols, A eps) {
  RowPart<Shape> part(cols);
  bool has_weight = weight != nullptr, has_bias = bias != nullptr, has_y = y != nullptr;
  x += part.column(), weight += part.column(), bias += part.column(), y += part.column();
  Inbox<Shape, 1, 1> inbox;
  inbox.fetch(0, 0, x + part.first() * cols, part, part.first() < rows);
  commit_copies();
  RowExchange<Shape, Moments<A>> exchange;
  A one_over_cols = A(1) / static_cast<A>(cols), one_over_share = one_over_cols;
  if constexpr (Shape::kSpan != Span::warp) one_over_share = A(1) / static_cast<A>(max(1, part.share(exchange.warp())));

  for (int64_t turn = part.base(); turn < rows; turn += part.step()) {
    int64_t row = turn + part.group(), next = row + part.step();
    Vector<T> v[Shape::kVectors];
    wait_copies<0>();
#pragma unroll
    for (int i = 0; i < Shape::kVectors; ++i) v[i] = inbox.take(0, 0, i);
    inbox.fetch(0, 0, x + next * cols, part, next < rows);
    commit_copies();

    auto [mean, squares] = row_moments(v, part, one_over_share, one_over_cols, exchange);
    A rstd = reciprocal_root(squares * one_over_cols + eps);
    if (row >= rows) continue;
    if (stats && part.leads()) stats[2 * row] = mean, stats[2 * row + 1] = rstd;
    if (!has_y) continue;
    T *to = y + row * cols;
#pragma unroll
    for (int i = 0; i < Shape::kVectors; ++i) {
      if (!part.holds(i)) continue;
      auto a = widen(v[i]), w = widen(load_or(weight + part.offset(i), has_weight, 1));
      auto b = widen(load_or(bias + part.offset(i), has_bias, 0));
#pragma unroll
      for (int k = 0; k < Shape::kSize; ++k) a[k] = (a[k] - mean) * rstd * w[k] + b[k];
      store(to + part.offset(i), narrow(a));
    }
  }
}

// A thread keeps two sums for each of its columns, of which it has twice as many where a value has 16 bits: 128
// registers, and so 512 threads on a multiprocessor, or some 80 and 768.
constexpr int kBackwardThreads = 512, kBackwardWarpBlock = 256, kStages = 2;
template <typename T>
constexpr int kBackwardResident = sizeof(T) == 4 ? 768 : 512;

template <int kSize, typename A>
__device__ inline void store_sums(A *to, const A (&sums)[kSize]) {
#pragma unroll
  for (int k = 0; k < kSize; k += kVectorSize<A>) store(to + k, reinterpret_cast<const Vector<A> &>(sums[k]));
}

// Adds what the rows of one block have summed, always in the same order, and writes it to the block's row of partials.
template <class Shape, typename A>
__device__ inline void write_partials(A (&dweight)[Shape::kVectors][Shape::kSize],
                                      A (&dbias)[Shape::kVectors][Shape::kSize], const RowPart<Shape> &part,
                                      A *partials, int64_t cols) {
  if constexpr (Shape::kSpan != Span::warp) {
    A *to = partials + 2 * part.base() * cols + part.column();
#pragma unroll
    for (int i = 0; i < Shape::kVectors; ++i) {
      if (!part.holds(i)) continue;
      store_sums(to + part.offset(i), dweight[i]);
      store_sums(to + cols + part.offset(i), dbias[i]);
    }
  } else {
    extern __shared__ uint4 memory[];  // the inbox, now that no row is on its way
    constexpr int kShareCols = Shape::kShare * Shape::kSize;
    A *sums = reinterpret_cast<A *>(memory), *mine = sums + warp_index() * 2 * kShareCols;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Shape::kVectors; ++i) {
#pragma unroll
      for (int k = 0; k < Shape::kSize; ++k)
#pragma unroll
        for (int other = Shape::kLanes; other < 32; other *= 2) {
          dweight[i][k] += __shfl_xor_sync(~0u, dweight[i][k], other);
          dbias[i][k] += __shfl_xor_sync(~0u, dbias[i][k], other);
        }
      if (part.group() != 0) continue;
#pragma unroll
      for (int k = 0; k < Shape::kSize; ++k) {
        mine[part.column() + part.offset(i) + k] = dweight[i][k];
        mine[kShareCols + part.column() + part.offset(i) + k] = dbias[i][k];
      }
    }
    __syncthreads();
    for (int c = threadIdx.x; c < 2 * cols; c += blockDim.x) {
      int at = c < cols ? c : static_cast<int>(c - cols) + kShareCols;
      A sum = 0;
      for (int w = 0; w < blockDim.x / 32; ++w) sum += sums[w * 2 * kShareCols + at];
      partials[int64_t{2} * blockIdx.x * cols + c] = sum;
    }
  }
}

template <class Shape, typename T, typename A>
__global__ void __launch_bounds__(kBackwardThreads)
    layer_norm_backward_kernel(const T *dy, const T *x, const T *weight, const A *stats, T *dx, A *partials,
                               int64_t rows, int64_t cols) {
  RowPart<Shape> part(cols);
  bool has_weight = weight != nullptr, has_dx = dx != nullptr;
  x += part.column(), dy += part.column(), weight += part.column(), dx += part.column();
  Inbox<Shape, 2, kStages> inbox;
  auto fetch = [&](int stage, int64_t row) {
    inbox.fetch(stage, 0, x + row * cols, part, row < rows);
    inbox.fetch(stage, 1, dy + row * cols, part, row < rows);
    commit_copies();
  };
#pragma unroll
  for (int s = 0; s < kStages; ++s) fetch(s, part.first() + s * part.step());
  auto stat = [&](int64_t row, int which) { return row < rows ? stats[2 * row + which] : A(0); };
  A next_mean = stat(part.first(), 0), next_rstd = stat(part.first(), 1);
  RowExchange<Shape, Sums<2, A>> exchange;

  A dweight[Shape::kVectors][Shape::kSize] = {}, dbias[Shape::kVectors][Shape::kSize] = {};
  A one_over_cols = A(1) / static_cast<A>(cols);
  int stage = 0;
  for (int64_t turn = part.base(); turn < rows; turn += part.step()) {
    int64_t row = turn + part.group();
    A mean = next_mean, rstd = next_rstd;
    next_mean = stat(row + part.step(), 0), next_rstd = stat(row + part.step(), 1);
    // this thread's vector i of the row, element by element: f(k, xhat, dy, g)
    auto each = [&](int i, auto f) {
      auto a = widen(inbox.take(stage, 0, i)), d = widen(inbox.take(stage, 1, i));
      auto w = widen(load_or(weight + part.offset(i), has_weight, 1));
#pragma unroll
      for (int k = 0; k < Shape::kSize; ++k) f(k, (a[k] - mean) * rstd, d[k], d[k] * w[k]);
    };

    wait_copies<kStages - 1>();
    Sums<2, A> sums = {};  // of g, of g * xhat
#pragma unroll
    for (int i = 0; i < Shape::kVectors; ++i)
      if (part.holds(i))
        each(i, [&](int k, A xhat, A d, A g) {
          sums.value[0] += g, sums.value[1] += g * xhat;
          dweight[i][k] += d * xhat, dbias[i][k] += d;
        });
    if constexpr (Shape::kSpan == Span::warp) sums = sum_lanes<Shape::kLanes>(sums);
    else sums = sum_row(sums, exchange);

    A c0 = -rstd * one_over_cols * sums.value[0], c1 = -rstd * one_over_cols * sums.value[1];
    if (has_dx && row < rows)
#pragma unroll
      for (int i = 0; i < Shape::kVectors; ++i)
        if (part.holds(i)) {
          Widened<T> d;
          each(i, [&](int k, A xhat, A, A g) { d[k] = g * rstd + (xhat * c1 + c0); });
          store(dx + row * cols + part.offset(i), narrow(d));
        }
    fetch(stage, row + kStages * part.step());
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  wait_copies<0>();
  if (partials) write_partials(dweight, dbias, part, partials, cols);
}

// Adds the rows of partials, (rows, 2, cols), in a fixed order: blockIdx.y 0 gives dweight and 1 dbias. No rows: zeros.
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
      for (int64_t row = threadIdx.y; row < rows; row += kSumRows) sum += partials[(2 * row + blockIdx.y) * cols + col];
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

template <typename T, typename A>
__global__ void __launch_bounds__(kAnyThreads) layer_norm_any_kernel(const T *x, const T *weight, const T *bias, T *y,
                                                                     A *stats, int64_t rows, int64_t cols, A eps) {
  Exchange<Span::block, Sums<1, A>> exchange;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T *from = x + row * cols;
    Sums<1, A> sum = {}, squares = {};
    for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) sum.value[0] += widen(from[c]);
    A mean = sum_row(sum, exchange).value[0] / static_cast<A>(cols);
    for (int64_t c = threadIdx.x; c < cols; c += blockDim.x)
      squares.value[0] += (widen(from[c]) - mean) * (widen(from[c]) - mean);
    A rstd = reciprocal_root(sum_row(squares, exchange).value[0] / static_cast<A>(cols) + eps);
    if (stats && threadIdx.x == 0) stats[2 * row] = mean, stats[2 * row + 1] = rstd;
    for (int64_t c = threadIdx.x; y && c < cols; c += blockDim.x) {
      A xhat = (widen(from[c]) - mean) * rstd;
      y[row * cols + c] = narrow<T>(xhat * (weight ? widen(weight[c]) : A(1)) + (bias ? widen(bias[c]) : A(0)));
    }
  }
}

template <typename T, typename A>
__global__ void __launch_bounds__(kAnyThreads)
    layer_norm_backward_any_kernel(const T *dy, const T *x, const T *weight, const A *stats, T *dx, int64_t rows,
                                   int64_t cols) {
  Exchange<Span::block, Sums<2, A>> exchange;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    A mean = stats[2 * row], rstd = stats[2 * row + 1];
    auto xhat = [&](int64_t c) { return (widen(x[row * cols + c]) - mean) * rstd; };
    auto g = [&](int64_t c) { return widen(dy[row * cols + c]) * (weight ? widen(weight[c]) : A(1)); };
    Sums<2, A> sums = {};
    for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) sums.value[0] += g(c), sums.value[1] += g(c) * xhat(c);
    sums = sum_row(sums, exchange);
    A c0 = sums.value[0] / static_cast<A>(cols), c1 = sums.value[1] / static_cast<A>(cols);
    for (int64_t c = threadIdx.x; c < cols; c += blockDim.x)
      dx[row * cols + c] = narrow<T>(rstd * (g(c) - c0 - xhat(c) * c1));
  }
}

// A thread to a column, each row of blocks summing its part of the rows.
template <typename T, typename A>
__global__ void __launch_bounds__(kAnyThreads)
    layer_norm_partials_any_kernel(const T *dy, const T *x, const A *stats, A *partials, int64_t rows, int64_t cols) {
  for (int64_t c = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; c < cols; c += int64_t{gridDim.x} * blockDim.x) {
    A dweight = 0, dbias = 0;
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
      A d = widen(dy[row * cols + c]);
      dweight += d * ((widen(x[row * cols + c]) - stats[2 * row]) * stats[2 * row + 1]);
      dbias += d;
    }
    partials[int64_t{2} * blockIdx.y * cols + c] = dweight;
    partials[(int64_t{2} * blockIdx.y + 1) * cols + c] = dbias;
  }
}

// ------------------------------------------------------------------------------------------------------- launchers

inline unsigned any_block(int64_t cols) {
  return static_cast<unsigned>(std::min<int64_t>(kAnyThreads, ceil_div(std::max<int64_t>(cols, 1), 32) * 32));
}

// y, and stats, each unless it is null.
template <typename T, typename A>
Status layer_norm_rows(const char *op, const T *x, const T *weight, const T *bias, T *y, A *stats, int64_t rows,
                       int64_t cols, A eps, const DeviceLimits &device, void *stream) {
  RowPlan plan;
  if (cols > 0 && cols % kVectorSize<T> == 0 && aligned(x, weight, bias, y))
    plan = plan_rows(cols / kVectorSize<T>, kForwardThreads / 32, 16, device);
  if (plan.lanes == 0) {
    layer_norm_any_kernel<T, A><<<grid_size(rows), any_block(cols), 0, static_cast<cudaStream_t>(stream)>>>(
        x, weight, bias, y, stats, rows, cols, eps);
    return check_launch(op);
  }
  return dispatch_rows<T>(plan, [&](auto shape) {
    using Shape = decltype(shape);
    RowGrid grid = row_grid<Shape, Inbox<Shape, 1, 1>>(plan, device, kForwardThreads, kForwardWarpBlock, rows, rows);
    return launch_clusters(op, layer_norm_kernel<Shape, T, A>, grid.blocks, grid.threads, plan.cluster, grid.shared,
                           stream, x, weight, bias, y, stats, rows, cols, eps);
  });
}

Status layer_norm_cuda(const LayerNorm &op, const Tensor *in, const Tensor *out, void *stream) {
  DeviceLimits device;
  AOT_TRY(device_limits(LayerNorm::name, &device));
  return dispatch(in[0].dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    return layer_norm_rows(LayerNorm::name, in[0].as<const T>(), in[1].as<const T>(), in[2].as<const T>(),
                           out[0].as<T>(), out[1].as<A>(), op.rows(in[0]), op.cols(), static_cast<A>(op.eps), device,
                           stream);
  });
}

template <typename T, typename A>
Status layer_norm_backward_any(const T *dy, const T *x, const T *weight, const A *stats, T *dx, A *partials,
                               int64_t rows, int64_t cols, int64_t partial_rows, void *stream) {
  auto s = static_cast<cudaStream_t>(stream);
  unsigned block = any_block(cols);
  if (dx) {
    layer_norm_backward_any_kernel<<<grid_size(rows), block, 0, s>>>(dy, x, weight, stats, dx, rows, cols);
    AOT_TRY(check_launch(LayerNormBackward::name));
  }
  if (!partials) return kOk;
  dim3 grid(grid_size(ceil_div(cols, block)), static_cast<unsigned>(partial_rows));
  layer_norm_partials_any_kernel<<<grid, block, 0, s>>>(dy, x, stats, partials, rows, cols);
  return check_launch(LayerNormBackward::name);
}

// dx, and the partials, of which *partial_rows are there: it comes back as the number of rows written.
template <typename T, typename A>
Status layer_norm_backward_rows(const LayerNormBackward &op, const Tensor *in, const A *stats, const Tensor *out,
                                const DeviceLimits &device, int64_t *partial_rows, void *stream) {
  const T *dy = in[0].as<const T>(), *x = in[1].as<const T>(), *weight = in[2].as<const T>();
  T *dx = out[0].as<T>();
  A *partials = out[1] || out[2] ? out[3].as<A>() : nullptr;
  int64_t rows = op.rows(in[1]), cols = op.cols();

  RowPlan plan;
  if (cols % kVectorSize<T> == 0 && aligned(dy, x, weight, dx, partials))
    plan = plan_rows(cols / kVectorSize<T>, kBackwardThreads / 32, 2 * kStages * 16, device);
  if (plan.lanes == 0)
    return layer_norm_backward_any<T, A>(dy, x, weight, stats, dx, partials, rows, cols, *partial_rows, stream);
  return dispatch_rows<T>(plan, [&](auto shape) {
    using Shape = decltype(shape);
    RowGrid grid = row_grid<Shape, Inbox<Shape, 2, kStages>>(plan, device, kBackwardResident<T>, kBackwardWarpBlock,
                                                             rows, *partial_rows);
    *partial_rows = grid.blocks / plan.cluster;
    return launch_clusters(LayerNormBackward::name, layer_norm_backward_kernel<Shape, T, A>, grid.blocks, grid.threads,
                           plan.cluster, grid.shared, stream, dy, x, weight, stats, dx, partials, rows, cols);
  });
}

Status layer_norm_backward_cuda(const LayerNormBackward &op, const Tensor *in, const Tensor *out, void *stream) {
  DeviceLimits device;
  AOT_TRY(device_limits(LayerNormBackward::name, &device));
  return dispatch(in[1].dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    bool sums = out[1] || out[2];
    int64_t rows = op.rows(in[1]), cols = op.cols(), partials = partial_rows(rows, cols);
    if ((sums || !in[3]) && !out[3]) return fail(kConventionMisused, "%s: workspace is missing", op.name);
    A *stats = in[3].as<A>();
    if (!stats && rows > 0 && cols > 0) {  // in the workspace, behind the partials
      stats = out[3].as<A>() + 2 * partials * cols;
      AOT_TRY(layer_norm_rows<T>(op.name, in[1].as<const T>(), static_cast<const T *>(nullptr),
                                 static_cast<const T *>(nullptr), static_cast<T *>(nullptr), stats, rows, cols,
                                 static_cast<A>(op.eps), device, stream));
    }
    if (in[1].size() > 0) AOT_TRY((layer_norm_backward_rows<T, A>(op, in, stats, out, device, &partials, stream)));
    if (!sums) return kOk;
    dim3 grid(grid_size(ceil_div(op.cols(), kSumCols)), 2), block(kSumCols, kSumRows);
    sum_partials_kernel<T, A><<<grid, block, 0, static_cast<cudaStream_t>(stream)>>>(
        out[3].as<const A>(), out[1].as<T>(), out[2].as<T>(), partials, op.cols());
    return check_launch(LayerNormBackward::name);
  });
}

}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(LayerNorm, aot_layer_norm_cuda, layer_norm_cuda)
AOT_ENTRY(LayerNormBackward, aot_layer_norm_backward_cuda, layer_norm_backward_cuda)
