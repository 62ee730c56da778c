#include "attention_float.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

template <int kDim>
struct FloatShapes;
template <>
struct FloatShapes<64> {
  using Y = FloatShape<64, 1, 4, 32, 3>;
  using Dq = FloatShape<64, 1, 4, 32, 3>;
  using Dkv = FloatShape<64, 1, 4, 32, 3>;
};
template <>
struct FloatShapes<128> {
  using Y = FloatShape<128, 1, 4, 32, 2>;
  using Dq = FloatShape<128, 1, 4, 32, 2>;
  using Dkv = FloatShape<128, 1, 4, 16, 2>;
};
template <>
struct FloatShapes<256> {
  using Y = FloatShape<256, 1, 4, 16, 2>;
};

template <int kDim>
Status run_y(const char *op, const AttentionInputs<float> &x, float *y, float *lse, void *stream) {
  using Shape = typename FloatShapes<kDim>::Y;
  static_assert(Shape::shared(1) <= kMmaShared);
  return launch_mma<Shape>(op, attention_float_y_kernel<Shape>, x.z.batch * x.z.heads, x.z.queries, Shape::shared(1),
                           stream, x, y, lse);
}

template <int kDim>
Status run_gradients(const char *op, const AttentionInputs<float> &x, float *dq, float *dk, float *dv, void *stream) {
  const AttentionSizes &z = x.z;
  using Dq = typename FloatShapes<kDim>::Dq;
  using Dkv = typename FloatShapes<kDim>::Dkv;
  static_assert(Dq::shared(2) <= kMmaShared && Dkv::shared(2) <= kMmaShared);
  if (dq)
    AOT_TRY(
        launch_mma<Dq>(op, attention_float_dq_kernel<Dq>, z.batch * z.heads, z.queries, Dq::shared(2), stream, x, dq));
  if (!dk && !dv) return kOk;
  return launch_mma<Dkv>(op, attention_float_dkv_kernel<Dkv>, z.batch * z.kv_heads, z.keys, Dkv::shared(2), stream, x,
                         dk, dv);
}

}  // namespace

// Sums of fewer than 16 terms would be less exact than float32's, by what each term loses.
bool attention_float_takes(const AttentionInputs<float> &x, bool forward, bool one_pass) {
  const int64_t dim = std::max(x.z.dim, x.z.v_dim), least = std::min(x.z.dim, x.z.v_dim);
  const bool fits = least >= 16 && x.z.dim % 4 == 0 && x.z.v_dim % 4 == 0 && std::max(x.z.queries, x.z.keys) <= 1 << 30;
  if (x.extra.dropout) return fits && forward && dim <= 128;
  return fits && dim <= (forward || one_pass ? 256 : 128);
}

Status attention_float(const char *op, const AttentionInputs<float> &x, float *y, float *lse, void *stream) {
  const int64_t dim = std::max(x.z.dim, x.z.v_dim);
  const auto run = dim <= 64 ? run_y<64> : dim <= 128 ? run_y<128> : run_y<256>;
  return run(op, x, y, lse, stream);
}

Status attention_float_backward(const char *op, const AttentionInputs<float> &x, float *dq, float *dk, float *dv,
                                void *stream) {
  const auto run = std::max(x.z.dim, x.z.v_dim) <= 64 ? run_gradients<64> : run_gradients<128>;
  return run(op, x, dq, dk, dv, stream);
}

}  // namespace AOT_ISA
}  // namespace aot
