// swiglu   y = silu(gate) * up,   silu(g) = g * s(g),   s(g) = 1 / (1 + exp(-g)); gate and up have the same shape
// gradient dgate = dy * up * s * (1 + gate * (1 - s)),   dup = dy * silu(gate)
// Shazeer, arXiv:2002.05202.
#pragma once
#include "aot.h"

namespace aot {
inline namespace AOT_ISA {

struct SwigluAttrs {
  Status init(const Attrs &) { return kOk; }

 protected:
  Status check(const char *op, const Spec &gate, const Spec &up) const {
    AOT_TRY(check_floating(op, "gate", gate));
    return check_like(op, "up", up, "gate", gate);
  }
};

struct Swiglu : SwigluAttrs {
  static constexpr const char *name = "swiglu";
  static constexpr Slot inputs[] = {{"gate"}, {"up"}};
  static constexpr Slot outputs[] = {{"y"}};

  Status infer(const Tensor *in, Spec *out) const {
    const Spec &gate = in[0], &up = in[1];
    AOT_TRY(check(name, gate, up));
    out[0] = gate;
    return kOk;
  }
};

struct SwigluBackward : SwigluAttrs {
  static constexpr const char *name = "swiglu_backward";
  static constexpr Slot inputs[] = {{"dy"}, {"gate"}, {"up"}};
  static constexpr Slot outputs[] = {{"dgate"}, {"dup"}};

  Status infer(const Tensor *in, Spec *out) const {
    const Spec &dy = in[0], &gate = in[1], &up = in[2];
    AOT_TRY(check(name, gate, up));
    AOT_TRY(check_like(name, "dy", dy, "gate", gate));
    out[0] = out[1] = gate;
    return kOk;
  }
};

}  // namespace AOT_ISA
}  // namespace aot
