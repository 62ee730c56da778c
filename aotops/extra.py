"""Attributes as text: what ``extra`` is made of outside MindSpore (cuda_src/host/extra.cpp reads it)."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

from .op import Attr, Op


def attr_text(kind: str, value: Any) -> str:
    """One attribute's value, of a kind of ``Op.attrs``. Floats keep all their digits."""
    kind = kind.removesuffix("?")
    if kind == "float":
        return repr(float(value))
    if kind == "int[]":
        return ",".join(str(index(v)) for v in value)
    if kind == "str":
        if not isinstance(value, str) or "\n" in value:
            raise TypeError
        return value
    return str(index(value))


def encode(op: Op, attrs: Sequence[Attr], present: Sequence[bool] | None = None) -> str:
    """The attributes of a call, one a line. ``present`` says for each of ``op.slots`` whether it is given.

    Raises:
        TypeError: a value that is not of its attribute's kind.
    """
    lines = []
    for (name, kind), value in zip(op.attrs.items(), attrs, strict=True):
        if value is None and kind.endswith("?"):
            continue
        try:
            lines.append(f"{name}={attr_text(kind, value)}")
        except (TypeError, ValueError):
            raise TypeError(f"{op.name}: {name} is {value!r}, expected {kind}") from None
    if present is not None:
        n = len(op.inputs)
        lines += [f"inputs={_mask(present[:n])}", f"outputs={_mask(present[n:])}"]
    return "\n".join(lines)


def _mask(present: Sequence[bool]) -> int:
    return sum(1 << i for i, given in enumerate(present) if given)
