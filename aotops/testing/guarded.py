"""Runs calls whose buffers end, or begin, at pages that cannot be accessed: an access out of bounds ends the process.

    python -m aotops.testing.guarded < plan

memory.py starts it, with a plan: calls, and how they are guarded. It prints the number of each call before it runs it.
With "cuda" in the plan's place of a side, the buffers are torch's on a GPU, for compute-sanitizer to watch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from .calls import EntryCall, filled, run_on_cpu, run_on_cuda

PROT_NONE, PROT_READ = 0, 1
PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class Plan:
    calls: Sequence[EntryCall]
    sides: Sequence[str] = ("end", "start")
    """Where the buffers touch a page that cannot be accessed: "end" or "start". "cuda": on a GPU, with none."""
    slots: frozenset[str] | None = None
    """The slots that are guarded; None for all."""
    readable: bool = False
    """Whether the pages can be read, and only writing ends the process."""

    def protection(self, slot: str) -> int | None:
        """Of the pages around a buffer; None if it is not guarded."""
        if self.slots is not None and slot not in self.slots:
            return None
        return PROT_READ if self.readable else PROT_NONE


def main() -> None:
    plan = pickle.load(sys.stdin.buffer)
    for side in plan.sides:
        for i, one in enumerate(plan.calls):
            os.write(1, f"{side} {i}\n".encode())
            if side == "cuda":
                run_on_cuda(one, 0xFF)
            else:
                _run_guarded(one, side, plan)


def _run_guarded(one: EntryCall, side: str, plan: Plan) -> None:
    buffers = {slot: _Buffer(data, side, plan.protection(slot)) for slot, data in filled(one, run_on_cpu, 0xFF).items()}
    one.run("cpu", {slot: buffer.address for slot, buffer in buffers.items()})
    for buffer in buffers.values():
        buffer.close()


class _Buffer:
    """Memory that ends, or begins, where a page begins, or ends, that has ``protection``."""

    def __init__(self, data: bytes, side: str, protection: int | None) -> None:
        inner = max(-(-len(data) // PAGE), 1) * PAGE
        self._map = mmap.mmap(-1, inner + 2 * PAGE)
        self._view = ctypes.c_char.from_buffer(self._map)
        self._base = ctypes.addressof(self._view)
        self.address = self._base + PAGE + (inner - len(data) if side == "end" else 0)
        ctypes.memmove(self.address, data, len(data))
        if protection is not None:
            for guard in (self._base, self._base + PAGE + inner):
                _protect(guard, protection)

    def close(self) -> None:
        del self._view
        self._map.close()


def _protect(address: int, protection: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), protection):
        raise OSError(ctypes.get_errno(), "mprotect")


if __name__ == "__main__":
    main()
