#include "linear_cross_entropy_lse.h"

#include "cpu/entry.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

Status linear_cross_entropy_lse_cpu(const LinearCrossEntropyLse &op, const Tensor *in, const Tensor *out,
                                    void *stream) {
  const LseTensors rows = {out[op.kLse], Tensor()};
  return linear_cross_entropy_forward(op.name, op, in, out[op.kY], out + op.kSlopes, rows, stream);
}

Status linear_cross_entropy_lse_backward_cpu(const LinearCrossEntropyLseBackward &op, const Tensor *in,
                                             const Tensor *out, void *stream) {
  const LseTensors rows = {Tensor(), in[op.kDlse]};
  return linear_cross_entropy_gradients(op.name, op, in[op.kDy], in + op.kGiven, out, rows, stream);
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::LinearCrossEntropyLse, aot_linear_cross_entropy_lse_cpu, aot::linear_cross_entropy_lse_cpu)
AOT_CPU_ENTRY(aot::LinearCrossEntropyLseBackward, aot_linear_cross_entropy_lse_backward_cpu,
              aot::linear_cross_entropy_lse_backward_cpu)
