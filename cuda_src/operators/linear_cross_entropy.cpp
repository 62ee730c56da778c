#include "linear_cross_entropy.h"

#include "cross_entropy_cpu.h"
#include "gemm/gemm_cpu.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// --------------------------------------------------------------------------------------------------------- loops

template <typename T>
struct BiasEpilogue {
  const T *bias;

  template <class P>
  Vec<T> operator()(Vec<T> sum, int64_t, int64_t j, P part) const {
    return bias ? sum + load(bias + j, part) : sum;
  }
};

// sum[j] = the sum of column j of x (rows, n); with `adds` it is added.
template <typename T>
void sum_columns(const T *x, int64_t rows, int64_t n, Accumulate<T> *sum, bool adds) {
  const int64_t columns = ceil_div(kGrain, (rows + 1) * kLanes<T>) * kLanes<T>;
  parallel_pieces(n, columns, [=](int64_t begin, int64_t end) {
    sweep<T>(end - begin, [=](int64_t j, auto part) {
      typename VectorOf<double, kLanes<T>>::type all{};
      for (int64_t i = 0; i < rows; ++i)
        all += __builtin_convertvector(load(x + i * n + begin + j, part), decltype(all));
      const Vec<T> total = __builtin_convertvector(all, Vec<T>);
      Accumulate<T> *to = sum + begin + j;
      store(to, adds ? load(to, part) + total : total, part);
    });
  });
}

// gradient = slope * factor, but 0 where slope is.
template <typename T, typename S>
void scale_slope(const S *slope, T *gradient, int64_t n, Accumulate<T> factor) {
  if (factor == 1 && static_cast<const void *>(slope) == gradient) return;
  map(gradient, n, [=](int64_t i, auto part) {
    const Vec<T> v = load(slope + i, part);
    return v == 0 ? v : v * factor;
  });
}

// The sums over the chunks, each unless it is null.
template <typename T>
struct ChunkGradients {
  T *dx;
  Accumulate<T> *dweight, *dbias;

  explicit operator bool() const { return dx || dweight || dbias; }
};

template <typename T>
double sum_of_weights(const Targets &targets, int64_t rows, const Extras<T> &extras) {
  return targets.sum(rows, [&](int64_t target) { return extras.weight_of(target); });
}

template <typename T>
Extras<T> extras_of(const LinearCrossEntropyAttrs &op, const Tensor *in, const LseTensors &rows) {
  Extras<T> extras(op, in[op.kClassWeight]);
  extras.lse = rows.lse.as<Accumulate<T>>(), extras.dlse = rows.dlse.as<const Accumulate<T>>();
  return extras;
}

// Calls write_loss(row, loss) for each row. Gradients are those of the losses times scale(row).
template <typename T, class WriteLoss, class Scale>
Status each_chunk(const LogitChunks &c, const Tensor *in, const LinearCrossEntropyAttrs &attrs,
                  const LseTensors &rows_of, T *logits, const ChunkGradients<T> &gradients, WriteLoss write_loss,
                  Scale scale) {
  using Op = LinearCrossEntropyAttrs;
  const T *x = in[0].as<const T>(), *weight = in[1].as<const T>();
  const BiasEpilogue<T> epilogue{in[Op::kBias].as<const T>()};
  for (int64_t first = 0, chunk = 0; chunk < c.count(); ++chunk, first += c.chunk) {
    const int64_t rows = std::min(c.chunk, c.rows - first);
    const bool adds = first > 0;
    const Matrix<T> part{x + first * c.in, c.in}, of_weight{weight, c.in};
    AOT_TRY(gemm(rows, c.out, c.in, part, Matrix<T>{weight, c.in, true}, logits, c.out, false, epilogue));
    Tensor target = in[Op::kTarget];
    target.data = target.as<char>() + first * itemsize(target.dtype);
    cross_entropy_loop(
        logits, Targets{target, attrs.ignore_index}, extras_of<T>(attrs, in, rows_of.from(first)),
        gradients ? logits : nullptr, rows, c.out, attrs.label_smoothing,
        [=](int64_t i, double loss) { write_loss(first + i, loss); }, [=](int64_t i) { return scale(first + i); });
    if (gradients.dx)
      AOT_TRY(gemm(rows, c.in, c.out, Matrix<T>{logits, c.out}, of_weight, gradients.dx + first * c.in, c.in));
    if (gradients.dweight)
      AOT_TRY(gemm(c.out, c.in, rows, Matrix<T>{logits, c.out, true}, part, gradients.dweight, c.in, adds));
    if (gradients.dbias) sum_columns(logits, rows, c.out, gradients.dbias, adds);
  }
  return kOk;
}

// ----------------------------------------------------------------------------------------------------- launchers

}  // namespace

Status linear_cross_entropy_forward(const char *name, const LinearCrossEntropyAttrs &op, const Tensor *in,
                                    const Tensor &y, const Tensor *results, const LseTensors &rows, void *) {
  const Tensor &x = in[op.kX], &work = results[op.kWork];
  if (!work) return fail(kConventionMisused, "%s: workspace is missing", name);
  const LogitChunks c(x, in[op.kWeight]);
  const ChunkWorkspace parts = op.forward_parts(in);
  const Targets targets{in[op.kTarget], op.ignore_index};
  AOT_TRY(targets.check(name, c.rows, c.out));
  return dispatch_floating(x.dtype, [&](auto zero) -> Status {
    using T = decltype(zero);
    using A = Accumulate<T>;
    const Loss<T> result(y);
    A *losses = op.reduces() ? work.as<A>() + parts.losses : nullptr;
    auto write_loss = [=](int64_t i, double value) {
      losses ? void(losses[i] = static_cast<A>(value)) : result.write(i, static_cast<A>(value));
    };
    auto kept = [&](int i, auto type) { return op.keeps(results[i]) ? results[i].as<decltype(type)>() : nullptr; };
    const bool rounds = kept(op.kOfWeight, zero) && c.sums_apart(x.dtype);
    A *sums = work.as<A>() + parts.weight_sums;
    const ChunkGradients<T> slopes{kept(op.kOfX, zero), rounds ? sums : kept(op.kOfWeight, A()),
                                   in[op.kBias] ? kept(op.kOfBias, A()) : nullptr};
    const int64_t padding = LogitChunks::padded(c.out) - c.out;
    if (slopes.dweight) std::fill_n(slopes.dweight + c.out * c.in, padding * c.in, A(0));
    if (slopes.dbias) std::fill_n(slopes.dbias + c.out, padding, A(0));
    const auto count =
        static_cast<A>(op.mean() ? sum_of_weights(targets, c.rows, Extras<T>(op, in[op.kClassWeight])) : 1);
    const A scale = op.divides_slope(x) ? 1 / count : A(1);
    AOT_TRY(each_chunk<T>(c, in, op, rows, reinterpret_cast<T *>(work.as<A>() + parts.logits), slopes, write_loss,
                          [=](int64_t) { return scale; }));
    if (rounds) scale_slope(sums, results[op.kOfWeight].as<T>(), results[op.kOfWeight].size(), A(1));
    if (!op.reduces()) return kOk;
    double sum = 0;
    for (int64_t i = 0; i < c.rows; ++i) sum += losses[i];
    result.write(0, static_cast<A>(sum / count));
    return kOk;
  });
}

Status linear_cross_entropy_gradients(const char *name, const LinearCrossEntropyAttrs &op, const Tensor &dy,
                                      const Tensor *in, const Tensor *results, const LseTensors &rows, void *) {
  const Tensor &x = in[op.kX], &work = results[op.kWork];
  const Tensor &dx = results[op.kOfX], &dweight = results[op.kOfWeight], &dbias = results[op.kOfBias];
  const LogitChunks c(x, in[op.kWeight]);
  const Targets targets{in[op.kTarget], op.ignore_index};
  AOT_TRY(targets.check(name, c.rows, c.out));
  const bool by_slopes = op.has_slopes(in) && !rows.dlse;
  if (by_slopes) AOT_TRY(check_wanted(name, op, in, results));
  else if (!work) return fail(kConventionMisused, "%s: workspace is missing", name);
  return dispatch_floating(x.dtype, [&](auto zero) -> Status {
    using T = decltype(zero);
    using A = Accumulate<T>;
    const bool divide = op.mean() && !(by_slopes && op.divides_slope(x)), each_row = !op.reduces();
    const auto count = static_cast<A>(divide ? sum_of_weights(targets, c.rows, Extras<T>(op, in[op.kClassWeight])) : 1);
    auto scale = [=, from = Loss<T>(dy)](int64_t i) { return from.read(each_row ? i : 0) / count; };
    if (by_slopes) {
      if (dx) scale_slope(in[op.kXSlope].as<const T>(), dx.as<T>(), dx.size(), scale(0));
      const Tensor &slope = in[op.kWeightSlope];
      if (dweight && slope.dtype == x.dtype)
        scale_slope(slope.as<const T>(), dweight.as<T>(), dweight.size(), scale(0));
      else if (dweight) scale_slope(slope.as<const A>(), dweight.as<T>(), dweight.size(), scale(0));
      if (dbias) scale_slope(in[op.kBiasSlope].as<const A>(), dbias.as<T>(), dbias.size(), scale(0));
      return kOk;
    }
    const ChunkWorkspace parts = op.backward_parts(in);
    A *sums = work.as<A>();
    const ChunkGradients<T> gradients{dx ? dx.as<T>() : nullptr, dweight ? sums + parts.weight_sums : nullptr,
                                      dbias ? sums + parts.bias_sums : nullptr};
    AOT_TRY(each_chunk<T>(
        c, in, op, rows, reinterpret_cast<T *>(sums + parts.logits), gradients, [](int64_t, double) {}, scale));
    if (dweight) scale_slope(gradients.dweight, dweight.as<T>(), dweight.size(), A(1));
    if (dbias) scale_slope(gradients.dbias, dbias.as<T>(), dbias.size(), A(1));
    return kOk;
  });
}

namespace {

Status linear_cross_entropy_cpu(const LinearCrossEntropy &op, const Tensor *in, const Tensor *out, void *stream) {
  return linear_cross_entropy_forward(op.name, op, in, out[0], out + 1, {}, stream);
}

Status linear_cross_entropy_backward_cpu(const LinearCrossEntropyBackward &op, const Tensor *in, const Tensor *out,
                                         void *stream) {
  return linear_cross_entropy_gradients(op.name, op, in[0], in + 1, out, {}, stream);
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::LinearCrossEntropy, aot_linear_cross_entropy_cpu, aot::linear_cross_entropy_cpu)
AOT_CPU_ENTRY(aot::LinearCrossEntropyBackward, aot_linear_cross_entropy_backward_cpu,
              aot::linear_cross_entropy_backward_cpu)
