"""linear_cross_entropy: all that is tried on it."""

from __future__ import annotations

import numpy as np

from aotops.bench.work import Head
from aotops.testing import F32, I64, Bad, Case, Row, X

from . import cross_entropy as rows


def linear_cross_entropy(x, weight, target, bias=None, class_weight=None, **attrs):
    logits = np.inner(x, weight) + (0 if bias is None else bias)
    return rows.cross_entropy(logits, target, weight=class_weight, **attrs)


def head(x, out, bias=True, scale=0.5, weights="", **attrs) -> Case:
    """``weights``: of the classes: "" for none, "own" for x's dtype, or "wide"."""
    shapes = {"x": x, "weight": (out, x[-1]), "bias": (out,) if bias else None}
    shapes |= {"class_weight": (out,) if weights else None, "target": x[:-1]}
    constants = ("class_weight",) if weights else ()
    wide = ("lse", "class_weight") if weights == "wide" else ("lse",)
    # logits are rounded too; the gradients are products of a rounded factor, whose rounding is in each of their terms
    rounds = {"inner_roundings": 1, "magnified": 4, "dtype_roundings": 8}
    return Case(shapes, attrs, scale, classes={"target": out}, wide=wide, constants=constants, **rounds)


def draw_head(draw):
    return head(
        (*draw.shape(2), draw.size()),
        5,
        draw.flag(),
        ignore_index=draw.choice(-100, 1),
        reduction=draw.choice("none", "sum", "mean"),
        label_smoothing=draw.choice(0.0, 0.2, 1.0),
        weights=draw.choice("", "", "own"),
        z_loss=draw.choice(0.0, 0.0, 0.01),
        softcap=draw.choice(0.0, 0.0, 2.0),
    )


def in_torch(torch, x, weight, target, bias=None, class_weight=None, allow_tf32=False, reduction="mean", **attrs):
    logits = torch.nn.functional.linear(x, weight, bias)
    flat = logits.reshape(target.numel(), logits.shape[-1]), target.reshape(target.numel())
    y = rows.in_torch(torch, *flat, reduction=reduction, weight=class_weight, **attrs)
    return y.reshape(target.shape) if reduction == "none" else y


EXTRAS = {"z_loss": 0.02, "softcap": 3.0}
SHAPES = {"x": X, "weight": ((4, 3), F32), "target": ((2,), I64)}

ROW = Row(
    linear_cross_entropy,
    cases=(
        head((4, 6), 5, reduction="none"),
        head((4, 6), 5),
        head((4, 6), 5, reduction="sum"),
        head((4, 6), 8, bias=False),
        head((4, 6), 5, label_smoothing=0.1),
        head((6, 3), 4, reduction="none", label_smoothing=0.3, ignore_index=1),
        head((9, 3), 3, ignore_index=2),  # some of them are ignored
        head((7,), 3),
        head((7,), 3, bias=False, reduction="none"),
        head((2, 3, 4), 5, reduction="sum"),
        head((2, 3, 4), 5, bias=False, reduction="none"),
        head((2, 3, 4), 5),
        head((2, 3, 4), 5, reduction="none"),
        head((1, 1), 1),
        head((0, 3), 2, reduction="sum"),
        head((0, 3), 2, reduction="none"),
        head((3, 0), 2),  # nothing but the bias
        # each extra alone, and all
        head((4, 6), 5, weights="own", reduction="none"),
        head((4, 6), 5, bias=False, weights="wide"),
        head((4, 6), 5, z_loss=0.1),
        head((4, 6), 5, softcap=1.5, reduction="sum"),
        head((5, 3), 4, weights="wide", label_smoothing=0.2, ignore_index=1, **EXTRAS),
        # chunks of the rows on the CPU, the last of them shorter
        head((1030, 33), 2051, scale=0.1),
        head((1030, 4), 2051, bias=False, scale=0.2, reduction="none"),
        # products that are not small
        head((130, 72), 504, scale=0.2),
        head((64, 128), 1001, bias=False, scale=0.2, ignore_index=3),
    ),
    draw=draw_head,
    bad=(
        Bad(
            SHAPES | {"weight": ((4, 2), F32)},
            {},
            ValueError,
            "weight has shape (4, 2)",
            "(out, 3)",
            "(2, 3), the shape of x",
        ),
        Bad(SHAPES | {"weight": ((0, 3), F32)}, {}, ValueError, "weight has shape (0, 3)", "one class at least"),
        Bad(SHAPES | {"weight": ((4, 3), "float16")}, {}, TypeError, "weight has dtype float16", "expected float32"),
        Bad(SHAPES | {"bias": ((3,), F32)}, {}, ValueError, "bias has shape (3,)", "expected (4,)"),
        Bad(SHAPES | {"target": ((2,), F32)}, {}, TypeError, "target has dtype float32", "expected int32 or int64"),
        Bad(SHAPES | {"target": ((3,), I64)}, {}, ValueError, "target has shape (3,)", "expected (2,)"),
        Bad(SHAPES | {"target": None}, {}, TypeError, "target is None", "expected"),
        Bad(SHAPES, {"reduction": "max"}, ValueError, "reduction is 'max'", "expected"),
        Bad(SHAPES, {"label_smoothing": 1.5}, ValueError, "label_smoothing is 1.5", "expected 0 to 1"),
        Bad(SHAPES, {"z_loss": -1.0}, ValueError, "z_loss is -1", "expected a finite number"),
        Bad(SHAPES, {"softcap": -1.0}, ValueError, "softcap is -1", "0 or more"),
        Bad(SHAPES | {"class_weight": ((2,), F32)}, {}, ValueError, "class_weight has shape (2,)", "expected (4,)"),
        Bad(SHAPES | {"class_weight": ((4,), I64)}, {}, TypeError, "class_weight has dtype int64", "float32"),
        Bad(SHAPES, {"dtype": "float16"}, TypeError, "dtype is float16", "expected None or float32"),
    ),
    torch=in_torch,
    complex=True,
    samples={"": head((4, 6), 5), "rows": head((4, 6), 5, reduction="none")},
    opcheck=(
        head((4, 6), 8, bias=False, reduction="sum"),
        head((4, 6), 4, label_smoothing=0.1, ignore_index=2),
        head((4, 6), 5, weights="own", **EXTRAS),
    ),
    bench=(
        Head("awt", "s"),
        Head("awt", "saw", variant="gradients"),  # the loss and its gradients, as a training step wants them
    ),
)
