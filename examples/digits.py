"""Trains one classifier of scikit-learn's 1,797 images of handwritten digits in PyTorch, MindSpore and JAX:

    linear - LayerNorm - GELU - linear

with LayerNorm and GELU from aotops. All frameworks start from the same weights and see the same batches. The trained
weights are evaluated in NumPy, and in CuPy on a GPU. Exits with 1 if an accuracy is too low or a distance between
frameworks too large.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

import numpy as np
from digits_worker import WEIGHTS
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits

from aotops import library

NAMES = {"torch": "PyTorch", "mindspore": "MindSpore", "jax": "JAX"}
HIDDEN, EPOCHS, BATCH, TEST = 128, 30, 32, 360
LEARNING_RATE, MOMENTUM = 0.05, 0.9

MIN_ACCURACY = 0.95
MAX_FIRST_EPOCH = 1e-3  # relative distance between loss curves
MAX_LOGITS = 1e-3  # between a framework's logits and those of the same weights in NumPy or CuPy

Arrays = dict[str, np.ndarray]
console = Console(highlight=False)


# --------------------------------------------------------------------------------------------------------------- task


def make_task(seed: int = 0) -> tuple[Arrays, np.ndarray]:
    """The task for every framework: images, initial weights and the images of each batch of each epoch. Second, the
    classes of the test images, which the frameworks do not get."""
    rng = np.random.default_rng(seed)
    digits = load_digits()
    images, classes = (digits.data / 16).astype("float32"), digits.target.astype("int64")
    test, train = np.split(rng.permutation(len(images)), [TEST])
    steps = len(train) // BATCH
    batches = np.stack([rng.permutation(len(train))[: steps * BATCH].reshape(steps, BATCH) for _ in range(EPOCHS)])

    def uniform(n_out: int, n_in: int) -> np.ndarray:
        return rng.uniform(-1, 1, (n_out, n_in)).astype("float32") / np.sqrt(n_in, dtype="float32")

    task = {
        "x": images[train], "y": classes[train], "x_test": images[test], "batches": batches,
        "learning_rate": np.float32(LEARNING_RATE), "momentum": np.float32(MOMENTUM),
        "w1": uniform(HIDDEN, images.shape[1]), "b1": np.zeros(HIDDEN, "float32"),
        "gamma": np.ones(HIDDEN, "float32"), "beta": np.zeros(HIDDEN, "float32"),
        "w2": uniform(10, HIDDEN), "b2": np.zeros(10, "float32"),
    }  # fmt: skip
    return task, classes[test]


# ----------------------------------------------------------------------------------------------------------- training


@dataclass
class Run:
    """The result of training in one framework."""

    name: str
    device: str
    losses: np.ndarray  # one per step
    logits: np.ndarray  # of the test images
    weights: list[np.ndarray]


def train(framework: str, python: str, folder: Path, progress: Progress) -> Run:
    """Runs the framework's worker and shows its progress."""
    name, result = NAMES[framework], folder / f"{framework}.npz"
    bar = progress.add_task(f"{name:9}", total=EPOCHS, loss="starting")
    command = [
        python,
        str(Path(__file__).with_name("digits_worker.py")),
        framework,
        str(folder / "task.npz"),
        str(result),
    ]
    with open(folder / f"{framework}.err", "w+") as errors:
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment())
        for line in worker.stdout:
            if line.startswith("progress "):
                _, epoch, loss = line.split()
                progress.update(bar, completed=int(epoch), loss=f"loss {float(loss):.4f}")
        if worker.wait():
            errors.seek(0)
            progress.stop()
            raise SystemExit(f"{errors.read()}\n{name}: the worker ended with status {worker.returncode}")
    with np.load(result) as r:
        return Run(name, str(r["device"]), r["losses"], r["logits"], [r[w] for w in WEIGHTS])


def environment() -> dict[str, str]:
    """The frameworks' switches for deterministic results, a shared GPU, and no log messages."""
    return os.environ | {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "GLOG_v": "3",
        "OMP_NUM_THREADS": "1",  # the model is too small for threads to help
    }


# --------------------------------------------------------------------------------------------------------- evaluation


def evaluate(xp, ops, weights: list[np.ndarray], x: np.ndarray) -> np.ndarray:
    """The logits of x: the same model in an array library, NumPy or CuPy."""
    w1, b1, gamma, beta, w2, b2 = map(xp.asarray, weights)
    h = ops.gelu(ops.layer_norm(xp.asarray(x) @ w1.T + b1, len(gamma), gamma, beta))
    return h @ w2.T + b2


def array_libraries():
    """Pairs of a name and a function of weights and images, for each array library that can run here."""
    from aotops.frontends import numpy as ops

    yield "NumPy", lambda weights, x: evaluate(np, ops, weights, x)
    if find_spec("cupy") and library.has_cuda():
        import cupy

        if cupy.cuda.is_available():
            from aotops.frontends import cupy as cupy_ops

            yield "CuPy", lambda weights, x: evaluate(cupy, cupy_ops, weights, x).get()


def accuracy(logits: np.ndarray, classes: np.ndarray) -> float:
    return float((logits.argmax(axis=1) == classes).mean())


def distance(run: Run, reference: Run) -> np.ndarray:
    """The distance between two loss curves at each step, relative to the second."""
    return np.abs(run.losses - reference.losses) / np.abs(reference.losses)


# ------------------------------------------------------------------------------------------------------------- report


class Report:
    """Prints the tables; marks each figure that has a bound."""

    def __init__(self) -> None:
        self.missed: list[str] = []

    def mark(self, what: str, text: str, good: bool) -> str:
        if good:
            return f"{text} [green]✓[/]"
        self.missed.append(f"{what} is {text}")
        return f"[red]{text} ✗[/]"

    def training(self, runs: list[Run], classes: np.ndarray, steps: int) -> None:
        first = runs[0]
        header = f"loss: distance from\n{first.name}, epoch 1"
        table = make_table("trained in", "device", "test accuracy", header, f"all {EPOCHS} epochs")
        for run in runs:
            right, apart = accuracy(run.logits, classes), distance(run, first)
            early = apart[:steps].max()
            table.add_row(
                run.name,
                run.device,
                self.mark(f"{run.name}: test accuracy", f"{right:.4f}", right >= MIN_ACCURACY),
                "" if run is first else self.mark(f"{run.name}: distance", f"{early:.1e}", early <= MAX_FIRST_EPOCH),
                "" if run is first else f"{apart.max():.1e}",
            )
        table.caption = f"bounds: accuracy >= {MIN_ACCURACY}, relative distance in epoch 1 <= {MAX_FIRST_EPOCH:.0e}"
        console.print(table)

    def evaluation(self, runs: list[Run], task: Arrays, classes: np.ndarray) -> None:
        table = make_table("weights of", "evaluated in", "test accuracy", "distance of logits")
        for name, logits_of in array_libraries():
            for run in runs:
                logits = logits_of(run.weights, task["x_test"])
                what = f"{run.name}'s weights in {name}"
                right, apart = accuracy(logits, classes), np.abs(logits - run.logits).max()
                table.add_row(
                    run.name,
                    name,
                    self.mark(f"{what}: test accuracy", f"{right:.4f}", right == accuracy(run.logits, classes)),
                    self.mark(f"{what}: distance of logits", f"{apart:.1e}", apart <= MAX_LOGITS),
                )
        table.caption = f"bounds: accuracy as in training, distance of logits <= {MAX_LOGITS:.0e}"
        console.print(table)


def make_table(*headers: str) -> Table:
    """A table with two columns of text, then columns of figures."""
    table = Table(box=box.SIMPLE_HEAD)
    for i, header in enumerate(headers):
        table.add_column(header, justify="left" if i < 2 else "right", vertical="bottom")
    return table


def plot(runs: list[Run], steps: int, file: Path) -> None:
    """Plots the loss curves, and below them their distances from the first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    first, *others = runs
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 2), layout="constrained")
    epochs = np.arange(1, EPOCHS + 1)
    above.plot(np.arange(1, EPOCHS * steps + 1) / steps, first.losses, color="0.85", linewidth=0.6, label="each batch")
    # decreasing widths, so that all are visible where they coincide
    for i, (run, width, line) in enumerate(zip(runs, (7, 3, 1.2), ("-", "-", "--"), strict=False)):
        means = run.losses.reshape(EPOCHS, steps).mean(axis=1)
        above.plot(
            epochs, means, line, color=("C0", "C1", "black")[i], linewidth=width, label=f"{run.name}, {run.device}"
        )
    for run, color in zip(others, ("C1", "black"), strict=False):
        below.plot(
            epochs, distance(run, first).reshape(EPOCHS, steps).max(axis=1), "o-", color=color, ms=4, label=run.name
        )
    above.set(
        yscale="log",
        ylabel="loss, mean over the epoch",
        title="linear - LayerNorm - GELU - linear, on images of digits",
    )
    below.set(xlabel="epoch", ylabel=f"relative distance from {first.name},\nlargest in the epoch")
    if others:
        below.plot(1, MAX_FIRST_EPOCH, "_", color="C3", ms=14, mew=2, label="allowed in epoch 1")
        below.set(yscale="log")
        below.legend()
    above.legend()
    for axes in (above, below):
        axes.grid(alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)


# --------------------------------------------------------------------------------------------------------------- main


def interpreters(wanted: list[str] | None, mindspore_python: str | None) -> dict[str, str]:
    """The interpreter for each framework in ``wanted``; by default for those that are installed."""
    python = dict.fromkeys(NAMES, sys.executable)
    if mindspore_python:
        if not which(mindspore_python):
            raise SystemExit(f"--mindspore-python: {mindspore_python} is not an interpreter")
        python["mindspore"] = mindspore_python
    here = {name for name in NAMES if python[name] != sys.executable or find_spec(name)}
    for name in wanted or NAMES:
        if name not in here:
            hint = "; use --mindspore-python to name an interpreter that has it" if name == "mindspore" else ""
            message = f"{NAMES[name]} is not installed here{hint}"
            if wanted:
                raise SystemExit(message)
            console.print(f"[yellow]{message}; left out[/]", soft_wrap=True)
    return {name: python[name] for name in wanted or NAMES if name in here}


def frameworks(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"unknown framework {', '.join(unknown)}, expected some of {', '.join(NAMES)}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--frameworks", type=frameworks, metavar="NAMES", help=f"of {','.join(NAMES)}; default: those installed"
    )
    parser.add_argument("--mindspore-python", metavar="PATH", help="the interpreter of MindSpore's own environment")
    parser.add_argument(
        "--output", type=Path, default=Path("build/digits.png"), metavar="PNG", help="file for the plot"
    )
    args = parser.parse_args()

    library.load()  # fails here, once, rather than in each worker
    python = interpreters(args.frameworks, args.mindspore_python)
    if not python:
        raise SystemExit("none of the frameworks is installed here")
    task, classes = make_task()
    steps = task["batches"].shape[1]
    console.print(
        f"\nlinear - [b]LayerNorm[/] - [b]GELU[/] - linear, with LayerNorm and GELU from aotops\n"
        f"{len(task['x'])} training images, {len(classes)} test images, {EPOCHS} epochs, {steps} batches of {BATCH}\n"
    )
    columns = (TextColumn("{task.description}"), BarColumn(40), TextColumn("epoch {task.completed:2}/{task.total}"))
    with (
        TemporaryDirectory() as folder,
        Progress(*columns, TextColumn("{task.fields[loss]}"), TimeElapsedColumn()) as progress,
    ):
        np.savez(Path(folder, "task.npz"), **task)
        runs = [train(framework, path, Path(folder), progress) for framework, path in python.items()]

    report = Report()
    report.training(runs, classes, steps)
    report.evaluation(runs, task, classes)
    plot(runs, steps, args.output)
    console.print(f"curves: {args.output}")
    for miss in report.missed:
        console.print(f"[red]missed: {miss}[/]")
    return bool(report.missed)


if __name__ == "__main__":
    sys.exit(main())
