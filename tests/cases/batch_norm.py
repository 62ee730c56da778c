"""batch_norm: all that is tried on it."""

from __future__ import annotations

import math

import numpy as np

from aotops.bench.work import Rows
from aotops.testing import F32, F64, FLOATING, I32, Bad, Case, Row, X


def statistics(x, axis):
    """mean and var, with x's axes."""
    others = tuple(i for i in range(x.ndim) if i != axis % x.ndim)
    if x.size == 0:
        empty = np.zeros([n if i == axis % x.ndim else 1 for i, n in enumerate(x.shape)])
        return empty, empty
    mean = x.mean(others, keepdims=True)
    return mean, ((x - mean) ** 2).mean(others, keepdims=True)


def spread(of_channels, x, axis):
    return of_channels.reshape(-1, *(1,) * (x.ndim - 1 - axis % x.ndim))


def activated(z, activation):
    at = np.real(z)
    if activation == "relu":
        return np.where(at <= 0, 0 * z, z)
    if activation == "silu":
        return z / (1 + np.exp(-z))
    if activation == "hardswish":
        return np.where(at <= -3, 0 * z, np.where(at < 3, z * (z + 3) / 6, z))
    return z


def batch_norm(x, weight=None, bias=None, eps=1e-5, axis=1, activation=None):
    mean, var = statistics(x, axis)
    y = (x - mean) / np.sqrt(var + eps)
    y = y if weight is None else y * spread(weight, x, axis)
    y = y if bias is None else y + spread(bias, x, axis)
    return activated(y, activation), mean.reshape(-1), var.reshape(-1)


def norm_case(x, weight=True, bias=True, residual=False, eps=(), axis=1, wide=(), activation=None, **kwargs) -> Case:
    of_channels = (x[axis],)
    shapes = {"x": x, "weight": of_channels if weight else None, "bias": of_channels if bias else None}
    shapes |= {"residual": x if residual else None} if residual is not None else {}
    attrs = {"axis": axis} | ({} if eps == () else {"eps": eps}) | ({"activation": activation} if activation else {})
    return Case(shapes, attrs, wide=("mean", "var", *wide), **kwargs)


def _batch_norm(x, **kwargs) -> Case:
    return norm_case(x, residual=None, **kwargs)


def draw_norm(draw, residual):
    x = (*draw.shape(3), draw.size())
    axis = draw.integer(-len(x), len(x) - 1)
    given = {"weight": draw.flag(), "bias": draw.flag(), "residual": residual and draw.flag()}
    # eps keeps 1 / deviation of few terms below 4
    only = {} if residual else {"residual": None, "activation": draw.choice(None, *ACTIVATIONS)}
    return norm_case(x, **given | only, eps=draw.choice(0.1, 1.0), axis=axis)


def in_torch(torch, x, weight=None, bias=None, eps=1e-5, axis=1, activation=None):
    axes = range(x.dim())
    others, shape = [i for i in axes if i != axis % x.dim()], [x.shape[i] if i == axis % x.dim() else 1 for i in axes]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    terms = max(1, math.prod(x.shape[i] for i in others))
    mean = wide.sum(others) / terms if others else wide
    squares = (wide - mean.reshape(shape)) ** 2
    var = squares.sum(others) / terms if others else squares
    eps = eps + 0.0  # torch adds no integer of more than 64 bits, which is a number nonetheless
    y = (wide - mean.reshape(shape)) * torch.rsqrt(var.reshape(shape) + eps)
    y = y if weight is None else y * weight.reshape(shape)
    y = y if bias is None else y + bias.reshape(shape)
    if activation:  # torch's own hardswish and silu have no second derivative in forward mode
        y = {
            "relu": torch.relu,
            "silu": lambda z: z * torch.sigmoid(z),
            "hardswish": lambda z: z * torch.clamp(z + 3, 0, 6) / 6,
        }[activation](y)
    return y, mean.clone(), var.clone()  # a hook of theirs sees no gradient of y


ACTIVATIONS = ("relu", "silu", "hardswish")
CASES = (
    {"x": (4, 6)},
    # one element a channel: y is the bias, and dx is 0 but for a rounding times rstd, 1 / sqrt(eps)
    {"x": (1, 1), "grad_condition": 316},
    {"x": (4, 6), "weight": False, "bias": False},
    {"x": (4, 6), "bias": False, "eps": 0.1},
    {"x": (5, 6), "weight": False},
    {"x": (3, 2, 4, 5)},
    {"x": (3, 4, 5, 2), "axis": -1},
    {"x": (2, 3, 4), "axis": 0},
    {"x": (6, 3, 16), "mean": 8.0, "magnified": 16.0},
    {"x": (0, 6)},  # no terms: mean and var are 0
    {"x": (3, 0, 2)},
    {"x": (0, 2), "eps": 0.0},  # and gradients of parameters, whatever eps is
    {"x": (3, 5), "wide": ("weight", "bias")},
    # one for each path of a kernel
    {"x": (700, 33), "axis": -1},
    {"x": (300, 3), "axis": -1},
    {"x": (600, 64), "axis": -1},
    {"x": (3, 7, 5, 5)},
    {"x": (2, 3, 40, 48)},
    {"x": (1, 2, 70, 101)},
    {"x": (9, 300, 8), "wide": ("weight", "bias")},
)

ACTIVATED = (
    *({"x": (4, 6), "activation": activation} for activation in ACTIVATIONS),
    {"x": (4, 6), "weight": False, "bias": False, "activation": "hardswish"},
    {"x": (5, 6), "weight": False, "activation": "silu"},
    {"x": (3, 4, 5, 2), "axis": -1, "bias": False, "activation": "silu"},
    {"x": (0, 6), "activation": "silu"},
    {"x": (3, 5), "wide": ("weight", "bias"), "activation": "hardswish"},
    # one for each path of a kernel
    {"x": (700, 33), "axis": -1, "activation": "relu"},
    {"x": (600, 64), "axis": -1, "activation": "silu"},
    {"x": (3, 7, 5, 5), "activation": "silu"},
    {"x": (2, 3, 40, 48), "activation": "hardswish"},
)

BAD = (
    Bad({"x": ((3, 3), I32)}, {}, TypeError, "x has dtype int32", FLOATING),
    Bad({"x": X, "weight": ((3,), F64)}, {}, TypeError, "weight has dtype float64", "expected float32"),
    Bad({"x": X, "weight": ((3,), F32), "bias": ((3,), "float16")}, {}, TypeError, "bias has dtype float16", "float32"),
    Bad({"x": X}, {"axis": 2}, ValueError, "axis is 2", "(2, 3)"),
    Bad({"x": X}, {"axis": -3}, ValueError, "axis is -3", "(2, 3)"),
    Bad({"x": ((), F32)}, {}, ValueError, "axis is 1", "()"),
    Bad({"x": X, "weight": ((2,), F32)}, {}, ValueError, "weight has shape (2,)", "expected (3,)"),
    Bad({"x": X, "bias": ((1, 3), F32)}, {}, ValueError, "bias has shape (1, 3)", "expected (3,)"),
    Bad({"x": ((2, 3), "float16"), "bias": ((3,), F32)}, {}, TypeError, "bias has dtype float32", "expected float16"),
    Bad({"x": None}, {}, TypeError, "x is None", "expected"),
    Bad({"x": X}, {"axis": 1.5}, (TypeError, ValueError), "axis", "1.5"),
    Bad({"x": X}, {"eps": "a"}, TypeError, "eps is 'a'", "expected"),
)


def _in_torch(torch, x, *args, **kwargs):
    y, mean, var = in_torch(torch, x, *args, **kwargs)
    return y.to(x.dtype), mean, var


ROW = Row(
    batch_norm,
    cases=tuple(_batch_norm(**case) for case in (*CASES, *ACTIVATED)),
    draw=lambda draw: draw_norm(draw, False),
    bad=(*BAD, Bad({"x": X}, {"activation": "gelu"}, ValueError, "'gelu'", "'relu', 'silu'", "'hardswish'")),
    torch=_in_torch,
    samples={"": _batch_norm((4, 6)), "-activation": _batch_norm((4, 6), activation="silu")},
    opcheck=(_batch_norm((4, 6), weight=False), _batch_norm((4, 6), weight=False, bias=False, axis=0)),
    bench=(Rows("xww", "x", ("xxw", "xww"), call=lambda f, shape: lambda x, w, b: f.batch_norm(x, w, b)[0]),),
    complex=True,
)
