#include "swiglu.h"

#include "cpu/entry.h"
#include "cpu/math.h"
#include "cpu/parallel.h"

namespace aot {
inline namespace AOT_ISA {

// --------------------------------------------------------------------------------------------------------- loops

template <typename T>
void swiglu_loop(const T *gate, const T *up, T *y, int64_t n) {
  map(y, n, [=](int64_t i, auto part) {
    Vec<T> g = load(gate + i, part);
    return g * Logistic<T>(g).value * load(up + i, part);
  });
}

template <typename T>
void swiglu_backward_loop(const T *dy, const T *gate, const T *up, T *dgate, T *dup, int64_t n) {
  each(dgate, n, alike(dgate, dup), [=](int64_t i, auto part) {
    Vec<T> d = load(dy + i, part), g = load(gate + i, part);
    const Logistic<T> s(g);
    store(dgate + i, d * load(up + i, part) * (s.value + g * s.slope()), part);
    store(dup + i, d * (g * s.value), part);
  });
}

// ----------------------------------------------------------------------------------------------------- launchers

inline Status swiglu_cpu(const Swiglu &, const Tensor *in, const Tensor *out, void *) {
  return dispatch_floating(in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    swiglu_loop(in[0].as<T>(), in[1].as<T>(), out[0].as<T>(), out[0].size());
    return kOk;
  });
}

inline Status swiglu_backward_cpu(const SwigluBackward &, const Tensor *in, const Tensor *out, void *) {
  return dispatch_floating(in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    swiglu_backward_loop(in[0].as<T>(), in[1].as<T>(), in[2].as<T>(), out[0].as<T>(), out[1].as<T>(), in[0].size());
    return kOk;
  });
}

}  // namespace AOT_ISA
}  // namespace aot

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::Swiglu, aot_swiglu_cpu, aot::swiglu_cpu)
AOT_CPU_ENTRY(aot::SwigluBackward, aot_swiglu_backward_cpu, aot::swiglu_backward_cpu)
