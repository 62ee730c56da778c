// Matrix rows held in registers: each is read once and written once by a one-shot block, which has one row or several
// short ones. Many small blocks keep the memory busy, because some load while others compute.
#pragma once
#include "keep.cuh"
#include "launch.cuh"
#include "row_shape.cuh"

namespace aot {
inline namespace AOT_ISA {

constexpr int kWarpRowBlock = 128;  // threads of a block, if a row is within a warp

// kThreads: the most threads of a block. kResident: threads that a multiprocessor shall hold at once, which limits
// their registers. kCluster: the most blocks of a row.
template <typename T, int kLanes, int kVectors, Span kSpan, int kThreads_, int kResident, int kCluster_ = 1>
struct RegisterRowShape : RowShape<T, kLanes, kVectors, kSpan> {
  static constexpr int kThreads = kThreads_, kBlocks = kResident / kThreads > 0 ? kResident / kThreads : 1;
  static constexpr int kCluster = kCluster_;
};

template <typename T, int kLanes, int kVectors, int kResident = 1024>
using WarpRow = RegisterRowShape<T, kLanes, kVectors, Span::warp, kWarpRowBlock, kResident>;
template <typename T, int kVectors, int kThreads = 512, int kResident = 1024>
using BlockRow = RegisterRowShape<T, 32, kVectors, Span::block, kThreads, kResident>;
template <typename T, int kVectors, int kThreads = 512, int kResident = 1024, int kCluster = kMaxCluster>
using ClusterRow = RegisterRowShape<T, 32, kVectors, Span::cluster, kThreads, kResident, kCluster>;

// ------------------------------------------------------------------------------------------------- a thread's part

template <class Shape_>
class RegisterRow {
 public:
  using Shape = Shape_;
  using T = typename Shape::T;
  static constexpr bool kEnds = false;

  __device__ explicit RegisterRow(int64_t cols) : cols_(cols) {
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
  // If rows are within warps, the last warp may go past the last row.
  __device__ bool present(int64_t rows) const { return Shape::kSpan != Span::warp || row_ < rows; }

  // Whether this thread's vector i is within the row; its first column.
  __device__ bool holds(int i) const { return i * Shape::kLanes < left_; }
  __device__ int column(int i) const { return (first_ + i * Shape::kLanes) * Shape::kSize; }

  // Whether column c of the row is in one of this thread's vectors.
  __device__ bool has(int64_t c) const {
    int i = static_cast<int>(c) - column(0);
    return i >= 0 && i / Shape::kSize % Shape::kLanes == 0 && i / (Shape::kSize * Shape::kLanes) < Shape::kVectors;
  }

  // Zero, which the compiler cannot know, for keep_packed().
  __device__ uint32_t opaque_zero() const { return static_cast<uint32_t>(cols_ >> 62); }

  // Elements in the share of the row's warp `warp`.
  __device__ int share(int warp) const { return Shape::share(static_cast<int>(cols_ / Shape::kSize), warp); }

  // Loads this thread's vectors of its row of `x`; `fallback` past the row's end, and if the row is not `present`.
  // kKept: by load_kept.
  template <bool kKept = false>
  __device__ void load(const T *x, bool present, float fallback, Vector<T> (&v)[Shape::kVectors]) const {
    const T *from = x + row_ * cols_ + column(0);
#pragma unroll
    for (int i = 0; i < Shape::kVectors; ++i) {
      v[i] = filled<T>(fallback);
      if (!present || !holds(i)) continue;
      const T *p = from + i * Shape::kLanes * Shape::kSize;
      v[i] = kKept ? load_kept(p) : load_once(p);
    }
  }

  // Stores the row of y; element k of vector i is f(i, k).
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

 protected:
  int64_t row_, cols_;
  int first_, left_;  // this thread's first vector; vectors from there to the row's end
};

// A row that begins anywhere. Vectors begin at the row's first 16-byte boundary, and columns count from
// there. Each element before and after the vectors, less than a vector at either end, is one thread's own.
template <class Shape_>
class UnalignedRow : public RegisterRow<Shape_> {
  using Base = RegisterRow<Shape_>;

 public:
  using Shape = Shape_;
  using T = typename Shape::T;
  using A = Accumulate<T>;
  static constexpr bool kEnds = true;
  static_assert(Shape::kLanes >= 2 * Shape::kSize, "a thread has one element of the ends at most");

  // x: the matrix, and any other whose rows reach 16-byte boundaries at the same elements
  __device__ UnalignedRow(const T *x, int64_t cols) : Base(cols) {
    int64_t head = misaligned_elements(x + this->row_ * cols, sizeof(T));
    head_ = static_cast<int>(head < cols ? head : cols);
    vectors_ = static_cast<int>((cols - head_) / Shape::kSize);
    this->left_ = vectors_ - this->first_;
    int tail = static_cast<int>(cols - head_) - vectors_ * Shape::kSize, i = this->first_ - Shape::kSize;
    if (this->first_ < head_) end_ = this->first_;
    else if (i >= 0 && i < tail) end_ = static_cast<int>(cols) - tail + i;
  }

  __device__ bool has(int64_t c) const {
    return c == end_ || (c >= head_ && c < head_ + vectors_ * Shape::kSize && Base::has(c - head_));
  }
  __device__ int share(int warp) const {
    int ends = static_cast<int>(this->cols_) - vectors_ * Shape::kSize;
    return Shape::share(vectors_, warp) + (warp == 0 ? ends : 0);
  }

  // Whether this thread has an element of the ends; and its value, after load().
  __device__ bool has_end() const { return end_ >= 0; }
  __device__ A end() const { return value_; }

  template <bool kKept = false>
  __device__ void load(const T *x, bool present, float fallback, Vector<T> (&v)[Shape::kVectors]) {
    Base::template load<kKept>(x + head_, present, fallback, v);
    value_ = fallback;
    if (present && has_end()) value_ = widen(x[this->row_ * this->cols_ + end_]);
  }
  template <class F>
  __device__ void store(T *y, bool present, F f) const {
    Base::store(y + head_, present, f);
  }
  __device__ void store_end(T *y, bool present, A value) const {
    if (present && has_end()) y[this->row_ * this->cols_ + end_] = narrow<T>(value);
  }

 private:
  int head_, vectors_, end_ = -1;
  A value_;
};

// The kinds of rows as types.
struct Aligned {
  template <class Shape>
  using Row = RegisterRow<Shape>;
};
struct Unaligned {
  template <class Shape>
  using Row = UnalignedRow<Shape>;
};

// Constructs either.
template <class Row, typename T = typename Row::T>
__device__ Row row_of(const T *x, int64_t cols) {
  if constexpr (Row::kEnds) return Row(x, cols);
  else return Row(cols);
}

// Keeps the compiler from holding the widened values of a vector of 16-bit elements: it widens them again, and
// meanwhile they take half as many registers. `zero` is opaque_zero().
template <typename T>
__device__ inline void keep_packed(Vector<T> &v, uint32_t zero) {
  static_assert(sizeof(T) == 2, "only 16-bit elements are widened");
#pragma unroll
  for (uint32_t &word : v.word) word ^= zero;
}

// ------------------------------------------------------------------------------------------------------------- plan

struct RegisterRowPlan {
  int warps = 0;         // of a row in one block; 0: the row is too long for the shape
  int cluster = 1;       // blocks of a row
  bool overlap = false;  // as LaunchShape's
};

template <class Shape>
RegisterRowPlan plan_register_rows(int64_t vectors, const DeviceLimits &device) {
  constexpr int kWarps = Shape::kThreads / 32;
  if constexpr (Shape::kSpan == Span::warp) return {vectors <= Shape::kShare ? kWarps : 0, 1};
  bool clusters = Shape::kSpan == Span::cluster;
  for (int cluster = clusters ? 2 : 1; cluster <= (!clusters || device.clusters ? Shape::kCluster : 0); cluster *= 2) {
    int64_t warps = ceil_div(vectors, int64_t{Shape::kShare} * cluster);
    if (warps <= kWarps) return {static_cast<int>(warps), cluster};
  }
  return {};
}

// Shapes in the order in which they are tried.
template <class... Shapes>
struct RegisterRowShapes {};

template <class... First, class... Then>
constexpr RegisterRowShapes<First..., Then...> operator+(RegisterRowShapes<First...>, RegisterRowShapes<Then...>) {
  return {};
}

// Returns f(shape, plan) with the first shape that holds rows of `vectors` vectors, or fallback() if there is none.
template <class Shape, class... More, class F, class Fallback>
Status dispatch_register_rows(RegisterRowShapes<Shape, More...>, int64_t vectors, const DeviceLimits &device, F f,
                              Fallback fallback) {
  RegisterRowPlan plan = plan_register_rows<Shape>(vectors, device);
  if (plan.warps > 0) return f(Shape(), plan);
  if constexpr (sizeof...(More) > 0)
    return dispatch_register_rows(RegisterRowShapes<More...>(), vectors, device, f, fallback);
  else return fallback();
}

// Vectors in a row of `cols` elements; more than any shape holds if the rows at these addresses are not all aligned.
template <typename T, typename... Pointers>
int64_t row_vectors(int64_t cols, const Pointers *...pointers) {
  return cols > 0 && cols % kVectorSize<T> == 0 && aligned(pointers...) ? cols / kVectorSize<T> : int64_t{1} << 40;
}

// Vectors in a row of an UnalignedRow; more than any shape holds if these rows do not reach boundaries at the same
// elements.
template <typename T, typename... Pointers>
int64_t unaligned_row_vectors(int64_t cols, const T *x, const Pointers *...others) {
  bool same = (((reinterpret_cast<uintptr_t>(x) - reinterpret_cast<uintptr_t>(others)) % 16 == 0) && ...);
  return same ? std::max<int64_t>(cols / kVectorSize<T>, 1) : int64_t{1} << 40;
}

// ---------------------------------------------------------------------------------------- rows of any size and address

// A block for each row, which it reads again for each pass. Accesses are vectorized between the first and the last
// 16-byte boundary. Calls f(c, x) for this thread's elements x of the row `from`, with the column c.
template <typename T, class F>
__device__ inline void for_each_in_row(const T *from, int64_t cols, F f) {
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

// to[c] = f(c, x), vectorized if both rows reach a 16-byte boundary at the same element.
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

// -------------------------------------------------------------------------------------------------------- launch

// Launches a kernel for `rows` rows as planned.
template <class Shape, typename... Parameters, typename... Arguments>
Status launch_register_rows(const char *op, const RegisterRowPlan &plan, int64_t rows, void (*kernel)(Parameters...),
                            void *stream, Arguments... arguments) {
  bool within_warp = Shape::kSpan == Span::warp;
  unsigned blocks = grid_size(within_warp ? ceil_div(rows, plan.warps * Shape::kRowsPerWarp) : rows * plan.cluster);
  const LaunchShape shape = {blocks, 32u * plan.warps, 0, static_cast<unsigned>(plan.cluster), plan.overlap};
  return launch_kernel(op, kernel, shape, stream, arguments...);
}

}  // namespace AOT_ISA
}  // namespace aot
