"""Cross entropy of a linear layer's results, and the logarithms of sums."""

from __future__ import annotations

from ..op import Autocast, Parts, operator
from ._linear_cross_entropy import (
    ATTRS,
    PRODUCT,
    RESIDUALS,
    SAVED_FOR,
    SHAPES,
    backward_dims,
    composed,
    dims,
    gradients,
    keeps_slope,
    loss,
    part_dims,
    split,
)
from ._linear_cross_entropy_parts import backward_with_lse, forward

_ROWS, _FROM_ROWS = ("lse",), ("dlse",)


def _formula(
    m, x, weight, target, bias, class_weight, ignore_index, reduction, label_smoothing, z_loss, softcap, allow_tf32
):
    options = ignore_index, reduction, label_smoothing, z_loss, softcap, allow_tf32
    y, logits = loss(m, x, weight, target, bias, class_weight, *options)
    return y, m.logsumexp(logits, -1)


def _backward_formula(
    m, dy, dlse, x, weight, target, bias, class_weight,
    ignore_index, reduction, label_smoothing, z_loss, softcap, allow_tf32,
):  # fmt: skip
    options = ignore_index, reduction, label_smoothing, z_loss, softcap, allow_tf32
    return gradients(m, dy, dlse, x, weight, target, bias, class_weight, *options)


@operator(
    inputs=("x", "weight", "target", "bias", "class_weight"),
    outputs=("y", "lse"),
    residuals=RESIDUALS,
    workspace=("workspace",),
    shapes=SHAPES | {"lse": lambda call: call.x[:-1]},
    optional=("bias", "class_weight"),
    attrs=ATTRS,
    dims=lambda call: dims(call, split(call), _ROWS),
    parts=Parts(lambda call: part_dims(call, _ROWS), forward),
    keeps=lambda call: keeps_slope(call.reduction),
    saved_for=SAVED_FOR,
    always_save_residuals=True,
    formula=_formula,
    product=PRODUCT,
    autocast=Autocast.LOWER_WIDE_LOSS,
    backward={
        "inputs": ("dy", "dlse", "x", "weight", "target", "bias", "class_weight", *RESIDUALS),
        "outputs": ("dx", "dweight", "dbias"),
        "workspace": ("workspace",),
        "optional": ("dlse", "bias", "class_weight", *RESIDUALS, "dx", "dweight", "dbias"),
        "same_spec_as": {"dx": "x", "dweight": "weight"},
        "shapes": {"dbias": lambda call: call.weight[:1]},
        "overwrites": {"dweight": "weight_slope"},
        "dims": lambda call: backward_dims(call, split(call), _FROM_ROWS),
        "parts": Parts(lambda call: backward_dims(call, composed(call), _FROM_ROWS), backward_with_lse),
        "formula": _backward_formula,
    },
)
def linear_cross_entropy_lse(
    x,
    weight,
    target,
    bias=None,
    ignore_index=-100,
    reduction="mean",
    label_smoothing=0.0,
    dtype=None,
    class_weight=None,
    z_loss=0.0,
    softcap=0.0,
    allow_tf32=False,
):
    """``linear_cross_entropy`` of the same arguments, and ``log(sum(exp(logits)))`` of each row, in one pass.

    Args:
        x, weight, target, bias, ignore_index, reduction, label_smoothing, dtype, class_weight, z_loss, softcap,
            allow_tf32: see ``linear_cross_entropy``.

    Returns:
        The loss; and lse, of target's shape, in float32 (float64 for float64), of the logits, which are rounded to x's
        dtype, as softcap makes them. Rows of ignore_index have one too. It is differentiable: where its gradient is
        given, the backward computes the logits again, a fourth product, and the gradients that the forward made are
        not used.

    Raises:
        TypeError, ValueError: as ``linear_cross_entropy``.
    """
    inputs = x, weight, target, bias, class_weight
    return inputs, (ignore_index, reduction, label_smoothing, dtype, z_loss, softcap, allow_tf32)
