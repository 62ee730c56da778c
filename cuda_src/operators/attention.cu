#include "qkv_attention.h"

#include <cstdlib>
#include <cstring>

#include "attention_few.cuh"
#include "attention_mma_pairs.cuh"

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
  return op.extras(op.name, x->z, q, in[op.kMask], in[op.kBias], in[op.kSinks], in[op.kOffsets], in[op.kKeyOffsets],
                   in[op.kSeed], &x->extra);
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

// The kernels of attention.cuh, attention_few.cuh, attention_mma.cuh (in float32 attention_float.cuh, on Hopper with
// attention_float_sm90.cu) and attention_wgmma.cuh.
enum class AttentionKernels { any, few, mma, wgmma };

// The values of $AOTOPS_ATTENTION (docs/building.md).
enum class AttentionMode { automatic, general, unknown };

AttentionMode attention_mode() {
  static const AttentionMode mode = [] {
    const char *const text = std::getenv("AOTOPS_ATTENTION");
    if (!text || !*text || !std::strcmp(text, "auto")) return AttentionMode::automatic;
    return std::strcmp(text, "general") ? AttentionMode::unknown : AttentionMode::general;
  }();
  return mode;
}

Status check_mode(const char *op) {
  if (attention_mode() != AttentionMode::unknown) return kOk;
  return fail(kDeviceError, "%s: AOTOPS_ATTENTION is '%s', expected 'auto' or 'general'", op,
              std::getenv("AOTOPS_ATTENTION"));
}

// Whether gradients in float32 are those of attention_float_sm90.cu.
bool has_float_pass(const DeviceLimits &limits) {
#ifdef AOT_HAVE_SM90
  return limits.major == 9;
#else
  return false;
#endif
}

// The kernels that take a forward or backward; tensors that are absent are null.
template <typename T, typename... Tensors>
Status choose(const char *op, const AttentionInputs<T> &x, bool forward, AttentionKernels *kernels,
              const Tensors *...tensors) {
  AOT_TRY(check_mode(op));
  *kernels = AttentionKernels::any;
  if (attention_mode() == AttentionMode::automatic && few_takes(x) && aligned(tensors...))
    return *kernels = AttentionKernels::few, kOk;
  if constexpr (sizeof(T) == 2) {
    if (!mma_takes(x.z) || !mma_takes_extra(x) || !aligned(tensors...)) return kOk;
    DeviceLimits limits;
    AOT_TRY(device_limits(op, &limits));
    if (limits.major >= 8) *kernels = AttentionKernels::mma;
#ifdef AOT_HAVE_SM90
    if (limits.major != 9 || attention_mode() == AttentionMode::general) return kOk;
    bool wgmma;
    AOT_TRY(attention_sm90_takes(op, x, forward, &wgmma));
    if (wgmma) *kernels = AttentionKernels::wgmma;
#endif
  } else if constexpr (sizeof(T) == 4) {
    DeviceLimits limits;
    AOT_TRY(device_limits(op, &limits));
    if (limits.major < 8 || !aligned(tensors...)) return kOk;
    if (attention_float_takes(x, forward, has_float_pass(limits))) *kernels = AttentionKernels::mma;
  }
  return kOk;
}

template <typename T>
Status run_forward(const char *op, const AttentionInputs<T> &x, T *y, Accumulate<T> *lse, void *stream) {
  AttentionKernels kernels;
  AOT_TRY(choose<T>(op, x, true, &kernels, x.q, x.k, x.v, y));
  if constexpr (sizeof(T) <= 4)
    if (kernels == AttentionKernels::few) return run_few(op, x, y, lse, stream);
  if constexpr (sizeof(T) == 2) {
#ifdef AOT_HAVE_SM90
    if (kernels == AttentionKernels::wgmma) return attention_sm90<T>(op, x, y, lse, stream);
#endif
    if (kernels == AttentionKernels::mma) return run_mma_forward(op, x, y, lse, stream);
  } else if constexpr (sizeof(T) == 4) {
    if (kernels == AttentionKernels::mma) {
#ifdef AOT_HAVE_SM90
      DeviceLimits limits;
      AOT_TRY(device_limits(op, &limits));
      if (limits.major == 9 && std::max(x.z.dim, x.z.v_dim) <= 128) return attention_float_sm90(op, x, y, lse, stream);
#endif
      return attention_float(op, x, y, lse, stream);
    }
  }
  return run_any<AttentionResult::y>(op, x, y, lse, stream);
}

// Writes delta too, and x's lse where `lse` is not null; neither where there are few queries and keys, whose calls have
// no other gradients.
template <typename T>
Status run_backward(const char *op, const AttentionInputs<T> &x, const T *y, Accumulate<T> *lse, Accumulate<T> *delta,
                    T *dq, T *dk, T *dv, void *stream) {
  AttentionKernels kernels;
  AOT_TRY(choose<T>(op, x, false, &kernels, x.q, x.k, x.v, x.dy, y, dq, dk, dv));
  if constexpr (sizeof(T) <= 4)
    if (kernels == AttentionKernels::few) return run_few_backward(op, x, dq, dk, dv, stream);
  if (lse) AOT_TRY(run_forward<T>(op, x, nullptr, lse, stream));
  if constexpr (sizeof(T) == 2) {
    DeviceLimits limits;
    AOT_TRY(device_limits(op, &limits));
    if (kernels == AttentionKernels::mma && mma_pass_takes(x, limits.shared_memory)) {
      float *const space = delta + 2 * x.z.rows();
      if (!mma_pairs_takes(x, limits.shared_memory)) return run_mma_pass(op, x, y, delta, dq, dk, dv, space, stream);
      return run_mma_pairs(op, x, y, delta, dq, dk, dv, space, limits.shared_memory, stream);
    }
    if (x.extra.dropout) kernels = AttentionKernels::any;
  }
#ifdef AOT_HAVE_SM90
  if constexpr (std::is_same_v<T, float>) {
    DeviceLimits limits;
    AOT_TRY(device_limits(op, &limits));
    if (kernels == AttentionKernels::mma && has_float_pass(limits))
      return attention_float_backward_sm90(op, x, y, delta, dq, dk, dv, delta + 2 * x.z.rows(), stream);
  }
#endif
  if (const int64_t rows = x.z.rows(); rows && (kernels != AttentionKernels::wgmma || !dq))
    AOT_TRY(launch_kernel(op, attention_delta_kernel<T>, {grid_size(ceil_div(rows, kDeltaBlock / 32)), kDeltaBlock},
                          stream, x, y, delta));
  if constexpr (sizeof(T) == 2) {
#ifdef AOT_HAVE_SM90
    if (kernels == AttentionKernels::wgmma)
      return attention_backward_sm90<T>(op, x, y, delta, dq, dk, dv, delta + 2 * x.z.rows(), stream);
#endif
    if (kernels == AttentionKernels::mma) return run_mma_backward(op, x, dq, dk, dv, stream);
  } else if constexpr (sizeof(T) == 4) {
    if (kernels == AttentionKernels::mma) return attention_float_backward(op, x, dq, dk, dv, stream);
  }
  if (dq) AOT_TRY(run_any<AttentionResult::dq>(op, x, dq, nullptr, stream));
  if (dk) AOT_TRY(run_any<AttentionResult::dk>(op, x, dk, nullptr, stream));
  return dv ? run_any<AttentionResult::dv>(op, x, dv, nullptr, stream) : kOk;
}

template <typename T>
Status run_bias(const char *op, const AttentionInputs<T> &x, void *dbias, void *stream) {
  AttentionKernels kernels;
  AOT_TRY(choose<T>(op, x, false, &kernels, x.q, x.k, x.v, x.dy));
  if constexpr (sizeof(T) == 2)
    if (kernels != AttentionKernels::any) return run_mma_bias(op, x, dbias, stream);
  constexpr int kSide = AttentionTile<T, AttentionResult::dbias>::kSide;
  int64_t blocks;
  AOT_TRY(count_bias_tiles(op, x, kSide, kSide, &blocks));
  if (!blocks) return kOk;
  return launch_kernel(op, attention_dbias_kernel<T>, {static_cast<unsigned>(blocks), kAttentionBlock}, stream, x,
                       dbias);
}

}  // namespace

template <class Op>
Status attention_launcher(const Op &op, const Tensor *in, const Tensor *out, void *stream) {
  return dispatch(in[op.kQ].dtype, [&](auto type) -> Status {
    using T = typename decltype(type)::type;
    AttentionInputs<T> x;
    AOT_TRY(attention_inputs(op, in, &x));
    return run_forward(op.name, x, out[op.kY].template as<T>(), out[op.kLse].template as<Accumulate<T>>(), stream);
  });
}

template <class Op>
Status attention_backward_launcher(const Op &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &work = out[op.kWork];
  if (!work) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  return dispatch(in[op.kQ].dtype, [&](auto type) -> Status {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    AttentionInputs<T> x;
    AOT_TRY(attention_inputs(op, in, &x));
    const int64_t rows = x.z.rows();
    A *const delta = work.as<A>(), *const lse = in[op.kLse] ? nullptr : delta + rows;
    x.dy = in[op.kDy].template as<const T>(), x.lse = lse ? lse : in[op.kLse].template as<const A>(), x.delta = delta;
    AOT_TRY(run_backward(op.name, x, in[op.kY].template as<const T>(), lse, delta, out[op.kDq].template as<T>(),
                         out[op.kDk].template as<T>(), out[op.kDv].template as<T>(), stream));
    if (out[op.kDbias] && x.extra.bias) AOT_TRY(run_bias(op.name, x, out[op.kDbias].data, stream));
    if (out[op.kDsinks] && x.extra.sinks && x.z.heads)
      AOT_TRY(launch_kernel(op.name, attention_dsinks_kernel<T>, {static_cast<unsigned>(x.z.heads), kDeltaBlock},
                            stream, x, out[op.kDsinks].data));
    return kOk;
  });
}

template Status attention_launcher(const PartsAttention &, const Tensor *, const Tensor *, void *);
template Status attention_backward_launcher(const PartsAttentionBackward &, const Tensor *, const Tensor *, void *);

}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(Attention, aot_attention_cuda, attention_launcher)
AOT_ENTRY(AttentionBackward, aot_attention_backward_cuda, attention_backward_launcher)
