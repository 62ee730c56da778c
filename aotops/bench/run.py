"""The command: measures case by case, then prints, writes and plots the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .. import __version__, registry
from ..ops import BUILTIN
from ..terminal import check_known, check_writable
from . import baselines, precompile, report, sources
from .baselines import Impl, Unavailable
from .cases import Case, cases
from .measure import Cpu, Cuda, Turn, samples, spread, versions, wait_asleep
from .tensors import FRAMEWORKS, Call, Framework
from .turns import Turns
from .work import DTYPES, Shape

Row = dict[str, Any]
Result = dict[str, Any]

SAVE_SECONDS = 20
PEER = "torch"
"""The implementation that the rates of products are compared with."""


@dataclass(frozen=True)
class Options:
    """The options of the command; None is its default."""

    ops: Sequence[str] = ()
    """As ``registry.select`` takes them; () stands for the built-in operators."""
    device: str | None = None
    impls: list[str] | None = None
    dtypes: list[str] | None = None
    shapes: list[Shape] | None = None
    passes: list[str] | None = None
    quick: bool = False
    seconds: float | None = None
    """A case on the CPU ends after so many, if each implementation has had three turns."""
    jobs: int | None = None
    json: Path | None = None
    plots: Path | None = None
    merge: Sequence[Path] = ()
    command: str = ""
    """For the record."""
    turns: Path | None = None
    """Other processes use the device too, but for measurements, which lock this file."""


def run(options: Options) -> None:
    """Measures, and tells the results.

    Raises:
        ValueError: an option names nothing.
        KeyError: an operator is not there.
        LibraryError: an operator's library does not load.
    """
    if options.device != "cuda":
        wait_asleep()
    selected = registry.select(options.ops or [BUILTIN.name])
    operators = list(selected)
    check_known("bench: --impls", options.impls, (*baselines.MAKERS, "none"))
    check_known("bench: --dtypes", options.dtypes, DTYPES)
    check_known("bench: --passes", options.passes, ("forward", "backward"))
    check_writable("bench: --json", options.json)
    check_writable("bench: --plots", options.plots)
    result = report.load(options.merge)
    if options.impls != ["none"]:
        for op in selected.values():
            op.library.functions  # noqa: B018  loads it
        for so_far in _measured(options, operators, result):
            result = so_far
            if options.json:  # after every case, so that an interrupted run keeps its results
                report.save(result, options.json)
    if result is None:
        raise ValueError("bench: nothing was measured, and --merge names nothing")
    report.show(result)
    if options.json:
        report.save(result, options.json)
    if options.plots:
        report.draw(result, options.plots)


def _default_device() -> str:
    try:
        import torch
    except ImportError:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def _measured(options: Options, operators: Sequence[str], earlier: Result | None) -> Iterator[Result]:
    """Writes the result so far, every few seconds and at the end."""
    device, quick = options.device or _default_device(), options.quick
    dtypes = options.dtypes or (["float32"] if quick and device == "cpu" else ["bfloat16", "float32"])
    todo = list(cases(device, dtypes, operators, options.shapes, options.passes, quick))
    if not todo:
        raise ValueError(f"bench: {', '.join(operators)}: no case has these shapes, dtypes and passes")
    impls = baselines.available(device, options.impls, operators)
    left_out = []
    frameworks = {impl.framework for impl in impls}
    if not any(FRAMEWORKS[name].GRADIENTS for name in frameworks):
        left_out = [f"the backward passes, which {' and '.join(sorted(frameworks))} has none of; torch has"]
        todo = [case for case in todo if case.pass_ == "forward"]
        if not todo:
            raise ValueError(f"bench: nothing is left to measure but {left_out[0]}")
    precompile.precompile(todo, impls, device, options.jobs)
    turns = Turns(options.turns)
    machine = Cuda(quick) if device == "cuda" else Cpu(quick, options.seconds)
    bench = Bench(machine, impls, device, turns)
    with turns:
        copy_gbs = machine.copy_gbs(machine.COPIED)
    machine.free()
    head: Result = {
        "device": machine.name,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": options.command,
        "copy_gbs": round(copy_gbs, 1),
        "versions": versions(("torch", "triton", "quack", "liger", "mindspore", "numpy")),
    }
    rows: list[Row] = []

    def so_far() -> Result:
        copies = {str(2 * half): round(gbs, 1) for half, gbs in sorted(machine.copies.items())}
        return report.merged(earlier, head | {"copies": copies, "rows": rows})

    saved = time.perf_counter()
    with report.progress(len(todo)) as advance:
        for case in todo:
            new = [row | _origin(row, head["date"], device) for row in bench.rows(case)]
            rows += new
            advance(str(case), new)
            if time.perf_counter() - saved > SAVE_SECONDS:
                yield so_far()
                saved = time.perf_counter()
    for skipped in [*left_out, *bench.skipped]:
        print(f"left out: {skipped}")
    yield so_far()


def _origin(row: Row, date: str, device: str) -> Row:
    """When a row was measured, and of what: rows of several runs are merged into one file."""
    if row["impl"] != "aotops":
        return {"date": date[:10]}
    return {"date": date[:10], "version": __version__, "kernel": sources.of_kernel(row["op"], device=device)}


class Bench:
    def __init__(self, machine: Cuda | Cpu, impls: Sequence[Impl], device: str, turns: Turns) -> None:
        self.machine, self.impls, self.device, self.turns = machine, impls, device, turns
        self.frameworks = {name: FRAMEWORKS[name](device) for name in {impl.framework for impl in impls}}
        self.skipped: dict[str, None] = {}

    def rows(self, case: Case) -> list[Row]:
        """One row for each implementation that has the case."""
        self.turns.prepare()
        with self._entered(lambda framework: framework.settings(case)):
            with self._entered(lambda framework: framework.recording(False)):
                contenders = self._contenders(case)
            with self.turns:
                with self._entered(lambda framework: framework.recording(False)):
                    turns = {name: turn for name, (_, turn) in contenders.items()}
                    taken = samples(turns, self.machine.repeats, self.machine.budget)
                    times = {name: self.machine.figure(seconds) for name, seconds in taken.items()}
                    hosts = self._hosts(case, contenders, times)
                with self._entered(lambda framework: framework.recording(True)):
                    with_grad = self._taken(contenders, self._recorders(case, contenders))
                rows = [
                    self._row(case, name, times[name])
                    | _microseconds("host_us", hosts.get(name))
                    | _microseconds("host_us_grad", with_grad.get(name))
                    for name in contenders
                ]
        if self.machine.HOST_IS_DEVICE:
            rows = [row | {"spread": round(spread(taken[row["impl"]]), 2)} for row in rows]
        if case.flops:
            rows = [row | self._of_peer(case, times, times[row["impl"]]) for row in rows]
        del contenders
        self.machine.free()
        return rows

    def _of_peer(self, case: Case, times: Mapping[str, float], seconds: float) -> Row:
        """For a product: its rate, the ratio to torch's, and the library behind torch's."""
        row: Row = {"tflops": round(case.flops / seconds / 1e12, 4)}
        if PEER in times:
            library = case.work.LIBRARY if self.device == "cuda" else ""
            row |= {"of_peer": round(times[PEER] / seconds, 4), "peer": f"{PEER} ({library})" if library else PEER}
        return row

    def _contenders(self, case: Case) -> dict[str, tuple[Call, Turn]]:
        """For each implementation a call, rotating over the inputs."""
        sets, n = self.machine.sets(case.work.bytes("forward", case.shape, case.dtype)), 0
        inputs: dict[str, list[list[Any]]] = {}
        contenders = {}
        for impl in self.impls:
            if not impl.has(case):
                continue
            framework = self.frameworks[impl.framework]
            with self._noting(impl, case):
                # On a CPU a contender would find inputs that it shares in a cache, where the one before left them.
                owner = impl.name if self.machine.HOST_IS_DEVICE else impl.framework
                if owner not in inputs:
                    inputs[owner] = [framework.inputs(case)]
                calls = [framework.call(impl, case, inputs[owner][0])]
                n = n or self.machine.enough(sets, calls[0])
                inputs[owner] += [framework.inputs(case) for _ in range(n - len(inputs[owner]))]
                calls += [framework.call(impl, case, given) for given in inputs[owner][1:]]
                records = case.work.op not in impl.synchronizes
                contenders[impl.name] = calls[0], self.machine.turn(calls, case.small, records)
        return contenders

    def _hosts(
        self, case: Case, contenders: Mapping[str, tuple[Call, Turn]], times: dict[str, float]
    ) -> dict[str, float]:
        """The host's time of a small call: of others only the device's time counts."""
        if not case.small:
            return {}
        return times if self.machine.HOST_IS_DEVICE else self._taken(contenders, [*contenders])

    def _taken(self, contenders: Mapping[str, tuple[Call, Turn]], names: Sequence[str]) -> dict[str, float]:
        turns = {name: self.machine.host_turn(contenders[name][0]) for name in names}
        taken = samples(turns, self.machine.host_repeats, self.machine.budget)
        return {name: self.machine.figure(seconds) for name, seconds in taken.items()}

    def _recorders(self, case: Case, contenders: Mapping[str, tuple[Call, Turn]]) -> list[str]:
        """The implementations to time again while gradients are recorded: for small forward cases."""
        if not case.small or case.pass_ != "forward" or case.work.variant == "fused_dx":
            return []
        return [impl.name for impl in self.impls if impl.name in contenders and impl.framework == "torch"]

    @contextmanager
    def _entered(self, of: Callable[[Framework], AbstractContextManager[Any]]) -> Iterator[None]:
        """In each framework."""
        with ExitStack() as stack:
            for framework in self.frameworks.values():
                stack.enter_context(of(framework))
            yield

    @contextmanager
    def _noting(self, impl: Impl, case: Case) -> Iterator[None]:
        """A contender that fails is reported and left out."""
        try:
            yield
        except Unavailable:
            pass
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            self.skipped[f"{impl.name}, {case}: {type(error).__name__}: {lines[0][:160]}"] = None

    def _row(self, case: Case, name: str, seconds: float) -> Row:
        gbs = case.bytes / seconds / 1e9
        return {
            "op": case.work.op,
            "variant": case.work.variant,
            "pass": case.pass_,
            "shape": list(case.shape),
            "dtype": case.dtype,
            "impl": name,
            "us": round(seconds * 1e6, 3),
            "gbs": round(gbs, 4),  # small for a small call on a busy machine
            "of_copy": round(gbs / self.machine.copy_gbs(case.bytes), 4),
        }


def _microseconds(key: str, seconds: float | None) -> Row:
    """Nothing where there are none."""
    return {} if seconds is None else {key: round(seconds * 1e6, 3)}
