// Vectors of kLanes<T> elements: load, store, reduce, and the sweeps over an array that every loop is made of.
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "float16.h"

namespace aot {
inline namespace AOT_ISA {

// What a step of a sweep covers: a whole vector, a whole vector whose destination is aligned and too big for the
// caches, or the first n elements of one.
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

// The first bytes, and zeros beyond.
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

// Zeros beyond the n elements.
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

// A store past the caches: it spares reading the line that it overwrites.
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

// Orders the streamed stores of this thread before whatever tells another thread that they are done.
inline void end_stream() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// An output this big does not stay in the caches for whoever reads it next.
inline bool streams(int64_t bytes) { return bytes >= int64_t{32} << 20; }

// Whether a vector of both is aligned at once.
inline bool alike(const void *a, const void *b) {
  return (reinterpret_cast<uintptr_t>(a) - reinterpret_cast<uintptr_t>(b)) % kVectorBytes == 0;
}

// The first part.n lanes of v, zeros beyond.
template <typename T>
Vec<T> keep(Vec<T> v, Part part) {
  VecInt<T> lane;
  for (int i = 0; i < kLanes<T>; ++i) lane[i] = i;
  return lane < static_cast<typename Traits<T>::Int>(part.n) ? v : Vec<T>{};
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

// Always inlined, so that sums which f refers to are kept in registers.
#define AOT_INLINE [[gnu::always_inline]] inline

// f(j, part) for every vector of n elements, whose Accumulate is that of T.
template <typename T, class F>
AOT_INLINE void sweep(int64_t n, F f) {
  int64_t j = 0;
#pragma GCC unroll 4
  for (; j + kLanes<T> <= n; j += kLanes<T>) f(j, Full());
  if (j < n) f(j, Part{n - j});
}

// The same for loops that sum: f(j, part, k), with k the one of 4 independent sums to add to.
template <typename T, class F>
AOT_INLINE void sweep_sums(int64_t n, F f) {
  int64_t j = 0;
  for (; j + 4 * kLanes<T> <= n; j += 4 * kLanes<T>)
    for (int k = 0; k < 4; ++k) f(j + k * kLanes<T>, Full(), k);
  for (; j + kLanes<T> <= n; j += kLanes<T>) f(j, Full(), 0);
  if (j < n) f(j, Part{n - j}, 1);
}

// The same for loops that write y: its middle is streamed.
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
