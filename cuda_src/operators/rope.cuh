// The rotation of heads on a GPU, for rope and qkv_rope.
#pragma once
#include "cuda/keep.cuh"
#include "cuda/launch.cuh"
#include "rope.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// --------------------------------------------------------------------------------------------------------- pieces

// n neighbouring elements: a vector of 16 bytes, or one.
template <typename T, int n>
struct Numbers {
  Accumulate<T> value[n];
};

template <typename T, int n>
struct Piece {
  using Raw = std::conditional_t<n == 1, T, Vector<T>>;
  Raw raw;

  __device__ void load(const T *p) {
    if constexpr (n == 1) raw = *p;
    else raw = load_kept(p);
  }
  __device__ Numbers<T, n> numbers() const {
    Numbers<T, n> x;
    if constexpr (n == 1) {
      x.value[0] = widen(raw);
    } else {
      const Widened<T> v = widen(raw);
#pragma unroll
      for (int i = 0; i < n; ++i) x.value[i] = v[i];
    }
    return x;
  }
  __device__ void store(T *p) const {
    if constexpr (n == 1) *p = raw;
    else aot::store(p, raw);
  }
};

template <typename T, int n>
__device__ Piece<T, n> piece(const Numbers<T, n> &x) {
  Piece<T, n> p;
  if constexpr (n == 1) {
    p.raw = narrow<T>(x.value[0]);
  } else {
    Widened<T> v;
#pragma unroll
    for (int i = 0; i < n; ++i) v[i] = x.value[i];
    p.raw = narrow(v);
  }
  return p;
}

// m numbers of a table, whose dtype W may be wider than T: in pieces of 16 bytes, or of 8.
template <typename T, typename W, int m>
__device__ void load_table(const W *p, Accumulate<T> (&x)[m]) {
  if constexpr (m * sizeof(W) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < m; i += kVectorSize<W>) {
      const Widened<W> v = widen(load(p + i));
#pragma unroll
      for (int k = 0; k < kVectorSize<W>; ++k) x[i + k] = v[k];
    }
  } else {
    struct alignas(m * sizeof(W)) {
      W value[m];
    } v;
    if constexpr (m * sizeof(W) == 8) reinterpret_cast<uint2 &>(v) = *reinterpret_cast<const uint2 *>(p);
    else v.value[0] = *p;
#pragma unroll
    for (int i = 0; i < m; ++i) x[i] = widen(v.value[i]);
  }
}

// ------------------------------------------------------------------------------------------------------- positions

// Divides indices: in 32 bits, which is several times as fast, where both fit.
struct Quotient {
  int64_t quotient, rest;
};
__device__ inline Quotient divide(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) {
    const auto x = static_cast<uint32_t>(a), y = static_cast<uint32_t>(b), q = x / y;
    return {q, x - q * y};
  }
  return {a / b, a % b};
}

struct TableRows {
  const void *positions;  // null: none
  bool wide;              // positions are int64
  RopeSizes z;

  __device__ int64_t position(int64_t i) const {
    return wide ? static_cast<const int64_t *>(positions)[i] : static_cast<const int32_t *>(positions)[i];
  }
  // The line of example b and row s of the sequence, of the tables or of the positions; and the tables' row for a line,
  // -1 where there is none.
  __device__ int64_t line(int64_t b, int64_t s) const {
    return (z.lines == 1 ? 0 : divide(b, z.lines).rest) * z.seq + s;
  }
  __device__ int64_t row(int64_t line) const {
    if (!positions) return line;
    const int64_t p = position(line);
    return p >= 0 && p < z.rows ? p : -1;
  }
  __device__ int64_t operator()(int64_t b, int64_t s) const { return row(line(b, s)); }
};

// --------------------------------------------------------------------------------------------------------- rotation

constexpr int kRopeBlock = 128;

// Whether each of a thread's pieces has whole pairs.
template <int n, bool interleaved>
constexpr bool kWholePairs = interleaved && n > 1;

// Where the two pieces of n elements begin that a thread takes at a place of a head: n pairs, or, behind those that are
// rotated, elements to copy. Neighbouring threads have neighbouring pieces, so that a warp's accesses are of whole
// lines: with both pieces beside each other, stores of interleaved pairs reached 0.83 of a copy's rate. The second
// piece may be past the end of the head.
struct PiecePlaces {
  int one, other;
  bool rotates;
};
template <int n, bool interleaved>
__device__ PiecePlaces piece_places(int place, const RopeSizes &z) {
  const int half = static_cast<int>(z.half), dim = static_cast<int>(z.dim), j = place * n;
  if (j < half && interleaved && n == 1) return {2 * j, 2 * j + 1, true};
  if (j < half) return {j, half + j, true};
  const int one = half + j;
  return {one, one + (dim - 2 * half + 2 * n - 1) / (2 * n) * n, false};
}

// The number of places of a head.
__host__ __device__ inline int64_t head_places(const RopeSizes &z, int n) {
  return z.half / n + ceil_div(z.dim - 2 * z.half, 2 * n);
}

// The numbers of the tables for the pairs at a place, from row `at`, where -1 is none. sign: -1 rotates by the opposite
// angle.
template <bool interleaved, typename T, typename W, int n>
struct Angles {
  Accumulate<T> cos[n], sin[n];

  __device__ void load(const W *c, const W *s, int64_t at, const RopeSizes &z, int place, Accumulate<T> sign) {
    if (at >= 0) {
      load(c + at * z.width, z, place, cos), load(s + at * z.width, z, place, sin);
    } else {
#pragma unroll
      for (int i = 0; i < n; ++i) cos[i] = sin[i] = nanf("");
    }
#pragma unroll
    for (int i = 0; i < n; ++i) sin[i] *= sign;
  }

 private:
  __device__ static void load(const W *row, const RopeSizes &z, int place, Accumulate<T> (&x)[n]) {
    if constexpr (kWholePairs<n, interleaved>) {
      constexpr int m = n / 2;
      auto &halves = reinterpret_cast<Accumulate<T>(&)[2][m]>(x);
      row += place * m;
      load_table<T, W, m>(row, halves[0]), load_table<T, W, m>(row + z.half / 2, halves[1]);
    } else {
      load_table<T, W, n>(row + place * n, x);
    }
  }
};

template <bool interleaved, typename T, typename W, int n>
__device__ void rotate(Piece<T, n> (&p)[2], const Angles<interleaved, T, W, n> &angles) {
  Numbers<T, n> v[2] = {p[0].numbers(), p[1].numbers()};
#pragma unroll
  for (int i = 0; i < n; ++i) {
    // of interleaved pairs, n / 2 are in each piece
    auto &u = interleaved ? v[2 * i / n].value[2 * i % n] : v[0].value[i];
    auto &w = interleaved ? v[(2 * i + 1) / n].value[(2 * i + 1) % n] : v[1].value[i];
    const Accumulate<T> turned = u * angles.cos[i] - w * angles.sin[i];
    w = w * angles.cos[i] + u * angles.sin[i], u = turned;
  }
  p[0] = piece<T, n>(v[0]), p[1] = piece<T, n>(v[1]);
}

// ----------------------------------------------------------------------------------------- gradients of the tables

template <typename T>
struct HeadPair {
  const T *dy, *x;
};

// dcos and dsin, of which either may be null. A block takes a row of theirs, and a thread a column, whose terms it adds
// in the order of x's rows: those of the rows that have this position, which the block looks for together. heads(b,
// s)(h): head h of dy and that of x, null where it has no part in the sums.
template <typename T, typename W, bool interleaved, class OfHeads>
__global__ void __launch_bounds__(kRopeBlock, 8) rope_sums_kernel(OfHeads heads, W *dcos, W *dsin, TableRows table) {
  __shared__ unsigned found[kRopeBlock / 32];
  const RopeSizes &z = table.z;
  const int64_t lines = z.lines * z.seq, tiles = ceil_div(z.width, kRopeBlock);
  for (int64_t at = blockIdx.x; at < z.rows * tiles; at += gridDim.x) {
    const int64_t row = at / tiles, j = at % tiles * kRopeBlock + threadIdx.x;
    double c = 0, s = 0;
    const auto add = [&](int64_t line) {
      if (j >= z.half) return;
      const int64_t seq = line % z.seq, one = interleaved ? 2 * j : j, other = interleaved ? 2 * j + 1 : j + z.half;
      for (int64_t b = line / z.seq; b < z.batch; b += z.lines) {
        const auto row = heads(b, seq);
        for (int64_t h = 0; h < z.heads; ++h) {
          const HeadPair<T> of = row(h);
          if (!of.dy) continue;
          const Accumulate<T> d0 = widen(of.dy[one]), d1 = widen(of.dy[other]), x0 = widen(of.x[one]),
                              x1 = widen(of.x[other]);
          c += d0 * x0 + d1 * x1, s += d1 * x0 - d0 * x1;
        }
      }
    };
    if (!table.positions && row < lines) add(row);
    for (int64_t first = 0; table.positions && first < lines; first += kRopeBlock) {
      const int64_t i = first + threadIdx.x;
      const unsigned hits = __ballot_sync(~0u, i < lines && table.position(i) == row);
      __syncthreads();  // `found` of the previous lines has been read
      if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = hits;
      __syncthreads();
      for (int warp = 0; warp < kRopeBlock / 32; ++warp)
        for (unsigned left = found[warp]; left; left &= left - 1) add(first + 32 * warp + __ffs(left) - 1);
    }
    if (j >= z.width) continue;
    if (dcos) dcos[row * z.width + j] = narrow<W>(static_cast<Accumulate<W>>(c));
    if (dsin) dsin[row * z.width + j] = narrow<W>(static_cast<Accumulate<W>>(s));
  }
}

template <typename T, typename W, bool interleaved, class OfHeads>
Status run_rope_sums(const char *op, const OfHeads &heads, W *dcos, W *dsin, const TableRows &table, void *stream) {
  const int64_t blocks = table.z.rows * ceil_div(table.z.width, kRopeBlock);
  if (!blocks) return kOk;
  return launch_kernel(op, rope_sums_kernel<T, W, interleaved, OfHeads>, {grid_size(blocks), kRopeBlock}, stream, heads,
                       dcos, dsin, table);
}

// ------------------------------------------------------------------------------------------------------- dispatch

// f(Type of x's dtype, Type of the tables', whether pairs are interleaved)
template <class F>
Status dispatch_rope(DType x, DType table, bool interleaved, F f) {
  return dispatch(x, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto run = [&](auto of_table) {
      return interleaved ? f(type, of_table, std::true_type()) : f(type, of_table, std::false_type());
    };
    if constexpr (sizeof(T) == 2)
      if (table == DType::float32) return run(Type<float>());
    return run(type);
  });
}

inline TableRows table_rows(const Tensor &positions, const RopeSizes &z) {
  return {positions ? positions.data : nullptr, positions.dtype == DType::int64, z};
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot
