#include "layer_norm.h"

#include "cpu/entry.h"
#include "cpu/parallel.h"

namespace aot {
inline namespace AOT_ISA {

// ------------------------------------------------------------------------------------------------ loops, forward

template <typename A>
struct Moments {
  A mean, rstd;
  A rest;  // what rounding left out of the mean
};

// f(begin, n) for the blocks of a row. Sums over a block are added up in double: in a long row float would lose them.
template <class F>
AOT_INLINE void for_blocks(int64_t n, F f) {
  constexpr int64_t block = 4096;
  for (int64_t i = 0; i < n; i += block) f(i, n - i < block ? n - i : block);
}

template <typename T>
double sum_of_4(const Vec<T> (&s)[4]) {
  return sum<Accumulate<T>>((s[0] + s[1]) + (s[2] + s[3]));
}

// In two passes over the row, which stays in a cache. The second fetches the next row meanwhile, since it does not use
// the memory itself.
template <typename T, typename A = Accumulate<T>>
Moments<A> row_moments(const T *x, const T *next, int64_t n, double eps) {
  const double inverse_n = 1. / n;
  double sum_x = 0, sum_d = 0, sum_d2 = 0;
  for_blocks(n, [&](int64_t begin, int64_t n) {
    Vec<T> s[4] = {};
    sweep_sums<T>(n, [&](int64_t j, auto part, int k) { s[k] += load(x + begin + j, part); });
    sum_x += sum_of_4<T>(s);
  });
  const A mean = sum_x * inverse_n;
  for_blocks(n, [&](int64_t begin, int64_t n) {
    Vec<T> d1[4] = {}, d2[4] = {};
    sweep_sums<T>(n, [&](int64_t j, auto part, int k) {
      __builtin_prefetch(next + begin + j);
      Vec<T> d = keep<T>(load(x + begin + j, part) - mean, part);
      d1[k] += d, d2[k] += d * d;
    });
    sum_d += sum_of_4<T>(d1), sum_d2 += sum_of_4<T>(d2);
  });
  const double rest = sum_d * inverse_n, var = sum_d2 * inverse_n - rest * rest;
  return {mean, static_cast<A>(1 / __builtin_sqrt((var < 0 ? 0 : var) + eps)), static_cast<A>(rest)};
}

template <typename T, typename A = Accumulate<T>>
void layer_norm_row(const T *x, const T *weight, const T *bias, T *y, int64_t n, Moments<A> m, bool stream) {
  const Vec<T> one = Vec<T>{} + 1;
  auto step = [=](int64_t j, auto part) {
    Vec<T> v = (load(x + j, part) - m.mean) * m.rstd - m.rest * m.rstd;
    v = v * (weight ? load(weight + j, part) : one) + (bias ? load(bias + j, part) : Vec<T>{});
    store(y + j, v, part);
  };
  stream ? sweep_stream(y, n, step) : sweep<T>(n, step);
}

template <typename T, typename A = Accumulate<T>>
void layer_norm_loop(const T *x, const T *weight, const T *bias, T *y, A *stats, int64_t rows, int64_t n, double eps) {
  const bool stream = streams(rows * n * sizeof(T));
  const int64_t piece = n < kGrain ? kGrain / (n > 0 ? n : 1) : 1;
  parallel_pieces(rows, piece, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const T *next = x + (i + 1 < end ? i + 1 : i) * n;
      const Moments<A> m = row_moments(x + i * n, next, n, eps);
      layer_norm_row(x + i * n, weight, bias, y + i * n, n, m, stream);
      if (stats) stats[2 * i] = m.mean + m.rest, stats[2 * i + 1] = m.rstd;
    }
    if (stream) end_stream();
  });
}

// ----------------------------------------------------------------------------------------------- loops, backward

template <typename T, typename A = Accumulate<T>>
struct Backward {
  const T *dy, *x, *weight;
  const A *stats;  // null: computed again
  T *dx;
  int64_t n;
  double eps;
  bool stream;

  // The R rows from i on, of a chunk up to end; adds them to the sums, dweight and dbias, of n elements each, unless
  // they are null.
  template <int R>
  void rows(int64_t i, int64_t end, A *dweight, A *dbias) const {
    const Vec<T> one = Vec<T>{} + 1;
    const T *dy = this->dy + i * n, *x = this->x + i * n, *weight = this->weight;
    const int64_t n = this->n;
    A mean[R], rstd[R];
    for (int r = 0; r < R; ++r) {
      const int64_t k = 2 * (i + r);
      const Moments<A> m = stats ? Moments<A>{stats[k], stats[k + 1], 0} : row_moments(x + r * n, x + r * n, n, eps);
      mean[r] = m.mean + m.rest, rstd[r] = m.rstd;
    }

    // 1. sums over each row, and over the rows
    double c1[R] = {}, c2[R] = {};
    for_blocks(n, [&](int64_t begin, int64_t n_block) {
      Vec<T> g1[R] = {}, g2[R] = {};
      sweep<T>(n_block, [&](int64_t i, auto part) {
        const int64_t j = begin + i;
        Vec<T> w = weight ? load(weight + j, part) : one, sum1{}, sum2{};
        for (int r = 0; r < R; ++r) {
          Vec<T> d = load(dy + r * n + j, part), xhat = keep<T>((load(x + r * n + j, part) - mean[r]) * rstd[r], part);
          sum1 += d, sum2 += d * xhat;
          g1[r] += d * w, g2[r] += d * w * xhat;
        }
        if (dweight) store(dweight + j, load(dweight + j, part) + sum2, part);
        if (dbias) store(dbias + j, load(dbias + j, part) + sum1, part);
      });
      for (int r = 0; r < R; ++r) c1[r] += sum<A>(g1[r]), c2[r] += sum<A>(g2[r]);
    });
    if (!this->dx) return;

    // 2. dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), while the next rows are fetched
    const int64_t next = i + 2 * R <= end ? R * n : 0;
    for (int r = 0; r < R; ++r) {
      const A mean_g = c1[r] / n, mean_gx = c2[r] / n, mean_r = mean[r], rstd_r = rstd[r];
      T *dx = this->dx + (i + r) * n;
      auto step = [=](int64_t j, auto part) {
        __builtin_prefetch(dy + next + r * n + j);
        __builtin_prefetch(x + next + r * n + j);
        Vec<T> g = load(dy + r * n + j, part) * (weight ? load(weight + j, part) : one);
        Vec<T> xhat = (load(x + r * n + j, part) - mean_r) * rstd_r;
        store(dx + j, rstd_r * (g - mean_g - xhat * mean_gx), part);
      };
      stream ? sweep_stream(dx, n, step) : sweep<T>(n, step);
    }
  }

  void chunk(int64_t begin, int64_t end, A *dweight, A *dbias) const {
    int64_t i = begin;
    for (; i + 4 <= end; i += 4) rows<4>(i, end, dweight, dbias);
    for (; i < end; ++i) rows<1>(i, end, dweight, dbias);
    if (stream) end_stream();
  }
};

// The sums of the workspace's rows, each a pair of n elements, in order.
template <typename T, typename A = Accumulate<T>>
void sum_partials(const A *partial, int64_t chunks, int64_t n, T *dweight, T *dbias) {
  parallel_pieces(n, kGrain / 16, [=](int64_t begin, int64_t end) {
    auto step = [=](const A *p, T *sums, int64_t j, auto part) {
      Vec<T> s{};
      for (int64_t c = 0; c < chunks; ++c) s += load(p + c * 2 * n + j, part);
      store(sums + j, s, part);
    };
    sweep<T>(end - begin, [=](int64_t j, auto part) {
      if (dweight) step(partial, dweight, begin + j, part);
      if (dbias) step(partial + n, dbias, begin + j, part);
    });
  });
}

template <typename T, typename A = Accumulate<T>>
void layer_norm_backward_loop(const Backward<T> &b, T *dweight, T *dbias, A *partial, int64_t rows) {
  // As many chunks as keep a few threads busy: each costs a row of the workspace.
  const int64_t n = b.n, most = partial_rows(rows, n) < 32 ? partial_rows(rows, n) : 32;
  int64_t chunks = ceil_div(rows * n, kGrain);
  chunks = chunks > most ? most : chunks;
  parallel(chunks, [=](int64_t c) {
    A *sums = partial ? partial + c * 2 * n : nullptr;
    if (sums) std::memset(sums, 0, 2 * n * sizeof(A));
    b.chunk(rows * c / chunks, rows * (c + 1) / chunks, sums, sums ? sums + n : nullptr);
  });
  if (dweight || dbias) sum_partials(partial, chunks, n, dweight, dbias);
}

// ----------------------------------------------------------------------------------------------------- launchers

inline Status layer_norm_cpu(const LayerNorm &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &x = in[0], &weight = in[1], &bias = in[2], &y = out[0], &stats = out[1];
  return dispatch_floating(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    layer_norm_loop(x.as<T>(), weight.as<T>(), bias.as<T>(), y.as<T>(), stats.as<Accumulate<T>>(), op.rows(x),
                    op.cols(), op.eps);
    return kOk;
  });
}

inline Status layer_norm_backward_cpu(const LayerNormBackward &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &dy = in[0], &x = in[1], &weight = in[2], &stats = in[3];
  const Tensor &dx = out[0], &dweight = out[1], &dbias = out[2], &work = out[3];
  if ((dweight || dbias) && !work) return fail(kConventionMisused, "%s: output workspace is missing", op.name);
  return dispatch_floating(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    using A = Accumulate<T>;
    const bool stream = dx && streams(dx.size() * sizeof(T));
    Backward<T> b{dy.as<T>(), x.as<T>(), weight.as<T>(), stats.as<A>(), dx.as<T>(), op.cols(), op.eps, stream};
    layer_norm_backward_loop(b, dweight.as<T>(), dbias.as<T>(), dweight || dbias ? work.as<A>() : nullptr, op.rows(x));
    return kOk;
  });
}

}  // namespace AOT_ISA
}  // namespace aot

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::LayerNorm, aot_layer_norm_cpu, aot::layer_norm_cpu)
AOT_CPU_ENTRY(aot::LayerNormBackward, aot_layer_norm_backward_cpu, aot::layer_norm_backward_cpu)
