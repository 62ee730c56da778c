"""``aotops.compile``: a shared library of one source, in a cache that any number of processes may use at once."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import toolchain
from .toolchain import CompileError, Compiler

__all__ = ["CompileError", "compile"]

_SUFFIXES = {".cpp": "cpp", ".cc": "cpp", ".cxx": "cpp", ".c++": "cpp", ".cu": "cu"}
_MANIFEST = 2
"""The version of what the cache says of a library."""
_ENVIRONMENT = (
    "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH",
    "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN",
)  # fmt: skip
"""Variables that change what the compilers read and make."""
_NAMED = re.compile(r'^[ \t]*#[ \t]*(?:include|include_next|import)[ \t]*(["<])([^">\n]+)[">]', re.M)
"""The form and the name of each header that a text includes."""


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
    variables = [os.environ.get(variable) for variable in _ENVIRONMENT]
    linked = _contents(Path(word) for word in link if word[0] == "/")
    identity = [_MANIFEST, file, text, name, command, link, machine, variables, linked]
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
        for _, header in _NAMED.findall(content):
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
    """The library of the source with the headers as they are now."""
    for manifest in folder.glob("*.json"):
        try:
            made = json.loads(manifest.read_text())
            library = folder / made["library"]
            if library.exists() and Headers(**made["headers"]).are_as_they_were():
                return library
        except (OSError, ValueError, KeyError, TypeError):  # of another version
            continue
    return None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder's lock, which ends with the process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = (folder / "lock").open("w")
    except OSError as error:
        mend = "; set AOTOPS_CACHE to a folder" if folder.is_relative_to(cache_dir()) else ""
        raise CompileError(f"{folder} cannot be written: {error.strerror}{mend}") from None
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
        started = time.time_ns()
        steps = [*command, "-MD", "-MF", str(depends), str(source), *link, "-o", str(made)]
        try:
            toolchain.run(steps, f"compiling {source.name}")
        except CompileError as error:
            raise CompileError(str(error).replace(f"{scratch}/", "")) from None
        read = dependencies(depends)
        headers = Headers.read(read if file else read[1:], command, None if file else text)
        digest = headers.digest()[:16]
        final = folder / digest / made.name
        final.parent.mkdir(exist_ok=True)
        made.replace(final)
        if not headers.changed_since(started) and (file is None or _read(file)[1] == text):
            manifest = scratch / "manifest"
            manifest.write_text(json.dumps({"library": f"{digest}/{made.name}", "headers": vars(headers)}))
            manifest.replace(folder / f"{digest}.json")
        return final


def dependencies(file: Path) -> list[str]:
    """The absolute paths in a file that -MD wrote, in make's syntax."""
    text = os.fsdecode(file.read_bytes()).replace("\\\n", " ").split("\n\n")[0]
    words = re.split(r"(?<!\\)\s+", text.partition(": ")[2].strip())
    plain = (re.sub(r"\\([ \t#:])", r"\1", word).replace("$$", "$") for word in words if word)
    return [os.path.abspath(word) for word in plain]


# ------------------------------------------------------------------------------------------------------------- headers

_SEARCH = re.compile(r"-(?:I|isystem|iquote|idirafter)(.*)|--?include-path=(.*)")
_ASKED = re.compile(r'__has_include(?:_next)?\s*\(\s*(["<])([^">\n]+)[">]')


@dataclass
class Headers:
    """The files that a compiler read, and those that it would have read in their place, had they been there."""

    contents: dict[str, list[Any]]
    """By path: what ``_state`` says of the file, and a hash of its content."""
    absent: list[str]
    """Files and folders whose appearance would change what a name of a header means."""

    @classmethod
    def read(cls, files: Iterable[str], command: Sequence[str], source: str | None = None) -> Headers:
        """The files that a compiler has read, and a source that is not one of them; without a command, those that a
        linker has read, which names no headers."""
        contents = {path: [_state(path), _content(path)] for path in files}
        texts = [(None, source or ""), *((path, _text(path)) for path in contents if command)]
        return cls(contents, sorted(_absent(texts, _search_path(command))))

    def digest(self) -> str:
        """A hash, equal for equal contents."""
        contents = sorted((path, content) for path, (_, content) in self.contents.items())
        return _hash(json.dumps([contents, self.absent]))

    def are_as_they_were(self) -> bool:
        return not any(map(os.path.exists, self.absent)) and all(
            _state(path) == state or _content(path) == was for path, (state, was) in self.contents.items()
        )

    def changed_since(self, moment: int) -> bool:
        """Whether one was written to after a moment (ns): the compiler may have read it before."""
        return any(max(state[1:3], default=moment + 1) > moment for state, _ in self.contents.values())


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _state(path: str) -> list[int]:
    """Another one for a file that was written to; empty if there is none. ctime is set by the kernel alone."""
    try:
        found = os.stat(path)
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _search_path(command: Sequence[str]) -> list[str]:
    """The folders of headers that a command and the environment name. The compiler's own come after them."""
    folders = []
    for word, following in zip(command, (*command, "")[1:], strict=True):
        if match := _SEARCH.fullmatch(word):
            folders.append(match[1] or match[2] or following)
    for variable in ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"):
        folders += [folder or "." for folder in os.environ.get(variable, "").split(":") if variable in os.environ]
    return list(dict.fromkeys(os.path.abspath(folder) for folder in folders))


def _absent(texts: Iterable[tuple[str | None, str]], search_path: Sequence[str]) -> set[str]:
    """The paths that are not there, of those where the compiler would look for a header that the source or another
    header names. A name that a macro makes is known if the file lies in a folder of the search path."""
    found = set()
    for file, text in texts:
        named = {*_NAMED.findall(text), *_ASKED.findall(text)}
        named |= {("<", os.path.relpath(file, f)) for f in search_path if file and file.startswith(f"{f}/")}
        for form, name in named:
            beside = (os.path.dirname(file),) if form == '"' and file else ()
            found |= {_first_absent(folder, name) for folder in (*beside, *search_path)}
    return found - {""}


def _first_absent(folder: str, name: str) -> str:
    """The path that must appear first for folder/name to do so. Empty: it is there."""
    path = os.path.normpath(os.path.join(folder, name))
    if os.path.exists(path):
        return ""
    while not os.path.exists(above := os.path.dirname(path)):
        path = above
    return path


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
