"""swish: all that is tried on it."""

from __future__ import annotations

import numpy as np

from aotops.bench.work import Elements
from aotops.testing import Bad, Case, Row, X


def swish(x, beta=1.0):
    return x / (1 + np.exp(-beta * x))


def _swish(x, **attrs) -> Case:
    return Case({"x": x}, attrs)


ROW = Row(
    swish,
    cases=(
        _swish(()),
        _swish((1,)),
        _swish((2, 0)),
        _swish((7,), beta=0.0),
        _swish((4, 6)),
        _swish((3, 5, 2), beta=-1.5),
        _swish((33, 1025)),
        _swish((256, 512)),
    ),
    draw=lambda draw: _swish(draw.shape(), beta=draw.choice(0.5, -2.0, 0.0)),
    bad=(
        Bad({"x": ((3,), "float64")}, {}, TypeError, "x has dtype float64", "expected float16, bfloat16 or float32"),
        Bad({"x": X}, {"beta": "2"}, TypeError, "beta is '2'", "expected a number"),
    ),
    torch=lambda torch, x, beta=1.0: x * torch.sigmoid(beta * x),
    bench=(Elements("x", "x", ("x", "x"), call=lambda f, shape: lambda x: f.swish(x)),),
    dtypes=("float16", "bfloat16", "float32"),
)

CASES = {"swish": ROW}
