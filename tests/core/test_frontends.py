"""Every operator in every frontend, dtype and device: the table's values and gradients, and any layout of memory."""

from __future__ import annotations

import math
from functools import cache, partial

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from aotops import frontends
from aotops.ops import OPS
from aotops.testing import cases
from aotops.testing.cases import CASES, DTYPES, first_case
from aotops.testing.frameworks import frameworks, requested
from aotops.testing.layouts import LAYOUTS, layouts_of, swapped, unaligned
from aotops.testing.odd import with_limit
from aotops.testing.tolerances import assert_close_or_odd

EACH_CASE = [
    pytest.param(name, i, id=f"{name}-{case}") for name, row in CASES.items() for i, case in enumerate(row.cases)
]
EACH_OP = list(CASES)


def is_spared(framework, dtype, name, i):
    """Whether a case is left out, because others run the same code. A kernel receives from each frontend what it gets
    from the first environment's NumPy and torch, where every case runs in every dtype. Elsewhere a case runs in one, in
    graph mode only if something of its graph is new, and the first case in every dtype."""
    if i == first_case(name):
        return False
    if framework.compiles:
        return dtype != "float32" or i not in graph_cases(name)
    repeats = framework.frontend in ("jax", "mindspore") or (framework.name == "numpy" and "mindspore" in requested())
    return repeats and dtype != DTYPES[i % len(DTYPES)]


def values_are_spared(framework, dtype, name, i):
    """In graph mode, test_gradients compares the values of the same graph."""
    if framework.compiles:
        return i != first_case(name) or dtype != "float32"
    return is_spared(framework, dtype, name, i)


def each_case(spares):
    """Runs a test for each case in each dtype of each framework but for what is spared (conftest.py)."""

    def decorate(test):
        test.each, test.spares = EACH_CASE, spares
        return test

    return decorate


def skip_what_is_not_done(framework, name, i):
    if reason := framework.unable(name, list(CASES[name].cases[i].given.values())):
        pytest.skip(reason)


def _of_graph(name, case):
    """A graph depends on the inputs that are given, on those that are empty, and on the type of each attribute, or on
    which bool or string it is: on each by itself. Axes only matter where operators of MindSpore broadcast; there the
    lengths 0 and 1 have a meaning of their own."""
    given = tuple(case.given)
    if name in ("add", "matmul"):
        given = tuple((slot, *(min(length, 2) for length in shape)) for slot, shape in case.given.items())
    empty = {("empty", slot) for slot, shape in case.given.items() if 0 in shape}
    attrs = {(k, v if isinstance(v, (bool, str)) else type(v).__name__, np.ndim(v)) for k, v in case.attrs.items()}
    return {given} | empty | attrs


@cache
def graph_cases(name):
    """The cases that graph mode compiles: the first one, and each that has something that none before it has."""
    found, seen = set(), set()
    for i in (first_case(name), *range(len(CASES[name].cases))):
        if new := _of_graph(name, CASES[name].cases[i]) - seen:
            found.add(i)
            seen |= new
    return found


def skip_what_is_the_kernels(framework):
    if framework.compiles:
        pytest.skip("graph mode: the numbers are the kernel's, which is PyNative mode's")


def made(framework, device, dtype, name, i):
    arrays, dtypes = cases.inputs(name, i, dtype), cases.dtypes(name, i, dtype)
    return {
        s: None if x is None else framework.make(x, cases.dtype_of(x, dtypes.get(s, dtype)), device)
        for s, x in arrays.items()
    }


def made_gradients(name, i, dtype, make):
    """The gradients of the results, made by ``make`` of values and dtypes; None of a result that has none."""
    dtypes, dys = cases.dtypes(name, i, dtype), cases.output_gradients(name, i, dtype)
    return tuple(None if dy is None else make(dy, dtypes[y]) for y, dy in zip(OPS[name].outputs, dys, strict=True))


def to_numpy(framework, tensors):
    """Arrays of a tuple, or by name of the tensors that are there."""
    if isinstance(tensors, tuple):
        return tuple(map(framework.numpy, tensors))
    return {slot: framework.numpy(t) for slot, t in tensors.items() if t is not None}


@pytest.mark.parametrize("name", requested())
def test_requested_frontend_imports(name):
    module = getattr(frontends, name)
    for op in OPS:
        assert callable(getattr(module, op)), f"{name} has no {op}"


def assert_values(framework, results, name, i, dtype):
    dtypes, expected = cases.dtypes(name, i, dtype), cases.trial(name, i, dtype).expected
    for slot, y, exact in zip(OPS[name].outputs, results, expected, strict=True):
        assert framework.dtype(y) == cases.dtype_of(exact, dtypes[slot])
    cases.assert_values(to_numpy(framework, results), name, i, dtype)


@each_case(values_are_spared)
def test_values(framework, device, dtype, name, i):
    skip_what_is_not_done(framework, name, i)
    results = framework.results(name, made(framework, device, dtype, name, i), CASES[name].cases[i].attrs)
    assert_values(framework, results, name, i, dtype)


@each_case(is_spared)
def test_gradients(framework, device, dtype, name, i):
    skip_what_is_not_done(framework, name, i)
    dys = made_gradients(name, i, dtype, partial(framework.make, device=device))
    inputs, attrs = made(framework, device, dtype, name, i), CASES[name].cases[i].attrs
    if framework.compiles:
        results, grads = framework.results_and_gradients(name, inputs, attrs, dys)
        assert_values(framework, results, name, i, dtype)
    else:
        grads = framework.gradients(name, inputs, attrs, dys)
    dtypes = cases.dtypes(name, i, dtype)
    for slot, g in grads.items():
        assert g is None or framework.dtype(g) == dtypes[slot]
    cases.assert_gradients(to_numpy(framework, grads), name, i, dtype)


# --------------------------------------------------------------------------------------------------------------- memory


def _expanded(framework, device, dtype, array):
    """Rows that are all one: a stride of 0."""
    row = framework.make(array[:1], dtype, device)
    return row.expand(array.shape) if framework.frontend == "torch" else framework.xp.broadcast_to(row, array.shape)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", EACH_OP)
def test_any_layout(framework, device, dtype, name, layout):
    """Values and gradients of inputs, and of an output gradient, that are not laid out plainly."""
    if layout not in layouts_of(framework):
        pytest.skip(f"{framework.frontend} has no {layout} arrays")
    i = first_case(name)
    attrs = CASES[name].cases[i].attrs

    def lay(array, dtype=dtype):
        tensor = LAYOUTS[layout](framework, device, cases.dtype_of(array, dtype), array)
        assert np.array_equal(framework.numpy(tensor), array)
        return tensor

    inputs = {slot: lay(x) for slot, x in cases.inputs(name, i, dtype).items()}
    cases.assert_values(to_numpy(framework, framework.results(name, inputs, attrs)), name, i, dtype)
    grads = framework.gradients(name, inputs, attrs, made_gradients(name, i, dtype, lay))
    cases.assert_gradients(to_numpy(framework, grads), name, i, dtype)


@pytest.mark.parametrize("name", EACH_OP)
def test_expanded_rows(framework, device, name):
    if not framework.strides:
        pytest.skip(f"{framework.frontend} has no strided arrays")
    i = first_case(name)
    attrs = CASES[name].cases[i].attrs
    arrays = cases.inputs(name, i, "float32")
    slot = OPS[name].inputs[0]
    inputs = made(framework, device, "float32", name, i)
    inputs[slot] = _expanded(framework, device, "float32", arrays[slot])
    arrays[slot] = np.broadcast_to(arrays[slot][:1], arrays[slot].shape)
    results = to_numpy(framework, framework.results(name, inputs, attrs))
    for got, expected in zip(results, CASES[name].results(arrays, attrs, "float32"), strict=True):
        cases.assert_close(got, expected, cases.allowed(expected, "float32", CASES[name].cases[i]))


@pytest.mark.parametrize("name", EACH_OP)
def test_numpy_bytes_that_are_not_aligned_or_swapped(dtype, name):
    """NumPy has arrays that start at any byte, and of foreign byte order."""
    if "numpy" not in requested():
        pytest.skip("numpy is not under test")
    if dtype == "bfloat16" and cases.ml_dtypes is None:
        pytest.skip("numpy has no bfloat16 without ml_dtypes")
    i = first_case(name)
    numpy = next(f for f in frameworks() if f.name == "numpy")
    attrs = CASES[name].cases[i].attrs

    for change in (unaligned, swapped) if dtype != "bfloat16" else (unaligned,):

        def changed(array, dtype=dtype, change=change):
            return change(numpy, "cpu", cases.dtype_of(array, dtype), array)

        inputs = {slot: changed(x) for slot, x in cases.inputs(name, i, dtype).items()}
        assert change is swapped or not any(x.flags.aligned for x in inputs.values() if x.itemsize > 1)
        cases.assert_values(to_numpy(numpy, numpy.results(name, inputs, attrs)), name, i, dtype)
        grads = numpy.gradients(name, inputs, attrs, made_gradients(name, i, dtype, changed))
        cases.assert_gradients(to_numpy(numpy, grads), name, i, dtype)


@pytest.mark.parametrize("name", EACH_OP)
def test_inputs_are_left_as_they_are(framework, device, name):
    i = first_case(name)
    inputs = made(framework, device, "float32", name, i)
    attrs = CASES[name].cases[i].attrs
    framework.forward(name, inputs, attrs)
    dys = made_gradients(name, i, "float32", partial(framework.make, device=device))
    framework.gradients(name, inputs, attrs, dys)
    for slot, x in cases.inputs(name, i, "float32").items():
        assert np.array_equal(framework.numpy(inputs[slot]), x), f"{slot} was written to"
    for dy, expected in zip(dys, cases.output_gradients(name, i, "float32"), strict=True):
        assert dy is expected is None or np.array_equal(framework.numpy(dy), expected), "dy was written to"


@pytest.mark.parametrize("name", EACH_OP)
def test_the_same_bits_every_time(framework, device, dtype, name):
    """No atomics, no order of threads: a result is what it is."""
    skip_what_is_the_kernels(framework)
    i = max(range(len(CASES[name].cases)), key=lambda i: math.prod(CASES[name].cases[i].shapes[OPS[name].inputs[0]]))
    attrs = CASES[name].cases[i].attrs
    inputs = made(framework, device, dtype, name, i)
    dys = made_gradients(name, i, dtype, partial(framework.make, device=device))

    def run():
        results = dict(zip(OPS[name].outputs, framework.results(name, inputs, attrs), strict=True))
        return to_numpy(framework, results | framework.gradients(name, inputs, attrs, dys))

    first = run()
    for _ in range(3):
        for slot, again in run().items():
            assert np.array_equal(again, first[slot]), f"{slot} differs from run to run"


# --------------------------------------------------------------------------------------------------- numbers and shapes


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
@pytest.mark.parametrize("name", EACH_OP)
def test_infinities_and_nans_are_as_the_formula_has_them(framework, device, dtype, name, value):
    """One odd element: its neighbours, or its row, feel it as the reference does, and nothing else."""
    skip_what_is_the_kernels(framework)
    i = first_case(name)
    case = CASES[name].cases[i]
    arrays = {slot: x.copy() for slot, x in cases.inputs(name, i, dtype).items()}
    slot = OPS[name].inputs[0]
    arrays[slot].flat[1] = value
    inputs = {s: framework.make(x, cases.dtype_of(x, dtype), device) for s, x in arrays.items()}
    results = to_numpy(framework, framework.results(name, inputs, case.attrs))
    with np.errstate(invalid="ignore", over="ignore"):
        reference = CASES[name].results(arrays, case.attrs, dtype)
    for got, expected in zip(results, reference, strict=True):
        if value in CASES[name].indeterminate:
            got, expected = with_limit(got, expected, CASES[name].indeterminate[value])
        limit = cases.allowed(np.where(np.isfinite(expected), expected, 0), dtype, case)
        assert_close_or_odd(got, expected, limit)


def test_overflow_of_the_result_is_an_infinity(framework, device):
    """A float16 result beyond 65504 is inf, and what is below the smallest normal number is not lost."""
    for number, expected in ((60000.0, math.inf), (2.0**-24, 2.0**-23)):
        t = framework.make(np.full((3, 5), number), "float16", device)
        assert (framework.numpy(framework.forward("add", {"a": t, "b": t}, {})) == expected).all()


@settings(deadline=None, derandomize=True, max_examples=40)
@given(data=st.data())
def test_any_shape(data):
    """Shapes nobody thought of, in every frontend with cheap calls: values, and the shapes of gradients."""
    plain = [f for f in frameworks() if f.name in ("numpy", "torch", "mindspore")]
    if not plain:
        pytest.skip("needs numpy, torch or mindspore")
    framework = data.draw(st.sampled_from(plain), label="framework")
    name = data.draw(st.sampled_from(EACH_OP), label="op")
    dtype = data.draw(st.sampled_from([d for d in DTYPES if d != "bfloat16" or cases.ml_dtypes]), label="dtype")
    case = CASES[name].draw(cases.Draw(data.draw))
    attrs, random = case.attrs, np.random.default_rng(data.draw(st.integers(0, 9), label="seed"))
    arrays = cases.rounded_inputs(case.random(random), dtype, case.wide)
    assume(framework.unable(name, list(case.given.values())) is None)
    inputs = {
        s: a if a is None else framework.make(a, cases.dtype_of(a, dtype, s in case.wide), "cpu")
        for s, a in arrays.items()
    }
    with np.errstate(invalid="ignore"):
        reference = CASES[name].results(arrays, attrs, dtype)
    assume(all(np.isfinite(y).all() for y in reference))  # the mean of no losses is NaN
    for got, expected in zip(to_numpy(framework, framework.results(name, inputs, attrs)), reference, strict=True):
        assert got.shape == expected.shape
        # a short row may have nearly no variance: eps keeps 1 / deviation below 10
        tolerated = cases.Case({}, magnified=10, inner_roundings=case.inner_roundings)
        cases.assert_close(got, expected, cases.allowed(expected, dtype, tolerated))
    wide = [slot in case.wide for slot in OPS[name].outputs]
    dys = tuple(
        framework.make(np.ones(y.shape), cases.dtype_of(y, dtype, one), "cpu") if cases.is_floating(y) else None
        for y, one in zip(reference, wide, strict=True)
    )
    for slot, g in framework.gradients(name, inputs, attrs, dys).items():
        array = arrays.get(slot)  # not there where a number stands for it
        assert (g is None) == (array is None or array.dtype.kind != "f" or slot in case.constants)
        assert g is None or framework.numpy(g).shape == array.shape
