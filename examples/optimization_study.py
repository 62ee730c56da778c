"""Operators optimized one step at a time, and access patterns, measured after each step.

    python examples/optimization_study.py                  compiles the kernels, checks and measures them, and prints
        --ops add,row_sum                                  some of add, row_sum, access, matmul
        --json benchmarks/results/optimization_study.json  writes the figures
        --plot docs/optimization_study.png                 draws them
        --markdown docs/optimization_study.md              updates the tables in the text, between its markers
        --from FILE                                        reads the figures from there; needs no GPU

Timed as by `aotops bench`: medians of CUDA graph replays, inputs rotated so that none is in the L2 cache, and a copy of
as many bytes in the same run.
"""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from ctypes import c_int64, c_void_p
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import tables
from tables import Result, Row

KERNELS = Path(__file__).resolve().parent / "kernels"

Shape = tuple[int, ...]
Tensors = list[Any]


@dataclass(frozen=True)
class Study:
    """The subject of a measurement: kernels ``<op>_<step>`` of one source, each with the same arguments."""

    source: str
    steps: dict[str, str]
    """The steps, in the order in which they were taken, and what each does."""
    shapes: Callable[[str], Iterable[Shape]]
    """The sizes that the launcher of a step takes."""
    tensors: Callable[[Shape], Tensors]
    """Inputs, and the output last."""
    expected: Callable[..., Any]
    """The elements that a step must write, computed from its name, the shape and the inputs in float64."""
    written: Callable[[str, Shape, Any], Any] = lambda step, shape, output: output
    """The elements of the output that a step writes."""
    nbytes: Callable[[str, Shape], int] = lambda step, shape: 0
    """The fewest that a step must move; 0 where the arithmetic is the limit."""
    flops: Callable[[Shape], int] = lambda shape: 0
    libraries: dict[str, Callable[[], Callable[..., Any]]] = field(default_factory=dict)
    """Implementations of others: each is a function that returns ``function(*inputs, out=output)``."""
    tolerance: Callable[[str], float] = lambda step: 1e-4
    """The largest error, as a fraction of the root mean square of what is expected."""


# ------------------------------------------------------------------------------------------------------------- studies


def uniform(*shapes: Shape) -> Tensors:
    import torch

    return [torch.randn(shape, device="cuda") for shape in shapes]


def empty(shape: Shape) -> Any:
    import torch

    return torch.empty(shape, device="cuda")


def torchs(name: str, **attributes: Any) -> Callable[[], Callable[..., Any]]:
    def function() -> Callable[..., Any]:
        import torch

        return partial(getattr(torch, name), **attributes)

    return function


ADD = Study(
    source="add_and_row_sum",
    steps={
        "naive": "one block of 256 threads that loops over all elements",
        "strided": "one thread per 32 consecutive elements",
        "coalesced": "one thread per element, consecutive",
        "vectorised": "four elements per load",
        "unrolled": "four such loads of each input in flight",
        "shared": "vectorised, staged through shared memory",
    },
    shapes=lambda step: [(1 << 26,)],
    tensors=lambda shape: [*uniform(shape, shape), empty(shape)],
    expected=lambda step, shape, a, b: a + b,
    nbytes=lambda step, shape: 12 * shape[0],
    libraries={"torch": torchs("add")},
)

ROW_SUM = Study(
    source="add_and_row_sum",
    steps={
        "naive": "one thread per row",
        "strided": "one block per row, each thread a consecutive run; atomic additions",
        "coalesced": "consecutive threads read consecutive elements; atomic additions",
        "shared": "partial sums reduced in shared memory, as a tree",
        "shuffles": "partial sums reduced by warp shuffles first",
        "vectorised": "four elements per load",
        "unrolled": "four such loads in flight",
        "warp": "the same with one warp per row",
    },
    shapes=lambda step: [(8192, 8192), (262144, 256)],
    tensors=lambda shape: [*uniform(shape), empty(shape[:1])],
    expected=lambda step, shape, x: x.sum(-1),
    nbytes=lambda step, shape: 4 * (math.prod(shape) + shape[0]),
    libraries={"torch": torchs("sum", dim=-1)},
)

COPIED = 1 << 25
STEPS = (1, 2, 4, 8, 16, 32)
PATTERNS = {
    "contiguous": "one element per load",
    "contiguous_vectors": "four elements per load",
    "strided_read": "reads every s-th element",
    "strided_write": "writes every s-th element",
    "gathered": "reads runs of s elements, which lie at random; an index per element",
    "misaligned": "reads from the s-th element on, one element per load",
    "misaligned_vectors": "the same, four elements per load where the address is aligned to 16 bytes, else one",
}


def access_tensors(shape: Shape) -> Tensors:
    import torch

    n, step = shape
    runs = torch.randperm(n // step, device="cuda", dtype=torch.int32)
    index = (runs[:, None] * step + torch.arange(step, device="cuda", dtype=torch.int32)).flatten()
    size = ((n + 1) * step,)
    return [*uniform(size), index, empty(size)]


def accessed(step: str, shape: Shape, x: Any, index: Any) -> Any:
    n, distance = shape
    if step == "strided_read":
        return x[: n * distance : distance]
    if step == "gathered":
        return x[index.long()]
    return x[distance : n + distance] if step.startswith("misaligned") else x[:n]


ACCESS = Study(
    source="access",
    steps=PATTERNS,
    shapes=lambda step: [(COPIED, s) for s in (STEPS[:1] if step.startswith("contiguous") else STEPS)],
    tensors=access_tensors,
    expected=accessed,
    written=lambda step, shape, y: y[: shape[0] * shape[1] : shape[1]] if step == "strided_write" else y[: shape[0]],
    nbytes=lambda step, shape: (12 if step == "gathered" else 8) * shape[0],
    tolerance=lambda step: 0,
)


def matmul_with_tf32() -> Callable[..., Any]:
    import torch

    def function(a: Any, b: Any, out: Any) -> None:
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.matmul(a, b, out=out)
        torch.backends.cuda.matmul.allow_tf32 = False

    return function


def aotops_matmul(allow_tf32: bool) -> Callable[[], Callable[..., Any]]:
    def function() -> Callable[..., Any]:
        from aotops.frontends import torch as frontend

        return lambda a, b, out: frontend.matmul(a, b, allow_tf32=allow_tf32)

    return function


TENSOR_CORES = ("tensor_cores", "asynchronous", "warp_tiles", "truncated", "cuBLAS, TF32", "aotops, TF32")
MATMUL = Study(
    source="matmul",
    steps={
        "naive": "one element per thread; consecutive threads take consecutive rows",
        "coalesced": "consecutive threads take consecutive columns",
        "shared": "blocks of 32 x 32 elements; both factors read through shared memory",
        "registers": "blocks of 128 x 128 elements, 8 x 8 of them in the registers of a thread",
        "vectors": "four elements per load, from global and from shared memory",
        "prefetched": "the next tile is loaded while one is multiplied; one barrier per tile",
        "tensor_cores": "TF32: factors rounded to 10 bits, multiplied by tensor cores (mma.sync)",
        "asynchronous": "TF32: three tiles, copied by cp.async while others are multiplied",
        "warp_tiles": "TF32: 64 x 64 elements per warp, not 64 x 32: fewer loads and roundings per product",
        "truncated": "TF32: the factors truncated by the tensor cores, not rounded before",
    },
    shapes=lambda step: [(4096, 4096, 4096)],
    tensors=lambda shape: [*uniform((shape[0], shape[2]), (shape[2], shape[1])), empty(shape[:2])],
    expected=lambda step, shape, a, b: a @ b,
    flops=lambda shape: 2 * math.prod(shape),
    libraries={
        "cuBLAS": torchs("matmul"),
        "cuBLAS, TF32": matmul_with_tf32,
        "aotops": aotops_matmul(False),
        "aotops, TF32": aotops_matmul(True),
    },
    tolerance=lambda step: 1e-2 if step in TENSOR_CORES else 1e-4,
)

STUDIES = {"add": ADD, "row_sum": ROW_SUM, "access": ACCESS, "matmul": MATMUL}


# -------------------------------------------------------------------------------------------------------- measurement


def build(folder: Path, source: str, arch: str) -> ctypes.CDLL:
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    library = folder / f"{source}.so"
    flags = ["-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC", f"-arch={arch}"]
    subprocess.run([nvcc, *flags, KERNELS / f"{source}.cu", "-o", library], check=True)
    return ctypes.CDLL(str(library))


def measure(ops: list[str], arch: str, quick: bool) -> Result:
    import torch

    from aotops.bench.measure import Cuda

    torch.manual_seed(0)
    machine = Cuda(quick)
    with tempfile.TemporaryDirectory() as folder:
        libraries = {op: build(Path(folder), STUDIES[op].source, arch) for op in ops}
    rows = [row for op in ops for row in measured(machine, libraries[op], op)]
    return tables.record(machine.name, rows, copy_gbs=round(machine.copy_gbs(machine.COPIED), 1))


def measured(machine: Any, library: ctypes.CDLL, op: str) -> list[Row]:
    study = STUDIES[op]
    names = (*study.steps, *study.libraries)
    shapes = {name: list(study.shapes(name)) for name in names}
    rows: list[Row] = []
    for shape in dict.fromkeys(shape for some in shapes.values() for shape in some):
        first = study.tensors(shape)
        nbytes = sum(t.nbytes for t in first[:-1])
        sets = [first, *(study.tensors(shape) for _ in range(machine.sets(nbytes) - 1))]
        for name in names:
            if shape in shapes[name]:
                rows.append(measured_step(machine, library, op, name, shape, sets))
        del first, sets
        machine.free()
    return rows


def measured_step(machine: Any, library: ctypes.CDLL, op: str, step: str, shape: Shape, sets: list[Tensors]) -> Row:
    from aotops.bench.measure import samples

    study = STUDIES[op]
    if step in study.libraries:
        function = study.libraries[step]()
        calls = [partial(function, *inputs, out=output) for *inputs, output in sets]
    else:
        calls = [launch(library, f"{op}_{step}", tensors, shape) for tensors in sets]
        check(calls[0], study, step, shape, sets[0])
    seconds = machine.figure(samples({step: machine.turn(calls)}, machine.repeats, budget=3.0)[step])
    row = {"op": op, "step": step, "shape": list(shape), "us": round(seconds * 1e6, 2)}
    if nbytes := study.nbytes(step, shape):
        gbs = nbytes / seconds / 1e9
        row |= {"gbs": round(gbs, 1), "of_copy": round(gbs / machine.copy_gbs(nbytes), 4)}
    if flops := study.flops(shape):
        row |= {"tflops": round(flops / seconds / 1e12, 3)}
    print(*row.values(), flush=True)
    return row


def launch(library: ctypes.CDLL, name: str, tensors: Tensors, shape: Shape) -> Callable[[], None]:
    import torch

    function = getattr(library, name)
    arguments = [*(c_void_p(t.data_ptr()) for t in tensors), *map(c_int64, shape)]

    def call() -> None:
        error = function(*arguments, c_void_p(torch.cuda.current_stream().cuda_stream))
        if error:
            raise RuntimeError(f"{name}: CUDA error {error}")

    return call


def check(call: Callable[[], None], study: Study, step: str, shape: Shape, tensors: Tensors) -> None:
    """Raises AssertionError if the kernel's result is wrong, or an element of it was not written."""
    *inputs, output = tensors
    output.fill_(math.nan)
    call()
    expected = study.expected(step, shape, *(t.double() if t.is_floating_point() else t for t in inputs))
    error = (study.written(step, shape, output) - expected).abs().max().item()
    allowed = study.tolerance(step) * expected.square().mean().sqrt().item()
    if not error <= allowed:  # NaN too
        raise AssertionError(f"{step} of {shape}: the largest error is {error}, expected at most {allowed}")


# --------------------------------------------------------------------------------------------------------------- report


def panels(result: Result) -> dict[str, list[Row]]:
    """The rows of each table: of an operator and a shape, or of all shapes of access."""
    found: dict[str, list[Row]] = {}
    for row in result["rows"]:
        shape = "" if row["op"] == "access" else f" {'x'.join(map(str, row['shape']))}"
        found.setdefault(row["op"] + shape, []).append(row)
    return found


def texts(result: Result) -> dict[str, str]:
    ops = " ".join(dict.fromkeys(row["op"] for row in result["rows"]))
    run = f"{tables.source(result)[:-1]}; a large copy moves {result['copy_gbs']:,.0f} GB/s."
    makers = {"add": steps_table, "row_sum": steps_table, "access": access_table, "matmul": matmul_table}
    return {f"run {ops}": run} | {name: makers[rows[0]["op"]](rows) for name, rows in panels(result).items()}


def description(row: Row) -> str:
    return STUDIES[row["op"]].steps.get(row["step"], "")


def gains(rows: list[Row]) -> list[str]:
    """For each step, the time of the step before it over its own."""
    steps = [row for row in rows if description(row)]
    gain = {id(now): f"{before['us'] / now['us']:.2f}x" for before, now in pairwise(steps)}
    return [gain.get(id(row), "") for row in rows]


def steps_table(rows: list[Row]) -> str:
    lines = [
        [row["step"], description(row) or "torch's own", f"{row['us']:,.1f}", f"{row['gbs']:,.1f}",
         f"{row['of_copy']:.3f}", gain]
        for row, gain in zip(rows, gains(rows), strict=True)
    ]  # fmt: skip
    return tables.table(["step", "what it does", "us", "GB/s", "of copy", "faster than the step before"], lines, 2)


def matmul_table(rows: list[Row]) -> str:
    cublas = {row["step"] in TENSOR_CORES: row["us"] for row in rows if row["step"].startswith("cuBLAS")}
    lines = [
        [row["step"], description(row), f"{row['us']:,.0f}", f"{row['tflops']:,.2f}", gain,
         f"{cublas[row['step'] in TENSOR_CORES] / row['us']:.1%}"]
        for row, gain in zip(rows, gains(rows), strict=True)
    ]  # fmt: skip
    return tables.table(["step", "what it does", "us", "TFLOP/s", "faster than the step before", "of cuBLAS"], lines, 2)


def access_table(rows: list[Row]) -> str:
    lines = []
    for pattern, what in PATTERNS.items():
        cells = {row["shape"][1]: f"{row['gbs']:,.0f} ({row['of_copy']:.2f})" for row in rows if row["step"] == pattern}
        lines.append([pattern, what, *(cells.get(s, "") for s in STEPS)])
    return tables.table(["GB/s (of copy)", "what it does", *(f"s = {s}" for s in STEPS)], lines, 2)


def draw(result: Result, file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    groups = panels(result)
    heights = [14 if name == "access" else len(rows) for name, rows in groups.items()]
    figure, axes = plt.subplots(
        len(groups), 1, figsize=(8, 0.34 * sum(heights) + 0.9 * len(groups)), height_ratios=heights, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for ax, rows in zip(axes.flat, groups.values(), strict=True):
        {"access": access_panel, "matmul": matmul_panel}.get(rows[0]["op"], bandwidth_panel)(ax, rows)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_axisbelow(True)
    title = "Access patterns" if list(groups) == ["access"] else "One step at a time"
    figure.suptitle(f"{title}, on {result['device']}", fontweight="bold")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def bandwidth_panel(ax: Any, rows: list[Row]) -> None:
    labels = [f"{row['of_copy']:.2f}" if row["of_copy"] >= 0.01 else f"{row['of_copy']:.4f}" for row in rows]
    bars(ax, rows, "gbs", labels, "GB/s; on the bar: fraction of the copy (dashed line)")
    ax.axvline(rows[0]["gbs"] / rows[0]["of_copy"], color="#212529", lw=1.2, ls=(0, (4, 3)), zorder=0)


def matmul_panel(ax: Any, rows: list[Row]) -> None:
    bars(ax, rows, "tflops", [f"{row['tflops']:.1f}" for row in rows], "TFLOP/s")


def bars(ax: Any, rows: list[Row], value: str, labels: list[str], axis: str) -> None:
    colors = ["#d6336c" if description(row) else "#868e96" for row in rows]
    ax.barh([row["step"] for row in rows], [row[value] for row in rows], color=colors, height=0.7)
    most = max(row[value] for row in rows)
    for i, (row, label) in enumerate(zip(rows, labels, strict=True)):
        inside = row[value] > 0.1 * most
        style = {"color": "white", "fontweight": "bold"} if inside else {"color": "#212529"}
        ax.text(0 if inside else row[value], i, f"  {label}", va="center", fontsize=9, **style)
    shape = " x ".join(f"{n:,}" for n in rows[0]["shape"])
    ax.set_title(f"{rows[0]['op']} of {shape} float32", fontsize=10, loc="left")
    ax.set_xlabel(axis)
    ax.invert_yaxis()
    ax.grid(axis="x", color="#e9ecef", lw=0.8)


def access_panel(ax: Any, rows: list[Row]) -> None:
    for pattern in PATTERNS:
        points = {row["shape"][1]: row["of_copy"] for row in rows if row["step"] == pattern}
        alone = {"contiguous": "x", "contiguous_vectors": "+"}.get(pattern)  # at s = 1 alone
        style = {"marker": alone, "ms": 9, "ls": "", "color": "#212529", "zorder": 3} if alone else {"marker": "o"}
        ax.plot(points.keys(), points.values(), label=pattern, **style)
    ax.set_xscale("log", base=2)
    ax.set_xticks(STEPS, [str(s) for s in STEPS])
    ax.set_ylim(bottom=0)
    ax.set_xlabel("s, elements of 4 bytes")
    ax.set_ylabel("fraction of the copy")
    ax.set_title(f"access to {rows[0]['shape'][0]:,} elements, float32", fontsize=10, loc="left")
    ax.legend(fontsize=8, frameon=False)
    ax.grid(color="#e9ecef", lw=0.8)


def main() -> None:
    options = tables.parser(__doc__)
    options.add_argument("--ops", default=",".join(STUDIES), help=f"some of {', '.join(STUDIES)}; default: all")
    options.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures")
    options.add_argument("--arch", default="native", help="nvcc's -arch; default: that of the GPU here")
    args = options.parse_args()
    ops = args.ops.split(",")
    if unknown := set(ops) - set(STUDIES):
        options.error(f"--ops has {', '.join(unknown)}, expected some of {', '.join(STUDIES)}")
    result = tables.run(args, lambda: measure(ops, args.arch, args.quick), texts)
    if args.plot:
        draw(result, args.plot)


if __name__ == "__main__":
    main()
