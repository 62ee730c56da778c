"""linear_cross_entropy of parts of its rows, which are split over devices, on ``PartMathematics``.

The entry counts the rows that it is given: for a mean it sums, and the count is reduced here.
"""

from __future__ import annotations

from math import prod

from ..spec import dtype_name
from ._cross_entropy import keeps_slope
from ._cross_entropy_parts import divides_slope, divisor_of_part, mean_of_parts, over_rows


def row_axes(shape):
    """The names of x's axes but the last."""
    before = len(shape) - 2
    return [*(f"m{i}" for i in range(before)), *(["n"] if before >= 0 else [])]


def axes(call, rows):
    """The axes of the slots that forward and backward have, with these of the rows."""
    kept = keeps_slope(call.reduction)
    return {
        "x": f"{rows} I",
        "weight": "O I",
        "target": rows,
        "bias": "O",
        "class_weight": "O",
        "x_slope": f"{rows} {'I' if kept else '0'}",
        "weight_slope": f"O {'I' if kept else '0'}",
        "bias_slope": "O" if kept and call.bias is not None else "0",
    }


def forward(m, x, weight, target, bias, class_weight, ignore_index, reduction, dtype):
    """The loss, for linear_cross_entropy_lse lse of these rows, and these rows' part of the slopes."""
    if reduction != "mean":
        return m.run()
    loss, *lse, x_slope, weight_slope, bias_slope = m.run(reduction="sum", dtype=dtype_name(m.wide(x).dtype))
    slopes = [x_slope, weight_slope, bias_slope]
    divisor = _of_this_part(m, loss, x, target, class_weight, ignore_index)
    loss, divisor = mean_of_parts(m, loss, divisor, row_axes(x.shape))
    if divides_slope(reduction, dtype_name(x.dtype)):
        divisor = m.where(divisor == 0, divisor + 1, divisor)  # slopes are 0 then
        slopes = [None if each is None else m.like(m.wide(each) / divisor, each) for each in slopes]
    return loss if dtype else m.like(loss, x), *lse, *slopes


def backward(m, dy, x, target, class_weight, x_slope, weight_slope, bias_slope, ignore_index, reduction):
    """The gradients, dx of these rows."""
    slopes = x_slope, weight_slope, bias_slope
    return _backward(m, dy, None, x, target, class_weight, slopes, ignore_index, reduction)


def backward_with_lse(m, dy, dlse, x, target, class_weight, x_slope, weight_slope, bias_slope, ignore_index, reduction):
    """Likewise, with the gradients of lse of these rows."""
    slopes = x_slope, weight_slope, bias_slope
    return _backward(m, dy, dlse, x, target, class_weight, slopes, ignore_index, reduction)


def _backward(m, dy, dlse, x, target, class_weight, slopes, ignore_index, reduction):
    if reduction != "mean":
        return m.run()
    dy, kept = m.wide(dy), dlse is None and any(slope is not None for slope in slopes)
    if not (kept and divides_slope(reduction, dtype_name(x.dtype))):
        dy = dy / over_rows(m, _of_this_part(m, dy, x, target, class_weight, ignore_index), row_axes(x.shape))
    return m.run(dy=dy, reduction="sum", dtype=dtype_name(dy.dtype))


def _of_this_part(m, model, x, target, class_weight, ignore_index):
    target = m.reshape(target, (prod(x.shape[:-1]),))
    return divisor_of_part(m, model, target != ignore_index, target, class_weight)
