// A matrix product on the device: which kernel runs it, and the one that takes every type, layout and alignment.
#include "gemm.h"

#include "activation.cuh"
#include "cuda/elementwise.cuh"
#include "tile.cuh"

namespace aot {
inline namespace AOT_ISA {

// --------------------------------------------------------------------------------------------------------- kernels

// The tiles of a product, and those of one that is large and of whole vectors of float32.
template <typename A>
using UsualTile = std::conditional_t<sizeof(A) == 4, Tile<64, 64, 16, 1, 1, 2, 8>, Tile<128, 64, 8, 2, 1, 1, 2>>;
using LargeTile = Tile<128, 128, 16, 2, 2, 2, 2>;

// Lets a carrier begin with the lines of an operand from `first` on, of which there are `lines`; beyond the last is the
// last again.
template <typename T, class Shape, int kWidth, bool kDeep, int kSize>
__device__ inline void begin_lines(Carrier<T, Shape, kWidth, kDeep, kSize> &carrier, const T *data, int64_t stride,
                                   int64_t first, int64_t lines, int64_t depth) {
  carrier.begin(depth, kDeep ? Shape::kDepth : Shape::kDepth * stride, [&](int at, int k) {
    const int64_t line = min(first + at, lines - (kDeep ? 1 : kSize));
    return data + (kDeep ? line * stride + k : k * stride + line);
  });
}

// Whether the kernel applies the activation: where what goes into it would be rounded on the way to another kernel.
template <typename T, typename C>
constexpr bool kActivates = sizeof(T) == 2 && std::is_same_v<T, C>;

// kDeep: a lies as it is, b transposed, so that the summed axis is innermost.
template <typename T, typename C, class Shape, int kSize, bool kDeepA, bool kDeepB>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks) gemm_kernel(Gemm g) {
  using A = Accumulate<T>;
  __shared__ TileMemory<Shape, A> memory;
  const int64_t across = ceil_div(g.n, Shape::kN);
  const int64_t i0 = blockIdx.x / across * Shape::kM, j0 = blockIdx.x % across * Shape::kN;
  const T *bias = static_cast<const T *>(g.bias);
  for (int64_t z = blockIdx.y; z < g.count; z += gridDim.y) {
    TileSums<Shape, A> sum = {};
    auto begin = [&](int, auto &left, auto &right) {
      begin_lines(left, static_cast<const T *>(g.a.data) + z * g.a_step, g.a.stride, i0, g.m, g.k);
      begin_lines(right, static_cast<const T *>(g.b.data) + z * g.b_step, g.b.stride, j0, g.n, g.k);
    };
    multiply<Carrier<T, Shape, Shape::kM, kDeepA, kSize>, Carrier<T, Shape, Shape::kN, kDeepB, kSize>>(
        memory, sum, ceil_div(g.k, Shape::kDepth), 0, begin);
    constexpr int kCount = kSize < 4 ? kSize : 4;
#pragma unroll
    for (int i = 0; i < Shape::kRows; ++i)
#pragma unroll
      for (int j = 0; j < Shape::kColumns; j += kCount) {
        const int64_t m = i0 + first_row<Shape>() + i / 4 * Shape::kPartM + i % 4;
        const int64_t n = j0 + first_column<Shape>() + j / 4 * Shape::kPartN + j % 4;
        const int64_t at = z * g.c_step + m * g.c.stride + n;
        if (m >= g.m || n >= g.n) continue;
        Packet<C, kCount> v, before;
#pragma unroll
        for (int l = 0; l < kCount; ++l) {
          A value = sum.value[i][j + l] + (bias ? widen(bias[n + l]) : A(0));
          if constexpr (kActivates<T, C>) before.value[l] = narrow<C>(value), value = activate<C>(value, g.activation);
          v.value[l] = narrow<C>(value);
        }
        store_packet(static_cast<C *>(g.c.data) + at, v);
        if (kActivates<T, C> && g.before) store_packet(static_cast<C *>(g.before) + at, before);
      }
    __syncthreads();
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

// Of 128 x 128, of all products.
static int64_t tiles_of(const Gemm &g) { return ceil_div(g.m, 128) * ceil_div(g.n, 128) * g.count; }

// Whether every line of a product is whole vectors of 16 bytes.
static bool takes_vectors(const Gemm &g) {
  const int64_t elements = 16 / itemsize(g.dtype);
  for (int64_t n : {g.a.transposed ? g.m : g.k, g.b.transposed ? g.k : g.n, g.n, g.a.stride, g.b.stride, g.c.stride,
                    g.a_step, g.b_step, g.c_step})
    if (n % elements) return false;
  auto bytes = [](const void *p) { return static_cast<const char *>(p); };
  return aligned(bytes(g.a.data), bytes(g.b.data), bytes(g.c.data), bytes(g.bias), bytes(g.before));
}

template <typename T, typename C, class Shape, int kSize>
static Status launch_tiles(const char *op, const Gemm &g, cudaStream_t stream) {
  const int64_t tiles = ceil_div(g.m, Shape::kM) * ceil_div(g.n, Shape::kN);
  if (tiles > 0x7fffffff) return fail(kInvalidArgument, "%s: a product has more elements than a kernel takes", op);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(std::min<int64_t>(g.count, 65535)));
  auto *kernel = g.a.transposed ? (g.b.transposed ? gemm_kernel<T, C, Shape, kSize, false, true>
                                                  : gemm_kernel<T, C, Shape, kSize, false, false>)
                                : (g.b.transposed ? gemm_kernel<T, C, Shape, kSize, true, true>
                                                  : gemm_kernel<T, C, Shape, kSize, true, false>);
  kernel<<<grid, Shape::kThreads, 0, stream>>>(g);
  return check_launch(op);
}

static Status gemm_plain(const char *op, const Gemm &g, cudaStream_t stream) {
  return dispatch(g.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    if constexpr (std::is_same_v<T, float>)
      if (takes_vectors(g))
        return tiles_of(g) >= 96 ? launch_tiles<T, T, LargeTile, 4>(op, g, stream)
                                 : launch_tiles<T, T, UsualTile<A>, 4>(op, g, stream);
    return g.c_dtype == g.dtype ? launch_tiles<T, T, UsualTile<A>, 1>(op, g, stream)
                                : launch_tiles<T, A, UsualTile<A>, 1>(op, g, stream);
  });
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
  AOT_TRY(bind_device(op));  // CUTLASS has the driver encode tensor maps
  const bool small = 2 * tiles <= all || (tiles < all && gemm.k <= 1024);
  return run(op, gemm, small ? 64 : 128, limits.multiprocessors, stream, done);
#else
  return kOk;
#endif
}

// The same, where they are faster than cuBLASLt's, as measured: many turns of tiles for every multiprocessor, the last
// of them nearly full, and sums that are not short.
static Status gemm_large_on_hopper(const char *op, const Gemm &gemm, cudaStream_t stream, bool *done) {
  *done = false;
  DeviceLimits limits;
  AOT_TRY(device_limits(op, &limits));
  const int64_t turns = ceil_div(tiles_of(gemm), limits.multiprocessors);
  const double used = double(gemm.m) * gemm.n / (128.0 * 128 * turns * limits.multiprocessors);
  const bool faster = gemm.count == 1 && gemm.k >= 512 && turns >= 8 && used >= 0.95;
  return faster ? gemm_on_hopper(op, gemm, stream, done) : kOk;
}

static Status gemm_on_ampere(const char *op, const Gemm &gemm, cudaStream_t stream, bool *done) {
  constexpr int64_t kMaxBatch = 65535;  // of a grid
  *done = false;
  DeviceLimits limits;
  AOT_TRY(device_limits(op, &limits));
  if (limits.major < 8 || gemm.count > kMaxBatch || !cutlass_takes(gemm)) return kOk;
  if (gemm.before && (gemm.a.transposed || !gemm.b.transposed)) return kOk;
  auto *run = gemm.dtype == DType::bfloat16 ? gemm_bfloat16_sm80 : gemm_float16_sm80;
  return run(op, gemm, takes_vectors(gemm), stream, done);
}

template <typename T>
__global__ void __launch_bounds__(kMapBlock) activate_kernel(const T *x, T *y, int64_t n, Activation activation) {
  map<T, 1>([=](auto x) { return activate<T>(x, activation); }, n, {y}, {x});
}

// The product with the bias, and the activation after it, of what is stored by then.
static Status gemm_and_activation(const char *op, const Gemm &g, cudaStream_t stream) {
  Gemm product = g;
  product.activation = kActivationNone, product.before = nullptr;
  if (g.before) product.c.data = g.before;
  AOT_TRY(gemm(op, product, stream));
  return dispatch(g.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t n = g.m * g.n;
    activate_kernel<T><<<map_grid<T, 1>(n), kMapBlock, 0, stream>>>(static_cast<const T *>(product.c.data),
                                                                    static_cast<T *>(g.c.data), n, g.activation);
    return check_launch(op);
  });
}

// The first of these that takes it. What cuBLASLt leaves has an activation, as a rule. Which one it is does not depend
// on whether `before` is wanted: nor do the bits of the result. An activation sees a sum that is not rounded; for relu
// it is one whether its operand is rounded or its result.
Status gemm(const char *op, const Gemm &gemm, cudaStream_t stream) {
  if (gemm.m == 0 || gemm.n == 0 || gemm.count == 0) return kOk;
  bool done = false;
  for (auto *way : {gemm_large_on_hopper, gemm_cublaslt, gemm_on_hopper, gemm_on_ampere}) {
    AOT_TRY(way(op, gemm, stream, &done));
    if (done) return kOk;
  }
  const bool rounds = itemsize(gemm.dtype) == 2 && gemm.activation != kActivationRelu;
  if (gemm.activation && !rounds) return gemm_and_activation(op, gemm, stream);
  return gemm_plain(op, gemm, stream);
}

// The innermost axis is the kernels' own batch; the others are launches.
static Status multiply_each(const char *op, const Product &p, DType c_dtype, bool allow_tf32, void *workspace,
                            int64_t workspace_bytes, cudaStream_t stream) {
  const Product::Axis inner = p.naxes ? p.axes[p.naxes - 1] : Product::Axis{1, 0, 0, 0};
  const int64_t size = itemsize(p.dtype), c_size = itemsize(c_dtype);
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
  const int64_t size = itemsize(accumulate_dtype(product.dtype));
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
