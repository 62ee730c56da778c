"""How far a result may lie from its reference, by dtype, and the comparison."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .row import Case


class Precision(NamedTuple):
    result: float
    """Half a unit in the last place of the result, relative: what rounding it costs at most."""
    work: float
    """The bound of the dtype that it is computed in."""


_HALF, _BFLOAT, _SINGLE, _DOUBLE = 2.0**-11, 2.0**-8, 2.0**-24, 2.0**-53

PRECISION = {
    "float16": Precision(_HALF, _SINGLE),
    "bfloat16": Precision(_BFLOAT, _SINGLE),
    "float32": Precision(_SINGLE, _SINGLE),
    "float64": Precision(_DOUBLE, _DOUBLE),
    "complex64": Precision(_SINGLE, _SINGLE),
    "complex128": Precision(_DOUBLE, _DOUBLE),
    "float8_e4m3fn": Precision(2.0**-4, _SINGLE),
    "float8_e5m2": Precision(2.0**-3, _SINGLE),
}

# A result may be off by its own rounding, and by STEPS roundings of the arithmetic, relative to the largest result of
# the call or to 1: sums cancel, and an error is that of the largest term. Sums of n terms are taken in vectors and in
# pieces, so that an error grows with about log2(n) < 16 and not with n; exp and erf cost a few units more.
STEPS = 32

# A sum of n random terms, whose squares add up to norm**2: partial sums grow to norm, each addition is off by no more
# than a rounding of it, and n roundings of either sign come to sqrt(n) of them. SUM_STEPS such: 8 for the farthest of
# some million elements, twice, because tensor cores cut off what does not fit.
SUM_STEPS = 16

# The finite differences are themselves off: five points a step h apart leave h**4 / 30 of the fifth derivative, and
# roundings of f amount to 1.5 / h of 2**-53 times f. With h = 3e-4 that is 3e-16 and 6e-13 of numbers near 1; the fifth
# derivative of a row that has little variance may be (1 / deviation)**5 times that, some 1e5.
H = 3e-4
DIFFERENCES = 1e-10


def allowed(expected: np.ndarray, dtype: str, case: Case) -> np.ndarray:
    """How far each element of a result may lie from ``expected``."""
    precision = PRECISION[dtype]
    largest = max(1.0, float(np.abs(expected).max(initial=0.0)))
    inner = case.inner_roundings * precision.result + STEPS * case.magnified * precision.work
    return precision.result * np.abs(expected) + inner * largest


def allowed_gradient(expected: np.ndarray, dtype: str, case: Case) -> np.ndarray:
    largest = max(1.0, float(np.abs(expected).max(initial=0.0)))
    work = allowed(expected, dtype, replace(case, magnified=case.magnified * case.grad_condition))
    return work + case.dtype_roundings * PRECISION[dtype].result * largest


def allowed_sum(terms: int, dtype: str) -> float:
    """How far the sum of so many random terms may lie from the exact one, relative to the root of the sum of their
    squares."""
    return SUM_STEPS * terms**0.5 * PRECISION[dtype].work


def apart(expected: np.ndarray, dtype: str, magnified: float = 1.0) -> np.ndarray:
    """How far two implementations may lie from each other, of results and gradients of numbers near 1: each is as far
    from the formula as it may be, and either may round, in this dtype, what it goes on computing with. 8 such numbers
    are on the way of no operator's gradient."""
    return 2 * magnified * allowed_gradient(expected, dtype, Case({}, dtype_roundings=8))


class Mismatch(AssertionError):
    """A result that is not what was expected. ``facts``: the worst element, as an error message and JSON have it."""

    def __init__(self, message: str, **facts: object) -> None:
        super().__init__(message)
        self.facts = facts


@contextmanager
def about(what: str) -> Iterator[None]:
    """Puts ``what`` before the text of an AssertionError."""
    try:
        yield
    except AssertionError as error:
        error.args = (f"{what}: {error}",)
        raise


def assert_close(got: np.ndarray, expected: np.ndarray, limit: np.ndarray) -> None:
    """Raises Mismatch if an element lies further than ``limit`` from ``expected``, or is NaN. Integers and
    bools must be equal."""
    if expected.dtype.kind in "biu" and got.dtype.kind in "biu":  # float64 does not hold every integer of 64 bits
        wrong = got != expected
        if wrong.any():
            raise _mismatch(got, expected, wrong, int(np.argmax(wrong)), allowed=0.0)
        return
    with np.errstate(invalid="ignore", divide="ignore"):
        off = np.abs(got - expected)
        wrong = ~(off <= limit)
        if wrong.any():
            worst = int(np.argmax(np.where(wrong, off / limit, 0)))
            raise _mismatch(got, expected, wrong, worst, allowed=float(limit.flat[worst]))


def assert_close_or_odd(got: np.ndarray, expected: np.ndarray, limit: np.ndarray) -> None:
    """The error where ``expected`` is finite; NaN and the infinities must be those of ``expected``."""
    odd = ~np.isfinite(expected)
    wrong = np.where(odd, (got != expected) & ~(np.isnan(got) & np.isnan(expected)), np.isnan(got))
    if wrong.any():
        what = "NaN or infinite, or are not, other than the reference's"
        raise _mismatch(got, expected, wrong, int(np.argmax(wrong)), what)
    assert_close(np.where(odd, 0, got), np.where(odd, 0, expected), limit)


def _mismatch(
    got: np.ndarray, expected: np.ndarray, wrong: np.ndarray, worst: int, what: str = "wrong", **allowed: float
) -> Mismatch:
    at = tuple(int(i) for i in np.unravel_index(worst, wrong.shape))
    facts = {"at": at, "got": got[at].item(), "expected": expected[at].item(), **allowed}
    within = f" within {allowed['allowed']:.3g}" if any(allowed.values()) else ""
    return Mismatch(
        f"{wrong.sum()} of {wrong.size} elements are {what}; at {at} {facts['got']!r}, expected "
        f"{facts['expected']!r}{within}",
        **facts,
    )
