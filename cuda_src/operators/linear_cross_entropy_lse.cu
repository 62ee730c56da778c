#include "linear_cross_entropy_lse.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

Status linear_cross_entropy_lse_cuda(const LinearCrossEntropyLse &op, const Tensor *in, const Tensor *out,
                                     void *stream) {
  const LseTensors rows = {out[op.kLse], Tensor()};
  return linear_cross_entropy_forward(op.name, op, in, out[op.kY], out + op.kSlopes, rows, stream);
}

Status linear_cross_entropy_lse_backward_cuda(const LinearCrossEntropyLseBackward &op, const Tensor *in,
                                              const Tensor *out, void *stream) {
  const LseTensors rows = {Tensor(), in[op.kDlse]};
  return linear_cross_entropy_gradients(op.name, op, in[op.kDy], in + op.kGiven, out, rows, stream);
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(LinearCrossEntropyLse, aot_linear_cross_entropy_lse_cuda, linear_cross_entropy_lse_cuda)
AOT_ENTRY(LinearCrossEntropyLseBackward, aot_linear_cross_entropy_lse_backward_cuda,
          linear_cross_entropy_lse_backward_cuda)
