#include "cuda/overlap.cuh"
#include "rope.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

// --------------------------------------------------------------------------------------------------------- kernels

// Places of all heads whose threads do not fill the device, if each has several heads.
constexpr int64_t kFewPlaces = 64 << 10;

// A thread takes one place in kHeads heads of a row of the sequence: two pieces of n elements of each, which are n
// pairs, or, behind those that are rotated, pieces to copy. So a number of the tables is read once for kHeads heads.
// threadIdx.x is the place; neighbouring threadIdx.y are neighbours in memory. Up to two heads are neighbours too, and
// are loaded before the divisions that find their row of the tables; others have heads_first, and are z.heads / kHeads
// apart. It overlaps the end of the kernel before, but not without vectors: blocks of kernels that do start more slowly
// (overlap.cuh), and those have little to do. Where heads are single and blocks few, so that a thread has one row, the
// divisions come before the wait: a call of 64 x 1 x 32 x 128 in bfloat16 took 1.12 us on an H200 instead of 1.42.
template <typename T, typename W, int n, bool interleaved, int kHeads>
__global__ void __launch_bounds__(kRopeBlock)
    rope_kernel(const T *x, const W *cos, const W *sin, T *y, TableRows table, Accumulate<T> sign) {
  constexpr bool kNear = kHeads <= 2, kMayBeFew = kHeads == 1 && n > 1;
  if constexpr (n > 1 && !kMayBeFew) wait_for_kernel_before(), launch_next();
  const RopeSizes &z = table.z;
  const int64_t groups = ceil_div(z.heads, kHeads), rows = z.batch * z.seq * groups;
  const int64_t inner = z.heads_first ? z.seq : groups, outer = z.heads_first ? groups : z.seq;
  const int places = static_cast<int>(head_places(z, n));
  [[maybe_unused]] const auto line_of = [&](int64_t row) {
    const Quotient first = divide(row, inner), second = divide(first.quotient, outer);
    return table.line(second.quotient, z.heads_first ? first.rest : second.rest);
  };
  [[maybe_unused]] const int64_t first_row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  [[maybe_unused]] const bool is_few = gridDim.x <= kFewPlaces / kRopeBlock;
  [[maybe_unused]] int64_t first_line = 0;
  if constexpr (kMayBeFew) {
    if (is_few) first_line = line_of(first_row);
    wait_for_kernel_before(), launch_next();
  }
  for (int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; row < rows;
       row += int64_t{gridDim.x} * blockDim.y) {
    int64_t b, s, group, base = row * kHeads * z.dim, step = z.dim;
    auto find = [&] {
      const Quotient first = divide(row, inner), second = divide(first.quotient, outer);
      b = second.quotient, s = z.heads_first ? first.rest : second.rest;
      group = z.heads_first ? second.rest : first.rest;
    };
    if constexpr (!kNear) {
      find();
      base = ((b * z.heads + group) * z.seq + s) * z.dim, step = groups * z.seq * z.dim;
    }
    const auto has = [&](int k) { return kNear || group + k * groups < z.heads; };
    for (int place = threadIdx.x; place < places; place += blockDim.x) {
      const PiecePlaces at = piece_places<n, interleaved>(place, z);
      const bool both = at.other < z.dim;
      Piece<T, n> p[kHeads][2];
#pragma unroll
      for (int k = 0; k < kHeads; ++k) {
        if (!has(k)) continue;
        p[k][0].load(x + base + k * step + at.one);
        if (both) p[k][1].load(x + base + k * step + at.other);
      }
      if (at.rotates) {
        Angles<interleaved, T, W, n> angles;
        if constexpr (kMayBeFew) {
          angles.load(cos, sin, table.row(is_few && row == first_row ? first_line : line_of(row)), z, place, sign);
        } else {
          if constexpr (kNear) find();
          angles.load(cos, sin, table(b, s), z, place, sign);
        }
#pragma unroll
        for (int k = 0; k < kHeads; ++k)
          if (has(k)) rotate<interleaved>(p[k], angles);
      }
#pragma unroll
      for (int k = 0; k < kHeads; ++k) {
        if (!has(k)) continue;
        p[k][0].store(y + base + k * step + at.one);
        if (both) p[k][1].store(y + base + k * step + at.other);
      }
    }
  }
}

// The heads of the sums that dcos and dsin are.
template <typename T>
struct RopeHeads {
  const T *dy, *x;
  RopeSizes z;

  __device__ auto operator()(int64_t b, int64_t s) const {
    return [=, *this](int64_t h) -> HeadPair<T> {
      const int64_t i = z.dim * (z.heads_first ? (b * z.heads + h) * z.seq + s : (b * z.seq + s) * z.heads + h);
      return {dy + i, x + i};
    };
  }
};

// ------------------------------------------------------------------------------------------------------- launchers

template <typename T, typename W, int n, bool interleaved, int kHeads>
Status launch_rope(const char *op, const T *x, const W *cos, const W *sin, T *y, const TableRows &table, int sign,
                   void *stream) {
  const RopeSizes &z = table.z;
  const auto width = static_cast<unsigned>(std::min<int64_t>(head_places(z, n), kRopeBlock));
  const unsigned height = kRopeBlock / width;
  const int64_t rows = z.batch * z.seq * ceil_div(z.heads, kHeads);
  return launch_kernel(op, rope_kernel<T, W, n, interleaved, kHeads>,
                       {grid_size(ceil_div(rows, height)), {width, height}, 0, 1, n > 1}, stream, x, cos, sin, y, table,
                       static_cast<Accumulate<T>>(sign));
}

// Four heads for each number of the tables where each row has a row of theirs of its own; two, or one, where
// neighbouring rows share it, and the first cache; one where places are few.
template <typename T, typename W, bool interleaved>
Status run_rope(const char *op, const T *x, const W *cos, const W *sin, T *y, const TableRows &table, int sign,
                void *stream) {
  constexpr int n = kVectorSize<T>;
  const RopeSizes &z = table.z;
  const bool vectors = aligned(x, cos, sin, y) && z.half % n == 0 && z.dim % n == 0 && z.width % n == 0;
  if (!vectors) return launch_rope<T, W, 1, interleaved, 1>(op, x, cos, sin, y, table, sign, stream);
  if (z.x_rows() * head_places(z, n) <= kFewPlaces)
    return launch_rope<T, W, n, interleaved, 1>(op, x, cos, sin, y, table, sign, stream);
  if (z.heads_first && z.heads >= 4)
    return launch_rope<T, W, n, interleaved, 4>(op, x, cos, sin, y, table, sign, stream);
  if (!z.heads_first && z.heads % 2 == 0)
    return launch_rope<T, W, n, interleaved, 2>(op, x, cos, sin, y, table, sign, stream);
  return launch_rope<T, W, n, interleaved, 1>(op, x, cos, sin, y, table, sign, stream);
}

Status rope_cuda(const Rope &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &x = in[op.kX], &cos = in[op.kCos], &sin = in[op.kSin], &y = out[0];
  const TableRows table = table_rows(in[op.kPositions], op.sizes(x, cos, in[op.kPositions]));
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
  const TableRows table = table_rows(in[op.kPositions], op.sizes(dy, cos, in[op.kPositions]));
  AOT_TRY(op.check_x(in, out));
  return dispatch_rope(dy.dtype, cos.dtype, op.interleaved, [&](auto type, auto of_table, auto interleaved) {
    using T = typename decltype(type)::type;
    using W = typename decltype(of_table)::type;
    constexpr bool kInterleaved = interleaved.value;
    // the sums first: dx may be dy
    if (dcos || dsin)
      AOT_TRY((run_rope_sums<T, W, kInterleaved>(op.name, RopeHeads<T>{dy.as<const T>(), x.as<const T>(), table.z},
                                                 dcos.as<W>(), dsin.as<W>(), table, stream)));
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
