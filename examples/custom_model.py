"""A model of two operators, ``(x + number) @ weight``, on aotops and on torch's own operators, timed.

    python examples/custom_model.py [--batch 1024] [--features 1024] [--dtype float32] [--devices cpu,cuda]

A forward and a backward pass are timed by CUDA events, on the CPU by time.perf_counter.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import tables
import torch
from tables import Result, Row

from aotops import library
from aotops.frontends import torch as F


class CustomModel(torch.nn.Module):
    """``(x + number) @ weight``. ``operators``: a module with add and matmul, torch or aotops.frontends.torch."""

    def __init__(self, features: int, number: float, operators: Any, device=None, dtype=None) -> None:
        super().__init__()
        self.number, self.operators = number, operators
        self.weight = torch.nn.Parameter(torch.empty(features, features, device=device, dtype=dtype))
        torch.nn.init.normal_(self.weight, std=features**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operators.matmul(self.operators.add(x, self.number), self.weight)


def seconds(call: Callable[[], Any], device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000)  # the GPU starts when all is queued, so that no time of the host's is counted
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def measured(args: Namespace, device: str) -> list[Row]:
    tensors = {"device": device, "dtype": getattr(torch, args.dtype)}
    x = torch.randn(args.batch, args.features, **tensors, requires_grad=True)
    dy = torch.randn(args.batch, args.features, **tensors)
    models = {name: CustomModel(args.features, 1.5, ops, **tensors) for name, ops in (("torch", torch), ("aotops", F))}
    models["aotops"].load_state_dict(models["torch"].state_dict())
    check(models, x, dy)
    rows = []
    for name, model in models.items():
        times = []
        for _ in range(20 if args.quick else 200):
            y = model(x)
            leaves = (x, model.weight)
            forward = seconds(lambda model=model: model(x), device)
            backward = seconds(lambda y=y, leaves=leaves: torch.autograd.grad(y, leaves, dy), device)
            times.append((forward, backward))
        forward, backward = (median(list(of_pass)) for of_pass in zip(*times, strict=True))
        rows.append({"impl": name, "device": device, "forward_us": forward, "backward_us": backward})
    return rows


def check(models: dict[str, CustomModel], x: torch.Tensor, dy: torch.Tensor) -> None:
    """Raises AssertionError unless both compute the same, forward and backward."""
    results = []
    for model in models.values():
        y = model(x)
        results.append((y, *torch.autograd.grad(y, (x, model.weight), dy)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-2, atol=1e-2)


def median(times: list[float]) -> float:
    """In microseconds, without the first tenth, which warms up."""
    times = sorted(times[len(times) // 10 :])
    return round(times[len(times) // 2] * 1e6, 1)


def measure(args: Namespace) -> Result:
    from aotops.bench.measure import Cpu

    torch.manual_seed(0)
    rows = []
    for device in args.devices.split(","):
        rows += measured(args, device)
        for row in rows[-2:]:
            forward, backward = row["forward_us"], row["backward_us"]
            print(f"{row['impl']:8} {device:5} forward {forward:9,.1f} us  backward {backward:9,.1f} us", flush=True)
    names = [torch.cuda.get_device_name()] if "cuda" in args.devices else []
    size = {"batch": args.batch, "features": args.features, "dtype": args.dtype}
    return tables.record("; ".join([*names, Cpu(True).name]), rows, **size)


def texts(result: Result) -> dict[str, str]:
    rows = [
        [row["device"], row["impl"], f"{row['forward_us']:,.1f}", f"{row['backward_us']:,.1f}"]
        for row in result["rows"]
    ]
    head = ["device", "operators", "forward, us", "backward, us"]
    size = f"Batch {result['batch']:,}, features {result['features']:,}, {result['dtype']}. "
    return {"run custom_model": size + tables.source(result), "custom_model": tables.table(head, rows, texts=2)}


if __name__ == "__main__":
    options = tables.parser(__doc__)
    options.add_argument("--batch", type=int, default=1024)
    options.add_argument("--features", type=int, default=1024)
    options.add_argument("--dtype", choices=["float16", "bfloat16", "float32", "float64"], default="float32")
    devices = "cpu,cuda" if torch.cuda.is_available() and library.has_cuda() else "cpu"
    options.add_argument("--devices", default=devices)
    args = options.parse_args()
    tables.run(args, lambda: measure(args), texts)
