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
  map<T, kGeluVectors<kTanh, kFew>, false, kFew>([](auto x) { return gelu<T, kTanh>(x); }, n, {y}, {x});
}

template <typename T, bool kTanh, bool kFew>
__global__ void __launch_bounds__(kMapBlock) gelu_backward_kernel(const T *dy, const T *x, T *dx, int64_t n) {
  map<T, 1, false, kFew>([](auto dy, auto x) { return dy * gelu_slope<T, kTanh>(x); }, n, {dx}, {dy, x});
}

// ------------------------------------------------------------------------------------------------------- launchers

template <typename T, bool kTanh>
Status run_gelu(const T *x, T *y, int64_t n, void *stream) {
  const bool is_few = kHasFew<T> && overlaps(map_grid<T, 1>(n));
  auto *kernel = is_few ? gelu_kernel<T, kTanh, kHasFew<T>> : gelu_kernel<T, kTanh, false>;
  const unsigned grid = is_few ? map_grid<T, kGeluVectors<kTanh, true>>(n) : map_grid<T, kGeluVectors<kTanh, false>>(n);
  return launch_kernel(Gelu::name, kernel, {grid, kMapBlock, 0, 1, is_few}, stream, x, y, n);
}

Status gelu_cuda(const Gelu &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &x = in[0], &y = out[0];
  return dispatch(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    auto *run = op.tanh() ? run_gelu<T, true> : run_gelu<T, false>;
    return run(x.as<const T>(), y.as<T>(), x.size(), stream);
  });
}

Status gelu_backward_cuda(const GeluBackward &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &dy = in[0], &x = in[1], &dx = out[0];
  return dispatch(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    auto launch = [&](auto tanh) {
      constexpr bool kTanh = tanh.value;
      return launch_map<T>(GeluBackward::name, gelu_backward_kernel<T, kTanh, kHasFew<T>>,
                           gelu_backward_kernel<T, kTanh, false>, map_grid<T, 1>(x.size()), stream, dy.as<const T>(),
                           x.as<const T>(), dx.as<T>(), x.size());
    };
    return op.tanh() ? launch(std::true_type()) : launch(std::false_type());
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(Gelu, aot_gelu_cuda, gelu_cuda)
AOT_ENTRY(GeluBackward, aot_gelu_backward_cuda, gelu_backward_cuda)
