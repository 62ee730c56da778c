#include "cross_entropy_lse.h"
#include "cross_entropy_cpu.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// ----------------------------------------------------------------------------------------------------- launchers

Status cross_entropy_lse_cpu(const CrossEntropyLse &op, const Tensor *in, const Tensor *out, void *) {
  return dispatch_floating(in[op.kX].dtype, [&](auto zero) {
    using T = decltype(zero);
    Extras<T> extras(op, in[op.kWeight]);
    extras.lse = out[op.kLse].as<Accumulate<T>>(), extras.predictions = out[op.kPredictions];
    return cross_entropy_forward(op, in, out[op.kY], out[op.kWork], static_cast<T *>(nullptr), extras);
  });
}

Status cross_entropy_lse_backward_cpu(const CrossEntropyLseBackward &op, const Tensor *in, const Tensor *out, void *) {
  return dispatch_floating(in[op.kX].dtype, [&](auto zero) {
    using T = decltype(zero);
    Extras<T> extras(op, in[op.kWeight]);
    extras.dlse = in[op.kDlse].as<const Accumulate<T>>();
    return cross_entropy_backward(op, in, Tensor(), out[op.kDx].as<T>(), extras);
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::CrossEntropyLse, aot_cross_entropy_lse_cpu, aot::cross_entropy_lse_cpu)
AOT_CPU_ENTRY(aot::CrossEntropyLseBackward, aot_cross_entropy_lse_backward_cpu, aot::cross_entropy_lse_backward_cpu)
