#include "conv2d.h"

#include <cstdlib>

#include "cpu/entry.h"
#include "cpu/rows.h"
#include "gemm/gemm_cpu.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// im2col: a convolution is the product of the weight with a matrix of columns, which hold the elements of x that each
// position of the result sums over. Columns are made for a block of positions at a time, and multiplied while they are
// in a cache.

// ---------------------------------------------------------------------------------------------------------- columns

// An axis of a convolution. meets(): the index in the source that kernel element k meets for a position of the result;
// -1 if it is out of range.
struct Axis {
  int64_t source, result, kernel, stride, padding, dilation;
  bool transposed;  // for dx, whose source is dy

  int64_t meets(int64_t position, int64_t k) const {
    int64_t i = transposed ? position + padding - k * dilation : position * stride + k * dilation - padding;
    if (transposed) {
      if (i % stride != 0) return -1;
      i /= stride;
    }
    return 0 <= i && i < source ? i : -1;
  }
  bool identity() const { return kernel == 1 && stride == 1 && padding == 0; }
};

// The operand that columns are made of: x, or dy for dx. A group has `channels` of its `all` channels.
template <typename T>
struct Source {
  bool nhwc;
  Axis h, w;
  int64_t batch, channels, all;
  const T *data;

  int64_t positions() const { return h.result * w.result; }
  int64_t depth() const { return channels * h.kernel * w.kernel; }
  bool identity() const { return h.identity() && w.identity(); }

  // NHWC: a row (kernel, channels) for each of n positions from `begin` on, which count through all images.
  void rows(int64_t group, int64_t begin, int64_t n, T *to) const {
    for (int64_t at = begin; at < begin + n; ++at) {
      const int64_t image = at / positions(), i = at / w.result % h.result, j = at % w.result;
      for (int64_t r = 0; r < h.kernel; ++r) {
        const int64_t y = h.meets(i, r);
        for (int64_t s = 0; s < w.kernel; ++s, to += channels) {
          const int64_t x = y < 0 ? -1 : w.meets(j, s);
          if (x < 0) std::memset(to, 0, channels * sizeof(T));
          else
            std::memcpy(to, data + ((image * h.source + y) * w.source + x) * all + group * channels,
                        channels * sizeof(T));
        }
      }
    }
  }

  // NCHW: for each kernel element of channel c, a row of n positions of an image from `begin` on.
  void columns(int64_t image, int64_t group, int64_t c, int64_t begin, int64_t n, T *to) const {
    const T *plane = data + (image * all + group * channels + c) * h.source * w.source;
    for (int64_t r = 0; r < h.kernel; ++r)
      for (int64_t s = 0; s < w.kernel; ++s)
        for (int64_t at = begin; at < begin + n;) {
          const int64_t i = at / w.result, j = at % w.result, left = begin + n - at;
          const int64_t run = w.result - j < left ? w.result - j : left, y = h.meets(i, r);
          fill_run(y < 0 ? nullptr : plane + y * w.source, j, s, run, to);
          at += run, to += run;
        }
  }

  // The matrix of n positions' columns from `begin` on, of an image in NCHW: (n, depth) in NHWC, (depth, n) in NCHW.
  // Made in `buffer`, unless the source is that matrix.
  Matrix<T> block(int64_t image, int64_t group, int64_t begin, int64_t n, T *buffer) const {
    if (nhwc) {
      if (identity()) return {data + begin * all + group * channels, all};
      parallel_pieces(n, ceil_div(kGrain, depth() + 1), [=](int64_t first, int64_t last) {
        rows(group, begin + first, last - first, buffer + first * depth());
      });
      return {buffer, depth()};
    }
    if (identity()) return {data + (image * all + group * channels) * positions() + begin, positions()};
    const int64_t kernel = h.kernel * w.kernel;
    parallel_pieces(channels, ceil_div(kGrain, kernel * n + 1), [=](int64_t first, int64_t last) {
      for (int64_t c = first; c < last; ++c) columns(image, group, c, begin, n, buffer + c * kernel * n);
    });
    return {buffer, n};
  }

 private:
  void fill_run(const T *line, int64_t j, int64_t s, int64_t run, T *to) const {
    if (!line) {
      std::memset(to, 0, run * sizeof(T));
    } else if (w.stride == 1) {  // contiguous in the source
      const int64_t first = w.transposed ? j + w.padding - s * w.dilation : j + s * w.dilation - w.padding;
      int64_t before = first < 0 ? -first : 0, there = w.source - first;
      before = before < run ? before : run, there = there < run ? there : run;
      there = there < before ? before : there;
      std::memset(to, 0, before * sizeof(T));
      std::memcpy(to + before, line + first + before, (there - before) * sizeof(T));
      std::memset(to + there, 0, (run - there) * sizeof(T));
    } else {
      for (int64_t k = 0; k < run; ++k) {
        const int64_t x = w.meets(j + k, s);
        to[k] = x < 0 ? T{} : line[x];
      }
    }
  }
};

// Positions in a block whose columns, of `depth` elements, are about `elements` in all.
int64_t block_positions(int64_t depth, int64_t elements) {
  const int64_t n = elements / (depth > 0 ? depth : 1);
  return n < 64 ? 64 : n > 1024 ? 1024 : n;
}

// ------------------------------------------------------------------------------------------------------ y and dx

// result = the source convolved with a weight (groups, out_channels, depth).
template <typename T>
Status convolve(const char *op, const Source<T> &source, const T *weight, const T *bias, int64_t groups,
                int64_t out_channels, T *result) {
  const int64_t depth = source.depth(), positions = source.positions(), all = groups * out_channels;
  const int64_t block = block_positions(depth, 1 << 18);
  // a block of NHWC may span images, one of NCHW not
  const int64_t images = source.nhwc ? 1 : source.batch, length = source.nhwc ? source.batch * positions : positions;
  const int64_t blocks = ceil_div(length, block);
  return try_parallel(images * groups * blocks, [&](int64_t index) -> Status {
    const int64_t begin = index % blocks * block, n = length - begin < block ? length - begin : block;
    const int64_t group = index / blocks % groups, image = index / blocks / groups;
    const Buffer<T> buffer(source.identity() ? 0 : n * depth);
    if (!buffer) return out_of_memory(op);
    const Matrix<T> w{weight + group * out_channels * depth, depth, source.nhwc};
    const T *add = bias ? bias + group * out_channels : nullptr;
    const Matrix<T> x = source.block(image, group, begin, n, buffer);
    if (source.nhwc)
      return gemm(n, out_channels, depth, x, w, result + begin * all + group * out_channels, all, false,
                  [=](Vec<T> v, int64_t, int64_t j, auto part) { return add ? v + load(add + j, part) : v; });
    return gemm(out_channels, n, depth, w, x, result + (image * all + group * out_channels) * positions + begin,
                positions, false, [=](Vec<T> v, int64_t i, int64_t, auto) { return add ? v + load_one(add + i) : v; });
  });
}

// The weight for dx: channels and out_channels of each group are exchanged.
template <typename T>
void transpose_weight(const T *weight, bool nhwc, int64_t groups, int64_t out_channels, int64_t channels,
                      int64_t kernel, T *to) {
  parallel_pieces(groups * channels, ceil_div(kGrain, out_channels * kernel + 1), [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t group = i / channels, c = i % channels;
      for (int64_t o = 0; o < out_channels; ++o)
        for (int64_t k = 0; k < kernel; ++k) {
          const int64_t from = (group * out_channels + o) * kernel * channels;
          if (nhwc) to[(i * kernel + k) * out_channels + o] = weight[from + k * channels + c];
          else to[(i * out_channels + o) * kernel + k] = weight[from + c * kernel + k];
        }
    }
  });
}

// ---------------------------------------------------------------------------------------------------------- dweight

// sums (groups, out_channels, depth) = dy, as a matrix of output channels by positions, times the source's columns.
// Blocks of positions are added in their order; all threads share the product of each, so the result does not depend on
// them.
template <typename T, typename A = Accumulate<T>>
Status sum_blocks(const char *op, const Source<T> &source, const T *dy, int64_t groups, int64_t out_channels, A *sums) {
  const int64_t depth = source.depth(), positions = source.positions(), all = groups * out_channels;
  const int64_t images = source.nhwc ? 1 : source.batch, length = source.nhwc ? source.batch * positions : positions;
  const int64_t block = source.identity() ? length : block_positions(depth, 1 << 20);
  const Buffer<T> buffer(source.identity() ? 0 : (block < length ? block : length) * depth);
  if (!buffer) return out_of_memory(op);
  if (images * length == 0) std::memset(sums, 0, all * depth * sizeof(A));
  for (int64_t group = 0; group < groups; ++group)
    for (int64_t image = 0; image < images; ++image)
      for (int64_t begin = 0; begin < length; begin += block) {
        const int64_t n = length - begin < block ? length - begin : block;
        Matrix<T> x = source.block(image, group, begin, n, buffer);
        x.transposed = !source.nhwc;
        const Matrix<T> left =
            source.nhwc ? Matrix<T>{dy + begin * all + group * out_channels, all, true}
                        : Matrix<T>{dy + (image * all + group * out_channels) * positions + begin, positions};
        AOT_TRY(gemm(out_channels, depth, n, left, x, sums + group * out_channels * depth, depth, image + begin > 0));
      }
  return kOk;
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
    return Axis{transposed ? out : in, transposed ? in : out, kernel,    op.stride.value[i],
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
    return convolve(Conv2d::name, source_of(op, s, in[0].as<const T>(), false), in[1].as<const T>(),
                    in[2].as<const T>(), op.groups, s.out_channels / op.groups, out[0].as<T>());
  });
}

Status conv2d_backward_cpu(const Conv2dBackward &op, const Tensor *in, const Tensor *out, void *) {
  const Conv2dShape s = op.shape(in[1], in[2], in[0]);
  const int64_t out_channels = s.out_channels / op.groups, channels = s.channels / op.groups;
  const int64_t weights = s.out_channels * channels * s.kernel();
  const char *name = Conv2dBackward::name;
  return dispatch_floating(in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    using A = Accumulate<T>;
    const T *dy = in[0].as<const T>(), *x = in[1].as<const T>(), *weight = in[2].as<const T>();
    if (out[0]) {
      const Buffer<T> transposed(weights);
      if (!transposed) return out_of_memory(name);
      transpose_weight<T>(weight, op.nhwc(), op.groups, out_channels, channels, s.kernel(), transposed);
      AOT_TRY(convolve<T>(name, source_of(op, s, dy, true), transposed, nullptr, op.groups, channels, out[0].as<T>()));
    }
    if (out[1]) {
      const Source<T> source = source_of(op, s, x, false);
      T *dweight = out[1].as<T>();
      if constexpr (std::is_same_v<T, A>) {
        AOT_TRY(sum_blocks(name, source, dy, op.groups, out_channels, dweight));
      } else {
        const Buffer<A> sums(weights);
        if (!sums) return out_of_memory(name);
        AOT_TRY(sum_blocks(name, source, dy, op.groups, out_channels, static_cast<A *>(sums)));
        map(dweight, weights, [&](int64_t i, auto part) { return load(sums + i, part); });
      }
    }
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
