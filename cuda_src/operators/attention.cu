#include "attention.h"

#include "attention_mma.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

// ------------------------------------------------------------------------------------------------------- launchers

// lengths and extra are optional tensors of an Attention or of its backward.
template <typename T, class Op>
Status attention_inputs(const Op &op, const Tensor *in, AttentionInputs<T> *x) {
  const Tensor &q = in[op.kQ], &k = in[op.kK], &v = in[op.kV], &lengths = in[op.kLengths];
  *x = {q.as<const T>(),
        k.as<const T>(),
        v.as<const T>(),
        nullptr,
        nullptr,
        nullptr,
        lengths.data,
        lengths.dtype == DType::int64,
        op.sizes(q, k, v, lengths),
        {}};
  return op.extras(op.name, x->z, q, in[op.kMask], in[op.kBias], in[op.kSinks], in[op.kOffsets], &x->extra);
}

// One result. lse: of y, or null.
template <AttentionResult kResult, typename T>
Status run_any(const char *op, const AttentionInputs<T> &x, T *to, Accumulate<T> *lse, void *stream) {
  using Tile = AttentionTile<T, kResult>;
  const AttentionSizes &z = x.z;
  const int64_t heads = Tile::kOfKeys ? z.kv_heads : z.heads, rows = Tile::kOfKeys ? z.keys : z.queries;
  const int64_t blocks = z.batch * heads * ceil_div(rows, Tile::kSide);
  const int64_t columns = to ? ceil_div(Tile::kOfScores ? z.dim : z.v_dim, Tile::kSide) : 0;
  if (!blocks) return kOk;
  if (blocks > INT32_MAX || columns > UINT16_MAX)
    return fail(kNotImplemented, "%s: %lld tiles of %lld columns are more than a grid has", op,
                static_cast<long long>(blocks), static_cast<long long>(columns));
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(std::max<int64_t>(columns, 1)));
  return launch_kernel(op, attention_kernel<T, kResult>, {grid, kAttentionBlock}, stream, x, to, lse);
}

// Whether the kernels of attention_mma.cuh take a call; tensors that are absent are null.
template <typename T, typename... Tensors>
Status choose(const char *op, const AttentionInputs<T> &x, bool *mma, const Tensors *...tensors) {
  *mma = sizeof(T) == 2 && mma_takes(x.z) && (x.plain() || mma_takes_extra(x.z)) && aligned(tensors...);
  if (!*mma) return kOk;
  DeviceLimits limits;
  AOT_TRY(device_limits(op, &limits));
  *mma = limits.major >= 8;
  return kOk;
}

template <typename T>
Status run_forward(const char *op, const AttentionInputs<T> &x, T *y, Accumulate<T> *lse, void *stream) {
  bool mma;
  AOT_TRY(choose<T>(op, x, &mma, x.q, x.k, x.v, y));
  if constexpr (sizeof(T) == 2)
    if (mma) return run_mma_forward(op, x, y, lse, stream);
  return run_any<AttentionResult::y>(op, x, y, lse, stream);
}

template <typename T>
Status run_backward(const char *op, const AttentionInputs<T> &x, T *dq, T *dk, T *dv, void *stream) {
  bool mma;
  AOT_TRY(choose<T>(op, x, &mma, x.q, x.k, x.v, x.dy, dq, dk, dv));
  if constexpr (sizeof(T) == 2)
    if (mma) return run_mma_backward(op, x, dq, dk, dv, stream);
  if (dq) AOT_TRY(run_any<AttentionResult::dq>(op, x, dq, nullptr, stream));
  if (dk) AOT_TRY(run_any<AttentionResult::dk>(op, x, dk, nullptr, stream));
  return dv ? run_any<AttentionResult::dv>(op, x, dv, nullptr, stream) : kOk;
}

template <typename T>
Status run_bias(const char *op, const AttentionInputs<T> &x, void *dbias, void *stream) {
  bool mma;
  AOT_TRY(choose<T>(op, x, &mma, x.q, x.k, x.v, x.dy));
  if constexpr (sizeof(T) == 2)
    if (mma) return run_mma_bias(op, x, dbias, stream);
  constexpr int kSide = AttentionTile<T, AttentionResult::dbias>::kSide;
  int64_t blocks;
  AOT_TRY(count_bias_tiles(op, x, kSide, kSide, &blocks));
  if (!blocks) return kOk;
  return launch_kernel(op, attention_dbias_kernel<T>, {static_cast<unsigned>(blocks), kAttentionBlock}, stream, x,
                       dbias);
}

Status attention_cuda(const Attention &op, const Tensor *in, const Tensor *out, void *stream) {
  return dispatch(in[op.kQ].dtype, [&](auto type) -> Status {
    using T = typename decltype(type)::type;
    AttentionInputs<T> x;
    AOT_TRY(attention_inputs(op, in, &x));
    return run_forward(op.name, x, out[op.kY].as<T>(), out[op.kLse].as<Accumulate<T>>(), stream);
  });
}

Status attention_backward_cuda(const AttentionBackward &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &work = out[op.kWork];
  if (!work) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  return dispatch(in[op.kQ].dtype, [&](auto type) -> Status {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    AttentionInputs<T> x;
    AOT_TRY(attention_inputs(op, in, &x));
    const int64_t rows = x.z.rows();
    A *const delta = work.as<A>(), *const lse = in[op.kLse] ? in[op.kLse].as<A>() : delta + rows;
    if (!in[op.kLse]) AOT_TRY(run_forward<T>(op.name, x, nullptr, lse, stream));
    x.dy = in[op.kDy].as<const T>(), x.lse = lse, x.delta = delta;
    if (rows)
      AOT_TRY(launch_kernel(op.name, attention_delta_kernel<T>,
                            {grid_size(ceil_div(rows, kDeltaBlock / 32)), kDeltaBlock}, stream, x,
                            in[op.kY].as<const T>(), delta));
    if (out[op.kDbias] && x.extra.bias) AOT_TRY(run_bias(op.name, x, out[op.kDbias].data, stream));
    if (out[op.kDsinks] && x.extra.sinks && x.z.heads)
      AOT_TRY(launch_kernel(op.name, attention_dsinks_kernel<T>, {static_cast<unsigned>(x.z.heads), kDeltaBlock},
                            stream, x, out[op.kDsinks].data));
    return run_backward(op.name, x, out[op.kDq].as<T>(), out[op.kDk].as<T>(), out[op.kDv].as<T>(), stream);
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(Attention, aot_attention_cuda, attention_cuda)
AOT_ENTRY(AttentionBackward, aot_attention_backward_cuda, attention_backward_cuda)
