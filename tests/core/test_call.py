"""The call path: all three agree, threads may share it, it frees what it makes; and every build of a kernel agrees."""

from __future__ import annotations

import ctypes
import gc
import io
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from importlib import import_module

import pytest

from aotops import call, library
from aotops.ops import OPS
from aotops.spec import TensorSpec
from aotops.testing.frameworks import race, requested

np = pytest.importorskip("numpy")
import_module("aotops.frontends.numpy")  # call.tensors takes its arrays from then on, whatever test is run alone
WITH_STRUCTS = [call, import_module("aotops.frontends.torch.call")] if "torch" in requested() else [call]

# Results of everything, as hexadecimal digits of a checksum; what differs from process to process is the environment.
RESULTS = """
import zlib, numpy as np
from aotops.frontends import {frontend} as frontend
random = np.random.default_rng(0)
def array(*shape):
    return make(random.normal(size=shape))
def show(name, *results):
    print(name, *(digest(to_numpy(t)) for t in results))
def digest(a):
    return f"{{zlib.crc32(np.ascontiguousarray(a).tobytes()):08x}}"
"""

NUMPY = (
    RESULTS.format(frontend="numpy")
    + """
for dtype in ("float16", "float32", "float64"):
    make, to_numpy = lambda a: a.astype(dtype), lambda a: a
    for shape in ((), (0, 3), (3, 5), (33, 1025), (2, 40000)):
        x, dy = array(*shape), array(*shape)
        show("add", frontend.add(x, dy))
        for approximate in ("none", "tanh"):
            show("gelu", frontend.gelu(x, approximate), frontend.gelu_backward(dy, x, approximate))
        if shape:
            w, b = array(*shape[-1:]), array(*shape[-1:])
            show("layer_norm", frontend.layer_norm(x, shape[-1:], w, b), frontend.layer_norm(x, shape[-1:], None, b))
            show("backward", *frontend.layer_norm_backward(dy, x, shape[-1:], w, b))
            affine = {"weight": w, "bias": b}
            for name in ("rms_norm", "add_layer_norm", "add_rms_norm"):
                more = (dy,) if name.startswith("add") else ()
                result = getattr(frontend, name)(x, *more, shape[-1:], **affine)
                show(name, *(result if more else (result,)))
                dys = (dy, x) if more else dy
                show(name, *getattr(frontend, name + "_backward")(dys, x, *more, shape[-1:], **affine))
            target = random.integers(0, shape[-1], shape[:1])
            show("swiglu", frontend.swiglu(x, dy), *frontend.swiglu_backward(dy, x, dy))
            show("softmax", frontend.softmax(x, 0), frontend.softmax_backward(dy, x))
            if len(target):
                show("cross_entropy", frontend.cross_entropy(x, target, reduction="sum", label_smoothing=0.1))
                show("cross_entropy", frontend.cross_entropy_backward(dy[0, :1].reshape(()), x, target))
"""
)

# Few rows, and many.
PRODUCTS = """
    for rows in (20, 300):
        x, weight, dy = array(rows, 165), array(390, 165), array(rows, 390)
        show("matmul", frontend.matmul(x, weight, False, True))
        show("backward", *frontend.matmul_backward(dy, x, weight, False, True))
        bias, h, cell = array(390), array(rows, 130), array(rows, 130)
        inputs = x[:, 130:].copy(), weight, bias, h, cell
        show("lltm", *frontend.lltm(*inputs), *frontend.lltm_backward((cell, h), *inputs))
        inputs = array(2, 12, 20, rows), array(8, 12, 3, 3), array(8)
        show("conv2d", frontend.conv2d(*inputs), *frontend.conv2d_backward(array(2, 8, 18, rows - 2), *inputs))
"""

SHORT_ROWS = """
    x, dy, w = array(4001, 24), array(4001, 24), array(24)
    show("layer_norm", frontend.layer_norm(x, 24, w, w), *frontend.layer_norm_backward(dy, x, 24, w, w))
    y = frontend.softmax(x)
    show("softmax", y, frontend.softmax_backward(dy, y))
    for shape, axis in (((30001, 3), -1), ((901, 3, 49), 1)):
        x, dy = array(*shape), array(*shape)
        y, mean, var = frontend.batch_norm(x, axis=axis)
        show("batch_norm", y, *frontend.batch_norm_backward((dy, mean, var), x, axis=axis)[:1])
"""

TORCH = (
    RESULTS.format(frontend="torch")
    + """
import torch
for dtype in (torch.bfloat16, torch.float32, torch.float64):
    make = lambda a: torch.tensor(a, dtype=dtype, requires_grad=True)
    to_numpy = lambda t: t.detach().double().numpy()
    for shape in ((), (0, 3), (3, 5), (33, 1025)):
        x, z = array(*shape), array(*shape)
        results = [frontend.add(x, z), frontend.gelu(x), frontend.gelu(x, "tanh")]
        if shape:
            w, b = array(*shape[-1:]), array(*shape[-1:])
            results += [frontend.layer_norm(x, shape[-1:], w, b), frontend.layer_norm(x.mT, x.mT.shape[-1:]).mT]
            results += [frontend.rms_norm(x, shape[-1:], w), *frontend.add_rms_norm(x, z, shape[-1:], w)]
            results += [*frontend.add_layer_norm(x, z, shape[-1:], w, b), frontend.swiglu(x, z), frontend.softmax(x, 0)]
            target = torch.zeros(shape[:1], dtype=torch.int32)
            results += [frontend.cross_entropy(x, target, reduction="sum")]
        show("results", *results)
        sum(results).sum().backward()
        show("gradients", x.grad, z.grad, *((w.grad, b.grad) if shape else ()))
"""
)


@pytest.mark.parametrize("frontend", ["numpy", "torch"])
def test_the_call_paths_agree(python, frontend):
    if frontend not in requested():
        pytest.skip(f"{frontend} is not under test")
    program = {"numpy": NUMPY, "torch": TORCH}[frontend]
    results = {path: python(program, AOTOPS_CALL_PATH=path) for path in call.CALL_PATHS}
    assert results["tensors"].count("\n") > 10
    assert results["addresses"] == results["tensors"]
    assert results["ctypes"] == results["tensors"]


@pytest.mark.parametrize("path", call.CALL_PATHS)
def test_a_process_is_held_to_its_call_path(python, path):
    program = """
import numpy
from aotops import call
from aotops.frontends import numpy as frontend
used = set()
for name in ("tensors", "addresses", "_CtypesPlan"):
    inner = getattr(call, name)
    setattr(call, name, lambda *a, inner=inner, name=name: (used.add(name), inner(*a))[1])
frontend.gelu(numpy.ones(3))
print(call.call_path(), *sorted(used))
"""
    expected = {
        "tensors": "tensors tensors",
        "addresses": "addresses addresses",
        "ctypes": "ctypes _CtypesPlan addresses",
    }
    assert python(program, AOTOPS_CALL_PATH=path).strip() == expected[path]


def test_an_unknown_call_path_is_an_error(python):
    said = python("import aotops.frontends.numpy", expect=1, AOTOPS_CALL_PATH="fast")
    assert "ValueError: AOTOPS_CALL_PATH is 'fast', expected one of ctypes, addresses, tensors" in said


@pytest.mark.parametrize("isa", ["avx10", "AVX2", ""])
def test_an_unknown_instruction_set_is_an_error(python, isa):
    said = python("import aotops.frontends.numpy", expect=1, AOTOPS_CPU_ISA=isa)
    assert f"ValueError: AOTOPS_CPU_ISA is '{isa}', expected baseline, avx2 or avx512" in said


# -------------------------------------------------------------------------------------------- one result on every build


def test_instruction_sets_agree(python):
    """Each build may contract and reorder, and round otherwise; no more than that."""
    program = """
import sys, numpy as np
from aotops.frontends import numpy as frontend
random = np.random.default_rng(0)
results = []
for dtype in ("float16", "float32", "float64"):
    for shape in ((1,), (7,), (3, 33), (5, 1025), (2, 40000)):
        x, dy, w, b = (random.normal(size=s).astype(dtype) for s in (shape, shape, shape[-1:], shape[-1:]))
        results += [frontend.add(x, dy), frontend.layer_norm(x, shape[-1], w, b)]
        results += frontend.layer_norm_backward(dy, x, shape[-1], w, b)
        results += [frontend.rms_norm(x, shape[-1], w), *frontend.add_layer_norm(x, dy, shape[-1], w, b)]
        results += frontend.rms_norm_backward(dy, x, shape[-1], w, bias=b)
        results += [*frontend.add_rms_norm(x, dy, shape[-1], w), frontend.swiglu(x, dy), frontend.softmax(x)]
        results += frontend.swiglu_backward(dy, x, dy)
        for approximate in ("none", "tanh"):
            results += [frontend.gelu(8 * x, approximate), frontend.gelu_backward(dy, 8 * x, approximate)]
np.savez(sys.stdout.buffer, *results)
"""
    found = {}
    for isa in ("baseline", "avx2", "avx512"):
        environment = {**os.environ, "AOTOPS_CPU_ISA": isa}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
        found[isa] = list(np.load(io.BytesIO(done.stdout)).values())
    for isa in ("avx2", "avx512"):
        for a, b in zip(found["baseline"], found[isa], strict=True):
            u = np.finfo(a.dtype).eps
            work = np.finfo(np.float32 if a.dtype == np.float16 else a.dtype).eps
            # each may be half a unit from the truth, and 32 roundings of the arithmetic off (cases/)
            limit = u * np.abs(a.astype(float)) + 32 * work * max(1, np.abs(a.astype(float)).max())
            assert (np.abs(a.astype(float) - b.astype(float)) <= limit).all()


def test_the_number_of_threads_changes_nothing(python):
    results = {n: python(NUMPY + PRODUCTS + SHORT_ROWS, OMP_NUM_THREADS=str(n)) for n in (1, 2, 5)}
    assert results[1] == results[2] == results[5]


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_arrays_larger_than_the_caches(kind):
    """Stored past the caches: what a small array gives, to a few roundings; rows may be taken together otherwise."""
    from aotops.frontends import numpy as frontend

    random = np.random.default_rng(0)
    few, many = 64, (1 << 26) // (64 * 1031 * np.dtype(kind).itemsize) + 1
    x, dy = (random.normal(size=(few, 1031)).astype(kind) for _ in range(2))
    w = random.normal(size=1031).astype(kind)
    wide_x, wide_dy = np.tile(x, (many, 1)), np.tile(dy, (many, 1))
    for small, wide in (
        (frontend.add(x, dy), frontend.add(wide_x, wide_dy)),
        (frontend.gelu(x), frontend.gelu(wide_x)),
        (frontend.gelu_backward(dy, x, "tanh"), frontend.gelu_backward(wide_dy, wide_x, "tanh")),
        (frontend.layer_norm(x, 1031, w), frontend.layer_norm(wide_x, 1031, w)),
        (frontend.layer_norm_backward(dy, x, 1031, w)[0], frontend.layer_norm_backward(wide_dy, wide_x, 1031, w)[0]),
    ):
        eps, copies = np.finfo(kind).eps, wide.reshape(many, *small.shape)
        for furthest in (copies.min(0), copies.max(0)):  # of all copies; NumPy's float16 is too slow to compare each
            np.testing.assert_allclose(furthest, small, rtol=8 * eps, atol=8 * eps)


# ----------------------------------------------------------------------------------------------- what attributes may be


class Index:
    def __index__(self):
        return 1


ODD = [
    # the same number as one that is taken, of a type that is not
    ("softmax", "dim", 1, 1.0),
    ("softmax", "dim", 1, 1 + 0j),
    ("softmax", "dim", 1, Fraction(1)),
    ("softmax", "dim", 1, np.float32(1)),
    ("softmax", "dim", 1, np.ones(1)),
    ("softmax", "dim", 1, np.array(1.0)),
    ("softmax", "dim", 1, "1"),
    ("softmax", "dim", 1, None),
    ("softmax", "dim", 1, 2**64 + 1),
    ("softmax", "dim", 1, True),
    ("layer_norm", "eps", 1, 1 + 0j),
    ("layer_norm", "eps", 1, "1"),
    ("layer_norm", "eps", 1, np.ones(2)),
    ("layer_norm", "eps", 1, 10**400),
    ("layer_norm", "eps", 1, None),
    ("layer_norm", "eps", 1, True),
    ("layer_norm", "normalized_shape", 3, 3.0),
    ("layer_norm", "normalized_shape", (3,), (3.0,)),
    ("layer_norm", "normalized_shape", (3,), ("3",)),
    ("layer_norm", "normalized_shape", 3, None),
    ("layer_norm", "normalized_shape", 3, 2**64 + 3),
    ("gelu", "approximate", "tanh", b"tanh"),
    ("gelu", "approximate", "tanh", "tanh\0"),
    ("gelu", "approximate", "tanh", "\0tanh"),
    ("gelu", "approximate", "tanh", "Tanh"),
    ("gelu", "approximate", "tanh", None),
    ("matmul", "transpose_b", True, 1),
    ("matmul", "transpose_b", True, 1.0),
    ("matmul", "transpose_b", True, None),
    ("conv2d", "stride", 1, 1.0),
    ("conv2d", "stride", 1, np.ones(2)),
    ("conv2d", "stride", (1, 1), (1.0, 1)),
    ("conv2d", "stride", 1, 2**64 + 1),
    ("conv2d", "stride", 1, (1, 1, 1)),
    ("cross_entropy", "ignore_index", 1, 1.0),
    ("cross_entropy", "ignore_index", 1, 2**64 + 1),
    ("cross_entropy", "label_smoothing", 1, "1"),
    ("cross_entropy", "reduction", "sum", "sum\0"),
]
ARRAYS = {
    "softmax": (np.ones((2, 3)),),
    "layer_norm": (np.ones((2, 3)),),
    "gelu": (np.ones((2, 3)),),
    "matmul": (np.ones((2, 3)), np.ones((2, 3))),
    "conv2d": (np.ones((1, 1, 3, 3)), np.ones((1, 1, 2, 2))),
    "cross_entropy": (np.ones((2, 3)), np.zeros(2, np.int64)),
}


@pytest.mark.parametrize(("name", "attr", "taken", "odd"), ODD, ids=lambda value: repr(value)[:30])
@pytest.mark.parametrize("frontend", ["numpy", "torch"])
def test_attributes_are_of_their_type_whatever_came_before(frontend, name, attr, taken, odd):
    """Python has 1 == 1.0 == True: what was bound to one is not for the other. The error names the argument."""
    if frontend not in requested():
        pytest.skip(f"{frontend} is not under test")
    function = getattr(import_module(f"aotops.frontends.{frontend}"), name)
    arrays, rest = ARRAYS[name], {"normalized_shape": 3} if attr == "eps" else {}
    if frontend == "torch":
        arrays = tuple(map(import_module("torch").from_numpy, arrays))
    said = []
    for _ in range(2):  # before, and after
        with pytest.raises((TypeError, ValueError), match=f"{name}: .*{attr}") as error:
            function(*arrays, **rest, **{attr: odd})
        said.append(str(error.value))
        function(*arrays, **rest, **{attr: taken})
    assert said[0] == said[1]


@pytest.mark.parametrize("value", [1, np.int64(1), Index()], ids=lambda value: type(value).__name__)
def test_integers_of_any_type(value):
    from aotops.frontends import numpy as frontend

    x = np.arange(6.0).reshape(2, 3)
    assert (frontend.softmax(x, value) == frontend.softmax(x, -1)).all()


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"])
def test_an_eps_of_nan_is_nan(name):
    from aotops.frontends import numpy as frontend

    x = np.arange(6.0).reshape(2, 3)
    rows = (x, x) if name.startswith("add") else (x,)
    y = getattr(frontend, name)(*rows, 3, eps=float("nan"))
    assert np.isnan(y[0] if isinstance(y, tuple) else y).all()


# ------------------------------------------------------------------------------------------ what Python does to modules


@pytest.mark.parametrize("frontend", ["numpy", "torch"])
def test_public_functions_are_pickled_by_name(frontend):
    if frontend not in requested():
        pytest.skip(f"{frontend} is not under test")
    module = import_module(f"aotops.frontends.{frontend}")
    with_backward = [name for name, op in OPS.items() if op.has_gradient]
    functions = [*OPS, *(f"{name}_backward" for name in with_backward if frontend == "numpy")]
    for name in functions:
        function = getattr(module, name)
        assert pickle.loads(pickle.dumps(function)) is function


@pytest.mark.parametrize("frontend", ["numpy", "torch"])
def test_reloading_the_call_path(python, frontend):
    if frontend not in requested():
        pytest.skip(f"{frontend} is not under test")
    program = f"""
import importlib, numpy as np
from aotops import call
from aotops.frontends import {frontend} as frontend
x = np.ones((2, 3)) if "{frontend}" == "numpy" else importlib.import_module("torch").ones(2, 3, requires_grad=True)
before = frontend.gelu(x)
importlib.reload(call)
assert (frontend.gelu(x) == before).all()
frontend.softmax(x, 0)
importlib.reload(frontend)
assert (frontend.gelu(x) == before).all()
print("alive")
"""
    if frontend == "torch":  # torch has an operator of that name already, and says so
        program = program.replace("importlib.reload(frontend)\n", "")
    assert python(program).strip() == "alive"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_computes_after_its_parent(python):
    """The threads of the parent are not in the child. The alarm only ends a child that waits for them."""
    program = """
import os, signal, numpy as np
from aotops.frontends import numpy as frontend
x, a = np.ones(1 << 20), np.ones((300, 300))
expected = frontend.gelu(x), frontend.matmul(a, a)
child = os.fork()
if child == 0:
    signal.alarm(200)
    same = all((y == e).all() for y, e in zip((frontend.gelu(x), frontend.matmul(a, a)), expected))
    os._exit(0 if same else 1)
print(os.waitpid(child, 0)[1])
frontend.gelu(x)
"""
    assert python(program, OMP_NUM_THREADS="2").strip() == "0"


# -------------------------------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("size", [4, 8192])
def test_threads_share_a_bound_builtin(size):
    """Arguments kept anywhere but on a call's own stack would be mixed up here. A large kernel runs while other threads
    have the interpreter."""
    run = call.tensors(OPS["add"], (1.0, None))

    def work(i):
        a, b, y = np.full(size, float(i)), np.zeros(size), np.empty(size)
        wrong = 0
        for _ in range(5000):
            y.fill(-1)
            run(a, b, y)
            wrong += (y != i).any()
        return wrong

    assert race(work) == 0


def test_threads_share_a_plan():
    spec = TensorSpec((4,), "float64")
    run = call.addresses(OPS["add"], (1.0, None), "cpu", (spec, spec, spec))

    def work(i):
        a, b, y = np.full(4, float(i)), np.zeros(4), np.empty(4)
        pointers = [t.ctypes.data for t in (a, b, y)]
        wrong = 0
        for _ in range(3000):
            y.fill(-1)
            run(0, 0, *pointers)
            wrong += y[0] != i
        return wrong

    assert race(work) == 0


def test_threads_bind_at_once(python):
    """The first calls of an operator come from many threads."""
    program = """
import sys, threading, numpy as np
from aotops.frontends import numpy as frontend
sys.setswitchinterval(1e-6)
wrong, barrier = [], threading.Barrier(8)
def work(i):
    x = np.arange(6.0).reshape(2, 3) * (i + 1)
    barrier.wait()
    for eps in range(1, 30):
        y = frontend.layer_norm(x, 3, eps=float(eps))
        z = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + eps)
        if abs(y - z).max() > 1e-12:
            wrong.append(eps)
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
print(len(wrong))
"""
    assert python(program).strip() == "0"


def test_threads_keep_their_own_errors():
    """Each thread raises the text of its own failed call."""
    run = call.tensors(OPS["add"], (1.0, None))

    def work(i):
        a, b = np.zeros(4), np.zeros(i + 5)
        wrong = 0
        for _ in range(2000):
            try:
                run(a, b, a)
                wrong += 1
            except ValueError as error:
                wrong += f"({i + 5},)" not in str(error)
        return wrong

    assert race(work) == 0


# -------------------------------------------------------------------------------------------------------- what it costs


def test_plans_are_freed(monkeypatch):
    """Each is freed once, when the last reference to it goes."""
    lib = library.load()
    freed = []
    spec = TensorSpec((3,), "float32")
    if call.call_path() == "ctypes":
        monkeypatch.setattr(lib, "aot_plan_delete", freed.append)
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda capsule: freed.append(capsule))
    destructor = ctypes.cast(callback, ctypes.c_void_p).value
    real = library.function
    monkeypatch.setattr(library, "function", lambda s: destructor if s == "aot_plan_capsule_delete" else real(s))
    run = call.addresses.__wrapped__(OPS["gelu"], ("none",), "cpu", (spec, spec))
    gc.collect()
    assert not freed
    del run
    gc.collect()
    assert len(freed) == 1


def test_plans_do_not_leak():
    """Plans of ever new shapes, more than are kept, take no more memory than before."""
    if not os.path.exists("/proc/self/statm"):
        pytest.skip("needs Linux")

    def plans(n):
        for i in range(1, n):
            spec = TensorSpec((i,) * 16, "float32")
            call.addresses.__wrapped__(OPS["gelu"], ("none",), "cpu", (spec, spec))

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    plans(5000)
    before = resident()
    plans(50000)
    # each has at least 512 bytes: 25 MB, were they kept
    assert resident() - before < 8 << 20


def test_a_call_leaves_reference_counts_alone():
    run = call.tensors(OPS["layer_norm"], ((3,), 1e-5, 0.0))
    arrays = [np.zeros((2, 3)), np.ones(3), np.ones(3), np.empty((2, 3))]
    before = [sys.getrefcount(a) for a in arrays]
    for _ in range(100):
        assert run(*arrays, None) is None
    for _ in range(100):
        with pytest.raises(ValueError, match="weight"):
            run(arrays[0], np.ones(4), arrays[2], arrays[3], None)
    assert [sys.getrefcount(a) for a in arrays] == before


# Warmed up beyond what is kept of them, the process is as large as it gets.
VALUES = """
import os, numpy as np
from aotops.frontends import {frontend} as frontend
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
def values(first, n):
    for i in range(first, first + n):
        call(i)
        try:
            refused(i)
        except (TypeError, ValueError):
            pass
{calls}
values(0, {warm_up})
before = resident()
values({warm_up}, 4000)
print((resident() - before) >> 20)
"""
CALLS = {
    "numpy": """
x, target = np.ones((2, 3)), np.zeros(2, np.int64)
def call(i):
    frontend.cross_entropy(x, target, label_smoothing=i / 1e6)
def refused(i):
    frontend.cross_entropy(x, target, label_smoothing=2.0 + i)
""",
    "torch": """
import torch
x, target = torch.ones(2, 3, requires_grad=True), torch.zeros(2, dtype=torch.int64)
def call(i):
    frontend.cross_entropy(x, target, label_smoothing=i / 1e6).backward()
def refused(i):
    frontend.layer_norm(x, 3, eps=float("nan"))
    frontend.cross_entropy(x, target, label_smoothing=2.0 + i)
""",
}


@pytest.mark.parametrize("frontend", CALLS)
def test_attributes_of_ever_new_values_do_not_pile_up(python, frontend):
    """An annealed label_smoothing has thousands of values: at some 10 KB each, 4,000 that are kept take 40 MB. What is
    freed only now and then, with the garbage that refers to itself, is no more than what the warm-up leaves."""
    if frontend not in requested():
        pytest.skip(f"{frontend} is not under test")
    if not os.path.exists("/proc/self/statm"):
        pytest.skip("needs Linux")
    assert int(python(VALUES.format(frontend=frontend, calls=CALLS[frontend], warm_up=1500))) < 16


# ----------------------------------------------------------------------------------------------- what a builtin refuses


def test_a_plan_has_no_more_tensors_than_its_operator():
    spec, array = TensorSpec((3,), "float64"), (ctypes.c_double * 3)()
    for n in (0, 2, 4, 20):
        with pytest.raises((TypeError, ValueError, RuntimeError), match="add"):
            call.addresses(OPS["add"], (1.0, None), "cpu", (spec,) * n)(0, 0, *[ctypes.addressof(array)] * n)


def test_a_builtin_writes_only_where_it_may():
    run = call.tensors(OPS["add"], (1.0, None))
    a = np.ones(4)
    constant = np.zeros(4)
    constant.flags.writeable = False
    for y in (constant, np.frombuffer(bytes(32))):
        with pytest.raises((TypeError, ValueError, RuntimeError), match="add: y"):
            run(a, a, y)
        assert not y.any()


def test_outputs_that_partly_overlap_are_refused():
    run = call.tensors(OPS["add"], (1.0, None))
    buffer = np.arange(6.0)
    with pytest.raises(ValueError, match="add: y"):
        run(buffer[:4], np.ones(4), buffer[1:5])
    assert (buffer == np.arange(6.0)).all()


def test_a_builtin_takes_a_tensor_for_each_slot():
    run = call.tensors(OPS["add"], (1.0, None))
    a = np.zeros(3)
    with pytest.raises(RuntimeError, match="add: 2 arguments given, expected 3"):
        run(a, a)
    with pytest.raises(TypeError, match="add: b is None, expected a tensor"):
        run(a, None, a)
    with pytest.raises(TypeError, match="add: b is a list, expected a tensor"):
        run(a, [0.0], a)
    with pytest.raises(ValueError, match="add: b is not contiguous"):
        run(a, np.zeros(6)[::2], a)
    with pytest.raises(TypeError, match="add: a has dtype of another kind, expected float16"):
        run(np.zeros(3, ">f8"), a, a)


def test_a_builtin_by_address_takes_ints():
    spec = TensorSpec((3,), "float64")
    run = call.addresses(OPS["add"], (1.0, None), "cpu", (spec, spec, spec))
    with pytest.raises(RuntimeError, match="2 arguments given, expected 5"):
        run(0, 0)
    a = np.zeros(3)
    with pytest.raises(TypeError):
        run(0, 0, a, a, a)


def test_a_device_without_entries_is_named():
    if library.has_cuda():
        pytest.skip("needs a library without CUDA entries")
    spec = TensorSpec((3,), "float32")
    with pytest.raises(NotImplementedError, match=r"gelu: .*CUDA.*make lib"):
        call.addresses(OPS["gelu"], ("none",), "cuda", (spec, spec))


def test_a_function_without_a_frame_is_called_as_before(python):
    """With and without its frame. No argument is a tensor, so every call falls back."""
    program = """
from aotops.frontends.torch import call as torch_call
from aotops.ops import OPS
torch_call.lib()
def bind(*attrs):
    raise ValueError(attrs)
def fallback(*args, **kwargs):
    return args, kwargs
builtin = torch_call.public(OPS["layer_norm"], bind, fallback)
def function(*args, **kwargs):
    return builtin(*args, **kwargs)
class Class:
    method = function
results = []
for installed in (False, True):
    if installed:
        torch_call.install_vectorcall(function, builtin)
    here = Class()
    result = [function(), function(1, 2, eps=3), function(*(1, 2)), function(x=1), function(1, 2, 3, 4, 5, 6)]
    result += [list(map(function, [1], [2])), here.method(1)[0][0] is here, here.method(1, eps=2)[1]]
    for _ in range(100):  # until CPython specializes the call
        result.append(function(1, (2,), eps=3))
    results.append(result)
assert results[0] == results[1], results
print("same")
"""
    if call.call_path() == "ctypes" or "torch" not in requested():
        pytest.skip("needs CPython and torch")
    assert python(program).strip() == "same"


def test_an_operator_without_a_backward_is_named():
    if "torch" not in requested():
        pytest.skip("torch is not under test")
    torch, frontend = import_module("torch"), import_module("aotops.frontends.torch")
    if not frontend.tensors.READS_TENSORS:
        pytest.skip("this torch has no gate: its calls are served in Python")
    eager = frontend.eager.Eager(replace(OPS["gelu"], backward=None), ("none",), None)
    y = eager(torch.ones(3, requires_grad=True))
    with pytest.raises(NotImplementedError, match="gelu has no derivative"):
        y.sum().backward()


# -------------------------------------------------------------------------------------- structs that Python mirrors


def _mirrors(module):
    structs = [s for s in vars(module).values() if isinstance(s, type) and issubclass(s, ctypes.Structure)]
    return [s for s in structs if s.__module__ == module.__name__ and s.__name__ != "_MethodDef"]


MIRRORS = pytest.mark.parametrize(
    "struct", [struct for module in WITH_STRUCTS for struct in _mirrors(module)], ids=lambda s: s.__name__
)


@MIRRORS
def test_a_struct_of_another_size_is_refused(monkeypatch, struct):
    """``_MethodDef`` is CPython's own, all others are the library's."""
    module = import_module(struct.__module__)
    set_up = module.lib
    set_up.__wrapped__()

    class Longer(ctypes.Structure):
        _fields_ = [*struct._fields_, ("more", ctypes.c_int64)]

    Longer.__name__ = struct.__name__
    monkeypatch.setattr(module, struct.__name__, Longer)
    name, size = struct.__name__.removeprefix("_"), ctypes.sizeof(struct)
    expected = rf"libaotops.so: aot_\w+_structs: sizeof\({name}\) is {size}, expected {size + 8}: rebuild it"
    with pytest.raises(library.LibraryError, match=expected):
        set_up.__wrapped__()


@MIRRORS
def test_a_struct_with_another_order_of_members_is_refused(monkeypatch, struct):
    module = import_module(struct.__module__)
    (first, kind), *others = struct._fields_

    class Swapped(ctypes.Structure):
        _fields_ = [*others, (first, kind)]

    Swapped.__name__ = struct.__name__
    monkeypatch.setattr(module, struct.__name__, Swapped)
    with pytest.raises(library.LibraryError, match=r"_structs: (sizeof\()?\w+[.)]\w* is \d+, expected \d+: rebuild it"):
        module.lib.__wrapped__()


@pytest.mark.parametrize("symbol", ["aot_call_structs", "aot_torch_structs"])
def test_structs_of_another_version_are_refused(symbol):
    with pytest.raises(library.LibraryError, match=rf"libaotops.so: {symbol}: version is \d+, expected 0: rebuild it"):
        call.check_structs(symbol, 0, [])
