"""Makes stubs of glibc's libraries for linking a library that loads with an older glibc than this machine's.

glibc exports a symbol that has changed with several versions, and the linker takes the newest: a library linked with
glibc 2.36 asks for pthread_create of 2.34, when it moved to libc.so.6, although the function is the same. Each stub
exports the newest version up to the floor, under the name of the library that contained it then. It needs
objdump and gcc.

    python packaging/glibc_floor.py 2.28 FOLDER     prints the linker's options, which go before those for libraries
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

# Libraries whose functions glibc 2.34 moved to libc.so.6.
MOVED = {"libpthread.so.0": r"_*pthread_|sem_", "libdl.so.2": r"dl", "librt.so.1": r"shm_|timer_|mq_|aio_|lio_"}


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.removeprefix("GLIBC_").split(".")))


def exports(library: str) -> dict[str, dict[str, bool]]:
    """{symbol: {version: whether it is the default}} of one of this machine's libraries."""
    path = subprocess.run(["gcc", f"-print-file-name={library}"], check=True, capture_output=True, text=True).stdout
    table = subprocess.run(["objdump", "-T", path.strip()], check=True, capture_output=True, text=True).stdout
    found: dict[str, dict[str, bool]] = {}
    for hidden, node, symbol in re.findall(r"\.text\t[0-9a-f]+ +(\(?)(GLIBC_[0-9.]+)\)? +(\w+)$", table, re.MULTILINE):
        found.setdefault(symbol, {})[node] = not hidden
    return found


def too_new(floor: tuple[int, ...]) -> dict[str, dict[str, list[str]]]:
    """{library: {version: symbols}} of the symbols whose default version is above the floor and that are older."""
    stubs: dict[str, dict[str, list[str]]] = {}
    for library in ("libc.so.6", "libm.so.6"):
        for symbol, versions in exports(library).items():
            default = next((node for node in versions if versions[node]), None)
            older = [node for node in versions if version(node) <= floor]
            if default is None or version(default) <= floor or not older:
                continue
            moved = (name for name, prefixes in MOVED.items() if re.match(prefixes, symbol))
            home = next(moved, library) if library == "libc.so.6" else library
            stubs.setdefault(home, {}).setdefault(max(older, key=version), []).append(symbol)
    return stubs


def build(library: str, nodes: dict[str, list[str]], folder: Path) -> None:
    code, script = (folder / f"{library}{suffix}" for suffix in (".s", ".map"))
    symbols = sorted(symbol for symbols in nodes.values() for symbol in symbols)
    code.write_text("".join(f".globl {name}\n.type {name}, @function\n{name}:\n" for name in symbols))
    script.write_text("".join(f"{node} {{ {'; '.join(sorted(nodes[node]))}; }};\n" for node in sorted(nodes)))
    link = ["gcc", "-shared", "-nostdlib", f"-Wl,-soname,{library},--version-script,{script}", code]
    subprocess.run([*link, "-o", folder / library], check=True)


def main(floor: str, folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    stubs = too_new(version(floor))
    for library, nodes in stubs.items():
        build(library, nodes, Path(folder))
    print(f"-L{folder}", *(f"-l:{library}" for library in sorted(stubs)))


if __name__ == "__main__":
    main(*sys.argv[1:])
