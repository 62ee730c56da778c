#include "conv2d_few_channels.cuh"

namespace aot {
inline namespace AOT_ISA {

// ----------------------------------------------------------------------------------------------------------- launchers

template <typename T>
Status few_forward(LaunchSequence &launch, const Conv2dParams &params, const Conv2dCall &c, DType dtype, const T *x,
                   const T *weight, const T *bias, T *y) {
  const Conv2dParams::FewTiles tiles = params.few_forward(c.s, dtype);
  FewChannels f(c, tiles);
  f.vectors = c.nhwc ? aligned(y) && f.out_channels % kVectorSize<T> == 0
                     : reinterpret_cast<uintptr_t>(y) % (4 * sizeof(T)) == 0 && f.out_w % 4 == 0;
  const int steps = Conv2dParams::few_steps(c.s, Conv2dParams::few_units(f.quads, sizeof(T)));
  const auto outputs = static_cast<unsigned>(ceil_div(f.out_channels, kFewOutputs));
  // an H200's multiprocessors, and the blocks that each holds
  constexpr int64_t kMultiprocessors = Conv2dParams::kFullGrid / 2, kMemory = 227 << 10;
  const bool three = params.few_three(dtype);
  const int threads = f.rows / Conv2dParams::kFewRows * (three ? 64 : 32);
  const int64_t held =
      std::min<int64_t>(Conv2dParams::kFewBlocks * kFewThreads / threads, kMemory / (tiles.shared + 1024));
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(f.tiles, ceil_div(kMultiprocessors * held, outputs))),
                  outputs);
  auto run = [&](auto *kernel) { return launch(kernel, grid, threads, tiles.shared, 1, f, x, weight, bias, y, steps); };
  if constexpr (sizeof(T) == 4)
    if (three) return c.nhwc ? run(conv2d_few_kernel<T, true, true>) : run(conv2d_few_kernel<T, false, true>);
  return c.nhwc ? run(conv2d_few_kernel<T, true, false>) : run(conv2d_few_kernel<T, false, false>);
}

template <typename T>
Status few_dweight(LaunchSequence &launch, const Conv2dParams &params, const Conv2dCall &c, DType dtype, const T *dy,
                   const T *x, float *partial) {
  const Conv2dParams::FewTiles tiles = params.few_dweight(c.s, dtype);
  const Conv2dParams::FewSlices slices = params.few_slices(c.s, tiles);
  FewChannels f(c, tiles);
  f.vectors = aligned(dy) && (c.nhwc ? f.out_channels : f.out_w) % kVectorSize<T> == 0;
  const dim3 grid(static_cast<unsigned>(slices.slices), slices.outputs, slices.kernel);
  auto run = [&](auto *kernel) { return launch(kernel, grid, kFewThreads, tiles.shared, 1, f, dy, x, partial); };
  if (f.channels <= 3)
    return c.nhwc ? run(conv2d_few_dweight_kernel<T, true, 3>) : run(conv2d_few_dweight_kernel<T, false, 3>);
  return c.nhwc ? run(conv2d_few_dweight_kernel<T, true, 4>) : run(conv2d_few_dweight_kernel<T, false, 4>);
}

#define AOT_FEW_CHANNELS(T)                                                                                    \
  template Status few_forward<T>(LaunchSequence &, const Conv2dParams &, const Conv2dCall &, DType, const T *, \
                                 const T *, const T *, T *);                                                   \
  template Status few_dweight<T>(LaunchSequence &, const Conv2dParams &, const Conv2dCall &, DType, const T *, \
                                 const T *, float *);
AOT_FEW_CHANNELS(__half)
AOT_FEW_CHANNELS(__nv_bfloat16)
AOT_FEW_CHANNELS(float)

}  // namespace AOT_ISA
}  // namespace aot
