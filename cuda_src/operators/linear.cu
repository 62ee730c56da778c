#include "linear.h"

#include "gemm/activation_backward.cuh"
#include "gemm/copy_lines.cuh"
#include "gemm/gemm_odd_lines.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// A matrix with rows of n elements.
template <typename T>
struct Rows {
  T *data;
  int64_t line;  // the stride
};

// dz, if pre_activation is not null, and the sums of parts of its rows, if partials are not. *parts: how many.
template <typename T>
Status sum_rows(const char *op, const T *dy, Rows<const T> pre_activation, Rows<T> dz, Accumulate<T> *partials,
                int *parts, int64_t rows, int64_t n, Activation activation, cudaStream_t stream) {
  DeviceLimits limits;
  AOT_TRY(device_limits(op, &limits));
  auto first = [&](auto vectors, auto shape) {
    using Shape = decltype(shape);
    constexpr bool kVectors = decltype(vectors)::value;
    const int64_t columns = ceil_div(n, 32 * (kVectors ? kVectorSize<T> : 1));
    const int64_t useful = ceil_div(rows, Shape::kWarps * Shape::kLoads);
    const int64_t at_once = int64_t{limits.multiprocessors} * kColumnSumBlocks<T, Shape> / columns;
    *parts = static_cast<int>(std::clamp<int64_t>(std::min(at_once, useful), 1, LinearBackward::parts(n)));
    const dim3 grid(grid_size(columns), *parts), block(32, Shape::kWarps);
    return launch_kernel(op, column_sums_kernel<T, kVectors, Shape>, {grid, block}, stream, dy, pre_activation.data,
                         dz.data, partials, rows, n, activation, pre_activation.line, dz.line);
  };
  auto of_shape = [&](auto shape) {
    const bool vectors = n % kVectorSize<T> == 0 && aligned(dy, pre_activation.data, dz.data);
    return vectors ? first(std::true_type(), shape) : first(std::false_type(), shape);
  };
  return pre_activation.data ? of_shape(SlopeShape()) : of_shape(SumShape());
}

template <typename T>
CopiedLines copy_of(const T *dy, Rows<T> to, int64_t rows, int64_t n) {
  return {reinterpret_cast<const uint16_t *>(dy), reinterpret_cast<uint16_t *>(to.data), rows, n, n, to.line};
}

// dz, and the sum of its rows, if `sum` is not null. Without a pre_activation dz is dy, and then null, or a copy with
// longer lines, which is made here where there are sums.
template <typename T>
Status activation_backward(const char *op, const T *dy, Rows<const T> pre_activation, Rows<T> dz, T *sum,
                           Accumulate<T> *partials, int64_t rows, int64_t n, Activation activation,
                           cudaStream_t stream) {
  if (n == 0) return kOk;
  int parts = static_cast<int>(LinearBackward::parts(n));
  const bool copies = sizeof(T) == 2 && !activation && dz.data;
  if (!sum) partials = nullptr;
  if constexpr (sizeof(T) == 2)
    if (copies) AOT_TRY(copy_and_sum_lines<T>(op, copy_of(dy, dz, rows, n), partials, &parts, stream));
  if (!copies && (pre_activation.data || sum))
    AOT_TRY(sum_rows(op, dy, pre_activation, dz, partials, &parts, rows, n, activation, stream));
  if (!sum) return kOk;
  const dim3 grid(grid_size(ceil_div(n, 32))), block(32, kPartWarps);
  return launch_kernel(op, sum_parts_kernel<T>, {grid, block, 0, 1, true}, stream, partials, parts, sum, n);
}

GemmParams gemm_params(const MatmulProblem &p, bool allow_tf32, char *workspace, int64_t workspace_bytes) {
  GemmParams g = {p.dtype, p.c_dtype(), p.m, p.n, p.k, p.a, p.b, p.c};
  g.adds = p.adds, g.allow_tf32 = allow_tf32, g.workspace = workspace,
  g.workspace_bytes = workspace ? workspace_bytes : 0;
  return g;
}

// What is copied of a call's matrices: nothing without a workspace, which vectors are written to.
LinearLines lines_of(const Tensor &x, const Tensor &weight, int products, const Tensor &scratch) {
  LinearLines lines(x, weight, products);
  if (!scratch || !aligned(scratch.as<char>())) lines.copies_out = lines.copies_in = false;
  return lines;
}

// x and weight of the products become the copies in the workspace, those that are wanted, behind which it goes on.
// copies: to be made. How many.
template <typename A>
int place_inputs(const LinearLines &lines, bool x, bool weight, LinearMatmuls *matmuls, A **workspace,
                 CopiedLines *copies) {
  if (!lines.copies_in) return 0;
  int count = 0;
  auto place = [&](bool wanted, Operand &x, int64_t rows, int64_t elements) {
    const Operand from = x;
    if (wanted) {
      x = {*workspace, lines.in_line()};
      copies[count++] = {static_cast<const uint16_t *>(from.data),
                         static_cast<uint16_t *>(x.data),
                         rows,
                         lines.in,
                         from.stride,
                         x.stride};
    }
    *workspace += elements;
  };
  place(x, matmuls->x, lines.rows, lines.x_elements());
  place(weight, matmuls->weight, lines.out, lines.weight_elements());
  return count;
}

// The zeros behind the copies' lines are multiplied too, so that no size is odd.
MatmulProblem forward_of(const LinearMatmuls &matmuls, const LinearLines &lines, void *y) {
  MatmulProblem p = matmuls.forward(y);
  if (lines.copies_in) p.k = ceil_div(p.k, 8) * 8;
  return p;
}

Status linear_cuda(const Linear &op, const Tensor *in, const Tensor *out, void *stream_) {
  const Tensor &x = in[0], &weight = in[1], &bias = in[2], &y = out[0], &pre_activation = out[1], &scratch = out[2];
  auto *stream = static_cast<cudaStream_t>(stream_);
  LinearMatmuls matmuls(x, weight);
  auto *begin = scratch.as<char>(), *end = begin + scratch.size() * itemsize(accumulate_dtype(x.dtype));
  const LinearLines lines = lines_of(x, weight, 1, scratch);
  if (scratch) {
    auto *words = reinterpret_cast<float *>(begin);
    CopiedLines copies[kMostCopies];
    AOT_TRY(copy_lines(op.name, copies, place_inputs(lines, true, true, &matmuls, &words, copies), stream));
    begin = reinterpret_cast<char *>(words);
  }
  GemmParams g = gemm_params(forward_of(matmuls, lines, y.data), op.allow_tf32, begin, end - begin);
  g.bias = bias.data, g.activation = op.activation(),
  g.pre_activation = op.activation() ? pre_activation.data : nullptr;
  return gemm(op.name, g, stream);
}

Status backward(const LinearBackward &op, const char *name, const Tensor *in, const Tensor &dx, const Tensor &dweight,
                bool adds, const Tensor &dbias, const Tensor &scratch, void *stream_) {
  const Tensor &dy = in[0], &x = in[1], &weight = in[2], &bias = in[3], &pre_activation = in[4];
  auto *stream = static_cast<cudaStream_t>(stream_);
  LinearMatmuls matmuls(x, weight);
  if ((op.activation() || dbias) && !scratch) return fail(kConventionMisused, "%s: workspace is missing", name);
  const LinearLines lines = lines_of(x, weight, 2, scratch);
  return dispatch(x.dtype, [&](auto type) -> Status {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    A *partials = scratch.as<A>() + (scratch ? op.grad_elements(dy, lines) : 0),
      *library_scratch = partials + op.partial_elements(matmuls.out);
    const bool recomputes = op.activation() && !pre_activation;
    void *const of_weight = library_scratch + lines.x_elements();
    CopiedLines copies[kMostCopies];
    int copied = place_inputs(lines, dweight || recomputes, dx || recomputes, &matmuls, &library_scratch, copies);
    const int64_t library_bytes =
        scratch ? (scratch.as<A>() + scratch.size() - library_scratch) * int64_t(sizeof(A)) : 0;
    auto run = [&](const MatmulProblem &p, const void *with_bias) {
      if (!p.m || !p.n) return kOk;
      GemmParams g = gemm_params(
          p, op.allow_tf32, library_bytes > 0 ? reinterpret_cast<char *>(library_scratch) : nullptr, library_bytes);
      g.bias = with_bias;
      return gemm(name, g, stream);
    };
    bool pads = false, copies_dy = false;
    if (dweight && lines.copies_in && !adds) {
      matmuls.out_line = lines.out_line();
      const GemmParams g = gemm_params(matmuls.dweight(dy.data, dweight, false), op.allow_tf32, nullptr, 0);
      AOT_TRY(padding_pays(name, g, &pads));
      matmuls.out_line = matmuls.out;
    }
    Rows<T> dz = {dy.as<T>(), matmuls.out};  // the gradient of the pre-activation
    const bool makes_dz = op.activation() || lines.copies_out;
    if (makes_dz) dz = {scratch.as<T>(), lines.out_line()};
    if (lines.copies_out && !op.activation()) {  // or without the copy
      const int64_t of_copy = lines.dy_elements() * int64_t(sizeof(A));
      const GemmParams of_dx = gemm_params(matmuls.dx(dy.data, dx), op.allow_tf32, scratch.as<char>(), of_copy),
                       of_dweight = gemm_params(matmuls.dweight(dy.data, dweight, adds), op.allow_tf32,
                                                scratch.as<char>(), of_copy),
                       *const with_dx = dx ? &of_dx : nullptr, *const with_dweight = dweight ? &of_dweight : nullptr;
      bool done = false;
      AOT_TRY(odd_lines_pay(name, with_dx, with_dweight, bool(dbias), pads, &done));
      if (done) {
        AOT_TRY(copy_lines(name, copies, copied, stream));
        copied = 0;
        AOT_TRY(gemm_odd_lines(name, with_dx, with_dweight, dbias.data, stream, &done));
        if (done) return kOk;
      }
      copies_dy = !dbias;  // whose sums come with the copy
      if (copies_dy) copies[copied++] = copy_of(dy.as<T>(), dz, matmuls.rows, matmuls.out);
    }
    AOT_TRY(copy_lines(name, copies, copied, stream));
    Rows<const T> z = {nullptr, matmuls.out};
    matmuls.out_line = dz.line;
    if (op.activation()) {
      if (pre_activation) z.data = pre_activation.as<T>();
      else z = {dz.data, dz.line};
      if (recomputes) AOT_TRY(run(forward_of(matmuls, lines, dz.data), bias.data));
    }
    if (!copies_dy)
      AOT_TRY(activation_backward<T>(name, dy.as<T>(), z, {makes_dz ? dz.data : nullptr, dz.line}, dbias.as<T>(),
                                     partials, matmuls.rows, matmuls.out, op.activation(), stream));
    if (dx) AOT_TRY(run(matmuls.dx(dz.data, dx), nullptr));
    if (!dweight) return kOk;
    MatmulProblem p = matmuls.dweight(dz.data, dweight, adds);
    if (!pads) return run(p, nullptr);
    p.m = ceil_div(p.m, 8) * 8, p.n = ceil_div(p.n, 8) * 8;  // the copies' lines are as long
    p.c = {of_weight, p.n};                                  // whose copy dx has used
    AOT_TRY(run(p, nullptr));
    return copy_rows(name, of_weight, p.n, dweight.data, matmuls.out, matmuls.in, stream);
  });
}

Status linear_backward_cuda(const LinearBackward &op, const Tensor *in, const Tensor *out, void *stream) {
  return backward(op, op.name, in, out[0], out[1], false, out[2], out[3], stream);
}

Status linear_accumulate_cuda(const LinearAccumulate &op, const Tensor *in, const Tensor *out, void *stream) {
  return backward(op, op.name, in, out[0], in[5], true, out[1], out[2], stream);
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(Linear, aot_linear_cuda, linear_cuda)
AOT_ENTRY(LinearBackward, aot_linear_backward_cuda, linear_backward_cuda)
AOT_ENTRY(LinearAccumulate, aot_linear_accumulate_cuda, linear_accumulate_cuda)
