// An operator of aot.h with an output of integers and one of bools: in each row, the place of the largest element, and
// whether it is positive; and the largest element itself, with its gradient.
#include "aot.h"

namespace aot {
inline namespace AOT_ISA {

inline Status infer_rows(const char *op, const Spec &x, Spec *row) {
  AOT_TRY(check_floating(op, "x", x));
  if (x.rank_known() && (x.ndim != 2 || x.shape[1] == 0))
    return fail(kInvalidArgument, "%s: x has shape %s, expected rows of one element or more", op, ShapeText(x).text);
  *row = x;
  if (x.rank_known()) row->ndim = 1;
  return kOk;
}

struct Largest {
  static constexpr const char *name = "largest";
  static constexpr Slot inputs[] = {{"x"}};
  static constexpr Slot outputs[] = {{"y"}, {"place"}, {"positive"}};

  Status init(const Attrs &) { return kOk; }
  Status infer(const Tensor *in, Spec *out) const {
    AOT_TRY(infer_rows(name, in[0], &out[0]));
    out[1] = out[2] = out[0];
    out[1].dtype = DType::int64, out[2].dtype = DType::boolean;
    return kOk;
  }
};

struct LargestBackward {
  static constexpr const char *name = "largest_backward";
  static constexpr Slot inputs[] = {{"dy"}, {"x"}};
  static constexpr Slot outputs[] = {{"dx"}};

  Status init(const Attrs &) { return kOk; }
  Status infer(const Tensor *in, Spec *out) const {
    Spec row;
    AOT_TRY(infer_rows(name, in[1], &row));
    AOT_TRY(check_like(name, "dy", in[0], "a number for each row of x", row));
    out[0] = in[1];
    return kOk;
  }
};

template <class T>
int64_t place_of_largest(const T *x, int64_t n) {
  int64_t place = 0;
  for (int64_t i = 1; i < n && x[place] == x[place]; ++i)
    if (x[i] > x[place] || x[i] != x[i]) place = i;
  return place;
}

template <class T>
void largest(const Tensor &x, const Tensor *out) {
  for (int64_t i = 0; i < x.shape[0]; ++i) {
    const T *row = x.as<const T>() + i * x.shape[1];
    const int64_t place = place_of_largest(row, x.shape[1]);
    out[0].as<T>()[i] = row[place], out[1].as<int64_t>()[i] = place, out[2].as<bool>()[i] = row[place] > 0;
  }
}

template <class T>
void largest_backward(const Tensor &dy, const Tensor &x, const Tensor &dx) {
  const int64_t n = x.shape[1];
  for (int64_t i = 0; i < x.shape[0]; ++i) {
    for (int64_t j = 0; j < n; ++j) dx.as<T>()[i * n + j] = 0;
    dx.as<T>()[i * n + place_of_largest(x.as<const T>() + i * n, n)] = dy.as<const T>()[i];
  }
}

inline Status check_size_of(const char *op, const Tensor &x) {
  if (x.dtype == DType::float32 || x.dtype == DType::float64) return kOk;
  return fail(kUnsupportedDtype, "%s: x has dtype %s, expected float32 or float64", op, dtype_name(x.dtype));
}

inline Status largest_cpu(const Largest &op, const Tensor *in, const Tensor *out, void *) {
  AOT_TRY(check_size_of(op.name, in[0]));
  in[0].dtype == DType::float32 ? largest<float>(in[0], out) : largest<double>(in[0], out);
  return kOk;
}

inline Status largest_backward_cpu(const LargestBackward &op, const Tensor *in, const Tensor *out, void *) {
  AOT_TRY(check_size_of(op.name, in[1]));
  if (in[1].dtype == DType::float32) largest_backward<float>(in[0], in[1], out[0]);
  else largest_backward<double>(in[0], in[1], out[0]);
  return kOk;
}

}  // namespace AOT_ISA
}  // namespace aot

AOT_ENTRY(aot::Largest, aot_largest_cpu, aot::largest_cpu)
AOT_ENTRY(aot::LargestBackward, aot_largest_backward_cpu, aot::largest_backward_cpu)
