"""Attributes as text: what ``extra`` is made of outside MindSpore (cuda_src/host/extra.cpp reads it)."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

from .op import Attr, Op


def attr_text(kind: str, value: Any) -> str:
    """One attribute's value, of a type of ``Op.attrs``. Floats keep all their digits."""
    kind = kind.removesuffix("?")
    if kind == "float":
        return repr(float(value))
    if kind == "int[]":
        return ",".join(str(index(v)) for v in value)
    return value.replace("\n", "\\n") if kind == "str" else str(index(value))


def encode(op: Op, attrs: Sequence[Attr], present: Sequence[bool] | None = None) -> str:
    """The attributes of a call, one a line. ``present`` says for each of ``op.slots`` whether it is given.

    Raises:
        TypeError: a value that is not of its attribute's type.
    """
    plain = op.canonical(attrs)
    given = [(name, kind, v) for (name, kind), v in zip(op.attrs.items(), plain, strict=True) if v is not None]
    lines = [f"{name}={attr_text(kind, value)}" for name, kind, value in given]
    if present is not None:
        n = len(op.inputs)
        lines += [f"inputs={_mask(present[:n])}", f"outputs={_mask(present[n:])}"]
    return "\n".join(lines)


def _mask(present: Sequence[bool]) -> int:
    return sum(1 << i for i, given in enumerate(present) if given)
