// float32 by tensor cores, in CUTLASS's kernels: a product is three of TF32.
//
// A product is that of the larger parts (two_tf32.cuh), and of each with the smaller part of the other factor. Tensor
// cores truncate what they add to: 8 products of larger parts are added to 0, and ordinary additions gather such sums.
// The others are 2^-11 of these, and may be one long sum. It is left out where theirs is not finite: the larger parts
// alone make of an infinity what float32 does. A NaN whose larger part is finite is lost in a sum with an infinity.
#pragma once
#include <cutlass/conv/kernel/implicit_gemm_convolution.h>
#include <cutlass/conv/kernel/implicit_gemm_convolution_strided_dgrad.h>
#include <cutlass/gemm/warp/mma_tensor_op_fast_f32.h>

#include "cuda/two_tf32.cuh"

namespace aot {
inline namespace AOT_ISA {

// CUTLASS's math operator.
struct ThreeTf32 {};

// A warp's products. CUTLASS brings the operands; its sums are of products of larger parts, and behind them the others.
template <class FastF32>
class ThreeTf32Mma : public FastF32 {
 public:
  using MathOperator = ThreeTf32;
  using typename FastF32::FragmentA, typename FastF32::FragmentB;
  using TransformedFragmentA = FragmentA;
  using TransformedFragmentB = FragmentB;
  static constexpr int kSums = FastF32::FragmentC::kElements;
  using FragmentC = cutlass::Array<float, 2 * kSums>;

  // The parts are made of the operands when they are multiplied: they need registers for a step alone.
  CUTLASS_DEVICE void transform(FragmentA &to_a, FragmentB &to_b, const FragmentA &a, const FragmentB &b) const {
    to_a = a, to_b = b;
  }

  CUTLASS_DEVICE void operator()(FragmentC &sums, const FragmentA &a, const FragmentB &b, const FragmentC &) const {
    using Mma = typename FastF32::ArchMmaOperator;
    constexpr int kRows = FastF32::MmaIterations::kRow, kColumns = FastF32::MmaIterations::kColumn;
    typename Mma::FragmentB b_big[kColumns], b_small[kColumns];
#pragma unroll
    for (int n = 0; n < kColumns; ++n) split(b, n, b_big[n], b_small[n]);
    auto *sum = reinterpret_cast<typename Mma::FragmentC *>(&sums), *small = sum + kRows * kColumns;
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      typename Mma::FragmentA a_big, a_small;
      split(a, m, a_big, a_small);
      typename Mma::FragmentC products[kColumns], zero;
      zero.clear();
      // A product that adds to the one before would wait for it.
#pragma unroll
      for (int n = 0; n < kColumns; ++n) this->mma(products[n], a_big, b_big[n], zero);
#pragma unroll
      for (int n = 0; n < kColumns; ++n) this->mma(small[m + n * kRows], a_small, b_big[n], small[m + n * kRows]);
#pragma unroll
      for (int n = 0; n < kColumns; ++n) this->mma(small[m + n * kRows], a_big, b_small[n], small[m + n * kRows]);
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
#pragma unroll
        for (int k = 0; k < Mma::FragmentC::kElements; ++k) sum[m + n * kRows][k] += products[n][k];
    }
  }

 private:
  template <class From, class Part>
  CUTLASS_DEVICE static void split(const From &from, int index, Part &big, Part &small) {
#pragma unroll
    for (int i = 0; i < Part::kElements; ++i) {
      uint32_t bits, rest;
      aot::split(from[index * Part::kElements + i], bits, rest);
      big[i] = cutlass::tfloat32_t::bitcast(bits), small[i] = cutlass::tfloat32_t::bitcast(rest);
    }
  }
};

// A block's products: CUTLASS's, and at their end one sum of both.
template <class Mma>
struct ThreeTf32Block : Mma {
  using typename Mma::IteratorA, typename Mma::IteratorB;
  static constexpr int kSums = Mma::Operator::kSums;
  using FragmentC = cutlass::Array<float, kSums>;
  using Mma::Mma;

  // The sums begin at 0.
  CUTLASS_DEVICE void operator()(int steps, FragmentC &sums, IteratorA a, IteratorB b, const FragmentC &,
                                 int of_channel = 0) {
    typename Mma::FragmentC parts;
    parts.clear();
    Mma::operator()(steps, parts, a, b, parts, of_channel);
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      sums[i] = isfinite(parts[i]) ? parts[i] + parts[kSums + i] : parts[i];
    }
  }
};

// CUTLASS's kernel with such blocks.
template <class Kernel>
struct OfThreeTf32;
template <class Mma, class Epilogue, class Swizzle, cutlass::conv::Operator kPass, class Size,
          cutlass::conv::GroupMode kGroups>
struct OfThreeTf32<cutlass::conv::kernel::ImplicitGemmConvolution<Mma, Epilogue, Swizzle, kPass, Size, kGroups>> {
  using type =
      cutlass::conv::kernel::ImplicitGemmConvolution<ThreeTf32Block<Mma>, Epilogue, Swizzle, kPass, Size, kGroups>;
};
template <class Mma, class Epilogue, class Swizzle, cutlass::conv::Operator kPass, class Size>
struct OfThreeTf32<cutlass::conv::kernel::ImplicitGemmConvolutionStridedDgrad<Mma, Epilogue, Swizzle, kPass, Size>> {
  using type =
      cutlass::conv::kernel::ImplicitGemmConvolutionStridedDgrad<ThreeTf32Block<Mma>, Epilogue, Swizzle, kPass, Size>;
};

}  // namespace AOT_ISA
}  // namespace aot

namespace cutlass::gemm::warp {

template <class Shape, class LayoutA, class LayoutB, class LayoutC, int kPartitions, bool kRowMajor>
struct DefaultMmaTensorOp<Shape, GemmShape<16, 8, 8>, float, LayoutA, float, LayoutB, float, LayoutC, aot::ThreeTf32,
                          kPartitions, kRowMajor> {
  using Type =
      aot::ThreeTf32Mma<typename DefaultMmaTensorOp<Shape, GemmShape<16, 8, 8>, float, LayoutA, float, LayoutB, float,
                                                    LayoutC, arch::OpMultiplyAddFastF32, kPartitions, kRowMajor>::Type>;
};

}  // namespace cutlass::gemm::warp
