#include "softmax.h"

#include "cuda/overlap.cuh"
#include "cuda/rows.cuh"
#include "cuda/softmax.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

// --------------------------------------------------------------------------------------- kernels along the last axis

template <typename T>
__device__ Accumulate<T> dot(const Vector<T> &v, const Vector<T> &w) {
  auto a = widen(v), b = widen(w);
  Accumulate<T> sum = 0;
#pragma unroll
  for (int k = 0; k < kVectorSize<T>; ++k) sum += a[k] * b[k];
  return sum;
}

// Whether a kernel overlaps the end of the one before. Blocks of kernels that do start more slowly (overlap.cuh),
// and the small ones would take longer than their rows.
template <class Shape, bool kBackward, typename T = typename Shape::T>
constexpr bool kOverlaps = Shape::kSpan == Span::warp    ? Shape::kVectors > 1
                           : Shape::kSpan == Span::block ? sizeof(T) == 4 || (sizeof(T) == 2 && kBackward)
                                                         : true;

// Whether the backward's loads are kept by the second-level cache. Rows of 16 bits and more than 65536 columns took
// 0.976 of their time without.
template <class Shape>
constexpr bool kKeeps = Shape::kSpan != Span::cluster || Shape::kThreads < 512 || sizeof(typename Shape::T) > 2;

template <class Shape, typename T = typename Shape::T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    softmax_kernel(const T *x, T *y, int64_t rows, int64_t cols) {
  if constexpr (kOverlaps<Shape, false>) wait_for_kernel_before(), launch_next();
  RegisterRow<Shape> part(cols);
  bool present = part.present(rows);
  Vector<T> v[Shape::kVectors];
  part.template load<true>(x, present, kMinusInfinity, v);
  RowExchange<Shape, Exponentials<A>> exchange;
  auto [row, scale] = row_exponentials<false>(v, part, exchange);
  Probability<T, A> p(row, scale);
  part.store(y, present, [&](int i, int k) { return p.of_exponential(widen(v[i])[k]); });
}

template <class Shape, typename T = typename Shape::T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    softmax_backward_kernel(const T *dy, const T *y, T *dx, int64_t rows, int64_t cols) {
  if constexpr (kOverlaps<Shape, true>) wait_for_kernel_before(), launch_next();
  RegisterRow<Shape> part(cols);
  bool present = part.present(rows);
  Vector<T> d[Shape::kVectors], v[Shape::kVectors];
  part.template load<kKeeps<Shape>>(dy, present, 0, d);
  part.template load<kKeeps<Shape>>(y, present, 0, v);
  RowExchange<Shape, Sums<1, A>> exchange;
  Sums<1, A> sum = {};
#pragma unroll
  for (int i = 0; i < Shape::kVectors; ++i) {
    sum.value[0] += dot(d[i], v[i]);
    if constexpr (sizeof(T) == 2) keep_packed(d[i], part.opaque_zero()), keep_packed(v[i], part.opaque_zero());
  }
  if constexpr (Shape::kSpan == Span::warp) sum = sum_lanes<Shape::kLanes>(sum);
  else sum = sum_row(sum, exchange);
  part.store(dx, present, [&](int i, int k) { return widen(v[i])[k] * (widen(d[i])[k] - sum.value[0]); });
}

template <typename T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kAnyRowThreads) softmax_any_kernel(const T *x, T *y, int64_t rows, int64_t cols) {
  Exchange<Span::block, Exponentials<A>> exchange;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    Exponentials<A> s = any_row_exponentials(x + row * cols, cols, exchange);
    Probability<T, A> p(s);
    map_row(x + row * cols, y + row * cols, cols, [&](int64_t, A x) { return p.of(x); });
  }
}

template <typename T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kAnyRowThreads)
    softmax_backward_any_kernel(const T *dy, const T *y, T *dx, int64_t rows, int64_t cols) {
  Exchange<Span::block, Sums<1, A>> exchange;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T *d = dy + row * cols;
    Sums<1, A> sum = {};
    for_each_in_row(y + row * cols, cols, [&](int64_t c, A y) { sum.value[0] += widen(d[c]) * y; });
    sum = sum_row(sum, exchange);
    map_row(y + row * cols, dx + row * cols, cols, [&](int64_t c, A y) { return y * (widen(d[c]) - sum.value[0]); });
  }
}

// ---------------------------------------------------------------------------------------- kernels along another axis

// x is (outer, n, inner). A block takes kAxisCols neighbouring columns along inner, so that its loads coalesce, and its
// kAxisRows rows of threads share the axis n. Each element is read twice, the second time from a cache if n is small.
constexpr int kAxisCols = 32, kAxisRows = 16;

// Calls f(base, present) for each column of this thread: its first element, and whether there is such a column.
template <class F>
__device__ void each_column(int64_t outer, int64_t n, int64_t inner, F f) {
  for (int64_t o = blockIdx.y; o < outer; o += gridDim.y)
    for (int64_t first = int64_t{blockIdx.x} * kAxisCols; first < inner; first += int64_t{gridDim.x} * kAxisCols)
      f(o * n * inner + first + threadIdx.x, first + threadIdx.x < inner);
}

template <typename T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kAxisCols *kAxisRows)
    softmax_axis_kernel(const T *x, T *y, int64_t outer, int64_t n, int64_t inner) {
  __shared__ Exponentials<A> parts[kAxisRows][kAxisCols];
  each_column(outer, n, inner, [&](int64_t base, bool present) {
    Exponentials<A> s = Exponentials<A>::none();
    if (present)
      for (int64_t i = threadIdx.y; i < n; i += kAxisRows) add<T>(s, A(widen(x[base + i * inner])));
    __syncthreads();  // `parts` of the previous columns has been read
    parts[threadIdx.y][threadIdx.x] = s;
    __syncthreads();
    s = parts[0][threadIdx.x];
    for (int r = 1; r < kAxisRows; ++r) s = combine<T, false>(s, parts[r][threadIdx.x]);
    Probability<T, A> p(s);
    if (present)
      for (int64_t i = threadIdx.y; i < n; i += kAxisRows)
        y[base + i * inner] = narrow<T>(p.of(widen(x[base + i * inner])));
  });
}

template <typename T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kAxisCols *kAxisRows)
    softmax_backward_axis_kernel(const T *dy, const T *y, T *dx, int64_t outer, int64_t n, int64_t inner) {
  __shared__ A parts[kAxisRows][kAxisCols];
  each_column(outer, n, inner, [&](int64_t base, bool present) {
    A sum = 0;
    if (present)
      for (int64_t i = threadIdx.y; i < n; i += kAxisRows)
        sum += widen(dy[base + i * inner]) * widen(y[base + i * inner]);
    __syncthreads();
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    sum = 0;
    for (int r = 0; r < kAxisRows; ++r) sum += parts[r][threadIdx.x];
    if (present)
      for (int64_t i = threadIdx.y; i < n; i += kAxisRows) {
        int64_t at = base + i * inner;
        dx[at] = narrow<T>(widen(y[at]) * (widen(dy[at]) - sum));
      }
  });
}

// ------------------------------------------------------------------------------------------------------- launchers

constexpr int kLongCluster = 16;  // blocks; more than each device with clusters grants

// No ClusterRow for float64: blocks of a cluster exchange at most 16 bytes, too few for Exponentials<double>.
template <typename T>
constexpr auto softmax_shapes() {
  if constexpr (sizeof(T) == 2)
    return RegisterRowShapes<WarpRow<T, 8, 1>, WarpRow<T, 8, 2>, WarpRow<T, 16, 2>, WarpRow<T, 32, 2>,
                             WarpRow<T, 32, 3>, RegisterRowShape<T, 32, 4, Span::warp, 64, 1024>, BlockRow<T, 4>,
                             BlockRow<T, 8>, ClusterRow<T, 8, 256>, ClusterRow<T, 8>>();
  else if constexpr (sizeof(T) == 4)
    return RegisterRowShapes<WarpRow<T, 8, 1>, WarpRow<T, 8, 2>, WarpRow<T, 16, 2>, WarpRow<T, 32, 2>,
                             WarpRow<T, 32, 4>, WarpRow<T, 32, 6>, BlockRow<T, 8>, BlockRow<T, 8, 1024>,
                             ClusterRow<T, 8, 256, 1024, kLongCluster>>();
  else
    return RegisterRowShapes<WarpRow<T, 8, 1>, WarpRow<T, 8, 2>, WarpRow<T, 16, 2>, WarpRow<T, 32, 2>,
                             WarpRow<T, 32, 4>, BlockRow<T, 4>, BlockRow<T, 8, 512, 512>>();
}

template <typename T>
constexpr auto softmax_backward_shapes() {
  if constexpr (sizeof(T) < 8)
    return RegisterRowShapes<WarpRow<T, 8, 1>, WarpRow<T, 8, 2>, WarpRow<T, 16, 2>, WarpRow<T, 32, 2>,
                             WarpRow<T, 32, 3>, WarpRow<T, 32, 4>, BlockRow<T, 4>, ClusterRow<T, 4, 256>,
                             ClusterRow<T, 4, 512, 1024, kLongCluster>>();
  else
    return RegisterRowShapes<WarpRow<T, 8, 1>, WarpRow<T, 8, 2>, WarpRow<T, 16, 2>, WarpRow<T, 32, 2>,
                             WarpRow<T, 32, 4>, BlockRow<T, 4>, BlockRow<T, 8, 512, 512>>();
}

// Whether the device holds a cluster of the plan's size.
template <auto kernel>
Status holds_cluster(const char *op, const RegisterRowPlan &plan, bool *holds) {
  int64_t at_once = 1;
  if (plan.cluster > kMaxCluster) AOT_TRY(clusters_at_once<kernel>(op, 32 * plan.warps, plan.cluster, 0, &at_once));
  *holds = at_once > 0;
  return kOk;
}

template <typename T>
Status softmax_rows(const T *x, T *y, int64_t rows, int64_t cols, const DeviceLimits &device, void *stream) {
  auto any = [&] { return launch_rows(Softmax::name, softmax_any_kernel<T>, rows, cols, stream, x, y, rows, cols); };
  auto launch = [&](auto shape, RegisterRowPlan plan) -> Status {
    using Shape = decltype(shape);
    constexpr auto kernel = softmax_kernel<Shape>;
    bool holds;
    AOT_TRY(holds_cluster<kernel>(Softmax::name, plan, &holds));
    if (!holds) return any();
    plan.overlap = kOverlaps<Shape, false>;
    return launch_register_rows<Shape>(Softmax::name, plan, rows, kernel, stream, x, y, rows, cols);
  };
  return dispatch_register_rows(softmax_shapes<T>(), row_vectors<T>(cols, x, y), device, launch, any);
}

template <typename T>
Status softmax_backward_rows(const T *dy, const T *y, T *dx, int64_t rows, int64_t cols, const DeviceLimits &device,
                             void *stream) {
  auto any = [&] {
    return launch_rows(SoftmaxBackward::name, softmax_backward_any_kernel<T>, rows, cols, stream, dy, y, dx, rows,
                       cols);
  };
  auto launch = [&](auto shape, RegisterRowPlan plan) -> Status {
    using Shape = decltype(shape);
    constexpr auto kernel = softmax_backward_kernel<Shape>;
    bool holds;
    AOT_TRY(holds_cluster<kernel>(SoftmaxBackward::name, plan, &holds));
    if (!holds) return any();
    plan.overlap = kOverlaps<Shape, true>;
    return launch_register_rows<Shape>(SoftmaxBackward::name, plan, rows, kernel, stream, dy, y, dx, rows, cols);
  };
  return dispatch_register_rows(softmax_backward_shapes<T>(), row_vectors<T>(cols, dy, y, dx), device, launch, any);
}

LaunchShape axis_launch(const Softmax::Axes &a) {
  return {{grid_size(ceil_div(a.inner, kAxisCols)), static_cast<unsigned>(std::min<int64_t>(a.outer, 65535))},
          {kAxisCols, kAxisRows}};
}

Status softmax_cuda(const Softmax &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &x = in[0], &y = out[0];
  const Softmax::Axes a = op.axes(x);
  DeviceLimits device;
  AOT_TRY(device_limits(Softmax::name, &device));
  return dispatch(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (a.inner == 1) return softmax_rows(x.as<const T>(), y.as<T>(), a.outer, a.n, device, stream);
    return launch_kernel(Softmax::name, softmax_axis_kernel<T>, axis_launch(a), stream, x.as<const T>(), y.as<T>(),
                         a.outer, a.n, a.inner);
  });
}

Status softmax_backward_cuda(const SoftmaxBackward &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &dy = in[0], &y = in[1], &dx = out[0];
  const SoftmaxBackward::Axes a = op.axes(y);
  DeviceLimits device;
  AOT_TRY(device_limits(SoftmaxBackward::name, &device));
  return dispatch(y.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (a.inner == 1)
      return softmax_backward_rows(dy.as<const T>(), y.as<const T>(), dx.as<T>(), a.outer, a.n, device, stream);
    return launch_kernel(SoftmaxBackward::name, softmax_backward_axis_kernel<T>, axis_launch(a), stream,
                         dy.as<const T>(), y.as<const T>(), dx.as<T>(), a.outer, a.n, a.inner);
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(Softmax, aot_softmax_cuda, softmax_cuda)
AOT_ENTRY(SoftmaxBackward, aot_softmax_backward_cuda, softmax_backward_cuda)
