"""Images in channels_last, which plain calls pass to kernels that have the channels last, without views of them: each
view is a node of autograd's, forward and backward. Other calls make the views (compositions.py)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from aotops.op import Attr, Op
from aotops.ops import BUILTIN


class Images(NamedTuple):
    """The slots of an operator that have channels, and the attribute that tells their axis."""

    slots: tuple[str, ...]
    attr: str
    second: Attr
    """Its value where they are the second axis, as in torch's tensors."""
    last: Attr
    most_axes: int

    def among(self, slots: Collection[str]) -> frozenset[str]:
        """The slots of images among those of the operator or of its backward."""
        return frozenset(slot for image in self.slots for slot in (image, f"d{image}") if slot in slots)


_IMAGES = {
    "batch_norm": Images(("x", "y"), "axis", 1, -1, 32),
    "batch_norm_relu": Images(("x", "residual", "y"), "axis", 1, -1, 32),
    "conv2d": Images(("x", "weight", "y"), "layout", "NCHW", "NHWC", 4),
}


def images_of(op: Op) -> Images | None:
    return _IMAGES.get(op.name) if op.library is BUILTIN else None


def _moved(
    slots: Collection[str], names: Collection[str], tensors: Sequence[Any], axis: int, to: int
) -> tuple[Any, ...]:
    """The tensors, with an axis of those in ``slots`` moved."""
    return tuple(
        t.movedim(axis, to) if name in slots and isinstance(t, Tensor) else t
        for name, t in zip(names, tensors, strict=True)
    )


def moved_backward(images: Images, op: Op, run: Callable[..., Any]) -> Callable[..., Any]:
    """The backward in Python, ``run``, of tensors in channels_last."""
    slots, dys = images.among(op.slots), [f"d{y}" for y in op.outputs]
    gradients = images.among(dys)

    def backward(saved: Sequence[Any], grads: Sequence[Any], needed: Any, ctx: Any) -> tuple[Any, ...]:
        given = _moved(slots, op.saved, saved, 1, -1), _moved(gradients, dys, grads, 1, -1)
        return _moved(slots, op.inputs, run(*given, needed, ctx), -1, 1)

    return backward
