#include "lltm.h"

#include <cstdlib>

#include "cpu/entry.h"
#include "cpu/gemm.h"
#include "cpu/math.h"

namespace aot {
inline namespace AOT_ISA {

// --------------------------------------------------------------------------------------------------------- formula

template <typename T>
struct Gates {
  Vec<T> i, o, c;

  static Gates activate(Vec<T> i, Vec<T> o, Vec<T> c) {
    const Accumulate<T> log2_e(kLog2E);
    return {Logistic<T>(i * log2_e).value, Logistic<T>(o * log2_e).value, c > 0 ? c : expm1_nonpositive<T>(c)};
  }
  Vec<T> cell(Vec<T> old_cell) const { return old_cell + c * i; }
};

// What becomes of a row's gates, n columns from `column` of the state.

template <typename T>
struct CellForward {
  using A = Accumulate<T>;
  const T *old_cell;
  T *new_h, *new_cell;
  A *gates;
  int64_t state;

  template <class P>
  void operator()(int64_t row, int64_t column, const Gates<T> &g, P part) const {
    const int64_t at = row * state + column;
    Vec<T> cell = g.cell(load(old_cell + at, part));
    store(new_cell + at, cell, part);
    store(new_h + at, tanh<T>(cell) * g.o, part);
    if (!gates) return;
    A *kept = gates + row * 3 * state + column;
    store(kept, g.i, part), store(kept + state, g.o, part), store(kept + 2 * state, g.c, part);
  }
};

template <typename T>
struct CellBackward {
  const T *old_cell, *dnew_h, *dnew_cell;
  T *dold_cell, *dpre;
  int64_t state;

  template <class P>
  void operator()(int64_t row, int64_t column, const Gates<T> &g, P part) const {
    const int64_t at = row * state + column;
    const Vec<T> dh = load(dnew_h + at, part), h = tanh<T>(g.cell(load(old_cell + at, part))), one = Vec<T>{} + 1;
    const Vec<T> dcell = load(dnew_cell + at, part) + dh * g.o * (1 - h * h);
    T *d = dpre + row * 3 * state + column;
    store(d, dcell * g.c * g.i * (1 - g.i), part);
    store(d + state, dh * h * g.o * (1 - g.o), part);
    store(d + 2 * state, dcell * g.i * (g.c > 0 ? one : g.c + 1), part);
    if (dold_cell) store(dold_cell + at, dcell, part);
  }
};

// ----------------------------------------------------------------------------------------------------------- loops

template <typename T>
struct Operands {
  const T *input, *weights, *bias, *old_h;
  int64_t rows, features, state;

  int64_t width() const { return state + features; }
};

// f(row, column, part) for every vector of the state.
template <typename T, class F>
void each_column(int64_t rows, int64_t state, F f) {
  constexpr int64_t kCost = 8;  // an element of the cell has that of as many of a simple one
  const int64_t piece = kGrain / (kCost * state) + 1;
  parallel_pieces(rows, piece, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      sweep<T>(state, [=](int64_t j, auto part) { f(row, j, part); });
  });
}

// The gates of all rows, so many at a time that the sums stay in a cache, and what `cell` makes of them.
template <typename T, class Cell>
Status gates_loop(const char *op, const Operands<T> &x, const Cell &cell) {
  using A = Accumulate<T>;
  const int64_t s = x.state, fit = (int64_t{1} << 20) / (3 * s) + 1, block = x.rows < fit ? x.rows : fit;
  A *sums = static_cast<A *>(std::malloc(block * 3 * s * sizeof(A)));
  if (!sums) return fail(kConventionMisused, "%s: out of memory", op);
  Status status = kOk;
  for (int64_t first = 0; first < x.rows && !status; first += block) {
    const int64_t n = x.rows - first < block ? x.rows - first : block;
    const Matrix<T> of_h{x.weights, x.width(), true}, of_input{x.weights + s, x.width(), true};
    status = gemm(n, 3 * s, s, Matrix<T>{x.old_h + first * s, s}, of_h, sums, 3 * s);
    if (!status && x.features)
      status = gemm(n, 3 * s, x.features, Matrix<T>{x.input + first * x.features, x.features}, of_input, sums, 3 * s,
                    true);
    if (status) break;
    each_column<T>(n, s, [=](int64_t row, int64_t j, auto part) {
      const A *pre = sums + row * 3 * s + j;
      const T *bias = x.bias + j;
      auto g = Gates<T>::activate(load(pre, part) + load(bias, part), load(pre + s, part) + load(bias + s, part),
                                  load(pre + 2 * s, part) + load(bias + 2 * s, part));
      cell(first + row, j, g, part);
    });
  }
  std::free(sums);
  return status;
}

// The same of gates that are kept.
template <typename T, class Cell>
void kept_gates_loop(int64_t rows, int64_t s, const Accumulate<T> *gates, const Cell &cell) {
  each_column<T>(rows, s, [=](int64_t row, int64_t j, auto part) {
    const Accumulate<T> *g = gates + row * 3 * s + j;
    cell(row, j, Gates<T>{load(g, part), load(g + s, part), load(g + 2 * s, part)}, part);
  });
}

template <typename T>
void sum_rows(const T *x, T *y, int64_t rows, int64_t n) {
  parallel_pieces(n, 1024, [=](int64_t begin, int64_t end) {
    sweep<T>(end - begin, [=](int64_t j, auto part) {
      Vec<T> sum{};
      for (int64_t row = 0; row < rows; ++row) sum += load(x + row * n + begin + j, part);
      store(y + begin + j, sum, part);
    });
  });
}

// ------------------------------------------------------------------------------------------------------- launchers

template <typename T>
Operands<T> operands(const Tensor &input, const Tensor &weights, const Tensor &bias, const Tensor &old_h) {
  return {input.as<T>(),           weights.as<T>(),          bias.as<T>(),            old_h.as<T>(),
          LltmAttrs::rows(old_h), LltmAttrs::width(input), LltmAttrs::width(old_h)};
}

inline Status lltm_cpu(const Lltm &op, const Tensor *in, const Tensor *out, void *) {
  return dispatch_floating(in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto x = operands<T>(in[0], in[1], in[2], in[3]);
    return gates_loop(op.name, x,
                      CellForward<T>{in[4].as<T>(), out[0].as<T>(), out[1].as<T>(), out[2].as<Accumulate<T>>(), x.state});
  });
}

inline Status lltm_backward_cpu(const LltmBackward &op, const Tensor *in, const Tensor *out, void *) {
  if (!out[5]) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  return dispatch_floating(in[2].dtype, [&](auto zero) -> Status {
    using T = decltype(zero);
    const auto x = operands<T>(in[2], in[3], in[4], in[5]);
    const CellBackward<T> cell{in[6].as<T>(), in[0].as<T>(), in[1].as<T>(), out[4].as<T>(), out[5].as<T>(), x.state};
    if (x.rows && x.state) {
      if (in[7]) kept_gates_loop<T>(x.rows, x.state, in[7].as<Accumulate<T>>(), cell);
      else AOT_TRY(gates_loop(op.name, x, cell));
    }
    const int64_t s = x.state, all = 3 * s;
    const Matrix<T> dpre{cell.dpre, all}, transposed{cell.dpre, all, true}, old_h{x.old_h, s}, input{x.input, x.features};
    const Matrix<T> of_h{x.weights, x.width()}, of_input{x.weights + s, x.width()};
    T *dinput = out[0].as<T>(), *dweights = out[1].as<T>(), *dbias = out[2].as<T>(), *dold_h = out[3].as<T>();
    if (dweights) AOT_TRY(gemm(all, s, x.rows, transposed, old_h, dweights, x.width()));
    if (dweights && x.features) AOT_TRY(gemm(all, x.features, x.rows, transposed, input, dweights + s, x.width()));
    if (dold_h) AOT_TRY(gemm(x.rows, s, all, dpre, of_h, dold_h, s));
    if (dinput && x.features) AOT_TRY(gemm(x.rows, x.features, all, dpre, of_input, dinput, x.features));
    if (dbias) sum_rows(cell.dpre, dbias, x.rows, all);
    return kOk;
  });
}

}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::Lltm, aot_lltm_cpu, aot::lltm_cpu)
AOT_CPU_ENTRY(aot::LltmBackward, aot_lltm_backward_cpu, aot::lltm_backward_cpu)
