"""The sources of a result: a hash of the kernel's sources, by which a later reader sees that they have changed."""

from __future__ import annotations

import re
from functools import cache
from hashlib import sha256
from pathlib import Path

_CHECKOUT = Path(__file__).parents[2] / "cuda_src"
_ENGINES = ("gemm", "conv")
"""Folders of which one header stands for all kernels: a product's launcher chooses among them."""
CPU_PREFIX = "cpu:"
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"\n]+)".*$', re.M)
# Strings and characters are kept, since they may contain what looks like a comment.
_TOKEN = re.compile(r'("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\')|//[^\n]*|/\*.*?\*/', re.S)


@cache
def of_kernel(op: str, root: Path = _CHECKOUT, device: str = "cuda") -> str | None:
    """A hash of the sources of a built-in operator's kernels on a device, without comments and white space. None if
    there are no sources, as in a wheel, or the operator has none for the device.

    For ``cuda``: its ``.cu``, the headers that it includes, and the engines of which it includes a header. Where there
    is no kernel among them, those of the operators whose headers it includes. For ``cpu``: its ``.cpp``, the headers
    that it includes, and the ``.cpp`` of each of these, whose functions it may call; it begins with CPU_PREFIX, since
    earlier records of the CPU have the hash of the ``.cu``.

    The calling convention (``aot.h`` and the other files beside it) is left out: it is the host's, and no part of the
    time on the device.
    """
    if device == "cpu":
        files = _reached([*root.glob(f"operators/**/{op}.cpp")], root, ".cpp")
    else:
        files = _reached([*root.glob(f"operators/**/{op}.cu")], root)
        if not any("__global__" in file.read_text() for file in files):
            files = _reached([*files, *(file.with_suffix(".cu") for file in files)], root)
    if not files:
        return None
    texts = sorted(map(_code, files))
    found = sha256("\n".join(texts).encode()).hexdigest()[:12]
    return CPU_PREFIX + found if device == "cpu" else found


def _reached(files: list[Path], root: Path, beside: str = "") -> set[Path]:
    """The files, what they include, and what is ``beside`` that: files of the same name with this ending."""
    found: set[Path] = set()
    while files:
        file = files.pop().resolve()
        if file in found or not file.is_file() or file.parent == root.resolve():
            continue
        found.add(file)
        for name in _INCLUDE.findall(file.read_text()):
            files += [file.parent / name, root / name]
        if beside:
            files.append(file.with_suffix(beside))
        elif file.parent.name in _ENGINES:
            files += file.parent.glob("*.cu")
    return found


def _code(file: Path) -> str:
    text = _TOKEN.sub(lambda found: found[1] or " ", _INCLUDE.sub("", file.read_text()))
    return "".join(text.split())
