// batch_norm and batch_norm_relu on a GPU: launchers that both operators call. Kernels are in batch_norm.cu, compiled
// once.
#pragma once
#include "batch_norm.h"
#include "cuda/launch.cuh"

namespace aot {
inline namespace AOT_ISA {

// A call in any dtype. Absent tensors are null.
struct BatchNormCall {
  const char *op;
  ChannelShape shape;
  double eps;
  NormActivation activation;
  bool wide;  // parameters are float beside 16 bits
  const void *x, *weight, *bias, *residual;
  void *y, *mean, *var, *work;
  cudaStream_t stream;
};

struct BatchNormBackwardCall {
  const char *op;
  ChannelShape shape;
  double eps;
  NormActivation activation;
  bool wide;
  const void *dy, *dmean, *dvar, *x, *weight, *mean, *var;
  const void *bias;  // of an activation
  const void *y;     // of batch_norm_relu, else null
  void *dx, *dweight, *dbias, *dresidual, *work;
  cudaStream_t stream;
};

Status run_batch_norm(DType dtype, const BatchNormCall &call);
Status run_batch_norm_backward(DType dtype, const BatchNormBackwardCall &call);

inline bool has_wide_parameters(const Tensor &x, const Tensor &weight) {
  return weight && weight.dtype == DType::float32 && x.dtype != DType::float32;
}

template <class Op>
Status batch_norm_cuda(const Op &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &x = in[Op::kX], &weight = in[Op::kWeight], &work = out[Op::kWork];
  if (!work) return fail(kConventionMisused, "%s: workspace is missing", Op::name);
  const void *residual = nullptr;
  if constexpr (Op::kRelu) residual = in[Op::kResidual].data;
  return run_batch_norm(
      x.dtype, {Op::name, op.shape(x), op.eps, op.activation(), has_wide_parameters(x, weight), x.data, weight.data,
                in[Op::kBias].data, residual, out[Op::kY].data, out[Op::kMean].data, out[Op::kVar].data, work.data,
                static_cast<cudaStream_t>(stream)});
}

template <class Op>
Status batch_norm_backward_cuda(const Op &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &x = in[Op::kX], &weight = in[Op::kWeight], &work = out[Op::kWork];
  if (!work) return fail(kConventionMisused, "%s: workspace is missing", Op::name);
  const void *y = nullptr, *bias = nullptr;
  void *dresidual = nullptr;
  if constexpr (Op::kRelu) y = in[Op::kY].data, dresidual = out[Op::kDresidual].data;
  else bias = in[Op::kBias].data;
  const ChannelShape shape = op.shape(x);
  return run_batch_norm_backward(x.dtype, {Op::name,
                                           shape,
                                           op.gradient_eps(shape),
                                           op.activation(),
                                           has_wide_parameters(x, weight),
                                           in[Op::kDy].data,
                                           in[Op::kDmean].data,
                                           in[Op::kDvar].data,
                                           x.data,
                                           weight.data,
                                           in[Op::kMean].data,
                                           in[Op::kVar].data,
                                           bias,
                                           y,
                                           out[Op::kDx].data,
                                           out[Op::kDweight].data,
                                           out[Op::kDbias].data,
                                           dresidual,
                                           work.data,
                                           static_cast<cudaStream_t>(stream)});
}

}  // namespace AOT_ISA
}  // namespace aot
