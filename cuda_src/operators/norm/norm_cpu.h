// The norms on the CPU: forward and backward loops and launchers, which each operator instantiates (norm.h).
#pragma once
#include "cpu/blas.h"
#include "cpu/entry.h"
#include "cpu/parallel.h"
#include "norm.h"

namespace aot {
inline namespace AOT_ISA {

// --------------------------------------------------------------------------------------------------------- moments

// A row to normalize: x, or x + residual rounded to the dtype.
template <typename T, bool kAdd>
struct Row {
  const T *x, *residual;

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
    if constexpr (kAdd) return widen(narrow(load(x + j, part) + load(residual + j, part), T()), T());
    else return load(x + j, part);
  }
};

template <typename A>
struct Moments {
  A mean, rstd;
  A mean_error;  // to be added to the mean: its rounding error
};

// Two passes over the row, which stays in a cache: the mean, then the squares; rms_norm needs only the second. That one
// prefetches the next row, because the memory is idle.
template <bool kCentred, typename T, bool kAdd, typename A = Accumulate<T>>
Moments<A> row_moments(Row<T, kAdd> x, Row<T, kAdd> next, int64_t n, double eps) {
  const double inverse_n = 1. / n;
  double sum_x = 0, sum_d = 0, sum_d2 = 0;
  if constexpr (kCentred)
    for_blocks(n, [&](int64_t begin, int64_t size) {
      Vec<T> s[4] = {};
      sweep_sums<T>(size, [&](int64_t j, auto part, int k) { s[k] += x(begin + j, part); });
      sum_x += sum_of_4<T>(s);
    });
  const A mean = sum_x * inverse_n;
  for_blocks(n, [&](int64_t begin, int64_t size) {
    Vec<T> d1[4] = {}, d2[4] = {};
    sweep_sums<T>(size, [&](int64_t j, auto part, int k) {
      next.prefetch(begin + j);
      if constexpr (kCentred) {
        Vec<T> d = keep<T>(x(begin + j, part) - mean, part);
        d1[k] += d, d2[k] += d * d;
      } else {
        Vec<T> v = x(begin + j, part);
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

// --------------------------------------------------------------------------------------------------- loops, forward

template <bool kCentred, bool kAdd, typename T>
struct Forward {
  using A = Accumulate<T>;
  Row<T, kAdd> x;
  const T *weight, *bias;
  T *y, *h;
  A *stats;
  int64_t n;
  double eps;
  bool stream;

  void rows(int64_t begin, int64_t end) const {
    constexpr int kStats = kCentred ? 2 : 1;
    for (int64_t i = begin; i < end; ++i) {
      const Row<T, kAdd> row = x + i * n, next = i + 1 < end ? row + n : row;
      const Moments<A> m = row_moments<kCentred>(row, next, n, eps);
      write(row, y + i * n, kAdd ? h + i * n : nullptr, m);
      if (!stats) continue;
      if (kCentred) stats[kStats * i] = m.mean + m.mean_error;
      stats[kStats * i + kStats - 1] = m.rstd;
    }
    if (stream) end_stream();
  }

 private:
  void write(Row<T, kAdd> row, T *y, T *h, Moments<A> m) const {
    const T *weight = this->weight, *bias = this->bias;
    const Vec<T> one = Vec<T>{} + 1;
    auto step = [=](int64_t j, auto part) {
      Vec<T> v = row(j, part);
      if constexpr (kAdd) store(h + j, v, part);
      if constexpr (kCentred) v = (v - m.mean) * m.rstd - m.mean_error * m.rstd;
      else v *= m.rstd;
      v = v * (weight ? load(weight + j, part) : one);
      if constexpr (kCentred) v += bias ? load(bias + j, part) : Vec<T>{};
      store(y + j, v, part);
    };
    stream ? sweep_stream(y, n, step) : sweep<T>(n, step);
  }
};

// -------------------------------------------------------------------------------------------------- loops, backward

template <bool kCentred, bool kAdd, typename T>
struct Backward {
  using A = Accumulate<T>;
  static constexpr int kStats = kCentred ? 2 : 1;
  const T *dy, *dh, *x, *weight;
  const A *stats;  // null: recomputed
  T *dx;
  int64_t n;
  double eps;
  bool stream;

  // dx of rows begin to end. Adds the rows' terms to dweight and dbias, n elements each, unless they are null.
  void chunk(int64_t begin, int64_t end, A *dweight, A *dbias) const {
    int64_t i = begin;
    for (; i + 4 <= end; i += 4) rows<4>(i, end, dweight, dbias);
    for (; i < end; ++i) rows<1>(i, end, dweight, dbias);
    if (stream) end_stream();
  }

 private:
  Moments<A> moments(int64_t i) const {
    if (stats) return {kCentred ? stats[kStats * i] : A(0), stats[kStats * i + kStats - 1], 0};
    const Row<T, false> row{x + i * n, nullptr};
    return row_moments<kCentred>(row, row, n, eps);
  }

  // R rows from i on. Prefetches the next R rows if the chunk, which ends at `end`, has them.
  template <int R>
  void rows(int64_t i, int64_t end, A *dweight, A *dbias) const {
    const Vec<T> one = Vec<T>{} + 1;
    const T *dy = this->dy + i * n, *x = this->x + i * n, *weight = this->weight;
    const int64_t n = this->n;
    A mean[R], rstd[R];
    for (int r = 0; r < R; ++r) {
      const Moments<A> m = moments(i + r);
      mean[r] = m.mean + m.mean_error, rstd[r] = m.rstd;
    }
    auto normalized = [=](const T *p, A mean, A rstd, auto part) {
      if constexpr (kCentred) return (load(p, part) - mean) * rstd;
      else return load(p, part) * rstd;
    };

    // 1. each row's sums of g and g * xhat; the columns' sums, dweight and dbias
    double c1[R] = {}, c2[R] = {};
    for_blocks(n, [&](int64_t begin, int64_t size) {
      Vec<T> g1[R] = {}, g2[R] = {};
      sweep<T>(size, [&](int64_t i, auto part) {
        const int64_t j = begin + i;
        Vec<T> w = weight ? load(weight + j, part) : one, sum1{}, sum2{};
        for (int r = 0; r < R; ++r) {
          Vec<T> d = load(dy + r * n + j, part), xhat = normalized(x + r * n + j, mean[r], rstd[r], part);
          if constexpr (kCentred) xhat = keep<T>(xhat, part);
          sum1 += d, sum2 += d * xhat;
          g1[r] += d * w, g2[r] += d * w * xhat;
        }
        if (dweight) store(dweight + j, load(dweight + j, part) + sum2, part);
        if (kCentred && dbias) store(dbias + j, load(dbias + j, part) + sum1, part);
      });
      for (int r = 0; r < R; ++r) c1[r] += kCentred ? sum<A>(g1[r]) : A(0), c2[r] += sum<A>(g2[r]);
    });
    if (!this->dx) return;

    // 2. dx, and prefetching
    const int64_t next = i + 2 * R <= end ? R * n : 0;
    const T *dh = kAdd ? this->dh + i * n : nullptr;
    for (int r = 0; r < R; ++r) {
      const A mean_g = c1[r] / n, mean_gx = c2[r] / n, mean_r = mean[r], rstd_r = rstd[r];
      T *dx = this->dx + (i + r) * n;
      auto step = [=](int64_t j, auto part) {
        __builtin_prefetch(dy + next + r * n + j);
        __builtin_prefetch(x + next + r * n + j);
        Vec<T> g = load(dy + r * n + j, part) * (weight ? load(weight + j, part) : one);
        Vec<T> xhat = normalized(x + r * n + j, mean_r, rstd_r, part);
        if constexpr (kCentred) g -= mean_g;
        Vec<T> d = rstd_r * (g - xhat * mean_gx);
        if constexpr (kAdd) d += load(dh + r * n + j, part);
        store(dx + j, d, part);
      };
      stream ? sweep_stream(dx, n, step) : sweep<T>(n, step);
    }
  }
};

// Adds up the workspace's partial sums, (chunks, kSums, n), in order.
template <int kSums, typename T, typename A = Accumulate<T>>
void sum_partials(const A *partial, int64_t chunks, int64_t n, T *dweight, T *dbias) {
  parallel_pieces(n, kGrain / 16, [=](int64_t begin, int64_t end) {
    auto step = [=](const A *p, T *sums, int64_t j, auto part) {
      Vec<T> s{};
      for (int64_t c = 0; c < chunks; ++c) s += load(p + c * kSums * n + j, part);
      store(sums + j, s, part);
    };
    sweep<T>(end - begin, [=](int64_t j, auto part) {
      if (dweight) step(partial, dweight, begin + j, part);
      if (kSums > 1 && dbias) step(partial + n, dbias, begin + j, part);
    });
  });
}

// A chunk of rows. dweight and dbias are summed over runs of kRun rows first, which limits rounding errors.
template <bool kCentred, bool kAdd, typename T, typename A = Accumulate<T>>
void chunk_in_runs(const Backward<kCentred, kAdd, T> &b, int64_t begin, int64_t end, A *sums, int64_t n_sums) {
  constexpr int64_t kRun = 256;
  auto chunk = [&](int64_t begin, int64_t end, A *to) {
    if (to) std::memset(to, 0, n_sums * sizeof(A));
    b.chunk(begin, end, to, to && kCentred ? to + b.n : nullptr);
  };
  A *run = sums && end - begin > kRun ? static_cast<A *>(thread_scratch(n_sums * sizeof(A))) : nullptr;
  if (!run) return chunk(begin, end, sums);  // a single run, or out of memory: a larger rounding error
  std::memset(sums, 0, n_sums * sizeof(A));
  for (int64_t i = begin; i < end; i += kRun) {
    chunk(i, end - i < kRun ? end : i + kRun, run);
    sweep<A>(n_sums, [=](int64_t j, auto part) { store(sums + j, load(sums + j, part) + load(run + j, part), part); });
  }
}

template <bool kCentred, bool kAdd, typename T, typename A = Accumulate<T>>
void norm_backward_loop(const Backward<kCentred, kAdd, T> &b, T *dweight, T *dbias, A *partial, int64_t rows) {
  constexpr int kSums = kCentred ? 2 : 1;
  const int64_t n = b.n, max_chunks = partial_rows(rows, n);  // each has a row of partial sums in the workspace
  int64_t chunks = ceil_div(rows * n, kGrain);
  chunks = chunks > max_chunks ? max_chunks : chunks;
  parallel(chunks, [=](int64_t c) {
    const int64_t begin = rows * c / chunks, end = rows * (c + 1) / chunks;
    chunk_in_runs(b, begin, end, partial ? partial + c * kSums * n : nullptr, kSums * n);
  });
  if (dweight || dbias) sum_partials<kSums>(partial, chunks, n, dweight, dbias);
}

// -------------------------------------------------------------------------------------------------------- launchers

template <class Op>
Status norm_cpu(const Op &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &x = in[Op::kX], &y = out[Op::kY], &h = slot<Op::kH>(out);
  return dispatch_floating(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t rows = op.rows(x), n = op.cols();
    Forward<Op::kCentred, Op::kAdd, T> f{
        {x.as<T>(), slot<Op::kResidual>(in).template as<T>()},
        in[Op::kWeight].template as<T>(),
        slot<Op::kBias>(in).template as<T>(),
        y.as<T>(),
        h.as<T>(),
        out[Op::kStatsOut].template as<Accumulate<T>>(),
        n,
        op.eps(x.dtype),
        worth_streaming(rows * n * sizeof(T)) && (!h || same_alignment(y.data, h.data))};
    parallel_pieces(rows, rows_per_task(n), [=](int64_t begin, int64_t end) { f.rows(begin, end); });
    return kOk;
  });
}

template <class Op>
Status norm_backward_cpu(const Op &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &x = in[Op::kX], &dx = out[Op::kDx], &dweight = out[Op::kDweight], &dbias = slot<Op::kDbias>(out);
  const Tensor &work = out[Op::kWork];
  const bool sums = dweight || dbias;
  if (sums && !work) return fail(kConventionMisused, "%s: workspace is missing", Op::name);
  return dispatch_floating(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    using A = Accumulate<T>;
    Backward<Op::kCentred, Op::kAdd, T> b{in[Op::kDy].template as<T>(),
                                          slot<Op::kDh>(in).template as<T>(),
                                          x.as<T>(),
                                          in[Op::kWeight].template as<T>(),
                                          in[Op::kStatsIn].template as<A>(),
                                          dx.as<T>(),
                                          op.cols(),
                                          op.eps(x.dtype),
                                          dx && worth_streaming(dx.size() * sizeof(T))};
    norm_backward_loop(b, dweight.as<T>(), dbias.as<T>(), sums ? work.as<A>() : nullptr, op.rows(x));
    return kOk;
  });
}

}  // namespace AOT_ISA
}  // namespace aot
