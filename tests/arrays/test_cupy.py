"""CuPy: its streams, its graphs, its devices."""

from __future__ import annotations

import pickle
from functools import partial

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from aotops.frontends import cupy as ours  # noqa: E402
from aotops.ops import OPS  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cupy.is_available(), reason="cupy finds no GPU")]


def arrays():
    random = np.random.default_rng(0)
    return tuple(cupy.asarray(random.normal(size=s)) for s in ((4, 6), (4, 6), (6,), (6,)))


FUNCTIONS = {
    "add": lambda f, dy, x, w, b: f.add(x, w),
    "gelu": lambda f, dy, x, w, b: f.gelu(x, "tanh"),
    "gelu_backward": lambda f, dy, x, w, b: f.gelu_backward(dy, x),
    "layer_norm": lambda f, dy, x, w, b: f.layer_norm(x, 6, w, b),
    "layer_norm_backward": lambda f, dy, x, w, b: f.layer_norm_backward(dy, x, 6, w, b),
}
EACH = pytest.mark.parametrize("name", FUNCTIONS)


def results(value):
    return [r.get() for r in (value if isinstance(value, tuple) else (value,)) if r is not None]


@EACH
def test_side_stream(name):
    """Work is queued on CuPy's current stream, behind what is there."""
    function = partial(FUNCTIONS[name], ours)
    dy, x, w, b = arrays()
    expected = results(function(dy, x, w, b))
    side = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with side:
        late = cupy.zeros_like(x)
        wide = cupy.ones((4096, 4096))
        for _ in range(20):
            wide = wide @ wide * 1e-4  # keeps the stream busy while the calls below are queued
        late += x
        got = function(dy, late, w, b)
    side.synchronize()
    for a, e in zip(results(got), expected, strict=True):
        np.testing.assert_array_equal(a, e)


@EACH
def test_cuda_graph(name):
    """Recorded once, replayed on other numbers."""
    function = partial(FUNCTIONS[name], ours)
    static = arrays()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        function(*static)
        stream.begin_capture()
        got = function(*static)
        graph = stream.end_capture()
        for k in (1.0, -2.0):
            for t in static:
                t[...] = t * k + 0.5
            expected = results(function(*static))
            graph.launch(stream)
            stream.synchronize()
            for a, e in zip(results(got), expected, strict=True):
                np.testing.assert_array_equal(a, e)


@EACH
def test_another_device_than_the_current(name):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    function = partial(FUNCTIONS[name], ours)
    expected = results(function(*arrays()))
    with cupy.cuda.Device(1):
        there = arrays()
    got = function(*there)
    assert cupy.cuda.Device().id == 0
    for a, e in zip(results(got), expected, strict=True):
        np.testing.assert_array_equal(a, e)
    with pytest.raises(ValueError, match=r"add: b is on .*, expected .*, the device of a"):
        ours.add(there[0], arrays()[0])


@EACH
def test_as_on_the_cpu(name):
    from aotops.frontends import numpy as frontend

    expected = FUNCTIONS[name](frontend, *(a.get() for a in arrays()))
    expected = expected if isinstance(expected, tuple) else (expected,)
    for a, e in zip(results(FUNCTIONS[name](ours, *arrays())), expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-12, atol=1e-12)


def test_results_are_written_to_the_arrays_given():
    dy, x, w, b = arrays()
    for function, n in (
        (lambda **out: ours.gelu(x, **out), 1),
        (lambda **out: ours.gelu_backward(dy, x, **out), 1),
        (lambda **out: ours.add_layer_norm(x, dy, 6, w, b, **out), 2),
        (lambda **out: ours.layer_norm_backward(dy, x, 6, w, b, **out), 3),
        (lambda **out: ours.add_backward(dy, x, w, **out), 2),
    ):
        expected = function() if n > 1 else (function(),)
        for empty in (cupy.empty_like, lambda y: cupy.empty((*y.shape, 2), y.dtype)[..., 1]):
            outs = tuple(map(empty, expected))
            got = function(out=outs if n > 1 else outs[0])
            assert all(g is out for g, out in zip(got if n > 1 else (got,), outs, strict=True))
            for g, e in zip(outs, expected, strict=True):
                cupy.testing.assert_array_equal(g, e)
    plain = cupy.empty_like(x)
    pointer = plain.data.ptr
    assert ours.gelu(x, out=plain).data.ptr == pointer
    overlapping = x.copy()
    cupy.testing.assert_array_equal(ours.softmax(overlapping, 0, out=overlapping), ours.softmax(x, 0))


def test_arrays_given_that_do_not_fit_are_refused():
    _, x, *_ = arrays()
    for out, error, text in (
        (cupy.empty_like(x)[:1], ValueError, r"out has shape \(1, 6\), expected \(4, 6\)"),
        (cupy.empty_like(x, "float32"), TypeError, "out has dtype float32, expected float64"),
        (np.empty(x.shape), TypeError, r"out is a ndarray, expected a cupy\.ndarray to write to"),
    ):
        with pytest.raises(error, match=f"^gelu: {text}"):
            ours.gelu(x, out=out)
    if cupy.cuda.runtime.getDeviceCount() > 1:
        with cupy.cuda.Device(1):
            there = cupy.empty_like(x)
        with pytest.raises(ValueError, match=r"^gelu: out is on .*Device 1.*, expected .*Device 0"):
            ours.gelu(x, out=there)


class Exported:
    """A cupy.ndarray that is seen through one protocol alone."""

    def __init__(self, array):
        self.array = array


class ByDLPack(Exported):
    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class ByInterface(Exported):
    @property
    def __cuda_array_interface__(self):
        return self.array.__cuda_array_interface__


@pytest.mark.parametrize("exported", [ByDLPack, ByInterface])
def test_arrays_of_others_are_accepted(exported):
    dy, x, w, b = arrays()
    others = [exported(a) for a in (dy, x, w, b)]
    for name, function in FUNCTIONS.items():
        got, expected = function(ours, *others), function(ours, dy, x, w, b)
        for g, e in zip(results(got), results(expected), strict=True):
            np.testing.assert_array_equal(g, e, err_msg=name)
    cupy.testing.assert_array_equal(ours.gelu(exported(x[:, ::2])), ours.gelu(x[:, ::2]))
    if cupy.cuda.runtime.getDeviceCount() > 1:
        with cupy.cuda.Device(1):
            there = x.copy()
        assert ours.gelu(exported(there)).device.id == 1


def test_torch_tensors_are_accepted():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    x = torch.linspace(-2, 2, 24, device="cuda").reshape(4, 6)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        late = torch.zeros_like(x)
        wide = torch.ones((4096, 4096), device="cuda")
        for _ in range(20):
            wide = wide @ wide * 1e-4  # keeps torch's stream busy: CuPy's has to wait for it
        late += x
        got = ours.gelu(late)
    assert type(got) is cupy.ndarray
    cupy.testing.assert_array_equal(got, ours.gelu(cupy.asarray(x)))
    cupy.testing.assert_array_equal(ours.gelu(torch._neg_view(x)), ours.gelu(-cupy.asarray(x)))
    for odd, why in (
        (x.clone().requires_grad_(), "is a Tensor that CuPy cannot read: .*require.* grad"),
        (x.cpu(), r"is a Tensor, expected a cupy\.ndarray"),
    ):
        with pytest.raises(TypeError, match=f"^gelu: x {why}"):
            ours.gelu(odd)
    half = pytest.importorskip("ml_dtypes").bfloat16
    y = ours.gelu(x.bfloat16())
    assert y.dtype == half
    cupy.testing.assert_array_equal(y.view("uint16"), ours.gelu(cupy.asarray(x).astype(half)).view("uint16"))


def test_bfloat16():
    """A row of the table in ml_dtypes's dtype, strided too, and an array given for the result."""
    half = pytest.importorskip("ml_dtypes").bfloat16
    x = cupy.asarray(np.linspace(-3, 3, 48).reshape(4, 12)).astype(half)
    expected = ours.softmax(x[:, ::2].astype("float32"), -1)
    out = cupy.empty((4, 6), half)
    assert ours.softmax(x[:, ::2], -1, out=out) is out
    cupy.testing.assert_allclose(out.astype("float32"), expected, rtol=2.0**-8)
    dx = ours.softmax_backward(out, out, -1)
    assert (dx.dtype, dx.shape) == (half, (4, 6))


def test_subclasses_are_refused():
    """Their elements may be anywhere: a DistributedArray has none of its own."""

    class Subclass(cupy.ndarray):
        pass

    x = arrays()[0]
    with pytest.raises(TypeError, match=r"^add: b is a Subclass, expected a cupy\.ndarray"):
        ours.add(x, x.view(Subclass))


def test_what_an_attribute_may_be_does_not_depend_on_what_was_called_before():
    """To a cache 1, 1.0 and True are one."""
    x = arrays()[0]
    for _ in range(2):
        ours.softmax(x, 1)
        for value in (1.0, True):
            with pytest.raises(TypeError, match=r"^softmax: dim is "):
                ours.softmax(x, value)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm"])
def test_a_sum_that_nobody_reads_has_no_gradient(name, dtype):
    """There are rows for each kernel: in registers, of whole vectors and the rest, longer than a block's registers."""
    random = np.random.default_rng(0)
    for n in (768, 1029, 32768):
        x, residual, dy = cupy.asarray(random.normal(size=(3, 5, n)).astype(dtype))
        absent, zeros = (
            results(getattr(ours, f"{name}_backward")((dy, dh), x, residual, n, dy[0]))
            for dh in (None, cupy.zeros_like(dy))
        )
        for got, expected in zip(absent, zeros, strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", [*OPS, *(f"{name}_backward" for name, op in OPS.items() if op.backward)])
def test_functions_are_pickled(name):
    function = getattr(ours, name)
    assert (function.__module__, function.__qualname__) == ("aotops.frontends.cupy", name)
    assert pickle.loads(pickle.dumps(function)) is function


def test_many_elements():
    """More than 2^31 elements: indices do not wrap."""
    n = (1 << 31) + 4096
    if cupy.cuda.runtime.memGetInfo()[0] < 5 * 2 * n:
        pytest.skip("the GPU has too little memory")
    x = cupy.zeros((n // 4096, 4096), cupy.float16)
    x[-1] = cupy.arange(4096) % 7
    y = ours.layer_norm(x, 4096)
    cupy.testing.assert_allclose(y[-1], ours.layer_norm(x[-1], 4096))
    assert not y[0].any()
