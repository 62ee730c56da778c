"""Cross entropy with class indices."""

from __future__ import annotations

from ..op import Autocast, Padding, Parts, operator
from ._cross_entropy import ATTRS, axes, gradient, has_extras, keeps_slope, loss, rows_axis
from ._cross_entropy_parts import backward, forward


def _dims(call, *like_loss, like_x=()):
    return _axes(call, rows_axis(call), "C", like_loss, like_x)


def _axes(call, n, c, like_loss, like_x=()):
    rows = f"{n} " if len(call.x) > 1 else ""
    slope = rows + (c if keeps_slope(call.reduction) else "0")
    return axes(call, n, c, like_loss, like_x=like_x) | {"slope": slope}


def _part_dims(call):
    whole = {"none": "n (c)", "sum": "(c)"}.get(call.reduction, "(n) (c)")
    return _axes(call, "n", _classes(call), ("y",)) | {"y": whole if len(call.x) > 1 else "(c)"}


def _classes(call):
    """The axis of the classes, which are whole for extras."""
    return "C" if has_extras(call) else "c"


def _formula(m, x, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap):
    return loss(m, x, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap)[0]


def _backward_formula(m, dy, x, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap):
    return gradient(m, dy, None, x, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap)


def _may_have_more_classes(call):
    """Smoothing spreads probability over all classes, a cap makes -inf a number, there is a weight for each class, and
    a target that is moved must not become ignore_index."""
    spreads = call.label_smoothing or call.softcap or call.weight is not None
    return keeps_slope(call.reduction) and not spreads and call.ignore_index < call.x[-1]


@operator(
    inputs=("x", "target", "weight"),
    outputs=("y",),
    residuals=("slope",),
    workspace=("workspace",),
    shapes={
        "y": lambda call: call.x[:-1] if call.reduction == "none" else (),
        "slope": lambda call: (*call.x[:-1], call.x[-1] if keeps_slope(call.reduction) else 0),
    },
    dims=lambda call: _dims(call, "y"),
    parts=Parts(_part_dims, forward),
    optional=("weight",),
    attrs=ATTRS,
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
        "inputs": ("dy", "x", "target", "weight", "slope"),
        "outputs": ("dx",),
        "workspace": ("workspace",),
        "optional": ("weight", "slope"),
        "dims": lambda call: _dims(call, "dy", like_x=("dx",)),
        "parts": Parts(lambda call: _axes(call, "n", _classes(call), ("dy",), ("dx",)), backward),
        "same_spec_as": {"dx": "x"},
        "overwrites": {"dx": "slope"},
        "formula": _backward_formula,
    },
)
def cross_entropy(
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
    """Cross entropy with class indices, as ``torch.nn.functional.cross_entropy``:
    ``-log(softmax(x)[target])`` of each row.

    ``cross_entropy_lse`` returns the logarithms of sums and the greatest classes too.

    Args:
        x: (N, C) or (C,); float16, bfloat16, float32 or float64: a number for each class, before softmax.
        target: (N,) or (); int32 or int64: the class of each row, from 0 to C - 1, or ignore_index.
        ignore_index: rows of this class have a loss and a gradient of 0, and do not count for the mean.
        reduction: "none", the losses of the rows; "sum"; or "mean", the sum over the number of rows not ignored, or
            over the sum of the weights of their classes.
        label_smoothing: from 0 to 1: how much of the probability of the class is spread over all classes.
        dtype: of the loss: None, for x's, or "float32" for an x of 16 bits.
        weight: (C,), of x's dtype, or float32 where x has 16 bits; or None. A row's logarithms of probabilities are
            multiplied by the weights of their classes. They are constants: the gradient of weight is not computed, but
            in PyTorch and JAX by a composition.
        z_loss: z_loss * lse ** 2 is added to the loss of each row that is not ignored, without a weight; lse is
            log(sum(exp(x))). Chowdhery et al., arXiv:2204.02311.
        softcap: x is replaced by softcap * tanh(x / softcap), as in Gemma 2; 0 for x as it is.

    Returns:
        The loss: (), or target's shape where reduction is "none". Sums are taken in float32 (float64 for float64). The
        gradient of x is rounded once where reduction is "none": x is kept for it, and must not be changed in place
        before. Of a sum or a mean the forward keeps the gradient for a dy of 1, so that x may be changed; in 16 bits,
        its product with a dy that is no power of two, and in float16 every mean, is rounded twice: it errs by at most
        2 units of 2**-8 (bfloat16) or 2**-11 (float16) of itself.

    Raises:
        TypeError: an x that is not floating, a target that is not int32 or int64, another dtype, also of weight.
        ValueError: shapes that do not fit; another reduction; a label_smoothing that is not from 0 to 1; a z_loss or
            softcap that is negative or not finite; tensors on different devices; on the CPU, a class that there is not.
            On a GPU such a row's loss and gradient are NaN.
    """
    return (x, target, weight), (ignore_index, reduction, label_smoothing, dtype, z_loss, softcap)
