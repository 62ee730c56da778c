"""matmul: all that is tried on it."""

from __future__ import annotations

import numpy as np

from aotops.bench.work import Product
from aotops.testing import F32, F64, Bad, Case, Row, X


def matmul(a, b, transpose_a=False, transpose_b=False, allow_tf32=False):
    return (np.swapaxes(a, -2, -1) if transpose_a else a) @ (np.swapaxes(b, -2, -1) if transpose_b else b)


def _matmul(a, b, **attrs) -> Case:
    return Case({"a": a, "b": b}, attrs)


def _draw(draw):
    m, k, n = (draw.size() for _ in range(3))
    a, b = draw.broadcast(draw.shape(2))
    ta, tb = draw.flag(), draw.flag()
    return _matmul((*a, *((k, m) if ta else (m, k))), (*b, *((n, k) if tb else (k, n))), transpose_a=ta, transpose_b=tb)


def _in_torch(torch, a, b, transpose_a=False, transpose_b=False, allow_tf32=False):
    return torch.matmul(a.mT if transpose_a else a, b.mT if transpose_b else b)


ROW = Row(
    matmul,
    cases=(
        _matmul((1, 1), (1, 1)),
        _matmul((4, 6), (6, 4)),
        _matmul((4, 6), (4, 5), transpose_a=True),
        _matmul((4, 6), (5, 6), transpose_b=True),
        _matmul((6, 4), (5, 6), transpose_a=True, transpose_b=True),
        _matmul((1, 7), (7, 1)),
        _matmul((7, 1), (1, 7)),
        _matmul((0, 3), (3, 2)),
        _matmul((3, 2), (2, 0)),
        _matmul((2, 0), (0, 3)),  # sums of nothing
        # leading axes, which broadcast
        _matmul((3, 4, 5), (3, 5, 2)),
        _matmul((3, 4, 5), (5, 2)),
        _matmul((4, 5), (3, 5, 2)),
        _matmul((3, 5, 4), (2, 5), transpose_a=True, transpose_b=True),
        _matmul((4, 5), (3, 2, 5), transpose_b=True),
        _matmul((2, 1, 3, 4), (3, 4, 2)),
        _matmul((2, 3, 4, 5), (2, 1, 5, 3)),
        _matmul((2, 3, 5, 4), (1, 3, 6, 5), transpose_a=True, transpose_b=True),
        _matmul((0, 3, 4), (4, 2)),
        _matmul((2, 0, 3, 4), (2, 1, 4, 2)),
        # one for each path of a kernel: blocks and tiles that are not whole, sums in several pieces
        _matmul((33, 1025), (1025, 70)),
        _matmul((250, 300), (300, 500)),
        _matmul((100, 33), (100, 130), transpose_a=True),
        _matmul((3, 5000), (2, 5000), transpose_b=True),
        _matmul((37, 83), (45, 83), transpose_b=True),
        _matmul((65, 1037), (47, 1037), transpose_b=True),
        _matmul((1037, 65), (1037, 47), transpose_a=True),
        _matmul((256, 256), (256, 256), transpose_b=True),
        _matmul((64, 33, 8), (64, 8, 40)),
        # one row or one column: whole and partial vectors of terms and of sums, several tasks, sums in several pieces
        _matmul((1, 67), (67, 1)),
        _matmul((1, 75), (75, 130)),
        _matmul((1, 9), (4200, 9), transpose_b=True),
        _matmul((1, 8203), (8203, 21)),
        _matmul((70, 131), (131, 1)),
        _matmul((8203, 21), (8203, 1), transpose_a=True),
        _matmul((3, 50, 40), (3, 1, 40), transpose_b=True),
        _matmul((4, 1, 33), (4, 33, 19)),
    ),
    under_load=(  # large enough for transposed copies of both
        _matmul((1024, 1536), (1024, 1536), transpose_a=True, allow_tf32=True),
    ),
    draw=_draw,
    bad=(
        Bad({"a": X, "b": X}, {}, ValueError, "b has shape (2, 3)", "(..., 3, n)", "(2, 3), the shape"),
        Bad({"a": X, "b": ((3, 4), F32)}, {"transpose_b": True}, ValueError, "b has shape (3, 4)", "(..., n, 3)"),
        Bad(
            {"a": ((3,), F32), "b": ((3, 2), F32)}, {}, ValueError, "a has shape (3,)", "two axes", served_by=("torch",)
        ),
        Bad(
            {"a": ((2, 2, 3), F32), "b": ((3, 3, 2), F32)},
            {},
            ValueError,
            "b has shape (3, 3, 2)",
            "do not broadcast",
            "(2, 2, 3)",
        ),
        Bad({"a": X, "b": ((3, 2), F64)}, {}, TypeError, "b has dtype float64", "expected float32"),
    ),
    torch=_in_torch,
    samples={"": _matmul((4, 6), (6, 5))},
    opcheck=(_matmul((4, 6), (4, 6), transpose_b=True),),
    bench=(
        Product("ab", "y", ("yab", "ab")),
        Product(
            "ab",
            "y",
            ("yab", "ab"),
            variant="tf32",
            dtypes=("float32",),
            call=lambda f, shape: lambda a, b: f.matmul(a, b, allow_tf32=True),
        ),
    ),
    complex=True,
)
