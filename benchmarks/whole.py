"""Every operator of `aotops bench` in one run of several processes on several GPUs: `python -m benchmarks.whole`.

What torch.compile and quack want compiled is compiled first, by all processes at once. Then each process has the cases
of one operator and dtype. On a GPU they prepare at once and measure one after another (aotops.bench.turns), so that
nothing else runs beside a measurement. A part that is in `--parts` already is not measured again: a run that was cut
off goes on. Writes benchmarks/results/h200.json; the plots and the page are made of it by the commands of
docs/performance.md.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aotops.bench import baselines, cases, precompile, report
from aotops.ops import OPS

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "tests/cases"
RESULT = ROOT / "benchmarks/results/h200.json"
IMPLS = ("aotops", "torch", "torch.compile", "quack", "liger")

Part = tuple[str, str]
"""An operator and a dtype."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[0], help="Default: %(default)s")
    parser.add_argument(
        "--processes", type=int, default=8, help="On each GPU, which has memory for 7 GB each; default: %(default)s"
    )
    parser.add_argument("--ops", nargs="+", default=[*OPS], metavar="OP", help="Default: all built-in operators")
    parser.add_argument("--impls", nargs="+", default=IMPLS, help="Default: %(default)s")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], help="Default: %(default)s")
    parser.add_argument("--device", default="cuda", help="cpu: to try this program")
    parser.add_argument("--quick", action="store_true", help="as of `aotops bench`: to try this program")
    parser.add_argument("--parts", type=Path, help="The folder of the parts; default: a new one")
    parser.add_argument("--json", type=Path, default=RESULT, help="Default: %(default)s")
    parser.add_argument("--compile-only", action="store_true", help="Measure nothing: the rest is another process's")
    options = parser.parse_args()
    cases.use(ROWS)
    if options.compile_only:
        ahead(options)
        return
    folder = options.parts or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(options.gpus)) as pool:
        jobs = [pool.submit(of_gpu, gpu, parts, folder, options) for gpu, parts in divided(folder, options).items()]
        failed = [name for job in jobs for name in job.result()]
    files = sorted(folder.glob("*.json"))
    record = report.load(files)
    if record is None:
        sys.exit("whole: nothing was measured")
    report.save(record | {"command": shlex.join(["python", "-m", "benchmarks.whole", *sys.argv[1:]])}, options.json)
    if failed:
        sys.exit(f"whole: these failed: {', '.join(failed)}")


def file_of(folder: Path, op: str, dtype: str) -> Path:
    return folder / f"{op}.{dtype}.json"


def count(op: str, dtype: str, options: argparse.Namespace) -> int:
    """The cases of a part."""
    return len(list(cases.cases(options.device, [dtype], [op], quick=options.quick)))


def divided(folder: Path, options: argparse.Namespace) -> dict[int, list[Part]]:
    """The parts of each GPU that are not in the folder yet, longest first."""
    todo = [(op, dtype) for op in options.ops for dtype in options.dtypes if not file_of(folder, op, dtype).exists()]
    lengths = {(op, dtype): count(op, dtype, options) for op, dtype in todo}
    found: dict[int, list[Part]] = {gpu: [] for gpu in options.gpus}
    for part in sorted(filter(lengths.get, lengths), key=lengths.__getitem__, reverse=True):
        least = min(found, key=lambda gpu: sum(lengths[each] for each in found[gpu]))
        found[least].append(part)
    return found


def ahead(options: argparse.Namespace) -> None:
    """Compiles, on the GPU that is visible."""
    todo = list(cases.cases(options.device, options.dtypes, options.ops, quick=options.quick))
    impls = baselines.available(options.device, [*options.impls], options.ops)
    precompile.precompile(todo, impls, options.device, options.processes)


def of_gpu(gpu: int, parts: Sequence[Part], folder: Path, options: argparse.Namespace) -> list[str]:
    """Measures these parts; the names of those that failed."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
    given = ["--quick"] * options.quick

    def run(*words: str) -> int:
        return subprocess.run([sys.executable, "-m", *words, *given], env=environment, cwd=ROOT).returncode

    if options.device == "cuda" and parts:
        ops, dtypes = dict.fromkeys(op for op, _ in parts), dict.fromkeys(dtype for _, dtype in parts)
        several = "--ops", *ops, "--dtypes", *dtypes, "--impls", *options.impls
        run("benchmarks.whole", "--compile-only", *several, "--processes", str(options.processes))

    def measure(part: Part) -> str | None:
        op, dtype = part
        name = ".".join(part)
        unfinished = folder / f"{name}.new"
        arguments = ["bench", op, "--device", options.device, "--dtypes", dtype, "--impls", ",".join(options.impls)]
        arguments += ["--jobs", "1", "--cases", str(ROWS), "--turns", str(folder / f"gpu{gpu}"), "--json"]
        if run("aotops", *arguments, str(unfinished)):
            return name
        unfinished.rename(file_of(folder, op, dtype))
        return None

    with ThreadPoolExecutor(options.processes) as pool:
        return [name for name in pool.map(measure, parts) if name]


if __name__ == "__main__":
    main()
