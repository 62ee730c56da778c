"""The process that runs calls which may end it (guarded.py), as seen from here."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Timer
from typing import Any, NamedTuple

from .plan import At, Found, Plan, Raised

SECONDS = 120


class Ended(NamedTuple):
    """The call that ended the process."""

    way: str
    number: int
    reason: str


@dataclass
class Outcome:
    results: dict[At, Any] = field(default_factory=dict)
    raised: dict[At, Raised] = field(default_factory=dict)
    ended: Ended | None = None


class Worker:
    """Started with the first plan, and again after a call has ended it. ``wrapper``: a command that runs it."""

    def __init__(self, *wrapper: str, **environment: str) -> None:
        self._command = [*wrapper, sys.executable, "-m", "aotops.testing.guarded"]
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, plan: Plan, seconds: float = SECONDS) -> Outcome:
        """Runs the calls until one ends the process, which all of them do together after these seconds."""
        process = self._process or self._start()
        assert process.stdin
        try:
            process.stdin.write(pickle.dumps(plan))
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, which its answers tell
        ends, timer = time.monotonic() + seconds, Timer(seconds, process.kill)
        timer.start()
        try:
            return self._read(process, ends)
        finally:
            timer.cancel()

    def close(self) -> int:
        """Ends the process; returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.communicate()
        return process.returncode

    def _start(self) -> subprocess.Popen[bytes]:
        # plain ctypes lets other threads of Python run during each call
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "AOTOPS_CALL_PATH": "ctypes"}
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env={**os.environ, **paths, **self._environment},
        )
        return self._process

    def _read(self, process: subprocess.Popen[bytes], ends: float) -> Outcome:
        outcome, at = Outcome(), None
        for value in self._answers(process):
            if value is None:
                return outcome
            if isinstance(value, At):
                at = value
            elif isinstance(value, Found):
                outcome.results[at] = value.result  # type: ignore[index]
            else:
                outcome.raised[at] = value  # type: ignore[index]
        self._process = None
        process.communicate()
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip()
        if at is None:
            raise RuntimeError(f"the process that runs guarded calls ended early: {said[-2000:]}")
        if time.monotonic() >= ends:
            reason = "did not return in time"
        elif process.returncode < 0:
            reason = signal.Signals(-process.returncode).name
        else:
            reason = said.rpartition("\n")[2] or f"exit code {process.returncode}"
        outcome.ended = Ended(at.way, at.number, reason)
        return outcome

    def _answers(self, process: subprocess.Popen[bytes]) -> Iterator[Any]:
        assert process.stdout
        while True:
            try:
                yield pickle.load(process.stdout)
            except (EOFError, pickle.UnpicklingError):  # in the middle of an answer too
                return
