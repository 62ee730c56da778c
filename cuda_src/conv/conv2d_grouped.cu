#include "conv2d_grouped_planes.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

Status too_many(const Grouped &g) { return fail(kConventionMisused, "conv2d: %d eights of three products", g.eights); }

// f(the 8s of columns of a warp, and whether float32 is three products, as integral constants).
template <typename T, class F>
Status with_eights(const Grouped &g, F f) {
  auto with = [&](auto three) {
    if (g.eights == 1) return f(std::integral_constant<int, 1>(), three);
    if (g.eights == 2) return f(std::integral_constant<int, 2>(), three);
    if (g.eights == 3) return f(std::integral_constant<int, 3>(), three);
    if constexpr (three.value) return too_many(g);
    else return f(std::integral_constant<int, 4>(), three);
  };
  if constexpr (sizeof(T) == 4)
    if (g.three) return with(std::true_type());
  return with(std::false_type());
}

// Blocks along the tiles, which have as many each: no more than the device holds at once.
unsigned grouped_grid(const Grouped &g, int64_t others, int multiprocessors) {
  const int64_t at_once = multiprocessors * grouped_blocks(g.shared, g.warps, g.most_warps());
  const int64_t most = std::clamp<int64_t>(at_once / others, 1, g.tiles());
  return static_cast<unsigned>(ceil_div(g.tiles(), ceil_div(g.tiles(), most)));
}

constexpr DType grouped_dtype(__half) { return DType::float16; }
constexpr DType grouped_dtype(__nv_bfloat16) { return DType::bfloat16; }
constexpr DType grouped_dtype(float) { return DType::float32; }

// Boxes of `high` x `wide` pixels of images, of the channels of one group with `of_groups`, as TMA loads them.
template <typename T>
bool map_grouped(CUtensorMap *map, const T *data, const Grouped &g, bool of_groups, int h, int w, int pitch, int pixel,
                 int high, int wide) {
  if (!TensorMaps::get().tiled) return false;
  const auto channels = uint64_t(of_groups ? g.in : pitch), groups = uint64_t(of_groups ? g.groups : 1);
  const int64_t line = int64_t{w} * pitch;
  return map_tiled<5>(map, grouped_dtype(T()), data, {channels, groups, uint64_t(w), uint64_t(h), uint64_t(g.batch)},
                      {of_groups ? g.in : pitch, pitch, line, line * h},
                      {uint32_t(pixel / sizeof(T)), 1, uint32_t(wide), uint32_t(high), 1}, CU_TENSOR_MAP_SWIZZLE_NONE);
}

// The pixels of a window's plane: columns of one parity. float32 of three products is loaded as it is.
template <typename T>
bool map_plane(CUtensorMap *map, const T *source, const Grouped &g, int plane) {
  if (!TensorMaps::get().tiled) return false;
  const bool by_blocks = g.by_blocks(), of_groups = g.chunks > 1, planes = g.planes();
  const int parity = planes ? (g.w.lowest + plane) & 1 : 0, apart = planes ? 2 : 1;
  const int channels = by_blocks ? g.block_groups * g.in : of_groups ? g.in : g.source_pitch;
  const int groups = by_blocks ? g.groups / g.block_groups : of_groups ? g.groups : 1;
  const uint64_t pixel = g.source_pitch * sizeof(T), line = g.w.source * pixel;
  const uint64_t sizes[] = {uint64_t(channels), uint64_t(groups), uint64_t(divide_up(g.w.source - parity, apart)),
                            uint64_t(g.h.source), uint64_t(g.batch)};
  const uint64_t steps[] = {channels * sizeof(T), apart * pixel, line, line * g.h.source};
  const uint32_t box[] = {uint32_t(g.pixel / sizeof(T)), 1, uint32_t(g.window_w / apart), uint32_t(g.window_h), 1};
  const uint32_t ones[] = {1, 1, 1, 1, 1};
  const auto type = g.three ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : map_type(grouped_dtype(T()));
  return TensorMaps::get().tiled(map, type, 5, const_cast<T *>(source + parity * g.source_pitch), sizes, steps, box,
                                 ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

Status no_map(const LaunchSequence &launch) {
  return fail(kDeviceError, "%s: the driver makes no tensor map", launch.op());
}

}  // namespace

template <typename T>
Status grouped_forward(LaunchSequence &launch, const Grouped &g, const Conv2dCall &c, bool dx, const T *source,
                       const T *weight, const T *bias, float *operands, T *result) {
  DeviceLimits limits;
  AOT_TRY(device_limits(launch.op(), &limits));
  auto *to = reinterpret_cast<uint2 *>(operands);
  if (const auto n = static_cast<unsigned>(g.words() / 2))
    AOT_TRY(launch(grouped_weight_kernel<T>, grid_size(ceil_div(n, 256)), 256, 0, 1, g, c.weight,
                   static_cast<int>(c.s.kernel_w), dx, weight, to, n));
  const auto across = static_cast<unsigned>(g.blocks());
  const dim3 grid(grouped_grid(g, across, limits.multiprocessors), across);
  auto run = [&](auto *kernel, const auto &call) {
    return launch(kernel, grid, 32 * g.warps, g.shared, 1, call, source, to, bias, result);
  };
  if (g.by_planes()) {
    GroupedColumns call = {GroupedCall(g), {}, {}};
    AOT_TRY(bind_device(launch.op()));  // for the driver, which encodes tensor maps
    if (limits.major >= 9 &&
        !(map_plane(&call.source, source, g, 0) && (!g.planes() || map_plane(&call.other, source, g, 1))))
      return no_map(launch);
    return with_eights<T>(g, [&](auto eights, auto three) {
      constexpr int kEights = eights.value;
      constexpr bool kThree = three.value;
      if constexpr (kThree)
        if (!g.planes())
          return g.in % kVectorSize<T> ? run(grouped_planes_kernel<T, kEights, false, 1, kThree>, call)
                                       : run(grouped_planes_kernel<T, kEights, true, 1, kThree>, call);
      return g.in % kVectorSize<T> ? run(grouped_planes_kernel<T, kEights, false, 2, kThree>, call)
                                   : run(grouped_planes_kernel<T, kEights, true, 2, kThree>, call);
    });
  }
  if (g.columns) {
    GroupedColumns call = {GroupedCall(g), {}, {}};
    AOT_TRY(bind_device(launch.op()));  // for the driver, which encodes tensor maps
    if (limits.major >= 9 && !map_grouped(&call.source, source, g, g.chunks > 1, g.h.source, g.w.source, g.source_pitch,
                                          g.pixel, g.window_h, g.window_w))
      return no_map(launch);
    return with_eights<T>(g, [&](auto eights, auto) {
      return g.in % kVectorSize<T> ? run(grouped_columns_kernel<T, eights.value, false>, call)
                                   : run(grouped_columns_kernel<T, eights.value, true>, call);
    });
  }
  return with_eights<T>(g, [&](auto eights, auto three) {
    if constexpr (three.value && eights.value > 2) return too_many(g);
    else
      return g.in % kVectorSize<T> ? run(grouped_kernel<T, eights.value, false, three.value>, GroupedCall(g))
                                   : run(grouped_kernel<T, eights.value, true, three.value>, GroupedCall(g));
  });
}

template <typename T>
Status grouped_dweight(LaunchSequence &launch, const Grouped &g, const T *dy, const T *x, float *partial) {
  const dim3 grid(g.slices, g.blocks() * g.chunks, g.splits);
  auto run = [&](auto *kernel, const auto &call) {
    return launch(kernel, grid, 32 * g.warps, g.shared, 1, call, dy, x, partial, g.slice(), g.slice_channels());
  };
  if constexpr (sizeof(T) == 2)
    if (g.columns) {
      DeviceLimits limits;
      AOT_TRY(device_limits(launch.op(), &limits));
      AOT_TRY(bind_device(launch.op()));  // for the driver, which encodes tensor maps
      GroupedColumns call = {GroupedCall(g), {}, {}};
      const auto &h = g.h, &w = g.w;
      if (limits.major >= 9 &&
          !(map_grouped(&call.source, x, g, false, h.source, w.source, g.source_pitch, g.pixel, g.window_h,
                        g.window_w) &&
            map_grouped(&call.other, dy, g, false, h.result, w.result, g.result_pitch, g.result_pixel, g.rows, g.cols)))
        return no_map(launch);
      return with_eights<T>(g, [&](auto eights, auto) {
        return g.columns > 1 ? run(grouped_dweight_columns_kernel<T, eights.value, 2>, call)
                             : run(grouped_dweight_columns_kernel<T, eights.value, 1>, call);
      });
    }
  return with_eights<T>(g, [&](auto eights, auto three) {
    if constexpr (three.value && eights.value > 2) return too_many(g);
    else return run(grouped_dweight_kernel<T, eights.value, three.value>, GroupedCall(g));
  });
}

#define AOT_GROUPED(T)                                                                                       \
  template Status grouped_forward<T>(LaunchSequence &, const Grouped &, const Conv2dCall &, bool, const T *, \
                                     const T *, const T *, float *, T *);                                    \
  template Status grouped_dweight<T>(LaunchSequence &, const Grouped &, const T *, const T *, float *);
AOT_GROUPED(__half)
AOT_GROUPED(__nv_bfloat16)
AOT_GROUPED(float)

}  // namespace AOT_ISA
}  // namespace aot
