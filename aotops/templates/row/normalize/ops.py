"""Rows scaled to length 1."""

from __future__ import annotations

from aotops import operator


def _formula(m, x, eps):
    x = m.wide(x)
    return x * m.rsqrt(m.sum(x * x, _row(x), keepdims=True) + eps)


def _backward_formula(m, dy, x, eps):
    dy, x = m.wide(dy), m.wide(x)
    inverse = m.rsqrt(m.sum(x * x, _row(x), keepdims=True) + eps)
    return inverse * (dy - x * inverse * inverse * m.sum(dy * x, _row(x), keepdims=True))


def _row(x):
    """The axis of a row: a tensor without axes is a row of one element."""
    return (-1,) if x.shape else ()


@operator(
    inputs=("x",),
    outputs=("y",),
    attrs={"eps": "float"},
    same_spec_as={"y": "x"},
    formula=_formula,
    dims=lambda call: {"x": "... N", "y": "... N"},
    vmappable=("x", "y"),
    min_rank=1,
    backward={
        "inputs": ("dy", "x"),
        "outputs": ("dx",),
        "same_spec_as": {"dx": "x"},
        "formula": _backward_formula,
        "dims": lambda call: {"dy": "... N", "x": "... N", "dx": "... N"},
        "vmappable": ("dy", "x", "dx"),
        "min_rank": 1,
    },
)
def normalize(x, eps=1e-6):
    """``x / sqrt(sum(x * x) + eps)`` along the last axis.

    Args:
        x: float16, bfloat16, float32 or float64; any shape.
        eps: a number.

    Returns:
        A tensor like x. Sums are taken in float32 (float64 for float64).

    Raises:
        TypeError: a dtype that is not floating; an eps that is not a number.
    """
    return (x,), (eps,)
