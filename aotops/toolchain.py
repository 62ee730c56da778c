"""The compilers of this machine and what they are given: flags, headers, the runtime of a library of operators."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parent
_QUIET_SECONDS = 2.0
"""A step that takes longer says so."""

DEFAULT_ARCHS = ("80", "90")
"""The GPU architectures to compile for where there is no GPU."""


class CompileError(RuntimeError):
    """A library cannot be built: a compiler is missing or refuses a source, whose message this has."""


# ------------------------------------------------------------------------------------------------- what aotops provides


def include_dir() -> Path:
    """The folder of ``aot.h`` and the device helpers, ``cpu/`` and ``cuda/``."""
    shipped = _PACKAGE / "include"
    return shipped if shipped.exists() else _PACKAGE.parent / "cuda_src"


def cmake_dir() -> Path:
    """The folder of ``aotopsConfig.cmake``: ``cmake -Daotops_DIR=...`` makes ``find_package(aotops)`` find it."""
    return _PACKAGE / "cmake"


def runtime() -> Path:
    """The static library that sources with ``aot.h`` are linked with.

    Raises:
        CompileError: it has not been built.
    """
    file = _PACKAGE / "lib" / "libaot.a"
    if not file.exists():
        raise CompileError(f"{file} does not exist: build it with `make lib`")
    return file


# ---------------------------------------------------------------------------------------------------------- compilers


@dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]
    version: str
    """Its output for ``--version``."""

    @property
    def name(self) -> str:
        return Path(self.command[-1]).name

    @property
    def is_gcc(self) -> bool:
        return "Free Software Foundation" in self.version and self.name != "nvcc"


@cache
def cxx() -> Compiler:
    """The C++ compiler: $CXX, or g++, c++ or clang++ in PATH.

    Raises:
        CompileError: there is none, or $CXX does not run.
    """
    if given := os.environ.get("CXX"):
        return compiler(shlex.split(given), "$CXX")
    for name in ("g++", "c++", "clang++"):
        if found := shutil.which(name):
            return compiler([found], name)
    raise CompileError("no C++ compiler: g++ is not in PATH; install it (Debian: apt install g++), or set CXX")


@cache
def nvcc() -> Compiler | None:
    """The CUDA compiler, or None: $NVCC, where empty means none; of $CUDA_HOME, of $CUDA_PATH, in PATH, in
    /usr/local/cuda, or of PyPI's nvidia-cuda-nvcc.

    Raises:
        CompileError: $NVCC does not run.
    """
    if (given := os.environ.get("NVCC")) is not None:
        return compiler(shlex.split(given), "$NVCC") if given else None
    return next((compiler([str(file)], str(file)) for file in _nvccs() if os.access(file, os.X_OK)), None)


def need_nvcc() -> Compiler:
    """The CUDA compiler. Raises CompileError if there is none."""
    if found := nvcc():
        return found
    raise CompileError(
        "no CUDA compiler: nvcc is not in PATH, CUDA_HOME or /usr/local/cuda; install CUDA's toolkit, or "
        "`pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl`, or set NVCC"
    )


def _nvccs() -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            yield Path(home) / "bin" / "nvcc"
    if found := shutil.which("nvcc"):
        yield Path(found)
    yield Path("/usr/local/cuda/bin/nvcc")
    for folder in dict.fromkeys((sysconfig.get_path("purelib"), *site.getsitepackages(), site.getusersitepackages())):
        yield from sorted(Path(folder, "nvidia").glob("cu*/bin/nvcc"), reverse=True)


@cache
def _nvcc_library_dirs() -> tuple[str, ...]:
    """PyPI's package has CUDA's libraries in lib/, where its nvcc.profile may not look."""
    found = nvcc()
    lib = Path(found.command[-1]).resolve().parents[1] / "lib" if found else None
    return (f"-L{lib}",) if lib and (lib / "libcudart_static.a").exists() else ()


def compiler(command: Sequence[str], origin: str) -> Compiler:
    """The compiler of a command. Raises CompileError if it does not run; ``origin`` is its name in the message."""
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{origin} is {shlex.join(command)!r}, which does not run: {error}") from None
    if done.returncode:
        raise CompileError(f"{origin} is {shlex.join(command)!r}, which fails: {done.stderr.strip()}")
    return Compiler(tuple(command), done.stdout.strip())


@cache
def gpu_archs() -> tuple[str, ...]:
    """The compute capabilities of this machine's GPUs, as nvcc writes them: ("90",). Empty where there is no GPU."""
    try:
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = {line.strip().replace(".", "") for line in done.stdout.splitlines()} if done.returncode == 0 else set()
    return tuple(sorted((arch for arch in found if arch.isdigit()), key=int))


def parse_archs(arch: str | int | Sequence[str | int] | None) -> tuple[str, ...]:
    """GPU architectures as nvcc writes them: "90", of "sm_90", 90 or "9.0". "native": those of
    this machine's GPUs. None: the same, or DEFAULT_ARCHS where there is none.

    Raises:
        ValueError: another text; "native" where there is no GPU.
    """
    if arch is None:
        return gpu_archs() or DEFAULT_ARCHS
    if arch == "native":
        return gpu_archs() or _no_gpu()
    given = [arch] if isinstance(arch, str | int) else arch
    names = [name for each in given for name in str(each).replace(",", " ").split()]
    plain = [name.removeprefix("sm_").removeprefix("compute_").replace(".", "") for name in names]
    if not plain or not all(name.rstrip("af").isdigit() for name in plain):
        raise ValueError(f"arch is {arch!r}, expected compute capabilities such as '90' or 'sm_80,sm_90'")
    return tuple(dict.fromkeys(plain))


def _no_gpu() -> tuple[str, ...]:
    raise ValueError("arch is 'native', and nvidia-smi finds no GPU here; expected compute capabilities such as '90'")


# -------------------------------------------------------------------------------------------------------------- flags

ISAS = ("baseline", *(("avx2", "avx512") if platform.machine() == "x86_64" else ()))
"""The instruction sets that the CPU sources of a package are compiled for; the entry picks one (cpu/entry.h)."""

# GCC 12 warns of its own intrinsics (GCC bug 105593).
_AVX512 = ("-mprefer-vector-width=512", "-Wno-maybe-uninitialized")
_MARCH = {"baseline": (), "avx2": ("-march=x86-64-v3",), "avx512": ("-march=x86-64-v4", *_AVX512)}

AOT_FLAGS = ("-std=c++17", "-fPIC", "-fvisibility-inlines-hidden", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
"""For C++ with ``aot.h``."""
FOREIGN_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-D_GLIBCXX_USE_CXX11_ABI=0")
"""For C++ without ``aot.h``: that of MindSpore's convention reads attributes with strings of the old ABI."""


def isa_flags(isa: str) -> tuple[str, ...]:
    return (*_MARCH[isa], f"-DAOT_ISA={isa}")


@cache
def native_flags() -> tuple[str, ...]:
    """For the processor of this machine."""
    return ("-march=native", *(_AVX512 if "avx512bw" in processor() else ()))


@cache
def processor() -> str:
    """The facts that -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.machine()
    wanted = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    return "\n".join(line for line in lines if line.startswith(wanted))


def cuda_flags(archs: Sequence[str], aot: bool, old_drivers: bool = False) -> tuple[str, ...]:
    """For CUDA C++: code for each architecture, and PTX for later ones: of 100, which serves 110 too, or of the
    newest.

    Args:
        old_drivers: nothing is compressed, since drivers know how from 550 on only.
    """
    gencode = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    newest = "100" if "100" in archs else max(archs, key=lambda arch: int(arch.rstrip("af")))
    if newest.isdigit():
        gencode.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")
    host = "-fPIC,-fvisibility-inlines-hidden" if aot else "-fPIC"
    own = ("-DAOT_ISA=cuda", "-Werror=cross-execution-space-call") if aot else ("-D_GLIBCXX_USE_CXX11_ABI=0",)
    compress = "--compress-mode=none" if old_drivers else "-Xfatbin=-compress-all"
    return ("-std=c++17", "-O3", *own, "-Xcompiler", host, compress, *gencode)


def link_flags(cuda: bool, old_drivers: bool = False) -> tuple[str, ...]:
    """An unresolved symbol fails here, and not in a process that uses the library. C++ symbols are not exported.
    Runtimes are linked where they are used. It is not unloaded, since it has handlers of fork()."""
    keywords = ("defs", "now", "nodelete")
    options = (*(f"-z{word}" for word in keywords), "--as-needed", f"--version-script={cmake_dir() / 'exports.map'}")
    linker = tuple(word for option in options for word in ("-Xlinker", option))
    if cuda and old_drivers:  # what nvlink 13 makes is for drivers from 580
        return ("-shared", "-nodlink", "-cudart=static", *linker, "-lgomp", "-ldl")
    if cuda:
        return ("-shared", "-cudart=static", *_nvcc_library_dirs(), *linker, "-lgomp", "-ldl")
    return ("-shared", "-fopenmp", *linker, "-ldl")


# ------------------------------------------------------------------------------------------------------------ running


def run(command: Sequence[str], what: str, announced: bool = False) -> str:
    """Runs a compiler. Says so on stderr if it takes more than two seconds.

    Args:
        what: "compiling scale.cpp", for messages.
        announced: it has been said.

    Returns:
        What it printed: warnings.

    Raises:
        CompileError: it fails; with all that it printed.
    """
    if _runs_nvcc(command) and any(map(_misread, _with_option(command))):
        return _run_behind_links(command, what, announced)
    return _run(command, what, announced)


def _run(command: Sequence[str], what: str, announced: bool) -> str:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    try:
        try:
            output, _ = process.communicate(timeout=_QUIET_SECONDS)
        except subprocess.TimeoutExpired:
            with nullcontext() if announced else telling(f"{what} with {Path(command[0]).name}"):
                output, _ = process.communicate()
    except BaseException:  # such as KeyboardInterrupt: the compiler must not outlive it
        process.kill()
        process.wait()
        raise
    if process.returncode:
        raise CompileError(f"{what} failed:\n{output.strip()}")
    return output.strip()


_FOR_SHELL = re.compile("/[^/]*[$'\"`\\\\,\udc80-\udcff]")
"""A path that nvcc takes for something else: it runs each step by a line of `sh`, with paths in double quotes at best,
takes a comma for the end of a path, and warns of each that is not UTF-8."""

_FOR_LINKER = re.compile("/[^/]*[\\s&;()<>|*?#~]|" + _FOR_SHELL.pattern)
"""A path that nvcc takes for something else in a word that it hands on (-Xlinker, -Xcompiler): it writes no quotes."""


def _with_option(command: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Each word, and whether nvcc hands it on."""
    return zip(command, (before in ("-Xlinker", "-Xcompiler") for before in ("", *command)), strict=False)


def _misread(word: tuple[str, bool]) -> bool:
    return bool((_FOR_LINKER if word[1] else _FOR_SHELL).search(word[0]))


def _runs_nvcc(command: Sequence[str]) -> bool:
    found = nvcc()
    installed = found is not None and tuple(command[: len(found.command)]) == found.command
    return installed or Path(command[0]).name == "nvcc"


def _run_behind_links(command: Sequence[str], what: str, announced: bool) -> str:
    """Runs a command whose paths nvcc would misread, with links to their folders instead."""
    if backquoted := [word for word in command if "`" in word]:
        raise CompileError(f"{what} failed: nvcc cannot read a path with a backquote: rename {backquoted[0]}")
    with tempfile.TemporaryDirectory(prefix="aotops-") as links:
        folders: dict[str, str] = {}

        def plain(word: str, handed_on: bool) -> str:
            if not _misread((word, handed_on)):
                return word
            option, slash, path = word.partition("/")
            folder, name = os.path.split(slash + path)
            if not folders.get(folder):
                folders[folder] = os.path.join(links, str(len(folders)))
                os.symlink(folder, folders[folder])
            return f"{option}{folders[folder]}/{name}"

        words = [plain(*word) for word in _with_option(command)]
        if _FOR_LINKER.search(links) and any(word[1] and _misread(word) for word in _with_option(words)):
            raise CompileError(f"{what} failed: nvcc cannot read a path in {tempfile.gettempdir()!r}: set TMPDIR")
        if any(_FOR_SHELL.search(word) for word in (*words, links)):
            misread = next(word for word in (*words, links) if _FOR_SHELL.search(word))
            raise CompileError(
                f"{what} failed: nvcc cannot read the name {os.path.basename(misread)!r}: rename the file"
            )
        shown = {os.fsencode(folder).decode(errors="replace"): link for folder, link in folders.items()}
        try:
            output = _run(words, what, announced)
        except CompileError as error:
            raise CompileError(_with_folders(str(error), shown)) from None
        if "-MF" in command:
            depends = Path(command[command.index("-MF") + 1])
            escaped = {folder.replace(" ", "\\ ").replace("$", "$$"): link for folder, link in folders.items()}
            depends.write_bytes(os.fsencode(_with_folders(os.fsdecode(depends.read_bytes()), escaped)))
        return _with_folders(output, shown)


def _with_folders(text: str, folders: Mapping[str, str]) -> str:
    for folder, link in folders.items():
        text = text.replace(f"{link}/", f"{folder}/")
    return text


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Shows on stderr that something is in progress: on a terminal as rich shows it, if that is installed."""
    shown: AbstractContextManager[object] = nullcontext()
    if sys.stderr.isatty():
        try:
            from rich.console import Console

            shown = Console(stderr=True).status(what)
        except ImportError:
            tell(f"{what} ...")
    else:
        tell(f"{what} ...")
    with shown:
        yield


def tell(text: str) -> None:
    sys.stderr.write(f"aotops: {text}\n")  # at once, since compilers run in several threads
    sys.stderr.flush()


_DIAGNOSTIC = re.compile(r"(\S.*?(?::\d+|\(\d+\))):(?:\d+:)? (fatal error|error|warning|note|remark)\b.*")
"""A message of GCC, Clang or nvcc: its place, and its kind."""


def first_error(output: str) -> str:
    """The first error that a compiler printed, and one line for each error in another place. Without warnings,
    and without what repeats an error for each type that a template is instantiated with."""
    blocks: list[list[str]] = [[]]  # each with the lines that lead to a diagnostic, it, and what follows
    heads: list[re.Match[str] | None] = [None]
    for line in output.splitlines():
        found = _DIAGNOSTIC.fullmatch(line)
        if heads[-1] and (found or re.match(r"In file included from |\S.*: In ", line)):
            blocks.append([])
            heads.append(None)
        heads[-1] = found or heads[-1]
        blocks[-1].append(line)
    errors = [(head, block) for head, block in zip(heads, blocks, strict=True) if head and "error" in head[2]]
    if not errors:
        return output
    (first, block), *others = errors
    places = {head[1]: head[0] for head, _ in others if head[1] != first[1]}
    return "\n".join([*block, *places.values()]).rstrip()
