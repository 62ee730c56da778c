// Rows of a matrix, each held in the registers of the threads that share it: read once, written once, by blocks that do
// one row, or a few short ones, and are gone. Many small blocks keep the memory busy, as one waits and another sums.
//
// A warp's share of a row is contiguous: kLanes lanes by kVectors vectors, lane l holding vectors l, l + kLanes, ... of
// it, so that each load of the warp is one run of memory, at an address that is a constant away from the first. With
// fewer than 32 lanes to a row a warp has several rows; with a row longer than a share, it spans warps and then blocks.
#pragma once
#include "launch.cuh"
#include "reduce.cuh"
#include "vector.cuh"

namespace aot {
inline namespace AOT_ISA {

constexpr int kTileVectors = 4;      // that a thread has of a row
constexpr int kTileWarps = 16;       // of a row in a block, before it rather spans blocks
constexpr int kTileWarpBlock = 128;  // threads of a block whose rows are within warps
// Of rows beyond what a cluster holds of those, as far as registers go.
constexpr int kLongVectors = 8;
template <typename T>
constexpr int kLongWarps = sizeof(T) == 2 ? 12 : 16;

// What the blocks of a cluster tell each other is at most sixteen bytes: too few for float64.
template <typename T>
constexpr bool kTileClusters = sizeof(T) < 8;

template <typename T_, int kLanes_, int kVectors_, Span kSpan_>
struct TileShape {
  using T = T_;
  static constexpr int kLanes = kLanes_, kVectors = kVectors_, kSize = kVectorSize<T>;
  static constexpr Span kSpan = kSpan_;
  static constexpr int kShare = kLanes * kVectors;  // vectors of a row in a warp
  static constexpr int kRowsPerWarp = 32 / kLanes;
  static constexpr int kMostThreads =
      kSpan == Span::warp ? kTileWarpBlock : 32 * (kVectors == kLongVectors ? kLongWarps<T> : kTileWarps);
};

// ------------------------------------------------------------------------------------------------- a thread's part

template <class Shape>
class Tile {
  using T = typename Shape::T;

 public:
  __device__ explicit Tile(int64_t cols) : cols_(cols) {
    int warps = blockDim.x / 32, vectors = static_cast<int>(cols / Shape::kSize);
    if constexpr (Shape::kSpan == Span::warp) {
      row_ = (int64_t{blockIdx.x} * warps + warp_index()) * Shape::kRowsPerWarp + lane_index() / Shape::kLanes;
      first_ = lane_index() % Shape::kLanes;
    } else if constexpr (Shape::kSpan == Span::block) {
      row_ = blockIdx.x;
      first_ = warp_index() * Shape::kShare + lane_index();
    } else {
      row_ = blockIdx.x / cluster_size();
      first_ = (cluster_rank() * warps + warp_index()) * Shape::kShare + lane_index();
    }
    left_ = vectors - first_;
  }

  __device__ int64_t row() const { return row_; }
  // Where rows are within warps, the last warp may have more than there are.
  __device__ bool present(int64_t rows) const { return Shape::kSpan != Span::warp || row_ < rows; }
  __device__ bool leads() const { return first_ == 0; }  // one thread of a row

  // Whether the row reaches this thread's vector i, and where that begins, as a column.
  __device__ bool holds(int i) const { return i * Shape::kLanes < left_; }
  __device__ int column(int i) const { return (first_ + i * Shape::kLanes) * Shape::kSize; }

  // Elements of the row in the share of one of its warps.
  __device__ int share(int warp) const {
    int vectors = static_cast<int>(cols_ / Shape::kSize) - warp * Shape::kShare;
    return (vectors < 0 ? 0 : vectors < Shape::kShare ? vectors : Shape::kShare) * Shape::kSize;
  }

  // This thread's vectors of its row of `x`; `otherwise` past the row's end, and in a row that is not `present`.
  __device__ void load(const T *x, bool present, float otherwise, Vector<T> (&v)[Shape::kVectors]) const {
    const T *from = x + row_ * cols_ + column(0);
#pragma unroll
    for (int i = 0; i < Shape::kVectors; ++i) {
      v[i] = filled<T>(otherwise);
      if (present && holds(i)) v[i] = load_once(from + i * Shape::kLanes * Shape::kSize);
    }
  }

  // y's row: element k of vector i becomes f(i, k).
  template <class F>
  __device__ void store(T *y, bool present, F f) const {
    T *to = y + row_ * cols_ + column(0);
#pragma unroll
    for (int i = 0; i < Shape::kVectors; ++i) {
      if (!present || !holds(i)) continue;
      Widened<T> a;
#pragma unroll
      for (int k = 0; k < Shape::kSize; ++k) a[k] = f(i, k);
      aot::store(to + i * Shape::kLanes * Shape::kSize, narrow(a));
    }
  }

 private:
  int64_t row_, cols_;
  int first_, left_;
};

// What the warps of a row tell each other by; nothing where a row is within a warp.
template <class Shape, typename V>
using TileExchange = std::conditional_t<Shape::kSpan == Span::warp, NoExchange, Exchange<Shape::kSpan, V>>;

// ------------------------------------------------------------------------------------------------------------- plan

// How rows of a size are spread. lanes = 0: they are not, a kernel for any size has to do.
struct TilePlan {
  int lanes = 0, vectors = 0;
  int warps = 1;    // of a row in one block
  int cluster = 1;  // blocks of a row
};

// For rows of `cols` elements of the tensors at these addresses.
template <typename T, typename... Pointers>
TilePlan plan_tiles(int64_t cols, const DeviceLimits &device, const Pointers *...pointers) {
  if (cols == 0 || cols % kVectorSize<T> != 0 || !aligned(pointers...)) return {};
  int64_t vectors = cols / kVectorSize<T>;
  for (int lanes : {8, 16, 32})
    for (int v = lanes == 8 ? 1 : kTileVectors / 2 + 1; v <= kTileVectors; ++v)
      if (vectors <= lanes * v) return {lanes, v};
  struct {
    int vectors, warps;
  } constexpr kSizes[] = {{kTileVectors, kTileWarps},
                          {kLongVectors, kTileWarps < kLongWarps<T> ? kTileWarps : kLongWarps<T>},
                          {kLongVectors, kLongWarps<T>}};
  for (auto size : kSizes)
    for (int cluster = 1; cluster <= (device.clusters && kTileClusters<T> ? kMaxCluster : 1); cluster *= 2) {
      int64_t needed = ceil_div(vectors, int64_t{32} * size.vectors * cluster);
      if (needed <= size.warps) return {32, size.vectors, static_cast<int>(needed), cluster};
    }
  return {};
}

template <typename T, int kLanes, int kVectors, class F>
Status dispatch_within_warps(const TilePlan &plan, F f) {
  if constexpr (kVectors > kTileVectors) {
    return dispatch_within_warps<T, 2 * kLanes, kTileVectors / 2 + 1>(plan, f);
  } else if constexpr (kLanes == 32 && kVectors == kTileVectors) {
    return f(TileShape<T, kLanes, kVectors, Span::warp>());
  } else {
    if (plan.lanes == kLanes && plan.vectors == kVectors) return f(TileShape<T, kLanes, kVectors, Span::warp>());
    return dispatch_within_warps<T, kLanes, kVectors + 1>(plan, f);
  }
}

// Calls f(TileShape) with the plan's.
template <typename T, class F>
Status dispatch_tiles(const TilePlan &plan, F f) {
  if constexpr (kTileClusters<T>)
    if (plan.cluster > 1) {
      if (plan.vectors == kTileVectors) return f(TileShape<T, 32, kTileVectors, Span::cluster>());
      return f(TileShape<T, 32, kLongVectors, Span::cluster>());
    }
  if (plan.warps > 1 && plan.vectors == kTileVectors) return f(TileShape<T, 32, kTileVectors, Span::block>());
  if (plan.warps > 1) return f(TileShape<T, 32, kLongVectors, Span::block>());
  return dispatch_within_warps<T, 8, 1>(plan, f);
}

// ---------------------------------------------------------------------------------------- rows of any size and address

// A block to a row, which it reads again for each pass: by vectors between the first and the last sixteen bytes that
// are aligned. f(c, x) for this thread's elements x of the row `from`, c the column.
template <typename T, class F>
__device__ inline void each_of_row(const T *from, int64_t cols, F f) {
  int64_t head = min(misaligned_elements(from, sizeof(T)), cols), vectors = (cols - head) / kVectorSize<T>;
  if (threadIdx.x < head) f(int64_t{threadIdx.x}, widen(from[threadIdx.x]));
  for (int64_t v = threadIdx.x; v < vectors; v += blockDim.x) {
    int64_t c = head + v * kVectorSize<T>;
    auto x = widen(load(from + c));
#pragma unroll
    for (int k = 0; k < kVectorSize<T>; ++k) f(c + k, x[k]);
  }
  int64_t c = head + vectors * kVectorSize<T> + threadIdx.x;
  if (c < cols) f(c, widen(from[c]));
}

// to[c] = f(c, x), for rows that lie alike by vectors.
template <typename T, class F>
__device__ inline void map_row(const T *from, T *to, int64_t cols, F f) {
  int64_t head = min(misaligned_elements(from, sizeof(T)), cols), vectors = (cols - head) / kVectorSize<T>;
  if (misaligned_elements(to, sizeof(T)) != misaligned_elements(from, sizeof(T))) head = 0, vectors = 0;
  auto map_element = [&](int64_t c) { to[c] = narrow<T>(f(c, widen(from[c]))); };
  if (threadIdx.x < head) map_element(threadIdx.x);
  for (int64_t v = threadIdx.x; v < vectors; v += blockDim.x) {
    int64_t c = head + v * kVectorSize<T>;
    auto x = widen(load(from + c));
#pragma unroll
    for (int k = 0; k < kVectorSize<T>; ++k) x[k] = f(c + k, x[k]);
    store(to + c, narrow(x));
  }
  for (int64_t c = head + vectors * kVectorSize<T> + threadIdx.x; c < cols; c += blockDim.x) map_element(c);
}

constexpr int kAnyRowThreads = 512;

// Threads of a block for a row of any size: whole warps, of which an Exchange has room for as many as there may be.
inline unsigned any_row_block(int64_t cols) {
  return static_cast<unsigned>(std::min<int64_t>(kAnyRowThreads, ceil_div(std::max<int64_t>(cols, 1), 32) * 32));
}

// -------------------------------------------------------------------------------------------------------- launch

// Launches a kernel on rows laid out by a plan.
template <class Shape, typename... Parameters, typename... Arguments>
Status launch_tiles(const char *op, const TilePlan &plan, int64_t rows, void (*kernel)(Parameters...), void *stream,
                    Arguments... arguments) {
  constexpr bool kWithinWarp = Shape::kSpan == Span::warp;
  constexpr int kRowsPerBlock = kTileWarpBlock / 32 * Shape::kRowsPerWarp;
  unsigned blocks = grid_size(kWithinWarp ? ceil_div(rows, kRowsPerBlock) : rows * plan.cluster);
  unsigned threads = kWithinWarp ? kTileWarpBlock : 32u * plan.warps;
  return launch_clusters(op, kernel, blocks, threads, plan.cluster, 0, stream, arguments...);
}

}  // namespace AOT_ISA
}  // namespace aot
