"""The parts of a definition that linear_cross_entropy and linear_cross_entropy_lse share: attributes, slopes, formulas
and axes."""

from __future__ import annotations

from math import prod

from ..op import Product
from . import _cross_entropy as rows_of
from ._cross_entropy import keeps_slope
from ._linear_cross_entropy_parts import axes, row_axes

ATTRS = rows_of.ATTRS | {"allow_tf32": "bool"}
RESIDUALS = ("x_slope", "weight_slope", "bias_slope")
SAVED_FOR = {"x_slope": ("x",), "weight_slope": ("weight",), "bias_slope": ("bias",)}
PRODUCT = Product(factors=("x", "weight"), flops=lambda call: 2 * prod(call.x) * call.weight[0], bilinear=False)


def _padded(call):
    """The rows of weight's slope, and the elements of bias's: on a GPU, products are of whole vectors of classes."""
    return (call.weight[0] + 7) // 8 * 8


SHAPES = {
    "y": lambda call: call.x[:-1] if call.reduction == "none" else (),
    "x_slope": lambda call: (*call.x[:-1], call.x[-1] if keeps_slope(call.reduction) else 0),
    "weight_slope": lambda call: (_padded(call), call.weight[1] if keeps_slope(call.reduction) else 0),
    "bias_slope": lambda call: (_padded(call) if keeps_slope(call.reduction) and call.bias is not None else 0,),
}


# ---------------------------------------------------------------------------------------------------------------- axes


def split(call):
    """The axes of the rows. They are whole where slopes are kept: a part of the rows has another mean, and the backward
    takes the slopes of weight and bias, which are sums over all rows."""
    rows = composed(call)
    return rows.upper() if keeps_slope(call.reduction) else rows


def composed(call):
    return " ".join(row_axes(call.x))


def dims(call, rows, of_rows=()):
    """``of_rows``: the results that each row has one of."""
    return axes(call, rows) | {"y": _loss(call, rows)} | dict.fromkeys(of_rows, rows)


def part_dims(call, of_rows=()):
    rows = composed(call)
    return dims(call, rows, of_rows) | ({"y": _same(rows)} if call.reduction == "mean" else {})


def backward_dims(call, rows, from_rows=()):
    """A gradient that is a product of a slope, which is a sum over all rows, does not depend on them. ``from_rows``:
    the gradients of results that each row has one of; where there are any, the slopes are not read."""
    named = [getattr(call, slope) for slope in RESIDUALS]
    is_product = any(shape is not None for shape in named) and all(getattr(call, slot) is None for slot in from_rows)
    same = _same(rows.lower()) if keeps_slope(call.reduction) and is_product else ""
    gradients = {"dy": _loss(call, rows), "dx": f"{rows} I", "dweight": f"O I {same}", "dbias": f"O {same}"}
    return axes(call, rows) | gradients | dict.fromkeys(from_rows, rows)


def _loss(call, rows):
    return rows if call.reduction == "none" else ""


def _same(rows):
    return " ".join(f"({axis})" for axis in rows.split())


# ------------------------------------------------------------------------------------------------------------ formulas


def loss(
    m, x, weight, target, bias, class_weight, ignore_index, reduction, label_smoothing, z_loss, softcap, allow_tf32
):
    """The loss, and the logits that it is of, which are capped."""
    logits = m.ops.linear(x, weight, bias, None, allow_tf32)
    options = ignore_index, reduction, label_smoothing, z_loss, softcap
    return rows_of.loss(m, logits, target, class_weight, *options)


def gradients(
    m, dy, dlse, x, weight, target, bias, class_weight,
    ignore_index, reduction, label_smoothing, z_loss, softcap, allow_tf32,
):  # fmt: skip
    logits = m.ops.linear(x, weight, bias, None, allow_tf32)
    options = ignore_index, reduction, label_smoothing, z_loss, softcap
    slope = rows_of.gradient(m, dy, dlse, logits, target, class_weight, *options)
    rows = m.matrix(m.like(slope, x))  # read by three, and so rounded once
    dx = m.ops.matmul(rows, weight, False, False, allow_tf32)
    dweight = m.ops.matmul(rows, m.matrix(x), True, False, allow_tf32)
    return m.reshape(dx, x.shape), dweight, m.sum(rows, (0,))
