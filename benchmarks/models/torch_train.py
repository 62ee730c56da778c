"""The training steps of the models in torch."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from aotops.bench.turns import Turns

from . import data, kernels, timing
from .operators import FLAVOURS
from .spec import IGNORED, Spec
from .torch_models import build

VERSION = torch.__version__
PROFILED = 3


def device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def measure(spec: Spec) -> dict[str, Any]:
    """The figures of a row."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.use_deterministic_algorithms(spec.deterministic)
    clock, turns = Clock(device), Turns(spec.turns)
    model = build_model(spec, device)
    optimizer = FLAVOURS[spec.flavour].optimizer(model.parameters())
    loss_of = torch.compile(model) if spec.compiled else model
    steps = 2 if spec.compile_only else spec.trained
    on_host = data.batches(spec.model, spec.size, steps + PROFILED * spec.profile)
    batches = on_device(on_host, model)
    losses: list[Tensor] = []
    loss: Tensor  # lives to the end of the next forward, with what its graph keeps, as in a user's loop

    def step(batch: tuple[Tensor, ...]) -> None:
        nonlocal loss
        with autocast(spec, device):
            loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())

    clock.synchronize()
    start = time.perf_counter()
    step(batches[0])
    clock.synchronize()
    first = time.perf_counter() - start
    if spec.compile_only:
        step(batches[1])
        clock.synchronize()
        return {"first_step_s": first}
    timed = steps - spec.timed
    clock.give_back()
    with turns:
        for batch in batches[1:timed]:
            step(batch)
        clock.synchronize()
        clock.reset_peak()
        times = clock.times(step, batches[timed:steps])
        peak = clock.peak_gib()
        held_out = exact_loss(spec, model, device)
    row = {
        **times,
        "tokens_per_s": round(spec.size.tokens_per_step / times["ms"] * 1e3),
        "peak_gib": peak,
        "first_step_s": round(first, 2),
        "losses": [round(float(loss), 6) for loss in losses],
        "bits": bits(losses, model),
        "loss": round(held_out, 6),
    }
    if spec.profile and device == "cuda":
        with turns:
            row["kernels"] = kernels.profile(lambda: [step(b) for b in batches[steps : steps + PROFILED]], PROFILED)
        row["kernels"]["gaps_ms"] = round(row["ms"] - row["kernels"]["total_ms"], 3)
    return row


def build_model(spec: Spec, device: str) -> nn.Module:
    dtype = torch.bfloat16 if spec.precision == "bfloat16" else torch.float32
    return build(spec.model, FLAVOURS[spec.flavour], spec.size, dtype, device)


def autocast(spec: Spec, device: str) -> Any:
    on = spec.precision == "autocast"
    return torch.autocast(device, torch.bfloat16) if on else contextlib.nullcontext()


def on_device(batches: list[tuple[Any, ...]], model: nn.Module) -> list[tuple[Tensor, ...]]:
    """Batches as the model takes them: images in the dtype and layout of its parameters. One that is there twice has
    the same tensors."""
    parameter = next(model.parameters())
    images = {"dtype": parameter.dtype}
    if getattr(model, "channels_last", False):
        images["memory_format"] = torch.channels_last

    def moved(array: Any) -> Tensor:
        t = torch.from_numpy(array).to(parameter.device)
        return t.to(**images) if t.is_floating_point() else t

    found: dict[int, tuple[Tensor, ...]] = {}
    for batch in batches:
        found.setdefault(id(batch), tuple(map(moved, batch)))
    return [found[id(batch)] for batch in batches]


def exact_loss(spec: Spec, model: nn.Module, device: str) -> float:
    """The loss of a batch that was not trained on, from logits in float32 by the same function for all."""
    (batch,) = on_device([data.batch(spec.model, spec.size, data.HELD_OUT)], model)
    with torch.no_grad(), autocast(spec, device):
        logits = model.logits(*batch[:-1])
    chunks = zip(logits.flatten(0, -2).split(2048), batch[-1].flatten().split(2048), strict=True)
    total = sum(functional.cross_entropy(x.float(), y, ignore_index=IGNORED, reduction="sum") for x, y in chunks)
    return float(total / (batch[-1] != IGNORED).sum())


def bits(losses: list[Tensor], model: nn.Module) -> str:
    tensors = [torch.stack(losses), *(p.detach() for p in model.parameters())]
    return timing.digest(t.cpu().reshape(-1).view(torch.uint8).numpy() for t in tensors)


class Clock:
    """Times and memory of a device."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def give_back(self) -> None:
        """Frees memory that is kept for later steps, so that another process has it meanwhile."""
        if self.cuda:
            torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float | None:
        return round(torch.cuda.max_memory_allocated() / 2**30, 3) if self.cuda else None

    def times(self, step: Callable[[Any], None], batches: list[Any]) -> dict[str, float]:
        """Milliseconds of a step, without synchronization between steps: ``ms``, the median from event to event (from
        step to step without a GPU); ``wall_ms``, the mean until all are done; ``host_ms``, the mean until all are
        issued (timing.py)."""
        marks = [self._mark()]
        start = time.perf_counter()
        for batch in batches:
            step(batch)
            marks.append(self._mark())
        issued = time.perf_counter() - start
        self.synchronize()
        done = time.perf_counter() - start
        pairs = itertools.pairwise(marks)
        each = [a.elapsed_time(b) / 1e3 if self.cuda else b - a for a, b in pairs]
        return timing.figures(each, done / len(batches), issued / len(batches))

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
