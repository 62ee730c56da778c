"""A tensor times a sigmoid of it."""

from __future__ import annotations

from aotops import operator


def _formula(m, x, beta):
    x = m.wide(x)
    return x * m.sigmoid(x * beta)


def _backward_formula(m, dy, x, beta):
    dy, x = m.wide(dy), m.wide(x)
    s = m.sigmoid(x * beta)
    return dy * s * (1 + x * (1 - s) * beta)


@operator(
    inputs=("dy", "x"),
    outputs=("dx",),
    attrs={"beta": "float"},
    same_spec_as={"dx": "x"},
    formula=_backward_formula,
    vmappable=("dy", "x", "dx"),
    elementwise=True,
)
def swish_backward(dy, x, beta=1.0):
    return (dy, x), (beta,)


@operator(
    inputs=("x",),
    outputs=("y",),
    attrs={"beta": "float"},
    backward=swish_backward,
    same_spec_as={"y": "x"},
    formula=_formula,
    vmappable=("x", "y"),
    elementwise=True,
)
def swish(x, beta=1.0):
    """``x * sigmoid(beta * x)``.

    Args:
        x: float16, bfloat16 or float32; any shape.
        beta: a number.

    Returns:
        A tensor like x.

    Raises:
        TypeError: another dtype; a beta that is not a number.
    """
    return (x,), (beta,)
