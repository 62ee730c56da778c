"""Progress, which uses rich if it is installed, the tables, the file and the plots."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import terminal
from .cases import Case, find

Row = dict[str, Any]
Result = dict[str, Any]
Cases = dict[Case, dict[str, Row]]

STYLE = {
    "aotops": ("#d6336c", "o"),
    "naive": ("#e8a2b8", "h"),
    "torch": ("#868e96", "s"),
    "torch.compile": ("#4263eb", "D"),
    "quack": ("#f08c00", "^"),
    "liger": ("#2b8a3e", "v"),
    "mindspore": ("#0c8599", "P"),
    "numpy": ("#845ef7", "X"),
}
"""The color and marker of each implementation, in the order of tables and plots."""


# ----------------------------------------------------------------------------------------------------------- progress


@contextmanager
def progress(total: int, what: str = "measure") -> Iterator[Callable[[str, Sequence[Row]], None]]:
    """Yields a function to call after each case: a bar on a terminal, else a line per case."""
    console = _console()
    if console is None or not console.is_terminal:
        yield _lines(total, what)
        return
    from rich import progress as rich

    columns = (rich.TextColumn(what), rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeElapsedColumn())
    more = (rich.TimeRemainingColumn(), rich.TextColumn("{task.description}"))
    with rich.Progress(*columns, *more, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda case, rows: bar.update(task, advance=1, description=f"{case}  {_brief(rows)}")


def _lines(total: int, what: str) -> Callable[[str, Sequence[Row]], None]:
    start, done = time.perf_counter(), 0

    def advance(case: str, rows: Sequence[Row]) -> None:
        nonlocal done
        done += 1
        if case or done == total:
            elapsed = time.perf_counter() - start
            room = terminal.columns()
            text = f"{case:48} {_brief(rows)}" if room is None else f"{case}  {_brief(rows)}"
            print("\n".join(terminal.hung(f"{what} {done:3}/{total} {elapsed:4.0f} s  ", text, room)), flush=True)

    return advance


def _brief(rows: Sequence[Row]) -> str:
    return "  ".join(f"{row['impl']} {row.get('of_peer', row['of_copy']):.2f}" for row in rows)


def _console() -> Any:
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(width=terminal.columns() or 160)


# -------------------------------------------------------------------------------------------------------------- table


def show(result: Result) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    _line(f"{result['device']}; a copy moves {result['copy_gbs']:,.0f} GB/s; {versions}")
    if warning := _warning(result["rows"]):
        _line(warning)
    cases = _by_case(result["rows"])
    products = {case: rows for case, rows in cases.items() if any("tflops" in row for row in rows.values())}
    small = {case: rows for case, rows in cases.items() if case.work.small(case.shape)}
    large = {case: rows for case, rows in cases.items() if case not in products and case not in small}
    recording = {case: rows for case, rows in small.items() if any("host_us_grad" in row for row in rows.values())}
    for kind in dict.fromkeys(type(case.work) for case in products):
        of_kind = {case: rows for case, rows in products.items() if isinstance(case.work, kind)}
        _table(f"TFLOP/s, {' x '.join(kind.AXES)}", of_kind, "tflops", ",.3f", device=True)
    _table("Of the copy of as many bytes", large, "of_copy", ".2f", device=True)
    _table("Microseconds of a call from Python, where it is done in no time", small, "host_us", ".2f")
    _table("The same where gradients are recorded", recording, "host_us_grad", ".2f")


SPREAD = 1.5
"""From which a time is that of the scheduler more often than that of the operator."""


def _warning(rows: Sequence[Row]) -> str:
    """Empty where the machine did little else."""
    spreads = [row["spread"] for row in rows if "spread" in row]
    wide = [each for each in spreads if each >= SPREAD]
    if not wide:
        return ""
    return (
        f"warning: the machine was busy: in {len(wide)} of {len(spreads)} measurements the median is {SPREAD} to "
        f"{max(wide):.1f} times the fastest repeat, which is what the tables show"
    )


def _line(text: str) -> None:
    print("\n".join(terminal.hung("", text, terminal.columns())))


def _case(row: Row) -> Case:
    return Case(find(row["op"], row["variant"]), row["pass"], tuple(row["shape"]), row["dtype"])


def _by_case(rows: Sequence[Row]) -> Cases:
    cases: Cases = {}
    for row in rows:
        cases.setdefault(_case(row), {})[row["impl"]] = row
    return cases


def _table(title: str, cases: Cases, figure: str, form: str, device: bool = False) -> None:
    """A line per case: the figure of each implementation, and the speed-up of aotops over the fastest other. For device
    times also the microseconds of aotops and the ratio to its peer."""
    if not cases:
        return
    impls = [impl for impl in STYLE if any(figure in rows.get(impl, {}) for rows in cases.values())]
    peers = dict.fromkeys(row["peer"] for rows in cases.values() for row in rows.values() if device and "peer" in row)
    of_peer = [f"of {' or '.join(peers)}"] if peers else []
    heads = ["operator", "pass", "shape", "dtype", *(["us"] if device else []), *impls, *of_peer, "faster"]
    lines = []
    for case, rows in cases.items():
        own = rows.get("aotops", {})
        line = [case.work.name, case.pass_, "x".join(map(str, case.shape)), case.dtype]
        line += [_cell(own, "us", ",.1f")] if device else []
        line += [_cell(rows.get(impl, {}), figure, form) for impl in impls]
        line += [_cell(own, "of_peer", ".2f")] if peers else []
        lines.append([*line, _faster(rows, "us" if device else figure)])
    _print_table(title, heads, lines)


def _cell(row: Row, figure: str, form: str) -> str:
    return f"{row[figure]:{form}}" if figure in row else ""


def _faster(rows: Mapping[str, Row], figure: str) -> str:
    others = [row[figure] for impl, row in rows.items() if impl != "aotops" and figure in row]
    own = rows.get("aotops", {}).get(figure)
    return f"{min(others) / own:.2f}x" if own and others else ""


def _print_table(title: str, heads: list[str], lines: list[list[str]]) -> None:
    """A line per case; where the terminal is narrower, its name on one line and the figures on others."""
    if len({line[3] for line in lines}) == 1:  # one dtype
        title = f"{title}, {lines[0][3]}"
        heads, *lines = ([*line[:3], *line[4:]] for line in (heads, *lines))
    names = 4 if "dtype" in heads else 3
    widths = [max(len(line[i]) for line in [heads, *lines]) for i in range(len(heads))]
    room = terminal.columns()
    print()
    _line(title)
    if room is not None and sum(widths) + 2 * (len(widths) - 1) > room:
        for line in lines:
            figures = (f"{head} {cell}" for head, cell in zip(heads[names:], line[names:], strict=True) if cell)
            print("\n".join([" ".join(line[:names]), *terminal.hung("  ", "  ".join(figures), room)]))
        return
    for line in [heads, *lines]:
        *cells, faster = (f"{cell:{'<' if i < names else '>'}{widths[i]}}" for i, cell in enumerate(line))
        print("  ".join([*cells, _judged(faster)]).rstrip())


def _judged(faster: str) -> str:
    """In color: green where aotops is the fastest."""
    if not faster.strip().endswith("x") or not terminal.has_color(sys.stdout):
        return faster
    return terminal.colored(faster, "green" if float(faster.strip()[:-1]) >= 1 else "red")


# --------------------------------------------------------------------------------------------------------------- file


def load(files: Sequence[Path]) -> Result | None:
    result = None
    for file in files:
        result = merged(result, json.loads(file.read_text()))
    return result


def merged(earlier: Result | None, new: Result) -> Result:
    """The new result with those rows of the earlier one that were not measured again, and the commands of both."""
    if earlier is None:
        return new
    if earlier["device"] != new["device"]:
        raise ValueError(f"bench: these are of two devices: {earlier['device']} and {new['device']}")
    rows = {(_case(row), row["impl"]): row for row in [*earlier["rows"], *new["rows"]]}
    return earlier | new | {
        "command": "; ".join(dict.fromkeys([*earlier["command"].split("; "), new["command"]])),
        "copies": earlier.get("copies", {}) | new.get("copies", {}),
        "versions": earlier["versions"] | new["versions"],
        "rows": list(rows.values()),
    }  # fmt: skip


def save(result: Result, file: Path) -> None:
    """One row per line, for diff."""
    head = {key: value for key, value in result.items() if key != "rows"}
    rows = ",\n".join(f"    {json.dumps(row)}" for row in result["rows"])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'{json.dumps(head, indent=2)[:-2]},\n  "rows": [\n{rows}\n  ]\n}}\n')


# -------------------------------------------------------------------------------------------------------------- plots


def draw(result: Result, folder: Path) -> None:
    """``<op>.png``, a panel for each variant, pass and dtype: GB/s over the length of a row, or bars; for products bars
    of TFLOP/s."""
    import matplotlib

    matplotlib.use("agg")
    folder.mkdir(parents=True, exist_ok=True)
    for op, rows in drawn(result).items():
        _draw_op(op, rows, result["device"], folder / f"{op}.png")


def drawn(result: Result) -> dict[str, list[Row]]:
    """The rows of each operator's plot."""
    found: dict[str, list[Row]] = {}
    for row in result["rows"]:
        if not _case(row).small:
            found.setdefault(row["op"], []).append(row)
    return found


def digest(rows: Sequence[Row]) -> str:
    """The text ``Record`` of a plot of these rows. It tells whether a plot is of the record beside it."""
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _draw_op(op: str, rows: list[Row], device: str, file: Path) -> None:
    from matplotlib import pyplot as plt

    products = "tflops" in rows[0]
    over_n = not products and len(set(map(_length, rows))) > 1
    kind, column = (("variant", "dtype"), "pass") if products else (("variant", "pass"), "dtype")
    kinds, columns = _unique(rows, *kind), _unique(rows, column)
    impls = [impl for impl in STYLE if any(row["impl"] == impl for row in rows)]
    shapes = list(dict.fromkeys(tuple(row["shape"]) for row in rows))
    height = 0.6 + 0.14 * len(shapes) * (len(impls) + 1) if products else 3.1 if over_n else 0.5 + 0.3 * len(impls)
    size = 5.4 * len(columns), height * len(kinds) + 0.9
    sharex: Any = "row" if products else not over_n
    figure, grid = plt.subplots(
        len(kinds), len(columns), figsize=size, squeeze=False, sharex=sharex, sharey=True, layout="constrained"
    )
    top = 1.12 * max([row["gbs"] for row in rows] + [row["gbs"] / row["of_copy"] for row in rows if row["of_copy"]])
    for axes, of_kind in zip(grid, kinds, strict=True):
        if products:
            top = 1.15 * max(row["tflops"] for row in rows if of_kind.items() <= row.items())
        for ax, of_column in zip(axes, columns, strict=True):
            named = of_kind | of_column
            panel = [row for row in rows if named.items() <= row.items()]
            if products:
                _groups(ax, panel, impls, shapes)
            else:
                (_curves if over_n else _bars)(ax, panel, impls)
            title = " ".join(filter(None, (named["variant"], named["pass"])))
            _furnish(ax, f"{title}, {named['dtype']}", "y" if over_n else "x", top)
        if over_n:
            axes[0].set_ylabel("GB/s")
    peers = dict.fromkeys(row["peer"] for row in rows if "peer" in row)
    rates = "TFLOP/s" + (f"; behind the bar: of {' or '.join(peers)}" if peers else "")
    for ax in grid[-1]:
        ax.set_xlabel(rates if products else "N, the length of a row" if over_n else "GB/s; in the bar: of the copy")
    if products:
        grid[0, 0].invert_yaxis()  # shared by all panels: the first shape on top
        figure.supylabel(" x ".join(_case(rows[0]).work.AXES), fontsize=9)
    _finish(figure, grid, impls, f"{op} on {device}", rows, file)


def _unique(rows: Sequence[Row], *keys: str) -> list[Row]:
    return [dict(zip(keys, found, strict=True)) for found in dict.fromkeys(tuple(row[k] for k in keys) for row in rows)]


def _finish(figure: Any, grid: Any, impls: Sequence[str], title: str, rows: Sequence[Row], file: Path) -> None:
    from matplotlib import pyplot as plt

    found: dict[str, Any] = {}
    for ax in grid.flat:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    labels = [label for label in (*impls, "copy") if label in found]
    figure.suptitle(title, fontsize=13, fontweight="bold")
    figure.legend([found[x] for x in labels], labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(file, dpi=150, metadata={"Record": digest(rows)})
    plt.close(figure)


def _length(row: Row) -> int:
    return _case(row).work.length(tuple(row["shape"]))


def _curves(ax: Any, panel: list[Row], impls: list[str]) -> None:
    lengths = sorted(set(map(_length, panel)))
    copies = {_length(row): row["gbs"] / row["of_copy"] for row in panel}
    ax.plot(lengths, [copies[n] for n in lengths], color="#212529", lw=1.2, ls=(0, (4, 3)), label="copy")
    for impl in reversed(impls):  # aotops in front
        points = sorted((_length(row), row["gbs"]) for row in panel if row["impl"] == impl)
        color, marker = STYLE[impl]
        wide = 2.4 if impl == "aotops" else 1.5
        ax.plot(*zip(*points, strict=True), color=color, marker=marker, ms=4.5, lw=wide, label=impl) if points else None
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [str(n) if n % 1024 else f"{n // 1024}k" for n in lengths], rotation=45, fontsize=8)


def _bars(ax: Any, panel: list[Row], impls: list[str]) -> None:
    found = {row["impl"]: row for row in panel}
    names = [impl for impl in reversed(impls) if impl in found]
    values = [found[impl]["gbs"] for impl in names]
    ax.barh(names, values, color=[STYLE[impl][0] for impl in names], height=0.7)
    for i, impl in enumerate(names):
        ax.text(0, i, f"  {found[impl]['of_copy']:.2f}", va="center", fontsize=9, color="white", fontweight="bold")
    ax.axvline(panel[0]["gbs"] / panel[0]["of_copy"], color="#212529", lw=1.2, ls=(0, (4, 3)), label="copy")


def _groups(ax: Any, panel: list[Row], impls: list[str], shapes: list[tuple[int, ...]]) -> None:
    """A group of bars for each shape."""
    thick = 1 / (len(impls) + 1)
    for i, impl in enumerate(impls):
        found = {shapes.index(tuple(row["shape"])): row for row in panel if row["impl"] == impl}
        places = [at + (i - (len(impls) - 1) / 2) * thick for at in found]
        values = [row["tflops"] for row in found.values()]
        ax.barh(places, values, thick, color=STYLE[impl][0], label=impl)
        for place, row in zip(places, found.values(), strict=True):
            ratio = f" {row['of_peer']:.2f}" if "of_peer" in row and row["impl"] != row["peer"].split()[0] else ""
            ax.text(row["tflops"], place, ratio, va="center", fontsize=7, color=STYLE[impl][0])
    ax.set_yticks(range(len(shapes)), ["x".join(map(str, shape)) for shape in shapes], fontsize=8)


def _furnish(ax: Any, title: str, axis: str, top: float) -> None:
    """``axis``: that of the rates."""
    ax.set_title(title, fontsize=10, loc="left")
    ax.set(**{f"{axis}lim": (0, top)})
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis=axis, color="#e9ecef", lw=0.8)
    ax.set_axisbelow(True)
