"""cross_entropy: all that is tried on it."""

from __future__ import annotations

import numpy as np

from aotops.bench.work import Rows
from aotops.testing import F32, I64, Bad, Case, Row, X


def cross_entropy(
    x, target, ignore_index=-100, reduction="mean", label_smoothing=0.0, weight=None, z_loss=0.0, softcap=0.0
):
    rows, counts = capped(x, softcap).reshape(target.size, x.shape[-1]), target.ravel() != ignore_index
    lse = logsumexp(rows)
    log_p = rows - lse[:, None]
    weighted = log_p if weight is None else log_p * weight
    classes = np.where(counts, target.ravel(), 0)
    hit = weighted[np.arange(target.size), classes]
    smooth = label_smoothing * weighted.mean(-1) if label_smoothing else 0.0
    losses = np.where(counts, -(1 - label_smoothing) * hit - smooth + z_loss * lse**2, 0.0)
    if reduction == "none":
        return losses.reshape(target.shape)
    divisor = counts.sum() if weight is None else np.where(counts, weight[classes], 0.0).sum()
    return losses.sum() / (divisor if reduction == "mean" else 1)


def capped(x, softcap):
    return softcap * np.tanh(x / softcap) if softcap else x


def logsumexp(rows):
    top = rows.max(-1, keepdims=True, initial=-np.inf)
    return (top + np.log(np.exp(rows - top).sum(-1, keepdims=True)))[..., 0]


def case_of(x, scale=1.0, weight="", **attrs) -> Case:
    """``weight``: "" for none, "own" for x's dtype, or "wide"."""
    # the gradient of a row is rounded before it is multiplied by dy, where a frontend keeps it
    wide = ("lse", "weight") if weight == "wide" else ("lse",)
    shapes = {"x": x, "weight": x[-1:] if weight else None, "target": x[:-1]}
    classes, constants = {"target": x[-1]}, ("weight",) if weight else ()
    return Case(shapes, attrs, scale, classes=classes, wide=wide, constants=constants, dtype_roundings=1)


def in_torch(
    torch,
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
    """torch's own has no z-loss and no cap, and no gradient of the weights."""
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    if weight is None and not z_loss and not softcap:
        return torch.nn.functional.cross_entropy(x, target, **options)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rows = softcap * torch.tanh(wide / softcap) if softcap else wide
    log_p = torch.log_softmax(rows, -1) * (1 if weight is None else weight)
    counts = target != ignore_index
    losses = torch.nn.functional.nll_loss(log_p, target, ignore_index=ignore_index, reduction="none")
    smooth = -log_p.mean(-1) if label_smoothing else 0.0
    losses = (1 - label_smoothing) * losses + label_smoothing * smooth + z_loss * torch.logsumexp(rows, -1) ** 2
    losses = torch.where(counts, losses, 0).to(x.dtype)
    if reduction == "none":
        return losses
    divisor = counts.sum() if weight is None else torch.where(counts, weight[target * counts], 0).sum()
    return losses.sum() / divisor if reduction == "mean" else losses.sum()


def draw_case(draw):
    return case_of(
        (*draw.shape(1), 5),
        ignore_index=draw.choice(-100, 1),
        reduction=draw.choice("none", "sum", "mean"),
        label_smoothing=draw.choice(0.0, 0.2, 1.0),
        weight=draw.choice("", "", "own"),
        z_loss=draw.choice(0.0, 0.0, 0.01),
        softcap=draw.choice(0.0, 0.0, 2.0),
    )


_EXTRAS = {"z_loss": 0.02, "softcap": 3.0}
EXTRAS = (
    # each extra alone, and all
    case_of((4, 6), weight="own", reduction="none"),
    case_of((4, 6), weight="wide"),
    case_of((4, 6), z_loss=0.1),
    case_of((300, 6), z_loss=0.1),
    case_of((4, 6), softcap=1.5, reduction="sum"),
    case_of((5, 7), weight="wide", label_smoothing=0.2, ignore_index=1),
    case_of((6,), weight="own", **_EXTRAS),
    case_of((3, 1), **_EXTRAS),
    case_of((0, 6), reduction="sum", weight="own"),
    case_of((5, 33), scale=20.0, reduction="none", label_smoothing=0.1, **_EXTRAS),
    # one for each path of a kernel
    case_of((33, 1025), weight="own", ignore_index=2, **_EXTRAS),
    case_of((3, 8192), weight="wide", reduction="none", label_smoothing=0.3, **_EXTRAS),
    case_of((2, 40000), z_loss=0.01),
    case_of((1500, 24), ignore_index=7, weight="own", z_loss=0.01),
)
BAD = (
    Bad({"x": X, "target": ((2,), I64)}, {"z_loss": -1.0}, ValueError, "z_loss is -1", "expected a finite number"),
    Bad({"x": X, "target": ((2,), I64)}, {"softcap": -1.0}, ValueError, "softcap is -1", "0 or more"),
    Bad({"x": X, "target": ((2,), I64), "weight": ((2,), F32)}, {}, ValueError, "weight has shape (2,)", "(3,)"),
    Bad({"x": X, "target": ((2,), I64), "weight": ((3,), I64)}, {}, TypeError, "weight has dtype int64", "float32"),
    Bad(
        {"x": X, "target": ((2,), I64), "weight": ((3,), "float16")},
        {},
        TypeError,
        "weight has dtype float16",
        "expected float32",
        served_by=("torch",),
    ),
)


ROW = Row(
    cross_entropy,
    cases=(
        case_of((4, 6), reduction="none"),
        case_of((4, 6)),
        case_of((4, 6), reduction="sum"),
        case_of((4, 6), label_smoothing=0.1),
        case_of((5, 3), reduction="none", label_smoothing=0.3, ignore_index=1),
        case_of((9, 3), ignore_index=2),  # some of them are ignored
        case_of((6,)),
        case_of((6,), reduction="none"),
        case_of((1, 1)),
        case_of((3, 1)),
        case_of((0, 6), reduction="sum"),
        case_of((0, 6), reduction="none"),
        case_of((5, 33), scale=20.0),
        # one for each path of a kernel
        case_of((33, 1025), label_smoothing=0.2),
        case_of((3, 8192), reduction="none", label_smoothing=1.0),
        case_of((2, 40000)),
        case_of((1500, 24), ignore_index=7),
        case_of((17000, 6), ignore_index=2),  # sums over more rows than one block of a GPU takes
        case_of((300, 33), label_smoothing=0.1),
        case_of((300, 6), reduction="sum"),
        case_of((33, 256), reduction="none", ignore_index=3),  # the loss alone, of rows within a warp
        # the most rows and columns of a single block, and more than those
        case_of((32, 256), ignore_index=3),
        case_of((32, 100), label_smoothing=0.1),
        case_of((33, 10)),
        *EXTRAS,
    ),
    under_load=(
        case_of((2, 40000), reduction="none"),  # the loss alone, of rows that registers do not hold
        case_of((2, 140000)),  # a gradient whose rows a cluster does not hold
    ),
    draw=draw_case,
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
        *BAD,
    ),
    torch=in_torch,
    complex=True,
    samples={"": case_of((4, 6))},
    opcheck=(
        case_of((4, 6), reduction="sum", label_smoothing=0.1),
        case_of((4, 6), ignore_index=5, reduction="none"),
        case_of((4, 6), weight="own", **_EXTRAS),
    ),
    bench=(
        Rows("xt", "s", ("xts", "x")),
        Rows("xt", "sx", variant="fused_dx"),  # the loss and its gradient, as a training step wants them
    ),
)
