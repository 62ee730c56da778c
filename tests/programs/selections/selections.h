// Operators whose tensors are not only floating: indices, counts, random bits, a state, and every dtype.
//
// flipped    y[i] = x[n - 1 - i], of any dtype
// argmax     the place of the largest element of each row
// topk       the k largest elements of each row, in their order, and their places
// histogram  counts[b]: the elements of x in [b, b + 1)
// take       y[i] = table[index[i]], rows
// drop       y = x / (1 - p), or 0 with the probability p, by the bits of seed
// centered   y = x - mean, where mean then moves by momentum to the mean of x: mean is written in place
// squares    y = the sum of the squares of 20 tensors
// polar      z = radius * exp(i * angle)
#pragma once
#include "aot.h"

namespace aot {
inline namespace AOT_ISA {

inline Status check_single(const char *op, const char *slot, const Spec &s) {
  if (s.dtype == DType::float32 || s.dtype == DType::float64 || s.dtype == DType::unknown) return kOk;
  return fail(kUnsupportedDtype, "%s: %s has dtype %s, expected float32 or float64", op, slot, dtype_name(s.dtype));
}

inline Status check_rank(const char *op, const char *slot, const Spec &s, int ndim) {
  if (!s.rank_known() || s.ndim == ndim) return kOk;
  return fail(kInvalidArgument, "%s: %s has shape %s, expected %d axes", op, slot, ShapeText(s).text, ndim);
}

inline Status check_rows(const char *op, const Spec &x, int64_t least) {
  AOT_TRY(check_single(op, "x", x));
  AOT_TRY(check_rank(op, "x", x, 2));
  const int64_t length = x.ndim == 2 ? x.shape[1] : kUnknownDim;
  if (length < 0 || length >= least) return kOk;
  return fail(kInvalidArgument, "%s: x has shape %s, expected rows of %lld elements or more", op, ShapeText(x).text,
              static_cast<long long>(least));
}

struct NoAttrs {
  Status init(const Attrs &) { return kOk; }
};

struct Flipped : NoAttrs {
  static constexpr const char *name = "flipped";
  static constexpr Slot inputs[] = {{"x", required, "any dtype"}};
  static constexpr Slot outputs[] = {{"y"}};

  Status infer(const Tensor *in, Spec *out) const { return out[0] = in[0], kOk; }
};

struct Argmax : NoAttrs {
  static constexpr const char *name = "argmax";
  static constexpr Slot inputs[] = {{"x"}};
  static constexpr Slot outputs[] = {{"place"}};

  Status infer(const Tensor *in, Spec *out) const {
    AOT_TRY(check_rows(name, in[0], 1));
    out[0] = in[0], out[0].dtype = DType::int64;
    if (in[0].rank_known()) out[0].ndim = 1;
    return kOk;
  }
};

struct TopkAttrs {
  int64_t k = 1;

  Status init(const Attrs &attrs) {
    AOT_TRY(attrs.get("k", &k));
    return k > 0 ? kOk : fail(kInvalidArgument, "%s: k is %lld, expected 1 or more", attrs.op(), (long long)k);
  }
  Spec like(const Spec &x, DType dtype) const {
    Spec s = x;
    s.dtype = dtype;
    if (x.rank_known()) s.shape[1] = k;
    return s;
  }
};

struct Topk : TopkAttrs {
  static constexpr const char *name = "topk";
  static constexpr Slot inputs[] = {{"x"}};
  static constexpr Slot outputs[] = {{"values"}, {"place"}};

  Status infer(const Tensor *in, Spec *out) const {
    AOT_TRY(check_rows(name, in[0], k));
    return out[0] = like(in[0], in[0].dtype), out[1] = like(in[0], DType::int64), kOk;
  }
};

struct TopkBackward : TopkAttrs {
  static constexpr const char *name = "topk_backward";
  static constexpr Slot inputs[] = {{"dvalues"}, {"place"}, {"x"}};
  static constexpr Slot outputs[] = {{"dx"}};

  Status infer(const Tensor *in, Spec *out) const {
    AOT_TRY(check_rows(name, in[2], k));
    AOT_TRY(check_like(name, "dvalues", in[0], "values", like(in[2], in[2].dtype)));
    AOT_TRY(check_dtype(name, "place", in[1], DType::int64));
    AOT_TRY(check_shape(name, "place", in[1], "values", in[0]));
    return out[0] = in[2], kOk;
  }
};

struct Histogram {
  static constexpr const char *name = "histogram";
  static constexpr Slot inputs[] = {{"x"}};
  static constexpr Slot outputs[] = {{"counts"}};
  int64_t bins = 1;

  Status init(const Attrs &attrs) { return attrs.get("bins", &bins); }
  Status infer(const Tensor *in, Spec *out) const {
    AOT_TRY(check_single(name, "x", in[0]));
    if (bins < 1) return fail(kInvalidArgument, "%s: bins is %lld, expected 1 or more", name, (long long)bins);
    return out[0] = Spec::vector(DType::int64, bins), kOk;
  }
};

struct Take : NoAttrs {
  static constexpr const char *name = "take";
  static constexpr Slot inputs[] = {{"table"}, {"index", required, kIntegers}};
  static constexpr Slot outputs[] = {{"y"}};

  static Status infer_rows(const char *op, const Spec &table, const Spec &index, Spec *y) {
    AOT_TRY(check_single(op, "table", table));
    AOT_TRY(check_rank(op, "table", table, 2));
    AOT_TRY(check_integer(op, "index", index));
    AOT_TRY(check_rank(op, "index", index, 1));
    *y = table;
    if (table.rank_known()) y->shape[0] = index.rank_known() ? index.shape[0] : kUnknownDim;
    return kOk;
  }
  Status infer(const Tensor *in, Spec *out) const { return infer_rows(name, in[0], in[1], out); }
};

struct TakeBackward : NoAttrs {
  static constexpr const char *name = "take_backward";
  static constexpr Slot inputs[] = {{"dy"}, {"table"}, {"index", required, kIntegers}};
  static constexpr Slot outputs[] = {{"dtable"}};

  Status infer(const Tensor *in, Spec *out) const {
    Spec y;
    AOT_TRY(Take::infer_rows(name, in[1], in[2], &y));
    AOT_TRY(check_like(name, "dy", in[0], "y", y));
    return out[0] = in[1], kOk;
  }
};

struct DropAttrs {
  double p = 0.5;

  Status init(const Attrs &attrs) { return attrs.get("p", &p); }
  static Status infer(const char *op, const char *slot, const Tensor *in, Spec *out) {
    AOT_TRY(check_single(op, slot, in[0]));
    AOT_TRY(check_dtype(op, "seed", in[1], DType::int32));
    AOT_TRY(check_shape(op, "seed", in[1], "two of 32 bits", Spec::vector(DType::int32, 2)));
    return *out = in[0], kOk;
  }
};

struct Drop : DropAttrs {
  static constexpr const char *name = "drop";
  static constexpr Slot inputs[] = {{"x"}, {"seed", required, "int32"}};
  static constexpr Slot outputs[] = {{"y"}};

  Status infer(const Tensor *in, Spec *out) const { return DropAttrs::infer(name, "x", in, out); }
};

struct DropBackward : DropAttrs {
  static constexpr const char *name = "drop_backward";
  static constexpr Slot inputs[] = {{"dy"}, {"seed", required, "int32"}};
  static constexpr Slot outputs[] = {{"dx"}};

  Status infer(const Tensor *in, Spec *out) const { return DropAttrs::infer(name, "dy", in, out); }
};

struct Centered {
  static constexpr const char *name = "centered";
  static constexpr Slot inputs[] = {{"x"}, {"mean"}};
  static constexpr Slot outputs[] = {{"y"}};
  double momentum = 0.1;

  Status init(const Attrs &attrs) { return attrs.get("momentum", &momentum); }
  Status infer(const Tensor *in, Spec *out) const {
    AOT_TRY(check_rows(name, in[0], 0));
    Spec row = in[0].rank_known() ? Spec::vector(in[0].dtype, in[0].shape[1]) : Spec::unknown_rank(in[0].dtype);
    AOT_TRY(check_like(name, "mean", in[1], "a row of x", row));
    return out[0] = in[0], kOk;
  }
};

#define TWENTY(P)                                                                                               \
  {P "0"}, {P "1"}, {P "2"}, {P "3"}, {P "4"}, {P "5"}, {P "6"}, {P "7"}, {P "8"}, {P "9"}, {P "10"}, {P "11"}, \
      {P "12"}, {P "13"}, {P "14"}, {P "15"}, {P "16"}, {P "17"}, {P "18"}, {P "19"}
constexpr int kTwenty = 20;

struct Squares : NoAttrs {
  static constexpr const char *name = "squares";
  static constexpr Slot inputs[] = {TWENTY("x")};
  static constexpr Slot outputs[] = {{"y"}};

  static Status check(const char *op, const Tensor *in) {
    AOT_TRY(check_single(op, "x0", in[0]));
    for (int i = 1; i < kTwenty; ++i) AOT_TRY(check_like(op, inputs[i].name, in[i], "x0", in[0]));
    return kOk;
  }
  Status infer(const Tensor *in, Spec *out) const {
    AOT_TRY(check(name, in));
    return out[0] = in[0], kOk;
  }
};

struct SquaresBackward : NoAttrs {
  static constexpr const char *name = "squares_backward";
  static constexpr Slot inputs[] = {{"dy"}, TWENTY("x")};
  static constexpr Slot outputs[] = {TWENTY("dx")};

  Status infer(const Tensor *in, Spec *out) const {
    AOT_TRY(Squares::check(name, in + 1));
    AOT_TRY(check_like(name, "dy", in[0], "x0", in[1]));
    for (int i = 0; i < kTwenty; ++i) out[i] = in[1];
    return kOk;
  }
};

struct Polar : NoAttrs {
  static constexpr const char *name = "polar";
  static constexpr Slot inputs[] = {{"radius"}, {"angle"}};
  static constexpr Slot outputs[] = {{"z"}};

  Status infer(const Tensor *in, Spec *out) const {
    AOT_TRY(check_single(name, "radius", in[0]));
    AOT_TRY(check_like(name, "angle", in[1], "radius", in[0]));
    out[0] = in[0];
    if (in[0].dtype != DType::unknown)
      out[0].dtype = in[0].dtype == DType::float64 ? DType::complex128 : DType::complex64;
    return kOk;
  }
};

}  // namespace AOT_ISA
}  // namespace aot
