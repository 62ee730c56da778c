"""The tables of docs/performance.md and docs/lab_notes.md that are figures of `aotops bench`:
`python -m benchmarks.report`.

Writes the marked sections of the pages from benchmarks/results/h200.json, and those about the CPU from the records of
`python -m benchmarks.cpu`. A table says of which version its figures are and when they were measured, and marks a row
whose kernel has changed since.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

from aotops.bench import cases
from aotops.bench.sources import CPU_PREFIX, of_kernel
from benchmarks import cpu

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGES = ROOT / "docs/performance.md", ROOT / "docs/lab_notes.md"
SECTION = re.compile(r"(<!-- bench: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

NORMS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
ELEMENTS, LENGTHS = 1 << 26, (256, 768, 1024, 4096, 8192, 32768, 131072)
PASSES = ("forward", "backward")
CONVOLUTIONS = {
    (32, 64, 56, 64, 3, 1): "64 channels, 56 x 56, 3 x 3",
    (32, 256, 56, 64, 1, 1): "256 to 64, 56 x 56, 1 x 1",
    (32, 128, 28, 128, 3, 1): "128 channels, 28 x 28, 3 x 3",
    (32, 512, 7, 512, 3, 1): "512 channels, 7 x 7, 3 x 3",
    (32, 128, 56, 128, 3, 2): "128 channels, 56 x 56, 3 x 3, stride 2",
}

Row = dict[str, Any]
Result = dict[str, Any]


def main() -> None:
    for page in PAGES:
        page.write_text(written(page.read_text()))


def load(section: str) -> Result:
    """The record of a section: those of the CPU have the section's name."""
    return _record(section if section.startswith("cpu") else "h200")


@cache
def _record(name: str) -> Result:
    return json.loads((RESULTS / f"{name}.json").read_text())


def written(page: str) -> str:
    """The page with its sections as their results say."""
    return SECTION.sub(lambda found: f"{found[1]}{SECTIONS[found[2]](load(found[2]))}\n{found[3]}", page)


def changed(row: Row) -> bool:
    """Whether the kernel has other sources than the one that was measured."""
    device = "cpu" if row["kernel"].startswith(CPU_PREFIX) else "cuda"
    return row["kernel"] != of_kernel(row["op"], device=device)


# -------------------------------------------------------------------------------------------------------------- tables


class Table:
    """Lines of own rows of the result, each with its cells, and what all of them are results of."""

    def __init__(self, result: Result, heads: Sequence[str], numbers: Sequence[str]) -> None:
        self.result, self.heads, self.numbers = result, heads, numbers
        self.lines: list[str] = []
        self.used: list[Row] = []

    def find(self, impl: str, **wanted: object) -> list[Row]:
        """The rows of an implementation, or of all "others" than aotops. `pass_` stands for "pass"."""
        of_impl = [
            row for row in self.result["rows"] if row["impl"] == impl or (impl == "others" and row["impl"] != "aotops")
        ]
        return [row for row in of_impl if all(row[key.rstrip("_")] == value for key, value in wanted.items())]

    def one(self, **wanted: object) -> Row:
        """The own row of a case."""
        (row,) = self.find("aotops", variant=wanted.pop("variant", ""), **wanted)
        return row

    def add(self, names: Sequence[str], rows: Sequence[Row], cells: Iterable[str]) -> None:
        """A line. Its first cell is marked if a kernel of its rows has changed."""
        self.used += rows
        mark = " \\*" if any(map(changed, rows)) else ""
        self.lines.append(f"| {' | '.join([names[0] + mark, *names[1:], *cells])} |")

    def __str__(self) -> str:
        rule = "|" + "---|" * len(self.heads) + "--:|" * len(self.numbers)
        return "\n".join([f"| {' | '.join([*self.heads, *self.numbers])} |", rule, *self.lines, "", self.origin()])

    def origin(self) -> str:
        versions = ", ".join(f"aotops {version}" for version in sorted({row["version"] for row in self.used}))
        dates = sorted({row["date"] for row in self.used})
        when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        marked = "\n\\* Measured before the last change of the kernel." if any(map(changed, self.used)) else ""
        return f"{versions}, torch {self.result['versions']['torch']}, {when}.{marked}"


def machine(result: Result) -> str:
    versions = [f"{name} {version}" for name, version in result["versions"].items() if name not in ("aotops", "numpy")]
    copy = f"one {result['device']}; a large copy reaches {result['copy_gbs']:,.0f} GB/s"
    figures = "[benchmarks/results/h200.json](../benchmarks/results/h200.json)"
    lines = [("machine", copy), ("versions", ", ".join(versions)), ("figures", figures)]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in lines)])


def elementwise(result: Result) -> str:
    dtypes = ("bfloat16", "float32")
    table = Table(result, ("operator", "pass"), dtypes)
    shape = [ELEMENTS]
    for op, variant in (("add", ""), ("gelu", "none"), ("gelu", "tanh"), ("swiglu", "")):
        for pass_ in PASSES[: 1 if op == "add" else 2]:
            wanted = {"op": op, "variant": variant, "pass_": pass_, "shape": shape}
            rows = [table.one(**wanted, dtype=dtype) for dtype in dtypes]
            table.add((f"{op} {variant}".rstrip(), pass_), rows, (_of_copy(table, row) for row in rows))
    return str(table)


def _of_rows(dtype: str) -> Callable[[Result], str]:
    def rows(result: Result) -> str:
        table = Table(result, ("operator", "pass"), [f"N = {n}" for n in LENGTHS])
        for op, variant, pass_ in _row_operators():
            wanted = {"op": op, "variant": variant, "pass_": pass_, "dtype": dtype}
            found = [table.one(**wanted, shape=[ELEMENTS // n, n]) for n in LENGTHS]
            table.add((f"{op} {variant}".rstrip(), pass_), found, (_of_copy(table, row) for row in found))
        return str(table)

    return rows


def odd(result: Result) -> str:
    """Rows that are no whole vectors of 16 bytes, and a softmax along another axis."""
    dtypes = ("bfloat16", "float32")
    table = Table(result, ("operator", "pass", "shape"), dtypes)
    for op, variant in (("softmax", "odd"), ("layer_norm", "odd"), ("rms_norm", "odd"), ("softmax", "axis")):
        shapes = dict.fromkeys(tuple(row["shape"]) for row in table.find("aotops", op=op, variant=variant))
        for shape, pass_ in product(shapes, PASSES):
            wanted = {"op": op, "variant": variant, "pass_": pass_, "shape": [*shape]}
            rows = [table.one(**wanted, dtype=dtype) for dtype in dtypes]
            names = (f"{op} {variant}", pass_, " x ".join(map(str, shape)))
            table.add(names, rows, (_of_copy(table, row) for row in rows))
    return str(table)


def _row_operators() -> Iterator[tuple[str, str, str]]:
    for op in (*NORMS, "softmax", "cross_entropy"):
        yield from ((op, "", pass_) for pass_ in PASSES)
    yield "cross_entropy", "fused_dx", "forward"


def _of_copy(table: Table, row: Row) -> str:
    """The fraction of a copy's rate, and in brackets that of the fastest other implementation."""
    case = {key: row[key] for key in ("op", "variant", "pass", "shape", "dtype")}
    others = [other["of_copy"] for other in table.find("others", **case)]
    return f"{row['of_copy']:.2f} ({max(others):.2f})"


def matmul(result: Result) -> str:
    sizes = (1024, 2048, 4096, 8192)
    table = Table(result, ("matmul",), [str(n) for n in sizes])
    kinds = {"bfloat16": "", "float32": "", "float32 with TF32": "tf32"}
    for i, (name, variant) in enumerate(kinds.items()):
        wanted = {"op": "matmul", "variant": variant, "pass_": "forward", "dtype": name.split()[0]}
        rows = [table.one(**wanted, shape=[n, n, n]) for n in sizes]
        names = [name + (", TFLOP/s (ratio to torch)" if i == 0 else "")]
        table.add(names, rows, (f"{row['tflops']:.0f} ({row['of_peer']:.2f})" for row in rows))
    return str(table)


def products(result: Result) -> str:
    """The ranges of the ratios to torch, of products that have no table, in all dtypes unless one is named."""
    table = Table(result, (), ())
    shapes = [[8192, 4096, 1024], [4096, 16384, 4096], [2048, 3072, 768]]
    several = [row for row in table.find("aotops", op="matmul") if row["shape"] in shapes]
    biased = [row for row in table.find("aotops", op="linear") if not row["variant"]]
    table.used += [*several, *biased]
    names = ", ".join(" x ".join(map(str, shape)) for shape in shapes)
    return "\n".join([
        _ratios("matmul", f"of M x N x K = {names}", several),
        *(_ratios("linear", f"with a bias in {dtype}", [row for row in biased if row["dtype"] == dtype])
          for dtype in ("bfloat16", "float32")),
        "", table.origin(),
    ])  # fmt: skip


def _ratios(op: str, which: str, rows: Sequence[Row]) -> str:
    compared = [row for row in rows if "of_peer" in row]  # torch may have run out of memory
    of_pass = [[row["of_peer"] for row in compared if row["pass"] == pass_] for pass_ in PASSES]
    forward, backward = (f"{min(ratios):.2f} to {max(ratios):.2f}" for ratios in of_pass)
    mark = " \\*" if any(map(changed, rows)) else ""
    missing = len(rows) - len(compared)
    left = f"; of {len(rows)} calls {missing} without torch's time" if missing else ""
    return fill(f"- `{op}`{mark} {which}: {forward}, backward {backward}{left}.", 120, subsequent_indent="  ")


def linear_gelu(result: Result) -> str:
    heads = ("aotops", "torch, two kernels", "ratio", "backward, ratio")
    table = Table(result, ("M x K x N, bfloat16",), heads)
    shapes = [
        (4096, 16384, 4096),
        (8192, 4096, 1024),
        (2048, 3072, 768),
        *((n, n, n) for n in (1024, 2048, 4096, 8192)),
    ]
    for m, n, k in shapes:
        case = {"op": "linear", "variant": "gelu", "shape": [m, n, k], "dtype": "bfloat16"}
        forward, backward = (table.one(**case, pass_=pass_) for pass_ in PASSES)
        (torch,) = table.find("torch", **case, pass_="forward")
        ratios = [f"{row['of_peer']:.2f}" for row in (forward, backward)]
        table.add((f"{m} x {k} x {n}",), [forward, backward], (_us(forward["us"]), _us(torch["us"]), *ratios))
    return str(table)


def _us(value: float) -> str:
    return f"{value:.1f} us" if value < 100 else f"{value:.0f} us"


def conv2d(result: Result) -> str:
    heads = ("bfloat16 NHWC, y", "backward", "float32 NCHW with TF32, y", "backward")
    table = Table(result, ("conv2d",), heads)
    for shape, name in CONVOLUTIONS.items():
        kinds = [("nhwc", "bfloat16", pass_) for pass_ in PASSES] + [
            ("nchw tf32", "float32", pass_) for pass_ in PASSES
        ]
        rows = [
            table.one(op="conv2d", variant=variant, pass_=pass_, dtype=dtype, shape=[*shape])
            for variant, dtype, pass_ in kinds
        ]
        table.add((name,), rows, (f"{_us(row['us'])} ({row['of_peer']:.2f})" for row in rows))
    return str(table)


AHEAD = 0.99
"""The rate beside a peer's below which the peer is ahead: runs differ by up to 1 %."""


def ahead(result: Result) -> str:
    """The cases in which a peer is ahead, large ones first."""
    cases.use(ROOT / "tests/cases")
    text = ("operator", "pass", "shape", "dtype", "fastest peer")
    table = Table(result, text, ("us", "peer's us", "rate"))
    peers: dict[tuple[Any, ...], Row] = {}
    for row in sorted(table.find("others"), key=lambda row: row["us"]):
        peers.setdefault(cpu.case(row), row)
    compared = [(row, peers[cpu.case(row)]) for row in table.find("aotops") if cpu.case(row) in peers]
    counts = []
    for small in (False, True):
        of_size = [(row, peer) for row, peer in compared if _is_small(row) == small]
        behind = [(peer["us"] / row["us"], row, peer) for row, peer in of_size if peer["us"] < AHEAD * row["us"]]
        counts.append(f"{len(behind)} of {len(of_size)}")
        for rate, row, peer in sorted(behind, key=lambda each: each[0]):
            cells = _digits(row["us"]), _digits(peer["us"]), f"{rate:.2f}"
            table.add([*_names(row), peer["impl"]], [row], cells)
    within = round(100 * (1 - AHEAD))
    return f"A peer is more than {within} % ahead in {counts[0]} cases and {counts[1]} small calls:\n\n{table}"


def _names(row: Row) -> list[str]:
    return [f"{row['op']} {row['variant']}".rstrip(), row["pass"], " x ".join(map(str, row["shape"])), row["dtype"]]


def _digits(us: float) -> str:
    return f"{us:.2f}" if us < 100 else f"{us:.0f}"


def _is_small(row: Row) -> bool:
    return cases.find(row["op"], row["variant"]).small(tuple(row["shape"]))


def cpu_counts(result: Result) -> str:
    """In how many cases torch is ahead on the CPU, at each count of threads, and the medians of all."""
    speeds = sorted(cpu.speeds(result["rows"]).items())
    counts = [f"{sum(map(cpu.is_behind, found.values()))} of {len(found)} at {threads}" for threads, found in speeds]
    medians = [f"{median(found.values()):.2f}" for _, found in speeds]
    within = round(100 * (cpu.ALLOWED - 1))
    return (
        f"Cases in which torch is more than {within} % ahead, by threads: {', '.join(counts)}. "
        f"The medians of our speed beside torch's: {', '.join(medians)}."
    )


def cpu_ahead(result: Result) -> str:
    """The cases in which torch is ahead on the CPU at any count of threads, with our speed beside torch's at each."""
    speeds = dict(sorted(cpu.speeds(result["rows"]).items()))
    counts = [f"{threads} thread{'s' * (threads > 1)}" for threads in speeds]
    table = Table(result, ("operator", "pass", "shape", "dtype"), counts)
    own: dict[tuple[Any, ...], list[Row]] = {}
    for row in table.find("aotops"):
        own.setdefault(cpu.case(row), []).append(row)
    least = sorted((min(found[case] for found in speeds.values() if case in found), case) for case in own)
    for case in (case for speed, case in least if cpu.is_behind(speed)):
        cells = (f"{found[case]:.2f}" if case in found else "" for found in speeds.values())
        table.add(_names(own[case][0]), own[case], cells)
    old = dict.fromkeys(row["op"] for row in table.find("aotops") if changed(row))
    since = f" Kernels that have changed since: {', '.join(f'`{op}`' for op in old)}." if old else ""
    return f"{fill(cpu_counts(result) + since, 120)}\n\n{table}"


SECTIONS: dict[str, Callable[[Result], str]] = {
    "machine": machine,
    "elementwise": elementwise,
    "rows_bfloat16": _of_rows("bfloat16"),
    "rows_float32": _of_rows("float32"),
    "odd": odd,
    "matmul": matmul,
    "products": products,
    "linear_gelu": linear_gelu,
    "conv2d": conv2d,
    "ahead": ahead,
    "cpu": cpu_ahead,
    "cpu_zen4": cpu_counts,
}


if __name__ == "__main__":
    main()
