"""How an operator's call is split over devices: what ``Op.dims`` states of each slot's axes, for given shapes. The
frontends turn it into the sharding rules of their frameworks.

The statement names the axes of each slot, as in ``{"x": "... i", "weight": "o i", "y": "... o"}``:

- ``...``: any number of leading axes, first in the slot. They are aligned from the last and broadcast as in NumPy.
- A name: an axis that may be split. Outputs that have it are split as the inputs are. An output that lacks it is a sum
  over it: of a part of the inputs it is a partial sum. What a bilinear operator adds to it is added to one part.
- ``(name)``, in an output that lacks the axis: it does not depend on it, and is whole on every part.
- A name in CAPITALS: an axis that the entry takes, or writes, whole.
- ``0``: an axis of no elements. The slot is a partial sum of nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from .op import Attr, Op
from .spec import shape_text

Shape = tuple[Any, ...]
"""The dimensions are numbers, or a framework's symbolic ones."""

Dims = Callable[[Any], Mapping[str, str]]

_BROADCAST = "1"
"""The name of a leading axis of one element where others have more."""


@dataclass(frozen=True)
class Axis:
    """An axis that may be split: in every slot that has it, into the same parts."""

    name: str
    """As in the statement; ``...1`` is the last leading axis, ``...2`` the one before."""
    size: Any
    positions: Mapping[str, int]
    """By slot: which of its axes it is. Other inputs are given whole."""
    partial: frozenset[str]
    """Outputs that are partial sums if the axis is split: their sum over the parts is the result."""
    added: frozenset[str] = frozenset()
    """Inputs that are added to such a sum, and so to one of its parts (``Op.added``)."""
    composed: bool = False
    """The entry takes the axis whole: a call on parts of it is ``Op.parts``."""


@dataclass(frozen=True)
class Sharding:
    """The axes of a call of an operator that may be split.

    An output that is neither in an axis's ``positions`` nor in its ``partial`` is the same for every part. At most one
    of several axes is to be split over the same devices; over different ones, any.
    """

    slots: Mapping[str, tuple[str, ...]]
    """The names of the axes of each slot that is given: inputs, outputs, aliases and residuals. A name is in CAPITALS
    where the axis is whole, ``1`` where it is broadcast, ``0`` where it has no elements."""
    axes: tuple[Axis, ...]
    """The axes that may be split, in the order in which the inputs have them."""

    def axis(self, slot: str, position: int) -> Axis | None:
        """The axis at a position of a slot; None if it is whole."""
        name = self.slots[slot][position]
        return next((axis for axis in self.axes if axis.name == name), None)


def sharding(op: Op, attrs: Sequence[Attr], shapes: Sequence[Shape | None], composed: bool = False) -> Sharding | None:
    """The axes that ``op.dims`` states for a call; None if the operator states nothing, and every slot is whole.

    Args:
        attrs: one for each of ``op.attrs``.
        shapes: one for each of ``op.inputs``, None where it is absent.
        composed: with the axes that ``op.parts`` splits.

    Raises:
        ValueError: shapes that do not fit the statement.
        TypeError: a statement that does not fit the operator.
    """
    given = tuple(None if shape is None else tuple(shape) for shape in shapes)
    parse = _parsed if _is_hashable((attrs, given)) else _parsed.__wrapped__
    plain = parse(op, tuple(attrs), given, op.dims)
    if not composed or op.parts is None:
        return plain
    found = parse(op, tuple(attrs), given, op.parts.dims)
    assert found is not None
    names = {axis.name for axis in plain.axes} if plain else ()
    return Sharding(found.slots, tuple(replace(axis, composed=axis.name not in names) for axis in found.axes))


def _is_hashable(value: Any) -> bool:
    """torch's symbolic dimensions are not."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


@lru_cache(maxsize=4096)
def _parsed(op: Op, attrs: tuple[Attr, ...], shapes: tuple[Shape | None, ...], dims: Dims | None) -> Sharding | None:
    if dims is None and not op.elementwise:
        return None
    call = op.call(attrs, shapes)
    stated = _statement(op, call, dims)
    given = _shapes(op, call)
    if all(shape == () for shape in given.values()):  # dims may state axes that these do not have
        return Sharding(op.with_aliases(dict.fromkeys(given, ())), ())
    leading = _leading(op, stated, given)
    slots, same = {}, {}
    for slot, shape in given.items():
        slots[slot], same[slot] = _names(op, slot, stated[slot], shape, leading)
    sizes = _sizes(op, slots, given)
    outputs = [slot for slot in op.results if slot in slots]
    axes = tuple(_axis(op, name, size, slots, same, outputs) for name, size in sizes.items())
    return Sharding(op.with_aliases(slots), tuple(_with_aliases(op, axis) for axis in axes))


def _statement(op: Op, call: SimpleNamespace, dims: Dims | None) -> Mapping[str, str]:
    """The axes of each slot but the workspace. Without ``dims``, an elementwise operator has leading axes alone."""
    slots = {*op.inputs, *op.results}
    stated = dims(call) if dims else dict.fromkeys(slots, "...")
    if set(stated) != slots:
        odd = ", ".join(sorted(set(stated) ^ slots))
        raise TypeError(f"{op.name}: dims names {', '.join(stated)}, expected each slot once: {odd} is not")
    return stated


def _shapes(op: Op, call: SimpleNamespace) -> dict[str, Shape]:
    """The axes of every slot that is given."""
    shapes = {slot: getattr(call, slot) for slot in op.inputs}
    shapes |= {y: getattr(call, x) for y, x in op.same_spec_as.items()}
    shapes |= {y: tuple(shape(call)) for y, shape in op.shapes.items()}
    return {slot: shape for slot, shape in shapes.items() if shape is not None}


def _leading(op: Op, stated: Mapping[str, str], shapes: Mapping[str, Shape]) -> dict[int, Any]:
    """The sizes of the inputs' leading axes, broadcast, by their place before the others, from 1."""
    sizes: dict[int, Any] = {}
    for slot in op.inputs:
        if slot not in shapes or _is_scalar(op, slot, shapes[slot]):
            continue
        for place, size in enumerate(reversed(_before(stated[slot], shapes[slot])), 1):
            if place not in sizes or (_is_one(sizes[place]) and not _is_one(size)):
                sizes[place] = size
    return sizes


def _before(axes: str, shape: Shape) -> Shape:
    names = [name for name in axes.split() if name != "..." and name[0] != "("]
    return shape[: len(shape) - len(names)] if "..." in axes.split() else ()


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _is_scalar(op: Op, slot: str, shape: Shape) -> bool:
    return slot in op.accepts_scalar and shape == ()


def _names(op: Op, slot: str, axes: str, shape: Shape, leading: Mapping[int, Any]) -> tuple[tuple[str, ...], set[str]]:
    """The names of a slot's axes, and the axes that it does not depend on."""
    if _is_scalar(op, slot, shape):
        return (), set()
    same = {name[1:-1] for name in axes.split() if name[0] == "("}
    names = [name for name in axes.split() if name[0] != "("]
    before = _before(axes, shape)
    places = range(len(before), 0, -1)
    filled = [_BROADCAST if _is_one(n) and not _is_one(leading.get(i)) else f"...{i}"
              for i, n in zip(places, before, strict=True)]  # fmt: skip
    filled += names[1:] if names[:1] == ["..."] else names
    if len(filled) != len(shape):
        raise ValueError(f"{op.name}: {slot} has shape {shape_text(shape)}, expected the axes {axes or '()'}")
    if len(set(filled) - {_BROADCAST}) != len([n for n in filled if n != _BROADCAST]) or "..." in filled:
        raise TypeError(f"{op.name}: dims of {slot} is {axes!r}, expected each axis once, '...' first")
    return tuple(filled), same


def _sizes(op: Op, slots: Mapping[str, tuple[str, ...]], shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """The size of each axis that may be split."""
    sizes: dict[str, Any] = {}
    for slot, names in slots.items():
        for name, size in zip(names, shapes[slot], strict=True):
            if name in (_BROADCAST, "0") or name != name.lower():
                continue
            if name not in sizes and slot not in op.inputs:
                raise TypeError(f"{op.name}: dims of {slot} has {name}, expected an axis of an input")
            known = sizes.setdefault(name, size)
            if isinstance(known, int) and isinstance(size, int) and known != size:
                raise ValueError(f"{op.name}: {name} of {slot} has size {size}, expected {known}")
    return sizes


def _axis(
    op: Op,
    name: str,
    size: Any,
    slots: Mapping[str, tuple[str, ...]],
    same: Mapping[str, set[str]],
    outputs: Sequence[str],
) -> Axis:
    positions = {slot: names.index(name) for slot, names in slots.items() if name in names}
    lacking = (y for y in outputs if y not in positions and name not in same[y] and "0" not in slots[y])
    partial = frozenset(lacking)
    added = frozenset(slot for slot in op.added if slot in slots and slot not in positions) if partial else frozenset()
    return Axis(name, size, positions, partial, added)


def _with_aliases(op: Op, axis: Axis) -> Axis:
    partial = op.with_aliases(dict.fromkeys(axis.partial))
    return replace(axis, positions=op.with_aliases(axis.positions), partial=frozenset(partial))
