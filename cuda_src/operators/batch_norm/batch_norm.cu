// Memory passes of three kernels each way; the second has a number for each channel and slice alone.
//               reads            writes
//   moments     x                each slice's mean and sum of squares about it
//   apply       x, residual      y
//   sums        dy, x, y         each slice's sums of g and g (x - mean); dresidual = g
//   gradients   g or dy, x, y    dx
// y is read in batch_norm_relu alone: another activation's input is computed again from x.
// A block has some channels, and a slice of their elements: all of a thread's are of the same channels. Slices are
// taken backwards in the second pass, which then finds the last ones in the L2 cache.
#include "batch_norm.cuh"
#include "cuda/math.cuh"
#include "cuda/vector.cuh"

namespace aot {
inline namespace AOT_ISA {

// ------------------------------------------------------------------------------------------------------------ walk

constexpr int kNormThreads = 256, kUnroll = 4;

// How a tensor is shared. Where channels are the last axis, `lanes` neighbouring threads have vectors of a row, and a
// slice is `chunk` rows; else a slice is `chunk` elements of one channel.
struct ChannelSlices {
  ChannelShape shape;
  int64_t total, chunk;  // rows, or elements
  int slices, lanes;

  // The rows, or elements, of a slice.
  __device__ int64_t count(int64_t slice) const {
    const int64_t left = total - slice * chunk;
    return left < 0 ? 0 : left < chunk ? left : chunk;
  }
};

template <typename T, int kVec>
using Pack = std::conditional_t<kVec == 1, T, Vector<T>>;

template <typename T, int kVec>
__device__ inline Pack<T, kVec> load_pack(const T *p) {
  if constexpr (kVec == 1) return *p;
  else return load_once(p);
}
template <typename T, int kVec>
__device__ inline void widen_pack(const Pack<T, kVec> &from, Accumulate<T> (&to)[kVec]) {
  if constexpr (kVec == 1) {
    to[0] = widen(from);
  } else {
    const Widened<T> wide = widen(from);
#pragma unroll
    for (int i = 0; i < kVec; ++i) to[i] = wide[i];
  }
}
template <typename T, int kVec>
__device__ inline void store_pack(T *p, const Accumulate<T> (&from)[kVec]) {
  if constexpr (kVec == 1) {
    *p = narrow<T>(from[0]);
  } else {
    Widened<T> wide;
#pragma unroll
    for (int i = 0; i < kVec; ++i) wide[i] = from[i];
    store(p, narrow(wide));
  }
}

// The vectors of a thread, and their channels: kVec neighbouring ones, or one.
template <typename T_, int kVec_, bool kLast_>
struct Walk {
  using T = T_;
  using A = Accumulate<T>;
  static constexpr int kVec = kVec_, kChannels = kLast_ ? kVec_ : 1;
  static constexpr bool kLast = kLast_;
  int64_t channel, at;  // the first channel; the element at which the next vector begins
  int vectors;          // that are left
  bool present;
  int slice, row;  // of the block; of the thread among those with the same channels

  __device__ Walk(const ChannelSlices &s, bool backwards) {
    slice = static_cast<int>(backwards ? gridDim.y - 1 - blockIdx.y : blockIdx.y);
    const int64_t begin = slice * s.chunk, count = s.count(slice);
    const int lanes = kLast ? s.lanes : 1, thread = static_cast<int>(threadIdx.x);
    const int rows = kNormThreads / lanes;
    row = thread / lanes;
    if constexpr (kLast) {
      channel = (int64_t{blockIdx.x} * lanes + thread % lanes) * kVec;
      present = channel < s.shape.channels;
      at = (begin + row) * s.shape.channels + channel, step_ = rows * s.shape.channels;
      vectors = static_cast<int>(count > row ? (count - row + rows - 1) / rows : 0);
    } else {
      channel = blockIdx.x, present = true;
      const int64_t first = begin + int64_t{thread} * kVec, inner = s.shape.inner, step = kNormThreads * kVec;
      const int64_t line = first / inner;
      along_ = first - line * inner, inner_ = inner;
      at = (line * s.shape.channels + channel) * inner + along_;
      across_ = step / inner, step_ = step - across_ * inner;
      wrap_ = (s.shape.channels - 1) * inner, across_ *= s.shape.channels * inner;
      vectors = static_cast<int>(count > thread * kVec ? (count - thread * kVec + step - 1) / step : 0);
    }
    if (!present) vectors = 0;
  }

  // The place of the next vector; goes to the one after.
  __device__ int64_t next() {
    const int64_t here = at;
    at += step_, --vectors;
    if constexpr (!kLast) {
      at += across_, along_ += step_;
      if (along_ >= inner_) along_ -= inner_, at += wrap_;
    }
    return here;
  }

 private:
  int64_t step_, across_ = 0, along_ = 0, inner_ = 0, wrap_ = 0;
};

// Adds up what the threads of a block with the same channels have: `add(mine, other)` of two arrays in shared memory.
template <class W, typename A, int kNumbers, class F>
__device__ inline void combine_rows(A (&numbers)[kNumbers], int lanes, F add) {
  __shared__ A shared[kNumbers * kNormThreads];
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) shared[i * kNormThreads + thread] = numbers[i];
#pragma unroll 1
  for (int half = kNormThreads / 2; half >= lanes; half /= 2) {
    __syncthreads();
    if (thread >= half) continue;
    A other[kNumbers];
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) other[i] = shared[i * kNormThreads + thread + half];
    add(numbers, other);
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) shared[i * kNormThreads + thread] = numbers[i];
  }
}

template <typename T>
__device__ inline Accumulate<T> parameter(const void *of, bool wide, int64_t channel, Accumulate<T> absent) {
  if (!of) return absent;
  return wide ? static_cast<Accumulate<T>>(static_cast<const float *>(of)[channel])
              : widen(static_cast<const T *>(of)[channel]);
}

// ------------------------------------------------------------------------------------------------------ activations

// z becomes f(z).
template <typename T, int n, typename A>
__device__ inline void activate(A (&z)[n], NormActivation activation) {
  if (activation == kNormRelu) {
#pragma unroll
    for (A &v : z) v = v <= 0 ? A(0) : v;  // NaN stays NaN
  } else if (activation == kNormSilu) {
#pragma unroll
    for (A &v : z) v *= sigmoid<T>(v);
  } else if (activation == kNormHardswish) {
#pragma unroll
    for (A &v : z) v *= min(max(v + 3, A(0)), A(6)) * A(1.0 / 6);
  }
}

// dy becomes dy f'(z).
template <typename T, int n, typename A>
__device__ inline void activation_gradient(A (&dy)[n], const A (&z)[n], NormActivation activation) {
  if (activation == kNormRelu) {
#pragma unroll
    for (int j = 0; j < n; ++j) dy[j] = z[j] <= 0 ? A(0) : dy[j];
  } else if (activation == kNormSilu) {
#pragma unroll
    for (int j = 0; j < n; ++j) {
      const Logistic<A> s = logistic<T>(z[j]);
      dy[j] *= s.value + z[j] * s.slope;
    }
  } else if (activation == kNormHardswish) {
#pragma unroll
    for (int j = 0; j < n; ++j) {
      const A slope = z[j] < 3 ? z[j] * A(1.0 / 3) + A(0.5) : A(1), g = dy[j] * slope;
      dy[j] = z[j] <= -3 ? A(0) : g;
    }
  }
}

// --------------------------------------------------------------------------------------------------------- moments

// Terms, their mean, and the sum of squares about it (Chan, Golub and LeVeque, 1979). An infinity among the terms is
// their mean: a difference from it is infinite as well.
template <typename A>
__device__ inline void merge_moments(A count, A &mean, A &squares, A other_count, A other_mean, A other_squares) {
  const A total = count + other_count, share = total > 0 ? other_count / total : A(0), delta = other_mean - mean;
  mean += isfinite(delta) ? delta * share : other_mean, squares += other_squares + delta * delta * count * share;
}

template <int kTerms, typename A>
__device__ inline void add_terms(A count, A &mean, A &squares, const A (&x)[kTerms]) {
  A sum = 0, about = 0;
#pragma unroll
  for (A term : x) sum += term;
  sum *= A(1) / kTerms;
#pragma unroll
  for (A term : x) about += (term - sum) * (term - sum);
  merge_moments(count, mean, squares, A(kTerms), sum, about);
}

// Terms of kVectors vectors.
template <class W, int kVectors, typename A>
__device__ inline void add_vectors(A &count, A (&mean)[W::kChannels], A (&squares)[W::kChannels],
                                   const A (&x)[kVectors][W::kVec]) {
  if constexpr (W::kLast) {
#pragma unroll
    for (int c = 0; c < W::kChannels; ++c) {
      A terms[kVectors];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) terms[i] = x[i][c];
      add_terms(count, mean[c], squares[c], terms);
    }
    count += kVectors;
  } else {
    A terms[kVectors * W::kVec];
#pragma unroll
    for (int i = 0; i < kVectors * W::kVec; ++i) terms[i] = x[i / W::kVec][i % W::kVec];
    add_terms(count, mean[0], squares[0], terms);
    count += kVectors * W::kVec;
  }
}

template <class W>
__global__ void __launch_bounds__(kNormThreads)
    moments_kernel(ChannelSlices s, const typename W::T *x, typename W::A *work) {
  using T = typename W::T;
  using A = typename W::A;
  W walk(s, false);
  A count = 0, mean[W::kChannels] = {}, squares[W::kChannels] = {};
  const auto take = [&](auto vectors) {
    constexpr int n = decltype(vectors)::value;
    Pack<T, W::kVec> packs[n];
    A wide[n][W::kVec];
#pragma unroll
    for (auto &pack : packs) pack = load_pack<T, W::kVec>(x + walk.next());
#pragma unroll
    for (int i = 0; i < n; ++i) widen_pack<T, W::kVec>(packs[i], wide[i]);
    add_vectors<W, n>(count, mean, squares, wide);
  };
#pragma unroll 1
  while (walk.vectors >= kUnroll) take(std::integral_constant<int, kUnroll>());
#pragma unroll 1
  while (walk.vectors > 0) take(std::integral_constant<int, 1>());
  A numbers[2 * W::kChannels + 1];
#pragma unroll
  for (int c = 0; c < W::kChannels; ++c) numbers[c] = mean[c], numbers[W::kChannels + c] = squares[c];
  numbers[2 * W::kChannels] = count;
  combine_rows<W>(numbers, W::kLast ? s.lanes : 1, [](auto &mine, auto &other) {
    constexpr int n = W::kChannels;
#pragma unroll
    for (int c = 0; c < n; ++c) merge_moments(mine[2 * n], mine[c], mine[n + c], other[2 * n], other[c], other[n + c]);
    mine[2 * n] += other[2 * n];
  });
  if (walk.row || !walk.present) return;
  A *const to = work + walk.slice * s.shape.channels + walk.channel;
#pragma unroll
  for (int c = 0; c < W::kChannels; ++c)
    to[c] = numbers[c], to[s.slices * s.shape.channels + c] = numbers[W::kChannels + c];
}

// Eight channels a block, each by 32 threads.
constexpr int kFinishChannels = 8;

template <typename A>
__global__ void __launch_bounds__(kNormThreads) finish_moments_kernel(ChannelSlices s, const A *work, A *mean, A *var) {
  const int64_t channels = s.shape.channels;
  const int64_t channel = int64_t{blockIdx.x} * kFinishChannels + threadIdx.x % kFinishChannels;
  A numbers[3] = {};
  if (channel < channels)
#pragma unroll 4
    for (int slice = static_cast<int>(threadIdx.x) / kFinishChannels; slice < s.slices;
         slice += kNormThreads / kFinishChannels) {
      const A *const of = work + slice * channels + channel;
      const A count = static_cast<A>(s.count(slice));
      merge_moments(numbers[2], numbers[0], numbers[1], count, of[0], of[s.slices * channels]);
      numbers[2] += count;
    }
  combine_rows<void>(numbers, kFinishChannels, [](auto &mine, auto &other) {
    merge_moments(mine[2], mine[0], mine[1], other[2], other[0], other[1]);
    mine[2] += other[2];
  });
  if (threadIdx.x >= kFinishChannels || channel >= channels) return;
  mean[channel] = numbers[0], var[channel] = numbers[2] > 0 ? numbers[1] / numbers[2] : A(0);
}

// ----------------------------------------------------------------------------------------------------------- apply

template <typename T>
struct BatchNormApply {
  const T *x, *residual;
  const void *weight, *bias;
  const Accumulate<T> *mean, *var;
  T *y;
  Accumulate<T> eps;
  NormActivation activation;
  bool wide;
};

template <class W>
__global__ void __launch_bounds__(kNormThreads) apply_kernel(ChannelSlices s, BatchNormApply<typename W::T> f) {
  using T = typename W::T;
  using A = typename W::A;
  W walk(s, true);
  if (!walk.present) return;
  A mean[W::kChannels], scale[W::kChannels], shift[W::kChannels];
#pragma unroll
  for (int c = 0; c < W::kChannels; ++c) {
    const int64_t channel = walk.channel + c;
    mean[c] = f.mean[channel];
    scale[c] = parameter<T>(f.weight, f.wide, channel, A(1)) * rsqrt(f.var[channel] + f.eps);
    shift[c] = parameter<T>(f.bias, f.wide, channel, A(0));
  }
  const auto take = [&](auto vectors) {
    constexpr int n = decltype(vectors)::value;
    Pack<T, W::kVec> packs[n], added[n];
    int64_t at[n];
#pragma unroll
    for (int i = 0; i < n; ++i) at[i] = walk.next();
#pragma unroll
    for (int i = 0; i < n; ++i) packs[i] = load_pack<T, W::kVec>(f.x + at[i]);
    if (f.residual)
#pragma unroll
      for (int i = 0; i < n; ++i) added[i] = load_pack<T, W::kVec>(f.residual + at[i]);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      A wide[W::kVec], other[W::kVec] = {};
      widen_pack<T, W::kVec>(packs[i], wide);
      if (f.residual) widen_pack<T, W::kVec>(added[i], other);
#pragma unroll
      for (int j = 0; j < W::kVec; ++j) {
        const int c = W::kLast ? j : 0;
        wide[j] = (wide[j] - mean[c]) * scale[c] + shift[c] + other[j];
      }
      activate<T>(wide, f.activation);
      store_pack<T, W::kVec>(f.y + at[i], wide);
    }
  };
#pragma unroll 1
  while (walk.vectors >= kUnroll) take(std::integral_constant<int, kUnroll>());
#pragma unroll 1
  while (walk.vectors > 0) take(std::integral_constant<int, 1>());
}

// ------------------------------------------------------------------------------------------------------------ sums

template <typename T>
struct BatchNormSums {
  const T *dy, *x, *y;
  const Accumulate<T> *mean;
  T *dresidual;
  const void *weight, *bias;  // from here on of an activation without y
  const Accumulate<T> *var;
  Accumulate<T> eps;
  NormActivation activation;
  bool wide;
};

// kActivated: an activation's input is computed again.
template <class W, bool kActivated>
__global__ void __launch_bounds__(kNormThreads, 2)
    sums_kernel(ChannelSlices s, BatchNormSums<typename W::T> f, typename W::A *work) {
  using T = typename W::T;
  using A = typename W::A;
  constexpr int kFlush = 16;  // groups of vectors whose terms are added up before they join the sums of many
  W walk(s, false);
  A mean[W::kChannels], numbers[2 * W::kChannels] = {}, run[2 * W::kChannels] = {};
#pragma unroll
  for (int c = 0; c < W::kChannels; ++c) mean[c] = walk.present ? f.mean[walk.channel + c] : A(0);
  A scale[kActivated ? W::kChannels : 1], shift[kActivated ? W::kChannels : 1];
  if constexpr (kActivated)
#pragma unroll
    for (int c = 0; c < W::kChannels && walk.present; ++c) {
      const int64_t channel = walk.channel + c;
      scale[c] = parameter<T>(f.weight, f.wide, channel, A(1)) * rsqrt(f.var[channel] + f.eps);
      shift[c] = parameter<T>(f.bias, f.wide, channel, A(0));
    }
  const auto take = [&](auto vectors) {
    constexpr int n = decltype(vectors)::value;
    Pack<T, W::kVec> dy[n], x[n], y[n];
    int64_t at[n];
#pragma unroll
    for (int i = 0; i < n; ++i) at[i] = walk.next();
#pragma unroll
    for (int i = 0; i < n; ++i) dy[i] = load_pack<T, W::kVec>(f.dy + at[i]);
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = load_pack<T, W::kVec>(f.x + at[i]);
    if (!kActivated && f.y)
#pragma unroll
      for (int i = 0; i < n; ++i) y[i] = load_pack<T, W::kVec>(f.y + at[i]);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      A g[W::kVec], wide[W::kVec];
      widen_pack<T, W::kVec>(dy[i], g);
      if (!kActivated && f.y) {
        widen_pack<T, W::kVec>(y[i], wide);
#pragma unroll
        for (int j = 0; j < W::kVec; ++j) g[j] = wide[j] <= 0 ? A(0) : g[j];
        if (f.dresidual) store_pack<T, W::kVec>(f.dresidual + at[i], g);
      }
      widen_pack<T, W::kVec>(x[i], wide);
#pragma unroll
      for (int j = 0; j < W::kVec; ++j) wide[j] -= mean[W::kLast ? j : 0];
      if constexpr (kActivated) {
        A z[W::kVec];
#pragma unroll
        for (int j = 0; j < W::kVec; ++j) z[j] = wide[j] * scale[W::kLast ? j : 0] + shift[W::kLast ? j : 0];
        activation_gradient<T>(g, z, f.activation);
      }
#pragma unroll
      for (int j = 0; j < W::kVec; ++j) {
        const int c = W::kLast ? j : 0;
        run[c] += g[j], run[W::kChannels + c] += g[j] * wide[j];
      }
    }
  };
  const auto flush = [&] {
#pragma unroll
    for (int i = 0; i < 2 * W::kChannels; ++i) numbers[i] += run[i], run[i] = 0;
  };
#pragma unroll 1
  while (walk.vectors >= kUnroll) {
#pragma unroll 1
    for (int i = 0; i < kFlush && walk.vectors >= kUnroll; ++i) take(std::integral_constant<int, kUnroll>());
    flush();
  }
#pragma unroll 1
  while (walk.vectors > 0) take(std::integral_constant<int, 1>());
  flush();
  combine_rows<W>(numbers, W::kLast ? s.lanes : 1, [](auto &mine, auto &other) {
#pragma unroll
    for (int i = 0; i < 2 * W::kChannels; ++i) mine[i] += other[i];
  });
  if (walk.row || !walk.present) return;
  A *const to = work + walk.slice * s.shape.channels + walk.channel;
#pragma unroll
  for (int c = 0; c < W::kChannels; ++c)
    to[c] = numbers[c], to[s.slices * s.shape.channels + c] = numbers[W::kChannels + c];
}

template <typename T>
struct BatchNormFinish {
  const void *weight;
  const Accumulate<T> *var, *dmean, *dvar;
  void *dweight, *dbias;
  Accumulate<T> *factors;  // (3, channels): dx = factors[0] g + factors[1] (x - mean) + factors[2]
  Accumulate<T> eps, terms;
  bool wide;
};

template <typename T>
__device__ inline void set_parameter(void *to, bool wide, int64_t channel, Accumulate<T> value) {
  if (!to) return;
  if (wide) static_cast<float *>(to)[channel] = static_cast<float>(value);
  else static_cast<T *>(to)[channel] = narrow<T>(value);
}

template <typename T>
__global__ void __launch_bounds__(kNormThreads)
    finish_sums_kernel(ChannelSlices s, const Accumulate<T> *work, BatchNormFinish<T> f) {
  using A = Accumulate<T>;
  const int64_t channels = s.shape.channels;
  const int64_t channel = int64_t{blockIdx.x} * kFinishChannels + threadIdx.x % kFinishChannels;
  A numbers[2] = {};
  if (channel < channels)
#pragma unroll 4
    for (int slice = static_cast<int>(threadIdx.x) / kFinishChannels; slice < s.slices;
         slice += kNormThreads / kFinishChannels) {
      const A *const of = work + slice * channels + channel;
      numbers[0] += of[0], numbers[1] += of[s.slices * channels];
    }
  combine_rows<void>(numbers, kFinishChannels,
                     [](auto &mine, auto &other) { mine[0] += other[0], mine[1] += other[1]; });
  if (threadIdx.x >= kFinishChannels || channel >= channels) return;
  const A rstd = rsqrt(f.var[channel] + f.eps);
  const A scale = parameter<T>(f.weight, f.wide, channel, A(1)) * rstd;
  set_parameter<T>(f.dbias, f.wide, channel, numbers[0]);
  set_parameter<T>(f.dweight, f.wide, channel, numbers[1] * rstd);
  f.factors[channel] = scale;
  f.factors[channels + channel] = ((f.dvar ? 2 * f.dvar[channel] : A(0)) - scale * rstd * rstd * numbers[1]) / f.terms;
  f.factors[2 * channels + channel] = ((f.dmean ? f.dmean[channel] : A(0)) - scale * numbers[0]) / f.terms;
}

// ------------------------------------------------------------------------------------------------------- gradients

template <typename T>
struct BatchNormDx {
  const T *g, *x, *y;  // g is dy, to be set to 0 by y, if that is given
  const Accumulate<T> *mean, *factors;
  T *dx;
  const void *bias;  // from here on of an activation without y
  NormActivation activation;
  bool wide;
};

template <class W, bool kActivated>
__global__ void __launch_bounds__(kNormThreads) gradients_kernel(ChannelSlices s, BatchNormDx<typename W::T> f) {
  using T = typename W::T;
  using A = typename W::A;
  W walk(s, true);
  if (!walk.present) return;
  A mean[W::kChannels], factor[3][W::kChannels];
#pragma unroll
  for (int c = 0; c < W::kChannels; ++c) {
    mean[c] = f.mean[walk.channel + c];
#pragma unroll
    for (int i = 0; i < 3; ++i) factor[i][c] = f.factors[i * s.shape.channels + walk.channel + c];
  }
  A shift[kActivated ? W::kChannels : 1];
  if constexpr (kActivated)
#pragma unroll
    for (int c = 0; c < W::kChannels; ++c) shift[c] = parameter<T>(f.bias, f.wide, walk.channel + c, A(0));
  const auto take = [&](auto vectors) {
    constexpr int n = decltype(vectors)::value;
    Pack<T, W::kVec> g[n], x[n], y[n];
    int64_t at[n];
#pragma unroll
    for (int i = 0; i < n; ++i) at[i] = walk.next();
#pragma unroll
    for (int i = 0; i < n; ++i) g[i] = load_pack<T, W::kVec>(f.g + at[i]);
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = load_pack<T, W::kVec>(f.x + at[i]);
    if (!kActivated && f.y)
#pragma unroll
      for (int i = 0; i < n; ++i) y[i] = load_pack<T, W::kVec>(f.y + at[i]);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      A dy[W::kVec], wide[W::kVec];
      widen_pack<T, W::kVec>(g[i], dy), widen_pack<T, W::kVec>(x[i], wide);
#pragma unroll
      for (int j = 0; j < W::kVec; ++j) wide[j] -= mean[W::kLast ? j : 0];
      if constexpr (kActivated) {
        A z[W::kVec];
#pragma unroll
        for (int j = 0; j < W::kVec; ++j) z[j] = wide[j] * factor[0][W::kLast ? j : 0] + shift[W::kLast ? j : 0];
        activation_gradient<T>(dy, z, f.activation);
      } else if (f.y) {
        A of_y[W::kVec];
        widen_pack<T, W::kVec>(y[i], of_y);
#pragma unroll
        for (int j = 0; j < W::kVec; ++j) dy[j] = of_y[j] <= 0 ? A(0) : dy[j];
      }
#pragma unroll
      for (int j = 0; j < W::kVec; ++j) {
        const int c = W::kLast ? j : 0;
        dy[j] = dy[j] * factor[0][c] + (wide[j] * factor[1][c] + factor[2][c]);
      }
      store_pack<T, W::kVec>(f.dx + at[i], dy);
    }
  };
#pragma unroll 1
  while (walk.vectors >= kUnroll) take(std::integral_constant<int, kUnroll>());
#pragma unroll 1
  while (walk.vectors > 0) take(std::integral_constant<int, 1>());
}

// ------------------------------------------------------------------------------------------------------- launchers

inline int64_t up_to_power_of_2(int64_t n, int64_t most) {
  int64_t power = 1;
  while (power < n && power < most) power *= 2;
  return power;
}

// f(Walk type, slices, grid) for a tensor, by vectors where `aligned`.
template <typename T, class F>
Status with_walk(const ChannelShape &shape, bool aligned, F f) {
  const bool last = shape.inner == 1;
  const bool vectors = aligned && (last ? shape.channels : shape.inner) % kVectorSize<T> == 0;
  const int64_t vec = vectors ? kVectorSize<T> : 1;
  ChannelSlices s{shape, last ? shape.outer : shape.outer * shape.inner, 1, 1, 1};
  int64_t blocks = shape.channels, least = int64_t{kNormThreads} * kUnroll * vec;  // elements that are worth a block
  if (last) {
    s.lanes = static_cast<int>(up_to_power_of_2(ceil_div(shape.channels, vec), 32));
    blocks = ceil_div(shape.channels, s.lanes * vec), least = kNormThreads / s.lanes * kUnroll;
  }
  const int64_t wanted = std::min({channel_slices(shape), ceil_div(kMostBlocks, blocks), ceil_div(s.total, least)});
  s.chunk = ceil_div(ceil_div(std::max<int64_t>(s.total, 1), std::max<int64_t>(wanted, 1)), vec) * vec;
  s.slices = static_cast<int>(std::max<int64_t>(ceil_div(s.total, s.chunk), 1));
  const dim3 grid(grid_size(blocks), static_cast<unsigned>(s.slices));
  constexpr int kVec = kVectorSize<T>;
  if (last) return vectors ? f(Type<Walk<T, kVec, true>>(), s, grid) : f(Type<Walk<T, 1, true>>(), s, grid);
  return vectors ? f(Type<Walk<T, kVec, false>>(), s, grid) : f(Type<Walk<T, 1, false>>(), s, grid);
}

unsigned finish_blocks(const ChannelShape &shape) { return grid_size(ceil_div(shape.channels, kFinishChannels)); }

template <typename T>
Status batch_norm(const BatchNormCall &call) {
  using A = Accumulate<T>;
  const bool all_aligned = aligned(call.x, call.residual, call.y);
  return with_walk<T>(call.shape, all_aligned, [&](auto type, const ChannelSlices &s, dim3 grid) {
    using W = typename decltype(type)::type;
    const T *const x = static_cast<const T *>(call.x);
    A *const work = static_cast<A *>(call.work), *const mean = static_cast<A *>(call.mean);
    A *const var = static_cast<A *>(call.var);
    moments_kernel<W><<<grid, kNormThreads, 0, call.stream>>>(s, x, work);
    AOT_TRY(check_launch(call.op));
    finish_moments_kernel<A><<<finish_blocks(s.shape), kNormThreads, 0, call.stream>>>(s, work, mean, var);
    AOT_TRY(check_launch(call.op));
    const BatchNormApply<T> f{x,
                              static_cast<const T *>(call.residual),
                              call.weight,
                              call.bias,
                              mean,
                              var,
                              static_cast<T *>(call.y),
                              static_cast<A>(call.eps),
                              call.activation,
                              call.wide};
    apply_kernel<W><<<grid, kNormThreads, 0, call.stream>>>(s, f);
    return check_launch(call.op);
  });
}

template <typename T>
Status batch_norm_backward(const BatchNormBackwardCall &call) {
  using A = Accumulate<T>;
  const bool all_aligned = aligned(call.dy, call.x, call.y, call.dx, call.dresidual);
  return with_walk<T>(call.shape, all_aligned, [&](auto type, const ChannelSlices &s, dim3 grid) {
    using W = typename decltype(type)::type;
    const T *const x = static_cast<const T *>(call.x), *const dy = static_cast<const T *>(call.dy);
    const T *const y = static_cast<const T *>(call.y);
    const A *const mean = static_cast<const A *>(call.mean);
    A *const work = static_cast<A *>(call.work), *const factors = work + 2 * s.slices * s.shape.channels;
    T *const dresidual = static_cast<T *>(call.dresidual);
    const bool activated = !y && call.activation != kNormPlain;
    const A eps = static_cast<A>(call.eps), *const var = static_cast<const A *>(call.var);
    const BatchNormSums<T> sums{dy,       x, y, mean, dresidual, call.weight, call.bias, var, eps, call.activation,
                                call.wide};
    if (activated) sums_kernel<W, true><<<grid, kNormThreads, 0, call.stream>>>(s, sums, work);
    else sums_kernel<W, false><<<grid, kNormThreads, 0, call.stream>>>(s, sums, work);
    AOT_TRY(check_launch(call.op));
    const BatchNormFinish<T> finish{call.weight,
                                    var,
                                    static_cast<const A *>(call.dmean),
                                    static_cast<const A *>(call.dvar),
                                    call.dweight,
                                    call.dbias,
                                    factors,
                                    eps,
                                    static_cast<A>(call.shape.terms()),
                                    call.wide};
    finish_sums_kernel<T><<<finish_blocks(s.shape), kNormThreads, 0, call.stream>>>(s, work, finish);
    AOT_TRY(check_launch(call.op));
    if (!call.dx) return kOk;
    const BatchNormDx<T> f{dresidual ? dresidual : dy, x,         dresidual ? nullptr : y, mean,     factors,
                           static_cast<T *>(call.dx),  call.bias, call.activation,         call.wide};
    if (activated) gradients_kernel<W, true><<<grid, kNormThreads, 0, call.stream>>>(s, f);
    else gradients_kernel<W, false><<<grid, kNormThreads, 0, call.stream>>>(s, f);
    return check_launch(call.op);
  });
}

Status run_batch_norm(DType dtype, const BatchNormCall &call) {
  return dispatch(dtype, [&](auto type) { return batch_norm<typename decltype(type)::type>(call); });
}

Status run_batch_norm_backward(DType dtype, const BatchNormBackwardCall &call) {
  return dispatch(dtype, [&](auto type) { return batch_norm_backward<typename decltype(type)::type>(call); });
}

}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(BatchNorm, aot_batch_norm_cuda, batch_norm_cuda<BatchNorm>)
AOT_ENTRY(BatchNormBackward, aot_batch_norm_backward_cuda, batch_norm_backward_cuda<BatchNormBackward>)
