#include "qkv_rope.h"

#include "rope.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

// --------------------------------------------------------------------------------------------------------- kernels

// The loads of more heads at a time take registers that the multiprocessor's other warps need: 4 heads run at 0.94 of
// the rate.
constexpr int kHeadsOfThread = 2;

// A thread takes one place in kHeads heads of a packed row, as rope's kernel does, and copies that of v. Neighbouring
// threadIdx.y are neighbours in the packed row. packs: from q, k and v, and not to them.
template <typename T, typename W, int n, bool interleaved, int kHeads>
__global__ void __launch_bounds__(kRopeBlock)
    qkv_rope_kernel(HeadAddresses<T> heads, const W *cos, const W *sin, TableRows table, bool packs) {
  const RopeSizes &z = table.z;
  const int64_t groups = ceil_div(z.heads, kHeads), rows = z.batch * z.seq * groups;
  const int places = static_cast<int>(head_places(z, n));
  for (int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; row < rows;
       row += int64_t{gridDim.x} * blockDim.y) {
    const Quotient first = divide(row, groups), second = divide(first.quotient, z.seq);
    const int64_t b = second.quotient, s = second.rest, group = first.rest;
    const RowHeads<T> given = heads.row(b, s);
    const T *from[kHeads];
    T *to[kHeads];
    bool turns[kHeads];
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
      const int64_t i = group + k * groups;
      if (i >= z.heads) continue;
      const PackedHeads::Place place = heads.order[i];
      T *const packed = given.in_packed(i), *const separate = given.in_separate(place);
      from[k] = packs ? separate : packed, to[k] = packs ? packed : separate;
      turns[k] = place.tensor < 2;
    }
    for (int place = threadIdx.x; place < places; place += blockDim.x) {
      const PiecePlaces at = piece_places<n, interleaved>(place, z);
      const bool both = at.other < z.dim;
      Piece<T, n> p[kHeads][2];
#pragma unroll
      for (int k = 0; k < kHeads; ++k) {
        if (group + k * groups >= z.heads) continue;
        p[k][0].load(from[k] + at.one);
        if (both) p[k][1].load(from[k] + at.other);
      }
      if (at.rotates) {
        Angles<interleaved, T, W, n> angles;
        angles.load(cos, sin, table(b, s), z, place, static_cast<Accumulate<T>>(packs ? -1 : 1));
#pragma unroll
        for (int k = 0; k < kHeads; ++k)
          if (group + k * groups < z.heads && turns[k]) rotate<interleaved>(p[k], angles);
      }
#pragma unroll
      for (int k = 0; k < kHeads; ++k) {
        if (group + k * groups >= z.heads) continue;
        p[k][0].store(to[k] + at.one);
        if (both) p[k][1].store(to[k] + at.other);
      }
    }
  }
}

// The heads of the sums that dcos and dsin are: of q and k alone.
template <typename T>
struct QkvHeads {
  HeadAddresses<T> given;

  __device__ auto operator()(int64_t b, int64_t s) const {
    return [order = given.order, row = given.row(b, s)](int64_t i) -> HeadPair<T> {
      const PackedHeads::Place place = order[i];
      return {place.tensor == 2 ? nullptr : row.in_separate(place), row.in_packed(i)};
    };
  }
};

// ------------------------------------------------------------------------------------------------------- launchers

template <typename T, typename W, int n, bool interleaved, int kHeads>
Status launch_qkv(const char *op, const HeadAddresses<T> &heads, const W *cos, const W *sin, const TableRows &table,
                  bool packs, void *stream) {
  const RopeSizes &z = table.z;
  const auto width = static_cast<unsigned>(std::min<int64_t>(head_places(z, n), kRopeBlock));
  const unsigned height = kRopeBlock / width;
  const int64_t rows = z.batch * z.seq * ceil_div(z.heads, kHeads);
  return launch_kernel(op, qkv_rope_kernel<T, W, n, interleaved, kHeads>,
                       {grid_size(ceil_div(rows, height)), {width, height}}, stream, heads, cos, sin, table, packs);
}

template <typename T, typename W, bool interleaved>
Status run_qkv(const char *op, const HeadAddresses<T> &heads, const W *cos, const W *sin, const TableRows &table,
               bool packs, void *stream) {
  constexpr int n = kVectorSize<T>;
  const RopeSizes &z = table.z;
  const bool whole = z.half % n == 0 && z.dim % n == 0 && z.width % n == 0;
  if (whole && aligned(heads.packed, heads.separate[0], heads.separate[1], heads.separate[2], cos, sin))
    return launch_qkv<T, W, n, interleaved, kHeadsOfThread>(op, heads, cos, sin, table, packs, stream);
  return launch_qkv<T, W, 1, interleaved, 1>(op, heads, cos, sin, table, packs, stream);
}

Status qkv_rope_cuda(const QkvRope &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &qkv = in[op.kQkv], &cos = in[op.kCos], &sin = in[op.kSin];
  const TableRows table = table_rows(in[op.kPositions], op.sizes(qkv, cos, in[op.kPositions]));
  return dispatch_rope(qkv.dtype, cos.dtype, op.interleaved, [&](auto type, auto of_table, auto interleaved) {
    using T = typename decltype(type)::type;
    using W = typename decltype(of_table)::type;
    return run_qkv<T, W, interleaved.value>(op.name, op.addresses<T>(table.z, qkv, out), cos.as<const W>(),
                                            sin.as<const W>(), table, false, stream);
  });
}

Status qkv_rope_backward_cuda(const QkvRopeBackward &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &qkv = in[op.kQkv], &cos = in[op.kCos], &sin = in[op.kSin];
  const Tensor &dqkv = out[op.kDqkv], &dcos = out[op.kDcos], &dsin = out[op.kDsin];
  Spec expected[3];
  AOT_TRY(op.infer(in, expected));
  AOT_TRY(op.check_qkv(in, out));
  const Spec &packed = expected[op.kDqkv];
  const TableRows table = table_rows(in[op.kPositions], op.sizes(packed, cos, in[op.kPositions]));
  return dispatch_rope(packed.dtype, cos.dtype, op.interleaved, [&](auto type, auto of_table, auto interleaved) {
    using T = typename decltype(type)::type;
    using W = typename decltype(of_table)::type;
    constexpr bool kInterleaved = interleaved.value;
    if (dqkv && dqkv.size())
      AOT_TRY((run_qkv<T, W, kInterleaved>(op.name, op.addresses<T>(table.z, dqkv, in), cos.as<const W>(),
                                           sin.as<const W>(), table, true, stream)));
    if (!dcos && !dsin) return kOk;
    return run_rope_sums<T, W, kInterleaved>(op.name, QkvHeads<T>{op.addresses<T>(table.z, qkv, in)}, dcos.as<W>(),
                                             dsin.as<W>(), table, stream);
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(QkvRope, aot_qkv_rope_cuda, qkv_rope_cuda)
AOT_ENTRY(QkvRopeBackward, aot_qkv_rope_backward_cuda, qkv_rope_backward_cuda)
