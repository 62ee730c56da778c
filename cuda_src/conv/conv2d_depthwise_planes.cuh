// Depthwise convolutions in NCHW: one plane of x for each plane of y.
//
// A block loads a tile of rows into shared memory, as float32 and with zeros on both sides: some whole planes, which
// are contiguous, or a part of a large one. A thread then has some neighbouring columns and goes down a strip of rows,
// as in NHWC.
#pragma once
#include "conv2d.cuh"
#include "conv2d_depthwise.cuh"

namespace aot {
inline namespace AOT_ISA {

struct DepthwisePlanes : Depthwise {
  Divisor by_row, by_dy_row, by_margin;            // pieces of a row of x and dy as they are loaded; zeros beside a row
  Divisor by_tile, by_residue, by_strip, by_part;  // of an item: column tiles, those of a residue; likewise strips
  int load = 1, load_dy = 1, store = 1;            // elements at once
  int items = 0;                                   // of a tile; of dweight, of a tile's plane and its images
  bool dense = false;                              // neighbouring positions are neighbouring columns
};

// Elements of contiguous rows, as float32, to rows of a tile, `load` of which are loaded at once: 1 or 2.
template <typename T>
__device__ inline void fill_rows(float *tile, const T *from, int rows, int width, int pitch, int load, Divisor by_row) {
  constexpr int kAtOnce = 8;
  const int pieces = rows * static_cast<int>(by_row.n);
  auto fill = [&](auto pair) {
    constexpr int kLoad = decltype(pair)::value ? 2 : 1;
    struct alignas(kLoad * sizeof(T)) Piece {
      T v[kLoad];
    };
    for (int i0 = threadIdx.x; i0 < pieces; i0 += kAtOnce * kPlaneThreads) {
      Piece piece[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (i0 + k * kPlaneThreads < pieces)
          piece[k] = *reinterpret_cast<const Piece *>(from + int64_t{i0 + k * kPlaneThreads} * kLoad);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int i = i0 + k * kPlaneThreads, row = by_row.divide(i);
        if (i >= pieces) break;
#pragma unroll
        for (int e = 0; e < kLoad; ++e) tile[row * (pitch - width) + i * kLoad + e] = widen(piece[k].v[e]);
      }
    }
  };
  load == 2 ? fill(std::true_type()) : fill(std::false_type());
}

// Zeros to the left and to the right of each row.
__device__ inline void clear_margins(float *tile, int rows, int left, int width, int pitch, Divisor by_margin) {
  for (int i = threadIdx.x; i < rows * (pitch - width); i += kPlaneThreads) {
    const int row = by_margin.divide(i), j = i - row * (pitch - width);
    tile[row * pitch + (j < left ? j : width + j)] = 0;
  }
}

// A thread's place in a tile.
struct PlanePlace {
  int plane, residue_h, first_m, rows, residue_w, first_column;

  template <int kColumns>
  static __device__ PlanePlace at(const DepthwisePlanes &d, int i, int first_row) {
    PlanePlace p;
    const int j = d.by_tile.divide(i), tile = i - j * d.tiles_w;
    p.plane = d.by_strip.divide(j);
    const int strip = j - p.plane * d.strips;
    p.residue_w = d.by_residue.divide(tile);
    p.first_column = (tile - p.residue_w * static_cast<int>(d.by_residue.n)) * kColumns;
    p.residue_h = d.by_part.divide(strip);
    p.first_m = first_row + (strip - p.residue_h * static_cast<int>(d.by_part.n)) * d.strip;
    const int end = min(first_row + d.block_rows, d.h.count);
    p.rows = end - p.first_m < d.strip ? end - p.first_m : d.strip;
    return p;
  }
};

// A row of a thread's window; zeros if it is outside of the image.
template <int kWindow>
__device__ inline void load_window(float (&value)[kWindow], const float *row, bool inside, bool dense, int unit) {
  if (kWindow % 4 == 0 && dense) {
#pragma unroll
    for (int u = 0; u + 3 < kWindow; u += 4) {
      const float4 four = inside ? *reinterpret_cast<const float4 *>(row + u) : float4{};
      value[u] = four.x, value[u + 1] = four.y, value[u + 2] = four.z, value[u + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int u = 0; u < kWindow; ++u) value[u] = inside ? row[u * unit] : 0;
  }
}

// Elements that a thread reads of a row: whole vectors, if it has several columns.
template <int kWindow>
constexpr int kReadWindow = kWindow > 4 ? (kWindow + 3) / 4 * 4 : kWindow;

// Results of neighbouring positions of a row: several at once where a row is divided into such pieces.
template <int kColumns, int kOut, typename T>
__device__ inline void store_columns(const DepthwisePlanes &d, T *row, const PlanePlace &at,
                                     const T (&result)[kColumns][kOut]) {
  const int q = d.w.output(at.residue_w, at.first_column, 0);
  auto store = [&](auto size) {
    constexpr int kSize = decltype(size)::value;
    struct alignas(kSize * sizeof(T)) Piece {
      T v[kSize];
    };
#pragma unroll
    for (int m = 0; m < kColumns; m += kSize) {
      Piece piece;
#pragma unroll
      for (int e = 0; e < kSize; ++e) piece.v[e] = result[m + e][0];
      if (q + m < d.w.out) *reinterpret_cast<Piece *>(row + q + m) = piece;
    }
  };
  if constexpr (kColumns == 4 && kOut == 1) {
    if (d.store == 4) return store(std::integral_constant<int, 4>());
    if (d.store == 2) return store(std::integral_constant<int, 2>());
  }
#pragma unroll
  for (int m = 0; m < kColumns; ++m)
#pragma unroll
    for (int f = 0; f < kOut; ++f) {
      const int column = d.w.output(at.residue_w, at.first_column + m, f);
      if (0 <= column && column < d.w.out) row[column] = result[m][f];
    }
}

// The rows of x that the results of a tile meet.
template <class Taps, int kIn>
struct TileRows {
  int first, last;

  __device__ TileRows(const DepthwisePlanes &d, int first_m) : first(0), last(d.h.in) {
    if (d.row_blocks == 1) return;
    first = max(0, d.h.input(0, kIn * first_m));
    last = max(first, min(d.h.in, d.h.input(0, kIn * first_m + Taps::window(d.block_rows) - 1) + 1));
  }
};

template <typename T, int kKernel, int kIn, int kOut, int kBlocks>
__global__ void __launch_bounds__(kPlaneThreads, kBlocks)
    depthwise_planes_kernel(DepthwisePlanes d, const T *x, const T *weight, const T *bias, T *y) {
  using Taps = DepthwiseTaps<kKernel, kIn, kOut>;
  constexpr int kColumns = plane_columns(kOut), kTaps = Taps::kTaps, kWindow = kReadWindow<Taps::window(kColumns)>;
  const bool dense = d.dense && kIn * kColumns % 4 == 0;  // whole vectors, which begin at a multiple of one
  extern __shared__ float4 plane_tiles[];
  float *tile = reinterpret_cast<float *>(plane_tiles);
  const int first_row = static_cast<int>(blockIdx.x % d.row_blocks) * d.block_rows;
  const int first = static_cast<int>(blockIdx.x / d.row_blocks) * d.planes, left = -d.w.first_in;
  const int planes = min(d.planes, d.batch * d.channels - first);
  const TileRows<Taps, kIn> rows(d, first_row);
  const int filled = planes > 1 ? planes * d.h.in : rows.last - rows.first;
  clear_margins(tile, filled, left, d.w.in, d.pitch, d.by_margin);
  fill_rows(tile + left, x + (int64_t{first} * d.h.in + rows.first) * d.w.in, filled, d.w.in, d.pitch, d.load,
            d.by_row);
  __syncthreads();
#pragma unroll 1
  for (int item = threadIdx.x; item < d.items; item += kPlaneThreads) {
    const PlanePlace at = PlanePlace::at<kColumns>(d, item, first_row);
    if (at.plane >= planes || at.rows <= 0) continue;
    const int plane = first + at.plane, channel = plane % d.channels;
    float w[kKernel * kKernel];
#pragma unroll
    for (int k = 0; k < kKernel * kKernel; ++k)
      w[k] = widen(weight[int64_t{channel} * kKernel * kKernel + (d.reversed ? kKernel * kKernel - 1 - k : k)]);
    const float b = bias ? widen(bias[channel]) : 0;
    const float *from = tile + (at.plane * d.h.in - rows.first) * d.pitch + d.w.in_residue * at.residue_w +
                        d.w.unit * kIn * at.first_column;
    T *to = y + int64_t{plane} * d.h.out * d.w.out;
    float sum[kTaps][kOut][kColumns][kOut] = {};  // of the position n - lag, for the row n
#pragma unroll 1
    for (int n = 0; n < at.rows + kTaps - 1; ++n) {
#pragma unroll
      for (int e = 0; e < kIn; ++e) {
        const int h = d.h.input(at.residue_h, kIn * (at.first_m + n) + e);
        const bool inside = 0 <= h && h < d.h.in && kIn * n + e < Taps::window(at.rows);
        float value[kWindow];
        load_window(value, from + h * d.pitch, inside, dense, d.w.unit);
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
                  if (r < kKernel && s < kKernel) sum[lag][fh][m][fw] += value[u] * w[r * kKernel + s];
                }
        }
      }
#pragma unroll
      for (int fh = 0; fh < kOut; ++fh) {
        const int p = d.h.output(at.residue_h, at.first_m + n - (kTaps - 1), fh);
        if (n < kTaps - 1 || p < 0 || p >= d.h.out) continue;
        T result[kColumns][kOut];
#pragma unroll
        for (int m = 0; m < kColumns; ++m)
#pragma unroll
          for (int fw = 0; fw < kOut; ++fw) result[m][fw] = narrow<T>(sum[kTaps - 1][fh][m][fw] + b);
        store_columns<kColumns, kOut>(d, to + int64_t{p} * d.w.out, at, result);
      }
#pragma unroll
      for (int lag = kTaps - 1; lag >= 0; --lag)
#pragma unroll
        for (int fh = 0; fh < kOut; ++fh)
#pragma unroll
          for (int m = 0; m < kColumns; ++m)
#pragma unroll
            for (int fw = 0; fw < kOut; ++fw) sum[lag][fh][m][fw] = lag ? sum[lag ? lag - 1 : 0][fh][m][fw] : 0;
    }
  }
}

// partial[slice][channel][kernel element], `slice` elements apart. Blocks along x have some channels each; those along
// y share the images and the parts of their planes.
template <typename T, int kKernel, int kIn, int kBlocks>
__global__ void __launch_bounds__(kPlaneThreads, kBlocks)
    depthwise_planes_dweight_kernel(DepthwisePlanes d, const T *dy, const T *x, float *partial, int64_t slice) {
  using Taps = DepthwiseTaps<kKernel, kIn, 1>;
  constexpr int kColumns = plane_columns(1), kTaps = Taps::kTaps, kWindow = kReadWindow<Taps::window(kColumns)>;
  constexpr int kSize = kKernel * kKernel, kWarps = kPlaneThreads / 32;
  extern __shared__ float4 plane_tiles[];
  __shared__ float sums[kWarps][kSize];
  float *tile = reinterpret_cast<float *>(plane_tiles), *dy_tile = tile + d.images * d.planes * d.tile_rows * d.pitch;
  const int first = static_cast<int>(blockIdx.x) * d.planes, planes = min(d.planes, d.channels - first);
  const int left = -d.w.first_in, team = kPlaneThreads / d.planes, mine = threadIdx.x / team;
  const int parts = (d.batch + d.images - 1) / d.images * d.row_blocks;
  float sum[kKernel][kKernel] = {};
  launch_next();
  clear_margins(tile, d.images * d.planes * d.tile_rows, left, d.w.in, d.pitch, d.by_margin);
#pragma unroll 1
  for (int part = blockIdx.y; part < parts; part += gridDim.y) {
    const int first_row = part % d.row_blocks * d.block_rows, first_image = part / d.row_blocks * d.images;
    const int images = min(d.images, d.batch - first_image), out_rows = min(d.block_rows, d.h.count - first_row);
    const TileRows<Taps, kIn> rows(d, first_row);
    for (int i = 0; i < images; ++i) {
      const int64_t plane = int64_t{first_image + i} * d.channels + first;
      const bool part_of_plane = d.row_blocks > 1;
      fill_rows(tile + i * d.planes * d.tile_rows * d.pitch + left, x + (plane * d.h.in + rows.first) * d.w.in,
                part_of_plane ? rows.last - rows.first : planes * d.h.in, d.w.in, d.pitch, d.load, d.by_row);
      fill_rows(dy_tile + i * d.planes * d.dy_rows * d.dy_pitch, dy + (plane * d.h.out + first_row) * d.w.out,
                part_of_plane ? out_rows : planes * d.h.out, d.w.out, d.dy_pitch, d.load_dy, d.by_dy_row);
    }
    __syncthreads();
#pragma unroll 1
    for (int item = threadIdx.x % team; item < d.items; item += team) {
      const PlanePlace at = PlanePlace::at<kColumns>(d, item, first_row);  // `plane` is the image
      if (at.plane >= images || mine >= planes) continue;
      const int q = d.w.output(at.residue_w, at.first_column, 0), columns = d.w.positions_from(q);
      const int strip = min(at.rows, d.h.positions_from(d.h.output(at.residue_h, at.first_m, 0)));
      const float *from = tile + ((at.plane * d.planes + mine) * d.tile_rows - rows.first) * d.pitch +
                          d.w.in_residue * at.residue_w + d.w.unit * kIn * at.first_column;
      const float *by = dy_tile + ((at.plane * d.planes + mine) * d.dy_rows - first_row) * d.dy_pitch + q;
      float of_dy[kTaps][kColumns] = {};  // lag rows before this one
#pragma unroll 1
      for (int n = 0; n < strip + kTaps - 1; ++n) {
#pragma unroll
        for (int lag = kTaps - 1; lag > 0; --lag)
#pragma unroll
          for (int m = 0; m < kColumns; ++m) of_dy[lag][m] = of_dy[lag - 1][m];
        const int p = d.h.output(at.residue_h, at.first_m + n, 0);
        if (n < strip) {
          if (d.dense) load_window(of_dy[0], by + p * d.dy_pitch, true, true, 1);
          else
#pragma unroll
            for (int m = 0; m < kColumns; ++m) of_dy[0][m] = m < columns ? by[p * d.dy_pitch + m * d.w.out_step] : 0;
        }
#pragma unroll
        for (int e = 0; e < kIn; ++e) {
          const int h = d.h.input(at.residue_h, kIn * (at.first_m + n) + e);
          float value[kWindow];
          load_window(value, from + h * d.pitch, 0 <= h && h < d.h.in && kIn * n + e < Taps::window(strip), d.dense,
                      d.w.unit);
#pragma unroll
          for (int lag = 0; lag < kTaps; ++lag) {
            const int r = Taps::at(lag, e, 0);
            // x that no element of dy meets may be infinite
            if (r >= kKernel || n < lag || n - lag >= strip) continue;
#pragma unroll
            for (int m = 0; m < kColumns; ++m)
              if (m < columns)
#pragma unroll
                for (int s = 0; s < kKernel; ++s) sum[r][s] += of_dy[lag][m] * value[kIn * m + s];
          }
        }
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int k = 0; k < kSize; ++k) {
    const float total = sum_lanes<32>(sum[k / kKernel][k % kKernel]);
    if (lane_index() == 0) sums[warp_index()][k] = total;
  }
  __syncthreads();
  clear_slice_end<kKernel>(d, partial, slice);
  const int warps = kWarps / d.planes;  // of a plane
  for (int i = threadIdx.x; i < planes * kSize; i += kPlaneThreads) {
    float total = 0;
    for (int w = 0; w < warps; ++w) total += sums[i / kSize * warps + w][i % kSize];
    partial[blockIdx.y * slice + int64_t{first} * kSize + i] = total;
  }
}

}  // namespace AOT_ISA
}  // namespace aot
