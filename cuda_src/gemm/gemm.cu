// GEMM on CUDA: the choice of the kernel, and the kernel that supports every type, layout and alignment.
#include "gemm.h"

#include "activation.cuh"
#include "cuda/elementwise.cuh"
#include "cuda/overlap.cuh"
#include "cuda/sum_slices.cuh"
#include "gemm_odd_lines.h"
#include "gemm_tf32.h"
#include "gemm_unaligned.h"
#include "tile.cuh"
#include "transpose.cuh"
#include "transposed.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// --------------------------------------------------------------------------------------------------------- kernels

// LargeTile: for large products of float32 whose lines are whole vectors.
template <typename A>
using UsualTile =
    std::conditional_t<sizeof(A) == 4, SimtTile<64, 64, 16, 1, 1, 2, 8>, SimtTile<128, 64, 8, 2, 1, 1, 2>>;
using LargeTile = SimtTile<128, 128, 16, 2, 2, 2, 2>;

// Starts a loader at line `first` of an operand's `lines`. Out-of-range lines are clamped to the last.
template <typename T, class Shape, int kWidth, bool kKMajor, int kSize>
__device__ inline void begin_lines(TileLoader<T, Shape, kWidth, kKMajor, kSize> &loader, const T *data, int64_t stride,
                                   int64_t first, int64_t lines, int64_t depth) {
  loader.begin(depth, kKMajor ? Shape::kDepth : Shape::kDepth * stride, [&](int at, int k) {
    const int64_t line = min(first + at, lines - (kKMajor ? 1 : kSize));
    return data + (kKMajor ? line * stride + k : k * stride + line);
  });
}

// Whether this kernel applies the activation: if another one did, it would have to start from a rounded pre-activation.
template <typename T, typename C>
constexpr bool kActivates = sizeof(T) == 2 && std::is_same_v<T, C>;

// kKMajorA: a is not transposed; kKMajorB: b is. The summed axis is then contiguous. kAdds: GemmParams::adds.
template <typename T, typename C, class Shape, int kSize, bool kAdds, bool kKMajorA, bool kKMajorB>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks) gemm_kernel(GemmParams g) {
  using A = Accumulate<T>;
  __shared__ TileStages<Shape, A> memory;
  const int64_t across = ceil_div(g.n, Shape::kN);
  const int64_t i0 = blockIdx.x / across * Shape::kM, j0 = blockIdx.x % across * Shape::kN;
  const T *bias = static_cast<const T *>(g.bias);
  for (int64_t z = blockIdx.y; z < g.count; z += gridDim.y) {
    TileSums<Shape, A> sum = {};
    auto begin = [&](auto &left, auto &right) {
      begin_lines(left, static_cast<const T *>(g.a.data) + z * g.a_step, g.a.stride, i0, g.m, g.k);
      begin_lines(right, static_cast<const T *>(g.b.data) + z * g.b_step, g.b.stride, j0, g.n, g.k);
    };
    simt_mainloop<TileLoader<T, Shape, Shape::kM, kKMajorA, kSize>, TileLoader<T, Shape, Shape::kN, kKMajorB, kSize>>(
        memory, sum, ceil_div(g.k, Shape::kDepth), begin);
    constexpr int kCount = kSize < 4 ? kSize : 4;
#pragma unroll
    for (int i = 0; i < Shape::kRows; ++i)
#pragma unroll
      for (int j = 0; j < Shape::kColumns; j += kCount) {
        const int64_t m = i0 + first_row<Shape>() + i / 4 * Shape::kPartM + i % 4;
        const int64_t n = j0 + first_column<Shape>() + j / 4 * Shape::kPartN + j % 4;
        const int64_t at = z * g.c_step + m * g.c.stride + n;
        if (m >= g.m || n >= g.n) continue;
        C *c = static_cast<C *>(g.c.data) + at;
        Packet<C, kCount> v, pre_activation;
        if constexpr (kAdds) v = *reinterpret_cast<const Packet<C, kCount> *>(c);
#pragma unroll
        for (int l = 0; l < kCount; ++l) {
          A value = sum.value[i][j + l] + (bias ? widen(bias[n + l]) : A(0));
          if constexpr (kAdds) value += v.value[l];
          if constexpr (kActivates<T, C>)
            pre_activation.value[l] = narrow<C>(value), value = activate<C>(value, g.activation);
          v.value[l] = narrow<C>(value);
        }
        store_packet(c, v);
        if (kActivates<T, C> && g.pre_activation) store_packet(static_cast<C *>(g.pre_activation) + at, pre_activation);
      }
    __syncthreads();
  }
}

// ------------------------------------------------------------------------------------------------------- launchers

// Tiles of 128 x 128 results, over all products.
int64_t count_tiles(const GemmParams &g) { return ceil_div(g.m, 128) * ceil_div(g.n, 128) * g.count; }

// Whether every line of the matrices is whole, aligned vectors of 16 bytes.
bool has_vectors(const GemmParams &g) {
  const int64_t elements = 16 / itemsize(g.dtype);
  for (int64_t n : {g.a.transposed ? g.m : g.k, g.b.transposed ? g.k : g.n, g.n, g.a.stride, g.b.stride, g.c.stride,
                    g.a_step, g.b_step, g.c_step})
    if (n % elements) return false;
  auto bytes = [](const void *p) { return static_cast<const char *>(p); };
  return aligned(bytes(g.a.data), bytes(g.b.data), bytes(g.c.data), bytes(g.bias), bytes(g.pre_activation));
}

// Whether the lines of 16-bit operands begin at multiples of 16 bytes.
bool has_lines(const GemmParams &g) {
  return (g.a.stride | g.b.stride | g.a_step | g.b_step) % 8 == 0 && aligned(g.a.data, g.b.data);
}

template <typename T, typename C, class Shape, int kSize, bool kAdds = false>
Status launch_tiles(const char *op, const GemmParams &g, cudaStream_t stream) {
  if constexpr (!kAdds && std::is_same_v<C, Accumulate<T>>)
    if (g.adds) return launch_tiles<T, C, Shape, kSize, true>(op, g, stream);
  const int64_t tiles = ceil_div(g.m, Shape::kM) * ceil_div(g.n, Shape::kN);
  if (tiles > 0x7fffffff) return fail(kInvalidArgument, "%s: a product has more elements than a kernel takes", op);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(std::min<int64_t>(g.count, 65535)));
  auto *kernel = g.a.transposed ? (g.b.transposed ? gemm_kernel<T, C, Shape, kSize, kAdds, false, true>
                                                  : gemm_kernel<T, C, Shape, kSize, kAdds, false, false>)
                                : (g.b.transposed ? gemm_kernel<T, C, Shape, kSize, kAdds, true, true>
                                                  : gemm_kernel<T, C, Shape, kSize, kAdds, true, false>);
  kernel<<<grid, Shape::kThreads, 0, stream>>>(g);
  return check_launch(op);
}

Status gemm_simt(const char *op, const GemmParams &g, cudaStream_t stream) {
  return dispatch(g.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    if constexpr (std::is_same_v<T, float>)
      if (has_vectors(g))
        return count_tiles(g) >= 96 ? launch_tiles<T, T, LargeTile, 4>(op, g, stream)
                                    : launch_tiles<T, T, UsualTile<A>, 4>(op, g, stream);
    return g.c_dtype == g.dtype ? launch_tiles<T, T, UsualTile<A>, 1>(op, g, stream)
                                : launch_tiles<T, A, UsualTile<A>, 1>(op, g, stream);
  });
}

// CUTLASS's kernels are for 16-bit dtypes.
bool cutlass_supports(const GemmParams &g) {
  constexpr int64_t kLimit = 0x7fffffff;
  const bool half = g.dtype == DType::bfloat16 || g.dtype == DType::float16;
  const bool c = g.adds ? g.a.transposed && !g.b.transposed && has_vectors(g) : g.c_dtype == g.dtype;
  return half && c && g.k && g.m <= kLimit && g.n <= kLimit && g.k <= kLimit;
}

// CUTLASS's kernels for Hopper. pre_activation only with K-major operands, as linear's are.
Status gemm_on_hopper(const char *op, const GemmParams &gemm, cudaStream_t stream, bool *done) {
  *done = false;
#ifdef AOT_HAVE_SM90
  DeviceLimits limits;
  AOT_TRY(device_limits(op, &limits));
  if (limits.major != 9 || gemm.count > 0x7fffffff || !cutlass_supports(gemm) || !has_vectors(gemm)) return kOk;
  if (gemm.pre_activation && (gemm.a.transposed || !gemm.b.transposed)) return kOk;
  auto *run = gemm.adds                       ? gemm_accumulate_sm90
              : gemm.dtype == DType::bfloat16 ? gemm_sm90<__nv_bfloat16>
                                              : gemm_sm90<__half>;
  // Small tiles if large ones do not fill half of the device, or not all of it and sums are short.
  const int64_t tiles = count_tiles(gemm), all = limits.multiprocessors;
  AOT_TRY(bind_device(op));  // for the driver, which encodes tensor maps
  const bool small = 2 * tiles <= all || (tiles < all && gemm.k <= 1024);
  return run(op, gemm, small ? 64 : 128, limits.multiprocessors, stream, done);
#else
  return kOk;
#endif
}

// Whether cuBLASLt runs products with an activation, too: $AOTOPS_GEMM names it.
bool requires_cublaslt(GemmParams g) {
  return g.dtype = DType::bfloat16, g.activation = kActivationRelu, prefers_cublaslt(g);
}

// CUTLASS's mainloop for Hopper, where c's lines are not aligned, or sizes are no whole vectors. cuBLASLt's kernels for
// such have a quarter of the rate, but it splits sums where tiles are few.
Status gemm_unaligned_on_hopper(const char *op, const GemmParams &gemm, cudaStream_t stream, bool *done) {
  *done = false;
  const bool unaligned = cutlass_supports(gemm) && !gemm.adds && has_lines(gemm) && !has_vectors(gemm);
  if (!unaligned || requires_cublaslt(gemm) || gemm.count > 0x7fffffff) return kOk;
  const bool epilogue = gemm.bias || gemm.activation || gemm.pre_activation;
  if (epilogue && (gemm.a.transposed || !gemm.b.transposed)) return kOk;
#ifdef AOT_HAVE_SM90
  DeviceLimits limits;
  AOT_TRY(device_limits(op, &limits));
  if (limits.major != 9 || (prefers_cublaslt(gemm) && 4 * count_tiles(gemm) <= limits.multiprocessors)) return kOk;
  AOT_TRY(bind_device(op));  // for the driver, which encodes tensor maps
  *done = true;
  return gemm_unaligned_sm90(op, gemm, limits.multiprocessors, stream);
#else
  return kOk;
#endif
}

// linear in TF32 with an activation, but relu, which cuBLASLt's epilogue has: CUTLASS's kernel for Hopper applies it to
// sums that it has in registers, where cuBLASLt's are written, read and written again. Where tiles are few, or sums
// long, cuBLASLt's product saves more. A call that wants pre_activation has it written anyway, and keeps cuBLASLt: its
// c then differs in what TF32 loses.
Status gemm_tf32_on_hopper(const char *op, const GemmParams &gemm, cudaStream_t stream, bool *done) {
  *done = false;
#ifdef AOT_HAVE_SM90
  constexpr int64_t kLimit = 0x7fffffff, kMostTerms = 8192;
  const bool fuses = gemm.dtype == DType::float32 && gemm.allow_tf32 && gemm.activation &&
                     gemm.activation != kActivationRelu && !gemm.pre_activation;
  const bool takes = fuses && gemm.k && gemm.k <= kMostTerms && gemm.count == 1 && !gemm.a.transposed &&
                     gemm.b.transposed && gemm.m <= kLimit && gemm.n <= kLimit && has_vectors(gemm);
  if (!takes || requires_cublaslt(gemm)) return kOk;
  DeviceLimits limits;
  AOT_TRY(device_limits(op, &limits));
  if (limits.major != 9 || 2 * count_tiles(gemm) < 3 * limits.multiprocessors) return kOk;
  AOT_TRY(bind_device(op));  // for the driver, which encodes tensor maps
  return gemm_tf32_sm90(op, gemm, limits.multiprocessors, stream, done);
#else
  return kOk;
#endif
}

// A product a^T b in TF32 on Hopper, as one of a's and b's transposed copies behind cuBLASLt's scratch, where there is
// room for them: some terms at a time, which are added in their order.
Status gemm_tf32_of_t(const char *op, const GemmParams &gemm, cudaStream_t stream, bool *done) {
  *done = false;
  const bool plain = gemm.count == 1 && !gemm.bias && !gemm.activation && !gemm.pre_activation;
  const bool takes = plain && gemm.dtype == DType::float32 && gemm.allow_tf32 && gemm.a.transposed &&
                     !gemm.b.transposed && prefers_cublaslt(gemm) && has_vectors(gemm);
  const int64_t terms = takes ? transposed_terms(gemm.m, gemm.n, gemm.k) : 0;
  const int64_t bytes = terms * (gemm.m + gemm.n) * int64_t(sizeof(float));
  if (!terms || gemm.workspace_bytes < kLibraryBytes + bytes || !aligned(gemm.workspace)) return kOk;
  DeviceLimits limits;
  AOT_TRY(device_limits(op, &limits));
  if (limits.major != 9) return kOk;
  float *const a = reinterpret_cast<float *>(static_cast<char *>(gemm.workspace) + kLibraryBytes);
  float *const b = a + gemm.m * terms;
  for (int64_t first = 0; first < gemm.k; first += terms) {
    GemmParams part = gemm;
    part.k = std::min(terms, gemm.k - first), part.adds = gemm.adds || first, part.workspace_bytes = kLibraryBytes;
    part.a = {a, terms, false}, part.b = {b, terms, true};
    const auto copy = [&](const Operand &from, float *to, int64_t lines) {
      return transpose_lines(op, static_cast<const float *>(from.data) + first * from.stride, from.stride, to, terms,
                             part.k, lines, stream);
    };
    AOT_TRY(copy(gemm.a, a, gemm.m));
    AOT_TRY(copy(gemm.b, b, gemm.n));
    AOT_TRY(gemm_cublaslt(op, part, stream, done));
    if (!*done && first && gemm.adds)  // c has some of the terms
      return fail(kDeviceError, "%s: cuBLASLt has no algorithm for the last terms", op);
    if (!*done) return kOk;
  }
  return kOk;
}

Status gemm_on_ampere(const char *op, const GemmParams &gemm, cudaStream_t stream, bool *done) {
  constexpr int64_t kMaxBatch = 65535;  // of a grid
  *done = false;
  DeviceLimits limits;
  AOT_TRY(device_limits(op, &limits));
  if (limits.major < 8 || gemm.count > kMaxBatch || !cutlass_supports(gemm)) return kOk;
  if (gemm.adds) return gemm_accumulate_sm80(op, gemm, stream, done);
  if (gemm.pre_activation && (gemm.a.transposed || !gemm.b.transposed)) return kOk;
  auto *run = gemm.dtype == DType::bfloat16 ? gemm_sm80<__nv_bfloat16> : gemm_sm80<__half>;
  return run(op, gemm, has_vectors(gemm), stream, done);
}

template <Activation activation>
struct Constant {
  __device__ operator Activation() const { return activation; }
};

// The GELU of 16 bits, less wrong than TF32 is: by 1.4e-5 of the result for x >= -7, and by 1e-15 below. With it 1024
// cubed took 14.3 us on an H200 instead of 15.2.
struct NarrowGelu {};

template <typename T, typename A, class Chosen>
__device__ inline A activate_as(A x, Chosen activation) {
  if constexpr (std::is_same_v<Chosen, NarrowGelu>) return gelu<__half, false>(x);
  else return activate<T>(x, activation);
}

// Chosen: an Activation, or in float32 a type: GELU chosen for each element took 71 us at 8192 x 4096 on an H200,
// torch's 59.
template <typename T, int kVectors, class Chosen>
__global__ void __launch_bounds__(kMapBlock) activate_kernel(const T *x, T *y, int64_t n, Chosen activation) {
  wait_for_kernel_before();
  map<T, kVectors>([=](auto x) { return activate_as<T>(x, activation); }, n, {y}, {x});
}

template <typename T, int kVectors = 1, class Chosen>
Status run_activation(const char *op, const T *x, T *y, int64_t n, Chosen activation, cudaStream_t stream) {
  return launch_kernel(op, activate_kernel<T, kVectors, Chosen>, {map_grid<T, kVectors>(n), kMapBlock, 0, 1, true},
                       stream, x, y, n, activation);
}

// The product with its bias, and then the activation in a kernel of its own.
Status gemm_and_activation(const char *op, const GemmParams &g, cudaStream_t stream) {
  GemmParams product = g;
  product.activation = kActivationNone, product.pre_activation = nullptr;
  if (g.pre_activation) product.c.data = g.pre_activation;
  AOT_TRY(gemm(op, product, stream));
  return dispatch(g.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T *const x = static_cast<const T *>(product.c.data);
    T *const y = static_cast<T *>(g.c.data);
    const int64_t n = g.m * g.n;
    if constexpr (std::is_same_v<T, float>) {
      switch (g.activation) {
        case kActivationGelu:  // in two vectors, as gelu
          if (g.allow_tf32) return run_activation<T, 2>(op, x, y, n, NarrowGelu(), stream);
          return run_activation<T, 2>(op, x, y, n, Constant<kActivationGelu>(), stream);
        case kActivationGeluTanh:
          return run_activation(op, x, y, n, Constant<kActivationGeluTanh>(), stream);
        case kActivationSilu:
          return run_activation(op, x, y, n, Constant<kActivationSilu>(), stream);
        default:
          return run_activation(op, x, y, n, Constant<kActivationRelu>(), stream);
      }
    } else {
      return run_activation(op, x, y, n, g.activation, stream);
    }
  });
}

}  // namespace

Status padding_pays(const char *op, const GemmParams &dweight, bool *pays) {
  *pays = false;
#ifdef AOT_HAVE_SM90
  constexpr double kGain = 0.75;  // of the estimates: one round of few terms is faster than its own
  DeviceLimits limits;
  AOT_TRY(device_limits(op, &limits));
  const bool known = dweight.k % 8 == 0;  // what was measured
  if (limits.major != 9 || !known || !cutlass_supports(dweight) || !prefers_cublaslt(dweight)) return kOk;
  *pays = padded_time(dweight) < kGain * usual_time(dweight, limits.multiprocessors);
#endif
  return kOk;
}

Status odd_lines_pay(const char *op, const GemmParams *dx, const GemmParams *dweight, bool sums, bool pads,
                     bool *pays) {
  *pays = false;
#ifdef AOT_HAVE_SM90
  constexpr double kGain = 0.98;     // of the estimates, which are some percent off
  if (sums && !dweight) return kOk;  // whose kernel sums
  DeviceLimits limits;
  AOT_TRY(device_limits(op, &limits));
  if (limits.major != 9) return kOk;
  double own = 0, usual = 0, copy = 0;
  for (const GemmParams *g : {dx, dweight}) {
    if (!g) continue;
    if (!odd_lines_supported(*g) || requires_cublaslt(*g)) return kOk;
    const OddLinesPlan plan = odd_lines_plan(*g, limits.multiprocessors);
    own += odd_lines_time(*g, limits.multiprocessors, plan, sums && g == dweight);
    usual += pads && g == dweight ? padded_time(*g) : usual_time(*g, limits.multiprocessors);
    copy = copy_time(g->m, g->k);
  }
  *pays = own < kGain * (usual + copy);
#endif
  return kOk;
}

Status gemm_odd_lines(const char *op, const GemmParams *dx, const GemmParams *dweight, void *dbias, cudaStream_t stream,
                      bool *done) {
  *done = false;
#ifdef AOT_HAVE_SM90
  DeviceLimits limits;
  AOT_TRY(device_limits(op, &limits));
  AOT_TRY(bind_device(op));  // for the driver, which encodes tensor maps
  *done = true;
  if (dx) AOT_TRY(gemm_odd_lines_sm90(op, *dx, limits.multiprocessors, stream, done));
  if (!*done || !dweight) return kOk;
  return gemm_odd_lines_of_t_sm90(op, *dweight, dbias, limits.multiprocessors, stream, done);
#else
  return kOk;
#endif
}

// The first kernel that supports the GEMM runs it. An activation is applied to the sum before it is rounded, except in
// 16 bits with AOTOPS_GEMM=cublaslt, where a kernel for the activation follows; relu commutes with rounding, and may
// follow it.
Status gemm(const char *op, const GemmParams &gemm, cudaStream_t stream) {
  if (gemm.m == 0 || gemm.n == 0 || gemm.count == 0 || (gemm.adds && gemm.k == 0)) return kOk;
  AOT_TRY(check_cublaslt(op));
  const bool half = itemsize(gemm.dtype) == 2, library_first = prefers_cublaslt(gemm);
  if (half && gemm.activation && library_first) return gemm_and_activation(op, gemm, stream);
  using Kernel = Status (*)(const char *, const GemmParams &, cudaStream_t, bool *);
  const Kernel order[2][6] = {
      {gemm_tf32_of_t, gemm_tf32_on_hopper, gemm_unaligned_on_hopper, gemm_on_hopper, gemm_on_ampere, gemm_cublaslt},
      {gemm_tf32_of_t, gemm_tf32_on_hopper, gemm_unaligned_on_hopper, gemm_cublaslt, gemm_on_hopper, gemm_on_ampere}};
  for (Kernel kernel : order[library_first]) {
    bool done = false;
    AOT_TRY(kernel(op, gemm, stream, &done));
    if (done) return kOk;
  }
  const bool rounds = half && gemm.activation != kActivationRelu;
  if (gemm.activation && !rounds) return gemm_and_activation(op, gemm, stream);
  return gemm_simt(op, gemm, stream);
}

namespace {

// One launch for each index of the outer axes; the innermost axis is the GEMM's batch.
Status run_gemms(const char *op, const MatmulProblem &p, DType c_dtype, bool allow_tf32, void *workspace,
                 int64_t workspace_bytes, cudaStream_t stream) {
  const MatmulProblem::Axis inner = p.naxes ? p.axes[p.naxes - 1] : MatmulProblem::Axis{1, 0, 0, 0};
  const int64_t size = itemsize(p.dtype), c_size = itemsize(c_dtype);
  MatmulProblem outer = p;
  outer.naxes = p.naxes ? p.naxes - 1 : 0;
  for (int64_t i = 0; i < outer.count(); ++i) {
    int64_t a, b, c;
    outer.at(i, &a, &b, &c);
    auto at = [](Operand x, int64_t bytes) { return x.data = static_cast<char *>(x.data) + bytes, x; };
    GemmParams g = {p.dtype, c_dtype, p.m, p.n, p.k, at(p.a, a * size), at(p.b, b * size), at(p.c, c * c_size)};
    g.count = inner.length, g.a_step = inner.a, g.b_step = inner.b, g.c_step = inner.c;
    g.adds = p.adds, g.allow_tf32 = allow_tf32, g.workspace = workspace, g.workspace_bytes = workspace_bytes;
    AOT_TRY(gemm(op, g, stream));
  }
  return kOk;
}

}  // namespace

Status run_matmul(const char *op, const MatmulProblem &problem, bool allow_tf32, const Tensor &scratch, int64_t first,
                  int64_t reserved, cudaStream_t stream) {
  if (!problem.elements()) return kOk;
  const int64_t size = itemsize(accumulate_dtype(problem.dtype));
  constexpr int64_t kAligned = 256;
  char *library_scratch = nullptr;
  int64_t library_bytes = 0;
  if (scratch) {
    const int64_t used = ceil_div(reserved * size, kAligned) * kAligned;
    library_bytes = std::max<int64_t>(scratch.size() * size - used, 0);
    if (library_bytes) library_scratch = scratch.as<char>() + used;
  }
  auto run = [&](const MatmulProblem &p, DType c_dtype) {
    return run_gemms(op, p, c_dtype, allow_tf32, library_scratch, library_bytes, stream);
  };
  if (!problem.reduces()) return run(problem, problem.c_dtype());
  if (!scratch) return fail(kConventionMisused, "%s: workspace is missing", op);
  char *products = scratch.as<char>() + first * size;
  AOT_TRY(run(problem.unreduced(products), accumulate_dtype(problem.dtype)));
  return dispatch(problem.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    return sum_slices<A>(op, reinterpret_cast<const A *>(products), problem.products_per_result(),
                         static_cast<T *>(problem.c.data), problem.elements(), stream);
  });
}

}  // namespace AOT_ISA
}  // namespace aot
