"""A product with a factor and a bias: the third bilinear operator of test_adding_an_op.py."""

from __future__ import annotations

from math import prod

from ..op import Product, operator


def _dims(call):
    return {"x": "... i", "weight": "o i"}


def _fused(m, x, weight, bias, factor):
    y = factor * m.linear(x, weight, None)
    return y if bias is None else y + bias


def _fused_backward(m, dy, x, weight, factor):
    rows = m.matrix(factor * dy)
    return (
        m.reshape(m.matmul(rows, weight), x.shape),
        m.matmul(rows, m.matrix(x), True),
        m.sum(m.matrix(dy), (0,)),
    )


@operator(
    inputs=("x", "weight", "bias"),
    outputs=("y",),
    shapes={"y": lambda call: (*call.x[:-1], call.weight[0])},
    optional=("bias",),
    attrs={"factor": "float"},
    dims=lambda call: _dims(call) | {"bias": "o", "y": "... o"},
    product=Product(
        factors=("x", "weight"),
        flops=lambda call: 2 * prod(call.x) * call.weight[0],
        fused=_fused,
        fused_backward=_fused_backward,
    ),
    vmappable=("x", "y"),
    backward={
        "inputs": ("dy", "x", "weight"),
        "outputs": ("dx", "dweight", "dbias"),
        "shapes": {"dbias": lambda call: call.weight[:1]},
        "optional": ("dx", "dweight", "dbias"),
        "same_spec_as": {"dx": "x", "dweight": "weight"},
        "dims": lambda call: _dims(call) | {"dy": "... o", "dx": "... i", "dweight": "o i", "dbias": "o (i)"},
        "vmappable": ("dy", "x", "dx"),
    },
)
def blend(x, weight, bias=None, factor=1.0):
    """``factor * (x @ weight.T) + bias``.

    Args:
        x: (..., in); float16, bfloat16, float32 or float64.
        weight: (out, in), of x's dtype.
        bias: (out,), of x's dtype, or None.
        factor: a number.

    Returns:
        (..., out), of the same dtype.

    Raises:
        TypeError: a dtype that is not floating, or two dtypes.
        ValueError: shapes that do not fit.
    """
    return (x, weight, bias), (factor,)
