"""Softmax over one axis."""

from __future__ import annotations

from operator import index

from ..op import Autocast, operator


def _from_the_end(dim, x):
    """The axis counted from the end, so that leading axes that vmap adds do not shift it."""
    if isinstance(dim, (bool, float, str, list, tuple)) or not isinstance(getattr(x, "ndim", None), int):
        return dim
    axis, ndim = dim if isinstance(dim, int) else _axis(dim), max(x.ndim, 1)
    if axis is None:
        return dim  # to be refused
    return axis - ndim if 0 <= axis < ndim else axis


def _axis(dim):
    """None if it is not an integer. MindSpore's graph mode compiles the caller, and could not compile this."""
    try:
        return None if getattr(dim, "ndim", 0) else index(dim)
    except TypeError:
        return None


def _dims(*slots):
    """The axes after the softmax's are independent too."""

    def stated(call):
        after = range(-1 - call.dim)
        axes = " ".join(["... D", *(f"a{i}" for i in after)])
        return dict.fromkeys(slots, axes if getattr(call, slots[0]) else "")

    return stated


def _formula(m, x, dim):
    return m.exp(m.log_softmax(m.wide(x), dim) if x.shape else m.zeros(m.wide(x)))


def _backward_formula(m, dy, y, dim):
    product = m.wide(dy) * m.wide(y)
    return product - m.wide(y) * m.sum(product, (dim,) if y.shape else (), keepdims=True)


@operator(
    inputs=("x",),
    outputs=("y",),
    attrs={"dim": "int"},
    same_spec_as={"y": "x"},
    dims=_dims("x", "y"),
    formula=_formula,
    vmappable=("x", "y"),
    min_rank=1,
    autocast=Autocast.FLOAT32_ON_CUDA,
    backward={
        "inputs": ("dy", "y"),
        "outputs": ("dx",),
        "same_spec_as": {"dx": "y"},
        "dims": _dims("dy", "y", "dx"),
        "formula": _backward_formula,
        "vmappable": ("dy", "y", "dx"),
        "min_rank": 1,
    },
)
def softmax(x, dim=-1):
    """Softmax, as ``torch.nn.functional.softmax``: ``exp(x) / sum(exp(x))`` along an axis.

    Args:
        x: float16, bfloat16, float32 or float64; any shape.
        dim: the axis.

    Returns:
        A tensor like x. Sums are taken in float32 (float64 for float64).

    Raises:
        TypeError: a dtype that is not floating.
        ValueError: dim is no axis of x.
    """
    return (x,), (_from_the_end(dim, x),)
