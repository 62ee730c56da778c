"""add: all that is tried on it."""

from __future__ import annotations

import math

import numpy as np

from aotops.bench.work import Elements

from ._row import F32, FLOATING, I32, Bad, Case, Row


def add(a, b):
    return a + b


def _add(a, b=None) -> Case:
    dtype_roundings = 0 if b is None else math.prod(np.broadcast_shapes(a, b))
    return Case({"a": a, "b": a if b is None else b}, dtype_roundings=dtype_roundings)


def _draw(draw):
    a, b = draw.broadcast(draw.shape())
    return _add(a, b)


ROW = Row(
    add,
    cases=(
        _add(()),
        _add((1,)),
        _add((0,)),
        _add((3, 0, 2)),
        _add((7,)),
        _add((3, 5, 2)),
        _add((33, 1025)),
        # broadcast by the frontend
        _add((3, 1), (1, 4)),
        _add((4,), (2, 3, 4)),
        _add((2, 3), ()),
        _add((2, 1, 3), (0, 3)),
    ),
    draw=_draw,
    bad=(
        Bad({"a": ((3,), I32), "b": ((3,), I32)}, {}, TypeError, "a has dtype int32", FLOATING),
        Bad({"a": ((3,), F32), "b": ((3,), "float16")}, {}, TypeError, "b has dtype float16", "expected float32"),
        Bad({"a": ((2, 3), F32), "b": ((4,), F32)}, {}, ValueError, "(4,)", "(2, 3)", "broadcast"),
        Bad({"a": ((3,), F32), "b": None}, {}, TypeError, "b is None", "expected"),
    ),
    torch=lambda torch, a, b: torch.add(a, b),
    samples={"": _add((4, 6))},
    bench=(Elements("xx", "x"),),  # its gradient is the one that comes in
)
