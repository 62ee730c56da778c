#include "lltm.h"

#include <cstdlib>

#include "cpu/entry.h"
#include "cpu/math.h"
#include "gemm/gemm_cpu.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// --------------------------------------------------------------------------------------------------------- formula

template <typename T>
struct Gates {
  Vec<T> i, o, c;

  static Gates activate(Vec<T> i, Vec<T> o, Vec<T> c) {
    return {Logistic<T>(i).times(), Logistic<T>(o).times(), c > 0 ? c : expm1_nonpositive<T>(c)};
  }
  Vec<T> cell(Vec<T> old_cell) const { return old_cell + c * i; }
};

// Cells are functions of the gates of some columns of a row, from `column` of the state on.

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
    A *to = gates + row * 3 * state + column;
    store(to, g.i, part), store(to + state, g.o, part), store(to + 2 * state, g.c, part);
  }
};

// The gradient of an output: shaped like the state, or a scalar to be broadcast.
template <typename T>
struct OutputGradient {
  const T *data;
  bool scalar;

  explicit OutputGradient(const Tensor &d) : data(d.as<T>()), scalar(d.ndim == 0) {}
  template <class P>
  Vec<T> at(int64_t i, P part) const {
    return scalar ? Vec<T>{} + load(data, Part{1})[0] : load(data + i, part);
  }
};

template <typename T>
struct CellBackward {
  const T *old_cell;
  OutputGradient<T> dnew_h, dnew_cell;
  T *dold_cell, *dpre;
  int64_t state;

  template <class P>
  void operator()(int64_t row, int64_t column, const Gates<T> &g, P part) const {
    const int64_t at = row * state + column;
    const Vec<T> dh = dnew_h.at(at, part), h = tanh<T>(g.cell(load(old_cell + at, part))), one = Vec<T>{} + 1;
    const Vec<T> dcell = dnew_cell.at(at, part) + dh * g.o * (1 - h * h);
    T *d = dpre + row * 3 * state + column;
    store(d, dcell * g.c * g.i * (1 - g.i), part);
    store(d + state, dh * h * g.o * (1 - g.o), part);
    store(d + 2 * state, dcell * g.i * (g.c > 0 ? one : g.c + 1), part);
    if (dold_cell) store(dold_cell + at, dcell, part);
  }
};

template <typename T>
struct Operands {
  const T *input, *weights, *bias, *old_h;
  int64_t rows, features, state;

  int64_t width() const { return state + features; }

  // Writes n rows of [old_h, input].
  void concatenate(int64_t first, int64_t n, T *to) const {
    for (int64_t i = first; i < first + n; ++i, to += width()) {
      std::memcpy(to, old_h + i * state, state * sizeof(T));
      std::memcpy(to + state, input + i * features, features * sizeof(T));
    }
  }
};

// -------------------------------------------------------------------------------------------------------------- loops

// Computes the gates in tiles of the state, with the products of the three gates for each tile, and calls `cell`.
template <typename T, class Cell>
Status gates_loop(const char *op, const Operands<T> &x, const Cell &cell) {
  using A = Accumulate<T>;
  const int64_t width = x.width();
  const Tiling tiles = Tiling::of<A>(x.rows, x.state, 3 * width);
  return try_parallel(tiles.count, [=](int64_t index) {
    return tiles.at(index, [=](int64_t i, int64_t j, int64_t rows, int64_t cols) -> Status {
      const Buffer<T> joined(rows * width);
      const Buffer<A> sums(rows * 3 * cols);
      if (!joined || !sums) return out_of_memory(op);
      x.concatenate(i, rows, joined);
      for (int gate = 0; gate < 3; ++gate) {
        const Matrix<T> weights{x.weights + (gate * x.state + j) * width, width, true};
        const GemmTile<T, A> tile{rows, cols, width, {joined, width}, weights, sums + gate * cols, 3 * cols};
        AOT_TRY(tile.compute(x.rows));
      }
      for (int64_t row = 0; row < rows; ++row)
        sweep<T>(cols, [=, &sums](int64_t l, auto part) {
          auto pre = [=, &sums](int gate) {
            return load(sums + (3 * row + gate) * cols + l, part) + load(x.bias + gate * x.state + j + l, part);
          };
          cell(i + row, j + l, Gates<T>::activate(pre(0), pre(1), pre(2)), part);
        });
      return kOk;
    });
  });
}

// Calls `cell` with gates that the forward has saved.
template <typename T, class Cell>
void saved_gates_loop(int64_t rows, int64_t s, const Accumulate<T> *gates, const Cell &cell) {
  constexpr int64_t kCost = 8;  // of an element, relative to a cheap elementwise function
  parallel_pieces(rows, kGrain / (kCost * s) + 1, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      sweep<T>(s, [=](int64_t j, auto part) {
        const Accumulate<T> *g = gates + row * 3 * s + j;
        cell(row, j, Gates<T>{load(g, part), load(g + s, part), load(g + 2 * s, part)}, part);
      });
  });
}

// The gradients that are sums over dpre, or products with it; null if not wanted.
template <typename T>
struct Gradients {
  T *dinput, *dweights, *dbias, *dold_h;
};

template <typename T>
Status products(const Operands<T> &x, const T *dpre, const Gradients<T> &d) {
  const int64_t s = x.state, f = x.features, width = x.width(), all = 3 * s, rows = x.rows;
  if (d.dbias) sum_columns(dpre, rows, all, d.dbias);
  const Matrix<T> of_rows{dpre, all}, of_gates{dpre, all, true};
  T *const dweights_of_input = d.dweights ? d.dweights + s : nullptr;
  return gemm_each<T, T>({
      {all, s, rows, of_gates, {x.old_h, s}, d.dweights, width},
      {all, f, rows, of_gates, {x.input, f}, dweights_of_input, width},
      {rows, s, all, of_rows, {x.weights, width}, d.dold_h, s},
      {rows, f, all, of_rows, {x.weights + s, width}, d.dinput, f},
  });
}

// ------------------------------------------------------------------------------------------------------- launchers

template <typename T>
Operands<T> operands(const Tensor &input, const Tensor &weights, const Tensor &bias, const Tensor &old_h) {
  return {input.as<T>(),          weights.as<T>(),         bias.as<T>(),           old_h.as<T>(),
          LltmAttrs::rows(old_h), LltmAttrs::width(input), LltmAttrs::width(old_h)};
}

Status lltm_cpu(const Lltm &op, const Tensor *in, const Tensor *out, void *) {
  return dispatch_floating(in[op.kInput].dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto x = operands<T>(in[op.kInput], in[op.kWeights], in[op.kBias], in[op.kOldH]);
    const CellForward<T> cell{in[op.kOldCell].as<T>(), out[op.kNewH].as<T>(), out[op.kNewCell].as<T>(),
                              out[op.kGates].as<Accumulate<T>>(), x.state};
    return gates_loop(op.name, x, cell);
  });
}

Status lltm_backward_cpu(const LltmBackward &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &gates = in[op.kGates], &work = out[op.kWork];
  if (!work) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  return dispatch_floating(in[op.kInput].dtype, [&](auto zero) -> Status {
    using T = decltype(zero);
    const auto x = operands<T>(in[op.kInput], in[op.kWeights], in[op.kBias], in[op.kOldH]);
    const CellBackward<T> cell{in[op.kOldCell].as<T>(),
                               OutputGradient<T>(in[op.kDnewH]),
                               OutputGradient<T>(in[op.kDnewCell]),
                               out[op.kDoldCell].as<T>(),
                               work.as<T>(),
                               x.state};
    if (x.rows && x.state) {
      if (gates) saved_gates_loop<T>(x.rows, x.state, gates.as<Accumulate<T>>(), cell);
      else AOT_TRY(gates_loop(op.name, x, cell));
    }
    return products(x, cell.dpre,
                    Gradients<T>{out[op.kDinput].as<T>(), out[op.kDweights].as<T>(), out[op.kDbias].as<T>(),
                                 out[op.kDoldH].as<T>()});
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::Lltm, aot_lltm_cpu, aot::lltm_cpu)
AOT_CPU_ENTRY(aot::LltmBackward, aot_lltm_backward_cpu, aot::lltm_backward_cpu)
