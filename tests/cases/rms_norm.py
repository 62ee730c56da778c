"""rms_norm: all that is tried on it."""

from __future__ import annotations

from typing import Any

import numpy as np

from aotops.bench.work import RMS_EPS, OddRows, Rows
from aotops.testing import F32, F64, Bad, Case, Row, X

from .layer_norm import draw_norm, norm_case


def rms_norm(x, normalized_shape, weight=None, eps=None, weight_offset=0.0, bias=None):
    if x.size == 0:
        return x
    axes = tuple(range(-len(np.atleast_1d(normalized_shape)), 0))
    y = x / np.sqrt((x**2).mean(axes, keepdims=True) + eps) * (1 if weight is None else weight + weight_offset)
    return y + (0 if bias is None else bias)


def _rms_norm(x, normalized_shape, weight=True, eps=(), bias=False, **kwargs) -> Case:
    return norm_case({"x": x}, normalized_shape, {"weight": weight, "bias": bias}, eps, **kwargs)


def in_torch(torch, x, normalized_shape, weight=None, eps=None, weight_offset=0.0, bias=None):
    if weight is not None and weight_offset:
        weight = weight + weight_offset
    y = torch.nn.functional.rms_norm(x, normalized_shape, weight, eps)
    return y if bias is None else (y + bias).to(y.dtype)


def rms_eps(dtype: str) -> dict[str, Any]:
    return {"eps": float(np.finfo("float64" if dtype == "float64" else "float32").eps)}


ROW = Row(
    rms_norm,
    cases=(
        _rms_norm((4, 6), 6),
        _rms_norm((4, 6), (6,), weight=False),
        _rms_norm((4, 6), [6], eps=None),
        _rms_norm((3, 7), 7, eps=0.1),
        _rms_norm((3, 6), 6, weight=False, eps=0.25, scale=0.0),  # rows of zeros
        _rms_norm((2, 3, 4), (3, 4)),
        _rms_norm((2, 3, 4), (2, 3, 4)),
        _rms_norm((2, 2, 1, 5), (1, 5), weight=False),
        _rms_norm((9,), 9),
        # one element a row: y is the weight or its opposite, and dx is nearly 0
        _rms_norm((1, 1), 1, mean=3.0),
        _rms_norm((5, 1), 1, mean=8.0),
        _rms_norm((5, 1), 1, weight=False, eps=0.1),
        _rms_norm((0, 6), 6),  # no rows: dweight is 0
        _rms_norm((3, 0), 0),
        _rms_norm((2, 0, 3), (0, 3)),
        _rms_norm((3, 33), 33),
        _rms_norm((6, 16), 16, mean=8.0),
        # one for each path of a kernel
        _rms_norm((33, 1025), 1025),
        *(_rms_norm((rows, cols), cols) for rows, cols in ((300, 197), (40, 777), (3, 9001))),
        _rms_norm((3, 8192), (8192,)),
        _rms_norm((2, 40000), 40000),
        _rms_norm((1500, 24), 24),
        _rms_norm((37, 70), 70),
        _rms_norm((2500, 3), 3, weight=False, eps=0.1),
        # a weight that is wider, with a line for each head
        _rms_norm((4, 6), 6, wide=("weight",)),
        _rms_norm((3, 4, 6), 6, lines=(4,), offset=1.0, wide=("weight",)),
        _rms_norm((60, 3, 700), 700, lines=(3,)),
        # a bias, which has kernels of its own
        _rms_norm((4, 6), 6, bias=True),
        _rms_norm((4, 6), (6,), weight=False, bias=True),
        _rms_norm((0, 6), 6, bias=True),
        _rms_norm((3, 0), 0, bias=True),
        _rms_norm((33, 1025), 1025, bias=True),
        _rms_norm((3, 8192), (8192,), bias=True),
        _rms_norm((2, 40000), 40000, bias=True),
        _rms_norm((1500, 24), 24, bias=True),
        _rms_norm((3, 4, 6), 6, lines=(4,), offset=1.0, wide=("weight", "bias"), bias=True),
        _rms_norm((60, 3, 704), 704, lines=(3,), bias=True),
        _rms_norm((4, 6), 6, weight=False, offset=1.0),  # without a weight there is nothing to add to
        _rms_norm((4, 16), 16, weight=False, offset=1.0, bias=True),
    ),
    draw=lambda draw: draw_norm(draw, {}, ("weight", "bias")),
    bad=(
        Bad({"x": X}, {"normalized_shape": 4}, ValueError, "x has shape (2, 3)", "(4,)"),
        Bad(
            {"x": X, "weight": ((3,), F64)},
            {"normalized_shape": 3},
            TypeError,
            "weight has dtype float64",
            "expected float32",
        ),
        Bad(
            {"x": ((2, 3), "float16"), "weight": ((3,), F64)},
            {"normalized_shape": 3},
            TypeError,
            "weight has dtype float64",
            "expected float16 or float32",
        ),
        Bad(
            {"x": ((4, 2, 3), F32), "weight": ((3, 3), F32)},
            {"normalized_shape": 3},
            ValueError,
            "weight has shape (3, 3)",
            "expected (3,), the shape of normalized_shape, or more of the trailing axes of (4, 2, 3)",
        ),
        Bad(
            {"x": X, "weight": ((3,), F32), "bias": ((2,), F32)},
            {"normalized_shape": 3},
            ValueError,
            "bias has shape (2,)",
            "expected (3,), the shape of weight",
        ),
        Bad(
            {"x": ((2, 3), "float16"), "bias": ((3,), F32)},
            {"normalized_shape": 3},
            TypeError,
            "bias has dtype float32",
            "expected float16",
        ),
        Bad({"x": X}, {"normalized_shape": 3, "eps": "a"}, TypeError, "eps is 'a'", "expected"),
    ),
    torch=in_torch,
    samples={"": _rms_norm((4, 6), (6,)), "bias": _rms_norm((4, 6), (6,), bias=True)},
    opcheck=(_rms_norm((4, 6), (6,), weight=False, eps=0.1), _rms_norm((4, 6), (4, 6), weight=False, eps=0.1)),
    bench=tuple(
        rows(
            "xw", "x", ("xxw", "xw"), variant, call=lambda f, shape: lambda x, w: f.rms_norm(x, shape[-1:], w, RMS_EPS)
        )
        for rows, variant in ((Rows, ""), (OddRows, "odd"))
    ),
    defaults=rms_eps,
    complex=True,
)
