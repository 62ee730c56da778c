"""The schemas of torch's dispatcher. It does not import torch: the library's table of its operators is made with it
(packaging/torch_table.py)."""

from __future__ import annotations

from collections.abc import Container, Sequence

from aotops.op import Op

# A dimension of an "int[]" may be symbolic.
_TYPES = {"int[]": "SymInt[]"}


def schema(op: Op) -> str:
    """Of an operator that returns every output and residual.

    Its last argument, if it has optional results, is ``wanted``: a bool for each of ``maskable(op)``, by default all
    True. A result that is not wanted is not computed: it is an undefined tensor, which is None in Python.
    """
    writes = {slot: f"({'abcdefghijklmnop'[i]}!)" for i, slot in enumerate(op.mutates)}
    tensors = [f"Tensor{writes.get(slot, '')}{'?' if slot in op.optional else ''} {slot}" for slot in op.inputs]
    attrs = [f"{_TYPES.get(kind, kind)} {attr}" for attr, kind in op.attrs.items()]
    some = len(maskable(op))
    mask = [f"bool[{some}] wanted=[{', '.join(['True'] * some)}]"] if some else []
    n = len(op.results)
    returns = "Tensor" if n == 1 else f"({', '.join(['Tensor'] * n)})"
    return f"{op.name}({', '.join(tensors + attrs + mask)}) -> {returns}"


def overwriting_schema(op: Op, absent: Container[str]) -> str:
    """Of the overload that writes the results of ``op.overwrites`` over inputs, and returns the others. ``absent``:
    inputs that it does not take."""
    writes = {slot: f"({'abcdefghijklmnop'[i]}!)" for i, slot in enumerate(op.overwrites.values())}
    tensors = [
        f"Tensor{writes.get(slot, '')}{'?' if slot in op.optional and slot not in writes else ''} {slot}"
        for slot in op.inputs
        if slot not in absent
    ]
    attrs = [f"{_TYPES.get(kind, kind)} {attr}" for attr, kind in op.attrs.items()]
    returned = ["Tensor"] * (len(op.results) - len(op.overwrites))
    returns = "Tensor" if len(returned) == 1 else f"({', '.join(returned)})"
    return f"{op.name}.overwriting({', '.join(tensors + attrs)}) -> {returns}"


def maskable(op: Op) -> tuple[str, ...]:
    """The results that ``wanted`` is about: the optional ones, of an operator that is itself not differentiated by its
    definition, such as a backward. The only result is always wanted."""
    if op.has_gradient or len(op.results) == 1:
        return ()
    return tuple(y for y in op.results if y in op.optional)


def mask(op: Op, wanted: Container[str]) -> tuple[list[bool], ...]:
    """What follows the attributes in a call for these results: nothing if they are all."""
    flags = [y in wanted for y in maskable(op)]
    return () if all(flags) else (flags,)


def wanted(op: Op, mask: Sequence[Sequence[bool]]) -> tuple[str, ...]:
    """The results of a call with this after its attributes.

    Raises:
        ValueError: the mask has another length.
    """
    some = maskable(op)
    if not mask:
        return op.results
    (flags,) = mask
    if len(flags) != len(some):
        raise ValueError(f"{op.name}: wanted has {len(flags)} values, expected {len(some)}, for {', '.join(some)}")
    left_out = {y for y, flag in zip(some, flags, strict=True) if not flag}
    return tuple(y for y in op.results if y not in left_out)
