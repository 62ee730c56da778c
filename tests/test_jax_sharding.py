"""JAX on several devices: what XLA partitions, and what moves between them (sharded_jax.py, on four of the CPU's)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

from aotops.ops import OPS

PROGRAM = Path(__file__).parent / "sharded_jax.py"
EXAMPLE = Path(__file__).parents[1] / "examples" / "distributed" / "train_jax.py"
CHECKS = re.findall(r"^@check\ndef (\w+)", PROGRAM.read_text(), re.M)


def test_sharded_calls(tmp_path):
    """One test, so that one process runs the checks however many workers pytest has."""
    results = tmp_path / "results.json"
    done = subprocess.run([sys.executable, PROGRAM, results], capture_output=True, text=True, timeout=500)
    assert results.exists(), done.stdout + done.stderr
    errors = json.loads(results.read_text())
    assert set(errors) == {*OPS, *CHECKS}
    assert not any(errors.values()), "\n".join(f"{name}:\n{error}" for name, error in errors.items() if error)


def test_the_example_trains_as_one_device():
    done = subprocess.run([sys.executable, EXAMPLE, "--steps", "3"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    pattern = r"^(\w+) +loss .* on one device .* relative distance (\S+); in a step (.*)$"
    rows = re.findall(pattern, done.stdout, re.M)
    assert [model for model, *_ in rows] == ["digits", "transformer"], done.stdout
    assert all(float(distance) < 1e-5 and re.fullmatch(r"\d+ all-reduce", moved) for _, distance, moved in rows), rows
