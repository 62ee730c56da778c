"""Products of Inductor's graphs whose columns are padded to whole lines, for operators that may take longer ones.

A product of 30522 columns runs at half the rate of one of 30528, whose lines are aligned. Inductor pads the operands of
products itself, by copies that it fuses with what computes them. It can fuse none with a kernel of ours: neither with
one that reads the product nor with one whose result is multiplied next. So where a definition states that its operator
may take more columns (``Op.padding``), the product in front of it is computed with more, from a padded weight, and the
gradient stays that long up to the products behind it.

This is for the joint graph of forward and backward, which shows who reads the product.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from aotops.op import Op, Padding

from ..torch_schema import splitter
from .graphs import RESHAPES, Writer, items_of, value_of

_aten = torch.ops.aten

LINE = 64
"""Columns are padded to a multiple of it: 128 bytes of 16 bits, which a GPU reads and writes at once."""
FROM = 64 * LINE
"""Columns from which that is worth while: at most a 64th more of them."""


class Padded(NamedTuple):
    """A call of an operator whose input is a product that nobody else reads, and what can be padded with it."""

    op: Op
    padding: Padding
    node: Node
    product: Node
    backwards: tuple[Node, ...]
    columns: int
    more: int


def find(op: Op, node: Node, backward: Any, is_served: Callable[[Any], bool]) -> Padded | None:
    """Finds what can be padded of this call; None if nothing can.

    Args:
        backward: the overload of the operator's backward.
        is_served: whether the products of a tensor may be computed by torch.
    """
    padding = op.padding
    assert padding is not None
    if node.kwargs or len(node.args) != len(op.inputs) + len(op.attrs):
        return None
    inputs, attrs, _ = splitter(op)(node.args)
    x = inputs[op.inputs.index(padding.slot)]
    value = value_of(x)
    if value is None or value.dim() != 2 or not is_served(value):
        return None
    columns = value.shape[-1]
    if not isinstance(columns, int) or columns < FROM or columns % 8 == 0:
        return None
    product = _product_of(x, node)
    if product is None or not padding.holds(op.call(attrs, [None if t is None else value_of(t).shape for t in inputs])):
        return None
    backwards = _backwards(op, node, backward)
    return None if backwards is None else Padded(op, padding, node, product, backwards, columns, -columns % LINE)


def pad(found: Padded) -> None:
    """Rewrites the graph."""
    op, padding, node, product, backwards, columns, more = found
    graph = node.graph
    with graph.inserting_before(product):
        x = _padded_product(Writer(product), product, columns, more, padding.value)
    write = Writer(node)
    with graph.inserting_before(node):
        given = dict(zip(op.inputs, node.args, strict=False)) | {padding.slot: x}
        for slot in padding.indices:  # one that is out of range stays so
            is_beyond = write(_aten.ge.Scalar, given[slot], columns)
            moved = write(_aten.add.Tensor, given[slot], more)
            given[slot] = write(_aten.where.self, is_beyond, moved, given[slot])
        call = write(node.target, *given.values(), *node.args[len(op.inputs) :])
        results = {y: write(operator.getitem, call, i) for i, y in enumerate(op.results)}
    for i, y in enumerate(op.results):
        if y not in padding.results:
            for old in items_of(node, i):
                old.replace_all_uses_with(results[y])
    for old in backwards:
        _pad_backward(found, old, given | results)
    graph.eliminate_dead_code()


def _pad_backward(found: Padded, node: Node, named: Mapping[str, Node]) -> None:
    """A call of the backward, and the products that read its gradient."""
    op, backward = found.op, found.op.backward
    assert backward is not None
    write = Writer(node)
    given = {**named, **{slot: named[residual] for slot, residual in op.instead.items()}}
    inputs = (given.get(slot, old) for slot, old in zip(backward.inputs, node.args, strict=False))
    with node.graph.inserting_before(node):
        dx = write(node.target, *inputs, *node.args[len(backward.inputs) :])
        short = write(_aten.slice.Tensor, dx, -1, 0, found.columns)
    node.replace_all_uses_with(short)
    _pad_readers(short, dx, found.columns, found.columns + found.more)


# ------------------------------------------------------------------------------------------------------------- finding


def _product_of(x: Any, reader: Node) -> Node | None:
    """The product that x is, perhaps a view of it, if nobody else reads either."""
    while isinstance(x, Node) and set(x.users) == {reader} and not x.kwargs:
        if x.target in (_aten.mm.default, _aten.addmm.default):
            bias = x.args[0] if x.target is _aten.addmm.default else None
            return x if bias is None or value_of(bias).dim() == 1 else None
        if x.target not in RESHAPES:
            return None
        reader, x = x, x.args[0]
    return None


def _backwards(op: Op, node: Node, backward: Any) -> tuple[Node, ...] | None:
    """The calls of the backward, which alone read the residuals; None if others do, or if it reads more of the
    forward's."""
    assert op.padding is not None
    assert op.backward is not None
    calls: dict[Node, None] = {}
    for i, y in enumerate(op.results):
        if y in op.padding.results:
            for item in items_of(node, i):
                calls |= dict.fromkeys(item.users)
    inputs = op.backward.inputs
    for call in calls:
        if call.target is not backward or call.kwargs or len(op.backward.results) != 1:
            return None
        slots = {inputs[i] for i, arg in enumerate(call.args) if isinstance(arg, Node) and arg.args[:1] == (node,)}
        if not slots.issubset({*op.padding.results, *op.instead}) or slots.isdisjoint(op.padding.results):
            return None
        if any(call.args[inputs.index(slot)] is not node.args[op.inputs.index(slot)] for slot in op.padding.indices):
            return None
        if not {*op.instead}.issubset(slots):
            return None
    return tuple(calls)


# ------------------------------------------------------------------------------------------------------------- writing


def _padded_product(write: Writer, product: Node, columns: int, more: int, value: float) -> Node:
    """The product with more columns: zeros of the weight, and this value as a bias."""
    *bias, a, b = product.args
    if bias:
        long_bias = write(_aten.constant_pad_nd.default, bias[0], [0, more], value)
    else:
        like = {"dtype": value_of(a).dtype, "device": value_of(a).device, "layout": torch.strided, "pin_memory": False}
        zeros = write(_aten.full.default, [columns], 0.0, **like)
        long_bias = write(_aten.constant_pad_nd.default, zeros, [0, more], value)
    return write(_aten.addmm.default, long_bias, a, _longer(write, b, 1, more))


def _longer(write: Writer, matrix: Any, axis: int, more: int) -> Node:
    """A matrix with more rows or columns, of zeros. A transposed one stays the transpose of one in memory."""
    if _is_transpose(matrix):
        inner = _longer(write, matrix.args[0], 1 - axis, more)
        return write(_aten.permute.default, inner, [1, 0])
    return write(_aten.constant_pad_nd.default, matrix, [0, more] if axis else [0, 0, 0, more], 0.0)


def _is_transpose(node: Any) -> bool:
    if not isinstance(node, Node) or value_of(node) is None or value_of(node).dim() != 2:
        return False
    swaps = {_aten.permute.default: ([1, 0],), _aten.t.default: (), _aten.transpose.int: (0, 1)}
    return node.target in swaps and tuple(node.args[1:]) in (swaps[node.target], (-2, -1))


def _pad_readers(short: Node, long: Node, columns: int, longer: int) -> None:
    """Lets the products that read a matrix of which ``short`` has the first columns, or a view of it, read ``long``
    instead. All others read ``short``."""
    graph = short.graph
    for reader in list(short.users):
        write = Writer(reader)
        with graph.inserting_before(reader):
            if reader.target in RESHAPES and list(reader.args[1])[-1:] == [columns]:
                _pad_readers(reader, write(reader.target, long, [*reader.args[1][:-1], longer]), columns, longer)
            elif reader.target is _aten.mm.default and reader.args[0] is short:
                weight = _longer(write, reader.args[1], 0, longer - columns)
                reader.replace_all_uses_with(write(reader.target, long, weight))
            elif _is_transpose(reader):
                turned = write(_aten.permute.default, long, [1, 0])
                for product in list(reader.users):
                    if product.target is _aten.mm.default and product.args[0] is reader:
                        _pad_rows(product, turned, columns)


def _pad_rows(product: Node, longer: Node, rows: int) -> None:
    write = Writer(product)
    with product.graph.inserting_before(product):
        whole = write(_aten.mm.default, longer, product.args[1])
        product.replace_all_uses_with(write(_aten.slice.Tensor, whole, 0, 0, rows))
