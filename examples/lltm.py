"""Times the LLTM of PyTorch's tutorial "Custom C++ and CUDA Extensions" as the tutorial does.

    python examples/lltm.py [--batch-size 16] [--features 32] [--state-size 128] [--runs 1000] [--dtype float32]
                            [--devices cpu,cuda] [--implementations Python,torch.compile,ATen,aotops]

It takes the wall time of a forward and of a backward pass, until the device has finished, of four implementations:
Python on torch's operators, the same with torch.compile, ATen's operators in C++, which is the tutorial's C++ extension
(lltm_aten.cpp, compiled at run time, which needs ninja), and the module of aotops. Their results are compared first.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import tables
import torch
import torch.nn.functional as F
from tables import Result, Row

from aotops import library
from aotops.frontends.torch import LLTM


class PythonLLTM(LLTM):
    """The tutorial's forward, with the same parameters."""

    def forward(self, input, state):
        old_h, old_cell = state
        gate_weights = F.linear(torch.cat([old_h, input], dim=1), self.weights, self.bias)
        gates = gate_weights.chunk(3, dim=1)
        input_gate, output_gate, candidate_cell = torch.sigmoid(gates[0]), torch.sigmoid(gates[1]), F.elu(gates[2])
        new_cell = old_cell + candidate_cell * input_gate
        return torch.tanh(new_cell) * output_gate, new_cell


def compiled(*args, **kwargs):
    return torch.compile(PythonLLTM(*args, **kwargs))


@cache
def extension() -> Any:
    from torch.utils.cpp_extension import load_inline

    source = Path(__file__).with_name("lltm_aten.cpp").read_text()
    return load_inline("lltm_aten", source, functions=["lltm_forward", "lltm_backward"], extra_cflags=["-O3"])


class AtenFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weights, bias, old_h, old_cell):
        new_h, new_cell, *saved = extension().lltm_forward(input, weights, bias, old_h, old_cell)
        ctx.save_for_backward(weights, *saved)
        return new_h, new_cell

    @staticmethod
    def backward(ctx, dh, dcell):
        return tuple(extension().lltm_backward(dh.contiguous(), dcell.contiguous(), *ctx.saved_tensors))


class AtenLLTM(LLTM):
    """The tutorial's C++ extension."""

    def forward(self, input, state):
        return AtenFunction.apply(input, self.weights, self.bias, *state)


MODULES = {"Python": PythonLLTM, "torch.compile": compiled, "ATen": AtenLLTM, "aotops": LLTM}


# -------------------------------------------------------------------------------------------------------- measurement


def inputs(device: str, options: Namespace) -> list[torch.Tensor]:
    widths = (options.features, options.state_size, options.state_size)
    tensors = {"device": device, "dtype": getattr(torch, options.dtype)}
    return [torch.randn(options.batch_size, width, **tensors) for width in widths]


def passes(rnn: torch.nn.Module, x, h, c) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    def forward():
        return rnn(x, (h, c))

    def backward(result):
        new_h, new_cell = result
        (new_h.sum() + new_cell.sum()).backward()

    return forward, backward


def results(rnn: torch.nn.Module, x, h, c) -> list[torch.Tensor]:
    """The outputs and every gradient."""
    leaves = [t.detach().requires_grad_() for t in (x, h, c)]
    forward, backward = passes(rnn, *leaves)
    rnn.zero_grad()
    outputs = forward()
    backward(outputs)
    return [t.detach() for t in outputs] + [t.grad for t in (*leaves, *rnn.parameters())]


def measure(rnn: torch.nn.Module, device: str, options: Namespace, tensors) -> tuple[float, float]:
    """The median time of a forward and of a backward pass, in microseconds."""
    forward, backward = passes(rnn, *tensors)

    def passed(run, *arguments):
        start = time.perf_counter()
        result = run(*arguments)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
        return result

    times: list[float] = []
    for _ in range(options.runs):
        rnn.zero_grad()
        passed(backward, passed(forward))
    warm = len(times) // 10 * 2
    return tuple(sorted(times[first::2])[len(times[first::2]) // 2] for first in (warm, warm + 1))


def measure_all(options: Namespace) -> Result:
    from aotops.bench.measure import Cpu

    torch.manual_seed(0)
    print(f"batch {options.batch_size}, features {options.features}, state {options.state_size}, {options.dtype}")
    print(f"{'us':14} {'device':6} {'forward':>9} {'backward':>9}")
    rows: list[Row] = []
    for device in options.devices.split(","):
        arguments = {"device": device, "dtype": getattr(torch, options.dtype)}
        python = PythonLLTM(options.features, options.state_size, **arguments)
        tensors = inputs(device, options)
        expected = results(python, *tensors)
        for name in options.implementations:
            rnn = MODULES[name](options.features, options.state_size, **arguments)
            for parameter, value in zip(rnn.parameters(), python.parameters(), strict=True):
                parameter.data.copy_(value)
            torch.testing.assert_close(results(rnn, *tensors), expected, **tolerance(options))
            forward, backward = measure(rnn, device, options, tensors)
            rows.append(
                {"impl": name, "device": device, "forward_us": round(forward, 1), "backward_us": round(backward, 1)}
            )
            print(f"{name:14} {device:6} {forward:9.1f} {backward:9.1f}", flush=True)
    names = [torch.cuda.get_device_name()] if "cuda" in options.devices else []
    size = {key: getattr(options, key) for key in ("batch_size", "features", "state_size", "dtype")}
    return tables.record("; ".join([*names, Cpu(True).name]), rows, **size)


def tolerance(options: Namespace) -> dict[str, float]:
    """Tolerances of sums over the batch, in the weights' gradient, and over the features."""
    if options.dtype in ("float16", "bfloat16"):
        return {"rtol": 5e-2, "atol": 5e-2 * options.batch_size**0.5}
    return {"rtol": 1e-3, "atol": 1e-4 * options.batch_size**0.5}


# --------------------------------------------------------------------------------------------------------------- report

LABELS = {"ATen": "ATen in C++"}


def texts(result: Result) -> dict[str, str]:
    size = f"{result['batch_size']} {result['features']} {result['state_size']}"
    figures: dict[str, dict[str, Row]] = {}
    for row in result["rows"]:
        figures.setdefault(row["impl"], {})[row["device"]] = row
    devices = list(dict.fromkeys(row["device"] for row in result["rows"]))
    passed = [(device, key) for device in devices for key in ("forward_us", "backward_us")]
    first = next(iter(figures.values()))
    lines = [
        [LABELS.get(name, name)]
        + [f"{rows[device][key]:,.1f} ({first[device][key] / rows[device][key]:.1f}x)" for device, key in passed]
        for name, rows in figures.items()
    ]
    head = ["us (times faster than the first)", *(f"{device} {key.removesuffix('_us')}" for device, key in passed)]
    return {f"run lltm {size}": tables.source(result), f"lltm {size}": tables.table(head, lines)}


def main() -> None:
    parser = tables.parser(__doc__)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--features", type=int, default=32)
    parser.add_argument("--state-size", type=int, default=128)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32", "float64"], default="float32")
    devices = "cpu,cuda" if torch.cuda.is_available() and library.has_cuda() else "cpu"
    parser.add_argument("--devices", default=devices)
    parser.add_argument("--implementations", type=lambda text: text.split(","), default=list(MODULES))
    options = parser.parse_args()
    if unknown := set(options.implementations) - set(MODULES):
        parser.error(f"--implementations has {', '.join(unknown)}, expected some of {', '.join(MODULES)}")
    if options.quick:
        options.runs = min(options.runs, 20)
    tables.run(options, lambda: measure_all(options), texts)


if __name__ == "__main__":
    main()
