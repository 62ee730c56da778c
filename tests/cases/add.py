"""add: all that is tried on it."""

from __future__ import annotations

import math

import numpy as np

from aotops.bench.work import Elements
from aotops.testing import F32, FLOATING, I32, Bad, Case, Row, X


def add(a, b, alpha=1):
    return a + alpha * b


def _add(a, b=None, **attrs) -> Case:
    dtype_roundings = 0 if b is None else math.prod(np.broadcast_shapes(a, b))
    return Case({"a": a, "b": a if b is None else b}, attrs, dtype_roundings=dtype_roundings + ("alpha" in attrs))


def _number(a, b, **attrs) -> Case:
    return Case({"a": a}, {"b": b, **attrs})


def _draw(draw):
    a, b = draw.broadcast(draw.shape())
    attrs = {"alpha": draw.choice(1, 2, -0.3, 0)} if draw.flag() else {}
    return _add(a, b, **attrs) if draw.integer(0, 3) else _number(a, draw.choice(3, -0.7, 0.0, True), **attrs)


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
        # alpha * b
        _add((), alpha=2),
        _add((33, 1025), alpha=0.1),
        _add((3, 1), (1, 4), alpha=-0.3),
        _add((4,), (2, 3, 4), alpha=1.0),
        # a number
        _number((), 2),
        _number((0,), 0.5),
        _number((3, 5, 2), True),
        _number((33, 1025), 0.1),
        _number((7,), -3, alpha=0.7),
    ),
    draw=_draw,
    bad=(
        Bad({"a": ((3,), I32), "b": ((3,), I32)}, {}, TypeError, "a has dtype int32", FLOATING),
        Bad(
            {"a": ((3,), F32), "b": ((3,), "float16")},
            {},
            TypeError,
            "b has dtype float16",
            "expected float32",
            served_by=("torch",),
        ),
        Bad({"a": ((2, 3), F32), "b": ((4,), F32)}, {}, ValueError, "(4,)", "(2, 3)", "broadcast"),
        Bad({"a": ((3,), F32), "b": None}, {}, TypeError, "b is None", "expected"),
        Bad({"a": ((3,), F32), "b": "2"}, {}, TypeError, "b is ", "expected"),
        Bad({"a": ((3,), F32), "b": 1j}, {}, TypeError, "b ", "expected"),
        Bad({"a": ((3,), I32), "b": 2.5}, {}, TypeError, "a has dtype int32", FLOATING),
        Bad({"a": X, "b": X}, {"alpha": "2"}, TypeError, "alpha is '2'", "expected a number"),
        Bad({"a": X, "b": X}, {"alpha": None}, TypeError, "alpha is ", "expected a"),
        Bad({"a": X, "b": X}, {"alpha": True}, TypeError, "alpha is True", "expected a number"),
        Bad({"a": X, "b": X}, {"alpha": X}, TypeError, "alpha is (", "expected a number"),
        Bad({"a": X, "b": 2.5}, {"alpha": "2"}, TypeError, "alpha is '2'", "expected a number"),
    ),
    torch=lambda torch, a, b, alpha=1: torch.add(a, b, alpha=alpha),
    samples={"": _add((4, 6)), "alpha": _add((4, 6), alpha=-0.3), "number": _number((4, 6), 0.7)},
    bench=(Elements("xx", "x"),),  # its gradient is the one that comes in
)
