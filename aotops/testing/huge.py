"""A call on more elements than an int counts, in little memory: an operator whose rows are independent, on copies of a
few rows. All copies but the first and the last are the same pages, mapped again and again."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, MAP_SHARED
from typing import NamedTuple

from aotops.infer import infer
from aotops.spec import TensorSpec

from .calls import POISON, EntryCall, filled, nbytes, run_on_cpu
from .plan import PAGE, PROT_NONE, PROT_READ_WRITE

MOST = 1 << 31
"""More than an int counts."""
AROUND = MOST * 8
"""Bytes before and after each tensor that cannot be accessed: an index that has overflowed ends the process."""
SLOWEST = 60
"""Seconds that a call may take."""
COPIES = 3
"""The pages: the first copy, all between, and the last."""

MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000


@dataclass(frozen=True)
class Copies:
    """How the tensors of a call grow."""

    specs: Mapping[str, TensorSpec]
    """The buffer of every slot that is given."""
    times: int
    tiled: frozenset[str]
    """The slots that have this many copies of the small call's elements."""


def copies(one: EntryCall, tiled: frozenset[str], times: int) -> Copies | None:
    """``one`` on copies of its inputs ``tiled`` along their first axes; None where another input is a result of the
    forward, which is not copies then."""
    inputs = {slot: one.given[slot] for slot in one.op.inputs if slot in one.given}
    if not set(inputs) <= tiled | set(one.inputs):
        return None
    specs = {
        slot: TensorSpec((spec.shape[0] * times, *spec.shape[1:]), spec.dtype) if slot in tiled else spec
        for slot, spec in inputs.items()
    }
    inferred = infer(one.op, one.attrs, tuple(specs.get(slot) for slot in one.op.inputs), "cpu")
    specs |= {slot: inferred[slot] for slot in one.op.entry_outputs if slot in one.given}
    many = frozenset(slot for slot, spec in specs.items() if _is_tiled(one.given[slot], spec, times))
    return Copies(specs, times, many)


def _is_tiled(small: TensorSpec, large: TensorSpec, times: int) -> bool:
    return bool(small.shape) and large.shape == (small.shape[0] * times, *small.shape[1:])


class Differs(NamedTuple):
    """A result, of which the first copy, one between, or the last is not the small call's."""

    slot: str
    copy: str
    small: bytes
    large: bytes


def run(one: EntryCall, large: Copies) -> str | list[Differs]:
    """Why it was not run, or the results that differ."""
    before = filled(one, run_on_cpu, POISON)
    after, seconds = _timed(one, before)
    if seconds * large.times > SLOWEST:
        return f"a call would take about {seconds * large.times:.0f} s"
    tiles = {slot: _Tiled(before[slot], large.times) for slot in large.tiled}
    whole = {slot: _Whole(before[slot], nbytes(spec)) for slot, spec in large.specs.items() if slot not in tiles}
    memory: Mapping[str, _Tiled | _Whole] = {**tiles, **whole}
    try:
        many = replace(one, specs=dict.fromkeys(one.op.slots) | dict(large.specs))
        many.run("cpu", {slot: place.address for slot, place in memory.items()})
        found = [
            Differs(slot, copy, after[slot], data)
            for slot in one.op.results
            if slot in tiles
            for copy, data in zip(("first", "middle", "last"), tiles[slot].read(), strict=True)
            if data != after[slot]
        ]
    finally:
        for place in memory.values():
            place.close()
    return found


def _timed(one: EntryCall, before: Mapping[str, bytes]) -> tuple[dict[str, bytes], float]:
    """The bytes after a call, and the seconds of a second one."""
    memory = {slot: _Whole(data, len(data)) for slot, data in before.items()}
    addresses = {slot: place.address for slot, place in memory.items()}
    one.run("cpu", addresses)
    after = {slot: ctypes.string_at(addresses[slot], len(data)) for slot, data in before.items()}
    started = time.perf_counter()
    one.run("cpu", addresses)
    seconds = time.perf_counter() - started
    for place in memory.values():
        place.close()
    return after, seconds


# -------------------------------------------------------------------------------------------------------------- memory

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _map(at: int | None, size: int, protection: int, flags: int, file: int = -1, offset: int = 0) -> int:
    found = _libc.mmap(at, size, protection, flags, file, offset)
    if found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    return found


class _Whole:
    """Memory of its own, which has pages when it is written to."""

    def __init__(self, data: bytes, size: int) -> None:
        self._size = -(-max(size, 1) // PAGE) * PAGE
        self.address = _map(None, self._size, PROT_READ_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)
        ctypes.memmove(self.address, data, min(len(data), size))

    def close(self) -> None:
        _libc.munmap(self.address, self._size)


class _Tiled:
    """Copies of a few pages, one after the other."""

    def __init__(self, pattern: bytes, times: int) -> None:
        self._pattern, self._total = len(pattern), len(pattern) * times + 2 * AROUND
        self._file = os.memfd_create("copies")
        os.write(self._file, pattern * COPIES)
        self._base = _map(None, self._total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)
        self.address = self._base + AROUND
        for i in range(times):
            page = 0 if i == 0 else 2 if i == times - 1 else 1
            at = self.address + i * len(pattern)
            _map(at, len(pattern), PROT_READ_WRITE, MAP_SHARED | MAP_FIXED, self._file, page * len(pattern))

    def read(self) -> list[bytes]:
        return [os.pread(self._file, self._pattern, i * self._pattern) for i in range(COPIES)]

    def close(self) -> None:
        _libc.munmap(self._base, self._total)
        os.close(self._file)
