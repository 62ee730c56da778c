"""Triton kernels compiled ahead of time, without a GPU: declarations, the code that is made of them, the launches that
a driver is told, and what ``aotops check`` finds. The tests that compile need Triton."""

from __future__ import annotations

import base64
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_gpu import fake_driver

from aotops import new, toolchain
from aotops.build import _shortened as shortened
from aotops.build import build
from aotops.elf import Elf
from aotops.testing import check
from aotops.testing.frameworks import requested
from aotops.toolchain import CompileError
from aotops.triton import Config, DeclarationError, Entry, Launch, building, interpreter, ptx
from aotops.triton.expressions import Uncomputable, parse

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tests" / "programs" / "triton_package"

# --------------------------------------------------------------------------------------------------------- expressions

VALUES = {"n": 1000, "m": -7, "zero": 0, "big": (1 << 62) + 3, "x": 0.5, "yes": True}
KINDS = {"n": "int", "m": "int", "zero": "int", "big": "int", "x": "float", "yes": "bool"}
EXPRESSIONS = [
    "n", "cdiv(n, 128)", "cdiv(m, 2)", "m // 2", "m % 3", "n % -7", "n // -7", "-m", "n + m * 2 - 3", "big + big",
    "big * 2", "big - -big", "n // zero", "n % zero", "next_power_of_2(n)", "next_power_of_2(0)",
    "next_power_of_2(1024)", "next_power_of_2(big)", "min(n, m)", "max(n, 4000)", "n if n > 3 else n // zero",
    "n >= 1000 and not m > 0", "n < 3 or 1 < 2 < 3", "x * 2", "n * x", "1 / 3", "n / zero", "x if yes else n",
    "1 < n <= 1000", "yes", "-9223372036854775807 - 1",
]  # fmt: skip


def test_expressions_have_the_same_value_in_python_and_in_cpp(tmp_path):
    parsed = [parse(text, KINDS) for text in EXPRESSIONS]
    expected = []
    for each in parsed:
        try:
            expected.append(f"{float(each.value(VALUES)):.17g}")
        except Uncomputable:
            expected.append("failed")
    named = {name: f"v_{name}" for name in KINDS}
    cpp = {"int": "int64_t", "float": "double", "bool": "bool"}
    lines = ['#include "triton.h"', "namespace aot { Status fail(Status s, const char *, ...) noexcept { return s; } }"]
    lines += [
        "extern const char aot::kFloat16[] = {0}, aot::kBFloat16[] = {0}, aot::kFloat32[] = {0}, aot::kFloat64[] = {0};"
    ]
    lines += ["int main() {"]
    lines += [f"  const {cpp[KINDS[n]]} v_{n} = {str(v).lower()};" for n, v in VALUES.items()]
    for each in parsed:
        lines += ["  { aot::triton::Arithmetic m;", f"    const double value = static_cast<double>({each.cpp(named)});"]
        lines += ['    m.failed ? std::puts("failed") : std::printf("%.17g\\n", value); }']
    source, program = tmp_path / "expressions.cpp", tmp_path / "expressions"
    source.write_text("\n".join([*lines, "}", ""]))
    command = (*toolchain.cxx().command, "-std=c++17", "-w", "-fsanitize=undefined", "-fno-sanitize-recover")
    subprocess.run([*command, f"-I{toolchain.include_dir()}", source, "-o", program, "-ldl"], check=True)
    got = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    assert dict(zip(EXPRESSIONS, got, strict=True)) == dict(zip(EXPRESSIONS, expected, strict=True))
    assert got.count("failed") == 7


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("__import__('os')", "expected names, numbers"),
        ("n ** 2", "has Pow"),
        ("q + 1", "has q, expected some of"),
        ("n +", "is no expression"),
        ("n and 1", "expected a comparison"),
        ("cdiv(n)", "expected names, numbers"),
        ("x // 2", "no integer"),
        ("yes + 1", "True or False"),
        ("min(x, 2)", "expected an integer"),
        (None, "expected a string"),
    ],
)
def test_what_is_no_expression_is_refused(text, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        parse(text, KINDS)


# -------------------------------------------------------------------------------------------------------- declarations


def entry(name="add", *, inputs=None, outputs=None, launch=None, **more):
    launch = {"arguments": {"x_ptr": "x", "n": "n"}, "grid": ["cdiv(n, B)"], "configs": [Config(B=8)]} | (launch or {})
    kernel = launch.pop("kernel", "kernel.py:add_kernel")
    return Entry(
        name,
        inputs=inputs or {"x": "T[*n]"},
        outputs=outputs or {"y": "T[*n]"},
        launches=Launch(kernel, **launch),
        **more,
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "Add"}, "name is 'Add'"),
        ({"inputs": {"x": "T*n"}}, "x is 'T*n', expected a type and axes"),
        ({"inputs": {"x": "U[*n]"}}, "x has type 'U'"),
        ({"inputs": {"x": "T[2*n]"}}, "axis '2*n' is expected to be a name or a number"),
        ({"outputs": {"y": "T[*k]"}}, "no input has the leading axes *k"),
        ({"outputs": {"y": "T[k]"}}, "y: 'k' has k, expected some of n"),
        ({"outputs": {"x": "T[*n]"}}, "x is the name of two things"),
        ({"inputs": {"n": "T[*n]"}}, "n is an axis, and the name of a tensor"),
        ({"sizes": {"n": 4}}, "n is an axis, and the name of a tensor or a size"),
        ({"dtypes": {"T": ("complex64",)}}, "dtypes of T has 'complex64'"),
        ({"attrs": {"a": "str"}}, "the attribute a has type 'str'"),
        ({"zeroed": ["x"]}, "zeroed has 'x', expected some of y"),
        ({"scratch": {"s": "float32[n]"}, "workspace": False}, "workspace is False"),
        ({"sizes": {"g": "n / 2"}}, "sizes has g: 'n / 2' is of kind float, expected an integer"),
        ({"launch": {"kernel": "kernel.py"}}, "expected a file and a function"),
        ({"launch": {"grid": []}}, "grid has 0 dimensions"),
        ({"launch": {"grid": ["B"], "configs": [Config(C=8)]}}, "'B' has B, expected some of C, multiprocessors, n"),
        ({"launch": {"configs": []}}, "configs is empty"),
        ({"launch": {"configs": [Config("n", B=8)]}}, "'n' is of kind int, expected a comparison"),
        ({"launch": {"configs": [Config(B=8, n=4)]}}, "n is an argument and a constexpr"),
        ({"launch": {"configs": [Config(B=8, dtypes={"T": ("int8",)})]}}, "has T of int8"),
        ({"launch": {"arguments": {"n": "n: fp16"}}}, "the argument n is 'n: fp16', expected the type i32 or i64"),
        ({"launch": {"arguments": {"n": "rows"}}}, "the argument n: 'rows' has rows"),
        ({"launch": {"hints": [{"x_ptr": 1}]}}, "hints has x_ptr=1, expected 16 for pointers"),
        ({"launch": {"hints": [{"z": 16}]}}, "hints has z=16"),
        ({"launch": {"hints": []}}, "hints is empty"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_declaration_is_told(changes, words):
    with pytest.raises(DeclarationError, match=re.escape(words)):
        entry(**changes)


def test_arguments_that_are_constants_are_no_parameters():
    """1 and None are compiled into the code, as Triton does; a multiple of 16 is known to be one."""
    (call,) = entry(launch={"arguments": {"x_ptr": "x", "one": 1, "many": 32, "none": None, "n": "n"}}).calls
    variants = list(call.variants("90"))
    assert len(variants) == 4 * 3
    signature, constexprs, multiples = call.signature(variants[-1])
    assert signature == {
        "x_ptr": "*fp64", "one": "constexpr", "many": "i32", "none": "constexpr", "n": "i32", "B": "constexpr",
    }  # fmt: skip
    assert constexprs == {"one": 1, "none": None, "B": 8}
    assert multiples == {"many": 16}
    assert [each.parameter for each in call.passed(variants[-1])] == ["x_ptr", "many", "n"]


def test_a_configuration_may_be_for_some_gpus_and_dtypes():
    configs = [Config(B=8, archs=("90",), dtypes={"T": ("float16",)}), Config(B=4)]
    (call,) = entry(launch={"configs": configs, "hints": [{}]}, dtypes={"T": ("float16", "float32")}).calls
    chosen = {arch: [(v.config, dict(v.types)["T"]) for v in call.variants(arch)] for arch in ("80", "90")}
    assert chosen["80"] == [(1, "float16"), (1, "float32")]
    assert chosen["90"] == [(0, "float16"), (1, "float16"), (1, "float32")]


PTX = """.version 8.7
.target sm_90a
.visible .entry add_kernel(
	.param .u64 .ptr .global .align 1 add_kernel_param_0,
	.param .u32 add_kernel_param_1,
	.param .f32 add_kernel_param_2,
	.param .align 64 .b8 add_kernel_param_3[128],
	.param .u64 .ptr .global .align 1 add_kernel_param_4,
	.param .u64 .ptr .global .align 1 add_kernel_param_5
)
.reqntid 256
{
	ret;
}
"""


def test_the_parameters_of_code_are_read_and_compared():
    kernel = ptx.read(PTX)
    assert (kernel.name, kernel.target, kernel.threads) == ("add_kernel", "sm_90a", 256)
    assert kernel.parameters == ("pointer", "32 bits", "32 bits", "128 bytes", "pointer", "pointer")
    assert "128 bytes" in ptx.mismatch(kernel, ["*fp32", "i32", "fp32"])
    without = ptx.read(PTX.replace("	.param .align 64 .b8 add_kernel_param_3[128],\n", ""))
    assert ptx.mismatch(without, ["*fp32", "i32", "fp32"]) is None
    assert "expected pointer, 64 bits" in ptx.mismatch(without, ["*fp32", "i64", "fp32"])
    with pytest.raises(ValueError, match="2 kernels"):
        ptx.read(PTX + PTX)


@pytest.mark.parametrize(
    ("version", "pinned", "words"),
    [
        ("3.7.1", "3.6.0", "triton is 3.7.1, expected 3.6.0, the triton_version of the pyproject.toml"),
        ("4.0.0", None, "triton is 4.0.0, expected one of 3.5, 3.6, 3.7, 3.9"),
        (None, "3.7.1", "triton is not installed, which compiles the kernels: pip install triton==3.7.1"),
    ],
)
def test_another_triton_is_refused(monkeypatch, version, pinned, words):
    def installed(name):
        if version is None:
            raise building.PackageNotFoundError
        return version

    monkeypatch.setattr(building, "version", installed)
    with pytest.raises(CompileError, match=re.escape(words)):
        building.installed(pinned)


# ------------------------------------------------------------------------------------------------------------ building

ENTRIES = "ENTRIES = [add, softmax, dropout, norm, norm_backward, product, attention]"


def put(file: Path, text: str) -> None:
    """Writes a file that says something else, at once: another process of pytest-xdist may read it."""
    if not file.exists() or file.read_text() != text:
        scratch = file.with_name(f".{file.name}.{os.getpid()}")
        scratch.write_text(text)
        scratch.replace(file)


def written(folder: Path, entries: str, archs: str) -> Path:
    """The package of tests/programs with some entries, in one dtype. Files that are the same are not written."""
    for file in [*PACKAGE.rglob("*.py"), PACKAGE / "pyproject.toml"]:
        text = file.read_text()
        if file.name == "launch.py":
            text = text.replace('(*HALF, "float32")', '("float32",)').replace(ENTRIES, f"ENTRIES = [{entries}]")
        text = text.replace('"80", "90"', archs)
        target = folder / file.relative_to(PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        put(target, text)
    return folder


@pytest.fixture(scope="module")
def package():
    """Built once, for two GPUs, in a folder that the next session finds."""
    folder = written(ROOT / "build" / "test_triton", "add, norm, norm_backward", '"80", "90"')
    library = build(folder)
    return SimpleNamespace(folder=folder, library=library)


@pytest.fixture(scope="module")
def operators(package):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(package.folder))
        yield importlib.import_module("tritons").library.ops
        for name in [name for name in sys.modules if name.partition(".")[0] == "tritons"]:
            del sys.modules[name]


def test_the_library_needs_neither_triton_nor_cuda(package):
    elf = Elf(package.library)
    assert not [name for name in elf.needed if re.search("cuda|triton|python", name)]
    exported = {s.name for s in elf.symbols if s.defined}
    assert {"aot_vector_add_cuda", "aot_vector_add_cudaInit", "aot_norm_backward_cudaInfer"} <= exported
    assert not [name for name in exported if name.startswith("aot_triton_")]


def test_the_code_is_for_each_gpu(package):
    cuobjdump = Path(find_spec("triton").origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    for arch in ("80", "90"):
        made = json.loads((package.folder / "build" / "aotops" / "triton" / f"vector_add.sm_{arch}.json").read_text())
        cubin = package.folder / "build" / f"{arch}.cubin"
        cubin.write_bytes(base64.b64decode(made[0]["cubin"]))
        said = subprocess.run([cuobjdump, "-elf", cubin], capture_output=True, text=True, check=True).stdout
        assert f"sm={arch}" in said
        assert "add_kernel" in said


def test_nothing_is_compiled_again_for_a_comment(package, capfd):
    declaration = package.folder / "tritons" / "launch.py"
    before = declaration.read_text()
    put(declaration, before + "# a comment\n")
    build(package.folder, verbose=True)
    put(declaration, before)
    assert "compiling" not in capfd.readouterr().err


F32 = "float32"


def test_a_driver_is_told_to_launch(package, python):
    """In a process of its own, whose driver runs nothing (tests/programs/fake_cuda.c)."""
    python(f"import triton_driver; triton_driver.main({str(fake_driver())!r}, {str(package.library)!r})")


ATTRIBUTES = "ENTRIES = [copied, doubled, large, looped, copied_rows]"


def attributes(folder: Path, *changes: tuple[str, str]) -> Path:
    """The package of tests/programs/triton_attributes. Files that are the same are not written."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (ROOT / "tests" / "programs" / "triton_attributes").glob("*.py"):
        text = file.read_text()
        for change in changes:
            text = text.replace(*change)
        put(folder / file.name, text)
    table = 'library = "libp.so"\ntriton = ["launch.py"]\narchs = ["90"]\n'
    put(folder / "pyproject.toml", f'[project]\nname = "p"\n[tool.aotops]\n{table}')
    return folder


def test_too_much_shared_memory_is_told(tmp_path):
    changes = ("num_stages=3", "num_stages=8"), (ATTRIBUTES, "ENTRIES = [large]")
    words = r"large: kernel.py:large_kernel, .* needs \d+ bytes of shared memory, sm_90 has 232448: fewer num_stages"
    with pytest.raises(CompileError, match=words):
        build(attributes(tmp_path, *changes))


def test_what_the_compiler_says_before_an_error_is_left_out():
    """Where a pass of MLIR fails, Triton prints the module."""
    printed = "module {\n}\n<unknown>:0: error: Failures have been detected"
    told = "add: kernel.py:add_kernel, Config(B=8), sm_90: it does not compile: RuntimeError: PassManager::run failed"
    few = shortened(f"compiling add (Triton, sm 90) failed:\n{printed}\n{told}", "add: ")
    assert few == f"compiling add (Triton, sm 90) failed:\n{told}\n(3 more lines: aotops build --verbose)"


def test_scratch_without_a_workspace_is_told(tmp_path):
    changes = ("    workspace=True,\n", ""), (ATTRIBUTES, "ENTRIES = [copied]")
    with pytest.raises(
        CompileError, match=r"copied: .* it needs scratch, as a kernel does that makes tensor descriptors"
    ):
        build(attributes(tmp_path, *changes))


def test_a_launch_has_its_attributes(python):
    """Clusters, early starts, cooperative grids, shared memory, the scratch of tensor descriptors, and grids of a
    GPU's size."""
    library = build(attributes(ROOT / "build" / "test_triton_attributes"))
    python(f"import triton_driver; triton_driver.attributes({str(fake_driver())!r}, {str(library)!r})")


def test_every_check_passes(operators):
    for name in ("vector_add", "norm"):
        report = check(operators[name], frameworks=requested(), quick=True)
        assert report.ok, report.render()
        passed = {(item.check, item.where) for item in report.items if item.status == "pass"}
        assert {("launch plan", ""), ("interpreter", "values")} <= passed
        assert {("fake tensors", each) for each in {"torch", "jax"} & set(requested())} <= passed
    assert ("interpreter", "gradients") in passed


def test_a_call_on_the_cpu_is_refused_by_name(operators):
    import numpy as np

    from aotops.frontends import numpy as frontend

    x = np.ones(4, F32)
    with pytest.raises(
        NotImplementedError, match="vector_add: its library has no entry for the CPU: give it a C\\+\\+ source"
    ):
        frontend.of(operators["vector_add"].library).vector_add(x, x)


def test_the_template_passes_its_checks(tmp_path, monkeypatch):
    files = new.create("fused", "triton", tmp_path)
    assert "sources" not in [line.partition(" ")[0] for line in (tmp_path / "pyproject.toml").read_text().splitlines()]
    assert tmp_path / "fused" / "launch.py" in files
    for name, old, kept in (
        ("pyproject.toml", '"80", "90", "100", "120"', '"90"'),
        ("fused/launch.py", '("float16", "bfloat16", "float32")', '("float32",)'),
    ):
        file = tmp_path / name
        file.write_text(file.read_text().replace(old, kept))
    build(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    op = importlib.import_module("fused").library.ops["fused"]
    report = check(op, frameworks=requested(), quick=True)
    assert report.ok, report.render()
    passed = {(item.check, item.where) for item in report.items if item.status == "pass"}
    assert {("launch plan", ""), ("interpreter", "values"), ("interpreter", "gradients")} <= passed
    assert not (tmp_path / "cuda_src").exists()


def test_the_template_is_no_operator_of_a_checkout():
    with pytest.raises(ValueError, match="new: template is 'triton', expected a directory outside"):
        new.create("fused", "triton", ROOT / "fused")


# ---------------------------------------------------------------------------------------------------------- bad input

KERNEL = """
import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, y_ptr, n, B: tl.constexpr, C: tl.constexpr = 2):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + C, mask=at < n)
"""
DECLARATION = """
from aotops.triton import Config, Entry, Launch

ENTRIES = [
    Entry(
        "plus_two",
        inputs={"x": "float32[*n]"},
        outputs={"y": "float32[*n]"},
        launches=Launch(
            "kernel.py:add_kernel",
            arguments={"x_ptr": "x", "y_ptr": "y", "n": "n"},
            grid=["cdiv(n, B)"],
            configs=[Config(B=128)],
            hints=[{}],
        ),
    )
]
"""
MODULE = """
from pathlib import Path

from aotops import Library, operator
from aotops.testing import Case, Row


@operator(inputs=("x",), outputs=("y",), same_spec_as={"y": "x"}, elementwise=True)
def plus_two(x):
    return (x,), ()


library = Library("NAME", [plus_two], Path(__file__).with_name("libp.so"), cases="NAME", triton="launch_NAME")
CASES = {"plus_two": Row(lambda x: x + 2, (Case({"x": (5,)}), Case({"x": (300,)})), dtypes=("float32",))}
"""


def small(folder: Path, kernel=(), declaration=(), arch="90", name="p") -> Path:
    (folder / "kernel.py").write_text(KERNEL.replace(*kernel) if kernel else KERNEL)
    text = DECLARATION.replace(*declaration) if declaration else DECLARATION
    (folder / f"launch_{name}.py").write_text(text)
    table = f'library = "libp.so"\ntriton = ["launch_{name}.py"]\narchs = ["{arch}"]\n'
    put(folder / "pyproject.toml", f'[project]\nname = "p"\n[tool.aotops]\n{table}')
    (folder / f"{name}.py").write_text(MODULE.replace("NAME", name))
    return folder


@pytest.mark.parametrize(
    ("kernel", "declaration", "words"),
    [
        (
            ("mask=at < n) + C", "mask=at < n) + missing"),
            (),
            ["does not compile", "missing is not defined", "Config(B=128"],
        ),
        (
            ("def add_kernel", "def another"),
            (),
            ["kernel.py has no kernel add_kernel, expected a @triton.jit function"],
        ),
        (("import triton\n", "import triton\nimport no_such_module\n"), (), ["kernel.py fails: ModuleNotFoundError"]),
        ((), (', "n": "n"}', "}"), ["the parameter n has no argument, expected it in Launch(arguments=...)"]),
        ((), ('"n": "n"', '"n": "n", "m": "n"'), ["it has no parameter m, expected some of x_ptr, y_ptr, n, B, C"]),
        (
            ("    tl.store(y", "    x_ptr.load([0])\n    tl.store(y"),
            (),
            ["a tensor descriptor as an argument is not supported: make it in the kernel"],
        ),
        (("C: tl.constexpr = 2", "C: tl.constexpr"), (), ["the tl.constexpr C has no value in Config(B=128"]),
        (
            ("B: tl.constexpr, C", "B: tl.constexpr, num_warps: tl.constexpr, C"),
            (),
            ["the tl.constexpr num_warps has no value in Config(B=128"],
        ),
        ((), ('"n": "n"}', '"n": "n", "C": "n"}'), ["C is a tl.constexpr, expected it in Config(...)"]),
        ((), ("Config(B=128)", "Config(B=128, num_warps=3)"), ["does not compile", "num_warps must be a power of 2"]),
        ((), ("ENTRIES = [", "entries = ["), ["launch_p.py has no ENTRIES"]),
        ((), ('"cdiv(n, B)"', '"cdiv(n, D)"'), ["launch_p.py: plus_two: kernel.py:add_kernel: grid", "has D"]),
    ],
)
def test_what_is_wrong_with_a_kernel_is_told(tmp_path, kernel, declaration, words):
    with pytest.raises((CompileError, DeclarationError)) as raised:
        build(small(tmp_path, kernel, declaration))
    assert all(word in str(raised.value) for word in words), raised.value
    assert "Traceback" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "kernel", "declaration", "words"),
    [
        (
            "uncovered",
            (),
            ('"cdiv(n, B)"', '"n // B"'),
            ["elements of y are not written", "does not cover", "(2, 1, 1)"],
        ),
        ("wrong", ("+ C,", "+ 3,"), (), ["elements are wrong", "expected"]),
        ("outside", ("at, tl.load", "at + 8, tl.load"), (), ["it writes out of bounds, beside y"]),
        (
            "overwrites",
            ("tl.store(y_ptr", "tl.store(x_ptr + at, 0.0, mask=at < n)\n    tl.store(y_ptr"),
            (),
            ["it writes to x"],
        ),
    ],
)
def test_a_fault_is_found_without_a_gpu(tmp_path, monkeypatch, name, kernel, declaration, words):
    build(small(tmp_path, kernel, declaration, name=name))
    monkeypatch.syspath_prepend(str(tmp_path))
    op = importlib.import_module(name).library.ops["plus_two"]
    cases = importlib.import_module(name).CASES["plus_two"].cases
    report = check(op, cases=cases[1:] if name == "uncovered" else cases, only=["launch plan", "interpreter"])
    assert not report.ok
    assert all(word in report.render(color=False) for word in words), report.render()


@pytest.mark.parametrize(("grid", "unwritten"), [("cdiv(n, B)", {}), ("n // B", {"y": range(256, 300)})])
def test_an_element_that_looks_unwritten_is_none(tmp_path, grid, unwritten):
    """A result may have the bits of memory that was not written to."""
    declaration = DECLARATION.replace("float32", "int16").replace("cdiv(n, B)", grid)
    small(tmp_path)
    (tmp_path / "launch_p.py").write_text(declaration)
    x = np.full(300, 0xA5A5 - 2, np.uint16)
    question = interpreter.Question("plus_two", "90", {"x": (x.tobytes(), x.shape, "int16")}, {})
    (answer,) = interpreter.ask(tmp_path / "launch_p.py", [question])
    assert not answer.fault
    assert {name: list(at) for name, at in answer.unwritten.items()} == {k: list(v) for k, v in unwritten.items()}


def test_an_option_may_be_a_parameter_of_the_kernel(tmp_path, monkeypatch):
    """It is given the value, as by Triton's launcher, and its default where the configuration does not state it."""
    kernel = ("C: tl.constexpr = 2):\n", "num_stages: tl.constexpr, num_warps: tl.constexpr = 0):\n")
    stated = ("Config(B=128)", "Config(B=128, num_stages=2)")
    small(tmp_path, kernel, stated, name="option")
    file = tmp_path / "kernel.py"
    file.write_text(file.read_text().replace("+ C,", "+ num_stages + num_warps,"))
    build(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    report = check(importlib.import_module("option").library.ops["plus_two"], only=["interpreter"])
    assert report.ok, report.render()
    assert any(item.status == "pass" for item in report.items)


def test_an_operator_without_an_entry_is_told(tmp_path, monkeypatch):
    build(small(tmp_path, declaration=('"plus_two"', '"plus_too"'), name="undeclared"))
    monkeypatch.syspath_prepend(str(tmp_path))
    report = check(importlib.import_module("undeclared").library.ops["plus_two"], frameworks=["numpy"], quick=True)
    told = report.failures[0].failure.message
    assert "has no cuda entry (aot_plus_two_cuda); state it in ENTRIES of launch_undeclared" in told


def test_an_operator_may_have_a_cpu_entry_in_cpp(tmp_path, monkeypatch):
    """It includes the header that is made of the declaration."""
    small(tmp_path, name="withcpu")
    shutil.copy(ROOT / "tests" / "programs" / "plus_two.cpp", tmp_path)
    file = tmp_path / "pyproject.toml"
    file.write_text(file.read_text() + 'sources = ["*.cpp"]\nisas = ["baseline"]\nflags = ["-O1"]\n')
    build(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    report = check(importlib.import_module("withcpu").library.ops["plus_two"], frameworks=["numpy"], quick=True)
    assert report.ok, report.render()
    passed = {(item.check, item.where) for item in report.items if item.status == "pass"}
    assert {("values", "numpy cpu"), ("launch plan", ""), ("interpreter", "values")} <= passed


def test_a_package_without_sources_is_refused(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.aotops]\nlibrary = "x.so"\ntriton = ["launch.py"]\n')
    with pytest.raises(ValueError, match=re.escape("triton has 'launch.py', which does not exist")):
        build(tmp_path)
    assert not os.path.exists(tmp_path / "build")
