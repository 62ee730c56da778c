#include "conv2d_grouped.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

// f(the 8s of columns of a warp, as an integral constant).
template <class F>
Status with_eights(int eights, F f) {
  return eights == 1   ? f(std::integral_constant<int, 1>())
         : eights == 2 ? f(std::integral_constant<int, 2>())
         : eights == 3 ? f(std::integral_constant<int, 3>())
                       : f(std::integral_constant<int, 4>());
}

// Blocks along the tiles, which have as many each: no more than the device holds at once.
unsigned grouped_grid(const Grouped &g, int64_t others, int multiprocessors) {
  const int64_t at_once = multiprocessors * grouped_blocks(g.shared, g.warps);
  const int64_t most = std::clamp<int64_t>(at_once / others, 1, g.tiles());
  return static_cast<unsigned>(ceil_div(g.tiles(), ceil_div(g.tiles(), most)));
}

}  // namespace

template <typename T>
Status grouped_forward(LaunchSequence &launch, const Conv2dParams &params, const Conv2dCall &c, bool dx,
                       const T *source, const T *weight, const T *bias, float *operands, T *result) {
  DeviceLimits limits;
  AOT_TRY(device_limits(launch.op(), &limits));
  Grouped g;
  if (!params.grouped_call(c.s, dx, &g)) return kOk;
  auto *to = reinterpret_cast<uint2 *>(operands);
  if (const auto n = static_cast<unsigned>(g.words() / 2))
    AOT_TRY(launch(grouped_weight_kernel<T>, grid_size(ceil_div(n, 256)), 256, 0, 1, g, c.weight,
                   static_cast<int>(c.s.kernel_w), dx, weight, to, n));
  const auto across = static_cast<unsigned>(g.blocks());
  const dim3 grid(grouped_grid(g, across, limits.multiprocessors), across);
  return with_eights(g.eights, [&](auto eights) {
    auto run = [&](auto *kernel) {
      return launch(kernel, grid, 32 * g.warps, g.shared, 1, GroupedCall(g), source, to, bias, result);
    };
    return g.in % 8 ? run(grouped_kernel<T, eights.value, false>) : run(grouped_kernel<T, eights.value, true>);
  });
}

template <typename T>
Status grouped_dweight(LaunchSequence &launch, const Conv2dParams &params, const Conv2dCall &c, const T *dy, const T *x,
                       float *partial) {
  Grouped g;
  if (!params.grouped_dweight_call(c.s, &g)) return kOk;
  const dim3 grid(static_cast<unsigned>(params.grouped_slices(g)), g.blocks() * g.chunks, g.splits);
  const auto channels = static_cast<int>(params.grouped_channels(c.s));
  const int64_t slice = params.grouped_slice(c.s);
  return with_eights(g.eights, [&](auto eights) {
    return launch(grouped_dweight_kernel<T, eights.value>, grid, 32 * g.warps, g.shared, 1, GroupedCall(g), dy, x,
                  partial, slice, channels);
  });
}

#define AOT_GROUPED(T)                                                                                                 \
  template Status grouped_forward<T>(LaunchSequence &, const Conv2dParams &, const Conv2dCall &, bool, const T *,      \
                                     const T *, const T *, float *, T *);                                              \
  template Status grouped_dweight<T>(LaunchSequence &, const Conv2dParams &, const Conv2dCall &, const T *, const T *, \
                                     float *);
AOT_GROUPED(__half)
AOT_GROUPED(__nv_bfloat16)

}  // namespace AOT_ISA
}  // namespace aot
