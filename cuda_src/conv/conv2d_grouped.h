// How convolutions with groups of several channels (conv2d_grouped.cuh) divide a pass. Sizes alone decide.
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>

#include "conv2d_depthwise.h"

namespace aot {
inline namespace AOT_ISA {

constexpr int kGroupedPhases = 4;  // along an axis
constexpr int kGroupedWide = 128;  // bytes of a group that are together in shared memory
constexpr int kGroupedChunk = 64;  // of wider groups at a time
constexpr int kGroupedTaps = 3;    // kernel elements of a warp in dweight
constexpr int kGroupedUnit = 32;   // positions of a warp in y and dx, and of which dweight's tiles have a multiple
constexpr int kGroupedWarps = 8, kGroupedDweightWarps = 12;  // of a block, at most
constexpr int64_t kConvShared = 99 << 10;                    // every device has these since 8.0
constexpr int64_t kColumnsShared = kConvShared - 128;        // beside barriers, in whole 128 bytes
constexpr int kMostBox = 256, kMostBoxPixel = 512;           // of TMA: pixels along an axis, and bytes of one
constexpr int kGroupedLoad = 14, kGroupedBoxLoad = 3;  // instructions of a warp for 32 vectors by cp.async, by TMA
constexpr int kGroupedTwoWarps = 8;                    // warps of a block, at most, of two sixteens in dweight

// The elements of the kernel that pixels of one remainder by dx's stride meet, or all: kernel_first + t * kernel_step
// at the source's pixel first + t * unit from the position, t < taps.
struct GroupedPhase {
  int first = 0, taps = 0, kernel_first = 0;
};

// An axis of a pass, from x to y or from dy to dx. A position is a pixel of y, or `phases` pixels of dx, as many as the
// stride: pixel i * phases + p is of phase p. Position i meets the source from i * step + lowest on, `span` pixels.
struct GroupedAxis {
  int source = 0, result = 0, count = 0;  // pixels, and positions
  int step = 1, unit = 1, kernel_step = 1, lowest = 0, span = 1, phases = 1;
  GroupedPhase phase[kGroupedPhases];

  int window(int positions) const { return (positions - 1) * step + span; }
  void set_span() {
    int most = 0;
    bool any = false;
    for (const GroupedPhase &p : phase) {
      if (!p.taps) continue;
      const int last = p.first + (p.taps - 1) * unit, low = std::min(p.first, last), high = std::max(p.first, last);
      lowest = any ? std::min(lowest, low) : low, most = any ? std::max(most, high) : high;
      any = true;
    }
    span = most - lowest + 1;
  }
};

inline GroupedAxis grouped_axis(int64_t in, int64_t out, int64_t kernel, int64_t stride, int64_t padding,
                                int64_t dilation) {
  GroupedAxis a;
  a.source = static_cast<int>(in), a.result = a.count = static_cast<int>(out);
  a.step = static_cast<int>(stride), a.unit = static_cast<int>(dilation);
  a.phase[0] = {static_cast<int>(-padding), static_cast<int>(kernel), 0};
  a.set_span();
  return a;
}

// The axis of a call's dx, with `in` elements of dy and `out` of dx.
inline GroupedAxis grouped_dx_axis(int64_t in, int64_t out, int64_t kernel, int64_t stride, int64_t padding,
                                   int64_t dilation) {
  const int64_t common = std::gcd(stride, dilation), step = stride / common;
  GroupedAxis a;
  a.source = static_cast<int>(in), a.result = static_cast<int>(out), a.phases = static_cast<int>(stride);
  a.count = static_cast<int>(divide_up(out, stride));
  a.unit = static_cast<int>(-dilation / common), a.kernel_step = static_cast<int>(step);
  for (int64_t p = 0; p < stride; ++p)
    for (int64_t r = 0; r < std::min(step, kernel); ++r)
      if ((p + padding - r * dilation) % stride == 0)
        a.phase[p] = {static_cast<int>((p + padding - r * dilation) / stride),
                      static_cast<int>(divide_up(kernel - r, step)), static_cast<int>(r)};
  a.set_span();
  return a;
}

// A pass as the kernels take it. A block has tiles of rows x cols positions, one after another, for the channels of
// some groups, or for a part of a group's results, whose terms it then adds a chunk of channels at a time.
struct Grouped {
  GroupedAxis h, w;
  int vector = 8;                              // elements of 16 bytes
  bool three = false;                          // float32 as three products of TF32
  int batch = 0, groups = 0, in = 0, out = 0;  // channels of a group, of the source and of the result
  int source_pitch = 0, result_pitch = 0;      // channels of a pixel in memory
  int block_groups = 1, parts = 1, part = 0;   // blocks along a group's results, and results of one
  int chunk = 0, chunks = 1;
  int units = 0, rows = 0, cols = 0, window_h = 0, window_w = 0, tiles_h = 0, tiles_w = 0;
  int channels = 0, pixel = 0;  // of the source in shared memory, and bytes of a pixel with them
  int warps = 0, shared = 0, pieces = 1, eights = 1;
  // y and dx: pieces of a part's results, of `eights` 8s each; units of positions; steps of 16 terms up to each phase
  int first_step[kGroupedPhases * kGroupedPhases + 1] = {};
  // of the result in shared memory likewise: those of dy's tile in dweight, else of a warp
  int result_channels = 0, result_pixel = 0;
  // dweight: 16s of results, pieces of `eights` of the channels, blocks along all, blocks along the tiles
  int sixteens = 1, splits = 1, slices = 0;
  // Kernels of columns (conv2d_grouped_columns.cuh, conv2d_grouped_planes.cuh). y and dx: units of 4 x 8 positions
  // across a tile; dweight: 16s of results of a warp. 0: the kernels of any step.
  int columns = 0;

  // A step of a sum has 16 terms of 16 bits, or 8 of TF32.
  AOT_BOTH_SIDES int terms() const { return 2 * vector; }
  int bytes(int elements) const { return elements * 16 / vector; }
  int wide() const { return kGroupedWide / 16 * vector; }
  AOT_BOTH_SIDES int taps() const { return h.phase[0].taps * w.phase[0].taps; }
  AOT_BOTH_SIDES int phases() const { return h.phases * w.phases; }
  AOT_BOTH_SIDES int steps() const { return first_step[phases()]; }
  AOT_BOTH_SIDES int64_t tiles() const { return int64_t{batch} * tiles_h * tiles_w; }
  AOT_BOTH_SIDES int windows() const { return window_h * window_w * pixel; }
  // Bytes of shared memory for a box of TMA.
  AOT_BOTH_SIDES int boxed(int bytes) const { return (bytes + 127) / 128 * 128; }
  // By columns with stride 2 a window is two planes, of its even and of its odd columns, as wide each.
  AOT_BOTH_SIDES bool planes() const { return columns && h.step == 2; }
  AOT_BOTH_SIDES int plane() const { return boxed(windows() / 2); }
  AOT_BOTH_SIDES int boxes() const { return planes() ? 2 * plane() : boxed(windows()); }
  // Bytes behind two windows of planes that are read for positions of units which no tile has.
  int behind() const {
    const int last_row = h.window(units / columns * 4) - 1, last_column = (w.window(columns * 8) - 1) / 2;
    return planes() ? 3 * plane() + (last_row * window_w / 2 + last_column + 1) * pixel - 2 * windows() : 0;
  }
  // Whether a tensor map has the channels of a block's groups as an axis, behind whose end TMA reads no memory.
  AOT_BOTH_SIDES bool by_blocks() const {
    return chunks == 1 && groups % block_groups == 0 && block_groups * in % vector == 0;
  }
  // y and dx by conv2d_grouped_planes.cuh. Three products' sums of 24 results take so many registers that two warps
  // share a unit of positions.
  bool by_planes() const { return planes() || (columns && three); }
  int halves() const { return by_planes() && eights == 3 && three ? 2 : 1; }
  // Warps that a multiprocessor has registers for.
  int most_warps() const { return by_planes() && (eights > 1 || three) ? 16 : 24; }
  // Bytes of dweight's tile of dy, that TMA writes.
  AOT_BOTH_SIDES int dweight_box() const { return boxed(rows * cols * result_pixel); }
  // Bytes of dy's tile, and the places of its positions.
  AOT_BOTH_SIDES int dweight_tile(int positions) const { return positions * (result_pixel + 4); }
  // Results of units that are in shared memory before they are written.
  AOT_BOTH_SIDES int staged() const { return chunks > 1 ? warps : units; }
  // Words of the weight as operands, for one group and part.
  AOT_BOTH_SIDES int chunk_words() const { return steps() * pieces * eights * 64; }
  AOT_BOTH_SIDES int part_words() const { return chunks * chunk_words(); }
  int64_t words() const { return int64_t{groups} * parts * part_words(); }
  // Elements of dweight's sums of a slice, (groups * out, taps, slice_channels), and of all.
  int slice_channels() const { return divide_up(in, 4) * 4; }
  int64_t slice() const { return int64_t{groups} * out * taps() * slice_channels(); }
  int64_t sums() const { return slices * slice(); }
  int blocks() const { return divide_up(groups, block_groups) * parts; }
};

inline int grouped_up(int64_t n, int64_t to) { return static_cast<int>(divide_up(n, to) * to); }

// Bytes of a pixel: an odd number of vectors, so that neighbouring pixels are in other banks, as ldmatrix reads them.
// dweight of float32, whose lanes read 8 neighbours of each of four pixels, has two more than a multiple of four.
inline int grouped_pixel(int vectors, bool of_words = false) {
  return 16 * (of_words ? vectors + (6 - vectors % 4) % 4 : vectors | 1);
}

// Channels that are loaded for `n` of them from any multiple of n on: whole vectors.
inline int grouped_loaded(int n, int vector) { return n % vector ? grouped_up(n + vector - 1, vector) : n; }

// Chooses the tiles, of `most` units of positions at most, for which cost(units, pixels of a window), of an image's
// tiles, is least; below 0 they do not fit. The cost, or -1.
template <class Cost>
double grouped_tiles(Grouped *g, int most, Cost cost) {
  constexpr int kLeastColumns = 7, kMostPixels = 1 << 13;
  const int64_t line = int64_t{g->w.source} * g->source_pitch;  // places in a window have 31 bits
  double least = -1;
  for (int units = 1; units <= most; ++units) {
    const int positions = units * kGroupedUnit;
    // each number of columns that an equal division has
    for (int widest = std::min(positions, g->w.count), cols; widest > 0; widest = cols - 1) {
      const int across = divide_up(g->w.count, widest);
      cols = divide_up(g->w.count, across);
      const int down = divide_up(g->h.count, positions / cols), rows = divide_up(g->h.count, down);
      if (rows * cols <= positions - kGroupedUnit) continue;
      const int64_t window = int64_t{g->h.window(rows)} * g->w.window(cols);
      const bool counted = window <= kMostPixels && g->h.window(rows) * line < int64_t{1} << 31;
      const double each = counted ? cost(units, static_cast<int>(window)) : -1;
      const double all = double(down) * across * each;
      if (each >= 0 && (least < 0 || all < least)) {
        least = all, g->units = units, g->rows = rows, g->cols = cols;
        g->tiles_h = divide_up(g->h.count, rows), g->tiles_w = divide_up(g->w.count, cols);
      }
      if (cols <= kLeastColumns) break;
    }
  }
  if (least >= 0) g->window_h = g->h.window(g->rows), g->window_w = g->w.window(g->cols);
  return least;
}

// Likewise for tiles of units of 4 x 8 positions, which begin at equal distances: some of their positions are dropped.
// cost(a plan with such tiles).
template <class Cost>
double grouped_column_tiles(Grouped *g, int most, Cost cost) {
  double least = -1;
  if (g->pixel > kMostBoxPixel) return least;
  for (int high = 1; high <= most; ++high)
    for (int wide = 1; high * wide <= most; ++wide) {
      const int down = divide_up(g->h.count, 4 * high), across = divide_up(g->w.count, 8 * wide);
      Grouped t = *g;
      t.units = high * wide, t.columns = wide, t.tiles_h = down, t.tiles_w = across;
      t.rows = divide_up(g->h.count, down), t.cols = divide_up(g->w.count, across);
      t.window_h = g->h.window(4 * high), t.window_w = g->w.window(8 * wide);
      if (t.planes()) t.window_h = g->h.window(t.rows), t.window_w = grouped_up(g->w.window(t.cols), 2);
      if (t.rows <= 4 * (high - 1) || t.cols <= 8 * (wide - 1)) continue;
      if (t.window_h > kMostBox || t.window_w > kMostBox) continue;
      if (int64_t{t.window_h} * g->w.source * g->source_pitch >= int64_t{1} << 31) continue;
      const double each = cost(t), all = double(down) * across * each;
      if (each < 0 || (least >= 0 && all >= least)) continue;
      least = all, *g = t;
    }
  return least;
}

// Whether the elements of the kernel in a column are three neighbours that each pixel of the result meets.
inline bool grouped_column_axis(const GroupedAxis &h) { return h.phases == 1 && h.span == 3 && h.phase[0].taps == 3; }

// Blocks that a multiprocessor of an H200 holds, by shared memory and by registers.
inline int64_t grouped_blocks(int64_t shared, int warps, int most_warps = 24) {
  constexpr int kAllShared = 222 << 10;
  return std::max<int64_t>(std::min<int64_t>(kAllShared / (shared + 1024), most_warps / warps), 1);
}

// How much longer a kernel takes that leaves a multiprocessor few warps to hide latencies with.
inline double grouped_idle(int64_t shared, int warps, int most_warps = 24) {
  constexpr int kEnough = 24;
  return double(kEnough) / std::clamp<int64_t>(grouped_blocks(shared, warps, most_warps) * warps, 1, kEnough);
}

// Plans y or dx's pass, whose sizes are there. Costs are warps' instructions. false: it does not fit in shared memory.
inline bool plan_grouped(Grouped *g, bool by_columns) {
  constexpr int kMostWeights = 48 << 10, kMostChannels = 192, kItem = 150;  // channels: bytes of them
  constexpr int kLeastThree = 8;                                            // channels: with 4, 224 us became 246
  const int load = by_columns ? kGroupedBoxLoad : kGroupedLoad;
  // An H200's clocks, times 4, for 16 bytes of a box, and at least for a pixel of it
  constexpr double kVector = 5.6, kBoxRow = 20;
  constexpr double kLine = 1.5;  // vectors of 16 bytes that a pixel's first and last sectors have besides
  g->chunk = g->in <= g->wide() ? g->in : kGroupedChunk / 16 * g->vector;
  g->chunks = divide_up(g->in, g->chunk);
  if (by_columns && (!grouped_column_axis(g->h) || g->w.phases > 1 || g->chunk % (g->vector / 2))) return false;
  const bool strided = by_columns && g->h.step == 2;
  if (strided ? g->w.step != 2 || g->w.source < 2 : by_columns && (g->h.step > 1 || (g->three && g->in < kLeastThree)))
    return false;
  // a sum of three products is two
  const int most_eights = !g->three ? 4 : by_columns && g->chunks == 1 ? 3 : 2;
  const int rounds = divide_up(g->w.phase[0].taps * g->chunk, g->terms());
  if (by_columns) g->first_step[1] = 3 * rounds;
  for (int p = 0; !by_columns && p < g->phases(); ++p) {
    const int taps = g->h.phase[p / g->w.phases].taps * g->w.phase[p % g->w.phases].taps;
    g->first_step[p + 1] = g->first_step[p] + divide_up(taps * g->chunk, g->terms());
  }
  auto divide = [&](int parts) {
    g->part = g->out % 8 ? g->out : grouped_up(divide_up(g->out, parts), 8);
    g->parts = divide_up(g->out, g->part);
    const int eights = divide_up(g->part, 8);
    g->pieces = divide_up(eights, most_eights);
    g->eights = divide_up(eights, g->pieces);
  };
  divide(divide_up(g->out, g->wide()));
  if (g->out % 8 == 0 && g->part > 32 && (g->chunks > 1 || g->chunk_words() * 4 > kMostWeights))
    divide(divide_up(g->out, 32));
  const bool narrow = std::max(g->in, g->out) <= g->wide();
  const bool several = narrow && g->parts == 1;
  const int most = several ? std::clamp(kMostChannels / g->bytes(std::max(g->in, g->out)), 1, g->groups) : 1;
  const int stages = g->chunks > 1 ? 2 : 1, wide_tasks = g->phases() * g->pieces;
  Grouped best;
  double least = -1;
  int tried = 0;
  auto try_groups = [&](int wanted, int together) {
    Grouped t = *g;
    const int usual = std::min(grouped_up(wanted, together), t.groups), blocks = divide_up(t.groups, usual);
    t.block_groups = std::min(grouped_up(divide_up(t.groups, blocks), together), t.groups);
    if (t.block_groups == tried) return;
    tried = t.block_groups;
    t.channels = grouped_loaded(t.chunks > 1 ? t.chunk : t.block_groups * t.in, t.vector);
    t.pixel = grouped_pixel(t.channels / t.vector);
    t.result_channels = t.chunks > 1 ? t.eights * 8 : grouped_up(t.block_groups * t.part, 8);
    t.result_pixel = grouped_pixel(t.result_channels / t.vector);
    const int64_t beside = int64_t{stages} * 4 * t.block_groups * t.chunk_words() + t.steps() * 8 * 4 + 24 +
                           (by_columns ? 256 * t.h.step : 0);
    if (by_columns) t.columns = 1;  // those of a tile are chosen with it
    auto warps = [&](int units) {
      const int tasks = t.block_groups * t.pieces * t.halves();
      return units * (t.chunks > 1 ? wide_tasks : std::min(tasks, kGroupedWarps / units));
    };
    auto shared = [&](int units, int window, int64_t behind = 0) {
      const int64_t staged = t.chunks > 1 ? warps(units) : units;
      const int64_t other = int64_t{window} * 8 + beside + kGroupedUnit * (staged * t.result_pixel + 8 * units);
      return int64_t{window} * 2 * t.pixel + std::max(other, behind);
    };
    const int most_units = kGroupedWarps / (t.chunks > 1 ? wide_tasks : 1);
    auto cost_of = [&](int units, int window, int behind = 0) {
      if (shared(units, window, behind) > (by_columns ? kColumnsShared : kConvShared)) return -1.0;
      double terms = by_columns ? rounds * (16.0 + 9 * t.eights) : t.steps() * (10.0 + 3 * t.eights);
      if (by_columns && t.three) terms = rounds * (80.0 * t.halves() + 120 * t.eights);
      const double results = t.phases() * (30.0 + 12 * t.eights);
      const double products = t.block_groups * t.pieces * units * (t.chunks * terms + results);
      const double loads = t.chunks * (window * (t.channels / t.vector + kLine) / 32 * load + kItem * warps(units));
      const double idle = grouped_idle(shared(units, window, behind), warps(units), t.most_warps());
      if (strided) {  // loads are apart from the products
        const double memory = t.chunks * window * std::max(t.pixel / 16 * kVector, kBoxRow);
        const double busy = products * std::max(idle / 2, 1.0) + kItem * warps(units);
        return std::max(busy, memory) + std::min(busy, memory) / 4;
      }
      return (products + loads) * idle;
    };
    auto cost_of_columns = [&](const Grouped &of) { return cost_of(of.units, of.window_h * of.window_w, of.behind()); };
    const double cost =
        by_columns ? grouped_column_tiles(&t, most_units, cost_of_columns) : grouped_tiles(&t, most_units, cost_of);
    if (cost >= 0 && (least < 0 || cost * blocks < least)) {
      least = cost * blocks, best = t;
      best.warps = warps(t.units);
      best.shared = static_cast<int>(shared(t.units, t.window_h * t.window_w, by_columns ? t.behind() : 0));
    }
  };
  // groups whose results are whole sectors, or, if they do not fit, whole vectors
  for (int bytes = 32; bytes >= 16 && least < 0; bytes /= 2)
    for (int wanted = most; wanted >= 1; wanted /= 2)
      try_groups(wanted, several ? std::min(bytes / std::gcd(g->bytes(g->out), bytes), g->groups) : 1);
  if (least < 0) return false;
  return *g = best, true;
}

// Divides dweight's images into tiles whose strips of 8 columns the kernel goes down, two rows at a time.
inline bool divide_dweight_columns(Grouped *g) {
  constexpr int kLeastColumns = 7, kMostColumns = 64;
  if (std::max(g->pixel, g->result_pixel) > kMostBoxPixel) return false;
  const int64_t line = int64_t{g->w.source} * g->source_pitch;
  double least = -1;
  // each number of columns and of rows that an equal division has
  for (int widest = std::min(g->w.count, kMostColumns), cols; widest > 0; widest = cols - 1) {
    cols = divide_up(g->w.count, divide_up(g->w.count, widest));
    const int across = divide_up(g->w.count, cols);
    for (int most = std::min(g->h.count, kMostBox - 2), rows; most > 0; most = rows - 1) {
      rows = divide_up(g->h.count, divide_up(g->h.count, most));
      const int64_t window_h = g->h.window(rows), window_w = g->w.window(cols), window = window_h * window_w;
      if (window_h > kMostBox || window_w > kMostBox || window >= 1 << 13 || window_h * line >= int64_t{1} << 31)
        continue;
      Grouped t = *g;
      t.rows = rows, t.cols = cols, t.window_h = static_cast<int>(window_h), t.window_w = static_cast<int>(window_w);
      // the last of an odd number of rows reads a row behind the window, and drops it
      const int64_t behind = rows % 2 ? window_w * g->pixel : 0;
      const int64_t shared = 2 * int64_t{t.boxed(t.windows())} + 2 * t.dweight_box() + window * 8 + 16 + behind;
      if (shared > kColumnsShared) continue;
      const double steps =
          divide_up(cols, 8) * (divide_up(rows, 2) * (10.0 + 6 * g->eights * g->columns) + 12) * g->warps;
      const double vectors = (window * g->pixel + rows * cols * g->result_pixel) / 16.0;
      const double all = double(across) * (divide_up(g->h.count, rows)) *
                         (steps + vectors / 32 * kGroupedBoxLoad + 100 * g->warps) * grouped_idle(shared, g->warps);
      if (least >= 0 && all >= least) continue;
      least = all, t.tiles_w = divide_up(g->w.count, cols), t.tiles_h = divide_up(g->h.count, rows);
      t.shared = static_cast<int>(shared), *g = t;
    }
    if (cols <= kLeastColumns) break;
  }
  return least >= 0;
}

// Plans dweight's pass: its result is dy, and its source x.
inline bool plan_grouped_dweight(Grouped *g, bool by_columns) {
  constexpr int kMostUnits = 8;
  const int wide = g->wide();
  if (by_columns && (g->vector < 8 || g->h.step > 1 || !grouped_column_axis(g->h))) return false;
  const bool narrow = std::max(g->in, g->out) <= wide;
  g->chunk = std::min(g->in, wide), g->chunks = divide_up(g->in, g->chunk);
  g->part = std::min(g->out, wide), g->parts = divide_up(g->out, g->part);
  // groups of few results share rows of a product, which begin at multiples of 8
  const int most = narrow ? std::clamp(wide / std::max(g->in, g->out), 1, g->groups) : 1;
  const int blocks = divide_up(g->groups, most), even = divide_up(g->groups, blocks);
  g->block_groups = most < 4 || most == g->groups ? even : std::min(most / 4 * 4, grouped_up(even, 4));
  g->channels = grouped_loaded(g->block_groups * g->chunk, g->vector);
  g->result_channels = grouped_loaded(g->block_groups * g->part, g->vector);
  g->pixel = grouped_pixel(g->channels / g->vector, g->vector < 8);
  g->result_pixel = grouped_pixel(g->result_channels / g->vector, g->vector < 8);
  // channels that meet a sixteen of results, from a multiple of 8 on
  auto columns = [&](int n) { return g->chunk % 8 ? grouped_up(n + 7, 8) : n; };
  int most_columns;
  if (g->part < 16) {
    const bool whole = g->block_groups == g->groups || g->block_groups % 4 == 0;
    const int together = std::min(16 / g->part, g->block_groups);
    g->sixteens = divide_up(g->result_channels, 16);
    most_columns = whole && 16 % g->part == 0 && together * g->chunk % 8 == 0
                       ? together * g->chunk
                       : columns(std::min(14 / g->part + 2, g->block_groups) * g->chunk);
  } else {
    const int each = divide_up(g->part % 8 ? g->part + 7 : g->part, 16);
    const int together = by_columns && each > 1 ? 2 : 1;
    if (by_columns) g->columns = together;
    g->sixteens = g->block_groups * (divide_up(each, together));
    most_columns = columns(g->chunk);
  }
  const int eights = divide_up(most_columns, 8);
  g->pieces = divide_up(eights, g->three ? 2 : 4), g->eights = divide_up(eights, g->pieces);
  if (by_columns && g->columns == 0) g->columns = 1;
  const int tap_groups = by_columns ? g->w.phase[0].taps : divide_up(g->taps(), kGroupedTaps);
  const int tasks = g->sixteens * g->pieces * tap_groups;
  const int most_warps = g->columns > 1 ? kGroupedTwoWarps : kGroupedDweightWarps;
  g->splits = divide_up(tasks, most_warps), g->warps = divide_up(tasks, g->splits);
  if (by_columns) return divide_dweight_columns(g);
  auto shared = [&](int units, int window) {
    return 2 * (int64_t{window} * g->pixel + g->dweight_tile(units * kGroupedUnit)) + int64_t{window} * 8 + 16;
  };
  const double cost = grouped_tiles(g, kMostUnits, [&](int units, int window) {
    if (shared(units, window) > kConvShared) return -1.0;
    const double steps =
        units * kGroupedUnit / double(g->terms()) * (8 + kGroupedTaps * (4 + 1.5 * g->eights)) * g->warps;
    const double vectors = (window * g->channels + units * kGroupedUnit * g->result_channels) / g->vector;
    return (steps + vectors / 32 * kGroupedLoad + 100 * g->warps) * grouped_idle(shared(units, window), g->warps);
  });
  if (cost < 0) return false;
  return g->shared = static_cast<int>(shared(g->units, g->window_h * g->window_w)), true;
}

// The plan by columns where their kernels take the pass, else that of any step.
inline bool plan_grouped_pass(Grouped *g, bool dweight) {
  Grouped t = *g;
  auto plan = dweight ? plan_grouped_dweight : plan_grouped;
  if (plan(&t, true)) return *g = t, true;
  return plan(g, false);
}

}  // namespace AOT_ISA
}  // namespace aot
