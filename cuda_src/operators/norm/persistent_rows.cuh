// Rows of a matrix, one after another: which of them a thread works on, and how its part of the next ones travels while
// it does.
#pragma once
#include "cuda/async.cuh"
#include "cuda/launch.cuh"
#include "cuda/row_shape.cuh"

namespace aot {
inline namespace AOT_ISA {

// Threads that a block has at most, and that a multiprocessor is to hold, which bounds their registers.
template <int kBlock_, int kResident_>
struct Threads {
  static constexpr int kBlock = kBlock_, kResident = kResident_;
};

// ------------------------------------------------------------------------------------------------- a thread's part

// Of the rows of a matrix, as many as there are for a grid of any size. `row_warps`: warps of a row in one block, which
// has as many rows at once as it has such teams of warps.
template <class Shape>
class RowPart {
 public:
  __device__ RowPart(int64_t cols, int row_warps)
      : vectors_(static_cast<int>(cols / Shape::kSize)), team_(warp_index() / row_warps) {
    int64_t group = blockIdx.x, groups = gridDim.x;  // those who share a turn: a block, or a cluster
    int warp = warp_index() - team_ * row_warps;     // of the row
    if constexpr (Shape::kSpan == Span::cluster) {
      group /= cluster_size(), groups /= cluster_size();
      warp += cluster_rank() * row_warps;
    }
    first_ = warp * Shape::kShare + lane_index() % Shape::kLanes;
    int at_once = blockDim.x / (32 * row_warps) * Shape::kRowsPerWarp;
    base_ = group * at_once;
    step_ = groups * at_once;
  }

  // A block's turns are base, base + step, ...; a thread works on row turn + own, which may be past the last.
  __device__ int64_t base() const { return base_; }
  __device__ int64_t step() const { return step_; }
  __device__ int team() const { return team_; }
  __device__ int group() const { return Shape::kSpan == Span::warp ? lane_index() / Shape::kLanes : 0; }  // of a warp
  __device__ int own() const { return team_ * Shape::kRowsPerWarp + group(); }
  __device__ int64_t first() const { return base_ + own(); }

  // Whether the row reaches this thread's vector i; the column where vector 0 begins, and how much further i does.
  __device__ bool holds(int i) const { return i * Shape::kLanes < vectors_ - first_; }
  __device__ int column() const { return first_ * Shape::kSize; }
  __device__ static constexpr int offset(int i) { return i * Shape::kLanes * Shape::kSize; }
  __device__ bool leads() const { return first_ == 0; }  // one thread of a row

  // Elements of the row in the share of one of its warps.
  __device__ int share(int warp) const { return Shape::share(vectors_, warp); }

 private:
  int64_t base_, step_;
  int first_, vectors_, team_;
};

// ------------------------------------------------------------------------------------------------------------ inbox

// A thread's own places in shared memory, for its part of kRows rows (of as many tensors) in each of kStages stages,
// and of kKept that stay, such as the weight. No other thread reads or writes them, so that a thread waits for its own
// copies and for nobody else.
template <class Shape, int kRows, int kStages, int kKept>
class Inbox {
  using T = typename Shape::T;

 public:
  static constexpr int kBytesPerWarp = 32 * Shape::kVectors * (kRows * kStages + kKept) * 16;

  __device__ Inbox() {
    extern __shared__ uint4 memory[];
    mine_ = memory + warp_index() * (kBytesPerWarp / 16) + lane_index();
  }
  // Sends for this thread's vectors of a row, the first of them at `from`; zeros come where the row has ended, or is
  // not `present` at all.
  __device__ void fetch(int stage, int which, const T *from, const RowPart<Shape> &part, bool present) {
#pragma unroll
    for (int i = 0; i < Shape::kVectors; ++i)
      copy_async(shared_address(place(stage, which, i)), from + part.offset(i), present && part.holds(i));
  }
  __device__ Vector<T> take(int stage, int which, int i) const {
    Vector<T> v;
    reinterpret_cast<uint4 &>(v) = *place(stage, which, i);
    return v;
  }
  // The same for what stays: it comes with the first row. Absent, `otherwise` stands for each of its elements.
  __device__ void fetch_kept(int which, const T *from, const RowPart<Shape> &part, bool present) {
    if (present) fetch(kStages, which, from, part, true);
  }
  __device__ Vector<T> kept(int which, int i, bool present, float otherwise) const {
    return present ? take(kStages, which, i) : filled<T>(otherwise);
  }

 private:
  __device__ uint4 *place(int stage, int which, int i) const {
    return mine_ + ((stage * kRows + which) * Shape::kVectors + i) * 32;
  }
  uint4 *mine_;
};

// ------------------------------------------------------------------------------------------------------------- plan

// How rows of a size are spread. lanes = 0: they are not, a kernel for any size has to do.
struct RowPlan {
  int lanes = 0, vectors = 0;
  int warps = 1;    // of a row in one block
  int cluster = 1;  // blocks of a row
};

// Rows of so many vectors within warps, of which a thread takes up to `most`.
inline RowPlan plan_within_warp(int64_t vectors, int most) {
  for (int lanes : {8, 16, 32})
    for (int v = lanes == 8 ? 1 : most / 2 + 1; v <= most; ++v)
      if (vectors <= lanes * v) return {lanes, v};
  return {};
}

// The first of the plans, with at most so many warps, that holds a row of so many vectors. `bytes`: of shared memory
// for each vector.
template <int n>
RowPlan first_that_holds(int64_t vectors, const RowPlan (&plans)[n], int bytes, const DeviceLimits &device) {
  constexpr int kForExchange = 17 << 10;  // 4 sets of 256 warps of two doubles, and their barriers
  for (RowPlan plan : plans) {
    int64_t needed = ceil_div(vectors, int64_t{32} * plan.vectors * plan.cluster);
    if (needed > plan.warps || needed * 32 * plan.vectors * bytes > device.shared_memory - kForExchange) continue;
    if (plan.cluster > 1 && !device.clusters) continue;
    plan.warps = static_cast<int>(needed);
    return plan;
  }
  return {};
}

// The grid of a kernel whose warps loop over rows: what the device holds at once, or less where that suffices.
struct RowGrid {
  unsigned blocks, threads;
  int shared;  // bytes for each block's inboxes
};

// `block_warps`: of a block that has several rows at once; `most`: blocks, or clusters, that the caller has a use for.
// No blocks at all: the device does not grant such clusters.
template <auto kernel, class Shape, class Inbox, class Threads>
Status row_grid(const char *op, const RowPlan &plan, const DeviceLimits &device, int64_t rows, int64_t most,
                RowGrid *grid) {
  constexpr int kForExchange = 2 << 10;  // of a block
  int room = device.shared_memory - kForExchange, teams = 1;
  if (Shape::kSpan != Span::cluster)
    teams = std::max(1, std::min(Threads::kBlock / 32, room / Inbox::kBytesPerWarp) / plan.warps);
  int warps = teams * plan.warps, shared = warps * Inbox::kBytesPerWarp;
  int64_t at_once;
  if constexpr (Shape::kSpan == Span::cluster) {
    AOT_TRY(clusters_at_once<kernel>(op, 32 * warps, plan.cluster, shared, &at_once));
  } else {
    int blocks = std::min(Threads::kResident / (32 * warps), device.shared_memory / (shared + kForExchange));
    at_once = int64_t{std::max(1, blocks)} * device.multiprocessors;
  }
  int64_t needed = ceil_div(rows, int64_t{teams} * Shape::kRowsPerWarp);
  *grid = {grid_size(std::min({needed, at_once, most}) * plan.cluster), 32u * warps, shared};
  return kOk;
}

template <typename T, int kLanes, int kFirst, int kLast, class F>
Status dispatch_vectors(int vectors, F f) {
  if constexpr (kFirst < kLast)
    if (vectors > kFirst) return dispatch_vectors<T, kLanes, kFirst + 1, kLast>(vectors, f);
  return f(RowShape<T, kLanes, kFirst, Span::warp>());
}

// Calls f(RowShape) with the shape of a plan within warps.
template <typename T, int kVectors, class F>
Status dispatch_within_warp(const RowPlan &plan, F f) {
  if (plan.lanes == 8) return dispatch_vectors<T, 8, 1, kVectors>(plan.vectors, f);
  if (plan.lanes == 16) return dispatch_vectors<T, 16, kVectors / 2 + 1, kVectors>(plan.vectors, f);
  return dispatch_vectors<T, 32, kVectors / 2 + 1, kVectors>(plan.vectors, f);
}

}  // namespace AOT_ISA
}  // namespace aot
