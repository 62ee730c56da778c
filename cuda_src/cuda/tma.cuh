// Loads of boxes of tensors into shared memory by TMA, and the tensor maps that describe them: compute capability 9.0.
// Elements outside of a tensor are loaded as zeros. Rows of a box have 128 bytes, swizzled as wgmma reads them.
#pragma once
#include <cuda.h>

#include "launch.cuh"
#include "mbarrier.cuh"

namespace aot {
inline namespace AOT_ISA {

#if __CUDA_ARCH__ >= 900
// Loads a box of a tensor map from these indices on, the last axis first.
__device__ inline void tma_load(const CUtensorMap &map, uint32_t to, uint64_t *barrier, int c, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          to),
      "l"(&map), "r"(shared_address(barrier)), "r"(c), "r"(row)
      : "memory");
}
__device__ inline void tma_load(const CUtensorMap &map, uint32_t to, uint64_t *barrier, int c, int k, int row) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(to),
      "l"(&map), "r"(shared_address(barrier)), "r"(c), "r"(k), "r"(row)
      : "memory");
}
__device__ inline void tma_load(const CUtensorMap &map, uint32_t to, uint64_t *barrier, int c, int row, int j, int i) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(shared_address(barrier)), "r"(c), "r"(row), "r"(j), "r"(i)
      : "memory");
}
#endif

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
// loaded in boxes of `box` elements. Without a swizzle a box's rows have any length of 16 bytes' multiples.
template <int n>
bool map_tiled(CUtensorMap *map, DType dtype, const void *data, const uint64_t (&size)[n], const int64_t (&step)[n - 1],
               const uint32_t (&box)[n], CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  uint64_t stride[n - 1];
  uint32_t ones[n];
  for (int i = 0; i < n - 1; ++i) stride[i] = step[i] * itemsize(dtype);
  for (uint32_t &one : ones) one = 1;
  return TensorMaps::get().tiled(map, map_type(dtype), n, const_cast<void *>(data), size, stride, box, ones,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace AOT_ISA
}  // namespace aot
