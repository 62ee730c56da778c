#include "cross_entropy_cpu.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// ----------------------------------------------------------------------------------------------------- launchers

Status cross_entropy_cpu(const CrossEntropy &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &x = in[op.kX], &loss = out[op.kY], &slope = out[op.kSlope], &work = out[op.kWork];
  if (op.reduces() && !work) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  const int64_t rows = op.rows(x), cols = op.cols(x);
  const Targets targets{in[op.kTarget], op.ignore_index};
  AOT_TRY(targets.check(op.name, rows, cols));
  return dispatch_floating(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    using A = Accumulate<T>;
    const Loss<T> result(loss);
    A *losses = op.reduces() ? work.as<A>() + op.kLosses : nullptr;
    auto write_loss = [=](int64_t i, double value) {
      losses ? void(losses[i] = static_cast<A>(value)) : result.write(i, static_cast<A>(value));
    };
    const auto count = static_cast<A>(op.mean() ? targets.count(rows) : 1);
    const A scale = op.divides_slope(x) ? 1 / count : A(1);
    cross_entropy_loop(x.as<const T>(), targets, op.keeps(slope) ? slope.as<T>() : nullptr, rows, cols,
                       op.label_smoothing, write_loss, [=](int64_t) { return scale; });
    if (!op.reduces()) return kOk;
    double sum = 0;
    for (int64_t i = 0; i < rows; ++i) sum += losses[i];
    result.write(0, static_cast<A>(sum / count));
    return kOk;
  });
}

Status cross_entropy_backward_cpu(const CrossEntropyBackward &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &dy = in[op.kDy], &x = in[op.kX], &slope = in[op.kSlope], &dx = out[op.kDx];
  const int64_t rows = op.rows(x), cols = op.cols(x);
  const Targets targets{in[op.kTarget], op.ignore_index};
  AOT_TRY(targets.check(op.name, rows, cols));
  return dispatch_floating(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    using A = Accumulate<T>;
    const bool keeps = op.keeps(slope), divide = op.mean() && !(keeps && op.divides_slope(x));
    const bool each_row = !op.reduces();
    const A count = divide ? static_cast<A>(targets.count(rows)) : A(1);
    auto scale = [=, from = Loss<T>(dy)](int64_t i) { return from.read(each_row ? i : 0) / count; };
    // 0 for an ignored row, also if dy is not finite or the count is 0
    auto factor = [=](int64_t i) { return targets.ignored(i) ? A(0) : scale(i); };
    if (keeps) return scale_loop(slope.as<const T>(), dx.as<T>(), rows, cols, factor), kOk;
    cross_entropy_loop(
        x.as<const T>(), targets, dx.as<T>(), rows, cols, op.label_smoothing, [](int64_t, double) {}, scale);
    return kOk;
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::CrossEntropy, aot_cross_entropy_cpu, aot::cross_entropy_cpu)
AOT_CPU_ENTRY(aot::CrossEntropyBackward, aot_cross_entropy_backward_cpu, aot::cross_entropy_backward_cpu)
