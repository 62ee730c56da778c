#include "scale.h"

#include "cpu/entry.h"
#include "cpu/parallel.h"

namespace aot {
inline namespace AOT_ISA {

// --------------------------------------------------------------------------------------------------------- loops

template <typename T>
void scale_loop(const T *x, T *y, int64_t n, double factor) {
  const Vec<T> times = Vec<T>{} + static_cast<Accumulate<T>>(factor);
  map(y, n, [=](int64_t i, auto part) { return load(x + i, part) * times; });
}

// ----------------------------------------------------------------------------------------------------- launchers

// Both operators have one formula.
template <class Op>
Status scale_cpu(const Op &op, const Tensor *in, const Tensor *out, void *) {
  return dispatch_floating(in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    scale_loop(in[0].as<T>(), out[0].as<T>(), out[0].size(), op.factor);
    return kOk;
  });
}

}  // namespace AOT_ISA
}  // namespace aot

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::Scale, aot_scale_cpu, aot::scale_cpu)
AOT_CPU_ENTRY(aot::ScaleBackward, aot_scale_backward_cpu, aot::scale_cpu)
