"""The table of cases in MindSpore's graph mode, forward and gradient, where MindSpore has no GPU kernels of its own.

    python tests/programs/mindspore_graph.py [--device GPU|CPU] [--dtypes float32,...] [--ops add,...]

A script by itself, which needs NumPy and MindSpore: whatever is not one of our operators happens on the host, in NumPy.
Prints a line a case; exits with 1 where one fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any
from unittest import SkipTest

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from aotops.ops import OPS
from aotops.testing import cases
from aotops.testing.cases import CASES, DTYPES
from aotops.testing.frameworks import MindSporeGraph


class Gradients(nn.Cell):
    """Gradients of the tensors at the given places: for others MindSpore would make zeros, with a kernel."""

    def __init__(self, function, places):
        super().__init__()
        self.function, self.places = function, places
        self.grad = ops.GradOperation(get_all=True, sens_param=True)

    def construct(self, dys, *tensors):
        grads = self.grad(self.function)(*tensors, dys)
        return [grads[i] for i in self.places]


class OnHost(MindSporeGraph):
    """The adapter of the tests, which calls MindSpore for our operators alone."""

    def __init__(self, device: str) -> None:
        self.bare = device == "GPU"
        ms.set_context(device_target=device)

    def unable(self, name, shapes):
        if self.bare and OPS[name].broadcast and len(set(shapes)) > 1:
            return "MindSpore broadcasts with a kernel of its own"
        return super().unable(name, shapes)

    def make(self, array, dtype, device):
        if dtype != "bfloat16":
            return ms.Tensor(array.astype(dtype))
        bits = (np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return ms.Tensor(ms.Tensor.convert_bytes_to_tensor(bits.tobytes(), array.shape, ms.bfloat16))

    def numpy(self, tensor):
        if tensor.dtype != ms.bfloat16:
            return tensor.asnumpy().astype(np.float64)
        bits = np.frombuffer(tensor.get_bytes(), np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64).reshape(tensor.shape)

    def gradients(self, name, inputs, attrs, dys):
        self._enter()
        function, tensors = self._function(name, inputs, attrs)
        slots = [slot for slot, t in inputs.items() if t is not None]
        floating = [i for i, t in enumerate(tensors) if "Float" in str(t.dtype)]
        grads = Gradients(function, floating)(dys if len(dys) > 1 else dys[0], *tensors)
        return {slots[i]: grad for i, grad in zip(floating, grads, strict=True)}

    def open_forward(self, name, inputs, attrs, shapes):
        """A function of inputs whose axes have the lengths of ``shapes``, None where one is not known."""
        self._enter()
        cell, _ = self._function(name, inputs, attrs)
        given = [slot for slot, t in inputs.items() if t is not None]
        cell.set_inputs(*(ms.Tensor(shape=shapes[slot], dtype=inputs[slot].dtype) for slot in given))
        return lambda inputs: cell(*(inputs[slot] for slot in given))


def made(framework: OnHost, name: str, i: int, dtype: str) -> dict[str, Any]:
    arrays, dtypes = cases.inputs(name, i, dtype), cases.dtypes(name, i, dtype)
    return {
        s: None if x is None else framework.make(x, cases.dtype_of(x, dtypes.get(s, dtype)), "")
        for s, x in arrays.items()
    }


def shapes_of(name: str, i: int) -> list[tuple[int, ...]]:
    return [shape for shape in CASES[name].cases[i].shapes.values() if shape is not None]


def check(framework: OnHost, name: str, i: int, dtype: str) -> None:
    if reason := framework.unable(name, shapes_of(name, i)):
        raise SkipTest(reason)
    inputs, attrs = made(framework, name, i, dtype), CASES[name].cases[i].attrs
    check_results(framework, framework.results(name, inputs, attrs), name, i, dtype)
    if framework.bare and OPS[name].backward.factors(tuple(attrs.get(a, 1) for a in OPS[name].attrs)):
        return  # MindSpore's own kernels multiply the gradient
    dtypes, given = cases.dtypes(name, i, dtype), cases.output_gradients(name, i, dtype)
    dys = tuple(framework.make(dy, dtypes[y], "") for y, dy in zip(OPS[name].outputs, given, strict=True))
    grads = framework.gradients(name, inputs, attrs, dys)
    found = {slot: framework.dtype(g) for slot, g in grads.items()}
    assert found == {slot: dtypes[slot] for slot in grads}, "dtypes of gradients"
    cases.assert_gradients({slot: framework.numpy(g) for slot, g in grads.items()}, name, i, dtype)


def check_results(framework: OnHost, results: tuple[Any, ...], name: str, i: int, dtype: str) -> None:
    assert {framework.dtype(y) for y in results} == {dtype}, "dtypes of results"
    cases.assert_values(tuple(map(framework.numpy, results)), name, i, dtype)


def groups(name: str) -> list[list[int]]:
    """Cases that only their shapes tell apart. Two unknown lengths are taken to be equal, not one to be broadcast."""
    alike: dict[str, list[int]] = {}
    for i, case in enumerate(CASES[name].cases):
        ranks = {slot: None if shape is None else len(shape) for slot, shape in case.shapes.items()}
        if not OPS[name].broadcast or len(set(shapes_of(name, i))) == 1:
            alike.setdefault(f"{ranks} {case.attrs}", []).append(i)
    return [group for group in alike.values() if len(group) > 1]


def common(shapes: list[tuple[int, ...]]) -> list[int | None]:
    return [lengths[0] if len(set(lengths)) == 1 else None for lengths in zip(*shapes, strict=True)]


def check_group(framework: OnHost, name: str, group: list[int], dtype: str) -> None:
    """By one graph, to which the lengths that differ are unknown. Forward only: the gradient of a result of unknown
    shape begins with a kernel of MindSpore's own."""
    members = [CASES[name].cases[i] for i in group]
    lengths = {slot: [member.shapes[slot] for member in members] for slot in members[0].shapes}
    shapes = {slot: None if None in of else common(of) for slot, of in lengths.items()}
    forward = framework.open_forward(name, made(framework, name, group[0], dtype), members[0].attrs, shapes)
    for i in group:
        results = forward(made(framework, name, i, dtype))
        check_results(framework, results if isinstance(results, tuple) else (results,), name, i, dtype)


def checks(framework: OnHost, name: str, dtype: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Each is compiled: not every case is tried in every dtype."""
    for i, case in enumerate(CASES[name].cases):
        if dtype == "float32" or i == cases.first_case(name):
            yield str(case), partial(check, framework, name, i, dtype)
    for group in groups(name):
        yield f"of unknown shape, {len(group)} cases", partial(check_group, framework, name, group, dtype)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("GPU", "CPU"), default="GPU")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--ops", default=",".join(CASES))
    args = parser.parse_args()

    framework, failures = OnHost(args.device), 0
    for dtype, name in product(args.dtypes.split(","), args.ops.split(",")):
        for title, run in checks(framework, name, dtype):
            said, more = "ok", ""
            try:
                run()
            except SkipTest as reason:
                said, more = "skip", f": {reason}"
            except Exception as error:
                failures += 1
                said, more = "FAIL", f": {type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
            print(f"{said:4} {dtype:8} {name} {title}{more}", flush=True)
    print(f"{args.device}: {failures} failed" if failures else f"{args.device}: all passed")
    return failures > 0


if __name__ == "__main__":
    sys.exit(main())
