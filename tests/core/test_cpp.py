"""The library without Python: C programs that call entries, and C++ programs that call its operators through LibTorch.
And with Python: the same kernels behind torch.ops.aotops."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import aotops
from aotops import build, library, new
from aotops.ops import OPS
from aotops.testing.frameworks import requested

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "cpp"
LINKED = [f"-I{aotops.include_dir()}", f"-L{library.path().parent}", "-laotops", f"-Wl,-rpath,{library.path().parent}"]
WITH_KERNEL = [one for op in OPS.values() for one in (op, op.backward) if one is not None and one.has_kernel]

needs_torch = pytest.mark.skipif("torch" not in requested(), reason="torch is not under test")


def built(source: Path, program: Path, *options: str) -> list[str]:
    compiler = ["gcc", "-std=c11", "-pedantic"] if source.suffix == ".c" else ["g++", "-std=c++20"]
    return [*compiler, "-O0", "-Wall", "-Wextra", "-Werror", str(source), *options, *LINKED, "-o", str(program)]


def output(*command: object, **environment: str) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=os.environ | environment)
    assert not done.returncode, done.stderr
    return done.stdout


def test_a_c_program_calls_an_entry(tmp_path):
    subprocess.run(built(EXAMPLES / "layer_norm.c", tmp_path / "layer_norm"), check=True)
    *rows, error = output(tmp_path / "layer_norm").splitlines()
    x = np.array([[1, 2, 3, 4], [10, 10, 10, 14]])
    expected = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose([[float(y) for y in row.split()] for row in rows], expected, atol=6e-5)
    assert error == "layer_norm: x has dtype int32, expected float16, bfloat16, float32 or float64"


def test_the_header_is_c_and_cpp_and_agrees_with_the_library(tmp_path):
    """Every function that it declares is exported, and its numbers are those of the kernels' header."""
    header = (ROOT / "cuda_src" / "aotops.h").read_text()
    for name in re.findall(r"\b(aot_\w+)\(", re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)):
        assert library.load().address(name), name
    entry = "int (*entry)(int, void **, int *, int64_t **, const char **, void *, void *) = aot_gelu_cpu;"
    source = tmp_path / "both.cpp"
    source.write_text(
        f'#include <aotops.h>\n#include <aot.h>\nextern "C" {{ AOTOPS_DECLARE(aot_gelu_cpu); }}\n{entry}\n'
        + "".join(
            f"static_assert(int({a}) == int(aot::{b}));\n"
            for a, b in {
                "AOTOPS_INVALID_ARGUMENT": "kInvalidArgument", "AOTOPS_UNSUPPORTED_DTYPE": "kUnsupportedDtype",
                "AOTOPS_NOT_IMPLEMENTED": "kNotImplemented", "AOTOPS_DEVICE_ERROR": "kDeviceError",
                "AOTOPS_CONVENTION_MISUSED": "kConventionMisused", "AOTOPS_OUT_OF_MEMORY": "kOutOfMemory",
                "AOTOPS_MAX_NDIM": "kMaxNdim",
            }.items()
        )
        + "int main() { return !entry; }\n"
    )  # fmt: skip
    subprocess.run(built(source, tmp_path / "both"), check=True)
    output(tmp_path / "both")


def test_parts_of_float32_are_reserved_by_a_library_that_has_their_kernels(tmp_path):
    """conv2d's workspace has 6 bytes an element of x for them, which other GPUs' libraries have no use for."""
    source, images = tmp_path / "workspace.cpp", 8 * 28 * 28 * 64
    source.write_text(
        dedent("""
            #include <cstdio>
            #include "operators/conv2d.h"
            int main() {
              aot::Conv2dParams p;
              p.layout = 1;
              std::printf("%d", static_cast<int>(p.forward_workspace({8, 64, 28, 28, 64, 3, 3, 26, 26},
                                                                     aot::DType::float32)));
            }
        """)
    )
    words = []
    for options in ((), ("-DAOT_HAVE_SM90",)):
        subprocess.run(["g++", "-std=c++17", f"-I{ROOT}/cuda_src", *options, source, "-o", tmp_path / "it"], check=True)
        words.append(int(output(tmp_path / "it")))
    assert words[0] < images < words[1]


def test_registration_without_torch_is_an_error(python):
    program = """
        from aotops import library
        print(library.load().aot_torch_register(), library.last_error())
    """
    assert python(dedent(program)).startswith("3 torch: libtorch_cpu.so is not loaded")


# --------------------------------------------------------------------------------------------------- LibTorch, in C++


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The folder of the C++ programs, and what digits_package.py, which has written the package there, printed."""
    torch = pytest.importorskip("torch")
    folder, root = tmp_path_factory.mktemp("cpp"), Path(torch.__file__).parent
    options = [
        "-isystem", f"{root}/include", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-L{root}/lib", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root}/lib",
    ]  # fmt: skip
    running = [
        subprocess.Popen(built(EXAMPLES / f"{name}.cpp", folder / name, *options))
        for name in ("digits", "dispatcher", "authors")
    ]
    # one kernel to compile: a pool of processes would take longer to start
    said = output(sys.executable, EXAMPLES / "digits_package.py", folder, 1, TORCHINDUCTOR_COMPILE_THREADS="1")
    assert [one.wait() for one in running] == [0, 0, 0]
    return folder, said


@needs_torch
def test_a_cpp_program_runs_an_aotinductor_package(programs):
    folder, said = programs
    assert re.fullmatch(r"test accuracy 0\.\d{4}\n", said)
    assert output(folder / "digits", folder) == said


@needs_torch
def test_a_cpp_program_calls_an_operator_through_the_dispatcher(programs):
    folder, _ = programs
    assert output(folder / "dispatcher").splitlines() == [
        "h 2.0000, y 2.0000",
        "add_rms_norm: residual has dtype int32, expected float32",
    ]


@needs_torch
def test_a_cpp_program_calls_an_authors_operator(programs, tmp_path, monkeypatch):
    """The template's, by the rows of its definitions. Rows of another version and another library are refused."""
    folder, _ = programs
    new.create("scale", directory=tmp_path)
    table = tmp_path / "pyproject.toml"
    table.write_text(table.read_text().replace("[tool.aotops]\n", '[tool.aotops]\nisas = ["baseline"]\n'))
    monkeypatch.setattr("aotops.toolchain.nvcc", lambda: None)
    file, schemas = build.build(tmp_path), tmp_path / "scale.schemas"

    done = subprocess.run([sys.executable, "-m", "aotops", "schemas", "scale"], cwd=tmp_path, capture_output=True)
    assert not done.returncode, done.stderr
    schemas.write_bytes(done.stdout)
    assert output(folder / "authors", schemas, file) == "3.75\n"

    def refused(rows: bytes, library: object = file) -> str:
        schemas.write_bytes(rows)
        return subprocess.run([folder / "authors", schemas, library], capture_output=True, text=True).stderr.strip()

    first, *rest = done.stdout.splitlines(keepends=True)
    assert "begin with 'aotops 0.0.1', expected 'aotops " in refused(b"aotops 0.0.1\n" + b"".join(rest))
    assert "have a row 'scale(Tensor x', expected three columns" in refused(first + b"scale(Tensor x\n")
    assert "cannot open shared object file" in refused(done.stdout, tmp_path / "absent.so")
    assert "has no complete entry of other(" in refused(done.stdout.replace(b"scale(", b"other("))


# ------------------------------------------------------------------------------------------------ the same, in Python


def dispatched():
    torch = pytest.importorskip("torch")
    pytest.importorskip("aotops.frontends.torch")
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("before torch 2.10 the kernels are Python's")
    return torch.ops.aotops


@pytest.fixture
def operators():
    return dispatched()


@needs_torch
@pytest.mark.parametrize("op", WITH_KERNEL, ids=lambda op: op.name)
def test_the_kernels_are_registered_from_c(operators, op):
    import torch

    table = torch._C._dispatch_dump(f"aotops::{op.name}")
    for device in ("CPU", "CUDA"):
        (line,) = [line for line in table.splitlines() if line.startswith(f"{device}: ")]
        assert "torch_stable.cpp" in line


COPIES = """
    import ctypes, shutil, torch
    from pathlib import Path
    from aotops import library
    for name in ("one.so", "two.so"):
        copy = ctypes.CDLL(shutil.copy(library.path(), Path({folder!r}, name)))
        assert copy.aot_torch_register() == 0
        assert copy.aot_torch_register() == 0
    from aotops.frontends import torch as ours
    assert library.load().aot_torch_registered() == 0
    assert library.load().aot_torch_register() == 0
    x = torch.randn(5, 8, requires_grad=True)
    expected = torch.nn.functional.gelu(x)
    for f in (torch.ops.aotops.gelu, torch.vmap(torch.ops.aotops.gelu, (0, None))):
        y = f(x, "none")
        assert torch.allclose(y, expected, atol=1e-6)
        gradients = [torch.autograd.grad(z.sum(), x, retain_graph=True)[0] for z in (y, expected)]
        assert torch.allclose(*gradients, atol=1e-6)
    assert torch.ops.aotops.gelu(x.to("meta"), "none").shape == x.shape
    print("needs_exact_strides" in str(torch.ops.aotops.gelu.default.tags))
"""


@needs_torch
def test_operators_are_registered_once(python, tmp_path, operators):
    """By the first copy of the library that is asked; the frontend adds to it what is Python's."""
    import torch

    with_tags = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
    assert python(dedent(COPIES).format(folder=str(tmp_path))).split() == [str(with_tags)]


@needs_torch
def test_the_frontend_comes_first(python, operators):
    program = """
        import torch
        from aotops import library
        from aotops.frontends import torch as ours
        print(library.load().aot_torch_register(), torch.ops.aotops.gelu(torch.zeros(2), "none").tolist())
    """
    assert python(dedent(program)).split("\n")[0] == "0 [0.0, 0.0]"


@st.composite
def layouts(draw):
    """A shape, and for each of two tensors the order of its axes in memory, what it is a slice of, and what is
    expanded."""
    shape = draw(st.lists(st.integers(0, 4), max_size=5))
    each = st.lists(st.booleans(), min_size=len(shape), max_size=len(shape))
    layout = st.tuples(st.permutations(range(len(shape))), each, each, each)
    return shape, draw(layout), draw(layout)


def laid_out(torch, shape, layout):
    order, wide, strided, expanded = layout
    sizes = [1 if e else n * (2 if w or s else 1) for n, w, s, e in zip(shape, wide, strided, expanded, strict=True)]
    t = torch.randn([sizes[i] for i in order]).permute([order.index(i) for i in range(len(shape))])
    t = t[tuple(slice(None, None, 2 if s else 1) for s in strided)]
    return t[tuple(slice(n) for n in shape)].expand(shape)


@needs_torch
@settings(max_examples=400, deadline=None)
@given(layouts())
@example(([2, 3, 4, 5], ([0, 2, 3, 1], *[[False] * 4] * 3), ([0, 2, 3, 1], *[[False] * 4] * 3)))
def test_results_have_the_strides_of_torchs_elementwise_operators(case):
    """The kernel in C and the fake one give the same strides."""
    import torch
    from torch._prims_common import compute_elementwise_output_strides
    from torch._subclasses import FakeTensorMode

    operators, fake = dispatched(), FakeTensorMode()
    gate, up = (laid_out(torch, case[0], layout) for layout in case[1:])
    y = operators.swiglu(gate, up)
    expected = tuple(compute_elementwise_output_strides(gate, up))
    assert y.stride() == expected, (case[0], gate.stride(), up.stride())
    with fake:
        assert operators.swiglu(fake.from_tensor(gate), fake.from_tensor(up)).stride() == expected
    torch.testing.assert_close(y, torch.nn.functional.silu(gate) * up)


@needs_torch
@pytest.mark.parametrize("guard", ["no_grad", "inference_mode"])
def test_errors_have_their_type_and_text(operators, guard):
    import torch

    x, freed = torch.ones(2, 3), torch.ones(4)
    freed.untyped_storage().resize_(0)
    calls = [
        (TypeError, "gelu: x has dtype int64, expected", lambda: operators.gelu(x.long(), "none")),
        (ValueError, "gelu: approximate is 'sinh', expected 'none' or 'tanh'", lambda: operators.gelu(x, "sinh")),
        (ValueError, r"gelu: approximate is 'a\?b', expected a string of", lambda: operators.gelu(x, "a\nb")),
        (ValueError, "softmax: dim is 2, expected an axis of x", lambda: operators.softmax(x, 2)),
        (RuntimeError, "gelu: x has no memory: its storage was freed", lambda: operators.gelu(freed, "none")),
        (RuntimeError, r"matmul: y of shape \(2097152, 2097152\) cannot be allocated",
         lambda: operators.matmul(torch.ones(1 << 21, 1), torch.ones(1, 1 << 21), False, False, False)),
    ]  # fmt: skip
    for kind, text, call in calls:
        with getattr(torch, guard)(), pytest.raises(kind, match=text):
            call()


@needs_torch
def test_attributes_that_change_with_each_call(operators):
    """More than the library keeps; each number with all its digits."""
    import torch

    x = torch.ones(2, dtype=torch.float64)
    for _ in range(2):
        for i in range(300):
            assert operators.add(x, x, i / 7, None)[1] == 1 + i / 7
    assert operators.add(x, None, 1.0, -float("inf"))[0] == -float("inf")
    assert operators.add(x, None, 1.0, float("nan")).isnan().all()


@needs_torch
def test_arguments_are_freed(operators):
    """Also the arguments of a call that fails."""
    import torch

    for dtype in (torch.float32, torch.int32):
        x, weight = torch.ones(3, 2, dtype=dtype).t(), torch.ones(3)
        try:
            y, stats = operators.layer_norm(x, weight, None, [3], 1e-5, 0.0)
            assert y._use_count() == stats._use_count() == 1
        except TypeError:
            assert dtype == torch.int32
        assert x._use_count() == weight._use_count() == 1
