// Vectors of kLanes<T> elements: loads, stores, reductions, and sweeps, the vectorized loops over an array.
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "float16.h"

namespace aot {
inline namespace AOT_ISA {

// The part of a vector that a step of a sweep covers: all of it; all of it, stored past the caches to an aligned
// address; or the first n elements.
struct Full {};
struct Stream {};
struct Part {
  int64_t n;
};

// ----------------------------------------------------------------------------------------------------- load, store

template <class V>
V load_raw(const void *p) {
  V raw;
  std::memcpy(&raw, p, sizeof raw);
  return raw;
}

// Loads `bytes` bytes; the others are zero.
template <class V>
V load_raw(const void *p, int64_t bytes) {
#if defined(__AVX512BW__)
  const uint64_t mask = _bzhi_u64(-1, bytes);
  if constexpr (sizeof(V) == 64) return (V)_mm512_maskz_loadu_epi8(mask, p);
  else return (V)_mm256_maskz_loadu_epi8(mask, p);
#else
  V raw{};
  std::memcpy(&raw, p, bytes);
  return raw;
#endif
}

template <class V>
void store_raw(void *p, V raw, int64_t bytes) {
#if defined(__AVX512BW__)
  const uint64_t mask = _bzhi_u64(-1, bytes);
  if constexpr (sizeof(V) == 64) _mm512_mask_storeu_epi8(p, mask, (__m512i)raw);
  else _mm256_mask_storeu_epi8(p, mask, (__m256i)raw);
#else
  std::memcpy(p, &raw, bytes);
#endif
}

template <typename T>
Vec<T> load(const T *p, Full = {}) {
  return widen(load_raw<Stored<T>>(p), T());
}

template <typename T>
Vec<T> load(const T *p, Stream) {
  return load(p);
}

// Elements from part.n on are zero.
template <typename T>
Vec<T> load(const T *p, Part part) {
  return widen(load_raw<Stored<T>>(p, part.n * sizeof(T)), T());
}

template <typename T>
void store(T *p, Vec<T> v, Full = {}) {
  Stored<T> raw = narrow(v, T());
  std::memcpy(p, &raw, sizeof raw);
}

template <typename T>
void store(T *p, Vec<T> v, Part part) {
  store_raw(p, narrow(v, T()), part.n * sizeof(T));
}

// A store that bypasses the caches: the line that it overwrites is not read first.
template <typename T>
void store(T *p, Vec<T> v, Stream) {
#if defined(__x86_64__)
  Stored<T> raw = narrow(v, T());
#if defined(__AVX512F__)
  if constexpr (sizeof raw == 64) return _mm512_stream_si512(reinterpret_cast<__m512i *>(p), (__m512i)raw);
#endif
#if defined(__AVX2__)
  if constexpr (sizeof raw == 32) return _mm256_stream_si256(reinterpret_cast<__m256i *>(p), (__m256i)raw);
#endif
  if constexpr (sizeof raw == 16) return _mm_stream_si128(reinterpret_cast<__m128i *>(p), (__m128i)raw);
  if constexpr (sizeof raw == 8) return _mm_stream_si64(reinterpret_cast<long long *>(p), (long long)raw);
#else
  store(p, v);
#endif
}

// Makes this thread's streaming stores visible before its later stores, such as those of a barrier.
inline void end_stream() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Whether an output is too large to remain in the caches until it is read.
inline bool worth_streaming(int64_t bytes) { return bytes >= int64_t{32} << 20; }

// Whether a and b reach a vector boundary at the same offset.
inline bool same_alignment(const void *a, const void *b) {
  return (reinterpret_cast<uintptr_t>(a) - reinterpret_cast<uintptr_t>(b)) % kVectorBytes == 0;
}

// v with the lanes outside `part` set to zero.
template <typename T>
Vec<T> keep(Vec<T> v, Part part) {
  VecInt<T> lane;
  for (int i = 0; i < kLanes<T>; ++i) lane[i] = i;
  return lane < static_cast<IntOf<T>>(part.n) ? v : Vec<T>{};
}
template <typename T>
Vec<T> keep(Vec<T> v, Full) {
  return v;
}

// ---------------------------------------------------------------------------------------------------------- reduce

// The sum of all lanes, always in the same order.
template <typename A, int lanes = kLanes<A>>
A sum(typename VectorOf<A, lanes>::type v) {
  if constexpr (lanes == 2) {
    return v[0] + v[1];
  } else {
    typename VectorOf<A, lanes / 2>::type half[2];
    std::memcpy(half, &v, sizeof v);
    return sum<A, lanes / 2>(half[0] + half[1]);
  }
}

// ---------------------------------------------------------------------------------------------------------- sweeps

// Always inlined, so that sums captured by f stay in registers.
#define AOT_INLINE [[gnu::always_inline]] inline
// A lambda with this attribute keeps its constants in registers.
#define AOT_INLINED __attribute__((always_inline))

// f(j, part) for every vector of n elements of T, or of a type with T's Accumulate.
template <typename T, class F>
AOT_INLINE void sweep(int64_t n, F f) {
  int64_t j = 0;
#pragma GCC unroll 4
  for (; j + kLanes<T> <= n; j += kLanes<T>) f(j, Full());
  if (j < n) f(j, Part{n - j});
}

// A sweep for sums: f(j, part, k) adds to sum k of 4 independent ones, which hides the latency of additions.
template <typename T, class F>
AOT_INLINE void sweep_sums(int64_t n, F f) {
  int64_t j = 0;
  for (; j + 4 * kLanes<T> <= n; j += 4 * kLanes<T>)
    for (int k = 0; k < 4; ++k) f(j + k * kLanes<T>, Full(), k);
  for (; j + kLanes<T> <= n; j += kLanes<T>) f(j, Full(), 0);
  if (j < n) f(j, Part{n - j}, 1);
}
template <typename T>
double sum_of_4(const Vec<T> (&s)[4]) {
  return sum<Accumulate<T>>((s[0] + s[1]) + (s[2] + s[3]));
}

// Splits n elements into blocks: f(begin, size). Callers sum a block in Accumulate<T> and add the blocks up in double,
// because a float sum of a long row would lose digits.
template <class F>
AOT_INLINE void for_blocks(int64_t n, F f) {
  constexpr int64_t kBlock = 4096;
  for (int64_t begin = 0; begin < n; begin += kBlock) f(begin, n - begin < kBlock ? n - begin : kBlock);
}

// A sweep for loops that write y: all but its ends is streamed.
template <typename T, class F>
AOT_INLINE void sweep_stream(const T *y, int64_t n, F f) {
  int64_t j = -reinterpret_cast<uintptr_t>(y) % kVectorBytes / sizeof(T);
  if (j > n) j = n;
  for (int64_t i = 0; i < j; i += kLanes<T>) f(i, Part{j - i < kLanes<T> ? j - i : kLanes<T>});
  for (; j + kLanes<T> <= n; j += kLanes<T>) f(j, Stream());
  if (j < n) f(j, Part{n - j});
}

}  // namespace AOT_ISA
}  // namespace aot
