"""add_rms_norm: all that is tried on it."""

from __future__ import annotations

from aotops.bench.work import RMS_EPS, Rows
from aotops.testing import Bad, Case, Row, X

from .layer_norm import draw_norm, norm_case
from .rms_norm import in_torch, rms_eps, rms_norm


def add_rms_norm(x, residual, *args, **kwargs):
    return rms_norm(x + residual, *args, **kwargs), x + residual


_GRID = {"grid": 1 / 16}
"""The kernel normalizes h as it is rounded. Multiples of 1 / 16 below 8: their sum is not rounded in any dtype."""
_FINE = 1 / 4096
"""Such a sum is not rounded in float32."""


def _in_torch(torch, x, residual, *args, **kwargs):
    y = in_torch(torch, x + residual, *args, **kwargs)
    # y has x's dtype beside a wider residual; h is a sum of its own, so that a hook of h sees no gradient of y
    return y if x.dtype == residual.dtype else y.to(x.dtype), x + residual


def _add_rms_norm(x, normalized_shape, weight=True, eps=(), bias=False, **kwargs) -> Case:
    rows = {"x": x, "residual": x}
    return norm_case(rows, normalized_shape, {"weight": weight, "bias": bias}, eps, **_GRID | kwargs)


ROW = Row(
    add_rms_norm,
    cases=(
        _add_rms_norm((4, 6), 6),
        _add_rms_norm((4, 6), (6,), weight=False),
        _add_rms_norm((4, 6), [6], eps=None),
        _add_rms_norm((3, 7), 7, eps=0.1),
        _add_rms_norm((2, 3, 4), (3, 4)),
        _add_rms_norm((2, 3, 4), (2, 3, 4)),
        _add_rms_norm((9,), 9),
        _add_rms_norm((1, 1), 1, mean=3.0),
        _add_rms_norm((5, 1), 1, mean=6.0),
        _add_rms_norm((0, 6), 6),
        _add_rms_norm((3, 0), 0),
        _add_rms_norm((2, 0, 3), (0, 3)),
        _add_rms_norm((3, 33), 33),
        # one for each path of a kernel
        _add_rms_norm((33, 1025), 1025),
        *(_add_rms_norm((rows, cols), cols) for rows, cols in ((37, 70), (300, 197), (40, 777))),
        _add_rms_norm((3, 8192), (8192,)),
        _add_rms_norm((2, 40000), 40000),
        _add_rms_norm((1500, 24), 24),
        _add_rms_norm((2500, 3), 3, weight=False, eps=0.1),
        # a residual that is wider: the sums have digits that 16 bits have not
        _add_rms_norm((4, 6), 6, grid=_FINE, wide=("residual", "h")),
        _add_rms_norm((3, 4, 6), 6, lines=(4,), offset=1.0, grid=_FINE, wide=("residual", "h", "weight")),
        _add_rms_norm((60, 3, 700), 700, lines=(3,), wide=("weight",)),
        # a bias, which has kernels of its own
        _add_rms_norm((4, 6), 6, bias=True),
        _add_rms_norm((4, 6), (6,), weight=False, bias=True),
        _add_rms_norm((33, 1025), 1025, bias=True),
        _add_rms_norm((3, 8192), (8192,), bias=True),
        _add_rms_norm((2, 40000), 40000, bias=True),
        _add_rms_norm((1500, 24), 24, bias=True),
        _add_rms_norm((3, 4, 16), 16, bias=True, grid=_FINE, wide=("residual", "h")),
        _add_rms_norm(
            (3, 4, 6), 6, lines=(4,), offset=1.0, grid=_FINE, wide=("residual", "h", "weight", "bias"), bias=True
        ),
    ),
    draw=lambda draw: draw_norm(draw, _GRID, ("weight", "bias"), ("x", "residual")),
    bad=(
        Bad(
            {"x": X, "residual": ((2, 3), "float16")},
            {"normalized_shape": 3},
            TypeError,
            "residual has dtype float16",
            "expected float32",
        ),
        Bad({"x": X, "residual": None}, {"normalized_shape": 3}, TypeError, "residual is None", "expected"),
        Bad(
            {"x": ((2, 3), "float16"), "residual": ((2, 3), "float64")},
            {"normalized_shape": 3},
            TypeError,
            "residual has dtype float64",
            "expected float16 or float32",
        ),
    ),
    torch=_in_torch,
    samples={"": _add_rms_norm((4, 6), (6,)), "bias": _add_rms_norm((4, 6), (6,), bias=True)},
    opcheck=(
        _add_rms_norm((4, 6), (6,), weight=False, eps=0.1),
        _add_rms_norm((4, 6), (4, 6), weight=False, eps=0.1),
    ),
    bench=(
        Rows(
            "xxw",
            "xx",
            ("xxxw", "xw"),
            call=lambda f, shape: lambda x, r, w: f.add_rms_norm(x, r, shape[-1:], w, RMS_EPS),
        ),
    ),
    defaults=rms_eps,
    complex=True,
)
