// Products on Hopper's tensor cores: CUTLASS's kernels with wgmma and TMA, whose epilogue adds the bias, stores the
// pre-activation if wanted, and applies the activation. wgmma reads 16-bit operands in either major order, so every
// layout of them is supported, and TF32 along k only. One source file has both dtypes of 16 bits: most of what it takes
// to compile is CuTe's layouts, which know no dtype.
#pragma once
#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "activation.cuh"
#include "cuda/launch.cuh"
#include "gemm.h"

namespace aot {
inline namespace AOT_ISA {

struct ActivationArguments {
  Activation activation;
};

// As CUTLASS's epilogue calls it, on a fragment of sums. T: as activate's.
template <typename T, typename A, int n>
struct ActivatedFragment {
  using Arguments = ActivationArguments;
  using Fragment = cutlass::Array<A, n>;

  CUTLASS_DEVICE Fragment operator()(const Fragment &x, const Arguments &arguments) const {
    Fragment y = x;
    switch (arguments.activation) {  // once for the whole fragment
      case kActivationRelu:
        if constexpr (sizeof(T) == 4) return y;  // it is cuBLASLt's
        else return each<kActivationRelu>(x);
      case kActivationGelu:
        return each<kActivationGelu>(x);
      case kActivationGeluTanh:
        return each<kActivationGeluTanh>(x);
      case kActivationSilu:
        return each<kActivationSilu>(x);
      default:
        return y;
    }
  }

 private:
  template <Activation activation>
  CUTLASS_DEVICE static Fragment each(const Fragment &x) {
    Fragment y;
#pragma unroll
    for (int i = 0; i < n; ++i) y[i] = activate<T>(x[i], activation);
    return y;
  }
};

template <typename T, typename A>
struct ActivatedSum {
  using Arguments = ActivationArguments;
  CUTLASS_DEVICE A operator()(A x, const Arguments &arguments) const { return activate<T>(x, arguments.activation); }
};

template <typename A>
struct Sm90Activation : ActivatedSum<__half, A> {};
template <typename A, int n>
struct Sm90Activation<cutlass::Array<A, n>> : ActivatedFragment<__half, A, n> {};

template <typename A>
struct FloatActivation : ActivatedSum<float, A> {};
template <typename A, int n>
struct FloatActivation<cutlass::Array<A, n>> : ActivatedFragment<float, A, n> {};

// Tile: (m, n, k) of a block; Cluster: blocks that share loads by multicast. kPingpong: two warpgroups compute tiles in
// turn, so that the epilogue of one overlaps the mainloop of the other; otherwise both compute one, larger tile.
template <typename T, class Tile, class Cluster, class EpilogueTile, bool kPingpong, bool kPreActivation,
          bool kTransposedA, bool kTransposedB, template <class> class Activation_ = Sm90Activation>
struct Sm90Kernel {
  static constexpr int kAligned = 16 / sizeof(T);
  using Row = cutlass::layout::RowMajor;
  using Column = cutlass::layout::ColumnMajor;
  using LayoutA = std::conditional_t<kTransposedA, Column, Row>;
  using LayoutB = std::conditional_t<kTransposedB, Column, Row>;
  using WithoutPreActivation =
      cutlass::epilogue::fusion::LinCombPerColBiasEltAct<Activation_, T, float, T, void, float, kAligned>;
  using WithPreActivation = cutlass::epilogue::fusion::LinCombPerColBiasEltActAux<Row, Activation_, T, float, T, T,
                                                                                  void, float, kAligned, kAligned>;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, EpilogueTile, float, float, void, Row,
      kAligned, T, Row, kAligned,
      std::conditional_t<kPingpong, cutlass::epilogue::TmaWarpSpecialized,
                         cutlass::epilogue::TmaWarpSpecializedCooperative>,
      std::conditional_t<kPreActivation, WithPreActivation, WithoutPreActivation>>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, T, LayoutA, kAligned, T, LayoutB, kAligned, float, Tile,
      Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      std::conditional_t<kPingpong, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                         cutlass::gemm::KernelTmaWarpSpecializedCooperative>>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue>;
  using Device = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static Status run(const char *op, const GemmParams &g, int multiprocessors, cudaStream_t stream, bool *done) {
    const int m = static_cast<int>(g.m), n = static_cast<int>(g.n), k = static_cast<int>(g.k);
    typename Kernel::StrideA a_stride;
    typename Kernel::StrideB b_stride;
    cute::get<kTransposedA ? 1 : 0>(a_stride) = g.a.stride, cute::get<2>(a_stride) = g.a_step;
    cute::get<kTransposedB ? 0 : 1>(b_stride) = g.b.stride, cute::get<2>(b_stride) = g.b_step;
    const typename Kernel::StrideD c_stride{g.c.stride, {}, g.c_step};
    typename Device::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {m, n, k, static_cast<int>(g.count)},
        {static_cast<const T *>(g.a.data), a_stride, static_cast<const T *>(g.b.data), b_stride},
        {{}, nullptr, c_stride, static_cast<T *>(g.c.data), c_stride}};
    arguments.hw_info.sm_count = multiprocessors;
    if (sizeof(T) == 2 && std::min(m, n) >= 4096) arguments.scheduler.max_swizzle_size = 4;  // 1 % at 8192 x 8192
    auto &epilogue = arguments.epilogue.thread;
    epilogue.bias_ptr = static_cast<const T *>(g.bias);
    epilogue.activation = {g.activation};
    if constexpr (kPreActivation) epilogue.aux_ptr = static_cast<T *>(g.pre_activation), epilogue.dAux = c_stride;
    Device device;
    if (Device::get_workspace_size(arguments) || Device::can_implement(arguments) != cutlass::Status::kSuccess)
      return kOk;
    if (device.initialize(arguments, nullptr, stream) != cutlass::Status::kSuccess ||
        device.run(stream) != cutlass::Status::kSuccess)
      return check_cuda(op, cudaGetLastError());
    return *done = true, check_launch(op);
  }
};

// Tiles of m x 128 by ping-pong warpgroups, in clusters of two blocks that share columns of b.
template <typename T, int m, bool kPreActivation, bool kTransposedA, bool kTransposedB>
using Sm90Pingpong =
    Sm90Kernel<T, cute::Shape<cute::Int<m>, cute::_128, cute::_64>, cute::Shape<cute::_2, cute::_1, cute::_1>,
               cute::Shape<cute::_64, cute::_64>, true, kPreActivation, kTransposedA, kTransposedB>;

// Tiles of 128 x 64 by both warpgroups, which share the epilogue, where a block has one tile and so no other to overlap
// with it: 8.1 us instead of 8.8 for 1024 x 1024 x 1024 with GELU.
template <typename T, bool kPreActivation, bool kTransposedA, bool kTransposedB>
using Sm90Halves =
    Sm90Kernel<T, cute::Shape<cute::_128, cute::_64, cute::_64>, cute::Shape<cute::_2, cute::_1, cute::_1>,
               cute::Shape<cute::_128, cute::_32>, false, kPreActivation, kTransposedA, kTransposedB>;

template <typename T, bool kPreActivation, bool kTransposedA, bool kTransposedB>
Status gemm_sm90(const char *op, const GemmParams &g, int rows, int multiprocessors, cudaStream_t stream, bool *done) {
  if constexpr (!kTransposedA && kTransposedB)
    if (rows < 128 && g.m > 64 && ceil_div(g.m, 128) * ceil_div(g.n, 64) * g.count <= multiprocessors)
      return Sm90Halves<T, kPreActivation, kTransposedA, kTransposedB>::run(op, g, multiprocessors, stream, done);
  auto run = rows < 128 ? Sm90Pingpong<T, 64, kPreActivation, kTransposedA, kTransposedB>::run
                        : Sm90Pingpong<T, 128, kPreActivation, kTransposedA, kTransposedB>::run;
  return run(op, g, multiprocessors, stream, done);
}

template <typename T>
Status gemm_sm90(const char *op, const GemmParams &g, int rows, int multiprocessors, cudaStream_t stream, bool *done) {
  using E = std::conditional_t<std::is_same_v<T, __half>, cutlass::half_t, cutlass::bfloat16_t>;
  auto *run = g.pre_activation ? gemm_sm90<E, true, false, true>
              : g.a.transposed
                  ? (g.b.transposed ? gemm_sm90<E, false, true, true> : gemm_sm90<E, false, true, false>)
                  : (g.b.transposed ? gemm_sm90<E, false, false, true> : gemm_sm90<E, false, false, false>);
  return run(op, g, rows, multiprocessors, stream, done);
}

}  // namespace AOT_ISA
}  // namespace aot
