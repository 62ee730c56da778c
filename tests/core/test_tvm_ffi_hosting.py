"""Functions of tvm-ffi that know nothing of aotops, as operators of every framework: those of libraries
(programs/tvm_ffi_hosted.c and .cpp), and function objects."""

from __future__ import annotations

import ctypes
import gc
import shutil
import subprocess
import weakref
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import aotops
from aotops import TensorSpec, call
from aotops.library import LibraryError
from aotops.testing import check
from aotops.testing.frameworks import race, requested

PROGRAMS = Path(__file__).parents[1] / "programs"
SPEC = find_spec("tvm_ffi")  # without an import, which MindSpore's environment need not allow
FOLDER = Path(SPEC.submodule_search_locations[0]) if SPEC else None
HEADERS = ["-isystem", f"{FOLDER}/include", f"-L{FOLDER}/lib", "-ltvm_ffi"]
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
SHARED = ["-O0", "-fPIC", "-shared"]

needs_torch = pytest.mark.skipif("torch" not in requested(), reason="torch is not under test")
needs_jax = pytest.mark.skipif("jax" not in requested(), reason="jax is not under test")
gpu = pytest.mark.gpu

X = np.float32([[1, -2, 3], [0.5, 4, -1]])
Y = np.float32([[2, 3, -1], [8, 0.25, 2]])
VALUES = {
    "flag": True, "count": -7, "scale": 0.25, "text": "a;b%c=d,e|f: g", "axes": (1, -2, 3), "shape": (),
    "weights": (0.5, 1e-3), "pairs": ((1, 2), (), (3,)),
}  # fmt: skip
SUM = 1 - 7 + 0.25 + 14 + 300 + 2 + 0.501 + 6
KINDS = {
    "flag": "bool", "count": "int", "scale": "float", "text": "str", "axes": "int[]", "shape": "int[]",
    "weights": "float[]", "pairs": "int[][]",
}  # fmt: skip
MUL = {
    "inputs": ("x", "y"), "outputs": ("z",), "order": ("x", "y", "z"), "same_spec_as": {"z": "x"},
    "vmappable": ("x", "y", "z"),
}  # fmt: skip
ONE = {"inputs": ("x",), "outputs": ("y",), "same_spec_as": {"y": "x"}}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tvm_ffi_hosted")


@pytest.fixture(scope="session")
def in_c(folder):
    """The library in C, and its operators."""
    file = folder / "libinc.so"
    subprocess.run(["gcc", "-std=c11", *SHARED, *WARNINGS, PROGRAMS / "tvm_ffi_hosted.c", "-o", file], check=True)
    library = aotops.load(file)
    library.op(
        "axpy",
        inputs=("x", "y"),
        outputs=("out",),
        attrs={"alpha": "float"},
        defaults={"alpha": 1.0},
        order=("alpha", "x", "out", "y"),
        same_spec_as={"out": "x"},
        backward=lambda F, alpha, dout: (F.axpy(dout, dout, alpha - 1), dout),
    )
    library.op("raises", **ONE, attrs={"kind": "str"}, order=("x", "kind", "y"))
    library.op("silent", **ONE, order=("x", "y"), cpu="raises")
    library.op("number", **ONE, order=("x", "y"))
    library.op("twice", inputs=("x",), outputs=(), mutates=("x",), order=("x", None))
    return library


@pytest.fixture(scope="session")
def in_cpp(folder):
    """The library in C++, which is linked with libtvm_ffi.so and is not told where that is."""
    file = folder / "libincpp.so"
    command = ["g++", "-std=c++17", *SHARED, *WARNINGS, PROGRAMS / "tvm_ffi_hosted.cpp", *HEADERS, "-o", file]
    subprocess.run(command, check=True)
    library = aotops.load(file)
    library.op("mul", **MUL, backward=lambda F, x, y, dz: (F.mul(dz, y), F.mul(dz, x)))
    library.op(
        "attributes",
        inputs=("x",),
        outputs=("y",),
        attrs=KINDS,
        order=("x", *KINDS, "y"),
        infer=lambda x, axes: TensorSpec((len(axes),), x.dtype),
    )
    library.op("allocates", **ONE, order=("x", "y"))
    library.op("swapped", inputs=("x",), outputs=("y",), attrs={"n": "int"}, order=("x", "n", "y"), cpu="mul",
               same_spec_as={"y": "x"})  # fmt: skip
    return library


def adapter(framework, library):
    own = type(framework)()
    own.module, own.ops = framework.module.of(library), library.ops
    return own


def tensors(own, *arrays):
    return [own.make(a, "float32", "cpu") for a in arrays]


def numpy_of(library):
    from aotops.frontends import numpy as frontend

    return frontend.of(library)


# ------------------------------------------------------------------------------------------------ values and gradients


def test_a_function_in_c(framework, in_c):
    own = adapter(framework, in_c)
    x, y = tensors(own, X, Y)
    (out,) = own.results("axpy", {"x": x, "y": y}, {"alpha": 0.5})
    np.testing.assert_array_equal(own.numpy(out), X / 2 + Y)
    if own.name == "numpy":
        dx, dy = own.module.axpy_backward(Y, X, Y, 0.5)
    else:
        dx, dy = own.gradients("axpy", {"x": x, "y": y}, {"alpha": 0.5}, tensors(own, Y)).values()
    np.testing.assert_array_equal(own.numpy(dx), Y / 2)
    np.testing.assert_array_equal(own.numpy(dy), Y)


def test_a_function_in_cpp(framework, in_cpp):
    own = adapter(framework, in_cpp)
    for shape in ((2, 3), (6,), (3, 1, 2)):
        x, y = tensors(own, X.reshape(shape), Y.reshape(shape))
        (z,) = own.results("mul", {"x": x, "y": y}, {})
        np.testing.assert_array_equal(own.numpy(z), (X * Y).reshape(shape))


def test_attributes_of_every_type(framework, in_cpp):
    own = adapter(framework, in_cpp)
    (y,) = own.results("attributes", {"x": tensors(own, X)[0]}, VALUES)
    np.testing.assert_allclose(own.numpy(y), np.full(3, SUM), rtol=1e-6)


def test_a_function_that_writes_to_its_input(framework, in_c):
    """And takes None, which the order names."""
    own = adapter(framework, in_c)
    (x,) = tensors(own, X[0].copy())
    if framework.frontend == "mindspore":
        own._enter()
        x = own.ms.Parameter(x)
    result = own.module.twice(x)
    np.testing.assert_array_equal(own.numpy(x if result is None else result), 2 * X[0])


def test_empty_tensors_and_numbers(in_c, in_cpp):
    assert numpy_of(in_cpp).mul(np.ones((0, 3), "f4"), np.ones((0, 3), "f4")).shape == (0, 3)
    assert numpy_of(in_cpp).mul(np.float32(2), np.float32(3)) == 6
    many = np.full([1] * 32, 2, "f4")  # more dimensions than are kept on the stack
    assert numpy_of(in_cpp).mul(many, many).item() == 4


def test_numpys_arrays_of_every_layout(in_cpp):
    """A plain call is not prepared; the others are."""
    mul = numpy_of(in_cpp).mul
    unaligned = np.frombuffer(b" " + X.tobytes(), np.uint8)[1:].view(np.float32).reshape(X.shape)
    x = X.copy()
    x.flags.writeable = False
    for same in (x, np.asfortranarray(X), X[::-1][::-1], X.astype(">f4"), unaligned, np.array([X, X])[0]):
        for found in (mul(same, Y), mul(Y, same), mul(x=same, y=Y)):
            assert type(found) is np.ndarray
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found, X * Y)
    for out in (np.empty_like(X), np.empty_like(X.T).T, np.empty((4, 3), "f4")[::2], X.copy()[::-1], X.astype(">f4")):
        assert mul(X, Y, out=out) is out
        np.testing.assert_array_equal(out, X * Y)
    shared = np.arange(9, dtype="f4")
    mul(shared[:6], np.full(6, 2, "f4"), out=shared[3:])  # which overlap
    assert shared.tolist() == [0, 1, 2, 0, 2, 4, 6, 8, 10]
    own = np.arange(6, dtype="f4")
    mul(own, own, out=own)
    mul(own[:], own, out=own[:])
    assert own.tolist() == [0, 1, 16, 81, 256, 625]
    with pytest.raises(ValueError, match="mul: out is read-only, expected"):
        mul(X, Y, out=x)
    with pytest.raises(ValueError, match=r"mul: out has shape \(3,\), expected \(2, 3\)"):
        mul(X, Y, out=np.empty(3, "f4"))
    with pytest.raises(TypeError, match="mul: out has dtype float64, expected float32"):
        mul(X, Y, out=np.empty((2, 3)))
    with pytest.raises(TypeError, match="mul: out is a list"):
        mul(X, Y, out=[1.0])
    assert mul(np.float32(3), 2.0) == 6
    with pytest.raises(TypeError, match=r"mul: y is a list, expected a numpy.ndarray"):
        mul(X, [1.0])
    with pytest.raises(TypeError, match=r"mul: y is a MaskedArray, expected a numpy.ndarray"):
        mul(X, np.ma.masked_array(Y))
    with pytest.raises(TypeError, match="mul: expected tensors of one dtype"):
        mul(X, Y.astype(np.float64))


def test_threads_call_at_once(in_cpp):
    mul = numpy_of(in_cpp).mul

    def work(i):
        x = np.full(20000 + i % 2, 1.0 + i, "f4")
        return sum(not np.array_equal(mul(x, x), x * x) for _ in range(50))

    assert race(work) == 0


@pytest.mark.parametrize("path", call.CALL_PATHS)
def test_every_call_path(python, in_c, path):
    program = f"""
import numpy as np, aotops
from aotops.frontends import numpy
lib = aotops.load({str(in_c.path)!r})
lib.op("axpy", inputs=("x", "y"), outputs=("out",), attrs={{"alpha": "float"}}, order=("alpha", "x", "out", "y"),
       same_spec_as={{"out": "x"}})
print(numpy.of(lib).axpy(np.float32([1, 2]), np.float32([3, 4]), 0.5))
"""
    assert python(program, AOTOPS_CALL_PATH=path).split() == ["[3.5", "5.", "]"]


def test_a_function_in_c_needs_no_tvm_ffi(python, in_c):
    """But for its errors and lists."""
    program = f"""
import sys
sys.modules["tvm_ffi"] = None  # it is not installed
import numpy as np, aotops
from aotops.frontends import numpy
lib = aotops.load({str(in_c.path)!r})
same = dict(inputs=("x", "y"), outputs=("out",), same_spec_as={{"out": "x"}})
lib.op("axpy", **same, attrs={{"alpha": "float"}}, order=("alpha", "x", "out", "y"))
lib.op("listed", **same, attrs={{"alpha": "float[]"}}, order=("alpha", "x", "out", "y"), cpu="axpy")
F = numpy.of(lib)
x = np.float32([1, 2])
print(F.axpy(x, x, 2).tolist())
for call in (lambda: F.axpy(x, np.ones(3, "f4"), 2), lambda: F.listed(x, x, [2])):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, error)
"""
    assert python(program).splitlines() == [
        "[3.0, 6.0]",
        "RuntimeError axpy: the function failed, without an error, as no libtvm_ffi.so is loaded, which keeps it: "
        "install apache-tvm-ffi",
        "NotImplementedError listed: no libtvm_ffi.so of version 0.1 or later is loaded: install apache-tvm-ffi",
    ]


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("kind", "raised", "text"),
    [
        ("ValueError", ValueError, "raises: 100% wrong$"),
        (
            "TypeError",
            TypeError,
            r"raises: 100% wrong; called with #0 x: float32 \(2, 3\), #1 kind: a str, #2 y: float",
        ),
        ("NotImplementedError", NotImplementedError, "raises: 100% wrong$"),
        ("MemoryError", MemoryError, "raises: 100% wrong$"),
        ("RuntimeError", RuntimeError, "raises: 100% wrong$"),
        ("IndexError", RuntimeError, "raises: IndexError: 100% wrong$"),
    ],
)
def test_an_error_has_its_class_and_text(in_c, kind, raised, text):
    with pytest.raises(raised, match=text) as error:
        numpy_of(in_c).raises(X, kind)
    assert type(error.value) is raised


def test_errors_in_every_framework(framework, in_c):
    own = adapter(framework, in_c)
    x, y = tensors(own, X, Y[:1])
    with pytest.raises(Exception, match="axpy: expected tensors of one shape"):
        own.numpy(own.results("axpy", {"x": x, "y": y}, {"alpha": 1.0})[0])
    (y,) = tensors(own, Y)  # and the next call is a good one
    np.testing.assert_array_equal(own.numpy(own.results("axpy", {"x": x, "y": y}, {"alpha": 1.0})[0]), X + Y)


def test_a_failure_without_an_error(in_c):
    with pytest.raises(RuntimeError, match=r"silent: the function failed, without an error$"):
        numpy_of(in_c).silent(X)


def test_a_wrong_order_names_the_argument(in_c, in_cpp):
    text = (
        r"swapped: Mismatched type on argument #1 when calling: `mul\(0: DLTensor\*, 1: DLTensor\*, 2: DLTensor\*\) -> "
        r"void`. Expected `DLTensor\*` but got `int`; called with #0 x: float32 \(2, 3\), #1 n: an int, #2 y: float32 "
    )
    with pytest.raises(TypeError, match=text):
        numpy_of(in_cpp).swapped(X, 3)
    in_c.ops.pop("late", None)
    in_c.op("late", inputs=("x", "y"), outputs=("out",), attrs={"alpha": "float"}, order=("x", "alpha", "out", "y"),
            cpu="axpy", same_spec_as={"out": "x"})  # fmt: skip
    with pytest.raises(
        TypeError, match=r"late: alpha is argument #0, expected a float; called with #0 x: float32 .*, #1 alpha: a flo"
    ):
        numpy_of(in_c).late(X, Y, 1.0)


def test_a_returned_value_is_refused(in_c, in_cpp):
    with pytest.raises(
        NotImplementedError, match="number: the function returned a float, expected None: a hosted func"
    ):
        numpy_of(in_c).number(X)
    with pytest.raises(NotImplementedError, match="allocates: the function returned a tensor, expected None: a hosted"):
        numpy_of(in_cpp).allocates(X)


DEFINITIONS = [
    ({**MUL, "order": None}, TypeError, "op: __tvm_ffi_mul is a function of tvm-ffi, and order is missing, expected x, "
     "y, z in the order of its arguments"),
    ({**MUL, "order": ("x", "y")}, ValueError, "op: order is x, y, expected each of x, y, z once"),
    ({**MUL, "order": ("x", "y", "z", "z")}, ValueError, "op: order is x, y, z, z, expected each of x, y, z once"),
    ({**MUL, "order": ("x", "y", "w")}, ValueError, "op: order is x, y, w, expected each of x, y, z once"),
    ({**MUL, "order": "xyz"}, TypeError, "op: order is 'xyz', expected the names of the function's arguments"),
    ({**MUL, "cpu": "mull"}, LibraryError, "libincpp.so exports no __tvm_ffi_mull; did you mean __tvm_ffi_mul"),
    ({**MUL, "same_spec_as": {}}, TypeError, "op: .*libincpp.so has no __tvm_ffi_mulInferShape: tell the outputs' s"),
    ({**MUL, "workspace": True}, TypeError, "op: workspace is True, expected None: a function of tvm-ffi asks for no"),
]  # fmt: skip


@pytest.mark.parametrize(("definition", "kind", "text"), DEFINITIONS, ids=[text[4:40] for *_, text in DEFINITIONS])
def test_wrong_definitions(in_cpp, definition, kind, text):
    with pytest.raises(kind, match=text):
        in_cpp.op("op", **{"cpu": "mul", **definition})


def test_a_function_for_the_cpu_is_not_called_on_cuda(in_cpp):
    assert in_cpp.ops["mul"].foreign.symbols == {"cpu": "__tvm_ffi_mul"}
    with pytest.raises(NotImplementedError, match="mul: it has no function for cuda, only __tvm_ffi_mul on cpu"):
        in_cpp.entry_name(in_cpp.ops["mul"], "cuda")


def test_a_check_of_an_operator(in_cpp):
    report = check(in_cpp.ops["mul"], lambda x, y: x * y, cases=[((2, 3), (2, 3))], frameworks=["numpy"],
                   dtypes=["float32"], quick=True)  # fmt: skip
    assert report.ok, report.render()


def test_a_check_of_an_object_is_refused(inline):
    with pytest.raises(
        NotImplementedError, match="plus: it hosts a function object, which the processes that try it d"
    ):
        check(inline.ops["plus"], lambda x, by: x + by)


# ---------------------------------------------------------------------------------------------------- function objects


@pytest.fixture(scope="module")
def tvm_ffi():
    return pytest.importorskip("tvm_ffi")


@pytest.fixture(scope="module")
def inline(tvm_ffi, folder):
    if not shutil.which("ninja"):
        pytest.skip("ninja is not installed, which load_inline needs")
    source = """
    void plus(tvm::ffi::TensorView x, double by, tvm::ffi::TensorView y) {
      for (int64_t i = 0; i < x.numel(); ++i)
        static_cast<float *>(y.data_ptr())[i] = static_cast<float *>(x.data_ptr())[i] + static_cast<float>(by);
    }
    """
    module = tvm_ffi.cpp.load_inline("inline", cpp_sources=source, functions="plus", build_directory=str(folder / "b"))
    library = aotops.load(module, name="inline")
    library.op("plus", **ONE, attrs={"by": "float"}, order=("x", "by", "y"), device="cpu",
               backward=lambda F, dy: dy)  # fmt: skip
    return library


def test_a_module_of_load_inline(framework, inline):
    own = adapter(framework, inline)
    (y,) = own.results("plus", {"x": tensors(own, X)[0]}, {"by": 1.5})
    np.testing.assert_array_equal(own.numpy(y), X + 1.5)


def test_a_function_in_python(framework, tvm_ffi):
    """It gets tensors that it may export, strings and lists, and may return its output."""

    def rows(x, kind, axes, y):
        found = np.from_dlpack(y)  # which NumPy 1 makes read-only
        memory = (ctypes.c_char * found.nbytes).from_address(y.data_ptr())
        np.ndarray(found.shape, found.dtype, memory)[...] = np.from_dlpack(x) * (len(kind) + sum(axes))
        return y

    kept = weakref.ref(rows)
    library = aotops.load({"rows": tvm_ffi.convert(rows)}, name=f"python_for_{framework.name.replace('-', '_')}")
    library.op("rows", **ONE, attrs={"kind": "str", "axes": "int[]"}, order=("x", "kind", "axes", "y"), device="cpu")
    del rows
    gc.collect()
    assert kept()
    own = adapter(framework, library)
    (y,) = own.results("rows", {"x": tensors(own, X)[0]}, {"kind": "a string of more than 7", "axes": (3, -1)})
    np.testing.assert_array_equal(own.numpy(y), X * 25)


def test_errors_of_a_function_in_python(tvm_ffi):
    kept = []

    def wrong(x, what, y):
        if what == "raise":
            raise ValueError("not this one")
        if what == "new":
            return tvm_ffi.from_dlpack(np.ones(1))
        return kept.append(y)

    library = aotops.load({"wrong": tvm_ffi.convert(wrong)}, name="wrong_in_python")
    library.op("wrong", **ONE, attrs={"what": "str"}, order=("x", "what", "y"), device="cpu")
    function = numpy_of(library).wrong
    with pytest.raises(ValueError, match="wrong: not this one"):
        function(X, "raise")
    with pytest.raises(NotImplementedError, match="wrong: the function returned a tensor, expected None"):
        function(X, "new")
    with pytest.raises(
        NotImplementedError, match="wrong: the function keeps y, whose memory is valid in the call only"
    ):
        function(X, "keep")


def test_what_is_no_function_is_refused(tvm_ffi, in_cpp):
    with pytest.raises(
        TypeError, match=r"aotops.load: path is 3, expected a path, a tvm_ffi.Module, or a dict of tvm_f"
    ):
        aotops.load(3, name="three")
    module = tvm_ffi.load_module(str(in_cpp.path))
    with pytest.raises(TypeError, match=r"aotops.load: path is ffi.Function, expected a path"):
        aotops.load(module.mul, name="one")
    with pytest.raises(ValueError, match=r"aotops.load: name is None, expected an identifier"):
        aotops.load(module)
    with pytest.raises(TypeError, match="flags, include and arch are for a source, and an object is none"):
        aotops.load(module, name="objects", flags=["-O2"])
    functions = {"mul": module.mul, "array": tvm_ffi.convert([1, 2]), "sum": sum}
    library = aotops.load(functions, name="objects")
    assert aotops.load(functions, name="objects") is library
    with pytest.raises(ValueError, match=r"name is 'objects', the name of {'mul': .*: give another"):
        aotops.load(module, name="objects")
    with pytest.raises(TypeError, match="mul: device is None, expected cpu or cuda, where the function runs"):
        library.op("mul", **MUL)
    with pytest.raises(TypeError, match="mul: mul is a function of tvm-ffi, and order is missing"):
        library.op("mul", **{**MUL, "order": None}, device="cpu")
    with pytest.raises(LibraryError, match="dict objects exports no mull; did you mean mul"):
        library.op("mull", **MUL, device="cpu")
    with pytest.raises(TypeError, match=r"array is an object of tvm-ffi of type 71, expected a tvm_ffi.Function"):
        library.op("array", **MUL, device="cpu")
    with pytest.raises(
        TypeError, match=r"sum is <built-in function sum>, expected a tvm_ffi.Function: tvm_ffi.convert"
    ):
        library.op("sum", **MUL, device="cpu")
    library.op("mul", **MUL, device="cpu")
    np.testing.assert_array_equal(numpy_of(library).mul(X, Y), X * Y)


# ---------------------------------------------------------------------------------------------------------- transforms


@needs_torch
def test_torchs_transforms(in_c, in_cpp):
    import torch

    from aotops.frontends import torch as frontend

    mul, axpy = frontend.of(in_cpp).mul, frontend.of(in_c).axpy
    x, y = torch.tensor(X), torch.tensor(Y)
    double = [t.double().requires_grad_() for t in (x, y)]
    assert torch.autograd.gradcheck(mul, double)
    assert torch.autograd.gradgradcheck(mul, double)
    assert torch.equal(torch.vmap(mul, in_dims=(1, 1), out_dims=1)(x, y), x * y)
    assert torch.equal(torch.func.grad(lambda x: mul(x, mul(x, y)).sum())(x), 2 * x * y)
    x.requires_grad_()
    compiled = torch.compile(lambda x, y: axpy(mul(x, y), y, 0.5).sin(), backend="aot_eager", fullgraph=True)
    expected = (x * y / 2 + y).sin()
    torch.testing.assert_close(compiled(x, y), expected)
    (dx,) = torch.autograd.grad(compiled(x, y).sum(), x)
    torch.testing.assert_close(dx, torch.autograd.grad(expected.sum(), x)[0])
    torch.library.opcheck(torch.ops.incpp.mul.default, (x, y))
    assert torch.equal(mul(x.detach().t(), y.t()), (x * y).t())  # copies of what is not contiguous


@needs_jax
def test_jaxs_transforms(in_c, in_cpp):
    import jax

    from aotops.frontends import jax as frontend

    with jax.default_device(jax.devices("cpu")[0]):
        mul, axpy = frontend.of(in_cpp).mul, frontend.of(in_c).axpy
        gradient = jax.jit(jax.grad(lambda x, y: axpy(mul(x, x), y, 0.5).sum()))
        np.testing.assert_allclose(gradient(X, Y), X, rtol=1e-6)
        np.testing.assert_array_equal(jax.vmap(mul)(X, Y), X * Y)


# ----------------------------------------------------------------------------------------------------------------- GPU

CUDA = """
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
__global__ void plus_kernel(const float *x, float by, float *y, int64_t n) {
  const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i < n) y[i] = x[i] + by;
}
void plus(tvm::ffi::TensorView x, double by, tvm::ffi::TensorView y) {
  const int64_t n = x.numel();
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(x.device().device_type, x.device().device_id));
  plus_kernel<<<(n + 255) / 256, 256, 0, stream>>>(static_cast<float *>(x.data_ptr()), float(by),
                                                   static_cast<float *>(y.data_ptr()), n);
  if (cudaGetLastError() != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "the launch failed";
}
"""


@gpu
@needs_torch
def test_a_function_for_cuda(tvm_ffi, folder):
    """On torch's current stream, and in a CUDA graph. The library's own functions take torch's tensors there."""
    import torch

    from aotops import library as own
    from aotops.frontends import torch as frontend

    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    if not shutil.which("ninja"):
        pytest.skip("ninja is not installed, which load_inline needs")
    module = tvm_ffi.cpp.load_inline("on_cuda", cuda_sources=CUDA, functions="plus", build_directory=str(folder / "g"))
    library = aotops.load(module, name="inline_on_cuda")
    library.op("plus", **ONE, attrs={"by": "float"}, order=("x", "by", "y"), device="cuda", backward=lambda F, dy: dy)
    plus = frontend.of(library).plus
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    y = plus(x, 1.5)
    assert torch.equal(y, x + 1.5)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.ones_like(x))
    x = x.detach()
    before = tvm_ffi.get_raw_stream(tvm_ffi.device("cuda:0"))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        late = torch.zeros_like(x)
        late += x  # after the sleep: another stream would read zeros
        y = plus(late, 1.0)
    side.synchronize()
    assert torch.equal(y, x + 1)
    assert tvm_ffi.get_raw_stream(tvm_ffi.device("cuda:0")) == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = plus(plus(x, 1.0), 2.0)
    x.copy_(torch.arange(1 << 20, device="cuda"))
    graph.replay()
    assert torch.equal(y, x + 1 + 2)
    with pytest.raises(NotImplementedError, match="plus: it has no function for"):
        plus(x.cpu(), 1.0)

    exported = tvm_ffi.load_module(str(own.path()))
    rows = x.reshape(1 << 10, -1)
    expected = frontend.softmax(rows, -1)
    assert torch.equal(exported.softmax(rows, -1), expected)
    out = torch.empty_like(rows)
    with torch.cuda.stream(side):
        exported.softmax(rows, -1, out)
    side.synchronize()
    assert torch.equal(out, expected)
