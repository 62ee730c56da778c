#include "rope_cpu.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// --------------------------------------------------------------------------------------------------------- loops

template <bool interleaved, bool stream, typename T, typename W>
void rotate_rows(const T *x, const W *cos, const W *sin, T *y, const TableRows &table, int64_t begin, int64_t end,
                 Accumulate<T> sign) {
  const RopeSizes z = table.z;
  const int64_t inner = z.heads_first ? z.seq : z.heads, outer = z.heads_first ? z.heads : z.seq;
  int64_t i = begin % inner, k = begin / inner % outer, b = begin / inner / outer;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t at = table(b, z.heads_first ? i : k) * z.width;
    rotate_head<interleaved, stream>(x + row * z.dim, cos + at, sin + at, y + row * z.dim, z.half, z.dim, sign);
    if (++i == inner) i = 0, ++k == outer ? k = 0, ++b : b;
  }
}

template <bool interleaved, typename T, typename W>
void rope_loop(const T *x, const W *cos, const W *sin, T *y, const TableRows &table, Accumulate<T> sign) {
  const RopeSizes z = table.z;
  const bool stream = streams(y, z);
  parallel_pieces(z.x_rows(), rows_per_task(z.x_rows(), z.dim), [=](int64_t begin, int64_t end) {
    if (!stream) return rotate_rows<interleaved, false>(x, cos, sin, y, table, begin, end, sign);
    rotate_rows<interleaved, true>(x, cos, sin, y, table, begin, end, sign);
    end_stream();
  });
}

// ----------------------------------------------------------------------------------------------------- launchers

Status rope_cpu(const Rope &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &x = in[op.kX], &cos = in[op.kCos], &sin = in[op.kSin];
  const TableRows table{in[op.kPositions], op.sizes(x, cos, in[op.kPositions])};
  AOT_TRY(table.check(op.name));
  return dispatch_rope(x.dtype, cos.dtype, op.interleaved, [&](auto zero, auto of_table, auto interleaved) {
    using T = decltype(zero);
    using W = decltype(of_table);
    rope_loop<interleaved.value>(x.as<const T>(), cos.as<const W>(), sin.as<const W>(), out[0].as<T>(), table,
                                 Accumulate<T>(1));
    return kOk;
  });
}

Status rope_backward_cpu(const RopeBackward &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &dy = in[op.kDy], &x = in[op.kX], &cos = in[op.kCos], &sin = in[op.kSin];
  const Tensor &dx = out[op.kDx], &dcos = out[op.kDcos], &dsin = out[op.kDsin];
  const TableRows table{in[op.kPositions], op.sizes(dy, cos, in[op.kPositions])};
  AOT_TRY(op.check_x(in, out));
  AOT_TRY(table.check(op.name));
  return dispatch_rope(dy.dtype, cos.dtype, op.interleaved, [&](auto zero, auto of_table, auto interleaved) {
    using T = decltype(zero);
    using W = decltype(of_table);
    if (dx)
      rope_loop<interleaved.value>(dy.as<const T>(), cos.as<const W>(), sin.as<const W>(), dx.as<T>(), table,
                                   Accumulate<T>(-1));
    if (dcos || dsin) {
      const auto heads = [z = table.z, d = dy.as<const T>(), v = x.as<const T>()](int64_t b, int64_t s, int64_t h) {
        const int64_t at = z.dim * (z.heads_first ? (b * z.heads + h) * z.seq + s : (b * z.seq + s) * z.heads + h);
        return std::pair(d + at, v + at);
      };
      rope_sums_loop<interleaved.value, T>(heads, dcos.as<W>(), dsin.as<W>(), table);
    }
    return kOk;
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::Rope, aot_rope_cpu, aot::rope_cpu)
AOT_CPU_ENTRY(aot::RopeBackward, aot_rope_backward_cpu, aot::rope_backward_cpu)
