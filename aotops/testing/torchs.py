"""The checks of torch itself: opcheck, gradcheck, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from aotops.formula import is_bilinear
from aotops.op import Op

from .frameworks import Torch
from .report import UNAVAILABLE, Item
from .search import searched
from .subject import Subject
from .trial import Trial
from .values import made, results_of


def opcheck(subject: Subject) -> Iterator[Item]:
    """torch.library.opcheck: the schema, the autograd registration, fake tensors and dynamic shapes."""
    for adapter, device in _torch_runs(subject):
        if subject.quick:  # importing it takes seconds
            yield Item("opcheck", f"torch {device}", UNAVAILABLE, "left out by quick")
            continue
        dtype = next((dtype for dtype in ("float32", "float64") if dtype in subject.dtypes), subject.dtypes[0])
        cases = (subject.plain, *(subject.row.opcheck if subject.from_row else ()))
        pairs = [(case, dtype) for case in cases]
        attempt = partial(_opcheck, subject, adapter, device)
        yield searched(subject, "opcheck", f"torch {device}", attempt, pairs, devices=[device])


def gradcheck(subject: Subject) -> Iterator[Item]:
    """torch.autograd.gradcheck, in float64; gradgradcheck and forward mode too if the definition states them."""
    for adapter, device in _torch_runs(subject):
        if not subject.op.has_gradient:
            continue
        if "float64" not in subject.dtypes:
            yield Item("gradcheck", f"torch {device}", UNAVAILABLE, "it needs float64")
            continue
        attempt, pairs = partial(_gradcheck, subject, adapter, device), [(subject.plain, "float64")]
        yield searched(subject, "gradcheck", f"torch {device}", attempt, pairs, devices=[device])


def capture(subject: Subject) -> Iterator[Item]:
    """A CUDA graph records the call, and its replay computes from new inputs."""
    if "cuda" not in subject.devices:
        return
    if not subject.torch_on_gpu:
        yield Item("CUDA graph", "cuda", UNAVAILABLE, "torch finds no GPU")
        return
    adapter = next(adapter for adapter, device in _torch_runs(subject) if device == "cuda")
    attempt, pairs = partial(_capture, subject, adapter), subject.pairs([subject.plain], adapter)
    yield searched(subject, "CUDA graph", "torch cuda", attempt, pairs, devices=["cuda"])


def _torch_runs(subject: Subject) -> Iterator[tuple[Torch, str]]:
    for adapter, device in subject.usable:
        if isinstance(adapter, Torch):
            yield adapter, device


def _opcheck(subject: Subject, adapter: Torch, device: str, trial: Trial) -> None:
    make = partial(_leaves, subject) if subject.op.has_gradient else made
    torch = import_module("torch")
    op = subject.op
    getattr(adapter.module, op.name)  # which registers it
    inputs, attrs = op.bind(**make(adapter, device, trial), **trial.case.attrs)
    plain = [list(value) if isinstance(value, tuple) else value for value in op.canonical(attrs)]
    registered = getattr(getattr(torch.ops, op.library.name), op.name).default
    torch.library.opcheck(registered, (*inputs, *plain))


def _gradcheck(subject: Subject, adapter: Torch, device: str, trial: Trial) -> None:
    op, tensors = subject.op, _leaves(subject, adapter, device, trial)
    given = {slot: t for slot, t in tensors.items() if t is not None}

    def function(*args: Any) -> Any:
        named = tensors | dict(zip(given, args, strict=True))
        results = adapter.results(op.name, named, trial.case.attrs)
        return tuple(y for y in results if adapter.is_differentiable(y))

    bilinear = is_bilinear(op, op.canonical(op.bind(**tensors, **trial.case.attrs)[1]))
    tried = _Derivatives(op, function, tuple(given.values()), bilinear)
    tried.first()
    if bilinear or (op.backward is not None and op.backward.formula is not None):
        tried.second()


@dataclass(frozen=True)
class _Derivatives:
    """torch's comparisons of derivatives with finite differences. An error names the function that is wrong: the kernel
    of the gradient, or a formula."""

    op: Op
    function: Callable[..., Any]
    given: tuple[Any, ...]
    bilinear: bool

    @property
    def forward_mode(self) -> bool:
        return self.bilinear or self.op.formula is not None

    def first(self) -> None:
        gradcheck = import_module("torch").autograd.gradcheck
        if self._fault(gradcheck, check_forward_ad=self.forward_mode) is None:
            return
        kernel = self._fault(gradcheck)
        formula = self._fault(gradcheck, check_forward_ad=True, check_backward_ad=False) if self.forward_mode else None
        name = self.op.name
        if kernel and not formula:
            agrees = f", with which {self._formula(self.op)} agrees" if self.forward_mode else ""
            raise AssertionError(
                f"{name}: the gradient, {self._gradient}, does not agree with finite differences of the kernel of "
                f"{name}{agrees}: {kernel}"
            )
        if formula and not kernel:
            raise AssertionError(
                f"{name}: the kernel and {self._formula(self.op)} disagree: the kernel's gradient agrees with finite "
                f"differences of the kernel, the formula's derivative does not: {formula}"
            )
        raise AssertionError(
            f"{name}: neither the gradient, {self._gradient}, nor {self._formula(self.op)} agrees with finite "
            f"differences of the kernel of {name}: {kernel or formula}"
        )

    def second(self) -> None:
        gradgradcheck = import_module("torch").autograd.gradgradcheck
        fault = self._fault(gradgradcheck, check_fwd_over_rev=self.forward_mode)
        if fault:
            formula = self._formula(self.op.backward) if self.op.backward else self._formula(self.op)
            raise AssertionError(
                f"{self.op.name}: the gradient, {self._gradient}, and {formula} disagree: the formula's derivative "
                f"does not agree with finite differences of the gradient: {fault}"
            )

    def _fault(self, check: Callable[..., Any], **arguments: Any) -> str | None:
        error = import_module("torch.autograd.gradcheck").GradcheckError
        try:
            check(self.function, self.given, **arguments)
        except error as fault:
            return " ".join(str(fault).split())
        return None

    @property
    def _gradient(self) -> str:
        return f"{self.op.backward.name}" if self.op.backward else "a rule made of operators"

    def _formula(self, op: Op) -> str:
        if op.formula is None:
            return f"the rule of the bilinear {self.op.name}"
        code = getattr(op.formula, "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
        return f"the formula of {op.name}, {getattr(op.formula, '__name__', 'formula')}{where}"


def _leaves(subject: Subject, adapter: Torch, device: str, trial: Trial) -> dict[str, Any]:
    tensors = made(adapter, device, trial)
    constants, is_leaf = subject.op.constants, adapter.is_differentiable
    return {
        slot: None if t is None else t.requires_grad_(is_leaf(t) and slot not in constants)
        for slot, t in tensors.items()
    }


def _capture(subject: Subject, adapter: Torch, trial: Trial) -> None:
    torch = import_module("torch")
    inputs = made(adapter, "cuda", trial)
    static = {slot: None if t is None else torch.zeros_like(t) for slot, t in inputs.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what is set up once is set up before
        adapter.results(subject.op.name, static, trial.case.attrs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = results_of(subject, adapter, static, trial)
    for slot, t in static.items():
        if t is not None:
            t.copy_(inputs[slot])
    graph.replay()
    torch.cuda.synchronize()
    trial.assert_values(tuple(map(adapter.numpy, results)))
