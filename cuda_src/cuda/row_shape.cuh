// How the vectors of a matrix row are distributed over threads.
//
// A warp's share of a row is contiguous: kLanes lanes by kVectors vectors. Lane l holds vectors l, l + kLanes, ... of
// it, so that each load of the warp is one range of memory at a constant offset from the first. With fewer than 32
// lanes to a row, a warp has several rows. A row longer than one share spans several warps, and then several blocks.
#pragma once
#include "reduce.cuh"
#include "vector.cuh"

namespace aot {
inline namespace AOT_ISA {

// kWhole: each warp of a row has a whole share.
template <typename T_, int kLanes_, int kVectors_, Span kSpan_, bool kWhole_ = false>
struct RowShape {
  using T = T_;
  static constexpr int kLanes = kLanes_, kVectors = kVectors_, kSize = kVectorSize<T>;
  static constexpr Span kSpan = kSpan_;
  static constexpr bool kWhole = kWhole_;
  static constexpr int kShare = kLanes * kVectors;  // vectors of a row in a warp
  static constexpr int kRowsPerWarp = 32 / kLanes;

  // Elements in the share of the row's warp `warp`, in a row of `vectors` vectors.
  __device__ static int share(int vectors, int warp) {
    if constexpr (kWhole) return kShare * kSize;
    vectors -= warp * kShare;
    return (vectors < 0 ? 0 : vectors < kShare ? vectors : kShare) * kSize;
  }
};

// The exchange between the warps of a row; none if the row is within a warp.
template <class Shape, typename V>
using RowExchange = std::conditional_t<Shape::kSpan == Span::warp, NoExchange, Exchange<Shape::kSpan, V>>;

}  // namespace AOT_ISA
}  // namespace aot
