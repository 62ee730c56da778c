// Convolutions of bfloat16 in the tile registers (AMX).
//
// y and dx: a row of a register is 32 channels of a pixel, read from a copy of a few lines of the source with zeros
// around them. The pixels that adjacent positions meet are equally far apart there, also from the end of a line to the
// begin of the next, so that an element of the kernel is an offset, and nothing is packed. The sums of positions behind
// the end of a line are not stored.
//
// dweight: the terms of a sum are positions, of which two are adjacent in both factors. dy is transposed, and x is
// copied in pairs of positions, once for each column of the kernel. A row of the kernel is an offset.
#pragma once
#include "conv2d_source_cpu.h"
#if defined(__AVX512F__)

namespace aot {
inline namespace AOT_ISA {

constexpr int64_t kTileSide = TileRegisters::kSide, kTilePairs = TileRegisters::kPairs;
// Floats of a packed step of 32 rows, or of 32 columns, and of a block of sums.
constexpr int64_t kStep = kTilePairs * kTileSide, kBlock = kTileSide * kTileSide;

constexpr int64_t round_up(int64_t n, int64_t unit) { return ceil_div(n, unit) * unit; }

// An axis of a copy, whose elements are divided into planes by their remainder of `step`: by a tap, position i meets
// element place(tap) + i of plane(tap).
struct TileAxis {
  int64_t source, positions, step, least = 0, reach = 0, planes = 1;

  explicit TileAxis(int64_t n) : source(n), positions(n), step(1) {}
  explicit TileAxis(const Phase &phase)
      : source(phase.axis.source), positions(phase.count()), step(phase.source_step()) {
    bool any = false;
    phase.each_tap([&](int64_t, int64_t at) { least = any && least < at ? least : at, any = true; });
    phase.each_tap([&](int64_t, int64_t at) {
      if (place(at) > reach) reach = place(at);
      if (plane(at) >= planes) planes = plane(at) + 1;
    });
  }

  int64_t place(int64_t tap) const { return (tap - least) / step; }
  int64_t plane(int64_t tap) const { return (tap - least) % step; }
};

// What is copied of an image's group for a band of lines of positions: (planes of h, planes of w, lines, columns,
// padded channels).
struct TileLines {
  const bfloat16 *data;  // of the group
  bool nhwc;
  int64_t channels, all;
  TileAxis h, w;

  int64_t padded() const { return round_up(channels, kTileSide); }
  int64_t columns() const { return w.positions + w.reach; }
  int64_t lines(int64_t band) const { return band + h.reach; }
  int64_t size(int64_t band) const { return h.planes * w.planes * lines(band) * columns() * padded(); }
  // Where the first position's element is by the taps y and x.
  int64_t offset(int64_t band, int64_t y, int64_t x) const {
    return (((h.plane(y) * w.planes + w.plane(x)) * lines(band) + h.place(y)) * columns() + w.place(x)) * padded();
  }

  // The lines of another image and group.
  TileLines of(int64_t image, int64_t group) const {
    TileLines lines = *this;
    const int64_t area = h.source * w.source;
    lines.data += image * all * area + group * channels * (nhwc ? 1 : area);
    return lines;
  }

  // Copies what n lines of positions meet, from `first` on.
  void copy(int64_t first, int64_t n, int64_t band, bfloat16 *to) const {
    const int64_t line = columns() * padded(), plane = lines(band) * line;
    for (int64_t i = 0; i < h.planes; ++i, to += w.planes * plane)
      for (int64_t l = 0; l < lines(n); ++l) {
        const int64_t y = (first + l) * h.step + i + h.least;
        bfloat16 *const at = to + l * line;
        if (y >= 0 && y < h.source) nhwc ? copy_pixels(y, at, plane) : copy_planes(y, at, plane);
        else
          for (int64_t j = 0; j < w.planes; ++j) std::memset(at + j * plane, 0, line * sizeof *at);
      }
  }

 private:
  void copy_pixels(int64_t y, bfloat16 *to, int64_t plane) const {
    const bfloat16 *const from = data + y * w.source * all;
    const int64_t width = padded();
    for (int64_t j = 0; j < w.planes; ++j, to += plane) {
      const int64_t at = j + w.least;  // x of the first column
      int64_t begin = at < 0 ? ceil_div(-at, w.step) : 0, end = ceil_div(w.source - at, w.step);
      if (w.source <= at) end = 0;
      if (end > columns()) end = columns();
      if (begin > end) begin = end;
      std::memset(to, 0, begin * width * sizeof *to);
      std::memset(to + end * width, 0, (columns() - end) * width * sizeof *to);
      if (w.step == 1 && channels == all && channels == width) {
        std::memcpy(to + begin * width, from + (begin + at) * all, (end - begin) * width * sizeof *to);
        continue;
      }
      for (int64_t q = begin; q < end; ++q) {
        const bfloat16 *const pixel = from + (q * w.step + at) * all;
        for (int64_t c = 0; c < channels; c += kTileSide) {
          const auto v = channels - c < kTileSide ? BFloat16Pairs::along(pixel + c, Part{channels - c})
                                                  : BFloat16Pairs::along(pixel + c, Full());
          std::memcpy(to + q * width + c, &v, sizeof v);
        }
      }
    }
  }

  // NCHW is transposed in blocks of 16 pixels by 32 channels.
  void copy_planes(int64_t y, bfloat16 *to, int64_t plane) const {
    const int64_t area = h.source * w.source, width = padded();
    for (int64_t j = 0; j < w.planes; ++j) std::memset(to + j * plane, 0, columns() * width * sizeof *to);
    for (int64_t x = 0; x < w.source; x += kTilePairs)
      for (int64_t c = 0; c < channels; c += kTileSide) {
        const int64_t n = w.source - x < kTilePairs ? w.source - x : kTilePairs;
        Vec<float> v[kTilePairs];
        for (int64_t r = 0; r < kTilePairs; ++r) {
          const int64_t left = channels - c - 2 * r;
          const bfloat16 *const from = data + (c + 2 * r) * area + y * w.source + x;
          v[r] = left <= 0         ? Vec<float>{}
                 : n == kTilePairs ? BFloat16Pairs::across(from, area, left, Full())
                                   : BFloat16Pairs::across(from, area, left, Part{n});
        }
        transpose<kTilePairs / 2>(v);
        for (int64_t i = 0; i < n; ++i) {
          const int64_t at = x + i - w.least, q = at / w.step;
          if (at >= 0 && at % w.step < w.planes && q < columns())
            std::memcpy(to + at % w.step * plane + q * width + c, &v[i], sizeof v[i]);
        }
      }
  }
};

// ------------------------------------------------------------------------------------------------------------- y, dx

// An element of the kernel: where its weights are, and its taps.
struct TileTap {
  int64_t weight, y, x;
};

// A weight, which is packed in pairs of channels: (groups, blocks of columns, taps, steps, kTilePairs, kTileSide).
struct TileWeight {
  const bfloat16 *data;
  int64_t group, column, channel;  // strides
  int64_t channels, columns;

  // Packs the block of columns from j on, by one tap.
  void pack(const bfloat16 *from, int64_t j, float *to) const {
    const int64_t n = columns - j < kTileSide ? columns - j : kTileSide;
    from += j * column;
    for (int64_t c = 0; c < channels; c += kTileSide, to += kTilePairs * kTileSide)
      for (int64_t half = 0; half < kTileSide; half += kTilePairs) {
        Vec<float> v[kTilePairs];
        read(from + half * column + c * channel, n - half, channels - c, v);
        for (int64_t r = 0; r < kTilePairs; ++r) store(to + r * kTileSide + half, v[r]);
      }
  }

 private:
  // kTilePairs columns, n of which exist, of kTileSide channels, `left` of which exist: a vector is of pairs.
  void read(const bfloat16 *from, int64_t n, int64_t left, Vec<float> (&v)[kTilePairs]) const {
    if (channel == 1) {
      for (int64_t l = 0; l < kTilePairs; ++l)
        v[l] = l >= n              ? Vec<float>{}
               : left >= kTileSide ? BFloat16Pairs::along(from + l * column, Full())
                                   : BFloat16Pairs::along(from + l * column, Part{left});
      return transpose<kTilePairs / 2>(v);
    }
    for (int64_t r = 0; r < kTilePairs; ++r) {
      const bfloat16 *const at = from + 2 * r * channel;
      if (2 * r >= left || n <= 0) {
        v[r] = Vec<float>{};
      } else if (column == 1) {
        v[r] = n >= kTilePairs ? BFloat16Pairs::across(at, channel, left - 2 * r, Full())
                               : BFloat16Pairs::across(at, channel, left - 2 * r, Part{n});
      } else {
        VecBits pairs{};
        for (int64_t l = 0; l < kTilePairs && l < n; ++l)
          pairs[l] =
              at[l * column].bits | (2 * r + 1 < left ? uint32_t{at[l * column + channel].bits} << 16 : uint32_t{0});
        v[r] = (Vec<float>)pairs;
      }
    }
  }
};

// How the positions of an image and the output channels are divided into tasks. Sums do not depend on it.
struct TileTasks {
  int64_t band, bands, columns, pieces;  // lines of positions, output channels

  static TileTasks of(const TileLines &source, int64_t images, int64_t out_channels) {
    constexpr int64_t kFewRows = 4 * kTileSide, kMost = 1 << 18;  // bytes of a copy
    const int64_t height = source.h.positions, blocks = ceil_div(out_channels, kTileSide);
    const int64_t line = source.columns() * source.padded() * 2 * source.h.planes * source.w.planes;
    int64_t most = kMost / line - source.h.reach, least = ceil_div(kFewRows, source.columns());
    if (most < 1) most = 1;
    if (least > most) least = most;
    const int64_t wanted = threads() > 1 ? threads() : 1;
    int64_t bands = ceil_div(height, most), pieces = 1;
    const int64_t most_bands = height / least > bands ? height / least : bands;
    if (images * bands < wanted) bands = ceil_div(wanted, images) < most_bands ? ceil_div(wanted, images) : most_bands;
    if (images * bands < wanted) pieces = ceil_div(wanted, images * bands);
    if (pieces > blocks) pieces = blocks;
    const int64_t band = ceil_div(height, bands), columns = ceil_div(blocks, pieces) * kTileSide;
    return {band, ceil_div(height, band), columns, ceil_div(out_channels, columns)};
  }
};

// store(image, group).store(position, column, rows, cols, sums, stride) stores sums of adjacent positions of two
// phases.
template <class Store>
Status convolve_tiles(const char *op, const TileLines &lines, int64_t batch, int64_t groups, const TileTap *taps,
                      int64_t n_taps, const TileWeight &weight, Store store) {
  const int64_t channel_steps = lines.padded() / kTileSide, steps = n_taps * channel_steps;
  const int64_t blocks = ceil_div(weight.columns, kTileSide);
  const TileTasks tasks = TileTasks::of(lines, batch * groups, weight.columns);
  const Buffer<float> packed(groups * blocks * steps * kStep);
  const Buffer<int64_t> offsets(steps);
  if (!(packed && offsets)) return out_of_memory(op);
  for (int64_t t = 0; t < n_taps; ++t)
    for (int64_t c = 0; c < channel_steps; ++c)
      offsets[t * channel_steps + c] = lines.offset(tasks.band, taps[t].y, taps[t].x) + c * kTileSide;
  const int64_t piece = ceil_div(2 * kGrain, lines.padded() * kTileSide);
  parallel_pieces(groups * blocks * n_taps, piece, [=, &packed](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      weight.pack(weight.data + i / n_taps / blocks * weight.group + taps[i % n_taps].weight,
                  i / n_taps % blocks * kTileSide, packed + i * channel_steps * kStep);
  });
  return try_parallel(batch * groups * tasks.bands * tasks.pieces, [=, &lines, &packed, &offsets](int64_t index) {
    const int64_t piece = index % tasks.pieces, first = index / tasks.pieces % tasks.bands * tasks.band;
    const int64_t image = index / tasks.pieces / tasks.bands / groups,
                  group = index / tasks.pieces / tasks.bands % groups;
    const int64_t pixel = lines.padded(), columns = lines.columns(), width = lines.w.positions;
    const int64_t left = lines.h.positions - first, band = left < tasks.band ? left : tasks.band;
    const int64_t rows = (band - 1) * columns + width;
    // rows behind the last one are read, too
    auto *const copy = static_cast<bfloat16 *>(thread_scratch((lines.size(tasks.band) + kTileSide * pixel) * 2));
    if (!copy) return out_of_memory(op);
    lines.of(image, group).copy(first, band, tasks.band, copy);
    const auto to = store(image, group);
    const TileRegisters registers;
    alignas(64) float sums[kBlock];
    for (int64_t j = piece * tasks.columns; j < (piece + 1) * tasks.columns && j < weight.columns; j += kTileSide) {
      const int64_t cols = weight.columns - j < kTileSide ? weight.columns - j : kTileSide;
      const float *const right = packed + (group * blocks + j / kTileSide) * steps * kStep;
      for (int64_t i = 0; i < rows; i += kTileSide) {
        registers.zero();
        for (int64_t k = 0; k < steps; ++k)
          registers.add({copy + i * pixel + offsets[k], pixel * 2}, {right + k * kStep, kTileSide * 4});
        registers.store(sums);
        const int64_t end = i + kTileSide < rows ? i + kTileSide : rows;
        for (int64_t r = i; r < end; r = (r / columns + 1) * columns) {  // the positions of each line
          const int64_t x = r % columns, n = (width < x + end - r ? width : x + end - r) - x;
          if (n > 0) to.store((first + r / columns) * width + x, j, n, cols, sums + (r - i) * kTileSide, kTileSide);
        }
      }
    }
    return kOk;
  });
}

// ----------------------------------------------------------------------------------------------------------- dweight

// The pairs of adjacent positions of some lines of an image. In a line, a position is added where their number is odd,
// of zeros in both factors.
struct TilePositions {
  int64_t width, line;  // positions of a line, and of a line with the added one
  int64_t band;         // lines
  int64_t pairs, steps;

  TilePositions(int64_t width, int64_t band)
      : width(width),
        line(round_up(width, 2)),
        band(band),
        pairs(band * line / 2),
        steps(ceil_div(pairs, kTilePairs)) {}

  // The channels of pairs of pixels of a copy, from position x of a line on: 16 channels of the first and the second.
  Vec<float> pair(const bfloat16 *pixel, int64_t stride, int64_t x) const {
    return BFloat16Pairs::across(pixel, stride, width - x, Full());
  }
  // dy: to[block of channels][step][channel][pair], with zeros behind the last pair
  void pack_rows(const bfloat16 *from, int64_t channels, int64_t first, int64_t end, float *to) const {
    for (int64_t c = first * kTileSide; c < end * kTileSide; c += kTilePairs) {
      float *at = to + (c / kTileSide - first) * steps * kStep + c % kTileSide * kTilePairs;
      int64_t y = 0, x = 0;
      for (int64_t step = 0; step < steps; ++step, at += kStep) {
        Vec<float> v[kTilePairs];
        for (int64_t r = 0; r < kTilePairs; ++r) {
          v[r] = y < band ? pair(from + (y * width + x) * channels + c, channels, x) : Vec<float>{};
          if ((x += 2) >= width) x = 0, ++y;
        }
        transpose<kTilePairs / 2>(v);
        for (int64_t r = 0; r < kTilePairs; ++r) store(at + r * kTilePairs, v[r]);
      }
    }
  }
  // x: to[line][pair][channel], for kTileSide channels.
  void pack_pairs(const bfloat16 *from, int64_t lines, int64_t columns, int64_t channels, float *to) const {
    for (int64_t y = 0; y < lines; ++y, from += columns * channels)
      for (int64_t at = 0; at < line; at += 2)
        for (int64_t half = 0; half < kTileSide; half += kTilePairs, to += kTilePairs)
          store(to, pair(from + at * channels + half, channels, at));
  }

  // Adds the products of packed rows and pairs.
  void multiply(const TileRegisters &registers, const float *a, const float *b) const {
    auto add = [&](const float *of_b) { registers.add({a, kTilePairs * 4}, {of_b, kTileSide * 4}); };
    for (int64_t k = 0; k < pairs / kTilePairs; ++k, a += kStep, b += kStep) add(b);
    if (const int64_t rest = pairs % kTilePairs) {  // the next pairs are not of these positions
      alignas(64) float last[kStep];
      std::memset(last, 0, sizeof last);
      std::memcpy(last, b, rest * kTileSide * sizeof *last);
      add(last);
    }
  }
};

// dweight as blocks of kTileSide output channels by as many channels: (groups, blocks of output channels, blocks of
// channels, rows, columns of the kernel). The images are divided into bands of lines, and the bands into parts, which
// have sums of their own: threads then share no copy of dy and x.
struct TileSums {
  static constexpr int64_t kMostParts = 8, kMostFloats = int64_t{1} << 22;

  TileLines x, dy;
  int64_t batch, groups;
  const int64_t *rows, *cols;  // the taps of each axis
  int64_t n_rows, n_cols;
  int64_t band = 0, bands = 0, parts = 0;  // lines, bands of an image

  TileSums(const TileLines &x, const TileLines &dy, int64_t batch, int64_t groups, const int64_t *rows, int64_t n_rows,
           const int64_t *cols, int64_t n_cols)
      : x(x), dy(dy), batch(batch), groups(groups), rows(rows), cols(cols), n_rows(n_rows), n_cols(n_cols) {
    constexpr int64_t kPositions = 2048;  // of a band, whose factors a second-level cache holds
    const int64_t fit = line() < kPositions ? kPositions / line() : 1;
    band = ceil_div(dy.h.positions, ceil_div(dy.h.positions, fit)), bands = ceil_div(dy.h.positions, band);
    parts = kMostFloats / size();
    parts = parts < 1 ? 1 : parts < kMostParts ? parts : kMostParts;
    if (parts > batch * bands) parts = batch * bands;
  }

  int64_t line() const { return TilePositions(dy.w.positions, 1).line; }
  int64_t blocks_o() const { return dy.padded() / kTileSide; }
  int64_t blocks_c() const { return x.padded() / kTileSide; }
  int64_t kernel() const { return n_rows * n_cols; }
  int64_t size() const { return groups * blocks_o() * blocks_c() * kernel() * kBlock; }  // of the sums of a part

  // The bands of a part, by some blocks of a group.
  struct Task {
    int64_t part, group, o, o_end, c, c_end;
  };
  Status add(const char *op, const Task &task, float *sums) const {
    // dy; the lines of x for each block of channels and column of the kernel; and a copy of either
    const int64_t left = (task.o_end - task.o) * TilePositions(dy.w.positions, band).steps * kStep;
    const int64_t right = x.h.planes * x.lines(band) * line() / 2 * kTileSide;
    const int64_t packed = left + (task.c_end - task.c) * n_cols * right;
    const int64_t copied = x.size(band) > dy.size(band) ? x.size(band) : dy.size(band);
    auto *const scratch = static_cast<float *>(thread_scratch(packed * sizeof(float) + copied * sizeof(bfloat16)));
    if (!scratch) return out_of_memory(op);
    auto *const copy = reinterpret_cast<bfloat16 *>(scratch + packed);
    const TileRegisters registers;
    const int64_t begin = task.part * batch * bands / parts, end = (task.part + 1) * batch * bands / parts;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % bands * band, rest = dy.h.positions - first;
      const TilePositions positions(dy.w.positions, rest < band ? rest : band);
      dy.of(i / bands, task.group).copy(first, positions.band, band, copy);
      positions.pack_rows(copy, dy.padded(), task.o, task.o_end, scratch);
      x.of(i / bands, task.group).copy(first, positions.band, band, copy);
      float *to = scratch + left;
      for (int64_t c = task.c; c < task.c_end; ++c)
        for (int64_t s = 0; s < n_cols; ++s)
          for (int64_t plane = 0; plane < x.h.planes; ++plane, to += right / x.h.planes)
            positions.pack_pairs(
                copy +
                    ((plane * x.w.planes + x.w.plane(cols[s])) * x.lines(band) * x.columns() + x.w.place(cols[s])) *
                        x.padded() +
                    c * kTileSide,
                x.lines(positions.band), x.columns(), x.padded(), to);
      for (int64_t o = task.o; o < task.o_end; ++o)
        for (int64_t c = task.c; c < task.c_end; ++c)
          for (int64_t s = 0; s < n_cols; ++s)  // the rows of a column have most lines in common
            for (int64_t r = 0; r < n_rows; ++r) {
              const int64_t at = x.h.plane(rows[r]) * x.lines(band) + x.h.place(rows[r]);
              float *const block =
                  sums + (((task.group * blocks_o() + o) * blocks_c() + c) * kernel() + r * n_cols + s) * kBlock;
              i == begin ? registers.zero() : registers.load(block);
              positions.multiply(
                  registers, scratch + (o - task.o) * positions.steps * kStep,
                  scratch + left + ((c - task.c) * n_cols + s) * right + at * (positions.line / 2) * kTileSide);
              registers.store(block);
            }
    }
    return kOk;
  }

  // sums: of all parts.
  Status add_all(const char *op, float *sums) const {
    const int64_t wanted = ceil_div(threads(), parts * groups);  // pieces, by which the sums do not change
    const int64_t across = wanted < blocks_c() ? wanted : blocks_c();
    const int64_t down = ceil_div(wanted, across) < blocks_o() ? ceil_div(wanted, across) : blocks_o();
    return try_parallel(parts * groups * across * down, [=, *this](int64_t index) {
      const int64_t c = index % across, o = index / across % down, part = index / across / down / groups;
      const Task task{part,
                      index / across / down % groups,
                      o * blocks_o() / down,
                      (o + 1) * blocks_o() / down,
                      c * blocks_c() / across,
                      (c + 1) * blocks_c() / across};
      return add(op, task, sums + part * size());
    });
  }
};

}  // namespace AOT_ISA
}  // namespace aot
#endif
