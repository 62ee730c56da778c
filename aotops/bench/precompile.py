"""Fills the caches of torch.compile and quack by compiling in several processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from .. import registry
from . import baselines, cases, report
from .baselines import Impl
from .cases import Case
from .tensors import FRAMEWORKS

COMPILE = ("torch.compile", "quack")


def precompile(todo: Sequence[Case], impls: Sequence[Impl], device: str, jobs: int | None) -> None:
    names = [impl.name for impl in impls if impl.name in COMPILE]
    jobs = min(8, len(os.sched_getaffinity(0)) // 2) if jobs is None else jobs
    if device != "cuda" or not names or jobs < 2:
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), _prepare, (cases.folder(), registry.directory())) as pool:
        waiting = [pool.submit(_compile, name, case) for name in names for case in todo]
        with report.progress(len(waiting), "compile") as advance:
            for _ in as_completed(waiting):  # if a process dies, the pool ends: the rest is compiled later
                advance("", [])


def _prepare(rows: Path | None, package: Path | None) -> None:
    cases.use(rows)
    registry.use(package)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # one process per case


@cache
def _impl(name: str, op: str) -> Impl:
    return baselines.available("cuda", [name], [op])[0]


def _compile(name: str, case: Case) -> None:
    """Calls it once. A failure is reported when it is measured."""
    try:
        impl, framework = _impl(name, case.work.op), FRAMEWORKS["torch"]("cuda")
        if impl.has(case):
            for gradients in (False, True) if case.small else (False,):
                with framework.settings(case), framework.recording(gradients):
                    framework.call(impl, case, framework.inputs(case))()
            framework.synchronize()
    except Exception:
        pass
