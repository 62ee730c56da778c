"""Calls of replaced modules, whose arguments are read in C: they see whatever changed after ``replace``, and leave what
is not plain to Python."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.utils import parametrize, prune  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402
from aotops.frontends.torch import (  # noqa: E402
    replaced_calls,
    replaced_children,
    replaced_classes,
    replaced_forwards,
    replaced_products,
)
from aotops.frontends.torch.tensors import READS_TENSORS  # noqa: E402

CUDA = torch.cuda.is_available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="torch finds no GPU")]
ON = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=gpu)])
plain_calls = pytest.mark.skipif(not READS_TENSORS, reason="this torch has no plain calls")


class LlamaNorm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(n)), 1e-6

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class Mlp(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(n, 2 * n), nn.GELU(), nn.Linear(2 * n, n)

    def forward(self, x):
        x = self.fc1(x)
        x = self.act(x)
        x = self.fc2(x)
        return x


MODULES = {
    "LayerNorm": lambda: nn.LayerNorm(8),
    "LayerNorm without bias": lambda: nn.LayerNorm(8, bias=False),
    "LayerNorm without weight": lambda: nn.LayerNorm((3, 8), elementwise_affine=False),
    "RMSNorm": lambda: nn.RMSNorm(8, eps=1e-5),
    "RMSNorm without eps": lambda: nn.RMSNorm(8),
    "Llama's": lambda: LlamaNorm(8),
    "GELU": lambda: nn.GELU("tanh"),
    "Mlp": lambda: Mlp(8),
}
IN_PYTHON = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(3),
    "BatchNorm1d without running statistics": lambda: nn.BatchNorm1d(3, affine=False, track_running_stats=False),
    "BatchNorm1d and ReLU": lambda: nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()),
}
EVERY = pytest.mark.parametrize("make", [*MODULES.values(), *IN_PYTHON.values()], ids=[*MODULES, *IN_PYTHON])
ROWS = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)  # of the last axis, in any mode


def pair(make, where="cpu", dtype=torch.float64):
    torch.manual_seed(0)
    theirs = make().to(where, dtype)
    mine = copy.deepcopy(theirs)
    assert ours.replace(mine).rows[0].operator
    return theirs, mine


def close(a, b, computed=torch.float64):
    """``computed``: the dtype in which a mode computes results of other dtypes."""
    assert (a is None) is (b is None)
    if a is not None:
        tolerance = {2: 3e-2, 4: 1e-4, 8: 1e-6}[min(a.dtype.itemsize, computed.itemsize)]
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        assert a.requires_grad is b.requires_grad


def compare(
    theirs, mine, *views, where="cpu", dtype=torch.float64, mode=contextlib.nullcontext, computed=torch.float64
):
    """Results and gradients."""
    for view in views or (lambda x: x,):
        results = []
        for module in (theirs, mine):
            torch.manual_seed(1)
            x = torch.randn(2, 3, 8, device=where, dtype=dtype, requires_grad=True)
            with mode():
                y = module(view(x))
            inputs = [x, *(p for p in module.parameters() if p.requires_grad)]
            dy = torch.randn(y.shape, device=where).to(y)
            grads = torch.autograd.grad(y, inputs, dy, allow_unused=True) if y.requires_grad else ()
            results.append((y, *grads))
        for a, b in zip(*results, strict=True):
            close(a, b, computed)


@plain_calls
@ROWS
def test_a_plain_call_is_served_in_c(make, monkeypatch):
    _, mine = pair(make)
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    mine(x)
    for name in ("layer_norm", "rms_norm", "gelu"):
        monkeypatch.setattr(ours.functional, name, lambda *_: pytest.fail("served in Python"))
    y = mine(x)
    assert y.grad_fn is not None


@ON
@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_results_and_gradients(make, where, dtype):
    compare(
        *pair(make, where, dtype),
        *(lambda x: x, lambda x: x.mT.contiguous().mT, lambda x: x[:0], lambda x: x.detach()),
        *(lambda x: x[:1, :1].expand(2, 3, 8), lambda x: torch.cat((x, x), -1)[..., :8]),
        where=where,
        dtype=dtype,
    )


@ON
@ROWS
def test_modes(make, where):
    theirs, mine = pair(make, where, torch.float32)
    alike = functools.partial(compare, theirs, mine, where=where, dtype=torch.float32)
    for mode in (torch.no_grad, torch.inference_mode):
        alike(mode=mode)
    # a float32 bias has the gradient of a product of bfloat16, which is rounded to that
    for view in (lambda x: x, lambda x: x.bfloat16()):
        alike(view, mode=lambda: torch.autocast(where, torch.bfloat16), computed=torch.bfloat16)
    mine.eval()  # small ones in training are the original's on a GPU
    with torch.profiler.profile() as profile:
        alike()
    assert any(event.name.startswith("aotops::") for event in profile.events())


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="torch finds no GPU")
@pytest.mark.parametrize(
    ("make", "limits", "node", "is_one_kernel"),
    [
        (nn.LayerNorm, replaced_calls.LARGE_NORM, "LayerNormBackward", True),
        (nn.RMSNorm, replaced_calls.LARGE_NORM, "RmsNormBackward", True),
        (lambda n: nn.GELU(), replaced_calls.LARGE_GELU, "GeluBackward", True),
        (LlamaNorm, {"elements": 1024, "rows": 128}, "RmsNormBackward", False),
    ],
)
def test_small_calls_in_training_on_a_gpu_are_the_originals(make, limits, node, is_one_kernel):
    """Where the original is one kernel."""
    rows, elements = limits["rows"], limits["elements"]
    few = min(rows, elements // 8) - 1
    for shape in ((few, 8), (rows, 8), (elements // 16, 16), (2, elements // 2)):
        theirs, mine = pair(lambda n=shape[1]: make(n), "cuda", torch.float32)
        x = torch.randn(shape, device="cuda", requires_grad=True)
        for training in (True, False):
            is_left = is_one_kernel and training and shape[0] == few
            expected = theirs(x).grad_fn.name() if is_left else node
            assert mine.train(training)(x).grad_fn.name() == expected


@plain_calls
def test_what_many_kernels_compute_is_served_at_any_size():
    """Small calls in training are torch's on a GPU where it has one kernel for them."""

    class Gelu(nn.Module):
        def forward(self, x):
            return F.gelu(x, approximate="tanh")

    class FastGelu(nn.Module):
        def forward(self, x):
            return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))

    kinds = (nn.LayerNorm, nn.RMSNorm, nn.GELU, Gelu, FastGelu, LlamaNorm)
    found = [replaced_calls.call_of(kind, *replaced_forwards.learn(kind)).struct for kind in kinds]
    norm, gelu = (tuple(limits.values()) for limits in (replaced_calls.LARGE_NORM, replaced_calls.LARGE_GELU))
    limits = [(struct.device, struct.elements, struct.rows) for struct in found]
    assert limits == [norm, norm, gelu, gelu, (0, 0, 0), (0, 0, 0)]


def test_the_page_has_the_sizes():
    page = " ".join((Path(__file__).parents[2] / "docs/replace.md").read_text().split())
    norm, gelu = replaced_calls.LARGE_NORM, replaced_calls.LARGE_GELU
    power = {n: f"2^{n.bit_length() - 1}" for n in (norm["elements"], gelu["elements"])}
    assert all(n.bit_count() == 1 for n in power)
    assert gelu["rows"] == gelu["elements"]
    norms = f"less than {norm['rows']} rows and {power[norm['elements']]} elements"
    assert f"{norms}, and a GELU of less than {power[gelu['elements']]}" in page
    assert f"eager, in training, from {replaced_calls.PRODUCT['fewest_rows']} rows on:" in page


@pytest.fixture
def products_on_the_cpu(monkeypatch):
    """What is served of products alone on a GPU in 16 bits is served here, in classes of this test's own."""
    monkeypatch.setattr(replaced_classes, "_MADE", {})
    monkeypatch.setitem(replaced_forwards._CHECKS, "matrix", lambda *_: "")
    for name, value in {"device": 1, "product_bits": 64, "fewest_rows": 4}.items():
        monkeypatch.setitem(replaced_calls.PRODUCT, name, value)


def is_served(module, x):
    y = module(x)
    return y.grad_fn is not None and y.grad_fn.name() == "LinearBackward"


@plain_calls
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_alone(bias, products_on_the_cpu):
    theirs, mine = pair(lambda: nn.Linear(8, 16, bias=bias))
    compare(
        *(theirs, mine, lambda x: x, lambda x: x.mT.contiguous().mT, lambda x: x[:0], lambda x: x[0, 0]),
        *(lambda x: x.detach(), lambda x: x[:1, :1].expand(2, 3, 8), lambda x: x.reshape(3, 2, 1, 8)),
    )
    for mode in (torch.no_grad, torch.inference_mode):
        compare(theirs, mine, mode=mode)
    for frozen in ("weight", "bias")[: 1 + bias]:
        for module in (theirs, mine):
            getattr(module, frozen).requires_grad_(False)
        compare(theirs, mine)
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    assert not is_served(mine, x)  # torch saves no x for a frozen weight
    mine.requires_grad_()
    assert is_served(mine, x)
    again = mine.register_forward_hook(lambda module, args, y: 2 * y)
    torch.testing.assert_close(mine(x), 2 * theirs(x))
    again.remove()
    checked = torch.utils.checkpoint.checkpoint(mine, x, use_reentrant=False)
    torch.testing.assert_close(checked, theirs(x))
    with torch.profiler.profile():  # the forward is computed again, and saves as many tensors
        checked.sum().backward()


@pytest.mark.parametrize("make", [nn.GELU, lambda: nn.LayerNorm(8), lambda: nn.RMSNorm(8, eps=1e-5)])
def test_a_second_argument_is_refused(make):
    module, x = make(), torch.randn(4, 8)
    ours.replace(module)
    for more in (x, None):
        with pytest.raises(TypeError, match="positional argument"):
            module(x, more)


@plain_calls
def test_products_alone_that_are_the_originals(products_on_the_cpu):
    theirs, mine = pair(lambda: nn.Linear(8, 16), dtype=torch.float32)
    x = torch.randn(2, 3, 8, requires_grad=True)
    assert is_served(mine, x)
    assert not is_served(mine, x[:1])  # few rows
    assert not is_served(mine, x.mT.contiguous().mT)
    assert not is_served(mine.eval(), x)
    mine.train()
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_served(mine, x)
        assert mine(x).dtype is torch.bfloat16
    mine.weight = nn.Parameter(mine.weight.detach().t().contiguous().t())
    assert not is_served(mine, x)
    mine.weight = nn.Parameter(mine.weight.detach()[:, :7].contiguous())
    assert not is_served(mine, x[..., :7].contiguous())
    assert not is_served(pair(lambda: nn.Linear(8, 12), dtype=torch.float32)[1], x)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        theirs(x[..., :7])
    mine.weight = nn.Parameter(theirs.weight.detach())
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        mine(x[..., :7].contiguous())


@plain_calls
def test_how_large_uneven_products_alone_are(products_on_the_cpu, monkeypatch):
    x = torch.randn(16, 8, requires_grad=True)
    monkeypatch.setitem(replaced_calls.PRODUCT, "uneven_weight", 15 * 8)
    uneven = pair(lambda: nn.Linear(8, 15), dtype=torch.float32)[1]
    assert is_served(uneven, x)
    assert is_served(uneven.eval(), x)
    assert not is_served(uneven, x[:3])
    assert not is_served(pair(lambda: nn.Linear(8, 14), dtype=torch.float32)[1], x)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="torch finds no GPU")
def test_products_alone_on_a_gpu():
    def replaced(dtype=torch.bfloat16, device="cuda", sizes=(64, 128)):
        module = nn.Linear(*sizes, device=device, dtype=dtype)
        return module, ours.replace(module)

    theirs, mine = pair(lambda: nn.Linear(8, 16), "cuda", torch.bfloat16)
    compare(theirs, mine, lambda x: x, lambda x: x.repeat(16, 1, 1), where="cuda", dtype=torch.bfloat16)
    module, record = replaced()
    x = torch.randn(8, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    assert record.rows[0].operator == "linear"
    assert is_served(module, x)
    assert not is_served(module, x[:7])
    assert not is_served(module.eval(), x)
    with torch.autocast("cuda", torch.float16):
        assert module.train()(x).dtype is torch.float16
    for others in ({"dtype": torch.float32}, {"device": "cpu"}, {"sizes": (64, 63)}):
        module, record = replaced(**others)
        assert record.rows[0].reason == replaced_products.ALIKE


@ROWS
def test_transforms_and_double_backward(make):
    theirs, mine = pair(make)
    x, t = torch.randn(2, 2, 3, 8, dtype=torch.float64)
    for transform in (
        lambda m: torch.func.jvp(m, (x,), (t,))[1],
        lambda m: torch.func.vmap(m)(x[:, None].expand(2, 3, 3, 8)),
        lambda m: torch.func.grad(lambda x: m(x).square().sum())(x),
        lambda m: torch.func.functional_call(m, {n: 2 * p for n, p in m.named_parameters()}, x),
        lambda m: torch.utils.checkpoint.checkpoint(m, x, use_reentrant=False),
        lambda m: torch.fx.symbolic_trace(m)(x),
        lambda m: torch.compile(m, backend="eager", fullgraph=True)(x),
        lambda m: copy.deepcopy(m)(x),
    ):
        torch.testing.assert_close(transform(theirs), transform(mine), rtol=1e-6, atol=1e-6)
    results = []
    for module in (theirs, mine):
        given = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(module(given).square().sum(), given, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), given)[0])
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


class Double(nn.Module):
    def forward(self, weight):
        return 2 * weight


def shadow(module):
    """An attribute comes before a parameter of its name."""
    if module._parameters.get("weight") is not None:
        module.__dict__["weight"] = torch.full_like(module.weight, 3.0)


def exchange(module):
    for m in module.modules():
        if m._parameters.get("weight") is not None:
            m.weight = nn.Parameter(m.weight.detach() + 1)


def prune_weights(module):
    for m in module.modules():
        if m._parameters.get("weight") is not None:
            prune.l1_unstructured(m, "weight", 0.5)


def parametrize_weights(module):
    for m in [m for m in module.modules() if m._parameters.get("weight") is not None]:
        parametrize.register_parametrization(m, "weight", Double())


def freeze(module):
    next(module.parameters(), torch.empty(0)).requires_grad_(False)


def hook(module):
    for m in module.modules():
        m.register_forward_hook(lambda module, args, y: y + 1)


def hook_before(module):
    getattr(module, "fc1", module).register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def change_numbers(module):
    for name in ("eps", "variance_epsilon"):
        if isinstance(getattr(module, name, None), float):
            setattr(module, name, 0.5)
    if isinstance(module, nn.GELU):
        module.approximate = "none"


def own_forward(module):
    for m in module.children():
        forward = m.forward
        m.forward = lambda x, forward=forward: forward(x) * 2


def narrow(module):
    """A parameter of another dtype than x, where the original takes it."""
    if isinstance(module, (nn.RMSNorm, LlamaNorm)):
        module.weight.data = module.weight.data.float()


def replicate(module):
    """As data parallelism does: the parameters are attributes."""
    for m in module.modules():
        for name, p in list(m._parameters.items()):
            del m._parameters[name]
            m.__dict__[name] = p if p is None else p.detach() * 2


CHANGES = (
    *(shadow, exchange, prune_weights, parametrize_weights, freeze, hook, hook_before, change_numbers),
    *(own_forward, replicate, narrow),
)


@EVERY
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_after_replace_is_seen(make, change):
    theirs, mine = pair(make)
    compare(theirs, mine)
    for module in (theirs, mine):
        change(module)
    compare(theirs, mine)


@EVERY
def test_global_hooks(make):
    theirs, mine = pair(make)
    with nn.modules.module.register_module_forward_hook(lambda module, args, y: y * 2):
        compare(theirs, mine)
    compare(theirs, mine)


@EVERY
def test_errors_are_those_of_the_original(make):
    theirs, mine = pair(make)
    for wrong in (torch.randn(2, 3, 7), torch.randn(2, 3, 8), torch.ones(2, 3, 8).long(), None):
        found = []
        for module in (theirs, mine):
            try:
                found.append(module(wrong))
            except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
                found.append(error)
        both_fail = all(isinstance(each, Exception) for each in found)
        both_work = all(isinstance(each, torch.Tensor) for each in found)
        assert both_fail or both_work
        if both_work:
            torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def learned_epsilon(module):
    for name in ("eps", "variance_epsilon"):
        if hasattr(module, name):
            delattr(module, name)
            setattr(module, name, nn.Parameter(torch.tensor(0.5)))


def epsilon_of_a_bool(module):
    for name in ("eps", "variance_epsilon"):
        if hasattr(module, name):
            setattr(module, name, True)


def epsilon_of_one_axis(module):
    for name in ("eps", "variance_epsilon"):
        if hasattr(module, name):
            setattr(module, name, torch.tensor([0.5]))


def result_or_error(module, x):
    try:
        return module(x)
    except (RuntimeError, TypeError) as error:
        return str(error)


@EVERY
@pytest.mark.parametrize("change", [learned_epsilon, epsilon_of_a_bool, epsilon_of_one_axis])
def test_an_epsilon_that_is_no_number_is_the_originals(make, change):
    theirs, mine = pair(make)
    for module in (theirs, mine):
        change(module)
    x = torch.ones(2, 3, 8, dtype=torch.float64)
    if isinstance(expected := result_or_error(theirs, x), str):
        assert result_or_error(mine, x) == expected
    else:
        compare(theirs, mine)


@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(8), lambda: nn.RMSNorm(8), lambda: LlamaNorm(8)])
def test_an_epsilon_of_numpy_is_a_number(make):
    theirs, mine = pair(make)
    for module in (theirs, mine):
        setattr(module, "eps" if hasattr(module, "eps") else "variance_epsilon", np.float64(0.5))
    compare(theirs, mine)
    assert mine(torch.ones(3, 8, dtype=torch.float64)).grad_fn.name() in ("LayerNormBackward", "RmsNormBackward")


@EVERY
def test_what_inference_made_is_read_where_the_original_reads_it(make):
    """An RMS norm of several operators keeps none of it."""
    theirs, mine = pair(make)
    with torch.inference_mode():
        x = torch.randn(2, 3, 8, dtype=torch.float64)
    expected, y = result_or_error(theirs, x), result_or_error(mine, x)
    if isinstance(expected, str):
        assert y == expected
        return
    close(y, expected)
    if y.requires_grad:
        grads = [torch.autograd.grad(z.sum(), [*m.parameters()]) for z, m in ((y, mine), (expected, theirs))]
        for a, b in zip(*grads, strict=True):
            close(a, b)


@plain_calls
def test_bare_in_c_and_in_python(monkeypatch):
    module = nn.Linear(2, 2)
    changes = [
        lambda: module.register_forward_hook(print),
        lambda: module.register_forward_pre_hook(print),
        lambda: module.register_full_backward_hook(print),
        lambda: module.register_full_backward_pre_hook(print),
        lambda: nn.modules.module.register_module_forward_hook(print),
        lambda: nn.modules.module.register_module_forward_pre_hook(print),
        lambda: nn.modules.module.register_module_full_backward_hook(print),
        lambda: nn.modules.module.register_module_full_backward_pre_hook(print),
    ]
    in_c = replaced_children._IN_C
    for change in changes:
        for implementation in (in_c, None):
            monkeypatch.setattr(replaced_children, "_IN_C", implementation)
            assert replaced_children.is_bare(module) is True
            with change():
                assert replaced_children.is_bare(module) is False
    module.forward = print
    assert in_c(module) is False


def frames_of(run):
    found = []
    gc.disable()  # a collection may call functions of others'
    sys.setprofile(lambda frame, event, arg: found.append(frame.f_code.co_name) if event == "call" else None)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


@plain_calls
@pytest.mark.skipif(sys.version_info < (3, 12), reason="CPython makes frames of these calls")
@pytest.mark.parametrize("make", [nn.GELU, lambda: nn.LayerNorm(8)])
def test_a_call_has_no_frames(make):
    _, mine = pair(make)
    x = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    mine(x)
    assert frames_of(lambda: mine(x)) == ["<lambda>"]
    assert frames_of(lambda: mine(input=x))[1:3] == ["__call__", "_wrapped_call_impl"]


@plain_calls
@pytest.mark.skipif(sys.version_info < (3, 12), reason="CPython makes frames of these calls")
def test_what_autocast_may_widen_is_the_originals():
    _, mine = pair(lambda: nn.LayerNorm(8), dtype=torch.bfloat16)
    x = torch.randn(2, 8, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert frames_of(lambda: mine(x))[:2] == ["<lambda>", "forward"]


@EVERY
def test_other_ways_of_calls_are_seen(make, monkeypatch):
    theirs, mine = pair(make)
    if isinstance(mine, Mlp):
        mine, theirs = mine.act, theirs.act
    if isinstance(mine, nn.Sequential):
        mine, theirs = mine[0], theirs[0]
    ways = nn.Module._wrapped_call_impl, nn.Module._call_impl
    for name, way in zip(("__call__", "_call_impl"), ways, strict=True):
        for cls in (nn.Module, type(theirs)):
            with monkeypatch.context() as patched:
                patched.setattr(cls, name, lambda self, x, way=way: 2 * way(self, x))
                compare(theirs, mine)
    for name in ("forward", "_call_impl"):
        with monkeypatch.context() as patched:
            for cls in (type(mine), type(theirs)):
                way = getattr(cls, name)
                patched.setattr(cls, name, lambda self, x, way=way: 2 * way(self, x))
            compare(theirs, mine)
    for module in (theirs, mine):
        module._call_impl = lambda x, module=module: 3 * type(module)._call_impl(module, x)
    compare(theirs, mine)
    for module in (theirs, mine):
        del module._call_impl
        module.compile(backend="eager")
        module._compiled_call_impl = lambda x, call=module._compiled_call_impl: 4 * call(x)
    compare(theirs, mine)


# ------------------------------------------------------------------------------------------- what is the original's


class Centered(nn.Linear):
    """Its weight is another than its parameter."""

    weight = property(lambda self: self._parameters["weight"] - self._parameters["weight"].mean(1, keepdim=True))


class DoubledLinear(nn.Linear):
    def __getattr__(self, name):
        return super().__getattr__(name) * (2 if name == "weight" else 1)


class DoubledMlp(Mlp):
    def __getattr__(self, name):
        found = super().__getattr__(name)
        return (lambda x: 2 * found(x)) if name == "fc2" else found


class DoubledNorm(LlamaNorm):
    def __getattr__(self, name):
        return super().__getattr__(name) * (2 if name == "weight" else 1)


class WideNorm(LlamaNorm):
    def __getattribute__(self, name):
        return 0.5 if name == "variance_epsilon" else super().__getattribute__(name)


def of_class(module, cls):
    for m in module.modules():
        if type(m) is cls.__base__:
            m.__class__ = cls
    return module


@pytest.mark.parametrize("cls", [Centered, DoubledLinear, DoubledMlp, DoubledNorm, WideNorm])
def test_classes_that_find_attributes_in_another_way(cls):
    make = MODULES["Mlp"] if "Norm" not in cls.__name__ else functools.partial(LlamaNorm, 8)
    torch.manual_seed(0)
    theirs = of_class(make().double(), cls)
    mine = copy.deepcopy(theirs)
    ours.replace(mine)
    x = torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(mine(x), theirs(x), rtol=1e-6, atol=1e-6)


class Packed(torch.Tensor):
    """A weight that each of torch's functions unpacks, as a quantized one."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            plain = [a.as_subclass(torch.Tensor) / 4 if isinstance(a, cls) else a for a in args]
            return func(*plain, **(kwargs or {}))


@EVERY
def test_a_weight_of_anothers_class_is_the_originals(make):
    theirs, mine = pair(make)
    for module in (theirs, mine):
        for m in module.modules():
            if (weight := m._parameters.get("weight")) is not None:
                m._parameters["weight"] = weight.detach().as_subclass(Packed)
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    torch.testing.assert_close(mine(x), theirs(x), rtol=1e-6, atol=1e-6)


@ROWS
def test_tensors_of_more_axes_than_the_library_takes(make):
    theirs, mine = pair(make)
    x = torch.randn(*[1] * 39, 3, 8, dtype=torch.float64)
    torch.testing.assert_close(mine(x), theirs(x), rtol=1e-6, atol=1e-6)
