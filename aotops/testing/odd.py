"""NaN and infinity: in an input, and in the gradient of a result."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .frameworks import Framework
from .report import Item
from .search import Attempt, searched
from .subject import Subject
from .tolerances import assert_close_or_odd
from .trial import Trial, generator, is_floating
from .values import made, made_gradients, results_of


def odd_numbers(subject: Subject) -> Iterator[Item]:
    """One element of an input is NaN or infinite: the results are where and what the reference's are. So is one of the
    gradient of a result, or NaN of an input: a gradient that depends on it is not finite."""
    for adapter, device in subject.kernel_runs():
        attempt = _odd_numbers(subject, adapter, device)
        pairs = subject.pairs([subject.plain], adapter)
        where = f"{adapter.name} {device}"
        yield searched(
            subject, "NaN and infinity", where, attempt, pairs, frameworks=[adapter.frontend], devices=[device]
        )


def _odd_numbers(subject: Subject, adapter: Framework, device: str) -> Attempt:
    def attempt(trial: Trial) -> None:
        for slot, x in trial.inputs.items():
            if x is None or x.dtype.kind != "f" or not x.size:
                continue
            for value in (math.nan, math.inf, -math.inf):
                _try_number(subject, adapter, device, trial, slot, value)
        if subject.has_gradient:
            _try_gradients(subject, adapter, device, trial)

    return attempt


def _try_number(subject: Subject, adapter: Framework, device: str, trial: Trial, slot: str, value: float) -> None:
    odd = trial.inputs[slot].copy()  # type: ignore[union-attr]
    at = _place(odd)
    odd[at] = value
    arrays = trial.inputs | {slot: odd}
    results = results_of(subject, adapter, made(adapter, device, trial, arrays), trial)
    with np.errstate(all="ignore", invalid="warn"), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        reference = subject.row.results(arrays, trial.case.attrs, trial.dtype)
    is_cast = any("cast" in str(warning.message) for warning in said)  # to an integer, which C leaves undefined
    for name, y, expected in zip((*subject.op.outputs, *subject.mutates), results, reference, strict=True):
        if is_cast and not is_floating(expected):
            continue
        got = adapter.numpy(y)
        if value in subject.row.indeterminate:
            got, expected = with_limit(got, expected, subject.row.indeterminate[value])
        finite = np.where(np.isfinite(expected), expected, 0)
        try:
            assert_close_or_odd(got, expected, trial.allowed(finite))
        except AssertionError as error:
            where = ", ".join(map(str, at))
            error.args = (f"with {slot}[{where}] = {value}, {name}: {error}",)
            raise


def with_limit(got: np.ndarray, expected: np.ndarray, limit: float) -> tuple[np.ndarray, np.ndarray]:
    """Both, with the limit where the formula says NaN, and the result too or the limit."""
    undefined = np.isnan(expected)
    return np.where(undefined & np.isnan(got), limit, got), np.where(undefined, limit, expected)


def _place(array: np.ndarray) -> tuple[int, ...]:
    """The index of the number: not the first element, if there is another."""
    return tuple(map(int, np.unravel_index(min(1, array.size - 1), array.shape)))


# ----------------------------------------------------------------------------------------------------------- gradients
# The gradients that the formula says are not known for such numbers. Which of them depend on the number is: by finite
# differences of the reference, about the finite number that was there. NaN times a derivative that is not 0 is NaN.

STEP, SHIFT = 1e-3, 1e-2
LEAST = 1e-3
"""A derivative that is certainly not 0: differences have an error of 1e-16 / (STEP * SHIFT) of a sum of some 1000."""
AGREE = 0.1
"""Relative: so far apart may the differences of two steps lie. About a kink they are further apart."""


def _try_gradients(subject: Subject, adapter: Framework, device: str, trial: Trial) -> None:
    for name, i in ((name, i) for i, name in enumerate(subject.op.outputs)):
        dy = trial.output_gradients[i]
        if dy is not None and dy.size:
            for value in (math.nan, math.inf):
                at, odd = _place(dy), dy.copy()
                odd[at] = value
                dys = [odd if j == i else other for j, other in enumerate(trial.output_gradients)]
                found = _gradients(subject, adapter, device, trial, trial.inputs, dys)
                _assert_odd(trial, found, f"d{name}[{', '.join(map(str, at))}] = {value}", _by_result(trial, i, at))
    for slot, x in trial.inputs.items():
        if x is not None and is_floating(x) and x.size:
            at, odd = _place(x), x.copy()
            odd[at] = math.nan
            arrays = trial.inputs | {slot: odd}
            found = _gradients(subject, adapter, device, trial, arrays, trial.output_gradients)
            _assert_odd(trial, found, f"{slot}[{', '.join(map(str, at))}] = nan", _by_input(trial, slot, at))


def _gradients(
    subject: Subject, adapter: Framework, device: str, trial: Trial, arrays: Any, dys: Sequence[np.ndarray | None]
) -> dict[str, np.ndarray]:
    inputs = made(adapter, device, trial, arrays)
    given = made_gradients(subject, adapter, device, trial, dys)
    found = adapter.gradients(subject.name, inputs, trial.case.attrs, given)
    return {slot: adapter.numpy(g) for slot, g in found.items() if g is not None}


Derivative = Callable[[str, np.ndarray, float], float]
"""How a gradient depends on the number: by the input, a direction and a step."""


def _assert_odd(trial: Trial, found: dict[str, np.ndarray], what: str, derivative: Derivative) -> None:
    """No element of a gradient is finite that depends on the number."""
    for slot, gradient in found.items():
        finite = np.isfinite(gradient)
        x = trial.inputs[slot]
        if x is None or not is_floating(x) or not finite.any():
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
