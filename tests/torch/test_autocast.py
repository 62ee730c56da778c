"""torch.autocast casts a weight as often as for torch's own operators, and shares its casts with them."""

from __future__ import annotations

import contextlib

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402

LOW = torch.bfloat16
CASTS = (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)


class Casts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.n += function in CASTS
        return function(*args, **(kwargs or {}))


def on():
    return torch.autocast("cpu", LOW)


def leaves():
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(s, generator=generator) for s in ((3, 4), (4, 4), (4,)))
    return x.to(LOW), weight.requires_grad_(), bias.requires_grad_()


def twice(linear, x, *parameters):
    return linear(linear(x, *parameters), *parameters)


def in_one_region(linear, x, *parameters):
    with on():
        return twice(linear, x, *parameters)


def in_nested_regions(linear, x, *parameters):
    with on():
        with on():
            y = linear(x, *parameters)
        return linear(y, *parameters)


def in_two_regions(linear, x, *parameters):
    with on():
        y = linear(x, *parameters)
    with on():
        return linear(y, *parameters)


def without_a_cache(linear, x, *parameters):
    with torch.autocast("cpu", LOW, cache_enabled=False):
        return twice(linear, x, *parameters)


def of_a_batch_at_a_time(linear, x, *parameters):
    with on():
        return sum(linear(row, *parameters) for row in x[:, None])


def recomputed(linear, x, *parameters):
    with on():
        return checkpoint(twice, linear, x.clone().requires_grad_(), *parameters, use_reentrant=False)


USES = {
    f.__name__.replace("_", " "): (f, n)
    for f, n in (
        (in_one_region, 2), (in_nested_regions, 2), (in_two_regions, 4), (without_a_cache, 4),
        (of_a_batch_at_a_time, 2), (recomputed, 2),
    )
}  # fmt: skip


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", USES)
def test_casts_are_as_many_as_torchs(name, grad):
    """Casts of a weight and a bias, and of their gradients in the backward."""
    use, forward = USES[name]
    found = []
    for linear in (ours.linear, F.linear):
        x, weight, bias = leaves()
        with Casts() as casts, contextlib.nullcontext() if grad else torch.no_grad():
            y = use(linear, x, weight, bias)
            counts = [casts.n]
            if grad:
                y.sum().backward()
        found.append((*counts, casts.n, y, weight.grad, bias.grad))
    if ours.tensors.READS_TENSORS:
        assert found[0][:2] == found[1][:2]
        assert found[0][0] == forward
    for got, expected in zip(found[0][2:], found[1][2:], strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)  # the sums are rounded in another order


def test_a_cast_of_torchs_is_used():
    x, weight, bias = leaves()
    with on():
        F.linear(x, weight, bias)
        with Casts() as casts:
            ours.linear(x, weight, bias)
            ours.matmul(x, weight)
    assert casts.n == 0 or not ours.tensors.READS_TENSORS


def test_a_weight_that_changed_is_cast_again():
    """torch's own operators use the cast of the values before."""
    x, weight, _ = leaves()
    with on():
        ours.linear(x, weight)
        with torch.no_grad():
            weight.mul_(2)
        torch.testing.assert_close(ours.linear(x, weight), x @ weight.to(LOW).T, rtol=2e-2, atol=2e-2)


def test_a_cast_without_a_gradient_is_not_used_for_one():
    """As one that a validation in the region left."""
    x, weight, bias = leaves()
    with on():
        with torch.no_grad():
            ours.linear(x, weight, bias)
        ours.linear(x, weight, bias).sum().backward()
    assert weight.grad is not None
    assert bias.grad is not None


def test_a_cast_that_fails_in_c_is_made_in_python():
    """Here there is no memory for it; the error is torch's: no exception of C++ is let through."""
    weight = torch.nn.Parameter(torch.empty(1, 1)).data.expand(1 << 40, 1 << 20).requires_grad_()
    with on(), pytest.raises(RuntimeError, match=r"memory|alloc"):
        ours.autocast.cast(weight, LOW)


@pytest.mark.parametrize(
    "wrong", [lambda t: None, lambda t: t, lambda t: (t * 2).to(LOW), lambda t: t.detach().to(LOW)]
)
def test_a_cache_that_does_not_cast_as_expected_is_not_used(monkeypatch, wrong):
    if not ours.tensors.READS_TENSORS:
        pytest.skip("this torch's cache is not used")
    assert ours.autocast._caster() is not torch.Tensor.to
    monkeypatch.setattr(ours.autocast, "_from_cache", lambda cached, t, dtype: wrong(t))
    assert ours.autocast._caster() is torch.Tensor.to


def test_compiled_casts_are_torchs():
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    found = []
    for linear in (ours.linear, F.linear):
        seen = []

        def record(graph, _, seen=seen):
            seen.append(sum(node.target in CASTS for node in graph.graph.nodes))
            return make_boxed_func(graph.forward)

        torch._dynamo.reset()
        step = torch.compile(in_one_region, fullgraph=True, backend=aot_autograd(fw_compiler=record))
        step(linear, *leaves()).sum().backward()
        found.append(seen)
    assert found[0] == found[1]
    assert found[0][0] > 0


# ------------------------------------------------------------------------------------------------------- cross_entropy


@pytest.mark.parametrize("dtype", [LOW, torch.float16, torch.float32, torch.float64], ids=str)
def test_the_loss_of_16_bits_is_in_float32_without_a_cast(dtype):
    """By the public function, by name, with and without a mode, and compiled: as with the attribute outside."""
    x, target = torch.randn(5, 9, generator=torch.Generator().manual_seed(0)).to(dtype), torch.tensor([1, 2, 8, 0, 3])
    wide = dtype.itemsize == 2

    def by_name(x, target):
        return torch.ops.aotops.cross_entropy(x, target, None, -100, "mean", 0.0, None, 0.0, 0.0)[0]

    def watched(x, target):
        with Casts() as casts:
            loss = ours.cross_entropy(x, target)
        assert casts.n == 0
        return loss

    torch._dynamo.reset()
    expected = ours.cross_entropy(x, target, dtype="float32" if wide else None)
    compiled = torch.compile(ours.cross_entropy, backend="aot_eager", fullgraph=True)
    gradients = []
    for function in (ours.cross_entropy, watched, by_name, compiled):
        leaf = x.clone().requires_grad_()
        with on():
            loss = function(leaf, target)
        gradients.append(torch.autograd.grad(loss, leaf)[0])
        assert torch.equal(loss, expected)
        assert (loss.dtype, gradients[-1].dtype) == (torch.float32 if wide else dtype, dtype)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
    with on():
        torch.testing.assert_close(expected, F.cross_entropy(x, target))
        if wide:  # what is given holds
            assert ours.cross_entropy(x, target, dtype=str(dtype).removeprefix("torch.")).dtype == dtype


# ------------------------------------------------------------------------------------------------------------- refusals

INTEGERS = {
    "softmax": (1, ()),
    "layer_norm": (1, (3,)),
    "rms_norm": (1, (3,)),
    "add_layer_norm": (2, (3,)),
    "batch_norm": (1, ()),
    "swiglu": (2, ()),
    "gelu": (1, ()),
    "linear": (2, ()),
    "matmul": (2, ()),
    "attention": (3, ()),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_what_is_refused_is_refused_under_autocast_with_the_same_error(name):
    """Autocast finds no dtype to cast to where no tensor is floating."""
    n, rest = INTEGERS[name]
    x, said = torch.ones((1, 1, 3, 3) if name == "attention" else (3, 3), dtype=torch.int64), []
    for enabled in (False, True):
        with torch.autocast("cpu", LOW, enabled=enabled), pytest.raises(TypeError, match=f"{name}: ") as error:
            getattr(ours, name)(*[x] * n, *rest)
        said.append(str(error.value))
    assert said[0] == said[1]
