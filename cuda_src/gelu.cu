#include "gelu.h"

#include "cuda/elementwise.cuh"
#include "cuda/math.cuh"

namespace aot {
inline namespace AOT_ISA {

// --------------------------------------------------------------------------------------------------------- formula

constexpr double kSqrtHalf = 0.7071067811865476;
constexpr double kDensityAtZero = 0.3989422804014327;  // 1 / sqrt(2 pi)
constexpr double kTanhScale = 0.7978845608028654, kTanhCubic = 0.044715;

// Phi, the normal distribution function, and its density.
template <typename A>
struct Normal {
  A distribution, density;
};

// Phi(-a) = exp(-a^2 / 2) * t * P(t) with t = 1 / (1 + p a), after Hastings (Abramowitz and Stegun 7.1.26). P is fitted
// to the least relative error for 0 <= a <= 7, which is 1.0e-5: a 40th of what rounding to float16 makes.
__device__ inline Normal<float> fast_normal(float x) {
  float t = fast_reciprocal(fmaf(fabsf(x), 0.36183059f, 1.0f));
  float e = fast_exp2(x * x * static_cast<float>(-kLog2E / 2));
  float p = fmaf(t, -0.09590505f, 0.24156349f);
  p = fmaf(t, p, 0.04949725f);
  p = fmaf(t, p, 0.16209002f);
  p = fmaf(t, p, 0.14274922f);
  float tail = p * t * e;
  return {x < 0 ? tail : 1 - tail, e * static_cast<float>(kDensityAtZero)};
}
__device__ inline Normal<float> normal(float x) {
  return {0.5f * (1 + erff(x * static_cast<float>(kSqrtHalf))),
          static_cast<float>(kDensityAtZero) * expf(-0.5f * x * x)};
}
__device__ inline Normal<double> normal(double x) {
  return {0.5 * (1 + erf(x * kSqrtHalf)), kDensityAtZero * exp(-0.5 * x * x)};
}

// T is what is read and written, A what is computed in. (1 + tanh(u)) / 2 is the logistic function of 2 u, which keeps
// its relative error where tanh comes near -1; and where that comes near 1, what it lacks is subtracted from x.
template <typename T, bool kTanh, typename A>
__device__ inline A gelu(A x) {
  constexpr bool kFast = sizeof(T) == 2;
  if constexpr (kTanh) {
    A u2 = x * (A(2 * kTanhScale) + A(2 * kTanhScale * kTanhCubic) * (x * x));
    if constexpr (kFast) {
      return x * sigmoid<T>(u2);
    } else {
      A tail = sigmoid_tail<T>(abs(u2));
      return x < 0 ? x * tail : tail == 0 ? x : x - x * tail;
    }
  } else {
    if constexpr (kFast) return x * fast_normal(x).distribution;
    else return x * normal(x).distribution;
  }
}

template <typename T, bool kTanh, typename A>
__device__ inline A gelu_slope(A x) {
  constexpr bool kFast = sizeof(T) == 2;
  if constexpr (kTanh) {
    A square = x * x;
    A u2 = x * (A(2 * kTanhScale) + A(2 * kTanhScale * kTanhCubic) * square);
    A du2 = A(2 * kTanhScale) + A(6 * kTanhScale * kTanhCubic) * square;
    if constexpr (kFast) {
      A s = sigmoid<T>(u2);
      return s + x * (s - s * s) * du2;
    } else {
      A tail = sigmoid_tail<T>(abs(u2));
      return (x < 0 ? tail : 1 - tail) + x * (tail - tail * tail) * du2;
    }
  } else {
    Normal<A> phi;
    if constexpr (kFast) phi = fast_normal(x);
    else phi = normal(x);
    return phi.distribution + x * phi.density;
  }
}

// --------------------------------------------------------------------------------------------------------- kernels

template <bool kTanh>
constexpr int kGeluVectors = kTanh ? 1 : 2;

template <typename T, bool kTanh>
__global__ void __launch_bounds__(kMapBlock) gelu_kernel(const T *x, T *y, int64_t n) {
  map<T, kGeluVectors<kTanh>>([](auto x) { return gelu<T, kTanh>(x); }, n, {y}, {x});
}

template <typename T, bool kTanh>
__global__ void __launch_bounds__(kMapBlock) gelu_backward_kernel(const T *dy, const T *x, T *dx, int64_t n) {
  map<T, 1>([](auto dy, auto x) { return dy * gelu_slope<T, kTanh>(x); }, n, {dx}, {dy, x});
}

// ------------------------------------------------------------------------------------------------------- launchers

Status gelu_cuda(const Gelu &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &x = in[0], &y = out[0];
  return dispatch(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    auto kernel = op.tanh() ? gelu_kernel<T, true> : gelu_kernel<T, false>;
    unsigned grid = (op.tanh() ? map_grid<T, kGeluVectors<true>> : map_grid<T, kGeluVectors<false>>)(x.size());
    kernel<<<grid, kMapBlock, 0, static_cast<cudaStream_t>(stream)>>>(x.as<const T>(), y.as<T>(), x.size());
    return check_launch(Gelu::name);
  });
}

Status gelu_backward_cuda(const GeluBackward &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &dy = in[0], &x = in[1], &dx = out[0];
  return dispatch(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    auto kernel = op.tanh() ? gelu_backward_kernel<T, true> : gelu_backward_kernel<T, false>;
    kernel<<<map_grid<T, 1>(x.size()), kMapBlock, 0, static_cast<cudaStream_t>(stream)>>>(
        dy.as<const T>(), x.as<const T>(), dx.as<T>(), x.size());
    return check_launch(GeluBackward::name);
  });
}

}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(Gelu, aot_gelu_cuda, gelu_cuda)
AOT_ENTRY(GeluBackward, aot_gelu_backward_cuda, gelu_backward_cuda)
