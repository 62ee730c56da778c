"""The table: for each operator a float64 reference, and the cases on which every frontend is tried.

To add an operator, add a row under its name:

- ``reference`` is the formula, in NumPy, as plain as can be: a function of the public function's arguments, by name,
  that takes float64 arrays and gives the result;
- ``cases`` are shapes by argument (None for an optional one that is not given) and the other arguments as keywords.

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
    magnified: float = 1.0
    """By how much the formula itself magnifies a rounding error of its inputs: the condition number."""
    steep: float = 1.0
    """By how much more that of its gradient does."""
    summed: int = 0
    """Terms of a gradient that a framework sums over a broadcast axis. It may do so in the dtype itself, as for its own
    operators: each term then costs a rounding of it."""

    def __str__(self) -> str:
        shapes = [f"{slot}{'x'.join(map(str, s)) or '0dim'}" for slot, s in self.shapes.items() if s is not None]
        attrs = [f"{name}={value}" for name, value in self.attrs.items()]
        return "-".join([*shapes, *attrs, *([f"mean={self.mean:g}"] if self.mean else [])]).replace(" ", "")


@dataclass(frozen=True)
class Row:
    reference: Callable[..., Any]
    cases: tuple[Case, ...]


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


# --------------------------------------------------------------------------------------------------------------- cases


def _add(a, b=None) -> Case:
    summed = 0 if b is None else math.prod(np.broadcast_shapes(a, b))
    return Case({"a": a, "b": a if b is None else b}, summed=summed)


def _gelu(x, **kwargs) -> Iterator[Case]:
    for approximate in ("none", "tanh"):
        yield Case({"x": x}, {"approximate": approximate}, **kwargs)


def _layer_norm(x, normalized_shape, weight=True, bias=True, eps=None, **kwargs) -> Case:
    affine = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    shapes = {"x": x, "weight": affine if weight else None, "bias": affine if bias else None}
    return Case(shapes, {"normalized_shape": normalized_shape} | ({} if eps is None else {"eps": eps}), **kwargs)


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


# --------------------------------------------------------------------------------------------------- inputs and results


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """The float64 array of what is left of ``array`` in ``dtype``."""
    if dtype == "bfloat16":
        bits = np.asarray(array, np.float32).view(np.uint32)
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
        return np.asarray(bits, np.uint32).view(np.float32).astype(np.float64)
    return np.asarray(array, dtype).astype(np.float64)


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
        mean = 0.0 if arrays else case.mean
        arrays[slot] = None if shape is None else rounded(random.normal(mean, case.scale, shape), dtype)
    return arrays


@cache
def _expected(name: str, index: int, dtype: str) -> np.ndarray:
    case = CASES[name].cases[index]
    return np.asarray(CASES[name].reference(**_inputs(name, index, dtype), **case.attrs))


class Probe(NamedTuple):
    """The derivative of ``sum(dy * f(x))`` along ``direction``: the dot product of the gradient with it."""

    direction: np.ndarray
    derivative: float


@cache
def _probes(name: str, index: int, dtype: str) -> dict[str, list[Probe]]:
    row, inputs, dy = CASES[name], _inputs(name, index, dtype), output_gradient(name, index, dtype)
    attrs = row.cases[index].attrs

    def along(slot: str, direction: np.ndarray) -> float:
        def f(t: float) -> np.ndarray:
            return row.reference(**inputs | {slot: inputs[slot] + t * direction}, **attrs)

        # the difference first, and then the sum, which would have lost digits of it
        return float(np.vdot(dy, 8 * (f(H) - f(-H)) - (f(2 * H) - f(-2 * H)))) / (12 * H)

    return {
        slot: [Probe(d, along(slot, d)) for d in _directions(x.shape, _random(f"{name} {slot}"))]
        for slot, x in inputs.items()
        if x is not None and x.size
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


def inputs(name: str, index: int, dtype: str) -> Arrays:
    """The case's inputs, rounded to the dtype, as float64."""
    return dict(_inputs(name, index, dtype))


def output_gradient(name: str, index: int, dtype: str) -> np.ndarray:
    """A gradient of the result to start from."""
    shape = _expected(name, index, dtype).shape
    return rounded(_random(f"dy {name} {index}").normal(size=shape), dtype)


def assert_values(got: np.ndarray, name: str, index: int, dtype: str) -> None:
    expected = _expected(name, index, dtype)
    assert got.shape == expected.shape
    assert_close(got, expected, allowed(expected, dtype, CASES[name].cases[index]))


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
    """``got``: by input; None where the input is None."""
    case = CASES[name].cases[index]
    for slot, x in _inputs(name, index, dtype).items():
        if x is None:
            assert got[slot] is None, f"{slot} is None and has a gradient"
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
