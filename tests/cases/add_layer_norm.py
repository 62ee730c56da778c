"""add_layer_norm: all that is tried on it."""

from __future__ import annotations

from aotops.bench.work import LN_EPS, Rows
from aotops.testing import F32, Bad, Case, Row, X

from .layer_norm import draw_norm, layer_norm, norm_case


def add_layer_norm(x, residual, *args, **kwargs):
    return layer_norm(x + residual, *args, **kwargs), x + residual


_GRID = {"grid": 1 / 16}
"""The kernel normalizes h as it is rounded. Multiples of 1 / 16 below 8: their sum is not rounded in any dtype."""
_FINE = 1 / 4096
"""Such a sum is not rounded in float32."""


def _in_torch(torch, x, residual, *args, **kwargs):
    y = torch.nn.functional.layer_norm(x + residual, *args, **kwargs)
    # y has x's dtype beside a wider residual; h is a sum of its own, so that a hook of h sees no gradient of y
    return y if x.dtype == residual.dtype else y.to(x.dtype), x + residual


def _add_layer_norm(x, normalized_shape, weight=True, bias=True, eps=(), **kwargs) -> Case:
    rows, affine = {"x": x, "residual": x}, {"weight": weight, "bias": bias}
    return norm_case(rows, normalized_shape, affine, eps, **_GRID | kwargs)


ROW = Row(
    add_layer_norm,
    cases=(
        _add_layer_norm((4, 6), 6),
        _add_layer_norm((4, 6), (6,), weight=False, bias=False),
        _add_layer_norm((4, 6), 6, bias=False),
        _add_layer_norm((4, 6), [6], weight=False),
        _add_layer_norm((3, 7), 7, eps=0.1),
        _add_layer_norm((2, 3, 4), (3, 4)),
        _add_layer_norm((2, 3, 4), (2, 3, 4)),
        _add_layer_norm((9,), 9),
        _add_layer_norm((1, 1), 1, grad_condition=316),
        _add_layer_norm((5, 1), 1, grad_condition=316),
        _add_layer_norm((0, 6), 6),
        _add_layer_norm((3, 0), 0),
        _add_layer_norm((2, 0, 3), (0, 3)),
        _add_layer_norm((3, 33), 33),
        # one for each path of a kernel
        _add_layer_norm((33, 1025), 1025),
        *(_add_layer_norm((rows, cols), cols) for rows, cols in ((37, 70), (300, 197), (40, 777))),
        _add_layer_norm((3, 8192), (8192,)),
        _add_layer_norm((2, 40000), 40000),
        _add_layer_norm((1500, 24), 24),
        _add_layer_norm((2500, 3), 3, bias=False, eps=0.1),
        # a residual that is wider: the sums have digits that 16 bits have not
        _add_layer_norm((4, 6), 6, grid=_FINE, wide=("residual", "h")),
        _add_layer_norm((3, 4, 6), 6, lines=(4,), offset=1.0, grid=_FINE, wide=("residual", "h", "weight", "bias")),
        _add_layer_norm((60, 3, 700), 700, lines=(3,), wide=("weight", "bias")),
    ),
    draw=lambda draw: draw_norm(draw, _GRID, ("weight", "bias"), ("x", "residual")),
    bad=(
        Bad(
            {"x": X, "residual": ((1, 3), F32)},
            {"normalized_shape": 3},
            ValueError,
            "residual has shape (1, 3)",
            "expected (2, 3)",
        ),
        Bad(
            {"x": ((2, 3), F32), "residual": ((2, 3), "float16")},
            {"normalized_shape": 3},
            TypeError,
            "residual has dtype float16",
            "expected float32",
        ),
    ),
    torch=_in_torch,
    samples={"": _add_layer_norm((4, 6), (6,))},
    opcheck=(
        _add_layer_norm((4, 6), (6,), weight=False),
        _add_layer_norm((4, 6), (4, 6), weight=False, bias=False, eps=0.1),
    ),
    bench=(
        # both results are used, so two gradients come in; those of x and of residual are one tensor
        Rows(
            "xxww",
            "xx",
            ("xxxw", "xww"),
            call=lambda f, shape: lambda x, r, w, b: f.add_layer_norm(x, r, shape[-1:], w, b, LN_EPS),
        ),
    ),
    complex=True,
)
