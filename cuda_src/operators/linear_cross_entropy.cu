#include "linear_cross_entropy.h"

#include "cross_entropy.cuh"
#include "gemm/activation_backward.cuh"
#include "gemm/gemm.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// --------------------------------------------------------------------------------------------------------- kernels

// gradient = slope * dy / *count, but 0 where slope is. Without a count it is 1, and without a dy too. Where the factor
// is 1, and the gradient is written over the slope, nothing is done: the blocks are few, so that they end at once.
constexpr int kScaleThreads = 256, kScaleBlocks = 4, kScaleVectors = 4;

template <typename S, typename T, bool kVectors, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kScaleThreads, kScaleBlocks)
    scale_slope_kernel(const S *slope, T *gradient, int64_t n, Loss<T> dy, const A *count) {
  constexpr int kSize = kVectors ? kVectorSize<T> : 1, kParts = kVectors ? kSize / kVectorSize<S> : 1;
  A factor = dy.data ? dy.read(0) : A(1);
  if (count) factor /= *count;
  if (factor == 1 && static_cast<const void *>(slope) == gradient) return;
  auto scaled = [=](A x) { return x == 0 ? A(0) : x * factor; };
  const int64_t step = int64_t{gridDim.x} * kScaleThreads, end = n / kSize;
  const int64_t first = int64_t{blockIdx.x} * kScaleThreads + threadIdx.x;
  if constexpr (kVectors) {
    for (int64_t i = first; i < end; i += kScaleVectors * step) {
      Vector<S> v[kScaleVectors][kParts];
#pragma unroll
      for (int j = 0; j < kScaleVectors; ++j)
#pragma unroll
        for (int k = 0; k < kParts; ++k)
          if (i + j * step < end) v[j][k] = load_once(slope + (i + j * step) * kSize + k * kVectorSize<S>);
#pragma unroll
      for (int j = 0; j < kScaleVectors; ++j) {
        if (i + j * step >= end) continue;
        Widened<T> result;
#pragma unroll
        for (int k = 0; k < kParts; ++k) {
          const auto x = widen(v[j][k]);
#pragma unroll
          for (int l = 0; l < kVectorSize<S>; ++l) result[k * kVectorSize<S> + l] = scaled(x[l]);
        }
        store(gradient + (i + j * step) * kSize, narrow(result));
      }
    }
  }
  for (int64_t i = (kVectors ? end * kSize : 0) + first; i < n; i += step)
    gradient[i] = narrow<T>(scaled(widen(slope[i])));
}

// ------------------------------------------------------------------------------------------------------- launchers

template <typename S, typename T, typename A = Accumulate<T>>
Status scale_slope(const char *op, const S *slope, const Tensor &gradient, const Loss<T> &dy, const A *count,
                   void *stream) {
  const int64_t n = gradient.size();
  if (n == 0) return kOk;
  DeviceLimits device;
  AOT_TRY(device_limits(op, &device));
  const int64_t most = int64_t{4} * kScaleBlocks * device.multiprocessors;
  const int64_t blocks = ceil_div(n, int64_t{kScaleThreads} * kScaleVectors * kVectorSize<T>);
  T *to = gradient.as<T>();
  auto *kernel = aligned(slope, to) ? scale_slope_kernel<S, T, true> : scale_slope_kernel<S, T, false>;
  return launch_kernel(op, kernel, {grid_size(std::min(blocks, most)), kScaleThreads}, stream, slope, to, n, dy, count);
}

// cross_entropy_rows() of padded rows. They have one kernel, with a slope or without, and whether they are aligned or
// not: the sums of another could differ in the last bit.
template <typename T>
Status padded_rows(const char *op, const CrossEntropyAttrs &attrs, const Tensor &x, const Targets &targets,
                   const Results<T> &results, const Scale<T> &scale, const Extras<T> &extras, void *stream,
                   bool after_count) {
  if (extras.any()) return cross_entropy_extra_rows(op, attrs, x, targets, results, scale, extras, stream, after_count);
  return unaligned_rows<true>(op, attrs, x, targets, results, scale, stream, after_count);
}

// The sums over the chunks, each unless it is null: weight's of padded rows, and bias's of c.line elements. Weight's
// are in the accumulate dtype, or of one chunk in T.
template <typename T>
struct ChunkGradients {
  T *dx;
  void *dweight;
  DType of_weight;
  Accumulate<T> *dbias;

  explicit operator bool() const { return dx || dweight || dbias; }
};

// The rows of a call, chunk by chunk, each of which has its logits in the same place.
template <typename T>
class Chunks {
 public:
  using A = Accumulate<T>;

  // in: the inputs, as the forward has them
  Chunks(const char *op, const LinearCrossEntropyAttrs &attrs, const Tensor *in, const LseTensors &rows,
         const Tensor &work, const ChunkWorkspace &parts, void *stream)
      : op_(op),
        attrs_(attrs),
        in_(in),
        rows_(rows),
        c_(in[LinearCrossEntropyAttrs::kX], in[LinearCrossEntropyAttrs::kWeight]),
        stream_(static_cast<cudaStream_t>(stream)),
        x_(in[LinearCrossEntropyAttrs::kX].as<T>()),
        weight_(in[LinearCrossEntropyAttrs::kWeight].as<T>()),
        bias_(in[LinearCrossEntropyAttrs::kBias].as<T>()) {
    A *begin = work.as<A>();
    logits_ = reinterpret_cast<T *>(begin + parts.logits), partials_ = begin + parts.partials;
    copies_[0] = reinterpret_cast<T *>(begin + parts.weight), copies_[1] = reinterpret_cast<T *>(begin + parts.bias);
    library_ = begin + parts.library, library_bytes_ = (parts.size - parts.library) * int64_t(sizeof(A));
  }

  // The losses, by `results`, and the gradients of these times the scale. results.slope is not read.
  Status run(Results<T, A> results, Scale<T, A> scale, const ChunkGradients<T> &gradients) {
    AOT_TRY(copy_padded());
    results.slope = gradients ? logits_ : nullptr, results.padding = static_cast<int>(c_.line - c_.out);
    Tensor target = in_[LinearCrossEntropyAttrs::kTarget], logits;
    logits.dtype = in_[LinearCrossEntropyAttrs::kX].dtype, logits.ndim = 2, logits.shape[1] = c_.out,
    logits.data = logits_;
    auto *const losses = c_.pads() ? padded_rows<T> : cross_entropy_rows<T>;
    int sums = 0;  // partial sums of the bias
    for (int64_t first = 0, chunk = 0; chunk < c_.count(); ++chunk, first += c_.chunk) {
      const int64_t rows = std::min(c_.chunk, c_.rows - first);
      T *x = x_ + first * c_.in;
      const DType dtype = logits.dtype;
      AOT_TRY(product({dtype, dtype, rows, c_.line, c_.in, {x, c_.in}, {weight_, c_.in, true}, {logits_, c_.line}},
                      false, bias_));
      logits.shape[0] = rows;
      AOT_TRY(losses(op_, attrs_, logits, Targets(target, attrs_.ignore_index), results, scale, extras(first), stream_,
                     false));
      if (gradients.dx)
        AOT_TRY(product({dtype,
                         dtype,
                         rows,
                         c_.in,
                         c_.line,
                         {logits_, c_.line},
                         {weight_, c_.in},
                         {gradients.dx + first * c_.in, c_.in}}));
      if (gradients.dweight)
        AOT_TRY(product({dtype,
                         gradients.of_weight,
                         LogitChunks::padded(c_.out),
                         c_.in,
                         rows,
                         {logits_, c_.line, true},
                         {x, c_.in},
                         {gradients.dweight, c_.in}},
                        chunk > 0));
      if (gradients.dbias) AOT_TRY(sum_columns(rows, &sums));
      target.data = target.as<char>() + rows * itemsize(target.dtype);
      if (results.losses) results.losses += rows;
      results.loss.pass(rows);
      if (scale.each_row) scale.dy.pass(rows);
    }
    if (!gradients.dbias) return kOk;
    const dim3 grid(grid_size(ceil_div(c_.line, 32))), block(32, kPartWarps);
    return launch_kernel(op_, sum_parts_kernel<A>, {grid, block}, stream_, partials_, sums, gradients.dbias, c_.line);
  }

  const LogitChunks &shape() const { return c_; }

 private:
  // From row `first` on.
  Extras<T, A> extras(int64_t first) const {
    const LseTensors rows = rows_.from(first);
    Extras<T, A> of(attrs_, in_[LinearCrossEntropyAttrs::kClassWeight]);
    of.lse = rows.lse.template as<A>(), of.dlse = rows.dlse.template as<const A>();
    return of;
  }

  // weight and bias with zeros behind them, up to whole vectors of classes, which the products take.
  Status copy_padded() {
    if (!c_.pads()) return kOk;
    auto copy = [&](T *&from, T *to, int64_t n) -> Status {
      const size_t more = (c_.line - c_.out) * n * sizeof(T), bytes = c_.out * n * sizeof(T);
      AOT_TRY(check_cuda(op_, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_)));
      AOT_TRY(check_cuda(op_, cudaMemsetAsync(to + c_.out * n, 0, more, stream_)));
      return from = to, kOk;
    };
    if (c_.in) AOT_TRY(copy(weight_, copies_[0], c_.in));
    return bias_ ? copy(bias_, copies_[1], 1) : kOk;
  }

  Status product(GemmParams g, bool adds = false, const T *bias = nullptr) const {
    g.adds = adds, g.bias = bias, g.allow_tf32 = attrs_.allow_tf32;
    g.workspace = library_bytes_ ? library_ : nullptr, g.workspace_bytes = library_bytes_;
    return gemm(op_, g, stream_);
  }

  // Sums columns of the logits. *sums: of how many parts of rows there are sums; theirs follow.
  Status sum_columns(int64_t rows, int *sums) const {
    DeviceLimits limits;
    AOT_TRY(device_limits(op_, &limits));
    const int64_t n = c_.line, most = LinearBackward::parts(n);
    auto launch = [&](auto vectors) {
      constexpr bool kVectors = decltype(vectors)::value;
      const int64_t columns = ceil_div(n, 32 * (kVectors ? kVectorSize<T> : 1));
      const int64_t useful = ceil_div(rows, SumShape::kWarps * SumShape::kLoads);
      const int64_t at_once = int64_t{limits.multiprocessors} * kColumnSumBlocks<T, SumShape> / columns;
      const int parts = static_cast<int>(std::clamp<int64_t>(std::min(at_once, useful), 1, most));
      const dim3 grid(grid_size(columns), parts), block(32, SumShape::kWarps);
      A *to = partials_ + *sums * n;
      *sums += parts;
      return launch_kernel(op_, column_sums_kernel<T, kVectors, SumShape>, {grid, block}, stream_, logits_, nullptr,
                           nullptr, to, rows, n, kActivationNone, n, n);
    };
    return n % kVectorSize<T> == 0 && aligned(logits_) ? launch(std::true_type()) : launch(std::false_type());
  }

  const char *op_;
  const LinearCrossEntropyAttrs &attrs_;
  const Tensor *in_;
  const LseTensors &rows_;
  LogitChunks c_;
  cudaStream_t stream_;
  T *x_, *weight_, *bias_, *logits_, *copies_[2];
  A *partials_;
  void *library_;
  int64_t library_bytes_;
};

}  // namespace

Status linear_cross_entropy_forward(const char *name, const LinearCrossEntropyAttrs &op, const Tensor *in,
                                    const Tensor &y, const Tensor *results, const LseTensors &rows, void *stream) {
  const Tensor &x = in[op.kX], &work = results[op.kWork];
  if (!work) return fail(kConventionMisused, "%s: workspace is missing", name);
  return dispatch(x.dtype, [&](auto type) -> Status {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    const ChunkWorkspace parts = op.forward_parts(in);
    Chunks<T> chunks(name, op, in, rows, work, parts, stream);
    const LogitChunks &c = chunks.shape();
    auto kept = [&](int i) { return op.keeps(results[i]) ? results[i].data : nullptr; };
    const Tensor &of_weight = results[op.kOfWeight];
    const DType sum = accumulate_dtype(x.dtype);
    const bool rounds = kept(op.kOfWeight) && c.sums_apart(x.dtype);
    A *sums = work.as<A>() + parts.weight_sums, *bias_sums = work.as<A>() + parts.bias_sums;
    A *const of_bias = in[op.kBias] ? static_cast<A *>(kept(op.kOfBias)) : nullptr;
    const bool copies = of_bias && c.exceeds_slope();
    const ChunkGradients<T> slopes = {static_cast<T *>(kept(op.kOfX)), rounds ? sums : kept(op.kOfWeight),
                                      rounds ? sum : LogitChunks::slope_dtype(x.dtype), copies ? bias_sums : of_bias};
    const Loss<T> weight = in[op.kClassWeight] ? Loss<T>(in[op.kClassWeight]) : Loss<T>(), loss(y);
    const bool divides = slopes && op.divides_slope(x), weighs = op.mean() && weight.data;
    A *count = divides || weighs ? work.as<A>() + parts.count : nullptr;
    A *losses = op.reduces() ? work.as<A>() + parts.losses : nullptr;
    const Targets targets(in[op.kTarget], op.ignore_index);
    if (count) AOT_TRY(cross_entropy_count(name, targets, weight, count, c.rows, c.out, stream));
    AOT_TRY(
        chunks.run({op.reduces() ? Loss<T>() : loss, losses, nullptr}, {{}, false, divides ? count : nullptr}, slopes));
    if (rounds) AOT_TRY((scale_slope<A, T, A>(name, sums, of_weight, Loss<T>(), nullptr, stream)));
    if (copies)
      AOT_TRY(check_cuda(name, cudaMemcpyAsync(of_bias, bias_sums, LogitChunks::padded(c.out) * sizeof(A),
                                               cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream))));
    if (!op.reduces()) return kOk;
    return cross_entropy_loss(name, losses, loss, c.rows, op.mean(), weighs ? count : nullptr, stream);
  });
}

Status linear_cross_entropy_gradients(const char *name, const LinearCrossEntropyAttrs &op, const Tensor &dy,
                                      const Tensor *in, const Tensor *results, const LseTensors &rows, void *stream) {
  const Tensor &x = in[op.kX], &work = results[op.kWork], &dx = results[op.kOfX], &dweight = results[op.kOfWeight],
               &dbias = results[op.kOfBias];
  const bool by_slopes = op.has_slopes(in) && !rows.dlse, divides = op.mean() && !(by_slopes && op.divides_slope(x));
  if (by_slopes) AOT_TRY(check_wanted(name, op, in, results));
  if (!work && (!by_slopes || divides)) return fail(kConventionMisused, "%s: workspace is missing", name);
  return dispatch(x.dtype, [&](auto type) -> Status {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    const LogitChunks c(x, in[op.kWeight]);
    const Loss<T> weight = in[op.kClassWeight] ? Loss<T>(in[op.kClassWeight]) : Loss<T>(), of_loss(dy);
    A *count = divides ? work.as<A>() : nullptr;
    const Targets targets(in[op.kTarget], op.ignore_index);
    if (count) AOT_TRY(cross_entropy_count(name, targets, weight, count, c.rows, c.out, stream));
    if (by_slopes) {
      auto scale = [&](const auto *slope, const Tensor &gradient) {
        return gradient ? scale_slope(name, slope, gradient, of_loss, count, stream) : kOk;
      };
      const Tensor &weight_slope = in[op.kWeightSlope];
      AOT_TRY(scale(in[op.kXSlope].as<const T>(), dx));
      AOT_TRY(scale(in[op.kBiasSlope].as<const A>(), dbias));
      return weight_slope.dtype == x.dtype ? scale(weight_slope.as<const T>(), dweight)
                                           : scale(weight_slope.as<const A>(), dweight);
    }
    const ChunkWorkspace parts = op.backward_parts(in);
    const bool rounds = !c.rounds_at_once();
    A *weight_sums = work.as<A>() + parts.weight_sums, *bias_sums = work.as<A>() + parts.bias_sums;
    const ChunkGradients<T> sums = {dx.as<T>(), dweight && rounds ? weight_sums : dweight.data,
                                    rounds ? accumulate_dtype(x.dtype) : x.dtype, dbias ? bias_sums : nullptr};
    Chunks<T> chunks(name, op, in, rows, work, parts, stream);
    AOT_TRY(chunks.run({{}, nullptr, nullptr}, {of_loss, !op.reduces(), count}, sums));
    auto round = [&](const A *sums, const Tensor &gradient) {
      return scale_slope<A, T, A>(name, sums, gradient, Loss<T>(), nullptr, stream);
    };
    if (dweight && rounds) AOT_TRY(round(weight_sums, dweight));
    return dbias ? round(bias_sums, dbias) : kOk;
  });
}

namespace {

Status linear_cross_entropy_cuda(const LinearCrossEntropy &op, const Tensor *in, const Tensor *out, void *stream) {
  return linear_cross_entropy_forward(op.name, op, in, out[0], out + 1, {}, stream);
}

Status linear_cross_entropy_backward_cuda(const LinearCrossEntropyBackward &op, const Tensor *in, const Tensor *out,
                                          void *stream) {
  return linear_cross_entropy_gradients(op.name, op, in[0], in + 1, out, {}, stream);
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(LinearCrossEntropy, aot_linear_cross_entropy_cuda, linear_cross_entropy_cuda)
AOT_ENTRY(LinearCrossEntropyBackward, aot_linear_cross_entropy_backward_cuda, linear_cross_entropy_backward_cuda)
