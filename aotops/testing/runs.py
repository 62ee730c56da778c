"""Checks that results have the same bits: from call to call, and from several threads at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from .calls import EntryCall, Runner, calls_of
from .frameworks import race
from .plan import Plan
from .report import Item
from .row import Case
from .search import on_devices
from .subject import LARGEST, Subject, elements
from .trial import Trial

TIMES, THREADS = 4, 4
SECONDS = 20
"""For a call in the midst of another. Calls that wait for each other tell nothing."""


def repeat(subject: Subject) -> Iterator[Item]:
    """Calls on the same inputs give the same bits."""
    yield from on_devices(subject, "same bits", _repeated, _cases(subject))


def threads(subject: Subject) -> Iterator[Item]:
    """Calls from several threads at once give the bits of one call alone; on the CPU also a call that is stopped while
    another runs."""
    yield from on_devices(subject, "threads", _raced, _cases(subject))


def _cases(subject: Subject) -> list[Case]:
    largest = [case for case in subject.cases if elements(case) <= LARGEST][-1:]
    return [subject.plain, *(case for case in largest if case is not subject.plain)]


def _results(one: EntryCall, run: Runner) -> dict[str, bytes]:
    after = run(one, 0xFF)
    return {slot: after[slot] for slot in one.op.results if slot in after}


def _repeated(subject: Subject, device: str, run: Runner, trial: Trial) -> None:
    for one in calls_of(subject.op, trial, device):
        first = _results(one, run)
        for time in range(1, TIMES):
            differ = [slot for slot, data in _results(one, run).items() if data != first[slot]]
            assert not differ, f"{one.op.name}: {', '.join(differ)} of call {time + 1} differs from that of call 1"


def _differing(calls: Sequence[EntryCall], alone: Sequence[dict[str, bytes]], run: Runner, i: int) -> int:
    return sum(_results(calls[i], run) != alone[i] for _ in range(TIMES))


def _raced(subject: Subject, device: str, run: Runner, trial: Trial) -> None:
    # other numbers in each thread: what one leaves in a place that all share is wrong for another
    trials = [Trial(trial.row, trial.case, trial.dtype, f"{trial.seed} thread {i}") for i in range(THREADS)]
    for calls in zip(*(calls_of(subject.op, one, device) for one in trials), strict=True):
        if device == "cpu":
            _disturb(subject, calls[0], calls[1])
        alone = [_results(one, run) for one in calls]
        wrong = race(partial(_differing, calls, alone, run), THREADS)
        what = f"{wrong} of {THREADS * TIMES} calls from {THREADS} threads differ from the same call alone"
        assert not wrong, f"{calls[0].op.name}: {what}"


def _disturb(subject: Subject, one: EntryCall, other: EntryCall) -> None:
    """One call runs in the midst of another: after each of some writes to storage that both share."""
    outcome = subject.worker.run(Plan([one], ["interleaved"], others=[other]), SECONDS)
    for found in outcome.results.values():
        if found:
            which = "a call that another interrupts" if found.victim else "a call in the midst of another"
            shared = f"each call writes to the library's static storage, {found.writes} times"
            raise AssertionError(f"{one.op.name}: {found.slot} of {which} differs from the same call alone; {shared}")
