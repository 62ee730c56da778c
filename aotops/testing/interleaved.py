"""A race, without luck: a call is stopped after a write to memory that all calls share, and another one runs meanwhile.

The library's static storage is made read-only, so that each write of a call to it raises SIGSEGV. The handler allows
the write and lets the thread execute that one instruction (the trap flag, SIGTRAP). After the write that was chosen,
another thread runs the other call from its beginning to its end. Whatever a call keeps in static storage then holds
the other call's values, as it may whenever two threads call the operator. Memory of the heap is not watched.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from contextlib import contextmanager
from signal import SIGSEGV, SIGTRAP
from typing import NamedTuple

import numpy as np

from aotops.elf import Elf

from .calls import POISON, EntryCall, filled, placed, run_on_cpu
from .plan import PAGE, PROT_READ, PROT_READ_WRITE, protect

STOPS = 8
"""Writes after which the other call is tried: the first, the last, and some between."""
MOST_WRITES = 1024
"""Writes of one call that are counted: each costs about 20 us."""
PATIENCE = 0.25
"""Seconds for the other call, which waits where the call that was stopped holds a lock."""

SA_SIGINFO = 4
ADDRESS, FLAGS, TRAP_FLAG = 16, 176, 0x100
"""Where siginfo_t has the address, and ucontext_t the flags of an x86-64 processor."""

PT_LOAD, PT_GNU_RELRO, PF_W = 1, 0x6474E552, 2
PAGES = ~(PAGE - 1)


class Disturbed(NamedTuple):
    slot: str
    writes: int
    """How often the call writes to static storage."""
    victim: bool
    """Whether the result is that of the call that was stopped, or of the other."""


def disturbed(one: EntryCall, other: EntryCall) -> Disturbed | None:
    """The first result that is not what the same call gives alone; None if there is none."""
    if platform.machine() != "x86_64":
        return None
    ranges = static_storage(str(one.op.library.path))
    if not ranges:
        return None
    calls = [_Prepared(one), _Prepared(other)]
    alone = [call.results() for call in calls]  # which also binds symbols, and sets up what is set up once
    watch = _Watch(ranges)
    with watch.installed(), ThreadPoolExecutor(1) as threads:
        threads.submit(int).result()
        writes = watch.run(calls[0].results, lambda: None, 0)
        if calls[0].found != alone[0] or writes == 0:
            return None  # results that differ from call to call are for another check
        for stop in sorted({max(1, round(i * writes / (STOPS - 1))) for i in range(STOPS)}):
            waiting: list[Future] = []
            watch.run(calls[0].results, lambda waiting=waiting: _meanwhile(threads, calls[1], waiting), stop)
            for future in waiting:
                future.result()
            for call, expected in zip(calls, alone, strict=True):
                for slot, data in (call.found or {}).items():
                    if data != expected[slot]:
                        return Disturbed(slot, writes, call is calls[0])
    return None


def _meanwhile(threads: ThreadPoolExecutor, call: _Prepared, waiting: list[Future]) -> None:
    future = threads.submit(call.results)
    try:
        future.result(timeout=PATIENCE)
    except TimeoutError:
        waiting.append(future)


class _Prepared:
    """A call and its memory."""

    def __init__(self, one: EntryCall) -> None:
        self.one, self.before = one, filled(one, run_on_cpu, POISON)
        self.buffers = {slot: placed(data) for slot, data in self.before.items()}
        self.found: dict[str, bytes] | None = None

    def results(self) -> dict[str, bytes]:
        for slot, data in self.before.items():
            self.buffers[slot][...] = np.frombuffer(data, np.uint8)
        self.one.run("cpu", {slot: buffer.ctypes.data for slot, buffer in self.buffers.items()})
        self.found = {slot: self.buffers[slot].tobytes() for slot in self.one.op.results if slot in self.before}
        return self.found


def static_storage(path: str) -> list[tuple[int, int]]:
    """The addresses of a loaded library's variables: those of its segments that stay writable."""
    with open("/proc/self/maps") as file:
        lines = [line.split(maxsplit=5) for line in file]
    real = os.path.realpath(path)
    starts = [int(line[0].split("-")[0], 16) for line in lines if len(line) > 5 and line[5].rstrip("\n") == real]
    if not starts:
        return []
    segments = Elf(path).segments
    base = min(starts) - min(s.start for s in segments if s.kind == PT_LOAD) & PAGES
    fixed = max((s.start + s.in_memory for s in segments if s.kind == PT_GNU_RELRO), default=0)
    return [
        ((base + max(s.start, fixed)) & PAGES, -(-(base + s.start + s.in_memory) // PAGE) * PAGE)
        for s in segments
        if s.kind == PT_LOAD and s.flags & PF_W and s.start + s.in_memory > fixed
    ]


# ------------------------------------------------------------------------------------------------------------- signals

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Action(ctypes.Structure):
    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint64 * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


class _Watch:
    """Stops a call after a write to the addresses. ctypes gives up the interpreter's lock during a call, so a handler
    may be a Python function: the thread was in the library's code."""

    def __init__(self, ranges: list[tuple[int, int]]) -> None:
        self._ranges = ranges
        self._handlers = {SIGSEGV: _Handler(self._on_fault), SIGTRAP: _Handler(self._on_trap)}
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._writes, self._stop, self._then, self._watching = 0, 0, lambda: None, False

    def run(self, call, then, stop: int) -> int:
        """Runs the call, and ``then`` after its write number ``stop``. Returns how many writes there were."""
        self._writes, self._stop, self._then, self._watching = 0, stop, then, True
        self._protect(PROT_READ)
        try:
            call()
        finally:
            self._watching = False
            self._protect(PROT_READ_WRITE)
        return self._writes

    @contextmanager
    def installed(self) -> Iterator[None]:
        before = {number: self._install(number, handler) for number, handler in self._handlers.items()}
        try:
            yield
        finally:
            for number, action in before.items():
                self._libc.sigaction(number, ctypes.byref(action), None)

    def _install(self, number: int, handler) -> _Action:
        action, before = _Action(ctypes.cast(handler, ctypes.c_void_p), flags=SA_SIGINFO), _Action()
        if self._libc.sigaction(number, ctypes.byref(action), ctypes.byref(before)):
            raise OSError(ctypes.get_errno(), "sigaction")
        return before

    def _protect(self, protection: int) -> None:
        for start, end in self._ranges:
            protect(start, end - start, protection)

    def _on_fault(self, number: int, info: int, context: int) -> None:
        address = ctypes.c_uint64.from_address(info + ADDRESS).value
        if not any(start <= address < end for start, end in self._ranges):
            self._libc.sigaction(SIGSEGV, ctypes.byref(_Action()), None)  # the access ends the process now
            return
        self._protect(PROT_READ_WRITE)
        ctypes.c_uint64.from_address(context + FLAGS).value |= TRAP_FLAG

    def _on_trap(self, number: int, info: int, context: int) -> None:
        ctypes.c_uint64.from_address(context + FLAGS).value &= ~TRAP_FLAG
        self._writes += 1
        if self._writes == self._stop:
            self._then()
        elif self._watching and self._writes < MOST_WRITES:
            self._protect(PROT_READ)
