"""aotops info: what it finds out, without importing a framework, and what it advises."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess

import pytest

from aotops import __version__, info, library


def fat_binary(*images: tuple[int, int]) -> bytes:
    """As nvcc writes it. Images: kind and architecture."""
    body = b"".join(
        struct.pack("<HHIQIIHHI", kind, 0x101, 64, 16, 0, 0, 0, 0, arch).ljust(64, b"\0") + b"\1" * 16
        for kind, arch in images
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def elf(file, *options, **sections: bytes) -> None:
    """Writes a shared library with these sections, and two symbols of entries."""
    source = "aot_add_cpu: aot_add_cpu_avx2: .byte 0\n"
    for name, content in sections.items():
        source += f".section .{name}\n.byte {','.join(map(str, content))}\n"
    command = ["gcc", "-shared", "-nostdlib", "-x", "assembler", "-", "-o", str(file), *options]
    subprocess.run(command, input=source, text=True, check=True)


@pytest.fixture
def collected(monkeypatch):
    """``collect``'s result after these changes of what it finds."""

    def collect(gpu=None, architectures=None, **changes):
        if gpu is not None:
            monkeypatch.setattr(info, "_gpu", lambda: gpu)
        if architectures is not None:
            monkeypatch.setattr(info, "architectures", lambda path: architectures)
        for name, value in changes.items():
            monkeypatch.setattr(info, name, value)
        return info.collect()

    return collect


def mended(found, what):
    return [(item["why"], item["command"]) for item in found["mend"] if item["what"] == what]


def test_what_is_here(collected):
    found = json.loads(json.dumps(collected()))
    assert found["aotops"]["version"] == found["library"]["version"] == __version__
    assert found["library"]["path"] == str(library.path())
    assert found["library"]["bytes"] == library.path().stat().st_size
    assert found["library"]["cuda"] == library.has_cuda()
    assert found["library"]["error"] is None
    assert bool(found["library"]["architectures"]) == library.has_cuda()
    assert found["libraries"][0]["name"] == "aotops"
    assert found["frameworks"]["numpy"]["version"]
    text = info.render(found)
    for words in (str(library.path()), found["cpu"]["model"], found["frameworks"]["numpy"]["version"]):
        assert words in text


def test_no_framework_is_imported(python):
    program = "import sys; from aotops import info; info.render(info.collect()); print(*sys.modules)"
    assert not {"numpy", "torch", "jax", "mindspore", "cupy"} & set(python(program).split())


def test_architectures_of_fat_binaries(tmp_path):
    file = tmp_path / "lib.so"
    first, second = fat_binary((2, 80), (2, 90), (1, 90)), fat_binary((2, 80), (2, 120))
    elf(file, nv_fatbin=first + bytes(8) + second)
    assert info.architectures(file) == ["sm_80", "sm_90", "compute_90", "sm_120"]
    elf(file)
    assert info.architectures(file) == []


def test_instruction_sets_of_a_library(tmp_path):
    file = tmp_path / "lib.so"
    elf(file)
    assert info._built_isas(file) == ["baseline", "avx2"]
    assert info._in_use("avx512", ["baseline", "avx2"]) == "avx2"
    assert info._in_use("baseline", ["baseline", "avx2"]) == "baseline"
    elf(file, "-s")
    assert info._built_isas(file) is None
    assert info._in_use("avx512", None) is None


def test_a_library_that_does_not_load(tmp_path, python):
    shutil.copy(__file__, tmp_path / "text.so")
    program = "from aotops import info; found = info.collect(); print(info.render(found))"
    for name, words in (("none.so", "does not exist"), ("text.so", "does not load")):
        told = python(program, AOTOPS_LIBRARY=str(tmp_path / name))
        first = re.split(r"\n  (?=\S)", told.partition("unavailable\n")[2])[0]
        line = " ".join(first.split())  # a path may be longer than a line
        assert line.startswith("library ")
        assert words in line
        assert line.endswith(": make lib")


def device(capability):
    return {"name": "a GPU", "capability": capability, "bytes": 80 << 30}


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [(90, ["sm_90"], True), (89, ["sm_80"], True), (86, ["sm_89"], False), (120, ["sm_90"], False),
     (120, ["sm_90", "compute_90"], True), (75, ["sm_80", "compute_80"], False), (90, ["sm_90a"], True),
     (100, ["sm_90a", "compute_90a"], False)],
)  # fmt: skip
def test_which_architectures_run_on_a_gpu(capability, architectures, runs):
    assert bool(info._code_for(capability, architectures)) == runs


def test_advice_on_gpus(collected, monkeypatch):
    gpu = {"driver": "580.1", "cuda": "13.0", "devices": [device(120)], "error": None}
    monkeypatch.setattr(library, "has_cuda", lambda: False)
    assert mended(collected(gpu), "CUDA") == [("the library was built without CUDA entries", "make lib NVCC=nvcc")]
    monkeypatch.setattr(library, "has_cuda", lambda: True)
    found = collected(gpu, ["sm_90"])
    assert mended(found, "CUDA") == [("the library has no kernels for sm_120", 'make lib ARCHS="120"')]
    assert "a GPU, sm_120, 80 GiB" in info.render(found)
    assert mended(collected(gpu, ["sm_90", "compute_90"]), "CUDA") == []
    none = {"driver": None, "cuda": None, "devices": [], "error": "there is no NVIDIA driver (libcuda.so.1)"}
    assert mended(collected(none), "GPU") == [("there is no NVIDIA driver (libcuda.so.1)", None)]


@pytest.mark.parametrize(
    ("cuda", "runtime", "capability", "expected"),
    [
        ("12.2", 12090, 90, ""),
        ("12.2", 12090, 110, "the library has PTX of CUDA 12.9 for sm_110, which a driver of CUDA 12.2 refuses"),
        ("12.9", 12090, 110, ""),
        ("11.8", 12090, 90, "the driver is of CUDA 11.8, the library of 12.9; it needs release 525 or later"),
        (
            "12.8",
            13000,
            90,
            "the driver is of CUDA 12.8, the library of 13.0; it needs release 580 or later, or a library",
        ),
    ],
)
def test_what_a_driver_loads(collected, monkeypatch, cuda, runtime, capability, expected):
    gpu = {"driver": "1.2", "cuda": cuda, "devices": [device(capability)], "error": None}
    monkeypatch.setattr(library, "has_cuda", lambda: True)
    monkeypatch.setattr(info.fatbin, "runtime", lambda path: runtime)
    found = collected(gpu, ["sm_90", "sm_100", "compute_100"], _cublaslt=lambda: None)
    told = [why for what in ("CUDA", "driver") for why, _ in mended(found, what)]
    assert len(told) == bool(expected)
    assert all(why.startswith(expected) for why in told)
    text = " ".join(info.render(found).split())
    assert f"for drivers from {580 if runtime == 13000 else 525}" in text
    assert f"runs {'sm_90' if capability == 90 else 'compute_100'}" in text


def test_which_cublaslt_is_told(collected, monkeypatch):
    gpu = {"driver": "1.2", "cuda": "12.2", "devices": [device(90)], "error": None}
    monkeypatch.setattr(library, "has_cuda", lambda: True)
    with_one = {"path": "/there/libcublasLt.so.12", "reason": "the dynamic loader finds it"}
    found = collected(gpu, ["sm_90"], _cublaslt=lambda: with_one)
    assert mended(found, "cuBLASLt") == []
    assert "cublaslt     /there/libcublasLt.so.12: the dynamic loader finds it" in info.render(found)
    without = {"path": None, "reason": "the dynamic loader does not find libcublasLt.so.12"}
    ((why, command),) = mended(collected(gpu, ["sm_90"], _cublaslt=lambda: without), "cuBLASLt")
    assert why.startswith("the dynamic loader does not find")
    assert "pip install nvidia-cublas-cu12 && export AOTOPS_CUBLASLT=" in command
    by_choice = {"path": None, "reason": "AOTOPS_GEMM is own"}
    assert mended(collected(gpu, ["sm_90"], _cublaslt=lambda: by_choice), "cuBLASLt") == []


def test_advice_on_a_package(collected):
    """Its devices are told, and `make lib`, which builds the built-in library, is not advised."""
    package = {"name": "scale", "file": "/there/libscale.so", "operators": 1, "devices": ["cpu"], "error": None}
    gpu = {"driver": "580.1", "cuda": "13.0", "devices": [device(90)], "error": None}
    libraries = lambda: [package | {"name": "aotops"}, package]  # noqa: E731
    ((why, command),) = mended(found := collected(gpu, ["sm_90"], _libraries=libraries), "scale")
    assert why.startswith("it has no CUDA entry: if its package has .cu files")
    assert command is None
    assert "scale        1 operator on cpu  /there/libscale.so" in info.render(found)
    none = {"driver": None, "cuda": None, "devices": [], "error": "there is no NVIDIA driver (libcuda.so.1)"}
    assert mended(collected(none), "scale") == []


def test_advice_on_frameworks_and_compilers(collected):
    versions = {"torch": "2.1.0+cpu", "jax": None, "numpy": "2.4.6"}.get
    missing = {"path": None, "version": None, "error": "is not installed"}
    found = collected(_installed_version=versions, _least_version=lambda name: "2.4", _compiler=lambda name: missing)
    assert mended(found, "torch") == [("is older than 2.4", "pip install 'aotops[torch]'")]
    assert mended(found, "jax") == [("is not installed", "pip install 'aotops[jax]'")]
    assert mended(found, "numpy") == []
    assert mended(found, "g++") == [("is not installed", "apt install g++")]
    assert mended(found, "nvcc")[0][1].startswith("pip install nvidia-cuda-nvcc")
    assert "g++          none" in info.render(found)
    assert "jax          not installed" in info.render(found)


def test_versions_are_compared_as_numbers():
    assert info._numbers("2.10.0+cpu") > info._numbers("2.9.1")
    assert info._numbers("2.13.0a0") >= info._numbers("2.13")
    assert info._call_path("torch", "2.9.1") == info._call_path("cupy", "14.2") == "addresses"
    assert info._call_path("torch", "2.13.0+cpu") == info._call_path("numpy", "1.26.4") == "tensors"


def test_frameworks_are_tried(monkeypatch, tmp_path):
    monkeypatch.setattr(info, "_DISTRIBUTIONS", {"numpy": "numpy"})
    found = info.collect(attempt=True)
    assert (found["frameworks"]["numpy"]["works"], found["frameworks"]["numpy"]["error"]) == (True, None)
    monkeypatch.setenv("AOTOPS_LIBRARY", str(tmp_path / "none.so"))  # for the process that tries
    found = info.collect(attempt=True)
    assert found["frameworks"]["numpy"]["works"] is False
    assert "none.so does not exist" in mended(found, "numpy")[0][0]
    assert f"AOTOPS_LIBRARY={tmp_path / 'none.so'}" in info.render(found)
