"""One row: trains a model in a process of its own and writes what it measured.

``python -m benchmarks.models.train SPEC FILE``; SPEC is the JSON of a `Spec`. A process for each row, so that the first
step, the caches of compilation and the memory are its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import data, kernels
from .operators import FLAVOURS
from .torch_models import IGNORED, MODELS, Size, build

LEARNING_RATE = 3e-4
TRAINED, TRAINED_TINY = 50, 12  # steps before the loss that is reported
PROFILED = 3


@dataclass(frozen=True)
class Spec:
    model: str
    impl: str
    precision: str  # bfloat16: of the parameters; autocast: parameters in float32; float32
    timed: int = 20
    tiny: bool = False
    deterministic: bool = False
    profile: bool = False
    compile_only: bool = False

    @property
    def flavour(self) -> str:
        return "aotops" if self.impl.startswith("aotops") else "torch"

    @property
    def compiled(self) -> bool:
        return self.impl.endswith("compile")

    @property
    def trained(self) -> int:
        """Steps: the first one, the warm-up and the timed ones."""
        return TRAINED_TINY if self.tiny else max(TRAINED, self.timed + 10)

    @property
    def size(self) -> Size:
        return MODELS[self.model][2 if self.tiny else 1]


def measure(spec: Spec, device: str) -> dict[str, Any]:
    """The figures of a row."""
    torch.use_deterministic_algorithms(spec.deterministic)
    clock = Clock(device)
    model = build_model(spec, device)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.1, fused=True)
    loss_of = torch.compile(model) if spec.compiled else model
    steps = 2 if spec.compile_only else spec.trained
    on_host = data.batches(spec.model, spec.size, steps + PROFILED + 1)
    batches = [tuple(torch.from_numpy(array).to(device) for array in batch) for batch in on_host]
    losses: list[Tensor] = []

    def step(batch: tuple[Tensor, ...]) -> None:
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
    for batch in batches[1:timed]:
        step(batch)
    clock.synchronize()
    clock.reset_peak()
    times = clock.times(step, batches[timed:steps])
    row = {
        **times,
        "tokens_per_s": round(spec.size.tokens_per_step / times["ms"] * 1e3),
        "peak_gib": clock.peak_gib(),
        "first_step_s": round(first, 2),
        "losses": [round(float(loss), 6) for loss in losses],
        "bits": bits(losses, model),
        "loss": round(exact_loss(spec, model, batches[-1], device), 6),
    }
    if spec.profile and device == "cuda":
        row["kernels"] = kernels.profile(lambda: [step(batch) for batch in batches[steps : steps + PROFILED]], PROFILED)
        row["kernels"]["gaps_ms"] = round(row["ms"] - row["kernels"]["total_ms"], 3)
    return row


def build_model(spec: Spec, device: str) -> nn.Module:
    dtype = torch.bfloat16 if spec.precision == "bfloat16" else torch.float32
    return build(spec.model, FLAVOURS[spec.flavour], spec.size, dtype, device)


def autocast(spec: Spec, device: str) -> Any:
    on = spec.precision == "autocast"
    return torch.autocast(device, torch.bfloat16) if on else contextlib.nullcontext()


def exact_loss(spec: Spec, model: nn.Module, batch: tuple[Tensor, ...], device: str) -> float:
    """Of a batch that was not trained on, computed from the logits in float32 by the same function for all."""
    with torch.no_grad(), autocast(spec, device):
        logits = model.logits(*batch[:-1])
    chunks = zip(logits.flatten(0, -2).split(2048), batch[-1].flatten().split(2048), strict=True)
    total = sum(functional.cross_entropy(x.float(), y, ignore_index=IGNORED, reduction="sum") for x, y in chunks)
    return float(total / (batch[-1] != IGNORED).sum())


def bits(losses: list[Tensor], model: nn.Module) -> str:
    """A digest of the losses and the parameters: two runs have the same one only if all bits are the same."""
    digest = hashlib.sha256(torch.stack(losses).float().cpu().numpy().tobytes())
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


class Clock:
    """Times and memory of a device."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def reset_peak(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float | None:
        return round(torch.cuda.max_memory_allocated() / 2**30, 3) if self.cuda else None

    def times(self, step: Callable[[Any], None], batches: list[Any]) -> dict[str, float]:
        """Milliseconds of a step, without synchronization between steps: ``ms``, the median from event to event (from
        step to step without a GPU); ``wall_ms``, the mean until all are done; ``host_ms``, the mean until all are
        issued."""
        marks = [self._mark()]
        start = time.perf_counter()
        for batch in batches:
            step(batch)
            marks.append(self._mark())
        issued = time.perf_counter() - start
        self.synchronize()
        done = time.perf_counter() - start
        pairs = itertools.pairwise(marks)
        each = [a.elapsed_time(b) if self.cuda else (b - a) * 1e3 for a, b in pairs]
        n = len(batches)
        return {
            "ms": round(statistics.median(each), 3),
            "wall_ms": round(done / n * 1e3, 3),
            "host_ms": round(issued / n * 1e3, 3),
        }

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def main() -> None:
    spec, file = Spec(**json.loads(sys.argv[1])), Path(sys.argv[2])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    row = measure(spec, device)
    file.write_text(json.dumps({"device": name, "torch": torch.__version__, "spec": asdict(spec), "row": row}))


if __name__ == "__main__":
    main()
