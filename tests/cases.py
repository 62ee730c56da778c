"""The table: for each operator a float64 reference, and the cases on which every frontend is tried.

To add an operator, add a row under its name:

- ``reference`` is the formula, in NumPy, as plain as can be: a function of the public function's arguments, by name,
  that takes float64 arrays and gives the result, a tuple where there are several;
- ``cases`` are shapes by argument (None for an optional one that is not given) and the other arguments as keywords;
  inputs that are integers are named in ``classes``.

There is no row for a gradient: it is checked against finite differences of the reference. Shapes to think of: 0-dim,
empty, one element, odd, one axis and several, each optional input alone; and one for each path of a kernel that size
decides.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

try:
    import ml_dtypes
except ImportError:  # then there is no bfloat16 here
    ml_dtypes = None

DTYPES = ("float16", "bfloat16", "float32", "float64")

Arrays = dict[str, "np.ndarray | None"]


@dataclass(frozen=True)
class Case:
    shapes: dict[str, tuple[int, ...] | None]
    attrs: dict[str, Any] = field(default_factory=dict)
    scale: float = 1.0
    """Inputs are normally distributed with this deviation ..."""
    mean: float = 0.0
    """... and, the first of them, about this mean."""
    grid: float = 0.0
    """They are multiples of this, where it is not 0: sums of such are exact in every dtype."""
    classes: dict[str, int] = field(default_factory=dict)
    """Inputs that are integers, from 0 up to this."""
    magnified: float = 1.0
    """By how much the formula itself magnifies a rounding error of its inputs: the condition number."""
    steep: float = 1.0
    """By how much more that of its gradient does."""
    summed: int = 0
    """Roundings of the dtype itself that a gradient may have: one for each of the terms that a framework sums over a
    broadcast axis, as it does for its own operators; or those of a result that the gradient is computed from."""

    def __str__(self) -> str:
        shapes = [f"{slot}{'x'.join(map(str, s)) or '0dim'}" for slot, s in self.shapes.items() if s is not None]
        attrs = [f"{name}={value}" for name, value in self.attrs.items()]
        return "-".join([*shapes, *attrs, *([f"mean={self.mean:g}"] if self.mean else [])]).replace(" ", "")


def _no_defaults(dtype: str) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Row:
    reference: Callable[..., Any]
    cases: tuple[Case, ...]
    defaults: Callable[[str], dict[str, Any]] = _no_defaults
    """Of a dtype: the arguments for which None, or nothing, stands for something that depends on it."""
    complex: bool = False
    """The reference takes complex numbers: its derivative is then the imaginary part of a tiny imaginary step. For what
    has kinks, about which finite differences are wrong, or costs much, since one step is enough."""

    def results(self, arrays: Arrays, attrs: dict[str, Any], dtype: str) -> tuple[np.ndarray, ...]:
        """What the formula gives, in float64, where ``dtype`` is tried."""
        given = {name: value for name, value in attrs.items() if value is not None}
        results = self.reference(**arrays, **self.defaults(dtype) | given)
        return tuple(np.asarray(y) for y in (results if isinstance(results, tuple) else (results,)))


# ---------------------------------------------------------------------------------------------------------- references


def add(a, b):
    return a + b


_erfc = np.vectorize(math.erfc, otypes=[float])


def gelu(x, approximate="none"):
    if approximate == "tanh":
        # x / 2 * (1 + tanh(t)), without what 1 + tanh(t) loses for t << 0
        return x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return x * 0.5 * _erfc(-x / np.sqrt(2))


def layer_norm(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    if x.size == 0:
        return x
    axes = tuple(range(-len(np.atleast_1d(normalized_shape)), 0))
    centred = x - x.mean(axes, keepdims=True)
    y = centred / np.sqrt((centred**2).mean(axes, keepdims=True) + eps)
    return y * (1 if weight is None else weight) + (0 if bias is None else bias)


def rms_norm(x, normalized_shape, weight=None, *, eps):
    if x.size == 0:
        return x
    axes = tuple(range(-len(np.atleast_1d(normalized_shape)), 0))
    return x / np.sqrt((x**2).mean(axes, keepdims=True) + eps) * (1 if weight is None else weight)


def add_layer_norm(x, residual, *args, **kwargs):
    return layer_norm(x + residual, *args, **kwargs), x + residual


def add_rms_norm(x, residual, *args, **kwargs):
    return rms_norm(x + residual, *args, **kwargs), x + residual


def matmul(a, b, transpose_a=False, transpose_b=False):
    return (np.swapaxes(a, -2, -1) if transpose_a else a) @ (np.swapaxes(b, -2, -1) if transpose_b else b)


_ACTIVATIONS = {
    None: lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, "tanh"),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


def linear(x, weight, bias=None, activation=None):
    return _ACTIVATIONS[activation](x @ weight.T + (0 if bias is None else bias))


def swiglu(gate, up):
    return gate / (1 + np.exp(-gate)) * up


def softmax(x, dim=-1):
    if x.size == 0:
        return x
    e = np.exp(x - x.max(dim, keepdims=True))
    return e / e.sum(dim, keepdims=True)


def cross_entropy(x, target, ignore_index=-100, reduction="mean", label_smoothing=0.0):
    rows, counts = x.reshape(target.size, x.shape[-1]), target.ravel() != ignore_index
    top = rows.max(-1, keepdims=True, initial=-np.inf)
    log_p = rows - top - np.log(np.exp(rows - top).sum(-1, keepdims=True))
    hit = log_p[np.arange(target.size), np.where(counts, target.ravel(), 0)]
    smooth = label_smoothing * log_p.mean(-1) if label_smoothing else 0.0
    losses = np.where(counts, -(1 - label_smoothing) * hit - smooth, 0.0)
    if reduction == "none":
        return losses.reshape(target.shape)
    return losses.sum() / (counts.sum() if reduction == "mean" else 1)


def lltm(input, weights, bias, old_h, old_cell):
    i, o, c = np.split(np.concatenate([old_h, input], -1) @ weights.T + bias.reshape(-1), 3, -1)
    i, o, c = 1 / (1 + np.exp(-i)), 1 / (1 + np.exp(-o)), np.where(c.real > 0, c, np.expm1(np.where(c.real > 0, 0, c)))
    new_cell = old_cell + c * i
    return np.tanh(new_cell) * o, new_cell


def conv2d(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, layout="NCHW", allow_tf32=False):
    if layout == "NHWC":
        x, weight = np.moveaxis(x, -1, -3), np.moveaxis(weight, -1, 1)
    (stride_h, stride_w), (padding_h, padding_w), (dilation_h, dilation_w) = (
        np.broadcast_to(pair, 2) for pair in (stride, padding, dilation)
    )
    *batch, _, height, width = x.shape
    outputs, channels, kernel_h, kernel_w = weight.shape
    out_h = (height + 2 * padding_h - dilation_h * (kernel_h - 1) - 1) // stride_h + 1
    out_w = (width + 2 * padding_w - dilation_w * (kernel_w - 1) - 1) // stride_w + 1
    x = np.pad(x, [(0, 0)] * (len(batch) + 1) + [(padding_h, padding_h), (padding_w, padding_w)])
    y = np.zeros((*batch, groups, outputs // groups, out_h, out_w), np.result_type(x, weight))
    for r in range(kernel_h):
        for s in range(kernel_w):
            h, w = r * dilation_h, s * dilation_w
            met = x[..., h : h + (out_h - 1) * stride_h + 1 : stride_h, w : w + (out_w - 1) * stride_w + 1 : stride_w]
            met = met.reshape(*batch, groups, channels, out_h, out_w)
            y += np.einsum("...gchw,goc->...gohw", met, weight[:, :, r, s].reshape(groups, outputs // groups, channels))
    y = y.reshape(*batch, outputs, out_h, out_w) + (0 if bias is None else bias[:, None, None])
    return np.moveaxis(y, -3, -1) if layout == "NHWC" else y


# --------------------------------------------------------------------------------------------------------------- cases


def _add(a, b=None) -> Case:
    summed = 0 if b is None else math.prod(np.broadcast_shapes(a, b))
    return Case({"a": a, "b": a if b is None else b}, summed=summed)


def _gelu(x, **kwargs) -> Iterator[Case]:
    for approximate in ("none", "tanh"):
        yield Case({"x": x}, {"approximate": approximate}, **kwargs)


def _norm(rows, normalized_shape, affine, eps, kwargs) -> Case:
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    shapes = rows | {slot: shape if given else None for slot, given in affine.items()}
    return Case(shapes, {"normalized_shape": normalized_shape} | ({} if eps == () else {"eps": eps}), **kwargs)


def _layer_norm(x, normalized_shape, weight=True, bias=True, eps=(), **kwargs) -> Case:
    return _norm({"x": x}, normalized_shape, {"weight": weight, "bias": bias}, eps, kwargs)


def _rms_norm(x, normalized_shape, weight=True, eps=(), **kwargs) -> Case:
    return _norm({"x": x}, normalized_shape, {"weight": weight}, eps, kwargs)


# What add_*_norm normalize is h as it is rounded. Multiples of 1 / 16 below 8: their sum is not rounded in any dtype.


def _add_layer_norm(x, normalized_shape, weight=True, bias=True, eps=(), **kwargs) -> Case:
    rows, affine = {"x": x, "residual": x}, {"weight": weight, "bias": bias}
    return _norm(rows, normalized_shape, affine, eps, {"grid": 1 / 16} | kwargs)


def _add_rms_norm(x, normalized_shape, weight=True, eps=(), **kwargs) -> Case:
    return _norm({"x": x, "residual": x}, normalized_shape, {"weight": weight}, eps, {"grid": 1 / 16} | kwargs)


def _rms_eps(dtype: str) -> dict[str, Any]:
    return {"eps": float(np.finfo("float64" if dtype == "float64" else "float32").eps)}


def _matmul(a, b, **attrs) -> Case:
    return Case({"a": a, "b": b}, attrs)


def _linear(x, out, bias=True, activation=None, **kwargs) -> Case:
    shapes = {"x": x, "weight": (out, x[-1]), "bias": (out,) if bias else None}
    # a gradient of the product is one of a rounded factor, and has its rounding in each of its terms
    return Case(shapes, {"activation": activation} if activation else {}, summed=8 if activation else 0, **kwargs)


def _swiglu(shape, **kwargs) -> Case:
    return Case({"gate": shape, "up": shape}, **kwargs)


def _softmax(x, dim=None, **kwargs) -> Case:
    # its gradient is that of the rounded result, and has roundings of each of dy * y and of their sum
    return Case({"x": x}, {} if dim is None else {"dim": dim}, summed=8, **kwargs)


def _cross_entropy(x, scale=1.0, **attrs) -> Case:
    # the gradient of a row is rounded before it is multiplied by dy, where a frontend keeps it
    return Case({"x": x, "target": x[:-1]}, attrs, scale=scale, classes={"target": x[-1]}, summed=1)


def _lltm(rows, features, state, scale=1.0, bias=None) -> Case:
    n, h = 3 * state, (*rows, state)
    shapes = {"input": (*rows, features), "weights": (n, state + features), "bias": bias or (1, n)}
    # the gradients are products with that of the gates, which is rounded
    return Case(shapes | {"old_h": h, "old_cell": h}, scale=scale, summed=2)


def _conv2d(x, weight, bias=True, **attrs) -> Iterator[Case]:
    """Shapes of NCHW, and the same of NHWC."""
    bias = weight[:1] if bias else None
    yield Case({"x": x, "weight": weight, "bias": bias}, attrs)
    x, weight = (*x[:-3], *x[-2:], x[-3]), (weight[0], *weight[2:], weight[1])
    yield Case({"x": x, "weight": weight, "bias": bias}, attrs | {"layout": "NHWC"})


CASES: dict[str, Row] = {
    "add": Row(
        add,
        (
            _add(()),
            _add((1,)),
            _add((0,)),
            _add((3, 0, 2)),
            _add((7,)),
            _add((3, 5, 2)),
            _add((33, 1025)),
            # broadcast by the frontend
            _add((3, 1), (1, 4)),
            _add((4,), (2, 3, 4)),
            _add((2, 3), ()),
            _add((2, 1, 3), (0, 3)),
        ),
    ),
    "gelu": Row(
        gelu,
        (
            *_gelu(()),
            *_gelu((1,)),
            *_gelu((2, 0)),
            *_gelu((7,)),
            *_gelu((3, 5, 2)),
            *_gelu((101,), scale=6.0),  # far into both tails
            *_gelu((33, 1025)),
            *_gelu((2, 40000)),
        ),
    ),
    "layer_norm": Row(
        layer_norm,
        (
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
            _layer_norm((1, 1), 1, steep=316),
            _layer_norm((5, 1), 1, steep=316),
            _layer_norm((0, 6), 6),  # no rows: dweight and dbias are 0
            _layer_norm((3, 0), 0),
            _layer_norm((2, 0, 3), (0, 3)),
            _layer_norm((3, 33), 33),
            _layer_norm((6, 16), 16, mean=8.0, magnified=16.0),
            # one for each path of a kernel
            _layer_norm((33, 1025), 1025),
            _layer_norm((3, 8192), (8192,)),
            _layer_norm((2, 40000), 40000),
            _layer_norm((1500, 24), 24),
            _layer_norm((2500, 3), 3, bias=False, eps=0.1),
        ),
    ),
    "rms_norm": Row(
        rms_norm,
        (
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
            _rms_norm((3, 8192), (8192,)),
            _rms_norm((2, 40000), 40000),
            _rms_norm((1500, 24), 24),
            _rms_norm((2500, 3), 3, weight=False, eps=0.1),
        ),
        defaults=_rms_eps,
    ),
    "add_layer_norm": Row(
        add_layer_norm,
        (
            _add_layer_norm((4, 6), 6),
            _add_layer_norm((4, 6), (6,), weight=False, bias=False),
            _add_layer_norm((4, 6), 6, bias=False),
            _add_layer_norm((4, 6), [6], weight=False),
            _add_layer_norm((3, 7), 7, eps=0.1),
            _add_layer_norm((2, 3, 4), (3, 4)),
            _add_layer_norm((2, 3, 4), (2, 3, 4)),
            _add_layer_norm((9,), 9),
            _add_layer_norm((1, 1), 1, steep=316),
            _add_layer_norm((5, 1), 1, steep=316),
            _add_layer_norm((0, 6), 6),
            _add_layer_norm((3, 0), 0),
            _add_layer_norm((2, 0, 3), (0, 3)),
            _add_layer_norm((3, 33), 33),
            # one for each path of a kernel
            _add_layer_norm((33, 1025), 1025),
            _add_layer_norm((3, 8192), (8192,)),
            _add_layer_norm((2, 40000), 40000),
            _add_layer_norm((1500, 24), 24),
            _add_layer_norm((2500, 3), 3, bias=False, eps=0.1),
        ),
    ),
    "add_rms_norm": Row(
        add_rms_norm,
        (
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
            _add_rms_norm((3, 8192), (8192,)),
            _add_rms_norm((2, 40000), 40000),
            _add_rms_norm((1500, 24), 24),
            _add_rms_norm((2500, 3), 3, weight=False, eps=0.1),
        ),
        defaults=_rms_eps,
    ),
    "linear": Row(
        linear,
        (
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
            _linear((3, 0), 2),  # nothing but the bias
            _linear((3, 4), 0, activation="gelu"),
            # one for each path of a kernel
            _linear((33, 1025), 7, bias=False),
            _linear((256, 264), 256),
            _linear((300, 72), 504, activation="gelu", scale=0.5),
            _linear((2, 130, 72), 128, activation="gelu_tanh", scale=0.5),
            _linear((500, 128), 96),
        ),
    ),
    "matmul": Row(
        matmul,
        (
            _matmul((1, 1), (1, 1)),
            _matmul((4, 6), (6, 4)),
            _matmul((4, 6), (4, 5), transpose_a=True),
            _matmul((4, 6), (5, 6), transpose_b=True),
            _matmul((6, 4), (5, 6), transpose_a=True, transpose_b=True),
            _matmul((1, 7), (7, 1)),
            _matmul((7, 1), (1, 7)),
            _matmul((0, 3), (3, 2)),
            _matmul((3, 2), (2, 0)),
            _matmul((2, 0), (0, 3)),  # sums of nothing
            # leading axes, which broadcast
            _matmul((3, 4, 5), (3, 5, 2)),
            _matmul((3, 4, 5), (5, 2)),
            _matmul((4, 5), (3, 5, 2)),
            _matmul((3, 5, 4), (2, 5), transpose_a=True, transpose_b=True),
            _matmul((4, 5), (3, 2, 5), transpose_b=True),
            _matmul((2, 1, 3, 4), (3, 4, 2)),
            _matmul((2, 3, 4, 5), (2, 1, 5, 3)),
            _matmul((2, 3, 5, 4), (1, 3, 6, 5), transpose_a=True, transpose_b=True),
            _matmul((0, 3, 4), (4, 2)),
            _matmul((2, 0, 3, 4), (2, 1, 4, 2)),
            # one for each path of a kernel: blocks and tiles that are not whole, sums in several pieces
            _matmul((33, 1025), (1025, 70)),
            _matmul((250, 300), (300, 500)),
            _matmul((100, 33), (100, 130), transpose_a=True),
            _matmul((3, 5000), (2, 5000), transpose_b=True),
            _matmul((37, 83), (45, 83), transpose_b=True),
            _matmul((65, 1037), (47, 1037), transpose_b=True),
            _matmul((1037, 65), (1037, 47), transpose_a=True),
            _matmul((256, 256), (256, 256), transpose_b=True),
            _matmul((64, 33, 8), (64, 8, 40)),
        ),
    ),
    "swiglu": Row(
        swiglu,
        (
            _swiglu(()),
            _swiglu((1,)),
            _swiglu((2, 0)),
            _swiglu((7,)),
            _swiglu((3, 5, 2)),
            _swiglu((101,), scale=6.0),
            _swiglu((33, 1025)),
        ),
    ),
    "softmax": Row(
        softmax,
        (
            _softmax((4, 6)),
            _softmax(()),
            _softmax((), 0),
            _softmax((1, 1)),
            _softmax((5, 1)),
            _softmax((0, 6)),
            _softmax((3, 0)),
            _softmax((9,), 0),
            _softmax((3, 33), scale=20.0),
            # another axis
            _softmax((4, 6), 0),
            _softmax((2, 5, 3), 1),
            _softmax((2, 5, 70), -2),
            _softmax((300, 33), 0),
            # one for each path of a kernel
            _softmax((33, 1025)),
            _softmax((3, 8192)),
            _softmax((2, 40000)),
            _softmax((1500, 24)),
        ),
    ),
    "cross_entropy": Row(
        cross_entropy,
        (
            _cross_entropy((4, 6), reduction="none"),
            _cross_entropy((4, 6)),
            _cross_entropy((4, 6), reduction="sum"),
            _cross_entropy((4, 6), label_smoothing=0.1),
            _cross_entropy((5, 3), reduction="none", label_smoothing=0.3, ignore_index=1),
            _cross_entropy((9, 3), ignore_index=2),  # some of them are ignored
            _cross_entropy((6,)),
            _cross_entropy((6,), reduction="none"),
            _cross_entropy((1, 1)),
            _cross_entropy((3, 1)),
            _cross_entropy((0, 6), reduction="sum"),
            _cross_entropy((0, 6), reduction="none"),
            _cross_entropy((5, 33), scale=20.0),
            # one for each path of a kernel
            _cross_entropy((33, 1025), label_smoothing=0.2),
            _cross_entropy((3, 8192), reduction="none", label_smoothing=1.0),
            _cross_entropy((2, 40000)),
            _cross_entropy((1500, 24), ignore_index=7),
        ),
    ),
    "conv2d": Row(
        conv2d,
        (
            *_conv2d((2, 3, 3, 3), (2, 3, 3, 3), padding=1),
            *_conv2d((2, 3, 6, 5), (4, 3, 3, 2), bias=False),
            *_conv2d((1, 1, 1, 1), (1, 1, 1, 1)),
            *_conv2d((6, 6, 5), (4, 3, 3, 3), groups=2, padding=1),  # one image, without an axis for it
            *_conv2d((2, 2, 4, 5, 6), (3, 4, 2, 3), bias=False),
            *_conv2d((0, 3, 5, 5), (2, 3, 3, 3)),
            *_conv2d((2, 0, 4, 4), (2, 0, 3, 3)),
            *_conv2d((1, 2, 3, 3), (0, 2, 3, 3)),
            *_conv2d((1, 2, 0, 3), (2, 2, 1, 3), padding=1),
            *_conv2d((2, 5, 4, 7), (3, 5, 1, 1)),
            *_conv2d((2, 3, 9, 8), (4, 3, 3, 3), stride=2, padding=1),
            *_conv2d((2, 3, 9, 8), (4, 3, 3, 2), stride=(2, 3), padding=(2, 1), dilation=(1, 2)),
            *_conv2d((1, 2, 12, 11), (3, 2, 3, 3), stride=2, dilation=3, padding=(3, 4)),
            *_conv2d((1, 2, 3, 4), (3, 2, 2, 2), padding=5, stride=4),  # whole windows of padding
            *_conv2d((2, 6, 5, 5), (6, 1, 3, 3), padding=1, groups=6),
            *_conv2d((2, 4, 7, 6), (8, 2, 3, 3), stride=2, groups=2),
            # channels in whole vectors
            *_conv2d((2, 16, 8, 8), (24, 16, 3, 3), padding=1),
            *_conv2d((2, 32, 9, 7), (16, 32, 3, 3), stride=2, padding=1, bias=False),
            *_conv2d((3, 24, 5, 5), (40, 24, 1, 1)),
            *_conv2d((2, 16, 9, 9), (8, 16, 3, 3), dilation=2, padding=2),
            *_conv2d((2, 16, 9, 9), (8, 16, 2, 3), dilation=(2, 1), stride=(1, 2)),
            *_conv2d((2, 64, 3, 3), (72, 64, 3, 3), padding=1),
            *_conv2d((2, 3, 96, 64), (8, 3, 3, 3), stride=2, padding=1),
            *_conv2d((2, 8, 24, 20), (16, 8, 3, 3), padding=1),
        ),
    ),
    "lltm": Row(
        lltm,
        (
            _lltm((4,), 6, 5),
            _lltm((1,), 1, 1),
            _lltm((), 3, 2),
            _lltm((2, 3), 5, 4, bias=(12,)),
            _lltm((0,), 3, 2),  # no rows: dweights and dbias are 0
            _lltm((3,), 0, 4),  # nothing but the state
            _lltm((5,), 3, 7),
            _lltm((16,), 32, 128, scale=0.3),
            # one for each path of a kernel
            _lltm((70,), 33, 65, scale=0.3),
            _lltm((300,), 128, 96, scale=0.3),
            _lltm((520,), 67, 83, scale=0.3),
            _lltm((6144,), 8, 128, scale=0.3),
            _lltm((120,), 64, 448, scale=0.2),
        ),
        complex=True,
    ),
}


# ----------------------------------------------------------------------------------------------------------- tolerances


class Precision(NamedTuple):
    result: float
    """Half a unit in the last place of the result, relative: what rounding it costs at most."""
    work: float
    """The same of the dtype that it is computed in."""


_HALF, _BFLOAT, _SINGLE, _DOUBLE = 2.0**-11, 2.0**-8, 2.0**-24, 2.0**-53

PRECISION = {
    "float16": Precision(_HALF, _SINGLE),
    "bfloat16": Precision(_BFLOAT, _SINGLE),
    "float32": Precision(_SINGLE, _SINGLE),
    "float64": Precision(_DOUBLE, _DOUBLE),
}

# A result may be off by its own rounding, and by STEPS roundings of the arithmetic, relative to the largest result of
# the call or to 1: sums cancel, and an error is that of the largest term. Sums of n terms are taken in vectors and in
# pieces, so that an error grows with about log2(n) < 16 and not with n; exp and erf cost a few units more.
STEPS = 32

# The finite differences are themselves off: five points a step h apart leave h**4 / 30 of the fifth derivative, and
# roundings of f amount to 1.5 / h of 2**-53 times f. With h = 3e-4 that is 3e-16 and 6e-13 of numbers near 1; the fifth
# derivative of a row that has little variance may be (1 / deviation)**5 times that, some 1e5.
H = 3e-4
DIFFERENCES = 1e-10


def allowed(expected: np.ndarray, dtype: str, case: Case) -> np.ndarray:
    """How far each element of a result may lie from ``expected``."""
    precision = PRECISION[dtype]
    largest = max(1.0, float(np.abs(expected).max(initial=0.0)))
    return precision.result * np.abs(expected) + STEPS * case.magnified * precision.work * largest


def allowed_gradient(expected: np.ndarray, dtype: str, case: Case) -> np.ndarray:
    largest = max(1.0, float(np.abs(expected).max(initial=0.0)))
    work = allowed(expected, dtype, replace(case, magnified=case.magnified * case.steep))
    return work + case.summed * PRECISION[dtype].result * largest


def apart(expected: np.ndarray, dtype: str, magnified: float = 1.0) -> np.ndarray:
    """How far two implementations may lie from each other, of results and gradients of numbers near 1: each is as far
    from the formula as it may be, and either may round, in this dtype, what it goes on computing with. 8 such numbers
    are on the way of no operator's gradient."""
    return 2 * magnified * allowed_gradient(expected, dtype, Case({}, summed=8))


# --------------------------------------------------------------------------------------------------- inputs and results


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """The float64 array of what is left of ``array`` in ``dtype``."""
    if dtype == "bfloat16":
        bits = np.asarray(array, np.float32).view(np.uint32)
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
        return np.asarray(bits, np.uint32).view(np.float32).astype(np.float64)
    return np.asarray(array, dtype).astype(np.float64)


def dtype_of(array: np.ndarray, dtype: str) -> str:
    """``dtype``, unless the array is one of integers."""
    return dtype if array.dtype.kind == "f" else "int64"


def numpy_dtype(dtype: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)


def _random(seed: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(seed.encode()))


@cache
def _inputs(name: str, index: int, dtype: str) -> Arrays:
    case = CASES[name].cases[index]
    random = _random(f"{name} {case}")
    arrays: Arrays = {}
    for slot, shape in case.shapes.items():
        if shape is None:
            arrays[slot] = None
        elif slot in case.classes:
            arrays[slot] = random.integers(0, case.classes[slot], shape)
        else:
            values = random.normal(0.0 if arrays else case.mean, case.scale, shape)
            arrays[slot] = rounded(np.round(values / case.grid) * case.grid if case.grid else values, dtype)
    return arrays


@cache
def _expected(name: str, index: int, dtype: str) -> tuple[np.ndarray, ...]:
    return CASES[name].results(_inputs(name, index, dtype), CASES[name].cases[index].attrs, dtype)


class Probe(NamedTuple):
    """The derivative of ``sum(dy * f(x))``, over all results, along ``direction``: the dot product of the gradient with
    it."""

    direction: np.ndarray
    derivative: float


@cache
def _probes(name: str, index: int, dtype: str) -> dict[str, list[Probe]]:
    row, inputs, dys = CASES[name], _inputs(name, index, dtype), output_gradients(name, index, dtype)
    attrs = row.cases[index].attrs

    def along_imaginary(slot: str, direction: np.ndarray) -> float:
        results = row.results(inputs | {slot: inputs[slot] + 1e-30j * direction}, attrs, dtype)
        return sum(float(np.vdot(dy, y.imag)) for dy, y in zip(dys, results, strict=True)) * 1e30

    def along(slot: str, direction: np.ndarray) -> float:
        if row.complex:
            return along_imaginary(slot, direction)

        def f(t: float) -> tuple[np.ndarray, ...]:
            # in more digits, where there are: a sum of 40000 differences has the roundings of all of them
            return row.results(inputs | {slot: inputs[slot].astype(np.longdouble) + t * direction}, attrs, dtype)

        # the difference first, and then the sum, which would have lost digits of it
        points = zip(dys, f(-2 * H), f(-H), f(H), f(2 * H), strict=True)
        return sum(float(np.vdot(dy, 8 * (c - b) - (d - a))) for dy, a, b, c, d in points) / (12 * H)

    return {
        slot: [Probe(d, along(slot, d)) for d in _directions(x.shape, _random(f"{name} {slot}"))]
        for slot, x in inputs.items()
        if x is not None and x.size and x.dtype.kind == "f"
    }


def _directions(shape: tuple[int, ...], random: np.random.Generator) -> Iterator[np.ndarray]:
    """Every axis of a small array; of a large one the first, the last, a few between, and a direction that has all."""
    size = math.prod(shape)
    few = size > 64
    for i in {0, size - 1, *random.integers(0, size, 2)} if few else range(size):
        unit = np.zeros(size)
        unit[i] = 1.0
        yield unit.reshape(shape)
    if few:
        yield random.choice([-1.0, 1.0], shape)


# The public side; a case is named by its operator and its place in the row.


def first_case(name: str) -> int:
    """A case of two axes or more and at least ten elements, with every input."""
    for i, case in enumerate(CASES[name].cases):
        x, *_ = case.shapes.values()
        if all(case.shapes.values()) and len(x) > 1 and 10 < math.prod(x) < 1000:
            return i
    raise AssertionError(f"{name} has no case of a small matrix")


def inputs(name: str, index: int, dtype: str) -> Arrays:
    """The case's inputs, rounded to the dtype, as float64; integers as they are."""
    return dict(_inputs(name, index, dtype))


def output_gradients(name: str, index: int, dtype: str) -> tuple[np.ndarray, ...]:
    """A gradient of each result to start from."""
    random = _random(f"dy {name} {index}")
    return tuple(rounded(random.normal(size=y.shape), dtype) for y in _expected(name, index, dtype))


def assert_values(got: tuple[np.ndarray, ...], name: str, index: int, dtype: str) -> None:
    for g, expected in zip(got, _expected(name, index, dtype), strict=True):
        assert g.shape == expected.shape
        assert_close(g, expected, allowed(expected, dtype, CASES[name].cases[index]))


def assert_close(got: np.ndarray, expected: np.ndarray, limit: np.ndarray) -> None:
    off = np.abs(got - expected)
    wrong = ~(off <= limit)  # NaN is wrong
    if wrong.any():
        at = np.unravel_index(np.argmax(np.where(wrong, off / limit, 0)), wrong.shape)
        at = tuple(int(i) for i in at)
        raise AssertionError(
            f"{wrong.sum()} of {wrong.size} elements are wrong; at {at} {got[at]!r}, expected {expected[at]!r} "
            f"within {limit[at]:.3g}"
        )


def assert_gradients(got: dict[str, np.ndarray | None], name: str, index: int, dtype: str) -> None:
    """``got``: by input; None, or nothing, where the input is None or integers."""
    case = CASES[name].cases[index]
    for slot, x in _inputs(name, index, dtype).items():
        if x is None or x.dtype.kind != "f":
            assert got.get(slot) is None, f"{slot} is None or integers and has a gradient"
            continue
        gradient = got[slot]
        assert gradient is not None, f"{slot} has no gradient"
        assert gradient.shape == x.shape
        assert np.isfinite(gradient).all(), f"d{slot} is not finite"
        for direction, derivative in _probes(name, index, dtype).get(slot, ()):
            # the errors of the elements are independent: they add up as the root of the sum of their squares
            limit = np.linalg.norm(allowed_gradient(gradient, dtype, case) * direction)
            limit = limit * (4 if np.count_nonzero(direction) > 1 else 1) + DIFFERENCES * max(1, abs(derivative))
            off = abs(np.vdot(gradient, direction) - derivative)
            assert off <= limit, (
                f"d{slot} is {off:.3g} off along {np.flatnonzero(direction)[:3]}, {limit:.3g} is allowed"
            )
