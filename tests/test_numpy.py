"""NumPy: subclasses of its array, and functions that travel between processes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from aotops.frontends import numpy as ours
from aotops.ops import OPS

X = np.arange(6.0, dtype=np.float32).reshape(2, 3)


class Meters(np.ndarray):
    """What a library of units has."""


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
