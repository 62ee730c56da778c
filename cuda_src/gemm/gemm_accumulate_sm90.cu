// c += a b of 16-bit matrices on Hopper's tensor cores, with c in float32: CUTLASS's kernel, whose source C is D. Only
// the layout of a weight's gradient is compiled: a is transposed, b is not.
#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "cuda/launch.cuh"
#include "gemm.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// Tiles of m x 128 by ping-pong warpgroups, in clusters of two blocks that share columns of b, as in gemm_sm90.cuh.
template <typename T, int m>
struct AddingKernel {
  static constexpr int kAligned = 16 / sizeof(T), kAlignedC = 16 / sizeof(float);
  using Row = cutlass::layout::RowMajor;
  using Tile = cute::Shape<cute::Int<m>, cute::_128, cute::_64>;
  using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, cute::Shape<cute::_64, cute::_32>, float,
      float, float, Row, kAlignedC, float, Row, kAlignedC, cutlass::epilogue::TmaWarpSpecialized>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, T, cutlass::layout::ColumnMajor, kAligned, T, Row, kAligned,
      float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      cutlass::gemm::KernelTmaWarpSpecializedPingpong>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue>;
  using Device = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static Status run(const char *op, const GemmParams &g, int multiprocessors, cudaStream_t stream, bool *done) {
    typename Kernel::StrideA a_stride;
    typename Kernel::StrideB b_stride;
    cute::get<1>(a_stride) = g.a.stride, cute::get<2>(a_stride) = g.a_step;
    cute::get<1>(b_stride) = g.b.stride, cute::get<2>(b_stride) = g.b_step;
    const typename Kernel::StrideD c_stride{g.c.stride, {}, g.c_step};
    float *c = static_cast<float *>(g.c.data);
    typename Device::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {static_cast<int>(g.m), static_cast<int>(g.n), static_cast<int>(g.k), static_cast<int>(g.count)},
        {static_cast<const T *>(g.a.data), a_stride, static_cast<const T *>(g.b.data), b_stride},
        {{}, c, c_stride, c, c_stride}};
    arguments.hw_info.sm_count = multiprocessors;
    arguments.epilogue.thread.alpha = 1, arguments.epilogue.thread.beta = 1;
    Device device;
    if (Device::get_workspace_size(arguments) || Device::can_implement(arguments) != cutlass::Status::kSuccess)
      return kOk;
    if (device.initialize(arguments, nullptr, stream) != cutlass::Status::kSuccess ||
        device.run(stream) != cutlass::Status::kSuccess)
      return check_cuda(op, cudaGetLastError());
    return *done = true, check_launch(op);
  }
};

}  // namespace

Status gemm_accumulate_sm90(const char *op, const GemmParams &g, int rows, int multiprocessors, cudaStream_t stream,
                            bool *done) {
  using cutlass::bfloat16_t, cutlass::half_t;
  auto *run = g.dtype == DType::bfloat16
                  ? (rows < 128 ? AddingKernel<bfloat16_t, 64>::run : AddingKernel<bfloat16_t, 128>::run)
                  : (rows < 128 ? AddingKernel<half_t, 64>::run : AddingKernel<half_t, 128>::run);
  return run(op, g, multiprocessors, stream, done);
}

}  // namespace AOT_ISA
}  // namespace aot
