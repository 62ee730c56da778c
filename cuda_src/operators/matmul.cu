#include "matmul.h"

#include "gemm/gemm.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// ------------------------------------------------------------------------------------------------------- launchers

Status matmul_cuda(const Matmul &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &a = in[0], &b = in[1], &y = out[0], &scratch = out[1];
  return run_matmul(op.name, op.y_problem(a, b, y), op.allow_tf32, scratch, 0, 0, static_cast<cudaStream_t>(stream));
}

Status matmul_backward_cuda(const MatmulBackward &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &dy = in[0], &a = in[1], &b = in[2], &da = out[0], &db = out[1], &scratch = out[2];
  const int64_t first = op.scratch_da(a, b, dy), sums = first + op.scratch_db(a, b, dy);
  auto *s = static_cast<cudaStream_t>(stream);
  AOT_TRY(op.check_scratch(in, out));
  if (da) AOT_TRY(run_matmul(op.name, op.da_problem(dy, a, b, da), op.allow_tf32, scratch, 0, sums, s));
  if (db) AOT_TRY(run_matmul(op.name, op.db_problem(dy, a, b, db), op.allow_tf32, scratch, first, sums, s));
  return kOk;
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(Matmul, aot_matmul_cuda, matmul_cuda)
AOT_ENTRY(MatmulBackward, aot_matmul_backward_cuda, matmul_backward_cuda)
