"""Attributes as text, which ``extra`` is made from outside MindSpore (cuda_src/extra.cpp reads it)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .op import Attr, Op


def encode(op: Op, attrs: Sequence[Attr], present: Sequence[bool] | None = None) -> str:
    """The attributes of a call, one per line. ``present``: for each of ``op.slots`` whether it is given.

    Raises:
        TypeError: a value is not of its attribute's type.
        ValueError: an integer of more than 64 bits; a number too large for a float; a string that no attribute may be.
    """
    given = [(name, value) for name, value in zip(op.attrs, op.canonical(attrs), strict=True) if value is not None]
    lines = [f"{name}={_text(value)}" for name, value in given]
    if present is not None:
        n = len(op.inputs)
        lines += [f"inputs={_mask(present[:n])}", f"outputs={_mask(present[n:])}"]
    return "\n".join(lines)


def _text(value: Any) -> str:
    """The text of a canonical value. Floats keep all digits."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return value if isinstance(value, str) else repr(value) if isinstance(value, float) else str(int(value))


def _mask(present: Sequence[bool]) -> int:
    return sum(1 << i for i, given in enumerate(present) if given)
