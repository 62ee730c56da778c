"""A backward writes its gradient over a saved tensor that nobody else will read, and over no other."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch.autograd.graph import saved_tensors_hooks  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from aotops.frontends import torch as ours  # noqa: E402
from aotops.frontends.torch import overwrite, private  # noqa: E402

SHAPE = 130, 2050
DY = torch.tensor(0.375)
assert 4 * SHAPE[0] * SHAPE[1] > overwrite.FROM


def made():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SHAPE, generator=generator).requires_grad_()
    return x, torch.randint(SHAPE[1], SHAPE[:1], generator=generator)


def expected():
    x, target = made()
    return torch.autograd.grad(F.cross_entropy(x, target), x, DY)[0]


def close(*gradients):
    for gradient in gradients:
        torch.testing.assert_close(gradient, expected(), rtol=1e-5, atol=1e-9)


@pytest.mark.skipif(
    not ours.tensors.READS_TENSORS or not private.CAN_OVERWRITE,
    reason="this torch cannot tell who reads a tensor",
)
@pytest.mark.parametrize("reads", [0, 1])
def test_a_plain_backward_needs_no_second_tensor(reads):
    """Also after the saved tensor was looked at."""
    x, target = made()
    loss = ours.cross_entropy(x, target)
    address = loss.grad_fn.saved_tensors[-1].data_ptr()
    for _ in range(reads):
        assert loss.grad_fn.saved_tensors[-1].sum().isfinite()
    loss.backward(DY)
    assert x.grad.data_ptr() == address
    close(x.grad)


def test_a_small_gradient_has_its_own_memory():
    x = torch.zeros(2, 3, requires_grad=True)
    loss = ours.cross_entropy(x, torch.tensor([1, 2]))
    address = loss.grad_fn.saved_tensors[-1].data_ptr()
    loss.backward()
    assert x.grad.data_ptr() != address


@pytest.mark.parametrize("create", [False, True])
def test_a_graph_that_is_kept(create):
    x, target = made()
    loss = ours.cross_entropy(x, target)
    first = torch.autograd.grad(loss, x, DY, retain_graph=True, create_graph=create)[0]
    second = torch.autograd.grad(loss, x, DY, retain_graph=True)[0]
    third = torch.autograd.grad(loss, x, DY, retain_graph=create)[0]
    close(first.detach(), second, third)
    if create:
        assert torch.autograd.grad(first.square().sum(), x)[0].any()


@pytest.mark.parametrize(
    "keep",
    [lambda t: t, lambda t: t[1:], lambda t: t.detach(), lambda t: t.untyped_storage(), lambda t: t.numpy()],
    ids=["itself", "view", "detached", "storage", "array"],
)
def test_what_the_caller_has_kept(keep):
    x, target = made()
    loss = ours.cross_entropy(x, target)
    slope = loss.grad_fn.saved_tensors[-1]
    before, address, kept = slope.clone(), slope.data_ptr(), keep(slope)
    del slope
    loss.backward(DY)
    assert x.grad.data_ptr() != address
    close(x.grad)
    kept = torch.tensor([]).set_(kept).view(SHAPE) if isinstance(kept, torch.UntypedStorage) else torch.as_tensor(kept)
    assert torch.equal(kept, before[-len(kept) :])


@pytest.mark.skipif(not private.CAN_OVERWRITE, reason="this torch cannot tell who reads a tensor")
@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("more", [-1, 1])
def test_a_count_of_references_that_differs(which, more, monkeypatch):
    """As an interpreter without a global lock may give it: more than a backward's, or fewer."""
    counted = overwrite._references

    def differing(saved, i):
        found = list(counted(saved, i))
        found[which] += more * (saved[i].numel() > 1)  # not that of the probe
        return tuple(found)

    monkeypatch.setattr(overwrite, "_references", differing)
    x, target = made()
    loss = ours.cross_entropy(x, target)
    address = loss.grad_fn.saved_tensors[-1].data_ptr()
    loss.backward(DY)
    assert x.grad.data_ptr() != address
    close(x.grad)


@pytest.mark.parametrize("in_backward", [False, True])
def test_what_a_hook_has_packed(in_backward):
    """The hook keeps the tensor; its hooks are in force in the backward or not."""
    x, target = made()
    packed = []

    def pack(t):
        packed.append((t, t.clone()))
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        loss = ours.cross_entropy(x, target)
        if in_backward:
            loss.backward(DY)
    if not in_backward:
        loss.backward(DY)
    close(x.grad)
    assert packed
    for t, before in packed:
        assert torch.equal(t, before)


def test_what_is_computed_again():
    """The backward of a checkpoint, the first of two."""
    x, target = made()
    loss = checkpoint(ours.cross_entropy, x, target, use_reentrant=False)
    close(torch.autograd.grad(loss, x, DY, retain_graph=True)[0], torch.autograd.grad(loss, x, DY)[0])
    checkpoint(ours.cross_entropy, x, target, use_reentrant=True).backward(DY)
    close(x.grad)


def test_what_another_process_may_have():
    x, target = made()
    loss = ours.cross_entropy(x, target)
    slope = loss.grad_fn.saved_tensors[-1]
    slope.untyped_storage().share_memory_()  # as a queue of torch.multiprocessing does
    address = slope.data_ptr()
    del slope
    loss.backward(DY)
    assert x.grad.data_ptr() != address
    close(x.grad)
