"""Images that Inductor has laid out with their channels last.

Where a graph has convolutions of torch's, Inductor may store their images as NHWC, and what is computed before and
after them too, whatever strides were traced. If an operator took them with the strides that were traced, they would be
copied twice in the forward and again in the backward. It reads and writes them as they are instead, by the attribute
that says where channels are.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from aotops.op import Op

from . import private
from .graphs import EXACT
from .images import Images

_LAST, _SECOND = (0, 2, 3, 1), (0, 3, 1, 2)
"""From (N, C, H, W) to (N, H, W, C), and back."""
_TRACED = "aotops_traced"
_following: set[Any] = set()


def follow(lowering: ModuleType, op: Op, images: Images, overload: Any) -> None:
    """Makes the lowering of an operator, or of its backward, take images as x is laid out."""
    ir, lowered = import_module(private.IR), lowering.lowerings[overload]
    x, attr = op.inputs.index("x"), len(op.inputs) + list(op.attrs).index(images.attr)
    inputs, results = images.among(op.inputs), images.among(op.results)

    def lower(*args, **kwargs):
        if len(args) <= attr or args[attr] != images.second or not _is_channels_last(ir, args[x]):
            args, kwargs = _as_traced(lowering, overload, args, kwargs)
            return lowered(*args, **kwargs)
        permute, kernel = lowering.lowerings[lowering.aten.permute.default], ir.ExternKernel
        given = [*args[:attr], images.last, *args[attr + 1 :]]
        for i, slot in enumerate(op.inputs):
            if args[i] is not None:
                box = permute(kernel.require_channels_last(args[i]), _LAST) if slot in inputs else args[i]
                given[i] = kernel.require_contiguous(box)
        returned = lowered(*given, **kwargs)
        one = not isinstance(returned, (list, tuple))
        boxes = [
            permute(box, _SECOND) if name in results and box is not None else box
            for name, box in zip(op.results, (returned,) if one else returned, strict=True)
        ]
        return boxes[0] if one else boxes

    lowering.lowerings[overload] = lower
    _following.add(overload)


def set_free(node: torch.fx.Node) -> None:
    """Keeps Inductor from bringing a call's arguments to the strides that were traced before it is lowered."""
    if node.target in _following and EXACT in node.meta:
        node.meta[_TRACED] = node.meta.pop(EXACT)


def _is_channels_last(ir: ModuleType, box: Any) -> bool:
    try:
        layout = ir.as_storage_and_layout(box, freeze=False)[1]
        _, c, h, w = map(int, layout.size)
        strides = tuple(map(int, layout.stride))
    except (NotImplementedError, TypeError, ValueError):  # not in memory yet; symbolic; other axes
        return False
    return c > 1 and h * w > 1 and strides == (h * w * c, 1, w * c, c)


def _as_traced(lowering: ModuleType, overload: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """The arguments, in the strides that were traced, if ``set_free`` has kept Inductor from seeing to that."""
    if (traced := lowering.V.graph.current_node.meta.get(_TRACED)) is None:
        return args, kwargs
    normalized = torch.fx.operator_schemas.normalize_function
    return lowering.constrain_to_fake_tensors(*normalized(overload, args, kwargs), *normalized(overload, *traced))
