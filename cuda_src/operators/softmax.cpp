#include "softmax.h"

#include "cpu/entry.h"
#include "cpu/lanes.h"
#include "cpu/rows.h"
#include "cpu/softmax.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// ------------------------------------------------------------------------------------------ loops along the last axis

// `next` is prefetched. `buffer` is row_buffer()'s.
template <typename T, typename A = Accumulate<T>>
void softmax_row(const T *x, const T *next, T *y, A *buffer, int64_t n, bool stream) {
  auto write = [=](auto e, A scale) {
    auto step = [=](int64_t j, auto part) { store(y + j, e(j, part) * scale, part); };
    stream ? sweep_stream(y, n, step) : sweep<T>(n, step);
  };
  if (buffer) {
    auto s = exponentials<false>(x, next, n, [=](int64_t j, Vec<T> e, auto part) { store(buffer + j, e, part); });
    write([=](int64_t j, auto part) { return load(buffer + j, part); }, s.scale);
  } else {
    auto s = exponentials<false>(x, next, n, [](int64_t, Vec<T>, auto) {});
    write([=](int64_t j, auto part) { return exp_in_units<T>(load(x + j, part) - s.max); }, s.scale);
  }
}

// The most elements of a short row: as many of these at once as a vector has lanes have their maxima and sums computed.
template <typename T>
constexpr int64_t kShortRow = 4 * kLanes<T>;

template <typename T, typename A = Accumulate<T>>
[[gnu::noinline]] void short_softmax(const T *x, T *y, int64_t rows, int64_t n) {
  A exponentials[kLanes<T> * kShortRow<T>];
  Vec<T> of_row[kLanes<T>];
  const Vec<T> lowest = Vec<T>{} - static_cast<A>(__builtin_inf());
  for (int64_t r = rows; r < kLanes<T>; ++r) of_row[r] = Vec<T>{};
  each_4_rows<T>(rows, [&](int64_t r, auto k) AOT_INLINED {
    Vec<T> top[k];
    for (int i = 0; i < k; ++i) top[i] = lowest;
    sweep_short<T>(n, [&](int64_t j, auto part) AOT_INLINED {
      for (int i = 0; i < k; ++i) {
        Vec<T> v = load(x + (r + i) * n + j, part);
        if constexpr (std::is_same_v<decltype(part), Part>) v += keep<T>(lowest, part) == 0 ? lowest : Vec<T>{};
        top[i] = v > top[i] ? v : top[i];
      }
    });
    for (int i = 0; i < k; ++i) of_row[r + i] = top[i];
  });
  const Vec<T> max = maxima<T>(of_row);
  each_4_rows<T>(rows, [&](int64_t r, auto k) AOT_INLINED {
    Vec<T> total[k] = {};
    sweep_short<T>(n, [&](int64_t j, auto part) AOT_INLINED {
      for (int i = 0; i < k; ++i) {
        const int64_t at = (r + i) * n + j;
        const Vec<T> e = keep<T>(exp_in_units<T>(load(x + at, part) - max[r + i]), part);
        total[i] += e;
        store(exponentials + at, e, part);
      }
    });
    for (int i = 0; i < k; ++i) of_row[r + i] = total[i];
  });
  const Vec<T> scale = 1 / sums<T>(of_row);
  for (int64_t r = 0; r < rows; ++r)
    sweep_short<T>(n, [&, scale = scale[r]](int64_t j, auto part)
                          AOT_INLINED { store(y + r * n + j, load(exponentials + r * n + j, part) * scale, part); });
}

template <typename T>
[[gnu::noinline]] void short_softmax_backward(const T *dy, const T *y, T *dx, int64_t rows, int64_t n) {
  Vec<T> of_row[kLanes<T>];
  for (int64_t r = rows; r < kLanes<T>; ++r) of_row[r] = Vec<T>{};
  each_4_rows<T>(rows, [&](int64_t r, auto k) AOT_INLINED {
    Vec<T> total[k] = {};
    sweep_short<T>(n, [&](int64_t j, auto part) AOT_INLINED {
      for (int i = 0; i < k; ++i) total[i] += load(dy + (r + i) * n + j, part) * load(y + (r + i) * n + j, part);
    });
    for (int i = 0; i < k; ++i) of_row[r + i] = total[i];
  });
  const Vec<T> all = sums<T>(of_row);
  for (int64_t r = 0; r < rows; ++r)
    sweep_short<T>(n, [&, c = all[r]](int64_t j, auto part) AOT_INLINED {
      const int64_t at = r * n + j;
      store(dx + at, load(y + at, part) * (load(dy + at, part) - c), part);
    });
}

// f(i, rows) for groups of short rows.
template <typename T, class F>
void each_group(int64_t rows, int64_t n, F f) {
  parallel_pieces(rows, rows_per_task(rows, n), [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += kLanes<T>) f(i, end - i < kLanes<T> ? end - i : kLanes<T>);
  });
}

template <typename T, typename A = Accumulate<T>>
void softmax_loop(const T *x, T *y, int64_t rows, int64_t n) {
  const bool stream = worth_streaming(rows * n * sizeof(T));
  if (n <= kShortRow<T> && !stream)
    return each_group<T>(rows, n, [=](int64_t i, int64_t rows) { short_softmax(x + i * n, y + i * n, rows, n); });
  parallel_pieces(rows, rows_per_task(rows, n), [=](int64_t begin, int64_t end) {
    A *buffer = row_buffer<T>(n);
    for (int64_t i = begin; i < end; ++i) {
      const T *next = x + (i + 1 < end ? i + 1 : i) * n;
      softmax_row(x + i * n, next, y + i * n, buffer, n, stream);
    }
    if (stream) end_stream();
  });
}

// `next`: the distance to the row to prefetch.
template <typename T>
void softmax_backward_row(const T *dy, const T *y, T *dx, int64_t next, int64_t n, bool stream) {
  const auto c = static_cast<Accumulate<T>>(
      sum_row<T>(n, [=](int64_t j, auto part) { return load(dy + j, part) * load(y + j, part); }));
  auto step = [=](int64_t j, auto part) {
    __builtin_prefetch(dy + next + j);
    __builtin_prefetch(y + next + j);
    store(dx + j, load(y + j, part) * (load(dy + j, part) - c), part);
  };
  stream ? sweep_stream(dx, n, step) : sweep<T>(n, step);
}

template <typename T>
void softmax_backward_loop(const T *dy, const T *y, T *dx, int64_t rows, int64_t n) {
  const bool stream = worth_streaming(rows * n * sizeof(T));
  if (n <= kShortRow<T> && !stream)
    return each_group<T>(
        rows, n, [=](int64_t i, int64_t rows) { short_softmax_backward(dy + i * n, y + i * n, dx + i * n, rows, n); });
  parallel_pieces(rows, rows_per_task(rows, n), [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      softmax_backward_row(dy + i * n, y + i * n, dx + i * n, i + 1 < end ? n : 0, n, stream);
    if (stream) end_stream();
  });
}

// ------------------------------------------------------------------------------------------- loops along another axis

// x is (outer, n, inner). Adjacent columns along inner are processed in groups: large enough for full cache lines,
// small enough for a group's maxima and sums to stay in the L1 cache.
template <typename T>
constexpr int64_t kColumns = 16 * kLanes<T>;

// f(at, width) for each group of `width` columns, the first of which begins at element `at`.
template <typename T, class F>
void each_column_group(int64_t outer, int64_t n, int64_t inner, F f) {
  const int64_t groups = ceil_div(inner, kColumns<T>);
  parallel_pieces(outer * groups, rows_per_task(outer * groups, n * kColumns<T>), [=](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) {
      const int64_t column = g % groups * kColumns<T>, left = inner - column;
      f(g / groups * n * inner + column, left < kColumns<T> ? left : kColumns<T>);
    }
  });
}

// sum[j] = the sum of term(i, j, part) for i < n, from partial sums of kRun terms, which limits rounding errors.
template <typename T, typename A, class Term>
AOT_INLINE void sum_axis(int64_t n, int64_t width, A *sum, Term term) {
  constexpr int64_t kRun = 256;
  A run[kColumns<T>];
  for (int64_t j = 0; j < width; ++j) sum[j] = 0;
  for (int64_t i = 0; i < n;) {
    const int64_t end = n - i < kRun ? n : i + kRun;
    for (int64_t j = 0; j < width; ++j) run[j] = 0;
    for (; i < end; ++i)
      sweep<T>(width, [&](int64_t j, auto part) { store(run + j, load(run + j, part) + term(i, j, part), part); });
    for (int64_t j = 0; j < width; ++j) sum[j] += run[j];
  }
}

template <typename T, typename A = Accumulate<T>>
void softmax_axis_loop(const T *x, T *y, int64_t outer, int64_t n, int64_t inner) {
  each_column_group<T>(outer, n, inner, [=](int64_t at, int64_t width) {
    A max[kColumns<T>], sum[kColumns<T>];
    sweep<T>(width, [&](int64_t j, auto part) { store(max + j, load(x + at + j, part), part); });
    for (int64_t i = 1; i < n; ++i)
      sweep<T>(width, [&, row = x + at + i * inner](int64_t j, auto part) {
        Vec<T> v = load(row + j, part), m = load(max + j, part);
        store(max + j, v > m ? v : m, part);
      });
    sum_axis<T>(n, width, sum, [&](int64_t i, int64_t j, auto part) {
      return exp_in_units<T>(load(x + at + i * inner + j, part) - load(max + j, part));
    });
    for (int64_t i = 0; i < n; ++i)
      sweep<T>(width, [&, from = x + at + i * inner, to = y + at + i * inner](int64_t j, auto part) {
        store(to + j, exp_in_units<T>(load(from + j, part) - load(max + j, part)) / load(sum + j, part), part);
      });
  });
}

template <typename T, typename A = Accumulate<T>>
void softmax_backward_axis_loop(const T *dy, const T *y, T *dx, int64_t outer, int64_t n, int64_t inner) {
  each_column_group<T>(outer, n, inner, [=](int64_t at, int64_t width) {
    A sum[kColumns<T>];
    sum_axis<T>(n, width, sum, [&](int64_t i, int64_t j, auto part) {
      const int64_t from = at + i * inner + j;
      return load(dy + from, part) * load(y + from, part);
    });
    for (int64_t i = 0; i < n; ++i)
      sweep<T>(width, [&, row = at + i * inner](int64_t j, auto part) {
        store(dx + row + j, load(y + row + j, part) * (load(dy + row + j, part) - load(sum + j, part)), part);
      });
  });
}

// ----------------------------------------------------------------------------------------------------- launchers

Status softmax_cpu(const Softmax &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &x = in[0], &y = out[0];
  const Softmax::Axes a = op.axes(x);
  return dispatch_floating(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    a.inner == 1 ? softmax_loop(x.as<const T>(), y.as<T>(), a.outer, a.n)
                 : softmax_axis_loop(x.as<const T>(), y.as<T>(), a.outer, a.n, a.inner);
    return kOk;
  });
}

Status softmax_backward_cpu(const SoftmaxBackward &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &dy = in[0], &y = in[1], &dx = out[0];
  const SoftmaxBackward::Axes a = op.axes(y);
  return dispatch_floating(y.dtype, [&](auto zero) {
    using T = decltype(zero);
    a.inner == 1 ? softmax_backward_loop(dy.as<const T>(), y.as<const T>(), dx.as<T>(), a.outer, a.n)
                 : softmax_backward_axis_loop(dy.as<const T>(), y.as<const T>(), dx.as<T>(), a.outer, a.n, a.inner);
    return kOk;
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::Softmax, aot_softmax_cpu, aot::softmax_cpu)
AOT_CPU_ENTRY(aot::SoftmaxBackward, aot_softmax_backward_cpu, aot::softmax_backward_cpu)
