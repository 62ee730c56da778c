#include "adamw.h"

#include "cuda/launch.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

// --------------------------------------------------------------------------------------------------------- kernels

constexpr int kBlock = 128, kSteps = 4;  // kSteps: the groups of elements that a thread takes, one after the other

// The lists of a launch, of `count` tensors: of addresses, one behind the other, and where each tensor's blocks end.
// Drivers before 530 take 4 KiB of parameters.
enum List { kParam, kGrad, kExpAvg, kExpAvgSq, kStep, kSize, kOptional };  // then max_exp_avg_sq, then master
constexpr int kTableBytes = 3968;

struct Batch {
  double lr, log_beta1, log_beta2;
  double beta1, rest1, beta2, rest2, eps, weight_decay;
  const float *lr_number, *grad_scale, *found_inf;
  float *next_step;  // null: the steps count this one
  int count, lists;
  bool amsgrad, master, unscale, maximize;
  uint64_t table[kTableBytes / 8];

  __host__ __device__ uint64_t &at(int list, int i) { return table[list * count + i]; }
  __device__ uint64_t at(int list, int i) const { return table[list * count + i]; }
  template <typename T>
  __device__ T *address(int list, int i) const {
    return reinterpret_cast<T *>(at(list, i));
  }
  __host__ __device__ const uint32_t *ends() const { return reinterpret_cast<const uint32_t *>(table + lists * count); }
  uint32_t *ends() { return reinterpret_cast<uint32_t *>(table + lists * count); }
};
static_assert(sizeof(Batch) <= 4096);

// A group: the elements of a thread's load of 16 bytes of the wider of two types, so that a warp's loads have no gaps.
template <typename P, typename S>
constexpr int kGroup = 16 / (sizeof(P) > sizeof(S) ? sizeof(P) : sizeof(S));

template <typename P, typename S>
constexpr int64_t kBlockElements = int64_t{kBlock} * kSteps * kGroup<P, S>;

template <typename T, int n>
struct Pack {
  static constexpr int kWords = n * sizeof(T) / 4;
  uint32_t word[kWords];
};

// Volatile, as load_once (cuda/vector.cuh).
template <int n, typename T>
__device__ inline Pack<T, n> load_pack(const T *p) {
  Pack<T, n> pack;
  if constexpr (Pack<T, n>::kWords == 2) {
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(pack.word[0]), "=r"(pack.word[1]) : "l"(p) : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < Pack<T, n>::kWords; i += 4)
      reinterpret_cast<Vector<T> &>(pack.word[i]) = load_once(p + i * 4 / sizeof(T));
  }
  return pack;
}

template <typename T, int n>
__device__ inline void store_pack(T *p, const Pack<T, n> &pack) {
  if constexpr (Pack<T, n>::kWords == 2) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(pack.word[0]), "r"(pack.word[1]) : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < Pack<T, n>::kWords; i += 4)
      store(p + i * 4 / sizeof(T), reinterpret_cast<const Vector<T> &>(pack.word[i]));
  }
}

template <typename T, int n>
__device__ inline void widen_pack(const Pack<T, n> &pack, Accumulate<T> (&x)[n]) {
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < n; i += 2) {
      float pair[2];
      widen_word(pack.word[i / 2], pair, T());
      x[i] = pair[0], x[i + 1] = pair[1];
    }
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = reinterpret_cast<const T(&)[n]>(pack.word)[i];
  }
}

template <typename T, int n>
__device__ inline Pack<T, n> narrow_pack(const Accumulate<T> (&x)[n]) {
  Pack<T, n> pack;
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < n; i += 2) pack.word[i / 2] = narrow_word(x[i], x[i + 1], T());
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i) reinterpret_cast<T(&)[n]>(pack.word)[i] = x[i];
  }
  return pack;
}

// The numbers of a step on one tensor, of which each is rounded once.
template <typename A>
struct Numbers {
  A beta1, rest1, beta2, rest2, decay, step_size, root, eps, grad_factor;
};

template <typename A>
__device__ inline Numbers<A> numbers(const Batch &call, float step) {
  const double lr = call.lr_number ? *call.lr_number : call.lr;
  const double correction1 = -expm1(step * call.log_beta1), correction2 = -expm1(step * call.log_beta2);
  const double factor = call.grad_scale ? 1 / static_cast<double>(*call.grad_scale) : 1.0;
  return {A(call.beta1),
          A(call.rest1),
          A(call.beta2),
          A(call.rest2),
          A(lr * call.weight_decay),
          A(lr / correction1),
          A(1 / sqrt(correction2)),
          A(call.eps),
          A(call.maximize ? -factor : factor)};
}

__device__ inline double root(double x, double) { return sqrt(x); }
__device__ inline float root(float x, float) { return sqrtf(x); }
template <typename P>
__device__ inline float root(float x, P) {  // its error of an ulp of float32 is far below one of 16 bits
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline double quotient(double a, double b, double) { return a / b; }
__device__ inline float quotient(float a, float b, float) { return a / b; }
template <typename P>
__device__ inline float quotient(float a, float b, P) {
  return __fdividef(a, b);
}

// One element: `g` becomes the unscaled gradient, `most` the largest exp_avg_sq.
template <typename P, typename A>
__device__ inline void update(const Numbers<A> &k, bool amsgrad, A &p, A &g, A &m, A &v, A &most) {
  g *= k.grad_factor;
  p -= k.decay * p;
  m = k.beta1 * m + k.rest1 * g;
  v = k.beta2 * v + k.rest2 * g * g;
  if (!amsgrad || !(most >= v)) most = v;  // a NaN stays one
  p -= quotient(k.step_size * m, root(most, P()) * k.root + k.eps, P());
}

template <typename P, typename S>
struct Arrays {
  P *param, *grad;
  S *exp_avg, *exp_avg_sq, *max_exp_avg_sq;
  float *master;
};

template <typename P, typename S>
__device__ inline void update_element(const Batch &call, const Arrays<P, S> &to, const Numbers<Accumulate<P>> &k,
                                      int64_t i) {
  using A = Accumulate<P>;
  A p = call.master ? static_cast<A>(to.master[i]) : widen(to.param[i]), g = widen(to.grad[i]);
  A m = widen(to.exp_avg[i]), v = widen(to.exp_avg_sq[i]), most = call.amsgrad ? widen(to.max_exp_avg_sq[i]) : A();
  update<P>(k, call.amsgrad, p, g, m, v, most);
  if (call.unscale) to.grad[i] = narrow<P>(call.maximize ? -g : g);
  if (call.master) to.master[i] = p;
  if (call.amsgrad) to.max_exp_avg_sq[i] = narrow<S>(most);
  to.param[i] = narrow<P>(p), to.exp_avg[i] = narrow<S>(m), to.exp_avg_sq[i] = narrow<S>(v);
}

template <typename P, typename S>
struct Group {
  static constexpr int n = kGroup<P, S>;
  Pack<P, n> param, grad;
  Pack<S, n> exp_avg, exp_avg_sq, max_exp_avg_sq;
  Pack<float, n> master;

  __device__ void load(const Batch &call, const Arrays<P, S> &from, int64_t i) {
    grad = load_pack<n>(from.grad + i);
    exp_avg = load_pack<n>(from.exp_avg + i), exp_avg_sq = load_pack<n>(from.exp_avg_sq + i);
    if (sizeof(P) == 2 && call.master) master = load_pack<n>(from.master + i);
    else param = load_pack<n>(from.param + i);
    if (call.amsgrad) max_exp_avg_sq = load_pack<n>(from.max_exp_avg_sq + i);
  }

  __device__ void update_and_store(const Batch &call, const Arrays<P, S> &to, const Numbers<Accumulate<P>> &k,
                                   int64_t i) const {
    using A = Accumulate<P>;
    A p[n], g[n], m[n], v[n], most[n] = {};
    widen_pack(grad, g), widen_pack(exp_avg, m), widen_pack(exp_avg_sq, v);
    if constexpr (sizeof(P) == 2) {
      if (call.master) widen_pack(master, p);
      else widen_pack(param, p);
    } else {
      widen_pack(param, p);
    }
    if (call.amsgrad) widen_pack(max_exp_avg_sq, most);
#pragma unroll
    for (int j = 0; j < n; ++j) update<P>(k, call.amsgrad, p[j], g[j], m[j], v[j], most[j]);
    store_pack(to.exp_avg + i, narrow_pack<S>(m)), store_pack(to.exp_avg_sq + i, narrow_pack<S>(v));
    store_pack(to.param + i, narrow_pack<P>(p));
    if constexpr (sizeof(P) == 2)
      if (call.master) store_pack(to.master + i, narrow_pack<float>(p));
    if (call.amsgrad) store_pack(to.max_exp_avg_sq + i, narrow_pack<S>(most));
    if (call.unscale) {
      if (call.maximize)
        for (int j = 0; j < n; ++j) g[j] = -g[j];
      store_pack(to.grad + i, narrow_pack<P>(g));
    }
  }
};

// Whether T's groups of n elements can be loaded from the element `first` on.
template <int n, typename T>
__device__ inline bool reaches_boundary(const T *p, int64_t first) {
  constexpr int kBytes = n * sizeof(T) < 16 ? n * sizeof(T) : 16;
  return reinterpret_cast<uintptr_t>(p + first) % kBytes == 0;
}

// The tensor of a block: the first whose blocks end behind it.
__device__ inline int tensor_of(const Batch &call, unsigned block) {
  const uint32_t *ends = call.ends();
  int low = 0, high = call.count - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] > block) high = middle;
    else low = middle + 1;
  }
  return low;
}

template <typename P, typename S>
__global__ void __launch_bounds__(kBlock) adamw_kernel(const __grid_constant__ Batch call) {
  using A = Accumulate<P>;
  constexpr int n = kGroup<P, S>;
  const bool skip = call.found_inf && *call.found_inf != 0;
  float step = 0;
  if (call.next_step) {
    step = *call.address<float>(kStep, 0) + 1;
    if (blockIdx.x == 0 && threadIdx.x == 0) *call.next_step = skip ? step - 1 : step;
  }
  if (skip) return;
  const int tensor = tensor_of(call, blockIdx.x);
  const unsigned first_block = tensor ? call.ends()[tensor - 1] : 0, blocks = call.ends()[tensor] - first_block;
  const unsigned block = blockIdx.x - first_block;
  const int64_t size = call.at(kSize, tensor);
  Arrays<P, S> to = {call.address<P>(kParam, tensor), call.address<P>(kGrad, tensor), call.address<S>(kExpAvg, tensor),
                     call.address<S>(kExpAvgSq, tensor)};
  if (call.amsgrad) to.max_exp_avg_sq = call.address<S>(kOptional, tensor);
  if (call.master) to.master = call.address<float>(kOptional + call.amsgrad, tensor);

  __shared__ Numbers<A> shared;
  if (threadIdx.x == 0) shared = numbers<A>(call, call.next_step ? step : *call.address<float>(kStep, tensor));

  // Elements before the first boundary of the narrower type's groups; all of them where the arrays' differ.
  int64_t head = 0;
  while (head < n && !reaches_boundary<n>(to.param, head)) ++head;
  bool together = reaches_boundary<n>(to.param, head) && reaches_boundary<n>(to.grad, head) &&
                  reaches_boundary<n>(to.exp_avg, head) && reaches_boundary<n>(to.exp_avg_sq, head);
  if (call.amsgrad) together = together && reaches_boundary<n>(to.max_exp_avg_sq, head);
  if (call.master) together = together && reaches_boundary<n>(to.master, head);
  if (!together || head > size) head = size;
  const int64_t groups = (size - head) / n, first = int64_t{block} * kBlock * kSteps + threadIdx.x;

  Group<P, S> group;
  if (first < groups) group.load(call, to, head + first * n);  // in flight while the numbers are computed
  __syncthreads();
  const Numbers<A> k = shared;
  if (first < groups) group.update_and_store(call, to, k, head + first * n);
#pragma unroll 1
  for (int j = 1; j < kSteps; ++j) {
    const int64_t at = first + j * kBlock;
    if (at >= groups) break;
    group.load(call, to, head + at * n);
    group.update_and_store(call, to, k, head + at * n);
  }

  const int64_t thread = int64_t{block} * kBlock + threadIdx.x, threads = int64_t{blocks} * kBlock;
#pragma unroll 1
  for (int64_t i = thread; i < head; i += threads) update_element(call, to, k, i);
#pragma unroll 1
  for (int64_t i = head + groups * n + thread; i < size; i += threads) update_element(call, to, k, i);
}

// Adds 1 to each step, before the kernel that reads it in many blocks.
constexpr int kMostSteps = 480;
struct Steps {
  const float *found_inf;
  int count;
  float *step[kMostSteps];
};
static_assert(sizeof(Steps) <= 4096);

__global__ void __launch_bounds__(kBlock) advance_kernel(const __grid_constant__ Steps steps) {
  const int i = blockIdx.x * kBlock + threadIdx.x;
  if (i < steps.count && !(steps.found_inf && *steps.found_inf != 0)) *steps.step[i] += 1;
}

// ------------------------------------------------------------------------------------------------------- launchers

Status advance(const AdamwTensors &call, cudaStream_t stream) {
  for (int64_t first = 0; first < call.count; first += kMostSteps) {
    Steps steps;
    steps.found_inf = call.found_inf;
    steps.count = static_cast<int>(std::min<int64_t>(call.count - first, kMostSteps));
    std::copy_n(call.step + first, steps.count, steps.step);
    advance_kernel<<<static_cast<unsigned>(ceil_div(steps.count, kBlock)), kBlock, 0, stream>>>(steps);
    AOT_TRY(check_launch(Adamw::name));
  }
  return kOk;
}

Batch batch_of(const AdamwTensors &call, float *next_step) {
  Batch batch;
  batch.next_step = next_step;
  batch.lr = call.lr, batch.eps = call.eps, batch.weight_decay = call.weight_decay;
  batch.log_beta1 = std::log(call.beta1), batch.beta1 = call.beta1, batch.rest1 = 1 - call.beta1;
  batch.log_beta2 = std::log(call.beta2), batch.beta2 = call.beta2, batch.rest2 = 1 - call.beta2;
  batch.lr_number = call.lr_number, batch.grad_scale = call.grad_scale, batch.found_inf = call.found_inf;
  batch.amsgrad = call.max_exp_avg_sq, batch.master = call.master;
  batch.unscale = call.unscale && call.grad_scale, batch.maximize = call.maximize;
  batch.lists = kOptional + batch.amsgrad + batch.master;
  return batch;
}

// Adds the tensors from `first` on to a launch, empty ones excepted; returns the blocks they need.
template <typename P, typename S>
uint32_t fill(const AdamwTensors &call, int64_t first, Batch *batch) {
  uint32_t blocks = 0;
  for (int i = 0; i < batch->count; ++i) {
    const int64_t tensor = first + i, size = call.sizes[tensor];
    int list = 0;
    for (void *address : {call.param[tensor], call.grad[tensor], call.exp_avg[tensor], call.exp_avg_sq[tensor],
                          static_cast<void *>(call.step[tensor])})
      batch->at(list++, i) = reinterpret_cast<uint64_t>(address);
    batch->at(list++, i) = static_cast<uint64_t>(size);
    if (batch->amsgrad) batch->at(list++, i) = reinterpret_cast<uint64_t>(call.max_exp_avg_sq[tensor]);
    if (batch->master) batch->at(list++, i) = reinterpret_cast<uint64_t>(call.master[tensor]);
    blocks += static_cast<uint32_t>(ceil_div(size, kBlockElements<P, S>));
    batch->ends()[i] = blocks;
  }
  return blocks;
}

template <typename P, typename S>
Status launch(const AdamwTensors &call, float *next_step, cudaStream_t stream) {
  Batch batch = batch_of(call, next_step);
  const int most = kTableBytes / (8 * batch.lists + 4);
  for (int64_t first = 0; first < call.count; first += batch.count) {
    batch.count = static_cast<int>(std::min<int64_t>(call.count - first, most));
    const uint32_t blocks = fill<P, S>(call, first, &batch);
    if (!blocks && !next_step) continue;
    adamw_kernel<P, S><<<blocks ? blocks : 1, kBlock, 0, stream>>>(batch);
    AOT_TRY(check_launch(Adamw::name));
  }
  return kOk;
}

// next_step: of one tensor's operator, where this kernel counts the step itself.
Status launch_adamw(const AdamwTensors &call, float *next_step, cudaStream_t stream) {
  const DType dtype = parse_dtype(call.dtype), state = parse_dtype(call.state_dtype);
  return dispatch(dtype, [&](auto type) {
    using P = typename decltype(type)::type;
    if (state == dtype) return launch<P, P>(call, next_step, stream);
    if constexpr (sizeof(P) == 8) return kOk;
    else
      return state == DType::float32 ? launch<P, float>(call, next_step, stream)
                                     : launch<P, __nv_bfloat16>(call, next_step, stream);
  });
}

// Makes a device current for the length of a call.
class OnDevice {
 public:
  Status enter(int device) {
    int current = -1;
    AOT_TRY(check_cuda(Adamw::name, cudaGetDevice(&current)));
    if (current == device) return kOk;
    AOT_TRY(check_cuda(Adamw::name, cudaSetDevice(device)));
    return previous_ = current, kOk;
  }
  ~OnDevice() {
    if (previous_ >= 0) cudaSetDevice(previous_);
  }

 private:
  int previous_ = -1;
};

Status adamw_tensors(const AdamwTensors &call) {
  AOT_TRY(check(call));
  OnDevice guard;
  AOT_TRY(guard.enter(call.device));
  const auto stream = static_cast<cudaStream_t>(call.stream);
  AOT_TRY(advance(call, stream));
  return launch_adamw(call, nullptr, stream);
}

Status adamw_cuda(const Adamw &op, const Tensor *in, const Tensor *out, void *stream) {
  float *step = in[4].as<float>();
  const int64_t size = in[0].size();
  AdamwTensors call = {};
  call.count = 1, call.sizes = &size, call.step = &step;
  call.param = &in[0].data, call.grad = &in[1].data, call.exp_avg = &in[2].data, call.exp_avg_sq = &in[3].data;
  call.lr_number = in[5].as<float>(), call.grad_scale = in[6].as<float>(), call.found_inf = in[7].as<float>();
  call.beta1 = op.beta1, call.beta2 = op.beta2, call.eps = op.eps, call.weight_decay = op.weight_decay;
  call.maximize = op.maximize, call.dtype = dtype_name(in[0].dtype), call.state_dtype = dtype_name(in[2].dtype);
  return launch_adamw(call, out[0].as<float>(), static_cast<cudaStream_t>(stream));
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(Adamw, aot_adamw_cuda, adamw_cuda)

AOT_API int aot_adamw_tensors_cuda(const AdamwTensors *call) { return adamw_tensors(*call); }
