#include "running.h"

#include "cuda/launch.cuh"
#include "cuda/vector.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

constexpr int kRunningThreads = 128;

template <typename T>
__device__ inline void move_towards(void *running, int64_t i, float share, float of_statistic, float statistic) {
  T &to = static_cast<T *>(running)[i];
  to = narrow<T>((1 - share) * widen(to) + of_statistic * statistic);
}

// One kernel for three dtypes: it is a few KB in each wheel, and waits for memory.
__global__ void __launch_bounds__(kRunningThreads)
    running_kernel(RunningStatistics call, float share, float share_of_var) {
  const int64_t i = int64_t{blockIdx.x} * kRunningThreads + threadIdx.x;
  if (i == 0 && call.batches) ++*call.batches;
  if (i >= call.channels) return;
  const auto move = [&](auto *move_one) {
    move_one(call.running_mean, i, share, share, static_cast<const float *>(call.mean)[i]);
    move_one(call.running_var, i, share, share_of_var, static_cast<const float *>(call.var)[i]);
  };
  if (call.dtype == DType::float32) move(move_towards<float>);
  else if (call.dtype == DType::bfloat16) move(move_towards<__nv_bfloat16>);
  else move(move_towards<__half>);
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

extern "C" int aot_running_statistics_cuda(const aot::RunningStatistics *call) {
  using namespace aot;
  const unsigned blocks = grid_size(std::max<int64_t>(ceil_div(call->channels, kRunningThreads), 1));
  running_kernel<<<blocks, kRunningThreads, 0, static_cast<cudaStream_t>(call->stream)>>>(
      *call, static_cast<float>(call->share), static_cast<float>(call->share * call->unbiased()));
  return check_launch("batch_norm");
}
