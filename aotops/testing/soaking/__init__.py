"""``soak``: operators under load. Every call is repeated, on a GPU right behind a kernel that still writes its inputs
and right before one that writes over them, on the CPU from several threads at once, and each result is compared to the
bit with that of a call in quiet."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from importlib.util import find_spec
from typing import Any

from aotops import toolchain
from aotops.bench.measure import Cpu, versions
from aotops.op import Op
from aotops.ops import BUILTIN
from aotops.registry import has_entry
from aotops.spec import DEVICES
from aotops.terminal import check_known

from ..checker import _subject
from ..subject import Subject
from . import cpu, cuda, steps
from .calls import Repeated, beside
from .record import Record, Row

REPEATS = 10_000
STEPS = {"cuda": 1_000, "cpu": 50}
DTYPES = "float32", "bfloat16"
"""The dtypes of models."""
IN_STEPS = 0.35
"""The share of the time for steps of models."""
EVERY = 30.0
"""Seconds between records of what was found so far."""

Reference = Callable[..., Any]


def soak(
    operators: Sequence[Op],
    *,
    reference: Reference | None = None,
    cases: Sequence[Any] | None = None,
    dtypes: Sequence[str] | None = None,
    devices: Sequence[str] | None = None,
    seconds: float = 300.0,
    repeats: int = REPEATS,
    models: bool | None = None,
    n_steps: int | None = None,
    seed: int = 0,
    command: str = "",
    so_far: Callable[[Record], object] | None = None,
) -> Record:
    """Repeats each operator and its backward under load, and compares every result to the bit.

    Args:
        operators: each with a row of cases, or one with ``reference`` and ``cases``, as ``check`` takes them.
        dtypes: only these.
        devices: of "cpu" and "cuda"; without it, those that the operators have entries for and the machine has.
        seconds: for everything; each call is repeated at least once.
        repeats: after which a call is not repeated further.
        models: whether steps of models are run too; without it, if the built-in operators are soaked and torch is
            installed.
        n_steps: of each run of a model.
        seed: of the numbers, and of the order of the calls.
        command: for the record.
        so_far: is given a record every half minute, from another thread.

    Raises:
        CompileError: "cuda" is asked for, or there is a GPU, and there is no nvcc.
        ValueError: there is neither a row nor a reference; an unknown device; "cuda" is asked for and there is no GPU.
    """
    started = time.monotonic()
    here = _devices(devices)
    with_models = models if models is not None else _all_built_in(operators) and find_spec("torch") is not None
    left = seconds * (1 - IN_STEPS if with_models else 1) / max(len(here), 1)
    calls: dict[str, list[Repeated]] = {device: [] for device in here}
    runs: list[steps.Steps] = []
    facts = {
        "command": command,
        "device": ", ".join(_name(device) for device in here),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": _versions(),
        "seed": seed,
    }

    def record(ended: bool) -> Record:
        rows = [row for device in here for row in _rows(list(calls[device]), device)]
        return Record(rows, list(runs), {**facts, "seconds": round(time.monotonic() - started, 1)}, ended)

    def tell(ended: threading.Event) -> None:
        while so_far and not ended.wait(EVERY):
            so_far(record(ended=False))

    with beside(tell):
        for device in here:
            subjects = [_of(op, reference, cases, dtypes, seed) for op in operators if has_entry(op, device)]
            toolchain.tell(f"soak on {device}: {len(subjects)} operators for {left:.0f} s")
            (cuda if device == "cuda" else cpu).soak(subjects, left, repeats, seed, calls[device])
            if with_models:
                toolchain.tell(f"soak on {device}: steps of models")
                n, of_models = n_steps or STEPS[device], seconds * IN_STEPS / len(here)
                for run in steps.soak(device, n, cpu.THREADS, DTYPES, seed, _beside(device, seed), of_models):
                    runs.append(run)
    return record(ended=True)


def _devices(asked: Sequence[str] | None) -> list[str]:
    check_known("soak: devices", asked, DEVICES)
    gpu = bool(toolchain.gpu_archs())
    if asked and "cuda" in asked and not gpu:
        raise ValueError("soak: devices has 'cuda', and nvidia-smi finds no GPU here")
    here = list(asked) if asked else ["cpu", *(["cuda"] if gpu else [])]
    if "cuda" in here:
        toolchain.need_nvcc()  # its error says what is missing
    return here


def _all_built_in(operators: Sequence[Op]) -> bool:
    return {op.name for op in operators if op.library is BUILTIN} == set(BUILTIN.ops)


def _of(
    op: Op, reference: Reference | None, cases: Sequence[Any] | None, dtypes: Sequence[str] | None, seed: int
) -> Subject:
    subject = _subject(op, reference, cases, seed)
    tried = [dtype for dtype in subject.row.dtypes if dtypes is None or dtype in dtypes]
    accepted = [dtype for dtype in tried if any(subject.refusal(case, dtype) is None for case in subject.cases)]
    if not accepted:
        raise ValueError(f"soak: {op.name} takes no case in {', '.join(tried) or 'the dtypes given'}")
    return replace(subject, dtypes=tuple(accepted))


# ------------------------------------------------------------------------------------------------------------- devices


def _beside(device: str, seed: int) -> Callable[[], AbstractContextManager]:
    return partial(cuda.loaded, cuda.kernels(), seed) if device == "cuda" else nullcontext


def _rows(calls: Sequence[Repeated], device: str) -> Iterator[Row]:
    groups: dict[tuple[str, str], list[Repeated]] = {}
    for one in calls:
        groups.setdefault((one.operator, one.pass_), []).append(one)
    for (operator, pass_), group in groups.items():
        counts = [one.repeats for one in group]
        wrong = [f"{one}: {one.wrong}" for one in group if one.wrong]
        yield Row(operator, pass_, device, len(group), min(counts), sum(counts), wrong)


# --------------------------------------------------------------------------------------------------------------- facts


def _name(device: str) -> str:
    return cuda.device_name(cuda.kernels()) if device == "cuda" else Cpu(quick=True).name


def _versions() -> Mapping[str, str]:
    found = versions(("torch", "numpy"))
    if compiler := toolchain.nvcc():
        found["nvcc"] = compiler.version.splitlines()[-2 if "Build" in compiler.version else -1]
    return found | {"threads": os.environ.get("AOTOPS_THREADS") or "OpenMP"}
