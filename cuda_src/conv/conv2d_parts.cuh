// float32 in three parts of bfloat16, of which wgmma makes float32's products: a number is the sum of the number
// rounded, of the rest rounded, and of what is left. Of nine products of parts, the three that are left out are less
// than 2^-24 of the largest. From 2^128 (1 - 2^-9) on, the largest part is infinite.
#pragma once
#include "conv2d_pack.cuh"

namespace aot {
inline namespace AOT_ISA {

constexpr int kParts = 3, kPartVector = 8;

// Eight channels of a pixel, of which `to` has the first part.
__device__ inline void store_parts(float (&v)[kPartVector], __nv_bfloat16 *to, int64_t channels) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    uint32_t words[kPartVector / 2];
#pragma unroll
    for (int i = 0; i < kPartVector; i += 2) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(v[i], v[i + 1]);
      v[i] -= __low2float(two), v[i + 1] -= __high2float(two);
      words[i / 2] = reinterpret_cast<const uint32_t &>(two);
    }
    *reinterpret_cast<uint4 *>(to + part * channels) = {words[0], words[1], words[2], words[3]};
  }
}

// to (pixels, parts, channels) = from (pixels, channels): a thread has eight channels, of vectors * 8.
__global__ void __launch_bounds__(kPackBlock)
    split_kernel(const float *from, __nv_bfloat16 *to, int64_t pixels, unsigned vectors) {
  launch_next();
  const int64_t i = int64_t{blockIdx.x} * kPackBlock + threadIdx.x, pixel = i / vectors;
  if (pixel < pixels) {
    const float4 *p = reinterpret_cast<const float4 *>(from) + 2 * i, v0 = p[0], v1 = p[1];
    float v[] = {v0.x, v0.y, v0.z, v0.w, v1.x, v1.y, v1.z, v1.w};
    const int64_t channels = int64_t{vectors} * kPartVector;
    store_parts(v, to + pixel * kParts * channels + i % vectors * kPartVector, channels);
  }
  wait_for_kernel_before();
}

// to (images, plane, parts, channels) = from (images, channels, plane). A block has kChannels channels of kPixels
// pixels.
template <int kChannels, int kPixels>
__global__ void __launch_bounds__(kPackBlock)
    split_planes_kernel(const float *from, __nv_bfloat16 *to, unsigned channels, unsigned plane) {
  static_assert(kChannels * kPixels == kPackBlock * kPartVector);
  __shared__ float tile[kChannels][kPixels + 1];
  launch_next();
  const unsigned across = (plane + kPixels - 1) / kPixels, down = (channels + kChannels - 1) / kChannels;
  const unsigned block = blockIdx.x, pixel0 = block % across * kPixels, channel0 = block / across % down * kChannels;
  const int64_t image = block / across / down;
#pragma unroll
  for (int k = 0; k < kPartVector; ++k) {
    const unsigned index = threadIdx.x + k * kPackBlock, c = index / kPixels, j = index % kPixels;
    if (channel0 + c < channels && pixel0 + j < plane)
      tile[c][j] = from[(image * channels + channel0 + c) * plane + pixel0 + j];
  }
  __syncthreads();
  const unsigned c = threadIdx.x % (kChannels / kPartVector) * kPartVector, j = threadIdx.x / (kChannels / kPartVector);
  if (channel0 + c < channels && pixel0 + j < plane) {
    float v[kPartVector];
#pragma unroll
    for (int e = 0; e < kPartVector; ++e) v[e] = tile[c + e][j];
    store_parts(v, to + (image * plane + pixel0 + j) * kParts * channels + channel0 + c, channels);
  }
  wait_for_kernel_before();
}

}  // namespace AOT_ISA
}  // namespace aot
