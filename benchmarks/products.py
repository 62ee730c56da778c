"""The matrix products of a training step as a model runs them: all shapes in turn with passes over the activations
between them, by one implementation for seconds. A kernel's power sets the clock of all that runs beside it, so
implementations that alternate call by call would all be measured at one clock, which none of them has in a model.

    python -m benchmarks.products --json products.json

runs torch, and the library in modes of AOTOPS_GEMM, in blocks of --seconds, in turn, --rounds times. It prints for each
model the time of a step and of each of its products: torch's in microseconds, and the ratio of torch's to each mode's.
Above 1, ours is faster.
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
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
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
DTYPE = torch.bfloat16
MODES = ("auto", "own")
PASS_OVER = {"forward": "y", "dx": "dx", "backward": "dx"}
"""The result that a pass reads after a call."""
COPIES = 2
"""Sets of tensors for a product, so that a product does not find its own in the cache."""
SETTLING = 0.4
"""The part of a block in which the clock settles; what it takes is not counted."""
STEPS_AHEAD = 2
"""Steps that the host may submit before it waits."""


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
    def gradients(self) -> tuple[str, ...]:
        """The calls of a backward that are timed: each product alone, if that is what the implementations run."""
        if self.activation:
            return ("backward",)
        return ("dx", "dweight", "dbias") if self.bias else ("dx", "dweight")

    @property
    def name(self) -> str:
        what = ("" if self.bias else ", no bias") + (f", {self.activation}" if self.activation else "")
        return f"{self.rows} x {self.inputs} -> {self.outputs}{what}"


def _layers(rows: int, width: int, count: int, activation: str | None) -> list[Linear]:
    return [
        Linear(rows, width, 3 * width, count),
        Linear(rows, width, width, count),
        Linear(rows, width, 4 * width, count, activation=activation),
        Linear(rows, 4 * width, width, count),
    ]


MODELS: dict[str, list[Linear]] = {
    "gpt2": [*_layers(16384, 768, 12, "gelu_tanh"), Linear(16384, 768, 50304, 1, bias=False)],
    "llama": [
        Linear(8192, 2048, 6144, 8, bias=False),
        Linear(8192, 2048, 2048, 8, bias=False),
        Linear(8192, 2048, 5632, 16, bias=False),
        Linear(8192, 5632, 2048, 8, bias=False),
        Linear(8192, 2048, 32000, 1, bias=False),
    ],
    "bert": _layers(8192, 768, 12, "gelu"),
    "gpt2 medium": _layers(8192, 1024, 12, None),
}
"""The linear layers of benchmarks/models, and of others."""


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

        calls = {name: grad(name) for name in ("dx", "dweight", "dbias") if name in layer.gradients}
        calls["forward"] = lambda: run(t["x"], t["weight"], t.get("bias"), t["y"], kept, of_forward)
        return calls | {"backward": grad("dx", "dweight", *(["dbias"] if layer.bias else []))}


def in_torch(layer: Linear, t: Tensors) -> dict[str, Callable[[], Any]]:
    """torch's calls, as its autograd makes them; results are allocated by its allocator, as in a model."""
    x, weight, bias, dy = t["x"], t["weight"], t.get("bias"), t["dy"]
    functional, aten = torch.nn.functional, torch.ops.aten
    calls: dict[str, Callable[[], Any]] = {
        "dx": lambda: dy @ weight,
        "dweight": lambda: dy.t() @ x,
        "dbias": lambda: dy.sum(0),
    }
    if not layer.activation:
        return calls | {"forward": lambda: functional.linear(x, weight, bias)}
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
        return torch.randn(shape, device="cuda").mul_(scale).to(DTYPE)

    rows, n, k = layer.rows, layer.outputs, layer.inputs
    t = {
        "x": normal(rows, k),
        "weight": normal(n, k, scale=k**-0.5),
        "dy": normal(rows, n),
        "pre_activation": normal(rows, n if layer.activation else 0),
        "y": normal(rows, n),
        "dx": normal(rows, k),
        "dweight": normal(n, k),
        "dbias": normal(n),
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
    gradients = [(i, copy, which) for i, copy in reversed(order) for which in layers[i].gradients]
    return [(*at, "forward") for at in order] + gradients


Timed = list[tuple[str, torch.cuda.Event, torch.cuda.Event]]


class Step:
    """A model's products, and passes over activations as large as the norms', by one implementation."""

    def __init__(
        self, layers: list[Linear], tensors: list[list[Tensors]], passes: Callable[[Linear, Tensors], dict[str, Any]]
    ) -> None:
        calls = [[passes(layer, t) for t in copies] for layer, copies in zip(layers, tensors, strict=True)]
        beside = torch.empty(max(t["y"].numel() for copies in tensors for t in copies), dtype=DTYPE, device="cuda")
        self._calls: list[tuple[str, Callable[[], Any]]] = []
        for i, copy, which in step_order(layers):
            self._calls.append((f"{layers[i].name}: {which}", calls[i][copy][which]))
            if (name := PASS_OVER.get(which)) is not None:
                of = tensors[i][copy][name]
                self._calls.append(("", partial(torch.add, of, of, out=beside[: of.numel()].view_as(of))))

    def run(self) -> None:
        for _, run in self._calls:
            run()

    def timed(self) -> Timed:
        events = []
        for name, run in self._calls:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            if name:
                events.append((name, begin, end))
        return events


@dataclass
class Times:
    """In microseconds: of the steps of each block, and of each product over all blocks."""

    steps: list[float] = field(default_factory=list)
    products: dict[str, list[float]] = field(default_factory=dict)

    @property
    def step(self) -> float:
        return statistics.median(self.steps)

    def product(self, name: str) -> float:
        return statistics.median(self.products[name])


def run_block(step: Step, seconds: float, times: Times) -> None:
    """Steps without a pause for the given time: first until the clock has settled, then timed, then each product."""
    submitted: deque[torch.cuda.Event] = deque()

    def submit(until: float) -> int:
        for count in itertools.count(1):
            step.run()
            submitted.append(torch.cuda.Event())
            submitted[-1].record()
            if len(submitted) > STEPS_AHEAD:
                submitted.popleft().synchronize()
            if time.monotonic() > until:
                return count
        raise AssertionError

    start = time.monotonic()
    submit(start + SETTLING * seconds)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    count = submit(start + seconds)
    end.record()
    of_products = [step.timed() for _ in range(3)]
    torch.cuda.synchronize()
    times.steps.append(begin.elapsed_time(end) * 1e3 / count)
    for name, first, last in itertools.chain(*of_products):
        times.products.setdefault(name, []).append(first.elapsed_time(last) * 1e3)


def measure(layers: list[Linear], libraries: dict[str, Ours], seconds: float, rounds: int) -> dict[str, Times]:
    tensors = [[make_tensors(layer) for _ in range(COPIES)] for layer in layers]
    steps = {"torch": Step(layers, tensors, in_torch)}
    steps |= {mode: Step(layers, tensors, ours.passes) for mode, ours in libraries.items()}
    for name, step in steps.items():
        if name in libraries:
            libraries[name].select()
        for _ in range(2):
            step.run()
        torch.cuda.synchronize()
    times = {name: Times() for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            run_block(step, seconds, times[name])
    return times


def report(model: str, modes: list[str], times: dict[str, Times]) -> list[dict[str, Any]]:
    """Prints a model's times, and returns those for the record."""
    record: list[dict[str, Any]] = []

    def line(what: str, us: dict[str, float], **of: Any) -> None:
        print(f"{what:45}{us['torch']:9.1f}" + "".join(f"{us['torch'] / us[mode]:8.3f}" for mode in modes))
        record.append({"model": model, **of, "us": us})

    print(f"\n{model}: microseconds of torch, and ratios to it of {', '.join(modes)}; above 1: ours is faster")
    line("step", {name: of.step for name, of in times.items()}, blocks={name: of.steps for name, of in times.items()})
    for layer in MODELS[model]:
        for which in ("forward", *layer.gradients):
            us = {name: of.product(f"{layer.name}: {which}") for name, of in times.items()}
            line(f"{layer.name}: {which}", us, **asdict(layer), which=which)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", default="gpt2,llama", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--modes", default=",".join(MODES), help="of AOTOPS_GEMM")
    parser.add_argument("--seconds", type=float, default=2.5, help="of a block")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    modes = args.modes.split(",")
    torch.manual_seed(0)
    record: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        libraries = {mode: Ours(mode, folder) for mode in modes}
        for model in args.models.split(","):
            record += report(model, modes, measure(MODELS[model], libraries, args.seconds, args.rounds))
            torch.cuda.empty_cache()
    if args.json:
        device = torch.cuda.get_device_name()
        found = {"device": device, "torch": torch.__version__, "aotops": aotops.__version__, "products": record}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
