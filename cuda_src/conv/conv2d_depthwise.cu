#include "conv2d_depthwise.cuh"

#include "conv2d_depthwise_planes.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

// f(kernel, steps) as integral constants.
template <class F>
Status with_kernel(int64_t kernel, int steps, F f) {
  auto with_steps = [&](auto k) {
    return steps == 1 ? f(k, std::integral_constant<int, 1>()) : f(k, std::integral_constant<int, 2>());
  };
  if (kernel == 3) return with_steps(std::integral_constant<int, 3>());
  if (kernel == 5) return with_steps(std::integral_constant<int, 5>());
  return with_steps(std::integral_constant<int, 7>());
}

// Blocks of a multiprocessor, by registers: the kernel's elements, and the sums.
template <typename T>
constexpr int blocks(int kernel) {
  return kernel == 3 ? 5 : kernel == 5 ? 3 : sizeof(T) == 2 ? 2 : 3;
}
template <typename T>
constexpr int plane_blocks(int kernel) {
  return kernel == 3 ? 4 : kernel == 5 && sizeof(T) == 2 ? 3 : 2;
}

template <class... Pointers>
bool aligned_words(const Pointers *...pointers) {
  return (reinterpret_cast<uintptr_t>(pointers) | ...) % 4 == 0;
}

// Elements of a row that can be loaded or stored at once.
template <typename T>
int at_once(const T *p, int width, int most) {
  int n = most;
  while (n > 1 && (width % n || reinterpret_cast<uintptr_t>(p) % (n * sizeof(T)))) n /= 2;
  return n;
}

// planes: of an item's index; from, dy and to may be null.
template <typename T>
DepthwisePlanes planes_call(const Depthwise &call, int planes, const T *from, const T *dy, const T *to) {
  DepthwisePlanes d;
  static_cast<Depthwise &>(d) = call;
  d.load = at_once(from, d.w.in, 2), d.load_dy = dy ? at_once(dy, d.w.out, 2) : 1;
  d.dense = d.w.unit == 1 && d.w.residues == 1;
  d.store = to && d.dense ? at_once(to, d.w.out, 4) : 1;
  d.by_row = Divisor(d.w.in / d.load), d.by_dy_row = Divisor(d.w.out / d.load_dy);
  d.by_margin = Divisor(d.pitch - d.w.in), d.by_tile = Divisor(d.tiles_w), d.by_strip = Divisor(d.strips);
  d.by_residue = Divisor(d.tiles_w / d.w.residues), d.by_part = Divisor(d.strips / d.h.residues);
  d.items = planes * d.strips * d.tiles_w;
  return d;
}

}  // namespace

template <typename T>
Status depthwise_forward(const char *op, const Conv2dParams &params, const Conv2dCall &c, DType dtype, bool dx,
                         const T *x, const T *weight, const T *bias, T *y, cudaStream_t stream, bool *taken) {
  Depthwise d;
  int steps;
  *taken = (!c.nhwc || aligned_words(x, y)) &&
           params.depthwise_call(c.s, dtype, dx ? Depthwise::dx : Depthwise::y, &d, &steps);
  if (!*taken) return kOk;
  return with_kernel(c.s.kernel_h, steps, [&](auto k, auto s) {
    constexpr int kBlocks = blocks<T>(k), kPlaneBlocks = plane_blocks<T>(k);
    auto run = [&](auto *kernel, const auto &call, int64_t grid, int threads, int shared) {
      return launch_kernel(op, kernel, {grid_size(grid), threads, shared}, stream, call, x, weight, bias, y);
    };
    if (c.nhwc) {
      const int64_t grid = ceil_div(d.items, kDepthwiseThreads / d.lanes) * d.chunks;
      return dx && s == 2 ? run(depthwise_kernel<T, k, 1, s, kBlocks>, d, grid, kDepthwiseThreads, 0)
                          : run(depthwise_kernel<T, k, s, 1, kBlocks>, d, grid, kDepthwiseThreads, 0);
    }
    const DepthwisePlanes p = planes_call<T>(d, d.planes, x, nullptr, y);
    const int64_t grid = ceil_div(int64_t{d.batch} * d.channels, d.planes) * d.row_blocks;
    return dx && s == 2 ? run(depthwise_planes_kernel<T, k, 1, s, kPlaneBlocks>, p, grid, kPlaneThreads, d.shared())
                        : run(depthwise_planes_kernel<T, k, s, 1, kPlaneBlocks>, p, grid, kPlaneThreads, d.shared());
  });
}

template <typename T>
Status depthwise_dweight(LaunchSequence &launch, const Conv2dParams &params, const Conv2dCall &c, DType dtype,
                         const T *dy, const T *x, float *partial, int *slices, bool *taken) {
  Depthwise d;
  int steps;
  *taken = (!c.nhwc || aligned_words(x, dy)) && params.depthwise_call(c.s, dtype, Depthwise::dweight, &d, &steps);
  if (!*taken) return kOk;
  *slices = static_cast<int>(params.depthwise_slices(c.s, d));
  const int64_t slice = params.depthwise_slice(c.s);
  return with_kernel(c.s.kernel_h, steps, [&](auto k, auto s) {
    if (c.nhwc)
      return launch(depthwise_dweight_kernel<T, k, s, depthwise_dweight_blocks(k, true)>, dim3(d.chunks, *slices),
                    kDepthwiseThreads, 0, 1, d, dy, x, partial, slice);
    const DepthwisePlanes p = planes_call<T>(d, d.images, x, dy, nullptr);
    const auto across = static_cast<unsigned>(ceil_div(d.channels, d.planes));
    return launch(depthwise_planes_dweight_kernel<T, k, s, depthwise_dweight_blocks(k, false)>, dim3(across, *slices),
                  kPlaneThreads, d.shared(), 1, p, dy, x, partial, slice);
  });
}

#define AOT_DEPTHWISE(T)                                                                                               \
  template Status depthwise_forward<T>(const char *, const Conv2dParams &, const Conv2dCall &, DType, bool, const T *, \
                                       const T *, const T *, T *, cudaStream_t, bool *);                               \
  template Status depthwise_dweight<T>(LaunchSequence &, const Conv2dParams &, const Conv2dCall &, DType, const T *,   \
                                       const T *, float *, int *, bool *);
AOT_DEPTHWISE(__half)
AOT_DEPTHWISE(__nv_bfloat16)
AOT_DEPTHWISE(float)

}  // namespace AOT_ISA
}  // namespace aot
