#include "linear.h"

#include "cuda/elementwise.cuh"
#include "gemm/activation.cuh"
#include "gemm/gemm.h"

namespace aot {
inline namespace AOT_ISA {

// --------------------------------------------------------------------------------------------------------- kernels

constexpr int kLanesX = 32, kLanesY = 8;  // of a block: across columns, and rows at a time

template <typename T, bool kVectors>
constexpr int kColumns = kVectors ? kVectorSize<T> : 1;  // of a thread

// dz = dy * slope(before), and for each block the sums of its rows' dz, by column: to partials, (parts, n) of them.
// Without an activation there is no `before`, and dz is dy, which is not written.
template <typename T, bool kVectors>
__global__ void __launch_bounds__(kLanesX *kLanesY, 5)
    slope_and_sum_kernel(const T *dy, const T *before, T *dz, Accumulate<T> *partials, int64_t rows, int64_t n,
                         Activation activation) {
  using A = Accumulate<T>;
  constexpr int kSize = kColumns<T, kVectors>;
  using Values = std::conditional_t<kVectors, Vector<T>, T>;
  const int64_t col = (int64_t{blockIdx.x} * kLanesX + threadIdx.x) * kSize;
  const int64_t piece = (rows + gridDim.y - 1) / gridDim.y, first = blockIdx.y * piece;
  const int64_t last = first + piece < rows ? first + piece : rows;
  __shared__ A shared[kLanesY][kLanesX][kSize];
  LongSums<A, kSize> sums(shared[threadIdx.y][threadIdx.x]);
  sums.each(first + threadIdx.y, col < n ? last : 0, kLanesY, [&](int64_t i) {
    const int64_t at = i * n + col;
    A d[kSize];
    auto read = [&](const T *x, A(&value)[kSize]) {
      if constexpr (kVectors) {
        Widened<T> wide = widen(*reinterpret_cast<const Values *>(x + at));
        for (int j = 0; j < kSize; ++j) value[j] = wide[j];
      } else {
        value[0] = widen(x[at]);
      }
    };
    read(dy, d);
    if (before) {
      A z[kSize];
      read(before, z);
#pragma unroll
      for (int j = 0; j < kSize; ++j) d[j] = activation_gradient<T>(d[j], z[j], activation);
      if constexpr (kVectors) {
        Widened<T> wide;
        for (int j = 0; j < kSize; ++j) wide[j] = d[j];
        *reinterpret_cast<Values *>(dz + at) = narrow(wide);
      } else {
        dz[at] = narrow<T>(d[0]);
      }
    }
    for (int j = 0; j < kSize; ++j) sums.run[j] += d[j];
  });
  if (!partials) return;
  __syncthreads();
  if (threadIdx.y || col >= n) return;
  for (int j = 0; j < kSize; ++j) {
    A all = 0;
    for (int i = 0; i < kLanesY; ++i) all += shared[i][threadIdx.x][j];
    partials[blockIdx.y * n + col + j] = all;
  }
}

template <typename T>
__global__ void __launch_bounds__(kMapBlock)
    sum_partials_kernel(const Accumulate<T> *partials, int parts, T *sum, int64_t n) {
  const int64_t j = int64_t{blockIdx.x} * kMapBlock + threadIdx.x;
  if (j >= n) return;
  double all = 0;  // of so few it costs nothing
  for (int i = 0; i < parts; ++i) all += partials[i * n + j];
  sum[j] = narrow<T>(static_cast<Accumulate<T>>(all));
}

// ------------------------------------------------------------------------------------------------------- launchers

// `before` and dz, or `sum`, or all of them.
template <typename T>
static Status slope_and_sum(const char *op, const T *dy, const T *before, T *dz, T *sum, Accumulate<T> *partials,
                            int64_t rows, int64_t n, Activation activation, cudaStream_t stream) {
  constexpr int kParts = LinearBackward::kParts;
  if (n == 0) return kOk;
  const bool vectors = n % kVectorSize<T> == 0 && aligned(dy) && (!before || (aligned(before) && aligned(dz)));
  const int columns = kLanesX * (vectors ? kVectorSize<T> : 1);
  const int parts = static_cast<int>(std::clamp<int64_t>(ceil_div(rows, 4 * kLanesY), 1, kParts));
  const dim3 grid(grid_size(ceil_div(n, columns)), parts), block(kLanesX, kLanesY);
  auto kernel = vectors ? slope_and_sum_kernel<T, true> : slope_and_sum_kernel<T, false>;
  kernel<<<grid, block, 0, stream>>>(dy, before, dz, sum ? partials : nullptr, rows, n, activation);
  AOT_TRY(check_launch(op));
  if (!sum) return kOk;
  sum_partials_kernel<T><<<grid_size(ceil_div(n, kMapBlock)), kMapBlock, 0, stream>>>(partials, parts, sum, n);
  return check_launch(op);
}

static Gemm to_gemm(const Product &p, bool allow_tf32, char *workspace, int64_t workspace_bytes) {
  Gemm g = {p.dtype, p.dtype, p.m, p.n, p.k, p.a, p.b, p.c};
  g.allow_tf32 = allow_tf32, g.workspace = workspace, g.workspace_bytes = workspace ? workspace_bytes : 0;
  return g;
}

Status linear_cuda(const Linear &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &x = in[0], &weight = in[1], &bias = in[2], &y = out[0], &before = out[1], &scratch = out[2];
  const int64_t size = itemsize(accumulate_dtype(x.dtype));
  Gemm g = to_gemm(LinearProducts(x, weight).forward(x, weight, y.data), op.allow_tf32, scratch.as<char>(),
                   scratch ? scratch.size() * size : 0);
  g.bias = bias.data, g.activation = op.activation(), g.before = op.activation() ? before.data : nullptr;
  return gemm(op.name, g, static_cast<cudaStream_t>(stream));
}

Status linear_backward_cuda(const LinearBackward &op, const Tensor *in, const Tensor *out, void *stream_) {
  const Tensor &dy = in[0], &x = in[1], &weight = in[2], &bias = in[3], &before = in[4];
  const Tensor &dx = out[0], &dweight = out[1], &dbias = out[2], &scratch = out[3];
  auto *stream = static_cast<cudaStream_t>(stream_);
  const LinearProducts products(x, weight);
  if ((op.activation() || dbias) && !scratch) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  return dispatch(x.dtype, [&](auto type) -> Status {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    A *partials = scratch.as<A>() + (scratch ? op.slope_elements(dy) : 0), *rest = partials + op.kParts * products.out;
    const int64_t bytes = scratch ? (scratch.as<A>() + scratch.size() - rest) * int64_t(sizeof(A)) : 0;
    auto run = [&](const Product &p, const void *with_bias) {
      if (!p.m || !p.n) return kOk;
      Gemm g = to_gemm(p, op.allow_tf32, bytes > 0 ? reinterpret_cast<char *>(rest) : nullptr, bytes);
      g.bias = with_bias;
      return gemm(op.name, g, stream);
    };
    T *dz = dy.as<T>();  // the gradient of what goes into the activation
    const T *z = nullptr;
    if (op.activation()) {
      dz = scratch.as<T>(), z = before ? before.as<T>() : dz;
      if (!before) AOT_TRY(run(products.forward(x, weight, dz), bias.data));
    }
    if (z || dbias)
      AOT_TRY(slope_and_sum(op.name, dy.as<T>(), z, dz, dbias ? dbias.as<T>() : nullptr, partials, products.rows,
                            products.out, op.activation(), stream));
    if (dx) AOT_TRY(run(products.gradient_x(dz, weight, dx), nullptr));
    if (dweight) AOT_TRY(run(products.gradient_weight(dz, x, dweight), nullptr));
    return kOk;
  });
}

}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(Linear, aot_linear_cuda, linear_cuda)
AOT_ENTRY(LinearBackward, aot_linear_backward_cuda, linear_backward_cuda)
