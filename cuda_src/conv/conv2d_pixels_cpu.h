// Convolutions of each channel with its own kernel, on the CPU, where the channels of a pixel are contiguous: vectors
// of channels, of a few pixels at a time, meet one element of the kernels. Taps that lie outside of the image are left
// out, so that no zeros are added around it.
#pragma once
#include "conv2d_lines_cpu.h"

namespace aot {
inline namespace AOT_ISA {

struct Range {
  int64_t begin, end;

  bool has(int64_t i) const { return begin <= i && i < end; }
  Range in(Range other) const { return {begin > other.begin ? begin : other.begin, end < other.end ? end : other.end}; }
};

// A tap of a phase: position 0 meets element `at` of the source; `positions` meet elements within it.
struct Tap {
  int64_t at;
  Range positions;
};

struct PhaseTaps {
  const Tap *taps;
  int64_t count, source, step, positions;

  static PhaseTaps of(const Phase &phase, Tap *taps) {
    PhaseTaps of{taps, 0, phase.axis.source, phase.source_step(), phase.count()};
    phase.each_tap([&](int64_t, int64_t at) {
      const int64_t first = at < 0 ? ceil_div(-at, of.step) : 0, room = of.source - at;
      taps[of.count++] = {at, Range{first, room > 0 ? ceil_div(room, of.step) : 0}.in({0, of.positions})};
    });
    return of;
  }
  Range positions_of_all(int64_t begin, int64_t end) const {
    Range range{0, positions};
    for (int64_t k = begin; k < end; ++k) range = range.in(taps[k].positions);
    return range;
  }
  // The taps within the source at a position: adjacent ones, since `at` rises or falls.
  Range taps_of(int64_t position) const {
    int64_t begin = 0, end = count;
    while (begin < end && !taps[begin].positions.has(position)) ++begin;
    while (begin < end && !taps[end - 1].positions.has(position)) --end;
    return {begin, end};
  }
};

// ------------------------------------------------------------------------------------------------------------ y, dx

template <typename T>
struct PixelLines {
  using A = Accumulate<T>;
  static constexpr int kPixels = Block<A>::k32Registers ? 7 : 4;
  Source<T> source;
  PhaseTaps h, w;
  const A *weight;  // (h.count, w.count, channels)
  const T *bias;
  int64_t begin, stride;  // from one position to the next in a line of the result, after `begin`

  // A line of the result from a line of positions.
  void compute(int64_t image, int64_t y, T *result) const {
    const Range rows = h.taps_of(y), inner = w.positions_of_all(0, w.count);
    const T *const from = source.data + image * source.h.source * source.w.source * source.all;
    for (int64_t x = 0; x < w.positions; x += kPixels)
      if (inner.begin <= x && x + kPixels <= inner.end) add_taps<true>(from, y, x, rows, result);
      else add_taps<false>(from, y, x, rows, result);
  }

 private:
  // kInner: all pixels exist, and all taps are within the source.
  template <bool kInner>
  [[gnu::noinline]] void add_taps(const T *from, int64_t y, int64_t x, Range rows, T *result) const {
    int64_t c = 0;
    for (; c + 2 * kLanes<T> <= source.all; c += 2 * kLanes<T>)
      add_taps<kInner, 2>(from + c, y, x, rows, c, result + c, Full());
    for (; c + kLanes<T> <= source.all; c += kLanes<T>)
      add_taps<kInner, 1>(from + c, y, x, rows, c, result + c, Full());
    if (c < source.all) add_taps<kInner, 1>(from + c, y, x, rows, c, result + c, Part{source.all - c});
  }
  template <bool kInner, int kVectors, class P>
  AOT_INLINE void add_taps(const T *from, int64_t y, int64_t x, Range rows, int64_t c, T *result, P part) const {
    Vec<T> sum[kPixels][kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const Vec<T> first = bias ? load(bias + c + v * kLanes<T>, part) : Vec<T>{};
#pragma GCC unroll 8
      for (int p = 0; p < kPixels; ++p) sum[p][v] = first;
    }
    const int64_t all = source.all, pixel = w.step * all;
    if (kInner && h.count > 0) {
      // rows that the next line meets first: the steps between pixels are too long for hardware prefetchers
      const int64_t first = h.taps[0].at, other = h.taps[h.count - 1].at, last = first > other ? first : other;
      for (int64_t k = 1; k <= h.step; ++k)
        for (int64_t p = 0; p < kPixels * w.step; ++p)
          __builtin_prefetch(from + ((y * h.step + last + k) * source.w.source + x * w.step + p) * all);
    }
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const T *const line = from + (y * h.step + h.taps[r].at) * source.w.source * all + x * pixel;
      const A *weights = weight + r * w.count * all + c;
      for (const Tap *tap = w.taps, *end = tap + w.count; tap < end; ++tap, weights += all) {
        Vec<T> right[kVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) right[v] = load(weights + v * kLanes<T>, part);
        const T *at = line + tap->at * all;
        const Range valid{tap->positions.begin - x, tap->positions.end - x};
#pragma GCC unroll 8
        for (int p = 0; p < kPixels; ++p)
          if (kInner || valid.has(p))
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) sum[p][v] += load(at + p * pixel + v * kLanes<T>, part) * right[v];
      }
    }
#pragma GCC unroll 8
    for (int p = 0; p < kPixels; ++p)
      if (kInner || x + p < w.positions)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v)
          store(result + (begin + (x + p) * stride) * source.all + v * kLanes<T>, sum[p][v], part);
  }
};

// result = each channel of the source convolved with its kernel, NHWC.
template <typename T>
Status convolve_pixel_lines(const char *op, const Source<T> &source, const T *weight, const T *bias, T *result) {
  using A = Accumulate<T>;
  const int64_t kernel = source.h.kernel * source.w.kernel, channels = source.all;
  const Buffer<A> all_weights(kernel * channels);
  const Buffer<Tap> rows(source.h.kernel), columns(source.w.kernel);
  if (!(all_weights && rows && columns)) return out_of_memory(op);
  A *weights = all_weights;
  each_phase(source.h, [&](const Phase &i) {
    each_phase(source.w, [&](const Phase &j) {
      A *to = weights;
      i.each_tap([&](int64_t r, int64_t) {
        j.each_tap([&](int64_t s, int64_t) {
          for (int64_t c = 0; c < channels; ++c) *to++ = load_one(weight + c * kernel + r * source.w.kernel + s);
        });
      });
      const PhaseTaps h = PhaseTaps::of(i, rows), w = PhaseTaps::of(j, columns);
      const PixelLines<T> lines{source, h, w, weights, bias, j.first, j.step()};
      const int64_t n = source.batch * h.positions;
      const int64_t piece = ceil_div(kGrain, w.positions * channels * (h.count * w.count + 1) + 1);
      parallel_pieces(n, piece, [=, &i, &lines](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at) {
          const int64_t image = at / h.positions, y = at % h.positions, line = i.first + y * i.step();
          lines.compute(image, y, result + (image * i.axis.result + line) * j.axis.result * channels);
        }
      });
      weights = to;
    });
  });
  return kOk;
}

// ---------------------------------------------------------------------------------------------------------- dweight

// The sums of the products of x and dy of kVectors vectors of channels, or of the part of one.
template <typename T, int kVectors, class P>
struct PixelSums {
  using A = Accumulate<T>;
  static constexpr int64_t kWidth = kVectors * kLanes<T>;
  Source<T> source;
  PhaseTaps h, w;
  const T *dy;  // from the first of the channels on, as source.data
  P part;
  A *sums;  // (taps, kWidth)

  // to (channels, taps) = the sums over the images [begin, end).
  void add_images(int64_t begin, int64_t end, int64_t channels, double *to) const {
    const int64_t taps = h.count * w.count;
    for (int64_t i = 0; i < channels * taps; ++i) to[i] = 0;
    for (int64_t i = 0; i < taps * kWidth; ++i) sums[i] = 0;
    // A sum has at most about so many terms before it is added in double. What half of them meet fits the first-level
    // cache.
    constexpr int64_t kMostTerms = 256;
    const int64_t band = kMostTerms / 2 / (w.positions + 1) + 1;
    int64_t terms = 0;
    auto flush = [&] {
      for (int64_t t = 0; t < taps; ++t)
        for (int64_t c = 0; c < channels; ++c) to[c * taps + t] += sums[t * kWidth + c];
      for (int64_t i = 0; i < taps * kWidth; ++i) sums[i] = 0;
      terms = 0;
    };
    for (int64_t image = begin; image < end; ++image)
      for (int64_t y = 0; y < h.positions; y += band) {
        add_lines(image, {y, y + band});
        if ((terms += band * w.positions) >= kMostTerms) flush();
      }
    flush();
  }

 private:
  // Adds the products of the lines of an image.
  void add_lines(int64_t image, Range lines) const {
    for (int64_t r = 0; r < h.count; ++r) {
      const Range here = lines.in(h.taps[r].positions);
      for (int64_t s = 0; s < w.count && here.begin < here.end;) {
        const int64_t left = w.count - s, n = left == 3 || left > 4 ? 3 : left > 1 ? 2 : 1;
        if (n == 3) add_products<3>(image, here, r, s);
        else if (n == 2) add_products<2>(image, here, r, s);
        else add_products<1>(image, here, r, s);
        s += n;
      }
    }
  }

  template <int kTaps>
  void add_products(int64_t image, Range lines, int64_t r, int64_t s) const {
    Vec<T> sum[kTaps][kVectors];
    Range valid[kTaps];
    const T *at[kTaps];
    A *const to = sums + (r * w.count + s) * kWidth;
    const Range inner = w.positions_of_all(s, s + kTaps);
    const int64_t line = source.w.source * source.all, pixel = w.step * source.all;
#pragma GCC unroll 3
    for (int k = 0; k < kTaps; ++k) {
      const Tap tap = w.taps[s + k];
      at[k] = source.data + (image * source.h.source + h.taps[r].at) * line + tap.at * source.all;
      valid[k] = tap.positions;
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[k][v] = load(to + k * kWidth + v * kLanes<T>);
    }
    for (int64_t y = lines.begin; y < lines.end; ++y) {
      const T *const d = dy + (image * h.positions + y) * w.positions * source.all;
      auto add = [&](int64_t x, bool all) AOT_INLINED {
        const int64_t offset = y * h.step * line + x * pixel;
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          const Vec<T> right = load(d + x * source.all + v * kLanes<T>, part);
#pragma GCC unroll 3
          for (int k = 0; k < kTaps; ++k)
            if (all || valid[k].has(x)) sum[k][v] += load(at[k] + offset + v * kLanes<T>, part) * right;
        }
      };
      int64_t x = 0;
      for (; x < w.positions && x < inner.begin; ++x) add(x, false);
      for (; x < inner.end; ++x) add(x, true);
      for (; x < w.positions; ++x) add(x, false);
    }
#pragma GCC unroll 3
    for (int k = 0; k < kTaps; ++k)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) store(to + k * kWidth + v * kLanes<T>, sum[k][v]);
  }
};

// dweight (channels, taps) of a convolution of each channel with its kernel, NHWC.
template <typename T>
Status sum_pixel_lines(const char *op, const Source<T> &source, const T *dy, T *dweight) {
  using A = Accumulate<T>;
  constexpr int64_t kWidth = 2 * kLanes<T>;
  const int64_t taps = source.depth(), channels = source.all, blocks = ceil_div(channels, kWidth);
  const int64_t slices = image_slices(source.batch, blocks);
  const Buffer<Tap> rows(source.h.kernel), columns(source.w.kernel);
  const Buffer<double> sums(slices * channels * taps);
  if (!(rows && columns && sums)) return out_of_memory(op);
  const PhaseTaps h = PhaseTaps::of({source.h, 0}, rows), w = PhaseTaps::of({source.w, 0}, columns);
  AOT_TRY(try_parallel(slices * blocks, [&](int64_t index) -> Status {
    const int64_t slice = index / blocks, begin = slice * source.batch / slices;
    const int64_t end = (slice + 1) * source.batch / slices;
    A *const scratch = static_cast<A *>(thread_scratch(taps * kWidth * sizeof(A)));
    if (!scratch) return out_of_memory(op);
    auto add = [&](auto vectors, auto part, int64_t c, int64_t n) {
      Source<T> from = source;
      from.data += c;
      const PixelSums<T, decltype(vectors)::value, decltype(part)> of{from, h, w, dy + c, part, scratch};
      of.add_images(begin, end, n, sums + (slice * channels + c) * taps);
    };
    int64_t c = index % blocks * kWidth;
    const int64_t stop = c + kWidth < channels ? c + kWidth : channels;
    if (stop - c == kWidth) return add(std::integral_constant<int, 2>(), Full(), c, kWidth), kOk;
    if (stop - c >= kLanes<T>) add(std::integral_constant<int, 1>(), Full(), c, kLanes<T>), c += kLanes<T>;
    if (c < stop) add(std::integral_constant<int, 1>(), Part{stop - c}, c, stop - c);
    return kOk;
  }));
  return add_slices(sums, slices, channels * taps, dweight), kOk;
}

}  // namespace AOT_ISA
}  // namespace aot
