"""Views that a backward keeps, in Inductor's joint graphs of forward and backward.

A kernel that reads a permuted view, as a convolution does of a tensor in channels_last, keeps that view for its
backward. Whatever else the backward reads of the tensor, such as where a ReLU is 0, the partition of the graph then
takes for a second one, and keeps a mask of it beside the view: it counts memory that elementwise operators alone read
twice. So they are made to read the view, permuted back, as everything is that the tensor's memory gives.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from .graphs import Writer

_PART = "partitioner_tag"
"""In the meta of a node: whether it is of the forward or of the backward."""
_permute = torch.ops.aten.permute.default


def is_backward(node: Node) -> bool:
    """Whether it is of the backward, as far as this torch says so."""
    return node.meta.get(_PART) == "is_backward"


def read_through(kernel: Node) -> None:
    """Lets the readers of each tensor of which the kernel reads a permuted view read that view."""
    for view in kernel.all_input_nodes:
        if view.target is _permute and view.args[0].op == "call_function":
            _read_through(view, view.args[0], list(view.args[1]))


def _read_through(view: Node, whole: Node, axes: list[int]) -> None:
    others = [n for n in whole.users if n.op != "output" and not (n.target is _permute and list(n.args[1]) == axes)]
    if not others or view.meta.get(_PART) != whole.meta.get(_PART):
        return
    whole.append(view)
    with whole.graph.inserting_after(view):
        back = Writer(view)(_permute, view, [axes.index(i) for i in range(len(axes))])
    for other in others:
        other.replace_input_with(whole, back)
