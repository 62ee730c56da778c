// Kernels whose persistent blocks loop over matrix rows: the rows and columns of a thread, the pipeline that copies the
// next rows to shared memory meanwhile, and the size of the grid.
#pragma once
#include "cuda/async.cuh"
#include "cuda/launch.cuh"
#include "cuda/row_shape.cuh"

namespace aot {
inline namespace AOT_ISA {

// The most threads of a block, and the threads that a multiprocessor shall hold at once, which limits their registers.
template <int kBlock_, int kResident_>
struct Threads {
  static constexpr int kBlock = kBlock_, kResident = kResident_;
};

// ------------------------------------------------------------------------------------------------- a thread's part

// A thread's part of the rows of a matrix, for a grid of any size. `row_warps`: warps of a row in one block. A block
// has as many rows at once as it has teams of row_warps warps.
template <class Shape>
class RowPart {
 public:
  __device__ RowPart(int64_t cols, int row_warps)
      : vectors_(static_cast<int>(cols / Shape::kSize)), team_(warp_index() / row_warps) {
    int64_t group = blockIdx.x, groups = gridDim.x;  // a block, or the blocks of a cluster, has rows of its own
    int warp = warp_index() - team_ * row_warps;     // of the row
    if constexpr (Shape::kSpan == Span::cluster) {
      group /= cluster_size(), groups /= cluster_size();
      warp += cluster_rank() * row_warps;
    }
    first_ = warp * Shape::kShare + lane_index() % Shape::kLanes;
    int rows_at_once = blockDim.x / (32 * row_warps) * Shape::kRowsPerWarp;
    base_ = group * rows_at_once;
    step_ = groups * rows_at_once;
  }

  // The rows of a block's iterations begin at base, base + step, ... This thread's row is `own` rows further, and may
  // be past the last one.
  __device__ int64_t base() const { return base_; }
  __device__ int64_t step() const { return step_; }
  __device__ int team() const { return team_; }
  __device__ int row_of_warp() const { return Shape::kSpan == Span::warp ? lane_index() / Shape::kLanes : 0; }
  __device__ int own() const { return team_ * Shape::kRowsPerWarp + row_of_warp(); }
  __device__ int64_t first_row() const { return base_ + own(); }

  // Whether this thread's vector i is within the row; the first column of vector 0; the offset of vector i from there.
  __device__ bool holds(int i) const { return i * Shape::kLanes < vectors_ - first_; }
  __device__ int column() const { return first_ * Shape::kSize; }
  __device__ static constexpr int offset(int i) { return i * Shape::kLanes * Shape::kSize; }
  __device__ bool leads() const { return first_ == 0; }  // true in one thread of a row

  // Elements in the share of the row's warp `warp`.
  __device__ int share(int warp) const { return Shape::share(vectors_, warp); }

 private:
  int64_t base_, step_;
  int first_, vectors_, team_;
};

// --------------------------------------------------------------------------------------------------------- pipeline

// A multi-stage pipeline of rows in shared memory: each of kStages stages has a thread's part of one row of kTensors
// tensors. kParameters more rows, such as the weight, are loaded once. A thread reads only what it has copied itself,
// so that it waits for its own copies and needs no barrier.
template <class Shape, int kTensors, int kStages, int kParameters>
class SmemPipeline {
  using T = typename Shape::T;

 public:
  static constexpr int kBytesPerWarp = 32 * Shape::kVectors * (kTensors * kStages + kParameters) * 16;

  __device__ SmemPipeline() {
    extern __shared__ uint4 memory[];
    mine_ = memory + warp_index() * (kBytesPerWarp / 16) + lane_index();
  }
  // Starts the copies of this thread's vectors of a tensor's row, the first of them at `from`; zeros past the row's
  // end, and if the row is not `present`.
  __device__ void load(int stage, int tensor, const T *from, const RowPart<Shape> &part, bool present) {
#pragma unroll
    for (int i = 0; i < Shape::kVectors; ++i)
      copy_async(shared_address(slot(stage, tensor, i)), from + part.offset(i), present && part.holds(i));
  }
  __device__ Vector<T> read(int stage, int tensor, int i) const {
    Vector<T> v;
    reinterpret_cast<uint4 &>(v) = *slot(stage, tensor, i);
    return v;
  }
  // The same for a parameter, whose copies are part of the first stage's group. An absent one consists of `fallback`.
  __device__ void load_parameter(int which, const T *from, const RowPart<Shape> &part, bool present) {
    if (present) load(kStages, which, from, part, true);
  }
  __device__ Vector<T> parameter(int which, int i, bool present, float fallback) const {
    return present ? read(kStages, which, i) : filled<T>(fallback);
  }

 private:
  __device__ uint4 *slot(int stage, int tensor, int i) const {
    return mine_ + ((stage * kTensors + tensor) * Shape::kVectors + i) * 32;
  }
  uint4 *mine_;
};

// ------------------------------------------------------------------------------------------------------------- plan

// How a row is distributed. lanes = 0: no plan holds it, and the kernel for any size is used.
struct RowPlan {
  int lanes = 0, vectors = 0;
  int warps = 1;    // of a row in one block
  int cluster = 1;  // blocks of a row
};

// The plan for rows of `vectors` vectors within warps, with up to max_vectors vectors for each thread.
inline RowPlan plan_within_warp(int64_t vectors, int max_vectors) {
  for (int lanes : {8, 16, 32})
    for (int v = lanes == 8 ? 1 : max_vectors / 2 + 1; v <= max_vectors; ++v)
      if (vectors <= lanes * v) return {lanes, v};
  return {};
}

// The first of the plans, whose warps are upper limits, that holds a row of `vectors` vectors. `bytes`: of shared
// memory for each vector.
template <int n>
RowPlan first_that_holds(int64_t vectors, const RowPlan (&plans)[n], int bytes, const DeviceLimits &device) {
  constexpr int kForExchange = 17 << 10;  // 4 sets of slots for 256 warps of two doubles, and their barriers
  for (RowPlan plan : plans) {
    int64_t needed = ceil_div(vectors, int64_t{32} * plan.vectors * plan.cluster);
    if (needed > plan.warps || needed * 32 * plan.vectors * bytes > device.shared_memory - kForExchange) continue;
    if (plan.cluster > 1 && !device.clusters) continue;
    plan.warps = static_cast<int>(needed);
    return plan;
  }
  return {};
}

// The grid of a kernel with persistent blocks: as many as the device holds at once, or as there are rows for.
struct RowGrid {
  unsigned blocks, threads;
  int shared;  // bytes of a block's pipelines
};

// `max_groups`: the most blocks, or clusters, that the caller allows. The grid has 0 blocks if the device does not
// support clusters of this size.
template <auto kernel, class Shape, class Pipeline, class Threads>
Status row_grid(const char *op, const RowPlan &plan, const DeviceLimits &device, int64_t rows, int64_t max_groups,
                RowGrid *grid) {
  constexpr int kForExchange = 2 << 10;  // if a row is within a block
  int room = device.shared_memory - kForExchange, teams = 1;
  if (Shape::kSpan != Span::cluster)
    teams = std::max(1, std::min(Threads::kBlock / 32, room / Pipeline::kBytesPerWarp) / plan.warps);
  int warps = teams * plan.warps, shared = warps * Pipeline::kBytesPerWarp;
  int64_t at_once;
  if constexpr (Shape::kSpan == Span::cluster) {
    AOT_TRY(clusters_at_once<kernel>(op, 32 * warps, plan.cluster, shared, &at_once));
  } else {
    int blocks = std::min(Threads::kResident / (32 * warps), device.shared_memory / (shared + kForExchange));
    at_once = int64_t{std::max(1, blocks)} * device.multiprocessors;
  }
  int64_t needed = ceil_div(rows, int64_t{teams} * Shape::kRowsPerWarp);
  *grid = {grid_size(std::min({needed, at_once, max_groups}) * plan.cluster), 32u * warps, shared};
  return kOk;
}

template <typename T, int kLanes, int kFirst, int kLast, class F>
Status dispatch_vectors(int vectors, F f) {
  if constexpr (kFirst < kLast)
    if (vectors > kFirst) return dispatch_vectors<T, kLanes, kFirst + 1, kLast>(vectors, f);
  return f(RowShape<T, kLanes, kFirst, Span::warp>());
}

// Returns f(RowShape) with the shape of a plan within warps.
template <typename T, int kVectors, class F>
Status dispatch_within_warp(const RowPlan &plan, F f) {
  if (plan.lanes == 8) return dispatch_vectors<T, 8, 1, kVectors>(plan.vectors, f);
  if (plan.lanes == 16) return dispatch_vectors<T, 16, kVectors / 2 + 1, kVectors>(plan.vectors, f);
  return dispatch_vectors<T, 32, kVectors / 2 + 1, kVectors>(plan.vectors, f);
}

}  // namespace AOT_ISA
}  // namespace aot
