#include "linear.h"

#include "cpu/entry.h"
#include "cpu/gelu.h"
#include "gemm/matmul_cpu.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// ------------------------------------------------------------------------------------------------------ formulas

// dy * activation'(x). relu'(NaN) is 1; where relu' is 0, the result is 0 even if dy is not finite.
template <typename T>
Vec<T> activation_gradient(Vec<T> dy, Vec<T> x, Activation activation) {
  switch (activation) {
    case kActivationRelu:
      return x <= 0 ? Vec<T>{} : dy;
    case kActivationGelu:
      return ExactGelu<T>(x).gradient(dy, x);
    case kActivationGeluTanh:
      return TanhGelu<T>(x).gradient(dy, x);
    default:
      return Logistic<T>(x).silu_gradient(dy, x);
  }
}

// --------------------------------------------------------------------------------------------------------- loops

template <typename T>
struct LinearEpilogue {
  const T *bias;
  T *pre_activation;
  int64_t n;
  Activation activation;

  static constexpr bool kBlocks = true;

  void store_block(int64_t row, int64_t column, int64_t rows, int64_t cols, const Accumulate<T> *sums, int64_t stride,
                   T *y, int64_t ldy) const {
    const auto all = [=](auto activated) {
      for (int64_t i = 0; i < rows; ++i)
        sweep<T>(cols, [=, sums = sums + i * stride, y = y + i * ldy](int64_t j, auto part) AOT_INLINED {
          Vec<T> v = load(sums + j, part);
          if (bias) v += load(bias + column + j, part);
          if (pre_activation) store(pre_activation + (row + i) * n + column + j, v, part);
          store(y + j, activated(v), part);
        });
    };
    switch (activation) {
      case kActivationNone:
        return all([](Vec<T> x) AOT_INLINED { return x; });
      case kActivationRelu:
        return all([](Vec<T> x) AOT_INLINED { return x < 0 ? Vec<T>{} : x; });  // NaN stays NaN
      case kActivationGelu:
        return all([](Vec<T> x) AOT_INLINED { return ExactGelu<T>(x).value(x); });
      case kActivationGeluTanh:
        return all([](Vec<T> x) AOT_INLINED { return TanhGelu<T>(x).value(x); });
      case kActivationSilu:
        return all([](Vec<T> x) AOT_INLINED { return Logistic<T>(x).times(x); });
    }
  }
};

template <typename T>
Status forward_rows(const MatmulProblem &p, LinearEpilogue<T> epilogue) {
  return multiply(1, [&](int64_t) {
    return CpuGemm<T, T, LinearEpilogue<T>>{
        p.m, p.n, p.k, matrix<T>(p.a), matrix<T>(p.b), static_cast<T *>(p.c.data), p.c.stride, false, epilogue};
  });
}

// ----------------------------------------------------------------------------------------------------- launchers

Status linear_cpu(const Linear &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &x = in[0], &weight = in[1], &bias = in[2], &y = out[0], &pre_activation = out[1];
  return dispatch_floating(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const MatmulProblem p = LinearMatmuls(x, weight).forward(y.data);
    T *kept = op.activation() ? pre_activation.as<T>() : nullptr;
    return forward_rows<T>(p, {bias.as<T>(), kept, p.n, op.activation()});
  });
}

Status backward(const LinearBackward &op, const char *name, const Tensor *in, const Tensor &dx, const Tensor &dweight,
                bool adds, const Tensor &dbias, const Tensor &scratch) {
  const Tensor &dy = in[0], &x = in[1], &weight = in[2], &bias = in[3], &pre_activation = in[4];
  if (op.activation() && !scratch) return fail(kConventionMisused, "%s: workspace is missing", name);
  return dispatch_floating(x.dtype, [&](auto zero) -> Status {
    using T = decltype(zero);
    const LinearMatmuls matmuls(x, weight);
    T *dz = dy.as<T>();  // the gradient of the pre-activation
    if (op.activation()) {
      dz = static_cast<T *>(scratch.data);
      if (!pre_activation)
        AOT_TRY(forward_rows<T>(matmuls.forward(dz), {bias.as<T>(), nullptr, matmuls.out, kActivationNone}));
      const T *from = dy.as<T>(), *z = pre_activation ? pre_activation.as<T>() : dz;
      map(dz, dy.size(), [=, activation = op.activation()](int64_t i, auto part) {
        return activation_gradient<T>(load(from + i, part), load(z + i, part), activation);
      });
    }
    if (dx) AOT_TRY(run_matmul(name, matmuls.dx(dz, dx), scratch));
    if (dweight) AOT_TRY(run_matmul(name, matmuls.dweight(dz, dweight, adds), scratch));
    if (dbias) sum_columns(dz, matmuls.rows, matmuls.out, dbias.as<T>());
    return kOk;
  });
}

Status linear_backward_cpu(const LinearBackward &op, const Tensor *in, const Tensor *out, void *) {
  return backward(op, op.name, in, out[0], out[1], false, out[2], out[3]);
}

Status linear_accumulate_cpu(const LinearAccumulate &op, const Tensor *in, const Tensor *out, void *) {
  return backward(op, op.name, in, out[0], in[5], true, out[1], out[2]);
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::Linear, aot_linear_cpu, aot::linear_cpu)
AOT_CPU_ENTRY(aot::LinearBackward, aot_linear_backward_cpu, aot::linear_backward_cpu)
AOT_CPU_ENTRY(aot::LinearAccumulate, aot_linear_accumulate_cpu, aot::linear_accumulate_cpu)
