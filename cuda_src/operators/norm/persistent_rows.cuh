// Kernels whose persistent blocks loop over matrix rows: the rows and columns of a thread, the pipeline that copies the
// next rows to shared memory meanwhile, and the size of the grid.
#pragma once
#include <numeric>
#include <tuple>

#include "cuda/async.cuh"
#include "cuda/launch.cuh"
#include "cuda/row_shape.cuh"
#include "parameters.cuh"

namespace aot {
inline namespace AOT_ISA {

// The most threads of a block, and the threads that a multiprocessor shall hold at once, which limits their registers.
template <int kBlock_, int kResident_>
struct Threads {
  static constexpr int kBlock = kBlock_, kResident = kResident_;
};

// A tensor's position in a pipeline.
template <int index>
using Index = std::integral_constant<int, index>;

// Rows that begin anywhere. Their vectors begin at a row's first 16-byte boundary. Each element before and after them,
// less than a vector at either end, is one thread's own. All rows of a thread begin at the same distance from a
// boundary, so that it has the same columns of each.
template <class Shape>
struct Shifted : Shape {
  static_assert(!Shape::kWhole && Shape::kLanes >= 2 * Shape::kSize, "a thread has one element of the ends at most");
};
template <class Shape>
constexpr bool kShifted = false;
template <class Shape>
constexpr bool kShifted<Shifted<Shape>> = true;

// ------------------------------------------------------------------------------------------------- a thread's part

// A thread's part of the rows of a matrix, for a grid of any size. `row_warps`: warps of a row in one block. A block
// has as many rows at once as it has teams of row_warps warps.
template <class Shape>
class RowPart {
 public:
  // one_team: row_warps are all warps of the block, so that no divisions delay the first loads.
  __device__ RowPart(int64_t cols, int row_warps, bool one_team = false)
      : vectors_(static_cast<int>(cols / Shape::kSize)), team_(one_team ? 0 : warp_index() / row_warps) {
    int64_t group = blockIdx.x, groups = gridDim.x;  // a block, or the blocks of a cluster, has rows of its own
    int warp = warp_index() - team_ * row_warps;     // of the row
    if constexpr (Shape::kSpan == Span::cluster) {
      group /= cluster_size(), groups /= cluster_size();
      warp += cluster_rank() * row_warps;
    }
    first_ = warp * Shape::kShare + lane_index() % Shape::kLanes;
    int rows_at_once = (one_team ? 1 : blockDim.x / (32 * row_warps)) * Shape::kRowsPerWarp;
    base_ = group * rows_at_once;
    step_ = groups * rows_at_once;
    if constexpr (kShifted<Shape>) {
      const int all = static_cast<int>(cols);
      const uint32_t begin = static_cast<uint32_t>(first_row()) * static_cast<uint32_t>(all) % Shape::kSize;
      head_ = begin == 0 ? 0 : Shape::kSize - begin;
      vectors_ = (all - head_) / Shape::kSize;
      ends_ = all - vectors_ * Shape::kSize;
      if (first_ < head_) end_ = first_;
      else if (first_ >= Shape::kSize && first_ - Shape::kSize < ends_ - head_)
        end_ = head_ + (vectors_ - 1) * Shape::kSize + first_;
    }
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
  __device__ bool holds(int i) const { return Shape::kWhole || i * Shape::kLanes < vectors_ - first_; }
  __device__ int column() const { return first_ * Shape::kSize + (kShifted<Shape> ? head_ : 0); }
  __device__ static constexpr int offset(int i) { return i * Shape::kLanes * Shape::kSize; }
  __device__ bool leads() const { return first_ == 0; }  // true in one thread of a row

  // If Shifted: whether this thread has an element of the ends; its column.
  __device__ bool has_end() const { return kShifted<Shape> && end_ >= 0; }
  __device__ int end() const { return end_; }

  // Elements in the share of the row's warp `warp`.
  __device__ int share(int warp) const {
    return Shape::share(vectors_, warp) + (kShifted<Shape> && warp == 0 ? ends_ : 0);
  }

 private:
  int64_t base_, step_;
  int first_, vectors_, team_;
  int head_, ends_, end_ = -1;  // if Shifted: elements before the vectors, and before and after them
};

// --------------------------------------------------------------------------------------------------------- pipeline

// A multi-stage pipeline of rows in shared memory: each of kStages stages has a thread's part of one row of each
// tensor, whose dtypes are Tensors. After the stages is room for parameters, such as the weight: kParameterBytes for
// each vector, in planes of 16 bytes. A thread reads only what it has copied itself, so that it waits for its own
// copies and needs no barrier. kKept: by copy_kept, where a vector has 16 bytes.
template <class Shape, int kStages, int kParameterBytes, bool kKept, typename... Tensors>
class SmemPipeline {
  using R = typename Shape::T;
  template <int tensor>
  using Element = std::tuple_element_t<tensor, std::tuple<Tensors...>>;
  template <int tensor>
  using Held = VectorBeside<Element<tensor>, R>;
  static constexpr int kThread = 32 * Shape::kVectors;  // bytes of a plane for each byte of a vector

  static constexpr int kStageBytes = (static_cast<int>(sizeof(VectorBeside<Tensors, R>)) + ...);

 public:
  static constexpr int kBytesPerVector = kStages * kStageBytes + kParameterBytes;
  static constexpr int kBytesPerWarp = kThread * kBytesPerVector;

  __device__ SmemPipeline() {
    extern __shared__ uint4 memory[];
    mine_ = reinterpret_cast<char *>(memory) + warp_index() * kBytesPerWarp + lane_index() * 16;
    if constexpr (kKept) mine_ = hide_uniform(mine_);
  }
  // Starts the copies of this thread's vectors of a tensor's row, the first of them at `from`; zeros past the row's
  // end, and if the row is not `present`.
  template <int tensor>
  __device__ void load(Index<tensor>, int stage, const Element<tensor> *from, const RowPart<Shape> &part,
                       bool present) {
#pragma unroll
    for (int i = 0; i < Shape::kVectors; ++i)
      if constexpr (kKept && sizeof(Held<tensor>) == 16)
        copy_kept(shared_address(at<tensor>(stage, i)), from + part.offset(i), present && part.holds(i));
      else
        copy_async<sizeof(Held<tensor>)>(shared_address(at<tensor>(stage, i)), from + part.offset(i),
                                         present && part.holds(i));
  }
  template <int tensor>
  __device__ Held<tensor> read(Index<tensor>, int stage, int i) const {
    return *reinterpret_cast<const Held<tensor> *>(at<tensor>(stage, i));
  }
  // Plane `plane` of the parameters' vector i.
  __device__ uint4 &parameter(int plane, int i) const {
    return *reinterpret_cast<uint4 *>(mine_ + kThread * (kStages * kStageBytes + 16 * plane) + 32 * 16 * i);
  }

 private:
  template <int tensor>
  __device__ char *at(int stage, int i) const {
    constexpr int kBytes = sizeof(Held<tensor>);
    char *mine = kBytes == 16 ? mine_ : mine_ - lane_index() * (16 - kBytes);
    return mine + kThread * (stage * kStageBytes + before<tensor>()) + 32 * kBytes * i;
  }
  // Bytes of the tensors before this one.
  template <int tensor>
  __device__ static constexpr int before() {
    if constexpr (tensor == 0) return 0;
    else return before<tensor - 1>() + static_cast<int>(sizeof(Held<tensor - 1>));
  }
  char *mine_;
};

// ------------------------------------------------------------------------------------------------------------- plan

// How a row is distributed. lanes = 0: no plan holds it, and the kernel for any size is used.
struct RowPlan {
  int lanes = 0, vectors = 0;
  int warps = 1;    // of a row in one block
  int cluster = 1;  // blocks of a row
};

// The first of the plans, whose warps are upper limits, that holds a row of `vectors` vectors. `bytes`: of shared
// memory for each vector.
template <int n>
RowPlan first_that_holds(int64_t vectors, const RowPlan (&plans)[n], int bytes, const DeviceLimits &device) {
  constexpr int kForExchange = 17 << 10;  // 4 sets of slots for 256 warps of two doubles, and their barriers
  for (RowPlan plan : plans) {
    int64_t needed = ceil_div(vectors, int64_t{plan.lanes} * plan.vectors * plan.cluster);
    if (needed > plan.warps || needed * 32 * plan.vectors * bytes > device.shared_memory - kForExchange) continue;
    if (plan.cluster > 1 && !device.clusters) continue;
    plan.warps = static_cast<int>(needed);
    return plan;
  }
  return {};
}

// Rows that a block has at once belong to as many lines of the weight as its sums have: each row to a line of its own,
// unless the lines recur within the block.
__host__ __device__ inline int64_t lines_of_block(int64_t rows_at_once, int64_t lines) {
  return lines == 1 || rows_at_once % lines == 0 ? lines : rows_at_once;
}

// At most `teams` teams: as many as give each line of a block equally many rows, if more than half remain.
inline int teams_for_lines(int teams, int rows_per_warp, int64_t lines) {
  for (int fewer = teams; 2 * fewer > teams; --fewer) {
    const int64_t rows = int64_t{fewer} * rows_per_warp;
    if (rows % lines == 0 || lines % rows == 0) return fewer;
  }
  return teams;
}

// The grid of a kernel with persistent blocks: as many as the device holds at once, or as there are rows for; and a
// number that gives each thread rows of one line of the weight.
struct RowGrid {
  unsigned blocks, threads;
  int shared;    // bytes of a block's pipelines
  int64_t sums;  // lines of partial sums that its blocks, or clusters, have

  LaunchShape launch(const RowPlan &plan) const { return {blocks, threads, shared, dim3(plan.cluster)}; }
};

// `warp_bytes`: of a warp's pipeline. `max_sums`: the most lines of partial sums. The grid has 0 blocks if the device
// does not support clusters of this size or has too little shared memory for a block, or if max_sums are too few.
template <auto kernel, class Shape, class Threads>
Status row_grid(const char *op, const RowPlan &plan, const DeviceLimits &device, int64_t rows, int64_t lines,
                int64_t max_sums, int warp_bytes, RowGrid *grid) {
  constexpr int kForExchange = 2 << 10;  // if a row is within a block
  int room = device.shared_memory - kForExchange, teams = 1;
  if (Shape::kSpan != Span::cluster) {
    teams = std::max(1, std::min(Threads::kBlock / 32, room / warp_bytes) / plan.warps);
    teams = teams_for_lines(teams, Shape::kRowsPerWarp, lines);
  }
  int warps = teams * plan.warps, shared = warps * warp_bytes;
  int64_t at_once;
  if constexpr (Shape::kSpan == Span::cluster) {
    AOT_TRY(clusters_at_once<kernel>(op, 32 * warps, plan.cluster, shared, &at_once));
  } else {
    int blocks = std::min(Threads::kResident / (32 * warps), device.shared_memory / (shared + kForExchange));
    at_once = int64_t{blocks} * device.multiprocessors;
  }
  int64_t rows_at_once = int64_t{teams} * Shape::kRowsPerWarp, block_lines = lines_of_block(rows_at_once, lines);
  int64_t groups = std::min({ceil_div(rows, rows_at_once), at_once, max_sums / block_lines});
  int64_t unit = lines / std::gcd(lines, rows_at_once);  // so that a block's next rows have the lines of its first ones
  if (kShifted<Shape> && groups * rows_at_once < rows)
    unit = Shape::kSize / std::gcd(int64_t{Shape::kSize}, rows_at_once);
  groups = at_once == 0 ? 0 : groups >= unit ? groups / unit * unit : unit * block_lines <= max_sums ? unit : 0;
  *grid = {grid_size(groups * plan.cluster), 32u * warps, shared, groups * block_lines};
  return kOk;
}

// Returns f(shape) with the one of the shapes that has the plan's lanes and vectors.
template <class Shape, class... More, class F>
Status dispatch_shape(const RowPlan &plan, F f) {
  if constexpr (sizeof...(More) > 0)
    if (plan.lanes != Shape::kLanes || plan.vectors != Shape::kVectors) return dispatch_shape<More...>(plan, f);
  return f(Shape());
}

}  // namespace AOT_ISA
}  // namespace aot
