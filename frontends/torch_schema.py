"""The schemas of torch's dispatcher. It does not import torch: the library's table of its operators is made with it
(packaging/torch_table.py)."""

from __future__ import annotations

from collections.abc import Container

from aotops.op import Op

# A dimension of an "int[]" may be symbolic.
_TYPES = {"int[]": "SymInt[]"}


def schema(op: Op) -> str:
    """Of an operator that returns every output and residual."""
    writes = {slot: f"({'abcdefghijklmnop'[i]}!)" for i, slot in enumerate(op.mutates)}
    tensors = [f"Tensor{writes.get(slot, '')}{'?' if slot in op.optional else ''} {slot}" for slot in op.inputs]
    attrs = [f"{_TYPES.get(kind, kind)} {attr}" for attr, kind in op.attrs.items()]
    n = len(op.results)
    returns = "Tensor" if n == 1 else f"({', '.join(['Tensor'] * n)})"
    return f"{op.name}({', '.join(tensors + attrs)}) -> {returns}"


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
