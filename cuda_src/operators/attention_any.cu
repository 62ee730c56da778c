#include "attention.cuh"

namespace aot {
inline namespace AOT_ISA {

template <AttentionResult kResult, typename T>
Status attention_any(const char *op, const AttentionInputs<T> &x, T *to, Accumulate<T> *lse, void *stream) {
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

template <typename T>
Status attention_any_bias(const char *op, const AttentionInputs<T> &x, void *dbias, void *stream) {
  constexpr int kSide = AttentionTile<T, AttentionResult::dbias>::kSide;
  int64_t blocks;
  AOT_TRY(count_bias_tiles(op, x, kSide, kSide, &blocks));
  if (!blocks) return kOk;
  return launch_kernel(op, attention_dbias_kernel<T>, {static_cast<unsigned>(blocks), kAttentionBlock}, stream, x,
                       dbias);
}

#define AOT_RESULT(result, T)                                                                              \
  template Status attention_any<AttentionResult::result, T>(const char *, const AttentionInputs<T> &, T *, \
                                                            Accumulate<T> *, void *);
#define AOT_ANY(T)                                                                          \
  AOT_RESULT(y, T)                                                                          \
  AOT_RESULT(dq, T) AOT_RESULT(dk, T) AOT_RESULT(dv, T) template Status attention_any_bias( \
      const char *, const AttentionInputs<T> &, void *, void *);

AOT_ANY(__half)
AOT_ANY(__nv_bfloat16)
AOT_ANY(float)
AOT_ANY(double)

#undef AOT_ANY
#undef AOT_RESULT

}  // namespace AOT_ISA
}  // namespace aot
