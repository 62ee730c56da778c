"""sum_squares: all that is tried on it."""

from __future__ import annotations

from aotops.bench.work import Rows
from aotops.testing import FLOATING, I64, Bad, Case, Row


def sum_squares(x):
    return (x * x).sum(-1 if x.ndim else None)


def _sum_squares(x, **kwargs) -> Case:
    return Case({"x": x}, {}, **kwargs)


ROW = Row(
    sum_squares,
    cases=(
        _sum_squares((4, 6)),
        _sum_squares(()),
        _sum_squares((9,)),
        _sum_squares((0, 6)),
        _sum_squares((3, 0)),
        _sum_squares((3, 5, 2)),
        _sum_squares((33, 1025)),
        _sum_squares((2, 40000)),
    ),
    draw=lambda draw: _sum_squares(draw.shape()),
    bad=(
        Bad({"x": ((3,), I64)}, {}, TypeError, "x has dtype int64", FLOATING),
        Bad({"x": None}, {}, TypeError, "x is None", "expected"),
    ),
    torch=lambda torch, x: (x * x).sum(-1),
    bench=(Rows("x", "t", ("x", "x")),),
)

CASES = {"sum_squares": ROW}
