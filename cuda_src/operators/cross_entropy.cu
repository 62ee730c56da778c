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
    return cross_entropy_forward(op, in, out[op.kY], out[op.kWork], kept, extras, cross_entropy_rows<T>, stream);
  });
}

Status cross_entropy_backward_cuda(const CrossEntropyBackward &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &x = in[op.kX], &slope = in[op.kSlope], &dx = out[op.kDx], &work = out[op.kWork];
  return dispatch(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Extras<T> extras(op, in[op.kWeight]);
    if (!op.keeps(slope))
      return cross_entropy_backward(op, in, dx.as<T>(), work, extras, cross_entropy_rows<T>, stream);
    Scale<T, Accumulate<T>> scale;
    AOT_TRY(backward_scale(op, in, work, op.mean() && !op.divides_slope(x), extras, &scale, stream));
    const Targets targets(in[op.kTarget], op.ignore_index);
    return cross_entropy_scale(op.name, op, slope, dx.as<T>(), targets, scale, stream);
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(CrossEntropy, aot_cross_entropy_cuda, cross_entropy_cuda)
AOT_ENTRY(CrossEntropyBackward, aot_cross_entropy_backward_cuda, cross_entropy_backward_cuda)
