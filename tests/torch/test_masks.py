"""Gradients that nobody takes are not computed: by the dispatcher's backward operators, under torch.compile and in a
second order too."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import gradcheck, gradgradcheck  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402
from aotops.frontends.torch_schema import maskable, schema, splitter  # noqa: E402
from aotops.ops import OPS  # noqa: E402

MASKED = {op.backward.name: op for op in OPS.values() if op.backward and maskable(op.backward)}
NEEDED = list(itertools.product([True, False], repeat=3))[:-1]
# Functions of three inputs that are all differentiated; a product, formulas and a composed one.
TERNARY = {
    "linear": (ours.linear, (3, 4), (5, 4), (5,)),
    "linear gelu": (lambda x, w, b: ours.linear(x, w, b, "gelu"), (3, 4), (2, 4), (2,)),
    "layer_norm": (lambda x, w, b: ours.layer_norm(x, 4, w, b), (3, 4), (4,), (4,)),
    "add_rms_norm": (lambda x, r, w: ours.add_rms_norm(x, r, 4, w), (3, 4), (3, 4), (4,)),
    "batch_norm": (ours.batch_norm, (3, 4), (4,), (4,)),
    "conv2d": (ours.conv2d, (1, 2, 3, 3), (2, 2, 2, 2), (2,)),
}


class Calls(TorchDispatchMode):
    """The calls of the library's backward operators below autograd: by name, the gradients wanted."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aotops::")
        if name in MASKED:
            self.seen.append((name, wanted_of(name, args)))
        return function(*args, **(kwargs or {}))


def wanted_of(name, args):
    backward = MASKED[name].backward
    return [*splitter(backward)(args)[2]]


def gradients(flags):
    """The gradients of a linear layer that the flags ask for."""
    return [name for name, flag in zip(("dx", "dweight", "dbias"), flags, strict=True) if flag]


def leaves(shapes, needed=None):
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [t.requires_grad_(need) for t, need in zip(made, needed or [True] * len(shapes), strict=True)]


def backward_call():
    """``linear_backward`` and its arguments."""
    x, weight, dy = leaves([(4, 3), (5, 3), (4, 5)], [False] * 3)
    return lambda *wanted: torch.ops.aotops.linear_backward(dy, x, weight, None, None, None, False, *wanted)


# ------------------------------------------------------------------------------------------------------------ operators


def test_backwards_with_several_gradients_have_a_mask():
    assert set(MASKED) == {
        "add_layer_norm_backward", "add_rms_norm_backward", "attention_backward", "batch_norm_backward",
        "batch_norm_relu_backward", "conv2d_backward",
        "layer_norm_backward", "linear_backward", "linear_cross_entropy_backward",
        "linear_cross_entropy_lse_backward", "lltm_backward", "matmul_backward", "qkv_rope_backward",
        "rms_norm_backward", "rope_backward",
    }  # fmt: skip
    assert "bool[2] wanted=[True, True]) -> (Tensor, Tensor)" in schema(OPS["matmul"].backward)
    assert "wanted" not in schema(OPS["swiglu"].backward)  # one loop computes both


@pytest.mark.parametrize("path", ["tensors", "addresses"])
def test_only_what_is_wanted_is_returned(path, python):
    """From C, and from the kernels in Python."""
    program = """
import itertools, sys, torch
sys.path.append(%r)
from test_masks import backward_call, ours
assert ours.tensors.READS_TENSORS == (%r == "tensors")
call = backward_call()
every = call()
for wanted in itertools.product([True, False], repeat=3):
    for got, full, want in zip(call(list(wanted)), every, wanted, strict=True):
        assert torch.equal(got, full) if want else got is None
for wrong in ([], [True], [True] * 4):
    try:
        call(wrong)
    except ValueError as error:
        print(error)
"""
    printed = python(program % (str(Path(__file__).parent), path), AOTOPS_CALL_PATH=path).splitlines()
    assert printed == [f"linear_backward: wanted has {n} values, expected 3, for dx, dweight, dbias" for n in (0, 1, 4)]


def test_what_is_not_wanted_has_no_memory():
    """In this product dweight is larger than everything else."""
    from torch.profiler import ProfilerActivity, profile

    x, weight, dy = torch.randn(1, 512), torch.randn(512, 512), torch.randn(1, 512)
    allocated = []
    for flags in ([True, True, True], [True, False, True]):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            torch.ops.aotops.linear_backward(dy, x, weight, None, None, None, False, flags)
        allocated.append(sum(max(event.cpu_memory_usage, 0) for event in profiled.events()))
    assert allocated[0] >= weight.nbytes > allocated[1]


def test_vmap():
    """Batched, an example at a time, and of no example."""
    call = torch.ops.aotops.linear_backward
    dy, x, weight = torch.randn(2, 4, 5), torch.randn(2, 4, 3), torch.randn(5, 3)

    def of(flags, i):
        return lambda dy, x: call(dy, x, weight, None, None, None, False, flags)[i]

    for i in range(3):
        flags = [j == i for j in range(3)]
        got = torch.vmap(of(flags, i))(dy, x)
        torch.testing.assert_close(got, torch.stack([of(flags, i)(*one) for one in zip(dy, x, strict=True)]))
        assert torch.vmap(of(flags, i))(dy[:0], x[:0]).shape == (0, *got.shape[1:])


# ---------------------------------------------------------------------------------------------------------- derivatives


@pytest.mark.parametrize("name", TERNARY)
def test_every_subset(name):
    """Both orders, where some inputs are constants."""
    function, *shapes = TERNARY[name]
    for needed in NEEDED:
        inputs = tuple(leaves(shapes, needed))
        assert gradcheck(function, inputs, check_batched_grad=True)
        assert gradgradcheck(function, inputs)


@pytest.mark.parametrize("needed", NEEDED)
def test_a_backward_that_is_differentiated_computes_no_more(needed):
    """It computes what needs a gradient. In the second order x's gradient is a product of the weight's gradient, and
    the weight's of x's; the sum of squares is differentiated once more."""
    inputs = leaves([(3, 4), (5, 4), (5,)], needed)
    moved = [t for t in inputs if t.requires_grad]
    y = ours.linear(*inputs)
    with Calls() as calls:
        first = torch.autograd.grad(y.square().sum(), moved, create_graph=True)
        assert calls.seen == [("linear_backward", gradients(needed))]
        torch.autograd.grad(sum(g.square().sum() for g in first), moved)
    of_products = [("linear_backward", ["dx", "dweight"])] if needed[0] and needed[1] else []
    assert calls.seen[1:] == [*of_products, ("linear_backward", gradients(needed))]


# ------------------------------------------------------------------------------------------------------------- compiled


def compiled_calls(function, *inputs):
    """The backward operators in the graph of the backward: by name, the gradients wanted."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    seen = []

    def record(graph, _):
        for node in graph.graph.nodes:
            name = str(node.target).removeprefix("aotops.").removesuffix(".default")
            if name in MASKED:
                seen.append((name, wanted_of(name, node.args)))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=record)
    torch._dynamo.reset()
    y = torch.compile(function, fullgraph=True, backend=backend)(*inputs)
    moved = [t for t in inputs if t.requires_grad]
    found = torch.autograd.grad(y.sum(), moved)
    for got, expected in zip(found, torch.autograd.grad(function(*inputs).sum(), moved), strict=True):
        torch.testing.assert_close(got, expected)
    return seen


@pytest.mark.parametrize(
    ("name", "shapes", "needed", "expected"),
    [
        ("linear", [(2, 3), (4, 3), (4,)], [True, True, True], ["dx", "dweight", "dbias"]),
        ("linear", [(2, 3), (4, 3)], [True, True], ["dx", "dweight"]),  # no bias
        ("linear", [(2, 3), (4, 3), (4,)], [True, False, True], ["dx", "dbias"]),  # a frozen weight
        ("conv2d", [(1, 2, 4, 4), (3, 2, 2, 2), (3,)], [False, True, True], ["dweight", "dbias"]),  # the first layer
        ("add_rms_norm", [(2, 3), (2, 3)], [False, True], ["dx"]),  # dresidual is dx
    ],
)
def test_the_graph_of_a_backward_has_the_mask(name, shapes, needed, expected):
    more = {"add_rms_norm": lambda x, residual: ours.add_rms_norm(x, residual, 3)[1]}
    function = more.get(name, getattr(ours, name))
    assert compiled_calls(function, *leaves(shapes, needed)) == [(f"{name}_backward", expected)]


def test_inductor_runs_a_backward_with_a_mask():
    def function(x, weight, bias):
        return ours.linear(torch.relu(x), weight, bias, "gelu").square()

    for needed in ([True, False, True], [False, True, False]):
        inputs = leaves([(2, 3), (4, 3), (4,)], needed)
        moved = [t for t in inputs if t.requires_grad]
        torch._dynamo.reset()
        found = torch.autograd.grad(torch.compile(function, fullgraph=True)(*inputs).sum(), moved)
        for got, expected in zip(found, torch.autograd.grad(function(*inputs).sum(), moved), strict=True):
            torch.testing.assert_close(got, expected)
