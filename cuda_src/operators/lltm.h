// lltm     input (..., F), old_h and old_cell (..., S), weights (3S, S + F), bias (1, 3S) or (3S)
//            pre = [old_h, input] weights^T + bias, the pre-activations: S columns each of the input gate, the output
//            gate
//              and the candidate
//            i, o, c = sigmoid(pre_i), sigmoid(pre_o), elu(pre_c)
//            new_cell = old_cell + c * i,   new_h = tanh(new_cell) * o
//          gates: i, o, c of each row, (..., 3S)
// gradient with dcell = dnew_cell + dnew_h * o * (1 - tanh(new_cell)^2):
//            dpre_i = dcell * c * i * (1 - i),   dpre_o = dnew_h * tanh(new_cell) * o * (1 - o),
//            dpre_c = dcell * i * elu'(pre_c), which is 1 where c > 0 and c + 1 elsewhere
//            dold_cell = dcell,   [dold_h, dinput] = dpre weights,   dweights = dpre^T [old_h, input],
//            dbias = sum over rows of dpre
// The cell of PyTorch's tutorial "Custom C++ and CUDA Extensions", where input and old_h are matrices.
#pragma once
#include "gemm/matrix.h"

namespace aot {
inline namespace AOT_ISA {

struct LltmAttrs {
  Status init(const Attrs &) { return kOk; }

  static int64_t rows(const Spec &h) { return h.product(0, h.ndim - 1); }
  static int64_t width(const Spec &x) { return x.rank_known() ? x.shape[x.ndim - 1] : kUnknownDim; }

 protected:
  Status check(const char *op, const Spec &input, const Spec &weights, const Spec &bias, const Spec &old_h,
               const Spec &old_cell) const {
    AOT_TRY(check_floating(op, "input", input));
    AOT_TRY(check_dtype_of(op, "weights", weights, input));
    AOT_TRY(check_dtype_of(op, "bias", bias, input));
    AOT_TRY(check_dtype_of(op, "old_h", old_h, input));
    if (!fits(input, old_h))
      return fail(kInvalidArgument, "%s: input %s and old_h %s do not fit, expected (..., features) and (..., state)",
                  op, ShapeText(input).text, ShapeText(old_h).text);
    AOT_TRY(check_like(op, "old_cell", old_cell, "old_h", old_h));
    const int64_t state = width(old_h), features = width(input), all = state < 0 ? kUnknownDim : 3 * state;
    const Spec expected = spec(all, state < 0 || features < 0 ? kUnknownDim : state + features);
    if (!same_shape(weights, expected))
      return fail(kInvalidArgument,
                  "%s: weights has shape %s, expected %s, (3 * state, state + features) of input %s and old_h %s", op,
                  ShapeText(weights).text, ShapeText(expected).text, ShapeText(input).text, ShapeText(old_h).text);
    if (!same_shape(bias, spec(1, all)) && !same_shape(bias, spec(all)))
      return fail(kInvalidArgument, "%s: bias has shape %s, expected %s or %s", op, ShapeText(bias).text,
                  ShapeText(spec(1, all)).text, ShapeText(spec(all)).text);
    return kOk;
  }

  // (..., 3S)
  static Spec gates(const Spec &old_h) {
    Spec s = old_h;
    s.dtype = accumulate_dtype(old_h.dtype);
    if (s.rank_known() && width(s) >= 0) s.shape[s.ndim - 1] *= 3;
    return s;
  }

 private:
  static Spec spec(int64_t n) {
    Spec s;
    s.ndim = 1, s.shape[0] = n;
    return s;
  }
  static Spec spec(int64_t m, int64_t n) {
    Spec s;
    s.ndim = 2, s.shape[0] = m, s.shape[1] = n;
    return s;
  }
  static Status check_dtype_of(const char *op, const char *slot, const Spec &s, const Spec &model) {
    AOT_TRY(check_floating(op, slot, s));
    return check_dtype(op, slot, s, model.dtype);
  }
  static bool fits(const Spec &input, const Spec &old_h) {
    if (input.rank_known() && input.ndim == 0) return false;
    if (!input.rank_known() || !old_h.rank_known()) return true;
    if (input.ndim != old_h.ndim) return false;
    for (int i = 0; i < input.ndim - 1; ++i)
      if (!same_dim(input.shape[i], old_h.shape[i])) return false;
    return true;
  }
};

struct Lltm : LltmAttrs {
  static constexpr const char *name = "lltm";
  static constexpr Slot inputs[] = {{"input"}, {"weights"}, {"bias"}, {"old_h"}, {"old_cell"}};
  static constexpr Slot outputs[] = {{"new_h"}, {"new_cell"}, {"gates", optional}, {"workspace", workspace}};
  enum Input { kInput, kWeights, kBias, kOldH, kOldCell };
  enum Output { kNewH, kNewCell, kGates, kWork };

  Status infer(const Tensor *in, Spec *out) const {
    const Spec &input = in[kInput], &old_h = in[kOldH], &old_cell = in[kOldCell];
    AOT_TRY(check(name, input, in[kWeights], in[kBias], old_h, old_cell));
    out[kNewH] = old_h, out[kNewCell] = old_cell, out[kGates] = gates(old_h);
    const int64_t all = 3 * old_h.size();
    out[kWork] = Spec::vector(accumulate_dtype(old_h.dtype), !input.known() || !old_h.known()          ? kUnknownDim
                                                             : large(all, width(old_h) + width(input)) ? all
                                                                                                       : 0);
    return kOk;
  }

  // Whether a GPU computes `gates` pre-activations, each a sum of `terms` terms, with cuBLASLt. It writes them to
  // memory: to `gates` if they are an output, else to the workspace, so that the results are the same. Short sums are
  // faster in a kernel of our own, which does not write them.
  static bool large(int64_t gates, int64_t terms) { return terms >= 512 && library_workspace(gates, terms); }
};

// Absent gates are recomputed. dnew_h and dnew_cell may be 0-dimensional: one number for all elements.
struct LltmBackward : LltmAttrs {
  static constexpr const char *name = "lltm_backward";
  static constexpr Slot inputs[] = {{"dnew_h"}, {"dnew_cell"}, {"input"},    {"weights"},
                                    {"bias"},   {"old_h"},     {"old_cell"}, {"gates", optional}};
  static constexpr Slot outputs[] = {{"dinput", optional}, {"dweights", optional},  {"dbias", optional},
                                     {"dold_h", optional}, {"dold_cell", optional}, {"workspace", workspace}};
  enum Input { kDnewH, kDnewCell, kInput, kWeights, kBias, kOldH, kOldCell, kGates };
  enum Output { kDinput, kDweights, kDbias, kDoldH, kDoldCell, kWork };

  Status infer(const Tensor *in, Spec *out) const {
    const Spec &input = in[kInput], &old_h = in[kOldH], &old_cell = in[kOldCell];
    AOT_TRY(check(name, input, in[kWeights], in[kBias], old_h, old_cell));
    AOT_TRY(check_incoming("dnew_h", in[kDnewH], old_h));
    AOT_TRY(check_incoming("dnew_cell", in[kDnewCell], old_h));
    if (in[kGates]) AOT_TRY(check_like(name, "gates", in[kGates], "the three gates of old_h", gates(old_h)));
    out[kDinput] = input, out[kDweights] = in[kWeights], out[kDbias] = in[kBias];
    out[kDoldH] = old_h, out[kDoldCell] = old_cell;
    const bool known = input.known() && old_h.known();
    out[kWork] =
        Spec::vector(accumulate_dtype(old_h.dtype), known ? scratch(input, old_h, bool(in[kGates])).end : kUnknownDim);
    return kOk;
  }

  // The layout of the workspace, as offsets in elements. dpre comes first; it is rounded to the dtype, because both
  // operands of a product have the same type. On CUDA it is followed by recomputed gates, the partial sums of dbias and
  // cuBLASLt's scratch.
  struct Scratch {
    int64_t gates, sums, library, end;
  };
  Scratch scratch(const Spec &input, const Spec &old_h, bool have_gates) const {
    const int64_t all = 3 * old_h.size(), columns = 3 * width(old_h);
    const DType sums = accumulate_dtype(old_h.dtype);
    Scratch s;
    s.gates = workspace_elements(all, old_h.dtype);
    if (!kIsCuda) return s.sums = s.library = s.end = s.gates, s;
    s.sums = s.gates + (have_gates ? 0 : workspace_elements(all, sums));
    s.library = s.sums + workspace_elements(parts(rows(old_h)) * columns, sums);
    s.end = s.library + library_workspace(all, width(old_h) + width(input));
    return s;
  }
  // The parts of the rows for which dbias has partial sums.
  static int parts(int64_t rows) { return static_cast<int>(rows < 64 ? 1 : rows < 64 * 64 ? rows / 64 : 64); }

 private:
  Status check_incoming(const char *slot, const Spec &s, const Spec &old_h) const {
    if (s.ndim) return check_like(name, slot, s, "old_h", old_h);
    AOT_TRY(check_floating(name, slot, s));
    return check_dtype(name, slot, s, old_h.dtype);
  }
};

}  // namespace AOT_ISA
}  // namespace aot
