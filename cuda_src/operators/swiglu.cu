#include "swiglu.h"

#include "cuda/elementwise.cuh"
#include "cuda/math.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

// --------------------------------------------------------------------------------------------------------- kernels

template <typename T, bool kFew>
__global__ void __launch_bounds__(kMapBlock) swiglu_kernel(const T *gate, const T *up, T *y, int64_t n) {
  map<T, 1, false, kFew>([](auto gate, auto up) { return gate * sigmoid<T>(gate) * up; }, n, {y}, {gate, up});
}

template <typename T, typename A>
__device__ inline Elements<A, 2> swiglu_gradient(A dy, A gate, A up) {
  Logistic<A> s = logistic<T>(gate);
  return {{dy * up * (s.value + gate * s.slope), dy * (gate * s.value)}};
}

template <typename T, bool kFew>
__global__ void __launch_bounds__(kMapBlock)
    swiglu_backward_kernel(const T *dy, const T *gate, const T *up, T *dgate, T *dup, int64_t n) {
  map<T, 1, true, kFew>([](auto dy, auto gate, auto up) { return swiglu_gradient<T>(dy, gate, up); }, n, {dgate, dup},
                        {dy, gate, up});
}

// ------------------------------------------------------------------------------------------------------- launchers

Status swiglu_cuda(const Swiglu &, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &gate = in[0], &up = in[1], &y = out[0];
  return dispatch(y.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return launch_map<T>(Swiglu::name, swiglu_kernel<T, kHasFew<T>>, swiglu_kernel<T, false>, map_grid<T, 1>(y.size()),
                         stream, gate.as<const T>(), up.as<const T>(), y.as<T>(), y.size());
  });
}

Status swiglu_backward_cuda(const SwigluBackward &, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &dy = in[0], &gate = in[1], &up = in[2], &dgate = out[0], &dup = out[1];
  return dispatch(dy.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return launch_map<T>(SwigluBackward::name, swiglu_backward_kernel<T, kHasFew<T>>, swiglu_backward_kernel<T, false>,
                         map_grid<T, 1>(dy.size()), stream, dy.as<const T>(), gate.as<const T>(), up.as<const T>(),
                         dgate.as<T>(), dup.as<T>(), dy.size());
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(Swiglu, aot_swiglu_cuda, swiglu_cuda)
AOT_ENTRY(SwigluBackward, aot_swiglu_backward_cuda, swiglu_backward_cuda)
