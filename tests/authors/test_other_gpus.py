"""The CUDA sources are for every GPU that a wheel has code for, not only for those that `make lib` compiles for here:
the compiler's front end reads them for each, and ptxas has the inline instructions that are left for each."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from aotops import cuda12

ROOT = Path(__file__).parents[2]
TOOLCHAIN = ROOT / "build/cuda-12.9"
SOURCES = sorted(
    file.relative_to(ROOT).as_posix() for file in (ROOT / "cuda_src").rglob("*.cu") if "_sm90" not in file.stem
)

pytestmark = [
    pytest.mark.skipif(not cuda12.supported(), reason="the CUDA 12.9 toolchain is for x86-64 Linux"),
    pytest.mark.skipif(
        not all((ROOT / "build" / made).exists() for made in ("cuda-12.9/ready", "cutlass/include")),
        reason="`make lib` has not made the CUDA 12.9 toolchain here",
    ),
]


@cache
def _options() -> dict[str, list[str]]:
    """By source, the options of nvcc that `make wheel` gives, but the architectures."""
    given = ("ARCHS", "WHEEL_ARCHS", "PTX", "NVCC")
    environment = {name: value for name, value in os.environ.items() if name not in given}
    command = ["make", "-n", "-B", "wheel"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    lines = (
        line for line in done.stdout.splitlines() if line.startswith("build/cuda-12.9/bin/nvcc") and ".cu -o" in line
    )
    commands = (shlex.split(re.sub(r"-gencode \S+|-MMD|-MP", "", line)) for line in lines)
    return {source: options for _, *options, _, source, _, _ in commands}


def front_end(source: Path | str, arch: int, *options: str) -> str:
    """The messages about a source. Without code to generate, its exit status is 1 whatever it finds."""
    command = [TOOLCHAIN / "bin/nvcc", *options, "-w", "-ptx", f"-arch=compute_{arch}", "-Xcicc", "--no_code_gen"]
    done = subprocess.run([*command, source, "-o", os.devnull], cwd=ROOT, capture_output=True, text=True, timeout=300)
    return done.stdout + done.stderr


# What is left for GPUs after 9.0 differs from what is left for that in one function of attention alone.
EACH = [(source, arch) for source in SOURCES for arch in (75, 80)] + [("cuda_src/operators/attention.cu", 120)]


@pytest.mark.parametrize(("source", "arch"), EACH)
def test_the_front_end_takes_a_source(source, arch):
    assert front_end(source, arch, *_options()[source]) == ""


def test_the_front_end_finds_what_a_gpu_has_not(tmp_path):
    source = tmp_path / "a.cu"
    source.write_text("__global__ void f(unsigned *x) { *x = __reduce_or_sync(~0u, *x); }\n")
    assert 'identifier "__reduce_or_sync" is undefined' in front_end(source, 75)
    assert front_end(source, 80) == ""


# ---------------------------------------------------------------------------------------------------- inline assembly


def preprocessed(folder: Path, arch: int) -> str:
    """All sources without the headers of CUDA and CUTLASS, which are empty files."""
    files = [file for file in (ROOT / "cuda_src").rglob("*") if file.suffix in (".h", ".cuh", ".cu")]
    for name in {name for file in files for name in re.findall(r"^#include <(.*)>", file.read_text(), re.M)}:
        stub = folder / "include" / name
        stub.parent.mkdir(parents=True, exist_ok=True)
        stub.touch()
    text = "".join(f'#include "{ROOT / source}"\n' for source in SOURCES)
    defined = [f"-D{name}" for name in ("__CUDACC__", f"__CUDA_ARCH__={arch}0", "AOT_ISA=cuda")]
    defined += ["-DAOT_HAVE_SM90", "-DAOT_NO_OTHER_GPUS"]
    command = ["g++", "-E", "-P", "-x", "c++", "-std=c++17", "-nostdinc", f"-I{folder / 'include'}", "-Icuda_src"]
    done = subprocess.run([*command, *defined, "-"], cwd=ROOT, input=text, capture_output=True, text=True, check=True)
    return done.stdout


_LITERAL = r'"(?:[^"\\]|\\.)*"'


def statements(text: str) -> Iterator[tuple[str, list[str]]]:
    """The template and the operands' constraints of each asm statement, once."""
    found = set()
    for begin in re.finditer(r"\basm(?: volatile)?\s*\(", text):
        depth, parts = 1, [""]
        for token in re.finditer(rf"{_LITERAL}|::|[^\"]", text[begin.end() :]):
            depth += {"(": 1, ")": -1}.get(token[0], 0)
            if depth == 0:
                break
            if depth == 1 and token[0] in (":", "::"):
                parts += [""] * len(token[0])
            else:
                parts[-1] += token[0]
        template = "".join(literal[1:-1] for literal in re.findall(_LITERAL, parts[0]))
        operands = tuple(re.findall(r'"[=+&]*([a-z])"\s*\(', " ".join(parts[1:3])))
        found.add((template.encode().decode("unicode_escape"), operands))
    yield from sorted((template, list(operands)) for template, operands in found if template)


_TYPES = {"h": "b16", "r": "b32", "l": "b64", "f": "f32", "d": "f64", "q": "b128"}


def kernel(number: int, template: str, operands: list[str]) -> list[str]:
    """Registers stand for variables, and 8, a size that copies have, for a constant."""
    registers = [f".reg .{_TYPES[kind]} %o{i};" for i, kind in enumerate(operands) if kind != "n"]
    names = ["8" if kind == "n" else f"%o{i}" for i, kind in enumerate(operands)]
    body = re.sub(r"%(%|\d+)", lambda at: "%" if at[1] == "%" else names[int(at[1])], template)
    return [f".entry k{number}() {{", *registers, "{ " + " ".join(body.split()), "}", "ret;", "}"]


def refused(folder: Path, arch: int, found: list[tuple[str, list[str]]]) -> list[str]:
    """The statements that ptxas does not assemble for a GPU, each with what it says first."""
    kernels = [kernel(i, *statement) for i, statement in enumerate(found)]
    file = folder / f"{arch}.ptx"
    file.write_text("\n".join([".version 8.8", f".target sm_{arch}", ".address_size 64", *chain(*kernels)]))
    command = [TOOLCHAIN / "bin/ptxas", f"-arch=sm_{arch}", "-O0", file, "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    owners = [i for i, lines in enumerate(kernels) for _ in lines]
    wrong: dict[int, str] = {}
    for line, said in re.findall(r", line (\d+); (.*)", done.stderr):
        wrong.setdefault(owners[int(line) - 4], said)
    assert bool(wrong) == (done.returncode != 0), done.stderr
    return [f"{found[i][0]}: {said}" for i, said in wrong.items()]


@pytest.mark.parametrize("arch", [75, 80, 90, 100, 120])
def test_a_gpu_has_the_inline_instructions(tmp_path, arch):
    found = list(statements(preprocessed(tmp_path, arch)))
    assert len(found) > 15
    assert refused(tmp_path, arch, found) == []


def test_inline_instructions_that_a_gpu_has_not_are_found(tmp_path):
    text = """
      asm volatile("{\\n.reg .b64 policy;\\n" "createpolicy.fractional.L2::evict_last.b64 policy, 1.0;\\n}");
      asm("add.u32 %0, %1, %2;" : "=r"(x) : "r"(f(y, ":")), "n"(kOne));
      asm volatile("" ::: "memory");
      asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
    """
    found = list(statements(text))
    assert [operands for _, operands in found] == [["r", "r", "n"], ["n"], []]
    assert [text.split()[0] for text in refused(tmp_path, 75, found)] == ["cp.async.wait_group", "{"]
    assert refused(tmp_path, 80, found) == []
