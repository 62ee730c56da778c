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
    return [r.get() for r in (value if isinstance(value, tuple) else (value,))]


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
