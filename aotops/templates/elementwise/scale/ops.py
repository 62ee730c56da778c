"""A tensor times a number."""

from __future__ import annotations

from aotops import operator


def _formula(m, x, factor):
    return m.wide(x) * factor


def _backward_formula(m, dy, factor):
    return m.wide(dy) * factor


@operator(
    inputs=("x",),
    outputs=("y",),
    attrs={"factor": "float"},
    same_spec_as={"y": "x"},
    formula=_formula,
    vmappable=("x", "y"),
    elementwise=True,
    backward={
        "inputs": ("dy",),
        "outputs": ("dx",),
        "same_spec_as": {"dx": "dy"},
        "formula": _backward_formula,
        "vmappable": ("dy", "dx"),
        "elementwise": True,
    },
)
def scale(x, factor=1.0):
    """``x * factor``.

    Args:
        x: float16, bfloat16, float32 or float64; any shape.
        factor: a number.

    Returns:
        A tensor like x.

    Raises:
        TypeError: a dtype that is not floating; a factor that is not a number.
    """
    return (x,), (factor,)
