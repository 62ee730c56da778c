// Products of 16-bit matrices on Hopper whose lines do not begin at multiples of 16 bytes, such as those of 30522
// elements: by wgmma, without copies. TMA, which loads the operands, needs a distance between lines that is a multiple
// of 16 bytes. With every second, fourth or eighth line it is one, so such an operand has a tensor map for each class
// of lines: of 4 classes, class r has the lines r, r + 4, r + 8, ... It begins at the last multiple of 16 bytes before
// line r, whose elements then follow `shift` others. TMA loads boxes from any element on, so the others are never
// loaded.
//
// A block of lines lies in shared memory class by class. Lines that are rows or columns of the result are put in order
// by the epilogue. Where they are terms of the sum, both operands must have them in this order, and so have as many
// classes and lines that are terms: a^T b. The sum of a product of another layout cannot be reordered, and is not
// supported.
//
// The epilogue puts 128 columns at a time in order in shared memory, and stores words of 4 bytes (16 where the result
// is aligned), neighbouring lanes neighbouring words.
#include "cuda/wgmma.cuh"
#include "gemm.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

constexpr int kMostClasses = 8;
constexpr int kRows = 128, kGroups = 2, kThreads = (kGroups + 1) * 128, kPart = 128;  // kPart: columns stored at a time
constexpr int kStagingBytes = kBox * kPart * 2;                                       // of a warpgroup
constexpr int kProducers = 4;                                                         // warps that load
constexpr int kAtOnce = 4;  // loads of a thread before it stores
constexpr int kBand = 16;   // tiles of rows that neighbouring blocks work on, for the L2 cache

// Two blocks of a cluster compute neighbouring tiles of rows. Each loads half of b for both: without it, the L2 cache
// would have to deliver 48 KB for 4 MFLOP, 8 TB/s at 700 TFLOP/s.
constexpr int kCluster = 2;
template <int kCols>
constexpr int kStages = kCols > 128 ? 4 : 6;
template <int kCols>
constexpr int kStageBytes = (kRows + kCols) * kBoxRow;
template <int kCols>
constexpr int kSharedBytes =
    kStages<kCols> * kStageBytes<kCols> + kGroups * kStagingBytes + 1024;  // boxes: aligned to 1024

struct UnalignedOperand {
  CUtensorMap maps[kMostClasses];
  int shift[kMostClasses];  // elements
  int log_classes;
  int log_pieces;  // of a group of lines: its classes, or boxes of 64 lines
};

struct UnalignedGemm {
  UnalignedOperand a, b;
  int m, n, steps, row_tiles, col_tiles;  // row_tiles: of a cluster
  int64_t c_stride;
  bool vectors;  // whether all rows of c are aligned to 16 bytes
  void *c;
  const void *bias;
};

// ------------------------------------------------------------------------------------------------------------- kernel

// kAcrossA, kAcrossB: whether an operand's lines are terms of the sum (MN-major), rather than rows or columns.
template <typename T, int kCols, bool kAcrossA, bool kAcrossB>
struct UnalignedBlock {
#ifdef CUTE_ARCH_MMA_SM90A_ENABLED
  using Sums = float[1][kCols / 2];

  const UnalignedGemm &p;
  uint32_t boxes, staging;
  uint64_t *full, *empty;

  struct Tile {
    int row, col;  // the first
  };
  // The tiles of clusters go down a band of rows, and then along it.
  template <class F>
  __device__ void each_tile(F f) const {
    constexpr int kHere = kBand / kCluster;
    const int of_band = kHere * p.col_tiles, clusters = gridDim.x / kCluster;
    for (int tile = blockIdx.x / kCluster; tile < p.row_tiles * p.col_tiles; tile += clusters) {
      const int band = tile / of_band * kHere, rows = min(kHere, p.row_tiles - band), at = tile % of_band;
      f(Tile{((band + at % rows) * kCluster + rank()) * kRows, at / rows * kCols});
    }
  }

  static __device__ int rank() { return blockIdx.x % kCluster; }
  __device__ uint32_t a_boxes(int stage) const { return boxes + stage * kStageBytes<kCols>; }
  __device__ uint32_t b_boxes(int stage) const { return a_boxes(stage) + kRows * kBoxRow; }

  // ---------------------------------------------------------------------------------------------------- producer warp

  // By one thread of each of kProducers warps, which share the boxes of a step: there are up to 32, each with a map, an
  // address and coordinates of its own.
  __device__ void load_tiles(int producer) const {
    // A warp without boxes would not be waited for, and could miss a phase of a barrier.
    const int of_a = count_boxes<kAcrossA, kRows, false>(p.a), of_b = count_boxes<kAcrossB, kCols, true>(p.b);
    if (producer && producer >= of_a && (producer ^ 2) >= of_b) return;
    int iteration = 0;
    each_tile([&](Tile tile) {
      for (int step = 0; step < p.steps; ++step, ++iteration) {
        const int stage = iteration % kStages<kCols>;
        mbarrier_wait_cluster(&empty[stage], iteration / kStages<kCols> % 2 ^ 1);
        if (producer == 0) mbarrier_expect(&full[stage], kStageBytes<kCols>);
        load<kAcrossA, kRows, false>(p.a, a_boxes(stage), &full[stage], tile.row, step, producer);
        load<kAcrossB, kCols, true>(p.b, b_boxes(stage), &full[stage], tile.col, step, producer ^ 2);
      }
    });
  }

  // Lines of a group, in which classes are together, and the groups that a block loads. kShared: half of them for both
  // blocks of the cluster, where lines are terms; else half of the pieces of each group.
  template <bool kAcross>
  static constexpr int kLines = kAcross ? kBox : 128;
  template <bool kAcross, int kSize, bool kShared>
  static constexpr int kHere = kSize * kBoxRow / (kLines<kAcross> * kBoxRow) / (kShared && kAcross ? 2 : 1);

  template <bool kAcross, int kSize, bool kShared>
  static __device__ int count_boxes(const UnalignedOperand &x) {
    return kHere<kAcross, kSize, kShared> << x.log_pieces >> (kShared && !kAcross ? 1 : 0);
  }

  // kSize rows or columns of the result from `first` on, and the 64 terms of a step.
  template <bool kAcross, int kSize, bool kShared>
  static __device__ void load(const UnalignedOperand &x, uint32_t to, uint64_t *barrier, int first, int step,
                              int producer) {
    constexpr int kBytes = kLines<kAcross> * kBoxRow, kGroupsHere = kHere<kAcross, kSize, kShared>;
    const int log_pieces = kShared && !kAcross ? x.log_pieces - 1 : x.log_pieces;
    const int first_group = kShared && kAcross ? rank() * kGroupsHere : 0;
    const int first_piece = kShared && !kAcross ? rank() << log_pieces : 0;
#pragma unroll
    for (int i = 0; i < kGroupsHere * kMostClasses / (kShared && !kAcross ? 2 : 1); i += kProducers) {
      const int at = i + producer, group = first_group + (at >> log_pieces);
      const int piece = first_piece + (at & ((1 << log_pieces) - 1)), r = x.log_classes ? piece : 0;
      if (at >= kGroupsHere << log_pieces) break;
      const int element = kAcross ? first + group * kBox : step * kBox;
      const int line = kAcross ? step * kBox : first + group * kLines<kAcross>;
      load_box<kShared>(x.maps[r], to + group * kBytes + piece * (kBytes >> x.log_pieces), barrier,
                        element + x.shift[r],
                        x.log_classes ? line >> x.log_classes : line + piece * (kLines<kAcross> >> x.log_pieces));
    }
  }

  // kShared: to the same address in both blocks, whose barriers at the address of this one count the bytes.
  template <bool kShared>
  static __device__ void load_box(const CUtensorMap &map, uint32_t to, uint64_t *barrier, int element, int line) {
    if constexpr (!kShared) {
      tma_load(map, to, barrier, element, line);
    } else {
      asm volatile(
          "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
          "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
          "l"(&map), "r"(shared_address(barrier)), "r"(element), "r"(line),
          "h"(static_cast<uint16_t>((1 << kCluster) - 1))
          : "memory");
    }
  }

  // ----------------------------------------------------------------------------------------------- consumer warpgroups

  __device__ void compute_tiles(int group) const {
    int iteration = 0;
    each_tile([&](Tile tile) {
      Sums sum = {};
      mainloop(group, iteration, sum);
      store(tile, group, sum[0]);
    });
  }

  __device__ void mainloop(int group, int &iteration, Sums &sum) const {
    // the next 16 terms are 16 lines on where lines are terms, 32 bytes on where they are rows or columns
    constexpr int kStepA = kAcrossA ? 16 * kBoxRow : 32, kStepB = kAcrossB ? 16 * kBoxRow : 32;
    using Mma = Wgmma<T, kCols, kAcrossA, kAcrossB>;
    // tells the producer of each block that writes to the stage
    auto release = [&](int iteration) {
      const int block = threadIdx.x % 128;
      if (block >= kCluster) return;
      const uint32_t barrier = shared_address(&empty[iteration % kStages<kCols>]);
      asm volatile(
          "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(address_in_block(barrier, block))
          : "memory");
    };
    for (int step = 0; step < p.steps; ++step, ++iteration) {
      const int stage = iteration % kStages<kCols>;
      mbarrier_wait(&full[stage], iteration / kStages<kCols> % 2);
      fence_accumulators(sum);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < 4; ++k)
        Mma::run(box_descriptor(a_boxes(stage) + group * kBoxBytes + k * kStepA),
                 box_descriptor(b_boxes(stage) + k * kStepB), sum[0], step + k > 0,
                 std::make_index_sequence<kCols / 2>());
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      fence_accumulators(sum);
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (step > 0) release(iteration - 1);
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    fence_accumulators(sum);
    release(iteration - 1);
  }

  // --------------------------------------------------------------------------------------------------------- epilogue

  // Where line i of 128 that lie class by class is in their order.
  static __device__ int in_order(const UnalignedOperand &x, int i) {
    const int log_lines = 7 - x.log_classes;  // of a class
    return (i & ((1 << log_lines) - 1)) << x.log_classes | i >> log_lines;
  }

  // A thread's accumulators are pairs of neighbouring columns, in rows 8 apart.
  __device__ void store(Tile tile, int group, const float (&sum)[kCols / 2]) const {
    const bool rows_by_class = !kAcrossA && p.a.log_classes, cols_by_class = !kAcrossB && p.b.log_classes;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, row = warp * 16 + lane / 4;
    const T *bias = static_cast<const T *>(p.bias);
#pragma unroll
    for (int part = 0; part < kCols / kPart; ++part) {
      const int first = tile.col + part * kPart, columns = min(kPart, p.n - first);
      synchronize(group);
#pragma unroll
      for (int j = 0; j < kPart / 8; ++j) {
        const float *v = &sum[part * (kPart / 2) + j * 4];
        const int col = j * 8 + lane % 4 * 2;
        const int cols[] = {cols_by_class ? in_order(p.b, col) : col, cols_by_class ? in_order(p.b, col + 1) : col + 1};
        float add[] = {0, 0};
        if (bias)
          for (int i = 0; i < 2; ++i) add[i] = cols[i] < columns ? widen(bias[first + cols[i]]) : 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t pair = narrow_word(v[2 * i] + add[0], v[2 * i + 1] + add[1], T());
          if (cols_by_class) {
            set_element(group, row + 8 * i, cols[0], static_cast<uint16_t>(pair));
            set_element(group, row + 8 * i, cols[1], static_cast<uint16_t>(pair >> 16));
          } else {
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(staged(group, row + 8 * i, col, false)), "r"(pair) : "memory");
          }
        }
      }
      synchronize(group);
      auto row_of = [&](int i) {
        const int at = group * kBox + i;
        return tile.row + (rows_by_class ? in_order(p.a, at) : at);
      };
      T *c = static_cast<T *>(p.c) + first;
      if (p.vectors && !cols_by_class && columns == kPart) store_vectors(group, c, row_of);
      else if (columns == kPart) store_words(group, c, row_of, cols_by_class);
      else
        for (int i = warp; i < kBox; i += 4)
          if (const int to = row_of(i); to < p.m) store_row(group, i, c + to * p.c_stride, columns, cols_by_class);
    }
  }

  // All threads of a warpgroup.
  static __device__ void synchronize(int group) { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); }

  // The address of an element of a warpgroup's 64 x 128 results. Vectors of 16 bytes, and their words if the columns
  // arrive class by class, are exchanged so that lanes meet in no bank.
  __device__ uint32_t staged(int group, int row, int col, bool by_class) const {
    const int vector = col / 8, word = col / 2 % 4 ^ (by_class ? vector / 2 % 4 : 0);
    return staging + group * kStagingBytes + row * (kPart * 2) + (vector ^ row % 8) * 16 + word * 4 + col % 2 * 2;
  }
  __device__ void set_element(int group, int row, int col, uint16_t value) const {
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(staged(group, row, col, true)), "h"(value) : "memory");
  }
  __device__ uint16_t element(int group, int row, int col, bool by_class) const {
    uint16_t value;
    asm volatile("ld.shared.b16 %0, [%1];" : "=h"(value) : "r"(staged(group, row, col, by_class)) : "memory");
    return value;
  }
  // Rows of 16 vectors, two by each warp at once. row_of(i): the row of the result.
  template <class F>
  __device__ void store_vectors(int group, T *c, F row_of) const {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 % 4 * 2 + lane / 16, col = lane % 16 * 8;
    const uint32_t from = staged(group, first, col, false);
#pragma unroll
    for (int i = 0; i < kBox / 8; i += kAtOnce) {
      Vector<T> v[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v[j].word[0]), "=r"(v[j].word[1]), "=r"(v[j].word[2]), "=r"(v[j].word[3])
                     : "r"(from + (i + j) * 8 * (kPart * 2))
                     : "memory");
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (const int row = row_of(first + (i + j) * 8); row < p.m) aot::store(c + row * p.c_stride + col, v[j]);
    }
  }

  // Rows of 64 words, one by each warp at once.
  template <class F>
  __device__ void store_words(int group, T *c, F row_of, bool by_class) const {
    const int first = threadIdx.x / 32 % 4;
    const uint32_t from = staged(group, first, threadIdx.x % 32 * 2, by_class);
#pragma unroll 1
    for (int i = 0; i < kBox / 4; i += kAtOnce) {
      uint32_t left[kAtOnce], right[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {  // `staged` exchanges the vectors of every second row by 64 bytes
        const uint32_t at = (from ^ j % 2 * 64) + (i + j) * 4 * (kPart * 2);
        left[j] = load_word(at), right[j] = load_word(at + 128);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (const int row = row_of(first + (i + j) * 4); row < p.m)
          store_words(reinterpret_cast<uint16_t *>(c + row * p.c_stride), left[j], right[j]);
    }
  }
  // A row, of which a lane has two words: as words that are aligned in memory, and if it begins between two, an element
  // at each end.
  static __device__ void store_words(uint16_t *row, uint32_t left, uint32_t right) {
    const int lane = threadIdx.x % 32;
    if (reinterpret_cast<uintptr_t>(row) % 4 == 0) {
      auto *words = reinterpret_cast<uint32_t *>(row);
      words[lane] = left, words[lane + 32] = right;
      return;
    }
    auto *words = reinterpret_cast<uint32_t *>(row - 1);
    const uint32_t middle = __shfl_sync(~0u, left, 31);
    const uint32_t before_left = __shfl_up_sync(~0u, left, 1), before_right = __shfl_up_sync(~0u, right, 1);
    if (lane) words[lane] = __byte_perm(before_left, left, 0x5432);
    else row[0] = static_cast<uint16_t>(left);
    words[lane + 32] = __byte_perm(lane ? before_right : middle, right, 0x5432);
    if (lane == 31) row[kPart - 1] = static_cast<uint16_t>(right >> 16);
  }
  static __device__ uint32_t load_word(uint32_t from) {
    uint32_t word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
    return word;
  }

  // A warp stores a row of fewer elements.
  __device__ void store_row(int group, int row, T *to, int columns, bool by_class) const {
    auto *c = reinterpret_cast<uint16_t *>(to);
    const int before = reinterpret_cast<uintptr_t>(to) / 2 % 2;  // elements of the first word that are another row's
    for (int col = threadIdx.x % 32 * 2 - before; col < columns; col += 64) {
      const bool first = col >= 0, second = col + 1 < columns;
      if (first && second) {
        const uint32_t word =
            before ? element(group, row, col, by_class) | uint32_t{element(group, row, col + 1, by_class)} << 16
                   : load_word(staged(group, row, col, by_class));
        *reinterpret_cast<uint32_t *>(c + col) = word;
      } else if (first) {
        c[col] = element(group, row, col, by_class);
      } else {
        c[col + 1] = element(group, row, col + 1, by_class);
      }
    }
  }
#endif
};

template <typename T, int kCols, bool kAcrossA, bool kAcrossB>
__global__ void __launch_bounds__(kThreads, 1) gemm_unaligned_kernel(const __grid_constant__ UnalignedGemm p) {
#ifdef CUTE_ARCH_MMA_SM90A_ENABLED
  extern __shared__ uint8_t dynamic[];
  __shared__ uint64_t full[kStages<kCols>], empty[kStages<kCols>];
  const uint32_t boxes = (shared_address(dynamic) + 1023) & ~1023u;
  const UnalignedBlock<T, kCols, kAcrossA, kAcrossB> block{p, boxes, boxes + kStages<kCols> * kStageBytes<kCols>, full,
                                                           empty};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages<kCols>; ++i) {
      mbarrier_init(&full[i], 1);
      mbarrier_init(&empty[i], kGroups * kCluster);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  cluster_barrier();  // the other block's barriers are initialized
  const int group = threadIdx.x / 128;
  if (group < kGroups) {  // the warpgroup of the producer leaves its registers to the others
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    block.compute_tiles(group);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (threadIdx.x % 32 == 0) block.load_tiles(threadIdx.x / 32 % kProducers);
    __syncwarp();
  }
  cluster_barrier();  // the other block writes no more here
#else
  __trap();  // compiled for other architectures, never launched there
#endif
}

// ----------------------------------------------------------------------------------------------------------- launcher

// The logarithm of the number of classes: lines of one are a multiple of 8 elements apart.
int log_classes(const Operand &x) { return x.stride % 8 == 0 ? 0 : x.stride % 4 == 0 ? 1 : x.stride % 2 == 0 ? 2 : 3; }

// x has `lines` of `length` elements. across: as the kernel's.
bool map_operand(UnalignedOperand *to, DType dtype, const Operand &x, int64_t lines, int64_t length, bool across,
                 int log_classes) {
  constexpr int64_t kSize = 2;
  const int classes = 1 << log_classes;
  to->log_classes = log_classes, to->log_pieces = across ? log_classes : std::max(log_classes, 1);
  const auto box_lines = static_cast<uint32_t>((across ? kBox : 128) >> to->log_pieces);
  for (int r = 0; r < classes; ++r) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(x.data) + r * x.stride * kSize;
    to->shift[r] = static_cast<int>(address % 16 / kSize);
    if (!map_tiled<2>(&to->maps[r], dtype, reinterpret_cast<const void *>(address - address % 16),
                      {uint64_t(length + to->shift[r]), uint64_t(ceil_div(lines - r, classes))}, {classes * x.stride},
                      {kBox, box_lines}))
      return false;
  }
  return true;
}

template <typename T, int kCols>
Status launch(const char *op, const GemmParams &g, UnalignedGemm &p, int multiprocessors, cudaStream_t stream) {
  p.row_tiles = static_cast<int>(ceil_div(g.m, kRows * kCluster));
  p.col_tiles = static_cast<int>(ceil_div(g.n, kCols));
  auto *kernel = g.a.transposed ? (g.b.transposed ? gemm_unaligned_kernel<T, kCols, true, false>
                                                  : gemm_unaligned_kernel<T, kCols, true, true>)
                                : (g.b.transposed ? gemm_unaligned_kernel<T, kCols, false, false>
                                                  : gemm_unaligned_kernel<T, kCols, false, true>);
  const int clusters = std::min(p.row_tiles * p.col_tiles, multiprocessors / kCluster);
  return launch_kernel(op, kernel, {clusters * kCluster, kThreads, kSharedBytes<kCols>, kCluster}, stream, p);
}

}  // namespace

Status gemm_unaligned_sm90(const char *op, const GemmParams &g, cudaStream_t stream, bool *done) {
  *done = false;
  DeviceLimits limits;
  AOT_TRY(device_limits(op, &limits));
  if (!TensorMaps::get().tiled) return kOk;
  const int multiprocessors = limits.multiprocessors;
  const bool across_a = g.a.transposed, across_b = !g.b.transposed;
  int log_a = log_classes(g.a), log_b = log_classes(g.b);
  // terms must be in one order
  if ((across_a && log_a) || (across_b && log_b)) {
    if (!across_a || !across_b) return kOk;
    log_a = log_b = std::max(log_a, log_b);
  }
  UnalignedGemm p = {};
  p.m = static_cast<int>(g.m), p.n = static_cast<int>(g.n), p.steps = static_cast<int>(ceil_div(g.k, kBox));
  p.c_stride = g.c.stride, p.c = g.c.data, p.bias = g.bias;
  p.vectors = g.c.stride % 8 == 0 && aligned(g.c.data);
  if (!map_operand(&p.a, g.dtype, g.a, across_a ? g.k : g.m, across_a ? g.m : g.k, across_a, log_a) ||
      !map_operand(&p.b, g.dtype, g.b, across_b ? g.k : g.n, across_b ? g.n : g.k, across_b, log_b))
    return kOk;
  // Narrow tiles take half as long and a little more, because they load more for each term.
  auto waves = [&](int64_t columns) {
    return ceil_div(ceil_div(g.m, kRows * kCluster) * ceil_div(g.n, columns), multiprocessors / kCluster);
  };
  const bool narrow = 115 * waves(128) < 200 * waves(256);
  auto with = [&](auto type) {
    using T = typename decltype(type)::type;
    return narrow ? launch<T, 128>(op, g, p, multiprocessors, stream)
                  : launch<T, 256>(op, g, p, multiprocessors, stream);
  };
  *done = true;
  return g.dtype == DType::bfloat16 ? with(Type<__nv_bfloat16>()) : with(Type<__half>());
}

}  // namespace AOT_ISA
}  // namespace aot
