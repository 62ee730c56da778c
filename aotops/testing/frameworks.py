"""The frameworks in the same words for each, for tests: one adapter a frontend.

``AOTOPS_TEST_FRONTENDS`` names the frontends under test, separated by commas; without it all are tested whose framework
is installed.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from types import SimpleNamespace
from typing import Any

import numpy as np

from aotops import library as _library
from aotops.frontends import FRONTENDS
from aotops.library import Library
from aotops.ops import BUILTIN
from aotops.spec import DEVICES, dtype_name

from .dtypes import OF_ML_DTYPES, ml_dtypes, numpy_dtype, plain

VARIABLE = "AOTOPS_TEST_FRONTENDS"


def requested() -> list[str]:
    """The frontends under test. Raises ValueError for a name that is none."""
    given = os.environ.get(VARIABLE)
    if given is None:
        return [name for name in FRONTENDS if find_spec(name)]
    names = [name.strip() for name in given.split(",") if name.strip()]
    unknown = set(names) - set(FRONTENDS)
    if unknown or not names:
        raise ValueError(f"{VARIABLE} is {given!r}, expected some of {', '.join(FRONTENDS)}")
    return names


def race(work: Callable[[int], int], n: int = 4) -> int:
    """Runs work(i) in n threads at once that switch as often as they can; the sum of what went wrong in each."""
    start = threading.Barrier(n)

    def begun(i: int) -> int:
        start.wait()
        return work(i)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(n) as threads:
            return sum(threads.map(begun, range(n)))
    finally:
        sys.setswitchinterval(interval)


class Framework:
    """Arrays go in as float64 NumPy arrays that the dtype can hold, or in a dtype of their own. They come out as
    float64, or as the integers, bools or complex numbers that they are."""

    name: str
    frontend: str
    devices: tuple[str, ...] = ("cpu",)
    strides = True
    """Whether an array may have strides."""
    compiles = False
    """Whether each call is compiled, which takes about a second: test_frontends.py says which cases are."""

    functional = False
    """Whether its arrays do not change: what an operator writes to its inputs are further results."""
    slow = False
    """Whether a call of a new shape takes tens of milliseconds."""

    def __init__(self, library: Library = BUILTIN) -> None:
        self.library, self.ops = library, library.ops

    @cached_property
    def module(self) -> Any:
        """Whose functions are the library's operators."""
        frontend = import_module(f"aotops.frontends.{self.frontend}")
        return frontend if self.library is BUILTIN else frontend.of(self.library)

    def missing(self, device: str) -> str | None:
        """Why the device cannot be tested here."""
        if not find_spec(self.frontend):
            return f"{self.frontend} is not installed"
        if device == "cpu":
            return None
        if not self.has_gpu():
            return f"{self.name} finds no GPU"
        return None if _library.has_cuda() else "the library was built without CUDA"

    def has_gpu(self) -> bool:
        return False

    def has_dtype(self, dtype: str) -> bool:
        return True

    def free_memory(self, device: str) -> int:
        """Bytes."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") if device == "cpu" else 0

    def tiled(self, tensor: Any, times: int) -> Any:
        """Copies of a tensor of one axis, one after the other."""
        raise NotImplementedError

    def unable(self, name: str, shapes: list[tuple[int, ...]]) -> str | None:
        """Why the framework itself cannot do this."""
        return None

    def make(self, array: np.ndarray, dtype: str, device: str) -> Any:
        raise NotImplementedError

    def numpy(self, tensor: Any) -> np.ndarray:
        raise NotImplementedError

    def dtype(self, tensor: Any) -> str:
        return dtype_name(tensor.dtype)

    def forward(self, name: str, inputs: dict[str, Any], attrs: dict[str, Any]) -> Any:
        """The result, a tuple where there are several."""
        return getattr(self.module, name)(**inputs, **attrs)

    def results(self, name: str, inputs: dict[str, Any], attrs: dict[str, Any]) -> tuple[Any, ...]:
        results = self.forward(name, inputs, attrs)
        assert isinstance(results, tuple) == (len(self.ops[name].outputs) > 1)
        return results if isinstance(results, tuple) else (results,)

    def gradients(self, name: str, inputs: dict[str, Any], attrs: dict[str, Any], dys: tuple[Any, ...]):
        """By input; None, or nothing, where the input is None or has no gradient. ``dys``: one for each result, None
        where it has none."""
        raise NotImplementedError


def _one_or_all(results: tuple[Any, ...]) -> Any:
    return results if len(results) > 1 else results[0]


def _widest(array: np.ndarray) -> np.ndarray:
    """bfloat16 is of no kind of NumPy's."""
    return array if array.dtype.kind in "biuc" else array.astype(np.float64)


class _Arrays(Framework):
    xp: Any

    def has_dtype(self, dtype):
        return dtype not in OF_ML_DTYPES or ml_dtypes is not None

    def make(self, array, dtype, device):
        return self.xp.asarray(array.astype(numpy_dtype(dtype)))

    def tiled(self, tensor, times):
        return self.xp.tile(tensor, times)

    def gradients(self, name, inputs, attrs, dys):
        if not self.ops[name].has_gradient:
            return {}
        results = getattr(self.module, f"{name}_backward")(_one_or_all(dys), **inputs, **attrs)
        backward = self.ops[name].backward
        slots = [slot for slot in self.ops[name].inputs if backward is None or f"d{slot}" in backward.outputs]
        return dict(zip(slots, results if len(slots) > 1 else (results,), strict=True))


class NumPy(_Arrays):
    name = frontend = "numpy"
    xp = np

    def numpy(self, tensor):
        return _widest(tensor)


class CuPy(_Arrays):
    name = frontend = "cupy"
    devices = ("cuda",)

    @property
    def xp(self):
        return import_module("cupy")

    def has_gpu(self):
        return self.xp.is_available()

    def numpy(self, tensor):
        return _widest(tensor.get())


class Torch(Framework):
    name = frontend = "torch"
    devices = DEVICES

    @property
    def torch(self):
        return import_module("torch")

    def has_gpu(self):
        return self.torch.cuda.is_available()

    def make(self, array, dtype, device):
        return self.torch.tensor(plain(array), dtype=getattr(self.torch, dtype), device=device)

    def free_memory(self, device):
        return self.torch.cuda.mem_get_info()[0] if device == "cuda" else super().free_memory(device)

    def is_differentiable(self, tensor):
        return tensor.is_floating_point() and tensor.element_size() > 1

    def tiled(self, tensor, times):
        return tensor.repeat(times)

    def numpy(self, tensor):
        floating = tensor.is_floating_point()
        return tensor.detach().to("cpu", self.torch.float64 if floating else tensor.dtype).numpy()

    def gradients(self, name, inputs, attrs, dys):
        if not self.ops[name].has_gradient:
            return {}
        constants = self.ops[name].constants
        leaves = {
            slot: None if t is None else t.clone().requires_grad_(self.is_differentiable(t) and slot not in constants)
            for slot, t in inputs.items()
        }
        pairs = zip(self.results(name, leaves, attrs), dys, strict=True)
        self.torch.autograd.backward(*zip(*((y, dy) for y, dy in pairs if dy is not None), strict=True))
        return {slot: None if t is None else t.grad for slot, t in leaves.items()}


class Jax(Framework):
    name = frontend = "jax"
    devices = DEVICES
    strides = False
    functional = slow = True

    @cached_property
    def jax(self):
        jax = import_module("jax")
        jax.config.update("jax_enable_x64", True)
        return jax

    def has_gpu(self):
        return any(d.platform == "gpu" for d in self.jax.devices())

    def make(self, array, dtype, device):
        platform = {"cpu": "cpu", "cuda": "gpu"}[device]
        return self.jax.device_put(array.astype(numpy_dtype(dtype)), self.jax.devices(platform)[0])

    def numpy(self, tensor):
        return _widest(np.asarray(tensor))

    def gradients(self, name, inputs, attrs, dys):
        if not self.ops[name].has_gradient:
            return {}

        def function(given):
            return self.results(name, inputs | given, attrs)

        def is_a(x, kind):
            return self.jax.numpy.issubdtype(x.dtype, kind)

        floating, inexact = self.jax.numpy.floating, self.jax.numpy.inexact
        given = {s: x for s, x in inputs.items() if x is not None and is_a(x, floating) and x.dtype.itemsize > 1}
        given = {slot: x for slot, x in given.items() if slot not in self.ops[name].constants}
        results, derivative = self.jax.vjp(function, given)
        none = self.jax.dtypes.float0  # that of the gradient of integers and bools
        pairs = zip(results, dys, strict=True)
        starts = (dy if dy is not None else np.zeros(y.shape, y.dtype if is_a(y, inexact) else none) for y, dy in pairs)
        found = derivative(tuple(starts))[0]
        return {slot: found.get(slot) for slot in inputs}


class MindSpore(Framework):
    """PyNative mode."""

    name = frontend = "mindspore"
    strides = False
    graph = False

    @property
    def ms(self):
        return import_module("mindspore")

    def unable(self, name, shapes):
        if self.ops[name].broadcast and len(set(shapes)) > 1 and 0 in np.broadcast_shapes(*shapes):
            return "MindSpore does not broadcast to an empty shape, and its gradient of that is uninitialised memory"
        return None

    def has_dtype(self, dtype):
        return not dtype.startswith("float8")  # it makes no such tensor of an array

    def make(self, array, dtype, device):
        return self.ms.Tensor(array, getattr(self.ms, dtype))

    def numpy(self, tensor):
        return tensor.astype(self.ms.float64).asnumpy() if "Float" in str(tensor.dtype) else tensor.asnumpy()

    def forward(self, name, inputs, attrs):
        self._enter()
        function, tensors = self._function(name, inputs, attrs)
        return function(*tensors)

    def gradients(self, name, inputs, attrs, dys):
        if not self.ops[name].has_gradient:
            return {}
        self._enter()
        function, tensors = self._function(name, inputs, attrs)
        sens = self._sens(function, tensors, dys)
        grads = self.ms.ops.GradOperation(get_all=True, sens_param=True)(function)(*tensors, _one_or_all(sens))
        return self._of_floating(name, inputs, grads)

    def _sens(self, function, tensors, dys):
        """The gradients to start from: MindSpore wants zeros for a result of integers or bools."""
        if all(dy is not None for dy in dys):
            return dys
        results = function(*tensors)
        results = results if isinstance(results, tuple) else (results,)
        return tuple(self.ms.ops.zeros_like(y) if dy is None else dy for y, dy in zip(results, dys, strict=True))

    def _of_floating(self, name, inputs, grads):
        """The gradients by input. Those of integers and constants are zeros, and left out."""
        given = [slot for slot in signature(self.ops[name].bind).parameters if inputs.get(slot) is not None]
        found = dict(zip(given, grads, strict=True))
        none = {s for s, t in inputs.items() if t is None or "Float" not in str(t.dtype)} | self.ops[name].constants
        return {slot: None if slot in none else found[slot] for slot in inputs}

    def _enter(self):
        self.ms.set_context(mode=self.ms.GRAPH_MODE if self.graph else self.ms.PYNATIVE_MODE)

    def _function(self, name, inputs, attrs):
        """A Cell of the tensors given, and those: graph mode wants tensors as parameters, not keywords."""
        arguments = signature(self.ops[name].bind).bind(**inputs, **attrs)
        arguments.apply_defaults()
        places = [i for i, slot in enumerate(arguments.arguments) if inputs.get(slot) is not None]
        tensors = [arguments.args[i] for i in places]
        rest = [None if i in places else value for i, value in enumerate(arguments.args)]
        return _mindspore_cells().Call(getattr(self.module, name), rest, places), tensors


class MindSporeGraph(MindSpore):
    name = "mindspore-graph"
    graph = compiles = True

    def results_and_gradients(self, name, inputs, attrs, dys):
        """``results`` and ``gradients`` of one graph."""
        if not self.ops[name].has_gradient:
            return self.results(name, inputs, attrs), {}
        self._enter()
        function, tensors = self._function(name, inputs, attrs)
        sens = self._sens(function, tensors, dys)
        results, grads = _mindspore_cells().Differentiated(function)(_one_or_all(sens), *tensors)
        return results if isinstance(results, tuple) else (results,), self._of_floating(name, inputs, grads)


@cache
def _mindspore_cells() -> SimpleNamespace:
    from mindspore import nn, ops

    class Call(nn.Cell):
        """A function of the tensors whose places among its arguments are given."""

        def __init__(self, function, arguments, places):
            super().__init__()
            self.function, self.arguments, self.places = function, tuple(arguments), tuple(places)

        def construct(self, *tensors):
            arguments = list(self.arguments)
            for place, tensor in zip(self.places, tensors):  # noqa: B905  graph mode knows no strict
                arguments[place] = tensor
            return self.function(*arguments)

    class Differentiated(nn.Cell):
        """The results of a function, and the gradients of its tensors."""

        def __init__(self, function):
            super().__init__()
            self.function, self.gradient = function, ops.GradOperation(get_all=True, sens_param=True)

        def construct(self, dys, *tensors):
            return self.function(*tensors), self.gradient(self.function)(*tensors, dys)

    return SimpleNamespace(Call=Call, Differentiated=Differentiated)


ADAPTERS: dict[str, tuple[type[Framework], ...]] = {
    "numpy": (NumPy,),
    "torch": (Torch,),
    "jax": (Jax,),
    "cupy": (CuPy,),
    "mindspore": (MindSpore, MindSporeGraph),
}


@cache
def adapters(name: str, library: Library = BUILTIN) -> tuple[Framework, ...]:
    """The adapters of a frontend, for the operators of a library."""
    return tuple(adapter(library) for adapter in ADAPTERS[name])


def frameworks() -> list[Framework]:
    """The adapters of the frontends under test."""
    return [adapter for name in requested() for adapter in adapters(name)]
