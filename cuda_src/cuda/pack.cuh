// Packs of neighbouring elements, where vectors of 16 bytes do not fit.
#pragma once
#include "vector.cuh"

namespace aot {
inline namespace AOT_ISA {

// 2 to 16 bytes of elements, which stay in this form until they are computed with.
template <typename T_, int kSize_>
struct Pack {
  using T = T_;
  using A = Accumulate<T>;
  static constexpr int kSize = kSize_, kBytes = kSize * sizeof(T), kWords = kBytes < 4 ? 1 : kBytes / 4;
  uint32_t word[kWords];

  __device__ static Pack load(const T *p) {
    Pack v;
    if constexpr (kBytes == 2) v.word[0] = *reinterpret_cast<const uint16_t *>(p);
    else if constexpr (kBytes == 4) v.word[0] = *reinterpret_cast<const uint32_t *>(p);
    else if constexpr (kBytes == 8) reinterpret_cast<uint2 &>(v) = *reinterpret_cast<const uint2 *>(p);
    else reinterpret_cast<uint4 &>(v) = *reinterpret_cast<const uint4 *>(p);
    return v;
  }
  __device__ void store(T *p) const {
    if constexpr (kBytes == 2) *reinterpret_cast<uint16_t *>(p) = static_cast<uint16_t>(word[0]);
    else if constexpr (kBytes == 4) *reinterpret_cast<uint32_t *>(p) = word[0];
    else if constexpr (kBytes == 8) *reinterpret_cast<uint2 *>(p) = {word[0], word[1]};
    else *reinterpret_cast<uint4 *>(p) = {word[0], word[1], word[2], word[3]};
  }
  // Calls f(k, x) for each element x, widened.
  template <class F>
  __device__ void each(F f) const {
#pragma unroll
    for (int k = 0; k < kSize; ++k)
      if constexpr (sizeof(T) == 2) {
        float pair[2];
        widen_word(word[k / 2], pair, T());
        f(k, pair[k % 2]);
      } else if constexpr (sizeof(T) == 4) f(k, __uint_as_float(word[k]));
      else f(k, __hiloint2double(word[2 * k + 1], word[2 * k]));
  }
  // The pack whose element k is f(k).
  template <class F>
  __device__ static Pack of(F f) {
    Pack v;
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      if constexpr (sizeof(T) == 2) v.word[i] = narrow_word(f(2 * i), kSize == 1 ? 0.f : f(2 * i + 1), T());
      else if constexpr (sizeof(T) == 4) v.word[i] = __float_as_uint(f(i));
      else v.word[i] = i % 2 ? __double2hiint(f(i / 2)) : __double2loint(f(i / 2));
    return v;
  }
  __device__ static Pack filled(A value) {
    return of([=](int) { return value; });
  }
  // Keeps the compiler from holding the widened values of 16 bits, which take twice the registers.
  __device__ void keep() {
    if constexpr (sizeof(T) == 2)
#pragma unroll
      for (uint32_t &w : word) asm volatile("" : "+r"(w));
  }
};

}  // namespace AOT_ISA
}  // namespace aot
