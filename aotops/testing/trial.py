"""One case in one dtype: inputs, what the reference gives for them, and its derivatives."""

from __future__ import annotations

import math
import zlib
from collections.abc import Container, Iterator
from functools import cached_property

import numpy as np

from aotops.spec import FLOATING, accumulate_dtype

from .dtypes import OF_ML_DTYPES, is_floating, plain
from .row import Arrays, Case, Row
from .tolerances import DIFFERENCES, H, Mismatch, allowed, allowed_gradient, assert_close

DTYPES = FLOATING


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """The float64 array of what is left of ``array`` in ``dtype``."""
    if dtype == "bfloat16":
        bits = np.asarray(array, np.float32).view(np.uint32)
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
        return np.asarray(bits, np.uint32).view(np.float32).astype(np.float64)
    return np.asarray(array, dtype).astype(np.float64)


def rounded_inputs(arrays: Arrays, dtype: str, wide: Container[str] = ()) -> Arrays:
    """The inputs rounded to ``dtype``, or to the dtype of what is ``wide``; those of another dtype as they are."""
    return {
        slot: x if x is None or not is_floating(x) else rounded(x, dtype_of(x, dtype, slot in wide))
        for slot, x in arrays.items()
    }


def dtype_of(array: np.ndarray, dtype: str, wide: bool = False) -> str:
    """``dtype``, unless the array has one of its own. ``wide``: the dtype that its sums have (Case.wide)."""
    if not is_floating(array):
        return array.dtype.name
    return accumulate_dtype(dtype) if wide else dtype


def generator(seed: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(seed.encode()))


class Trial:
    """A case of a row in a dtype. ``seed`` decides the numbers."""

    def __init__(self, row: Row, case: Case, dtype: str, seed: str) -> None:
        self.row, self.case, self.dtype, self.seed = row, case, dtype, seed

    @cached_property
    def inputs(self) -> Arrays:
        """Rounded to the dtype, as float64; those of a dtype of their own as they are."""
        return rounded_inputs(self.case.random(generator(self.seed)), self.dtype, self.case.wide)

    @cached_property
    def expected(self) -> tuple[np.ndarray, ...]:
        return self.row.results(self.inputs, self.case.attrs, self.dtype)

    @cached_property
    def output_gradients(self) -> tuple[np.ndarray | None, ...]:
        """A gradient of each result to start from; None for one that has none."""
        random = generator(f"dy {self.seed}")
        return tuple(
            rounded(random.normal(size=y.shape), self.dtype) if is_floating(y) else None for y in self.expected
        )

    @cached_property
    def probes(self) -> dict[str, list[tuple[np.ndarray, float]]]:
        """By input that is differentiable, directions, each with the derivative of ``sum(dy * f(x))``, over all
        results, along it: the dot product of the gradient with it."""
        return {
            slot: [(d, self._along(slot, d)) for d in _directions(x.shape, generator(f"{self.seed} {slot}"))]
            for slot, x in self.inputs.items()
            if x is not None and x.size and self._has_gradient(slot)
        }

    def _along(self, slot: str, direction: np.ndarray) -> float:
        given = self.inputs[slot]
        assert given is not None
        if self.row.complex:
            pairs = zip(self.output_gradients, self._shifted(slot, given + 1e-30j * direction), strict=True)
            return sum(float(np.vdot(dy, y.imag)) for dy, y in pairs if dy is not None) * 1e30
        # in more digits, where there are: a sum of 40000 differences has the roundings of all of them
        x = given.astype(np.longdouble)
        f = [self._shifted(slot, x + t * direction) for t in (-2 * H, -H, H, 2 * H)]
        # the difference first, and then the sum, which would have lost digits of it
        points = zip(self.output_gradients, *f, strict=True)
        return sum(float(np.vdot(dy, 8 * (c - b) - (d - a))) for dy, a, b, c, d in points if dy is not None) / (12 * H)

    def _shifted(self, slot: str, x: np.ndarray) -> tuple[np.ndarray, ...]:
        return self.row.results(self.inputs | {slot: x}, self.case.attrs, self.dtype)

    def assert_values(self, got: tuple[np.ndarray, ...]) -> None:
        """Raises AssertionError unless ``got`` is what the reference gives."""
        for g, expected in zip(got, self.expected, strict=True):
            assert g.shape == expected.shape, f"the result has shape {g.shape}, expected {expected.shape}"
            assert_close(g, plain(expected), self.allowed(expected))

    def allowed(self, expected: np.ndarray) -> np.ndarray:
        """How far a result may lie from ``expected``; integers and bools must be equal."""
        dtype = self._precision_of(expected)
        return allowed(plain(expected), dtype, self.case) if dtype else np.zeros(expected.shape)

    def allowed_gradient(self, expected: np.ndarray) -> np.ndarray:
        """The error allowed in a result of the gradient."""
        dtype = self._precision_of(expected)
        return allowed_gradient(plain(expected), dtype, self.case) if dtype else np.zeros(expected.shape)

    def _precision_of(self, expected: np.ndarray) -> str | None:
        """The dtype whose error a result may have. The reference computes in float64, also what becomes complex64."""
        if is_floating(expected):
            return self.dtype
        if expected.dtype.kind == "c":
            return "complex64" if self.dtype != "float64" else expected.dtype.name
        return expected.dtype.name if expected.dtype.name in OF_ML_DTYPES else None

    def assert_same(self, got: np.ndarray, other: np.ndarray) -> None:
        """Raises AssertionError unless two results, or gradients, of the same call agree but for rounding."""
        assert_close(got, other, 2 * self.allowed_gradient(other))

    def assert_gradients(self, got: dict[str, np.ndarray | None]) -> None:
        """``got``: by input; None, or nothing, where the input is None or has no gradient."""
        for slot, x in self.inputs.items():
            if x is None or not self._has_gradient(slot):
                assert got.get(slot) is None, f"{slot} is None or of {x is not None and x.dtype} and has a gradient"
                continue
            gradient = got[slot]
            assert gradient is not None, f"{slot} has no gradient"
            assert gradient.shape == x.shape, f"d{slot} has shape {gradient.shape}, expected {x.shape}"
            assert np.isfinite(gradient).all(), f"d{slot} is not finite"
            for direction, derivative in self.probes.get(slot, ()):
                self._assert_derivative(slot, gradient, direction, derivative)

    def _has_gradient(self, slot: str) -> bool:
        x = self.inputs[slot]
        return self.row.gradient and x is not None and is_floating(x) and slot not in self.case.constants

    def _assert_derivative(self, slot: str, gradient: np.ndarray, direction: np.ndarray, derivative: float) -> None:
        # the errors of the elements are independent: they add up as the root of the sum of their squares
        elements = np.linalg.norm(allowed_gradient(gradient, self.dtype, self.case) * direction)
        limit = float(elements * (4 if np.count_nonzero(direction) > 1 else 1) + DIFFERENCES * max(1, abs(derivative)))
        got = float(np.vdot(gradient, direction))
        if abs(got - derivative) <= limit:
            return
        along = np.argwhere(direction)
        at = tuple(map(int, along[0])) if len(along) == 1 else "every element"
        raise Mismatch(
            f"d{slot} along {at} is {got!r}, expected {derivative!r} within {limit:.3g}",
            at=at, got=got, expected=derivative, allowed=limit,
        )  # fmt: skip


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
