#include "cross_entropy.h"

#include "cuda/overlap.cuh"
#include "cuda/softmax.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

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

// The class index of one row.
struct Class {
  int64_t target;
  bool ignored, in_range;

  __device__ Class(int64_t target, int64_t ignore_index, int64_t cols)
      : target(target), ignored(target == ignore_index), in_range(target >= 0 && target < cols) {}
  // The column of its logit; an out-of-range index must not be read, and gives column 0.
  __device__ int64_t column() const { return in_range ? target : 0; }
};

template <typename A>
struct Smoothing {
  A total;      // label_smoothing
  A per_class;  // label_smoothing / cols
  A one_over_cols;
};

template <typename A>
__device__ inline A nan() {
  return static_cast<A>(__int_as_float(0x7fffffff));
}

template <typename A>
__device__ inline A row_loss(const Exponentials<A> &row, A at_target, const Class &c, const Smoothing<A> &smoothing) {
  if (c.ignored) return A(-0.);  // which marks it for cross_entropy_loss_kernel
  if (!c.in_range) return nan<A>();
  A log_sum = logarithm(row.sum), loss = log_sum - (at_target - row.max);
  if (smoothing.total == 0) return loss;
  return (1 - smoothing.total) * loss + smoothing.total * (log_sum - row.shifted_sum * smoothing.one_over_cols);
}

// The factor of a row's slope: dy, or 1 if it is null, divided by the sum of `counts` unless that is null.
template <typename T, typename A>
struct Scale {
  const T *dy;
  bool each_row;
  const A *counts;  // kParts partial counts of the rows not ignored

  // All lanes of the warp must call it.
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

// The outputs of a rows kernel, each unless it is null.
template <typename T, typename A>
struct Results {
  T *loss;    // of each row: reduction = "none"
  A *losses;  // the same for the reduction
  T *slope;   // times the scale

  __device__ void write_loss(int64_t row, A value) const {
    if (loss) loss[row] = narrow<T>(value + A(0));  // + 0: not -0
    if (losses) losses[row] = value;
  }
};

// kSmoothing: with label smoothing; kSlope: results.slope may be given.
template <class Shape, bool kSmoothing, bool kSlope, typename T = typename Shape::T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    cross_entropy_kernel(const T *x, Targets targets, Results<T, A> results, Scale<T, A> scale, int64_t rows,
                         int64_t cols, Smoothing<A> smoothing) {
  launch_next();
  RegisterRow<Shape> part(cols);
  bool present = part.present(rows);
  Vector<T> v[Shape::kVectors];
  part.load(x, present, kMinusInfinity, v);
  Class c(present ? targets[part.row()] : targets.ignore_index, targets.ignore_index, cols);
  bool mine = present && part.has(c.column());  // for one thread of the row
  A at_target = mine ? widen(x[part.row() * cols + c.column()]) : A(0);

  RowExchange<Shape, Exponentials<A>> exchange;
  auto [row, to_row] = row_exponentials<kSmoothing>(v, part, exchange);
  if (mine) results.write_loss(part.row(), row_loss(row, at_target, c, smoothing));
  if (!kSlope || !results.slope) return;

  A factor = scale.of(part.row(), present);
  if (c.ignored) return part.store(results.slope, present, [&](int, int) { return A(0); });
  if (!c.in_range) factor = nan<A>();
  Probability<T, A> p(row, to_row, factor);
  A off_target = smoothing.per_class * factor, on_target = (1 - smoothing.total) * factor;
  part.store(results.slope, present, [&](int i, int k) {
    A slope = p.of_exponential(widen(v[i])[k]);
    return kSmoothing ? slope - off_target : slope;
  });
  if (mine) results.slope[part.row() * cols + c.column()] = narrow<T>(p.of(at_target) - off_target - on_target);
}

// The loss alone of long rows: a block for each.
constexpr int kStreamThreads = 256, kStreamBlocks = 5;  // per multiprocessor

template <typename T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kStreamThreads, kStreamBlocks)
    cross_entropy_stream_kernel(const T *x, Targets targets, Results<T, A> results, int64_t rows, int64_t cols,
                                Smoothing<A> smoothing) {
  launch_next();
  Exchange<Span::block, Exponentials<A>> exchange;
  int64_t row = blockIdx.x;
  auto s = streamed_exponentials<false>(x + row * cols, static_cast<int>(cols / kVectorSize<T>), exchange);
  if (threadIdx.x != 0) return;
  Class c(targets[row], targets.ignore_index, cols);
  results.write_loss(row, row_loss(s, widen(x[row * cols + c.column()]), c, smoothing));
}

template <class Shape, typename T = typename Shape::T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(Shape::kThreads)
    cross_entropy_scale_kernel(const T *slope, T *dx, Targets targets, Scale<T, A> scale, int64_t rows, int64_t cols) {
  RegisterRow<Shape> part(cols);
  bool present = part.present(rows);
  Vector<T> v[Shape::kVectors];
  part.load(slope, present, 0, v);
  A factor = scale.of(part.row(), present);
  if (present && targets[part.row()] == targets.ignore_index) factor = 0;  // also if dy is not finite or the count is 0
  part.store(dx, present, [&](int i, int k) { return widen(v[i])[k] * factor; });
}

// Rows of any size and alignment: a block for each.
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
      results.write_loss(row, row_loss(s, at_target, c, smoothing));
    }
    if (!results.slope) continue;
    Probability<T, A> probability(s);
    A factor = scale.of(row, true);
    if (!c.in_range) factor = nan<A>();
    map_row(from, results.slope + row * cols, cols, [&](int64_t col, A x) {
      A p = probability.of(x) - smoothing.per_class - (col == c.target ? 1 - smoothing.total : A(0));
      return c.ignored ? A(0) : p * factor;
    });
  }
}

template <typename T, typename A>
__global__ void __launch_bounds__(kAnyRowThreads)
    cross_entropy_scale_any_kernel(const T *slope, T *dx, Targets targets, Scale<T, A> scale, int64_t rows,
                                   int64_t cols) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    A factor = scale.of(row, true);
    if (targets[row] == targets.ignore_index) factor = 0;
    map_row(slope + row * cols, dx + row * cols, cols, [&](int64_t, A slope) { return slope * factor; });
  }
}

// Counts the rows that are not ignored, in kParts parts.
constexpr int kSumThreads = 256;

template <typename A>
__global__ void __launch_bounds__(kSumThreads) cross_entropy_parts_kernel(Targets targets, A *counts, int64_t rows) {
  Exchange<Span::block, Sums<1, A>> exchange;
  Sums<1, A> part = {};
#pragma unroll 4
  for (int64_t row = int64_t{blockIdx.x} * kSumThreads + threadIdx.x; row < rows; row += gridDim.x * kSumThreads)
    part.value[0] += targets[row] == targets.ignore_index ? 0 : 1;
  part = sum_row(part, exchange);
  if (threadIdx.x == 0) counts[blockIdx.x] = part.value[0];
}

// The sum or the mean of the rows' losses, by one block or one cluster. The loss of an ignored row, and of no other, is
// -0. The order of the additions depends on the number of rows alone.
constexpr int kLossThreads = 1024;

__device__ inline bool is_ignored(float loss) { return __float_as_uint(loss) == 0x80000000u; }
__device__ inline bool is_ignored(double loss) { return __double_as_longlong(loss) == (1ll << 63); }

template <Span kSpan, typename T, typename A>
__global__ void __launch_bounds__(kLossThreads)
    cross_entropy_loss_kernel(const A *losses, T *loss, int64_t rows, bool mean) {
  constexpr int kUnroll = 8;
  int64_t first = blockIdx.x * kLossThreads + threadIdx.x, step = gridDim.x * kLossThreads;
  Exchange<kSpan, Sums<2, A>> exchange;
  wait_for_kernel_before();
  Sums<2, A> all = {};
  auto add = [&](A loss) {
    all.value[0] += loss;
    all.value[1] += is_ignored(loss) ? 0 : 1;
  };
  int64_t vectors = misaligned_elements(losses, sizeof(A)) ? 0 : rows / kVectorSize<A>;
  for (int64_t i = first; i < vectors; i += kUnroll * step) {
    Vector<A> v[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j)
      if (i + j * step < vectors) v[j] = load_once(losses + (i + j * step) * kVectorSize<A>);
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (i + j * step >= vectors) continue;
      auto l = widen(v[j]);
#pragma unroll
      for (int k = 0; k < kVectorSize<A>; ++k) add(l[k]);
    }
  }
  for (int64_t row = vectors * kVectorSize<A> + first; row < rows; row += step) add(losses[row]);
  all = sum_row(all, exchange);
  if (first == 0) *loss = narrow<T>(mean ? all.value[0] / all.value[1] : all.value[0]);
}

// ------------------------------------------------------------------------------------------------------- launchers

// For kernels with kSlope. No ClusterRow for float64: blocks of a cluster exchange at most 16 bytes, too few for
// Exponentials<double>.
template <typename T>
constexpr auto slope_shapes() {
  if constexpr (sizeof(T) == 2)
    return RegisterRowShapes<WarpRow<T, 8, 1>, WarpRow<T, 8, 2>, WarpRow<T, 8, 4, 1536>, WarpRow<T, 16, 4, 1536>,
                             WarpRow<T, 32, 3, 1536>, WarpRow<T, 32, 4, 1536>, BlockRow<T, 4, 512, 1536>,
                             BlockRow<T, 8>, ClusterRow<T, 8, 256>, ClusterRow<T, 8>>();
  else if constexpr (sizeof(T) == 4)
    return RegisterRowShapes<WarpRow<T, 8, 1>, WarpRow<T, 8, 2>, WarpRow<T, 8, 4>, WarpRow<T, 16, 4>, WarpRow<T, 32, 4>,
                             WarpRow<T, 32, 6>, BlockRow<T, 4>, BlockRow<T, 8, 1024>, ClusterRow<T, 8, 256>,
                             ClusterRow<T, 16, 256, 512>>();
  else
    return RegisterRowShapes<WarpRow<T, 8, 1>, WarpRow<T, 8, 2>, WarpRow<T, 8, 4>, WarpRow<T, 16, 4>, WarpRow<T, 32, 4>,
                             BlockRow<T, 4>, BlockRow<T, 8, 512, 512>>();
}

// For the loss alone. Longer rows are streamed.
template <typename T>
using LossShapes =
    RegisterRowShapes<WarpRow<T, 8, 1>, WarpRow<T, 8, 2>, WarpRow<T, 8, 4, 1536>, WarpRow<T, 16, 4, 2048>,
                      WarpRow<T, 32, 4, 2048>, WarpRow<T, 32, 8, sizeof(T) == 4 ? 1280 : 1024>, BlockRow<T, 8>>;

// For slope * scale. In a ClusterRow each block has a part of the row; they exchange nothing.
template <typename T>
using ScaleShapes = RegisterRowShapes<WarpRow<T, 8, 1>, WarpRow<T, 8, 2>, WarpRow<T, 8, 4>, WarpRow<T, 16, 4>,
                                      WarpRow<T, 32, 4>, BlockRow<T, 4>, ClusterRow<T, 4>, ClusterRow<T, 8>>;

template <typename T, typename A = Accumulate<T>>
Status cross_entropy_rows(const char *op, const CrossEntropyAttrs &attrs, const Tensor &x, const Targets &targets,
                          const Results<T, A> &results, const Scale<T, A> &scale, void *stream) {
  DeviceLimits device;
  AOT_TRY(device_limits(op, &device));
  int64_t rows = attrs.rows(x), cols = attrs.cols(x);
  if (rows == 0) return kOk;
  const T *from = x.as<const T>();
  Smoothing<A> smoothing = {A(attrs.label_smoothing), A(attrs.label_smoothing / cols), A(1. / cols)};
  int64_t vectors = row_vectors<T>(cols, from, results.slope);
  auto s = static_cast<cudaStream_t>(stream);
  auto any = [&] {
    cross_entropy_any_kernel<<<grid_size(rows), any_row_block(cols), 0, s>>>(from, targets, results, scale, rows, cols,
                                                                             smoothing);
    return check_launch(op);
  };
  auto stream_rows = [&] {
    if (cols % kVectorSize<T> != 0 || !aligned(from)) return any();
    cross_entropy_stream_kernel<<<grid_size(rows), kStreamThreads, 0, s>>>(from, targets, results, rows, cols,
                                                                           smoothing);
    return check_launch(op);
  };
  auto launch = [&](auto smooth, auto slope) {
    return [=](auto shape, const RegisterRowPlan &plan) {
      using Shape = decltype(shape);
      return launch_register_rows<Shape>(op, plan, rows, cross_entropy_kernel<Shape, smooth, slope>, stream, from,
                                         targets, results, scale, rows, cols, smoothing);
    };
  };
  constexpr std::true_type kYes;
  constexpr std::false_type kNo;
  if (attrs.label_smoothing != 0)
    return dispatch_register_rows(slope_shapes<T>(), vectors, device, launch(kYes, kYes), any);
  if (results.slope) return dispatch_register_rows(slope_shapes<T>(), vectors, device, launch(kNo, kYes), any);
  return dispatch_register_rows(LossShapes<T>(), vectors, device, launch(kNo, kNo), stream_rows);
}

template <typename T, typename A = Accumulate<T>>
Status cross_entropy_scale(const char *op, const CrossEntropyAttrs &attrs, const Tensor &slope, T *dx,
                           const Targets &targets, const Scale<T, A> &scale, void *stream) {
  DeviceLimits device;
  AOT_TRY(device_limits(op, &device));
  int64_t rows = attrs.rows(slope), cols = attrs.cols(slope);
  const T *from = slope.as<const T>();
  auto launch = [&](auto shape, const RegisterRowPlan &plan) {
    using Shape = decltype(shape);
    return launch_register_rows<Shape>(op, plan, rows, cross_entropy_scale_kernel<Shape>, stream, from, dx, targets,
                                       scale, rows, cols);
  };
  return dispatch_register_rows(ScaleShapes<T>(), row_vectors<T>(cols, from, dx), device, launch, [&] {
    cross_entropy_scale_any_kernel<<<grid_size(rows), any_row_block(cols), 0, static_cast<cudaStream_t>(stream)>>>(
        from, dx, targets, scale, rows, cols);
    return check_launch(op);
  });
}

// This kernel overlaps the end of the rows kernel (overlap.cuh).
template <typename T, typename A = Accumulate<T>>
Status cross_entropy_loss(const CrossEntropy &op, const A *losses, T *loss, int64_t rows, void *stream) {
  DeviceLimits device;
  AOT_TRY(device_limits(op.name, &device));
  const unsigned cluster = device.clusters && rows > 16 * kLossThreads ? kMaxCluster : 1;
  const LaunchShape shape = {cluster, kLossThreads, 0, cluster, true};
  auto *kernel =
      cluster > 1 ? cross_entropy_loss_kernel<Span::cluster, T, A> : cross_entropy_loss_kernel<Span::block, T, A>;
  return launch_kernel(op.name, kernel, shape, stream, losses, loss, rows, op.mean());
}

Status cross_entropy_cuda(const CrossEntropy &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &x = in[op.kX], &loss = out[op.kY], &slope = out[op.kSlope], &work = out[op.kWork];
  if (op.reduces() && !work) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  return dispatch(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    Targets targets(in[op.kTarget], op.ignore_index);
    A *losses = op.reduces() ? work.as<A>() : nullptr;
    Results<T, A> results = {op.reduces() ? nullptr : loss.as<T>(), losses, slope.as<T>()};
    AOT_TRY((cross_entropy_rows<T>(op.name, op, x, targets, results, Scale<T, A>{}, stream)));
    if (!op.reduces()) return kOk;
    return cross_entropy_loss(op, losses, loss.as<T>(), op.rows(x), stream);
  });
}

Status cross_entropy_backward_cuda(const CrossEntropyBackward &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &dy = in[op.kDy], &x = in[op.kX], &slope = in[op.kSlope], &dx = out[op.kDx], &work = out[op.kWork];
  if (op.mean() && !work) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  return dispatch(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    Targets targets(in[op.kTarget], op.ignore_index);
    A *counts = op.mean() ? work.as<A>() : nullptr;
    if (counts) {
      cross_entropy_parts_kernel<A>
          <<<op.kParts, kSumThreads, 0, static_cast<cudaStream_t>(stream)>>>(targets, counts, op.rows(x));
      AOT_TRY(check_launch(op.name));
    }
    Scale<T, A> scale = {dy.as<const T>(), !op.reduces(), counts};
    if (slope) return cross_entropy_scale(op.name, op, slope, dx.as<T>(), targets, scale, stream);
    return cross_entropy_rows(op.name, op, x, targets, Results<T, A>{nullptr, nullptr, dx.as<T>()}, scale, stream);
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(CrossEntropy, aot_cross_entropy_cuda, cross_entropy_cuda)
AOT_ENTRY(CrossEntropyBackward, aot_cross_entropy_backward_cuda, cross_entropy_backward_cuda)
