"""SwiGLU: a gated linear unit whose gate is SiLU."""

from __future__ import annotations

from ..op import operator


@operator(
    inputs=("dy", "gate", "up"),
    outputs=("dgate", "dup"),
    same_spec_as={"dgate": "gate", "dup": "gate"},
    vmappable=("dy", "gate", "up", "dgate", "dup"),
    elementwise=True,
)
def swiglu_backward(dy, gate, up):
    return (dy, gate, up), ()


@operator(
    inputs=("gate", "up"),
    outputs=("y",),
    backward=swiglu_backward,
    same_spec_as={"y": "gate"},
    vmappable=("gate", "up", "y"),
    elementwise=True,
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
