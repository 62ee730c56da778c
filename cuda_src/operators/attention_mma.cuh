// attention in 16 bits on tensor cores, by mma.sync, from compute capability 8.0 on.
//
// A block has rows of a result, 16 kM for each warp, with their operands in shared memory; it goes through tiles of
// others, which pass through two stages. Scores of rows and others are products of rows. The weights that follow from
// them stay in registers, where they are the left factor of the next product: of y, p v; of dq, ds k; and, where rows
// are keys, of dv, p^T dy, and of dk, ds^T q. So nothing is summed by two blocks, and the order of sums is fixed; dq
// computes the scores once more for it. Exponentials are powers of 2. Most gradients are of one pass instead
// (attention_mma_pairs.cuh, attention_mma_backward.cuh): those here are for head_dims above 128; and above 64 with a
// mask or a bias on GPUs where a block may have no more than 99 KiB of shared memory.
//
// kExtra: the call may have what AttentionExtras has. Such kernels are instances of their own, of fewer rows, since
// what is added to a score takes registers.
#pragma once
#include "attention.cuh"
#include "cuda/mma.cuh"

namespace aot {
inline namespace AOT_ISA {

constexpr int kAhead = 0;  // a value of kUnroll: all steps are, each loaded ahead of the one before

// kDim: head_dim, padded with zeros; a block has 16 kM kWarps rows; kBlocks: blocks for which a multiprocessor must
// have registers; kUnroll: steps of a product of rows that are unrolled, or kAhead.
template <int kDim_, int kM_, int kWarps_, int kOthers_, int kBlocks_, int kUnroll_>
struct MmaShape {
  static constexpr int kDim = kDim_, kM = kM_, kWarps = kWarps_, kOthers = kOthers_;
  static constexpr int kBlocks = kBlocks_, kUnroll = kUnroll_;
  static constexpr int kWarpRows = 16 * kM, kRows = kWarpRows * kWarps, kThreads = 32 * kWarps;
  static constexpr int kRowBytes = 2 * kDim, kTile = kRows * kRowBytes, kOtherTile = kOthers * kRowBytes;  // bytes
  static constexpr int kNumbers = 4 * 4 * kOthers;  // bytes of lse and delta of both stages

  // Bytes of shared memory with so many tiles of rows, and two stages of two tiles of others; and with the ranges of
  // rows that kernels with kExtra have.
  AOT_BOTH_SIDES static constexpr int shared(int tiles, bool numbers, bool ranges = false) {
    return tiles * kTile + 4 * kOtherTile + (numbers ? kNumbers : 0) + (ranges ? kRows * 8 : 0);
  }
};

constexpr int kMmaShared = 99 << 10;  // bytes that a block may have on every GPU from compute capability 8.0 on

// Whether a GPU that loads this machine code runs a kernel with so many bytes of shared memory. A block may have 227
// KiB on 9.0, where `small`, a shape for GPUs with less, is not taken, and 99 on 12.0. PTX of these would be for other
// GPUs too: AOT_NO_OTHER_GPUS says that none is made.
__device__ constexpr bool runs_here(int shared, bool small = false) {
#if defined(AOT_NO_OTHER_GPUS) && __CUDA_ARCH__ == 1200
  return shared <= kMmaShared;
#elif defined(AOT_NO_OTHER_GPUS) && __CUDA_ARCH__ == 900
  return !small;
#else
  return true;
#endif
}

template <int kDim>
struct MmaShapes;
template <>
struct MmaShapes<64> {
  using Y = MmaShape<64, 2, 4, 64, 2, kAhead>;
};
template <>
struct MmaShapes<96> {
  using Y = MmaShape<96, 2, 4, 32, 2, 2>;
};
template <>
struct MmaShapes<128> {
  using Y = MmaShape<128, 2, 4, 64, 2, kAhead>;
};
template <>
struct MmaShapes<256> {
  using Y = MmaShape<256, 1, 4, 32, 2, 2>;
  using Dq = MmaShape<256, 1, 4, 16, 2, 2>;
  using Dkv = MmaShape<256, 1, 4, 16, 2, 2>;
};

template <int kDim>
struct MmaExtraShapes;
template <>
struct MmaExtraShapes<64> {
  using Y = MmaShape<64, 2, 4, 64, 2, 4>;
  using Dbias = MmaShape<64, 1, 4, 64, 2, 2>;
};
template <>
struct MmaExtraShapes<128> {
  using Y = MmaShape<128, 2, 4, 32, 2, 1>;
  using Dq = MmaShape<128, 2, 4, 32, 2, 1>;
  using Dkv = MmaShape<128, 1, 4, 16, 2, 2>;
  using Dbias = MmaShape<128, 1, 4, 64, 2, 1>;
};

// -------------------------------------------------------------------------------------------------- shared memory

// Rows of a tile have pieces of 16 bytes. Those at one place of 8 adjacent rows are in different banks. A tile begins
// at a multiple of 1024.
template <int kDim>
__device__ inline uint32_t piece_address(uint32_t tile, int row, int piece) {
  const int mixed = kDim % 64 == 0 ? piece ^ row % 8 : piece ^ row / 2 % 4;
  return tile + (row * kDim + mixed * 8) * 2;
}

// In which order a tile in shared memory has rows of global memory: at(r), of row r, is the sum of that of r's bits.
struct InOrder {
  __device__ static constexpr int at(int r) { return r; }
};
// This is for others: a lane has 2 of each 8 columns of a product. It has kCount / 4 adjacent others then.
template <int kCount>
struct Spread {
  __device__ static constexpr int at(int r) { return r / 2 % 4 * (kCount / 4) + r / 8 * 2 + r % 2; }
};
// This is for the 16 kM rows of a warp, of which a lane has 2 of each 16: it has 2 kM adjacent ones then.
template <int kM>
struct Adjacent {
  __device__ static constexpr int at(int r) {
    return r / (16 * kM) * (16 * kM) + r % 8 * (2 * kM) + r / 16 % kM * 2 + r / 8 % 2;
  }
};

// Starts to copy rows [begin, begin + kCount) of a head, of `dim` elements; zeros from row `end` on.
template <class Shape, int kCount, class Order = InOrder, typename T>
__device__ inline void copy_rows(uint32_t tile, HeadRows<const T> from, int64_t begin, int64_t end, int dim) {
  constexpr int kDim = Shape::kDim, kPieces = kDim / 8, kAlong = kPieces % 8 == 0 ? kPieces : 4;
  constexpr int kStep = Shape::kThreads / kAlong;  // rows at once
  static_assert((kStep & (kStep - 1)) == 0);       // row and i have bits of their own then
  const int row = threadIdx.x / kAlong, along = threadIdx.x % kAlong;
  const int left = end - begin < kCount ? static_cast<int>(end - begin) : kCount;
  const int first = Order::at(row);
  const T *const at = from[begin + first] + along * 8;
#pragma unroll
  for (int i = 0; i < kCount; i += kStep) {
    if (kCount % kStep && i + row >= kCount) continue;
    const int more = Order::at(i);
#pragma unroll
    for (int j = 0; j < kPieces; j += kAlong) {
      const bool present = first + more < left && (along + j) * 8 < dim;
      copy_async(piece_address<kDim>(tile, i + row, along + j), present ? at + more * from.stride + j * 8 : from.data,
                 present);
    }
  }
}

// As copy_rows, in fewer instructions where all rows exist and have kDim columns.
template <class Shape, int kCount, class Order, typename T>
__device__ inline void copy_tile(uint32_t tile, HeadRows<const T> from, int begin, int end, int dim) {
  if (begin + kCount > end || dim != Shape::kDim) return copy_rows<Shape, kCount, Order>(tile, from, begin, end, dim);
  constexpr int kAlong = 8, kStep = Shape::kThreads / kAlong;
  const int row = threadIdx.x / kAlong, along = threadIdx.x % kAlong;
  const T *const at = from[begin + Order::at(row)] + along * 8;
#pragma unroll
  for (int i = 0; i < kCount; i += kStep) {
    const T *const more = at + Order::at(i) * from.stride;
#pragma unroll
    for (int j = 0; j < Shape::kDim / 8; j += kAlong)
      copy_async(piece_address<Shape::kDim>(tile, i + row, along + j), more + j * 8, true);
  }
}

// The addresses of a lane for ldmatrix, from the first row of a tile: piece 2 k + `piece` of a row of 16.
template <int kDim>
class LaneRows {
 public:
  __device__ LaneRows(uint32_t tile, int row, int piece)
      : even_(piece_address<kDim>(tile, row, piece)), odd_(piece_address<kDim>(tile, row, 2 + piece)) {}

  __device__ uint32_t operator()(int k) const {
    return kDim % 64 == 0 ? even_ ^ 32 * k : (k % 2 ? odd_ : even_) + k / 2 * 64;
  }

 private:
  uint32_t even_, odd_;
};

// ------------------------------------------------------------------------------------------------------- products

// A part of a result that a warp has: (16 kM, kN).
template <int kM, int kN>
using MmaSums = float[kM][kN / 8][4];
// Such a part rounded, as a left factor.
template <int kM, int kN>
using MmaFactor = uint32_t[kM][kN / 16][4];

// sums += a b over kSteps steps of 16, each loaded ahead of the one before.
template <int kM, int kN, int kSteps, class Left, class Right, typename T>
__device__ inline void multiply_ahead(MmaSums<kM, kN> &sums, Left left, Right right, T zero) {
  constexpr int kPieces = kN / 16, kAll = kSteps * kPieces;
  uint32_t a[2][kM][4], b[kPieces + 1][4];
  const auto load = [&](int p) {
    const int k = p / kPieces;
    if (p % kPieces == 0) {
#pragma unroll
      for (int i = 0; i < kM; ++i) left(a[k % 2][i], k, i);
    }
    right(b[p % (kPieces + 1)], k, p % kPieces);
  };
#pragma unroll
  for (int p = 0; p < kPieces; ++p) load(p);
#pragma unroll
  for (int p = 0; p < kAll; ++p) {
    if (p + kPieces < kAll) load(p + kPieces);
    const int k = p / kPieces, n = p % kPieces;
    const uint32_t (&four)[4] = b[p % (kPieces + 1)];
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      multiply_add(sums[i][2 * n], a[k % 2][i], four[0], four[1], zero);
      multiply_add(sums[i][2 * n + 1], a[k % 2][i], four[2], four[3], zero);
    }
  }
}

// In the place of what only some instances have.
struct Nothing {
  template <class... Any>
  __device__ Nothing(const Any &...) {}
  __device__ void operator()(int, uint32_t) const {}
  __device__ Nothing of(int64_t) const { return {}; }
};

// sums += the products of this warp's rows of a, from `row` on, a multiple of 16, and rows of b. With kAhead, beside(k,
// a word that is loaded for step k) is work amid the products of the step before. If it depends on the word, the
// compiler does not move it ahead of all products.
template <int kDim, int kM, int kN, int kUnroll, typename T, class Beside = Nothing>
__device__ inline void multiply_rows(MmaSums<kM, kN> &sums, uint32_t a, int row, uint32_t b, T zero,
                                     Beside beside = {}) {
  const int lane = lane_index(), eighth = lane % 8, low = lane / 8 % 2, high = lane / 16;
  const LaneRows<kDim> of_a(a + row * kDim * 2, 8 * low + eighth, high), of_b(b, 8 * high + eighth, low);
  if constexpr (kUnroll == kAhead) {
    multiply_ahead<kM, kN, kDim / 16>(
        sums,
        [&](uint32_t (&to)[4], int k, int i) {
          load_matrices(to, of_a(k) + i * 16 * kDim * 2);
          if (i == kM - 1) beside(k, to[0]);
        },
        [&](uint32_t (&to)[4], int k, int n) { load_matrices(to, of_b(k) + n * 16 * kDim * 2); }, zero);
  } else {
#pragma unroll kUnroll
    for (int k = 0; k < kDim / 16; ++k) {
      uint32_t left[kM][4];
#pragma unroll
      for (int i = 0; i < kM; ++i) load_matrices(left[i], of_a(k) + i * 16 * kDim * 2);
#pragma unroll
      for (int n = 0; n < kN / 16; ++n) {
        uint32_t right[4];
        load_matrices(right, of_b(k) + n * 16 * kDim * 2);
#pragma unroll
        for (int i = 0; i < kM; ++i) {
          multiply_add(sums[i][2 * n], left[i], right[0], right[1], zero);
          multiply_add(sums[i][2 * n + 1], left[i], right[2], right[3], zero);
        }
      }
    }
  }
}

// sums += weights b, for as many rows of b as there are columns of weights.
template <int kDim, int kM, int kN, typename T>
__device__ inline void multiply_weights(MmaSums<kM, kDim> &sums, const MmaFactor<kM, kN> &weights, uint32_t b, T zero) {
  const int lane = lane_index(), eighth = lane % 8, low = lane / 8 % 2, high = lane / 16;
  const LaneRows<kDim> of_b(b, 8 * low + eighth, high);
#pragma unroll
  for (int k = 0; k < kN / 16; ++k)
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      uint32_t right[4];
      load_transposed_matrices(right, of_b(d) + k * 16 * kDim * 2);
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        multiply_add(sums[i][2 * d], weights[i][k], right[0], right[1], zero);
        multiply_add(sums[i][2 * d + 1], weights[i][k], right[2], right[3], zero);
      }
    }
}

template <int kM, int kN>
__device__ inline void clear_sums(float (&sums)[kM][kN][4]) {
#pragma unroll
  for (auto &row : sums)
#pragma unroll
    for (auto &four : row)
#pragma unroll
      for (float &x : four) x = 0;
}

template <int kM, int kN, typename T>
__device__ inline void round_weights(MmaFactor<kM, kN> &to, const MmaSums<kM, kN> &from, T zero) {
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int n = 0; n < kN / 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        to[i][n / 2][n % 2 * 2 + half] = narrow_word(from[i][n][2 * half], from[i][n][2 * half + 1], zero);
}

// Stores columns below dim of the rows that exist, times a number.
template <int kM, int kDim, class Order = InOrder, typename T, class Times>
__device__ inline void store_sums(const MmaSums<kM, kDim> &sums, HeadRows<T> to, int64_t begin, int64_t end, int dim,
                                  Times times) {
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = begin + Order::at(16 * i + 8 * half + lane_index() / 4);
      const float factor = times(i, half);
      if (row >= end) continue;
      T *const at = to[row] + lane_index() % 4 * 2;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
        if (8 * n < dim)
          *reinterpret_cast<uint32_t *>(at + 8 * n) =
              narrow_word(sums[i][n][2 * half] * factor, sums[i][n][2 * half + 1] * factor, T());
    }
}

// --------------------------------------------------------------------------------------------------------- scores

// A range of a row's others as numbers from `from` on, of which there are n.
__device__ inline int2 within(Range range, int64_t from, int n) {
  const int64_t begin = range.begin - from, end = range.end - from;
  return {static_cast<int>(begin < 0 ? 0 : begin < n ? begin : n), static_cast<int>(end < 0 ? 0 : end < n ? end : n)};
}

// The least scale by which a bias is divided to be added to products: the quotients of those below 2^64 are finite.
constexpr double kLeastScale = 0x1p-64;

// Scores in units of log(2).
struct MmaScores {
  float scale, cap, inner;  // inner: of the tangent's argument, 0 without a cap

  __device__ explicit MmaScores(const AttentionSizes &z)
      : scale(static_cast<float>(z.scale * kLog2E)),
        cap(static_cast<float>(z.softcap * kLog2E)),
        inner(z.softcap == 0 ? 0.0f : static_cast<float>(z.scale / z.softcap)) {}

  // Whether the largest product is the largest score's, and the scale can be divided by.
  __device__ bool scaled() const { return inner == 0 && scale >= static_cast<float>(kLeastScale); }
  __device__ static float tangent(float x) {
    return 1 - 2 * fast_reciprocal(1 + fast_exp2(x * static_cast<float>(2 * kLog2E)));
  }
  // *slope: the derivative over scale.
  __device__ float operator()(float product, float *slope) const {
    *slope = 1;
    if (inner == 0) return product * scale;
    const float t = tangent(product * inner);
    return *slope = 1 - t * t, cap * t;
  }
};

constexpr float kInfinity = __builtin_huge_valf();

// What is added to the scores of a head, in units of log(2): -inf for a key that the mask hides.
template <typename T>
class MmaAddends {
 public:
  __device__ MmaAddends(const AttentionInputs<T> &x, int64_t b, int64_t h)
      : x_(x),
        mask_(x.extra.mask ? x.extra.mask + x.extra.of_mask.at(b, h) : nullptr),
        bias_(x.extra.bias ? x.extra.of_bias.at(b, h) : 0) {}

  __device__ float operator()(int64_t query, int64_t key) const {
    const AttentionExtras &extra = x_.extra;
    if (mask_ && !mask_[query * extra.of_mask.query + key * extra.of_mask.key]) return -kInfinity;
    if (!extra.bias) return 0;
    const int64_t at = bias_ + query * extra.of_bias.query + key * extra.of_bias.key;
    const float bias = x_.number(extra.bias, extra.wide_bias, at);
    if constexpr (sizeof(T) == 4)  // the least of float32's numbers hides no key from a row that has them all so
      return bias == -kInfinity ? bias : fmaxf(bias * static_cast<float>(kLog2E), -3e38f);
    return bias * static_cast<float>(kLog2E);
  }

 private:
  const AttentionInputs<T> &x_;
  const bool *mask_;
  int64_t bias_;
};

// ------------------------------------------------------------------------------------------------------- dropout

// The keys of a head that dropout keeps, as KeptKeys has them, in fewer instructions. Numbers that are the same in a
// warp are results of reductions, from which the compiler knows that: so keys of rounds are in uniform registers.
class MmaKept {
 public:
  __device__ explicit MmaKept(const AttentionDropout &dropout) : of_(dropout.of(0)) {
    zero_ = of_.least >> 16, below_ = (of_.least & 0x7fff) * 0x10001, either_ = of_.least < 0x8000 ? ~0u : 0;
  }

  // head: as AttentionDropout::of has it.
  __device__ MmaKept of(int64_t head) const {
    MmaKept other = *this;
    other.of_.head = static_cast<uint32_t>(head);
#if __CUDA_ARCH__ >= 800
    other.of_.low = __reduce_or_sync(~0u, of_.low), other.of_.high = __reduce_or_sync(~0u, of_.high);
#endif
    return other;
  }
  // Sets bit `bit` of byte j of kept[w], which is 0, if key 8 eight + 4 w + j is kept.
  __device__ void find(uint32_t (&kept)[2], int bit, uint32_t query, uint32_t eight) const {
    const Philox x = of_.numbers(query, eight);
    kept[0] |= bytes(x.a, x.b) & 0x01010101u << bit, kept[1] |= bytes(x.c, x.d) & 0x01010101u << bit;
  }
  // 0, for the compiler a function of a word.
  __device__ uint32_t opaque_zero(uint32_t word) const { return word & zero_; }
  // Clears the halves of a weights' word, of two keys, whose bits in two bytes of `kept`, the lower ones or the upper,
  // are 0.
  __device__ static void mask(uint32_t &weights, uint32_t kept, int bit, bool upper) {
    weights &= signs(kept << (7 - bit), 0, upper ? 0xbbaa : 0x9988);
  }

 private:
  // Bytes of the signs of bytes.
  __device__ static uint32_t signs(uint32_t a, uint32_t b, uint32_t which) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(which));
    return bytes;
  }
  // Four numbers: 0xff for those that are at least `least`, else 0.
  __device__ uint32_t bytes(uint32_t a, uint32_t b) const { return signs(reaching(a), reaching(b), 0xfdb9); }
  // The highest bit of each half: whether the number there is at least `least`. Of numbers of 15 bits that is the
  // highest bit of a difference.
  __device__ uint32_t reaching(uint32_t two) const {
    const uint32_t difference = (two | 0x80008000) - below_;
    return (difference & two) | ((difference | two) & either_);
  }

  KeptKeys of_;
  uint32_t below_, either_, zero_;
};

// -------------------------------------------------------------------------------------------------------- packed

// counts: how many offsets, of keys or of queries, are at most each of these rows. Whether offsets do not ascend from 0
// to what there are. A block's threads all call this. The offsets are read once, all at the same time.
template <int kRows, typename T>
__device__ inline bool count_offsets(const AttentionInputs<T> &x, bool of_keys, const int64_t (&rows)[kRows],
                                     int (&counts)[kRows]) {
  bool wrong = false;
  for (int &count : counts) count = 0;
  for (int64_t from = 0; from <= x.extra.sequences; from += blockDim.x) {
    const int64_t i = from + threadIdx.x;
    const bool present = i <= x.extra.sequences;
    const int64_t at = present ? x.extra.offset(i, of_keys) : 0;
    wrong |= present && x.misplaced(i);
#pragma unroll
    for (int j = 0; j < kRows; ++j) counts[j] += __syncthreads_count(present && at <= rows[j]);
  }
  return __syncthreads_or(wrong);
}

// Writes the range of others of each row of a tile from `begin` on: that of its sequence, as numbers of 32 bits.
template <class Shape>
__device__ inline void find_sequences(int2 *to, const AttentionExtras &extra, int64_t begin, bool of_keys, int64_t low,
                                      int64_t high) {
  for (int i = threadIdx.x; i < Shape::kRows; i += Shape::kThreads) {
    const Range own = extra.sequence(begin + i, of_keys, low, high);
    to[i] = {static_cast<int>(own.begin), static_cast<int>(own.end)};
  }
}
// The part of a range of others from `from` on, of which there are n, that is in a sequence.
__device__ inline int2 within_sequence(int2 range, int2 own, int64_t from) {
  const int64_t begin = own.x - from, end = own.y - from;
  return {begin > range.x ? static_cast<int>(begin) : range.x, end < range.y ? static_cast<int>(end) : range.y};
}

// -------------------------------------------------------------------------------------------------------- queries

// The columns of a lane that are in a range of a tile of kCount others: bit 2 n + e is that of columns[n][e], which is
// the other Spread::at(8 n + 2 (lane % 4) + e).
template <int kCount>
__device__ inline uint32_t lane_bits(int2 range) {
  constexpr int kEach = kCount / 4;
  const int from = lane_index() % 4 * kEach;
  const auto below = [=](int at) { return (1u << (at < from ? 0 : at < from + kEach ? at - from : kEach)) - 1; };
  return below(range.y) & ~below(range.x);
}

// A tile of queries of a head of an example, and the tiles of keys that it goes through. Of a head's tiles the last
// ones, which see most if the call is causal, are first.
template <typename T, class Shape>
struct QueryTile {
  static constexpr int kKeys = Shape::kOthers, kM = Shape::kM;
  // Bits of the columns of a lane: those of row (i, half) from bit 16 half of word i on.
  using Bits = uint32_t[kM];
  static constexpr uint32_t kAllBits = ((1u << kKeys / 4) - 1) * 0x10001u;
  static_assert(kKeys <= 64);

  const AttentionInputs<T> &x;
  int64_t b, h;
  int begin, end, length, first, steps, whole_begin, whole_end;  // keys from whole_begin to whole_end: all see those
  const int2 *own;  // of a packed call: the sequence of each row, in shared memory
  float times;
  HeadRows<const T> k, v;

  // sequences: for kRows ranges, which may be read after a barrier.
  __device__ explicit QueryTile(const AttentionInputs<T> &inputs, int2 *sequences) : x(inputs), own(sequences) {
    const AttentionSizes &z = x.z;
    const int queries = static_cast<int>(z.queries), tiles = (queries - 1) / Shape::kRows + 1;
    const int head = static_cast<int>(blockIdx.x) / tiles;
    b = head / z.heads, h = head % z.heads;
    begin = (tiles - 1 - static_cast<int>(blockIdx.x) % tiles) * Shape::kRows;
    end = queries - begin < Shape::kRows ? queries : begin + Shape::kRows;
    const auto found = x.length(b);
    length = static_cast<int>(found.value), times = found.times;
    Range seen = z.seen_by(begin, end, length),
          by_all = {z.seen_by(end - 1, end, length).begin, z.seen_by(begin, begin + 1, length).end};
    if (x.extra.offsets) {
      int counts[2];
      const bool wrong = count_offsets(x, false, {begin, end - 1}, counts);
      if (wrong) length = 0, times = __int_as_float(0x7fffffff);
      find_sequences<Shape>(sequences, x.extra, begin, false, counts[0], counts[1]);
      const Range of_first = x.extra.sequence_of(begin, counts[0], false),
                  of_last = x.extra.sequence_of(end - 1, counts[1], false);
      seen = intersection(seen, {of_first.begin, wrong ? 0 : of_last.end});
      by_all = intersection(by_all, {of_last.begin, of_first.end});
    }
    const bool any = seen.end > seen.begin;
    first = any ? static_cast<int>(seen.begin) / kKeys * kKeys : 0;
    steps = any ? (static_cast<int>(seen.end) - first - 1) / kKeys + 1 : 0;
    whole_begin = clamped(by_all.begin), whole_end = clamped(by_all.end);
    k = x.of_keys(x.k, b, h / z.group(), z.dim), v = x.of_keys(x.v, b, h / z.group(), z.v_dim);
  }

  __device__ static Range intersection(Range a, Range b) {
    return {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
  }
  // What is between 0 and length is as it is.
  __device__ int clamped(int64_t key) const { return key < 0 ? 0 : key > length ? length : static_cast<int>(key); }

  __device__ int key(int step) const { return first + step * kKeys; }
  __device__ bool whole(int step) const { return key(step) >= whole_begin && key(step) + kKeys <= whole_end; }
  // The bits are those of the keys of a step that the rows of this lane see.
  __device__ void find(Bits &bits, int step) const {
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      bits[i] = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int2 seen = within(x.z.seen_by(query(i, half), query(i, half) + 1, length), key(step), kKeys);
        if (x.extra.offsets) seen = within_sequence(seen, own[local(i, half)], key(step));
        bits[i] |= lane_bits<kKeys>(seen) << 16 * half;
      }
    }
  }
  // Whether there are some that they do not see; the bits are set in any case.
  __device__ bool find_partial(Bits &bits, int step) const {
    if (!whole(step)) return find(bits, step), true;
#pragma unroll
    for (uint32_t &word : bits) word = kAllBits;
    return false;
  }
  // The bits of the keys of a step that dropout keeps.
  __device__ void find_kept(Bits &bits, int step) const {
    const KeptKeys kept = x.extra.dropout.of(b * x.z.heads + h);
    const uint32_t eight = (key(step) + lane_index() % 4 * (kKeys / 4)) / 8;
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      bits[i] = 0;
#pragma unroll 2
      for (int j = 0; j < kKeys / 16; ++j) {
        const int half = j / (kKeys / 32), n = j % (kKeys / 32);
        bits[i] |= kept(query(i, half), eight + n) << (16 * half + 8 * n);
      }
    }
  }
  // Whether a warp sees any key of these; *partial: whether it does not see them all.
  __device__ static bool any(const Bits &bits, bool *partial) {
    uint32_t any = 0, all = kAllBits;
#pragma unroll
    for (const uint32_t word : bits) any |= word, all &= word;
    *partial = __any_sync(~0u, all != kAllBits);
    return __any_sync(~0u, any);
  }
  // The row 16 i + 8 half of this lane, and the number of the query that it is.
  __device__ static int local(int i, int half) {
    return warp_index() * Shape::kWarpRows + 16 * i + 8 * half + lane_index() / 4;
  }
  __device__ int query(int i, int half) const { return begin + local(i, half); }
  __device__ int64_t row(int query) const { return x.row(b, h, query); }

  __device__ void copy_queries(uint32_t tile) const {
    copy_rows<Shape, Shape::kRows>(tile, x.of_queries(x.q, b, h, x.z.dim), begin, end, static_cast<int>(x.z.dim));
  }
  __device__ void copy_slopes(uint32_t tile) const {
    copy_rows<Shape, Shape::kRows>(tile, x.of_results(x.dy, b, h), begin, end, static_cast<int>(x.z.v_dim));
  }
  // k and v of a step.
  __device__ void fetch(uint32_t stage, int step) const {
    if constexpr (Shape::kUnroll == kAhead) {
      copy_tile<Shape, kKeys, Spread<kKeys>>(stage, k, key(step), length, static_cast<int>(x.z.dim));
      copy_tile<Shape, kKeys, Spread<kKeys>>(stage + Shape::kOtherTile, v, key(step), length,
                                             static_cast<int>(x.z.v_dim));
      return;
    }
    copy_rows<Shape, kKeys, Spread<kKeys>>(stage, k, key(step), length, static_cast<int>(x.z.dim));
    copy_rows<Shape, kKeys, Spread<kKeys>>(stage + Shape::kOtherTile, v, key(step), length,
                                           static_cast<int>(x.z.v_dim));
  }
};

// Calls f(i, n, half, e, bit) for each element of a warp's part of a tile of scores, with the bit of its column.
template <int kM, int kN, class F>
__device__ inline void for_scores(F f) {
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < kN / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) f(i, n, half, e, 1u << (16 * half + 2 * n + e));
}

// What is added to the scores of a tile of queries, and which the mask hides. A lane has adjacent keys, in as few loads
// as they take, which begin a step ahead where what is added allows it: its keys adjacent, the rows aligned, and, of a
// bias, a scale that can be divided by. A bias is then where the sum of a product begins.
template <typename T, class Shape>
class AddedRows {
 public:
  using Tile = QueryTile<T, Shape>;
  static constexpr int kM = Shape::kM, kKeys = Shape::kOthers, kEach = kKeys / 4;
  using Sums = MmaSums<kM, kKeys>;

  __device__ AddedRows(const Tile &tile, bool fused) : tile_(tile), extra_(tile.x.extra) {
    mask_ = extra_.mask ? extra_.mask + extra_.of_mask.at(tile.b, tile.h) : nullptr;
    bias_at_ = extra_.bias ? extra_.of_bias.at(tile.b, tile.h) : 0;
    const int bytes = extra_.wide_bias ? 4 : 2;
    fast_mask_ = mask_ && extra_.of_mask.key == 1 && aligned(mask_, extra_.of_mask.query, 1, kEach);
    fast_bias_ = fused && extra_.bias && extra_.of_bias.key == 1 &&
                 aligned(static_cast<const char *>(extra_.bias) + bias_at_ * bytes, extra_.of_bias.query, bytes, 16);
    slow_mask_ = mask_ && !fast_mask_, slow_bias_ = extra_.bias && !fast_bias_;
    over_ = static_cast<float>(1 / tile.x.z.scale);
  }

  // Begins to load what a step needs.
  __device__ void load(int step) {
    const int key = tile_.key(step) + lane_index() % 4 * kEach;
    if (fast_mask_) {
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i)
        load_words<kEach / 4>(masks_[i], reinterpret_cast<const char *>(mask_), row(i) * extra_.of_mask.query, key, 1);
    }
    if (fast_bias_ && extra_.wide_bias) {
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i)
        load_words<kEach>(bias_[i], static_cast<const char *>(extra_.bias), bias_at_ + row(i) * extra_.of_bias.query,
                          key, 4);
    } else if (fast_bias_) {
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i)
        load_words<kEach / 2>(bias_[i], static_cast<const char *>(extra_.bias),
                              bias_at_ + row(i) * extra_.of_bias.query, key, 2);
    }
  }

  // Clears the bits of what is hidden, and begins the sums.
  __device__ void begin(Sums &s, uint32_t (&bits)[kM], int step) const {
    if (fast_mask_) {
#pragma unroll
      for (int i = 0; i < kM; ++i) bits[i] &= mask_bits(masks_[2 * i]) | mask_bits(masks_[2 * i + 1]) << 16;
    }
    if (slow_mask_)
      for_scores<kM, kKeys>([&](int i, int n, int half, int e, uint32_t bit) {
        if (bits[i] & bit && !mask_[row(2 * i + half) * extra_.of_mask.query + key(step, n, e) * extra_.of_mask.key])
          bits[i] &= ~bit;
      });
    if (!fast_bias_)
      return for_scores<kM, kKeys>([&](int i, int n, int half, int e, uint32_t) { s[i][n][2 * half + e] = 0; });
    float least = 0;
    if (extra_.wide_bias) {
      for_scores<kM, kKeys>([&](int i, int n, int half, int e, uint32_t) {
        s[i][n][2 * half + e] = __uint_as_float(bias_[2 * i + half][2 * n + e]) * over_;
      });
    } else {
      for_scores<kM, kKeys>([&](int i, int n, int half, int e, uint32_t) {
        const uint32_t word = bias_[2 * i + half][n];
        s[i][n][2 * half + e] = widen(reinterpret_cast<const T(&)[2]>(word)[e]) * over_;
      });
    }
    for_scores<kM, kKeys>(
        [&](int i, int n, int half, int e, uint32_t) { least = fminf(least, s[i][n][2 * half + e]); });
    if (!__any_sync(~0u, least == -kInfinity)) return;
    for_scores<kM, kKeys>([&](int i, int n, int half, int e, uint32_t bit) {
      if (s[i][n][2 * half + e] == -kInfinity) bits[i] &= ~bit;
    });
  }

  // Adds a bias that begin has not to scores.
  __device__ void add(Sums &s, uint32_t (&bits)[kM], int step) const {
    for_scores<kM, kKeys>([&](int i, int n, int half, int e, uint32_t bit) {
      if (!(bits[i] & bit)) return;
      const int64_t at = bias_at_ + row(2 * i + half) * extra_.of_bias.query + key(step, n, e) * extra_.of_bias.key;
      const float more = tile_.x.number(extra_.bias, extra_.wide_bias, at) * static_cast<float>(kLog2E);
      s[i][n][2 * half + e] += more;
      if (more == -kInfinity) bits[i] &= ~bit;
    });
  }

  __device__ bool adds_later() const { return slow_bias_; }

 private:
  // Whether rows begin at multiples, and the keys end at one.
  __device__ bool aligned(const void *p, int64_t row, int bytes, int to) const {
    return (reinterpret_cast<uintptr_t>(p) | static_cast<uintptr_t>((row | tile_.x.z.keys) * bytes)) % to == 0;
  }
  // Row i of this lane that exists.
  __device__ int64_t row(int i) const {
    const int query = tile_.query(i / 2, i % 2);
    return query < tile_.end ? query : tile_.end - 1;
  }
  __device__ int64_t key(int step, int n, int e) const {
    return tile_.key(step) + lane_index() % 4 * kEach + 2 * n + e;
  }
  // kWords from element `at` + key on, of so many bytes each, of those keys that exist.
  template <int kWords, int kRoom>
  __device__ void load_words(uint32_t (&to)[kRoom], const char *from, int64_t at, int key, int bytes) const {
    constexpr int kAtOnce = kWords < 4 ? kWords : 4;
    using Words = std::conditional_t<kAtOnce == 4, uint4, uint2>;
#pragma unroll
    for (int j = 0; j < kWords; j += kAtOnce) {
      Words words = {};
      const int first = key + j * 4 / bytes;
      if (first < tile_.x.z.keys) words = *reinterpret_cast<const Words *>(from + (at + first) * bytes);
      to[j] = words.x, to[j + 1] = words.y;
      if constexpr (kAtOnce == 4) to[j + 2] = words.z, to[j + 3] = words.w;
    }
  }
  // A bit for each byte, whether it is 0.
  __device__ static uint32_t mask_bits(const uint32_t (&bytes)[kEach / 4]) {
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < kEach / 4; ++j) bits |= (__vsetne4(bytes[j], 0) * 0x01020408u >> 24 & 15u) << 4 * j;
    return bits;
  }

  const Tile &tile_;
  const AttentionExtras &extra_;
  const bool *mask_;  // of the head
  int64_t bias_at_;   // where that of the head begins
  float over_;
  bool fast_mask_, fast_bias_, slow_mask_, slow_bias_;
  alignas(16) uint32_t masks_[2 * kM][kEach / 4], bias_[2 * kM][kEach];
};

// Calls without a mask and a bias have this.
struct NothingAdded {
  template <class Tile>
  __device__ NothingAdded(const Tile &, bool) {}
  template <class... Place>
  __device__ void load(Place...) const {}
  template <class Sums, class Bits, class... Place>
  __device__ void begin(Sums &s, Bits &, Place...) const {
    clear_sums(s);
  }
  template <class Sums, class Bits, class... Place>
  __device__ void add(Sums &, Bits &, Place...) const {}
  __device__ bool adds_later() const { return false; }
};

// ---------------------------------------------------------------------------------------------------------------- y

// The weights of a step's scores, and what was summed so far multiplied so that both are of the same largest score.
template <int kM, int kKeys, int kDim>
__device__ inline void weigh_scores(MmaSums<kM, kKeys> &s, MmaSums<kM, kDim> &sums, float (&most)[kM][2],
                                    float (&total)[kM][2], float scale) {
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float block = -kInfinity, sum = 0;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) block = fmaxf(block, fmaxf(s[i][n][2 * half], s[i][n][2 * half + 1]));
      block = fmaxf(block, __shfl_xor_sync(~0u, block, 1));
      block = fmaxf(block, __shfl_xor_sync(~0u, block, 2));
      const float before = most[i][half], now = fmaxf(before, scale * block), base = now == -kInfinity ? 0 : now;
      const float shrink = fast_exp2(before - base);
      most[i][half] = now;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) sum += s[i][n][2 * half + e] = fast_exp2(s[i][n][2 * half + e] * scale - base);
      total[i][half] = total[i][half] * shrink + sum;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) sums[i][n][2 * half] *= shrink, sums[i][n][2 * half + 1] *= shrink;
    }
}

// kAdded: the call may have a mask or a bias, and dropout besides. kDrops: it has dropout, no mask or bias, and
// drops_fast.
template <typename T, class Shape, bool kAdded, bool kDrops>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    attention_y_kernel(AttentionInputs<T> x, T *y, float *lse) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  constexpr int kDim = Shape::kDim, kM = Shape::kM, kKeys = Shape::kOthers;
  extern __shared__ __align__(1024) uint4 attention_shared[];
  const uint32_t q_tile = shared_address(attention_shared), stages = q_tile + Shape::kTile;
  const auto stage = [=](int step) { return stages + step % 2 * (2 * Shape::kOtherTile); };
  using Tile = QueryTile<T, Shape>;
  const Tile tile(x, reinterpret_cast<int2 *>(reinterpret_cast<char *>(attention_shared) + Shape::shared(1, false)));
  tile.copy_queries(q_tile);
  if (tile.steps) tile.fetch(stage(0), 0);
  commit_copies();

  const MmaScores scores(x.z);
  const bool scaled = scores.scaled();
  std::conditional_t<kAdded, AddedRows<T, Shape>, NothingAdded> added(tile, scaled);
  const bool drops_too = kAdded && x.extra.dropout;
  const bool fused = kDrops || (scaled && !added.adds_later());
  const float scale = fused ? scores.scale : 1;
  if (tile.steps) added.load(0);
  using Kept = std::conditional_t<kDrops, MmaKept, Nothing>;
  const Kept keeps = Kept(x.extra.dropout).of(tile.b * x.z.heads + tile.h);

  const int warp_row = warp_index() * Shape::kWarpRows;
  MmaSums<kM, kDim> sums = {};
  float slope, most[kM][2], total[kM][2] = {};
#pragma unroll
  for (auto &pair : most) pair[0] = pair[1] = -kInfinity;
  if (x.extra.sinks) {
    const float sink = x.sink(tile.h) * static_cast<float>(kLog2E);
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        most[i][half] = sink, total[i][half] = lane_index() % 4 == 0 && sink != -kInfinity ? 1 : 0;
  }
#pragma unroll 1
  for (int step = 0; step < tile.steps; ++step) {
    wait_copies<0>();
    __syncthreads();
    if (step + 1 < tile.steps) tile.fetch(stage(step + 1), step + 1);
    commit_copies();
    MmaSums<kM, kKeys> s;
    typename Tile::Bits bits;
    bool partial = tile.find_partial(bits, step);
    added.begin(s, bits, step);
    if ((kAdded || partial) && !tile.any(bits, &partial)) {
      if (step + 1 < tile.steps) added.load(step + 1);
      continue;
    }
    constexpr int kOfRow = kKeys / 32, kCalls = 2 * kM * kOfRow, kSteps = kDim / 16;
    const uint32_t eight = (tile.key(step) + lane_index() % 4 * (kKeys / 4)) / 8;
    uint32_t kept[2] = {};
    constexpr bool kBefore = kOfRow > 1;  // the product, while few registers are in use; else behind it
    if (drops_too && kBefore) {
      const MmaKept too = MmaKept(x.extra.dropout).of(tile.b * x.z.heads + tile.h);
#pragma unroll 1
      for (int j = 0; j < kCalls; ++j)
        too.find(kept, j, tile.query(j / kOfRow / 2, j / kOfRow % 2), eight + j % kOfRow);
    }
    multiply_rows<kDim, kM, kKeys, Shape::kUnroll>(s, q_tile, warp_row, stage(step), T(), [&](int k, uint32_t word) {
      if constexpr (kDrops) {
        static_assert(kCalls <= 8);
#pragma unroll
        for (int j = 0; j < kCalls; ++j)
          if (j >= k * kCalls / kSteps && j < (k + 1) * kCalls / kSteps)
            keeps.find(kept, j, tile.query(j / kOfRow / 2, j / kOfRow % 2) + keeps.opaque_zero(word),
                       eight + j % kOfRow);
      }
    });
    if (!fused) {
      for_scores<kM, kKeys>([&](int i, int n, int half, int e, uint32_t) {
        float &score = s[i][n][2 * half + e];
        score = scores(score, &slope);
      });
    }
    if (added.adds_later()) added.add(s, bits, step), partial = true;
    if (partial)  // whatever the score of a hidden key is
      for_scores<kM, kKeys>([&](int i, int n, int half, int e, uint32_t bit) {
        if (!(bits[i] & bit)) s[i][n][2 * half + e] = -kInfinity;
      });
    weigh_scores<kM, kKeys, kDim>(s, sums, most, total, scale);
    if (drops_too && !kBefore) {
      typename Tile::Bits kept_too;
      tile.find_kept(kept_too, step);
      for_scores<kM, kKeys>([&](int i, int n, int half, int e, uint32_t bit) {
        if (!(kept_too[i] & bit)) s[i][n][2 * half + e] = 0;
      });
    }
    MmaFactor<kM, kKeys> p;
    round_weights<kM, kKeys>(p, s, T());
    if (kDrops || (drops_too && kBefore))
#pragma unroll
      for (int row = 0; row < 2 * kM; ++row)
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
          MmaKept::mask(p[row / 2][n / 2][n % 2 * 2 + row % 2], kept[n / 2 % 2], row * kOfRow + n / 4, n % 2);
    if (step + 1 < tile.steps) added.load(step + 1);
    multiply_weights<kDim, kM, kKeys>(sums, p, stage(step) + Shape::kOtherTile, T());
  }

#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      total[i][half] = sum_lanes<4>(total[i][half]);
      const int query = tile.query(i, half);
      if (lse && query < tile.end && lane_index() % 4 == 0)
        lse[tile.row(query)] = (most[i][half] + log2f(total[i][half])) * static_cast<float>(1 / kLog2E);
    }
  const float times =
      (kAdded || kDrops) && x.extra.dropout ? tile.times * static_cast<float>(x.extra.dropout.times) : tile.times;
  if (y)
    store_sums<kM, kDim>(sums, x.of_results(y, tile.b, tile.h), tile.begin + warp_row, tile.end,
                         static_cast<int>(x.z.v_dim),
                         [&](int i, int half) { return total[i][half] == 0 ? 0 * times : times / total[i][half]; });
#endif
}

// --------------------------------------------------------------------------------------------------------------- dq

template <typename T, class Shape, bool kAdded>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks) attention_dq_kernel(AttentionInputs<T> x, T *dq) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  if constexpr (!runs_here(0, kAdded)) return;  // with a mask or a bias for blocks that have no room for one pass
  constexpr int kDim = Shape::kDim, kM = Shape::kM, kKeys = Shape::kOthers;
  extern __shared__ __align__(1024) uint4 attention_shared[];
  const uint32_t q_tile = shared_address(attention_shared), dy_tile = q_tile + Shape::kTile;
  const uint32_t stages = dy_tile + Shape::kTile;
  const auto stage = [=](int step) { return stages + step % 2 * (2 * Shape::kOtherTile); };
  using Tile = QueryTile<T, Shape>;
  const Tile tile(x, reinterpret_cast<int2 *>(reinterpret_cast<char *>(attention_shared) + Shape::shared(2, false)));
  tile.copy_queries(q_tile), tile.copy_slopes(dy_tile);
  if (tile.steps) tile.fetch(stage(0), 0);
  commit_copies();

  const MmaScores scores(x.z);
  const bool scaled = scores.scaled();
  std::conditional_t<kAdded, AddedRows<T, Shape>, NothingAdded> added(tile, scaled);
  const bool fused = scaled && !added.adds_later();
  const float scale = fused ? scores.scale : 1;
  if (tile.steps) added.load(0);
  const int warp_row = warp_index() * Shape::kWarpRows;
  MmaSums<kM, kDim> sums = {};
  float lse[kM][2], delta[kM][2];
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = tile.query(i, half);
      const bool present = query < tile.end;
      lse[i][half] = present ? x.lse[tile.row(query)] * static_cast<float>(kLog2E) : kInfinity;
      delta[i][half] = present ? x.delta[tile.row(query)] : 0;
      if (lse[i][half] == -kInfinity) lse[i][half] = kInfinity;
    }
#pragma unroll 1
  for (int step = 0; step < tile.steps; ++step) {
    wait_copies<0>();
    __syncthreads();
    if (step + 1 < tile.steps) tile.fetch(stage(step + 1), step + 1);
    commit_copies();
    MmaSums<kM, kKeys> s, dp = {};
    typename Tile::Bits bits;
    bool partial = tile.find_partial(bits, step);
    added.begin(s, bits, step);
    if ((kAdded || partial) && !tile.any(bits, &partial)) {
      if (step + 1 < tile.steps) added.load(step + 1);
      continue;
    }
    multiply_rows<kDim, kM, kKeys, Shape::kUnroll>(s, q_tile, warp_row, stage(step), T());
    multiply_rows<kDim, kM, kKeys, Shape::kUnroll>(dp, dy_tile, warp_row, stage(step) + Shape::kOtherTile, T());
    if (!fused)
      for_scores<kM, kKeys>([&](int i, int n, int half, int e, uint32_t) {
        float slope, &score = s[i][n][2 * half + e], &of_p = dp[i][n][2 * half + e];
        score = scores(score, &slope);
        of_p = of_p * slope + delta[i][half] * (1 - slope);
      });
    if (added.adds_later()) added.add(s, bits, step), partial = true;
    for_scores<kM, kKeys>([&](int i, int n, int half, int e, uint32_t) {
      float &score = s[i][n][2 * half + e];
      score = fast_exp2(score * scale - lse[i][half]) * (dp[i][n][2 * half + e] - delta[i][half]);
    });
    if (partial)
      for_scores<kM, kKeys>([&](int i, int n, int half, int e, uint32_t bit) {
        if (!(bits[i] & bit)) s[i][n][2 * half + e] = 0;
      });
    MmaFactor<kM, kKeys> ds;
    round_weights<kM, kKeys>(ds, s, T());
    if (step + 1 < tile.steps) added.load(step + 1);
    multiply_weights<kDim, kM, kKeys>(sums, ds, stage(step), T());
  }
  const float times = static_cast<float>(x.z.scale) * tile.times;
  store_sums<kM, kDim>(sums, x.of_queries(dq, tile.b, tile.h, x.z.dim), tile.begin + warp_row, tile.end,
                       static_cast<int>(x.z.dim), [=](int, int) { return times; });
#endif
}

// ------------------------------------------------------------------------------------------------------- dk and dv

// Where a block of keys is among the heads that share its own, and the tiles of their queries.
struct MmaStep {
  int head = 0, tile = 0, parity = 0;

  __device__ MmaStep next(int tiles) const {
    return tile + 1 == tiles ? MmaStep{head + 1, 0, 1 - parity} : MmaStep{head, tile + 1, 1 - parity};
  }
};

// Waits for what fetch has begun to load of a step, and begins to load the next one, which it returns.
template <class Fetch>
__device__ inline MmaStep next_step(const MmaStep &step, int tiles, int64_t heads, const Fetch &fetch) {
  wait_copies<0>();
  __syncthreads();
  const MmaStep next = step.next(tiles);
  if (next.head < heads) fetch(next);
  commit_copies();
  return next;
}

// dk, dv: null if not wanted. One of them alone needs half as many registers: kDk and kDv.
template <typename T, class Shape, bool kDk, bool kDv, bool kExtra>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    attention_dkv_kernel(AttentionInputs<T> x, T *dk, T *dv) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  if constexpr (!runs_here(0, kExtra)) return;
  constexpr int kDim = Shape::kDim, kM = Shape::kM, kQueries = Shape::kOthers;
  extern __shared__ __align__(1024) uint4 attention_shared[];
  const AttentionSizes &z = x.z;
  const int64_t tiles = ceil_div(z.keys, Shape::kRows), head = blockIdx.x / tiles, b = head / z.kv_heads;
  const int64_t kv = head % z.kv_heads, begin = blockIdx.x % tiles * Shape::kRows;
  const int64_t end = begin + Shape::kRows < z.keys ? begin + Shape::kRows : z.keys;
  const auto length = kExtra ? x.block_length(b) : x.length(b);
  const int64_t last = end < length.value ? end : length.value;
  const int dim = static_cast<int>(z.dim), v_dim = static_cast<int>(z.v_dim);

  Range seeing = z.seeing(begin, last);
  if constexpr (kExtra) seeing = begin < last ? x.extra.own(seeing, begin, last, true) : Range{0, 0};
  const int64_t first = seeing.begin / kQueries * kQueries;
  const bool any = begin < last && first < seeing.end;
  const int of_head = any ? static_cast<int>(ceil_div(seeing.end - first, kQueries)) : 0;
  const uint32_t k_tile = shared_address(attention_shared), v_tile = k_tile + Shape::kTile;
  const uint32_t stages = v_tile + Shape::kTile;
  const auto stage = [=](int parity) { return stages + parity * (2 * Shape::kOtherTile); };
  float (*const numbers)[2][kQueries] =
      reinterpret_cast<float (*)[2][kQueries]>(reinterpret_cast<char *>(attention_shared) + Shape::shared(2, false));
  const auto fetch = [&](MmaStep next) {
    const int64_t h = kv * z.group() + next.head, query = first + int64_t{next.tile} * kQueries;
    copy_rows<Shape, kQueries>(stage(next.parity), x.of_queries(x.q, b, h, z.dim), query, z.queries, dim);
    copy_rows<Shape, kQueries>(stage(next.parity) + Shape::kOtherTile, x.of_results(x.dy, b, h), query, z.queries,
                               v_dim);
    if (threadIdx.x < kQueries) {
      const int64_t i = query + threadIdx.x, at = x.row(b, h, i);
      numbers[next.parity][0][threadIdx.x] = i < z.queries ? x.lse[at] * static_cast<float>(kLog2E) : kInfinity;
      numbers[next.parity][1][threadIdx.x] = i < z.queries ? x.delta[at] : 0;
      if (kExtra && numbers[next.parity][0][threadIdx.x] == -kInfinity)
        numbers[next.parity][0][threadIdx.x] = kInfinity;
    }
  };
  int2 *const own = reinterpret_cast<int2 *>(reinterpret_cast<char *>(attention_shared) + Shape::shared(2, true));
  if (kExtra && x.extra.offsets) find_sequences<Shape>(own, x.extra, begin, true, 0, x.extra.sequences + 1);
  copy_rows<Shape, Shape::kRows>(k_tile, x.of_keys(x.k, b, kv, z.dim), begin, last, dim);
  copy_rows<Shape, Shape::kRows>(v_tile, x.of_keys(x.v, b, kv, z.v_dim), begin, last, v_dim);
  MmaStep step;
  if (of_head) fetch(step);
  commit_copies();

  const MmaScores scores(z);
  const int warp_row = warp_index() * Shape::kWarpRows;
  MmaSums<kM, kDim> dk_sums = {}, dv_sums = {};
#pragma unroll 1
  for (; of_head && step.head < z.group(); step = step.next(of_head)) {
    next_step(step, of_head, z.group(), fetch);
    const uint32_t q_tile = stage(step.parity), dy_tile = q_tile + Shape::kOtherTile;
    const float *const lse = numbers[step.parity][0], *const delta = numbers[step.parity][1];
    const int64_t query = first + int64_t{step.tile} * kQueries;
    const Range by_last = z.seeing(end - 1, end), by_first = z.seeing(begin, begin + 1);
    const MmaAddends<T> addends(x, b, kv * z.group() + step.head);
    const bool whole = last == begin + Shape::kRows && query >= by_last.begin && query + kQueries <= by_first.end;
    MmaSums<kM, kQueries> s = {}, dp = {};
    multiply_rows<kDim, kM, kQueries, Shape::kUnroll>(s, k_tile, warp_row, q_tile, T());
    if constexpr (kDk) multiply_rows<kDim, kM, kQueries, Shape::kUnroll>(dp, v_tile, warp_row, dy_tile, T());
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int2 range = {0, kQueries};
        const int64_t key = begin + warp_row + 16 * i + 8 * half + lane_index() / 4;
        if (kExtra || !whole) {
          range = within(z.seeing(key, key + 1), query, kQueries);
          if (kExtra && x.extra.offsets) range = within_sequence(range, own[key - begin], query);
          if (key >= last) range = {kQueries, kQueries};
        }
#pragma unroll
        for (int n = 0; n < kQueries / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int column = 8 * n + lane_index() % 4 * 2 + e;
            float slope, &score = s[i][n][2 * half + e], &of_p = dp[i][n][2 * half + e];
            if constexpr (kExtra) {
              const bool present = column >= range.x && column < range.y;
              const float more = present ? addends(query + column, key) : -kInfinity;
              const float p = fast_exp2(scores(score, &slope) + more - lse[column]);
              score = more == -kInfinity ? 0 : p;
            } else {
              const float p = fast_exp2(scores(score, &slope) - lse[column]);
              score = column < range.x || column >= range.y ? 0 : p;
            }
            if constexpr (kDk) of_p = score == 0 ? 0 : score * (of_p - delta[column]) * slope;
          }
      }
    MmaFactor<kM, kQueries> weights;
    if constexpr (kDv) {
      round_weights<kM, kQueries>(weights, s, T());
      multiply_weights<kDim, kM, kQueries>(dv_sums, weights, dy_tile, T());
    }
    if constexpr (kDk) {
      round_weights<kM, kQueries>(weights, dp, T());
      multiply_weights<kDim, kM, kQueries>(dk_sums, weights, q_tile, T());
    }
  }
  const int64_t row = begin + warp_row;
  const float times = length.times, scale = static_cast<float>(z.scale) * times;
  if (kDk && dk)
    store_sums<kM, kDim>(dk_sums, x.of_keys(dk, b, kv, z.dim), row, end, dim, [=](int, int) { return scale; });
  if (kDv && dv)
    store_sums<kM, kDim>(dv_sums, x.of_keys(dv, b, kv, z.v_dim), row, end, v_dim, [=](int, int) { return times; });
#endif
}

// ------------------------------------------------------------------------------------------------------------ dbias

// A tile of a plane of a bias: what its members add to dbias, queries and keys along which it is broadcast included.
template <typename T, class Shape>
class BiasTile {
 public:
  static constexpr int kDim = Shape::kDim, kRows = Shape::kRows, kKeys = Shape::kOthers;
  using Sums = MmaSums<1, kKeys>;
  static constexpr int kTiles = 2 * Shape::kTile + 2 * Shape::kOtherTile, kShared = kTiles + kRows * 8;
  static_assert(Shape::kM == 1 && kRows * (kKeys + 1) * 4 <= kTiles);

  __device__ BiasTile(const AttentionInputs<T> &x, uint4 *shared)
      : x_(x),
        z_(x.z),
        steps_(x.extra.of_bias),
        shared_(reinterpret_cast<char *>(shared)),
        own_(reinterpret_cast<int2 *>(shared_ + kTiles)) {
    const int64_t rows = steps_.query ? ceil_div(z_.queries, kRows) : 1,
                  columns = steps_.key ? ceil_div(z_.keys, kKeys) : 1;
    plane_ = blockIdx.x / columns / rows;
    query_ = blockIdx.x / columns % rows * kRows, key_ = blockIdx.x % columns * kKeys;
  }

  __device__ void run(void *to) {
    for (int64_t member = 0; member < steps_.members; ++member) {
      const int64_t head = steps_.sharer(plane_, member, z_.heads);
      b_ = head / z_.heads, h_ = head % z_.heads;
      const auto length = x_.block_length(b_);
      length_ = length.value, times_ *= length.times;
      const int64_t last = steps_.query && query_ + kRows < z_.queries ? query_ + kRows : z_.queries;
      for (int64_t query = query_; query < last; query += kRows) add_queries(query);
    }
    store(static_cast<float *>(static_cast<void *>(shared_)), to);
  }

 private:
  __device__ static int local(int half) { return warp_index() * 16 + 8 * half + lane_index() / 4; }
  __device__ static int column(int n, int e) { return 8 * n + lane_index() % 4 * 2 + e; }

  __device__ void add_queries(int64_t query) {
    const int64_t past = query + kRows < z_.queries ? query + kRows : z_.queries;
    const Range seen = x_.extra.own(z_.seen_by(query, past, length_), query, past);
    const int64_t end = steps_.key && key_ + kKeys < seen.end ? key_ + kKeys : seen.end;
    __syncthreads();
    if (x_.extra.offsets) find_sequences<Shape>(own_, x_.extra, query, false, 0, x_.extra.sequences + 1);
    for (int64_t key = steps_.key ? key_ : seen.begin / kKeys * kKeys; key < end; key += kKeys) add(query, past, key);
  }

  __device__ void add(int64_t query, int64_t past, int64_t key) {
    const uint32_t q = shared_address(shared_), dy = q + Shape::kTile, k = dy + Shape::kTile, v = k + Shape::kOtherTile;
    const int dim = static_cast<int>(z_.dim), v_dim = static_cast<int>(z_.v_dim);
    const int64_t kv = h_ / z_.group();
    __syncthreads();
    copy_rows<Shape, kRows>(q, x_.of_queries(x_.q, b_, h_, dim), query, past, dim);
    copy_rows<Shape, kRows>(dy, x_.of_results(x_.dy, b_, h_), query, past, v_dim);
    copy_rows<Shape, kKeys>(k, x_.of_keys(x_.k, b_, kv, dim), key, length_, dim);
    copy_rows<Shape, kKeys>(v, x_.of_keys(x_.v, b_, kv, v_dim), key, length_, v_dim);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    Sums s = {}, dp = {};
    multiply_rows<kDim, 1, kKeys, Shape::kUnroll>(s, q, warp_index() * 16, k, T());
    multiply_rows<kDim, 1, kKeys, Shape::kUnroll>(dp, dy, warp_index() * 16, v, T());
    const MmaAddends<T> addends(x_, b_, h_);
    const MmaScores scores(z_);
    const uint32_t kept = x_.extra.dropout ? find_kept(query, key) : ~0u;
    const float times = x_.extra.dropout ? static_cast<float>(x_.extra.dropout.times) : 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t i = query + local(half);
      if (i >= past) continue;
      const int64_t at = x_.row(b_, h_, i);
      const float lse = x_.lse[at] * static_cast<float>(kLog2E), delta = x_.delta[at];
      const int2 all = within(z_.seen_by(i, i + 1, length_), key, kKeys),
                 range = x_.extra.offsets ? within_sequence(all, own_[local(half)], key) : all;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (column(n, e) < range.x || column(n, e) >= range.y) continue;
          const float more = addends(i, key + column(n, e));
          float slope;
          const float p = fast_exp2(scores(s[0][n][2 * half + e], &slope) + more - lse);
          const float of_p = kept >> (16 * half + 2 * n + e) & 1 ? dp[0][n][2 * half + e] * times : 0;
          if (more != -kInfinity) sums_[0][n][2 * half + e] += p * (of_p - delta);
        }
    }
  }

  // Bit 16 half + 2 n + e: whether dropout keeps column (n, e) of row `half`.
  __device__ uint32_t find_kept(int64_t query, int64_t key) const {
    static_assert(kKeys <= 64);
    const KeptKeys kept = x_.extra.dropout.of(b_ * z_.heads + h_);
    uint32_t bits = 0;
#pragma unroll 2
    for (int j = 0; j < kKeys / 4; ++j) {
      const int half = j / (kKeys / 8), n = j % (kKeys / 8);
      const uint32_t eight = kept(static_cast<uint32_t>(query + local(half)), static_cast<uint32_t>(key / 8 + n));
      bits |= (eight >> lane_index() % 4 * 2 & 3) << (16 * half + 2 * n);
    }
    return bits;
  }

  // sums: (kRows, kKeys + 1).
  __device__ void store(float *sums, void *to) const {
    constexpr int kLine = kKeys + 1;
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) sums[local(half) * kLine + column(n, e)] = sums_[0][n][2 * half + e] * times_;
    __syncthreads();
    if (!steps_.query && threadIdx.x < kKeys)
      for (int i = 1; i < kRows; ++i) sums[threadIdx.x] += sums[i * kLine + threadIdx.x];
    __syncthreads();
    if (!steps_.key && threadIdx.x < (steps_.query ? kRows : 1))
      for (int j = 1; j < kKeys; ++j) sums[threadIdx.x * kLine] += sums[threadIdx.x * kLine + j];
    __syncthreads();
    const int64_t rows = steps_.query ? z_.queries : 1, columns = steps_.key ? z_.keys : 1;
    for (int i = threadIdx.x; i < kRows * kKeys; i += Shape::kThreads) {
      const int64_t row = query_ + i / kKeys, column = key_ + i % kKeys;
      if (row < rows && column < columns)
        x_.store(sums[i / kKeys * kLine + i % kKeys], to, x_.extra.wide_bias, (plane_ * rows + row) * columns + column);
    }
  }

  const AttentionInputs<T> &x_;
  const AttentionSizes &z_;
  const ScoreSteps &steps_;
  char *shared_;
  int2 *own_;
  int64_t plane_, query_, key_, b_, h_, length_;
  float times_ = 1;
  Sums sums_ = {};
};

// blockIdx.x: a tile of a plane of the bias.
template <typename T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    attention_mma_dbias_kernel(AttentionInputs<T> x, void *dbias) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  extern __shared__ __align__(1024) uint4 attention_shared[];
  BiasTile<T, Shape>(x, attention_shared).run(dbias);
#endif
}

// ------------------------------------------------------------------------------------------------------- launchers

// Whether these kernels take a call whose tensors are aligned.
inline bool mma_takes(const AttentionSizes &z) {
  const bool fits = z.dim <= 256 && z.v_dim <= 256 && std::max(z.queries, z.keys) <= 1 << 30;
  return fits && z.dim % 8 == 0 && z.v_dim % 8 == 0 && z.v_dim > 0;
}

// f(MmaShapes<kDim>()) with the head_dim that q, k and v are padded to.
template <class F>
Status dispatch_mma(const AttentionSizes &z, F f) {
  const int64_t dim = std::max(z.dim, z.v_dim);
  if (dim <= 64) return f(MmaShapes<64>());
  return dim <= 96 ? f(MmaShapes<96>()) : dim <= 128 ? f(MmaShapes<128>()) : f(MmaShapes<256>());
}
// Kernels with kExtra: whether they take a call that the others take, and their shapes.
template <typename T>
bool mma_takes_extra(const AttentionInputs<T> &x) {
  return (!x.extra.mask && !x.extra.bias && !x.extra.offsets && !x.extra.dropout) ||
         (x.z.dim <= 128 && x.z.v_dim <= 128);
}
template <class F>
Status dispatch_mma_extra(const AttentionSizes &z, F f) {
  return std::max(z.dim, z.v_dim) <= 64 ? f(MmaExtraShapes<64>()) : f(MmaExtraShapes<128>());
}

// A block for each tile of rows of each head.
template <class Shape, typename... Parameters, typename... Arguments>
Status launch_mma(const char *op, void (*kernel)(Parameters...), int64_t heads, int64_t rows, int shared, void *stream,
                  const Arguments &...arguments) {
  const int64_t blocks = heads * ceil_div(rows, Shape::kRows);
  if (!blocks) return kOk;
  if (blocks > INT32_MAX)
    return fail(kNotImplemented, "%s: %lld tiles are more than a grid has", op, static_cast<long long>(blocks));
  return launch_kernel(op, kernel, {static_cast<unsigned>(blocks), Shape::kThreads, shared}, stream, arguments...);
}

template <class Shape, bool kAdded, bool kDrops, typename T>
Status run_mma_forward_of(const char *op, const AttentionInputs<T> &x, T *y, float *lse, void *stream) {
  constexpr int kShared = Shape::shared(1, false, true);
  static_assert(kShared <= kMmaShared);
  return launch_mma<Shape>(op, attention_y_kernel<T, Shape, kAdded, kDrops>, x.z.batch * x.z.heads, x.z.queries,
                           kShared, stream, x, y, lse);
}

template <bool kExtra, class Shapes, typename T>
Status run_mma_backward_of(Shapes, const char *op, const AttentionInputs<T> &x, T *dq, T *dk, T *dv, void *stream) {
  const AttentionSizes &z = x.z;
  using Dq = typename Shapes::Dq;
  using Dkv = typename Shapes::Dkv;
  constexpr int kOfDq = Dq::shared(2, false, true), kOfDkv = Dkv::shared(2, true, kExtra);
  static_assert(kOfDq <= kMmaShared && kOfDkv <= kMmaShared);
  if (dq)
    AOT_TRY(launch_mma<Dq>(op, attention_dq_kernel<T, Dq, kExtra>, z.batch * z.heads, z.queries, kOfDq, stream, x, dq));
  const auto run = [&](auto kernel) {
    return launch_mma<Dkv>(op, kernel, z.batch * z.kv_heads, z.keys, kOfDkv, stream, x, dk, dv);
  };
  if constexpr (Dkv::kDim <= 128) {
    return dk || dv ? run(attention_dkv_kernel<T, Dkv, true, true, kExtra>) : kOk;
  } else {
    if (dk) AOT_TRY(run(attention_dkv_kernel<T, Dkv, true, false, kExtra>));
    return dv ? run(attention_dkv_kernel<T, Dkv, false, true, kExtra>) : kOk;
  }
}

// How many tiles of so many queries and keys the planes of a bias have.
template <typename T>
Status count_bias_tiles(const char *op, const AttentionInputs<T> &x, int rows, int columns, int64_t *blocks) {
  const ScoreSteps &steps = x.extra.of_bias;
  *blocks =
      steps.planes * (steps.query ? ceil_div(x.z.queries, rows) : 1) * (steps.key ? ceil_div(x.z.keys, columns) : 1);
  if (*blocks <= INT32_MAX) return kOk;
  return fail(kNotImplemented, "%s: %lld tiles of the bias are more than a grid has", op,
              static_cast<long long>(*blocks));
}

template <typename T>
Status run_mma_bias(const char *op, const AttentionInputs<T> &x, void *dbias, void *stream) {
  return dispatch_mma_extra(x.z, [&](auto shapes) -> Status {
    using Shape = typename decltype(shapes)::Dbias;
    constexpr int kShared = BiasTile<T, Shape>::kShared;
    static_assert(kShared <= kMmaShared);
    int64_t blocks;
    AOT_TRY(count_bias_tiles(op, x, Shape::kRows, Shape::kOthers, &blocks));
    if (!blocks) return kOk;
    return launch_kernel(op, attention_mma_dbias_kernel<T, Shape>,
                         {static_cast<unsigned>(blocks), Shape::kThreads, kShared}, stream, x, dbias);
  });
}

// Whether kernels of dropout alone take a call that has it.
inline bool drops_fast(const AttentionSizes &z) { return z.softcap == 0 && z.scale >= kLeastScale; }

// Calls with what is in `extra` have shapes of their own.
template <typename T>
Status run_mma_forward(const char *op, const AttentionInputs<T> &x, T *y, float *lse, void *stream) {
  const bool wide = std::max(x.z.dim, x.z.v_dim) > 64, drops(x.extra.dropout);
  if (x.extra.mask || x.extra.bias || (drops && !drops_fast(x.z))) {
    if (wide) return run_mma_forward_of<MmaExtraShapes<128>::Y, true, false>(op, x, y, lse, stream);
    return run_mma_forward_of<MmaExtraShapes<64>::Y, true, false>(op, x, y, lse, stream);
  }
  if (drops) {
    if (wide) return run_mma_forward_of<MmaShapes<128>::Y, false, true>(op, x, y, lse, stream);
    return run_mma_forward_of<MmaShapes<64>::Y, false, true>(op, x, y, lse, stream);
  }
  return dispatch_mma(x.z, [&](auto shapes) {
    return run_mma_forward_of<typename decltype(shapes)::Y, false, false>(op, x, y, lse, stream);
  });
}

template <typename T>
Status run_mma_backward(const char *op, const AttentionInputs<T> &x, T *dq, T *dk, T *dv, void *stream) {
  if (std::max(x.z.dim, x.z.v_dim) > 128)
    return run_mma_backward_of<false>(MmaShapes<256>(), op, x, dq, dk, dv, stream);
  return run_mma_backward_of<true>(MmaExtraShapes<128>(), op, x, dq, dk, dv, stream);
}

}  // namespace AOT_ISA
}  // namespace aot
