"""cross_entropy_lse: all that is tried on it."""

from __future__ import annotations

from aotops.bench.work import Rows
from aotops.testing import I64, Bad, Row, X

from . import cross_entropy as of_loss
from .cross_entropy import BAD, EXTRAS, case_of, draw_case


def cross_entropy_lse(x, target, ignore_index=-100, *args, softcap=0.0, **kwargs):
    y = of_loss.cross_entropy(x, target, ignore_index, *args, softcap=softcap, **kwargs)
    return y, of_loss.logsumexp(of_loss.capped(x, softcap)), x.argmax(-1).astype(target.dtype)


def _in_torch(torch, x, target, *args, softcap=0.0, **kwargs):
    rows = x.to(torch.promote_types(x.dtype, torch.float32))
    rows = softcap * torch.tanh(rows / softcap) if softcap else rows
    top = rows.amax(-1, keepdim=True).detach()
    lse = (torch.exp(rows - top).sum(-1, keepdim=True).log() + top)[..., 0]  # its result is not saved for the gradient
    return of_loss.in_torch(torch, x, target, *args, softcap=softcap, **kwargs), lse, x.argmax(-1)


ROW = Row(
    cross_entropy_lse,
    cases=(
        case_of((4, 6)),
        case_of((4, 6), reduction="none", label_smoothing=0.3, ignore_index=1),
        case_of((9, 3), ignore_index=2),  # rows that are ignored have an lse and a gradient of it
        case_of((4, 6), reduction="sum", label_smoothing=0.1),
        case_of((6,)),
        case_of((1, 1)),
        case_of((0, 6), reduction="none"),
        case_of((5, 33), scale=20.0),
        # one for each path of a kernel
        case_of((33, 1025), label_smoothing=0.2),
        case_of((2, 40000), reduction="none"),
        case_of((300, 33), scale=20.0),
        case_of((32, 256), label_smoothing=0.1),  # by a single block
        *EXTRAS,
    ),
    under_load=(
        case_of((2, 40000)),
        case_of((2, 140000)),  # rows that a cluster does not hold
    ),
    draw=draw_case,
    bad=(
        Bad({"x": X, "target": ((2,), "int8")}, {}, TypeError, "target has dtype int8", "expected int32 or int64"),
        Bad({"x": X, "target": ((3,), I64)}, {}, ValueError, "target has shape (3,)", "expected (2,)"),
        Bad({"x": X, "target": ((2,), I64)}, {"reduction": "max"}, ValueError, "reduction is 'max'", "expected"),
        Bad({"x": X, "target": None}, {}, TypeError, "target is None", "expected"),
        *BAD,
    ),
    torch=_in_torch,
    complex=True,
    samples={"": case_of((4, 6))},
    opcheck=(case_of((4, 6), ignore_index=5, reduction="none", weight="own", z_loss=0.1, softcap=3.0),),
    bench=(Rows("xt", "stt"),),
)
