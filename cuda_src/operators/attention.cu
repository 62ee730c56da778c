#include "attention.h"

#include "attention_mma.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

// ------------------------------------------------------------------------------------------------------- launchers

template <typename T>
AttentionInputs<T> attention_inputs(const AttentionSizes &z, const Tensor &q, const Tensor &k, const Tensor &v,
                                    const Tensor &lengths) {
  return {q.as<const T>(),
          k.as<const T>(),
          v.as<const T>(),
          nullptr,
          nullptr,
          nullptr,
          lengths.data,
          lengths.dtype == DType::int64,
          z};
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
Status choose(const char *op, const AttentionSizes &z, bool *mma, const Tensors *...tensors) {
  *mma = sizeof(T) == 2 && mma_takes(z) && aligned(tensors...);
  if (!*mma) return kOk;
  DeviceLimits limits;
  AOT_TRY(device_limits(op, &limits));
  *mma = limits.major >= 8;
  return kOk;
}

template <typename T>
Status run_forward(const char *op, const AttentionInputs<T> &x, T *y, Accumulate<T> *lse, void *stream) {
  bool mma;
  AOT_TRY(choose<T>(op, x.z, &mma, x.q, x.k, x.v, y));
  if constexpr (sizeof(T) == 2)
    if (mma) return run_mma_forward(op, x, y, lse, stream);
  return run_any<AttentionResult::y>(op, x, y, lse, stream);
}

template <typename T>
Status run_backward(const char *op, const AttentionInputs<T> &x, T *dq, T *dk, T *dv, void *stream) {
  bool mma;
  AOT_TRY(choose<T>(op, x.z, &mma, x.q, x.k, x.v, x.dy, dq, dk, dv));
  if constexpr (sizeof(T) == 2)
    if (mma) return run_mma_backward(op, x, dq, dk, dv, stream);
  if (dq) AOT_TRY(run_any<AttentionResult::dq>(op, x, dq, nullptr, stream));
  if (dk) AOT_TRY(run_any<AttentionResult::dk>(op, x, dk, nullptr, stream));
  return dv ? run_any<AttentionResult::dv>(op, x, dv, nullptr, stream) : kOk;
}

Status attention_cuda(const Attention &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &q = in[op.kQ], &k = in[op.kK], &v = in[op.kV], &lengths = in[op.kLengths];
  return dispatch(q.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto x = attention_inputs<T>(op.sizes(q, k, v, lengths), q, k, v, lengths);
    return run_forward(op.name, x, out[op.kY].as<T>(), out[op.kLse].as<Accumulate<T>>(), stream);
  });
}

Status attention_backward_cuda(const AttentionBackward &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &q = in[op.kQ], &k = in[op.kK], &v = in[op.kV], &lengths = in[op.kLengths], &work = out[op.kWork];
  if (!work) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  return dispatch(q.dtype, [&](auto type) -> Status {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    auto x = attention_inputs<T>(op.sizes(q, k, v, lengths), q, k, v, lengths);
    const int64_t rows = x.z.rows();
    A *const delta = work.as<A>(), *const lse = in[op.kLse] ? in[op.kLse].as<A>() : delta + rows;
    if (!in[op.kLse]) AOT_TRY(run_forward<T>(op.name, x, nullptr, lse, stream));
    x.dy = in[op.kDy].as<const T>(), x.lse = lse, x.delta = delta;
    if (rows)
      AOT_TRY(launch_kernel(op.name, attention_delta_kernel<T>,
                            {grid_size(ceil_div(rows, kDeltaBlock / 32)), kDeltaBlock}, stream, x,
                            in[op.kY].as<const T>(), delta));
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
