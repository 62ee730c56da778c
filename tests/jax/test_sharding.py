"""JAX on several devices: what XLA partitions, and what moves between them (sharded_jax.py, on four of the CPU's)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

from aotops.ops import OPS

PROGRAM = Path(__file__).parents[1] / "programs" / "sharded_jax.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed" / "train_jax.py"
CHECKS = re.findall(r"^@check\ndef (\w+)", PROGRAM.read_text(), re.M)


def test_sharded_calls(tmp_path):
    """One test, so that one process runs the checks however many workers pytest has."""
    results = tmp_path / "results.json"
    done = subprocess.run([sys.executable, PROGRAM, results], capture_output=True, text=True, timeout=900)
    assert results.exists(), done.stdout + done.stderr
    errors = json.loads(results.read_text())
    assert set(errors) >= {*CHECKS, *(name for name, op in OPS.items() if op.dims)}
    assert not any(errors.values()), "\n".join(f"{name}:\n{error}" for name, error in errors.items() if error)


@pytest.mark.parametrize(
    ("devices", "steps", "splits"),
    [
        ("", "3", ["batches of 32 in 4, the model in 1", "batches of 16 in 2, the model in 2"]),  # 4
        ("1", "1", ["batches of 32 in 1, the model in 1", "batches of 16 in 1, the model in 1"]),
        ("2", "1", ["batches of 32 in 2, the model in 1", "batches of 16 in 1, the model in 2"]),
        ("3", "1", ["batches of 30 in 3, the model in 1", "batches of 15 in 3, the model in 1"]),
    ],
    ids=["4", "1", "2", "3"],
)
def test_the_example_trains_as_one_device(devices, steps, splits):
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"} if devices else {}
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | flags
    command = [sys.executable, EXAMPLE, "--steps", steps]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    pattern = r"^(\w+) +(.*): loss .* on one device .* relative distance (\S+); in a step (.*)$"
    rows = re.findall(pattern, done.stdout, re.M)
    assert [model for model, *_ in rows] == ["digits", "transformer"], done.stdout
    assert [split for _, split, *_ in rows] == splits
    moves = r"nothing" if devices == "1" else r"\d+ all-reduce"
    assert all(float(distance) < 1e-5 and re.fullmatch(moves, moved) for *_, distance, moved in rows), rows


@pytest.mark.parametrize("devices", ["2", "4"])
def test_attention_over_a_split_sequence(devices):
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    program = EXAMPLE.with_name("sequence_jax.py")
    done = subprocess.run(
        [sys.executable, program, "--tokens", "150"],
        **{"capture_output": True, "text": True, "timeout": 300},
        env=os.environ | flags,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^(\w+) +(\d+) tokens in (\d) parts: y .*, dq .*, dk .*, dv .*; (.*)$", done.stdout, re.M)
    length = str(150 * int(devices))
    assert rows == [(kind, length, devices, "all-gather, reduce-scatter") for kind in ("full", "causal")]
