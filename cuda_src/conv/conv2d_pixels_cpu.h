// Convolutions of each channel with its own kernel, on the CPU, where the channels of a pixel are contiguous: vectors
// of channels, of a few pixels at a time, meet one element of the kernels. Taps that lie outside of the image are left
// out, so that no zeros are added around it.
#pragma once
#include "conv2d_lines_cpu.h"

namespace aot {
inline namespace AOT_ISA {

struct Range {
  int64_t begin, end;

  Range in(Range other) const { return {begin > other.begin ? begin : other.begin, end < other.end ? end : other.end}; }
};

// The taps of a phase: element `at[k]` of the source is met by position 0.
struct PhaseTaps {
  const int64_t *at;
  int64_t count, source, step, positions;

  static PhaseTaps of(const Phase &phase, int64_t *at) {
    int64_t n = 0;
    phase.each_tap([&](int64_t, int64_t place) { at[n++] = place; });
    return {at, n, phase.axis.source, phase.source_step(), phase.count()};
  }
  // The positions that tap k serves within the source.
  Range positions_of(int64_t k) const {
    const int64_t first = at[k] < 0 ? ceil_div(-at[k], step) : 0, room = source - at[k];
    const int64_t end = room > 0 ? ceil_div(room, step) : 0;
    return Range{first, end}.in({0, positions});
  }
  Range positions_of_all(int64_t begin, int64_t end) const {
    Range range{0, positions};
    for (int64_t k = begin; k < end; ++k) range = range.in(positions_of(k));
    return range;
  }
  // The taps within the source at a position: adjacent ones, since `at` rises or falls.
  Range taps_of(int64_t position) const {
    auto outside = [=, *this](int64_t k) {
      const int64_t place = position * step + at[k];
      return place < 0 || place >= source;
    };
    int64_t begin = 0, end = count;
    while (begin < end && outside(begin)) ++begin;
    while (begin < end && outside(end - 1)) --end;
    return {begin, end};
  }
};

// ------------------------------------------------------------------------------------------------------------ y, dx

template <typename T>
struct PixelLines {
  using A = Accumulate<T>;
  Source<T> source;
  PhaseTaps h, w;
  const A *weight;  // (h.count, w.count, channels)
  const T *bias;
  int64_t begin, stride;  // from one position to the next in a line of the result, after `begin`

  // A line of the result from a line of positions.
  void compute(int64_t image, int64_t y, T *result) const {
    constexpr int kPixels = 4;
    const Range rows = h.taps_of(y), inner = w.positions_of_all(0, w.count);
    const T *const from = source.data + image * source.h.source * source.w.source * source.all;
    int64_t x = 0;
    for (; x < w.positions && (x < inner.begin || x >= inner.end || inner.end - inner.begin < kPixels); ++x)
      add_taps<1>(from, y, x, rows, w.taps_of(x), result);
    for (; x < inner.end; x += kPixels)
      add_taps<kPixels>(from, y, x + kPixels < inner.end ? x : inner.end - kPixels, rows, {0, w.count}, result);
    for (x = x > inner.end ? inner.end : x; x < w.positions; ++x) add_taps<1>(from, y, x, rows, w.taps_of(x), result);
  }

 private:
  template <int kPixels>
  [[gnu::noinline]] void add_taps(const T *from, int64_t y, int64_t x, Range rows, Range columns, T *result) const {
    int64_t c = 0;
    for (; c + 2 * kLanes<T> <= source.all; c += 2 * kLanes<T>)
      add_taps<kPixels, 2>(from + c, y, x, rows, columns, c, result + c, Full());
    for (; c + kLanes<T> <= source.all; c += kLanes<T>)
      add_taps<kPixels, 1>(from + c, y, x, rows, columns, c, result + c, Full());
    if (c < source.all) add_taps<kPixels, 1>(from + c, y, x, rows, columns, c, result + c, Part{source.all - c});
  }
  template <int kPixels, int kVectors, class P>
  AOT_INLINE void add_taps(const T *from, int64_t y, int64_t x, Range rows, Range columns, int64_t c, T *result,
                           P part) const {
    Vec<T> sum[kPixels][kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const Vec<T> first = bias ? load(bias + c + v * kLanes<T>, part) : Vec<T>{};
#pragma GCC unroll 4
      for (int p = 0; p < kPixels; ++p) sum[p][v] = first;
    }
    const int64_t all = source.all, pixel = w.step * all, taps = w.count;
    const int64_t *const columns_at = w.at;
    if (kPixels > 1 && h.count > 0) {
      // rows that the next line meets first: the steps between pixels are too long for hardware prefetchers
      const int64_t last = h.at[0] > h.at[h.count - 1] ? h.at[0] : h.at[h.count - 1];
      for (int64_t k = 1; k <= h.step; ++k)
        for (int64_t p = 0; p < kPixels * w.step; ++p)
          __builtin_prefetch(from + ((y * h.step + last + k) * source.w.source + x * w.step + p) * all);
    }
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const T *const line = from + (y * h.step + h.at[r]) * source.w.source * all + x * pixel;
      const A *weights = weight + (r * taps + columns.begin) * all + c;
      for (int64_t s = columns.begin; s < columns.end; ++s, weights += all) {
        Vec<T> right[kVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) right[v] = load(weights + v * kLanes<T>, part);
        const T *at = line + columns_at[s] * all;
#pragma GCC unroll 4
        for (int p = 0; p < kPixels; ++p)
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) sum[p][v] += load(at + p * pixel + v * kLanes<T>, part) * right[v];
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < kPixels; ++p)
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
  const Buffer<int64_t> rows(source.h.kernel), columns(source.w.kernel);
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
    // a sum has at most about so many terms before it is added in double
    constexpr int64_t kMostTerms = 256;
    int64_t terms = 0;
    auto flush = [&] {
      for (int64_t t = 0; t < taps; ++t)
        for (int64_t c = 0; c < channels; ++c) to[c * taps + t] += sums[t * kWidth + c];
      for (int64_t i = 0; i < taps * kWidth; ++i) sums[i] = 0;
      terms = 0;
    };
    for (int64_t image = begin; image < end; ++image)
      for (int64_t y = 0; y < h.positions; ++y) {
        add_line(image, y);
        if ((terms += w.positions) >= kMostTerms) flush();
      }
    flush();
  }

 private:
  void add_line(int64_t image, int64_t y) const {
    const Range rows = h.taps_of(y);
    const T *const other = dy + (image * h.positions + y) * w.positions * source.all;
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const T *const from =
          source.data + (image * source.h.source + y * h.step + h.at[r]) * source.w.source * source.all;
      for (int64_t s = 0; s < w.count;) {
        const int64_t left = w.count - s, n = left == 3 || left > 4 ? 3 : left > 1 ? 2 : 1;
        A *const to = sums + (r * w.count + s) * kWidth;
        const Range inner = w.positions_of_all(s, s + n);
        if (inner.begin < inner.end) {
          if (n == 3) add_products<3>(from, other, s, inner, to);
          else if (n == 2) add_products<2>(from, other, s, inner, to);
          else add_products<1>(from, other, s, inner, to);
        }
        for (int64_t k = 0; k < n && n > 1; ++k) {  // where not all of them are in the image
          const Range all = w.positions_of(s + k);
          const bool none = inner.begin >= inner.end;
          add_products<1>(from, other, s + k, {all.begin, none ? all.end : inner.begin}, to + k * kWidth);
          if (!none) add_products<1>(from, other, s + k, {inner.end, all.end}, to + k * kWidth);
        }
        s += n;
      }
    }
  }

  template <int kTaps>
  AOT_INLINE void add_products(const T *from, const T *other, int64_t s, Range range, A *to) const {
    if (range.begin >= range.end) return;
    Vec<T> sum[kTaps][kVectors];
    const T *at[kTaps];
#pragma GCC unroll 3
    for (int k = 0; k < kTaps; ++k) {
      at[k] = from + (w.at[s + k] + range.begin * w.step) * source.all;
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[k][v] = load(to + k * kWidth + v * kLanes<T>);
    }
    const T *d = other + range.begin * source.all;
    for (int64_t x = range.begin, offset = 0; x < range.end; ++x, offset += w.step * source.all, d += source.all)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const Vec<T> right = load(d + v * kLanes<T>, part);
#pragma GCC unroll 3
        for (int k = 0; k < kTaps; ++k) sum[k][v] += load(at[k] + offset + v * kLanes<T>, part) * right;
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
  const Buffer<int64_t> rows(source.h.kernel), columns(source.w.kernel);
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
