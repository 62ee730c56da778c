#include "cross_entropy.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

// ------------------------------------------------------------------------------------------------------- launchers

Status cross_entropy_cuda(const CrossEntropy &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &x = in[op.kX], &loss = out[op.kY], &slope = out[op.kSlope], &work = out[op.kWork];
  if (op.reduces() && !work) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  return dispatch(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    const int64_t rows = op.rows(x);
    Targets targets(in[op.kTarget], op.ignore_index);
    A *count = op.keeps(slope) && op.divides_slope(x) ? work.as<A>() : nullptr;
    A *losses = op.reduces() ? work.as<A>() + op.kLosses : nullptr;
    if (count && rows) AOT_TRY(cross_entropy_count(op.name, targets, count, rows, stream));
    Results<T, A> results = {op.reduces() ? Loss<T>() : Loss<T>(loss), losses,
                             op.keeps(slope) ? slope.as<T>() : nullptr};
    AOT_TRY((cross_entropy_rows<T>(op.name, op, x, targets, results, Scale<T, A>{{}, false, count}, stream)));
    if (!op.reduces()) return kOk;
    return cross_entropy_loss(op, losses, Loss<T>(loss), rows, stream);
  });
}

Status cross_entropy_backward_cuda(const CrossEntropyBackward &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &dy = in[op.kDy], &x = in[op.kX], &slope = in[op.kSlope], &dx = out[op.kDx], &work = out[op.kWork];
  const bool keeps = op.keeps(slope), divide = op.mean() && !(keeps && op.divides_slope(x));
  if (divide && !work) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  return dispatch(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    Targets targets(in[op.kTarget], op.ignore_index);
    A *count = divide ? work.as<A>() : nullptr;
    if (divide) AOT_TRY(cross_entropy_count(op.name, targets, count, op.rows(x), stream));
    Scale<T, A> scale = {Loss<T>(dy), !op.reduces(), count};
    if (keeps) return cross_entropy_scale(op.name, op, slope, dx.as<T>(), targets, scale, stream);
    return cross_entropy_rows(op.name, op, x, targets, Results<T, A>{{}, nullptr, dx.as<T>()}, scale, stream);
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(CrossEntropy, aot_cross_entropy_cuda, cross_entropy_cuda)
AOT_ENTRY(CrossEntropyBackward, aot_cross_entropy_backward_cuda, cross_entropy_backward_cuda)
