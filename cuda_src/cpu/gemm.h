// Matrix products on the CPU: C = A B, or C += A B, with A (m, k), B (k, n) and C (m, n) row-major.
//
//   gemm(m, n, k, a, b, c, ldc);                  c[i * ldc + j] = sum over p of a(i, p) * b(p, j)
//   gemm(m, n, k, a, b, c, ldc, true);            adds to what c holds
//   gemm(m, n, k, a, b, c, ldc, false, finish);   stores finish(v, i, j, part) in the place of v
//   gemm_batch(count, m, n, k, product);          products of one size; product(i) gives a, b, c and ldc of the i-th
//
// a is Matrix<T>{data, stride} or, as it lies, (k, m): Matrix<T>{data, stride, true}; b likewise.
// A and B are of float16, bfloat16, float or double, both the same T; C is of T or of Accumulate<T>. Sums are taken in
// Accumulate<T>, and rounded to C's type once. `finish` gets a vector of sums, Vec<T>, with the row and the column of
// its first, and returns what is to be stored: how a bias and an activation are applied while the tile is in a cache.
// k = 0 gives zeros (finished). Everything may be called inside a parallel loop too: then it has the calling thread.
//
// C is cut into tiles by shape alone, threads take tiles, and a sum's terms are added in an order that k alone
// decides: the same bits on any number of threads. For a tile, panels of A and B are copied, widened, to a thread's own
// memory, and a block of C stays in registers while a panel passes. Of float and double, OpenBLAS computes it, on one
// thread, where it is asked for, or where it is installed and this is a build without AVX (host/blas.h): measured on
// one core of an AMD EPYC 9005 (Zen 5) at 1024 x 1024 x 1024 in float, OpenBLAS 0.3.34 does 96 GFLOP/s, the kernel here
// 150 with AVX-512, 95 with AVX2 and 39 without.
#pragma once
#include <type_traits>

#include "../host/blas.h"
#include "parallel.h"

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

// rows x kCols of C, += or =, of packed a (depth, kRows) and b (depth, kCols).
template <typename A, int rows>
void multiply_block(int64_t depth, const A *a, const A *b, bool add, A *c, int64_t ldc) {
  using B = Block<A>;
  VecOf<A> sum[rows][B::kVectors];
  auto each = [](auto f) {
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < B::kVectors; ++v) f(i, v);
  };
  each([&](int i, int v) { sum[i][v] = VecOf<A>{}; });
  for (int64_t p = 0; p < depth; ++p, a += B::kRows, b += B::kCols)
    each([&](int i, int v) { sum[i][v] += a[i] * load(b + v * B::kLanesA); });
  // a long sum is one of pieces of kDepth terms, whose roundings do not pile up
  each([&](int i, int v) {
    A *at = c + i * ldc + v * B::kLanesA;
    store(at, add ? load(at) + sum[i][v] : sum[i][v]);
  });
}

template <typename A, int rows = Block<A>::kRows>
void multiply_rows(int64_t n, int64_t depth, const A *a, const A *b, bool add, A *c, int64_t ldc) {
  if constexpr (rows > 0) {
    if (n == rows) return multiply_block<A, rows>(depth, a, b, add, c, ldc);
    multiply_rows<A, rows - 1>(n, depth, a, b, add, c, ldc);
  }
}

// Transposes lanes x lanes elements in registers: log2(lanes) times, halves of blocks change places.
template <typename A>
AOT_INLINE void transpose(VecOf<A> (&v)[Block<A>::kLanesA]) {
  constexpr int lanes = Block<A>::kLanesA;
  using Mask = typename VectorOf<typename Traits<A>::Int, lanes>::type;
#pragma GCC unroll 4
  for (int half = lanes / 2; half; half /= 2) {
    Mask low, high;
    for (int i = 0; i < lanes; ++i) {
      low[i] = i & half ? lanes + i - half : i;
      high[i] = i & half ? lanes + i : i + half;
    }
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i) {
      if (i & half) continue;
      VecOf<A> a = v[i], b = v[i + half];
      v[i] = __builtin_shuffle(a, b, low);
      v[i + half] = __builtin_shuffle(a, b, high);
    }
  }
}

// Packs `width` lines of m, lines of which the panel has kWidth a strip, as (depth, kWidth) each; zeros for those that
// are not there. Line i, element p is m(i, p): of A lines are rows, of B columns (of which m is then the transpose).
// Ends up to a vector beyond the last strip.
template <int kWidth, typename T, typename A = Accumulate<T>>
void pack(Matrix<T> m, int64_t width, int64_t depth, A *panel) {
  constexpr int lanes = kLanes<T>;
  for (int64_t i = 0; i < width; i += kWidth, panel += depth * kWidth) {
    const int64_t here = width - i < kWidth ? width - i : kWidth;
    for (int64_t first = 0; first < kWidth; first += lanes) {
      const int64_t n = here - first < lanes ? here - first : lanes;
      if (m.transposed) {  // a line's elements lie apart, and elements p of all lines side by side
        const T *source = m.at(i + first, 0).data;
        for (int64_t p = 0; p < depth; ++p, source += m.stride) {
          Vec<T> v = n == lanes ? load(source) : n > 0 ? load(source, Part{n}) : Vec<T>{};
          store(panel + p * kWidth + first, v);
        }
        continue;
      }
      for (int64_t p = 0; p < depth; p += lanes) {
        const int64_t k = depth - p < lanes ? depth - p : lanes;
        Vec<T> v[lanes];
        for (int l = 0; l < lanes; ++l) {
          const T *source = m.at(i + first + l, p).data;
          v[l] = l >= n ? Vec<T>{} : k == lanes ? load(source) : load(source, Part{k});
        }
        transpose<A>(v);
        for (int64_t l = 0; l < k; ++l) store(panel + (p + l) * kWidth + first, v[l]);
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------------------ tiles

// The panels of a thread, and a tile of sums for a C of another type.
template <typename A>
struct Panels {
  using B = Block<A>;
  static constexpr int64_t kSlack = 64 / sizeof(A);
  static constexpr int64_t kA = B::kDepth * (B::kPanelRows + B::kRows) + kSlack;
  static constexpr int64_t kB = B::kDepth * (B::kPanelCols + B::kCols) + kSlack;
  static constexpr int64_t kC = B::kPanelRows * (B::kPanelCols + B::kCols);
  A *a, *b, *c;

  bool allocate() {
    a = static_cast<A *>(thread_scratch((kA + kB + kC) * sizeof(A)));
    b = a + kA, c = b + kB;
    return a;
  }
};

// A tile of C, of at most kPanelRows x kPanelCols, by the kernel above: sums go to `sums`, whose rows have room for a
// whole number of blocks.
template <typename T, typename A = Accumulate<T>>
void multiply_panels(int64_t m, int64_t n, int64_t k, Matrix<T> a, Matrix<T> b, bool add, const Panels<A> &panels,
                     A *sums, int64_t stride) {
  using B = Block<A>;
  Matrix<T> columns{b.data, b.stride, !b.transposed};
  for (int64_t p = 0; p < k; p += B::kDepth, add = true) {
    const int64_t depth = k - p < B::kDepth ? k - p : B::kDepth;
    pack<B::kRows>(a.at(0, p), m, depth, panels.a);
    pack<B::kCols>(columns.at(0, p), n, depth, panels.b);
    for (int64_t j = 0; j < n; j += B::kCols)
      for (int64_t i = 0; i < m; i += B::kRows)
        multiply_rows<A>(m - i < B::kRows ? m - i : B::kRows, depth, panels.a + i * depth, panels.b + j * depth, add,
                         sums + i * stride + j, stride);
  }
}

// c(i, j) = finish(sums(i, j) + what c holds where `add`, ...), n to a row; the first is (i0, j0) of C.
template <typename T, typename C, class Finish, typename A = Accumulate<T>>
void finish_tile(int64_t m, int64_t n, const A *sums, int64_t stride, C *c, int64_t ldc, bool add, int64_t i0,
                 int64_t j0, Finish finish) {
  for (int64_t i = 0; i < m; ++i, sums += stride, c += ldc)
    sweep<T>(n, [=](int64_t j, auto part) {
      Vec<T> v = load(sums + j, part);
      if (add) v += load(c + j, part);
      store(c + j, finish(v, i0 + i, j0 + j, part), part);
    });
}

// One tile on the calling thread, of any size with OpenBLAS, else of at most a panel's.
template <typename T, typename C, class Finish>
bool gemm_tile(const Blas *blas, int64_t m, int64_t n, int64_t k, Matrix<T> a, Matrix<T> b, C *c, int64_t ldc, bool add,
               int64_t i0, int64_t j0, Finish finish) {
  using A = Accumulate<T>;
  constexpr bool kPlain = std::is_same_v<Finish, Plain>;
  if constexpr (std::is_same_v<T, A>) {
    if (blas && k > 0) {
      constexpr int kRowMajor = 101, kNoTranspose = 111, kTranspose = 112;
      auto gemm = [&] {
        if constexpr (sizeof(T) == 4) return blas->sgemm;
        else return blas->dgemm;
      }();
      gemm(kRowMajor, a.transposed ? kTranspose : kNoTranspose, b.transposed ? kTranspose : kNoTranspose, m, n, k, 1,
           a.data, a.stride, b.data, b.stride, add ? 1 : 0, c, ldc);
      if (!kPlain) finish_tile<T>(m, n, c, ldc, c, ldc, false, i0, j0, finish);
      return true;
    }
  }
  using B = Block<A>;
  Panels<A> panels;
  if (!panels.allocate()) return false;
  const int64_t width = ceil_div(n, B::kCols) * B::kCols;
  if (k == 0) std::memset(panels.c, 0, m * width * sizeof(A));
  multiply_panels(m, n, k, a, b, false, panels, panels.c, width);
  finish_tile<T>(m, n, panels.c, width, c, ldc, add, i0, j0, finish);
  return true;
}

// How C is cut.
struct Tiles {
  int64_t m, n, rows, cols, across, count;

  // Big enough that packing is little work beside multiplying; small enough for every thread to have some, and none
  // for which a thread need not be woken.
  template <typename A>
  static Tiles of(int64_t m, int64_t n, int64_t k) {
    constexpr double kWorth = 1 << 21;  // multiplications
    constexpr int64_t kWanted = 16;
    Tiles t{m, n, Block<A>::kPanelRows, Block<A>::kPanelCols, 0, 0};
    for (;;) {
      t.across = ceil_div(n, t.cols), t.count = ceil_div(m, t.rows) * t.across;
      const double work = double(t.rows < m ? t.rows : m) * (t.cols < n ? t.cols : n) * k;
      if (t.count >= kWanted || work < 2 * kWorth) return t;
      int64_t &side = (t.cols < n ? t.cols : n) >= (t.rows < m ? t.rows : m) ? t.cols : t.rows;
      const int64_t unit = &side == &t.cols ? Block<A>::kCols : Block<A>::kRows, total = &side == &t.cols ? n : m;
      const int64_t half = ceil_div((side < total ? side : total) / 2, unit) * unit;
      if (half >= side) return t;
      side = half;
    }
  }
};

// -------------------------------------------------------------------------------------------------------- products

template <typename T, typename C>
struct Typed {
  using Element = T;
  Matrix<T> a, b;
  C *c;
  int64_t ldc;
};

// `count` products of one size, in one loop of threads: product(i) gives the i-th; `finish` is not told which it is.
template <class F, class Finish = Plain>
Status gemm_batch(int64_t count, int64_t m, int64_t n, int64_t k, F product, bool add = false, Finish finish = {}) {
  using T = typename decltype(product(0))::Element;
  using A = Accumulate<T>;
  constexpr int64_t kMax = 0x7fffffff;  // of CBLAS's int
  const Blas *found = std::is_same_v<T, A> && k <= kMax ? blas(kVectorBytes > 16) : nullptr;
  const Tiles tiles = Tiles::of<A>(m, n, k);
  bool out_of_memory = false;
  parallel(count * tiles.count, [&](int64_t index) {
    const auto of = product(index / tiles.count);
    const int64_t tile = index % tiles.count;
    const int64_t i = tile / tiles.across * tiles.rows, j = tile % tiles.across * tiles.cols;
    const int64_t rows = m - i < tiles.rows ? m - i : tiles.rows, cols = n - j < tiles.cols ? n - j : tiles.cols;
    const bool fits = of.a.stride <= kMax && of.b.stride <= kMax && of.ldc <= kMax;
    if (!gemm_tile(fits ? found : nullptr, rows, cols, k, of.a.at(i, 0), of.b.at(0, j), of.c + i * of.ldc + j, of.ldc,
                   add, i, j, finish))
      __atomic_store_n(&out_of_memory, true, __ATOMIC_RELAXED);
  });
  return out_of_memory ? fail(kConventionMisused, "a matrix product is out of memory") : kOk;
}

template <typename T, typename C, class Finish = Plain>
Status gemm(int64_t m, int64_t n, int64_t k, Matrix<T> a, Matrix<T> b, C *c, int64_t ldc, bool add = false,
            Finish finish = {}) {
  return gemm_batch(1, m, n, k, [=](int64_t) { return Typed<T, C>{a, b, c, ldc}; }, add, finish);
}

}  // namespace AOT_ISA
}  // namespace aot
