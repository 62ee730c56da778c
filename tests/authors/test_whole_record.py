"""benchmarks.whole: its processes' parts are one record; a part that is there is not measured again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from benchmarks import whole

ROOT = Path(__file__).parents[2]
QUICK = ["--device", "cpu", "--quick", "--ops", "add", "--dtypes", "float32", "bfloat16", "--impls", "aotops", "numpy"]


def options(**given):
    defaults = {
        "device": "cuda",
        "gpus": [0, 1],
        "ops": [*whole.OPS],
        "dtypes": ["bfloat16", "float32"],
        "quick": False,
    }
    return Namespace(**defaults | given)


def test_each_part_is_one_gpus_and_the_gpus_have_as_much_to_do(tmp_path):
    whole.cases.use(whole.ROWS)
    whole.file_of(tmp_path, "gelu", "bfloat16").touch()
    found = whole.divided(tmp_path, options())
    parts = [part for of_gpu in found.values() for part in of_gpu]
    assert len(parts) == len({*parts})
    assert {op for op, _ in parts} == {*whole.OPS}
    assert ("gelu", "bfloat16") not in parts  # it is measured already
    sizes = [sum(whole.count(*part, options()) for part in of_gpu) for of_gpu in found.values()]
    assert max(sizes) - min(sizes) <= max(whole.count(*part, options()) for part in parts)


def test_parts_are_one_record(tmp_path):
    def run():
        command = [
            sys.executable,
            "-m",
            "benchmarks.whole",
            *QUICK,
            "--parts",
            tmp_path / "parts",
            "--json",
            tmp_path / "r",
        ]
        subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True)
        return json.loads((tmp_path / "r").read_text())

    record = run()
    assert {(row["op"], row["dtype"], row["impl"]) for row in record["rows"]} >= {
        ("add", "float32", "aotops"), ("add", "bfloat16", "aotops"), ("add", "float32", "numpy"),
    }  # fmt: skip
    assert record["command"].startswith("python -m benchmarks.whole --device cpu --quick")
    assert run()["rows"] == record["rows"]
