"""multiply: all that is tried on it."""

from __future__ import annotations

from aotops.bench.work import Product
from aotops.testing import F32, F64, Bad, Case, Row, X


def multiply(a, b):
    return a @ b


def _multiply(m, k, n) -> Case:
    return Case({"a": (m, k), "b": (k, n)})


ROW = Row(
    multiply,
    cases=(
        _multiply(4, 6, 5),
        _multiply(1, 1, 1),
        _multiply(1, 7, 1),
        _multiply(0, 3, 2),
        _multiply(3, 2, 0),
        _multiply(2, 0, 3),  # sums of nothing
        _multiply(33, 1025, 20),
        _multiply(70, 37, 130),
    ),
    draw=lambda draw: _multiply(draw.size(), draw.size(), draw.size()),
    bad=(
        Bad({"a": X, "b": ((2, 3), F32)}, {}, ValueError, "b has shape (2, 3)", "expected (3, n)"),
        Bad({"a": X, "b": ((3,), F32)}, {}, ValueError, "b has shape (3,)", "expected two dimensions"),
        Bad({"a": X, "b": ((3, 2), F64)}, {}, TypeError, "b has dtype float64", "expected float32"),
    ),
    torch=lambda torch, a, b: a @ b,
    bench=(Product("ab", "y", ("yab", "ab")),),
    complex=True,
)

CASES = {"multiply": ROW}
