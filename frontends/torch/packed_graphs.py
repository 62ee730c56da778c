"""Attention of parts of one packed projection (packed_heads.py), in Inductor's joint graphs of forward and backward.

``contiguous.with_copies`` copies each part, in the forward and again in the backward. Here the call becomes one of
``qkv_attention``, of the projection itself, and its backward too. The gradients of the parts are then views of one
tensor, and where the graph puts them together, it is that tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from aotops.op import Op
from aotops.ops import OPS

from ..torch_schema import splitter
from .graphs import RESHAPES, Writer, items_of, value_of
from .packed_heads import has_strides, strides_of

_PARTS: Any = OPS["attention"]
_PACKED: Any = OPS["qkv_attention"]
_aten = torch.ops.aten
_SPLITS = {_aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int}
_VIEWS = {
    *RESHAPES, _aten.permute.default, _aten.slice.Tensor, _aten.select.int, _aten.squeeze.dim, _aten.unsqueeze.default,
    *_SPLITS,
}  # fmt: skip


def register(overloads: Mapping[Op, Any], on_each: Callable[..., None]) -> None:
    """``on_each``: lets a function run on each call of an operator."""
    if {_PARTS, _PARTS.backward, _PACKED, _PACKED.backward} <= overloads.keys():
        on_each(overloads[_PARTS], partial(read_in_place, overloads))


class _Projection(NamedTuple):
    """A packed projection, and what it is split into: (..., sequence, heads, head_dim)."""

    node: Node
    rows: tuple[int, ...]
    heads: tuple[int, int, int]
    dim: int


def read_in_place(overloads: Mapping[Op, Any], node: Node) -> None:
    """Lets a call, and its backward, read the projection that its inputs are parts of, if they are."""
    found = _projection_of(_PARTS, node)
    if found is None:
        return
    of_parts, write = dict(zip(_PARTS.attrs, node.args[len(_PARTS.inputs) :], strict=True)), Writer(node)
    attrs = [*found.heads[:2], *(of_parts[name] for name in list(_PACKED.attrs)[2:])]
    with node.graph.inserting_before(node):
        qkv = write(_aten.view.default, found.node, [*found.rows, sum(found.heads) * found.dim])
        call = write(overloads[_PACKED], qkv, None, *attrs)
        rows, lse = write(operator.getitem, call, 0), write(operator.getitem, call, 1)
        y = write(_aten.view.default, rows, [*found.rows, found.heads[0], found.dim])
    users = [item for i in range(2) for item in items_of(node, i)]
    backwards = {user for item in users for user in item.users if user.target is overloads[_PARTS.backward]}
    for backward in sorted(backwards):
        if _projection_of(_PARTS.backward, backward) == found:
            _differentiate(overloads[_PACKED.backward], found, backward, (qkv, rows, lse), attrs)
    for i, result in enumerate((y, lse)):
        for item in items_of(node, i):
            item.replace_all_uses_with(result)
    node.graph.eliminate_dead_code()


def _differentiate(
    overload: Any, found: _Projection, node: Node, of_forward: Sequence[Node], attrs: Sequence[Any]
) -> None:
    (qkv, rows, lse), write, total = of_forward, Writer(node), sum(found.heads)
    with node.graph.inserting_before(node):
        dy = write(_aten.view.default, node.args[0], [*found.rows, found.heads[0] * found.dim])
        dqkv = write(overload, dy, qkv, None, rows, lse, *attrs)
        heads = write(_aten.view.default, dqkv, [*found.rows, total, found.dim])
        ends = found.heads[0], found.heads[0] + found.heads[1], total
        parts = [write(_aten.slice.Tensor, heads, -2, end - n, end) for n, end in zip(found.heads, ends, strict=True)]
    for i, part in enumerate(parts):
        for item in items_of(node, i):
            item.replace_all_uses_with(part)
    _join(found, dqkv, parts)


# ------------------------------------------------------------------------------------------------------------- finding


def _projection_of(op: Op, node: Node) -> _Projection | None:
    """The projection whose parts a call of attention, or of its backward, reads; None if there is none, or if the call
    has masks, dropout or heads before rows."""
    inputs, attrs, _ = splitter(op)(node.args)
    given = dict(zip(op.inputs, inputs, strict=True)) | dict(zip(op.attrs, attrs, strict=True))
    others = [given[slot] for slot in _PARTS.inputs[3:]]
    if node.kwargs or any(x is not None for x in others) or given["dropout"] or given["layout"] != "BSHD":
        return None
    copies = [given[slot] for slot in ("q", "k", "v")]
    if not all(x.target is _aten.clone.default for x in copies):
        return None
    views = [x.args[0] for x in copies]
    (node, *others), values = dict.fromkeys(map(_root, views)), [value_of(x) for x in views]
    whole = value_of(node)
    if others or whole is None or any(x is None for x in values):
        return None
    return _parts_of(node, whole, values)


def _root(node: Node) -> Node:
    """The tensor that a node is a view of."""
    while node.target in _VIEWS or (node.target is operator.getitem and node.args[0].target in _SPLITS):
        node = node.args[0]
    return node


def _parts_of(node: Node, whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> _Projection | None:
    q, k, v = parts
    numbers = [n for x in (whole, *parts) for n in (*x.shape, *x.stride(), x.storage_offset())]
    if not all(isinstance(n, int) for n in numbers) or q.dim() < 3 or k.shape != v.shape or not whole.is_contiguous():
        return None
    *rows, heads, dim = q.shape
    kv_heads = k.shape[-2]
    if k.shape != (*rows, kv_heads, dim) or whole.numel() != q.numel() + k.numel() + v.numel() or not whole.numel():
        return None
    strides = (*strides_of(rows, (heads + 2 * kv_heads) * dim), dim, 1)
    begins = [x.storage_offset() - whole.storage_offset() for x in parts]
    if begins != [0, heads * dim, (heads + kv_heads) * dim] or not all(has_strides(x, strides) for x in parts):
        return None
    return _Projection(node, tuple(rows), (heads, kv_heads, kv_heads), dim)


# ------------------------------------------------------------------------------------------------------------- joining


def _join(found: _Projection, dqkv: Node, parts: Sequence[Node]) -> None:
    """Reads the whole where the gradients of the parts are put together, as those of a split or of an unbind are."""
    for cat in _calls(_aten.cat.default, parts[0]):
        views, shape = cat.args[0], value_of(cat).shape
        axis = cat.args[1] if len(cat.args) > 1 else 0
        if [view.args[:1] for view in views] != [(part,) for part in parts]:
            continue
        if axis in (-1, len(shape) - 1) and all(map(_has_rows, views)):
            _read_whole(cat, dqkv, shape)
        elif axis == 0 and all(x.target is _aten.permute.default for x in views):
            _unstack(found, dqkv, cat)


def _has_rows(view: Node) -> bool:
    """Whether it is a part as rows, each of all its heads."""
    heads, dim = value_of(view.args[0]).shape[-2:]
    return view.target is _aten.view.default and view.args[1][-1] == heads * dim


def _unstack(found: _Projection, dqkv: Node, cat: Node) -> None:
    """Reads the whole where gradients as (..., heads, sequence, head_dim) are stacked, and moved to its order."""
    n = len(found.rows) - 1
    first = [*range(n), n + 1, n, n + 2]
    back = [*range(1, n + 1), n + 2, 0, n + 1, n + 3]
    shape = [*found.rows[:-1], found.heads[0], found.rows[-1], found.dim]
    if len(set(found.heads)) > 1 or any(list(view.args[1]) != first for view in cat.args[0]):
        return
    for stacked in _calls(_aten.view.default, cat, inside=False):
        if list(stacked.args[1]) != [3, *shape]:
            continue
        for moved in _calls(_aten.permute.default, stacked, inside=False):
            if list(moved.args[1]) == back:
                for whole in [*_calls(_aten.clone.default, moved, inside=False), moved]:
                    _read_whole(whole, dqkv, [*found.rows, 3, found.heads[0], found.dim])


def _calls(target: Any, node: Node, inside: bool = True) -> list[Node]:
    """The calls of an operator that read a node, or, ``inside``, a view of it."""
    readers = [user for view in node.users for user in view.users] if inside else list(node.users)
    return [user for user in dict.fromkeys(readers) if user.target is target]


def _read_whole(node: Node, dqkv: Node, shape: Sequence[int]) -> None:
    with node.graph.inserting_before(node):
        node.replace_all_uses_with(Writer(node)(_aten.view.default, dqkv, list(shape)))
