#include "add.h"

#include "cuda/elementwise.cuh"

namespace aot {
inline namespace AOT_ISA {

// --------------------------------------------------------------------------------------------------------- kernels

template <typename T, bool kFew>
__global__ void __launch_bounds__(kMapBlock) add_kernel(const T *a, const T *b, T *y, int64_t n) {
  map<T, 1, false, kFew>([](auto a, auto b) { return a + b; }, n, {y}, {a, b});
}

template <typename T>
__global__ void __launch_bounds__(kMapBlock)
    add_scaled_kernel(const T *a, const T *b, Accumulate<T> alpha, T *y, int64_t n) {
  map<T, 1>([=](auto a, auto b) { return a + alpha * b; }, n, {y}, {a, b});
}

template <typename T>
__global__ void __launch_bounds__(kMapBlock) add_number_kernel(const T *a, Accumulate<T> number, T *y, int64_t n) {
  map<T, 1>([=](auto a) { return a + number; }, n, {y}, {a});
}

// ------------------------------------------------------------------------------------------------------- launchers

Status add_cuda(const Add &op, const Tensor *in, const Tensor *out, void *stream) {
  return dispatch(out[0].dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T *a = in[0].as<const T>(), *b = in[1].as<const T>();
    T *y = out[0].as<T>();
    const int64_t n = out[0].size();
    const unsigned grid = map_grid<T, 1>(n);
    const auto s = static_cast<cudaStream_t>(stream);
    if (!b) add_number_kernel<T><<<grid, kMapBlock, 0, s>>>(a, static_cast<Accumulate<T>>(op.addend()), y, n);
    else if (op.alpha == 1)
      return launch_map<T>(Add::name, add_kernel<T, kHasFew<T>>, add_kernel<T, false>, grid, stream, a, b, y, n);
    else add_scaled_kernel<T><<<grid, kMapBlock, 0, s>>>(a, b, static_cast<Accumulate<T>>(op.alpha), y, n);
    return check_launch(Add::name);
  });
}

}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(Add, aot_add_cuda, add_cuda)
