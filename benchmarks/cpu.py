"""Every operator on the CPU beside torch's, at several counts of threads: `python -m benchmarks.cpu`.

Forward and backward, small and large, in float32 and bfloat16, as `aotops bench` measures them. The runtime of the
threads reads their number when it starts, so each count has a process of its own; with `--at-once` they run at the same
time, on cores of their own, and a count is divided into as many processes, of some of the operators each, as there are
cores for. Writes one file of all counts as they are measured, and prints the cases in which torch is more than 5 %
ahead, and the rows whose sources have changed since; with `--report`, of the file as it is.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aotops.bench import report
from aotops.bench.sources import CPU_PREFIX, of_kernel
from aotops.ops import OPS

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/cpu.json"
THREADS = (1, 2, 8, 16)
SECONDS = 0.3
"""A case ends after so many, if each implementation has had three turns: four counts take some 4 minutes."""
MOST_PARTS = 12
"""Processes that `--at-once` divides a count into, whose operators then take about as long."""
LONG = ("attention", "linear", "rope", "matmul", "conv2d", "qkv_attention", "paged_attention", "linear_cross_entropy")
"""The operators that take longest come first, and are divided among the parts."""
POLL_SECONDS = 0.5
ALLOWED = 1.05

Row = dict[str, Any]

MEASURE = """
import sys
from pathlib import Path

from aotops.bench import cases, run

cases.use(Path(sys.argv[1]))
run.SAVE_SECONDS = 1
given = {"device": "cpu", "impls": ["aotops", "torch"], "dtypes": ["float32", "bfloat16"], "quick": True}
run.run(run.Options(ops=sys.argv[4:], seconds=float(sys.argv[3]), json=Path(sys.argv[2]), **given))
"""


@dataclass
class Job:
    """A process that measures some operators with one count of threads."""

    threads: int
    ops: Sequence[str]
    file: Path
    own_cores: int
    """As many cores are its own; 0: it is alone and may use all."""
    cores: list[int] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    started: float = 0
    found: dict[str, Any] | None = None
    """The job has measured this so far."""

    def start(self, seconds: float) -> None:
        cases = str(ROOT / "tests/cases")
        command = [sys.executable, "-c", MEASURE, cases, str(self.file), str(seconds), *self.ops]
        if self.cores:
            command = ["taskset", "-c", ",".join(map(str, self.cores)), *command]
        environment = os.environ | {"OMP_NUM_THREADS": str(self.threads)}
        self.started = time.monotonic()
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

    def read(self) -> None:
        with suppress(FileNotFoundError, json.JSONDecodeError):  # nothing yet; being written
            self.found = json.loads(self.file.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=THREADS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="Of a case, after which three turns are enough")
    parser.add_argument("--at-once", action="store_true", help="As many counts at the same time as there are cores for")
    parser.add_argument("--within", type=float, default=math.inf, help="Seconds after which all ends as it is")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=[*OPS], metavar="OP", help="Default: all")
    parser.add_argument("--json", type=Path, default=RESULT, help="Default: %(default)s")
    parser.add_argument("--merge", action="store_true", help="Keep the other counts of that file")
    parser.add_argument("--report", action="store_true", help="Measure nothing; print what that file says")
    options = parser.parse_args()
    if options.report:
        rows = json.loads(options.json.read_text())["rows"]
        print(*summary(rows), *changed(rows), sep="\n")
        return
    command = shlex.join(["python", "-m", "benchmarks.cpu", *sys.argv[1:]])
    earlier = json.loads(options.json.read_text()) if options.merge and options.json.exists() else None
    record: dict[str, Any] = {"rows": []}
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        todo = jobs(options.threads, Path(folder), options.at_once, options.ops)
        for found in measured(todo, options.seconds, failed, options.within):
            record = merged(earlier, found | {"command": command})
            # written while it is measured, for a run that is cut off
            report.save(record, options.json)
    for line in [*summary(record["rows"]), *changed(record["rows"]), *failed]:
        print(line)
    if failed:
        raise SystemExit(1)


def jobs(threads: Sequence[int], folder: Path, at_once: bool, ops: Sequence[str] = tuple(OPS)) -> list[Job]:
    """The jobs. ``at_once``: on cores of their own, in parts, those of few threads first.

    Raises:
        ValueError: a count has more threads than there are cores.
    """
    cores = cores_here()
    if at_once and (most := max(threads)) > cores:
        raise ValueError(f"cpu: --at-once: {most} threads, expected no more than {cores}, the number of cores")
    ordered = sorted(ops, key=lambda op: LONG.index(op) if op in LONG else len(LONG))

    def parts(count: int) -> int:  # counts of one and of two threads fit side by side
        return max(1, min(cores // max(count, 2 * min(count, 2)), MOST_PARTS, len(ops))) if at_once else 1

    return [
        Job(n, ordered[i :: parts(n)], folder / f"{n}.{i}.json", n if at_once else 0)
        for n in (sorted(threads) if at_once else threads)
        for i in range(parts(n))
    ]


def cores_here() -> int:
    """The cores that this process may use, also if a control group limits their time rather than their number."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = max(1, min(cores, int(quota) // int(period)))
    return cores


def measured(
    todo: Sequence[Job], seconds: float, failed: list[str], within: float = math.inf
) -> Iterator[dict[str, Any]]:
    """After each change the results of `aotops bench` so far, whose rows say of how many threads they are. Appends to
    ``failed`` a line of each process that fails, and of each that has not ended ``within`` so many seconds; their rows
    so far count."""
    free = sorted(os.sched_getaffinity(0))[: cores_here()]
    waiting, running, seen, begun = [*todo], list[Job](), 0, time.monotonic()
    try:
        while waiting or running:
            if late := time.monotonic() - begun > within:
                failed += [f"{job.threads} threads: not ended within {within:g} s" for job in [*running, *waiting]]
                waiting.clear()
            while waiting and waiting[0].own_cores <= len(free) and (waiting[0].own_cores or not running):
                job = waiting.pop(0)
                job.cores, free = free[: job.own_cores], free[job.own_cores :]
                job.start(seconds)
                running.append(job)
            time.sleep(POLL_SECONDS)
            ended = [job for job in running if late or (job.process and job.process.poll() is not None)]
            for job in running:
                job.read()
            for job in ended:
                running.remove(job)
                free = sorted([*free, *job.cores])
                rows, taken = len(job.found["rows"]) if job.found else 0, time.monotonic() - job.started
                print(f"{job.threads} threads: {rows} rows in {taken:.0f} s: {' '.join(job.ops)}", flush=True)
                if late and job.process:
                    job.process.kill()
                elif job.process and job.process.returncode:
                    failed.append(f"{job.threads} threads: a process ended with {job.process.returncode}")
            results = [(job.threads, job.found) for job in todo if job.found]
            if results and (count := sum(len(found["rows"]) for _, found in results)) != seen:
                seen = count
                yield _together(results)
    finally:
        for job in running:
            if job.process:
                job.process.kill()


def _together(results: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    first = results[0][1]
    rows = [{"threads": count} | row for count, found in results for row in found["rows"]]
    copies = {str(count): found["copy_gbs"] for count, found in reversed(results)}
    device, cores = first["device"].rpartition(", ")[0], cores_here()
    return {key: value for key, value in first.items() if key != "copies"} | {
        "device": device, "cores": cores, "copy_gbs": copies, "rows": rows,
    }  # fmt: skip


def merged(earlier: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """The new record, with the commands of an earlier one and its rows of other counts of threads or operators.

    Raises:
        ValueError: the two are of different processors.
    """
    if earlier is None:
        return new
    if earlier["device"] != new["device"]:
        raise ValueError(f"cpu: these are of two devices: {earlier['device']} and {new['device']}")
    again = {(row["threads"], row["op"]) for row in new["rows"]}
    kept = [row for row in earlier["rows"] if (row["threads"], row["op"]) not in again]
    commands = dict.fromkeys([*earlier["command"].split("; "), new["command"]])
    copies = earlier["copy_gbs"] | new["copy_gbs"]
    return new | {"command": "; ".join(commands), "copy_gbs": copies, "rows": kept + new["rows"]}


def case(row: Row) -> tuple[Any, ...]:
    return row["op"], row["variant"], row["pass"], tuple(row["shape"]), row["dtype"]


def speeds(rows: Sequence[Row]) -> dict[int, dict[tuple[Any, ...], float]]:
    """Our speed beside torch's, of each count of threads and each case that has both."""
    us = {(row["threads"], row["impl"], *case(row)): row["us"] for row in rows}
    found: dict[int, dict[tuple[Any, ...], float]] = {}
    for row in rows:
        torch = us.get((row["threads"], "torch", *case(row)))
        if row["impl"] == "aotops" and torch is not None:
            found.setdefault(row["threads"], {})[case(row)] = torch / row["us"]
    return found


def is_behind(speed: float) -> bool:
    return speed * ALLOWED < 1


def summary(rows: Sequence[Row]) -> list[str]:
    """A line of each count of threads, and of each case in which torch is faster by more than ALLOWED."""
    us = {(row["threads"], row["impl"], *case(row)): row["us"] for row in rows}
    lines = []
    for threads, found in speeds(rows).items():
        behind = sorted((speed, key) for key, speed in found.items() if is_behind(speed))
        lines.append(f"{threads} threads: torch is more than 5 % ahead in {len(behind)} of {len(found)} cases")
        for speed, key in behind:
            op, variant, pass_, shape, dtype = key
            what = " ".join(filter(None, (op, variant, pass_, "x".join(map(str, shape)), dtype)))
            own, torch = (us[(threads, impl, *key)] for impl in ("aotops", "torch"))
            lines.append(f"  {speed:.2f}  {what}: {own:,.1f} us, torch {torch:,.1f}")
    return lines


def changed(rows: Sequence[Row]) -> list[str]:
    """A line of the operators of which rows are older than their sources, with the number of these, and the dates; and
    one of those whose rows do not say of which CPU sources they are."""
    old, unknown = list[Row](), list[Row]()
    for row in rows:
        if row["impl"] != "aotops":
            continue
        if not (row["kernel"] or "").startswith(CPU_PREFIX):
            unknown.append(row)
        elif row["kernel"] != of_kernel(row["op"], device="cpu"):
            old.append(row)
    return [
        *_counts("rows that are older than their sources", old),
        *_counts("rows without a hash of CPU sources", unknown),
    ]


def _counts(what: str, rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    counts = ", ".join(f"{op} {n}" for op, n in Counter(row["op"] for row in rows).items())
    dates = sorted({row["date"] for row in rows})
    return [f"{what}, of {' to '.join(dict.fromkeys((dates[0], dates[-1])))}: {counts}"]


if __name__ == "__main__":
    main()
