"""The questions to the process of guarded.py, and its answers."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .calls import EntryCall

PAGE = mmap.PAGESIZE
PROT_NONE, PROT_READ, PROT_READ_WRITE = 0, 1, 3


@dataclass(frozen=True)
class Plan:
    calls: Sequence[EntryCall]
    ways: Sequence[str] = ("end", "start")
    """How each call is run (guarded.WAYS)."""
    slots: frozenset[str] | None = None
    """The slots that are guarded; None for all."""
    readable: bool = False
    """Whether the pages around a buffer can be read, and only writing ends the process."""
    others: Sequence[Any] = ()
    """For each call, what else its way takes."""

    def protection(self, slot: str) -> int | None:
        """The guard pages of a buffer; None if it is not guarded."""
        if self.slots is not None and slot not in self.slots:
            return None
        return PROT_READ if self.readable else PROT_NONE


def protect(address: int, size: int, protection: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), protection):
        raise OSError(ctypes.get_errno(), "mprotect")


class At(NamedTuple):
    """Before each call."""

    way: str
    number: int


class Raised(NamedTuple):
    """The call raised: it was refused."""

    kind: str
    text: str


class Found(NamedTuple):
    """The call returned."""

    result: Any


class Misplaced(NamedTuple):
    """A result that differs where a tensor lies ``offset`` bytes past a multiple of calls.ALIGNMENT."""

    slot: str
    offset: int
    result: str
    aligned: bytes
    got: bytes
