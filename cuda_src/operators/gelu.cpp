#include "gelu.h"

#include "cpu/entry.h"
#include "cpu/gelu.h"
#include "cpu/parallel.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// --------------------------------------------------------------------------------------------------------- loops

template <template <typename> class Formula, typename T>
void gelu_loop(const T *x, T *y, int64_t n) {
  map(y, n, [=](int64_t i, auto part) AOT_INLINED {
    Vec<T> v = load(x + i, part);
    return Formula<T>(v).value(v);
  });
}

template <template <typename> class Formula, typename T>
void gelu_backward_loop(const T *dy, const T *x, T *dx, int64_t n) {
  map(dx, n, [=](int64_t i, auto part) AOT_INLINED {
    Vec<T> v = load(x + i, part);
    return Formula<T>(v).gradient(load(dy + i, part), v);
  });
}

// ----------------------------------------------------------------------------------------------------- launchers

Status gelu_cpu(const Gelu &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &x = in[0], &y = out[0];
  return dispatch_floating(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto *loop = op.tanh() ? gelu_loop<TanhGelu, T> : gelu_loop<ExactGelu, T>;
    loop(x.as<T>(), y.as<T>(), x.size());
    return kOk;
  });
}

Status gelu_backward_cpu(const GeluBackward &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &dy = in[0], &x = in[1], &dx = out[0];
  return dispatch_floating(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto *loop = op.tanh() ? gelu_backward_loop<TanhGelu, T> : gelu_backward_loop<ExactGelu, T>;
    loop(dy.as<T>(), x.as<T>(), dx.as<T>(), x.size());
    return kOk;
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::Gelu, aot_gelu_cpu, aot::gelu_cpu)
AOT_CPU_ENTRY(aot::GeluBackward, aot_gelu_backward_cpu, aot::gelu_backward_cpu)
