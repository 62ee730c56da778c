"""Accesses of memory: out of bounds, outputs that are not written, inputs that are."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .calls import ITEMSIZE, EntryCall, Runner, calls_of, numbers, run_on_cpu, run_on_cuda
from .guarded import Plan
from .report import FAIL, PASS, UNAVAILABLE, Item
from .row import Case
from .search import Attempt, counted, failure_of, searched, smaller_cases
from .subject import Subject, elements
from .trial import Trial

LARGEST = 1 << 18
"""Elements of a case that is run in another process."""
SECONDS = 120


# ------------------------------------------------------------------------------------------------------- out of bounds


def bounds(subject: Subject) -> Iterator[Item]:
    """In another process, with pages around each buffer that cannot be accessed."""
    if "cpu" not in subject.devices:
        return
    pairs = subject.pairs([case for case in subject.varied if elements(case) <= LARGEST])
    crash = _first_crash(subject, pairs, ("end", "start"))
    while crash and (smaller := _first_crash(subject, _smaller(subject, crash), (crash.side,))):
        crash = smaller
    if crash is None:
        yield Item("bounds", "cpu", PASS, counted(pairs))
        return
    fault = AssertionError(_explained(crash))
    failure = failure_of(subject, "bounds", fault, crash.case, crash.dtype, devices=["cpu"])
    yield Item("bounds", "cpu", FAIL, failure=failure)


class Crash(NamedTuple):
    case: Case
    dtype: str
    call: EntryCall
    side: str
    reason: str


def _first_crash(subject: Subject, pairs: Sequence[tuple[Case, str]], sides: Sequence[str]) -> Crash | None:
    planned = [
        (case, dtype, one) for case, dtype in pairs for one in calls_of(subject.op, subject.trial(case, dtype), "cpu")
    ]
    ended = _run(Plan([one for *_, one in planned], sides)) if planned else None
    return Crash(*planned[ended.number], ended.side, ended.reason) if ended else None


def _smaller(subject: Subject, crash: Crash) -> list[tuple[Case, str]]:
    cases = sorted(smaller_cases(subject, crash.case, crash.dtype), key=elements)
    return [(case, crash.dtype) for case in cases]


def _explained(crash: Crash) -> str:
    """Which buffer was accessed, and how: found by guarding one at a time."""
    op, call = crash.call.op.name, crash.call
    if not crash.reason.startswith("SIG"):
        return f"{op}: {crash.reason}"
    if _run(Plan([call], [crash.side], frozenset())):
        return f"{op}: {crash.reason} with buffers that are aligned to their dtype, and pages around them"
    where = "past the end" if crash.side == "end" else "before the start"
    for slot in call.given:
        if _run(Plan([call], [crash.side], frozenset({slot}))):
            how = "writes" if _run(Plan([call], [crash.side], frozenset({slot}), readable=True)) else "reads"
            return f"{op} {how} {where} of {slot}"
    return f"{op} accesses memory {where} of its buffers"


class _Ended(NamedTuple):
    side: str
    number: int
    """Of the call that ended the process."""
    reason: str


def _run(plan: Plan, *wrapper: str) -> _Ended | None:
    """Runs the calls in another process; None if all returned."""
    portable = Plan([one.elsewhere() for one in plan.calls], plan.sides, plan.slots, plan.readable)
    command = [*wrapper, sys.executable, "-m", "aotops.testing.guarded"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "AOTOPS_CALL_PATH": "addresses"}
    data = pickle.dumps(portable)
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=SECONDS, env=environment)
        code, out, said = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        code, out, said = None, error.stdout or b"", b""
    *lines, _ = out.decode().split("\n")
    if code == 0:
        return None
    lines = [line for line in lines if line.split()[:1] in ([side] for side in plan.sides)]
    if not lines:
        raise RuntimeError(f"the process that runs guarded calls ended early: {said.decode(errors='replace')[-2000:]}")
    if code is None:
        reason = f"did not return within {SECONDS} s"
    elif code < 0:
        reason = signal.Signals(-code).name
    else:
        reason = said.decode(errors="replace").strip().rpartition("\n")[2] or f"exit code {code}"
    side, index = lines[-1].split()
    return _Ended(side, int(index), reason)


# ------------------------------------------------------------------------------------------------------ what is written

_POISONS = 0xFF, 0x55


def written(subject: Subject) -> Iterator[Item]:
    """With outputs and workspace that held other bytes before each of two calls, the results are the same."""
    yield from _each_device(subject, "outputs written", _written)


def unchanged(subject: Subject) -> Iterator[Item]:
    """The inputs are what they were."""
    yield from _each_device(subject, "inputs unchanged", _unchanged)


def _each_device(subject: Subject, check: str, attempt_of) -> Iterator[Item]:
    cases = [case for case in subject.varied if elements(case) <= LARGEST]
    for device in subject.devices:
        if device == "cuda" and not subject.torch_on_gpu:
            yield Item(check, device, UNAVAILABLE, "torch finds no GPU")
            continue
        run = run_on_cpu if device == "cpu" else run_on_cuda
        attempt: Attempt = attempt_of(subject, device, run)
        yield searched(subject, check, device, attempt, subject.pairs(cases), devices=[device])


def _written(subject: Subject, device: str, run: Runner) -> Attempt:
    def attempt(trial: Trial) -> None:
        for one in calls_of(subject.op, trial, device):
            first, again, second = (run(one, poison) for poison in (_POISONS[0], *_POISONS))
            for slot in one.op.results:
                # what differs from call to call in any case is for another check
                if slot in one.given and first[slot] == again[slot] != second[slot]:
                    raise AssertionError(_unwritten(one, slot, first[slot], second[slot]))

    return attempt


def _unwritten(one: EntryCall, slot: str, first: bytes, second: bytes) -> str:
    spec = one.given[slot]
    size = ITEMSIZE[spec.dtype]
    a, b = (np.frombuffer(data, np.uint8).reshape(-1, size) for data in (first, second))
    differ = np.flatnonzero((a != b).any(1))
    at = tuple(int(i) for i in np.unravel_index(differ[0], spec.shape))
    if all((x[differ] == poison).all() for x, poison in zip((a, b), _POISONS, strict=True)):
        return f"{one.op.name} does not write {len(differ)} of {len(a)} elements of {slot}, the first at {at}"
    return (
        f"{one.op.name}: {len(differ)} of {len(a)} elements of {slot}, the first at {at}, depend on what its "
        f"outputs or workspace held before the call: {numbers(first, spec)[at]!r} and {numbers(second, spec)[at]!r}"
    )


def _unchanged(subject: Subject, device: str, run: Runner) -> Attempt:
    def attempt(trial: Trial) -> None:
        for one in calls_of(subject.op, trial, device):
            after = run(one, _POISONS[0])
            for slot, before in one.inputs.items():
                if slot not in subject.mutates:
                    assert after[slot] == before, f"{one.op.name} writes to its input {slot}"

    return attempt


# ------------------------------------------------------------------------------------------------------------ sanitizer


def sanitizer(subject: Subject) -> Iterator[Item]:
    """compute-sanitizer's memcheck of the calls on a GPU."""
    if not subject.sanitize:
        return
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    why = "compute-sanitizer is not installed" if not tool else None if subject.torch_on_gpu else "torch finds no GPU"
    why = why if "cuda" in subject.devices else "the library has no CUDA entry, or there is no GPU"
    if why or tool is None:
        yield Item("sanitizer", "cuda", UNAVAILABLE, why or "")
        return
    cases = [case for case in subject.varied if elements(case) <= LARGEST]
    planned = [
        (case, dtype, one)
        for case, dtype in subject.pairs(cases)
        for one in calls_of(subject.op, subject.trial(case, dtype), "cuda")
    ]
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # an allocation for each buffer: the tool knows no others
    try:
        ended = _run(Plan([one for *_, one in planned], ["cuda"]), tool, "--tool=memcheck", "--error-exitcode=9")
    finally:
        del os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"]
    if ended is None:
        yield Item("sanitizer", "cuda", PASS, counted(subject.pairs(cases)))
        return
    case, dtype, _ = planned[ended.number]
    fault = AssertionError(ended.reason)
    failure = failure_of(subject, "sanitizer", fault, case, dtype, devices=["cuda"], sanitize=True)
    yield Item("sanitizer", "cuda", FAIL, failure=failure)
