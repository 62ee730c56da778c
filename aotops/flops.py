"""FLOPs of calls, from what definitions state of their products (``Product.flops``)."""

from __future__ import annotations

from collections.abc import Container, Sequence

from .op import Attr, Op
from .sharding import Shape


def flops(op: Op, attrs: Sequence[Attr], shapes: Sequence[Shape | None]) -> int:
    """FLOPs of a call with inputs of these shapes, None for absent ones; 0 without a product."""
    return op.product.flops(op.call(attrs, shapes)) if op.product else 0


def backward_flops(op: Op, attrs: Sequence[Attr], shapes: Sequence[Shape | None], wanted: Container[str]) -> int:
    """FLOPs of the backward of such a call: a product as large for each factor whose gradient is ``wanted``."""
    factors = ((slots,) if isinstance(slots, str) else slots for slots in (op.product.factors if op.product else ()))
    return flops(op, attrs, shapes) * sum(any(f"d{slot}" in wanted for slot in factor) for factor in factors)
