"""The GPU code in a shared library, read from its file: which GPUs it is for, and which drivers load it.

    python -m aotops.fatbin [--runtime VERSION] LIBRARY [90 100 ... | all]

audits a library that is compiled with the CUDA 12.9 toolchain (cuda12.py), and asks for code for GPUs of these compute
capabilities; "all": for every one since Turing, and a later one. VERSION is that of the CUDA runtime in it (12090), of
a library for another machine: it does not load here.
"""

from __future__ import annotations

import argparse
import mmap
import re
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .elf import Elf

GPUS = (75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121)
"""The compute capabilities of the GPUs that there are from Turing on."""
_LATER = 130
OLDEST_ABI = (0x33, 7)
"""OSABI and its version in the machine code that a driver of CUDA 12.0 loads. ptxas 13 writes (0x41, 8) for every GPU,
and ptxas 12.9 for those of compute capability 10.0 and later, which need a later driver themselves."""
_NEW_ABI_FROM = 100
NEWEST_PTX = (8, 8)
"""The PTX ISA of CUDA 12.9."""


class Image(NamedTuple):
    """Code for one GPU architecture."""

    ptx: bool
    arch: int
    specific: bool
    """For this architecture alone, as of sm_90a."""
    compressed: bool
    isa: tuple[int, int]
    """The version of PTX, of PTX."""

    @property
    def name(self) -> str:
        return f"{'compute' if self.ptx else 'sm'}_{self.arch}{'a' if self.specific else ''}"

    def serves(self, capability: int) -> bool:
        """Machine code runs on the same major version, PTX on any later one."""
        if self.specific:
            return self.arch == capability
        same = self.ptx or self.arch // 10 == capability // 10
        return same and self.arch <= capability


def named(name: str) -> Image:
    """The image that ``architectures`` names so, such as "sm_90a", as far as the name tells."""
    kind, _, number = name.partition("_")
    return Image(kind == "compute", int(number.rstrip("af")), not number.isdigit(), False, (0, 0))


_CONTAINER = struct.Struct("<IHHQ")
"""The header of a fat binary: magic number, version, bytes of this header, bytes behind it."""
_ENTRY = struct.Struct("<HHIQI4xHHI8xQ")
"""The header of an image: kind (1 PTX, 2 machine code), version, bytes of this header and behind it, those of
compressed code, minor and major version of PTX, its architecture, flags."""
_SHORT_ENTRY = 48
_MAGIC = 0xBA55ED50
_COMPRESSED, _SPECIFIC = 0x2000 | 0x8000, 0x100000


def containers(path: Path) -> list[list[Image]]:
    """The images of each fat binary: nvcc writes one for each source. They are in the section .nv_fatbin."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at, size = Elf(path).sections.get(".nv_fatbin", (0, 0))
        return [found for found in _containers(data, at, at + size) if found]


def _containers(data: mmap.mmap, at: int, end: int) -> Iterator[list[Image]]:
    while at + _CONTAINER.size <= end:
        magic, _, head, size = _CONTAINER.unpack_from(data, at)
        if magic != _MAGIC:
            at += 8  # between containers: padding
            continue
        yield list(_images(data, at + head, min(at + head + size, end)))
        at += head + size


def _images(data: mmap.mmap, at: int, end: int) -> Iterator[Image]:
    while at + _SHORT_ENTRY <= end:
        kind, _, head, size, compressed, minor, major, arch, flags = _ENTRY.unpack_from(data, at)
        if head + size == 0:
            return
        is_compressed = bool(compressed or flags & _COMPRESSED)
        yield Image(kind == 1, arch, bool(flags & _SPECIFIC), is_compressed, (major, minor))
        at += head + size


_ELF_HEADER = struct.Struct("<4s3sBB7xHHI24xI")
_ELF_START, _EM_CUDA = b"\x7fELF\x02\x01\x01", 190


def machine_code(path: Path) -> set[tuple[int, tuple[int, int]]]:
    """The GPU architecture of each ELF file in a library, with OSABI and its version: of fat binaries, and of Triton's
    kernels."""
    found = set()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(_ELF_START, 1)
        while 0 <= at <= len(data) - _ELF_HEADER.size:
            _, _, osabi, version, _, machine, _, flags = _ELF_HEADER.unpack_from(data, at)
            if machine == _EM_CUDA:
                found.add((flags & 0xFF if osabi == OLDEST_ABI[0] else flags >> 8 & 0xFF, (osabi, version)))
            at = data.find(_ELF_START, at + 1)
    return found


def architectures(path: Path) -> list[str]:
    """The GPU architectures that a shared library has code for, such as "sm_90", and "compute_120" of PTX."""
    found = {(image.arch, image.ptx, image.specific, image.name) for each in containers(path) for image in each}
    known = {arch for arch, ptx, *_ in found if not ptx}
    found |= {(arch, False, False, f"sm_{arch}") for arch, _ in machine_code(path) if arch not in known}
    return [name for *_, name in sorted(found)]


# --------------------------------------------------------------------------------------------------------------- audit


_ASK = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).aot_cuda_runtime())"


def runtime(path: Path) -> int | None:
    """The version of the CUDA runtime in a library, 12090 for 12.9; None if it does not say. A process of its own loads
    the library."""
    if not any(symbol.name == "aot_cuda_runtime" and symbol.defined for symbol in Elf(path).symbols):
        return None
    done = subprocess.run(
        [sys.executable, "-c", _ASK, str(path.absolute())], capture_output=True, text=True, timeout=60
    )
    return int(done.stdout) if done.returncode == 0 else None


def release(version: int) -> str:
    """The version of CUDA as it is written: "12.9" for 12090."""
    return f"{version // 1000}.{version % 1000 // 10}"


def oldest_driver(version: int) -> int:
    """The first release of the driver for a version of CUDA, 12090 for 12.9: cuda_src/cuda/error_text.h says it too."""
    return 580 if version >= 13000 else 525


def faults(path: Path, gpus: Iterable[int] = (), version: int | None = None) -> list[str]:
    """Why a driver of release 525 would not load the library's code, and the GPUs without code; empty if it is right.

    Args:
        gpus: compute capabilities that each source is to have code for, unless its code is for one architecture alone.
        version: of the CUDA runtime in the library; None: the library is loaded and says it.
    """
    found, code = containers(path), machine_code(path)
    if not found and not code:
        return []
    linked = (*_linked(Elf(path)), *_old_runtime(version or runtime(path)))
    return [*linked, *_new_machine_code(code), *_new_images(found), *_missing(found, gpus)]


def _linked(elf: Elf) -> Iterator[str]:
    """The static runtime asks the driver for its functions by name, and has a way for drivers that lack some."""
    for name in elf.needed:
        if re.match(r"lib(cuda|cudart|nvJitLink|nvrtc)\.so", name):
            yield f"it needs {name}, expected the static CUDA runtime alone: nvcc -cudart static"
    wanted = [s.name for s in elf.symbols if not (s.defined or s.weak) and re.match(r"cu(da)?[A-Z]", s.name)]
    if wanted:
        yield f"it needs {', '.join(wanted[:5])} of the driver, expected none: ask for it by name, when it is called"


def _old_runtime(version: int | None) -> Iterator[str]:
    if version is not None and not 12000 <= version < 13000:
        yield f"its CUDA runtime is {release(version)}, expected 12.9"


def _new_machine_code(code: Iterable[tuple[int, tuple[int, int]]]) -> Iterator[str]:
    abi = "OSABI {:#x}, version {}"
    for arch, found in sorted(code):
        if arch < _NEW_ABI_FROM and found != OLDEST_ABI:
            yield f"code for sm_{arch} has {abi.format(*found)}, expected {abi.format(*OLDEST_ABI)}, of ptxas 12"


def _new_images(found: Sequence[Sequence[Image]]) -> Iterator[str]:
    images = {image for each in found for image in each}
    for image in sorted(images, key=lambda image: image.name):
        if image.compressed:
            yield f"code for {image.name} is compressed, which old drivers cannot read: nvcc --compress-mode=none"
        if image.ptx and image.isa > NEWEST_PTX:
            yield f"PTX for {image.name} is of ISA {image.isa[0]}.{image.isa[1]}, expected 8.8 or earlier"


def _missing(found: Sequence[Sequence[Image]], gpus: Iterable[int]) -> Iterator[str]:
    general = [images for images in found if not all(image.specific for image in images)]
    for gpu in gpus:
        n = sum(not any(image.serves(gpu) for image in images) for images in general)
        if n or not general:
            yield f"{n} of {len(general)} sources have no code for compute capability {gpu // 10}.{gpu % 10}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m aotops.fatbin")
    parser.add_argument("library", type=Path)
    parser.add_argument("gpus", nargs="*")
    parser.add_argument("--runtime", type=int, metavar="VERSION")
    given = parser.parse_args()
    path, version = given.library, given.runtime or runtime(given.library)
    found = faults(path, (*GPUS, _LATER) if given.gpus == ["all"] else map(int, given.gpus), version)
    if version is None and architectures(path):
        found.append("it has no function aot_cuda_runtime, which tells the version of its CUDA runtime")
    for fault in found:
        print(f"{path}: {fault}", file=sys.stderr)
    if found:
        sys.exit(1)
    cuda = f"CUDA {release(version)}" if version else "no CUDA"
    print(f"audit {path}: {cuda}, {' '.join(architectures(path)) or 'no GPU code'}")


if __name__ == "__main__":
    main()
