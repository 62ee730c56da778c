"""Cross entropy of a linear layer's results, which never exist whole."""

from __future__ import annotations

from math import prod

from ..op import Autocast, Parts, Product, operator
from ._cross_entropy import ATTRS, gradient, keeps_slope, loss
from ._linear_cross_entropy_parts import axes, backward, forward, row_axes


def _padded(call):
    """The rows of weight's slope, and the elements of bias's: on a GPU, products are of whole vectors of classes."""
    return (call.weight[0] + 7) // 8 * 8


def _split(call):
    """The axes of the rows. They are whole where slopes are kept: a part of the rows has another mean, and the backward
    takes the slopes of weight and bias, which are sums over all rows."""
    rows = " ".join(row_axes(call.x))
    return rows.upper() if keeps_slope(call.reduction) else rows


def _composed(call):
    return " ".join(row_axes(call.x))


def _loss(call, rows):
    return rows if call.reduction == "none" else ""


def _dims(call, rows):
    return axes(call, rows) | {"y": _loss(call, rows)}


def _part_dims(call):
    rows = _composed(call)
    return _dims(call, rows) | ({"y": _same(rows)} if call.reduction == "mean" else {})


def _backward_dims(call, rows):
    """A gradient that is a product of a slope, which is a sum over all rows, does not depend on them."""
    kept = any(shape is not None for shape in (call.x_slope, call.weight_slope, call.bias_slope))
    same = _same(rows.lower()) if keeps_slope(call.reduction) and kept else ""
    gradients = {"dy": _loss(call, rows), "dx": f"{rows} I", "dweight": f"O I {same}", "dbias": f"O {same}"}
    return axes(call, rows) | gradients


def _same(rows):
    return " ".join(f"({axis})" for axis in rows.split())


def _formula(
    m, x, weight, target, bias, class_weight, ignore_index, reduction, label_smoothing, z_loss, softcap, allow_tf32
):
    logits = m.ops.linear(x, weight, bias, None, allow_tf32)
    return loss(m, logits, target, class_weight, ignore_index, reduction, label_smoothing, z_loss, softcap)[0]


def _backward_formula(
    m, dy, x, weight, target, bias, class_weight,
    ignore_index, reduction, label_smoothing, z_loss, softcap, allow_tf32,
):  # fmt: skip
    logits = m.ops.linear(x, weight, bias, None, allow_tf32)
    options = ignore_index, reduction, label_smoothing, z_loss, softcap
    slope = gradient(m, dy, None, logits, target, class_weight, *options)
    rows = m.matrix(m.like(slope, x))  # read by three, and so rounded once
    dx = m.ops.matmul(rows, weight, False, False, allow_tf32)
    dweight = m.ops.matmul(rows, m.matrix(x), True, False, allow_tf32)
    return m.reshape(dx, x.shape), dweight, m.sum(rows, (0,))


@operator(
    inputs=("x", "weight", "target", "bias", "class_weight"),
    outputs=("y",),
    residuals=("x_slope", "weight_slope", "bias_slope"),
    workspace=("workspace",),
    shapes={
        "y": lambda call: call.x[:-1] if call.reduction == "none" else (),
        "x_slope": lambda call: (*call.x[:-1], call.x[-1] if keeps_slope(call.reduction) else 0),
        "weight_slope": lambda call: (_padded(call), call.weight[1] if keeps_slope(call.reduction) else 0),
        "bias_slope": lambda call: (_padded(call) if keeps_slope(call.reduction) and call.bias is not None else 0,),
    },
    optional=("bias", "class_weight"),
    attrs=ATTRS | {"allow_tf32": "bool"},
    dims=lambda call: _dims(call, _split(call)),
    parts=Parts(_part_dims, forward),
    keeps=lambda call: keeps_slope(call.reduction),
    saved_for={"x_slope": ("x",), "weight_slope": ("weight",), "bias_slope": ("bias",)},
    always_save_residuals=True,
    formula=_formula,
    product=Product(factors=("x", "weight"), flops=lambda call: 2 * prod(call.x) * call.weight[0], bilinear=False),
    autocast=Autocast.LOWER_WIDE_LOSS,
    backward={
        "inputs": ("dy", "x", "weight", "target", "bias", "class_weight", "x_slope", "weight_slope", "bias_slope"),
        "outputs": ("dx", "dweight", "dbias"),
        "workspace": ("workspace",),
        "optional": ("bias", "class_weight", "x_slope", "weight_slope", "bias_slope", "dx", "dweight", "dbias"),
        "same_spec_as": {"dx": "x", "dweight": "weight"},
        "shapes": {"dbias": lambda call: call.weight[:1]},
        "overwrites": {"dx": "x_slope"},
        "dims": lambda call: _backward_dims(call, _split(call)),
        "parts": Parts(lambda call: _backward_dims(call, _composed(call)), backward),
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
    computed for some rows at a time, and so are the gradients, in the forward. The gradient of weight is summed over
    the rows in float32 (float64 for float64).

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
