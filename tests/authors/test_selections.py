"""Operators whose tensors are not only floating (programs/selections): in every framework under test, with every check;
and what the checker finds in such kernels (programs/faulty_selections.cpp)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from aotops import TensorSpec, load, operator
from aotops.build import build
from aotops.call import CALL_PATHS, handle_of
from aotops.op import Op
from aotops.spec import DTYPES, FLOATING
from aotops.testing import Case, check
from aotops.testing.cases import rounded_inputs
from aotops.testing.dtypes import plain
from aotops.testing.frameworks import requested

PROGRAMS = Path(__file__).parents[1] / "programs"
OPERATORS = ["flipped", "argmax", "topk", "histogram", "take", "drop", "centered", "squares", "polar"]


@pytest.fixture(scope="module")
def selections(tmp_path_factory):
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("package") / "selections"
    shutil.copytree(PROGRAMS / "selections", folder)
    build(folder)
    sys.path.insert(0, str(folder))
    yield import_module("selections")
    sys.path.remove(str(folder))
    del sys.modules["selections"]


def of(framework, selections):
    """The framework's adapter for the package."""
    own = type(framework)(selections.library)
    if framework.frontend == "jax":
        own.jax  # noqa: B018  which sets 64 bits
    return own


@pytest.mark.parametrize("name", OPERATORS)
def test_every_check_passes(selections, name):
    frameworks = requested()
    if name == "squares" and "mindspore" in frameworks:
        frameworks = ["numpy"]  # MindSpore compiles 41 tensors for most of a minute
    report = check(selections.library.ops[name], frameworks=frameworks, quick=True)
    assert report.ok, report.render()


def test_every_operator_is_checked(selections):
    assert list(selections.library.ops) == OPERATORS


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(framework, selections, dtype):
    """As an input and as an output, eagerly and where a call is traced."""
    own = of(framework, selections)
    if not own.has_dtype(dtype):
        pytest.skip(f"{framework.name} cannot make a tensor of {dtype} of an array")
    if framework.compiles and dtype not in ("bool", "complex64"):
        return  # each would be compiled
    case = Case({"x": (2, 3)}, dtypes={} if dtype in FLOATING else {"x": dtype})
    x = rounded_inputs(case.random(np.random.default_rng(0)), dtype)["x"]
    tensor = own.make(x, dtype, "cpu")
    found = [own.results("flipped", {"x": tensor}, {})[0]]
    if framework.frontend == "jax":
        found.append(own.jax.jit(own.module.flipped)(tensor))
    if framework.frontend == "torch":
        found += [own.torch.ops.selections.flipped(tensor), _compiled(own, tensor)]
    for y in found:
        assert own.dtype(y).replace("float8e", "float8_e") == dtype
        np.testing.assert_array_equal(own.numpy(y), plain(x.ravel()[::-1].reshape(2, 3)))


def _compiled(own, tensor):
    own.torch.compiler.reset()
    return own.torch.compile(own.module.flipped, backend="aot_eager", fullgraph=True)(tensor)


def test_a_dtype_of_64_bits_is_refused_where_jax_has_none(selections, python):
    """JAX would make it one of 32 bits."""
    if "jax" not in requested():
        pytest.skip("jax is not under test")
    program = f"""
import sys; sys.path.insert(0, {str(Path(selections.__file__).parent)!r})
import numpy as np, selections
from aotops.frontends import jax
jax.of(selections.library).argmax(np.ones((2, 3), np.float32))
"""
    said = python(program, expect=1)
    assert "TypeError: argmax: place has dtype int64, which JAX has with jax_enable_x64 alone" in said


# ------------------------------------------------------------------------------------------------------ random numbers


class _Generator:
    """A framework's generator: what starts it, and what draws the seed of a call from it."""

    def __init__(self, own):
        self.own, self.seeds = own, import_module("seeds")

    def start(self, seed):
        if self.own.frontend == "jax":
            self.key = self.own.jax.random.key(seed)
        else:
            (self.own.torch.manual_seed if self.own.frontend == "torch" else self.own.ms.set_seed)(seed)

    def draw(self):
        if self.own.frontend != "jax":
            return getattr(self.seeds, f"of_{self.own.frontend}")()
        self.key, key = self.own.jax.random.split(self.key)
        return self.seeds.of_jax(key)


def test_random_numbers_are_in_step_with_the_frameworks_generator(framework, selections):
    if framework.frontend in ("numpy", "cupy") or framework.compiles:
        pytest.skip(f"{framework.name}: its seed is an array like any other")
    own, case = of(framework, selections), {"p": 0.25}
    generator, x = _Generator(own), own.make(np.ones((64, 64)), "float32", "cpu")

    def dropped(seed):
        return own.numpy(own.results("drop", {"x": x, "seed": seed}, case)[0])

    generator.start(0)
    first, second, seed = dropped(generator.draw()), dropped(generator.draw()), generator.draw()
    generator.start(0)
    np.testing.assert_array_equal(dropped(generator.draw()), first)
    assert (first != second).any()
    assert abs((first > 0).mean() - 0.75) < 0.05
    gradient = own.gradients("drop", {"x": x, "seed": seed}, case, (x,))["x"]
    np.testing.assert_array_equal(own.numpy(gradient), dropped(seed))


@pytest.mark.skipif("torch" not in requested(), reason="torch is not under test")
def test_torch_draws_the_same_seed_again_when_it_computes_again(selections):
    """In a checkpoint, and compiled."""
    import torch
    from torch.utils.checkpoint import checkpoint

    from aotops.frontends import torch as frontend

    F, seeds = frontend.of(selections.library), import_module("seeds")

    def layer(x):
        return F.drop(x * 2, seeds.of_torch(), p=0.5).square()

    torch.compiler.reset()
    found = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False), torch.compile(layer, backend="aot_eager")):
        x = torch.ones(256, requires_grad=True)
        torch.manual_seed(3)
        y = run(x)
        torch.rand(5)
        y.sum().backward()
        found.append((y.detach(), x.grad))
    for y, gradient in found[1:]:
        assert torch.equal(y, found[0][0])
        assert torch.equal(gradient, found[0][1])


# -------------------------------------------------------------------------------------------------------------- states


def test_a_state_is_written_in_place(framework, selections):
    """Where arrays change; JAX's function returns the new state."""
    if framework.compiles:
        pytest.skip("graph mode is not asked for the order of reads of a tensor")
    own = of(framework, selections)
    x, mean = (own.make(np.asarray(v, np.float64), "float32", "cpu") for v in ([[1.0, 3.0], [3.0, 5.0]], [0.0, 0.0]))
    found = own.forward("centered", {"x": x, "mean": mean}, {"momentum": 0.5})
    y, state = found if own.functional else (found, mean)
    np.testing.assert_array_equal(own.numpy(y), own.numpy(x))
    np.testing.assert_array_equal(own.numpy(state), [1.0, 2.0])


@pytest.mark.skipif("torch" not in requested(), reason="torch is not under test")
def test_a_state_in_torch(selections):
    import torch

    from aotops.frontends import torch as frontend

    F = frontend.of(selections.library)
    x, mean = torch.tensor([[1.0, 3.0], [3.0, 5.0]]), torch.zeros(2)
    torch.compiler.reset()
    for function in (F.centered, torch.compile(F.centered, backend="aot_eager", fullgraph=True)):
        before = mean._version
        function(x, mean, momentum=1.0)
        assert mean._version > before
        assert torch.equal(mean, x.mean(0))
        mean.zero_()
    wide = torch.zeros(4)
    F.centered(x, wide[::2], momentum=1.0)
    assert wide.tolist() == [2.0, 0.0, 4.0, 0.0]
    with pytest.raises(NotImplementedError, match="centered writes to mean, and has no derivative"):
        F.centered(x.requires_grad_(), mean)


def test_an_operator_that_writes_to_an_input_has_no_gradient():
    with pytest.raises(NotImplementedError, match="moved: an operator that writes to state has no gradient"):
        operator(
            inputs=("x", "state"), outputs=("y",), mutates=("state",), backward={"inputs": ("dy",), "outputs": ("dx",)}
        )(moved)


def moved(x, state):
    return (x, state), ()


# -------------------------------------------------------------------------------------------------------- many tensors


@pytest.mark.parametrize("path", CALL_PATHS)
def test_twenty_tensors_on_every_call_path(selections, python, path):
    program = f"""
import sys; sys.path.insert(0, {str(Path(selections.__file__).parent)!r})
import numpy as np, selections
from aotops.frontends import numpy
F = numpy.of(selections.library)
xs = [np.full(3, i, np.float32) for i in range(20)]
dxs = F.squares_backward(np.ones(3, np.float32), *xs)
print(F.squares(*xs)[0], [float(dx[0]) for dx in dxs] == [2.0 * i for i in range(20)])
"""
    assert python(program, AOTOPS_CALL_PATH=path) == "2470.0 True\n"


@pytest.mark.parametrize("names", [[f"x{i}" for i in range(63)], ["x"]])
def test_more_tensors_than_a_call_has_places_for(selections, names):
    """The operator is named, with what it has and what is allowed."""
    slots = {
        "inputs": tuple(names),
        "outputs": tuple(f"y{i}" for i in range(64 - len(names) if len(names) > 1 else 15)),
    }
    op = Op("many", lambda: ((), ()), **slots, optional=frozenset(slots["outputs"]) if len(names) == 1 else frozenset())
    with pytest.raises(NotImplementedError, match=r"many has (64 tensors|16 tensors, 15 of them optional).* 63 and 14"):
        handle_of(op.bound_to(selections.library), ())


# ------------------------------------------------------------------------------------------------------ planted faults


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    file = tmp_path_factory.mktemp("faulty") / "libfaulty_selections.so"
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wl,-z,defs"]
    subprocess.run(["g++", *flags, PROGRAMS / "faulty_selections.cpp", "-o", file], check=True)
    return load(file)


def _rows(x):
    if x.ndim != 2 or not x.shape[1]:
        raise ValueError("expected rows of one element or more")
    return x


PLACES = {
    "inputs": ("x",), "outputs": ("place",), "infer": lambda x: TensorSpec(x.shape[:1], "int64"),
}  # fmt: skip
TAKES = {
    "inputs": ("table", "index"), "outputs": ("y",), "infer": lambda table, index: TensorSpec(index.shape, table.dtype),
}  # fmt: skip
BOOLS = {"inputs": ("x",), "outputs": ("y",), "infer": lambda x: TensorSpec(x.shape, "bool")}
LARGEST = {
    "inputs": ("x",), "outputs": ("y", "place"),
    "infer": lambda x: (TensorSpec(x.shape[:1], x.dtype), TensorSpec(x.shape[:1], "int64")),
}  # fmt: skip
COUNTS = {"inputs": ("x",), "outputs": ("counts",), "infer": lambda x: TensorSpec((4,), "int32")}
SAME = {"inputs": ("x",), "outputs": ("y",), "same_spec_as": {"y": "x"}}
ROWS, INDEX = (
    Case({"x": (5, 4)}),
    Case({"table": (5,), "index": (12,)}, classes={"index": 5}, dtypes={"index": "int32"}),
)
FOUND = {
    # by function: its slots, its reference, a case, the check that finds its fault, and words of the message
    "last_place_unwritten": (PLACES, lambda x: _rows(x).argmax(1), ROWS, "outputs written", "1 of 2 elements of place"),
    "place_wrong_in_third_rows": (PLACES, lambda x: _rows(x).argmax(1), ROWS, "values", "1 of 3 elements are wrong"),
    "place_wrong_if_misaligned": (PLACES, lambda x: _rows(x).argmax(1), ROWS, "alignment", "place with place 8 bytes"),
    "largest_and_place": (
        LARGEST, lambda x: (_rows(x).max(1), x.argmax(1)), ROWS, "NaN and infinity", "with dy[0] = nan, dx is",
    ),
    "counts_shared": (
        COUNTS, lambda x: np.bincount(x.ravel() % 4, minlength=4).astype(np.int32),
        Case({"x": (5, 4)}, dtypes={"x": "uint8"}), "threads", "counts of a call that another interrupts differs",
    ),
    "take_in_ints": (TAKES, lambda table, index: table[index], INDEX, "shapes", "with 2**31 elements"),
    "take_restores": (TAKES, lambda table, index: table[index], INDEX, "inputs unchanged", "writes to its input index"),
    "bools_past_the_end": (BOOLS, lambda x: x > 0, ROWS, "bounds", "writes past the end of y"),
    "conjugate": (
        SAME, lambda x: np.conj(x), Case({"x": (5, 4)}, dtypes={"x": "complex64"}), "values", "elements are wrong",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_a_fault_is_found(faulty, name):
    slots, reference, case, expected, words = FOUND[name]
    backward = None
    if name == "largest_and_place":
        gradient = {"inputs": ("dy", "place", "x"), "outputs": ("dx",), "same_spec_as": {"dx": "x"}}
        backward = faulty.op("largest_backward", cpu="largest_backward", workspace=False, **gradient)
    op = faulty.op(name, cpu=name, workspace=False, backward=backward, **slots)
    only = {"only": ["shapes"], "huge": True} if expected == "shapes" else {}
    report = check(op, reference, cases=[case], frameworks=["numpy"], dtypes=["float32"], quick=True, **only)
    assert [item.check for item in report.failures][:1] == [expected], report.render()
    assert words in report.failures[0].failure.message
