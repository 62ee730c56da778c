"""The file of a 64-bit ELF shared library, read without loading it: symbols, sections, and how it is linked."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_DYNAMIC = struct.Struct("<qQ")
_VERNEED, _VERNAUX = struct.Struct("<HHIII"), struct.Struct("<IHHII")

ET_DYN, PT_LOAD, PT_DYNAMIC, PT_GNU_STACK, PT_GNU_RELRO = 3, 1, 2, 0x6474E551, 0x6474E552
DT_NEEDED, DT_HASH, DT_STRTAB, DT_SYMTAB, DT_RPATH, DT_TEXTREL, DT_FLAGS, DT_RUNPATH = 1, 4, 5, 6, 15, 22, 30, 29
DT_STRSZ, DT_GNU_HASH, DT_VERSYM, DT_VERNEED, DT_VERNEEDNUM = 10, 0x6FFFFEF5, 0x6FFFFFF0, 0x6FFFFFFE, 0x6FFFFFFF
DF_TEXTREL, PF_X, STB_WEAK = 4, 1, 2
_ADDRESSES = {DT_HASH: 0, DT_GNU_HASH: 0, DT_STRTAB: DT_STRSZ, DT_SYMTAB: 0, DT_VERSYM: 0, DT_VERNEED: 0, 7: 8, 23: 2}
"""Entries of the dynamic section that are addresses, each with that of its size: also DT_RELA and DT_JMPREL."""
_ADDRESS_BITS = 47
_LARGEST_PAGE = 1 << 16


@dataclass(frozen=True)
class Symbol:
    name: str
    defined: bool
    weak: bool


class Segment(NamedTuple):
    kind: int
    flags: int
    offset: int
    start: int
    physical: int
    in_file: int
    in_memory: int
    align: int

    def has(self, start: int, size: int) -> bool:
        return self.start <= start and start + size <= self.start + self.in_file


class Elf:
    """A shared library's dynamic section.

    Raises:
        OSError: the file cannot be read.
        ValueError: another format, a file that ends too early, or segments or a dynamic section that contradict
            themselves: the loader, which believes them, might crash.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        with open(path, "rb") as file:
            self._size = os.fstat(file.fileno()).st_size
            self._file = os.dup(file.fileno())
        if self._size < _HEADER.size:
            raise self._error(f"file too short: it has {self._size} bytes")
        if self._bytes(0, 6) != b"\x7fELF\x02\x01":
            raise self._error("invalid ELF header: it is no 64-bit little-endian ELF file")
        self._header = _HEADER.unpack(self._bytes(0, _HEADER.size))
        self.segments = list(self._read_segments())
        self._check_segments()
        self._dynamic = list(self._read_dynamic())
        self._check_dynamic()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def _error(self, why: str) -> ValueError:
        return ValueError(f"{self.path} does not load: {why}")

    def _bytes(self, start: int, size: int) -> bytes:
        if start + size > self._size:
            raise ValueError(f"{self.path} has {self._size} bytes of at least {start + size}")
        return os.pread(self._file, size, start)

    def _table(self, form: struct.Struct, start: int, count: int) -> Iterator[tuple[int, ...]]:
        return form.iter_unpack(self._bytes(start, form.size * count))

    def _read_segments(self) -> Iterator[Segment]:
        kind, start, size, count = (self._header[i] for i in (1, 5, 9, 10))
        if kind != ET_DYN or size != _SEGMENT.size:
            raise self._error("it is no shared library")
        yield from map(Segment._make, self._table(_SEGMENT, start, count))

    def _check_segments(self) -> None:
        end = 0
        for at in self.segments:
            self._bytes(at.offset + at.in_file, 0)
            if at.start + at.in_memory >> _ADDRESS_BITS:
                raise self._error(f"a segment has the address {at.start:#x} and {at.in_memory} bytes")
            if at.kind == PT_LOAD:
                if at.start < end or at.in_memory < at.in_file or (at.start - at.offset) % max(at.align, 1):
                    raise self._error(f"the segment at {at.start:#x} overlaps another one, or is not aligned")
                end = at.start + at.in_memory
        for at in self.segments:
            inside = any(load.kind == PT_LOAD and load.has(at.start, at.in_file) for load in self.segments)
            if at.kind in (PT_DYNAMIC, PT_GNU_RELRO) and not (
                inside and at.start + at.in_memory <= end + _LARGEST_PAGE
            ):
                raise self._error(f"the segment at {at.start:#x} is not in memory")
        start, size, count = self._header[6], self._header[11], self._header[12]
        if count and size != _SECTION.size:
            raise self._error(f"sections have {size} bytes, expected {_SECTION.size}")
        self._bytes(start + size * count, 0)

    def _read_dynamic(self) -> Iterator[tuple[int, int]]:
        for at in self.segments:
            if at.kind == PT_DYNAMIC:
                for tag, value in self._table(_DYNAMIC, self._offset(at.start), at.in_file // _DYNAMIC.size):
                    if tag == 0:
                        return
                    yield tag, value
                raise self._error("the dynamic section has no end")
        raise self._error("there is no dynamic section")

    def _check_dynamic(self) -> None:
        for tag, size in _ADDRESSES.items():
            for address in (value for found, value in self._dynamic if found == tag):
                self._offset(address, (self._first(size) or 0) if size else 0)
        if self._first(DT_STRTAB) is None or self._first(DT_SYMTAB) is None:
            raise self._error("the dynamic section has no symbols")

    def _first(self, tag: int) -> int | None:
        return next((value for t, value in self._dynamic if t == tag), None)

    def _offset(self, address: int, size: int = 0) -> int:
        """In the file, of an address in memory."""
        for at in self.segments:
            if at.kind == PT_LOAD and at.has(address, max(size, 1)):
                return address - at.start + at.offset
        raise self._error(f"address {address:#x} is in no segment")

    @cached_property
    def _texts(self) -> bytes:
        size = self._first(DT_STRSZ) or 0
        return self._bytes(self._offset(self._first(DT_STRTAB) or 0, size), size)

    def _text(self, at: int) -> str:
        return self._until_nul(self._texts, at)

    def _until_nul(self, texts: bytes, at: int) -> str:
        end = texts.find(b"\0", at)
        if end < 0:
            raise self._error(f"there is no name at {at}")
        return texts[at:end].decode(errors="surrogateescape")

    @cached_property
    def needed(self) -> list[str]:
        return [self._text(value) for tag, value in self._dynamic if tag == DT_NEEDED]

    @cached_property
    def search_path(self) -> list[str]:
        """The folders of RPATH and RUNPATH."""
        paths = [self._text(value) for tag, value in self._dynamic if tag in (DT_RPATH, DT_RUNPATH)]
        return [folder for path in paths for folder in path.split(":") if folder]

    @property
    def executable_stack(self) -> bool:
        """Also without the segment that says: the kernel then takes it that it is wanted."""
        flags = [at.flags for at in self.segments if at.kind == PT_GNU_STACK]
        return not flags or bool(flags[0] & PF_X)

    @property
    def text_relocations(self) -> bool:
        return self._first(DT_TEXTREL) is not None or bool((self._first(DT_FLAGS) or 0) & DF_TEXTREL)

    @cached_property
    def sections(self) -> dict[str, tuple[int, int]]:
        """By name, where a section begins in the file, and its size."""
        start, count, names = self._header[6], self._header[12], self._header[13]
        found = list(self._table(_SECTION, start, count))
        if names >= count:
            return {}
        texts = self._bytes(found[names][4], found[names][5])
        return {self._until_nul(texts, section[0]): (section[4], section[5]) for section in found}

    @cached_property
    def symbols(self) -> list[Symbol]:
        """The symbols that the loader sees."""
        table = self._first(DT_SYMTAB)
        if table is None:
            return []
        _, *entries = self._table(_SYMBOL, self._offset(table), max(self._symbol_count(), 1))
        return [Symbol(self._text(name), section != 0, info >> 4 == STB_WEAK) for name, info, _, section, *_ in entries]

    def _symbol_count(self) -> int:
        """The table has no length of its own: the hash tables give it."""
        if (table := self._first(DT_HASH)) is not None:
            return self._words(self._offset(table), 2)[1]
        table = self._first(DT_GNU_HASH)
        if table is None:
            return 1
        at = self._offset(table)
        n_buckets, first, n_bloom, _ = self._words(at, 4)
        last = max(self._words(at + 16 + 8 * n_bloom, n_buckets), default=0)
        if last < first:  # nothing is exported: what is before `first` is all undefined
            return first
        chains = at + 16 + 8 * n_bloom + 4 * n_buckets
        while not self._words(chains + 4 * (last - first), 1)[0] & 1:
            last += 1
        return last + 1

    def _words(self, start: int, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}I", self._bytes(start, 4 * count))

    @cached_property
    def versions(self) -> list[str]:
        """The versions of symbols that it needs: "GLIBC_2.34"."""
        found, at = [], self._first(DT_VERNEED)
        at = None if at is None else self._offset(at)
        for _ in range(self._first(DT_VERNEEDNUM) or 0):
            assert at is not None
            _, count, _, aux, following = _VERNEED.unpack(self._bytes(at, _VERNEED.size))
            one = at + aux
            for _ in range(count):
                _, _, _, name, after = _VERNAUX.unpack(self._bytes(one, _VERNAUX.size))
                found.append(self._text(name))
                one += after
            at += following
        return found


class Contents(NamedTuple):
    sections: frozenset[str]
    exported: frozenset[str]
    imported: frozenset[str]
    needed: tuple[str, ...]

    @property
    def has_cuda(self) -> bool:
        """Whether nvcc put device code into it."""
        return ".nv_fatbin" in self.sections

    @property
    def imports_tvm_ffi(self) -> bool:
        """Whether it calls functions of libtvm_ffi.so."""
        return any(name.startswith("TVMFFI") for name in self.imported)

    @property
    def has_new_strings(self) -> bool:
        """Whether its C++ code has libstdc++'s std::string of the new ABI. Code with the old one, which MindSpore's is,
        imports functions of that class (Ss in a mangled name); C code imports nothing of C++."""
        names = self.imported
        if any("Ss" in name and name.startswith("_ZNS") for name in names):
            return False
        return any("__cxx11" in name or name.startswith("__gxx_personality") for name in names)


@lru_cache(maxsize=256)
def _read(file: Path, _state: tuple[int, ...]) -> Contents:
    elf = Elf(file)
    named: dict[bool, set[str]] = {True: set(), False: set()}
    for symbol in elf.symbols:
        named[symbol.defined].add(symbol.name)
    exported, imported = (frozenset(named[defined] - {""}) for defined in (True, False))
    return Contents(frozenset(elf.sections), exported, imported, tuple(elf.needed))


def read(file: Path) -> Contents:
    """Kept while the file stays as it is; unlike an ``Elf``, it is small. Raises as ``Elf`` does."""
    state = file.stat()
    return _read(file, (state.st_dev, state.st_ino, state.st_mtime_ns, state.st_size))
