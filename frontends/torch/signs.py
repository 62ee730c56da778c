"""Negated views as inputs of a graph that Inductor compiles.

The code that it writes reads the memory of an input, without the sign that a negated view gives it: results of torch's
own operators are wrong too. So each such input is read by an operator that knows the sign, when the code runs: the
copies that torch makes of an input, for a CUDA graph or an alignment, are not negated. What the graph writes to such an
input is given the sign that its memory then needs, likewise.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..imports import after_import
from . import graphs, private

_READ, _WRITTEN = "without_sign", "with_sign_of"


def register(namespace: torch.library.Library) -> None:
    namespace.define(f"{_READ}(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    # the dispatcher negates a negated x before it comes here
    namespace.impl(_READ, torch.clone, "CompositeExplicitAutograd")
    namespace.define(f"{_WRITTEN}(Tensor values, Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    namespace.impl(_WRITTEN, _copied, "CompositeExplicitAutograd")
    namespace.impl(_WRITTEN, _negated, "Negative")  # where a tensor is negated
    operators = [getattr(getattr(torch.ops, namespace.ns), name).default for name in (_READ, _WRITTEN)]
    after_import(private.JOINT_GRAPH, lambda: _edit_first(*operators))
    after_import(private.LOWERING, lambda: _make_fallbacks(operators))


def _copied(values: Tensor, x: Tensor) -> Tensor:
    # Inductor chooses the strides of values: results, whose strides it is told, are contiguous whatever those are.
    return values.clone(memory_format=torch.contiguous_format)


def _negated(values: Tensor, x: Tensor) -> Tensor:
    return values.contiguous().neg() if x.is_neg() else _copied(values, x)


def _make_fallbacks(operators: Iterable[Any]) -> None:
    for operator in operators:
        with suppress(Exception):  # Inductor makes one of an operator that it does not know
            import_module(private.LOWERING).make_fallback(operator, warn=False)


def _edit_first(read: Any, written: Any) -> None:
    """Before the other passes, of which one drops a copy that resolves a sign."""
    first = private.optional_of(private.JOINT_GRAPH, private.FIRST_PASS, "compiled code ignores the sign of an input")
    if first is None:
        return

    @functools.wraps(first)
    def then(model: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        result = first(model, *args, **kwargs)
        _resolve(model.graph, read, written)
        return result

    setattr(import_module(private.JOINT_GRAPH), private.FIRST_PASS, then)


def _resolve(graph: torch.fx.Graph, read: Any, written: Any) -> None:
    for node in graph.find_nodes(op="placeholder"):
        x = graphs.value_of(node)
        if x is None or not x.is_neg() or not node.users:
            continue
        writers = [user for user in node.users if _writes_to(user, node)]
        users = [user for user in node.users if user not in writers]
        if any(user.target is torch.ops.aten.as_strided.default for user in users):  # it reads memory, not values
            raise NotImplementedError("torch.compile: as_strided of a negated view: call resolve_neg() before")
        for user in writers:
            with graph.inserting_before(user):
                values = _call(graph, written, user.args[1], node)
            user.update_arg(1, values)
        if users:
            with graph.inserting_after(node):
                values = _call(graph, read, node)
            for user in users:
                user.replace_input_with(node, values)


def _call(graph: torch.fx.Graph, operator: Any, *nodes: Any) -> torch.fx.Node:
    tensors = [graphs.value_of(node) for node in nodes]
    call = graph.call_function(operator, nodes)
    with tensors[-1].fake_mode:
        call.meta["val"] = operator(*tensors)
    return call


def _writes_to(user: torch.fx.Node, node: torch.fx.Node) -> bool:
    return user.target is torch.ops.aten.copy_.default and user.args[0] is node
