// Boxes of 64 lines of 128 bytes in shared memory, swizzled as TMA writes and wgmma reads them, and the instructions of
// both. For files that are compiled for sm_90a, with CUTLASS's headers.
#pragma once
#include <cuda.h>
#include <cute/arch/mma_sm90_gmma.hpp>

#include <utility>

#include "launch.cuh"
#include "mbarrier.cuh"

namespace aot {
inline namespace AOT_ISA {

constexpr int kBox = 64, kBoxRow = 128, kBoxBytes = kBox * kBoxRow;
template <typename T>
constexpr int kBoxDepth = kBoxRow / static_cast<int>(sizeof(T));  // elements of a box's row

// ------------------------------------------------------------------------------------------------------- instructions

#ifdef CUTE_ARCH_MMA_SM90A_ENABLED

// Loads a box of a matrix from element c of a line on.
__device__ inline void tma_load(const CUtensorMap &map, uint32_t to, uint64_t *barrier, int c, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          to),
      "l"(&map), "r"(shared_address(barrier)), "r"(c), "r"(row)
      : "memory");
}

// A wgmma matrix descriptor: 128-byte swizzle, groups of 8 rows 1024 bytes apart, adjacent boxes kBoxBytes apart.
__device__ inline uint64_t box_descriptor(uint32_t address) {
  return uint64_t{(address & 0x3ffff) >> 4} | uint64_t{kBoxBytes >> 4} << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}

template <typename T, int kCols, bool kAcrossA, bool kAcrossB>
struct Wgmma {
  static constexpr auto major_a = kAcrossA ? cute::SM90::GMMA::Major::MN : cute::SM90::GMMA::Major::K;
  static constexpr auto major_b = kAcrossB ? cute::SM90::GMMA::Major::MN : cute::SM90::GMMA::Major::K;
#define AOT_WGMMA(n)                                                                                      \
  if constexpr (kCols == n) {                                                                             \
    if constexpr (std::is_same_v<T, float>)                                                               \
      cute::SM90::GMMA::MMA_64x##n##x8_F32TF32TF32_SS_TN<>::fma(a, b, sum[i]..., scale);                  \
    else if constexpr (std::is_same_v<T, __half>)                                                         \
      cute::SM90::GMMA::MMA_64x##n##x16_F32F16F16_SS<major_a, major_b>::fma(a, b, sum[i]..., scale);      \
    else cute::SM90::GMMA::MMA_64x##n##x16_F32BF16BF16_SS<major_a, major_b>::fma(a, b, sum[i]..., scale); \
  }
  template <size_t... i>
  static __device__ void run(uint64_t a, uint64_t b, float (&sum)[kCols / 2], bool add, std::index_sequence<i...>) {
    const auto scale = add ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero;
    AOT_WGMMA(64)
    AOT_WGMMA(128)
    AOT_WGMMA(192)
    AOT_WGMMA(256)
  }
#undef AOT_WGMMA
};

// Keeps the compiler from moving uses of the accumulators across this point, while wgmma writes them asynchronously.
template <int kRows, int kSums>
__device__ inline void fence_accumulators(float (&sum)[kRows][kSums]) {
#pragma unroll
  for (auto &row : sum)
#pragma unroll
    for (float &v : row) asm volatile("" : "+f"(v)::"memory");
}

#endif

// ---------------------------------------------------------------------------------------------------------- tensor
// maps

// The driver's functions that encode tensor maps; null if the driver lacks them.
struct TensorMaps {
  decltype(&cuTensorMapEncodeTiled) tiled = nullptr;
  decltype(&cuTensorMapEncodeIm2col) im2col = nullptr;

  TensorMaps() {
    find("cuTensorMapEncodeTiled", &tiled);
    find("cuTensorMapEncodeIm2col", &im2col);
  }
  static const TensorMaps &get() {
    static const TensorMaps maps;
    return maps;
  }

 private:
  template <class F>
  static void find(const char *name, F *function) {
    void *found = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result) == cudaSuccess &&
        result == cudaDriverEntryPointSuccess)
      *function = reinterpret_cast<F>(found);
  }
};

// float32 is rounded to TF32 as it is loaded.
inline CUtensorMapDataType map_type(DType dtype) {
  return dtype == DType::float32   ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
         : dtype == DType::float16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                   : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

// A tensor (size[n - 1], ..., size[0]) with `step` elements from one index to the next along each axis but the last,
// loaded in boxes of `box` elements.
template <int n>
bool map_tiled(CUtensorMap *map, DType dtype, const void *data, const uint64_t (&size)[n], const int64_t (&step)[n - 1],
               const uint32_t (&box)[n]) {
  uint64_t stride[n - 1];
  uint32_t ones[n];
  for (int i = 0; i < n - 1; ++i) stride[i] = step[i] * itemsize(dtype);
  for (uint32_t &one : ones) one = 1;
  return TensorMaps::get().tiled(map, map_type(dtype), n, const_cast<void *>(data), size, stride, box, ones,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace AOT_ISA
}  // namespace aot
