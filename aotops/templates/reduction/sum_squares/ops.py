"""The sum of squares of each row."""

from __future__ import annotations

from aotops import operator


@operator(
    inputs=("dy", "x"),
    outputs=("dx",),
    same_spec_as={"dx": "x"},
    vmappable=("dy", "x", "dx"),
    axes=1,
)
def sum_squares_backward(dy, x):
    return (dy, x), ()


@operator(
    inputs=("x",),
    outputs=("y",),
    shapes={"y": lambda call: call.x[:-1]},
    backward=sum_squares_backward,
    vmappable=("x", "y"),
    axes=1,
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
