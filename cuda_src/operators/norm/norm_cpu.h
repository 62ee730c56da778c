// The norms on the CPU: forward and backward loops and launchers, which each operator instantiates (norm.h). T is the
// dtype of x, y, dy and dx, R that of residual, h, dh and dresidual, W that of weight and bias: each T, or float. All
// three have vectors of as many lanes.
#pragma once
#include <type_traits>

#include "cpu/entry.h"
#include "cpu/rows.h"
#include "norm.h"
#include "short_rows_cpu.h"

namespace aot {
inline namespace AOT_ISA {

// --------------------------------------------------------------------------------------------------------- moments

// A row to normalize: x, or x + residual rounded to the residual's dtype.
template <typename T, typename R, bool kAdd>
struct Row {
  const T *x;
  const R *residual;

  Vec<T> operator()(int64_t j, Full = {}) const { return load_row(j, Full()); }
  Vec<T> operator()(int64_t j, Stream) const { return load_row(j, Full()); }
  Vec<T> operator()(int64_t j, Part part) const { return load_row(j, part); }
  Row operator+(int64_t n) const { return {x + n, kAdd ? residual + n : nullptr}; }
  void prefetch(int64_t j) const {
    __builtin_prefetch(x + j);
    if constexpr (kAdd) __builtin_prefetch(residual + j);
  }

 private:
  template <class P>
  Vec<T> load_row(int64_t j, P part) const {
    if constexpr (kAdd) return widen(narrow(load(x + j, part) + load(residual + j, part), R()), R());
    else return load(x + j, part);
  }
};

template <typename A>
struct Moments {
  A mean, rstd;
  A mean_error;  // to be added to the mean: its rounding error
};

// Two passes over the row, which stays in a cache: the mean, then the squares; rms_norm needs only the second. That one
// prefetches the next row, because the memory is idle. first(j, part) is the row in the first pass.
template <bool kCentred, typename T, class First, class X, class Next, typename A = Accumulate<T>>
Moments<A> row_moments(First first, X x, Next next, int64_t n, double eps) {
  const double inverse_n = 1. / n;
  double sum_x = 0, sum_d = 0, sum_d2 = 0;
  if constexpr (kCentred) sum_x = sum_row<T>(n, first);
  const A mean = sum_x * inverse_n;
  for_blocks(n, [&](int64_t begin, int64_t size) {
    Vec<T> d1[4] = {}, d2[4] = {};
    sweep_sums<T>(size, [&](int64_t j, auto part, int k) {
      next.prefetch(begin + j);
      if constexpr (kCentred) {
        Vec<T> d = keep<T>(x(begin + j, part) - mean, part);
        d1[k] += d, d2[k] += d * d;
      } else {
        Vec<T> v = first(begin + j, part);
        d2[k] += v * v;
      }
    });
    sum_d += sum_of_4<T>(d1), sum_d2 += sum_of_4<T>(d2);
  });
  const double mean_error = sum_d * inverse_n, var = sum_d2 * inverse_n - mean_error * mean_error;
  const double rstd = 1 / __builtin_sqrt((var < 0 ? 0 : var) + eps);
  // An overflowed variance makes rstd NaN: with 0, y would silently be the bias alone. An overflowed mean square makes
  // it 0, as in the formula and in torch.
  return {mean, static_cast<A>(kCentred ? rstd + 0 * var : rstd), static_cast<A>(mean_error)};
}

// The scale and shift of a normalized row: weight + offset, and bias. Each may be null, and has (lines, n) elements.
template <typename W>
struct Affine {
  const W *weight, *bias;
  Accumulate<W> offset;
  int64_t lines;

  Affine line(int64_t at) const { return {weight ? weight + at : nullptr, bias ? bias + at : nullptr, offset, lines}; }

  template <class P>
  Vec<W> scale(int64_t j, P part) const {
    return weight ? load(weight + j, part) + offset : Vec<W>{} + 1;
  }
  template <class P>
  Vec<W> shift(int64_t j, P part) const {
    return bias ? load(bias + j, part) : Vec<W>{};
  }
  void widen_scale(int64_t n, ShortParameter<Accumulate<W>> *to) const {
    to->fill(n, [=](int64_t j, auto part) { return scale(j, part); });
  }
  void widen_shift(int64_t n, ShortParameter<Accumulate<W>> *to) const {
    to->fill(n, [=](int64_t j, auto part) { return bias ? load(bias + j, part) : -Vec<W>{}; });
  }
};

// --------------------------------------------------------------------------------------------------- loops, forward

template <bool kCentred, bool kAdd, typename T, typename R, typename W>
struct Forward {
  using A = Accumulate<T>;
  Row<T, R, kAdd> x;
  Affine<W> affine;
  T *y;
  R *h;
  A *stats;
  int64_t n;
  double eps;
  bool stream;

  void rows(int64_t begin, int64_t end) const {
    // where the sums are stored by the only pass of the statistics, one more would cost more than it saves
    constexpr int64_t kMost = kAdd && !kCentred && sizeof(T) > 2 ? kShortRow / 4 : kShortRow;
    if (n <= kMost && affine.lines == 1) return short_rows(begin, end);
    for (int64_t i = begin; i < end; ++i) {
      const Row<T, R, kAdd> row = x + i * n, next = i + 1 < end ? row + n : row;
      const int64_t line = affine.lines == 1 ? 0 : i % affine.lines;
      const auto moments = [=](auto first, auto x)
                               AOT_INLINED { return row_moments<kCentred, T>(first, x, next, n, eps); };
      Moments<A> m;
      if (kAdd && !stream) {  // the first pass stores the sums, which the others read
        R *const sums = h + i * n;
        const Row<R, R, false> stored{sums, nullptr};
        m = moments(
            [=](int64_t j, auto part) AOT_INLINED {
              const Vec<T> v = row(j, part);
              return store(sums + j, v, part), v;
            },
            stored);
        write(stored, affine.line(line * n), y + i * n, nullptr, m);
      } else {
        m = moments(row, row);
        write(row, affine.line(line * n), y + i * n, kAdd ? h + i * n : nullptr, m);
      }
      write_stats(i, m.mean + m.mean_error, m.rstd);
    }
    if (stream) end_stream();
  }

 private:
  void write_stats(int64_t i, A mean, A rstd) const {
    constexpr int kStats = kCentred ? 2 : 1;
    if (!stats) return;
    if (kCentred) stats[kStats * i] = mean;
    stats[kStats * i + kStats - 1] = rstd;
  }

  void short_rows(int64_t begin, int64_t end) const {
    ShortParameter<A> scale, shift;
    ShortMoments<A> m;
    affine.widen_scale(n, &scale), affine.widen_shift(n, &shift);
    for (int64_t i = begin; i < end; i += kGroup<T>) {
      const int64_t rows = end - i < kGroup<T> ? end - i : kGroup<T>;
      const R *from;
      if constexpr (kAdd) {
        const Row<T, R, kAdd> row = x + i * n;
        sweep<T>(rows * n, [=, to = h + i * n](int64_t j, auto part) { store(to + j, row(j, part), part); });
        from = h + i * n;
      } else {
        from = x.x + i * n;
      }
      short_moments<kCentred>(from, rows, n, n, eps, &m);
      short_forward<kCentred>(from, y + i * n, rows, n, m, scale, shift, stream);
      for (int64_t r = 0; r < rows; ++r) write_stats(i + r, m.mean[r] + m.mean_error[r], m.rstd[r]);
    }
    if (stream) end_stream();
  }

  // h: null if it is stored already.
  template <class X>
  void write(X row, Affine<W> affine, T *y, R *h, Moments<A> m) const {
    auto step = [=](int64_t j, auto part) {
      Vec<T> v = row(j, part);
      if constexpr (kAdd)
        if (h) store(h + j, v, part);
      if constexpr (kCentred) v = (v - m.mean) * m.rstd - m.mean_error * m.rstd;
      else v *= m.rstd;
      v = v * affine.scale(j, part);
      if (kCentred || affine.bias) v += affine.shift(j, part);
      store(y + j, v, part);
    };
    stream ? sweep_stream(y, n, step) : sweep<T>(n, step);
  }
};

// -------------------------------------------------------------------------------------------------- loops, backward

template <bool kCentred, bool kAdd, typename T, typename R, typename W>
struct Backward {
  using A = Accumulate<T>;
  static constexpr int kStats = kCentred ? 2 : 1;
  // Rows that are processed together. Four of 16 bits leave the first-level cache room for the next four, which the
  // second pass prefetches. Of wider ones the first pass prefetches two to the second-level cache.
  static constexpr bool kNarrow = sizeof(T) == 2 && sizeof(R) == 2;
  static constexpr int kRows = kNarrow ? 4 : 2;
  const T *dy;
  const R *dh, *x;  // dh may be null
  Affine<W> affine;
  const A *stats;  // null: recomputed
  T *dx;           // dx and dresidual: either may be null
  R *dresidual;
  int64_t n;
  double eps;
  bool stream;

  // dx of rows begin to end of each line. Adds the rows' terms to dweight and dbias, (lines, n), unless they are null.
  void chunk(int64_t begin, int64_t end, A *dweight, A *dbias) const {
    // longer rows of three inputs leave the first-level cache between the passes, of which there are few
    constexpr int64_t kMost = kAdd && !kCentred && sizeof(T) > 2 ? kShortRow / 2 : kShortRow;
    if (n <= kMost) return short_rows(begin, end, dweight, dbias);
    int64_t i = begin;
    for (; i + kRows <= end; i += kRows) lines<kRows>(i, end, dweight, dbias);
    for (; i < end; ++i) lines<1>(i, end, dweight, dbias);
    if (stream) end_stream();
  }

 private:
  template <int K>
  void lines(int64_t i, int64_t end, A *dweight, A *dbias) const {
    for (int64_t line = 0; line < affine.lines; ++line) {
      const int64_t at = line * n;
      const int64_t next = i + 2 * K <= end ? K * affine.lines * n : 0;
      rows<K>(i * affine.lines + line, next, affine.line(at), dweight ? dweight + at : nullptr,
              dbias ? dbias + at : nullptr);
    }
  }

  void short_rows(int64_t begin, int64_t end, A *dweight, A *dbias) const {
    const int64_t step = affine.lines * n;
    ShortParameter<A> scale, unused;
    ShortMoments<A> m;
    A mean_g[kGroup<T>], mean_gx[kGroup<T>];
    if (!dweight || !dbias) unused.fill(n, [](int64_t, auto) { return Vec<A>{}; });
    for (int64_t begin_of_group = begin; begin_of_group < end; begin_of_group += kGroup<T>)
      for (int64_t line = 0; line < affine.lines; ++line) {
        const int64_t left = end - begin_of_group, rows = left < kGroup<T> ? left : kGroup<T>;
        const int64_t first = begin_of_group * affine.lines + line, at = first * n;
        if (affine.lines > 1 || begin_of_group == begin) affine.line(line * n).widen_scale(n, &scale);
        if (stats) {
          for (int64_t r = 0; r < rows; ++r) {
            const A *const of_row = stats + kStats * (first + r * affine.lines);
            m.mean[r] = kCentred ? of_row[0] : A(0), m.rstd[r] = of_row[kStats - 1];
          }
        } else {
          short_moments<kCentred>(x + at, rows, step, n, eps, &m);
          for (int64_t r = 0; r < rows; ++r) m.mean[r] += m.mean_error[r];
        }
        short_sums<kCentred>(dy + at, x + at, rows, step, n, m, scale, dweight ? dweight + line * n : unused.data,
                             dbias ? dbias + line * n : unused.data, mean_g, mean_gx);
        if (dx || dresidual)
          short_dx<kCentred, kAdd>(dy + at, x + at, kAdd && dh ? dh + at : nullptr, dx ? dx + at : nullptr,
                                   kAdd && dresidual ? dresidual + at : nullptr, rows, step, n, m, scale, mean_g,
                                   mean_gx, stream);
      }
    if (stream) end_stream();
  }

  Moments<A> moments(int64_t i) const {
    if (stats) return {kCentred ? stats[kStats * i] : A(0), stats[kStats * i + kStats - 1], 0};
    const Row<R, R, false> row{x + i * n, nullptr};
    return row_moments<kCentred, T>(row, row, row, n, eps);
  }

  // K rows of a line, from row i on. `next`: how many elements further on to prefetch.
  template <int K>
  void rows(int64_t i, int64_t next, Affine<W> affine, A *dweight, A *dbias) const {
    const int64_t n = this->n, step = affine.lines * n;  // from each row of the line to its next
    const T *dy = this->dy + i * n;
    const R *x = this->x + i * n;
    A mean[K], rstd[K];
    for (int r = 0; r < K; ++r) {
      const Moments<A> m = moments(i + r * affine.lines);
      mean[r] = m.mean + m.mean_error, rstd[r] = m.rstd;
    }
    const auto prefetch = [=](int64_t at) AOT_INLINED {
      __builtin_prefetch(dy + at, 0, kNarrow ? 3 : 2);
      __builtin_prefetch(x + at, 0, kNarrow ? 3 : 2);
    };
    auto normalized = [=](const R *p, A mean, A rstd, auto part) {
      if constexpr (kCentred) return (load(p, part) - mean) * rstd;
      else return load(p, part) * rstd;
    };

    // 1. each row's sums of g and g * xhat; the columns' sums, dweight and dbias
    double c1[K] = {}, c2[K] = {};
    for_blocks(n, [&](int64_t begin, int64_t size) {
      Vec<T> g1[K] = {}, g2[K] = {};
      sweep<T>(size, [&](int64_t i, auto part) AOT_INLINED {
        const int64_t j = begin + i;
        Vec<T> w = affine.scale(j, part), sum1{}, sum2{};
        for (int r = 0; r < K; ++r) {
          if constexpr (!kNarrow) prefetch(next + r * step + j);
          Vec<T> d = load(dy + r * step + j, part), xhat = normalized(x + r * step + j, mean[r], rstd[r], part);
          if constexpr (kCentred) xhat = keep<T>(xhat, part);
          sum1 += d, sum2 += d * xhat;
          g1[r] += d * w, g2[r] += d * w * xhat;
        }
        if (dweight) store(dweight + j, load(dweight + j, part) + sum2, part);
        if (dbias) store(dbias + j, load(dbias + j, part) + sum1, part);
      });
      for (int r = 0; r < K; ++r) c1[r] += kCentred ? sum<A>(g1[r]) : A(0), c2[r] += sum<A>(g2[r]);
    });

    // 2. dx, and prefetching
    const R *dh = kAdd && this->dh ? this->dh + i * n : nullptr;
    const auto write = [&](int r, auto with_dx, auto with_dresidual) {
      const A mean_g = c1[r] / n, mean_gx = c2[r] / n, mean_r = mean[r], rstd_r = rstd[r];
      T *dx = with_dx ? this->dx + i * n + r * step : nullptr;
      R *dresidual = with_dresidual ? this->dresidual + i * n + r * step : nullptr;
      auto column = [=](int64_t j, auto part) {
        if constexpr (kNarrow) prefetch(next + r * step + j);
        Vec<T> g = load(dy + r * step + j, part) * affine.scale(j, part);
        Vec<T> xhat = normalized(x + r * step + j, mean_r, rstd_r, part);
        if constexpr (kCentred) g -= mean_g;
        Vec<T> d = rstd_r * (g - xhat * mean_gx);
        if constexpr (kAdd)
          if (dh) d += load(dh + r * step + j, part);
        if constexpr (with_dx) store(dx + j, d, part);
        if constexpr (with_dresidual) store(dresidual + j, d, part);
      };
      if constexpr (with_dx && !with_dresidual) stream ? sweep_stream(dx, n, column) : sweep<T>(n, column);
      else sweep<T>(n, column);
    };
    using std::false_type, std::true_type;
    for (int r = 0; r < K; ++r) {
      if (!this->dresidual) this->dx ? write(r, true_type(), false_type()) : void();
      else if constexpr (kAdd) this->dx ? write(r, true_type(), true_type()) : write(r, false_type(), true_type());
    }
  }
};

// Adds up the workspace's partial sums, (chunks, 2, n), in order.
template <typename W, typename A = Accumulate<W>>
void sum_partials(const A *partial, int64_t chunks, int64_t n, W *dweight, W *dbias) {
  parallel_pieces(n, kGrain / 16, [=](int64_t begin, int64_t end) {
    auto step = [=](const A *p, W *sums, int64_t j, auto part) {
      Vec<W> s{};
      for (int64_t c = 0; c < chunks; ++c) s += load(p + c * 2 * n + j, part);
      store(sums + j, s, part);
    };
    sweep<W>(end - begin, [=](int64_t j, auto part) {
      if (dweight) step(partial, dweight, begin + j, part);
      if (dbias) step(partial + n, dbias, begin + j, part);
    });
  });
}

// A chunk of the rows of each line. dweight and, with_dbias, dbias, of n elements each, are summed over runs of kRun
// rows first, which limits rounding errors.
template <bool kCentred, bool kAdd, typename T, typename R, typename W, typename A = Accumulate<T>>
void chunk_in_runs(const Backward<kCentred, kAdd, T, R, W> &b, int64_t begin, int64_t end, A *sums, int64_t n,
                   bool with_dbias) {
  constexpr int64_t kRun = 256;
  const int64_t n_sums = with_dbias ? 2 * n : n;
  auto chunk = [&](int64_t begin, int64_t end, A *to) {
    if (to) std::memset(to, 0, n_sums * sizeof(A));
    b.chunk(begin, end, to, to && with_dbias ? to + n : nullptr);
  };
  A *run = sums && end - begin > kRun ? static_cast<A *>(thread_scratch(n_sums * sizeof(A))) : nullptr;
  if (!run) return chunk(begin, end, sums);  // a single run, or out of memory: a larger rounding error
  std::memset(sums, 0, n_sums * sizeof(A));
  for (int64_t i = begin; i < end; i += kRun) {
    chunk(i, end - i < kRun ? end : i + kRun, run);
    sweep<A>(n_sums, [=](int64_t j, auto part) { store(sums + j, load(sums + j, part) + load(run + j, part), part); });
  }
}

// `rows`: of each line.
template <bool kCentred, bool kAdd, typename T, typename R, typename W, typename A = Accumulate<T>>
void norm_backward_loop(const Backward<kCentred, kAdd, T, R, W> &b, W *dweight, W *dbias, A *partial, int64_t rows) {
  const int64_t n = b.affine.lines * b.n;
  const int64_t max_chunks = partial_rows(rows, n);  // each has a row of partial sums in the workspace
  int64_t chunks = ceil_div(rows * n, kGrain);
  chunks = chunks > max_chunks ? max_chunks : chunks;
  parallel(chunks, [=](int64_t c) {
    const int64_t begin = rows * c / chunks, end = rows * (c + 1) / chunks;
    chunk_in_runs(b, begin, end, partial ? partial + c * 2 * n : nullptr, n, kCentred || dbias);
  });
  if (dweight || dbias) sum_partials(partial, chunks, n, dweight, dbias);
}

// -------------------------------------------------------------------------------------------------------- launchers

template <class Op>
Status norm_cpu(const Op &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &x = in[Op::kX], &residual = slot<Op::kResidual>(in), &weight = in[Op::kWeight];
  const Tensor &y = out[Op::kY], &h = slot<Op::kH>(out);
  const auto run = [&](auto of_x, auto of_residual, auto of_weight) {
    using T = decltype(of_x);
    using R = decltype(of_residual);
    using W = decltype(of_weight);
    const int64_t rows = op.rows(x), n = op.cols();
    const Affine<W> affine{weight.as<W>(), in[Op::kBias].template as<W>(),
                           static_cast<Accumulate<W>>(op.weight_offset(weight)), op.weight_rows(weight)};
    const bool aligned = !h || (sizeof(T) == sizeof(R) && same_alignment(y.data, h.data));
    Forward<Op::kCentred, Op::kAdd, T, R, W> f{{x.as<T>(), residual.as<R>()},
                                               affine,
                                               y.as<T>(),
                                               h.as<R>(),
                                               out[Op::kStatsOut].template as<Accumulate<T>>(),
                                               n,
                                               op.eps(x.dtype),
                                               worth_streaming(rows * n * sizeof(T)) && aligned};
    parallel_pieces(rows, rows_per_task(rows, n), [=](int64_t begin, int64_t end) { f.rows(begin, end); });
    return kOk;
  };
  return dispatch_floating(x.dtype, [&](auto of_x) {
    using T = decltype(of_x);
    return dispatch_wider<T>(weight.dtype, [&](auto of_weight) {
      if constexpr (!Op::kAdd) return run(of_x, of_x, of_weight);
      else return dispatch_wider<T>(residual.dtype, [&](auto r) { return run(of_x, r, of_weight); });
    });
  });
}

template <class Op>
Status norm_backward_cpu(const Op &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &dy = in[Op::kDy], &x = in[Op::kX], &weight = in[Op::kWeight];
  const Tensor &dweight = out[Op::kDweight], &dbias = out[Op::kDbias], &work = out[Op::kWork];
  const bool sums = dweight || dbias;
  if (sums && !work) return fail(kConventionMisused, "%s: workspace is missing", Op::name);
  const auto run = [&](auto of_dy, auto of_x, auto of_weight) {
    using T = decltype(of_dy);
    using R = decltype(of_x);
    using W = decltype(of_weight);
    using A = Accumulate<T>;
    const Tensor &dx = out[Op::kDx], &dresidual = slot<Op::kDresidual>(out);
    const Affine<W> affine{weight.as<W>(), nullptr, static_cast<Accumulate<W>>(op.weight_offset(weight)),
                           op.weight_rows(weight)};
    Backward<Op::kCentred, Op::kAdd, T, R, W> b{dy.as<T>(),
                                                slot<Op::kDh>(in).template as<R>(),
                                                x.as<R>(),
                                                affine,
                                                in[Op::kStatsIn].template as<A>(),
                                                dx.as<T>(),
                                                dresidual.as<R>(),
                                                op.cols(),
                                                op.eps(x.dtype),
                                                dx && !dresidual && worth_streaming(dx.size() * sizeof(T))};
    norm_backward_loop(b, dweight.as<W>(), dbias.as<W>(), sums ? work.as<A>() : nullptr, op.rows_per_line(x, weight));
    return kOk;
  };
  return dispatch_floating(dy.dtype, [&](auto of_dy) {
    using T = decltype(of_dy);
    return dispatch_wider<T>(weight.dtype, [&](auto of_weight) {
      if constexpr (!Op::kAdd) return run(of_dy, of_dy, of_weight);
      else return dispatch_wider<T>(x.dtype, [&](auto of_x) { return run(of_dy, of_x, of_weight); });
    });
  });
}

}  // namespace AOT_ISA
}  // namespace aot
