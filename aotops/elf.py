"""What a shared library's file says of it, without loading it: its sections and dynamic symbols."""

from __future__ import annotations

import struct
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_UNDEFINED = 0


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
    data = file.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        return Contents(frozenset(), frozenset(), frozenset())
    header = _HEADER.unpack_from(data)
    at, each, n, names_at = header[6], header[11], header[12], header[13]
    sections = [_SECTION.unpack_from(data, at + i * each) for i in range(n)]

    def text(offset: int) -> str:
        return data[offset : data.index(b"\0", offset)].decode(errors="replace")

    strings = sections[names_at][4] if sections else 0
    named = {text(strings + section[0]): section for section in sections}
    exported: set[str] = set()
    imported: set[str] = set()
    if ".dynsym" in named and ".dynstr" in named:
        table, text_at = named[".dynsym"], named[".dynstr"][4]
        for offset in range(table[4], table[4] + table[5], _SYMBOL.size):
            name, _info, _other, section, _value, _size = _SYMBOL.unpack_from(data, offset)
            (imported if section == _UNDEFINED else exported).add(text(text_at + name))
    return Contents(frozenset(named), frozenset(exported - {""}), frozenset(imported - {""}))


def read(file: Path) -> Contents:
    """Empty for a file of another format."""
    return _read(file, file.stat().st_mtime_ns)
