"""``aotops build``: the shared library of a package, as the table [tool.aotops] of its pyproject.toml says:

[tool.aotops]
library = "scale/libscale.so"
sources = ["cuda_src/*.cpp", "cuda_src/*.cu"]
flags = []                 # optional: more flags for the compilers
include = []               # optional: more folders of headers
archs = ["80", "90"]       # optional: GPUs; default: those of this machine
cuda = "12"                # optional: a library for drivers from 525; default: the installed nvcc
isas = ["baseline"]        # optional: instruction sets of the CPU; default: baseline, avx2, avx512
triton = ["scale/launch.py"]   # optional: declarations of Triton kernels (aotops.triton)
triton_version = "3.7.1"       # optional: of Triton, which compiles them; default: any that is known
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import cuda12, fatbin, toolchain, tvm_ffi
from .compiler import Headers, cache_dir, dependencies, locked, uses_aot
from .toolchain import CompileError, tell

_KEYS = {
    "library": str, "sources": list, "flags": list, "include": list, "archs": list, "isas": list, "triton": list,
    "triton_version": str, "cuda": str,
}  # fmt: skip
_POLL_SECONDS = 0.3


def build(
    directory: str | os.PathLike[str] = ".",
    watch: bool = False,
    arch: str | int | Sequence[str | int] | None = None,
    verbose: bool | None = None,
    cuda: str | None = None,
) -> Path:
    """Compiles and links what has changed. Objects are in ``build/aotops`` of the directory. Without nvcc the library
    has CPU entries only, and stderr says so.

    Args:
        directory: of the pyproject.toml.
        watch: build again whenever a source or header changes, until interrupted.
        arch: GPU architectures, instead of those of the pyproject.toml.
        verbose: name each file that is compiled, on stderr, and show all errors of a compiler. None: name the files
            where ``watch`` is set, and show the first error of each place.
        cuda: "12": compile CUDA code with the CUDA 12.9 toolchain, which is downloaded unless it is in the cache, and
            audit the library: drivers of release 525 load it. $NVCC is used in its place where it is set. None: as the
            pyproject.toml says.

    Returns:
        The path of the library.

    Raises:
        CompileError: a compiler is missing, or it refuses a source; with its message. Or the audit refuses the library.
        ValueError: pyproject.toml is missing, or its table is wrong.
    """
    root = Path(directory).absolute()
    project = _read(root, arch, cuda)
    if not watch:
        return _build(project, _Telling(bool(verbose), bool(verbose)))
    telling = _Telling(verbose is not False, bool(verbose))
    seen: dict[str, float] = {}
    while True:
        began, seen = time.time(), _state(project, seen)
        try:
            project = _read(root, arch, cuda)
            library = _build(project, telling)
            tell(f"{os.path.relpath(library)} is built; watching {os.path.relpath(root)}")
        except (CompileError, ValueError) as error:
            tell(str(error))
        seen = _wait(project, seen, began)


@dataclass(frozen=True)
class _Telling:
    files: bool
    """Name each file that is compiled."""
    errors: bool
    """Show all errors of a compiler."""


# ------------------------------------------------------------------------------------------------------ pyproject.toml


@dataclass
class _Project:
    root: Path
    library: Path
    sources: list[Path]
    flags: list[str]
    include: list[Path]
    archs: tuple[str, ...]
    isas: tuple[str, ...]
    version: str | None
    triton: list[Path]
    triton_version: str | None
    cuda: str | None


def read_toml(file: Path) -> dict[str, Any]:
    """Raises ValueError: it is missing or malformed, or this is Python 3.10 without tomli."""
    try:
        import tomllib
    except ImportError:
        try:
            import tomli as tomllib  # type: ignore[no-redef]
        except ImportError:
            raise ValueError(f"{file}: Python 3.10 needs tomli to read it: pip install tomli") from None
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file}: {error}") from None


def _read(root: Path, arch: str | int | Sequence[str | int] | None, cuda: str | None) -> _Project:
    file = root / "pyproject.toml"
    content = read_toml(file)
    table = content.get("tool", {}).get("aotops")
    if table is None:
        raise ValueError(f"{file} has no table [tool.aotops], expected library and sources in it")
    _check(file, table)
    sources = [path for pattern in table.get("sources", ()) for path in _matching(file, root, pattern)]
    triton = [path for pattern in table.get("triton", ()) for path in _matching(file, root, pattern, "triton")]
    if (cuda := cuda or table.get("cuda")) not in (None, "12"):
        raise ValueError(f"{file}: cuda is {cuda!r}, expected '12', or none for the installed nvcc")
    isas = tuple(isa for isa in table.get("isas", toolchain.ISAS) if isa in toolchain.ISAS)
    return _Project(
        root,
        root / table["library"],
        list(dict.fromkeys(sources)),
        table.get("flags", []),
        [root / folder for folder in table.get("include", [])],
        toolchain.parse_archs(arch if arch is not None else table.get("archs")),
        isas if "baseline" in isas else ("baseline", *isas),
        content.get("project", {}).get("version"),
        list(dict.fromkeys(triton)),
        table.get("triton_version"),
        cuda,
    )


def _check(file: Path, table: Mapping[str, Any]) -> None:
    for key, value in table.items():
        if key not in _KEYS:
            raise ValueError(f"{file}: [tool.aotops] has {key}, expected {', '.join(_KEYS)}")
        texts = value if isinstance(value, list) else [value]
        if not isinstance(value, _KEYS[key]) or not all(isinstance(text, str) for text in texts):
            expected = "a string" if _KEYS[key] is str else "a list of strings"
            raise ValueError(f"{file}: {key} is {value!r}, expected {expected}")
    for key in ("library",) if "triton" in table else ("library", "sources"):
        if key not in table:
            what = "sources and no triton" if key == "sources" else key
            raise ValueError(f"{file}: [tool.aotops] has no {what}")
    for isa in table.get("isas", []):
        if isa not in ("baseline", "avx2", "avx512"):
            raise ValueError(f"{file}: isas has {isa!r}, expected baseline, avx2 or avx512")


_SUFFIXES_OF = {"sources": (".cpp", ".cc", ".cxx", ".cu"), "triton": (".py",)}


def _matching(file: Path, root: Path, pattern: str, key: str = "sources") -> list[Path]:
    found = sorted(root.glob(pattern))
    if not found and "*" not in pattern:
        raise ValueError(f"{file}: {key} has {pattern!r}, which does not exist")
    for path in found:
        if path.suffix not in (suffixes := _SUFFIXES_OF[key]):
            expected = f"{', '.join(suffixes[:-1])} or {suffixes[-1]}" if suffixes[1:] else suffixes[0]
            raise ValueError(f"{file}: {key} has {path.name}, expected {expected}")
    return found


# ------------------------------------------------------------------------------------------------------------ building


@dataclass(frozen=True)
class _Step:
    """One run of a compiler: ``command`` without its output."""

    label: str
    command: tuple[str, ...]
    output: Path
    inputs: tuple[Path, ...]
    stamp: Path
    """Where it is written what the output was made of: the command, and ``Headers``."""
    author: str = ""
    """How the message begins that is for the author of the source, where the compiler says more before it."""

    def done(self) -> bool:
        """Whether the output is that of this command, of the same files, and of no header that appeared since."""
        try:
            made = json.loads(self.stamp.read_text())
            known = made["command"] == list(self.command) and self.output.exists()
            return known and Headers(**made["headers"]).are_as_they_were()
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def run(self, telling: _Telling) -> None:
        if telling.files:
            tell(self.label)
        depends = self.output.with_name(self.output.name + ".d")
        compiles = "-c" in self.command
        self.stamp.unlink(missing_ok=True)
        # beside the output, to replace it at once: a process may have the old library loaded
        scratch = self.output.with_name(f".{self.output.name}.{os.getpid()}")
        track = ("-MMD", "-MF", str(depends)) if compiles else ()
        began = time.time_ns()
        try:
            warnings = toolchain.run((*self.command, *track, "-o", str(scratch)), self.label, announced=telling.files)
            scratch.replace(self.output)
        except CompileError as error:
            shown = str(error) if telling.errors or not compiles else _shortened(str(error), self.author)
            raise CompileError(shown) from None
        finally:
            scratch.unlink(missing_ok=True)
        if warnings:
            tell(f"{self.label}:\n{warnings}")
        files = dependencies(depends) if compiles else map(str, self.inputs)
        headers = Headers.read(files, self.command if compiles else ())
        if not headers.changed_since(began):  # else the compiler may have read what was there before
            self.stamp.write_text(json.dumps({"command": self.command, "headers": vars(headers)}))


def _shortened(error: str, author: str = "") -> str:
    label, *lines = error.splitlines()
    own = next((i for i, line in enumerate(lines) if author and line.startswith(author)), None)
    few = toolchain.first_error(error) if own is None else "\n".join((label, *lines[own:]))
    n = len(lines) + 1 - len(few.splitlines())
    return f"{few}\n({n} more lines: aotops build --verbose)" if n else error


def _build(project: _Project, telling: _Telling) -> Path:
    if not project.sources and not project.triton:
        raise ValueError(f"{project.root / 'pyproject.toml'}: sources matches no file")
    folder = project.root / "build" / "aotops"
    toolchain.runtime()  # before anything is compiled
    with locked(folder):
        generated = _of_triton(project, folder / "triton", telling) if project.triton else []
        steps = [*_compile_steps(project, folder), *(_generated_step(project, file) for file in generated)]
        _run_all(steps, telling)
        link = _link_step(project, folder, steps)
        project.library.parent.mkdir(parents=True, exist_ok=True)
        if not link.done():
            link.run(telling)
            _audit(project, link)
    return project.library


def _audit(project: _Project, link: _Step) -> None:
    if project.cuda and (faults := fatbin.faults(project.library)):
        link.stamp.unlink(missing_ok=True)
        project.library.unlink()
        raise CompileError(
            f"{project.library.name} is not for drivers from 525, and was deleted:\n" + "\n".join(faults)
        )


def _run_all(steps: Sequence[_Step], telling: _Telling) -> None:
    """Runs those that are not done."""
    wanted = [step for step in steps if not step.done()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = [pool.submit(step.run, telling) for step in wanted]
        try:
            for run in runs:
                run.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _of_triton(project: _Project, folder: Path, telling: _Telling) -> list[Path]:
    """Compiles the Triton kernels, and makes the sources that launch them."""
    from .triton import building

    folder.mkdir(parents=True, exist_ok=True)
    triton = building.installed(project.triton_version)
    runs = building.compiles(project.triton, project.archs, folder, triton)
    stamps = [run.output.with_name(run.output.name + ".stamp") for run in runs]
    steps = [
        _Step(run.label, run.command, run.output, (run.file,), stamp, f"{run.entry.name}: ")
        for run, stamp in zip(runs, stamps, strict=True)
    ]
    _run_all(steps, telling)
    return building.write(runs, folder)


def _generated_step(project: _Project, source: Path) -> _Step:
    include = [f"-I{path}" for path in (source.parent, toolchain.include_dir())]
    flags = () if source.suffix == ".S" else (*toolchain.AOT_FLAGS, "-O2", "-Wall", "-DAOT_ISA=cuda", *include)
    command = (*toolchain.cxx().command, *flags, "-c", str(source))
    output = source.with_name(source.name + ".o")
    return _Step(f"compiling {source.name}", command, output, (source,), output.with_name(output.name + ".json"))


def _compile_steps(project: _Project, folder: Path) -> Iterator[_Step]:
    made = (folder / "triton",) if project.triton else ()  # the headers of operators
    include = [f"-I{path}" for path in (*project.include, *made, toolchain.include_dir())]
    cuda = [source for source in project.sources if source.suffix == ".cu"]
    compiler = _nvcc(project) if cuda else None
    if cuda and not compiler:
        names = ", ".join(source.name for source in cuda)
        tell(f"no nvcc: {project.library.name} has CPU entries only, without {names}")
    for source in project.sources:
        if source.suffix != ".cu":
            yield from _cpu_steps(project, folder, source, include)
        elif compiler:
            yield _cuda_step(project, folder, source, compiler, include)
    yield _tvm_ffi_step(project, folder, bool(compiler))
    if compiler and project.cuda:
        yield _runtime_step(folder, compiler)
    if project.version:
        yield _version_step(project, folder)


def _nvcc(project: _Project) -> toolchain.Compiler | None:
    if not project.cuda or "NVCC" in os.environ:
        return toolchain.nvcc()
    folder = cache_dir() / "toolchains"
    with locked(folder):
        return toolchain.compiler([str(cuda12.assemble(folder / "cuda-12.9"))], "the CUDA 12.9 toolchain's nvcc")


def _cpu_steps(project: _Project, folder: Path, source: Path, include: Sequence[str]) -> Iterator[_Step]:
    """For each instruction set, if the source has an entry that picks one (cpu/entry.h)."""
    text = source.read_text(errors="replace")
    aot = uses_aot(text, source, project.include)
    for isa in project.isas if "AOT_CPU_ENTRY" in text else ("baseline",):
        own = (*toolchain.AOT_FLAGS, "-O3", *toolchain.isa_flags(isa)) if aot else toolchain.FOREIGN_FLAGS
        command = (*toolchain.cxx().command, *own, "-Wall", *include, *project.flags, "-c", str(source))
        yield _object_step(project, folder, source, f"{source.name} ({isa})", command, f".{isa}.o")


def _cuda_step(
    project: _Project, folder: Path, source: Path, compiler: toolchain.Compiler, include: Sequence[str]
) -> _Step:
    aot = uses_aot(source.read_text(errors="replace"), source, project.include)
    flags = toolchain.cuda_flags(project.archs, aot, bool(project.cuda))
    command = (*compiler.command, *flags, *include, *project.flags, "-c", str(source))
    return _object_step(project, folder, source, f"{source.name} (sm {' '.join(project.archs)})", command, ".o")


def _object_step(
    project: _Project, folder: Path, source: Path, what: str, command: tuple[str, ...], suffix: str
) -> _Step:
    output = folder / source.relative_to(project.root).with_name(source.name + suffix)
    output.parent.mkdir(parents=True, exist_ok=True)
    return _Step(f"compiling {what}", command, output, (source,), output.with_name(output.name + ".json"))


def _tvm_ffi_step(project: _Project, folder: Path, cuda: bool) -> _Step:
    """The functions by which tvm-ffi calls the library's entries."""
    text = tvm_ffi.functions(source.read_text(errors="replace") for source in project.sources)
    file = _written(folder / "tvm_ffi.cpp", text)
    defined = ("-DAOT_TVM_FFI_CUDA",) if cuda else ()
    command = (*toolchain.cxx().command, "-std=c++17", "-fPIC", *defined, f"-I{toolchain.include_dir()}")
    output = folder / "tvm_ffi.o"
    return _Step("compiling tvm_ffi.cpp", (*command, "-c", str(file)), output, (file,), folder / "tvm_ffi.o.json")


def _runtime_step(folder: Path, compiler: toolchain.Compiler) -> _Step:
    """The library's aot_cuda_runtime(), by which the audit knows the version of its CUDA runtime."""
    text = """#include <cuda_runtime_api.h>
extern "C" int aot_cuda_runtime() {
  int version = 0;
  return cudaRuntimeGetVersion(&version) == cudaSuccess ? version : 0;
}
"""
    file = _written(folder / "cuda_runtime.cpp", text)
    command = (*compiler.command, "-Xcompiler", "-fPIC", "-c", str(file))
    output = folder / "cuda_runtime.o"
    return _Step("compiling cuda_runtime.cpp", command, output, (file,), folder / "cuda_runtime.o.json")


def _written(file: Path, text: str) -> Path:
    if not file.exists() or file.read_text() != text:
        file.write_text(text)
    return file


def _version_step(project: _Project, folder: Path) -> _Step:
    """The library's aot_version(), as libaotops.so has one."""
    text = f'extern "C" const char *aot_version() {{ return "{project.version}"; }}\n'
    file = _written(folder / "version.cpp", text)
    command = (*toolchain.cxx().command, "-fPIC", "-c", str(file))
    return _Step("compiling version.cpp", command, folder / "version.o", (file,), folder / "version.o.json")


def _link_step(project: _Project, folder: Path, steps: Sequence[_Step]) -> _Step:
    cuda = any(step.output.name.endswith(".cu.o") for step in steps)
    compiler = _nvcc(project) if cuda else toolchain.cxx()
    assert compiler is not None  # which compiled them
    inputs = (*(step.output for step in steps), toolchain.runtime())
    link = (*compiler.command, *map(str, inputs), *toolchain.link_flags(cuda, bool(project.cuda)))
    return _Step(f"linking {project.library.name}", link, project.library, inputs, folder / "link.json")


# ------------------------------------------------------------------------------------------------------------ watching

_SUFFIXES = {".h", ".hh", ".hpp", ".hxx", ".cuh", ".inc", ".c", ".cc", ".cpp", ".cxx", ".cu"}


def _wait(project: _Project, seen: dict[str, float], began: float) -> dict[str, float]:
    """Waits until a file is other than the last build, which began then, read it. Returns the times of change.
    ``seen``: those before that build."""
    # headers that the build has found: an edit of one during the build counts
    built = {path: min(changed, began) for path, changed in _state(project).items()} | seen
    while (now := _state(project, built)) == built:
        time.sleep(_POLL_SECONDS)
    while True:  # an editor may be writing
        time.sleep(_POLL_SECONDS)
        before, now = now, _state(project, built)
        if now == before:
            return now


def _state(project: _Project, more: Iterable[str] = ()) -> dict[str, float]:
    """The times of change of everything that the library is made of, and of ``more``."""
    folder = project.root / "build" / "aotops"
    files: set[str] = {str(project.root / "pyproject.toml"), *map(str, project.sources), *more}
    for stamp in folder.glob("**/*.o.json"):
        try:
            made = json.loads(stamp.read_text())["headers"]
            files.update(made["contents"], made["absent"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    for source in project.sources:
        files.update(str(path) for path in source.parent.glob("*") if path.suffix in _SUFFIXES)
    for declaration in project.triton:
        files.update(str(path) for path in declaration.parent.glob("*.py"))
    return {path: _changed(path) for path in files if not path.startswith(str(folder))}


def _changed(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0
