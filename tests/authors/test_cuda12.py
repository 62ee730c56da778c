"""Libraries for drivers from release 525: the toolchain that compiles them, and the audit of their GPU code."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from aotops import cuda12, fatbin, library, toolchain
from aotops.build import build
from aotops.fatbin import GPUS, Image

ROOT = Path(__file__).parents[2]
TOOLCHAIN = ROOT / "build/cuda-12.9"

OLD, NEW = (0x33, 7), (0x41, 8)
MACHINE_CODE, PTX = 2, 1


def image(kind: int, arch: int, abi: tuple[int, int] = OLD, flags: int = 0x11, isa: tuple[int, int] = (8, 8)) -> bytes:
    """As nvcc writes it, with the header of an ELF file or the beginning of PTX behind."""
    where = arch if abi == OLD else arch << 8
    body = struct.pack("<4s3sBB7xHHI24xI12x", b"\x7fELF", b"\2\1\1", *abi, 2, 190, 1, where)
    body = body if kind == MACHINE_CODE else b".version".ljust(64, b"\n")
    head = struct.pack("<HHIQIIHHIIIQ", kind, 0x101, 64, len(body), 0, 0, isa[1], isa[0], arch, 0, 0, flags)
    return head.ljust(64, b"\0") + body


def with_code(file: Path, *containers: tuple[bytes, ...], source: str = "") -> Path:
    """A shared library with these fat binaries, each of images."""
    bodies = map(b"".join, containers)
    content = b"".join(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body for body in bodies)
    section = f".section .nv_fatbin\n.byte {','.join(map(str, content))}\n" if content else ""
    file.with_suffix(".s").write_text(section)
    file.with_suffix(".c").write_text(source)
    inputs = [file.with_suffix(".s"), file.with_suffix(".c")]
    subprocess.run(["gcc", "-shared", "-fPIC", *inputs, "-o", file], check=True)
    return file


_CALLS_DRIVER = "int cuInit(int); int f(void) { return cuInit(0); }"
_RUNTIME = "int aot_cuda_runtime(void) {{ return {}; }}"
_WITHOUT = "1 of 2 sources have no code for compute capability"


@pytest.mark.parametrize(
    ("images", "source", "gpus", "expected"),
    [
        ([(image(MACHINE_CODE, 75), image(MACHINE_CODE, 100, NEW), image(PTX, 100))], "", (), None),
        ([(image(MACHINE_CODE, 90, NEW),)], "", (), "code for sm_90 has OSABI 0x41, version 8, expected OSABI 0x33"),
        ([(image(PTX, 90, flags=0x8011),)], "", (), "code for compute_90 is compressed"),
        ([(image(MACHINE_CODE, 80, flags=0x2011),)], "", (), "code for sm_80 is compressed"),
        ([(image(PTX, 90, isa=(9, 0)),)], "", (), "PTX for compute_90 is of ISA 9.0, expected 8.8"),
        ([(image(MACHINE_CODE, 80),)], _RUNTIME.format(13000), (), "its CUDA runtime is 13.0, expected 12.9"),
        ([(image(MACHINE_CODE, 80),)], _RUNTIME.format(12090), (), None),
        ([(image(MACHINE_CODE, 80),)], _CALLS_DRIVER, (), "it needs cuInit of the driver"),
        ([(image(MACHINE_CODE, 80),), (image(MACHINE_CODE, 90),)], "", (89, 90),
         [f"{_WITHOUT} 8.9", f"{_WITHOUT} 9.0"]),
        # what is for Hopper alone need not have code for the others
        ([(image(MACHINE_CODE, 75),), (image(MACHINE_CODE, 90, flags=0x100011),)], "", (75,), None),
        ([], _CALLS_DRIVER, GPUS, None),  # no GPU code: nothing to say
    ],
)  # fmt: skip
def test_the_audit_of_gpu_code(tmp_path, images, source, gpus, expected):
    found = fatbin.faults(with_code(tmp_path / "a.so", *images, source=source), gpus)
    if isinstance(expected, str):
        (fault,) = found
        assert expected in fault
    else:
        assert found == (expected or [])


def test_the_audit_is_told_the_runtime_of_a_library_that_does_not_load_here(tmp_path):
    """It is of another machine. Here, one that does not say it."""
    file = with_code(tmp_path / "a.so", (image(MACHINE_CODE, 90),))
    said = {}
    for given in ((), ("--runtime", "12090"), ("--runtime", "13000")):
        command = [sys.executable, "-m", "aotops.fatbin", *given, file, "90"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        said[given[1:]] = done.returncode, (done.stdout + done.stderr).strip().removeprefix(f"{file}: ")
    assert said[()] == (1, "it has no function aot_cuda_runtime, which tells the version of its CUDA runtime")
    assert said["12090",] == (0, f"audit {file}: CUDA 12.9, sm_90")
    assert said["13000",] == (1, "its CUDA runtime is 13.0, expected 12.9")


def test_the_audit_finds_code_outside_of_fat_binaries(tmp_path):
    """Triton's kernels are embedded as they are."""
    content = ",".join(map(str, image(MACHINE_CODE, 90, NEW)[64:]))
    file = with_code(tmp_path / "a.so", source=f"const unsigned char kernel[] = {{{content}}};")
    (fault,) = fatbin.faults(file)
    assert fault.startswith("code for sm_90 has OSABI 0x41")
    assert fatbin.architectures(file) == ["sm_90"]


def test_the_built_in_library_is_for_the_drivers_of_its_runtime():
    version = fatbin.runtime(library.path())
    assert (version is not None) == library.has_cuda()
    assert (not fatbin.faults(library.path())) == (version is None or version < 13000)


@pytest.mark.skipif(not cuda12.supported(), reason="the CUDA 12.9 toolchain is for x86-64 Linux")
def test_a_wheel_has_code_for_every_gpu_since_turing():
    """By the options of nvcc that `make wheel` gives; its audit reads what came of them."""
    command = ["make", "-n", "-B", "wheel"]
    given = ("ARCHS", "WHEEL_ARCHS", "PTX", "NVCC")
    environment = {name: value for name, value in os.environ.items() if name not in given}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    lines = [
        line for line in done.stdout.splitlines() if line.startswith("build/cuda-12.9/bin/nvcc") and ".cu -o" in line
    ]
    codes = {line.rpartition("/")[2]: re.findall(r"code=(sm|compute)_(\d+)(a?)", line) for line in lines}
    images = {
        name: [Image(kind == "compute", int(arch), bool(a), False, (8, 8)) for kind, arch, a in code]
        for name, code in codes.items()
    }
    assert len(images) > 15
    for name, found in images.items():
        for gpu in [90] if "_sm90" in name else [*GPUS, 130]:
            assert any(each.serves(gpu) for each in found), (name, gpu)
    assert all("--compress-mode=none" in line for line in lines)


# ------------------------------------------------------------------------------------------------------------ toolchain


def test_packages_that_pip_cannot_get_are_named(tmp_path, monkeypatch):
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(tmp_path)), ("CONFIG_FILE", os.devnull)):
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(
        toolchain.CompileError, match=r"pip cannot get nvidia-\S+==[\d.]+, of which the CUDA 12.9"
    ) as told:
        cuda12.assemble(tmp_path / "cuda-12.9")
    assert "NVCC=/path/nvcc" in str(told.value)
    assert not (tmp_path / "cuda-12.9").exists()


def test_a_toolchain_that_is_there_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda12, "_download", lambda *arguments: pytest.fail("it was downloaded again"))
    (tmp_path / "ready").write_text(cuda12.identity())
    assert cuda12.assemble(tmp_path) == tmp_path / "bin/nvcc"
    (tmp_path / "lib/aarch64").mkdir(parents=True)
    (tmp_path / "lib/aarch64/ready").write_text(cuda12.identity(cuda12.HOSTS["aarch64"]))
    assert cuda12.add_host(tmp_path, "aarch64") == tmp_path / "lib/aarch64"


def test_a_host_gets_its_runtime(tmp_path, monkeypatch):
    """A package stands for the one that pip downloads; what was there before is replaced."""

    def download(packages, folder, host):
        with zipfile.ZipFile(folder / "a.whl", "w") as wheel:
            for name in ("lib/libcudart_static.a", "lib/libcudart.so.12", "lib/stubs/libx.a", "include/cuda.h"):
                wheel.writestr(f"nvidia/cuda_runtime/{name}", f"{packages.name} {host}")
        return {"nvidia_cuda_runtime_cu12": folder / "a.whl"}

    monkeypatch.setattr(cuda12, "_download", download)
    stale = tmp_path / "lib/aarch64/stale.a"
    stale.parent.mkdir(parents=True)
    stale.touch()
    added = cuda12.add_host(tmp_path, "aarch64")
    assert (added / "libcudart_static.a").read_text() == "cuda12_aarch64.txt aarch64"
    assert sorted(file.name for file in added.iterdir()) == ["libcudart_static.a", "ready", "stubs"]
    assert [file.name for file in tmp_path.iterdir()] == ["lib"]
    with pytest.raises(toolchain.CompileError, match=r"the host is 'riscv64', expected aarch64"):
        cuda12.add_host(tmp_path, "riscv64")


def pins(packages: Path) -> set[tuple[str, str]]:
    lines = [line for line in packages.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"nvidia-[\w-]+==[\d.]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    return {(line.partition("==")[0].replace("-", "_"), line.split()[0].partition("==")[2]) for line in lines}


def test_the_packages_have_hashes():
    assert {name for name, _ in pins(cuda12.PACKAGES)} == set(cuda12._PLACES)


def test_another_hosts_runtime_is_of_the_same_version():
    (runtime,) = pins(cuda12.HOSTS["aarch64"])
    assert runtime in pins(cuda12.PACKAGES)


KERNEL = """
#include "aot.h"
__global__ void kernel(float *x) { *x *= 2; }
extern "C" int twice_cuda(int, void **params, int *, int64_t **, const char **, void *stream, void *) {
  kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<float *>(params[0]));
  return 0;
}
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with a CUDA source, and the toolchain of `make lib` in the cache."""
    monkeypatch.setenv("AOTOPS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "twice.cu").write_text(KERNEL)
    table = 'library = "libtwice.so"\nsources = ["twice.cu"]\narchs = ["75", "90"]\ncuda = "12"\n'
    (folder / "pyproject.toml").write_text(f"[tool.aotops]\n{table}")
    return folder


@pytest.mark.skipif(not (TOOLCHAIN / "ready").exists(), reason="`make lib` has not made the CUDA 12.9 toolchain here")
def test_a_package_for_old_drivers(package, tmp_path, monkeypatch):
    monkeypatch.delenv("NVCC", raising=False)
    (tmp_path / "cache/toolchains").mkdir(parents=True)
    (tmp_path / "cache/toolchains/cuda-12.9").symlink_to(TOOLCHAIN)
    made = build(package)
    assert fatbin.runtime(made) == cuda12.RUNTIME
    assert fatbin.architectures(made) == ["sm_75", "sm_90", "compute_90"]
    assert fatbin.faults(made, [75, 90, 120]) == []


def test_a_package_that_old_drivers_do_not_load_is_refused(package, monkeypatch):
    monkeypatch.setattr(fatbin, "faults", lambda path: ["code for sm_90 has OSABI 0x41"])
    monkeypatch.setenv("NVCC", "")
    (package / "twice.cu").unlink()
    (package / "twice.cpp").write_text('extern "C" int twice() { return 2; }\n')
    text = (package / "pyproject.toml").read_text().replace("twice.cu", "twice.cpp")
    (package / "pyproject.toml").write_text(text)
    with pytest.raises(toolchain.CompileError, match=r"libtwice\.so is not for drivers from 525, .*\ncode for sm_90"):
        build(package)
    assert not (package / "libtwice.so").exists()
    (package / "pyproject.toml").write_text(text.replace('"12"', '"11"'))
    with pytest.raises(ValueError, match=r"cuda is '11', expected '12'"):
        build(package)
