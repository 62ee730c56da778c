// The rows of cross entropy on a GPU as cross_entropy.cu compiles them, for cross_entropy_lse and linear_cross_entropy
// too.
#pragma once
#include "cross_entropy.h"
#include "cuda/launch.cuh"
#include "cuda/vector.cuh"

namespace aot {
inline namespace AOT_ISA {

// ------------------------------------------------------------------------------------------------------- arguments

struct Targets {
  const void *data;
  bool wide;  // int64, not int32
  int64_t ignore_index;

  Targets(const Tensor &t, int64_t ignore_index)
      : data(t.data), wide(t.dtype == DType::int64), ignore_index(ignore_index) {}
  __device__ int64_t operator[](int64_t row) const {
    return wide ? static_cast<const int64_t *>(data)[row] : static_cast<const int32_t *>(data)[row];
  }
};

// The class index of one row.
struct Class {
  int64_t target;
  bool ignored, in_range;

  __device__ Class(int64_t target, int64_t ignore_index, int64_t cols)
      : target(target), ignored(target == ignore_index), in_range(target >= 0 && target < cols) {}
  // The column of its logit; an out-of-range index must not be read, and gives column 0.
  __device__ int64_t column() const { return in_range ? target : 0; }
};

// The loss, dy, or the weights of the classes: of T, or of float32, in which T is summed.
template <typename T, typename A = Accumulate<T>>
struct Loss {
  void *data = nullptr;
  bool wide = false;

  Loss() = default;
  explicit Loss(const Tensor &t) : data(t.data), wide(itemsize(t.dtype) > static_cast<int64_t>(sizeof(T))) {}
  __device__ A read(int64_t i) const {
    return wide ? static_cast<const A *>(data)[i] : widen(static_cast<const T *>(data)[i]);
  }
  __device__ void write(int64_t i, A value) const {
    if (wide) static_cast<A *>(data)[i] = value;
    else static_cast<T *>(data)[i] = narrow<T>(value);
  }
  // Goes on to the n-th element.
  void pass(int64_t n) {
    if (data) data = static_cast<char *>(data) + n * (wide ? sizeof(A) : sizeof(T));
  }
};

// The factor of a row's slope: dy, or 1 if there is none, divided by *count unless that is null.
template <typename T, typename A = Accumulate<T>>
struct Scale {
  Loss<T> dy;
  bool each_row;
  const A *count;

  // To be divided where the factor is needed: the numbers are loaded meanwhile.
  struct Quotient {
    A dy, count;
    __device__ A value() const { return dy / count; }
  };
  __device__ Quotient load(int64_t row, bool present) const {
    return {dy.data && present ? dy.read(each_row ? row : 0) : A(1), count ? *count : A(1)};
  }
  __device__ A of(int64_t row, bool present) const {
    const Quotient q = load(row, present);
    return count ? q.value() : q.dy;
  }
};

// Class indices that are written.
struct Indices {
  void *data = nullptr;
  bool wide = false;  // int64, not int32

  Indices() = default;
  explicit Indices(const Tensor &t) : data(t.data), wide(t.dtype == DType::int64) {}
  __device__ void write(int64_t i, int value) const {
    if (wide) static_cast<int64_t *>(data)[i] = value;
    else static_cast<int32_t *>(data)[i] = value;
  }
};

// Extras are for few calls, each unless it is null or 0. They have kernels of its own, which have registers for them.
template <typename T, typename A = Accumulate<T>>
struct Extras {
  Loss<T> weight;  // of each class
  A z_loss, softcap;
  A *lse = nullptr;     // of each row
  Indices predictions;  // of each row
  const A *dlse = nullptr;

  Extras(const CrossEntropyAttrs &attrs, const Tensor &weight)
      : weight(weight ? Loss<T>(weight) : Loss<T>()), z_loss(attrs.z_loss), softcap(attrs.softcap) {}
  bool any() const { return weight.data || z_loss != 0 || softcap != 0 || lse || predictions.data || dlse; }

  // The weight of the class of a row.
  __device__ A weight_of(const Class &c) const { return weight.data && c.in_range ? weight.read(c.target) : A(1); }
};

// The outputs of a rows kernel, each unless it is null.
template <typename T, typename A = Accumulate<T>>
struct Results {
  Loss<T> loss;     // of each row: reduction = "none"
  A *losses;        // the same for the reduction
  T *slope;         // times the scale; it may be x
  int padding = 0;  // of padded rows: elements behind each row of x and of slope, where it is 0 then

  // Lets both begin so that element `row * cols` is the row's first.
  __device__ void skip_padding(int64_t row, const T *&x) {
    x += row * padding;
    if (slope) slope += row * padding;
  }
  // thread: of those of the row
  __device__ void clear_padding(int64_t row, bool present, int thread, int64_t cols) const {
    if (present && thread < padding) slope[(row + 1) * cols + thread] = narrow<T>(0);
  }
  __device__ void write_loss(int64_t row, A value) const {
    if (loss.data) loss.write(row, value + A(0));  // + 0: not -0
    if (losses) losses[row] = value;
  }
};

// ------------------------------------------------------------------------------------------------------- launchers

// Rows without padding. scale.count is what cross_entropy_count() has written, or null. after_count: in the launch
// before.
template <typename T>
Status cross_entropy_rows(const char *op, const CrossEntropyAttrs &attrs, const Tensor &x, const Targets &targets,
                          const Results<T> &results, const Scale<T> &scale, const Extras<T> &extras, void *stream,
                          bool after_count);
// cross_entropy_rows() by the kernels with extras, whether there are any or not, of rows with padding too: a copy of
// these kernels for rows without would add 2.5 MB to the wheel.
template <typename T>
Status cross_entropy_extra_rows(const char *op, const CrossEntropyAttrs &attrs, const Tensor &x, const Targets &targets,
                                const Results<T> &results, const Scale<T> &scale, const Extras<T> &extras, void *stream,
                                bool after_count);

// The rows of a forward that reduces them, all by one block (cross_entropy_few.cu).
template <typename T>
Status cross_entropy_few(const char *op, const CrossEntropyAttrs &attrs, const Tensor &x, const Targets &targets,
                         const Loss<T> &loss, T *slope, const Extras<T> &extras, void *stream);
constexpr int kFewRows = 32, kFewCols = 256;

// Whether that block has them: more would take it longer than three kernels. It has no weights, no cap and no float64.
template <typename T, typename A>
bool has_few_rows(const CrossEntropyAttrs &attrs, const Extras<T, A> &extras, int64_t rows, int64_t cols) {
  const bool few = sizeof(T) <= 4 && rows >= 1 && rows <= kFewRows && cols >= 1 && cols <= kFewCols;
  return few && attrs.reduces() && !extras.weight.data && extras.softcap == 0;
}

// Writes the divisor of a mean over x's rows: their count, or, given the weights of the classes, the sum of these. This
// kernel overlaps the end of the one before.
template <typename T>
Status cross_entropy_count(const char *op, const Targets &targets, const Loss<T> &weight, Accumulate<T> *count,
                           int64_t rows, int64_t cols, void *stream);
// The sum of the rows' losses, or their mean: divided by *weights unless that is null. This kernel overlaps the end of
// the rows kernel (overlap.cuh).
template <typename T>
Status cross_entropy_loss(const char *op, const Accumulate<T> *losses, const Loss<T> &loss, int64_t rows, bool mean,
                          const Accumulate<T> *weights, void *stream);

// The factor of a backward's rows. divides: by what cross_entropy_count() writes to the workspace.
template <class Op, typename T, typename A>
Status backward_scale(const Op &op, const Tensor *in, const Tensor &work, bool divides, const Extras<T, A> &extras,
                      Scale<T, A> *scale, void *stream) {
  const Tensor &x = in[op.kX];
  if (divides && !work) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  *scale = {Loss<T>(in[op.kDy]), !op.reduces(), divides ? work.as<A>() : nullptr};
  if (!divides) return kOk;
  const Targets targets(in[op.kTarget], op.ignore_index);
  return cross_entropy_count(op.name, targets, extras.weight, work.as<A>(), op.rows(x), op.cols(x), stream);
}

// A forward. slope: null for none. rows: cross_entropy_rows, or cross_entropy_extra_rows.
template <class Op, typename T, typename A, class Rows>
Status cross_entropy_forward(const Op &op, const Tensor *in, const Tensor &y, const Tensor &work, T *slope,
                             const Extras<T, A> &extras, Rows rows, void *stream) {
  const Tensor &x = in[op.kX];
  const int64_t n = op.rows(x);
  if (op.reduces() && !work) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  const Targets targets(in[op.kTarget], op.ignore_index);
  if constexpr (sizeof(T) <= 4)
    if (has_few_rows(op, extras, n, op.cols(x)))
      return cross_entropy_few(op.name, op, x, targets, Loss<T>(y), slope, extras, stream);
  const bool divides = slope && op.divides_slope(x), weighs = op.mean() && extras.weight.data;
  A *count = divides || weighs ? work.as<A>() : nullptr, *losses = op.reduces() ? work.as<A>() + op.kLosses : nullptr;
  if (count) AOT_TRY(cross_entropy_count(op.name, targets, extras.weight, count, n, op.cols(x), stream));
  const Results<T, A> results = {op.reduces() ? Loss<T>() : Loss<T>(y), losses, slope};
  const Scale<T, A> scale = {{}, false, divides ? count : nullptr};
  AOT_TRY(rows(op.name, op, x, targets, results, scale, extras, stream, true));
  if (!op.reduces()) return kOk;
  return cross_entropy_loss(op.name, losses, Loss<T>(y), n, op.mean(), weighs ? count : nullptr, stream);
}

// A backward that computes dx from x.
template <class Op, typename T, typename A, class Rows>
Status cross_entropy_backward(const Op &op, const Tensor *in, T *dx, const Tensor &work, const Extras<T, A> &extras,
                              Rows rows, void *stream) {
  const Tensor &x = in[op.kX];
  const Targets targets(in[op.kTarget], op.ignore_index);
  Scale<T, A> scale;
  AOT_TRY(backward_scale(op, in, work, op.mean(), extras, &scale, stream));
  return rows(op.name, op, x, targets, Results<T, A>{{}, nullptr, dx}, scale, extras, stream, true);
}

}  // namespace AOT_ISA
}  // namespace aot
