"""Shared libraries: the one of aotops, which every call goes through, and libraries of operators."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterable
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import __version__, elf
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
"""The header of a 64-bit ELF file. Its last fields locate the tables of segments and sections."""
_SEGMENT = struct.Struct("<IIQQQQQQ")


class LibraryError(ImportError):
    """A shared library cannot be used: it is missing, does not load, or is of another version."""


class _Functions(ctypes.CDLL):
    """A shared library's functions as attributes; a symbol that it does not export is a ``LibraryError``."""

    def __getattr__(self, symbol: str) -> Any:
        if symbol.startswith("__"):
            raise AttributeError(symbol)
        try:
            # of two threads that are the first to ask, both get the same object, and keep the types set on it
            return self.__dict__.setdefault(symbol, self[symbol])
        except AttributeError:
            raise LibraryError(f"{self._name} exports no {symbol}: rebuild it with `make clean lib`") from None

    def address(self, symbol: str) -> int | None:
        """The address of an exported symbol, or None."""
        try:
            return ctypes.cast(self[symbol], _POINTER).value
        except AttributeError:
            return None

    def last_error(self) -> str:
        """The message of this thread's last failed call of the library's functions."""
        self.aot_last_error.restype = ctypes.c_char_p
        return self.aot_last_error().decode(errors="replace")

    def check(self, status: int) -> None:
        """Raises the exception of a status other than 0 that a function of this library returned."""
        if status:
            raise ERRORS.get(status, RuntimeError)(self.last_error())


# ------------------------------------------------------------------------------------------------------ libaotops.so


@cache
def path() -> Path:
    """The path of libaotops.so: $AOTOPS_LIBRARY, or beside this file. The first result is kept, so that it stays the
    library that is loaded if the process changes its directory or environment."""
    return Path(os.environ.get("AOTOPS_LIBRARY") or Path(__file__).with_name("libaotops.so")).absolute()


@cache
def load() -> _Functions:
    """Loads libaotops.so, once: the call path and the built-in operators.

    Raises:
        LibraryError: it is missing, does not load, or has another version than this package.
        ValueError: AOTOPS_CPU_ISA names no instruction set, AOTOPS_OPENBLAS no OpenBLAS, or AOTOPS_THREADS no threads.
    """
    _check_environment()
    lib = _open(path())
    try:
        lib.aot_version.restype = ctypes.c_char_p
        built = lib.aot_version().decode()
    except LibraryError as error:
        raise LibraryError(f"{path()} is not a library of aotops: it exports no aot_version") from error
    if built != __version__:
        raise LibraryError(f"{path()} is version {built}, the package is {__version__}: rebuild it with `make lib`")
    lib.aot_set_openblas.argtypes = [ctypes.c_char_p]
    lib.aot_set_openblas(str(_openblas() or "").encode())
    lib.aot_extra_new.restype, lib.aot_extra_new.argtypes = _POINTER, [ctypes.c_char_p]
    lib.aot_extra_delete.restype, lib.aot_extra_delete.argtypes = None, [_POINTER]
    return lib


def function(symbol: str) -> int:
    """The address of a function of libaotops.so. Raises LibraryError if it is not exported."""
    address = ctypes.cast(getattr(load(), symbol), _POINTER).value
    assert address
    return address


def last_error() -> str:
    """The message of this thread's last failed call of libaotops.so."""
    return load().last_error()


def check(status: int) -> None:
    """Raises the exception of a status other than 0 that a function of libaotops.so returned."""
    load().check(status)


def has_cuda() -> bool:
    """Whether libaotops.so was built with its CUDA entries."""
    return load().address("aot_add_cuda") is not None


# ---------------------------------------------------------------------------------------------- libraries of operators


class Library:
    """A shared library and the definitions of its operators. A frontend is a function of one:
    ``aotops.frontends.numpy.functions(library)``.

    Args:
        name: an identifier; torch's namespace for the operators.
        definitions: the operators. ``ops`` has them by name, with this library as their ``library``.
        file: its path; None for libaotops.so.
        cases: the name of a module whose ``CASES`` has, by operator, the row that ``aotops check`` and ``aotops bench``
            take (aotops.testing.Row). It is imported when they need it.
    """

    def __init__(
        self, name: str, definitions: Iterable[Op], file: str | Path | None = None, cases: str | None = None
    ) -> None:
        self.name, self.cases = name, cases
        self.ops = {op.name: op.bound_to(self) for op in definitions}
        self._file = None if file is None else Path(file).absolute()
        self.defined: Callable[[Op], None] | None = None
        """Is told of each operator that ``op`` defines."""

    def op(self, name: str, **definition: Any) -> Op:
        """Defines an operator of this library: ``aotops.hosting.define``."""
        from .hosting import define

        return define(self, name, **definition)

    @property
    def path(self) -> Path:
        return self._file or path()

    @cached_property
    def functions(self) -> _Functions:
        """The loaded library. Raises LibraryError if it is missing or does not load."""
        return _open(self._file) if self._file else load()

    def address(self, symbol: str) -> int | None:
        """The address of an exported symbol, or None."""
        return self.functions.address(symbol)

    @cached_property
    def registered(self) -> bool:
        """Tells libaotops.so of this library, for entries that look it up by name: XLA's handler and the hosted ones.

        Raises:
            ValueError: another library of this name is loaded.
        """
        if self._file:
            handle = ctypes.c_void_p(self.functions._handle)
            check(load().aot_library(self.name.encode(), handle, int(elf.read(self.path).has_new_strings)))
        return True

    def functions_of(self, op: Op) -> _Functions:
        """The library with the operator's entries: for a hosted one, libaotops.so."""
        return load() if op.foreign else self.functions

    def entry_address(self, op: Op, device: str, companion: str = "") -> int | None:
        """The address of an operator's entry, or of a companion of it such as "Init". None if there is no entry."""
        if op.foreign and not (self.registered and device in op.foreign.symbols):
            return None
        if op.foreign and device == "cuda" and not has_cuda():
            return None  # which could not make the device current
        return self.functions_of(op).address(f"{op.entry}_{device}{companion}")

    def entry_name(self, op: Op, device: str) -> str:
        """The symbol of an operator's entry; device is "cpu" or "cuda".

        Raises:
            NotImplementedError: the library has no such entry.
        """
        symbol = f"{op.entry}_{device}"
        if self.entry_address(op, device) is None:
            if op.foreign:
                raise NotImplementedError(missing_device(op, device))
            why = "; build it where nvcc is, with `make lib`" if device == "cuda" else ""
            raise NotImplementedError(f"{op.name}: {self.path} has no {device} entry ({symbol}){why}")
        return symbol


def missing_device(op: Op, device: str) -> str:
    """Why a hosted operator has no entry for a device."""
    assert op.foreign is not None
    symbols = " and ".join(f"{symbol} on {where}" for where, symbol in op.foreign.symbols.items())
    if device in op.foreign.symbols:
        return (
            f"{op.name}: hosting a CUDA kernel needs a libaotops.so with CUDA: build it where nvcc is, with `make lib`"
        )
    return f"{op.name}: it has no function for {device}, only {symbols}"


# ------------------------------------------------------------------------------------------------------------- loading


def _open(file: Path) -> _Functions:
    _check_complete(file)
    try:
        lib = _Functions(str(file))
    except OSError as error:
        raise LibraryError(f"{file} does not load: {error}; rebuild it with `make clean lib`") from error
    return lib


def _check_environment() -> None:
    """Raises ValueError for a variable with a value that the library would ignore (cpu/entry.h, cpu/blas.cpp,
    cpu/threads.cpp)."""
    isa, blas = os.environ.get("AOTOPS_CPU_ISA", "baseline"), os.environ.get("AOTOPS_OPENBLAS", "none")
    threads = os.environ.get("AOTOPS_THREADS", "")
    if isa not in ("baseline", "avx2", "avx512"):
        raise ValueError(f"AOTOPS_CPU_ISA is {isa!r}, expected baseline, avx2 or avx512")
    if threads not in ("", "own"):
        raise ValueError(f"AOTOPS_THREADS is {threads!r}, expected own")
    if blas == "none":
        return
    try:
        found, why = ctypes.CDLL(blas) if blas else None, "it is empty"
    except OSError as error:
        found, why = None, str(error)
    if not any(hasattr(found, f"{prefix}openblas_get_parallel") for prefix in ("", "scipy_")):
        why = "it is another library" if found else why
        raise ValueError(f"AOTOPS_OPENBLAS is {blas!r}, expected the path of an OpenBLAS, or 'none': {why}")


def _check_complete(file: Path) -> None:
    """Raises LibraryError if the file cannot be read, or ends before its segments or its section table do: mapping a
    truncated file would end the process. A file of another format is left to the loader, which reports it."""
    try:
        with file.open("rb") as opened:
            size, header = os.fstat(opened.fileno()).st_size, opened.read(_ELF.size)
            if len(header) < _ELF.size or header[:6] != b"\x7fELF\x02\x01":
                return
            *_, at, sections, _flags, _size, each, n, section, n_sections, _ = _ELF.unpack(header)
            opened.seek(at)
            table = opened.read(each * n)
    except FileNotFoundError:
        mend = "build it with `make lib`, or point AOTOPS_LIBRARY at one" if file == path() else "build its package"
        raise LibraryError(f"{file} does not exist: {mend}") from None
    except OSError as error:
        raise LibraryError(f"{file} cannot be read: {error.strerror}") from error
    segments = [_SEGMENT.unpack_from(table, i) for i in range(0, len(table) - _SEGMENT.size + 1, max(each, 1))]
    ends = [offset + in_file for _, _, offset, _, _, in_file, _, _ in segments]
    needed = max(at + each * n, sections + section * n_sections, *ends)
    if needed > size:
        raise LibraryError(f"{file} has {size} bytes of at least {needed}: rebuild it with `make clean lib`")


def _openblas() -> Path | None:
    """The OpenBLAS of PyPI's scipy-openblas32 if it is installed: CPU matrix products use it."""
    spec = find_spec("scipy_openblas32")
    file = spec and spec.origin and Path(spec.origin).with_name("lib") / "libscipy_openblas.so"
    return file if file and file.exists() else None
