#include "conv2d.h"

#include <cstdlib>

#include "conv/conv2d_pixels_cpu.h"
#include "conv/conv2d_tiles_cpu.h"
#include "cpu/entry.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// A convolution is the product of the weight with a matrix of columns, which hold the elements of x that each position
// of the result sums over. No column is made. With a kernel of 1 x 1 the matrix is x. Few output channels, and
// depthwise convolutions, have kernels of their own (conv/conv2d_*_cpu.h). Else an element's address is a sum of what
// its position and its place in the sum contribute, so that the product reads it where it lies, in a copy of x with
// zeros around each image. dx is divided into the phases of the stride: the positions of one meet the same elements of
// the kernel.
//
// Where the processor multiplies vectors of pairs of bfloat16, an element is a pair of adjacent channels; dweight,
// whose pairs are of adjacent positions, then has its columns made. Tile registers have a way of their own
// (conv/conv2d_tiles_cpu.h).

// The images of a source with zeros around each, in the type of the sums, or in pairs of adjacent channels.
template <typename T, bool kPairs = false>
struct Padded {
  using A = Accumulate<T>;
  static constexpr int64_t kEach = kPairs ? 2 : 1;  // channels of an element
  Source<T> source;
  Margin h, w;

  explicit Padded(const Source<T> &source) : source(source), h(source.h), w(source.w) {}

  int64_t height() const { return h.before + source.h.source + h.after; }
  int64_t width() const { return w.before + source.w.source + w.after; }
  int64_t channels() const { return source.channels / kEach; }  // of a group, in elements
  int64_t all() const { return source.all / kEach; }
  int64_t image() const { return height() * width() * all(); }
  // strides in an image
  int64_t channel() const { return source.nhwc ? 1 : height() * width(); }
  int64_t column() const { return source.nhwc ? all() : 1; }
  int64_t row() const { return width() * column(); }

  bool is_source() const {
    const bool elements = kPairs ? source.nhwc : std::is_same_v<T, A>;
    return elements && !(h.before || h.after || w.before || w.after);
  }

  // The images from `first` on: n of them, copied unless they may be read where they are.
  const A *images(int64_t first, int64_t n, A *copy) const {
    if constexpr (kPairs || std::is_same_v<T, A>)
      if (is_source()) return reinterpret_cast<const A *>(source.data) + first * image();
    // NHWC: an image is a plane of rows of pixels; NCHW: each of its channels is one of rows of elements
    const int64_t planes = source.nhwc ? n : n * all(), line = source.w.source * column();
    const T *from = source.data + first * source.all * source.h.source * source.w.source;
    parallel_pieces(planes * height(), ceil_div(kGrain, row() + 1), [=, *this](int64_t begin, int64_t end) {
      const int64_t before = w.before * column(), after = w.after * column();
      for (int64_t i = begin; i < end; ++i) {
        const int64_t plane = i / height(), y = i % height() - h.before;
        const bool outside = y < 0 || y >= source.h.source;
        const int64_t above = plane * source.h.source, inside = outside ? 0 : y;
        const T *at = from + (source.nhwc ? (above + inside) * kEach : above * kEach + inside) * line;
        A *to = copy + i * row();
        std::memset(to, 0, (outside ? row() : before) * sizeof(A));
        if (outside) continue;
        copy_line(at, line, to + before);
        std::memset(to + before + line, 0, after * sizeof(A));
      }
    });
    return copy;
  }

  // Images that are copied at a time: as many as a cache holds.
  int64_t at_a_time() const {
    const int64_t n = (1 << 19) / (image() + 1);
    return n < 1 ? 1 : n < source.batch ? n : source.batch;
  }

  // Where the positions of a phase are in n images.
  void list_positions(const Phase &i, const Phase &j, int64_t n, int64_t *to) const {
    for (int64_t at = 0; at < n; ++at)
      for (int64_t y = 0; y < i.count(); ++y)
        for (int64_t x = 0, columns = j.count(); x < columns; ++x)
          *to++ = at * image() + (y * i.source_step() + h.before) * row() + (x * j.source_step() + w.before) * column();
  }

  // The offset of each term of a sum from its position: (channels, taps) in NCHW, (taps, channels) in NHWC, as in a
  // weight.
  void list_terms(const Phase &i, const Phase &j, int64_t *to) const {
    const int64_t outer = source.nhwc ? 1 : channels(), inner = source.nhwc ? channels() : 1;
    for (int64_t a = 0; a < outer; ++a)
      i.each_tap([&](int64_t, int64_t y) {
        j.each_tap([&](int64_t, int64_t x) {
          for (int64_t b = 0; b < inner; ++b) *to++ = (a + b) * channel() + y * row() + x * column();
        });
      });
  }

 private:
  void copy_line(const T *from, int64_t n, A *to) const {
#if defined(__AVX512F__)
    if constexpr (kPairs) {
      const int64_t next = source.h.source * source.w.source;
      if (source.nhwc) std::memcpy(to, from, n * sizeof(A));
      else
        sweep<T>(
            n, [=](int64_t j, auto part) { aot::store(to + j, BFloat16Pairs::across(from + j, next, 2, part), part); });
      return;
    }
#endif
    sweep<T>(n, [=](int64_t j, auto part) { aot::store(to + j, load(from + j, part), part); });
  }
};

// Stores sums of positions by channels where the result has them.
template <typename T>
struct Scatter {
  using A = Accumulate<T>;
  static constexpr bool kStores = true;
  T *result;
  const int64_t *to;  // of each position
  int64_t channel;    // stride
  const T *bias;

  void store(int64_t row, int64_t column, int64_t rows, int64_t cols, const A *sums, int64_t stride) const {
    if (channel == 1) return store_rows(to + row, column, rows, cols, sums, stride);
    constexpr int64_t lanes = kLanes<T>;
    for (int64_t j = 0; j < cols; j += lanes)
      for (int64_t i = 0; i < rows; i += lanes)
        store_columns(to + row + i, column + j, rows - i < lanes ? rows - i : lanes,
                      cols - j < lanes ? cols - j : lanes, sums + i * stride + j, stride);
  }

 private:
  void store_rows(const int64_t *to, int64_t column, int64_t rows, int64_t cols, const A *sums, int64_t stride) const {
    for (int64_t i = 0; i < rows; ++i)
      sweep<T>(cols, [&](int64_t j, auto part) {
        const Vec<T> sum = load(sums + i * stride + j, part);
        aot::store(result + to[i] + column + j, bias ? sum + load(bias + column + j, part) : sum, part);
      });
  }
  // At most a vector's lanes of positions and of channels, which are transposed in registers.
  void store_columns(const int64_t *to, int64_t column, int64_t rows, int64_t cols, const A *sums,
                     int64_t stride) const {
    Vec<T> v[kLanes<T>];
    const bool whole = cols == kLanes<T>;
    for (int64_t i = 0; i < kLanes<T>; ++i)
      v[i] = i >= rows ? Vec<T>{} : whole ? load(sums + i * stride) : load(sums + i * stride, Part{cols});
    transpose<kLanes<T> / 2>(v);
    const bool contiguous = to[rows - 1] - to[0] == rows - 1;
    for (int64_t j = 0; j < cols; ++j) {
      T *at = result + (column + j) * channel;
      const Vec<T> sum = bias ? v[j] + load_one(bias + column + j) : v[j];
      if (contiguous && rows == kLanes<T>) aot::store(at + to[0], sum);
      else if (contiguous) aot::store(at + to[0], sum, Part{rows});
      else
        for (int64_t i = 0; i < rows; ++i) store_one(at + to[i], sum[i]);
    }
  }
};

// ------------------------------------------------------------------------------------------------------ y and dx

// Where the positions of a phase are in n images of a result.
void list_places(const Phase &i, const Phase &j, int64_t n, int64_t image, int64_t pixel, int64_t *to) {
  for (int64_t at = 0; at < n; ++at)
    for (int64_t y = i.first; y < i.axis.result; y += i.step())
      for (int64_t x = j.first; x < j.axis.result; x += j.step()) *to++ = at * image + (y * j.axis.result + x) * pixel;
}

// result = the source convolved with a weight of 1 x 1.
template <typename T>
Status convolve_pixels(const Source<T> &source, const T *weight, const T *bias, int64_t groups, int64_t out_channels,
                       T *result) {
  const int64_t depth = source.channels, positions = source.positions(), all = groups * out_channels;
  const bool turned = source.h.transposed;  // for dx: weight is (groups, depth, out_channels)
  const int64_t images = source.nhwc ? 1 : source.batch, pixels = source.nhwc ? source.batch * positions : positions;
  return gemm_batch(images * groups, [=, &source](int64_t index) {
    const int64_t group = index % groups, image = index / groups;
    const Matrix<T> w{weight + group * out_channels * depth, turned ? out_channels : depth, source.nhwc != turned};
    const T *add = bias ? bias + group * out_channels : nullptr;
    auto epilogue = [=, nhwc = source.nhwc](Vec<T> v, int64_t i, int64_t j, auto part) {
      return !add ? v : nhwc ? v + load(add + j, part) : v + load_one(add + i);
    };
    using Product = CpuGemm<T, T, decltype(epilogue)>;
    if (source.nhwc)
      return Product{
          pixels, out_channels, depth,   {source.data + group * depth, source.all}, w, result + group * out_channels,
          all,    false,        epilogue};
    return Product{out_channels,
                   pixels,
                   depth,
                   w,
                   {source.data + (image * source.all + group * depth) * pixels, pixels},
                   result + (image * all + group * out_channels) * pixels,
                   pixels,
                   false,
                   epilogue};
  });
}

// result = the source convolved with any weight. For dx weight is as it was given: (groups, channels of dy, ...).
template <typename T, bool kPairs = false>
Status convolve_gathered(const char *op, const Source<T> &source, const T *weight, const T *bias, int64_t groups,
                         int64_t out_channels, T *result) {
  using A = Accumulate<T>;
  using Left = std::conditional_t<kPairs, GatheredPairs, Gathered<A>>;
  const Padded<T, kPairs> padded(source);
  const int64_t images = padded.at_a_time(), positions = source.positions(), all = groups * out_channels;
  const int64_t pixel = source.nhwc ? all : 1, channel = source.nhwc ? 1 : positions;  // strides of the result
  int64_t packed_size = 0;
  auto each = [&](auto f) {  // phase, with its positions of an image and its depth
    each_phase(source.h, [&](const Phase &i) {
      each_phase(source.w,
                 [&](const Phase &j) { f(i, j, i.count() * j.count(), padded.channels() * i.taps() * j.taps()); });
    });
  };
  each([&](const Phase &, const Phase &, int64_t, int64_t depth) {
    packed_size += groups * PackedMatrix<A>::size(depth, out_channels);
  });
  const Buffer<A> copy(padded.is_source() ? 0 : images * padded.image()), all_packed(packed_size);
  const Buffer<int64_t> all_rows(images * positions), all_to(images * positions), all_terms(source.depth());
  const Buffer<int64_t> weight_terms(source.depth());
  if (!(copy && all_packed && all_rows && all_to && all_terms && weight_terms)) return out_of_memory(op);
  for (int64_t first = 0; first < source.batch; first += images) {
    const int64_t n = source.batch - first < images ? source.batch - first : images;
    const A *data = padded.images(first, n, copy);
    int64_t *rows = all_rows, *to = all_to, *terms = all_terms;
    A *packed = all_packed;
    Status status = kOk;
    each([&](const Phase &i, const Phase &j, int64_t m, int64_t depth) {
      if (first == 0) {
        padded.list_positions(i, j, images, rows);
        padded.list_terms(i, j, terms);
        list_places(i, j, images, positions * all, pixel, to);
        Weight<T>::list_terms(source, i, j, out_channels, weight_terms);
        const auto w = Weight<T>::of(source, weight, out_channels, weight_terms);
        const bool contiguous = !source.h.transposed;
        [[maybe_unused]] const int64_t taps = source.nhwc ? 0 : i.taps() * j.taps();
        if constexpr (kPairs) w.pack_pairs(groups, depth, out_channels, taps, contiguous && source.nhwc, packed);
        else w.pack(groups, depth, out_channels, contiguous, packed);
      }
      T *const y = result + first * positions * all;
      const int64_t size = PackedMatrix<A>::size(depth, out_channels);
      const Status failed = gemm_batch(groups, [=, &padded](int64_t group) {
        const Left x{data + group * padded.channels() * padded.channel(), rows, terms};
        const T *add = bias ? bias + group * out_channels : nullptr;
        const Scatter<T> scatter{y + group * out_channels * channel, to, channel, add};
        return CpuGemm<T, T, Scatter<T>, Left, PackedMatrix<A>>{
            n * m, out_channels, depth, x, {packed + group * size, depth}, y, 0, false, scatter};
      });
      if (failed) status = failed;
      rows += images * m, to += images * m, terms += depth, packed += groups * size;
    });
    AOT_TRY(status);
  }
  return kOk;
}

#if defined(__AVX512F__)
// Whether a convolution whose sums are over so many channels is computed in tile registers, which take 32 at a time.
template <typename T>
bool worth_tiles([[maybe_unused]] int64_t channels) {
  if constexpr (std::is_same_v<T, bfloat16>) return channels >= 16 && TileRegisters::available();
  return false;
}

Status convolve_in_tiles(const char *op, const Source<bfloat16> &source, const bfloat16 *weight, const bfloat16 *bias,
                         int64_t groups, int64_t out_channels, bfloat16 *result) {
  const int64_t kernel = source.h.kernel * source.w.kernel, positions = source.positions(), all = groups * out_channels;
  const int64_t pixel = source.nhwc ? all : 1, channel = source.nhwc ? 1 : positions;  // strides of the result
  if (source.batch * positions * all == 0) return kOk;
  const bool turned = source.h.transposed;
  const auto w = Weight<bfloat16>::of(source, weight, out_channels, nullptr);
  const int64_t tap = !source.nhwc ? 1 : turned ? out_channels : source.channels;
  const TileWeight columns{weight,          w.size,
                           w.column,        turned ? kernel * out_channels : source.nhwc ? 1 : kernel,
                           source.channels, out_channels};
  const Buffer<int64_t> to(positions);
  const Buffer<TileTap> taps(kernel);
  if (!(to && taps)) return out_of_memory(op);
  Status status = kOk;
  each_phase(source.h, [&](const Phase &i) {
    each_phase(source.w, [&](const Phase &j) {
      list_places(i, j, 1, 0, pixel, to);
      TileTap *end = taps;
      i.each_tap([&](int64_t r, int64_t y) {
        j.each_tap([&](int64_t s, int64_t x) { *end++ = {(r * source.w.kernel + s) * tap, y, x}; });
      });
      auto store = [=, &to](int64_t image, int64_t group) {
        return Scatter<bfloat16>{result + image * positions * all + group * out_channels * channel, to, channel,
                                 bias ? bias + group * out_channels : nullptr};
      };
      const TileLines lines{source.data, source.nhwc, source.channels, source.all, TileAxis(i), TileAxis(j)};
      if (const Status failed = convolve_tiles(op, lines, source.batch, groups, taps, end - taps, columns, store))
        status = failed;
    });
  });
  return status;
}

// dweight (groups, out_channels, ...).
Status sum_in_tiles(const char *op, const Source<bfloat16> &source, const bfloat16 *dy, int64_t groups,
                    int64_t out_channels, bfloat16 *dweight) {
  const int64_t kernel = source.h.kernel * source.w.kernel, depth = source.depth();
  const int64_t weights = groups * out_channels * depth;
  if (source.batch * source.positions() * weights == 0) return std::memset(dweight, 0, weights * sizeof *dweight), kOk;
  const TileLines x{source.data,
                    source.nhwc,
                    source.channels,
                    source.all,
                    TileAxis(Phase{source.h, 0}),
                    TileAxis(Phase{source.w, 0})};
  const TileLines other{
      dy, source.nhwc, out_channels, groups * out_channels, TileAxis(source.h.result), TileAxis(source.w.result)};
  const Buffer<int64_t> rows(source.h.kernel), columns(source.w.kernel), to(kernel);
  if (!(rows && columns && to)) return out_of_memory(op);
  Phase{source.h, 0}.each_tap([&](int64_t r, int64_t y) { rows[r] = y; });
  Phase{source.w, 0}.each_tap([&](int64_t s, int64_t at) { columns[s] = at; });
  for (int64_t t = 0; t < kernel; ++t) to[t] = t * (source.nhwc ? source.channels : 1);
  const TileSums of(x, other, source.batch, groups, rows, source.h.kernel, columns, source.w.kernel);
  const Buffer<float> sums(of.parts * of.size());
  if (!sums) return out_of_memory(op);
  AOT_TRY(of.add_all(op, sums));
  parallel(groups * of.blocks_o() * of.blocks_c(), [=, &to, &sums](int64_t index) {
    const int64_t c = index % of.blocks_c() * kTileSide, o = index / of.blocks_c() % of.blocks_o() * kTileSide;
    const int64_t group = index / of.blocks_c() / of.blocks_o(), each = kernel * kBlock;
    float *const total = sums + index * each;
    for (int64_t part = 1; part < of.parts; ++part)
      sweep<float>(each, [=, more = total + part * of.size()](int64_t i, auto of_all) {
        store(total + i, load(total + i, of_all) + load(more + i, of_all), of_all);
      });
    for (int64_t i = 0; i < kTileSide && o + i < out_channels; ++i) {
      const int64_t at = (group * out_channels + o + i) * depth;
      const Scatter<bfloat16> scatter{dweight + at, to, source.nhwc ? 1 : kernel, nullptr};
      scatter.store(0, c, kernel, source.channels - c < kTileSide ? source.channels - c : kTileSide,
                    total + i * kTileSide, kBlock);
    }
  });
  return kOk;
}
#endif

// Whether the vectors of a depthwise convolution hold channels: if not, positions of a line.
template <typename T>
bool worth_pixels(const Source<T> &source) {
  return source.nhwc || 2 * source.all >= kLanes<T>;
}

template <typename T>
Status convolve(const char *op, const Source<T> &source, const T *weight, const T *bias, int64_t groups,
                int64_t out_channels, T *result) {
  if (source.identity()) return convolve_pixels(source, weight, bias, groups, out_channels, result);
  const bool depthwise = source.channels == 1 && out_channels == 1;
  const PixelBands pixels(source.h, source.w);
  if (depthwise && worth_pixels(source) && pixels.fits())
    return convolve_depthwise(op, source, pixels, weight, bias, result);
  const Planes<T> planes(source);
  const Phase i{source.h, 0}, j{source.w, 0};
  Bands bands = Bands::of(planes, groups, source.channels, i.count());
  if ((depthwise || worth_lines<T>(out_channels, j.count())) && bands.fits(planes, source.channels)) {
    bands.divide(source.batch * ceil_div(groups, bands.chunk), i.count());
    return convolve_lines(op, source, weight, bias, groups, out_channels, planes, bands, result);
  }
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, bfloat16>) {
    if (worth_tiles<T>(source.channels))
      return convolve_in_tiles(op, source, weight, bias, groups, out_channels, result);
    if (source.channels % 2 == 0 && multiplies_pairs<T>())
      return convolve_gathered<T, true>(op, source, weight, bias, groups, out_channels, result);
  }
#endif
  return convolve_gathered(op, source, weight, bias, groups, out_channels, result);
}

// ---------------------------------------------------------------------------------------------------------- dweight

// dweight is the product of dy, as a matrix of positions by output channels, with the columns. Images are added in
// their order; all threads share the product of each, so the result does not depend on them.

// sums (groups, out_channels, channels) for a kernel of 1 x 1.
template <typename T>
Status sum_pixels(const Source<T> &source, const T *dy, int64_t groups, int64_t out_channels, Accumulate<T> *sums) {
  const int64_t depth = source.channels, positions = source.positions(), all = groups * out_channels;
  const int64_t images = source.nhwc ? 1 : source.batch, pixels = source.nhwc ? source.batch * positions : positions;
  if (images == 0) std::memset(sums, 0, all * depth * sizeof *sums);
  for (int64_t image = 0; image < images; ++image)
    AOT_TRY(gemm_batch(groups, [=, &source](int64_t group) {
      // adjacent pixels are a row apart in NHWC, and adjacent in NCHW
      auto matrix = [=](const T *data, int64_t channels, int64_t all, bool transposed) {
        return source.nhwc ? Matrix<T>{data + group * channels, all, transposed}
                           : Matrix<T>{data + (image * all + group * channels) * pixels, pixels, !transposed};
      };
      return CpuGemm<T, Accumulate<T>>{out_channels,
                                       depth,
                                       pixels,
                                       matrix(dy, out_channels, all, true),
                                       matrix(source.data, depth, source.all, false),
                                       sums + group * out_channels * depth,
                                       depth,
                                       image > 0};
    }));
  return kOk;
}

// sums (groups, depth, out_channels) for any kernel.
template <typename T>
Status sum_gathered(const char *op, const Source<T> &source, const T *dy, int64_t groups, int64_t out_channels,
                    Accumulate<T> *sums) {
  using A = Accumulate<T>;
  const Padded<T> padded(source);
  const int64_t depth = source.depth(), positions = source.positions(), all = groups * out_channels;
  const int64_t images = padded.at_a_time();
  const Buffer<A> copy(padded.is_source() ? 0 : images * padded.image());
  const Buffer<int64_t> rows(images * positions), terms(depth);
  if (!(copy && rows && terms)) return out_of_memory(op);
  if (source.batch * positions == 0) std::memset(sums, 0, all * depth * sizeof(A));
  padded.list_positions({source.h, 0}, {source.w, 0}, images, rows);
  padded.list_terms({source.h, 0}, {source.w, 0}, terms);
  for (int64_t first = 0; first < source.batch; first += images) {
    const int64_t n = source.batch - first < images ? source.batch - first : images;
    const A *data = padded.images(first, n, copy);
    // dy of several images is one matrix in NHWC
    const int64_t products = source.nhwc ? 1 : n, length = source.nhwc ? n * positions : positions;
    for (int64_t image = 0; image < products; ++image)
      AOT_TRY(gemm_batch(groups, [=, &source, &padded, &rows, &terms](int64_t group) {
        const Gathered<A> x{data + group * source.channels * padded.channel(), terms, rows + image * positions};
        const Matrix<T> right =
            source.nhwc ? Matrix<T>{dy + first * positions * all + group * out_channels, all}
                        : Matrix<T>{dy + ((first + image) * all + group * out_channels) * positions, positions, true};
        A *c = sums + group * depth * out_channels;
        return CpuGemm<T, A, NoEpilogue, Gathered<A>>{depth, out_channels, length,           x, right,
                                                      c,     out_channels, first + image > 0};
      }));
  }
  return kOk;
}

#if defined(__AVX512F__)
// The gradient of the weight in NHWC with an even number of channels, where pairs of adjacent positions are multiplied.
// The columns are made: what a product reads of them, it packs.
template <typename T>
Status sum_columns_made(const char *op, const Source<T> &source, const T *dy, int64_t groups, int64_t out_channels,
                        Accumulate<T> *sums) {
  constexpr int64_t kMost = 1 << 20;  // pairs
  const Padded<T, true> padded(source);
  const int64_t depth = source.depth(), pairs = depth / 2, positions = source.positions(), all = groups * out_channels;
  const int64_t images = padded.at_a_time(), fit = kMost / (groups * pairs + 1), most = fit < 256 ? 256 : fit;
  const int64_t piece = images * positions < most ? images * positions : most;
  const Buffer<float> copy(padded.is_source() ? 0 : images * padded.image()), columns(groups * piece * pairs);
  const Buffer<int64_t> rows(images * positions), terms(pairs);
  if (!(copy && columns && rows && terms)) return out_of_memory(op);
  if (source.batch * positions == 0) std::memset(sums, 0, all * depth * sizeof *sums);
  padded.list_positions({source.h, 0}, {source.w, 0}, images, rows);
  padded.list_terms({source.h, 0}, {source.w, 0}, terms);
  // pairs that are adjacent in columns and in the copy
  const int64_t run = groups == 1 && source.w.dilation == 1 ? padded.channels() * source.w.kernel : padded.channels();
  for (int64_t first = 0; first < source.batch; first += images) {
    const int64_t n = (source.batch - first < images ? source.batch - first : images) * positions;
    const float *data = padded.images(first, n / positions, copy);
    for (int64_t begin = 0; begin < n; begin += piece) {
      const int64_t size = n - begin < piece ? n - begin : piece;
      parallel_pieces(groups * size, ceil_div(kGrain, pairs + 1),
                      [=, &padded, &rows, &terms, &columns](int64_t i, int64_t end) {
                        for (; i < end; ++i) {
                          const float *from = data + rows[begin + i % size] + i / size * padded.channels();
                          float *to = columns + i * pairs;
                          for (int64_t t = 0; t < pairs; t += run)
                            sweep<float>(run, [=, at = from + terms[t], to = to + t](int64_t l, auto part) {
                              store(to + l, load(at + l, part), part);
                            });
                        }
                      });
      AOT_TRY(gemm_batch(groups, [=, &columns](int64_t group) {
        const T *x = reinterpret_cast<const T *>(columns + group * size * pairs);
        return CpuGemm<T, float>{depth,
                                 out_channels,
                                 size,
                                 {x, depth, true},
                                 {dy + (first * positions + begin) * all + group * out_channels, all},
                                 sums + group * depth * out_channels,
                                 out_channels,
                                 first + begin > 0};
      }));
    }
  }
  return kOk;
}
#endif

// dweight (groups, out_channels, depth) of such sums.
template <typename T>
Status turn_sums(const char *op, const Accumulate<T> *sums, int64_t groups, int64_t out_channels, int64_t depth,
                 T *dweight) {
  const Buffer<int64_t> to(depth);
  if (!to) return out_of_memory(op);
  for (int64_t p = 0; p < depth; ++p) to[p] = p;
  const int64_t piece = ceil_div(kGrain, (out_channels + 1) * kLanes<T>) * kLanes<T>, pieces = ceil_div(depth, piece);
  parallel(groups * pieces, [=, &to](int64_t index) {
    const int64_t group = index / pieces, begin = index % pieces * piece;
    const Scatter<T> scatter{dweight + group * out_channels * depth, to, depth, nullptr};
    scatter.store(begin, 0, depth - begin < piece ? depth - begin : piece, out_channels,
                  sums + (group * depth + begin) * out_channels, out_channels);
  });
  return kOk;
}

template <typename T>
Status sum_products(const char *op, const Source<T> &source, const T *dy, int64_t groups, int64_t out_channels,
                    T *dweight) {
  using A = Accumulate<T>;
  const int64_t weights = groups * out_channels * source.depth();
  const bool depthwise = source.channels == 1 && out_channels == 1;
  const PixelBands pixels(source.h, source.w);
  if (depthwise && !source.identity() && worth_pixels(source) && pixels.fits())
    return sum_depthwise(op, source, pixels, dy, dweight);
  const Planes<T> planes(source);
  const Bands bands = Bands::of(planes, groups, source.channels + out_channels, source.h.result);
  const bool enough = ceil_div(groups, bands.chunk) * source.batch >= 8;
  if (!source.identity() && (depthwise || (enough && worth_lines<T>(out_channels, source.w.result))) &&
      bands.fits(planes, source.channels + out_channels))
    return sum_lines(op, source, dy, groups, out_channels, planes, bands, dweight);
  if constexpr (std::is_same_v<T, A>)
    if (source.identity()) return sum_pixels(source, dy, groups, out_channels, dweight);
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, bfloat16>)
    if (!source.identity() && worth_tiles<T>(source.channels))
      return sum_in_tiles(op, source, dy, groups, out_channels, dweight);
#endif
  const Buffer<A> buffer(weights);
  A *const sums = buffer;
  if (!sums) return out_of_memory(op);
  if (source.identity()) {
    AOT_TRY(sum_pixels(source, dy, groups, out_channels, sums));
    return map(dweight, weights, [=](int64_t i, auto part) { return load(sums + i, part); }), kOk;
  }
  auto sum_products_of = [&] {
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<T, bfloat16>)
      if (source.nhwc && source.channels % 2 == 0 && multiplies_pairs<T>())
        return sum_columns_made(op, source, dy, groups, out_channels, sums);
#endif
    return sum_gathered(op, source, dy, groups, out_channels, sums);
  };
  AOT_TRY(sum_products_of());
  return turn_sums(op, sums, groups, out_channels, source.depth(), dweight);
}

// ------------------------------------------------------------------------------------------------------------ dbias

// The sum of `rows` rows of n elements, `stride` apart.
template <typename T>
double sum_rows(const T *x, int64_t rows, int64_t stride, int64_t n) {
  double total = 0;
  for (int64_t i = 0; i < rows; ++i, x += stride)
    for_blocks(n, [&](int64_t begin, int64_t size) {
      Vec<T> s[4] = {};
      sweep_sums<T>(size, [&](int64_t j, auto part, int k) { s[k] += load(x + begin + j, part); });
      total += sum_of_4<T>(s);
    });
  return total;
}

template <typename T>
void sum_out_channels(const T *dy, bool nhwc, int64_t batch, int64_t positions, int64_t out_channels, T *dbias) {
  if (nhwc) return sum_columns(dy, batch * positions, out_channels, dbias);
  parallel_pieces(out_channels, ceil_div(kGrain, batch * positions + 1), [=](int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end; ++o)
      store_one(dbias + o, sum_rows(dy + o * positions, batch, out_channels * positions, positions));
  });
}

// -------------------------------------------------------------------------------------------------------- launchers

template <typename T>
Source<T> source_of(const Conv2dAttrs &op, const Conv2dShape &s, const T *data, bool transposed) {
  auto axis = [&](int i, int64_t in, int64_t out, int64_t kernel) {
    // a stride beyond the image leaves one position, whatever it is: a small one does not overflow
    const int64_t stride = std::min(op.stride.value[i], op.padded_size(in, i));
    return Axis{transposed ? out : in, transposed ? in : out, kernel,    stride,
                op.padding.value[i],   op.dilation.value[i],  transposed};
  };
  const Axis h = axis(0, s.height, s.out_h, s.kernel_h), w = axis(1, s.width, s.out_w, s.kernel_w);
  const int64_t channels = transposed ? s.out_channels : s.channels;
  return {op.nhwc(), h, w, s.batch, channels / op.groups, channels, data};
}

Status conv2d_cpu(const Conv2d &op, const Tensor *in, const Tensor *out, void *) {
  const Conv2dShape s = op.shape(in[0], in[1], out[0]);
  return dispatch_floating(in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    const Source<T> source = source_of(op, s, in[0].as<const T>(), false);
    const int64_t out_channels = s.out_channels / op.groups;
    return convolve(Conv2d::name, source, in[1].as<const T>(), in[2].as<const T>(), op.groups, out_channels,
                    out[0].as<T>());
  });
}

Status conv2d_backward_cpu(const Conv2dBackward &op, const Tensor *in, const Tensor *out, void *) {
  const Conv2dShape s = op.shape(in[1], in[2], in[0]);
  const int64_t out_channels = s.out_channels / op.groups, channels = s.channels / op.groups;
  const char *name = Conv2dBackward::name;
  return dispatch_floating(in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    const T *dy = in[0].as<const T>(), *x = in[1].as<const T>(), *weight = in[2].as<const T>();
    if (out[0])
      AOT_TRY(convolve<T>(name, source_of(op, s, dy, true), weight, nullptr, op.groups, channels, out[0].as<T>()));
    if (out[1]) AOT_TRY(sum_products(name, source_of(op, s, x, false), dy, op.groups, out_channels, out[1].as<T>()));
    if (out[2]) sum_out_channels(dy, op.nhwc(), s.batch, s.out_h * s.out_w, s.out_channels, out[2].as<T>());
    return kOk;
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// ---------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::Conv2d, aot_conv2d_cpu, aot::conv2d_cpu)
AOT_CPU_ENTRY(aot::Conv2dBackward, aot_conv2d_backward_cpu, aot::conv2d_backward_cpu)
