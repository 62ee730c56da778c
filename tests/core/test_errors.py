"""Bad input is one clear exception: it names the operator, the argument, what was expected and what came."""

from __future__ import annotations

import shutil
import subprocess

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotops import frontends
from aotops.ops import OPS
from aotops.testing.cases import CASES, FLOATING, numpy_dtype
from aotops.testing.frameworks import frameworks

F32, F64 = "float32", "float64"
BAD = [pytest.param(name, bad, id=f"{name}-{bad}") for name, row in CASES.items() for bad in row.bad]


def _make(framework, device, value):
    if not isinstance(value, tuple):
        return value
    shape, dtype = value
    return framework.make(np.ones(shape), dtype, device)


@pytest.mark.parametrize(("name", "bad"), BAD)
def test_bad_input(framework, device, name, bad):
    inputs = {slot: _make(framework, device, value) for slot, value in bad.arrays.items()}
    if framework.name in bad.served_by:
        framework.forward(name, {s: inputs.get(s) for s in OPS[name].inputs}, bad.attrs)
        return
    with pytest.raises(bad.error) as raised:
        framework.forward(name, {s: inputs.get(s) for s in OPS[name].inputs}, bad.attrs)
    for word in (name, *bad.words):
        assert word in str(raised.value)


def test_a_good_call_after_a_bad_one(framework, device):
    """A refusal leaves nothing behind."""
    x = framework.make(np.ones((2, 3)), F32, device)
    for _ in range(3):
        with pytest.raises(ValueError, match="layer_norm"):
            framework.forward("layer_norm", {"x": x, "weight": None, "bias": None}, {"normalized_shape": 4})
        y = framework.forward("layer_norm", {"x": x, "weight": None, "bias": None}, {"normalized_shape": 3})
        assert (framework.numpy(y) == 0).all()


def test_unknown_and_missing_arguments(framework, device):
    """As any Python function: the signature is the same everywhere."""
    function = framework.module.layer_norm
    x = framework.make(np.ones((2, 3)), F32, device)
    with pytest.raises(TypeError, match="normalized_shape"):
        function(x)
    with pytest.raises(TypeError, match="epsilon"):
        function(x, 3, epsilon=1e-5)


def test_explicit_backward_refuses_a_gradient_unlike_the_result(framework, device):
    if framework.frontend not in ("numpy", "cupy"):
        pytest.skip(f"{framework.frontend} has no explicit backward functions")
    x = framework.make(np.ones((2, 3)), F32, device)
    for dy, error, words in (
        (framework.make(np.ones((2, 4)), F32, device), ValueError, ("dy has shape (2, 4)", "(2, 3)")),
        (framework.make(np.ones((2, 3)), F64, device), TypeError, ("dy has dtype float64", "expected float32")),
        (None, TypeError, ("dy is None", "expected")),
        ([1.0], TypeError, ("dy is a list", "expected")),
    ):
        for name, arguments in (("gelu", (x,)), ("layer_norm", (x, 3)), ("add", (x, x))):
            with pytest.raises(error) as raised:
                getattr(framework.module, f"{name}_backward")(dy, *arguments)
            for word in (f"{name}_backward", *words):
                assert word in str(raised.value)


@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm"])
def test_explicit_backward_wants_a_gradient_of_each_result(framework, device, name):
    if framework.frontend not in ("numpy", "cupy"):
        pytest.skip(f"{framework.frontend} has no explicit backward functions")
    x = framework.make(np.ones((2, 3)), F32, device)
    for dys, error, words in (
        (x, TypeError, ("dy is a ", "expected a tuple of 2")),
        (None, TypeError, ("dy is None", "expected a tuple of 2")),
        ((x,), ValueError, ("dy has 1", "expected 2")),
        ((x, x, x), ValueError, ("dy has 3", "expected 2")),
        ((None, x), TypeError, ("dy is None", "expected")),
        ((x[:1], x), ValueError, ("dy has shape (1, 3)", "expected (2, 3)")),
        ((x, x[:1]), ValueError, ("dh has shape (1, 3)", "expected (2, 3)")),
    ):
        with pytest.raises(error) as raised:
            getattr(framework.module, f"{name}_backward")(dys, x, x, 3)
        for word in (f"{name}_backward", *words):
            assert word in str(raised.value)


FOREIGN = [
    pytest.param(lambda: np.ones(3, complex), "complex128", id="complex"),
    pytest.param(lambda: np.array(["a"]), "str", id="text"),
    pytest.param(lambda: np.array([object()]), "object", id="objects"),
    pytest.param(lambda: np.zeros(3, "datetime64[s]"), "datetime64", id="dates"),
    pytest.param(lambda: np.zeros(3, [("a", "f4")]), "void", id="records"),
    pytest.param(lambda: np.ones(3, np.longdouble), "float128|longdouble", id="longdouble"),
]


@pytest.mark.parametrize(("make", "kind"), FOREIGN)
def test_numpy_dtypes_that_no_kernel_takes(make, kind):
    if not any(f.name == "numpy" for f in frameworks()):
        pytest.skip("numpy is not under test")
    from aotops.frontends import numpy as frontend

    with pytest.raises(TypeError, match=rf"gelu: x has dtype .*({kind}).*, {FLOATING}"):
        frontend.gelu(make())


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    x=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    axes=st.lists(st.integers(-1, 4), max_size=3).map(tuple),
    weight=st.none() | st.lists(st.integers(0, 4), max_size=2).map(tuple),
    dtypes=st.tuples(st.sampled_from(["float16", F32, F64]), st.sampled_from(["float16", F32, F64])),
)
def test_layer_norm_takes_what_fits_and_refuses_the_rest(x, axes, weight, dtypes):
    """Never a crash, never a result of what does not fit."""
    fits = (
        len(axes) > 0
        and x[-len(axes) :] == axes
        and weight in (None, axes)
        and (weight is None or dtypes[0] == dtypes[1])
    )
    for framework in frameworks():
        if framework.compiles or "cpu" not in framework.devices or framework.frontend == "jax":
            continue
        inputs = {"x": framework.make(np.ones(x), dtypes[0], "cpu"), "weight": None, "bias": None}
        if weight is not None:
            inputs["weight"] = framework.make(np.ones(weight), dtypes[1], "cpu")
        if fits:
            assert tuple(framework.forward("layer_norm", inputs, {"normalized_shape": axes}).shape) == x
            continue
        with pytest.raises((TypeError, ValueError)) as raised:
            framework.forward("layer_norm", inputs, {"normalized_shape": axes})
        assert str(raised.value).startswith("layer_norm: ")


# -------------------------------------------------------------------------------------------------------------- devices


@pytest.mark.gpu
def test_tensors_on_two_devices():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    from aotops.frontends import torch as frontend

    here, there = torch.ones(2, 3), torch.ones(2, 3, device="cuda")
    with pytest.raises(ValueError, match="add: b is on cuda:0, expected cpu, the device of a"):
        frontend.add(here, there)
    with pytest.raises(ValueError, match="add: b is on cpu, expected cuda:0, the device of a"):
        frontend.add(there, here)
    with pytest.raises(ValueError, match="layer_norm: weight is on cpu, expected cuda:0, the device of x"):
        frontend.layer_norm(there, 3, torch.ones(3))


def test_a_meta_tensor_among_others():
    if not any(f.name == "torch" for f in frameworks()):
        pytest.skip("torch is not under test")
    import torch

    from aotops.frontends import torch as frontend

    with pytest.raises(ValueError, match="layer_norm: weight is on meta, expected cpu, the device of x"):
        frontend.layer_norm(torch.ones(2, 3), 3, torch.ones(3, device="meta"))


# -------------------------------------------------------------------------------------------------------------- library

USE = "from aotops import library\nlibrary.load()"


def test_a_missing_library(python):
    said = python(USE, expect=1, AOTOPS_LIBRARY="/nowhere/libaotops.so")
    assert "LibraryError: /nowhere/libaotops.so does not exist: build it with `make lib`" in said


def test_a_missing_library_at_the_first_call_of_a_frontend(python):
    """Importing the package is harmless."""
    for name in {f.frontend for f in frameworks() if "cpu" in f.devices}:
        program = f"import aotops.frontends, aotops.ops\nprint('here')\nfrom aotops.frontends import {name} as f\n"
        call = {
            "numpy": "import numpy; f.gelu(numpy.ones(3))",
            "torch": "import torch; f.gelu(torch.ones(3))",
            "jax": "import jax.numpy as jnp; f.gelu(jnp.ones(3))",
            "mindspore": "import mindspore, numpy; print(f.gelu(mindspore.Tensor(numpy.ones(3, 'f4'))))",
        }[name]
        said = python(program + call, expect=1, AOTOPS_LIBRARY="/nowhere/libaotops.so")
        assert "LibraryError: /nowhere/libaotops.so does not exist" in said


def test_a_file_that_is_no_library(python, tmp_path):
    file = tmp_path / "libaotops.so"
    file.write_text("no library")
    said = python(USE, expect=1, AOTOPS_LIBRARY=str(file))
    assert f"LibraryError: {file} does not load:" in said
    assert "make clean lib" in said


def _built(tmp_path, source):
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    file = tmp_path / "libother.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", file], input=source, text=True, check=True)
    return file


def test_somebody_elses_library(python, tmp_path):
    file = _built(tmp_path, 'extern "C" int Add() { return 0; }')
    said = python(USE, expect=1, AOTOPS_LIBRARY=str(file))
    assert f"LibraryError: {file} is not a library of aotops: it exports no aot_version" in said


def test_a_library_of_another_version(python, tmp_path):
    from aotops import __version__

    source = (
        'extern "C" const char *aot_version() { return "9.9"; } extern "C" const char *aot_last_error() { return ""; }'
    )
    file = _built(tmp_path, source)
    said = python(USE, expect=1, AOTOPS_LIBRARY=str(file))
    assert f"LibraryError: {file} is version 9.9, the package is {__version__}: rebuild it with `make lib`" in said


def test_a_library_error_is_an_import_error():
    from aotops.library import LibraryError

    assert issubclass(LibraryError, ImportError)


def test_an_unknown_frontend():
    with pytest.raises(
        AttributeError, match="aotops has no frontend 'tensorflow'; there are cupy, jax, mindspore, numpy, torch"
    ):
        _ = frontends.tensorflow


def test_an_unknown_name_in_the_test_variable(monkeypatch):
    from aotops.testing import frameworks as module

    monkeypatch.setenv(module.VARIABLE, "numpy,tensorflow")
    with pytest.raises(ValueError, match="'numpy,tensorflow', expected some of cupy, jax, mindspore, numpy, torch"):
        module.requested()


def test_numpy_arrays_are_not_torch_tensors():
    """Each frontend takes its own framework's arrays and nothing else."""
    for framework in frameworks():
        if framework.frontend in ("numpy", "jax") or framework.compiles or "cpu" not in framework.devices:
            continue
        with pytest.raises(TypeError, match=r"gelu: x is .*expected a (torch|mindspore)\.Tensor"):
            framework.forward("gelu", {"x": np.ones(3, numpy_dtype(F32))}, {})
