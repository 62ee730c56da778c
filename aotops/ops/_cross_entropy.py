"""The parts of a definition that cross_entropy and cross_entropy_lse share: attributes, formulas and axes."""

from __future__ import annotations

ATTRS = {
    "ignore_index": "int",
    "reduction": "str",
    "label_smoothing": "float",
    "dtype": "str?",
    "z_loss": "float",
    "softcap": "float",
}


def keeps_slope(reduction):
    """Whether cross_entropy has a ``slope``. The losses of the rows have gradients that are seldom 1: without it the
    backward computes dx from x, and rounds it once."""
    return reduction != "none"


# ------------------------------------------------------------------------------------------------------------ formulas


def loss(m, x, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap):
    """The loss, and the logits that it is of, which are capped."""
    x = _capped(m, m.wide(x), softcap)
    log_p, counts, hit = _rows(m, x, target, ignore_index)
    each = log_p if weight is None else log_p * m.wide(weight)
    losses = -(1 - label_smoothing) * m.sum(m.where(hit, each, m.zeros(log_p)), (-1,))
    if label_smoothing:
        losses = losses - label_smoothing * m.sum(each, (-1,)) / log_p.shape[-1]
    if z_loss:
        lse = m.logsumexp(x, -1)
        losses = losses + z_loss * lse * lse
    losses = m.where(counts, _nan_unless_in_range(m, hit, losses), m.zeros(losses))
    if reduction == "none":
        return losses, x
    total = _total(m, losses)
    return total if reduction == "sum" else total / _divisor(m, counts, hit, weight, log_p), x


def gradient(m, dy, dlse, x, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap):
    """dx. ``dlse``: the gradient of the logarithms of sums, or None."""
    x = _capped(m, m.wide(x), softcap)
    log_p, counts, hit = _rows(m, x, target, ignore_index)
    p, zeros = m.exp(log_p), m.zeros(log_p)
    of_each = zeros + (1 if weight is None else m.wide(weight))
    of_target = m.where(hit, (1 - label_smoothing) * of_each, zeros)
    of_all = label_smoothing / log_p.shape[-1] * of_each
    of_p = m.sum(of_target + of_all, (-1,))
    if z_loss:
        of_p = of_p + 2 * z_loss * m.logsumexp(x, -1)
    dy = m.wide(dy) / _divisor(m, counts, hit, weight, log_p) if reduction == "mean" else m.wide(dy)
    dy = dy + m.zeros(of_p)  # one for each row
    dy = m.where(counts, _nan_unless_in_range(m, hit, dy), m.zeros(dy))
    dx = dy[..., None] * (of_p[..., None] * p - of_target - of_all)
    if dlse is not None:
        dx = dx + m.wide(dlse)[..., None] * p
    return dx * (1 - (x / softcap) * (x / softcap)) if softcap else dx


def _capped(m, x, softcap):
    return softcap * m.tanh(x / softcap) if softcap else x


def _rows(m, x, target, ignore_index):
    """The logarithms of probabilities, (..., C); which rows count; of each class, whether it is the target."""
    log_p = m.log_softmax(x, -1)
    return log_p, target != ignore_index, target[..., None] == m.arange(log_p.shape[-1], target)


def _divisor(m, counts, hit, weight, log_p):
    """The divisor of a mean."""
    if weight is None:
        return m.count(counts, log_p)
    of_target = m.sum(m.where(hit, m.zeros(log_p) + m.wide(weight), m.zeros(log_p)), (-1,))
    return _total(m, m.where(counts, of_target, m.zeros(of_target)))


def _total(m, x):
    return m.sum(x, tuple(range(len(x.shape))))


def _nan_unless_in_range(m, hit, x):
    """``x``, (...), where the target is one of the classes."""
    return m.where(m.any(hit, -1), x, m.zeros(x) + float("nan"))


# ---------------------------------------------------------------------------------------------------------------- axes


def has_extras(call):
    """Whether more than a row's probabilities makes its loss: then its classes are not split."""
    return bool(call.weight is not None or call.z_loss or call.softcap)


def rows_axis(call):
    """A part of the rows has another mean: their axis is whole for it."""
    return "N" if call.reduction == "mean" else "n"


def axes(call, n, c, like_loss, like_rows=(), like_x=()):
    """``n``, ``c``: the names of the axes. ``like_loss``, ``like_rows``, ``like_x``: the slots that are like the loss,
    the target and x."""
    n = n if len(call.x) > 1 else ""
    return (
        dict.fromkeys(like_loss, n if call.reduction == "none" else "")
        | dict.fromkeys(("target", *like_rows), n)
        | dict.fromkeys(("x", *like_x), f"{n} {c}")
        | {"weight": c}
    )
