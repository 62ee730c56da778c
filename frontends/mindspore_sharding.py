"""MindSpore's Layouts for semi-automatic parallelism, from what an operator's definition states of its axes.

MindSpore's CPU build refuses semi-automatic parallelism ("Invalid backend: CPU"): no program was run with these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspore.parallel import Layout

from aotops.library import Library
from aotops.op import Op
from aotops.ops import BUILTIN
from aotops.sharding import Sharding, sharding
from aotops.spec import shape_text

WHOLE = "None"
"""MindSpore's name for an axis that is not split."""


def layouts(
    name: str,
    mesh: Layout,
    split: Mapping[str, Sequence[str]],
    *arguments: Any,
    library: Library = BUILTIN,
    **keywords: Any,
) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """The Layouts of the inputs that are given, and of all that the entry writes: the arguments of ``shard`` of a
    primitive (``registered`` in mindspore.py) with the attribute ``self_define_shard``.

    Args:
        name: the operator's.
        mesh: the devices, such as ``Layout((2, 2), ("dp", "tp"))``.
        split: by input, the name of a mesh axis, or "None", for each of its axes. It may leave out inputs; an axis that
            two of them share need be named in one.
        arguments, keywords: those of the operator's function. The tensors are examples, of the shapes of the whole.

    Raises:
        ValueError: an axis that the kernel needs whole; two mesh axes for one axis; a length that its devices do not
            divide; a name that is no input's.
        NotImplementedError: an axis that is summed over. The outputs would be partial sums, which a Layout does not
            express.
    """
    op = library.ops[name]
    inputs, attrs = op.bind(*arguments, **keywords)
    shapes = {slot: tuple(t.shape) for slot, t in zip(op.inputs, inputs, strict=True) if t is not None}
    stated = sharding(op, op.canonical(attrs), [shapes.get(slot) for slot in op.inputs])
    chosen: dict[str, str] = {}
    for slot, names in split.items():
        if slot not in shapes or len(names) != len(shapes[slot]):
            given = ", ".join(f"{each} {shape_text(shape)}" for each, shape in shapes.items())
            raise ValueError(f"{name}: split has {slot} {tuple(names)}, expected a name for each axis of {given}")
        for position, alias in enumerate(names):
            if alias != WHOLE:
                _choose(op, stated, mesh, slot, position, alias, chosen)
    slots = {} if stated is None else stated.slots

    def layout(slot: str) -> Layout:
        return mesh(*(chosen.get(axis, WHOLE) for axis in slots[slot]))

    outputs = tuple(layout(y) for y in op.results if y in slots)
    return tuple(map(layout, shapes)), (*outputs, *(mesh(WHOLE) for _ in op.workspace))


def _choose(
    op: Op, stated: Sharding | None, mesh: Layout, slot: str, position: int, alias: str, chosen: dict[str, str]
) -> None:
    """Adds an axis that is split, by its name."""
    where = f"{op.name}: axis {position} of {slot}"
    axis = stated.axis(slot, position) if stated else None
    if axis is None:
        raise ValueError(f"{where} is split over {alias}, expected it whole")
    if axis.partial:
        sums = ", ".join(sorted(axis.partial))
        raise NotImplementedError(f"{where} is summed over: of its parts, {sums} would be partial sums")
    if chosen.setdefault(axis.name, alias) != alias:
        raise ValueError(
            f"{where} is split over {alias}, expected {chosen[axis.name]}, as the same axis of another tensor"
        )
    described = mesh().to_dict()
    parts = dict(zip(described["alias_name"], described["device_matrix"], strict=True)).get(alias)
    if parts is None:
        raise ValueError(f"{where} is split over {alias}, expected one of {', '.join(described['alias_name'])}")
    if axis.size % parts:
        raise ValueError(f"{where} has length {axis.size}, expected a multiple of the {parts} devices of {alias}")
