// The rotation of heads on the CPU, for rope and qkv_rope.
#pragma once
#include <utility>

#include "cpu/entry.h"
#include "cpu/parallel.h"
#include "rope.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// --------------------------------------------------------------------------------------------------------- pairs

template <typename T>
using Lanes = std::make_index_sequence<kLanes<T>>;

// The first and the second elements of as many pairs as a vector has lanes.
template <typename T>
struct Pairs {
  Vec<T> a, b;
};

template <typename V, size_t... i>
V evens(V first, V second, std::index_sequence<i...>) {
  return __builtin_shufflevector(first, second, (2 * i)...);
}
template <typename V, size_t... i>
V odds(V first, V second, std::index_sequence<i...>) {
  return __builtin_shufflevector(first, second, (2 * i + 1)...);
}
template <int from, typename V, size_t... i>
V alternating(V evens, V odds, std::index_sequence<i...>) {
  return __builtin_shufflevector(evens, odds, (from + i / 2 + i % 2 * sizeof...(i))...);
}

// The elements of vector k of two that hold the interleaved pairs of `part`.
template <typename T>
Part part_of(Part part, int k) {
  const int64_t n = 2 * part.n - k * kLanes<T>;
  return {n < 0 ? 0 : n < kLanes<T> ? n : kLanes<T>};
}
template <typename T, class P>
P part_of(P part, int) {
  return part;
}

// Pairs j, j + 1, ... of a row.
template <bool interleaved, typename T, class P>
AOT_INLINE Pairs<T> load_pairs(const T *x, int64_t j, int64_t half, P part) {
  if constexpr (!interleaved) return {load(x + j, part), load(x + half + j, part)};
  const Vec<T> first = load(x + 2 * j, part_of<T>(part, 0));
  const Vec<T> second = load(x + 2 * j + kLanes<T>, part_of<T>(part, 1));
  return {evens(first, second, Lanes<T>()), odds(first, second, Lanes<T>())};
}

template <bool interleaved, typename T, class P>
AOT_INLINE void store_pairs(T *y, int64_t j, int64_t half, Pairs<T> v, P part) {
  if constexpr (!interleaved) {
    store(y + j, v.a, part), store(y + half + j, v.b, part);
  } else {
    store(y + 2 * j, alternating<0>(v.a, v.b, Lanes<T>()), part_of<T>(part, 0));
    store(y + 2 * j + kLanes<T>, alternating<kLanes<T> / 2>(v.a, v.b, Lanes<T>()), part_of<T>(part, 1));
  }
}

// --------------------------------------------------------------------------------------------------------- a head

// The row of the tables for each row of x.
struct TableRows {
  const Tensor &positions;
  const RopeSizes z;

  int64_t position(int64_t i) const {
    return positions.dtype == DType::int32 ? positions.as<const int32_t>()[i] : positions.as<const int64_t>()[i];
  }
  int64_t operator()(int64_t b, int64_t s) const {
    const int64_t i = b % z.lines * z.seq + s;
    return positions ? position(i) : i;
  }
  Status check(const char *op) const {
    for (int64_t i = 0; positions && i < z.lines * z.seq; ++i)
      if (const int64_t p = position(i); p < 0 || p >= z.rows)
        return fail(kInvalidArgument, "%s: positions[%lld] is %lld, expected 0 to %lld, the rows of cos", op,
                    static_cast<long long>(i), static_cast<long long>(p), static_cast<long long>(z.rows - 1));
    return kOk;
  }
};

// One head. sign: -1 rotates by the opposite angle.
template <bool interleaved, bool stream, typename T, typename W>
AOT_INLINE void rotate_head(const T *from, const W *cos, const W *sin, T *to, int64_t half, int64_t dim,
                            Accumulate<T> sign) {
  auto step = [=](int64_t j, auto part) {
    const Pairs<T> v = load_pairs<interleaved>(from, j, half, part);
    const Vec<T> c = load(cos + j, part), s = load(sin + j, part) * sign;
    store_pairs<interleaved, T>(to, j, half, {v.a * c - v.b * s, v.b * c + v.a * s}, part);
  };
  if constexpr (stream)
    for (int64_t j = 0; j < half; j += kLanes<T>) step(j, Stream());
  else sweep<T>(half, step);
  if (dim > 2 * half && to != from) std::memcpy(to + 2 * half, from + 2 * half, (dim - 2 * half) * sizeof(T));
}

// Whether the heads of y are whole vectors, and so many that they are better stored past the caches.
template <typename T>
bool streams(const T *y, const RopeSizes &z) {
  return reinterpret_cast<uintptr_t>(y) % kVectorBytes == 0 && z.dim * sizeof(T) % kVectorBytes == 0 &&
         z.half % kLanes<T> == 0 && z.half * sizeof(T) % kVectorBytes == 0 &&
         worth_streaming(z.x_rows() * z.dim * sizeof(T));
}

// ---------------------------------------------------------------------------------------- gradients of the tables

// f(b, s) for each b and s of table row i.
template <class F>
AOT_INLINE void for_tokens(const TableRows &table, int64_t i, F f) {
  const RopeSizes &z = table.z;
  const auto line = [&](int64_t at) {
    for (int64_t b = at / z.seq; b < z.batch; b += z.lines) f(b, at % z.seq);
  };
  const int64_t n = z.lines * z.seq;
  if (!table.positions && i < n) line(i);
  for (int64_t at = 0; table.positions && at < n; ++at)
    if (table.position(at) == i) line(at);
}

// dcos and dsin: rows that no position has, and columns that are not read, are 0. Either may be null. heads(b, s, h):
// head h of dy and that of x, null where it has no part in the sums.
template <bool interleaved, typename T, typename W, class OfHeads>
void rope_sums_loop(OfHeads heads, W *dcos, W *dsin, const TableRows &table) {
  const RopeSizes z = table.z;
  using Sum = typename VectorOf<double, kLanes<T>>::type;
  const int64_t work = z.x_rows() * z.dim / (z.rows > 0 ? z.rows : 1);
  parallel_pieces(z.rows, rows_per_task(z.rows, work + 1), [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto write = [=](W *to, int64_t j, const Sum &sum, auto part) {
        if (to) store(to + i * z.width + j, __builtin_convertvector(sum, Vec<T>), part);
      };
      sweep<T>(z.half, [&](int64_t j, auto part) {
        Sum c{}, s{};
        for_tokens(table, i, [&](int64_t b, int64_t seq) {
          for (int64_t h = 0; h < z.heads; ++h) {
            const auto [dy, x] = heads(b, seq, h);
            if (!dy) continue;
            const Pairs<T> d = load_pairs<interleaved>(dy, j, z.half, part);
            const Pairs<T> v = load_pairs<interleaved>(x, j, z.half, part);
            c += __builtin_convertvector(d.a * v.a + d.b * v.b, Sum);
            s += __builtin_convertvector(d.b * v.a - d.a * v.b, Sum);
          }
        });
        write(dcos, j, c, part), write(dsin, j, s, part);
      });
      sweep<T>(z.width - z.half, [&](int64_t j, auto part) {
        write(dcos, z.half + j, Sum{}, part), write(dsin, z.half + j, Sum{}, part);
      });
    }
  });
}

// ------------------------------------------------------------------------------------------------------- dispatch

// f(a zero of x's dtype, one of the tables', whether pairs are interleaved)
template <class F>
Status dispatch_rope(DType x, DType table, bool interleaved, F f) {
  return dispatch_floating(x, [&](auto zero) {
    return dispatch_wider<decltype(zero)>(table, [&](auto of_table) {
      return interleaved ? f(zero, of_table, std::true_type()) : f(zero, of_table, std::false_type());
    });
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot
