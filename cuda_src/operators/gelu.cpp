#include "gelu.h"

#include "cpu/entry.h"
#include "cpu/gelu.h"
#include "cpu/parallel.h"

namespace aot {
inline namespace AOT_ISA {

// --------------------------------------------------------------------------------------------------------- loops

template <template <typename> class Formula, typename T>
void gelu_loop(const T *x, T *y, int64_t n) {
  map(y, n, [=](int64_t i, auto part) {
    Vec<T> v = load(x + i, part);
    return Formula<T>(v).value(v);
  });
}

template <template <typename> class Formula, typename T>
void gelu_backward_loop(const T *dy, const T *x, T *dx, int64_t n) {
  map(dx, n, [=](int64_t i, auto part) {
    Vec<T> v = load(x + i, part);
    return load(dy + i, part) * Formula<T>(v).slope(v);
  });
}

// ----------------------------------------------------------------------------------------------------- launchers

inline Status gelu_cpu(const Gelu &op, const Tensor *in, const Tensor *out, void *) {
  return dispatch_floating(in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    auto *loop = op.tanh() ? gelu_loop<TanhGelu, T> : gelu_loop<ExactGelu, T>;
    loop(in[0].as<T>(), out[0].as<T>(), out[0].size());
    return kOk;
  });
}

inline Status gelu_backward_cpu(const GeluBackward &op, const Tensor *in, const Tensor *out, void *) {
  return dispatch_floating(in[1].dtype, [&](auto zero) {
    using T = decltype(zero);
    auto *loop = op.tanh() ? gelu_backward_loop<TanhGelu, T> : gelu_backward_loop<ExactGelu, T>;
    loop(in[0].as<T>(), in[1].as<T>(), out[0].as<T>(), out[0].size());
    return kOk;
  });
}

}  // namespace AOT_ISA
}  // namespace aot

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::Gelu, aot_gelu_cpu, aot::gelu_cpu)
AOT_CPU_ENTRY(aot::GeluBackward, aot_gelu_backward_cpu, aot::gelu_backward_cpu)
