#include "conv2d_few_dx.cuh"

namespace aot {
inline namespace AOT_ISA {

// ----------------------------------------------------------------------------------------------------------- launchers

// Whether pairs of neighbouring columns are neighbours in dx, and aligned as pairs.
template <typename T>
bool has_pairs(const FewDxCall &f, bool nhwc, const T *dx) {
  const bool even_pixels = f.w.pixels % 2 == 0 && f.w.shift % 2 == 0 && f.width % 2 == 0;
  const bool neighbours = nhwc ? f.channels % 2 == 0 || (f.channels < 4 && even_pixels) : f.per_tile > 1 && even_pixels;
  return neighbours && reinterpret_cast<uintptr_t>(dx) % (2 * sizeof(T)) == 0;
}

template <typename T>
Status few_dx(LaunchSequence &launch, const Conv2dParams &params, const Conv2dCall &c, DType dtype, const T *dy,
              const T *weight, float *operands, T *dx) {
  const Conv2dParams::FewDx plan = params.few_dx(c.s, dtype);
  FewDxCall f(c, plan);
  f.vectors = c.nhwc && aligned(dy) && f.out_channels % kVectorSize<T> == 0;
  f.pairs = has_pairs(f, c.nhwc, dx);
  const auto n = static_cast<unsigned>(plan.weights / 4);
  auto *to = reinterpret_cast<uint4 *>(operands);
  auto *write_weight = c.nhwc ? few_dx_weight_kernel<T, true> : few_dx_weight_kernel<T, false>;
  AOT_TRY(launch(write_weight, grid_size(ceil_div(n, kDxThreads)), kDxThreads, 0, 1, f, weight, to, plan.tiles, n));
  const dim3 grid(static_cast<unsigned>(c.s.batch * f.tiles_h * f.tiles_w), plan.groups);
  auto run = [&](auto *kernel) { return launch(kernel, grid, kDxThreads, f.window, 1, f, dy, to, dx); };
  auto with_tiles = [&](auto tiles) {
    return c.nhwc ? run(few_dx_kernel<T, tiles.value, true>) : run(few_dx_kernel<T, tiles.value, false>);
  };
  if constexpr (std::is_same_v<T, float>)
    if (plan.three) return c.nhwc ? run(few_dx_kernel<T, 2, true, true>) : run(few_dx_kernel<T, 2, false, true>);
  return plan.tiles == 1   ? with_tiles(std::integral_constant<int, 1>())
         : plan.tiles == 2 ? with_tiles(std::integral_constant<int, 2>())
         : plan.tiles == 4 ? with_tiles(std::integral_constant<int, 4>())
                           : with_tiles(std::integral_constant<int, 8>());
}

#define AOT_FEW_DX(T)                                                                                                \
  template Status few_dx<T>(LaunchSequence &, const Conv2dParams &, const Conv2dCall &, DType, const T *, const T *, \
                            float *, T *);
AOT_FEW_DX(__half)
AOT_FEW_DX(__nv_bfloat16)
AOT_FEW_DX(float)

}  // namespace AOT_ISA
}  // namespace aot
