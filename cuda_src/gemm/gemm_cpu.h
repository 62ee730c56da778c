// Matrix products on the CPU: C = A B, or C += A B, with A (m, k), B (k, n) and C (m, n) row-major.
//
//   gemm(m, n, k, a, b, c, ldc);                   c[i * ldc + j] = sum over p of a(i, p) * b(p, j)
//   gemm(m, n, k, a, b, c, ldc, true);             adds to what c holds
//   gemm(m, n, k, a, b, c, ldc, false, epilogue);  stores epilogue(v, i, j, part) instead of v
//   gemm_batch(count, product);                    products of one size; product(i) gives the i-th, a CpuGemm
//   gemm_each(products);                           products of any sizes
//
// a is Matrix<T>{data, stride}, or Matrix<T>{data, stride, true} if it is stored transposed, (k, m); b likewise. A and
// B are of the same T: float16, bfloat16, float or double. Of CpuGemm a may also be a Gathered<Accumulate<T>>, an
// InPlace<Accumulate<T>> or GatheredPairs, and b then a PackedMatrix<Accumulate<T>>, which products with several A or
// tiles need not pack again. C is of T or of Accumulate<T>; sums are computed in Accumulate<T> and rounded to C's type
// once. The epilogue takes a vector of sums, Vec<T>, with the row and column of its first element, and returns what to
// store; it runs while the tile is in a cache. An epilogue with kStores has a function store(row, column, rows, cols,
// sums, stride), which stores a tile by itself; one with kBlocks has store_block(row, column, rows, cols, sums, stride,
// c, ldc), which stores the block of it that registers held, to c, and adds to nothing. k = 0 gives sums of zero. All
// functions may be called inside a parallel loop, and then run on the calling thread.
//
// C is divided into tiles, which threads take one by one. The order in which the terms of a sum are added depends on m
// and k only, so the result is the same on any number of threads. For a tile, panels of A and B are packed and widened
// to the thread's own memory, and a block of C stays in registers while a panel passes. What few rows or columns share
// is not packed.
#pragma once
#include <optional>
#include <type_traits>

#include "cpu/parallel.h"
#include "tiles_cpu.h"

namespace aot {
inline namespace AOT_ISA {

// Element (i, j) is data[i * stride + j], or data[j * stride + i] if transposed.
template <typename T>
struct Matrix {
  const T *data;
  int64_t stride;
  bool transposed = false;

  Matrix at(int64_t i, int64_t j) const {
    return {data + (transposed ? j * stride + i : i * stride + j), stride, transposed};
  }
};

// Element (i, p) is data[rows[i] + terms[p]]. It is read where it lies: no panel is packed.
template <typename A>
struct Gathered {
  const A *data;
  const int64_t *rows, *terms;

  Gathered at(int64_t i, int64_t p) const { return {data, rows + i, terms + p}; }
};

// GatheredPairs has pairs of bfloat16 terms in the 32 bits of a float: p counts pairs, of B too. It is for processors
// where `multiplies_pairs`.
struct GatheredPairs : Gathered<float> {
  GatheredPairs at(int64_t i, int64_t p) const { return {Gathered::at(i, p)}; }
};

// Element (i, p) is data[i * stride + p]. It is read where it lies, which pays if few columns share a packed panel.
template <typename A>
struct InPlace {
  const A *data;
  int64_t stride;

  InPlace at(int64_t i, int64_t p) const { return {data + i * stride + p, stride}; }
};

template <typename A>
struct PackedMatrix;

// Stores the sums.
struct NoEpilogue {
  template <class V, class P>
  V operator()(V sum, int64_t, int64_t, P) const {
    return sum;
  }
};

template <class Epilogue, class = void>
constexpr bool kStoresTiles = false;
template <class Epilogue>
constexpr bool kStoresTiles<Epilogue, std::enable_if_t<Epilogue::kStores>> = true;
template <class Epilogue, class = void>
constexpr bool kStoresBlocks = false;
template <class Epilogue>
constexpr bool kStoresBlocks<Epilogue, std::enable_if_t<Epilogue::kBlocks>> = true;

// Up to kDotRows rows of C are computed as dot products if B is stored transposed. Up to kFewRows rows, B is not packed
// otherwise: packing would cost more than it saves.
constexpr int64_t kDotRows = 32, kFewRows = 64;

// ----------------------------------------------------------------------------------------------------------- terms

// Panels and dot products consist of vectors, each of whose elements has kTerms terms of a sum. `along` reads them
// along a contiguous line of a matrix. `across` reads them from as many adjacent lines as a vector has lanes, where the
// next term of a line is `stride` further on, if any of the `left` terms remain.

template <typename T>
struct WidenedTerms {
  static constexpr int kTerms = 1;

  template <class P>
  static Vec<T> along(const T *at, P part) {
    return load(at, part);
  }
  template <class P>
  static Vec<T> across(const T *at, int64_t, int64_t, P part) {
    return load(at, part);
  }
  static Vec<T> spread(Accumulate<T> a) { return a - Vec<T>{}; }
  static Vec<T> add(Vec<T> sum, Vec<T> a, Vec<T> b) { return sum + a * b; }
#if defined(__AVX512F__)
  // By a multiply-add that reads and spreads a itself. GCC loads an element that meets two vectors into a register.
  static constexpr bool kReads = std::is_same_v<Accumulate<T>, float>;
  static Vec<T> add_read(Vec<T> sum, const float &a, Vec<T> b) {
    asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(b), "m"(a));
    return sum;
  }
#else
  static constexpr bool kReads = false;
#endif
};

#if defined(__AVX512F__)
// Pairs of bfloat16 terms in the 32 bits of a float, for vdpbf16ps, which treats subnormal numbers as zeros.
struct BFloat16Pairs {
  static constexpr int kTerms = 2;
  static constexpr bool kReads = false;

  // Not every processor with AVX-512 has the instruction, and Intel's have it at a quarter of AMD's rate: slower than
  // two multiply-adds of float. AOTOPS_CPU_ISA=avx512 turns it off.
  static bool available() {
    static const bool is = [] {
      const char *asked = std::getenv("AOTOPS_CPU_ISA");
      return __builtin_cpu_supports("avx512bf16") && !__builtin_cpu_is("intel") &&
             !(asked && !std::strcmp(asked, "avx512"));
    }();
    return is;
  }
  static Vec<float> along(const bfloat16 *at, Full) { return load_raw<Vec<float>>(at); }
  static Vec<float> along(const bfloat16 *at, Part part) { return load_raw<Vec<float>>(at, part.n * sizeof *at); }
  template <class P>
  static Vec<float> across(const bfloat16 *at, int64_t stride, int64_t left, P part) {
    const auto high = left > 1 ? (VecBits)load(at + stride, part) : VecBits{};
    return (Vec<float>)(high | (VecBits)load(at, part) >> 16);
  }
  static Vec<float> spread(float a) {
    uint32_t bits;
    std::memcpy(&bits, &a, sizeof a);
    return (Vec<float>)(bits - VecBits{});
  }
  static Vec<float> add(Vec<float> sum, Vec<float> a, Vec<float> b) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
  }
};

// Terms that are pairs already.
struct WholePairs : BFloat16Pairs {
  static constexpr int kTerms = 1;
};

// Pairs for the tile registers.
struct TileTerms : BFloat16Pairs {};
template <class Terms>
constexpr bool kTiles = std::is_same_v<Terms, TileTerms>;
template <class Terms>
using RegistersOf = std::conditional_t<kTiles<Terms>, TileRegisters, NoEpilogue>;
#else
template <class Terms>
constexpr bool kTiles = false;
template <class Terms>
using RegistersOf = NoEpilogue;
#endif

// Whether a product with m rows of A uses the tile registers. Few rows are multiplied without packing B.
template <typename T>
bool in_tiles([[maybe_unused]] int64_t m) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, bfloat16>) return m > kDotRows && TileRegisters::available();
#endif
  return false;
}

// Whether the processor multiplies vectors of pairs of T.
template <typename T>
bool multiplies_pairs() {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, bfloat16>) return BFloat16Pairs::available();
#endif
  return false;
}

// While it lives, products of T with `rows` rows of A on the calling thread need not configure what they use.
#if defined(__AVX512F__)
template <typename T>
class Prepared {
 public:
  explicit Prepared(int64_t rows) {
    if (in_tiles<T>(rows)) registers_.emplace();
  }

 private:
  std::optional<TileRegisters> registers_;
};
#else
template <typename T>
struct Prepared {
  explicit Prepared(int64_t) {}
};
#endif

// ---------------------------------------------------------------------------------------------------------- kernel

// A block of C in registers: kRows rows of kVectors vectors. The remaining registers hold a row of B's block and one
// element of A.
template <typename A>
struct Block {
  static constexpr int kLanesA = kVectorBytes / sizeof(A);
  static constexpr bool k32Registers = kVectorBytes == 64;  // 32 registers, else 16
  static constexpr int kRows = k32Registers ? (kLanesA == 16 ? 12 : 8) : kLanesA == 8 ? 6 : kLanesA;
  static constexpr int kVectors = k32Registers ? (kLanesA == 16 ? 2 : 3) : kLanesA == 8 ? 2 : kLanesA == 4 ? 3 : 4;
  static constexpr int kCols = kVectors * kLanesA;
  // Rows that are gathered, by one strip of columns, and by two, if so: more pointers than fit the registers are
  // slower.
  static constexpr bool kTwoStrips = k32Registers && kLanesA == 16;
  static constexpr int kGatheredRows = kTwoStrips ? 8 : kRows, kGatheredRowsOfTwo = 6;
  // Panels that fit a thread's second-level cache: of A (kPanelRows, kDepth), of B (kDepth, kPanelCols).
  static constexpr int kDepth = 256, kPanelRows = 240, kPanelCols = 480;
  // A tile whose sums are in C may have the rows of several panels of A, which share one of B. With AVX-512 that is of
  // 1 MB, of a second-level cache of 1 or 2 MB.
  static constexpr int kTallRows = 5 * kPanelRows, kTallCols = k32Registers ? 64 * kLanesA : 512;
  // All of a tile's columns are multiplied by a strip of A, which is packed just before, and then by the next one: it
  // stays in the first-level cache while B passes, and blocks of c are side by side.
  static constexpr bool kByStrips = k32Registers;
  // Strips of a transposed A are packed together, since each has parts of the same lines of memory.
  static constexpr int kRowsAtOnce = 4 * kRows;
  // A is read where it lies if at most so many columns would share what is packed of it; so is B, by strips, of rows.
  // With more, both would take longer where another thread shares the core's caches. Lines of 4 KB share their sets.
  static constexpr int kInPlaceCols = k32Registers ? 256 : 2 * kCols;
  static constexpr int64_t in_place_rows(int64_t stride) { return stride * sizeof(A) < 4096 ? 256 : 128; }
};

template <typename A>
using VecOf = typename VectorOf<A, kVectorBytes / sizeof(A)>::type;

// Longer sums are sums of partial sums of this many terms, so that rounding errors grow more slowly.
constexpr int64_t kPartialTerms = 4096;

// kRows rows of A, term by term: packed (depth, kRows), or gathered. What `reads` names are rows whose elements each
// multiply-add reads anew: loads have ports to spare, while operations are too many for a thread that shares its core,
// which gets half of six a cycle. An address that has an index makes two operations of such a multiply-add.
template <typename A>
struct PackedA {
  const A *a;

  static constexpr bool reads(int i) { return i % 3 != 0; }
  const A &operator()(int i) const { return a[i]; }
  void next() { a += Block<A>::kRows; }
};
template <typename A, int n>
struct GatheredA {
  const A *rows[n];
  const int64_t *term;

  explicit GatheredA(Gathered<A> a) : term(a.terms) {
    for (int i = 0; i < n; ++i) rows[i] = a.data + a.rows[i];
  }
  static constexpr bool reads(int) { return false; }
  const A &operator()(int i) const { return rows[i][*term]; }
  void next() { ++term; }
};
// Three rows share a pointer, since an address may have one or two strides added.
template <typename A, int n>
struct InPlaceA {
  static constexpr int kPointers = ceil_div(n, 3);
  const A *rows[kPointers];
  int64_t stride;

  explicit InPlaceA(InPlace<A> a) : stride(a.stride) {
    for (int i = 0; i < kPointers; ++i) rows[i] = a.data + 3 * i * a.stride;
  }
  static constexpr bool reads(int i) { return i % 3 == 0; }
  const A &operator()(int i) const { return rows[i / 3][i % 3 * stride]; }
  void next() {
    for (auto &row : rows) ++row;
  }
};
template <int n, typename A>
InPlaceA<A, n> rows_of(InPlace<A> a) {
  return InPlaceA<A, n>(a);
}
template <int n, typename A>
PackedA<A> rows_of(const A *packed) {
  return {packed};
}
template <int n, typename A>
GatheredA<A, n> rows_of(Gathered<A> a) {
  return GatheredA<A, n>(a);
}

// kCols columns of B: packed (depth, kCols), or unpacked in rows of B.
template <typename A>
struct PackedB {
  static constexpr int kVectors = Block<A>::kVectors;
  const A *b;

  VecOf<A> operator()(int64_t p, int64_t column) const {
    const A *at = b + p * Block<A>::kCols + column;
    // The second-level cache takes less than the 100 cycles and more of eight terms.
    if (Block<A>::k32Registers) __builtin_prefetch(at + 8 * Block<A>::kCols);
    return load(at);
  }
};
template <class Terms, typename T>
struct UnpackedB {
  static constexpr int kVectors = Block<Accumulate<T>>::kVectors;
  Matrix<T> b;
  int64_t terms, ahead;

  Vec<T> operator()(int64_t p, int64_t column) const {
    p *= Terms::kTerms;
    const T *at = b.data + p * b.stride + column;
    // rows are too far apart for hardware prefetchers
    __builtin_prefetch(at + ahead, 0, 2);
    return Terms::across(at, b.stride, terms - p, Full());
  }
};

// Two adjacent strips of a packed B, whose distance is `next`.
template <typename A>
struct TwoStrips {
  static constexpr int kVectors = 2 * Block<A>::kVectors;
  const A *b;
  int64_t next;

  VecOf<A> operator()(int64_t p, int64_t column) const {
    constexpr int kCols = Block<A>::kCols;
    return load(b + (column < kCols ? 0 : next) + p * kCols + column % kCols);
  }
};

// rows of C (+)= a times b, which has Columns::kVectors vectors of columns.
template <class Terms, int rows, typename A, class Rows, class Columns>
void micro_kernel(int64_t depth, Rows a, Columns b, bool add, A *c, int64_t ldc) {
  using B = Block<A>;
  constexpr int kVectors = Columns::kVectors, kVectorsOfLine = 64 / kVectorBytes;
  VecOf<A> sum[rows][kVectors];
  auto each = [](auto f) {
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) f(i, v);
  };
  each([&](int i, int v) { sum[i][v] = VecOf<A>{}; });
  // C's rows, which may be far, are prefetched some thousand cycles before the end: the terms of B that pass after that
  // do not push them out. Few blocks have fewer rows.
  const A *ahead = c;
  const int64_t soon = depth > 96 ? depth - 96 : 0;
  for (int64_t p = 0; p < depth; ++p, a.next()) {
    if (rows == B::kRows && p >= soon && p < soon + rows) {
      for (int v = 0; v < kVectors; v += kVectorsOfLine) __builtin_prefetch(ahead + v * B::kLanesA);
      ahead += ldc;
    }
    VecOf<A> right[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) right[v] = b(p, v * B::kLanesA);
    each([&](int i, int v) {
      if constexpr (Terms::kReads)
        if (Rows::reads(i)) return void(sum[i][v] = Terms::add_read(sum[i][v], a(i), right[v]));
      sum[i][v] = Terms::add(sum[i][v], Terms::spread(a(i)), right[v]);
    });
  }
  // partial sums of kDepth terms, so that rounding errors grow more slowly
  each([&](int i, int v) {
    A *at = c + i * ldc + v * B::kLanesA;
    store(at, add ? load(at) + sum[i][v] : sum[i][v]);
  });
}

template <class Terms, int rows, typename A, class Left, class Columns>
void run_micro_kernel(int64_t n, int64_t depth, Left a, Columns b, bool add, A *c, int64_t ldc) {
  if constexpr (rows > 0) {
    if (n == rows) return micro_kernel<Terms, rows>(depth, rows_of<rows>(a), b, add, c, ldc);
    run_micro_kernel<Terms, rows - 1>(n, depth, a, b, add, c, ldc);
  }
}

// Transposes lanes x lanes elements in registers, in log2(lanes) steps that exchange halves of blocks.
template <int half, class V, int... i>
AOT_INLINE void swap_halves(V &a, V &b, std::integer_sequence<int, i...>) {
  constexpr int lanes = sizeof...(i);
  using Mask = decltype(a == b);
  const V low = __builtin_shuffle(a, b, Mask{(i & half ? lanes + i - half : i)...});
  b = __builtin_shuffle(a, b, Mask{(i & half ? lanes + i : i + half)...}), a = low;
}
template <int half, class V, int lanes>
AOT_INLINE void transpose(V (&v)[lanes]) {
  if constexpr (half > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i)
      if (!(i & half)) swap_halves<half>(v[i], v[i + half], std::make_integer_sequence<int, lanes>());
    transpose<half / 2>(v);
  }
}

// Elements of a strip (depth, kWidth) of a panel. The additional vector receives what a store of a whole vector writes
// beyond the end, and keeps strips from mapping to the same sets of a cache.
template <int kWidth, typename A>
constexpr int64_t strip(int64_t depth) {
  return depth * kWidth + kVectorBytes / sizeof(A);
}

// Packs `width` lines of m in strips of kWidth, padded with zeros. Term p of line i is m(i, p): lines are rows of A, or
// columns of B, whose transpose m then is.
template <class Terms, int kWidth, typename T, typename A = Accumulate<T>>
void pack(Matrix<T> m, int64_t width, int64_t terms, A *panel) {
  constexpr int lanes = kLanes<T>, step = lanes * Terms::kTerms;
  const int64_t stride = strip<kWidth, A>(ceil_div(terms, Terms::kTerms));
  // f(line, n, to) for as many lines as a vector has lanes, the first n of which exist
  auto each_strip = [=](auto f) {
    for (int64_t i = 0; i < width; i += kWidth)
      for (int64_t first = 0; first < kWidth; first += lanes) {
        const int64_t left = width - i - first;
        f(i + first, left < 0 ? 0 : left < lanes ? left : lanes, panel + i / kWidth * stride + first);
      }
  };
  if (m.transposed) {  // terms p of adjacent lines are contiguous
    constexpr int64_t kBlockTerms = 8 * Terms::kTerms;
    for (int64_t begin = 0; begin < terms; begin += kBlockTerms)
      each_strip([=](int64_t line, int64_t n, A *to) {
        const T *source = m.at(line, begin).data;
        to += begin / Terms::kTerms * kWidth;
        for (int64_t p = begin; p < terms && p < begin + kBlockTerms; p += Terms::kTerms) {
          store(to, n == lanes ? Terms::across(source, m.stride, terms - p, Full())
                    : n > 0    ? Terms::across(source, m.stride, terms - p, Part{n})
                               : Vec<T>{});
          source += Terms::kTerms * m.stride, to += kWidth;
        }
      });
    return;
  }
  each_strip([=](int64_t line, int64_t n, A *to) {
    const int64_t in_strip = kWidth - line % kWidth, here = n < in_strip ? n : in_strip;
    for (int64_t p = 0; p < terms; p += step) {
      const int64_t left = terms - p;
      Vec<T> v[lanes];
      for (int l = 0; l < lanes; ++l) {
        const T *source = m.at(line + l, p).data;
        v[l] = l >= here ? Vec<T>{} : left >= step ? Terms::along(source, Full()) : Terms::along(source, Part{left});
      }
      transpose<lanes / 2>(v);
      for (int l = 0; l < lanes && l * Terms::kTerms < left; ++l, to += kWidth) store(to, v[l]);
    }
  });
}

#if defined(__AVX512F__)
// Products of bfloat16 panels of `terms` terms in tile registers. Terms are padded with zeros to whole registers.
class TileKernel {
 public:
  static constexpr int kSide = TileRegisters::kSide, kPairs = TileRegisters::kPairs;
  // A block of rows meets all of a panel of B, 1 MB of a second-level cache of 2 MB, and then the next one does. With
  // panels of 512 terms more sums are stored and added, which takes few rows less time than a panel of 1 MB.
  static constexpr int64_t kPanelCols = 512, kDepth = 512;  // kDepth: in pairs
  static int64_t panel_terms(int64_t rows) { return rows <= 128 ? kDepth : 2 * kDepth; }
  // Rows of A that are packed together. Those of a transposed A have parts of the same lines of memory.
  static constexpr int64_t kRowsAtOnce = 128;
  static constexpr int64_t kWorth = 1 << 20;  // multiplications that pay for waking a thread
  // A tile of C has at most kRows x kPanelCols, and kSums if they are kept from a panel to the next. To pack an element
  // of B takes as long as to read kPacking of A from the last cache.
  static constexpr int64_t kRows = 1024, kSums = kRows * kPanelCols / 4, kPacking = 4;

  explicit TileKernel(int64_t terms) : terms_(terms), depth_(ceil_div(terms, 2 * kPairs) * kPairs) {}

  // Elements of packed panels.
  static constexpr int64_t kRowPanel = kRowsAtOnce * (kDepth + kPairs);
  static constexpr int64_t kColumnPanel = kPanelCols / kSide * strip<kSide, float>(kDepth);

  // Whether no more is packed of A than the rows that are not a whole register.
  static bool in_place(Matrix<bfloat16> a, int64_t terms) { return !a.transposed && terms % (2 * kPairs) == 0; }

  // Packs the rows that `multiply` does not read where they lie.
  void pack_rows(Matrix<bfloat16> a, int64_t m, float *panel) const {
    const int64_t first = in_place(a, terms_) ? m / kSide * kSide : 0, pitch = row_pitch();
    each_chunk(a, first, m, [=](int64_t i, int64_t p) {
      Vec<float> lines[kPairs];
      read(a, m, i, p, true, lines);
      float *const to = panel + place(a, i) + i % kSide * pitch + p;
      for (int64_t l = 0; l < kPairs; ++l) store(to + l * pitch, lines[l]);
    });
  }
  // columns: the transpose of B
  void pack_columns(Matrix<bfloat16> columns, int64_t n, float *panel) const {
    each_chunk(columns, 0, n, [=](int64_t j, int64_t p) {
      Vec<float> pairs[kPairs];
      read(columns, n, j, p, false, pairs);
      float *const to = panel + j / kSide * strip<kSide, float>(depth_) + p * kSide + j % kSide;
      for (int64_t r = 0; r < kPairs; ++r) store(to + r * kSide, pairs[r]);
    });
  }

  // The block of sums at (i, j), of n rows, at most kSide, the first of which begins at a.
  void multiply(const TileRegisters &registers, Matrix<bfloat16> a, int64_t n, int64_t i, int64_t j,
                const float *packed_a, const float *packed_b, bool add, float *sums, int64_t ld) const {
    const float *const right = packed_b + j / kSide * strip<kSide, float>(depth_);
    if (in_place(a, terms_) && n == kSide)
      return multiply(registers, {a.data, a.stride * int64_t{sizeof(bfloat16)}}, n, right, add, sums, ld);
    multiply(registers, packed_rows(packed_a + place(a, i)), n, right, add, sums, ld);
  }

 private:
  void multiply(const TileRegisters &registers, TileOperand left, int64_t n, const float *right, bool add, float *sums,
                int64_t ld) const {
    const bool whole = n == kSide && !add;
    alignas(64) float found[kSide * kSide];
    registers.multiply(left, {right, kSide * sizeof(float)}, depth_ / kPairs, whole ? sums : found, whole ? ld : kSide);
    for (int64_t r = 0; r < n && !whole; ++r)
      sweep<float>(kSide, [=, more = found + r * kSide, to = sums + r * ld](int64_t l, auto part) {
        store(to + l, add ? load(to + l, part) + load(more + l, part) : load(more + l, part), part);
      });
  }

  TileOperand packed_rows(const float *at) const { return {at, row_pitch() * int64_t{sizeof(float)}}; }
  // The additional pairs keep packed rows from the same sets of a cache.
  int64_t row_pitch() const { return depth_ + kPairs; }
  // Where the packed rows from i on begin.
  int64_t place(Matrix<bfloat16> a, int64_t i) const {
    return in_place(a, terms_) ? 0 : i / kSide * kSide * row_pitch();
  }

  // f(i, p) for every kPairs lines from `first` on and kPairs pairs of terms, in the order in which memory has them.
  template <class F>
  void each_chunk(Matrix<bfloat16> m, int64_t first, int64_t lines, F f) const {
    const int64_t end = ceil_div(lines, kSide) * kSide;
    if (m.transposed)
      for (int64_t p = 0; p < depth_; p += kPairs)
        for (int64_t i = first; i < end; i += kPairs) f(i, p);
    else
      for (int64_t i = first; i < end; i += kPairs)
        for (int64_t p = 0; p < depth_; p += kPairs) f(i, p);
  }

  // kPairs lines from i on by kPairs pairs from p on: a vector is of a line, or of pairs.
  void read(Matrix<bfloat16> m, int64_t lines, int64_t i, int64_t p, bool of_lines, Vec<float> (&v)[kPairs]) const {
    const Matrix<bfloat16> from = m.at(i, 2 * p);
    const int64_t n = lines > i ? lines - i : 0, left = terms_ - 2 * p;
    m.transposed ? read_pairs(from, n, left, v) : read_lines(from, n, left, v);
    if (m.transposed == of_lines) transpose<kPairs / 2>(v);
  }
  static void read_lines(Matrix<bfloat16> m, int64_t n, int64_t left, Vec<float> (&v)[kPairs]) {
    for (int64_t l = 0; l < kPairs; ++l) {
      const bfloat16 *const line = m.at(l, 0).data;
      v[l] = l >= n               ? Vec<float>{}
             : left >= 2 * kPairs ? BFloat16Pairs::along(line, Full())
                                  : BFloat16Pairs::along(line, Part{left});
    }
  }
  static void read_pairs(Matrix<bfloat16> m, int64_t n, int64_t left, Vec<float> (&v)[kPairs]) {
    for (int64_t r = 0; r < kPairs; ++r) {
      const bfloat16 *const at = m.at(0, 2 * r).data;
      v[r] = 2 * r >= left ? Vec<float>{}
             : n >= kPairs ? BFloat16Pairs::across(at, m.stride, left - 2 * r, Full())
                           : BFloat16Pairs::across(at, m.stride, left - 2 * r, Part{n});
    }
  }

  int64_t terms_, depth_;  // depth_: in pairs
};
#endif

// The whole of a B (k, n), packed in strips of kCols columns: `size` elements.
template <typename A>
struct PackedMatrix {
  static constexpr int kCols = Block<A>::kCols;
  const A *data;
  int64_t k;

  static int64_t size(int64_t k, int64_t n) { return ceil_div(n, kCols) * strip<kCols, A>(k); }
  // column: a multiple of kCols
  PackedMatrix at(int64_t, int64_t column) const { return {data + column / kCols * strip<kCols, A>(k), k}; }
  PackedB<A> block(int64_t p, int64_t column) const { return {at(0, column).data + p * kCols}; }
};

// ------------------------------------------------------------------------------------------------------------ dots

// Lane i of the result is the sum of the i-th vector's lanes. Halves of vectors are added until one vector is left.
template <int half, class V, int... i>
AOT_INLINE V add_halves(V a, V b, std::integer_sequence<int, i...>) {
  constexpr int lanes = sizeof...(i);
  using Mask = decltype(a == b);
  return __builtin_shuffle(a, b, Mask{(i & half ? lanes + i : i)...}) +
         __builtin_shuffle(a, b, Mask{(i & half ? lanes + i - half : i + half)...});
}
template <typename T, int n>
AOT_INLINE Vec<T> sum_each(const Vec<T> (&v)[n]) {
  if constexpr (n == 1) {
    return v[0];
  } else {
    Vec<T> halves[n / 2];
#pragma GCC unroll 8
    for (int i = 0; i < n / 2; ++i)
      halves[i] = add_halves<n / 2>(v[i], v[i + n / 2], std::make_integer_sequence<int, kLanes<T>>());
    return sum_each<T>(halves);
  }
}

template <typename T>
constexpr int dot_rows() {
  return kLanes<T> > 4 ? 4 : kLanes<T> > 2 ? 2 : 1;
}

// As many dot products as a vector has lanes: kRows rows of A by kCols columns of B, which is stored transposed. Row:
// T, or what T is widened to.
template <class Terms, typename T, int n = dot_rows<T>(), typename Row = T>
struct DotProducts {
  static constexpr int kRows = n, kCols = kLanes<T> / kRows;
  const Row *rows[kRows];
  const T *columns[kCols];

  // (kRows, kCols), row-major
  Vec<T> sums(int64_t k) const {
    constexpr int64_t kTerms = kPartialTerms * kLanes<T>;
    Vec<T> all = sums(0, k < kTerms ? k : kTerms);
    for (int64_t p = kTerms; p < k; p += kTerms) all += sums(p, k - p < kTerms ? k : p + kTerms);
    return all;
  }

 private:
  // The sums of terms [begin, end).
  [[gnu::noinline]] Vec<T> sums(int64_t begin, int64_t end) const {
    Vec<T> sum[kRows * kCols];
#pragma GCC unroll 16
    for (auto &s : sum) s = Vec<T>{};
    auto step = [&](int64_t p, auto part) {
      Vec<T> a[kRows];
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i)
        if constexpr (std::is_same_v<Row, T>) a[i] = Terms::along(rows[i] + p, part);
        else a[i] = load(rows[i] + p, part);
#pragma GCC unroll 16
      for (int j = 0; j < kCols; ++j) {
        const Vec<T> b = Terms::along(columns[j] + p, part);
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) sum[i * kCols + j] = Terms::add(sum[i * kCols + j], a[i], b);
      }
    };
    constexpr int64_t whole = kLanes<T> * Terms::kTerms;
    int64_t p = begin;
    for (; p + whole <= end; p += whole) step(p, Full());
    if (p < end) step(p, Part{end - p});
    return sum_each<T>(sum);
  }
};

// ------------------------------------------------------------------------------------------------------------ tiles

// Memory for callers; the thread's scratch is gemm's own. Aligned to cache lines, so that no vector spans two.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t n)
      : data_(static_cast<T *>(std::aligned_alloc(64, ceil_div((n > 0 ? n : 1) * sizeof(T), 64) * 64))) {}
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer &) = delete;
  operator T *() const { return data_; }

 private:
  T *data_;
};

inline Status out_of_memory(const char *op) { return fail(kOutOfMemory, "%s: out of memory", op); }

// The panels of a thread, and the sums of a tile.
template <typename A>
struct Panels {
  using B = Block<A>;
  static constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
  static constexpr int64_t kVectorA = ceil_div(B::kPanelRows, B::kRows) * strip<B::kRows, A>(B::kDepth);
  static constexpr int64_t kVectorB = ceil_div(B::kTallCols, B::kCols) * strip<B::kCols, A>(B::kDepth);
  static constexpr int64_t kVectorC = B::kPanelRows * ceil_div(B::kPanelCols, B::kCols) * B::kCols;
#if defined(__AVX512F__)
  static constexpr bool kFloat = std::is_same_v<A, float>;
  static constexpr int64_t kA = kFloat ? larger(kVectorA, TileKernel::kRowPanel) : kVectorA;
  static constexpr int64_t kB = kFloat ? larger(kVectorB, TileKernel::kColumnPanel) : kVectorB;
  static constexpr int64_t kC = kFloat ? larger(kVectorC, TileKernel::kSums) : kVectorC;
#else
  static constexpr int64_t kA = kVectorA, kB = kVectorB, kC = kVectorC;
#endif
  A *a, *b, *c, *total;  // total: of the partial sums so far, for long sums

  explicit Panels(bool long_sums)
      : a(static_cast<A *>(thread_scratch((kA + kB + kC + (long_sums ? kC : 0)) * sizeof(A)))),
        b(a + kA),
        c(b + kB),
        total(c + kC) {}
};

// Whether products of these operands may use the tile registers.
template <typename T, class Left, class Right>
constexpr bool kMayUseTiles =
    std::is_same_v<T, bfloat16> && std::is_same_v<Left, Matrix<T>> && std::is_same_v<Right, Matrix<T>>;

// A tile of C on the calling thread.
template <typename T, typename C, class Epilogue = NoEpilogue, class Left = Matrix<T>, class Right = Matrix<T>>
struct GemmTile {
  using A = Accumulate<T>;
  using B = Block<A>;
  static constexpr bool kGathers = !std::is_same_v<Left, Matrix<T>>, kStores = kStoresTiles<Epilogue>;
  static constexpr bool kPlain = std::is_same_v<Epilogue, NoEpilogue>;
  static constexpr bool kPacked = !std::is_same_v<Right, Matrix<T>>, kPairs = std::is_same_v<Left, GatheredPairs>;
  int64_t m, n, k;
  Left a;
  Right b;
  C *c;
  int64_t ldc;
  bool add = false;
  int64_t row = 0, column = 0;  // where the tile begins in C
  Epilogue epilogue = {};

  // Whether the sums of more than one panel are in c from the first one on: a tile may then have any number of rows.
  static bool sums_in_c(int64_t k, bool add) {
    return std::is_same_v<C, A> && !kStores && k <= kPartialTerms && (kPlain || (k > B::kDepth && !add));
  }

  // Applies the epilogue to the sums of rows x cols of c, from (i, j) on, and stores them.
  [[gnu::noinline]] void store_sums(int64_t i, int64_t j, int64_t rows, int64_t cols, const A *sums,
                                    int64_t stride) const {
    if constexpr (kStoresBlocks<Epilogue>) {
      epilogue.store_block(row + i, column + j, rows, cols, sums, stride, c + i * ldc + j, ldc);
    } else {
      for (int64_t end = i + rows; i < end; ++i, sums += stride)
        sweep<T>(cols, [=](int64_t l, auto part) {
          Vec<T> v = load(sums + l, part);
          C *to = c + i * ldc + j + l;
          if (add) v += load(to, part);
          store(to, epilogue(v, row + i, column + j + l, part), part);
        });
    }
  }

  // all_rows: of C. They decide how sums are computed, not the tile's rows: the bits must not depend on the tiling. So
  // does in_tiles.
  Status compute(int64_t all_rows, [[maybe_unused]] bool tiled) const {
#if defined(__AVX512F__)
    if constexpr (kPairs) {
      return compute_as<WholePairs>(all_rows);
    } else {
      if constexpr (kMayUseTiles<T, Left, Right>)
        if (tiled) return compute_as<TileTerms>(all_rows);
      if constexpr (std::is_same_v<T, bfloat16> && !kGathers)
        if (BFloat16Pairs::available()) return compute_as<BFloat16Pairs>(all_rows);
    }
#endif
    if constexpr (!kPairs) return compute_as<WidenedTerms<T>>(all_rows);
  }

 private:
  template <class Terms>
  Status compute_as(int64_t all_rows) const {
    if constexpr (!kGathers)
      if (all_rows <= kDotRows && !a.transposed && b.transposed) return compute_by_dots<Terms>(), kOk;
    if constexpr (!kGathers && std::is_same_v<T, A>)  // few columns would share a panel of A
      if (!a.transposed && n <= B::kInPlaceCols) {
        using InPlaceTile = GemmTile<T, C, Epilogue, InPlace<T>, Right>;
        return InPlaceTile{m, n, k, {a.data, a.stride}, b, c, ldc, add, row, column, epilogue}.compute(all_rows, false);
      }
    return compute_by_panels<Terms>(all_rows) ? kOk : out_of_memory("a matrix product");
  }

  static void add_to(A *to, const A *from, int64_t n) {
    sweep<A>(n, [=](int64_t j, auto part) { store(to + j, load(to + j, part) + load(from + j, part), part); });
  }

  // By the micro-kernel. Sums of a block that is as wide as registers are go straight to c if sums_in_c, else to
  // panels.c until they have all their terms.
  template <class Terms>
  bool compute_by_panels(int64_t all_rows) const {
    bool few = false;  // B, which few rows of A share, is not packed
    if constexpr (!kPacked) few = !kTiles<Terms> && all_rows <= kFewRows && !b.transposed;
    constexpr bool kPoints = kGathers && !std::is_same_v<Left, InPlace<A>>;
    constexpr bool kMayTakeTwo = kPoints && B::kTwoStrips;
    constexpr int kRows = kPoints ? B::kGatheredRows : B::kRows;
    const bool long_sum = k > kPartialTerms;
    const int64_t most = panel_depth<Terms>(all_rows);
    const Panels<A> panels(long_sum);
    if (!panels.a) return false;
    const bool one_panel = k <= most, in_c = sums_in_c(k, add);
    // of panels.c, which has the sums of a block; of the last columns, if the others are in c; or of the whole tile
    const bool of_block = one_panel && !kStores;
    const int64_t stride = of_block || in_c ? (kMayTakeTwo ? 2 : 1) * B::kCols : ceil_div(n, B::kCols) * B::kCols;
    constexpr bool kPacksRows = !kGathers && !kTiles<Terms>;
    const bool by_strips = B::kByStrips && !kPoints && !kPacked && !kTiles<Terms> && !few;
    bool unpacked_b = few;
    if constexpr (!kPacked && std::is_same_v<T, A>)
      unpacked_b |= by_strips && !b.transposed && m <= B::in_place_rows(b.stride);
    // the last ones are packed if they are not a whole block
    const int64_t unpacked_cols = unpacked_b ? n / B::kCols * B::kCols : 0;
    const bool takes_two = kMayTakeTwo && !unpacked_b;
    const int64_t most_rows = kTiles<Terms> ? B::kCols : by_strips ? B::kRows : kPacksRows ? B::kPanelRows : m;
    int64_t packed_rows = most_rows;
    if constexpr (kPacksRows)
      if (by_strips && a.transposed) packed_rows = B::kRowsAtOnce;
#if defined(__AVX512F__)
    if constexpr (kTiles<Terms>)
      if (a.transposed) packed_rows = TileKernel::kRowsAtOnce;
#endif
    [[maybe_unused]] const RegistersOf<Terms> registers;
    int64_t p = 0;
    do {
      const int64_t terms = k - p < most ? k - p : most, depth = ceil_div(terms, Terms::kTerms);
      const bool begins = p % kPartialTerms == 0, all = p + terms == k, ends = all || (p + terms) % kPartialTerms == 0;
      pack_columns<Terms>(p, terms, unpacked_cols, panels);
      auto accumulate = [=, &registers](int64_t i, int64_t j, int64_t rows, bool added, A *sums, int64_t ld) {
#if defined(__AVX512F__)
        if constexpr (kTiles<Terms>)
          return TileKernel(terms).multiply(registers, a.at(i, p), rows, i % packed_rows, j, panels.a, panels.b, added,
                                            sums, ld);
#endif
        const auto left = [=] {
          if constexpr (kGathers) return a.at(i, p);
          else return static_cast<const A *>(panels.a + i % packed_rows / B::kRows * strip<B::kRows, A>(depth));
        }();
        if constexpr (kMayTakeTwo)
          if (takes_two && n - j > B::kCols) {
            TwoStrips<A> right{panels.b + j / B::kCols * strip<B::kCols, A>(depth), strip<B::kCols, A>(depth)};
            if constexpr (kPacked) right = {b.block(p, j).b, strip<B::kCols, A>(b.k)};
            return run_micro_kernel<Terms, B::kGatheredRowsOfTwo>(rows, depth, left, right, added, sums, ld);
          }
        if constexpr (kPacked) {
          run_micro_kernel<Terms, kRows>(rows, depth, left, b.block(p, j), added, sums, ld);
        } else {
          if (j < unpacked_cols) {
            const UnpackedB<Terms, T> right{b.at(p, j), terms, few ? B::kCols : 8 * b.stride};
            return run_micro_kernel<Terms, kRows>(rows, depth, left, right, added, sums, ld);
          }
          const PackedB<A> right{panels.b + (j - unpacked_cols) / B::kCols * strip<B::kCols, A>(depth)};
          run_micro_kernel<Terms, kRows>(rows, depth, left, right, added, sums, ld);
        }
      };
      for (int64_t first = 0, end; first < m; first = end) {
        end = m - first < most_rows ? m : first + most_rows;
        if (first % packed_rows == 0)
          pack_rows<Terms>(first, m - first < packed_rows ? m - first : packed_rows, p, terms, panels);
        for (int64_t j = 0, block_cols; j < n; j += block_cols) {
          const bool two = takes_two && n - j > B::kCols;
          block_cols = two ? 2 * B::kCols : B::kCols;
          const int64_t block_rows = kTiles<Terms> ? B::kCols : two ? B::kGatheredRowsOfTwo : kRows;
          for (int64_t i = first; i < end; i += block_rows) {
            const int64_t rows = end - i < block_rows ? end - i : block_rows;
            const int64_t cols = n - j < block_cols ? n - j : block_cols;
            const bool there = in_c && cols == block_cols;
            A *sums = panels.c + (of_block ? 0 : i * stride + (in_c ? 0 : j));
            if constexpr (std::is_same_v<C, A>)
              if (there) sums = c + i * ldc + j;
            const int64_t ld = there ? ldc : stride;
            if (kTiles<Terms> && all && !there)  // c's lines, which are far apart
              for (int64_t r = 0; r < rows; ++r) __builtin_prefetch(c + (i + r) * ldc + j, 1, 2);
            accumulate(i, j, rows, there ? add || p : !begins, sums, ld);
            if (long_sum && ends) {
              A *const total = panels.total + i * stride + j;
              for (int64_t r = 0; r < rows && p >= kPartialTerms; ++r)
                add_to(sums + r * stride, total + r * stride, cols);
              for (int64_t r = 0; r < rows && !all; ++r)
                std::memcpy(total + r * stride, sums + r * stride, cols * sizeof(A));
            }
            if constexpr (!kStores)
              if (all && !(kPlain && there)) store_sums(i, j, rows, cols, sums, ld);
          }
        }
      }
      p += terms;
    } while (p < k);
    if constexpr (kStores) epilogue.store(row, column, m, n, panels.c, stride);
    return true;
  }

  // The terms of a panel. Where none is packed, they may be more, so that few are not left for one of their own.
  template <class Terms>
  int64_t panel_depth([[maybe_unused]] int64_t all_rows) const {
#if defined(__AVX512F__)
    if constexpr (kTiles<Terms>) return TileKernel::panel_terms(all_rows);
#endif
    constexpr int64_t kDepth = B::kDepth * Terms::kTerms;
    if (!kGathers || !kPacked || k > kPartialTerms) return kDepth;
    const int64_t panels = (k + kDepth / 2) / kDepth;
    return panels > 1 ? ceil_div(k, panels) : k;
  }

  // Terms [p, p + terms) of `rows` of A's rows.
  template <class Terms>
  void pack_rows(int64_t first, int64_t rows, int64_t p, int64_t terms, const Panels<A> &panels) const {
#if defined(__AVX512F__)
    if constexpr (kTiles<Terms>) return TileKernel(terms).pack_rows(a.at(first, p), rows, panels.a);
#endif
    if constexpr (!kGathers) pack<Terms, B::kRows>(a.at(first, p), rows, terms, panels.a);
  }
  // Terms [p, p + terms) of B's columns from `column` on.
  template <class Terms>
  void pack_columns(int64_t p, int64_t terms, int64_t column, const Panels<A> &panels) const {
#if defined(__AVX512F__)
    if constexpr (kTiles<Terms>)
      return TileKernel(terms).pack_columns(Matrix<T>{b.data, b.stride, !b.transposed}.at(0, p), n, panels.b);
#endif
    if constexpr (!kPacked)
      pack<Terms, B::kCols>(Matrix<T>{b.data, b.stride, !b.transposed}.at(column, p), n - column, terms, panels.b);
  }

  // At most kDotRows rows, and B stored transposed: the terms of both operands are contiguous.
  template <class Terms>
  void compute_by_dots() const {
    using D = DotProducts<Terms, T>;
    constexpr int lanes = kLanes<T>;
    for (int64_t j = 0; j < n; j += lanes) {
      A sums[kDotRows * lanes];
      const int64_t cols = n - j < lanes ? n - j : lanes;
      for (int64_t l = 0; l < cols; l += D::kCols) {
        D dots;
        for (int r = 0; r < D::kCols; ++r) dots.columns[r] = b.at(0, j + (l + r < cols ? l + r : l)).data;
        for (int64_t i = 0; i < m; i += D::kRows) {
          for (int r = 0; r < D::kRows; ++r) dots.rows[r] = a.at(i + r < m ? i + r : i, 0).data;
          const Vec<T> found = dots.sums(k);
          for (int r = 0; r < D::kRows; ++r)
            std::memcpy(sums + (i + r) * lanes + l, reinterpret_cast<const A *>(&found) + r * D::kCols,
                        D::kCols * sizeof(A));
        }
      }
      store_sums(0, j, m, cols, sums, lanes);
    }
  }
};

// A tile of C has at most rows x cols, multiples of units; `worth` multiplications pay for waking a thread.
struct TileLimits {
  int64_t rows, cols, row_unit, col_unit, worth;
  int64_t tall = 1;  // rows are divided if they are more than so many times the columns
  bool weighed = false;
};

// How C is divided into tiles, all of one size but the last of each row and column.
struct Tiling {
  int64_t m, n, rows, cols, across, count;

  // Enough tiles for all threads, counting those of `products` products, as long as a tile is worth waking a thread
  // for. If `weighed`, up to twice as many are tried, and the most of them taken that by the estimate take at most 3 %
  // longer than the best: each tile packs for itself.
  static Tiling of(int64_t m, int64_t n, int64_t k, int64_t products, const TileLimits &limits) {
    const int64_t enough = threads() > 1 ? (limits.weighed ? 4 : 2) * threads() : 1;
    auto piece = [](int64_t total, int64_t pieces, int64_t unit) {
      return ceil_div(ceil_div(total, pieces), unit) * unit;
    };
    if (m == 0 || n == 0) return {};
    Tiling best{};
    double least = 0;
    for (int64_t down = ceil_div(m, limits.rows), across = ceil_div(n, limits.cols);;) {
      Tiling t{m, n, piece(m, down, limits.row_unit), piece(n, across, limits.col_unit), 0, 0};
      t.across = ceil_div(n, t.cols), t.count = ceil_div(m, t.rows) * t.across;
      const bool flat = t.rows == limits.row_unit, narrow = t.cols == limits.col_unit;
      const bool worth = double(m) * n * k >= 2.0 * limits.worth * t.count;
      // To pack an element takes as long as some 30 multiplications. More tiles even out threads that are not as fast.
      constexpr double kPacking = 30, kAlike = 1.03;
      const double each = double(t.rows) * t.cols + kPacking * (t.rows + t.cols);
      const double time = double(ceil_div(t.count * products, threads())) * each;
      if (!limits.weighed || !best.count || time < kAlike * least) best = t;
      least = least > 0 && least < time ? least : time;
      if (t.count * products >= enough || (flat && narrow) || !worth) return best;
      narrow || (t.rows > limits.tall * t.cols && !flat) ? down *= 2 : across *= 2;
    }
  }

  // f(i, j, rows, cols) for the index-th tile.
  template <class F>
  auto at(int64_t index, F f) const {
    const int64_t i = index / across * rows, j = index % across * cols;
    return f(i, j, m - i < rows ? m - i : rows, n - j < cols ? n - j : cols);
  }
};

// -------------------------------------------------------------------------------------------------------- products

template <typename T, typename C, class Epilogue = NoEpilogue, class Left = Matrix<T>, class Right = Matrix<T>>
struct CpuGemm {
  int64_t m, n, k;
  Left a;
  Right b;
  C *c;
  int64_t ldc;
  bool add = false;
  Epilogue epilogue = {};

  Tiling tiles(int64_t products) const { return Tiling::of(m, n, k, products, limits()); }

  Status compute(const Tiling &tiles, int64_t index) const {
    return tiles.at(index, [this](int64_t i, int64_t j, int64_t rows, int64_t cols) {
      const GemmTile<T, C, Epilogue, Left, Right> tile{rows, cols, k, a.at(i, 0), b.at(0, j), c + i * ldc + j,
                                                       ldc,  add,  i, j,          epilogue};
      return tile.compute(m, uses_tiles());
    });
  }

 private:
  bool uses_tiles() const {
    if constexpr (kMayUseTiles<T, Left, Right>) return in_tiles<T>(m);
    return false;
  }
#if defined(__AVX512F__)
  TileLimits limits_of_tiles() const {
    using K = TileKernel;
    const bool one_panel = k <= K::panel_terms(m);
    const int64_t most = one_panel ? K::kRows : K::kRows / 2, rows = ceil_div(m < most ? m : most, K::kSide) * K::kSide;
    // A transposed B's columns are lines of memory: few of them may be packed just before few rows use them.
    const int64_t most_cols = b.transposed && rows < K::kPanelCols ? (rows < 128 ? 128 : rows) : +K::kPanelCols;
    const int64_t kept = K::kSums / rows / K::kSide * K::kSide;
    const int64_t cols = one_panel || kept > most_cols ? most_cols : kept;
    return {rows, cols, K::kSide, K::kSide, K::kWorth, K::in_place(a, k) ? K::kPacking : 1};
  }
#endif
  TileLimits limits() const {
    using B = Block<Accumulate<T>>;
    constexpr int64_t kWorth = 1 << 18;
#if defined(__AVX512F__)
    if constexpr (kMayUseTiles<T, Left, Right>)
      if (uses_tiles()) return limits_of_tiles();
#endif
    // The panel of B is packed for each tile, unless all of B is. Without a panel of A, more rows share it.
    constexpr bool kOneSize = std::is_same_v<Left, Matrix<T>> || !std::is_same_v<Right, Matrix<T>>;
    const int64_t most = B::kPanelRows * B::kPanelCols / (ceil_div(n, B::kCols) * B::kCols + 1);
    const int64_t rows = kOneSize || most < B::kPanelRows ? +B::kPanelRows
                         : most < 4 * B::kPanelRows       ? most / B::kRows * B::kRows
                                                          : 4 * B::kPanelRows;
    using Tile = GemmTile<T, C, Epilogue, Left, Right>;
    if (std::is_same_v<Left, Matrix<T>> && m > B::kPanelRows && !Tile::kStores &&
        (k <= B::kDepth || Tile::sums_in_c(k, add)))
      return {B::kTallRows, B::kTallCols, B::kRows, B::kCols, kWorth, 1, true};
    return {rows, B::kPanelCols, B::kRows, B::kCols, kWorth};
  }
};

// `count` products of one size in one parallel loop: product(i) gives the i-th, a CpuGemm.
template <class F>
Status gemm_batch(int64_t count, F product) {
  if (count == 0) return kOk;
  const Tiling tiles = product(0).tiles(count);
  return try_parallel(count * tiles.count,
                      [&](int64_t index) { return product(index / tiles.count).compute(tiles, index % tiles.count); });
}

// Products of any sizes in one parallel loop, except those whose c is null.
template <typename T, typename C, int count>
Status gemm_each(const CpuGemm<T, C> (&products)[count]) {
  int64_t wanted = 0, total = 0;
  for (const auto &product : products) wanted += product.c != nullptr;
  Tiling tiles[count] = {};
  for (int i = 0; i < count; ++i)
    if (products[i].c) total += (tiles[i] = products[i].tiles(wanted)).count;
  return try_parallel(total, [&](int64_t index) {
    int i = 0;
    while (index >= tiles[i].count) index -= tiles[i++].count;
    return products[i].compute(tiles[i], index);
  });
}

template <typename T, typename C, class Epilogue = NoEpilogue>
Status gemm(int64_t m, int64_t n, int64_t k, Matrix<T> a, Matrix<T> b, C *c, int64_t ldc, bool add = false,
            Epilogue epilogue = {}) {
  return gemm_batch(1, [=](int64_t) { return CpuGemm<T, C, Epilogue>{m, n, k, a, b, c, ldc, add, epilogue}; });
}

}  // namespace AOT_ISA
}  // namespace aot
