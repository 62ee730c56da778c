"""NaN and infinity: in an input, and in the gradient of a result."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .dtypes import OF_ML_DTYPES, is_floating
from .frameworks import Framework
from .report import Item
from .row import Arrays
from .search import in_framework
from .subject import Subject
from .tolerances import about, assert_close_or_odd
from .trial import Trial, generator
from .values import gradients_of, made, made_gradients, results_of


def odd_numbers(subject: Subject) -> Iterator[Item]:
    """One element of an input is NaN or infinite: the results are where and what the reference's are. So is one of the
    gradient of a result, or NaN of an input: a gradient that depends on it is not finite."""
    for adapter, device in subject.kernel_runs():
        yield in_framework(subject, "NaN and infinity", adapter, device, _odd_numbers, [subject.plain])


def _odd_numbers(subject: Subject, adapter: Framework, device: str, trial: Trial) -> None:
    for slot, x in trial.inputs.items():
        if x is not None and is_floating(x) and x.size:
            for value in (math.nan, math.inf, -math.inf):
                _try_number(subject, adapter, device, trial, slot, value)
    if subject.op.has_gradient:
        _try_gradients(subject, adapter, device, trial)


def _try_number(subject: Subject, adapter: Framework, device: str, trial: Trial, slot: str, value: float) -> None:
    at, odd = _with(trial.inputs[slot], value)  # type: ignore[arg-type]
    arrays = trial.inputs | {slot: odd}
    results = results_of(subject, adapter, made(adapter, device, trial, arrays), trial)
    with np.errstate(all="ignore", invalid="warn"), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        reference = subject.row.results(arrays, trial.case.attrs, trial.dtype)
    is_cast = any("cast" in str(warning.message) for warning in said)  # to an integer, which C leaves undefined
    for name, y, expected in zip((*subject.op.outputs, *subject.op.mutates), results, reference, strict=True):
        if (is_cast and not is_floating(expected)) or expected.dtype.name in OF_ML_DTYPES:  # some have no infinity
            continue
        got = adapter.numpy(y)
        if value in subject.row.indeterminate:
            got, expected = with_limit(got, expected, subject.row.indeterminate[value])
        finite = np.where(np.isfinite(expected), expected, 0)
        with about(f"with {_said(slot, at, value)}, {name}"):
            assert_close_or_odd(got, expected, trial.allowed(finite))


def with_limit(got: np.ndarray, expected: np.ndarray, limit: float) -> tuple[np.ndarray, np.ndarray]:
    """Both, with the limit where the formula says NaN, and the result too or the limit."""
    undefined = np.isnan(expected)
    return np.where(undefined & np.isnan(got), limit, got), np.where(undefined, limit, expected)


def _with(array: np.ndarray, value: float) -> tuple[tuple[int, ...], np.ndarray]:
    """A copy with the value, and where it is: not in the first element, if there is another."""
    at, odd = tuple(map(int, np.unravel_index(min(1, array.size - 1), array.shape))), array.copy()
    odd[at] = value
    return at, odd


def _said(slot: str, at: tuple[int, ...], value: float) -> str:
    return f"{slot}[{', '.join(map(str, at))}] = {value}"


# ----------------------------------------------------------------------------------------------------------- gradients
# The gradients that the formula says are not known for such numbers. Which of them depend on the number is: by finite
# differences of the reference, about the finite number that was there. NaN times a derivative that is not 0 is NaN.

STEP, SHIFT = 1e-3, 1e-2
LEAST = 1e-3
"""A derivative that is certainly not 0: differences have an error of 1e-16 / (STEP * SHIFT) of a sum of some 1000."""
AGREE = 0.1
"""Relative: so far apart may the differences of two steps lie. About a kink they are further apart."""


def _try_gradients(subject: Subject, adapter: Framework, device: str, trial: Trial) -> None:
    def found(arrays: Arrays, dys: Sequence[np.ndarray | None]) -> dict[str, np.ndarray | None]:
        inputs, given = made(adapter, device, trial, arrays), made_gradients(subject, adapter, device, trial, dys)
        return gradients_of(subject, adapter, trial, inputs, given)

    dys = trial.output_gradients
    for i, (name, dy) in enumerate(zip(subject.op.outputs, dys, strict=False)):
        for value in (math.nan, math.inf) if dy is not None and dy.size else ():
            at, odd = _with(dy, value)  # type: ignore[arg-type]
            gradients = found(trial.inputs, [*dys[:i], odd, *dys[i + 1 :]])
            _assert_odd(trial, gradients, _said(f"d{name}", at, value), _by_result(trial, i, at))
    for slot, x in trial.inputs.items():
        if x is not None and is_floating(x) and x.size:
            at, odd = _with(x, math.nan)
            gradients = found(trial.inputs | {slot: odd}, dys)
            _assert_odd(trial, gradients, _said(slot, at, math.nan), _by_input(trial, slot, at))


Derivative = Callable[[str, np.ndarray, float], float]
"""How a gradient depends on the number: by the input, a direction and a step."""


def _assert_odd(trial: Trial, found: dict[str, np.ndarray | None], what: str, derivative: Derivative) -> None:
    """No element of a gradient is finite that depends on the number."""
    for slot, gradient in found.items():
        x = trial.inputs[slot]
        if gradient is None or x is None or not is_floating(x) or not (finite := np.isfinite(gradient)).any():
            continue
        direction = generator(f"{trial.seed} {slot} odd").normal(size=x.shape) * finite
        if _depends(slot, direction, derivative):
            at = _first(slot, direction, derivative)
            raise AssertionError(f"with {what}, d{slot} is {gradient[at]!r} at {at}, expected NaN or infinity")


def _depends(slot: str, direction: np.ndarray, derivative: Derivative) -> bool:
    coarse, fine = (derivative(slot, direction, step) for step in (STEP, STEP / 2))
    return min(abs(coarse), abs(fine)) > LEAST and abs(coarse - fine) <= AGREE * abs(fine)


def _first(slot: str, direction: np.ndarray, derivative: Derivative) -> tuple[int, ...]:
    """An element that depends on the number: by halving."""
    places = np.flatnonzero(direction)
    while len(places) > 1:
        half = np.zeros(direction.size)
        half[places[: len(places) // 2]] = direction.ravel()[places[: len(places) // 2]]
        in_half = _depends(slot, half.reshape(direction.shape), derivative)
        places = places[: len(places) // 2] if in_half else places[len(places) // 2 :]
    return tuple(map(int, np.unravel_index(places[0], direction.shape)))


def _by_result(trial: Trial, i: int, at: tuple[int, ...]) -> Derivative:
    """The derivative of an element of a result."""

    def derivative(slot: str, direction: np.ndarray, step: float) -> float:
        above, below = (_moved(trial, {slot: sign * step * direction})[i][at] for sign in (1, -1))
        return float(above - below) / (2 * step)

    return derivative


def _by_input(trial: Trial, odd: str, at: tuple[int, ...]) -> Derivative:
    """The derivative, with respect to an element of an input, of a directional derivative of ``sum(dy * f(x))``."""

    def derivative(slot: str, direction: np.ndarray, step: float) -> float:
        unit = np.zeros_like(trial.inputs[odd])  # type: ignore[arg-type]
        unit[at] = SHIFT * step / STEP

        def total(a: int, b: int) -> float:
            moves = {odd: a * unit}
            moves[slot] = moves.get(slot, 0) + b * step * direction
            results = zip(trial.output_gradients, _moved(trial, moves), strict=True)
            return sum(float(np.vdot(dy, y)) for dy, y in results if dy is not None)

        return (total(1, 1) - total(1, -1) - total(-1, 1) + total(-1, -1)) / (4 * step * unit[at])

    return derivative


def _moved(trial: Trial, moves: dict[str, Any]) -> tuple[np.ndarray, ...]:
    inputs = trial.inputs | {slot: trial.inputs[slot] + move for slot, move in moves.items()}  # type: ignore[operator]
    return trial.row.results(inputs, trial.case.attrs, trial.dtype)
