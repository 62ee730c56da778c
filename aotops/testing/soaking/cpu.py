"""Calls on the CPU from several threads at once: the same call, and different ones. The threads of one parity share
their inputs; the others have other numbers, because what one call leaves in a place that all share is wrong for
another."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np

from aotops.call import addresses

from ..calls import run_on_cpu
from ..frameworks import race
from .calls import POISON, Quiet, Repeated, differing, quiet

SHARE = 0.5
"""The share of the time in which all threads run the same call."""
VISIT = 5
"""Repeats of a thread before the threads go to the next call."""
ALIGNMENT = 64


class Pair:
    """A call on two sets of numbers."""

    def __init__(self, one: Repeated, other: Repeated) -> None:
        self.one, self.other = one, other

    @cached_property
    def known(self) -> tuple[Quiet, Quiet]:
        return _quiet(self.one), _quiet(self.other)

    @cached_property
    def shared(self) -> tuple[dict[str, np.ndarray], ...]:
        """The inputs that no call writes to, for all threads of a parity."""
        kept = set(self.one.call.op.inputs) - set(self.one.call.op.mutates) - set(self.one.shared.values())
        return tuple(
            {place: _array(data) for place, data in known.before.items() if place in kept} for known in self.known
        )


class _Call:
    """A call of one thread, with memory of its own for what is written."""

    def __init__(self, pair: Pair, thread: int) -> None:
        which = thread % 2
        self._one = (pair.one, pair.other)[which]
        known, shared = pair.known[which], pair.shared[which]
        self._before = {place: _array(data) for place, data in known.before.items() if place not in shared}
        self._expected = {place: np.frombuffer(data, np.uint8) for place, data in known.after.items()}
        self._held = shared | {place: _array(data.tobytes()) for place, data in self._before.items()}
        at = {place: array.ctypes.data for place, array in self._held.items()}
        self._run, self._addresses = _bound(self._one), self._one.addresses(at)

    def __call__(self) -> list[str]:
        """The slots that are wrong after a call."""
        for place, data in self._before.items():
            self._held[place][...] = data
        self._run(0, 0, *self._addresses)
        return differing(self._one, self._held, self._expected)


def soak(pairs: Sequence[Pair], seconds: float, repeats: int, threads: int, seed: int) -> None:
    """Repeats the calls, until each has as many repeats or the time is over."""
    started = time.monotonic()
    for pair in pairs:
        _settled(pair)
    good = [pair for pair in pairs if not pair.one.wrong]
    _same(good, started + SHARE * seconds, repeats, threads)
    _mixed(good, started + seconds, 2 * repeats, threads, seed)


def _settled(pair: Pair) -> None:
    try:
        _ = pair.known
    except Exception as error:  # whatever it is, the call is not right
        pair.one.wrong = f"{type(error).__name__}: {error}"


def _same(pairs: Sequence[Pair], until: float, repeats: int, threads: int) -> None:
    """All threads run the same call."""
    done = 0
    while done < repeats and (done == 0 or time.monotonic() < until):
        done += VISIT * threads
        for pair in pairs:
            if not pair.one.wrong:
                _together([pair], threads, lambda calls: [calls[0]] * VISIT, "threads in the same call")


def _mixed(pairs: Sequence[Pair], until: float, repeats: int, threads: int, seed: int) -> None:
    """Each thread runs all calls in an order of its own, at least once."""
    first = seed
    while any(pair.one.repeats < repeats for pair in pairs if not pair.one.wrong):
        if seed > first and time.monotonic() >= until:
            break
        seed += 1
        lock, order = threading.Lock(), random.Random(seed)

        def shuffled(calls: list[_Tried], lock=lock, order=order) -> list[_Tried]:
            with lock:
                return order.sample(calls, len(calls))

        _together([pair for pair in pairs if not pair.one.wrong], threads, shuffled, "threads in different calls")


class _Tried:
    """A call of a thread, and how often it was run."""

    def __init__(self, pair: Pair, thread: int) -> None:
        self.pair, self.run, self.times, self.wrong = pair, _Call(pair, thread), 0, ""

    def attempt(self) -> None:
        try:
            slots = self.run()
        except Exception as error:
            self.wrong = f"{type(error).__name__}: {error}"
            return
        self.times += 1
        if slots:
            self.wrong = f"{', '.join(slots)} differ from a call in quiet"


def _together(pairs: Sequence[Pair], threads: int, ordered: Callable[[list[_Tried]], list[_Tried]], how: str) -> None:
    tried = [[_Tried(pair, i) for pair in pairs] for i in range(threads)]
    start = threading.Barrier(threads)

    def work(i: int) -> int:
        start.wait()
        for each in ordered(tried[i]):
            if not each.wrong:
                each.attempt()
        return 0

    race(work, threads)
    for each in (each for calls in tried for each in calls):
        each.pair.one.repeats += each.times
        if each.wrong and not each.pair.one.wrong:
            each.pair.one.wrong = f"{threads} {how}: {each.wrong}"


# -------------------------------------------------------------------------------------------------------------- a call


def _quiet(one: Repeated) -> Quiet:
    return quiet(one, _run_quietly, run_on_cpu)


def _run_quietly(one: Repeated, before: Mapping[str, bytes]) -> dict[str, bytes]:
    held = {place: _array(data) for place, data in before.items()}
    _bound(one)(0, 0, *one.addresses({place: array.ctypes.data for place, array in held.items()}))
    return {place: array.tobytes() for place, array in held.items()}


def _array(data: bytes) -> np.ndarray:
    """Aligned, with room behind it."""
    memory = np.full(len(data) + 2 * ALIGNMENT, POISON, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    array = memory[start : start + len(data)]
    array[...] = np.frombuffer(data, np.uint8)
    return array


def _bound(one: Repeated) -> Callable[..., None]:
    entry = one.call
    return addresses(entry.op, entry.attrs, "cpu", tuple(entry.specs[slot] for slot in entry.op.slots))
