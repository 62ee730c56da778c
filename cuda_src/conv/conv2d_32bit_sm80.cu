#include "conv2d_cutlass.cuh"

namespace aot {
inline namespace AOT_ISA {

template <class Math, Conv2dProduct::Pass kPass, int kRows, int kCols, int kDepth, int kWarpRows, int kWarpCols,
          int kStages, bool kStrided = false>
Status run_32(const char *op, const Conv2dProduct &p, void *stream) {
  return launch_cutlass<CutlassConv2d<Math, float, kPass, GemmShape<kRows, kCols, kDepth>,
                                      GemmShape<kWarpRows, kWarpCols, kDepth>, kStages, kStrided>>(op, p, stream);
}

static Status run_tf32(const char *op, const Conv2dProduct &p, void *stream) {
  using Math = CutlassMath<cutlass::tfloat32_t, GemmShape<16, 8, 8>>;
  if (p.pass == Conv2dProduct::y) return run_32<Math, Conv2dProduct::y, 128, 64, 32, 64, 32, 3>(op, p, stream);
  if (p.pass == Conv2dProduct::dx) {
    if (p.stride_h == 1 && p.stride_w == 1)
      return run_32<Math, Conv2dProduct::dx, 128, 64, 32, 64, 32, 3>(op, p, stream);
    return run_32<Math, Conv2dProduct::dx, 128, 64, 32, 64, 32, 3, true>(op, p, stream);
  }
  if (p.outputs <= 64) return run_32<Math, Conv2dProduct::dweight, 64, 64, 32, 32, 32, 4>(op, p, stream);
  return run_32<Math, Conv2dProduct::dweight, 128, 128, 32, 64, 64, 3>(op, p, stream);
}

static Status run_float(const char *op, const Conv2dProduct &p, void *stream) {
  using Math = CutlassMath<float, GemmShape<1, 1, 1>, true>;
  if (p.pass == Conv2dProduct::y) return run_32<Math, Conv2dProduct::y, 128, 64, 8, 32, 64, 4>(op, p, stream);
  if (p.pass == Conv2dProduct::dx) {
    if (p.stride_h == 1 && p.stride_w == 1)
      return run_32<Math, Conv2dProduct::dx, 128, 64, 8, 32, 64, 4>(op, p, stream);
    return run_32<Math, Conv2dProduct::dx, 128, 64, 8, 32, 64, 4, true>(op, p, stream);
  }
  if (p.outputs <= 64) return run_32<Math, Conv2dProduct::dweight, 64, 128, 8, 32, 64, 4>(op, p, stream);
  return run_32<Math, Conv2dProduct::dweight, 128, 128, 8, 32, 64, 4>(op, p, stream);
}

Status conv2d_cutlass_32(const char *op, const Conv2dProduct &p, void *stream) {
  return p.tf32 ? run_tf32(op, p, stream) : run_float(op, p, stream);
}

}  // namespace AOT_ISA
}  // namespace aot
