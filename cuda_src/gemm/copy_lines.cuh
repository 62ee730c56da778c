// Copies of 16-bit matrices with lines that begin at multiples of 16 bytes, at the speed of memory: a thread loads the
// aligned vectors that hold its eight elements, which lie anywhere in them, and stores an aligned vector.
#pragma once
#include "activation_backward.cuh"
#include "cuda/launch.cuh"

namespace aot {
inline namespace AOT_ISA {

struct CopiedLines {
  const uint16_t *from;
  uint16_t *to;
  int64_t rows, cols, from_stride, to_stride;  // to_stride: a multiple of 8, of which those beyond cols become zeros
};

constexpr int kCopyWarps = 8, kCopyRows = 4;           // of a block; rows of a warp, whose loads are in flight together
constexpr int kCopyColumns = 32 * 8, kCopyBlocks = 4;  // of a multiprocessor
constexpr int kSumBlocks = 3;                          // with the columns' sums, which take more registers

class LineCopy {
 public:
  using Vec = Vector<__half>;  // of any 16 bits
  __device__ explicit LineCopy(const CopiedLines &x)
      : x_(x), end_(x.from + ((x.rows - 1) * x.from_stride + x.cols)), vector_(blockIdx.x * 32 + threadIdx.x) {}

  // The block's columns of a part of the rows. see(v): of every vector.
  template <class F>
  __device__ void run(int64_t first, int64_t last, F see) const {
    for (int64_t row = first + threadIdx.y; row < last; row += kCopyWarps * kCopyRows) {
      Vec vectors[kCopyRows], behind[kCopyRows];
#pragma unroll
      for (int i = 0; i < kCopyRows; ++i)
        load(row + i * kCopyWarps, row + i * kCopyWarps < last, &vectors[i], &behind[i]);
#pragma unroll
      for (int i = 0; i < kCopyRows; ++i) {
        const Vec v = copied(row + i * kCopyWarps, vectors[i], behind[i]);
        if (row + i * kCopyWarps < last && vector_ * kSize < x_.to_stride)
          store(reinterpret_cast<__half *>(x_.to + (row + i * kCopyWarps) * x_.to_stride + vector_ * kSize), v);
        see(v);
      }
    }
  }

 private:
  static constexpr int kSize = 8;  // elements of a vector

  // How many elements of a row's first aligned vector are before it.
  __device__ int before(int64_t row) const {
    return static_cast<int>(reinterpret_cast<uintptr_t>(x_.from + row * x_.from_stride) % 16 / 2);
  }

  // The thread's aligned vector, and in the warp's last lane the one behind it.
  __device__ void load(int64_t row, bool present, Vec *first, Vec *behind) const {
    *first = *behind = {};
    if (!present) return;
    const int skipped = before(row);
    const int64_t at = vector_ * kSize, size = x_.cols + skipped;
    const uint16_t *from = x_.from + row * x_.from_stride - skipped + at;
    if (at < size) *first = load_inside(from);
    if (threadIdx.x == 31 && at + kSize < size) *behind = load_inside(from + kSize);
  }

  // A vector, of which nothing is read that is not between the matrix's first element and its last.
  __device__ Vec load_inside(const uint16_t *from) const {
    if (from >= x_.from && from + kSize <= end_) return load_once(reinterpret_cast<const __half *>(from));
    Vec v = {};
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      if (from + i >= x_.from && from + i < end_) v.word[i / 2] |= uint32_t{from[i]} << i % 2 * 16;
    return v;
  }

  // The thread's eight elements of a row, of which those beyond it are zeros.
  __device__ Vec copied(int64_t row, const Vec &first, Vec behind) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t of_next = __shfl_down_sync(~0u, first.word[i], 1);
      if (threadIdx.x < 31) behind.word[i] = of_next;
    }
    Vec v = shifted(first, behind, before(row));
    const int64_t left = x_.cols - vector_ * kSize;
#pragma unroll
    for (int i = 0; i < 4; ++i) v.word[i] &= 2 * i + 1 < left ? ~0u : 2 * i < left ? 0xffffu : 0u;
    return v;
  }

  // The eight elements from `skipped` on, which is the same in all lanes.
  static __device__ Vec shifted(const Vec &first, const Vec &behind, int skipped) {
    switch (skipped / 2) {
      case 0:
        return of_words<0>(first, behind, skipped);
      case 1:
        return of_words<1>(first, behind, skipped);
      case 2:
        return of_words<2>(first, behind, skipped);
      default:
        return of_words<3>(first, behind, skipped);
    }
  }
  template <int kWords>
  static __device__ Vec of_words(const Vec &first, const Vec &behind, int skipped) {
    auto word = [&](int i) { return i < 4 ? first.word[i] : behind.word[i - 4]; };
    Vec v;
#pragma unroll
    for (int i = 0; i < 4; ++i) v.word[i] = __funnelshift_r(word(i + kWords), word(i + kWords + 1), skipped % 2 * 16);
    return v;
  }

  const CopiedLines &x_;
  const uint16_t *end_;
  int64_t vector_;  // the thread's
};

constexpr int kMostCopies = 3;
struct Copies {
  CopiedLines of[kMostCopies];
};

// blockIdx.z: of which.
static __global__ void __launch_bounds__(32 * kCopyWarps, kCopyBlocks)
    copy_lines_kernel(const __grid_constant__ Copies copies) {
  wait_for_kernel_before();
  launch_next();
  const CopiedLines &x = copies.of[blockIdx.z];
  LineCopy(x).run(x.rows * blockIdx.y / gridDim.y, x.rows * (blockIdx.y + 1) / gridDim.y, [](auto) {});
}

// With the sums of the columns, as column_sums_kernel has them (activation_backward.cuh).
template <typename T>
__global__ void __launch_bounds__(32 * kCopyWarps, kSumBlocks)
    copy_and_sum_lines_kernel(const __grid_constant__ CopiedLines x, float *partials) {
  constexpr int kSize = kVectorSize<T>;
  __shared__ float shared[kCopyWarps][kSize][kSumStride<kSize>];
  launch_next();
  float sum[kSize] = {}, total[kSize] = {};
  int terms = 0;
  auto end_sum = [&] {
#pragma unroll
    for (int j = 0; j < kSize; ++j) total[j] += sum[j], sum[j] = 0;
  };
  LineCopy(x).run(x.rows * blockIdx.y / gridDim.y, x.rows * (blockIdx.y + 1) / gridDim.y, [&](const auto &v) {
    const Widened<T> wide = widen(reinterpret_cast<const Vector<T> &>(v));
#pragma unroll
    for (int j = 0; j < kSize; ++j) sum[j] += wide[j];
    if (++terms % kTermsOfSum<T> == 0) end_sum();
  });
  end_sum();
#pragma unroll
  for (int j = 0; j < kSize; ++j) shared[threadIdx.y][j][threadIdx.x] = total[j];
  store_partials(shared, partials, x.cols);
}

// One launch for all that have elements; count: kMostCopies at most. Matrices of as many columns make the fewest idle
// blocks.
inline Status copy_lines(const char *op, const CopiedLines *x, int count, cudaStream_t stream) {
  Copies copies = {};
  int64_t columns = 0, rows = 0;
  unsigned present = 0;
  for (int i = 0; i < count; ++i) {
    if (!x[i].rows || !x[i].cols) continue;
    copies.of[present++] = x[i];
    columns = std::max(columns, ceil_div(x[i].to_stride, kCopyColumns));
    rows = std::max(rows, x[i].rows);
  }
  if (!present) return kOk;
  rows = ceil_div(rows, kCopyWarps * kCopyRows);
  const dim3 grid(grid_size(columns), static_cast<unsigned>(std::min<int64_t>(rows, 65535)), present);
  const bool overlap = overlaps(int64_t{grid.x} * grid.y * grid.z);
  return launch_kernel(op, copy_lines_kernel, {grid, dim3(32, kCopyWarps), 0, 1, overlap}, stream, copies);
}

// partials: (parts, cols). *parts: at most, and then those that there are.
template <typename T>
Status copy_and_sum_lines(const char *op, const CopiedLines &x, float *partials, int *parts, cudaStream_t stream) {
  DeviceLimits limits;
  AOT_TRY(device_limits(op, &limits));
  const int64_t columns = ceil_div(x.to_stride, kCopyColumns), useful = ceil_div(x.rows, kCopyWarps * kCopyRows);
  const int64_t at_once = int64_t{limits.multiprocessors} * kSumBlocks / columns;
  *parts = static_cast<int>(std::clamp<int64_t>(std::min(at_once, useful), 1, *parts));
  const dim3 grid(grid_size(columns), *parts);
  return launch_kernel(op, copy_and_sum_lines_kernel<T>, {grid, dim3(32, kCopyWarps)}, stream, x, partials);
}

// Rows of 16-bit elements, one a block, to rows that begin anywhere.
constexpr int kRowThreads = 256;
static __global__ void __launch_bounds__(kRowThreads)
    copy_rows_kernel(const uint16_t *from, int64_t from_stride, uint16_t *to, int64_t cols) {
  from += blockIdx.x * from_stride, to += blockIdx.x * cols;
#pragma unroll 4  // loads in flight
  for (int64_t i = threadIdx.x; i < cols; i += kRowThreads) to[i] = from[i];
}

inline Status copy_rows(const char *op, const void *from, int64_t from_stride, void *to, int64_t rows, int64_t cols,
                        cudaStream_t stream) {
  return launch_kernel(op, copy_rows_kernel, {static_cast<unsigned>(rows), kRowThreads}, stream,
                       static_cast<const uint16_t *>(from), from_stride, static_cast<uint16_t *>(to), cols);
}

}  // namespace AOT_ISA
}  // namespace aot
