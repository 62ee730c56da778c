"""Addition, matrix product and convolution as loops of Python and of C++, and as operators of aotops.

    python examples/loops.py [--devices cpu,cuda] [--quick] [--json FILE] [--markdown FILE] [--from FILE]

The loops run on one thread: those of Python over lists, those of C++ (kernels/loops.cpp) as g++ -O3 compiles them.
Every implementation gets the same inputs, and its result is compared with torch's in float64.
"""

from __future__ import annotations

import ctypes
import math
import subprocess
import tempfile
import time
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from functools import partial
from pathlib import Path
from typing import Any

import tables
from tables import Result, Row

HERE = Path(__file__).resolve().parent
SIZES = {  # of each operator: one that a loop of Python can do, and one that fills a GPU
    "add": [(1 << 20,), (1 << 26,)],
    "matmul": [(128, 128, 128), (1024, 1024, 1024)],
    "conv2d": [(4, 8, 34, 34, 16, 3), (8, 64, 58, 58, 64, 3)],
}
QUICK = {"add": [(1000,)], "matmul": [(16, 24, 8)], "conv2d": [(2, 3, 8, 10, 4, 3)]}
PYTHON_STEPS = 1 << 24  # the most inner steps that Python is made to loop through

Call = Callable[[], Any]


# ------------------------------------------------------------------------------------------------------ loops of Python


def add(a, b, c):
    for i in range(len(a)):
        c[i] = a[i] + b[i]


def matmul(a, b, c):
    for i in range(len(a)):
        for j in range(len(b[0])):
            total = 0.0
            for p in range(len(b)):
                total += a[i][p] * b[p][j]
            c[i][j] = total


def conv2d(x, w, y):
    for b in range(len(y)):
        for f in range(len(y[0])):
            for i in range(len(y[0][0])):
                for j in range(len(y[0][0][0])):
                    total = 0.0
                    for c in range(len(x[0])):
                        for di in range(len(w[0][0])):
                            for dj in range(len(w[0][0][0])):
                                total += x[b][c][i + di][j + dj] * w[f][c][di][dj]
                    y[b][f][i][j] = total


LOOPS = {"add": add, "matmul": matmul, "conv2d": conv2d}


# -------------------------------------------------------------------------------------------------------- measurement


def shapes(op: str, size: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
    """The shapes of both inputs and of the output, and the number of inner steps of the loop."""
    if op == "add":
        return size, size, size, size[0]
    if op == "matmul":
        m, n, k = size
        return (m, k), (k, n), (m, n), m * n * k
    batch, channels, height, width, filters, side = size
    out = (batch, filters, height - side + 1, width - side + 1)
    return (batch, channels, height, width), (filters, channels, side, side), out, math.prod(out) * channels * side**2


def build(folder: Path) -> ctypes.CDLL:
    library = folder / "loops.so"
    subprocess.run(["g++", "-O3", "-shared", "-fPIC", HERE / "kernels" / "loops.cpp", "-o", library], check=True)
    return ctypes.CDLL(str(library))


def measure(quick: bool, devices: str | None) -> Result:
    import torch

    from aotops import library
    from aotops.bench.measure import Cpu, Cuda

    torch.manual_seed(0)
    cpu = Cpu(quick)
    if devices is None:
        devices = "cpu,cuda" if torch.cuda.is_available() and library.has_cuda() else "cpu"
    cuda = Cuda(quick) if "cuda" in devices else None
    with tempfile.TemporaryDirectory() as folder:
        compiled = build(Path(folder))
    sizes = QUICK if quick else SIZES
    rows = [row for op in sizes for size in sizes[op] for row in measured(op, size, compiled, cpu, cuda)]
    return tables.record("; ".join(machine.name for machine in (cuda, cpu) if machine), rows)


def measured(op: str, size: tuple[int, ...], compiled: ctypes.CDLL, cpu: Any, cuda: Any) -> list[Row]:
    import torch

    left, right, out, steps = shapes(op, size)
    a, b, c = torch.randn(left), torch.randn(right), torch.empty(out)
    reference = getattr(torch, op)(a.double(), b.double())
    seconds: dict[str, float] = {}

    if steps <= PYTHON_STEPS:
        lists = [a.tolist(), b.tolist(), torch.full(out, math.nan).tolist()]
        seconds["Python"] = loop_seconds(partial(LOOPS[op], *lists))
        check(op, "Python", torch.tensor(lists[2]), reference)

    c.fill_(math.nan)
    pointers = [c_void_p(t.data_ptr()) for t in (a, b, c)]
    seconds["C++"] = loop_seconds(partial(getattr(compiled, op), *pointers, *map(c_int64, size)))
    check(op, "C++", c, reference)

    seconds["CPU"] = library_seconds(op, cpu, a, b, reference)
    if cuda:
        a, b = a.cuda(), b.cuda()
        seconds["CUDA"] = library_seconds(op, cuda, a, b, reference)
        seconds["CUDA, waited for"] = loop_seconds(partial(waited_for, operator(op), a, b), 101)
    print(
        f"{op} {'x'.join(map(str, size)):20}",
        *(f"{name} {s * 1e6:,.1f} us " for name, s in seconds.items()),
        flush=True,
    )
    return [{"op": op, "size": list(size), "impl": name, "us": round(s * 1e6, 3)} for name, s in seconds.items()]


def loop_seconds(call: Call, repeats: int = 3) -> float:
    """The median wall time, after a call that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def library_seconds(op: str, machine: Any, a: Any, b: Any, reference: Any) -> float:
    """Device time, as `aotops bench` measures it."""
    from aotops.bench.measure import samples

    function = operator(op)
    check(op, "aotops", function(a, b), reference)
    return machine.figure(samples({op: machine.turn([partial(function, a, b)])}, machine.repeats, budget=3.0)[op])


def operator(op: str) -> Callable[..., Any]:
    from aotops.frontends import torch as frontend

    return getattr(frontend, op)


def waited_for(function: Callable[..., Any], a: Any, b: Any) -> None:
    import torch

    function(a, b)
    torch.cuda.synchronize()


def check(op: str, name: str, result: Any, reference: Any) -> None:
    import torch

    torch.testing.assert_close(
        result.cpu().double(), reference, rtol=1e-4, atol=1e-3, msg=lambda text: f"{op}: {name} is wrong: {text}"
    )


# --------------------------------------------------------------------------------------------------------------- report

COLUMNS = ("Python", "C++", "CPU", "CUDA", "CUDA, waited for")


def texts(result: Result) -> dict[str, str]:
    sizes: dict[tuple[str, str], dict[str, float]] = {}
    for row in result["rows"]:
        sizes.setdefault((row["op"], " x ".join(f"{n:,}" for n in row["size"])), {})[row["impl"]] = row["us"]
    head = ["operator", "size", *COLUMNS, "C++ / Python", "CPU / C++", "CUDA / C++"]
    lines = [
        [op, size, *(f"{us[name]:,.1f}" if name in us else "" for name in COLUMNS), ratio(us, "Python", "C++"),
         ratio(us, "C++", "CPU"), ratio(us, "C++", "CUDA")]
        for (op, size), us in sizes.items()
    ]  # fmt: skip
    return {"run loops": tables.source(result), "loops": tables.table(head, lines, texts=2)}


def ratio(us: dict[str, float], slow: str, fast: str) -> str:
    return f"{us[slow] / us[fast]:,.0f}x" if slow in us and fast in us else ""


if __name__ == "__main__":
    options = tables.parser(__doc__)
    options.add_argument("--devices", choices=["cpu", "cpu,cuda"], help="default: with cuda if there is a GPU")
    args = options.parse_args()
    tables.run(args, lambda: measure(args.quick, args.devices), texts)
