"""Runs calls in a process of their own, where a fault of a kernel ends nothing else.

    python -m aotops.testing.guarded < plans

worker.py starts it, writes plans to it, and reads its answers: ``At`` before each call, then ``Raised`` or ``Found``,
and None after the last. Whatever a kernel prints goes to stderr.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from . import huge
from .calls import ALIGNMENT, POISON, EntryCall, filled, run_at, run_on_cpu, run_on_cuda
from .dtypes import ITEMSIZE
from .interleaved import disturbed
from .plan import PAGE, PROT_READ, At, Found, Misplaced, Plan, Raised, protect


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        pickle.dump(value, answers)
        answers.flush()

    while True:
        try:
            plan = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        for way in plan.ways:
            for number, one in enumerate(plan.calls):
                answer(At(way, number))
                try:
                    answer(Found(WAYS[way](one, plan, number)))
                except Exception as error:  # a refusal, which is not this process's to judge
                    answer(Raised(type(error).__name__, str(error)))
        answer(None)


# ------------------------------------------------------------------------------------------------------- out of bounds


def _guarded(side: str) -> Callable[[EntryCall, Plan, int], None]:
    """Each buffer ends, or begins, at a page that cannot be accessed."""

    def run(one: EntryCall, plan: Plan, number: int) -> None:
        before = filled(one, run_on_cpu, POISON)
        _run_in(one, {slot: _Buffer(data, side, plan.protection(slot)) for slot, data in before.items()})

    return run


def _read_only(one: EntryCall, plan: Plan, number: int) -> None:
    """The inputs are in pages that cannot be written."""
    buffers = {slot: _Buffer(data, "start", None) for slot, data in filled(one, run_on_cpu, POISON).items()}
    for slot in one.op.inputs:
        if slot in buffers and slot not in one.op.mutates and (plan.slots is None or slot in plan.slots):
            buffers[slot].forbid_writing()
    _run_in(one, buffers)


def _run_in(one: EntryCall, buffers: Mapping[str, _Buffer]) -> None:
    try:
        one.run("cpu", {slot: buffer.address for slot, buffer in buffers.items()})
    finally:
        for buffer in buffers.values():
            buffer.close()


class _Buffer:
    """Memory that ends, or begins, where a page begins, or ends, that has ``protection``."""

    def __init__(self, data: bytes, side: str, protection: int | None) -> None:
        self._inner = max(-(-len(data) // PAGE), 1) * PAGE
        self._map = mmap.mmap(-1, self._inner + 2 * PAGE)
        self._view = ctypes.c_char.from_buffer(self._map)
        self._base = ctypes.addressof(self._view)
        self.address = self._base + PAGE + (self._inner - len(data) if side == "end" else 0)
        ctypes.memmove(self.address, data, len(data))
        if protection is not None:
            for guard in (self._base, self._base + PAGE + self._inner):
                protect(guard, PAGE, protection)

    def forbid_writing(self) -> None:
        protect(self._base + PAGE, self._inner, PROT_READ)

    def close(self) -> None:
        del self._view
        self._map.close()


# ----------------------------------------------------------------------------------------------------------- alignment


def _misaligned(one: EntryCall, plan: Plan, number: int) -> list[Misplaced]:
    """Each tensor is at each multiple of its element's size."""
    before = filled(one, run_on_cpu, POISON)
    aligned = run_at(one, before, {})
    results = [slot for slot in one.op.results if slot in one.given]
    found = []
    for slot, spec in one.given.items():
        for offset in range(ITEMSIZE[spec.dtype], ALIGNMENT, ITEMSIZE[spec.dtype]):
            after = run_at(one, before, {slot: offset})
            found += [Misplaced(slot, offset, y, aligned[y], after[y]) for y in results if after[y] != aligned[y]]
    return found


# --------------------------------------------------------------------------------------------------------------- leaks

WINDOW, WINDOWS = 32, 5
SMALLEST = 16
"""Bytes that a call keeps: malloc gives 24 or more."""


def _leaked(one: EntryCall, plan: Plan, number: int) -> int:
    """The bytes of memory that every call keeps. Memory that only some calls keep is a cache. One window is left out:
    something else may have been freed in it."""
    buffers = {slot: _Buffer(data, "start", None) for slot, data in filled(one, run_on_cpu, POISON).items()}
    addresses = {slot: buffer.address for slot, buffer in buffers.items()}
    held = []
    for _ in range(WINDOWS + 2):  # the first, in which all is set up, is left out
        for _ in range(WINDOW):
            one.run("cpu", addresses)
        gc.collect()
        held.append(_held())
    for buffer in buffers.values():
        buffer.close()
    allocated, mapped = (
        sorted(b - a for a, b in pairwise(sizes))[1] // WINDOW for sizes in zip(*held[1:], strict=True)
    )
    return next((size for size, least in ((allocated, SMALLEST), (mapped, PAGE)) if size >= least), 0)


def _held() -> tuple[int, int]:
    """The bytes that malloc has given out, and those that are mapped."""
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * PAGE
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):  # glibc before 2.33
        return 0, mapped
    libc.mallinfo2.restype = _MallInfo
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd, mapped


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"),
            *("uordblks", "fordblks", "keepcost"),
        )
    ]


# ---------------------------------------------------------------------------------------------------------------- ways

WAYS: dict[str, Callable[[EntryCall, Plan, int], Any]] = {
    "plain": lambda one, plan, number: run_on_cpu(one, POISON) and None,
    "cuda": lambda one, plan, number: run_on_cuda(one, POISON) and None,  # for compute-sanitizer to watch
    "end": _guarded("end"),
    "start": _guarded("start"),
    "read-only": _read_only,
    "misaligned": _misaligned,
    "leaks": _leaked,
    "interleaved": lambda one, plan, number: disturbed(one, plan.others[number]),
    "huge": lambda one, plan, number: huge.run(one, plan.others[number]),
}

if __name__ == "__main__":
    main()
