// Elementwise functions of contiguous tensors of the same size. A kernel calls map(), and is launched with map_grid()
// blocks of kMapBlock threads.
#pragma once
#include "keep.cuh"
#include "overlap.cuh"

namespace aot {
inline namespace AOT_ISA {

constexpr int kMapBlock = 128;

// The grid for n elements if a thread takes kVectors vectors of each input. One vector suits a memory-bound function:
// many small blocks keep many loads in flight. Two suit a compute-bound function: their latencies overlap.
template <typename T, int kVectors>
unsigned map_grid(int64_t n) {
  return grid_size(ceil_div(n, int64_t{kMapBlock} * kVectors * kVectorSize<T>));
}

// The result of a function with several outputs.
template <typename A, int kOutputs>
struct Elements {
  A value[kOutputs];
};

template <int kOutputs, class F, typename A, int kInputs>
__device__ inline Elements<A, kOutputs> apply(F f, const A (&a)[kInputs]) {
  static_assert(kInputs <= 3, "add a case for more inputs");
  auto result = [&] {
    if constexpr (kInputs == 1) return f(a[0]);
    else if constexpr (kInputs == 2) return f(a[0], a[1]);
    else return f(a[0], a[1], a[2]);
  }();
  if constexpr (kOutputs == 1) return {{result}};
  else return result;
}

template <typename T, int kOutputs>
struct Vectors {
  Vector<T> value[kOutputs];
};

template <int kOutputs, class F, typename T, int kInputs>
__device__ inline Vectors<T, kOutputs> map_vector(F f, const Vector<T> (&v)[kInputs]) {
  Widened<T> x[kInputs], y[kOutputs];
  for (int j = 0; j < kInputs; ++j) x[j] = widen(v[j]);
#pragma unroll
  for (int i = 0; i < kVectorSize<T>; ++i) {
    Accumulate<T> a[kInputs];
    for (int j = 0; j < kInputs; ++j) a[j] = x[j][i];
    auto result = apply<kOutputs>(f, a);
    for (int j = 0; j < kOutputs; ++j) y[j][i] = result.value[j];
  }
  Vectors<T, kOutputs> narrowed;
  for (int j = 0; j < kOutputs; ++j) narrowed.value[j] = narrow(y[j]);
  return narrowed;
}

// y[0][i], ... = f(x[0][i], ...) for i < n. f returns a number, or Elements if there are several outputs. Accesses are
// vectorized if all tensors reach a 16-byte boundary at the same element, except for less than a vector at each end.
// Otherwise all elements are processed one by one. kKept: loads are as keep.cuh has them. kFew: the kernel starts while
// the one before it ends, waits for it when the first addresses are known, and lets the next one start then. That is
// 0.05 to 0.1 us of 0.8 less than both at once (8 x 256 elements on an H200); the next one first is slower where blocks
// are many.
template <typename T, int kVectors, bool kKept = false, bool kFew = false, class F, int kOutputs, int kInputs>
__device__ inline void map(F f, int64_t n, T *const (&y)[kOutputs], const T *const (&x)[kInputs]) {
  constexpr int kSize = kVectorSize<T>;
  int64_t head = misaligned_elements(y[0], sizeof(T));
  bool same_alignment = true;
  for (const T *p : x) same_alignment = same_alignment && misaligned_elements(p, sizeof(T)) == head;
  for (const T *p : y) same_alignment = same_alignment && misaligned_elements(p, sizeof(T)) == head;
  if (!same_alignment || head > n) head = n;
  int64_t vectors = (n - head) / kSize;

  auto map_element = [&](int64_t i) {
    Accumulate<T> a[kInputs];
    for (int j = 0; j < kInputs; ++j) a[j] = widen(x[j][i]);
    auto result = apply<kOutputs>(f, a);
    for (int j = 0; j < kOutputs; ++j) y[j][i] = narrow<T>(result.value[j]);
  };
  int64_t thread = int64_t{blockIdx.x} * kMapBlock + threadIdx.x, threads = int64_t{gridDim.x} * kMapBlock;
  if constexpr (kFew) {
    asm volatile("" : "+l"(head), "+l"(vectors));  // the compiler moves them behind the next line otherwise
    wait_for_kernel_before(), launch_next();
  }
#pragma unroll 1
  for (int64_t i = thread; i < head; i += threads) map_element(i);
#pragma unroll 1
  for (int64_t i = head + vectors * kSize + thread; i < n; i += threads) map_element(i);

  int64_t first = int64_t{blockIdx.x} * (kMapBlock * kVectors) + threadIdx.x, at = head + first * kSize;
  int64_t left = vectors - first;
  Vector<T> v[kVectors][kInputs];
#pragma unroll
  for (int k = 0; k < kVectors; ++k)
    for (int j = 0; j < kInputs; ++j)
      if (k * kMapBlock < left) {
        const T *from = x[j] + at + k * kMapBlock * kSize;
        v[k][j] = kKept ? load_kept(from) : load_once(from);
      }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (k * kMapBlock >= left) continue;
    auto result = map_vector<kOutputs>(f, v[k]);
    for (int j = 0; j < kOutputs; ++j) store(y[j] + at + k * kMapBlock * kSize, result.value[j]);
  }
}

// Kernels of few elements may overlap (map's kFew). Others do not, because a kernel that may overlap starts fewer
// blocks a nanosecond (overlap.cuh).
template <typename T>
constexpr bool kHasFew = sizeof(T) < 8;  // float64 does without

template <typename T, typename... Parameters, typename... Arguments>
Status launch_map(const char *op, void (*few)(Parameters...), void (*many)(Parameters...), unsigned grid, void *stream,
                  const Arguments &...arguments) {
  const bool is_few = kHasFew<T> && overlaps(grid);
  return launch_kernel(op, is_few ? few : many, {grid, kMapBlock, 0, 1, is_few}, stream, arguments...);
}

}  // namespace AOT_ISA
}  // namespace aot
