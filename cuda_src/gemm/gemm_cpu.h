// Matrix products on the CPU: C = A B, or C += A B, with A (m, k), B (k, n) and C (m, n) row-major.
//
//   gemm(m, n, k, a, b, c, ldc);                  c[i * ldc + j] = sum over p of a(i, p) * b(p, j)
//   gemm(m, n, k, a, b, c, ldc, true);            adds to what c holds
//   gemm(m, n, k, a, b, c, ldc, false, finish);   stores finish(v, i, j, part) in the place of v
//   gemm_batch(count, product);                   products of one size; product(i) gives the i-th, a Gemm
//   gemm_each(products);                          products of any sizes
//
// a is Matrix<T>{data, stride} or, as it lies, (k, m): Matrix<T>{data, stride, true}; b likewise.
// A and B are of float16, bfloat16, float or double, both the same T; C is of T or of Accumulate<T>. Sums are taken in
// Accumulate<T>, and rounded to C's type once. `finish` gets a vector of sums, Vec<T>, with the row and the column of
// its first, and returns what is to be stored: how a bias and an activation are applied while the tile is in a cache.
// k = 0 gives zeros (finished). Everything may be called inside a parallel loop too: then it has the calling thread.
//
// C is cut into tiles, threads take tiles, and a sum's terms are added in an order that m and k alone decide: the same
// bits on any number of threads. For a tile, panels of A and B are copied, widened, to a thread's own memory, and a
// block of C stays in registers while a panel passes; few rows are multiplied as they lie. Of float and double,
// OpenBLAS computes it, on one thread, where it is asked for, or where it is installed and this is a build without AVX
// (cpu/blas.h): measured on one core of an AMD EPYC 9005 (Zen 5) at 1024 x 1024 x 1024 in float, OpenBLAS 0.3.34 does
// 96 GFLOP/s, the kernel here half as much again with AVX-512, as much with AVX2, and less than half without.
#pragma once
#include <type_traits>

#include "cpu/blas.h"
#include "cpu/parallel.h"

namespace aot {
inline namespace AOT_ISA {

// A matrix as it lies in memory: element (i, j) is data[i * stride + j], or, transposed, data[j * stride + i].
template <typename T>
struct Matrix {
  const T *data;
  int64_t stride;
  bool transposed = false;

  Matrix at(int64_t i, int64_t j) const {
    return {data + (transposed ? j * stride + i : i * stride + j), stride, transposed};
  }
};

// What is stored is the sum.
struct Plain {
  template <class V, class P>
  V operator()(V sum, int64_t, int64_t, P) const {
    return sum;
  }
};

// ----------------------------------------------------------------------------------------------------------- terms

// What panels and dot products are made of: vectors whose elements have kTerms terms each of a sum. They are read from
// `along` a line of a matrix, or `across` as many lines as a vector has lanes, which lie side by side; there a term's
// successor lies `stride` further on, if it is one of those that are `left`.

template <typename T>
struct Widened {
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
};

#if defined(__AVX512F__)
// Two terms of bfloat16, as the bits of a float: they have an instruction, which takes subnormal numbers for zeros.
struct Pairs {
  static constexpr int kTerms = 2;

  // Not every processor of this build has it. AOTOPS_CPU_ISA=avx512 is without.
  static bool available() {
    static const bool is = [] {
      const char *asked = std::getenv("AOTOPS_CPU_ISA");
      return __builtin_cpu_supports("avx512bf16") && !(asked && !std::strcmp(asked, "avx512"));
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
#endif

// ---------------------------------------------------------------------------------------------------------- kernel

// A block of C that the registers hold: kRows rows of kVectors vectors, with one vector for each column of B and one
// for the element of A that is being multiplied.
template <typename A>
struct Block {
  static constexpr int kLanesA = kVectorBytes / sizeof(A);
  static constexpr bool kMany = kVectorBytes == 64;  // 32 registers, else 16
  static constexpr int kRows = kMany ? (kLanesA == 16 ? 12 : 8) : kLanesA == 8 ? 6 : kLanesA;
  static constexpr int kVectors = kMany ? (kLanesA == 16 ? 2 : 3) : kLanesA == 8 ? 2 : kLanesA == 4 ? 3 : 4;
  static constexpr int kCols = kVectors * kLanesA;
  // Of what a thread has in its second-level cache at once: a panel of A, rows x depth, and one of B, depth x columns.
  static constexpr int kDepth = 256, kPanelRows = 240, kPanelCols = 480;
};

template <typename A>
using VecOf = typename VectorOf<A, kVectorBytes / sizeof(A)>::type;

// Terms of a sum that are added up by themselves: a longer one is a sum of such sums, whose roundings do not pile up.
constexpr int64_t kPieceTerms = 4096;

// kCols columns of B: packed, (depth, kCols), or as they lie in rows of B.
template <typename A>
struct Packed {
  const A *b;

  VecOf<A> operator()(int64_t p, int64_t column) const { return load(b + p * Block<A>::kCols + column); }
};
template <class Terms, typename T>
struct Lying {
  Matrix<T> b;
  int64_t terms;

  Vec<T> operator()(int64_t p, int64_t column) const {
    p *= Terms::kTerms;
    const T *at = b.data + p * b.stride + column;
    // the columns beside these: rows are so far apart that no prefetcher of the processor's finds them
    __builtin_prefetch(at + Block<Accumulate<T>>::kCols, 0, 2);
    return Terms::across(at, b.stride, terms - p, Full());
  }
};

// rows x kCols of C, += or =, of packed a (depth, kRows) and b.
template <class Terms, int rows, typename A, class Columns>
void multiply_block(int64_t depth, const A *a, Columns b, bool add, A *c, int64_t ldc) {
  using B = Block<A>;
  VecOf<A> sum[rows][B::kVectors];
  auto each = [](auto f) {
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < B::kVectors; ++v) f(i, v);
  };
  each([&](int i, int v) { sum[i][v] = VecOf<A>{}; });
  for (int64_t p = 0; p < depth; ++p, a += B::kRows) {
    VecOf<A> right[B::kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < B::kVectors; ++v) right[v] = b(p, v * B::kLanesA);
    each([&](int i, int v) { sum[i][v] = Terms::add(sum[i][v], Terms::spread(a[i]), right[v]); });
  }
  // a long sum is one of pieces of kDepth terms, whose roundings do not pile up
  each([&](int i, int v) {
    A *at = c + i * ldc + v * B::kLanesA;
    store(at, add ? load(at) + sum[i][v] : sum[i][v]);
  });
}

template <class Terms, typename A, class Columns, int rows = Block<A>::kRows>
void multiply_rows(int64_t n, int64_t depth, const A *a, Columns b, bool add, A *c, int64_t ldc) {
  if constexpr (rows > 0) {
    if (n == rows) return multiply_block<Terms, rows>(depth, a, b, add, c, ldc);
    multiply_rows<Terms, A, Columns, rows - 1>(n, depth, a, b, add, c, ldc);
  }
}

// Transposes lanes x lanes elements in registers: log2(lanes) times, halves of blocks change places.
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

// A strip of kWidth lines in a panel, (depth, kWidth). The vector beyond takes what a store of whole vectors writes too
// much, and keeps strips from meeting in a cache's set.
template <int kWidth, typename A>
constexpr int64_t strip(int64_t depth) {
  return depth * kWidth + kVectorBytes / sizeof(A);
}

// Packs `width` lines of m in strips of kWidth; zeros for those that are not there. Line i, term p is m(i, p): of A
// lines are rows, of B columns (of which m is then the transpose).
template <class Terms, int kWidth, typename T, typename A = Accumulate<T>>
void pack(Matrix<T> m, int64_t width, int64_t terms, A *panel) {
  constexpr int lanes = kLanes<T>, step = lanes * Terms::kTerms;
  const int64_t stride = strip<kWidth, A>(ceil_div(terms, Terms::kTerms));
  // f(line, n, to): as many lines as a vector has lanes, the n first of which are there
  auto each_strip = [=](auto f) {
    for (int64_t i = 0; i < width; i += kWidth)
      for (int64_t first = 0; first < kWidth; first += lanes) {
        const int64_t left = width - i - first;
        f(i + first, left < 0 ? 0 : left < lanes ? left : lanes, panel + i / kWidth * stride + first);
      }
  };
  if (m.transposed) {  // a line's terms lie apart, and terms p of all lines side by side
    constexpr int64_t kNear = 8 * Terms::kTerms;
    for (int64_t near = 0; near < terms; near += kNear)
      each_strip([=](int64_t line, int64_t n, A *to) {
        const T *source = m.at(line, near).data;
        to += near / Terms::kTerms * kWidth;
        for (int64_t p = near; p < terms && p < near + kNear; p += Terms::kTerms) {
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

// ------------------------------------------------------------------------------------------------------------ dots

// The sums of each vector's lanes: of the i-th in lane i. Halves of vectors are added until there is one.
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

// As many dot products as a vector has lanes: of kRows rows of A with kCols columns of B, which lies transposed.
template <class Terms, typename T>
struct Dots {
  static constexpr int kRows = kLanes<T> > 4 ? 4 : kLanes<T> > 2 ? 2 : 1, kCols = kLanes<T> / kRows;
  const T *rows[kRows], *columns[kCols];

  // Row by row.
  Vec<T> sums(int64_t k) const {
    constexpr int64_t kTerms = kPieceTerms * kLanes<T>;
    Vec<T> all = sums(0, k < kTerms ? k : kTerms);
    for (int64_t p = kTerms; p < k; p += kTerms) all += sums(p, k - p < kTerms ? k : p + kTerms);
    return all;
  }

 private:
  // Of terms `begin` to `end`.
  [[gnu::noinline]] Vec<T> sums(int64_t begin, int64_t end) const {
    Vec<T> sum[kRows * kCols];
#pragma GCC unroll 16
    for (auto &s : sum) s = Vec<T>{};
    auto step = [&](int64_t p, auto part) {
      Vec<T> a[kRows];
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) a[i] = Terms::along(rows[i] + p, part);
#pragma GCC unroll 4
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

// Memory that is not the thread's scratch, which is gemm's. Aligned: half of the vectors else lie in two lines.
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

// The panels of a thread, and a tile of sums.
template <typename A>
struct Panels {
  using B = Block<A>;
  static constexpr int64_t kA = ceil_div(B::kPanelRows, B::kRows) * strip<B::kRows, A>(B::kDepth);
  static constexpr int64_t kB = ceil_div(B::kPanelCols, B::kCols) * strip<B::kCols, A>(B::kDepth);
  static constexpr int64_t kC = B::kPanelRows * ceil_div(B::kPanelCols, B::kCols) * B::kCols;
  A *a, *b, *c, *all;  // `all`: of long sums, those of the pieces before

  explicit Panels(bool long_sums)
      : a(static_cast<A *>(thread_scratch((kA + kB + kC + (long_sums ? kC : 0)) * sizeof(A)))),
        b(a + kA),
        c(b + kB),
        all(c + kC) {}
};

// Of so many rows C is made of dot products where B lies transposed, else of B as it lies: to pack it does not pay.
constexpr int64_t kDotRows = 32, kFewRows = 64;

// A tile of C on the calling thread.
template <typename T, typename C, class Finish = Plain>
struct Tile {
  using A = Accumulate<T>;
  using B = Block<A>;
  int64_t m, n, k;
  Matrix<T> a, b;
  C *c;
  int64_t ldc;
  bool add = false;
  int64_t row = 0, column = 0;  // of the whole C, where it begins
  Finish finish = {};

  // rows x cols of c, from (i, j) on, of their sums.
  void finish_sums(int64_t i, int64_t j, int64_t rows, int64_t cols, const A *sums, int64_t stride) const {
    for (int64_t end = i + rows; i < end; ++i, sums += stride)
      sweep<T>(cols, [=](int64_t l, auto part) {
        Vec<T> v = load(sums + l, part);
        C *to = c + i * ldc + j + l;
        if (add) v += load(to, part);
        store(to, finish(v, row + i, column + j + l, part), part);
      });
  }

  // `all`: the rows of the whole C, since whether it is made of dot products is not for a tile to say: other sums,
  // other bits.
  Status compute(int64_t all) const {
    constexpr int64_t kMax = 0x7fffffff;  // of CBLAS's int
    if constexpr (std::is_same_v<T, A>)
      if (const Blas *found = blas(kVectorBytes > 16))
        if (k > 0 && k <= kMax && a.stride <= kMax && b.stride <= kMax && ldc <= kMax)
          return by_blas(*found) ? kOk : out_of_memory("a matrix product");
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<T, bfloat16>)
      if (Pairs::available()) return by<Pairs>(all);
#endif
    return by<Widened<T>>(all);
  }

 private:
  template <class Terms>
  Status by(int64_t all) const {
    if (all <= kDotRows && !a.transposed && b.transposed) return by_dots<Terms>(), kOk;
    return by_panels<Terms>(all <= kFewRows && !b.transposed) ? kOk : out_of_memory("a matrix product");
  }

  // Of any size.
  bool by_blas(const Blas &blas) const {
    constexpr int kRowMajor = 101, kNoTranspose = 111, kTranspose = 112;
    auto gemm = [&] {
      if constexpr (sizeof(T) == 4) return blas.sgemm;
      else return blas.dgemm;
    }();
    auto multiply = [&](int64_t p, int64_t terms, bool added, A *to, int64_t ld) {
      const Matrix<T> left = a.at(0, p), right = b.at(p, 0);
      gemm(kRowMajor, a.transposed ? kTranspose : kNoTranspose, b.transposed ? kTranspose : kNoTranspose, m, n, terms,
           1, left.data, a.stride, right.data, b.stride, added ? 1 : 0, to, ld);
    };
    const int64_t first = k < kPieceTerms ? k : kPieceTerms;
    multiply(0, first, add, c, ldc);
    A *const sums = k > first ? static_cast<A *>(thread_scratch(m * n * sizeof(A))) : nullptr;
    if (k > first && !sums) return false;
    for (int64_t p = first; p < k; p += kPieceTerms) {
      multiply(p, k - p < kPieceTerms ? k - p : kPieceTerms, false, sums, n);
      for (int64_t i = 0; i < m; ++i) add_to(c + i * ldc, sums + i * n, n);
    }
    if (!std::is_same_v<Finish, Plain>)
      Tile{m, n, k, a, b, c, ldc, false, row, column, finish}.finish_sums(0, 0, m, n, c, ldc);
    return true;
  }
  static void add_to(A *to, const A *from, int64_t n) {
    sweep<A>(n, [=](int64_t j, auto part) { store(to + j, load(to + j, part) + load(from + j, part), part); });
  }

  // Of at most kPanelRows x kPanelCols, by the kernel above. A block's sums go to c where that is all there is to do,
  // else to panels.c until they have all their terms. `as_it_lies`: B is not packed, but for the last few columns.
  template <class Terms>
  bool by_panels(bool as_it_lies) const {
    constexpr int64_t kDepth = B::kDepth * Terms::kTerms;
    const bool pieces = k > kPieceTerms;
    const Panels<A> panels(pieces);
    if (!panels.a) return false;
    const Matrix<T> columns{b.data, b.stride, !b.transposed};
    const bool once = k <= kDepth;
    const int64_t stride = once ? B::kCols : ceil_div(n, B::kCols) * B::kCols;
    const int64_t lying = as_it_lies ? n / B::kCols * B::kCols : 0;
    int64_t p = 0;
    do {
      const int64_t terms = k - p < kDepth ? k - p : kDepth, depth = ceil_div(terms, Terms::kTerms);
      const bool begins = p % kPieceTerms == 0, all = p + terms == k, ends = all || (p + terms) % kPieceTerms == 0;
      pack<Terms, B::kRows>(a.at(0, p), m, terms, panels.a);
      pack<Terms, B::kCols>(columns.at(lying, p), n - lying, terms, panels.b);
      auto multiply = [=](int64_t i, int64_t j, int64_t rows, bool added, A *sums, int64_t ld) {
        const A *left = panels.a + i / B::kRows * strip<B::kRows, A>(depth);
        if (j < lying)
          return multiply_rows<Terms>(rows, depth, left, Lying<Terms, T>{b.at(p, j), terms}, added, sums, ld);
        const Packed<A> right{panels.b + (j - lying) / B::kCols * strip<B::kCols, A>(depth)};
        multiply_rows<Terms>(rows, depth, left, right, added, sums, ld);
      };
      for (int64_t j = 0; j < n; j += B::kCols)
        for (int64_t i = 0; i < m; i += B::kRows) {
          const int64_t rows = m - i < B::kRows ? m - i : B::kRows, cols = n - j < B::kCols ? n - j : B::kCols;
          if constexpr (std::is_same_v<Finish, Plain> && std::is_same_v<C, A>)
            if (cols == B::kCols && !pieces) {
              multiply(i, j, rows, add || p, c + i * ldc + j, ldc);
              continue;
            }
          A *sums = once ? panels.c : panels.c + i * stride + j;
          multiply(i, j, rows, !begins, sums, stride);
          if (pieces && ends) {
            A *const before = panels.all + i * stride + j;
            for (int64_t r = 0; r < rows && p >= kPieceTerms; ++r) add_to(sums + r * stride, before + r * stride, cols);
            for (int64_t r = 0; r < rows && !all; ++r)
              std::memcpy(before + r * stride, sums + r * stride, cols * sizeof(A));
          }
          if (all) finish_sums(i, j, rows, cols, sums, stride);
        }
      p += terms;
    } while (p < k);
    return true;
  }

  // Of at most kDotRows rows, and B transposed: both lie as dot products want them.
  template <class Terms>
  void by_dots() const {
    using D = Dots<Terms, T>;
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
      finish_sums(0, j, m, cols, sums, lanes);
    }
  }
};

// How C is cut: into tiles of one size, but for the last.
struct Tiles {
  int64_t m, n, rows, cols, across, count;

  // Enough for all threads, with those of so many products, if each is worth waking one for. OpenBLAS's sums may depend
  // on how they are cut: they are cut alike for any number of threads.
  template <typename A>
  static Tiles of(int64_t m, int64_t n, int64_t k, int64_t products = 1) {
    using B = Block<A>;
    constexpr double kWorth = 1 << 18;  // multiplications
    const int64_t enough = blas(kVectorBytes > 16) ? 16 : threads() > 1 ? 2 * threads() : 1;
    auto piece = [](int64_t total, int64_t pieces, int64_t unit) {
      return ceil_div(ceil_div(total, pieces), unit) * unit;
    };
    if (m == 0 || n == 0) return {};
    for (int64_t down = ceil_div(m, B::kPanelRows), across = ceil_div(n, B::kPanelCols);;) {
      Tiles t{m, n, piece(m, down, B::kRows), piece(n, across, B::kCols), 0, 0};
      t.across = ceil_div(n, t.cols), t.count = ceil_div(m, t.rows) * t.across;
      const bool flat = t.rows == B::kRows, narrow = t.cols == B::kCols;
      if (t.count * products >= enough || (flat && narrow) || double(m) * n * k < 2 * kWorth * t.count) return t;
      narrow || (t.rows > t.cols && !flat) ? down *= 2 : across *= 2;
    }
  }

  // f(i, j, rows, cols) of the index-th.
  template <class F>
  auto at(int64_t index, F f) const {
    const int64_t i = index / across * rows, j = index % across * cols;
    return f(i, j, m - i < rows ? m - i : rows, n - j < cols ? n - j : cols);
  }
};

// -------------------------------------------------------------------------------------------------------- products

template <typename T, typename C, class Finish = Plain>
struct Gemm {
  int64_t m, n, k;
  Matrix<T> a, b;
  C *c;
  int64_t ldc;
  bool add = false;
  Finish finish = {};

  Tiles tiles(int64_t products) const { return Tiles::of<Accumulate<T>>(m, n, k, products); }

  Status compute(const Tiles &tiles, int64_t index) const {
    return tiles.at(index, [this](int64_t i, int64_t j, int64_t rows, int64_t cols) {
      const Tile<T, C, Finish> tile{rows, cols, k, a.at(i, 0), b.at(0, j), c + i * ldc + j, ldc, add, i, j, finish};
      return tile.compute(m);
    });
  }
};

// `count` products of one size, in one loop of threads: product(i) gives the i-th.
template <class F>
Status gemm_batch(int64_t count, F product) {
  if (count == 0) return kOk;
  const Tiles tiles = product(0).tiles(count);
  return try_parallel(count * tiles.count,
                      [&](int64_t index) { return product(index / tiles.count).compute(tiles, index % tiles.count); });
}

// Products of any sizes, in one loop of threads; those whose c is null nobody wants.
template <typename T, typename C, int count>
Status gemm_each(const Gemm<T, C> (&products)[count]) {
  int64_t wanted = 0, total = 0;
  for (const auto &product : products) wanted += product.c != nullptr;
  Tiles tiles[count] = {};
  for (int i = 0; i < count; ++i)
    if (products[i].c) total += (tiles[i] = products[i].tiles(wanted)).count;
  return try_parallel(total, [&](int64_t index) {
    int i = 0;
    while (index >= tiles[i].count) index -= tiles[i++].count;
    return products[i].compute(tiles[i], index);
  });
}

template <typename T, typename C, class Finish = Plain>
Status gemm(int64_t m, int64_t n, int64_t k, Matrix<T> a, Matrix<T> b, C *c, int64_t ldc, bool add = false,
            Finish finish = {}) {
  return gemm_batch(1, [=](int64_t) { return Gemm<T, C, Finish>{m, n, k, a, b, c, ldc, add, finish}; });
}

}  // namespace AOT_ISA
}  // namespace aot
