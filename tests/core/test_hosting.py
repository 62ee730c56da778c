"""Hosting: the functions of hosted.cpp, which know nothing of aotops, as operators of every framework."""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import aotops
from aotops import TensorSpec, call, hosting
from aotops.extra import encode_foreign
from aotops.hosting import Foreign
from aotops.library import LibraryError
from aotops.op import Op
from aotops.spec import DTYPES
from aotops.testing.cases import numpy_dtype
from aotops.testing.frameworks import race, requested

SOURCE = Path(__file__).parents[1] / "programs" / "hosted.cpp"
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter")
FLAGS += tuple(os.environ.get("AOTOPS_TEST_CXXFLAGS", "").split())  # the sanitizers of `make asan`
ABI = {"old": "0", "new": "1"}
ATTRS = {
    "flag": "bool", "count": "int", "scale": "float", "a_name_of_more_than_fifteen_characters": "str", "axes": "int[]",
    "weights": "float[]", "pairs": "int[][]", "table": "float[][]",
}  # fmt: skip
VALUES: dict[str, Any] = {
    "flag": True, "count": -(1 << 20), "scale": 0.25, "a_name_of_more_than_fifteen_characters": "a;b%c=d,e|f: g" * 3,
    "axes": (1, -2, 3), "weights": (0.5, 1e-3), "pairs": ((1, 2), (), (3,)), "table": ((1.5,), (2.5, -1.0)),
}  # fmt: skip
SUM = 1 - (1 << 20) + 0.25 + 42 + 2 + 0.501 + (1 + 4 + 3) + (1.5 + 2 * 1.5)
BOTH = [name for name in ("torch", "jax") if name in requested()]


def compiled(file: Path, *flags: str, source: Path = SOURCE) -> Path:
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    subprocess.run(["g++", *FLAGS, *flags, str(source), "-o", str(file)], check=True)
    return file


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hosted")


@pytest.fixture(scope="session")
def libraries(folder):
    """The functions, compiled with either ABI of std::string."""
    made = {}
    for abi, number in ABI.items():
        file = compiled(folder / f"libhosted_{abi}.so", f"-D_GLIBCXX_USE_CXX11_ABI={number}")
        made[abi] = library = aotops.load(file)
        define(library)
    return made


def define(library):
    library.op(
        "CustomMul",
        inputs=("x", "y"),
        outputs=("z",),
        same_spec_as={"z": "x"},
        backward=lambda F, x, y, dz: (F.CustomMul(dz, y), F.CustomMul(dz, x)),
        vmappable=("x", "y", "z"),
    )
    library.op(
        "CustomAdd",
        inputs=("x", "y"),
        outputs=("z",),
        infer=lambda x, y: TensorSpec(x.shape, x.dtype),
        backward=lambda F, dz: (dz, dz),
    )
    library.op(
        "Transpose",
        inputs=("x",),
        outputs=("y",),
        out_shape=lambda x: (x[1], x[0]),
        out_dtype="float32",
        backward=lambda F, dy: F.Transpose(dy),
    )
    library.op(
        "Copy",
        inputs=("x",),
        outputs=("y", "name"),
        attrs={"length": "int"},
        defaults={"length": 16},
        infer=lambda x, length: (x, TensorSpec((length,), "int64")),
    )
    library.op("Numbers", inputs=("x", "factor", "offset", "flag"), outputs=("y",), same_spec_as={"y": "x"})
    library.op("Attributes", inputs=("x",), outputs=("y",), attrs=ATTRS, same_spec_as={"y": "x"})
    grad = library.op(
        "PowerGrad", inputs=("dy", "x"), outputs=("dx",), attrs={"exponent": "int"}, same_spec_as={"dx": "x"}
    )
    library.op(
        "Power", inputs=("x",), outputs=("y",), attrs={"exponent": "int"}, defaults={"exponent": 2}, backward=grad
    )
    library.op("Largest", inputs=("x",), outputs=("value", "place"))
    library.op("Accumulate", inputs=("total", "x"), outputs=(), mutates=("total",))
    library.op(
        "AccumulateSum",
        inputs=("total", "x"),
        outputs=("sum",),
        mutates=("total",),
        out_shape=(),
        out_dtype=lambda total, x: total,
    )
    for name in ("Fails", "Throws", "ThrowsNumber", "BadInit", "Asks"):
        library.op(name, inputs=("x",), outputs=("y",), same_spec_as={"y": "x"})
    library.op("Mistakes", inputs=("x",), outputs=("y",), attrs={"count": "int"}, same_spec_as={"y": "x"})
    library.op("BadShape", inputs=("x",), outputs=("y",))
    library.op("Overwrites", inputs=("x",), outputs=("y",))
    library.op("OverwritesBare", inputs=("x",), outputs=("y",), same_spec_as={"y": "x"})
    library.op("Unknown", inputs=("x",), outputs=("y",))


@pytest.fixture(scope="session")
def hosted(libraries):
    return libraries["old"]


def adapter(framework, library):
    own = type(framework)()
    own.module, own.ops = framework.module.of(library), library.ops
    return own


def gradients(own, name, inputs, attrs, dys):
    """By input. NumPy's function gives that of every input where a rule makes them."""
    if own.name != "numpy" or own.ops[name].backward:
        return own.gradients(name, inputs, attrs, dys)
    found = getattr(own.module, f"{name}_backward")(dys[0], **inputs, **attrs)
    return dict(zip(inputs, found if isinstance(found, tuple) else (found,), strict=True))


X = np.array([[1.0, -2.0, 3.0], [0.5, 4.0, -1.0]])
Y = np.array([[2.0, 3.0, -1.0], [8.0, 0.25, 2.0]])


def tensors(own, *arrays):
    return [own.make(np.asarray(a), "float32", "cpu") for a in arrays]


# ------------------------------------------------------------------------------------------------ values and gradients


@pytest.mark.parametrize(
    ("name", "arrays", "attrs", "value", "expected"),
    [
        ("CustomMul", {"x": X, "y": Y}, {}, X * Y, {"x": X * Y, "y": X * X}),
        ("CustomAdd", {"x": X, "y": Y}, {}, X + Y, {"x": X, "y": X}),
        ("Transpose", {"x": X}, {}, X.T, {"x": X}),
        ("Power", {"x": X}, {"exponent": 3}, X**3, {"x": X * 3 * X**2}),
        ("Power", {"x": np.ones((5, 1, 7)) * 1.5}, {}, np.full((5, 1, 7), 2.25), {"x": np.full((5, 1, 7), 3.0)}),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_values_and_gradients(framework, hosted, name, arrays, attrs, value, expected):
    own = adapter(framework, hosted)
    if framework.compiles and name in ("CustomMul", "CustomAdd"):
        return  # the document's, and that of test_operators_are_added_...
    inputs = dict(zip(arrays, tensors(own, *arrays.values()), strict=True))
    (result,) = own.results(name, inputs, attrs)
    assert own.dtype(result) == "float32"
    np.testing.assert_allclose(own.numpy(result), value, rtol=1e-6)
    (dy,) = tensors(own, X.T if name == "Transpose" else X if value.shape == X.shape else np.ones_like(value))
    found = gradients(own, name, inputs, attrs, (dy,))
    for slot, gradient in expected.items():
        np.testing.assert_allclose(own.numpy(found[slot]), gradient, rtol=1e-6)


@pytest.mark.parametrize("abi", ABI)
def test_attributes_of_every_type(framework, libraries, abi):
    """In MindSpore's own ops.Custom, a library of the new one would end the process."""
    if framework.compiles and abi == "old":
        return  # each would be compiled
    own = adapter(framework, libraries[abi])
    (x,) = tensors(own, X)
    (y,) = own.results("Attributes", {"x": x}, VALUES)
    np.testing.assert_allclose(own.numpy(y), X * SUM, rtol=1e-6)
    with pytest.raises(Exception, match="there is no attribute nowhere; there are none"):
        own.numpy(own.results("Asks", {"x": x}, {})[0])
    with pytest.raises(Exception, match="attribute count is int, the entry reads it as float"):
        own.numpy(own.results("Mistakes", {"x": x}, {"count": 3})[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(framework, hosted, dtype):
    own = adapter(framework, hosted)
    if framework.compiles and dtype not in ("bool", "bfloat16"):
        return  # each would be compiled
    if not own.has_dtype(dtype):
        pytest.skip(f"{framework.name} cannot make a tensor of {dtype} of an array")
    array = np.arange(6).reshape(2, 3).astype(numpy_dtype(dtype if dtype != "bfloat16" else "float32"))
    if framework.frontend == "torch":
        x = own.torch.tensor(np.arange(6).reshape(2, 3)).to(getattr(own.torch, dtype))
    else:
        x = own.make(array, dtype, "cpu")
    y, name = own.results("Copy", {"x": x}, {})
    text = bytes(own.numpy(name).astype(np.uint8)).decode().rstrip("\0")
    assert text == dtype
    assert own.dtype(y) == dtype
    values = own.numpy(y.real if "complex" in dtype and framework.frontend != "mindspore" else _real(framework, y))
    np.testing.assert_array_equal(values, array.real.astype(np.float64) if dtype != "bool" else array)


def _real(framework, y):
    return framework.ms.ops.real(y) if framework.frontend == "mindspore" and "Complex" in str(y.dtype) else y


def test_pythons_numbers_are_tensors_without_axes(framework, hosted):
    own = adapter(framework, hosted)
    (x,) = tensors(own, X)
    function = own.module.Numbers
    if framework.frontend == "mindspore":
        own._enter()
    np.testing.assert_allclose(own.numpy(function(x, 0.5, 3, True)), X * 0.5 + 3)
    np.testing.assert_allclose(own.numpy(function(x, 0.5, 3, False)), X)
    with pytest.raises(Exception, match="returned 2, expected 0"):
        own.numpy(function(x, 1, 3, True))  # an int64 in the place of a float32


def test_several_outputs_of_different_dtypes(framework, hosted):
    own = adapter(framework, hosted)
    for array in (X, X[0], np.zeros((0, 3)), np.ones((2, 2, 5))):
        if array.size == 0 and framework.compiles:
            continue  # MindSpore's graph mode does not run a kernel without results
        (x,) = tensors(own, array)
        value, place = own.results("Largest", {"x": x}, {})
        assert own.dtype(value) == "float32"
        assert own.dtype(place) == "int64"
        np.testing.assert_array_equal(own.numpy(value), array.max(-1))
        np.testing.assert_array_equal(own.numpy(place), array.argmax(-1))


def test_an_entry_that_writes_to_its_input(framework, hosted):
    own = adapter(framework, hosted)
    total, x = tensors(own, X.copy(), Y)
    if framework.frontend == "jax":  # functional: the new value is a result
        new = own.module.Accumulate(total, x)
        np.testing.assert_allclose(own.numpy(new), X + Y)
        value, new = own.module.AccumulateSum(total, x)
        np.testing.assert_allclose(own.numpy(value), (X + Y).sum())
        np.testing.assert_allclose(own.numpy(new), X + Y)
        np.testing.assert_allclose(own.numpy(total), X)
        np.testing.assert_allclose(own.numpy(own.jax.jit(own.module.Accumulate)(total, x)), X + Y)
        return
    if framework.frontend == "mindspore":
        own._enter()
        total = own.ms.Parameter(total)
    value = own.module.AccumulateSum(total, x)
    np.testing.assert_allclose(own.numpy(value), (X + Y).sum())
    np.testing.assert_allclose(own.numpy(total), X + Y)
    assert own.module.Accumulate(total, x) is None
    np.testing.assert_allclose(own.numpy(total), X + Y + Y)


# --------------------------------------------------------------------------------------------------------- kernel data


def test_a_kernel_is_made_once_for_each_shape_and_freed(hosted, tmp_path):
    """The library is called by no other test."""
    from aotops.frontends import numpy as frontend

    library = aotops.load(Path(shutil.copy(hosted.path, tmp_path / "libcounted.so")))
    library.op("Power", inputs=("x",), outputs=("y",), attrs={"exponent": "int"})
    power, functions = frontend.of(library).Power, library.functions
    power(np.ones(97, "f4"), 31)  # binds
    before = functions.Inits()
    for n in (98, 99, 98, 99, 97):
        np.testing.assert_array_equal(power(np.full(n, 2, "f4"), 31), np.full(n, 2.0**31, "f4"))
    made = functions.Inits() - before
    assert 2 <= made <= 4  # by inference too, which keeps its own kernels
    for n in range(200, 400):
        power(np.ones(n, "f4"), 31)
    assert 0 < functions.Alive() <= 2 * 64
    call.tensors.cache_clear()
    call.handle_of.cache_clear()
    from aotops import infer

    infer._bound.cache_clear()
    gc.collect()
    assert functions.Alive() == 0


def test_threads_have_kernels_of_their_own(hosted):
    from aotops.frontends import numpy as frontend

    power = frontend.of(hosted).Power

    def work(i):
        x = np.full(20000 + i % 2, 1.0 + i % 2, "f4")
        return sum(not np.array_equal(power(x, 3), x**3) for _ in range(50))

    assert race(work) == 0


def test_threads_make_an_operator_once(hosted):
    """A framework registers an operator once: a second time is an error."""
    made = []

    def make(op, module):
        made.append(op.name)
        time.sleep(0.01)  # the other threads ask meanwhile
        return {op.name: op}

    namespace = hosting.Namespace(hosted, "counted", make)
    try:
        assert race(lambda i: namespace.Power is not hosted.ops["Power"]) == 0
        assert made == ["Power"]
    finally:
        del sys.modules[namespace.__name__]


# ----------------------------------------------------------------------------------------------------------- transforms


@pytest.mark.skipif("torch" not in requested(), reason="torch is not under test")
class TestTorch:
    @pytest.fixture
    def F(self, hosted):
        from aotops.frontends import torch as frontend

        return frontend.of(hosted)

    def test_compile_without_a_graph_break(self, F):
        import torch

        def function(x, y):
            value, _ = F.Largest(F.CustomAdd(F.CustomMul(x, y), F.Power(F.Transpose(F.Transpose(x)), exponent=2)))
            return value.sum()

        x, y = (torch.tensor(a, dtype=torch.float32) for a in (X, Y))
        expected = (X * Y + X**2).max(-1).sum()
        for dynamic in (False, True):
            compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
            assert torch.allclose(compiled(x, y), torch.tensor(expected, dtype=torch.float32))

        def differentiable(x, y):
            return F.CustomMul(F.Power(x, 3), y).sum()

        torch.compile(differentiable, fullgraph=True)(x.requires_grad_(), y).backward()
        np.testing.assert_allclose(x.grad.numpy(), 3 * X**2 * Y, rtol=1e-5)

    def test_compile_of_a_function_that_asks_for_the_namespace(self, hosted, tmp_path):
        """Which was made before; else the error says so."""
        import torch

        from aotops.frontends import torch as frontend

        library = aotops.load(Path(shutil.copy(hosted.path, tmp_path / "libasked.so")))
        library.op("CustomAdd", inputs=("x", "y"), outputs=("z",), same_spec_as={"z": "x"})
        compiled = torch.compile(lambda x: frontend.of(library).CustomAdd(x, x), backend="eager", fullgraph=True)
        x = torch.tensor(X).float()
        with pytest.raises(Exception, match=r"torch\.of is called first in a compiled function, expected before it"):
            compiled(x)
        frontend.of(library)
        torch.compiler.reset()
        assert torch.equal(compiled(x), 2 * x)

    def test_compile_of_a_mutation(self, F):
        import torch

        def function(total, x):
            F.Accumulate(total, x)
            return total * 2

        total, x = torch.tensor(X), torch.tensor(Y)
        total, x = total.float(), x.float()
        np.testing.assert_allclose(torch.compile(function, fullgraph=True)(total, x).numpy(), 2 * (X + Y))
        np.testing.assert_allclose(total.numpy(), X + Y)

    def test_vmap_grad_and_second_order(self, F):
        import torch

        x, y = torch.tensor(X, dtype=torch.float32), torch.tensor(Y, dtype=torch.float32)
        assert torch.equal(torch.vmap(F.CustomMul)(x, y), x * y)
        assert torch.equal(torch.vmap(F.CustomAdd, in_dims=(1, 1), out_dims=1)(x, y), x + y)
        assert torch.equal(torch.vmap(F.Power)(x), x**2)
        gradient = torch.func.grad(lambda x: F.CustomMul(x, F.CustomMul(x, x)).sum())
        assert torch.allclose(gradient(x), 3 * x**2)
        assert torch.allclose(torch.func.grad(lambda x: gradient(x).sum())(x), 6 * x)
        assert torch.equal(torch.func.vmap(gradient)(x), gradient(x))

    def test_a_mutation_is_known_to_autograd(self, F):
        import torch

        total, x = torch.tensor(X).float(), torch.tensor(Y).float()
        version = total._version
        F.Accumulate(total, x)
        assert total._version == version + 1
        view = torch.tensor(X).float().t()
        F.Accumulate(view, x.t())
        np.testing.assert_allclose(view.numpy(), (X + Y).T)
        with pytest.raises(NotImplementedError, match="Accumulate writes to total, and has no derivative"):
            F.Accumulate(total, x.requires_grad_())
        w = torch.tensor(X).float().requires_grad_()
        z = w * total
        F.Accumulate(total, x.detach())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()

    def test_opcheck(self, hosted, F):
        import torch

        x, y = torch.tensor(X).float().requires_grad_(), torch.tensor(Y).float().requires_grad_()
        F.CustomMul, F.Power, F.Accumulate  # noqa: B018  registers them
        operators = getattr(torch.ops, hosted.name)
        torch.library.opcheck(operators.CustomMul.default, (x, y))
        torch.library.opcheck(operators.Power.default, (x, 2))
        torch.library.opcheck(operators.Accumulate.default, (x.detach().clone(), y.detach()))


@pytest.fixture
def jax_on_cpu():
    """The library has entries for the CPU alone."""
    import jax

    with jax.default_device(jax.devices("cpu")[0]):
        yield jax


@pytest.mark.skipif("jax" not in requested(), reason="jax is not under test")
def test_jax_transforms(hosted, jax_on_cpu):
    import jax
    import jax.numpy as jnp

    from aotops.frontends import jax as frontend

    F = frontend.of(hosted)
    x, y = jnp.asarray(X, "float32"), jnp.asarray(Y, "float32")

    def function(x):
        return F.CustomMul(F.Power(x, 3), F.CustomAdd(x, y)).sum()

    expected = 3 * X**2 * (X + Y) + X**3
    np.testing.assert_allclose(jax.jit(jax.grad(function))(x), expected, rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(F.Power)(x), X**2)
    np.testing.assert_allclose(jax.vmap(F.CustomMul)(x, y), X * Y)
    cube = jax.grad(lambda x: F.CustomMul(x, F.CustomMul(x, x)).sum())
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: cube(x).sum()))(x), 6 * X, rtol=1e-6)
    with pytest.raises(NotImplementedError, match="PowerGrad has no gradient"):
        jax.grad(lambda x: jax.grad(lambda x: F.Power(x).sum())(x).sum())(x)


@pytest.mark.skipif("jax" not in requested(), reason="jax is not under test")
def test_jax_exports_symbolic_dimensions(hosted, jax_on_cpu):
    """A workspace is then as large as the dimensions of the call ask for."""
    import jax
    import jax.numpy as jnp

    from aotops.frontends import jax as frontend

    F = frontend.of(hosted)
    disabled = [jax.export.DisabledSafetyCheck.custom_call(name) for name in (frontend.TARGET, frontend.SCRATCH_TARGET)]
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 3"), jnp.float32)
    export = partial(jax.export.export, disabled_checks=disabled, platforms=["cpu"])
    exported = export(jax.jit(F.Transpose))(shape)
    np.testing.assert_allclose(exported.call(jnp.asarray(X, "float32")), X.T)
    with pytest.raises(ValueError, match=r"InferShape .* takes numbers, .* define the operator with infer="):
        export(jax.jit(F.Power))(shape)
    like = hosted.ops.get("PowerLike") or hosted.op(
        "PowerLike", inputs=("x",), outputs=("y",), attrs={"exponent": "int"}, same_spec_as={"y": "x"}, cpu="Power"
    )
    function = jax.jit(lambda x: getattr(F, like.name)(x, 3))
    exported = export(function)(shape)
    for n in (1, 50, 7):
        np.testing.assert_allclose(exported.call(jnp.full((n, 3), 2, "float32")), np.full((n, 3), 8.0))


@pytest.mark.skipif("mindspore" not in requested(), reason="mindspore is not under test")
def test_mindspore_dynamic_shapes(hosted):
    """In graph mode, where the library infers, or an output is like an input."""
    import mindspore as ms

    from aotops.frontends import mindspore as frontend

    F = frontend.of(hosted)
    ms.set_context(mode=ms.GRAPH_MODE)

    class Net(ms.nn.Cell):
        def construct(self, x):
            value, place = F.Largest(F.CustomMul(F.Power(x, 3), x))
            return value, place

    net, rows = Net(), ms.Tensor(shape=[None, 3], dtype=ms.float32)
    net.set_inputs(rows)
    for n in (2, 500, 3):
        x = np.random.default_rng(n).normal(size=(n, 3)).astype("f4")
        value, place = net(ms.Tensor(x))
        np.testing.assert_allclose(value.asnumpy(), (x**4).max(-1), rtol=1e-5)
        np.testing.assert_array_equal(place.asnumpy(), (x**4).argmax(-1))

    class Transposed(ms.nn.Cell):
        def construct(self, x):
            return F.Transpose(x)

    net = Transposed()
    net.set_inputs(rows)
    with pytest.raises(ValueError, match="Transpose: a dimension is unknown while the graph is compiled"):
        net(ms.Tensor(X, ms.float32))


# ------------------------------------------------------------------------------------------------------ what goes wrong


FAILURES = {
    "Fails": r"Fails: Fails of .*libhosted_old.so returned -7, expected 0, for float32 \(2, 3\) and float32 \(2, 3\)",
    "Throws": "Throws: the weather is bad",
    "ThrowsNumber": "ThrowsNumber threw something that is no std::exception",
    "BadInit": r"BadInit: BadInitInit of .*libhosted_old.so returned 9, expected 0",
    "BadShape": "BadShapeInferShape: no shape",
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_an_error_with_its_text(framework, hosted, name):
    if framework.compiles and name not in ("Fails", "BadShape"):
        return  # each would be compiled
    own = adapter(framework, hosted)
    (x,) = tensors(own, X)
    with pytest.raises(Exception, match=FAILURES[name]) as raised:
        own.numpy(own.results(name, {"x": x}, {})[0])
    assert isinstance(raised.value, RuntimeError) or framework.compiles


def test_a_dtype_that_the_function_refuses(framework, hosted):
    own = adapter(framework, hosted)
    x = own.make(X, "float64", "cpu")
    expected = (
        r"CustomMul: CustomMul of .*libhosted_old.so returned 2, expected 0, for float64 \(2, 3\), float64 \(2, 3\) "
    )
    with pytest.raises(Exception, match=expected) as raised:
        own.numpy(own.results("CustomMul", {"x": x, "y": x}, {})[0])
    if framework.frontend in ("numpy", "torch"):
        assert type(raised.value) is TypeError


def test_a_shape_below_0_that_the_library_gives(framework, hosted):
    own = adapter(framework, hosted)
    if framework.compiles:
        return  # MindSpore says it in its own words
    (x,) = tensors(own, X)
    with pytest.raises(Exception, match=r"Unknown: UnknownInferShape gives the shape \(3, -1\), expected .* below 0"):
        own.numpy(own.results("Unknown", {"x": x}, {})[0])


@pytest.mark.parametrize("name", ["Overwrites", "OverwritesBare"])
def test_a_function_that_writes_to_what_describes_the_tensors(framework, hosted, name):
    """It has copies: the convention's arrays are not const, and may be the framework's own."""
    if framework.compiles:
        return  # MindSpore gives copies
    own = adapter(framework, hosted)
    (x,) = tensors(own, X)
    for _ in range(2):
        (y,) = own.results(name, {"x": x}, {})
        assert tuple(x.shape) == tuple(y.shape) == (2, 3)
        np.testing.assert_array_equal(own.numpy(y), X)


def test_a_device_without_a_function(framework, libraries):
    """A function of CUDA alone, called on the CPU."""
    library = libraries["new"]
    name = f"Device_{framework.name.replace('-', '_')}"
    library.op(name, inputs=("x",), outputs=("y",), same_spec_as={"y": "x"}, cuda="CustomAdd")
    own = adapter(framework, library)
    (x,) = tensors(own, X)
    expected = r"it has no function for (the CPU|cpu)|the operator has no function for the CPU"
    with pytest.raises(Exception, match=expected):
        own.numpy(own.results(name, {"x": x}, {})[0])


def test_files_that_are_no_library(folder, tmp_path):
    with pytest.raises(LibraryError, match=r"nowhere.so does not exist"):
        aotops.load(tmp_path / "nowhere.so")
    (tmp_path / "libtext.so").write_text("int main")
    with pytest.raises(LibraryError, match=r"libtext.so does not load: .*(file too short|invalid ELF header)"):
        aotops.load(tmp_path / "libtext.so")
    whole = compiled(tmp_path / "libwhole.so").read_bytes()
    for part in (100, 5000, len(whole) // 2):
        (tmp_path / "libcut.so").write_bytes(whole[:part])
        with pytest.raises(LibraryError, match=r"libcut.so (has \d+ bytes of at least|does not load)"):
            aotops.load(tmp_path / "libcut.so")


def test_an_unresolved_symbol_is_named(tmp_path):
    source = tmp_path / "kernel.cpp"
    source.write_text('extern "C" int not_there(); extern "C" int Kernel() { return not_there(); }')
    with pytest.raises(LibraryError, match=r"libkernel.so does not load: .*undefined symbol: not_there"):
        aotops.load(compiled(tmp_path / "libkernel.so", source=source))


def test_names_of_libraries(folder, hosted, tmp_path):
    assert aotops.load(folder / "libhosted_old.so") is hosted
    other = Path(shutil.copy(folder / "libhosted_old.so", tmp_path))
    with pytest.raises(ValueError, match=r"name is 'hosted_old', the name of .*libhosted_old.so as it was"):
        aotops.load(other)
    with pytest.raises(ValueError, match="name is 'my-kernels', expected an identifier"):
        aotops.load(Path(shutil.copy(other, tmp_path / "libmy-kernels.so")))


BARE = {"inputs": ("x", "y"), "outputs": ("z",), "cpu": "CustomAdd", "same_spec_as": {"z": "x"}}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"cpu": "CustomAd"}, LibraryError, "exports no CustomAd; did you mean CustomAdd"),
        ({"cpu": "qqq"}, LibraryError, r'exports no qqq \(is it extern "C"\?\)'),
        ({"same_spec_as": {}}, TypeError, "has no CustomAddInferShape: tell the outputs' specs"),
        ({"same_spec_as": {"z": "q"}}, ValueError, "same_spec_as names 'q', expected one of x, y"),
        ({"infer": len, "out_dtype": "int8"}, TypeError, "expected one rule"),
        ({"inputs": ()}, ValueError, "there is no input"),
        ({"inputs": ("x", "x")}, ValueError, "expected different names"),
        ({"inputs": ("x", "lambda")}, ValueError, "'lambda' is no identifier"),
        ({"outputs": (), "same_spec_as": {}}, ValueError, "there is no output"),
        ({"attrs": {"axis": "double"}}, ValueError, "the type of axis is 'double', expected one of float, int"),
        ({"attrs": {"a": "int", "b": "int"}, "defaults": {"a": 1}}, ValueError, "expected the last of a, b"),
        ({"attrs": {"a": "int"}, "defaults": {"a": 1.5}}, TypeError, "a is 1.5, expected an integer"),
        ({"backward": "NoSuch"}, ValueError, "backward is 'NoSuch', expected an operator defined before"),
        ({"backward": lambda F, q: q}, ValueError, "backward names 'q', expected one of x, y, z, dz"),
        ({"mutates": ("z",)}, ValueError, "mutates names 'z', expected one of x, y"),
        ({"mutates": ("x",), "backward": lambda F, dz: dz}, NotImplementedError, "has no gradient"),
        ({"device": "npu"}, ValueError, "device is 'npu', expected cpu or cuda"),
        ({"inputs": tuple(f"x{i}" for i in range(63)), "same_spec_as": {"z": "x1"}}, NotImplementedError, "64 tensors"),
    ],
)
def test_definitions_that_are_refused(hosted, changes, error, message):
    with pytest.raises(error, match=message):
        hosted.op("Refused", **(BARE | changes))
    assert "Refused" not in hosted.ops


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        (lambda x, y: x.shape, TypeError, r"infer returned \(2, 3\), expected one, for z"),
        (lambda x, y: (x, y), TypeError, "expected one, for z"),
        (lambda x, y: [x.shape], TypeError, r"the rule gives \(2, 3\) for z, expected an aotops.TensorSpec"),
        (lambda x, y: TensorSpec((2.0,), "float32"), TypeError, r"z the shape \(2.0,\), expected a tuple of integers"),
        (lambda x, y: TensorSpec((-5,), "float32"), ValueError, "expected no dimension below 0"),
        (lambda x, y: TensorSpec((1,), "double"), TypeError, "z the dtype 'double', expected one of float16"),
        (lambda x, y: 1 / 0, ZeroDivisionError, "division"),
    ],
)
def test_rules_that_return_nonsense(hosted, rule, error, message):
    from aotops.infer import infer

    hosted.ops.pop("Nonsense", None)
    op = hosted.op("Nonsense", **(BARE | {"same_spec_as": {}, "infer": rule}))
    spec = TensorSpec((2, 3), "float32")
    with pytest.raises(error, match=message):
        infer(op, (), (spec, spec))


def test_calls_that_are_refused(framework, hosted):
    own = adapter(framework, hosted)
    if framework.compiles:
        return  # MindSpore's own parser says these in its own words
    (x,) = tensors(own, X)
    F = own.module
    with pytest.raises(TypeError, match=r"missing .*'y'"):
        F.CustomMul(x)
    with pytest.raises(TypeError, match=r"Attributes: count is 1\.5, expected an integer of 64 bits"):
        F.Attributes(x, **(VALUES | {"count": 1.5}))
    with pytest.raises(TypeError, match=r"Attributes: pairs is .*, expected a list of lists of integers"):
        F.Attributes(x, **(VALUES | {"pairs": (1, 2)}))
    with pytest.raises(AttributeError, match="the library hosted_old has no operator 'CustomMu'; there are CustomMul"):
        F.CustomMu  # noqa: B018
    if framework.frontend != "mindspore":
        with pytest.raises((TypeError, NotImplementedError)):
            F.CustomMul("x", x)


def test_a_rule_for_gradients_that_returns_too_few(framework, hosted):
    if framework.compiles:
        return  # graph mode wraps the error
    name = f"TooFew_{framework.frontend}"
    hosted.op(name, **(BARE | {"backward": lambda F, dz: (dz,)}))
    own = adapter(framework, hosted)
    x, y = tensors(own, X, Y)
    with pytest.raises(TypeError, match="its backward returned"):
        gradients(own, name, {"x": x, "y": y}, {}, (x,))


@pytest.mark.parametrize(("backward", "first"), [(lambda x, dz: (dz, dz), "'x'"), (lambda: (), "''")])
def test_a_rule_takes_the_functions_first(hosted, backward, first):
    with pytest.raises(TypeError, match=f"WithoutF: backward's first parameter is {first}, expected F"):
        hosted.op("WithoutF", **(BARE | {"backward": backward}))


def test_operators_are_added_while_a_namespace_is_in_use(framework, hosted):
    own = adapter(framework, hosted)
    name = f"Later_{framework.name.replace('-', '_')}"
    assert not hasattr(own.module, name)
    hosted.op(name, **BARE)
    x, y = tensors(own, X, Y)
    (z,) = own.results(name, {"x": x, "y": y}, {})
    np.testing.assert_allclose(own.numpy(z), X + Y)
    assert name in dir(own.module)
    with pytest.raises(ValueError, match=f"{name}: the library hosted_old has an operator of this name already"):
        hosted.op(name, **BARE)


@pytest.mark.parametrize("path", call.CALL_PATHS)
def test_every_call_path(python, libraries, path):
    """NumPy's and torch's, and the file by a relative path."""
    folder = libraries["old"].path.parent
    program = f"""
import os; os.chdir({str(folder)!r})
import numpy as np
import aotops
from aotops.frontends import numpy
from aotops.spec import TensorSpec
lib = aotops.load("libhosted_old.so", name="again")
lib.op("Power", inputs=("x",), outputs=("y",), attrs={{"exponent": "int"}})
lib.op("Largest", inputs=("x",), outputs=("value", "place"))
os.chdir("/")
F = numpy.of(lib)
x = np.arange(6, dtype="f4").reshape(2, 3)
print(F.Power(x, 2).tolist(), [y.tolist() for y in F.Largest(x)])
"""
    expected = [[[0.0, 1.0, 4.0], [9.0, 16.0, 25.0]], [[2.0, 5.0], [2, 2]]]
    said = python(program, AOTOPS_CALL_PATH=path)
    assert said.split() == f"{expected[0]} {expected[1]}".split()


SOURCES = Path(aotops.include_dir())


def test_the_example_of_the_attribute_is_what_is_written():
    (example,) = re.findall(r"^//   (\S+;)$", (SOURCES / "host" / "hosted.cpp").read_text(), re.M)
    op = Op(
        "axpy", lambda: ((), ()), ("x", "y"), ("z",), attrs={"alpha": "float"}, same_spec_as={"z": "x"},
        workspace=("workspace",), foreign=Foreign({"cpu": "axpy_cpu"}), library=SimpleNamespace(name="scale"),
    )  # fmt: skip
    assert encode_foreign(op, (0.5,), ("float32",) * 3) == example


def test_the_numbers_of_dtypes_are_those_of_mindspore():
    """The numbers that aot.h states."""
    ms = pytest.importorskip("mindspore")
    from mindspore._c_expression import typing

    stated = dict(re.findall(r"kType(\w+) = (\d+)", (SOURCES / "aot.h").read_text()))
    assert len(stated) == len(DTYPES)
    for name, number in stated.items():
        dtype = getattr(ms, name.lower() if name != "Bool" else "bool_")
        assert typing.type_to_type_id(dtype) == int(number), name
