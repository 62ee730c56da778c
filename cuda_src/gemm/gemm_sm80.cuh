// Products of 16-bit matrices on tensor cores, on any GPU from Ampere on: CUTLASS's kernels with mma.sync and cp.async.
// Used on GPUs before Hopper, and for layouts that the Hopper kernels do not support, where cuBLASLt is not available.
// One source file has both dtypes: most of what it takes to compile is templates that know no dtype.
#pragma once
#include <cutlass/cutlass.h>
#include <cutlass/epilogue/thread/linear_combination.h>
#include <cutlass/gemm/device/gemm_universal.h>
#include <cutlass/gemm/device/gemm_universal_with_broadcast.h>

#include "activation.cuh"
#include "cuda/launch.cuh"
#include "from_sm80.cuh"
#include "gemm.h"

namespace aot {
inline namespace AOT_ISA {

// activation(sum + bias), as CUTLASS's epilogue calls it. The bias is its source matrix C, with stride 0.
template <typename T, int kCount_>
struct Sm80Epilogue {
  static constexpr int kCount = kCount_;  // elements in a vector
  using ElementOutput = T;
  using ElementSource = T;
  using ElementAccumulator = float;
  using ElementCompute = float;
  using ElementScalar = float;
  using ElementC = T;
  using ElementD = T;
  using FragmentOutput = cutlass::Array<T, kCount>;
  using FragmentSource = cutlass::Array<T, kCount>;
  using FragmentAccumulator = cutlass::Array<float, kCount>;
  static constexpr cutlass::FloatRoundStyle kRound = cutlass::FloatRoundStyle::round_to_nearest;

  struct Params {
    Activation activation = kActivationNone;
    bool bias = false;
  };

  CUTLASS_HOST_DEVICE explicit Sm80Epilogue(const Params &params, int = 0) : params_(params) {}
  CUTLASS_HOST_DEVICE bool is_source_needed() const { return params_.bias; }
  CUTLASS_HOST_DEVICE void set_k_partition(int, int) {}

  __device__ FragmentOutput operator()(FragmentAccumulator sum, const FragmentSource &bias) const {
    cutlass::NumericArrayConverter<float, T, kCount, kRound> widen;
    const FragmentAccumulator b = widen(bias);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] += b[i];
    return (*this)(sum);
  }
  __device__ FragmentOutput operator()(FragmentAccumulator sum) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] = activate<__half>(sum[i], params_.activation);
    cutlass::NumericArrayConverter<T, float, kCount, kRound> narrow;
    return narrow(sum);
  }

 private:
  Params params_;
};

// A product that also stores the pre-activation, as the second result that CUTLASS calls T. Both are computed from the
// same sums, so that y has the same bits. `bias` is zeros if there is none.
template <typename T, int kCount_>
struct Sm80PreActivationEpilogue {
  static constexpr int kCount = kCount_, kElementsPerAccess = kCount_;
  static constexpr bool kIsSingleSource = true, kIsHeavy = false, kStoreZ = true, kStoreT = true;
  using ElementOutput = T;
  using ElementC = T;
  using ElementD = T;
  using ElementZ = T;
  using ElementT = T;
  using ElementVector = T;
  using ElementAccumulator = float;
  using ElementCompute = float;
  using ElementScalar = float;
  using Fragment = cutlass::Array<T, kCount>;
  using FragmentOutput = Fragment;
  using FragmentSource = Fragment;
  using Sums = cutlass::Array<float, kCount>;
  using FragmentAccumulator = Sums;

  struct Params {
    Activation activation = kActivationNone;
  };

  CUTLASS_HOST_DEVICE explicit Sm80PreActivationEpilogue(const Params &params) : params_(params) {}
  CUTLASS_HOST_DEVICE bool is_source_needed() const { return false; }
  CUTLASS_HOST_DEVICE void set_k_partition(int, int) {}

  __device__ void operator()(Fragment &y, Fragment &pre_activation, Sums sum, const Sums &bias) const {
    cutlass::NumericArrayConverter<T, float, kCount, cutlass::FloatRoundStyle::round_to_nearest> narrow;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] += bias[i];
    pre_activation = narrow(sum);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] = activate<__half>(sum[i], params_.activation);
    y = narrow(sum);
  }
  // CUTLASS requires this overload, for a source C, which this epilogue never has.
  __device__ void operator()(Fragment &y, Fragment &pre_activation, const Sums &sum, const Fragment &,
                             const Sums &bias) const {
    (*this)(y, pre_activation, sum, bias);
  }

 private:
  Params params_;
};

template <bool kTransposed>
using Sm80Layout = std::conditional_t<kTransposed, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;
using Sm80Tile = cutlass::gemm::GemmShape<128, 128, 32>;
using Sm80Warp = cutlass::gemm::GemmShape<64, 64, 32>;
using Sm80Instruction = cutlass::gemm::GemmShape<16, 8, 16>;
using Sm80Swizzle = cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>;
template <int kAligned>
constexpr int kSm80Stages = kAligned == 1 ? 2 : 4;

template <class Gemm>
static Status run_device(const char *op, const typename Gemm::Arguments &arguments, cudaStream_t stream, bool *done) {
  using Device = cutlass::gemm::device::GemmUniversalBase<FromSm80<typename Gemm::GemmKernel>>;
  if (Device::can_implement(arguments) != cutlass::Status::kSuccess || Device::get_workspace_size(arguments))
    return kOk;
  Device device;
  if (device.initialize(arguments, nullptr, stream) != cutlass::Status::kSuccess ||
      device.run(stream) != cutlass::Status::kSuccess)
    return check_cuda(op, cudaGetLastError());
  return *done = true, check_launch(op);
}

// kAligned: the alignment of every line, in elements: 8, or 1, for which CUTLASS cannot use cp.async.
template <typename T, int kAligned, bool kTransposeA, bool kTransposeB>
static Status run(const char *op, const GemmParams &g, cudaStream_t stream, bool *done) {
  using Device = cutlass::gemm::device::GemmUniversal<
      T, Sm80Layout<kTransposeA>, T, Sm80Layout<kTransposeB>, T, cutlass::layout::RowMajor, float,
      cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, Sm80Tile, Sm80Warp, Sm80Instruction,
      Sm80Epilogue<T, kAligned>, Sm80Swizzle, kSm80Stages<kAligned>, kAligned, kAligned>;
  const typename Device::Arguments arguments(cutlass::gemm::GemmUniversalMode::kBatched, {int(g.m), int(g.n), int(g.k)},
                                             int(g.count), {g.activation, g.bias != nullptr}, g.a.data, g.b.data,
                                             g.bias, g.c.data, g.a_step, g.b_step, 0, g.c_step, g.a.stride, g.b.stride,
                                             int64_t{0}, g.c.stride);
  return run_device<Device>(op, arguments, stream, done);
}

// One product of linear's layout: a not transposed, b transposed.
template <typename T, int kAligned>
static Status run_with_pre_activation(const char *op, const GemmParams &g, cudaStream_t stream, bool *done) {
  using Device = cutlass::gemm::device::GemmUniversalWithBroadcast<
      T, Sm80Layout<false>, T, Sm80Layout<true>, T, cutlass::layout::RowMajor, float, cutlass::arch::OpClassTensorOp,
      cutlass::arch::Sm80, Sm80Tile, Sm80Warp, Sm80Instruction, Sm80PreActivationEpilogue<T, kAligned>, Sm80Swizzle,
      kSm80Stages<kAligned>, kAligned, kAligned>;
  const typename Device::Arguments arguments(cutlass::gemm::GemmUniversalMode::kBatched, {int(g.m), int(g.n), int(g.k)},
                                             1, {g.activation}, g.a.data, g.b.data, nullptr, g.c.data,
                                             const_cast<void *>(g.bias), g.pre_activation, 0, 0, 0, 0, 0, 0, g.a.stride,
                                             g.b.stride, 0, g.c.stride, 0, g.c.stride);
  return run_device<Device>(op, arguments, stream, done);
}

template <typename T, int kAligned>
static Status run_layout(const char *op, const GemmParams &g, cudaStream_t stream, bool *done) {
  if (g.pre_activation) return run_with_pre_activation<T, kAligned>(op, g, stream, done);
  auto *layout = g.a.transposed ? (g.b.transposed ? run<T, kAligned, true, true> : run<T, kAligned, true, false>)
                                : (g.b.transposed ? run<T, kAligned, false, true> : run<T, kAligned, false, false>);
  return layout(op, g, stream, done);
}

template <typename T>
Status gemm_sm80(const char *op, const GemmParams &g, bool vectors, cudaStream_t stream, bool *done) {
  using Element = std::conditional_t<std::is_same_v<T, __half>, cutlass::half_t, cutlass::bfloat16_t>;
  auto *run = vectors ? run_layout<Element, 8> : run_layout<Element, 1>;
  return run(op, g, stream, done);
}

}  // namespace AOT_ISA
}  // namespace aot
