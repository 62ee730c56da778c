"""The launches of a call, computed in Python from the declaration: what the library's C++ must agree with, and what the
interpreter runs."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from . import declaration
from .declaration import Call, DeclarationError, Entry, Tensor

MULTIPROCESSORS = 132
"""The facts of the GPU of a plan that is made without one, here and in triton.h."""
ITEMSIZES = {
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8, "bool": 1, "int8": 1, "uint8": 1,
    "int16": 2,
}  # fmt: skip
_PACKED = {"i32": "i", "i64": "q", "fp32": "f", "fp64": "d", "i1": "b"}


class Placed(NamedTuple):
    """A tensor of a call."""

    address: int
    shape: tuple[int, ...]
    dtype: str


class Unplanned(Exception):
    """The call has no plan: it is refused."""


@dataclass(frozen=True)
class Launched:
    call: Call
    config: int
    hint: int
    grid: tuple[int, int, int]
    arguments: Mapping[str, Any]
    """By parameter, the values that are passed: a name of a tensor, or a number."""
    values: tuple[int, ...]
    """The words of the arguments, without the scratch of Triton."""


@dataclass(frozen=True)
class Names:
    """The dtypes and sizes of a call."""

    types: Mapping[str, str]
    leading: Mapping[str, tuple[int, ...]]
    numbers: dict[str, Any] = field(default_factory=dict)


def bind(entry: Entry, inputs: Mapping[str, Placed], attrs: Mapping[str, Any]) -> Names:
    """The names of a call whose shapes the library has accepted."""
    types = {entry.inputs[slot].type: placed.dtype for slot, placed in inputs.items()}
    numbers: dict[str, Any] = {}
    leading: dict[str, tuple[int, ...]] = {}
    for slot, placed in inputs.items():
        tensor = entry.inputs[slot]
        first = len(placed.shape) - len(tensor.axes)
        numbers |= {a.text: n for a, n in zip(tensor.axes, placed.shape[first:], strict=True) if a.text.isidentifier()}
        if tensor.leading:
            leading[tensor.leading] = placed.shape[:first]
            numbers[tensor.leading] = prod(placed.shape[:first])
    numbers |= {name: _ATTRIBUTES[kind](attrs[name]) for name, kind in entry.attrs.items()}
    for name, expression in entry.sizes.items():
        numbers[name] = expression.value(numbers)
    return Names(types, leading, numbers)


_ATTRIBUTES = {"int": int, "float": float, "bool": bool}


def shape_of(tensor: Tensor, names: Names) -> tuple[int, ...]:
    leading = names.leading[tensor.leading] if tensor.leading else ()
    return (*leading, *(axis.value(names.numbers) for axis in tensor.axes))


def scratch_places(entry: Entry, names: Names, start: int) -> dict[str, Placed]:
    """The scratch of an entry in its workspace, which begins at an address."""
    at, placed = -(-start // 256) * 256, {}
    for name, tensor in entry.scratch.items():
        shape, dtype = shape_of(tensor, names), names.types.get(tensor.type, tensor.type)
        placed[name] = Placed(at, shape, dtype)
        at += -(-prod(shape) * ITEMSIZES[dtype] // 256) * 256
    return placed


def plan(entry: Entry, names: Names, tensors: Mapping[str, Placed], arch: str) -> list[Launched]:
    """The launches of a call.

    Args:
        tensors: inputs, outputs and scratch.
        arch: whose code is run: "90".

    Raises:
        Unplanned: no configuration or no hints are for the call, or the grid is none.
    """
    return [_launched(call, names, tensors, arch) for call in entry.calls]


def _launched(call: Call, names: Names, tensors: Mapping[str, Placed], arch: str) -> Launched:
    config = _config(call, names, arch)
    constants = {k: v for k, v in call.configs[config].constexprs.items() if isinstance(v, int | float)}
    known = {declaration.MULTIPROCESSORS: MULTIPROCESSORS} | names.numbers | constants
    grid = [expression.value(known) for expression in call.grids[config]]
    x, y, z = (*grid, 1, 1)[:3]
    if not all(0 < n <= most for n, most in zip((x, y, z), (0x7FFFFFFF, 65535, 65535), strict=True)):
        raise Unplanned(f"{call.entry.name}: the grid of {call.launch.kernel} is {(x, y, z)}")
    arguments = {
        each.parameter: each.tensor if each.tensor else None if each.value is None else each.value.value(names.numbers)
        for each in call.arguments
    }
    hint = _hint(call, arguments, tensors)
    passed = [e for e in call.arguments if e.is_passed and call.hints[hint].get(e.parameter) != 1]
    words = [
        tensors[each.tensor].address if each.tensor else _word(call, each.parameter, each.type, arguments)
        for each in passed
    ]
    return Launched(call, config, hint, (x, y, z), arguments, tuple(words))


def _config(call: Call, names: Names, arch: str) -> int:
    for i, condition in enumerate(call.conditions):
        if call.is_for(i, names.types, arch) and (condition is None or condition.value(names.numbers)):
            return i
    raise Unplanned(f"{call.entry.name}: no configuration of {call.launch.kernel} is for this call")


def _hint(call: Call, arguments: Mapping[str, Any], tensors: Mapping[str, Placed]) -> int:
    def holds(parameter: str, expected: int) -> bool:
        value = arguments[parameter]
        value = tensors[value].address if parameter in call.pointers else value
        return value == 1 if expected == 1 else value % 16 == 0

    for i, hint in enumerate(call.hints):
        if all(holds(parameter, expected) for parameter, expected in hint.items()):
            return i
    raise Unplanned(f"{call.entry.name}: no hints of {call.launch.kernel} hold")


def _word(call: Call, parameter: str, kind: str, arguments: Mapping[str, Any]) -> int:
    try:
        return int.from_bytes(struct.pack(f"<{_PACKED[kind]}", arguments[parameter]).ljust(8, b"\0"), "little")
    except (struct.error, OverflowError):
        raise Unplanned(f"{call.entry.name}: {parameter} of {call.launch.kernel} does not fit {kind}") from None


def check_operator(entry: Entry, inputs: Sequence[str], outputs: Sequence[str], attrs: Sequence[str]) -> None:
    """Raises DeclarationError unless an operator has the tensors and attributes of its entry, in their order."""
    pairs = (("inputs", inputs, entry.inputs), ("outputs", outputs, entry.outputs), ("attributes", attrs, entry.attrs))
    for what, given, declared in pairs:
        if sorted(given) != sorted(declared) if what == "attributes" else list(given) != list(declared):
            raise DeclarationError(
                f"{entry.name}: the operator's {what} are {', '.join(given) or 'none'}, the declaration's "
                f"{', '.join(declared) or 'none'}: expected the same"
            )
