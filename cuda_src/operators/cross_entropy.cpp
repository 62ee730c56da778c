#include "cross_entropy_cpu.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// ----------------------------------------------------------------------------------------------------- launchers

Status cross_entropy_cpu(const CrossEntropy &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &slope = out[op.kSlope];
  return dispatch_floating(in[op.kX].dtype, [&](auto zero) {
    using T = decltype(zero);
    T *kept = op.keeps(slope) ? slope.as<T>() : nullptr;
    return cross_entropy_forward(op, in, out[op.kY], out[op.kWork], kept, Extras<T>(op, in[op.kWeight]));
  });
}

Status cross_entropy_backward_cpu(const CrossEntropyBackward &op, const Tensor *in, const Tensor *out, void *) {
  return dispatch_floating(in[op.kX].dtype, [&](auto zero) {
    using T = decltype(zero);
    return cross_entropy_backward(op, in, in[op.kSlope], out[op.kDx].as<T>(), Extras<T>(op, in[op.kWeight]));
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::CrossEntropy, aot_cross_entropy_cpu, aot::cross_entropy_cpu)
AOT_CPU_ENTRY(aot::CrossEntropyBackward, aot_cross_entropy_backward_cpu, aot::cross_entropy_backward_cpu)
