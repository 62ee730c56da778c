"""Matrix products under a model's load: those of a training step, of different shapes in turn, for seconds, by the
library in each of its modes (AOTOPS_GEMM) and by torch. The implementations take turns, a step each.

    python -m benchmarks.products --json products.json

prints, for each product of each model, the median time of torch's and the ratio of torch's to each mode's: above 1,
ours is faster. For each product whose default is not the fastest it prints a row for cuda_src/gemm/choice.h.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import aotops
import aotops.frontends.torch  # which tells the call path of its tensors
from aotops import call, library
from aotops.infer import infer
from aotops.ops import OPS
from aotops.spec import TensorSpec

Tensors = dict[str, torch.Tensor]
MODES = ("auto", "cublaslt", "own", "tune")
PASSES = ("forward", "dx", "dweight", "dbias", "backward")
"""What is timed of a linear layer. backward: all of its gradients in one call; dbias: that alone."""
COPIES = 2
"""Of the tensors of a product, so that a product does not find its own in the cache."""
TUNING_STEPS = 45
"""After which the mode "tune" has timed 8 algorithms of each product, each 5 times."""
DEFAULT_MARGIN = 0.99
"""A mode must need less than this part of the default's time for a row of the table."""


@dataclass(frozen=True)
class Linear:
    """A linear layer of a model, on ``rows`` rows, and how many a step has."""

    rows: int
    inputs: int
    outputs: int
    count: int
    bias: bool = True
    activation: str | None = None

    @property
    def name(self) -> str:
        what = ("" if self.bias else ", no bias") + (f", {self.activation}" if self.activation else "")
        return f"{self.rows} x {self.inputs} -> {self.outputs}{what}"


def _gpt(rows: int, width: int, layers: int, activation: str | None) -> list[Linear]:
    return [
        Linear(rows, width, 3 * width, layers),
        Linear(rows, width, width, layers),
        Linear(rows, width, 4 * width, layers, activation=activation),
        Linear(rows, 4 * width, width, layers),
    ]


MODELS: dict[str, list[Linear]] = {
    "gpt2": [*_gpt(16384, 768, 6, None), Linear(16384, 768, 50257, 1, bias=False)],
    "gpt2 gelu": _gpt(16384, 768, 6, "gelu_tanh"),
    "bert": [
        Linear(8192, 768, 768, 16),
        Linear(8192, 768, 3072, 4, activation="gelu"),
        Linear(8192, 3072, 768, 4),
    ],
    "llama": [
        Linear(8192, 2048, 2048, 12, bias=False),
        Linear(8192, 2048, 5632, 6, bias=False),
        Linear(8192, 5632, 2048, 3, bias=False),
        Linear(8192, 2048, 32000, 1, bias=False),
    ],
    "gpt2 medium": _gpt(8192, 1024, 6, None),
}
"""Layers are fewer than the models', in the same proportion."""


def spec(tensor: torch.Tensor | None) -> TensorSpec | None:
    return None if tensor is None else TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


class Ours:
    """A copy of libaotops.so that read AOTOPS_GEMM as one mode. A library reads it once, so each mode has a copy."""

    def __init__(self, mode: str, folder: str) -> None:
        file = Path(folder, f"libaotops_{mode}.so")
        shutil.copy(library.path(), file)
        # the backward is an operator of its own entry
        self._ops = aotops.Library(f"gemm_{mode}", [OPS["linear"]], file).ops
        self._mode = mode

    def select(self) -> None:
        """For the first product of this copy."""
        os.environ["AOTOPS_GEMM"] = self._mode

    def passes(self, layer: Linear, t: Tensors) -> dict[str, Callable[[], None]]:
        forward, backward = self._ops["linear"], self._ops["linear"].backward
        assert backward is not None
        attrs = (layer.activation, False)
        kept = t["pre_activation"]
        found = infer(forward, attrs, tuple(map(spec, (t["x"], t["weight"], t.get("bias")))), "cuda")
        given = (t["dy"], t["x"], t["weight"], t.get("bias"), kept)
        needs = infer(backward, attrs, tuple(map(spec, given)), "cuda")
        scratch = {
            shape: torch.empty(shape, dtype=torch.float32, device="cuda")
            for shape in {found["workspace"].shape, needs["workspace"].shape}
        }
        run, run_backward = call.tensors(forward, attrs), call.tensors(backward, attrs)
        of_forward, of_backward = scratch[found["workspace"].shape], scratch[needs["workspace"].shape]

        def grad(*wanted: str) -> Callable[[], None]:
            out = [t[name] if name in wanted else None for name in ("dx", "dweight", "dbias")]
            return lambda: run_backward(*given, *out, of_backward)

        all_of = ("dx", "dweight", "dbias") if layer.bias else ("dx", "dweight")
        calls = {"forward": lambda: run(t["x"], t["weight"], t.get("bias"), t["y"], kept, of_forward)}
        if not layer.activation:
            calls |= {name: grad(name) for name in all_of}
        return calls | {"backward": grad(*all_of)}


def in_torch(layer: Linear, t: Tensors) -> dict[str, Callable[[], Any]]:
    """torch's calls, as its autograd makes them; results are allocated by its allocator, as in a model."""
    x, weight, bias, dy = t["x"], t["weight"], t.get("bias"), t["dy"]
    functional, aten = torch.nn.functional, torch.ops.aten
    calls: dict[str, Callable[[], Any]] = {
        "dx": lambda: dy @ weight,
        "dweight": lambda: dy.t() @ x,
        "dbias": lambda: dy.sum(0),
    }
    if not layer.bias:
        del calls["dbias"]
    if not layer.activation:
        calls["backward"] = lambda: [calls[name]() for name in ("dx", "dweight", "dbias") if name in calls]
        return {"forward": lambda: functional.linear(x, weight, bias)} | calls
    how = {"gelu_tanh": "tanh", "gelu": "none"}[layer.activation]

    def forward() -> Any:
        z = functional.linear(x, weight, bias)
        return z, functional.gelu(z, approximate=how)

    def backward() -> Any:
        dz = aten.gelu_backward(dy, t["pre_activation"], approximate=how)
        return dz @ weight, dz.t() @ x, dz.sum(0)

    return {"forward": forward, "backward": backward}


def make_tensors(layer: Linear) -> Tensors:
    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, device="cuda").mul_(scale).to(torch.bfloat16)

    rows, n, k = layer.rows, layer.outputs, layer.inputs
    t = {
        "x": normal(rows, k),
        "weight": normal(n, k, scale=k**-0.5),
        "dy": normal(rows, n),
        "pre_activation": normal(rows, n if layer.activation else 0),
        "y": torch.empty(rows, n, device="cuda", dtype=torch.bfloat16),
        "dx": torch.empty(rows, k, device="cuda", dtype=torch.bfloat16),
        "dweight": torch.empty(n, k, device="cuda", dtype=torch.bfloat16),
        "dbias": torch.empty(n, device="cuda", dtype=torch.bfloat16),
    }
    if layer.bias:
        t["bias"] = normal(n)
    return t


def step_order(layers: list[Linear]) -> list[tuple[int, int, str]]:
    """(layer, copy, pass) in the order of a step: layers of all shapes in turn, forward, then backward."""

    def turns() -> Iterator[tuple[int, int]]:
        most = max(layer.count for layer in layers)
        for turn in range(most):
            for i, layer in enumerate(layers):
                if (turn + 1) * layer.count // most > turn * layer.count // most:
                    yield i, turn % COPIES

    order = list(turns())
    gradients = [name for name in PASSES if name != "forward"]
    return [(*at, "forward") for at in order] + [(*at, name) for at in reversed(order) for name in gradients]


def measure(layers: list[Linear], libraries: dict[str, Ours], seconds: float) -> dict[str, dict[str, list[float]]]:
    """The times in microseconds by implementation and by "layer: pass"."""
    tensors = [[make_tensors(layer) for _ in range(COPIES)] for layer in layers]
    calls = {"torch": [[in_torch(layer, t) for t in copies] for layer, copies in zip(layers, tensors, strict=True)]}
    for mode, ours in libraries.items():
        calls[mode] = [[ours.passes(layer, t) for t in copies] for layer, copies in zip(layers, tensors, strict=True)]
    order = step_order(layers)

    events: dict[tuple[str, int], tuple[torch.cuda.Event, torch.cuda.Event]] = {}

    def step(name: str) -> list[tuple[str, torch.cuda.Event, torch.cuda.Event]]:
        timed = []
        for at, (i, copy, which) in enumerate(order):
            if (run := calls[name][i][copy].get(which)) is None:
                continue
            if (name, at) not in events:
                events[name, at] = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin, end = events[name, at]
            begin.record()
            run()
            end.record()
            timed.append((f"{layers[i].name}: {which}", begin, end))
        return timed

    for name in calls:
        if name in libraries:
            libraries[name].select()
        for _ in range(TUNING_STEPS if name == "tune" else 2):
            step(name)
        torch.cuda.synchronize()
    times: dict[str, dict[str, list[float]]] = {name: {} for name in calls}
    stop = time.monotonic() + seconds
    for turn in itertools.count():
        names = list(calls)
        names = names[turn % len(names) :] + names[: turn % len(names)]
        done = [(name, step(name)) for name in names]
        torch.cuda.synchronize()
        for name, timed in done:
            for what, begin, end in timed:
                times[name].setdefault(what, []).append(begin.elapsed_time(end) * 1e3)
        if time.monotonic() > stop:
            return times
    raise AssertionError


def table_row(layer: Linear, which: str) -> str:
    """Of cuda_src/gemm/choice.h."""
    m, n, k, flags = {
        "forward": (layer.rows, layer.outputs, layer.inputs, "false, true"),
        "dx": (layer.rows, layer.inputs, layer.outputs, "false, false"),
        "dweight": (layer.outputs, layer.inputs, layer.rows, "true, false"),
    }[which]
    major = torch.cuda.get_device_capability()[0]
    return f"    {{{major}, {flags}, {'true' if layer.activation else 'false'}, {m}, {n}, {k}}},"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--seconds", type=float, default=6, help="of each model")
    args = parser.parse_args()
    modes = args.modes.split(",")
    torch.manual_seed(0)
    record: list[dict[str, Any]] = []
    rows: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        libraries = {mode: Ours(mode, folder) for mode in modes}
        for model in args.models.split(","):
            times = measure(MODELS[model], libraries, args.seconds)
            print(f"\n{model}: microseconds of torch, and ratios to it of {', '.join(modes)}; above 1: ours is faster")
            for layer, which in itertools.product(MODELS[model], PASSES):
                what = f"{layer.name}: {which}"
                if what not in times["torch"]:
                    continue
                us = {name: statistics.median(times[name][what]) for name in times}
                record.append({"model": model, **asdict(layer), "pass": which, "us": us})
                ratios = "".join(f"{us['torch'] / us[mode]:8.3f}" for mode in modes)
                print(f"{what:45}{us['torch']:9.1f}{ratios}")
                other = "cublaslt" if layer.activation else "own"
                kinds = ("forward",) if layer.activation else ("forward", "dx", "dweight")
                if which in kinds and {other, "auto"} <= us.keys() and us[other] < DEFAULT_MARGIN * us["auto"]:
                    rows.append(table_row(layer, which))
            total = {name: sum(us * layer.count for layer, us in _totals(MODELS[model], times[name])) for name in times}
            print(
                f"{'all of them':45}{total['torch']:9.1f}" + "".join(f"{total['torch'] / total[m]:8.3f}" for m in modes)
            )
            record.append({"model": model, "pass": "all", "us": total})
            torch.cuda.empty_cache()
    print(
        "\nproducts of which the default was not the fastest, for cuda_src/gemm/choice.h:",
        *dict.fromkeys(rows),
        sep="\n",
    )
    if args.json:
        device = torch.cuda.get_device_name()
        found = {"device": device, "torch": torch.__version__, "aotops": aotops.__version__, "products": record}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def _totals(layers: list[Linear], times: dict[str, list[float]]) -> Iterator[tuple[Linear, float]]:
    """The median times of the forward and of all gradients, which are a step's."""
    for layer, which in itertools.product(layers, ("forward", "backward")):
        yield layer, statistics.median(times[f"{layer.name}: {which}"])


if __name__ == "__main__":
    main()
