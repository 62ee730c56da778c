"""A linear layer with an activation."""

from __future__ import annotations

from math import prod

from ..op import Autocast, Product, operator
from ._activation import activated, slope


def _pre_activation(call):
    """The shape of the activation's input. Without an activation it has no columns."""
    return (*call.x[:-1], 0 if call.activation is None else call.weight[0])


def _dims(call):
    """The axes of the inputs and the pre-activation. An activation needs the whole sum."""
    i, before = ("I", "o") if call.activation else ("i", "0")
    return {"x": f"... {i}", "weight": f"o {i}", "bias": "o", "pre_activation": f"... {before}"}


def _gradients(call):
    i = "I" if call.activation else "i"
    return {"dy": "... o", "dx": f"... {i}", "dweight": f"o {i}", "dbias": "o" if call.activation else "o (i)"}


def _formula(m, x, weight, bias, activation, allow_tf32):
    """The formula with an activation: without one, the operator is bilinear."""
    return activated(m, m.wide(m.ops.linear(x, weight, bias, None, allow_tf32)), activation)


def _backward_formula(m, dy, x, weight, bias, activation, allow_tf32):
    def matmul(a, b, transpose_a=False):
        return m.ops.matmul(a, b, transpose_a, False, allow_tf32)

    return _products(m, matmul, dy, x, weight, m.ops.linear(x, weight, bias, None, allow_tf32), activation)


def _products(m, matmul, dy, x, weight, before, activation):
    d = dy if activation is None else m.like(m.wide(dy) * slope(m, m.wide(before), activation), x)
    rows = m.matrix(d)  # read by three, and so rounded once
    return m.reshape(matmul(rows, weight), x.shape), matmul(rows, m.matrix(x), True), m.sum(rows, (0,))


def _fused(m, x, weight, bias, activation, pre_activation):
    before = m.linear(x, weight, bias) if pre_activation is None else pre_activation
    if activation is None:
        return before, before[..., :0]
    return m.like(activated(m, m.wide(before), activation), before), before


def _fused_backward(m, dy, x, weight, bias, pre_activation, activation):
    before = m.linear(x, weight, bias) if activation and pre_activation is None else pre_activation
    return _products(m, m.matmul, dy, x, weight, before, activation)


@operator(
    inputs=("x", "weight", "bias"),
    outputs=("y",),
    residuals=("pre_activation",),
    workspace=("workspace",),
    shapes={"y": lambda call: (*call.x[:-1], call.weight[0]), "pre_activation": _pre_activation},
    optional=("bias",),
    attrs={"activation": "str?", "allow_tf32": "bool"},
    dims=lambda call: _dims(call) | {"y": "... o"},
    formula=_formula,
    product=Product(
        factors=("x", "weight"),
        flops=lambda call: 2 * prod(call.x) * call.weight[0],
        unless="activation",
        fused=_fused,
        fused_backward=_fused_backward,
    ),
    vmappable=("x", "y", "pre_activation"),
    always_save_residuals=True,
    keeps=lambda call: call.activation is not None,
    autocast=Autocast.LOWER,
    backward={
        "inputs": ("dy", "x", "weight", "bias", "pre_activation"),
        "outputs": ("dx", "dweight", "dbias"),
        "workspace": ("workspace",),
        "shapes": {"dbias": lambda call: call.weight[:1]},
        "optional": ("bias", "pre_activation", "dx", "dweight", "dbias"),
        "same_spec_as": {"dx": "x", "dweight": "weight"},
        "dims": lambda call: _dims(call) | _gradients(call),
        "formula": _backward_formula,
        "vmappable": ("dy", "x", "pre_activation", "dx"),
    },
)
def linear(x, weight, bias=None, activation=None, allow_tf32=False):
    """A linear layer and what follows it: ``activation(x @ weight.T + bias)``, as ``torch.nn.functional.linear``.

    Args:
        x: (..., in); float16, bfloat16, float32 or float64.
        weight: (out, in), of x's dtype.
        bias: (out,), of x's dtype, or None.
        activation: None, "relu", "gelu", "gelu_tanh" (GELU in its tanh approximation) or "silu".
        allow_tf32: float32 may be multiplied in TF32 on a GPU, with 10 bits of each factor.

    Returns:
        (..., out), of the same dtype. Sums are taken, and the bias and the activation applied, in float32 (float64 for
        float64), and rounded once.

    Raises:
        TypeError: a dtype that is not floating, or two dtypes.
        ValueError: shapes that do not fit; another activation; tensors on different devices.
    """
    return (x, weight, bias), (activation, allow_tf32)
