#include "conv2d_cutlass.cuh"

namespace aot {
inline namespace AOT_ISA {

template <typename T, Conv2dProduct::Pass kPass, int kRows, int kCols, int kDepth, int kWarpRows, int kWarpCols,
          int kStages, bool kStrided = false>
Status run_16(const char *op, const Conv2dProduct &p, void *stream) {
  using To = std::conditional_t<kPass == Conv2dProduct::dweight, float, T>;
  return launch_cutlass<CutlassConv2d<CutlassMath<T, GemmShape<16, 8, 16>>, To, kPass, GemmShape<kRows, kCols, kDepth>,
                                      GemmShape<kWarpRows, kWarpCols, kDepth>, kStages, kStrided>>(op, p, stream);
}

// Tiles by what an H200 measured: wide ones where the result is, and there are enough of them.
template <typename T>
Status choose_16(const char *op, const Conv2dProduct &p, void *stream) {
  if (p.pass == Conv2dProduct::y) {
    if (p.outputs <= 64) return run_16<T, Conv2dProduct::y, 128, 64, 64, 64, 32, 3>(op, p, stream);
    return run_16<T, Conv2dProduct::y, 128, 128, 64, 64, 64, 3>(op, p, stream);
  }
  if (p.pass == Conv2dProduct::dx) {
    if (p.stride_h != 1 || p.stride_w != 1)
      return run_16<T, Conv2dProduct::dx, 128, 128, 32, 64, 64, 4, true>(op, p, stream);
    if (p.channels <= 64) return run_16<T, Conv2dProduct::dx, 128, 64, 64, 64, 32, 3>(op, p, stream);
    return run_16<T, Conv2dProduct::dx, 128, 128, 64, 64, 64, 3>(op, p, stream);
  }
  if (p.outputs <= 64) return run_16<T, Conv2dProduct::dweight, 64, 64, 64, 32, 32, 5>(op, p, stream);
  return run_16<T, Conv2dProduct::dweight, 128, 128, 32, 64, 64, 4>(op, p, stream);
}

Status conv2d_cutlass_16(const char *op, const Conv2dProduct &p, void *stream) {
  return p.dtype == DType::float16 ? choose_16<cutlass::half_t>(op, p, stream)
                                   : choose_16<cutlass::bfloat16_t>(op, p, stream);
}

}  // namespace AOT_ISA
}  // namespace aot
