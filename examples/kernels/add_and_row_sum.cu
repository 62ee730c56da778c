// Two operators of the optimization study: each kernel is one step from the one before it. float32.
// ../optimization_study.py builds this file alone and calls the launchers through ctypes.
//
//   int add_<step>(const float *a, const float *b, float *c, int64_t n, cudaStream_t stream)
//   int row_sum_<step>(const float *x, float *y, int64_t rows, int64_t cols, cudaStream_t stream)
//
// n and cols are multiples of 4, and pointers are aligned to 16 bytes.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 256, kWarp = 32, kWarps = kThreads / kWarp;
constexpr int kRun = 32;    // consecutive elements per thread, in the strided kernels
constexpr int kUnroll = 4;  // loads in flight per thread

__device__ int64_t thread() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }

__device__ int64_t threads() { return int64_t{gridDim.x} * blockDim.x; }

unsigned blocks(int64_t threads) { return static_cast<unsigned>((threads + kThreads - 1) / kThreads); }

__device__ float4 operator+(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

__device__ float sum(float4 v) { return (v.x + v.y) + (v.z + v.w); }

// ------------------------------------------------------------------------------------------------------------- add

// Any number of threads: each takes every threads()-th element. With one block it is the usual first CUDA program.
__global__ void add_loop(const float *a, const float *b, float *c, int64_t n) {
  for (int64_t i = thread(); i < n; i += threads()) c[i] = a[i] + b[i];
}

// Each thread takes consecutive elements, as it would on a CPU: the lanes of a warp are 128 bytes apart.
__global__ void add_runs(const float *a, const float *b, float *c, int64_t n) {
  int64_t first = thread() * kRun;
  for (int64_t i = first; i < first + kRun && i < n; ++i) c[i] = a[i] + b[i];
}

// Consecutive threads take consecutive elements: coalesced.
__global__ void add_elements(const float *a, const float *b, float *c, int64_t n) {
  int64_t i = thread();
  if (i < n) c[i] = a[i] + b[i];
}

// Four elements per load.
__global__ void add_vectors(const float4 *a, const float4 *b, float4 *c, int64_t n) {
  int64_t i = thread();
  if (i < n) c[i] = a[i] + b[i];
}

// Four loads of each input before the first result is used.
__global__ void add_unrolled_vectors(const float4 *a, const float4 *b, float4 *c, int64_t n) {
  int64_t first = int64_t{blockIdx.x} * kThreads * kUnroll + threadIdx.x;
  float4 left[kUnroll], right[kUnroll];
#pragma unroll
  for (int j = 0; j < kUnroll; ++j)
    if (int64_t i = first + j * kThreads; i < n) left[j] = a[i], right[j] = b[i];
#pragma unroll
  for (int j = 0; j < kUnroll; ++j)
    if (int64_t i = first + j * kThreads; i < n) c[i] = left[j] + right[j];
}

// Through shared memory, although nothing is reused.
__global__ void add_staged(const float4 *a, const float4 *b, float4 *c, int64_t n) {
  __shared__ float4 left[kThreads], right[kThreads];
  int64_t i = thread();
  if (i < n) left[threadIdx.x] = a[i], right[threadIdx.x] = b[i];
  __syncthreads();
  if (i < n) c[i] = left[threadIdx.x] + right[threadIdx.x];
}

// --------------------------------------------------------------------------------------------------------- row sum

// One thread per row: the lanes of a warp are a row apart.
__global__ void row_sum_threads(const float *x, float *y, int64_t rows, int64_t cols) {
  int64_t row = thread();
  if (row >= rows) return;
  float total = 0;
  for (int64_t i = 0; i < cols; ++i) total += x[row * cols + i];
  y[row] = total;
}

// One block per row, each thread a consecutive run. Every thread adds its partial sum to the result in memory.
__global__ void row_sum_runs(const float *x, float *y, int64_t cols) {
  x += int64_t{blockIdx.x} * cols;
  int64_t run = (cols + kThreads - 1) / kThreads, first = threadIdx.x * run;
  float total = 0;
  for (int64_t i = first; i < first + run && i < cols; ++i) total += x[i];
  atomicAdd(&y[blockIdx.x], total);
}

// A thread's partial sum, with coalesced loads.
__device__ float part(const float *x, int64_t cols) {
  float total = 0;
  for (int64_t i = threadIdx.x; i < cols; i += kThreads) total += x[i];
  return total;
}

__global__ void row_sum_neighbours(const float *x, float *y, int64_t cols) {
  atomicAdd(&y[blockIdx.x], part(x + int64_t{blockIdx.x} * cols, cols));
}

// A tree in shared memory: each step halves the number of active threads.
__global__ void row_sum_tree(const float *x, float *y, int64_t cols) {
  __shared__ float parts[kThreads];
  parts[threadIdx.x] = part(x + int64_t{blockIdx.x} * cols, cols);
  __syncthreads();
  for (int n = kThreads / 2; n > 0; n /= 2) {
    if (threadIdx.x < n) parts[threadIdx.x] += parts[threadIdx.x + n];
    __syncthreads();
  }
  if (threadIdx.x == 0) y[blockIdx.x] = parts[0];
}

// The sum over a warp, in every lane, by exchanging registers: no memory, no barrier.
__device__ float warp_sum(float total) {
#pragma unroll
  for (int n = kWarp / 2; n > 0; n /= 2) total += __shfl_xor_sync(~0u, total, n);
  return total;
}

// Shuffles within a warp, and one barrier between the warps.
__device__ float block_sum(float total) {
  __shared__ float parts[kWarps];
  total = warp_sum(total);
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = total;
  __syncthreads();
  return warp_sum(threadIdx.x % kWarp < kWarps ? parts[threadIdx.x % kWarp] : 0);
}

__global__ void row_sum_shuffles(const float *x, float *y, int64_t cols) {
  float total = block_sum(part(x + int64_t{blockIdx.x} * cols, cols));
  if (threadIdx.x == 0) y[blockIdx.x] = total;
}

// The partial sum of one of `n` threads, with four elements per load and `unroll` loads in flight.
template <int unroll>
__device__ float vector_part(const float4 *x, int64_t vectors, int thread, int n) {
  float4 totals[unroll] = {};
  int64_t i = thread;
  for (; i + (unroll - 1) * n < vectors; i += unroll * n)
#pragma unroll
    for (int j = 0; j < unroll; ++j) totals[j] = totals[j] + x[i + j * n];
  for (; i < vectors; i += n) totals[0] = totals[0] + x[i];
#pragma unroll
  for (int j = 1; j < unroll; ++j) totals[0] = totals[0] + totals[j];
  return sum(totals[0]);
}

template <int unroll>
__global__ void row_sum_vectors(const float4 *x, float *y, int64_t vectors) {
  float total = block_sum(vector_part<unroll>(x + int64_t{blockIdx.x} * vectors, vectors, threadIdx.x, kThreads));
  if (threadIdx.x == 0) y[blockIdx.x] = total;
}

// One warp per row: no barrier.
__global__ void row_sum_warps(const float4 *x, float *y, int64_t rows, int64_t vectors) {
  int64_t row = thread() / kWarp;
  if (row >= rows) return;
  float total = warp_sum(vector_part<kUnroll>(x + row * vectors, vectors, threadIdx.x % kWarp, kWarp));
  if (threadIdx.x % kWarp == 0) y[row] = total;
}

const float4 *vectors(const float *p) { return reinterpret_cast<const float4 *>(p); }

float4 *vectors(float *p) { return reinterpret_cast<float4 *>(p); }

}  // namespace

// ------------------------------------------------------------------------------------------------------- launchers

#define ADD(step, ...)                                                                                  \
  extern "C" int add_##step(const float *a, const float *b, float *c, int64_t n, cudaStream_t stream) { \
    __VA_ARGS__;                                                                                        \
    return cudaGetLastError();                                                                          \
  }

ADD(naive, add_loop<<<1, kThreads, 0, stream>>>(a, b, c, n))
ADD(strided, add_runs<<<blocks((n + kRun - 1) / kRun), kThreads, 0, stream>>>(a, b, c, n))
ADD(coalesced, add_elements<<<blocks(n), kThreads, 0, stream>>>(a, b, c, n))
ADD(vectorised, add_vectors<<<blocks(n / 4), kThreads, 0, stream>>>(vectors(a), vectors(b), vectors(c), n / 4))
ADD(unrolled,
    add_unrolled_vectors<<<blocks((n / 4 + kUnroll - 1) / kUnroll), kThreads, 0, stream>>>(vectors(a), vectors(b),
                                                                                           vectors(c), n / 4))
ADD(shared, add_staged<<<blocks(n / 4), kThreads, 0, stream>>>(vectors(a), vectors(b), vectors(c), n / 4))

#define ROW_SUM(step, ...)                                                                                   \
  extern "C" int row_sum_##step(const float *x, float *y, int64_t rows, int64_t cols, cudaStream_t stream) { \
    __VA_ARGS__;                                                                                             \
    return cudaGetLastError();                                                                               \
  }

ROW_SUM(naive, row_sum_threads<<<blocks(rows), kThreads, 0, stream>>>(x, y, rows, cols))
ROW_SUM(strided, cudaMemsetAsync(y, 0, rows * sizeof(float), stream);
        row_sum_runs<<<blocks(rows *kThreads), kThreads, 0, stream>>>(x, y, cols))
ROW_SUM(coalesced, cudaMemsetAsync(y, 0, rows * sizeof(float), stream);
        row_sum_neighbours<<<blocks(rows *kThreads), kThreads, 0, stream>>>(x, y, cols))
ROW_SUM(shared, row_sum_tree<<<blocks(rows *kThreads), kThreads, 0, stream>>>(x, y, cols))
ROW_SUM(shuffles, row_sum_shuffles<<<blocks(rows *kThreads), kThreads, 0, stream>>>(x, y, cols))
ROW_SUM(vectorised, row_sum_vectors<1><<<blocks(rows *kThreads), kThreads, 0, stream>>>(vectors(x), y, cols / 4))
ROW_SUM(unrolled, row_sum_vectors<kUnroll><<<blocks(rows *kThreads), kThreads, 0, stream>>>(vectors(x), y, cols / 4))
ROW_SUM(warp, row_sum_warps<<<blocks(rows *kWarp), kThreads, 0, stream>>>(vectors(x), y, rows, cols / 4))
