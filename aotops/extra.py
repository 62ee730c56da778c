"""Attributes as text, which ``extra`` is made from outside MindSpore (cuda_src/extra.cpp reads it)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from .op import ATTRIBUTE_TYPES, Attr, Op
from .spec import DEVICES


def encode(op: Op, attrs: Sequence[Attr], present: Sequence[bool] | None = None) -> str:
    """The attributes of a call, one per line. ``present``: for each of ``op.slots`` whether it is given.

    Raises:
        TypeError: a value is not of its attribute's type.
        ValueError: an integer of more than 64 bits; a number too large for a float; a string that no attribute may be.
    """
    if op.foreign:
        lines = [f"hosted={encode_foreign(op, attrs)}"]
    else:
        given = zip(op.attrs, op.canonical(attrs), strict=True)
        lines = [f"{name}={_text(value)}" for name, value in given if value is not None]
    if present is not None:
        n = len(op.inputs)
        lines += [f"inputs={_mask(present[:n])}", f"outputs={_mask(present[n:])}"]
    return "\n".join(lines)


def encode_foreign(op: Op, attrs: Sequence[Attr], dtypes: Sequence[str] = ()) -> str:
    """The attribute of a hosted operator's entries: which function is meant, and its attributes (hosted.cpp reads it).
    ``dtypes``: of inputs and outputs, where shapes are inferred without them."""
    foreign = op.foreign
    assert foreign is not None
    like = "".join(f"{op.inputs.index(op.same_spec_as[y]) if y in op.same_spec_as else -1}," for y in op.outputs)
    items = [
        f"{op.library.name}/{op.name}",
        *(foreign.symbols.get(device, "") for device in DEVICES),
        *map(str, (len(op.inputs), len(op.outputs), int(bool(op.workspace)))),
        like,
        "".join(f"{dtype}," for dtype in dtypes),
        _order(op) if foreign.order else "",
    ]
    for (name, kind), value in zip(op.attrs.items(), op.canonical(attrs), strict=True):
        if value is not None:
            items.append(f"{quote(name)}:{ATTRIBUTE_TYPES[kind.rstrip('?')].letter}{_foreign_text(value)}")
    return "".join(f"{item};" for item in items)


def _order(op: Op) -> str:
    assert op.foreign is not None
    places = {name: i for i, name in enumerate((*op.inputs, *op.outputs, *op.attrs))}
    return "".join(f"{name or ''}:{-1 if name is None else places[name]}," for name in op.foreign.order)


def _text(value: Any) -> str:
    """The text of a canonical value. Floats keep all digits."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return value if isinstance(value, str) else repr(value) if isinstance(value, float) else str(int(value))


def _foreign_text(value: Any) -> str:
    if isinstance(value, tuple):
        if any(isinstance(row, tuple) for row in value):
            return "".join(f"{_foreign_text(row)}|" for row in value)
        return ",".join(map(_foreign_text, value))
    return quote(value, safe="") if isinstance(value, str) else _text(value)


def _mask(present: Sequence[bool]) -> int:
    return sum(1 << i for i, given in enumerate(present) if given)
