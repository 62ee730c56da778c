"""Calls on the CPU from several threads at once: the same call, and different ones. The threads of one parity share
their inputs; the others have other numbers, because what one call leaves in a place that all share is wrong for
another."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np

from ..calls import placed, run_on_cpu
from ..frameworks import race
from ..subject import Subject
from .calls import Quiet, Repeated, other_numbers, quiet, repeated

THREADS = 4
SHARE = 0.5
"""The share of the time in which all threads run the same call."""
VISIT = 5
"""Repeats of a thread before the threads go to the next call."""


class _Pair:
    """A call on two sets of numbers."""

    def __init__(self, one: Repeated, other: Repeated) -> None:
        self.one, self.other = one, other

    @cached_property
    def known(self) -> tuple[Quiet, Quiet]:
        return quiet(self.one, _run_quietly, run_on_cpu), quiet(self.other, _run_quietly, run_on_cpu)

    @cached_property
    def shared(self) -> tuple[dict[str, np.ndarray], ...]:
        """The inputs that no call writes to, for all threads of a parity."""
        kept = self.one.kept()
        return tuple(
            {place: placed(data) for place, data in known.before.items() if place in kept} for known in self.known
        )


def soak(subjects: Sequence[Subject], seconds: float, repeats: int, seed: int, calls: list[Repeated]) -> None:
    """Repeats the calls of these operators, which it appends to ``calls``, until each has as many repeats or the time
    is over."""
    until = time.monotonic() + seconds
    pairs = [
        _Pair(one, other_numbers(one, subject, "cpu"))
        for subject in subjects
        for one in repeated(subject, "cpu", every_dtype=False)
    ]
    calls += [pair.one for pair in pairs]
    began = time.monotonic()
    for pair in pairs:
        try:
            _ = pair.known
        except Exception as error:  # whatever it is, the call is not right
            pair.one.wrong = f"{type(error).__name__}: {error}"
    good = [pair for pair in pairs if not pair.one.wrong]
    _same(good, began + SHARE * (until - began), repeats)
    _mixed(good, until, 2 * repeats, seed)


def _same(pairs: Sequence[_Pair], until: float, repeats: int) -> None:
    """All threads run the same call."""
    done = 0
    while done < repeats and (done == 0 or time.monotonic() < until):
        done += VISIT * THREADS
        for pair in pairs:
            if not pair.one.wrong:
                _together([pair], lambda i, calls: calls * VISIT, "threads in the same call")


def _mixed(pairs: Sequence[_Pair], until: float, repeats: int, seed: int) -> None:
    """Each thread runs all calls in an order of its own, at least once."""
    turn = 0
    while any(pair.one.repeats < repeats for pair in pairs if not pair.one.wrong):
        if turn and time.monotonic() >= until:
            break
        turn += 1

        def shuffled(i: int, calls: list[_Tried], turn: int = turn) -> list[_Tried]:
            return random.Random(f"{seed} {turn} {i}").sample(calls, len(calls))

        _together([pair for pair in pairs if not pair.one.wrong], shuffled, "threads in different calls")


class _Tried:
    """A call of a thread, with memory of its own for what is written, and how often it was run."""

    def __init__(self, pair: _Pair, thread: int) -> None:
        which = thread % 2
        self.pair, self.times, self.wrong = pair, 0, ""
        self._one = (pair.one, pair.other)[which]
        known, shared = pair.known[which], pair.shared[which]
        self._before = {place: placed(data) for place, data in known.before.items() if place not in shared}
        self._after = {place: np.frombuffer(data, np.uint8) for place, data in known.after.items()}
        self._held = shared | {place: placed(known.before[place]) for place in self._before}
        self._run = self._one.call.bound("cpu")
        self._addresses = self._one.addresses({place: array.ctypes.data for place, array in self._held.items()})

    def attempt(self) -> None:
        for place, data in self._before.items():
            self._held[place][...] = data
        try:
            self._run(0, 0, *self._addresses)
        except Exception as error:
            self.wrong = f"{type(error).__name__}: {error}"
            return
        self.times += 1
        places = self._one.results().items()
        differ = [slot for slot, place in places if not np.array_equal(self._held[place], self._after[place])]
        if differ:
            self.wrong = f"{', '.join(differ)} differ from a call in quiet"


def _together(pairs: Sequence[_Pair], ordered: Callable[[int, list[_Tried]], list[_Tried]], how: str) -> None:
    tried = [[_Tried(pair, i) for pair in pairs] for i in range(THREADS)]

    def work(i: int) -> int:
        for each in ordered(i, tried[i]):
            if not each.wrong:
                each.attempt()
        return 0

    race(work, THREADS)
    for each in (each for calls in tried for each in calls):
        each.pair.one.repeats += each.times
        if each.wrong and not each.pair.one.wrong:
            each.pair.one.wrong = f"{THREADS} {how}: {each.wrong}"


def _run_quietly(one: Repeated, before: Mapping[str, bytes]) -> dict[str, bytes]:
    held = {place: placed(data) for place, data in before.items()}
    one.call.bound("cpu")(0, 0, *one.addresses({place: array.ctypes.data for place, array in held.items()}))
    return {place: array.tobytes() for place, array in held.items()}
