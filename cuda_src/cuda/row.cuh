// Rows of a matrix, one after another: which threads hold which vectors of a row, and how a thread's part of the next
// rows travels while it works on this one.
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

template <typename T_, int kLanes_, int kVectors_, Span kSpan_>
struct RowShape {
  using T = T_;
  static constexpr int kLanes = kLanes_, kVectors = kVectors_, kSize = kVectorSize<T>;
  static constexpr Span kSpan = kSpan_;
  static constexpr int kShare = kLanes * kVectors;  // vectors of a row in a warp
  static constexpr int kRowsPerWarp = 32 / kLanes;
};

// ------------------------------------------------------------------------------------------------- a thread's part

// Of the rows of a matrix: `turns` of them one after another, or, with 0 turns, as many as there are for a grid of any
// size.
template <class Shape>
class RowPart {
 public:
  __device__ explicit RowPart(int64_t cols, int64_t rows, int turns = 0)
      : end_(rows), vectors_(static_cast<int>(cols / Shape::kSize)) {
    int warps = blockDim.x / 32;
    int64_t team, teams;       // those who share a turn: a block, or a cluster
    int at_once = 1, own = 0;  // rows in a team's turn, and the first of this warp's among them
    if constexpr (Shape::kSpan == Span::cluster) {
      team = blockIdx.x / cluster_size(), teams = gridDim.x / cluster_size();
      first_ = (cluster_rank() * warps + warp_index()) * Shape::kShare + lane_index();
    } else {
      team = blockIdx.x, teams = gridDim.x;
      first_ = warp_index() * Shape::kShare + lane_index();
    }
    if constexpr (Shape::kSpan == Span::warp) {
      at_once = warps * Shape::kRowsPerWarp, own = warp_index() * Shape::kRowsPerWarp;
      first_ = lane_index() % Shape::kLanes;
    }
    base_ = team * (turns ? turns : 1) * at_once + own;
    step_ = turns ? at_once : teams * at_once;
    if (turns) end_ = min(end_, (team + 1) * turns * at_once);
  }

  // A warp's turns are base, base + step, ... below end; a thread works on row turn + group, which may be past the
  // last.
  __device__ int64_t base() const { return base_; }
  __device__ int64_t step() const { return step_; }
  __device__ int64_t end() const { return end_; }
  __device__ int group() const { return Shape::kSpan == Span::warp ? lane_index() / Shape::kLanes : 0; }
  __device__ int64_t first() const { return base_ + group(); }

  // Whether the row reaches this thread's vector i; the column where vector 0 begins, and how much further i does.
  __device__ bool holds(int i) const { return i * Shape::kLanes < vectors_ - first_; }
  __device__ int column() const { return first_ * Shape::kSize; }
  __device__ static constexpr int offset(int i) { return i * Shape::kLanes * Shape::kSize; }
  __device__ bool leads() const { return first_ == 0; }  // one thread of a row

  // Elements of the row in the share of one of its warps.
  __device__ int share(int warp) const {
    int vectors = vectors_ - warp * Shape::kShare;
    return (vectors < 0 ? 0 : vectors < Shape::kShare ? vectors : Shape::kShare) * Shape::kSize;
  }

 private:
  int64_t base_, step_, end_;
  int first_, vectors_;
};

// What the warps of a row tell each other by; nothing where a row is within a warp.
template <class Shape, typename V>
using RowExchange = std::conditional_t<Shape::kSpan == Span::warp, NoExchange, Exchange<Shape::kSpan, V>>;

// ------------------------------------------------------------------------------------------------------------ inbox

// Sixteen bytes to shared memory, or zeros. The thread goes on meanwhile (from compute capability 8.0).
__device__ inline void copy_async(uint4 *shared, const void *global, bool present) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))),
      "l"(global), "r"(present ? 16 : 0)
      : "memory");
#else
  *shared = present ? *static_cast<const uint4 *>(global) : uint4{};
#endif
}
__device__ inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most kPending of this thread's committed groups are on their way.
template <int kPending>
__device__ inline void wait_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// A thread's own places in shared memory, for its part of kRows rows (of as many tensors) in each of kStages stages. No
// other thread reads or writes them, so that a thread waits for its own copies and for nobody else.
template <class Shape, int kRows, int kStages>
class Inbox {
  using T = typename Shape::T;

 public:
  static constexpr int kBytesPerWarp = 32 * Shape::kVectors * kRows * kStages * 16;

  __device__ Inbox() {
    extern __shared__ uint4 memory[];
    mine_ = memory + warp_index() * (kBytesPerWarp / 16) + lane_index();
  }
  // Sends for this thread's vectors of a row, the first of them at `from`; zeros come where the row has ended, or is
  // not `present` at all.
  __device__ void fetch(int stage, int which, const T *from, const RowPart<Shape> &part, bool present) {
#pragma unroll
    for (int i = 0; i < Shape::kVectors; ++i)
      copy_async(place(stage, which, i), from + part.offset(i), present && part.holds(i));
  }
  __device__ Vector<T> take(int stage, int which, int i) const {
    Vector<T> v;
    reinterpret_cast<uint4 &>(v) = *place(stage, which, i);
    return v;
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

// A kernel's limits: vectors that a thread takes, of a row within a block and of a longer one; warps of a block, before
// a row rather spans blocks, and where even a cluster would not hold it; bytes of shared memory for each vector.
struct RowLimits {
  int vectors, long_vectors, warps, most_warps, bytes;
};

// For rows of so many vectors.
inline RowPlan plan_rows(int64_t vectors, const RowLimits &most, const DeviceLimits &device) {
  constexpr int kForExchange = 9 << 10;  // 2 sets of 256 warps of two doubles, and their barriers
  RowPlan plan;
  for (int lanes : {8, 16, 32})
    for (int v = lanes == 8 ? 1 : most.vectors / 2 + 1; v <= most.vectors; ++v)
      if (vectors <= lanes * v) return plan.lanes = lanes, plan.vectors = v, plan;
  auto try_block = [&](int v, int warps, int cluster) {
    int64_t needed = ceil_div(vectors, int64_t{32} * v * cluster);
    if (needed > warps || needed * 32 * v * most.bytes > device.shared_memory - kForExchange) return false;
    return plan.lanes = 32, plan.vectors = v, plan.warps = static_cast<int>(needed), plan.cluster = cluster, true;
  };
  if (try_block(most.vectors, most.warps, 1)) return plan;
  for (int warps = most.warps; warps <= most.most_warps; warps *= 2)
    for (int cluster = 1; cluster <= (device.clusters ? kMaxCluster : 1); cluster *= 2)
      if (try_block(most.long_vectors, warps, cluster)) return plan;
  return plan;
}

// The grid of a kernel whose warps loop over rows: what the device holds at once, or less where that suffices.
struct RowGrid {
  unsigned blocks, threads;
  int shared;  // bytes for each block's inboxes
};

// `resident`: threads that a multiprocessor holds of this kernel; `warp_block`: threads of a block whose rows are
// within warps; `most`: blocks, or clusters, that the caller has a use for.
template <auto kernel, class Shape, class Inbox>
Status row_grid(const char *op, const RowPlan &plan, const DeviceLimits &device, int resident, int warp_block,
                int64_t rows, int64_t most, RowGrid *grid) {
  bool within_warp = Shape::kSpan == Span::warp;
  int warps = within_warp ? std::min(warp_block / 32, device.shared_memory / Inbox::kBytesPerWarp) : plan.warps;
  int shared = warps * Inbox::kBytesPerWarp;
  int64_t per_multiprocessor = std::min(resident / (32 * warps), device.shared_memory / shared);
  int64_t at_once = std::max<int64_t>(1, per_multiprocessor) * device.multiprocessors;
  if constexpr (Shape::kSpan == Span::cluster)
    AOT_TRY(clusters_at_once<kernel>(op, 32 * warps, plan.cluster, shared, &at_once));
  int64_t needed = within_warp ? ceil_div(rows, int64_t{warps} * Shape::kRowsPerWarp) : rows;
  *grid = {grid_size(std::min({needed, at_once, most}) * plan.cluster), 32u * warps, shared};
  return kOk;
}

template <typename T, int kLanes, int kFirst, int kLast, class F>
Status dispatch_vectors(int vectors, F f) {
  if constexpr (kFirst < kLast)
    if (vectors > kFirst) return dispatch_vectors<T, kLanes, kFirst + 1, kLast>(vectors, f);
  return f(RowShape<T, kLanes, kFirst, Span::warp>());
}

// Calls f(RowShape) with the plan's; kVectors and kLong are those of the limits.
template <typename T, int kVectors, int kLong, class F>
Status dispatch_rows(const RowPlan &plan, F f) {
  if (plan.cluster > 1) return f(RowShape<T, 32, kLong, Span::cluster>());
  if (plan.warps > 1) {
    if constexpr (kLong > kVectors)
      if (plan.vectors > kVectors) return f(RowShape<T, 32, kLong, Span::block>());
    return f(RowShape<T, 32, kVectors, Span::block>());
  }
  if (plan.lanes == 8) return dispatch_vectors<T, 8, 1, kVectors>(plan.vectors, f);
  if (plan.lanes == 16) return dispatch_vectors<T, 16, kVectors / 2 + 1, kVectors>(plan.vectors, f);
  return dispatch_vectors<T, 32, kVectors / 2 + 1, kVectors>(plan.vectors, f);
}

}  // namespace AOT_ISA
}  // namespace aot
