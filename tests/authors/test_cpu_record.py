"""benchmarks.cpu: a committed record is whole for each count of threads that it has; other counts are added. What was
measured before a process failed is kept."""

from __future__ import annotations

import json
import os
import time
from types import SimpleNamespace

import pytest

from aotops.bench.sources import CPU_PREFIX, of_kernel
from benchmarks import cpu

RECORDS = {file.name: json.loads(file.read_text()) for file in sorted(cpu.RESULT.parent.glob("cpu*.json"))}
COUNTS = [(name, int(threads)) for name, record in RECORDS.items() for threads in record["copy_gbs"]]


@pytest.mark.parametrize(("name", "threads"), COUNTS)
def test_a_count_of_threads_has_each_case_beside_torch(name, threads):
    rows = [row for row in RECORDS[name]["rows"] if row["threads"] == threads]
    found = {impl: {case(row) for row in rows if row["impl"] == impl} for impl in ("aotops", "torch")}
    assert found["aotops"] == found["torch"]
    assert len(found["aotops"]) > 170
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16"}
    assert {row["pass"] for row in rows} == {"forward", "backward"}


def case(row):
    return row["op"], row["variant"], row["pass"], tuple(row["shape"]), row["dtype"]


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_rows_say_what_they_measured(record):
    assert {row["threads"] for row in record["rows"]} == set(map(int, record["copy_gbs"])) <= set(cpu.THREADS)
    for row in record["rows"]:
        assert row["us"] > 0
        assert row["impl"] != "aotops" or (row["version"] and len(row["kernel"].removeprefix(CPU_PREFIX)) == 12)


def row(threads, impl="aotops", us=1.0):
    return {
        "threads": threads, "op": "add", "variant": "", "pass": "forward", "shape": [8], "dtype": "float32",
        "impl": impl, "us": us,
    }  # fmt: skip


def record(*rows, command="one", device="a"):
    copies = {str(row["threads"]): 1.0 for row in rows}
    return {"device": device, "command": command, "copy_gbs": copies, "rows": list(rows)}


def test_counts_are_added_and_replaced():
    earlier, new = record(row(16), row(8)), record(row(8, us=2.0), row(2), command="two")
    found = cpu.merged(earlier, new)
    assert found["rows"] == [row(16), row(8, us=2.0), row(2)]
    assert found["command"] == "one; two"
    assert set(found["copy_gbs"]) == {"16", "8", "2"}
    assert cpu.merged(None, new) is new
    with pytest.raises(ValueError, match="of two devices: a and b"):
        cpu.merged(earlier, record(row(2), device="b"))


def test_the_summary_has_the_cases_in_which_torch_is_ahead():
    behind = cpu.summary([row(2), row(2, "torch", us=0.5), row(1), row(1, "torch", us=0.96)])
    assert behind == [
        "2 threads: torch is more than 5 % ahead in 1 of 1 cases",
        "  0.50  add forward 8 float32: 1.0 us, torch 0.5",
        "1 threads: torch is more than 5 % ahead in 0 of 1 cases",
    ]


def test_rows_that_are_older_than_their_sources_are_told():
    fresh = row(1) | {"kernel": of_kernel("add", device="cpu"), "date": "2001-01-03"}
    old = [fresh | {"kernel": of_kernel("gelu", device="cpu"), "date": f"2001-01-0{day}"} for day in (2, 1)]
    unknown = [fresh | {"kernel": kernel, "date": "2001-01-04"} for kernel in (of_kernel("add"), None)]
    assert cpu.changed([fresh, row(1, "torch")]) == []
    assert cpu.changed([fresh, *old, *unknown, row(1, "torch")]) == [
        "rows that are older than their sources, of 2001-01-01 to 2001-01-02: add 2",
        "rows without a hash of CPU sources, of 2001-01-04: add 2",
    ]


MEASURED = """
import json, os, sys
from pathlib import Path

threads = int(os.environ["OMP_NUM_THREADS"])
rows = [{"op": op, "cores": sorted(os.sched_getaffinity(0))} for op in sys.argv[4:]]
Path(sys.argv[2]).write_text(json.dumps({"device": "a, 1 threads", "copy_gbs": 1.0, "rows": rows}))
sys.exit("add" in sys.argv[4:])
"""


@pytest.mark.parametrize("at_once", [False, True])
def test_the_rows_of_a_process_that_fails_are_kept(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(cpu, "MEASURE", MEASURED)
    monkeypatch.setattr(cpu, "POLL_SECONDS", 0.01)
    failed = []
    *_, found = cpu.measured(cpu.jobs([1], tmp_path, at_once), 0.1, failed)
    assert sorted(row["op"] for row in found["rows"]) == sorted(cpu.OPS)
    assert {row["threads"] for row in found["rows"]} == {1}
    assert {len(row["cores"]) for row in found["rows"]} == {1 if at_once else len(os.sched_getaffinity(0))}
    assert failed == ["1 threads: a process ended with 1"]


WAITING = MEASURED.replace("sys.exit", "import time\ntime.sleep(60)\nsys.exit")


def test_what_was_measured_in_time_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "MEASURE", WAITING)
    monkeypatch.setattr(cpu, "POLL_SECONDS", 0.01)
    failed, todo = [], cpu.jobs([1, 2], tmp_path, False, ["gelu", "add"])
    # the time passes with the first results
    clock = SimpleNamespace(monotonic=lambda: 3.0 if todo[0].found else 0.0, sleep=time.sleep)
    monkeypatch.setattr(cpu, "time", clock)
    *_, found = cpu.measured(todo, 0.1, failed, 2)
    assert [(row["threads"], row["op"]) for row in found["rows"]] == [(1, "gelu"), (1, "add")]
    assert failed == ["1 threads: not ended within 2 s", "2 threads: not ended within 2 s"]


def test_counts_fill_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "cores_here", lambda: 16)
    jobs = cpu.jobs([16, 8, 2, 1], tmp_path, True)
    parts = {count: [job for job in jobs if job.threads == count] for count in cpu.THREADS}
    assert {count: len(of_count) for count, of_count in parts.items()} == {1: 8, 2: 4, 8: 2, 16: 1}
    for of_count in parts.values():
        assert sorted(op for job in of_count for op in job.ops) == sorted(cpu.OPS)
    assert [job.threads for job in jobs] == sorted(job.threads for job in jobs)


def test_more_threads_than_cores_are_refused(tmp_path):
    with pytest.raises(ValueError, match="1024 threads, expected no more than"):
        cpu.jobs([1024], tmp_path, True)
