// A matrix product on the device: which kernel runs it, and the one that takes every type, layout and alignment.
#include "gemm.h"

#include "activation.cuh"
#include "elementwise.cuh"

namespace aot {
inline namespace AOT_ISA {

// --------------------------------------------------------------------------------------------------------- kernels

constexpr int kTile = 64, kDepth = 16, kThreads = 256, kEach = 4;  // a block's tile of c; a thread has 4 x 4 of it

// A tile of a matrix, kTile lines of kDepth elements, zeros beyond its edges: line i, element p is at
// data[i * line_step + p * step]. Neighbouring threads read what lies side by side.
template <typename T>
__device__ inline void load_tile(Accumulate<T> (&tile)[kDepth][kTile + kEach], const T *data, int64_t lines,
                                 int64_t depth, int64_t stride, bool along_lines) {
#pragma unroll
  for (int e = 0; e < kTile * kDepth / kThreads; ++e) {
    const int index = threadIdx.x + e * kThreads;
    const int i = along_lines ? index % kTile : index / kDepth, p = along_lines ? index / kTile : index % kDepth;
    const int64_t at = along_lines ? p * stride + i : i * stride + p;
    tile[p][i] = i < lines && p < depth ? widen(data[at]) : Accumulate<T>(0);
  }
}

template <typename T, typename C>
__global__ void __launch_bounds__(kThreads) gemm_kernel(Gemm g) {
  using A = Accumulate<T>;
  __shared__ A a_tile[kDepth][kTile + kEach], b_tile[kDepth][kTile + kEach];
  const int64_t across = (g.n + kTile - 1) / kTile;
  const int64_t i0 = blockIdx.x / across * kTile, j0 = blockIdx.x % across * kTile;
  const int row = threadIdx.x / (kTile / kEach) * kEach, col = threadIdx.x % (kTile / kEach) * kEach;
  const T *bias = static_cast<const T *>(g.bias);
  for (int64_t z = blockIdx.y; z < g.count; z += gridDim.y) {
    const T *a = static_cast<const T *>(g.a.data) + z * g.a_step + (g.a.transposed ? i0 : i0 * g.a.stride);
    const T *b = static_cast<const T *>(g.b.data) + z * g.b_step + (g.b.transposed ? j0 * g.b.stride : j0);
    A sum[kEach][kEach] = {};
    for (int64_t p = 0; p < g.k; p += kDepth) {
      load_tile(a_tile, a + (g.a.transposed ? p * g.a.stride : p), g.m - i0, g.k - p, g.a.stride, g.a.transposed);
      load_tile(b_tile, b + (g.b.transposed ? p : p * g.b.stride), g.n - j0, g.k - p, g.b.stride, !g.b.transposed);
      __syncthreads();
#pragma unroll
      for (int d = 0; d < kDepth; ++d)
#pragma unroll
        for (int i = 0; i < kEach; ++i)
#pragma unroll
          for (int j = 0; j < kEach; ++j) sum[i][j] += a_tile[d][row + i] * b_tile[d][col + j];
      __syncthreads();
    }
    for (int i = 0; i < kEach; ++i)
      for (int j = 0; j < kEach; ++j) {
        const int64_t m = i0 + row + i, n = j0 + col + j, at = z * g.c_step + m * g.c.stride + n;
        if (m >= g.m || n >= g.n) continue;
        A v = sum[i][j] + (bias ? widen(bias[n]) : A(0));
        if (g.before) static_cast<C *>(g.before)[at] = narrow<C>(v);
        static_cast<C *>(g.c.data)[at] = narrow<C>(activate<T>(v, g.activation));
      }
  }
}

// y[i] = the sum of `count` numbers, x[i], x[i + n] ..., in this order.
template <typename T>
__global__ void __launch_bounds__(kMapBlock) sum_apart(const Accumulate<T> *x, int64_t count, T *y, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * kMapBlock + threadIdx.x;
  if (i >= n) return;
  Accumulate<T> sum = 0;
  for (int64_t s = 0; s < count; ++s) sum += x[s * n + i];
  y[i] = narrow<T>(sum);
}

// ------------------------------------------------------------------------------------------------------- launchers

static Status gemm_plain(const char *op, const Gemm &gemm, cudaStream_t stream) {
  const int64_t tiles = ceil_div(gemm.m, kTile) * ceil_div(gemm.n, kTile);
  if (tiles > 0x7fffffff) return fail(kInvalidArgument, "%s: a product has more elements than a kernel takes", op);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(std::min<int64_t>(gemm.count, 65535)));
  return dispatch(gemm.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (gemm.c_dtype == gemm.dtype) gemm_kernel<T, T><<<grid, kThreads, 0, stream>>>(gemm);
    else gemm_kernel<T, Accumulate<T>><<<grid, kThreads, 0, stream>>>(gemm);
    return check_launch(op);
  });
}

// Of 128 x 128, of all products.
static int64_t tiles_of(const Gemm &g) { return ceil_div(g.m, 128) * ceil_div(g.n, 128) * g.count; }

// Whether every line of a product is whole vectors of 16 bytes.
static bool takes_vectors(const Gemm &g) {
  const int64_t elements = g.dtype == DType::float64 ? 2 : g.dtype == DType::float32 ? 4 : 8;
  for (int64_t n : {g.a.transposed ? g.m : g.k, g.b.transposed ? g.k : g.n, g.n, g.a.stride, g.b.stride, g.c.stride,
                    g.a_step, g.b_step, g.c_step})
    if (n % elements) return false;
  auto bytes = [](const void *p) { return static_cast<const char *>(p); };
  return aligned(bytes(g.a.data), bytes(g.b.data), bytes(g.c.data), bytes(g.bias), bytes(g.before));
}

// CUTLASS's kernels take 16 bits.
static bool cutlass_takes(const Gemm &g) {
  constexpr int64_t kLimit = 0x7fffffff;
  const bool half = g.dtype == DType::bfloat16 || g.dtype == DType::float16;
  return half && g.c_dtype == g.dtype && g.k && g.m <= kLimit && g.n <= kLimit && g.k <= kLimit;
}

// Hopper's own kernels; `before` is linear's, whose matrices both have k innermost.
static Status gemm_on_hopper(const char *op, const Gemm &gemm, cudaStream_t stream, bool *done) {
  *done = false;
#ifdef AOT_HAVE_SM90
  DeviceLimits limits;
  AOT_TRY(device_limits(op, &limits));
  if (limits.major != 9 || gemm.count > 0x7fffffff || !cutlass_takes(gemm) || !takes_vectors(gemm)) return kOk;
  if (gemm.before && (gemm.a.transposed || !gemm.b.transposed)) return kOk;
  auto *run = gemm.dtype == DType::bfloat16 ? gemm_bfloat16_sm90 : gemm_float16_sm90;
  // Small tiles where there would be too few large ones, unless they are long.
  const int64_t tiles = tiles_of(gemm), all = limits.multiprocessors;
  const bool small = 2 * tiles <= all || (tiles < all && gemm.k <= 1024);
  return run(op, gemm, small ? 64 : 128, limits.multiprocessors, stream, done);
#else
  return kOk;
#endif
}

static Status gemm_on_ampere(const char *op, const Gemm &gemm, cudaStream_t stream, bool *done) {
  constexpr int64_t kMaxBatch = 65535;  // of a grid
  *done = false;
  DeviceLimits limits;
  AOT_TRY(device_limits(op, &limits));
  if (limits.major < 8 || gemm.before || gemm.count > kMaxBatch || !cutlass_takes(gemm)) return kOk;
  return gemm_sm80(op, gemm, takes_vectors(gemm), stream, done);
}

template <typename T>
__global__ void __launch_bounds__(kMapBlock) activate_kernel(const T *x, T *y, int64_t n, Activation activation) {
  map<T, 1>([=](auto x) { return activate<T>(x, activation); }, n, {y}, {x});
}

// cuBLASLt's product with the bias, and the activation after it: where rounding in between loses nothing.
static Status gemm_and_activation(const char *op, const Gemm &gemm, cudaStream_t stream, bool *done) {
  *done = false;
  const bool whole = gemm.count == 1 && gemm.c.stride == gemm.n;
  if (!gemm.activation || accumulate_dtype(gemm.dtype) != gemm.c_dtype || !whole) return kOk;
  Gemm product = gemm;
  product.activation = kActivationNone, product.before = nullptr;
  if (gemm.before) product.c.data = gemm.before;
  AOT_TRY(gemm_cublaslt(op, product, stream, done));
  if (!*done) return kOk;
  return dispatch(gemm.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t n = gemm.m * gemm.n;
    activate_kernel<T><<<map_grid<T, 1>(n), kMapBlock, 0, stream>>>(static_cast<const T *>(product.c.data),
                                                                    static_cast<T *>(gemm.c.data), n, gemm.activation);
    return check_launch(op);
  });
}

// A plain product is cuBLASLt's, as measured; with an activation, CUTLASS's.
Status gemm(const char *op, const Gemm &gemm, cudaStream_t stream) {
  if (gemm.m == 0 || gemm.n == 0 || gemm.count == 0) return kOk;
  bool done = false;
  for (auto *way : {gemm_cublaslt, gemm_on_hopper, gemm_on_ampere, gemm_and_activation}) {
    AOT_TRY(way(op, gemm, stream, &done));
    if (done) return kOk;
  }
  return gemm_plain(op, gemm, stream);
}

// The innermost axis is the kernels' own batch; the others are launches.
static Status multiply_each(const char *op, const Product &p, DType c_dtype, bool allow_tf32, void *workspace,
                            int64_t workspace_bytes, cudaStream_t stream) {
  const Product::Axis inner = p.naxes ? p.axes[p.naxes - 1] : Product::Axis{1, 0, 0, 0};
  const int64_t size = p.dtype == DType::float64 ? 8 : p.dtype == DType::float32 ? 4 : 2;
  const int64_t c_size = c_dtype == p.dtype ? size : 4;
  Product outer = p;
  outer.naxes = p.naxes ? p.naxes - 1 : 0;
  for (int64_t i = 0; i < outer.count(); ++i) {
    int64_t a, b, c;
    outer.at(i, &a, &b, &c);
    auto at = [](Operand x, int64_t bytes) { return x.data = static_cast<char *>(x.data) + bytes, x; };
    Gemm g = {p.dtype, c_dtype, p.m, p.n, p.k, at(p.a, a * size), at(p.b, b * size), at(p.c, c * c_size)};
    g.count = inner.length, g.a_step = inner.a, g.b_step = inner.b, g.c_step = inner.c;
    g.allow_tf32 = allow_tf32, g.workspace = workspace, g.workspace_bytes = workspace_bytes;
    AOT_TRY(gemm(op, g, stream));
  }
  return kOk;
}

Status multiply(const char *op, const Product &product, bool allow_tf32, const Tensor &scratch, int64_t first,
                int64_t sums, cudaStream_t stream) {
  if (!product.elements()) return kOk;
  const int64_t size = product.dtype == DType::float64 ? 8 : 4;
  constexpr int64_t kAligned = 256;
  char *rest = nullptr;
  int64_t bytes = 0;
  if (scratch) {  // behind the sums: cuBLASLt's
    const int64_t used = ceil_div(sums * size, kAligned) * kAligned;
    bytes = std::max<int64_t>(scratch.size() * size - used, 0), rest = bytes ? scratch.as<char>() + used : nullptr;
  }
  if (!product.sums()) return multiply_each(op, product, product.dtype, allow_tf32, rest, bytes, stream);
  if (!scratch) return fail(kConventionMisused, "%s: workspace is missing", op);
  char *apart = scratch.as<char>() + first * size;
  AOT_TRY(multiply_each(op, product.apart(apart), accumulate_dtype(product.dtype), allow_tf32, rest, bytes, stream));
  return dispatch(product.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t n = product.elements();
    sum_apart<T><<<grid_size(ceil_div(n, kMapBlock)), kMapBlock, 0, stream>>>(
        reinterpret_cast<const Accumulate<T> *>(apart), product.summed(), static_cast<T *>(product.c.data), n);
    return check_launch(op);
  });
}

}  // namespace AOT_ISA
}  // namespace aot
