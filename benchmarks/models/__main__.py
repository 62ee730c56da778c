"""Whole training steps: ms a step, tokens a second, memory, the first step, losses, and in torch the kernels.

A step is forward, backward and AdamW on a batch of a synthetic text. Each row runs in a process of its own, the
implementations of a model in turn, and as often as --rounds says; the last rounds use what the first compiled. With
--at-once several processes prepare at the same time, and one after another takes its timed steps, alone on the machine.
The figures are the medians over rounds. In "bfloat16" the parameters are of this dtype, in "autocast" of float32. Tiny
rows may be merged into the file of another device.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import aotops
from aotops.bench.sources import of_kernel

from .spec import ASKED_FOR, IMPLS, MODELS, PRECISIONS, Spec

KEY = ("framework", "model", "impl", "precision", "deterministic", "tiny")
ROOT = Path(__file__).parents[2]

Row = dict[str, Any]


def run(spec: Spec, caches: Path, threads: int | None = None) -> dict[str, Any] | None:
    """The results of a row, written by a process of its own; None after printing why it failed."""
    folder = caches / "-".join((spec.framework, spec.model, spec.impl, spec.precision, str(spec.deterministic)))
    cold = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    env = os.environ | environment(spec, folder)
    if threads:
        env["TORCHINDUCTOR_COMPILE_THREADS"] = str(threads)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "benchmarks.models.train", json.dumps(asdict(spec)), file.name]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        if done.returncode == 0:
            answer = json.loads(Path(file.name).read_text())
            answer["row"]["cold"] = cold
            return answer
    print(
        f"{spec.framework} {spec.model} {spec.impl} {spec.precision}: failed\n{done.stderr[-4000:]}",
        file=sys.stderr,
        flush=True,
    )
    return None


def environment(spec: Spec, folder: Path) -> dict[str, str]:
    if spec.framework == "jax":
        flags = [os.environ.get("XLA_FLAGS", ""), *["--xla_gpu_deterministic_ops=true"] * spec.deterministic]
        return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": " ".join(filter(None, flags))}
    found = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
    if spec.deterministic:
        found["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it torch takes no deterministic product
    return found


def warm(specs: list[Spec], caches: Path, jobs: int) -> None:
    """Compiles at the same time, so that the measured processes find their code in the cache."""
    compiled = [replace(spec, compile_only=True, profile=False) for spec in specs if spec.compiled]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda spec: run(spec, caches, threads=4), compiled))


def merged_rounds(spec: Spec, rounds: list[Row]) -> Row:
    """The medians of the times. The first step is that of a process that found nothing compiled: no other is recorded
    where there is something to compile, and none where other processes run beside it."""
    row: Row = {key: getattr(spec, key) for key in KEY}
    row |= {key: statistics.median(r[key] for r in rounds) for key in ("ms", "wall_ms", "host_ms", "tokens_per_s")}
    row["peak_gib"] = rounds[0]["peak_gib"]
    if not spec.turns and (rounds[0]["cold"] or not spec.compiled):
        row["first_step_s"] = rounds[0]["first_step_s"]
    row |= {"loss": rounds[0]["loss"], "losses": rounds[0]["losses"], "rounds": [r["ms"] for r in rounds]}
    if len(rounds) > 1:
        row["same_bits"] = len({r["bits"] for r in rounds}) == 1
        row["losses_again"] = rounds[1]["losses"]
    row["bits"] = [r["bits"] for r in rounds]
    if spec.operators:
        row["sources"] = {op: of_kernel(op) for op in spec.operators}
    return row | {key: r[key] for r in rounds for key in ("kernels",) if key in r}


def measure(specs: list[Spec], rounds: int, caches: Path) -> tuple[list[Row], dict[str, Any]]:
    """The rows of one model and precision, whose implementations take turns, and the last process's answer."""
    found: dict[Spec, list[Row]] = {spec: [] for spec in specs}
    last: dict[str, Any] = {}
    for i in range(rounds):
        for spec in specs:
            if len(found[spec]) < i:
                continue  # failed before
            answer = run(spec if i == 0 else replace(spec, profile=False), caches)
            if answer is not None:
                last = answer
                found[spec].append(answer["row"])
                print(_line(spec, answer["row"]), flush=True)
    return [merged_rounds(spec, found[spec]) for spec in specs if found[spec]], last


def groups(specs: Sequence[Spec], at_once: int) -> list[list[Spec]]:
    """The rows of a model and precision, which take turns in one job; of several at once each row alone."""
    if at_once > 1:
        return [[spec] for spec in specs]
    names = dict.fromkeys((spec.model, spec.precision) for spec in specs)
    return [[spec for spec in specs if (spec.model, spec.precision) == name] for name in names]


def _line(spec: Spec, row: Row) -> str:
    impl = spec.impl + (" determ." if spec.deterministic else "")
    name = f"{spec.framework:5} {spec.model:6} {spec.precision:9} {impl:23}"
    times = f"{row['ms']:8.2f} ms  wall {row['wall_ms']:7.2f}  host {row['host_ms']:7.2f}"
    memory = f"{row['peak_gib'] or 0:6.2f} GiB"
    more = "  ".join(f"{kind} {ms:.1f}" for kind, ms in row.get("kernels", {}).get("classes_ms", {}).items())
    first = f"first {row['first_step_s']:5.1f} s"
    return f"{name} {times}  {memory}  {first}  loss {row['loss']:.4f}  {row['bits']}  {more}"


def head(framework: str, answer: dict[str, Any], command: str) -> dict[str, Any]:
    versions = {"aotops": aotops.__version__, "python": platform.python_version(), framework: answer["version"]}
    return {
        "device": answer["device"],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "versions": versions,
    }


def merge(earlier: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The new result with those rows of the earlier one that were not measured again, and the commands of both. Where
    the new rows are tiny, the device and the date stay: their times do not count."""
    if all(row["tiny"] for row in new["rows"]):
        new = (
            new
            | {key: earlier[key] for key in ("device", "date")}
            | {"versions": new["versions"] | earlier["versions"]}
        )
    if earlier["device"] != new["device"]:
        raise ValueError(f"models: these are of two devices: {earlier['device']} and {new['device']}")
    rows = {tuple(row[key] for key in KEY): row for row in [*earlier["rows"], *new["rows"]]}
    commands = dict.fromkeys([*earlier["command"].split("; "), new["command"]])
    versions = earlier["versions"] | new["versions"]
    return earlier | new | {"command": "; ".join(commands), "versions": versions, "rows": list(rows.values())}


def save(result: dict[str, Any], file: Path) -> None:
    """One row per line, for diff."""
    head = {key: value for key, value in result.items() if key != "rows"}
    rows = ",\n".join(f"    {json.dumps(row)}" for row in result["rows"])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'{json.dumps(head, indent=2)[:-2]},\n  "rows": [\n{rows}\n  ]\n}}\n')


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="model", help="default: all of the framework")
    parser.add_argument("--framework", choices=IMPLS, default="torch", help="default: %(default)s")
    parser.add_argument("--impls", help="default: all of the framework but aotops.sdpa")
    parser.add_argument("--precision", help="default: bfloat16; of MindSpore float32")
    parser.add_argument("--steps", type=int, default=20, help="timed steps; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--deterministic", action="store_true", help="with torch.use_deterministic_algorithms")
    parser.add_argument("--profile", action="store_true", help="also the kernels of a step (GPU)")
    parser.add_argument("--warm", type=int, default=0, metavar="JOBS", help="compile JOBS models at once, ahead")
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="ROWS", help="rows at the same time, but for timed steps (torch)"
    )
    parser.add_argument(
        "--turns", default="", metavar="FILE", help="others run beside it, but for timed steps, which lock FILE (torch)"
    )
    parser.add_argument("--caches", type=Path, metavar="FOLDER", help="of compiled code; default: a new one")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try this program")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--merge", action="store_true", help="keep the other rows of that file")
    args = parser.parse_args(argv)
    known = {"models": MODELS, "impls": IMPLS, "precision": PRECISIONS}
    args.models = args.models or list(MODELS[args.framework])
    args.impls = (
        args.impls.split(",") if args.impls else [name for name in IMPLS[args.framework] if name not in ASKED_FOR]
    )
    args.precision = args.precision.split(",") if args.precision else [PRECISIONS[args.framework][0]]
    if args.at_once > 1 and args.framework != "torch":
        parser.error(f"--at-once: steps of {args.framework} take no turns, expected torch")
    for key, of_framework in known.items():
        given, allowed = getattr(args, key), of_framework[args.framework]
        if unknown := [name for name in given if name not in allowed]:
            parser.error(f"{unknown[0]!r} is none of {', '.join(allowed)}, those of {args.framework}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.at_once > 1:
        threads = max(1, len(os.sched_getaffinity(0)) // args.at_once)
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    specs = [
        Spec(
            model,
            impl,
            precision,
            args.steps,
            args.tiny,
            args.deterministic,
            args.profile,
            framework=args.framework,
            turns=args.turns,
        )
        for model in args.models
        for precision in args.precision
        for impl in args.impls
    ]
    command = shlex.join(["python", "-m", "benchmarks.models", *(sys.argv[1:] if argv is None else argv)])
    keep = args.merge and args.json and args.json.exists()
    result = json.loads(args.json.read_text()) if keep else None
    measured = 0
    with tempfile.TemporaryDirectory() as temporary:
        caches = args.caches or Path(temporary)
        if args.at_once > 1:
            specs = [replace(spec, turns=spec.turns or f"{temporary}/turns") for spec in specs]
        if args.warm:
            warm(specs, caches, args.warm)
        with ThreadPoolExecutor(args.at_once) as pool:
            jobs = [pool.submit(measure, group, args.rounds, caches) for group in groups(specs, args.at_once)]
            for job in as_completed(jobs):
                rows, answer = job.result()
                measured += len(rows)
                if rows:
                    new = head(args.framework, answer, command) | {"rows": rows}
                    result = merge(result, new) if result else new
                if result and args.json:  # after each group: what was measured stays if a later one fails
                    save(result, args.json)
    if measured < len(specs):
        sys.exit(f"models: {len(specs) - measured} of {len(specs)} rows failed")


if __name__ == "__main__":
    main()
