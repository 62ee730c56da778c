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
#include "conv2d_three_tf32.cuh"
#include "cuda/launch.cuh"
#include "gemm/from_sm80.cuh"

namespace aot {
inline namespace AOT_ISA {

using cutlass::gemm::GemmShape;

// The multiply-add, of T, on tensor cores.
template <typename T_, class Instruction_, class Operator_ = cutlass::arch::OpMultiplyAdd>
struct CutlassMath {
  using T = T_;
  using Instruction = Instruction_;
  using Operator = Operator_;
};

// kStrided: dx with a stride other than 1. kBlocks: of a multiprocessor, at least. To: the type of the result; float
// for dweight, whose slices are summed later.
template <class Math, typename To_, Conv2dGemm::Pass kPass_, class Tile_, class WarpTile_, int kStages_,
          bool kStrided_ = false, int kBlocks_ = 1>
struct CutlassConv2d {
  using T = typename Math::T;
  using To = To_;
  using Layout = cutlass::layout::TensorNHWC;
  using Tile = Tile_;
  static constexpr auto kPass = kPass_;
  static constexpr bool kStrided = kStrided_;
  static constexpr int kBlocks = kBlocks_;
  static constexpr auto kStrideSupport = kPass == Conv2dGemm::dx && !kStrided ? cutlass::conv::StrideSupport::kUnity
                                                                              : cutlass::conv::StrideSupport::kStrided;
  static constexpr auto kIterator = cutlass::conv::IteratorAlgorithm::kOptimized;
  static constexpr int kVector = 128 / cutlass::sizeof_bits<T>::value;
  static constexpr int kToVector = 128 / cutlass::sizeof_bits<To>::value;
  using Epilogue = cutlass::epilogue::thread::LinearCombination<To, kToVector, float, float>;
  using Swizzle = std::conditional_t<kStrided, cutlass::conv::threadblock::StridedDgradIdentityThreadblockSwizzle<4>,
                                     cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<4>>;

#define AOT_CUTLASS_CONV2D(Default)                                                                                   \
  cutlass::conv::kernel::Default<T, Layout, T, Layout, To, Layout, float, cutlass::arch::OpClassTensorOp,             \
                                 cutlass::arch::Sm80, Tile, WarpTile_, typename Math::Instruction, Epilogue, Swizzle, \
                                 kStages_, typename Math::Operator, kIterator, kStrideSupport, kVector,               \
                                 kVector>::Kernel
  static auto kernel() {
    if constexpr (kPass == Conv2dGemm::y) return Type<typename AOT_CUTLASS_CONV2D(DefaultConv2dFprop)>();
    else if constexpr (kPass == Conv2dGemm::dx) return Type<typename AOT_CUTLASS_CONV2D(DefaultConv2dDgrad)>();
    else return Type<typename AOT_CUTLASS_CONV2D(DefaultConv2dWgrad)>();
  }
#undef AOT_CUTLASS_CONV2D
  template <class K>
  static auto with_blocks() {
    if constexpr (std::is_same_v<typename Math::Operator, ThreeTf32>) return Type<typename OfThreeTf32<K>::type>();
    else return Type<K>();
  }
  using Kernel = FromSm80<typename decltype(with_blocks<typename decltype(kernel())::type>())::type>;
};

// A multiprocessor has registers for kBlocks blocks of it.
template <class Kernel, int kBlocks>
__global__ void __launch_bounds__(Kernel::kThreadCount, kBlocks)
    conv2d_kernel(CUTLASS_GRID_CONSTANT const typename Kernel::Params params) {
  extern __shared__ int shared[];
  Kernel::invoke(params, *reinterpret_cast<typename Kernel::SharedStorage *>(shared));
}

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
  constexpr auto kernel = [] {
    if constexpr (Conv::kBlocks > 1) return conv2d_kernel<Kernel, Conv::kBlocks>;
    else return cutlass::Kernel<Kernel>;
  }();
  AOT_TRY(allow(op, kernel, 1, shared));
  kernel<<<grid, Kernel::kThreadCount, shared, static_cast<cudaStream_t>(stream)>>>(params);
  return check_launch(op);
}

}  // namespace AOT_ISA
}  // namespace aot
