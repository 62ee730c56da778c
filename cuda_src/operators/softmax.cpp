#include "softmax.h"

#include "cpu/entry.h"
#include "cpu/parallel.h"
#include "cpu/softmax.h"

namespace aot {
inline namespace AOT_ISA {

// ------------------------------------------------------------------------------------------ loops along the last axis

template <typename T, typename A = Accumulate<T>>
void softmax_row(const T *x, const T *next, T *y, A *buffer, int64_t n, bool stream) {
  auto write = [=](auto e, A scale) {
    auto step = [=](int64_t j, auto part) { store(y + j, e(j, part) * scale, part); };
    stream ? sweep_stream(y, n, step) : sweep<T>(n, step);
  };
  if (buffer) {
    auto s = exponentials<false>(x, next, n, [=](int64_t j, Vec<T> e, auto part) { store(buffer + j, e, part); });
    write([=](int64_t j, auto part) { return load(buffer + j, part); }, static_cast<A>(1 / s.sum));
  } else {
    auto s = exponentials<false>(x, next, n, [](int64_t, Vec<T>, auto) {});
    write([=](int64_t j, auto part) { return exp_nonpositive<T>(load(x + j, part) - s.top); },
          static_cast<A>(1 / s.sum));
  }
}

template <typename T, typename A = Accumulate<T>>
void softmax_loop(const T *x, T *y, int64_t rows, int64_t n) {
  const bool stream = streams(rows * n * sizeof(T));
  parallel_pieces(rows, rows_piece(n), [=](int64_t begin, int64_t end) {
    A *buffer = row_buffer<T>(n);
    for (int64_t i = begin; i < end; ++i) {
      const T *next = x + (i + 1 < end ? i + 1 : i) * n;
      softmax_row(x + i * n, next, y + i * n, buffer, n, stream);
    }
    if (stream) end_stream();
  });
}

template <typename T>
void softmax_backward_row(const T *dy, const T *y, T *dx, int64_t next, int64_t n, bool stream) {
  constexpr int64_t block = 4096;
  double dot = 0;
  for (int64_t begin = 0; begin < n; begin += block) {
    Vec<T> s[4] = {};
    sweep_sums<T>(n - begin < block ? n - begin : block,
                  [&](int64_t j, auto part, int k) { s[k] += load(dy + begin + j, part) * load(y + begin + j, part); });
    dot += sum<Accumulate<T>>((s[0] + s[1]) + (s[2] + s[3]));
  }
  const auto c = static_cast<Accumulate<T>>(dot);
  auto step = [=](int64_t j, auto part) {
    __builtin_prefetch(dy + next + j);
    __builtin_prefetch(y + next + j);
    store(dx + j, load(y + j, part) * (load(dy + j, part) - c), part);
  };
  stream ? sweep_stream(dx, n, step) : sweep<T>(n, step);
}

template <typename T>
void softmax_backward_loop(const T *dy, const T *y, T *dx, int64_t rows, int64_t n) {
  const bool stream = streams(rows * n * sizeof(T));
  parallel_pieces(rows, rows_piece(n), [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      softmax_backward_row(dy + i * n, y + i * n, dx + i * n, i + 1 < end ? n : 0, n, stream);
    if (stream) end_stream();
  });
}

// ------------------------------------------------------------------------------------------- loops along another axis

// f(at, width) for tiles of neighbouring columns, `at` where the first begins: so many that a row of them is a few
// lines of memory, and so few that what is kept for each stays in the first cache.
template <typename T>
constexpr int64_t kTile = 16 * kLanes<T>;

template <typename T, class F>
void each_tile(int64_t outer, int64_t n, int64_t inner, F f) {
  const int64_t tiles = ceil_div(inner, kTile<T>);
  parallel_pieces(outer * tiles, rows_piece(n * kTile<T>), [=](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t column = b % tiles * kTile<T>, left = inner - column;
      f(b / tiles * n * inner + column, left < kTile<T> ? left : kTile<T>);
    }
  });
}

// sum[j] = the sum of term(i, j, part) for i < n, of sums of kRun terms: the roundings of a long one do not pile up.
template <typename T, typename A, class Term>
AOT_INLINE void sum_axis(int64_t n, int64_t width, A *sum, Term term) {
  constexpr int64_t kRun = 256;
  A run[kTile<T>];
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
  each_tile<T>(outer, n, inner, [=](int64_t at, int64_t width) {
    A top[kTile<T>], sum[kTile<T>];
    sweep<T>(width, [&](int64_t j, auto part) { store(top + j, load(x + at + j, part), part); });
    for (int64_t i = 1; i < n; ++i)
      sweep<T>(width, [&, row = x + at + i * inner](int64_t j, auto part) {
        Vec<T> v = load(row + j, part), t = load(top + j, part);
        store(top + j, v > t ? v : t, part);
      });
    sum_axis<T>(n, width, sum, [&](int64_t i, int64_t j, auto part) {
      return exp_nonpositive<T>(load(x + at + i * inner + j, part) - load(top + j, part));
    });
    for (int64_t i = 0; i < n; ++i)
      sweep<T>(width, [&, from = x + at + i * inner, to = y + at + i * inner](int64_t j, auto part) {
        store(to + j, exp_nonpositive<T>(load(from + j, part) - load(top + j, part)) / load(sum + j, part), part);
      });
  });
}

template <typename T, typename A = Accumulate<T>>
void softmax_backward_axis_loop(const T *dy, const T *y, T *dx, int64_t outer, int64_t n, int64_t inner) {
  each_tile<T>(outer, n, inner, [=](int64_t at, int64_t width) {
    A sum[kTile<T>];
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

inline Status softmax_cpu(const Softmax &op, const Tensor *in, const Tensor *out, void *) {
  return dispatch_floating(in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    const T *x = in[0].as<T>();
    T *y = out[0].as<T>();
    auto a = op.axes(in[0]);
    a.inner == 1 ? softmax_loop(x, y, a.outer, a.n) : softmax_axis_loop(x, y, a.outer, a.n, a.inner);
    return kOk;
  });
}

inline Status softmax_backward_cpu(const SoftmaxBackward &op, const Tensor *in, const Tensor *out, void *) {
  return dispatch_floating(in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    const T *dy = in[0].as<T>(), *y = in[1].as<T>();
    T *dx = out[0].as<T>();
    auto a = op.axes(in[1]);
    a.inner == 1 ? softmax_backward_loop(dy, y, dx, a.outer, a.n)
                 : softmax_backward_axis_loop(dy, y, dx, a.outer, a.n, a.inner);
    return kOk;
  });
}

}  // namespace AOT_ISA
}  // namespace aot

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::Softmax, aot_softmax_cpu, aot::softmax_cpu)
AOT_CPU_ENTRY(aot::SoftmaxBackward, aot_softmax_backward_cpu, aot::softmax_backward_cpu)
