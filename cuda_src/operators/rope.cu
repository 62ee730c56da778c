#include "rope.h"

#include "cuda/launch.cuh"

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
    else raw = load_once(p);
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

// n numbers of a table, whose dtype W may be wider than T.
template <typename T, typename W, int n>
__device__ Numbers<T, n> load_table(const W *p) {
  Numbers<T, n> x;
  if constexpr (n == 1) {
    x.value[0] = widen(*p);
  } else {
#pragma unroll
    for (int i = 0; i < n; i += kVectorSize<W>) {
      const Widened<W> v = widen(load(p + i));
#pragma unroll
      for (int k = 0; k < kVectorSize<W>; ++k) x.value[i + k] = v[k];
    }
  }
  return x;
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
  // The row of example b and row s of the sequence; -1 where there is none.
  __device__ int64_t operator()(int64_t b, int64_t s) const {
    const int64_t i = (z.lines == 1 ? 0 : divide(b, z.lines).rest) * z.seq + s;
    if (!positions) return i;
    const int64_t p = position(i);
    return p >= 0 && p < z.rows ? p : -1;
  }
};

// --------------------------------------------------------------------------------------------------------- kernels

constexpr int kRopeBlock = 128;

// A thread takes one place in kHeads heads of a row of the sequence: two pieces of n elements of each, which are n
// pairs, or, behind those that are rotated, pieces to copy. So a number of the tables is read once for kHeads heads.
// threadIdx.x is the place; neighbouring threadIdx.y are neighbours in memory.
template <typename T, typename W, int n, bool interleaved, int kHeads>
__global__ void __launch_bounds__(kRopeBlock)
    rope_kernel(const T *x, const W *cos, const W *sin, T *y, TableRows table, Accumulate<T> sign) {
  const RopeSizes &z = table.z;
  const int64_t groups = ceil_div(z.heads, kHeads), rows = z.batch * z.seq * groups;
  const int64_t inner = z.heads_first ? z.seq : groups, outer = z.heads_first ? groups : z.seq;
  const int64_t head_step = z.heads_first ? z.seq * z.dim : z.dim, row_step = z.heads_first ? z.dim : z.heads * z.dim;
  const int64_t rotated = 2 * z.half, copied = ceil_div(z.dim - rotated, 2 * n), places = z.half / n + copied;
  for (int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; row < rows;
       row += int64_t{gridDim.x} * blockDim.y) {
    const Quotient first = divide(row, inner), second = divide(first.quotient, outer);
    const int64_t b = second.quotient, s = z.heads_first ? first.rest : second.rest;
    const int64_t group = z.heads_first ? second.rest : first.rest;
    const int64_t base = b * z.seq * z.heads * z.dim + s * row_step + group * head_step, step = groups * head_step;
    for (int64_t place = threadIdx.x; place < places; place += blockDim.x) {
      const int64_t j = place * n;
      const bool rotates = j < z.half;
      const int64_t one = rotates && !interleaved ? j : 2 * j, other = rotates && !interleaved ? j + z.half : 2 * j + n;
      const bool both = other < z.dim;
      Piece<T, n> p[kHeads][2];
#pragma unroll
      for (int k = 0; k < kHeads; ++k) {
        if (group + k * groups >= z.heads) continue;
        p[k][0].load(x + base + k * step + one);
        if (both) p[k][1].load(x + base + k * step + other);
      }
      if (rotates) {
        const int64_t at = table(b, s);
        Numbers<T, n> c, d;
        if (at >= 0) {
          c = load_table<T, W, n>(cos + at * z.width + j), d = load_table<T, W, n>(sin + at * z.width + j);
        } else {
#pragma unroll
          for (int i = 0; i < n; ++i) c.value[i] = d.value[i] = nanf("");
        }
#pragma unroll
        for (int i = 0; i < n; ++i) d.value[i] *= sign;
#pragma unroll
        for (int k = 0; k < kHeads; ++k) {
          if (group + k * groups >= z.heads) continue;
          Numbers<T, n> v[2] = {p[k][0].numbers(), p[k][1].numbers()};
#pragma unroll
          for (int i = 0; i < n; ++i) {
            // of interleaved pairs, n / 2 are in each piece
            auto &u = interleaved ? v[2 * i / n].value[2 * i % n] : v[0].value[i];
            auto &w = interleaved ? v[(2 * i + 1) / n].value[(2 * i + 1) % n] : v[1].value[i];
            const Accumulate<T> turned = u * c.value[i] - w * d.value[i];
            w = w * c.value[i] + u * d.value[i], u = turned;
          }
          p[k][0] = piece<T, n>(v[0]), p[k][1] = piece<T, n>(v[1]);
        }
      }
#pragma unroll
      for (int k = 0; k < kHeads; ++k) {
        if (group + k * groups >= z.heads) continue;
        p[k][0].store(y + base + k * step + one);
        if (both) p[k][1].store(y + base + k * step + other);
      }
    }
  }
}

// dcos and dsin, of which either may be null. A block takes a row of theirs, and a thread a column, whose terms it adds
// in the order of x's rows: those of the rows that have this position, which the block looks for together.
template <typename T, typename W, bool interleaved>
__global__ void __launch_bounds__(kRopeBlock)
    rope_sums_kernel(const T *dy, const T *x, W *dcos, W *dsin, TableRows table) {
  __shared__ unsigned found[kRopeBlock / 32];
  const RopeSizes &z = table.z;
  const int64_t lines = z.lines * z.seq, tiles = ceil_div(z.width, kRopeBlock);
  for (int64_t at = blockIdx.x; at < z.rows * tiles; at += gridDim.x) {
    const int64_t row = at / tiles, j = at % tiles * kRopeBlock + threadIdx.x;
    double c = 0, s = 0;
    const auto add = [&](int64_t line) {
      if (j >= z.half) return;
      const int64_t seq = line % z.seq, one = interleaved ? 2 * j : j, other = interleaved ? 2 * j + 1 : j + z.half;
      for (int64_t b = line / z.seq; b < z.batch; b += z.lines)
        for (int64_t h = 0; h < z.heads; ++h) {
          const int64_t i = z.dim * (z.heads_first ? (b * z.heads + h) * z.seq + seq : (b * z.seq + seq) * z.heads + h);
          const Accumulate<T> d0 = widen(dy[i + one]), d1 = widen(dy[i + other]), x0 = widen(x[i + one]),
                              x1 = widen(x[i + other]);
          c += d0 * x0 + d1 * x1, s += d1 * x0 - d0 * x1;
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

// ------------------------------------------------------------------------------------------------------- launchers

template <typename T, typename W, int n, bool interleaved, int kHeads>
Status launch_rope(const char *op, const T *x, const W *cos, const W *sin, T *y, const TableRows &table, int sign,
                   void *stream) {
  const RopeSizes &z = table.z;
  const int64_t places = z.half / n + ceil_div(z.dim - 2 * z.half, 2 * n);
  const auto width = static_cast<unsigned>(std::min<int64_t>(places, kRopeBlock));
  const unsigned height = kRopeBlock / width;
  const int64_t rows = z.batch * z.seq * ceil_div(z.heads, kHeads);
  return launch_kernel(op, rope_kernel<T, W, n, interleaved, kHeads>,
                       {grid_size(ceil_div(rows, height)), {width, height}}, stream, x, cos, sin, y, table,
                       static_cast<Accumulate<T>>(sign));
}

// Four heads for each number of the tables where each row has a row of theirs of its own; two where neighbouring rows
// share it, and the first cache.
template <typename T, typename W, bool interleaved>
Status run_rope(const char *op, const T *x, const W *cos, const W *sin, T *y, const TableRows &table, int sign,
                void *stream) {
  constexpr int n = kVectorSize<T>;
  const RopeSizes &z = table.z;
  const bool vectors = aligned(x, cos, sin, y) && z.half % n == 0 && z.dim % n == 0 && z.width % n == 0;
  if (!vectors) return launch_rope<T, W, 1, interleaved, 1>(op, x, cos, sin, y, table, sign, stream);
  if (z.heads_first && z.heads >= 4)
    return launch_rope<T, W, n, interleaved, 4>(op, x, cos, sin, y, table, sign, stream);
  if (z.heads >= 2) return launch_rope<T, W, n, interleaved, 2>(op, x, cos, sin, y, table, sign, stream);
  return launch_rope<T, W, n, interleaved, 1>(op, x, cos, sin, y, table, sign, stream);
}

template <typename T, typename W, bool interleaved>
Status run_rope_sums(const char *op, const T *dy, const T *x, W *dcos, W *dsin, const TableRows &table, void *stream) {
  const int64_t blocks = table.z.rows * ceil_div(table.z.width, kRopeBlock);
  if (!blocks) return kOk;
  return launch_kernel(op, rope_sums_kernel<T, W, interleaved>, {grid_size(blocks), kRopeBlock}, stream, dy, x, dcos,
                       dsin, table);
}

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

TableRows table_rows(const RopeAttrs &op, const Spec &x, const Spec &cos, const Tensor &positions) {
  return {positions ? positions.data : nullptr, positions.dtype == DType::int64, op.sizes(x, cos, positions)};
}

Status rope_cuda(const Rope &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &x = in[op.kX], &cos = in[op.kCos], &sin = in[op.kSin], &y = out[0];
  const TableRows table = table_rows(op, x, cos, in[op.kPositions]);
  return dispatch_rope(x.dtype, cos.dtype, op.interleaved, [&](auto type, auto of_table, auto interleaved) {
    using T = typename decltype(type)::type;
    using W = typename decltype(of_table)::type;
    return run_rope<T, W, interleaved.value>(op.name, x.as<const T>(), cos.as<const W>(), sin.as<const W>(), y.as<T>(),
                                             table, 1, stream);
  });
}

Status rope_backward_cuda(const RopeBackward &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &dy = in[op.kDy], &x = in[op.kX], &cos = in[op.kCos], &sin = in[op.kSin];
  const Tensor &dx = out[op.kDx], &dcos = out[op.kDcos], &dsin = out[op.kDsin];
  const TableRows table = table_rows(op, dy, cos, in[op.kPositions]);
  AOT_TRY(op.check_x(in, out));
  return dispatch_rope(dy.dtype, cos.dtype, op.interleaved, [&](auto type, auto of_table, auto interleaved) {
    using T = typename decltype(type)::type;
    using W = typename decltype(of_table)::type;
    constexpr bool kInterleaved = interleaved.value;
    // the sums first: dx may be dy
    if (dcos || dsin)
      AOT_TRY((run_rope_sums<T, W, kInterleaved>(op.name, dy.as<const T>(), x.as<const T>(), dcos.as<W>(), dsin.as<W>(),
                                                 table, stream)));
    if (!dx || !dx.size()) return kOk;
    return run_rope<T, W, kInterleaved>(op.name, dy.as<const T>(), cos.as<const W>(), sin.as<const W>(), dx.as<T>(),
                                        table, -1, stream);
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(Rope, aot_rope_cuda, rope_cuda)
AOT_ENTRY(RopeBackward, aot_rope_backward_cuda, rope_backward_cuda)
