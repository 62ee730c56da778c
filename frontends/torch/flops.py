"""FLOPs of the products, for ``torch.utils.flop_counter``."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from importlib import import_module
from typing import Any

from aotops.flops import backward_flops, flops
from aotops.op import Op

from ..imports import after_import
from ..torch_schema import splitter
from .private import FLOP_COUNTER


def register(operators: Iterable[tuple[Op, Op, Any]]) -> None:
    """Registers the counts of operators with products; others are not counted, as torch's own.

    Args:
        operators: each with the operator itself, or the one whose backward it is, and its ``OpOverload``.
    """
    counted = [(op, forward, overload.overloadpacket) for op, forward, overload in operators if forward.product]

    def take() -> None:
        counter = import_module(FLOP_COUNTER)
        for op, forward, packet in counted:
            if packet not in counter.flop_registry:
                counter.register_flop_formula(packet)(partial(_flops, op, forward))

    if counted:
        after_import(FLOP_COUNTER, take)


def _flops(op: Op, forward: Op, *args: Any, **kwargs: Any) -> int:
    """Takes a call's arguments, with the shapes of tensors in their places."""
    inputs, attrs, wanted = splitter(op)(args)
    named = dict(zip(op.inputs, inputs, strict=True))
    shapes = [named.get(slot) for slot in forward.inputs]
    if op is forward:
        return flops(op, attrs, shapes)
    return backward_flops(forward, attrs, shapes, (*wanted, *op.mutates))
