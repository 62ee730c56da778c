"""cross_entropy: all that is tried on it."""

from __future__ import annotations

import numpy as np

from aotops.bench.work import Rows
from aotops.testing import F32, I64, Bad, Case, Row, X


def cross_entropy(x, target, ignore_index=-100, reduction="mean", label_smoothing=0.0):
    rows, counts = x.reshape(target.size, x.shape[-1]), target.ravel() != ignore_index
    top = rows.max(-1, keepdims=True, initial=-np.inf)
    log_p = rows - top - np.log(np.exp(rows - top).sum(-1, keepdims=True))
    hit = log_p[np.arange(target.size), np.where(counts, target.ravel(), 0)]
    smooth = label_smoothing * log_p.mean(-1) if label_smoothing else 0.0
    losses = np.where(counts, -(1 - label_smoothing) * hit - smooth, 0.0)
    if reduction == "none":
        return losses.reshape(target.shape)
    return losses.sum() / (counts.sum() if reduction == "mean" else 1)


def _cross_entropy(x, scale=1.0, **attrs) -> Case:
    # the gradient of a row is rounded before it is multiplied by dy, where a frontend keeps it
    return Case({"x": x, "target": x[:-1]}, attrs, scale=scale, classes={"target": x[-1]}, dtype_roundings=1)


def _draw(draw):
    return _cross_entropy(
        (*draw.shape(1), 5),
        ignore_index=draw.choice(-100, 1),
        reduction=draw.choice("none", "sum", "mean"),
        label_smoothing=draw.choice(0.0, 0.2, 1.0),
    )


ROW = Row(
    cross_entropy,
    cases=(
        _cross_entropy((4, 6), reduction="none"),
        _cross_entropy((4, 6)),
        _cross_entropy((4, 6), reduction="sum"),
        _cross_entropy((4, 6), label_smoothing=0.1),
        _cross_entropy((5, 3), reduction="none", label_smoothing=0.3, ignore_index=1),
        _cross_entropy((9, 3), ignore_index=2),  # some of them are ignored
        _cross_entropy((6,)),
        _cross_entropy((6,), reduction="none"),
        _cross_entropy((1, 1)),
        _cross_entropy((3, 1)),
        _cross_entropy((0, 6), reduction="sum"),
        _cross_entropy((0, 6), reduction="none"),
        _cross_entropy((5, 33), scale=20.0),
        # one for each path of a kernel
        _cross_entropy((33, 1025), label_smoothing=0.2),
        _cross_entropy((3, 8192), reduction="none", label_smoothing=1.0),
        _cross_entropy((2, 40000)),
        _cross_entropy((1500, 24), ignore_index=7),
    ),
    under_load=(
        _cross_entropy((2, 40000), reduction="none"),  # the loss alone, of rows that registers do not hold
        _cross_entropy((2, 140000)),  # a gradient whose rows a cluster does not hold
    ),
    draw=_draw,
    bad=(
        Bad(
            {"x": X, "target": X},
            {},
            TypeError,
            "target has dtype float32",
            "expected int32 or int64",
            served_by=("torch",),
        ),
        Bad({"x": X, "target": ((2,), "int8")}, {}, TypeError, "target has dtype int8", "expected int32 or int64"),
        Bad({"x": X, "target": ((3,), I64)}, {}, ValueError, "target has shape (3,)", "expected (2,)"),
        Bad(
            {"x": ((2, 3, 4), F32), "target": ((2, 4), I64)},
            {},
            ValueError,
            "x has shape (2, 3, 4)",
            "(N, C) or (C,)",
            served_by=("torch",),
        ),
        Bad({"x": X, "target": ((2,), I64)}, {"reduction": "max"}, ValueError, "reduction is 'max'", "expected"),
        Bad(
            {"x": X, "target": ((2,), I64)},
            {"label_smoothing": 1.5},
            ValueError,
            "label_smoothing is 1.5",
            "expected 0 to 1",
        ),
        Bad({"x": X, "target": None}, {}, TypeError, "target is None", "expected"),
    ),
    samples={"": _cross_entropy((4, 6))},
    opcheck=(
        _cross_entropy((4, 6), reduction="sum", label_smoothing=0.1),
        _cross_entropy((4, 6), ignore_index=5, reduction="none"),
    ),
    bench=(
        Rows("xt", "s", ("xts", "x")),
        Rows("xt", "sx", variant="fused_dx"),  # the loss and its gradient, as a training step wants them
    ),
)
