// Convolutions with few output channels in a group, on the CPU. As a product of matrices they would leave most lanes of
// a vector unused. Here a vector holds adjacent positions of a line of the result instead, and meets one element of the
// weight at a time. A thread copies the channels of a band of an image with zeros around it, as planes, where columns
// that are `stride` apart are adjacent: each term of adjacent positions is contiguous, in either layout.
#pragma once
#include "conv2d_source_cpu.h"

namespace aot {
inline namespace AOT_ISA {

// ----------------------------------------------------------------------------------------------------------- planes

template <typename T>
struct Planes {
  using A = Accumulate<T>;
  Source<T> source;
  Margin h, w;
  int64_t rows = 0;  // of a band

  explicit Planes(const Source<T> &source) : source(source), h(source.h), w(source.w) {}

  int64_t row_step() const { return source.h.transposed ? 1 : source.h.stride; }
  int64_t step() const { return source.w.transposed ? 1 : source.w.stride; }
  int64_t height() const { return h.before + source.h.source + h.after; }
  int64_t width() const { return w.before + source.w.source + w.after; }
  int64_t part() const { return ceil_div(width(), step()); }
  // Vectors reach beyond the end of a row.
  int64_t pitch() const { return step() * part() + kLanes<T>; }
  int64_t plane() const { return rows * pitch(); }
  int64_t size(int64_t channels) const { return channels * plane() + kLanes<T>; }

  // Rows that `lines` lines of each phase meet.
  int64_t rows_of(int64_t lines) const {
    int64_t last = -h.before;
    each_phase(source.h,
               [&](const Phase &phase) { phase.each_tap([&](int64_t, int64_t at) { last = at > last ? at : last; }); });
    const int64_t n = (lines - 1) * row_step() + h.before + last + 1;
    return n < height() ? n : height();
  }

  // The offset of each term from its position, in the order of Weight::list_terms.
  void list_terms(const Phase &i, const Phase &j, int64_t *to) const {
    const int64_t outer = source.nhwc ? 1 : source.channels, inner = source.nhwc ? source.channels : 1;
    for (int64_t a = 0; a < outer; ++a)
      i.each_tap([&](int64_t, int64_t y) {
        j.each_tap([&](int64_t, int64_t x) {
          const int64_t column = (x + w.before) % step() * part() + (x + w.before) / step();
          for (int64_t b = 0; b < inner; ++b) *to++ = (a + b) * plane() + (y + h.before) * pitch() + column;
        });
      });
  }

  // Copies `rows` rows, or as many as there are, from `row` on, of n channels of an image.
  void copy(int64_t image, int64_t channel, int64_t n, int64_t row, A *to) const {
    const int64_t end = row + rows < height() ? rows : height() - row;
    for (int64_t r = 0; r < end; ++r) {
      const int64_t y = row + r - h.before;
      if (y < 0 || y >= source.h.source) {
        for (int64_t c = 0; c < n; ++c) clear(to + c * plane() + r * pitch(), step() * part());
      } else if (source.nhwc) {
        const T *from = source.data + ((image * source.h.source + y) * source.w.source) * source.all + channel;
        copy_pixels(from, n, to + r * pitch());
      } else {
        for (int64_t c = 0; c < n; ++c)
          copy_line(source.data + ((image * source.all + channel + c) * source.h.source + y) * source.w.source,
                    to + c * plane() + r * pitch());
      }
    }
  }

 private:
  // At least n elements: whole vectors.
  static void clear(A *to, int64_t n) {
    for (int64_t i = 0; i < n; i += kLanes<T>) store(to + i, Vec<A>{});
  }
  void clear_margins(A *to) const {
    if (step() > 1) return clear(to, step() * part());
    clear(to, w.before);
    clear(to + w.before + source.w.source, w.after);
  }

  void copy_line(const T *from, A *to) const {
    const int64_t n = source.w.source;
    if (step() == 1) {
      clear(to, w.before);
      A *const line = to + w.before;
      for (int64_t j = 0; j + kLanes<T> <= n; j += kLanes<T>) store(line + j, load(from + j));
      if (const int64_t left = n % kLanes<T>; left && n > left) store(line + n - kLanes<T>, load(from + n - kLanes<T>));
      else if (left) store(line, load(from, Part{left}));
      return clear(line + n, w.after);
    }
    clear(to, step() * part());
    for (int64_t first = 0; first < step() && first < n; ++first) {
      const int64_t at = first + w.before, count = ceil_div(n - first, step());
      A *const line = to + at % step() * part() + at / step();
      if constexpr (std::is_same_v<T, A>) {
        if (step() == 2)
          for (int64_t j = 0; j < count; ++j) line[j] = from[first + 2 * j];
        else
          for (int64_t j = 0; j < count; ++j) line[j] = from[first + step() * j];
      } else {
        for (int64_t j = 0; j < count; ++j) line[j] = load_one(from + first + step() * j);
      }
    }
  }

  void copy_pixels(const T *from, int64_t n, A *to) const {
    constexpr int64_t lanes = kLanes<T>;
    const int64_t pixels = source.w.source;
    for (int64_t c = 0; c < n; ++c) clear_margins(to + c * plane());
    auto place = [this](int64_t x) { return (x + w.before) % step() * part() + (x + w.before) / step(); };
    if (step() > 1 || n < lanes || pixels < lanes) {
      for (int64_t x = 0; x < pixels; ++x)
        for (int64_t c = 0, at = place(x); c < n; ++c) to[c * plane() + at] = load_one(from + x * source.all + c);
      return;
    }
    // the last vectors of channels and of pixels may overlap others
    for (int64_t i = 0; i < n; i += lanes) {
      const int64_t c = i + lanes <= n ? i : n - lanes;
      for (int64_t j = 0; j < pixels; j += lanes) {
        const int64_t x = j + lanes <= pixels ? j : pixels - lanes;
        Vec<T> v[lanes];
        for (int64_t l = 0; l < lanes; ++l) v[l] = load(from + (x + l) * source.all + c);
        transpose<lanes / 2>(v);
        for (int64_t l = 0; l < lanes; ++l) store(to + (c + l) * plane() + w.before + x, v[l]);
      }
    }
  }
};

// How groups and lines are divided: a thread copies `chunk` groups of `lines` lines of each phase.
struct Bands {
  static constexpr int64_t kCache = 1 << 16, kMost = 1 << 22;  // elements: of a cache; that a thread may need
  int64_t chunk, lines, count;

  // channels: of a group, in all copies. Pixels should be read by whole cache lines.
  template <typename T>
  static Bands of(const Planes<T> &planes, int64_t groups, int64_t channels, int64_t lines) {
    const int64_t line = channels * planes.pitch(), image = line * planes.rows_of(lines > 0 ? lines : 1);
    const int64_t least = planes.source.nhwc ? ceil_div(16, planes.source.channels + (planes.source.channels == 0)) : 1;
    int64_t chunk = (1 << 13) / (image + 1);
    chunk = chunk < least ? least : chunk;
    chunk = chunk < groups ? chunk : groups;
    const int64_t halo = planes.rows_of(1), fit = kCache / (chunk * line + 1) - halo;
    int64_t band = fit / planes.row_step() + 1, shortest = ceil_div(halo, planes.row_step());
    band = band < shortest ? shortest : band;
    band = band < lines ? band : lines;
    band = band < 1 ? 1 : band;
    return {chunk, band, ceil_div(lines, band)};
  }
  // Shorter bands, if there are too few of them for all threads.
  void divide(int64_t others, int64_t all_lines) {
    while (others * count < 2 * threads() && lines > 8) lines = ceil_div(lines, 2), count = ceil_div(all_lines, lines);
  }
  template <typename T>
  bool fits(const Planes<T> &planes, int64_t channels) const {
    return double(chunk) * channels * planes.rows_of(lines) * planes.pitch() <= kMost;
  }
};

// Output channels that are computed together: groups of at most 4, of one size. The registers hold the sums of kVectors
// vectors of positions of each.
struct OutputBlocks {
  int64_t count, size;

  static OutputBlocks of(int64_t out_channels) {
    const int64_t count = ceil_div(out_channels, 4);
    return {count, ceil_div(out_channels, count)};
  }
};

// Whether vectors of positions have fewer idle lanes than vectors of output channels.
template <typename T>
bool worth_lines(int64_t out_channels, int64_t length) {
  constexpr int64_t kCols = Block<Accumulate<T>>::kCols;
  return out_channels > 0 && 2 * out_channels <= kCols &&
         out_channels * ceil_div(length, kLanes<T>) * kLanes<T> <= length * kCols;
}

// ------------------------------------------------------------------------------------------------------------ y, dx

// kRows output channels of kVectors vectors of positions. f(row, vector, sums).
template <typename A, int kRows, int kVectors, class F>
AOT_INLINE void line_kernel(int64_t depth, const A *weight, const int64_t *terms, const A *const (&at)[kVectors], F f) {
  auto add_terms = [&](int64_t begin, int64_t end, VecOf<A>(&sum)[kRows][kVectors]) {
    for (int64_t t = begin; t < end; ++t) {
      VecOf<A> w[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) w[r] = weight[t * kRows + r] - VecOf<A>{};
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const VecOf<A> x = load(at[v] + terms[t]);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sum[r][v] += x * w[r];
      }
    }
  };
  // partial sums, so that rounding errors grow more slowly
  constexpr int64_t kTerms = Block<A>::kDepth;
  VecOf<A> sum[kRows][kVectors] = {};
  add_terms(0, depth < kTerms ? depth : kTerms, sum);
  for (int64_t t = kTerms; t < depth; t += kTerms) {
    VecOf<A> more[kRows][kVectors] = {};
    add_terms(t, depth < t + kTerms ? depth : t + kTerms, more);
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v) sum[r][v] += more[r][v];
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) f(r, v, sum[r][v]);
}

template <int kRows>
constexpr int kLineVectors = kRows == 1   ? 8
                             : kRows == 2 ? 6
                             : kRows == 3 ? 4
                                          : 3;

// The lines of a phase in the band of a group: result is at the first output channel of the group.
template <typename T>
struct PhaseLines {
  using A = Accumulate<T>;
  Phase i, j;
  int64_t begin, end;  // lines
  int64_t pitch;       // from one line to the next in data
  const A *data;
  int64_t depth, out_channels;
  const A *weight;  // packed: (blocks, depth, kRows)
  const int64_t *terms;
  const T *bias;
  T *result;
  int64_t pixel, channel;  // strides of the result

  template <int kRows>
  [[gnu::noinline]] void compute() const {
    constexpr int kVectors = kLineVectors<kRows>;
    constexpr int64_t lanes = kLanes<T>;
    const int64_t length = j.count(), valid = length < lanes ? length : lanes, lane = j.step() * pixel;
    int64_t y = begin, start = 0;
    const A *at[kVectors];
    int64_t to[kVectors];
    while (y < end) {
      for (int v = 0; v < kVectors; ++v) {  // after the last line the last vector again
        const int64_t from = start + lanes <= length ? start : length - valid;
        at[v] = data + (y - begin) * pitch + from;
        to[v] = ((i.first + y * i.step()) * j.axis.result + j.first + from * j.step()) * pixel;
        if (start + lanes < length) start += lanes;
        else if (y + 1 < end || v + 1 == kVectors) ++y, start = 0;
      }
      for (int64_t o = 0; o < out_channels; o += kRows) {
        const int64_t rows = out_channels - o < kRows ? out_channels - o : kRows;
        line_kernel<A, kRows, kVectors>(depth, weight + o * depth, terms, at, [&](int r, int v, VecOf<A> sum) {
          if (r >= rows) return;
          T *const place = result + (o + r) * channel + to[v];
          if (bias) sum += load_one(bias + o + r);
          if (lane != 1) return store_lanes(place, lane, valid, sum);
          valid == lanes ? store(place, sum) : store(place, sum, Part{valid});
        });
      }
    }
  }

 private:
  static void store_lanes(T *to, int64_t stride, int64_t n, Vec<T> sum) {
    T narrowed[kLanes<T>];
    store(narrowed, sum);
    for (int64_t l = 0; l < n; ++l) to[l * stride] = narrowed[l];
  }
};

// result = the source convolved with a weight, for few out_channels.
template <typename T>
Status convolve_lines(const char *op, const Source<T> &source, const T *weight, const T *bias, int64_t groups,
                      int64_t out_channels, Planes<T> planes, Bands bands, T *result) {
  using A = Accumulate<T>;
  const OutputBlocks blocks = OutputBlocks::of(out_channels);
  const int64_t padded_outs = blocks.count * blocks.size;
  const int64_t positions = source.positions(), all = groups * out_channels;
  const int64_t pixel = source.nhwc ? all : 1, channel = source.nhwc ? 1 : positions;
  planes.rows = planes.rows_of(bands.lines);
  auto each = [&source](auto f) {
    each_phase(source.h, [&](const Phase &i) {
      each_phase(source.w, [&](const Phase &j) { f(i, j, source.channels * i.taps() * j.taps()); });
    });
  };
  const Buffer<int64_t> all_terms(source.depth()), at(source.depth());
  const Buffer<A> all_packed(groups * padded_outs * source.depth());
  if (!(all_terms && at && all_packed)) return out_of_memory(op);
  int64_t *to = all_terms;
  A *packed_to = all_packed;
  each([&](const Phase &i, const Phase &j, int64_t depth) {
    planes.list_terms(i, j, to);
    Weight<T>::list_terms(source, i, j, out_channels, at);
    const auto w = Weight<T>::of(source, weight, out_channels, at);
    for (int64_t group = 0; group < groups; ++group)
      for (int64_t o = 0; o < padded_outs; o += blocks.size)
        for (int64_t t = 0; t < depth; ++t)
          for (int64_t r = o; r < o + blocks.size; ++r) *packed_to++ = r < out_channels ? w.element(group, r, t) : 0;
    to += depth;
  });

  const int64_t chunks = ceil_div(groups, bands.chunk), tasks = source.batch * chunks * bands.count;
  auto compute = [&](int64_t index) -> Status {
    const int64_t band = index % bands.count, rest = index / bands.count;
    const int64_t image = rest / chunks, group = rest % chunks * bands.chunk;
    const int64_t n = groups - group < bands.chunk ? groups - group : bands.chunk, line = band * bands.lines;
    A *const data = static_cast<A *>(thread_scratch(planes.size(n * source.channels) * sizeof(A)));
    if (!data) return out_of_memory(op);
    planes.copy(image, group * source.channels, n * source.channels, line * planes.row_step(), data);
    const int64_t *terms = all_terms;
    const A *packed = all_packed;
    each([&](const Phase &i, const Phase &j, int64_t depth) {
      const int64_t end = i.count() < line + bands.lines ? i.count() : line + bands.lines;
      for (int64_t g = group; g < group + n; ++g) {
        const PhaseLines<T> lines{i,
                                  j,
                                  line,
                                  end,
                                  planes.row_step() * planes.pitch(),
                                  data + (g - group) * source.channels * planes.plane(),
                                  depth,
                                  out_channels,
                                  packed + g * padded_outs * depth,
                                  terms,
                                  bias ? bias + g * out_channels : nullptr,
                                  result + image * positions * all + g * out_channels * channel,
                                  pixel,
                                  channel};
        switch (blocks.size) {
          case 1:
            lines.template compute<1>();
            break;
          case 2:
            lines.template compute<2>();
            break;
          case 3:
            lines.template compute<3>();
            break;
          default:
            lines.template compute<4>();
        }
      }
      terms += depth, packed += groups * padded_outs * depth;
    });
    return kOk;
  };
  return try_parallel(tasks, compute);
}

// ---------------------------------------------------------------------------------------------------------- dweight

// Sums of the products of kRows lines of dy with kTerms terms each, over `lines` lines of n positions.
template <typename A, int kRows, int kTerms>
[[gnu::noinline]] void line_products(int64_t lines, int64_t n, const A *const (&x)[kTerms], int64_t x_pitch,
                                     const A *const (&dy)[kRows], int64_t dy_pitch, A (&sums)[kRows][kTerms]) {
  constexpr int64_t lanes = kLanes<A>;
  VecOf<A> sum[kRows][kTerms] = {};
  auto add = [&](int64_t a, int64_t b, auto part) {
    VecOf<A> d[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) d[r] = keep<A>(load(dy[r] + b), part);
#pragma GCC unroll 9
    for (int t = 0; t < kTerms; ++t) {
      const VecOf<A> v = keep<A>(load(x[t] + a), part);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sum[r][t] += v * d[r];
    }
  };
  for (int64_t y = 0; y < lines; ++y) {
    int64_t j = 0;
    for (; j + lanes <= n; j += lanes) add(y * x_pitch + j, y * dy_pitch + j, Full());
    if (j < n) add(y * x_pitch + j, y * dy_pitch + j, Part{n - j});
  }
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < kTerms; ++t) sums[r][t] = aot::sum<A>(sum[r][t]);
}

// sums (groups, out_channels, depth) of a slice of images.
template <typename T>
struct LineSums {
  using A = Accumulate<T>;
  Planes<T> x, dy;
  int64_t out_channels, lines;  // lines: of a band
  const int64_t *terms;
  double *sums;

  // For n groups, whose planes are in memory, of `lines` lines.
  template <int kRows>
  void add(int64_t n, int64_t lines, const A *x_planes, const A *dy_planes, double *sums) const {
    constexpr int kTerms = kRows == 1 ? 9 : kRows == 2 ? 5 : 3;
    const int64_t depth = x.source.depth(), length = dy.source.w.source, pitch = x.row_step() * x.pitch();
    for (int64_t g = 0; g < n; ++g, x_planes += x.source.channels * x.plane(), dy_planes += out_channels * dy.plane())
      for (int64_t o = 0; o < out_channels; o += kRows)
        for (int64_t t = 0; t < depth; t += kTerms) {
          const A *from[kTerms], *other[kRows];
          for (int k = 0; k < kTerms; ++k) from[k] = x_planes + terms[t + k < depth ? t + k : depth - 1];
          for (int r = 0; r < kRows; ++r) other[r] = dy_planes + (o + r < out_channels ? o + r : o) * dy.plane();
          A found[kRows][kTerms];
          line_products<A, kRows, kTerms>(lines, length, from, pitch, other, dy.pitch(), found);
          for (int r = 0; r < kRows && o + r < out_channels; ++r)
            for (int k = 0; k < kTerms && t + k < depth; ++k)
              sums[(g * out_channels + o + r) * depth + t + k] += found[r][k];
        }
  }

  // n groups of the images [begin, end).
  bool add_images(int64_t begin, int64_t end, int64_t group, int64_t n) const {
    const int64_t channels = n * x.source.channels, outs = n * out_channels, of_x = x.size(channels);
    A *const data = static_cast<A *>(thread_scratch((of_x + dy.size(outs)) * sizeof(A)));
    if (!data) return false;
    double *const to = sums + group * out_channels * x.source.depth();
    std::memset(to, 0, outs * x.source.depth() * sizeof(double));
    for (int64_t image = begin; image < end; ++image)
      for (int64_t line = 0; line < dy.source.h.source; line += lines) {
        const int64_t left = dy.source.h.source - line, here = left < lines ? left : lines;
        x.copy(image, group * x.source.channels, channels, line * x.row_step(), data);
        dy.copy(image, group * out_channels, outs, line, data + of_x);
        switch (OutputBlocks::of(out_channels).size) {
          case 1:
            add<1>(n, here, data, data + of_x, to);
            break;
          case 2:
            add<2>(n, here, data, data + of_x, to);
            break;
          case 3:
            add<3>(n, here, data, data + of_x, to);
            break;
          default:
            add<4>(n, here, data, data + of_x, to);
        }
      }
    return true;
  }
};

// dweight[i] = the sum of `slices` partial sums.
template <typename T>
void add_slices(const double *sums, int64_t slices, int64_t n, T *dweight) {
  parallel_pieces(n, kGrain, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      double total = 0;
      for (int64_t slice = 0; slice < slices; ++slice) total += sums[slice * n + i];
      store_one(dweight + i, total);
    }
  });
}

// Slices of images, so that `tasks` of each are enough for any number of threads.
inline int64_t image_slices(int64_t batch, int64_t tasks) {
  const int64_t wanted = ceil_div(64, tasks > 0 ? tasks : 1);
  return batch < 1 ? 1 : batch < wanted ? batch : wanted;
}

template <typename T>
Status sum_lines(const char *op, const Source<T> &source, const T *dy, int64_t groups, int64_t out_channels,
                 Planes<T> planes, Bands bands, T *dweight) {
  const int64_t weights = groups * out_channels * source.depth(), chunks = ceil_div(groups, bands.chunk);
  const int64_t slices = image_slices(source.batch, chunks), length = source.w.result;
  const Buffer<int64_t> terms(source.depth());
  const Buffer<double> sums(slices * weights);
  if (!(terms && sums)) return out_of_memory(op);
  // a lane adds at most so many products before they are added in double
  constexpr int64_t kMostTerms = 256;
  const int64_t most = kMostTerms / ceil_div(length + 1, kLanes<T>) + 1;
  const int64_t lines = bands.lines < most ? bands.lines : most;
  const Axis h{source.h.result, source.h.result, 1, 1, 0, 1, false}, w{length, length, 1, 1, 0, 1, false};
  Planes<T> other(Source<T>{source.nhwc, h, w, source.batch, out_channels, groups * out_channels, dy});
  planes.rows = planes.rows_of(lines), other.rows = lines;
  planes.list_terms({source.h, 0}, {source.w, 0}, terms);
  AOT_TRY(try_parallel(slices * chunks, [&](int64_t index) -> Status {
    const int64_t slice = index / chunks, group = index % chunks * bands.chunk;
    const int64_t n = groups - group < bands.chunk ? groups - group : bands.chunk;
    const LineSums<T> of{planes, other, out_channels, lines, terms, sums + slice * weights};
    const bool done = of.add_images(slice * source.batch / slices, (slice + 1) * source.batch / slices, group, n);
    return done ? kOk : out_of_memory(op);
  }));
  return add_slices(sums, slices, weights, dweight), kOk;
}

}  // namespace AOT_ISA
}  // namespace aot
