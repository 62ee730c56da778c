"""Accesses of memory: out of bounds, outputs that are not written, inputs that are."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from .calls import ALIGNMENT, EntryCall, Runner, calls_of, numbers
from .dtypes import ITEMSIZE
from .inputs import varied_cases
from .plan import Plan
from .report import FAIL, PASS, UNAVAILABLE, Item
from .row import Case
from .search import counted, failure_of, on_devices, searched
from .subject import LARGEST, SMALL, Subject, elements
from .tolerances import about
from .trial import Trial
from .worker import Ended, Worker

Explained = Callable[[Subject, EntryCall, Ended], str]

# ------------------------------------------------------------------------------------------------------- out of bounds


def bounds(subject: Subject) -> Iterator[Item]:
    """In another process, with pages around each buffer that cannot be accessed."""
    if "cpu" not in subject.devices:
        return
    yield _guarded(subject, "bounds", ("end", "start"), _explained)


def _guarded(subject: Subject, check: str, ways: Sequence[str], explained: Explained) -> Item:
    """The item of a check that a call fails by ending the process."""
    attempt = partial(_ends, subject, ways, explained)
    return searched(subject, check, "cpu", attempt, subject.pairs(_small_enough(subject)), devices=["cpu"])


def _ends(subject: Subject, ways: Sequence[str], explained: Explained, trial: Trial) -> None:
    calls = calls_of(subject.op, trial, "cpu")
    if ended := subject.worker.run(Plan(calls, ways)).ended:
        raise Crash(partial(explained, subject, calls[ended.number], ended))


class Crash(AssertionError):
    """A call ended its process. The explanation, which takes more calls, is for the smallest case."""

    def __str__(self) -> str:
        return self.args[0]()


def _small_enough(subject: Subject) -> list[Case]:
    """The cases that other processes are given."""
    return [case for case in varied_cases(subject) if elements(case) <= LARGEST]


def _explained(subject: Subject, call: EntryCall, ended: Ended) -> str:
    """Which buffer was accessed, and how: found by guarding one at a time."""

    def ends(slots: Iterable[str], readable: bool = False) -> bool:
        return subject.worker.run(Plan([call], [ended.way], frozenset(slots), readable)).ended is not None

    op = call.op.name
    if not ended.reason.startswith("SIG"):
        return f"{op}: {ended.reason}"
    if ends(()):
        return f"{op}: {ended.reason} with buffers that are aligned to their dtype, and pages around them"
    where = "past the end" if ended.way == "end" else "before the start"
    for slot in call.given:
        if ends({slot}):
            return f"{op} {'writes' if ends({slot}, readable=True) else 'reads'} {where} of {slot}"
    return f"{op} accesses memory {where} of its buffers"


# ------------------------------------------------------------------------------------------------------ what is written

_POISONS = 0xFF, 0x55


def written(subject: Subject) -> Iterator[Item]:
    """With outputs and workspace that held other bytes before each of two calls, the results are the same."""
    yield from on_devices(subject, "outputs written", _written, _small_enough(subject))


def unchanged(subject: Subject) -> Iterator[Item]:
    """The inputs are what they were; on the CPU they also were all the time: they are in pages that cannot be written,
    in another process."""
    if "cpu" in subject.devices:
        yield _guarded(subject, "inputs unchanged", ("read-only",), _written_to)
    yield from on_devices(subject, "inputs unchanged", _unchanged, _small_enough(subject), ("cuda",))


def _written_to(subject: Subject, call: EntryCall, ended: Ended) -> str:
    for slot in call.op.inputs:
        if slot in call.given and subject.worker.run(Plan([call], [ended.way], frozenset({slot}))).ended:
            return f"{call.op.name} writes to its input {slot}"
    return f"{call.op.name}: {ended.reason} where its inputs cannot be written"


def _written(subject: Subject, device: str, run: Runner, trial: Trial) -> None:
    for one in calls_of(subject.op, trial, device):
        first, again, second = (run(one, poison) for poison in (_POISONS[0], *_POISONS))
        for slot in one.op.results:
            # what differs from call to call in any case is for another check
            if slot in one.given and first[slot] == again[slot] != second[slot]:
                raise AssertionError(_unwritten(one, slot, first[slot], second[slot]))


def _unwritten(one: EntryCall, slot: str, first: bytes, second: bytes) -> str:
    spec = one.given[slot]
    size = ITEMSIZE[spec.dtype]
    a, b = (np.frombuffer(data, np.uint8).reshape(-1, size) for data in (first, second))
    differ = np.flatnonzero((a != b).any(1))
    at = tuple(int(i) for i in np.unravel_index(differ[0], spec.shape))
    if all((x[differ] == poison).all() for x, poison in zip((a, b), _POISONS, strict=True)):
        return f"{one.op.name} does not write {len(differ)} of {len(a)} elements of {slot}, the first at {at}"
    return (
        f"{one.op.name}: {len(differ)} of {len(a)} elements of {slot}, the first at {at}, depend on what its "
        f"outputs or workspace held before the call: {numbers(first, spec)[at]!r} and {numbers(second, spec)[at]!r}"
    )


def _unchanged(subject: Subject, device: str, run: Runner, trial: Trial) -> None:
    for one in calls_of(subject.op, trial, device):
        after = run(one, _POISONS[0])
        for slot, before in one.inputs.items():
            if slot not in subject.op.mutates:
                assert after[slot] == before, f"{one.op.name} writes to its input {slot}"


# ----------------------------------------------------------------------------------------------------------- alignment


def alignment(subject: Subject) -> Iterator[Item]:
    """The results are the same wherever a tensor starts: inputs, outputs and workspace, at each multiple of the size of
    an element up to a cache line's."""
    yield from _in_worker(subject, "alignment", _aligned)


def _aligned(subject: Subject, trial: Trial) -> None:
    """As far as rounding goes: a sum may be taken in another order."""
    for one, places in _found(subject, trial, "misaligned"):
        for slot, offset, result, aligned, got in places:
            with about(f"{one.op.name}: {result} with {slot} {offset} bytes past a multiple of {ALIGNMENT}"):
                trial.assert_same(*(numbers(data, one.given[result]) for data in (got, aligned)))


# --------------------------------------------------------------------------------------------------------------- leaks


def leaks(subject: Subject) -> Iterator[Item]:
    """The memory that malloc has given out, and that is mapped, does not grow with each call."""
    yield from _in_worker(subject, "leaks", _kept)


def _kept(subject: Subject, trial: Trial) -> None:
    for one, size in _found(subject, trial, "leaks"):
        assert not size, f"{one.op.name} keeps {size} bytes of memory in each call"


def _in_worker(subject: Subject, check: str, attempt: Callable[[Subject, Trial], None]) -> Iterator[Item]:
    """On the plain case, and the largest of those that are small."""
    if "cpu" not in subject.devices:
        return
    small = [case for case in varied_cases(subject) if elements(case) <= SMALL and case is not subject.plain][-1:]
    pairs = subject.pairs([subject.plain, *small])
    yield searched(subject, check, "cpu", partial(attempt, subject), pairs, devices=["cpu"])


def _found(subject: Subject, trial: Trial, way: str) -> Iterator[tuple[EntryCall, Any]]:
    """The worker's findings for each call."""
    calls = calls_of(subject.op, trial, "cpu")
    outcome = subject.worker.run(Plan(calls, [way]))
    if outcome.ended:
        raise AssertionError(f"{calls[outcome.ended.number].op.name}: {outcome.ended.reason}")
    for raised in outcome.raised.values():
        raise AssertionError(f"{raised.kind}: {raised.text}")
    yield from ((calls[at.number], result) for at, result in outcome.results.items())


# ------------------------------------------------------------------------------------------------------------ sanitizer


def sanitizer(subject: Subject) -> Iterator[Item]:
    """compute-sanitizer's memcheck of the calls on a GPU."""
    if not subject.sanitize:
        return
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    why = "compute-sanitizer is not installed" if not tool else None if subject.torch_on_gpu else "torch finds no GPU"
    why = why if "cuda" in subject.devices else "the library has no CUDA entry, or there is no GPU"
    if why or tool is None:
        yield Item("sanitizer", "cuda", UNAVAILABLE, why or "")
        return
    pairs = subject.pairs(_small_enough(subject))
    trials = ((case, dtype, subject.trial(case, dtype)) for case, dtype in pairs)
    planned = [(case, dtype, one) for case, dtype, trial in trials for one in calls_of(subject.op, trial, "cuda")]
    with tempfile.NamedTemporaryFile("r") as log:
        # an allocation for each buffer: the tool knows no others
        worker = Worker(
            tool, "--tool=memcheck", "--error-exitcode=9", "--log-file", log.name, PYTORCH_NO_CUDA_MEMORY_CACHING="1"
        )
        ended = worker.run(Plan([one for *_, one in planned], ["cuda"])).ended
        code, said = worker.close(), log.read().strip()
    if ended is None and not code:
        yield Item("sanitizer", "cuda", PASS, counted(pairs))
        return
    case, dtype, _ = planned[ended.number if ended else -1]
    fault = AssertionError(said or (ended.reason if ended else f"exit code {code}"))
    failure = failure_of(subject, "sanitizer", fault, case, dtype, devices=["cuda"], sanitize=True)
    yield Item("sanitizer", "cuda", FAIL, failure=failure)
