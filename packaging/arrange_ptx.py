"""Rewrites PTX as the CUDA compiler writes it, so that a wheel compresses the code well: kernels that are alike come
side by side, and the text has no comments, blanks or long names of parameters.

    python packaging/arrange_ptx.py FILE.ptx

Deflate, as zip files have it, finds what is alike only in the 32 KiB before it, which is less than two kernels. ptxas
keeps the order of the kernels, reversed. Their machine code is the same as without this.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_KERNEL = re.compile(r"^(?=(?:\.visible |\.weak )?\.entry )", re.MULTILINE)
_WINDOW = 20_000
"""Characters behind which a kernel is too far away to compare the next one with."""


def arrange(ptx: str) -> str:
    """A module with debug information, which refers to places in the text, stays as it is."""
    if re.search(r"^\s*\.(file|section)\b", ptx, re.MULTILINE):
        return ptx
    head, *kernels = _KERNEL.split(_dense(ptx))
    if not all(_is_one(kernel) for kernel in kernels):
        return ptx
    return head + "".join(_ordered([_with_short_names(kernel) for kernel in kernels]))


def _dense(ptx: str) -> str:
    ptx = re.sub(r"//.*", "", ptx)
    ptx = re.sub(r"[ \t]+", " ", ptx)
    return re.sub(r" ?\n\s*", "\n", ptx).replace(", ", ",")


def _is_one(kernel: str) -> bool:
    """Whether nothing else, such as a function or a variable of the module, follows the kernel."""
    depth = 0
    for brace in re.finditer(r"[{}]", kernel):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return not kernel[brace.end() :].strip()
    return False


def _with_short_names(kernel: str) -> str:
    """A label and a parameter are known within their kernel alone."""
    name = kernel.partition(".entry ")[2].partition("(")[0].strip()
    return re.sub(r"\$L__BB\d+_", "$", kernel.replace(f"{name}_param_", "p"))


def _ordered(kernels: list[str]) -> list[str]:
    """The first one, then always the one of whose lines the largest part is in those just before it."""
    lines = [set(kernel.splitlines()) for kernel in kernels]
    left = dict.fromkeys(range(len(kernels)))
    order: list[int] = []
    while left:
        before = _recent(order, kernels, lines)
        order.append(max(left, key=lambda i: len(lines[i] & before) / len(lines[i])))
        del left[order[-1]]
    return [kernels[i] for i in order]


def _recent(order: list[int], kernels: list[str], lines: list[set[str]]) -> set[str]:
    found: set[str] = set()
    size = 0
    for i in reversed(order):
        if size > _WINDOW:
            break
        found |= lines[i]
        size += len(kernels[i])
    return found


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(arrange(path.read_text()))
