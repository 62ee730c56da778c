"""Cross entropy of a linear layer's results, which are made for some rows at a time."""

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
from ._linear_cross_entropy_parts import backward, forward


def _formula(
    m, x, weight, target, bias, class_weight, ignore_index, reduction, label_smoothing, z_loss, softcap, allow_tf32
):
    options = ignore_index, reduction, label_smoothing, z_loss, softcap, allow_tf32
    return loss(m, x, weight, target, bias, class_weight, *options)[0]


def _backward_formula(
    m, dy, x, weight, target, bias, class_weight,
    ignore_index, reduction, label_smoothing, z_loss, softcap, allow_tf32,
):  # fmt: skip
    options = ignore_index, reduction, label_smoothing, z_loss, softcap, allow_tf32
    return gradients(m, dy, None, x, weight, target, bias, class_weight, *options)


@operator(
    inputs=("x", "weight", "target", "bias", "class_weight"),
    outputs=("y",),
    residuals=RESIDUALS,
    workspace=("workspace",),
    shapes=SHAPES,
    optional=("bias", "class_weight"),
    attrs=ATTRS,
    dims=lambda call: dims(call, split(call)),
    parts=Parts(part_dims, forward),
    keeps=lambda call: keeps_slope(call.reduction),
    saved_for=SAVED_FOR,
    always_save_residuals=True,
    formula=_formula,
    product=PRODUCT,
    autocast=Autocast.LOWER_WIDE_LOSS,
    backward={
        "inputs": ("dy", "x", "weight", "target", "bias", "class_weight", *RESIDUALS),
        "outputs": ("dx", "dweight", "dbias"),
        "workspace": ("workspace",),
        "optional": ("bias", "class_weight", *RESIDUALS, "dx", "dweight", "dbias"),
        "same_spec_as": {"dx": "x", "dweight": "weight"},
        "shapes": {"dbias": lambda call: call.weight[:1]},
        "overwrites": {"dweight": "weight_slope"},
        "dims": lambda call: backward_dims(call, split(call)),
        "parts": Parts(lambda call: backward_dims(call, composed(call)), backward),
        "formula": _backward_formula,
    },
)
def linear_cross_entropy(
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
    """``cross_entropy(linear(x, weight, bias), target)``, the loss of a model's head, without the logits: they are
    computed for some rows at a time (for all, where they are few), and so are the gradients, in the forward. The
    gradient of weight is summed over the rows in float32 (float64 for float64). ``linear_cross_entropy_lse`` returns
    the logarithms of sums too.

    Args:
        x: (..., in); float16, bfloat16, float32 or float64.
        weight: (out, in), of x's dtype: a row for each class.
        target: x's shape without its last axis; int32 or int64: the class of each row, from 0 to out - 1, or
            ignore_index.
        bias: (out,), of x's dtype, or None.
        ignore_index: rows of this class have a loss and a gradient of 0, and do not count for the mean.
        reduction: "none", the losses of the rows; "sum"; or "mean", the sum over the number of rows not ignored.
        label_smoothing: from 0 to 1: how much of the probability of the class is spread over all classes.
        dtype: of the loss: None, for x's, or "float32" for an x of 16 bits.
        class_weight, z_loss, softcap: see ``cross_entropy``, whose ``weight`` class_weight is. It is a constant: its
            gradient is not computed, but in PyTorch and JAX by a composition, which makes the logits.
        allow_tf32: float32 may be multiplied in TF32 on a GPU, with 10 bits of each factor.

    Returns:
        The loss: (), or target's shape where reduction is "none". The logits and their gradients are rounded to x's
        dtype, as those of the two operators are. Of a sum or a mean the forward makes the gradients for a dy of 1,
        where they are wanted: three products, and none in the backward. Where reduction is "none", the backward
        computes the logits again.

    Raises:
        TypeError: a dtype that is not floating, or two dtypes; a target that is not int32 or int64; another dtype.
        ValueError: shapes that do not fit; no class; another reduction; a label_smoothing that is not from 0 to 1; a
            z_loss or softcap that is negative or not finite; tensors on different devices; on the CPU, a class that
            there is not. On a GPU such a row's loss and gradient are NaN, and weight's gradient.
    """
    inputs = x, weight, target, bias, class_weight
    return inputs, (ignore_index, reduction, label_smoothing, dtype, z_loss, softcap, allow_tf32)
