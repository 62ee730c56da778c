// Copies that differ only in their access pattern. float32. ../optimization_study.py builds this file alone and calls
// the launchers through ctypes.
//
//   int access_<pattern>(const float *x, const int *index, float *y, int64_t n, int64_t step, cudaStream_t stream)
//
// n is the number of elements that are copied, a multiple of 4096. x and y have room for (n + 1) * step elements.
// Pointers are aligned to 16 bytes.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // loads in flight per thread, so that memory is the limit and not the number of threads

using Index = const int *;

// Where the i-th element is read and written.
struct Contiguous {
  static __device__ int64_t from(int64_t i, Index, int64_t) { return i; }
  static __device__ int64_t to(int64_t i, int64_t) { return i; }
};

struct StridedRead : Contiguous {
  static __device__ int64_t from(int64_t i, Index, int64_t step) { return i * step; }
};

struct StridedWrite : Contiguous {
  static __device__ int64_t to(int64_t i, int64_t step) { return i * step; }
};

struct Gathered : Contiguous {
  static __device__ int64_t from(int64_t i, Index index, int64_t) { return index[i]; }
};

struct Misaligned : Contiguous {
  static __device__ int64_t from(int64_t i, Index, int64_t step) { return i + step; }
};

template <class Pattern>
__global__ void copy(const float *x, Index index, float *y, int64_t step) {
  int64_t first = int64_t{blockIdx.x} * kThreads * kUnroll + threadIdx.x;
  float values[kUnroll];
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) values[j] = x[Pattern::from(first + j * kThreads, index, step)];
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) y[Pattern::to(first + j * kThreads, step)] = values[j];
}

__device__ float4 load(const float4 *x) { return *x; }

// These 16 bytes as four elements, for an address that a float4 cannot have.
__device__ float4 load(const float *x) { return {x[0], x[1], x[2], x[3]}; }

// T: float4, or float for an x that is not aligned to 16 bytes. The same vectors in both.
template <class T>
__global__ void copy_vectors(const T *x, float4 *y) {
  constexpr int kElements = sizeof(float4) / sizeof(T);
  int64_t first = int64_t{blockIdx.x} * kThreads * kUnroll + threadIdx.x;
  float4 values[kUnroll];
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) values[j] = load(x + (first + j * kThreads) * kElements);
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) y[first + j * kThreads] = values[j];
}

unsigned blocks(int64_t n) { return static_cast<unsigned>(n / (kThreads * kUnroll)); }

void launch_vectors(const float *x, float *y, int64_t n, cudaStream_t stream) {
  auto *to = reinterpret_cast<float4 *>(y);
  if (reinterpret_cast<uintptr_t>(x) % sizeof(float4) == 0) {
    copy_vectors<<<blocks(n / 4), kThreads, 0, stream>>>(reinterpret_cast<const float4 *>(x), to);
  } else {
    copy_vectors<<<blocks(n / 4), kThreads, 0, stream>>>(x, to);
  }
}

}  // namespace

#define ACCESS(pattern, ...)                                                                              \
  extern "C" int access_##pattern(const float *x, [[maybe_unused]] const int *index, float *y, int64_t n, \
                                  [[maybe_unused]] int64_t step, cudaStream_t stream) {                   \
    __VA_ARGS__;                                                                                          \
    return cudaGetLastError();                                                                            \
  }

ACCESS(contiguous, copy<Contiguous><<<blocks(n), kThreads, 0, stream>>>(x, index, y, step))
ACCESS(contiguous_vectors, launch_vectors(x, y, n, stream))
ACCESS(strided_read, copy<StridedRead><<<blocks(n), kThreads, 0, stream>>>(x, index, y, step))
ACCESS(strided_write, copy<StridedWrite><<<blocks(n), kThreads, 0, stream>>>(x, index, y, step))
ACCESS(gathered, copy<Gathered><<<blocks(n), kThreads, 0, stream>>>(x, index, y, step))
ACCESS(misaligned, copy<Misaligned><<<blocks(n), kThreads, 0, stream>>>(x, index, y, step))
ACCESS(misaligned_vectors, launch_vectors(x + step, y, n, stream))
