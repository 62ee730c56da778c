"""torch's caches of compiled code, on disk, in whose keys this version of aotops and of the libraries is.

How an operator is traced, decomposed and lowered is Python of this package, which torch's keys do not know: code that
an older version has compiled would be used after an upgrade.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import aotops
from aotops.library import Library
from aotops.op import Op
from aotops.ops import BUILTIN

from ..imports import after_import
from . import private
from .registered import dispatched

_PACKAGE, _HERE = Path(aotops.__file__).parent, Path(__file__).parent
_FOLDERS = (_PACKAGE, _PACKAGE / "ops", _HERE.parent, _HERE)  # in a checkout the frontends are not in the package


def register() -> None:
    """Once: adds the version to what torch makes its keys of."""
    after_import(private.CODE_CACHE, _add_version)


def _add_version() -> None:
    without = "torch's caches on disk mix code of different versions of aotops"
    details = private.optional_of(private.CODE_CACHE, private.KEY_DETAILS, without)
    if details is None:
        return
    theirs = details.__init__

    @functools.wraps(theirs)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        theirs(self, *args, **kwargs)
        self.aotops = version()

    details.__init__ = init


def see(ops: Iterable[Op]) -> None:
    """Reads the files that define operators of other libraries, while they are those that were loaded."""
    for op in ops:
        for file in _definitions(op):
            _digest(file)


def version() -> str:
    """The version of the package, and hashes of its sources and of those that define other libraries' operators."""
    theirs = {file for op in dispatched for file in _definitions(op)}
    return f"{aotops.__version__} {_of_package()} {_hash(theirs)}"


@functools.cache
def _of_package() -> str:
    return _hash(_sources())


def _sources() -> set[Path]:
    return {file for folder in _FOLDERS for file in folder.glob("*.py")}


@functools.cache
def _definitions(op: Op) -> frozenset[Path]:
    """The files of the functions that an operator of another library is made of."""
    if op.library is BUILTIN:
        return frozenset()
    files = {Path(function.__code__.co_filename) for function in _functions(op, set())}
    return frozenset(file for file in files if not file.is_relative_to(_PACKAGE))


def _functions(part: Any, seen: set[int]) -> Iterator[Any]:
    """The functions of a definition, and those in their closures."""
    if id(part) in seen or isinstance(part, Library):
        return
    seen.add(id(part))
    inner: Iterable[Any] = ()
    if hasattr(part, "__code__"):
        yield part
        inner = _enclosed(part)
    elif isinstance(part, functools.partial):
        inner = (part.func, *part.args, *part.keywords.values())
    elif isinstance(part, Mapping):
        inner = part.values()
    elif is_dataclass(part) and not isinstance(part, type):
        inner = [getattr(part, field.name) for field in fields(part)]
    for one in inner:
        yield from _functions(one, seen)


def _enclosed(function: Any) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is empty
            yield cell.cell_contents


def _hash(files: Iterable[Path]) -> str:
    return sha256(b"".join(sorted(map(_digest, files)))).hexdigest()[:16]


@functools.cache
def _digest(file: Path) -> bytes:
    """At first sight: the file may be edited later, what was loaded stays."""
    if not file.is_file():  # an installation may have no sources
        return b""
    return sha256(f"{file.name}\0".encode() + file.read_bytes()).digest()
