"""Two operators, vector addition and row sums, optimized one step at a time and measured after each step.

    python examples/optimization_study/study.py                   builds kernels.cu, measures and prints
        --json benchmarks/results/optimization_study.json         writes the figures
        --plot docs/optimization_study.png                        draws them
        --markdown docs/optimization_study.md                     updates the tables in the text, between its markers
        --from FILE                                               reads the figures from there; needs no GPU

Timed as by `aotops bench`: medians of CUDA graph replays, inputs rotated so that none is in the L2 cache, and a copy of
as many bytes in the same run.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

STEPS = {
    "add": {
        "naive": "one block of 256 threads that loops over all elements",
        "strided": "one thread per 32 consecutive elements",
        "coalesced": "one thread per element, consecutive",
        "vectorised": "four elements per load",
        "unrolled": "four such loads of each input in flight",
        "shared": "vectorised, staged through shared memory",
    },
    "row_sum": {
        "naive": "one thread per row",
        "strided": "one block per row, each thread a consecutive run; atomic additions",
        "coalesced": "consecutive threads read consecutive elements; atomic additions",
        "shared": "partial sums reduced in shared memory, as a tree",
        "shuffles": "partial sums reduced by warp shuffles first",
        "vectorised": "four elements per load",
        "unrolled": "four such loads in flight",
        "warp": "the same with one warp per row",
    },
}
SHAPES = {"add": [(1 << 26,)], "row_sum": [(8192, 8192), (262144, 256)]}

Row = dict[str, Any]


# -------------------------------------------------------------------------------------------------------- measurement


def build(folder: Path, arch: str) -> ctypes.CDLL:
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    library = folder / "kernels.so"
    flags = ["-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC", f"-arch={arch}"]
    subprocess.run([nvcc, *flags, HERE / "kernels.cu", "-o", library], check=True)
    return ctypes.CDLL(str(library))


def measure(arch: str, quick: bool) -> dict[str, Any]:
    import torch

    from aotops.bench.measure import Cuda

    machine = Cuda(quick)
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder), arch)
    rows = [row for op in STEPS for shape in SHAPES[op] for row in measured(machine, library, op, shape)]
    return {
        "device": machine.name,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "copy_gbs": round(machine.copy_gbs(machine.COPIED), 1),
        "rows": rows,
    }


def measured(machine: Any, library: ctypes.CDLL, op: str, shape: tuple[int, ...]) -> list[Row]:
    import torch

    from aotops.bench.measure import medians

    n_in = 2 if op == "add" else 1
    inputs_bytes = n_in * 4 * math.prod(shape)
    sets = [
        [torch.randn(shape, device="cuda") for _ in range(n_in)]
        + [torch.empty(shape if op == "add" else shape[:1], device="cuda")]
        for _ in range(machine.sets(inputs_bytes))
    ]
    nbytes = 4 * sum(t.numel() for t in sets[0])
    reference = torch.add if op == "add" else partial(torch.sum, dim=-1)
    rows = []
    for step in (*STEPS[op], "torch"):
        if step == "torch":
            calls = [partial(reference, *inputs, out=output) for *inputs, output in sets]
        else:
            calls = [launch(library, f"{op}_{step}", tensors, shape) for tensors in sets]
            check(calls[0], reference, sets[0])
        seconds = medians({step: machine.turn(calls)}, machine.repeats, budget=3.0)[step]
        gbs = nbytes / seconds / 1e9
        rows.append({
            "op": op, "step": step, "shape": list(shape), "us": round(seconds * 1e6, 2), "gbs": round(gbs, 1),
            "of_copy": round(gbs / machine.copy_gbs(nbytes), 4),
        })  # fmt: skip
        print(f"{op} {'x'.join(map(str, shape)):12} {step:12} {seconds * 1e6:12,.1f} us {gbs:8,.1f} GB/s "
              f"{rows[-1]['of_copy']:6.3f}", flush=True)  # fmt: skip
    return rows


def launch(library: ctypes.CDLL, name: str, tensors: list[Any], shape: tuple[int, ...]) -> Callable[[], None]:
    import torch

    function = getattr(library, name)
    arguments = [*(c_void_p(t.data_ptr()) for t in tensors), *map(c_int64, shape)]

    def call() -> None:
        error = function(*arguments, c_void_p(torch.cuda.current_stream().cuda_stream))
        if error:
            raise RuntimeError(f"{name}: CUDA error {error}")

    return call


def check(call: Callable[[], None], reference: Callable[..., Any], tensors: list[Any]) -> None:
    """Raises AssertionError if the kernel's result is wrong."""
    import torch

    *inputs, output = tensors
    output.fill_(math.nan)
    call()
    expected = reference(*(t.double() for t in inputs))
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-2)


# --------------------------------------------------------------------------------------------------------------- report


def panels(result: dict[str, Any]) -> dict[tuple[str, tuple[int, ...]], list[Row]]:
    found: dict[tuple[str, tuple[int, ...]], list[Row]] = {}
    for row in result["rows"]:
        found.setdefault((row["op"], tuple(row["shape"])), []).append(row)
    return found


def draw(result: dict[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    groups = panels(result)
    heights = [len(rows) for rows in groups.values()]
    figure, axes = plt.subplots(
        len(groups), 1, figsize=(8, 0.34 * sum(heights) + 0.9 * len(groups)), height_ratios=heights, sharex=True,
        layout="constrained",
    )  # fmt: skip
    for ax, ((op, shape), rows) in zip(axes, groups.items(), strict=True):
        panel(ax, f"{op} of {' x '.join(f'{n:,}' for n in shape)} float32", rows)
    axes[-1].set_xlabel("GB/s; on the bar: fraction of the copy (dashed line)")
    figure.suptitle(f"One step at a time, on {result['device']}", fontweight="bold")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


def panel(ax: Any, title: str, rows: list[Row]) -> None:
    names, values = [row["step"] for row in rows], [row["gbs"] for row in rows]
    copy = values[0] / rows[0]["of_copy"]
    colors = ["#868e96" if name == "torch" else "#d6336c" for name in names]
    ax.barh(names, values, color=colors, height=0.7)
    for i, row in enumerate(rows):
        inside = row["of_copy"] > 0.1
        style = {"color": "white", "fontweight": "bold"} if inside else {"color": "#212529"}
        text = f"{row['of_copy']:.2f}" if row["of_copy"] >= 0.01 else f"{row['of_copy']:.4f}"
        ax.text(0 if inside else row["gbs"], i, f"  {text}", va="center", fontsize=9, **style)
    ax.axvline(copy, color="#212529", lw=1.2, ls=(0, (4, 3)), zorder=0)
    ax.set_title(title, fontsize=10, loc="left")
    ax.invert_yaxis()
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="x", color="#e9ecef", lw=0.8)
    ax.set_axisbelow(True)


def fill_in(result: dict[str, Any], file: Path) -> None:
    """Replaces the text between ``<!-- figures NAME -->`` and ``<!-- end -->``."""
    texts = {"run": f"{result['device']}, {result['date'][:10]}, torch {result['versions']['torch']}, CUDA "
             f"{result['versions']['cuda']}; a large copy moves {result['copy_gbs']:,.0f} GB/s."}  # fmt: skip
    for (op, shape), rows in panels(result).items():
        texts[f"{op} {'x'.join(map(str, shape))}"] = table(op, rows)

    def text(match: re.Match[str]) -> str:
        if match[1] not in texts:
            raise SystemExit(f"{file}: unknown figures {match[1]!r}, expected one of {', '.join(texts)}")
        return f"<!-- figures {match[1]} -->\n{texts[match[1]]}\n<!-- end -->"

    marked = re.compile(r"<!-- figures (.*?) -->.*?<!-- end -->", re.DOTALL)
    file.write_text(marked.sub(text, file.read_text()))


def table(op: str, rows: list[Row]) -> str:
    lines = ["| step | what it does | us | GB/s | of copy | faster than the step before |", "|---|---|--:|--:|--:|--:|"]
    before = None
    for row in rows:
        what = STEPS[op].get(row["step"], "torch's own")
        gain = f"{before / row['us']:.2f}x" if before and row["step"] != "torch" else ""
        figures = f"{row['us']:,.1f} | {row['gbs']:,.1f} | {row['of_copy']:.3f}"
        lines.append(f"| {row['step']} | {what} | {figures} | {gain} |")
        before = row["us"]
    return "\n".join(["", *lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="source")
    parser.add_argument("--arch", default="native", help="nvcc's -arch; default: that of the GPU here")
    parser.add_argument("--quick", action="store_true", help="few repeats")
    args = parser.parse_args()

    result = json.loads(args.source.read_text()) if args.source else measure(args.arch, args.quick)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        draw(result, args.plot)
    if args.markdown:
        fill_in(result, args.markdown)


if __name__ == "__main__":
    main()
