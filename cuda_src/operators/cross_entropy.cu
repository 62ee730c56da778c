#include "cross_entropy.cuh"

namespace aot {
inline namespace AOT_ISA {

// ------------------------------------------------------------------------------- launchers of the three operators

namespace {

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
                             WarpRow<T, 32, 6>, BlockRow<T, 4, 512, 1536>, BlockRow<T, 8, 1024>, ClusterRow<T, 8, 256>,
                             ClusterRow<T, 16, 256, 512>>();
  else
    return RegisterRowShapes<WarpRow<T, 8, 1>, WarpRow<T, 8, 2>, WarpRow<T, 8, 4>, WarpRow<T, 16, 4>, WarpRow<T, 32, 4>,
                             BlockRow<T, 4>, BlockRow<T, 8, 512, 512>>();
}

// For the loss alone. Longer rows are streamed.
template <typename T>
using LossShapes = RegisterRowShapes<WarpRow<T, 8, 1>, WarpRow<T, 8, 2>, WarpRow<T, 8, 4, sizeof(T) == 2 ? 2048 : 1536>,
                                     WarpRow<T, 16, 4, 2048>, WarpRow<T, 32, 4, 2048>,
                                     WarpRow<T, 32, 8, sizeof(T) == 4 ? 1280 : 1024>, BlockRow<T, 8>>;

// For slope * scale. In a ClusterRow each block has a part of the row; they exchange nothing.
template <typename T>
using ScaleShapes = RegisterRowShapes<WarpRow<T, 8, 1>, WarpRow<T, 8, 2>, WarpRow<T, 8, 4>, WarpRow<T, 16, 4>,
                                      WarpRow<T, 32, 4>, BlockRow<T, 4>, ClusterRow<T, 4>, ClusterRow<T, 8>>;
template <typename T>
using UnalignedScaleShapes = RegisterRowShapes<WarpRow<T, 16, 2>, WarpRow<T, 32, 4>, BlockRow<T, 4>, ClusterRow<T, 8>>;

// Launches a sum over rows. Sixteen blocks have more loads in flight than eight, but not every device holds so many.
template <auto block_kernel, auto cluster_kernel, unsigned kMostThreads = kSumThreads, typename... Arguments>
Status launch_sum(const char *op, int64_t rows, void *stream, const Arguments &...arguments) {
  DeviceLimits device;
  AOT_TRY(device_limits(op, &device));
  LaunchShape shape = {1, kSumThreads, 0, 1, true};
  if (!device.clusters || rows <= 16 * kSumThreads) return launch_kernel(op, block_kernel, shape, stream, arguments...);
  unsigned blocks = 2 * kMaxCluster;
  int64_t at_once = 0;
  AOT_TRY(clusters_at_once<cluster_kernel>(op, kSumClusterThreads / blocks, static_cast<int>(blocks), 0, &at_once));
  if (at_once == 0) blocks = kMaxCluster;
  shape.grid = shape.cluster = blocks, shape.block = std::min(kSumClusterThreads / blocks, kMostThreads);
  return launch_kernel(op, cluster_kernel, shape, stream, arguments...);
}

}  // namespace

template <typename T>
Status cross_entropy_extra_rows(const char *op, const CrossEntropyAttrs &attrs, const Tensor &x, const Targets &targets,
                                const Results<T> &results, const Scale<T> &scale, const Extras<T> &extras, void *stream,
                                bool after_count) {
  using A = Accumulate<T>;
  DeviceLimits device;
  AOT_TRY(device_limits(op, &device));
  int64_t rows = attrs.rows(x), cols = attrs.cols(x);
  if (rows == 0) return kOk;
  const T *from = x.as<const T>();
  const Smoothing<A> smoothing = smoothing_of<T>(attrs, cols);
  auto any = [&] {
    return launch_rows(op, cross_entropy_any_extra_kernel<T, A>, rows, cols, stream, from, targets, results, scale,
                       extras, rows, cols, smoothing);
  };
  if (cols == 0 || (extras.weight.data && attrs.label_smoothing != 0)) return any();
  auto launch = [&](auto shape, RegisterRowPlan plan) {
    using Row = UnalignedRow<decltype(shape)>;
    plan.overlap = after_count && scale.count;
    return launch_register_rows<decltype(shape)>(op, plan, rows, cross_entropy_extra_kernel<Row>, stream, from, targets,
                                                 results, scale, extras, rows, cols, smoothing);
  };
  const int64_t vectors = unaligned_row_vectors<T>(cols, from, results.slope ? results.slope : from);
  return dispatch_register_rows(extra_shapes<T>(), vectors, device, launch, any);
}

template <typename T>
Status cross_entropy_rows(const char *op, const CrossEntropyAttrs &attrs, const Tensor &x, const Targets &targets,
                          const Results<T> &results, const Scale<T> &scale, const Extras<T> &extras, void *stream,
                          bool after_count) {
  using A = Accumulate<T>;
  if (extras.any()) return cross_entropy_extra_rows(op, attrs, x, targets, results, scale, extras, stream, after_count);
  const int64_t rows = attrs.rows(x), cols = attrs.cols(x);
  const T *from = x.as<const T>();
  const bool loss_alone = attrs.label_smoothing == 0 && !results.slope;
  if (!loss_alone && !(cols % kVectorSize<T> == 0 && aligned(from, results.slope)))
    return unaligned_rows<false>(op, attrs, x, targets, results, scale, stream, after_count);
  DeviceLimits device;
  AOT_TRY(device_limits(op, &device));
  if (rows == 0) return kOk;
  const Smoothing<A> smoothing = smoothing_of<T>(attrs, cols);
  auto any = [&] {
    return launch_rows(op, cross_entropy_any_kernel<T, A, false>, rows, cols, stream, from, targets, results, scale,
                       rows, cols, smoothing);
  };
  auto stream_rows = [&] {
    if (cols < kStreamThreads * kVectorSize<T>) return any();
    return launch_kernel(op, cross_entropy_stream_kernel<T>, {grid_size(rows), kStreamThreads}, stream, from, targets,
                         results, rows, cols, smoothing);
  };
  auto launch = [&](auto smooth, auto slope) {
    return [=](auto shape, RegisterRowPlan plan) {
      using Shape = decltype(shape);
      plan.overlap = after_count && scale.count;  // the kernel that counts is the one before
      if constexpr (!slope && Shape::kSpan == Span::warp && sizeof(T) <= 4)
        return launch_register_rows<Shape>(op, plan, rows, cross_entropy_loss_alone_kernel<Shape>, stream, from,
                                           targets, results, rows, cols);
      else
        return launch_register_rows<Shape>(op, plan, rows,
                                           cross_entropy_kernel<RegisterRow<Shape>, smooth, slope, false>, stream, from,
                                           targets, results, scale, rows, cols, smoothing);
    };
  };
  constexpr std::true_type kYes;
  constexpr std::false_type kNo;
  const int64_t vectors = row_vectors<T>(cols, from, results.slope);
  if (loss_alone) return dispatch_register_rows(LossShapes<T>(), vectors, device, launch(kNo, kNo), stream_rows);
  if (attrs.label_smoothing == 0)
    return dispatch_register_rows(slope_shapes<T>(), vectors, device, launch(kNo, kYes), any);
  return dispatch_register_rows(slope_shapes<T>(), vectors, device, launch(kYes, kYes), any);
}

template <typename T>
Status cross_entropy_count(const char *op, const Targets &targets, const Loss<T> &weight, Accumulate<T> *count,
                           int64_t rows, int64_t cols, void *stream) {
  using A = Accumulate<T>;
  if (weight.data)
    return launch_sum<cross_entropy_weight_kernel<Span::block, T, A>, cross_entropy_weight_kernel<Span::cluster, T, A>>(
        op, rows, stream, targets, weight, count, rows, cols);
  return launch_sum<cross_entropy_count_kernel<Span::block, A>, cross_entropy_count_kernel<Span::cluster, A>,
                    kCountClusterThreads>(op, rows, stream, targets, count, rows);
}

template <typename T>
Status cross_entropy_loss(const char *op, const Accumulate<T> *losses, const Loss<T> &loss, int64_t rows, bool mean,
                          const Accumulate<T> *weights, void *stream) {
  using A = Accumulate<T>;
  return launch_sum<cross_entropy_loss_kernel<Span::block, T, A>, cross_entropy_loss_kernel<Span::cluster, T, A>>(
      op, rows, stream, losses, loss, rows, mean, weights);
}

#define AOT_CROSS_ENTROPY(T)                                                                                         \
  template Status cross_entropy_rows(const char *, const CrossEntropyAttrs &, const Tensor &, const Targets &,       \
                                     const Results<T> &, const Scale<T> &, const Extras<T> &, void *, bool);         \
  template Status cross_entropy_extra_rows(const char *, const CrossEntropyAttrs &, const Tensor &, const Targets &, \
                                           const Results<T> &, const Scale<T> &, const Extras<T> &, void *, bool);   \
  template Status cross_entropy_count(const char *, const Targets &, const Loss<T> &, Accumulate<T> *, int64_t,      \
                                      int64_t, void *);                                                              \
  template Status cross_entropy_loss(const char *, const Accumulate<T> *, const Loss<T> &, int64_t, bool,            \
                                     const Accumulate<T> *, void *);
AOT_CROSS_ENTROPY(__half)
AOT_CROSS_ENTROPY(__nv_bfloat16)
AOT_CROSS_ENTROPY(float)
AOT_CROSS_ENTROPY(double)
#undef AOT_CROSS_ENTROPY

// ------------------------------------------------------------------------------------------------------- launchers

namespace {

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
    return [=](auto shape, RegisterRowPlan plan) {
      using Row = typename decltype(kind)::template Row<decltype(shape)>;
      plan.overlap = kScaleOverlaps<decltype(shape)> && overlaps(rows * plan.cluster);
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

Status cross_entropy_cuda(const CrossEntropy &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &x = in[op.kX], &slope = out[op.kSlope];
  return dispatch(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    T *kept = op.keeps(slope) ? slope.as<T>() : nullptr;
    const Extras<T> extras(op, in[op.kWeight]);
    return cross_entropy_forward(op, in, out[op.kY], out[op.kWork], kept, extras, cross_entropy_rows<T>, stream);
  });
}

Status cross_entropy_backward_cuda(const CrossEntropyBackward &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &x = in[op.kX], &slope = in[op.kSlope], &dx = out[op.kDx], &work = out[op.kWork];
  return dispatch(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Extras<T> extras(op, in[op.kWeight]);
    if (!op.keeps(slope))
      return cross_entropy_backward(op, in, dx.as<T>(), work, extras, cross_entropy_rows<T>, stream);
    Scale<T, Accumulate<T>> scale;
    AOT_TRY(backward_scale(op, in, work, op.mean() && !op.divides_slope(x), extras, &scale, stream));
    const Targets targets(in[op.kTarget], op.ignore_index);
    return cross_entropy_scale(op.name, op, slope, dx.as<T>(), targets, scale, stream);
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(CrossEntropy, aot_cross_entropy_cuda, cross_entropy_cuda)
AOT_ENTRY(CrossEntropyBackward, aot_cross_entropy_backward_cuda, cross_entropy_backward_cuda)
