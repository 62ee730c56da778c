"""The core and the library, without a framework: definitions, entries, inference, error texts."""

from __future__ import annotations

import ast
import ctypes
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from aotops import call, library
from aotops.extra import encode
from aotops.frontends import FRONTENDS
from aotops.infer import infer, infer_symbolic
from aotops.op import Op, Product, operator
from aotops.ops import BUILTIN, OPS
from aotops.spec import FLOATING, INTEGERS, TensorSpec
from aotops.testing.cases import CASES, DTYPES, Draw, dtypes, inputs, rounded

PROGRAMS = Path(__file__).parents[1] / "programs"
PACKAGE = Path(call.__file__).parent
BACKWARDS = {op.backward.name: op.backward for op in OPS.values() if op.backward}
WITH_KERNEL = [op for op in (*OPS.values(), *BACKWARDS.values()) if op.has_kernel]
EACH_KERNEL = pytest.mark.parametrize("op", WITH_KERNEL, ids=lambda op: op.name)
DEVICES = ("cpu", "cuda") if library.has_cuda() else ("cpu",)

# -------------------------------------------------------------------------------------------------------------- imports


@pytest.mark.parametrize(
    "module", ["aotops", "aotops.ops", "aotops.call", "aotops.frontends.explicit_gradients", "aotops.frontends.stubs"]
)
def test_the_core_imports_the_standard_library_alone(python, module):
    program = f"import sys; before = set(sys.modules); import {module}; print(*sorted(set(sys.modules) - before))"
    loaded = {name.partition(".")[0] for name in python(program).split()}
    # an editable install has setuptools' finder loaded, under a name of its own
    foreign = {name for name in loaded - {"aotops"} - sys.stdlib_module_names if not name.startswith("__editable__")}
    assert not foreign


TOOLS = {"cli.py"}
"""Modules of the package that are no part of the core, beside the folders of tools: they may import frontends."""
CORE = sorted(file for file in (*PACKAGE.glob("*.py"), *PACKAGE.glob("ops/*.py")) if file.name not in TOOLS)


@pytest.mark.parametrize("file", CORE, ids=lambda file: file.stem)
def test_the_core_imports_no_frontend(file):
    package = ["aotops", *file.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            given = getattr(node, "module", None)
            inside = package[: len(package) + 1 - node.level] if getattr(node, "level", 0) else []
            base = [*inside, *(given.split(".") if given else [])]
            names = [".".join([*base, alias.name]) for alias in node.names]
            assert not [name for name in names if f"{name}.".startswith("aotops.frontends.")]


def test_the_core_runs_without_a_framework(python):
    """A kernel called by address, in a process that has nothing but ctypes."""
    program = """
import sys, ctypes
from aotops import call
from aotops.ops import BUILTIN, OPS
from aotops.spec import TensorSpec
a, b, y = ((ctypes.c_float * 3)(1, 2, 3), (ctypes.c_float * 3)(10, 20, 30), (ctypes.c_float * 3)())
spec = TensorSpec((3,), "float32")
call.addresses(OPS["add"], (1.0, None), "cpu", (spec, spec, spec))(0, 0, *map(ctypes.addressof, (a, b, y)))
print(list(y), "numpy" in sys.modules)
"""
    assert python(program).split("\n")[0] == "[11.0, 22.0, 33.0] False"


# ------------------------------------------------------------------------------------------------------------ the table


def test_the_table_has_a_row_for_each_operator():
    assert set(CASES) == set(OPS)


@pytest.mark.parametrize("name", OPS)
def test_a_row_tries_what_must_be_tried(name):
    """Values on an empty, a one-element and a plain case; every optional input given and not given."""
    cases = CASES[name].cases
    assert len({str(case) for case in cases}) == len(cases), "two cases are the same"
    sizes = {math.prod(next(iter(case.shapes.values()))) for case in cases}
    assert {0, 3 if name.startswith("qkv_") else 1} <= sizes  # a q, a k and a v
    assert max(sizes) > 32768, "none is large enough for several threads"
    assert CASES[name].bad, "no call is refused"
    assert CASES[name].bench, "no speed is measured"
    for case in cases:
        assert set(case.shapes) == set(OPS[name].inputs) - set(case.attrs)  # a number in place of a tensor
    for slot in OPS[name].inputs:
        given = {case.shapes.get(slot) is not None for case in cases}
        assert given == ({True, False} if slot in OPS[name].optional else {True}), slot


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if "h" in op.outputs])
def test_the_sums_of_the_table_are_exact(name):
    """The references take it that h is x + residual, not rounded."""
    for dtype in DTYPES:
        for i, _ in enumerate(CASES[name].cases):
            arrays = inputs(name, i, dtype)
            h = arrays["x"] + arrays["residual"]
            assert (rounded(h, dtypes(name, i, dtype)["h"]) == h).all()


# -------------------------------------------------------------------------------------------------------------- binary


def _tool(*command: str) -> str:
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_the_library_exports_nothing_but_its_own_functions():
    symbols = [line.split()[-1] for line in _tool("nm", "-D", "--defined-only", str(library.path())).splitlines()]
    assert symbols
    assert not [s for s in symbols if not s.startswith(("aot_", "__tvm_ffi_"))]


def test_the_library_needs_no_driver_and_no_framework():
    needed = re.findall(r"NEEDED.*\[(.*)\]", _tool("readelf", "-d", str(library.path())))
    assert needed
    known = ("libc.", "libm.", "libstdc++.", "libgcc_s.", "libgomp.", "libpthread.", "librt.", "libdl.", "ld-linux")
    assert not [name for name in needed if not name.startswith(known)]


def test_the_library_asks_for_python_weakly():
    """It loads into a program that has no Python."""
    symbols = _tool("nm", "-D", "--undefined-only", str(library.path()))
    assert not re.findall(r" U (_?Py\w+)", symbols)
    assert re.findall(r" w (_?Py\w+)", symbols)


def test_the_library_stays_loaded_and_is_bound_at_once():
    flags = _tool("readelf", "-d", str(library.path()))
    assert "NODELETE" in flags
    assert "NOW" in flags


@EACH_KERNEL
def test_each_kernel_has_its_entry_and_companions(op: Op):
    for device in DEVICES:
        entry = op.library.entry_name(op, device)
        for symbol in (entry, f"{entry}Init", f"{entry}InferShape", f"{entry}InferType"):
            assert op.library.address(symbol), f"{symbol} is not exported"


def test_each_entry_has_its_operator():
    """No kernel without a definition."""
    symbols = _tool("nm", "-D", "--defined-only", str(library.path()))
    entries = set(re.findall(r"\baot_(\w+)_(?:cpu|cuda)Init\b", symbols))
    # aotops/ops/_adamw.py, cuda_src/host/hosted.cpp, aotops/ops/_linear_accumulate.py
    elsewhere = {"adamw", "hosted", "linear_accumulate"}
    assert entries == {op.name for op in WITH_KERNEL} | elsewhere


def test_a_missing_entry_is_named():
    unknown = Op("no_such_op", lambda x: ((x,), ()), ("x",), ("y",))
    with pytest.raises(NotImplementedError, match=r"no_such_op: .* has no cpu entry \(aot_no_such_op_cpu\)"):
        BUILTIN.entry_name(unknown, "cpu")


def test_definitions_are_whole():
    for op in (*OPS.values(), *BACKWARDS.values()):
        for name in op.same_spec_as.values():
            assert name in op.inputs
        for name, source in op.alias.items():
            assert name in op.outputs
            assert name not in op.slots
            assert source in op.slots, f"{op.name}: {name} is nothing that the entry takes or writes"
            assert source in (*op.inputs, *op.outputs)
            # a caller who wants the one may go without the other
            assert not op.has_kernel or (name in op.optional) == (source in op.optional)
        assert op.optional | op.vmappable <= {*op.slots, *op.alias}
        assert set(op.same_spec_as) <= set(op.entry_outputs)
        assert sorted([*op.same_spec_as, *op.shapes]) == sorted(op.results), (
            f"{op.name}: the shape of each result stands once"
        )
        assert op.results == (*(y for y in op.outputs if y not in op.alias), *op.residuals)
        assert op.slots == (*op.inputs, *op.results, *op.workspace)
        assert len(set(op.slots)) == len(op.slots)
        if op.backward:
            assert set(op.saved) <= set(op.slots), f"{op.backward.name} takes what {op.name} does not have"


# ----------------------------------------------------------------------------------------------------------- inference

TYPE_IDS = {"bool": 30, "int32": 34, "int64": 35, "float16": 42, "float32": 43, "float64": 44, "bfloat16": 45}
ROOM = 4096


@pytest.fixture(scope="session")
def infer_host(tmp_path_factory):
    compiler = shutil.which("g++") or pytest.skip("g++ is not installed")
    built = tmp_path_factory.mktemp("infer") / "infer_host.so"
    command = [compiler, "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-o", built, PROGRAMS / "infer_host.cpp"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(built))


@pytest.mark.parametrize("more", [(), ("-DAOT_HAVE_SM90",)], ids=["any", "sm90"])
def test_convolutions_of_groups_are_planned_as_they_are_defined(more, tmp_path):
    """Sizes alone decide how CUDA kernels divide them, and how much memory they take."""
    compiler = shutil.which("g++") or pytest.skip("g++ is not installed")
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-DAOT_ISA=cuda", f"-I{PROGRAMS.parents[1]}/cuda_src"]
    subprocess.run([*command, *more, PROGRAMS / "grouped_plan.cpp", "-o", tmp_path / "planned"], check=True)
    done = subprocess.run([tmp_path / "planned"], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    assert int(done.stdout) > 12000


class Extra:
    """The library's own host of attributes."""

    def __init__(self, op: Op, attrs, specs, outputs):
        text = encode(op, attrs, [spec is not None for spec in specs] + [name in outputs for name in op.entry_outputs])
        self.pointer = ctypes.c_void_p(library.load().aot_extra_new(text.encode()))

    def __enter__(self):
        return self.pointer

    def __exit__(self, *_):
        library.load().aot_extra_delete(self.pointer)


def _c_arrays(shapes):
    ndims = (ctypes.c_int * max(len(shapes), 1))(*map(len, shapes))
    rows = [(ctypes.c_int64 * len(shape))(*shape) if shape else None for shape in shapes]
    pointers = (ctypes.POINTER(ctypes.c_int64) * max(len(shapes), 1))()
    for i, row in enumerate(rows):
        if row is not None:
            pointers[i] = ctypes.cast(row, ctypes.POINTER(ctypes.c_int64))
    return ndims, pointers, rows


def infer_in_c(host, op: Op, attrs, specs, outputs, device="cpu"):
    """The shapes and dtypes of ``outputs`` as the library's companions tell them."""
    given = [spec for spec in specs if spec is not None]
    entry, many = op.library.entry_name(op, device), len(op.entry_outputs) > 1
    out = (ctypes.c_int64 * ROOM)()
    with Extra(op, attrs, specs, outputs) as extra:
        ndims, shapes, _keep = _c_arrays([spec.shape for spec in given])
        function = ctypes.c_void_p(op.library.address(f"{entry}InferShape"))
        host.infer_shape(function, many, ndims, shapes, extra, out)
        assert out[0] == len(outputs)
        found, at = [], 1
        for _ in outputs:
            found.append(tuple(out[at + 1 : at + 1 + out[at]]))
            at += 1 + out[at]
        types = (ctypes.c_int * len(given))(*(TYPE_IDS[spec.dtype] for spec in given))
        host.infer_type(ctypes.c_void_p(op.library.address(f"{entry}InferType")), many, types, len(given), extra, out)
        assert out[0] == len(outputs)
        names = {number: name for name, number in TYPE_IDS.items()}
        return {name: TensorSpec(found[i], names[out[1 + i]]) for i, name in enumerate(outputs)}


def run_in_c(op: Op, attrs, specs, outputs) -> str:
    """The entry's message for these specs of its inputs and outputs, or nothing."""
    slots = [*specs, *(outputs.get(name) for name in op.entry_outputs)]
    memory = ctypes.create_string_buffer(1 << 20)
    base = ctypes.addressof(memory) // 64 * 64 + 64
    try:
        run = call.addresses(op, attrs, "cpu", tuple(slots))
        run(0, 0, *(base for spec in slots if spec is not None))
    except (TypeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def inferred(op: Op, attrs, specs):
    """The specs of everything that the CPU's entry writes, or the error."""
    try:
        return infer(op, attrs, tuple(specs)), ""
    except (TypeError, ValueError) as error:
        return None, f"{type(error).__name__}: {error}"


def _takes(op, attrs, specs):
    try:
        infer(op, attrs, specs)
    except ValueError:
        return False
    return True


@st.composite
def good_calls(draw):
    """An operator or its backward, its attributes and the specs of inputs that it takes."""
    op = draw(st.sampled_from(list(OPS.values())))
    case, dtype = CASES[op.name].draw(Draw(draw)), draw(st.sampled_from(FLOATING))
    shapes = dict(case.shapes)
    if op.broadcast:  # by the frontend
        shapes = dict.fromkeys(shapes, np.broadcast_shapes(*shapes.values()))
    integers = draw(st.sampled_from(INTEGERS))  # one, since some come in pairs
    dtypes = {slot: integers if slot in case.classes else case.dtypes.get(slot, dtype) for slot in shapes}
    specs = {slot: None if shape is None else TensorSpec(shape, dtypes[slot]) for slot, shape in shapes.items()}
    inputs, attrs = op.bind(**specs, **case.attrs)
    may_be_none = {name for name, kind in op.attrs.items() if kind.endswith("?") and name in op.public_attrs}
    named = zip(op.attrs, attrs, strict=True)
    fewer = op.canonical([None if name in may_be_none and draw(st.booleans()) else value for name, value in named])
    attrs = fewer if _takes(op, fewer, inputs) else op.canonical(attrs)  # rope's shapes may need a rotary_dim
    if op.backward is None or not op.backward.has_kernel or draw(st.booleans()):
        return op, attrs, list(inputs)
    known = dict(zip(op.inputs, inputs, strict=True)) | infer(op, attrs, inputs)
    known |= {f"d{y}": known[y] for y in op.outputs}
    optional = op.backward.optional - {*op.saved_for}  # without which some gradients cannot be computed
    absent = {slot for slot in op.backward.inputs if slot in optional and draw(st.booleans())}
    every = [known[slot] for slot in op.backward.inputs]
    some = [None if slot in absent else known[slot] for slot in op.backward.inputs]
    return op.backward, attrs, some if _takes(op.backward, attrs, tuple(some)) else every  # cos and sin are a pair


@settings(deadline=None, derandomize=True, max_examples=300)
@given(call=good_calls(), data=st.data())
def test_mindspores_companions_infer_the_same(infer_host, call, data):
    op, attrs, specs = call
    outputs = [s for s in op.entry_outputs if not op.is_optional(s) or data.draw(st.booleans())]
    assume(outputs)
    for device in DEVICES:
        expected = infer(op, attrs, tuple(specs), device)
        found = infer_in_c(infer_host, op, attrs, specs, outputs, device)
        for slot in {*outputs} & {*op.workspace}:  # InferShape does not know the dtype: at least the size
            assert found[slot].dtype == expected[slot].dtype
            assert found.pop(slot).shape >= expected[slot].shape
        assert found == {s: expected[s] for s in outputs if s not in op.workspace}


@pytest.mark.skipif("cuda" not in DEVICES, reason="the library has no CUDA entries")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("batch", "heads", "kv_heads", "dim", "keys"), [(2, 8, 2, 64, 1700), (8, 64, 8, 128, 32768)])
def test_mindspore_has_room_for_the_pieces_of_paged_attention(infer_host, batch, heads, kv_heads, dim, keys, dtype):
    """Which are of 16 bits, and not known where shapes are inferred."""
    op = OPS["paged_attention"]
    q, cache = TensorSpec((batch, 1, heads, dim), dtype), TensorSpec((batch, keys, kv_heads, dim), dtype)
    specs, attrs = [q, cache, cache, TensorSpec((batch,), "int32"), None], op.canonical([None, None, 0.0])
    expected = infer(op, attrs, tuple(specs), "cuda")
    found = infer_in_c(infer_host, op, attrs, specs, op.entry_outputs, "cuda")
    assert all(found[slot].shape >= expected[slot].shape for slot in op.workspace)


@pytest.mark.skipif("cuda" not in DEVICES, reason="the library has no CUDA entries")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(4097, 4097, 4097), (4096, 1024, 1023), (4096, 1023, 1024)])
def test_mindspore_has_room_for_the_copies_of_odd_sizes(infer_host, rows, inputs, outputs, dtype):
    """Which linear makes in 16 bits."""
    linear = OPS["linear"]
    given = {"x": TensorSpec((rows, inputs), dtype), "weight": TensorSpec((outputs, inputs), dtype)}
    _, attrs = linear.bind(**given)
    given["dy"] = TensorSpec((rows, outputs), dtype)
    for op in (linear, linear.backward):
        specs = [given.get(slot) for slot in op.inputs]
        expected = infer(op, attrs, tuple(specs), "cuda")
        found = infer_in_c(infer_host, op, attrs, specs, op.entry_outputs, "cuda")
        assert found["workspace"].shape >= expected["workspace"].shape


@settings(deadline=None, derandomize=True, max_examples=300)
@given(call=good_calls())
def test_symbolic_shapes_are_those_of_the_library(call):
    """A definition's expressions, evaluated with numbers."""
    op, attrs, specs = call
    expected = infer(op, attrs, tuple(specs))
    assert infer_symbolic(op, attrs, specs, int) == {y: expected[y] for y in expected if y not in op.workspace}


def test_a_workspace_is_as_large_as_its_device_needs():
    """The 32 MiB of a product are cuBLASLt's: none on the CPU."""
    a, sizes = TensorSpec((512, 512), "float32"), {"cpu": (0,), "cuda": (1 << 23,)}
    for device in DEVICES:
        assert infer(OPS["matmul"], (False, False, False), (a, a), device)["workspace"].shape == sizes[device]


@pytest.mark.skipif("cuda" not in DEVICES, reason="the library has no CUDA entries")
def test_a_workspace_has_copies_of_matrices_whose_lines_are_not_aligned():
    """x and weight where `in` is no multiple of 8, dy where `out` is not, in 16 bits, for long products."""

    def words(rows, out, in_, dtype="bfloat16", device="cuda"):
        x, weight, dy = (TensorSpec(s, dtype) for s in ((rows, in_), (out, in_), (rows, out)))
        op = OPS["linear"]
        forward = infer(op, (None, False), (x, weight, None), device)["workspace"].shape[0]
        backward = infer(op.backward, (None, False), (dy, x, weight, None, None), device)["workspace"].shape[0]
        return forward, backward

    def copy(rows, line):
        return -(-rows * line // 2 // 64) * 64

    library = 1 << 23

    def partials(out):
        parts = min(max((1 << 18) // out, 1), 256)
        return -(-parts * out // 64) * 64

    assert words(8192, 30522, 768) == (library, library + copy(8192, 30528) + partials(30522))
    inputs = copy(4097, 4160) + copy(4104, 4160)  # lines of 128 bytes; dweight may be where weight's copy was
    assert words(4097, 4099, 4098) == (library + inputs, library + inputs + copy(4097, 4160) + partials(4099))
    assert words(8192, 30528, 768) == (library, library + partials(30528))
    assert words(8192, 30522, 768, "float32") == (library, library + partials(30522))
    assert words(8192, 30522, 64) == (library, library + partials(30522))  # a copy takes as long as the products
    assert words(1023, 1023, 1023) == (library, library + partials(1023))  # the products are short
    assert words(8192, 30522, 768, device="cpu") == (0, 0)


def test_inference_is_plain_c_and_refuses_hostile_arguments():
    """Inference refuses as the entry does: a count that is wrong, too many dimensions, null."""
    lib, entry = library.load(), "aot_gelu_cpu"
    out = (ctypes.c_int * 1)(), (ctypes.c_int64 * 32)(), (ctypes.c_char_p * 1)()

    def said(n, ndims=(1,), shape=(3,), dtype=b"float32"):
        row = None if shape is None else ctypes.cast((ctypes.c_int64 * 40)(*shape), ctypes.POINTER(ctypes.c_int64))
        rows = (ctypes.POINTER(ctypes.c_int64) * 1)(row)
        ndims, dtypes = (ctypes.c_int * 1)(*ndims), (ctypes.c_char_p * 1)(dtype)
        status = getattr(lib, f"{entry}Infer")(n, ndims, rows, dtypes, None, *out)
        return library.last_error() if status else tuple(out[1][: out[0][0]])

    assert said(1) == (3,)
    assert said(1, shape=(-1,)) == (-1,)
    assert said(1, shape=(-2,)) == (-2,)
    assert said(0) == "gelu: 0 tensors given, x is missing"
    assert said(2) == "gelu: 2 tensors given, expected 1"
    assert said(1, ndims=(33,)) == "gelu: x has 33 dimensions, expected at most 32"
    assert said(1, shape=None) == "gelu: the shape of x is null"
    assert said(1, dtype=None) == "gelu: the dtype of x is null"
    assert said(1, dtype=b"int8") == "gelu: x has dtype int8, expected float16, bfloat16, float32 or float64"
    assert said(1, ndims=(2,), shape=(1 << 40, 1 << 40)).endswith("expected at most 2**50 elements")


@settings(deadline=None, derandomize=True, max_examples=300)
@given(call=good_calls(), data=st.data())
def test_unknown_dimensions_stay_unknown(infer_host, call, data):
    """From a shape with -1, or from [-2], C infers as from the real one, as far as it can know."""
    op, attrs, specs = call
    outputs = list(op.entry_outputs)
    expected = infer(op, attrs, tuple(specs))

    def hide(spec):
        if spec is None:
            return None
        if data.draw(st.booleans(), label="rank unknown"):
            return TensorSpec((-2,), spec.dtype)
        return TensorSpec(tuple(-1 if data.draw(st.booleans()) else dim for dim in spec.shape), spec.dtype)

    hidden = [hide(spec) for spec in specs]
    found = infer(op, attrs, tuple(hidden))
    assert infer_in_c(infer_host, op, attrs, hidden, outputs) == {name: found[name] for name in outputs}
    for name in outputs:
        assert found[name].dtype == expected[name].dtype
        if found[name].shape != (-2,):
            assert len(found[name].shape) == len(expected[name].shape)
            for dim, real in zip(found[name].shape, expected[name].shape, strict=True):
                assert dim in (-1, real)
    for name, source in op.same_spec_as.items():
        assert found[name] == hidden[op.inputs.index(source)]


@settings(deadline=None, derandomize=True, max_examples=100)
@given(call=good_calls())
def test_like_is_what_infer_says(call):
    op, attrs, specs = call
    expected = dict(zip(op.inputs, specs, strict=True)) | infer(op, attrs, tuple(specs))
    for name, source in (*op.same_spec_as.items(), *op.alias.items()):
        assert expected[name] == expected[source]


def test_what_is_added_to_a_product_is_optional():
    """Its derivatives are calls without it."""
    product = Product(("a", "b"), flops=lambda call: 0)
    with pytest.raises(TypeError, match="product: bias is required, expected it in optional"):
        operator(inputs=("a", "b", "bias"), outputs=("y",), product=product)(_named("product"))


def _named(name: str):
    def bind(a, b, bias):
        return (a, b, bias), ()

    bind.__name__ = name
    return bind


@settings(deadline=None, derandomize=True, max_examples=100)
@given(call=good_calls())
def test_saved_gives_the_backward_what_it_takes(call):
    """The backward accepts the forward's own slots, and its gradients are like the inputs."""
    op, attrs, specs = call
    if op.backward is None:
        return
    known = dict(zip(op.inputs, specs, strict=True)) | infer(op, attrs, tuple(specs))
    known |= {f"d{y}": known[y] for y in op.outputs}
    gradients = infer(op.backward, attrs, tuple(known[s] for s in op.backward.inputs))
    for slot, spec in zip(op.inputs, specs, strict=True):
        if spec and f"d{slot}" in gradients:
            assert gradients[f"d{slot}"] == spec


@settings(deadline=None, derandomize=True, max_examples=300)
@given(call=good_calls(), data=st.data())
def test_an_error_of_inference_is_that_of_the_entry(call, data):
    """One input is made wrong, in its dtype or its shape."""
    op, attrs, specs = call
    which = data.draw(st.sampled_from([i for i, spec in enumerate(specs) if spec is not None]))
    spec = specs[which]
    dtype = data.draw(st.sampled_from([*FLOATING, "int32", "int64"]))
    shape = data.draw(st.sampled_from([spec.shape, (*spec.shape, 5), spec.shape[1:], (), (7,)]))
    specs[which] = TensorSpec(shape, dtype)
    written, message = inferred(op, attrs, specs)
    if written is None:
        good = TensorSpec((1,), "float32")
        written = dict.fromkeys(op.entry_outputs, good)
    assert run_in_c(op, attrs, specs, written) == message


@pytest.mark.parametrize(
    ("op", "attrs", "shapes", "message"),
    [
        (
            "add",
            (-1e300, None),
            [(2, 3), (2, 3)],
            "ValueError: add: alpha is -1e+300, expected a number in the range of float32 for float32",
        ),
        ("add", (1.0, 2.5), [(3,), (3,)], "ValueError: add: b_number is 2.5, expected None beside b"),
        ("add", (1.0, None), [(3,), None], "TypeError: add: b is None, expected a tensor or a number"),
        ("add", (1.0, None), [(2, 3), (3,)], "ValueError: add: b has shape (3,), expected (2, 3), the shape of a"),
        (
            "layer_norm",
            ((4,), 1e-5, 0.0),
            [(2, 3), None, None],
            "ValueError: layer_norm: x has shape (2, 3), expected its trailing axes to be normalized_shape (4,)",
        ),
        (
            "layer_norm",
            ((), 1e-5, 0.0),
            [(2, 3), None, None],
            "ValueError: layer_norm: normalized_shape is empty, expected at least one axis",
        ),
        (
            "layer_norm",
            ((3,), 1e-5, 0.0),
            [(2, 3), (2,), None],
            "ValueError: layer_norm: weight has shape (2,), expected (3,), the shape of normalized_shape, or more "
            "of the trailing axes of (2, 3)",
        ),
    ],
)
def test_error_texts(op, attrs, shapes, message):
    specs = [None if shape is None else TensorSpec(shape, "float32") for shape in shapes]
    assert inferred(OPS[op], attrs, specs) == (None, message)
    y = TensorSpec((2, 3), "float32")
    assert run_in_c(OPS[op], attrs, specs, {"y": y}) == message


def test_an_entry_refuses_an_output_of_the_wrong_shape_or_dtype():
    """The last line of defence against a write out of bounds."""
    x = TensorSpec((2, 3), "float32")
    small, other = TensorSpec((2, 2), "float32"), TensorSpec((2, 3), "float16")
    gelu = OPS["gelu"]
    expected = "ValueError: gelu: y has shape (2, 2), expected (2, 3), the shape of this output"
    assert run_in_c(gelu, ("none",), [x], {"y": small}) == expected
    assert run_in_c(gelu, ("none",), [x], {"y": other}) == "TypeError: gelu: y has dtype float16, expected float32"
    work = TensorSpec((1, 2, 2), "float32")
    backward = OPS["layer_norm"].backward
    affine = TensorSpec((3,), "float32")
    said = run_in_c(backward, ((3,), 1e-5, 0.0), [x, x, None, None], {"dweight": affine, "workspace": work})
    assert said.startswith("ValueError: layer_norm_backward: workspace has shape (1, 2, 2), expected (12,)")


def test_more_dimensions_than_any_tensor_has():
    deep = TensorSpec((1,) * 33, "float32")
    said = run_in_c(OPS["gelu"], ("none",), [deep], {"y": deep})
    assert said == "ValueError: gelu: x has 33 dimensions, expected at most 32"


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        ("approximate=maybe", "gelu: approximate is 'maybe', expected 'none'"),
        ("approximate=" + "x" * 100, "gelu: attribute approximate is not a short string"),
        ("inputs=0", "gelu: x is missing"),
        ("inputs=many", "gelu: attribute inputs is not an integer"),
    ],
)
def test_init_refuses_bad_attributes(attrs, message):
    lib = library.load()
    init = lib.aot_gelu_cpuInit
    extra = ctypes.c_void_p(lib.aot_extra_new(attrs.encode()))
    status = init(None, None, None, extra)
    assert status == 1
    assert library.last_error().startswith(message)
    lib.aot_extra_delete(extra)


def test_attributes_arrive_with_all_their_digits():
    """eps through the text of `extra`: a float32 on the way would change the result."""
    numpy = pytest.importorskip("numpy")
    from aotops.frontends import numpy as frontend

    eps = 0.1 + 2.0**-40
    x = numpy.array([1.0, 2.0, 4.0])
    expected = (x - x.mean()) / numpy.sqrt(x.var() + eps)
    assert abs(frontend.layer_norm(x, 3, eps=eps) - expected).max() < 1e-15


def test_frontends_are_listed_and_lazy(python):
    from aotops import frontends

    assert dir(frontends) == list(FRONTENDS)
    program = (
        "import sys; import aotops.frontends; print(bool({'numpy', 'torch', 'jax', 'mindspore'} & set(sys.modules)))"
    )
    assert python(program).split()[-1] == "False"
