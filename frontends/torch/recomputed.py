"""Results of elementwise operators that a backward computes again, in Inductor's joint graphs of forward and backward.

A product keeps its operand for its backward. Where swiglu has made the operand, its own backward keeps what it was made
of as well. The partition of the graph keeps all three: it recomputes nothing that a product reads, since that must be
written once more. But the kernel of swiglu's gradients has the inputs in registers, so that one write is all, for as
much memory from the forward to the backward.

Tables are what must not be computed again: of cosines, Inductor would for each head of each layer that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from aotops.op import Op

from . import private, views
from .graphs import RESHAPES, readers

_aten = torch.ops.aten
LAST = (_aten.mul.Tensor, torch.ops.prims.convert_element_type.default)
"""The last steps of what such operators are decomposed to, in 32 bits and in 16."""
_VIEWS = {*RESHAPES, _aten.permute.default, _aten.t.default}


def register(overloads: Mapping[Op, Any], on_each: Callable[..., None]) -> None:
    """``on_each``: lets a function run on each call of an operator for which a condition holds."""
    pairs = [(op, op.backward) for op in overloads if op.elementwise and op.backward is not None]
    names = {str(overloads[op]): str(overloads[backward]) for op, backward in pairs if backward in overloads}
    for last in LAST if names else ():
        on_each(last, mark, partial(costs_a_write, names))


def mark(node: Node) -> None:
    """Lets the partition recompute it."""
    # older versions of torch read the number of a checkpoint beside its policy
    node.meta |= {private.POLICY: private.CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": 0}


def costs_a_write(backwards: Mapping[str, str], node: Node) -> bool:
    """Whether it is the result of an operator, which the backward reads, and the operator's own backward reads all of
    which it is made. ``backwards``: the names of the operators' backwards, by theirs."""
    operator = _operator(node)
    if operator not in backwards or private.POLICY in node.meta:
        return False
    if not any(map(views.is_backward, _readers(node, operator))):
        return False
    return all(backwards[operator] in map(_operator, x.users) for x in _inputs(node, operator))


def _operator(node: Node) -> str:
    """The name of the operator that was decomposed to the node among others. The operator itself is copied."""
    return str(node.meta.get("original_aten"))


def _readers(node: Node, operator: str) -> Iterator[Node]:
    """The users of a node and of its views, beyond the operator that it is a part of."""
    return (user for user in readers(node, _VIEWS) if _operator(user) != operator)


def _inputs(node: Node, operator: str) -> set[Node]:
    """The tensors that an operator's result is made of."""
    found: set[Node] = set()
    left = [node]
    while left:
        for x in left.pop().all_input_nodes:
            (left.append if _operator(x) == operator else found.add)(x)
    return found


def made_once(inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Inputs of fewer axes as views for which Inductor keeps in memory what they are of."""
    axes = max(t.dim() for t in inputs if t is not None)

    def is_table(t: Tensor) -> bool:
        begin = t.storage_offset()
        begins = isinstance(begin, int) and begin == 0  # Inductor may take a view for one of its memory's beginning
        return begins and t.dim() < axes and t.is_floating_point() and t.is_contiguous()

    return [t.as_strided(t.shape, t.stride()) if t is not None and is_table(t) else t for t in inputs]
