"""Training steps of image networks, timm's and a U-Net: as they are, with ``replace``, and on this library's functions.

A step is forward, backward and torch's fused AdamW, in bfloat16 and channels_last, with weights and images at random.
In a row of replace ``replace`` was called with the network, and in one of aotops the functions of torch.nn.functional
that a network calls are this library's (exchange.py); all else is torch's. Each row has a process of its own. With
--at-once several compile at the same time, and one after another takes its timed steps. Eager rows come after them,
each alone, because the host decides most of them. First losses that are further apart than bfloat16's rounding are a
failure.

    python -m benchmarks.networks --at-once 6               # all, into results/networks_h200.json
    python -m benchmarks.networks unet resnext --impls torch.compile,aotops.compile --json -
    python -m benchmarks.networks --at-once 6 --within 500  # as many rows as fit, the compiled ones first
    python -m benchmarks.networks --page                    # the table of docs/models.md, of the record
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from aotops.bench.turns import Turns
from aotops.frontends.torch import replace

from . import replaced
from .exchange import exchanged
from .models import kernels
from .models.torch_train import Clock

IMPLS = ("torch", "replace", "torch.compile", "replace.compile", "aotops.compile")
PREPARED, WARM_UP, STEPS, PROFILED = 2, 5, 20, 3
LISTED = 10  # kernels of a row
ROUNDING = 2.0**-7  # the largest distance, of a number, to its neighbour in bfloat16
ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks/results/networks_h200.json", ROOT / "docs/models.md"
SECTION = re.compile(r"(<!-- networks: steps -->\n).*?(<!-- end -->)", re.DOTALL)

Row = replaced.Row


class Network(NamedTuple):
    title: str
    batch: int
    timm: str | None = None
    """timm's name; None: the U-Net below."""
    options: tuple[tuple[str, Any], ...] = ()


NETWORKS = {
    "resnet18": Network("ResNet-18", 128, "resnet18"),
    "unet": Network("U-Net", 32),
    "deit": Network("DeiT III-S", 128, "deit3_small_patch16_224"),
    "swin": Network("Swin-T", 64, "swin_tiny_patch4_window7_224", (("drop_path_rate", 0.0),)),
    "resnext": Network("ResNeXt-50", 64, "resnext50_32x4d"),
    "convnext": Network("ConvNeXt-T", 64, "convnext_tiny"),
    "regnet": Network("RegNetY-032", 64, "regnety_032"),
    "mobilenet": Network("MobileNetV3-L", 128, "mobilenetv3_large_100"),
    "densenet": Network("DenseNet-121", 64, "densenet121"),
    "effnet": Network("EfficientNetV2-S", 64, "tf_efficientnetv2_s"),
}
"""The first ones compile in the least time. Nothing is dropped at random, because losses are compared."""
ORDER = {"network": tuple(NETWORKS), "impl": IMPLS}


class Block(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(32, out), nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(functional.silu(self.norm1(x)))
        return self.conv2(functional.silu(self.norm2(y))) + self.skip(x)


class UNet(nn.Module):
    """Blocks of a diffusion model at three sizes of the image."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, n, 3, padding=1), nn.Conv2d(n, 3, 3, padding=1)
        self.down = nn.ModuleList([Block(n, n), Block(n, 2 * n), Block(2 * n, 4 * n)])
        self.halves = nn.ModuleList([nn.Conv2d(c, c, 3, stride=2, padding=1) for c in (n, 2 * n)])
        self.up = nn.ModuleList([Block(6 * n, 2 * n), Block(3 * n, n)])

    def forward(self, x: Tensor) -> Tensor:
        a = self.down[0](self.first(x))
        b = self.down[1](self.halves[0](a))
        y = self.down[2](self.halves[1](b))
        for block, beside in zip(self.up, (b, a), strict=True):
            y = block(torch.cat((functional.interpolate(y, scale_factor=2.0), beside), 1))
        return self.last(y)


# -------------------------------------------------------------------------------------------------------- measurements


def build(name: str, tiny: bool, device: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A network and its loss, whose numbers are drawn on the CPU: the same ones in each row."""
    torch.manual_seed(0)
    network = NETWORKS[name]
    if network.timm:
        import timm

        model, size = timm.create_model(network.timm, **dict(network.options)), 224
    else:
        model, size = (UNet(32), 16) if tiny else (UNet(128), 64)
    placed: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "memory_format": torch.channels_last}
    images = torch.randn(2 if tiny else network.batch, 3, size, size).to(**placed)
    classes = torch.randint(1000, (len(images),)).to(device)
    model = model.to(**placed).train()

    def loss() -> Tensor:
        if network.timm:
            return functional.cross_entropy(model(images), classes)
        return functional.mse_loss(model(images).float(), images.float())

    return model, loss


def measure(name: str, impl: str, tiny: bool, turns: Turns) -> Row:
    """A row, in this process."""
    clock = Clock("cuda" if torch.cuda.is_available() else "cpu")
    model, loss_of = build(name, tiny, "cuda" if clock.cuda else "cpu")
    if impl.startswith("replace"):
        replace(model)
    run = torch.compile(loss_of) if impl.endswith("compile") else loss_of
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    losses: list[Tensor] = []
    loss: Tensor  # lives to the end of the next forward, with what its graph keeps, as in a user's loop

    def step(_: Any = None) -> None:
        nonlocal loss
        loss = run()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    with exchanged() if impl.startswith("aotops") else contextlib.nullcontext():
        for _ in range(PREPARED):
            step()
        clock.synchronize()
        clock.give_back()
        with turns:
            for _ in range(WARM_UP):
                step()
            clock.synchronize()
            clock.reset_peak()
            row = {"network": name, "impl": impl, **clock.times(step, [None] * STEPS), "peak_gib": clock.peak_gib()}
            row["losses"] = [round(float(each), 4) for each in losses[: PREPARED + WARM_UP]]
            if clock.cuda:
                found = kernels.profile(lambda: [step() for _ in range(PROFILED)], PROFILED)
                row["kernels"] = {key: found[key] for key in ("busy_ms", "total_ms")} | {"top": found["top"][:LISTED]}
    return row


def of_process(name: str, impl: str, args: argparse.Namespace, folder: Path) -> list[Row]:
    """The row, of a process of its own; none if there was no time for it.

    Raises:
        RuntimeError: the process failed.
    """
    left, own = args.end - time.monotonic(), folder / f"{name}-{impl}"
    if left <= 0:
        return []
    given = [name, f"--impls={impl}", f"--turns={args.turns or folder / 'turns'}", f"--json={own}.json"]
    threads = str(max(1, len(os.sched_getaffinity(0)) // args.at_once))
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(own), "TRITON_CACHE_DIR": str(own / "triton")}
    command = [sys.executable, "-m", "benchmarks.networks", *given, *["--tiny"] * args.tiny]
    env = {"TORCHINDUCTOR_COMPILE_THREADS": threads} | os.environ | caches
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=left)
    except subprocess.TimeoutExpired:
        return []
    if done.returncode:
        raise RuntimeError(f"{name} {impl}: failed\n{done.stderr[-4000:]}")
    return json.loads(Path(f"{own}.json").read_text())["rows"]


def jobs(pairs: list[tuple[str, str]], args: argparse.Namespace, folder: Path) -> Iterator[Future]:
    """The rows' processes, as they end: the compiled ones, and then the eager ones, each alone."""
    compiled = [pair for pair in pairs if pair[1].endswith("compile")]
    eager = [pair for pair in pairs if pair not in compiled]
    for at_once, chosen in ((args.at_once, compiled), (1, eager)):
        with ThreadPoolExecutor(at_once) as pool:
            yield from as_completed([pool.submit(of_process, *pair, args, folder) for pair in chosen])


# --------------------------------------------------------------------------------------------------------- what it says


def line(row: Row) -> str:
    of_kernels, peak, losses = row.get("kernels", {}).get("busy_ms", 0), row["peak_gib"] or 0, row["losses"]
    times = f"{row['ms']:8.2f} ms  kernels {of_kernels:7.2f}  host {row['host_ms']:7.2f}  {peak:6.2f} GiB"
    return f"{row['network']:9} {row['impl']:14} {times}  loss {losses[0]} to {losses[-1]}"


def apart(rows: list[Row]) -> list[str]:
    """Rows whose first loss is another than torch's, that of the eager row if it is there, by more than rounding."""
    first = {(row["network"], row["impl"]): row["losses"][0] for row in rows}
    expected = {key: first.get((key[0], "torch"), first.get((key[0], "torch.compile"), first[key])) for key in first}
    pairs = [(" ".join(key), loss, expected[key]) for key, loss in first.items()]
    return [f"{row}: loss {a}, torch's {b}" for row, a, b in pairs if not abs(a - b) <= ROUNDING * abs(b)]


def page(text: str) -> str:
    """The page with the table of the record; without one it has none."""
    found = table(json.loads(RESULTS.read_text())) if RESULTS.exists() else ""
    return SECTION.sub(lambda section: section[1] + found + section[2], text)


def table(record: dict[str, Any]) -> str:
    found = {(row["network"], row["impl"]): row for row in record["rows"]}
    lines = [
        "ms of a step, ms in which its kernels run, GiB at the peak; the last columns are `replace` over `torch`, and",
        "`aotops.compile` over `torch.compile`. An empty cell was not measured.",
        "",
        f"| network | images | {' | '.join(f'`{impl}`' for impl in IMPLS)} | eager | compiled |",
        "|---|" + "--:|" * (len(IMPLS) + 3),
    ]
    for name, network in NETWORKS.items():
        rows = {impl: found.get((name, impl)) for impl in IMPLS}
        cells = {
            impl: [row["ms"], row["kernels"]["busy_ms"], row["peak_gib"]] if row else [] for impl, row in rows.items()
        }
        texts = [", ".join(f"{number:.1f}" for number in cell) for cell in cells.values()]
        for theirs, ours in (("torch", "replace"), ("torch.compile", "aotops.compile")):
            texts.append(", ".join(f"{b / a:.2f}" for a, b in zip(cells[theirs], cells[ours], strict=False)))
        if any(texts):
            lines.append(f"| {network.title} | {network.batch} | {' | '.join(texts)} |")
    return "\n".join([*lines, "", replaced.measured(record), ""])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="network", help=f"of {', '.join(NETWORKS)}; default: all")
    parser.add_argument("--impls", default=",".join(IMPLS), help="default: %(default)s")
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="ROWS", help="compiled ones, at the same time, but for timed steps"
    )
    parser.add_argument("--within", type=float, default=1e6, metavar="SECONDS", help="rows that take longer are left")
    parser.add_argument("--tiny", action="store_true", help="two images, and a small U-Net, to try this on a CPU")
    parser.add_argument("--page", action="store_true", help="measure nothing: write the table of docs/models.md")
    parser.add_argument("--turns", metavar="FILE", help="others run beside it, but for timed steps, which lock FILE")
    parser.add_argument("--json", metavar="FILE", help=f"adds the rows to it; - for none; default: {RESULTS.name}")
    args = parser.parse_args(argv)
    args.end, args.impls = time.monotonic() + args.within, args.impls.split(",")
    there = [name for name in NETWORKS if not NETWORKS[name].timm or (util.find_spec("timm") and not args.tiny)]
    args.networks = args.networks or there
    args.json = args.json or ("-" if args.tiny else str(RESULTS))
    for given, allowed in ((args.networks, NETWORKS), (args.impls, IMPLS)):
        if unknown := [name for name in given if name not in allowed]:
            parser.error(f"{unknown[0]!r} is none of {', '.join(allowed)}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.page:
        PAGE.write_text(page(PAGE.read_text()))
        return
    found, failed = [], []

    def add(rows: list[Row]) -> None:
        for row in rows:
            print(line(row), flush=True)
        found.extend(rows)
        if rows and args.json != "-":  # each time, for a run that is cut off
            head = replaced.environment("python -m benchmarks.networks", ("torch", "triton", "timm"))
            replaced.add(Path(args.json), head, rows, ORDER)

    pairs = [(name, impl) for name in args.networks for impl in args.impls]
    if len(pairs) == 1:
        add([measure(*pairs[0], args.tiny, Turns(args.turns))])
    else:
        temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # one that is cut off may still write
        with temporary as folder:
            for job in jobs(pairs, args, Path(folder)):
                try:
                    add(job.result())
                except RuntimeError as error:
                    print(error, file=sys.stderr, flush=True)
                    failed.append(str(error).partition("\n")[0])
    print(f"{len(found)} of {len(pairs)} rows")
    record = Path(args.json)
    failed += apart(json.loads(record.read_text())["rows"] if record.exists() else found)
    if failed:
        sys.exit("\n".join(["networks:", *failed]))


if __name__ == "__main__":
    main()
