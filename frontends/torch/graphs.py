"""Edits of Inductor's joint graphs of forward and backward."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_map

_aten = torch.ops.aten
RESHAPES = {_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default}
"""Operators whose result has the elements of their first argument, in its order."""
EXACT = "eager_input_vals"
"""In the meta of a node whose inputs must have certain strides: tensors that have them."""


def value_of(node: Any) -> Any:
    """The fake tensor that a node is, or None."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def items_of(node: Node, i: int) -> list[Node]:
    """The nodes that are this result of a call with several."""
    return [user for user in node.users if user.target is operator.getitem and user.args[1] == i]


def readers(node: Node, views: Container[Any]) -> Iterator[Node]:
    """The users of a node and of its views, which are calls of these operators."""
    for user in node.users:
        if user.target in views:
            yield from readers(user, views)
        else:
            yield user


class Writer:
    """Adds nodes to a graph, as parts of what another node stands for: its part of the graph, forward or backward, and
    its place in the source."""

    def __init__(self, model: Node) -> None:
        self.graph, self.target, self.is_exact = model.graph, model.target, EXACT in model.meta
        own = ("val", "tensor_meta", "original_aten", EXACT)
        self.meta = {key: value for key, value in model.meta.items() if key not in own}
        self.mode = next(value_of(n) for n in (model, *model.all_input_nodes) if value_of(n) is not None).fake_mode

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        values = tree_map(lambda a: a.meta["val"] if isinstance(a, Node) else a, args)
        node = self.graph.call_function(target, args, kwargs)
        with self.mode:
            node.meta = {**self.meta, "val": target(*values, **kwargs)}
        is_alike = getattr(target, "namespace", None) == getattr(self.target, "namespace", "")
        if is_alike and self.is_exact:  # else Inductor would choose the strides of its inputs
            node.meta[EXACT] = (values, {})
        return node
