// Depthwise convolutions in NHWC: one channel for each group.
//
// A thread has a word of channels, 4 bytes, so that a warp reads and writes whole lines; some neighbouring positions of
// a row; and a strip of rows, which it goes down. Each row of the input is read once for all kernel rows: the sums of
// the results that it meets are in registers, as is the kernel. For dweight the sums are the kernel's, and the rows of
// dy are in registers. The next row is loaded before the sums of this one.
#pragma once
#include "conv2d.cuh"
#include "conv2d_depthwise.h"
#include "cuda/overlap.cuh"

namespace aot {
inline namespace AOT_ISA {

template <typename T>
constexpr int kWordSize = 4 / static_cast<int>(sizeof(T));

template <typename T>
__device__ inline void widen_channels(uint32_t word, float (&v)[kWordSize<T>]) {
  if constexpr (sizeof(T) == 2) widen_word(word, v, T());
  else v[0] = reinterpret_cast<const float &>(word);
}
template <typename T>
__device__ inline uint32_t narrow_channels(const float (&v)[kWordSize<T>]) {
  if constexpr (sizeof(T) == 2) return narrow_word(v[0], v[1], T());
  else return reinterpret_cast<const uint32_t &>(v[0]);
}

// A thread's place in a call.
struct DepthwisePlace {
  int image, residue_h, first_m, rows, residue_w, first_column;

  // i: of d.items, whose column tiles are neighbours
  template <int kColumns>
  static __device__ DepthwisePlace at(const Depthwise &d, int64_t i) {
    DepthwisePlace p;
    const int tiles = d.tiles_w / d.w.residues, strips = d.strips / d.h.residues;
    const int tile = static_cast<int>(i % d.tiles_w), strip = static_cast<int>(i / d.tiles_w % d.strips);
    p.image = static_cast<int>(i / d.tiles_w / d.strips);
    p.residue_w = tile / tiles, p.first_column = tile % tiles * kColumns;
    p.residue_h = strip / strips, p.first_m = strip % strips * d.strip;
    p.rows = d.h.count - p.first_m < d.strip ? d.h.count - p.first_m : d.strip;
    return p;
  }
};

// The columns of a thread's window that the image has, as bits, and the elements from one to the next.
template <int kWindow>
struct DepthwiseColumns {
  int first;
  uint32_t inside = 0;
  int64_t step;

  __device__ DepthwiseColumns(const Depthwise &d, int first_column)
      : first(first_column), step(int64_t{d.w.unit} * d.channels) {
#pragma unroll
    for (int u = 0; u < kWindow; ++u) {
      const int column = first_column + u * d.w.unit;
      inside |= static_cast<uint32_t>(0 <= column && column < d.w.in) << u;
    }
  }
};

// A row of the window of a thread, as words; zeros outside of the image.
template <int kWindow>
struct DepthwiseRow {
  uint32_t word[kWindow];

  // from: the image's first element of the thread's channels
  template <typename T>
  __device__ void load(const T *from, const Depthwise &d, const DepthwiseColumns<kWindow> &columns, int row) {
    const uint32_t inside = static_cast<uint32_t>(row) < static_cast<uint32_t>(d.h.in) ? columns.inside : 0;
    const T *p = from + (int64_t{row} * d.w.in + columns.first) * d.channels;
#pragma unroll
    for (int u = 0; u < kWindow; ++u, p += columns.step)
      word[u] = inside >> u & 1 ? *reinterpret_cast<const uint32_t *>(p) : 0;
  }
};

// The channels of a block and of a thread, and the kernel in the thread's registers.
template <typename T, int kKernel>
__device__ inline void load_depthwise_weight(const Depthwise &d, const T *weight, int first, int lane,
                                             float (&to)[kKernel * kKernel][kWordSize<T>]) {
  constexpr int kTaps = kKernel * kKernel;
  __shared__ float staged[32 * kWordSize<T> * kTaps];
  const int left = d.channels - first, channels = d.lanes * kWordSize<T> < left ? d.lanes * kWordSize<T> : left;
  for (int i = threadIdx.x; i < channels * kTaps; i += kDepthwiseThreads)
    staged[i] = widen(weight[int64_t{first} * kTaps + i]);
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kTaps; ++k)
#pragma unroll
    for (int v = 0; v < kWordSize<T>; ++v) {
      const int channel = lane * kWordSize<T> + v, tap = d.reversed ? kTaps - 1 - k : k;
      to[k][v] = channel < channels ? staged[channel * kTaps + tap] : 0;
    }
}

template <typename T, int kKernel, int kIn, int kOut, int kBlocks>
__global__ void __launch_bounds__(kDepthwiseThreads, kBlocks)
    depthwise_kernel(Depthwise d, const T *x, const T *weight, const T *bias, T *y) {
  using Taps = DepthwiseTaps<kKernel, kIn, kOut>;
  constexpr int kColumns = depthwise_columns(kIn, kOut), kTaps = Taps::kTaps, V = kWordSize<T>;
  constexpr int kWindow = Taps::window(kColumns);
  const int chunk = static_cast<int>(blockIdx.x % d.chunks), lane = threadIdx.x % d.lanes;
  const int first = chunk * d.lanes * V, channel = first + lane * V;
  float w[kKernel * kKernel][V], b[V] = {};
  load_depthwise_weight<T, kKernel>(d, weight, first, lane, w);
  const int64_t item = int64_t{blockIdx.x / d.chunks} * (kDepthwiseThreads / d.lanes) + threadIdx.x / d.lanes;
  if (item >= d.items || channel >= d.channels) return;
  const DepthwisePlace at = DepthwisePlace::at<kColumns>(d, item);
  if (bias)
#pragma unroll
    for (int v = 0; v < V; ++v) b[v] = widen(bias[channel + v]);
  const T *from = x + int64_t{at.image} * d.h.in * d.w.in * d.channels + channel;
  T *to = y + int64_t{at.image} * d.h.out * d.w.out * d.channels + channel;
  const DepthwiseColumns<kWindow> columns(d, d.w.input(at.residue_w, kIn * at.first_column));

  DepthwiseRow<kWindow> next[kIn];
  auto load = [&](int n) {
#pragma unroll
    for (int e = 0; e < kIn; ++e) next[e].load(from, d, columns, d.h.input(at.residue_h, kIn * (at.first_m + n) + e));
  };
  float sum[kTaps][kOut][kColumns][kOut][V] = {};  // of the position n - lag, for the row n
  load(0);
#pragma unroll 1
  for (int n = 0; n < at.rows + kTaps - 1; ++n) {
    DepthwiseRow<kWindow> row[kIn];
#pragma unroll
    for (int e = 0; e < kIn; ++e) row[e] = next[e];
    if (n + 1 < at.rows + kTaps - 1) load(n + 1);
#pragma unroll
    for (int e = 0; e < kIn; ++e) {
      float value[kWindow][V];
#pragma unroll
      for (int u = 0; u < kWindow; ++u) widen_channels<T>(row[e].word[u], value[u]);
#pragma unroll
      for (int lag = 0; lag < kTaps; ++lag) {
        if (kKernel > 3 && (n < lag || n - lag >= at.rows)) continue;  // not this strip's
#pragma unroll
        for (int u = 0; u < kWindow; ++u)
#pragma unroll
          for (int m = 0; m < kColumns; ++m)
#pragma unroll
            for (int fh = 0; fh < kOut; ++fh)
#pragma unroll
              for (int fw = 0; fw < kOut; ++fw) {
                const int lag_w = u / kIn - m;
                if (lag_w < 0 || lag_w >= kTaps) continue;
                const int r = Taps::at(lag, e, fh), s = Taps::at(lag_w, u % kIn, fw);
                if (r >= kKernel || s >= kKernel) continue;
#pragma unroll
                for (int v = 0; v < V; ++v) sum[lag][fh][m][fw][v] += value[u][v] * w[r * kKernel + s][v];
              }
      }
    }
    if (n >= kTaps - 1) {
#pragma unroll
      for (int fh = 0; fh < kOut; ++fh) {
        const int p = d.h.output(at.residue_h, at.first_m + n - (kTaps - 1), fh);
        if (p < 0 || p >= d.h.out) continue;
#pragma unroll
        for (int m = 0; m < kColumns; ++m)
#pragma unroll
          for (int fw = 0; fw < kOut; ++fw) {
            const int q = d.w.output(at.residue_w, at.first_column + m, fw);
            float result[V];
#pragma unroll
            for (int v = 0; v < V; ++v) result[v] = sum[kTaps - 1][fh][m][fw][v] + b[v];
            if (0 <= q && q < d.w.out)
              *reinterpret_cast<uint32_t *>(to + (int64_t{p} * d.w.out + q) * d.channels) = narrow_channels<T>(result);
          }
      }
    }
#pragma unroll
    for (int lag = kTaps - 1; lag >= 0; --lag)
#pragma unroll
      for (int fh = 0; fh < kOut; ++fh)
#pragma unroll
        for (int m = 0; m < kColumns; ++m)
#pragma unroll
          for (int fw = 0; fw < kOut; ++fw)
#pragma unroll
            for (int v = 0; v < V; ++v) sum[lag][fh][m][fw][v] = lag ? sum[lag ? lag - 1 : 0][fh][m][fw][v] : 0;
  }
}

// Zeros from the last channel of a slice of dweight to its end: its size is a multiple of four.
template <int kKernel>
__device__ inline void clear_slice_end(const Depthwise &d, float *partial, int64_t slice) {
  const int64_t i = int64_t{d.channels} * kKernel * kKernel + threadIdx.x;
  if (blockIdx.x == 0 && i < slice) partial[blockIdx.y * slice + i] = 0;
}

// partial[slice][channel][kernel element], `slice` elements apart. A block takes every
// gridDim.y-th of the groups of items.
template <typename T, int kKernel, int kIn, int kBlocks>
__global__ void __launch_bounds__(kDepthwiseThreads, kBlocks)
    depthwise_dweight_kernel(Depthwise d, const T *dy, const T *x, float *partial, int64_t slice) {
  using Taps = DepthwiseTaps<kKernel, kIn, 1>;
  constexpr int kColumns = depthwise_columns(kIn, 1), kTaps = Taps::kTaps, V = kWordSize<T>;
  constexpr int kWindow = Taps::window(kColumns);
  __shared__ float sums[kKernel * V][kDepthwiseThreads];
  const int lane = threadIdx.x % d.lanes, groups = kDepthwiseThreads / d.lanes;
  const int first = blockIdx.x * d.lanes * V, channel = first + lane * V;
  const int64_t items = channel < d.channels ? d.items : 0;
  float sum[kKernel][kKernel][V] = {};
  const int64_t dy_step = int64_t{d.w.out_step} * d.channels;
  launch_next();
#pragma unroll 1
  for (int64_t item = int64_t{blockIdx.y} * groups + threadIdx.x / d.lanes; item < items; item += gridDim.y * groups) {
    const DepthwisePlace at = DepthwisePlace::at<kColumns>(d, item);
    const T *from = x + int64_t{at.image} * d.h.in * d.w.in * d.channels + channel;
    const T *by = dy + int64_t{at.image} * d.h.out * d.w.out * d.channels + channel;
    const DepthwiseColumns<kWindow> window(d, d.w.input(at.residue_w, kIn * at.first_column));
    const int q0 = d.w.output(at.residue_w, at.first_column, 0);
    // of this tile that y has
    const int columns = d.w.positions_from(q0);
    const int rows = min(at.rows, d.h.positions_from(d.h.output(at.residue_h, at.first_m, 0)));

    DepthwiseRow<kWindow> next[kIn];
    uint32_t next_dy[kColumns];
    auto load = [&](int n) {
#pragma unroll
      for (int e = 0; e < kIn; ++e) next[e].load(from, d, window, d.h.input(at.residue_h, kIn * (at.first_m + n) + e));
      const T *p = by + (int64_t{d.h.output(at.residue_h, at.first_m + n, 0)} * d.w.out + q0) * d.channels;
#pragma unroll
      for (int m = 0; m < kColumns; ++m, p += dy_step)
        next_dy[m] = m < (n < rows ? columns : 0) ? *reinterpret_cast<const uint32_t *>(p) : 0;
    };
    uint32_t rows_of_dy[kTaps][kColumns] = {};  // lag rows before this one
    load(0);
#pragma unroll 1
    for (int n = 0; n < rows + kTaps - 1; ++n) {
      DepthwiseRow<kWindow> row[kIn];
#pragma unroll
      for (int e = 0; e < kIn; ++e) row[e] = next[e];
#pragma unroll
      for (int lag = kTaps - 1; lag >= 0; --lag)
#pragma unroll
        for (int m = 0; m < kColumns; ++m) rows_of_dy[lag][m] = lag ? rows_of_dy[lag ? lag - 1 : 0][m] : next_dy[m];
      if (n + 1 < rows + kTaps - 1) load(n + 1);
      // is_whole: all the positions are of dy. If not, the others are left out: x that no element of dy meets may be
      // infinite.
      auto add = [&](auto is_whole) {
        constexpr bool whole = decltype(is_whole)::value;
#pragma unroll
        for (int e = 0; e < kIn; ++e) {
          float value[kWindow][V];
#pragma unroll
          for (int u = 0; u < kWindow; ++u) widen_channels<T>(row[e].word[u], value[u]);
#pragma unroll
          for (int lag = 0; lag < kTaps; ++lag) {
            const int r = Taps::at(lag, e, 0);
            if (r >= kKernel || (!whole && (n < lag || n - lag >= rows))) continue;
#pragma unroll
            for (int m = 0; m < kColumns; ++m) {
              float of_dy[V];
              widen_channels<T>(rows_of_dy[lag][m], of_dy);
              if (whole || m < columns)
#pragma unroll
                for (int s = 0; s < kKernel; ++s)
#pragma unroll
                  for (int v = 0; v < V; ++v) sum[r][s][v] += of_dy[v] * value[kIn * m + s][v];
            }
          }
        }
      };
      if (columns >= kColumns && n >= kTaps - 1 && n < rows) add(std::true_type());
      else add(std::false_type());
    }
  }

  clear_slice_end<kKernel>(d, partial, slice);
  // Adds what the groups of a block have, in their order.
  const int lanes = d.lanes;
#pragma unroll
  for (int r = 0; r < kKernel; ++r) {
#pragma unroll
    for (int s = 0; s < kKernel; ++s)
#pragma unroll
      for (int v = 0; v < V; ++v) sums[s * V + v][threadIdx.x] = sum[r][s][v];
    __syncthreads();
    for (int i = threadIdx.x; i < lanes * V * kKernel; i += kDepthwiseThreads) {
      const int s = i % kKernel, c = i / kKernel;  // of the block's channels
      float total = 0;
      for (int group = 0; group < groups; ++group) total += sums[s * V + c % V][group * lanes + c / V];
      if (first + c < d.channels)
        partial[blockIdx.y * slice + (int64_t{first} + c) * kKernel * kKernel + r * kKernel + s] = total;
    }
    __syncthreads();
  }
}

}  // namespace AOT_ISA
}  // namespace aot
