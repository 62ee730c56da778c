"""The results of ``python -m benchmarks.models`` as figures and tables: ``python -m benchmarks.models.report``.

Draws benchmarks/results/models/*.png and writes the marked sections of docs/models.md and README.md, all from
benchmarks/results/models_h200.json.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from aotops.bench.report import STYLE, _finish, _furnish
from aotops.bench.sources import of_kernel

from .spec import IMPLS, PRECISIONS, SIZES

ROOT = Path(__file__).parents[2]
RESULT, PLOTS = "benchmarks/results/models_h200.json", "benchmarks/results/models"
PAGES = ("docs/models.md", "README.md")
SECTION = re.compile(r"(<!-- models: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

NAMES = {
    "gpt2": "GPT-2 124M",
    "gpt2_head": "GPT-2 124M, head and loss in one",
    "llama": "Llama-like",
    "llama_head": "Llama-like, head and loss in one",
    "llama_packed": "Llama-like, packed",
    "bert": "BERT-base",
    "vit": "ViT-L/16, 12 layers",
    "resnet": "ResNet-50",
}
IMPL_ORDER = tuple(dict.fromkeys(impl for impls in IMPLS.values() for impl in impls))
COLORS = {impl: color for impl, (color, _) in STYLE.items()}
COLORS |= {
    "aotops.compile": "#862e9c",
    "aotops.attention": "#5f3dc4",
    "aotops.sdpa": "#74b816",
    "aotops.sdpa.compile": "#2b8a3e",
    "jax": "#f08c00",
}

Row = dict[str, Any]
Result = dict[str, Any]
Curve = Sequence[float]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="of the repository; default: this one")
    root = parser.parse_args(argv).root
    result = load(root)
    if result is None:
        parser.error(f"{root / RESULT} does not exist: run python -m benchmarks.models --json {RESULT}")
    draw(result, root / PLOTS)
    for page, text in pages(root, result).items():
        (root / page).write_text(text)
    for cells in [LOSS_HEADS, *loss_cells(result["rows"])]:
        print("  ".join(f"{cell:22}" for cell in cells).rstrip())


def load(root: Path) -> Result | None:
    file = root / RESULT
    return json.loads(file.read_text()) if file.exists() else None


def pages(root: Path, result: Result | None) -> dict[str, str]:
    """The texts of the pages with their sections as the result says; without a result they are empty."""
    return {page: written((root / page).read_text(), result) for page in PAGES}


def written(page: str, result: Result | None) -> str:
    def section(found: re.Match[str]) -> str:
        text = SECTIONS[found[2]](result) if result else ""
        return f"{found[1]}{text}\n{found[3]}" if text else found[1] + found[3]

    return SECTION.sub(section, page)


# --------------------------------------------------------------------------------------------------------------- rows


def ordered(rows: Iterable[Row]) -> list[Row]:
    """By size, model, precision, framework and implementation; the tiny ones last."""
    precisions = list(dict.fromkeys(name for names in PRECISIONS.values() for name in names))

    def place(row: Row) -> tuple[Any, ...]:
        framework = row["framework"]
        model, precision = list(SIZES).index(row["model"]), precisions.index(row["precision"])
        return row["tiny"], model, precision, list(IMPLS).index(framework), IMPLS[framework].index(row["impl"])

    return sorted(rows, key=place)


def timed(rows: Iterable[Row]) -> list[Row]:
    """The rows whose times count."""
    return ordered(row for row in rows if not row["tiny"] and not row["deterministic"])


def grouped(rows: Iterable[Row], *keys: str) -> list[list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(groups.values())


def framework_name(row: Row) -> str:
    return {"torch": "torch", "jax": "JAX", "mindspore": "MindSpore"}[row["framework"]]


def model_name(row: Row) -> str:
    return f"{NAMES[row['model']]}{', tiny, CPU' if row['tiny'] else ''}"


# -------------------------------------------------------------------------------------------------------------- losses


def curves(row: Row) -> list[Curve]:
    return [row[key] for key in ("losses", "losses_again") if key in row]


def difference(a: Curve, b: Curve) -> float:
    """The largest of a step."""
    return max(abs(x - y) for x, y in zip(a, b, strict=False))


def spreads(rows: Iterable[Row]) -> list[tuple[Row, float | None, float | None]]:
    """For each row, the largest difference of its loss curve from the reference's, and between two curves of the
    reference, which are its rounds and, in torch, its deterministic runs. The reference has the same model, size
    and precision: torch's operators in torch, or, where they were not measured, the framework's own."""
    found: list[tuple[Row, float | None, float | None]] = []
    for group in grouped(ordered(rows), "model", "precision", "tiny"):
        references = [row for row in group if row["impl"] == row["framework"]]
        references = [row for row in references if row["framework"] == references[0]["framework"]]
        own = sorted((curve for row in references for curve in curves(row)), key=len)
        spread = max((difference(a, b) for a, b in combinations(own, 2)), default=None)
        for row in group:
            is_reference = not references or row in references
            found.append((row, None if is_reference else difference(row["losses"], references[0]["losses"]), spread))
    return found


LOSS_HEADS = (
    "model",
    "precision",
    "framework",
    "implementation",
    "deterministic",
    "largest difference",
    "torch's own spread",
    "same bits",
)


def loss_cells(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    return [
        (
            *(model_name(row), row["precision"], framework_name(row), row["impl"]),
            "yes" if row["deterministic"] else "",
            number(apart, ".4f"),
            number(spread, ".4f"),
            {True: "yes", False: "no", None: ""}[row.get("same_bits")],
        )
        for row, apart, spread in spreads(rows)
    ]


# ------------------------------------------------------------------------------------------------------------ sections


def machine(result: Result) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = ["| | |", "|---|---|", f"| machine | one {result['device']} |", f"| versions | {versions} |"]
    lines += [f"| date | {result['date'][:10]} |", f"| figures | [{RESULT}](../{RESULT}) |"]
    return "\n".join(lines)


def changed(row: Row) -> list[str]:
    """The operators of a row whose kernels have other sources than those that it measured. None are known of a row
    without aotops, and of a tiny one, whose times do not count."""
    return [op for op, sources in row.get("sources", {}).items() if not row["tiny"] and sources != of_kernel(op)]


def since(rows: Iterable[Row]) -> str:
    """Whether kernels of the rows have changed, in a sentence; or nothing."""
    ops = dict.fromkeys(op for row in rows for op in changed(row))
    return f"Measured before the last change of the kernels of {', '.join(ops)}." if ops else ""


def steps(result: Result) -> str:
    heads = ("model", "precision", "framework", "implementation")
    numbers = ("ms", "of the framework's best", "tokens/s", "peak GiB", "first step, s", "loss")
    note = since(timed(result["rows"]))
    parts = (f"![ms a step and peak memory](../{PLOTS}/steps.png)", table(heads, numbers, step_cells(result["rows"])))
    return "\n\n".join([*parts, *([f"\\* {note}"] if note else [])])


def step_cells(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    cells = []
    for group in grouped(timed(rows), "model", "precision", "framework"):
        best = min((row["ms"] for row in group if not row["impl"].startswith("aotops")), default=None)
        cells += [
            (
                *(model_name(row), row["precision"], framework_name(row)),
                f"{row['impl']} \\*" if changed(row) else row["impl"],
                number(row["ms"], ".2f"),
                number(best and row["ms"] / best, ".3f"),
                number(row["tokens_per_s"], ",.0f"),
                number(row["peak_gib"], ".2f"),
                number(row.get("first_step_s"), ".1f"),
                number(row["loss"], ".4f"),
            )
            for row in group
        ]
    return cells


def losses(result: Result) -> str:
    picture = f"![loss over steps](../{PLOTS}/losses.png)\n\n" if timed(result["rows"]) else ""
    return picture + table(LOSS_HEADS[:5], LOSS_HEADS[5:], loss_cells(result["rows"]))


def kernels(result: Result) -> str:
    rows = [row for row in timed(result["rows"]) if "kernels" in row]
    if not rows:
        return ""
    classes = list(rows[0]["kernels"]["classes_ms"])
    cells = [
        (
            *(model_name(row), row["precision"], row["impl"]),
            *(number(row["kernels"]["classes_ms"][name], ".2f") for name in classes),
            number(row["kernels"]["total_ms"], ".2f"),
        )
        for row in rows
    ]
    return table(("model", "precision", "implementation"), (*classes, "total"), cells)


def readme(result: Result) -> str:
    """The first figure, and one sentence."""
    parts, told = [], []
    for group in grouped(timed(result["rows"]), "model", "precision", "framework"):
        by = {row["impl"]: row for row in group if row["framework"] == "torch" and row["precision"] == "bfloat16"}
        if {"torch.compile", "aotops.compile"} <= set(by):
            ours, theirs = by["aotops.compile"], by["torch.compile"]
            parts.append(f"{NAMES[ours['model']]} {ours['ms']:.1f} ms (torch's operators: {theirs['ms']:.1f})")
            told.append(ours)
    sentence = (
        f"A training step under `torch.compile` on one {result['device']}, in bfloat16: {', '.join(parts)}. "
        f"{since(told)} [docs/models.md](docs/models.md) has autocast, JAX, memory and loss curves."
    )
    return (
        f"![ms a training step and peak memory of models, on {result['device']}]({PLOTS}/steps.png)\n\n"
        + textwrap.fill(" ".join(sentence.split()), 120, break_on_hyphens=False)
    )


def table(heads: Sequence[str], numbers: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = "|" + "---|" * len(heads) + "--:|" * len(numbers)
    return "\n".join([f"| {' | '.join([*heads, *numbers])} |", rule, *(f"| {' | '.join(line)} |" for line in lines)])


def number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


SECTIONS = {"machine": machine, "steps": steps, "losses": losses, "kernels": kernels, "readme": readme}


# ------------------------------------------------------------------------------------------------------------- figures


def draw(result: Result, folder: Path) -> None:
    """``steps.png`` and ``losses.png``."""
    import matplotlib

    matplotlib.use("agg")
    folder.mkdir(parents=True, exist_ok=True)
    rows = timed(result["rows"])
    if rows:
        draw_steps(rows, result["device"], folder / "steps.png")
        draw_losses(rows, result["device"], folder / "losses.png")


def draw_steps(rows: list[Row], device: str, file: Path) -> None:
    """A group of bars for each model, precision and framework: milliseconds on the left, memory on the right."""
    from matplotlib import pyplot as plt

    groups = grouped(rows, "model", "precision", "framework")
    places, at = [], 0.0
    for group in groups:
        places.append([at + i for i in range(len(group))])
        at += len(group) + 0.8
    figure, grid = plt.subplots(1, 2, figsize=(10.8, 0.9 + 0.26 * at), squeeze=False, sharey=True, layout="constrained")
    panels = (("ms", "ms a step", ".1f"), ("peak_gib", "peak memory, GiB", ".1f"))
    for ax, (key, title, form) in zip(grid[0], panels, strict=True):
        for group, of_group in zip(groups, places, strict=True):
            for row, place in zip(group, of_group, strict=True):
                value = row[key] or 0
                ax.barh(place, value, 0.9, color=COLORS[row["impl"]], label=row["impl"])
                ax.text(value, place, f" {value:{form}}", va="center", fontsize=8, color=COLORS[row["impl"]])
        _furnish(ax, title, "x", 1.12 * max(row[key] or 0.1 for row in rows))
    labels = [group_name(group, "\n") for group in groups]
    grid[0, 0].set_yticks([sum(of_group) / len(of_group) for of_group in places], labels, fontsize=9)
    grid[0, 0].invert_yaxis()
    title = f"Training steps (forward, backward, AdamW) on {device}"
    _finish(figure, grid, present(rows), title, rows, file)


def draw_losses(rows: list[Row], device: str, file: Path) -> None:
    """A panel for each model, precision and framework."""
    from matplotlib import pyplot as plt

    groups = grouped(rows, "model", "precision", "framework")
    columns = min(3, len(groups))
    lines = -(-len(groups) // columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(0.4 + 3.6 * columns, 3 * lines + 0.9), squeeze=False, layout="constrained"
    )
    for ax, group in zip(grid.flat, groups, strict=False):
        for row in group:
            color = COLORS[row["impl"]]
            ax.plot(range(1, len(row["losses"]) + 1), row["losses"], color=color, lw=1.3, label=row["impl"])
            for again in curves(row)[1:]:
                ax.plot(range(1, len(again) + 1), again, color=color, lw=0.8, ls=(0, (4, 3)))
        _furnish(ax, group_name(group, ", "), "y", 1)
        found = [loss for row in group for loss in row["losses"]]
        ax.set_ylim(min(found) - 0.1, max(found) + 0.1)
    for ax in grid.flat[len(groups) :]:
        ax.set_visible(False)
    for ax in grid[:, 0]:
        ax.set_ylabel("loss")
    for ax in grid[-1]:
        ax.set_xlabel("step; dashed: a second run")
    _finish(figure, grid, present(rows), f"Loss on {device}", rows, file)


def present(rows: list[Row]) -> list[str]:
    return [impl for impl in IMPL_ORDER if any(row["impl"] == impl for row in rows)]


def group_name(group: list[Row], separator: str) -> str:
    row = group[0]
    return f"{NAMES[row['model']]}{separator}{framework_name(row)}, {row['precision']}"


if __name__ == "__main__":
    main()
