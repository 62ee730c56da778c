"""SwiGLU: a gated linear unit whose gate is SiLU."""

from __future__ import annotations

from ..op import operator
from ._activation import activated, slope


def _formula(m, gate, up):
    return activated(m, m.wide(gate), "silu") * m.wide(up)


def _backward_formula(m, dy, gate, up):
    dy, gate, up = m.wide(dy), m.wide(gate), m.wide(up)
    return dy * up * slope(m, gate, "silu"), dy * activated(m, gate, "silu")


@operator(
    inputs=("gate", "up"),
    outputs=("y",),
    same_spec_as={"y": "gate"},
    formula=_formula,
    vmappable=("gate", "up", "y"),
    elementwise=True,
    backward={
        "inputs": ("dy", "gate", "up"),
        "outputs": ("dgate", "dup"),
        "same_spec_as": {"dgate": "gate", "dup": "gate"},
        "formula": _backward_formula,
        "vmappable": ("dy", "gate", "up", "dgate", "dup"),
        "elementwise": True,
    },
)
def swiglu(gate, up):
    """The SwiGLU of a feed-forward network, ``silu(gate) * up`` with ``silu(g) = g / (1 + exp(-g))``.

    Args:
        gate, up: float16, bfloat16, float32 or float64, both the same; any shape, both the same.

    Returns:
        A tensor like gate.

    Raises:
        TypeError: a dtype that is not floating, or two dtypes.
        ValueError: two shapes; tensors on different devices.

    Source: Shazeer, arXiv:2002.05202.
    """
    return (gate, up), ()
