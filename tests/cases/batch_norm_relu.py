"""batch_norm_relu: all that is tried on it."""

from __future__ import annotations

import numpy as np

from aotops.bench.work import Rows
from aotops.testing import F32, Bad, Row, X

from . import batch_norm as of_norm
from .batch_norm import BAD, CASES, draw_norm, norm_case


def batch_norm_relu(x, weight=None, bias=None, residual=None, eps=1e-5, axis=1):
    y, mean, var = of_norm.batch_norm(x, weight, bias, eps, axis)
    y = y if residual is None else y + residual
    return np.where(np.real(y) <= 0, 0 * y, y), mean, var


def _in_torch(torch, x, weight=None, bias=None, residual=None, eps=1e-5, axis=1):
    y, mean, var = of_norm.in_torch(torch, x, weight, bias, eps, axis)
    y = y if residual is None else y + residual
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)  # under autocast
    return torch.relu(y).to(dtype), mean, var


ROW = Row(
    batch_norm_relu,
    cases=(*(norm_case(**case) for case in CASES), *(norm_case(**case, residual=True) for case in CASES)),
    draw=lambda draw: draw_norm(draw, True),
    bad=(
        *BAD,
        Bad({"x": X, "residual": ((3,), F32)}, {}, ValueError, "residual has shape (3,)", "expected (2, 3)"),
        Bad({"x": X, "residual": ((2, 3), "float16")}, {}, TypeError, "residual has dtype float16", "float32"),
    ),
    torch=_in_torch,
    samples={"": norm_case((4, 6)), "-residual": norm_case((4, 6), residual=True)},
    opcheck=(norm_case((4, 6), weight=False, residual=True),),
    bench=(
        Rows(
            "xwwx",
            "x",
            ("xxxw", "xxww"),
            call=lambda f, shape: lambda x, w, b, r: f.batch_norm_relu(x, w, b, r)[0],
        ),
    ),
    complex=True,
)
