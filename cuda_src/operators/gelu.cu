#include "gelu.h"

#include "cuda/elementwise.cuh"
#include "cuda/gelu.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

// --------------------------------------------------------------------------------------------------------- kernels

// Without approximation it is bound by computation, and a thread has two vectors; few elements would wait for the
// second.
template <bool kTanh, bool kFew>
constexpr int kGeluVectors = kTanh || kFew ? 1 : 2;

template <typename T, bool kTanh, bool kFew>
__global__ void __launch_bounds__(kMapBlock) gelu_kernel(const T *x, T *y, int64_t n) {
  begin_map<kFew>();
  map<T, kGeluVectors<kTanh, kFew>>([](auto x) { return gelu<T, kTanh>(x); }, n, {y}, {x});
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
    const int64_t n = x.size();
    auto launch = [&](auto tanh, auto is_few) {
      constexpr bool kTanh = tanh.value, kFew = is_few.value;
      const LaunchShape shape = {map_grid<T, kGeluVectors<kTanh, kFew>>(n), kMapBlock, 0, 1, kFew};
      return launch_kernel(Gelu::name, gelu_kernel<T, kTanh, kFew>, shape, stream, x.as<const T>(), y.as<T>(), n);
    };
    constexpr std::true_type kYes;
    constexpr std::false_type kNo;
    if (op.tanh()) return launch(kYes, kNo);
    if constexpr (kHasFew<T>)
      if (overlaps(map_grid<T, 1>(n))) return launch(kNo, kYes);
    return launch(kNo, kNo);
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

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(Gelu, aot_gelu_cuda, gelu_cuda)
AOT_ENTRY(GeluBackward, aot_gelu_backward_cuda, gelu_backward_cuda)
