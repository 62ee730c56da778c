// Tensors of (outer, n, inner) elements along n: a thread has a pack of neighbouring columns along inner, and
// blockDim.y threads share the axis. Each of these has groups of packs, blockDim.y apart. If one group is enough, a
// tensor is read once; else once for each pass, from a cache unless n is large.
#pragma once
#include "launch.cuh"
#include "pack.cuh"

namespace aot {
inline namespace AOT_ISA {

constexpr int kAxisThreads = 512;  // the most of a block

// Packs that a thread holds of each tensor: 32 words.
template <class Pack>
constexpr int kGroup = 32 / Pack::kWords;

template <class Pack_>
class AxisPart {
 public:
  using Pack = Pack_;
  using T = typename Pack::T;
  using A = Accumulate<T>;
  static constexpr int kGroup = aot::kGroup<Pack>;

  __device__ AxisPart(int64_t outer, int64_t n, int64_t inner) : n_(n), inner_(inner) {
    const int64_t packs = inner / Pack::kSize, column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    present_ = column < outer * packs;
    if (!present_) first_ = 0;
    else if (column >> 32 == 0 && packs >> 32 == 0) {
      const uint32_t o = static_cast<uint32_t>(column) / static_cast<uint32_t>(packs);
      first_ = o * n * inner + (column - o * packs) * Pack::kSize;
    } else first_ = column / packs * n * inner + column % packs * Pack::kSize;
  }
  // Whether this thread has but one group.
  __device__ bool once() const { return n_ <= kGroup * blockDim.y; }

  // Calls f(c, count) for each group of this thread, whose first of `count` packs is at c on the axis.
  template <class F>
  __device__ void each_group(F f) const {
    for (int64_t c = threadIdx.y; c < n_; c += kGroup * blockDim.y) {
      const int64_t left = n_ - c, most = kGroup * blockDim.y;
      f(c, left < most ? (static_cast<unsigned>(left) + blockDim.y - 1) / blockDim.y : kGroup);
    }
  }
  // Calls f(j) for the packs of a group, and for some past its end.
  template <class F>
  __device__ static void each_pack(int count, F f) {
    constexpr int kTogether = 4;
#pragma unroll
    for (int first = 0; first < kGroup; first += kTogether) {
      if (first >= count) break;
#pragma unroll
      for (int j = first; j < first + kTogether; ++j) f(j);
    }
  }
  __device__ void load(const T *x, int64_t c, int count, A fallback, Pack (&v)[kGroup]) const {
    const T *from = x + first_ + c * inner_;
    each_pack(count, [&](int j) {
      v[j] = Pack::filled(fallback);
      if (j < count) v[j] = Pack::load(from);
      from += blockDim.y * inner_;
    });
  }
  // Pack j is f(j).
  template <class F>
  __device__ void store(T *y, int64_t c, int count, F f) const {
    if (!present_) return;
    T *to = y + first_ + c * inner_;
    each_pack(count, [&](int j) {
      const Pack v = f(j);
      if (j < count) v.store(to);
      to += blockDim.y * inner_;
    });
  }

 private:
  int64_t n_, inner_, first_;
  bool present_;
};

// Publishes what each thread has of its columns to those that share the axis with it, and returns what thread r of them
// has of column k at [(r * kPack + k) * blockDim.x]. All threads of the block call it.
template <typename V, int kPack>
__device__ const V *share_axis(const V (&mine)[kPack]) {
  extern __shared__ uint4 memory[];
  V *all = reinterpret_cast<V *>(memory) + threadIdx.x;
#pragma unroll
  for (int k = 0; k < kPack; ++k) all[(threadIdx.y * kPack + k) * blockDim.x] = mine[k];
  __syncthreads();
  return all;
}

// -------------------------------------------------------------------------------------------------------------- launch

// Calls f(Pack(), shape) with the shape of the launch for tensors of (outer, n, inner) elements. Short axes are read in
// packs of 16 bytes, longer ones in packs of 8 or 4, by threads that publish a Shared for each column. kNarrow: threads
// along inner of a block in which 16 share an axis.
template <typename T, class Shared, unsigned kNarrow, class F, typename... Pointers>
Status launch_along_axis(int64_t outer, int64_t n, int64_t inner, const DeviceLimits &device, F f,
                         const Pointers *...pointers) {
  auto launch = [&](auto pack, unsigned width, unsigned sharing) {
    using Pack = decltype(pack);
    const int64_t packs = outer * (inner / Pack::kSize);
    const int shared = sharing == 1 ? 0 : width * sharing * Pack::kSize * sizeof(Shared);
    return f(pack, LaunchShape{grid_size(ceil_div(packs, width)), {width, sharing}, shared});
  };
  auto fits = [&](int64_t size) {
    return inner % size == 0 && ((reinterpret_cast<uintptr_t>(pointers) % (size * sizeof(T)) == 0) && ...);
  };
  if constexpr (sizeof(T) < 8) {
    using Wide = Pack<T, kVectorSize<T>>;
    if (n <= kGroup<Wide> && fits(Wide::kSize)) return launch(Wide(), 128, 1);
  }
  constexpr int kOfOne = kGroup<Pack<T, 1>>, kMost = 16;
  const bool long_axis = n > kMost * kOfOne;
  const unsigned sharing = n <= kOfOne ? 1 : n <= 4 * kOfOne ? 4 : long_axis ? 2 * kMost : kMost;
  const unsigned width = sharing == 1 ? 128 : sharing == 4 ? 32 : long_axis ? 16 : kNarrow;
  if constexpr (sizeof(T) < 8) {
    using Half = Pack<T, kVectorSize<T> / 2>;
    if (n > kOfOne && fits(Half::kSize)) {
      if (n <= 4 * kGroup<Half>) return launch(Half(), 32, 4);
      if (sizeof(T) == 4 && n <= 8 * kGroup<Half>) return launch(Half(), 16, 8);
      if (n > 8 * kGroup<Half> && n <= 16 * kGroup<Half>) return launch(Half(), kNarrow, 16);
    }
  }
  if constexpr (sizeof(T) == 2) {
    using Pair = Pack<T, 2>;
    const bool few = outer * inner < int64_t{2} * width * device.multiprocessors;
    if (fits(Pair::kSize) && !(long_axis && few)) return launch(Pair(), width, sharing);
  }
  return launch(Pack<T, 1>(), width, sharing);
}

}  // namespace AOT_ISA
}  // namespace aot
