#include "linear.h"

#include "cuda/elementwise.cuh"
#include "cuda/sum_slices.cuh"
#include "gemm/activation.cuh"
#include "gemm/gemm.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// --------------------------------------------------------------------------------------------------------- kernels

constexpr int kLanesX = 32, kLanesY = 8;  // threads of a block: along columns, along rows

template <typename T, bool kVectors>
constexpr int kColumns = kVectors ? kVectorSize<T> : 1;  // of a thread

// dz = dy * activation'(pre_activation). Each block also sums its rows' dz by column: partials (parts, n). Without an
// activation, pre_activation is null, and dz is dy and not written.
template <typename T, bool kVectors>
__global__ void __launch_bounds__(kLanesX *kLanesY, 5)
    activation_backward_kernel(const T *dy, const T *pre_activation, T *dz, Accumulate<T> *partials, int64_t rows,
                               int64_t n, Activation activation) {
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
    if (pre_activation) {
      A z[kSize];
      read(pre_activation, z);
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

// ------------------------------------------------------------------------------------------------------- launchers

// dz, if pre_activation is not null, and the sum of its rows, if `sum` is not null.
template <typename T>
Status activation_backward(const char *op, const T *dy, const T *pre_activation, T *dz, T *sum, Accumulate<T> *partials,
                           int64_t rows, int64_t n, Activation activation, cudaStream_t stream) {
  constexpr int kParts = LinearBackward::kParts;
  if (n == 0) return kOk;
  const bool vectors =
      n % kVectorSize<T> == 0 && aligned(dy) && (!pre_activation || (aligned(pre_activation) && aligned(dz)));
  const int columns = kLanesX * (vectors ? kVectorSize<T> : 1);
  const int parts = static_cast<int>(std::clamp<int64_t>(ceil_div(rows, 4 * kLanesY), 1, kParts));
  const dim3 grid(grid_size(ceil_div(n, columns)), parts), block(kLanesX, kLanesY);
  auto kernel = vectors ? activation_backward_kernel<T, true> : activation_backward_kernel<T, false>;
  kernel<<<grid, block, 0, stream>>>(dy, pre_activation, dz, sum ? partials : nullptr, rows, n, activation);
  AOT_TRY(check_launch(op));
  if (!sum) return kOk;
  return sum_slices<double>(op, partials, parts, sum, n, stream);
}

GemmParams gemm_params(const MatmulProblem &p, bool allow_tf32, char *workspace, int64_t workspace_bytes) {
  GemmParams g = {p.dtype, p.dtype, p.m, p.n, p.k, p.a, p.b, p.c};
  g.allow_tf32 = allow_tf32, g.workspace = workspace, g.workspace_bytes = workspace ? workspace_bytes : 0;
  return g;
}

Status linear_cuda(const Linear &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &x = in[0], &weight = in[1], &bias = in[2], &y = out[0], &pre_activation = out[1], &scratch = out[2];
  const int64_t size = itemsize(accumulate_dtype(x.dtype));
  GemmParams g = gemm_params(LinearMatmuls(x, weight).forward(x, weight, y.data), op.allow_tf32, scratch.as<char>(),
                             scratch ? scratch.size() * size : 0);
  g.bias = bias.data, g.activation = op.activation(),
  g.pre_activation = op.activation() ? pre_activation.data : nullptr;
  return gemm(op.name, g, static_cast<cudaStream_t>(stream));
}

Status linear_backward_cuda(const LinearBackward &op, const Tensor *in, const Tensor *out, void *stream_) {
  const Tensor &dy = in[0], &x = in[1], &weight = in[2], &bias = in[3], &pre_activation = in[4];
  const Tensor &dx = out[0], &dweight = out[1], &dbias = out[2], &scratch = out[3];
  auto *stream = static_cast<cudaStream_t>(stream_);
  const LinearMatmuls matmuls(x, weight);
  if ((op.activation() || dbias) && !scratch) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  return dispatch(x.dtype, [&](auto type) -> Status {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    A *partials = scratch.as<A>() + (scratch ? op.grad_elements(dy) : 0),
      *library_scratch = partials + op.kParts * matmuls.out;
    const int64_t library_bytes =
        scratch ? (scratch.as<A>() + scratch.size() - library_scratch) * int64_t(sizeof(A)) : 0;
    auto run = [&](const MatmulProblem &p, const void *with_bias) {
      if (!p.m || !p.n) return kOk;
      GemmParams g = gemm_params(
          p, op.allow_tf32, library_bytes > 0 ? reinterpret_cast<char *>(library_scratch) : nullptr, library_bytes);
      g.bias = with_bias;
      return gemm(op.name, g, stream);
    };
    T *dz = dy.as<T>();  // the gradient of the pre-activation
    const T *z = nullptr;
    if (op.activation()) {
      dz = scratch.as<T>(), z = pre_activation ? pre_activation.as<T>() : dz;
      if (!pre_activation) AOT_TRY(run(matmuls.forward(x, weight, dz), bias.data));
    }
    if (z || dbias)
      AOT_TRY(activation_backward(op.name, dy.as<T>(), z, dz, dbias ? dbias.as<T>() : nullptr, partials, matmuls.rows,
                                  matmuls.out, op.activation(), stream));
    if (dx) AOT_TRY(run(matmuls.dx(dz, weight, dx), nullptr));
    if (dweight) AOT_TRY(run(matmuls.dweight(dz, x, dweight), nullptr));
    return kOk;
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(Linear, aot_linear_cuda, linear_cuda)
AOT_ENTRY(LinearBackward, aot_linear_backward_cuda, linear_backward_cuda)
