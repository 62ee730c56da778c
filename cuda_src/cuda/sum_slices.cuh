// The second kernel of a sum taken in slices: adds the partial sums, in their order, so that results are deterministic.
#pragma once
#include "launch.cuh"

namespace aot {
inline namespace AOT_ISA {

constexpr int kSumSlicesBlock = 128;

// sum[i] = partials[i] + partials[n + i] + ... for `slices` partial sums of n elements, added in Wide.
template <typename Wide, typename T>
__global__ void __launch_bounds__(kSumSlicesBlock)
    sum_slices_kernel(const Accumulate<T> *partials, int64_t slices, T *sum, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * kSumSlicesBlock + threadIdx.x;
  if (i >= n) return;
  Wide total = 0;
#pragma unroll 16  // loads in flight
  for (int64_t slice = 0; slice < slices; ++slice) total += partials[slice * n + i];
  sum[i] = narrow<T>(static_cast<Accumulate<T>>(total));
}

// Wide: double where slices are few, so that its cost does not matter; Accumulate<T> where they may be many.
template <typename Wide, typename T>
Status sum_slices(const char *op, const Accumulate<T> *partials, int64_t slices, T *sum, int64_t n,
                  cudaStream_t stream) {
  if (n == 0) return kOk;
  const unsigned blocks = grid_size(ceil_div(n, kSumSlicesBlock));
  sum_slices_kernel<Wide><<<blocks, kSumSlicesBlock, 0, stream>>>(partials, slices, sum, n);
  return check_launch(op);
}

}  // namespace AOT_ISA
}  // namespace aot
