"""``aotops.compile``: a shared library of one source, in a cache that any number of processes may use at once."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from . import toolchain
from .toolchain import CompileError, Compiler

__all__ = ["CompileError", "compile"]

_SUFFIXES = {".cpp": "cpp", ".cc": "cpp", ".cxx": "cpp", ".c++": "cpp", ".cu": "cu"}
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.M)


def compile(
    source: str | os.PathLike[str],
    *,
    name: str | None = None,
    kind: str | None = None,
    flags: Sequence[str] = (),
    include: Sequence[str | os.PathLike[str]] = (),
    arch: str | int | Sequence[str | int] | None = None,
) -> Path:
    """Compiles C++ or CUDA C++ to a shared library, for this machine's processor. What has been compiled before, with
    the same headers, flags and compiler, is taken from the cache: $AOTOPS_CACHE, or aotops in $XDG_CACHE_HOME.

    Sources that include ``aot.h`` are linked with its runtime. Others are compiled as MindSpore compiles those of its
    convention, with std::string of the old ABI; but not with --use_fast_math.

    Args:
        source: the path of a file, or the source itself.
        name: of the library; default: the file's stem, or "kernel".
        kind: "cpp" or "cu"; default: by the file's suffix; for a source, "cu" if it has ``__global__`` or ``<<<``.
        flags: more flags for the compiler, after those of aotops.
        include: more folders of headers.
        arch: for CUDA, compute capabilities: "90", or ("80", "90"). Default: those of this machine's GPUs.

    Returns:
        The path of the library.

    Raises:
        CompileError: a compiler is missing, or it refuses the source; with its message.
        ValueError: source is a path that does not exist, or of another suffix; a kind or arch that is not known.
    """
    file, text = _read(source)
    name = name or (file.stem if file else "kernel")
    if not re.fullmatch(r"[\w.+-]+", name):
        raise ValueError(f"compile: name is {name!r}, expected letters, digits and _")
    kind = kind or (_SUFFIXES[file.suffix] if file else "cu" if "__global__" in text or "<<<" in text else "cpp")
    if kind not in ("cpp", "cu"):
        raise ValueError(f"compile: kind is {kind!r}, expected 'cpp' or 'cu'")
    folders = [Path(folder).absolute() for folder in include]
    aot = uses_aot(text, file, folders)
    compiler = toolchain.need_nvcc() if kind == "cu" else toolchain.cxx()
    command = [*compiler.command, *_flags(kind, aot, arch), *(f"-I{f}" for f in folders)]
    command += [f"-I{toolchain.include_dir()}", *flags]
    link = [*([str(toolchain.runtime())] if aot else ()), *toolchain.link_flags(kind == "cu")]

    machine = [
        compiler.version,
        toolchain.processor(),
        _contents(toolchain.include_dir().glob("**/*.h") if aot else ()),
    ]
    identity = [file, text, name, command, link, machine, _contents(Path(word) for word in link if word[0] == "/")]
    folder = cache_dir() / f"{name}-{_hash(repr(identity))[:20]}"
    if found := _find(folder):
        return found
    with locked(folder):
        if found := _find(folder):  # by the process that had the lock
            return found
        if kind == "cpp" and aot:
            command += _precompiled(compiler, command, machine)
        return _build(command, link, file, text, name, kind, folder)


def cache_dir() -> Path:
    """The folder of what ``compile`` has compiled."""
    if given := os.environ.get("AOTOPS_CACHE"):
        return Path(given).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "aotops"


# -------------------------------------------------------------------------------------------------------------- source


def _read(source: str | os.PathLike[str]) -> tuple[Path | None, str]:
    """The file, or None if the source itself is given; and its text."""
    if isinstance(source, str) and ("\n" in source or "{" in source or ";" in source):
        return None, source
    file = Path(source).absolute()
    if file.suffix not in _SUFFIXES:
        raise ValueError(f"compile: source is {str(source)!r}, expected a file named .cpp, .cc, .cxx or .cu, or source")
    try:
        return file, file.read_text(errors="replace")
    except OSError as error:
        raise ValueError(f"compile: {file} cannot be read: {error.strerror}") from None


def uses_aot(text: str, file: Path | None, folders: Iterable[Path]) -> bool:
    """Whether a source includes ``aot.h``, itself or through a header beside it or in ``folders``."""
    known, look = set(), [(text, file)]
    while look:
        content, at = look.pop()
        for header in _INCLUDE.findall(content):
            if header in ("aot.h", "cpu/entry.h", "cpu/parallel.h") or header.startswith("cuda/"):
                return True
            beside = [at.parent] if at else []
            found = next((f / header for f in (*beside, *folders) if (f / header).is_file()), None)
            if found and found not in known:
                known.add(found)
                look.append((found.read_text(errors="replace"), found))
    return False


def _flags(kind: str, aot: bool, arch: str | int | Sequence[str | int] | None) -> tuple[str, ...]:
    if kind == "cu":
        return toolchain.cuda_flags(toolchain.parse_archs(arch), aot)
    if not aot:
        return (*toolchain.FOREIGN_FLAGS, *toolchain.native_flags())
    # g++ 12 spends its time on the convention's code, not on the loops, which are of vector types. For the operator of
    # docs/adding_an_op.md it takes 1.6 times as long with -O2 as with these, and twice as long with -O3, which makes
    # the loop a fifth faster while the data is in the first cache. `aotops build` and flags=["-O3"] use that.
    quick = ("-O1", "-finline-functions", "-ftree-vectorize", "-fvect-cost-model=dynamic")
    return (*toolchain.AOT_FLAGS, *quick, *toolchain.native_flags())


# --------------------------------------------------------------------------------------------------------------- cache


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _contents(files: Iterable[Path]) -> list[str]:
    return [_content(str(file)) for file in sorted(files)]


def _content(path: str) -> str:
    """A hash of a file's content; empty if it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def _find(folder: Path) -> Path | None:
    """The library that was made of headers as they are now. A manifest lists those of one library."""
    for manifest in folder.glob("*.json"):
        try:
            made = json.loads(manifest.read_text())
            library = folder / made["library"]
            if library.exists() and all(_content(path) == content for path, content in made["headers"].items()):
                return library
        except (OSError, ValueError, KeyError):  # of another version
            continue
    return None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder's lock, which ends with the process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = (folder / "lock").open("w")
    except OSError as error:
        raise CompileError(f"{folder} cannot be written: {error.strerror}; set AOTOPS_CACHE to a folder") from None
    with opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def _build(
    command: Sequence[str], link: Sequence[str], file: Path | None, text: str, name: str, kind: str, folder: Path
) -> Path:
    """Compiles to a temporary folder and moves the results, so that no other process sees a part of one."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        scratch = Path(temporary)
        source, made, depends = file or scratch / f"{name}.{kind}", scratch / f"lib{name}.so", scratch / "depends"
        if file is None:
            source.write_text(text)
        steps = [*command, "-MMD", "-MF", str(depends), str(source), *link, "-o", str(made)]
        try:
            toolchain.run(steps, f"compiling {source.name}")
        except CompileError as error:
            raise CompileError(str(error).replace(f"{scratch}/", "")) from None
        headers = {path: _content(path) for path in dependencies(depends) if Path(path) != source}
        digest = _hash(json.dumps(headers, sort_keys=True))[:16]
        final = folder / digest / made.name
        final.parent.mkdir(exist_ok=True)
        made.replace(final)
        manifest = scratch / "manifest"
        manifest.write_text(json.dumps({"library": f"{digest}/{made.name}", "headers": headers}))
        manifest.replace(folder / f"{digest}.json")
        return final


def dependencies(file: Path) -> list[str]:
    """The absolute paths in a file that -MMD wrote, in make's syntax."""
    text = file.read_text().replace("\\\n", " ").split("\n\n")[0]
    words = re.split(r"(?<!\\)\s+", text.partition(": ")[2].strip())
    return [os.path.abspath(word.replace("\\ ", " ").replace("$$", "$")) for word in words if word]


# -------------------------------------------------------------------------------------------------- precompiled headers

_HEADERS = ("aot.h", "cpu/entry.h", "cpu/parallel.h")
"""Without their precompiled form, a source of ten lines takes g++ a second more, most of it for the intrinsics."""


def _precompiled(compiler: Compiler, command: Sequence[str], machine: object) -> list[str]:
    """The flags by which g++ uses precompiled headers. They are made for the second source that is compiled with the
    same flags, since making them takes as long as compiling one without them. Where they do not fit, g++ reads the
    headers."""
    if not compiler.is_gcc:
        return []
    folder = cache_dir() / f"headers-{_hash(repr([command, machine]))[:20]}"
    header, made = folder / "aot_all.h", folder / "aot_all.h.gch"
    if made.exists():
        return ["-include", str(header)]
    with locked(folder):
        if not header.exists():
            header.write_text("".join(f'#include "{name}"\n' for name in _HEADERS))
            return []
        if not made.exists():
            scratch = folder / "making"
            what = "compiling the headers for this and later sources"
            toolchain.run([*command, "-x", "c++-header", str(header), "-o", str(scratch)], what)
            scratch.replace(made)
    return ["-include", str(header)]
