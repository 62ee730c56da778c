"""Operators as functions of tvm-ffi: every library is a module of tvm-ffi, called from Python, C and C++."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tvm_ffi
from tvm_ffi.libinfo import find_dlpack_include_path, find_include_path, find_libtvm_ffi

import aotops
import aotops.build
from aotops import library
from aotops.frontends import numpy as ours
from aotops.op import ATTRIBUTE_TYPES
from aotops.ops import OPS
from aotops.testing.frameworks import requested

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "cpp"
WITH_KERNEL = [one for op in OPS.values() for one in (op, op.backward) if one is not None and one.has_kernel]
HEADERS = ["-isystem", find_include_path(), "-isystem", find_dlpack_include_path()]
LINKED = [find_libtvm_ffi(), f"-Wl,-rpath,{Path(find_libtvm_ffi()).parent}"]

needs_torch = pytest.mark.skipif("torch" not in requested(), reason="torch is not under test")
needs_jax = pytest.mark.skipif("jax" not in requested(), reason="jax is not under test")


@pytest.fixture(scope="module")
def module():
    return tvm_ffi.load_module(str(library.path()))


def array(y) -> np.ndarray:
    return np.from_dlpack(y)


def signature(op) -> list[list[str]]:
    function = library.load()[f"aot_{op.name}_cpuSignature"]
    function.restype = ctypes.c_char_p
    text = function().decode()
    assert text.endswith(";"), text
    return [part.split() for part in text[:-1].split(";")]


@pytest.mark.parametrize("op", WITH_KERNEL, ids=lambda op: op.name)
def test_the_arguments_are_those_of_the_definition(op):
    mark = {True: "?", False: "-"}
    inputs, outputs, attributes = signature(op)
    assert inputs == [f"{x}{mark[x in op.optional]}" for x in op.inputs]
    assert [y[:-1] for y in outputs] == list(op.entry_outputs)
    assert [y[:-1] for y in outputs if y[-1] == "*"] == list(op.workspace)
    assert attributes == [a + ATTRIBUTE_TYPES[kind.removesuffix("?")].letter for a, kind in op.attrs.items()]


# -------------------------------------------------------------------------------------------------------------- values

X, WEIGHT, IMAGE, HEADS = (4, 6), (5, 6), (2, 3, 5, 5), (2, 4, 3, 7)
VARIANCE = np.linspace(0.5, 1.5, 6, dtype=np.float32)
CALLS = {
    "add": [X, X, 2.0, None],
    "add_layer_norm": [X, X, 6, None, [6], 1e-3, 0.0],
    "add_layer_norm_backward": [X, X, X, 6, None, [6], 1e-3, 0.0],
    "add_rms_norm": [X, X, 6, None, [6], None, 1.0],
    "add_rms_norm_backward": [X, X, X, 6, None, [6], None, 1.0],
    "attention": [
        *(HEADS, (2, 5, 1, 7), (2, 5, 1, 6), None, None, (4, 5), 3, None, None, np.array([7, -5])),
        *(True, None, [2, 0], 0.0, "BSHD", 0.5),
    ],
    "attention_backward": [
        (2, 4, 3, 6),
        HEADS,
        (2, 5, 1, 7),
        (2, 5, 1, 6),
        None,
        None,
        (3, 1, 5),
        3,
        None,
        None,
        None,
        (2, 4, 3, 6),
        None,
        False,
        0.5,
        [-1, 2],
        1.5,
        "BSHD",
        0.0,
    ],
    "conv2d": [IMAGE, (4, 3, 3, 3), 4, [2, 1], [1, 1], [1, 1], 1, "NCHW", False],
    "conv2d_backward": [(2, 4, 3, 5), IMAGE, (4, 3, 3, 3), [2, 1], [1, 1], [1, 1], 1, "NCHW", False],
    "cross_entropy": [X, "classes", None, -100, "mean", 0.1, None, 0.0, 0.0],
    "cross_entropy_backward": [(), X, "classes", 6, None, -100, "mean", 0.1, None, 0.1, 2.0],
    "cross_entropy_lse": [X, "classes", 6, -100, "sum", 0.1, None, 0.1, 2.0],
    "cross_entropy_lse_backward": [(), 4, X, "classes", None, -100, "mean", 0.1, None, 0.0, 0.0],
    "gelu": [X, "tanh"],
    "gelu_backward": [X, X, "none"],
    "layer_norm": [X, 6, 6, [6], 1e-5, 0.0],
    "layer_norm_backward": [X, X, 6, None, [6], 1e-5, 0.0],
    "linear": [X, WEIGHT, 5, "gelu", False],
    "linear_backward": [(4, 5), X, WEIGHT, 5, None, "gelu", False],
    "batch_norm": [X, 6, 6, 1e-5, 1, None],
    "batch_norm_backward": [X, None, 6, X, 6, 6, 6, VARIANCE, 1e-5, -1, "silu"],
    "batch_norm_relu": [X, 6, None, X, 1e-5, 1],
    "batch_norm_relu_backward": [X, 6, None, X, None, 6, VARIANCE, X, 1e-5, 1],
    "linear_cross_entropy": [X, (7, 6), "classes", 7, None, -100, "mean", 0.1, None, 0.0, 0.0, False],
    "linear_cross_entropy_backward": [
        (),
        X,
        (7, 6),
        "classes",
        7,
        None,
        None,
        None,
        None,
        -100,
        "mean",
        0.1,
        None,
        0.0,
        0.0,
        False,
    ],
    "linear_cross_entropy_lse": [X, (7, 6), "classes", 7, None, -100, "mean", 0.1, None, 0.0, 0.0, False],
    "linear_cross_entropy_lse_backward": [
        *((), 4, X, (7, 6), "classes", 7, None, None, None, None),
        *(-100, "mean", 0.1, None, 0.0, 0.0, False),
    ],
    "lltm": [(4, 3), (9, 6), 9, (4, 3), (4, 3)],
    "lltm_backward": [(4, 3), (4, 3), (4, 3), (9, 6), 9, (4, 3), (4, 3), None],
    "matmul": [X, (6, 3), False, False, False],
    "matmul_backward": [(4, 3), X, (6, 3), False, False, False],
    "qkv_attention": [(2, 3, 48), np.array([3, 2]), 4, 2, True, None, [-1, -1], 0.0],
    "qkv_attention_backward": [(2, 3, 24), (2, 3, 48), None, (2, 3, 24), None, 4, 2, False, 0.5, [2, 1], 1.5],
    "qkv_rope": [(2, 3, 48), (4, 3), (4, 3), None, 4, 2, True, "BSHD", None, False],
    "qkv_rope_backward": [
        (2, 4, 3, 6),
        (2, 2, 3, 6),
        (2, 2, 3, 6),
        (2, 3, 48),
        (4, 3),
        (4, 3),
        None,
        4,
        2,
        False,
        "BHSD",
        6,
        True,
    ],
    "paged_attention": [HEADS, (2, 5, 1, 7), (2, 5, 1, 6), np.array([5, 2]), None, None, 4, 1.5],
    "rms_norm": [X, 6, 6, [6], None, 0.0],
    "rms_norm_backward": [X, X, 6, None, [6], None, 0.0],
    "rope": [HEADS, (4, 3), (4, 3), None, True, "BSHD", 6],
    "rope_backward": [HEADS, HEADS, (4, 3), (4, 3), None, False, "BHSD", 6],
    "softmax": [X, -1],
    "softmax_backward": [X, X, 0],
    "swiglu": [X, X],
    "swiglu_backward": [X, X, X],
}


def arguments(op, of=lambda numbers: numbers):
    """A call's arguments; where one is a tensor, CALLS has its shape, or the array."""
    draw = np.random.default_rng(0)

    def made(slot, given):
        if isinstance(given, np.ndarray):
            return of(given)
        if given == "classes":
            return of(draw.integers(0, 6, 4))
        if slot not in op.inputs or given is None:
            return given
        return of(draw.standard_normal(given, dtype=np.float32))

    return [made(slot, given) for slot, given in zip((*op.inputs, *op.attrs), CALLS[op.name], strict=True)]


def returned(op) -> list[int]:
    """The results that a call without outputs returns."""
    required = [i for i, y in enumerate(op.results) if y not in op.optional and y not in op.residuals]
    return required or [i for i, y in enumerate(op.results) if y in op.optional]


@needs_torch
@pytest.mark.parametrize("op", WITH_KERNEL, ids=lambda op: op.name)
def test_torchs_tensors_give_the_results_of_the_dispatcher(module, op):
    """Returned, and written to outputs that the caller gives."""
    import torch

    import aotops.frontends.torch  # noqa: F401

    args = arguments(op, torch.from_numpy)
    call = getattr(torch.ops.aotops, op.name)
    expected = call(*args)
    expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    wanted = [expected[i] for i in returned(op)]
    found = getattr(module, op.name)(*args)
    found = [found] if len(wanted) == 1 else list(found)
    assert all(isinstance(y, torch.Tensor) for y in found)
    for y, other in zip(found, wanted, strict=True):
        assert torch.equal(y, other)
    outputs = [y if y is None else torch.full_like(y, float("nan") if y.is_floating_point() else -1) for y in expected]
    assert getattr(module, op.name)(*args, *outputs) is None
    for y, other in zip(outputs, expected, strict=True):
        assert y is other or torch.equal(y, other)


@pytest.mark.parametrize("op", WITH_KERNEL, ids=lambda op: op.name)
def test_numpys_arrays_are_taken(module, op):
    """NumPy sets no allocator: the results are memory of the library's. In NumPy's own, they are the same."""
    args = arguments(op)
    found = getattr(module, op.name)(*args)
    found = [array(y) for y in ([found] if isinstance(found, tvm_ffi.Tensor) else found)]
    outputs = dict.fromkeys(op.results)
    pairs = zip(returned(op), found, strict=True)
    outputs |= {op.results[i]: np.full_like(y, np.nan if y.dtype.kind == "f" else -1) for i, y in pairs}
    assert getattr(module, op.name)(*args, *outputs.values()) is None
    for y, other in zip(filter(lambda y: y is not None, outputs.values()), found, strict=True):
        assert np.isfinite(y).all()
        assert np.array_equal(y, other)


@needs_jax
def test_jaxs_arrays_are_taken(module):
    import jax.numpy as jnp

    x = jnp.linspace(-2, 2, 12).reshape(3, 4)
    y = array(module.softmax(x, -1))
    e = np.exp(np.asarray(x))
    np.testing.assert_allclose(y, e / e.sum(1, keepdims=True), rtol=1e-6)


def test_what_is_absent_at_the_end_has_its_default(module):
    x = np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6)
    assert np.array_equal(array(module.layer_norm(x, None, None, 6)), ours.layer_norm(x, 6))
    assert np.array_equal(array(module.rms_norm(x, None, None, [6])), ours.rms_norm(x, 6))
    assert np.array_equal(array(module.gelu(x)), ours.gelu(x))
    assert np.array_equal(array(module.add(x, x)), ours.add(x, x))
    target = np.array([0, 1, 2, 3])
    assert np.array_equal(array(module.cross_entropy(x, target)), ours.cross_entropy(x, target))


def test_some_outputs_may_be_given(module):
    x, dy = np.random.default_rng(1).standard_normal((2, 4, 6), dtype=np.float32)
    every = [array(y) for y in module.layer_norm_backward(dy, x, None, None, 6)]
    dbias = np.full(6, np.nan, np.float32)
    module.layer_norm_backward(dy, x, None, None, 6, None, None, None, None, dbias)
    assert np.array_equal(dbias, every[2])


def test_dtypes_and_empty_tensors(module):
    for dtype in (np.float16, np.float64):
        y = array(module.gelu(np.ones((2, 3), dtype)))
        assert y.dtype == dtype
        np.testing.assert_allclose(y, 0.8413447, rtol=1e-3)
    assert array(module.gelu(np.ones((0, 3), np.float32))).shape == (0, 3)
    assert array(module.softmax(np.array(3, np.float32), -1)).shape == ()


@needs_torch
def test_bfloat16(module):
    import torch

    x = torch.linspace(-2, 2, 7, dtype=torch.bfloat16)
    assert torch.equal(module.gelu(x), aotops.frontends.torch.gelu(x))


# -------------------------------------------------------------------------------------------------------------- errors


def unaligned() -> np.ndarray:
    return np.frombuffer(bytearray(4 * 6 + 1), np.uint8)[1:].view(np.float32)


X2 = np.ones((2, 3), np.float32)
ERRORS = [
    (TypeError, "gelu: x has dtype int64, expected float16, bfloat16, float32 or float64", "gelu", [np.ones(2, int)]),
    (TypeError, "gelu: x is a float, expected a tensor", "gelu", [1.5]),
    (TypeError, "gelu: x is None, expected a tensor", "gelu", []),
    (TypeError, "layer_norm: weight is an int, expected a tensor or None", "layer_norm", [X2, 3]),
    (TypeError, "gelu: approximate is an int, expected a string of printable ASCII characters", "gelu", [X2, 1]),
    (TypeError, "gelu: approximate is a str, expected a string of printable", "gelu", [X2, "no\nne"]),
    (TypeError, "softmax: dim is a bool, expected an integer of 64 bits", "softmax", [X2, True]),
    (TypeError, "softmax: dim is a float, expected an integer of 64 bits", "softmax", [X2, 1.0]),
    (TypeError, "layer_norm: eps is a str, expected a number", "layer_norm", [X2, None, None, 3, "1e-5"]),
    (TypeError, "layer_norm: normalized_shape is a list, expected integers", "layer_norm", [X2, None, None, [3.0]]),
    (TypeError, "matmul: transpose_a is an int, expected True or False", "matmul", [X2, X2, 1]),
    (TypeError, "gelu: 4 arguments given, expected at most 3: x, approximate, y", "gelu", [X2, "none", X2, X2]),
    (ValueError, "gelu: approximate is 'sinh', expected 'none' or 'tanh'", "gelu", [X2, "sinh"]),
    (ValueError, "layer_norm: normalized_shape is empty, expected at least one axis", "layer_norm", [X2]),
    (ValueError, r"gelu: x has shape \(3, 2\) and strides \(1, 3\), expected a contiguous tensor", "gelu", [X2.T]),
    (ValueError, r"gelu: y has shape \(3,\), expected \(2, 3\)", "gelu", [X2, None, np.ones(3, np.float32)]),
    (ValueError, r"gelu: y has shape \(2, 3\) and strides \(6, 2\), expected a contiguous", "gelu",
     [X2, None, np.ones((2, 6), np.float32)[:, ::2]]),
    (TypeError, "gelu: y has dtype float64, expected float32", "gelu", [X2, None, np.ones((2, 3))]),
    (ValueError, "gelu: x is at address 0x.*, expected a multiple of 4", "gelu", [unaligned()]),
    (TypeError, "swiglu_backward: dgate is None, expected a tensor", "swiglu_backward", [X2, X2, X2, None, X2]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "op", "args"), ERRORS, ids=[f"{op}-{text}" for _, text, op, _ in ERRORS])
def test_a_wrong_call_raises_pythons_error(module, kind, text, op, args):
    with pytest.raises(kind, match=text):
        getattr(module, op)(*args)


def test_an_output_that_shares_memory_is_refused(module):
    memory = np.ones(9, np.float32)
    with pytest.raises(ValueError, match="gelu: y shares memory with x"):
        module.gelu(memory[:6], None, memory[3:])
    x = np.linspace(-1, 1, 6, dtype=np.float32)
    expected = array(module.gelu(x))
    module.gelu(x, None, x)  # element for element
    assert np.array_equal(x, expected)


def test_a_call_of_the_form_of_an_earlier_one_is_checked(module):
    """Tensors and None in the same places: what was read of the earlier call is not read again."""
    for dtype in (np.float32, np.float64, np.float16):
        for shape in ((2, 3), (4,), (), (0, 2)):
            x = np.linspace(-1, 1, int(np.prod(shape)), dtype=dtype).reshape(shape)
            y, z = np.full_like(x, np.nan), np.full_like(x, np.nan)
            for out in (y, z):
                assert module.gelu(x, None, out) is None
            assert np.array_equal(y, ours.gelu(x))
            assert np.array_equal(y, z)
    for call, kind, text in (
        ((X2.T, None, X2.T.copy()), ValueError, r"x has shape \(3, 2\) and strides \(1, 3\), expected a contiguous"),
        ((X2, None, np.ones((2, 6), np.float32)[:, ::2]), ValueError, r"y has shape \(2, 3\) and strides \(6, 2\)"),
        ((X2, None, np.ones((2, 3))), TypeError, "y has dtype float64, expected float32"),
        ((unaligned(), None, X2[0]), ValueError, "x is at address 0x.*, expected a multiple of 4"),
        ((X2.reshape(6)[:4], None, X2.reshape(6)[2:]), ValueError, "y shares memory with x"),
        ((X2, 3, X2), TypeError, "approximate is an int, expected a string"),
        ((X2.astype(int), None, X2), TypeError, "x has dtype int64, expected float16"),
    ):
        with pytest.raises(kind, match=f"gelu: {text}"):
            module.gelu(*call)
    y, tanh = np.empty_like(X2), np.empty_like(X2)
    for i in range(20):  # more forms than are kept
        module.add(X2, None, 1.0, float(i), y)
        assert (y == X2 + i).all()
    module.gelu(X2, "tanh", tanh)
    module.gelu(X2, "none", y)
    assert np.array_equal(tanh, ours.gelu(X2, "tanh"))
    assert np.array_equal(y, ours.gelu(X2))
    with pytest.raises(ValueError, match="gelu: approximate is 'tanhtanhtanh'"):
        module.gelu(X2, "tanh" * 3, y)


def test_attributes_that_change_with_each_call(module):
    """More than the library keeps; each number with all its digits."""
    x = np.ones(2)
    for _ in range(2):
        for i in range(300):
            assert array(module.add(x, x, i / 7))[1] == 1 + i / 7
    assert array(module.add(x, None, 1.0, -float("inf")))[0] == -float("inf")


@needs_torch
def test_arguments_and_results_are_freed(module):
    import torch

    x = torch.ones(2, 3)
    y, h = module.add_rms_norm(x, x, None, None, 3)
    assert y._use_count() == h._use_count() == 1
    with pytest.raises(TypeError):
        module.gelu(x.long())
    del y, h
    assert x._use_count() == 1


def test_threads_call_at_once(module):
    from concurrent.futures import ThreadPoolExecutor

    x = np.linspace(-2, 2, 600, dtype=np.float32).reshape(10, 60)
    expected = array(module.softmax(x, 1))
    with ThreadPoolExecutor(4) as pool:
        for y in pool.map(lambda _: array(module.softmax(x, 1)), range(200)):
            assert np.array_equal(y, expected)


# ------------------------------------------------------------------------------------------------------------ programs


def output(*command: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


def test_programs_in_c_and_cpp(tmp_path):
    library_dir = library.path().parent
    aot = [f"-L{library_dir}", "-laotops", f"-Wl,-rpath,{library_dir}"]
    warnings = ["-O0", "-Wall", "-Wextra", "-Werror"]
    c = ["gcc", "-std=c11", *warnings, EXAMPLES / "tvm_ffi.c", *HEADERS, *aot, *LINKED, "-o", tmp_path / "c"]
    cpp = ["g++", "-std=c++17", *warnings, EXAMPLES / "tvm_ffi.cpp", *HEADERS, *LINKED, "-o", tmp_path / "cpp"]
    compiling = [subprocess.Popen(command) for command in (c, cpp)]
    assert [one.wait() for one in compiling] == [0, 0]
    x = np.array([[1, 2, 3, 4], [10, 10, 10, 14]], np.float32)
    y = ours.layer_norm(x, 4)
    dx, *_ = ours.layer_norm_backward(np.eye(2, 4, dtype=np.float32)[[0, 0]], x, 4)
    rows = ["".join(f"{v:7.4f} " for v in row).rstrip() for row in y]
    assert output(tmp_path / "c").splitlines() == [
        *rows,
        "TypeError: layer_norm: x has dtype int32, expected float16, bfloat16, float32 or float64",
    ]
    gradient = ["".join(f"{v:7.4f} " for v in row).rstrip() for row in dx]
    assert output(tmp_path / "cpp", library.path()).splitlines() == [
        *rows,
        *gradient,
        "ValueError: layer_norm: x has shape (2, 4), expected its trailing axes to be normalized_shape (5,)",
    ]


def test_the_library_needs_nothing_of_tvm_ffi():
    assert not [name for name in aotops.Library("aotops", ()).contents.needed if "tvm" in name]


def test_without_tvm_ffi_a_function_says_so(python):
    program = f"""
import ctypes
lib = ctypes.CDLL({str(library.path())!r})
print(lib.__getitem__("__tvm_ffi_gelu")(None, None, 0, None))
lib.aot_last_error.restype = ctypes.c_char_p
print(lib.aot_last_error().decode())
"""
    assert python(program).splitlines() == ["-1", "gelu: no libtvm_ffi.so of version 0.1 or later is loaded"]


# ------------------------------------------------------------------------------------------------ an author's library

SOURCE = """
#include "aot.h"
#include "cpu/entry.h"
namespace aot {
inline namespace AOT_ISA {
struct Shifted {
  static constexpr const char *name = "shifted";
  static constexpr Slot inputs[] = {{"x"}, {"by", optional}};
  static constexpr Slot outputs[] = {{"y"}, {"count"}, {"scratch", workspace}};
  double offset = 0.5;
  int64_t times = 1;
  Status init(const Attrs &attrs) {
    AOT_TRY(attrs.get("offset", &offset));
    return attrs.get("times", &times);
  }
  Status infer(const Tensor *in, Spec *out) const {
    AOT_TRY(check_dtype(name, "x", in[0], DType::float32));
    if (in[1]) AOT_TRY(check_like(name, "by", in[1], "x", in[0]));
    out[0] = in[0], out[1] = Spec::vector(DType::int64, 1), out[2] = Spec::vector(DType::float32, in[0].size());
    return kOk;
  }
};
// AOT_CPU_ENTRY(aot::Nobody, aot_nobody_cpu, aot::nobody_cpu)
Status shifted_cpu(const Shifted &op, const Tensor *in, const Tensor *out, void *) {
  const int64_t n = in[0].size();
  auto *scratch = out[2].as<float>();
  for (int64_t i = 0; i < n; ++i) scratch[i] = in[0].as<float>()[i] + static_cast<float>(op.offset * op.times);
  for (int64_t i = 0; i < n; ++i) out[0].as<float>()[i] = scratch[i] + (in[1] ? in[1].as<float>()[i] : 0);
  return out[1].as<int64_t>()[0] = n, kOk;
}
struct Early : Shifted {
  static constexpr const char *name = "early";
  Status init(const Attrs &attrs) {
    int64_t n = 0;
    AOT_TRY(attrs.get("n", &n));
    return n ? attrs.get("times", &times) : fail(kInvalidArgument, "early: n is 0, expected more");
  }
};
Status early_cpu(const Early &op, const Tensor *in, const Tensor *out, void *stream) {
  return shifted_cpu(op, in, out, stream);
}
}  // namespace AOT_ISA
}  // namespace aot
AOT_CPU_ENTRY(aot::Shifted, aot_shifted_cpu, aot::shifted_cpu)
AOT_CPU_ENTRY(aot::Early,
              aot_early_cpu, aot::early_cpu)
"""
PROJECT = """
[tool.aotops]
library = "libmine.so"
sources = ["mine.cpp"]
isas = ["baseline"]
"""
CMAKE = """
cmake_minimum_required(VERSION 3.18)
project(mine LANGUAGES CXX)
find_package(aotops REQUIRED)
aotops_add_library(mine mine.cpp)
"""


def built_by_aotops(folder: Path) -> Path:
    (folder / "pyproject.toml").write_text(PROJECT)
    return aotops.build.build(folder)


def built_by_cmake(folder: Path) -> Path:
    if not shutil.which("cmake"):
        pytest.skip("cmake is not installed")
    (folder / "CMakeLists.txt").write_text(CMAKE)
    output("cmake", "-S", folder, "-B", folder / "b", f"-Daotops_DIR={aotops.cmake_dir()}")
    output("cmake", "--build", folder / "b")
    return folder / "b" / "libmine.so"


@pytest.mark.parametrize("build", [built_by_aotops, built_by_cmake])
def test_an_authors_library_is_a_module(build, tmp_path):
    (tmp_path / "mine.cpp").write_text(SOURCE)
    file = build(tmp_path)
    mine = tvm_ffi.load_module(str(file))
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    y, count = mine.shifted(x)
    assert np.array_equal(array(y), x + 0.5)
    assert array(count) == [6]
    y, _ = mine.shifted(x, x, 0.25, 3)
    assert np.array_equal(array(y), 2 * x + 0.75)
    y, count, scratch = np.empty_like(x), np.empty(1, int), np.empty(6, np.float32)
    mine.shifted(x, None, None, 2, y, count, scratch)
    assert np.array_equal(y, x + 1)
    assert np.array_equal(scratch.reshape(2, 3), x + 1)
    with pytest.raises(
        TypeError, match=r"shifted: 8 arguments given, expected at most 7: x, by, offset, times, y, count"
    ):
        mine.shifted(*[None] * 8)
    with pytest.raises(TypeError, match="shifted: x has dtype float64, expected float32"):
        mine.shifted(x.astype(np.float64))
    with pytest.raises(RuntimeError, match="early: tvm-ffi: its init refuses to go on without values, expected that"):
        mine.early(x)
    exported = aotops.Library("mine", (), file).contents.exported
    assert {name for name in exported if "tvm" in name} == {"__tvm_ffi_shifted", "__tvm_ffi_early"}


# -------------------------------------------------------------------------------------------------------------- mirror

STRUCTS = """
Any: TVMFFIAny type=type_index small_length=small_str_len integer=v_int64 number=v_float64 pointer=v_ptr string=v_c_str
Any: TVMFFIAny small=v_bytes
Object: TVMFFIObject references=combined_ref_count type=type_index deleter=deleter
Bytes: TVMFFIByteArray data=data size=size
ShapeCell: TVMFFIShapeCell data=data size=size
SequenceCell: TVMFFISeqCell data=data size=size capacity=capacity data_deleter=data_deleter
FunctionCell: TVMFFIFunctionCell safe_call=safe_call cpp_call=cpp_call
ManagedTensor: DLManagedTensor tensor=dl_tensor context=manager_ctx deleter=deleter
"""
NUMBERS = {
    "kNone": "None", "kInt": "Int", "kBool": "Bool", "kFloat": "Float", "kDLTensor": "DLTensorPtr",
    "kRawString": "RawStr", "kSmallString": "SmallStr", "kObject": "Object", "kString": "Str", "kShape": "Shape",
    "kTensor": "Tensor", "kArray": "Array", "kList": "List", "kFunction": "Function",
}  # fmt: skip
FUNCTIONS = {
    "set_error": "TVMFFIErrorSetRaisedFromCStr", "get_stream": "TVMFFIEnvGetStream", "release": "TVMFFIObjectDecRef",
    "move_error": "TVMFFIErrorMoveFromRaised", "set_stream": "TVMFFIEnvSetStream",
}  # fmt: skip


def test_our_structs_are_those_of_the_header(tmp_path):
    lines = [
        "#include <tvm/ffi/c_api.h>", "#include <tvm/ffi/extra/c_env_api.h>", "#include <cstddef>",
        "#include <type_traits>", '#include "host/tvm_ffi_abi.h"', "namespace ours = aot::tvm_ffi;",
        "static_assert(sizeof(aot::DLTensor) == sizeof(DLTensor));",
        "static_assert(offsetof(aot::DLTensor, code) == offsetof(DLTensor, dtype));",
        "static_assert(offsetof(aot::DLTensor, byte_offset) == offsetof(DLTensor, byte_offset));",
    ]  # fmt: skip
    for line in STRUCTS.strip().splitlines():
        name, theirs, *members = line.replace(":", "").split()
        lines.append(f"static_assert(sizeof(ours::{name}) == sizeof({theirs}));")
        for mine, its in (member.split("=") for member in members):
            lines.append(f"static_assert(offsetof(ours::{name}, {mine}) == offsetof({theirs}, {its}));")
            lines.append(f"static_assert(sizeof(ours::{name}::{mine}) == sizeof({theirs}::{its}));")
    for member in ("kind", "message", "backtrace"):  # the beginning of the struct
        lines.append(f"static_assert(offsetof(ours::ErrorCell, {member}) == offsetof(TVMFFIErrorCell, {member}));")
    lines += [f"static_assert(int(ours::{mine}) == int(kTVMFFI{its}));" for mine, its in NUMBERS.items()]
    same = "static_assert(std::is_same_v<decltype(ours::Api::{}), decltype(&{})>);"
    lines += [same.format(*both) for both in FUNCTIONS.items()]
    source = tmp_path / "mirror.cpp"
    source.write_text("\n".join(lines) + "\nint main() {}\n")
    output("g++", "-std=c++17", "-fsyntax-only", *HEADERS, f"-I{ROOT / 'cuda_src'}", source)
