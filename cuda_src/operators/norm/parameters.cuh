// Vectors of the tensors of a norm, which may have two dtypes, and its parameters: weight and bias.
#pragma once
#include "cuda/keep.cuh"
#include "cuda/launch.cuh"
#include "cuda/row_shape.cuh"

namespace aot {
inline namespace AOT_ISA {

// The dtypes of a norm. R: of the rows that are normalized, x or the h of an add_ norm, and so of residual, dh and
// dresidual. T: of y, dy and an add_ norm's x and dx; R, or one of 16 bits where R is float. kPlain: all are of T, with
// 16 bits, and weight and bias are a line to which nothing is added. This has kernels of its own, since the others need
// more registers and instructions. kBias: there may be a bias; kRare: of a norm without a mean, which has fewer
// kernels.
template <bool kCentred_, bool kAdd_, typename T_, typename R_, bool kPlain_, bool kBias_ = kCentred_>
struct NormTypes {
  static constexpr bool kCentred = kCentred_, kAdd = kAdd_, kMixed = !std::is_same_v<T_, R_>, kPlain = kPlain_;
  static constexpr bool kBias = kBias_, kRare = kBias && !kCentred;
  static_assert(!kPlain || (sizeof(T_) == 2 && !kMixed));
  static constexpr int kStats = kCentred ? 2 : 1, kSums = kBias ? 2 : 1;
  using T = T_;
  using R = R_;
  using A = Accumulate<R>;
  using X = std::conditional_t<kAdd, T, R>;  // of x and dx
};

// --------------------------------------------------------------------------------------------------------- vectors

// Four elements of 16 bits, which stand beside a vector of four floats.
template <typename T>
struct alignas(8) HalfVector {
  uint32_t word[2];
};

// As many elements of T as a vector of R has.
template <typename T, typename R>
using VectorBeside = std::conditional_t<sizeof(T) == sizeof(R), Vector<T>, HalfVector<T>>;

template <typename T>
__device__ inline Widened<float> widen(const HalfVector<T> &v) {
  Widened<float> x;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float pair[2];
    widen_word(v.word[i], pair, T());
    x[2 * i] = pair[0], x[2 * i + 1] = pair[1];
  }
  return x;
}

template <typename T, typename R>
__device__ inline VectorBeside<T, R> narrow_to(const Widened<R> &x) {
  if constexpr (sizeof(T) == sizeof(R)) return narrow(x);
  else return {{narrow_word(x[0], x[1], T()), narrow_word(x[2], x[3], T())}};
}

// load_kept and store of as many elements as a vector of R has.
template <typename R, typename T>
__device__ inline VectorBeside<T, R> load_beside(const T *p, bool present) {
  if constexpr (sizeof(T) == sizeof(R)) {
    return load_kept(p, present);
  } else {
    HalfVector<T> v = {};
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p ld.global.v2.u32 {%0, %1}, [%2];\n}"
                 : "+r"(v.word[0]), "+r"(v.word[1])
                 : "l"(p), "r"(static_cast<int>(present))
                 : "memory");
    return v;
  }
}

template <typename T>
__device__ inline void store(T *p, const HalfVector<T> &v) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v.word[0]), "r"(v.word[1]) : "memory");
}

// ------------------------------------------------------------------------------------------------------ parameters

// Weight and bias, (lines, cols), of T, or of float if `wide`, where T has 16 bits. Row r takes line r % lines.
template <class N>
struct NormParameters {
  using T = typename N::T;
  using A = typename N::A;
  static constexpr bool kMayBeWide = sizeof(T) == 2 && !N::kPlain;
  // Bytes in which a persistent kernel keeps a vector of one of them in shared memory: as it is, or widened once, with
  // the offset.
  static constexpr int kKeptBytes = N::kPlain ? 16 : kVectorSize<typename N::R> * static_cast<int>(sizeof(A));

  const void *weight, *bias;  // null: absent
  A offset;                   // is added to the weight
  int64_t lines;
  bool wide;

  // The line of a row. Wider divisions are slow.
  static bool can_divide(int64_t rows, int64_t lines) { return lines == 1 || rows < int64_t{1} << 31; }
  __device__ int64_t line(int64_t row) const {
    return N::kPlain || lines == 1 ? 0 : static_cast<uint32_t>(row) % static_cast<uint32_t>(lines);
  }
  // Moves both by `n` elements.
  __device__ void advance(int64_t n) { weight = address(weight, n), bias = address(bias, n); }
  __device__ const void *address(const void *from, int64_t n) const {
    if (kMayBeWide && wide) return static_cast<const float *>(from) + n;
    return static_cast<const T *>(from) + n;
  }
  // Element `n` of the weight, with the offset, and of the bias.
  __device__ A weight_at(int64_t n) const { return weight ? element(weight, n) + offset : A(1); }
  __device__ A bias_at(int64_t n) const { return bias ? element(bias, n) : A(0); }

 private:
  __device__ A element(const void *from, int64_t n) const {
    const void *p = address(from, n);
    return kMayBeWide && wide ? static_cast<A>(*static_cast<const float *>(p)) : widen(*static_cast<const T *>(p));
  }
};

// A vector's elements of a parameter as they are in memory.
template <class N>
struct ParameterVector {
  using T = typename N::T;
  using R = typename N::R;
  static constexpr bool kMayBeWide = NormParameters<N>::kMayBeWide;
  static constexpr int kSize = kVectorSize<R>, kPlanes = NormParameters<N>::kKeptBytes / 16;
  uint4 plane[kPlanes];

  // From `from`, or copies of `fallback`, which is 0 if `wide`.
  __device__ static ParameterVector load(const void *from, bool wide, bool present, float fallback) {
    ParameterVector p;
    const Vector<T> filler = filled<T>(fallback);
#pragma unroll
    for (uint4 &plane : p.plane) plane = reinterpret_cast<const uint4 &>(filler);
    // No branches, so that all loads of a thread are in flight at once.
    if constexpr (sizeof(T) == sizeof(R)) {
      if (present) p.plane[0] = *static_cast<const uint4 *>(from);
      if constexpr (kMayBeWide)
        if (present && wide) p.plane[1] = static_cast<const uint4 *>(from)[1];
    } else {
      uint2(&half)[2] = reinterpret_cast<uint2(&)[2]>(p.plane);
      if (present) half[0] = *static_cast<const uint2 *>(from);
      if (present && wide) half[1] = static_cast<const uint2 *>(from)[1];
    }
    return p;
  }
  // load() from an address that is not aligned.
  __device__ static ParameterVector load_elements(const void *from, bool wide, bool present, float fallback) {
    ParameterVector p;
    auto load = [&](auto type) {
      using E = decltype(type);
#pragma unroll
      for (int k = 0; k < kSize; ++k)
        reinterpret_cast<E(&)[kSize]>(p.plane)[k] = present ? static_cast<const E *>(from)[k] : E(fallback);
    };
    if (kMayBeWide && wide) load(float());
    else load(T());
    return p;
  }
  __device__ Widened<R> widened(bool wide) const {
    if (kMayBeWide && wide) return as_wide();
    return widen(reinterpret_cast<const VectorBeside<T, R> &>(plane));
  }
  // The parameters that kept() gave.
  __device__ Widened<R> widened_kept() const {
    if constexpr (N::kPlain) return widened(false);
    else return as_wide();
  }
  __device__ ParameterVector kept(bool wide, typename N::A offset) const {
    if constexpr (N::kPlain) return *this;
    auto x = widened(wide);
#pragma unroll
    for (int k = 0; k < kSize; ++k) x[k] += offset;
    return reinterpret_cast<const ParameterVector &>(x);
  }

 private:
  __device__ Widened<R> as_wide() const {
    Widened<R> x;
#pragma unroll
    for (int k = 0; k < kSize; ++k) x[k] = reinterpret_cast<const typename N::A(&)[kSize]>(plane)[k];
    return x;
  }
};

}  // namespace AOT_ISA
}  // namespace aot
