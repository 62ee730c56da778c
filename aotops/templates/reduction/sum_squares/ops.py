"""The sum of squares of each row."""

from __future__ import annotations

from aotops import operator


def _formula(m, x):
    return m.sum(m.wide(x) * m.wide(x), (-1,) if x.shape else ())


def _backward_formula(m, dy, x):
    return 2 * (m.wide(dy)[..., None] if x.shape else m.wide(dy)) * m.wide(x)


@operator(
    inputs=("x",),
    outputs=("y",),
    shapes={"y": lambda call: call.x[:-1]},
    formula=_formula,
    dims=lambda call: {"x": "... n", "y": "..."},
    vmappable=("x", "y"),
    min_rank=1,
    backward={
        "inputs": ("dy", "x"),
        "outputs": ("dx",),
        "same_spec_as": {"dx": "x"},
        "formula": _backward_formula,
        "dims": lambda call: {"dy": "...", "x": "... n", "dx": "... n"},
        "vmappable": ("dy", "x", "dx"),
        "min_rank": 1,
    },
)
def sum_squares(x):
    """``sum(x * x)`` along the last axis.

    Args:
        x: float16, bfloat16, float32 or float64; any shape.

    Returns:
        A tensor of x's dtype, without its last axis. Sums are taken in float32 (float64 for float64).

    Raises:
        TypeError: a dtype that is not floating.
    """
    return (x,), ()
