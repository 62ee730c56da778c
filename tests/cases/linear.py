"""linear: all that is tried on it."""

from __future__ import annotations

import numpy as np

from aotops.bench.work import Product
from aotops.testing import F32, Bad, Case, Row, X

from .gelu import gelu

_ACTIVATIONS = {
    None: lambda x: x,
    "relu": lambda x: np.where(x.real > 0, x, 0),
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, "tanh"),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


def linear(x, weight, bias=None, activation=None):
    return _ACTIVATIONS[activation](np.inner(x, weight) + (0 if bias is None else bias))


def _linear(x, out, bias=True, activation=None, **kwargs) -> Case:
    shapes = {"x": x, "weight": (out, x[-1]), "bias": (out,) if bias else None}
    # a gradient of the product is one of a rounded factor, and has its rounding in each of its terms
    return Case(
        shapes, {"activation": activation} if activation else {}, dtype_roundings=8 if activation else 0, **kwargs
    )


def _draw(draw):
    x = (*draw.shape(), draw.size())
    return _linear(x, draw.size(), draw.flag(), draw.choice(*_ACTIVATIONS))


def _in_torch(torch, x, weight, bias=None, activation=None, allow_tf32=False):
    functional = torch.nn.functional
    activations = {
        None: lambda y: y,
        "relu": lambda y: functional.relu(y).clone(),  # autograd has saved the other
        "gelu": functional.gelu,
        "gelu_tanh": lambda y: functional.gelu(y, approximate="tanh"),
        "silu": functional.silu,
    }
    return activations[activation](functional.linear(x, weight, bias))


def _bench_gelu(tf32):
    return lambda f, shape: lambda x, w, b: f.linear(x, w, b, "gelu", tf32)


ROW = Row(
    linear,
    cases=(
        _linear((1, 1), 1),
        _linear((6, 6), 6, activation="gelu"),
        _linear((4, 6), 5),
        _linear((4, 6), 6, bias=False),
        _linear((4, 6), 5, activation="relu"),
        _linear((4, 6), 5, activation="gelu"),
        _linear((4, 6), 5, activation="gelu_tanh"),
        _linear((4, 6), 5, activation="silu"),
        _linear((4, 6), 5, bias=False, activation="gelu"),
        _linear((7,), 3),
        _linear((7,), 3, activation="silu"),
        _linear((2, 3, 4), 5, activation="gelu_tanh"),
        _linear((0, 3), 2),
        _linear((0, 3), 2, activation="relu"),
        _linear((0, 3), 2, bias=False, activation="relu"),
        _linear((3, 0), 2),  # nothing but the bias
        _linear((3, 4), 0, activation="gelu"),
        # one for each path of a kernel
        _linear((33, 1025), 7, bias=False),
        _linear((256, 264), 256),
        _linear((300, 72), 504, activation="gelu", scale=0.5),
        _linear((2, 130, 72), 128, activation="gelu_tanh", scale=0.5),
        _linear((500, 128), 96),
        _linear((1040, 72), 1029),  # lines of y that are not aligned
        _linear((261, 72), 131, activation="silu", scale=0.5),
        _linear((1, 83), 70, activation="gelu"),
        _linear((70, 83), 1, activation="relu"),
        _linear((1, 40000), 0),
    ),
    under_load=(
        _linear((4096, 1023), 1025),  # large enough for copies of lines that are not aligned, and of weight's gradient
        _linear((8192, 256), 2049),  # and for a backward without these
    ),
    draw=_draw,
    bad=(
        Bad(
            {"x": X, "weight": ((4, 2), F32)},
            {},
            ValueError,
            "weight has shape (4, 2)",
            "(out, 3)",
            "(2, 3), the shape of x",
        ),
        Bad({"x": X, "weight": ((3,), F32)}, {}, ValueError, "weight has shape (3,)", "(out, 3)"),
        Bad({"x": ((), F32), "weight": X}, {}, ValueError, "x has shape ()", "one axis"),
        Bad(
            {"x": X, "weight": ((4, 3), F32), "bias": ((3,), F32)},
            {},
            ValueError,
            "bias has shape (3,)",
            "expected (4,)",
        ),
        Bad({"x": X, "weight": ((4, 3), "float16")}, {}, TypeError, "weight has dtype float16", "expected float32"),
        Bad(
            {"x": X, "weight": ((4, 3), F32)},
            {"activation": "tanh"},
            ValueError,
            "activation is 'tanh'",
            "expected None, 'relu'",
        ),
    ),
    torch=_in_torch,
    samples={kind or "": _linear((4, 6), 5, activation=kind) for kind in _ACTIVATIONS},
    opcheck=(_linear((4, 6), 4, bias=False),),
    bench=(
        Product("awv", "y", ("yaw", "awv")),
        Product("awv", "y", ("yyaw", "awv"), variant="gelu", call=_bench_gelu(False)),
        Product("awv", "y", ("yyaw", "awv"), variant="gelu tf32", dtypes=("float32",), call=_bench_gelu(True)),
    ),
    complex=True,
)
