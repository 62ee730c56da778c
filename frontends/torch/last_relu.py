"""The last ReLU of a network of images, in Inductor's joint graphs of forward and backward.

A mean reads it, whose gradient the backward expands and masks by where the ReLU is 0. The partition of the graph keeps
that mask, or has the ReLU computed again, by how many nodes come before: of ResNet-50 it keeps one in torch's graph and
not in ours. Masked by a tensor in memory the gradient is an expression so short that each of its readers computes it.
Masked by what the ReLU is made of, a batch norm and a residual, it is a long one. Inductor writes it then, 2 or 4 bytes
an element in place of 1, and a residual keeps it while the block's gradients are made, at the peak of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from . import private
from .graphs import readers

_aten = torch.ops.aten
_MEANS = {_aten.mean.dim, _aten.sum.dim_IntList}
_OPERANDS = {
    _aten.div.Scalar: 0, _aten.div.Tensor: 0, _aten.permute.default: 0, _aten.clone.default: 0, _aten.copy.default: 1,
}  # fmt: skip


def register(on_images: Collection[Any], on_each: Callable[..., None]) -> None:
    """``on_images``: this library's operators of images. ``on_each``: lets a function run on each call of an operator
    for which a condition holds."""
    if on_images:
        on_each(_aten.relu.default, keep_mask, partial(is_worth_a_mask, on_images))


def keep_mask(relu: Node) -> None:
    """Keeps the partition from computing the ReLU again. What it then keeps is the smallest that the backward reads."""
    relu.meta[private.POLICY] = private.CheckpointPolicy.MUST_SAVE


def is_worth_a_mask(on_images: Collection[Any], relu: Node) -> bool:
    """Whether the backward reads nothing of the ReLU but the mask of an expanded gradient. A graph without operators of
    this library is torch's alone."""
    found = list(readers(relu, {_aten.permute.default}))  # a ReLU in place on a view is permuted
    masks = [node for node in found if node.target is _aten.le.Scalar and node.args[1] == 0]
    others = {*found} - {*masks}
    if private.POLICY in relu.meta or not masks or any(node.target not in _MEANS for node in others):
        return False
    return all(_masks_an_expansion(mask) for mask in masks) and _is_last(on_images, relu)


def _masks_an_expansion(mask: Node) -> bool:
    return all(node.target is _aten.where.self and _is_expansion(node.args[2]) for node in mask.users)


def _is_expansion(node: Any) -> bool:
    """Whether it is an expanded tensor, perhaps divided by the number of a mean's terms, permuted or copied."""
    while isinstance(node, Node) and (operand := _OPERANDS.get(node.target)) is not None:
        node = node.args[operand]
    return isinstance(node, Node) and node.target is _aten.expand.default


def _is_last(on_images: Collection[Any], relu: Node) -> bool:
    """Whether no convolution comes after it: its mask is made last and read first. Any other would be kept longer than
    the gradient that it replaces."""
    nodes = list(relu.graph.nodes)
    at = nodes.index(relu)
    is_later = any(node.target in on_images or node.target is _aten.convolution.default for node in nodes[at:])
    return not is_later and any(node.target in on_images for node in nodes[:at])
