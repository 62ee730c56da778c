// conv2d as an implicit GEMM by CUTLASS: its kernels for sm_80, which later architectures run as well.
#pragma once
#include <cutlass/conv/kernel/default_conv2d_dgrad.h>
#include <cutlass/conv/kernel/default_conv2d_fprop.h>
#include <cutlass/conv/kernel/default_conv2d_wgrad.h>
#include <cutlass/conv/threadblock/threadblock_swizzle.h>
#include <cutlass/device_kernel.h>
#include <cutlass/epilogue/thread/linear_combination.h>

#include <type_traits>

#include "conv2d_gemm.h"
#include "cuda/launch.cuh"
#include "gemm/from_sm80.cuh"

namespace aot {
inline namespace AOT_ISA {

using cutlass::gemm::GemmShape;

// The multiply-add: of T, on tensor cores, or with kSimt on the ordinary cores.
template <typename T_, class Instruction_, bool kSimt_ = false>
struct CutlassMath {
  using T = T_;
  using Instruction = Instruction_;
  static constexpr bool kSimt = kSimt_;
  using Class = std::conditional_t<kSimt, cutlass::arch::OpClassSimt, cutlass::arch::OpClassTensorOp>;
};

// kStrided: dx with a stride other than 1. To: the type of the result; float for dweight, whose slices are summed
// later.
template <class Math, typename To_, Conv2dGemm::Pass kPass_, class Tile_, class WarpTile_, int kStages_,
          bool kStrided_ = false>
struct CutlassConv2d {
  using T = typename Math::T;
  using To = To_;
  using Layout = cutlass::layout::TensorNHWC;
  using Tile = Tile_;
  static constexpr auto kPass = kPass_;
  static constexpr bool kStrided = kStrided_;
  static constexpr auto kStrideSupport = kPass == Conv2dGemm::dx && !kStrided ? cutlass::conv::StrideSupport::kUnity
                                                                              : cutlass::conv::StrideSupport::kStrided;
  static constexpr int kVector = Math::kSimt ? 1 : 128 / cutlass::sizeof_bits<T>::value;
  static constexpr int kToVector = Math::kSimt ? 1 : 128 / cutlass::sizeof_bits<To>::value;
  using Epilogue = cutlass::epilogue::thread::LinearCombination<To, kToVector, float, float>;
  using Swizzle = std::conditional_t<kStrided, cutlass::conv::threadblock::StridedDgradIdentityThreadblockSwizzle<4>,
                                     cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<4>>;

#define AOT_CUTLASS_CONV2D(Default)                                                                                  \
  cutlass::conv::kernel::Default<T, Layout, T, Layout, To, Layout, float, typename Math::Class, cutlass::arch::Sm80, \
                                 Tile, WarpTile_, typename Math::Instruction, Epilogue, Swizzle, kStages_,           \
                                 cutlass::arch::OpMultiplyAdd, cutlass::conv::IteratorAlgorithm::kOptimized,         \
                                 kStrideSupport, kVector, kVector>::Kernel
  static auto kernel() {
    if constexpr (kPass == Conv2dGemm::y) return Type<typename AOT_CUTLASS_CONV2D(DefaultConv2dFprop)>();
    else if constexpr (kPass == Conv2dGemm::dx) return Type<typename AOT_CUTLASS_CONV2D(DefaultConv2dDgrad)>();
    else return Type<typename AOT_CUTLASS_CONV2D(DefaultConv2dWgrad)>();
  }
#undef AOT_CUTLASS_CONV2D
  using Kernel = FromSm80<typename decltype(kernel())::type>;
};

template <class Conv>
Status launch_cutlass(const char *op, const Conv2dGemm &p, void *stream) {
  using Kernel = typename Conv::Kernel;
  using Layout = typename Conv::Layout;
  using T = typename Conv::T;
  using To = typename Conv::To;
  const int slices = p.slices > 0 ? p.slices : 1;
  const cutlass::conv::Conv2dProblemSize size(
      p.batch, p.height, p.width, p.channels, p.out_channels, p.kernel_h, p.kernel_w, p.out_h, p.out_w, p.padding_h,
      p.padding_w, p.stride_h, p.stride_w, p.dilation_h, p.dilation_w, cutlass::conv::Mode::kCrossCorrelation, slices);
  const Layout x = Layout::packed({p.batch, p.height, p.width, p.channels});
  const Layout y = Layout::packed({p.batch, p.out_h, p.out_w, p.out_channels});
  const Layout weight = Layout::packed({p.out_channels, p.kernel_h, p.kernel_w, p.channels});
  const bool forward = p.pass == Conv2dGemm::y, dweight = p.pass == Conv2dGemm::dweight;
  const Layout to = forward ? y : dweight ? weight : x;
  auto data = [](const void *p) { return static_cast<T *>(const_cast<void *>(p)); };
  auto *bias = static_cast<To *>(const_cast<void *>(p.bias));  // as a source tensor of stride 0: every row is the bias
  const typename Kernel::Arguments arguments(
      size, {data(p.a), forward ? x : y}, {data(p.b), dweight ? x : weight},
      {bias, bias ? Layout(typename Layout::Stride(0)) : to}, {static_cast<To *>(p.to), to}, {1.f, bias ? 1.f : 0.f},
      p.slices > 0 ? cutlass::conv::SplitKMode::kParallel : cutlass::conv::SplitKMode::kSerial);
  const typename Kernel::Params params(arguments, nullptr);
  const dim3 grid = typename Conv::Swizzle().get_grid_shape(params.grid_tiled_shape);
  constexpr int shared = sizeof(typename Kernel::SharedStorage);
  AOT_TRY(allow(op, cutlass::Kernel<Kernel>, 1, shared));
  cutlass::Kernel<Kernel><<<grid, Kernel::kThreadCount, shared, static_cast<cudaStream_t>(stream)>>>(params);
  return check_launch(op);
}

}  // namespace AOT_ISA
}  // namespace aot
