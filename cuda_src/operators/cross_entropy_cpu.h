// The rows of cross entropy on the CPU, for cross_entropy and linear_cross_entropy.
#pragma once
#include "cpu/entry.h"
#include "cpu/rows.h"
#include "cpu/softmax.h"
#include "cross_entropy.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// ------------------------------------------------------------------------------------------------------- targets

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
  // Rows that are not ignored.
  int64_t count(int64_t rows) const {
    int64_t n = 0;
    for (int64_t i = 0; i < rows; ++i) n += !ignored(i);
    return n;
  }
};

// ---------------------------------------------------------------------------------------------------------- loops

// The loss, or dy: of T, or of float32, in which T is summed.
template <typename T>
struct Loss {
  void *data;
  bool wide;

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

// Calls write_loss(row, loss) for each row, and writes its slope times scale(row) unless `slope` is null.
template <typename T, class WriteLoss, class Scale>
void cross_entropy_loop(const T *x, Targets targets, T *slope, int64_t rows, int64_t n, double smoothing,
                        WriteLoss write_loss, Scale scale) {
  using A = Accumulate<T>;
  const bool stream = slope && worth_streaming(rows * n * sizeof(T));
  const CrossEntropyRow<T> row{n, static_cast<A>(smoothing), stream};
  parallel_pieces(rows, rows_per_task(n), [=](int64_t begin, int64_t end) {
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
  parallel_pieces(rows, rows_per_task(n), [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Accumulate<T> factor = scale(i);
      if (factor == 1 && dx == slope) continue;
      auto step = [=](int64_t j, auto part) { store(dx + i * n + j, load(slope + i * n + j, part) * factor, part); };
      stream ? sweep_stream(dx + i * n, n, step) : sweep<T>(n, step);
    }
    if (stream) end_stream();
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot
