"""Shared libraries: the one of aotops, which every call goes through, and libraries of operators."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, cached_property
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

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
"""The exception for each status of cuda_src/aot.h, and of a hosted function: 2, of one that refuses a dtype, is a
TypeError."""

_POINTER = ctypes.c_void_p
_Read = TypeVar("_Read")


class LibraryError(ImportError):
    """A shared library cannot be used: it is missing, does not load, or is of another version."""


class Functions(ctypes.CDLL):
    """A shared library's functions as attributes; a symbol that it does not export is a ``LibraryError``."""

    def __getattr__(self, symbol: str) -> Any:
        if symbol.startswith("__"):
            raise AttributeError(symbol)
        try:
            # of two threads that are the first to ask, both get the same object, and keep the types set on it
            return self.__dict__.setdefault(symbol, self[symbol])
        except (AttributeError, UnicodeDecodeError):
            raise LibraryError(f"{self._name} exports no {symbol}: rebuild it with `make clean lib`") from None

    def address(self, symbol: str) -> int | None:
        """The address of an exported symbol, or None."""
        try:
            return ctypes.cast(self[symbol], _POINTER).value
        except (AttributeError, UnicodeDecodeError):  # ctypes decodes the loader's text, which names the file
            return None

    def real_path(self) -> str:
        """The path by which a host that loads libraries itself, as MindSpore does, gets this one.

        Raises:
            LibraryError: it would get another one: what this library replaced was loaded before it.
        """
        real = os.path.realpath(self._name)
        if _handle(real) != self._handle:
            raise LibraryError(
                f"{real} was replaced in this process, whose loader has the old one: restart the process"
            )
        return real

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
def load() -> Functions:
    """Loads libaotops.so, once: the call path and the built-in operators.

    Raises:
        LibraryError: it is missing, does not load, or has another version than this package.
        ValueError: AOTOPS_CPU_ISA names no instruction set, or AOTOPS_THREADS no threads.
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
        triton: the name of the module that declares its Triton kernels (aotops.triton), for ``aotops check``.
    """

    def __init__(
        self,
        name: str,
        definitions: Iterable[Op],
        file: str | Path | None = None,
        cases: str | None = None,
        triton: str | None = None,
    ) -> None:
        self.name, self.cases, self.triton = name, cases, triton
        self.ops = {op.name: op.bound_to(self) for op in definitions}
        self._file = None if file is None else Path(file).absolute()
        self._compared: set[tuple[str, str]] = set()
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
    def functions(self) -> Functions:
        """The loaded library. Raises LibraryError if it is missing or does not load."""
        if not self._file:
            return load()
        needed = self.contents.needed
        if self.contents.imports_tvm_ffi:
            load_libtvm_ffi()
        loaded = _open(self._file)
        _check_needed(self._file, needed)
        return loaded

    @cached_property
    def contents(self) -> elf.Contents:
        """The contents of its file. Raises LibraryError if the file is missing, or is no shared library."""
        return _checked(self.path, elf.read)

    @property
    def exported(self) -> Iterable[str]:
        """The names of its functions."""
        return self.contents.exported

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
            check(load().aot_library(self.name.encode(), handle, int(self.contents.has_new_strings)))
        return True

    def functions_of(self, op: Op) -> Functions:
        """The library with the operator's entries: for a hosted one, libaotops.so."""
        return load() if op.foreign else self.functions

    def entry_address(self, op: Op, device: str, companion: str = "") -> int | None:
        """The address of an operator's entry, or of a companion of it such as "Init". None if there is no entry."""
        if op.foreign and not (self.registered and device in op.foreign.symbols):
            return None
        if op.foreign and op.foreign.order:
            load_libtvm_ffi()
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
            why = f"; {self._without_cuda()}" if device == "cuda" else ""
            raise NotImplementedError(f"{op.name}: {self.path} has no {device} entry ({symbol}){why}")
        self.check_entry(op, device)
        return symbol

    def check_entry(self, op: Op, device: str) -> None:
        """Compares a definition with what its entry says of itself; one of plain C says nothing.

        Raises:
            LibraryError: it has another number of tensors, has one in another place, or reads an attribute of another
                name. Its call would read memory that is not there, or use a default.
        """
        if self._file is None or op.foreign or (op.name, device) in self._compared:
            return
        if described := self.address(f"{op.entry}_{device}Signature"):
            text = ctypes.CFUNCTYPE(ctypes.c_char_p)(described)().decode()
            lists = [[part[:-1] for part in each.split()] for each in text[:-1].split(";")]
            if len(lists) == 3 and text[-1] in ";!":  # a long one is cut off
                _check_agree(op, f"{op.entry}_{device} of {self.path}", lists, text[-1] == ";")
        self._compared.add((op.name, device))

    def _without_cuda(self) -> str:
        """The text on what an operator without a CUDA entry needs."""
        if self._file is None:
            return "build it where nvcc is, with `make lib`"
        if self.triton is not None:
            return f"state it in ENTRIES of {self.triton}, or give it a kernel in a .cu source, and run `aotops build`"
        if self.contents.has_cuda:
            return "the library has CUDA code, but none of this operator: give it a kernel in a .cu source"
        return "the library has no CUDA code: if this operator has a .cu source, build the package where nvcc is"


def _check_agree(op: Op, entry: str, lists: list[list[str]], reads_all: bool) -> None:
    inputs, outputs, attrs = lists
    mend = "they must agree; build the package after a change"
    ours, theirs = (list(op.inputs), list(op.entry_outputs)), (inputs, outputs)
    if not all(map(_agree, ours, theirs)):
        given, found = (" and gives ".join(", ".join(each) or "none" for each in both) for both in (ours, theirs))
        raise LibraryError(f"{op.name}: its definition takes {given}, but {entry} takes {found}: {mend}")
    unread, lacking = [a for a in op.attrs if a not in attrs], [a for a in attrs if a not in op.attrs]
    if unread and lacking and reads_all:
        raise LibraryError(
            f"{op.name}: its definition has the attribute {unread[0]}, but {entry} reads {', '.join(lacking)}: {mend}"
        )


def _agree(ours: list[str], theirs: list[str]) -> bool:
    """Whether two lists name the same tensors: as many, and none that the other has in another place."""
    if len(ours) != len(theirs):
        return False
    return all(a == b or (a not in theirs and b not in ours) for a, b in zip(ours, theirs, strict=True))


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


@cache
def load_libtvm_ffi() -> None:
    """Loads libtvm_ffi.so of the package apache-tvm-ffi, if it is installed, as the package itself does: a library may
    need it without knowing where it is. The package is not imported, because that imports torch."""
    with suppress(ValueError):  # a module of this name that is not the package
        spec = find_spec("tvm_ffi")
        for folder in (spec and spec.submodule_search_locations) or ():
            if (file := Path(folder, "lib", "libtvm_ffi.so")).exists():
                ctypes.CDLL(str(file), os.RTLD_NOW | os.RTLD_GLOBAL)
                return


_opened: dict[tuple[int, int], tuple[tuple[int, int], Functions]] = {}
"""By device and inode: the time and size of a library's file when it was loaded, and the library."""
_spellings = count(1)


def _open(file: Path) -> Functions:
    """The library that a file is now."""
    try:
        state = file.stat()  # before it is loaded: a change in between is then one since
    except OSError as error:
        raise _unreadable(file, error) from None
    place, written = (state.st_dev, state.st_ino), (state.st_mtime_ns, state.st_size)
    if place not in _opened:
        _checked(file, elf.Elf)
        _opened.setdefault(place, (written, _loaded(file)))
    then, lib = _opened[place]
    if then != written:
        raise LibraryError(
            f"{file} was written to since it was loaded, so that the functions in memory may be neither the old ones "
            f"nor the new: restart the process, and let a new file replace that of a library (as mv and linkers do)"
        )
    return lib


def _loaded(file: Path) -> Functions:
    """The loader returns the library that it has of a name, even if the file of that name is another one since. A name
    that it does not know makes it look at the file: "/folder/./libk.so", whose $ORIGIN is the same."""
    name = str(file)
    if _handle(name) is not None:
        name = f"{file.parent}{'/.' * next(_spellings)}/{file.name}"
    try:
        return Functions(name)
    except (OSError, UnicodeDecodeError) as error:
        raise LibraryError(f"{file} does not load: {error}; {_rebuild(file)}") from error


def _handle(name: str) -> int | None:
    """The path of a library that is loaded."""
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)._handle
    except (OSError, UnicodeDecodeError):
        return None


def _check_needed(file: Path, needed: Iterable[str]) -> None:
    """Raises LibraryError if a library that the file is linked with is loaded from a file that was replaced since: the
    loader binds to what it has of that name."""
    loaded = [(name, at) for name in needed if (handle := _handle(name)) and (at := _dynamic_section(handle))]
    if not loaded:
        return
    maps = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    for bounds, *_, replaced in (line.split(maxsplit=5) for line in maps if line.endswith(" (deleted)")):
        start, end = (int(bound, 16) for bound in bounds.split("-"))
        for name, at in loaded:
            if start <= at < end:
                raise LibraryError(
                    f"{file} needs {name}, which is loaded from {replaced.removesuffix(' (deleted)')} as it was before "
                    f"it was replaced or deleted: restart the process"
                )


def _dynamic_section(handle: int) -> int:
    """The address of a loaded library's dynamic section: l_ld of its struct link_map (link.h)."""
    return ctypes.cast(handle, ctypes.POINTER(_POINTER))[2] or 0


def _checked(file: Path, read: Callable[[Path], _Read]) -> _Read:
    """Raises LibraryError for a file that cannot be read, or that would crash the loader."""
    try:
        return read(file)
    except OSError as error:
        raise _unreadable(file, error) from None
    except ValueError as error:
        raise LibraryError(f"{error}; {_rebuild(file)}") from None


def _rebuild(file: Path) -> str:
    return "rebuild it with `make clean lib`" if file == path() else "build it again"


def _unreadable(file: Path, error: OSError) -> LibraryError:
    if not isinstance(error, FileNotFoundError):
        return LibraryError(f"{file} cannot be read: {error.strerror}")
    mend = "build it with `make lib`, or point AOTOPS_LIBRARY at one" if file == path() else "build its package"
    return LibraryError(f"{file} does not exist: {mend}")


def _check_environment() -> None:
    """Raises ValueError for a variable with a value that the library would ignore (cpu/entry.h, cpu/threads.cpp)."""
    isa, threads = os.environ.get("AOTOPS_CPU_ISA", "baseline"), os.environ.get("AOTOPS_THREADS", "")
    if isa not in ("baseline", "avx2", "avx512"):
        raise ValueError(f"AOTOPS_CPU_ISA is {isa!r}, expected baseline, avx2 or avx512")
    if threads not in ("", "own"):
        raise ValueError(f"AOTOPS_THREADS is {threads!r}, expected own")
