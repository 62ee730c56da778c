// Depthwise convolutions: how outputs and inputs meet along an axis, and how a call is divided among threads.
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>

#ifdef __CUDACC__
#define AOT_BOTH_SIDES __host__ __device__
#else
#define AOT_BOTH_SIDES
#endif

namespace aot {
inline namespace AOT_ISA {

template <typename A, typename B>
constexpr auto divide_up(A a, B b) {
  return (a + b - 1) / b;
}

// Along an axis, a result's elements form `residues` sequences, which have `count` positions at most. Each position of
// a sequence meets the inputs of that sequence, `unit` apart, as if there were no dilation:
//            a position m                            meets inputs u of its sequence, with kernel element
//   y        one output                              steps * m + r                   r
//   dx       `steps` elements f, `out_phase` apart   m + lag, lag < taps             f + steps * (taps - 1 - lag)
// where taps = ceil(kernel / steps). With one step, dx is y of dy with the kernel reversed.
struct DepthwiseAxis {
  int in = 0, out = 0;  // sizes
  int residues = 1, count = 0;
  int first_out = 0, out_residue = 1, out_step = 1, out_phase = 0;
  int first_in = 0, in_residue = 1, unit = 1;

  AOT_BOTH_SIDES int output(int residue, int m, int f) const {
    return first_out + out_residue * residue + out_step * m + out_phase * f;
  }
  AOT_BOTH_SIDES int input(int residue, int u) const { return first_in + in_residue * residue + unit * u; }
  // Positions of one output each, from that output on.
  AOT_BOTH_SIDES int positions_from(int output) const {
    return output < out ? (out - output + out_step - 1) / out_step : 0;
  }
};

// The axis of a call's y, with `in` elements of x and `out` of y; the kernel does not matter. *steps: 0 if there is no
// such axis.
inline DepthwiseAxis depthwise_axis(int64_t in, int64_t out, int64_t stride, int64_t padding, int64_t dilation,
                                    int *steps) {
  DepthwiseAxis a;
  const int64_t common = std::gcd(stride, dilation), step = dilation / common;
  *steps = stride / common <= 2 ? static_cast<int>(stride / common) : 0;
  a.in = static_cast<int>(in), a.out = static_cast<int>(out);
  a.residues = static_cast<int>(std::min(step, out)), a.count = static_cast<int>((out + step - 1) / step);
  a.out_step = static_cast<int>(step), a.in_residue = static_cast<int>(stride), a.unit = static_cast<int>(dilation);
  a.first_in = static_cast<int>(-padding);
  return a;
}

// The axis of a call's dx, with `in` elements of dy and `out` of dx.
inline DepthwiseAxis depthwise_dx_axis(int64_t in, int64_t out, int64_t kernel, int64_t stride, int64_t padding,
                                       int64_t dilation, int *steps) {
  if (stride == 1) return depthwise_axis(in, out, 1, dilation * (kernel - 1) - padding, dilation, steps);
  DepthwiseAxis a;
  *steps = stride == 2 && dilation % 2 == 1 ? 2 : 0;
  // With h the element of dx plus the padding: position i has the elements h = 2 i and 2 i + dilation, which meet
  // dy's i - t * dilation with kernel elements 2 t and 2 t + 1.
  auto half = [](int64_t n) { return n >= 0 ? n / 2 : (n - 1) / 2; };
  const int64_t first = half(padding - dilation), total = half(padding + out - 1) - first + 1;
  a.in = static_cast<int>(in), a.out = static_cast<int>(out);
  a.residues = static_cast<int>(std::min(dilation, total));
  a.count = static_cast<int>((total + dilation - 1) / dilation);
  a.first_out = static_cast<int>(2 * first - padding), a.out_residue = 2;
  a.out_step = static_cast<int>(2 * dilation), a.out_phase = static_cast<int>(dilation);
  a.first_in = static_cast<int>(first - ((kernel + 1) / 2 - 1) * dilation), a.unit = static_cast<int>(dilation);
  return a;
}

// Kernel elements along an axis at compile time: kIn inputs of a position, or kOut elements of the result; one of the
// two is 1.
template <int kKernel, int kIn, int kOut>
struct DepthwiseTaps {
  static constexpr int kTaps = (kKernel + kIn * kOut - 1) / (kIn * kOut);
  // Inputs that kPositions neighbouring positions meet.
  AOT_BOTH_SIDES static constexpr int window(int positions) {
    return kOut == 1 ? kIn * (positions - 1) + kKernel : positions - 1 + kTaps;
  }
  // The kernel element of input e of position m + lag, and of element f of position m; kKernel or more if there is
  // none.
  AOT_BOTH_SIDES static constexpr int at(int lag, int e, int f) {
    return kOut == 1 ? kIn * lag + e : f + kOut * (kTaps - 1 - lag);
  }
};

// Tensors of a depthwise call as kernels read and write them: y's from x, or dx's from dy.
struct Depthwise {
  enum Pass { y, dx, dweight };
  DepthwiseAxis h, w;
  int channels = 0, batch = 0;
  bool reversed = false;  // the kernel, for dx with a stride of one

  // NHWC: a thread has a word of channels (4 bytes), some columns, and `strip` positions of rows
  int lanes = 0, chunks = 0;  // threads along the channels of a block, and blocks along the channels
  int tiles_w = 0, strips = 0, strip = 0;
  int64_t items = 0;  // groups of `lanes` threads, for each chunk

  // NCHW: a block has a tile of rows in shared memory, of whole planes or a part of one; a thread has some columns and
  // `strip` positions of rows
  int pitch = 0, tile_rows = 0;        // of a plane in the tile: elements between rows, and rows
  int planes = 0, images = 0;          // planes of a tile: neighbouring ones, and for dweight of how many images
  int block_rows = 0, row_blocks = 0;  // positions of a tile
  int dy_pitch = 0, dy_rows = 0;       // dweight: of dy's tile
  int shared() const { return 4 * images * planes * (tile_rows * pitch + dy_rows * dy_pitch); }
};

constexpr int kDepthwiseThreads = 128, kPlaneThreads = 256;

// Columns that a thread of NCHW has at once.
AOT_BOTH_SIDES constexpr int plane_columns(int out) { return out > 1 ? 1 : 4; }

// Blocks of dweight that a multiprocessor holds, by registers: the kernel's sums.
constexpr int depthwise_dweight_blocks(int kernel, bool nhwc) {
  return kernel == 3 ? (nhwc ? 5 : 3) : kernel == 5 && nhwc ? 3 : 2;
}

// Columns that a thread of NHWC has at once.
AOT_BOTH_SIDES constexpr int depthwise_columns(int in, int out) { return in > 1 || out > 1 ? 2 : 4; }

inline void divide_depthwise(Depthwise *d, int kernel, int columns, int channels_of_word) {
  const int words = divide_up(d->channels, channels_of_word);
  // the most lanes that leave few of them idle
  d->lanes = 32;
  auto idle = [&](int lanes) { return divide_up(words, lanes) * lanes - words; };
  for (int lanes : {16, 8})
    if (8 * (idle(d->lanes) - idle(lanes)) > words) d->lanes = lanes;
  d->chunks = divide_up(words, d->lanes);
  d->tiles_w = divide_up(d->w.count, columns) * d->w.residues;
  // Strips meet kernel - 1 rows more than they have: as long as leaves four waves of threads.
  constexpr int64_t kThreads = 132 * 2048 * 3 / 2;
  const int64_t threads = int64_t{d->batch} * d->chunks * d->lanes * d->tiles_w * d->h.residues;
  const int64_t least = std::min<int64_t>(2 * kernel, d->h.count);
  const int64_t longest = std::clamp<int64_t>(d->h.count * threads / kThreads, least, d->h.count);
  const int64_t strips = divide_up(d->h.count, longest);
  d->strip = static_cast<int>(divide_up(d->h.count, strips));
  d->strips = divide_up(d->h.count, d->strip) * d->h.residues;
  d->items = int64_t{d->batch} * d->strips * d->tiles_w;
}

// in, out: steps of the axes. false: a row or plane is too large, or begins beyond the padding.
inline bool divide_planes(Depthwise *d, int kernel, int in, int out, bool dweight) {
  auto round_up = [&](int64_t a) { return divide_up(a, 4) * 4; };
  auto window = [&](int n) { return out == 1 ? in * (n - 1) + kernel : n - 1 + divide_up(kernel, out); };
  const int columns = plane_columns(out), tiles = divide_up(d->w.count, columns), left = -d->w.first_in;
  if (left < 0) return false;
  const int64_t end = d->w.in_residue * (d->w.residues - 1) +
                      int64_t{d->w.unit} * (in * columns * (tiles - 1) + round_up(window(columns)) - 1) + 1;
  const int64_t pitch = std::max<int64_t>(end, left + d->w.in);
  constexpr int kTile = 8192, kLargest = 12288;  // elements of float32
  if (pitch > kLargest) return false;
  d->pitch = round_up(pitch), d->tiles_w = tiles * d->w.residues;
  d->dy_pitch = dweight ? round_up(d->w.out + 3) : 0;
  const int64_t row = d->pitch + (dweight ? int64_t{d->dy_pitch} / in : 0);  // with dy's share
  const int64_t most = d->h.residues > 1 ? kLargest : kTile;
  d->planes = d->images = 1, d->row_blocks = 1, d->block_rows = d->h.count;
  if (d->h.in * row <= most) {
    d->tile_rows = d->h.in, d->dy_rows = dweight ? d->h.out : 0;
    const int64_t fit = std::max<int64_t>(kTile / (d->h.in * row), 1);
    if (dweight) {
      // warps of a block have one plane each, or share it
      while (d->planes < 8 && 2 * d->planes <= std::min<int64_t>(fit, d->channels)) d->planes *= 2;
      d->images = static_cast<int>(std::clamp<int64_t>(fit / d->planes, 1, std::min(d->batch, 16)));
    } else {  // as many blocks as fill the device
      const int64_t all = int64_t{d->batch} * d->channels;
      d->planes = static_cast<int>(std::clamp<int64_t>(std::min<int64_t>(fit, all / (132 * 6)), 1, 64));
    }
  } else {
    if (d->h.residues > 1) return false;
    const int64_t rows = (row * 3 * kernel <= kTile ? kTile : kLargest) / row;
    const int64_t fit = out == 1 ? (rows - kernel) / in + 1 : rows - divide_up(kernel, out) + 1;
    if (rows < kernel || fit < 1) return false;
    d->row_blocks = divide_up(d->h.count, fit), d->block_rows = divide_up(d->h.count, d->row_blocks);
    d->row_blocks = divide_up(d->h.count, d->block_rows);
    d->tile_rows = d->h.unit * (window(d->block_rows) - 1) + 1, d->dy_rows = dweight ? d->block_rows : 0;
  }
  // The strips that keep the threads busy, whose rows beyond their own cost about half as much.
  const int threads = dweight ? kPlaneThreads / d->planes : kPlaneThreads, planes = dweight ? d->images : d->planes;
  double least = 1e30;
  for (int parts = 1; parts <= std::min(d->block_rows, 32); ++parts) {
    const int strip = divide_up(d->block_rows, parts), strips = divide_up(d->block_rows, strip) * d->h.residues;
    const double turns = divide_up(int64_t{planes} * strips * d->tiles_w, threads);
    const double cost = turns * (strip + 0.5 * (divide_up(kernel, in * out) - 1) + 2);
    if (cost < least) least = cost, d->strip = strip, d->strips = strips;
  }
  constexpr int kShared = 60 << 10, kItems = 1 << 16;
  return d->shared() <= kShared && int64_t{planes} * d->strips * d->tiles_w < kItems;
}

}  // namespace AOT_ISA
}  // namespace aot
