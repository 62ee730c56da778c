#include "cross_entropy.h"

#include "cuda/softmax.cuh"

namespace aot {
inline namespace AOT_ISA {

// --------------------------------------------------------------------------------------------------------- formula

struct Targets {
  const void *data;
  bool wide;  // int64, not int32
  int64_t ignore_index;

  Targets(const Tensor &t, int64_t ignore_index)
      : data(t.data), wide(t.dtype == DType::int64), ignore_index(ignore_index) {}
  __device__ int64_t operator[](int64_t row) const {
    return wide ? static_cast<const int64_t *>(data)[row] : static_cast<const int32_t *>(data)[row];
  }
};

// The class of one row.
struct Class {
  int64_t target;
  bool ignored, known;

  __device__ Class(int64_t target, int64_t ignore_index, int64_t cols)
      : target(target), ignored(target == ignore_index), known(target >= 0 && target < cols) {}
  // Where its number lies in the row; somewhere in it, if there is none.
  __device__ int64_t column() const { return known ? target : 0; }
};

template <typename A>
struct Smoothing {
  A spread;  // over all classes
  A each;    // of that, for one class
  A one_over_cols;
};

__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }

template <typename A>
__device__ inline A nan() {
  return static_cast<A>(__int_as_float(0x7fffffff));
}

template <typename A>
__device__ inline A row_loss(const Exponentials<A> &row, A at_target, const Class &c, const Smoothing<A> &smoothing) {
  if (c.ignored) return 0;
  if (!c.known) return nan<A>();
  A log_sum = logarithm(row.sum), loss = log_sum - (at_target - row.top);
  if (smoothing.spread == 0) return loss;
  return (1 - smoothing.spread) * loss + smoothing.spread * (log_sum - row.rest * smoothing.one_over_cols);
}

// What a row's slope is multiplied by: dy, over the number of rows that count where `counts` has the numbers of parts
// of them. A null dy is 1.
template <typename T, typename A>
struct Scale {
  const T *dy;
  bool each_row;
  const A *counts;

  // Called by whole warps.
  __device__ A of(int64_t row, bool present) const {
    A scale = 1;
    if (counts) {
      A count = 0;
      for (int i = lane_index(); i < CrossEntropyAttrs::kParts; i += 32) count += counts[i];
      scale /= sum_lanes<32>(count);
    }
    if (dy && present) scale *= widen(dy[each_row ? row : 0]);
    return scale;
  }
};

// --------------------------------------------------------------------------------------------------------- kernels

// Of each row: its loss as a result and as a number to sum, and its slope, times the scale; each unless it is null.
template <typename T, typename A>
struct Results {
  T *loss;
  A *losses;
  T *slope;

  __device__ void tell(int64_t row, A value) const {
    if (loss) loss[row] = narrow<T>(value);
    if (losses) losses[row] = value;
  }
};

template <class Shape, typename T = typename Shape::T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(Shape::kMostThreads)
    cross_entropy_kernel(const T *x, Targets targets, Results<T, A> results, Scale<T, A> scale, int64_t rows,
                         int64_t cols, Smoothing<A> smoothing) {
  Tile<Shape> tile(cols);
  bool present = tile.present(rows);
  Class c(present ? targets[tile.row()] : targets.ignore_index, targets.ignore_index, cols);
  Vector<T> v[Shape::kVectors];
  tile.load(x, present, kMinusInfinity, v);
  A at_target = present && tile.leads() ? widen(x[tile.row() * cols + c.column()]) : A(0);

  TileExchange<Shape, Exponentials<A>> exchange;
  A e[Shape::kVectors][Shape::kSize];
  auto [row, to_row] = row_exponentials<true>(v, tile, e, exchange);
  if (present && tile.leads()) results.tell(tile.row(), row_loss(row, at_target, c, smoothing));
  if (!results.slope) return;

  Quotient<T, A> quotient(to_row, row.sum);
  A factor = scale.of(tile.row(), present), hit = 1 - smoothing.spread;
  if (!c.known) factor = nan<A>();
  int place = static_cast<int>(c.target) - tile.column(0);  // of the class, from this thread's first column
  tile.store(results.slope, present, [&](int i, int k) {
    A p = quotient(e[i][k]) - smoothing.each;
    if (place == i * Shape::kLanes * Shape::kSize + k) p -= hit;
    return c.ignored ? A(0) : p * factor;
  });
}

template <class Shape, typename T = typename Shape::T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(Shape::kMostThreads)
    cross_entropy_scale_kernel(const T *slope, T *dx, Scale<T, A> scale, int64_t rows, int64_t cols) {
  Tile<Shape> tile(cols);
  bool present = tile.present(rows);
  Vector<T> v[Shape::kVectors];
  tile.load(slope, present, 0, v);
  A factor = scale.of(tile.row(), present);
  tile.store(dx, present, [&](int i, int k) { return widen(v[i])[k] * factor; });
}

// Rows of any size and address, a block to each.
template <typename T, typename A>
__global__ void __launch_bounds__(kAnyRowThreads)
    cross_entropy_any_kernel(const T *x, Targets targets, Results<T, A> results, Scale<T, A> scale, int64_t rows,
                             int64_t cols, Smoothing<A> smoothing) {
  Exchange<Span::block, Exponentials<A>> exchange;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T *from = x + row * cols;
    Class c(targets[row], targets.ignore_index, cols);
    Exponentials<A> s = any_row_exponentials(from, cols, exchange);
    if (threadIdx.x == 0) {
      A at_target = cols > 0 ? widen(from[c.column()]) : A(0);
      results.tell(row, row_loss(s, at_target, c, smoothing));
    }
    if (!results.slope) continue;
    Quotient<T, A> quotient(1, s.sum);
    A factor = scale.of(row, true);
    if (!c.known) factor = nan<A>();
    map_row(from, results.slope + row * cols, cols, [&](int64_t col, A x) {
      A p = quotient(exponential<T>(x - s.top)) - smoothing.each - (col == c.target ? 1 - smoothing.spread : A(0));
      return c.ignored ? A(0) : p * factor;
    });
  }
}

template <typename T, typename A>
__global__ void __launch_bounds__(kAnyRowThreads)
    cross_entropy_scale_any_kernel(const T *slope, T *dx, Scale<T, A> scale, int64_t rows, int64_t cols) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    A factor = scale.of(row, true);
    map_row(slope + row * cols, dx + row * cols, cols, [&](int64_t, A slope) { return slope * factor; });
  }
}

// Sums the losses of rows, unless they are null, and counts the rows that are not ignored, for kParts parts of them.
// The order of the sums depends on the number of rows alone.
constexpr int kSumThreads = 256;

template <typename A>
__global__ void __launch_bounds__(kSumThreads)
    cross_entropy_parts_kernel(const A *losses, Targets targets, A *counts, A *sums, int64_t rows) {
  Exchange<Span::block, Sums<2, A>> exchange;
  Sums<2, A> part = {};
#pragma unroll 4
  for (int64_t row = int64_t{blockIdx.x} * kSumThreads + threadIdx.x; row < rows; row += gridDim.x * kSumThreads) {
    part.value[0] += targets[row] == targets.ignore_index ? 0 : 1;
    if (losses) part.value[1] += losses[row];
  }
  part = sum_row(part, exchange);
  if (threadIdx.x != 0) return;
  counts[blockIdx.x] = part.value[0];
  if (sums) sums[blockIdx.x] = part.value[1];
}

// One warp: the loss of them all.
template <typename T, typename A>
__global__ void cross_entropy_loss_kernel(const A *counts, const A *sums, T *loss, bool mean) {
  Sums<2, A> all = {};
  for (int i = threadIdx.x; i < CrossEntropyAttrs::kParts; i += 32) all.value[0] += counts[i], all.value[1] += sums[i];
  all = sum_lanes<32>(all);
  if (threadIdx.x == 0) *loss = narrow<T>(mean ? all.value[1] / all.value[0] : all.value[1]);
}

// ------------------------------------------------------------------------------------------------------- launchers

template <typename T, typename A = Accumulate<T>>
Status cross_entropy_rows(const char *op, const CrossEntropyAttrs &attrs, const Tensor &x, const Targets &targets,
                          const Results<T, A> &results, const Scale<T, A> &scale, void *stream) {
  DeviceLimits device;
  AOT_TRY(device_limits(op, &device));
  int64_t rows = attrs.rows(x), cols = attrs.cols(x);
  if (rows == 0) return kOk;
  Smoothing<A> smoothing = {A(attrs.label_smoothing), A(attrs.label_smoothing / cols), A(1. / cols)};
  TilePlan plan = plan_tiles<T>(cols, device, x.as<const T>(), results.slope);
  if (plan.lanes == 0) {
    cross_entropy_any_kernel<<<grid_size(rows), any_row_block(cols), 0, static_cast<cudaStream_t>(stream)>>>(
        x.as<const T>(), targets, results, scale, rows, cols, smoothing);
    return check_launch(op);
  }
  return dispatch_tiles<T>(plan, [&](auto shape) {
    using Shape = decltype(shape);
    return launch_tiles<Shape>(op, plan, rows, cross_entropy_kernel<Shape>, stream, x.as<const T>(), targets, results,
                               scale, rows, cols, smoothing);
  });
}

template <typename T, typename A = Accumulate<T>>
Status cross_entropy_scale(const char *op, const CrossEntropyAttrs &attrs, const Tensor &slope, T *dx,
                           const Scale<T, A> &scale, void *stream) {
  DeviceLimits device;
  AOT_TRY(device_limits(op, &device));
  int64_t rows = attrs.rows(slope), cols = attrs.cols(slope);
  const T *from = slope.as<const T>();
  TilePlan plan = plan_tiles<T>(cols, device, from, dx);
  if (plan.lanes == 0) {
    cross_entropy_scale_any_kernel<<<grid_size(rows), any_row_block(cols), 0, static_cast<cudaStream_t>(stream)>>>(
        from, dx, scale, rows, cols);
    return check_launch(op);
  }
  return dispatch_tiles<T>(plan, [&](auto shape) {
    using Shape = decltype(shape);
    return launch_tiles<Shape>(op, plan, rows, cross_entropy_scale_kernel<Shape>, stream, from, dx, scale, rows, cols);
  });
}

Status cross_entropy_cuda(const CrossEntropy &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &x = in[0], &loss = out[0], &slope = out[1], &work = out[2];
  if (op.reduces() && !work) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  return dispatch(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    Targets targets(in[1], op.ignore_index);
    A *counts = work.as<A>(), *sums = counts + op.kParts, *losses = op.reduces() ? sums + op.kParts : nullptr;
    Results<T, A> results = {op.reduces() ? nullptr : loss.as<T>(), losses, slope.as<T>()};
    AOT_TRY((cross_entropy_rows<T>(op.name, op, x, targets, results, Scale<T, A>{}, stream)));
    if (!op.reduces()) return kOk;
    auto s = static_cast<cudaStream_t>(stream);
    cross_entropy_parts_kernel<<<op.kParts, kSumThreads, 0, s>>>(losses, targets, counts, sums, op.rows(x));
    AOT_TRY(check_launch(op.name));
    cross_entropy_loss_kernel<<<1, 32, 0, s>>>(counts, sums, loss.as<T>(), op.mean());
    return check_launch(op.name);
  });
}

Status cross_entropy_backward_cuda(const CrossEntropyBackward &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &dy = in[0], &x = in[1], &slope = in[3], &dx = out[0], &work = out[1];
  if (op.mean() && !work) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  return dispatch(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    Targets targets(in[2], op.ignore_index);
    A *counts = op.mean() ? work.as<A>() : nullptr;
    if (counts) {
      cross_entropy_parts_kernel<A><<<op.kParts, kSumThreads, 0, static_cast<cudaStream_t>(stream)>>>(
          nullptr, targets, counts, nullptr, op.rows(x));
      AOT_TRY(check_launch(op.name));
    }
    Scale<T, A> scale = {dy.as<const T>(), !op.reduces(), counts};
    if (slope) return cross_entropy_scale(op.name, op, slope, dx.as<T>(), scale, stream);
    return cross_entropy_rows(op.name, op, x, targets, Results<T, A>{nullptr, nullptr, dx.as<T>()}, scale, stream);
  });
}

}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(CrossEntropy, aot_cross_entropy_cuda, cross_entropy_cuda)
AOT_ENTRY(CrossEntropyBackward, aot_cross_entropy_backward_cuda, cross_entropy_backward_cuda)
