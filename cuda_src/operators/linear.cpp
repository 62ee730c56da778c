#include "linear.h"

#include "cpu/entry.h"
#include "cpu/gelu.h"
#include "gemm/product_cpu.h"

namespace aot {
inline namespace AOT_ISA {

// ------------------------------------------------------------------------------------------------------ formulas

template <typename T>
Vec<T> activate(Vec<T> x, Activation activation) {
  switch (activation) {
    case kActivationRelu:
      return x < 0 ? Vec<T>{} : x;  // NaN stays NaN
    case kActivationGelu:
      return ExactGelu<T>(x).value(x);
    case kActivationGeluTanh:
      return TanhGelu<T>(x).value(x);
    case kActivationSilu:
      return x * Logistic<T>(x).value;
    default:
      return x;
  }
}

// dy times the slope at x. relu's is 1 at NaN, and what it stops is 0 also where dy is not finite.
template <typename T>
Vec<T> activation_gradient(Vec<T> dy, Vec<T> x, Activation activation) {
  switch (activation) {
    case kActivationRelu:
      return x <= 0 ? Vec<T>{} : dy;
    case kActivationGelu:
      return dy * ExactGelu<T>(x).slope(x);
    case kActivationGeluTanh:
      return dy * TanhGelu<T>(x).slope(x);
    default: {
      const Logistic<T> s(x);
      return dy * (s.value + x * s.slope());
    }
  }
}

// --------------------------------------------------------------------------------------------------------- loops

// What is done with a sum before it is stored.
template <typename T>
struct Finish {
  const T *bias;
  T *before;
  int64_t n;
  Activation activation;

  template <class P>
  Vec<T> operator()(Vec<T> sum, int64_t i, int64_t j, P part) const {
    if (bias) sum += load(bias + j, part);
    if (before) store(before + i * n + j, sum, part);
    return activate<T>(sum, activation);
  }
};

template <typename T>
void slope_loop(const T *dy, const T *before, T *dx, int64_t n, Activation activation) {
  map(dx, n, [=](int64_t i, auto part) {
    return activation_gradient<T>(load(dy + i, part), load(before + i, part), activation);
  });
}

template <typename T>
Status forward_rows(const Product &p, Finish<T> finish) {
  auto matrix = [](const Operand &x) { return Matrix<T>{static_cast<const T *>(x.data), x.stride, x.transposed}; };
  return gemm(p.m, p.n, p.k, matrix(p.a), matrix(p.b), static_cast<T *>(p.c.data), p.c.stride, false, finish);
}

// ----------------------------------------------------------------------------------------------------- launchers

inline Status linear_cpu(const Linear &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &x = in[0], &weight = in[1], &bias = in[2], &y = out[0], &before = out[1];
  return dispatch_floating(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Product p = LinearProducts(x, weight).forward(x, weight, y.data);
    T *kept = op.activation() && before ? before.as<T>() : nullptr;
    return forward_rows<T>(p, {bias ? bias.as<T>() : nullptr, kept, p.n, op.activation()});
  });
}

inline Status linear_backward_cpu(const LinearBackward &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &dy = in[0], &x = in[1], &weight = in[2], &bias = in[3], &before = in[4];
  const Tensor &dx = out[0], &dweight = out[1], &dbias = out[2], &scratch = out[3];
  if (op.activation() && !scratch) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  return dispatch_floating(x.dtype, [&](auto zero) -> Status {
    using T = decltype(zero);
    const LinearProducts products(x, weight);
    T *slope = dy.as<T>();  // the gradient of what goes into the activation
    if (op.activation()) {
      slope = static_cast<T *>(scratch.data);
      if (!before)
        AOT_TRY(forward_rows<T>(products.forward(x, weight, slope),
                                {bias ? bias.as<T>() : nullptr, nullptr, products.out, kActivationNone}));
      slope_loop(dy.as<T>(), before ? before.as<T>() : slope, slope, dy.size(), op.activation());
    }
    if (dx) AOT_TRY(multiply(op.name, products.gradient_x(slope, weight, dx), scratch));
    if (dweight) AOT_TRY(multiply(op.name, products.gradient_weight(slope, x, dweight), scratch));
    if (dbias) sum_columns(slope, products.rows, products.out, dbias.as<T>());
    return kOk;
  });
}

}  // namespace AOT_ISA
}  // namespace aot

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::Linear, aot_linear_cpu, aot::linear_cpu)
AOT_CPU_ENTRY(aot::LinearBackward, aot_linear_backward_cpu, aot::linear_backward_cpu)
