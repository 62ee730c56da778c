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

// A gradient that comes in: like the state, or one number for all of it.
template <typename T>
struct Incoming {
  const T *data;
  bool one;

  explicit Incoming(const Tensor &d) : data(d.as<T>()), one(d.ndim == 0) {}
  template <class P>
  Vec<T> at(int64_t i, P part) const {
    return one ? Vec<T>{} + load(data, Part{1})[0] : load(data + i, part);
  }
};

template <typename T>
struct CellBackward {
  const T *old_cell;
  Incoming<T> dnew_h, dnew_cell;
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
};

// -------------------------------------------------------------------------------------------------- products of few
// rows Up to kFewRows rows leave no time to pack the weights. Their type is the one that is summed in.

constexpr int64_t kFewRows = 64, kFewColumns = 32;
constexpr double kFewWork = 1 << 17;  // multiplications that are worth waking a thread for

template <class F>
void parallel_if(bool worth, int64_t chunks, F f) {
  if (worth) return parallel(chunks, f);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) f(chunk);
}

// The sums of each vector's lanes: of the i-th in lane i. Halves of vectors are added until there is one.
template <typename A, int lanes = kLanes<A>>
AOT_INLINE Vec<A> sum_each(Vec<A> (&v)[lanes]) {
#pragma GCC unroll 4
  for (int half = lanes / 2; half; half /= 2) {
    VecInt<A> low, high;
    for (int i = 0; i < lanes; ++i) low[i] = i & half ? lanes + i - half : i, high[i] = low[i] + half;
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i)
      v[i] = __builtin_shuffle(v[i], v[i + half], low) + __builtin_shuffle(v[i], v[i + half], high);
  }
  return v[0];
}

// As many dot products as a vector has lanes: of kRows rows with as many columns as that makes.
template <typename A>
struct Dots {
  static constexpr int kRows = kLanes<A> > 4 ? 4 : kLanes<A> > 2 ? 2 : 1, kColumns = kLanes<A> / kRows;
  Vec<A> sum[kLanes<A>] = {};

  AOT_INLINE void add(int64_t n, const A *const (&rows)[kRows], const A *const (&columns)[kColumns], int64_t offset) {
    sweep<A>(n, [&](int64_t k, auto part) {
      Vec<A> a[kRows];
      for (int i = 0; i < kRows; ++i) a[i] = load(rows[i] + k, part);
#pragma GCC unroll 4
      for (int j = 0; j < kColumns; ++j) {
        Vec<A> w = load(columns[j] + offset + k, part);
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) sum[i * kColumns + j] += a[i] * w;
      }
    });
  }
};

// Columns first ... first + n of each gate, kFewColumns to a row of sums (rows, 3, kFewColumns).
template <typename A>
[[gnu::noinline]] void few_dots(const Operands<A> &x, int64_t first, int64_t n, A *sums) {
  using D = Dots<A>;
  for (int gate = 0; gate < 3; ++gate)
    for (int64_t j = 0; j < n; j += D::kColumns) {
      const A *columns[D::kColumns];
      for (int l = 0; l < D::kColumns; ++l)
        columns[l] = x.weights + (gate * x.state + first + (j + l < n ? j + l : j)) * x.width();
      for (int64_t i = 0; i < x.rows; i += D::kRows) {
        const A *of_h[D::kRows], *of_input[D::kRows];
        for (int l = 0; l < D::kRows; ++l) {
          const int64_t row = i + l < x.rows ? i + l : i;
          of_h[l] = x.old_h + row * x.state, of_input[l] = x.input + row * x.features;
        }
        D dots;
        dots.add(x.state, of_h, columns, 0);
        dots.add(x.features, of_input, columns, x.state);
        Vec<A> sum = sum_each<A>(dots.sum);
        for (int l = 0; l < D::kRows && i + l < x.rows; ++l)
          std::memcpy(sums + ((i + l) * 3 + gate) * kFewColumns + j, reinterpret_cast<A *>(&sum) + l * D::kColumns,
                      D::kColumns * sizeof(A));
      }
    }
}

template <typename A, class Cell>
void few_gates_loop(const Operands<A> &x, const Cell &cell) {
  const double work = 3. * x.rows * x.state * x.width();
  parallel_if(work >= 2 * kFewWork, ceil_div(x.state, kFewColumns), [=](int64_t chunk) {
    A sums[kFewRows * 3 * kFewColumns];
    const int64_t first = chunk * kFewColumns, n = x.state - first < kFewColumns ? x.state - first : kFewColumns;
    few_dots(x, first, n, sums);
    for (int64_t row = 0; row < x.rows; ++row)
      sweep<A>(n, [=, &sums](int64_t j, auto part) {
        auto g = gates_of(sums + row * 3 * kFewColumns + j, kFewColumns, x.bias + first + j, x.state, part);
        cell(row, first + j, g, part);
      });
  });
}

// c (m, n) = a b, with a(i, p) = a[i * a_row + p * a_term] and b (terms, n).
template <typename A>
struct FewProduct {
  static constexpr int kRows = kVectorBytes == 64 ? 8 : 4, kVectors = 2, kCols = kVectors * kLanes<A>;
  static constexpr int64_t kChunk = 64;  // rows
  const A *a;
  int64_t a_row, a_term;
  const A *b;
  int64_t ldb;
  A *c;
  int64_t ldc, m, n, terms;

  int64_t chunks() const { return c ? ceil_div(m, kChunk) * ceil_div(n, kCols) : 0; }
  double work() const { return c ? double(m) * n * terms : 0; }

  void chunk(int64_t index) const {
    const int64_t across = ceil_div(n, kCols), j = index % across * kCols, i = index / across * kChunk;
    const int64_t end = i + kChunk < m ? i + kChunk : m;
    for (int64_t row = i; row < end; row += kRows)
      n - j >= kCols ? block(row, end - row, j, Full(), Full()) : tail(row, end - row, j);
  }
  void tail(int64_t i, int64_t rows, int64_t j) const {
    const int64_t left = n - j, lanes = kLanes<A>;
    block(i, rows, j, Part{left < lanes ? left : lanes}, Part{left < lanes ? 0 : left - lanes});
  }
  template <class P, class Q>
  [[gnu::noinline]] void block(int64_t i, int64_t rows, int64_t j, P first, Q second) const {
    Vec<A> sum[kRows][kVectors] = {};
    const A *row[kRows];
    for (int r = 0; r < kRows; ++r) row[r] = a + (i + (r < rows ? r : 0)) * a_row;
    for (int64_t p = 0; p < terms; ++p) {
      const Vec<A> low = load(b + p * ldb + j, first), high = load(b + p * ldb + j + kLanes<A>, second);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const A x = row[r][p * a_term];
        sum[r][0] += x * low, sum[r][1] += x * high;
      }
    }
    for (int r = 0; r < kRows && r < rows; ++r) {
      store(c + (i + r) * ldc + j, sum[r][0], first);
      store(c + (i + r) * ldc + j + kLanes<A>, sum[r][1], second);
    }
  }
};

template <typename A, size_t n>
void multiply_few(const FewProduct<A> (&products)[n]) {
  int64_t chunks = 0;
  double work = 0;
  for (auto &p : products) chunks += p.chunks(), work += p.work();
  parallel_if(work >= 2 * kFewWork, chunks, [&](int64_t index) {
    const FewProduct<A> *p = products;
    for (; index >= p->chunks(); ++p) index -= p->chunks();
    p->chunk(index);
  });
}

// -------------------------------------------------------------------------------------------------------------- loops

// f(row, column, part) for every vector of the state.
template <typename T, class F>
void each_column(int64_t rows, int64_t state, F f) {
  constexpr int64_t kCost = 8;  // an element of the cell has that of as many of a simple one
  const int64_t piece = kGrain / (kCost * state) + 1;
  parallel_pieces(rows, piece, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) sweep<T>(state, [=](int64_t j, auto part) { f(row, j, part); });
  });
}

template <typename T, class P>
Gates<T> gates_of(const Accumulate<T> *sums, int64_t stride, const T *bias, int64_t state, P part) {
  return Gates<T>::activate(load(sums, part) + load(bias, part), load(sums + stride, part) + load(bias + state, part),
                            load(sums + 2 * stride, part) + load(bias + 2 * state, part));
}

// The gates of all rows, so many at a time that the sums stay in a cache, and what `cell` makes of them.
template <typename T, class Cell>
Status gates_loop(const char *op, const Operands<T> &x, const Cell &cell) {
  using A = Accumulate<T>;
  if constexpr (std::is_same_v<T, A>)
    if (x.rows <= kFewRows) return few_gates_loop(x, cell), kOk;
  const int64_t s = x.state, fit = (int64_t{1} << 20) / (3 * s) + 1, block = x.rows < fit ? x.rows : fit;
  A *sums = static_cast<A *>(std::malloc(block * 3 * s * sizeof(A)));
  if (!sums) return fail(kConventionMisused, "%s: out of memory", op);
  Status status = kOk;
  for (int64_t first = 0; first < x.rows && !status; first += block) {
    const int64_t n = x.rows - first < block ? x.rows - first : block;
    const Matrix<T> of_h{x.weights, x.width(), true}, of_input{x.weights + s, x.width(), true};
    status = gemm(n, 3 * s, s, Matrix<T>{x.old_h + first * s, s}, of_h, sums, 3 * s);
    if (!status && x.features)
      status =
          gemm(n, 3 * s, x.features, Matrix<T>{x.input + first * x.features, x.features}, of_input, sums, 3 * s, true);
    if (status) break;
    each_column<T>(n, s, [=](int64_t row, int64_t j, auto part) {
      cell(first + row, j, gates_of(sums + row * 3 * s + j, s, x.bias + j, s, part), part);
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

// The gradients that are products with dpre; null where nobody wants them.
template <typename T>
struct Gradients {
  T *dinput, *dweights, *dbias, *dold_h;
};

template <typename T>
Status products(const Operands<T> &x, const T *dpre, const Gradients<T> &d) {
  const int64_t s = x.state, f = x.features, all = 3 * s;
  if (d.dbias) sum_rows(dpre, d.dbias, x.rows, all);
  T *dweights_x = d.dweights ? d.dweights + s : nullptr;
  if constexpr (std::is_same_v<T, Accumulate<T>>)
    if (x.rows <= kFewRows) {
      const FewProduct<T> few[] = {{dpre, 1, all, x.old_h, s, d.dweights, x.width(), all, s, x.rows},
                                   {dpre, 1, all, x.input, f, dweights_x, x.width(), all, f, x.rows},
                                   {dpre, all, 1, x.weights, x.width(), d.dold_h, s, x.rows, s, all},
                                   {dpre, all, 1, x.weights + s, x.width(), d.dinput, f, x.rows, f, all}};
      return multiply_few(few), kOk;
    }
  const Matrix<T> left{dpre, all}, transposed{dpre, all, true};
  if (d.dweights) AOT_TRY(gemm(all, s, x.rows, transposed, Matrix<T>{x.old_h, s}, d.dweights, x.width()));
  if (d.dweights && f) AOT_TRY(gemm(all, f, x.rows, transposed, Matrix<T>{x.input, f}, dweights_x, x.width()));
  if (d.dold_h) AOT_TRY(gemm(x.rows, s, all, left, Matrix<T>{x.weights, x.width()}, d.dold_h, s));
  if (d.dinput && f) AOT_TRY(gemm(x.rows, f, all, left, Matrix<T>{x.weights + s, x.width()}, d.dinput, f));
  return kOk;
}

// ------------------------------------------------------------------------------------------------------- launchers

template <typename T>
Operands<T> operands(const Tensor &input, const Tensor &weights, const Tensor &bias, const Tensor &old_h) {
  return {input.as<T>(),          weights.as<T>(),         bias.as<T>(),           old_h.as<T>(),
          LltmAttrs::rows(old_h), LltmAttrs::width(input), LltmAttrs::width(old_h)};
}

inline Status lltm_cpu(const Lltm &op, const Tensor *in, const Tensor *out, void *) {
  return dispatch_floating(in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto x = operands<T>(in[0], in[1], in[2], in[3]);
    return gates_loop(
        op.name, x, CellForward<T>{in[4].as<T>(), out[0].as<T>(), out[1].as<T>(), out[2].as<Accumulate<T>>(), x.state});
  });
}

inline Status lltm_backward_cpu(const LltmBackward &op, const Tensor *in, const Tensor *out, void *) {
  if (!out[5]) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  return dispatch_floating(in[2].dtype, [&](auto zero) -> Status {
    using T = decltype(zero);
    const auto x = operands<T>(in[2], in[3], in[4], in[5]);
    const CellBackward<T> cell{in[6].as<T>(),  Incoming<T>(in[0]), Incoming<T>(in[1]),
                               out[4].as<T>(), out[5].as<T>(),     x.state};
    if (x.rows && x.state) {
      if (in[7]) kept_gates_loop<T>(x.rows, x.state, in[7].as<Accumulate<T>>(), cell);
      else AOT_TRY(gates_loop(op.name, x, cell));
    }
    return products(x, cell.dpre, Gradients<T>{out[0].as<T>(), out[1].as<T>(), out[2].as<T>(), out[3].as<T>()});
  });
}

}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::Lltm, aot_lltm_cpu, aot::lltm_cpu)
AOT_CPU_ENTRY(aot::LltmBackward, aot_lltm_backward_cpu, aot::lltm_backward_cpu)
