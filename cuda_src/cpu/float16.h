// float16 and bfloat16 on the CPU, the vector types, and the dispatch on a dtype. Arithmetic uses Accumulate<T>. The
// conversions work on whole vectors, round to nearest even, overflow to infinity and preserve NaN.
#pragma once
#include <type_traits>

#include "aot.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace aot {
inline namespace AOT_ISA {

struct float16 {
  uint16_t bits;
};
struct bfloat16 {
  uint16_t bits;
};

// Returns f(T()) with the C++ type T of a floating dtype.
template <class F>
Status dispatch_floating(DType dtype, F f) {
  switch (dtype) {
    case DType::float16:
      return f(float16());
    case DType::bfloat16:
      return f(bfloat16());
    case DType::float32:
      return f(float());
    case DType::float64:
      return f(double());
    default:
      return fail(kUnsupportedDtype, "dtype %s is not floating", dtype_name(dtype));
  }
}

// Returns f(a zero of the dtype), which is T, or float beside 16 bits. An absent tensor counts as one of T.
template <typename T, class F>
Status dispatch_wider(DType dtype, F f) {
  if constexpr (sizeof(T) == 2)
    if (dtype == DType::float32) return f(float());
  return f(T());
}

// ---------------------------------------------------------------------------------------------------- vector types

// The size of a register of this instruction set. GCC's vector types work on every architecture.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <typename T, int lanes>
struct VectorOf {
  typedef T type __attribute__((vector_size(lanes * sizeof(T))));
};

template <typename T>  // the type that T is computed in
using Accumulate = std::conditional_t<sizeof(T) == 2, float, T>;
template <typename T>  // an integer as wide as that
using IntOf = std::conditional_t<sizeof(Accumulate<T>) == 4, int32_t, int64_t>;

template <typename T>
constexpr int kLanes = kVectorBytes / sizeof(Accumulate<T>);

template <typename T>  // a register of values to compute with
using Vec = typename VectorOf<Accumulate<T>, kLanes<T>>::type;
template <typename T>  // as many elements in their storage type
using Stored = typename VectorOf<std::conditional_t<sizeof(T) == 2, uint16_t, T>, kLanes<T>>::type;
template <typename T>  // masks, and the bits of a Vec<T>, signed
using VecInt = typename VectorOf<IntOf<T>, kLanes<T>>::type;
template <typename T>  // the same unsigned, whose overflow wraps
using VecUnsigned = typename VectorOf<std::make_unsigned_t<IntOf<T>>, kLanes<T>>::type;

// ----------------------------------------------------------------------------------------------------- conversions

using VecBits = VectorOf<uint32_t, kLanes<float>>::type;
using Halves = Stored<float16>;

inline Vec<float> widen(Vec<float> v, float) { return v; }
inline Vec<double> widen(Vec<double> v, double) { return v; }
inline Vec<float> narrow(Vec<float> v, float) { return v; }
inline Vec<double> narrow(Vec<double> v, double) { return v; }

// Zero extension of uint16 to uint32, and the upper halves of uint32: GCC 12 does not find these instructions itself.
// The maskz forms avoid its false warnings about uninitialized registers (GCC bug 105593).
#if defined(__AVX512F__)
inline VecBits widen_bits(Halves h) { return (VecBits)_mm512_maskz_cvtepu16_epi32(-1, (__m256i)h); }
inline Halves upper_halves(VecBits u) {
  const auto h = (VectorOf<uint16_t, 32>::type)u;
  return __builtin_shufflevector(h, h, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
#elif defined(__AVX2__)
inline VecBits widen_bits(Halves h) { return (VecBits)_mm256_cvtepu16_epi32((__m128i)h); }
inline Halves upper_halves(VecBits u) {
  __m256i packed = _mm256_packus_epi32((__m256i)(u >> 16), (__m256i)(u >> 16));  // each half of the register twice
  return (Halves)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
#else
inline VecBits widen_bits(Halves h) { return __builtin_convertvector(h, VecBits); }
inline Halves upper_halves(VecBits u) { return __builtin_convertvector(u >> 16, Halves); }
#endif

// bfloat16 is the upper half of a float32.
inline Vec<float> widen(Halves h, bfloat16) { return (Vec<float>)(widen_bits(h) << 16); }

inline Halves narrow(Vec<float> v, bfloat16) {
  VecBits u = (VecBits)v, rounded = u + 0x7fff + (u >> 16 & 1);
  return upper_halves(v != v ? u | 0x400000 : rounded);
}

#if defined(__AVX512F__)

inline Vec<float> widen(Halves h, float16) { return (Vec<float>)_mm512_maskz_cvtph_ps(-1, (__m256i)h); }
inline Halves narrow(Vec<float> v, float16) {
  return (Halves)_mm512_maskz_cvtps_ph(-1, (__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

#elif defined(__F16C__)

inline Vec<float> widen(Halves h, float16) { return (Vec<float>)_mm256_cvtph_ps((__m128i)h); }
inline Halves narrow(Vec<float> v, float16) {
  return (Halves)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

#else

inline Vec<float> widen(Halves h, float16) {
  VecBits u = widen_bits(h);
  VecBits magnitude = (u & 0x7fff) << 13;      // exponent and mantissa at float32's positions
  VecBits normal = magnitude + (112u << 23);   // exponent bias: 127 - 15
  VecBits special = magnitude + (224u << 23);  // infinity, NaN: the largest exponent
  Vec<float> subnormal = (Vec<float>)(magnitude + (113u << 23)) - 0x1p-14f;  // as if normal, minus the implicit 1
  VecBits bits = magnitude < 1u << 23 ? (VecBits)subnormal : magnitude >= 31u << 23 ? special : normal;
  return (Vec<float>)(bits | (u & 0x8000) << 16);
}

inline Halves narrow(Vec<float> v, float16) {
  VecBits u = (VecBits)v, magnitude = u & 0x7fffffff;
  VecBits normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  VecBits subnormal = (VecBits)((Vec<float>)magnitude + 0.5f) - 0x3f000000;  // 0.5f's last place is 2^-24, float16's
  VecBits bits = magnitude < 113u << 23 ? subnormal : normal;
  bits = magnitude >= 143u << 23 ? VecBits{} + 0x7c00 : bits;  // 2^16 and above
  bits = v != v ? VecBits{} + 0x7e00 : bits;
  return __builtin_convertvector(bits | (u >> 16 & 0x8000), Halves);
}

#endif

}  // namespace AOT_ISA
}  // namespace aot
