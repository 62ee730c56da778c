"""Runs an attempt on one case after the other, and finds the smallest that fails."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from aotops.flops import flops
from aotops.spec import DEVICES

from .calls import run_on_cpu, run_on_cuda
from .frameworks import Framework
from .report import FAIL, PASS, UNAVAILABLE, Failure, Item
from .row import Case
from .subject import Subject, elements
from .trial import DTYPES, Trial

Attempt = Callable[[Trial], None]
"""Raises where the check fails; an AssertionError's text says how."""

MOST_ATTEMPTS = 80
"""To make a failing case smaller."""

MOST_ELEMENTS, MOST_FLOPS = 1 << 26, 1 << 32
"""An affordable case has no more: NumPy computes what is expected, in float64."""


def searched(
    subject: Subject, check: str, where: str, attempt: Attempt, pairs: Sequence[tuple[Case, str]], **arguments: Any
) -> Item:
    """The item of a check that tries cases in dtypes. ``arguments``: those of ``check`` that lead there."""
    if not pairs:
        return Item(check, where, UNAVAILABLE, "no case, in no dtype, is for it")
    for case, dtype in pairs:
        if fault := fault_of(subject, attempt, case, dtype):
            small, fault = shrunk(subject, attempt, case, dtype, fault)
            return Item(check, where, FAIL, failure=failure_of(subject, check, fault, small, dtype, **arguments))
    return Item(check, where, PASS, counted(pairs))


def in_framework(
    subject: Subject,
    check: str,
    adapter: Framework,
    device: str,
    attempt: Callable[[Subject, Framework, str, Trial], None],
    cases: Sequence[Case],
    kind: str = "",
) -> Item:
    """The item of a check of calls in a framework. ``kind``: of the cases."""
    where, bound = f"{kind}{adapter.name} {device}", partial(attempt, subject, adapter, device)
    arguments = {"frameworks": [adapter.frontend], "devices": [device]}
    return searched(subject, check, where, bound, subject.pairs(cases, adapter), **arguments)


def on_devices(
    subject: Subject,
    check: str,
    attempt: Callable[..., None],
    cases: Sequence[Case],
    devices: Container[str] = DEVICES,
) -> Iterator[Item]:
    """The items of a check of entries: ``attempt`` takes the subject, a device, its ``Runner`` and the trial."""
    for device in subject.devices:
        if device == "cuda" and device in devices and not subject.torch_on_gpu:
            yield Item(check, device, UNAVAILABLE, "torch finds no GPU")
        elif device in devices:
            bound = partial(attempt, subject, device, run_on_cpu if device == "cpu" else run_on_cuda)
            yield searched(subject, check, device, bound, subject.pairs(cases), devices=[device])


def counted(pairs: Sequence[tuple[Case, str]]) -> str:
    cases = len({repr(case) for case, _ in pairs})
    dtypes = sorted({dtype for _, dtype in pairs}, key=DTYPES.index)
    return f"{cases} case{'s' if cases != 1 else ''} in {', '.join(dtypes)}"


def fault_of(subject: Subject, attempt: Attempt, case: Case, dtype: str) -> Exception | None:
    try:
        attempt(subject.trial(case, dtype))
    except Exception as error:  # of a framework too: whatever it is, the check failed
        return error
    return None


def failure_of(subject: Subject, check: str, fault: Exception, case: Case, dtype: str, **arguments: Any) -> Failure:
    own = isinstance(fault, AssertionError)
    message = str(fault) if own else f"{type(fault).__name__}: {fault}"
    line = reproducing(subject, check, case, dtype, **arguments)
    return Failure(message, described(case), dtype, line, getattr(fault, "facts", {}))


def described(case: Case) -> str:
    shapes = [f"{slot} {shape}" for slot, shape in case.given.items()]
    return ", ".join([*shapes, *(f"{name}={value!r}" for name, value in case.attrs.items())])


def reproducing(subject: Subject, check: str, case: Case, dtype: str, **arguments: Any) -> str:
    """Python that runs one check on one case. Where the operator has no name to import, it is called ``op``."""
    imports = [subject.imports, "from aotops.testing import Case, check"]
    call = [subject.expression, subject.reference, f"cases=[{case!r}]", f"dtypes=[{dtype!r}]", f"only=[{check!r}]"]
    call += [f"{name}={value!r}" for name, value in arguments.items()]
    call += [f"seed={subject.seed}"]
    return f"{'; '.join(filter(None, imports))}; print(check({', '.join(filter(None, call))}).render())"


# ------------------------------------------------------------------------------------------------------ smaller cases


def shrunk(subject: Subject, attempt: Attempt, case: Case, dtype: str, fault: Exception) -> tuple[Case, Exception]:
    """The smallest case found that fails, by making one dimension after the other smaller, and its fault."""
    attempts = 0
    smaller = iter(smaller_cases(subject, case, dtype))
    while attempts < MOST_ATTEMPTS and (candidate := next(smaller, None)):
        attempts += 1
        if found := fault_of(subject, attempt, candidate, dtype):
            case, fault, smaller = candidate, found, iter(smaller_cases(subject, candidate, dtype))
    return case, fault


def smaller_cases(subject: Subject, case: Case, dtype: str) -> Iterator[Case]:
    """With one length in all shapes reduced, to a small one, to half, by 1 or 2; and without first axes of length 1."""
    lengths = sorted({dim for shape in case.given.values() for dim in shape if dim > 1}, reverse=True)
    for old in lengths:
        for new in dict.fromkeys((1, 2, 3, 4, 5, old // 2, old - 2, old - 1)):
            small = resized(subject, case, old, new, dtype) if 0 < new < old else None
            if small and elements(small) < elements(case):
                yield small
    if any(shape[:1] == (1,) for shape in case.given.values()):
        shapes = {slot: shape[1:] if shape and shape[0] == 1 else shape for slot, shape in case.shapes.items()}
        if subject.valid(small := replace(case, shapes=shapes), dtype):
            yield small


def resized(subject: Subject, case: Case, old: int, new: int, dtype: str, affordable: bool = False) -> Case | None:
    """With ``new`` for each length ``old``, and in the attributes too where the operator wants that; None if it accepts
    neither, or ``affordable`` is asked for and neither is."""
    shapes = {
        slot: None if shape is None else tuple(new if dim == old else dim for dim in shape)
        for slot, shape in case.shapes.items()
    }
    attrs = {name: _replaced(value, old, new) for name, value in case.attrs.items()}
    lengths = {dim for shape in case.given.values() for dim in shape}
    classes = {slot: _fewer(n, old, new, lengths) for slot, n in case.classes.items()}
    for changed in (
        replace(case, shapes=shapes, classes=classes),
        replace(case, shapes=shapes, attrs=attrs, classes=classes),
    ):
        if (not affordable or _is_affordable(subject, changed)) and subject.valid(changed, dtype):
            return changed
    return None


def _is_affordable(subject: Subject, case: Case) -> bool:
    op = subject.op
    try:
        shapes, attrs = op.bind(**case.given, **case.attrs)
        work = flops(op, op.canonical(attrs), shapes)
    except Exception:  # whatever a definition raises for a shape that is not for it, which ``valid`` refuses
        work = 0
    return elements(case) <= MOST_ELEMENTS and work <= MOST_FLOPS


def _fewer(classes: int, old: int, new: int, lengths: Container[int]) -> int:
    """The classes of an index into an axis that had ``old`` elements, and has ``new``: those of one into another axis,
    whose length is their number, are what they were."""
    if classes == old:
        return new
    return classes if classes in lengths or classes > old else min(classes, new)


def _replaced(value: Any, old: int, new: int) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_replaced(v, old, new) for v in value)
    return new if type(value) is int and value == old else value
