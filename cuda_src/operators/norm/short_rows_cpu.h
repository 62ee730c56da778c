// Norms of short rows on the CPU: what is one number of a row is computed for as many rows at once as a vector has
// lanes. T is the dtype of y, dy and dx, R that of the rows that are normalized.
#pragma once
#include "cpu/lanes.h"

namespace aot {
inline namespace AOT_ISA {

// The most elements of a short row, and as many rows at once.
constexpr int64_t kShortRow = 256;
template <typename T>
constexpr int64_t kGroup = kLanes<T>;

// The statistics of a group's rows.
template <typename A>
struct ShortMoments {
  static constexpr int kRows = kLanes<A>;
  A mean[kRows], rstd[kRows];
  A mean_error[kRows];  // to be added to the mean: its rounding error
};

// A row of parameters, in the type that is computed in; without one its elements change nothing.
template <typename A>
struct ShortParameter {
  A data[kShortRow];

  template <class Load>  // load(j, part)
  void fill(int64_t n, Load load) {
    sweep_short<A>(n, [&](int64_t j, auto part) { store(data + j, load(j, part), part); });
  }
};

// As row_moments, of `rows` rows of n elements, of which each begins `step` elements behind the one before.
template <bool kCentred, typename R, typename A = Accumulate<R>>
[[gnu::noinline]] void short_moments(const R *x, int64_t rows, int64_t step, int64_t n, double eps,
                                     ShortMoments<A> *m) {
  constexpr int kRows = kGroup<R>;
  const double inverse_n = 1. / n;
  Vec<R> d1[kRows], d2[kRows];
  for (int64_t r = rows; r < kRows; ++r) d1[r] = d2[r] = Vec<R>{};
  if constexpr (kCentred) {
    each_4_rows<R>(rows, [&](int64_t r, auto k) AOT_INLINED {
      Vec<R> of_row[k] = {};
      sweep_short<R>(n, [&](int64_t j, auto part) AOT_INLINED {
        for (int i = 0; i < k; ++i) of_row[i] += load(x + (r + i) * step + j, part);
      });
      for (int i = 0; i < k; ++i) d1[r + i] = of_row[i];
    });
    const Vec<R> sum_x = sums<R>(d1);
    for (int r = 0; r < kRows; ++r) m->mean[r] = static_cast<A>(sum_x[r] * inverse_n);
  }
  each_4_rows<R>(rows, [&](int64_t r, auto k) AOT_INLINED {
    Vec<R> of_row[k] = {}, squares[k] = {};
    sweep_short<R>(n, [&](int64_t j, auto part) AOT_INLINED {
      for (int i = 0; i < k; ++i) {
        Vec<R> d = load(x + (r + i) * step + j, part);
        if constexpr (kCentred) d = keep<R>(d - m->mean[r + i], part), of_row[i] += d;
        squares[i] += d * d;
      }
    });
    for (int i = 0; i < k; ++i) d1[r + i] = of_row[i], d2[r + i] = squares[i];
  });
  A sum_d[kRows] = {}, sum_d2[kRows];
  if constexpr (kCentred) store(sum_d, sums<R>(d1));
  store(sum_d2, sums<R>(d2));
  for (int r = 0; r < kRows; ++r) {
    const double mean_error = sum_d[r] * inverse_n, var = sum_d2[r] * inverse_n - mean_error * mean_error;
    const double rstd = 1 / __builtin_sqrt((var < 0 ? 0 : var) + eps);
    if constexpr (!kCentred) m->mean[r] = 0;
    m->rstd[r] = static_cast<A>(kCentred ? rstd + 0 * var : rstd), m->mean_error[r] = static_cast<A>(mean_error);
  }
}

// y of adjacent rows.
template <bool kCentred, typename T, typename R, typename A = Accumulate<T>>
[[gnu::noinline]] void short_forward(const R *x, T *y, int64_t rows, int64_t n, const ShortMoments<A> &m,
                                     const ShortParameter<A> &scale, const ShortParameter<A> &shift, bool stream) {
  for (int64_t r = 0; r < rows; ++r, x += n, y += n) {
    const A mean = m.mean[r], rstd = m.rstd[r], error = m.mean_error[r] * m.rstd[r];
    const auto step = [=, &scale, &shift](int64_t j, auto part) AOT_INLINED {
      Vec<T> v = load(x + j, part);
      if constexpr (kCentred) v = (v - mean) * rstd - error;
      else v *= rstd;
      store(y + j, v * load(scale.data + j, part) + load(shift.data + j, part), part);
    };
    stream ? sweep_stream(y, n, step) : sweep_short<T>(n, step);
  }
}

// The sums of a group's rows of g and g * xhat, which the means become, and those of its columns, which are added to
// dweight and dbias.
template <bool kCentred, typename T, typename R, typename A = Accumulate<T>>
[[gnu::noinline]] void short_sums(const T *dy, const R *x, int64_t rows, int64_t step, int64_t n,
                                  const ShortMoments<A> &m, const ShortParameter<A> &scale, A *dweight, A *dbias,
                                  A *mean_g, A *mean_gx) {
  constexpr int kRows = kGroup<T>;
  Vec<T> g1[kRows], g2[kRows];
  for (int64_t r = rows; r < kRows; ++r) g1[r] = g2[r] = Vec<T>{};
  each_4_rows<T>(rows, [&](int64_t r, auto k) AOT_INLINED {
    Vec<T> of_g[k] = {}, of_gx[k] = {};
    sweep_short<T>(n, [&](int64_t j, auto part) AOT_INLINED {
      Vec<T> w = load(scale.data + j, part), sum1{}, sum2{};
      for (int i = 0; i < k; ++i) {
        const int64_t at = (r + i) * step + j;
        Vec<T> d = load(dy + at, part), xhat = load(x + at, part);
        if constexpr (kCentred) xhat = keep<T>((xhat - m.mean[r + i]) * m.rstd[r + i], part);
        else xhat *= m.rstd[r + i];
        sum1 += d, sum2 += d * xhat;
        of_g[i] += d * w, of_gx[i] += d * w * xhat;
      }
      store(dweight + j, load(dweight + j, part) + sum2, part);
      store(dbias + j, load(dbias + j, part) + sum1, part);
    });
    for (int i = 0; i < k; ++i) g1[r + i] = of_g[i], g2[r + i] = of_gx[i];
  });
  store(mean_g, kCentred ? sums<T>(g1) / static_cast<A>(n) : Vec<T>{});
  store(mean_gx, sums<T>(g2) / static_cast<A>(n));
}

// dx and dresidual: the gradient of a group's rows, plus dh. Each may be null.
template <bool kCentred, bool kAdd, typename T, typename R, typename A = Accumulate<T>>
[[gnu::noinline]] void short_dx(const T *dy, const R *x, const R *dh, T *dx, R *dresidual, int64_t rows, int64_t step,
                                int64_t n, const ShortMoments<A> &m, const ShortParameter<A> &scale, const A *mean_g,
                                const A *mean_gx, bool stream) {
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = r * step;
    const A mean = m.mean[r], rstd = m.rstd[r], of_g = mean_g[r], of_gx = mean_gx[r];
    const auto column = [=, &scale](int64_t j, auto part) AOT_INLINED {
      const int64_t i = at + j;
      Vec<T> g = load(dy + i, part) * load(scale.data + j, part), xhat = load(x + i, part);
      if constexpr (kCentred) xhat -= mean, g -= of_g;
      Vec<T> d = rstd * (g - xhat * rstd * of_gx);
      if constexpr (kAdd) {
        if (dh) d += load(dh + i, part);
        if (dresidual) store(dresidual + i, d, part);
        if (!dx) return;
      }
      store(dx + i, d, part);
    };
    stream ? sweep_stream(dx + at, n, column) : sweep_short<T>(n, column);
  }
}

}  // namespace AOT_ISA
}  // namespace aot
