// lltm     input (..., F), old_h and old_cell (..., S), weights (3S, S + F), bias (1, 3S) or (3S)
//            pre = [old_h, input] weights^T + bias, the pre-activations: S columns each of the input gate, the output
//                gate and the candidate
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

  // Whether a GPU computes the gates in one kernel: there are few, and launches take longer than their sums. Else they
  // are a product of [old_h, input], which is written to the workspace, as are its sums if gates are no output.
  static bool few_gates(const Spec &input, const Spec &old_h) {
    return kIsCuda && !library_workspace(3 * old_h.size(), width(old_h) + width(input));
  }

  // The layout of the workspace, as offsets in elements. dpre and the partial sums of dbias are the backward's.
  // dpre is rounded to the dtype, because both operands of a product have the same type.
  struct Scratch {
    int64_t joined = 0, gates = 0, sums = 0, library = 0, end = 0;  // dpre is at 0
  };

 protected:
  static Scratch scratch(const Spec &input, const Spec &old_h, int64_t dpre, bool joined, bool gates, int64_t sums) {
    const int64_t both = width(old_h) + width(input), all = 3 * old_h.size();
    Scratch s;
    s.joined = dpre;
    s.gates = s.joined + (joined ? workspace_elements(rows(old_h) * both, old_h.dtype) : 0);
    s.sums = s.gates + (gates ? workspace_elements(all, accumulate_dtype(old_h.dtype)) : 0);
    s.library = s.sums + sums;
    return s.end = s.library + library_workspace(all, both), s;
  }

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
    const bool known = input.known() && old_h.known();
    out[kWork] = Spec::vector(accumulate_dtype(old_h.dtype), known ? scratch(input, old_h).end : kUnknownDim);
    return kOk;
  }

  Scratch scratch(const Spec &input, const Spec &old_h) const {
    return few_gates(input, old_h) ? Scratch() : LltmAttrs::scratch(input, old_h, 0, true, true, 0);
  }
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

  // On the CPU only recomputed gates need [old_h, input].
  Scratch scratch(const Spec &input, const Spec &old_h, bool have_gates) const {
    const int64_t dpre = workspace_elements(3 * old_h.size(), old_h.dtype),
                  sums = 3 * width(old_h) * parts(rows(old_h));
    return LltmAttrs::scratch(input, old_h, dpre, kIsCuda || !have_gates, !have_gates,
                              kIsCuda ? workspace_elements(sums, accumulate_dtype(old_h.dtype)) : 0);
  }
  // The parts of the rows for which dbias has partial sums: of eight rows, one for each warp of a block, or of more.
  static int parts(int64_t rows) { return static_cast<int>(rows < 8 ? 1 : rows < 8 * 64 ? rows / 8 : 64); }

 private:
  Status check_incoming(const char *slot, const Spec &s, const Spec &old_h) const {
    if (s.ndim) return check_like(name, slot, s, "old_h", old_h);
    AOT_TRY(check_floating(name, slot, s));
    return check_dtype(name, slot, s, old_h.dtype);
  }
};

}  // namespace AOT_ISA
}  // namespace aot
