"""scale: all that is tried on it."""

from __future__ import annotations

from aotops.bench.work import Elements
from aotops.testing import FLOATING, I64, Bad, Case, Row, X


def scale(x, factor=1.0):
    return x * factor


def _scale(x, factor=-1.5) -> Case:
    return Case({"x": x}, {"factor": factor})


ROW = Row(
    scale,
    cases=(
        _scale(()),
        _scale((1,)),
        _scale((2, 0)),
        _scale((7,), 0.0),
        _scale((4, 6)),
        _scale((3, 5, 2), 1e-3),
        _scale((33, 1025)),
    ),
    draw=lambda draw: _scale(draw.shape(), draw.choice(0.5, -2.0, 0.0)),
    bad=(
        Bad({"x": ((3,), I64)}, {}, TypeError, "x has dtype int64", FLOATING),
        Bad({"x": None}, {}, TypeError, "x is None", "expected"),
        Bad({"x": X}, {"factor": "2"}, TypeError, "factor is '2'", "expected a number"),
    ),
    torch=lambda torch, x, factor=1.0: x * factor,
    bench=(Elements("x", "x", ("x", "x"), call=lambda f, shape: lambda x: f.scale(x, 0.5)),),
)

CASES = {"scale": ROW}
