"""Inputs that are unusual: odd, empty, 0-dim and huge shapes, NaN and infinity, and layouts of memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from .calls import ITEMSIZE
from .frameworks import Framework
from .layouts import layouts_of
from .report import FAIL, PASS, UNAVAILABLE, Item
from .row import Case
from .search import Attempt, failure_of, resized, searched
from .subject import Subject, elements
from .tolerances import assert_close_or_odd
from .trial import Trial
from .values import made, results_of, values_of

MANY = 1 << 16
"""A huge tensor has more elements than a grid of blocks may have in its second axis, or a 16-bit index."""
MOST = 1 << 31
"""With ``huge``: more than an int counts."""

# --------------------------------------------------------------------------------------------------------------- shapes


def shapes(subject: Subject) -> Iterator[Item]:
    for adapter, device in subject.kernel_runs():
        attempt = values_of(subject, adapter, device)
        for kind, cases in subject.unusual.items():
            where = f"{kind}, {adapter.name} {device}"
            if not cases:
                yield Item("shapes", where, UNAVAILABLE, _why_none(subject, kind))
                continue
            pairs = [(case, dtype) for case in cases for dtype in subject.dtypes_for(case, adapter)]
            yield searched(subject, "shapes", where, attempt, pairs, frameworks=[adapter.frontend], devices=[device])
        if subject.huge:
            yield _beyond_int(subject, adapter, device)


def _why_none(subject: Subject, kind: str) -> str:
    refusal = subject.refusal(_scalar(subject.plain), subject.dtypes[0]) if kind == "0-dim" else None
    return f"refused: {refusal}" if refusal else "the operator accepts none, or the reference has no finite value"


def _beyond_int(subject: Subject, adapter: Framework, device: str) -> Item:
    """An elementwise operator on more than 2**31 elements: copies of a block, whose results are copies too."""
    where = f"2**31 elements, {adapter.name} {device}"
    dtype = min(subject.dtypes_of(adapter), key=lambda name: ITEMSIZE[name])
    block = 1 << 20
    case = replace(subject.plain, shapes={slot: shape and (block,) for slot, shape in subject.plain.shapes.items()})
    if not subject.op.elementwise or not subject.valid(case, dtype):
        return Item("shapes", where, UNAVAILABLE, "the operator is not elementwise")
    needed = 2 * (len(case.given) + len(subject.op.outputs)) * (MOST + block) * ITEMSIZE[dtype]
    if (free := adapter.free_memory(device)) < needed:
        return Item("shapes", where, UNAVAILABLE, f"needs {needed >> 30} GiB of memory, {free >> 30} are free")
    try:
        _compare_blocks(subject, adapter, device, subject.trial(case, dtype), MOST // block + 1)
    except Exception as error:
        arguments = {"frameworks": [adapter.frontend], "devices": [device], "huge": True}
        return Item("shapes", where, FAIL, failure=failure_of(subject, "shapes", error, case, dtype, **arguments))
    return Item("shapes", where, PASS, dtype)


def _compare_blocks(subject: Subject, adapter: Framework, device: str, trial: Trial, times: int) -> None:
    small = made(adapter, device, trial)
    large = {slot: None if t is None else adapter.tiled(t, times) for slot, t in small.items()}
    expected = adapter.results(subject.name, small, trial.case.attrs)
    got = adapter.results(subject.name, large, trial.case.attrs)
    for slot, one, many in zip(subject.op.outputs, expected, got, strict=True):
        n = one.shape[0]
        for i in range(times):
            same = np.array_equal(adapter.numpy(many[i * n : (i + 1) * n]), adapter.numpy(one), equal_nan=True)
            assert same, f"{slot} of {n * times} elements differs between {i * n} and {(i + 1) * n}"


# ---------------------------------------------------------------------------------------------------- NaN and infinity


def odd_numbers(subject: Subject) -> Iterator[Item]:
    """One element of an input is NaN or infinite: the results are where and what the reference's are."""
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

    return attempt


def _try_number(subject: Subject, adapter: Framework, device: str, trial: Trial, slot: str, value: float) -> None:
    odd = trial.inputs[slot].copy()  # type: ignore[union-attr]
    at = np.unravel_index(min(1, odd.size - 1), odd.shape)
    odd[at] = value
    arrays = trial.inputs | {slot: odd}
    results = results_of(subject, adapter, made(adapter, device, trial, arrays), trial)
    with np.errstate(all="ignore"):
        reference = subject.row.results(arrays, trial.case.attrs, trial.dtype)
    for name, y, expected in zip((*subject.op.outputs, *subject.mutates), results, reference, strict=True):
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


# -------------------------------------------------------------------------------------------------------------- layouts


def layouts(subject: Subject) -> Iterator[Item]:
    """Strided and misaligned inputs give what contiguous ones give, results and gradients."""
    for adapter, device in subject.usable:
        where = f"{adapter.name} {device}"
        known = layouts_of(adapter)
        if not known:
            yield Item("layouts", where, UNAVAILABLE, f"{adapter.frontend} has no strided arrays")
            continue
        attempt = _layouts(subject, adapter, device)
        pairs = subject.pairs([subject.plain], adapter)
        item = searched(subject, "layouts", where, attempt, pairs, frameworks=[adapter.frontend], devices=[device])
        yield replace(item, detail=", ".join(known)) if item.status == PASS else item


def _layouts(subject: Subject, adapter: Framework, device: str) -> Attempt:
    def attempt(trial: Trial) -> None:
        for name, lay in layouts_of(adapter).items():
            try:
                _try_layout(subject, adapter, device, trial, lay)
            except AssertionError as error:
                error.args = (f"{name}: {error}",)
                raise

    return attempt


def _try_layout(subject: Subject, adapter: Framework, device: str, trial: Trial, lay) -> None:
    def laid(array: np.ndarray | None):
        if array is None:
            return None
        dtype = trial.dtype if array.dtype.kind == "f" else array.dtype.name
        return lay(adapter, device, dtype, array) if array.ndim else adapter.make(array, dtype, device)

    tensors = {slot: laid(x) for slot, x in trial.inputs.items()}
    if not subject.mutates:  # which a copy of them would keep from the test
        trial.assert_values(tuple(map(adapter.numpy, results_of(subject, adapter, tensors, trial))))
    if subject.has_gradient:
        dys = tuple(map(laid, trial.output_gradients))
        found = adapter.gradients(subject.name, tensors, trial.case.attrs, dys)
        trial.assert_gradients({slot: None if g is None else adapter.numpy(g) for slot, g in found.items()})


# ----------------------------------------------------------------------------------------------------- unusual shapes

_LENGTHS = 1, 3, 17, 33


def unusual_cases(subject: Subject) -> dict[str, list[Case]]:
    """By kind, cases like the plain one with other lengths, which the operator accepts."""
    plain, dtype = subject.plain, subject.dtypes[0]
    lengths = sorted({dim for shape in plain.given.values() for dim in shape if dim > 1})

    def with_lengths(news: Sequence[int]) -> list[Case]:
        found = (resized(subject, plain, old, new, dtype) for old in lengths for new in news if new != old)
        return sorted({repr(case): case for case in found if case}.values(), key=elements)

    every: Case | None = plain
    for old in reversed(lengths):
        every = every and resized(subject, every, old, 2 * old + 1, dtype)
    scalar = _scalar(plain)
    # the first axis, of rows, is what grows in use
    huge = (resized(subject, plain, old, -(-MANY * old // elements(plain)) + 1, dtype) for old in lengths[:1])
    return {
        "odd": [*with_lengths(_LENGTHS), *([every] if every and every is not plain else [])],
        "empty": with_lengths([0]),
        "0-dim": [scalar] if subject.valid(scalar, dtype) else [],
        "huge": [] if subject.quick else [case for case in huge if case],
    }


def _scalar(case: Case) -> Case:
    """The case with 0-dim inputs."""
    return replace(case, shapes={slot: None if shape is None else () for slot, shape in case.shapes.items()})
