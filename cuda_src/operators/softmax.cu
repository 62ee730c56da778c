#include "softmax.h"

#include "cuda/axis.cuh"
#include "cuda/overlap.cuh"
#include "cuda/rows.cuh"
#include "cuda/softmax.cuh"
#include "cuda/staged_rows.cuh"

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

// Row: a RegisterRow or an UnalignedRow.
template <class Row, class Shape = typename Row::Shape, typename T = typename Row::T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    softmax_kernel(const T *x, T *y, int64_t rows, int64_t cols) {
  if constexpr (kOverlaps<Shape, false>) wait_for_kernel_before(), launch_next();
  Row part = row_of<Row>(x, cols);
  bool present = part.present(rows);
  Vector<T> v[Shape::kVectors];
  part.template load<true>(x, present, kMinusInfinity, v);
  RowExchange<Shape, Exponentials<A>> exchange;
  auto [row, scale] = row_exponentials<false>(v, part, exchange);
  Probability<T, A> p(row, scale);
  part.store(y, present, [&](int i, int k) { return p.of_exponential(widen(v[i])[k]); });
  if constexpr (Row::kEnds) part.store_end(y, present, p.of(part.end()));
}

template <class Row, class Shape = typename Row::Shape, typename T = typename Row::T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    softmax_backward_kernel(const T *dy, const T *y, T *dx, int64_t rows, int64_t cols) {
  if constexpr (kOverlaps<Shape, true>) wait_for_kernel_before(), launch_next();
  Row of_dy = row_of<Row>(dy, cols), of_y = of_dy;
  bool present = of_y.present(rows);
  Vector<T> d[Shape::kVectors], v[Shape::kVectors];
  of_dy.template load<kKeeps<Shape>>(dy, present, 0, d);
  of_y.template load<kKeeps<Shape>>(y, present, 0, v);
  RowExchange<Shape, Sums<1, A>> exchange;
  Sums<1, A> sum = {};
  if constexpr (Row::kEnds) sum.value[0] = of_dy.end() * of_y.end();
#pragma unroll
  for (int i = 0; i < Shape::kVectors; ++i) {
    sum.value[0] += dot(d[i], v[i]);
    if constexpr (sizeof(T) == 2) keep_packed(d[i], of_y.opaque_zero()), keep_packed(v[i], of_y.opaque_zero());
  }
  if constexpr (Shape::kSpan == Span::warp) sum = sum_lanes<Shape::kLanes>(sum);
  else sum = sum_row(sum, exchange);
  of_y.store(dx, present, [&](int i, int k) { return widen(v[i])[k] * (widen(d[i])[k] - sum.value[0]); });
  if constexpr (Row::kEnds) of_y.store_end(dx, present, of_y.end() * (of_dy.end() - sum.value[0]));
}

template <class Row, typename T = typename Row::T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kStagedThreads)
    softmax_staged_kernel(const T *x, T *y, int64_t rows, int cols, int share) {
  extern __shared__ uint4 memory[];
  T *staged = reinterpret_cast<T *>(memory);
  const StagedRows<Row> part(staged, rows, cols, share);
  part.load(x);
  part.arrive();
  part.each([&](int i, bool present) {
    T *row = staged + i * cols;
    A e[Row::kEach];
    Exponentials<A> s = Exponentials<A>::none();
    part.each_column([&](int k, int c) {
      e[k] = element(row, c, present && c < cols, A(kMinusInfinity));
      s.max = max(s.max, e[k]);
    });
    s.max = max_lanes<Row::kLanes>(s.max);
    ShiftedExp<T, A> exponential(s.base());
    part.each_column([&](int k, int) { s.sum += e[k] = exponential(e[k]); });
    s.sum = sum_lanes<Row::kLanes>(s.sum);
    Probability<T, A> p(s);
    part.each_column([&](int k, int c) {
      if (present && c < cols) row[c] = narrow<T>(p.divide(e[k]));
    });
  });
  part.store(y);
}

template <class Row, typename T = typename Row::T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kStagedThreads)
    softmax_backward_staged_kernel(const T *dy, const T *y, T *dx, int64_t rows, int cols, int share) {
  extern __shared__ uint4 memory[];
  T *staged_y = reinterpret_cast<T *>(memory), *staged_dy = staged_y + share * cols;
  const StagedRows<Row> of_y(staged_y, rows, cols, share), of_dy(staged_dy, rows, cols, share);
  of_dy.load(dy), of_y.load(y);
  of_y.arrive();
  of_y.each([&](int i, bool present) {
    T *row_of_y = staged_y + i * cols;
    const T *row_of_dy = staged_dy + i * cols;
    A d[Row::kEach], v[Row::kEach], sum = 0;
    of_y.each_column([&](int k, int c) {
      const bool has = present && c < cols;
      d[k] = element(row_of_dy, c, has), v[k] = element(row_of_y, c, has);
      sum += d[k] * v[k];
    });
    sum = sum_lanes<Row::kLanes>(sum);
    of_y.each_column([&](int k, int c) {
      if (present && c < cols) row_of_y[c] = narrow<T>(v[k] * (d[k] - sum));
    });
  });
  of_y.store(dx);
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

template <typename A>
struct AxisExponentials {
  A max, sum;
};

template <class Pack, typename T = typename Pack::T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kAxisThreads)
    softmax_axis_kernel(const T *x, T *y, int64_t outer, int64_t n, int64_t inner) {
  const AxisPart<Pack> part(outer, n, inner);
  Pack v[kGroup<Pack>];
  A most[Pack::kSize], sum[Pack::kSize] = {};
#pragma unroll
  for (A &m : most) m = kMinusInfinity;
  part.each_group([&](int64_t c, int count) {
    part.load(x, c, count, kMinusInfinity, v);
    A before[Pack::kSize];
#pragma unroll
    for (int k = 0; k < Pack::kSize; ++k) before[k] = most[k];
    part.each_pack(count, [&](int j) { v[j].each([&](int k, A x) { most[k] = max(most[k], x); }); });
    if (c >= kGroup<Pack> * blockDim.y)
#pragma unroll
      for (int k = 0; k < Pack::kSize; ++k) sum[k] *= ShiftedExp<T, A>(most[k]).rescale(before[k]);
    part.each_pack(count, [&](int j) {
      v[j].keep();
      v[j].each([&](int k, A x) { sum[k] += ShiftedExp<T, A>(Exponentials<A>{most[k]}.base())(x); });
    });
  });
  if (blockDim.y > 1) {
    AxisExponentials<A> mine[Pack::kSize];
#pragma unroll
    for (int k = 0; k < Pack::kSize; ++k) mine[k] = {most[k], sum[k]}, sum[k] = 0;
    const AxisExponentials<A> *all = share_axis(mine);
#pragma unroll
    for (int k = 0; k < Pack::kSize; ++k) {
      const AxisExponentials<A> *of_column = all + k * blockDim.x;
      const int step = Pack::kSize * blockDim.x;
      for (int r = 0; r < blockDim.y; ++r) most[k] = max(most[k], of_column[r * step].max);
      for (int r = 0; r < blockDim.y; ++r)
        sum[k] += of_column[r * step].sum * ShiftedExp<T, A>(most[k]).rescale(of_column[r * step].max);
    }
  }
  part.each_group([&](int64_t c, int count) {
    if (!part.once()) part.load(x, c, count, kMinusInfinity, v);
    part.store(y, c, count, [&](int j) {
      v[j].keep();
      A p[Pack::kSize];
      v[j].each([&](int k, A x) { p[k] = Probability<T, A>({most[k], sum[k]}).of(x); });
      return Pack::of([&](int k) { return p[k]; });
    });
  });
}

template <class Pack, typename T = typename Pack::T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kAxisThreads)
    softmax_backward_axis_kernel(const T *dy, const T *y, T *dx, int64_t outer, int64_t n, int64_t inner) {
  const AxisPart<Pack> part(outer, n, inner);
  Pack d[kGroup<Pack>], v[kGroup<Pack>];
  A sum[Pack::kSize] = {};
  auto load = [&](int64_t c, int count) { part.load(dy, c, count, 0, d), part.load(y, c, count, 0, v); };
  part.each_group([&](int64_t c, int count) {
    load(c, count);
    part.each_pack(count, [&](int j) {
      A of_dy[Pack::kSize];
      d[j].each([&](int k, A a) { of_dy[k] = a; });
      v[j].each([&](int k, A a) { sum[k] += of_dy[k] * a; });
    });
  });
  if (blockDim.y > 1) {
    const A *all = share_axis(sum);
#pragma unroll
    for (int k = 0; k < Pack::kSize; ++k) {
      sum[k] = 0;
      for (int r = 0; r < blockDim.y; ++r) sum[k] += all[(r * Pack::kSize + k) * blockDim.x];
    }
  }
  part.each_group([&](int64_t c, int count) {
    if (!part.once()) load(c, count);
    part.store(dx, c, count, [&](int j) {
      d[j].keep(), v[j].keep();
      A of_dx[Pack::kSize];
      d[j].each([&](int k, A a) { of_dx[k] = a - sum[k]; });
      v[j].each([&](int k, A a) { of_dx[k] *= a; });
      return Pack::of([&](int k) { return of_dx[k]; });
    });
  });
}

// ------------------------------------------------------------------------------------------------------- launchers

constexpr int kLongCluster = 16;  // blocks; more than each device with clusters grants

// No ClusterRow for float64: blocks of a cluster exchange at most 16 bytes, too few for Exponentials<double>.
template <typename T>
constexpr auto long_shapes() {
  if constexpr (sizeof(T) == 2)
    return RegisterRowShapes<BlockRow<T, 4>, BlockRow<T, 8>, ClusterRow<T, 8, 256>, ClusterRow<T, 8>>();
  else if constexpr (sizeof(T) == 4)
    return RegisterRowShapes<BlockRow<T, 8>, BlockRow<T, 8, 1024>, ClusterRow<T, 8, 256, 1024, kLongCluster>>();
  else return RegisterRowShapes<BlockRow<T, 4>, BlockRow<T, 8, 512, 512>>();
}

template <typename T>
constexpr auto softmax_shapes() {
  constexpr RegisterRowShapes<WarpRow<T, 8, 1>, WarpRow<T, 8, 2>, WarpRow<T, 16, 2>, WarpRow<T, 32, 2>> kShort;
  if constexpr (sizeof(T) == 2)
    return kShort + RegisterRowShapes<WarpRow<T, 32, 3>, RegisterRowShape<T, 32, 4, Span::warp, 64, 1024>>() +
           long_shapes<T>();
  else if constexpr (sizeof(T) == 4)
    return kShort + RegisterRowShapes<WarpRow<T, 32, 4>, WarpRow<T, 32, 6>>() + long_shapes<T>();
  else return kShort + RegisterRowShapes<WarpRow<T, 32, 4>>() + long_shapes<T>();
}

// Rows that are no whole vectors are staged up to 128 elements, and up to 256 in a forward of 16 bits. Beyond, vectors
// of a warp are faster, which come before long_shapes().
template <typename T>
using ShortRows = StagedRowShapes<StagedRow<T, 1, 8>, StagedRow<T, 4, 8>, StagedRow<T, 8, 8>, StagedRow<T, 16, 8>>;
template <typename T>
using ShortForwardRows = std::conditional_t<sizeof(T) == 2,
                                            StagedRowShapes<StagedRow<T, 1, 8>, StagedRow<T, 4, 8>, StagedRow<T, 8, 8>,
                                                            StagedRow<T, 16, 8>, StagedRow<T, 32, 8>>,
                                            ShortRows<T>>;
template <typename T>
constexpr RegisterRowShapes<WarpRow<T, 32, 1>, WarpRow<T, 32, 2>, WarpRow<T, 32, 3>, WarpRow<T, 32, 4>> kWarpRows;

template <typename T>
constexpr auto long_backward_shapes() {
  if constexpr (sizeof(T) < 8)
    return RegisterRowShapes<BlockRow<T, 4>, ClusterRow<T, 4, 256>, ClusterRow<T, 4, 512, 1024, kLongCluster>>();
  else return long_shapes<T>();
}

template <typename T>
constexpr auto softmax_backward_shapes() {
  constexpr RegisterRowShapes<WarpRow<T, 8, 1>, WarpRow<T, 8, 2>, WarpRow<T, 16, 2>, WarpRow<T, 32, 2>> kShort;
  if constexpr (sizeof(T) < 8)
    return kShort + RegisterRowShapes<WarpRow<T, 32, 3>, WarpRow<T, 32, 4>>() + long_backward_shapes<T>();
  else return kShort + RegisterRowShapes<WarpRow<T, 32, 4>>() + long_backward_shapes<T>();
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
  constexpr const char *op = Softmax::name;
  auto any = [&] { return launch_rows(op, softmax_any_kernel<T>, rows, cols, stream, x, y, rows, cols); };
  auto launch = [&](auto kind) {
    return [&](auto shape, RegisterRowPlan plan) -> Status {
      using Shape = decltype(shape);
      constexpr auto kernel = softmax_kernel<typename decltype(kind)::template Row<Shape>>;
      bool holds;
      AOT_TRY(holds_cluster<kernel>(op, plan, &holds));
      if (!holds) return any();
      plan.overlap = kOverlaps<Shape, false>;
      return launch_register_rows<Shape>(op, plan, rows, kernel, stream, x, y, rows, cols);
    };
  };
  if (cols % kVectorSize<T> == 0 && aligned(x, y))
    return dispatch_register_rows(softmax_shapes<T>(), cols / kVectorSize<T>, device, launch(Aligned()), any);
  auto staged = [&](auto row) {
    return launch_staged_rows(op, softmax_staged_kernel<decltype(row)>, row, 1, rows, cols, stream, x, y);
  };
  if (holds_row(ShortForwardRows<T>(), cols)) return dispatch_staged_rows(ShortForwardRows<T>(), cols, staged);
  return dispatch_register_rows(kWarpRows<T> + long_shapes<T>(), unaligned_row_vectors<T>(cols, x, y), device,
                                launch(Unaligned()), any);
}

template <typename T>
Status softmax_backward_rows(const T *dy, const T *y, T *dx, int64_t rows, int64_t cols, const DeviceLimits &device,
                             void *stream) {
  constexpr const char *op = SoftmaxBackward::name;
  auto any = [&] { return launch_rows(op, softmax_backward_any_kernel<T>, rows, cols, stream, dy, y, dx, rows, cols); };
  auto launch = [&](auto kind) {
    return [&](auto shape, RegisterRowPlan plan) -> Status {
      using Shape = decltype(shape);
      constexpr auto kernel = softmax_backward_kernel<typename decltype(kind)::template Row<Shape>>;
      bool holds;
      AOT_TRY(holds_cluster<kernel>(op, plan, &holds));
      if (!holds) return any();
      plan.overlap = kOverlaps<Shape, true>;
      return launch_register_rows<Shape>(op, plan, rows, kernel, stream, dy, y, dx, rows, cols);
    };
  };
  if (cols % kVectorSize<T> == 0 && aligned(dy, y, dx))
    return dispatch_register_rows(softmax_backward_shapes<T>(), cols / kVectorSize<T>, device, launch(Aligned()), any);
  auto staged = [&](auto row) {
    return launch_staged_rows(op, softmax_backward_staged_kernel<decltype(row)>, row, 2, rows, cols, stream, dy, y, dx);
  };
  if (holds_row(ShortRows<T>(), cols)) return dispatch_staged_rows(ShortRows<T>(), cols, staged);
  return dispatch_register_rows(kWarpRows<T> + long_backward_shapes<T>(), unaligned_row_vectors<T>(cols, dy, y, dx),
                                device, launch(Unaligned()), any);
}

Status softmax_cuda(const Softmax &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &x = in[0], &y = out[0];
  const Softmax::Axes a = op.axes(x);
  if (x.size() == 0) return kOk;
  DeviceLimits device;
  AOT_TRY(device_limits(Softmax::name, &device));
  return dispatch(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (a.inner == 1) return softmax_rows(x.as<const T>(), y.as<T>(), a.outer, a.n, device, stream);
    auto launch = [&](auto pack, const LaunchShape &shape) {
      return launch_kernel(Softmax::name, softmax_axis_kernel<decltype(pack)>, shape, stream, x.as<const T>(),
                           y.as<T>(), a.outer, a.n, a.inner);
    };
    return launch_along_axis<T, AxisExponentials<Accumulate<T>>, 8>(a.outer, a.n, a.inner, device, launch, x.data,
                                                                    y.data);
  });
}

Status softmax_backward_cuda(const SoftmaxBackward &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &dy = in[0], &y = in[1], &dx = out[0];
  const SoftmaxBackward::Axes a = op.axes(y);
  if (y.size() == 0) return kOk;
  DeviceLimits device;
  AOT_TRY(device_limits(SoftmaxBackward::name, &device));
  return dispatch(y.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (a.inner == 1)
      return softmax_backward_rows(dy.as<const T>(), y.as<const T>(), dx.as<T>(), a.outer, a.n, device, stream);
    auto launch = [&](auto pack, const LaunchShape &shape) {
      return launch_kernel(SoftmaxBackward::name, softmax_backward_axis_kernel<decltype(pack)>, shape, stream,
                           dy.as<const T>(), y.as<const T>(), dx.as<T>(), a.outer, a.n, a.inner);
    };
    return launch_along_axis<T, Accumulate<T>, 16>(a.outer, a.n, a.inner, device, launch, dy.data, y.data, dx.data);
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(Softmax, aot_softmax_cuda, softmax_cuda)
AOT_ENTRY(SoftmaxBackward, aot_softmax_backward_cuda, softmax_backward_cuda)
