"""The schemas of torch's dispatcher. It does not import torch: the library's table of its operators is made with it
(packaging/torch_table.py)."""

from __future__ import annotations

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
