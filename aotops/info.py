"""The report of ``aotops info``: what is installed, what works, and the command that mends what does not.

No framework is imported here: versions are those of the installed distributions, and ``collect(attempt=True)`` calls an
operator of each framework in a process of its own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from . import __version__, call, fatbin, library, registry, terminal, toolchain
from .elf import Elf
from .fatbin import architectures
from .library import LibraryError
from .spec import DEVICES
from .toolchain import CompileError

Info = dict[str, Any]

ISAS = ("baseline", "avx2", "avx512")
_V3 = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
"""The features of x86-64-v3 and v4, as /proc/cpuinfo names them."""
_COMPILERS = {
    "nvcc": "pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl",
    "g++": "apt install g++",
}
"""With the command that installs each."""
SECONDS = 120
"""Seconds that a framework may take to be imported and to add two numbers."""


def collect(attempt: bool = False) -> Info:
    """All of it, as JSON has it. ``mend`` lists what is unavailable: each with why and a command, or None.

    Args:
        attempt: call an operator in each installed framework, in a process of its own.
    """
    found: Info = {
        "aotops": {"version": __version__, "python": platform.python_version(), "folder": str(Path(__file__).parent)},
        "library": _library(),
        "cpu": _cpu(),
        "gpu": _gpu(),
        "cublaslt": None,
        "compilers": {name: _compiler(name) for name in _COMPILERS},
        "frameworks": _frameworks(attempt),
        "libraries": _libraries(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("AOTOPS_")},
    }
    if found["library"]["cuda"]:
        found["cublaslt"] = _cublaslt()
    found["cpu"]["in_use"] = _in_use(found["cpu"]["isa"], found["library"]["isas"])
    return found | {"mend": _mend(found)}


# -------------------------------------------------------------------------------------------------------------- library


def _library() -> Info:
    path = library.path()
    found: Info = {"path": str(path), "bytes": path.stat().st_size if path.exists() else None, "error": None}
    found |= {"version": None, "cuda": False, "runtime": None, "architectures": [], "isas": None}
    try:
        loaded = library.load()
        found |= {"version": loaded.aot_version().decode(), "cuda": library.has_cuda()}
    except (LibraryError, ValueError) as error:
        return found | {"error": str(error).partition(";")[0]}
    return found | {"runtime": fatbin.runtime(path), "architectures": architectures(path), "isas": _built_isas(path)}


def _built_isas(path: Path) -> list[str] | None:
    """The instruction sets that the CPU entries were compiled for; None if the library's symbols were stripped."""
    if ".symtab" not in Elf(path).sections:
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return [isa for isa in ISAS if isa == "baseline" or data.find(f"_cpu_{isa}\0".encode()) >= 0]


_ASK_CUBLASLT = """
import ctypes
from aotops import library
told = ctypes.c_char_p(), ctypes.c_char_p()
library.load().aot_cublaslt(*map(ctypes.byref, told))
print(*(text.value.decode(errors="replace") for text in told), sep="\\n")
"""


def _cublaslt() -> Info | None:
    """The cuBLASLt of a process that has imported no framework, and why it is used, or none is; None if the library
    does not say. In a process of its own, because the library keeps the first that it finds."""
    done = subprocess.run([sys.executable, "-c", _ASK_CUBLASLT], capture_output=True, text=True, timeout=SECONDS)
    path, _, reason = done.stdout.rstrip("\n").partition("\n")
    return {"path": path or None, "reason": reason} if done.returncode == 0 else None


# -------------------------------------------------------------------------------------------------------------- devices


def _cpu() -> Info:
    """``isa``: the best that the processor has, or AOTOPS_CPU_ISA allows."""
    cpuinfo = Path("/proc/cpuinfo")
    facts = re.findall(r"^(model name|flags)\s*:\s*(.*)$", cpuinfo.read_text() if cpuinfo.exists() else "", re.M)
    named = dict(reversed(facts))
    flags = set(named.get("flags", "").split())
    best = "avx512" if flags >= _V4 else "avx2" if flags >= _V3 else "baseline"
    isa = min(best, os.environ.get("AOTOPS_CPU_ISA", best), key=lambda isa: ISAS.index(isa) if isa in ISAS else 3)
    model = named.get("model name") or platform.processor() or platform.machine()
    return {"model": model, "threads": len(os.sched_getaffinity(0)), "isa": isa}


def _in_use(isa: str, built: list[str] | None) -> str | None:
    """The best that the library has too; None if that is not known."""
    return max((each for each in built if ISAS.index(each) <= ISAS.index(isa)), key=ISAS.index) if built else None


def _gpu() -> Info:
    """The driver and its devices, by libcuda itself."""
    found: Info = {"driver": _driver_version(), "cuda": None, "devices": [], "error": None}
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return found | {"error": "there is no NVIDIA driver (libcuda.so.1)"}
    number = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(number)) == 0:
        found["cuda"] = fatbin.release(number.value)
    if status := cuda.cuInit(0):
        return found | {"error": f"cuInit failed with error {status}"}
    cuda.cuDeviceGetCount(ctypes.byref(number))
    return found | {"devices": [_device(cuda, i) for i in range(number.value)]}


def _device(cuda: ctypes.CDLL, ordinal: int) -> Info:
    device, name, memory = ctypes.c_int(), ctypes.create_string_buffer(100), ctypes.c_size_t()
    cuda.cuDeviceGet(ctypes.byref(device), ordinal)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    capability = 10 * attribute(75) + attribute(76)  # COMPUTE_CAPABILITY_MAJOR and _MINOR
    return {"name": name.value.decode(errors="replace"), "capability": capability, "bytes": memory.value}


def _driver_version() -> str | None:
    file = Path("/proc/driver/nvidia/version")
    found = re.search(r"Module.*?(\d+\.\d[\d.]*)", file.read_text()) if file.exists() else None
    return found and found[1]


# ------------------------------------------------------------------------------------------------------------ compilers


def _compiler(name: str) -> Info:
    """The compiler that ``aotops.compile`` and ``aotops build`` use."""
    try:
        found = toolchain.need_nvcc() if name == "nvcc" else toolchain.cxx()
    except CompileError as error:
        return {"path": None, "version": None, "error": str(error).partition(";")[0]}
    version = re.search(r"release ([\d.]+)" if name == "nvcc" else r"(\d+\.\d[\d.]*)$", found.version, re.M)
    return {"path": shlex.join(found.command), "version": version and version[1], "error": None}


# ----------------------------------------------------------------------------------------------------------- frameworks

_DISTRIBUTIONS = {
    "torch": r"torch",
    "jax": r"jax",
    "mindspore": r"mindspore",
    "cupy": r"cupy(-cuda\d+x)?",
    "numpy": r"numpy",
}
_TENSORS_SINCE = {"torch": (2, 10)}
"""The first version whose tensors C reads."""

_ATTEMPT = """
import importlib, sys
name = sys.argv[1]
frontend = importlib.import_module(f"aotops.frontends.{name}")
framework = importlib.import_module({"jax": "jax.numpy"}.get(name, name))
make = {"torch": "tensor", "mindspore": "Tensor"}.get(name, "array")
dtype = {} if name in ("torch", "mindspore") else {"dtype": "float32"}
total = frontend.add(*(getattr(framework, make)([x], **dtype) for x in (1.5, 2.25)))
assert float(total[0]) == 3.75, total
"""


def _frameworks(attempt: bool) -> dict[str, Info]:
    found = {name: _framework(name) for name in _DISTRIBUTIONS}
    installed = [name for name, each in found.items() if each["version"]]
    if attempt:
        with ThreadPoolExecutor() as pool:
            for name, error in zip(installed, pool.map(_attempted, installed), strict=True):
                found[name] |= {"works": error is None, "error": error}
    return found


def _framework(name: str) -> Info:
    """``works`` is None if it was not tried."""
    version, least = _installed_version(name), _least_version(name)
    found: Info = {"version": version, "requires": least and f">={least}", "call_path": None}
    found |= {"works": None, "error": None}
    if version is None:
        return found | {"works": False, "error": "is not installed"}
    if least and _numbers(version) < _numbers(least):
        return found | {"works": False, "error": f"is older than {least}"}
    return found | {"call_path": _call_path(name, version)}


def _installed_version(name: str) -> str | None:
    pattern = re.compile(_DISTRIBUTIONS[name])
    for distribution in metadata.distributions():
        if pattern.fullmatch((distribution.metadata["Name"] or "").lower()):
            return distribution.version
    return None


def _least_version(name: str) -> str | None:
    """The least version that this package's extra requires."""
    try:
        required = metadata.requires("aotops") or ()
    except metadata.PackageNotFoundError:
        return None
    pattern = re.compile(rf"({_DISTRIBUTIONS[name]})>=([\d.]+);.*extra == .{name}.")
    return next((match[match.lastindex or 0] for text in required if (match := pattern.match(text))), None)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0])[:3])


def _call_path(name: str, version: str) -> str:
    if name == "jax":
        return "XLA custom call"
    if name == "mindspore":
        return "aot primitive"
    try:
        highest = call.call_path()
    except ValueError as error:
        return str(error)
    reads_tensors = name != "cupy" and _numbers(version) >= _TENSORS_SINCE.get(name, ())
    return highest if reads_tensors else min(highest, "addresses", key=call.CALL_PATHS.index)


def _attempted(name: str) -> str | None:
    """The last line of the error of a process that adds two numbers, or None."""
    command = [sys.executable, "-c", _ATTEMPT, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"took more than {SECONDS} s"
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"the process ended with status {done.returncode}"])[-1]


def _libraries() -> list[Info]:
    """Each with the devices that an operator of it has an entry for."""
    return [
        {
            "name": each["library"],
            "file": each["file"],
            "operators": len(each["operators"]),
            "devices": [name for name in DEVICES if any(name in op["devices"] for op in each["operators"])],
            "error": each["error"],
        }
        for each in registry.describe()
    ]


# --------------------------------------------------------------------------------------------------------------- advice


def _mend(found: Info) -> list[Info]:
    built, gpu, compilers = found["library"], found["gpu"], found["compilers"]
    advice = []

    def add(what: str, why: str, command: str | None = None) -> None:
        advice.append({"what": what, "why": why, "command": command})

    checkout = (Path(__file__).parents[1] / "Makefile").exists()
    make = "make lib" if checkout else "pip install --force-reinstall --no-deps aotops"
    if built["error"]:
        add("library", built["error"], make)
    elif gpu["devices"] and not built["cuda"]:
        add("CUDA", "the library was built without CUDA entries", "make lib NVCC=nvcc" if checkout else make)
    elif gpu["devices"] and (why := _too_old(gpu["cuda"], built["runtime"])):
        add("driver", why, "make lib" if checkout and built["runtime"] >= 13000 else None)
    elif gpu["devices"]:
        for capability in sorted({device["capability"] for device in gpu["devices"]}):
            if why := _no_code(capability, built, gpu["cuda"]):
                add("CUDA", why, f'make lib ARCHS="{capability}"')
        if (lt := found["cublaslt"]) and not lt["path"] and "AOTOPS_" not in lt["reason"]:
            why = f"{lt['reason']}: the library's own kernels run products where no framework has loaded it"
            add("cuBLASLt", why, _give_cublaslt(gpu["cuda"]))
    if gpu["error"]:
        add("GPU", gpu["error"])
    for name, command in _COMPILERS.items():
        if compilers[name]["error"]:
            add(name, compilers[name]["error"], command)
    for name, framework in found["frameworks"].items():
        if framework["error"]:
            install = None if framework["works"] is False and framework["call_path"] else _install(name, gpu)
            add(name, framework["error"], install)
    for each in found["libraries"][1:]:
        if each["error"]:
            add(each["name"], each["error"])
        elif gpu["devices"] and each["operators"] and "cuda" not in each["devices"]:
            add(each["name"], "it has no CUDA entry: if its package has .cu files, build that where nvcc is")
    return advice


def _too_old(driver: str | None, runtime: int | None) -> str | None:
    """Why a driver, of the CUDA version "12.4", loads no code of a library with this runtime; None if it does. It loads
    code of all minor versions of its major one."""
    if not driver or not runtime or _numbers(driver) >= (runtime // 1000, 0):
        return None
    release, cuda = fatbin.oldest_driver(runtime), fatbin.release(runtime)
    also = "" if runtime < 13000 else ", or a library compiled with CUDA 12"
    return f"the driver is of CUDA {driver}, the library of {cuda}; it needs release {release} or later{also}"


def _no_code(capability: int, built: Info, driver: str | None) -> str | None:
    """Why the library does not run on a GPU; None if it does."""
    code = _code_for(capability, built["architectures"])
    if not code:
        return f"the library has no kernels for sm_{capability}"
    runtime = built["runtime"]
    if any(name.startswith("sm_") for name in code) or not (driver and runtime):
        return None
    if _numbers(driver) < (runtime // 1000, runtime % 1000 // 10):
        cuda = fatbin.release(runtime)
        return f"the library has PTX of CUDA {cuda} for sm_{capability}, which a driver of CUDA {driver} refuses"
    return None


def _code_for(capability: int, architectures: Iterable[str]) -> list[str]:
    """The code that a GPU of this compute capability runs, "sm_80", or else the PTX that its driver compiles."""
    images = [(fatbin.named(name), name) for name in architectures]
    for ptx in (False, True):
        found = [(image.arch, name) for image, name in images if image.ptx is ptx and image.serves(capability)]
        if found:
            newest = max(arch for arch, _ in found)
            return [name for arch, name in found if arch == newest]
    return []


def _give_cublaslt(driver: str | None) -> str:
    """The command by which processes without a framework find cuBLASLt."""
    new = bool(driver) and _numbers(driver or "") >= (13,)
    package, file = (
        ("nvidia-cublas", "cu13/lib/libcublasLt.so.13")
        if new
        else ("nvidia-cublas-cu12", "cublas/lib/libcublasLt.so.12")
    )
    path = Path(sysconfig.get_path("purelib"), "nvidia", file)
    give = f"export AOTOPS_CUBLASLT={shlex.quote(str(path))}"
    return give if path.exists() else f"pip install {package} && {give}"


def _install(name: str, gpu: Info) -> str | None:
    if name == "cupy" and not gpu["devices"]:
        return None  # of no use here
    return f"pip install 'aotops[{name}]'"


# ----------------------------------------------------------------------------------------------------------------- text


def render(found: Info) -> str:
    """The text of ``collect``'s result."""
    lines = [*_heads(found), "", "frameworks", *_framework_lines(found), "", "libraries"]
    for each in found["libraries"]:
        n = f"{each['operators']} operator{'s' if each['operators'] != 1 else ''}"
        on = f" on {', '.join(each['devices'])}" if each["devices"] else ""
        lines.append(f"  {each['name']:12} {n}{on}  {each['file'] or ''}".rstrip())
    if found["mend"]:
        lines += ["", "unavailable"]
    for item in found["mend"]:
        lines.append(f"  {item['what']:12} {item['why']}" + (f": {item['command']}" if item["command"] else ""))
    width = terminal.columns()
    return "\n".join(part for line in lines for part in (terminal.hung("", line, width, 15) if line else [""]))


def _heads(found: Info) -> Iterator[str]:
    about, built, cpu, gpu = found["aotops"], found["library"], found["cpu"], found["gpu"]
    yield f"aotops       {about['version']}, Python {about['python']}, {about['folder']}"
    size = f", {built['bytes'] / 1e6:.1f} MB" if built["bytes"] else ""
    yield f"library      {built['path']}{size}"
    yield f"cpu          {cpu['model']}, {cpu['threads']} threads, {cpu['isa']}{_limit(cpu)}"
    yield f"cuda entries {_entries(built)}"
    driver = f"driver {gpu['driver']}, CUDA {gpu['cuda']}{_loads(gpu['cuda'], built)}" if gpu["cuda"] else "none"
    yield f"driver       {driver}"
    for device in gpu["devices"]:
        runs = ", ".join(_code_for(device["capability"], built["architectures"])) or "no code of the library"
        memory = f"{device['bytes'] / 2**30:.0f} GiB"
        yield f"gpu          {device['name']}, sm_{device['capability']}, {memory}, runs {runs}"
    if lt := found["cublaslt"]:
        yield f"cublaslt     {lt['path'] or 'none'}: {lt['reason']}"
    for name, compiler in found["compilers"].items():
        yield f"{name:12} {compiler['version']}, {compiler['path']}" if compiler["version"] else f"{name:12} none"
    for name, value in found["environment"].items():
        yield f"{name}={value}"


def _entries(built: Info) -> str:
    if not built["cuda"]:
        return "none"
    code = ", ".join(built["architectures"]) or "yes"
    if not (runtime := built["runtime"]):
        return code
    return f"{code}; CUDA {fatbin.release(runtime)}, for drivers from {fatbin.oldest_driver(runtime)}"


def _loads(driver: str, built: Info) -> str:
    """The code of the library that it loads."""
    runtime = built["runtime"]
    if not runtime:
        return ""
    if _too_old(driver, runtime):
        return ": loads no code of the library"
    newer = _numbers(driver) >= (runtime // 1000, runtime % 1000 // 10)
    return f": loads machine code{' and PTX' if newer else ', and no PTX'} of CUDA {fatbin.release(runtime)}"


def _limit(cpu: Info) -> str:
    return f", in use {cpu['in_use']}" if cpu["in_use"] not in (None, cpu["isa"]) else ""


def _framework_lines(found: Info) -> Iterator[str]:
    words = {True: "works", False: "does not work", None: "not tried (--try)"}
    for name, each in found["frameworks"].items():
        if each["version"]:
            path = f", call path {each['call_path']}" if each["call_path"] else ""
            yield f"  {name:12} {each['version']}{path}, {words[each['works']]}"
        else:
            yield f"  {name:12} not installed"
