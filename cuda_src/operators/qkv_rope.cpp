#include "qkv_rope.h"

#include "rope_cpu.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// --------------------------------------------------------------------------------------------------------- loops

// Heads begin to end of all packed rows. packs: from q, k and v, and not to them.
template <bool interleaved, bool stream, bool packs, typename T, typename W>
void move_heads(const HeadAddresses<T> &heads, const W *cos, const W *sin, const TableRows &table, int64_t begin,
                int64_t end) {
  const RopeSizes z = table.z;
  int64_t i = begin % z.heads, s = begin / z.heads % z.seq, b = begin / z.heads / z.seq;
  for (int64_t n = begin; n < end; ++n) {
    const PackedHeads::Place place = heads.order[i];
    const RowHeads<T> row = heads.row(b, s);
    T *const packed = row.in_packed(i), *const separate = row.in_separate(place);
    const T *const from = packs ? separate : packed;
    T *const to = packs ? packed : separate;
    const int64_t at = z.half ? table(b, s) * z.width : 0, half = place.tensor == 2 ? 0 : z.half;
    rotate_head<interleaved, stream>(from, cos + at, sin + at, to, half, z.dim, Accumulate<T>(packs ? -1 : 1));
    if (++i == z.heads) i = 0, ++s == z.seq ? s = 0, ++b : b;
  }
}

template <bool interleaved, bool packs, typename T, typename W>
void qkv_loop(const HeadAddresses<T> &heads, const W *cos, const W *sin, const TableRows &table) {
  const RopeSizes z = table.z;
  const bool whole = packs ? streams(heads.packed, z) : streams(heads.separate[0], z) && streams(heads.separate[1], z);
  const bool stream = z.half && whole;
  parallel_pieces(z.x_rows(), rows_per_task(z.x_rows(), z.dim), [=](int64_t begin, int64_t end) {
    if (!stream) return move_heads<interleaved, false, packs>(heads, cos, sin, table, begin, end);
    move_heads<interleaved, true, packs>(heads, cos, sin, table, begin, end);
    end_stream();
  });
}

// ----------------------------------------------------------------------------------------------------- launchers

Status qkv_rope_cpu(const QkvRope &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &qkv = in[op.kQkv], &cos = in[op.kCos], &sin = in[op.kSin];
  const TableRows table{in[op.kPositions], op.sizes(qkv, cos, in[op.kPositions])};
  AOT_TRY(table.check(op.name));
  return dispatch_rope(qkv.dtype, cos.dtype, op.interleaved, [&](auto zero, auto of_table, auto interleaved) {
    using T = decltype(zero);
    using W = decltype(of_table);
    qkv_loop<interleaved.value, false>(op.addresses<T>(table.z, qkv, out), cos.as<const W>(), sin.as<const W>(), table);
    return kOk;
  });
}

Status qkv_rope_backward_cpu(const QkvRopeBackward &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &qkv = in[op.kQkv], &cos = in[op.kCos], &sin = in[op.kSin];
  const Tensor &dqkv = out[op.kDqkv], &dcos = out[op.kDcos], &dsin = out[op.kDsin];
  Spec expected[3];
  AOT_TRY(op.infer(in, expected));
  const TableRows table{in[op.kPositions], op.sizes(expected[op.kDqkv], cos, in[op.kPositions])};
  AOT_TRY(op.check_qkv(in, out));
  AOT_TRY(table.check(op.name));
  return dispatch_rope(expected[op.kDqkv].dtype, cos.dtype, op.interleaved, [&](auto zero, auto of_table, auto turns) {
    using T = decltype(zero);
    using W = decltype(of_table);
    if (dqkv)
      qkv_loop<turns.value, true>(op.addresses<T>(table.z, dqkv, in), cos.as<const W>(), sin.as<const W>(), table);
    if (dcos || dsin) {
      const HeadAddresses<T> given = op.addresses<T>(table.z, qkv, in);
      const auto pair = [=](int64_t b, int64_t s, int64_t i) {
        const PackedHeads::Place place = given.order[i];
        const RowHeads<T> row = given.row(b, s);
        return std::pair<const T *, const T *>(place.tensor == 2 ? nullptr : row.in_separate(place), row.in_packed(i));
      };
      rope_sums_loop<turns.value, T>(pair, dcos.as<W>(), dsin.as<W>(), table);
    }
    return kOk;
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::QkvRope, aot_qkv_rope_cpu, aot::qkv_rope_cpu)
AOT_CPU_ENTRY(aot::QkvRopeBackward, aot_qkv_rope_backward_cpu, aot::qkv_rope_backward_cpu)
