"""FLOPs of the products, for ``torch.utils.flop_counter``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from math import prod
from typing import Any

from aotops.op import Op

from ..imports import after_import
from ..torch_schema import wanted
from .private import FLOP_COUNTER


def register(operators: Mapping[Op, Any]) -> None:
    """``operators``: the ``OpOverload`` of each operator. Those without a product are not counted, as torch's own."""
    counted = [(op, one.overloadpacket) for op, one in operators.items() if op.name in _FORMULAS]

    def take() -> None:
        counter = import_module(FLOP_COUNTER)
        for op, packet in counted:
            if packet not in counter.flop_registry:
                counter.register_flop_formula(packet)(partial(_flops, op))

    if counted:
        after_import(FLOP_COUNTER, take)


def _flops(op: Op, *args, **kwargs) -> int:
    """FLOPs of a call with these shapes."""
    product, *gradients = _FORMULAS[op.name]
    names = wanted(op, args[len(op.inputs) + len(op.attrs) :])
    n = sum(not one.isdisjoint(names) for one in gradients) if gradients else 1
    return n * product(*args, **kwargs)


def _matmul(a, b, transpose_a=False, transpose_b=False, *args, out_shape, **kwargs) -> int:
    return 2 * prod(out_shape) * a[-2 if transpose_a else -1]


def _matmul_backward(dy, a, b, transpose_a=False, transpose_b=False, *args, **kwargs) -> int:
    return 2 * prod(dy) * a[-2 if transpose_a else -1]


def _weighted(x, weight, *args, out_shape, **kwargs) -> int:
    """Each element of y is a sum over a row of the weight. A linear layer's second result is a residual."""
    y = out_shape if isinstance(out_shape[0], int) else out_shape[0]
    return 2 * prod(y) * prod(weight[1:])


def _weighted_backward(dy, x, weight, *args, **kwargs) -> int:
    return 2 * prod(dy) * prod(weight[1:])


def _lltm(input, weights, *args, **kwargs) -> int:
    return 2 * prod(input[:-1]) * prod(weights)


def _lltm_backward(dnew_h, dnew_cell, input, weights, *args, **kwargs) -> int:
    return 2 * prod(input[:-1]) * prod(weights)


_FORMULAS: dict[str, tuple[Any, ...]] = {
    "matmul": (_matmul,),
    "matmul_backward": (_matmul_backward, {"da"}, {"db"}),
    "linear": (_weighted,),
    "linear_backward": (_weighted_backward, {"dx"}, {"dweight"}),
    "conv2d": (_weighted,),
    "conv2d_backward": (_weighted_backward, {"dx"}, {"dweight"}),
    "lltm": (_lltm,),
    "lltm_backward": (_lltm_backward, {"dinput", "dold_h"}, {"dweights"}),
}
"""By operator, a function of the arguments' shapes for a product, and for a backward what each of its products is
computed for."""
