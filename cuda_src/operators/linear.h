// linear: y = activation(x weight^T + bias), for the rows of x. The pre-activation, x weight^T + bias, may be kept for
// the backward: computing it again is a third product, keeping it needs as much memory as y.
#pragma once
#include <algorithm>

#include "gemm/transposed.h"

namespace aot {
inline namespace AOT_ISA {

// The lines of matrices in CUDA's products. Tensor cores are fed with 16-bit matrices whose lines begin at multiples of
// 16 bytes; products of others run at half the rate and less. Where that costs more, such matrices are copied to longer
// lines in the workspace. At 4 TB/s and 700 TFLOP/s an element's copy takes as long as 350 of the products, and saves
// more than one of these: copies are made where they take 0.7 of the time of all products at most, if these are long
// beside a launch. Sizes alone decide, because shape inference states the workspace.
struct LinearLines {
  int64_t rows, out, in;
  DType dtype;
  bool copies_out = false, copies_in = false;  // dy or its product with a slope; x and weight

  // products: 1 in the forward, 2 in the backward
  LinearLines(const Spec &x, const Spec &weight, int products)
      : rows(x.product(0, x.ndim - 1)), out(weight.shape[0]), in(x.shape[x.ndim - 1]), dtype(x.dtype) {
    constexpr int64_t kFewest = int64_t{1} << 30, kOfCopy = 500;
    const bool half = itemsize(dtype) == 2 || dtype == DType::unknown;  // MindSpore tells shapes alone
    if (!kIsCuda || !half) return;
    const bool odd_out = products > 1 && out % kVector, odd_in = in % kVector;
    const int64_t size = bounded_product(bounded_product(rows, out), in);
    const int64_t copied = (odd_out ? bounded_product(rows, out) : 0) +
                           (odd_in ? bounded_product(rows, in) + bounded_product(out, in) : 0);
    const bool pays = size >= kFewest && copied <= size / kOfCopy * products;
    copies_out = pays && odd_out, copies_in = pays && odd_in;
  }

  int64_t out_line() const { return copies_out ? whole(out) : out; }
  int64_t in_line() const { return copies_in ? whole(in) : in; }
  // Elements of the workspace for the copies.
  int64_t dy_elements() const { return copies_out ? elements(rows, out_line()) : 0; }
  int64_t x_elements() const { return copies_in ? elements(rows, in_line()) : 0; }
  // In which dweight may be, of whole vectors of rows.
  int64_t weight_elements() const {
    return copies_in ? elements((out + kVector - 1) / kVector * kVector, in_line()) : 0;
  }

 private:
  static constexpr int64_t kVector = 8, kCacheLine = 64;
  // Long lines begin at multiples of 128 bytes, as the parts do that TMA loads: each would be in two cache lines.
  static int64_t whole(int64_t n) {
    const int64_t unit = n < 16 * kCacheLine ? kVector : kCacheLine;
    return (n + unit - 1) / unit * unit;
  }
  int64_t elements(int64_t lines, int64_t line) const {
    return workspace_elements(bounded_product(lines, line), dtype);
  }
};

struct LinearAttrs {
  static constexpr const char *kActivations[] = {nullptr, "relu", "gelu_tanh", "gelu", "silu"};  // as Activation
  int which = 0;
  bool allow_tf32 = false;

  Status init(const Attrs &attrs) {
    AOT_TRY(attrs.get("activation", kActivations, &which));
    return attrs.get("allow_tf32", &allow_tf32);
  }
  Activation activation() const { return static_cast<Activation>(which); }

  // Checks the inputs and infers y.
  Status check(const char *op, const Spec &x, const Spec &weight, const Spec &bias, Spec *y) const {
    AOT_TRY(check_floating(op, "x", x));
    AOT_TRY(check_floating(op, "weight", weight));
    AOT_TRY(check_dtype(op, "weight", weight, x.dtype));
    if (x.rank_known() && x.ndim < 1)
      return fail(kInvalidArgument, "%s: x has shape (), expected at least one axis", op);
    const int64_t in = x.rank_known() ? x.shape[x.ndim - 1] : kUnknownDim;
    const bool known = weight.rank_known();
    if (known && (weight.ndim != 2 || !same_dim(weight.shape[1], in)))
      return fail(kInvalidArgument, "%s: weight has shape %s, expected (out, %lld), to multiply %s, the shape of x", op,
                  ShapeText(weight).text, static_cast<long long>(in), ShapeText(x).text);
    const Spec rows = bias_spec(x, weight);
    if (bias) AOT_TRY(check_like(op, "bias", bias, "weight's first axis", rows));
    *y = x;
    if (!x.rank_known()) return kOk;
    y->shape[y->ndim - 1] = rows.shape[0];
    return check_size(op, "the result", *y);
  }

  // The pre-activation; without an activation it has no columns.
  Spec pre_activation(const Spec &y) const {
    Spec s = y;
    if (!activation() && s.rank_known()) s.shape[s.ndim - 1] = 0;
    return s;
  }

  // (out,), as bias and dbias
  static Spec bias_spec(const Spec &x, const Spec &weight) {
    return Spec::vector(x.dtype, weight.rank_known() ? weight.shape[0] : kUnknownDim);
  }
};

struct Linear : LinearAttrs {
  static constexpr const char *name = "linear";
  static constexpr Slot inputs[] = {{"x"}, {"weight"}, {"bias", optional}};
  static constexpr Slot outputs[] = {{"y"}, {"pre_activation", optional}, {"workspace", workspace}};

  Status infer(const Tensor *in, Spec *out) const {
    const Spec &x = in[0];
    AOT_TRY(check(name, x, in[1], in[2], &out[0]));
    out[1] = pre_activation(out[0]);
    const bool all = x.known() && out[0].known();
    int64_t work = kUnknownDim;
    if (all) {
      const LinearLines lines(x, in[1], 1);
      work = lines.x_elements() + lines.weight_elements() + library_workspace(out[0].size(), x.shape[x.ndim - 1]);
    }
    out[2] = Spec::vector(accumulate_dtype(x.dtype), work);
    return kOk;
  }
};

struct LinearBackward : LinearAttrs {
  static constexpr const char *name = "linear_backward";
  static constexpr Slot inputs[] = {{"dy"}, {"x"}, {"weight"}, {"bias", optional}, {"pre_activation", optional}};
  static constexpr Slot outputs[] = {
      {"dx", optional}, {"dweight", optional}, {"dbias", optional}, {"workspace", workspace}};
  // CUDA's partial sums of dbias: at most so many of each of n columns. Few columns need many for enough blocks.
  static int64_t parts(int64_t n) { return n ? std::clamp<int64_t>((1 << 18) / n, 1, 256) : 0; }
  // The elements of all partial sums, rounded up so that the next part of the workspace is aligned.
  static int64_t partial_elements(int64_t n) { return kIsCuda ? (parts(n) * n + 63) / 64 * 64 : 0; }

  Status infer(const Tensor *in, Spec *out) const {
    out[1] = in[2];
    return infer(name, in, &out[0], &out[2], &out[3]);
  }
  Status infer(const char *op, const Tensor *in, Spec *dx, Spec *dbias, Spec *scratch) const {
    const Spec &dy = in[0], &x = in[1], &weight = in[2];
    Spec y;
    AOT_TRY(check(op, x, weight, in[3], &y));
    AOT_TRY(check_like(op, "dy", dy, "y", y));
    if (in[4]) AOT_TRY(check_like(op, "pre_activation", in[4], "the input of the activation", pre_activation(y)));
    *dx = x, *dbias = bias_spec(x, weight);
    int64_t work = kUnknownDim;
    if (x.known() && y.known()) {
      const LinearLines lines(x, weight, 2);
      work = grad_elements(y, lines) + partial_elements(dbias->shape[0]) + lines.x_elements() +
             lines.weight_elements() + library_workspace(y.size(), x.shape[x.ndim - 1]) +
             transposed_elements(lines.out, lines.in, lines.rows, x.dtype, allow_tf32);
    }
    *scratch = Spec::vector(accumulate_dtype(x.dtype), work);
    return kOk;
  }

  // Scratch for the gradient of the pre-activation, of dy's dtype, or for dy's copy. Behind it are the partial sums of
  // dbias, the copies of x and weight, and cuBLASLt's scratch.
  int64_t grad_elements(const Spec &dy, const LinearLines &lines) const {
    if (lines.copies_out) return lines.dy_elements();
    return activation() ? workspace_elements(dy.size(), dy.dtype) : 0;
  }
};

// The backward that adds the gradient of weight to dweight, which has the accumulate dtype. The workspace is a required
// output with an element at least: without an output that has elements no kernel is launched (aot.h), and dx and dbias
// may be unwanted.
struct LinearAccumulate : LinearBackward {
  static constexpr const char *name = "linear_accumulate";
  static constexpr Slot inputs[] = {{"dy"},     {"x"}, {"weight"}, {"bias", optional}, {"pre_activation", optional},
                                    {"dweight"}};
  static constexpr Slot outputs[] = {{"dx", optional}, {"dbias", optional}, {"workspace"}};

  Status infer(const Tensor *in, Spec *out) const {
    AOT_TRY(LinearBackward::infer(name, in, &out[0], &out[1], &out[2]));
    if (out[2].shape[0] == 0) out[2].shape[0] = 1;
    AOT_TRY(check_dtype(name, "dweight", in[5], accumulate_dtype(in[1].dtype)));
    return check_shape(name, "dweight", in[5], "weight", in[2]);
  }
};

// The products, in which x and dy are matrices of all their rows.
struct LinearMatmuls {
  int64_t rows, out, in;
  DType dtype;
  Operand x, weight;  // or their copies
  int64_t out_line;   // the stride of y and dy

  LinearMatmuls(const Tensor &x, const Tensor &weight)
      : rows(x.product(0, x.ndim - 1)),
        out(weight.shape[0]),
        in(weight.shape[1]),
        dtype(x.dtype),
        x{x.data, in},
        weight{weight.data, in},
        out_line(out) {}

  MatmulProblem forward(void *y) const { return {dtype, rows, out, in, x, weight.transpose(), {y, out_line}}; }
  MatmulProblem dx(void *dy, const Tensor &dx) const {
    return {dtype, rows, in, out, {dy, out_line}, weight, {dx.data, in}};
  }
  MatmulProblem dweight(void *dy, const Tensor &dweight, bool adds) const {
    MatmulProblem p = {dtype, out, in, rows, {dy, out_line, true}, x, {dweight.data, in}};
    return p.adds = adds, p;
  }
};

}  // namespace AOT_ISA
}  // namespace aot
