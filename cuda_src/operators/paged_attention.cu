#include "paged_attention.h"

#include "paged_attention_float.cuh"
#include "paged_attention_mma.cuh"
#include "paged_attention_tma.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

// A block for each tile of rows of each chunk of each head of k.
template <typename T>
Status launch_chunks(const char *op, void (*kernel)(PagedInputs<T>), int rows, int threads, int shared, int64_t columns,
                     const PagedInputs<T> &x, void *stream) {
  const PagedSizes &z = x.z;
  const int64_t heads = bounded_product(bounded_product(z.batch, z.kv_heads), z.chunks);
  const int64_t blocks = bounded_product(heads, ceil_div(z.rows(), rows));
  if (blocks > INT32_MAX || columns > UINT16_MAX)
    return fail(kNotImplemented, "%s: %lld tiles of %lld columns are more than a grid has", op,
                static_cast<long long>(blocks), static_cast<long long>(columns));
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(columns));
  return launch_kernel(op, kernel, {grid, static_cast<unsigned>(threads), shared}, stream, x);
}

// *combined: whether y is written.
template <typename T>
Status run_chunks(const char *op, PagedInputs<T> x, T *y, bool *combined, void *stream) {
  const bool alone = x.z.chunks == 1 && aligned(y);
  DeviceLimits limits;
  AOT_TRY(device_limits(op, &limits));
  if constexpr (sizeof(T) == 2) {
#ifdef AOT_HAVE_SM90  // code for 9.0: PTX of older ones has nothing of these kernels
    if (limits.major == 9 && paged_tma_takes(x.z) && aligned(x.q, x.k, x.v, x.sums, y)) {
      AOT_TRY(run_paged_tma(op, x, y, combined, stream));
      if (*combined) return kOk;
    }
#endif
    if (paged_mma_takes(x.z) && aligned(x.q, x.k, x.v, x.sums) && limits.major >= 8) {
      if (alone) x.y = y, *combined = true;
      const int64_t blocks = bounded_product(bounded_product(x.z.batch, x.z.kv_heads), x.z.chunks);
      return dispatch_paged(x.z, [&](auto shape) {
        using Shape = decltype(shape);
        static_assert(Shape::kBytes <= kMmaShared, "a block's shared memory");
        // With three blocks on a multiprocessor more in flight is slower.
        x.ahead = blocks <= 2 * int64_t{limits.multiprocessors} || limits.shared_memory < 3 * Shape::kBytes;
        return launch_chunks(op, paged_attention_mma_kernel<T, Shape>, Shape::kRows, Shape::kThreads, Shape::kBytes, 1,
                             x, stream);
      });
    }
  }
  if constexpr (std::is_same_v<T, float>) {
    using Shape = PagedFloatShape<4>;
    const int bytes = Shape(x.z).bytes();  // 68 KB at 128, of which a block has 64 before compute capability 8.0
    if (paged_float_takes(x.z) && aligned(x.q, x.k, x.v, x.sums) && bytes <= limits.shared_memory) {
      if (alone) x.y = y, *combined = true;
      return launch_chunks(op, paged_attention_float_kernel<Shape::kRows>, Shape::kRows, Shape::kThreads, bytes, 1, x,
                           stream);
    }
  }
  return launch_chunks(op, paged_attention_kernel<T>, kPagedRows, kPagedBlock, 0, ceil_div(x.z.v_dim, kPagedBlock), x,
                       stream);
}

Status paged_attention_cuda(const PagedAttention &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &q = in[op.kQ], &k = in[op.kK], &v = in[op.kV], &lengths = in[op.kLengths], &table = in[op.kTable];
  if (!out[op.kWork]) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  return dispatch(q.dtype, [&](auto type) -> Status {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    const PagedSizes z = op.sizes(q, k, v, table);
    const int64_t rows = z.chunks * z.all_rows();
    A *const sums = out[op.kWork].as<A>(), *const most = sums + rows * z.v_dim;
    const PagedInputs<T> x{q.as<const T>(),
                           k.as<const T>(),
                           v.as<const T>(),
                           Integers(lengths),
                           Integers(table),
                           z,
                           sums,
                           most,
                           most + rows,
                           nullptr,
                           false};
    bool combined = false;
    AOT_TRY(run_chunks(op.name, x, out[op.kY].as<T>(), &combined, stream));
    if (combined) return kOk;
    const int64_t columns = ceil_div(z.v_dim, kCombineColumns);
    if (z.all_rows() > INT32_MAX || columns > UINT16_MAX)
      return fail(kNotImplemented, "%s: %lld rows of %lld are more than a grid has", op.name,
                  static_cast<long long>(z.all_rows()), static_cast<long long>(z.v_dim));
    const dim3 grid(static_cast<unsigned>(z.all_rows()), static_cast<unsigned>(columns));
    const unsigned threads = 32 * combine_warps(z.chunks);
    const PagedResults<A> results{x.lengths, z, x.sums, x.most, x.total, out[op.kY].data, q.dtype};
    return launch_kernel(op.name, paged_attention_combine_kernel<A>, {grid, threads, 0, 1, true}, stream, results);
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(PagedAttention, aot_paged_attention_cuda, paged_attention_cuda)
