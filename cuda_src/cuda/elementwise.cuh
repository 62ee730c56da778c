// One function over contiguous tensors of one size. A kernel is one call of map(), launched with map_grid() blocks.
#pragma once
#include "launch.cuh"

namespace aot {
inline namespace AOT_ISA {

constexpr int kMapBlock = 256;

// The grid for n elements where a thread takes kVectors vectors of each input. One is best, many small blocks keep the
// memory busy, unless there is much to compute: then two, for the latency of the one to hide behind the other.
template <typename T, int kVectors>
unsigned map_grid(int64_t n) {
  return grid_size(ceil_div(n, int64_t{kMapBlock} * kVectors * kVectorSize<T>));
}

// Elements before the first that lies on sixteen bytes.
__device__ inline int64_t misaligned_elements(const void *p, size_t size) {
  return (16 - reinterpret_cast<uintptr_t>(p) % 16) % 16 / size;
}

template <class F, typename A, int kInputs>
__device__ inline auto apply(F f, const A (&a)[kInputs]) {
  static_assert(kInputs <= 2, "one line more for each");
  if constexpr (kInputs == 1) return f(a[0]);
  else return f(a[0], a[1]);
}

template <class F, typename T, int kInputs>
__device__ inline Vector<T> map_vector(F f, const Vector<T> (&v)[kInputs]) {
  Widened<T> x[kInputs], y;
  for (int j = 0; j < kInputs; ++j) x[j] = widen(v[j]);
#pragma unroll
  for (int i = 0; i < kVectorSize<T>; ++i) {
    Accumulate<T> a[kInputs];
    for (int j = 0; j < kInputs; ++j) a[j] = x[j][i];
    y[i] = apply(f, a);
  }
  return narrow(y);
}

// y[i] = f(x[0][i], ...) for i < n: by vectors where the tensors lie alike with respect to sixteen bytes, which leaves
// less than a vector at each end, and by elements where they do not.
template <typename T, int kVectors, int kInputs, class F>
__device__ inline void map(F f, int64_t n, T *y, const T *const (&x)[kInputs]) {
  constexpr int kSize = kVectorSize<T>;
  int64_t head = misaligned_elements(y, sizeof(T));
  bool alike = true;
  for (const T *p : x) alike = alike && misaligned_elements(p, sizeof(T)) == head;
  if (!alike || head > n) head = n;
  int64_t vectors = (n - head) / kSize;

  auto map_element = [&](int64_t i) {
    Accumulate<T> a[kInputs];
    for (int j = 0; j < kInputs; ++j) a[j] = widen(x[j][i]);
    y[i] = narrow<T>(apply(f, a));
  };
  int64_t thread = int64_t{blockIdx.x} * kMapBlock + threadIdx.x, threads = int64_t{gridDim.x} * kMapBlock;
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
      if (k * kMapBlock < left) v[k][j] = load_once(x[j] + at + k * kMapBlock * kSize);
#pragma unroll
  for (int k = 0; k < kVectors; ++k)
    if (k * kMapBlock < left) store(y + at + k * kMapBlock * kSize, map_vector(f, v[k]));
}

}  // namespace AOT_ISA
}  // namespace aot
