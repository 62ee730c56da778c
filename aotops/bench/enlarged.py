"""The work of an operator whose row states none: one of its cases, enlarged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from ..infer import infer
from ..library import LibraryError
from ..op import Attr, Op
from ..spec import TensorSpec
from .work import DTYPES, Shape, Work

ELEMENTS = {"quick": 1 << 19, "cpu": 1 << 25, "cuda": 1 << 26}
"""Elements of the first input. On a GPU twice the L2 cache of an H200 in bfloat16."""
ROW = {"quick": 1024, "cpu": 4096, "cuda": 4096}


@dataclass(frozen=True)
class Enlarged(Work):
    """A shape is that of the first input. An axis of another input that is as long as one of the first's in the case
    is as long in the shape too. All tensors count once; of a backward, the gradients and what it takes of the
    forward's inputs and outputs."""

    definition: Op = None  # type: ignore[assignment]
    case: Any = None
    """An ``aotops.testing.Case``."""

    AXES: ClassVar[tuple[str, ...]] = ("the first input's axes",)
    SMALL: ClassVar[int] = 8 * 256

    def __hash__(self) -> int:  # a case has dicts
        return hash((self.op, self.variant))

    @property
    def first(self) -> Shape:
        return next(iter(self.case.given.values()))

    @cached_property
    def attrs(self) -> tuple[Attr, ...]:
        given = {slot: object() if slot in self.case.given else None for slot in self.definition.inputs}
        return self.definition.canonical(self.definition.bind(**given | self.case.attrs)[1])

    def function(self, module: Any, shape: Shape) -> Any:
        function, (_, *others) = getattr(module, self.plain_name), self.case.given

        def call(first: Any, *rest: Any) -> Any:
            return function(first, **dict(zip(others, rest, strict=True)), **self.case.attrs)

        return call

    def tensors(self, shape: Shape) -> dict[str, Shape]:
        lengths = dict(zip(self.first, shape, strict=True))
        inputs = {slot: tuple(lengths.get(n, n) for n in dims) for slot, dims in self.case.given.items()}
        letters = _letters(self.definition, self.case)
        return {letters[slot]: dims for slot, dims in (inputs | self._outputs(inputs)).items()}

    def _outputs(self, inputs: Mapping[str, Shape]) -> dict[str, Shape]:
        op = self.definition
        known = {y: inputs[op.same_spec_as[y]] for y in op.outputs if op.same_spec_as.get(y) in inputs}
        if len(known) == len(op.outputs) and not op.broadcast:
            return known
        found = self._infer(inputs, "float32")
        return {y: found[y].shape for y in op.outputs}

    def _infer(self, inputs: Mapping[str, Shape], dtype: str) -> dict[str, TensorSpec]:
        dtypes = dict.fromkeys(inputs, dtype) | dict.fromkeys(self.case.classes, "int64")
        names = self.definition.inputs
        specs = tuple(TensorSpec(inputs[slot], dtypes[slot]) if slot in inputs else None for slot in names)
        return infer(self.definition, self.attrs, specs)

    def takes(self, dtype: str) -> bool:
        """Whether the library accepts it. One that infers nothing, and may check nothing, is given float32 alone."""
        if getattr(self.definition, "foreign", None):
            return dtype == "float32"
        try:
            self._infer(self.case.given, dtype)
        except TypeError:
            return False
        except LibraryError:
            return dtype == "float32"
        return True

    def n_classes(self, shape: Shape) -> int:
        (n,) = self.case.classes.values()
        return dict(zip(self.first, shape, strict=True)).get(n, n)

    def shapes(self, device: str, given: Sequence[Shape] | None, quick: bool) -> Sequence[Shape]:
        if given is not None:
            return [shape for shape in given if len(shape) == len(self.first)]
        size = "quick" if quick else device
        large = _enlarged(self.first, ELEMENTS[size], ROW[size])
        try:
            self.tensors(large)
        except (ValueError, TypeError):  # attributes, or other inputs, are for the case's shape
            return [self.first]
        return [_enlarged(self.first, self.SMALL, 256), large]


def enlarged(op: Op, cases: Sequence[Any]) -> Enlarged:
    """The case with most inputs, of these the one whose first input has most different axes, and is largest.

    Raises:
        LookupError: no case has elements, and inputs that can be drawn.
    """

    def rank(case: Any) -> tuple[int, ...]:
        first = next(iter(case.given.values()))
        return len(case.given), min(len(set(first)), 2), -len(first), math.prod(first)

    usable = [case for case in cases if _usable(case)]
    if not usable:
        raise LookupError(f"bench: {op.name} has no case that can be enlarged: expected a bench in its row")
    case = max(usable, key=rank)
    letters = _letters(op, case)
    reads = "".join(letters[x] for x in case.given)
    writes = "".join(letters[y] for y in (*op.outputs, *op.mutates))
    work = Enlarged(reads, writes, _backward(op, case, letters), definition=op, case=case)
    return replace(work, dtypes=tuple(dtype for dtype in DTYPES if work.takes(dtype)))


def _usable(case: Any) -> bool:
    """It has elements, all of the dtype that is measured, but for one input of classes."""
    others = set(getattr(case, "dtypes", ())) - set(case.classes)
    return bool(case.given) and all(map(math.prod, case.given.values())) and len(case.classes) < 2 and not others


def _letters(op: Op, case: Any) -> dict[str, str]:
    """A letter for each input and output. "t" are classes."""
    letters = {slot: chr(ord("A") + i) for i, slot in enumerate((*op.inputs, *op.outputs))}
    return letters | dict.fromkeys(case.classes, "t")


def _backward(op: Op, case: Any, letters: dict[str, str]) -> tuple[str, str] | None:
    if not op.has_gradient:
        return None
    backward = op.backward
    differentiable = [x for x in case.given if x not in case.classes and (not backward or f"d{x}" in backward.outputs)]
    absent = {x for x in op.inputs if x not in case.given}
    reads = [*op.outputs, *(slot for slot in op.saved if slot in letters and slot not in absent)]
    return "".join(letters[slot] for slot in reads), "".join(letters[x] for x in differentiable)


def _enlarged(shape: Shape, elements: int, row: int) -> Shape:
    """A shape of about as many elements: of a vector, of rows, or of what is behind the first axis."""
    if len(shape) < 2:
        return (elements,) * len(shape)
    rest = (row,) if len(shape) == 2 else shape[1:]
    return max(1, elements // math.prod(rest)), *rest
