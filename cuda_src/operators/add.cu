#include "add.h"

#include "cuda/elementwise.cuh"

namespace aot {
inline namespace AOT_ISA {

// --------------------------------------------------------------------------------------------------------- kernels

template <typename T>
__global__ void __launch_bounds__(kMapBlock) add_kernel(const T *a, const T *b, T *y, int64_t n) {
  map<T, 1>([](auto a, auto b) { return a + b; }, n, {y}, {a, b});
}

// ------------------------------------------------------------------------------------------------------- launchers

Status add_cuda(const Add &, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &a = in[0], &b = in[1], &y = out[0];
  return dispatch(y.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    add_kernel<T><<<map_grid<T, 1>(y.size()), kMapBlock, 0, static_cast<cudaStream_t>(stream)>>>(
        a.as<const T>(), b.as<const T>(), y.as<T>(), y.size());
    return check_launch(Add::name);
  });
}

}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(Add, aot_add_cuda, add_cuda)
