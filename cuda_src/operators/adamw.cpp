#include "adamw.h"

#include "cpu/entry.h"
#include "cpu/parallel.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// --------------------------------------------------------------------------------------------------------- loops

template <typename V>
AOT_INLINE V root(V v) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<V, Vec<float>>) return (V)_mm512_sqrt_ps((__m512)v);
  else return (V)_mm512_sqrt_pd((__m512d)v);
#elif defined(__AVX__)
  if constexpr (std::is_same_v<V, Vec<float>>) return (V)_mm256_sqrt_ps((__m256)v);
  else return (V)_mm256_sqrt_pd((__m256d)v);
#elif defined(__x86_64__)
  if constexpr (std::is_same_v<V, Vec<float>>) return (V)_mm_sqrt_ps((__m128)v);
  else return (V)_mm_sqrt_pd((__m128d)v);
#else
  constexpr int lanes = sizeof(V) / sizeof(v[0]);
  for (int i = 0; i < lanes; ++i) v[i] = std::sqrt(v[i]);
  return v;
#endif
}

// The numbers of a step on one tensor, of which each is rounded once.
template <typename A>
struct Numbers {
  A beta1, rest1, beta2, rest2, decay, step_size, root, eps, grad_factor;
};

template <typename A>
Numbers<A> numbers(const AdamwTensors &call, double step) {
  const double lr = call.lr_number ? *call.lr_number : call.lr;
  const double correction1 = -std::expm1(step * std::log(call.beta1));
  const double correction2 = -std::expm1(step * std::log(call.beta2));
  const double factor = call.grad_scale ? 1 / static_cast<double>(*call.grad_scale) : 1.0;
  return {A(call.beta1),
          A(1 - call.beta1),
          A(call.beta2),
          A(1 - call.beta2),
          A(lr * call.weight_decay),
          A(lr / correction1),
          A(1 / std::sqrt(correction2)),
          A(call.eps),
          A(call.maximize ? -factor : factor)};
}

template <typename P, typename S>
struct Arrays {
  P *param, *grad;
  S *exp_avg, *exp_avg_sq, *max_exp_avg_sq;
  float *master;
};

template <bool amsgrad, bool master, typename P, typename S>
[[gnu::noinline]] void adamw_loop(const Arrays<P, S> &to, int64_t begin, int64_t end, const Numbers<Accumulate<P>> &k,
                                  bool unscale, bool maximize) {
  sweep<P>(end - begin, [=](int64_t j, auto part) {
    const int64_t i = begin + j;
    const Vec<P> g = load(to.grad + i, part) * k.grad_factor;
    if (unscale) store(to.grad + i, maximize ? -g : g, part);
    Vec<P> p;
    if constexpr (master) p = load(to.master + i, part);
    else p = load(to.param + i, part);
    p -= k.decay * p;
    const Vec<P> m = k.beta1 * load(to.exp_avg + i, part) + k.rest1 * g;
    Vec<P> v = k.beta2 * load(to.exp_avg_sq + i, part) + k.rest2 * g * g;
    store(to.exp_avg + i, m, part);
    store(to.exp_avg_sq + i, v, part);
    if constexpr (amsgrad) {
      const Vec<P> most = load(to.max_exp_avg_sq + i, part);
      v = most >= v ? most : v;  // a NaN stays one
      store(to.max_exp_avg_sq + i, v, part);
    }
    p -= k.step_size * m / (root(v) * k.root + k.eps);
    if constexpr (master) store(to.master + i, p, part);
    store(to.param + i, p, part);
  });
}

// ----------------------------------------------------------------------------------------------------- launchers

template <typename P, typename S>
void adamw_tensor(const AdamwTensors &call, int64_t i, int64_t begin, int64_t end) {
  const Arrays<P, S> to = {static_cast<P *>(call.param[i]),
                           static_cast<P *>(call.grad[i]),
                           static_cast<S *>(call.exp_avg[i]),
                           static_cast<S *>(call.exp_avg_sq[i]),
                           call.max_exp_avg_sq ? static_cast<S *>(call.max_exp_avg_sq[i]) : nullptr,
                           call.master ? call.master[i] : nullptr};
  const auto k = numbers<Accumulate<P>>(call, *call.step[i]);
  auto *loop = to.max_exp_avg_sq ? adamw_loop<true, false, P, S> : adamw_loop<false, false, P, S>;
  if constexpr (sizeof(P) == 2)
    if (to.master) loop = to.max_exp_avg_sq ? adamw_loop<true, true, P, S> : adamw_loop<false, true, P, S>;
  loop(to, begin, end, k, call.unscale && call.grad_scale, call.maximize);
}

template <typename P, typename S>
Status adamw_list(const AdamwTensors &call) {
  int64_t total = 0;
  for (int64_t i = 0; i < call.count; ++i) *call.step[i] += 1, total += call.sizes[i];
  parallel_pieces(total, kGrain, [&](int64_t begin, int64_t end) {  // of all tensors, one behind the other
    for (int64_t i = 0, first = 0; first < end; first += call.sizes[i++])
      if (first + call.sizes[i] > begin)
        adamw_tensor<P, S>(call, i, begin > first ? begin - first : 0,
                           end - first < call.sizes[i] ? end - first : call.sizes[i]);
  });
  return kOk;
}

Status adamw_tensors(const AdamwTensors &call) {
  AOT_TRY(check(call));
  if (call.found_inf && *call.found_inf != 0) return kOk;
  const DType state = parse_dtype(call.state_dtype);
  return dispatch_floating(parse_dtype(call.dtype), [&](auto zero) {
    using P = decltype(zero);
    if (state == parse_dtype(call.dtype)) return adamw_list<P, P>(call);
    if constexpr (std::is_same_v<P, double>) return kOk;
    else return state == DType::float32 ? adamw_list<P, float>(call) : adamw_list<P, bfloat16>(call);
  });
}

Status adamw_cpu(const Adamw &op, const Tensor *in, const Tensor *out, void *) {
  float *next = out[0].as<float>();
  *next = *in[4].as<float>();
  const int64_t size = in[0].size();
  AdamwTensors call = {};
  call.count = 1, call.sizes = &size, call.step = &next;
  call.param = &in[0].data, call.grad = &in[1].data, call.exp_avg = &in[2].data, call.exp_avg_sq = &in[3].data;
  call.lr_number = in[5].as<float>(), call.grad_scale = in[6].as<float>(), call.found_inf = in[7].as<float>();
  call.beta1 = op.beta1, call.beta2 = op.beta2, call.eps = op.eps, call.weight_decay = op.weight_decay;
  call.maximize = op.maximize, call.dtype = dtype_name(in[0].dtype), call.state_dtype = dtype_name(in[2].dtype);
  return adamw_tensors(call);
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::Adamw, aot_adamw_cpu, aot::adamw_cpu)

// As AOT_CPU_ENTRY, for a function of an AdamwTensors.
#if !AOT_PASTE(AOT_IS_, AOT_ISA)
AOT_HIDDEN int AOT_PASTE(aot_adamw_tensors_, AOT_ISA)(const aot::AdamwTensors *call) {
  return aot::adamw_tensors(*call);
}
#else

#if defined(__x86_64__)
AOT_HIDDEN __attribute__((weak)) int aot_adamw_tensors_avx2(const aot::AdamwTensors *call);
AOT_HIDDEN __attribute__((weak)) int aot_adamw_tensors_avx512(const aot::AdamwTensors *call);
#endif

AOT_API int aot_adamw_tensors_cpu(const aot::AdamwTensors *call) {
#if defined(__x86_64__)
  const aot::CpuIsa isa = aot::cpu_isa();
  if (isa >= aot::kAvx512 && aot_adamw_tensors_avx512) return aot_adamw_tensors_avx512(call);
  if (isa >= aot::kAvx2 && aot_adamw_tensors_avx2) return aot_adamw_tensors_avx2(call);
#endif
  return aot::adamw_tensors(*call);
}

#endif
