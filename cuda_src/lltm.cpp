#include "lltm.h"

#include "cpu/entry.h"
#include "cpu/math.h"
#include "cpu/parallel.h"

namespace aot {
inline namespace AOT_ISA {

// --------------------------------------------------------------------------------------------------------- formula

template <typename T>
struct Gates {
  Vec<T> i, o, c;

  static Gates of(Vec<T> i, Vec<T> o, Vec<T> c) {
    const Accumulate<T> log2_e(kLog2E);
    return {Logistic<T>(i * log2_e).value, Logistic<T>(o * log2_e).value, c > 0 ? c : expm1_nonpositive<T>(c)};
  }
  Vec<T> cell(Vec<T> old_cell) const { return old_cell + c * i; }
};

template <typename T>
struct GateGradients {
  Vec<T> i, o, c, cell;

  GateGradients(const Gates<T> &g, Vec<T> old_cell, Vec<T> dnew_h, Vec<T> dnew_cell) {
    Vec<T> h = tanh<T>(g.cell(old_cell)), one = Vec<T>{} + 1;
    cell = dnew_cell + dnew_h * g.o * (1 - h * h);
    i = cell * g.c * g.i * (1 - g.i), o = dnew_h * h * g.o * (1 - g.o), c = cell * g.i * (g.c > 0 ? one : g.c + 1);
  }
};

// What becomes of a row's gates: before they are activated, in columns first ... first + n of the state.

template <typename T>
struct CellForward {
  using A = Accumulate<T>;
  const T *old_cell;
  T *new_h, *new_cell;
  A *gates;
  int64_t state;

  void operator()(int64_t row, int64_t first, int64_t n, const A *pre, int64_t stride) const {
    const int64_t at = row * state + first;
    sweep<T>(n, [=](int64_t j, auto part) {
      auto g = Gates<T>::of(load_wide<T>(pre + j), load_wide<T>(pre + stride + j), load_wide<T>(pre + 2 * stride + j));
      Vec<T> cell = g.cell(load(old_cell + at + j, part));
      store(new_cell + at + j, cell, part);
      store(new_h + at + j, tanh<T>(cell) * g.o, part);
      if (!gates) return;
      A *kept = gates + row * 3 * state + first + j;
      store(kept, g.i, part), store(kept + state, g.o, part), store(kept + 2 * state, g.c, part);
    });
  }
};

template <typename T>
struct CellBackward {
  using A = Accumulate<T>;
  const T *old_cell, *dnew_h, *dnew_cell;
  T *dold_cell;
  A *dpre;
  int64_t state;

  void operator()(int64_t row, int64_t first, int64_t n, const A *pre, int64_t stride) const {
    sweep<T>(n, [=](int64_t j, auto part) {
      auto g = Gates<T>::of(load_wide<T>(pre + j), load_wide<T>(pre + stride + j), load_wide<T>(pre + 2 * stride + j));
      write(row, first + j, g, part);
    });
  }
  template <class P>
  void write(int64_t row, int64_t column, const Gates<T> &gates, P part) const {
    const int64_t at = row * state + column;
    GateGradients<T> d(gates, load(old_cell + at, part), load(dnew_h + at, part), load(dnew_cell + at, part));
    A *pre = dpre + row * 3 * state + column;
    store(pre, d.i, part), store(pre + state, d.o, part), store(pre + 2 * state, d.c, part);
    if (dold_cell) store(dold_cell + at, d.cell, part);
  }
};

}  // namespace AOT_ISA
}  // namespace aot
