"""NumPy: subclasses of its array, arrays of others, results in arrays that are given, and functions that travel between
processes."""

from __future__ import annotations

import array
import ctypes
import inspect
import pickle
from dataclasses import replace

import numpy as np
import pytest

from aotops.frontends import numpy as ours
from aotops.ops import BUILTIN, OPS
from aotops.ops._adamw import adamw as ADAMW
from aotops.testing import cases

X = np.arange(6.0, dtype=np.float32).reshape(2, 3)


class Meters(np.ndarray):
    """An array of a library of units."""


SUBCLASSES = {
    "MaskedArray": lambda x: np.ma.masked_array(x, x > 2),
    "matrix": np.matrix,
    "Meters": lambda x: x.view(Meters),
}


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("name", SUBCLASSES)
def test_what_a_result_would_lose_is_refused(name):
    """NumPy's own functions keep the subclass, and with it what its elements mean."""
    odd = SUBCLASSES[name](X)
    assert type(np.add(odd, odd)) is type(odd)
    for call, where in (
        (lambda: ours.gelu(odd), "gelu: x"),
        (lambda: ours.add(X, odd), "add: b"),
        (lambda: ours.layer_norm(X, 3, odd[0]), "layer_norm: weight"),
        (lambda: ours.matmul(X, odd.T), "matmul: b"),
        (lambda: ours.gelu_backward(odd, X), "gelu_backward: dy"),
        (lambda: ours.add_backward(odd, X, X), "add_backward: dy"),
    ):
        with pytest.raises(TypeError, match=f"^{where} is a {name}, expected a numpy.ndarray; numpy.asarray"):
            call()


def test_what_loses_nothing_is_taken(tmp_path):
    mapped = np.memmap(tmp_path / "x", X.dtype, "w+", shape=X.shape)
    mapped[:] = X
    assert type(np.add(mapped, mapped)) is np.ndarray
    assert np.array_equal(ours.gelu(mapped), ours.gelu(X))
    assert np.array_equal(ours.gelu(X[0, 1]), ours.gelu(X)[0, 1])


def test_what_is_no_array_is_named():
    """Transposes are looked at before anything else is."""

    class Matrix:
        ndim = 2

    with pytest.raises(TypeError, match=r"^matmul: b is a Matrix, expected a numpy\.ndarray$"):
        ours.matmul(X, Matrix())


# ---------------------------------------------------------------------------------------------------- arrays of others


class Exported:
    """An array with nothing but the interface of a library: the methods that are named."""

    def __init__(self, array, *names, device=(1, 0)):
        self.array, self.device = array, device
        members = {
            "__dlpack__": lambda self, **kwargs: self.array.__dlpack__(**kwargs),
            "__dlpack_device__": lambda self: self.device,
            "__array_interface__": property(lambda self: self.array.__array_interface__),
            "__array__": lambda self, *args, **kwargs: self.array,
            "__array_function__": lambda self, *args: NotImplemented,
        }
        self.__class__ = type("Exported", (Exported,), {name: members[name] for name in names})


DLPACK = ("__dlpack__", "__dlpack_device__")
EXPORTED = {
    "DLPack": lambda x: Exported(x, *DLPACK),
    "DLPack, with __array__": lambda x: Exported(x, *DLPACK, "__array__"),
    "__array_interface__": lambda x: Exported(x, "__array_interface__"),
    "memoryview": memoryview,
}


@pytest.mark.parametrize("kind", EXPORTED)
def test_objects_that_export_their_memory_are_accepted(kind):
    x, w = EXPORTED[kind](X), EXPORTED[kind](X[0].copy())
    strided = EXPORTED[kind](X[:, ::2])
    for got, expected in (
        (ours.gelu(x), ours.gelu(X)),
        (ours.add(X, w), ours.add(X, X[0])),
        (ours.add_backward(x, w, x)[0], ours.add_backward(X, X[0], X)[0]),
        (ours.layer_norm_backward(x, x, 3, w)[1], ours.layer_norm_backward(X, X, 3, X[0])[1]),
        (ours.gelu(strided), ours.gelu(X[:, ::2])),
    ):
        assert type(got) is np.ndarray
        np.testing.assert_array_equal(got, expected)


def test_arrays_of_the_standard_library_are_accepted():
    for x in (array.array("f", [1, 2, 3]), (ctypes.c_float * 3)(1, 2, 3)):
        np.testing.assert_array_equal(ours.add(x, x), np.array([2, 4, 6], np.float32))
        np.testing.assert_array_equal(ours.add_backward(X, X, x)[1], X.sum(0))


def test_memory_of_others_is_not_copied(monkeypatch):
    taken = []
    launch = type(ours._frontend).launch
    spy = lambda self, op, attrs, arrays: (taken.append(arrays[0]), launch(self, op, attrs, arrays))[1]  # noqa: E731
    monkeypatch.setattr(type(ours._frontend), "launch", spy)
    for kind in EXPORTED:
        ours.gelu(EXPORTED[kind](X))
        assert np.shares_memory(taken.pop(), X), kind


def test_what_exports_less_than_it_means_is_refused():
    for x, error, text in (
        (
            Exported(X, *DLPACK, "__array_function__"),
            TypeError,
            "is a Exported, expected a numpy.ndarray; numpy.asarray",
        ),
        (Exported(X, *DLPACK, device=(2, 0)), ValueError, "is on a device of DLPack's type 2, expected the CPU"),
        (Exported(X, "__array__"), TypeError, "is a Exported, expected a numpy.ndarray"),
        (Exported(X.astype(str), *DLPACK), TypeError, "is a Exported that NumPy cannot read: "),
        (b"1234", TypeError, "is a bytes, expected a numpy.ndarray"),
    ):
        with pytest.raises(error, match=f"^gelu: x {text}"):
            ours.gelu(x)


def test_torch_tensors_are_accepted_where_they_mean_their_memory():
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(X.copy())
    np.testing.assert_array_equal(ours.linear(x.T, x.T, activation="gelu"), ours.linear(X.T, X.T, activation="gelu"))
    freed = x.clone()
    freed.untyped_storage().resize_(0)
    for odd, why in (
        (x.clone().requires_grad_(), "requires grad"),
        (torch._neg_view(x), "negative bit"),
        (x.to("meta"), ""),
        (x.bfloat16(), "BFloat16"),
        (freed, "it has no memory"),
    ):
        with pytest.raises(TypeError, match=f"^gelu: x is a Tensor that NumPy cannot read: .*{why}"):
            ours.gelu(odd)


def test_jax_arrays_are_accepted():
    jax = pytest.importorskip("jax")
    for dtype in ("float32", "bfloat16"):
        x = jax.numpy.asarray(X, dtype)
        np.testing.assert_array_equal(ours.gelu(x), ours.gelu(np.asarray(x)))
    with pytest.raises(TypeError, match=r"^gelu: x is a .*Tracer that NumPy cannot read"):
        jax.jit(ours.gelu)(X)


# ------------------------------------------------------------------------------------------------------------------ out


def _calls():
    for name, op in OPS.items():
        yield pytest.param(name, False, id=name)
        if op.has_gradient:
            yield pytest.param(name, True, id=f"{name}_backward")


def _call(name, is_backward):
    """A function of a call's keywords on the first case, and its results."""
    i = cases.first_case(name)
    arrays = {s: x.astype(cases.dtype_of(x, "float32")) for s, x in cases.inputs(name, i, "float32").items()}
    attrs = cases.CASES[name].cases[i].attrs
    if is_backward:
        dys = tuple(dy if dy is None else dy.astype(np.float32) for dy in cases.output_gradients(name, i, "float32"))
        arrays["dy"] = dys if len(dys) > 1 else dys[0]
    function = getattr(ours, f"{name}_backward" if is_backward else name)

    def call(**kwargs):
        results = function(**arrays, **attrs, **kwargs)
        return results if isinstance(results, tuple) else (results,)

    return call, call()


OUTS = {
    "plain": np.empty_like,
    "strided": lambda y: np.empty((*y.shape, 2), y.dtype)[..., 1],
    "swapped": lambda y: np.empty(y.shape, y.dtype.newbyteorder()),
    "Fortran": lambda y: np.empty_like(y, order="F"),
    "unaligned": lambda y: np.frombuffer(bytearray(y.nbytes + 1), y.dtype, offset=1).reshape(y.shape),
}


@pytest.mark.parametrize(("name", "is_backward"), _calls())
def test_results_are_written_to_the_arrays_given(name, is_backward):
    call, expected = _call(name, is_backward)
    for kind, empty in OUTS.items():
        outs = tuple(None if y is None or i == 1 else empty(y) for i, y in enumerate(expected))
        got = call(out=outs)
        assert all(out is None or g is out for g, out in zip(got, outs, strict=True)), kind
        for g, e in zip(got, expected, strict=True):
            np.testing.assert_array_equal(g, e, err_msg=kind)


def test_a_plain_array_that_is_given_is_what_the_entry_writes(monkeypatch, tmp_path):
    written = []
    launch = type(ours._frontend).launch
    spy = lambda self, op, attrs, arrays: (written.append(arrays[-1]), launch(self, op, attrs, arrays))[1]  # noqa: E731
    monkeypatch.setattr(type(ours._frontend), "launch", spy)
    for out in (np.empty_like(X), np.memmap(tmp_path / "y", X.dtype, "w+", shape=X.shape)):
        written.clear()
        assert ours.gelu(X, out=out) is out
        assert ours.gelu_backward(X, X, out=out) is out
        assert [np.shares_memory(y, out) for y in written] == [True, True]
        np.testing.assert_array_equal(out, ours.gelu_backward(X, X))


def test_the_array_given_may_overlap_the_inputs():
    base = np.linspace(-2, 2, 40, dtype=np.float32)
    for function in (
        lambda a, b, **out: ours.matmul(a, b, **out),
        lambda a, b, **out: ours.softmax(a, 0, **out),
        lambda a, b, **out: ours.gelu_backward(a, b, **out),
        lambda a, b, **out: ours.layer_norm(a, 4, b[0], **out),
    ):
        for where in (slice(0, 16), slice(3, 19), slice(20, 36), slice(15, None, -1)):
            memory = base.copy()
            a, b, out = memory[:16].reshape(4, 4), memory[20:36].reshape(4, 4), memory[where].reshape(4, 4)
            expected = function(a.copy(), b.copy())
            np.testing.assert_array_equal(function(a, b, out=out), expected)
    # a gradient that is an argument, and the other's array in its memory
    dy, x = base[:16].copy(), base[16:32].copy()
    expected = [g.copy() for g in ours.add_backward(dy, x, x, alpha=2)]
    other = np.empty_like(dy)
    got = ours.add_backward(dy, x, x, alpha=2, out=(other, dy))
    np.testing.assert_array_equal(got, expected)


def test_an_array_that_does_not_fit_is_refused():
    y, read_only = np.empty_like(X), np.empty_like(X)
    read_only.flags.writeable = False
    two = "y and h" if OPS["add_layer_norm"].outputs == ("y", "h") else " and ".join(OPS["add_layer_norm"].outputs)
    for function, out, error, text in (
        (ours.gelu, y[:1], ValueError, r"gelu: out has shape \(1, 3\), expected \(2, 3\)"),
        (ours.gelu, y.astype(np.float64), TypeError, "gelu: out has dtype float64, expected float32"),
        (ours.gelu, read_only, ValueError, "gelu: out is read-only, expected an array to write to"),
        (ours.gelu, [y], TypeError, "gelu: out is a list, expected a numpy.ndarray to write to"),
        (ours.gelu, np.ma.masked_array(y), TypeError, "gelu: out is a MaskedArray, expected a numpy.ndarray"),
        (ours.gelu, (y, y), ValueError, "gelu: out has 2, expected 1, for y"),
        (lambda x, out: ours.add_layer_norm(x, x, 3, out=out), y, TypeError,
         f"add_layer_norm: out is a ndarray, expected a tuple of 2, for {two}"),
        (lambda x, out: ours.add_layer_norm(x, x, 3, out=out), (y, y[:]), ValueError,
         r"add_layer_norm: out\[1\] shares memory with out\[0\]"),
        (lambda x, out: ours.layer_norm_backward(x, x, 3, out=out), (None, X[0].copy(), None), ValueError,
         r"layer_norm_backward: out\[1\] is an array, expected None: there is no dweight"),
        (lambda x, out: ours.add_backward(x, x, x[0], out=out), (None, y), ValueError,
         r"add_backward: out\[1\] has shape \(2, 3\), expected \(3,\)"),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^{text}"):
            function(X, out=out)


def test_interleaved_arrays_may_be_given():
    memory = np.empty((*X.shape, 2), X.dtype)
    got = ours.add_layer_norm(X, X, 3, out=(memory[..., 0], memory[..., 1]))
    np.testing.assert_array_equal(got, ours.add_layer_norm(X, X, 3))


def test_an_operator_may_have_an_argument_out():
    def bind(out, approximate="none"):
        """Takes an input named as the keyword is."""
        return (out,), (approximate,)

    functions = ours._frontend.functions_of(replace(OPS["gelu"], bind=bind), "here")
    np.testing.assert_array_equal(functions["gelu"](out=X), ours.gelu(X))
    np.testing.assert_array_equal(functions["gelu_backward"](X, out=X), ours.gelu_backward(X, X))
    with pytest.raises(TypeError, match=r"^gelu: x is None"):
        functions["gelu"](out=None)


def test_residuals_that_a_backward_needs_are_computed():
    """The built-in backwards can do without theirs; an author's need not."""
    op = OPS["layer_norm"]
    needy = replace(op, backward=replace(op.backward, optional=op.backward.optional - {"stats"}))
    backward = ours._frontend.functions_of(needy, __name__)["layer_norm_backward"]
    random = np.random.default_rng(0)
    x, dy = random.normal(size=(2, 4, 6))
    w, b = random.normal(size=(2, 6))
    for got, expected in zip(backward(dy, x, 6, w, b), ours.layer_norm_backward(dy, x, 6, w, b), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm"])
def test_a_sum_that_nobody_reads_has_no_gradient(name, dtype):
    """There are rows for each kernel: of a few elements, of whole vectors and the rest, of parts."""
    random = np.random.default_rng(0)
    backward = getattr(ours, f"{name}_backward")
    for n in (3, 40, 1029):
        x, residual, dy = random.normal(size=(3, 6, n)).astype(dtype)
        found, expected = (backward((dy, dh), x, residual, n, dy[0]) for dh in (None, np.zeros_like(dy)))
        for got, other in zip(found, expected, strict=True):
            assert (got is None) == (other is None)
            if got is not None:
                np.testing.assert_array_equal(got, other)


def test_inputs_that_an_operator_writes_to_are_writable_arrays():
    function = ours._frontend.functions_of(replace(OPS["gelu"], mutates=("x",)), "here")["gelu"]
    read_only = X.copy()
    read_only.flags.writeable = False
    for x, error, text in (
        (read_only, ValueError, "gelu: x is read-only, expected an array to write to"),
        (memoryview(X), TypeError, "gelu: x is a memoryview, expected a numpy.ndarray to write to"),
    ):
        with pytest.raises(error, match=text):
            function(x)
    with pytest.raises(ValueError, match="gelu: out shares memory with x"):
        function(X, out=X)
    both = ours._frontend.functions_of(replace(OPS["swiglu"], mutates=("gate", "up")), "here")["swiglu"]
    with pytest.raises(ValueError, match="swiglu: up shares memory with another input that is written to"):
        both(X, X[::-1])


def test_more_axes_than_numpy_broadcasts():
    """NumPy 2 has arrays of 64, and broadcasts 32."""
    if int(np.__version__.partition(".")[0]) < 2:
        pytest.skip("NumPy 1 has no such arrays")
    with pytest.raises(ValueError, match="add: a has 33 dimensions, expected at most 32"):
        ours.add(np.ones((1,) * 33), np.ones(3))


def test_what_is_read_beside_an_input_that_is_written_to_is_as_it_was():
    """As in NumPy's functions: here gradients are the parameters, an element further, and the parameters themselves."""
    adamw = ours._frontend.functions_of(ADAMW.bound_to(BUILTIN), "here")["adamw"]
    one = np.ones((), np.float32)

    def stepped(param, grad):
        adamw(param, grad, np.zeros_like(param), np.zeros_like(param), one, one)
        return param

    for shift in (0, 1):
        memory = np.linspace(-1, 1, 101)
        expected = stepped(memory[shift:].copy(), memory[: 101 - shift].copy())
        np.testing.assert_array_equal(stepped(memory[shift:], memory[: 101 - shift]), expected)


APART = [(8, 48), (48, 8), (-48, -8), (24, 64), (24, 16), (16, 24)]
MEETING = [(0, 8), (8, 8), (8, 16), (-16, 16), (4, 64), (16, 28)]


def check_out(memory, out, x, meet):
    """out is refused, and memory not written to, if elements of out meet in it."""
    if meet:
        with pytest.raises(ValueError, match="gelu: out has elements that share memory, expected an array to write to"):
            ours.gelu(x, out=out)
        assert not memory.any()
    else:
        np.testing.assert_array_equal(ours.gelu(x, out=out), ours.gelu(x))


@pytest.mark.parametrize(
    ("strides", "meet"), [*((each, False) for each in APART), *((each, True) for each in MEETING)], ids=str
)
def test_out_has_a_place_for_each_element(strides, meet):
    """Results are 3 x 2 float64, one of which would be lost."""
    memory = np.zeros(64)
    out = np.lib.stride_tricks.as_strided(memory[32:], (3, 2), strides)
    x = np.arange(6.0).reshape(3, 2)
    check_out(memory, out, x, meet)


LARGE = [((16, 24), False), ((24, 16), False), ((16, 8 * 69999), False), ((16, 8 * 69998), True)]


@pytest.mark.parametrize(("strides", "meet"), LARGE, ids=str)
def test_a_large_out_of_interleaved_axes_has_a_place_for_each_element(strides, meet):
    memory = np.zeros(3 * 70000 + 1)
    out = np.lib.stride_tricks.as_strided(memory[1:], (70000, 2), strides)
    x = np.linspace(-1, 1, 140000).reshape(70000, 2)
    check_out(memory, out, x, meet)


def test_out_is_in_signatures_and_docstrings():
    for function in (ours.gelu, ours.gelu_backward, ours.add_layer_norm):
        assert inspect.signature(function).parameters["out"].kind is inspect.Parameter.KEYWORD_ONLY
        assert "    out: " in function.__doc__.split("Returns:")[0]


def test_what_an_attribute_may_be_does_not_depend_on_what_was_called_before():
    """To a cache 1, 1.0 and True are one."""
    for _ in range(2):
        ours.softmax(X, 1)
        ours.softmax_backward(X, X, 1)
        for value in (1.0, True, 1 + 0j):
            for function, args in ((ours.softmax, (X,)), (ours.softmax_backward, (X, X))):
                with pytest.raises(TypeError, match=r"^softmax: dim is "):
                    function(*args, value)


FUNCTIONS = [*OPS, *(f"{name}_backward" for name, op in OPS.items() if op.backward)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_pickled(name):
    function = getattr(ours, name)
    assert (function.__module__, function.__qualname__) == ("aotops.frontends.numpy", name)
    assert pickle.loads(pickle.dumps(function)) is function


def test_functions_go_to_other_processes(python):
    program = """
import multiprocessing
import numpy as np
from aotops.frontends import numpy as ours
if __name__ == "__main__":
    xs = [np.full(3, i, np.float32) for i in range(4)]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(np.array_equal(pool.map(ours.gelu, xs), [ours.gelu(x) for x in xs]))
"""
    assert python(program).split()[-1] == "True"


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_thread_may_have_a_small_stack(python, dtype):
    """Rows just short of those whose exponentials are taken twice: the doubles of one fill 125 KiB."""
    program = f"""
import threading, numpy as np
from aotops.frontends import numpy as ours
n = 16000
x, target, w = np.linspace(-3, 3, 2 * n).reshape(2, n).astype("{dtype}"), np.array([5, 7]), np.ones(n, "{dtype}")
def work():
    y = ours.softmax(x, -1), ours.softmax(x.T, 0), ours.softmax(x, 0)
    np.testing.assert_allclose(y[0], y[1].T, 1e-2)
    ours.softmax_backward(x, y[0], -1), ours.softmax_backward(x.T, y[1], 0)
    loss = ours.cross_entropy(x, target, reduction="none")
    ours.cross_entropy_backward(np.ones_like(loss), x, target, reduction="none")
    for name in ("layer_norm", "rms_norm"):
        getattr(ours, name)(x, n, w)
        getattr(ours, name + "_backward")(x, x, n, w)
    ours.gelu(x), ours.swiglu(x, x), ours.matmul(x, x.T), ours.linear(x, x)
    done.append(True)
done = []
threading.stack_size(96 << 10)
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(done)
"""
    assert python(program, OMP_NUM_THREADS="1").strip() == "[True]"
