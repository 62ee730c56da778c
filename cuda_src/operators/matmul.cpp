#include "matmul.h"

#include "cpu/entry.h"
#include "gemm/product_cpu.h"

namespace aot {
inline namespace AOT_ISA {

// ------------------------------------------------------------------------------------------------------- launchers

inline Status matmul_cpu(const Matmul &op, const Tensor *in, const Tensor *out, void *) {
  return multiply(op.name, op.forward(in[0], in[1], out[0]), Tensor());
}

inline Status matmul_backward_cpu(const MatmulBackward &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &dy = in[0], &a = in[1], &b = in[2], &da = out[0], &db = out[1], &scratch = out[2];
  AOT_TRY(op.check_scratch(in, out));
  if (da) AOT_TRY(multiply(op.name, op.gradient_a(dy, a, b, da), scratch));
  if (db) AOT_TRY(multiply(op.name, op.gradient_b(dy, a, b, db), scratch));
  return kOk;
}

}  // namespace AOT_ISA
}  // namespace aot

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::Matmul, aot_matmul_cpu, aot::matmul_cpu)
AOT_CPU_ENTRY(aot::MatmulBackward, aot_matmul_backward_cpu, aot::matmul_backward_cpu)
