"""Turns of processes that use one device."""

from __future__ import annotations

import fcntl
from pathlib import Path


class Turns:
    """The lock of a file: processes share it while they prepare, and each one has it alone in the ``with`` statement.
    None prepares again while another one waits to be alone: so all prepare at once, then run one after another. Nothing
    is locked where no file is named."""

    def __init__(self, file: str | Path | None) -> None:
        self.files = [open(f"{file}{end}", "a") for end in ("", ".gate")] if file else []  # noqa: SIM115  kept open
        self.prepare()

    def prepare(self) -> None:
        self._lock(1, fcntl.LOCK_EX)
        self._lock(0, fcntl.LOCK_SH)
        self._lock(1, fcntl.LOCK_UN)

    def __enter__(self) -> None:
        self._lock(1, fcntl.LOCK_SH)
        self._lock(0, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        self._lock(0, fcntl.LOCK_UN)
        self._lock(1, fcntl.LOCK_UN)

    def _lock(self, which: int, how: int) -> None:
        if self.files:
            fcntl.flock(self.files[which], how)
