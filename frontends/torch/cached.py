"""torch's caches of compiled code, on disk, in whose keys this version of aotops and of the libraries is.

How an operator is traced, decomposed and lowered is Python of this package, which torch's keys do not know: code that
an older version has compiled would be used after an upgrade.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import aotops
from aotops.op import Op

from ..imports import after_import
from . import private
from .registered import dispatched

_PACKAGE = Path(aotops.__file__).parent
_FOLDERS = (".", "ops", "frontends", "frontends/torch")


def register() -> None:
    """Once: adds the version to what torch makes its keys of."""
    after_import(private.CODE_CACHE, _add_version)


def _add_version() -> None:
    details = getattr(import_module(private.CODE_CACHE), private.KEY_DETAILS, None)
    if details is None:
        return
    theirs = details.__init__

    @functools.wraps(theirs)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        theirs(self, *args, **kwargs)
        self.aotops = version()

    details.__init__ = init


def version() -> str:
    """The version of the package, and hashes of its sources and of those that define other libraries' operators."""
    return f"{aotops.__version__} {_of_package()} {_hash(sorted(_definitions(dispatched)))}"


@functools.cache
def _of_package() -> str:
    return _hash(sorted(file for folder in _FOLDERS for file in (_PACKAGE / folder).glob("*.py")))


def _definitions(ops: Iterable[Op]) -> set[Path]:
    """The files of what operators of other libraries are made of."""
    functions = (function for op in ops for function in (op.bind, op.formula))
    files = {Path(code.co_filename) for f in functions if (code := getattr(f, "__code__", None)) is not None}
    return {file for file in files if not file.is_relative_to(_PACKAGE)}


def _hash(files: Iterable[Path]) -> str:
    found = sha256()
    for file in files:
        if file.is_file():  # an installation may have no sources
            found.update(f"{file.name}\0".encode() + file.read_bytes())
    return found.hexdigest()[:16]
