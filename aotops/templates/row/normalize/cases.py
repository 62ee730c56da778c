"""normalize: all that is tried on it."""

from __future__ import annotations

import numpy as np

from aotops.bench.work import Rows
from aotops.testing import FLOATING, I64, Bad, Case, Row, X


def normalize(x, eps=1e-6):
    return x / np.sqrt((x * x).sum(-1 if x.ndim else None, keepdims=True) + eps)


def _normalize(x, **attrs) -> Case:
    # about 3: the gradient of a row near 0 is as large as 1 / sqrt(eps)
    return Case({"x": x}, attrs, mean=3.0, scale=0.5, grad_condition=4)


ROW = Row(
    normalize,
    cases=(
        _normalize((4, 6)),
        _normalize(()),
        _normalize((1, 1)),
        _normalize((9,), eps=1.0),
        _normalize((0, 6)),
        _normalize((3, 0)),
        _normalize((3, 5, 2)),
        _normalize((33, 1025)),
        _normalize((2, 40000)),
    ),
    draw=lambda draw: _normalize(draw.shape(), eps=draw.choice(1e-6, 0.5)),
    bad=(
        Bad({"x": ((3,), I64)}, {}, TypeError, "x has dtype int64", FLOATING),
        Bad({"x": X}, {"eps": "2"}, TypeError, "eps is '2'", "expected a number"),
    ),
    torch=lambda torch, x, eps=1e-6: x / ((x * x).sum(-1, keepdim=True) + eps).sqrt(),
    bench=(Rows("x", "x", ("xx", "x"), call=lambda f, shape: lambda x: f.normalize(x)),),
)

CASES = {"normalize": ROW}
