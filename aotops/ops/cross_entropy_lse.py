"""Cross entropy with class indices, the logarithms of sums and the greatest classes."""

from __future__ import annotations

from ..op import Autocast, Parts, operator
from ._cross_entropy import ATTRS, axes, gradient, loss, rows_axis
from ._cross_entropy_parts import backward_of_rows, forward_of_rows

_ROWS = ("lse", "predictions")


def _formula(m, x, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap):
    y, capped = loss(m, x, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap)
    return y, m.logsumexp(capped, -1), m.like(m.argmax(x, -1), target)


def _backward_formula(m, dy, dlse, x, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap):
    return gradient(m, dy, dlse, x, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap)


def _part_dims(call):
    whole = {"y": "(n)"} if call.reduction == "mean" and len(call.x) > 1 else {}
    return axes(call, "n", "C", ("y",), _ROWS) | whole


@operator(
    inputs=("x", "target", "weight"),
    outputs=("y", "lse", "predictions"),
    workspace=("workspace",),
    shapes={
        "y": lambda call: call.x[:-1] if call.reduction == "none" else (),
        "lse": lambda call: call.x[:-1],
    },
    same_spec_as={"predictions": "target"},
    optional=("weight",),
    attrs=ATTRS,
    dims=lambda call: axes(call, rows_axis(call), "C", ("y",), _ROWS),
    parts=Parts(_part_dims, forward_of_rows),
    formula=_formula,
    autocast=Autocast.WIDE_LOSS,
    backward={
        "inputs": ("dy", "dlse", "x", "target", "weight"),
        "outputs": ("dx",),
        "workspace": ("workspace",),
        "optional": ("dlse", "weight"),
        "dims": lambda call: axes(call, rows_axis(call), "C", ("dy",), ("dlse",), ("dx",)),
        "parts": Parts(lambda call: axes(call, "n", "C", ("dy",), ("dlse",), ("dx",)), backward_of_rows),
        "same_spec_as": {"dx": "x"},
        "formula": _backward_formula,
    },
)
def cross_entropy_lse(
    x,
    target,
    ignore_index=-100,
    reduction="mean",
    label_smoothing=0.0,
    dtype=None,
    weight=None,
    z_loss=0.0,
    softcap=0.0,
):
    """``cross_entropy`` of the same arguments, ``log(sum(exp(x)))`` of each row, and its greatest class, in one pass.

    The accuracy of the predictions is ``(predictions == target)``, of the rows that count. The part of the loss that
    z_loss adds is the mean of ``z_loss * lse ** 2``, likewise.

    Args:
        x: (N, C) or (C,); float16, bfloat16, float32 or float64: a number for each class, before softmax.
        target, ignore_index, reduction, label_smoothing, dtype, weight, z_loss, softcap: see ``cross_entropy``.

    Returns:
        The loss; lse, of target's shape, in float32 (float64 for float64), of x as softcap makes it; and predictions,
        like target: the first class with the greatest x, or with a NaN. Rows of ignore_index have both too. lse is
        differentiable. For the gradient x is kept, and must not be changed in place before: it is read twice, where
        cross_entropy reads it once and keeps the gradient of a sum or a mean.

    Raises:
        TypeError, ValueError: as ``cross_entropy``.
    """
    return (x, target, weight), (ignore_index, reduction, label_smoothing, dtype, z_loss, softcap)
