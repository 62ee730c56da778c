#include "cross_entropy_lse.h"

#include "cross_entropy_rows.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

// ------------------------------------------------------------------------------------------------------- launchers

Status cross_entropy_lse_cuda(const CrossEntropyLse &op, const Tensor *in, const Tensor *out, void *stream) {
  return dispatch(in[op.kX].dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    Extras<T> extras(op, in[op.kWeight]);
    extras.lse = out[op.kLse].template as<Accumulate<T>>(), extras.predictions = Indices(out[op.kPredictions]);
    T *const no_slope = nullptr;
    return cross_entropy_forward(op, in, out[op.kY], out[op.kWork], no_slope, extras, cross_entropy_extra_rows<T>,
                                 stream);
  });
}

Status cross_entropy_lse_backward_cuda(const CrossEntropyLseBackward &op, const Tensor *in, const Tensor *out,
                                       void *stream) {
  return dispatch(in[op.kX].dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    Extras<T> extras(op, in[op.kWeight]);
    extras.dlse = in[op.kDlse].template as<const Accumulate<T>>();
    return cross_entropy_backward(op, in, out[op.kDx].template as<T>(), out[op.kWork], extras,
                                  cross_entropy_extra_rows<T>, stream);
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(CrossEntropyLse, aot_cross_entropy_lse_cuda, cross_entropy_lse_cuda)
AOT_ENTRY(CrossEntropyLseBackward, aot_cross_entropy_lse_backward_cuda, cross_entropy_lse_backward_cuda)
