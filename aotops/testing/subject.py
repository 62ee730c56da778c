"""The subject of a check: an operator, its row, and where it is run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np

from aotops.library import Library
from aotops.op import Op

from .calls import bound, forward_call, placeholders, run_on_cuda
from .frameworks import Framework
from .plan import Plan, Raised
from .row import Case, Row, Shape
from .trial import Trial
from .worker import Worker

SMALL = 1 << 12
"""Elements of a case that is tried in every dtype."""
LARGEST = 1 << 18
"""Elements of a case that is run in another process."""


@dataclass(frozen=True, eq=False)
class Subject:
    op: Op
    row: Row
    cases: tuple[Case, ...]
    """The smallest first."""
    dtypes: tuple[str, ...]
    devices: tuple[str, ...]
    usable: tuple[tuple[Framework, str], ...]
    """Each framework with each of its devices that is here."""
    seed: int = 0
    quick: bool = False
    huge: bool = False
    sanitize: bool = False
    from_row: bool = False
    """Whether the cases are the row's."""
    expression: str = "op"
    """The operator's name in a line of Python, after ``imports``."""
    imports: str = ""
    reference: str = ""
    """The name of a reference that was given."""
    worker: Worker = field(default_factory=Worker)
    """The process for calls that may end it."""
    unusual: dict[str, list[Case]] = field(default_factory=dict, init=False)
    """Cases of unusual shapes, by kind (inputs.py)."""
    _trials: dict[tuple[str, str], Trial] = field(default_factory=dict, init=False)
    _refusals: dict[tuple[str, str], str | None] = field(default_factory=dict, init=False)

    def trial(self, case: Case, dtype: str) -> Trial:
        key = repr(case), dtype
        if key not in self._trials:
            rounded = replace(case, dtype_roundings=max(case.dtype_roundings, self._roundings))
            self._trials[key] = Trial(self.row, rounded, dtype, f"{self.seed} {self.op.name} {case}")
        return self._trials[key]

    @property
    def _roundings(self) -> int:
        """The roundings of a gradient, in the dtype itself: a saved output is rounded, and used about twice; in a rule
        made of operators, so is the result of each."""
        saved = set(self.op.saved) & set(self.op.outputs)
        return 2 * len(saved) + (4 if self.op.rule else 0)

    @cached_property
    def plain(self) -> Case:
        """A small case with every input: the first of two axes or more and ten elements or more."""

        def rank(case: Case) -> tuple[bool, bool, bool]:
            shape = next(iter(case.given.values()), ())
            return len(case.given) < len(case.shapes), not 10 <= np.prod(shape) < 10000, len(shape) < 2

        return min(self.cases, key=rank)

    @cached_property
    def torch_on_gpu(self) -> bool:
        return any((adapter.name, device) == ("torch", "cuda") for adapter, device in self.usable)

    def kernel_runs(self) -> Iterator[tuple[Framework, str]]:
        """One framework, the quickest, for each device: for what is the kernel's and not the framework's."""
        for device in self.devices:
            able = [adapter for adapter, d in self.usable if d == device]
            order = ("numpy", "torch", "cupy", "jax", "mindspore")
            if able:
                yield min(able, key=lambda adapter: order.index(adapter.frontend)), device

    def dtypes_for(self, case: Case, adapter: Framework | None = None) -> tuple[str, ...]:
        """All dtypes, or one for a large case, and for all but one in a framework whose calls are slow."""
        dtypes = self.dtypes_of(adapter) if adapter else self.dtypes
        slow = adapter is not None and (adapter.compiles or (adapter.slow and (self.quick or case is not self.plain)))
        few = elements(case) > SMALL or slow
        return tuple(d for d in ("float32", *dtypes) if d in dtypes)[:1] if few else dtypes

    def pairs(self, cases: Sequence[Case], adapter: Framework | None = None) -> list[tuple[Case, str]]:
        """The cases, each in its dtypes. A case that was not given is left out where the operator refuses it, and one
        with a dtype that the framework lacks."""
        able = [case for case in cases if adapter is None or all(map(adapter.has_dtype, case.dtypes.values()))]
        pairs = [(case, dtype) for case in able for dtype in self.dtypes_for(case, adapter)]
        return [(case, dtype) for case, dtype in pairs if case in self.cases or self.refusal(case, dtype) is None]

    def dtypes_of(self, adapter: Framework) -> tuple[str, ...]:
        return tuple(dtype for dtype in self.dtypes if adapter.has_dtype(dtype))

    def refusal(self, case: Case, dtype: str) -> str | None:
        """The error of the operator for such inputs, or None if it accepts them. The kernel is asked too: one that is
        hosted says by its status what it refuses."""
        key = repr(case), dtype
        if key not in self._refusals:
            self._refusals[key] = self._refused(case, dtype)
        return self._refusals[key]

    def _refused(self, case: Case, dtype: str) -> str | None:
        try:
            bound(self.op, case, placeholders(case, dtype), dtype).written("cpu")
        except Exception as error:  # whatever a rule of the operator raises for a shape that is not for it
            return str(error)
        return self._refused_by_kernel(case, dtype) if elements(case) <= LARGEST else None

    def _refused_by_kernel(self, case: Case, dtype: str) -> str | None:
        """A call that ends the process is none of a refusal."""
        device = next((d for d in self.devices if d == "cpu" or self.torch_on_gpu), None)
        if device is None or not self.op.has_kernel:
            return None
        try:
            one = forward_call(self.op, self.trial(case, dtype), device)
        except Exception:  # of no class, for example
            return "there are no such inputs"
        raised: Iterable[Raised] = ()
        if device == "cpu":
            raised = self.worker.run(Plan([one], ["plain"])).raised.values()
        else:
            try:
                run_on_cuda(one, 0)
            except Exception as error:
                raised = [Raised(type(error).__name__, str(error))]
        refusals = "TypeError", "ValueError", "NotImplementedError"
        return next((each.text for each in raised if self.op.foreign or each.kind in refusals), None)

    def valid(self, case: Case, dtype: str) -> bool:
        """Whether the operator accepts the case, and the reference has a finite result."""
        if self.refusal(case, dtype):
            return False
        try:
            with np.errstate(all="ignore"):
                return all(np.isfinite(y).all() for y in self.trial(case, dtype).expected)
        except Exception:  # whatever a reference raises for a shape that is not for it
            return False


# ----------------------------------------------------------------------------------------------------- rows and names


def row_of(op: Op, reference: Callable[..., Any] | None) -> Row | None:
    """The row of the operator's library, with ``reference`` in the place of its own; None if there is neither."""
    cases = op.library.cases
    row = getattr(import_module(cases), "CASES", {}).get(op.name) if cases else None
    if reference is None:
        return row
    return replace(row, reference=reference) if row else Row(reference)


def as_cases(op: Op, given: Sequence[Any]) -> list[Case]:
    """Cases of Case objects, of shapes by input, or of a tuple of shapes in the order of the inputs."""

    def one(value: Any) -> Case:
        if isinstance(value, Case):
            return value
        if isinstance(value, dict):
            return Case({slot: None if shape is None else tuple(shape) for slot, shape in value.items()})
        shapes = list(value)
        if len(op.inputs) == 1 and all(isinstance(dim, int) for dim in shapes):
            shapes = [shapes]
        if len(shapes) != len(op.inputs):
            raise ValueError(f"{op.name}: a case is {value!r}, expected shapes for {', '.join(op.inputs)}")
        return Case({slot: tuple(shape) for slot, shape in zip(op.inputs, shapes, strict=True)})

    return [one(value) for value in given]


_DEFAULT: tuple[Shape, ...] = ((), (1,), (2, 0), (7,), (4, 6), (3, 5, 2), (33, 1025))


def default_cases(op: Op) -> list[Case]:
    """For an operator without a row: all inputs of one shape."""
    return [Case(dict.fromkeys(op.inputs, shape)) for shape in _DEFAULT]


def elements(case: Case) -> int:
    return sum(int(np.prod(shape, dtype=np.int64)) for shape in case.given.values())


def importable(op: Op) -> tuple[str, str]:
    """Python that imports what names an operator, and the expression; ``op`` itself where nothing does."""
    from aotops.registry import libraries

    for library in libraries().values():
        if library.ops.get(op.name) is op:
            return "import aotops", f"aotops.get({library.name + '.' + op.name!r})"
    for name, module in list(sys.modules.items()):
        # issubclass of the type: isinstance asks an object for its class, and deprecated ones of torch then warn
        if name in ("__main__", "__mp_main__") or module is None:
            continue
        for attribute, value in list(vars(module).items()) if hasattr(module, "__dict__") else ():
            if issubclass(type(value), Library) and value.ops.get(op.name) is op and not attribute.startswith("_"):
                return f"from {name} import {attribute}", f"{attribute}.ops[{op.name!r}]"
    return "", "op"


def reference_name(reference: Callable[..., Any]) -> tuple[str, str]:
    module, name = getattr(reference, "__module__", None), getattr(reference, "__qualname__", "")
    if module and module != "__main__" and getattr(sys.modules.get(module), name, None) is reference:
        return f"from {module} import {name}", name
    return "", "reference"
