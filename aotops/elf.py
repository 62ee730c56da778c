"""What a 64-bit ELF shared library's file says of it, without loading it: symbols, sections, and how it is linked."""

from __future__ import annotations

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

PT_LOAD, PT_DYNAMIC, PT_GNU_STACK = 1, 2, 0x6474E551
DT_NEEDED, DT_HASH, DT_STRTAB, DT_SYMTAB, DT_RPATH, DT_TEXTREL, DT_FLAGS, DT_RUNPATH = 1, 4, 5, 6, 15, 22, 30, 29
DT_GNU_HASH, DT_VERNEED, DT_VERNEEDNUM = 0x6FFFFEF5, 0x6FFFFFFE, 0x6FFFFFFF
DF_TEXTREL, PF_X, STB_WEAK = 4, 1, 2


@dataclass(frozen=True)
class Symbol:
    name: str
    defined: bool
    weak: bool


class Segment(NamedTuple):
    kind: int
    flags: int
    address: int
    size: int
    """In memory."""


class Elf:
    """A shared library's dynamic section. Raises ValueError for another format, or a file that ends too early."""

    def __init__(self, path: str | Path) -> None:
        self._data = Path(path).read_bytes()
        if self._data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is not a 64-bit little-endian ELF file")
        try:
            self._segments = list(self._read_segments())
            self._dynamic = list(self._read_dynamic())
        except struct.error as error:
            raise ValueError(f"{path} ends too early: {error}") from error

    def _read_segments(self) -> Iterator[tuple[int, ...]]:
        header = _HEADER.unpack_from(self._data)
        start, size, count = header[5], header[9], header[10]
        for i in range(count):
            yield _SEGMENT.unpack_from(self._data, start + i * size)

    def _read_dynamic(self) -> Iterator[tuple[int, int]]:
        for kind, _, offset, _, _, in_file, _, _ in self._segments:
            if kind == PT_DYNAMIC:
                for at in range(offset, offset + in_file, _DYNAMIC.size):
                    tag, value = _DYNAMIC.unpack_from(self._data, at)
                    if tag == 0:
                        return
                    yield tag, value

    def _first(self, tag: int) -> int | None:
        return next((value for t, value in self._dynamic if t == tag), None)

    def _offset(self, address: int) -> int:
        """In the file, of an address in memory."""
        for kind, _, offset, start, _, in_file, _, _ in self._segments:
            if kind == PT_LOAD and start <= address < start + in_file:
                return address - start + offset
        raise ValueError(f"address {address:#x} is in no segment")

    def _text(self, at: int) -> str:
        start = self._offset(self._first(DT_STRTAB) or 0) + at
        return self._data[start : self._data.index(b"\0", start)].decode(errors="replace")

    @cached_property
    def needed(self) -> list[str]:
        return [self._text(value) for tag, value in self._dynamic if tag == DT_NEEDED]

    @cached_property
    def search_path(self) -> list[str]:
        """The folders of RPATH and RUNPATH."""
        paths = [self._text(value) for tag, value in self._dynamic if tag in (DT_RPATH, DT_RUNPATH)]
        return [folder for path in paths for folder in path.split(":") if folder]

    @property
    def segments(self) -> list[Segment]:
        return [Segment(kind, flags, address, size) for kind, flags, _, address, _, _, size, _ in self._segments]

    @property
    def executable_stack(self) -> bool:
        """Also without the segment that says: the kernel then takes it that it is wanted."""
        flags = [segment[1] for segment in self._segments if segment[0] == PT_GNU_STACK]
        return not flags or bool(flags[0] & PF_X)

    @property
    def text_relocations(self) -> bool:
        return self._first(DT_TEXTREL) is not None or bool((self._first(DT_FLAGS) or 0) & DF_TEXTREL)

    @cached_property
    def sections(self) -> list[str]:
        """Their names."""
        header = _HEADER.unpack_from(self._data)
        start, size, count, names = header[6], header[11], header[12], header[13]
        found = [_SECTION.unpack_from(self._data, start + i * size) for i in range(count)]
        at = [found[names][4] + section[0] for section in found]
        return [self._data[i : self._data.index(b"\0", i)].decode(errors="replace") for i in at]

    @cached_property
    def symbols(self) -> list[Symbol]:
        """Those that the loader sees."""
        table = self._first(DT_SYMTAB)
        if table is None:
            return []
        start = self._offset(table)
        entries = (_SYMBOL.unpack_from(self._data, start + i * _SYMBOL.size) for i in range(1, self._symbol_count()))
        return [Symbol(self._text(name), section != 0, info >> 4 == STB_WEAK) for name, info, _, section, *_ in entries]

    def _symbol_count(self) -> int:
        """The table has no length of its own: the hash tables give it."""
        if (table := self._first(DT_HASH)) is not None:
            return struct.unpack_from("<II", self._data, self._offset(table))[1]
        table = self._first(DT_GNU_HASH)
        if table is None:
            return 1
        at = self._offset(table)
        n_buckets, first, n_bloom, _ = struct.unpack_from("<IIII", self._data, at)
        buckets = struct.unpack_from(f"<{n_buckets}I", self._data, at + 16 + 8 * n_bloom)
        chains = at + 16 + 8 * n_bloom + 4 * n_buckets
        last = max(buckets, default=0)
        if last < first:  # nothing is exported: what is before `first` is all undefined
            return first
        while not struct.unpack_from("<I", self._data, chains + 4 * (last - first))[0] & 1:
            last += 1
        return last + 1

    @cached_property
    def versions(self) -> list[str]:
        """Of symbols that it needs: "GLIBC_2.34"."""
        found, at = [], self._first(DT_VERNEED)
        at = None if at is None else self._offset(at)
        for _ in range(self._first(DT_VERNEEDNUM) or 0):
            assert at is not None
            _, count, _, aux, following = _VERNEED.unpack_from(self._data, at)
            one = at + aux
            for _ in range(count):
                _, _, _, name, after = _VERNAUX.unpack_from(self._data, one)
                found.append(self._text(name))
                one += after
            at += following
        return found


class Contents(NamedTuple):
    sections: frozenset[str]
    exported: frozenset[str]
    imported: frozenset[str]

    @property
    def has_cuda(self) -> bool:
        """Whether nvcc put device code into it."""
        return ".nv_fatbin" in self.sections

    @property
    def has_new_strings(self) -> bool:
        """Whether its C++ code has libstdc++'s std::string of the new ABI. Code with the old one, which MindSpore's is,
        imports functions of that class (Ss in a mangled name); C code imports nothing of C++."""
        names = self.imported
        if any("Ss" in name and name.startswith("_ZNS") for name in names):
            return False
        return any("__cxx11" in name or name.startswith("__gxx_personality") for name in names)


@lru_cache(maxsize=256)
def _read(file: Path, _changed: int) -> Contents:
    try:
        elf = Elf(file)
    except ValueError:
        return Contents(frozenset(), frozenset(), frozenset())
    named: dict[bool, set[str]] = {True: set(), False: set()}
    for symbol in elf.symbols:
        named[symbol.defined].add(symbol.name)
    return Contents(frozenset(elf.sections), frozenset(named[True] - {""}), frozenset(named[False] - {""}))


def read(file: Path) -> Contents:
    """Empty for a file of another format. Kept while the file stays as it is; unlike an ``Elf``, it is small."""
    return _read(file, file.stat().st_mtime_ns)
