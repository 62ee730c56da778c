"""Every operator on the CPU beside torch's, at several counts of threads: `python -m benchmarks.cpu`.

Forward and backward, small and large, in float32 and bfloat16, as `aotops bench` measures them. The runtime of the
threads reads their number when it starts, so each count has a process of its own; with `--at-once` all have cores of
their own at the same time, and those of few threads are divided into several processes of some of the operators each.
Writes one file of all counts, and prints the cases in which torch is more than 5 % ahead.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aotops.ops import OPS

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/cpu.json"
THREADS = (1, 2, 8, 16)
SECONDS = 0.3
"""A case ends after so many, if each implementation has had three turns: four counts take some 4 minutes."""
PARTS = {1: 4, 2: 2}
"""How many processes a count is divided into by `--at-once`: 32 cores then do all counts in some 2 minutes."""
ALLOWED = 1.05

Row = dict[str, Any]

MEASURE = """
import sys
from pathlib import Path

from aotops.bench import cases
from aotops.bench.run import Options, run

cases.use(Path(sys.argv[1]))
run(Options(ops=sys.argv[4:], device="cpu", impls=["aotops", "torch"], dtypes=["float32", "bfloat16"], quick=True,
            seconds=float(sys.argv[3]), json=Path(sys.argv[2])))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=THREADS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="Of a case, after which three turns are enough")
    parser.add_argument("--at-once", action="store_true", help="All counts at the same time, on cores of their own")
    parser.add_argument("--json", type=Path, default=RESULT, help="Default: %(default)s")
    parser.add_argument("--merge", action="store_true", help="Keep the other counts of that file")
    options = parser.parse_args()
    command = shlex.join(["python", "-m", "benchmarks.cpu", *sys.argv[1:]])
    earlier = json.loads(options.json.read_text()) if options.merge and options.json.exists() else None
    record: dict[str, Any] = {}
    for found in measured(options.threads, options.seconds, options.at_once):
        record = merged(earlier, found | {"command": command})
        # written after each count, for a run that is cut off
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    for line in summary(record["rows"]):
        print(line)


def measured(threads: Sequence[int], seconds: float, at_once: bool = False) -> Iterator[dict[str, Any]]:
    """After each count the result of `aotops bench` with it, and the rows so far, which say of how many threads they
    are."""
    record: dict[str, Any] = {}
    rows: list[Row] = []
    found_of = _at_once(threads, seconds) if at_once else ((n, [_of_process(n, seconds, [*OPS])]) for n in threads)
    for count, parts in found_of:
        copies = {**record.get("copy_gbs", {}), str(count): parts[0]["copy_gbs"]}
        of_count = [{"threads": count} | row for part in parts for row in part["rows"]]
        rows += of_count
        device = parts[0]["device"].rpartition(", ")[0]
        cores = len(os.sched_getaffinity(0))
        record = {**parts[0], "device": device, "cores": cores, "copy_gbs": copies, "rows": rows}
        record.pop("copies", None)
        print(f"{count} threads: {len(of_count)} rows", flush=True)
        yield record


def _at_once(threads: Sequence[int], seconds: float) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The results of each count, which are those of its parts.

    Raises:
        ValueError: there are too few cores.
    """
    parts = [(count, [*OPS][i :: PARTS.get(count, 1)]) for count in threads for i in range(PARTS.get(count, 1))]
    cores = sorted(os.sched_getaffinity(0))
    if (needed := sum(count for count, _ in parts)) > len(cores):
        raise ValueError(
            f"cpu: --at-once needs {needed} cores for {[*threads]} threads, expected no more than {len(cores)}"
        )
    with ThreadPoolExecutor(len(parts)) as pool:
        running = []
        for count, ops in parts:
            own, cores = cores[:count], cores[count:]
            running.append((count, pool.submit(_of_process, count, seconds, ops, own)))
        for count in threads:
            yield count, [job.result() for of, job in running if of == count]


def merged(earlier: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """The new record, with the rows and the commands of an earlier one that is of other counts of threads.

    Raises:
        ValueError: the two are of different processors.
    """
    if earlier is None:
        return new
    if earlier["device"] != new["device"]:
        raise ValueError(f"cpu: these are of two devices: {earlier['device']} and {new['device']}")
    again = {row["threads"] for row in new["rows"]}
    kept = [row for row in earlier["rows"] if row["threads"] not in again]
    commands = dict.fromkeys([*earlier["command"].split("; "), new["command"]])
    copies = earlier["copy_gbs"] | new["copy_gbs"]
    return new | {"command": "; ".join(commands), "copy_gbs": copies, "rows": kept + new["rows"]}


def _of_process(threads: int, seconds: float, ops: Sequence[str], cores: Sequence[int] = ()) -> dict[str, Any]:
    """``cores``: those that it may use; () for all."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, "-c", MEASURE, str(ROOT / "tests/cases"), str(file), str(seconds), *ops]
        if cores:
            command = ["taskset", "-c", ",".join(map(str, cores)), *command]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        return dict(json.loads(file.read_text()))


def summary(rows: Sequence[Row]) -> list[str]:
    """A line of each count of threads, and of each case in which torch is faster by more than ALLOWED."""
    by_case: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        key = (row["threads"], row["op"], row["variant"], row["pass"], tuple(row["shape"]), row["dtype"])
        by_case.setdefault(key, {})[row["impl"]] = row
    both = {key: found for key, found in by_case.items() if {"aotops", "torch"} <= {*found}}
    lines = []
    for threads in dict.fromkeys(key[0] for key in both):
        speeds = {key: _speed(found) for key, found in both.items() if key[0] == threads}
        behind = sorted((speed, key) for key, speed in speeds.items() if speed * ALLOWED < 1)
        lines.append(f"{threads} threads: torch is more than 5 % ahead in {len(behind)} of {len(speeds)} cases")
        lines += [_line(speed, key, both[key]) for speed, key in behind]
    return lines


def _speed(found: Mapping[str, Row]) -> float:
    return float(found["torch"]["us"] / found["aotops"]["us"])


def _line(speed: float, key: tuple[Any, ...], found: Mapping[str, Row]) -> str:
    _, op, variant, pass_, shape, dtype = key
    what = " ".join(filter(None, (op, variant, pass_, "x".join(map(str, shape)), dtype)))
    return f"  {speed:.2f}  {what}: {found['aotops']['us']:,.1f} us, torch {found['torch']['us']:,.1f}"


if __name__ == "__main__":
    main()
