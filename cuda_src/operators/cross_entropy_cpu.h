// The rows of cross entropy on the CPU, for cross_entropy, cross_entropy_lse and linear_cross_entropy.
#pragma once
#include "cpu/entry.h"
#include "cpu/rows.h"
#include "cpu/softmax.h"
#include "cross_entropy.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// ------------------------------------------------------------------------------------------------------- targets

// The sum of term(i), in parts, which loses few digits of a double.
template <class Term>
double sum_of(int64_t n, Term term) {
  double sum = 0;
  for (int64_t i = 0; i < n;) {
    double part = 0;
    for (const int64_t end = i + 256 < n ? i + 256 : n; i < end; ++i) part += term(i);
    sum += part;
  }
  return sum;
}

struct Targets {
  const Tensor &tensor;
  int64_t ignore_index;

  int64_t operator[](int64_t row) const {
    return tensor.dtype == DType::int64 ? tensor.as<const int64_t>()[row] : tensor.as<const int32_t>()[row];
  }
  bool ignored(int64_t row) const { return (*this)[row] == ignore_index; }

  // An error if a class index is out of range.
  Status check(const char *op, int64_t rows, int64_t cols) const {
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t t = (*this)[i];
      if ((t < 0 || t >= cols) && t != ignore_index)
        return fail(kInvalidArgument, "%s: target[%lld] is %lld, expected 0 to %lld, or ignore_index, which is %lld",
                    op, static_cast<long long>(i), static_cast<long long>(t), static_cast<long long>(cols - 1),
                    static_cast<long long>(ignore_index));
    }
    return kOk;
  }
  // The divisor of a mean: the sum of weight_of(class) over the rows that are not ignored.
  template <class WeightOf>
  double sum(int64_t rows, WeightOf weight_of) const {
    return sum_of(rows, [&](int64_t i) { return ignored(i) ? 0. : weight_of((*this)[i]); });
  }
};

// ---------------------------------------------------------------------------------------------------------- loops

// The loss, dy, or the weights of the classes: of T, or of float32, in which T is summed.
template <typename T>
struct Loss {
  void *data = nullptr;
  bool wide = false;

  Loss() = default;
  explicit Loss(const Tensor &t) : data(t.data), wide(itemsize(t.dtype) > static_cast<int64_t>(sizeof(T))) {}
  Accumulate<T> read(int64_t i) const {
    return wide ? static_cast<const Accumulate<T> *>(data)[i] : load_one(static_cast<const T *>(data) + i);
  }
  void write(int64_t i, Accumulate<T> value) const {
    wide ? void(static_cast<Accumulate<T> *>(data)[i] = value) : store_one(static_cast<T *>(data) + i, value);
  }
};

template <typename T>
struct CrossEntropyRow {
  using A = Accumulate<T>;
  int64_t n;
  A smoothing;
  bool stream;

  // Returns the loss of a row, and writes its slope times `scale` unless `slope` is null. `buffer` is row_buffer()'s.
  // `slope` may be x: what the loss needs is read first.
  template <bool kSmoothing>
  double run(const T *x, const T *next, int64_t target, A scale, T *slope, A *buffer) const {
    const bool in_range = target >= 0 && target < n;  // unless the caller changed it since the check
    const double at_target = in_range ? static_cast<double>(load_one(x + target)) : __builtin_nan("");
    const auto s = exponentials<kSmoothing>(x, slope ? x : next, n, [=](int64_t j, Vec<T> e, auto part) {
      if (buffer) store(buffer + j, e, part);
    });
    if (slope) {
      const A p_scale = s.scale;
      if (buffer) write(slope, target, scale, [=](int64_t j, auto part) { return load(buffer + j, part) * p_scale; });
      else
        write(slope, target, scale,
              [=](int64_t j, auto part) { return exp_in_units<T>(load(x + j, part) - s.max) * p_scale; });
    }
    const double log_sum = __builtin_log(s.sum), loss = log_sum - (at_target - s.max);
    return kSmoothing ? (1 - smoothing) * loss + smoothing * (log_sum - s.shifted_sum / n) : loss;
  }

  // slope = scale * (p - (1 - smoothing) onehot(target) - smoothing / n); p(j, part) returns probabilities.
  template <class P>
  void write(T *slope, int64_t target, A scale, P p) const {
    const A off_target = smoothing / n, on_target = 1 - smoothing;
    auto step = [=](int64_t j, auto part) {
      Vec<T> v = p(j, part) - off_target;
      if (static_cast<uint64_t>(target - j) < kLanes<T>) v[target - j] -= on_target;
      store(slope + j, v * scale, part);
    };
    stream ? sweep_stream(slope, n, step) : sweep<T>(n, step);
  }

  void clear(T *slope) const {
    auto step = [=](int64_t j, auto part) { store(slope + j, Vec<T>{}, part); };
    stream ? sweep_stream(slope, n, step) : sweep<T>(n, step);
  }
};

// ----------------------------------------------------------------------------------------------------------- extras

// Extras are for few calls, each unless it is null or 0.
template <typename T>
struct Extras {
  using A = Accumulate<T>;
  Loss<T> weight;  // of each class
  double z_loss, softcap;
  A *lse = nullptr;  // of each row
  Tensor predictions;
  const A *dlse = nullptr;

  Extras(const CrossEntropyAttrs &attrs, const Tensor &weight)
      : weight(weight ? Loss<T>(weight) : Loss<T>()), z_loss(attrs.z_loss), softcap(attrs.softcap) {}
  bool any() const { return weight.data || z_loss != 0 || softcap != 0 || lse || predictions || dlse; }

  A weight_of(int64_t target) const { return weight.data ? weight.read(target) : A(1); }
  template <class Part>
  Vec<T> weights(int64_t j, Part part) const {
    if (!weight.data) return Vec<T>{} + 1;
    return weight.wide ? load(static_cast<const A *>(weight.data) + j, part)
                       : load(static_cast<const T *>(weight.data) + j, part);
  }
  Vec<T> capped(Vec<T> x) const {
    const A cap = static_cast<A>(softcap);
    return cap == 0 ? x : cap * tanh<A>(x * (1 / cap));
  }
  // d capped(x) / dx, from capped(x)
  Vec<T> slope(Vec<T> capped) const {
    const Vec<T> t = capped * (1 / static_cast<A>(softcap));
    return softcap == 0 ? Vec<T>{} + 1 : (1 - t) * (1 + t);
  }
};

// The first column of the greatest number of a row, or of a NaN in it.
template <typename T>
int64_t best_column(const T *x, int64_t n) {
  int64_t best = 0;
  Accumulate<T> top = n > 0 ? load_one(x) : 0;
  for (int64_t j = 1; j < n && top == top; ++j)
    if (const Accumulate<T> value = load_one(x + j); !(value <= top)) best = j, top = value;
  return best;
}

// A row with extras.
template <typename T>
struct CrossEntropyExtraRow {
  using A = Accumulate<T>;
  const Extras<T> &extras;
  int64_t n;
  A smoothing;
  bool stream;

  // Returns the loss of row i, x, and writes its slope, unless that is null, and what else the extras ask for.
  double run(const T *x, int64_t i, int64_t target, bool ignored, A scale, T *slope) const {
    const bool in_range = target >= 0 && target < n;  // unless the caller changed it since the check
    const double at_target = in_range ? extras.capped(Vec<T>{} + load_one(x + target))[0] : __builtin_nan("");
    const A weight = in_range ? extras.weight_of(target) : A(1);
    const bool smooth = smoothing != 0;
    if (extras.predictions) write_prediction(i, best_column(x, n));

    const A top = extras.capped(Vec<T>{} + largest(x, n))[0],
            base = top == -static_cast<A>(__builtin_inf()) ? A(0) : top;
    double sum = 0, shifted_sum = 0, weights = 0;  // of exp(s - base), of w (s - base), of w
    for_blocks(n, [&](int64_t begin, int64_t size) {
      Vec<T> sums[4] = {}, shifted_sums[4] = {}, all[4] = {};
      sweep_sums<T>(size, [&](int64_t k, auto part, int lane) {
        const Vec<T> d = extras.capped(load(x + begin + k, part)) - base;
        sums[lane] += keep<T>(exp_in_units<A>(d), part);
        if (!smooth) return;
        const Vec<T> w = extras.weights(begin + k, part);
        shifted_sums[lane] += keep<T>(w * d, part), all[lane] += keep<T>(w, part);
      });
      sum += sum_of_4<T>(sums), shifted_sum += sum_of_4<T>(shifted_sums), weights += sum_of_4<T>(all);
    });
    const double log_sum = __builtin_log(sum / Constants<A>::kUnit), lse = log_sum + base;
    if (extras.lse) extras.lse[i] = static_cast<A>(lse);

    const double on_target = (1 - smoothing) * weight, off_target = static_cast<double>(smoothing) / n;
    double of_p = extras.dlse ? extras.dlse[i] : 0;
    if (!ignored) of_p += scale * (on_target + off_target * weights + 2 * extras.z_loss * lse);
    if (ignored && !extras.dlse) clear_row(slope);
    else if (slope)
      write(slope, x, ignored ? -1 : target, base, of_p / sum, ignored ? 0 : off_target * scale, on_target * scale);
    if (ignored) return 0;
    const double loss = on_target * (log_sum - (at_target - base));
    // No term of the sum of -w log(p) is negative: an infinite weight makes it infinite. Its differences are NaN then.
    const double terms = weights - weights == 0 ? weights * log_sum - shifted_sum : weights;
    const double smoothed = smooth ? off_target * terms : 0;
    return loss + smoothed + (extras.z_loss != 0 ? extras.z_loss * lse * lse : 0);
  }

 private:
  // slope = (of_p exp(s - base) - off_target w - on_target onehot(target)) ds/dx
  void write(T *slope, const T *x, int64_t target, A base, A of_p, A off_target, A on_target) const {
    auto step = [=, this](int64_t j, auto part) {
      const Vec<T> capped = extras.capped(load(x + j, part));
      Vec<T> v = exp_in_units<A>(capped - base) * of_p;
      if (smoothing != 0) v -= off_target * extras.weights(j, part);
      if (static_cast<uint64_t>(target - j) < kLanes<T>) v[target - j] -= on_target;
      store(slope + j, v * extras.slope(capped), part);
    };
    stream ? sweep_stream(slope, n, step) : sweep<T>(n, step);
  }
  void clear_row(T *slope) const {
    if (slope) CrossEntropyRow<T>{n, smoothing, stream}.clear(slope);
  }
  void write_prediction(int64_t i, int64_t column) const {
    const Tensor &t = extras.predictions;
    t.dtype == DType::int64 ? void(t.as<int64_t>()[i] = column)
                            : void(t.as<int32_t>()[i] = static_cast<int32_t>(column));
  }
};

// ------------------------------------------------------------------------------------------------------------ rows

// Calls write_loss(row, loss) for each row, and writes its slope times scale(row) unless `slope` is null.
template <typename T, class WriteLoss, class Scale>
void cross_entropy_loop(const T *x, Targets targets, const Extras<T> &extras, T *slope, int64_t rows, int64_t n,
                        double smoothing, WriteLoss write_loss, Scale scale) {
  using A = Accumulate<T>;
  const bool stream = slope && worth_streaming(rows * n * sizeof(T));
  if (extras.any()) {
    const CrossEntropyExtraRow<T> row{extras, n, static_cast<A>(smoothing), stream};
    return parallel_pieces(rows, rows_per_task(rows, n), [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const bool ignored = targets.ignored(i);
        write_loss(
            i, row.run(x + i * n, i, targets[i], ignored, ignored ? A(0) : scale(i), slope ? slope + i * n : nullptr));
      }
      if (stream) end_stream();
    });
  }
  const CrossEntropyRow<T> row{n, static_cast<A>(smoothing), stream};
  parallel_pieces(rows, rows_per_task(rows, n), [=](int64_t begin, int64_t end) {
    A *buffer = slope ? row_buffer<T>(n) : nullptr;
    for (int64_t i = begin; i < end; ++i) {
      const T *x_row = x + i * n, *next = i + 1 < end ? x_row + n : x_row;
      T *slope_row = slope ? slope + i * n : nullptr;
      const int64_t target = targets[i];
      if (target == targets.ignore_index) {
        write_loss(i, 0);
        if (slope_row) row.clear(slope_row);
        continue;
      }
      write_loss(i, smoothing > 0 ? row.template run<true>(x_row, next, target, scale(i), slope_row, buffer)
                                  : row.template run<false>(x_row, next, target, scale(i), slope_row, buffer));
    }
    if (stream) end_stream();
  });
}

// dx = slope * scale(row). dx may be slope: rows of a scale of 1 are then left as they are.
template <typename T, class Scale>
void scale_loop(const T *slope, T *dx, int64_t rows, int64_t n, Scale scale) {
  const bool stream = worth_streaming(rows * n * sizeof(T));
  parallel_pieces(rows, rows_per_task(rows, n), [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Accumulate<T> factor = scale(i);
      if (factor == 1 && dx == slope) continue;
      auto step = [=](int64_t j, auto part) { store(dx + i * n + j, load(slope + i * n + j, part) * factor, part); };
      stream ? sweep_stream(dx + i * n, n, step) : sweep<T>(n, step);
    }
    if (stream) end_stream();
  });
}

// ----------------------------------------------------------------------------------------------------- launchers

// A forward. slope: null for none. extras: with what else is written.
template <class Op, typename T>
Status cross_entropy_forward(const Op &op, const Tensor *in, const Tensor &y, const Tensor &work, T *slope,
                             const Extras<T> &extras) {
  using A = Accumulate<T>;
  const Tensor &x = in[op.kX];
  const int64_t rows = op.rows(x), cols = op.cols(x);
  const Targets targets{in[op.kTarget], op.ignore_index};
  if (op.reduces() && !work) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  AOT_TRY(targets.check(op.name, rows, cols));
  const Loss<T> result(y);
  A *losses = op.reduces() ? work.as<A>() + op.kLosses : nullptr;
  auto write_loss = [=](int64_t i, double value) {
    losses ? void(losses[i] = static_cast<A>(value)) : result.write(i, static_cast<A>(value));
  };
  const auto count = static_cast<A>(op.mean() ? targets.sum(rows, [&](int64_t t) { return extras.weight_of(t); }) : 1);
  const A scale = op.divides_slope(x) ? 1 / count : A(1);
  cross_entropy_loop(x.as<const T>(), targets, extras, slope, rows, cols, op.label_smoothing, write_loss,
                     [=](int64_t) { return scale; });
  if (!op.reduces()) return kOk;
  const double sum = sum_of(rows, [=](int64_t i) { return losses[i]; });
  result.write(0, static_cast<A>(sum / count));
  return kOk;
}

// A backward. slope: absent for none.
template <class Op, typename T>
Status cross_entropy_backward(const Op &op, const Tensor *in, const Tensor &slope, T *dx, const Extras<T> &extras) {
  using A = Accumulate<T>;
  const Tensor &x = in[op.kX];
  const int64_t rows = op.rows(x), cols = op.cols(x);
  const Targets targets{in[op.kTarget], op.ignore_index};
  AOT_TRY(targets.check(op.name, rows, cols));
  const bool keeps = op.keeps(slope), divide = op.mean() && !(keeps && op.divides_slope(x));
  const bool each_row = !op.reduces();
  const auto count = static_cast<A>(divide ? targets.sum(rows, [&](int64_t t) { return extras.weight_of(t); }) : 1);
  auto scale = [=, from = Loss<T>(in[op.kDy])](int64_t i) { return from.read(each_row ? i : 0) / count; };
  // 0 for an ignored row, also if dy is not finite or the count is 0
  auto factor = [=](int64_t i) { return targets.ignored(i) ? A(0) : scale(i); };
  if (keeps) return scale_loop(slope.as<const T>(), dx, rows, cols, factor), kOk;
  cross_entropy_loop(
      x.as<const T>(), targets, extras, dx, rows, cols, op.label_smoothing, [](int64_t, double) {}, scale);
  return kOk;
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot
