#include "cross_entropy.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

// ------------------------------------------------------------------------------------------------------- launchers

Status cross_entropy_cuda(const CrossEntropy &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &x = in[op.kX], &slope = out[op.kSlope];
  return dispatch(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    T *kept = op.keeps(slope) ? slope.as<T>() : nullptr;
    const Extras<T> extras(op, in[op.kWeight]);
    return cross_entropy_forward(op, in, out[op.kY], out[op.kWork], kept, extras, stream);
  });
}

Status cross_entropy_backward_cuda(const CrossEntropyBackward &op, const Tensor *in, const Tensor *out, void *stream) {
  return dispatch(in[op.kX].dtype, [&](auto type) {
    const Extras<typename decltype(type)::type> extras(op, in[op.kWeight]);
    return cross_entropy_backward(op, in, in[op.kSlope], out[op.kDx], out[op.kWork], extras, stream);
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(CrossEntropy, aot_cross_entropy_cuda, cross_entropy_cuda)
AOT_ENTRY(CrossEntropyBackward, aot_cross_entropy_backward_cuda, cross_entropy_backward_cuda)
