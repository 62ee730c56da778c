"""layer_norm: all that is tried on it."""

from __future__ import annotations

import numpy as np

from aotops.bench.work import LN_EPS, OddRows, Rows
from aotops.testing import F32, F64, FLOATING, I32, Bad, Case, Row, X


def layer_norm(x, normalized_shape, weight=None, bias=None, eps=1e-5, weight_offset=0.0):
    if x.size == 0:
        return x
    axes = tuple(range(-len(np.atleast_1d(normalized_shape)), 0))
    centred = x - x.mean(axes, keepdims=True)
    y = centred / np.sqrt((centred**2).mean(axes, keepdims=True) + eps)
    return y * (1 if weight is None else weight + weight_offset) + (0 if bias is None else bias)


def norm_case(rows, normalized_shape, affine, eps, lines=(), offset=0.0, **kwargs) -> Case:
    """``lines``: the axes of the parameters before those normalized over."""
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    shapes = rows | {slot: (*lines, *shape) if given else None for slot, given in affine.items()}
    attrs = {"normalized_shape": normalized_shape} | ({} if eps == () else {"eps": eps})
    return Case(shapes, attrs | ({"weight_offset": offset} if offset else {}), **kwargs)


def _layer_norm(x, normalized_shape, weight=True, bias=True, eps=(), **kwargs) -> Case:
    return norm_case({"x": x}, normalized_shape, {"weight": weight, "bias": bias}, eps, **kwargs)


def draw_norm(draw, case, affine, rows=("x",)):
    x = (*draw.shape(), draw.size())
    axes = x[-draw.integer(1, len(x)) :]
    # eps keeps 1 / deviation of a short row below 4
    attrs = {"normalized_shape": axes, "eps": draw.choice(0.1, 1.0)}
    shapes = dict.fromkeys(rows, x) | {slot: axes if draw.flag() else None for slot in affine}
    return Case(shapes, attrs, **case)


ROW = Row(
    layer_norm,
    cases=(
        _layer_norm((4, 6), 6),
        _layer_norm((4, 6), (6,), weight=False, bias=False),
        _layer_norm((4, 6), 6, bias=False),
        _layer_norm((4, 6), [6], weight=False),
        _layer_norm((3, 7), 7, eps=0.1),
        _layer_norm((2, 3, 4), (3, 4)),
        _layer_norm((2, 3, 4), (2, 3, 4)),
        _layer_norm((2, 2, 1, 5), (1, 5), bias=False),
        _layer_norm((9,), 9),
        # one element a row: y is the bias, and dx is 0 but for a rounding times rstd, 1 / sqrt(eps)
        _layer_norm((1, 1), 1, grad_condition=316),
        _layer_norm((5, 1), 1, grad_condition=316),
        _layer_norm((0, 6), 6),  # no rows: dweight and dbias are 0
        _layer_norm((3, 0), 0),
        _layer_norm((2, 0, 3), (0, 3)),
        _layer_norm((3, 33), 33),
        _layer_norm((6, 16), 16, mean=8.0, magnified=16.0),
        # one for each path of a kernel
        _layer_norm((33, 1025), 1025),
        *(_layer_norm((rows, cols), cols) for rows, cols in ((300, 197), (40, 777), (3, 9001))),
        _layer_norm((3, 8192), (8192,)),
        _layer_norm((2, 40000), 40000),
        _layer_norm((1500, 24), 24),
        _layer_norm((37, 70), 70),
        _layer_norm((2500, 3), 3, bias=False, eps=0.1),
        # parameters that are wider, with a line for each head
        _layer_norm((4, 6), 6, wide=("weight", "bias")),
        _layer_norm((3, 4, 6), 6, lines=(4,), offset=1.0, wide=("weight", "bias")),
        _layer_norm((60, 3, 700), 700, lines=(3,), bias=False),
    ),
    draw=lambda draw: draw_norm(draw, {}, ("weight", "bias")),
    bad=(
        Bad({"x": ((3,), I32)}, {"normalized_shape": 3}, TypeError, "x has dtype int32", FLOATING),
        Bad(
            {"x": X, "weight": ((3,), F64)},
            {"normalized_shape": 3},
            TypeError,
            "weight has dtype float64",
            "expected float32",
        ),
        Bad(
            {"x": X, "weight": ((3,), F32), "bias": ((3,), "float16")},
            {"normalized_shape": 3},
            TypeError,
            "bias has dtype float16",
            "expected float32",
        ),
        Bad({"x": X}, {"normalized_shape": 4}, ValueError, "x has shape (2, 3)", "(4,)"),
        Bad({"x": X}, {"normalized_shape": (2,)}, ValueError, "x has shape (2, 3)", "(2,)"),
        Bad({"x": X}, {"normalized_shape": (1, 2, 3)}, ValueError, "(2, 3)", "(1, 2, 3)"),
        Bad({"x": ((), F32)}, {"normalized_shape": 1}, ValueError, "x has shape ()", "(1,)"),
        Bad({"x": X}, {"normalized_shape": ()}, ValueError, "normalized_shape is empty"),
        Bad({"x": X}, {"normalized_shape": (-1,)}, ValueError, "x has shape (2, 3)", "(-1,)"),
        Bad(
            {"x": X, "weight": ((2,), F32)},
            {"normalized_shape": 3},
            ValueError,
            "weight has shape (2,)",
            "expected (3,)",
        ),
        Bad(
            {"x": X, "bias": ((1, 3), F32)},
            {"normalized_shape": 3},
            ValueError,
            "bias has shape (1, 3)",
            "expected (3,)",
        ),
        Bad(
            {"x": ((2, 3), "float16"), "bias": ((3,), F32)},
            {"normalized_shape": 3},
            TypeError,
            "bias has dtype float32",
            "expected float16",
        ),
        Bad(
            {"x": X, "weight": ((2, 3), F32), "bias": ((3,), F32)},
            {"normalized_shape": 3},
            ValueError,
            "bias has shape (3,)",
            "expected (2, 3), the shape of weight",
        ),
        Bad({"x": None}, {"normalized_shape": 3}, TypeError, "x is None", "expected"),
        Bad({"x": X, "weight": 1.0}, {"normalized_shape": 3}, TypeError, "weight", "expected"),
        Bad({"x": X}, {"normalized_shape": "3"}, (TypeError, ValueError), "normalized_shape", "3"),
        Bad({"x": X}, {"normalized_shape": 3.5}, (TypeError, ValueError), "normalized_shape", "3.5"),
        Bad({"x": X}, {"normalized_shape": 3, "eps": "a"}, TypeError, "eps is 'a'", "expected"),
    ),
    samples={"": _layer_norm((4, 6), (6,))},
    opcheck=(
        _layer_norm((4, 6), (6,), weight=False),
        _layer_norm((4, 6), (4, 6), weight=False, bias=False, eps=0.1),
    ),
    bench=tuple(
        rows(
            "xww",
            "x",
            ("xxw", "xww"),
            variant,
            call=lambda f, shape: lambda x, w, b: f.layer_norm(x, shape[-1:], w, b, LN_EPS),
        )
        for rows, variant in ((Rows, ""), (OddRows, "odd"))
    ),
    complex=True,
)
