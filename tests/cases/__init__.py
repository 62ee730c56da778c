"""The table: a row for each operator, which owns everything that is tried on it, in every frontend.

Each module in this folder is named as its operator, and has its ``ROW`` (_row.py says what of): a float64 reference,
cases, how random calls are drawn, what is refused, what is the same in torch, and what ``aotops bench`` measures.

There is no row for a gradient: it is checked against finite differences of the reference.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import NamedTuple

import numpy as np

from ._row import FLOATING, Arrays, Case, Draw, Row

__all__ = ["CASES", "DTYPES", "FLOATING", "Arrays", "Case", "Draw", "Row"]

try:
    import ml_dtypes
except ImportError:  # then there is no bfloat16 here
    ml_dtypes = None

DTYPES = ("float16", "bfloat16", "float32", "float64")

CASES: dict[str, Row] = {
    name: import_module(f"{__name__}.{name}").ROW
    for name in sorted(module.name for module in iter_modules(__path__))
    if not name.startswith("_")
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
    work = allowed(expected, dtype, replace(case, magnified=case.magnified * case.grad_condition))
    return work + case.dtype_roundings * PRECISION[dtype].result * largest


def apart(expected: np.ndarray, dtype: str, magnified: float = 1.0) -> np.ndarray:
    """How far two implementations may lie from each other, of results and gradients of numbers near 1: each is as far
    from the formula as it may be, and either may round, in this dtype, what it goes on computing with. 8 such numbers
    are on the way of no operator's gradient."""
    return 2 * magnified * allowed_gradient(expected, dtype, Case({}, dtype_roundings=8))


# --------------------------------------------------------------------------------------------------- inputs and results


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """The float64 array of what is left of ``array`` in ``dtype``."""
    if dtype == "bfloat16":
        bits = np.asarray(array, np.float32).view(np.uint32)
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
        return np.asarray(bits, np.uint32).view(np.float32).astype(np.float64)
    return np.asarray(array, dtype).astype(np.float64)


def rounded_inputs(arrays: Arrays, dtype: str) -> Arrays:
    """The same, rounded to ``dtype``; integers as they are."""
    return {slot: x if x is None or x.dtype.kind != "f" else rounded(x, dtype) for slot, x in arrays.items()}


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
    return rounded_inputs(case.random(_random(f"{name} {case}")), dtype)


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


def row_samples(name: str) -> Mapping[str, Case]:
    """What is tried in every context, by the suffix of its name."""
    return CASES[name].samples or {"": CASES[name].cases[first_case(name)]}


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
