"""Inputs that are unusual: odd, empty, 0-dim and huge shapes, NaN and infinity, and layouts of memory."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace

import numpy as np

from .calls import calls_of, numbers
from .dtypes import ITEMSIZE
from .frameworks import Framework
from .huge import MOST, copies
from .layouts import Layout, layouts_of
from .plan import PAGE, Plan
from .report import FAIL, PASS, UNAVAILABLE, Item
from .row import Case
from .search import failure_of, in_framework, resized
from .subject import SMALL, Subject, elements
from .tolerances import about
from .trial import Trial, dtype_of
from .values import assert_values, gradients_of, made, results_of

MANY = 1 << 16
"""A huge tensor has more elements than a grid of blocks may have in its second axis, or a 16-bit index."""
BLOCK = 1 << 20
"""Elements of which a tensor of more than 2**31 is made of copies."""

# --------------------------------------------------------------------------------------------------------------- shapes


def shapes(subject: Subject) -> Iterator[Item]:
    for adapter, device in subject.kernel_runs():
        for kind, cases in unusual_cases(subject).items():
            if not cases:
                yield Item("shapes", f"{kind}, {adapter.name} {device}", UNAVAILABLE, _why_none(subject, kind))
                continue
            # "values" tries the case itself, and "shapes" others that are like it
            item = in_framework(subject, "values", adapter, device, assert_values, cases, f"{kind}, ")
            yield replace(item, check="shapes")
        if device == "cpu" and subject.huge:
            yield _beyond_int_in_copies(subject)
        elif subject.huge:
            yield _beyond_int(subject, adapter, device)


def _why_none(subject: Subject, kind: str) -> str:
    scalar = _scalar(subject.plain) if kind == "0-dim" else None
    refusal = scalar and subject.refusal(scalar, subject.dtypes[0])
    return f"refused: {refusal}" if refusal else "the operator accepts none, or the reference has no finite value"


def _beyond_int_in_copies(subject: Subject) -> Item:
    """An operator whose rows are independent, on copies of a few of them, which share their memory (huge.py). Forward
    and backward."""
    where = "2**31 elements, cpu"
    dtype = min(subject.dtypes, key=lambda name: ITEMSIZE[name])
    rows = _independent_rows(subject, dtype)
    if rows is None:
        return Item("shapes", where, UNAVAILABLE, "by the reference, its rows are not independent")
    case, tiled = rows
    try:
        why = _run_in_copies(subject, case, dtype, tiled)
    except AssertionError as error:
        failure = failure_of(subject, "shapes", error, case, dtype, devices=["cpu"], huge=True)
        return Item("shapes", where, FAIL, failure=failure)
    return Item("shapes", where, UNAVAILABLE, why) if why else Item("shapes", where, PASS, dtype)


def _independent_rows(subject: Subject, dtype: str) -> tuple[Case, frozenset[str]] | None:
    """A small case, and the inputs whose first axis, of rows, may grow: copies of their rows give copies of the
    results' rows."""
    for case in sorted((subject.plain, *subject.cases), key=elements):
        shapes = {slot: shape for slot, shape in case.given.items() if shape and case.array_dtype(slot) != "bool"}
        if not 4 <= elements(case) <= SMALL or not shapes:
            continue
        first = next(iter(shapes.values()))
        same_rank = {slot for slot, shape in shapes.items() if len(shape) == len(first)}
        for like in (set(shapes), same_rank, {next(iter(shapes))}):
            if all(_gives_copies(subject, case, dtype, like, times) for times in (2, 3)):
                return case, frozenset(like)
    return None


def _repeated(case: Case, tiled: Container[str], times: int) -> Case:
    """The case with more rows in these inputs."""
    shapes = {s: (d[0] * times, *d[1:]) if s in tiled and d else d for s, d in case.shapes.items()}
    return replace(case, shapes=shapes)


def _gives_copies(subject: Subject, case: Case, dtype: str, tiled: Container[str], times: int) -> bool:
    if subject.refusal(_repeated(case, tiled, times), dtype):
        return False
    trial = subject.trial(case, dtype)

    def copied(array: np.ndarray) -> np.ndarray:
        return np.concatenate([array] * times)

    inputs = {slot: copied(x) if x is not None and slot in tiled else x for slot, x in trial.inputs.items()}
    try:
        found = subject.row.results(inputs, case.attrs, dtype)
    except Exception:  # whatever a reference raises for a shape that is not for it
        return False
    pairs = zip(found, trial.expected, strict=True)
    return all(y.ndim and np.allclose(many, copied(y), 1e-12, 1e-12) for many, y in pairs if many.shape != () or y.ndim)


def _run_in_copies(subject: Subject, case: Case, dtype: str, tiled: frozenset[str]) -> str | None:
    """Why it was not run."""
    size = next(math.prod(case.given[slot]) for slot in case.given if slot in tiled)
    # whole pages of each tensor, about a million elements
    block = -(-BLOCK // (PAGE * size)) * PAGE
    times = MOST // (block * size) + 2
    trial = subject.trial(_repeated(case, tiled, block), dtype)
    for one in calls_of(subject.op, trial, "cpu"):
        large = copies(one, tiled, times)
        if large is None:
            return None  # the backward of a forward whose rows are independent takes a result that has no rows
        outcome = subject.worker.run(Plan([one], ["huge"], others=[large]))
        if outcome.ended:
            raise AssertionError(
                f"{one.op.name}: {outcome.ended.reason} with 2**31 elements in {', '.join(large.tiled)}"
            )
        for raised in outcome.raised.values():
            return f"{one.op.name}: {raised.text}"
        for found in outcome.results.values():
            if isinstance(found, str):
                return f"{one.op.name}: {found}"
            for slot, which, few, many in found:
                with about(
                    f"{one.op.name}: with 2**31 elements, the {which} rows of {slot} are not those of a small call"
                ):
                    trial.assert_same(*(numbers(data, one.given[slot]) for data in (many, few)))
        tiled = large.tiled | {f"d{slot}" for slot in large.tiled}
    return None


def _beyond_int(subject: Subject, adapter: Framework, device: str) -> Item:
    """An elementwise operator on more than 2**31 elements: copies of a block, whose results are copies too."""
    where = f"2**31 elements, {adapter.name} {device}"
    dtype = min(subject.dtypes_of(adapter), key=lambda name: ITEMSIZE[name])
    case = replace(subject.plain, shapes={slot: shape and (BLOCK,) for slot, shape in subject.plain.shapes.items()})
    if not subject.op.elementwise or not subject.valid(case, dtype):
        return Item("shapes", where, UNAVAILABLE, "the operator is not elementwise")
    needed = 2 * (len(case.given) + len(subject.op.outputs)) * (MOST + BLOCK) * ITEMSIZE[dtype]
    if (free := adapter.free_memory(device)) < needed:
        return Item("shapes", where, UNAVAILABLE, f"needs {needed >> 30} GiB of memory, {free >> 30} are free")
    try:
        _compare_blocks(subject, adapter, device, subject.trial(case, dtype), MOST // BLOCK + 1)
    except Exception as error:
        arguments = {"frameworks": [adapter.frontend], "devices": [device], "huge": True}
        return Item("shapes", where, FAIL, failure=failure_of(subject, "shapes", error, case, dtype, **arguments))
    return Item("shapes", where, PASS, dtype)


def _compare_blocks(subject: Subject, adapter: Framework, device: str, trial: Trial, times: int) -> None:
    small = made(adapter, device, trial)
    large = {slot: None if t is None else adapter.tiled(t, times) for slot, t in small.items()}
    expected = adapter.results(subject.op.name, small, trial.case.attrs)
    got = adapter.results(subject.op.name, large, trial.case.attrs)
    for slot, one, many in zip(subject.op.outputs, expected, got, strict=True):
        n = one.shape[0]
        for i in range(times):
            same = np.array_equal(adapter.numpy(many[i * n : (i + 1) * n]), adapter.numpy(one), equal_nan=True)
            assert same, f"{slot} of {n * times} elements differs between {i * n} and {(i + 1) * n}"


# -------------------------------------------------------------------------------------------------------------- layouts


def layouts(subject: Subject) -> Iterator[Item]:
    """Strided and misaligned inputs give what contiguous ones give, results and gradients."""
    for adapter, device in subject.usable:
        if known := layouts_of(adapter):
            item = in_framework(subject, "layouts", adapter, device, _layouts, [subject.plain])
            yield replace(item, detail=", ".join(known)) if item.status == PASS else item
        else:
            why = f"{adapter.frontend} has no strided arrays"
            yield Item("layouts", f"{adapter.name} {device}", UNAVAILABLE, why)


def _layouts(subject: Subject, adapter: Framework, device: str, trial: Trial) -> None:
    for name, lay in layouts_of(adapter).items():
        with about(name):
            _try_layout(subject, adapter, device, trial, lay)


def _try_layout(subject: Subject, adapter: Framework, device: str, trial: Trial, lay: Layout) -> None:
    def laid(array: np.ndarray | None):
        if array is None:
            return None
        dtype = dtype_of(array, trial.dtype)
        return lay(adapter, device, dtype, array) if array.ndim else adapter.make(array, dtype, device)

    tensors = {slot: laid(x) for slot, x in trial.inputs.items()}
    if not subject.op.mutates:  # which a copy of them would keep from the test
        trial.assert_values(tuple(map(adapter.numpy, results_of(subject, adapter, tensors, trial))))
    if subject.op.has_gradient:
        dys = tuple(map(laid, trial.output_gradients))
        trial.assert_gradients(gradients_of(subject, adapter, trial, tensors, dys))


# ----------------------------------------------------------------------------------------------------- unusual shapes

_LENGTHS = 1, 3, 17, 33


def unusual_cases(subject: Subject) -> dict[str, list[Case]]:
    """Odd, empty, 0-dim, 4-d and huge shapes, by kind: cases like the plain one that the operator and the reference
    accept. They are made once, and kept with the subject."""
    if not subject.unusual:
        subject.unusual.update(_unusual_cases(subject))
    return subject.unusual


def _unusual_cases(subject: Subject) -> dict[str, list[Case]]:
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
        "0-dim": [scalar] if scalar and subject.valid(scalar, dtype) else [],
        "4-d": [case for case in [_deeper(plain)] if case and subject.valid(case, dtype)],
        "huge": [] if subject.quick else [case for case in huge if case],
    }


def varied_cases(subject: Subject) -> list[Case]:
    """The cases, and those of unusual shapes, the smallest first."""
    more = [case for kind, cases in unusual_cases(subject).items() if kind != "huge" for case in cases]
    return sorted({repr(case): case for case in (*subject.cases, *more)}.values(), key=elements)


def _scalar(case: Case) -> Case | None:
    """The case with 0-dim inputs; None if one of them is an index into an axis."""
    if _has_index(case):
        return None
    return replace(case, shapes={slot: None if shape is None else () for slot, shape in case.shapes.items()})


def _deeper(case: Case) -> Case | None:
    """The case with more leading axes, in each input that has as many as the one with the most; None if one is an index
    into an axis, which would be another one."""
    most = max(map(len, case.given.values()), default=0)
    if not 0 < most < 4 or _has_index(case):
        return None
    more = (2, 3, 1)[: 4 - most]
    return replace(case, shapes={s: (*more, *d) if d and len(d) == most else d for s, d in case.shapes.items()})


def _has_index(case: Case) -> bool:
    return any(n in shape for n in case.classes.values() for shape in case.given.values())
