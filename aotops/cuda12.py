"""A CUDA 12.9 toolchain of packages of the package index. What it compiles loads with drivers from release 525, which
code of a CUDA 13 toolkit does not.

    python -m aotops.cuda12 FOLDER            then: FOLDER/bin/nvcc -arch=sm_90a -c x.cu
    python -m aotops.cuda12 FOLDER aarch64    adds what links a library for aarch64 hosts: FOLDER/lib/aarch64

nvcc, cudafe++, cicc and fatbinary are of 13.0, because the index has none of 12.9. ptxas, libdevice, the headers and
libcudart_static.a are of 12.9. The versions and hashes are in cuda12.txt, and in cuda12_aarch64.txt. nvcc compiles for
another host if it is given that host's compiler, -ccbin aarch64-linux-gnu-g++; the headers are the same.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from .toolchain import CompileError, telling

PACKAGES = Path(__file__).with_suffix(".txt")
HOSTS = {"aarch64": Path(__file__).with_name("cuda12_aarch64.txt")}
"""By another host than x86-64, the packages of its runtime."""
RUNTIME = 12090
"""The version of the runtime that a library has, as cudaRuntimeGetVersion says it."""
_RECIPE = 2
"""A change makes the toolchain again."""

_RUNTIME = "nvidia_cuda_runtime_cu12"
_PLACES = {
    "nvidia_cuda_nvcc": {"nvidia/cu13/bin/": "bin/"},
    "nvidia_nvvm": {"nvidia/cu13/nvvm/bin/": "nvvm/bin/"},
    "nvidia_cuda_nvcc_cu12": {
        "nvidia/cuda_nvcc/bin/": "bin/",
        "nvidia/cuda_nvcc/include/": "include/",
        "nvidia/cuda_nvcc/nvvm/libdevice/": "nvvm/libdevice/",
    },
    _RUNTIME: {
        "nvidia/cuda_runtime/include/": "include/",
        "nvidia/cuda_runtime/lib/": "lib/",
    },
    "nvidia_cuda_cccl_cu12": {"nvidia/cuda_cccl/include/": "include/cccl/"},
}
"""By wheel, in the order in which they are unpacked: where its folders are put. ptxas 12.9 replaces that of 13.0."""
_LEFT_OUT = re.compile(r"/(__init__\.py|__nvcc_device_query|nvcc\.profile|lib\w+\.so[.\d]*)$")

_PROFILE = """\
TOP              = $(_HERE_)/..
CICC_PATH        = $(TOP)/nvvm/bin
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH            += $(CICC_PATH):$(_HERE_):
INCLUDES        +=  "-I$(TOP)/include" $(_SPACE_)
SYSTEM_INCLUDES +=  "-isystem" "$(TOP)/include/cccl" $(_SPACE_)
LIBRARIES        =+ $(_SPACE_) "-L$(TOP)/lib"
"""

_CICC = """\
#!/bin/sh
# PTX of cicc 13.0 says that it is of ISA 9.0. CUDA 12.9 knows 8.8: its ptxas refuses an instruction of 9.0 by itself.
# PTX_FILTER is a command that changes such a file before ptxas has it.
"$(dirname "$0")/cicc-13.0" "$@" || exit
for argument in "$@"; do
  case $argument in
  *.ptx)
    [ -f "$argument" ] || continue
    sed -i '0,/^\\.version 9\\.[0-9]*/s//.version 8.8/' "$argument" && ${PTX_FILTER:-:} "$argument" || exit ;;
  esac
done
"""

_VERSION = """
/* nvcc is of 13.0, and these headers of 12.9: CUTLASS chooses types of the headers by nvcc's version. */
#if defined(__CUDACC_VER_MAJOR__)
#undef __CUDACC_VER_MAJOR__
#undef __CUDACC_VER_MINOR__
#define __CUDACC_VER_MAJOR__ 12
#define __CUDACC_VER_MINOR__ 9
#endif
"""


def assemble(folder: Path) -> Path:
    """The path of nvcc in ``folder``, where the toolchain is made unless it is there. One process at a time may call.

    Raises:
        CompileError: pip cannot get a package, or this machine is none that the packages are for.
    """
    ready = folder / "ready"
    if not (ready.exists() and ready.read_text() == identity()):
        _check_machine()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".cuda-12.9-") as scratch:
            made = Path(scratch, "made")
            _unpack(_download(PACKAGES, Path(scratch)), made)
            _adapt(made)
            (made / "ready").write_text(identity())
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
    return folder / "bin/nvcc"


def add_host(folder: Path, host: str) -> Path:
    """The folder, in a toolchain's, of the static runtime for another host, which is put there unless it is.

    Raises:
        CompileError: pip cannot get the package, or there is none for this host.
    """
    if host not in HOSTS:
        raise CompileError(f"the host is {host!r}, expected {' or '.join(HOSTS)}")
    target = folder / "lib" / host
    if not ((target / "ready").exists() and (target / "ready").read_text() == identity(HOSTS[host])):
        with tempfile.TemporaryDirectory(dir=folder, prefix=f".{host}-") as scratch:
            made = Path(scratch, "made")
            _unpack(_download(HOSTS[host], Path(scratch), host), made, {_RUNTIME: _PLACES[_RUNTIME]})
            (made / "lib/ready").write_text(identity(HOSTS[host]))
            shutil.rmtree(target, ignore_errors=True)
            (made / "lib").rename(target)
    return target


def identity(packages: Path = PACKAGES) -> str:
    """The digest of what the toolchain, or its part for another host, is made of."""
    return hashlib.sha256(f"{_RECIPE}\n{packages.read_text()}".encode()).hexdigest() + "\n"


def supported() -> bool:
    """Whether the packages are for this machine."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def _check_machine() -> None:
    if not supported():
        raise CompileError(
            f"the CUDA 12.9 toolchain is for x86-64 Linux, and this is {platform.machine()} {sys.platform}: "
            "use an installed nvcc (NVCC=/path/nvcc)"
        )


# ------------------------------------------------------------------------------------------------------------- packages


def _download(packages: Path, folder: Path, host: str = "") -> dict[str, Path]:
    """The wheels, by the name in their file's name; for another host than this if one is named."""
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    options += ["--platform", f"manylinux2014_{host}"] if host else []
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), "--requirement", str(packages)]
    # by which a build in isolation hides pip
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with telling(f"downloading CUDA's runtime for {host}" if host else "downloading CUDA's compiler, 145 MB"):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(f"{_why(done.stderr)}\n{_OTHERWISE}")
    return {file.name.partition("-")[0]: file for file in folder.glob("*.whl")}


_OTHERWISE = "use an installed nvcc (NVCC=/path/nvcc), or none: CPU entries only (NVCC=)"


def _why(stderr: str) -> str:
    """With the names of the packages that the index lacks, if pip says them."""
    missing = re.findall(r"No matching distribution found for ([\w.-]+==[\w.]+)", stderr)
    if missing:
        return f"pip cannot get {', '.join(dict.fromkeys(missing))}, of which the CUDA 12.9 toolchain is made"
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR")] or stderr.strip().splitlines()
    return "pip cannot get the packages of the CUDA 12.9 toolchain:\n" + "\n".join(errors[:8])


# ------------------------------------------------------------------------------------------------------------- assembly


def _unpack(wheels: dict[str, Path], target: Path, folders: dict[str, dict[str, str]] = _PLACES) -> None:
    for name, places in folders.items():
        with zipfile.ZipFile(wheels[name]) as wheel:
            for member in wheel.infolist():
                place = next((at for at in places if member.filename.startswith(at)), None)
                if place is None or member.is_dir() or _LEFT_OUT.search(member.filename):
                    continue
                file = target / places[place] / member.filename[len(place) :]
                file.parent.mkdir(parents=True, exist_ok=True)
                with wheel.open(member) as source, file.open("wb") as copy:
                    shutil.copyfileobj(source, copy)
                if file.parent.name == "bin":
                    file.chmod(0o755)


def _adapt(target: Path) -> None:
    (target / "bin/nvcc.profile").write_text(_PROFILE)
    cicc = target / "nvvm/bin/cicc"
    cicc.rename(cicc.with_name("cicc-13.0"))
    cicc.write_text(_CICC)
    cicc.chmod(0o755)
    # cudafe++ 13 gives __cudaLaunch one argument more than 12.9's header declares
    _edit(target / "include/crt/host_runtime.h", r"(#define __cudaLaunch\()fun\)", r"\1fun, ...)")
    # which nvcc includes before everything else
    _edit(target / "include/cuda_runtime.h", r"(#define __CUDA_RUNTIME_H__\n)", lambda found: found[1] + _VERSION)


def _edit(file: Path, pattern: str, by: object) -> None:
    text, n = re.subn(pattern, by, file.read_text())  # type: ignore[call-overload]
    if not n:
        raise CompileError(f"{file.name} has no {pattern!r}: it is not CUDA 12.9's")
    file.write_text(text)


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python -m aotops.cuda12 FOLDER [aarch64]")
    folder, *host = sys.argv[1:]
    try:
        print(assemble(Path(folder)))
        if host:
            print(add_host(Path(folder), *host))
    except CompileError as error:
        sys.exit(f"aotops: {error}")


if __name__ == "__main__":
    main()
