#include "conv2d_cutlass.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

template <typename T, Conv2dGemm::Pass kPass, int kRows, int kCols, int kDepth, int kWarpRows, int kWarpCols,
          int kStages, bool kStrided = false>
Status run_16(const char *op, const Conv2dGemm &p, void *stream) {
  using To = std::conditional_t<kPass == Conv2dGemm::dweight, float, T>;
  return launch_cutlass<CutlassConv2d<CutlassMath<T, GemmShape<16, 8, 16>>, To, kPass, GemmShape<kRows, kCols, kDepth>,
                                      GemmShape<kWarpRows, kWarpCols, kDepth>, kStages, kStrided>>(op, p, stream);
}

// Tiles: the fastest on an H200.
template <typename T>
Status choose_16(const char *op, const Conv2dGemm &p, void *stream) {
  if (p.pass == Conv2dGemm::y) {
    if (p.out_channels <= 64) return run_16<T, Conv2dGemm::y, 128, 64, 64, 64, 32, 3>(op, p, stream);
    return run_16<T, Conv2dGemm::y, 128, 128, 64, 64, 64, 3>(op, p, stream);
  }
  if (p.pass == Conv2dGemm::dx) {
    if (p.stride_h != 1 || p.stride_w != 1)
      return run_16<T, Conv2dGemm::dx, 128, 128, 32, 64, 64, 4, true>(op, p, stream);
    if (p.channels <= 64) return run_16<T, Conv2dGemm::dx, 128, 64, 64, 64, 32, 3>(op, p, stream);
    return run_16<T, Conv2dGemm::dx, 128, 128, 64, 64, 64, 3>(op, p, stream);
  }
  if (p.out_channels <= 64) return run_16<T, Conv2dGemm::dweight, 64, 64, 64, 32, 32, 5>(op, p, stream);
  return run_16<T, Conv2dGemm::dweight, 128, 128, 32, 64, 64, 4>(op, p, stream);
}

}  // namespace

Status conv2d_cutlass_16(const char *op, const Conv2dGemm &p, void *stream) {
  return p.dtype == DType::float16 ? choose_16<cutlass::half_t>(op, p, stream)
                                   : choose_16<cutlass::bfloat16_t>(op, p, stream);
}

}  // namespace AOT_ISA
}  // namespace aot
