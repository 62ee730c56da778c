"""softmax: all that is tried on it."""

from __future__ import annotations

import numpy as np

from aotops.bench.work import Along, OddRows, Rows
from aotops.testing import Bad, Case, Row, X


def softmax(x, dim=-1):
    if x.size == 0:
        return x
    e = np.exp(x - x.max(dim, keepdims=True))
    return e / e.sum(dim, keepdims=True)


def _softmax(x, dim=None, **kwargs) -> Case:
    # its gradient is that of the rounded result, and has roundings of each of dy * y and of their sum
    return Case({"x": x}, {} if dim is None else {"dim": dim}, dtype_roundings=8, **kwargs)


def _draw(draw):
    x = draw.shape()
    ndim = max(len(x), 1)
    return _softmax(x, draw.integer(-ndim, ndim - 1))


ROW = Row(
    softmax,
    cases=(
        _softmax((4, 6)),
        _softmax(()),
        _softmax((), 0),
        _softmax((1, 1)),
        _softmax((5, 1)),
        _softmax((0, 6)),
        _softmax((3, 0)),
        _softmax((9,), 0),
        _softmax((3, 33), scale=20.0),
        # another axis
        _softmax((4, 6), 0),
        _softmax((2, 5, 3), 1),
        _softmax((2, 5, 70), -2),
        _softmax((300, 33), 0),
        # one for each path of a kernel
        _softmax((33, 1025)),
        *(_softmax((n, 4 * vectors)) for n, vectors in ((5, 96), (5, 160), (3, 400), (2, 2600))),
        _softmax((3, 8192)),
        _softmax((2, 40000)),
        _softmax((1500, 24)),
        _softmax((37, 20)),
        *(_softmax((n, cols)) for n, cols in ((300, 3), (67, 49), (9, 100), (33, 197), (7, 301), (5, 601))),
        *(_softmax((n, cols)) for n, cols in ((5, 777), (3, 1001), (2, 40001))),
        *(_softmax((2, n, 24), 1) for n in (5, 30, 40, 70, 150, 300, 1100)),
        *(_softmax((3, n, 7), 1) for n in (5, 40, 200)),
    ),
    draw=_draw,
    bad=(
        Bad({"x": X}, {"dim": 2}, ValueError, "dim is 2", "(2, 3)"),
        Bad({"x": X}, {"dim": -3}, ValueError, "dim is -3", "(2, 3)"),
    ),
    samples={"": _softmax((4, 6), -1), "first": _softmax((4, 6), 0)},
    bench=(
        Rows("x", "x", ("xx", "x"), call=lambda f, shape: lambda x: f.softmax(x, -1)),
        OddRows("x", "x", ("xx", "x"), variant="odd", call=lambda f, shape: lambda x: f.softmax(x, -1)),
        Along("x", "x", ("xx", "x"), variant="axis", call=lambda f, shape: lambda x: f.softmax(x, 1)),
    ),
)
