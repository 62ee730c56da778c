"""Makes stubs of glibc's libraries for linking a library that loads with an older glibc than this machine's.

glibc exports a symbol that has changed with several versions, and the linker takes the newest: a library linked with
glibc 2.36 asks for pthread_create of 2.34, when it moved to libc.so.6, although the function is the same. The stubs
export the newest version up to the floor of each symbol, under the name of the library that contained it then. A symbol
that is newer is undefined. It needs objdump and gcc.

    python packaging/glibc_floor.py 2.28 FOLDER [PREFIX]

It prints the linker's options, which go before those for libraries. PREFIX is that of the tools' names for another
machine: aarch64-linux-gnu-.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

# Libraries whose functions glibc 2.34 moved to libc.so.6.
MOVED = {"libpthread.so.0": r"_*pthread_|sem_", "libdl.so.2": r"dl", "librt.so.1": r"shm_|timer_|mq_|aio_|lio_"}


LINE = re.compile(r"^[0-9a-f]+ .{5}(.{2}) \S+\t([0-9a-f]+) +(\(?)(GLIBC_[0-9.]+)\)? +(\w+)$", re.MULTILINE)
"""A line of `objdump -T`: type, size, whether the version is not the default, version, symbol."""


@dataclass
class Symbol:
    data: int | None = None
    """The size of a variable; None: a function."""
    default: str = ""
    versions: list[str] = field(default_factory=list)


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.removeprefix("GLIBC_").split(".")))


def exports(library: str, prefix: str) -> dict[str, Symbol]:
    """The exports of one of the compiler's libraries, by name."""
    where = [f"{prefix}gcc", f"-print-file-name={library}"]
    path = subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip()
    table = subprocess.run([f"{prefix}objdump", "-T", path], check=True, capture_output=True, text=True).stdout
    found: dict[str, Symbol] = {}
    for kind, size, hidden, version, name in LINE.findall(table):
        symbol = found.setdefault(name, Symbol())
        symbol.versions.append(version)
        symbol.data = int(size, 16) if "O" in kind else None
        if not hidden:
            symbol.default = version
    return found


def stub_symbols(floor: tuple[int, ...], prefix: str) -> dict[str, dict[str, tuple[str, int | None]]]:
    """{library: {symbol: (version, size)}} of the symbols that glibc had at the floor."""
    stubs: dict[str, dict[str, tuple[str, int | None]]] = {}
    for library in ("libc.so.6", "libm.so.6"):
        for name, symbol in exports(library, prefix).items():
            older = [version for version in symbol.versions if number(version) <= floor]
            if not symbol.default or not older:
                continue
            moved = (home for home, prefixes in MOVED.items() if re.match(prefixes, name))
            home = next(moved, library) if number(symbol.default) >= (2, 34) else library
            stubs.setdefault(home, {})[name] = max(older, key=number), symbol.data
    return stubs


def build(library: str, symbols: dict[str, tuple[str, int | None]], folder: Path, prefix: str) -> None:
    code, script = (folder / f"{library}{suffix}" for suffix in (".s", ".map"))
    lines: list[str] = []
    nodes: dict[str, list[str]] = {}
    for name, (version, size) in sorted(symbols.items()):
        nodes.setdefault(version, []).append(name)
        section, kind, body = (".text", "function", "") if size is None else (".data", "object", f".zero {size}\n")
        lines.append(f"{section}\n.globl {name}\n.type {name}, @{kind}\n.size {name}, {size or 0}\n{name}:\n{body}")
    code.write_text("".join(lines))
    script.write_text("".join(f"{node} {{ {'; '.join(names)}; }};\n" for node, names in sorted(nodes.items())))
    link = [f"{prefix}gcc", "-shared", "-nostdlib", f"-Wl,-soname,{library},--version-script,{script}", str(code)]
    subprocess.run([*link, "-o", folder / library], check=True)


def main(floor: str, folder: str, prefix: str = "") -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    stubs = stub_symbols(number(floor), prefix)
    for library, symbols in stubs.items():
        build(library, symbols, Path(folder), prefix)
    print(f"-L{folder}", *(f"-l:{library}" for library in sorted(stubs)))


if __name__ == "__main__":
    main(*sys.argv[1:])
