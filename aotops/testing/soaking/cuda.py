"""Calls on a GPU, each right behind a kernel that still writes its inputs and right before one that writes over them
(kernels.cu). Threads with a stream each repeat calls at once, beside a stream that loads the device."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_ubyte, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from ..calls import POISON, EntryCall, filled
from ..subject import Subject
from .calls import Quiet, Repeated, beside, quiet, repeated

SLOTS = 32
PIECE = 16
ALIGNMENT = 256
WAITS = (0, 2_000, 8_000, 20_000)
"""Clock cycles that a writer waits before it writes: up to 11 us on an H200, where a launch takes 2."""
QUEUED, RECORDED, REPLAYS = 100, 50, 18
"""Repeats of a visit: queued from the host, and RECORDED in a CUDA graph that is replayed."""
STREAMS = 6
LOAD_BYTES = 1 << 28
"""More than the GPU's cache."""


class CudaError(RuntimeError):
    """A function of the CUDA runtime failed. The process can then use the GPU no more, or the call was refused."""


class _Slot(ctypes.Structure):
    _fields_ = [("at", c_void_p), ("before", c_void_p), ("after", c_void_p), ("pieces", c_int64)]


class _Plan(ctypes.Structure):
    _fields_ = [("slots", _Slot * SLOTS), ("n", c_int64), ("found", c_void_p), ("first", c_void_p)]


class _Wrong(ctypes.Structure):
    _fields_ = [
        ("found", c_ubyte * PIECE), ("expected", c_ubyte * PIECE), ("piece", c_int64), ("repeat", c_int64),
    ]  # fmt: skip


class _Found(ctypes.Structure):
    """The counters of the kernels of a visit."""

    _fields_ = [("counts", c_uint64 * (2 * SLOTS)), ("repeats", c_uint64), ("_", c_uint64), ("first", _Wrong * SLOTS)]


_ARGUMENTS: dict[str, list[Any]] = {
    "soak_device": [c_int, c_char_p, c_int],
    "soak_new_memory": [c_int64, POINTER(c_void_p)],
    "soak_free_memory": [c_void_p],
    "soak_new_stream": [POINTER(c_void_p)],
    "soak_free_stream": [c_void_p],
    "soak_copy": [c_void_p, c_void_p, c_int64, c_void_p],
    "soak_set": [c_void_p, c_int, c_int64, c_void_p],
    "soak_synchronize": [c_void_p],
    "soak_before": [POINTER(_Plan), c_int64, c_int, c_void_p],
    "soak_after": [POINTER(_Plan), c_int, c_void_p],
    "soak_load": [c_void_p, c_int64, c_int, c_int64, c_void_p],
    "soak_record": [c_void_p],
    "soak_recorded": [c_void_p, POINTER(c_void_p)],
    "soak_replay": [c_void_p, c_void_p],
    "soak_free_graph": [c_void_p],
}


class Kernels:
    """The functions of kernels.cu. They raise CudaError."""

    def __init__(self, library: str | Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.soak_error.restype, self._library.soak_error.argtypes = c_char_p, [c_int]
        for name, arguments in _ARGUMENTS.items():
            function = getattr(self._library, name)
            function.argtypes, function.errcheck = arguments, self._check
            setattr(self, name.removeprefix("soak_"), function)

    def _check(self, status: int, function: Any, given: object) -> None:
        if status:
            raise CudaError(f"{function.__name__}: {self._library.soak_error(status).decode()}")

    def __getattr__(self, name: str) -> Callable[..., None]:  # for type checkers: __init__ sets them all
        raise AttributeError(name)


@cache
def kernels() -> Kernels:
    """Compiles kernels.cu for the GPUs of this machine.

    Raises:
        CompileError: there is no nvcc.
    """
    from aotops.compiler import compile

    return Kernels(compile(Path(__file__).with_name("kernels.cu"), name="soak", kind="cu"))


def device_name(known: Kernels) -> str:
    name = ctypes.create_string_buffer(256)
    known.device(0, name, len(name))
    return name.value.decode()


# -------------------------------------------------------------------------------------------------------------- a call


class Stream:
    """A stream with memory, which one call after the other uses."""

    device = "cuda"

    def __init__(self, known: Kernels, seed: int) -> None:
        self._known, self._random = known, random.Random(seed)
        known.device(0, ctypes.create_string_buffer(256), 256)
        handle = c_void_p()
        known.new_stream(byref(handle))
        self._stream = handle.value or 0
        self._memory, self._bytes = 0, 0
        self._found = self._new_memory(ctypes.sizeof(_Found))

    def _new_memory(self, size: int) -> int:
        memory = c_void_p()
        self._known.new_memory(size, byref(memory))
        return memory.value or 0

    def close(self) -> None:
        self._known.synchronize(self._stream)
        for memory in filter(None, (self._memory, self._found)):
            self._known.free_memory(memory)
        self._known.free_stream(self._stream)

    # ------------------------------------------------------------------------------------------------------- in quiet

    def run_quietly(self, one: Repeated, before: Mapping[str, bytes]) -> dict[str, bytes]:
        places, size = self._places(one, before)
        self._reserve(size)
        for place, data in before.items():
            self._copy_to(self._memory + places[place], _pieces(one, place, data))
        at = {place: self._memory + start + one.offset(place) for place, start in places.items()}
        self._bound(one)(0, self._stream, *one.addresses(at))
        self._known.synchronize(self._stream)
        return {place: self._copy_from(at[place], len(data)) for place, data in before.items()}

    def _entry(self, call: EntryCall, poison: int) -> dict[str, bytes]:
        """A forward, whose results a backward takes."""
        plain = Repeated("", "forward", None, "", lambda: call)  # type: ignore[arg-type]
        return self.run_quietly(plain, filled(call, self._entry, poison))

    def quiet(self, one: Repeated) -> Quiet:
        return quiet(one, self.run_quietly, self._entry)

    # ------------------------------------------------------------------------------------------------------- repeats

    def repeat(self, one: Repeated, known: Quiet, queued: int, recorded: int, replays: int) -> int:
        """Repeats a call, queued and then as a CUDA graph; returns how many times. Sets ``one.wrong``."""
        plan, at = self._planned(one, known)
        run = self._bound(one)
        self._queue(plan, run, at, queued, first=True)
        done = queued
        if replays:
            graph = self._record(plan, run, at, recorded)
            for _ in range(replays):
                self._known.replay(graph, self._stream)
            self._known.synchronize(self._stream)
            self._known.free_graph(graph)
            done += recorded * replays
        self._read(one, known, plan, done)
        return done

    def _planned(self, one: Repeated, known: Quiet) -> tuple[_Plan, tuple[int, ...]]:
        places, size = self._places(one, known.before)
        assert len(places) <= SLOTS, f"{one.call.op.name}: {len(places)} tensors, expected at most {SLOTS}"
        self._reserve(3 * size)
        plan = _Plan(n=len(places), found=self._found, first=self._found + _Found.first.offset)
        compared = set(known.after)
        written = set(one.call.inputs) | set(one.call.op.inputs)
        for slot, (place, start) in zip(plan.slots, places.items(), strict=False):
            before = _pieces(one, place, known.before[place])
            slot.at, slot.pieces = self._memory + start, len(before) // PIECE
            slot.before = self._memory + size + start if place in written else None
            slot.after = self._memory + 2 * size + start if place in compared else None
            if slot.before:
                self._copy_to(slot.before, before)
            if slot.after:
                self._copy_to(slot.after, _pieces(one, place, known.after[place]))
        self._known.set(self._memory, POISON, size, self._stream)
        self._known.set(self._found, 0, ctypes.sizeof(_Found), self._stream)
        at = {place: self._memory + start + one.offset(place) for place, start in places.items()}
        return plan, one.addresses(at)

    def _queue(self, plan: _Plan, run: Callable[..., None], at: Sequence[int], times: int, early: int = 1,
               first: bool = False) -> None:  # fmt: skip
        before, after, stream = self._known.before, self._known.after, self._stream
        for i in range(times):
            before(plan, self._random.choice(WAITS), 0 if first and i == 0 else 1, stream)
            run(0, stream, *at)
            after(plan, early, stream)

    def _record(self, plan: _Plan, run: Callable[..., None], at: Sequence[int], times: int) -> int:
        """A CUDA graph. Behind what is not a kernel, a graph may have no kernel that starts early."""
        for early in (1, 0):
            graph = c_void_p()
            self._known.record(self._stream)
            error: Exception | None = None
            try:
                self._queue(plan, run, at, times, early)
            except Exception as caught:
                error = caught
            try:
                self._known.recorded(self._stream, byref(graph))
                if error is None and graph.value:
                    return graph.value
            except CudaError as caught:
                error = error or caught
            if graph.value:
                self._known.free_graph(graph)
        assert error is not None
        raise error

    def _read(self, one: Repeated, known: Quiet, plan: _Plan, expected: int) -> None:
        """The counts of kernels.cu."""
        found = _Found.from_buffer_copy(self._copy_from(self._found, ctypes.sizeof(_Found)))
        if found.repeats != expected:
            raise AssertionError(f"{one}: {found.repeats} repeats ran, expected {expected}")
        of_place = {place: slot for slot, place in one.results().items()}
        parts = []
        for i, place in enumerate(known.before):
            name, wrong, late = of_place.get(place, place), found.counts[2 * i], found.counts[2 * i + 1]
            if wrong:
                parts.append(f"{name}: {wrong} pieces of {PIECE} bytes differ from a call in quiet, {_first(found, i)}")
            if late:
                parts.append(f"{name}: {late} pieces of {PIECE} bytes were written late")
        if parts and not one.wrong:
            one.wrong = "; ".join([f"in {expected} repeats, {parts[0]}", *parts[1:], *self._changed(one, known, plan)])

    def _changed(self, one: Repeated, known: Quiet, plan: _Plan) -> Iterator[str]:
        """The device's copies, from which inputs are written and with which results are compared: nobody writes to
        them but one whose addresses are wrong."""
        for slot, place in zip(plan.slots, known.before, strict=False):
            for at, data, role in (
                (slot.before, known.before, "written before each repeat"),
                (slot.after, known.after, "expected after it"),
            ):
                if at and self._copy_from(at, slot.pieces * PIECE) != _pieces(one, place, data[place]):
                    yield f"{place}: the device's copy of what is {role} has changed"

    def _bound(self, one: Repeated) -> Callable[..., None]:
        return one.call.bound(self.device)

    # -------------------------------------------------------------------------------------------------------- memory

    @staticmethod
    def _places(one: Repeated, data: Mapping[str, bytes]) -> tuple[dict[str, int], int]:
        """Where the memory of each place starts, and where that of the last ends."""
        places, end = {}, 0
        for place in data:
            places[place] = end
            end += -(-(one.offset(place) + len(data[place]) + 1) // ALIGNMENT) * ALIGNMENT
        return places, end

    def _reserve(self, size: int) -> None:
        if size <= self._bytes:
            return
        if self._memory:
            self._known.free_memory(self._memory)
        self._bytes = max(size, 2 * self._bytes, 1 << 24)
        self._memory = self._new_memory(self._bytes)

    def _copy_to(self, address: int, data: bytes) -> None:
        if data:
            self._known.copy(address, ctypes.cast(c_char_p(data), c_void_p), len(data), self._stream)

    def _copy_from(self, address: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(max(size, 1))
        if size:
            self._known.copy(data, address, size, self._stream)
        return data.raw[:size]


def _first(found: _Found, slot: int) -> str:
    first = found.first[slot]
    return (
        f"first in repeat {first.repeat + 1}, piece {first.piece}: {bytes(first.found).hex()}, "
        f"expected {bytes(first.expected).hex()}"
    )


def _pieces(one: Repeated, place: str, data: bytes) -> bytes:
    """Whole pieces. Nobody writes what is before and behind the data."""
    offset = one.offset(place)
    return bytes([POISON]) * offset + data + bytes([POISON]) * (-(offset + len(data)) % PIECE)


# ------------------------------------------------------------------------------------------------------------- threads


def loaded(known: Kernels, seed: int) -> AbstractContextManager[None]:
    """Kernels on a stream of their own take multiprocessors, cache and bandwidth, at random."""

    def work(ended: threading.Event) -> None:
        stream, draw = Stream(known, seed), random.Random(seed)
        stream._reserve(LOAD_BYTES)
        while not ended.is_set():
            for _ in range(4):
                blocks, cycles = draw.choice((16, 66, 132, 264)), draw.choice((5_000, 20_000, 100_000))
                known.load(stream._memory, LOAD_BYTES, blocks, cycles, stream._stream)
            known.synchronize(stream._stream)
            time.sleep(draw.choice((0, 1e-4, 1e-3)))
        stream.close()

    return beside(work)


def soak(subjects: Sequence[Subject], seconds: float, repeats: int, seed: int, calls: list[Repeated]) -> None:
    """Repeats the calls of these operators, which it appends to ``calls``, until each has as many repeats or the time
    is over: visit by visit, and first those that were not visited yet."""
    until, known = time.monotonic() + seconds, kernels()
    calls += [one for subject in subjects for one in repeated(subject, "cuda")]
    waiting: SimpleQueue[Repeated] = SimpleQueue()
    for one in random.Random(seed).sample(calls, len(calls)):
        waiting.put(one)
    found: dict[int, Quiet] = {}

    def work(i: int) -> None:
        stream = Stream(known, seed + i)
        while time.monotonic() < until:
            try:
                one = waiting.get_nowait()
            except Empty:  # other threads have the calls that are left
                break
            try:
                if id(one) not in found:
                    found[id(one)] = stream.quiet(one)
                left = max(0, repeats - one.repeats)
                replays = min(REPLAYS, -(-max(0, left - QUEUED) // RECORDED))
                one.repeats += stream.repeat(one, found[id(one)], min(QUEUED, left), RECORDED, replays)
            except Exception as error:  # whatever it is, the call is not right
                one.wrong = f"{type(error).__name__}: {error}"
            if one.repeats < repeats and not one.wrong:
                waiting.put(one)
        stream.close()

    with loaded(known, seed + STREAMS), ThreadPoolExecutor(STREAMS) as threads:
        list(threads.map(work, range(STREAMS)))
