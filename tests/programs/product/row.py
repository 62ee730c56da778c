"""blend: all that is tried on it."""

from __future__ import annotations

import numpy as np

from aotops.bench.work import Product
from aotops.testing import FLOATING, I64, Bad, Case, Row, X


def blend(x, weight, bias=None, factor=1.0):
    return factor * np.inner(x, weight) + (0 if bias is None else bias)


def _blend(x, out, bias=True) -> Case:
    return Case({"x": x, "weight": (out, x[-1]), "bias": (out,) if bias else None}, {"factor": -1.5})


def _in_torch(torch, x, weight, bias=None, factor=1.0):
    y = factor * torch.nn.functional.linear(x, weight)
    return y if bias is None else y + bias


ROW = Row(
    blend,
    cases=(
        _blend((1, 1), 1),
        _blend((0, 3), 2),
        _blend((4, 6), 5),
        _blend((4, 6), 5, False),
        _blend((2, 3, 7), 4),
        _blend((513, 65), 3),
    ),
    draw=lambda draw: _blend((*draw.shape(), draw.size()), draw.size(), draw.flag()),
    bad=(Bad({"x": ((2, 3), I64), "weight": X, "bias": ((2,), "float32")}, {}, TypeError, "x has", FLOATING),),
    torch=_in_torch,
    bench=(Product("awv", "y", ("yaw", "awv")),),
)
