#include "lltm.h"

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

  // Writes [old_h, input].
  void join(T *joined) const {
    parallel_pieces(rows, kGrain / (width() + 1) + 1, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        T *to = joined + i * width();
        std::memcpy(to, old_h + i * state, state * sizeof(T));
        std::memcpy(to + state, input + i * features, features * sizeof(T));
      }
    });
  }
};

// -------------------------------------------------------------------------------------------------------------- loops

// Calls `cell` with the gates of rows of s columns. bias: null, or of pre-activations that are there instead.
template <typename T, class Cell>
void each_cell(int64_t rows, int64_t s, const Accumulate<T> *gates, const T *bias, const Cell &cell) {
  constexpr int64_t kCost = 8;  // of an element, relative to a cheap elementwise function
  if (!s) return;
  parallel_pieces(rows, kGrain / (kCost * s) + 1, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      sweep<T>(s, [=](int64_t j, auto part) {
        auto gate = [=](int g) { return load(gates + (row * 3 + g) * s + j, part); };
        auto pre = [=](int g) { return gate(g) + load(bias + g * s + j, part); };
        cell(row, j, bias ? Gates<T>::activate(pre(0), pre(1), pre(2)) : Gates<T>{gate(0), gate(1), gate(2)}, part);
      });
  });
}

// Computes the gates, and calls `cell` with them. joined: memory for [old_h, input]; sums: for the product.
template <typename T, class Cell>
Status compute_gates(const Operands<T> &x, T *joined, Accumulate<T> *sums, const Cell &cell) {
  const int64_t all = 3 * x.state, width = x.width();
  if (!all) return kOk;  // joined may be null
  x.join(joined);
  AOT_TRY((gemm<T, Accumulate<T>>(x.rows, all, width, {joined, width}, {x.weights, width, true}, sums, all)));
  return each_cell(x.rows, x.state, sums, x.bias, cell), kOk;
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
  const Tensor &input = in[op.kInput], &old_h = in[op.kOldH], &gates = out[op.kGates], &work = out[op.kWork];
  const Lltm::Scratch place = op.scratch(input, old_h);
  if (place.end && !work) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  return dispatch_floating(input.dtype, [&](auto zero) {
    using T = decltype(zero);
    using A = Accumulate<T>;
    const auto x = operands<T>(input, in[op.kWeights], in[op.kBias], old_h);
    const CellForward<T> cell{in[op.kOldCell].as<T>(), out[op.kNewH].as<T>(), out[op.kNewCell].as<T>(), gates.as<A>(),
                              x.state};
    return compute_gates(x, work.as<T>(), gates ? gates.as<A>() : work.as<A>() + place.gates, cell);
  });
}

Status lltm_backward_cpu(const LltmBackward &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &input = in[op.kInput], &old_h = in[op.kOldH], &gates = in[op.kGates], &work = out[op.kWork];
  if (!work) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  return dispatch_floating(input.dtype, [&](auto zero) -> Status {
    using T = decltype(zero);
    using A = Accumulate<T>;
    const auto x = operands<T>(input, in[op.kWeights], in[op.kBias], old_h);
    const LltmBackward::Scratch place = op.scratch(input, old_h, bool(gates));
    A *scratch = work.as<A>();
    const CellBackward<T> cell{in[op.kOldCell].as<T>(),
                               OutputGradient<T>(in[op.kDnewH]),
                               OutputGradient<T>(in[op.kDnewCell]),
                               out[op.kDoldCell].as<T>(),
                               work.as<T>(),
                               x.state};
    if (gates) each_cell<T>(x.rows, x.state, gates.as<A>(), nullptr, cell);
    else AOT_TRY(compute_gates(x, reinterpret_cast<T *>(scratch + place.joined), scratch + place.gates, cell));
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
