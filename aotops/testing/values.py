"""Values and gradients against the reference, in each framework."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from .calls import bound
from .frameworks import Framework
from .report import Item
from .row import Arrays, Case
from .search import in_framework
from .subject import SMALL, Subject, elements
from .trial import Trial, dtype_of


def made(adapter: Framework, device: str, trial: Trial, arrays: Arrays | None = None) -> dict[str, Any]:
    """The framework's tensors of the inputs, or of other arrays in their place."""
    arrays = trial.inputs if arrays is None else arrays
    return {
        slot: None if x is None else adapter.make(x, dtype_of(x, trial.dtype, slot in trial.case.wide), device)
        for slot, x in arrays.items()
    }


def made_gradients(
    subject: Subject, adapter: Framework, device: str, trial: Trial, dys: Sequence[np.ndarray | None] | None = None
) -> tuple[Any, ...]:
    """The framework's tensors of the gradients of the results, or of others in their place."""
    wide = [y in trial.case.wide for y in (*subject.op.outputs, *subject.op.mutates)]
    pairs = zip(trial.output_gradients if dys is None else dys, wide, strict=True)
    return tuple(None if dy is None else adapter.make(dy, dtype_of(dy, trial.dtype, one), device) for dy, one in pairs)


def results_of(subject: Subject, adapter: Framework, tensors: dict[str, Any], trial: Trial) -> tuple[Any, ...]:
    """The results, and the inputs that the operator writes to: what the reference returns."""
    results = adapter.forward(subject.op.name, tensors, trial.case.attrs)
    results = () if results is None else results if isinstance(results, tuple) else (results,)
    return results if adapter.functional else (*results, *(tensors[slot] for slot in subject.op.mutates))


def assert_dtypes(subject: Subject, adapter: Framework, trial: Trial, results: tuple[Any, ...]) -> None:
    expected = bound(subject.op, trial.case, trial.inputs, trial.dtype).written("cpu")
    for name, y in zip(subject.op.outputs, results, strict=False):
        got = adapter.dtype(y)
        assert got == expected[name].dtype, f"{name} has dtype {got}, expected {expected[name].dtype}"


def assert_values(subject: Subject, adapter: Framework, device: str, trial: Trial) -> None:
    results = results_of(subject, adapter, made(adapter, device, trial), trial)
    assert_dtypes(subject, adapter, trial, results)
    trial.assert_values(tuple(map(adapter.numpy, results)))


def gradients_of(
    subject: Subject, adapter: Framework, trial: Trial, inputs: dict[str, Any], dys: tuple[Any, ...]
) -> dict[str, np.ndarray | None]:
    found = adapter.gradients(subject.op.name, inputs, trial.case.attrs, dys)
    return {slot: None if g is None else adapter.numpy(g) for slot, g in found.items()}


def _assert_gradients(subject: Subject, adapter: Framework, device: str, trial: Trial) -> None:
    inputs, dys = made(adapter, device, trial), made_gradients(subject, adapter, device, trial)
    trial.assert_gradients(gradients_of(subject, adapter, trial, inputs, dys))


def values(subject: Subject) -> Iterator[Item]:
    yield from _each(subject, "values", assert_values)


def gradients(subject: Subject) -> Iterator[Item]:
    if subject.op.has_gradient:
        yield from _each(subject, "gradients", _assert_gradients)


def _each(subject: Subject, check: str, attempt: Callable[..., None]) -> Iterator[Item]:
    for adapter, device in subject.usable:
        unable = partial(adapter.unable, subject.op.name)
        cases = [case for case in _cases(subject, adapter) if not unable([*case.given.values()])]
        yield in_framework(subject, check, adapter, device, attempt, cases)


def _cases(subject: Subject, adapter: Framework) -> Sequence[Case]:
    """One where each call is compiled, since the kernel's numbers are those of other calls."""
    if adapter.compiles or (subject.quick and adapter.slow):
        return [subject.plain]
    return [case for case in subject.cases if elements(case) <= SMALL] if subject.quick else subject.cases
