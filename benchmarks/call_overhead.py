"""The host time of a call: this library's operators from PyTorch, PyTorch's own, and plain ctypes.

Tensors are 8 x 256, float32: small, so that the call itself is measured. One thread. Each figure is a median over
repeats, and every repeat runs all cases in turn, so that other load on the machine affects all of them. On a GPU the
time is host time: kernels are queued, and synchronized between repeats only. A backward is a whole
``torch.autograd.grad``, of which most is autograd's own work and the same for both.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import shlex
import statistics
import sys
import timeit
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import aotops
from aotops import call, extra, library
from aotops.bench.measure import processor
from aotops.frontends import torch as frontend
from aotops.op import Attr, Op
from aotops.ops import OPS

PASSES = ("no grad", "grad", "backward")
CALLS = 100  # per repeat: within a time slice, and fewer kernels than a GPU's queue holds, so that the host never waits
WARM_UP = 30  # calls before those, since other cases ran in between


# -------------------------------------------------------------------------------------------------------- naive ctypes


class NaiveCall:
    """An entry called through ctypes as the calling convention says, with new argument arrays in each call."""

    def __init__(self, op: Op, attrs: tuple[Attr, ...], device: str, present: tuple[bool, ...]) -> None:
        name = op.library.entry_name(op, device)
        self.entry = getattr(library.load(), name)
        self.extra = ctypes.c_void_p(library.load().aot_extra_new(extra.encode(op, attrs, present).encode()))
        library.check(getattr(library.load(), f"{name}Init")(None, None, None, self.extra))

    def __call__(self, *tensors: torch.Tensor) -> None:
        n = len(tensors)
        params = (ctypes.c_void_p * n)(*(t.data_ptr() for t in tensors))
        ndims = (ctypes.c_int * n)(*(t.dim() for t in tensors))
        shapes = [(ctypes.c_int64 * t.dim())(*t.shape) for t in tensors]
        shape_pointers = (ctypes.c_void_p * n)(*(ctypes.addressof(shape) for shape in shapes))
        dtypes = (ctypes.c_char_p * n)(*(str(t.dtype).removeprefix("torch.").encode() for t in tensors))
        stream = torch.cuda.current_stream().cuda_stream if tensors[0].is_cuda else None
        library.check(self.entry(n, params, ndims, shape_pointers, dtypes, ctypes.c_void_p(stream), self.extra))


def allocating(run: NaiveCall) -> Callable[..., torch.Tensor]:
    def function(x, *others):
        y = torch.empty_like(x)
        run(x, *others, y)
        return y

    return function


def differentiable(run: NaiveCall) -> Callable[..., torch.Tensor]:
    """``run`` in a plain autograd.Function, without a backward: only the forward is timed."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *others):
            y = torch.empty_like(x)
            run(x, *others, y)
            ctx.save_for_backward(x, *others)
            return y

    return Function.apply


# --------------------------------------------------------------------------------------------------------------- cases

OPERATORS = {
    "add": ("add(x, z)", "x, z"),
    "gelu": ("gelu(x)", "x"),
    "gelu_tanh": ("gelu(x, approximate='tanh')", "x"),
    "layer_norm": ("layer_norm(x, (256,), weight, bias, 1e-5)", "x, weight, bias"),
    "rms_norm": ("rms_norm(x, (256,), weight, 1e-5)", "x, weight"),
    "add_layer_norm": ("add_layer_norm(x, z, (256,), weight, bias, 1e-5)", "x, z, weight, bias"),
    "add_rms_norm": ("add_rms_norm(x, z, (256,), weight, 1e-5)", "x, z, weight"),
    "softmax": ("softmax(x, -1)", "x"),
    "cross_entropy": ("cross_entropy(x, target)", "x"),
    "swiglu": ("swiglu(x, z)", "x, z"),
}
"""A call, and the inputs that require a gradient."""

NAIVE = {
    "layer_norm_no_grad": "naive_layer_norm(x, weight, bias)",
    "layer_norm_grad": "differentiable_layer_norm(x, weight, bias)",
    "gelu_no_grad": "naive_gelu(x)",
    "gelu_grad": "differentiable_gelu(x)",
}


def _cases() -> dict[str, dict[str, str]]:
    """The statement to time, by case and implementation. No gradient is recorded in cases that end in _no_grad."""
    cases = {
        "builtin_3_tensors": {
            "aotops": "aot_add(a, b, out)",
            "torch": "torch_add(a, b, out=out)",
            "naive_ctypes": "naive_add(a, b, out)",
        }
    }
    for name, (statement, wanted) in OPERATORS.items():
        forward = {"aotops": f"aotops.{statement}", "torch": f"torch.{statement}"}
        backward = {impl: f"grad(y_{impl}_{name}, ({wanted},), d{name}, retain_graph=True)" for impl in forward}
        for case in (f"{name}_no_grad", f"{name}_grad"):
            cases[case] = forward | ({"naive_ctypes": NAIVE[case]} if case in NAIVE else {})
        cases[f"{name}_backward"] = backward
    return cases


CASES = _cases()


class _Torch:
    """PyTorch's functions, with the arguments of this library's."""

    add = staticmethod(torch.add)
    gelu = staticmethod(functional.gelu)
    layer_norm = staticmethod(functional.layer_norm)
    rms_norm = staticmethod(functional.rms_norm)
    softmax = staticmethod(functional.softmax)
    cross_entropy = staticmethod(functional.cross_entropy)

    @staticmethod
    def add_layer_norm(x, residual, *args):
        h = x + residual
        return functional.layer_norm(h, *args), h

    @staticmethod
    def add_rms_norm(x, residual, *args):
        h = x + residual
        return functional.rms_norm(h, *args), h

    @staticmethod
    def swiglu(gate, up):
        return functional.silu(gate) * up


def namespace(device: str) -> dict[str, Any]:
    """The names that the statements use."""
    torch.manual_seed(0)
    a, b, out = (torch.randn(8, 256, device=device) for _ in range(3))
    x, z = (torch.randn(8, 256, device=device, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(256, device=device, requires_grad=True) for _ in range(2))
    naive_layer_norm = NaiveCall(
        OPS["layer_norm"], OPS["layer_norm"].bind(None, 256)[1], device, (True, True, True, True, False)
    )
    naive_gelu = NaiveCall(OPS["gelu"], ("none",), device, (True, True))
    names = {
        "a": a, "b": b, "out": out, "x": x, "z": z, "weight": weight, "bias": bias,
        "target": torch.randint(256, (8,), device=device),
        "grad": torch.autograd.grad,
        "aotops": frontend,
        "torch": _Torch,
        "aot_add": call.tensors(OPS["add"], (1.0, None)),
        "torch_add": torch.add,
        "naive_add": NaiveCall(OPS["add"], (1.0, None), device, (True, True, True)),
        "naive_layer_norm": allocating(naive_layer_norm),
        "naive_gelu": allocating(naive_gelu),
        "differentiable_layer_norm": differentiable(naive_layer_norm),
        "differentiable_gelu": differentiable(naive_gelu),
    }  # fmt: skip
    for name, (statement, _) in OPERATORS.items():
        for impl in ("aotops", "torch"):
            y = eval(f"{impl}.{statement}", names)
            names[f"y_{impl}_{name}"] = y if isinstance(y, tuple) else (y,)
        names[f"d{name}"] = tuple(map(torch.randn_like, names[f"y_torch_{name}"]))
    return names


# --------------------------------------------------------------------------------------------------------- measurement


def measure(device: str, repeats: int) -> list[dict[str, Any]]:
    names = namespace(device)
    timers = {
        (case, impl): timeit.Timer(statement, globals=names)
        for case, statements in CASES.items()
        for impl, statement in statements.items()
    }
    times: dict[tuple[str, str], list[float]] = {key: [] for key in timers}
    for _ in range(repeats):
        for (case, impl), timer in timers.items():
            with torch.set_grad_enabled(not case.endswith("_no_grad")):
                timer.timeit(WARM_UP)
                seconds = timer.timeit(CALLS)
            if device == "cuda":
                torch.cuda.synchronize()
            times[case, impl].append(seconds / CALLS)
    return [
        {"case": case, "impl": impl, "ns": round(statistics.median(seconds) * 1e9, 1)}
        for (case, impl), seconds in times.items()
    ]


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return processor()


def print_table(result: dict[str, Any]) -> None:
    ns = {(row["case"], row["impl"]): row["ns"] for row in result["rows"]}

    def beside(case: str) -> str:
        ours, torchs = ns[case, "aotops"], ns[case, "torch"]
        return f"{ours:10,.0f}{torchs:9,.0f}{ours / torchs:6.2f}"

    print(f"nanoseconds a call, 8 rows x 256, float32, one thread: {result['device']}")
    print(f"{'':18}" + "".join(f"{name:>10}{'torch':>9}{'ratio':>6}" for name in PASSES))
    for name in OPERATORS:
        print(f"{name:18}" + "".join(beside(f"{name}_{p.replace(' ', '_')}") for p in PASSES))
    print(f"\n{'':18}{'aotops':>10}{'torch':>9}{'ratio':>6}{'naive ctypes':>14}")
    for case, impl in ns:
        if impl == "naive_ctypes":
            print(f"{case:18}{beside(case)}{ns[case, impl]:14,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=301, help="default: %(default)s")
    args = parser.parse_args()

    torch.set_num_threads(1)
    result = {
        "device": device_name(args.device),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks.call_overhead", *sys.argv[1:]]),
        "versions": {"aotops": aotops.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "rows": measure(args.device, args.repeats),
    }
    print_table(result)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
