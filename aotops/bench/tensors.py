"""Inputs, and functions of them, in each framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from .baselines import Impl, Unavailable
from .cases import Case
from .work import Shape

Call = Callable[[], Any]

REPEATED = 65521
"""Numbers that are drawn for a tensor on the CPU; a prime, so that its rows differ."""


class Framework:
    GRADIENTS = True
    """Whether it has backward passes."""

    def __init__(self, device: str) -> None:
        self.device = device

    def inputs(self, case: Case) -> list[Any]:
        return [self._input(case, letter, shape) for letter, shape in case.inputs]

    def _input(self, case: Case, letter: str, shape: Shape) -> Any:
        if letter == "t":
            return self.classes(shape, case.work.n_classes(case.shape))
        if letter == "n":
            return self.classes(shape, 1) + case.work.n_classes(case.shape)
        tensor = self.normal(shape, case.dtype, _deviation(letter, shape))
        return self.constant(tensor) if letter in case.work.CONSTANTS else tensor

    def constant(self, tensor: Any) -> Any:
        """The tensor, without a gradient."""
        return tensor

    def normal(self, shape: Shape, dtype: str, deviation: float) -> Any:
        raise NotImplementedError

    def classes(self, shape: Shape, n: int) -> Any:
        raise NotImplementedError

    def call(self, impl: Impl, case: Case, inputs: list[Any]) -> Call:
        """The pass of the case on these inputs, with nothing else to do."""
        inputs = impl.adapt(case, inputs)
        function = impl.function(case)
        return self.backward(function, inputs) if case.pass_ == "backward" else partial(function, *inputs)

    def backward(self, function: Callable[..., Any], inputs: list[Any]) -> Call:
        raise Unavailable("no gradients")

    def recording(self, gradients: bool) -> AbstractContextManager[Any]:
        """A context in which calls record gradients, or do not."""
        return nullcontext()

    def settings(self, case: Case) -> AbstractContextManager[Any]:
        """A context with the framework's switches set for the case."""
        return nullcontext()

    def synchronize(self) -> None:
        """Waits for the calls."""


def _deviation(letter: str, shape: Shape) -> float:
    """For weights, so that products are near 1. Activations would else saturate, which takes less power."""
    return math.prod(shape[1:]) ** -0.5 if letter == "w" else 1.0


class Torch(Framework):
    def normal(self, shape: Shape, dtype: str, deviation: float) -> Any:
        import torch

        tensor = torch.empty(shape, device=self.device, dtype=getattr(torch, dtype))
        return _fill(tensor, deviation).requires_grad_()

    def constant(self, tensor: Any) -> Any:
        return tensor.detach()

    def classes(self, shape: Shape, n: int) -> Any:
        import torch

        return torch.randint(n, shape, device=self.device)

    def backward(self, function: Callable[..., Any], inputs: list[Any]) -> Call:
        """A function that computes all gradients of one forward by autograd."""
        import torch

        with torch.enable_grad():
            outputs = function(*inputs)
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        wanted = [t for t in inputs if t.requires_grad]
        gradients = [torch.ones_like(y) if y.dim() == 0 else _fill(torch.empty_like(y)) for y in outputs]
        return partial(torch.autograd.grad, outputs, wanted, gradients, retain_graph=True)

    def recording(self, gradients: bool) -> AbstractContextManager[Any]:
        import torch

        return torch.set_grad_enabled(gradients)

    @contextmanager
    def settings(self, case: Case) -> Iterator[None]:
        """TF32 if the case says so; cuDNN's benchmark mode."""
        from torch.backends import cuda, cudnn

        wanted = [(cuda.matmul, "allow_tf32", case.work.tf32), (cudnn, "allow_tf32", case.work.tf32)]
        wanted.append((cudnn, "benchmark", True))
        before = [(place, name, getattr(place, name)) for place, name, _ in wanted]
        try:
            for place, name, value in wanted:
                setattr(place, name, value)
            yield
        finally:
            for place, name, value in before:
                setattr(place, name, value)

    def synchronize(self) -> None:
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()


def _fill(tensor: Any, deviation: float = 1.0) -> Any:
    """With normal numbers. On a CPU, which copies them faster than it draws them, the first repeat: drawing them all
    took 12 of the 20 s of 36 cases (docs/lab_notes.md)."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return tensor.normal_(0, deviation)
    flat = tensor.detach().view(-1)
    done = min(REPEATED, len(flat))
    flat[:done].normal_(0, deviation)
    while done < len(flat):
        more = min(done, len(flat) - done)
        flat[done : done + more].copy_(flat[:more])
        done += more
    return tensor


class NumPy(Framework):
    GRADIENTS = False

    def normal(self, shape: Shape, dtype: str, deviation: float) -> Any:
        import numpy as np

        from ..testing.dtypes import numpy_dtype

        array = np.random.default_rng(math.prod(shape)).standard_normal(shape, np.float32) * np.float32(deviation)
        return array.astype(numpy_dtype(dtype), copy=False)

    def classes(self, shape: Shape, n: int) -> Any:
        import numpy as np

        return np.random.default_rng(n).integers(0, n, shape)


class MindSpore(NumPy):
    def call(self, impl: Impl, case: Case, inputs: list[Any]) -> Call:
        """On a CPU too, a call may return before it is complete."""
        call = super().call(impl, case, inputs)

        def waiting() -> None:
            call()
            self.synchronize()

        return waiting

    def normal(self, shape: Shape, dtype: str, deviation: float) -> Any:
        import mindspore as ms

        return ms.Tensor(super().normal(shape, "float32", deviation)).astype(getattr(ms, dtype))

    def classes(self, shape: Shape, n: int) -> Any:
        import mindspore as ms

        return ms.Tensor(super().classes(shape, n))

    def synchronize(self) -> None:
        # mindspore.runtime.synchronize fails on a CPU
        try:
            from mindspore.graph.api import _pynative_executor
        except ImportError:  # before 2.9
            from mindspore.common.api import _pynative_executor
        _pynative_executor.sync()


FRAMEWORKS: dict[str, type[Framework]] = {"torch": Torch, "numpy": NumPy, "mindspore": MindSpore}
