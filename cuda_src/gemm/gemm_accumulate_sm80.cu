// c += a b of 16-bit matrices on tensor cores, with c in float32, from Ampere on: CUTLASS's kernel, whose source C is
// D. Only the layout of a weight's gradient is compiled, with lines of whole vectors: a is transposed, b is not.
#include <cutlass/cutlass.h>
#include <cutlass/epilogue/thread/linear_combination.h>
#include <cutlass/gemm/device/gemm_universal.h>

#include "cuda/launch.cuh"
#include "from_sm80.cuh"
#include "gemm.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

template <typename T>
Status run(const char *op, const GemmParams &g, cudaStream_t stream, bool *done) {
  using cutlass::gemm::GemmShape;
  using Row = cutlass::layout::RowMajor;
  constexpr int kAligned = 16 / sizeof(T), kStages = 4;
  using Gemm = cutlass::gemm::device::GemmUniversal<
      T, cutlass::layout::ColumnMajor, T, Row, float, Row, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
      GemmShape<128, 128, 32>, GemmShape<64, 64, 32>, GemmShape<16, 8, 16>,
      cutlass::epilogue::thread::LinearCombination<float, 16 / sizeof(float), float, float>,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>, kStages, kAligned, kAligned>;
  using Device = cutlass::gemm::device::GemmUniversalBase<FromSm80<typename Gemm::GemmKernel>>;
  const typename Device::Arguments arguments(cutlass::gemm::GemmUniversalMode::kBatched, {int(g.m), int(g.n), int(g.k)},
                                             int(g.count), {1.0f, 1.0f}, g.a.data, g.b.data, g.c.data, g.c.data,
                                             g.a_step, g.b_step, g.c_step, g.c_step, g.a.stride, g.b.stride, g.c.stride,
                                             g.c.stride);
  if (Device::can_implement(arguments) != cutlass::Status::kSuccess || Device::get_workspace_size(arguments))
    return kOk;
  Device device;
  if (device.initialize(arguments, nullptr, stream) != cutlass::Status::kSuccess ||
      device.run(stream) != cutlass::Status::kSuccess)
    return check_cuda(op, cudaGetLastError());
  return *done = true, check_launch(op);
}

}  // namespace

Status gemm_accumulate_sm80(const char *op, const GemmParams &g, cudaStream_t stream, bool *done) {
  return g.dtype == DType::bfloat16 ? run<cutlass::bfloat16_t>(op, g, stream, done)
                                    : run<cutlass::half_t>(op, g, stream, done);
}

}  // namespace AOT_ISA
}  // namespace aot
