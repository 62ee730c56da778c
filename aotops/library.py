"""The shared library: where it is, its entries, its version and its errors."""

from __future__ import annotations

import ctypes
import os
import struct
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import __version__
from .op import Op

ERRORS: dict[int, type[Exception]] = {
    1: ValueError,
    2: TypeError,
    3: NotImplementedError,
    4: RuntimeError,
    5: RuntimeError,
    6: MemoryError,
}
"""The exception for each status of cuda_src/aot.h."""

_POINTER = ctypes.c_void_p
_ELF = struct.Struct("<4sBB10xHHIQQQIHHHHHH")
"""The head of a 64-bit ELF file: its magic, class and byte order; at the end, where segments and sections are told."""
_SEGMENT = struct.Struct("<IIQQQQQQ")


class LibraryError(ImportError):
    """libaotops.so cannot be used: it is missing, does not load, or is of another version."""


class _Library(ctypes.CDLL):
    """Its functions as attributes; one that it does not have is a ``LibraryError``."""

    def __getattr__(self, symbol: str) -> Any:
        if symbol.startswith("__"):
            raise AttributeError(symbol)
        try:
            return super().__getattr__(symbol)
        except AttributeError:
            raise LibraryError(f"{self._name} exports no {symbol}: rebuild it with `make clean lib`") from None


@cache
def path() -> Path:
    """Where the library is: $AOTOPS_LIBRARY, or beside this file. The first answer holds for good, so that it is the
    library that is loaded, wherever the process goes."""
    return Path(os.environ.get("AOTOPS_LIBRARY") or Path(__file__).with_name("libaotops.so")).absolute()


@cache
def load() -> ctypes.CDLL:
    """Loads the library once.

    Raises:
        LibraryError: it is missing, does not load, or is of another version than this package.
        ValueError: AOTOPS_CPU_ISA names no instruction set.
    """
    _check_cpu_isa()
    file = path()
    _check_whole(file)
    try:
        lib = _Library(str(file))
    except OSError as error:
        raise LibraryError(f"{file} does not load: {error}; rebuild it with `make clean lib`") from error
    try:
        lib.aot_version.restype = ctypes.c_char_p
        built = lib.aot_version().decode()
    except LibraryError as error:
        raise LibraryError(f"{file} is not a library of aotops: it exports no aot_version") from error
    if built != __version__:
        raise LibraryError(f"{file} is version {built}, the package is {__version__}: rebuild it with `make lib`")
    lib.aot_last_error.restype = ctypes.c_char_p
    lib.aot_set_openblas.argtypes = [ctypes.c_char_p]
    lib.aot_set_openblas(str(_openblas() or "").encode())
    lib.aot_extra_new.restype, lib.aot_extra_new.argtypes = _POINTER, [ctypes.c_char_p]
    lib.aot_extra_delete.restype, lib.aot_extra_delete.argtypes = None, [_POINTER]
    return lib


def _check_cpu_isa() -> None:
    """Raises ValueError if AOTOPS_CPU_ISA is set to anything that the library would ignore (cuda_src/cpu/entry.h)."""
    wanted = os.environ.get("AOTOPS_CPU_ISA", "baseline")
    if wanted not in ("baseline", "avx2", "avx512"):
        raise ValueError(f"AOTOPS_CPU_ISA is {wanted!r}, expected baseline, avx2 or avx512")


def _check_whole(file: Path) -> None:
    """Raises LibraryError where the file cannot be read, or ends before its segments or its table of sections do: to
    map it would end the process. What is no ELF file of this kind is left to the loader, which says so."""
    try:
        with file.open("rb") as opened:
            size, head = os.fstat(opened.fileno()).st_size, opened.read(_ELF.size)
            if len(head) < _ELF.size or head[:6] != b"\x7fELF\x02\x01":
                return
            *_, at, sections, _flags, _size, each, n, section, n_sections, _ = _ELF.unpack(head)
            opened.seek(at)
            table = opened.read(each * n)
    except FileNotFoundError:
        raise LibraryError(f"{file} does not exist: build it with `make lib`, or point AOTOPS_LIBRARY at one") from None
    except OSError as error:
        raise LibraryError(f"{file} cannot be read: {error.strerror}") from error
    segments = [_SEGMENT.unpack_from(table, i) for i in range(0, len(table) - _SEGMENT.size + 1, max(each, 1))]
    needed = max(
        [
            at + each * n,
            sections + section * n_sections,
            *(offset + filled for _, _, offset, _, _, filled, _, _ in segments),
        ]
    )
    if needed > size:
        raise LibraryError(f"{file} has {size} bytes of at least {needed}: rebuild it with `make clean lib`")


def _openblas() -> Path | None:
    """The OpenBLAS of PyPI's scipy-openblas32, where it is installed: what CPU matrix products use, if they find it."""
    spec = find_spec("scipy_openblas32")
    file = spec and spec.origin and Path(spec.origin).with_name("lib") / "libscipy_openblas.so"
    return file if file and file.exists() else None


def address(symbol: str) -> int | None:
    """The address of an exported symbol; None where there is none."""
    try:
        return ctypes.cast(load()[symbol], _POINTER).value
    except AttributeError:
        return None


def function(symbol: str) -> int:
    """The address of a function that every library has. Raises LibraryError where it is not there."""
    address = ctypes.cast(getattr(load(), symbol), _POINTER).value
    assert address
    return address


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
