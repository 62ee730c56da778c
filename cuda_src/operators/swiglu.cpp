#include "swiglu.h"

#include "cpu/entry.h"
#include "cpu/math.h"
#include "cpu/parallel.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// --------------------------------------------------------------------------------------------------------- loops

template <typename T>
void swiglu_loop(const T *gate, const T *up, T *y, int64_t n) {
  map(y, n, [=](int64_t i, auto part) {
    Vec<T> g = load(gate + i, part);
    return Logistic<T>(g).times(g, load(up + i, part));
  });
}

template <typename T>
void swiglu_backward_loop(const T *dy, const T *gate, const T *up, T *dgate, T *dup, int64_t n) {
  each(dgate, n, same_alignment(dgate, dup), [=](int64_t i, auto part) {
    Vec<T> d = load(dy + i, part), g = load(gate + i, part);
    const Logistic<T> s(g);
    store(dgate + i, s.silu_gradient(d * load(up + i, part), g), part);
    store(dup + i, s.times(g, d), part);
  });
}

// ----------------------------------------------------------------------------------------------------- launchers

Status swiglu_cpu(const Swiglu &, const Tensor *in, const Tensor *out, void *) {
  const Tensor &gate = in[0], &up = in[1], &y = out[0];
  return dispatch_floating(gate.dtype, [&](auto zero) {
    using T = decltype(zero);
    swiglu_loop(gate.as<T>(), up.as<T>(), y.as<T>(), gate.size());
    return kOk;
  });
}

Status swiglu_backward_cpu(const SwigluBackward &, const Tensor *in, const Tensor *out, void *) {
  const Tensor &dy = in[0], &gate = in[1], &up = in[2], &dgate = out[0], &dup = out[1];
  return dispatch_floating(gate.dtype, [&](auto zero) {
    using T = decltype(zero);
    swiglu_backward_loop(dy.as<T>(), gate.as<T>(), up.as<T>(), dgate.as<T>(), dup.as<T>(), gate.size());
    return kOk;
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::Swiglu, aot_swiglu_cpu, aot::swiglu_cpu)
AOT_CPU_ENTRY(aot::SwigluBackward, aot_swiglu_backward_cpu, aot::swiglu_backward_cpu)
