"""The shared library: where it is, its entries, its version and its errors."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from . import __version__
from .op import Op

ERRORS: dict[int, type[Exception]] = {
    1: ValueError,
    2: TypeError,
    3: NotImplementedError,
    4: RuntimeError,
    5: RuntimeError,
}
"""The exception for each status of cuda_src/aot.h."""

_POINTER = ctypes.c_void_p


class LibraryError(ImportError):
    """libaotops.so cannot be used: it is missing, does not load, or is of another version."""


def path() -> Path:
    """Where the library is: $AOTOPS_LIBRARY, or beside this file."""
    return Path(os.environ.get("AOTOPS_LIBRARY") or Path(__file__).with_name("libaotops.so")).absolute()


@cache
def load() -> ctypes.CDLL:
    """Loads the library once.

    Raises:
        LibraryError: it is missing, does not load, or is of another version than this package.
    """
    file = path()
    if not file.exists():
        raise LibraryError(f"{file} does not exist: build it with `make lib`, or point AOTOPS_LIBRARY at one")
    try:
        lib = ctypes.CDLL(str(file))
    except OSError as error:
        raise LibraryError(f"{file} does not load: {error}; rebuild it with `make clean lib`") from error
    try:
        lib.aot_version.restype = lib.aot_last_error.restype = ctypes.c_char_p
        built = lib.aot_version().decode()
    except AttributeError as error:
        raise LibraryError(f"{file} is not a library of aotops: it exports no aot_version") from error
    if built != __version__:
        raise LibraryError(f"{file} is version {built}, the package is {__version__}: rebuild it with `make lib`")
    lib.aot_set_openblas.argtypes = [ctypes.c_char_p]
    lib.aot_set_openblas(str(_openblas() or "").encode())
    lib.aot_extra_new.restype, lib.aot_extra_new.argtypes = _POINTER, [ctypes.c_char_p]
    lib.aot_extra_delete.restype, lib.aot_extra_delete.argtypes = None, [_POINTER]
    return lib


def _openblas() -> Path | None:
    """The OpenBLAS of PyPI's scipy-openblas32, where it is installed: what CPU matrix products use, if they find it."""
    spec = find_spec("scipy_openblas32")
    file = spec and spec.origin and Path(spec.origin).with_name("lib") / "libscipy_openblas.so"
    return file if file and file.exists() else None


def address(symbol: str) -> int | None:
    """The address of an exported symbol; None where there is none."""
    try:
        return ctypes.cast(getattr(load(), symbol), _POINTER).value
    except AttributeError:
        return None


def has_cuda() -> bool:
    """Whether the library was built with its CUDA entries."""
    return address("aot_add_cuda") is not None


def entry_name(op: Op, device: str) -> str:
    """The symbol of an operator's entry; device is "cpu" or "cuda".

    Raises:
        NotImplementedError: the library has no such entry.
    """
    symbol = f"aot_{op.name}_{device}"
    if address(symbol) is None:
        why = "; build it where nvcc is, with `make lib`" if device == "cuda" else ""
        raise NotImplementedError(f"{op.name}: {path()} has no {device} entry ({symbol}){why}")
    return symbol


def last_error() -> str:
    """The text of this thread's last failed call."""
    return load().aot_last_error().decode(errors="replace")


def check(status: int) -> None:
    """Raises the exception of a status other than 0."""
    if status:
        raise ERRORS.get(status, RuntimeError)(last_error())
