"""Cross entropy with class indices."""

from __future__ import annotations

from ..op import Autocast, Padding, Parts, operator
from ._cross_entropy_parts import backward, forward, keeps_slope


def _dims(call, loss, *like_x):
    """A part of the rows has another mean: its axis is whole for it. ``loss``: the slot that is like the loss."""
    return _axes(call, "N" if call.reduction == "mean" else "n", "C", loss, *like_x)


def _axes(call, n, c, loss, *like_x):
    n = n if len(call.x) > 1 else ""
    return (
        {loss: n if call.reduction == "none" else "", "target": n}
        | dict.fromkeys(("x", *like_x), f"{n} {c}")
        | {"slope": f"{n} {c if keeps_slope(call.reduction) else '0'}"}
    )


def _part_dims(call):
    loss = {"none": "n (c)", "sum": "(c)"}.get(call.reduction, "(n) (c)")
    return _axes(call, "n", "c", "y") | {"y": loss if len(call.x) > 1 else "(c)"}


def _formula(m, x, target, ignore_index, reduction, label_smoothing, dtype):
    log_p, counts, hit = _rows(m, x, target, ignore_index)
    losses = -(1 - label_smoothing) * m.sum(m.where(hit, log_p, m.zeros(log_p)), (-1,))
    if label_smoothing:
        losses = losses - label_smoothing * m.sum(log_p, (-1,)) / log_p.shape[-1]
    losses = m.where(counts, _nan_unless_in_range(m, hit, losses), m.zeros(losses))
    if reduction == "none":
        return losses
    total = m.sum(losses, tuple(range(len(losses.shape))))
    return total if reduction == "sum" else total / m.count(counts, losses)


def _backward_formula(m, dy, x, target, ignore_index, reduction, label_smoothing, dtype):
    log_p, counts, hit = _rows(m, x, target, ignore_index)
    zeros = m.zeros(log_p)
    slopes = m.exp(log_p) - label_smoothing / log_p.shape[-1] - m.where(hit, zeros + (1 - label_smoothing), zeros)
    dy = m.wide(dy) / m.count(counts, zeros) if reduction == "mean" else m.wide(dy)
    dy = dy + m.zeros(log_p[..., 0])  # one for each row
    dy = m.where(counts, _nan_unless_in_range(m, hit, dy), m.zeros(dy))
    return dy[..., None] * slopes


def _rows(m, x, target, ignore_index):
    """The logarithms of probabilities, (..., C); which rows count; of each class, whether it is the target."""
    log_p = m.log_softmax(m.wide(x), -1)
    return log_p, target != ignore_index, target[..., None] == m.arange(log_p.shape[-1], target)


def _may_have_more_classes(call):
    """Smoothing spreads probability over all classes, and a target that is moved must not become ignore_index."""
    return keeps_slope(call.reduction) and not call.label_smoothing and call.ignore_index < call.x[-1]


def _nan_unless_in_range(m, hit, x):
    """``x``, (...), where the target is one of the classes."""
    return m.where(m.any(hit, -1), x, m.zeros(x) + float("nan"))


@operator(
    inputs=("x", "target"),
    outputs=("y",),
    residuals=("slope",),
    workspace=("workspace",),
    shapes={
        "y": lambda call: call.x[:-1] if call.reduction == "none" else (),
        "slope": lambda call: (*call.x[:-1], call.x[-1] if keeps_slope(call.reduction) else 0),
    },
    dims=lambda call: _dims(call, "y"),
    parts=Parts(_part_dims, forward),
    attrs={"ignore_index": "int", "reduction": "str", "label_smoothing": "float", "dtype": "str?"},
    keeps=lambda call: keeps_slope(call.reduction),
    overwrites={"slope": "x"},
    formula=_formula,
    instead={"x": "slope"},
    always_save_residuals=True,
    padding=Padding(
        "x",
        float("-inf"),
        results=("slope",),
        indices=("target",),
        holds=_may_have_more_classes,
    ),
    autocast=Autocast.WIDE_LOSS,
    backward={
        "inputs": ("dy", "x", "target", "slope"),
        "outputs": ("dx",),
        "workspace": ("workspace",),
        "optional": ("slope",),
        "dims": lambda call: _dims(call, "dy", "dx"),
        "parts": Parts(lambda call: _axes(call, "n", "c", "dy", "dx"), backward),
        "same_spec_as": {"dx": "x"},
        "overwrites": {"dx": "slope"},
        "formula": _backward_formula,
    },
)
def cross_entropy(x, target, ignore_index=-100, reduction="mean", label_smoothing=0.0, dtype=None):
    """Cross entropy with class indices, as ``torch.nn.functional.cross_entropy``:
    ``-log(softmax(x)[target])`` of each row.

    The logarithms of sums (lse), a z-loss and capped logits are not part of it. Class weights are, as the keyword
    ``weight``, in PyTorch alone.

    Args:
        x: (N, C) or (C,); float16, bfloat16, float32 or float64: a number for each class, before softmax.
        target: (N,) or (); int32 or int64: the class of each row, from 0 to C - 1, or ignore_index.
        ignore_index: rows of this class have a loss and a gradient of 0, and do not count for the mean.
        reduction: "none", the losses of the rows; "sum"; or "mean", the sum over the number of rows not ignored.
        label_smoothing: from 0 to 1: how much of the probability of the class is spread over all classes.
        dtype: of the loss: None, for x's, or "float32" for an x of 16 bits.

    Returns:
        The loss: (), or target's shape where reduction is "none". Sums are taken in float32 (float64 for float64). The
        gradient of x is rounded once where reduction is "none": x is kept for it, and must not be changed in place
        before. Of a sum or a mean the forward keeps the gradient for a dy of 1, so that x may be changed; in 16 bits,
        its product with a dy that is no power of two, and in float16 every mean, is rounded twice: it errs by at most
        2 units of 2**-8 (bfloat16) or 2**-11 (float16) of itself.

    Raises:
        TypeError: an x that is not floating, a target that is not int32 or int64, another dtype.
        ValueError: shapes that do not fit; another reduction; a label_smoothing that is not from 0 to 1; tensors on
            different devices; on the CPU, a class that there is not. On a GPU such a row's loss and gradient are NaN.
    """
    return (x, target), (ignore_index, reduction, label_smoothing, dtype)
