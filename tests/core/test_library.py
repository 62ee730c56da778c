"""A frontend is a function of a library: the operator of docs/adding_an_op.md, compiled into a shared library of its
own, in every framework beside the built-in ones."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from adding_an_op import FILES, ROOT

from aotops import __version__, call, library, operator
from aotops.infer import infer
from aotops.library import Library, LibraryError
from aotops.ops import BUILTIN, OPS
from aotops.spec import TensorSpec
from aotops.testing.frameworks import frameworks, requested

SOURCES = ROOT / "cuda_src"
NAME = "elsewhere"


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory):
    """The operator compiled by g++, with the sources of the calling convention, into a library of its own."""
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp(NAME)
    for path, text in FILES.items():
        if not path.startswith("tests/"):
            (folder / Path(path).name).write_text(text.replace("from ..op ", "from aotops.op "))
    flags = ["-std=c++17", "-O1", "-fPIC", f"-I{SOURCES}", f'-DAOT_VERSION="{__version__}"']
    objects = []
    runtime = ("error.cpp", "extra.cpp", "cpu/fork.cpp", "cpu/threads.cpp")
    for source in (folder / "scale.cpp", *(SOURCES / name for name in runtime)):
        objects.append(str(folder / f"{source.stem}.o"))
        abi = ["-D_GLIBCXX_USE_CXX11_ABI=0"] if source.stem == "extra" else []
        subprocess.run(["g++", *flags, *abi, "-c", source, "-o", objects[-1]], check=True)
    file = folder / f"lib{NAME}.so"
    subprocess.run(["g++", "-shared", *objects, "-o", file, "-ldl"], check=True)
    spec = spec_from_file_location(f"{NAME}_definition", folder / "scale.py")
    definition = sys.modules[spec.name] = module_from_spec(spec)  # MindSpore looks for it, and for its source
    spec.loader.exec_module(definition)
    return Library(NAME, [definition.scale], file)


@pytest.fixture(scope="module")
def module(elsewhere):
    """A module of a framework's functions, which pickle finds."""
    made = {}

    def make(framework):
        name = f"{NAME}_{framework.frontend}"
        if name not in made:
            made[name] = sys.modules[name] = ModuleType(name)
            vars(made[name]).update(framework.module.functions(elsewhere, name))
        return made[name]

    yield make
    for name in made:
        del sys.modules[name]


def adapter(framework, module, elsewhere):
    own = type(framework)()
    own.module, own.ops = module(framework), elsewhere.ops
    return own


def test_values_and_gradients(framework, module, elsewhere):
    own = adapter(framework, module, elsewhere)
    x, dy = np.arange(-3.0, 3.0).reshape(2, 3), np.ones((2, 3))
    for dtype in ("float16", "float32", "float64"):
        inputs = {"x": own.make(x, dtype, "cpu")}
        (y,) = own.results("scale", inputs, {"factor": 2.5})
        assert own.dtype(y) == dtype
        np.testing.assert_array_equal(own.numpy(y), x * 2.5)
        gradients = own.gradients("scale", inputs, {"factor": 2.5}, (own.make(dy, dtype, "cpu"),))
        np.testing.assert_array_equal(own.numpy(gradients["x"]), dy * 2.5)


def test_errors_have_the_message_of_the_library(framework, module, elsewhere):
    """The entry's own text, which is in the other library."""
    own = adapter(framework, module, elsewhere)
    integers = own.make(np.arange(3), "int64", "cpu")
    expected = r"scale: x has dtype int64, expected float16, bfloat16, float32 or float64"
    with pytest.raises(TypeError, match=expected):
        own.results("scale", {"x": integers}, {"factor": 2.0})
    with pytest.raises(TypeError, match="scale: factor is 'a', expected a number"):
        own.results("scale", {"x": own.make(np.ones(3), "float32", "cpu")}, {"factor": "a"})


def test_the_built_in_operators_stay(framework, module, elsewhere):
    functions = module(framework)
    assert not hasattr(framework.module, "scale")
    assert not hasattr(functions, "gelu")
    (y,) = framework.results("gelu", {"x": framework.make(np.zeros(3), "float32", "cpu")}, {})
    np.testing.assert_array_equal(framework.numpy(y), np.zeros(3))


def test_functions_are_found_by_pickle(framework, module):
    function = module(framework).scale
    assert function.__module__ == f"{NAME}_{framework.frontend}"
    assert pickle.loads(pickle.dumps(function)) is function


def test_definitions_belong_to_one_library(elsewhere):
    assert elsewhere.ops["scale"].library is elsewhere.ops["scale"].backward.library is elsewhere
    assert OPS["gelu"].library is OPS["gelu"].backward.library is BUILTIN
    assert BUILTIN.path == library.path()


def test_the_same_name_in_two_libraries(elsewhere):
    """An operator is known by its definition, not by its name."""
    spec = TensorSpec((3,), "float32")
    other = Library("other", [elsewhere.ops["scale"]])  # of libaotops.so, which has no such entry
    assert infer(elsewhere.ops["scale"], (1.0,), (spec,)) == {"y": spec}
    with pytest.raises(NotImplementedError, match=r"scale: .*libaotops.so has no cpu entry \(aot_scale_cpu\)"):
        infer(other.ops["scale"], (1.0,), (spec,))


def test_advice_for_a_device_without_an_entry(elsewhere, monkeypatch):
    """`make lib` is for aotops itself."""
    scale, gelu = elsewhere.ops["scale"], OPS["gelu"]
    with pytest.raises(
        NotImplementedError, match=r"scale: .*\(aot_scale_cuda\); the library has no CUDA code: if this"
    ):
        elsewhere.entry_name(scale, "cuda")
    monkeypatch.setitem(vars(elsewhere), "contents", elsewhere.contents._replace(sections=frozenset([".nv_fatbin"])))
    with pytest.raises(NotImplementedError, match=r"CUDA code, but none of this operator: give it a kernel in a \.cu"):
        elsewhere.entry_name(scale, "cuda")
    monkeypatch.setattr(Library, "entry_address", lambda *_: None)
    with pytest.raises(NotImplementedError, match=r"gelu: .*libaotops.so has no cuda entry .*nvcc is, with `make lib`"):
        BUILTIN.entry_name(gelu, "cuda")


def test_errors_of_every_call_path(elsewhere):
    spec = TensorSpec((3,), "int32")
    run = call.addresses(elsewhere.ops["scale"], (1.0,), "cpu", (spec, spec))
    with pytest.raises(TypeError, match="scale: x has dtype int32, expected"):
        run(0, 0, *[np.ones(3, np.int32).ctypes.data] * 2)


UNLIKE = {
    "another output": (
        {"residuals": ("r",)},
        r"its definition takes x and gives y, r, but .* takes x and gives y: they",
    ),
    "another input": (
        {"inputs": ("x", "z")},
        r"its definition takes x, z and gives y, but .* takes x and gives y: they",
    ),
    "another attribute": (
        {"attrs": {"times": "float"}},
        r"has the attribute times, but .* reads factor: they must agree",
    ),
    "another name": ({"inputs": ("a",), "outputs": ("b",)}, None),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_a_definition_that_is_unlike_its_entry(elsewhere, what):
    """Its call would read tensors that are not there, or compute with the default of an attribute."""
    changes, message = UNLIKE[what]
    spec = TensorSpec((3,), "float32")
    op = replace(elsewhere.ops["scale"], same_spec_as={}, backward=None, **changes)
    op = Library(f"unlike {what}", [op], elsewhere.path).ops["scale"]
    specs = (spec,) * len(op.inputs)
    if message is None:
        assert [*infer(op, (1.0,), specs).values()] == [spec]
        return
    with pytest.raises(LibraryError, match=message):
        infer(op, (1.0,), specs)
    with pytest.raises(LibraryError, match=message):
        call.handle_of(op, (1.0,))


def test_names_of_a_definition():
    def scale(x, factor=1.0):
        return (x,), (factor,)

    good = {"inputs": ("x",), "outputs": ("y",), "attrs": {"factor": "float"}, "same_spec_as": {"y": "x"}}
    backward = {"inputs": ("dy",), "outputs": ("dx",)}
    for error, message, changes in (
        (TypeError, r"scale: inputs is 'x', expected a tuple of names, as \('x',\)", {"inputs": ("x")}),
        (TypeError, r"scale: vmappable is 'xy', expected a tuple", {"vmappable": "xy"}),
        (
            ValueError,
            "scale: tensors and attributes are x, x, y, factor, expected no name twice",
            {"inputs": ("x", "x")},
        ),
        (
            ValueError,
            "scale_backward: the type of factor is 'double', expected one of",
            {"attrs": {"factor": "double"}},
        ),
        (ValueError, "scale: same_spec_as names 'z', expected one of x, y", {"same_spec_as": {"y": "z"}}),
        (ValueError, "scale: the backward names 'dz', expected", {"backward": backward | {"inputs": ("dz",)}}),
        (
            ValueError,
            "scale: the backward names 'dz', expected one of dx",
            {"backward": backward | {"outputs": ("dz",)}},
        ),
    ):
        with pytest.raises(error, match=message):
            operator(**good | {"backward": backward} | changes)(scale)
    assert operator(**good, backward=backward)(scale).canonical((2,)) == (2.0,)
    with pytest.raises(TypeError, match="scale: its definition returns 0 attributes, expected factor"):
        operator(**good, backward=backward)(scale).canonical(())


def test_a_library_that_does_not_load(tmp_path):
    missing = Library("missing", OPS.values(), tmp_path / "no.so")
    with pytest.raises(LibraryError, match=r"no\.so does not exist"):
        missing.entry_name(missing.ops["gelu"], "cpu")
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(LibraryError, match=r"text\.so does not load: .*; build it again$"):
        infer(
            Library("text", OPS.values(), tmp_path / "text.so").ops["gelu"], ("none",), (TensorSpec((1,), "float32"),)
        )


@pytest.mark.skipif("torch" not in requested() or not find_spec("torch"), reason="torch is not under test")
def test_torch_compiles_and_checks_it(module, elsewhere):
    torch = pytest.importorskip("torch")
    (framework,) = (f for f in frameworks() if f.name == "torch")
    functions = module(framework)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(torch.ops.elsewhere.scale.default, (x, 2.0))
    assert torch.autograd.gradcheck(lambda t: functions.scale(t, 2.0), x)
    compiled = torch.compile(lambda t: functions.scale(t, 2.0) + 1, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), x * 2 + 1)
    assert framework.module.functions(elsewhere).keys() == {"scale"}  # a second time, without registering again


@pytest.mark.skipif("jax" not in requested() or not find_spec("jax"), reason="JAX is not under test")
def test_jax_transforms_and_registers_it(module, elsewhere, python):
    jax = pytest.importorskip("jax")
    (framework,) = (f for f in frameworks() if f.name == "jax")
    scale = module(framework).scale
    x = jax.numpy.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda row: scale(row, 3.0)))(x), x * 3)
    np.testing.assert_array_equal(jax.grad(lambda t: scale(t, 3.0).sum())(x), np.full((2, 3), 3.0))
    program = f"""
import jax, numpy as np
from aotops import library
from aotops.frontends import jax as ours
from aotops.library import Library
x = np.ones((2, 3), "float32")
# as in a program that was exported
call = ours.private.ffi.ffi_call(ours.TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype))
run = jax.jit(lambda x: call(x, entry="{NAME}/aot_scale", attrs="factor=3.0\\ninputs=1\\noutputs=1"))
ours.register()
try:
    run(x)
except Exception as error:
    print("the library {NAME} is not registered" in str(error))
ours.register(Library({NAME!r}, [], {str(elsewhere.path)!r}))
print(np.asarray(run(x))[0].tolist())
try:
    ours.register(Library({NAME!r}, [], library.path()))
except ValueError as error:
    print(error)
"""
    said = python(program).splitlines()
    assert said == ["True", "[3.0, 3.0, 3.0]", f"the library {NAME} is registered already"]
