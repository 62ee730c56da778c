"""Mistakes that a caller of the C convention may make, and odd processes: its locale, a fork, a broken library."""

from __future__ import annotations

import ctypes
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aotops import call, library
from aotops.extra import encode
from aotops.infer import infer
from aotops.ops import BUILTIN, OPS
from aotops.spec import TensorSpec
from aotops.testing.frameworks import frameworks

PROGRAMS = Path(__file__).parents[1] / "programs"
F32 = "float32"


def _tool(name: str) -> str:
    return shutil.which(name) or pytest.fail(f"{name} is not installed; g++ builds the library, localedef is glibc's")


# ----------------------------------------------------------------------------------------------------- calls at random


def test_calls_at_random(tmp_path):
    """A short run of what `make asan` does at length."""
    built = tmp_path / "fuzz"
    source = PROGRAMS / "fuzz_convention.cpp"
    subprocess.run([_tool("g++"), "-std=c++17", "-O1", "-Wall", "-Wextra", source, "-o", built, "-ldl"], check=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}  # more would wait for each other most of the time
    command = [built, library.path(), "5000", "7"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("5000 calls of 44 entries")


def test_every_entry_refuses_what_is_wrong(tmp_path):
    """tests/programs/hostile_calls.py says what. An entry that it does not call is none of the table's."""
    said = tmp_path / "said"
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    with said.open("w") as file:  # a pipe that nobody reads until the end would fill
        done = subprocess.run(
            [sys.executable, PROGRAMS / "hostile_calls.py"],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=600,
            check=False,
        )
    lines = said.read_text().splitlines()
    told = [line for line in lines if line.startswith("FAULT")] or lines[-20:]
    assert done.returncode == 0, "\n".join(told)
    exported = set(BUILTIN.exported)
    entries = {name for name in exported if re.fullmatch("aot_[a-z0-9_]+_cpu", name) and f"{name}Init" in exported}
    assert {*lines[-2].split()[1:], "aot_hosted_cpu"} == entries


def test_a_backward_without_its_workspace_writes_neither_gradient():
    """The gradient of a needs none, and would be first. That of b is a sum over a's matrices, which lie transposed."""
    dy, a, b = (TensorSpec(shape, F32) for shape in ((2, 3, 5), (2, 4, 3), (4, 5)))
    attrs = {"transpose_a": True, "transpose_b": False, "allow_tf32": False}
    arrays = [(ctypes.c_float * math.prod(spec.shape))(*[7] * math.prod(spec.shape)) for spec in (dy, a, b, a, b)]
    op = OPS["matmul"].backward
    run = call.addresses(op, tuple(attrs[name] for name in op.attrs), "cpu", (dy, a, b, a, b, None))
    with pytest.raises(RuntimeError, match="matmul_backward: workspace is missing"):
        run(0, 0, *map(ctypes.addressof, arrays))
    assert {number for array in arrays for number in array} == {7}


# ----------------------------------------------------------------------------------------------------- other libraries


@pytest.mark.parametrize(
    ("file", "reason"),
    [("missing.so", "missing.so: cannot open shared object file"), ("", "undefined symbol: cublasLtCreate")],
    ids=["missing", "another library"],
)
def test_a_cublaslt_that_cannot_be_used_is_named(python, tmp_path, file, reason):
    """By the first matrix product, before it asks for a GPU: none is needed here."""
    if not library.has_cuda():
        pytest.skip("the library was built without CUDA")
    path = tmp_path / file if file else library.path()
    error = python(_MATMUL_ON_CUDA, AOTOPS_CUBLASLT=str(path))
    assert error.startswith(f"4 matmul: AOTOPS_CUBLASLT is '{path}', expected the path of libcublasLt.so, or 'none': ")
    assert reason in error


@pytest.mark.parametrize("word", ["none", ""])
def test_a_word_that_names_no_cublaslt_is_no_error(python, word):
    if not library.has_cuda():
        pytest.skip("the library was built without CUDA")
    assert "AOTOPS_CUBLASLT" not in python(_MATMUL_ON_CUDA, AOTOPS_CUBLASLT=word)


def test_a_choice_of_products_that_is_unknown_is_named(python):
    if not library.has_cuda():
        pytest.skip("the library was built without CUDA")
    error = python(_MATMUL_ON_CUDA, AOTOPS_GEMM="fastest")
    assert error.strip() == "4 matmul: AOTOPS_GEMM is 'fastest', expected 'auto', 'cublaslt' or 'own'"
    assert "AOTOPS_GEMM" not in python(_MATMUL_ON_CUDA, AOTOPS_GEMM="")


_MATMUL_ON_CUDA = """
import ctypes
import math
from aotops import library
shapes = [(2, 3), (3, 4), (2, 4), (0,)]
dims = [(ctypes.c_int64 * len(shape))(*shape) for shape in shapes]
data = [(ctypes.c_float * max(math.prod(shape), 1))() for shape in shapes]
status = library.load().aot_matmul_cuda(
    len(shapes),
    (ctypes.c_void_p * len(shapes))(*map(ctypes.addressof, data)),
    (ctypes.c_int * len(shapes))(*map(len, shapes)),
    (ctypes.c_void_p * len(shapes))(*map(ctypes.addressof, dims)),
    (ctypes.c_char_p * len(shapes))(*[b"float32"] * len(shapes)),
    None,
    None,
)
print(status, library.last_error() if status else "")
"""


# ---------------------------------------------------------------------------------------------------------- attributes


def _init(op: str, attrs: str) -> str:
    """The message of an operator's Init for attributes as text, empty where it takes them."""
    lib = library.load()
    extra = ctypes.c_void_p(lib.aot_extra_new(attrs.encode()))
    status = getattr(lib, f"aot_{op}_cpuInit")(None, None, None, extra)
    lib.aot_extra_delete(extra)
    return library.last_error() if status else ""


@pytest.mark.parametrize(
    ("op", "attrs", "message"),
    [
        ("conv2d", f"stride={2**64},1", "conv2d: attribute stride is not a list of at most 32 integers of 64 bits"),
        ("conv2d", "stride=1,2,", "conv2d: attribute stride is not a list of at most 32 integers of 64 bits"),
        ("conv2d", f"padding=0,{2**62}", f"conv2d: padding is (0, {2**62}), expected two integers of at most 2**50"),
        ("conv2d_backward", "groups=0", "conv2d_backward: groups is 0, expected at least 1"),
        (
            "cross_entropy",
            f"ignore_index={-(2**63) - 1}",
            "cross_entropy: attribute ignore_index is not an integer of 64 bits",
        ),
        ("cross_entropy", "ignore_index= 1", "cross_entropy: attribute ignore_index is not an integer of 64 bits"),
        ("cross_entropy", "label_smoothing=1e999", "cross_entropy: attribute label_smoothing is not a number"),
        ("cross_entropy", "label_smoothing=0x1p-3", "cross_entropy: attribute label_smoothing is not a number"),
        ("cross_entropy", "label_smoothing=", "cross_entropy: attribute label_smoothing is not a number"),
        ("cross_entropy", "label_smoothing=nan", "cross_entropy: label_smoothing is nan, expected 0 to 1"),
        ("cross_entropy", "label_smoothing=inf", "cross_entropy: label_smoothing is inf, expected 0 to 1"),
        ("cross_entropy_backward", "reduction=", "cross_entropy_backward: reduction is '', expected"),
        ("matmul", "transpose_a=2", "matmul: attribute transpose_a is not a bool"),
        ("gelu", "approximate=", "gelu: approximate is '', expected 'none' or 'tanh'"),
        ("linear", "activation=none", "linear: activation is 'none', expected None, 'relu',"),
    ],
)
def test_init_refuses(op, attrs, message):
    assert _init(op, attrs).startswith(message)


@pytest.mark.parametrize("text", ["0.5", "5e-1", "0", "1", "1e-400"])
def test_init_takes_numbers(text):
    assert _init("cross_entropy", f"label_smoothing={text}") == ""


# A host of its own strings, as MindSpore is: laid out as cuda_src/extra.cpp says.
HOST = r"""
#include <cstdint>
#include <string>
#include <vector>
struct Host {
  virtual ~Host() = default;
  virtual bool HasAttr(std::string name) { return name == "approximate"; }
  std::vector<size_t> workspace;
  void *kernel_data = nullptr;
  virtual bool GetAttrBool(std::string) { throw 1; }
  virtual int64_t GetAttrInt(std::string) { throw 1; }
  virtual float GetAttrFloat(std::string) { throw 1; }
  virtual std::string GetAttrStr(std::string) { return text; }
  std::string text;
};
extern "C" int init_with(int (*init)(int *, int64_t **, const char **, void *), const char *text, size_t size) {
  Host host;
  host.text.assign(text, size);
  return init(nullptr, nullptr, nullptr, &host);
}
"""


def test_a_string_of_a_host_ends_where_the_host_says(tmp_path):
    built = tmp_path / "host.so"
    command = [_tool("g++"), "-std=c++17", "-D_GLIBCXX_USE_CXX11_ABI=0", "-shared", "-fPIC", "-x", "c++", "-", "-o"]
    subprocess.run([*command, built], input=HOST, text=True, check=True)
    init_with = ctypes.CDLL(str(built)).init_with
    init_with.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    init = library.load().address("aot_gelu_cpuInit")
    assert init_with(init, b"tanh", 4) == 0
    for word in (b"tanh\0", b"\0tanh", b"\0"):
        assert init_with(init, word, len(word)) == 1
        assert library.last_error() == "gelu: attribute approximate is not a short string without NUL"
    assert init_with(init, b"", 0) == 1
    assert library.last_error() == "gelu: approximate is '', expected 'none' or 'tanh'"


SPECS = {
    "gelu": ([((3,), F32)], {}),
    "cross_entropy": (
        [((3, 4), F32), ((3,), "int64"), None],
        {
            "ignore_index": -100,
            "reduction": "mean",
            "label_smoothing": 0,
            "dtype": None,
            "z_loss": 0,
            "softcap": 0,
        },
    ),
    "linear": ([((3, 4), F32), ((5, 4), F32), None], {"activation": None, "allow_tf32": False}),
    "conv2d": (
        [((1, 2, 5, 5), F32), ((2, 2, 3, 3), F32), None],
        {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1, "layout": None, "allow_tf32": False},
    ),
}


@pytest.mark.parametrize(
    ("op", "attr"),
    [
        ("gelu", "approximate"),
        ("cross_entropy", "reduction"),
        ("cross_entropy", "dtype"),
        ("linear", "activation"),
        ("conv2d", "layout"),
    ],
)
def test_the_words_of_an_attribute_are_listed(op, attr):
    inputs, attrs = SPECS[op]
    specs = tuple(spec and TensorSpec(*spec) for spec in inputs)
    with pytest.raises(ValueError, match=rf"{op}: {attr} is 'quick', expected .*'\w+' or '\w+'$") as raised:
        infer(OPS[op], tuple((attrs | {attr: "quick"}).values()), specs)
    assert _init(op, f"{attr}=quick") == str(raised.value)


@pytest.mark.parametrize("word", ["tanh\0", "\0tanh", "tanh\nx=1", "tanh\u00e9", "\ud800"])
def test_text_that_no_attribute_may_be(word):
    with pytest.raises(ValueError, match=r"gelu: approximate is .*, expected a string of printable ASCII characters"):
        encode(OPS["gelu"], (word,))


def test_the_least_integer_does_not_stand_for_none():
    with pytest.raises(ValueError, match=rf"rope: rotary_dim is {-(2**63)}, expected an integer of 64 bits or None"):
        encode(OPS["rope"], (False, "BSHD", -(2**63)))


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 2**64, 10**4000])
def test_integers_of_more_than_64_bits(number):
    with pytest.raises(ValueError, match=r"cross_entropy: ignore_index is .*, expected an integer of 64 bits"):
        encode(OPS["cross_entropy"], (number, "mean", 0.0, None, 0.0, None))
    with pytest.raises(ValueError, match=r"conv2d: stride is .*, expected integers of 64 bits"):
        encode(OPS["conv2d"], ((1, number), (0, 0), (1, 1), 1, "NCHW", False))


def test_an_integer_that_no_float_holds():
    with pytest.raises(ValueError, match=r"layer_norm: eps is 1000*.*, expected a number"):
        encode(OPS["layer_norm"], ((3,), 10**400, 0.0))


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"])
def test_an_eps_that_is_nan_makes_nan(op):
    """It is no sign for an eps that is not given."""
    row = (ctypes.c_float * 3)(1, 2, 4)
    outputs = [(ctypes.c_float * 3)() for _ in range(1 + op.startswith("add"))]
    inputs = [row, row][: len(outputs)]
    spec = TensorSpec((1, 3), F32)
    given = [spec] * len(inputs)
    written = [spec if y in OPS[op].outputs else None for y in OPS[op].entry_outputs]
    slots = (*given, *[None] * (len(OPS[op].inputs) - len(given)), *written)
    run = call.addresses(OPS[op], ((3,), math.nan, 0.0), "cpu", slots)
    run(0, 0, *map(ctypes.addressof, (*inputs, *outputs)))
    assert all(map(math.isnan, outputs[0]))


COMMA = """
import ctypes, locale
locale.setlocale(locale.LC_NUMERIC, "comma")
assert locale.localeconv()["decimal_point"] == ","
from aotops import call
from aotops.ops import BUILTIN, OPS
from aotops.spec import TensorSpec
x, y = (ctypes.c_double * 2)(1, -1), (ctypes.c_double * 2)()
spec = TensorSpec((2,), "float64")
run = call.addresses(OPS["rms_norm"], ((2,), 0.5625, 0.0), "cpu", (spec, None, None, spec, None))
run(0, 0, ctypes.addressof(x), ctypes.addressof(y))
print(*y)
"""


def test_a_locale_whose_decimal_point_is_a_comma(python, tmp_path):
    """It is made here, by glibc's localedef, so that no locale need be installed."""
    letters = "".join(f"<U{i:04X}> \\x{i:02x}\n" for i in range(128))
    (tmp_path / "charmap").write_text(
        f"<code_set_name> ASCII\n<mb_cur_min> 1\n<mb_cur_max> 1\nCHARMAP\n{letters}END CHARMAP\n"
    )
    (tmp_path / "source").write_text(
        'LC_NUMERIC\ndecimal_point "<U002C>"\nthousands_sep ""\ngrouping -1\nEND LC_NUMERIC\n'
    )
    command = [_tool("localedef"), "-c", "-i", "source", "-f", "charmap", "./comma"]
    # it warns of the categories that are left out, and says so with its status
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=300, check=False)
    y = 1 / math.sqrt(1.5625)
    said = [float(number) for number in python(COMMA, LOCPATH=str(tmp_path)).split()]
    assert said == [pytest.approx(y, rel=1e-14), pytest.approx(-y, rel=1e-14)]


# --------------------------------------------------------------------------------------------------------------- forks

FORK = """
import os, signal, sys
import numpy
from aotops.frontends import numpy as frontend

x = numpy.linspace(-3, 3, 1 << 20, dtype="float32").reshape(1024, 1024)

def work(_=None):
    return frontend.gelu(x), frontend.matmul(x[:256], x[:, :256])  # seconds where sanitizers watch

expected = work()
{body}
"""
CHILDREN = """
def same():
    return all((a == b).all() for a, b in zip(work(), expected))

def wait(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

# a child that uses threads, whose child does too, and one that fails a call
signal.alarm(280)  # a child that hangs is waited for no longer
child = os.fork()
if not child:
    signal.alarm(240)
    grandchild = os.fork() if same() else os._exit(3)
    if not grandchild:
        signal.alarm(200)
        os._exit(0 if same() and same() else 4)
    code = wait(grandchild)
    try:
        frontend.layer_norm(x, 3)
    except ValueError as error:
        os._exit(code if same() and "layer_norm" in str(error) else 5)
print(wait(child), same())
"""
POOL = """
import multiprocessing
signal.alarm(280)
with multiprocessing.get_context("fork").Pool(2) as pool:
    results = pool.map_async(work, range(4)).get(timeout=240)
print(0, all((a == b).all() for result in results for a, b in zip(result, expected)))
"""


@pytest.mark.parametrize("body", [CHILDREN, POOL], ids=["os.fork", "multiprocessing"])
def test_a_child_of_a_process_that_used_threads(python, body):
    if not any(f.frontend == "numpy" for f in frameworks()):
        pytest.skip("numpy is not under test")
    assert python(FORK.replace("{body}", body), OMP_NUM_THREADS="2").split()[-2:] == ["0", "True"]


# --------------------------------------------------------------------------------------------------------- the library

USE = "from aotops import library\nlibrary.load()"


@pytest.mark.parametrize("kept", [0.9, 0.5, 0.01])
def test_a_truncated_library(python, tmp_path, kept):
    """To map it would end the process with SIGBUS."""
    whole = library.path().read_bytes()
    file = tmp_path / "libaotops.so"
    file.write_bytes(whole[: int(len(whole) * kept)])
    said = python(USE, expect=1, AOTOPS_LIBRARY=str(file))
    assert f"LibraryError: {file} has {int(len(whole) * kept)} bytes of at least" in said


@pytest.mark.parametrize("size", [0, 5, 63])
def test_a_library_of_less_than_its_head(python, tmp_path, size):
    file = tmp_path / "libaotops.so"
    file.write_bytes(library.path().read_bytes()[:size])
    assert f"LibraryError: {file} does not load:" in python(USE, expect=1, AOTOPS_LIBRARY=str(file))


def test_a_library_that_lacks_a_function(python, tmp_path):
    from aotops import __version__

    source = f'extern "C" const char *aot_version() {{ return "{__version__}"; }}'
    source += 'extern "C" const char *aot_last_error() { return ""; }'
    file = tmp_path / "libother.so"
    subprocess.run(
        [_tool("g++"), "-shared", "-fPIC", "-x", "c++", "-", "-o", file], input=source, text=True, check=True
    )
    said = python(USE, expect=1, AOTOPS_LIBRARY=str(file))
    assert f"LibraryError: {file} exports no aot_extra_new: rebuild it" in said


def test_a_library_that_cannot_be_read(python, tmp_path):
    said = python(USE, expect=1, AOTOPS_LIBRARY=str(tmp_path))
    assert f"LibraryError: {tmp_path} cannot be read: Is a directory" in said
    if os.geteuid():  # root may read anything
        file = tmp_path / "libaotops.so"
        file.touch(mode=0)
        assert f"LibraryError: {file} cannot be read: Permission denied" in python(
            USE, expect=1, AOTOPS_LIBRARY=str(file)
        )


def test_the_library_stays_where_it_was_found(python, tmp_path):
    program = "import os\nfrom aotops import library\nprint(library.path())\nos.chdir('/')\nprint(library.path())"
    first, second = python(program, AOTOPS_LIBRARY="libaotops.so").split()
    assert first == second == str(PROGRAMS / "libaotops.so")
