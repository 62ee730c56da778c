// The rows of cross entropy on a GPU, for cross_entropy and linear_cross_entropy.
#pragma once
#include "cross_entropy.h"
#include "cuda/overlap.cuh"
#include "cuda/rows.cuh"
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

// The loss, or dy: of T, or of float32, in which T is summed.
template <typename T, typename A = Accumulate<T>>
struct Loss {
  void *data = nullptr;
  bool wide = false;

  Loss() = default;
  explicit Loss(const Tensor &t) : data(t.data), wide(itemsize(t.dtype) > static_cast<int64_t>(sizeof(T))) {}
  __device__ A read(int64_t i) const {
    return wide ? static_cast<const A *>(data)[i] : widen(static_cast<const T *>(data)[i]);
  }
  __device__ void write(int64_t i, A value) const {
    if (wide) static_cast<A *>(data)[i] = value;
    else static_cast<T *>(data)[i] = narrow<T>(value);
  }
};

// The factor of a row's slope: dy, or 1 if there is none, divided by *count unless that is null.
template <typename T, typename A>
struct Scale {
  Loss<T> dy;
  bool each_row;
  const A *count;

  __device__ A of(int64_t row, bool present) const {
    A scale = dy.data && present ? dy.read(each_row ? row : 0) : A(1);
    return count ? scale / *count : scale;
  }
};

// --------------------------------------------------------------------------------------------------------- kernels

// The outputs of a rows kernel, each unless it is null.
template <typename T, typename A>
struct Results {
  Loss<T> loss;  // of each row: reduction = "none"
  A *losses;     // the same for the reduction
  T *slope;      // times the scale; it may be x

  __device__ void write_loss(int64_t row, A value) const {
    if (loss.data) loss.write(row, value + A(0));  // + 0: not -0
    if (losses) losses[row] = value;
  }
};

// Row: a RegisterRow or an UnalignedRow. kSmoothing: with label smoothing; kSlope: results.slope may be given. It
// overlaps the end of the kernel that counts, if there is one.
template <class Row, bool kSmoothing, bool kSlope, class Shape = typename Row::Shape, typename T = typename Row::T,
          typename A = Accumulate<T>>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    cross_entropy_kernel(const T *x, Targets targets, Results<T, A> results, Scale<T, A> scale, int64_t rows,
                         int64_t cols, Smoothing<A> smoothing) {
  launch_next();
  Row part = row_of<Row>(x, cols);
  bool present = part.present(rows);
  Vector<T> v[Shape::kVectors];
  part.load(x, present, kMinusInfinity, v);
  Class c(present ? targets[part.row()] : targets.ignore_index, targets.ignore_index, cols);
  bool mine = present && part.has(c.column());  // for one thread of the row
  A at_target = mine ? widen(x[part.row() * cols + c.column()]) : A(0);

  A factor = 1;
  if (kSlope && results.slope) {
    wait_for_kernel_before();
    factor = scale.of(part.row(), present);
  }
  RowExchange<Shape, Exponentials<A>> exchange;
  auto [row, to_row] = row_exponentials<kSmoothing>(v, part, exchange);
  if (mine) results.write_loss(part.row(), row_loss(row, at_target, c, smoothing));
  if (!kSlope || !results.slope) return;

  if (c.ignored) {
    if constexpr (Row::kEnds) part.store_end(results.slope, present, 0);
    return part.store(results.slope, present, [&](int, int) { return A(0); });
  }
  if (!c.in_range) factor = nan<A>();
  Probability<T, A> p(row, to_row, factor);
  A off_target = smoothing.per_class * factor, on_target = (1 - smoothing.total) * factor;
  part.store(results.slope, present, [&](int i, int k) {
    A slope = p.of_exponential(widen(v[i])[k]);
    return kSmoothing ? slope - off_target : slope;
  });
  if constexpr (Row::kEnds) part.store_end(results.slope, present, p.of(part.end()) - off_target);
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
  auto s = streamed_exponentials<false>(x + row * cols, cols, exchange);
  if (threadIdx.x != 0) return;
  Class c(targets[row], targets.ignore_index, cols);
  results.write_loss(row, row_loss(s, widen(x[row * cols + c.column()]), c, smoothing));
}

template <class Row, class Shape = typename Row::Shape, typename T = typename Row::T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(Shape::kThreads)
    cross_entropy_scale_kernel(const T *slope, T *dx, Targets targets, Scale<T, A> scale, int64_t rows, int64_t cols) {
  Row part = row_of<Row>(slope, cols);
  bool present = part.present(rows);
  Vector<T> v[Shape::kVectors];
  part.load(slope, present, 0, v);
  A factor = scale.of(part.row(), present);
  // 0 also if dy is not finite or the count is 0
  const bool ignored = present && targets[part.row()] == targets.ignore_index;
  part.store(dx, present, [&](int i, int k) { return ignored ? A(0) : widen(v[i])[k] * factor; });
  if constexpr (Row::kEnds) part.store_end(dx, present, ignored ? A(0) : part.end() * factor);
}

// dx = slope * factor over slope itself. Vectors pass the ends of rows, so all are aligned, however long a row is. The
// blocks are few and each has many vectors: with a factor of 1, where nothing is left to do, they are over in
// microseconds.
constexpr int kInPlaceThreads = 256, kInPlaceBlocks = 4, kInPlaceVectors = 8;
constexpr int64_t kInPlaceWaves = 4;

template <typename T>
constexpr int64_t kInPlacePiece = int64_t{kInPlaceThreads} * kInPlaceVectors * kVectorSize<T>;

template <typename T, typename A>
__global__ void __launch_bounds__(kInPlaceThreads, kInPlaceBlocks)
    cross_entropy_scale_in_place_kernel(T *dx, Targets targets, Scale<T, A> scale, int64_t size, int64_t cols) {
  constexpr int kSize = kVectorSize<T>;
  if (!scale.each_row && scale.of(0, true) == A(1)) return;
  auto factor_of = [&](int64_t row) {
    // an ignored row is 0 as it is, and stays so also if dy is not finite
    return targets[row] == targets.ignore_index ? A(1) : scale.of(row, true);
  };
  auto scale_element = [&](int64_t i) { dx[i] = narrow<T>(widen(dx[i]) * factor_of(i / cols)); };

  const int64_t head = min(misaligned_elements(dx, sizeof(T)), size), end = size - (size - head) % kSize;
  const int64_t thread = int64_t{blockIdx.x} * kInPlacePiece<T> + threadIdx.x * kSize;
  for (int64_t first = head + thread; first < end; first += gridDim.x * kInPlacePiece<T>) {
    Vector<T> v[kInPlaceVectors];
#pragma unroll
    for (int j = 0; j < kInPlaceVectors; ++j) {
      const int64_t i = first + j * kInPlaceThreads * kSize;
      if (i < end) v[j] = load_once(dx + i);
    }
    int64_t row_end = 0;
    A factor = 1;
#pragma unroll
    for (int j = 0; j < kInPlaceVectors; ++j) {
      const int64_t i = first + j * kInPlaceThreads * kSize;
      if (i >= end) continue;
      if (i >= row_end) {
        const int64_t row = i / cols;
        row_end = (row + 1) * cols, factor = factor_of(row);
      }
      if (i + kSize > row_end) {
#pragma unroll 1
        for (int k = 0; k < kSize; ++k) scale_element(i + k);
        continue;
      }
      auto x = widen(v[j]);
#pragma unroll
      for (int k = 0; k < kSize; ++k) x[k] *= factor;
      store(dx + i, narrow(x));
    }
  }
  if (blockIdx.x > 0) return;
  if (threadIdx.x < head) scale_element(threadIdx.x);
  if (end + threadIdx.x < size) scale_element(end + threadIdx.x);
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
    A at_target = threadIdx.x == 0 && cols > 0 ? widen(from[c.column()]) : A(0);  // slope may be x: it is read first
    Exponentials<A> s = any_row_exponentials(from, cols, exchange);
    if (threadIdx.x == 0) results.write_loss(row, row_loss(s, at_target, c, smoothing));
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

// ------------------------------------------------------------------------------------------------- sums over the rows

// By one block or one cluster. The order of the additions depends on the number of rows alone.
constexpr int kSumThreads = 1024, kSumUnroll = 8;

// Counts the rows that are not ignored.
template <Span kSpan, typename A>
__global__ void __launch_bounds__(kSumThreads) cross_entropy_count_kernel(Targets targets, A *count, int64_t rows) {
  launch_next();
  int64_t first = blockIdx.x * kSumThreads + threadIdx.x, step = gridDim.x * kSumThreads;
  Exchange<kSpan, Sums<1, int64_t>> exchange;
  Sums<1, int64_t> all = {};
#pragma unroll kSumUnroll
  for (int64_t row = first; row < rows; row += step) all.value[0] += targets[row] == targets.ignore_index ? 0 : 1;
  all = sum_row(all, exchange);
  if (first == 0) *count = static_cast<A>(all.value[0]);
}

// The sum or the mean of the rows' losses. The loss of an ignored row, and of no other, is -0.
__device__ inline bool is_ignored(float loss) { return __float_as_uint(loss) == 0x80000000u; }
__device__ inline bool is_ignored(double loss) { return __double_as_longlong(loss) == (1ll << 63); }

template <Span kSpan, typename T, typename A>
__global__ void __launch_bounds__(kSumThreads)
    cross_entropy_loss_kernel(const A *losses, Loss<T> loss, int64_t rows, bool mean) {
  int64_t first = blockIdx.x * kSumThreads + threadIdx.x, step = gridDim.x * kSumThreads;
  Exchange<kSpan, Sums<2, A>> exchange;
  wait_for_kernel_before();
  Sums<2, A> all = {};
  auto add = [&](A loss) {
    all.value[0] += loss;
    all.value[1] += is_ignored(loss) ? 0 : 1;
  };
  int64_t vectors = misaligned_elements(losses, sizeof(A)) ? 0 : rows / kVectorSize<A>;
  for (int64_t i = first; i < vectors; i += kSumUnroll * step) {
    Vector<A> v[kSumUnroll];
#pragma unroll
    for (int j = 0; j < kSumUnroll; ++j)
      if (i + j * step < vectors) v[j] = load_once(losses + (i + j * step) * kVectorSize<A>);
#pragma unroll
    for (int j = 0; j < kSumUnroll; ++j) {
      if (i + j * step >= vectors) continue;
      auto l = widen(v[j]);
#pragma unroll
      for (int k = 0; k < kVectorSize<A>; ++k) add(l[k]);
    }
  }
  for (int64_t row = vectors * kVectorSize<A> + first; row < rows; row += step) add(losses[row]);
  all = sum_row(all, exchange);
  if (first == 0) loss.write(0, mean ? all.value[0] / all.value[1] : all.value[0]);
}

// ------------------------------------------------------------------------------------------------------- launchers

// For kernels with kSlope. No ClusterRow for float64: blocks of a cluster exchange at most 16 bytes, too few for
// Exponentials<double>.
template <typename T>
constexpr auto slope_shapes() {
  if constexpr (sizeof(T) == 2)
    return RegisterRowShapes<WarpRow<T, 8, 1>, WarpRow<T, 8, 2>, WarpRow<T, 8, 4, 1536>, WarpRow<T, 16, 4, 1536>,
                             WarpRow<T, 32, 3, 1536>, WarpRow<T, 32, 4, 1536>, BlockRow<T, 4, 512, 1536>,
                             BlockRow<T, 8>, ClusterRow<T, 13, 256, 768, 2>, ClusterRow<T, 8, 256>, ClusterRow<T, 8>>();
  else if constexpr (sizeof(T) == 4)
    return RegisterRowShapes<WarpRow<T, 8, 1>, WarpRow<T, 8, 2>, WarpRow<T, 8, 4>, WarpRow<T, 16, 4>, WarpRow<T, 32, 4>,
                             WarpRow<T, 32, 6>, BlockRow<T, 4>, BlockRow<T, 8, 1024>, ClusterRow<T, 8, 256>,
                             ClusterRow<T, 16, 256, 512>>();
  else
    return RegisterRowShapes<WarpRow<T, 8, 1>, WarpRow<T, 8, 2>, WarpRow<T, 8, 4>, WarpRow<T, 16, 4>, WarpRow<T, 32, 4>,
                             BlockRow<T, 4>, BlockRow<T, 8, 512, 512>>();
}

// An UnalignedRow.
template <typename T>
constexpr auto unaligned_shapes() {
  if constexpr (sizeof(T) == 2)
    return RegisterRowShapes<WarpRow<T, 16, 2>, WarpRow<T, 32, 4>, BlockRow<T, 8>, ClusterRow<T, 13, 256, 768, 2>,
                             ClusterRow<T, 8, 256>, ClusterRow<T, 8>>();
  else if constexpr (sizeof(T) == 4)
    return RegisterRowShapes<WarpRow<T, 8, 4>, WarpRow<T, 32, 4>, BlockRow<T, 8, 1024>, ClusterRow<T, 8, 256>,
                             ClusterRow<T, 16, 256, 512>>();
  else return RegisterRowShapes<WarpRow<T, 32, 4>, BlockRow<T, 8, 512, 512>>();
}

struct Aligned {
  template <class Shape>
  using Row = RegisterRow<Shape>;
};
struct Unaligned {
  template <class Shape>
  using Row = UnalignedRow<Shape>;
};

// For the loss alone. Longer rows are streamed.
template <typename T>
using LossShapes =
    RegisterRowShapes<WarpRow<T, 8, 1>, WarpRow<T, 8, 2>, WarpRow<T, 8, 4, 1536>, WarpRow<T, 16, 4, 2048>,
                      WarpRow<T, 32, 4, 2048>, WarpRow<T, 32, 8, sizeof(T) == 4 ? 1280 : 1024>, BlockRow<T, 8>>;

// For slope * scale. In a ClusterRow each block has a part of the row; they exchange nothing.
template <typename T>
using ScaleShapes = RegisterRowShapes<WarpRow<T, 8, 1>, WarpRow<T, 8, 2>, WarpRow<T, 8, 4>, WarpRow<T, 16, 4>,
                                      WarpRow<T, 32, 4>, BlockRow<T, 4>, ClusterRow<T, 4>, ClusterRow<T, 8>>;
template <typename T>
using UnalignedScaleShapes = RegisterRowShapes<WarpRow<T, 16, 2>, WarpRow<T, 32, 4>, BlockRow<T, 4>, ClusterRow<T, 8>>;

template <typename T, typename A = Accumulate<T>>
Status cross_entropy_rows(const char *op, const CrossEntropyAttrs &attrs, const Tensor &x, const Targets &targets,
                          const Results<T, A> &results, const Scale<T, A> &scale, void *stream) {
  DeviceLimits device;
  AOT_TRY(device_limits(op, &device));
  int64_t rows = attrs.rows(x), cols = attrs.cols(x);
  if (rows == 0) return kOk;
  const T *from = x.as<const T>();
  Smoothing<A> smoothing = {A(attrs.label_smoothing), A(attrs.label_smoothing / cols), A(1. / cols)};
  auto any = [&] {
    return launch_rows(op, cross_entropy_any_kernel<T, A>, rows, cols, stream, from, targets, results, scale, rows,
                       cols, smoothing);
  };
  auto stream_rows = [&] {
    if (cols < kStreamThreads * kVectorSize<T>) return any();
    return launch_kernel(op, cross_entropy_stream_kernel<T>, {grid_size(rows), kStreamThreads}, stream, from, targets,
                         results, rows, cols, smoothing);
  };
  auto launch = [&](auto kind, auto smooth, auto slope) {
    return [=](auto shape, RegisterRowPlan plan) {
      using Row = typename decltype(kind)::template Row<decltype(shape)>;
      plan.overlap = scale.count != nullptr;  // the kernel that counts is the one before
      return launch_register_rows<decltype(shape)>(op, plan, rows, cross_entropy_kernel<Row, smooth, slope>, stream,
                                                   from, targets, results, scale, rows, cols, smoothing);
    };
  };
  constexpr std::true_type kYes;
  constexpr std::false_type kNo;
  int64_t vectors = row_vectors<T>(cols, from, results.slope);
  if (attrs.label_smoothing == 0 && !results.slope)
    return dispatch_register_rows(LossShapes<T>(), vectors, device, launch(Aligned(), kNo, kNo), stream_rows);
  auto dispatch_rows = [&](auto smooth) {
    if (cols % kVectorSize<T> == 0 && aligned(from, results.slope))
      return dispatch_register_rows(slope_shapes<T>(), vectors, device, launch(Aligned(), smooth, kYes), any);
    const int64_t most = unaligned_row_vectors<T>(cols, from, results.slope ? results.slope : from);
    return dispatch_register_rows(unaligned_shapes<T>(), most, device, launch(Unaligned(), smooth, kYes), any);
  };
  return attrs.label_smoothing == 0 ? dispatch_rows(kNo) : dispatch_rows(kYes);
}

template <typename T, typename A = Accumulate<T>>
Status cross_entropy_scale(const char *op, const CrossEntropyAttrs &attrs, const Tensor &slope, T *dx,
                           const Targets &targets, const Scale<T, A> &scale, void *stream) {
  DeviceLimits device;
  AOT_TRY(device_limits(op, &device));
  int64_t rows = attrs.rows(slope), cols = attrs.cols(slope);
  const T *from = slope.as<const T>();
  if (from == dx) {
    const int64_t size = rows * cols, most = kInPlaceWaves * kInPlaceBlocks * device.multiprocessors;
    if (size == 0) return kOk;
    const int64_t blocks = std::min(ceil_div(size, kInPlacePiece<T>), most);
    cross_entropy_scale_in_place_kernel<<<grid_size(blocks), kInPlaceThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        dx, targets, scale, size, cols);
    return check_launch(op);
  }
  auto launch = [&](auto kind) {
    return [=](auto shape, const RegisterRowPlan &plan) {
      using Row = typename decltype(kind)::template Row<decltype(shape)>;
      return launch_register_rows<decltype(shape)>(op, plan, rows, cross_entropy_scale_kernel<Row>, stream, from, dx,
                                                   targets, scale, rows, cols);
    };
  };
  auto any = [&] {
    return launch_rows(op, cross_entropy_scale_any_kernel<T, A>, rows, cols, stream, from, dx, targets, scale, rows,
                       cols);
  };
  if (cols % kVectorSize<T> == 0 && aligned(from, dx))
    return dispatch_register_rows(ScaleShapes<T>(), row_vectors<T>(cols, from, dx), device, launch(Aligned()), any);
  return dispatch_register_rows(UnalignedScaleShapes<T>(), unaligned_row_vectors<T>(cols, from, dx), device,
                                launch(Unaligned()), any);
}

// The launch of a sum over rows.
inline LaunchShape sum_shape(const DeviceLimits &device, int64_t rows) {
  const unsigned cluster = device.clusters && rows > 16 * kSumThreads ? kMaxCluster : 1;
  return {cluster, kSumThreads, 0, cluster};
}

template <typename A>
Status cross_entropy_count(const char *op, const Targets &targets, A *count, int64_t rows, void *stream) {
  DeviceLimits device;
  AOT_TRY(device_limits(op, &device));
  const LaunchShape shape = sum_shape(device, rows);
  auto *kernel =
      shape.cluster.x > 1 ? cross_entropy_count_kernel<Span::cluster, A> : cross_entropy_count_kernel<Span::block, A>;
  return launch_kernel(op, kernel, shape, stream, targets, count, rows);
}

// This kernel overlaps the end of the rows kernel (overlap.cuh).
template <typename T, typename A = Accumulate<T>>
Status cross_entropy_loss(const CrossEntropy &op, const A *losses, const Loss<T> &loss, int64_t rows, void *stream) {
  DeviceLimits device;
  AOT_TRY(device_limits(op.name, &device));
  LaunchShape shape = sum_shape(device, rows);
  shape.overlap = true;
  auto *kernel = shape.cluster.x > 1 ? cross_entropy_loss_kernel<Span::cluster, T, A>
                                     : cross_entropy_loss_kernel<Span::block, T, A>;
  return launch_kernel(op.name, kernel, shape, stream, losses, loss, rows, op.mean());
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot
