#include "matmul.h"

#include "cpu/entry.h"
#include "gemm/matmul_cpu.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// ------------------------------------------------------------------------------------------------------- launchers

Status matmul_cpu(const Matmul &op, const Tensor *in, const Tensor *out, void *) {
  return run_matmul(op.name, op.y_problem(in[0], in[1], out[0]), Tensor());
}

Status matmul_backward_cpu(const MatmulBackward &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &dy = in[0], &a = in[1], &b = in[2], &da = out[0], &db = out[1], &scratch = out[2];
  AOT_TRY(op.check_scratch(in, out));
  if (da) AOT_TRY(run_matmul(op.name, op.da_problem(dy, a, b, da), scratch));
  if (db) AOT_TRY(run_matmul(op.name, op.db_problem(dy, a, b, db), scratch));
  return kOk;
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::Matmul, aot_matmul_cpu, aot::matmul_cpu)
AOT_CPU_ENTRY(aot::MatmulBackward, aot_matmul_backward_cpu, aot::matmul_backward_cpu)
