"""attention on the CPU beside torch's and jax.numpy's: `python -m benchmarks.attention_cpu`.

Milliseconds forward and backward with two threads, of 4 heads of 64, in float32 and bfloat16, causal or not: of one
example, and of as many as make 4096 tokens. Implementations take turns, and the median of the rounds counts. Beside
jax.numpy's softmax of a matrix of scores a row has the memory too that XLA plans for a forward and backward. Either
dtype, and JAX, has a process of its own on two cores of its own. Writes a file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/attention_cpu.json"
HEADS, HEAD_DIM, TOKENS, THREADS = 4, 64, 4096, 2
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
PARTS = ("float32", "bfloat16", "jax")

Row = dict[str, Any]
Steps = dict[str, Callable[[], Any]]
"""By implementation."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.2, help="Of each step; default: %(default)s")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--json", type=Path, default=RESULT, help="Default: %(default)s")
    parser.add_argument("--part", choices=PARTS, help="This one alone, in this process")
    options = parser.parse_args()
    if options.part:
        rows = jax_rows(options.seconds) if options.part == "jax" else torch_rows(options)
        options.json.write_text(json.dumps(list(rows)))
        return
    from aotops import __version__

    record = {
        "command": shlex.join(["python", "-m", "benchmarks.attention_cpu", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "device": processor(),
        "versions": {"aotops": __version__, "python": platform.python_version()},
        "rows": measured(options),
    }
    options.json.write_text(json.dumps(record, indent=1) + "\n")


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {THREADS} threads"


def measured(options: argparse.Namespace) -> list[Row]:
    """The rows of all parts, which run at the same time where there are cores for them."""
    cores = sorted(os.sched_getaffinity(0))
    at_once = max(1, min(len(PARTS), len(cores) // (2 * THREADS)))
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for first in range(0, len(PARTS), at_once):
            running = [
                started(part, cores[i * THREADS : (i + 1) * THREADS], Path(folder) / f"{part}.json", options)
                for i, part in enumerate(PARTS[first : first + at_once])
            ]
            for process, file in running:
                if process.wait():
                    raise SystemExit(f"{file.stem}: failed")
                found += json.loads(file.read_text())
    return found


def started(part: str, cores: list[int], file: Path, options: argparse.Namespace) -> tuple[subprocess.Popen, Path]:
    lengths = ["--lengths", *map(str, options.lengths)]
    command = [sys.executable, "-m", "benchmarks.attention_cpu", "--part", part, "--json", str(file)]
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [*command, "--seconds", str(options.seconds), *lengths],
        env=environment,
        cwd=ROOT,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    ), file


# --------------------------------------------------------------------------------------------------------------- torch


def torch_rows(options: argparse.Namespace) -> list[Row]:
    import torch

    torch.set_num_threads(THREADS)
    rows = []
    for length in options.lengths:
        for batch in sorted({1, TOKENS // length}):
            for causal in (False, True):
                what = {"peer": "torch", "dtype": options.part, "length": length, "batch": batch, "causal": causal}
                steps = torch_steps(batch, length, getattr(torch, options.part), causal)
                rows += [what | timed(name, of, options.seconds) for name, of in steps.items()]
                print_rows(rows[-2:])
    return rows


def torch_steps(batch: int, length: int, dtype: Any, causal: bool) -> dict[str, Steps]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from aotops.frontends import torch as ours

    *leaves, dy = (torch.randn(batch, HEADS, length, HEAD_DIM, dtype=dtype) for _ in range(4))
    leaves = [x.requires_grad_() for x in leaves]
    calls = {
        "aotops": lambda: ours.attention(*leaves, causal=causal, layout="BHSD"),
        "torch": lambda: scaled_dot_product_attention(*leaves, is_causal=causal),
    }

    def backward(call: Callable[[], Any]) -> Callable[[], Any]:
        y = call()
        return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)

    return {
        "forward": {name: torch.no_grad()(call) for name, call in calls.items()},
        "backward": {name: backward(call) for name, call in calls.items()},
    }


def timed(step: str, steps: Steps, seconds: float) -> Row:
    """The median milliseconds of each implementation."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for run in steps.values():
        run()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["aotops"]) < 3:
        for name, run in steps.items():
            began = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - began))
    return {"step": step} | {name: round(median(found), 4) for name, found in times.items()}


def print_rows(rows: list[Row]) -> None:
    what = "  ".join(str(rows[0][key]) for key in ("dtype", "length", "batch"))
    told = [f"{row['step']} {row['aotops']:.3f} ms {row[row['peer']] / row['aotops']:.2f}" for row in rows]
    print(f"{rows[0]['peer']}  {what}  {'causal' if rows[0]['causal'] else 'full'}  {'  '.join(told)}", flush=True)


# ----------------------------------------------------------------------------------------------------------------- JAX


def jax_rows(seconds: float) -> list[Row]:
    rows = []
    for length in (2048, 4096):
        for causal in (False, True):
            what = {"peer": "jax.numpy", "dtype": "float32", "length": length, "batch": 1, "causal": causal}
            steps, memory = jax_steps(length, causal)
            rows += [what | timed(name, of, seconds) for name, of in steps.items()]
            rows[-1]["mib"] = memory
            print_rows(rows[-2:])
            print(f"  MiB of temporaries: {memory}", flush=True)
    return rows


def jax_steps(length: int, causal: bool) -> tuple[dict[str, Steps], dict[str, float]]:
    """A forward, and one with a backward; and the MiB that the latter takes besides its arguments and results."""
    import jax
    import jax.numpy as jnp

    from aotops.frontends import jax as ours

    def theirs(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * HEAD_DIM**-0.5
        if causal:
            scores = jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    *qkv, dy = (jax.random.normal(key, (1, length, HEADS, HEAD_DIM)) for key in jax.random.split(jax.random.key(0), 4))
    calls = {"aotops": lambda q, k, v: ours.attention(q, k, v, causal=causal), "jax.numpy": theirs}

    def both(call: Callable[..., Any]) -> Any:
        return jax.jit(lambda q, k, v, dy: jax.vjp(call, q, k, v)[1](dy)).lower(*qkv, dy).compile()

    def waits(program: Any, *args: Any) -> Callable[[], Any]:
        return lambda: jax.block_until_ready(program(*args))

    programs = {name: both(call) for name, call in calls.items()}
    steps = {
        "forward": {name: waits(jax.jit(call), *qkv) for name, call in calls.items()},
        "both": {name: waits(program, *qkv, dy) for name, program in programs.items()},
    }
    sizes = {name: program.memory_analysis().temp_size_in_bytes for name, program in programs.items()}
    return steps, {name: round(size / 2**20, 2) for name, size in sizes.items()}


if __name__ == "__main__":
    main()
