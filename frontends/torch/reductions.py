"""Operators as torch's own reductions and elementwise functions, in the graphs that Inductor compiles (``Op.fused``).

Inductor fuses a reduction with what makes its input, and what reads the result with what normalizes by it, which it may
then compute again in the backward instead of keeping it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aotops.formula import fuse
from aotops.op import Op
from aotops.spec import check_devices

from ..torch_schema import splitter
from .contiguous import is_known
from .mathematics import Mathematics, all_narrow
from .tensors import DTYPES, packed, specs_of


def decomposed(op: Op, args: Sequence[Any]) -> Any:
    """The results of a call, in the dtypes and the memory format of the kernel's. NotImplemented where inputs may have
    no elements: of no terms torch's statistics are NaN."""
    assert op.fused is not None, f"{op.name} has no reductions"
    inputs, attrs, wanted = splitter(op)(args)
    given = {slot: t for slot, t in zip(op.inputs, inputs, strict=True) if t is not None}
    if not all(is_known(t) and t.numel() for t in given.values()):
        return NotImplemented
    check_devices(op.name, op.inputs, inputs)
    specs = specs_of(op, attrs, inputs)
    results = fuse(op.fused, Mathematics(None, all_narrow(inputs)), op, attrs, given)
    pairs = zip(op.results, results, strict=True)
    return packed([y.to(DTYPES[specs[name].dtype]).contiguous() if name in wanted else None for name, y in pairs])
