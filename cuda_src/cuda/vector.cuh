// Vectors of 16 bytes: loads, stores, and conversions between a tensor's type and the type of the computation.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace aot {
inline namespace AOT_ISA {

// The type in which values of T are computed and summed.
template <typename T>
struct AccumulateType {
  using type = float;
};
template <>
struct AccumulateType<double> {
  using type = double;
};
template <typename T>
using Accumulate = typename AccumulateType<T>::type;

// ---------------------------------------------------------------------------------------------------- one element

__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }

template <typename T>
__device__ inline T narrow(Accumulate<T> x) {
  return x;
}
template <>
__device__ inline __half narrow<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// -------------------------------------------------------------------------------------------------- sixteen bytes

// In the tensor's type: 16-bit values kept in registers in this form need half as many as their widened values.
template <typename T>
struct alignas(16) Vector {
  static constexpr int kSize = 16 / sizeof(T);
  uint32_t word[4];
};

template <typename T>
constexpr int kVectorSize = Vector<T>::kSize;

__device__ inline void widen_word(uint32_t word, float (&x)[2], __half) {
  float2 pair = __half22float2(reinterpret_cast<const __half2 &>(word));
  x[0] = pair.x, x[1] = pair.y;
}
__device__ inline void widen_word(uint32_t word, float (&x)[2], __nv_bfloat16) {
  x[0] = __uint_as_float(word << 16), x[1] = __uint_as_float(word & 0xffff0000u);
}
__device__ inline uint32_t narrow_word(float a, float b, __half) {
  __half2 pair = __floats2half2_rn(a, b);
  return reinterpret_cast<const uint32_t &>(pair);
}
__device__ inline uint32_t narrow_word(float a, float b, __nv_bfloat16) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return reinterpret_cast<const uint32_t &>(pair);
}

template <typename T>
struct Widened {
  Accumulate<T> value[kVectorSize<T>];
  __device__ Accumulate<T> &operator[](int i) { return value[i]; }
  __device__ const Accumulate<T> &operator[](int i) const { return value[i]; }
};

template <typename T>
__device__ inline Widened<T> widen(const Vector<T> &v) {
  Widened<T> x;
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float pair[2];
      widen_word(v.word[i], pair, T());
      x[2 * i] = pair[0], x[2 * i + 1] = pair[1];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVectorSize<T>; ++i) x[i] = reinterpret_cast<const T(&)[kVectorSize<T>]>(v)[i];
  }
  return x;
}

template <typename T>
__device__ inline Vector<T> narrow(const Widened<T> &x) {
  Vector<T> v;
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v.word[i] = narrow_word(x[2 * i], x[2 * i + 1], T());
  } else {
#pragma unroll
    for (int i = 0; i < kVectorSize<T>; ++i) reinterpret_cast<T(&)[kVectorSize<T>]>(v)[i] = x[i];
  }
  return v;
}

// A vector of copies of `value`.
template <typename T>
__device__ inline Vector<T> filled(float value) {
  Widened<T> x;
#pragma unroll
  for (Accumulate<T> &element : x.value) element = value;
  return narrow(x);
}

// ----------------------------------------------------------------------------------------------- loads and stores

// For data that is read again soon, such as a weight.
template <typename T>
__device__ inline Vector<T> load(const T *p) {
  Vector<T> v;
  reinterpret_cast<uint4 &>(v) = *reinterpret_cast<const uint4 *>(p);
  return v;
}

// For data that is read once. It is volatile, so that the compiler issues it where it stands: all of a thread's loads
// are in flight before the first one is used. It has no cache hint: with L1::no_allocate, add was 8 % slower on an
// H200. It is not `.nc`, because an output may be the input itself.
template <typename T>
__device__ inline Vector<T> load_once(const T *p) {
  Vector<T> v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(p)
               : "memory");
  return v;
}

// A vector if `present`, else zeros.
template <typename T>
__device__ inline Vector<T> load_present(const T *p, bool present) {
  Vector<T> v = {};
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
               : "+r"(v.word[0]), "+r"(v.word[1]), "+r"(v.word[2]), "+r"(v.word[3])
               : "l"(p), "r"(static_cast<int>(present))
               : "memory");
  return v;
}

template <typename T>
__device__ inline void store(T *p, const Vector<T> &v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]),
               "r"(v.word[3])
               : "memory");
}

// Elements before the first 16-byte boundary.
__device__ inline int64_t misaligned_elements(const void *p, size_t size) {
  return (16 - reinterpret_cast<uintptr_t>(p) % 16) % 16 / size;
}

// Whether vectors can be loaded and stored at all pointers, of which those of absent tensors are null.
template <typename... Pointers>
inline bool aligned(const Pointers *...pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) | ...) & 15) == 0;
}

// Sums of many terms, from partial sums of kTerms, which limits rounding errors. The result is in `sum`, which may be
// in shared memory to save registers.
template <typename A, int kCount>
struct LongSums {
  static constexpr int kTerms = 32;
  A (&sum)[kCount];
  A run[kCount] = {};

  __device__ explicit LongSums(A (&to)[kCount]) : sum(to) {
    for (A &s : sum) s = 0;
  }
  // Calls f(i) for first <= i < last in steps of `step`; f adds a term to each element of `run`.
  template <class F>
  __device__ void each(int64_t first, int64_t last, int64_t step, F f) {
    for (int64_t i = first; i < last;) {
      const int64_t end = last - i < kTerms * step ? last : i + kTerms * step;
      for (; i < end; i += step) f(i);
#pragma unroll
      for (int j = 0; j < kCount; ++j) sum[j] += run[j], run[j] = 0;
    }
  }
};

}  // namespace AOT_ISA
}  // namespace aot
