// Products a b of 16-bit matrices on Hopper of which a's lines begin anywhere and b's are aligned.
//
// TMA wants bases, strides and coordinates along lines that are multiples of 16 bytes. Every eighth line begins alike,
// every fourth or second one where their length is even, so each class of lines has a tensor map. Its base is rounded
// down to 16 bytes: its elements come `shift` terms later than they should. A tile has lines of one class, and takes
// b's lines as many terms later: TMA takes any of them, and zeros for those before the first.
//
//   a, step of 64 terms    4 boxes of 64 lines of the class, half of which each block of a pair loads for both
//   b                      2 or 3 boxes of 64 columns and 64 terms
//   warpgroups 0 and 1     128 lines by 128 or 192 columns each: a K-major, b MN-major
//   warpgroup 2            a thread loads
//
// A pair's blocks have neighbouring columns. Of 8192 x 768 results there are 128 tiles of 192 columns, one round of 132
// multiprocessors, and of 8192 x 1024 two rounds of 128 columns. Where there are fewer, blocks take slices of the sums,
// which another kernel adds.
#include "cuda/overlap.cuh"
#include "cuda/pair.cuh"
#include "cuda/sum_slices.cuh"
#include "cuda/wgmma.cuh"
#include "gemm_odd_lines.h"
#include "row_stores.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

constexpr int kBox = 64, kBoxBytes = kBox * 128;  // rows of 128 bytes
constexpr int kRows = kOddRows, kRowBoxes = kRows / kBox;
constexpr int kMost = kRowBoxes / kPairGroups;  // boxes of rows that a warpgroup multiplies

struct OddLines {
  CUtensorMap a[kLineClasses], b;
  int shift[kLineClasses], lines[kLineClasses], first_tile[kLineClasses];
  int classes, columns, terms;  // columns of c; terms of the sum
  int across, slices, items;    // pairs of tiles; of a sum; of all pairs' slices
  int64_t c_stride;
  void *c;
  float *partials;  // (slices, rows, columns), instead of c; or null
  int64_t slice;    // the elements of a slice's
};

template <int kCols>
struct Shared {
  static constexpr int kStages = kCols == kOddColumns ? 3 : 4;
  static constexpr int kPiece = kCols / 2;  // columns that a warp stores at once
  static constexpr int kColBoxes = kCols / kBox, kStageBytes = (kRowBoxes + kColBoxes) * kBoxBytes;
  uint8_t boxes[kStages][kStageBytes];                               // swizzled in units of 1024 bytes
  typename RowStores<__half, kPiece>::Words words[4 * kPairGroups];  // of each warp
  uint64_t full[kStages], empty[kStages];
};
template <int kCols>
constexpr int kShared = sizeof(Shared<kCols>);
static_assert(std::max(kShared<kOddColumns>, kShared<kOddFewColumns>) <= 232448, "what a block may request");

#ifdef CUTE_ARCH_MMA_SM90A_ENABLED

template <typename T, int kCols>
struct OddLinesBlock {
  using Memory = Shared<kCols>;
  static constexpr int kStages = Memory::kStages, kPiece = Memory::kPiece, kColBoxes = Memory::kColBoxes;
  using Stores = RowStores<T, kPiece>;
  using Sums = float[kMost][kCols / 2];

  const OddLines &p;
  Memory &shared;
  int rank;  // of the block in its pair

  // A block's tile, from `row` on of the class's lines.
  struct Item {
    int of_class, row, column, left;  // left: lines up to the class's last
    int slice, first, last;           // steps of the sum
  };
  template <class F>
  __device__ void each_item(F f) const {
    for (int i = blockIdx.x / kPair; i < p.items; i += gridDim.x / kPair) {
      const int tiles = i / p.slices, tile = tiles / p.across;
      Item at = {0, 0, (tiles % p.across * kPair + rank) * kCols, 0, i % p.slices};
      while (at.of_class + 1 < p.classes && tile >= p.first_tile[at.of_class + 1]) ++at.of_class;
      at.row = (tile - p.first_tile[at.of_class]) * kRows, at.left = p.lines[at.of_class] - at.row;
      const int count = (p.terms + p.shift[at.of_class] + kBox - 1) / kBox;
      at.first = count * at.slice / p.slices, at.last = count * (at.slice + 1) / p.slices;
      f(at);
    }
  }

  __device__ uint32_t a_box(int stage) const { return shared_address(shared.boxes[stage]); }
  __device__ uint32_t b_box(int stage) const { return a_box(stage) + kRowBoxes * kBoxBytes; }

  // ------------------------------------------------------------------------------------------------ the loading thread

  __device__ void load_items() const {
    constexpr int kOwn = kRows / kPair;  // lines of a that the block loads, for both
    RingPlace<kStages> place;
    each_item([&](const Item &at) {
      const CUtensorMap &map = p.a[at.of_class];
      const int row = at.row + rank * kOwn, shift = p.shift[at.of_class];
#pragma unroll 1
      for (int step = at.first; step < at.last; ++step, place.next()) {
        uint64_t *full = &shared.full[place.stage];
        mbarrier_wait(&shared.empty[place.stage], place.round % 2 ^ 1);
        mbarrier_expect(full, Memory::kStageBytes);
        tma_load_for_pair(map, a_box(place.stage) + rank * kOwn * 128, full, step * kBox, row);
#pragma unroll
        for (int j = 0; j < kColBoxes; ++j)
          tma_load(p.b, b_box(place.stage) + j * kBoxBytes, full, at.column + j * kBox, step * kBox - shift);
      }
    });
  }

  // ------------------------------------------------------------------------------------------ warpgroups that multiply

  __device__ void compute_items(int group) const {
    RingPlace<kStages> place;
    each_item([&](const Item &at) {
      Sums sum;
      mainloop(group, at, place, sum);
      if (p.partials) return store_slice(group, at, sum);
      const Stores stores{shared.words[threadIdx.x / 32], p.c_stride * p.classes};
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        const int row = (group * kMost + i) * kBox + threadIdx.x / 32 % 4 * 16;
        T *to = static_cast<T *>(p.c) + (int64_t{at.row + row} * p.classes + at.of_class) * p.c_stride + at.column;
#pragma unroll
        for (int j = 0; j < kCols / kPiece; ++j) {
          float v[kPiece / 2];
#pragma unroll
          for (int e = 0; e < kPiece / 2; ++e) v[e] = sum[i][j * kPiece / 2 + e];
          if (at.column + j * kPiece < p.columns)
            stores.store(v, to + j * kPiece, at.left - row, p.columns - at.column - j * kPiece);
        }
      }
    });
  }

  __device__ void store_slice(int group, const Item &at, const Sums &sum) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kMost; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = (group * kMost + i) * kBox + threadIdx.x / 32 % 4 * 16 + lane / 4 + 8 * half;
        if (row >= at.left) continue;
        const int64_t line = int64_t{at.row + row} * p.classes + at.of_class;
        float *to = p.partials + at.slice * p.slice + line * p.columns + at.column;
#pragma unroll
        for (int j = 0; j < kCols / 8; ++j) {
          const int column = 8 * j + lane % 4 * 2;
          if (at.column + column < p.columns)
            *reinterpret_cast<float2 *>(to + column) =
                make_float2(sum[i][4 * j + 2 * half], sum[i][4 * j + 2 * half + 1]);
        }
      }
  }

  __device__ void mainloop(int group, const Item &at, RingPlace<kStages> &place, Sums &sum) const {
    using Mma = Wgmma<T, kCols, false, true>;
    auto release = [&](int stage) {
      const int other = threadIdx.x % 128;
      if (other < kPair) arrive_in_block(&shared.empty[stage], other);
    };
    const int count = at.last - at.first;
    int before = 0;
    mbarrier_wait(&shared.full[place.stage], place.round % 2);
    if (at.first == 0) clear(group, place.stage, p.shift[at.of_class]);
#pragma unroll 1
    for (int step = 0; step < count; ++step, place.next()) {
      const int stage = place.stage;
      mbarrier_wait(&shared.full[stage], place.round % 2);
      const uint32_t a = a_box(stage) + group * kMost * kBoxBytes, b = b_box(stage);
#pragma unroll
      for (int i = 0; i < kMost; ++i) fence_registers(sum[i]);
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int i = 0; i < kMost; ++i)  // the next 16 terms are 32 bytes on in a's rows, and 16 rows on in b's
          Mma::run(wgmma_descriptor(a + i * kBoxBytes + k * 32, kBoxBytes),
                   wgmma_descriptor(b + k * 16 * 128, kBoxBytes), sum[i], step + k > 0);
      wgmma_end();
#pragma unroll
      for (int i = 0; i < kMost; ++i) fence_registers(sum[i]);
      wgmma_wait<1>();
      if (step > 0) release(before);
      before = stage;
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kMost; ++i) fence_registers(sum[i]);
    release(before);
  }

  // Clears a row's first elements, which are of the line before: an infinite one times b's zeros would be NaN.
  __device__ void clear(int group, int stage, int shift) const {
    static_assert(kMost * kBox == 128, "a thread has a row of its warpgroup's");
    if (!shift) return;
    const int row = threadIdx.x % 128;
    auto *first = reinterpret_cast<uint32_t *>(shared.boxes[stage] + group * kMost * kBoxBytes + row * 128 +
                                               row % 8 * 16);  // swizzled
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (2 * i < shift) first[i] = 2 * i + 1 < shift ? 0 : first[i] & 0xffff0000;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
  }
};

#endif

template <typename T, int kCols>
__global__ void __launch_bounds__(kPairThreads, 1) gemm_odd_lines_kernel(const __grid_constant__ OddLines p) {
#ifdef CUTE_ARCH_MMA_SM90A_ENABLED
  extern __shared__ __align__(1024) uint8_t dynamic[];
  wait_for_kernel_before();
  launch_next();
  auto &shared = *reinterpret_cast<Shared<kCols> *>(dynamic);
  run_pair<OddLinesBlock<T, kCols>>(p, shared, kPairGroups * kPair);
#else
  __trap();  // compiled for other architectures, never launched there
#endif
}

}  // namespace

Status gemm_odd_lines_sm90(const char *op, const GemmParams &g, int multiprocessors, cudaStream_t stream, bool *done) {
  *done = false;
  if (!TensorMaps::get().tiled) return kOk;
  OddLines p = {};
  p.classes = line_classes(g.a.stride), p.columns = static_cast<int>(g.n), p.terms = static_cast<int>(g.k);
  p.c = g.c.data, p.c_stride = g.c.stride;
  int tiles = 0;
  for (int i = 0; i < p.classes; ++i) {
    p.shift[i] = first_of_class(g.a, i);
    p.lines[i] = static_cast<int>(ceil_div(g.m - i, p.classes)), p.first_tile[i] = tiles;
    tiles += static_cast<int>(ceil_div(p.lines[i], kRows));
    const void *base = static_cast<const uint16_t *>(g.a.data) + i * g.a.stride - p.shift[i];
    const uint64_t size[] = {uint64_t(g.k + p.shift[i]), uint64_t(p.lines[i])};
    if (!map_tiled<2>(&p.a[i], g.dtype, base, size, {p.classes * g.a.stride}, {kBox, kRows / kPair})) return kOk;
  }
  const uint64_t size[] = {uint64_t(g.n), uint64_t(g.k)};
  if (!map_tiled<2>(&p.b, g.dtype, g.b.data, size, {g.b.stride}, {kBox, kBox})) return kOk;
  const OddLinesPlan plan = odd_lines_plan(g, multiprocessors);
  p.across = static_cast<int>(plan.across), p.slices = plan.slices;
  p.slice = g.m * g.n;
  p.items = tiles * p.across * p.slices;
  if (p.slices > 1) p.partials = static_cast<float *>(g.workspace);
  *done = true;
  const unsigned blocks = std::min(p.items, multiprocessors / kPair) * kPair;
  auto run = [&](auto type) {
    using T = decltype(type);
    auto launch = [&](auto *kernel, int shared) {
      return launch_kernel(op, kernel, {blocks, kPairThreads, shared, kPair, true}, stream, p);
    };
    AOT_TRY(plan.columns == kOddColumns ? launch(gemm_odd_lines_kernel<T, kOddColumns>, kShared<kOddColumns>)
                                        : launch(gemm_odd_lines_kernel<T, kOddFewColumns>, kShared<kOddFewColumns>));
    return p.partials ? sum_slices<float>(op, p.partials, p.slices, static_cast<T *>(p.c), p.slice, stream) : kOk;
  };
  return g.dtype == DType::bfloat16 ? run(__nv_bfloat16()) : run(__half());
}

}  // namespace AOT_ISA
}  // namespace aot
