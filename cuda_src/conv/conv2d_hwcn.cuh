// Operands of dweight in TF32, which wgmma takes only if they are contiguous along the sum: copies of dy and x in HWCN.
// There a kernel element is a distance in pixels, and TMA, whose innermost coordinate must be a multiple of 16 bytes,
// loads zeros outside of an image.
#pragma once
#include "conv2d_gemm.h"
#include "cuda/overlap.cuh"

namespace aot {
inline namespace AOT_ISA {

constexpr int kHwcnBlock = 256, kHwcnImages = 32, kHwcnTile = 128;

struct HwcnCopy {
  const float *from;
  float *to;
  unsigned images, elements;  // of an image
  unsigned pitch;             // of `to`: from one element's images to the next's
  unsigned channels, plane;   // of NCHW: pixels of an image; of NHWC: 0
};

// A block transposes kHwcnTile elements of kHwcnImages images.
__global__ void __launch_bounds__(kHwcnBlock) copy_to_hwcn_kernel(HwcnCopy f) {
  __shared__ float tile[kHwcnImages][kHwcnTile + 1];
  constexpr int kWarps = kHwcnBlock / 32, kPieces = kHwcnTile / 32, kLoads = kHwcnImages / kWarps * kPieces;
  launch_next();
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned groups = (f.images + kHwcnImages - 1) / kHwcnImages;  // side by side in `to`
  const unsigned first_image = blockIdx.x % groups * kHwcnImages, first = blockIdx.x / groups * kHwcnTile;
  float loaded[kLoads];
#pragma unroll
  for (int k = 0; k < kLoads; ++k) {
    const unsigned image = first_image + warp + k / kPieces * kWarps, element = first + k % kPieces * 32 + lane;
    loaded[k] = image < f.images && element < f.elements ? f.from[int64_t{image} * f.elements + element] : 0;
  }
#pragma unroll
  for (int k = 0; k < kLoads; ++k) tile[warp + k / kPieces * kWarps][k % kPieces * 32 + lane] = loaded[k];
  __syncthreads();
  constexpr int kVectors = kHwcnImages / 4, kAtOnce = kHwcnBlock / kVectors;
  const unsigned in_group = threadIdx.x % kVectors * 4, image = first_image + in_group;
#pragma unroll
  for (int k = 0; k < kHwcnTile; k += kAtOnce) {
    const unsigned at = k + threadIdx.x / kVectors, element = first + at;
    if (element >= f.elements || image >= f.pitch) continue;
    const unsigned row = f.plane ? element % f.plane * f.channels + element / f.plane : element;
    const float4 v = {tile[in_group][at], tile[in_group + 1][at], tile[in_group + 2][at], tile[in_group + 3][at]};
    *reinterpret_cast<float4 *>(f.to + int64_t{row} * f.pitch + image) = v;
  }
  wait_for_kernel_before();
}

}  // namespace AOT_ISA
}  // namespace aot
