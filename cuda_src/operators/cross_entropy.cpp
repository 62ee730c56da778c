#include "cross_entropy.h"

#include "cpu/entry.h"
#include "cpu/parallel.h"
#include "cpu/softmax.h"

namespace aot {
inline namespace AOT_ISA {

// ------------------------------------------------------------------------------------------------------- targets

struct Targets {
  const Tensor &tensor;
  int64_t ignore_index;

  int64_t operator[](int64_t row) const {
    return tensor.dtype == DType::int64 ? tensor.as<const int64_t>()[row] : tensor.as<const int32_t>()[row];
  }
  bool ignored(int64_t row) const { return (*this)[row] == ignore_index; }

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
  int64_t count(int64_t rows) const {
    int64_t n = 0;
    for (int64_t i = 0; i < rows; ++i) n += !ignored(i);
    return n;
  }
};

// ---------------------------------------------------------------------------------------------------------- loops

template <typename T>
Accumulate<T> load_one(const T *p) {
  return load(p, Part{1})[0];
}
template <typename T>
void store_one(T *p, Accumulate<T> value) {
  store(p, Vec<T>{} + value, Part{1});
}

template <typename T>
struct CrossEntropyRow {
  using A = Accumulate<T>;
  int64_t n;
  A smoothing;
  bool stream;

  // The loss of a row, and its slope times `scale` unless it is null; `buffer` is as of row_buffer().
  template <bool smooth>
  double run(const T *x, const T *next, int64_t target, A scale, T *slope, A *buffer) const {
    const auto s = exponentials<smooth>(x, slope ? x : next, n, [=](int64_t j, Vec<T> e, auto part) {
      if (buffer) store(buffer + j, e, part);
    });
    if (slope) {
      const A p_scale = static_cast<A>(1 / s.sum);
      if (buffer) write(slope, target, scale, [=](int64_t j, auto part) { return load(buffer + j, part) * p_scale; });
      else
        write(slope, target, scale,
              [=](int64_t j, auto part) { return exp_nonpositive<T>(load(x + j, part) - s.top) * p_scale; });
    }
    if (target < 0 || target >= n) return __builtin_nan("");  // it has changed since it was checked
    const double log_sum = __builtin_log(s.sum), loss = log_sum - (static_cast<double>(load_one(x + target)) - s.top);
    return smooth ? (1 - smoothing) * loss + smoothing * (log_sum - s.rest / n) : loss;
  }

  template <class P>
  void write(T *slope, int64_t target, A scale, P p) const {
    const A each = smoothing / n, hit = 1 - smoothing;
    auto step = [=](int64_t j, auto part) {
      Vec<T> v = p(j, part) - each;
      if (static_cast<uint64_t>(target - j) < kLanes<T>) v[target - j] -= hit;
      store(slope + j, v * scale, part);
    };
    stream ? sweep_stream(slope, n, step) : sweep<T>(n, step);
  }

  void clear(T *slope) const {
    auto step = [=](int64_t j, auto part) { store(slope + j, Vec<T>{}, part); };
    stream ? sweep_stream(slope, n, step) : sweep<T>(n, step);
  }
};

// tell(row, loss) and the slope of each row, times scale(row), unless it is null.
template <typename T, class Tell, class Scale>
void cross_entropy_loop(const T *x, Targets targets, T *slope, int64_t rows, int64_t n, double smoothing, Tell tell,
                        Scale scale) {
  using A = Accumulate<T>;
  const bool stream = slope && streams(rows * n * sizeof(T));
  const CrossEntropyRow<T> row{n, static_cast<A>(smoothing), stream};
  parallel_pieces(rows, rows_piece(n), [=](int64_t begin, int64_t end) {
    A *buffer = slope ? row_buffer<T>(n) : nullptr;
    for (int64_t i = begin; i < end; ++i) {
      const T *here = x + i * n, *next = i + 1 < end ? here + n : here;
      T *there = slope ? slope + i * n : nullptr;
      const int64_t target = targets[i];
      if (target == targets.ignore_index) {
        tell(i, 0);
        if (there) row.clear(there);
        continue;
      }
      tell(i, smoothing > 0 ? row.template run<true>(here, next, target, scale(i), there, buffer)
                            : row.template run<false>(here, next, target, scale(i), there, buffer));
    }
    if (stream) end_stream();
  });
}

template <typename T, class Scale>
void scale_loop(const T *slope, T *dx, int64_t rows, int64_t n, Scale scale) {
  const bool stream = streams(rows * n * sizeof(T));
  parallel_pieces(rows, rows_piece(n), [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Accumulate<T> factor = scale(i);
      auto step = [=](int64_t j, auto part) { store(dx + i * n + j, load(slope + i * n + j, part) * factor, part); };
      stream ? sweep_stream(dx + i * n, n, step) : sweep<T>(n, step);
    }
    if (stream) end_stream();
  });
}

// ----------------------------------------------------------------------------------------------------- launchers

inline Status cross_entropy_cpu(const CrossEntropy &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &x = in[0], &loss = out[0], &slope = out[1], &work = out[2];
  if (op.reduces() && !work) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  const int64_t rows = op.rows(x), cols = op.cols(x);
  const Targets targets{in[1], op.ignore_index};
  AOT_TRY(targets.check(op.name, rows, cols));
  return dispatch_floating(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    using A = Accumulate<T>;
    T *result = loss.as<T>();
    A *losses = op.reduces() ? work.as<A>() : nullptr;
    auto tell = [=](int64_t i, double value) {
      losses ? void(losses[i] = static_cast<A>(value)) : store_one(result + i, static_cast<A>(value));
    };
    cross_entropy_loop(x.as<const T>(), targets, slope.as<T>(), rows, cols, op.label_smoothing, tell,
                       [](int64_t) { return A(1); });
    if (!op.reduces()) return kOk;
    double sum = 0;
    for (int64_t i = 0; i < rows; ++i) sum += losses[i];
    store_one(result, static_cast<A>(op.mean() ? sum / targets.count(rows) : sum));
    return kOk;
  });
}

inline Status cross_entropy_backward_cpu(const CrossEntropyBackward &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &dy = in[0], &x = in[1], &slope = in[3], &dx = out[0];
  const int64_t rows = op.rows(x), cols = op.cols(x);
  const Targets targets{in[2], op.ignore_index};
  AOT_TRY(targets.check(op.name, rows, cols));
  return dispatch_floating(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    using A = Accumulate<T>;
    const A count = op.mean() ? static_cast<A>(targets.count(rows)) : A(1);
    const bool each_row = !op.reduces();
    auto scale = [=, from = dy.as<const T>()](int64_t i) { return load_one(from + (each_row ? i : 0)) / count; };
    // an ignored row's gradient is 0, whatever dy is, and with no row to count
    auto factor = [=](int64_t i) { return targets.ignored(i) ? A(0) : scale(i); };
    if (slope) return scale_loop(slope.as<const T>(), dx.as<T>(), rows, cols, factor), kOk;
    cross_entropy_loop(
        x.as<const T>(), targets, dx.as<T>(), rows, cols, op.label_smoothing, [](int64_t, double) {}, scale);
    return kOk;
  });
}

}  // namespace AOT_ISA
}  // namespace aot

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::CrossEntropy, aot_cross_entropy_cpu, aot::cross_entropy_cpu)
AOT_CPU_ENTRY(aot::CrossEntropyBackward, aot_cross_entropy_backward_cpu, aot::cross_entropy_backward_cpu)
