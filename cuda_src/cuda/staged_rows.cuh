// Short rows of any size. They begin within 16-byte vectors, and a thread has few of their elements, so that its loads
// would be small. A block copies several rows to shared memory in whole vectors, works on them there, and copies the
// results back likewise.
#pragma once
#include <algorithm>

#include "async.cuh"
#include "launch.cuh"
#include "vector.cuh"

namespace aot {
inline namespace AOT_ISA {

constexpr int kStagedThreads = 128;

// kLanes: lanes of a warp that share a row. kEach: the most elements of a lane.
template <typename T_, int kLanes_, int kEach_>
struct StagedRow {
  using T = T_;
  static constexpr int kLanes = kLanes_, kEach = kEach_, kCols = kLanes * kEach;
  static constexpr int kAtOnce = kStagedThreads / kLanes;  // rows
  // The rows of a block are a multiple of kUnit, so that those of the next one begin with a vector, too.
  static constexpr int kUnit = std::max(kAtOnce, kVectorSize<T>);
};

// Shapes in the order in which they are tried.
template <class... Rows>
struct StagedRowShapes {};

// ----------------------------------------------------------------------------------------------------- a block's rows

template <class Row>
class StagedRows {
 public:
  using T = typename Row::T;

  // memory: shared, for `share` rows of `cols` elements. rows: of the whole matrix, of which these are share number
  // `index`.
  __device__ StagedRows(T *memory, int64_t rows, int cols, int share, int64_t index = blockIdx.x)
      : memory_(memory),
        first_(index * share),
        rows_(static_cast<int>(min(rows - first_, int64_t{share}))),
        cols_(cols) {}

  __device__ int64_t first() const { return first_; }
  __device__ int rows() const { return rows_; }

  // Starts copies of the block's rows of `matrix`; a thread sees those of others after arrive().
  __device__ void load(const T *matrix) const {
    const T *from = matrix + first_ * cols_;
    const int whole = whole_vectors(from);
    for (int i = threadIdx.x; i < whole; i += kStagedThreads)
      copy_async(shared_address(memory_ + i * kVectorSize<T>), from + i * kVectorSize<T>, true);
    for (int i = whole * kVectorSize<T> + threadIdx.x; i < rows_ * cols_; i += kStagedThreads) memory_[i] = from[i];
  }
  __device__ static void arrive() {
    commit_copies();
    wait_copies<0>();
    __syncthreads();
  }
  // Copies the rows to `matrix`, after all threads have called this.
  __device__ void store(T *matrix) const {
    __syncthreads();
    T *to = matrix + first_ * cols_;
    const int whole = whole_vectors(to);
    for (int i = threadIdx.x; i < whole; i += kStagedThreads)
      aot::store(to + i * kVectorSize<T>, aot::load(memory_ + i * kVectorSize<T>));
    for (int i = whole * kVectorSize<T> + threadIdx.x; i < rows_ * cols_; i += kStagedThreads) to[i] = memory_[i];
  }

  // Calls f(i, present) for each row i of this thread's lanes. The lanes of a warp make as many calls, with absent rows
  // after the last.
  template <class F>
  __device__ void each(F f) const {
    const int mine = threadIdx.x / Row::kLanes;
    for (int first = 0; first < rows_; first += Row::kAtOnce) f(first + mine, first + mine < rows_);
  }
  // Calls f(k, c) for this thread's columns c of a row, and for some past its end.
  template <class F>
  __device__ void each_column(F f) const {
#pragma unroll
    for (int k = 0; k < Row::kEach; ++k) f(k, threadIdx.x % Row::kLanes + k * Row::kLanes);
  }

 private:
  __device__ int whole_vectors(const T *from) const {
    return misaligned_elements(from, sizeof(T)) == 0 ? rows_ * cols_ / kVectorSize<T> : 0;
  }

  T *memory_;
  int64_t first_;
  int rows_, cols_;
};

// Element c of a row, or `absent`.
template <typename T>
__device__ inline Accumulate<T> element(const T *row, int c, bool present, Accumulate<T> absent = 0) {
  return present ? widen(row[c]) : absent;
}

// -------------------------------------------------------------------------------------------------------------- launch

// Whether one of the shapes holds rows of `cols` elements.
template <class... Rows>
bool holds_row(StagedRowShapes<Rows...>, int64_t cols) {
  return cols > 0 && ((cols <= Rows::kCols) || ...);
}

// Returns f(row) with the first shape that does.
template <class Row, class... More, class F>
Status dispatch_staged_rows(StagedRowShapes<Row, More...>, int64_t cols, F f) {
  if constexpr (sizeof...(More) > 0)
    if (cols > Row::kCols) return dispatch_staged_rows(StagedRowShapes<More...>(), cols, f);
  return f(Row());
}

// Rows of a block, of about `bytes` in `matrices` matrices.
template <class Row>
int staged_share(int64_t cols, int matrices, int bytes) {
  const int row_bytes = static_cast<int>(cols * sizeof(typename Row::T)) * matrices;
  return std::max(bytes / row_bytes / Row::kUnit, 1) * Row::kUnit;
}

// Launches kernel(arguments..., rows, cols, share), whose blocks stage `share` rows of each of `matrices` matrices.
template <class Row, typename... Parameters, typename... Arguments>
Status launch_staged_rows(const char *op, void (*kernel)(Parameters...), Row, int matrices, int64_t rows, int64_t cols,
                          void *stream, const Arguments &...arguments) {
  constexpr int kBytes = 8 << 10;  // many blocks, some of which load while others compute
  const int share = staged_share<Row>(cols, matrices, kBytes);
  const int bytes = static_cast<int>(share * matrices * cols * sizeof(typename Row::T));
  const LaunchShape shape = {grid_size(ceil_div(rows, share)), kStagedThreads, bytes};
  return launch_kernel(op, kernel, shape, stream, arguments..., rows, static_cast<int>(cols), share);
}

}  // namespace AOT_ISA
}  // namespace aot
