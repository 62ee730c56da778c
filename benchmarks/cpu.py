"""Every operator on the CPU beside torch's, at several counts of threads: `python -m benchmarks.cpu`.

Forward and backward, small and large, in float32 and bfloat16, as `aotops bench` measures them. The runtime of the
threads reads their number when it starts, so each count has a process of its own. Writes one file of all counts, and
prints the cases in which torch is more than 5 % ahead.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/cpu.json"
THREADS = (1, 2, 8, 16)
SECONDS = 0.3
"""A case ends after so many, if each implementation has had three turns: four counts take some 4 minutes."""
ALLOWED = 1.05

Row = dict[str, Any]

MEASURE = """
import sys
from pathlib import Path

from aotops.bench import cases
from aotops.bench.run import Options, run

cases.use(Path(sys.argv[1]))
run(Options(device="cpu", impls=["aotops", "torch"], dtypes=["float32", "bfloat16"], quick=True,
            seconds=float(sys.argv[3]), json=Path(sys.argv[2])))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=THREADS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="Of a case, after which three turns are enough")
    parser.add_argument("--json", type=Path, default=RESULT, help="Default: %(default)s")
    parser.add_argument("--merge", action="store_true", help="Keep the other counts of that file")
    options = parser.parse_args()
    command = shlex.join(["python", "-m", "benchmarks.cpu", *sys.argv[1:]])
    earlier = json.loads(options.json.read_text()) if options.merge and options.json.exists() else None
    record: dict[str, Any] = {}
    for found in measured(options.threads, options.seconds):  # written after each count, for a run that is cut off
        record = merged(earlier, found | {"command": command})
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    for line in summary(record["rows"]):
        print(line)


def measured(threads: Sequence[int], seconds: float) -> Iterator[dict[str, Any]]:
    """After each count the result of `aotops bench` with it, and the rows so far, which say of how many threads they
    are."""
    record: dict[str, Any] = {}
    rows: list[Row] = []
    for count in threads:
        began = time.perf_counter()
        found = _of_process(count, seconds)
        copies = {**record.get("copy_gbs", {}), str(count): found["copy_gbs"]}
        rows += [{"threads": count} | row for row in found["rows"]]
        device = found["device"].rpartition(", ")[0]
        record = {**found, "device": device, "cores": len(os.sched_getaffinity(0)), "copy_gbs": copies, "rows": rows}
        record.pop("copies", None)
        print(f"{count} threads: {len(found['rows'])} rows, {time.perf_counter() - began:.0f} s", flush=True)
        yield record


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


def _of_process(threads: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, "-c", MEASURE, str(ROOT / "tests/cases"), str(file), str(seconds)]
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
