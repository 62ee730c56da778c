#include "scale.h"

#include "cuda/elementwise.cuh"

namespace aot {
inline namespace AOT_ISA {

// --------------------------------------------------------------------------------------------------------- kernels

template <typename T>
__global__ void __launch_bounds__(kMapBlock) scale_kernel(const T *x, T *y, int64_t n, Accumulate<T> factor) {
  map<T, 1>([=](auto x) { return x * factor; }, n, {y}, {x});
}

// ------------------------------------------------------------------------------------------------------- launchers

// Both operators have one formula.
template <class Op>
Status scale_cuda(const Op &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &x = in[0], &y = out[0];
  return dispatch(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    scale_kernel<T><<<map_grid<T, 1>(x.size()), kMapBlock, 0, static_cast<cudaStream_t>(stream)>>>(
        x.as<const T>(), y.as<T>(), x.size(), static_cast<Accumulate<T>>(op.factor));
    return check_launch(Op::name);
  });
}

}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(Scale, aot_scale_cuda, scale_cuda)
AOT_ENTRY(ScaleBackward, aot_scale_backward_cuda, scale_cuda)
