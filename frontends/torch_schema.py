"""An operator's signatures in torch: its public function's and its schema in the dispatcher. This module lies beside
the package torch because it does not import torch, which is not there when stubs and the library are made."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

from aotops.op import ATTRIBUTE_TYPES, Op

EXTRA = {"softmax": ("dtype", "torch.dtype")}
"""The keyword that only torch's function has, None by default, and its type: torch/compositions.py serves it."""


def has_out(op: Op) -> bool:
    """Whether the public function takes ``out``: where there is one result."""
    return len(op.outputs) == 1 and not op.mutates and "out" not in (*op.inputs, *op.attrs)


def schema(op: Op) -> str:
    """The schema of an operator that returns every output and residual.

    Its last argument, if it has optional results, is ``wanted``: a bool for each of ``maskable(op)``, by default all
    True. Of residuals none is wanted by default, which is None, because jit.trace refuses a list of bools. A result
    that is not wanted is not computed: it is an undefined tensor, which is None in Python.
    """
    some = len(maskable(op))
    mask = [f"bool[{some}] wanted=[{', '.join(['True'] * some)}]"] if some else []
    mask = [f"bool[{some}]? wanted=None"] if mask and op.has_gradient else mask
    return _text(op, op.name, op.inputs, op.mutates, op.optional, mask, len(op.results))


def overwriting_schema(op: Op, absent: Container[str]) -> str:
    """The schema of the overload that writes the results of ``op.overwrites`` over inputs, and returns the others.
    ``absent``: inputs that it does not take."""
    written = tuple(op.overwrites.values())
    inputs = [slot for slot in op.inputs if slot not in absent]
    returned = len(op.results) - len(op.overwrites)
    return _text(op, f"{op.name}.overwriting", inputs, written, op.optional.difference(written), [], returned)


def _text(
    op: Op,
    name: str,
    inputs: Sequence[str],
    written: Sequence[str],
    optional: Container[str],
    more: list[str],
    returned: int,
) -> str:
    writes = {slot: f"({'abcdefghijklmnop'[i]}!)" for i, slot in enumerate(written)}
    tensors = [f"Tensor{writes.get(slot, '')}{'?' if slot in optional else ''} {slot}" for slot in inputs]
    types = {kind: ATTRIBUTE_TYPES[kind].schema if kind in ATTRIBUTE_TYPES else kind for kind in op.attrs.values()}
    attrs = [f"{types[kind]} {attr}" for attr, kind in op.attrs.items()]
    returns = "Tensor" if returned == 1 else f"({', '.join(['Tensor'] * returned)})"
    return f"{name}({', '.join(tensors + attrs + more)}) -> {returns}"


def written(op: Op) -> str:
    """The slots that the entry writes, as cuda_src/host/torch_operator.h reads them: names of results, with "?" if
    ``wanted`` is about them, and then of workspaces, with "*"."""
    results = (f"{y}?" if y in maskable(op) else y for y in op.results)
    return " ".join((*results, *(f"{slot}*" for slot in op.workspace)))


def rows(ops: Iterable[Op]) -> Iterator[tuple[str, str, bool]]:
    """The arguments by which cuda_src/host/torch_stable.cpp registers operators and their backwards: the schema, the
    text of ``written``, whether the operator is elementwise. An operator whose entry aot.h has not made has none."""
    both = (one for op in ops for one in (op, op.backward) if one is not None)
    for op in dict.fromkeys(both):
        if op.has_kernel and op.foreign is None:
            yield schema(op), written(op), op.elementwise


def maskable(op: Op) -> tuple[str, ...]:
    """The results that ``wanted`` is about: the optional ones, of an operator that is itself not differentiated by its
    definition, such as a backward, and residuals for the gradients of some inputs alone (``Op.saved_for``). The only
    result is always wanted."""
    if op.has_gradient:
        return tuple(y for y in op.residuals if y in op.saved_for)
    if len(op.results) == 1:
        return ()
    return tuple(y for y in op.results if y in op.optional)


def mask(op: Op, wanted: Container[str]) -> tuple[list[bool], ...]:
    """The arguments after the attributes in a call for these results: none where the default says the same."""
    flags = [y in wanted for y in maskable(op)]
    return () if flags == [not op.has_gradient] * len(flags) else (flags,)


def splitter(op: Op) -> Callable[[Sequence[Any]], tuple[Sequence[Any], tuple[Any, ...], tuple[str, ...]]]:
    """A function of the arguments of a call that returns the inputs, the attributes, as the definition has them, and
    the names of the results that are wanted.

    It raises:
        ValueError: the mask has another length.
    """
    n, end, some = len(op.inputs), len(op.inputs) + len(op.attrs), maskable(op)

    def wanted(mask: Sequence[Sequence[bool]]) -> tuple[str, ...]:
        (flags,) = mask or (None,)
        if flags is None:
            flags = [not op.has_gradient] * len(some)
        if len(flags) != len(some):
            raise ValueError(f"{op.name}: wanted has {len(flags)} values, expected {len(some)}, for {', '.join(some)}")
        left_out = {y for y, flag in zip(some, flags, strict=True) if not flag}
        return tuple(y for y in op.results if y not in left_out)

    return lambda args: (args[:n], attributes(args[n:end]), wanted(args[end:]))


def attributes(args: Sequence[Any]) -> tuple[Any, ...]:
    """Attributes as the definitions have them: the dispatcher passes lists."""
    return tuple(tuple(a) if isinstance(a, list) else a for a in args)
