"""Attributes whose values change with each call, such as an annealed label_smoothing: they are not bound, and the
dispatcher runs them."""

from __future__ import annotations

from collections import Counter

import pytest

from aotops.ops import OPS
from aotops.testing.frameworks import requested

if "torch" not in requested():
    pytest.skip("torch is not under test", allow_module_level=True)

import torch

from aotops.frontends import torch as ours

pytestmark = pytest.mark.skipif(not ours.registered.in_c, reason="this torch has no kernels of the dispatcher in C")


@pytest.fixture
def many_values(monkeypatch):
    """As after many values of every operator's attributes."""
    monkeypatch.setattr(ours.eager, "_first_values", Counter(dict.fromkeys(OPS.values(), ours.eager._VALUES)))


def misses() -> int:
    return ours.eager.eager.cache_info().misses


def smoothed(label_smoothing: float, **options):
    x = torch.linspace(-2, 3, 60).reshape(5, 12).requires_grad_()
    y = ours.cross_entropy(x, torch.arange(5), label_smoothing=label_smoothing, **options)
    y.sum().backward()
    return y.detach(), x.grad


def test_few_values_are_bound_at_once_and_more_are_not(monkeypatch):
    monkeypatch.setattr(ours.eager, "_first_values", Counter())
    before = misses()
    for i in range(100):
        smoothed(0.4 + i / 1000)
    assert misses() - before <= ours.eager._VALUES
    before = misses()
    for _ in range(2 * ours.eager._USES):  # one of them, often
        smoothed(0.45)
    assert misses() - before == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(3, 7), (33, 129), (2, 5000)], ids=str)
def test_the_bits_are_those_of_a_bound_value(many_values, dtype, shape):
    generator = torch.Generator().manual_seed(0)
    x, z = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    target = torch.randint(shape[1], shape[:1], generator=generator)
    calls = {
        "mean": lambda: ours.cross_entropy(x, target, label_smoothing=0.123),
        "none": lambda: ours.cross_entropy(x, target, reduction="none", label_smoothing=0.124),
        "add": lambda: ours.add(x, z, alpha=0.321),
        "broadcast": lambda: ours.add(x, z[0], alpha=0.322),
    }
    for name, call in calls.items():
        results = []
        for _ in range(2 * ours.eager._USES + 2):
            with torch.no_grad():
                alone = call()
            y = call()
            gradients = torch.autograd.grad(y.sum(), [x, z], allow_unused=True)
            results.append((alone, y.detach(), *(g for g in gradients if g is not None)))
        for each in results[1:]:
            assert all(map(torch.equal, each, results[0])), name


def test_errors_and_autocast_are_those_of_a_bound_value(many_values):
    with pytest.raises(ValueError, match="cross_entropy: label_smoothing is 2"):
        smoothed(2.0)
    with pytest.raises(TypeError, match="cross_entropy: x has dtype int64, expected float16"):
        ours.cross_entropy(torch.ones(2, 3).long(), torch.ones(2).long(), label_smoothing=0.31)
    x, target = torch.randn(2, 3), torch.tensor([0, 2])
    before = misses()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ours.cross_entropy(x.bfloat16(), target, label_smoothing=0.33)
        expected = ours.cross_entropy(x.bfloat16(), target, dtype="float32", label_smoothing=0.33)
    assert y.dtype == torch.float32
    assert torch.equal(y, expected)
    assert misses() == before


def test_a_large_call_is_bound(many_values):
    """Its backward writes the gradient over a residual (Op.overwrites), which the dispatcher's does not."""
    before = misses()
    x = torch.zeros(2, ours.KEEP_RESIDUALS_FROM // 2, requires_grad=True)
    ours.cross_entropy(x, torch.zeros(2, dtype=torch.int64), label_smoothing=0.41).backward()
    assert misses() - before == 1


def test_logits_may_be_changed_after_a_call_that_is_not_bound(many_values):
    gradients = []
    for changes in (False, True):
        x = torch.linspace(-2, 3, 60).reshape(5, 12).requires_grad_()
        logits = x * 1
        y = ours.cross_entropy(logits, torch.arange(5), label_smoothing=0.377)
        if changes:
            logits.mul_(2)
        y.backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
