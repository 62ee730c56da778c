"""torch's caches of compiled code, on disk, in whose keys this version of aotops and of the libraries is.

How an operator is traced, decomposed and lowered is Python of this package, which torch's keys do not know: code that
an older version has compiled would be used after an upgrade.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import aotops
from aotops.ops import BUILTIN

from ..imports import after_import
from . import private, reached
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


def version() -> str:
    """The version of the package, a hash of its sources, and digests of the definitions of other libraries' operators.
    Where one of these is not known, nothing of another process is taken from the caches."""
    theirs = [reached.digest(op) for op in dispatched if op.library is not BUILTIN]
    known = sorted(one for one in theirs if one is not None)
    own = sha256(b"".join(known)).hexdigest()[:16] if len(known) == len(theirs) else _of_process()
    return f"{aotops.__version__} {_of_package()} {own}"


@functools.cache
def _of_process() -> str:
    return os.urandom(8).hex()


@functools.cache
def _of_package() -> str:
    return _hash(_sources())


def _sources() -> set[Path]:
    return {file for folder in _FOLDERS for file in folder.glob("*.py")}


def _hash(files: Iterable[Path]) -> str:
    return sha256(b"".join(sorted(map(_digest, files)))).hexdigest()[:16]


def _digest(file: Path) -> bytes:
    return sha256(f"{file.name}\0".encode() + file.read_bytes()).digest()
