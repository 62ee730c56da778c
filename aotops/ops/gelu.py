"""GELU, the Gaussian error linear unit, exact and in its tanh approximation."""

from __future__ import annotations

from ..op import operator
from ._activation import activated, slope


def _formula(m, x, approximate):
    return activated(m, m.wide(x), "gelu_tanh" if approximate == "tanh" else "gelu")


def _backward_formula(m, dy, x, approximate):
    return m.wide(dy) * slope(m, m.wide(x), "gelu_tanh" if approximate == "tanh" else "gelu")


@operator(
    inputs=("x",),
    outputs=("y",),
    attrs={"approximate": "str"},
    same_spec_as={"y": "x"},
    formula=_formula,
    vmappable=("x", "y"),
    elementwise=True,
    backward={
        "inputs": ("dy", "x"),
        "outputs": ("dx",),
        "same_spec_as": {"dx": "x"},
        "formula": _backward_formula,
        "vmappable": ("dy", "x", "dx"),
        "elementwise": True,
    },
)
def gelu(x, approximate="none"):
    """The Gaussian error linear unit, as ``torch.nn.functional.gelu``.

    Args:
        x: float16, bfloat16, float32 or float64; any shape.
        approximate: "none" for ``x * Phi(x)``, Phi the normal distribution function; "tanh" for
            ``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))``.

    Returns:
        A tensor like x.

    Raises:
        TypeError: a dtype that is not floating.
        ValueError: another value of approximate.

    Source: Hendrycks and Gimpel, arXiv:1606.08415.
    """
    return (x,), (approximate,)
