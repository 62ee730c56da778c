// The backward of the norms where rows are few and short. Many rows take two kernels, and a third for statistics that
// were not kept; few rows cost no more than the latencies of these.
#include "norm_backward_few.cuh"

#include "cuda/overlap.cuh"
#include "norm.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

// The norms share the kernel: what they differ in, a branch each, takes less than kernels of their own would add to the
// library. A warp has a row, which stays in registers, and adds up in as few turns of shuffles as the formula allows:
// the mean, if it is subtracted, then all else.
template <typename T>
__global__ void __launch_bounds__(32 * kFewNormRows, 1) norm_backward_few_kernel(FewNormRows a) {
  constexpr int kSize = kVectorSize<T>, kStep = 32 * kSize, kVectors = kFewNormCols / kStep;
  constexpr int kTurn = 8;  // rows that a thread adds up at once
  extern __shared__ uint4 memory[];
  auto *terms = reinterpret_cast<float (*)[2][kFewNormCols]>(memory);  // of each row: dy * xhat, dy
  const int row = warp_index(), column = lane_index() * kSize, at = row * a.cols + column;
  auto holds = [&](int i) { return column + kStep * i < a.cols; };
  auto read = [&](const void *from, int i) {
    return load_present(static_cast<const T *>(from) + at + kStep * i, from && holds(i));
  };
  wait_for_kernel_before();
  launch_next();
  Vector<T> x[kVectors], dy[kVectors], dh[kVectors], weight[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    x[i] = read(a.x, i), dy[i] = read(a.dy, i), weight[i] = filled<T>(1), dh[i] = read(a.dh, i);
    if (a.weight && holds(i)) weight[i] = load(static_cast<const T *>(a.weight) + column + kStep * i);
  }
  float mean = 0, rstd = 0;
  if (a.stats) {
    const float *stats = a.stats + (a.centred ? 2 * row : row);
    if (a.centred) mean = *stats++;
    rstd = *stats;
  } else if (a.centred) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float sum = 0;
      for (float v : widen(x[i]).value) sum += v;  // 0 past the row's end
      mean += sum;
    }
    mean = sum_lanes<32>(mean) * a.one_over_cols;
  }

  Sums<3, float> sums = {};  // of (x - mean)^2, g * (x - mean), g
  Widened<T> c[kVectors], d[kVectors], g[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const Widened<T> w = widen(weight[i]);
    c[i] = widen(x[i]), d[i] = widen(dy[i]);
    float squares = 0;
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      c[i][k] -= mean, g[i][k] = d[i][k] * (w[k] + a.offset), squares += c[i][k] * c[i][k];
      sums.value[1] += g[i][k] * c[i][k], sums.value[2] += g[i][k];
    }
    if (holds(i)) sums.value[0] += squares;
  }
  sums = sum_lanes<32>(sums);
  if (!a.stats) {
    const float square = sums.value[0] * a.one_over_cols + a.eps;
    rstd = a.centred ? reciprocal_deviation<true>(square) : reciprocal_deviation<false>(square);
  }
  // dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dh, xhat = rstd * (x - mean)
  const float c1 = -rstd * rstd * a.one_over_cols * (rstd * sums.value[1]);
  const float c0 = a.centred ? -rstd * a.one_over_cols * sums.value[2] : 0.0f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i)
    if (holds(i)) {
#pragma unroll
      for (int k = 0; k < kSize; k += 4) {
        const float *ck = &c[i][k], *dk = &d[i][k];
        const int to = column + kStep * i + k;
        *reinterpret_cast<float4 *>(terms[row][0] + to) = {dk[0] * (ck[0] * rstd), dk[1] * (ck[1] * rstd),
                                                           dk[2] * (ck[2] * rstd), dk[3] * (ck[3] * rstd)};
        if (a.dbias) *reinterpret_cast<float4 *>(terms[row][1] + to) = {dk[0], dk[1], dk[2], dk[3]};
      }
      Widened<T> dx = widen(dh[i]);
#pragma unroll
      for (int k = 0; k < kSize; ++k) dx[k] += g[i][k] * rstd + (c[i][k] * c1 + c0);
      if (a.dx) store(static_cast<T *>(a.dx) + at + kStep * i, narrow(dx));
      if (a.dresidual) store(static_cast<T *>(a.dresidual) + at + kStep * i, narrow(dx));
    }

  __syncthreads();
  for (int column = threadIdx.x; column < a.cols; column += blockDim.x) {
    float dweight = 0, dbias = 0;
#pragma unroll 1
    for (int first = 0; first < a.rows; first += kTurn)
#pragma unroll
      for (int i = 0; i < kTurn; ++i)
        if (first + i < a.rows) {
          dweight += terms[first + i][0][column];
          if (a.dbias) dbias += terms[first + i][1][column];
        }
    if (a.dweight) static_cast<T *>(a.dweight)[column] = narrow<T>(dweight);
    if (a.dbias) static_cast<T *>(a.dbias)[column] = narrow<T>(dbias);
  }
}

}  // namespace

// -------------------------------------------------------------------------------------------------------- launcher

Status norm_backward_few(const char *op, DType dtype, const FewNormRows &a, void *stream, bool *done) {
  auto bytes = [](const void *p) { return static_cast<const char *>(p); };
  *done = dtype != DType::float64 && a.cols % (16 / itemsize(dtype)) == 0 &&
          aligned(bytes(a.dy), bytes(a.dh), bytes(a.x), bytes(a.weight), bytes(a.dx), bytes(a.dresidual));
  if (!*done) return kOk;
  const int row_bytes = 2 * kFewNormCols * static_cast<int>(sizeof(float));
  return dispatch(dtype, [&](auto type) -> Status {
    using T = typename decltype(type)::type;
    if constexpr (std::is_same_v<T, double>) return kOk;
    else
      return launch_kernel(op, norm_backward_few_kernel<T>, {1, 32u * a.rows, a.rows * row_bytes, 1, true}, stream, a);
  });
}

}  // namespace AOT_ISA
}  // namespace aot
