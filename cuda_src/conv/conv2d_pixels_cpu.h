// Depthwise convolutions on the CPU: vectors of channels, of a few pixels at a time, meet one element of the kernels.
// Taps that lie outside of the image are left out, so that no zeros are added around it. A thread computes a band of an
// image for blocks of channels. If a block is no whole vectors of a pixel, or costs too much to widen at each tap, the
// thread rearranges the band before, and the result afterwards.
#pragma once
#include "conv2d_lines_cpu.h"

namespace aot {
inline namespace AOT_ISA {

struct Range {
  int64_t begin, end;

  bool has(int64_t i) const { return begin <= i && i < end; }
  Range in(Range other) const { return {begin > other.begin ? begin : other.begin, end < other.end ? end : other.end}; }
};

// Element k of the kernel in a phase: position 0 meets element `at` of the source; `positions` meet elements within it.
struct Tap {
  int64_t k, at;
  Range positions;
};

struct PhaseTaps {
  const Tap *taps;
  int64_t count, source, step, positions;

  static PhaseTaps of(const Phase &phase, Tap *taps) {
    PhaseTaps of{taps, 0, phase.axis.source, phase.source_step(), phase.count()};
    phase.each_tap([&](int64_t k, int64_t at) {
      const int64_t first = at < 0 ? ceil_div(-at, of.step) : 0, room = of.source - at;
      taps[of.count++] = {k, at, Range{first, room > 0 ? ceil_div(room, of.step) : 0}.in({0, of.positions})};
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

// ------------------------------------------------------------------------------------------------------------ blocks

// Vector v of n of a pixel's channels. Two of bfloat16 are the even channels and the odd ones: 32 bits have one of
// each.
template <int n, typename T>
AOT_INLINE Vec<T> load_channels(const T *p, int v) {
  if constexpr (std::is_same_v<T, bfloat16> && n == 2) {
    const VecBits pairs = load_raw<VecBits>(p);
    return (Vec<T>)(v == 0 ? pairs << 16 : pairs & 0xffff0000);
  } else {
    return load(p + v * kLanes<T>);
  }
}
template <typename T, int n>
AOT_INLINE void store_channels(T *p, const Vec<T> (&v)[n]) {
  if constexpr (std::is_same_v<T, bfloat16> && n == 2) {
    const VecBits pairs = widen_bits(narrow(v[0], T())) | widen_bits(narrow(v[1], T())) << 16;
    std::memcpy(p, &pairs, sizeof pairs);
  } else {
#pragma GCC unroll 2
    for (int i = 0; i < n; ++i) store(p + i * kLanes<T>, v[i]);
  }
}
// The channel that a lane of these vectors has, `width` channels in all.
template <typename T>
int64_t channel_of(int64_t lane, int64_t width) {
  return std::is_same_v<T, bfloat16> && width > kLanes<T> ? lane % kLanes<T> * 2 + lane / kLanes<T> : lane;
}

template <typename T>
constexpr bool kInPlace = std::is_same_v<T, Accumulate<T>> || std::is_same_v<T, bfloat16>;

// Whether vectors of channels are read and written where they lie. bfloat16 is widened at each tap then, which takes
// longer than a copy where a pixel meets 25 elements of the kernel.
template <typename T>
bool worth_in_place(const Source<T> &source) {
  const int64_t kernel = source.h.kernel * source.w.kernel, phases = source.h.stride * source.w.stride;
  return source.nhwc && kInPlace<T> && (std::is_same_v<T, Accumulate<T>> || kernel / 12 <= phases);
}

// Adjacent channels, which are padded with zeros to `width`, one or two vectors. in_place: they are read and written
// where they lie; any number of vectors then.
template <typename T>
struct ChannelBlock {
  using A = Accumulate<T>;
  static constexpr int64_t kWidth = 2 * kLanes<T>;
  int64_t first, channels, width;
  bool in_place;

  static ChannelBlock of(int64_t index, int64_t all, bool in_place) {
    const int64_t first = index * kWidth, n = all - first < kWidth ? all - first : kWidth;
    const int64_t width = n > kLanes<T> ? kWidth : kLanes<T>;
    return {first, n, width, in_place && n == width};
  }
  // The leading blocks of the range that are read where they lie, as one; or its first block.
  static ChannelBlock of(Range blocks, int64_t all, bool in_place) {
    ChannelBlock block = of(blocks.begin, all, in_place);
    for (int64_t i = blocks.begin + 1; block.in_place && i < blocks.end && of(i, all, in_place).in_place; ++i)
      block.channels = block.width += of(i, all, in_place).width;
    return block;
  }

  // to (n, width) = n elements of each channel: of planes that are `stride` apart, or of pixels.
  [[gnu::noinline, gnu::noclone]] void read(const T *from, bool nhwc, int64_t stride, int64_t n, A *to) const {
    if (nhwc)
      return each_pixel(n, [=, *this](int64_t i, int64_t c, auto part) {
        if (c == 0) __builtin_prefetch(from + (i + 8) * stride);
        aot::store(to + i * width + c, load(from + i * stride + c, part));
      });
    each_square(n, [=, *this](int64_t c, int64_t at, int64_t size, auto part) {
      Vec<T> v[kLanes<T>];
      for (int64_t l = 0; l < kLanes<T>; ++l)
        v[l] = c + l < channels ? load(from + (c + l) * stride + at, part) : Vec<T>{};
      transpose<kLanes<T> / 2>(v);
      for (int64_t l = 0; l < size; ++l) aot::store(to + (at + l) * width + c, v[l]);
    });
  }
  // to (n, width) = what the block's vectors meet of (channels, n).
  void read_weight(const T *from, int64_t n, A *to) const {
    if (!in_place || channel_of<T>(1, width) == 1) return read(from, false, n, n, to);
    ChannelBlock half = *this;
    half.channels = kLanes<T>;
    half.read(from, false, 2 * n, n, to);
    half.read(from + n, false, 2 * n, n, to + kLanes<T>);
  }
  // The reverse of read.
  [[gnu::noinline, gnu::noclone]] void write(const A *from, int64_t n, T *to, bool nhwc, int64_t stride) const {
    if (nhwc)
      return each_pixel(n, [=, *this](int64_t i, int64_t c, auto part) {
        aot::store(to + i * stride + c, load(from + i * width + c), part);
      });
    each_square(n, [=, *this](int64_t c, int64_t at, int64_t size, auto part) {
      Vec<T> v[kLanes<T>];
      for (int64_t l = 0; l < kLanes<T>; ++l) v[l] = l < size ? load(from + (at + l) * width + c) : Vec<T>{};
      transpose<kLanes<T> / 2>(v);
      for (int64_t l = 0; l < kLanes<T> && c + l < channels; ++l) aot::store(to + (c + l) * stride + at, v[l], part);
    });
  }

 private:
  // f(pixel, channel, part) for each vector of channels of n pixels.
  template <class F>
  void each_pixel(int64_t n, F f) const {
    for (int64_t i = 0; i < n; ++i)
      for (int64_t c = 0; c < channels; c += kLanes<T>)
        channels - c >= kLanes<T> ? f(i, c, Full()) : f(i, c, Part{channels - c});
  }
  // f(channel, element, size, part) for each vector of channels, and of elements, `size` of which exist.
  template <class F>
  void each_square(int64_t n, F f) const {
    for (int64_t c = 0; c < channels; c += kLanes<T>) {
      int64_t at = 0;
      for (; at + kLanes<T> <= n; at += kLanes<T>) f(c, at, kLanes<T>, Full());
      if (at < n) f(c, at, n - at, Part{n - at});
    }
  }
};

// The bands that an image is divided into: `lines` lines of each phase of the result, and the rows that they meet.
struct PixelBands {
  static constexpr int64_t kWidth = ChannelBlock<float>::kWidth;
  static constexpr int64_t kCache = 1 << 17, kMost = 1 << 22;  // elements: of a cache; that a thread may need
  Axis h;
  int64_t source_line, result_line;
  int64_t low = 0, high = 0, source_step = 1, step = 1, all = 0, lines = 0, count = 0;

  PixelBands(const Axis &h, const Axis &w) : h(h), source_line(w.source), result_line(w.result) {
    bool any = false;
    each_phase(h, [&](const Phase &phase) {
      source_step = phase.source_step(), step = phase.step();
      phase.each_tap([&](int64_t, int64_t at) {
        low = any && low < at ? low : at, high = any && high > at ? high : at, any = true;
      });
    });
    all = ceil_div(h.result, step);
    const int64_t halo = high - low, least = ceil_div(halo, source_step) + 1;
    const int64_t fit = (kCache / kWidth - halo * source_line) / (source_step * source_line + step * result_line + 1);
    divide(fit > least ? fit : least);
  }
  void divide(int64_t most) {
    lines = most < all ? most : all;
    count = ceil_div(all, lines > 0 ? lines : 1);
  }
  Range of(int64_t band) const { return Range{band * lines, band * lines + lines}.in({0, all}); }
  Range source_rows(Range lines) const {
    const Range rows{lines.begin * source_step + low, (lines.end - 1) * source_step + high + 1};
    const Range some = rows.in({0, h.source});
    return some.begin < some.end ? some : Range{0, 0};
  }
  Range result_rows(Range lines) const { return Range{lines.begin * step, lines.end * step}.in({0, h.result}); }

  // Elements that a thread needs of the source, and of the result.
  int64_t source_size() const {
    const int64_t rows = (lines - 1) * source_step + high - low + 1;
    return (rows < h.source ? rows : h.source) * source_line * kWidth;
  }
  int64_t result_size() const { return (lines * step < h.result ? lines * step : h.result) * result_line * kWidth; }
  bool fits() const { return double(source_size()) + double(result_size()) <= kMost; }
};

// ------------------------------------------------------------------------------------------------------------ y, dx

// Vectors of channels, one or two at a time. source: of their pixels, `source.all` apart, as those of the result.
template <typename S>
struct PixelLines {
  using A = Accumulate<S>;
  static constexpr int kPixels = Block<A>::k32Registers ? 7 : 4;
  Source<S> source;
  PhaseTaps h, w;
  int64_t width;           // all channels
  const A *weight, *bias;  // weight: (blocks of channels, elements of the kernel, channels of a block)
  int64_t begin, stride;   // from one position to the next in a line of the result, after `begin`

  // A line of the result from a line of positions.
  void compute(int64_t y, S *result) const {
    const Range rows = h.taps_of(y), inner = w.positions_of_all(0, w.count);
    for (int64_t x = 0; x < w.positions; x += kPixels) {
      S *const to = result + (begin + x * stride) * source.all;
      const bool all = inner.begin <= x && x + kPixels <= inner.end;
      int64_t c = 0;
      for (; c + kLanes<A> < width; c += 2 * kLanes<A>)
        all ? add_taps<true, 2>(y, x, c, rows, to + c) : add_taps<false, 2>(y, x, c, rows, to + c);
      if (c < width) all ? add_taps<true, 1>(y, x, c, rows, to + c) : add_taps<false, 1>(y, x, c, rows, to + c);
    }
  }

 private:
  // kInner: all pixels exist, and all taps are within the source.
  template <bool kInner, int kVectors>
  [[gnu::noinline]] void add_taps(int64_t y, int64_t x, int64_t c, Range rows, S *result) const {
    constexpr int64_t kWidth = kVectors * kLanes<A>;
    VecOf<A> sum[kPixels][kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const VecOf<A> first = bias ? load(bias + c + v * kLanes<A>) : VecOf<A>{};
#pragma GCC unroll 8
      for (int p = 0; p < kPixels; ++p) sum[p][v] = first;
    }
    const int64_t pixel = w.step * source.all, line = source.w.source * source.all;
    const S *const from = source.data + y * h.step * line + x * pixel + c;
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const S *const row = from + h.taps[r].at * line;
      const A *const weights = weight + c * source.h.kernel * source.w.kernel + h.taps[r].k * source.w.kernel * kWidth;
      for (const Tap *tap = w.taps, *end = tap + w.count; tap < end; ++tap) {
        VecOf<A> right[kVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) right[v] = load(weights + tap->k * kWidth + v * kLanes<A>);
        const S *const at = row + tap->at * source.all;
        const Range valid{tap->positions.begin - x, tap->positions.end - x};
#pragma GCC unroll 8
        for (int p = 0; p < kPixels; ++p)
          if (kInner || valid.has(p))
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) sum[p][v] += load_channels<kVectors>(at + p * pixel, v) * right[v];
      }
    }
#pragma GCC unroll 8
    for (int p = 0; p < kPixels; ++p)
      if (kInner || x + p < w.positions) store_channels(result + p * stride * source.all, sum[p]);
  }
};

// Where a row of a block of channels begins in an image; and from one pixel to the next, or from a plane to the next.
inline int64_t block_row(bool nhwc, int64_t image, const Axis &h, int64_t line, int64_t all, int64_t first, int64_t row,
                         bool of_result) {
  const int64_t rows = of_result ? h.result : h.source;
  return nhwc ? (image * rows + row) * line * all + first : ((image * all + first) * rows + row) * line;
}

// result = each channel of the source convolved with its kernel.
template <typename T>
Status convolve_depthwise(const char *op, const Source<T> &source, PixelBands bands, const T *weight, const T *bias,
                          T *result) {
  using A = Accumulate<T>;
  using Block = ChannelBlock<T>;
  const int64_t kernel = source.h.kernel * source.w.kernel, all = source.all, blocks = ceil_div(all, Block::kWidth);
  const int64_t line = source.w.source, result_line = source.w.result;
  const bool nhwc = source.nhwc, in_place = worth_in_place(source);
  // In place, lines are divided before blocks are, which lie beside each other: a few pixels of all at a time.
  const int64_t whole = source.batch * (in_place ? 1 : blocks), enough = (in_place ? 4 : 2) * threads();
  while (threads() > 1 && whole * bands.count < enough && bands.lines > 8) bands.divide(ceil_div(bands.lines, 2));
  int64_t run = in_place ? source.batch * bands.count * blocks / enough : 1;
  run = run < 1 ? 1 : run < blocks ? run : blocks;
  const int64_t runs = ceil_div(blocks, run);
  const Buffer<A> weights(blocks * kernel * Block::kWidth), biases(blocks * Block::kWidth);
  if (!(weights && biases)) return out_of_memory(op);
  for (int64_t b = 0; b < blocks; ++b) {
    const Block block = Block::of(b, all, in_place);
    block.read_weight(weight + block.first * kernel, kernel, weights + block.first * kernel);
    if (bias) block.read_weight(bias + block.first, 1, biases + block.first);
  }
  const int64_t in_size = bands.source_size(), size = in_size + bands.result_size();
  auto compute = [&, op](int64_t index) -> Status {
    const int64_t image = index / runs / bands.count;
    const Range lines = bands.of(index / runs % bands.count), from = bands.source_rows(lines);
    const Range to = bands.result_rows(lines);
    const int64_t taps_size = (source.h.kernel + source.w.kernel) * sizeof(Tap);
    A *const in = static_cast<A *>(thread_scratch(size * sizeof(A) + taps_size));
    if (!in) return out_of_memory(op);
    Tap *const taps = reinterpret_cast<Tap *>(in + size);
    // from the row from.begin to the row to.begin on
    auto convolve = [&](const Block &block, auto *data, auto *out, int64_t pixel) {
      using S = std::remove_pointer_t<decltype(out)>;
      const Source<S> pixels{true, source.h, source.w, 1, 1, pixel, data - from.begin * line * pixel};
      // a few lines of all phases before the next: their pixels are in the first-level cache
      const int64_t few = bands.step > 1 ? 4 : bands.lines;
      for (Range some = lines; some.begin < some.end; some.begin += few)
        each_phase(source.h, [&](const Phase &i) {
          each_phase(source.w, [&](const Phase &j) {
            const PhaseTaps h = PhaseTaps::of(i, taps), w = PhaseTaps::of(j, taps + h.count);
            const PixelLines<S> of{
                pixels,  h,       w, block.width, weights + block.first * kernel, bias ? biases + block.first : nullptr,
                j.first, j.step()};
            for (int64_t l = some.begin; l < some.end && l < some.begin + few && l < h.positions; ++l)
              of.compute(l, out + (i.first + l * i.step() - to.begin) * result_line * pixel);
          });
        });
    };
    const int64_t first = index % runs * run;
    for (Range left = Range{first, first + run}.in({0, blocks}); left.begin < left.end;) {
      const Block block = Block::of(left, all, in_place);
      left.begin += ceil_div(block.channels, Block::kWidth);
      const T *const x = source.data + block_row(nhwc, image, source.h, line, all, block.first, from.begin, false);
      T *const y = result + block_row(nhwc, image, source.h, result_line, all, block.first, to.begin, true);
      if constexpr (kInPlace<T>)
        if (block.in_place) {
          convolve(block, x, y, all);
          continue;
        }
      block.read(x, nhwc, nhwc ? all : source.h.source * line, (from.end - from.begin) * line, in);
      convolve(block, in, in + in_size, block.width);
      block.write(in + in_size, (to.end - to.begin) * result_line, y, nhwc, nhwc ? all : source.h.result * result_line);
    }
    return kOk;
  };
  const int64_t tasks = source.batch * runs * bands.count;
  const int64_t piece = ceil_div(kGrain, bands.result_size() * kernel * run + 1);
  return try_parallel(ceil_div(tasks, piece), [&](int64_t index) -> Status {
    for (int64_t i = index * piece; i < tasks && i < (index + 1) * piece; ++i) AOT_TRY(compute(i));
    return kOk;
  });
}

// ---------------------------------------------------------------------------------------------------------- dweight

// The sums of the products of x and dy of one or two vectors of channels.
template <typename S>
struct PixelSums {
  using A = Accumulate<S>;
  Source<S> source;  // pixels are source.all apart, those of dy too
  PhaseTaps h, w;
  const S *dy;
  A *sums;                             // (taps, width)
  double *to;                          // (channels, taps): the sums of all images
  int64_t width, channels, terms = 0;  // terms: of `sums` so far

  void clear() const {
    std::memset(to, 0, channels * h.count * w.count * sizeof *to);
    std::memset(sums, 0, h.count * w.count * width * sizeof *sums);
  }
  // Adds some lines of an image.
  [[gnu::noinline]] void add(Range lines) {
    // A sum has at most about so many terms before it is added in double. What half of them meet fits the first-level
    // cache.
    constexpr int64_t kMostTerms = 256;
    const int64_t band = kMostTerms / 2 / (w.positions + 1) + 1;
    for (int64_t y = lines.begin; y < lines.end; y += band) {
      add_lines(lines.in({y, y + band}));
      if ((terms += band * w.positions) >= kMostTerms) flush();
    }
  }
  [[gnu::noinline]] void flush() {
    const int64_t taps = h.count * w.count;
    for (int64_t lane = 0; lane < channels; ++lane)
      for (int64_t t = 0, c = channel_of<S>(lane, width); t < taps; ++t) to[c * taps + t] += sums[t * width + lane];
    std::memset(sums, 0, taps * width * sizeof *sums);
    terms = 0;
  }

 private:
  void add_lines(Range lines) const {
    for (int64_t r = 0; r < h.count; ++r) {
      const Range here = lines.in(h.taps[r].positions);
      for (int64_t s = 0; s < w.count && here.begin < here.end;) {
        const int64_t left = w.count - s, n = left == 3 || left > 4 ? 3 : left > 1 ? 2 : 1;
        width > kLanes<A> ? add_products<2>(here, r, s, n) : add_products<1>(here, r, s, n);
        s += n;
      }
    }
  }

  template <int kVectors>
  void add_products(Range lines, int64_t r, int64_t s, int64_t n) const {
    if (n == 3) add_products<kVectors, 3>(lines, r, s);
    else if (n == 2) add_products<kVectors, 2>(lines, r, s);
    else add_products<kVectors, 1>(lines, r, s);
  }
  template <int kVectors, int kTaps>
  [[gnu::noinline]] void add_products(Range lines, int64_t r, int64_t s) const {
    VecOf<A> sum[kTaps][kVectors];
    Range valid[kTaps];
    const S *at[kTaps];
    A *const to = sums + (r * w.count + s) * width;
    const Range inner = w.positions_of_all(s, s + kTaps);
    const int64_t line = source.w.source * source.all, pixel = w.step * source.all;
#pragma GCC unroll 3
    for (int k = 0; k < kTaps; ++k) {
      const Tap tap = w.taps[s + k];
      at[k] = source.data + h.taps[r].at * line + tap.at * source.all;
      valid[k] = tap.positions;
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[k][v] = load(to + k * width + v * kLanes<A>);
    }
    for (int64_t y = lines.begin; y < lines.end; ++y) {
      const S *const d = dy + y * w.positions * source.all;
      auto add = [&](int64_t x, bool all) AOT_INLINED {
        const int64_t offset = y * h.step * line + x * pixel;
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          const VecOf<A> right = load_channels<kVectors>(d + x * source.all, v);
#pragma GCC unroll 3
          for (int k = 0; k < kTaps; ++k)
            if (all || valid[k].has(x)) sum[k][v] += load_channels<kVectors>(at[k] + offset, v) * right;
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
      for (int v = 0; v < kVectors; ++v) store(to + k * width + v * kLanes<A>, sum[k][v]);
  }
};

// dweight (channels, taps) of a convolution of each channel with its kernel.
template <typename T>
Status sum_depthwise(const char *op, const Source<T> &source, const PixelBands &bands, const T *dy, T *dweight) {
  using A = Accumulate<T>;
  using Block = ChannelBlock<T>;
  const int64_t taps = source.depth(), all = source.all, blocks = ceil_div(all, Block::kWidth);
  const int64_t slices = image_slices(source.batch, blocks), line = source.w.source, dy_line = source.w.result;
  const bool nhwc = source.nhwc, in_place = worth_in_place(source);
  const Buffer<Tap> rows(source.h.kernel), columns(source.w.kernel);
  const Buffer<double> sums(slices * all * taps);
  if (!(rows && columns && sums)) return out_of_memory(op);
  const PhaseTaps h = PhaseTaps::of({source.h, 0}, rows), w = PhaseTaps::of({source.w, 0}, columns);
  const int64_t x_size = bands.source_size(), size = x_size + bands.result_size();
  AOT_TRY(try_parallel(slices * blocks, [&](int64_t index) -> Status {
    const int64_t slice = index / blocks, end = (slice + 1) * source.batch / slices;
    const Block block = Block::of(index % blocks, all, in_place);
    A *const in = static_cast<A *>(thread_scratch((size + taps * Block::kWidth) * sizeof(A)));
    if (!in) return out_of_memory(op);
    // place(x, dy, rows of x, lines, at): at = where the first pixels of a band are
    auto add = [&](auto zero, int64_t pixel, auto place) {
      using S = decltype(zero);
      PixelSums<S> of{{true, source.h, source.w, 1, 1, pixel, nullptr},
                      h,
                      w,
                      nullptr,
                      in + size,
                      sums + (slice * all + block.first) * taps,
                      block.width,
                      block.channels};
      of.clear();
      for (int64_t image = slice * source.batch / slices; image < end; ++image)
        for (int64_t band = 0; band < bands.count; ++band) {
          const Range lines = bands.of(band), from = bands.source_rows(lines);
          const T *x = source.data + block_row(nhwc, image, source.h, line, all, block.first, from.begin, false);
          const T *d = dy + block_row(nhwc, image, source.h, dy_line, all, block.first, lines.begin, true);
          const S *at[2];
          place(x, d, from.end - from.begin, lines.end - lines.begin, at);
          of.source.data = at[0] - from.begin * line * pixel, of.dy = at[1] - lines.begin * dy_line * pixel;
          of.add(lines);
        }
      of.flush();
    };
    if constexpr (kInPlace<T>)
      if (block.in_place) {
        add(T(), all, [](const T *x, const T *d, int64_t, int64_t, const T **at) { at[0] = x, at[1] = d; });
        return kOk;
      }
    add(A(), block.width, [&](const T *x, const T *d, int64_t rows, int64_t dy_rows, const A **at) {
      block.read(x, nhwc, nhwc ? all : source.h.source * line, rows * line, in);
      block.read(d, nhwc, nhwc ? all : source.h.result * dy_line, dy_rows * dy_line, in + x_size);
      at[0] = in, at[1] = in + x_size;
    });
    return kOk;
  }));
  return add_slices(sums, slices, all * taps, dweight), kOk;
}

}  // namespace AOT_ISA
}  // namespace aot
