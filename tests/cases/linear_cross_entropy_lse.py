"""linear_cross_entropy_lse: all that is tried on it."""

from __future__ import annotations

import numpy as np

from aotops.bench.work import Head
from aotops.testing import Bad, Row

from . import cross_entropy as of_loss
from . import linear_cross_entropy as of_head
from .linear_cross_entropy import EXTRAS, SHAPES, draw_head, head


def linear_cross_entropy_lse(x, weight, target, bias=None, class_weight=None, softcap=0.0, **attrs):
    logits = np.inner(x, weight) + (0 if bias is None else bias)
    y = of_loss.cross_entropy(logits, target, weight=class_weight, softcap=softcap, **attrs)
    return y, of_loss.logsumexp(of_loss.capped(logits, softcap))


def _in_torch(torch, x, weight, target, bias=None, class_weight=None, softcap=0.0, **attrs):
    y = of_head.in_torch(torch, x, weight, target, bias, class_weight, softcap=softcap, **attrs)
    logits = torch.nn.functional.linear(x, weight, bias)
    logits = logits.to(torch.promote_types(x.dtype, torch.float32))
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    top = logits.amax(-1, keepdim=True).detach()
    lse = (torch.exp(logits - top).sum(-1, keepdim=True).log() + top)[
        ..., 0
    ]  # its result is not saved for the gradient
    return y, lse


ROW = Row(
    linear_cross_entropy_lse,
    cases=(
        head((4, 6), 5, reduction="none"),
        head((4, 6), 5),
        head((4, 6), 5, reduction="sum"),
        head((4, 6), 8, bias=False, label_smoothing=0.1),
        head((9, 3), 3, ignore_index=2),  # rows that are ignored have an lse and a gradient of it
        head((7,), 3),
        head((2, 3, 4), 5, bias=False, reduction="none"),
        head((2, 3, 4), 5),
        head((2, 3, 4), 5, reduction="none"),
        head((1, 1), 1),
        head((0, 3), 2, reduction="none"),
        head((3, 0), 2),  # nothing but the bias
        head((4, 6), 5, weights="own", z_loss=0.1),
        head((5, 3), 4, weights="wide", label_smoothing=0.2, ignore_index=1, **EXTRAS),
        # chunks of the rows on the CPU, the last of them shorter
        head((1030, 33), 2051, scale=0.1),
        # products that are not small
        head((130, 72), 504, scale=0.2),
    ),
    draw=draw_head,
    bad=(
        Bad(SHAPES | {"target": None}, {}, TypeError, "target is None", "expected"),
        Bad(SHAPES, {"reduction": "max"}, ValueError, "reduction is 'max'", "expected"),
    ),
    torch=_in_torch,
    complex=True,
    samples={"": head((4, 6), 5)},
    opcheck=(head((4, 6), 5, weights="own", reduction="none", **EXTRAS), head((4, 6), 8, bias=False)),
    bench=(Head("awt", "st"),),
)
