"""replace in modules whose forward calls torch's attention by its name."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402


@pytest.fixture(autouse=True)
def forgotten():
    """Dynamo counts what it has compiled of one code, which all modules of a form share."""
    yield
    torch._dynamo.reset()


NAME = "scaled_dot_product_attention"


class Attention(nn.Module):
    def __init__(self, rate=0.0):
        super().__init__()
        self.qkv, self.out, self.rate = nn.Linear(16, 48), nn.Linear(16, 16), rate

    def parts(self, x):
        return self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)


class ByF(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.parts(x)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.rate if self.training else 0.0)
        return self.out(F.relu(y.transpose(1, 2).flatten(2)))


class ByFunctional(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.parts(x)
        return self.out(functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


class ByTorch(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.parts(x)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(torch.tanh(y.transpose(1, 2).flatten(2)))


class ByNn(Attention):
    def forward(self, x, mask=None):
        y = nn.functional.scaled_dot_product_attention(*self.parts(x), mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Without(Attention):
    def forward(self, x):
        return self.out(F.relu(self.parts(x)[0].flatten(1)[:, :16]))


EVERY = pytest.mark.parametrize("cls", [ByF, ByFunctional, ByTorch, ByNn])


def pair(cls, **options):
    torch.manual_seed(0)
    theirs = cls(**options).double()
    mine = copy.deepcopy(theirs)
    found = [row.module for row in ours.replace(mine, also="attention") if row.operator == "attention"]
    assert found == [cls.__name__]
    return theirs, mine


def run(module, x, *others):
    x = x.clone().requires_grad_()
    y = module(x, *others)
    return y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])


def assert_alike(theirs, mine, *given):
    for a, b in zip(run(mine, *given), run(theirs, *given), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@EVERY
def test_results_and_gradients(cls):
    theirs, mine = pair(cls)
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    assert_alike(theirs, mine, x)
    assert_alike(theirs, mine, x, torch.randn(2, 5, 5, dtype=torch.float64))
    with torch.profiler.profile() as profile:
        mine(x)
    assert any(event.name.startswith("aotops::") and "attention" in event.name for event in profile.events())
    assert getattr(functional, NAME) is getattr(F, NAME)
    assert getattr(functional, NAME) is not ours.scaled_dot_product_attention
    torch._dynamo.reset()
    for compiled in (torch.compile(m, backend="aot_eager", fullgraph=True) for m in (theirs, mine)):
        torch.testing.assert_close(compiled(x), theirs(x), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(copy.deepcopy(mine)(x), theirs(x), rtol=1e-6, atol=1e-8)
    ours.restore(mine)
    assert type(mine) is cls


def test_calls_that_the_library_does_not_take_are_torchs():
    """Such are masks of another dtype, and dropout of everything."""
    theirs, mine = pair(ByF)
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    for mask in (torch.zeros(5, 5), torch.zeros(5, 4, dtype=torch.float64), torch.zeros(5, 5, dtype=torch.int64)):
        found = []
        for module in (theirs, mine):
            try:
                found.append(module(x, mask))
            except RuntimeError as error:
                found.append(str(error))
        assert found[0] == found[1] if isinstance(found[0], str) else torch.equal(*found)
    theirs, mine = pair(ByF, rate=1.0)
    torch.testing.assert_close(mine(x), theirs(x))


def test_which_modules_call_it():
    def reasons(module, **options):
        return {row.module: (row.operator, row.reason) for row in ours.replace(module, **options)}

    assert reasons(ByF())["ByF"] == (None, "attention: also='attention' replaces it")
    assert not any("attention" in reason for _, reason in reasons(nn.Sequential(Without()), also=()).values())
    other = type("Other", (ByF,), {"forward": elsewhere(ByF.forward)})
    assert reasons(other(), also="attention")["Other"] == (None, "attention: its F is not a known one")


def elsewhere(function):
    """The function where F means something else."""
    return type(function)(function.__code__, {**function.__globals__, "F": ours}, "forward", function.__defaults__)
