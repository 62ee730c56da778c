#include "conv2d_cutlass.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

template <class Math, Conv2dGemm::Pass kPass, int kRows, int kCols, int kDepth, int kWarpRows, int kWarpCols,
          int kStages, bool kStrided = false, int kBlocks = 1>
Status run_32(const char *op, const Conv2dGemm &p, void *stream) {
  return launch_cutlass<CutlassConv2d<Math, float, kPass, GemmShape<kRows, kCols, kDepth>,
                                      GemmShape<kWarpRows, kWarpCols, kDepth>, kStages, kStrided, kBlocks>>(op, p,
                                                                                                            stream);
}

Status run_tf32(const char *op, const Conv2dGemm &p, void *stream) {
  using Math = CutlassMath<cutlass::tfloat32_t, GemmShape<16, 8, 8>>;
  if (p.pass == Conv2dGemm::y) return run_32<Math, Conv2dGemm::y, 128, 64, 32, 64, 32, 3>(op, p, stream);
  if (p.pass == Conv2dGemm::dx) {
    if (p.stride_h == 1 && p.stride_w == 1) return run_32<Math, Conv2dGemm::dx, 128, 64, 32, 64, 32, 3>(op, p, stream);
    return run_32<Math, Conv2dGemm::dx, 128, 64, 32, 64, 32, 3, true>(op, p, stream);
  }
  if (p.out_channels <= 64) return run_32<Math, Conv2dGemm::dweight, 64, 64, 32, 32, 32, 4>(op, p, stream);
  return run_32<Math, Conv2dGemm::dweight, 128, 128, 32, 64, 64, 3>(op, p, stream);
}

// The tiles are the fastest on an H200: warps of 32 x 32 leave registers for three blocks a multiprocessor.
template <Conv2dGemm::Pass kPass, bool kStrided = false>
Status run_three(const char *op, const Conv2dGemm &p, void *stream) {
  using Math = CutlassMath<float, GemmShape<16, 8, 8>, ThreeTf32>;
  return run_32<Math, kPass, 64, 64, 16, 32, 32, 4, kStrided, 3>(op, p, stream);
}

Status run_float(const char *op, const Conv2dGemm &p, void *stream) {
  if (p.pass == Conv2dGemm::dweight) return run_three<Conv2dGemm::dweight>(op, p, stream);
  if (p.pass == Conv2dGemm::dx)
    return p.stride_h == 1 && p.stride_w == 1 ? run_three<Conv2dGemm::dx>(op, p, stream)
                                              : run_three<Conv2dGemm::dx, true>(op, p, stream);
  return run_three<Conv2dGemm::y>(op, p, stream);
}

}  // namespace

Status conv2d_cutlass_32(const char *op, const Conv2dGemm &p, void *stream) {
  return p.tf32 ? run_tf32(op, p, stream) : run_float(op, p, stream);
}

}  // namespace AOT_ISA
}  // namespace aot
