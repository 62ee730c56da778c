"""Batch normalization with a ReLU, and a residual between them."""

from __future__ import annotations

from ..op import Autocast, operator
from ._batch_norm import channels, dims, gradients, normalized


def _formula(m, x, weight, bias, residual, eps, axis):
    y, mean, var = normalized(m, m.wide(x), weight, bias, eps, axis)
    y = y if residual is None else y + m.wide(residual)
    return m.where(y <= 0, m.zeros(y), y), mean, var


def _backward_formula(m, dy, dmean, dvar, x, weight, y, eps, axis):
    dy = m.wide(dy)
    g = m.where(y <= 0, m.zeros(dy), dy)
    return *gradients(m, g, dmean, dvar, m.wide(x), weight, eps, axis), g


@operator(
    inputs=("x", "weight", "bias", "residual"),
    outputs=("y", "mean", "var"),
    workspace=("workspace",),
    shapes={"mean": channels, "var": channels},
    optional=("weight", "bias", "residual"),
    attrs={"eps": "float", "axis": "int"},
    same_spec_as={"y": "x"},
    dims=dims(("x", "residual", "y"), ("weight", "bias", "mean", "var")),
    formula=_formula,
    autocast=Autocast.IF_REFUSED,
    backward={
        "inputs": ("dy", "dmean", "dvar", "x", "weight", "mean", "var", "y"),
        "outputs": ("dx", "dweight", "dbias", "dresidual"),
        "workspace": ("workspace",),
        "shapes": {"dweight": channels, "dbias": channels},
        "optional": ("dmean", "dvar", "weight", "dx", "dweight", "dbias", "dresidual"),
        "same_spec_as": {"dx": "x", "dresidual": "x"},
        "dims": dims(
            ("dy", "x", "y", "dx", "dresidual"), ("dmean", "dvar", "weight", "mean", "var", "dweight", "dbias")
        ),
        "formula": _backward_formula,
    },
)
def batch_norm_relu(x, weight=None, bias=None, residual=None, eps=1e-5, axis=1):
    """``relu(batch_norm(x, weight, bias, eps, axis) + residual)`` in the passes of ``batch_norm``.

    Args:
        x, weight, bias, eps, axis: see ``batch_norm``.
        residual: like x, or None.

    Returns:
        A tensor like x; and mean and var of x, as of ``batch_norm``. For the gradient x and the result are kept, and
        must not be changed in place before.

    Raises:
        TypeError: a dtype that is not floating, a weight or bias of another dtype than those of ``batch_norm``, or a
            residual of another dtype than x.
        ValueError: shapes that do not fit; an axis that x does not have; tensors on different devices.

    Source: Ioffe and Szegedy, arXiv:1502.03167; He, Zhang, Ren and Sun, arXiv:1512.03385.
    """
    return (x, weight, bias, residual), (eps, axis)
