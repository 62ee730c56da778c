"""Times the LLTM of PyTorch's tutorial "Custom C++ and CUDA Extensions" as the tutorial does.

It takes the wall time of a forward and of a backward pass, until the device has finished, of three implementations:
Python on torch's operators, the same with torch.compile, and the module of aotops.

``python examples/lltm.py [--batch-size 16] [--features 32] [--state-size 128] [--runs 1000] [--dtype float32]
[--devices cpu,cuda]``
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F

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


MODULES = {"Python": PythonLLTM, "torch.compile": compiled, "aotops": LLTM}


def measure(make, device: str, options) -> tuple[float, float]:
    """The median time of a forward and of a backward pass, in microseconds."""
    tensors = {"device": device, "dtype": getattr(torch, options.dtype)}
    x = torch.randn(options.batch_size, options.features, **tensors)
    h, c = (torch.randn(options.batch_size, options.state_size, **tensors) for _ in range(2))
    rnn = make(options.features, options.state_size, **tensors)

    def passed(run):
        start = time.perf_counter()
        result = run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
        return result

    times: list[float] = []
    for _ in range(options.runs):
        rnn.zero_grad()
        new_h, new_cell = passed(lambda: rnn(x, (h, c)))
        passed(lambda h=new_h, c=new_cell: (h.sum() + c.sum()).backward())
    warm = len(times) // 10 * 2
    return tuple(sorted(times[first::2])[len(times[first::2]) // 2] for first in (warm, warm + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--features", type=int, default=32)
    parser.add_argument("--state-size", type=int, default=128)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32", "float64"], default="float32")
    devices = "cpu,cuda" if torch.cuda.is_available() and library.has_cuda() else "cpu"
    parser.add_argument("--devices", default=devices)
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"batch {options.batch_size}, features {options.features}, state {options.state_size}, {options.dtype}")
    print(f"{'us':14} {'device':6} {'forward':>9} {'backward':>9}")
    for device in options.devices.split(","):
        for name, make in MODULES.items():
            forward, backward = measure(make, device, options)
            print(f"{name:14} {device:6} {forward:9.1f} {backward:9.1f}", flush=True)


if __name__ == "__main__":
    main()
