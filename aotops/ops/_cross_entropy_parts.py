"""cross_entropy and cross_entropy_lse of parts of rows and classes, which are split over devices, on
``PartMathematics``.

The entry takes all classes, and all rows for a mean. Here the parts reduce numerator and divisor over the rows, and
over the classes, where there are no weights, z-loss and cap, the largest elements, then the sums.
"""

from __future__ import annotations

from ..spec import dtype_name
from ._cross_entropy import keeps_slope


def divides_slope(reduction, dtype):
    """Whether ``slope`` is divided by the count of the rows: then the backward multiplies it by dy alone. ``dtype``:
    x's, by name. In float16 the quotient would underflow, from which a large dy, the scale of the loss, saves dx."""
    return reduction == "mean" and dtype != "float16"


def forward(m, x, target, weight, ignore_index, reduction, label_smoothing, dtype):
    """The loss, a partial sum where reduction is "sum", and this part of the slope."""
    counted = target != ignore_index
    if m.is_split("c"):
        odd = counted & _is_odd(m, target)
        if m.is_known(odd) and odd.any():
            m.run(x=m.arange(m.length("c"), x)[None], target=target[odd][:1])  # raises
        losses, slope = _over_classes(m, x, target, counted, label_smoothing)
        slope = slope if keeps_slope(reduction) else slope[..., :0]
    else:  # the rows of a mean
        losses, slope = m.run(reduction="sum", dtype=dtype_name(m.wide(x).dtype))
    if reduction != "none":
        losses = m.sum(losses, tuple(range(len(losses.shape))))
    if reduction == "mean":
        losses, count = _mean(m, losses, counted, target, weight)
        if divides_slope(reduction, dtype_name(x.dtype)):
            slope = m.wide(slope) / count
            slope = m.where(counted[..., None], slope, m.zeros(slope))  # the count may be 0
    return losses if dtype else m.like(losses, x), m.like(slope, x)


def backward(m, dy, x, target, weight, slope, ignore_index, reduction, label_smoothing, dtype):
    counted, is_kept = target != ignore_index, slope is not None and keeps_slope(reduction)
    divide = reduction == "mean" and not (is_kept and divides_slope(reduction, dtype_name(x.dtype)))
    if is_kept and not divide and not m.is_split("c"):
        return m.run()
    if not is_kept and not m.is_split("c"):
        return backward_of_rows(m, dy, target, weight, ignore_index)
    if not is_kept:
        _, slope = _over_classes(m, x, target, counted, label_smoothing)
    factor = m.wide(dy)
    if divide:
        factor = factor / _divisor(m, factor, counted, target, weight)
    factor = factor + m.like(m.zeros(target), factor)  # one for each row
    # 0 for an ignored row, also if dy is not finite or the count is 0
    return m.like(m.wide(slope) * m.where(counted, factor, m.zeros(factor))[..., None], x)


def forward_of_rows(m, x, target, weight, ignore_index, dtype):
    """The results of cross_entropy_lse of a part of the rows of a mean."""
    losses, *rest = m.run(reduction="sum", dtype=dtype_name(m.wide(x).dtype))
    losses, _ = _mean(m, losses, target != ignore_index, target, weight)
    return losses if dtype else m.like(losses, x), *rest


def backward_of_rows(m, dy, target, weight, ignore_index):
    """The gradient, from x, of a part of the rows of a mean."""
    dy = m.wide(dy)
    dy = dy / _divisor(m, dy, target != ignore_index, target, weight)
    return m.run(dy=dy, reduction="sum", dtype=dtype_name(dy.dtype))


def _mean(m, total, counted, target, weight):
    return mean_of_parts(m, total, divisor_of_part(m, total, counted, target, weight), ("n",))


def mean_of_parts(m, total, divisor, axes):
    """The mean of all rows from the sum of the losses of this part and its divisor, and what it is divided by."""
    both = m.concatenate([m.reshape(each, (1,)) for each in (total, divisor)])
    both = over_rows(m, both, axes)
    return both[0] / both[1], both[1]


def over_rows(m, sums, axes):
    """The sums over all parts. ``axes``: the names of the axes of the rows."""
    for axis in axes:
        sums = m.reduce(sums, "sum", axis)
    return sums


def _divisor(m, model, counted, target, weight):
    return over_rows(m, divisor_of_part(m, model, counted, target, weight), ("n",))


def divisor_of_part(m, model, counted, target, weight):
    """The number of rows that count, or the sum of the weights of their classes: wide, as ``model``."""
    if weight is None:
        return m.count(counted, model)
    in_range = counted & (target >= 0) & (target < weight.shape[0])
    classes = m.where(in_range, target, m.zeros(target))
    weights = m.take(m.wide(weight)[..., None], classes)[..., 0]
    return m.sum(m.where(in_range, weights, m.zeros(weights)), (0,))


def _over_classes(m, x, target, counted, label_smoothing):
    """The losses of the rows, and this part of their slope, undivided and wide."""
    x, classes, part = m.wide(x), m.length("c"), x.shape[-1]
    shifted = x - m.reduce(m.max(x), "max", "c")[..., None]
    powers, zeros = m.exp(shifted), m.zeros(shifted)
    hit = m.arange(part, target) + m.offset("c", part) == target[..., None]
    sums = [powers, m.where(hit, shifted, zeros), *([shifted] if label_smoothing else [])]
    sums = m.reduce(m.concatenate([m.sum(each, (-1,))[..., None] for each in sums]), "sum", "c")
    losses = m.log(sums[..., 0]) - (1 - label_smoothing) * sums[..., 1]
    if label_smoothing:
        losses = losses - label_smoothing / classes * sums[..., 2]
    slope = powers / sums[..., :1] - label_smoothing / classes - m.where(hit, zeros + (1 - label_smoothing), zeros)
    odd = _is_odd(m, target)
    return _by_row(m, losses, counted, odd), _by_row(m, slope, counted[..., None], odd[..., None])


def _is_odd(m, target):
    """Out-of-range classes."""
    return (target < 0) | (target >= m.length("c"))


def _by_row(m, values, counted, odd):
    """0 for an ignored row, NaN for one of an out-of-range class, as on a GPU."""
    zeros = m.zeros(values)
    return m.where(counted, m.where(odd, zeros + float("nan"), values), zeros)
