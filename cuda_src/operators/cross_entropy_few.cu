// A forward of cross entropy whose rows are few: a single block counts them, computes their losses and slopes, and adds
// the losses up. Many rows take two or three kernels, whose latencies are all that few rows cost.
#include "cross_entropy.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

// ---------------------------------------------------------------------------------------------------------- kernel

// A warp for each row, which stays in registers.
template <typename T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(32 * kFewRows, 1)
    cross_entropy_few_kernel(const T *x, Targets targets, Loss<T> loss, T *slope, bool mean, bool divides, A z_loss,
                             A *lse, Indices predictions, int cols, Smoothing<A> smoothing) {
  using E = CappedAs<T>;  // of exact exponentials, because lse is in float32
  constexpr int kElements = kFewCols / 32;
  __shared__ A losses[kFewRows];
  wait_for_kernel_before();
  launch_next();
  const int lane = lane_index(), row = warp_index(), rows = blockDim.x / 32;
  const T *from = x + row * cols + lane;
  A v[kElements];
#pragma unroll
  for (int e = 0; e < kElements; ++e) v[e] = 32 * e + lane < cols ? widen(from[32 * e]) : A(kMinusInfinity);
  const int64_t target = lane < rows ? targets[lane] : targets.ignore_index;
  const A count = __popc(__ballot_sync(~0u, target != targets.ignore_index));
  const Class c(__shfl_sync(~0u, target, row), targets.ignore_index, cols);
  const int column = static_cast<int>(c.column()) - lane;  // from this lane's first
  const bool mine = column % 32 == 0;

  Exponentials<A> s = Exponentials<A>::none();
#pragma unroll
  for (A x : v) s.max = max(s.max, x);
  s.max = max_lanes<32>(s.max);
  const A base = s.base();
  const ShiftedExp<E, A> exponential(base);
  A at_target = 0;
  int first = Best<A>::kNone;  // the column of the maximum
#pragma unroll
  for (int e = kElements - 1; e >= 0; --e) {
    if (v[e] == s.max) first = 32 * e + lane;
    if (32 * e == column) at_target = v[e];
    if (32 * e + lane < cols) s.shifted_sum += v[e] - base;
    const A value = exponential(v[e]);  // past the row's end it is 0
    s.sum += value;
    if constexpr (sizeof(T) > 2) v[e] = value;
  }
  s.sum = sum_lanes<32>(s.sum), s.count = cols;
  if (smoothing.total != 0) s.shifted_sum = sum_lanes<32>(s.shifted_sum);
  const RowWithExtras<A> with(s, at_target, c, smoothing, A(1), z_loss, divides ? 1 / count : A(1), false, A(0));
  if (mine) losses[row] = with.loss;
  if (mine && lse) lse[row] = with.lse;
  if (predictions.data) {
    if (s.sum != s.sum) {  // a NaN may be in the row, and comes first
      int found = Best<A>::kNone;
#pragma unroll 1
      for (int e = kElements - 1; e >= 0; --e) {
        const A value = 32 * e + lane < cols ? widen(from[32 * e]) : A(0);
        if (value != value) found = 32 * e + lane;
      }
      if (__any_sync(~0u, found != Best<A>::kNone)) first = found;
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) first = min(first, __shfl_xor_sync(~0u, first, offset));
    if (mine) predictions.write(row, first == Best<A>::kNone ? 0 : first);
  }
  if (slope) {
    const Probability<E, A> p(s, 1, with.of_p);
    T *to = slope + row * cols + lane;
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const A value = p.of_exponential(v[e]) - with.off_target - (32 * e == column ? with.on_target : A(0));
      if (32 * e + lane < cols) to[32 * e] = narrow<T>(with.zero ? A(0) : value);
    }
  }
  __syncthreads();
  if (row > 0) return;
  const A sum = sum_lanes<32>(lane < rows ? losses[lane] : A(0));
  if (lane == 0) loss.write(0, mean ? sum / count : sum + A(0));  // + 0: not -0
}

}  // namespace

// -------------------------------------------------------------------------------------------------------- launcher

template <typename T>
Status cross_entropy_few(const char *op, const CrossEntropyAttrs &attrs, const Tensor &x, const Targets &targets,
                         const Loss<T> &loss, T *slope, const Extras<T> &extras, void *stream) {
  const auto rows = static_cast<unsigned>(attrs.rows(x));
  const auto cols = static_cast<int>(attrs.cols(x));
  return launch_kernel(op, cross_entropy_few_kernel<T>, {1, 32 * rows, 0, 1, true}, stream, x.as<const T>(), targets,
                       loss, slope, attrs.mean(), attrs.divides_slope(x), extras.z_loss, extras.lse, extras.predictions,
                       cols, smoothing_of<T>(attrs, cols));
}

#define AOT_CROSS_ENTROPY_FEW(T)                                                                              \
  template Status cross_entropy_few(const char *, const CrossEntropyAttrs &, const Tensor &, const Targets &, \
                                    const Loss<T> &, T *, const Extras<T> &, void *);
AOT_CROSS_ENTROPY_FEW(__half)
AOT_CROSS_ENTROPY_FEW(__nv_bfloat16)
AOT_CROSS_ENTROPY_FEW(float)
#undef AOT_CROSS_ENTROPY_FEW

}  // namespace AOT_ISA
}  // namespace aot
