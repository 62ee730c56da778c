"""The parameters and attributes of a kernel, as its PTX states them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_ENTRY = re.compile(r"\.visible\s+\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", re.S)
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w)(\d+)((?:\s+\.ptr)?)[^,\[]*(?:\[(\d+)\])?")
_DIRECTIVE = re.compile(r"\.(\w+)((?:\s+\d+\s*,?)+)")
_TARGET = re.compile(r"^\.target\s+(sm_\w+)", re.M)

SCRATCH = ("pointer", "pointer")
"""The parameters that Triton adds behind those of the kernel: global scratch, and that of its profiler."""
_EXPECTED = {"i32": "32 bits", "i64": "64 bits", "fp32": "32 bits", "fp64": "64 bits", "i1": "8 bits"}


@dataclass(frozen=True)
class Kernel:
    name: str
    target: str
    """Such as sm_90a."""
    parameters: tuple[str, ...]
    """Each "pointer", or its size in bits, or in bytes where it is a struct."""
    threads: int
    """The threads of a block, 0 if they are not stated."""


def read(ptx: str) -> Kernel:
    """The kernel of a PTX.

    Raises:
        ValueError: it has none, or several.
    """
    entries = _ENTRY.findall(ptx)
    target = _TARGET.search(ptx)
    if len(entries) != 1 or target is None:
        raise ValueError(f"the PTX has {len(entries)} kernels, expected one")
    name, parameters, directives = entries[0]
    known = {word: [int(n) for n in re.findall(r"\d+", numbers)] for word, numbers in _DIRECTIVE.findall(directives)}
    (threads, *_) = known.get("reqntid", known.get("maxntid", [0]))
    found = tuple(_parameter(text) for text in parameters.split(",") if text.strip())
    return Kernel(name, target[1], found, threads)


def _parameter(text: str) -> str:
    found = _PARAMETER.search(text)
    if not found:
        return text.strip()
    _, _, bits, pointer, length = found.groups()
    if length:
        return f"{int(length) * int(bits) // 8} bytes"
    return "pointer" if pointer else f"{bits} bits"


def mismatch(kernel: Kernel, types: Sequence[str]) -> str | None:
    """How the parameters of a kernel differ from those that the launcher passes; None if they do not.

    Args:
        types: Triton's types of the arguments, without the scratch.
    """
    expected = (*("pointer" if each[0] == "*" else _EXPECTED[each] for each in types), *SCRATCH)
    if kernel.parameters == expected:
        return None
    return f"its parameters are {', '.join(kernel.parameters)}, expected {', '.join(expected)}"
