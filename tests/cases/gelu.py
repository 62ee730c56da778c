"""gelu: all that is tried on it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from aotops.bench.work import Elements
from aotops.testing import FLOATING, I64, Bad, Case, Row, X

_real_erfc = np.vectorize(math.erfc, otypes=[float])


def _erfc(x):
    """erfc, of complex numbers to first order in the imaginary part."""
    real = _real_erfc(x.real)
    return real - 2j / np.sqrt(np.pi) * np.exp(-(x.real**2)) * x.imag if np.iscomplexobj(x) else real


def gelu(x, approximate="none"):
    if approximate == "tanh":
        # x / 2 * (1 + tanh(t)), without what 1 + tanh(t) loses for t << 0
        return x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return x * 0.5 * _erfc(-x / np.sqrt(2))


def _gelu(x, **kwargs) -> Iterator[Case]:
    for approximate in ("none", "tanh"):
        yield Case({"x": x}, {"approximate": approximate}, **kwargs)


def _draw(draw):
    return Case({"x": draw.shape()}, {"approximate": draw.choice("none", "tanh")})


ROW = Row(
    gelu,
    cases=(
        *_gelu(()),
        *_gelu((1,)),
        *_gelu((2, 0)),
        *_gelu((7,)),
        *_gelu((3, 5, 2)),
        *_gelu((101,), scale=6.0),  # far into both tails
        *_gelu((33, 1025)),
        *_gelu((2, 40000)),
    ),
    draw=_draw,
    bad=(
        Bad({"x": ((3,), I64)}, {}, TypeError, "x has dtype int64", FLOATING),
        Bad({"x": ((3,), "int8")}, {}, TypeError, "x has dtype int8", FLOATING),
        Bad({"x": ((3,), "bool")}, {}, TypeError, "x has dtype bool", FLOATING),
        Bad({"x": None}, {}, TypeError, "x is None", "expected"),
        Bad({"x": "text"}, {}, TypeError, "x is", "expected"),
        Bad({"x": [1.0, 2.0]}, {}, TypeError, "x is", "expected"),
        Bad({"x": X}, {"approximate": "quick"}, ValueError, "approximate is 'quick'", "'none' or 'tanh'"),
        Bad({"x": X}, {"approximate": None}, (TypeError, ValueError), "approximate is", "expected"),
    ),
    indeterminate={-math.inf: 0.0},
    samples={"": Case({"x": (4, 6)}), "tanh": Case({"x": (4, 6)}, {"approximate": "tanh"})},
    bench=tuple(
        Elements("x", "x", ("xx", "x"), variant=kind, call=lambda f, shape, kind=kind: lambda x: f.gelu(x, kind))
        for kind in ("none", "tanh")
    ),
    complex=True,
)
