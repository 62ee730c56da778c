"""Negated views as inputs of a graph that Inductor compiles.

The code that it writes reads the memory of an input, without the sign that a negated view gives it: results of torch's
own operators are wrong too. So each such input is read by an operator that knows the sign, when the code runs: the
copies that torch makes of an input, for a CUDA graph or an alignment, are not negated.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

import torch

from ..imports import after_import
from . import graphs, private

_NAME = "without_sign"


def register(namespace: torch.library.Library) -> None:
    namespace.define(f"{_NAME}(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    # the dispatcher negates a negated x before it comes here
    namespace.impl(_NAME, torch.clone, "CompositeExplicitAutograd")
    operator = getattr(getattr(torch.ops, namespace.ns), _NAME).default
    after_import(private.JOINT_GRAPH, lambda: _edit_first(operator))
    after_import(private.LOWERING, lambda: _make_fallback(operator))


def _make_fallback(operator: Any) -> None:
    with suppress(Exception):  # Inductor makes one of an operator that it does not know
        import_module(private.LOWERING).make_fallback(operator, warn=False)


def _edit_first(operator: Any) -> None:
    """Before the other passes, of which one drops a copy that resolves a sign."""
    passes = import_module(private.JOINT_GRAPH)
    first = getattr(passes, private.FIRST_PASS, None)
    if first is None:
        return

    def then(model: torch.fx.GraphModule) -> None:
        first(model)
        _resolve(model.graph, operator)

    setattr(passes, private.FIRST_PASS, then)


def _resolve(graph: torch.fx.Graph, operator: Any) -> None:
    for node in graph.find_nodes(op="placeholder"):
        x = graphs.value_of(node)
        if x is None or not x.is_neg() or not node.users:
            continue
        # a graph that writes to the input does so to the input
        users = [user for user in node.users if not _writes_to(user, node)]
        if any(user.target is torch.ops.aten.as_strided.default for user in users):  # it reads memory, not values
            raise NotImplementedError("torch.compile: as_strided of a negated view: call resolve_neg() before")
        with graph.inserting_after(node):
            read = graph.call_function(operator, (node,))
        with x.fake_mode:
            read.meta["val"] = operator(x)
        for user in users:
            user.replace_input_with(node, read)


def _writes_to(user: torch.fx.Node, node: torch.fx.Node) -> bool:
    return user.target is torch.ops.aten.copy_.default and user.args[0] is node
