// A matrix product, c = a @ b, optimized one step at a time; float32, row-major. ../optimization_study.py builds this
// file alone and calls the launchers through ctypes.
//
//   int matmul_<step>(const float *a, const float *b, float *c, int64_t m, int64_t n, int64_t k, cudaStream_t stream)
//
// a is m x k and b is k x n; m, n and k are multiples of 128, and pointers are aligned to 16 bytes.
#include <cuda_pipeline.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 256;

// -------------------------------------------------------------------------------------------- one element per thread

__device__ float dot(const float *a, const float *b, int64_t n, int64_t k) {
  float total = 0;
  for (int64_t p = 0; p < k; ++p) total += a[p] * b[p * n];
  return total;
}

constexpr int kLanes = 32, kGroups = kThreads / kLanes;

// Consecutive threads take consecutive rows: the lanes of a warp are a row apart in a and in c.
__global__ void elements_by_rows(const float *a, const float *b, float *c, int64_t n, int64_t k) {
  int64_t row = int64_t{blockIdx.x} * kLanes + threadIdx.x, col = int64_t{blockIdx.y} * kGroups + threadIdx.y;
  c[row * n + col] = dot(a + row * k, b + col, n, k);
}

// Consecutive threads take consecutive columns: coalesced in b and in c, and one address in a.
__global__ void elements_by_columns(const float *a, const float *b, float *c, int64_t n, int64_t k) {
  int64_t row = int64_t{blockIdx.y} * kGroups + threadIdx.y, col = int64_t{blockIdx.x} * kLanes + threadIdx.x;
  c[row * n + col] = dot(a + row * k, b + col, n, k);
}

constexpr int kSquare = 32;

// A block of 32 x 32 threads reads 32 x 32 elements of a and b once, for all of its threads.
__global__ void shared_squares(const float *a, const float *b, float *c, int64_t n, int64_t k) {
  __shared__ float left[kSquare][kSquare], right[kSquare][kSquare];
  int y = threadIdx.y, x = threadIdx.x;
  int64_t row = int64_t{blockIdx.y} * kSquare + y, col = int64_t{blockIdx.x} * kSquare + x;
  float total = 0;
  for (int64_t first = 0; first < k; first += kSquare) {
    left[y][x] = a[row * k + first + x];
    right[y][x] = b[(first + y) * n + col];
    __syncthreads();
#pragma unroll
    for (int p = 0; p < kSquare; ++p) total += left[y][p] * right[p][x];
    __syncthreads();
  }
  c[row * n + col] = total;
}

// ------------------------------------------------------------------------------------------ 8 x 8 elements per thread

constexpr int kTile = 128, kDepth = 8, kSide = 8, kAcross = kTile / kSide;

// The outer product of a column of left and a row of right, added to the thread's totals.
__device__ void multiply(float (&totals)[kSide][kSide], const float (&left)[kSide], const float (&right)[kSide]) {
#pragma unroll
  for (int i = 0; i < kSide; ++i)
#pragma unroll
    for (int j = 0; j < kSide; ++j) totals[i][j] += left[i] * right[j];
}

// A block computes 128 x 128 elements. A thread has 8 x 8 of them in registers, 16 rows and columns apart, so that
// 16 loads from shared memory serve 64 multiplications.
__global__ void __launch_bounds__(kThreads, 2)
    register_tiles(const float *a, const float *b, float *c, int64_t n, int64_t k) {
  __shared__ float left[kTile][kDepth + 1], right[kDepth][kTile];
  int y = threadIdx.x / kAcross, x = threadIdx.x % kAcross;
  a += int64_t{blockIdx.y} * kTile * k, b += int64_t{blockIdx.x} * kTile;
  c += int64_t{blockIdx.y} * kTile * n + int64_t{blockIdx.x} * kTile;
  float totals[kSide][kSide] = {};
  for (int64_t first = 0; first < k; first += kDepth) {
    for (int i = threadIdx.x; i < kTile * kDepth; i += kThreads) {
      left[i / kDepth][i % kDepth] = a[i / kDepth * k + first + i % kDepth];
      right[i / kTile][i % kTile] = b[(first + i / kTile) * n + i % kTile];
    }
    __syncthreads();
#pragma unroll
    for (int p = 0; p < kDepth; ++p) {
      float column[kSide], row[kSide];
#pragma unroll
      for (int i = 0; i < kSide; ++i) column[i] = left[y + i * kAcross][p], row[i] = right[p][x + i * kAcross];
      multiply(totals, column, row);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kSide; ++i)
#pragma unroll
    for (int j = 0; j < kSide; ++j) c[(y + i * kAcross) * n + x + j * kAcross] = totals[i][j];
}

// ------------------------------------------------------------------------------------------- the same, with float4

struct Tile {
  float left[kDepth][kTile + 4];  // transposed; the padding keeps the transposing stores free of bank conflicts
  float right[kDepth][kTile];
};

// A thread's part of one tile, brought from global memory: one vector of each factor.
struct Brought {
  float4 left, right;
};

__device__ Brought bring(const float *a, const float *b, int64_t n, int64_t k) {
  int i = threadIdx.x;
  return {*reinterpret_cast<const float4 *>(a + i / 2 * k + i % 2 * 4),
          *reinterpret_cast<const float4 *>(b + i / kLanes * n + i % kLanes * 4)};
}

__device__ void put(Tile &tile, const Brought &from) {
  int i = threadIdx.x, p = i % 2 * 4, row = i / 2;
  tile.left[p][row] = from.left.x, tile.left[p + 1][row] = from.left.y;
  tile.left[p + 2][row] = from.left.z, tile.left[p + 3][row] = from.left.w;
  *reinterpret_cast<float4 *>(&tile.right[i / kLanes][i % kLanes * 4]) = from.right;
}

// Elements 4 * i to 4 * i + 3 of each half of a row of the tile.
__device__ void take(float (&to)[kSide], const float *row, int i) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
    *reinterpret_cast<float4 *>(to + 4 * half) = *reinterpret_cast<const float4 *>(row + kTile / 2 * half + 4 * i);
}

__device__ void multiply(float (&totals)[kSide][kSide], const Tile &tile, int y, int x) {
#pragma unroll
  for (int p = 0; p < kDepth; ++p) {
    alignas(16) float column[kSide], row[kSide];
    take(column, tile.left[p], y);
    take(row, tile.right[p], x);
    multiply(totals, column, row);
  }
}

// prefetched: two tiles, the next of which is loaded while this one is multiplied, and one barrier per tile.
template <bool prefetched>
__global__ void __launch_bounds__(kThreads, 2)
    vector_tiles(const float *a, const float *b, float *c, int64_t n, int64_t k) {
  __shared__ alignas(16) Tile tiles[prefetched ? 2 : 1];
  int y = threadIdx.x / kAcross, x = threadIdx.x % kAcross;
  a += int64_t{blockIdx.y} * kTile * k, b += int64_t{blockIdx.x} * kTile;
  c += int64_t{blockIdx.y} * kTile * n + int64_t{blockIdx.x} * kTile;
  float totals[kSide][kSide] = {};
  if (prefetched) {
    put(tiles[0], bring(a, b, n, k));
    __syncthreads();
    int at = 0;
    for (int64_t next = kDepth; next < k; next += kDepth, at ^= 1) {
      Brought brought = bring(a + next, b + next * n, n, k);
      multiply(totals, tiles[at], y, x);
      put(tiles[at ^ 1], brought);
      __syncthreads();
    }
    multiply(totals, tiles[at], y, x);
  } else {
    for (int64_t first = 0; first < k; first += kDepth) {
      put(tiles[0], bring(a + first, b + first * n, n, k));
      __syncthreads();
      multiply(totals, tiles[0], y, x);
      __syncthreads();
    }
  }
#pragma unroll
  for (int i = 0; i < kSide; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int64_t row = i / 4 * (kTile / 2) + 4 * y + i % 4;
      *reinterpret_cast<float4 *>(c + row * n + half * (kTile / 2) + 4 * x) =
          *reinterpret_cast<float4 *>(&totals[i][4 * half]);
    }
}

// ----------------------------------------------------------------------------------------------- tensor cores, TF32

constexpr int kTensorDepth = 32, kStages = 3;
constexpr int kM = 16, kN = 8, kK = 8;  // of one instruction

// The padding makes the loads of an instruction's factors free of bank conflicts.
struct TensorTile {
  float left[kTile][kTensorDepth + 4];
  float right[kTensorDepth][kTile + 8];
};

// Parameters in which the steps on tensor cores differ. A warp computes 64 x cols_ of the block's 128 x 128 elements.
template <bool asynchronous_, bool rounded_, int cols_>
struct Step {
  static constexpr bool asynchronous = asynchronous_, rounded = rounded_;
  static constexpr int rows = 64, cols = cols_, down = rows / kM, right = cols / kN, across = kTile / cols;
  static constexpr int threads = kTile / rows * across * kLanes;
  static constexpr int bytes = (asynchronous ? kStages : 1) * sizeof(TensorTile);
};

// A factor as the tensor cores take it: 10 bits of the mantissa; they ignore the others.
template <bool rounded>
__device__ uint32_t factor(float value) {
  uint32_t bits = __float_as_uint(value);
  if (rounded) asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

// totals += left @ right, of 16 x 8 and 8 x 8 elements, which lie in the registers of a warp.
__device__ void multiply(float (&totals)[4], const uint32_t (&left)[4], const uint32_t (&right)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(totals[0]), "+f"(totals[1]), "+f"(totals[2]), "+f"(totals[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}

template <class S>
struct Warp {
  float totals[S::down][S::right][4] = {};
  int row = threadIdx.x / kLanes / S::across * S::rows, col = threadIdx.x / kLanes % S::across * S::cols;
  int group = threadIdx.x % kLanes / 4, lane = threadIdx.x % 4;  // which elements are this thread's, as PTX defines

  __device__ void multiply_tile(const TensorTile &tile) {
#pragma unroll
    for (int p = 0; p < kTensorDepth; p += kK) {
      uint32_t left[S::down][4], right[S::right][2];
#pragma unroll
      for (int i = 0; i < S::down; ++i)
#pragma unroll
        for (int q = 0; q < 4; ++q)
          left[i][q] = factor<S::rounded>(tile.left[row + i * kM + group + q % 2 * 8][p + lane + q / 2 * 4]);
#pragma unroll
      for (int j = 0; j < S::right; ++j)
#pragma unroll
        for (int q = 0; q < 2; ++q)
          right[j][q] = factor<S::rounded>(tile.right[p + lane + q * 4][col + j * kN + group]);
#pragma unroll
      for (int i = 0; i < S::down; ++i)
#pragma unroll
        for (int j = 0; j < S::right; ++j) multiply(totals[i][j], left[i], right[j]);
    }
  }

  __device__ void store(float *c, int64_t n) const {
#pragma unroll
    for (int i = 0; i < S::down; ++i)
#pragma unroll
      for (int j = 0; j < S::right; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float *to = c + (row + i * kM + group + half * 8) * n + col + j * kN + lane * 2;
          *reinterpret_cast<float2 *>(to) = {totals[i][j][half * 2], totals[i][j][half * 2 + 1]};
        }
  }
};

// cp.async copies from global to shared memory without registers, and without waiting.
template <class S>
__device__ void fill(TensorTile &tile, const float *a, const float *b, int64_t n, int64_t k) {
  auto copy = [](float *to, const float *from) {
    if (S::asynchronous) {
      __pipeline_memcpy_async(to, from, sizeof(float4));
    } else {
      *reinterpret_cast<float4 *>(to) = *reinterpret_cast<const float4 *>(from);
    }
  };
#pragma unroll 2  // all at once would need more registers than there are
  for (int j = 0; j < kTile * kTensorDepth / 4 / S::threads; ++j) {
    int i = (threadIdx.x + j * S::threads) * 4;
    copy(&tile.left[i / kTensorDepth][i % kTensorDepth], a + i / kTensorDepth * k + i % kTensorDepth);
    copy(&tile.right[i / kTile][i % kTile], b + i / kTile * n + i % kTile);
  }
}

template <class S>
__device__ void multiply_at_once(Warp<S> &warp, TensorTile *tile, const float *a, const float *b, int64_t n,
                                 int64_t k) {
  for (int64_t first = 0; first < k; first += kTensorDepth) {
    fill<S>(*tile, a + first, b + first * n, n, k);
    __syncthreads();
    warp.multiply_tile(*tile);
    __syncthreads();
  }
}

// Tiles arrive while earlier ones are multiplied: kStages - 1 of them are on their way.
template <class S>
__device__ void multiply_as_they_come(Warp<S> &warp, TensorTile *tiles, const float *a, const float *b, int64_t n,
                                      int64_t k) {
  auto ask = [&](int64_t tile) {
    int64_t first = tile * kTensorDepth;
    if (first < k) fill<S>(tiles[tile % kStages], a + first, b + first * n, n, k);
    __pipeline_commit();  // an empty one past the end, so that the count below stays right
  };
  for (int tile = 0; tile < kStages - 1; ++tile) ask(tile);
  for (int64_t tile = 0; tile * kTensorDepth < k; ++tile) {
    __pipeline_wait_prior(kStages - 2);
    __syncthreads();  // this tile is here for all threads, and all are done with the one that is overwritten next
    ask(tile + kStages - 1);
    warp.multiply_tile(tiles[tile % kStages]);
  }
}

template <class S>
__global__ void __launch_bounds__(S::threads, 2)
    tensor_tiles(const float *a, const float *b, float *c, int64_t n, int64_t k) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto *tiles = reinterpret_cast<TensorTile *>(memory);
  a += int64_t{blockIdx.y} * kTile * k, b += int64_t{blockIdx.x} * kTile;
  c += int64_t{blockIdx.y} * kTile * n + int64_t{blockIdx.x} * kTile;
  Warp<S> warp;
  if (S::asynchronous) {
    multiply_as_they_come(warp, tiles, a, b, n, k);
  } else {
    multiply_at_once(warp, tiles, a, b, n, k);
  }
  warp.store(c, n);
}

template <class S>
void launch_tensor_tiles(dim3 grid, cudaStream_t stream, const float *a, const float *b, float *c, int64_t n,
                         int64_t k) {
  // more than 48 KB must be asked for
  cudaFuncSetAttribute(tensor_tiles<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::bytes);
  tensor_tiles<S><<<grid, S::threads, S::bytes, stream>>>(a, b, c, n, k);
}

using TensorCores = Step<false, true, 32>;
using Asynchronous = Step<true, true, 32>;
using WarpTiles = Step<true, true, 64>;
using Truncated = Step<true, false, 64>;

dim3 grid(int64_t x, int64_t y) { return {static_cast<unsigned>(x), static_cast<unsigned>(y)}; }

}  // namespace

// ------------------------------------------------------------------------------------------------------- launchers

#define MATMUL(step, ...)                                                                                 \
  extern "C" int matmul_##step(const float *a, const float *b, float *c, int64_t m, int64_t n, int64_t k, \
                               cudaStream_t stream) {                                                     \
    __VA_ARGS__;                                                                                          \
    return cudaGetLastError();                                                                            \
  }

MATMUL(naive, elements_by_rows<<<grid(m / kLanes, n / kGroups), dim3(kLanes, kGroups), 0, stream>>>(a, b, c, n, k))
MATMUL(coalesced,
       elements_by_columns<<<grid(n / kLanes, m / kGroups), dim3(kLanes, kGroups), 0, stream>>>(a, b, c, n, k))
MATMUL(shared, shared_squares<<<grid(n / kSquare, m / kSquare), dim3(kSquare, kSquare), 0, stream>>>(a, b, c, n, k))
MATMUL(registers, register_tiles<<<grid(n / kTile, m / kTile), kThreads, 0, stream>>>(a, b, c, n, k))
MATMUL(vectors, vector_tiles<false><<<grid(n / kTile, m / kTile), kThreads, 0, stream>>>(a, b, c, n, k))
MATMUL(prefetched, vector_tiles<true><<<grid(n / kTile, m / kTile), kThreads, 0, stream>>>(a, b, c, n, k))
MATMUL(tensor_cores, launch_tensor_tiles<TensorCores>(grid(n / kTile, m / kTile), stream, a, b, c, n, k))
MATMUL(asynchronous, launch_tensor_tiles<Asynchronous>(grid(n / kTile, m / kTile), stream, a, b, c, n, k))
MATMUL(warp_tiles, launch_tensor_tiles<WarpTiles>(grid(n / kTile, m / kTile), stream, a, b, c, n, k))
MATMUL(truncated, launch_tensor_tiles<Truncated>(grid(n / kTile, m / kTile), stream, a, b, c, n, k))
