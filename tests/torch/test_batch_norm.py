"""The modules of batch normalization beside torch's own."""

from __future__ import annotations

import copy

import pytest
import torch

from aotops.frontends import torch as aotops

PAIRS = [
    (torch.nn.BatchNorm1d, aotops.BatchNorm1d, (6, 5)),
    (torch.nn.BatchNorm1d, aotops.BatchNorm1d, (6, 5, 7)),
    (torch.nn.BatchNorm2d, aotops.BatchNorm2d, (4, 5, 6, 7)),
    (torch.nn.BatchNorm3d, aotops.BatchNorm3d, (2, 5, 3, 4, 6)),
]
OPTIONS = [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.1, "momentum": 0.3}]


def pair(theirs, ours, options, activation=None):
    """Two modules with one state."""
    one = theirs(5, dtype=torch.float64, **options)
    for parameter in one.parameters():
        torch.nn.init.normal_(parameter)
    other = ours(5, dtype=torch.float64, activation=activation, **options)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    return one, other


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("theirs", "ours", "shape"), PAIRS)
@pytest.mark.parametrize("last", [False, True])
def test_a_module_is_as_torchs(theirs, ours, shape, options, last):
    """Results, gradients and running statistics of three calls in training, and one after."""
    one, other = pair(theirs, ours, options)
    for step in range(4):
        if step == 3:
            one.eval(), other.eval()
        x = torch.randn(shape, dtype=torch.float64)
        x = x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x
        leaves = [[v.clone().requires_grad_(), *m.parameters()] for v, m in ((x, one), (x, other))]
        y, got = one(leaves[0][0]), other(leaves[1][0])
        torch.testing.assert_close(got, y)
        assert got.stride() == x.stride() or x.dim() < 4 or not other.training
        dy = torch.randn_like(y)
        for a, b in zip(torch.autograd.grad(got, leaves[1], dy), torch.autograd.grad(y, leaves[0], dy), strict=True):
            torch.testing.assert_close(a, b)
    for name, value in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", [None, "relu", "silu", "hardswish"])
def test_a_residual_and_an_activation(activation, training, last):
    one, other = pair(torch.nn.BatchNorm2d, aotops.BatchNorm2d, {}, activation)
    one.train(training), other.train(training)
    x, residual = torch.randn(2, 4, 5, 6, 7, dtype=torch.float64)
    if last:
        x, residual = (t.contiguous(memory_format=torch.channels_last) for t in (x, residual))
    pairs = [[t.clone().requires_grad_() for t in (x, residual)] for _ in range(2)]
    y = one(pairs[0][0]) + pairs[0][1]
    y = getattr(torch.nn.functional, activation)(y) if activation else y
    got = other(*pairs[1])
    torch.testing.assert_close(got, y)
    assert got.stride() == x.stride() or not training
    dy = torch.randn_like(x)
    for a, b in zip(torch.autograd.grad(got, pairs[1], dy), torch.autograd.grad(y, pairs[0], dy), strict=True):
        torch.testing.assert_close(a, b)


ODD = {
    "no count": {"num_batches_tracked": None},
    "no count, no momentum": {"num_batches_tracked": None, "momentum": None},
    "a count of another dtype": {"num_batches_tracked": torch.tensor(0.0)},
    "not tracked any more": {"track_running_stats": False},
    "no statistics any more": {"running_mean": None, "running_var": None},
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("rows", [0, 6])
def test_the_state_is_as_torchs_whatever_was_set(odd, rows):
    """An empty batch is counted, and decays nothing."""
    one, other = pair(torch.nn.BatchNorm1d, aotops.BatchNorm1d, {})
    for module in (one, other):
        for name, value in copy.deepcopy(ODD[odd]).items():
            setattr(module, name, value)
    for training in (True, True, False):
        one.train(training), other.train(training)
        x = torch.randn(rows, 5, dtype=torch.float64)
        torch.testing.assert_close(other(x), one(x))
    torch.testing.assert_close(other.state_dict(), one.state_dict())


@pytest.mark.parametrize("missing", ["running_mean", "running_var"])
@pytest.mark.parametrize("training", [True, False])
def test_half_of_the_statistics_is_as_torchs(missing, training):
    one, other = (module.train(training) for module in pair(torch.nn.BatchNorm1d, aotops.BatchNorm1d, {}))
    said = []
    for module in (one, other):
        setattr(module, missing, None)
        try:
            said.append(module(torch.ones(3, 5, dtype=torch.float64)))
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
    assert said[0] == said[1] if isinstance(said[0], str) else torch.equal(*said)


def test_statistics_of_other_channels_are_refused():
    """One channel's would be broadcast."""
    for affine in (False, True):
        norm = aotops.BatchNorm1d(5, affine=affine)
        with pytest.raises(ValueError, match="batch_norm: "):
            norm(torch.randn(4, 1))
        assert not norm.running_mean.any()
        assert not norm.num_batches_tracked


def parametrized(norm):
    torch.nn.utils.parametrize.register_parametrization(norm, "weight", torch.nn.Softplus())


def plain_attributes(norm):
    """As sharded modules and old weight_norm have them."""
    weight, mean = norm.weight, norm.running_mean
    del norm.weight, norm.running_mean
    norm.weight, norm.running_mean = 2 * weight.detach(), mean + 1


def of_the_instance(norm):
    """Before the parameter of that name."""
    vars(norm)["weight"] = torch.full((5,), 3.0)


def of_the_class(norm):
    norm.__class__ = type("Own", (type(norm),), {"bias": property(lambda self: self.weight * 2)})


@pytest.mark.parametrize("change", [parametrized, plain_attributes, of_the_instance, of_the_class])
def test_what_a_module_has_is_read_where_torch_reads_it(change):
    x, said = torch.arange(15.0).view(3, 5), []
    for cls in (torch.nn.BatchNorm1d, aotops.BatchNorm1d):
        norm = cls(5)
        change(norm)
        said.append((norm(x), norm.running_mean, norm.running_var, norm.num_batches_tracked))
    torch.testing.assert_close(said[1], said[0])


def wants_gradient(norm):
    norm.running_mean.requires_grad_()


def of_inference(norm):
    with torch.inference_mode():
        norm.running_mean = torch.zeros(5)


def of_integers(norm):
    norm.running_var = torch.ones(5, dtype=torch.int64)


def negative_epsilon(norm):
    norm.eps = -1.0


def bool_epsilon(norm):
    norm.eps = True


UNUSUAL = (wants_gradient, of_inference, of_integers, negative_epsilon, bool_epsilon)


@pytest.mark.parametrize("change", UNUSUAL)
def test_odd_statistics_are_torchs(change):
    """Its results, or its error, its count and what it has written by then."""
    said = []
    for cls in (torch.nn.BatchNorm1d, aotops.BatchNorm1d):
        norm = cls(5)
        change(norm)
        try:
            y = norm(torch.arange(15.0).view(3, 5))
        except (RuntimeError, ValueError) as error:
            y = str(error)
        said.append((y, norm.running_mean, norm.running_var, norm.num_batches_tracked))
    for one, other in zip(*said, strict=True):
        assert one == other if isinstance(one, str) else torch.allclose(one, other)


def test_channels_that_share_statistics_are_refused():
    """Nothing is written before. torch's batch norm writes what its threads happen to leave."""
    for name in ("running_mean", "running_var"):
        norm = aotops.BatchNorm1d(5)
        setattr(norm, name, torch.ones(1).expand(5))
        before = {k: t.clone() for k, t in norm.named_buffers()}
        with pytest.raises(RuntimeError, match=f"{name} has a single memory location"):
            norm(torch.arange(15.0).view(3, 5))
        assert all(torch.equal(t, before[k]) for k, t in norm.named_buffers())


def test_what_is_refused():
    with pytest.raises(ValueError, match="activation is 'gelu', expected None, 'relu', 'silu' or 'hardswish'"):
        aotops.BatchNorm2d(5, activation="gelu")
    with pytest.raises(ValueError, match="more than one element for each channel"):
        aotops.BatchNorm1d(5)(torch.randn(1, 5))
    with pytest.raises(ValueError, match="4D"):
        aotops.BatchNorm2d(5)(torch.randn(2, 5))


def test_without_an_epsilon():
    """A constant channel is 0 / 0, as the constant row of a layer_norm; a sum over no elements is 0."""
    x = torch.ones(4, 5, dtype=torch.float64)
    y, _, var = aotops.batch_norm(x, eps=0.0)
    assert y.isnan().all()
    assert torch.nn.functional.layer_norm(x, (5,), eps=0.0).isnan().all()
    assert not var.any()
    weight = torch.ones(5, dtype=x.dtype, requires_grad=True)
    (dweight,) = torch.autograd.grad(aotops.batch_norm(x[:0], weight, eps=0.0)[0].sum(), weight)
    assert torch.equal(dweight, torch.zeros_like(weight))
    gradient = torch.func.grad(lambda w: aotops.batch_norm(x[:0], w, eps=0.0)[0].sum())
    for each in torch.func.jvp(gradient, (weight.detach(),), (weight.detach(),)):
        assert torch.equal(each, torch.zeros_like(weight))


def test_parameters_in_float32_beside_16_bits():
    x = torch.randn(8, 5, 3, 3).bfloat16()
    norm = aotops.BatchNorm2d(5)
    y = norm(x)
    assert y.dtype == torch.bfloat16
    wide = torch.nn.BatchNorm2d(5)
    torch.testing.assert_close(y.float(), wide(x.float()), rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(norm.running_var, wide.running_var)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", ["silu", "relu", "hardswish"])
def test_an_activation_in_place_may_follow(name, is_compiled):
    """The backward does not read y. Compiled, the norm, its running statistics and the activation are one graph."""

    def of(norm, statistics):
        def call(x, weight, bias, activate):
            y = norm(x, weight, bias)
            for running, of_batch in zip(statistics, y[1:], strict=False):
                running.lerp_(of_batch.detach(), 0.1)
            return activate(y[0] if isinstance(y, tuple) else y)

        return call

    activate = getattr(torch.nn.functional, name)
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    tensors = [t.requires_grad_() for t in (x, torch.randn(3, dtype=x.dtype), torch.randn(3, dtype=x.dtype))]
    module = aotops.BatchNorm1d(3, dtype=x.dtype)
    statistics = torch.zeros(3, dtype=x.dtype), torch.zeros(3, dtype=x.dtype)
    calls = of(aotops.batch_norm, statistics), of(lambda x, *_: module(x), ())
    ones = torch.ones(3, dtype=x.dtype), torch.zeros(3, dtype=x.dtype)
    for call, affine in zip(calls, (tensors[1:], ones), strict=True):
        run = torch.compile(call, backend="aot_eager", fullgraph=True) if is_compiled else call
        found = run(x, *tensors[1:], lambda y: activate(y, inplace=True))
        expected = activate(torch.nn.functional.batch_norm(x, None, None, *affine, True))
        dy = torch.randn_like(expected)
        torch.testing.assert_close(found, expected)
        theirs = torch.autograd.grad(expected, x, dy)
        torch.testing.assert_close(torch.autograd.grad(found, x, dy), theirs)
    assert statistics[0].abs().max() > 0
    torch.testing.assert_close(statistics[0], module.running_mean)
