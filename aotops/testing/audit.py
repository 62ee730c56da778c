"""The shared library itself: whether it loads elsewhere, and without a framework."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

from .. import fatbin
from ..elf import Elf
from .report import FAIL, PASS, Failure, Item
from .subject import Subject

FRAMEWORK_LIBRARIES = re.compile(
    r"lib(torch|c10|python3|mindspore|xla|jax|tensorflow|cudnn_frontend|pybind|tvm(?!_ffi\b))[\w.+-]*\.so"
)
"""Not libtvm_ffi.so, whose C ABI is stable."""
FRAMEWORK_SYMBOLS = re.compile(r"_?Py[A-Z_]|_ZNK?(2at|3c10|5torch|8pybind11|3xla|9mindspore|3tsl|3tvm)")
_SYSTEM = re.compile(r"ld-linux[\w-]*\.so|lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|gomp|util)\.so")
_VERSION = re.compile(r"(GLIBC|GLIBCXX|CXXABI|GOMP|OMP|GCC)_([\d.]+)$")
SHOWN = 5
"""Symbols that an error names."""


def library(subject: Subject) -> Iterator[Item]:
    yield from audited(subject.op.library.path)


def audited(file: Path) -> Iterator[Item]:
    """The file's symbols, and how it is linked."""
    try:
        elf = Elf(file)
    except (OSError, ValueError) as error:
        yield Item("library", "file", FAIL, failure=Failure(str(error)))
        return
    cuda, faults = fatbin.architectures(file), _of_new_drivers(file)
    found = (
        ("frameworks", _of_frameworks(elf), "no library or symbol of a framework is needed"),
        ("symbols", _unresolved(elf, file), _resolved(elf)),
        ("versions", None, _floor(elf)),
        ("search path", _search_path(elf), ":".join(elf.search_path) or "no RPATH or RUNPATH"),
        ("stack", elf.executable_stack and "the stack would be executable: link with -z noexecstack", "not executable"),
        ("relocations", elf.text_relocations and "the code is relocated at load: compile with -fPIC",
         "none in the code"),
        ("drivers", faults if faults and _kept(file) else None, _drivers(cuda, faults)),
    )  # fmt: skip
    for where, fault, detail in found:
        if fault:
            yield Item("library", where, FAIL, failure=Failure(fault))
        else:
            yield Item("library", where, PASS, detail)


def _of_frameworks(elf: Elf) -> str | None:
    needed = [name for name in elf.needed if FRAMEWORK_LIBRARIES.match(name)]
    strong = [s.name for s in elf.symbols if not (s.defined or s.weak) and FRAMEWORK_SYMBOLS.match(s.name)]
    if needed:
        return f"it needs {', '.join(needed)}: another release of the framework would break it"
    return f"it needs {_some(strong)} of a framework or Python" if strong else None


def _unresolved(elf: Elf, file: Path) -> str | None:
    """Symbols that no library it needs has: a call of one would end the process."""
    libraries: list[ctypes.CDLL] = []
    missing: list[str] = []
    for name in elf.needed:
        if FRAMEWORK_LIBRARIES.match(name):
            return f"not looked up, since {name} is needed"
        if loaded := _loaded(name, elf.search_path, file):
            libraries.append(loaded)
        else:
            missing.append(name)
    if missing:
        return f"it needs {', '.join(missing)}, which the loader does not find here"
    wanted = [s.name for s in elf.symbols if not (s.defined or s.weak) and s.name]
    absent = [name for name in wanted if not any(_has(each, name) for each in libraries)]
    if absent:
        return f"no library that it needs defines {_some(absent)}: link with -z defs, which tells"
    return None


def _loaded(name: str, folders: list[str], file: Path) -> ctypes.CDLL | None:
    origins = [folder.replace("$ORIGIN", str(file.parent)).replace("${ORIGIN}", str(file.parent)) for folder in folders]
    for path in (*(str(Path(folder) / name) for folder in origins), name):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


def _has(library: ctypes.CDLL, symbol: str) -> bool:
    try:
        return bool(library[symbol])
    except AttributeError:
        return False


def _resolved(elf: Elf) -> str:
    others = [name for name in elf.needed if not _SYSTEM.match(name)]
    return (
        f"all defined; it needs {', '.join(others)}" if others else "all defined; it needs the system's libraries alone"
    )


def _floor(elf: Elf) -> str:
    highest: dict[str, tuple[int, ...]] = {}
    for version in elf.versions:
        if match := _VERSION.match(version):
            number = tuple(map(int, match[2].split(".")))
            highest[match[1]] = max(highest.get(match[1], (0,)), number)
    said = [f"{name} {'.'.join(map(str, highest[name]))}" for name in ("GLIBC", "GLIBCXX", "CXXABI") if name in highest]
    return f"it needs {', '.join(said)} or later" if said else "it needs no version of glibc or libstdc++"


def _search_path(elf: Elf) -> str | None:
    absolute = [folder for folder in elf.search_path if not folder.startswith(("$ORIGIN", "${ORIGIN}"))]
    return (
        f"RPATH or RUNPATH has {', '.join(absolute)}, expected none, or $ORIGIN: no other machine has it"
        if absolute
        else None
    )


def _of_new_drivers(file: Path) -> str | None:
    """Why drivers older than 580 do not load the GPU code."""
    return "; ".join(fatbin.faults(file)) or None


def _kept(file: Path) -> bool:
    """Whether the library is meant for drivers from 525: its CUDA runtime is."""
    version = fatbin.runtime(file)
    return version is not None and version < 13000


def _drivers(cuda: list[str], faults: str | None) -> str:
    if not cuda:
        return "no GPU code"
    oldest = "580; for those from 525: aotops build --cuda 12" if faults else "525"
    return f"{', '.join(cuda)}, for drivers from {oldest}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
