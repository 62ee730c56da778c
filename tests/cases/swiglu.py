"""swiglu: all that is tried on it."""

from __future__ import annotations

import numpy as np

from aotops.bench.work import Elements
from aotops.testing import F32, Bad, Case, Row, X


def swiglu(gate, up):
    return gate / (1 + np.exp(-gate)) * up


def _swiglu(shape, **kwargs) -> Case:
    return Case({"gate": shape, "up": shape}, **kwargs)


def _draw(draw):
    return _swiglu(draw.shape())


ROW = Row(
    swiglu,
    cases=(
        _swiglu(()),
        _swiglu((1,)),
        _swiglu((2, 0)),
        _swiglu((7,)),
        _swiglu((3, 5, 2)),
        _swiglu((101,), scale=6.0),
        _swiglu((33, 1025)),
    ),
    draw=_draw,
    bad=(Bad({"gate": X, "up": ((3,), F32)}, {}, ValueError, "up has shape (3,)", "expected (2, 3)"),),
    torch=lambda torch, gate, up: torch.nn.functional.silu(gate) * up,
    samples={"": _swiglu((4, 6))},
    bench=(Elements("xx", "x", ("xxx", "xx")),),
)
