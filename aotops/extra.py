"""Attributes as text: what ``extra`` is made of outside MindSpore (cuda_src/host/extra.cpp reads it)."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

from .op import Attr, Op

_WIDE = 1 << 63  # integers are of 64 bits, with a sign


def encode(op: Op, attrs: Sequence[Attr], present: Sequence[bool] | None = None) -> str:
    """The attributes of a call, one a line. ``present`` says for each of ``op.slots`` whether it is given.

    Raises:
        TypeError: a value that is not of its attribute's type.
        ValueError: an integer of more than 64 bits; a number too large for a float; a string that no attribute may be.
    """
    op.check_attrs(attrs)
    given = [(name, kind, v) for (name, kind), v in zip(op.attrs.items(), attrs, strict=True) if v is not None]
    lines = [f"{name}={_text(f'{op.name}: {name}', kind.removesuffix('?'), value)}" for name, kind, value in given]
    if present is not None:
        n = len(op.inputs)
        lines += [f"inputs={_mask(present[:n])}", f"outputs={_mask(present[n:])}"]
    return "\n".join(lines)


def _text(what: str, kind: str, value: Any) -> str:
    """One attribute's value, of a type of ``Op.attrs``; ``what`` names it in an error. Floats keep all their digits."""
    if kind == "str":
        return _word(what, value)
    if kind == "float":
        return repr(_float(what, value))
    return ",".join(_integer(what, v) for v in (value if kind == "int[]" else (value,)))


def _word(what: str, value: str) -> str:
    # a NUL would end the text in C, and a line's end the attribute
    if not (value.isascii() and value.isprintable()):
        raise ValueError(f"{what} is {value!r}, expected printable ASCII characters")
    return str(value)


def _float(what: str, value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{what} is an integer of {index(value).bit_length()} bits, expected a float") from None


def _integer(what: str, value: Any) -> str:
    number = index(value)
    if not -_WIDE <= number < _WIDE:
        raise ValueError(f"{what} has an integer of {number.bit_length()} bits, expected one from -2**63 to 2**63 - 1")
    return str(number)


def _mask(present: Sequence[bool]) -> int:
    return sum(1 << i for i, given in enumerate(present) if given)
