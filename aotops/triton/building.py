"""The steps of ``aotops build`` for a package with Triton kernels: the runs of the compiler, and the sources that are
made of their results."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..toolchain import CompileError
from . import source
from .declaration import Entry, load

KNOWN = ("3.5", "3.6", "3.7", "3.9")
"""The releases of Triton that this was tried with."""


@dataclass(frozen=True)
class Compile:
    """A run of the worker: all variants of an entry for a GPU."""

    entry: Entry
    file: Path
    arch: str
    command: tuple[str, ...]
    output: Path

    @property
    def label(self) -> str:
        return f"compiling {self.entry.name} (Triton, sm {self.arch})"


def installed(pinned: str | None) -> str:
    """The version of Triton.

    Args:
        pinned: by the package's pyproject.toml.

    Raises:
        CompileError: it is not installed, or another one than is pinned or known.
    """
    try:
        found = version("triton")
    except PackageNotFoundError:
        want = f"triton=={pinned}" if pinned else f"'triton>={KNOWN[0]},<{_after(KNOWN[-1])}'"
        raise CompileError(f"triton is not installed, which compiles the kernels: pip install {want}") from None
    if pinned and found != pinned:
        raise CompileError(
            f"triton is {found}, expected {pinned}, the triton_version of the pyproject.toml: "
            f"pip install triton=={pinned}"
        )
    if ".".join(found.split(".")[:2]) not in KNOWN:
        raise CompileError(
            f"triton is {found}, expected one of {', '.join(KNOWN)}: how kernels are launched differs between releases"
        )
    return found


def _after(release: str) -> str:
    major, minor = release.split(".")
    return f"{major}.{int(minor) + 1}"


def compiles(files: Sequence[Path], archs: Sequence[str], folder: Path, triton: str) -> list[Compile]:
    """The runs of the worker.

    Raises:
        DeclarationError: a declaration is wrong.
    """
    plain = list(dict.fromkeys(arch.rstrip("af") for arch in archs))
    runs: list[Compile] = []
    for file in files:
        for entry in load(file):
            for arch in plain:
                # the rest of a declaration is no reason to compile again
                digest = sha256("".join(call.compiled_of(arch) for call in entry.calls).encode()).hexdigest()
                options = ("--entry", entry.name, "--arch", arch, "--triton", triton, "--digest", digest)
                command = (sys.executable, "-m", "aotops.triton.worker", "-c", str(file), *options)
                runs.append(Compile(entry, file, arch, command, folder / f"{entry.name}.sm_{arch}.json"))
    names = [(run.entry.name, run.arch) for run in runs]
    for run in runs:
        if names.count((run.entry.name, run.arch)) > 1:
            raise run.entry.error(f"two entries have this name in {', '.join(file.name for file in files)}")
    return runs


def write(runs: Sequence[Compile], folder: Path) -> list[Path]:
    """The sources made of what the worker wrote: a header, a .cpp and an .S for each entry. Returns the latter two. A
    file whose text is the same is not written."""
    files: list[Path] = []
    for entry in {run.entry.name: run.entry for run in runs}.values():
        own = [run for run in runs if run.entry is entry]
        made = [each for run in own for each in source.read(run.arch, run.output.read_text())]
        cpp, assembly = source.sources(entry, made, [run.arch for run in own])
        for suffix, text in ((".h", source.header(entry)), (".cpp", cpp), (".S", assembly)):
            file = folder / f"{entry.name}{suffix}"
            if not file.exists() or file.read_text() != text:
                file.write_text(text)
            files += [file] if suffix != ".h" else []
    return files
