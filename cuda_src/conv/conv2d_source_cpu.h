// The source of a convolution on the CPU, its axes with their phases, and its weight.
#pragma once
#include "cpu/rows.h"
#include "gemm/gemm_cpu.h"

namespace aot {
inline namespace AOT_ISA {

// ---------------------------------------------------------------------------------------------------------- geometry

// An axis of a convolution, and of the transposed one, for dx, whose source is dy.
struct Axis {
  int64_t source, result, kernel, stride, padding, dilation;
  bool transposed;

  bool identity() const { return kernel == 1 && stride == 1 && padding == 0; }
};

// x, or dy for dx. A group has `channels` of its `all` channels.
template <typename T>
struct Source {
  bool nhwc;
  Axis h, w;
  int64_t batch, channels, all;
  const T *data;

  int64_t positions() const { return h.result * w.result; }
  int64_t depth() const { return channels * h.kernel * w.kernel; }
  bool identity() const { return h.identity() && w.identity(); }
};

// ----------------------------------------------------------------------------------------------------------- phases

// Every stride-th position of a result's axis from `first` on, which meet the same elements of the kernel, if the axis
// is transposed; else all of them.
struct Phase {
  Axis axis;
  int64_t first;

  int64_t step() const { return axis.transposed ? axis.stride : 1; }
  int64_t source_step() const { return axis.transposed ? 1 : axis.stride; }
  int64_t count() const { return ceil_div(axis.result - first, step()); }
  int64_t taps() const {
    int64_t n = 0;
    each_tap([&](int64_t, int64_t) { ++n; });
    return n;
  }
  // f(k, at): position first + i * step meets element i * source_step + at of the source by element k of the kernel.
  template <class F>
  void each_tap(F f) const {
    for (int64_t k = 0; k < axis.kernel; ++k) {
      const int64_t at = axis.transposed ? first + axis.padding - k * axis.dilation : k * axis.dilation - axis.padding;
      if (at % step() == 0) f(k, at / step());
    }
  }
};

// f(phase) for each phase of an axis.
template <class F>
void each_phase(const Axis &axis, F f) {
  for (Phase phase{axis, 0}; phase.first < phase.step() && phase.first < axis.result; ++phase.first) f(phase);
}

// The zeros that an axis of the source needs on both sides.
struct Margin {
  int64_t before = 0, after = 0;

  explicit Margin(const Axis &axis) {
    each_phase(axis, [&](const Phase &phase) {
      phase.each_tap([&](int64_t, int64_t at) {
        const int64_t beyond = (phase.count() - 1) * phase.source_step() + at + 1 - axis.source;
        if (-at > before) before = -at;
        if (beyond > after) after = beyond;
      });
    });
  }
};

// ----------------------------------------------------------------------------------------------------------- weight

// The weight of a convolution, or of the transposed one, for dx, which exchanges channels and out_channels of each
// group. Term t of output channel o of a group is data[group * size + o * column + at[t]].
template <typename T>
struct Weight {
  const T *data;
  int64_t size, column;
  const int64_t *at;

  static Weight of(const Source<T> &source, const T *data, int64_t out_channels, const int64_t *at) {
    const int64_t kernel = source.h.kernel * source.w.kernel, depth = source.channels * kernel;
    return {data, out_channels * depth, !source.h.transposed ? depth : source.nhwc ? 1 : kernel, at};
  }

  Accumulate<T> element(int64_t group, int64_t o, int64_t t) const {
    return load_one(data + group * size + o * column + at[t]);
  }

  // The terms of a phase, in the order of Padded::list_terms.
  static void list_terms(const Source<T> &source, const Phase &i, const Phase &j, int64_t out_channels, int64_t *to) {
    const int64_t kernel = source.h.kernel * source.w.kernel;
    const int64_t outer = source.nhwc ? 1 : source.channels, inner = source.nhwc ? source.channels : 1;
    const bool turned = source.h.transposed;
    const int64_t tap = !source.nhwc ? 1 : turned ? out_channels : source.channels;
    const int64_t channel = turned ? kernel * out_channels : source.nhwc ? 1 : kernel;
    for (int64_t a = 0; a < outer; ++a)
      i.each_tap([&](int64_t r, int64_t) {
        j.each_tap([&](int64_t s, int64_t) {
          for (int64_t b = 0; b < inner; ++b) *to++ = (a + b) * channel + (r * source.w.kernel + s) * tap;
        });
      });
  }

  // Packs the matrices (depth, n) of all groups. contiguous: term t is at t.
  void pack(int64_t groups, int64_t depth, int64_t n, bool contiguous, Accumulate<T> *packed) const {
    constexpr int kCols = Block<Accumulate<T>>::kCols;
    auto pack_strip = [=, *this](int64_t group, int64_t j) {
      const T *from = data + group * size + j * column;
      const int64_t cols = n - j < kCols ? n - j : kCols;
      Accumulate<T> *to =
          packed + group * PackedMatrix<Accumulate<T>>::size(depth, n) + j / kCols * strip<kCols, Accumulate<T>>(depth);
      if (contiguous) return aot::pack<WidenedTerms<T>, kCols>(Matrix<T>{from, column}, cols, depth, to);
      for (int64_t t = 0; t < depth; ++t, to += kCols) {
        if (column == 1 && cols == kCols)
          for (int64_t o = 0; o < kCols; o += kLanes<T>) store(to + o, load(from + at[t] + o));
        else
          for (int64_t o = 0; o < kCols; ++o) to[o] = o < cols ? load_one(from + at[t] + o * column) : 0;
      }
    };
    each_strip(groups, depth, n, pack_strip);
  }

#if defined(__AVX512F__)
  // pack_pairs packs pairs of adjacent channels, `depth` of them. taps: in NCHW, else 0, where the terms may be
  // contiguous.
  void pack_pairs(int64_t groups, int64_t depth, int64_t n, int64_t taps, bool contiguous, float *packed) const {
    constexpr int kCols = Block<float>::kCols;
    auto pack_strip = [=, *this](int64_t group, int64_t j) {
      const T *from = data + group * size + j * column;
      const int64_t cols = n - j < kCols ? n - j : kCols;
      float *to = packed + group * PackedMatrix<float>::size(depth, n) + j / kCols * strip<kCols, float>(depth);
      if (contiguous) return aot::pack<BFloat16Pairs, kCols>(Matrix<T>{from, column}, cols, 2 * depth, to);
      for (int64_t t = 0; t < depth; ++t, to += kCols) {
        const int64_t first = taps ? 2 * (t / taps) * taps + t % taps : 2 * t, second = first + (taps ? taps : 1);
        const int64_t next = at[second] - at[first];
        for (int64_t o = 0; o < kCols; o += kLanes<T>) {
          const T *pair = from + at[first] + o * column;
          const int64_t left = cols - o < 0 ? 0 : cols - o < kLanes<T> ? cols - o : kLanes<T>;
          if (column == 1) {
            store(to + o, BFloat16Pairs::across(pair, next, 2, Part{left}));
            continue;
          }
          VecBits pairs{};
          for (int64_t l = 0; l < left; ++l)
            pairs[l] = pair[l * column].bits | uint32_t{pair[l * column + next].bits} << 16;
          store(to + o, (Vec<float>)pairs);
        }
      }
    };
    each_strip(groups, 2 * depth, n, pack_strip);
  }
#endif

 private:
  // f(group, column) for each strip of all groups, in threads.
  template <class F>
  static void each_strip(int64_t groups, int64_t depth, int64_t n, F f) {
    constexpr int kCols = Block<Accumulate<T>>::kCols;
    const int64_t strips = ceil_div(n, kCols);
    parallel_pieces(groups * strips, ceil_div(kGrain, depth * kCols + 1), [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) f(i / strips, i % strips * kCols);
    });
  }
};

}  // namespace AOT_ISA
}  // namespace aot
