// Products of 16-bit matrices of any sizes on Hopper's tensor cores, with a c whose lines are not aligned, such as
// logits of 30522 classes. TMA reads the operands, whose lines are aligned, and fills what lies beyond their sizes with
// zeros: CUTLASS's mainloop of ping-pong warpgroups, as in gemm_sm90.cuh. TMA cannot write c, so the epilogue is our
// own. It adds the bias, stores the pre-activation if wanted, and applies the activation, while the other warpgroup
// multiplies.
#define CUTLASS_ENABLE_GDC_FOR_SM90  // its mainloop waits for the kernel before (overlap.cuh)
#include <cutlass/cutlass.h>
#include <cutlass/epilogue/thread/linear_combination.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/epilogue/collective/default_epilogue.hpp>
#include <cutlass/epilogue/collective/detail.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "activation.cuh"
#include "cuda/launch.cuh"
#include "gemm_unaligned.h"
#include "row_stores.cuh"

#if defined(CUTE_ARCH_MMA_SM90A_ENABLED) && !defined(CUTLASS_GDC_ENABLED)
#error "CUTLASS's mainloop does not wait for the kernel before, beside whose end it is launched"
#endif

namespace aot {
inline namespace AOT_ISA {
namespace {

// A warp has 16 of each 64 rows of a tile. kActivates: whether there may be a bias, an activation or a pre-activation.
template <typename T, int kRows, bool kActivates>
class RowEpilogue {
 public:
  using Row = cute::Stride<int64_t, cute::_1, int64_t>;
  // These CUTLASS asks of an epilogue.
  using DispatchPolicy = cutlass::epilogue::NoSmemWarpSpecialized;
  using ThreadEpilogueOp = cutlass::epilogue::thread::LinearCombination<T, 1, float, float>;
  using ElementAccumulator = float;
  using ElementCompute = float;
  using ElementC = T;
  using ElementD = T;
  using StrideC = Row;
  using StrideD = Row;
  using GmemTiledCopyC = void;
  using GmemTiledCopyD = void;

  using Stores = RowStores<T, kUnalignedTile>;

  // The operands' tiles follow, which are swizzled in units of 1024 bytes.
  struct SharedStorage {
    alignas(1024) typename Stores::Words words[4];  // of each warp
  };
  struct Arguments {
    T *c, *pre_activation;
    const T *bias;
    int64_t stride, step;  // of rows, and of the matrices of a batch
    Activation activation;
  };
  using Params = Arguments;

  template <class Problem>
  static constexpr Params to_underlying_arguments(const Problem &, const Arguments &arguments, void *) {
    return arguments;
  }
  template <class Problem>
  static size_t get_workspace_size(const Problem &, const Arguments &) {
    return 0;
  }
  template <class Problem>
  static cutlass::Status initialize_workspace(const Problem &, const Arguments &, void *, cudaStream_t,
                                              cutlass::CudaHostAdapter * = nullptr) {
    return cutlass::Status::kSuccess;
  }
  template <class Problem>
  static bool can_implement(const Problem &, const Arguments &) {
    return true;
  }

  CUTLASS_HOST_DEVICE explicit RowEpilogue(const Params &params) : p_(params) {}

  // sums: of a thread, ((2 columns, 2 rows, 16 times 8 columns), kRows / 64).
  template <class Problem, class Shape, class Coordinates, class Engine, class Layout, class Mma, class Left>
  CUTLASS_DEVICE void operator()(const Problem &, const Shape &, const Coordinates &at,
                                 const cute::Tensor<Engine, Layout> &sums, const Mma &, const Left &left, int thread,
                                 char *shared) const {
    static_assert(decltype(cute::size(sums))::value == kRows / 64 * kSums, "a warpgroup has a tile");
    const int rows = cute::get<0>(left), columns = cute::get<1>(left), warp = thread / 32;
    const Stores stores{reinterpret_cast<SharedStorage *>(shared)->words[warp], p_.stride};
    const int64_t column = int64_t{cute::get<1>(at)} * kUnalignedTile;
    uint32_t bias[kSums / 4] = {};
    if (kActivates && p_.bias) load_bias(bias, p_.bias + column, columns);
#pragma unroll
    for (int half = 0; half < kRows / 64; ++half) {
      const int row = half * 64 + warp * 16;  // the warp's first
      const int64_t first = cute::get<3>(at) * p_.step + (int64_t{cute::get<0>(at)} * kRows + row) * p_.stride + column;
      float v[kSums];
#pragma unroll
      for (int i = 0; i < kSums; ++i) v[i] = sums(half * kSums + i);
      if constexpr (kActivates) {
        if (p_.bias) add_bias(v, bias);
        if (p_.pre_activation) stores.store(v, p_.pre_activation + first, rows - row, columns);
        activate_all(v);
      }
      stores.store(v, p_.c + first, rows - row, columns);
    }
  }

 private:
  static constexpr int kSums = Stores::kSums;

  // The first of the two neighbouring columns that sums 4 j to 4 j + 3 have, in two rows.
  static CUTLASS_DEVICE int column_of(int j) { return j * 8 + threadIdx.x % 4 * 2; }

  // Pairs. Columns beyond c read the last one: a condition for each load would make them wait for one another.
  static CUTLASS_DEVICE void load_bias(uint32_t (&pairs)[kSums / 4], const T *bias, int columns) {
    const auto *from = reinterpret_cast<const uint16_t *>(bias);
    auto at = [&](int column) { return uint32_t{from[min(column, columns - 1)]}; };
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j) pairs[j] = at(column_of(j)) | at(column_of(j) + 1) << 16;
  }

  static CUTLASS_DEVICE void add_bias(float (&v)[kSums], const uint32_t (&pairs)[kSums / 4]) {
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float b = widen(reinterpret_cast<const T(&)[2]>(pairs[j])[i]);
        v[4 * j + i] += b, v[4 * j + 2 + i] += b;
      }
  }

  CUTLASS_DEVICE void activate_all(float (&v)[kSums]) const {
    switch (p_.activation) {  // once for all
      case kActivationRelu:
        return each<kActivationRelu>(v);
      case kActivationGelu:
        return each<kActivationGelu>(v);
      case kActivationGeluTanh:
        return each<kActivationGeluTanh>(v);
      case kActivationSilu:
        return each<kActivationSilu>(v);
      default:
        return;
    }
  }
  template <Activation activation>
  static CUTLASS_DEVICE void each(float (&v)[kSums]) {
#pragma unroll
    for (float &x : v) x = activate<__half>(x, activation);
  }

  Params p_;
};

// Operands that are both K-major, as linear's forward has them.
template <bool kTransposedA, bool kTransposedB>
constexpr bool kForward = !kTransposedA && kTransposedB;

// Tiles by ping-pong warpgroups, in clusters of two blocks that share columns of b or rows of a.
template <typename T, bool kTransposedA, bool kTransposedB, bool kInRows = false, int kRows = kUnalignedTile>
struct UnalignedKernel {
  using E = std::conditional_t<std::is_same_v<T, __half>, cutlass::half_t, cutlass::bfloat16_t>;
  static constexpr int kAligned = 16 / sizeof(T);
  using Row = cutlass::layout::RowMajor;
  using Column = cutlass::layout::ColumnMajor;
  using Tile = cute::Shape<cute::Int<kRows>, cute::Int<kUnalignedTile>, cute::_64>;
  using Cluster = cute::Shape<cute::Int<kInRows ? 1 : 2>, cute::Int<kInRows ? 2 : 1>, cute::_1>;
  using Rows = RowEpilogue<T, kRows, kForward<kTransposedA, kTransposedB>>;
  using Epilogue = cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<Rows>;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, E, std::conditional_t<kTransposedA, Column, Row>, kAligned,
      E, std::conditional_t<kTransposedB, Column, Row>, kAligned, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Rows::SharedStorage))>,
      cutlass::gemm::KernelTmaWarpSpecializedPingpong>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue>;
  using Device = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  // can_implement is not asked: it wants the sizes along lines to be multiples of 8, not only the strides.
  static Status run(const char *op, const GemmParams &g, int multiprocessors, cudaStream_t stream) {
    typename Kernel::StrideA a_stride;
    typename Kernel::StrideB b_stride;
    cute::get<kTransposedA ? 1 : 0>(a_stride) = g.a.stride, cute::get<2>(a_stride) = g.a_step;
    cute::get<kTransposedB ? 0 : 1>(b_stride) = g.b.stride, cute::get<2>(b_stride) = g.b_step;
    typename Device::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {static_cast<int>(g.m), static_cast<int>(g.n), static_cast<int>(g.k), static_cast<int>(g.count)},
        {static_cast<const E *>(g.a.data), a_stride, static_cast<const E *>(g.b.data), b_stride},
        {static_cast<T *>(g.c.data), static_cast<T *>(g.pre_activation), static_cast<const T *>(g.bias), g.c.stride,
         g.c_step, g.activation}};
    arguments.hw_info.sm_count = multiprocessors;
    // A launch beside the end of the kernel before saves 2 us, and costs long products 1 %.
    constexpr int64_t kMostTerms = 8192;
    const bool overlap = unaligned_rounds(g, multiprocessors, kInRows) * g.k <= kMostTerms;
    Device device;
    if (device.initialize(arguments, nullptr, stream) != cutlass::Status::kSuccess ||
        device.run(stream, nullptr, overlap) != cutlass::Status::kSuccess)
      return check_cuda(op, cudaGetLastError());
    return check_launch(op);
  }
};

template <typename T>
Status run_layout(const char *op, const GemmParams &g, int multiprocessors, cudaStream_t stream) {
  if (g.a.transposed && !g.b.transposed) {
    auto *run = low_tiles(g, multiprocessors)          ? UnalignedKernel<T, true, false, false, kLowTile>::run
                : clusters_in_rows(g, multiprocessors) ? UnalignedKernel<T, true, false, true>::run
                                                       : UnalignedKernel<T, true, false>::run;
    return run(op, g, multiprocessors, stream);
  }
  auto *run = g.a.transposed   ? UnalignedKernel<T, true, true>::run
              : g.b.transposed ? UnalignedKernel<T, false, true>::run
                               : UnalignedKernel<T, false, false>::run;
  return run(op, g, multiprocessors, stream);
}

}  // namespace

Status gemm_unaligned_sm90(const char *op, const GemmParams &g, int multiprocessors, cudaStream_t stream) {
  auto *run = g.dtype == DType::bfloat16 ? run_layout<__nv_bfloat16> : run_layout<__half>;
  return run(op, g, multiprocessors, stream);
}

}  // namespace AOT_ISA
}  // namespace aot
